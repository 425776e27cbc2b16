"""Diagnosis of the objective's arithmetic: advantages, ratios, clip, KL, loss, and the direction of the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch

from whet.algo.config import AlgoConfig
from whet.inspect.diagnose.step import Component, Subject, captured, share
from whet.train.optim.step import AUTOCAST, PARAMETERS, OptimConfig
from whet.train.rl_config import RLConfig
from whet.types import Group, Sample

Values = Sequence[Sequence[float]]
NARROW = (*AUTOCAST, *PARAMETERS)
SIMPLE = {"clip", "logprob"}
"""Surrogates whose loss is recomputed here from the definition."""
LOSS = {"float32": 1e-4} | dict.fromkeys(NARROW, 0.02)
"""Largest accepted difference of an independently computed loss."""
DRIFT = {"float32": 1e-3} | dict.fromkeys(NARROW, 0.5)
"""Largest accepted |ratio - 1| of a token before the first update, if the arithmetic is not exact."""
SLOPE = {"float32": 0.05, "bfloat16_autocast": 0.3, "float16_autocast": 0.3}
"""Largest accepted relative error of a gradient against finite differences."""
CHANGES, FARTHEST = (1e-2, 3e-3, 1e-3, 3e-4), 1e-2
"""The finite difference aims at a change of this many nats, one after the other until two agree, and moves the weights
by at most this share of their norm. A trained model curves so much that the longest is too long; below the shortest,
rounding of float32 sums is no longer small beside the change."""
AGREE = 1 / 3
"""Two steps agree when their slopes differ by less than this share of the accepted error."""
SMALL_GROUP = 4


def objective(subject: Subject) -> Component:
    """Recompute the loss and its parts from rewards and log-probabilities alone."""
    run, scores = subject.run, subject.scores()
    with captured(subject, apply=False) as updates:
        metrics = subject.prepare()()
    if not isinstance(run, RLConfig):
        part = Component("Loss")
        expected = -sum(map(math.fsum, scores)) / sum(map(len, scores))
        part.facts = {"loss, nats per token": metrics["loss"], "perplexity": math.exp(min(expected, 700))}
        part.headline = f"{metrics['loss']:.4f} nats per token over {sum(map(len, scores)):,} tokens"
        _check_loss(part, run.optim, metrics["loss"], expected)
        _check_slope(part, "log-prob along the step", subject, updates[0].gradients, 1)
        return part
    part = Component("GRPO mathematics")
    rewards = [s.reward for g in subject.groups for s in g.samples if s.reward is not None]
    part.facts = {
        "groups sampled": run.num_prompts,
        "samples per group": run.group_size,
        "groups whose rewards differ": subject.num_informative,
        "rewards of the first group": [s.reward for s in subject.groups[0].samples],
        "rewards, mean": sum(rewards) / len(rewards),
        "surrogate": f"{run.algo.surrogate}, {run.algo.ratio} ratio, {run.algo.aggregation}",
        "loss": metrics["loss"],
        "KL to the reference (k3)": metrics.get("kl", "no reference"),
    }
    found = f"{subject.num_informative} of {run.num_prompts}"
    found += "; rewards 1, 0, 1, ... put in their place below" if subject.is_substituted else ""
    part.check(
        "groups whose rewards differ", not subject.is_substituted, found, "1 or more", otherwise="warn"
    )
    size = run.group_size
    enough = size >= SMALL_GROUP or run.algo.baseline in ("none", "value")
    part.check("group size", enough, size, f"{SMALL_GROUP} or more; 8 to 16 is usual", otherwise="warn")
    _check_advantages(part, run.algo, subject.groups)
    _check_ratios(part, run, log_ratios(subject, scores), metrics)
    expected = _expected_loss(subject, scores, metrics)
    if expected is None:
        part.facts["loss recomputed"] = "no: this surrogate, ratio or regulariser is not spelt out here"
    else:
        _check_loss(part, run.optim, metrics["loss"], expected)
    _check_kl(part, run, metrics)
    _check_signs(part, subject, run)
    part.headline += f", loss {metrics['loss']:+.6f} (either sign is right)"
    return part


def _check_loss(part: Component, optim: OptimConfig, loss: float, expected: float) -> None:
    is_right = abs(loss - expected) <= LOSS[optim.precision] * max(1.0, abs(expected))
    part.check("loss recomputed from log-probs", is_right, f"{loss:.6f}", f"{expected:.6f}")


def log_ratios(subject: Subject, scores: Values) -> list[list[float]]:
    """Return log policy - log sampler of every trained token, by sequence, clamped to +-20 as in the loss."""
    pairs = [
        zip(row, s.sampler_logprobs, strict=True) for row, s in zip(scores, subject.sequences, strict=True)
    ]
    return [[max(-20.0, min(20.0, p - q)) for p, q in row] for row in pairs]


def outside_clip(algo: AlgoConfig, rows: Values) -> str:
    """Return the share of ratios outside the clip's bounds, per token or per sequence as in the objective."""
    if algo.surrogate in ("sigmoid", "logprob"):
        return f"surrogate {algo.surrogate} has no clip"
    if algo.ratio == "sequence":
        rows = [[math.fsum(row) / len(row)] for row in rows]
    flat = list(chain.from_iterable(rows))
    low, high = -algo.clip_low, algo.clip_high
    if algo.surrogate != "geometric":
        low, high = math.log(max(1 - algo.clip_low, 1e-9)), math.log1p(algo.clip_high)
    return share(sum(not low <= value <= high for value in flat) / len(flat))


