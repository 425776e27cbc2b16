"""Written numbers -> exact fractions, by a strict ASCII grammar.

`int` and `float` accept what no grader should (`1_0`, Arabic digits, 'nan', 'inf') and raise on 5,000 digits;
nothing here does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 1000
"""Longest number (in characters) that is read as a number; longer ones are compared as text."""
MAX_EXPONENT = 1000
"""Largest power of ten in scientific notation."""
MIN_ROUNDED_DIGITS = 6
"""A decimal stands for an irrational or a repeating fraction only with this many significant digits."""
ROUNDING = Fraction(1, 10**6)
"""Largest relative error of such a decimal."""

_UNSIGNED = (
    r"(?:(?P<whole>[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.(?P<part>[0-9]*))?|\.(?P<bare>[0-9]+))"
    r"(?:[eE](?P<exp>[+-]?[0-9]{1,4}))?"
)
_NUMBER = re.compile(rf"(?P<sign>[+-]?) ?{_UNSIGNED}")
_FRACTION = re.compile(r"([^/]+?) ?/ ?([^/]+)")
_MIXED = re.compile(r"([+-]?) ?([0-9]+) +([0-9]+) ?/ ?([0-9]+)")
_REPEATING = re.compile(r"([+-]?)([0-9]*)\.([0-9]*)\\overline ?(?:\{([0-9]{1,40})\}|([0-9]))")
_SPACED = re.compile(r"[+-]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value with what its spelling says about its precision.

    Attributes:
        value: The exact value.
        is_decimal: True for a decimal literal (integers included), False for fractions and computed values.
        num_digits: Significant digits of a literal with a decimal point, else 0.
        last_place: Value of one unit of its last written digit.
    """

    value: Fraction
    is_decimal: bool = False
    num_digits: int = 0
    last_place: Fraction = Fraction(1)


def parse_literal(text: str) -> Number | None:
    """Read a decimal literal: sign, digits, strict thousands commas, decimal point, exponent.

    Args:
        text: Stripped text.

    Returns:
        The number, or None when the text is anything else or too long.
    """
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_DIGITS else None
    if match is None:
        return None
    whole = (match["whole"] or "").replace(",", "")
    part = match["part"] or match["bare"] or ""
    exponent = int(match["exp"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    digits = int(whole + part)
    if match["sign"] == "-":
        digits = -digits
    shift = exponent - len(part)
    value = Fraction(digits * 10**shift) if shift >= 0 else Fraction(digits, 10**-shift)
    if not part and not exponent:
        return Number(value, is_decimal=True)
    place = Fraction(10**shift) if shift >= 0 else Fraction(1, 10**-shift)
    return Number(value, is_decimal=True, num_digits=len((whole + part).lstrip("0")), last_place=place)


def parse_number(text: str) -> Number | None:
    """Read a number in any plain spelling: literal, `a/b`, `1 1/2`, `0.\\overline{3}` or `12 345`.

    Args:
        text: Stripped text.

    Returns:
        The number, or None.
    """
    literal = parse_literal(text)
    if literal is not None or len(text) > MAX_DIGITS:
        return literal
    if "/" in text:
        return _parse_fraction(text)
    if "\\overline" in text:
        return _parse_repeating(text)
    if " " in text and _SPACED.fullmatch(text):
        return parse_literal(text.replace(" ", ""))
    return None


def _parse_fraction(text: str) -> Number | None:
    mixed = _MIXED.fullmatch(text)
    if mixed:
        sign, whole, top, bottom = mixed[1], int(mixed[2]), int(mixed[3]), int(mixed[4])
        if bottom == 0 or top >= bottom:
            return None
        value = whole + Fraction(top, bottom)
        return Number(-value if sign == "-" else value)
    parts = _FRACTION.fullmatch(text)
    if parts is None:
        return None
    top, bottom = parse_literal(parts[1]), parse_literal(parts[2])
    if top is None or bottom is None or bottom.value == 0:
        return None
    return Number(top.value / bottom.value)


def _parse_repeating(text: str) -> Number | None:
    match = _REPEATING.fullmatch(text)
    if match is None:
        return None
    sign, whole, fixed, cycle = match[1], match[2] or "0", match[3], match[4] or match[5]
    value = Fraction(int(whole + fixed), 10 ** len(fixed))
    value += Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
    return Number(-value if sign == "-" else value)


def parse_decimal_comma(text: str) -> Number | None:
    """Read the European `1,22` as 1.22; the caller must know that the other side is a decimal."""
    return (
        parse_literal(text.replace(",", "."))
        if len(text) <= MAX_DIGITS and _DECIMAL_COMMA.fullmatch(text)
        else None
    )


def numbers_equal(left: Number, right: Number) -> bool:
    """Compare exactly; a long decimal also equals the fraction that it rounds.

    `0.333333` equals `1/3`, `0.3333` does not, and two decimals are never "close".
    """
    if left.value == right.value:
        return True
    if left.is_decimal == right.is_decimal:
        return False
    decimal, other = (left, right) if left.is_decimal else (right, left)
    return is_rounding(decimal, abs(other.value), abs(decimal.value - other.value))


def is_rounding(decimal: Number, magnitude: Fraction, difference: Fraction) -> bool:
    """Say whether a decimal may stand for a value that it cannot spell out.

    Args:
        decimal: A decimal literal.
        magnitude: |value| of the other side.
        difference: |decimal - value|.

    Returns:
        True with at least six significant digits, a relative error of at most 1e-6 and an error of at most
        one unit in the last written place (plus what double precision loses).
    """
    if decimal.num_digits < MIN_ROUNDED_DIGITS:
        return False
    return difference <= magnitude * ROUNDING and difference <= decimal.last_place + magnitude / 10**12
