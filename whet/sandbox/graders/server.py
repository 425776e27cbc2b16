"""The grader server: it loads the grader once, forks workers from itself, and enforces their deadlines.

`whet.sandbox.graders.worker` starts it; it imports no more of whet than these files, unless a call carries a `Problem`.
A trainer's thread sends one end of a socket pair over the control socket; it carries lines `INDEX JSON` both ways: a
call's arguments, and its outcome. Only workers run the grader; one that misses its deadline is killed and replaced
within milliseconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import inspect
import json
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from whet.install import NoPosix
from whet.sandbox.graders.loading import LoadError, check_parameters, describe, load_function, rebuild

try:
    import resource
except ImportError:  # Windows
    resource = NoPosix()  # pyright: ignore[reportAssignmentType]

CHUNK = 1 << 18
TICK_S = 1.0
"""Interval at which an idle server checks that its parent is alive."""
REAP_S = 0.02
"""Interval at which killed workers are polled until they are gone."""
PATIENCE = 0.05
"""A call older than this share of the deadline no longer counts as running: another one starts."""
WAITS_S = 0.05
"""A call older than this whose process sleeps no longer counts as running: it waits for a service, not for a core."""
BUSY = 0.2
"""Share of a call's time that its process computes at least, where it is not taken for one that waits."""
LONGEST_VALUE = 1 << 20
_PR_SET_PDEATHSIG = 1


def address_space() -> int:
    """Return this process's address space in bytes (0 without /proc)."""
    with suppress(OSError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return 0


def processor_s(pid: int) -> tuple[bool, float]:
    """Return whether a process or a child of it may be running (True where that is unknown), and its processor time."""
    with suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            has_children = bool(file.read().strip())
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return has_children or fields[0] not in (b"S", b"D"), seconds
    return True, 0.0


def grade(function: Callable[..., Any], line: bytes, runner: asyncio.Runner) -> dict[str, Any]:
    """Run one call; an exception becomes its outcome."""
    started = time.perf_counter()
    kind, value, message = "ok", None, ""
    try:
        call = json.loads(line)
        args = call["args"]
        for position in call.get("problems", ()):
            from whet.types import Problem  # only if needed: keeps the server's start fast

            args[position] = Problem(**args[position])
        value = function(*args)
        if inspect.iscoroutine(value):
            value = runner.run(value)
        value = plain_number(value)
        check_value(value)
    except MemoryError:
        kind, value, message = "memory", None, "MemoryError: the call needed more than the pool's memory_mib"
    except BaseException as error:
        kind, value, message = "error", None, describe(error)
    return {"kind": kind, "value": value, "message": message, "seconds": time.perf_counter() - started}


def plain_number(value: Any) -> Any:
    """Return Python's number for one of numpy or torch, as `np.mean` returns it; anything else as it is."""
    is_scalar = getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None))
    return value.item() if is_scalar else value


