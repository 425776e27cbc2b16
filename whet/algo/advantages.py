"""Advantages: pure functions of rewards (and values), in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

Scale = Literal["group", "batch", "mean", "none"]
Baseline = Literal["group_mean", "leave_one_out", "none"]

SPREAD_TOLERANCE = 1e-6


def has_spread(rewards_PG: torch.Tensor, scored_PG: torch.Tensor) -> torch.Tensor:
    """Say which groups have differing rewards [P].

    The test is max - min above a tolerance: the standard deviation of equal numbers can be a rounding error.

    Args:
        rewards_PG: Rewards; entries outside `scored_PG` are ignored.
        scored_PG: True where a sample has a score.
    """
    low = rewards_PG.masked_fill(~scored_PG, float("inf")).amin(1)
    high = rewards_PG.masked_fill(~scored_PG, float("-inf")).amax(1)
    largest = rewards_PG.masked_fill(~scored_PG, 0.0).abs().amax(1).clamp(min=1.0)
    return (high - low) > SPREAD_TOLERANCE * largest


def group_advantages(
    rewards_PG: torch.Tensor,
    scored_PG: torch.Tensor | None = None,
    *,
    baseline: Baseline = "group_mean",
    scale: Scale = "group",
    std_ddof: int = 1,
    eps: float = 1e-4,
    clip: float | None = None,
    batch_std: float | None = None,
) -> torch.Tensor:
    """Turn rewards into advantages, group by group.

    GRPO is (group_mean, group), Dr. GRPO (group_mean, none), RLOO (leave_one_out, none) and REINFORCE
    (none, none).

    Args:
        rewards_PG: Total reward of each sample.
        scored_PG: True where a sample has a score; the others get 0 and enter no statistic. Default: all.
        baseline: What is subtracted.
        scale: Divisor of the difference: the standard deviation of the group or of the batch, the group's mean (MaxRL;
            advantage 0 if that is not positive), or none.
        std_ddof: 1 for the sample, 0 for the population standard deviation.
        eps: Added to the standard deviation.
        clip: Largest absolute advantage, or None.
        batch_std: Standard deviation of all scored rewards of the step, over all ranks; read with scale 'batch'.
            Default: that of `rewards_PG`.

    Returns:
        Advantages [P, G], float64; exactly 0 in groups whose rewards are all equal (with baseline 'none' they
        keep their reward, undivided).

    Raises:
        ValueError: If a scored reward is not finite, or a baseline or scale is undefined for the group size.

    Source: GRPO 2402.03300 eq. 3 (ddof and eps are conventions: TRL's are the defaults); Dr. GRPO 2503.20783;
    RLOO 2402.14740; batch scale 2508.08221. Deviation: if all rewards of a group are equal, they are not divided by
    their standard deviation.
    """
    rewards_PG = rewards_PG.double()
    scored_PG = torch.ones_like(rewards_PG, dtype=torch.bool) if scored_PG is None else scored_PG
    if not torch.isfinite(rewards_PG[scored_PG]).all():
        raise ValueError("rewards must be finite; use None for a sample that cannot be scored")
    if rewards_PG.shape[1] < 2 and (baseline != "none" or scale == "group"):
        raise ValueError(
            f"group size {rewards_PG.shape[1]}: baseline {baseline!r} with scale {scale!r} needs at least 2 "
            "samples per prompt"
        )
    rewards_PG = rewards_PG.masked_fill(~scored_PG, 0.0)
    count_P = scored_PG.sum(1).double()
    mean_P = rewards_PG.sum(1) / count_P.clamp(min=1)
    advantages_PG = rewards_PG if baseline == "none" else rewards_PG - mean_P[:, None]
    if baseline == "leave_one_out":
        advantages_PG = advantages_PG * (count_P / (count_P - 1).clamp(min=1))[:, None]
    if scale == "group":
        deviation_PG = (rewards_PG - mean_P[:, None]).masked_fill(~scored_PG, 0.0)
        variance_P = deviation_PG.square().sum(1) / (count_P - std_ddof).clamp(min=1)
        divisor_P = torch.where(has_spread(rewards_PG, scored_PG), variance_P.sqrt() + eps, 1.0)
        advantages_PG = advantages_PG / divisor_P[:, None]
    elif scale == "batch":
        std = standard_deviation(rewards_PG[scored_PG], std_ddof) if batch_std is None else batch_std
        advantages_PG = advantages_PG / (std + eps) if std > 0 else advantages_PG
    elif scale == "mean":
        positive_P = mean_P > 0
        divisor_P = torch.where(positive_P, mean_P, 1.0)
        advantages_PG = (advantages_PG / divisor_P[:, None]).masked_fill(~positive_P[:, None], 0.0)
    if clip is not None:
        advantages_PG = advantages_PG.clamp(-clip, clip)
    if baseline != "none":
        advantages_PG = advantages_PG.masked_fill(~has_spread(rewards_PG, scored_PG)[:, None], 0.0)
    return advantages_PG.masked_fill(~scored_PG, 0.0)


def standard_deviation(values: torch.Tensor, ddof: int) -> float:
    """Return the standard deviation; exactly 0 if all values are equal up to rounding."""
    everywhere = torch.ones_like(values[None], dtype=torch.bool)
    if values.numel() < 2 or not bool(has_spread(values[None], everywhere)):
        return 0.0
    return float(((values - values.mean()).square().sum() / (values.numel() - ddof)).sqrt())


def normalised_rewards(
    rewards_PGX: torch.Tensor, weights: Sequence[float], scored_PG: torch.Tensor, *, std_ddof: int, eps: float
) -> torch.Tensor:
    """Normalise every reward separately within its group, then add them up with their weights (GDPO).

    A plain sum drowns rewards of small scale, and gives equal sums for different parts; normalised first, each reward
    keeps its influence.

    Args:
        rewards_PGX: Unweighted scores, one plane per reward function.
        weights: One weight per plane.
        scored_PG: True where a sample has a score.
        std_ddof: 1 for the sample, 0 for the population standard deviation.
        eps: Added to the standard deviations.

    Returns:
        Sums [P, G], float64; the caller whitens them over the batch.

    Source: GDPO (normalise, then sum) 2601.05242, as in TRL's 'normalize_then_sum'.
    """
    planes = [
        weight * group_advantages(rewards_PGX[..., index], scored_PG, std_ddof=std_ddof, eps=eps)
        for index, weight in enumerate(weights)
    ]
    return torch.stack(planes).sum(0)


def generalised_advantages(
    rewards_BT: torch.Tensor, values_BT: torch.Tensor, trained_BT: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate token advantages by GAE: delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}.

    Args:
        rewards_BT: Reward of each token (an outcome reward is at the last trained token).
        values_BT: Value estimates before the update.
        trained_BT: True at trained tokens, which are the first of each row; beyond them V and A are 0.
        gamma: Discount per token.
        lam: Trade of bias (0) against variance (1).

    Returns:
        Advantages and returns (advantage + value) [B, T], float64, 0 outside `trained_BT`.

    Source: 1506.02438 eq. 16.
    """
    rewards_BT = rewards_BT.double().masked_fill(~trained_BT, 0.0)
    values_BT = values_BT.double().masked_fill(~trained_BT, 0.0)
    advantages_BT = torch.zeros_like(values_BT)
    next_value = next_advantage = torch.zeros_like(values_BT[:, 0])
    for t in reversed(range(values_BT.shape[1])):
        delta = rewards_BT[:, t] + gamma * next_value - values_BT[:, t]
        next_advantage = (delta + gamma * lam * next_advantage).masked_fill(~trained_BT[:, t], 0.0)
        next_value = values_BT[:, t]
        advantages_BT[:, t] = next_advantage
    return advantages_BT, (advantages_BT + values_BT).masked_fill(~trained_BT, 0.0)


def rewards_to_go(rewards_T: torch.Tensor) -> torch.Tensor:
    """Return for each token the sum of its own and all later rewards [T]."""
    return rewards_T.flip(0).cumsum(0).flip(0)


def overlong_penalty(length: int, *, max_length: int, cache_length: int) -> float:
    """Return DAPO's soft overlong penalty: 0, then a ramp over the last `cache_length` tokens, then -1.

    Args:
        length: Tokens of the completion.
        max_length: Length from which the penalty is -1, L_max.
        cache_length: Width of the ramp in tokens, L_cache.

    Returns:
        A number in [-1, 0], to be added to the reward.

    Source: DAPO 2503.14476 eq. 13.
    """
    expected = max_length - cache_length
    if length <= expected:
        return 0.0
    if length <= max_length:
        return (expected - length) / cache_length
    return -1.0
