"""The task `mixture`: several tasks in one run, each with a weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from whet.tasks.selftest import mutated_answer, rewritten_answers
from whet.types import Allowed, ManyJudge, PartsTask, Problem, RuledTask, Task, problem_uid

PART = "part"


class Mixture:
    """The union of several tasks; `whet.train.rollout.order` draws from it by weight.

    Every problem carries the label of its part in `meta['part']`. Splits are those of the parts; an evaluation uses the
    whole union, whatever the weights.

    Attributes:
        name: 'mixture'.
        parts: Task by label.
        weights: Weight of each part by label, all above 0; they need not sum to 1.
    """

    name = "mixture"

    def __init__(self, parts: Mapping[str, Task], weights: Mapping[str, float]) -> None:
        """Join tasks.

        Args:
            parts: Task by label; a label is the task's name, or 'name:anything'.
            weights: Weight by label.
        """
        assert parts.keys() == weights.keys()
        self.parts = dict(parts)
        self.weights = dict(weights)

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of a split of all parts, one part after the other."""
        return [
            _owned(problem, label) for label, task in self.parts.items() for problem in task.problems(split)
        ]

    def is_correct(self, problem: Problem, answer: str | None) -> bool | None:
        """Judge an answer by the part that the problem came from; None if that has no verdict."""
        return self.parts[problem.meta[PART]].is_correct(problem, answer)

    def judge_many(self, items: Sequence[tuple[Problem, str | None]]) -> list[bool | None]:
        """Judge answers as `is_correct` does, those of one part in a batch if the part supports it."""
        verdicts: dict[int, bool | None] = {}
        for label, task in self.parts.items():
            places = [place for place, (problem, _) in enumerate(items) if problem.meta[PART] == label]
            own = [items[place] for place in places]
            found = (
                task.judge_many(own)
                if isinstance(task, ManyJudge)
                else [task.is_correct(*item) for item in own]
            )
            verdicts |= dict(zip(places, found, strict=True))
        return [verdicts[place] for place in range(len(items))]

    def wrong_answer(self, problem: Problem) -> str:
        """Return a near miss, as the task that the problem came from makes it."""
        make = getattr(self.parts[problem.meta[PART]], "wrong_answer", None)
        return mutated_answer(problem.answer) if make is None else make(problem)

    def other_spellings(self, problem: Problem) -> list[str]:
        """Return other spellings of a right answer, as the task that the problem came from makes them."""
        make = getattr(self.parts[problem.meta[PART]], "other_spellings", None)
        return rewritten_answers(problem.answer) if make is None else make(problem)

    def allowed(self, problem: Problem) -> Sequence[Allowed]:
        """Return what the rules allow in a problem's answer, where the task that it came from knows."""
        task = self.parts[problem.meta[PART]]
        return task.allowed(problem) if isinstance(task, RuledTask) else ()

    @property
    def part_names(self) -> tuple[str, ...]:
        """Parts of completions that a task in it scores (`whet.types.PartsTask`); empty without such a task."""
        named = (name for task in self.parts.values() for name in getattr(task, "part_names", ()))
        return tuple(dict.fromkeys(named))

    def part_scores(self, problem: Problem, answer: str | None) -> Mapping[str, float]:
        """Score the parts of a completion by the task that the problem came from."""
        task = self.parts[problem.meta[PART]]
        return task.part_scores(problem, answer) if isinstance(task, PartsTask) else {}


def _owned(problem: Problem, label: str) -> Problem:
    """Write the label into a problem; the same question in two parts of one task gets two uids."""
    uid = problem_uid(label, problem.uid) if ":" in label else problem.uid
    return replace(problem, uid=uid, meta={**problem.meta, PART: label})
