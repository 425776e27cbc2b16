"""MATH: the real counts, and answers left as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from needs import SHARED, needs

from whet.tasks.base import TaskConfig, load_task
from whet.tasks.math import MATH
from whet.types import UserError

DATA = SHARED / "data/math"
GOLDEN = Path(__file__).parents[1] / "golden/math"
needs_data = needs("shared/data/math")


@needs_data
def test_counts_and_meta() -> None:
    task = MATH(DATA)
    train, dev, test = (task.problems(split) for split in ("train", "dev", "test"))
    # Two rows of the source box nothing: no answer could be right.
    assert [row.where for row in task.bad_rows] == [
        "MATH_train.jsonl line 5342",
        "MATH_train.jsonl line 5344",
    ]
    assert len(train) + len(dev) + len(task.bad_rows) == 7500
    assert len(test) == 500
    assert len({problem.uid for problem in (*train, *dev, *test)}) == 7498 + 500
    assert {problem.meta["level"] for problem in test} == set("12345")
    assert {problem.meta["level"] for problem in train} == set("12345?")
    assert len({problem.meta["subject"] for problem in train}) == 7
    assert {problem.meta["subject"] for problem in test} == {problem.meta["subject"] for problem in train}


def test_a_row_that_boxes_nothing_is_bad() -> None:
    """It stands in the published file and needs no leave; every other row is a problem, whatever its level."""
    task = MATH(GOLDEN)
    problems = [*task.problems("train"), *task.problems("dev")]
    assert [(row.where, row.reason) for row in task.bad_rows] == [
        ("MATH_train.jsonl line 7", "'answer' is empty")
    ]
    assert len(problems) == 8
    assert {problem.meta["level"] for problem in problems} == set("1345?")
    assert len({problem.meta["subject"] for problem in problems}) == 7


@pytest.mark.parametrize("folder", [GOLDEN, pytest.param(DATA, marks=needs_data)], ids=["golden", "all"])
def test_answers_are_used_as_they_are(folder: Path) -> None:
    task = MATH(folder)
    test = task.problems("test")
    assert test[0].answer == r"\left( 3, \frac{\pi}{2} \right)"
    assert test[0].meta == {"subject": "Precalculus", "level": "2", "file": "math500_test.json", "line": "1"}
    rows = json.loads((folder / "math500_test.json").read_text(encoding="utf-8"))
    assert [problem.answer for problem in test] == [row["answer"] for row in rows]
    for problem in test[:100]:
        assert task.is_correct(problem, problem.answer)
        assert not task.is_correct(problem, None)
        assert not task.is_correct(problem, "")


def test_the_task_of_the_test_set_alone_reads_the_same_folder() -> None:
    """`eval math500 --task.path FOLDER` and `--task math`: the published file is called math500_test.json."""
    (own, whole) = (load_task(TaskConfig(name=name, path=str(GOLDEN))) for name in ("math500", "math"))
    found = [[(p.prompt, p.answer) for p in task.problems("test")] for task in (own, whole)]
    assert found[0] == found[1] != []


def test_small_folder(tmp_path: Path) -> None:
    row = {"problem": "p", "solution": "s", "answer": "1", "level": 3, "subject": "Algebra"}
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "answer": 2}))
    with pytest.raises(UserError) as caught:
        MATH(tmp_path).problems("test")
    assert str(caught.value) == (
        "test.jsonl line 2: 'answer' is a number, expected text; "
        "fix the row or allow it with --task.max-bad-rows 1"
    )
    (problem,) = MATH(tmp_path, max_bad_rows=1).problems("test")
    assert problem.meta == {"subject": "Algebra", "level": "3", "file": "test.jsonl", "line": "1"}
    with pytest.raises(UserError, match="no MATH_train.jsonl or train.jsonl there"):
        MATH(tmp_path).problems("dev")
    with pytest.raises(UserError, match="not a hub name"):
        MATH(tmp_path / "none" / "here")
