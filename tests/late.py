"""What comes late: packages that take seconds to import, and what another thread or process does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class Late:
    """A module that is imported when a test first uses it; a test is skipped where it is not installed.

    Args:
        name: Its name.
        reason: What a skipped test says.
    """

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason = name, reason

    def __getattr__(self, attribute: str) -> Any:
        # pytest asks everything that a file of tests names whether it is a fixture
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(pytest.importorskip(self._name, reason=self._reason), attribute)


def wait_for(condition: Callable[[], T], patience_s: float = 20.0) -> T:
    """Return the condition's first true value, or its last one: a sleep of one length is too short on a busy machine.

    Args:
        condition: What is asked for every few milliseconds.
        patience_s: Seconds after which it is asked no more.
    """
    end = time.monotonic() + patience_s
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.005)
    return found