def _check_advantages(part: Component, algo: AlgoConfig, groups: Sequence[Group]) -> None:
    """Compare advantages with their definition, and check that their mean is 0 with a group baseline."""
    rows = [
        [(s.reward, s.advantage) for s in g.samples if s.reward is not None and s.advantage is not None]
        for g in groups
    ]
    rows = [row for row in rows if row]
    part.facts["advantages of the first group"] = [advantage for _, advantage in rows[0]]
    if (
        algo.baseline in ("group_mean", "leave_one_out")
        and algo.multi_reward == "sum"
        and algo.advantage_clip is None
    ):
        mean = max(abs(math.fsum(a for _, a in row) / len(row)) for row in rows)
        part.check("mean advantage of every group", mean < 1e-6, f"at most {mean:.1g}", "0")
    if algo.baseline == "value" or algo.multi_reward != "sum" or algo.scale not in ("group", "none"):
        return
    error = 0.0
    for row in rows:
        paid, count = [reward for reward, _ in row], len(row)
        base = 0.0 if algo.baseline == "none" else math.fsum(paid) / count
        factor = count / max(count - 1, 1) if algo.baseline == "leave_one_out" else 1.0
        if algo.scale == "group":
            middle = math.fsum(paid) / count
            variance = math.fsum((r - middle) ** 2 for r in paid) / max(count - algo.std_ddof, 1)
            factor /= math.sqrt(variance) + algo.eps if variance > 1e-12 else 1.0
        bound = algo.advantage_clip or math.inf
        expected = [max(-bound, min(bound, (r - base) * factor)) for r in paid]
        error = max(error, *(abs(a - e) for (_, a), e in zip(row, expected, strict=True)))
    part.check("advantages by their definition", error < 1e-5, f"differ by at most {error:.1g}", "0")


def _check_ratios(part: Component, run: RLConfig, rows: Values, metrics: Mapping[str, float]) -> None:
    """Check exp(policy - sampler): before the first update it is 1, and nothing is clipped."""
    ratios = [math.exp(value) for value in chain.from_iterable(rows)]
    drift, limit = max(abs(ratio - 1) for ratio in ratios), DRIFT[run.optim.precision]
    part.facts |= {
        "ratio exp(policy - sampler), least": min(ratios),
        "ratio, largest": max(ratios),
        "clip": f"{run.algo.clip_low:g} below, {run.algo.clip_high:g} above",
        "ratios outside the clip": outside_clip(run.algo, rows),
    }
    part.headline = f"ratio {min(ratios):.4f} to {max(ratios):.4f}"
    found = f"1 +- {drift:.2g}"
    part.check("ratio before the update", drift <= limit, found, f"1 +- {limit:g}: the policy itself sampled")
    if "ratio_drift" in metrics:
        told = metrics["ratio_drift"]
        is_same = math.isclose(told, drift, rel_tol=1e-2, abs_tol=1e-6)
        part.check("|ratio - 1| as the objective has it", is_same, f"{told:.3g}", f"{drift:.3g}, recomputed")


