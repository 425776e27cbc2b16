"""Countdown, letters and words: problems are solvable, distinct, split by content, and judged."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from fractions import Fraction
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
from needs import SHARED, needs

from whet.tasks.base import TaskConfig, load_task
from whet.tasks.made.countdown import countdown, evaluate, is_right, solve
from whet.tasks.made.draft import Draw, Generated
from whet.tasks.made.letters import letters
from whet.tasks.made.words import FORMS, NAMES, words
from whet.types import Problem, Task, UserError

PUZZLES = SHARED / "data/puzzles"
needs_data = needs("shared/data/puzzles")
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
    places = Counter(tuple(Draw(i).shuffled("abc")) for i in range(6000))
    assert len(places) == 6
    assert max(abs(count - 1000) for count in places.values()) < 150  # five standard deviations of 29


# Hashes of the first uids: a change here means that yesterday's test problems may be in today's training split.
@pytest.mark.parametrize(
    ("name", "num_problems", "expected"),
    [
        ("countdown", 300, "147ada258030"),
        ("letters", 300, "4a53ce403118"),
        ("words", 300, "3b4488ac0953"),
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


@pytest.mark.ci
@pytest.mark.parametrize("make", [countdown, letters])
def test_thousands_of_problems_split_by_content(make: object) -> None:
    task: Task = make()  # pyright: ignore[reportCallIssue]
    problems = every(task)
    assert len({problem.prompt for problem in problems}) == len(problems) >= 10_000
    assert len({problem.uid for problem in problems}) == len(problems)
    keys = [{problem.meta["prompt_uid"] for problem in task.problems(split)} for split in SPLITS]
    assert not keys[0] & keys[1]
    assert not keys[0] & keys[2]
    assert not keys[1] & keys[2]
    assert 0.05 < len(task.problems("test")) / len(problems) < 0.11  # 8 % of the keys


@pytest.mark.ci
def test_rearrangements_share_a_split() -> None:
    def split_by(task: Task, key: object) -> Counter[object]:
        assert callable(key)
        return Counter(found for split in SPLITS for found in {key(p) for p in task.problems(split)})

    many = [
        (countdown(level=1), lambda p: (sorted(p.meta["numbers"].split()), p.meta["target"]).__repr__()),
        (letters(level=1), lambda p: "".join(sorted(re.findall('in "(.*)"', p.prompt)[0]))),
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


@pytest.mark.ci
def test_the_solver_finds_all_hands_of_the_game_of_24() -> None:
    hands = combinations_with_replacement(range(1, 14), 4)
    ways = [way for hand in hands if (way := solve(list(hand), 24)) is not None]
    assert len(ways) == 1362  # the published number of solvable hands of four cards from 1 to 13
    for way in ways:
        assert eval(re.sub(r"(\d+)", r"Fraction(\1)", way.expression), {"Fraction": Fraction}) == 24
    assert solve([3, 3, 8, 8], 24) is not None  # 8/(3-8/3): only with fractions
    assert solve([1, 1, 1, 1], 24) is None


GAME = Problem(uid="g", task="countdown", prompt="", answer="", meta={"numbers": "4 6 4 2", "target": "24"})


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


def test_letters_wants_a_number_not_a_sum() -> None:
    task = letters(num_problems=300)
    problem = next(problem for problem in every(task) if problem.answer == "2")
    assert task.is_correct(problem, "2.0")
    assert not task.is_correct(problem, "1+1")


def test_word_problems_are_worked_rightly() -> None:
    found = every(words(num_problems=3000))
    for problem in found:
        assert "{" not in problem.prompt
        steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", problem.solution)
        assert len(steps) == problem.solution.count("=") > 0
        for one, sign, other, right in steps:
            value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}[sign]
            assert value(int(one), int(other)) == int(right)
            assert sign != "/" or int(one) % int(other) == 0
        numbers = set(re.findall(r"\d+", problem.prompt))
        assert set(re.findall(r"\d+", problem.solution.split(" = ")[0])) <= numbers
        assert [step[0] for step in steps[1:]] == [
            step[3] for step in steps[:-1]
        ]  # each goes on from the one before
        assert re.findall(r"\d+", problem.solution)[-1] == problem.answer  # what the schema `anywhere` reads
        assert int(problem.answer) > 0
    assert {p.meta["level"] for p in found} == {"1", "2"}


def test_word_problems_of_one_level_are_unlike_those_of_the_other() -> None:
    first, second = every(words(level=1)), every(words(level=2))
    assert {problem.prompt.split()[0] for problem in first} == set(NAMES[0])
    assert not {name for problem in second for name in NAMES[0] if name in problem.prompt.split()}
    for task in (first, second):  # every kind is there, in about equal shares
        kinds = Counter(" ".join(re.findall(r" ([-+*/]) ", p.solution)) for p in task)
        assert len(kinds) == len(FORMS[0])
    # No pair of splits has the same numbers in the same kind, whatever the names.
    task = words(level=1)
    keys = [{tuple(re.findall(r"[-+*/=0-9]+", p.solution)) for p in task.problems(split)} for split in SPLITS]
    assert not keys[0] & keys[2]
    assert not keys[0] & keys[1]


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


def test_levels_and_numbers_are_checked() -> None:
    with pytest.raises(UserError, match="task.level = 6: countdown has levels 1 to 4; 0 mixes them"):
        countdown(level=6)
    dry = Generated("x", lambda draw, level: [], lambda problem, answer: True, num_levels=1, num_problems=1)
    with pytest.raises(UserError, match="task.num_problems = 1: x ran out of different problems at 0"):
        dry.problems("train")
    with pytest.raises(UserError, match="split 'x'"):
        countdown().problems("x")
    with pytest.raises(
        ValueError, match="task.level is not read by task letters where it reads data; leave it out"
    ):
        TaskConfig(name="letters", path="x", level=2)


@needs_data
def test_data_of_the_puzzles() -> None:
    counts = {
        countdown(str(PUZZLES / "countdown_cd3_test.jsonl")): 256,
        countdown(str(PUZZLES / "game24.csv")): 1362,
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
        ("countdown", '{"Puzzles": "1 1 1 1"}', r"\[1, 1, 1, 1\] cannot make 24"),
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
