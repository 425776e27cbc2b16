"""The keeper of a grader's processes: it starts the server, and kills everything below when the server or pool ends.

Started as a script by `graders.py`, with the descriptor of a socket as argument and JSON settings as the
first line of standard input. That pipe stays open until the pool is closed or its process is gone, even killed. The
keeper runs no user code, so it notices immediately, even while a grader's import hangs. On Linux it is the subreaper of
all processes below it: it also finds and kills those that left their parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

TICK_S = 0.5
"""Interval at which the keeper checks that its parent is alive: a fork of the parent may hold the pipe open."""
NO_PIDFD_TICK_S = 0.05
GRACE_S = 1.0
"""Without a subreaper (macOS), the server gets this time to kill its workers itself."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_IS_LINUX = sys.platform == "linux"


def main() -> NoReturn:
    """Start the server, wait until it or the pool ends, and leave no process behind."""
    parent = os.getppid()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the trainer died while writing
        os._exit(1)
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(line)
    if _IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    keeper = os.getpid()
    server = os.fork()
    if server == 0:
        serve(control, settings, keeper)
    control.close()
    try:
        watch(parent, server)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all(server)
        os._exit(0)


def serve(control: socket.socket, settings: dict[str, Any], keeper: int) -> NoReturn:
    """Run as the server."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        if _IS_LINUX:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        if os.getppid() == keeper:
            sys.path.insert(0, str(Path(__file__).parents[3]))
            from whet.sandbox.graders import server as grader_server

            grader_server.main(control, settings)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(0)  # do not wait for threads that an import may have left


def watch(parent: int, server: int) -> None:
    """Wait until the server has ended, the pool was closed, or the parent is gone."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    tick_s = NO_PIDFD_TICK_S
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):
            poll.register(os.pidfd_open(server), select.POLLIN)
            tick_s = TICK_S
    while os.getppid() == parent and not poll.poll(1000 * tick_s):
        with suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                if pid == server:
                    return


def end_all(server: int) -> None:
    """Kill every process below this one, including reparented orphans, and wait until they are gone."""
    deadline = time.monotonic() + (0 if _IS_LINUX else GRACE_S)
    with suppress(ChildProcessError):
        while True:
            if time.monotonic() >= deadline:
                for pid in {*children(), server}:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.005)


def children() -> list[int]:
    """Return the child processes of this one (none without /proc)."""
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
        return [int(word) for word in file.read().split()]
    return []


if __name__ == "__main__":
    main()
