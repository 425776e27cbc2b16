"""Runs model-written Python in isolation: one program with its streams, or its functions against tests.

    >>> verdict = run_python("print(sum(map(int, input().split())))", stdin="1 2 3", timeout_s=5, memory_mib=256)
    >>> verdict.status, verdict.stdout
    ('ok', '6\\n')

Guarantees and limits: docs/sandbox.md.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from whet.sandbox.graders.functions import TestResult, TestsVerdict, run_function_tests
from whet.sandbox.jobs import Verdict, run_program
from whet.sandbox.launch import BACKENDS, Supervisor, SupervisorError
from whet.types import UserError

__all__ = ["Sandbox", "TestResult", "TestsVerdict", "Verdict", "run_python", "run_tests"]

T = TypeVar("T")

_PROBE = """
import os, socket, colorsys
def is_denied(function, *arguments):
    try:
        function(*arguments)
    except OSError:
        return True
    return False
print(all([is_denied(socket.socket), is_denied(os.fork), is_denied(os.listdir, "/etc"), is_denied(open, "/tmp/x", "w"),
           is_denied(open, "/etc/passwd"), is_denied(os.kill, os.getppid(), 0)]))
"""


class _Slots:
    """A first-in, first-out semaphore: with Python's, looping threads starve all others."""

    def __init__(self, num_free: int) -> None:
        self._lock = threading.Lock()
        self._num_free = num_free
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        gate = threading.Lock()
        with self._lock:
            if self._num_free:
                self._num_free -= 1
                return
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()
        except BaseException:  # Ctrl-C while it waits
            with self._lock:
                is_waiting = gate in self._waiting
                if is_waiting:
                    self._waiting.remove(gate)
            if not is_waiting:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._num_free += 1


