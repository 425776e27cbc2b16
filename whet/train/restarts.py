"""`whet rl|sft|dpo|rft ... --restarts N`: start a training again after a crash, from its last checkpoint.

The training runs in a process of its own; this one only waits for it. A mistake of the user's and an end that was asked
for are no crashes.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from whet import processes
from whet.install import as_typed

COMMAND = (sys.executable, "-m", "whet")
FIRST_S, LONGEST_S = 1.0, 60.0
"""Seconds until the first start anew, and at most; they double with each."""
ASKED = tuple(
    getattr(signal, f"SIG{name}")
    for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "XCPU")
    if hasattr(signal, f"SIG{name}")
)
"""Signals that ask a training to save and stop: a scheduler's, Ctrl-C, a lost terminal."""
USER_ERROR = 2


def heard() -> list[int]:
    """Return the signals of `ASKED` that count: under `nohup` a lost terminal is no reason to stop.

    (A shell's background jobs ignore SIGINT, too; that counts.)
    """
    return [
        number
        for number in ASKED
        if signal.Signals(number).name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN
    ]


def supervise(words: Sequence[str], run: Path, limit: int) -> int:
    """Run a training, and run it again with --resume where it crashed.

    Args:
        words: Its command line after `whet`, without --restarts.
        run: Its run folder.
        limit: How often it may be started again.

    Returns:
        The exit status of its last process; 128 + signal for one that a signal killed.
    """
    child: subprocess.Popen[bytes] | None = None
    asked = 0

    def pass_on(number: int, _: FrameType | None) -> None:
        nonlocal asked
        asked = number
        if child is not None and child.poll() is None:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in heard()}
    try:
        crashed_at: int | None = None
        for number in range(limit + 1):
            child = processes.start([*COMMAND, *words], death=signal.SIGTERM)  # it saves and stops
            if asked:  # while it was being started
                child.send_signal(asked)
            code = child.wait()
            status = code if code >= 0 else 128 - code
            if asked or status in (0, USER_ERROR) or status - 128 in ASKED:
                return status
            step, name = newest_step(run), _name(code)
            if step == crashed_at:
                return _give_up(
                    f"{name}, no step was saved since the crash before (step {step})", run, status
                )
            if number == limit:
                return _give_up(f"{name} after step {step}, and --restarts {limit} is used up", run, status)
            crashed_at = step
            delay = min(LONGEST_S, FIRST_S * 2**number)
            _say(f"{name} after saving step {step}; start {number + 1} of {limit} anew in {delay:g} s")
            if _slept(delay, lambda: bool(asked)):
                return 128 + asked
            words = again(words, run)
        raise AssertionError("unreachable")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def again(words: Sequence[str], run: Path) -> list[str]:
    """Return the command line that goes on with a run; one that has not begun has nothing to go on with."""
    kept: list[str] = []
    is_value = False
    for word in words:
        if is_value and re.fullmatch(r"auto|\d+", word):
            is_value = False
            continue
        is_value = word == "--resume"
        if not is_value and not word.startswith("--resume="):
            kept.append(word)
    return [*kept, "--resume"] if (run / "config.yaml").is_file() else kept


def newest_step(run: Path) -> int:
    """Return the newest step of a run that is saved whole; 0 where there is none."""
    found = (run / "checkpoints").glob("step_*/manifest.json")
    steps = (re.fullmatch(r"step_(\d{8,18})", path.parent.name) for path in found)
    return max((int(match[1]) for match in steps if match), default=0)


def _slept(seconds: float, is_over: Callable[[], bool]) -> bool:
    """Wait; return whether something ended that early."""
    end = time.monotonic() + seconds
    while not is_over() and time.monotonic() < end:
        time.sleep(0.05)
    return is_over()


def _name(code: int) -> str:
    if code >= 0:
        return f"the training ended with status {code}"
    names = {int(known): known.name for known in signal.Signals}
    return f"the training was killed ({names.get(-code, f'signal {-code}')})"


def _say(text: str) -> None:
    print(f"whet: {text}", file=sys.stderr, flush=True)


def _give_up(text: str, run: Path, status: int) -> int:
    look = as_typed("doctor", "hang", str(run))
    _say(f"error: {text}: it is not started again; see {look!r} and what it printed")
    return status
