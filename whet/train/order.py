"""The order in which data is read: a function of (seed, position), so that a run resumes from one number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from whet.generate.sampling import sequence_seed

Item = TypeVar("Item")


class EpochOrder(Generic[Item]):
    """Endless passes over items, each in its own permutation.

    Args:
        items: What is read; not empty.
        seed: Seed of the permutations.
        cursor: Items read so far.
    """

    def __init__(self, items: Sequence[Item], seed: int, cursor: int = 0) -> None:
        assert items, "nothing to order"
        self._items = items
        self._seed = seed
        self.cursor = cursor
        self._epoch = -1
        self._permutation: list[int] = []

    @property
    def epochs(self) -> float:
        """Passes done, with the part of the current one."""
        return self.cursor / len(self._items)

    def next(self, count: int) -> list[tuple[int, Item]]:
        """Return the next `count` items, each with the number of its epoch."""
        taken = []
        for _ in range(count):
            epoch, index = divmod(self.cursor, len(self._items))
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(sequence_seed("order", self._seed, epoch))
                self._permutation = torch.randperm(len(self._items), generator=generator).tolist()
                self._epoch = epoch
            taken.append((epoch, self._items[self._permutation[index]]))
            self.cursor += 1
        return taken
