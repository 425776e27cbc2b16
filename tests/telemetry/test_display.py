import io
import math
import os
import signal
import threading
import time
import weakref

import pytest
from late import wait_for
from rich.console import Console

from whet.telemetry import display
from whet.telemetry.display import (
    LiveDisplay,
    PlainDisplay,
    escape_controls,
    metric_label,
    open_display,
    sparkline,
)

HEADLINE = ("rl/reward_mean", "rl/correct")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def make_live(stream, headline=HEADLINE, total_steps=10):
    console = Console(file=stream, force_terminal=True, width=80, color_system=None, legacy_windows=False)
    return LiveDisplay("rl · [b]demo", total_steps, headline, console=console)


def test_live_panel_shows_title_progress_values_and_sparkline():
    stream = Terminal()
    with make_live(stream) as live:
        for step in range(1, 9):
            live.update(step, {"rl/reward_mean": step / 8, "rl/correct": 0.5, "rl/loss": 3.0})
    last = stream.getvalue().rpartition("╭")[2]
    assert "rl · [b]demo" in last
    assert "8 / 10" in last
    assert "reward mean" in last
    assert "1.000" in last
    assert "50.0%" in last
    assert "▁▂▃▄▅▆▇█" in last
    assert "0.125 … 1.000" in last
    assert "loss" not in last  # no headline


def test_live_panel_before_the_first_step_and_with_nan():
    stream = Terminal()
    with make_live(stream) as live:
        live.update(1, {"rl/reward_mean": math.nan})
        live.close()
    assert "–" in stream.getvalue()


def test_live_fits_a_narrow_terminal():
    stream = Terminal()
    console = Console(file=stream, force_terminal=True, width=44, color_system=None)
    with LiveDisplay("t", 100, HEADLINE, console=console) as live:
        for step in range(1, 60):
            live.update(step, {"rl/reward_mean": float(step), "rl/correct": 0.1})
    assert all(len(line) <= 44 for line in stream.getvalue().rpartition("╭")[2].splitlines())


@pytest.mark.parametrize("kind", ["live", "plain"])
def test_model_text_is_neither_markup_nor_control(kind):
    stream = Terminal()
    hostile = "[/b] [red]x[/red] \x1b]0;owned\x07 \x9b2J \ud800 \u202e \r"
    with make_live(stream) if kind == "live" else PlainDisplay("t", 10, HEADLINE, stream=stream) as shown:
        shown.note(hostile)
        shown.note(hostile, warning=True)
    text = stream.getvalue()
    assert text.count("[/b] [red]x[/red]") == 2
    assert "\x1b]0" not in text
    assert "\x9b" not in text
    assert "\ud800" not in text
    assert "\u202e" not in text
    assert "\\x1b]0;owned\\x07 \\x9b2J \\ud800 \\u202e \\x0d" in " ".join(text.split())


@pytest.mark.parametrize(
    ("total", "unit", "text"), [(1, "pass", "1 pass"), (6, "pass", "6 passes"), (2, "fact", "2 facts")]
)
def test_the_first_line_counts_in_words(total: int, unit: str, text: str) -> None:
    stream = io.StringIO()
    with PlainDisplay("t", total, (), stream=stream, unit=unit):
        pass
    assert stream.getvalue().splitlines()[0] == f"t  {text}"


def test_plain_lines_are_few_and_hold_first_and_last_step():
    stream = io.StringIO()
    with PlainDisplay("sft", 1000, ("sft/loss",), stream=stream) as shown:
        for step in range(1, 1001):
            shown.update(step, {"sft/loss": 1.0})
            shown.update(step, {"sft/validation_loss": 1.0})  # a second row of the same step
    lines = stream.getvalue().splitlines()
    assert lines[0] == "sft  1,000 steps"
    assert lines[1].startswith("step 1/1,000  loss 1.000")
    assert lines[-1].startswith("step 1,000/1,000  loss 1.000")
    assert len(lines) == 1 + 1 + 40


