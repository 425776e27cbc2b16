"""The whole objective of a step from its definition: row after row, with AdamW by hand.

From whet it takes only the weights, the records and the hash that names a minibatch. `test_invariance.py` and
`bench/invariance.py` hold the packed program against it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from padded import Weights, score_rows, value_rows
from reference import losses as reference

from whet.algo.config import AlgoConfig, OffPolicyConfig, ValueConfig
from whet.generate.sampling import sequence_seed
from whet.model.config import ModelConfig
from whet.train.optim.step import OptimConfig
from whet.types import Group, Sample


@dataclass(kw_only=True)
class Row:
    """One counted sample with what was measured before the first update."""

    sample: Sample
    sampler_T: torch.Tensor
    num_group_tokens: int
    advantages_T: torch.Tensor
    base_T: torch.Tensor
    ref_T: torch.Tensor
    factor_T: torch.Tensor
    start_T: torch.Tensor
    returns_T: torch.Tensor


@dataclass(kw_only=True)
class Stage:
    """Weights and settings of a step, as the program has them before it."""

    config: ModelConfig
    policy: Weights
    frozen: Weights
    critic: Weights
    algo: AlgoConfig
    off_policy: OffPolicyConfig
    value: ValueConfig
    optim: OptimConfig
    temperature: float
    max_length: int
    reward_weights: dict[str, float]
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)


def outcome_advantages(
    groups: Sequence[Sequence[Sample]], algo: AlgoConfig, weights: dict[str, float]
) -> list[float]:
    """One number per scored sample, in the order of groups and samples."""
    rewards = [[sum(w * s.rewards[n] for n, w in weights.items()) for s in group] for group in groups]
    if algo.multi_reward == "normalise":
        planes = [[[s.rewards[name] for s in group] for group in groups] for name in weights]
        found = reference.multi_reward(planes, list(weights.values()), algo.eps)
    elif algo.baseline in ("none", "value"):
        found = [reward for group in rewards for reward in group]
    elif algo.baseline == "leave_one_out":
        found = reference.left_out(rewards)
    elif algo.scale == "group" and algo.std_ddof == 1:
        found = reference.standardised(rewards, algo.eps)
    else:
        divisors = {
            "none": lambda group: 1.0,
            "group": lambda group: statistics.pstdev(group) + algo.eps,
            "batch": lambda group: statistics.stdev([r for g in rewards for r in g]) + algo.eps,
            "mean": statistics.fmean,
        }
        scales = [divisors[algo.scale](group) or 1.0 for group in rewards for _ in group]
        found = [c / scale for c, scale in zip(reference.centred(rewards), scales, strict=True)]
    bound = algo.advantage_clip or math.inf
    # What is 0 but for rounding is 0: it must not depend on the order of a sum whether a sample is trained on.
    return [reference.bounded(number, -bound, bound) if abs(number) > 1e-9 else 0.0 for number in found]


def counted_rows(groups: Sequence[Group], stage: Stage) -> list[Row]:
    """The samples that the loss counts, with outcome advantages on every token."""
    algo, names = stage.algo, list(stage.reward_weights)
    scored = [[s for s in group.samples if s.reward is not None] for group in groups]
    if algo.uninformative != "keep":
        split = names if algo.multi_reward == "normalise" else [None]
        measures = [lambda s, n=name: s.reward if n is None else s.rewards[n] for name in split]
        scored = [g for g in scored if any(len({measure(s) for s in g}) > 1 for measure in measures)]
    numbers = iter(outcome_advantages(scored, algo, stage.reward_weights))
    dtype = stage.policy["model.norm.weight"].dtype
    rows = []
    for group in scored:
        pairs = [(sample, next(numbers)) for sample in group]
        if algo.overlong == "filter":
            pairs = [(s, number) for s, number in pairs if s.finish_reason != "length"]
        total = sum(len(sample.completion_ids) for sample, _ in pairs)
        for sample, number in pairs:
            sampler_T = torch.tensor(sample.sampler_logprobs, dtype=torch.float32).to(dtype)
            zeros_T = torch.zeros_like(sampler_T)
            rows.append(
                Row(
                    sample=sample,
                    sampler_T=sampler_T,
                    num_group_tokens=total,
                    advantages_T=torch.full_like(sampler_T, number),
                    base_T=sampler_T,
                    ref_T=zeros_T,
                    factor_T=torch.ones_like(sampler_T),
                    start_T=zeros_T,
                    returns_T=zeros_T,
                )
            )
    return rows


def prepare(rows: list[Row], stage: Stage) -> dict[str, float]:
    """Fill in what is measured before the first update; return the metrics of that pass."""
    algo, samples, metrics = stage.algo, [row.sample for row in rows], {}
    logps, entropies = score_rows(stage.config, stage.policy, samples, stage.temperature)
    if algo.kl != "none":
        refs, _ = score_rows(stage.config, stage.frozen, samples, stage.temperature)
        for row, ref_T in zip(rows, refs, strict=True):
            row.ref_T = ref_T
    if algo.baseline == "value":
        for row, start_T in zip(rows, value_rows(stage.config, stage.critic, samples), strict=True):
            row.start_T = start_T
    if stage.off_policy.proximal == "recomputed":
        for row, logp_T in zip(rows, logps, strict=True):
            row.base_T = logp_T
        metrics |= gaps(logps, [row.sampler_T for row in rows]) | correct(rows, stage.off_policy)
    if algo.entropy_top_share < 1:
        ranked = sorted((float(h) for row in entropies for h in row), reverse=True)
        floor = ranked[max(1, math.ceil(algo.entropy_top_share * len(ranked))) - 1]
        for row, entropy_T in zip(rows, entropies, strict=True):
            row.factor_T = row.factor_T * (entropy_T >= floor)
    shape_advantages(rows, stage)
    return metrics


def correct(rows: list[Row], off_policy: OffPolicyConfig) -> dict[str, float]:
    """Multiply in the off-policy weights."""
    kind, (low, high) = off_policy.correction, off_policy.bounds
    if kind == "none":
        return {}
    for row in rows:
        proximal, sampler = [row.base_T.tolist()], [row.sampler_T.tolist()]
        if kind.startswith("token"):
            found = reference.token_weights(proximal, sampler, low, high, kind == "token_mask")
        else:
            found = reference.sequence_weights(proximal, sampler, low, high, kind)
        row.factor_T = torch.tensor(found[0], dtype=row.base_T.dtype)
    rhos = [[(row.base_T - row.sampler_T).exp()] for row in rows]
    measure: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "token": lambda rho_T: rho_T,
        "sequence": lambda rho_T: rho_T.prod().expand_as(rho_T),
        "geometric": lambda rho_T: rho_T.log().mean().exp().expand_as(rho_T),
        "k3": lambda rho_T: (rho_T - rho_T.log() - 1).mean().expand_as(rho_T),
    }
    flat = torch.cat([measure[kind.split("_")[0]](rho_T) for (rho_T,) in rhos])
    return {"rl/correction_active": float(((flat < low) | (flat > high)).double().mean())}


def shape_advantages(rows: list[Row], stage: Stage) -> None:
    """KL in the reward, GAE, rewards to go and whitening: advantages that differ between tokens."""
    algo = stage.algo
    columns = []
    for row in rows:
        rewards = [0.0] * len(row.base_T)
        rewards[-1] = float(row.advantages_T[-1].double())
        if algo.kl == "k1_reward":
            k1 = (row.base_T.double() - row.ref_T.double()).tolist()
            rewards = [reward - algo.kl_coef * number for reward, number in zip(rewards, k1, strict=True)]
        if algo.baseline == "value":
            starts = row.start_T.tolist()
            column = reference.gae(rewards, starts, stage.value.gamma, stage.value.lam)
            returns = [a + v for a, v in zip(column, starts, strict=True)]
            row.returns_T = torch.tensor(returns, dtype=row.base_T.dtype)
        elif algo.kl == "k1_reward":
            column = reference.to_go(rewards)
        else:
            column = [rewards[-1]] * len(rewards)
        columns.append(column)
    if algo.whiten:
        columns = reference.whitened(columns)
    for row, column in zip(rows, columns, strict=True):
        row.advantages_T = torch.tensor(column, dtype=torch.float64).to(row.base_T.dtype)


def token_loss(
    logp_T: torch.Tensor, row: Row, algo: AlgoConfig
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Policy loss of each token from its formula, and where a clip took the gradient away (above, below)."""
    gain, delta, low, high = row.advantages_T, logp_T - row.base_T, algo.clip_low, algo.clip_high
    up, down = gain > 0, gain < 0
    never = torch.zeros_like(up)
    if algo.surrogate == "logprob":
        return -gain * logp_T, never, never
    if algo.surrogate == "geometric":
        bounded = torch.where(up, torch.clamp(delta, max=high), torch.clamp(delta, min=-low))
        return -gain * bounded.mean().exp(), (delta > high) & up, (delta < -low) & down
    ratio = (delta.mean().expand_as(delta) if algo.ratio == "sequence" else delta).exp()
    if algo.surrogate == "sigmoid":
        tau = torch.full_like(gain, algo.tau_negative).masked_fill(up, algo.tau_positive)
        return -4 / tau / (1 + (-tau * (ratio - 1)).exp()) * gain, never, never
    over, under = ratio > 1 + high, ratio < 1 - low
    bounded = torch.where(over, 1 + high, torch.where(under, 1 - low, ratio))
    if algo.surrogate == "weight":
        return -bounded.detach() * gain * logp_T, over, under
    loss = torch.maximum(-ratio * gain, -bounded * gain)
    is_high = over & up
    if algo.dual_clip is not None:
        capped = down & (ratio > algo.dual_clip)
        loss, is_high = torch.where(capped, -algo.dual_clip * gain, loss), is_high | capped
    return loss, is_high, under & down


