"""The worked examples of `whet explain`: inputs, and pure functions that call whet's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from whet.algo.advantages import group_advantages
from whet.algo.losses import KLEstimator, kl_estimate, policy_loss

ACTIONS = ("up", "down", "left", "right")
ACTION_REWARDS = (0.0, 1.0, 1.0, -10.0)
POLICIES = {
    "all equal": (0.25, 0.25, 0.25, 0.25),
    "right more often": (0.2, 0.2, 0.2, 0.4),
    "right less often": (0.3, 0.3, 0.3, 0.1),
}
TRAPS = {"nearly always up": (0.97, 0.01, 0.01, 0.01), "nearly always dots": (0.01, 0.48, 0.48, 0.03)}
PROBABILITIES = ((0.01, 0.01), (0.01, 0.99), (0.99, 0.01), (0.99, 0.99))
"""Probabilities of a token: now, and when it was sampled."""
SLIDE_REWARDS = (0.0, 0.0, 0.0, 1.0)
SLIDE_TRIPLE = ("0.375", "0.43301", "1.44")
"""Mean, standard deviation and z of the last sample, as on a workshop's slide for SLIDE_REWARDS."""
FITTING_REWARDS = (0.0, 0.25, 0.25, 1.0)
GROUP_RULES = {
    "GRPO, sample": partial(group_advantages, std_ddof=1),
    "GRPO, population": partial(group_advantages, std_ddof=0),
    "Dr. GRPO": partial(group_advantages, scale="none"),
    "RLOO": partial(group_advantages, baseline="leave_one_out", scale="none"),
}
POLICY_LOGITS = (1.4, 0.5, 0.0, -0.6, -0.8, 0.9)
REF_LOGITS = (0.1, 1.0, -0.3, 0.7, -0.5, -0.2)
ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "k2", "k3")
FORMATS = {
    "fp32": (8, 23),
    "fp16": (5, 10),
    "bf16": (8, 7),
    "fp8 E4M3": (4, 3),
    "fp8 E5M2": (5, 2),
    "fp4 E2M1": (2, 1),
}
"""Number format -> bits of the exponent and stored bits of the mantissa."""


@dataclass(frozen=True, slots=True)
class KLFacts:
    """Exact expectations over every token that a policy could sample.

    Attributes:
        kl: KL(policy || reference) in nats.
        means: Expectation of each estimator.
        stds: Standard deviation of each estimator, for one sampled token.
        gradients: Expected gradient of the minimised quantity by the policy's logits [V], by estimator and use.
        reverse_V: Gradient of KL(policy || reference).
        forward_V: Gradient of KL(reference || policy).
    """

    kl: float
    means: Mapping[str, float]
    stds: Mapping[str, float]
    gradients: Mapping[str, torch.Tensor]
    reverse_V: torch.Tensor
    forward_V: torch.Tensor


def vector(values: Sequence[float] | Sequence[Sequence[float]]) -> torch.Tensor:
    """Return numbers, or rows of numbers, as a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def log_sum(probabilities_V: torch.Tensor, rewards_V: torch.Tensor) -> float:
    """Return the sum of r log10 p over actions: a workshop's score, which is not the objective."""
    return float((rewards_V * probabilities_V.log10()).sum())


def expected_reward(probabilities_V: torch.Tensor, rewards_V: torch.Tensor) -> float:
    """Return E[R], the objective of reinforcement learning."""
    return float(probabilities_V @ rewards_V)


def objective_gradient(probabilities_V: torch.Tensor, rewards_V: torch.Tensor) -> torch.Tensor:
    """Differentiate E[R] by the logits of the policy [V]."""
    logits_V = probabilities_V.log().requires_grad_()
    return torch.autograd.grad(logits_V.softmax(0) @ rewards_V, logits_V)[0]


def sampled_gradient(
    probabilities_V: torch.Tensor, rewards_V: torch.Tensor, baseline: float
) -> tuple[torch.Tensor, float]:
    """Return mean and variance of the gradient from one sampled action.

    Args:
        probabilities_V: The policy, which also samples (ratio 1).
        rewards_V: Reward of each action.
        baseline: Subtracted from the reward.

    Returns:
        Its expectation by the logits [V], in ascent direction, and its variance (summed over logits).
    """
    logits_V = probabilities_V.log().requires_grad_()
    logprobs_V = logits_V.log_softmax(0)
    loss_V, _, _ = policy_loss(logprobs_V, logprobs_V.detach(), rewards_V - baseline)
    rows = [-torch.autograd.grad(loss, logits_V, retain_graph=True)[0] for loss in loss_V]
    gradient_VV = torch.stack(rows)
    mean_V = probabilities_V @ gradient_VV
    return mean_V, float(probabilities_V @ (gradient_VV - mean_V).square().sum(1))


def surrogate(
    ratio_M: torch.Tensor, advantage: float, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Evaluate the clipped surrogate (minus the loss) of tokens with these ratios.

    Args:
        ratio_M: Probability now over probability when sampled.
        advantage: The same for all.
        clip_low: Lower clip range.
        clip_high: Upper clip range.

    Returns:
        Value [M]; push, its derivative by the log-probability [M]; where the gradient is not clipped, bool [M].
    """
    logprobs_M = ratio_M.log().requires_grad_()
    loss_M, high_M, low_M = policy_loss(
        logprobs_M,
        torch.zeros_like(ratio_M),
        torch.full_like(ratio_M, advantage),
        clip_low=clip_low,
        clip_high=clip_high,
    )
    (gradient_M,) = torch.autograd.grad(loss_M.sum(), logprobs_M)
    return -loss_M.detach(), -gradient_M, ~(high_M | low_M)


def kl_facts(policy_logits_V: torch.Tensor, ref_logits_V: torch.Tensor) -> KLFacts:
    """Compute the KL estimators and their gradients in expectation, by enumeration.

    'k1 as a loss' is differentiated; 'k1 off the reward' is subtracted, as a constant, from the reward.

    Source: Schulman, joschu.net/blog/kl-approx; 2510.01555.
    """
    logits_V = policy_logits_V.clone().requires_grad_()
    logprobs_V, ref_V = logits_V.log_softmax(0), ref_logits_V.log_softmax(0)
    chance_V = logprobs_V.exp().detach()

    def gradient(scalar: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(scalar, logits_V, retain_graph=True)[0]

    reverse = (logprobs_V.exp() * (logprobs_V - ref_V)).sum()
    forward = (ref_V.exp() * (ref_V - logprobs_V)).sum()
    means: dict[str, float] = {}
    stds: dict[str, float] = {}
    gradients: dict[str, torch.Tensor] = {}
    for name in ESTIMATORS:
        value_V = kl_estimate(logprobs_V, ref_V, name)
        fixed_V = value_V.detach()
        means[name] = float(chance_V @ fixed_V)
        stds[name] = float((chance_V @ (fixed_V - means[name]).square()).sqrt())
        gradients[f"{name} as a loss"] = gradient(chance_V @ value_V)
        loss_V, _, _ = policy_loss(logprobs_V, logprobs_V.detach(), -fixed_V)
        gradients[f"{name} off the reward"] = gradient(chance_V @ loss_V)
    return KLFacts(float(reverse.detach()), means, stds, gradients, gradient(reverse), gradient(forward))


def multiplier_cost(exponent_bits: int, mantissa_bits: int) -> int:
    """Model the area of a multiplier: adding exponents is linear in bits, multiplying mantissas quadratic."""
    return exponent_bits + mantissa_bits**2
