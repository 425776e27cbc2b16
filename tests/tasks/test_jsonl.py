"""Jsonl: every column form, duplicates, splits, and every message; and the table of tasks."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from whet.config import from_dict
from whet.eval.audit.dispute import dispute
from whet.rewards.base import build_rewards
from whet.schema import ResponseSchema
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
            {"prompt": "q", "answer": "a", "solution": "s"},
            ("p", "4", "2+2"),
        ),
        ({"prompt": "p", "question": "x", "answer": "4"}, {}, ("p", "4", "")),
        (
            chat("system:s", "user:p", "assistant:<think>2+2</think>\n<answer>4</answer>"),
            {},
            ("p", "4", "2+2"),
        ),
        (chat("user:p", "assistant:hm", "user:well?", "assistant:2+2\n#### 4"), {}, ("well?", "4", "2+2")),
        ({"question": "p", "answer": 53}, {}, ("p", "53", "")),
        ({"question": "p", "answer": 53.0}, {}, ("p", "53", "")),
        ({"question": "p", "answer": 10**400}, {}, ("p", f"1{'0' * 400}", "")),  # more than a float holds
        ({"question": "p", "answer": 0.25}, {}, ("p", "0.25", "")),
        ({"Problem": "p", "Solution": "2+2", "Answer": 4}, {}, ("p", "4", "2+2")),
        ({"problem": "p", "expected_answer": "4"}, {}, ("p", "4", "")),
        ({"question": "p", "reward_model": {"ground_truth": "4"}}, {}, ("p", "4", "")),
        ({"question": "p", "gold": {"value": "4"}}, {"answer": "gold.value"}, ("p", "4", "")),
        ({"question": "p", "answer": "x", "final_answer": "4"}, {"answer": "final_answer"}, ("p", "4", "")),
        ({"prompt": [{"role": "user", "content": "p"}], "answer": "4"}, {}, ("p", "4", "")),
        ({"messages": [{"role": "user", "content": "p"}], "ground_truth": "4"}, {}, ("p", "4", "")),
        # Reasoning in R1's style is the solution; its tags are the schema's business.
        (
            {"problem": "p", "solution": "<think>\n2+2\n</think>\n\nIt is 4.", "answer": "4"},
            {},
            ("p", "4", "2+2"),
        ),
        ({"problem": "p", "solution": r"<think>2+2</think>so \boxed{4}"}, {}, ("p", "4", "2+2")),
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
            "name the column with --task.prompt (there are: question, problem)",
        ),
        (
            {"messages": [], "conversations": []},
            {},
            "'messages' and 'conversations' could each be the prompt; "
            "name the column with --task.prompt (there are: messages, conversations)",
        ),
        (
            {"question": "p", "final_answer": "1", "expected_answer": "2"},
            {},
            "'final_answer' and 'expected_answer' could each be the answer; "
            "name the column with --task.answer (there are: question, final_answer, expected_answer)",
        ),
        ({"x": "p"}, {}, "no column is a question; name it with --task.prompt (there are: x)"),
        (
            {"Frage": "p", "Antwort": "a"},
            {},
            "no column is a question; name it with --task.prompt, and that of the answer with --task.answer "
            "(there are: Frage, Antwort)",
        ),
        (
            {"prompt": "p", "solution": "4"},
            {"answer": "a"},
            "no column 'a'; name another with --task.answer (there are: prompt, solution)",
        ),
        (
            {"prompt": "p", "gold": {"value": "4"}},
            {"answer": "gold.text"},
            "no column 'gold.text'; name another with --task.answer (there are: prompt, gold)",
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
        ({"prompt": "p", "answer": None}, {}, "'answer' is null, expected text"),
        ({"prompt": "p", "answer": True}, {}, "'answer' is true, expected text"),
        ({"prompt": "p", "answer": "4", "solution": ["5"]}, {}, "'solution' is a list, expected text"),
        ({"messages": "p"}, {}, "'messages' is not a list of objects"),
        ({"messages": "[3]"}, {}, "'messages' is not a list of objects"),
        ({"messages": [3]}, {}, "'messages' is not a list of objects"),
        (
            {"messages": [{"role": "narrator", "content": "p"}]},
            {},
            "'messages' has a message of role 'narrator', expected system, user, assistant or tool",
        ),
        (chat("user:p"), {}, "'messages' has no assistant message"),
        (chat("assistant:p"), {}, "'messages' has no user message before its last answer"),
        (chat("system:s", "assistant:p"), {}, "'messages' has no user message before its last answer"),
        (chat("user: ", "assistant:4"), {}, "'messages', user: 'content' is empty"),
        (
            chat("user:p", "assistant:4", "assistant:5"),
            {},
            "'messages': its last answer follows a message of the assistant",
        ),
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


def test_a_column_of_dates_or_versions_is_compared_as_text(tmp_path: Path) -> None:
    """2022 is not the first of January 2024, whatever its figures amount to; among versions 1.10 is not 1.1."""
    golds = ["2024-01-01", "2024-02-13", "1.10", "2023-12-31"]
    path = tmp_path / "dates.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"When {gold}?", "answer": gold}) + "\n" for gold in golds))
    task = Jsonl(path)
    by_gold = {p.answer: p for split in ("train", "dev", "test") for p in task.problems(split)}
    assert {problem.meta["column"] for problem in by_gold.values()} == {"text"}
    assert task.is_correct(by_gold["2024-01-01"], "January 1, 2024")
    assert not task.is_correct(by_gold["2024-01-01"], "2022")
    assert not task.is_correct(by_gold["1.10"], "1.1")
    assert task.is_correct(by_gold["1.10"], "1.10.")


def test_a_column_of_decimal_commas_is_compared_as_numbers(tmp_path: Path) -> None:
    """A colleague's prices: `3,00` is what a model calls 3, and 3.00; a second verifier gets points."""
    golds = ["3,00", "12,50", "47", "0,50"]
    path = tmp_path / "prices.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"How much is {gold}?", "answer": gold}) + "\n" for gold in golds)
    )
    task = Jsonl(path)
    by_gold = {p.answer: p for split in ("train", "dev", "test") for p in task.problems(split)}
    assert {problem.meta["column"] for problem in by_gold.values()} == {"comma"}
    assert (
        "decimal commas: '12,50' is 12.50" in task.recognised
        or "decimal commas: '3,00' is 3.00" in task.recognised
    )
    for answer in ("3", "3.00", "3,00 €", "R$ 3,00"):
        assert task.is_correct(by_gold["3,00"], answer)
    assert not task.is_correct(by_gold["12,50"], "12, 50 and 3")
    assert not task.is_correct(by_gold["12,50"], "1250")
    assert not dispute(task, list(by_gold.values()))


