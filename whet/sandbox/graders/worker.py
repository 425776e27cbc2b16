"""The keeper of a grader's processes: it starts the server, and ends everything below when that, or the pool, ends.

Started as a script by `graders.py`, with the descriptor of a socket as argument and JSON settings as the
first line of standard input. That pipe then stays open until the pool is closed or its process is gone, killed
included; the keeper runs nothing of the user's, so it notices at once, even while a grader's import hangs. On Linux
it is the subreaper of all that is below it: whoever was started there, and left his parent, is found and killed too.
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
"""How often the keeper looks whether its parent still lives: a fork of that may hold the pipe open."""
NO_PIDFD_TICK_S = 0.05
GRACE_S = 1.0
"""Where nobody can be found by his ancestors (macOS), the server gets this time to kill its workers itself."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_IS_LINUX = sys.platform == "linux"


def main() -> NoReturn:
    """Start the server, wait for its end or the pool's, and leave nothing behind."""
    parent = os.getppid()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the trainer ended while it wrote
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
    """Be the server."""
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
        os._exit(0)  # no waiting for threads that an import may have left


def watch(parent: int, server: int) -> None:
    """Return when the server has ended, the pool was closed, or the parent is gone."""
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
    """Kill every process below this one, orphans that are handed up included, and wait until they are gone."""
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
    """Return the processes that have this one as parent (none where /proc does not say)."""
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
        return [int(word) for word in file.read().split()]
    return []


if __name__ == "__main__":
    main()
