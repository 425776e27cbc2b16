"""Named rewards with fixed constants: the workshop's four, format, partial credit, length, repetition, step audit.

Every factory takes the run's schema and task, so that no tag is hard-coded here. All are linear in the completion's
length, never raise, and stay within [worst, best] of their entry in `PRESETS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Protocol, runtime_checkable

from whet.rewards.answers.extract import repeats_formula
from whet.rewards.answers.numbers import Number, parse_literal, parse_number
from whet.rewards.answers.scripts import fold
from whet.rewards.steps.audit import audit_steps
from whet.schema import ResponseSchema
from whet.types import PartsTask, Problem, Reward, Task, UserError

# Partial credit for programs: how far loading got, the share of passed tests, the share of keywords used.


@runtime_checkable
class ProgramTask(Protocol):
    """A task whose answers are programs."""

    def code_scores(self, problem: Problem, answer: str | None) -> dict[str, float] | None:
        """Return scores from 0 to 1 by name; None if the sandbox failed."""
        ...


def is_right(task: Task, problem: Problem, answer: str | None) -> bool | None:
    """Judge an answer by its task; a formula that only repeats the question is none. None if it cannot be judged."""
    if answer is not None and repeats_formula(answer, problem.prompt, problem.answers):
        return False
    return task.is_correct(problem, answer)


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
    """Return 1/3 for a program that parses, 2/3 if its imports work, 1 if it loads completely."""
    return _part("loads", schema, task)


def program_tests(schema: ResponseSchema, task: Task) -> Reward:
    """Return the share of tests that pass, without those that ask the program nothing."""
    return _part("tests", schema, task)


def program_keywords(schema: ResponseSchema, task: Task) -> Reward:
    """Return the share of the problem's keywords that the program uses as names; comments and strings do not count."""
    return _part("keywords", schema, task)


# The workshop: notebook "Qwen3_(4B)-GRPO" of unslothai/notebooks. Best total 13.0, worst -7.5.
FORMAT_EXACT, FORMAT_EXACT_MISS = 3.0, 0.0
TAG_ONCE, TAG_NOT_ONCE, NOTEBOOK_TAGS = 0.5, -1.0, 3
"""Score per tag. The notebook scores three (the opening tag is in its prompt); four are scaled to the same sum."""
BANDS_EQUAL, BANDS_STRIPPED, BANDS_FAR, BANDS_NO_NUMBER, BANDS_NO_ANSWER = 5.0, 3.5, -2.5, -4.5, -2.0
BANDS = ((Fraction(1, 10), 2.0), (Fraction(1, 5), 1.5))
"""(largest relative error, score): the notebook's ratios [.9, 1.1] and [.8, 1.2]."""
NUMBER_EQUAL, NUMBER_WRONG, NUMBER_NONE, NUMBER_NO_GOLD = 3.5, -1.5, -2.5, 0.0
# poornachandra24/grpo-vision-reasoning, src/fine_tuning/rewards.py
LAYOUT = 0.5
# The talk's example: for 2 + 2, "4" is worth 1, "5" about .8 for its distance |5 - 4| / 4, a letter -1.
DISTANCE_NO_NUMBER = -1.0
# a5c-ai/nanoGPT, reward.py: 1 between the inner two, falling to 0 at the outer two; characters
LENGTH_BAND = (10, 50, 512, 1024)
# DAPO's soft overlong penalty (2503.14476, eq. 13) in characters; algo.overlong has it in tokens
LENGTH_FREE, LENGTH_LIMIT = 2048, 8192
# 2502.03373, section 4.2: (score at no length, score at the limit)
COSINE_RIGHT, COSINE_WRONG, COSINE_EXCEEDED = (2.0, 1.0), (-10.0, 0.0), -10.0
COSINE_LIMIT = 8192
"""Characters; the paper's limit is the context of 16K tokens, which a reward that reads text cannot know."""
REPETITION_NGRAM = 40
"""2502.03373: n-grams of 40 tokens, .05 off per token; here words and runs of punctuation, and the share of n-grams."""
# Notebook "Qwen3_VL_(8B)-Vision-GRPO": -2 where half of the characters are "addCriterion" or line ends
DEGENERATE, DEGENERATE_SHARE = -2.0, 0.5
LOOP_WINDOW, LOOP_REACH = 16, 256
"""A loop: 16 characters that occurred within the previous 256 characters."""