@pytest.mark.parametrize(
    ("name", "golds", "says", "is_thousand"),
    [
        ("a.csv", "1.700 225 4.000", "decimal commas: '1.700' is 1700", True),
        ("a.jsonl", "1.700 1.234.567 8", "decimal commas: '1.700' is 1700", True),
        ("a.jsonl", "1.700 1,05 8", "decimal commas: '1.700' is 1700, '1,05' is 1.05", True),
        ("a.jsonl", "1.700 225 4.000", "warning: '1.700' is read as a decimal number", False),
        ("a.csv", "1.700 225 2.5", "", False),
        ("a.jsonl", "1.700 225 2.5", "", False),
    ],
)
def test_points_that_group_thousands_are_seen_or_told_of(
    name: str, golds: str, says: str, is_thousand: bool, tmp_path: Path
) -> None:
    """A Spanish spreadsheet, whose columns are parted by semicolons, writes 1700 as `1.700`."""
    path = tmp_path / name
    rows = [(f"How many are {gold}?", gold) for gold in golds.split()]
    lines = (
        ["prompt;answer", *(f"{question};{gold}" for question, gold in rows)]
        if name.endswith("csv")
        else [json.dumps({"prompt": question, "answer": gold}) for question, gold in rows]
    )
    path.write_text("\n".join(lines) + "\n")
    task = Jsonl(path)
    by_gold = {p.answer: p for split in ("train", "dev", "test") for p in task.problems(split)}
    assert says in task.recognised
    assert bool(says) or "1.700'" not in task.recognised.partition("\n  answer")[0]
    for answer, is_right in (
        ("1700", is_thousand),
        ("1.700", True),
        ("1,700", is_thousand),
        ("1.7", not is_thousand),
    ):
        assert task.is_correct(by_gold["1.700"], answer) is is_right, answer
    assert not dispute(task, list(by_gold.values()))
    for problem in by_gold.values():  # what an audit tries
        assert not task.is_correct(problem, task.wrong_answer(problem))
        for spelling in task.other_spellings(problem):
            assert task.is_correct(problem, spelling), (problem.answer, spelling)


