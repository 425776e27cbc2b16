"""Two-digit addition."""

from __future__ import annotations

import re

import pytest

from whet.rewards.base import best_total, build_rewards, score_completion
from whet.schema import ResponseSchema
from whet.tasks.arithmetic import DEV_PERCENT, TEST_PERCENT, Arithmetic
from whet.types import Problem

TASK = Arithmetic()
SPLITS = {name: TASK.problems(name) for name in ("train", "dev", "test")}
EVERY = [problem for problems in SPLITS.values() for problem in problems]


def operands(problem: Problem) -> tuple[int, int]:
    match = re.fullmatch(r"(\d\d)\+(\d\d)=", problem.prompt)
    assert match is not None
    return int(match[1]), int(match[2])


def test_every_ordered_pair_occurs_once() -> None:
    assert sorted(operands(problem) for problem in EVERY) == [
        (left, right) for left in range(10, 100) for right in range(10, 100)
    ]
    assert len({problem.uid for problem in EVERY}) == 8100


def test_splits_are_disjoint_also_under_mirror_images() -> None:
    pairs = {name: {frozenset(operands(p)) for p in problems} for name, problems in SPLITS.items()}
    assert not pairs["train"] & pairs["test"]
    assert not pairs["train"] & pairs["dev"]
    assert not pairs["dev"] & pairs["test"]


def test_split_sizes() -> None:
    # 4095 unordered pairs fall independently: one standard deviation of the share is at most 0.5 points, and
    # pairs that count twice make it 0.7.
    for name, percent in (("dev", DEV_PERCENT), ("test", TEST_PERCENT)):
        assert 100 * len(SPLITS[name]) / 8100 == pytest.approx(percent, abs=2.2)
    assert len(SPLITS["test"]) >= 512


def test_answers_and_solutions_are_true() -> None:
    for problem in EVERY:
        left, right = operands(problem)
        assert problem.answer == str(left + right)
        ones, tens = problem.solution.split(",")
        for equation in (ones, tens):
            terms, _, result = equation.partition("=")
            assert sum(int(term) for term in terms.split("+")) == int(result)
        # The two results, the tens and the last digit of the ones, spell the answer.
        ones_result, tens_result = ones.partition("=")[2], tens.partition("=")[2]
        assert problem.answer == tens_result + ones_result[-1]
        assert [int(digit) for digit in ones.partition("=")[0].split("+")] == [left % 10, right % 10]
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
