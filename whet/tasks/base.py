"""The table of tasks, and their common configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

from whet.tasks.arithmetic import Arithmetic
from whet.tasks.gsm8k import GSM8K
from whet.tasks.jsonl import Jsonl
from whet.tasks.math import MATH
from whet.tasks.mixture import Mixture
from whet.types import Task, UserError

TaskName = Literal["arithmetic", "gsm8k", "math", "jsonl", "mixture"]

OPTIONS: dict[str, frozenset[str]] = {
    "arithmetic": frozenset(),
    "gsm8k": frozenset({"path", "max_bad_rows", "keep_calculator"}),
    "math": frozenset({"path", "max_bad_rows"}),
    "jsonl": frozenset({"path", "max_bad_rows", "prompt_field", "answer_field", "solution_field"}),
    "mixture": frozenset({"weights", "paths"}),
}
"""Which fields of `TaskConfig` each task reads; setting another one is an error. A mixture also reads what its parts
read, but for the path."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Which problems to train or test on."""

    name: TaskName = "arithmetic"
    """Task: arithmetic (made on the spot), gsm8k, math, jsonl (your own data), or a mixture of these."""
    path: str = ""
    """Folder, file (jsonl) or hub name (gsm8k, math) of the data."""
    max_bad_rows: int = 0
    """How many malformed rows per file are left out before it is an error."""
    keep_calculator: bool = False
    """gsm8k: keep the calculator annotations <<48/2=24>> in worked solutions."""
    prompt_field: str = "prompt"
    """jsonl: column of the question; guessed where absent and unambiguous."""
    answer_field: str = "answer"
    """jsonl: column of the gold answer; taken from the solution where absent."""
    solution_field: str | None = None
    """jsonl: column of the worked solution; 'solution' where there is one."""
    weights: dict[str, float] = field(default_factory=dict)
    """mixture: weight of each task by name; a task that comes twice is told apart as jsonl:a, jsonl:b."""
    paths: dict[str, str] = field(default_factory=dict)
    """mixture: path of each task that reads one, under the same names."""

    def __post_init__(self) -> None:
        if self.name not in OPTIONS:
            raise UserError(f"task.name = {self.name!r}: expected one of {', '.join(OPTIONS)}")
        if self.max_bad_rows < 0:
            raise UserError(f"task.max_bad_rows = {self.max_bad_rows}: expected 0 or more")
        if "path" in OPTIONS[self.name] and not self.path:
            raise UserError(f"task {self.name} needs data: give its folder or file with --task.path")
        read = {"name"} | OPTIONS[self.name]
        if self.name == "mixture":
            _check_parts(self)
            read |= {name for label in self.weights for name in OPTIONS[_task_of(label)]} - {"path"}
        for item in fields(self):
            if item.name not in read and getattr(self, item.name) not in (item.default, {}):
                raise UserError(f"task.{item.name} is not read by task {self.name}; leave it out")


def _task_of(label: str) -> str:
    return label.partition(":")[0]


def _check_parts(config: TaskConfig) -> None:
    """Check the weights and paths of a mixture."""
    names = [name for name in OPTIONS if name != "mixture"]
    if not config.weights:
        raise UserError("task mixture needs weights, as in --task.weights gsm8k 3 math 1")
    for label, weight in config.weights.items():
        task = _task_of(label)
        if task not in names:
            raise UserError(f"task.weights.{label}: no such task; expected one of {', '.join(names)}")
        if not 0 < weight < math.inf:
            raise UserError(f"task.weights.{label} = {weight}: expected above 0; leave a task out to drop it")
        if "path" in OPTIONS[task] and not config.paths.get(label):
            raise UserError(f"task {label} needs data: give its folder or file with --task.paths.{label}")
    for label in config.paths:
        if label not in config.weights or "path" not in OPTIONS[_task_of(label)]:
            raise UserError(
                f"task.paths.{label} is not read: no part of that name reads a path; leave it out"
            )


def _mixture(config: TaskConfig) -> Mixture:
    """Load the parts, each with the fields of the mixture that it reads."""
    parts = {}
    for label in config.weights:
        name = _task_of(label)
        options: dict[str, Any] = {option: getattr(config, option) for option in OPTIONS[name] - {"path"}}
        if label in config.paths:
            options["path"] = config.paths[label]
        parts[label] = load_task(TaskConfig(name=cast(TaskName, name), **options))
    return Mixture(parts, config.weights)


TASKS: dict[str, Callable[[TaskConfig], Task]] = {
    "arithmetic": lambda config: Arithmetic(),
    "gsm8k": lambda config: GSM8K(
        config.path, keep_calculator=config.keep_calculator, max_bad_rows=config.max_bad_rows
    ),
    "math": lambda config: MATH(config.path, max_bad_rows=config.max_bad_rows),
    "jsonl": lambda config: Jsonl(
        config.path,
        prompt_field=config.prompt_field,
        answer_field=config.answer_field,
        solution_field=config.solution_field,
        max_bad_rows=config.max_bad_rows,
    ),
    "mixture": _mixture,
}


def load_task(config: TaskConfig) -> Task:
    """Make the task that a configuration names; raise UserError where its data is not there."""
    return TASKS[config.name](config)
