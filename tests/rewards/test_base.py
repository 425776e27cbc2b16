"""How rewards become one number."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from whet.rewards.base import (
    REWARDS,
    Item,
    WeightedReward,
    best_total,
    build_rewards,
    own_reward,
    score_completion,
)
from whet.sandbox.graders.graders import Outcome
from whet.schema import ResponseSchema
from whet.tasks.made.arithmetic import Arithmetic
from whet.types import Problem, UserError

SCHEMA = ResponseSchema()
TASK = Arithmetic()
PROBLEM = Problem(uid="ab", task="arithmetic", prompt="47+85=", answer="132")

TABLE = [
    (SCHEMA.render("work", "132"), 1.0, 1.0),
    (SCHEMA.render("", "132"), 1.0, 1.0),
    (SCHEMA.render("work", " 132 "), 1.0, 1.0),
    (SCHEMA.render("work", "131"), 0.0, 1.0),
    (SCHEMA.render("work", ""), 0.0, 1.0),
    ("work</think><answer>132", 0.0, 0.5),
    ("132", 0.0, 0.0),
    ("", 0.0, 0.0),
    ("</think>" * 10000, 0.0, 0.5),
    (SCHEMA.render("work", "132 or 133"), 0.0, 1.0),
    (SCHEMA.render("work", "9" * 100_000), 0.0, 1.0),
]


@pytest.mark.parametrize(("completion", "correct", "style"), TABLE)
def test_table(completion: str, correct: float, style: float) -> None:
    rewards = build_rewards({"format": 0.25, "correct": 2.0}, SCHEMA, TASK)
    scores, total = score_completion(rewards, PROBLEM, completion)
    assert scores == {"correct": correct, "format": style}
    assert total == 2.0 * correct + 0.25 * style


def test_order_is_that_of_the_table_and_the_best_is_reached() -> None:
    rewards = build_rewards({"format": 0.25, "correct": 2.0}, SCHEMA, TASK)
    assert [reward.name for reward in rewards] == list(REWARDS)[:2] == ["correct", "format"]
    assert best_total(rewards) == 2.25
    assert score_completion(rewards, PROBLEM, SCHEMA.render("x", "132"))[1] == best_total(rewards)
    assert best_total(build_rewards({"correct": 1.0, "format": -1.0}, SCHEMA, TASK)) == 1.0  # 0 for no format


def fixed(name: str, weight: float, score: object) -> WeightedReward:
    return WeightedReward(name, weight, lambda problem, completion: score)  # type: ignore[arg-type, return-value]


def test_unscorable_makes_the_total_unscorable_but_keeps_the_others() -> None:
    rewards = [fixed("a", 1.0, 0.5), fixed("b", 2.0, None), fixed("c", 0.0, 3)]
    assert score_completion(rewards, PROBLEM, "") == ({"a": 0.5, "b": None, "c": 3.0}, None)


def test_an_answer_that_nobody_could_judge_is_no_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arithmetic, "is_correct", lambda self, problem, answer: None)
    rewards = build_rewards({"correct": 1.0}, SCHEMA, TASK)
    assert score_completion(rewards, PROBLEM, SCHEMA.render("x", "132")) == ({"correct": None}, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "1", [1.0]])
def test_anything_but_a_finite_number_or_none_stops_the_run(bad: object) -> None:
    with pytest.raises(UserError, match=r"reward 'a' returned .* problem ab.*completion was 'text'"):
        score_completion([fixed("a", 1.0, bad)], PROBLEM, "text")


def test_mistakes_of_the_user() -> None:
    told = r"rewards\.corect: no such reward, did you mean 'correct'\? expected one of correct, format"
    with pytest.raises(UserError, match=told):
        build_rewards({"corect": 1.0}, SCHEMA, TASK)
    with pytest.raises(UserError, match="expected a weight from -1e.09 to 1e.09"):
        build_rewards({"correct": math.nan}, SCHEMA, TASK)
    with pytest.raises(UserError, match="empty"):
        build_rewards({}, SCHEMA, TASK)


BONUS = 0.25


def longer(problem: Problem, completion: str, unit: int = 10) -> float | None:
    return len(completion) / unit + BONUS if problem.answer == "132" else None


def test_a_function_is_a_reward_as_its_file_and_name_are() -> None:
    own = [longer, functools.partial(longer, unit=5), f"{__file__}:longer=3"]
    for reward, score, weight in zip(own, (0.55, 0.85, 0.55), (1.0, 1.0, 3.0), strict=True):
        rewards = build_rewards({"format": 1.0}, SCHEMA, TASK, [reward])
        assert [made.name for made in rewards] == ["format", "longer"]
        scores, total = score_completion(rewards, PROBLEM, "abc")
        assert scores == {"format": 0.0, "longer": pytest.approx(score)}
        assert total == pytest.approx(weight * score)
    with pytest.raises(UserError, match="reward 'longer' is given twice"):
        build_rewards({}, SCHEMA, TASK, own[:2])
    for nameless in (lambda problem, completion: 1.0, 3.0):
        with pytest.raises(UserError, match="expected a named function"):
            build_rewards({}, SCHEMA, TASK, [nameless])  # type: ignore[list-item]


BROKEN = """
def breaks(problem, completion):
    if completion == "bad":
        raise ValueError("no thanks")
    return 1.0
