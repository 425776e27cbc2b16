"""Per-token losses and their aggregation. The caller owns every denominator.

A policy loss is composed from arguments: level of the ratio x surrogate (where and how it is clipped). GRPO, GSPO,
CISPO, GMPO, SAPO, PPO and REINFORCE are values of these; `docs/algorithms/` has a page for each.
"""

from __future__ import annotations

from typing import Literal

import torch

Aggregation = Literal["token_mean", "sequence_mean", "prompt_mean", "sequence_sum", "constant"]
RatioLevel = Literal["token", "sequence"]
Surrogate = Literal["clip", "geometric", "weight", "sigmoid", "logprob"]
KLEstimator = Literal["k1", "k2", "k3"]

LOG_RATIO_LIMIT = 20.0


def aggregation_weight(num_tokens: int, num_group_tokens: int, aggregation: Aggregation) -> float:
    """Return the weight of each trained token of a sequence.

    Args:
        num_tokens: Trained tokens of the sequence.
        num_group_tokens: Trained tokens of its whole group.
        aggregation: 'token_mean' (DAPO), 'sequence_mean' (GRPO: mean over sequences of token means), 'prompt_mean'
            (mean over prompts of the token mean in the group), 'sequence_sum' (mean over sequences of token sums) or
            'constant' (Dr. GRPO).
    """
    if aggregation == "sequence_mean":
        return 1.0 / max(num_tokens, 1)
    return 1.0 / max(num_group_tokens, 1) if aggregation == "prompt_mean" else 1.0


def loss_denominator(
    aggregation: Aggregation,
    *,
    num_tokens: float,
    num_sequences: float,
    max_length: int,
    num_prompts: float = 0,
) -> float:
    """Return the one denominator of an optimizer step, from counts over all micro-batches and ranks.

    Args:
        aggregation: How tokens are aggregated.
        num_tokens: Trained tokens of the whole step.
        num_sequences: Sequences with a trained token in the whole step.
        max_length: Longest possible completion in tokens, the constant of Dr. GRPO.
        num_prompts: Prompts with a trained token in the whole step; read by 'prompt_mean'.

    Returns:
        A positive number (1 for an empty step).

    Source: DAPO 2503.14476, GRPO 2402.03300, Dr. GRPO 2503.20783.
    """
    table = {
        "token_mean": num_tokens,
        "sequence_mean": num_sequences,
        "prompt_mean": num_prompts,
        "sequence_sum": num_sequences,
        "constant": num_sequences * max_length,
    }
    return max(float(table[aggregation]), 1.0)


def sequence_means(values_M: torch.Tensor, sequence_M: torch.Tensor) -> torch.Tensor:
    """Replace each token's value by the mean over its sequence's trained tokens [M]."""
    num_sequences = int(sequence_M[-1]) + 1 if sequence_M.numel() else 0
    sums_B = values_M.new_zeros(num_sequences).index_add(0, sequence_M, values_M)
    return (sums_B / torch.bincount(sequence_M, minlength=num_sequences).clamp(min=1))[sequence_M]


def log_ratio(logprobs_M: torch.Tensor, base_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Return the difference of log-probabilities, clamped to +-20 so that its exponential stays finite."""
    return (logprobs_M - base_logprobs_M.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def policy_loss(
    policy_logprobs_M: torch.Tensor,
    proximal_logprobs_M: torch.Tensor,
    advantages_M: torch.Tensor,
    *,
    sequence_M: torch.Tensor | None = None,
    ratio: RatioLevel = "token",
    surrogate: Surrogate = "clip",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the policy loss of each trained token, to be minimised.

    With r = exp(policy - proximal), or at sequence level its geometric mean over the sequence (whose gradient goes to
    each token as in GSPO-token):

    ==========  ==========================================================  =================
    surrogate   loss of a token                                             used by
    ==========  ==========================================================  =================
    clip        -min(r A, clip(r, 1 - low, 1 + high) A)                     PPO, GRPO, GSPO
    geometric   -A exp(mean_t min(log r_t, high)); for A < 0 max(., -low)   GMPO
    weight      -stopgrad(clip(r, 1 - low, 1 + high)) A log policy          CISPO
    sigmoid     -(4 / tau) sigmoid(tau (r - 1)) A                           SAPO
    logprob     -A log policy                                               REINFORCE, RLOO
    ==========  ==========================================================  =================

    Args:
        policy_logprobs_M: Log-probabilities under the current policy (differentiable).
        proximal_logprobs_M: Log-probabilities that the ratio starts from: the sampler's, or recomputed (constants).
        advantages_M: Advantages (constants).
        sequence_M: Index of each token's sequence, ascending; needed at sequence level.
        ratio: Level of the ratio.
        surrogate: One of the above.
        clip_low: Lower clip range; in log space for 'geometric'.
        clip_high: Upper clip range (above `clip_low` is DAPO's clip-higher); in log space for 'geometric'.
        dual_clip: With 'clip' and A < 0 the loss is at most -dual_clip A, so the ratio counts at most this much (above
            1 + clip_high; the two-sided clip 'delta' is the same function).
        tau_positive: SAPO's temperature for A > 0.
        tau_negative: SAPO's temperature for A <= 0.

    Returns:
        Loss [M]; and where the clip is *active* (it changes the gradient): from above, from below, bool [M].

    Source: PPO 1707.06347 eq. 7; DAPO 2503.14476 eq. 8; GSPO 2507.18071 eq. 5 and 13; GMPO 2507.20673; CISPO
    2506.13585; SAPO 2511.20347; dual clip 1912.09729; two-sided clip 2505.07291. Deviation: log-ratios are clamped to
    +-20. CISPO's bound is 1 + clip_high (TRL's epsilon_high is the bound itself).
    """
    advantages_M = advantages_M.detach()
    nowhere_M = torch.zeros_like(advantages_M, dtype=torch.bool)
    if surrogate == "logprob":
        return -advantages_M * policy_logprobs_M, nowhere_M, nowhere_M
    log_ratio_M = log_ratio(policy_logprobs_M, proximal_logprobs_M)
    high_M = low_M = nowhere_M
    if surrogate == "geometric":
        high_M = (log_ratio_M > clip_high) & (advantages_M > 0)
        low_M = (log_ratio_M < -clip_low) & (advantages_M < 0)
        bounded_M = torch.where(
            advantages_M > 0, log_ratio_M.clamp(max=clip_high), log_ratio_M.clamp(min=-clip_low)
        )
        log_ratio_M = torch.where(advantages_M == 0, log_ratio_M, bounded_M)
    if ratio == "sequence":
        assert sequence_M is not None
        mean_M = sequence_means(log_ratio_M.detach(), sequence_M)
        log_ratio_M = mean_M + (log_ratio_M - log_ratio_M.detach())
    ratio_M = log_ratio_M.exp()
    if surrogate == "geometric":
        return -ratio_M * advantages_M, high_M, low_M
    if surrogate == "sigmoid":
        tau_M = torch.full_like(advantages_M, tau_negative).masked_fill(advantages_M > 0, tau_positive)
        return -4.0 / tau_M * torch.sigmoid(tau_M * (ratio_M - 1.0)) * advantages_M, nowhere_M, nowhere_M
    clipped_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high)
    over_M, under_M = (ratio_M > 1.0 + clip_high).detach(), (ratio_M < 1.0 - clip_low).detach()
    if surrogate == "weight":
        return -clipped_M.detach() * advantages_M * policy_logprobs_M, over_M, under_M
    loss_M = -torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M)
    high_M, low_M = over_M & (advantages_M > 0), under_M & (advantages_M < 0)
    if dual_clip is not None:
        capped_M = (ratio_M > dual_clip).detach() & (advantages_M < 0)
        loss_M = torch.where(capped_M, -dual_clip * advantages_M, loss_M)
        high_M = high_M | capped_M
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
    delta_M = log_ratio(policy_logprobs_M, ref_logprobs_M)
    if estimator == "k1":
        return delta_M
    if estimator == "k2":
        return 0.5 * delta_M.square()
    return torch.expm1(-delta_M) + delta_M


