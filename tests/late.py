"""Packages that take seconds to import, for the tests that need them: not for every process that collects tests."""

from __future__ import annotations

from typing import Any

import pytest


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
