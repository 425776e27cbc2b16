"""The table of tasks, and their common configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from whet.config import closest, show
from whet.schema import AnswerType
from whet.tasks.choice import choice, yes_no
from whet.tasks.code import Code
from whet.tasks.gsm8k import GSM8K
from whet.tasks.gym import Gym
from whet.tasks.jsonl import Jsonl
from whet.tasks.made.arithmetic import Arithmetic
from whet.tasks.made.countdown import countdown
from whet.tasks.made.letters import letters
from whet.tasks.made.products import Products
from whet.tasks.made.sanity import Sanity
from whet.tasks.math import MATH
from whet.tasks.mixture import Mixture
from whet.tasks.symbolic import Symbolic
from whet.tasks.user import UserTask, is_user_task
from whet.types import Task, UserError

_DRAWN = frozenset({"num_problems", "seed"})
_MADE = _DRAWN | {"path", "max_bad_rows", "level"}
OPTIONS: dict[str, frozenset[str]] = {
    "arithmetic": frozenset(),
    "products": frozenset(),
    "countdown": _MADE,
    "letters": _MADE,
    "sanity": frozenset(),
    "gsm8k": frozenset({"path", "max_bad_rows", "keep_calculator", "symbolic"}),
    "math": frozenset({"path", "max_bad_rows", "symbolic"}),
    "humaneval": frozenset({"path", "max_bad_rows"}),
    "mbpp": frozenset({"path", "max_bad_rows"}),
    "code": frozenset({"path", "max_bad_rows"}),
    "choice": frozenset({"path", "max_bad_rows"}),
    "yes_no": frozenset({"path", "max_bad_rows"}),
    "gym": _DRAWN | {"path"},
    "jsonl": frozenset(
        {"path", "max_bad_rows", "prompt_field", "answer_field", "solution_field", "symbolic"}
    ),
    "mixture": frozenset({"weights", "paths"}),
}
"""Fields of `TaskConfig` that each task reads; setting another one is an error. A mixture also reads its parts' fields,
except the path."""
NO_PATH_NEEDED = frozenset({"countdown", "letters"})
"""Tasks that generate their problems if no data is given."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The problems to train or test on."""

    name: str = "arithmetic"
    """Generated: arithmetic, products, countdown, letters; 50 fixed sums: sanity; data: gsm8k, math, choice, yes_no,
    humaneval, mbpp, code, jsonl; gym (reasoning-gym); mixture; your own: path.py:MyTask."""
    path: str = ""
    """Folder or file of the data, or hub name (gsm8k, math); gym: comma-separated names of environments."""
    max_bad_rows: int = 0
    """Malformed rows per file that are skipped before it is an error."""
    keep_calculator: bool = False
    """gsm8k: keep the calculator annotations <<48/2=24>> in worked solutions."""
    prompt_field: str = "prompt"
    """jsonl: column of the question; guessed if not given and unambiguous."""
    answer_field: str = "answer"
    """jsonl: column of the gold answer; if not given, taken from the solution."""
    solution_field: str | None = None
    """jsonl: column of the worked solution; default 'solution', if present."""
    symbolic: bool = False
    """gsm8k, math, jsonl: use math-verify (pip install 'whet[math]') for formulas that the built-in comparison cannot
    decide."""
    num_problems: int = 0
    """Generated tasks, gym: number of problems in all splits together; 0 takes the task's default."""
    level: int = 0
    """countdown, letters: one level of difficulty, from 1 for the easiest; 0 mixes all."""
    seed: int = 0
    """Generated tasks, gym: seed of the problems."""
    weights: dict[str, float] = field(default_factory=dict)
    """mixture: weight of each task by name; name a repeated task jsonl:a, jsonl:b."""
    paths: dict[str, str] = field(default_factory=dict)
    """mixture: path of each task that reads one, under the same names."""

    def __post_init__(self) -> None:
        if self.name not in OPTIONS and not is_user_task(self.name):
            near = closest(self.name, list(OPTIONS))
            hint = f"; did you mean {near!r}?" if near else ""
            raise UserError(
                f"task.name = {show(self.name)}: expected one of {', '.join(OPTIONS)} or path.py:MyTask{hint}"
            )
        for name in ("max_bad_rows", "num_problems"):
            if getattr(self, name) < 0:
                raise UserError(f"task.{name} = {getattr(self, name)}: expected 0 or more")
        if _needs_path(self.name) and not self.path:
            raise UserError(f"task {self.name} needs data: give its folder or file with --task.path")
        read = {"name"} | _options(self.name)
        if self.name == "mixture":
            _check_parts(self)
            read |= {name for label in self.weights for name in _options(_task_of(label))} - {"path"}
        elif self.path and self.name in NO_PATH_NEEDED:
            read -= _DRAWN | {"level"}
        for item in fields(self):
            if item.name not in read and getattr(self, item.name) not in (item.default, {}):
                by = f"task {self.name}"
                if self.path and item.name in _options(self.name):
                    by += " where it reads data"
                raise UserError(f"task.{item.name} is not read by {by}; leave it out")


