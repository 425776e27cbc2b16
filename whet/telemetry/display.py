"""Progress display of a run: one live panel in a terminal, short plain lines elsewhere.

Text that a model may have written is never read as markup, and its control characters are escaped.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from whet.telemetry.heartbeat import alive
from whet.telemetry.metrics import find_metric, format_metric

PANEL_WIDTH = 92
SPARK_WIDTH = 36
SPARK_LEVELS = "▁▂▃▄▅▆▇█"
NUM_BINS = 240
"""Bins of a series over the whole run, so that memory and drawing time do not grow with its length."""

REFRESH_HZ = 4
PLAIN_LINES = 40
PLAIN_SECONDS = 30.0
LONG_PHASE_S = 3.0
"""A phase that has lasted this long is named on the panel; shorter ones would only flicker."""
HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"})


class Display(Protocol):
    """A program's progress display. A context manager."""

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show the metrics of a step.

        Args:
            step: Optimizer steps done.
            values: Metrics; only headline metrics are shown.
        """
        ...

    def start(self, done: int) -> None:
        """Take the pace from now on over all of the work, not over the last steps: portions come in bursts.

        Args:
            done: What was done before, by an earlier run.
        """
        ...

    def begin(self, phase: str, detail: Callable[[], str] | None = None) -> None:
        """Name what is done from now on, so that a long step shows that it is alive.

        Args:
            phase: What, such as 'sample'.
            detail: Says how far it is; called from another thread.
        """
        ...

    def note(self, text: str, *, warning: bool = False) -> None:
        """Print lines that stay, such as a validation result or a warning."""
        ...

    def close(self) -> None:
        """Restore the terminal; further calls do nothing."""
        ...

    def __enter__(self) -> Display: ...

    def __exit__(self, *_: object) -> None: ...


def open_display(
    title: str,
    total_steps: int,
    headline: tuple[str, ...],
    *,
    enabled: bool = True,
    unit: str = "step",
    first_step: int = 0,
) -> Display:
    """Open the display that suits standard output.

    Args:
        title: Program and recipe, such as 'rl · countdown'.
        total_steps: Steps of the whole run.
        headline: Metrics to show, the most important first.
        enabled: False on all ranks but one: show nothing.
        unit: Unit of the progress count.
        first_step: Steps that were done before, by a run that is resumed.

    Returns:
        A live panel on a terminal; plain lines if output is not a terminal, in CI, under NO_COLOR, or without Unicode.

    Raises:
        ValueError: If a headline metric is not declared, or total_steps < 1.
    """
    found = _open(title, total_steps, headline, enabled=enabled, unit=unit)
    found.start_at(first_step)
    return found


def _open(
    title: str, total_steps: int, headline: tuple[str, ...], *, enabled: bool, unit: str
) -> LiveDisplay | PlainDisplay:
    if not enabled:
        return PlainDisplay(title, total_steps, headline, stream=None, unit=unit)
    if _is_step_told:
        return PlainDisplay(title, total_steps, headline, stream=sys.stdout, unit=unit, has_steps=False)
    dumb = os.environ.get("CI") or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    if sys.stdout.isatty() and unicode and not dumb:
        return LiveDisplay(title, total_steps, headline)
    return PlainDisplay(title, total_steps, headline, stream=sys.stdout, unit=unit)


_is_step_told = False


@contextmanager
def steps_told_elsewhere() -> Iterator[None]:
    """Suppress the lines of steps: the caller prints each step."""
    global _is_step_told
    before, _is_step_told = _is_step_told, True
    try:
        yield
    finally:
        _is_step_told = before


def advancing(display: Display, done: int = 0) -> Callable[[int], None]:
    """Return a function that advances a display by a count, for work in irregular portions: each a sign of life.

    Args:
        display: The display.
        done: What an earlier run has done already.
    """
    display.start(done)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        alive()
        display.update(done, {})

    return advance


class LiveDisplay:
    """One panel, redrawn in place: progress, headline metrics and their sparklines over the run so far."""

    def __init__(
        self, title: str, total_steps: int, headline: tuple[str, ...], *, console: Console | None = None
    ) -> None:
        self._title = escape_controls(title)
        self._progress = _Progress(total_steps, headline)
        self._lock = threading.Lock()
        self._phase: _Phase | None = None
        self._console = console or Console()
        # The refresh thread keeps the clock going through a long step; update() only stores numbers.
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=REFRESH_HZ)
        self._live.start()

    def start_at(self, step: int) -> None:
        """Note how many steps a resumed run has done."""
        self._progress.step = step

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show the metrics of a step at the next refresh."""
        with self._lock:
            self._progress.observe(step, values)

    def start(self, done: int) -> None:
        """Take the pace from now on over all of the work."""
        with self._lock:
            self._progress.start(done)

    def begin(self, phase: str, detail: Callable[[], str] | None = None) -> None:
        """Show the phase below the bar while it lasts."""
        with self._lock:
            self._phase = _Phase(phase, detail)

    def note(self, text: str, *, warning: bool = False) -> None:
        """Print lines above the panel."""
        mark = Text(" ▲ ", style="yellow") if warning else Text(" · ", style="dim")
        body = Text(escape_controls(text), style="yellow" if warning else "")
        grid = Table.grid(padding=0)
        grid.add_row(mark, body)
        self._console.print(grid)

    def close(self) -> None:
        """Draw the last state and release the terminal."""
        self._live.stop()

    def __enter__(self) -> LiveDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _render(self) -> RenderableType:
        with self._lock:
            now = time.monotonic()
            body: list[RenderableType] = [self._progress_row(now)]
            if self._phase is not None and now - self._phase.began >= LONG_PHASE_S:
                body.append(Text(self._phase.text(now), style="dim"))
            if self._progress.headline:
                body += [Text(), self._metric_rows()]
        return Panel(
            Group(*body),
            title=Text(f" {self._title} ", style="bold"),
            title_align="left",
            box=box.ROUNDED,
            border_style="dim",
            padding=(1, 2),
            width=min(PANEL_WIDTH, self._console.width),
        )

    def _progress_row(self, now: float) -> Table:
        progress = self._progress
        row = Table.grid(padding=(0, 2, 0, 0), expand=True)
        row.add_column(ratio=1)
        for _ in range(2):
            row.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(
            progress.total_steps,
            progress.step,
            style="dim",
            complete_style="cyan",
            finished_style="green",
            pulse_style="dim",
        )
        row.add_row(
            bar, Text(f"{progress.step:,} / {progress.total_steps:,}"), Text(progress.times(now), style="dim")
        )
        return row

    def _metric_rows(self) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True, min_width=8)
        table.add_column(no_wrap=True)
        table.add_column(style="dim", no_wrap=True)
        width = max(8, min(SPARK_WIDTH, self._console.width - 52))
        for index, name in enumerate(self._progress.headline):
            series = self._progress.series(name)
            first = index == 0
            extent = (
                f"{format_metric(name, min(series))} … {format_metric(name, max(series))}"
                if len(series) > 1
                else ""
            )
            table.add_row(
                Text(metric_label(name)),
                Text(format_metric(name, self._progress.values.get(name)), style="bold" if first else ""),
                Text(sparkline(series, width), style="cyan" if first else "dim"),
                Text(extent),
            )
        return table


