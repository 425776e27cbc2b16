"""Corrections for samples from a policy other than the current one: importance weights and rejections."""

from __future__ import annotations

from typing import Literal

import torch

from whet.algo.losses import LOG_RATIO_LIMIT, log_ratio, sequence_means

Correction = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_mask",
    "k3_mask",
]

BOUNDS: dict[Correction, tuple[float, float]] = {
    "none": (0.0, float("inf")),
    "token_truncate": (0.0, 2.0),
    "token_mask": (0.5, 5.0),
    "sequence_truncate": (0.0, 10.0),
    "sequence_mask": (0.0, 10.0),
    "geometric_mask": (0.999, 1.001),
    "k3_mask": (0.0, 0.01),
}
"""Bounds of the published forms, used if the configuration gives none."""


def correction_weights(
    proximal_logprobs_M: torch.Tensor,
    sampler_logprobs_M: torch.Tensor,
    sequence_M: torch.Tensor,
    kind: Correction,
    *,
    low: float,
    high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight tokens by rho = proximal / sampler, bounded; the caller keeps the denominator of all tokens.

    =================  =====================================================  ==============================
    kind               weight of a token                                      also known as
    =================  =====================================================  ==============================
    token_truncate     clip(rho_t, low, high)                                 TIS
    token_mask         rho_t where low <= rho_t <= high, else 0               IcePop
    sequence_truncate  clip(prod rho, low, high)                              sequence TIS
    sequence_mask      prod rho where low <= prod rho <= high, else 0         MIS
    geometric_mask     1 where low <= (prod rho)^(1/T) <= high, else 0        geometric rejection (Geo-RS)
    k3_mask            1 where low <= mean_t(rho - log rho - 1) <= high       K3 rejection
    =================  =====================================================  ==============================

    Args:
        proximal_logprobs_M: Log-probabilities of the trainer before the update.
        sampler_logprobs_M: Log-probabilities at sampling time.
        sequence_M: Index of each token's sequence, ascending.
        kind: Which weight.
        low: Lower bound.
        high: Upper bound.

    Returns:
        Weights [M] (constants), and where a bound was active (truncated or masked), bool [M].

    Source: TIS (fengyao.notion.site/off-policy-rl), IcePop 2510.18855. Deviation: log-ratios, and
    their sums over a sequence, are clamped to +-20.
    """
    log_rho_M = log_ratio(proximal_logprobs_M, sampler_logprobs_M).detach()
    if kind == "none":
        return torch.ones_like(log_rho_M), torch.zeros_like(log_rho_M, dtype=torch.bool)
    if kind == "k3_mask":
        # expm1, because near 0 the direct form is rounding noise, even below 0.
        measure_M = sequence_means((log_rho_M.expm1() - log_rho_M).clamp(min=0.0), sequence_M)
    elif kind == "geometric_mask":
        measure_M = sequence_means(log_rho_M, sequence_M).exp()
    elif kind in ("sequence_truncate", "sequence_mask"):
        lengths_B = torch.bincount(sequence_M)
        sums_M = sequence_means(log_rho_M, sequence_M) * lengths_B[sequence_M]
        measure_M = sums_M.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    else:
        measure_M = log_rho_M.exp()
    outside_M = ~((measure_M >= low) & (measure_M <= high))
    if kind in ("token_truncate", "sequence_truncate"):
        return measure_M.clamp(low, high), outside_M
    weights_M = torch.ones_like(measure_M) if kind in ("geometric_mask", "k3_mask") else measure_M
    return weights_M.masked_fill(outside_M, 0.0), outside_M
