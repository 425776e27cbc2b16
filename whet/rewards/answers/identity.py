"""Numerical equality of expressions: they are compared at sample points, not rewritten."""

from __future__ import annotations

import re
from fractions import Fraction

from whet.rewards.answers.calculator import close, evaluate_at
from whet.rewards.answers.expression import Node, ParseError, parse_expression
from whet.rewards.answers.numbers import MIN_ROUNDED_DIGITS, Number, is_rounding, parse_literal

MIN_POINTS = 3
"""Sample points at which both expressions must have a value."""

_POINTS = (
    (0.7310585, 1.3862943, 2.2360679, 0.4812118, 1.7724538, 3.3166247),
    (1.6180339, 0.5772156, 1.2020569, 2.6854520, 0.9159655, 0.3678794),
    (2.5029078, 3.7320508, 0.6434105, 1.1319882, 0.2614972, 1.9021605),
    (4.6692016, 1.0986122, 3.6055512, 0.8346268, 2.8077702, 0.6180339),
    (0.2087987, 0.4669201, 0.3039635, 0.1994588, 0.1353352, 0.2502907),
)
"""Positive, so that `\\sqrt{x^2}` equals `x`, as answers assume; the values are not simply related."""
_SIGNED_POINT = (-0.8414709, -1.2912859, 0.9297764, -2.1213203, 1.4324178, -0.5671432)
"""Used in addition if an absolute value, a maximum or a minimum occurs."""
_WHOLE_POINTS = (
    (7.0, 3.0, 5.0, 11.0, 2.0, 13.0),
    (4.0, 9.0, 2.0, 6.0, 8.0, 3.0),
    (12.0, 5.0, 8.0, 3.0, 7.0, 10.0),
)
"""Used instead if a sum or product runs up to a variable."""
_SIGNED = ("abs", "max", "min")
_DECIMAL = re.compile(r"(?<![0-9.])[0-9]*\.[0-9]+(?![0-9.])")


def expressions_equal(left: Node, right: Node, tolerance: float = 0.0) -> bool:
    """Compare two expressions at sample points, or directly when they have no variables.

    Args:
        left: An expression.
        right: An expression.
        tolerance: Relative error that is permitted in addition to that of double precision; see
            `decimal_tolerance`.

    Returns:
        True when both have a value, and the same one, at no fewer than `MIN_POINTS` points.
    """
    variables = sorted(left.variables() | right.variables())
    if not variables:
        try:
            return _near(evaluate_at(left, {}), evaluate_at(right, {}), tolerance)
        except (ArithmeticError, ValueError):
            return False
    points = _sample_points(variables, left.has(*_SIGNED) or right.has(*_SIGNED))
    if left.has("series") or right.has("series"):
        points = _rows(variables, _WHOLE_POINTS)
    num_agreeing = 0
    for point in points:
        try:
            values = evaluate_at(left, point), evaluate_at(right, point)
        except (ArithmeticError, ValueError):
            continue
        if not _near(*values, tolerance):
            return False
        num_agreeing += 1
    return num_agreeing >= MIN_POINTS


def _near(left: tuple[complex, float], right: tuple[complex, float], tolerance: float) -> bool:
    return close(left, right) or abs(left[0] - right[0]) <= tolerance * min(abs(left[0]), abs(right[0]))


def constant_rounds_to(constant: Node, decimal: Number) -> bool:
    r"""Say whether a decimal is the rounded value of a constant: `3.1416` of `\pi`, `2.414` of `1+\sqrt2`."""
    if not decimal.is_decimal or constant.variables():
        return False
    try:
        value, _ = evaluate_at(constant, {})
    except (ArithmeticError, ValueError):
        return False
    if abs(value.imag) > 1e-12 * abs(value) or not abs(value) < 1e300:
        return False
    exact = Fraction(value.real)
    return is_rounding(decimal, abs(exact), abs(decimal.value - exact))


def decimal_tolerance(left: str, right: str) -> float:
    r"""Return the relative error that rounded decimals in one of two expressions explain.

    Args:
        left: An expression, as cleaned text.
        right: The other one.

    Returns:
        Half a unit in the last place of the coarsest decimal of four or more digits (`1.414 x` may stand for
        `\sqrt2 x`), and 0 if both sides or neither have such decimals.
    """
    errors = [_rounding_error(text) for text in (left, right) if "." in text]
    return max(errors) if sum(error > 0 for error in errors) == 1 else 0.0


def _rounding_error(text: str) -> float:
    numbers = [parse_literal(found) for found in _DECIMAL.findall(text)]
    return max(
        (
            float(number.last_place / number.value) / 2
            for number in numbers
            if number is not None and number.num_digits >= MIN_ROUNDED_DIGITS
        ),
        default=0.0,
    )


def same_curve(left: tuple[str, ...], right: tuple[str, ...], any_sign: bool) -> bool:
    """Say whether two relations differ by a constant factor only, which is positive unless `any_sign`.

    Args:
        left: The two sides of a relation.
        right: The two sides of the other one.
        any_sign: True for equations, False for inequalities.
    """
    try:
        sides = [parse_expression(member) for member in (*left, *right)]
    except ParseError:
        return False
    names = [side.variables() for side in sides]
    variables = sorted(names[0] | names[1])
    if not variables or names[0] | names[1] != names[2] | names[3]:
        return False
    ratios: list[complex] = []
    for point in _sample_points(variables, signed=True):
        try:
            a, b, c, d = (evaluate_at(side, point)[0] for side in sides)
            ratios.append((a - b) / (c - d))
        except (ArithmeticError, ValueError):
            continue
    if len(ratios) < MIN_POINTS or abs(ratios[0]) < 1e-9 or not (any_sign or ratios[0].real > 0):
        return False
    return all(close((ratio, 0.0), (ratios[0], 0.0)) for ratio in ratios)


def _sample_points(variables: list[str], signed: bool) -> list[dict[str, float]]:
    return _rows(variables, (*_POINTS, _SIGNED_POINT) if signed else _POINTS)


def _rows(variables: list[str], rows: tuple[tuple[float, ...], ...]) -> list[dict[str, float]]:
    """Give every variable its value in each row; the seventh and later ones get shifted copies."""
    return [
        {name: row[i % len(row)] + 0.1 * (i // len(row)) for i, name in enumerate(variables)} for row in rows
    ]
