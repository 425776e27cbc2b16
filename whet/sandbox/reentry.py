"""What a worker process, and an import on behalf of whet, must not start: a training, or workers of their own.

A reward, a tool or a task lives in a file of the user's, and whoever imports that file runs its top level. Where this
starts a training, the training's workers would import the file in turn, and start the next training, without an end.
So everything that starts processes or a run asks here first.
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
"""Environment variable that names what a worker process runs; programs that a worker starts inherit it."""
PARENT_EVERY_S = 0.5
_imported: ContextVar[str] = ContextVar("imported", default="")


class ReentryError(UserError):
    """Something was started where it would start itself again; the message is one line with the remedy."""


def is_worker() -> bool:
    """Say whether this process is a grader's worker, or was started by one."""
    return bool(os.environ.get(VARIABLE))


@contextmanager
def importing(file: str) -> Iterator[None]:
    """Refuse trainings while a file of the user's is imported in this process.

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
        ReentryError: If this is one.
    """
    if is_worker():
        _refuse(what, f"the worker process of '{os.environ[VARIABLE]}'")


def refuse_reentry(what: str) -> None:
    """Refuse to start something in a worker process, and while a file of the user's is imported.

    Args:
        what: What is refused, as the subject of a sentence: 'a training'.

    Raises:
        ReentryError: If this is such a place.
    """
    refuse_in_worker(what)
    if _imported.get():
        _refuse(what, f"the import of {_imported.get()}")


def _refuse(what: str, place: str) -> None:
    raise ReentryError(
        f"{what} was started inside {place}, and would start itself again without an end: move the call under "
        "if __name__ == '__main__':"
    )


def end_with_parent() -> None:
    """Kill this process within a second of its parent's end, however that came about.

    A thread looks: the kernel's own signal at a parent's death comes already when the parent's *thread* ends.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_EVERY_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
