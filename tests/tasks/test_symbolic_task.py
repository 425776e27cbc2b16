"""What math-verify adds to a task, and that a task without it stays as it is."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from whet.tasks.base import TaskConfig, load_task
from whet.types import ManyJudge

ROWS = [
    {"prompt": "the integral", "answer": r"\int_0^1 x^2 dx"},
    {"prompt": "the limit", "answer": r"\lim_{x \to 0} \frac{\sin x}{x}"},
    {"prompt": "a number", "answer": "5"},
]


def load(folder: Path, *, symbolic: bool) -> tuple[object, list]:
    path = folder / "train.jsonl"
    path.write_text(
        "".join(
            json.dumps(row | {"prompt": f"{row['prompt']} {n}"}) + "\n" for n in range(40) for row in ROWS
        )
    )
    task = load_task(TaskConfig(name="jsonl", path=str(path), symbolic=symbolic))
    first = {p.prompt[: p.prompt.rindex(" ")]: p for p in task.problems("train")}
    return task, [first[row["prompt"]] for row in ROWS]


def test_formulas_are_decided_by_math_verify(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    task, (integral, limit, number) = load(tmp_path, symbolic=True)
    assert isinstance(task, ManyJudge)
    items = [
        (integral, r"\frac{1}{3}"),
        (integral, r"\frac{1}{2}"),
        (limit, "1"),
        (limit, "2"),
        (number, "5.0"),
        (number, "5 or 7"),
        (number, None),
    ]
    assert task.judge_many(items) == [True, False, True, False, True, False, False]
    plain, (integral, *_) = load(tmp_path, symbolic=False)
    assert not isinstance(plain, ManyJudge)
    assert plain.is_correct(integral, r"\frac{1}{3}") is False  # type: ignore[attr-defined]


@pytest.mark.ci
def test_hostile_answers_cost_one_deadline_together(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    task, (integral, *_) = load(tmp_path, symbolic=True)
    assert isinstance(task, ManyJudge)
    task.judge_many([(integral, "1")])  # the workers start
    began = time.perf_counter()
    towers = [rf"\int_0^{{{n}}} 9^{{9^{{9^{{9}}}}}} x dx" for n in range(2, 10)]
    assert task.judge_many([(integral, tower) for tower in towers]) == [False] * 8
    assert time.perf_counter() - began < 12  # 8 deadlines of 2 s one after the other would be 16


def test_other_tasks_do_not_read_it() -> None:
    with pytest.raises(ValueError, match=r"task\.symbolic is not read by task arithmetic"):
        TaskConfig(name="arithmetic", symbolic=True)