def test_answers_that_may_be_decimals_or_pairs_are_told_of(tmp_path: Path) -> None:
    """A file of prices without 1,05 among them: `12,75` may be 12.75, or the numbers 12 and 75."""
    rows = [{"prompt": f"How much is {gold}?", "answer": gold} for gold in ("7", "12,75", "5,50 €")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Jsonl(tmp_path / "a.jsonl")
    problems = {p.answer: p for split in ("train", "dev", "test") for p in task.problems(split)}
    assert "warning: '12,75' is read as two numbers; where it means 12.75, write it so" in task.recognised
    assert task.is_correct(problems["12,75"], "75 and 12")
    (tmp_path / "a.csv").write_text(
        "prompt;answer\n" + "".join(f"{r['prompt']};{r['answer']}\n" for r in rows)
    )
    task = Jsonl(tmp_path / "a.csv")
    problems = {p.answer: p for split in ("train", "dev", "test") for p in task.problems(split)}
    assert "decimal commas: '12,75' is 12.75" in task.recognised
    assert [task.is_correct(problems["12,75"], answer) for answer in ("12.75", "75,12")] == [True, False]
    assert [task.is_correct(problems["5,50 €"], answer) for answer in ("5,5 €", "50,5 €")] == [True, False]


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
    with pytest.raises(UserError, match="no such file or folder, and not a hub name .*; check --task.path"):
        Jsonl(tmp_path / "none")
    with pytest.raises(UserError, match="no train.jsonl there"):
        Jsonl(write(tmp_path, {})).problems("dev")


def all_of(folder: Path, *rows: Any, **options: Any) -> list[Problem]:
    return Jsonl(write(folder, *rows), **options).problems("test")


def test_a_chat_is_the_last_reply_to_all_before_it(tmp_path: Path) -> None:
    """Nothing is mis-paired, nothing dropped: what asks is a conversation, its reply is learned as it is."""
    rows = [
        chat("system:Be brief.", "user:Hi", "assistant:Hello!", "user:Who are you?", "assistant:A model. "),
        chat("user:Hi", "assistant:Hello!"),
        chat(
            "user:Hi", "assistant:Hello!", "user:Bye"
        ),  # its last question was never answered: as the row above
    ]
    text = json.dumps(chat("user:Hi", "assistant:Yes?")["messages"])
    first, second, third = all_of(tmp_path, *rows, {"messages": text})
    assert (first.prompt, first.reply, first.answer, first.solution) == ("Who are you?", "A model. ", "", "")
    assert [(m.role, m.content) for m in first.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello!"),
        ("user", "Who are you?"),
    ]
    assert (second.prompt, second.reply, second.messages) == ("Hi", "Hello!", ())
    assert (third.prompt, third.reply) == ("Hi", "Yes?")  # as JSON text, which a CSV file has
    assert len({first.meta["prompt_uid"], second.meta["prompt_uid"]}) == 2


def test_share_gpt(tmp_path: Path) -> None:
    words = [("system", "s"), ("human", "p"), ("gpt", "q?"), ("human", "r"), ("gpt", "t")]
    rows = [{"conversations": [{"from": who, "value": text} for who, text in words]}]
    (problem,) = all_of(tmp_path, *rows)
    assert [m.role for m in problem.messages] == ["system", "user", "assistant", "user"]
    assert (problem.prompt, problem.reply) == ("r", "t")
    (problem,) = all_of(
        tmp_path, {"system": "s", "conversations": [{"from": w, "value": t} for w, t in words[1:3]]}
    )
    assert [(m.role, m.content) for m in problem.messages] == [("system", "s"), ("user", "p")]


def test_tools_and_thinking(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    definition = {"type": "function", "function": {"name": "add", "parameters": {}}}
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I should add."},
        {"role": "tool", "name": "add", "content": "4"},
        {"role": "assistant", "content": "Four.", "reasoning_content": "The tool says 4."},
    ]
    (problem,) = all_of(tmp_path, {"messages": messages, "tools": [definition]})
    assert (problem.prompt, problem.reply, problem.solution) == ("2+2?", "Four.", "The tool says 4.")
    asked, called, told = problem.messages
    assert (called.content, called.thinking, json.loads(called.tool_calls)) == ("", "I should add.", [call])
    assert (told.role, told.name, told.content) == ("tool", "add", "4")
    assert json.loads(problem.meta["tools"]) == [definition]
    (problem,) = all_of(tmp_path, {"messages": messages[:2], "tools": json.dumps([definition])})
    assert (problem.reply, json.loads(problem.meta["tool_calls"])) == ("", [call])
    assert json.loads(problem.meta["tools"]) == [definition]


def test_answers_are_taken_from_all_replies_or_from_none(tmp_path: Path) -> None:
    right, other = chat("user:p", "assistant:so \\boxed{4}"), chat("user:q", "assistant:In 1905.")
    assert [(p.answer, p.reply) for p in all_of(tmp_path, right)] == [("4", "")]
    task = Jsonl(write(tmp_path, right, other))
    assert [(p.answer, p.reply) for p in task.problems("test")] == [
        ("", "so \\boxed{4}"),
        ("", "In 1905."),  # the last number of a chat is no answer
    ]
    assert task.no_gold == (
        "test.jsonl: 1 of 2 rows have no final answer in the last assistant message (first: 2), or leave out such rows "
        "with --task.max-bad-rows 1"
    )
    task = Jsonl(write(tmp_path, right, other), max_bad_rows=1)
    assert [(p.answer, p.reply) for p in task.problems("test")] == [("4", "")]
    assert [row.reason for row in task.bad_rows] == ["no final answer found in the last assistant message"]
    assert [(p.answer, p.reply) for p in all_of(tmp_path, right, answer="none")] == [("", "so \\boxed{4}")]


def test_instructions_and_plain_text(tmp_path: Path) -> None:
    rows = [{"instruction": "Translate.", "input": "Hund", "output": "dog"}]
    (problem,) = all_of(tmp_path, *rows)
    assert (problem.prompt, problem.reply, problem.messages) == ("Translate.\n\nHund", "dog", ())
    texts = [{"text": "Once upon a time."}, {"text": "The end."}]
    problems = all_of(tmp_path, *texts)
    assert [(p.prompt, p.reply) for p in problems] == [("", "Once upon a time."), ("", "The end.")]
    assert len({p.meta["prompt_uid"] for p in problems}) == 2  # or all of it would be one split
    (problem,) = all_of(tmp_path, {"prompt": "Say anything."})
    assert (problem.prompt, problem.answer, problem.reply) == ("Say anything.", "", "")


def test_what_was_recognised_is_told(tmp_path: Path) -> None:
    task = Jsonl(write(tmp_path, {"question": "2+2?", "final_answer": 4, "id": 7}))
    assert task.recognised == ""
    task.problems("test")
    assert task.recognised == (
        "test.jsonl: prompt = 'question', answer = 'final_answer'\n  question: '2+2?'\n  answer: '4'"
    )
    task = Jsonl(write(tmp_path, chat("system:s", "user:p", "assistant:Hello.")))
    task.problems("test")
    assert task.recognised == (
        "test.jsonl: chat = 'messages'\nwithout gold answers: 1 of 1 rows have no final answer in the last assistant "
        "message (first: 1)\n  question: 2 messages, last 'p'\n  reply: 'Hello.'"
    )


def test_only_the_first_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "answer": "4"} for n in range(9)]
    assert [p.prompt for p in all_of(tmp_path, *rows, max_rows=3)] == ["p0", "p1", "p2"]


