"""Group-relative advantages: pure functions of rewards, in float64."""

from __future__ import annotations

from typing import Literal

import torch

Scale = Literal["group", "batch", "none"]
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
) -> torch.Tensor:
    """Turn rewards into advantages, group by group.

    GRPO is (group_mean, group), Dr. GRPO (group_mean, none), RLOO (leave_one_out, none) and REINFORCE
    (none, none).

    Args:
        rewards_PG: Total reward of each sample.
        scored_PG: True where a sample has a score; the others get 0 and enter no statistic. Default all.
        baseline: What is subtracted.
        scale: The difference is divided by the standard deviation of its group, of the batch, or by nothing.
        std_ddof: 1 for the sample, 0 for the population standard deviation.
        eps: Added to the standard deviation.
        clip: Largest absolute advantage, or None.

    Returns:
        Advantages [P, G], float64; exactly 0 in groups whose rewards are all equal (with baseline 'none' they
        keep their reward, undivided).

    Raises:
        ValueError: If a scored reward is not finite, or a baseline or scale is undefined for the group size.

    Source: GRPO 2402.03300 eq. 3 (ddof and eps are conventions: TRL's are the defaults); Dr. GRPO 2503.20783;
    RLOO 2402.14740. Deviation: where all rewards are equal, nothing is divided by their standard deviation.
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
    elif scale == "batch" and scored_PG.any():
        scored = rewards_PG[scored_PG]
        variance = (scored - scored.mean()).square().sum() / max(scored.numel() - std_ddof, 1)
        if bool(has_spread(scored[None], torch.ones_like(scored[None], dtype=torch.bool))):
            advantages_PG = advantages_PG / (variance.sqrt() + eps)
    if clip is not None:
        advantages_PG = advantages_PG.clamp(-clip, clip)
    if baseline != "none":
        advantages_PG = advantages_PG.masked_fill(~has_spread(rewards_PG, scored_PG)[:, None], 0.0)
    return advantages_PG.masked_fill(~scored_PG, 0.0)


def overlong_penalty(length: int, *, max_length: int, cache_length: int) -> float:
    """Return DAPO's soft punishment of length: 0, then a ramp over the last `cache_length` tokens, then -1.

    Args:
        length: Tokens of the completion.
        max_length: Length from which the punishment is -1, L_max.
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
