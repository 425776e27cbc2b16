"""The task `shapes`: how many red circles does the image show?"""

from __future__ import annotations

from functools import lru_cache

from whet.rewards.answers.equal import answers_equal
from whet.tasks.made.draft import Draft, Draw, Generated
from whet.tasks.made.drawing import COLOURS, SHAPES, check_cell, draw_shapes
from whet.types import Problem, Task

NUM_PROBLEMS = 8_000
SIDES = (3, 4, 5)
"""Cells of a side of the image, by level."""
NUM_COLOURS = 4
EMPTY_PERCENT = 25


@lru_cache(maxsize=4)  # thousands of pictures take seconds to draw, and each stage asks for them
def shapes(*, level: int = 0, seed: int = 0, num_problems: int = 0, cell: int = 0) -> Task:
    """Return the task `shapes`: count shapes of a colour or a kind (level 1), or of both (2 and 3).

    Args:
        level: A single level, 1 to 3; 0 mixes them.
        seed: Seed of the draws.
        num_problems: Problems in all splits together; 0 means 8,000.
        cell: Pixels of a cell's side; 0 means 32.
    """
    side = check_cell(cell)
    return Generated(
        "shapes",
        lambda draw, chosen: [_draw(draw, chosen, side)],
        is_right,
        num_levels=len(SIDES),
        num_problems=num_problems or NUM_PROBLEMS,
        level=level,
        seed=seed,
    )


def is_right(problem: Problem, answer: str) -> bool:
    """Say whether the answer is the count, written as a number."""
    return answers_equal(answer, problem.answer, plain_number=True)


def _draw(draw: Draw, level: int, cell: int) -> Draft:
    side = SIDES[level - 1]
    names = draw.shuffled(list(COLOURS))[:NUM_COLOURS]
    rows = [
        [
            None if draw.below(100) < EMPTY_PERCENT else (draw.one(names), draw.one(SHAPES))
            for _ in range(side)
        ]
        for _ in range(side)
    ]
    colour, shape = draw.one(names), draw.one(SHAPES)
    if level == 1:
        colour, shape = (colour, "") if draw.below(2) else ("", shape)
    what = f"{colour} {shape or 'shape'}s".strip()
    count, lines = 0, []
    for place, row in enumerate(rows, 1):
        words = []
        for item in row:
            is_counted = item is not None and colour in ("", item[0]) and shape in ("", item[1])
            count += is_counted
            words.append(("nothing" if item is None else " ".join(item)) + f" ({count})" * is_counted)
        lines.append(f"Row {place}: {', '.join(words)}")
    shows = " / ".join(", ".join(" ".join(item) if item else "-" for item in row) for row in rows)
    return Draft(
        key=shows,
        prompt=f"How many {what} does the image show?",
        answer=str(count),
        solution="\n".join(lines),
        meta={"shows": shows},
        images=(draw_shapes(rows, cell),),
        shows=shows,
    )
