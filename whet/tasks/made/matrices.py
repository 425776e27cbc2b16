"""The task `matrices`: cells of an image stand for numbers by their colour; what are the sums of the rows?

After the question that the AMD talk of the first seed judges models by: a matrix of coloured cells times a column of
coloured cells, of which the answer is a vector, and its sum (600) is the trap.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from whet.rewards.answers.equal import answers_equal
from whet.tasks.made.draft import Draft, Draw, Generated
from whet.tasks.made.drawing import COLOURS, check_cell, draw_cells
from whet.types import Problem, Task, problem_uid

NAME = "matrices"
NUM_PROBLEMS = 8_000
MAX_CHARACTERS = 1000
Operation = Literal["rows", "columns", "product"]
ASKED: dict[Operation, str] = {
    "rows": "What is the sum of each row?",
    "columns": "What is the sum of each column?",
    "product": "What is logprobs * Advantages(matrix operation)? Show your steps and the final answer.",
}
"""What is asked; that of a product is the seed's, to the letter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """How hard the questions of a level are.

    Attributes:
        rows: Rows of the matrix.
        columns: Columns.
        num_colours: Colours of an image, at most.
        most: Largest number that a colour stands for.
        operations: What may be asked.
        has_halves: Whether a colour may stand for half a number more, as in the seed.
    """

    rows: int
    columns: int
    num_colours: int
    most: int
    operations: tuple[Operation, ...]
    has_halves: bool = False


LEVELS = (
    Level(rows=2, columns=2, num_colours=3, most=9, operations=("rows",)),
    Level(rows=3, columns=3, num_colours=4, most=9, operations=("rows", "columns")),
    Level(rows=3, columns=3, num_colours=4, most=9, operations=("product",)),
    Level(rows=4, columns=4, num_colours=5, most=9, operations=("product",), has_halves=True),
)
# What may stand around numbers and between them, in plain text and in LaTeX; what remains is numbers alone.
_LAYOUT = re.compile(
    r"\\(?:begin|end)\{(?:[pbvBV]?matrix|array)\}(?:\{[clr|]*\})?|\\(?:left|right|langle|rangle|quad|text|boxed|[,;!\\])"
    r"|[\s,;&\[\](){}<>|$⟨⟩]"
)
_NUMBERS = re.compile(r"(?:[-−+]?[0-9]+(?:\.[0-9]*)?)*")


@lru_cache(maxsize=4)  # thousands of pictures take seconds to draw, and each stage asks for them
def matrices(*, level: int = 0, seed: int = 0, num_problems: int = 0, cell: int = 0) -> Task:
    """Return the task `matrices`: sums of rows of 2 x 2 cells (level 1) to products of 4 x 4 cells with a column.

    Args:
        level: A single level of `LEVELS`, from 1; 0 mixes them.
        seed: Seed of the draws.
        num_problems: Problems in all splits together; 0 means 8,000.
        cell: Pixels of a cell's side; 0 means 32.
    """
    side = check_cell(cell)
    return Generated(
        NAME,
        lambda draw, chosen: [_draw(draw, LEVELS[chosen - 1], side)],
        is_right,
        num_levels=len(LEVELS),
        num_problems=num_problems or NUM_PROBLEMS,
        answer_type="vector",
        level=level,
        seed=seed,
    )


def seed_problem(cell: int = 0) -> Problem:
    """Return the seed's own question (S0-06, S0-07): rows of yellow, green, red and blue, times a column of orange."""
    rows = [[colour] * 4 for colour in ("yellow", "green", "red", "blue")]
    values = {"red": "3", "yellow": "2", "green": "9", "blue": "6", "orange": "7.5"}
    draft = draft_of(rows, ["orange"] * 4, values, "product", check_cell(cell))
    return draft.problem(NAME, problem_uid(NAME, draft.prompt, (draft.shows,)), level="4")


