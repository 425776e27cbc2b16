"""Published formulas token by token in float64, as oracles. Nothing here calls whet.

A batch is a list of rows, one per sequence, and a row has one entry per token: numbers, or 0-dim tensors where the
gradient is wanted. Rewards are a list of groups, whose samples stand in the order of the rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

Row = Sequence[Any]
Rows = Sequence[Row]
Groups = Sequence[Sequence[float]]


def bounded(number: Any, low: float, high: float) -> Any:
    """clip(x, low, high), constant outside."""
    return min(max(number, low), high)


def centred(groups: Groups) -> list[float]:
    """Dr. GRPO 2503.20783: R - mean of the group."""
    return [reward - statistics.fmean(group) for group in groups for reward in group]


def standardised(groups: Groups, eps: float = 1e-4) -> list[float]:
    """GRPO 2402.03300: (R - mean) / (std + eps), sample standard deviation; 0 in groups of equal rewards."""
    divisors = [statistics.stdev(group) + eps for group in groups for _ in group]
    return [0.0 if d == eps else c / d for c, d in zip(centred(groups), divisors, strict=True)]


def left_out(groups: Groups) -> list[float]:
    """RLOO 2402.14740: R - mean of the others of the group."""
    return [r - (sum(group) - r) / (len(group) - 1) for group in groups for r in group]


def whitened(rows: Rows) -> list[list[float]]:
    """(A - mean) / sqrt(variance + 1e-8) over all tokens of the batch, variance with ddof 1."""
    tokens = [float(number) for row in rows for number in row]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [[(float(number) - mean) / math.sqrt(variance + 1e-8) for number in row] for row in rows]


def multi_reward(planes: Sequence[Groups], weights: Sequence[float], eps: float = 1e-4) -> list[float]:
    """GDPO 2601.05242 as in TRL: normalise each reward in its group, add up, whiten over the batch (ddof 1)."""
    normed = [standardised(groups, eps) for groups in planes]
    sums = [sum(w * n[i] for w, n in zip(weights, normed, strict=True)) for i in range(len(normed[0]))]
    return [(s - statistics.fmean(sums)) / (statistics.stdev(sums) + eps) for s in sums]


def gae(rewards: Row, values: Row, gamma: float, lam: float) -> list[float]:
    """1506.02438 eq. 16 as its sum: A_t = sum_l (gamma lam)^l delta_{t+l}, the value after the end is 0."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    count = len(deltas)
    return [sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, count)) for t in range(count)]


def to_go(rewards: Row) -> list[float]:
    """Sum of a token's own and all later rewards."""
    return [sum(rewards[t:]) for t in range(len(rewards))]


def reinforce(logp: Rows, advantages: Sequence[float]) -> torch.Tensor:
    """Williams 1992: mean over sequences of -A log p(sequence)."""
    terms = [-a * sum(row) for row, a in zip(logp, advantages, strict=True)]
    return sum(terms) / len(logp)


def clip_objective(ratio: Any, advantage: float, low: float, high: float) -> Any:
    """PPO 1707.06347 eq. 7 for one token: min(r A, clip(r, 1 - low, 1 + high) A)."""
    return min(ratio * advantage, bounded(ratio, 1 - low, 1 + high) * advantage)


def grpo(logp: Rows, old: Rows, advantages: Sequence[float], ref: Rows, beta: float) -> torch.Tensor:
    """GRPO 2402.03300 eq. 3 and 4: clip 0.2, k3, mean over sequences of token means."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, starts, frozen, advantage in zip(logp, old, ref, advantages, strict=True):
        for now, start, fixed in zip(row, starts, frozen, strict=True):
            k3 = (fixed - now).exp() - (fixed - now) - 1
            surrogate = clip_objective((now - start).exp(), advantage, 0.2, 0.2)
            loss = loss - (surrogate - beta * k3) / len(row) / len(logp)
    return loss


def dr_grpo(logp: Rows, old: Rows, advantages: Sequence[float], max_length: int) -> torch.Tensor:
    """Dr. GRPO 2503.20783: the sum over tokens, divided by a constant length and the number of sequences."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, starts, advantage in zip(logp, old, advantages, strict=True):
        for now, start in zip(row, starts, strict=True):
            loss = loss - clip_objective((now - start).exp(), advantage, 0.2, 0.2)
    return loss / (len(logp) * max_length)


