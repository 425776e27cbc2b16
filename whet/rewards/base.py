"""Rewards of a run: built-in ones by name, the user's as functions or `path.py:function`, and their weighted sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from whet.config import closest
from whet.rewards.presets import (
    CHESS,
    PRESETS,
    Preset,
    is_right,
    program_keywords,
    program_loads,
    program_tests,
)
from whet.sandbox.graders.graders import GraderPool, Outcome
from whet.schema import ResponseSchema
from whet.types import LARGEST_REWARD, Problem, Reward, Task, UnreadError, UserError

EPISODE = "episode"
"""Name of an environment's per-turn rewards; they are not a function of the text."""
JUDGE = "judge"
"""Name of a language model's score (`whet.rewards.judge.judge`)."""
MODEL = "model"
"""Name of a reward model's score (`whet.generate.reward_model`)."""
ELSEWHERE = (EPISODE, JUDGE, MODEL)
TIMEOUT_S = 2.0
"""Seconds that one call of a user's reward may take, unless the run says otherwise."""
MEMORY_MIB = 2048
FAILURE_LIMIT, MIN_BATCH = 0.5, 8
"""A larger share of errors, in a batch of at least this size, stops the run: the function is wrong, not a
completion."""

Item = tuple[Problem, str]
OwnReward = str | Callable[..., float | None]
"""A user's reward: 'path.py:function', followed by '=weight' if that is not 1, or the function itself."""
ManyScores = Callable[[Sequence[Item]], "list[float | None]"]


@dataclass(slots=True)
class Failures:
    """Calls of one reward without a score: counted and shown, never treated as 0.

    Attributes:
        count: Calls so far.
        latest: The last error, in one line.
    """

    count: int = 0
    latest: str = ""


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """A reward with its name and weight.

    Attributes:
        name: Its name in logs.
        weight: Factor of its score.
        function: Scores one completion.
        many: Scores several at once, in place of `function`.
        best: Score of a perfect completion; None if unknown.
        failures: Calls that gave no score.
    """

    name: str
    weight: float
    function: Reward | None = None
    many: ManyScores | None = None
    best: float | None = 1.0
    failures: Failures = field(default_factory=Failures)


def correctness(schema: ResponseSchema, task: Task) -> Reward:
    """Return 1 for the right answer in the schema's answer block, else 0; None if it could not be judged."""

    def score(problem: Problem, completion: str) -> float | None:
        is_correct = is_right(task, problem, schema.parse(completion).answer)
        return None if is_correct is None else float(is_correct)

    return score


def format_score(schema: ResponseSchema, task: Task) -> Reward:
    """Return 1 for perfect format, 0.5 for partial, 0 for none."""
    return lambda problem, completion: schema.format_reward(completion)


REWARDS: dict[str, Preset] = {
    "correct": Preset(correctness, best=1.0, worst=0.0, needs_gold=True),
    "format": Preset(format_score, best=1.0, worst=0.0),
    **PRESETS,
    "program_loads": Preset(program_loads, best=1.0, worst=0.0),
    "program_tests": Preset(program_tests, best=1.0, worst=0.0),
    "program_keywords": Preset(program_keywords, best=1.0, worst=0.0),
    **CHESS,
}
"""Name -> factory of the reward function. `correct` is the main reward; the others shape it."""


def parse_own(text: str) -> tuple[str, str, float]:
    """Read `path.py:function` or `path.py:function=weight`.

    Returns:
        Specification of the function, its name, and the weight (1 where none is given).

    Raises:
        UserError: If it is neither.
    """
    if not isinstance(text, str):  # in a config that a script made
        name = getattr(text, "__name__", "FUNCTION")
        file = Path(getattr(getattr(text, "__code__", None), "co_filename", "FILE.py")).name
        raise UserError(
            f"reward = {text!r:.60}: a config names a function by its file: reward=('{file}:{name}',), "
            f"or call whet.rl(rewards=[{name}])"
        )
    spec, equals, number = text.partition("=")
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        raise UserError(f"reward {text!r}: expected path.py:function or path.py:function=weight")
    try:
        weight = float(number) if equals else 1.0
    except ValueError:
        raise UserError(f"reward {text!r}: {number!r} is not a weight; expected a number after '='") from None
    if not abs(weight) <= LARGEST_REWARD:
        raise UserError(f"reward {text!r}: expected a weight from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}")
    return spec, name, weight


