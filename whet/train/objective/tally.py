"""Sums over the tokens of a step, and the metrics computed from them over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from whet.algo.losses import log_ratio
from whet.ranks.collectives import all_reduce_max, all_reduce_sum


class Tally:
    """Sums by name over this rank's tokens; a name that ends in '_max' keeps the maximum instead."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, more: Mapping[str, float]) -> None:
        """Add to the sums."""
        for name, value in more.items():
            old = self._values.get(name)
            if old is None:
                self._values[name] = value
            else:
                self._values[name] = max(old, value) if name.endswith("_max") else old + value

    def join(self, other: Tally) -> None:
        """Add another tally's sums."""
        self.add(other._values)

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()

    def reduced(self, *names: str) -> list[float]:
        """Return sums over all ranks."""
        return all_reduce_sum(*(self._values.get(name, 0.0) for name in names))

    def largest(self, name: str) -> float:
        """Return the maximum over all ranks."""
        return all_reduce_max(self._values.get(name, 0.0))


def add_up(columns: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the sum of each column, float64, with one transfer from the device."""
    sums = torch.stack([column_M.detach().double().sum() for column_M in columns.values()])
    return dict(zip(columns, sums.tolist(), strict=True))


def gap_sums(logprobs_M: torch.Tensor, sampler_logprobs_M: torch.Tensor) -> dict[str, float]:
    """Return sums over tokens of the differences between trainer and sampler, with rho = trainer / sampler."""
    log_rho_M = log_ratio(logprobs_M.detach(), sampler_logprobs_M).double()
    rho_M = log_rho_M.exp()
    sums = add_up(
        {
            "tokens": torch.ones_like(rho_M),
            "gap": log_rho_M.abs(),
            "k3": log_rho_M.expm1() - log_rho_M,
            "rho": rho_M,
            "rho_square": rho_M.square(),
        }
    )
    largest = torch.stack([log_rho_M.abs().max(), log_rho_M.expm1().abs().max()]).tolist()
    return sums | {"gap_max": largest[0], "drift_max": largest[1]}


def sampler_metrics(tally: Tally, *, has_correction: bool) -> dict[str, float]:
    """Return the difference of sampler and trainer before the first update, over all ranks; empty if nothing was
    scored."""
    tokens, gap, k3, rho, rho_square, active = tally.reduced(
        "tokens", "gap", "k3", "rho", "rho_square", "correction_active"
    )
    largest, drift = tally.largest("gap_max"), tally.largest("drift_max")
    if not tokens:
        return {}
    metrics = {
        "rl/logprob_gap_mean": gap / tokens,
        "rl/logprob_gap_max": largest,
        "rl/ratio_drift": drift,
        "rl/mismatch_k3": k3 / tokens,
        "rl/effective_samples": rho**2 / (rho_square * tokens),
    }
    return metrics | ({"rl/correction_active": active / tokens} if has_correction else {})


def value_sums(
    values_M: torch.Tensor, start_values_M: torch.Tensor, returns_M: torch.Tensor, clipped_M: torch.Tensor
) -> dict[str, float]:
    """Return the sums over tokens for the critic's metrics."""
    error_M, start_error_M = (values_M.detach() - returns_M).double(), (start_values_M - returns_M).double()
    returns_M = returns_M.double()
    return add_up(
        {
            "value_tokens": torch.ones_like(error_M),
            "value_square": error_M.square(),
            "value_clipped": clipped_M,
            "start_error": start_error_M,
            "start_square": start_error_M.square(),
            "return": returns_M,
            "return_square": returns_M.square(),
        }
    )


def critic_metrics(tally: Tally) -> dict[str, float]:
    """Return the critic's loss, its clipped share, and the share of the returns' variance that it explained."""
    tokens, square, clipped, start_error, start_square, total, total_square, norm, updates = tally.reduced(
        "value_tokens",
        "value_square",
        "value_clipped",
        "start_error",
        "start_square",
        "return",
        "return_square",
        "value_norm",
        "value_updates",
    )
    count = max(tokens, 1.0)
    variance = total_square / count - (total / count) ** 2
    unexplained = start_square / count - (start_error / count) ** 2
    return {
        "rl/value_loss": 0.5 * square / count,
        "rl/value_clipped": clipped / count,
        "rl/value_grad_norm": norm / max(updates, 1.0),
        "rl/value_explained": 1.0 - unexplained / variance if variance > 1e-12 else 0.0,
    }


def teacher_metrics(tally: Tally) -> dict[str, float]:
    """Return the mean divergence from the teacher of the sampled tokens, over all ranks."""
    divergence, tokens = tally.reduced("teacher_kl", "teacher_tokens")
    return {"rl/teacher_kl": divergence / tokens} if tokens else {}


def mean_of(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the updates that have it; loss and norm are 0 if none has."""
    means = {"rl/loss": 0.0, "rl/grad_norm": 0.0}
    for name in dict.fromkeys(name for result in results for name in result):
        values = [result[name] for result in results if name in result]
        means[name] = sum(values) / len(values)
    return means
