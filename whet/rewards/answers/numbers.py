"""Written numbers -> exact fractions, by a strict ASCII grammar.

`int` and `float` accept what no grader should (`1_0`, 'nan', 'inf') and raise on 5,000 digits; this parser does
neither. Digits of other scripts are folded before (`whet.rewards.answers.scripts`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 1000
"""Longest number (in characters) that is read as a number; longer ones are compared as text."""
MAX_EXPONENT = 1000
"""Largest power of ten in scientific notation."""
MIN_ROUNDED_DIGITS = 4
"""A decimal stands for an irrational or a repeating fraction only with this many significant digits."""
MIN_TRUNCATED_DIGITS = 6
"""With this many, the last one may also be truncated instead of rounded."""
MIN_SHORTENED_DIGITS = 5
"""A decimal stands for a longer decimal only with this many, four of them after the point (money has two)."""

_UNSIGNED = (
    r"(?:(?P<whole>[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.(?P<part>[0-9]*))?|\.(?P<bare>[0-9]+))"
    r"(?:[eE](?P<exp>[+-]?[0-9]{1,4}))?"
)
_NUMBER = re.compile(rf"(?P<sign>[+-]?) ?{_UNSIGNED}")
_FRACTION = re.compile(r"([^/]+?) ?/ ?([^/]+)")
_MIXED = re.compile(r"([+-]?) ?([0-9]+) +([0-9]+) ?/ ?([0-9]+)")
_REPEATING = re.compile(
    r"([+-]?)([0-9]*)\.([0-9]*)(?:\\(?:overline|bar|dot) ?(?:\{([0-9]{1,40})\}|([0-9]))|\(([0-9]{1,40})\))"
)
_SCIENTIFIC = re.compile(
    r"([+-]?[0-9][0-9,]*(?:\.[0-9]*)?) ?\* ?10 ?\^ ?(?:\{ ?([+-]?[0-9]{1,4}) ?\}|([+-]?[0-9]{1,4}))"
)
_SPACED = re.compile(r"[+-]?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]+)?")
_DECIMAL_COMMA = re.compile(r"[+-]?(?:[0-9]+|[1-9][0-9]{0,2}(?:(?:\.[0-9]{3})+|(?: [0-9]{3})+)),[0-9]+")
_COMMAS = re.compile(
    r"(?<![0-9.,])([1-9][0-9]{0,2}(?:(?:\.[0-9]{3})+|(?: [0-9]{3})+)|[0-9]+),([0-9]{1,2}|[0-9]{4,})"
    r"(?![0-9]|[.,][0-9])"
)
_GROUPS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:\.[0-9]{3})+(?![0-9]|[.,][0-9])")
_GROUPED = re.compile(rf"[^0-9]*{_GROUPS.pattern}[^0-9]*")
_AROUND = re.compile(r"^[^0-9]+|[^0-9]+$")
_DOTTED = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}")


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value and the precision of its spelling.

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
    """Read a number in any plain spelling: literal, `a/b`, `1 1/2`, `0.\\overline{3}`, `12 345` or `1.2*10^5`.

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
    if "*" in text:
        power = _SCIENTIFIC.fullmatch(text)
        return parse_literal(f"{power[1]}e{power[2] or power[3]}") if power else None
    if "\\" in text or text.endswith(")"):
        return _parse_repeating(text)
    if " " in text and _SPACED.fullmatch(text):
        return parse_literal(text.replace(" ", ""))
    return parse_literal(text.replace(".", "")) if text.count(".") > 1 and _DOTTED.fullmatch(text) else None


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
    sign, whole, fixed, cycle = match[1], match[2] or "0", match[3], match[4] or match[5] or match[6]
    value = Fraction(int(whole + fixed), 10 ** len(fixed))
    value += Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
    return Number(-value if sign == "-" else value)


def parse_decimal_comma(text: str) -> Number | None:
    """Read the European `1,22` and `1.234,56`; the caller must know that the other side is a decimal."""
    return (
        parse_literal(re.sub("[. ]", "", text).replace(",", "."))
        if len(text) <= MAX_DIGITS and _DECIMAL_COMMA.fullmatch(text)
        else None
    )


def with_points(text: str, *, has_groups: bool = False) -> str:
    """Write a text's decimal commas as points: `R$ 1.234,50` as `R$ 1234.50`; `1,234` may be thousands, and stays.

    Args:
        text: Any text.
        has_groups: Whether points group thousands: `1.700` is written as `1700`.
    """
    text = _COMMAS.sub(lambda match: re.sub("[. ]", "", match[1]) + "." + match[2], text)
    return _GROUPS.sub(lambda match: match[0].replace(".", ""), text) if has_groups else text


def both_with_points(prediction: str, gold: str) -> tuple[str, str]:
    """Write the decimal commas of an answer and its gold answer as points; the gold answer's points group thousands.

    Those of the answer do where the gold answer is that large: `1.700` is then `1700`, and beside `1,7` it is 1.7.
    """
    read = with_points(gold, has_groups=True)
    number = parse_number(_AROUND.sub("", read))  # without its unit
    is_large = read != with_points(gold) or (number is not None and abs(number.value) >= 1000)
    return with_points(prediction, has_groups=is_large), read