class PlainDisplay:
    """A short line at the first and last step, every fortieth of the run, and after 30 silent seconds."""

    def __init__(
        self,
        title: str,
        total_steps: int,
        headline: tuple[str, ...],
        *,
        stream: TextIO | None = None,
        unit: str = "step",
        has_steps: bool = True,
    ) -> None:
        """Open it.

        Args:
            title: Program and recipe.
            total_steps: Steps of the whole run.
            headline: Metrics to show.
            stream: Destination of the lines; None shows nothing.
            has_steps: Whether steps have lines.
        """
        self._progress = _Progress(total_steps, headline)
        self._stream, self._has_steps = stream, has_steps
        self._shown_step: int | None = None
        self._shown_at = 0.0
        self._unit = unit
        self._phase: _Phase | None = None
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None
        ending = "" if total_steps == 1 else "es" if unit.endswith(("s", "x")) else "s"
        self._print(f"{title}  {total_steps:,} {unit}{ending}")

    def start_at(self, step: int) -> None:
        """Note how many steps a resumed run has done."""
        self._progress.step = step

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Print a line when one is due."""
        self._progress.observe(step, values)
        now = time.monotonic()
        every = max(1, self._progress.total_steps // PLAIN_LINES)
        due = (
            self._shown_step is None
            or step == self._progress.total_steps
            or step % every == 0
            or now - self._shown_at >= PLAIN_SECONDS
        )
        if self._has_steps and due and step != self._shown_step:
            self._shown_step, self._shown_at = step, now
            current = self._progress.values
            shown = [
                f"{metric_label(name)} {format_metric(name, current[name])}"
                for name in self._progress.headline
                if name in current
            ]
            self._print(
                "  ".join(
                    [
                        f"{self._unit} {step:,}/{self._progress.total_steps:,}",
                        *shown,
                        self._progress.times(now),
                    ]
                )
            )

    def start(self, done: int) -> None:
        """Take the pace from now on over all of the work."""
        self._progress.start(done)

    def begin(self, phase: str, detail: Callable[[], str] | None = None) -> None:
        """Name the phase after 30 silent seconds, then each time after twice as many."""
        self._phase = _Phase(phase, detail)
        if self._watcher is None and self._stream is not None:
            self._watcher = threading.Thread(target=self._watch, name="display", daemon=True)
            self._watcher.start()

    def note(self, text: str, *, warning: bool = False) -> None:
        """Print lines."""
        self._print(f"warning: {text}" if warning else text)

    def close(self) -> None:
        """Stop telling of phases; every line is already flushed.

        The thread is waited for: one that frees the model's tensors while the interpreter ends would abort it.
        """
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()
        self._phase = None

    def _watch(self) -> None:
        told, due = self._phase, PLAIN_SECONDS
        while not self._closed.wait(PLAIN_SECONDS / 30):
            now, phase = time.monotonic(), self._phase
            if phase is None:
                continue
            if phase is not told:
                told, due = phase, PLAIN_SECONDS
            if now - phase.began >= due:
                due *= 2
                step, total = self._progress.step + 1, self._progress.total_steps
                self._print(f"{self._unit} {min(step, total):,}/{total:,}  {phase.text(now)}")

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = self._stream.encoding or "utf-8"
        line = escape_controls(text).encode(encoding, "backslashreplace").decode(encoding)
        try:
            print(line, file=self._stream, flush=True)
        except BrokenPipeError:
            if not _stop_unread(self._stream):
                raise


def _stop_unread(stream: TextIO) -> bool:
    """Handle a closed pipe (`| head`) as a lost terminal: a training saves first, and continues under `nohup`.

    Return False if the program has no handler for that."""
    hangup = getattr(signal, "SIGHUP", None)
    handler = signal.getsignal(hangup) if hangup is not None else signal.SIG_DFL
    if hangup is None or handler in (signal.SIG_DFL, None):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # what is printed from now on must not fail
    if handler is not signal.SIG_IGN:
        print("whet: the output is a closed pipe", file=sys.stderr, flush=True)
        os.kill(os.getpid(), hangup)
    return True


class _Phase:
    """What is done at present, and since when."""

    def __init__(self, name: str, detail: Callable[[], str] | None) -> None:
        self.began = time.monotonic()
        self._name, self._detail = name, detail

    def text(self, now: float) -> str:
        """Write it as 'sample: 84 of at most 256 tokens, 0:31'."""
        told = f" {self._detail()}," if self._detail is not None else ""
        return f"{self._name}:{told} {clock(now - self.began)}"


EARLY = 64
"""Portions after which there is a pace, or an eighth of them all: as many as recipes of one's own decode together."""


