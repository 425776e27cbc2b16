"""One rank of a job that torchrun (or the like) started: it joins the others, notices when one is gone, and ends.

The first rank with an error says it, and all end: torchrun's own way, to send SIGTERM and to wait 30 s, neither
reaches a rank that is stopped nor says what happened.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from whet.cli import guard
from whet.ranks.collectives import RankError, barrier
from whet.types import UserError

TIMEOUT_VARIABLE = "WHET_COLLECTIVE_TIMEOUT_S"
COLLECTIVE_LIMIT_S = 600.0
JOIN_LIMIT = timedelta(minutes=30)
GRACE_S = 10.0
"""What a rank may still do once another has failed."""
RESUME = "the same command with --resume goes on from the last checkpoint"


def run_rank(function: Callable[[], int]) -> NoReturn:
    """Run a program as one rank of the job that the environment describes, and end the process.

    Args:
        function: The program; returns its exit status.
    """
    job = None
    try:
        job = Job()
        status = _status(function)
        job.leave()
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to the others once one has ended
        status, text = _describe(error, job)
        if job is None or job.claim(text):
            print(text, end="", file=sys.stderr, flush=True)
        if job is not None:
            job.kill_stopped()
    _end(status)


def _status(function: Callable[[], int]) -> int:
    try:
        return function()
    except SystemExit as error:  # on all ranks: --help, or a run that was asked to stop
        return error.code if isinstance(error.code, int) else int(error.code is not None)


def _describe(error: BaseException, job: Job | None) -> tuple[int, str]:
    """Return exit status and text of an error, as `guard` has them; a traceback where it is a bug of ours."""
    if isinstance(error, RankError) and job is not None:
        return 1, f"whet: error: {job.explain(error)}\n"
    if isinstance(error, _Terminated):
        missing = job.missing() if job is not None else ""
        return 143, f"whet: error: {missing or 'told to end (SIGTERM)'}; {RESUME}\n"

    def again() -> None:
        raise error

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            status = guard(again)
    except BaseException as bug:
        return 1, f"rank {os.environ['RANK']}: {''.join(traceback.format_exception(bug))}"
    return status, said.getvalue()


def _end(status: int) -> NoReturn:
    """End the process without the interpreter's own exit, in which gloo's threads now and then abort (SIGABRT)."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()  # pyright: ignore[reportAttributeAccessIssue] - the sandbox closes its workers
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


class _Terminated(BaseException):
    """SIGTERM outside of the steps of a run, which has its own handler for them."""


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise _Terminated


class Job:
    """All ranks, as one of them sees them through the key-value store that they joined by.

    Raises:
        UserError: If the environment does not say how to join.
    """

    def __init__(self) -> None:
        limit = _collective_limit()
        signal.signal(signal.SIGTERM, _on_sigterm)
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if num_local == int(os.environ["WORLD_SIZE"]) and Path("/sys/class/net/lo").exists():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one machine: nobody else can connect
        try:
            store, self._rank, world_size = next(rendezvous("env://", timeout=JOIN_LIMIT))
        except (ValueError, RuntimeError) as error:
            raise UserError(f"this rank cannot join the others ({error}); start it with torchrun") from None
        if self._rank:
            sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - rank 0 speaks for all
        self._store = PrefixStore("whet", store.clone())  # pyright: ignore - a connection that no collective keeps busy
        self._store.set(f"process/{self._rank}", _process(os.getpid()))
        names = [f"process/{place}" for place in range(world_size)]
        self._store.wait(names, JOIN_LIMIT)
        self._processes = [self._store.get(name).decode() for name in names]
        has_gpu = 0 < num_local <= torch.cuda.device_count()
        if has_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
            store=store,
            rank=self._rank,
            world_size=world_size,
            timeout=limit,
        )
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="whet-ranks", daemon=True).start()

    def leave(self) -> None:
        """Wait until all ranks are done."""
        self._store.set(f"left/{self._rank}", "")
        barrier()
        self._is_over.set()
        dist.destroy_process_group()

    def claim(self, text: str) -> bool:
        """Say whether nobody else has told of an error yet: this thread of this rank may."""
        value = f"{self._rank}/{threading.get_ident()}: {text}"
        try:
            return self._store.compare_set("error", "", value).decode() == value
        except RuntimeError:  # whoever held the store is gone
            return True

    def explain(self, error: RankError) -> str:
        """Return in one line what became of the others."""
        if not error.work:
            return str(error)
        if not (missing := self.missing(with_stopped=True)):
            with contextlib.suppress(RuntimeError):
                self._store.set(f"noticed/{self._rank}", "")
            time.sleep(1.0)
            late = [
                n for n in range(len(self._processes)) if n != self._rank and not self._has(f"noticed/{n}")
            ]
            missing = "; ".join(f"rank {number} did not come" for number in late)
        if not missing:
            return f"rank {self._rank} lost the others in {error}; {RESUME}"
        return f"{missing}; rank {self._rank} waited in {error.work}; {RESUME}"

    def missing(self, *, with_stopped: bool = False) -> str:
        """Name the ranks of this machine that are gone without having ended, or (if asked) are stopped."""
        found = []
        for number, process in enumerate(self._processes):
            fate = _fate(process)
            if (fate == "gone" or (fate and with_stopped)) and not self._has(f"left/{number}"):
                found.append(f"rank {number} is {fate}{' (killed?)' if fate == 'gone' else ''}")
        return "; ".join(found)

    def _has(self, key: str) -> bool:
        with contextlib.suppress(RuntimeError):  # the store may be gone with whoever held it
            return self._store.check([key])
        return False

    def kill_stopped(self) -> None:
        """Kill the ranks of this machine that are stopped: nothing else would end them."""
        for process in self._processes:
            if _fate(process) == "stopped":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process.split()[-2]), signal.SIGKILL)

    def _watch(self) -> None:
        """End this rank when another one has failed, whatever it is at."""
        missing = ""
        while not missing:
            if self._is_over.wait(0.5):
                return
            try:
                if self._store.check(["error"]):
                    break
                missing = self.missing()
            except RuntimeError:
                missing = "" if self._is_over.wait(0.5) else "the process that started the ranks is gone"
        text = f"whet: error: {missing}; {RESUME}\n"
        if missing and self.claim(text):
            print(text, end="", file=sys.stderr, flush=True)
        time.sleep(GRACE_S)
        self.kill_stopped()
        os._exit(1)


def _collective_limit() -> timedelta:
    """Return how long a rank waits for the others."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(COLLECTIVE_LIMIT_S))
    if not re.fullmatch(r"[1-9]\d{0,6}(\.\d+)?", text):
        raise UserError(f"{TIMEOUT_VARIABLE}: got {text!r}, expected seconds, from 1 to 9999999")
    return timedelta(seconds=float(text))


def _machine() -> str:
    """Return what processes share that see each other's ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process(pid: int) -> str:
    """Return 'machine pid start', which no other process ever has."""
    _, started = _state(pid)
    return f"{_machine()} {pid} {started}"


def _state(pid: int) -> tuple[str, str]:
    """Return the state letter of a process ('' when there is none) and when it was started."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return words[0], words[19]


def _fate(process: str) -> str:
    """Return 'gone', 'stopped', or '' for a process that is alive or on another machine."""
    machine, pid, started = process.rsplit(" ", 2)
    if not machine or machine != _machine():
        return ""
    state, now = _state(int(pid))
    if state in ("", "Z", "X") or now != started:
        return "gone"
    return "stopped" if state in "Tt" else ""
