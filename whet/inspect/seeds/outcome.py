"""Progress and results of the seeds of one recipe: a live table, then summary.json, report.md and spread.png."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.live import Live
from rich.table import Table
from rich.text import Text

from whet.inspect.seeds.spread import Curve, Spread, draw_spread, first_reach, spread
from whet.telemetry.display import PLAIN_SECONDS, SPARK_WIDTH, escape_controls, sparkline
from whet.telemetry.metrics import format_metric

Status = Literal["waiting", "running", "done", "killed", "failed", "interrupted"]
COLOURS: dict[Status, str] = {
    "waiting": "dim",
    "running": "cyan",
    "done": "green",
    "killed": "yellow",
    "failed": "red",
    "interrupted": "yellow",
}


@dataclass(slots=True)
class Outcome:
    """State of one seed.

    Attributes:
        number: The seed.
        curve: Its logged values.
        num_steps: Steps of a full run; None if unknown.
        status: Its status.
        reason: Why it was killed, or how it failed; else ''.
    """

    number: int
    curve: Curve
    num_steps: int | None = None
    status: Status = "waiting"
    reason: str = ""

    @property
    def state(self) -> str:
        """Status and reason in one line."""
        return f"{self.status}: {self.reason}" if self.reason else self.status

    @property
    def progress(self) -> str:
        """Steps done, of how many."""
        return f"{self.curve.last_step}/{self.num_steps}" if self.num_steps else str(self.curve.last_step)

    def best(self, sign: int) -> float:
        """Return the best single value; NaN before the first."""
        return sign * max((sign * value for value in self.curve.values), default=math.nan)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """The metric that seeds are compared by.

    Attributes:
        metric: Name.
        window: Values of the rolling mean; the final number of a seed is its last one.
        sign: 1 when more is better, -1 when less is.
        threshold: Level whose first step and time are reported; None for none.
    """

    metric: str
    window: int
    sign: int
    threshold: float | None

    def show(self, value: float | None) -> str:
        """Format a value by the metric's format."""
        return format_metric(self.metric, value)


