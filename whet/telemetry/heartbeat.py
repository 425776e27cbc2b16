"""Heartbeat of every rank, and a watchdog: a run that hangs reports where, and ends instead of waiting forever.

A background thread rewrites RUN/heartbeats/rank_0.json about once per second; `whet doctor hang RUN` reads it. Two
watchers share that thread's clock, because neither detects everything:

- the thread detects a training thread without heartbeats; it writes all stacks and reports what happened;
- a timer inside `faulthandler`, which the thread re-arms in every round, needs no interpreter: it detects a C call that
  never releases the GIL, so that no Python thread can run or print. It can only write the stacks and end the process.

Processes of `whet.sandbox` end by themselves when the socket of the process that started them closes.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from whet.cli import escape
from whet.ranks import collectives as distributed
from whet.telemetry.log import replace_file
from whet.types import UserError

FOLDER = "heartbeats"
INTERVAL_S = 1.0
GRACE_S = 15.0
"""Time limit of the work after a hang was detected, which may hang, too."""
EXIT_HUNG = 3
SHOW_CURSOR = "\x1b[?25h"
SIGNALLED = 128
"""Lowest exit status of a run that a signal stopped."""


class _Beat(NamedTuple):
    """The last heartbeat; replaced atomically, so that other threads never see half of it."""

    phase: str
    step: int
    at: float
    number: int


class Heartbeat:
    """Heartbeats of one rank, and their watchdog; a context manager, one per process at a time.

    A process that was stopped (Ctrl-Z) for longer than the limit ends when it continues: by the clock it is a hang.

    Args:
        folder: Run folder.
        rank: This process's rank.
        timeout_s: Seconds without a heartbeat after which the process ends; 0 for never.

    Raises:
        ValueError: If `timeout_s` is not a number of seconds.
        UserError: On entering, if the folder cannot be written.
    """

    def __init__(self, folder: Path, rank: int, *, timeout_s: float) -> None:
        if not 0 <= timeout_s < math.inf:
            raise ValueError(f"timeout_s = {timeout_s}: expected 0 or more")
        self._run, self._rank, self._timeout_s = folder, rank, timeout_s
        self._path = folder / FOLDER / f"rank_{rank}.json"
        self._stacks_path = self._path.with_suffix(".stacks.txt")
        self._interval_s = min(INTERVAL_S, timeout_s / 4) if timeout_s else INTERVAL_S
        self._beat = _Beat("start", 0, time.monotonic(), 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def beat(self, phase: str, step: int) -> None:
        """Record a heartbeat; costs less than a microsecond.

        Args:
            phase: What comes next: 'sample', 'reward', 'train', 'validate', 'save' ...
            step: The current step.
        """
        self._beat = _Beat(phase, step, time.monotonic(), self._beat.number + 1)

    def __enter__(self) -> Heartbeat:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for stale in self._path.parent.glob(f".{self._path.name}.*.partial"):  # of a killed process
                stale.unlink(missing_ok=True)
            # Opened now: at a hang there may be no descriptors left. The file stays empty unless something hangs.
            self._stacks = self._stacks_path.open("w", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise UserError(f"{self._stacks_path}: cannot be written ({error.strerror})") from None
        self.beat("start", 0)
        self._write("running")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._stacks.close()
        self._stacks_path.unlink(missing_ok=True)
        state, reason = _ending(error)
        self._write(state, reason)

    def _watch(self) -> None:
        while True:
            if self._timeout_s:
                faulthandler.dump_traceback_later(
                    self._timeout_s + self._interval_s, exit=True, file=self._stacks
                )
                if time.monotonic() - self._beat.at > self._timeout_s:
                    self._hang()
            self._write("running")
            if self._over.wait(self._interval_s):
                break
        if self._timeout_s:
            faulthandler.cancel_dump_traceback_later()

    def _hang(self) -> None:
        """Record and report what hangs where, and end the process."""
        try:
            faulthandler.dump_traceback_later(GRACE_S, exit=True, file=self._stacks)
            beat, collective = self._beat, distributed.current_collective()
            waiting = f", waiting for other ranks in '{collective}'" if collective else ""
            reason = (
                f"no sign of life for {time.monotonic() - beat.at:.0f} s in phase '{beat.phase}' of step "
                f"{beat.step}{waiting}"
            )
            line = (
                f"rank {self._rank} hangs: {reason}; stacks of all threads: {self._stacks_path}; see "
                f"'whet doctor hang {self._run}', and continue with --resume"
            )
            with suppress(OSError):
                self._stacks.write(line + "\n")
                self._stacks.flush()
                faulthandler.dump_traceback(self._stacks, all_threads=True)
            self._write("hung", reason)
            show_cursor = SHOW_CURSOR if os.isatty(2) else ""
            with suppress(OSError):  # print could block on a lock
                os.write(2, f"{show_cursor}\nwhet: error: {escape(line)}\n".encode())
        finally:
            os._exit(EXIT_HUNG)

    def _write(self, state: str, reason: str = "") -> None:
        beat = self._beat
        content = {
            "rank": self._rank,
            "ranks": distributed.world_size(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "born": birth(os.getpid()),
            "state": state,
            "reason": reason,
            "phase": beat.phase,
            "step": beat.step,
            "beats": beat.number,
            "silent_s": round(time.monotonic() - beat.at, 3),
            "timeout_s": self._timeout_s,
            "collective": distributed.current_collective() if state in ("running", "hung") else "",
            "time": round(time.time(), 3),
        }
        with suppress(OSError):  # the log reports a full disk; the watchdog continues
            replace_file(self._path, json.dumps(content) + "\n")


def _ending(error: BaseException | None) -> tuple[str, str]:
    """Return state and reason of a run that ends, with or without an exception."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "finished", ""
    is_signalled = isinstance(error, SystemExit) and isinstance(error.code, int) and error.code >= SIGNALLED
    if isinstance(error, KeyboardInterrupt) or is_signalled:
        return "preempted", ""
    first = (str(error).splitlines() or [""])[0][:300]
    return "failed", f"{type(error).__name__}: {first}".rstrip(": ")


def birth(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot: pid and start time identify it uniquely.

    Returns:
        None if there is no such process (or it is a zombie), or no /proc.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else int(words[19])
