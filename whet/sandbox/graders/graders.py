"""A pool of killable worker processes for graders, which may hang, crash or use too much memory.

A pool starts one process (`whet.sandbox.graders.worker`, a fresh interpreter, not a fork of the trainer); a server
below it loads the grader once and forks workers from itself, so that replacing a killed one takes milliseconds. Calls
and outcomes travel as JSON lines on separate sockets; nothing is pickled, and what a grader prints goes to standard
error. When the pool is closed, or its process ends in any way, all of them are killed.

A grader is named ('path/to/file.py:name', 'package.module:name') and imported there, or given as a function. A function
of the main script or of a notebook is sent as source with what it needs (`whet.sandbox.graders.shipping`): importing
the script would run its training again. Inside a worker no pool is started (`whet.sandbox.reentry`).

Arguments are JSON values (tuples arrive as lists) or `whet.types.Problem`s, which arrive as such: their positions are
sent along. A grader may be a coroutine function.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from whet.sandbox.graders.loading import load_function
from whet.sandbox.graders.server import grade
from whet.sandbox.graders.shipping import ship_function, ship_name
from whet.sandbox.reentry import VARIABLE, is_worker, refuse_in_worker
from whet.types import Problem, UserError

START_TIMEOUT_S = 120.0
"""Longest time that importing a grader may take."""
STOP_TIMEOUT_S = 5.0
NUM_ATTEMPTS = 2
"""Attempts at a call when the server process itself dies."""
OWN_FUNCTIONS = "whet."
"""Graders that import no user file: inside a worker, which already has a deadline, they run in-process."""
_CLOSED = "this grader pool is closed"
_WORKER = Path(__file__).with_name("worker.py")
_THREADS = {"OMP_NUM_THREADS": "1"}
"""One thread for numeric libraries in a worker (there are as many workers as cores); the user's setting wins."""

