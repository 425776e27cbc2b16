"""Sums of three two-digit numbers."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from whet.rewards.base import best_total, build_rewards, score_completion
from whet.schema import ResponseSchema
from whet.tasks.made.arithmetic import DEV_PERCENT, NUM_PROBLEMS, TEST_PERCENT, Arithmetic
from whet.types import Problem

TASK = Arithmetic()
SPLITS = {name: TASK.problems(name) for name in ("train", "dev", "test")}
EVERY = [problem for problems in SPLITS.values() for problem in problems]


def operands(problem: Problem) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d\d)\+(\d\d)\+(\d\d)=", problem.prompt)
    assert match is not None
    return int(match[1]), int(match[2]), int(match[3])


def test_no_problem_occurs_twice() -> None:
    assert len(EVERY) == NUM_PROBLEMS
    assert len({operands(problem) for problem in EVERY}) == NUM_PROBLEMS
    assert len({problem.uid for problem in EVERY}) == NUM_PROBLEMS
    assert all(10 <= number <= 99 for problem in EVERY for number in operands(problem))


def test_numbers_are_spread_evenly() -> None:
    # Each of the 90 numbers is expected 1000 times in 90,000 places: 5 standard deviations are 158.
    counts = Counter(number for problem in EVERY for number in operands(problem))
    assert len(counts) == 90
    assert max(abs(count - 1000) for count in counts.values()) < 160


def test_splits_are_disjoint_also_when_rearranged() -> None:
    sums = {name: {tuple(sorted(operands(p))) for p in problems} for name, problems in SPLITS.items()}
    assert not sums["train"] & sums["test"]
    assert not sums["train"] & sums["dev"]
    assert not sums["dev"] & sums["test"]


def test_split_sizes() -> None:
    # 30,000 nearly independent draws: one standard deviation of a share is 0.16 points.
    for name, percent in (("dev", DEV_PERCENT), ("test", TEST_PERCENT)):
        assert 100 * len(SPLITS[name]) / NUM_PROBLEMS == pytest.approx(percent, abs=0.8)
    assert len(SPLITS["test"]) >= 512


def test_answers_and_solutions_are_true() -> None:
    for problem in EVERY[:3000]:
        numbers = operands(problem)
        assert problem.answer == str(sum(numbers))
        ones, tens = (re.split(r"[+=]", half) for half in problem.solution.split(","))
        # a+b=s+c=t: a, b, c are added, s and t are the running sums.
        assert [int(ones[i]) for i in (0, 1, 3)] == [number % 10 for number in numbers]
        assert [int(ones[i]) for i in (2, 4)] == [sum(n % 10 for n in numbers[:k]) for k in (2, 3)]
        carry = sum(number % 10 for number in numbers) // 10
        digits = [carry, *(number // 10 for number in numbers)]
        assert [int(tens[i]) for i in (0, 1, 3, 5)] == digits
        assert [int(tens[i]) for i in (2, 4, 6)] == [sum(digits[:k]) for k in (2, 3, 4)]
        # The two results, the tens and the last digit of the ones, spell the answer.
        assert problem.answer == tens[-1] + ones[-1][-1]
        assert set(problem.prompt + problem.solution + problem.answer) <= set(TASK.alphabet)


def test_problems_come_in_a_fixed_order() -> None:
    assert [p.uid for p in Arithmetic().problems("dev")] == [p.uid for p in SPLITS["dev"]]


def test_rewards() -> None:
    schema = ResponseSchema()
    rewards = build_rewards({"correct": 1.0}, schema, TASK)
    for problem in SPLITS["test"][:100]:

        def score(completion: str, problem: Problem = problem) -> float | None:
            return score_completion(rewards, problem, completion)[1]

        assert score(schema.render(problem.solution, problem.answer)) == best_total(rewards)
        assert score(schema.render("", problem.answer)) == best_total(rewards)
        wrong = [
            str(int(problem.answer) + 1),
            problem.answer + "0",
            "-" + problem.answer,
            "",
            "x",
            problem.prompt,
        ]
        hostile = [problem.answer + "," + problem.answer, problem.answer + " " + wrong[0], "9" * 50_000]
        hostile += ["9**9**9**9", "[" * 5000, "\x00", "\ud800", problem.prompt[:-1] + "+0" * 2000]
        for answer in wrong + hostile:
            assert score(schema.render("", answer)) == 0.0, answer[:50]
        for completion in ("", problem.answer, problem.solution, "</think>" + problem.answer):
            assert score(completion) == 0.0
    assert not TASK.is_correct(EVERY[0], None)


def test_unknown_split() -> None:
    with pytest.raises(ValueError, match="validation"):
        TASK.problems("validation")
