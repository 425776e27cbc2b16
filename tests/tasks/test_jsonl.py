"""Jsonl: every column form, duplicates, splits, and every message; and the table of tasks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from whet.tasks.base import OPTIONS, TASKS, TaskConfig, load_task
from whet.tasks.jsonl import Jsonl
from whet.types import Problem, UserError


def write(folder: Path, *rows: Any, name: str = "test.jsonl") -> Path:
    (folder / name).write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def read(folder: Path, *rows: Any, **options: Any) -> list[tuple[str, str, str]]:
    problems = Jsonl(write(folder, *rows), **options).problems("test")
    return [(problem.prompt, problem.answer, problem.solution) for problem in problems]


def chat(*turns: str) -> dict[str, Any]:
    return {
        "messages": [{"role": turn.partition(":")[0], "content": turn.partition(":")[2]} for turn in turns]
    }


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({"prompt": "p", "answer": " 4 "}, {}, ("p", "4", "")),
        ({"prompt": "p", "answer": "4", "solution": "2+2"}, {}, ("p", "4", "2+2")),
        ({"prompt": "p", "answer": "4", "solution": None}, {}, ("p", "4", "")),
        ({"question": "p", "answer": "4"}, {}, ("p", "4", "")),
        ({"problem": "p", "answer": "4", "solution": "2+2"}, {}, ("p", "4", "2+2")),
        ({"question": "p", "answer": "2+2\n#### 4"}, {}, ("p", "4", "2+2")),
        ({"problem": "p", "solution": r"so \boxed{4}"}, {}, ("p", "4", r"so \boxed{4}")),
        (
            {"q": "p", "a": "4", "s": "2+2"},
            {"prompt_field": "q", "answer_field": "a", "solution_field": "s"},
            ("p", "4", "2+2"),
        ),
        ({"prompt": "p", "question": "x", "answer": "4"}, {}, ("p", "4", "")),
        (
            chat("system:s", "user:p", "assistant:<think>2+2</think>\n<answer>4</answer>"),
            {},
            ("p", "4", "2+2"),
        ),
        (chat("user:p", "assistant:hm", "user:well?", "assistant:2+2\n#### 4"), {}, ("p", "4", "2+2")),
        (chat("user:p", "assistant:The answer is 4."), {}, ("p", "4", "The answer is 4.")),
    ],
)
def test_forms(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    assert read(tmp_path, row, **options) == [expected]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"question": "p", "problem": "p"},
            {},
            "'question' and 'problem' could each be the prompt; "
            "name the column with --task.prompt-field (there are: question, problem)",
        ),
        ({"x": "p"}, {}, "no 'prompt'; name the column with --task.prompt-field (there are: x)"),
        ({"prompt": "p"}, {}, "no 'answer'; name the column with --task.answer-field (there are: prompt)"),
        (
            {"prompt": "p", "solution": "4"},
            {"answer_field": "a"},
            "no 'a'; name the column with --task.answer-field (there are: prompt, solution)",
        ),
    ],
)
def test_column_messages(tmp_path: Path, row: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, row, **options)
    assert str(caught.value) == f"test.jsonl: {message}"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (3, {}, "expected an object {...}, got a number"),
        ({"prompt": "p", "answer": ""}, {}, "'answer' is empty"),
        ({"prompt": "p", "answer": "4"}, {"solution_field": "s"}, "no 's'"),
        ({"prompt": "p", "answer": "4", "solution": 5}, {}, "'solution' is a number, expected text"),
        ({"prompt": "p", "solution": "no idea"}, {}, "no final answer found in 'solution'"),
        ({"messages": "p"}, {}, "'messages' is not a list of objects"),
        (chat("user:p"), {}, "'messages' has no assistant message"),
        (chat("assistant:p"), {}, "'messages' has no user message"),
        (chat("user: ", "assistant:4"), {}, "'messages', user: 'content' is empty"),
        (chat("user:p", "assistant:no idea"), {}, "no final answer found in the last assistant message"),
    ],
)
def test_row_messages(tmp_path: Path, row: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, row, **options)
    remedy = "fix the row or allow it with --task.max-bad-rows 1"
    assert str(caught.value) == f"test.jsonl line 1: {message}; {remedy}"


def test_bad_rows_and_duplicates(tmp_path: Path) -> None:
    row = {"prompt": "p", "answer": "4", "solution": "2+2"}
    folder = write(tmp_path, 3, row, {**row, "solution": "1+3"}, row, {**row, "prompt": "q"})
    task = Jsonl(folder, max_bad_rows=1)
    problems = task.problems("test")
    assert [(problem.prompt, problem.solution) for problem in problems] == [
        ("p", "2+2"),
        ("p", "1+3"),
        ("q", "2+2"),
    ]
    assert len({problem.uid for problem in problems}) == 3
    assert len({problem.meta["prompt_uid"] for problem in problems}) == 2
    assert (len(task.bad_rows), task.num_duplicates) == (1, 1)
    task.problems("test")
    assert (len(task.bad_rows), task.num_duplicates) == (1, 1)


def test_file_is_split_by_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{index // 2}", "answer": "4", "solution": str(index)} for index in range(4000)]
    path = write(tmp_path, *rows, name="all.jsonl") / "all.jsonl"
    zipped = tmp_path / "all.jsonl.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    parts = [Jsonl(path).problems(split) for split in ("train", "dev", "test")]
    assert sum(map(len, parts)) == 4000
    prompts = [{problem.prompt for problem in part} for part in parts]
    assert sum(map(len, prompts)) == 2000
    for part in prompts[1:]:
        assert abs(len(part) - 100) < 4 * 10  # 5 % of 2,000 prompts; standard deviation 10
    assert [p.uid for p in Jsonl(zipped).problems("dev")] == [p.uid for p in parts[1]]


def test_parquet_reads_like_json_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    plain = [{"question": f"p{n}", "answer": f"2+2\n#### {n}"} for n in range(200)]
    chats = [chat(f"user:p{n}", f"assistant:<think>hm</think><answer>{n}</answer>") for n in range(200)]
    for rows in (plain, chats):
        folder = tmp_path / f"{len(rows[0])}"
        folder.mkdir(exist_ok=True)
        lines = write(folder, *rows, name="all.jsonl") / "all.jsonl"
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "all.parquet")
        for split in ("train", "dev", "test"):
            found = Jsonl(folder / "all.parquet").problems(split)
            expected = Jsonl(lines).problems(split)
            assert [(p.uid, p.answer, p.solution) for p in found] == [
                (p.uid, p.answer, p.solution) for p in expected
            ]
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    for piece in (0, 1):
        table = pyarrow.Table.from_pylist(plain[piece * 100 : piece * 100 + 101])  # one row stands in both
        parquet.write_table(table, pieces / f"train-0000{piece}-of-00002.parquet")
    both = [*Jsonl(pieces).problems("train"), *Jsonl(pieces).problems("dev")]
    assert sorted(p.prompt for p in both) == sorted(row["question"] for row in plain)
    with pytest.raises(UserError, match="no test.jsonl there"):
        Jsonl(pieces).problems("test")


def test_judging(tmp_path: Path) -> None:
    task = Jsonl(write(tmp_path, {"prompt": "p", "answer": "1/2"}))
    problem = task.problems("test")[0]
    assert isinstance(problem, Problem)
    assert task.is_correct(problem, "0.5")
    assert not task.is_correct(problem, "0.6")
    assert not task.is_correct(problem, None)


def test_missing_paths(tmp_path: Path) -> None:
    for path in ("", tmp_path / "none"):
        with pytest.raises(UserError, match="no such file or folder; check --task.path"):
            Jsonl(path)
    with pytest.raises(UserError, match="no train.jsonl there"):
        Jsonl(write(tmp_path, {})).problems("dev")


def test_table(tmp_path: Path) -> None:
    assert set(TASKS) == set(OPTIONS)
    write(tmp_path, {"q": "p", "a": "4"})
    task = load_task(TaskConfig(name="jsonl", path=str(tmp_path), prompt_field="q", answer_field="a"))
    assert task.name == "jsonl"
    assert task.problems("test")[0].prompt == "p"
    for name in ("gsm8k", "math"):
        assert load_task(TaskConfig(name=name, path=str(tmp_path))).name == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "poker"}, f"task.name = 'poker': expected one of {', '.join(OPTIONS)} or path.py:MyTask"),
        ({"num_problems": -1}, "task.num_problems = -1: expected 0 or more"),
        ({"max_bad_rows": -1}, "task.max_bad_rows = -1: expected 0 or more"),
        ({"name": "math"}, "task math needs data: give its folder or file with --task.path"),
        ({"path": "x"}, "task.path is not read by task arithmetic; leave it out"),
        (
            {"name": "math", "path": "x", "keep_calculator": True},
            "task.keep_calculator is not read by task math; leave it out",
        ),
    ],
)
def test_config_says_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        TaskConfig(**options)
    assert str(caught.value) == message
