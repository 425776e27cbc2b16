"""The fifty problems: fixed, right by an independent calculation, and judged as the other tasks are."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from whet.rewards.base import best_total, build_rewards, score_completion
from whet.rewards.steps.audit import audit_steps
from whet.schema import ResponseSchema
from whet.tasks.made.sanity import Sanity
from whet.tasks.selftest import hostile_answers, mutated_answer, rewritten_answers
from whet.types import UserError

TASK = Sanity()
PROBLEMS = TASK.problems("test")


def expected(prompt: str) -> int:
    """Work the answer out from the words alone, not from the task's own forms."""
    numbers = [int(text) for text in re.findall(r"\d+", prompt)]
    if "*" in prompt or ("+" in prompt and "km" not in prompt):
        expression = prompt.removeprefix("What is ").removesuffix("?")
        if expression.startswith("("):
            return (numbers[0] + numbers[1]) * numbers[2]
        if "*" in expression:
            return numbers[0] * numbers[1] + sum(numbers[2:])
        return sum(numbers)
    if "shells" in prompt or "km" in prompt:
        return sum(numbers)
    if "girls" in prompt:
        return (numbers[0] + numbers[1]) * numbers[2]
    return numbers[0] * numbers[1] + sum(numbers[2:])


def test_fifty_problems_that_never_change() -> None:
    assert len(PROBLEMS) == len({problem.uid for problem in PROBLEMS}) == 50
    assert [p.uid for p in Sanity().problems("test")] == [p.uid for p in PROBLEMS]
    # Written down once: another draw would make results of different versions incomparable.
    assert PROBLEMS[0].prompt == "What is 5 + 15?"
    assert (
        PROBLEMS[-1].prompt
        == "Tom walks 5 km on Monday, 15 km on Tuesday and 18 km on Friday. How many km does he walk?"
    )
    assert TASK.problems("train") == TASK.problems("dev") == []
    with pytest.raises(UserError, match="validation"):
        TASK.problems("validation")


def test_kinds_are_balanced() -> None:
    assert Counter(p.meta["subject"] for p in PROBLEMS) == {"symbols": 25, "words": 25}
    assert Counter(p.meta["level"] for p in PROBLEMS) == {"one step": 20, "two steps": 30}


def test_answers_and_workings_are_true() -> None:
    for problem in PROBLEMS:
        assert problem.answer == str(expected(problem.prompt)), problem
        steps = audit_steps(problem.solution)
        assert [step.verdict for step in steps] == ["true"] * (
            1 if problem.meta["level"] == "one step" else 2
        )
        assert problem.solution.endswith(f"= {problem.answer}")


def test_judges_itself() -> None:
    rewards = build_rewards({"correct": 1.0}, ResponseSchema(), TASK)
    for problem in PROBLEMS:
        assert all(TASK.is_correct(problem, text) for text in rewritten_answers(problem.answer))
        assert not TASK.is_correct(problem, mutated_answer(problem.answer))
        assert not TASK.is_correct(problem, None)
        perfect = ResponseSchema().render(problem.solution, problem.answer)
        assert score_completion(rewards, problem, perfect)[1] == best_total(rewards)
        copied = problem.prompt.removeprefix("What is ").removesuffix("?")
        assert not TASK.is_correct(problem, copied)  # copying the sum is no answer
    for problem in PROBLEMS[:10]:
        for what, text in hostile_answers(problem):
            assert TASK.is_correct(problem, text) is False, (what, problem)
