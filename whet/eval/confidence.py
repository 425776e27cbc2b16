"""Confidence measures of a completion: log-probability of its answer, hedges, revisions, votes. Pure functions.

None of these is a calibrated probability. They are counts and sums that anyone can recompute from the saved
completions. Every pass over a model's text takes linear time.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from whet.rewards.answers.equal import answers_equal
from whet.rewards.answers.extract import from_box, from_hashes, from_phrase
from whet.rewards.answers.numbers import parse_number
from whet.schema import ResponseSchema
from whet.stats import majority_at_k

HEDGES = (
    "alternatively",
    "another possibility",
    "but perhaps",
    "but maybe",
    "could be",
    "double-check",
    "given the ambiguity",
    "hmm",
    "i am not sure",
    "i guess",
    "i might be wrong",
    "i think",
    "i'm not sure",
    "it seems",
    "let me check",
    "let me double-check",
    "let me re-check",
    "let me recheck",
    "let me reconsider",
    "maybe",
    "might be",
    "not certain",
    "not sure",
    "on second thought",
    "perhaps",
    "possibly",
    "presumably",
    "probably",
    "unclear",
    "wait",
)
"""Phrases that retract or soften a statement, as whole words in any case; of overlapping ones the first counts."""
LONGEST_STATEMENT = 300
"""Characters after a mark such as "the answer is" that are searched for a stated answer."""
LONGEST_VOTE = 200
"""Longer answers (programs) vote by their exact text."""

_HEDGE = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, HEDGES))})(?!\w)")
_MARK = re.compile(r"answer\*{0,3}(?: is| ?[:=])|\\boxed(?![A-Za-z])|####", re.IGNORECASE)
_READERS: dict[str, Callable[[str], str | None]] = {"\\": from_box, "#": from_hashes}


@dataclass(frozen=True, slots=True)
class Confidence:
    """Confidence measures of one completion.

    Attributes:
        mean_logprob: Mean log-probability of the tokens that the model wrote, in nats; None if it wrote none.
        answer_logprob: The same for the tokens of the final answer only; None if the text has no answer.
        hedges: Number of hedging phrases.
        revisions: How often the stated answer changes within the text.
    """

    mean_logprob: float | None = None
    answer_logprob: float | None = None
    hedges: int = 0
    revisions: int = 0


def measure_confidence(
    text: str,
    answer: str | None,
    schema: ResponseSchema,
    logprobs: Sequence[float],
    *,
    trained: Sequence[bool],
    num_characters: Callable[[int], int],
) -> Confidence:
    """Measure one completion.

    Args:
        text: The decoded completion.
        answer: Its final answer; None without one.
        schema: Defines the tags of an answer block.
        logprobs: Log-probability of each token under its sampling distribution, in nats.
        trained: True for tokens that the model wrote; empty when it wrote all.
        num_characters: Returns the text length of the first n tokens; non-decreasing.
    """
    written = [value for place, value in enumerate(logprobs) if not trained or trained[place]]
    span = None if answer is None else answer_span(text, answer, schema)
    inside: Sequence[float] = ()
    if span is not None:
        first, end = token_span(span, len(logprobs), num_characters)
        inside = [logprobs[place] for place in range(first, end) if not trained or trained[place]]
    return Confidence(_mean(written), _mean(inside), count_hedges(text), count_revisions(text, schema))


def answer_span(text: str, answer: str, schema: ResponseSchema) -> tuple[int, int] | None:
    """Find the characters of the final answer: in the last answer block that has it, else its last occurrence.

    Args:
        text: The completion.
        answer: The answer that was extracted from it.
        schema: Defines the tags of an answer block.

    Returns:
        (first character, one past the last); None for an answer that does not occur verbatim.
    """
    close = text.rfind(schema.answer_close)
    opened = text.rfind(schema.answer_open, 0, max(close, 0))
    inside = opened + len(schema.answer_open)
    start = text.find(answer, inside, text.find(schema.answer_close, inside)) if opened >= 0 else -1
    if start < 0:
        start = text.rfind(answer)
    return (start, start + len(answer)) if answer and start >= 0 else None


def token_span(
    span: tuple[int, int], num_tokens: int, num_characters: Callable[[int], int]
) -> tuple[int, int]:
    """Return the range (first, one past the last) of the tokens that overlap a span of characters, by bisection.

    Args:
        span: Characters, one past the last excluded.
        num_tokens: Tokens of the text.
        num_characters: Returns the text length of the first n tokens; non-decreasing.
    """
    counts = range(num_tokens + 1)
    first = bisect_right(counts, span[0], key=num_characters) - 1
    return first, min(num_tokens, bisect_left(counts, span[1], lo=first, key=num_characters))


def count_hedges(text: str) -> int:
    """Count the phrases of `HEDGES` in a text, as whole words, in any case and with any white space inside."""
    return sum(1 for _ in _HEDGE.finditer(" ".join(text.lower().replace("\u2019", "'").split())))


def count_revisions(text: str, schema: ResponseSchema) -> int:
    r"""Count how often the stated answer changes: "the answer is 5 ... <answer>6</answer>" has one revision.

    A statement is an answer block of the schema, a `\boxed{...}`, the format `#### ...` or an "answer is ...". Equal
    answers in another spelling (5 and 5.0) are not a change.
    """
    return sum(not _is_same(left, right) for left, right in pairwise(_statements(text, schema)))


def _is_same(left: str, right: str) -> bool:
    return canonical(left) == canonical(right) or _equals_all(left, [right])


def canonical(answer: str) -> str:
    """Normalise an answer so that equal numbers, and texts that differ only in case and white space, are equal
    strings."""
    if len(answer) > LONGEST_VOTE:
        return answer
    short = " ".join(answer.split()).strip("$* ").rstrip(".").casefold()
    number = parse_number(short.removeprefix("\\$"))
    return short if number is None else str(number.value)


def group_votes(answers: Sequence[str | None]) -> list[int | None]:
    """Group the answers that the grader calls equal (`answers_equal`, both ways).

    That is not transitive (50 % is 50 and 0.5), so an answer joins a group only if it equals all its members, and the
    most frequent spellings choose first: the groups do not depend on the order of the samples.

    Args:
        answers: One answer per sample; None has no vote.

    Returns:
        The number of each answer's group.
    """
    spellings = [None if answer is None else _spelling(answer) for answer in answers]
    counts = Counter(spelling for spelling in spellings if spelling is not None)
    groups: list[list[str]] = []
    group_of: dict[str | None, int | None] = {None: None}
    for spelling in sorted(counts, key=lambda text: (-counts[text], text)):
        place = next((at for at, group in enumerate(groups) if _equals_all(spelling, group)), len(groups))
        groups[place:place] = [[]] if place == len(groups) else []
        groups[place].append(spelling)
        group_of[spelling] = place
    return [group_of[spelling] for spelling in spellings]


def _spelling(answer: str) -> str:
    """Normalise white space, and write a plain number as a fraction: most answers then need no comparison."""
    is_short = len(answer) <= LONGEST_VOTE
    short = " ".join(answer.split()) if is_short else answer
    number = parse_number(short) if is_short else None
    return short if number is None else str(number.value)


def _equals_all(spelling: str, group: Sequence[str]) -> bool:
    return len(spelling) <= LONGEST_VOTE and all(_are_equal(*sorted((spelling, other))) for other in group)


@lru_cache(maxsize=1 << 15)
def _are_equal(left: str, right: str) -> bool:
    """Compare two answers once for all measures that count votes; the gold answer may be either."""
    return len(right) <= LONGEST_VOTE and answers_equal(left, right) and answers_equal(right, left)


def vote_share(answers: Sequence[str | None]) -> float:
    """Return the share of a problem's samples with its most frequent answer; a sample without an answer has no vote.

    Args:
        answers: One answer per sample, at least one.

    Source:
        Self-consistency, arXiv 2203.11171: the size of the majority.
    """
    votes = Counter(group for group in group_votes(answers) if group is not None)
    return max(votes.values(), default=0) / len(answers)


def answer_entropy(answers: Sequence[str | None]) -> float | None:
    """Return the entropy of a problem's answers over its samples, nats: 0 if all agree; None if none answers."""
    counts = Counter(group for group in group_votes(answers) if group is not None).values()
    total = sum(counts)
    return sum(count / total * math.log(total / count) for count in counts) if total else None


