"""Losses of single tokens and how they add up. Nothing here divides by a count of its own."""

from __future__ import annotations

from typing import Literal

import torch

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0


def aggregation_weight(num_tokens: int, aggregation: Aggregation) -> float:
    """Return the weight of each trained token of a sequence: 1, or 1/length for a mean over sequences.

    Args:
        num_tokens: Trained tokens of the sequence.
        aggregation: 'token_mean' (DAPO), 'sequence_mean' (GRPO: mean over sequences of token means) or
            'constant' (Dr. GRPO).
    """
    return 1.0 / num_tokens if aggregation == "sequence_mean" and num_tokens else 1.0


def loss_denominator(
    aggregation: Aggregation, *, num_tokens: float, num_sequences: float, max_length: int
) -> float:
    """Return the one denominator of an optimizer step, from counts over all micro-batches and ranks.

    Args:
        aggregation: How tokens add up.
        num_tokens: Trained tokens of the whole step.
        num_sequences: Sequences with a trained token in the whole step.
        max_length: Longest possible completion in tokens, the constant of Dr. GRPO.

    Returns:
        A positive number (1 for an empty step).

    Source: math.md section 6; DAPO 2503.14476, GRPO 2402.03300, Dr. GRPO 2503.20783.
    """
    table = {"token_mean": num_tokens, "sequence_mean": num_sequences, "constant": num_sequences * max_length}
    return max(float(table[aggregation]), 1.0)


def policy_loss(
    policy_logprobs_M: torch.Tensor,
    sampler_logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clipped surrogate of each trained token: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Args:
        policy_logprobs_M: Log-probabilities under the policy that is trained (differentiable).
        sampler_logprobs_M: Log-probabilities at sampling time (constants).
        advantages_M: Advantages (constants).
        clip_low: Lower clip range.
        clip_high: Upper clip range (above `clip_low` is DAPO's clip-higher).

    Returns:
        Loss [M]; and where the clip is *active* (it changes the gradient): from above, from below, bool [M].

    Source: PPO 1707.06347 eq. 7; DAPO 2503.14476 eq. 8. Deviation: the log-ratio is clamped to +-20.
    """
    log_ratio_M = (policy_logprobs_M - sampler_logprobs_M.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_M = log_ratio_M.exp()
    advantages_M = advantages_M.detach()
    clipped_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_M = -torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M)
    with torch.no_grad():
        high_M = (ratio_M > 1.0 + clip_high) & (advantages_M > 0)
        low_M = (ratio_M < 1.0 - clip_low) & (advantages_M < 0)
    return loss_M, high_M, low_M


def kl_estimate(
    policy_logprobs_M: torch.Tensor, ref_logprobs_M: torch.Tensor, estimator: KLEstimator
) -> torch.Tensor:
    """Estimate KL(policy || reference) of each trained token from the sampled token alone.

    With d = log policy - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. As a *number* k1 and k3
    are unbiased; as a *loss* only k2 has the gradient of KL(policy || reference), k3 has that of
    KL(reference || policy), and k1 has none in expectation.

    Args:
        policy_logprobs_M: Log-probabilities under the policy (differentiable).
        ref_logprobs_M: Log-probabilities under the frozen reference.
        estimator: Which one.

    Returns:
        Estimates [M] in nats.

    Source: Schulman, joschu.net/blog/kl-approx; 2510.01555. Deviation: d is clamped to +-20.
    """
    delta_M = (policy_logprobs_M - ref_logprobs_M.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return delta_M
    if estimator == "k2":
        return 0.5 * delta_M.square()
    return torch.exp(-delta_M) - 1.0 + delta_M


def weighted_sum(values_M: torch.Tensor, weights_M: torch.Tensor, denominator: float) -> torch.Tensor:
    """Add up tokens: sum(value * weight) / denominator.

    Tokens of weight 0 contribute exactly nothing, to value and gradient, even where they are inf or nan.
    """
    used = weights_M != 0
    return (torch.where(used, values_M, torch.zeros_like(values_M)) * weights_M).sum() / denominator
