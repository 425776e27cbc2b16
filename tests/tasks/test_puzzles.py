"""Countdown, game of 24, sudoku, letters and algebra: problems are solvable, distinct, split by content, and judged."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import pytest

from whet.tasks.base import TaskConfig, load_task
from whet.tasks.made.algebra import algebra
from whet.tasks.made.countdown import countdown, evaluate, game24, is_right, solve
from whet.tasks.made.draft import Draw, Generated
from whet.tasks.made.letters import letters
from whet.tasks.made.sudoku import pattern, solutions, sudoku
from whet.types import Problem, Task, UserError

PUZZLES = Path(__file__).parents[2].parent / "shared/data/puzzles"
needs_data = pytest.mark.skipif(not PUZZLES.is_dir(), reason="needs shared/data/puzzles")
SPLITS = ("train", "dev", "test")


def every(task: Task) -> list[Problem]:
    return [problem for split in SPLITS for problem in task.problems(split)]


def test_draws() -> None:
    # SHA-256 of 'whet', the words and the count, with NUL between; first 8 bytes, big end first.
    digest = hashlib.sha256(b"whet\x00a\x007\x001").digest()
    assert Draw("a", 7).below(1000) == int.from_bytes(digest[:8], "big") % 1000
    draw = Draw("b")
    assert sorted(draw.shuffled(range(9))) == list(range(9))
    assert {draw.between(3, 5) for _ in range(99)} == {3, 4, 5}
    assert {draw.nonzero(2) for _ in range(99)} == {-2, -1, 1, 2}
    places = Counter(tuple(Draw(i).shuffled("abc")) for i in range(6000))
    assert len(places) == 6
    assert max(abs(count - 1000) for count in places.values()) < 150  # five standard deviations of 29


# Hashes of the first uids: a change here means that yesterday's test problems may be in today's training split.
@pytest.mark.parametrize(
    ("name", "num_problems", "expected"),
    [
        ("countdown", 300, "147ada258030"),
        ("sudoku", 100, "0fe16e641ab8"),
        ("letters", 300, "4a53ce403118"),
        ("algebra", 300, "69575898e8aa"),
    ],
)
def test_problems_are_the_same_on_every_machine(name: str, num_problems: int, expected: str) -> None:
    random.seed(1)
    task = load_task(TaskConfig(name=name, num_problems=num_problems))
    again = load_task(TaskConfig(name=name, num_problems=num_problems))
    found = {split: task.problems(split) for split in SPLITS}
    assert found == {split: again.problems(split) for split in SPLITS}
    text = repr([(p.uid, p.prompt, p.answer, p.solution) for p in every(task)])
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == expected
    other = load_task(TaskConfig(name=name, num_problems=num_problems, seed=1))
    assert {p.uid for p in every(other)} != {p.uid for p in every(task)}
    levels = {p.meta["level"] for p in every(load_task(TaskConfig(name=name, num_problems=40, level=2)))}
    assert levels == {"2"}


@pytest.mark.parametrize("make", [countdown, game24, letters, algebra])
def test_thousands_of_problems_split_by_content(make: object) -> None:
    task: Task = make()  # pyright: ignore[reportCallIssue]
    problems = every(task)
    assert len({problem.prompt for problem in problems}) == len(problems) >= 1362
    assert len({problem.uid for problem in problems}) == len(problems)
    keys = [{problem.meta["prompt_uid"] for problem in task.problems(split)} for split in SPLITS]
    assert not keys[0] & keys[1]
    assert not keys[0] & keys[2]
    assert not keys[1] & keys[2]
    assert 0.05 < len(task.problems("test")) / len(problems) < 0.11  # 8 % of the keys


def test_rearrangements_share_a_split() -> None:
    def split_by(task: Task, key: object) -> Counter[object]:
        assert callable(key)
        return Counter(found for split in SPLITS for found in {key(p) for p in task.problems(split)})

    many = [
        (countdown(level=1), lambda p: (sorted(p.meta["numbers"].split()), p.meta["target"]).__repr__()),
        (letters(level=1), lambda p: "".join(sorted(re.findall('in "(.*)"', p.prompt)[0]))),
        (algebra(level=1), lambda p: repr(sorted(re.sub(r"[a-z]", "x", p.prompt[13:]).split(" = ")))),
    ]
    for task, key in many:
        shared = split_by(task, key)
        assert max(shared.values()) == 1
        assert len(shared) < len(every(task))  # there are rearrangements


def value_of(problem: Problem) -> None:
    """Check a countdown gold answer by Python's own arithmetic."""
    assert set(problem.answer) <= set("0123456789+-*/()")
    value = eval(re.sub(r"(\d+)", r"Fraction(\1)", problem.answer), {"Fraction": Fraction})
    assert value == int(problem.meta["target"])
    assert sorted(re.findall(r"\d+", problem.answer)) == sorted(problem.meta["numbers"].split())
    for line in problem.solution.split("\n"):
        left, _, right = line.partition("=")
        assert eval(re.sub(r"(\d+)", r"Fraction(\1)", left), {"Fraction": Fraction}) == Fraction(right)


