"""Decomposition of a step's learning signal: which rewards move the policy, and which cancel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from whet.algo.advantages import has_spread

REPEATED_NGRAM = 4


def signal_sums(
    rewards_PGX: torch.Tensor,
    weights: Sequence[float],
    scored_PG: torch.Tensor,
    *,
    scale_groups: bool = False,
) -> tuple[list[float], list[float], float]:
    """Decompose the spread of total rewards within groups, or of their advantages, into the parts of each reward.

    With d_x the weighted deviation of reward x from its group's mean and d their sum, the total spread is
    sum(d d) = sum_x sum(d_x d): a reward's share is sum(d_x d) / sum(d d). Shares add up to 1; a negative one works
    against the rest. All results are sums that can be added over ranks.

    Args:
        rewards_PGX: Unweighted scores, one plane per reward.
        weights: One weight per plane.
        scored_PG: True where a sample has a score.
        scale_groups: Divide each group's deviations by the root of its own sum(d d), as GRPO's standard deviation does:
            every group with a spread then counts equally.

    Returns:
        sum(d_x d) of each reward, sum(d_x d_x) of each reward, and sum(d d).
    """
    counts_P1 = scored_PG.sum(1, keepdim=True).clamp(min=1)
    weighted_PGX = rewards_PGX.double() * torch.tensor(weights, dtype=torch.float64)
    weighted_PGX = weighted_PGX.masked_fill(~scored_PG[..., None], 0.0)
    means_P1X = (weighted_PGX.sum(1) / counts_P1)[:, None]
    parts_PGX = (weighted_PGX - means_P1X).masked_fill(~scored_PG[..., None], 0.0)
    if scale_groups:
        squares_P = parts_PGX.sum(-1).square().sum(1)
        spread_P = has_spread(weighted_PGX.sum(-1), scored_PG)
        parts_PGX = parts_PGX * torch.where(spread_P, squares_P.clamp(min=1e-300).rsqrt(), 0.0)[:, None, None]
    total_PG = parts_PGX.sum(-1)
    shared = (parts_PGX * total_PG[..., None]).sum((0, 1))
    return shared.tolist(), parts_PGX.square().sum((0, 1)).tolist(), float(total_PG.square().sum())


def cancellation(own_squares: Sequence[float], total_square: float) -> float:
    """Return the share of the rewards' spread that their sum loses: 0 for none, 1 if they cancel completely.

    Args:
        own_squares: sum(d_x d_x) of each reward, over all ranks.
        total_square: sum(d d), over all ranks.
    """
    own = sum(own_squares)
    return max(0.0, 1.0 - total_square / own) if own > 0 else 0.0


def repeated_share(ids: Sequence[int]) -> float:
    """Return the share of a completion's token 4-grams that are repeats."""
    ngrams = [tuple(ids[i : i + REPEATED_NGRAM]) for i in range(len(ids) - REPEATED_NGRAM + 1)]
    return 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
