"""The process-wide choice of C++ kernels: those that were measured to be as fast as PyTorch on this machine, or faster.

`whet.generate.kernel_speed` measures and sets the choice once per process, before the first model computes anything: a
sampler and a trainer with different choices would not agree to the last bit. Until then, and with `WHET_KERNELS=cpp`,
all kernels are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from whet.kernels.cpu import build

Operation = Literal["product", "attention", "decode"]
OPERATIONS: tuple[Operation, ...] = ("product", "attention", "decode")
"""Products with norms, gates and the head; attention; a whole decoding step in one call, which needs the other two."""


TIE = 0.95
"""For large float32 products both are near the machine's peak; timing cannot resolve a smaller difference."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The operations in use, and their measured speed.

    Attributes:
        used: Operations that run on the C++ kernels.
        ratios: Speed over PyTorch's by operation; empty if nothing was measured.
    """

    used: frozenset[Operation] = frozenset(OPERATIONS)
    ratios: Mapping[Operation, float] = field(default_factory=dict)

    @classmethod
    def of(cls, ratios: Mapping[Operation, float]) -> Choice:
        """Use the operations that are at least as fast as PyTorch."""
        used: set[Operation] = {name for name, ratio in ratios.items() if ratio >= TIE}
        # The decoding step has its own products and attention: with PyTorch's in the trainer, the bits would differ.
        if not {"product", "attention"} <= used:
            used.discard("decode")
        return cls(frozenset(used), dict(ratios))


_current: Choice | None = None


def current() -> Choice | None:
    """Return this process's choice; None if it is not made yet."""
    return _current


def take(choice: Choice | None) -> None:
    """Set this process's choice."""
    global _current
    _current = choice


@contextmanager
def taken(choice: Choice) -> Iterator[None]:
    """Use another choice within this context, for measurements and tests."""
    before = _current
    take(choice)
    try:
        yield
    finally:
        take(before)


def uses(operation: Operation) -> bool:
    """Say whether an operation should run on the C++ kernels, if there are any."""
    return _current is None or operation in _current.used


def describe(choice: Choice | None = None) -> str:
    """Describe the CPU kernels in a few words: `C++ avx2, 1.4x PyTorch` or `PyTorch (C++ avx2 was 0.8x)`.

    Args:
        choice: Default: this process's choice.
    """
    if build.library() is None:
        return f"PyTorch ({build.reason().removeprefix('eager: ')})"
    choice = choice or _current or Choice()
    name, ratios = f"C++ {build.instruction_set()}", choice.ratios
    if not choice.used:
        return (
            f"PyTorch ({name} was {_mean(ratios.values()):.1f}x)"
            if ratios
            else f"PyTorch ({name} has no kernels for this shape)"
        )
    speeds = [ratios[operation] for operation in choice.used if operation in ratios]
    text = f"{name}, {_mean(speeds):.1f}x PyTorch" if speeds else name
    for operation in OPERATIONS:
        if operation not in choice.used:
            text += f"; {operation}: PyTorch"
            if operation in ratios:
                why = ", but needs the others" if ratios[operation] >= TIE else ""
                text += f" (C++ was {ratios[operation]:.1f}x{why})"
    return text


def identity() -> str:
    """Identify what the last bits of a result depend on: the built library and the operations in use."""
    left_out = [name for name in OPERATIONS if not uses(name)]
    return build.reason() + (f" without {', '.join(left_out)}" if left_out else "")


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.exp(sum(map(math.log, numbers)) / len(numbers))
