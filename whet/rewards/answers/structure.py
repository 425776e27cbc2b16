"""The shape of an answer: a leaf, a sequence (tuple, interval, set, matrix, list) or an equation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from whet.rewards.answers.calculator import NoValueError, evaluate_at, evaluate_exactly
from whet.rewards.answers.expression import FUNCTIONS, OF_MEMBERS, Node, ParseError, parse_expression
from whet.rewards.answers.inequalities import as_interval
from whet.rewards.answers.latex import (
    MATRIX_CLOSE,
    MATRIX_OPEN,
    ROW_BREAK,
    SET_CLOSE,
    SET_OPEN,
    WORD_CLOSE,
    WORD_OPEN,
)
from whet.rewards.answers.matrices import work_out
from whet.rewards.answers.numbers import Number, parse_literal, parse_number
from whet.rewards.answers.units import split_unit, unit_scale

MAX_NESTING = 8
UNORDERED_KINDS = frozenset({"set", "any", "union", "∩", "∖"})
"""Kinds whose order never matters; 'bare' (commas without brackets) adopts the other side's kind."""

_OPEN, _CLOSE = "([{" + SET_OPEN + MATRIX_OPEN + WORD_OPEN, ")]}" + SET_CLOSE + MATRIX_CLOSE + WORD_CLOSE
_PAIRS = {
    "(": ")]",
    "[": ")]",
    "{": "}",
    SET_OPEN: SET_CLOSE,
    MATRIX_OPEN: MATRIX_CLOSE,
    WORD_OPEN: WORD_CLOSE,
}
_TOKEN = re.compile(
    rf"[{re.escape(_OPEN + _CLOSE)}]|(?:, {{0,2}}| )?(?<![A-Za-zÀ-ɏ])(?:or|and)(?![A-Za-zÀ-ɏ]) ?"
    rf"|[,;\n{ROW_BREAK}∪∩∖=∈≈<>≤≥≠]"
)
_MARKED_JOIN = re.compile(rf" ?{WORD_OPEN}[\s,;]*(or|and)[\s,;]*{WORD_CLOSE} ?")
NAME = re.compile(r"[({]{0,2}[A-Za-z\\∠△❮|][A-Za-z0-9_{}\\(),:/ |'∠△°❮❯^=<>≤≥-]{0,60}")
"""The left side of `f(x) = ...`, `|AB| = ...`, `P(X = 2) = ...`: a name followed by its value."""
_CONSTRUCTOR = re.compile(
    r"(?:np\.|numpy\.|torch\.|sp\.)?(?:array|tensor|matrix|Matrix|vector|Vector)(?=[(\[])"
)
_SET_BUILDER = re.compile(r"([A-Za-z])(?: ?∈ ?ℝ)? ?[|:](?=.*[<>≤≥≠])(.+)")
_GROUPED = re.compile(r"(?<![0-9,.])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")
_TRANSPOSED = re.compile(r"\^ ?\{? ?T ?\}?$")
_TRIG = re.compile("|".join(FUNCTIONS))
_ALPHABETIC = re.compile(r"[A-Za-z .,'-]+")
_WORD = re.compile(r"[A-Za-z]{3}")