def vote_score(answers: Sequence[str | None], verdicts: Sequence[bool]) -> float:
    """Score the majority vote over one problem's samples (`majority_at_k`); their own verdicts judge the winner.

    Answers that vote together usually have one verdict; otherwise (programs that differ in white space) the share of
    right ones among them counts.

    Args:
        answers: One answer per sample, None without one.
        verdicts: Whether each sample is right.
    """
    votes = [None if group is None else str(group) for group in group_votes(answers)]
    right: dict[str | None, list[bool]] = {}
    for vote, verdict in zip(votes, verdicts, strict=True):
        right.setdefault(vote, []).append(verdict)
    return majority_at_k(votes, lambda vote: sum(right[vote]) / len(right[vote]))


def _statements(text: str, schema: ResponseSchema) -> list[str]:
    """Return the stated answers in their order; a box inside an answer block is one statement, not two."""
    found: list[tuple[int, int, str]] = []  # start, end and answer of each statement
    start = text.find(schema.answer_open)
    while start >= 0 and (end := text.find(schema.answer_close, start)) >= 0:
        block = text[start + len(schema.answer_open) : end]
        found.append((start, end, from_box(block[:LONGEST_STATEMENT]) or block))
        start = text.find(schema.answer_open, end)
    marks = [mark.start() for mark in _MARK.finditer(text)]
    for place, following in zip(marks, [*marks[1:], len(text)], strict=False):
        piece = text[place : min(following, place + LONGEST_STATEMENT)]
        for tag in schema.tags:
            piece = piece.partition(tag)[0]
        answer = _READERS.get(piece[:1], from_phrase)(piece)
        if answer:
            found.append((place, place + len(piece), answer))
    statements: list[str] = []
    covered = -1
    for place, end, answer in sorted(found):
        if place >= covered:
            statements.append(answer)
            covered = end
    return statements


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 6) if values else None
