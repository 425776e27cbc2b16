"""The order in which data is read: a function of (seed, position), so that a run resumes from one number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import torch

from whet.generate.sampling import counter_uniforms, sequence_seed
from whet.tasks.mixture import PART, Mixture
from whet.types import Problem, Task, UserError

Item = TypeVar("Item")

LOOK_EVERY = 1 << 16
"""Draws after which `EpochOrder.look` is called: a step that draws so many may take long."""
REPLAY_BLOCK = 1 << 20
"""Draws replayed per batch when a mixture resumes from a cursor."""


class EpochOrder(Generic[Item]):
    """Endless passes over items, each in its own permutation.

    Args:
        items: The items; not empty.
        seed: Seed of the permutations.
        cursor: Items read so far.

    Attributes:
        look: Called while very many are drawn; may raise to end it.
    """

    look: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, items: Sequence[Item], seed: int, cursor: int = 0) -> None:
        assert items, "nothing to order"
        self._items = items
        self._seed = seed
        self.cursor = cursor
        self._epoch = -1
        self._permutation: list[int] = []

    @property
    def epochs(self) -> float:
        """Passes done, including the fraction of the current one."""
        return self.cursor / len(self._items)

    def next(self, count: int) -> list[tuple[int, Item]]:
        """Return the next `count` items, each with the number of its epoch."""
        taken = []
        for number in range(1, count + 1):
            if number % LOOK_EVERY == 0:
                self.look()
            epoch, index = divmod(self.cursor, len(self._items))
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(sequence_seed("order", self._seed, epoch))
                self._permutation = torch.randperm(len(self._items), generator=generator).tolist()
                self._epoch = epoch
            taken.append((epoch, self._items[self._permutation[index]]))
            self.cursor += 1
        return taken


class MixtureOrder(Generic[Item]):
    """Endless draws from several parts by weight; within a part, passes as in `EpochOrder`.

    The part of the k-th item is a hash of (seed, k), so that the cursor alone determines how often each was drawn. The
    order within a part depends on its own items and label only: weights and other parts do not change it.

    Args:
        parts: Items by label; none empty.
        weights: Weight by label, above 0.
        seed: Seed of the draws and of the permutations.
        cursor: Items read so far, over all parts.

    Attributes:
        look: Called while very many are drawn; may raise to end it.
    """

    look: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, parts: Mapping[str, Sequence[Item]], weights: Mapping[str, float], seed: int, cursor: int = 0
    ) -> None:
        labels = sorted(parts)
        self._orders = [EpochOrder(parts[label], sequence_seed("part", seed, label)) for label in labels]
        self._num_items = sum(map(len, parts.values()))
        sums = torch.tensor([weights[label] for label in labels], dtype=torch.float64).cumsum(0)
        self._bounds = sums / sums[-1]
        self._seed = torch.tensor([sequence_seed("mixture", seed)])
        if cursor:
            self.cursor = cursor

    @property
    def cursor(self) -> int:
        """Items read so far."""
        return sum(order.cursor for order in self._orders)

    @cursor.setter
    def cursor(self, value: int) -> None:
        """Resume from a cursor, by counting how often each part was drawn before it."""
        counts = torch.zeros(len(self._orders), dtype=torch.int64)
        for start in range(0, value, REPLAY_BLOCK):
            drawn = self._draw(start, min(REPLAY_BLOCK, value - start))
            counts += torch.bincount(drawn, minlength=len(self._orders))
        for order, count in zip(self._orders, counts.tolist(), strict=True):
            order.cursor = count

    @property
    def epochs(self) -> float:
        """Items read, in passes over all parts together; parts with more than their share of weight have had more."""
        return self.cursor / self._num_items

    def next(self, count: int) -> list[tuple[int, Item]]:
        """Return the next `count` items, each with the number of its part's epoch."""
        taken = []
        for number, part in enumerate(self._draw(self.cursor, count).tolist(), start=1):
            if number % LOOK_EVERY == 0:
                self.look()
            taken += self._orders[part].next(1)
        return taken

    def _draw(self, start: int, count: int) -> torch.Tensor:
        """Return the index of the part of each item from `start` on."""
        uniforms = counter_uniforms(self._seed, torch.arange(start, start + count))
        return torch.searchsorted(self._bounds, uniforms, right=True)


DataOrder = EpochOrder[Problem] | MixtureOrder[Problem]
"""The order of a run's problems."""


def data_order(task: Task, problems: Sequence[Problem], seed: int) -> DataOrder:
    """Create the order of a run: by weight for a mixture, else passes over all problems.

    Args:
        task: The problems' task.
        problems: The training problems; not empty.
        seed: The run's seed.

    Returns:
        The order, at its start.

    Raises:
        UserError: If a part of a mixture has no problem left.
    """
    if not isinstance(task, Mixture):
        return EpochOrder(problems, seed)
    parts: dict[str, list[Problem]] = {label: [] for label in task.weights}
    for problem in problems:
        parts[problem.meta[PART]].append(problem)
    for label, kept in parts.items():
        if not kept:
            raise UserError(
                f"mixture: no problem of {label} is left to train on; drop it from task.weights or loosen the filters"
            )
    return MixtureOrder(parts, task.weights, seed)
