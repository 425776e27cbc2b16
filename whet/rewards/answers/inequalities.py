"""Relations that bound one variable -> the interval they mean, as text: `-2 ≤ x < 7` is `[-2,7)`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from whet.rewards.answers.calculator import evaluate_at
from whet.rewards.answers.expression import ParseError, parse_expression

_VARIABLE = re.compile(r"[A-Za-z](?:_[A-Za-z0-9]|\([a-z]\))?|\\[a-z]{2,8}")
_ABSOLUTE = re.compile(r"\| ?[A-Za-z] ?\|")
_MET = 1e-9
"""Relative error within which three values count as collinear."""


def as_interval(members: Sequence[str], signs: Sequence[str]) -> str | None:
    """Rewrite `x < 5`, `2x ≤ 10`, `-2 ≤ x < 7`, `|x| < 3` or `x ≠ 2` as an interval or a union.

    Args:
        members: Cleaned texts between the signs, the smallest first.
        signs: '<', '≤' or '≠', one fewer than members.

    Returns:
        The interval, or None when the relation does not bound one variable.
    """
    if list(signs) == ["≠"]:
        name, value = members
        return _outside(value, value, "<", "<") if _VARIABLE.fullmatch(name) else None
    if not all(sign in "<≤" for sign in signs) or len(members) not in (2, 3):
        return None
    if len(members) == 3:
        return _between(members[0], members[1], members[2], signs)
    (low, high), sign = members, signs[0]
    if _is_bounded(low) and not _has_variables(high):
        return _between("-∞", low, high, ("<", sign))
    if _is_bounded(high) and not _has_variables(low):
        return _between(low, high, "∞", (sign, "<"))
    solved = _solve(low, high)
    if solved is None:
        return None
    bound, is_upper = solved
    return _range("-∞", bound, "<", sign) if is_upper else _range(bound, "∞", sign, "<")


def _is_bounded(member: str) -> bool:
    return _VARIABLE.fullmatch(member) is not None or _ABSOLUTE.fullmatch(member) is not None


def _has_variables(member: str) -> bool:
    try:
        return bool(parse_expression(member).variables())
    except ParseError:
        return False


def _range(low: str, high: str, low_sign: str, high_sign: str) -> str:
    return f"{'[' if low_sign == '≤' else '('}{low},{high}{']' if high_sign == '≤' else ')'}"


def _outside(low: str, high: str, low_sign: str, high_sign: str) -> str:
    return f"{_range('-∞', low, '<', low_sign)}∪{_range(high, '∞', high_sign, '<')}"


def _between(low: str, middle: str, high: str, signs: Sequence[str]) -> str | None:
    """Read `low < middle < high`, where the middle is a variable, a function value or an absolute value."""
    if _VARIABLE.fullmatch(middle):
        return _range(low, high, signs[0], signs[1])
    if not _ABSOLUTE.fullmatch(middle):
        return None
    if low == "-∞":
        return _range(f"-({high})", high, signs[1], signs[1])
    if high == "∞":
        return _outside(f"-({low})", low, signs[0], signs[0])
    lower, upper = (f"-({high})", f"-({low})", signs[1], signs[0]), (low, high, signs[0], signs[1])
    return f"{_range(*lower)}∪{_range(*upper)}"


def _solve(low: str, high: str) -> tuple[str, bool] | None:
    """Solve a linear inequality `low < high` in one variable: its bound, and whether the variable lies below."""
    try:
        left, right = parse_expression(low), parse_expression(high)
        names = left.variables() | right.variables()
        if len(names) != 1:
            return None
        points = [{name: at} for name in names for at in (1.0, 2.0, 3.0)]
        values = [evaluate_at(left, point)[0] - evaluate_at(right, point)[0] for point in points]
    except (ParseError, ArithmeticError, ValueError):
        return None
    slope, size = values[1] - values[0], max(map(abs, values))
    if abs(slope) <= _MET * size or abs(values[2] - values[1] - slope) > _MET * size or slope.imag:
        return None
    return f"{(1.0 - values[0] / slope).real:.10f}".rstrip("0"), slope.real > 0
