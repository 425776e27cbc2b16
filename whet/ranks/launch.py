"""One rank of a job that torchrun (or the like) started: join the others, notice when one is gone, and end.

The first rank with an error prints it, and all ranks end. torchrun's own way (SIGTERM, then 30 s of waiting) neither
reaches a stopped rank nor says what happened.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from whet.cli import guard
from whet.ranks.collectives import RankError, all_reduce_max, barrier, on_main
from whet.types import UserError

TIMEOUT_VARIABLE = "WHET_COLLECTIVE_TIMEOUT_S"
COLLECTIVE_LIMIT_S = 600.0
JOIN_LIMIT = timedelta(minutes=30)
MEET_S = 0.05
"""Seconds between looks for rank 0."""
STORE_S = 10.0
"""Seconds in which torchrun's store has to answer."""
GRACE_S = 10.0
"""Seconds that a rank may still run after another has failed."""
RESUME = "the same command with --resume continues from the last checkpoint"


def was_restarted(folder: Path) -> bool:
    """Say whether torchrun has started these ranks again (--max-restarts) after they began the run in a folder.

    Args:
        folder: The run folder; all ranks ask.
    """
    # Each node counts the failures of its own ranks alone.
    if not all_reduce_max(float(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))):
        return False

    def is_ours() -> bool:
        try:
            recorded = json.loads((folder / "environment.json").read_bytes())["environment"]
        except (OSError, ValueError, KeyError):
            return False
        return recorded.get("TORCHELASTIC_RUN_ID") == os.environ["TORCHELASTIC_RUN_ID"]

    return on_main(is_ours)


def run_rank(function: Callable[[], int], parent: int) -> NoReturn:
    """Run a program as one rank of the job that the environment describes, and end the process.

    Args:
        function: The program; returns its exit status.
        parent: Process id of what started this one, as it was before anything else.
    """
    job = None
    try:
        with _while_parent_lives(parent):
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
    """Return exit status and text of an error, as `guard` does; a traceback if it is a bug of ours."""
    if isinstance(error, RankError) and job is not None:
        return 1, f"whet: error: {job.explain(error)}\n"
    if isinstance(error, _Terminated):
        missing = job.missing() if job is not None else ""
        return 143, f"whet: error: {missing or 'terminated (SIGTERM)'}; {RESUME}\n"

    def again() -> None:
        raise error

    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            status = guard(again)
    except BaseException as bug:
        # Inside a backward pass PyTorch's own exchanges notice first that a rank is gone.
        if isinstance(bug, RuntimeError) and job is not None and (missing := job.missing_soon()):
            return 1, f"whet: error: {missing}; {RESUME}\n"
        return 1, f"rank {os.environ['RANK']}: {''.join(traceback.format_exception(bug))}"
    return status, stderr.getvalue()


def _end(status: int) -> NoReturn:
    """End the process without the interpreter's normal exit, during which gloo's threads sometimes abort (SIGABRT)."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()  # pyright: ignore[reportAttributeAccessIssue] - the sandbox closes its workers
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


@contextmanager
def _while_parent_lives(parent: int) -> Iterator[None]:
    """End this process when torchrun is gone before all ranks have joined: they would wait for each other, for minutes.

    Later `Job` notices. What started ranks without torchrun may be gone: a shell that left them in the background.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    has_joined = threading.Event()

    def look() -> None:
        while not has_joined.wait(0.5):
            if os.getppid() != parent:
                if os.environ.get("LOCAL_RANK") == "0":
                    os.write(2, f"whet: error: torchrun is gone while the ranks joined; {RESUME}\n".encode())
                os._exit(1)

    threading.Thread(target=look, name="whet-parent", daemon=True).start()
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            _find_store()
        yield
    finally:
        has_joined.set()


