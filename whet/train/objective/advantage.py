"""Turns scored groups into training sequences with advantages: the part of the objective that needs the whole step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import torch

from whet.algo.advantages import (
    SPREAD_TOLERANCE,
    generalised_advantages,
    group_advantages,
    has_spread,
    normalised_rewards,
    rewards_to_go,
    standard_deviation,
)
from whet.algo.config import AlgoConfig, ValueConfig
from whet.algo.losses import kl_estimate
from whet.algo.packing import TrainingSequence
from whet.ranks.collectives import all_gather_values, all_reduce_max, all_reduce_sum
from whet.train.rollout.rollout import reward_matrix, score_planes
from whet.types import Group, Sample

WHITEN_EPS = 1e-8
# Differences below this are rounding, whose size depends on the order of a sum.
NEGLIGIBLE = 1e-9


def with_advantages(groups: Sequence[Group], algo: AlgoConfig, weights: dict[str, float]) -> list[Group]:
    """Return the groups with every sample's advantage filled in (None for unscorable samples).

    It is the outcome's part, one number per sample; a critic, a KL in the reward and whitening come later, per token.

    Args:
        groups: This rank's groups; every rank must call.
        algo: The objective.
        weights: Weight of each reward by name; read by `multi_reward = normalise`.
    """
    if algo.multi_reward == "normalise":
        advantages_PG = _normalised(groups, algo, weights)
    else:
        batch_std = None
        if algo.scale == "batch":
            scored = [s.reward for group in groups for s in group.samples if s.reward is not None]
            everywhere = all_gather_values(torch.tensor(scored, dtype=torch.float64))
            batch_std = standard_deviation(everywhere, algo.std_ddof)
        if not groups:
            return []
        rewards_PG, scored_PG = reward_matrix(groups)
        advantages_PG = group_advantages(
            rewards_PG,
            scored_PG,
            baseline="none" if algo.baseline == "value" else algo.baseline,
            scale=algo.scale,
            std_ddof=algo.std_ddof,
            eps=algo.eps,
            clip=algo.advantage_clip,
            batch_std=batch_std,
        )
    return [
        replace(
            group,
            samples=tuple(
                sample
                if sample.reward is None
                else replace(sample, advantage=advantage if abs(advantage) > NEGLIGIBLE else 0.0)
                for sample, advantage in zip(group.samples, row, strict=True)
            ),
        )
        for group, row in zip(groups, advantages_PG.tolist(), strict=True)
    ]


def _normalised(groups: Sequence[Group], algo: AlgoConfig, weights: dict[str, float]) -> torch.Tensor:
    """Return GDPO's advantages [P, G]: each reward normalised in its group, summed, whitened over the samples."""
    if groups:
        rewards_PGX, scored_PG = score_planes(groups, list(weights))
        sums_PG = normalised_rewards(
            rewards_PGX, list(weights.values()), scored_PG, std_ddof=algo.std_ddof, eps=algo.eps
        )
        scored = sums_PG[scored_PG]
    else:
        sums_PG, scored_PG = torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool)
        scored = torch.zeros(0, dtype=torch.float64)
    everywhere = all_gather_values(scored)
    std = standard_deviation(everywhere, algo.std_ddof)
    mean = float(everywhere.mean()) if everywhere.numel() else 0.0
    advantages_PG = (sums_PG - mean) / (std + algo.eps) if std > 0 else torch.zeros_like(sums_PG)
    if algo.advantage_clip is not None:
        advantages_PG = advantages_PG.clamp(-algo.advantage_clip, algo.advantage_clip)
    return advantages_PG.masked_fill(~scored_PG, 0.0)


def without_advantages(groups: Sequence[Group]) -> list[Group]:
    """Return groups that the loss does not use, with advantage 0 for every scored sample."""
    return [
        replace(
            group,
            samples=tuple(s if s.reward is None else replace(s, advantage=0.0) for s in group.samples),
        )
        for group in groups
    ]


def is_informative(groups: Sequence[Group], algo: AlgoConfig, weights: dict[str, float]) -> list[bool]:
    """Say which groups' rewards differ, so that a group-relative advantage carries signal."""
    if not groups:
        return []
    if algo.multi_reward == "normalise":
        rewards_PGX, scored_PG = score_planes(groups, list(weights))
        planes = [has_spread(plane_PG, scored_PG) for plane_PG in rewards_PGX.unbind(-1)]
        return torch.stack(planes).any(0).tolist()
    return has_spread(*reward_matrix(groups)).tolist()


def counted_samples(groups: Sequence[Group], algo: AlgoConfig) -> list[list[Sample]]:
    """Return each group's samples that enter the loss's denominators: scored, and not cut off if those are filtered."""
    return [
        [
            sample
            for sample in group.samples
            if sample.advantage is not None
            and sample.num_trained
            and not (algo.overlong == "filter" and sample.finish_reason == "length")
        ]
        for group in groups
    ]


