r"""Sums and products of matrices, computed on their text: `2 ⟦1,2⟧ + ⟦x,0⟧` becomes `⟦(2)*(1)+(x),...⟧`.

Entries stay text: the calculator compares them later. A factor that is not a matrix is a scalar.
"""

from __future__ import annotations

import re

from whet.rewards.answers.latex import MATRIX_CLOSE, MATRIX_OPEN, SET_OPEN

MAX_SIDE = 6
"""Most rows and columns of a computed matrix."""
MAX_ENTRY = 300
"""Longest entry, in characters."""
_OPEN, _CLOSE = "([{" + SET_OPEN + MATRIX_OPEN, ")]}⦄" + MATRIX_CLOSE
_BRACKETED = re.compile(r"[\[(] ?(⟦(?:[^⟦⟧]|⟦[^⟦⟧]*⟧)*⟧) ?[\])]")
Rows = list[list[str]]


def work_out(text: str) -> str | None:
    r"""Compute a formula over matrices.

    Args:
        text: Cleaned text (see `whet.rewards.answers.latex`) with at least one matrix.

    Returns:
        The resulting matrix or determinant as cleaned text; None if the formula has another form, the sizes do not fit,
        or it is a single matrix.
    """
    if text.startswith("\\det"):
        rows = _rows(text[4:].strip())
        return _determinant(rows) if rows and len(rows) == len(rows[0]) <= 3 else None
    total: Rows | None = None
    terms = _cut(_BRACKETED.sub(r"\1", text), "+-")
    if len(terms) == 1 and terms[0][0] == "+" and len(_factors(terms[0][1])) == 1:
        return None
    for sign, term in terms:
        product = _product(term)
        if product is None:
            return None
        if sign == "-":
            product = [[f"-({entry})" for entry in row] for row in product]
        total = product if total is None else _sum(total, product)
        if total is None or _is_long(total):
            return None
    return _spell(total) if total else None


def _cut(text: str, signs: str) -> list[tuple[str, str]]:
    """Split at the given signs outside brackets: (preceding sign, piece)."""
    pieces: list[tuple[str, str]] = []
    depth = start = 0
    sign = "+"
    for position, character in enumerate(text):
        if character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        elif depth == 0 and character in signs:
            if text[start:position].strip():
                pieces.append((sign, text[start:position].strip()))
            sign, start = character, position + 1
    return [*pieces, (sign, text[start:].strip())]


def _factors(term: str) -> list[str]:
    """Split a product into matrices and the text between them."""
    factors: list[str] = []
    position = 0
    while (start := term.find(MATRIX_OPEN, position)) >= 0:
        depth, end = 0, start
        while end < len(term):
            depth += (term[end] == MATRIX_OPEN) - (term[end] == MATRIX_CLOSE)
            end += 1
            if depth == 0:
                break
        factors += [term[position:start], term[start:end]]
        position = end
    return [factor.strip(" *") for factor in [*factors, term[position:]] if factor.strip(" *")]


def _rows(text: str) -> Rows | None:
    """Read `⟦⟦a,b⟧,⟦c,d⟧⟧` as rows, and `⟦a,b⟧` as a column."""
    if not (text.startswith(MATRIX_OPEN) and text.endswith(MATRIX_CLOSE)):
        return None
    cells = [piece for _, piece in _cut(text[1:-1], ",")]
    rows = [
        [entry for _, entry in _cut(cell[1:-1], ",")] if cell[:1] == MATRIX_OPEN else [cell] for cell in cells
    ]
    is_even = len({len(row) for row in rows}) == 1
    return rows if is_even and max(len(rows), len(rows[0])) <= MAX_SIDE and all(map(all, rows)) else None


def _product(term: str) -> Rows | None:
    result: Rows | None = None
    scalars: list[str] = []
    for factor in _factors(term):
        if MATRIX_OPEN not in factor:
            if any(character in factor for character in "^,;=<>") or factor[-1:] in "/":
                return None
            scalars.append(f"({factor})")
            continue
        rows = _rows(factor)
        if rows is None:
            return None
        result = rows if result is None else _times(result, rows)
        if result is None or _is_long(result):
            return None
    if result is None or not scalars:
        return result
    return [["*".join([*scalars, f"({entry})"]) for entry in row] for row in result]


def _is_long(rows: Rows) -> bool:
    """Say whether an entry has outgrown the cap: every further factor would multiply it."""
    return any(len(entry) > MAX_ENTRY for row in rows for entry in row)


def _times(left: Rows, right: Rows) -> Rows | None:
    if len(left[0]) != len(right):
        return None
    columns = list(zip(*right, strict=True))
    return [
        ["+".join(f"({a})*({b})" for a, b in zip(row, column, strict=True)) for column in columns]
        for row in left
    ]


def _sum(left: Rows, right: Rows) -> Rows | None:
    if (len(left), len(left[0])) != (len(right), len(right[0])):
        return None
    return [[f"({a})+({b})" for a, b in zip(*rows, strict=True)] for rows in zip(left, right, strict=True)]


def _determinant(rows: Rows) -> str:
    """Expand along the first row."""
    if len(rows) == 1:
        return rows[0][0]
    terms: list[str] = []
    for column, entry in enumerate(rows[0]):
        minor = [row[:column] + row[column + 1 :] for row in rows[1:]]
        terms.append(f"{'-' if column % 2 else '+'}({entry})*({_determinant(minor)})")
    return "".join(terms).lstrip("+")


def _spell(rows: Rows) -> str:
    if all(len(row) == 1 for row in rows):
        return MATRIX_OPEN + ",".join(row[0] for row in rows) + MATRIX_CLOSE
    return (
        MATRIX_OPEN + ",".join(f"{MATRIX_OPEN}{','.join(row)}{MATRIX_CLOSE}" for row in rows) + MATRIX_CLOSE
    )
