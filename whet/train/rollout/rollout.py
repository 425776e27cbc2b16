"""Rollouts: sample groups, score them, and turn them into training sequences."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain

import torch

from whet.algo.advantages import group_advantages, has_spread, overlong_penalty
from whet.algo.config import AlgoConfig, Overlong
from whet.algo.signal import cancellation, repeated_share, signal_sums
from whet.eval.grade import Grade, grade
from whet.generate.engine import Completion
from whet.generate.episode import play
from whet.generate.policy import Policy
from whet.generate.rows import Sampler
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.ranks.collectives import all_reduce_sum
from whet.rewards.base import EPISODE, WeightedReward, score_completions
from whet.tasks.tools import environment_for
from whet.telemetry.spans import span
from whet.types import Group, Problem, Sample, Task

HARD_PENALTY = -0.5
SHOWN_TEXT = 400
"""Characters of a prompt or completion that a note in the terminal shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParams:
    """How groups are sampled and scored.

    Attributes:
        group_size: Samples per problem.
        sampling: How they are drawn.
        overlong: Punishment of length that is added to the reward.
        overlong_cache: Width of the soft punishment's ramp in tokens.
        random_reward: Control experiment: a coin decides the reward instead, right answers still count in the metrics.
    """

    group_size: int
    sampling: SamplingParams
    overlong: Overlong = "none"
    overlong_cache: int = 0
    random_reward: bool = False


@dataclass(frozen=True, slots=True)
class Rollout:
    """Groups of one step with the grades of their samples, and what sampling and scoring took."""

    groups: list[Group]
    grades: list[list[Grade]]
    generate_seconds: float
    reward_seconds: float


def longest_sequence(policy: Policy, problems: Sequence[Problem], sampling: SamplingParams) -> int:
    """Return the tokens of the longest prompt with the longest completion."""
    return max(len(policy.prompt_ids(problem)) for problem in problems) + sampling.max_new_tokens


def collect_groups(
    policy: Policy,
    engine: Sampler,
    task: Task,
    rewards: list[WeightedReward],
    problems: Sequence[Problem],
    *,
    seeds: Sequence[tuple[int, ...]],
    params: RolloutParams,
    scoring: AbstractContextManager[object] = nullcontext(),
) -> Rollout:
    """Sample and score a group of completions for each problem.

    Args:
        policy: The policy that samples.
        engine: Its engine.
        task: Judges answers, for the metrics.
        rewards: The run's rewards.
        problems: One group each.
        seeds: Run seed, step and epoch of each problem: with its uid and the sample index they name a sequence's noise
            (the epoch, because a small data set may come round within one step).
        params: How groups are sampled and scored.
        scoring: Held while they are scored: a lock, where several rollouts are collected at a time.

    Returns:
        Groups in the order of the problems.
    """
    began = time.perf_counter()
    names = sample_seeds(problems, seeds, params.group_size)
    with span("rollout_generation"):
        drawn = play(policy, engine, problems, names, params.sampling, environment_for(policy.schema, task))
    generated = time.perf_counter()
    with scoring:
        groups, grades = score_groups(policy, task, rewards, problems, names, drawn, params)
    return Rollout(groups, grades, generated - began, time.perf_counter() - generated)


def sample_seeds(
    problems: Sequence[Problem], seeds: Sequence[tuple[int, ...]], group_size: int
) -> list[list[int]]:
    """Return the seed of each sample of each problem, see `collect_groups`."""
    return [
        [sequence_seed(*seed, problem.uid, index) for index in range(group_size)]
        for problem, seed in zip(problems, seeds, strict=True)
    ]


