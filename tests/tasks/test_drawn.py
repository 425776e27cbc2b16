"""Generated questions about images: the image shows what the answer is made of, and nothing but the answer pays."""

from __future__ import annotations

import hashlib
import random
import re
from fractions import Fraction

import numpy as np
import pytest

from whet.model.vision.reading import read_picture
from whet.rewards.base import best_total, build_rewards, score_completion
from whet.schema import ResponseSchema
from whet.tasks.base import TaskConfig, load_task
from whet.tasks.images import all_images, blanked, swapped
from whet.tasks.made.drawing import CELL, COLOURS
from whet.tasks.made.matrices import seed_problem
from whet.tasks.selftest import hostile_answers
from whet.types import Problem, Task, UserError, problem_uid

SPLITS = ("train", "dev", "test")
NAMES = ("matrices", "shapes", "bars")
BY_COLOUR = {colour: name for name, colour in COLOURS.items()}
SEED = [
    "60 270 90 180", "60\n270\n90\n180", "\n60\n270\n90\n180\n", "60, 270, 90, 180", "[60, 270, 90, 180]",
    "[60 270 90 180]", "(60, 270, 90, 180)", "[[60], [270], [90], [180]]", "[60]\n[270]\n[90]\n[180]",
    r"\begin{pmatrix}60\\270\\90\\180\end{pmatrix}", r"$\begin{bmatrix} 60 \\ 270 \\ 90 \\ 180 \end{bmatrix}$",
    "60.0 270.0 90.0 180.0", "60; 270; 90; 180", "[60,270,90,180]^T".removesuffix("^T"), "60,\n270,\n90,\n180",
]  # fmt: skip
NOT_SEED = [
    "600", "600.0", "60", "60 270 90", "60 270 90 180 600", "60 270 90 181", "270 60 90 180", "180 90 270 60",
    "6027090180", "60+270+90+180", "[60, 270, 90, 180] or 600", "60 270 90 180 = 600", "", " ", "60 270 90 l80",
    r"\begin{pmatrix}2&2&2&2\\9&9&9&9\\3&3&3&3\\6&6&6&6\end{pmatrix}\begin{pmatrix}7.5\\7.5\\7.5\\7.5\end{pmatrix}",
    "[4*15, 270, 90, 180]", "[30*2, 9*30, 3*30, 6*30]", "60 -270 90 180", "[60, 270], [90, 180]x",
]  # fmt: skip


def every(task: Task) -> list[Problem]:
    return [problem for split in SPLITS for problem in task.problems(split)]


