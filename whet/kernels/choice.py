"""Which of the CPU's C++ kernels a process uses: those that were measured to be faster than PyTorch on this machine.

`whet.generate.kernel_speed` measures and sets the choice, once a process, before the first model computes anything: a
sampler and a trainer that chose differently would not agree to the last bit. Until then, and with `WHET_KERNELS=cpp`,
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
"""Both are near the machine's peak for large products in float32; a clock cannot tell them apart by less."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is used, and how fast it was.

    Attributes:
        used: Operations that run on the C++ kernels.
        ratios: Speed over PyTorch's by operation; empty where nothing was measured.
    """

    used: frozenset[Operation] = frozenset(OPERATIONS)
    ratios: Mapping[Operation, float] = field(default_factory=dict)

    @classmethod
    def of(cls, ratios: Mapping[Operation, float]) -> Choice:
        """Use what is as fast as PyTorch, or faster."""
        used: set[Operation] = {name for name, ratio in ratios.items() if ratio >= TIE}
        if not {"product", "attention"} <= used:
            used.discard("decode")
        return cls(frozenset(used), dict(ratios))


_current: Choice | None = None


def current() -> Choice | None:
    """Return the choice of this process; None before there is one."""
    return _current


def take(choice: Choice | None) -> None:
    """Make a choice that of this process."""
    global _current
    _current = choice


@contextmanager
def taken(choice: Choice) -> Iterator[None]:
    """Use other kernels inside a block, to measure or to test them."""
    before = _current
    take(choice)
    try:
        yield
    finally:
        take(before)


def uses(operation: Operation) -> bool:
    """Say whether an operation is to run on the C++ kernels, where there are any."""
    return _current is None or operation in _current.used


def describe(choice: Choice | None = None) -> str:
    """Say in a few words what computes on the CPU: `C++ avx2, 1.4x PyTorch` or `PyTorch (C++ avx2 was 0.8x)`.

    Args:
        choice: That of this process where there is none.
    """
    if build.library() is None:
        return f"PyTorch ({build.reason().removeprefix('eager: ')})"
    choice = choice or _current or Choice()
    name, ratios = f"C++ {build.instruction_set()}", choice.ratios
    if not choice.used:
        return f"PyTorch ({name} was {_mean(ratios.values()):.1f}x)" if ratios else f"PyTorch, not {name}"
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
    """Name what the last bits of a result depend on: the built library and what of it is used."""
    left_out = [name for name in OPERATIONS if not uses(name)]
    return build.reason() + (f" without {', '.join(left_out)}" if left_out else "")


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.exp(sum(map(math.log, numbers)) / len(numbers))