_DIGITS = re.compile(r"[0-9][0-9.,]*")
_WORD = re.compile(r"\w+|[^\w\s]+")


@dataclass(frozen=True, slots=True)
class Preset:
    """A built-in reward.

    Attributes:
        make: Factory of a run's reward function.
        best: Largest score.
        worst: Smallest score.
        is_reached: True when the ideal completion scores exactly `best`; False if length decides.
        needs_gold: Whether it compares with a gold answer.
    """

    make: Callable[[ResponseSchema, Task], Reward]
    best: float
    worst: float
    is_reached: bool = True
    needs_gold: bool = False


# Parts of a completion that its task scores: lines of chess.


def _task_part(name: str, part: str, schema: ResponseSchema, task: Task) -> Reward:
    if not isinstance(task, PartsTask) or part not in (*task.part_names, *CHESS_SUMS):
        raise UserError(
            f"rewards.{name}: task {task.name} has no such part; it is for chess-policy, chess-env, chess-moves, "
            "chess-reason and mixtures of them"
        )
    if part in CHESS_SUMS and not task.part_names:
        raise UserError(f"rewards.{name}: task {task.name} has no chess in it")

    def score(problem: Problem, completion: str) -> float:
        return task.part_scores(problem, schema.parse(completion).answer).get(part, 0.0)

    return score


CHESS_SUMS = {
    "chess": 0.0,
    "rookworld": -2 / 3,
    "rookworld_later": 0.0,
    "rookworld_later_graduated": 0.0,
    "rookworld_later_binary": 0.0,
    "rookworld_trl": -0.88,
}
"""Sums of the parts of a chess line, 1 for the gold line, and the least that each pays: our own weights, and the
published ones of three versions of RookWorld over their sum (`whet.tasks.chess.scoring`)."""
CHESS_PARTS = (
    "legal",
    "candidates",
    "order",
    "evals",
    "best",
    "fen",
    "similarity",
    "reward",
    "flags",
    "pieces",
)
"""Parts of chess lines; a line that does not have a part scores 0 of it."""
CHESS: dict[str, Preset] = {
    **{
        name: Preset(partial(_task_part, name, name), best=1.0, worst=worst)
        for name, worst in CHESS_SUMS.items()
    },
    **{
        f"chess_{part}": Preset(
            partial(_task_part, f"chess_{part}", part), best=1.0, worst=0.0, is_reached=False
        )
        for part in CHESS_PARTS
    },
}


def _raw_answer(schema: ResponseSchema, completion: str) -> str | None:
    """Return the text of the answer block that ends the completion and follows the thinking; white space kept.

    In another place than tags: the answer of a completion in perfect format.
    """
    if schema.answer_place != "tag":
        parsed = schema.parse(completion)
        return parsed.answer if parsed.verdict == "perfect" else None
    text = completion.rstrip()
    closed = text.find(schema.think_close)
    if closed < 0 or not text.endswith(schema.answer_close):
        return None
    start = text.find(schema.answer_open, closed + len(schema.think_close))
    answer = text[start + len(schema.answer_open) : -len(schema.answer_close)]
    return answer or None if start >= 0 else None


def _marks(schema: ResponseSchema, name: str) -> tuple[str, ...]:
    if not schema.marks:
        raise UserError(
            f"rewards.{name}: the schema has neither tags nor a mark of the answer; leave it out, or use another "
            "policy.schema"
        )
    return schema.marks


def format_exact(schema: ResponseSchema, task: Task) -> Reward:
    """Return +3 when an answer block follows the thinking and ends the completion, else 0.

    Source: workshop notebook, `match_format_exactly`. Deviation: later lines must be empty, too.
    """

    def score(problem: Problem, completion: str) -> float:
        return FORMAT_EXACT_MISS if _raw_answer(schema, completion) is None else FORMAT_EXACT

    return score


