"""Heartbeat of every rank, and a watchdog: a run that hangs reports where, and ends instead of waiting forever.

A background thread rewrites RUN/heartbeats/rank_0.json about once per second; `whet doctor hang RUN` reads it. Two
watchers share that thread's clock, because neither detects everything:

- the thread detects a training thread without heartbeats; it writes all stacks and reports what happened;
- timers of the C library, which the thread re-arms in every round, need no interpreter: they detect a C call that never
  releases the GIL, so that no Python thread can run or print. `faulthandler` then writes the stacks, a shell prints the
  line, and the process ends.

Processes of `whet.sandbox` end by themselves when the socket of the process that started them closes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import math
import os
import shlex
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TextIO

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


class _SigEvent(ctypes.Structure):
    """`struct sigevent` of 64-bit Linux, for SIGEV_THREAD."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * 32),
    ]


class _Timer:
    """Calls a function of the C library after some seconds, in a thread of its own that needs no interpreter.

    Args:
        function: Its name; it takes one word.
        argument: The word: a number or an address.

    Raises:
        OSError, AttributeError: Where there are no such timers (macOS).
    """

    _SIGEV_THREAD, _CLOCK_MONOTONIC = 2, 1

    def __init__(self, function: str, argument: int) -> None:
        # Not CDLL, which lets go of the interpreter: who takes it then may be the one that never gives it back.
        self._library = ctypes.PyDLL(None, use_errno=True)
        address = ctypes.cast(getattr(self._library, function), ctypes.c_void_p).value
        event = _SigEvent(argument, 0, self._SIGEV_THREAD, address, None)
        self._timer = ctypes.c_void_p()
        if self._library.timer_create(self._CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create")

    def arm(self, seconds: float) -> None:
        """Call it so many seconds from now, and not when it was to be called before; 0 for never."""
        whole = int(seconds)
        # struct itimerspec: the interval (none), then the first time
        times = (ctypes.c_long * 4)(0, 0, whole, int((seconds - whole) * 1e9))
        self._library.timer_settime(self._timer, 0, times, None)

    def close(self) -> None:
        """Call it no more."""
        self._library.timer_delete(self._timer)


class _Deadline:
    """Ends the process with `EXIT_HUNG` and a line on stderr, unless it is put off in time; needs no interpreter.

    Where the C library has no such timers, `faulthandler` ends the process, with its own status and without the line.

    Args:
        stacks: Where all stacks are written before.
    """

    MAX_COMMAND = 8192
    SPEAK_S, END_S = 0.3, 0.8
    """Seconds from the stacks until the line is printed, and until the process ends."""

    def __init__(self, stacks: TextIO) -> None:
        self._stacks = stacks
        self._command = ctypes.create_string_buffer(self.MAX_COMMAND)
        self._timers: tuple[_Timer, _Timer] | None = None
        with suppress(OSError, AttributeError):
            self._timers = (
                _Timer("system", ctypes.addressof(self._command)),
                _Timer("_exit", EXIT_HUNG),
            )

    def put_off(self, seconds: float, line: str) -> None:
        """End the process so many seconds from now, with this line, instead of when it was to end before."""
        command = f"printf '%s\\n' {shlex.quote(line)} >&2".encode()
        if self._timers is not None:
            speak, end = self._timers
            speak.arm(0)  # it must not read half a command
            self._command.value = command if len(command) < self.MAX_COMMAND else b":"
            speak.arm(seconds + self.SPEAK_S)
            end.arm(seconds + self.END_S)
        faulthandler.dump_traceback_later(seconds, exit=self._timers is None, file=self._stacks)

    def close(self) -> None:
        """Let the process live."""
        for timer in self._timers or ():
            timer.arm(0)
            timer.close()
        self._timers = None
        faulthandler.cancel_dump_traceback_later()


_current: Heartbeat | None = None


def current() -> Heartbeat | None:
    """Return the heartbeat that is entered in this process."""
    return _current


def alive(phase: str = "") -> None:
    """Record a sign of life, from wherever some of the work is done.

    Args:
        phase: What comes next; '' for more of the phase that is under way.
    """
    if _current is not None:
        _current.go_on(phase)


@contextmanager
def downloading() -> Iterator[None]:
    """Count the time inside as life: a download may take hours, and its library has time limits of its own.

    A call inside that keeps the interpreter to itself is still found.
    """
    heartbeat = _current
    if heartbeat is None:
        yield
        return
    heartbeat.downloads += 1
    try:
        yield
    finally:
        heartbeat.go_on()
        heartbeat.downloads -= 1


class Heartbeat:
    """Heartbeats of one rank, and their watchdog; a context manager, one per process at a time.

    A process that was stopped (Ctrl-Z) for longer than the limit ends when it continues: by the clock it is a hang.

    Args:
        folder: Run folder; None before there is one: stacks are then written to stderr, and nothing else is.
        rank: This process's rank.
        timeout_s: Seconds without a heartbeat after which the process ends; 0 for never.
        phase: What comes first.

    Attributes:
        downloads: How many `downloading` are under way.

    Raises:
        ValueError: If `timeout_s` is not a number of seconds.
        UserError: On entering, if the folder cannot be written.
    """

    def __init__(self, folder: Path | None, rank: int, *, timeout_s: float, phase: str = "start") -> None:
        if not 0 <= timeout_s < math.inf:
            raise ValueError(f"timeout_s = {timeout_s}: expected 0 or more")
        self._run, self._rank, self._timeout_s = folder, rank, timeout_s
        self._path = folder / FOLDER / f"rank_{rank}.json" if folder is not None else None
        self._stacks_path = self._path.with_suffix(".stacks.txt") if self._path is not None else None
        self._interval_s = min(INTERVAL_S, timeout_s / 4) if timeout_s else INTERVAL_S
        self._beat = _Beat(phase, 0, time.monotonic(), 0)
        self.downloads = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def beat(self, phase: str, step: int) -> None:
        """Record a heartbeat; costs less than a microsecond.

        Args:
            phase: What comes next: 'sample', 'reward', 'train', 'validate', 'save' ...
            step: The current step.
        """
        self._beat = _Beat(phase, step, time.monotonic(), self._beat.number + 1)

    def go_on(self, phase: str = "") -> None:
        """Record a heartbeat of the same step, and of the same phase unless another begins."""
        self.beat(phase or self._beat.phase, self._beat.step)

    def __enter__(self) -> Heartbeat:
        global _current
        try:
            if self._path is None or self._stacks_path is None:
                self._stacks = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")
            else:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                for stale in self._path.parent.glob(f".{self._path.name}.*.partial"):  # of a killed process
                    stale.unlink(missing_ok=True)
                # Opened now: at a hang there may be no descriptors left. It stays empty unless something hangs.
                self._stacks = self._stacks_path.open("w", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise UserError(f"{self._stacks_path}: cannot be written ({error.strerror})") from None
        self._deadline = _Deadline(self._stacks) if self._timeout_s else None
        self.go_on()
        self._write("running")
        self._put_off()
        self._thread.start()
        _current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        _current = None
        self._over.set()
        self._thread.join()
        self._stacks.close()
        if self._stacks_path is not None:
            self._stacks_path.unlink(missing_ok=True)
        state, reason = _ending(error)
        self._write(state, reason)

    def _put_off(self) -> None:
        if self._deadline is not None:
            beat, seconds = self._beat, self._timeout_s + self._interval_s
            where = f"in or after phase '{beat.phase}' of step {beat.step}"
            reason = (
                f"no sign of life for {seconds:.0f} s {where}, in a call that keeps the interpreter to itself"
            )
            self._deadline.put_off(seconds, f"whet: error: {escape(self._line(reason))}")

    def _watch(self) -> None:
        while True:
            if self.downloads:
                self.go_on()
            self._put_off()
            if self._deadline is not None and time.monotonic() - self._beat.at > self._timeout_s:
                self._hang(self._deadline)
            self._write("running")
            if self._over.wait(self._interval_s):
                break
        if self._deadline is not None:
            self._deadline.close()

    def _line(self, reason: str) -> str:
        stacks = f"stacks of all threads: {self._stacks_path or 'above or below'}"
        remedy = (
            "start it again"
            if self._run is None
            else f"see 'whet doctor hang {self._run}', and continue with --resume"
        )
        return f"rank {self._rank} hangs: {reason}; {stacks}; {remedy}"

    def _hang(self, deadline: _Deadline) -> None:
        """Record and report what hangs where, and end the process."""
        try:
            beat, collective = self._beat, distributed.current_collective()
            waiting = f", waiting for other ranks in '{collective}'" if collective else ""
            reason = (
                f"no sign of life for {time.monotonic() - beat.at:.0f} s in phase '{beat.phase}' of step "
                f"{beat.step}{waiting}"
            )
            line = self._line(reason)
            deadline.put_off(GRACE_S, f"whet: error: {escape(line)}")
            with suppress(OSError):
                if self._stacks_path is not None:
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
        if self._path is None:
            return
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