def aggregate(
    losses: Sequence[torch.Tensor], rows: Sequence[Row], algo: AlgoConfig, longest: int
) -> torch.Tensor:
    """Add the rows' token losses up, as the name of the aggregation says."""
    sums = torch.stack([loss.sum() for loss in losses])
    counts = torch.tensor([float(len(loss)) for loss in losses], dtype=sums.dtype)
    if algo.aggregation == "token_mean":
        return sums.sum() / counts.sum()
    if algo.aggregation == "sequence_mean":
        return (sums / counts).mean()
    if algo.aggregation == "constant":
        return sums.sum() / (len(rows) * longest)
    if algo.aggregation == "sequence_sum":
        return sums.mean()
    prompts: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        prompts.setdefault(row.sample.uid, []).append(number)
    return torch.stack([sums[places].sum() / counts[places].sum() for places in prompts.values()]).mean()


def gaps(logps: Sequence[torch.Tensor], samplers: Sequence[torch.Tensor]) -> dict[str, float]:
    """Sampler against trainer."""
    delta = torch.cat([a.detach() - b for a, b in zip(logps, samplers, strict=True)]).double()
    rho = delta.exp()
    largest = float(delta.abs().max())
    return {
        "rl/logprob_gap_mean": float(delta.abs().mean()),
        "rl/logprob_gap_max": largest,
        "rl/ratio_drift": float((rho - 1).abs().max()),
        "rl/mismatch_k3": float((rho - 1 - delta).mean()),
        "rl/effective_samples": float(rho.sum() ** 2 / rho.square().sum() / len(rho)),
    }


