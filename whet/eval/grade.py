"""The one place where a completion is judged: training, evaluation and logs all ask here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from whet.generate.policy import Policy
from whet.rewards.extract import extract_answer
from whet.schema import FormatVerdict
from whet.types import Problem, Task

AnswerFrom = Literal["schema", "anywhere"]


@dataclass(frozen=True, slots=True)
class Grade:
    """What a completion is worth.

    Attributes:
        answer: The final answer, or None.
        is_correct: Whether it is right.
        verdict: Format verdict of the schema.
        thinking_tokens: Tokens before the closing thinking tag; all tokens when there is none.
    """

    answer: str | None
    is_correct: bool
    verdict: FormatVerdict
    thinking_tokens: int


def grade(
    policy: Policy,
    task: Task,
    problem: Problem,
    text: str,
    completion_ids: Sequence[int],
    *,
    answer_from: AnswerFrom = "schema",
) -> Grade:
    """Judge one completion.

    Args:
        policy: Gives schema and tokenizer.
        task: Judges the answer.
        problem: The problem.
        text: Decoded completion.
        completion_ids: Its tokens.
        answer_from: 'schema' takes the answer block only; 'anywhere' falls back to boxes, phrases and the
            last number.

    Returns:
        Answer, correctness, format and length of the thinking.
    """
    parsed = policy.schema.parse(text)
    answer = parsed.answer
    if answer is None and answer_from == "anywhere":
        answer = extract_answer(text)
    if parsed.thinking is None:
        thinking_tokens = len(completion_ids)
    else:
        thinking_tokens = _count_thinking(policy, parsed.thinking, completion_ids)
    return Grade(answer, task.is_correct(problem, answer), parsed.verdict, thinking_tokens)


def _count_thinking(policy: Policy, thinking: str, completion_ids: Sequence[int]) -> int:
    closing = policy.tokenizer.encode(policy.schema.think_close)
    if len(closing) == 1 and closing[0] in completion_ids:
        opening = policy.tokenizer.encode(policy.schema.think_open)
        ids = list(completion_ids)
        end = ids.index(closing[0])
        return end - ids.index(opening[0]) - 1 if len(opening) == 1 and opening[0] in ids[:end] else end
    return len(policy.tokenizer.encode(thinking))