def test_old_names_of_columns_are_read() -> None:
    old = {
        "name": "jsonl",
        "path": "x",
        "prompt_field": "q",
        "answer_field": "answer",
        "solution_field": None,
    }
    assert from_dict(TaskConfig, old, where="run") == TaskConfig(name="jsonl", path="x", prompt="q")
    assert from_dict(TaskConfig, {"prompt_field": "prompt"}, where="run") == TaskConfig()
    with pytest.raises(UserError, match="run: prompt_field is now called prompt, and both are given"):
        from_dict(TaskConfig, old | {"prompt": "r"}, where="run")


def test_table(tmp_path: Path) -> None:
    assert set(TASKS) == set(OPTIONS)
    write(tmp_path, {"q": "p", "a": "4"})
    task = load_task(TaskConfig(name="jsonl", path=str(tmp_path), prompt="q", answer="a"))
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
        ({"name": "hub"}, "task hub needs data: give its hub name with --task.path"),
        ({"name": "code"}, "task code needs data: give its folder or file with --task.path"),
        ({"max_rows": -1}, "task.max_rows = -1: expected 0 or more"),
        (
            {"name": "math", "prompt": "problem"},
            "task.prompt is not read by task math; leave it out",
        ),
        ({"path": "x"}, "task.path is not read by task arithmetic; leave it out"),
        (
            {"name": "math", "path": "x", "keep_calculator": True},
            "task.keep_calculator is not read by task math; leave it out",
        ),
    ],
)
def test_config_says_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TaskConfig(**options)


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        ([{"question": "p", "answer": ["Rome", "Roma", " Rome", 7]}], {}, ("Rome", "Roma", "7")),
        ([{"question": "p", "answers": ["Rome", "Roma"]}], {}, ("Rome", "Roma")),
        (
            [{"question": "p", "answers": {"text": ["Rome", "Roma"], "answer_start": [3, 9]}}],
            {},
            ("Rome", "Roma"),
        ),
        (
            [{"question": "p", "answer": {"value": "Rome", "aliases": ["Rome", "Roma"]}}],
            {"answer": "answer.aliases"},
            ("Rome", "Roma"),
        ),
        ([{"question": "p", "answer": '["Rome", "Roma"]'}], {}, ("Rome", "Roma")),
        ([{"question": "p", "answer": "[1, 2]"}], {}, ("[1, 2]",)),
        ([{"question": "p", "answer": '["a"]'}, {"question": "q", "answer": "b"}], {}, ('["a"]',)),
    ],
)
def test_any_answer_of_a_list_is_right(
    tmp_path: Path, rows: list[Any], options: dict[str, str], expected: tuple[str, ...]
) -> None:
    task = Jsonl(write(tmp_path, *rows), **options)
    problem = next(problem for problem in task.problems("test") if problem.prompt == "p")
    assert problem.answers == expected
    assert all(task.is_correct(problem, answer) for answer in expected)
    assert not task.is_correct(problem, "Paris")
    assert Problem(**json.loads(json.dumps(asdict(problem)))) == problem  # as checkpoints hold it
    for name in ("correct", "exact_match", "answer_bands", "distance"):
        (reward,) = build_rewards({name: 1.0}, ResponseSchema(), task)
        scores = [
            reward.function(problem, f"t</think>\n<answer>{text}</answer>") for text in (*expected, "x")
        ]
        assert len(set(scores[:-1])) == 1, name
        assert scores[-1] < scores[0], name


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([], "'answer' is an empty list"),
        (["a", None], "a list of answers, of which one is wrong: 'answer' is null"),
        (
            {"value": "a"},
            "'answer' is an object, expected text; name one of its own with --task.answer: answer.value",
        ),
    ],
)
def test_a_list_of_answers_that_cannot_be_used(tmp_path: Path, answer: Any, expected: str) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        read(tmp_path, {"question": "p", "answer": answer})


