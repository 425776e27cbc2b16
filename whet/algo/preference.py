"""Losses of preferences, from the log-probabilities or scores of whole completions. The caller averages.

`B` counts pairs (for `kto_loss` single completions). A log-ratio is log policy(completion | prompt) - log
reference(completion | prompt), in nats.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F

PreferenceLoss = Literal["dpo", "ipo", "hinge", "robust", "apo_zero", "apo_down", "orpo", "kto", "reward"]
RATIO_OPTIONS = frozenset({"beta", "per_token", "sft_coef"})
OPTIONS_READ: dict[PreferenceLoss, frozenset[str]] = {
    "dpo": RATIO_OPTIONS | {"label_smoothing"},
    "ipo": RATIO_OPTIONS,
    "hinge": RATIO_OPTIONS,
    "robust": RATIO_OPTIONS | {"label_smoothing"},
    "apo_zero": RATIO_OPTIONS,
    "apo_down": RATIO_OPTIONS,
    "orpo": frozenset({"beta"}),
    "kto": frozenset({"beta", "desirable_weight", "undesirable_weight"}),
    "reward": frozenset({"center_coef"}),
}
"""Loss -> the options that it reads; every other one is refused."""
NEARLY_CERTAIN = -1e-9
"""Largest mean log-probability whose odds are taken, in nats."""


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


def hinge_loss(
    chosen_ratios_B: torch.Tensor, rejected_ratios_B: torch.Tensor, *, beta: float
) -> torch.Tensor:
    """Return max(0, 1 - beta h) [B], h = chosen - rejected log-ratio: no gradient beyond the margin.

    Source: SLiC-HF 2305.10425, of log-ratios as in RSO 2309.06657 and TRL's 'hinge'.
    """
    gap_B = chosen_ratios_B - rejected_ratios_B
    return torch.relu(1.0 - beta * gap_B)


def robust_loss(
    chosen_ratios_B: torch.Tensor, rejected_ratios_B: torch.Tensor, *, beta: float, label_smoothing: float
) -> torch.Tensor:
    """Return [-(1 - s) log sigmoid(beta h) + s log sigmoid(-beta h)] / (1 - 2 s) [B].

    Its mean over pairs of which a share s is the wrong way round is the DPO loss of the right pairs.

    Source: robust DPO 2403.00409.
    """
    right_B = dpo_loss(chosen_ratios_B, rejected_ratios_B, beta=beta)
    wrong_B = dpo_loss(rejected_ratios_B, chosen_ratios_B, beta=beta)
    return ((1.0 - label_smoothing) * right_B - label_smoothing * wrong_B) / (1.0 - 2.0 * label_smoothing)


def apo_zero_loss(
    chosen_ratios_B: torch.Tensor, rejected_ratios_B: torch.Tensor, *, beta: float
) -> torch.Tensor:
    """Return 1 - sigmoid(beta chosen) + sigmoid(beta rejected) [B]: chosen completions rise, rejected ones fall.

    Source: APO 2408.06266 eq. 7; for chosen completions that are better than what the model writes.
    """
    return 1.0 - torch.sigmoid(beta * chosen_ratios_B) + torch.sigmoid(beta * rejected_ratios_B)


def apo_down_loss(
    chosen_ratios_B: torch.Tensor, rejected_ratios_B: torch.Tensor, *, beta: float
) -> torch.Tensor:
    """Return sigmoid(beta chosen) + 1 - sigmoid(beta h) [B]: both fall, the rejected completions more.

    Source: APO 2408.06266 eq. 8; for chosen completions that are worse than what the model writes.
    """
    gap_B = chosen_ratios_B - rejected_ratios_B
    return torch.sigmoid(beta * chosen_ratios_B) + 1.0 - torch.sigmoid(beta * gap_B)


def log_odds(mean_logprobs_B: torch.Tensor) -> torch.Tensor:
    """Return log p - log(1 - p) [B] of p = exp(mean log-probability per token), precise at both ends.

    Deviation: log p is clamped to -1e-9, so that a completion of probability 1 has finite odds.
    """
    logp_B = mean_logprobs_B.clamp(max=NEARLY_CERTAIN)
    near_B = torch.log(-torch.expm1(logp_B))
    far_B = torch.log1p(-torch.exp(logp_B))
    return logp_B - torch.where(logp_B > -math.log(2.0), near_B, far_B)


def orpo_loss(chosen_means_B: torch.Tensor, rejected_means_B: torch.Tensor, *, beta: float) -> torch.Tensor:
    """Return -chosen - beta log sigmoid(log odds(chosen) - log odds(rejected)) [B]; there is no reference.

    Args:
        chosen_means_B: Mean log-probability per token of the preferred completions (differentiable).
        rejected_means_B: The same of the others.
        beta: Weight of the odds ratio, the paper's lambda, above 0.

    Source: ORPO 2403.07691 eq. 6 and 7. TRL's first term is the mean over all tokens of the chosen conversations of
    a batch, prompts included; ours is the paper's, of each completion given its prompt.
    """
    odds_B = log_odds(chosen_means_B) - log_odds(rejected_means_B)
    return -chosen_means_B - beta * F.logsigmoid(odds_B)


def kto_loss(
    ratios_B: torch.Tensor,
    is_desirable_B: torch.Tensor,
    kl: float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Return w (1 - sigmoid(+-beta (ratio - kl))) [B] of single completions, + for desirable ones, - for the others.

    Args:
        ratios_B: Log-ratios of the completions.
        is_desirable_B: bool, their labels.
        kl: Estimate of KL(policy || reference), at least 0: the mean log-ratio of completions of other prompts (a
            constant).
        beta: Strength of the pull to the reference, above 0.
        desirable_weight: w of desirable completions.
        undesirable_weight: w of the others.

    Source: KTO 2402.01306, section 4. As in TRL (and the authors' code) the mismatched completions of the estimate are
    those of other examples, and it is detached and never below 0.
    """
    gains_B = torch.where(is_desirable_B, ratios_B - kl, kl - ratios_B)
    # Two Python numbers would meet in float32, whatever the ratios are.
    weights = ratios_B.new_tensor([undesirable_weight, desirable_weight])
    weights_B = weights[is_desirable_B.long()]
    return weights_B * (1.0 - torch.sigmoid(beta * gains_B))


def reward_loss(
    chosen_scores_B: torch.Tensor,
    rejected_scores_B: torch.Tensor,
    margins_B: torch.Tensor,
    *,
    center_coef: float = 0.0,
) -> torch.Tensor:
    """Return -log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2 [B].

    Args:
        chosen_scores_B: A reward model's scores of the preferred completions.
        rejected_scores_B: Those of the others.
        margins_B: By how much the first should exceed the second, 0 where unknown.
        center_coef: Pull of the scores' mean to 0, which differences alone leave open.

    Source: Bradley-Terry as in InstructGPT 2203.02155 eq. 1; margin: Llama 2 2307.09288 eq. 2; centering: 2312.09244.
    """
    loss_B = -F.logsigmoid(chosen_scores_B - rejected_scores_B - margins_B)
    return loss_B + center_coef * (chosen_scores_B + rejected_scores_B).square()


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
