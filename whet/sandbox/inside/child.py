"""The child process: it locks itself in, reads its payload, and runs it as `python program.py` would.

A payload is `ROLE` and the program: `run` a program as `__main__`; `serve` its functions to the tests; `judge`: run
tests against what another child serves. It writes one letter per stage to the status pipe. A program could forge the
letters after READY: they say how far it got, never whether an answer is right.
"""

from __future__ import annotations

import builtins
import io
import json
import linecache
import os
import sys
import threading
import traceback
from _sitebuiltins import Quitter, _Helper
from collections.abc import Sequence
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, BinaryIO, cast

from whet.sandbox.inside import lockdown, remote

STATUS_FD, PAYLOAD_FD, CHANNEL_FD, NULL_FD, _RULES_FD = 3, 4, 5, 6, 7
READY, COMPILED, IMPORT_FAILED, OUT_OF_MEMORY, DONE, FAILED = b"RCIMDX"
"""Stages on the status pipe; after FAILED comes why the child could not lock itself in, or the exception."""

PROGRAM = "program.py"
THREAD_STACK_BYTES = 2 << 20
"""Address space of a thread's stack, unless the program asks for more: 128 threads fit in 256 MiB."""

_DEVICES = {os.devnull: NULL_FD, "/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}

_KEPT = (ModuleType, FunctionType, type)
"""Names that `__del__` may still need after a program's other names are deleted."""


def main(
    fds: Sequence[int],
    processes: int,
    ruleset: int,
    *,
    leaves_root: bool,
    parent: int,
    memory_bytes: int,
    cpu_s: int,
) -> None:
    """Run as the child of a job; does not return.

    Args:
        fds: stdin, stdout, stderr, status, payload and, if there is one, the channel.
        processes: The folder /proc, open.
        ruleset: Of landlock; -1 for none.
        leaves_root: See `lockdown.drop_privileges`.
        parent: Process id of the supervisor.
        memory_bytes: Total address space.
        cpu_s: CPU seconds.
    """
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    try:
        os.setsid()
        with suppress(OSError):  # so that the out-of-memory killer takes this process, not the trainer
            score = os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=processes)
            os.write(score, b"1000")
        # Reopened: flags set on the supervisor's descriptor would be visible to later programs.
        null = os.open(f"self/fd/{NULL_FD}", os.O_RDWR, dir_fd=processes)
        os.dup2(null, NULL_FD)
        if ruleset >= 0:
            os.dup2(ruleset, _RULES_FD)
        os.closerange(_RULES_FD + (ruleset >= 0), 1 << 16)
        lockdown.set_limits(memory_bytes, cpu_s)
        lockdown.drop_privileges(leaves_root=leaves_root)
        lockdown.die_with_parent(parent)
        lockdown.apply_filters(_RULES_FD if ruleset >= 0 else -1)
    except BaseException as error:
        _tell(FAILED, str(error))
        os._exit(1)
    _tell(READY)
    payload = json.loads(os.pread(PAYLOAD_FD, os.fstat(PAYLOAD_FD).st_size, 0))
    os.close(PAYLOAD_FD)
    _open_streams()
    role, code = payload["role"], payload["code"]
    if role == "judge":
        remote.judge(CHANNEL_FD, code, payload["names"], payload["has_objects"])
        _finish(0, {})
    if role == "run":
        os.close(CHANNEL_FD)
    module = ModuleType("__main__" if role == "run" else "program")
    module.__file__ = PROGRAM
    sys.modules[module.__name__] = module
    status = _run(code, module)
    if role == "serve" and status == 0:
        try:
            remote.serve(CHANNEL_FD, module.__dict__)
        except MemoryError:
            _tell(OUT_OF_MEMORY)
            os._exit(1)
    _finish(status, module.__dict__)


def _tell(stage: int, text: str = "") -> None:
    with suppress(OSError):
        os.write(STATUS_FD, bytes([stage]) + text.encode("utf-8", "backslashreplace")[:2000])


def _open_streams() -> None:
    """Give the program its own standard streams, as a script in a UTF-8 locale has them."""
    for name, fd, mode, errors in (
        ("stdin", 0, "rb", "surrogateescape"),
        ("stdout", 1, "wb", "surrogateescape"),
        ("stderr", 2, "wb", "backslashreplace"),
    ):
        raw = cast(BinaryIO, open(fd, mode, closefd=False))  # noqa: SIM115
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=name == "stderr")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv, sys.orig_argv = [PROGRAM], ["python", PROGRAM]
    sys.set_int_max_str_digits(
        0
    )  # its time is limited already, and programs may print integers of any length
    for name in ("exit", "quit"):  # defined by the site module, which is not loaded
        setattr(builtins, name, Quitter(name, "end of file"))
    builtins.help = _Helper()
    threading.stack_size(THREAD_STACK_BYTES)
    real_open = builtins.open

    def open_file(file: Any, *args: Any, **kwargs: Any) -> Any:
        """Open a file; the devices that a program may want are already there."""
        fd = _DEVICES.get(file) if isinstance(file, str) else None
        return real_open(file if fd is None else os.dup(fd), *args, **kwargs)

    builtins.open = open_file


def _run(code: str, module: ModuleType) -> int:
    """Compile and run a program in a module; return its exit status and report how far it got."""
    try:
        compiled = compile(code.removeprefix("\ufeff"), PROGRAM, "exec", dont_inherit=True)
    except BaseException as error:
        _tell(FAILED, _describe(error))
        traceback.print_exception(type(error), error, None)
        return 1
    _tell(COMPILED)
    linecache.cache[PROGRAM] = (len(code), None, code.splitlines(keepends=True), PROGRAM)
    try:
        exec(compiled, module.__dict__)
    except SystemExit as error:
        _tell(DONE)
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except MemoryError:
        _tell(OUT_OF_MEMORY)
        os._exit(1)
    except BaseException as error:
        if isinstance(error, ImportError):
            _tell(IMPORT_FAILED)
        _tell(FAILED, _describe(error))
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        with suppress(BaseException):  # the program closed the stream, or its own hook fails
            if (
                sys.excepthook is sys.__excepthook__
            ):  # it cannot show source lines of a program without a file
                traceback.print_exception(error)
            else:
                sys.excepthook(type(error), error, error.__traceback__)
        return 1
    _tell(DONE)
    return 0


def _describe(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:
        text = "?"
    return f"{type(error).__name__}: {text}"[:500]


def _finish(status: int, names: dict[str, Any]) -> None:
    """End as an interpreter does (threads, atexit, `__del__`, streams), without its slow cleanup."""
    import atexit

    steps = [getattr(threading, "_shutdown", None), getattr(atexit, "_run_exitfuncs", None)]
    for step in steps:
        try:
            if step is not None:
                step()
        except MemoryError:
            _tell(OUT_OF_MEMORY)
            os._exit(1)
        except BaseException:
            traceback.print_exc()
    for name in [name for name, value in names.items() if not isinstance(value, _KEPT)]:
        names[name] = None
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:
            status = status or 120
    os._exit(status)
