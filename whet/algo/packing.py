"""Cut a step's sequences into micro-batches of packed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from whet.algo.losses import Aggregation, aggregation_weight
from whet.types import Batch, MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSequence:
    """One sequence to train on: prompt, then completion; every completion token is trained.

    Attributes:
        prompt_ids: Ids that are only conditioned on (at least one).
        completion_ids: Ids that are trained.
        advantage: Advantage of every completion token (0 in supervised training).
        sampler_logprobs: Log-probabilities at sampling time; empty in supervised training.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    advantage: float = 0.0
    sampler_logprobs: tuple[float, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads."""
        return len(self.prompt_ids) + len(self.completion_ids)


def split_by_budget(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Group sequences into bins of at most `token_budget` tokens: best fit decreasing.

    Similar lengths end up together.

    Args:
        lengths: Tokens of each sequence.
        token_budget: Largest sum of a bin; a longer single sequence gets a bin of its own.

    Returns:
        Indices of each bin; every index occurs once.
    """
    bins: list[tuple[int, list[int]]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        fitting = [number for number, (used, _) in enumerate(bins) if used + length <= token_budget]
        if fitting:
            best = max(fitting, key=lambda number: bins[number][0])
            used, members = bins[best]
            members.append(index)
            bins[best] = (used + length, members)
        else:
            bins.append((length, [index]))
    return [members for _, members in bins]


def pack(
    sequences: Sequence[TrainingSequence],
    *,
    token_budget: int,
    aggregation: Aggregation = "token_mean",
    device: torch.device | str = "cpu",
) -> Batch:
    """Pack a step's sequences into micro-batches; what each token weighs does not depend on the cut.

    Args:
        sequences: All sequences of this rank's step.
        token_budget: Tokens per micro-batch.
        aggregation: Decides the tokens' weights.
        device: Where the tensors go.

    Returns:
        The batch, with the counts that denominators are made of.

    Raises:
        ValueError: If a prompt is empty (its first completion token would have no predecessor).
    """
    trained = [sequence for sequence in sequences if sequence.completion_ids]
    if any(not sequence.prompt_ids for sequence in trained):
        raise ValueError(
            "a training sequence has an empty prompt: expected at least one token before the completion"
        )
    bins = split_by_budget([sequence.num_tokens for sequence in trained], token_budget)
    micro_batches = tuple(
        _micro_batch([trained[index] for index in members], aggregation, torch.device(device))
        for members in bins
    )
    return Batch(
        micro_batches=micro_batches,
        num_trained_tokens=sum(len(sequence.completion_ids) for sequence in trained),
        num_trained_sequences=len(trained),
    )


def _micro_batch(
    sequences: Sequence[TrainingSequence], aggregation: Aggregation, device: torch.device
) -> MicroBatch:
    tokens: list[int] = []
    source: list[int] = []
    targets: list[int] = []
    rows: list[int] = []
    weights: list[float] = []
    advantages: list[float] = []
    logprobs: list[float] = []
    for row, sequence in enumerate(sequences):
        count = len(sequence.completion_ids)
        # A token's hidden state predicts the next one: the last prompt row scores the first completion token.
        first = len(tokens) + len(sequence.prompt_ids) - 1
        source.extend(range(first, first + count))
        targets.extend(sequence.completion_ids)
        rows.extend([row] * count)
        weights.extend([aggregation_weight(count, aggregation)] * count)
        advantages.extend([sequence.advantage] * count)
        logprobs.extend(sequence.sampler_logprobs or [0.0] * count)
        tokens.extend(sequence.prompt_ids)
        tokens.extend(sequence.completion_ids)
    long = {"dtype": torch.int64, "device": device}
    real = {"dtype": torch.float32, "device": device}
    return MicroBatch(
        tokens_N=torch.tensor(tokens, **long),
        lengths_B=tuple(sequence.num_tokens for sequence in sequences),
        source_M=torch.tensor(source, **long),
        targets_M=torch.tensor(targets, **long),
        sequence_M=torch.tensor(rows, **long),
        weights_M=torch.tensor(weights, **real),
        advantages_M=torch.tensor(advantages, **real),
        sampler_logprobs_M=torch.tensor(logprobs, **real),
    )