def cells(problem: Problem, cell: int = CELL) -> list[list[str]]:
    """Read the colour at the middle of each cell."""
    pixels = read_picture(problem.images[0]).read()
    assert pixels.shape[0] % cell == pixels.shape[1] % cell == 0
    middle = pixels[cell // 2 :: cell, cell // 2 :: cell]
    return [[BY_COLOUR.get(tuple(map(int, pixel)), "") for pixel in row] for row in middle]


def values_in(prompt: str) -> dict[str, Fraction]:
    found = re.findall(r"(\w+) = ([\d.]+)(?=[, .]|$)", prompt.partition(". What")[0])
    return {name if name in COLOURS else name.removesuffix("s"): Fraction(value) for name, value in found}


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_matrices_show_their_answer(level: int) -> None:
    """The answer, worked out again from the pixels and the words alone, by numpy."""
    operations = set()
    for problem in every(load_task(TaskConfig(name="matrices", level=level, num_problems=80))):
        seen, values = cells(problem), values_in(problem.prompt)
        operations.add(problem.meta["operation"])
        if "logprobs * Advantages" in problem.prompt:
            seen = seen[1:]  # below the titles
            left = np.array([[float(values[name]) for name in row[:-2]] for row in seen])
            right = np.array([float(values[row[-1]]) for row in seen])
            assert {row[-2] for row in seen} == {""}
            expected = left @ right
        else:
            whole = np.array([[float(values[name]) for name in row] for row in seen])
            expected = whole.sum(axis=0 if "column" in problem.prompt else 1)
        assert [float(line) for line in problem.answer.split("\n")] == expected.tolist()
        assert problem.answer.split("\n")[-1] == problem.solution[-len(problem.answer.split("\n")[-1]) :]
        for left_side, right_side in re.findall(r"([\d.]+[*+][\d.]+)=([\d.]+)", problem.solution):
            a, b = map(Fraction, re.split(r"[*+]", left_side))
            assert (a * b if "*" in left_side else a + b) == Fraction(right_side)
        shown = [name for row in seen for name in row if name]
        assert sum(problem.solution.count(name) for name in COLOURS) == len(shown)
    assert len(operations) == (2 if level == 2 else 1)


def test_shapes_show_their_answer() -> None:
    """Counted by the area that each shape fills: a square all, a circle pi / 4, a triangle a half of it."""
    for problem in every(load_task(TaskConfig(name="shapes", num_problems=60))):
        pixels = read_picture(problem.images[0]).read()
        count = 0
        asked = problem.prompt.removeprefix("How many ").removesuffix("s does the image show?").split()
        for y in range(0, pixels.shape[0], CELL):
            for x in range(0, pixels.shape[1], CELL):
                part = pixels[y : y + CELL, x : x + CELL].reshape(-1, 3)
                filled = part[(part != 255).any(axis=1)]
                if len(filled):
                    share = len(filled) / 24**2
                    shape = "square" if share > 0.95 else "circle" if share > 0.65 else "triangle"
                    words = {BY_COLOUR[tuple(map(int, filled[0]))], shape, "shape"}
                    count += words.issuperset(asked)
        assert problem.answer == str(count), problem
        assert problem.solution.count("(") == count


def test_bars_show_their_answer() -> None:
    for problem in every(load_task(TaskConfig(name="bars", num_problems=60))):
        pixels = read_picture(problem.images[0]).read()
        scale = int(problem.prompt.split("stands for ")[1].split(".")[0])
        heights = {}
        for left in range(CELL, pixels.shape[1] - CELL, 2 * CELL):
            column = [BY_COLOUR.get(tuple(map(int, p)), "") for p in pixels[:-1, left + CELL // 2]]
            name = next(filter(None, column))
            heights[name] = scale * round(column.count(name) / (CELL / 2))
        asked = [name for name in re.findall(r"\w+", problem.prompt) if name in COLOURS]
        if "more" in problem.prompt:
            expected = heights[asked[0]] - heights[asked[1]]
        else:
            expected = sum(heights.values()) if "together" in problem.prompt else heights[asked[0]]
        assert problem.answer == str(expected)
        assert problem.solution.endswith(f"={expected}")


def test_the_question_of_the_seed() -> None:
    """S0-06 and S0-07: to the letter, and its answer in any layout; the sum, 600, is the trap."""
    problem = seed_problem()
    assert problem.prompt == (
        "Assuming that all reds = 3, yellow = 2, green = 9, blue = 6 and orange = 7.5. What is logprobs * "
        "Advantages(matrix operation)? Show your steps and the final answer."
    )
    assert cells(problem)[1:] == [[c] * 4 + ["", "orange"] for c in ("yellow", "green", "red", "blue")]
    assert problem.answer == "60\n270\n90\n180"
    task = load_task(TaskConfig(name="matrices", num_problems=1))
    for answer in SEED:
        assert task.is_correct(problem, answer) is True, answer
    for answer in NOT_SEED:
        assert task.is_correct(problem, answer) is False, answer
    for what, answer in hostile_answers(problem):
        assert task.is_correct(problem, answer) is False, what
    for text in re.findall(r"([\d.]+[*+][\d.]+)=([\d.]+)", problem.solution):
        assert eval(text[0]) == float(text[1])


def test_rewards_of_the_seeds_transcripts() -> None:
    """Gold, with its working, scores the maximum; the trap scores as any wrong answer does."""
    problem, schema = seed_problem(), ResponseSchema(answer_type="vector")
    task = load_task(TaskConfig(name="matrices", num_problems=1))
    rewards = build_rewards({"correct": 2.0, "format": 0.5}, schema, task)
    opening = schema.render("", "").partition(schema.think_open)[0] + schema.think_open
    gold = schema.render(problem.solution, problem.answer).removeprefix(opening)
    assert score_completion(rewards, problem, gold)[1] == best_total(rewards) == 2.5
    trap = schema.render(problem.solution, "600").removeprefix(opening)
    assert score_completion(rewards, problem, trap)[1] == 0.5


# Hashes of the first uids: a change here means that yesterday's test problems may be in today's training split.
@pytest.mark.parametrize(
    ("name", "expected"), [("matrices", "2899171775b1"), ("shapes", "254bad739a07"), ("bars", "d77f2edc8a8e")]
)
def test_problems_are_the_same_on_every_machine(name: str, expected: str) -> None:
    random.seed(1)
    task = load_task(TaskConfig(name=name, num_problems=300))
    text = repr([(p.uid, p.prompt, p.answer, p.solution, p.meta["shows"]) for p in every(task)])
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == expected
    other = load_task(TaskConfig(name=name, num_problems=300, seed=1))
    assert not {p.uid for p in every(other)} & {p.uid for p in every(task)}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.ci] * (n != "matrices")) for n in NAMES])
