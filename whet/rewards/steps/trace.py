"""The arithmetic expressions of a trace, each with its exact value, for the step audit.

Anything that is not certainly plain arithmetic (a variable, a function, an odd notation) is marked: a false alarm costs
more than a miss. One pass over the tokens; nothing is evaluated as code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from whet.rewards.steps.tokens import (
    CLAUSE_WORDS,
    CONTEXT_WORDS,
    END,
    LABEL_WORDS,
    MEASURES,
    OPERANDS,
    Token,
    changes_value,
    is_sign,
    is_word,
    singular,
    symbol,
)

MAX_DEPTH = 20
"""Deepest nesting of parentheses that is read."""
ONE = Fraction(1)
MAX_DIGITS, MAX_EXPONENT, MAX_BITS = 40, 64, 2048
"""Characters of a number, size of an exponent, bits of any intermediate value."""
MAX_UNIT_WORDS = 7
"""Most words between a number and the operator after it: `6 tubs of lip gloss * 2`."""


class Pair(NamedTuple):
    """A value with `%` read as hundredths, and with `%` read as a unit: people write `100% - 30% = 70`."""

    value: Fraction
    bare: Fraction


@dataclass(slots=True)
class Side:
    """One maximal arithmetic expression: tokens [start, end).

    Attributes:
        start: Index of its first token.
        end: Index after its last token, units included.
        plain: False when it is not certainly plain arithmetic; its value then means nothing.
        value: Its value.
        first: Value of its first number: a running sum continues from there.
        share: Value of the part before `of`: `3/3 - 2/3 = 1/3 of $150`.
        place: One unit of the last digit when the side is a single written number, else None.
        num_operators: Operators in it.
        has_percent: A percentage is in it.
        has_whole: 100% is in it: `9/27 * 100% = 33`.
        has_product: A product or quotient is in it.
        has_unit: A unit is in it or after it.
        is_label: It is a bare number next to words: `4 bedrooms`, `Week 2`.
        measures: Its convertible units.
    """

    start: int
    end: int = 0
    plain: bool = True
    value: Pair = Pair(Fraction(0), Fraction(0))
    first: Pair | None = None
    share: Pair | None = None
    place: Fraction | None = None
    num_operators: int = 0
    has_percent: bool = False
    has_whole: bool = False
    has_product: bool = False
    has_unit: bool = False
    is_label: bool = False
    measures: set[str] = field(default_factory=set)


def read_sides(tokens: list[Token]) -> list[Side]:
    """Find every maximal expression in the tokens of a trace, in order."""
    return _Reader(tokens).read_sides()


class _Reader:
    """Recursive descent over the tokens; every token is passed once."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.broken = -1  # where parsing last failed: what starts there is a fragment
        self.side = Side(0)

    def peek(self, ahead: int = 0) -> Token:
        index = self.at + ahead
        return self.tokens[index] if 0 <= index < len(self.tokens) else END

    def read_sides(self) -> list[Side]:
        """Read every expression, in order."""
        sides: list[Side] = []
        while self.at < len(self.tokens):
            start, dangling = self.at, False
            if self.peek().kind == "operator":
                dangling = self._is_dangling()
                is_minus = self.peek(1).glued or self.peek(-1).kind in ("equals", "open")
                if dangling or not (is_sign(self.peek()) and is_minus):  # else a bullet: `- 3 + 4 = 7`
                    self.at += 1
            if not self._operand_follows(0):
                self.at = max(self.at, start + 1)
                continue
            self.side = Side(start=start if dangling else self.at)
            self.side.plain = not dangling and self.at != self.broken and self._has_clean_start()
            self._read_side()
            sides.append(self.side)
        return sides

    def _read_side(self) -> None:
        side = self.side
        try:
            side.value = self._sum(0)
        except (ArithmeticError, ValueError):
            side.plain, self.broken = False, self.at
        after, later = self.peek(), self.peek(1)
        goes_on = (
            changes_value(after)
            or (after.glued and (after.text == "!" or (after.text == ":" and later.glued)))
            or (after.text == "." and later.glued and changes_value(later))  # `83.\\overline{3}`
            or after.kind in ("open", "frac", "number")  # `33 (11 + 55)`, `2 500`
            or (after.text == "and" and self._fraction_follows(1))  # `5 and 2/3`
            or (after.kind == "newline" and later.kind == "operator" and later.text not in ("-", "*"))
        )
        side.plain &= not goes_on
        before_word = side.start > 0 and self.tokens[side.start - 1].kind == "word"
        side.is_label = side.num_operators == 0 and (side.has_unit or before_word)
        side.end = self.at

    def _is_dangling(self) -> bool:
        """Say whether the operator here has a left operand that is not a number (`total - 3`)."""
        before, operator, after = self.peek(-1), self.peek(), self.peek(1)
        if not is_sign(operator):
            return not (operator.text == "*" and before.kind in ("newline", "end"))
        if before.kind == "word":
            return operator.glued or not after.glued
        if before.kind == "newline" and operator.text == "+":
            return True
        is_operand = before.kind in ("close", "percent", "number", "operator") or changes_value(before)
        return is_operand or self.at == self.broken

    def _has_clean_start(self) -> bool:
        """Say whether nothing before the expression changes its value: `f(3)`, `x3`, `8:30`, `half of 20`."""
        first, before, earlier = self.peek(), self.peek(-1), self.peek(-2)
        if changes_value(before) or before.text == "}" or before.kind == "number":
            return False
        if before.kind == "newline" and earlier.kind == "operator":
            return False
        if before.kind == "close" and first.kind in ("open", "frac"):
            return False
        if first.glued and (before.kind in ("word", "close", "percent") or before.text == "!"):
            return False
        if earlier.kind == "number" and (
            (before.text == ":" and first.glued and before.glued)
            or (
                before.text == "," and before.glued and not first.glued and len(first.text) == 3
            )  # `14, 400 / 80`
            or (before.text == "and" and self._fraction_follows(0))
        ):
            return False
        for ahead in (-1, -2, -3):
            word = self.peek(ahead)
            if word.kind != "word":
                return not (before.text == "of" and word.kind in ("percent", "number"))
            if singular(word.text) in (CONTEXT_WORDS if ahead < -1 else CONTEXT_WORDS | LABEL_WORDS):
                return False
        return True

    def _fraction_follows(self, ahead: int) -> bool:
        token, slash = self.peek(ahead), self.peek(ahead + 1)
        return token.kind in ("open", "frac") or (
            token.kind == "number" and slash.text == "/" and slash.glued
        )

    def _operand_follows(self, ahead: int) -> bool:
        token = self.peek(ahead)
        if token.kind == "operator":
            return is_sign(token) and self.peek(ahead + 1).kind in OPERANDS
        return token.kind in OPERANDS

    def _operator(self, allowed: str) -> str | None:
        """Return the operator here if it has a right operand, else handle the open end."""
        token = self.peek()
        if token.kind != "operator":
            return None
        if self._operand_follows(1):
            return symbol(token) if symbol(token) in allowed else None
        self._note_open_end(0)
        return None

    def _note_open_end(self, ahead: int) -> None:
        """Decide what an operator without a following number means: `5 + x`, `5^\\circ`; but ` - he paid` is a dash."""
        operator, after = self.peek(ahead), self.peek(ahead + 1)
        if operator.kind == "operator" and after.kind == "word":
            is_dash = symbol(operator) == "-" and len(after.text) > 1 and not after.text.startswith("\\")
            self.side.plain &= is_dash

    def _sum(self, depth: int) -> Pair:
        total = self._product(depth)
        while operator := self._operator("+-"):
            self.at += 1
            total = self._apply(operator, total, self._product(depth))
        return total

    def _product(self, depth: int) -> Pair:
        total, is_share = self._power(depth)
        while True:
            token = self.peek()
            if operator := self._operator("*/"):
                self.at += 1
                if operator == "/" and self.peek(1).text == "/":
                    self.side.plain &= self.peek().glued or not self.peek(2).glued  # `60 / 3/4` is 60 / (3/4)
                factor, is_share = self._power(depth)
                is_share |= operator == "/"
            elif token.text == "of" and is_share and self._operand_follows(1):
                self.at += 1
                self.side.share = total
                operator, (factor, is_share) = "*", self._power(depth)
            elif token.kind in ("open", "frac") and self._multiplies():
                operator, (factor, is_share) = "*", self._power(depth)
            else:
                return total
            self.side.has_product = True
            total = self._apply(operator, total, factor)

    def _multiplies(self) -> bool:
        """Say whether the group that opens here is a factor: `2(3)`, `(2) (3)`, `\\frac{1}{2} (6)`; not the `24
        (clips)`."""
        before, token = self.peek(-1), self.peek()
        return before.kind == "close" or (token.glued and before.kind == "number")

    def _power(self, depth: int) -> tuple[Pair, bool]:
        """Read a signed factor; also say whether `of` after it multiplies (a percentage or a fraction)."""
        negative = False
        if self.peek().kind == "operator":
            negative = symbol(self.peek()) == "-"
            self.at += 1
        value, is_share = self._atom(depth)
        if self._operator("^"):
            self.at += 1
            minus = self.peek().kind == "operator"
            self.at += minus
            exponent = self._atom(depth)[0].value * (-1 if minus else 1)
            value = self._apply("^", value, Pair(exponent, exponent))
            self.side.plain &= symbol(self.peek()) != "^"
        if negative:
            value = Pair(-value.value, -value.bare)
        if self.side.first is None:
            self.side.first = value
        return value, is_share

    def _atom(self, depth: int) -> tuple[Pair, bool]:
        token = self.peek()
        self.at += 1
        is_share = False
        if token.kind == "money":
            self.side.measures.add("$")
            token = self.peek()
            self.at += 1
        if token.kind == "number":
            value, is_share = self._number(token)
        elif token.kind == "frac":
            value, is_share = self._fraction(depth), True
        else:
            value = self._group(depth)
        if self.peek().kind == "percent":
            self.at += 1
            self.side.has_percent = is_share = True
            self.side.has_whole |= value.bare == 100
            value = Pair(value.value / 100, value.bare)
            self.side.place = None if self.side.place is None else self.side.place / 100
        self._unit()
        return value, is_share

    def _number(self, token: Token) -> tuple[Pair, bool]:
        """Read a number, also the mixed `1 1/2` and `1\frac{1}{2}`."""
        text = token.text
        if len(text) > MAX_DIGITS or (text[0] == "0" and text[1:2].isdigit()):
            raise ValueError("too long, or not a quantity (0900)")
        digits = text if text.isdigit() else re.sub(r"[^0-9.]", "", text)
        decimals = len(digits.partition(".")[2])
        value = Fraction(digits) if decimals else Fraction(int(digits))  # of an integer 5 times as fast
        if self.side.num_operators:
            self.side.place = None
        else:
            self.side.place = Fraction(1, 10**decimals) if decimals else ONE
        if decimals:
            return Pair(value, value), False
        mixed = None
        top, slash, bottom = self.peek(), self.peek(1), self.peek(2)
        if top.kind == "frac" and top.glued:
            self.at += 1
            mixed = self._fraction(0).value
            if not 0 < mixed < 1:
                raise ValueError("a product, or not a number")
        elif (
            (top.kind, slash.text, bottom.kind) == ("number", "/", "number") and slash.glued and bottom.glued
        ):
            self.at += 3
            mixed = Fraction(top.text) / Fraction(bottom.text)
            if not 0 < mixed < 1:
                raise ValueError("two numbers side by side")
        if mixed is not None:
            self.side.place = None
            value += mixed
        return Pair(value, value), mixed is not None

    def _fraction(self, depth: int) -> Pair:
        r"""Read what follows `\frac`: groups or digits."""
        parts: list[Pair] = []
        while len(parts) < 2:
            token = self.peek()
            self.at += 1
            if token.text == "{":
                parts.append(self._group(depth))
            elif token.kind == "number" and token.text.isdigit() and len(token.text) <= 2 - len(parts):
                parts += [Pair(Fraction(digit), Fraction(digit)) for digit in token.text]
            else:
                raise ValueError("no fraction")
        return self._apply("/", *parts)

    def _group(self, depth: int) -> Pair:
        """Read an expression and its closing parenthesis, after the opening one."""
        if depth >= MAX_DEPTH or not self._operand_follows(0):
            raise ValueError("nothing to read")
        value = self._sum(depth + 1)
        if self.peek().kind != "close":
            raise ValueError("not closed")
        self.at += 1
        return value

    def _unit(self) -> None:
        """Skip the unit of a number if an operator or `=` follows; record units that affect the verdict."""
        ahead = 0
        words: list[str] = []
        while ahead < 2 * MAX_UNIT_WORDS:
            token = self.peek(ahead)
            is_joined = token.text in ("/", "-") and token.glued and self.peek(ahead + 1).text.islower()
            if is_joined and self.peek(ahead + 1).glued:
                ahead += 1
            elif token.kind != "word" or token.text[:1] == "\\":
                break
            if ahead == 0 and token.text == "of" and self._operand_follows(1):
                break
            words += singular(self.peek(ahead).text).split()
            ahead += 1
        if not words:
            return
        first = self.peek()
        is_variable = first.kind == "word" and first.glued and not (is_word(first) and words[0] in MEASURES)
        if is_variable or words[0] in CONTEXT_WORDS:  # `3y`, `5 million`
            self.side.plain = False
        if words[0] in MEASURES:
            self.side.measures.add(words[0])
        after = self.peek(ahead)
        if words[0] in MEASURES and (after.kind == "number" and (len(words) == 1 or words[1:] == ["and"])):
            self.side.plain = False  # `2 hours and 30 minutes`
        continues = after.kind == "equals" or (after.kind == "operator" and self._operand_follows(ahead + 1))
        is_unit = not CLAUSE_WORDS & set(words) and words != ["a"] and all(map(_is_unit_word, words))
        if continues and is_unit and len(words) <= MAX_UNIT_WORDS:
            self.side.plain &= words[0] != "of" and symbol(after) != "^" and not CONTEXT_WORDS & set(words)
            self.side.measures |= MEASURES & set(words)
            self.at += ahead
            self.side.has_unit = True
        elif after.kind == "operator" and not self._operand_follows(ahead + 1):
            self._note_open_end(ahead)

    def _apply(self, operator: str, left: Pair, right: Pair) -> Pair:
        self.side.num_operators += 1
        self.side.place = None
        value = _compute(operator, left.value, right.value)
        same = left.value == left.bare and right.value == right.bare
        return Pair(value, value if same else _compute(operator, left.bare, right.bare))


def _is_unit_word(word: str) -> bool:
    return len(word) > 2 or word in MEASURES or word in ("of", "a")


def _compute(operator: str, left: Fraction, right: Fraction) -> Fraction:
    """Compute exactly within bounds, or raise ArithmeticError."""
    if operator == "+":
        value = left + right
    elif operator == "-":
        value = left - right
    elif operator == "*":
        value = left * right
    elif operator == "/":
        value = left / right
    else:
        bits = left.numerator.bit_length() + left.denominator.bit_length()
        if right.denominator != 1 or abs(right) > MAX_EXPONENT or bits * abs(right) > MAX_BITS:
            raise OverflowError("exponent")
        value = left**right.numerator
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise OverflowError("too many digits")
    return value