class Leaf:
    """An answer without inner structure; its readings are computed on demand and cached."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def parts(self) -> tuple[str, str, bool]:
        """(text without unit, unit, whether it is a percentage)."""
        core, unit = split_unit(self.text)
        is_percent = core.endswith("%")
        core = core.rstrip("% ") if is_percent else core
        if "°" in core and not _TRIG.search(core):
            unit = unit or ("degree" if core.endswith("°") else "")
            core = core.replace("°", "").strip()
        if "," in core and not any(name in core for name in OF_MEMBERS):
            core = _GROUPED.sub(lambda match: match.group().replace(",", ""), core)
        return core, unit, is_percent

    @cached_property
    def tree(self) -> Node | None:
        """The expression, or None for words and anything beyond the grammar."""
        core = self.parts[0]
        if (
            _WORD.search(core)
            and _ALPHABETIC.fullmatch(core)
            and not _TRIG.match(core)
            and not set(core) <= set("xyz- ")
        ):
            return None
        try:
            return parse_expression(core) if core else None
        except ParseError:
            return None

    @cached_property
    def number(self) -> Number | None:
        """The exact rational value; scale words ('million') are multiplied in."""
        core, unit, _ = self.parts
        number = parse_number(core)
        if number is None and self.tree is not None:
            try:
                number = Number(evaluate_exactly(self.tree))
            except NoValueError:
                return None
        scale = unit_scale(unit) if unit else 1
        if number is None or scale == 1:
            return number
        return Number(number.value * scale, number.is_decimal)

    def as_sequence(self) -> Sequence | None:
        """Read `60 270 90` or `100,200` as a list, for comparison with one."""
        for separator, kind in ((" ", "lines"), (",", "bare")):
            pieces = self.text.split(separator)
            if len(pieces) > 1 and all(piece == "" or parse_literal(piece) for piece in pieces):
                return Sequence(kind, tuple(Leaf(piece) for piece in pieces if piece))
        return None


@dataclass(frozen=True, slots=True)
class Sequence:
    """Several answers.

    Attributes:
        kind: 'tuple' (bracketed), 'matrix', 'lines', 'bare' (commas only), 'set', 'any' (or, and, ±),
        'union'. items: The members.
        brackets: Opening and closing bracket of a tuple or interval, else ''.
    """

    kind: str
    items: tuple[Value, ...]
    brackets: str = ""


@dataclass(frozen=True, slots=True)
class Equation:
    """Members of `a = b = c`; with another sign, the two sides of `a < b`, `a ≤ b` or `a ≠ b`."""

    members: tuple[str, ...]
    sign: str = "="


@dataclass(frozen=True, slots=True)
class Rounded:
    """`2/3 ≈ 0.67`: a value and its correct rounding."""

    exact: Value
    decimal: Value


Value = Leaf | Sequence | Equation | Rounded


def parse_value(text: str, nesting: int = 0, in_brackets: bool = False) -> Value:
    """Read the structure of cleaned text.

    Args:
        text: Cleaned text (see `whet.rewards.answers.latex`).
        nesting: Depth of this call.
        in_brackets: True inside a bracket, where a comma always separates.

    Returns:
        The value; text without structure is a `Leaf`.
    """
    text = _MARKED_JOIN.sub(r" \1 ", text).strip() if WORD_OPEN in text else text.strip()
    if nesting > MAX_NESTING or not text:
        return Leaf(text)
    tokens, whole = _top_level(text)
    marks = {token.group().strip(" ,") or "," for token in tokens}
    for finder in (_split_list, _split_signs, _split_relation):
        value = finder(text, tokens, marks, nesting, in_brackets)
        if value is not None:
            return value
    if whole:
        value = _unwrap(text, nesting)
        if value is not None:
            return value
    if text.endswith(MATRIX_CLOSE) or text[-1:] == ")" or text[-1:] == "]":
        return _scaled_or_named(text, nesting) or Leaf(text)
    return Leaf(text)


def _scaled_or_named(text: str, nesting: int) -> Value | None:
    r"""Read `\frac12 ⟦2,4⟧` as the matrix of the products, and `array([1, 2])` as `[1, 2]`."""
    constructor = _CONSTRUCTOR.match(text)
    if constructor:
        value = parse_value(text[constructor.end() :].strip("()"), nesting + 1)
        return Sequence("matrix", value.items) if isinstance(value, Sequence) else value
    result = work_out(text) if MATRIX_OPEN in text else None
    return parse_value(result, nesting + 1) if result is not None else None


def _top_level(text: str) -> tuple[list[re.Match[str]], bool]:
    """Return the separators outside all brackets, and whether one pair of brackets encloses everything."""
    separators: list[re.Match[str]] = []
    stack: list[str] = []
    whole = text[0] in _OPEN
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark in _OPEN:
            stack.append(mark)
        elif mark in _CLOSE:
            if stack and mark in _PAIRS[stack[-1]]:
                stack.pop()
            if not stack and token.end() < len(text):
                rest = text[token.end() :]
                whole = whole and _TRANSPOSED.fullmatch(rest.strip()) is not None
        elif not stack:
            separators.append(token)
    return separators, whole and not stack and text[-1] not in "".join(_OPEN)


def _pieces(text: str, tokens: list[re.Match[str]]) -> list[str]:
    bounds = [0, *(edge for token in tokens for edge in token.span()), len(text)]
    return [text[start:end].strip() for start, end in zip(bounds[::2], bounds[1::2], strict=True)]


def _split_list(
    text: str, tokens: list[re.Match[str]], marks: set[str], nesting: int, in_brackets: bool
) -> Value | None:
    """Split at line breaks, else at commas, semicolons, 'or' and 'and'."""
    lines = [token for token in tokens if token.group() in ("\n", ROW_BREAK)]
    if lines:
        pieces = [piece.rstrip(",;") for piece in _pieces(text, lines) if piece.strip(",; ")]
        if len(pieces) == 1:
            return parse_value(pieces[0], nesting + 1, in_brackets)
        return Sequence("lines", tuple(parse_value(piece, nesting + 1, in_brackets) for piece in pieces))
    if not marks & {",", ";", "or", "and"}:
        return None
    splits = [token for token in tokens if token.group().strip(" ,") in ("", ";", "or", "and")]
    if {",", ";"} <= marks and not marks & {"or", "and"}:  # rows: `1, 2; 3, 4`
        splits = [token for token in tokens if token.group() == ";"]
    if not in_brackets:
        splits = _without_grouping(text, splits)
    if not splits:
        return None
    items: list[Value] = []
    for piece in _pieces(text, splits):
        item = parse_value(piece, nesting + 1)
        signed = isinstance(item, Sequence) and item.kind == "any"
        items.extend(item.items if isinstance(item, Sequence) and signed else [item])
    return Sequence("any" if "or" in marks else "bare", tuple(items))


def _without_grouping(text: str, splits: list[re.Match[str]]) -> list[re.Match[str]]:
    """Skip thousands commas, if every other comma is followed by a space (`1,234, 5,678`)."""
    grouping = {
        index
        for match in _GROUPED.finditer(text)
        for index in range(match.start(), match.end())
        if text[index] == ","
    }
    others = [token for token in splits if token.start() not in grouping]
    spaced = all(token.group() != "," or text[token.end() : token.end() + 1] in " \\-" for token in others)
    return others if spaced else splits


def _split_signs(
    text: str, tokens: list[re.Match[str]], marks: set[str], nesting: int, in_brackets: bool
) -> Value | None:
    """Expand `a ± b` into two answers."""
    if "±" not in text or text[0] in "([" + SET_OPEN + MATRIX_OPEN and text[-1] in _CLOSE:
        return None
    upper = text.replace("±", "+").replace("∓", "-")
    lower = text.replace("±", "-").replace("∓", "+")
    return Sequence(
        "any", (parse_value(upper, nesting + 1, in_brackets), parse_value(lower, nesting + 1, in_brackets))
    )


def _split_relation(
    text: str, tokens: list[re.Match[str]], marks: set[str], nesting: int, in_brackets: bool
) -> Value | None:
    """Read unions, `x ∈ A`, rounded asides, inequalities in one variable, and equations."""
    for sign in "∪∖∩":
        if sign in marks and not marks & set("=∈<>≤≥≠≈"):
            pieces = _pieces(text, [token for token in tokens if token.group() == sign])
            return _combined(sign, tuple(parse_value(piece, nesting + 1) for piece in pieces))
    if "∈" in marks:
        name, _, rest = text.partition("∈")
        return parse_value(rest, nesting + 1) if NAME.fullmatch(name.strip()) else None
    if "≈" in marks:
        return _rounded(text, nesting)
    if marks & set("<>≤≥≠"):
        return _relation([t for t in tokens if t.group() in "<>≤≥≠="], text, nesting)
    if "=" in marks:
        members = _pieces(text, [token for token in tokens if token.group() == "="])
        return Equation(tuple(members)) if all(members) else None
    return None


def _combined(sign: str, items: tuple[Value, ...]) -> Sequence:
    """Flatten a union, and merge sets of numbers into one set; keep intersections and differences."""
    if sign != "∪":
        return Sequence(sign, items)
    flat: list[Value] = []
    for item in items:
        flat.extend(item.items if isinstance(item, Sequence) and item.kind == "union" else (item,))
    sets = [item for item in flat if isinstance(item, Sequence) and item.kind in ("set", "bare")]
    if len(sets) == len(flat):
        return Sequence("set", tuple(member for item in sets for member in item.items))
    return Sequence("union", tuple(flat))


def _rounded(text: str, nesting: int) -> Value | None:
    r"""Read `2/3 ≈ 0.67` as either side if the rounding is correct, else as the exact side alone."""
    head, _, tail = text.partition("≈")
    decimal, exact = Leaf(tail.strip()).number, parse_value(head, nesting + 1)
    value = _real_value(head.rpartition("=")[2].strip())
    if value is None:
        is_name = "=" not in head and NAME.fullmatch(head.strip()) is not None
        return parse_value(tail, nesting + 1) if is_name and decimal is not None else None
    if decimal is None or (isinstance(exact, Leaf) and exact.number is not None and exact.number.is_decimal):
        return exact
    unit = decimal.last_place if decimal.num_digits else decimal.last_place / 2
    is_rounding = abs(value - float(decimal.value)) <= float(unit) * (1 + 1e-9)
    return Rounded(exact, parse_value(tail, nesting + 1)) if is_rounding else exact


def _real_value(text: str) -> float | None:
    """Return the value of a real constant, or None."""
    leaf = Leaf(text)
    if leaf.number is not None:
        return float(leaf.number.value) if abs(leaf.number.value) < 10**300 else None
    if leaf.tree is None or leaf.tree.variables():
        return None
    try:
        value, _ = evaluate_at(leaf.tree, {})
    except (ArithmeticError, ValueError):
        return None
    return value.real if abs(value.imag) <= 1e-12 * abs(value) else None


def _relation(signs: list[re.Match[str]], text: str, nesting: int) -> Value | None:
    """Read relations as intervals if they bound one variable; keep the two sides of any other."""
    members = _pieces(text, signs)
    operators = [sign.group() for sign in signs]
    if operators[0] in ">≥":
        members, operators = members[::-1], [{">": "<", "≥": "≤"}.get(sign, sign) for sign in operators[::-1]]
    if not all(members):
        return None
    interval = as_interval(members, operators)
    if interval is not None:
        return parse_value(interval, nesting + 1)
    return Equation(tuple(members), operators[0]) if len(members) == 2 and operators[0] in "<≤≠" else None


def _unwrap(text: str, nesting: int) -> Value | None:
    """Read the inside of the one pair of brackets around the text."""
    text = _TRANSPOSED.sub("", text).strip()
    opening, closing, inner = text[0], text[-1], text[1:-1].strip()
    if closing not in _PAIRS[opening]:
        return None
    if opening == WORD_OPEN:
        return parse_value(inner.strip(" .,"), nesting + 1)
    if opening in "([" + MATRIX_OPEN:
        inner = (
            re.sub(r"([\])⟧])\s*(?=[(\[⟦])", r"\1,", inner)
            if opening == "[" and inner[:1] in ("[", "(")
            else inner
        )
    value = parse_value(inner, nesting + 1, in_brackets=True)
    if isinstance(value, Leaf) and opening in "[" + MATRIX_OPEN:
        value = value.as_sequence() or value
    is_list = isinstance(value, Sequence) and value.kind in ("bare", "lines")
    builder = _SET_BUILDER.fullmatch(inner) if opening == SET_OPEN else None
    if builder:
        return parse_value(builder[2], nesting + 1)
    if opening in "{" + SET_OPEN:
        if is_list and isinstance(value, Sequence):  # plain braces do not show in LaTeX: a list, maybe a set
            return Sequence("set" if opening == SET_OPEN else "bare", value.items)
        return Sequence("set", (value,)) if opening == SET_OPEN and inner else value if inner else Leaf("∅")
    if is_list and isinstance(value, Sequence):
        if opening == MATRIX_OPEN:
            return Sequence("matrix", value.items)
        rows = _rows(value.items, opening + closing)
        return Sequence("matrix", rows) if rows else Sequence("tuple", value.items, opening + closing)
    if opening + closing in ("()", "[]") or opening == MATRIX_OPEN:
        return value
    return None


def _rows(items: tuple[Value, ...], brackets: str) -> tuple[Value, ...]:
    """Strip the brackets of the rows of `((1,2),(3,4))`, which then are not intervals."""
    rows = [item for item in items if isinstance(item, Sequence) and item.brackets == brackets]
    if len(rows) < 2 or len(rows) < len(items) or len({len(row.items) for row in rows}) > 1:
        return ()
    return tuple(Sequence("matrix", row.items) for row in rows)
