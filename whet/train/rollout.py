"""Rollouts: sample groups, score them, and turn them into training sequences."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from whet.algo.advantages import has_spread, overlong_penalty
from whet.distributed import all_reduce_sum
from whet.eval.grade import Grade, grade
from whet.generate.engine import Engine, Request
from whet.generate.policy import Policy
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.rewards.base import WeightedReward, score_completion
from whet.types import Group, Problem, Sample, Task


@dataclass(frozen=True, slots=True)
class Rollout:
    """Groups of one step with the grades of their samples, and what sampling and scoring took."""

    groups: list[Group]
    grades: list[list[Grade]]
    generate_seconds: float
    reward_seconds: float


def collect_groups(
    policy: Policy,
    engine: Engine,
    task: Task,
    rewards: list[WeightedReward],
    problems: Sequence[Problem],
    *,
    seeds: Sequence[tuple[int, ...]],
    group_size: int,
    sampling: SamplingParams,
    overlong_cache: int = 0,
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
        group_size: Samples per problem.
        sampling: How they are drawn.
        overlong_cache: Width of DAPO's soft length punishment in tokens; 0 for none.

    Returns:
        Groups in the order of the problems.
    """
    began = time.perf_counter()
    requests = [
        Request(
            prompt_ids=policy.prompt_ids(problem),
            seeds=tuple(sequence_seed(*seed, problem.uid, index) for index in range(group_size)),
        )
        for problem, seed in zip(problems, seeds, strict=True)
    ]
    completions = engine.generate(requests, sampling)
    generated = time.perf_counter()
    groups, grades = [], []
    for problem, request, row in zip(problems, requests, completions, strict=True):
        samples, row_grades = [], []
        for index, done in enumerate(row):
            text = policy.completion_text(request.prompt_ids, done.ids)
            scores, total = score_completion(rewards, problem, text)
            if overlong_cache:
                penalty = overlong_penalty(
                    len(done.ids), max_length=sampling.max_new_tokens, cache_length=overlong_cache
                )
                scores = scores | {"overlong": penalty}
                total = None if total is None else total + penalty
            samples.append(
                Sample(
                    uid=problem.uid,
                    index=index,
                    prompt_ids=request.prompt_ids,
                    completion_ids=done.ids,
                    sampler_logprobs=done.logprobs,
                    text=text,
                    finish_reason=done.finish_reason,
                    rewards=scores,
                    reward=total,
                )
            )
            row_grades.append(grade(policy, task, problem, text, done.ids))
        groups.append(Group(problem=problem, samples=tuple(samples)))
        grades.append(row_grades)
    return Rollout(groups, grades, generated - began, time.perf_counter() - generated)


def reward_matrix(groups: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rewards [P, G] in float64 (0 where unscorable) and where there is a score, bool [P, G]."""
    rewards_PG = torch.tensor(
        [[0.0 if s.reward is None else s.reward for s in group.samples] for group in groups],
        dtype=torch.float64,
    )
    scored_PG = torch.tensor([[s.reward is not None for s in group.samples] for group in groups])
    return rewards_PG, scored_PG


def is_informative(groups: Sequence[Group]) -> list[bool]:
    """Say which groups' rewards differ, so that a group-relative advantage teaches something."""
    return has_spread(*reward_matrix(groups)).tolist() if groups else []


def rollout_metrics(
    rollout: Rollout, rewards: Sequence[WeightedReward], num_refilled: int
) -> dict[str, float]:
    """Average what was sampled, over all ranks."""
    samples = [sample for group in rollout.groups for sample in group.samples]
    grades = [graded for row in rollout.grades for graded in row]
    scored = [sample.reward for sample in samples if sample.reward is not None]
    dull = sum(not useful for useful in is_informative(rollout.groups))
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
        dull,
        len(rollout.groups),
        *(value for reward in rewards for value in _total(samples, reward.name)),
    )
    count, num_scored = max(sums[0], 1.0), max(sums[1], 1.0)
    mean = sums[2] / num_scored
    names = ["rl/correct", "rl/format", "rl/thinking_tokens", "rl/completion_tokens", "rl/truncated"]
    metrics = {name: value / count for name, value in zip(names, sums[4:9], strict=True)}
    totals = zip(rewards, sums[11::2], sums[12::2], strict=True)
    metrics |= {f"rl/reward/{reward.name}": total / max(number, 1.0) for reward, total, number in totals}
    return metrics | {
        "rl/reward_mean": mean,
        "rl/reward_std": math.sqrt(max(sums[3] / num_scored - mean * mean, 0.0)),
        "rl/zero_variance_groups": sums[9] / max(sums[10], 1.0),
        "rl/unscorable": sums[0] - sums[1],
        "rl/groups_refilled": float(num_refilled),
    }


def _total(samples: Sequence[Sample], name: str) -> tuple[float, int]:
    """Return the sum of one reward's scores, and how many samples have one."""
    scores = [score for sample in samples if (score := sample.rewards[name]) is not None]
    return sum(scores), len(scores)