def test_countdown_is_solvable() -> None:
    for problem in every(countdown(num_problems=1500)):
        value_of(problem)
        assert len(problem.meta["numbers"].split()) == int(problem.meta["level"]) + 2
        assert 0 < int(problem.meta["target"]) <= 999


def test_game24_has_all_hands() -> None:
    problems = every(game24())
    for problem in problems:
        value_of(problem)
    assert len(problems) == 1362  # the published number of solvable hands of four cards from 1 to 13
    assert solve([3, 3, 8, 8], 24) is not None  # 8/(3-8/3): only with fractions
    assert solve([1, 1, 1, 1], 24) is None


GAME = Problem(uid="g", task="game24", prompt="", answer="", meta={"numbers": "4 6 4 2", "target": "24"})


@pytest.mark.parametrize(
    "answer",
    [
        "(4+6)*2+4", " ( 4 + 6 ) * 2 + 4 ", "(4+6)*2+4=24", "(4+6)×2+4 = 24", "((((4+6)))*2)+4", "4-2*(-6-4)",
        "4−(−6−4)·2", "2*(4+6)\n+4",
    ],
)  # fmt: skip
def test_countdown_accepts(answer: str) -> None:
    assert is_right(GAME, answer)


@pytest.mark.parametrize(
    "answer",
    [
        "24", "4*6", "(4+6)*2", "(4+6)*2+4+0", "(4+6)*2+4=25", "(4+6)*2+4==24", "24=(4+6)*2+4", "(4+6)*2+4 or 24",
        "(4+6)2+4", "(4+6)*(2)+(4", "(4+6)*2+4)", "4+6*2+4", "46-22", "4**2+6+2", "(4+6)*2+4.0", "(4+6)*02+4", "4/0",
        "4^2+6+2", "(4+6)*2+4;", "4 6*2 4", "", "()", "+", "4+", "((4+6)*2+4", "(4+6)*2+4=", "٤+٦", "(4+6)*2+4=24=24",
        "6*4*(4-2)/(4-2)", "(" * 400 + "24" + ")" * 400, "-" * 299 + "4", "4//6", "x=(4+6)*2+4",
    ],
)  # fmt: skip
def test_countdown_refuses(answer: str) -> None:
    assert not is_right(GAME, answer)


def test_evaluation_is_exact() -> None:
    assert evaluate("1/3+1/3+1/3") == (1, [1, 3, 1, 3, 1, 3])
    assert evaluate("8/(3-8/3)") == (24, [8, 3, 8, 3])
    assert evaluate("2-3-4") == (-5, [2, 3, 4])
    assert evaluate("8/4/2") == (1, [8, 4, 2])
    assert evaluate("2-3*4") == (-10, [2, 3, 4])
    assert evaluate("1/(2-2)") is None