@pytest.mark.parametrize("name", ["test.jsonl", "test.json"])
def test_an_empty_object_before_the_rows_is_a_bad_row(name: str, tmp_path: Path) -> None:
    rows = [{}, {"question": "1+1?", "answer": "2"}]
    text = json.dumps(rows) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / name).write_text(text)
    task = load_task(TaskConfig(name="jsonl", path=str(tmp_path / name), max_bad_rows=1))
    (problem,) = [problem for split in ("train", "dev", "test") for problem in task.problems(split)]
    assert (problem.prompt, problem.answer) == ("1+1?", "2")


def talk(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


ASK, SUNNY = {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Sunny."}


def calling(arguments: Any, **more: Any) -> dict[str, Any]:
    call = {"type": "function", "id": "abc123def", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [{**call, **more}]}


def calls_of(tmp_path: Path, message: dict[str, Any]) -> Any:
    (problem,) = all_of(tmp_path, talk(ASK, message, {"role": "tool", "content": "fine"}, SUNNY))
    return json.loads(problem.messages[1].tool_calls)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_arrows_padding_of_nested_columns_is_dropped(tmp_path: Path, ending: str) -> None:
    """Arrow gives every object of a column the fields of all: the empty ones were never written."""
    schema = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", None]}}}
    other = {"type": "object", "properties": {"zone": {"type": "array", "items": {"type": "string"}}}}
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": schema}},
        {"type": "function", "function": {"name": "time", "parameters": other}},
    ]
    where = {"city": "Oslo", "days": [{"day": 1, "hour": None}, {"day": None, "hour": 3}, None]}
    rows = [
        talk(ASK, calling(where), {"role": "tool", "content": "fine", "tool_call_id": "abc123def"}, SUNNY),
        talk(ASK, calling({"zone": ["x"]}), {"role": "tool", "content": "late", "name": "time"}, SUNNY),
        talk(ASK, calling({}), {"role": "tool", "content": "late"}, SUNNY),
    ]
    rows = [row | {"tools": tools} for row in rows]
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    if ending == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "test.parquet")
    else:
        write(tmp_path, *table.to_pylist())
        assert '"zone": null' in (tmp_path / "test.jsonl").read_text()
    found = Jsonl(tmp_path).problems("test")
    kept = {"city": "Oslo", "days": [{"day": 1}, {"hour": 3}, None]}  # an empty item of a list was written
    for problem, arguments in zip(found, (kept, {"zone": ["x"]}, {}), strict=True):
        assert json.loads(problem.messages[1].tool_calls)[0]["function"]["arguments"] == arguments
        assert json.loads(problem.meta["tools"]) == tools
    assert [p.messages[2].as_dict() for p in found] == [
        {"role": "tool", "content": "fine", "tool_call_id": "abc123def"},
        {"role": "tool", "content": "late", "name": "time"},
        {"role": "tool", "content": "late"},
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Oslo", "unit": null}', {"city": "Oslo", "unit": None}),  # written on purpose
        ('{"city": "Tromsø"}', {"city": "Tromsø"}),
        ("{}", {}),
        ("", {}),
        ("null", {}),
        (None, {}),
    ],
)
def test_arguments_that_are_json_text_are_objects(tmp_path: Path, arguments: Any, expected: Any) -> None:
    (call,) = calls_of(tmp_path, calling(arguments))
    assert call == {
        "type": "function",
        "id": "abc123def",
        "function": {"name": "weather", "arguments": expected},
    }