OutcomeKind = Literal["ok", "timeout", "memory", "error"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one call.

    Attributes:
        value: What the grader returned: None, bool, int, float, str, or lists and dicts of these; None unless 'ok'.
        kind: 'ok', 'timeout' (killed at its deadline), 'memory' or 'error' (it raised, died, or returned something
            else).
        message: One line on what went wrong, '' when 'ok'.
        seconds: Wall time of the call, without the wait for a worker.
    """

    value: Any
    kind: OutcomeKind
    message: str
    seconds: float


class GraderPool:
    """Persistent killable workers that run one function; usable from several threads, and as a context manager.

    Args:
        function: 'path/to/file.py:name' or 'package.module:name', or the function itself.
        deadline_s: Seconds of wall time that a call may take before its worker is killed.
        memory_mib: MiB of address space that a worker may take above what importing the grader took (Linux).
        num_workers: Concurrent calls; 0: one per core that this process may use.
        max_workers: Processes at most: while calls hang, more workers are started, so that 64 calls of which 10 hang
            cost about one deadline.
        prepare: A function (spec as above, without arguments) that is called once, before any worker is forked:
            for imports and tables that all workers share.
        parameters: What the function is called with; empty leaves it unchecked.

    Raises:
        UserError: If a number is out of range; if the function is malformed, missing, fails to import or does not take
            the parameters; or if this is itself a worker process and the function is not whet's own.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        *,
        deadline_s: float = 2.0,
        memory_mib: int = 1024,
        num_workers: int = 0,
        max_workers: int = 32,
        prepare: str = "",
        parameters: Sequence[str] = (),
    ) -> None:
        num_workers = num_workers or min(num_cores(), max_workers)
        if not 0 < deadline_s < math.inf:
            raise UserError(f"deadline_s = {deadline_s}: expected a time above 0 seconds")
        if memory_mib < 1:
            raise UserError(f"memory_mib = {memory_mib}: expected 1 MiB or more")
        if not 0 < num_workers <= max_workers:
            raise UserError(f"num_workers = {num_workers}: expected 0 (cores) to max_workers = {max_workers}")
        self._lock = threading.Lock()
        self._is_closed = False
        self._in_place: Callable[..., Any] | None = None
        if is_worker() and str(function).startswith(OWN_FUNCTIONS):
            self._in_place = load_function(str(function))
            return
        refuse_in_worker("a pool of graders")
        spec, parcel = _target(function)
        self._settings = {
            "spec": spec,
            "parcel": parcel,
            "prepare": _check_spec(prepare) if prepare else "",
            "parameters": list(parameters),
            "sys_path": [*map(str, sys.path)],
            "argv": [*map(str, sys.argv)],
            "limits": {
                "deadline_s": deadline_s,
                "memory_mib": memory_mib,
                "num_workers": num_workers,
                "max_workers": max_workers,
            },
        }
        self._start()

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def map(self, calls: Sequence[Sequence[Any]]) -> list[Outcome]:
        """Run the function on every tuple of arguments.

        Args:
            calls: The arguments of each call: JSON values or Problems.

        Returns:
            One outcome per call, in the order of the calls.

        Raises:
            TypeError: If an argument is not a JSON value.
            RuntimeError: If the pool is closed.
        """
        lines = {index: _encode(index, args) for index, args in enumerate(calls)}
        if self._in_place is not None:
            with asyncio.Runner() as runner:
                payloads = [line.partition(b" ")[2] for line in lines.values()]
                return [Outcome(**grade(self._in_place, payload, runner)) for payload in payloads]
        outcomes: dict[int, Outcome] = {}
        for _ in range(NUM_ATTEMPTS):
            if len(outcomes) < len(lines):
                self._run({index: line for index, line in lines.items() if index not in outcomes}, outcomes)
        if len(outcomes) < len(lines) and self._is_closed:
            raise RuntimeError(_CLOSED)
        lost = Outcome(None, "error", f"the grader server died {NUM_ATTEMPTS} times under this batch", 0.0)
        return [outcomes.get(index, lost) for index in lines]

    def close(self) -> None:
        """Kill all workers and end the server; calls in progress raise RuntimeError."""
        with self._lock:
            self._is_closed = True
            if self._in_place is None:
                self._finalizer()

    def _run(self, lines: dict[int, bytes], outcomes: dict[int, Outcome]) -> None:
        """Send calls and collect their outcomes; return early if the server dies."""
        with self._connect() as connection, connection.makefile("rb") as reader:
            try:
                connection.sendall(b"".join(lines.values()))
                for _ in lines:
                    index, _, text = reader.readline().partition(b" ")
                    if not text.endswith(b"\n"):
                        return
                    try:
                        got = json.loads(text)
                    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, lists in lists
                        got = {
                            "value": None,
                            "kind": "error",
                            "message": f"its result cannot be read ({error})",
                        }
                        got["seconds"] = 0.0
                    outcomes[int(index)] = Outcome(got["value"], got["kind"], got["message"], got["seconds"])
            except ConnectionError:
                return

    def _connect(self) -> socket.socket:
        """Open this thread's own connection to the server; restart the server if it died."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            if self._is_closed:
                ours.close()
                raise RuntimeError(_CLOSED)
            try:
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
            except OSError:
                self._finalizer()
                self._start()
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
        return ours

    def _start(self) -> None:
        """Start the server, and wait until it has the grader."""
        answer = self._launch()
        if answer.get("is_reentry") and (spec := self._settings["spec"]):
            # Importing the file starts a training: send the function without the rest of the file.
            file = _file_of(spec)
            live = next((vars(m) for m in list(sys.modules.values()) if _path_of(m) == file), {})
            if file is not None:
                parcel = ship_name(file, spec.rpartition(":")[2], live)
                # Its folder is searched as an import of the file, and a run of it as a script, would.
                path = [str(file.parent), *self._settings["sys_path"]]
                self._settings |= {"spec": "", "parcel": parcel, "sys_path": path}
                answer = self._launch()
        if error := answer["error"]:
            self._finalizer()
            prefix = "" if error.startswith("grader '") else f"grader '{self._name}': "
            raise UserError(prefix + error)
        self._control.settimeout(None)

    @property
    def _name(self) -> str:
        parcel = self._settings["parcel"]
        return f"{parcel['file']}:{parcel['label']}" if parcel else self._settings["spec"]

    def _launch(self) -> dict[str, Any]:
        """Start the processes; return what the server reports."""
        self._control, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,  # end of file tells the keeper that this process is gone
                env=_THREADS | dict(os.environ) | {VARIABLE: self._name},
                start_new_session=True,  # Ctrl-C is the trainer's to handle
            )
        self._finalizer = weakref.finalize(self, _stop, self._control, process, os.getpid())
        self._control.settimeout(START_TIMEOUT_S)
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(self._settings).encode() + b"\n")
            process.stdin.flush()
            with self._control.makefile("rb") as reader:
                answer = reader.readline()
            return json.loads(answer) if answer else {"error": "its process died while importing it"}
        except TimeoutError:
            return {"error": f"importing it took more than {START_TIMEOUT_S:g} s"}
        except BrokenPipeError:
            return {"error": "its process died on startup"}
        except BaseException:  # Ctrl-C
            self._finalizer()
            raise


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _stop(control: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    """End the keeper, and with it all processes below."""
    control.close()
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    if os.getpid() != owner:  # a fork of the process that started it
        return
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _target(function: str | Callable[..., Any]) -> tuple[str, dict[str, Any] | None]:
    """Return the spec by which a worker imports a function; or '' and the parcel to rebuild it from."""
    spec = _check_spec(function) if isinstance(function, str) else _spec_of(function)
    if not isinstance(function, str):
        return (spec, None) if spec else ("", ship_function(function))
    main = sys.modules["__main__"]
    script = _path_of(main)
    if script is not None and script == _file_of(spec):
        return "", ship_name(script, spec.rpartition(":")[2], vars(main))
    return spec, None


def _spec_of(function: Callable[..., Any]) -> str:
    """Return the spec that names the same function in another process; '' if there is none."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not function:
        return ""
    if getattr(module.__spec__, "_initializing", False):  # importing this module is what starts the training
        return ""
    package = sys.modules.get(module.__name__.rpartition(".")[0])
    # Not `importlib.util.find_spec`: it reports what is loaded in this process, under any name.
    for finder in sys.meta_path:
        found = finder.find_spec(module.__name__, getattr(package, "__path__", None))
        if found is not None:
            if module.__spec__ is not None and found.origin == module.__spec__.origin:
                return f"{module.__name__}:{name}"
            break
    file = _path_of(module)
    return f"{file}:{name}" if file is not None and file.suffix == ".py" else ""


