"""The task `bars`: what does a bar chart show?"""

from __future__ import annotations

from functools import lru_cache

from whet.rewards.answers.equal import answers_equal
from whet.tasks.made.draft import Draft, Draw, Generated
from whet.tasks.made.drawing import COLOURS, check_cell, draw_bars
from whet.types import Problem, Task

NUM_PROBLEMS = 8_000
NUM_BARS = (3, 4, 5)
"""Bars, by level."""
MOST = 9
"""Lines of a chart."""
SCALES = (1, 2, 5, 10)
"""What one line may stand for."""


@lru_cache(maxsize=4)  # thousands of pictures take seconds to draw, and each stage asks for them
def bars(*, level: int = 0, seed: int = 0, num_problems: int = 0, cell: int = 0) -> Task:
    """Return the task `bars`: read a bar (level 1), compare two (2), or add all up (3).

    Args:
        level: A single level, 1 to 3; 0 mixes them.
        seed: Seed of the draws.
        num_problems: Problems in all splits together; 0 means 8,000.
        cell: Pixels of a bar's width, and of two lines' distance; 0 means 32.
    """
    side = check_cell(cell)
    return Generated(
        "bars",
        lambda draw, chosen: [_draw(draw, chosen, side)],
        is_right,
        num_levels=len(NUM_BARS),
        num_problems=num_problems or NUM_PROBLEMS,
        level=level,
        seed=seed,
    )


def is_right(problem: Problem, answer: str) -> bool:
    """Say whether the answer is the number, written as a number."""
    return answers_equal(answer, problem.answer, plain_number=True)


def _draw(draw: Draw, level: int, cell: int) -> Draft:
    names = draw.shuffled(list(COLOURS))[: NUM_BARS[level - 1]]
    heights = {name: draw.between(1, MOST) for name in names}
    scale = draw.one(SCALES)
    first, second = draw.shuffled(names)[:2]
    if heights[first] < heights[second]:
        first, second = second, first
    asked = {
        1: (f"How much is the {first} bar?", [first]),
        2: (f"How much more is the {first} bar than the {second} one?", [first, second]),
        3: ("How much are all bars together?", names),
    }
    question, used = asked[level]
    lines = [
        f"The {name} bar ends at line {heights[name]}: {heights[name]}*{scale}={heights[name] * scale}"
        for name in used
    ]
    values = [heights[name] * scale for name in used]
    total = values[0]
    for value in values[1:]:
        sign, new = ("-", total - value) if level == 2 else ("+", total + value)
        lines.append(f"{total}{sign}{value}={new}")
        total = new
    shows = " ".join(f"{name}:{height}" for name, height in heights.items())
    return Draft(
        key=shows,
        prompt=f"In this bar chart each line stands for {scale}. {question}",
        answer=str(total),
        solution="\n".join(lines),
        meta={"shows": shows},
        images=(draw_bars(list(heights.items()), MOST, cell),),
        shows=shows,
    )
