"""GSM8K: the real counts, answers and splits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from needs import SHARED, needs

from whet.tasks.gsm8k import GSM8K
from whet.types import UserError

DATA = SHARED / "data/gsm8k"
GOLDEN = Path(__file__).parents[1] / "golden/gsm8k"
needs_data = needs("shared/data/gsm8k")


@needs_data
def test_counts_and_splits() -> None:
    task = GSM8K(DATA)
    train, dev, test = (task.problems(split) for split in ("train", "dev", "test"))
    assert len(train) + len(dev) == 7473
    assert len(test) == 1319
    assert abs(len(dev) - 374) < 4 * 19  # 5 % of 7,473; standard deviation 19
    assert len({problem.uid for problem in (*train, *dev, *test)}) == 7473 + 1319
    assert task.bad_rows == []
    assert [problem.uid for problem in GSM8K(DATA).problems("dev")] == [problem.uid for problem in dev]


def test_first_problem() -> None:
    first = next(
        p for split in ("train", "dev") for p in GSM8K(GOLDEN).problems(split) if p.meta["line"] == "1"
    )
    assert first.prompt.startswith("Natalia sold clips to 48 of her friends")
    assert first.answer == "72"
    assert first.solution == (
        "Natalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips altogether in April and May."
    )
    assert first.meta == {"file": "train.jsonl", "line": "1"}


def test_published_answers() -> None:
    """The numbers behind '####' of the first ten rows."""
    task = GSM8K(GOLDEN)
    lines = {int(p.meta["line"]): p.answer for split in ("train", "dev") for p in task.problems(split)}
    assert [int(lines[n]) for n in sorted(lines)] == [72, 10, 5, 42, 624, 35, 48, 16, 41, 990]
    tested = [int(problem.answer) for problem in task.problems("test")]
    assert tested == [18, 3, 70000, 540, 20, 64, 260, 160, 45, 460]


@pytest.mark.parametrize("folder", [GOLDEN, pytest.param(DATA, marks=needs_data)], ids=["golden", "all"])
def test_answers_are_clean_and_gold_is_correct(folder: Path) -> None:
    task = GSM8K(folder)
    for split in ("train", "dev", "test"):
        for problem in task.problems(split):
            assert float(problem.answer) == int(float(problem.answer))
            assert "," not in problem.answer
            assert "<<" not in problem.solution
            assert "####" not in problem.solution
    for problem in task.problems("test")[:200]:
        assert task.is_correct(problem, problem.answer)
        assert not task.is_correct(problem, problem.answer + "7")
        assert not task.is_correct(problem, None)
        assert not task.is_correct(problem, "")


def write(folder: Path, *answers: str) -> Path:
    rows = [
        json.dumps({"question": f"question {index}", "answer": text}) for index, text in enumerate(answers)
    ]
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text("\n".join(rows))
    return folder


def test_calculator_and_commas(tmp_path: Path) -> None:
    folder = write(tmp_path, "a #### b = <<1+1=2>>2\n#### -1,080 ")
    (problem,) = GSM8K(folder).problems("test")
    assert (problem.solution, problem.answer) == ("a #### b = 2", "-1080")
    (problem,) = GSM8K(folder, keep_calculator=True).problems("test")
    assert problem.solution == "a #### b = <<1+1=2>>2"


def test_messages(tmp_path: Path) -> None:
    folder = write(tmp_path, "x #### 1", "x 2", "x #### ")
    with pytest.raises(UserError) as caught:
        GSM8K(folder).problems("test")
    assert str(caught.value) == (
        "test.jsonl line 2: 'answer' has no '####' (and 1 more bad row); "
        "fix the rows or allow them with --task.max-bad-rows 2"
    )
    task = GSM8K(folder, max_bad_rows=2)
    assert len(task.problems("test")) == 1
    assert [row.reason for row in task.bad_rows] == [
        "'answer' has no '####'",
        "'answer' has nothing after '####'",
    ]
    with pytest.raises(UserError, match="split 'x': expected train, dev or test"):
        task.problems("x")
    (folder / "test.jsonl").unlink()
    with pytest.raises(UserError, match="no test.jsonl there"):
        GSM8K(folder).problems("test")
    with pytest.raises(UserError, match="no such folder, and not a hub name such as 'openai/gsm8k'"):
        GSM8K(folder / "nothing" / "of" / "it")
    with pytest.raises(UserError, match="train.jsonl: a file, where a folder .* is read; your rows: --data"):
        GSM8K(folder / "train.jsonl")


def test_one_bad_row_says_exactly_this(tmp_path: Path) -> None:
    folder = write(tmp_path, *["x #### 1"] * 811, "x 2")
    with pytest.raises(UserError) as caught:
        GSM8K(folder).problems("train")
    assert str(caught.value) == (
        "train.jsonl line 812: 'answer' has no '####'; fix the row or allow it with --task.max-bad-rows 1"
    )