@pytest.mark.parametrize("arguments", ["Oslo", '"Oslo"', "[1]", "5", '{"city": ', ["Oslo"], 5, True])
def test_arguments_that_are_no_object_are_a_bad_row(tmp_path: Path, arguments: Any) -> None:
    with pytest.raises(
        UserError, match=r"line 1: 'messages', assistant: the arguments of call 'weather' are"
    ):
        calls_of(tmp_path, calling(arguments))


def test_calls_in_older_forms(tmp_path: Path) -> None:
    """ShareGPT's, OpenAI's first form, and calls as JSON text: as chat templates take them."""
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    expected = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
    said = {"role": "assistant", "content": None}
    for form in (
        {"function_call": call},
        {"tool_calls": json.dumps([call])},
        {"tool_calls": [json.dumps(call)]},
    ):
        assert calls_of(tmp_path, {**said, **form}) == expected
    turns = (
        ("human", "Weather?"),
        ("function_call", json.dumps(call)),
        ("observation", "fine"),
        ("gpt", "Sunny."),
    )
    (problem,) = all_of(tmp_path, {"conversations": [{"from": who, "value": text} for who, text in turns]})
    assert json.loads(problem.messages[1].tool_calls) == expected
    tool = {"name": "weather", "parameters": json.dumps({"type": "object", "properties": {}})}
    (problem,) = all_of(tmp_path, talk(ASK, SUNNY, tools=[json.dumps(tool)]))
    assert json.loads(problem.meta["tools"]) == [{**tool, "parameters": {"type": "object", "properties": {}}}]


