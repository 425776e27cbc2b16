"""Multiple choice and yes/no: every form of a row, every form of an answer, and every message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whet.tasks.base import TaskConfig, answer_type_of, load_task
from whet.tasks.choice import choice
from whet.tasks.jsonl import Jsonl
from whet.types import Problem, Task, UserError


def read(folder: Path, row: Any, name: str = "choice") -> tuple[Task, Problem]:
    (folder / "test.jsonl").write_text(json.dumps(row))
    task = load_task(TaskConfig(name=name, path=str(folder)))
    (problem,) = task.problems("test")
    return task, problem


CITIES = ["Rome", "Paris", "Bonn"]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q?", "choices": CITIES, "answer": "B"},
        {"question": "q?", "choices": CITIES, "answer": "(B)"},
        {"prompt": "q?", "options": CITIES, "answer": 1},
        {"problem": "q?", "choices": CITIES, "answer": "Paris"},
        {"question": "q?", "A": "Rome", "B": "Paris", "C": "Bonn", "D": None, "answer": "B"},
        {"question": "q?", "options": {"A": "Rome", "B": "Paris", "C": "Bonn"}, "answer": "B"},
        {"question": "q?", "choices": {"label": ["1", "2", "3"], "text": CITIES}, "answerKey": "2"},
    ],
)
def test_rows(tmp_path: Path, row: Any) -> None:
    task, problem = read(tmp_path, row)
    assert problem.prompt == "q?\n\nA. Rome\nB. Paris\nC. Bonn"
    assert problem.answer == "B"
    assert answer_type_of(task) == "choice"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("B", True), ("b", True), ("(B)", True), ("B.", True), ("B)", True), ("[B]", True), ("B:", True),
        (" B\n", True),
        ("Paris", True), ("paris", True), ("Paris.", True), ("B. Paris", True), ("(B) paris", True), ("B: Paris", True),
        ("A", False), ("A or B", False), ("A, B", False), ("A B", False), ("AB", False), ("B or not", False),
        ("B. Rome", False), ("Paris or Rome", False), ("Rome", False), ("Par", False), ("The answer is B", False),
        ("B B", False), ("D", False), ("1", False), ("", False), ("A. Rome B. Paris", False), ("Β", False),
        (r"\boxed{B}", False), ("B" * 5000, False),
    ],
)  # fmt: skip
def test_choice_answers(tmp_path: Path, answer: str, expected: bool) -> None:
    task, problem = read(tmp_path, {"question": "q?", "choices": CITIES, "answer": "B"})
    assert task.is_correct(problem, answer) is expected


def test_a_letter_is_a_label_before_it_is_a_text(tmp_path: Path) -> None:
    task, problem = read(tmp_path, {"question": "q?", "choices": ["B", "A", "I"], "answer": 0})
    assert task.is_correct(problem, "A")
    assert not task.is_correct(problem, "B")
    task, problem = read(tmp_path, {"question": "q?", "choices": ["B", "A", "I"], "answer": 2})
    assert task.is_correct(problem, "I")  # there is no ninth choice


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"choices": CITIES, "answer": "B"}, "no 'prompt'"),
        (
            {"question": "q", "answer": "B"},
            "expected 2 to 26 choices of text in 'choices' or columns A, B, C, ..., got 0",
        ),
        ({"question": "q", "choices": ["x"], "answer": "A"}, "expected 2 to 26 choices .* got 1"),
        ({"question": "q", "choices": ["x", 2], "answer": "A"}, "expected 2 to 26 choices of text"),
        ({"question": "q", "choices": ["x", " X."], "answer": "A"}, "two choices are the same"),
        ({"question": "q", "choices": CITIES, "answer": "D"}, "'answer' 'D' is none of the choices"),
        ({"question": "q", "choices": CITIES, "answer": 3}, "'answer' 3 is not an index from 0 to 2"),
        ({"question": "q", "choices": CITIES, "answer": True}, "no 'answer' that is a letter"),
        (
            {"question": "q", "choices": ["B", "A"], "answer": "A"},
            "'answer' 'A' is more than one of the choices",
        ),
        ({"question": "q", "choices": CITIES}, "no 'answer' that is a letter"),
    ],
)
def test_bad_choice_rows(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^test.jsonl line 1: {message}"):
        read(tmp_path, row)


@pytest.mark.parametrize(
    ("gold", "right"), [(True, "yes"), ("False", "no"), (1, "yes"), ("No", "no"), ("yes", "yes")]
)
def test_yes_no(tmp_path: Path, gold: Any, right: str) -> None:
    task, problem = read(tmp_path, {"question": "q?", "answer": gold}, "yes_no")
    assert answer_type_of(task) == "yes_no"
    assert problem.answer == right
    wrong = {"yes": "no", "no": "yes"}[right]
    assert all(task.is_correct(problem, text) for text in (right, right.upper(), f" {right.capitalize()}. "))
    assert task.is_correct(problem, "true") is (right == "yes")
    assert not any(
        task.is_correct(problem, text)
        for text in (
            wrong,
            "",
            f"{right} or {wrong}",
            f"not {right}",
            f"{right}, I think",
            "1",
            "0",
            right * 2,
        )
    )


def test_bad_yes_no_row(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="line 1: 'answer' is 'maybe', expected yes, no, true, false, 1 or 0"):
        read(tmp_path, {"question": "q", "answer": "maybe"}, "yes_no")


def test_repeated_and_contradicting_rows(tmp_path: Path) -> None:
    rows = [{"question": "q?", "answer": answer} for answer in ("yes", "yes", "no")]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task: Any = load_task(TaskConfig(name="yes_no", path=str(tmp_path)))
    problems = task.problems("test")
    assert [problem.answer for problem in problems] == ["yes", "no"]  # `whet data` reports the contradiction
    assert len({problem.uid for problem in problems}) == 2
    assert task.num_duplicates == 1


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Which?", "choices": ["x", "y"], "answer": "B"},
        {"question": "Which?", "options": ["x", "y"], "answer": 1},
        {"question": "Which?", "A": "x", "B": "y", "answer": "B"},
        {"question": "Which?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answer": "2"},
    ],
)
def test_choices_are_not_dropped_on_the_quiet(row: dict[str, object], tmp_path: Path) -> None:
    """Read as plain questions, they would be asked without their choices."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "question": f"Which, {n}?"}) + "\n" for n in range(9)))
    with pytest.raises(UserError, match="the model would not see; read them with --task choice"):
        Jsonl(str(path)).problems("train")
    assert Jsonl(str(path), answer="answer").problems("train")
    assert choice(str(path)).problems("train")
    said = {**row, "answer": "y"}  # the answer itself: the question stands for itself
    path.write_text("".join(json.dumps({**said, "question": f"Which, {n}?"}) + "\n" for n in range(9)))
    assert Jsonl(str(path)).problems("train")
