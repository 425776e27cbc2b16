"""Tasks from the user's own file: what works, and one line for every mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from whet import cli
from whet.tasks.base import TaskConfig, answer_type_of, load_task
from whet.tasks.user import UserTask
from whet.types import Turn, UserError

HEAD = "from whet.types import Problem, problem_uid\n"
GOOD = (
    HEAD
    + """
from helper import TEXT
class Mine:
    name = "mine"
    answer_type = "choice"
    def __init__(self, path="none"):
        self.path = path
    def problems(self, split):
        return [Problem(uid=problem_uid("mine", self.path), task="mine", prompt=self.path + TEXT, answer="A")]
    def is_correct(self, problem, answer):
        return {"A": True, "B": False, "?": None}.get(answer, 1)
"""
)


def write(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return f"{folder / 'mine.py'}:Mine"


def test_a_good_task(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("TEXT = '!'")
    spec = write(tmp_path, GOOD)
    task = load_task(TaskConfig(name=spec))
    (problem,) = task.problems("test")
    assert (task.name, answer_type_of(task), problem.prompt) == ("mine", "choice", "none!")
    assert task.is_correct(problem, "A") is True
    assert task.is_correct(problem, "B") is False
    assert task.is_correct(problem, "?") is None
    with pytest.raises(UserError, match="mine.py: is_correct returned int 1, expected True, False or None"):
        task.is_correct(problem, "C")
    assert load_task(TaskConfig(name=spec, path="data")).problems("test")[0].prompt == "data!"
    both = load_task(TaskConfig(name="mixture", weights={spec: 1, f"{spec}:b": 2}, paths={f"{spec}:b": "b"}))
    assert [p.prompt for p in both.problems("test")] == ["none!", "b!"]
    assert answer_type_of(both) == "choice"
    problem = both.problems("test")[1]
    assert both.judge_many([(problem, "?"), (problem, "A")]) == [None, True]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_file_is_read_as_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's cache would take an edit of the same length within a second for none."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "helper.py").write_text("TEXT = '!'")
    prompts = []
    for word in ("none", "nine"):
        spec = write(tmp_path, GOOD.replace("none", word))
        os.utime(tmp_path / "mine.py", (1e9, 1e9))
        prompts.append(load_task(TaskConfig(name=spec)).problems("test")[0].prompt)
        for name in [name for name in sys.modules if name.startswith("whet_user_")]:
            monkeypatch.delitem(sys.modules, name)  # as another process would begin
    assert prompts == ["none!", "nine!"]


def test_a_task_of_the_main_script_is_not_run_again(tmp_path: Path) -> None:
    """Without a guard, its import would run the script, and with it the same call, once more."""
    (tmp_path / "helper.py").write_text("TEXT = '!'")
    call = f"""