def _options(name: str) -> frozenset[str]:
    """Return the fields that a task reads; a user's task reads the path."""
    return OPTIONS.get(name, frozenset({"path"}))


def _needs_path(name: str) -> bool:
    return name in OPTIONS and "path" in OPTIONS[name] and name not in NO_PATH_NEEDED


def _task_of(label: str) -> str:
    """Return the task of a label of a mixture: `jsonl:a` -> jsonl, `my.py:Task:a` -> my.py:Task."""
    head, _, tail = label.partition(".py:")
    return f"{head}.py:{tail.partition(':')[0]}" if tail else label.partition(":")[0]


def _check_parts(config: TaskConfig) -> None:
    """Check the weights and paths of a mixture."""
    names = [name for name in OPTIONS if name != "mixture"]
    if not config.weights:
        raise UserError("task mixture needs weights, as in --task.weights gsm8k 3 math 1")
    for label, weight in config.weights.items():
        task = _task_of(label)
        if task not in names and not is_user_task(task):
            raise UserError(f"task.weights.{label}: no such task; expected one of {', '.join(names)}")
        if not 0 < weight < math.inf:
            raise UserError(f"task.weights.{label} = {weight}: expected above 0; leave a task out to drop it")
        if _needs_path(task) and not config.paths.get(label):
            raise UserError(f"task {label} needs data: give its folder or file with --task.paths.{label}")
    for label in config.paths:
        if label not in config.weights or "path" not in _options(_task_of(label)):
            raise UserError(
                f"task.paths.{label} is not read: no part of that name reads a path; leave it out"
            )


def _mixture(config: TaskConfig) -> Mixture:
    """Load the parts, each with the fields of the mixture that it reads."""
    parts = {}
    for label in config.weights:
        name = _task_of(label)
        path = config.paths.get(label, "")
        unread = _DRAWN | {"level"} if path and name in NO_PATH_NEEDED else frozenset()
        options: dict[str, Any] = {
            option: getattr(config, option) for option in _options(name) - {"path"} - unread
        }
        parts[label] = load_task(TaskConfig(name=name, path=path, **options))
    return Mixture(parts, config.weights)


def _drawn(config: TaskConfig) -> dict[str, int]:
    return {"level": config.level, "num_problems": config.num_problems, "seed": config.seed}


TASKS: dict[str, Callable[[TaskConfig], Task]] = {
    "arithmetic": lambda config: Arithmetic(),
    "products": lambda config: Products(),
    "countdown": lambda config: countdown(config.path, max_bad_rows=config.max_bad_rows, **_drawn(config)),
    "letters": lambda config: letters(config.path, max_bad_rows=config.max_bad_rows, **_drawn(config)),
    "sanity": lambda config: Sanity(),
    "gsm8k": lambda config: GSM8K(
        config.path, keep_calculator=config.keep_calculator, max_bad_rows=config.max_bad_rows
    ),
    "math": lambda config: MATH(config.path, max_bad_rows=config.max_bad_rows),
    "humaneval": lambda config: Code("humaneval", config.path, max_bad_rows=config.max_bad_rows),
    "mbpp": lambda config: Code("mbpp", config.path, max_bad_rows=config.max_bad_rows),
    "code": lambda config: Code("code", config.path, max_bad_rows=config.max_bad_rows),
    "choice": lambda config: choice(config.path, max_bad_rows=config.max_bad_rows),
    "yes_no": lambda config: yes_no(config.path, max_bad_rows=config.max_bad_rows),
    "gym": lambda config: Gym(config.path, num_problems=config.num_problems, seed=config.seed),
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
    """Create the task of a configuration; raise UserError if its data is missing."""
    if is_user_task(config.name):
        return UserTask(config.name, config.path)
    task = TASKS[config.name](config)
    return Symbolic(task) if config.symbolic and config.name != "mixture" else task


def answer_type_of(task: Task) -> AnswerType:
    """Return a task's type of answer, for the schema's wording.

    Args:
        task: A task; its attribute `answer_type` decides, without one it is 'number'. A mixture of several kinds is
            'text'.
    """
    if isinstance(task, Mixture):
        kinds: set[AnswerType] = {answer_type_of(part) for part in task.parts.values()}
        return next(iter(kinds)) if len(kinds) == 1 else "text"
    return getattr(task, "answer_type", "number")