"""


@pytest.mark.parametrize(("num_bad", "size", "stops"), [(4, 8, False), (5, 8, True), (7, 7, False)])
def test_a_reward_that_mostly_fails_is_wrong_itself(
    num_bad: int, size: int, stops: bool, tmp_path: Path
) -> None:
    """More than half of at least eight: fewer are completions that it could not score."""
    (tmp_path / "mine.py").write_text(BROKEN)
    reward = own_reward(f"{tmp_path / 'mine.py'}:breaks")
    items = [(PROBLEM, "bad" if index < num_bad else "good") for index in range(size)]
    assert reward.many is not None
    if stops:
        with pytest.raises(UserError, match=f"fails for {num_bad} of {size} completions"):
            reward.many(items)
        return
    assert reward.many(items) == [None] * num_bad + [1.0] * (size - num_bad)
    assert reward.failures.count == num_bad


FOREIGN = """
def plain(completions, **kwargs):
    return [1.0] * len(completions)

def both(prompts, completions, **kwargs):
    return [1.0] * len(completions)

def one(completion):
    return 1.0

def fits(problem, completion, unit=2, *more, **kwargs):
    return 1.0
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "plain",
            "plain(completions, **kwargs) cannot be called as plain(problem, completion); as TRL's rewards it",
        ),
        (
            "both",
            "both(prompts, completions, **kwargs) cannot be called as both(problem, completion); as TRL's",
        ),
        ("one", "as one(problem, completion); begin it with: def one(problem, completion):"),
    ],
)
def test_a_function_that_takes_something_else_is_refused_at_once(
    name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(FOREIGN)
    with pytest.raises(UserError) as caught:
        own_reward(f"{tmp_path / 'mine.py'}:{name}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    fits = own_reward(f"{tmp_path / 'mine.py'}:fits")
    assert fits.many is not None
    assert fits.many([(PROBLEM, "x")]) == [1.0]


def slow(problem: Problem, completion: str) -> float:
    time.sleep(0.5)
    return 1.0


def test_a_call_has_the_time_that_the_run_gives_it() -> None:
    (reward,) = build_rewards({}, SCHEMA, TASK, [slow], timeout_s=0.1)
    assert score_completion([reward], PROBLEM, "a") == ({"slow": None}, None)
    assert reward.failures.latest == "took over 0.1 s; --reward-timeout-s 0.5 allows more"


class Here:
    """Runs a reward in this process: what it returns is what is judged."""

    def __init__(self, value: object) -> None:
        self.value = value

    def map(self, calls: Sequence[Item]) -> list[Outcome]:
        return [Outcome(self.value, "ok", "", 0.0) for _ in calls]


def number(problem: Problem, completion: str) -> float:
    return 0.0


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e300, 1.1e9, math.nan, math.inf, "1", [1.0]])
def test_what_cannot_be_trained_on_is_the_failure_of_that_sample(value: object) -> None:
    reward = own_reward(number, Here(value))
    assert reward.many is not None
    assert reward.many([(PROBLEM, "a")]) == [None]
    assert reward.failures.count == 1
    assert "expected None or a number" in reward.failures.latest


@pytest.mark.parametrize("value", [1e9, -1e9, 10**9, True, 0])
def test_numbers_up_to_a_bound_are_taken(value: float) -> None:
    reward = own_reward(number, Here(value))
    assert reward.many is not None
    assert reward.many([(PROBLEM, "a")]) == [float(value)]
    assert reward.failures.count == 0
