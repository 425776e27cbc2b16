"""Countdown: reach a target with given numbers, + - * / and parentheses; rows of the game of 24 are read, too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from whet.tasks.made.draft import Draft, Draw, FromRows, Generated
from whet.tasks.read import Row
from whet.types import Problem, Task

MAX_CHARACTERS = 300
MAX_SOLVED = 4
"""Most numbers of a row for which a solution is searched."""
NUM_PROBLEMS = 10_000
MAX_VALUE = 999
COLUMNS = (("numbers", "target"), ("nums", "target"), ("input", "output"), ("Puzzles", None))
"""Columns of numbers and target; Puzzles are those of the game of 24."""
SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_TOKEN = re.compile(r"[0-9]+|[-+*/()]")


def countdown(
    path: str = "", *, level: int = 0, seed: int = 0, num_problems: int = 0, **options: Any
) -> Task:
    """Return the task `countdown`: levels 1 to 4 have 3 to 6 numbers; every problem can be solved.

    Args:
        path: Data with numbers and target (columns numbers or nums, target; or input, output; or
            Puzzles, whose target is 24); '' draws them.
        level: The one level wanted; 0 mixes them.
        seed: Seed of the draws.
        num_problems: Problems in all splits together; 0 means 10,000.
        options: Of `FromRows`, for data: `max_bad_rows`, `held_out`.
    """
    if path:
        return FromRows("countdown", path, _from_row, is_right, answer_type="text", **options)
    return Generated(
        "countdown",
        _make,
        is_right,
        num_levels=4,
        num_problems=num_problems or NUM_PROBLEMS,
        answer_type="text",
        level=level,
        seed=seed,
    )


def is_right(problem: Problem, answer: str) -> bool:
    """Say whether an expression uses every number exactly once and has the target as its exact value.

    `... = 24` after the expression is tolerated if it is the target, and so are the signs × · ÷ − and a minus sign
    before a number (it reaches nothing that subtraction does not). Nothing else is: no powers, no products without `*`,
    no concatenation of digits.

    Args:
        problem: A problem of this task; numbers and target are in its `meta`.
        answer: Any text.
    """
    if len(answer) > MAX_CHARACTERS:
        return False
    target = problem.meta["target"]
    expression, equals, result = answer.translate(SIGNS).partition("=")
    if equals and result.strip() != target:
        return False
    parsed = evaluate(expression)
    if parsed is None:
        return False
    value, numbers = parsed
    return value == int(target) and sorted(numbers) == sorted(map(int, problem.meta["numbers"].split()))


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """Compute an expression of whole numbers, + - * / and parentheses exactly.

    Args:
        text: Any text; callers bound its length, and thereby its depth.

    Returns:
        Value and the numbers in order; None if it is not such an expression, or divides by zero.
    """
    if _TOKEN.sub("", text).strip(" \n\t"):
        return None
    tokens = _TOKEN.findall(text)
    if len(tokens) > MAX_CHARACTERS or any(len(token) > 1 and token[0] == "0" for token in tokens):
        return None
    numbers = [int(token) for token in tokens if token[0].isdigit()]
    try:
        tokens.append("")
        rest = iter(tokens)
        value, last = _sum(rest)
        return None if last else (value, numbers)
    except (SyntaxError, ZeroDivisionError, StopIteration):
        return None


def _sum(rest: Iterator[str]) -> tuple[Fraction, str]:
    """Read a sum; return its value and the token after it."""
    total, token = _product(rest)
    while token in ("+", "-"):
        sign = 1 if token == "+" else -1
        value, token = _product(rest)
        total += sign * value
    return total, token


def _product(rest: Iterator[str]) -> tuple[Fraction, str]:
    value = _atom(rest)
    token = next(rest)
    while token in ("*", "/"):
        factor = _atom(rest)
        value = value * factor if token == "*" else value / factor
        token = next(rest)
    return value, token


def _atom(rest: Iterator[str]) -> Fraction:
    token = next(rest)
    if token == "(":
        value, token = _sum(rest)
        if token != ")":
            raise SyntaxError("unclosed parenthesis")
        return value
    if token == "-":
        return -_atom(rest)
    if not token.isdigit():
        raise SyntaxError("expected a number")
    return Fraction(int(token))


def _results(left: Fraction, right: Fraction) -> Iterator[tuple[str, Fraction]]:
    """Yield the results of one operation on two values; '{0}' and '{1}' stand for their expressions."""
    yield "{0}+{1}", left + right
    yield "{0}*{1}", left * right
    yield "{0}-{1}", left - right
    yield "{1}-{0}", right - left
    if right:
        yield "{0}/{1}", left / right
    if left:
        yield "{1}/{0}", right / left


@dataclass(frozen=True, slots=True)
class Way:
    """One way to make a value.

    Attributes:
        value: The value.
        form: A number, or an operation such as '{0}+{1}' on the two parts.
        parts: The ways to its operands.
    """

    value: Fraction
    form: str
    parts: tuple[Way, ...] = ()

    @property
    def expression(self) -> str:
        """The whole expression: `(5*6)-6`."""
        inner = (f"({part.expression})" if part.parts else part.form for part in self.parts)
        return self.form.format(*inner)

    @property
    def steps(self) -> list[str]:
        """One line per operation: `5*6=30`, `30-6=24`."""
        if not self.parts:
            return []
        step = self.form.format(*(_shown(part.value) for part in self.parts)) + f"={self.value}"
        return [*(line for part in self.parts for line in part.steps), step]


def _ways(numbers: tuple[int, ...], is_whole: bool) -> Iterator[tuple[Fraction, str, tuple[Way, ...]]]:
    """Yield values that use all numbers, with form and parts; a value may be repeated."""
    if len(numbers) == 1:
        yield Fraction(numbers[0]), str(numbers[0]), ()
    for chosen in range(1, 2 ** (len(numbers) - 1)):
        parts = [tuple(n for i, n in enumerate(numbers) if (chosen >> i & 1) == side) for side in (0, 1)]
        for left in _reachable(parts[0], is_whole):
            for right in _reachable(parts[1], is_whole):
                for form, value in _results(left.value, right.value):
                    if not is_whole or (value.denominator == 1 and value >= 0):
                        yield value, form, (left, right)


@lru_cache(maxsize=600)  # enough for all triples of 13 cards, some 30 KB each
def _reachable(numbers: tuple[int, ...], is_whole: bool) -> tuple[Way, ...]:
    """Return one way to every value that uses all numbers."""
    found: dict[Fraction, Way] = {}
    for value, form, parts in _ways(numbers, is_whole):
        if value not in found:
            found[value] = Way(value, form, parts)
    return tuple(found.values())


def _shown(value: Fraction) -> str:
    return str(value) if value >= 0 and value.denominator == 1 else f"({value})"


def solve(numbers: list[int], target: int) -> Way | None:
    """Search for a solution, preferably without negative numbers and fractions on the way.

    Args:
        numbers: At most `MAX_SOLVED` numbers.
        target: The target value.

    Returns:
        A way to it that uses all numbers, or None.
    """
    for is_whole in (True, False):
        for value, form, parts in _ways(tuple(sorted(numbers)), is_whole):
            if value == target:
                return Way(value, form, parts)
    return None


def _draft(numbers: list[int], way: Way) -> Draft:
    prompt = (
        f"Use each of the numbers {', '.join(map(str, numbers))} exactly once, with + - * / and parentheses, "
        f"to make {way.value}. Answer with the expression."
    )
    meta = {"numbers": " ".join(map(str, numbers)), "target": str(way.value)}
    return Draft(f"{sorted(numbers)} {way.value}", prompt, way.expression, "\n".join(way.steps), meta)


def _make(draw: Draw, level: int) -> list[Draft]:
    """Draw numbers and combine them in random pairs; the result is the target."""
    numbers = [draw.between(1, 99 if level <= 2 else 25) for _ in range(level + 2)]
    ways = [Way(Fraction(number), str(number)) for number in numbers]
    while len(ways) > 1:
        left, right, *ways = draw.shuffled(ways)
        whole = [
            (form, value)
            for form, value in _results(left.value, right.value)
            if value.denominator == 1 and 0 < value <= MAX_VALUE
        ]
        form, value = draw.one(
            whole
        )  # never empty: a sum above the maximum has a difference or a quotient below
        ways.append(Way(value, form, (left, right)))
    return [_draft(numbers, ways[0])]


def _from_row(row: Row) -> Draft | str:
    columns = next((pair for pair in COLUMNS if pair[0] in row), None)
    if columns is None:
        return f"no column of numbers ({', '.join(name for name, _ in COLUMNS)})"
    raw = row[columns[0]]
    words = raw if isinstance(raw, list) else re.findall(r"[^\s,;\[\]]+", str(raw))
    goal = row.get(columns[1]) if columns[1] else 24
    texts = [str(word) for word in (*words, goal)]
    if not all(text.isascii() and text.isdigit() and len(text) <= 6 for text in texts):
        return f"expected whole numbers and a target, got {str(raw)[:60]!r} and {str(goal)[:20]!r}"
    numbers = [int(text) for text in texts[:-1]]
    if not 2 <= len(numbers) <= MAX_SOLVED:
        return f"{len(numbers)} numbers, expected 2 to {MAX_SOLVED}"
    way = solve(numbers, int(texts[-1]))
    return _draft(numbers, way) if way else f"{numbers} cannot make {texts[-1]}"