def check_timeout(reward: Sequence[OwnReward], timeout_s: float) -> None:
    """Refuse a time for rewards of the user's own that none can have, or that nothing reads.

    Raises:
        ValueError: With what is expected.
    """
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"reward_timeout_s = {timeout_s}: expected a time above 0 seconds")
    if timeout_s != TIMEOUT_S and not reward:
        raise UnreadError(
            "reward_timeout_s is read with a reward of your own (--reward); leave it out", "reward_timeout_s"
        )


def own_name(reward: OwnReward) -> str:
    """Return the name of a user's reward.

    Raises:
        UserError: If it has none, or is malformed.
    """
    if isinstance(reward, str):
        return parse_own(reward)[1]
    while isinstance(reward, partial):
        reward = reward.func
    name = getattr(reward, "__name__", "")
    if not callable(reward) or not name.isidentifier():
        expected = "expected a named function (def), or 'path.py:function'"
        raise UserError(f"reward {reward!r:.60}: {expected}")
    return name


class Pool(Protocol):
    """Where a user's reward runs: here, or on other machines."""

    def map(self, calls: Sequence[Item], /) -> list[Outcome]:
        """Run it on every item; return the outcomes in their order."""
        ...


def own_pool(reward: OwnReward, timeout_s: float = TIMEOUT_S) -> GraderPool:
    """Start the killable worker processes in which the user's function runs, each call with a deadline.

    Raises:
        UserError: If it is malformed, there is no such function, or it cannot be sent to a worker process.
    """
    function = reward
    if isinstance(reward, str):
        function, _, _ = parse_own(reward)
        place = function.rpartition(":")[0]
        if not Path(place).is_file():
            raise UserError(f"reward {reward!r}: no file {place!r}; check --reward")
    takes = ("problem", "completion")
    return GraderPool(function, deadline_s=timeout_s, memory_mib=MEMORY_MIB, parameters=takes)


def own_reward(
    reward: OwnReward,
    pool: Pool | None = None,
    failures: Failures | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
) -> WeightedReward:
    """Make a reward from the user's function, which runs in killable worker processes with a deadline.

    A call that fails, hangs or does not return a number that can be trained on gives None: unscorable, and counted.

    Args:
        reward: The function (also one of the main script or of a notebook), or its 'path.py:function'.
        pool: Where it runs; None starts `own_pool`.
        failures: Where calls that gave no score are counted; None for a count of its own.
        timeout_s: Seconds that one call may take.

    Raises:
        UserError: If it is malformed, there is no such function, or it cannot be sent to a worker process.
    """
    name, weight, place = own_name(reward), 1.0, "the function"
    if isinstance(reward, str):
        spec, _, weight = parse_own(reward)
        place = spec.rpartition(":")[0]
    where = own_pool(reward, timeout_s) if pool is None else pool
    failures = Failures() if failures is None else failures

    def score(items: Sequence[Item]) -> list[float | None]:
        outcomes = where.map(items)
        scores: list[float | None] = []
        for outcome in outcomes:
            value, message = outcome.value, outcome.message
            if outcome.kind == "ok" and value is not None:
                if isinstance(value, (int, float)) and abs(value) <= LARGEST_REWARD:
                    scores.append(float(value))
                    continue
                message = f"returned {type(value).__name__} {value!r:.60}, expected None or a number"
                message += (
                    f" from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
                    if isinstance(value, (int, float))
                    else ""
                )
            if outcome.kind != "ok" or value is not None:
                failures.count += 1
                failures.latest = (
                    message or outcome.kind
                    if outcome.kind != "timeout"
                    else f"took over {timeout_s:g} s; --reward-timeout-s {5 * timeout_s:g} allows more"
                )
            scores.append(None)
        num_failed = sum(outcome.kind == "error" for outcome in outcomes)
        if len(items) >= MIN_BATCH and num_failed > FAILURE_LIMIT * len(items):
            raise UserError(
                f"reward '{name}' fails for {num_failed} of {len(items)} completions: {failures.latest}; fix {place}"
            )
        return scores

    return WeightedReward(name, weight, many=score, best=None, failures=failures)


