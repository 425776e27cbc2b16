"""Grading of completions: training, evaluation and logs all use these functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from whet.eval.confidence import Confidence
from whet.generate.policy import Policy
from whet.rewards.answers.extract import (
    DEFAULT_STEPS,
    STEPS_OF,
    extract_answer_with_step,
    repeats_formula,
)
from whet.rewards.presets import is_right
from whet.schema import FormatVerdict
from whet.tasks.base import answer_type_of, tasks_inside
from whet.tasks.mixture import PART
from whet.types import ManyJudge, Problem, Task

AnswerFrom = Literal["schema", "anywhere"]
WHOLE = "whole"
"""Step of an answer that is all that follows the thinking."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of a completion.

    Attributes:
        answer: The final answer, or None.
        is_correct: Whether it is right.
        verdict: Format verdict of the schema.
        thinking_tokens: Tokens before the closing thinking tag; all tokens if there is none.
        answer_step: Where the answer was found: 'schema', a step of `whet.rewards.answers.extract`, or 'whole'.
        is_judged: False if the task gave no verdict (its sandbox failed): the answer is then neither right nor wrong.
    """

    answer: str | None
    is_correct: bool
    verdict: FormatVerdict
    thinking_tokens: int
    answer_step: str | None = None
    is_judged: bool = True


@dataclass(frozen=True, slots=True)
class Judged:
    """One graded completion.

    Attributes:
        text: The decoded completion.
        num_tokens: Its length.
        finish_reason: 'stop', or 'length' if it was cut off.
        grade: Answer, correctness, format.
        num_turns: Turns of the episode; 1 without tools.
        ids: Its tokens; empty once they were written to disk and released.
        logprobs: Log-probability of each token, nats, rounded to 4 places; empty as `ids`.
        confidence: Confidence measures.
        rewards: Unweighted score of every reward by name; None if a reward could not score it.
        reward: Weighted sum; None without rewards, or if one could not score it.
    """

    text: str
    num_tokens: int
    finish_reason: str
    grade: Grade
    num_turns: int = 1
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    confidence: Confidence = Confidence()
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    reward: float | None = None

    @property
    def answer_tokens(self) -> int:
        """Tokens after the thinking: the tags and the answer."""
        return max(0, self.num_tokens - self.grade.thinking_tokens)


def grade(
    policy: Policy,
    task: Task,
    items: Sequence[tuple[Problem, str, Sequence[int]]],
    *,
    answer_from: AnswerFrom = "schema",
) -> list[Grade]:
    """Judge completions.

    Args:
        policy: Provides schema and tokenizer.
        task: Judges the answers, in batches if it can.
        items: Problem, decoded completion and its tokens.
        answer_from: 'schema' takes the answer block only; 'anywhere' falls back to boxes, phrases and the
            last number, outside of open thinking; a program is all that follows the thinking. Thinking that only the
            prompt opened ends with the completion, unless that is cut off.

    Returns:
        For each: answer, correctness, format and length of the thinking.
    """
    parsed = [policy.schema.parse(text) for _, text, _ in items]
    found: list[tuple[str | None, str | None]] = []
    is_whole = policy.schema.answer_place == "whole"
    for (problem, text, ids), response in zip(items, parsed, strict=True):
        answer = None if is_whole else response.answer  # a whole text is searched, too
        rest = policy.schema.after_thinking(text)
        if rest is None and policy.schema.think_open not in text and _has_ended(policy, text, ids):
            rest = text  # only the prompt opened the thinking: this model does not know the tag
        if answer is None and answer_from == "anywhere" and rest is not None:
            found.append(_anywhere(task, problem, rest, text))
        else:
            found.append((response.answer, None if response.answer is None else "schema"))
    right = judge_answers(
        task, [(problem, answer) for (problem, _, _), (answer, _) in zip(items, found, strict=True)]
    )
    return [
        Grade(
            answer=answer,
            is_correct=bool(is_correct),
            verdict=response.verdict,
            thinking_tokens=len(ids)
            if response.thinking is None
            else _count_thinking(policy, response.thinking, ids),
            answer_step=step,
            is_judged=is_correct is not None,
        )
        for (_, _, ids), response, (answer, step), is_correct in zip(items, parsed, found, right, strict=True)
    ]


def right_anywhere(
    policy: Policy, task: Task, problems: Sequence[Problem], rows: Sequence[Sequence[Judged]]
) -> list[list[bool]]:
    """Say which graded completions are right where answers count wherever they stand; only those without an answer in
    its place are judged again."""
    right = [[done.grade.is_correct for done in row] for row in rows]
    missing = [
        (place, index)
        for place, row in enumerate(rows)
        for index, done in enumerate(row)
        if done.grade.answer is None
    ]
    items = [
        # An end of turn stands for the tokens, which may be on disk by now: this completion was not cut off.
        (problems[place], done.text, policy.stop_ids[:1] if done.finish_reason == "stop" else ())
        for place, index in missing
        for done in [rows[place][index]]
    ]
    grades = grade(policy, task, items, answer_from="anywhere") if items else []
    for (place, index), graded in zip(missing, grades, strict=True):
        right[place][index] = graded.is_correct
    return right


def right_in_place(policy: Policy, rows: Sequence[Sequence[Judged]]) -> list[list[bool]]:
    """Say which graded completions are right by an answer in the schema's place alone."""
    strict = replace(policy.schema, fallback="none")
    return [
        [done.grade.is_correct and strict.parse(done.text).answer is not None for done in row] for row in rows
    ]


def _has_ended(policy: Policy, text: str, ids: Sequence[int]) -> bool:
    """Say whether a completion came to its end, in contrast to one that is cut off."""
    return (bool(ids) and ids[-1] in policy.stop_ids) or any(stop in text for stop in policy.stop_strings)


def _anywhere(task: Task, problem: Problem, rest: str, text: str) -> tuple[str | None, str | None]:
    """Find an answer wherever it stands: the task's type of answer decides.

    A program, and a text that is judged without a gold answer, is all that follows the thinking.
    """
    inside = tasks_inside(task)
    own = inside.get(problem.meta.get(PART)) or next(iter(inside.values()))
    answer_type = answer_type_of(own)
    if answer_type == "program" or not getattr(own, "needs_gold", True):
        return rest.strip() or None, WHOLE if rest.strip() else None
    steps = STEPS_OF.get(answer_type, DEFAULT_STEPS)
    answer, step = extract_answer_with_step(rest, steps)
    return (answer, step) if answer is not None or rest == text else extract_answer_with_step(text, steps)


def judge_answers(task: Task, items: Sequence[tuple[Problem, str | None]]) -> list[bool | None]:
    """Judge answers by the task, in a batch if it has `judge_many` (programs run in parallel)."""
    if not isinstance(task, ManyJudge):
        return [is_right(task, problem, answer) for problem, answer in items]
    asked = [
        (
            problem,
            None
            if answer is not None and repeats_formula(answer, problem.prompt, problem.answers)
            else answer,
        )
        for problem, answer in items
    ]
    return task.judge_many(asked)


def _count_thinking(policy: Policy, thinking: str, completion_ids: Sequence[int]) -> int:
    closing = policy.tokenizer.encode(policy.schema.think_close)
    if len(closing) == 1 and closing[0] in completion_ids:
        opening = policy.tokenizer.encode(policy.schema.think_open)
        ids = list(completion_ids)
        end = ids.index(closing[0])
        return end - ids.index(opening[0]) - 1 if len(opening) == 1 and opening[0] in ids[:end] else end
    return len(policy.tokenizer.encode(thinking))