def token_clip(logp: Rows, old: Rows, advantages: Rows, low: float, high: float) -> torch.Tensor:
    """The clipped objective averaged over all tokens; PPO, and DAPO 2503.14476 eq. 8 with high > low."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, starts, gains in zip(logp, old, advantages, strict=True):
        for now, start, gain in zip(row, starts, gains, strict=True):
            loss = loss - clip_objective((now - start).exp(), gain, low, high)
    return loss / sum(len(row) for row in logp)


def per_prompt(logp: Rows, old: Rows, advantages: Sequence[float], group_size: int) -> torch.Tensor:
    """DAPO as written: the token mean inside every group, then the mean over prompts; clip 0.2 and 0.28."""
    cuts = [slice(start, start + group_size) for start in range(0, len(logp), group_size)]
    expanded = [[a] * len(row) for row, a in zip(logp, advantages, strict=True)]
    return sum(token_clip(logp[cut], old[cut], expanded[cut], 0.2, 0.28) for cut in cuts) / len(cuts)


def gspo(logp: Rows, old: Rows, advantages: Sequence[float], low: float, high: float) -> torch.Tensor:
    """GSPO 2507.18071 eq. 5 and 7: the ratio of a sequence is the geometric mean; one clip per sequence."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, starts, advantage in zip(logp, old, advantages, strict=True):
        ratio = (sum(now - start for now, start in zip(row, starts, strict=True)) / len(row)).exp()
        loss = loss - clip_objective(ratio, advantage, low, high) / len(logp)
    return loss


def gmpo(logp: Rows, old: Rows, advantages: Sequence[float], low: float, high: float) -> torch.Tensor:
    """GMPO 2507.20673 eq. 4: |prod_t min(r^sgn A, clip(r, e^-low, e^high)^sgn A)^sgn A|^(1/T) A."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, starts, advantage in zip(logp, old, advantages, strict=True):
        sign = 1 if advantage > 0 else -1
        product = torch.ones((), dtype=torch.float64)
        for now, start in zip(row, starts, strict=True):
            ratio = (now - start).exp()
            clipped = bounded(ratio, math.exp(-low), math.exp(high))
            product = product * min(ratio**sign, clipped**sign) ** sign
        loss = loss - product ** (1 / len(row)) * advantage / len(logp)
    return loss


def cispo(logp: Rows, old: Rows, advantages: Sequence[float], low: float, high: float) -> torch.Tensor:
    """CISPO 2506.13585 eq. 4: sg(clip(r, 1 - low, 1 + high)) A log p, averaged over all tokens."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, starts, advantage in zip(logp, old, advantages, strict=True):
        for now, start in zip(row, starts, strict=True):
            weight = bounded(math.exp(float(now.detach() - start)), 1 - low, 1 + high)
            loss = loss - weight * advantage * now
    return loss / sum(len(row) for row in logp)


def sapo(logp: Rows, old: Rows, advantages: Sequence[float]) -> torch.Tensor:
    """SAPO 2511.20347: (4 / tau) sigmoid(tau (r - 1)) A, tau 1 for A > 0 and else 1.05; as GRPO's means."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, starts, advantage in zip(logp, old, advantages, strict=True):
        tau = 1.0 if advantage > 0 else 1.05
        for now, start in zip(row, starts, strict=True):
            gate = 1 / (1 + (-tau * ((now - start).exp() - 1)).exp())
            loss = loss - 4 / tau * gate * advantage / len(row) / len(logp)
    return loss


def dual_clip(logp: Rows, old: Rows, advantages: Sequence[float], bound: float) -> torch.Tensor:
    """1912.09729 eq. 5: for A < 0 max(min(r A, clip(r) A), c A); averaged over all tokens."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, starts, advantage in zip(logp, old, advantages, strict=True):
        for now, start in zip(row, starts, strict=True):
            gain = clip_objective((now - start).exp(), advantage, 0.2, 0.28)
            loss = loss - (max(gain, bound * advantage) if advantage < 0 else gain)
    return loss / sum(len(row) for row in logp)


