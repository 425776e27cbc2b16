"""Guards against re-entry: a worker process, or an import made by whet, must not start trainings or workers.

A reward, a tool or a task lives in a user's file, and importing that file runs its top level. If that starts a
training, the training's workers would import the file in turn and start another training, without end. So everything
that starts processes or a run checks here first.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from whet.types import UserError

VARIABLE = "WHET_WORKER"
"""Environment variable that names what a worker process runs; its child processes inherit it."""
PARENT_EVERY_S = 0.5
_imported: ContextVar[str] = ContextVar("imported", default="")


class ReentryError(UserError):
    """Something was started in a place where it would start itself again; the message is one line with the remedy."""


def is_worker() -> bool:
    """Say whether this process is a grader's worker, or was started by one."""
    return bool(os.environ.get(VARIABLE))


@contextmanager
def importing(file: str) -> Iterator[None]:
    """Refuse trainings while this process imports a user's file.

    Args:
        file: Its name, for messages.
    """
    token = _imported.set(file)
    try:
        yield
    finally:
        _imported.reset(token)


def refuse_in_worker(what: str) -> None:
    """Refuse to start something in a worker process.

    Args:
        what: What is refused, as the subject of a sentence: 'a training'.

    Raises:
        ReentryError: If this is a worker process.
    """
    if is_worker():
        _refuse(what, f"the worker process of '{os.environ[VARIABLE]}'")


def refuse_reentry(what: str) -> None:
    """Refuse to start something in a worker process, or while a user's file is imported.

    Args:
        what: What is refused, as the subject of a sentence: 'a training'.

    Raises:
        ReentryError: If this is a worker process, or a user's file is being imported.
    """
    refuse_in_worker(what)
    if _imported.get():
        _refuse(what, f"the import of {_imported.get()}")


def _refuse(what: str, place: str) -> None:
    raise ReentryError(
        f"{what} was started inside {place}, and would start itself again without end: move the call under "
        "if __name__ == '__main__':"
    )


def end_with_parent() -> None:
    """Kill this process within a second of its parent's end, for whatever reason.

    A thread polls: the kernel's parent-death signal is sent already when the parent's *thread* ends.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_EVERY_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