from whet.tasks.base import TaskConfig, load_task
print("top level")
print(load_task(TaskConfig(name="mine.py:Mine")).problems("test")[0].prompt)
load_task(TaskConfig(name="{tmp_path}/mine.py:Below"))
class Below: pass
"""
    write(tmp_path, GOOD + call)
    done = subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "top level\nnone!\n"
    assert "no class Below in" in done.stderr
    assert "mine.py above the call that starts this" in done.stderr


def test_a_file_that_trains_when_imported_is_refused(tmp_path: Path) -> None:
    spec = write(tmp_path, "from whet.train.session import begin\nbegin(None)\n" + GOOD)
    with pytest.raises(UserError, match=r"a training was started inside the import of .*mine.py, and would"):
        load_task(TaskConfig(name=spec))
    mine = [module for name, module in sys.modules.items() if name.startswith("whet_user_")]
    assert not [module for module in mine if hasattr(module, "begin")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:", r"mine.py line 1: the import failed: SyntaxError: "),
        (
            "\nimport nothing_of_this_name",
            r"mine.py line 2: the import failed: ModuleNotFoundError: No module",
        ),
        ("x = 1", r"no class Mine in .*mine.py"),
        ("Mine = 3", r"no class Mine in"),
        ("class Mine:\n  def problems(self, split): return []", "class Mine has no method is_correct"),
        ("class Mine: pass", "class Mine has no method problems and no method is_correct"),
        (
            "class Mine:\n  def __init__(self): 1/0\n  def problems(self, s): ...\n  def is_correct(self, p, a): ...",
            r"mine.py line 2: its constructor failed: ZeroDivisionError: division by zero",
        ),
        ("import sys\nsys.exit(3)", r"mine.py line 2: the import failed: SystemExit: 3"),
    ],
)
def test_mistakes_at_the_start(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_task(TaskConfig(name=write(tmp_path, text)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("None", r"problems\('test'\) returned None, expected a list of whet.types.Problem"),
        ("[]", r"returned list \[\], expected a list"),
        ("[{'prompt': 'p'}]", r"problems\('test'\)\[0\] is dict .*, expected a whet.types.Problem"),
        (
            "[Problem(uid='a', task='m', prompt='p', answer=4)]",
            r"\[0\].answer is int 4, expected text that is not empty",
        ),
        ("[Problem(uid='a', task='m', prompt=' ', answer='4')]", r"\[0\].prompt is str ' ', expected text"),
        (
            "[Problem(uid='a', task='m', prompt='p', answer='4')] * 2",
            r"\[1\] has the uid 'a' of another problem",
        ),
        ("[1 / 0]", r"mine.py line 3: problems\('test'\) failed: ZeroDivisionError: division by zero"),
    ],
)
def test_mistakes_of_problems(tmp_path: Path, returned: str, message: str) -> None:
    text = f"{HEAD}class Mine:\n  def problems(self, s): return {returned}\n  def is_correct(self, p, a): return True"
    with pytest.raises(UserError, match=message):
        load_task(TaskConfig(name=write(tmp_path, text))).problems("test")


def test_files_and_paths(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="task file '.*none.py': no such file"):
        load_task(TaskConfig(name=f"{tmp_path}/none.py:Mine"))
    text = "class Mine:\n  def problems(self, split): ...\n  def is_correct(self, p, a): raise KeyError(a)"
    spec = write(tmp_path, text)
    with pytest.raises(
        UserError, match="task.path is not read by task .*: its constructor has no parameter 'path'"
    ):
        load_task(TaskConfig(name=spec, path="x"))
    with pytest.raises(ValueError, match="task.level is not read by task .*Mine; leave it out"):
        TaskConfig(name=spec, level=2)
    with pytest.raises(UserError, match="mine.py line 3: is_correct failed: KeyError: 'x'"):
        load_task(TaskConfig(name=spec)).is_correct(None, "x")  # pyright: ignore[reportArgumentType]


def test_command_line(tmp_path: Path) -> None:
    spec = write(tmp_path, GOOD)
    assert cli.parse("whet x", TaskConfig, {}, ["--name", spec]).config.name == spec
    for name, near in (("gsm8", "gsm8k"), ("countdwn", "countdown"), ("yesno", "yes_no")):
        with pytest.raises(
            UserError, match=f"task.name = '{name}': expected one of .* did you mean '{near}'?"
        ):
            TaskConfig(name=name)


ENVIRONMENT = """
from whet.types import Problem, Turn


class Game:
    def reset(self, problem):
        return []

    def step(self, states, texts):
        return {turns}


class Mine:
    name = "mine"
    answer_type = "{kind}"
    environment = {environment}
    seconds_per_answer = 7

    def problems(self, split):
        return [Problem(uid="a", task="mine", prompt="1", answer="1")]

    def is_correct(self, problem, answer):
        return answer == "1"

    def wrong_answer(self, problem):
        return "2"
"""


def write_environment(
    folder: Path, turns: str = "[Turn() for _ in texts]", kind: str = "number", environment: str = "Game()"
) -> str:
    path = folder / f"mine{abs(hash((turns, kind, environment)))}.py"
    path.write_text(
        ENVIRONMENT.replace("{turns}", turns).replace("{kind}", kind).replace("{environment}", environment)
    )
    return f"{path}:Mine"


def test_an_environment_and_the_optional_parts_are_passed_on(tmp_path: Path) -> None:
    task: Any = UserTask(write_environment(tmp_path, "[Turn(observation='go', reward=1) for _ in texts]"))
    (problem,) = task.problems("train")
    state = task.environment.reset(problem)
    assert task.environment.step([state, state], ["x", "y"]) == [Turn(observation="go", reward=1)] * 2
    assert task.wrong_answer(problem) == "2"
    assert task.seconds_per_answer == 7
    assert not hasattr(task, "judge_many")


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ("[]", r"step returned list \[\], expected a list of 1 Turns"),
        ("None", "step returned None, expected a list of 1 Turns"),
        ("['go']", "step returned str 'go', expected whet.types.Turn"),
        ("[Turn(observation=5)]", "expected whet.types.Turn with text or None"),
        ("[Turn(reward='1')]", "a number as reward"),
        ("[Turn(reward=float('nan'))]", r"paid nan, expected a number from -1e\+09 to 1e\+09"),
        ("[Turn(reward=1e300)]", r"paid 1e\+300, expected a number from"),
        ("[Turn(reward=10**5000)]", r"paid a larger integer, expected a number from"),
        ("1 / 0", r"line 10: environment.step failed: ZeroDivisionError"),
    ],
)
def test_mistakes_in_an_environment(tmp_path: Path, turns: str, message: str) -> None:
    task: Any = UserTask(write_environment(tmp_path, turns))
    with pytest.raises(UserError, match=message):
        task.environment.step([None], ["x"])


def test_an_environment_without_its_methods_and_an_unknown_kind_of_answer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="environment has no method reset and no method step"):
        UserTask(write_environment(tmp_path, environment="object()"))
    with pytest.raises(UserError, match="answer_type is str 'integer', expected one of number, text"):
        UserTask(write_environment(tmp_path, kind="integer"))
