"""The table of tasks, and their common configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from whet.tasks.arithmetic import Arithmetic
from whet.tasks.gsm8k import GSM8K
from whet.tasks.jsonl import Jsonl
from whet.tasks.math import MATH
from whet.types import Task, UserError

TaskName = Literal["arithmetic", "gsm8k", "math", "jsonl"]

OPTIONS: dict[str, frozenset[str]] = {
    "arithmetic": frozenset(),
    "gsm8k": frozenset({"path", "max_bad_rows", "keep_calculator"}),
    "math": frozenset({"path", "max_bad_rows"}),
    "jsonl": frozenset({"path", "max_bad_rows", "prompt_field", "answer_field", "solution_field"}),
}
"""Which fields of `TaskConfig` each task reads; setting another one is an error."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Which problems to train or test on."""

    name: TaskName = "arithmetic"
    """Task: arithmetic (made on the spot), gsm8k, math, or jsonl (your own data)."""
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

    def __post_init__(self) -> None:
        if self.name not in OPTIONS:
            raise UserError(f"task.name = {self.name!r}: expected one of {', '.join(OPTIONS)}")
        if self.max_bad_rows < 0:
            raise UserError(f"task.max_bad_rows = {self.max_bad_rows}: expected 0 or more")
        if "path" in OPTIONS[self.name] and not self.path:
            raise UserError(f"task {self.name} needs data: give its folder or file with --task.path")
        for field in fields(self):
            unread = field.name != "name" and field.name not in OPTIONS[self.name]
            if unread and getattr(self, field.name) != field.default:
                raise UserError(f"task.{field.name} is not read by task {self.name}; leave it out")


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
}


def load_task(config: TaskConfig) -> Task:
    """Make the task that a configuration names; raise UserError where its data is not there."""
    return TASKS[config.name](config)
