r"""Arithmetic step audit: checks the plain-arithmetic equations of a trace by exact fractions.

It reads `24 - 6 = 19`, chains (`x = 3 + 4 = 7`), running sums (`7+5=12+9=21`), units and money (`3 * $4 = $12`),
percentages, mixed numbers, thousands commas and LaTeX (`\frac`, `\times`, `\cdot`); the rest is "unchecked".
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from whet.rewards.steps.tokens import tokenise
from whet.rewards.steps.trace import Side, read_sides

Verdict = Literal["true", "false", "unchecked"]


@dataclass(frozen=True, slots=True)
class Step:
    """One equation of a trace.

    Attributes:
        text: The equation as it was written.
        start: Where it starts in the trace, in characters.
        end: Where it ends.
        verdict: 'true', 'false', or 'unchecked' when it is not certainly plain arithmetic.
    """

    text: str
    start: int
    end: int
    verdict: Verdict


def audit_steps(text: str) -> list[Step]:
    """Find the equations of a trace and judge those that are plain arithmetic.

    A decimal may be rounded or truncated at its last written digit. A middle side of a chain may continue from the
    previous result (`7+5=12+9=21`). Equations without any operator (`x = 5`, `2 hours = 120 minutes`) are not steps and
    are skipped.

    Args:
        text: Any text; time is linear in its length.

    Returns:
        The equations in order.
    """
    if "=" not in text:
        return []
    tokens = tokenise(text)
    sides = read_sides(tokens)
    starts, ends = {side.start: side for side in sides}, {side.end: side for side in sides}
    steps: list[Step] = []
    for index, token in enumerate(tokens):
        left, right = ends.get(index), starts.get(index + 1)
        if token.kind != "equals" or (left is None and right is None):
            continue
        if sum(side.num_operators for side in (left, right) if side is not None) == 0:
            continue
        first = left.start if left is not None else max(index - 1, 0)
        last = right.end - 1 if right is not None else min(index + 1, len(tokens) - 1)
        start, end = tokens[first].start, tokens[last].end
        verdict: Verdict = "unchecked"
        if left is not None and right is not None and left.plain and right.plain:
            is_middle = right.end < len(tokens) and tokens[right.end].kind == "equals"
            verdict = _judge(left, right, is_middle)
        steps.append(Step(text[start:end], start, end, verdict))
    return steps


def _judge(left: Side, right: Side, is_middle: bool) -> Verdict:
    """Compare two plain sides."""
    if _agree(left, left.value.value, right, right.value.value):
        return "true"
    if right.has_percent and _agree(left, left.value.value, right, right.value.bare):  # 5/20 * 100 = 25%
        return "true"
    in_percent = right.has_percent or left.has_whole or not left.has_product  # 100% - 30% = 70
    if in_percent and _agree(left, left.value.bare, right, right.value.bare):
        return "true"
    carried = [pair.value for pair in (right.first if is_middle else None, right.share) if pair is not None]
    if left.value.value in carried:
        return "true"
    is_mixed = len(left.measures) > 1 and not left.has_product  # 4 pounds - 6 ounces
    is_conversion = is_mixed or bool(left.measures and right.measures - left.measures)
    return "unchecked" if is_conversion or left.is_label else "false"


def _agree(left: Side, left_value: Fraction, right: Side, right_value: Fraction) -> bool:
    """Compare exactly, or with a decimal that rounds (or truncates) the other side."""
    if left_value == right_value:
        return True
    for side, exact in ((right, left_value), (left, right_value)):
        if side.place is None or (exact / side.place).denominator == 1:
            continue
        slack = side.place if side.place < 1 else side.place / 2
        if abs(left_value - right_value) <= slack:
            return True
    return False