def score_groups(
    policy: Policy,
    task: Task,
    rewards: list[WeightedReward],
    problems: Sequence[Problem],
    names: Sequence[Sequence[int]],
    drawn: Sequence[Sequence[Completion]],
    params: RolloutParams,
) -> tuple[list[Group], list[list[Grade]]]:
    """Score what was drawn.

    Args:
        policy: The policy that drew.
        task: Judges answers, for the metrics.
        rewards: The run's rewards.
        problems: One group each.
        names: Seeds of the samples of each.
        drawn: Their completions.
        params: How groups are sampled and scored.

    Returns:
        Groups in the order of the problems, and the grades of their samples.
    """
    prompts = [policy.prompt_ids(problem) for problem in problems]
    with span("reward_computation"):
        weight = next((reward.weight for reward in rewards if reward.name == EPISODE), 0.0)
        pairs = [
            (problem, _sample(policy, problem, prompt_ids, index, done, weight))
            for problem, prompt_ids, row in zip(problems, prompts, drawn, strict=True)
            for index, done in enumerate(row)
        ]
        grades = grade(policy, task, [(problem, s.text, s.completion_ids) for problem, s in pairs])
        paid = [math.fsum(done.turn_rewards) for row in drawn for done in row]
        scored = score_completions(rewards, [(problem, s.text) for problem, s in pairs], {EPISODE: paid})
    samples = []
    for (_, sample), (scores, total), seed in zip(pairs, scored, chain.from_iterable(names), strict=True):
        if params.random_reward:
            total = float(sequence_seed("coin", seed) % 2)
            scores = {"random": total}
        if params.overlong in ("soft", "hard"):
            penalty = HARD_PENALTY if _is_unanswered(policy, sample) else 0.0
            if params.overlong == "soft":
                penalty = overlong_penalty(
                    len(sample.completion_ids),
                    max_length=params.sampling.max_new_tokens,
                    cache_length=params.overlong_cache,
                )
            scores = scores | {"overlong": penalty}
            total = None if total is None else total + penalty
        samples.append(replace(sample, rewards=scores, reward=total))
    size = max(1, len(samples) // max(1, len(problems)))
    groups = [
        Group(problem=problem, samples=tuple(samples[place * size : (place + 1) * size]))
        for place, problem in enumerate(problems)
    ]
    return groups, [grades[start : start + size] for start in range(0, len(grades), size)]


def _sample(
    policy: Policy,
    problem: Problem,
    prompt_ids: tuple[int, ...],
    index: int,
    done: Completion,
    episode_weight: float,
) -> Sample:
    """Turn what was drawn into a record without rewards."""
    return Sample(
        uid=problem.uid,
        index=index,
        prompt_ids=prompt_ids,
        completion_ids=done.ids,
        sampler_logprobs=done.logprobs,
        text=policy.completion_text(prompt_ids, done.ids),
        finish_reason=done.finish_reason,
        trained=done.trained,
        kept=done.kept,
        experts=done.experts,
        turn_ends=done.turn_ends,
        turn_rewards=tuple(episode_weight * reward for reward in done.turn_rewards) if episode_weight else (),
        versions=done.versions,
    )


def _is_unanswered(policy: Policy, sample: Sample) -> bool:
    """Say whether a completion was cut off before its answer."""
    return sample.finish_reason == "length" and policy.schema.parse(sample.text).answer is None


def reward_matrix(groups: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rewards [P, G] in float64 (0 where unscorable) and where there is a score, bool [P, G]."""
    rewards_PG = torch.tensor(
        [[0.0 if s.reward is None else s.reward for s in group.samples] for group in groups],
        dtype=torch.float64,
    )
    scored_PG = torch.tensor([[s.reward is not None for s in group.samples] for group in groups])
    return rewards_PG, scored_PG


def score_planes(groups: Sequence[Group], names: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return unweighted scores [P, G, X] by reward name in float64, and where a sample is scored, bool [P, G]."""
    rewards_PGX = torch.tensor(
        [[[s.rewards.get(name) or 0.0 for name in names] for s in group.samples] for group in groups],
        dtype=torch.float64,
    )
    return rewards_PGX, torch.tensor([[s.reward is not None for s in group.samples] for group in groups])


def rollout_metrics(
    rollout: Rollout, algo: AlgoConfig, weights: Mapping[str, float], num_refilled: int
) -> dict[str, float]:
    """Average what was sampled, over all ranks.

    Args:
        rollout: This rank's groups.
        algo: The objective: how rewards become advantages.
        weights: Weight of each reward by name.
        num_refilled: Groups that were sampled to replace uninformative ones, over all ranks.
    """
    samples = [sample for group in rollout.groups for sample in group.samples]
    grades = [graded for row in rollout.grades for graded in row]
    scored = [sample.reward for sample in samples if sample.reward is not None]
    spread = has_spread(*reward_matrix(rollout.groups)).tolist() if rollout.groups else []
    right = [sum(graded.is_correct for graded in row) for row in rollout.grades]
    sums = all_reduce_sum(
        len(samples),
        len(scored),
        sum(scored),
        sum(reward * reward for reward in scored),
        sum(graded.is_correct for graded in grades),
        sum(graded.verdict == "perfect" for graded in grades),
        sum(graded.thinking_tokens for graded in grades),
        sum(len(sample.completion_ids) for sample in samples),
        sum(sample.finish_reason == "length" for sample in samples),
        sum(repeated_share(sample.completion_ids) for sample in samples),
        len(rollout.groups),
        len(spread) - sum(spread),
        sum(count == len(row) for count, row in zip(right, rollout.grades, strict=True)),
        sum(count == 0 for count in right),
        sum(max(1, len(sample.turn_ends)) for sample in samples),
        *(value for name in weights for value in _total(samples, name)),
    )
    count, num_scored, num_groups = max(sums[0], 1.0), max(sums[1], 1.0), max(sums[10], 1.0)
    mean = sums[2] / num_scored
    names = ["correct", "format", "thinking_tokens", "completion_tokens", "truncated", "repetition"]
    metrics = {f"rl/{name}": value / count for name, value in zip(names, sums[4:10], strict=True)}
    totals = zip(weights, sums[15::2], sums[16::2], strict=True)
    metrics |= {f"rl/reward/{name}": total / max(number, 1.0) for name, total, number in totals}
    metrics |= {
        "rl/reward_mean": mean,
        "rl/reward_std": math.sqrt(max(sums[3] / num_scored - mean * mean, 0.0)),
        "rl/all_right_groups": sums[12] / num_groups,
        "rl/all_wrong_groups": sums[13] / num_groups,
        "rl/unscorable": sums[0] - sums[1],
        "rl/groups_refilled": float(num_refilled),
    }
    if sums[14] > sums[0]:
        metrics["rl/turns"] = sums[14] / count
    if sums[0] == sums[10]:  # one sample a group: nothing inside it can be compared
        return metrics
    metrics["rl/zero_variance_groups"] = sums[11] / num_groups
    return metrics | _signal_metrics(rollout.groups, algo, weights)


def age_metrics(rollout: Rollout, step: int) -> dict[str, float]:
    """Return how many updates the weights of the tokens are behind, on average; empty where no token has a version."""
    ages = [step - v for group in rollout.groups for s in group.samples for v in s.versions]
    total, count = all_reduce_sum(sum(ages), len(ages))
    return {"rl/token_age": total / count} if count else {}


def _signal_metrics(
    groups: Sequence[Group], algo: AlgoConfig, weights: Mapping[str, float]
) -> dict[str, float]:
    """Say which reward the advantages come from, and how much of the rewards' spread cancels; over all ranks."""
    shared, own, total, total_raw = [0.0] * len(weights), [0.0] * len(weights), 0.0, 0.0
    if groups:
        rewards_PGX, scored_PG = score_planes(groups, list(weights))
        factors = list(weights.values())
        _, own, total_raw = signal_sums(rewards_PGX, factors, scored_PG)
        if algo.multi_reward == "normalise":
            planes = [
                group_advantages(plane_PG, scored_PG, std_ddof=algo.std_ddof, eps=algo.eps)
                for plane_PG in rewards_PGX.unbind(-1)
            ]
            rewards_PGX = torch.stack(planes, -1)
        shared, _, total = signal_sums(rewards_PGX, factors, scored_PG, scale_groups=algo.is_group_scaled)
    *sums, total, total_raw = all_reduce_sum(*shared, *own, total, total_raw)
    shared, own = sums[: len(weights)], sums[len(weights) :]
    shares = {
        f"rl/signal/{name}": value / total if total > 0 else 0.0
        for name, value in zip(weights, shared, strict=True)
    }
    return shares | ({"rl/cancellation": cancellation(own, total_raw)} if len(weights) > 1 else {})


def _total(samples: Sequence[Sample], name: str) -> tuple[float, int]:
    """Return the sum of one reward's scores, and how many samples have one."""
    scores = [score for sample in samples if (score := sample.rewards.get(name)) is not None]
    return sum(scores), len(scores)


def sample_note(group: Group) -> str:
    """Write the first completion of a group with its reward, cut to a few lines of the terminal."""
    sample = group.samples[0]
    reward = "none" if sample.reward is None else f"{sample.reward:g}"
    prompt, text = (
        t if len(t) <= SHOWN_TEXT else t[:SHOWN_TEXT] + "…" for t in (group.problem.prompt, sample.text)
    )
    return f"sample, reward {reward}, answer {group.problem.answer[:80]}: {prompt}\n{text}"