class Board:
    """Shows all seeds: a redrawn table in a terminal, occasional lines elsewhere. A context manager."""

    def __init__(self, title: str, measure: Measure) -> None:
        self._title, self._measure = title, measure
        self._states: dict[int, str] = {}
        self._shown_at = time.monotonic()
        dumb = os.environ.get("CI") or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        unicode = (sys.stdout.encoding or "").lower().startswith("utf")
        is_live = sys.stdout.isatty() and unicode and not dumb
        self._live = Live(auto_refresh=False, transient=True) if is_live else None

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, outcomes: Sequence[Outcome]) -> None:
        """Show the state of all seeds; outside a terminal only news, and all running ones every 30 seconds."""
        if self._live is not None:
            self._live.update(self._table(outcomes), refresh=True)
            return
        is_due = time.monotonic() - self._shown_at >= PLAIN_SECONDS
        for outcome in outcomes:
            if outcome.state != self._states.get(outcome.number, "waiting"):
                self._states[outcome.number] = outcome.state
            elif not (is_due and outcome.status == "running"):
                continue
            line = f"seed {outcome.number}  step {outcome.progress}  {self._mean(outcome)}  {outcome.state}"
            encoding = sys.stdout.encoding or "utf-8"
            print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
        self._shown_at = time.monotonic() if is_due else self._shown_at

    def _mean(self, outcome: Outcome) -> str:
        return self._measure.show(outcome.curve.final(self._measure.window))

    def _table(self, outcomes: Sequence[Outcome]) -> Table:
        measure = self._measure
        table = Table(title=Text(f"{self._title}: {measure.metric}"), box=SIMPLE_HEAD, title_justify="left")
        for name in ("seed", "step", "last", "best", f"mean of {measure.window}"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("curve", no_wrap=True, style="cyan", min_width=SPARK_WIDTH // 2)
        table.add_column("status", overflow="fold")
        for outcome in outcomes:
            values = outcome.curve.values
            table.add_row(
                str(outcome.number),
                outcome.progress,
                measure.show(values[-1] if values else None),
                measure.show(outcome.best(measure.sign)),
                self._mean(outcome),
                sparkline(values, SPARK_WIDTH // 2),
                Text(outcome.state, style=COLOURS[outcome.status]),
            )
        return table


def write_outcomes(folder: Path, outcomes: Sequence[Outcome], title: str, measure: Measure) -> str:
    """Write summary.json, report.md and spread.png.

    Args:
        folder: Output folder.
        outcomes: One per seed.
        title: Title of the report.
        measure: The metric that seeds are compared by.

    Returns:
        The report's tables as text.
    """
    seeds = {str(outcome.number): _facts(outcome, measure) for outcome in outcomes}
    finals = [facts["final"] for facts in seeds.values()]
    of_finished = [facts["final"] for facts in seeds.values() if facts["status"] == "done"]
    spreads = {"all": spread(finals), "finished": spread(of_finished)}
    content = asdict(measure) | {"seeds": seeds} | {name: s and asdict(s) for name, s in spreads.items()}
    content["num_killed"] = sum(outcome.status == "killed" for outcome in outcomes)
    (folder / "summary.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")

    parts = [
        f"{measure.metric}; final is the mean of the last {measure.window} values, best a single one.",
        _seed_table(outcomes, seeds, measure),
    ]
    reasons = [f"seed {outcome.number} {outcome.state}" for outcome in outcomes if outcome.reason]
    parts += ["```text\n" + escape_controls("\n".join(reasons)) + "\n```"] if reasons else []
    parts += [_spread_table(spreads["all"], spreads["finished"], measure), *_remarks(outcomes)]
    text = "\n\n".join(parts)
    curves = {f"seed {outcome.number}": outcome.curve for outcome in outcomes}
    stopped = {f"seed {outcome.number}" for outcome in outcomes if outcome.status != "done"}
    picture = folder / "spread.png"
    draw_spread(picture, curves, stopped=stopped, window=measure.window, threshold=measure.threshold)
    image = "\n\n![all seeds, their median and range](spread.png)" if picture.exists() else ""
    (folder / "report.md").write_text(f"# {title}\n\n{text}{image}\n", encoding="utf-8")
    return text


def _facts(outcome: Outcome, measure: Measure) -> dict[str, Any]:
    """Return a seed's entry in summary.json; None if nothing was logged."""
    curve, window, sign, threshold = outcome.curve, measure.window, measure.sign, measure.threshold
    reached = None if threshold is None else first_reach(curve, threshold, window=window, sign=sign)
    step, seconds = reached or (None, None)
    return {
        "status": outcome.status,
        "reason": outcome.reason,
        "step": curve.last_step,
        "final": curve.final(window) if curve.values else None,
        "best": outcome.best(sign) if curve.values else None,
        "threshold_step": step,
        "threshold_seconds": seconds if seconds is None else round(seconds, 3),
    }


def _seed_table(outcomes: Sequence[Outcome], seeds: Mapping[str, Mapping[str, Any]], measure: Measure) -> str:
    head = ["seed", "status", "step", "final", "best"]
    if measure.threshold is not None:
        head += [f"step at {measure.show(measure.threshold)}", "seconds"]
    rows = [head]
    for outcome, facts in zip(outcomes, seeds.values(), strict=True):
        numbers = [measure.show(facts["final"]), measure.show(facts["best"])]
        row = [str(outcome.number), outcome.status, outcome.progress, *numbers]
        row += [str(facts["threshold_step"] or "–"), format(facts["threshold_seconds"] or math.nan, ".1f")]
        rows.append([cell.replace("nan", "–") for cell in row[: len(head)]])
    return _table(rows)


def _spread_table(everyone: Spread | None, finished: Spread | None, measure: Measure) -> str:
    rows = [["final over", "seeds", "mean", "std", "min", "median", "max"]]
    for name, found in (("all that started", everyone), ("those that finished", finished)):
        facts = asdict(found) if found else {}
        numbers = [measure.show(facts.get(column)) for column in rows[0][2:]]
        rows.append([name, str(found.num if found else 0), *numbers])
    return _table(rows)


def _remarks(outcomes: Sequence[Outcome]) -> list[str]:
    """Return caveats of the two rows: which seeds are missing, and how that biases them."""
    silent = [str(outcome.number) for outcome in outcomes if not outcome.curve.values]
    lost = [outcome for outcome in outcomes if outcome.status != "done" and outcome.curve.values]
    remarks: list[str] = []
    if lost:
        counts = {status: sum(outcome.status == status for outcome in lost) for status in COLOURS}
        what = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        remarks.append(
            f"{what}. The second row is a selected number: it excludes seeds that stopped early, often because they "
            "did badly, and says nothing about what a new seed would give. The first counts them at the value "
            "at which they stopped, which may not be what they would have reached."
        )
    if silent:
        remarks.append(f"In neither row, since nothing was logged: seed {', '.join(silent)}.")
    return remarks


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Write an aligned markdown table; the first row is its head, the first column is text."""
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.rjust, row, widths)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
