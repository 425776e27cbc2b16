"""What of a step a gradient sees: sequences that teach, tokens of highest entropy, and groups as they come."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from whet.algo.packing import TrainingSequence
from whet.distributed import all_gather_values
from whet.train.safety import TokenBudget
from whet.train.tally import Tally
from whet.types import Group

Prepare = Callable[[Sequence[Group]], tuple[list[TrainingSequence], Tally]]
Backpropagate = Callable[[Sequence[TrainingSequence], int], tuple[dict[str, float], Tally]]


def longest(sequences: Sequence[TrainingSequence]) -> int:
    """Return the tokens of the longest sequence, which stands in one micro-batch whatever its budget."""
    return max((sequence.num_tokens for sequence in sequences), default=0)


def has_advantage(sequence: TrainingSequence) -> bool:
    """Say whether a token of a sequence has an advantage other than 0."""
    if sequence.advantages_T is None:
        return sequence.advantage != 0
    return bool((sequence.advantages_T != 0).any())


def keep_top_entropy(
    sequences: Sequence[TrainingSequence],
    entropies: Sequence[torch.Tensor],
    share: float,
    dtype: torch.dtype,
) -> list[TrainingSequence]:
    """Give policy weight 0 to all tokens but the share of highest entropy in the whole step; keep ties.

    Args:
        sequences: This rank's sequences; every rank must call.
        entropies: Entropy of each trained token.
        share: Share of the tokens that are kept.
        dtype: Dtype of the weights.
    """
    mine = torch.cat([*(part.cpu() for part in entropies), torch.zeros(0, dtype=dtype)])
    everywhere = all_gather_values(mine)
    count = max(1, math.ceil(share * everywhere.numel() - 1e-9))
    if not everywhere.numel():
        return list(sequences)
    floor = everywhere.topk(count).values[-1]
    kept = []
    for sequence, entropy_T in zip(sequences, entropies, strict=True):
        chosen_T = (entropy_T >= floor.to(entropy_T.device)).to(dtype)
        weights_T = sequence.policy_weights_T
        kept.append(
            replace(sequence, policy_weights_T=chosen_T if weights_T is None else weights_T * chosen_T)
        )
    return kept


class Parts:
    """The gradient of a step, added up over parts of its groups while others are still drawn.

    A part is the next so many groups in the order of `add`, whenever they come: sums have one order. Losses are divided
    by the step's denominator at the end, when it is known: the gradient is linear in its inverse.

    Args:
        num_groups: Groups of a part.
        prepare: Turns groups into sequences, with sums for the metrics.
        backpropagate: Adds the gradient of a part's undivided loss, in micro-batches of so many tokens.
        budget: Tokens of a micro-batch.
    """

    def __init__(
        self, num_groups: int, prepare: Prepare, backpropagate: Backpropagate, budget: TokenBudget
    ) -> None:
        self._num_groups, self._budget = num_groups, budget
        self._prepare, self._backpropagate = prepare, backpropagate
        self._clear()

    def add(self, group: Group) -> None:
        """Take the next group, with advantages; backpropagate when a part is full."""
        self._groups.append(group)
        if len(self._groups) % self._num_groups == 0:
            self._flush()

    def gather(self, groups: Sequence[Group]) -> tuple[list[TrainingSequence], Tally]:
        """Take those of a step's groups that were not added yet, and the last part; return all that was prepared.

        Args:
            groups: All groups of the step; the first of them are those that were added.
        """
        assert all(mine.problem is group.problem for mine, group in zip(self._groups, groups, strict=False))
        for group in groups[len(self._groups) :]:
            self.add(group)
        self._flush()
        tally = Tally()
        for _, part in self._parts:
            tally.join(part)
        return [sequence for part, _ in self._parts for sequence in part], tally

    def divide(
        self, denominator: float, parameters: Iterable[torch.nn.Parameter]
    ) -> tuple[dict[str, float], Tally]:
        """Divide the gradients of what is trained, and the loss; return what was summed, and begin again."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / denominator)
        totals, sums = self._totals, self._sums
        self._clear()
        return totals | {"loss": totals.get("loss", 0.0) / denominator}, sums

    def _clear(self) -> None:
        self._groups: list[Group] = []
        self._parts: list[tuple[list[TrainingSequence], Tally]] = []
        self._num_cut = self._num_done = self._tokens = 0
        self._totals, self._sums = dict[str, float](), Tally()

    def _flush(self) -> None:
        """Backpropagate what was added since the last part."""
        fresh = self._groups[self._num_cut :]
        if fresh:
            self._num_cut = len(self._groups)
            self._parts.append(self._prepare(fresh))
            self._budget.run(self._run, longest([s for part, _ in self._parts for s in part]))

    def _run(self, tokens: int) -> None:
        if tokens != self._tokens:  # memory ran out: the budget was halved, all gradients were dropped
            self._num_done, self._tokens, self._totals, self._sums = 0, tokens, {}, Tally()
        while self._num_done < len(self._parts):
            totals, sums = self._backpropagate(self._parts[self._num_done][0], tokens)
            self._totals |= {name: self._totals.get(name, 0.0) + value for name, value in totals.items()}
            self._sums.join(sums)
            self._num_done += 1
