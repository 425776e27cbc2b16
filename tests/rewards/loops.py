"""What the tests of long loops share: a model that repeats itself must not hold up the grader."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SIZE = 64 * 1024
LITTLE = 0.1  # seconds; the dearest takes 0.03 on a quiet core, one whose time is quadratic 0.4 and more


def seconds(function: Callable[..., Any], *arguments: str) -> float:
    """Return the least processor time of five calls, for other processes share these cores."""
    best = 9.0
    for _ in range(5):
        start = time.process_time()
        function(*arguments)
        best = min(best, time.process_time() - start)
        if best < LITTLE:
            break
    return best