def brute_force(puzzle: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return all fillings of a 4x4 puzzle, row by row from all permutations: another method than the solver's."""
    rows = list(permutations((1, 2, 3, 4)))
    grids: list[tuple[int, ...]] = [()]
    for r in range(4):
        fit = [row for row in rows if all(c in (0, d) for c, d in zip(puzzle[4 * r :], row, strict=False))]
        grids = [grid + row for grid in grids for row in fit]
        grids = [g for g in grids if all(len({*g[c::4]}) == r + 1 for c in range(4))]
        if r % 2:
            at = 4 * (r - 1)
            grids = [
                g
                for g in grids
                if all(len({*g[at + b : at + b + 2], *g[at + 4 + b : at + 6 + b]}) == 4 for b in (0, 2))
            ]
    return grids


def test_sudoku_has_one_solution() -> None:
    assert len(brute_force((0,) * 16)) == 288  # the published number of 4x4 grids
    assert len(list(solutions((0,) * 16, [1, 2, 3, 4]))) == 288
    task = sudoku(num_problems=200)
    for problem in every(task):
        puzzle = tuple(map(int, problem.meta["puzzle"]))
        if len(puzzle) == 16:
            (grid,) = brute_force(puzzle)
        else:
            (grid,) = (found for found, _ in solutions(puzzle, list(range(9, 0, -1))))
        assert list(grid) == [int(digit) for digit in problem.answer.split()]
        for line in filter(None, problem.solution.split("\n")):
            row, column, digit = map(int, re.findall(r"\d+", line))
            side = int(problem.meta["side"])
            assert grid[(row - 1) * side + column - 1] == digit
            assert puzzle[(row - 1) * side + column - 1] == 0
    clues = {
        level: [int(p.meta["clues"]) for p in every(sudoku(num_problems=48, level=level))] for level in (3, 4)
    }
    assert sum(clues[4]) / 48 < sum(clues[3]) / 48 - 5


def test_sudoku_pattern_is_shared_by_rearrangements_only() -> None:
    task = sudoku(num_problems=64, level=4)
    groups: dict[str, set[str]] = {}
    for problem in every(task):
        groups.setdefault(problem.meta["prompt_uid"], set()).add(problem.meta["puzzle"])
    assert [len(group) for group in groups.values()] == [8] * 8
    puzzle = tuple(map(int, next(iter(groups.values())).pop()))
    turned = tuple(puzzle[column * 9 + row] for row in range(9) for column in range(9))
    swapped = puzzle[27:] + puzzle[:27]
    renamed = tuple(digit and 10 - digit for digit in puzzle)
    assert pattern(puzzle) == pattern(turned) == pattern(swapped) == pattern(renamed)
    clue = next(place for place, digit in enumerate(puzzle) if digit)
    assert pattern(puzzle) != pattern((*puzzle[:clue], 0, *puzzle[clue + 1 :]))


GRID = Problem(uid="s", task="sudoku", prompt="", answer="", meta={"puzzle": "2301012004323214"})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("2 3 4 1\n4 1 2 3\n1 4 3 2\n3 2 1 4", True),
        ("2341412314323214", True),
        ("[[2,3,4,1],[4,1,2,3],[1,4,3,2],[3,2,1,4]]", True),
        ("2 3 | 4 1\n4 1 | 2 3\n----+----\n1 4 | 3 2\n3 2 | 1 4", True),
        ("2 3 4 1\n4 1 2 3\n1 4 3 2\n3 2 4 1", False),  # a clue overwritten, and a column wrong
        ("1 3 4 2\n4 2 1 3\n2 4 3 1\n3 1 2 4", False),  # a right grid of other clues
        ("2 3 0 1\n0 1 2 0\n0 4 3 2\n3 2 1 4", False),  # the question
        ("2 3 4 1\n4 1 2 3\n1 4 3 2\n3 2 1", False),
        ("2 3 4 1\n4 1 2 3\n1 4 3 2\n3 2 1 4 4", False),
        ("row 1: 2 3 4 1\n4 1 2 3\n1 4 3 2\n3 2 1 4", False),
        ("2 3 4 1 4 1 2 3 1 4 3 2 3 2 1 ٤", False),
        ("", False),
    ],
)
def test_sudoku_judging(answer: str, expected: bool) -> None:
    task = sudoku(num_problems=10)
    assert task.is_correct(GRID, answer) is expected


def test_letters_wants_a_number_not_a_sum() -> None:
    task = letters(num_problems=300)
    problem = next(problem for problem in every(task) if problem.answer == "2")
    assert task.is_correct(problem, "2.0")
    assert not task.is_correct(problem, "1+1")


def test_letters_count() -> None:
    found = Counter()
    for problem in every(letters(num_problems=3000)):
        letter, word = re.findall('"(.*?)"', problem.prompt)
        assert problem.answer == str(word.count(letter))
        assert problem.solution.count(f"{letter}(") == word.count(letter)
        assert re.sub(r"[ ()0-9]", "", problem.solution) == word
        found[problem.answer] += 1
    assert found["0"] > 100
    assert found["1"] > found["2"] > found["3"] > 50


