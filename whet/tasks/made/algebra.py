"""The task `algebra`: generated linear equations and pairs of them, with worked solutions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from whet.rewards.answers.equal import answers_equal
from whet.tasks.made.draft import Draft, Draw, Generated
from whet.types import Problem, Task

NUM_PROBLEMS = 20_000
UNKNOWNS = "xyzabnptkm"
PAIRS = ("xy", "ab", "pq", "mn", "uv")


def algebra(*, level: int = 0, seed: int = 0, num_problems: int = 0) -> Task:
    """Return the task `algebra`.

    Levels: 1 `x + a = b`; 2 `ax + b = c`; 3 `ax + b = cx + d`; 4 `a(x + b) + c = d(x + e)`, the solution can be a
        fraction; 5 two equations with two unknowns, answered as a pair. All other solutions are whole numbers.

    Args:
        level: A single level; 0 mixes them.
        seed: Seed of the draws.
        num_problems: Problems in all splits together; 0 means 20,000.
    """
    return Generated(
        "algebra",
        _make,
        is_right,
        num_levels=5,
        num_problems=num_problems or NUM_PROBLEMS,
        answer_type="number" if 0 < level < 5 else "text",
        level=level,
        seed=seed,
    )


def is_right(problem: Problem, answer: str) -> bool:
    """Say whether the answer is the number (level 5: the pair, in the order of the question)."""
    is_pair = problem.answer.startswith("(")
    return answers_equal(answer, problem.answer, ordered=is_pair, plain_number=not is_pair)


def _make(draw: Draw, level: int) -> list[Draft]:
    if level == 5:
        return _pair(draw)
    name = draw.one(UNKNOWNS)
    solution = draw.between(-30, 30)
    if level == 1:
        return [_linear(draw, name, (1, draw.nonzero(50)), solution)]
    if level == 2:
        return [_linear(draw, name, (draw.between(2, 12), draw.nonzero(50)), solution)]
    if level == 3:
        a, c = draw.between(2, 12), draw.nonzero(9)
        return [_both_sides(draw, name, (a, draw.nonzero(40)), c, solution)] if a != c else []
    return _brackets(draw, name)


def _linear(draw: Draw, name: str, side: tuple[int, int], solution: int) -> Draft:
    """Write `ax + b = c`, and solve it in one or two steps."""
    a, b = side
    total = a * solution + b
    steps = [f"{_sum((a, name), (0, ''))} = {total} {_less(b)} = {total - b}"]
    if a != 1:
        steps.append(f"{name} = {total - b}/{a} = {solution}")
    return _draft(draw, name, (_sum((a, name), (b, "")), str(total)), steps, str(solution))


def _both_sides(draw: Draw, name: str, side: tuple[int, int], c: int, solution: int) -> Draft:
    """Write `ax + b = cx + d` with d such that the solution holds."""
    a, b = side
    d = (a - c) * solution + b
    steps = _collect(name, a, b, c, d)
    return _draft(
        draw, name, (_sum((a, name), (b, "")), _sum((c, name), (d, ""))), steps, str(Fraction(d - b, a - c))
    )


def _brackets(draw: Draw, name: str) -> list[Draft]:
    """Write `a(x + b) + c = d(x + e)`; the solution is a fraction with denominator |a - d| at most."""
    a, b, c, d, e = draw.between(2, 9), draw.nonzero(9), draw.nonzero(20), draw.nonzero(9), draw.nonzero(9)
    if a == d or abs(d) == 1:
        return []
    left = f"{a}({_sum((1, name), (b, ''))}) {_plus(c)}"
    right = f"{d}({_sum((1, name), (e, ''))})"
    opened = f"{_sum((a, name), (a * b + c, ''))} = {_sum((d, name), (d * e, ''))}"
    steps = [opened, *_collect(name, a, a * b + c, d, d * e)]
    return [_draft(draw, name, (left, right), steps, str(Fraction(d * e - a * b - c, a - d)))]


def _collect(name: str, a: int, b: int, c: int, d: int) -> list[str]:
    """Solve `ax + b = cx + d`: unknowns to the left, numbers to the right, divide."""
    steps = [f"{_sum((a, name), (-c, name))} = {d} {_less(b)}"]
    steps.append(f"{_sum((a - c, name), (0, ''))} = {d - b}")
    if a - c != 1:
        steps.append(f"{name} = {d - b}/{_bracketed(a - c)} = {Fraction(d - b, a - c)}")
    return steps


def _pair(draw: Draw) -> list[Draft]:
    """Write two equations in two unknowns, and eliminate the second unknown."""
    first, second = draw.one(PAIRS)
    x, y = draw.between(-12, 12), draw.between(-12, 12)
    a, b, d, e = draw.nonzero(9), draw.nonzero(9), draw.nonzero(9), draw.nonzero(9)
    if a * e == b * d:
        return []
    c, f = a * x + b * y, d * x + e * y
    rows = [(a, b, c), (d, e, f)]
    top, bottom = (f"{_sum((p, first), (q, second))} = {r}" for p, q, r in rows)
    factor, total = a * e - d * b, c * e - f * b
    steps = [
        f"{e}*({top}) minus {b}*({bottom}): {_sum((factor, first), (0, ''))} = {total}",
        f"{first} = {total}/{_bracketed(factor)} = {x}",
        f"{_sum((0, ''), (b, second))} = {c} {_less(a * x)} = {b * y}",
        f"{second} = {b * y}/{_bracketed(b)} = {y}",
    ]
    key = min(str(sorted(rows)), str(sorted((q, p, r) for p, q, r in rows)))
    prompt = f"Solve for {first} and {second}, and answer with ({first}, {second}):\n{top}\n{bottom}"
    return [Draft(key, prompt, f"({x}, {y})", "\n".join(steps))]


def _draft(draw: Draw, name: str, sides: tuple[str, str], steps: Sequence[str], answer: str) -> Draft:
    """Ask for one unknown, with the sides in either order; neither that nor its name changes the key."""
    shown = sides if draw.below(2) else sides[::-1]
    key = " = ".join(sorted(side.replace(name, "x") for side in sides))
    return Draft(key, f"Solve for {name}: {shown[0]} = {shown[1]}", answer, "\n".join(steps))


def _sum(*terms: tuple[int, str]) -> str:
    """Write `3x - 5` for (3, 'x'), (-5, ''); terms of 0 are left out."""
    text = ""
    for factor, name in terms:
        if factor:
            size = name if abs(factor) == 1 and name else f"{abs(factor)}{name}"
            sign = (" - " if factor < 0 else " + ") if text else ("-" if factor < 0 else "")
            text += sign + size
    return text or "0"


def _plus(number: int) -> str:
    return f"+ {number}" if number >= 0 else f"- {-number}"


def _less(number: int) -> str:
    return _plus(-number)


def _bracketed(number: int) -> str:
    return f"({number})" if number < 0 else str(number)
