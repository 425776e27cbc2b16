"""The table of built-in rewards, and how several of them become one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from whet.schema import ResponseSchema
from whet.types import Problem, Reward, Task, UserError


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward function with its name and weight."""

    name: str
    weight: float
    function: Reward


def correctness(schema: ResponseSchema, task: Task) -> Reward:
    """Return 1 for the right answer in the schema's answer block, else 0."""
    return lambda problem, completion: float(task.is_correct(problem, schema.parse(completion).answer))


def format_score(schema: ResponseSchema, task: Task) -> Reward:
    """Return 1 for perfect format, 0.5 for partial, 0 for none."""
    return lambda problem, completion: schema.format_reward(completion)


REWARDS: dict[str, Callable[[ResponseSchema, Task], Reward]] = {
    "correct": correctness,
    "format": format_score,
}
"""Name -> maker of the reward function. `correct` is the headline; the others shape."""


def build_rewards(weights: Mapping[str, float], schema: ResponseSchema, task: Task) -> list[WeightedReward]:
    """Make the reward functions of a run.

    Args:
        weights: Weight by name.
        schema: The schema that prompts and rewards share.
        task: Judges answers.

    Returns:
        The rewards in the order of their names in the table.

    Raises:
        UserError: If a name is unknown, a weight is not finite, or there is none.
    """
    for name, weight in weights.items():
        if name not in REWARDS:
            raise UserError(f"rewards.{name}: no such reward; expected one of {', '.join(REWARDS)}")
        if not math.isfinite(weight):
            raise UserError(f"rewards.{name} = {weight}: expected a finite weight")
    if not weights:
        raise UserError(f"rewards is empty: give at least one of {', '.join(REWARDS)}")
    return [
        WeightedReward(name, weights[name], make(schema, task))
        for name, make in REWARDS.items()
        if name in weights
    ]


def score_completion(
    rewards: list[WeightedReward], problem: Problem, completion: str
) -> tuple[dict[str, float | None], float | None]:
    """Score one completion with every reward.

    Args:
        rewards: The run's rewards.
        problem: The problem.
        completion: Text of the completion.

    Returns:
        Unweighted score by name, and the weighted sum; None when any reward found it unscorable.

    Raises:
        UserError: If a reward returns something that is neither None nor a finite number.
    """
    scores: dict[str, float | None] = {}
    total = 0.0
    for reward in rewards:
        score = reward.function(problem, completion)
        if score is not None and not (isinstance(score, (int, float)) and math.isfinite(score)):
            raise UserError(
                f"reward '{reward.name}' returned {score!r} for problem {problem.uid}: expected a finite "
                f"number, or None for 'unscorable'; the completion was {completion[:200]!r}"
            )
        scores[reward.name] = None if score is None else float(score)
        total += reward.weight * (score or 0.0)
    return scores, None if any(score is None for score in scores.values()) else total


def best_total(rewards: list[WeightedReward]) -> float:
    """Return the total of a perfect completion: every built-in reward's best score is 1."""
    return sum(max(reward.weight, 0.0) for reward in rewards)