def test_algebra_is_true() -> None:
    for problem in every(algebra(num_problems=3000)):
        if problem.meta["level"] == "5":
            first, second = re.findall(r"for (.) and (.),", problem.prompt)[0]
            values = [int(n) for n in re.findall(r"-?\d+", problem.answer)]
            names = dict(zip((first, second), values, strict=True))
            equations = problem.prompt.split("\n")[1:]
        else:
            names = {problem.prompt[10]: Fraction(problem.answer)}
            equations = [problem.prompt.partition(": ")[2]]
        for equation in [*equations, problem.solution.split("\n")[-1]]:
            text = re.sub(r"(\d)([a-z(])", r"\1*\2", equation)
            sides = [
                eval(re.sub(r"(\d+)", r"Fraction(\1)", side), {"Fraction": Fraction}, names)
                for side in text.split(" = ")
            ]
            assert len(set(sides)) == 1, (problem.prompt, equation)


def test_pairs_are_ordered() -> None:
    task = algebra(level=5, num_problems=50)
    problem = next(
        p for p in every(task) if p.answer.strip("()").split(", ")[0] != p.answer.strip("()").split(", ")[1]
    )
    x, y = problem.answer.strip("()").split(", ")
    assert task.is_correct(problem, f"({x},{y})")
    assert not task.is_correct(problem, f"({y}, {x})")
    assert not task.is_correct(problem, f"{y}, {x}")
    assert not task.is_correct(problem, x)


def test_levels_and_numbers_are_checked() -> None:
    with pytest.raises(UserError, match="task.level = 6: algebra has levels 1 to 5; 0 mixes them"):
        algebra(level=6)
    dry = Generated("x", lambda draw, level: [], lambda problem, answer: True, num_levels=1, num_problems=1)
    with pytest.raises(UserError, match="task.num_problems = 1: x ran out of different problems at 0"):
        dry.problems("train")
    with pytest.raises(UserError, match="split 'x'"):
        algebra().problems("x")
    with pytest.raises(
        UserError, match="task.level is not read by task sudoku where it reads data; leave it out"
    ):
        TaskConfig(name="sudoku", path="x", level=2)


@needs_data
def test_data_of_the_puzzles() -> None:
    counts = {
        countdown(str(PUZZLES / "countdown_cd3_test.jsonl")): 256,
        game24(str(PUZZLES / "game24.csv")): 1362,
        sudoku(str(PUZZLES / "sudoku4x4_test.csv")): 500,
        letters(str(PUZZLES / "counting_train.json")): 998,  # of 1,000; two words stand there twice
    }
    for task, count in counts.items():
        problems = every(task)
        assert len(problems) == count
        assert all(task.is_correct(problem, problem.answer) for problem in problems)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("countdown", '{"numbers": [1, 2], "target": 7}', r"\[1, 2\] cannot make 7"),
        ("countdown", '{"numbers": [1, 2, 3, 4, 5], "target": 7}', "5 numbers, expected 2 to 4"),
        ("countdown", '{"numbers": [1.5, 2], "target": 3}', "expected whole numbers and a target"),
        ("countdown", '{"n": 1}', "no column of numbers"),
        ("game24", '{"Puzzles": "1 1 1 1"}', r"\[1, 1, 1, 1\] cannot make 24"),
        ("sudoku", '{"puzzle": "12"}', "no 'puzzle' of 16 or 81 digits"),
        ("sudoku", '{"puzzle": "1100000000000000"}', "the puzzle has no solution"),
        ("sudoku", '{"puzzle": "9000000000000000"}', "other digits than 1 to 4"),
        (
            "sudoku",
            '{"puzzle": "2301012004323214", "solution": "2341412314323241"}',
            "does not solve the puzzle",
        ),
        ("letters", '{"word": "letter", "letter": "t", "count": 3}', "'count' is 3, but 't' occurs 2 times"),
        ("letters", '{"word": "letter", "letter": "tt", "count": 1}', "expected one letter"),
        ("letters", '{"letter": "t"}', "no 'word'"),
    ],
)
def test_bad_rows(tmp_path: Path, name: str, row: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(UserError, match=f"x.jsonl line 1: .*{message}"):
        load_task(TaskConfig(name=name, path=str(path))).problems("train")
    with pytest.raises(UserError, match="no such file or folder"):
        load_task(TaskConfig(name=name, path=str(tmp_path / "none")))