def format_approximate(schema: ResponseSchema, task: Task) -> Reward:
    """Return +.5 for every tag that occurs exactly once and -1 for every other, over the three scored tags.

    Source: workshop notebook, `match_format_approximately`. Deviation: a schema whose opening tag is not in the
    prompt has four scored tags; each then counts 3/4, so that best and worst stay 1.5 and -3. The mark of an answer
    without tags (`\\boxed{`, `####`) counts as one.
    """
    tags = _marks(schema, "format_approximate")

    def score(problem: Problem, completion: str) -> float:
        scores = [TAG_ONCE if completion.count(tag) == 1 else TAG_NOT_ONCE for tag in tags]
        return sum(scores) * NOTEBOOK_TAGS / len(tags)

    return score


def relative_error(guess: Number, truth: Number) -> Fraction:
    """Return |guess - truth| relative to the truth; a truth of zero counts as one unit of its last written place."""
    return abs(guess.value - truth.value) / (abs(truth.value) or truth.last_place)


def _band(guess: Number, truth: Number, bands: Sequence[tuple[Fraction, float]], otherwise: float) -> float:
    error = relative_error(guess, truth)
    return next((score for limit, score in bands if error <= limit), otherwise)


def answer_bands(schema: ResponseSchema, task: Task) -> Reward:
    """Return +5 for the gold string, +3.5 up to white space, 2 and 1.5 within 10 and 20 %, else -2.5.

    No number: -4.5. No answer: -2, which is more than a wrong one gets, so combine it with the format rewards.

    Source: workshop notebook, `check_answer`. Deviations: fractions and thousands commas are numbers; a gold answer
    of zero divides nothing (the notebook gives every number -4.5 there).
    """

    def score(problem: Problem, completion: str) -> float:
        answer = _raw_answer(schema, completion)
        if answer is None:
            return BANDS_NO_ANSWER
        return max(against(answer, gold) for gold in problem.answers)

    def against(answer: str, gold: str) -> float:
        if answer == gold:
            return BANDS_EQUAL
        if answer.strip() == gold.strip():
            return BANDS_STRIPPED
        guess, truth = parse_number(answer.strip()), parse_number(gold.strip())
        if guess is None or truth is None:
            return BANDS_NO_NUMBER
        return _band(guess, truth, BANDS, BANDS_FAR)

    return score


def number_match(schema: ResponseSchema, task: Task) -> Reward:
    """Return +3.5 when the first number after the answer tag equals the gold number, else -1.5; -2.5 without one.

    0 if the gold answer is not a number.

    Source: workshop notebook, `check_numbers`. Deviations: thousands commas must be correct (`1,2,3` is not 123), and a
        lone `.` or `,` is not a number (the notebook gives it 0, more than a wrong number).
    """

    def score(problem: Problem, completion: str) -> float:
        text = completion
        if schema.answer_place == "tag":
            opened = text.find(schema.answer_open, max(text.find(schema.think_close), 0))
            start = opened + len(schema.answer_open) if opened >= 0 else len(text)
        else:
            text, start = f" {schema.parse(completion).answer or ''}", 1
        digits = _DIGITS.search(text, start)
        if digits is None:
            return NUMBER_NONE
        truths = [
            truth.value for gold in problem.answers if (truth := parse_literal(gold.strip())) is not None
        ]
        if not truths:
            return NUMBER_NO_GOLD
        start = digits.start() - (text[digits.start() - 1] == ".")
        start -= text[start - 1] == "-"
        guess = parse_literal(text[start : digits.end()].rstrip(".,"))
        return NUMBER_EQUAL if guess is not None and guess.value in truths else NUMBER_WRONG

    return score


def tag_count(schema: ResponseSchema, task: Task) -> Reward:
    """Return .5 when each of the four tags occurs exactly once (an opening tag in the prompt counts), else 0.

    Source: grpo-vision-reasoning, `xmlcount`. The mark of an answer without tags counts as one.
    """
    marks = {*_marks(schema, "tag_count"), *schema.tags}

    def score(problem: Problem, completion: str) -> float:
        body = schema.generation_prefix + completion
        return LAYOUT * all(body.count(tag) == 1 for tag in marks)

    return score


