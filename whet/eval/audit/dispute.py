"""A second verifier for a task's answers: a person should check where the two differ."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from whet.eval.grade import judge_answers
from whet.rewards.answers.numbers import both_with_points
from whet.sandbox.graders.graders import GraderPool
from whet.schema import COLUMN
from whet.tasks.jsonl import meant_answer
from whet.tasks.selftest import mutated_answer, rewritten_answers
from whet.types import Problem, Task, UserError

DEADLINE_S = 3.0
PART = 200
"""Problems between two reports of progress."""


def has_math_verify() -> bool:
    """Say whether the second verifier is math-verify (extra 'math'), or a plain comparison."""
    return importlib.util.find_spec("math_verify") is not None


@dataclass(frozen=True, slots=True)
class Disputed:
    """An answer on which two verifiers differ: a row of the sheet."""

    uid: str
    prompt: str
    gold: str
    answer: str
    source: str
    task_says: bool | None
    other_says: bool | None


def dispute(
    task: Task, problems: Sequence[Problem], on_done: Callable[[int], None] | None = None
) -> list[Disputed]:
    """Compare the task's verdicts on spellings and near misses with a second verifier's.

    Args:
        task: Judges answers.
        problems: Their gold answers are respelled and changed.
        on_done: Called with the number of problems after each part.

    Returns:
        The disputed answers; none for programs, which no text comparison can judge.
    """
    if getattr(task, "answer_type", "") == "program":
        return []
    found: list[Disputed] = []
    for start in range(0, len(problems), PART):
        part = problems[start : start + PART]
        rows = [
            (problem, answer, source)
            for problem in part
            for source, answers in (
                ("gold", [problem.answer]),
                ("spelling", rewritten_answers(meant_answer(problem))),
                ("near miss", [mutated_answer(meant_answer(problem))]),
            )
            for answer in answers
        ]
        found += _compare(task, rows)
        if on_done is not None:
            on_done(len(part))
    return found


def dispute_samples(task: Task, problems: Sequence[Problem], path: Path) -> list[Disputed]:
    """Compare the task's verdicts on a model's answers with a second verifier's.

    Args:
        task: Judges answers.
        problems: Problems of the samples, matched by uid.
        path: An eval_samples.jsonl.

    Raises:
        UserError: If the file cannot be read or has no row of these problems.
    """
    known = {problem.uid: problem for problem in problems}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        found = [(row["uid"], row["answer"]) for row in rows]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check --samples") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not the samples of an evaluation ({type(error).__name__}: {error}); expected eval_samples.jsonl"
        ) from None
    kept = [(known[uid], answer, "sample") for uid, answer in dict.fromkeys(found) if uid in known and answer]
    if not kept:
        raise UserError(f"{path}: no answer to a problem of this task and split; check --task and --split")
    return _compare(task, kept)


def _compare(task: Task, rows: Sequence[tuple[Problem, str, str]]) -> list[Disputed]:
    first = judge_answers(task, [(problem, answer) for problem, answer, _ in rows])
    opinions = iter(
        second_opinions(
            [_points(problem, answer, gold) for problem, answer, _ in rows for gold in problem.answers]
        )
    )
    second: list[bool | None] = []
    for problem, _, _ in rows:  # any accepted answer is right
        own = list(islice(opinions, len(problem.answers)))
        second.append(True if True in own else None if None in own else False)
    return [
        Disputed(problem.uid, problem.prompt, problem.answer, answer, source, mine, other)
        for (problem, answer, source), mine, other in zip(rows, first, second, strict=True)
        if other is not None and bool(mine) != other
    ]


def _points(problem: Problem, answer: str, gold: str) -> tuple[str, str]:
    """Write decimal commas as points where the data have them: the second verifier reads none."""
    if problem.meta.get(COLUMN) == "comma":
        return both_with_points(answer, gold)
    return answer, gold


def second_opinions(pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
    """Judge (answer, gold) by math-verify if it is installed, else as plain text and plain numbers.

    Returns:
        The verdicts; None if there was none in time.
    """
    if not has_math_verify():
        return [plain_equal(*pair) for pair in pairs]
    return [outcome.value if outcome.kind == "ok" else None for outcome in _pool().map(pairs)]


@cache
def _pool() -> GraderPool:
    """Start the workers, which takes a second, and keep them: an audit asks twice."""
    prepare = "whet.rewards.answers.symbolic:prepare_worker"
    return GraderPool(f"{__name__}:math_verify_equal", deadline_s=DEADLINE_S, prepare=prepare)


def math_verify_equal(answer: str, gold: str) -> bool:
    """Judge by math-verify alone, with its own leniency. It may hang, so call it only in a killable worker."""
    import math_verify

    judge: Any = math_verify
    sides = [judge.parse(f"${text}$", parsing_timeout=None) for text in (gold, answer)]
    return bool(judge.verify(*sides, timeout_seconds=None))


WRAPPED = re.compile(
    r"(?:\$\$?|\\\(|\\\[|\\(?:boxed|text|mathrm|mathbf)\{)(.*?)(?:\$\$?|\\\)|\\\]|\})", re.DOTALL
)
"""A whole text in dollars, LaTeX's brackets, a box or a font."""


def _bare(text: str) -> str:
    """Return a text without what `WRAPPED` sets around it."""
    while found := WRAPPED.fullmatch(text.strip()):
        text = found[1]
    return text


def plain_equal(answer: str, gold: str) -> bool:
    """Judge by text without case, spaces and the marks that LaTeX sets around an answer, and by plain numbers."""
    left, right = ("".join(_bare(text).lower().split()) for text in (answer, gold))
    try:
        return left == right or float(left.replace(",", "")) == float(right.replace(",", ""))
    except (ValueError, OverflowError):
        return False