def two_sided(logp: Rows, old: Rows, advantages: Sequence[float], delta: float) -> torch.Tensor:
    """INTELLECT-2 2505.07291: min(min(r, delta) A, clip(r) A); averaged over all tokens."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, starts, advantage in zip(logp, old, advantages, strict=True):
        for now, start in zip(row, starts, strict=True):
            ratio = (now - start).exp()
            gains = (min(ratio, delta) * advantage, bounded(ratio, 0.8, 1.28) * advantage)
            loss = loss - min(gains)
    return loss / sum(len(row) for row in logp)


def value_objective(values: Rows, starts: Rows, returns: Rows, clip: float | None) -> torch.Tensor:
    """PPO's code: half the larger of (V - R)^2 and (V0 + clip(V - V0, -c, c) - R)^2, averaged over all tokens."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, start_row, target_row in zip(values, starts, returns, strict=True):
        for now, start, target in zip(row, start_row, target_row, strict=True):
            error = (now - target) ** 2
            if clip is not None:
                error = max(error, (start + bounded(now - start, -clip, clip) - target) ** 2)
            loss = loss + error / 2
    return loss / sum(len(row) for row in values)


def kl(logp: Rows, ref: Rows, kind: str, sampler: Rows) -> torch.Tensor:
    """Token mean of k1 = log(p/q), k2 = k1^2 / 2, k3 = q/p - 1 - log(q/p), or 'unbiased' = (p/sampler) k3."""
    total = torch.zeros((), dtype=torch.float64)
    for row, frozen, drawn in zip(logp, ref, sampler, strict=True):
        for now, fixed, start in zip(row, frozen, drawn, strict=True):
            k3 = fixed.exp() / now.exp() - 1 - (fixed - now)
            forms = {"k1": now - fixed, "k2": (now - fixed) ** 2 / 2, "k3": k3}
            total = total + (forms[kind] if kind != "unbiased" else now.exp() / start.exp() * k3)
    return total / sum(len(row) for row in logp)


def entropy_share(entropies: Rows, share: float) -> list[list[float]]:
    """2506.01939: 1 for tokens at or above the (1 - share) quantile of all entropies of the batch, else 0."""
    ranked = sorted(float(number) for row in entropies for number in row)
    place = (1 - share) * (len(ranked) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ranked) - 1)
    threshold = ranked[below] + (place - below) * (ranked[above] - ranked[below])
    return [[float(float(number) >= threshold) for number in row] for row in entropies]


def token_weights(proximal: Rows, sampler: Rows, low: float, high: float, mask: bool) -> list[list[float]]:
    """rho of each token, truncated to the bounds (TIS) or 0 outside of them (IcePop 2510.18855)."""
    result = []
    for row, drawn in zip(proximal, sampler, strict=True):
        rhos = [math.exp(float(p - s)) for p, s in zip(row, drawn, strict=True)]
        kept = [rho if low <= rho <= high else 0.0 for rho in rhos]
        result.append(kept if mask else [bounded(rho, low, high) for rho in rhos])
    return result


def sequence_weights(proximal: Rows, sampler: Rows, low: float, high: float, kind: str) -> list[list[float]]:
    """One weight per sequence: its product of rho truncated or masked, or 1 / 0 by a mean over its tokens."""
    result = []
    for row, drawn in zip(proximal, sampler, strict=True):
        rhos = [math.exp(float(p - s)) for p, s in zip(row, drawn, strict=True)]
        product, count = math.prod(rhos), len(rhos)
        mismatch = sum(rho - math.log(rho) - 1 for rho in rhos) / count
        weight = {
            "sequence_truncate": bounded(product, low, high),
            "sequence_mask": product if low <= product <= high else 0.0,
            "geometric_mask": float(low <= product ** (1 / count) <= high),
            "k3_mask": float(mismatch <= high),
        }[kind]
        result.append([weight] * count)
    return result