def unbiased_kl(
    policy_logprobs_M: torch.Tensor, ref_logprobs_M: torch.Tensor, sampler_logprobs_M: torch.Tensor
) -> torch.Tensor:
    """Return r k3 with r = policy / sampler, differentiated through r, too: unbiased off-policy, in value and gradient.

    Both estimate KL(policy || reference), whatever policy drew the samples.

    Source: DeepSeek-V3.2 2512.02556 section 3.1; TRL's `use_bias_correction_kl`.
    """
    ratio_M = log_ratio(policy_logprobs_M, sampler_logprobs_M).exp()
    return ratio_M * kl_estimate(policy_logprobs_M, ref_logprobs_M, "k3")


def teacher_gains(
    policy_logprobs_M: torch.Tensor, teacher_logprobs_M: torch.Tensor, coef: float
) -> torch.Tensor:
    """Return coef (log teacher - log policy) of each sampled token: what on-policy distillation adds to its advantage.

    With the score function its mean is the gradient of -coef KL(policy || teacher) of that one token's distribution,
    given what was sampled before it: no token is credited with the divergence of later ones.

    Args:
        policy_logprobs_M: Log-probabilities at which the tokens were sampled (constants).
        teacher_logprobs_M: The same tokens under the teacher.
        coef: Weight of the divergence.

    Source: Thinking Machines, "On-Policy Distillation" (2025): per-token reverse KL with discount 0; the same in
    2306.13649 (GKD, reverse KL on the student's samples). Deviation: the difference is clamped to +-20.
    """
    return -coef * log_ratio(policy_logprobs_M.detach(), teacher_logprobs_M)


def value_loss(
    values_M: torch.Tensor, start_values_M: torch.Tensor, returns_M: torch.Tensor, *, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute half the squared error of value estimates, with PPO's pessimistic clip around the start values.

    Args:
        values_M: Estimates of the current critic (differentiable).
        start_values_M: Estimates that the advantages were computed from (constants).
        returns_M: Targets (constants).
        clip: Clip range around the start value, or None.

    Returns:
        Loss [M], and where the clipped form is the larger one, bool [M].

    Source: PPO as in 1707.06347's code: max((V - R)^2, (clip(V, V0 +- c) - R)^2) / 2.
    """
    error_M = (values_M - returns_M.detach()).square()
    if clip is None:
        return 0.5 * error_M, torch.zeros_like(values_M, dtype=torch.bool)
    start_M = start_values_M.detach()
    clipped_M = start_M + (values_M - start_M).clamp(-clip, clip)
    clipped_error_M = (clipped_M - returns_M.detach()).square()
    # Inside the band both forms are equal up to rounding: that does not count as clipped.
    held_M = (clipped_error_M > error_M) & ((values_M - start_M).abs() > clip)
    return 0.5 * torch.maximum(error_M, clipped_error_M), held_M.detach()


def weighted_sum(values_M: torch.Tensor, weights_M: torch.Tensor, denominator: float) -> torch.Tensor:
    """Return sum(value * weight) / denominator over tokens.

    Tokens of weight 0 contribute exactly nothing, to value and gradient, even where they are inf or nan.
    """
    used = weights_M != 0
    return (torch.where(used, values_M, torch.zeros_like(values_M)) * weights_M).sum() / denominator
