"""The client's side of one child: its streams, its end, and the verdict on it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal

from whet.install import NoPosix
from whet.sandbox.inside import child as inside
from whet.sandbox.inside.codec import MAX_BYTES
from whet.sandbox.inside.remote import LENGTH
from whet.sandbox.inside.supervisor import MAX_THREADS, NUM_FDS, REPORT, REQUEST, TOO_MANY_THREADS
from whet.sandbox.launch import Supervisor, SupervisorError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = NoPosix()  # pyright: ignore[reportAssignmentType]

Status = Literal["ok", "wrong", "rte", "tle", "mle", "ole", "killed", "infra_error"]
Stage = Literal["syntax", "import", "run", "done"]

SETUP_S = 20.0
"""Seconds from the request until a child is ready, and from a kill until it is gone; beyond them the machine is to
blame."""

MAX_STATUS_BYTES = 4096
_ADD_SEALS, _ALL_SEALS = 1033, 15
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How a program ended.

    Example:
        >>> run_python("print(6 * 7)", timeout_s=5, memory_mib=256).stdout
        '42\\n'

    Attributes:
        status: `ok` ended with exit code 0; `rte` exception or other exit code; `tle` out of time; `mle` out of memory;
            `ole` wrote too much; `killed` died of a signal, or had too many threads; `infra_error` no verdict, and not
            the program's fault: never a reward of 0.
        stdout: What it wrote, as UTF-8; invalid bytes become U+FFFD.
        stderr: The same.
        exit_code: Negative for a signal; None for `infra_error`.
        seconds: Wall time, until the process was gone.
        backend: `bwrap` or `landlock`; '' if none could be started.
        message: One readable line: the exception or the limit.
        stage: How far it got: did not compile (`syntax`), lacked a module (`import`), stopped while running (`run`),
            reached its end or sys.exit (`done`). A hostile program can pretend to have got further.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    backend: str = ""
    message: str = ""
    stage: Stage = "syntax"


class Process:
    """A child and the client's ends of its pipes. A context manager that leaves nothing behind."""

    def __init__(
        self,
        supervisor: Supervisor,
        payload: Mapping[str, Any],
        *,
        stdin: bytes = b"",
        memory_mib: int,
        cpu_s: int,
        max_output_bytes: int,
    ) -> None:
        """Request a child.

        Args:
            supervisor: Forks it.
            payload: What it runs; see `child.py`.
            stdin: All that it can read.
            memory_mib: Memory beyond the interpreter's own.
            cpu_s: CPU seconds of all its threads.
            max_output_bytes: Cap of stdout, and of stderr.

        Raises:
            SupervisorError: If the supervisor is gone.
        """
        self.backend = supervisor.backend
        self.memory_mib, self.max_output_bytes = memory_mib, max_output_bytes
        self.started = time.monotonic()
        self.report: tuple[int, int, int] | None = None
        self.is_over = self.is_lost = False
        self.readers: dict[int, bytearray] = {}
        self.inbox, self.outbox = bytearray(), bytearray()
        self.stdout, self.stderr, self.status = bytearray(), bytearray(), bytearray()
        with ExitStack() as ours, ExitStack() as theirs:
            try:
                self.link, their_link = socket.socketpair()
                ours.callback(self.link.close)
                theirs.callback(their_link.close)
                self.channel, their_channel = socket.socketpair()
                ours.callback(self.channel.close)
                theirs.callback(their_channel.close)
                self.channel.setblocking(False)
                writers: list[int] = []
                for buffer in (self.stdout, self.stderr, self.status):
                    reader, writer = os.pipe2(os.O_CLOEXEC)
                    ours.callback(os.close, reader)
                    theirs.callback(os.close, writer)
                    os.set_blocking(reader, False)
                    self.readers[reader] = buffer
                    writers.append(writer)
                files = [_memory_file(data, theirs) for data in (stdin, json.dumps(payload).encode())]
                fds = [their_link.fileno(), files[0], *writers, files[1], their_channel.fileno()]
                assert len(fds) == NUM_FDS
                socket.send_fds(supervisor.socket, [REQUEST.pack(memory_mib << 20, cpu_s)], fds)
            except OSError as error:  # no file descriptors left, a file size limit, or the supervisor is gone
                raise SupervisorError(str(error)) from None
            ours.pop_all()

    @property
    def is_ready(self) -> bool:
        """Whether it has locked itself in."""
        return self.status[:1] == bytes([inside.READY])

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can come from it: it is gone, or exceeded its output limit."""
        return self.report is not None or self.is_over

    def wait_ready(self) -> None:
        """Wait until it has locked itself in.

        Raises:
            SupervisorError: If it could not.
        """
        pump([self], self.started + SETUP_S, lambda: self.is_ready or self.has_ended)
        if not self.is_ready:
            reason = self.status[1:].decode("utf-8", "replace") or "a child did not start"
            raise SupervisorError(reason)

    def send(self, data: bytes) -> None:
        """Queue a message on its channel."""
        self.outbox += LENGTH.pack(len(data)) + data

    def receive(self) -> bytes | None:
        """Return the next complete message from its channel, if any."""
        if len(self.inbox) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self.inbox)
        if length > 2 * MAX_BYTES:
            self.is_over = True
            return None
        end = LENGTH.size + length
        if len(self.inbox) < end:
            return None
        frame = bytes(self.inbox[LENGTH.size : end])
        del self.inbox[:end]
        return frame

    def events(self) -> dict[int, int]:
        """Return the descriptors to poll and their events."""
        events = dict.fromkeys(self.readers, select.POLLIN)
        if self.report is None:
            events[self.link.fileno()] = select.POLLIN
        if self.channel.fileno() >= 0:
            events[self.channel.fileno()] = select.POLLIN | (select.POLLOUT if self.outbox else 0)
        return events

    def handle(self, fd: int) -> None:
        """Read from or write to a ready descriptor."""
        if fd == self.link.fileno():
            try:
                data = self.link.recv(REPORT.size)
            except (
                ConnectionResetError
            ):  # it closed without reading our kill request; what it sent comes next
                data = self.link.recv(REPORT.size)
            if data:
                self.report = REPORT.unpack(data)
                self._drain()
            else:
                self.is_lost = True
        elif fd in self.readers:
            self._read(fd)
        elif fd == self.channel.fileno():
            self._talk()

    def _read(self, fd: int) -> bool:
        """Read a pipe once; False when there is nothing more."""
        buffer = self.readers[fd]
        limit = MAX_STATUS_BYTES if buffer is self.status else self.max_output_bytes
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            os.close(fd)
            del self.readers[fd]
            return False
        buffer += data
        if len(buffer) > limit:
            del buffer[limit:]
            self.is_over = True
        return not self.is_over

    def _talk(self) -> None:
        try:
            if self.outbox:
                del self.outbox[: self.channel.send(self.outbox[:_CHUNK])]
            data = self.channel.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.inbox += data
        self.is_over = self.is_over or len(self.inbox) > 3 * MAX_BYTES
        if not data:
            self.channel.close()

    def _drain(self) -> None:
        """Read what an ended child left in its pipes."""
        for fd in list(self.readers):
            while fd in self.readers and self._read(fd):
                pass

    def kill(self) -> None:
        """End it and wait until it is gone.

        Raises:
            SupervisorError: If that does not happen.
        """
        if self.report is None:
            with suppress(OSError):
                self.link.send(b"k")
            pump([self], time.monotonic() + SETUP_S, lambda: self.report is not None)
            if self.report is None:
                raise SupervisorError("a child could not be ended")

    def close(self) -> None:
        """End it and close everything."""
        try:
            if not self.is_lost:
                self.kill()
        finally:
            self.link.close()
            self.channel.close()
            for fd in self.readers:
                os.close(fd)
            self.readers.clear()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(SupervisorError):
            self.close()


def _memory_file(data: bytes, stack: ExitStack) -> int:
    """Return a read-only in-memory file with the data; the stack closes it."""
    fd = os.memfd_create("data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, fd)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, _ADD_SEALS, _ALL_SEALS)
    return fd


def pump(processes: Sequence[Process], deadline: float, is_done: Callable[[], bool]) -> bool:
    """Transfer data until a condition holds.

    Args:
        processes: The children to serve.
        deadline: Latest end, on the monotonic clock.
        is_done: The condition.

    Returns:
        Whether it held before the deadline.

    Raises:
        SupervisorError: If the supervisor is gone.
    """
    while not is_done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        poll = select.poll()
        owner = {}
        for process in processes:
            if process.is_lost:
                raise SupervisorError("the supervisor is gone")
            for fd, events in process.events().items():
                poll.register(fd, events)
                owner[fd] = process
        for fd, _ in poll.poll(1000 * left):
            if owner[fd].events().get(fd):
                owner[fd].handle(fd)
    return True


def judge_end(process: Process, is_late: bool) -> tuple[Status, int, str]:
    """Say how a child ended.

    Args:
        process: A child that is gone.
        is_late: Whether it was killed for exceeding its time.

    Returns:
        Status, exit code, message.
    """
    assert process.report is not None
    wait_status, reason, max_kib = process.report
    code = os.waitstatus_to_exitcode(wait_status)
    letters = bytes(process.status)
    text = one_line(letters.partition(bytes([inside.FAILED]))[2].decode("utf-8", "replace"))
    if process.is_over:
        return "ole", code, f"exceeded its output limit ({process.max_output_bytes:,} bytes of output)"
    if reason == TOO_MANY_THREADS:
        return "killed", code, f"had more than {MAX_THREADS} threads"
    if is_late or code == -signal.SIGXCPU:
        return "tle", code, "out of time"
    is_full = code < 0 and max_kib > 0.9 * (process.memory_mib << 10)
    if bytes([inside.OUT_OF_MEMORY]) in letters.partition(bytes([inside.FAILED]))[0] or is_full:
        return "mle", code, f"needed more than {process.memory_mib} MiB"
    if code < 0:
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        # The kernel's killer, too, takes a program that is small itself where the whole machine is out of memory.
        either = " (its own, or the kernel's on a machine without memory)" if code == -signal.SIGKILL else ""
        return "killed", code, f"died of {name}{either}"
    return ("rte" if code else "ok"), code, text or (f"exit code {code}" if code else "")


def one_line(text: str) -> str:
    """Return a program's text on one line, with everything escaped that could move a terminal's cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def stage_of(process: Process) -> Stage:
    """Return how far a program got, as its process reported."""
    letters = bytes(process.status).partition(bytes([inside.FAILED]))[0]
    if inside.COMPILED not in letters:
        return "syntax"
    if inside.IMPORT_FAILED in letters:
        return "import"
    return "done" if inside.DONE in letters else "run"


def run_program(
    supervisor: Supervisor,
    code: str,
    stdin: bytes,
    *,
    timeout_s: float,
    memory_mib: int,
    max_output_bytes: int,
) -> Verdict:
    """Run a program in a child of its own.

    Raises:
        SupervisorError: If the sandbox itself failed; nothing is known about the program.
    """
    with Process(
        supervisor,
        {"role": "run", "code": code},
        stdin=stdin,
        memory_mib=memory_mib,
        cpu_s=cpu_limit(timeout_s),
        max_output_bytes=max_output_bytes,
    ) as process:
        process.wait_ready()
        is_in_time = pump([process], time.monotonic() + timeout_s, lambda: process.has_ended)
        process.kill()
        status, exit_code, message = judge_end(process, is_late=not is_in_time)
        return Verdict(
            status=status,
            stdout=process.stdout.decode("utf-8", "replace"),
            stderr=process.stderr.decode("utf-8", "replace"),
            exit_code=exit_code,
            seconds=time.monotonic() - process.started,
            backend=process.backend,
            message=message,
            stage=stage_of(process),
        )


def cpu_limit(wall_s: float) -> int:
    """Return a CPU limit that a program with a few threads cannot reach within its wall time."""
    return int(4 * wall_s) + 4
