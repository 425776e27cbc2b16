"""Pairs as micro-batches, and the log-probabilities of their completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from whet.algo.packing import TrainingSequence, pack, split_by_budget
from whet.generate.policy import Policy
from whet.train.fit import FIT_ATTENTION
from whet.train.pairs import Pair
from whet.train.step import OptimConfig
from whet.types import MicroBatch


def pair_micro_batches(pairs: Sequence[Pair], token_budget: int, device: torch.device) -> list[MicroBatch]:
    """Pack pairs; the two completions of a pair stand in one micro-batch.

    Args:
        pairs: This rank's pairs.
        token_budget: Tokens per micro-batch; a longer pair gets one of its own.
        device: Where the tensors go.

    Returns:
        Micro-batches in which `indices_B` is 2 i for the chosen and 2 i + 1 for the rejected completion of pair i.
    """
    micro_batches = []
    for members in split_by_budget([pair.num_tokens for pair in pairs], token_budget):
        sides = [2 * member + side for member in members for side in (0, 1)]
        sequences = [
            TrainingSequence(
                prompt_ids=pairs[side // 2].prompt_ids,
                completion_ids=pairs[side // 2].rejected_ids if side % 2 else pairs[side // 2].chosen_ids,
            )
            for side in sides
        ]
        num_tokens = sum(sequence.num_tokens for sequence in sequences)
        (micro,) = pack(sequences, token_budget=num_tokens, device=device).micro_batches
        micro_batches.append(replace(micro, indices_B=tuple(sides[index] for index in micro.indices_B)))
    return micro_batches


def pair_logprobs(
    policy: Policy, micro: MicroBatch, config: OptimConfig
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Score a micro-batch of pairs.

    Returns:
        Indices of its pairs, and the summed log-probabilities of their chosen and rejected completions, float64.
    """
    logprobs_M, _ = policy.score(micro, attention=FIT_ATTENTION)
    parts = logprobs_M.double().split(torch.bincount(micro.sequence_M).tolist())
    sums = {side: part.sum() for side, part in zip(micro.indices_B, parts, strict=True)}
    members = sorted(side // 2 for side in sums if side % 2 == 0)
    chosen_B = torch.stack([sums[2 * member] for member in members])
    return members, chosen_B, torch.stack([sums[2 * member + 1] for member in members])
