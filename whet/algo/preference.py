"""Losses of preference pairs, from the log-probabilities of whole completions. The caller averages over pairs.

`B` counts pairs. A log-ratio is log policy(completion | prompt) - log reference(completion | prompt), in nats.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

PreferenceLoss = Literal["dpo", "ipo"]


def log_ratios(policy_B: torch.Tensor, ref_B: torch.Tensor) -> torch.Tensor:
    """Return the log-ratio of each completion [B].

    Args:
        policy_B: Summed log-probabilities of the completion's tokens under the policy (differentiable).
        ref_B: The same under the frozen reference.
    """
    return policy_B - ref_B.detach()


def dpo_loss(
    chosen_ratios_B: torch.Tensor,
    rejected_ratios_B: torch.Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h) [B], h = chosen - rejected log-ratio.

    Args:
        chosen_ratios_B: Log-ratios of the preferred completions.
        rejected_ratios_B: Log-ratios of the others.
        beta: Strength of the pull to the reference, above 0.
        label_smoothing: Assumed share s of mislabelled pairs, 0 to 0.5.

    Source: DPO 2305.18290 eq. 7; with s above 0 conservative DPO, ericmitchell.ai/cdpo.pdf. Of log-ratios
    per token it is TRL's 'sigmoid_norm'.
    """
    margin_B = beta * (chosen_ratios_B - rejected_ratios_B)
    return -(1.0 - label_smoothing) * F.logsigmoid(margin_B) - label_smoothing * F.logsigmoid(-margin_B)


def ipo_loss(chosen_ratios_B: torch.Tensor, rejected_ratios_B: torch.Tensor, *, beta: float) -> torch.Tensor:
    """Return (h - 1 / (2 beta))^2 [B]: the gap of the log-ratios is pulled towards a finite target.

    Args:
        chosen_ratios_B: Log-ratios of the preferred completions, summed (TRL takes means per token).
        rejected_ratios_B: Log-ratios of the others.
        beta: The paper's tau, above 0.

    Source: IPO 2310.12036 eq. 17.
    """
    return (chosen_ratios_B - rejected_ratios_B - 1.0 / (2.0 * beta)).square()


def mean_nll(policy_B: torch.Tensor, num_tokens_B: torch.Tensor) -> torch.Tensor:
    """Return each completion's mean negative log-probability per token [B]: the fine-tuning term of RPO.

    Their mean over pairs weights every pair equally, whatever its length.

    Source: Iterative RPO 2404.19733 eq. 1 (the third version: alpha weighs this term). TRL's 'sft' divides the sum over
    all chosen tokens of a batch by their number instead.
    """
    return -policy_B / num_tokens_B


def agreement(margins_B: torch.Tensor) -> torch.Tensor:
    """Return 1 if the implicit reward prefers the chosen completion, 0 if the other, 1/2 if neither [B]."""
    return (margins_B > 0).double() + 0.5 * (margins_B == 0).double()
