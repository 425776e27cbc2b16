"""Partial credit for programs: how far loading came, the share of tests that pass, the wanted words that are used."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from whet.schema import ResponseSchema
from whet.types import Problem, Reward, Task, UserError


@runtime_checkable
class ProgramTask(Protocol):
    """A task whose answers are programs."""

    def code_scores(self, problem: Problem, answer: str | None) -> dict[str, float] | None:
        """Return scores from 0 to 1 by name; None where the sandbox failed."""
        ...


def _part(name: str, schema: ResponseSchema, task: Task) -> Reward:
    if not isinstance(task, ProgramTask):
        raise UserError(
            f"rewards.program_{name}: task {task.name} has no programs; use humaneval, mbpp or code"
        )

    def score(problem: Problem, completion: str) -> float | None:
        scores = task.code_scores(problem, schema.parse(completion).answer)
        return None if scores is None else scores[name]

    return score


def program_loads(schema: ResponseSchema, task: Task) -> Reward:
    """Return 1/3 for a program that parses, 2/3 when its imports work, 1 when it loads to its end."""
    return _part("loads", schema, task)


def program_tests(schema: ResponseSchema, task: Task) -> Reward:
    """Return the share of tests that pass."""
    return _part("tests", schema, task)


def program_keywords(schema: ResponseSchema, task: Task) -> Reward:
    """Return the share of the problem's keywords that the program uses as names; comments and texts do not count."""
    return _part("keywords", schema, task)
