"""Tools: what a call is, what it is answered, and that no answer can be more than text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from whet.schema import ResponseSchema
from whet.tasks.made.arithmetic import Arithmetic
from whet.tasks.made.products import Products
from whet.tasks.tools import MAX_RESULT_CHARACTERS, ToolBox, calculate, environment_for, find_tool
from whet.types import Turn, UserError

SCHEMA = ResponseSchema(tools=("calculator",))

CALCULATIONS = [
    ("4837*9265", "44814805"),
    ("17 * 24 + 1", "409"),
    ("1/8", "0.125"),
    ("1/3", "0.333333333333"),
    (r"\frac{1}{2} + \frac{1}{3}", "0.833333333333"),
    ("-5 - 7", "-12"),
    ("2^10", "1024"),
    ("(1+2)*(3+4)", "21"),
    ("10^20 + 1", "100000000000000000001"),
    ("1/0", "error: division by zero"),
    ("9^9^9^9", "error: too many digits"),
    ("x+1", "error: not rational"),
    ("import os", "error: not an arithmetic expression"),
    ("", "error: not an arithmetic expression"),
    ("1+" * 600 + "1", "error: longer than 1000 characters"),
    ("(" * 900, "error: not an arithmetic expression"),
]


@pytest.mark.parametrize(("text", "expected"), CALCULATIONS)
def test_calculate(text: str, expected: str) -> None:
    assert calculate(text) == expected


def step(box: ToolBox, *texts: str) -> list[Turn]:
    return box.step([None] * len(texts), texts)


def test_only_a_turn_that_ends_in_a_call_is_answered() -> None:
    box = ToolBox(SCHEMA)
    call, named, quoted, plain, unopened = step(
        box,
        "I need <tool>6*7</tool>",
        "<tool>calculator: 6*8</tool>",
        "<tool>6*9</tool></think><answer>54</answer>",
        "</think><answer>1</answer>",
        "6*7</tool>",
    )
    assert (call.observation, call.inline) == ("42", True)
    assert named.observation == "48"
    assert quoted.observation is plain.observation is unopened.observation is None
    assert SCHEMA.find_call("<tool>1</tool> <tool>2</tool>") == "2"
    assert ResponseSchema().find_call("<tool>1</tool>") is None  # no tools, no calls


def test_several_tools_are_told_apart_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def shout(text):\n    return text.upper()\n\n\ndef long(text):\n    return 'x' * 5000\n\n\n"
        "def broken(text):\n    raise ValueError('no ' + text)\n"
    )
    tools = ("calculator", *(f"{path}:{name}" for name in ("shout", "long", "broken")))
    box = ToolBox(ResponseSchema(tools=tools))
    turns = step(
        box, *(f"<tool>{call}</tool>" for call in ("shout: a", "1+1", "long:", "broken: b", "shout: c"))
    )
    observations = [turn.observation or "" for turn in turns]
    assert (observations[0], observations[4]) == ("A", "C")
    assert observations[1] == "error: expected one of calculator, shout, long, broken, then ':' and the input"
    assert observations[2].startswith("x" * MAX_RESULT_CHARACTERS + "...")
    assert "5000 characters, cut" in observations[2]
    assert observations[3].startswith("error: ")
    assert "no b" in observations[3]
    assert "shout" in ResponseSchema(tools=tools).system_prompt
    assert str(tmp_path) not in ResponseSchema(tools=tools).system_prompt


def test_python_runs_in_the_sandbox() -> None:
    tool = find_tool("python")
    answers = tool(
        ["print(6*7)", "import socket; socket.socket()", "1/0", "print(open('/etc/passwd').read())"]
    )
    assert answers[0] == "42"
    assert all(answer.startswith("error: ") for answer in answers[1:])


def test_users_mistakes() -> None:
    with pytest.raises(UserError, match="tool 'calculater': expected calculator, python or path.py:function"):
        find_tool("calculater")
    with pytest.raises(UserError, match=r"nowhere\.py"):
        find_tool("nowhere.py:f")


class Game:
    """An environment of a task's own."""

    name = "game"

    def reset(self, problem: Any) -> Any:
        return [0]

    def step(self, states: Any, texts: Any) -> list[Turn]:
        for state in states:
            state[0] += 1
        return [Turn(observation=f"turn {state[0]}", reward=0.5) for state in states]


def test_a_tasks_own_environment_stands_behind_the_tools() -> None:
    task: Any = Arithmetic()
    assert environment_for(ResponseSchema(), task) is None
    task.environment = Game()
    assert environment_for(ResponseSchema(), task) is task.environment
    box = environment_for(SCHEMA, task)
    assert box is not None
    states = [box.reset(task) for _ in range(3)]
    turns = box.step(states, ["go", "<tool>1+1</tool>", "go"])
    assert [turn.observation for turn in turns] == ["turn 1", "2", "turn 1"]
    assert [turn.inline for turn in turns] == [False, True, False]
    assert [turn.reward for turn in turns] == [0.5, 0.0, 0.5]


def test_products() -> None:
    task = Products()
    splits = {split: task.problems(split) for split in ("train", "dev", "test")}
    assert sum(map(len, splits.values())) == 20_000
    prompts = [tuple(sorted(p.prompt[:-1].split("*"))) for p in splits["test"]]
    assert not set(prompts) & {tuple(sorted(p.prompt[:-1].split("*"))) for p in splits["train"]}
    for problem in splits["dev"]:
        a, b = map(int, problem.prompt[:-1].split("*"))
        assert problem.answer == str(a * b) == problem.solution.rpartition("=")[2]
        assert task.is_correct(problem, problem.answer)
        assert not task.is_correct(problem, f"{a}*{b}")  # copying the question does not pay
        assert set(problem.prompt + problem.solution) <= set(task.alphabet)
        parts, _, sums = problem.solution.partition(f",{problem.solution.split(',')[0]}+")
        assert sum(map(int, parts.split(","))) == a * b
        assert sums