def training_sequences(groups: Sequence[Group], algo: AlgoConfig) -> list[TrainingSequence]:
    """Turn counted samples into training sequences: exactly their tokens and log-probabilities, never re-encoded."""
    sequences = []
    for members in counted_samples(groups, algo):
        num_group_tokens = sum(sample.num_trained for sample in members)
        for sample in members:
            assert sample.advantage is not None
            sequences.append(
                TrainingSequence(
                    prompt_ids=sample.prompt_ids,
                    completion_ids=sample.completion_ids,
                    advantage=sample.advantage,
                    group=sample.uid,
                    num_group_tokens=num_group_tokens,
                    sampler_logprobs=tuple(compress(sample.sampler_logprobs, sample.trained))
                    if sample.trained
                    else sample.sampler_logprobs,
                    kept=tuple(compress(sample.kept, sample.trained)) if sample.trained else sample.kept,
                    experts=sample.experts,
                    trained=sample.trained,
                    # A critic learns from when a reward came; without one the sum of an episode is its outcome.
                    turn_rewards=_paid_early(sample) if algo.baseline == "value" else (),
                )
            )
    return sequences


def _paid_early(sample: Sample) -> tuple[tuple[int, float], ...]:
    """Return (index of the turn's last trained token, reward) for every turn except the last."""
    return tuple(
        (end - 1, reward) for end, reward in zip(sample.turn_ends, sample.turn_rewards, strict=True)
    )[:-1]


def token_advantages(
    sequences: Sequence[TrainingSequence], algo: AlgoConfig, value: ValueConfig, kl_coef: float
) -> list[TrainingSequence]:
    """Fill in per-token advantages: KL in the reward, the critic's GAE with its returns, whitening over the step.

    Args:
        sequences: This rank's sequences with the columns that the objective needs; every rank must call.
        algo: The objective.
        value: The critic's arguments.
        kl_coef: Current weight of the KL term.

    Returns:
        The sequences with `advantages_T` (and `returns_T` with a critic).
    """
    is_flat = _spread([torch.tensor([s.advantage]) for s in sequences]) == 0
    rewards = [_token_rewards(sequence, algo, kl_coef) for sequence in sequences]
    filled = list(sequences)
    if algo.baseline == "value" and sequences:
        lengths = [sequence.num_trained for sequence in sequences]
        trained_BT = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
        values = [_column(sequence.start_values_T) for sequence in sequences]
        advantages_BT, returns_BT = generalised_advantages(
            torch.nn.utils.rnn.pad_sequence(rewards, batch_first=True),
            torch.nn.utils.rnn.pad_sequence(values, batch_first=True),
            trained_BT,
            gamma=value.gamma,
            lam=value.lam,
        )
        filled = [
            replace(sequence, advantages_T=advantages_BT[row, :length], returns_T=returns_BT[row, :length])
            for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
        ]
    else:
        filled = [
            replace(sequence, advantages_T=rewards_to_go(rewards_T))
            for sequence, rewards_T in zip(sequences, rewards, strict=True)
        ]
    # With equal outcomes only the KL's noise is left: scaled to variance 1 it would drive a solved run at full
    # strength.
    return _whitened(filled, scale=not (is_flat and algo.baseline != "value")) if algo.whiten else filled


def _token_rewards(sequence: TrainingSequence, algo: AlgoConfig, kl_coef: float) -> torch.Tensor:
    """Return the outcome at the last token, minus the weighted k1 of every token if KL is in the reward."""
    rewards_T = torch.zeros(sequence.num_trained, dtype=torch.float64)
    rewards_T[-1] = sequence.advantage
    for place, reward in sequence.turn_rewards:
        rewards_T[-1] -= reward
        rewards_T[place] += reward
    if algo.kl == "k1_reward":
        logprobs_T = sequence.proximal_logprobs_T
        if logprobs_T is None:
            logprobs_T = torch.tensor(sequence.sampler_logprobs, dtype=torch.float32)
        rewards_T = rewards_T - kl_coef * kl_estimate(
            _column(logprobs_T), _column(sequence.ref_logprobs_T), "k1"
        )
    return rewards_T


def _column(values_T: torch.Tensor | None) -> torch.Tensor:
    assert values_T is not None
    return values_T.double().cpu()


def _spread(columns: Sequence[torch.Tensor]) -> float:
    """Return the difference of the largest and the smallest number of all ranks; 0 if it is rounding."""
    high = all_reduce_max(max((float(c.max()) for c in columns), default=-math.inf))
    low = -all_reduce_max(max((-float(c.min()) for c in columns), default=-math.inf))
    return 0.0 if high - low <= SPREAD_TOLERANCE * max(1.0, abs(high), abs(low)) else high - low


def _whitened(sequences: Sequence[TrainingSequence], *, scale: bool) -> list[TrainingSequence]:
    """Give the token advantages of all ranks mean 0 and, with `scale`, variance 1; if all are equal they become 0."""
    columns = [_column(sequence.advantages_T) for sequence in sequences]
    count, total = all_reduce_sum(sum(map(len, columns)), sum(float(c.sum()) for c in columns))
    mean = total / max(count, 1.0)
    (squares,) = all_reduce_sum(sum(float((c - mean).square().sum()) for c in columns))
    factor = (squares / max(count - 1, 1.0) + WHITEN_EPS) ** -0.5 if scale else 1.0
    factor = factor if _spread(columns) > 0 else 0.0
    return [
        replace(sequence, advantages_T=(column - mean) * factor)
        for sequence, column in zip(sequences, columns, strict=True)
    ]