def format_soft(schema: ResponseSchema, task: Task) -> Reward:
    """Return .5 when somewhere a closed thinking block is followed by a closed answer block, else 0.

    Source: grpo-vision-reasoning, `soft_format`. Where the schema lacks one of the blocks: a perfect format.
    """
    if schema.answer_place != "tag" or not schema.has_thinking:
        return format_strict(schema, task)
    seam = re.compile(re.escape(schema.think_close) + r"\s*" + re.escape(schema.answer_open))

    def score(problem: Problem, completion: str) -> float:
        body = schema.generation_prefix + completion
        start = body.find(schema.think_open)
        found = seam.search(body, start + len(schema.think_open)) if start >= 0 else None
        return LAYOUT * (found is not None and body.find(schema.answer_close, found.end()) >= 0)

    return score


def format_strict(schema: ResponseSchema, task: Task) -> Reward:
    """Return .5 when the whole completion is one thinking block and one answer block, else 0.

    Source: grpo-vision-reasoning, `strict_format`. Deviation: any white space between the blocks is accepted, because
        the schema's prompt does not ask for line ends.
    """
    return lambda problem, completion: LAYOUT * (schema.parse(completion).verdict == "perfect")


def exact_match(schema: ResponseSchema, task: Task) -> Reward:
    """Return 1 when the answer is the gold string, else 0: `2.0` is not `2` here; `correct` compares values."""
    return lambda problem, completion: float(
        schema.parse(completion).answer in [gold.strip() for gold in problem.answers]
    )


def distance(schema: ResponseSchema, task: Task) -> Reward:
    """Return 1 for the right answer, 1 / (1 + relative error) for another number (.8 for 5 in place of 4), -1 for none.

    The task decides by value what is right. What has the gold value and is wrong (a countdown's target in place of an
    expression) is not near: -1.

    Source: the workshop's talk, which gives .8 for the distance |5 - 4| / 4 and names no formula; this one gives
        exactly that, and falls to 0 without a bound.
    """

    def score(problem: Problem, completion: str) -> float | None:
        answer = schema.parse(completion).answer
        is_correct = is_right(task, problem, answer)
        if is_correct is None or is_correct:
            return None if is_correct is None else 1.0
        guess = parse_number(fold(answer or ""))
        truths = [
            truth for gold in problem.answers if (truth := parse_number(fold(gold).strip())) is not None
        ]
        if guess is None or not truths or any(guess.value == truth.value for truth in truths):
            return DISTANCE_NO_NUMBER
        return float(1 / (1 + min(relative_error(guess, truth) for truth in truths)))

    return score


def length_band(schema: ResponseSchema, task: Task) -> Reward:
    """Return 1 for 50 to 512 characters, falling to 0 at 10 and at 1,024.

    Source: a5c-ai/nanoGPT, `length_penalty` (weight .1 there).
    """
    least, low, high, most = LENGTH_BAND

    def score(problem: Problem, completion: str) -> float:
        length = len(completion)
        return max(0.0, min(1.0, (length - least) / (low - least), (most - length) / (most - high)))

    return score


def length_penalty(schema: ResponseSchema, task: Task) -> Reward:
    """Return 0 up to 2,048 characters, falling to -1 at 8,192."""

    def score(problem: Problem, completion: str) -> float:
        return max(-1.0, min(0.0, (LENGTH_FREE - len(completion)) / (LENGTH_LIMIT - LENGTH_FREE)))

    return score


def cosine_score(length: int, *, is_correct: bool, limit: int) -> float:
    """Reward shorter right answers more, and penalise longer wrong answers less.

    Args:
        length: Length of the completion, in the unit of `limit`.
        is_correct: Whether the answer is right.
        limit: Length at which the completion counts as cut off.

    Returns:
        2 to 1 when right, -10 to 0 when wrong, -10 from the limit on, along half a cosine.

    Source: 2502.03373, section 4.2 and its run "cosine_repetition_penalty".
    """
    if length >= limit:
        return COSINE_EXCEEDED
    at_zero, at_limit = COSINE_RIGHT if is_correct else COSINE_WRONG
    return at_limit + 0.5 * (at_zero - at_limit) * (1.0 + math.cos(math.pi * length / limit))