def build_rewards(
    weights: Mapping[str, float],
    schema: ResponseSchema,
    task: Task,
    own: Sequence[OwnReward] = (),
    *,
    timeout_s: float = TIMEOUT_S,
) -> list[WeightedReward]:
    """Make the rewards of a run.

    Args:
        weights: Weight of built-in rewards by name. 'episode', 'judge' and 'model' come without a function: the
            episode player, the judge or the reward model supplies their scores.
        schema: The schema that prompts and rewards share.
        task: Judges answers.
        own: The user's rewards, as `own_reward` reads them.
        timeout_s: Seconds that one call of them may take.

    Returns:
        The built-in rewards in the order of the table, then the user's.

    Raises:
        UserError: If a name is unknown or repeated, a weight is not finite or too large, or there is none.
    """
    for name, weight in weights.items():
        if name not in REWARDS and name not in ELSEWHERE:
            known = (*REWARDS, *ELSEWHERE)
            hint = f", did you mean {match!r}?" if (match := closest(name, known)) else ""
            raise UserError(f"rewards.{name}: no such reward{hint or ';'} expected one of {', '.join(known)}")
        if not abs(weight) <= LARGEST_REWARD:
            raise UserError(
                f"rewards.{name} = {weight}: expected a weight from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
            )
    names = [*weights, *map(own_name, own)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"reward '{twice}' is given twice; give the function another name")
    if not names:
        raise UserError(f"rewards is empty: give at least one of {', '.join(REWARDS)}")
    built_in = [
        WeightedReward(
            name,
            weights[name],
            preset.make(schema, task),
            best=(preset.best if weights[name] >= 0 else preset.worst) if preset.is_reached else None,
        )
        for name, preset in REWARDS.items()
        if name in weights
    ]
    elsewhere = [WeightedReward(name, weights[name], best=None) for name in ELSEWHERE if name in weights]
    return [*built_in, *elsewhere, *(own_reward(reward, timeout_s=timeout_s) for reward in own)]


def score_completions(
    rewards: Sequence[WeightedReward],
    items: Sequence[Item],
    known: Mapping[str, Sequence[float | None]] | None = None,
) -> list[tuple[dict[str, float | None], float | None]]:
    """Score completions with every reward.

    Args:
        rewards: The run's rewards.
        items: Problems with the text of a completion.
        known: Scores by reward name that are not a function of the text.

    Returns:
        For each item its unweighted scores by name, and the weighted sum; None if a reward found it unscorable.

    Raises:
        UserError: If a built-in reward returns something that is neither None nor a finite number.
    """
    columns: list[list[float | None]] = []
    for reward in rewards:
        if known and reward.name in known:
            columns.append(list(known[reward.name]))
        elif reward.many is not None:
            columns.append(reward.many(items))
        else:
            columns.append([_score_one(reward, *item) for item in items])
    names = [reward.name for reward in rewards]
    results: list[tuple[dict[str, float | None], float | None]] = []
    for place in range(len(items)):
        row = [column[place] for column in columns]
        total = sum(reward.weight * (score or 0.0) for reward, score in zip(rewards, row, strict=True))
        results.append((dict(zip(names, row, strict=True)), None if None in row else total))
    return results


def _score_one(reward: WeightedReward, problem: Problem, completion: str) -> float | None:
    assert reward.function is not None
    score = reward.function(problem, completion)
    if score is not None and not (isinstance(score, (int, float)) and math.isfinite(score)):
        raise UserError(
            f"reward '{reward.name}' returned {score!r} for problem {problem.uid}: expected a finite "
            f"number, or None for 'unscorable'; the completion was {completion[:200]!r}"
        )
    return None if score is None else float(score)


def score_completion(
    rewards: Sequence[WeightedReward], problem: Problem, completion: str
) -> tuple[dict[str, float | None], float | None]:
    """Score one completion; see `score_completions`."""
    return score_completions(rewards, [(problem, completion)])[0]


def best_total(rewards: Sequence[WeightedReward]) -> float | None:
    """Return the total of a perfect completion; None if length or a user's reward decides."""
    if any(reward.best is None for reward in rewards):
        return None
    return sum(reward.weight * (reward.best or 0.0) for reward in rewards)
