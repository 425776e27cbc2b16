"""A task whose answers are compared symbolically if our own comparison cannot decide."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from whet.install import install_command
from whet.rewards.answers.symbolic import symbolic_equal_pairs
from whet.schema import AnswerType
from whet.types import Problem, Task, UserError


class Symbolic:
    """Wraps a task: math-verify (in killable workers) checks formulas that the task found unequal.

    A comparison that takes too long counts as unequal.

    Attributes:
        name: The task's.
        answer_type: The task's.
        task: The task.
    """

    def __init__(self, task: Task) -> None:
        """Wrap a task whose gold answers are LaTeX or text.

        Raises:
            UserError: If math-verify is not installed.
        """
        if importlib.util.find_spec("math_verify") is None:
            raise UserError(f"task.symbolic needs math-verify: {install_command('math')}, or leave it out")
        self.task = task
        self.name = task.name
        self.answer_type: AnswerType = getattr(task, "answer_type", "number")

    def problems(self, split: str) -> list[Problem]:
        """Return the task's problems."""
        return self.task.problems(split)

    def is_correct(self, problem: Problem, answer: str | None) -> bool | None:
        """Judge an answer."""
        return self.judge_many([(problem, answer)])[0]

    def judge_many(self, items: Sequence[tuple[Problem, str | None]]) -> list[bool | None]:
        """Judge answers: first as the task does, then all undecided ones together, so that hangs share one deadline."""
        verdicts = [self.task.is_correct(problem, answer) for problem, answer in items]
        left = [place for place, verdict in enumerate(verdicts) if verdict is False and items[place][1]]
        pairs = [(place, gold) for place in left for gold in items[place][0].answers]
        results = symbolic_equal_pairs([(items[place][1] or "", gold) for place, gold in pairs])
        for (place, _), is_equal in zip(pairs, results, strict=True):
            verdicts[place] = verdicts[place] is True or is_equal is True
        return verdicts