def decimal_comma(text: str, *, is_likely: bool = False) -> bool | None:
    """Say whether a number is written with a decimal comma: None where it might as well be a list, or has neither.

    `1,05` and `1.234,5` have one for certain, for no list has a member 05 (`1,0` may be one); `12.5`, `1,234` and
    `1, 2` have none.

    Args:
        text: The number, whatever stands around it.
        is_likely: Whether `1,5` has one, too: where semicolons part the columns of its file.
    """
    text = _AROUND.sub("", text)
    found = _COMMAS.fullmatch(text)
    if found is not None:
        return True if is_likely or re.match("0.", found[2]) or not found[1].isdecimal() else None
    return False if not is_grouped(text) and re.search(r"[0-9][.,] ?[0-9]", text) else None


def is_grouped(text: str) -> bool:
    """Say whether a number's points may group its thousands, as in `1.700`, whatever stands around it."""
    return _GROUPED.fullmatch(text) is not None


def numbers_equal(left: Number, right: Number) -> bool:
    """Compare exactly; a decimal also equals the fraction or the longer decimal that it rounds.

    `0.3333` equals `1/3` and `3.1416` equals `3.14159`; `0.333` does not, and `0.3334` equals nothing else.
    """
    if left.value == right.value:
        return True
    if left.is_decimal and right.is_decimal:
        short = left if left.last_place > right.last_place else right
        is_shortened = short.num_digits >= MIN_SHORTENED_DIGITS and short.last_place <= Fraction(1, 10**4)
        return is_shortened and abs(left.value - right.value) <= short.last_place / 2
    if not left.is_decimal and not right.is_decimal:
        return False
    decimal, other = (left, right) if left.is_decimal else (right, left)
    return is_rounding(decimal, abs(other.value), abs(decimal.value - other.value))


def is_rounding(decimal: Number, magnitude: Fraction, difference: Fraction) -> bool:
    """Say whether a decimal is a valid rounding of a value.

    Args:
        decimal: A decimal literal.
        magnitude: |value| of the other side.
        difference: |decimal - value|.

    Returns:
        True if it has digits after the point and at least four significant ones, all correct: an error of at most half
        a unit in the last place, from six digits on one unit (plus the error of double precision).
    """
    if decimal.num_digits < MIN_ROUNDED_DIGITS or decimal.last_place >= 1:
        return False
    units = 1 if decimal.num_digits >= MIN_TRUNCATED_DIGITS else Fraction(1, 2)
    return difference <= decimal.last_place * units + magnitude / 10**12


_ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_WORD_VALUES = {word: value for value, word in enumerate(_ONES.split())} | {
    word: 10 * value for value, word in enumerate(_TENS.split(), start=2)
}


_ORDINAL_NAMES = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
_ORDINAL_WORDS = _ORDINAL_NAMES.split()
_ORDINALS = {word: f"{value}th" for value, word in enumerate(_ORDINAL_WORDS, start=1)} | {
    "first": "1st",
    "second": "2nd",
    "third": "3rd",
}
_PARTS = {"half": 2, "halves": 2, "quarter": 4, "quarters": 4} | {
    f"{word}{plural}": value
    for value, word in enumerate(_ORDINAL_WORDS, start=1)
    if value > 2
    for plural in ("", "s")
}


def spelled_number(text: str) -> str | None:
    """Read an English number word below a million ("forty-two", "one hundred and five"), an ordinal or a fraction.

    Args:
        text: Stripped text.

    Returns:
        Its digits, or None if a word is not a number or is in the wrong place.
    """
    words = re.split(r"[ -]+", text.lower()) if len(text) <= 80 else []
    if len(words) > 1 and words[-1] == "dozen":
        many = " ".join(words[:-1])
        number = {"a": "1", "half a": "1/2"}.get(many) or spelled_number(many)
        return str(12 * Fraction(number)) if number and not number[-1].isalpha() else None
    if len(words) == 1 and words[0] in _ORDINALS:
        return _ORDINALS[words[0]]
    if len(words) > 1 and words[-1] in _PARTS:  # three quarters, a half
        top = "1" if words[:-1] in (["a"], ["one"]) else spelled_number(" ".join(words[:-1]))
        return f"{top}/{_PARTS[words[-1]]}" if top is not None and top.isdecimal() else None
    total = part = 0
    room = 1000  # the next word must be smaller: "five twenty" is not a number, nor is "two three"
    for index, word in enumerate(words):
        if word == "hundred" and 0 < part < 10:
            part, room = part * 100, 100
        elif word == "thousand" and part and not total:
            total, part, room = part * 1000, 0, 1000
        elif word == "and" and 0 < index < len(words) - 1 and words[index - 1] in ("hundred", "thousand"):
            continue
        else:
            value = _WORD_VALUES.get(word)
            if value is None or value >= room or (value == 0 and len(words) > 1):
                return None
            part, room = part + value, 10 if value >= 20 else 0
    return str(total + part) if words and words[-1] != "and" else None