def cosine_length(schema: ResponseSchema, task: Task) -> Reward:
    """Return `cosine_score` of the completion's characters, with a limit of 8,192."""

    def score(problem: Problem, completion: str) -> float | None:
        is_correct = is_right(task, problem, schema.parse(completion).answer)
        if is_correct is None:
            return None
        return cosine_score(len(completion), is_correct=is_correct, limit=COSINE_LIMIT)

    return score


def repeated_share(items: str | tuple[str, ...], width: int, reach: int | None = None) -> float:
    """Measure repetition.

    Args:
        items: A text, or its words.
        width: Characters (or words) of a window.
        reach: Farthest distance of an earlier occurrence; None: anywhere.

    Returns:
        The share of windows that occurred before; 0 when there is no window.
    """
    count = len(items) - width + 1
    reach = count if reach is None else reach
    latest: dict[str | tuple[str, ...], int] = {}
    repeated = 0
    for index in range(count):
        window = items[index : index + width]
        repeated += index - latest.get(window, -reach - 1) <= reach
        latest[window] = index
    return repeated / max(count, 1)


def repetition(schema: ResponseSchema, task: Task) -> Reward:
    """Return minus the share of repeated n-grams of 40 words and runs of punctuation.

    Source: 2502.03373, section 4.2.
    """
    return lambda problem, completion: (
        0.0 - repeated_share(tuple(_WORD.findall(completion)), REPETITION_NGRAM)
    )


def degenerate(schema: ResponseSchema, task: Task) -> Reward:
    """Return -2 if half of the text is extra white space or a loop, else 0.

    Source: workshop's vision notebook, generalised from one token to any token, line or phrase that repeats within 256
        characters.
    """

    def score(problem: Problem, completion: str) -> float:
        idle = len(completion) - len(" ".join(completion.split()))
        is_idle = idle >= DEGENERATE_SHARE * max(len(completion), 1)
        is_loop = repeated_share(completion, LOOP_WINDOW, LOOP_REACH) >= DEGENERATE_SHARE
        return DEGENERATE if is_idle or is_loop else 0.0

    return score


def steps(schema: ResponseSchema, task: Task) -> Reward:
    """Return the share of true equations among the checkable ones of the thinking, or of all of a completion without.

    1 when there is nothing to check (writing no equations must not cost), 0 when the thinking is not closed.
    """

    def score(problem: Problem, completion: str) -> float:
        thinking = schema.parse(completion).thinking if schema.has_thinking else completion
        if thinking is None:
            return 0.0
        verdicts = [step.verdict for step in audit_steps(thinking)]
        checked = len(verdicts) - verdicts.count("unchecked")
        return verdicts.count("true") / checked if checked else 1.0

    return score


PRESETS: dict[str, Preset] = {
    "format_exact": Preset(format_exact, FORMAT_EXACT, FORMAT_EXACT_MISS),
    "format_approximate": Preset(format_approximate, NOTEBOOK_TAGS * TAG_ONCE, NOTEBOOK_TAGS * TAG_NOT_ONCE),
    "answer_bands": Preset(answer_bands, BANDS_EQUAL, BANDS_NO_NUMBER, needs_gold=True),
    "number_match": Preset(number_match, NUMBER_EQUAL, NUMBER_NONE, needs_gold=True),
    "tag_count": Preset(tag_count, LAYOUT, 0.0),
    "format_soft": Preset(format_soft, LAYOUT, 0.0),
    "format_strict": Preset(format_strict, LAYOUT, 0.0),
    "exact_match": Preset(exact_match, 1.0, 0.0, needs_gold=True),
    "distance": Preset(distance, 1.0, DISTANCE_NO_NUMBER, needs_gold=True),
    "length_band": Preset(length_band, 1.0, 0.0, is_reached=False),
    "length_penalty": Preset(length_penalty, 0.0, -1.0, is_reached=False),
    "cosine_length": Preset(
        cosine_length, COSINE_RIGHT[0], COSINE_EXCEEDED, is_reached=False, needs_gold=True
    ),
    "repetition": Preset(repetition, 0.0, -1.0, is_reached=False),
    "degenerate": Preset(degenerate, 0.0, DEGENERATE),
    "steps": Preset(steps, 1.0, 0.0, is_reached=False),
}
"""Name -> reward. `whet.rewards.base` adds `correct` and `format`."""