OFF = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"trainable": "false"}]
OFF += [{"loss": False}, {"loss_weight": 0}, {"loss_mask": 0}, {"masked": True}, {"masked": 1, "weight": 0}]
ON = [
    {},
    {"weight": 1},
    {"weight": 1.0},
    {"train": True},
    {"loss": True},
    {"masked": False},
    {"weight": None},
]


@pytest.mark.parametrize("mark", [*OFF, *ON], ids=str)
def test_turns_that_are_not_to_be_learnt(tmp_path: Path, mark: dict[str, Any]) -> None:
    first = {"role": "assistant", "content": "a", **mark}
    is_learnt = mark in ON
    (problem,) = all_of(tmp_path, talk(ASK, first, ASK, SUNNY))
    assert [m.is_learnt for m in problem.messages if m.role == "assistant"] == [is_learnt]
    assert problem.messages[1].as_dict() == {"role": "assistant", "content": "a"}
    # The last turn that is learnt ends the row.
    (problem,) = all_of(tmp_path, talk(ASK, SUNNY, ASK, first, {"role": "tool", "content": "x"}, first))
    assert (problem.reply, len(problem.messages)) == (("a", 5) if is_learnt else ("Sunny.", 0))
    if not is_learnt:
        with pytest.raises(
            UserError, match="line 1: 'messages': no message of the assistant's is to be learnt"
        ):
            all_of(tmp_path, talk(ASK, first))
        (problem,) = all_of(tmp_path, talk(ASK, first, answer="4"))  # beside an answer it is no solution
        assert (problem.prompt, problem.answer, problem.solution) == ("Weather?", "4", "")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (talk(ASK, {**SUNNY, "weight": 0.5}), "'weight' is 0.5, expected 0 or 1"),
        (talk(ASK, {**SUNNY, "train": "maybe"}), "'train' is 'maybe', expected 0 or 1"),
        (talk({**ASK, "train": True}, SUNNY), "user: marked as to be learnt; only the assistant's"),
        (talk({**ASK, "masked": False}, SUNNY), "user: marked as to be learnt; only the assistant's"),
    ],
)
def test_marks_that_cannot_be_followed_are_bad_rows(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"line 1: 'messages', .*{message}"):
        all_of(tmp_path, row)