class _Progress:
    """State of a run: step, pace, current headline values and their binned history."""

    def __init__(self, total_steps: int, headline: Sequence[str]) -> None:
        if total_steps < 1:
            raise ValueError(f"total_steps must be >= 1, got {total_steps}")
        for name in headline:
            find_metric(name)
        self.total_steps = total_steps
        self.headline = tuple(headline)
        self.step = 0
        self.values: dict[str, float] = {}
        self._bins: dict[str, dict[int, tuple[float, int]]] = {name: {} for name in headline}
        self._started = time.monotonic()
        self._pace: deque[tuple[float, int]] = deque(maxlen=32)
        self._first: tuple[float, int] | None = None

    def start(self, done: int) -> None:
        """Measure the pace from now on, with so much done already.

        Portions that end together (completions of a batch) have no pace of their own: the last 32 may have taken no
        time, or only those that take longest.
        """
        self.step, self._first = done, (time.monotonic(), done)

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self.step = step
        if not self._pace or step != self._pace[-1][1]:
            self._pace.append((time.monotonic(), step))
        index = step * NUM_BINS // max(self.total_steps, NUM_BINS)
        for name in self.headline:
            value = values.get(name)
            if value is None:
                continue
            self.values[name] = value
            if abs(value) < float("inf"):  # also False for NaN
                total, count = self._bins[name].get(index, (0.0, 0))
                self._bins[name][index] = (total + value, count + 1)

    def series(self, name: str) -> list[float]:
        """Return the history of a headline metric, oldest first, as means of at most NUM_BINS bins."""
        return [total / count for _, (total, count) in sorted(self._bins[name].items())]

    def times(self, now: float) -> str:
        """Return the time left at the pace of the last steps, or since `start`; without one, and at the end, the time
        elapsed."""
        elapsed = f"{clock(now - self._started)} elapsed"
        points = [*(() if self._first is None else (self._first,)), *self._pace]
        if self.step >= self.total_steps or len(points) < 2:
            return elapsed
        (first_at, first), (last_at, last) = points[0], points[-1]
        # Completions that are decoded together end together: the first two of seventy say nothing of the others' pace.
        least = 1 if self._first is None else min(EARLY, (self.total_steps - first) // 8)
        if last - first < max(1, least):
            return elapsed
        left = (last_at - first_at) / (last - first) * (self.total_steps - last) - (now - last_at)
        return f"{clock(max(0.0, left))} left"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as one line of block characters between their minimum and maximum.

    Args:
        values: Finite values, oldest first.
        width: Maximum width; longer series are averaged.

    Returns:
        At most `width` characters; a constant series is a line at half height.
    """
    num_cells = min(width, len(values))
    edges = [index * len(values) // num_cells for index in range(num_cells + 1)] if num_cells else [0]
    cells = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(cells, default=0.0), max(cells, default=0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        return SPARK_LEVELS[3] * num_cells
    return "".join(SPARK_LEVELS[min(7, int(8 * (cell - low) / (high - low)))] for cell in cells)


def metric_label(name: str) -> str:
    """Write a metric name in words, without its group."""
    return name.split("/", 1)[1].replace("_", " ").replace("/", " ")


def escape_controls(text: str) -> str:
    r"""Escape characters that a terminal or text layout would interpret, and lone surrogates (\x.., \u....).

    Args:
        text: Any text.

    Returns:
        The text with control, format, unassigned and private characters escaped, except new lines and tabs.
    """
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in HIDDEN_CATEGORIES
        else _escape(character)
        for character in text
    )


def one_line(text: str) -> str:
    """Write text in one line: white space becomes single spaces, and what a terminal would interpret is escaped."""
    return escape_controls(" ".join(text.split()))


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def clock(seconds: float) -> str:
    """Write a duration as 0:07, 12:31 or 3:05:09."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