class Adam:
    """AdamW 1711.05101 without decay, after a clip of the global norm; keeps the gradients that it saw."""

    def __init__(self, weights: Weights, optim: OptimConfig) -> None:
        self.weights, self.optim, self.steps = weights, optim, 0
        self.first = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in weights.items()}

    @torch.no_grad()
    def step(self, lr: float) -> tuple[float, dict[str, torch.Tensor]]:
        """Update; return the norm and the gradients before the clip."""
        seen = {name: w.grad.clone() for name, w in self.weights.items() if w.grad is not None}
        norm = float(torch.cat([g.flatten() for g in seen.values()]).double().norm())
        self.steps += 1
        for name, grad in seen.items():
            clipped = grad * min(1.0, self.optim.max_grad_norm / (norm + 1e-6))
            self.first[name] += (1 - self.optim.beta1) * (clipped - self.first[name])
            self.second[name] += (1 - self.optim.beta2) * (clipped**2 - self.second[name])
            mean = self.first[name] / (1 - self.optim.beta1**self.steps)
            square = self.second[name] / (1 - self.optim.beta2**self.steps)
            self.weights[name] -= lr * mean / (square.sqrt() + self.optim.eps)
            self.weights[name].grad = None
        return norm, seen


def minibatches(rows: Sequence[Row], count: int, epoch: int, seed: int) -> list[list[int]]:
    """Places of the rows of each minibatch: whole prompts in the order of their hashes."""
    names = {row.sample.uid for row in rows}
    order = sorted(names, key=lambda name: sequence_seed("minibatch", seed, 0, epoch, name))
    part = {name: rank * count // len(order) for rank, name in enumerate(order)}
    return [[p for p, row in enumerate(rows) if part[row.sample.uid] == n] for n in range(count)]


def policy_update(rows: Sequence[Row], stage: Stage, adam: Adam, lr: float) -> tuple[dict[str, float], dict]:
    """One update of the policy; return its metrics and those of sampler against trainer."""
    algo = stage.algo
    logps, entropies = score_rows(stage.config, stage.policy, [row.sample for row in rows], stage.temperature)
    in_loss = algo.kl in ("k2_loss", "k3_loss", "k3_unbiased")
    read = [
        n for n, row in enumerate(rows) if in_loss or algo.entropy_coef or bool((row.advantages_T != 0).any())
    ]
    losses, high, low, kls = [], 0.0, 0.0, []
    for row, logp_T, entropy_T in zip(rows, logps, entropies, strict=True):
        loss_T, high_T, low_T = token_loss(logp_T, row, algo)
        delta_T = logp_T - row.ref_T
        k3_T = (-delta_T).exp() - 1 + delta_T
        forms = {
            "k2_loss": 0.5 * delta_T**2,
            "k3_loss": k3_T,
            "k3_unbiased": (logp_T - row.sampler_T).exp() * k3_T,
        }
        loss_T = row.factor_T * loss_T - algo.entropy_coef * entropy_T
        losses.append(loss_T + algo.kl_coef * forms[algo.kl] if in_loss else loss_T)
        high += float((high_T & (row.factor_T != 0)).sum())
        low += float((low_T & (row.factor_T != 0)).sum())
        kls.append(k3_T.detach())
    loss = aggregate(losses, rows, algo, stage.max_length)
    loss.backward()
    stage.lengths.append([len(rows[n].sample.prompt_ids) + len(rows[n].sample.completion_ids) for n in read])
    norm, seen = adam.step(lr)
    stage.gradients.append(seen)
    count = sum(len(logps[n]) for n in read)

    def drift(n: int) -> float:
        return float((logps[n].detach() - rows[n].base_T).abs().double().sum())

    metrics = {
        "rl/loss": float(loss.detach()),
        "rl/entropy": sum(float(entropies[n].detach().double().sum()) for n in read) / count,
        "rl/clip_high": high / count,
        "rl/clip_low": low / count,
        "rl/ratio_spread": sum(drift(n) for n in read) / count,
        "rl/grad_norm": norm,
    }
    if algo.kl != "none":
        metrics["rl/kl"] = sum(float(kls[n].double().sum()) for n in read) / count
    return metrics, gaps([logps[n] for n in read], [rows[n].sampler_T for n in read])


def critic_update(
    rows: Sequence[Row], stage: Stage, adam: Adam, lr: float
) -> tuple[list[list[float]], float]:
    """One update of the critic; return value, start value, return and clipped of every token, and the norm."""
    values = value_rows(stage.config, stage.critic, [row.sample for row in rows])
    losses, seen = [], []
    for row, value_T in zip(rows, values, strict=True):
        error = (value_T - row.returns_T) ** 2
        clipped, is_clipped = error, torch.zeros_like(error)
        if stage.value.clip is not None:
            near = row.start_T + (value_T - row.start_T).clamp(-stage.value.clip, stage.value.clip)
            clipped = (near - row.returns_T) ** 2
            is_clipped = ((value_T - row.start_T).abs() > stage.value.clip) & (clipped > error)
        losses.append(torch.maximum(error, clipped) / 2)
        columns = (value_T.detach(), row.start_T.detach(), row.returns_T, is_clipped)
        seen += torch.stack([column.double() for column in columns], 1).tolist()
    torch.cat(losses).mean().backward()
    norm, gradients = adam.step(lr)
    stage.gradients.append({f"critic/{name}": grad for name, grad in gradients.items()})
    return seen, norm


def update(groups: Sequence[Group], stage: Stage, lr: float, critic_lr: float, seed: int) -> dict[str, float]:
    """Do the step on the stage's weights; return all metrics of the objective."""
    algo = stage.algo
    rows = counted_rows(groups, stage)
    with torch.no_grad():
        first = prepare(rows, stage)
    policy_adam, critic_adam = Adam(stage.policy, stage.optim), Adam(stage.critic, stage.optim)
    results: list[dict[str, float]] = []
    tokens: list[list[float]] = []
    norms: list[float] = []
    for epoch in range(algo.num_epochs):
        for places in minibatches(rows, algo.num_minibatches, epoch, seed):
            part = [rows[place] for place in places]
            metrics, gap = policy_update(part, stage, policy_adam, lr)
            if not results and stage.off_policy.proximal == "sampler":
                first |= gap
            results.append(metrics)
            if algo.baseline == "value":
                seen, norm = critic_update(part, stage, critic_adam, critic_lr)
                tokens, norms = tokens + seen, [*norms, norm]
    metrics = {name: statistics.fmean(result[name] for result in results) for name in results[0]} | first
    metrics["rl/updates"] = float(len(results))
    metrics["rl/groups_with_signal"] = float(
        len({r.sample.uid for r in rows if bool((r.advantages_T != 0).any())})
    )
    if algo.kl != "none":
        metrics["rl/kl_coef"] = algo.kl_coef
    if algo.entropy_coef:
        metrics["rl/entropy_coef"] = algo.entropy_coef
    if tokens:
        now, start, target, clipped = zip(*tokens, strict=True)
        errors = [t - s for s, t in zip(start, target, strict=True)]
        metrics |= {
            "rl/value_loss": statistics.fmean((v - t) ** 2 / 2 for v, t in zip(now, target, strict=True)),
            "rl/value_grad_norm": statistics.fmean(norms),
            "rl/value_clipped": statistics.fmean(clipped),
            "rl/value_explained": 1 - statistics.pvariance(errors) / statistics.pvariance(target),
        }
    return metrics