def test_plain_speaks_after_a_long_silence(monkeypatch):
    clock = iter(range(0, 100_000, 31))
    monkeypatch.setattr(display.time, "monotonic", lambda: float(next(clock)))
    stream = io.StringIO()
    with PlainDisplay("rl", 1000, (), stream=stream) as shown:
        for step in range(1, 4):
            shown.update(step, {})
    assert len(stream.getvalue().splitlines()) == 1 + 3


def test_a_long_phase_is_told_of_until_it_ends(monkeypatch):
    monkeypatch.setattr(display, "PLAIN_SECONDS", 0.3)
    stream = io.StringIO()
    with PlainDisplay("rl", 60, (), stream=stream) as shown:
        began = time.monotonic()
        # told of after 0.3 s and 0.6 s and 1.2 s: each silence is twice as long as the last
        shown.begin("sample", lambda: "84 decoding steps")
        assert wait_for(lambda: len(stream.getvalue().splitlines()) > 2)
        waited_s = time.monotonic() - began
        shown.begin("train")
    lines = stream.getvalue().splitlines()[1:]
    time.sleep(0.4)  # closed: nothing more
    assert len(stream.getvalue().splitlines()[1:]) == len(lines) <= 1 + math.log2(max(1, waited_s / 0.3)) + 1
    assert all(line.startswith("step 1/60  sample: 84 decoding steps, 0:0") for line in lines)


def test_a_resumed_run_is_at_its_own_step(monkeypatch, capsys):
    monkeypatch.setattr(display, "PLAIN_SECONDS", 0.1)
    with open_display("rl", 60, (), first_step=30) as shown:
        shown.begin("sample")
        told: list[str] = []
        assert wait_for(
            lambda: told.append(capsys.readouterr().out) or "step 31/60  sample: 0:0" in "".join(told)
        )


def test_a_panel_names_a_long_phase(monkeypatch):
    monkeypatch.setattr(display, "LONG_PHASE_S", 0.0)
    stream = Terminal()
    with make_live(stream) as shown:
        shown.begin("sample", lambda: "84 decoding steps")
    assert "sample: 84 decoding steps, 0:00" in stream.getvalue()


def test_plain_survives_an_ascii_stream():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with PlainDisplay("rl · 漢", 1, (), stream=stream) as shown:
        shown.update(1, {})
    stream.seek(0)
    assert stream.read().startswith("rl \\xb7 \\u6f22")


@pytest.mark.parametrize(
    ("variables", "kind"),
    [
        ({}, LiveDisplay),
        ({"CI": "true"}, PlainDisplay),
        ({"NO_COLOR": "1"}, PlainDisplay),
        ({"TERM": "dumb"}, PlainDisplay),
    ],
)
def test_open_display_suits_the_terminal(monkeypatch, variables, kind):
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", Terminal())
    with open_display("t", 3, HEADLINE) as shown:
        assert isinstance(shown, kind)


def test_open_display_is_plain_in_a_pipe_and_silent_on_other_ranks(monkeypatch):
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stdout", pipe)
    with open_display("t", 3, HEADLINE, enabled=False) as shown:
        shown.update(1, {})
        shown.note("x")
    assert pipe.getvalue() == ""
    with open_display("t", 3, HEADLINE) as shown:
        assert isinstance(shown, PlainDisplay)
    assert pipe.getvalue() == "t  3 steps\n"


def test_open_display_checks_its_arguments():
    with pytest.raises(ValueError, match="not declared"):
        open_display("t", 3, ("rl/rewad",))
    with pytest.raises(ValueError, match="total_steps"):
        open_display("t", 0, HEADLINE)


