"""The task `sudoku`: 4x4 and 9x9, with exactly one solution."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from math import isqrt

from whet.tasks.made.draft import Draft, Draw, FromRows, Generated
from whet.tasks.read import Row
from whet.types import Problem, Task

NUM_PROBLEMS = 4000
NUM_VARIANTS = 8
"""Variants of one generated puzzle, by renaming digits and moving lines; they share its split."""
MAX_CHARACTERS = 2000
SIDES = (4, 4, 9, 9)
EXTRA_CLUES = (3, 0, 2, 0)
"""Clues beyond those needed for a unique solution, by level."""
NUM_TRIED = (0, 10, 0, 20)
"""Clues that we try to remove, one by one, by level."""
_FRAME = re.compile(r"[\s,;|+\-\[\]()]+")

Grid = tuple[int, ...]
"""Cells row by row; 0 is an empty one."""


def sudoku(
    path: str = "", *, level: int = 0, seed: int = 0, num_problems: int = 0, max_bad_rows: int = 0
) -> Task:
    """Return the task `sudoku`: levels 1 and 2 are 4x4, 3 and 4 are 9x9; even ones have few clues.

    Args:
        path: Data with columns puzzle and solution (digits row by row, 0 or . for empty cells); '' draws puzzles.
        level: A single level; 0 mixes them.
        seed: Seed of the draws.
        num_problems: Problems in all splits together; 0 means 4,000.
        max_bad_rows: Bad rows per file that are tolerated.
    """
    if path:
        return FromRows("sudoku", path, _from_row, is_right, answer_type="text", max_bad_rows=max_bad_rows)
    return Generated(
        "sudoku",
        _make,
        is_right,
        num_levels=4,
        num_problems=num_problems or NUM_PROBLEMS,
        answer_type="text",
        level=level,
        seed=seed,
    )


def is_right(problem: Problem, answer: str) -> bool:
    """Say whether an answer is a grid that keeps all clues, with every digit once in each row, column and box.

    Digits may be laid out in any way: in lines, with spaces, commas, brackets or a frame of | + -, or in one run; no
    other characters are permitted.

    Args:
        problem: A problem of this task; its clues are in `meta['puzzle']`.
        answer: Any text.
    """
    puzzle = problem.meta["puzzle"]
    if len(answer) > MAX_CHARACTERS:
        return False
    digits = _FRAME.sub("", answer)
    if len(digits) != len(puzzle) or not digits.isascii() or not digits.isdigit():
        return False
    kept = all(clue in ("0", digit) for clue, digit in zip(puzzle, digits, strict=True))
    side = isqrt(len(puzzle))
    grid = tuple(map(int, digits))
    return kept and all({grid[cell] for cell in unit} == set(range(1, side + 1)) for unit in _units(side))


@cache
def _units(side: int) -> tuple[tuple[int, ...], ...]:
    """Return the cells of every row, then every column, then every box."""
    box = isqrt(side)
    rows = [tuple(range(row * side, (row + 1) * side)) for row in range(side)]
    columns = [tuple(range(column, side * side, side)) for column in range(side)]
    boxes = [
        tuple((top + i) * side + left + j for i in range(box) for j in range(box))
        for top in range(0, side, box)
        for left in range(0, side, box)
    ]
    return (*rows, *columns, *boxes)


@cache
def _places(side: int) -> tuple[tuple[int, int, int], ...]:
    """Return the indices of the three units of every cell."""
    units = _units(side)
    return tuple(tuple(n for n, unit in enumerate(units) if cell in unit) for cell in range(side * side))  # pyright: ignore[reportReturnType]


def solutions(puzzle: Grid, order: list[int]) -> Iterator[tuple[Grid, list[int]]]:
    """Yield the solutions of a puzzle, filling the cell with the fewest candidates first.

    Args:
        puzzle: Its cells.
        order: The digits, in the order in which to try them.

    Yields:
        Solution, and its cells in the order of filling; [] if a cell had to be guessed.
    """
    side = isqrt(len(puzzle))
    places, grid = _places(side), list(puzzle)
    full = 2 ** (side + 1) - 2
    free = [full] * (3 * side)  # bit d is set while the unit lacks digit d

    def flip(cell: int, digit: int) -> None:
        for unit in places[cell]:
            free[unit] ^= 1 << digit

    def fill(empty: list[int], filled: list[int], is_forced: bool) -> Iterator[tuple[Grid, list[int]]]:
        best, least, candidates = -1, side + 1, 0
        for cell in empty:
            row, column, box = places[cell]
            bits = free[row] & free[column] & free[box]
            if bits.bit_count() < least:
                best, least, candidates = cell, bits.bit_count(), bits
                if least <= 1:
                    break
        if best < 0:
            yield tuple(grid), filled if is_forced else []
            return
        rest = [cell for cell in empty if cell != best]
        for digit in order:
            if candidates >> digit & 1:
                grid[best] = digit
                flip(best, digit)
                yield from fill(rest, [*filled, best], is_forced and least == 1)
                flip(best, digit)

    for cell, clue in enumerate(puzzle):
        if clue:
            if not all(free[unit] >> clue & 1 for unit in places[cell]):
                return
            flip(cell, clue)
    yield from fill([cell for cell, clue in enumerate(puzzle) if not clue], [], True)


def _is_unique(puzzle: Grid, order: list[int]) -> bool:
    found = solutions(puzzle, order)
    return next(found, None) is not None and next(found, None) is None


def _make(draw: Draw, level: int) -> list[Draft]:
    """Fill a grid; keep the shortest prefix of a drawn cell order that makes it unique, plus more for easier levels."""
    side = SIDES[level - 1]
    order = draw.shuffled(range(1, side + 1))
    start = [0] * side**2
    for cell, digit in zip(draw.shuffled(range(side**2)), draw.shuffled(order)[: side // 2], strict=False):
        start[cell] = digit  # different digits never clash, so this only varies where filling begins
    grid, _ = next(solutions(tuple(start), order))
    cells = draw.shuffled(range(side**2))

    def puzzle(kept: list[int]) -> Grid:
        shown = set(kept)
        return tuple(digit if cell in shown else 0 for cell, digit in enumerate(grid))

    low, high = (
        side - 1,
        side**2,
    )  # more clues never add a solution, so bisection finds the fewest of this order
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _is_unique(puzzle(cells[:middle]), order) else (middle, high)
    kept, spare = cells[:high], cells[high:]
    for cell in kept[: NUM_TRIED[level - 1]]:
        fewer = [other for other in kept if other != cell]
        if _is_unique(puzzle(fewer), order):
            kept, spare = fewer, [cell, *spare]
    chosen = puzzle(kept + spare[: EXTRA_CLUES[level - 1]])
    variants = (_rearranged(chosen, draw) for _ in range(NUM_VARIANTS - 1))
    key = pattern(chosen)
    return [_draft(variant, key) for variant in (chosen, *variants)]


def _rearranged(puzzle: Grid, draw: Draw) -> Grid:
    """Rename the digits, move lines inside their bands and whole bands, and maybe turn rows into columns."""
    side = isqrt(len(puzzle))
    box = isqrt(side)
    names = [0, *draw.shuffled(range(1, side + 1))]

    def lines() -> list[int]:
        return [band * box + line for band in draw.shuffled(range(box)) for line in draw.shuffled(range(box))]

    rows, columns, is_turned = lines(), lines(), draw.below(2)
    places = ((column, row) if is_turned else (row, column) for row in rows for column in columns)
    return tuple(names[puzzle[row * side + column]] for row, column in places)


def pattern(puzzle: Grid) -> str:
    """Return a hash that all rearrangements of a puzzle share: of each cell's neighbourhood, without positions."""
    side = isqrt(len(puzzle))
    units = _units(side)
    colours = [int(digit > 0) for digit in puzzle]
    seen: list[object] = []
    for _ in range(3):
        seals = [sorted(colours[cell] for cell in unit) for unit in units]
        alike = {d: sorted(c for c, digit in zip(colours, puzzle, strict=True) if digit == d) for d in puzzle}
        around = [
            repr((colours[cell], sorted((seals[row], seals[side + column])), seals[2 * side + box], alike[d]))
            for cell, d in enumerate(puzzle)
            for row, column in [divmod(cell, side)]
            for box in [row // isqrt(side) * isqrt(side) + column // isqrt(side)]
        ]
        seen.append(sorted(Counter(around).items()))
        rank = {text: place for place, text in enumerate(sorted(set(around)))}
        colours = [rank[text] for text in around]
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def _draft(puzzle: Grid, key: str, gold: Grid | None = None) -> Draft:
    side = isqrt(len(puzzle))
    found = solutions(puzzle, list(range(1, side + 1)))
    grid, filled = (gold, []) if gold else next(found)
    lines = [f"row {cell // side + 1} column {cell % side + 1}: {grid[cell]}" for cell in filled]
    prompt = (
        f"Solve this {side}x{side} sudoku: fill every 0 so that each row, each column and each "
        f"{isqrt(side)}x{isqrt(side)} box holds the digits 1 to {side} once.\n{_rows(puzzle)}\n"
        "Answer with the whole grid."
    )
    meta = {"puzzle": "".join(map(str, puzzle)), "side": str(side), "clues": str(side**2 - puzzle.count(0))}
    return Draft(key, prompt, _rows(grid), "\n".join(lines), meta)


def _rows(grid: Grid) -> str:
    side = isqrt(len(grid))
    return "\n".join(" ".join(map(str, grid[start : start + side])) for start in range(0, len(grid), side))


def _from_row(row: Row) -> Draft | str:
    fields = {name.lower(): value for name, value in row.items()}
    raw = fields.get("puzzle", fields.get("quizzes"))
    text = re.sub(r"\s", "", raw).replace(".", "0") if isinstance(raw, str) else ""
    if len(text) not in (16, 81) or not text.isascii() or not text.isdigit():
        return f"no 'puzzle' of 16 or 81 digits, got {str(raw)[:40]!r}"
    puzzle = tuple(map(int, text))
    side = isqrt(len(puzzle))
    order = list(range(1, side + 1))
    if max(puzzle) > side:
        return f"a puzzle with other digits than 1 to {side}"
    if next(solutions(puzzle, order), None) is None:
        return "the puzzle has no solution"
    draft = _draft(puzzle, pattern(puzzle))
    raw = fields.get("solution", fields.get("solutions", draft.answer))
    if not is_right(draft.problem("sudoku", ""), str(raw)):
        return f"'solution' does not solve the puzzle: {str(raw)[:40]!r}"
    gold = tuple(map(int, _FRAME.sub("", str(raw))))
    return draft if _is_unique(puzzle, order) else _draft(puzzle, draft.key, gold)