def _find_store() -> None:
    """Check that torchrun's store, which is there before any rank is started, still answers.

    Raises:
        UserError: If it does not.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    end = time.monotonic() + STORE_S
    while True:
        try:
            socket.create_connection(address, STORE_S).close()
            return
        except OSError as error:  # one that is refused will not be answered later; a slow network may be
            if isinstance(error, ConnectionRefusedError) or time.monotonic() > end:
                place = ":".join(map(str, address))
                raise UserError(f"torchrun's store at {place} does not answer ({error}); {RESUME}") from None
        time.sleep(MEET_S)


class _Terminated(BaseException):
    """SIGTERM outside the steps of a run, which have their own handler."""


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise _Terminated


class Job:
    """The job as one rank sees it, through the key-value store of the rendezvous.

    Raises:
        UserError: If the environment variables do not say how to join.
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
            sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - only rank 0 prints
        try:
            attempt, self._processes = _meet(store, self._rank, world_size)
        except RuntimeError as error:  # the store's
            raise UserError(f"this rank lost the others while all joined ({error}); {RESUME}") from None
        self._store = PrefixStore(f"whet/{attempt}", store.clone())  # pyright: ignore - own connection: no collective blocks it
        has_gpu = 0 < num_local <= torch.cuda.device_count()
        if has_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
            store=PrefixStore(attempt, store),
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
        """Say whether no other rank has reported an error yet, so that this thread may."""
        value = f"{self._rank}/{threading.get_ident()}: {text}"
        try:
            return self._store.compare_set("error", "", value).decode() == value
        except RuntimeError:  # the rank that hosts the store is gone
            return True

    def explain(self, error: RankError) -> str:
        """Return in one line what happened to the others."""
        if not error.work:
            return str(error)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"noticed/{self._rank}", "")
        if not (missing := self.missing_soon()):
            late = [
                n for n in range(len(self._processes)) if n != self._rank and not self._has(f"noticed/{n}")
            ]
            missing = "; ".join(f"rank {number} did not arrive" for number in late)
        if not missing:
            return f"rank {self._rank} lost the others in {error}; {RESUME}"
        return f"{missing}; rank {self._rank} waited in {error.work}; {RESUME}"

    def missing(self, *, with_stopped: bool = False) -> str:
        """Name the ranks of this machine that died, or (with_stopped) are stopped."""
        found = []
        for number, process in enumerate(self._processes):
            fate = _fate(process)
            if (fate == "gone" or (fate and with_stopped)) and not self._has(f"left/{number}"):
                found.append(f"rank {number} is {fate}{' (killed?)' if fate == 'gone' else ''}")
        return "; ".join(found)

    def missing_soon(self) -> str:
        """Name the ranks that died or are stopped; the system closes a dying one's connections before it is gone."""
        end = time.monotonic() + 1.0
        while not (found := self.missing(with_stopped=True)) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def _has(self, key: str) -> bool:
        with contextlib.suppress(RuntimeError):  # the store is gone if its host is
            return self._store.check([key])
        return False

    def kill_stopped(self) -> None:
        """Kill the ranks of this machine that are stopped: nothing else would."""
        for process in self._processes:
            if _fate(process) == "stopped":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process.split()[-2]), signal.SIGKILL)

    def _watch(self) -> None:
        """End this rank when another one has failed, whatever it is doing."""
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


def _meet(store: Store, number: int, count: int) -> tuple[str, list[str]]:
    """Agree with the other ranks on a name for this attempt, under which they exchange everything else.

    torchrun keeps one store for all attempts of a job (--max-restarts): an error that ended one would end the next.

    Args:
        store: The store of the rendezvous.
        number: This rank.
        count: How many there are.

    Returns:
        The name, and the processes of all ranks, in order.
    """
    mine = f"{secrets.token_hex(8)} {_process(os.getpid())}"
    if not number:
        name = secrets.token_hex(8)
        keys = [f"{name}/rank/{place}" for place in range(count)]
        store.set(keys[0], mine)
        store.set("attempt", name)
        store.wait(keys, JOIN_LIMIT)
        found = [store.get(key).decode() for key in keys]
        store.set(f"{name}/all", json.dumps(found))
        return name, [each.partition(" ")[2] for each in found]
    end, told = time.monotonic() + JOIN_LIMIT.total_seconds(), ""
    while time.monotonic() < end:
        # At first perhaps the attempt's before, whose rank 0 never answers.
        name = store.get("attempt").decode()
        if name != told:
            store.set(f"{name}/rank/{number}", mine)
            told = name
        found = json.loads(store.get(f"{name}/all")) if store.check([f"{name}/all"]) else []
        if found and found[number] == mine:
            return name, [each.partition(" ")[2] for each in found]
        time.sleep(MEET_S)
    raise RuntimeError(f"rank 0 did not come within {JOIN_LIMIT}")


def _collective_limit() -> timedelta:
    """Return how long a rank waits for the others."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(COLLECTIVE_LIMIT_S))
    if not re.fullmatch(r"[1-9]\d{0,6}(\.\d+)?", text):
        raise UserError(f"{TIMEOUT_VARIABLE}: got {text!r}, expected seconds, from 1 to 9999999")
    return timedelta(seconds=float(text))


def _machine() -> str:
    """Return a key that is equal for processes that can see each other's pids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process(pid: int) -> str:
    """Return 'machine pid start', unique to one process even after its pid is reused."""
    _, started = _state(pid)
    return f"{_machine()} {pid} {started}"


def _state(pid: int) -> tuple[str, str]:
    """Return the state letter of a process ('' if it does not exist) and its start time."""
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