def _path_of(module: Any) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if isinstance(file, str) else None


def _file_of(spec: str) -> Path | None:
    """Return the file that a spec names; None for a module that this process has not loaded."""
    target = spec.rpartition(":")[0]
    return Path(target) if target.endswith(".py") else _path_of(sys.modules.get(target))


def _check_spec(spec: str) -> str:
    """Check a function's spec; return it with an absolute path."""
    target, _, name = spec.rpartition(":")
    is_file = target.endswith(".py")
    if not name.isidentifier() or not (is_file or all(part.isidentifier() for part in target.split("."))):
        raise UserError(f"grader '{spec}': expected 'path/to/file.py:function' or 'package.module:function'")
    if is_file and not Path(target).is_file():
        raise UserError(f"grader '{spec}': there is no file {target} (looked in {Path.cwd()})")
    return f"{Path(target).resolve()}:{name}" if is_file else spec


def _encode(index: int, args: Sequence[Any]) -> bytes:
    call: dict[str, Any] = {"args": list(args)}
    problems = [position for position, arg in enumerate(args) if isinstance(arg, Problem)]
    if problems:
        call["problems"] = problems
        for position in problems:
            problem = args[position]
            record = {field.name: getattr(problem, field.name) for field in fields(problem)}
            call["args"][position] = record | {"meta": dict(problem.meta)}
    return b"%d %s\n" % (index, json.dumps(call).encode())