def _expected_loss(subject: Subject, scores: Values, metrics: Mapping[str, float]) -> float | None:
    """Compute the loss from its definition; None if this file does not implement it."""
    run = subject.run
    assert isinstance(run, RLConfig)
    algo, sequences = run.algo, subject.sequences
    is_token_mean = algo.aggregation == "token_mean"
    if (
        algo.surrogate not in SIMPLE
        or algo.ratio != "token"
        or algo.is_token_level
        or algo.num_updates > 1
        or algo.entropy_top_share < 1
        or algo.dual_clip is not None
        or run.off_policy.correction != "none"
        or (algo.has_entropy_bonus and not is_token_mean)
    ):
        return None
    tokens, number = sum(map(len, scores)), len(sequences)
    prompts = len({s.group for s in sequences})
    weight: dict[str, Callable[[int, int], float]] = {
        "token_mean": lambda own, group: 1 / tokens,
        "sequence_mean": lambda own, group: 1 / (number * own),
        "prompt_mean": lambda own, group: 1 / (prompts * group),
        "sequence_sum": lambda own, group: 1 / number,
        "constant": lambda own, group: 1 / (number * run.sampling.max_new_tokens),
    }
    terms: list[float] = []
    for row, logs, s in zip(scores, log_ratios(subject, scores), sequences, strict=True):
        factor = weight[algo.aggregation](s.num_trained, s.num_group_tokens)
        for p, log_ratio in zip(row, logs, strict=True):
            ratio = math.exp(log_ratio)
            clipped = max(1 - algo.clip_low, min(1 + algo.clip_high, ratio))
            gain = (
                s.advantage * p
                if algo.surrogate == "logprob"
                else min(ratio * s.advantage, clipped * s.advantage)
            )
            terms.append(-factor * gain)
    bonus = algo.entropy_coef * metrics.get("entropy", 0.0) if algo.entropy_target is None else 0.0
    return math.fsum(terms) - bonus


def _check_kl(part: Component, run: RLConfig, metrics: Mapping[str, float]) -> None:
    if run.algo.kl != "none" and run.algo.num_updates == 1:
        kl = metrics["kl"]
        part.check("KL to the reference, which the policy still is", abs(kl) < 1e-6, f"{kl:.2g} nats", "0")


def _check_signs(part: Component, subject: Subject, run: RLConfig) -> None:
    """Reward all completions, then penalise all: their log-prob must rise, then fall; the loss may have any sign."""
    algo = run.algo
    plain = AlgoConfig(
        baseline="none",
        scale="none",
        uninformative="keep",
        ratio=algo.ratio,
        surrogate=algo.surrogate,
        clip_low=algo.clip_low,
        clip_high=algo.clip_high,
        tau_positive=algo.tau_positive,
        tau_negative=algo.tau_negative,
    )
    for sign, word in ((1, "rises"), (-1, "falls")):
        groups = [replace(g, samples=tuple(_advised(s, sign) for s in g.samples)) for g in subject.groups]
        with captured(subject, apply=False) as updates:
            loss = subject.prepare(groups=groups, algo=plain)()["loss"]
        part.facts[f"loss with all advantages {sign:+d}"] = loss
        name = f"all advantages {sign:+d}: what was sampled {word} in log-prob"
        _check_slope(part, name, subject, updates[0].gradients, sign)


def _advised(sample: Sample, sign: int) -> Sample:
    return sample if sample.advantage is None else replace(sample, advantage=float(sign))


def _check_slope(
    part: Component, name: str, subject: Subject, gradients: Mapping[str, torch.Tensor], sign: int
) -> None:
    """Check the backward pass against finite differences: move the weights along a gradient, both ways, and compare
    log-probs.

    The mean log-probability of a trained token must change by the gradient's norm per unit of length, in the direction
    of `sign`.
    """
    named, norm = dict(subject.policy.model.named_parameters()), total_norm(gradients)
    limit = SLOPE.get(subject.run.optim.precision)
    if limit is None:
        part.facts[name] = "not measured: 16-bit weights cannot hold so small a move"
        return
    slope, size = math.nan, max(norm, 1e-30)
    for change in CHANGES:
        longer, slope = (
            slope,
            _slope(subject, gradients, min(change / size, FARTHEST * total_norm(named)), norm),
        )
        if abs(slope - longer) <= AGREE * limit * size:
            break
    is_right = abs(slope / size - sign) <= limit
    part.check(
        name, is_right, f"slope {slope:+.4g}", f"{sign * norm:+.4g}, the gradient's norm, +- {share(limit)}"
    )


def _slope(subject: Subject, gradients: Mapping[str, torch.Tensor], reach: float, norm: float) -> float:
    """Return the change of the mean log-probability per unit of length, between `reach` before and behind."""
    named = dict(subject.policy.model.named_parameters())
    means = []
    for direction in (1, -2):  # forward, then back to the same distance on the other side
        with torch.no_grad():
            for tensor, gradient in gradients.items():
                named[tensor].add_(gradient, alpha=-direction * reach / max(norm, 1e-30))
        scores = list(chain.from_iterable(subject.scores()))
        means.append(math.fsum(scores) / len(scores))
    subject.reset()
    return (means[0] - means[1]) / (2 * reach)


def total_norm(gradients: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of all tensors together."""
    return math.hypot(*(float(g.detach().double().norm()) for g in gradients.values()))
