"""Several tasks in one: whose problem is judged by whom, and what a configuration must say."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from whet import cli
from whet.tasks.base import OPTIONS, TaskConfig, load_task
from whet.tasks.made.arithmetic import Arithmetic
from whet.tasks.mixture import PART, Mixture

PAIRS = {"weights": {"arithmetic": 3.0, "jsonl:a": 1.0, "jsonl:b": 1.0}}


def write(path: Path, answer: str) -> str:
    rows = [{"prompt": f"question {index}", "answer": f"{answer}{index}"} for index in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    return {"jsonl:a": write(tmp_path / "a.jsonl", "1"), "jsonl:b": write(tmp_path / "b.jsonl", "2")}


def test_union_and_judges(paths: dict[str, str]) -> None:
    task = load_task(TaskConfig(name="mixture", paths=paths, **PAIRS))
    assert isinstance(task, Mixture)
    for split in ("train", "dev", "test"):
        problems = task.problems(split)
        parts = {label: [p for p in problems if p.meta[PART] == label] for label in PAIRS["weights"]}
        assert sum(map(len, parts.values())) == len(problems)
        assert len({problem.uid for problem in problems}) == len(problems), "two parts share a uid"
        assert [p.prompt for p in parts["jsonl:a"]] == [p.prompt for p in parts["jsonl:b"]]
        assert [(p.uid, p.prompt) for p in parts["arithmetic"]] == [
            (p.uid, p.prompt) for p in Arithmetic().problems(split)
        ]
        for a, b in zip(parts["jsonl:a"], parts["jsonl:b"], strict=True):
            assert task.is_correct(a, a.answer)
            assert task.is_correct(b, b.answer)
            assert not task.is_correct(a, b.answer)
            assert not task.is_correct(a, None)


@dataclass
class Judge:
    name: str

    def problems(self, split: str) -> list[Any]:
        return Arithmetic().problems(split)[:3]

    def is_correct(self, problem: Any, answer: str | None) -> bool:
        return answer == self.name


def test_each_part_judges_its_own() -> None:
    task = Mixture({"x": Judge("x"), "y:1": Judge("y"), "y:2": Judge("z")}, {"x": 1, "y:1": 1, "y:2": 1})
    judges = {
        problem.uid: {a for a in "xyz" if task.is_correct(problem, a)} for problem in task.problems("dev")
    }
    assert len(judges) == 9
    assert list(judges.values()) == [{"x"}] * 3 + [{"y"}] * 3 + [{"z"}] * 3


def test_parts_read_the_fields_they_know(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "one", "a": "1"}\n{"q": 7}\n')
    task = load_task(
        TaskConfig(
            name="mixture",
            weights={"arithmetic": 1, "jsonl": 1},
            paths={"jsonl": str(tmp_path / "a.jsonl")},
            prompt="q",
            answer="a",
            max_bad_rows=1,
        )
    )
    jsonl = [p for split in ("train", "dev", "test") for p in task.problems(split) if p.meta[PART] == "jsonl"]
    assert [problem.prompt for problem in jsonl] == ["one"]


def test_command_line_and_yaml(tmp_path: Path) -> None:
    words = (
        "--name mixture --weights gsm8k 3 math 1 jsonl:x 0.5 --paths.gsm8k g --paths.math m --paths.jsonl:x f"
    )
    config = cli.parse("whet x", TaskConfig, {}, words.split()).config
    assert config.weights == {"gsm8k": 3.0, "math": 1.0, "jsonl:x": 0.5}
    assert config.paths == {"gsm8k": "g", "math": "m", "jsonl:x": "f"}
    (tmp_path / "c.yaml").write_text(cli.dump_yaml(config))
    assert cli.load_yaml(tmp_path / "c.yaml", TaskConfig) == config


TWO = {"name": "mixture", "weights": {"arithmetic": 1.0, "gsm8k": 1.0}}
KNOWN = ", ".join(name for name in OPTIONS if name != "mixture")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "mixture"}, "task mixture needs weights, as in --task.weights gsm8k 3 math 1"),
        (
            {"name": "mixture", "weights": {"arithmetic": 1.0, "choice": 1.0}},
            "task choice needs data: give its folder or file with --task.paths.choice",
        ),
        (
            TWO | {"paths": {"gsm8k": "g", "arithmetic": "x"}},
            "task.paths.arithmetic is not read: no part of that name reads a path; leave it out",
        ),
        (
            TWO | {"paths": {"gsm8k": "g", "math": "x"}},
            "task.paths.math is not read: no part of that name reads a path; leave it out",
        ),
        (TWO | {"paths": {"gsm8k": "g"}, "path": "p"}, "task.path is not read by task mixture; leave it out"),
        (
            TWO | {"paths": {"gsm8k": "g"}, "prompt": "q"},
            "task.prompt is not read by task mixture; leave it out",
        ),
        (
            {"name": "mixture", "weights": {"arithmetic": 0.0}},
            "task.weights.arithmetic = 0.0: expected above 0; leave a task out to drop it",
        ),
        (
            {"name": "mixture", "weights": {"arithmetic": float("nan")}},
            "task.weights.arithmetic = nan: expected above 0; leave a task out to drop it",
        ),
        (
            {"name": "mixture", "weights": {"alchemy": 1.0}},
            f"task.weights.alchemy: no such task; expected one of {KNOWN}",
        ),
        (
            {"name": "mixture", "weights": {"mixture": 1.0}},
            f"task.weights.mixture: no such task; expected one of {KNOWN}",
        ),
        ({"weights": {"math": 1.0}}, "task.weights is not read by task arithmetic; leave it out"),
        ({"paths": {"math": "m"}}, "task.paths is not read by task arithmetic; leave it out"),
    ],
)
def test_config_says_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TaskConfig(**options)