def test_no_image_is_in_two_splits(name: str) -> None:
    """By what it shows, so that a held-out image was never seen, whatever was asked about it."""
    task = load_task(TaskConfig(name=name, level=1, num_problems=3000))
    shown = [{(p.images, p.meta["shows"]) for p in task.problems(split)} for split in SPLITS]
    assert not shown[0] & shown[1]
    assert not shown[0] & shown[2]
    assert not shown[1] & shown[2]
    images = [{image for image, _ in split} for split in shown]
    assert [len(split) for split in images] == [len(split) for split in shown]
    problems = every(task)
    assert len({p.uid for p in problems}) == len(problems) == 3000
    assert len({(p.prompt, p.images) for p in problems}) == 3000
    assert 0.05 < len(task.problems("test")) / 3000 < 0.12


def test_cells_are_as_large_as_asked() -> None:
    for cell in (8, 20, 64):
        task = load_task(TaskConfig(name="matrices", level=1, num_problems=20, cell=cell))
        problem = every(task)[0]
        picture = read_picture(problem.images[0])
        assert (picture.height, picture.width) == (2 * cell, 2 * cell)
        same = every(load_task(TaskConfig(name="matrices", level=1, num_problems=20)))[0]
        assert cells(problem, cell) == cells(same)
        assert (problem.uid, problem.answer) == (same.uid, same.answer)  # the same question
    for cell in (7, 129, -1):
        with pytest.raises(UserError, match=rf"task.cell = {cell}: expected 8 to 128 pixels, or 0 for 32"):
            load_task(TaskConfig(name="shapes", cell=cell))
    with pytest.raises(UserError, match="matrices has levels 1 to 4"):
        load_task(TaskConfig(name="matrices", level=5))
    small = [
        sum(len(p.images[0]) for p in every(load_task(TaskConfig(name=n, num_problems=50)))) / 50
        for n in NAMES
    ]
    assert max(small) < 1500  # characters of a data URI: rows of samples.jsonl hold it


@pytest.mark.parametrize("name", NAMES)
def test_blank_and_swapped_images(name: str) -> None:
    problems = every(load_task(TaskConfig(name=name, level=1, num_problems=40)))
    by_uid = {problem.uid: problem for problem in problems}
    for problem, other in zip(problems, swapped(problems), strict=True):
        donor = by_uid[other.meta["images"]]
        assert (other.uid, other.prompt, other.answer) == (problem.uid, problem.prompt, problem.answer)
        assert other.images == donor.images != problem.images
        assert donor.answer != problem.answer
        blank = blanked(problem)
        assert (blank.uid, blank.prompt, blank.answer) == (problem.uid, problem.prompt, problem.answer)
        (own,), (white,) = all_images(problem), all_images(blank)
        pixels = read_picture(white).read()
        assert pixels.shape == read_picture(own).read().shape
        assert pixels.min() == 255
    with pytest.raises(UserError, match="none of the other 0 has other images of the same sizes"):
        swapped(problems[:1])
    with pytest.raises(UserError, match="has no image to blank"):
        blanked(Problem(uid="a", task="t", prompt="1+1=", answer="2"))


def test_uids_name_images() -> None:
    one = problem_uid("t", "What is it?", ("a",))
    assert one == hashlib.sha256(b"t\x00What is it?\x00image\x00a").hexdigest()[:16]
    assert len({one, problem_uid("t", "What is it?"), problem_uid("t", "What is it?", ("b",))}) == 3
    assert problem_uid("t", "q", ("a", "b")) != problem_uid("t", "q", ("b", "a"))