class Sandbox:
    """Runs programs behind the strongest isolation of this machine; thread-safe.

    Start it once and keep it: its small supervisor process forks one child per program. A context manager.

    Attributes:
        backend: The isolation: `bwrap` (namespaces around the rest) or `landlock` (landlock, seccomp, limits).
        num_workers: Programs that run concurrently.
    """

    def __init__(
        self, *, backend: str = "auto", num_workers: int = 0, max_output_bytes: int = 1 << 20
    ) -> None:
        """Start it and check that it contains a probe.

        Args:
            backend: A backend by name, or 'auto' for the strongest that works here.
            num_workers: Programs that run concurrently; further ones wait. 0 for one per core.
            max_output_bytes: Cap of stdout, and of stderr, of a program.

        Raises:
            UserError: If this machine has no such backend; says why.
        """
        if backend not in ("auto", *BACKENDS):
            raise UserError(f"backend = {backend!r}: expected 'auto' or one of {', '.join(BACKENDS)}")
        if num_workers < 0 or max_output_bytes < 1:
            raise UserError(
                f"num_workers = {num_workers}, max_output_bytes = {max_output_bytes}: "
                "expected at least 0 workers and 1 byte"
            )
        if sys.platform != "linux":
            raise UserError(
                f"the sandbox needs Linux, this is {sys.platform}; programs never run without one"
            )
        self._max_output_bytes = max_output_bytes
        self.num_workers = num_workers or len(os.sched_getaffinity(0))
        self._slots = _Slots(self.num_workers)
        self._lock = threading.Lock()
        self._supervisor: Supervisor | None = None
        self._is_closed = False
        self.backend = self._choose(list(BACKENDS) if backend == "auto" else [backend])
        _OPEN.add(self)

    def _choose(self, backends: Sequence[str]) -> str:
        """Start the first backend that contains the probe, and return its name."""
        reasons = []
        for backend in backends:
            try:
                supervisor = Supervisor(backend)
            except SupervisorError as error:
                reasons.append(f"{backend}: {error}")
                continue
            try:
                if backend == "landlock" and not supervisor.has_landlock:
                    raise SupervisorError("this kernel has no landlock")
                verdict = run_program(
                    supervisor, _PROBE, b"", timeout_s=10, memory_mib=128, max_output_bytes=1000
                )
                if verdict.status != "ok":  # no breach: for want of a right, or of a file that it may read
                    raise SupervisorError(f"the probe did not run: {verdict.message}")
                if verdict.stdout != "True\n":
                    raise SupervisorError("the probe was not contained")
            except SupervisorError as error:
                reasons.append(f"{backend}: {error}")
                supervisor.close()
                continue
            self._supervisor = supervisor
            return backend
        raise UserError(
            "no sandbox works on this machine, and programs never run without one; " + "; ".join(reasons)
        )

    def run(
        self, code: str, *, stdin: str | bytes = "", timeout_s: float = 10.0, memory_mib: int = 512
    ) -> Verdict:
        """Run a program as `python program.py` would, isolated.

        Args:
            code: Its text.
            stdin: All that it can read; text is encoded as UTF-8.
            timeout_s: Wall time.
            memory_mib: Address space beyond the interpreter's own.

        Returns:
            How it ended. `infra_error` says nothing about the program and must never become a reward of 0.

        Raises:
            UserError: If a limit is out of range, or the sandbox is closed.
        """
        _check_limits(timeout_s, memory_mib)
        data = _to_bytes(stdin) if isinstance(stdin, str) else stdin

        def job(supervisor: Supervisor) -> Verdict:
            return run_program(
                supervisor,
                code,
                data,
                timeout_s=timeout_s,
                memory_mib=memory_mib,
                max_output_bytes=self._max_output_bytes,
            )

        return self._attempt(job, lambda verdict: verdict)

    def run_tests(
        self,
        code: str,
        tests: Sequence[str],
        *,
        setup: str = "",
        names: Sequence[str] = (),
        has_objects: bool = False,
        timeout_s: float = 10.0,
        memory_mib: int = 512,
    ) -> TestsVerdict:
        """Run tests against a program's functions, in a separate process.

        Arguments and results cross as copies of plain values (numbers, text, bytes, containers of these); the tests get
        a handle for any other object: it can be called, passed back and looped over, and equals nothing.

        Args:
            code: The program; it is loaded as a module named `program`.
            tests: Pieces of Python that raise when the program is wrong, such as `assert f(1) == 2`.
            setup: Python that runs before the first test; all tests see what it defines.
            names: Names that the tests take from the program even if setup or Python defines them. () for every name
                that neither tests, setup nor Python define.
            has_objects: Whether the tests use objects of the program (attributes, methods, `len`, `in`, `[]`), as
                tests of a class do. They then believe what an object says of itself.
            timeout_s: Wall time for loading the program, and for each test.
            memory_mib: Memory of the program, and of the tests, beyond the interpreter's own.

        Returns:
            How loading went, and a result per test.

        Raises:
            UserError: If a limit is out of range, or the sandbox is closed.
        """
        _check_limits(timeout_s, memory_mib)
        if isinstance(tests, str):
            raise UserError("tests is one text; expected a list of texts")

        def job(supervisor: Supervisor) -> TestsVerdict:
            return run_function_tests(
                supervisor,
                code,
                tests,
                setup=setup,
                names=names,
                has_objects=has_objects,
                timeout_s=timeout_s,
                memory_mib=memory_mib,
                max_output_bytes=self._max_output_bytes,
            )

        def failed(verdict: Verdict) -> TestsVerdict:
            result = TestResult(status="infra_error", message=verdict.message)
            return TestsVerdict(program=verdict, results=(result,) * len(tests))

        return self._attempt(job, failed)

    def _attempt(self, job: Callable[[Supervisor], T], failed: Callable[[Verdict], T]) -> T:
        """Run a job when a slot is free; retry once with a new supervisor if the sandbox itself fails."""
        reason = ""
        with self._slots:
            for _ in range(2):
                try:
                    supervisor = self._running()
                    try:
                        return job(supervisor)
                    except SupervisorError:
                        self._discard(supervisor)
                        raise
                except SupervisorError as error:
                    reason = str(error)
        return failed(Verdict(status="infra_error", backend=self.backend, message=reason))

    def _running(self) -> Supervisor:
        with self._lock:
            if self._is_closed:
                raise UserError("this Sandbox is closed; make a new one")
            if self._supervisor is None:
                self._supervisor = Supervisor(self.backend)
            return self._supervisor

    def _discard(self, supervisor: Supervisor) -> None:
        """Drop a supervisor that failed; other threads' jobs on it fail, too, and are retried."""
        with self._lock:
            if self._supervisor is supervisor:
                self._supervisor = None
                supervisor.close()

    def close(self) -> None:
        """Kill all its processes; further calls do nothing."""
        with self._lock:
            self._is_closed = True
            if self._supervisor is not None:
                self._supervisor.close()
                self._supervisor = None

    def _forget(self) -> None:
        """Reset after a fork: the supervisor is not this process's child."""
        self._lock = threading.Lock()
        self._slots = _Slots(self.num_workers)
        if self._supervisor is not None:
            self._supervisor.abandon()
            self._supervisor = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_limits(timeout_s: float, memory_mib: int) -> None:
    if not 0 < timeout_s <= 86_400:
        raise UserError(f"timeout_s = {timeout_s}: expected above 0 and at most 86,400 seconds")
    if not isinstance(memory_mib, int) or not 8 <= memory_mib <= 1 << 20:
        raise UserError(f"memory_mib = {memory_mib}: expected 8 to 1,048,576, a whole number of MiB")


def _to_bytes(text: str) -> bytes:
    """Encode input; lone surrogates that stand for no byte (a model may write them) become U+FFFD."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


_OPEN: weakref.WeakSet[Sandbox] = weakref.WeakSet()
_shared: Sandbox | None = None
_shared_lock = threading.Lock()


def _after_fork() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    for sandbox in list(_OPEN):
        sandbox._forget()


def _close_all() -> None:
    for sandbox in list(_OPEN):
        sandbox.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all)


def _default() -> Sandbox:
    """Return the process's default sandbox, started on first use."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Sandbox()
        return _shared


def run_python(
    code: str, *, stdin: str | bytes = "", timeout_s: float = 10.0, memory_mib: int = 512
) -> Verdict:
    """Run a program in the process's default sandbox; see `Sandbox.run`."""
    return _default().run(code, stdin=stdin, timeout_s=timeout_s, memory_mib=memory_mib)


def run_tests(
    code: str,
    tests: Sequence[str],
    *,
    setup: str = "",
    names: Sequence[str] = (),
    has_objects: bool = False,
    timeout_s: float = 10.0,
    memory_mib: int = 512,
) -> TestsVerdict:
    """Run tests against a program in the process's default sandbox; see `Sandbox.run_tests`."""
    return _default().run_tests(
        code,
        tests,
        setup=setup,
        names=names,
        has_objects=has_objects,
        timeout_s=timeout_s,
        memory_mib=memory_mib,
    )