def check_value(value: Any) -> None:
    """Raise TypeError or ValueError if a grader's result cannot be sent."""
    try:
        num_characters = len(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        expected = "expected float, int, bool, None, str, or lists and dicts of these; convert with float()"
        raise TypeError(f"the grader returned a {type(value).__name__}: {expected}") from None
    if num_characters > LONGEST_VALUE:
        raise ValueError(f"the grader returned {num_characters} characters: expected at most {LONGEST_VALUE}")


def serve_calls(connection: socket.socket, function: Callable[..., Any], memory_bytes: int) -> None:
    """Run as a worker: answer calls until the server closes the connection, within the memory limit.

    A worker that uses half of its memory asks to be replaced, so that growing caches never fail an innocent call.
    """
    base, pid = address_space(), os.getpid()
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (base + memory_bytes, base + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with asyncio.Runner() as runner:
        for line in connection.makefile("rb"):
            index, _, payload = line.partition(b" ")
            outcome = grade(function, payload, runner)
            if os.getpid() != pid:  # a child that the grader forked
                return
            retire = outcome["kind"] == "memory" or address_space() - base > memory_bytes // 2
            text = json.dumps({**outcome, "retire": retire})
            connection.sendall(index + b" " + text.encode() + b"\n")


def is_outcome(payload: bytes) -> bool:
    """Say whether a line of a worker is what `serve_calls` writes: the grader's own code can reach the socket, too."""
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError):
        return False
    if not isinstance(found, dict) or found.keys() != {"kind", "value", "message", "seconds", "retire"}:
        return False
    return isinstance(found["kind"], str) and isinstance(found["message"], str)


class Channel:
    """A socket that carries lines both ways and never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.is_open = True
        self.incoming, self.outgoing = bytearray(), bytearray()

    def read_lines(self) -> list[bytes]:
        """Read once and return the completed lines; clear `is_open` at end of stream."""
        try:
            chunk = self.socket.recv(CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            chunk = b""
        self.is_open = bool(chunk)
        self.incoming += chunk
        if b"\n" not in chunk:
            return []
        *lines, rest = self.incoming.split(b"\n")
        self.incoming = bytearray(rest)
        return [bytes(line) for line in lines]

    def write(self, data: bytes = b"") -> None:
        """Send what the socket accepts now, and keep the rest."""
        self.outgoing += data
        try:
            while self.outgoing:
                del self.outgoing[: self.socket.send(self.outgoing[:CHUNK])]
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                self.outgoing.clear()


@dataclass(frozen=True, slots=True)
class Call:
    """One queued call: its client, index and arguments."""

    client: Channel
    index: bytes
    payload: bytes


@dataclass(eq=False, slots=True)
class Worker:
    """One forked process and its current call, running since `started` (monotonic seconds)."""

    pid: int
    channel: Channel
    call: Call | None = None
    started: float = 0.0
    looked_at: float = 0.0
    computed_s: float = 0.0

    def is_running(self, now: float, patience_s: float) -> bool:
        """Say whether its call takes the place of another: it is neither too old, nor waits for something else."""
        if self.call is None or now - self.started >= patience_s:
            return False
        if now - self.started < WAITS_S:
            return True
        runs, seconds = processor_s(self.pid)
        if self.looked_at < self.started:
            self.looked_at, self.computed_s = now, seconds
        return runs or seconds - self.computed_s > BUSY * (now - self.looked_at)


@dataclass(eq=False)
class Server:
    """Hands calls to workers and enforces deadlines.

    At most `num_workers` calls younger than PATIENCE of the deadline run at a time. Older ones are presumed to hang,
    and those whose processes sleep to wait for something else, such as a service: until they end more workers are
    started, up to `max_workers`.
    """

    control: socket.socket
    function: Callable[..., Any]
    deadline_s: float
    memory_mib: int
    num_workers: int
    max_workers: int
    queue: deque[Call] = field(default_factory=deque)
    clients: list[Channel] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    dying: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Serve until the control socket closes or the parent is gone; then kill every worker."""
        parent = os.getppid()
        is_running = True
        while is_running and os.getppid() == parent:
            ready = self._wait()
            for client in [client for client in self.clients if client.socket.fileno() in ready]:
                self._serve(client)
            for worker in [worker for worker in self.workers if worker.channel.socket.fileno() in ready]:
                self._listen(worker)
            if self.control.fileno() in ready:
                is_running = self._accept()
            self._end_late_calls()
            self._dispatch()
            self._reap(os.WNOHANG)
        for worker in list(self.workers):
            self._kill(worker)
        self._reap(0)

    def _wait(self) -> set[int]:
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        for channel in (*self.clients, *(worker.channel for worker in self.workers)):
            poll.register(channel.socket, select.POLLIN | (select.POLLOUT if channel.outgoing else 0))
        now = time.monotonic()
        waits = [REAP_S if self.dying else TICK_S]
        for worker in self.workers:
            if worker.call is not None:
                age = now - worker.started
                patience = PATIENCE * self.deadline_s
                waits.append((patience if self.queue and age < patience else self.deadline_s) - age)
                if self.queue and len(self.workers) < self.max_workers:
                    waits.append(WAITS_S)
        return {fd for fd, _ in poll.poll(max(0.0, min(waits)) * 1000 + 0.5)}

    def _accept(self) -> bool:
        try:
            mark, descriptors, _, _ = socket.recv_fds(self.control, 1, 1)
        except OSError:
            return False
        self.clients += [Channel(socket.socket(fileno=fd)) for fd in descriptors]
        return bool(mark)

    def _serve(self, client: Channel) -> None:
        for line in client.read_lines():
            index, _, payload = line.partition(b" ")
            self.queue.append(Call(client, index, payload))
        client.write()
        if not client.is_open:
            self.clients.remove(client)
            client.socket.close()
            self.queue = deque(call for call in self.queue if call.client is not client)
            for worker in [w for w in self.workers if w.call is not None and w.call.client is client]:
                self._kill(worker)

    def _listen(self, worker: Worker) -> None:
        worker.channel.write()
        call = worker.call
        for line in worker.channel.read_lines():
            index, _, payload = line.partition(b" ")
            if call is None or index != call.index or not is_outcome(payload):
                self._answer(worker, "error", "the grader wrote into its own result channel")
                self._kill(worker)
                return
            call.client.write(line + b"\n")
            call = worker.call = None
            is_spare = sum(other.call is None for other in self.workers) > self.num_workers
            if is_spare or payload.endswith(b'"retire": true}'):
                self._kill(worker)
                return
        if not worker.channel.is_open:
            self._kill(worker)
            self.dying.discard(worker.pid)
            code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
            how = f"exit status {code}" if code >= 0 else f"signal {-code}: {signal.strsignal(-code)}"
            self._answer(worker, "error", f"the grader's process ended before it answered ({how})")

    def _end_late_calls(self) -> None:
        now = time.monotonic()
        for worker in list(self.workers):
            if worker.call is not None and now - worker.started >= self.deadline_s:
                self._kill(worker)
                self._answer(worker, "timeout", f"not done after {self.deadline_s:g} s")

    def _answer(self, worker: Worker, kind: str, message: str) -> None:
        if worker.call is not None:
            seconds = time.monotonic() - worker.started
            outcome = {"kind": kind, "value": None, "message": message, "seconds": seconds}
            worker.call.client.write(worker.call.index + b" " + json.dumps(outcome).encode() + b"\n")
            worker.call = None

    def _dispatch(self) -> None:
        if not self.queue:
            return
        now, patience_s = time.monotonic(), PATIENCE * self.deadline_s
        num_running = sum(worker.is_running(now, patience_s) for worker in self.workers)
        while self.queue and num_running < self.num_workers:
            worker = next((worker for worker in self.workers if worker.call is None), None)
            if worker is None:
                if len(self.workers) >= self.max_workers:
                    return
                worker = self._start_worker()
            call = worker.call = self.queue.popleft()
            worker.started = time.monotonic()
            worker.channel.write(call.index + b" " + call.payload + b"\n")
            num_running += 1

    def _start_worker(self) -> Worker:
        ours, theirs = socket.socketpair()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setpgid(0, 0)
                if sys.platform == "linux":  # the kernel kills this process when the server dies
                    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != server:  # the server died before prctl took effect
                    os._exit(1)
                channels = (*self.clients, *(worker.channel for worker in self.workers))
                for connection in (self.control, ours, *(channel.socket for channel in channels)):
                    connection.close()
                serve_calls(theirs, self.function, self.memory_mib << 20)
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        worker = Worker(pid, Channel(ours))
        self.workers.append(worker)
        return worker

    def _kill(self, worker: Worker) -> None:
        """Kill a worker with its process group, which includes the grader's own subprocesses."""
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):  # not yet its own group, or gone
                kill(worker.pid, signal.SIGKILL)
        self.workers.remove(worker)
        worker.channel.socket.close()
        self.dying.add(worker.pid)

    def _reap(self, options: int) -> None:
        self.dying = {pid for pid in self.dying if os.waitpid(pid, options)[0] == 0}


def main(control: socket.socket, settings: Mapping[str, Any]) -> None:
    """Load the grader, report on the control socket, and serve until that closes or the parent is gone.

    Args:
        control: Carries the report, then the clients' sockets.
        settings: The settings of `whet.sandbox.graders.graders.GraderPool`.
    """
    sys.path[:], sys.argv[:] = settings["sys_path"], settings["argv"]
    os.dup2(2, 1)  # a grader's prints must not mix with the trainer's standard output
    try:
        function = rebuild(settings["parcel"]) if settings["parcel"] else load_function(settings["spec"])
        if settings["parameters"]:
            check_parameters(function, settings["parameters"])
        if settings["prepare"]:
            load_function(settings["prepare"])()
    except BaseException as error:
        is_told = isinstance(error, LoadError)
        told = str(error) if is_told else f"{settings['prepare']} failed: {describe(error)}"
        answer = {"error": told, "is_reentry": is_told and error.is_reentry}
        control.sendall(json.dumps(answer).encode() + b"\n")
        return
    control.sendall(b'{"error": ""}\n')
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.collect()
    gc.freeze()  # forks share these pages: the collector must not write to them
    Server(control, function, **settings["limits"]).run()