def is_right(problem: Problem, answer: str) -> bool:
    """Say whether the answer is the vector, in any usual layout of its numbers, in order.

    It must be numbers, not what is to be worked out; neither their sum nor a part of them will do.
    """
    if len(answer) > MAX_CHARACTERS or answer.count("begin") > 1:
        return False
    rest = _LAYOUT.sub(" ", answer)
    if not all(_NUMBERS.fullmatch(part) for part in rest.split()):
        return False
    return answers_equal(answer, problem.answer, ordered=True)


def draft_of(
    rows: Sequence[Sequence[str]],
    column: Sequence[str],
    values: Mapping[str, str],
    operation: Operation,
    cell: int,
) -> Draft:
    """Return the question about given cells.

    Args:
        rows: Colours of the matrix.
        column: Colours of the column that it is multiplied by; empty for sums.
        values: Number that each colour stands for, in the order in which the question names them.
        operation: What is asked.
        cell: Pixels of a cell's side.
    """
    words = [f"{'all ' if not place else ''}{name}{'s' if not place else ''} = {value}"
             for place, (name, value) in enumerate(values.items())]  # fmt: skip
    prompt = f"Assuming that {', '.join(words[:-1])} and {words[-1]}. {ASKED[operation]}"
    shown = [[*row, "", one] for row, one in zip(rows, column, strict=True)] if column else rows
    titles = ((0, "logprobs"), (len(rows[0]) + 1, "Advantages")) if column else ()
    answers, solution = _worked(rows, column, values, operation)
    shows = " / ".join(" ".join(name or "-" for name in row) for row in shown)
    return Draft(
        key=shows,
        prompt=prompt,
        answer="\n".join(answers),
        solution=solution,
        meta={"operation": operation, "shows": shows},
        images=(draw_cells(shown, cell, titles=titles),),
        shows=shows,
    )


def _draw(draw: Draw, level: Level, cell: int) -> Draft:
    operation = draw.one(level.operations)
    names = draw.shuffled(list(COLOURS))[: level.num_colours]
    numbers = draw.shuffled(range(1, level.most + 1))
    values = {name: str(number) for name, number in zip(names, numbers, strict=False)}
    if level.has_halves:
        half = draw.one(names)
        values[half] += ".5"

    def row(width: int) -> list[str]:
        if operation == "product" and draw.below(2):
            return [draw.one(names)] * width  # as the seed's
        return [draw.one(names) for _ in range(width)]

    rows = [row(level.columns) for _ in range(level.rows)]
    # A product needs as many numbers below one another as the matrix has columns; the matrices are square.
    column = row(level.rows) if operation == "product" else []
    return draft_of(rows, column, values, operation, cell)


def _worked(
    rows: Sequence[Sequence[str]], column: Sequence[str], values: Mapping[str, str], operation: Operation
) -> tuple[list[str], str]:
    """Return the numbers of the answer, and the working: what each row shows, then the sums, one number at a time."""
    lines = [
        f"Row {place}: {' '.join(f'{name} {values[name]}' for name in row)}"
        for place, row in enumerate(rows, 1)
    ]
    number = {name: Fraction(value) for name, value in values.items()}
    table = [[number[name] for name in row] for row in rows]
    if column:
        lines.append(f"Advantages: {' '.join(f'{name} {values[name]}' for name in column)}")
    if operation == "columns":
        table = [list(one) for one in zip(*table, strict=True)]
    answers = []
    for place, line in enumerate(table, 1):
        word = "Column" if operation == "columns" else "Row"
        steps = []
        if operation == "product":
            factors = [number[name] for name in column]
            steps += [f"{_text(a)}*{_text(b)}={_text(a * b)}" for a, b in zip(line, factors, strict=True)]
            line = [a * b for a, b in zip(line, factors, strict=True)]
        total = line[0]
        for value in line[1:]:
            steps.append(f"{_text(total)}+{_text(value)}={_text(total + value)}")
            total += value
        lines.append(f"{word} {place}: {' '.join(steps)}")
        answers.append(_text(total))
    return answers, "\n".join(lines)


def _text(value: Fraction) -> str:
    """Write a number as people do: 67.5, 60."""
    return f"{float(value):.4f}".rstrip("0").rstrip(".")