def test_time_left_follows_the_recent_pace(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    progress = display._Progress(100, ())
    now[0] = 1000.0  # a slow start, such as loading a checkpoint, is not part of the pace
    progress.observe(50, {})
    assert progress.times(now[0]) == "16:40 elapsed"
    for step in range(51, 61):
        now[0] += 2.0
        progress.observe(step, {})
    assert progress.times(now[0]) == "1:20 left"
    assert progress.times(now[0] + 20) == "1:00 left"
    assert progress.times(now[0] + 500) == "0:00 left"


def test_time_left_of_completions_is_right_from_the_second_batch_on(monkeypatch):
    """Batches of 64 take 20 s: half of a batch ends at once at 4 s, the others one by one, the last at 20 s."""
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=True)
    with display.LiveDisplay("eval", 704, (), console=console) as live:
        advance = display.advancing(live, 64)  # finished before; not part of the pace
        progress, done = live._progress, 64
        assert progress.times(now[0]) == "0:00 elapsed"
        for batch in range(10):
            begun = 100.0 + 20.0 * batch
            for n in range(64):
                now[0] = begun + (4.0 if n < 32 else 4.0 + 16.0 * (n - 31) / 32)
                advance(1)
                done += 1
                if batch and done < 704:
                    minutes, seconds = progress.times(now[0]).removesuffix(" left").split(":")
                    left = 300.0 - now[0]
                    # Within one batch the short ones come first: at most the time of one is in doubt.
                    assert abs(60 * int(minutes) + int(seconds) - left) <= max(20.0, 0.35 * left), (batch, n)
        assert progress.times(now[0]) == "3:20 elapsed"


def test_the_first_completions_of_a_batch_are_no_pace(monkeypatch):
    """Two of seventy-two had ended after 50 s, and the evaluation took 92: 30 minutes were promised."""
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    progress = display._Progress(72, ())
    progress.start(0)
    for done, at, told in ((2, 50.0, "0:50 elapsed"), (8, 60.0, "1:00 elapsed"), (9, 63.0, "7:21 left")):
        now[0] = at
        progress.observe(done, {})
        assert progress.times(at) == told


def test_series_takes_bounded_memory_and_skips_nan():
    progress = display._Progress(100_000, ("rl/kl",))
    for step in range(1, 100_001):
        progress.observe(step, {"rl/kl": math.nan if step % 2 else float(step)})
    series = progress.series("rl/kl")
    assert len(series) <= display.NUM_BINS + 1
    assert series == sorted(series)


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1, 3, 3], 2) == "▁█"
    assert sparkline([2.0, 2.0], 8) == "▄▄"
    assert sparkline([], 8) == ""
    assert len(sparkline(list(range(1000)), 36)) == 36


def test_labels_and_escapes():
    assert metric_label("rl/reward/my_reward") == "reward my reward"
    assert escape_controls("a\tb\nc 漢字 é 🙂 x²") == "a\tb\nc 漢字 é 🙂 x²"
    assert escape_controls("\x00\u2066\U000e0001") == "\\x00\\u2066\\U000e0001"


def test_a_closed_display_holds_nothing_of_the_run():
    """A thread that frees tensors while the interpreter ends aborts the process: seen in 8 of 135 runs."""

    class Source:
        def how_far(self):
            return "far"

    source = Source()
    gone = weakref.ref(source)
    with PlainDisplay("rl", 10, (), stream=io.StringIO()) as shown:
        shown.begin("sample", source.how_far)
        assert "display" in {thread.name for thread in threading.enumerate()}
    del source
    assert "display" not in {thread.name for thread in threading.enumerate()}
    assert gone() is None


@pytest.mark.parametrize("handled", [True, False])
def test_a_pipe_that_nobody_reads_stops_a_training_as_a_lost_terminal_does(
    handled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`whet rl ... | head`: with a session around it the run is asked to stop, and saves; else printing fails."""
    asked: list[int] = []
    before = signal.signal(
        signal.SIGHUP, (lambda number, _: asked.append(number)) if handled else signal.SIG_DFL
    )
    ours, theirs = os.pipe()
    try:
        with os.fdopen(theirs, "w") as stream:
            display = PlainDisplay("t", 3, HEADLINE, stream=stream)
            os.close(ours)
            if not handled:
                with pytest.raises(BrokenPipeError):
                    display.update(1, {})
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # for what is left in its buffer
                return
            for step in (1, 2, 3):
                display.update(step, {})
            display.note("more")
            assert asked == [signal.SIGHUP]  # once: afterwards the lines go nowhere
    finally:
        signal.signal(signal.SIGHUP, before)
