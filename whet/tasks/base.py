"""The table of tasks, and their common configuration."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from whet.config import Renamed, closest, counted, from_dict, near_file, read_yaml, show
from whet.model.vision.reading import Urls
from whet.schema import AnswerType
from whet.tasks.chess.formats import GAPS, Layout
from whet.tasks.chess.stockfish import MAX_NODES
from whet.tasks.chess.task import KINDS, Chess
from whet.tasks.choice import choice, yes_no
from whet.tasks.code import Code
from whet.tasks.gsm8k import GSM8K
from whet.tasks.gym import Gym
from whet.tasks.ifeval import IFEval
from whet.tasks.jsonl import Jsonl
from whet.tasks.made.arithmetic import Arithmetic
from whet.tasks.made.bars import bars
from whet.tasks.made.countdown import countdown
from whet.tasks.made.letters import letters
from whet.tasks.made.matrices import matrices
from whet.tasks.made.products import Products
from whet.tasks.made.sanity import Sanity
from whet.tasks.made.shapes import shapes
from whet.tasks.made.words import words
from whet.tasks.math import MATH
from whet.tasks.mixture import PART, Mixture
from whet.tasks.read import ENDINGS, is_hub_name
from whet.tasks.sets import HUB_SETS
from whet.tasks.symbolic import Symbolic
from whet.tasks.user import UserTask, is_user_task
from whet.types import Problem, Task, UnreadError, UserError

_DRAWN = frozenset({"num_problems", "seed"})
MOST_HELD_OUT = 0.45
"""Largest share for each of 'dev' and 'test'."""
_MADE = _DRAWN | {"path", "max_bad_rows", "held_out", "level"}
_SEEN = _DRAWN | {"level", "cell"}
_CHESS = _DRAWN | {"path", "max_bad_rows", "nodes", "layout"}
_ROWS = frozenset({"path", "max_rows", "max_bad_rows", "symbolic"})
_IMAGES = frozenset({"images", "image_root", "image_urls"})
_COLUMNS = frozenset({"prompt", "answer", "solution", "held_out"}) | _IMAGES
_ON_HUB = frozenset({"config", "split"})
ROW_SETS = (
    *("math500", "aime24", "aime25", "amc", "deepscaler", "dapo_math", "openr1_math", "openmathreasoning"),
    *(
        "numina_math",
        "big_math",
        "ultrachat",
        "tulu3",
        "mathvista",
        "mathvista_numbers",
        "geometry3k",
        "clevr_count",
    ),
)
"""Data sets of `whet.tasks.sets` that are read as rows of any other: by their columns, judged by `answers_equal`."""
PROGRAMS = ("humaneval", "humaneval_plus", "mbpp", "mbpp_plus", "livecodebench", "code")
OPTIONS: dict[str, frozenset[str]] = {
    "arithmetic": frozenset(),
    "products": frozenset(),
    "countdown": _MADE,
    "letters": _MADE,
    "words": _DRAWN | {"level"},
    "sanity": frozenset(),
    "matrices": _SEEN,
    "shapes": _SEEN,
    "bars": _SEEN,
    "gsm8k": frozenset({"path", "max_bad_rows", "keep_calculator", "symbolic"}),
    "math": frozenset({"path", "max_bad_rows", "symbolic"}),
    **dict.fromkeys(PROGRAMS, frozenset({"path", "config", "max_rows", "max_bad_rows"})),
    "code": frozenset({"path", "config", "max_rows", "max_bad_rows", "held_out"}),
    "ifeval": frozenset({"path", "max_rows", "max_bad_rows"}),
    **dict.fromkeys(("choice", "yes_no"), frozenset({"path", "max_bad_rows", "held_out"}) | _IMAGES),
    "gym": _DRAWN | {"path"},
    **dict.fromkeys(KINDS, _CHESS),
    **dict.fromkeys(("chess-env", "chess-moves"), _CHESS - {"layout"}),
    "chess-reason": _CHESS - {"layout"},
    "jsonl": _ROWS | _COLUMNS | _ON_HUB,
    "hub": _ROWS | _COLUMNS | _ON_HUB,
    **dict.fromkeys(ROW_SETS, _ROWS | _ON_HUB | {"held_out"}),
    "mixture": frozenset({"weights", "paths"}),
}
"""Fields of `TaskConfig` that each task reads; setting another one is an error. A mixture also reads its parts' fields,
except the path."""
NO_PATH_NEEDED = frozenset({"countdown", "letters", *KINDS})
"""Tasks that generate their problems if no data is given."""
FEW_PROBLEMS = 20
"""Fewer problems to train on are worth a warning."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The problems to train or test on."""

    name: str = "arithmetic"
    """Generated: arithmetic, products, countdown, letters, words; with images: matrices, shapes, bars; sums: sanity;
    chess: chess-policy, chess-env, chess-moves, chess-reason, chess (to evaluate);
    data of the hub: gsm8k, math, aime25, dapo_math and more (docs/tasks.md), or hub with any path; your own: jsonl,
    choice, yes_no, code, path.py:MyTask; gym (reasoning-gym); mixture. A file, a folder or a hub name stands for the
    task that reads it."""
    path: str = ""
    """Folder or file of the data, or hub name; '' for the hub name of a data set that has one (gsm8k, math, ...). gym:
    comma-separated names of environments."""
    config: str = ""
    """hub: configuration of the data set, where it has several."""
    split: str = ""
    """hub: the one split to use, divided into train, dev and test by hash; '' for those called train and test."""
    max_rows: int = 0
    """Rows to read of each file or split, from the front; of the hub they are streamed, so that a set that does not fit
    is never downloaded whole. 0 reads all."""
    max_bad_rows: int = 0
    """Malformed rows per file that are skipped before it is an error."""
    keep_calculator: bool = False
    """gsm8k: keep the calculator annotations <<48/2=24>> in worked solutions."""
    prompt: str = ""
    """jsonl, hub: column of the question, or of the chat; '' is recognised."""
    answer: str = ""
    """jsonl, hub: column of the gold answer, with a dot for a nested one; '' is recognised, or taken from the solution;
    none: replies are learned as they are."""
    solution: str = ""
    """jsonl, hub: column of the worked solution, or of the reply; '' is recognised."""
    held_out: float = 0.05
    """jsonl, hub, choice, yes_no, code, countdown, letters: share of the rows of one file (or split of the hub) that is
    kept from training for validation (dev), and as much again for testing (test)."""
    images: str = ""
    """jsonl, hub, choice, yes_no: column of the images that a question is about; '' is recognised, none reads none."""
    image_root: str = ""
    """jsonl, hub, choice, yes_no: folder of images that rows name by path, which no path may leave; '' for that of the
    data."""
    image_urls: Urls = "none"
    """jsonl, hub, choice, yes_no: fetch images that rows name by URL: none; public, not from addresses of your own
    network; any."""
    symbolic: bool = False
    """gsm8k, math, jsonl, hub and its sets: use math-verify (the extra math) for formulas that the built-in
    comparison cannot decide."""
    num_problems: int = 0
    """Generated tasks, gym: number of problems in all splits together; 0 takes the task's default."""
    level: int = 0
    """countdown, letters, words, matrices, shapes, bars: a level of difficulty, from 1 for the easiest; 0 mixes all."""
    cell: int = 0
    """matrices, shapes, bars: pixels of a cell's side, 8 to 128; 0 means 32, one token of a model like Qwen3-VL."""
    seed: int = 0
    """Generated tasks, gym: seed of the problems."""
    nodes: int = 0
    """chess: nodes that Stockfish searches of each position; 0 means 2,000. chess-env, chess-moves: with them half of
    the openings and of the middlegame are from its games, as in the others; 0 plays all at random, without it."""
    layout: Layout = "padded"
    """chess: the policy's prompt has its FEN padded to 90 characters, or is short (one space before M:), or diagnostic
    (four). A model reads the one that it was trained on."""
    weights: dict[str, float] = field(default_factory=dict)
    """mixture: weight of each task by name; name a repeated task jsonl:a, jsonl:b."""
    paths: dict[str, str] = field(default_factory=dict)
    """mixture: path of each task that reads one, under the same names."""

    KNOWN = frozenset(OPTIONS)
    NAMED_BY = {
        "name": (
            *(
                "held_out",
                "path",
                "config",
                "split",
                "max_rows",
                "max_bad_rows",
                "keep_calculator",
                "prompt",
                "answer",
            ),
            *("images", "image_root", "image_urls"),
            *(
                "solution",
                "symbolic",
                "num_problems",
                "level",
                "cell",
                "seed",
                "nodes",
                "layout",
                "weights",
                "paths",
            ),
        )
    }

    # Names of earlier versions in config.yaml, and the values that meant what '' means now.
    RENAMED = {
        "prompt_field": Renamed("prompt", "prompt"),
        "answer_field": Renamed("answer", "answer"),
        "solution_field": Renamed("solution", None),
    }

    def __post_init__(self) -> None:
        if (found := _data_in(self.name)) is not None:
            if self.path:
                raise UserError(f"task.name = {show(self.name)} is data already; leave out task.path")
            for name, value in zip(("name", "path"), found, strict=True):
                object.__setattr__(self, name, value)
        if self.name not in OPTIONS and not is_user_task(self.name):
            if told := _no_file(self.name):
                raise UserError(told)
            near = closest(self.name, list(OPTIONS))
            hint = f"; did you mean {near!r}?" if near else ""
            hint = "; data of your own are given by --data FILE alone" if self.name == "own" else hint
            raise UserError(
                f"task.name = {show(self.name)}: expected one of {', '.join(OPTIONS)} or path.py:MyTask{hint}"
            )
        for name in ("max_bad_rows", "max_rows", "num_problems", "nodes"):
            if getattr(self, name) < 0:
                raise UserError(f"task.{name} = {getattr(self, name)}: expected 0 or more")
        if not 0 < self.held_out <= MOST_HELD_OUT:
            raise UserError(
                f"task.held_out = {self.held_out:g}: expected a share above 0 and up to {MOST_HELD_OUT:g}"
            )
        if self.nodes > MAX_NODES:
            raise UserError(f"task.nodes = {self.nodes}: expected at most {MAX_NODES:,}")
        if self.layout not in GAPS:
            raise UserError(f"task.layout = {show(self.layout)}: expected one of {', '.join(GAPS)}")
        if _needs_path(self.name) and not self.path:
            where = "hub name" if self.name == "hub" else "folder or file"
            raise UserError(f"task {self.name} needs data: give its {where} with --task.path")
        read = {"name"} | _read_by(self.name, self.path)
        if self.name == "mixture":
            _check_parts(self)
            for label in self.weights:
                task = _task_of(label)
                read |= _read_by(task, self.paths.get(label, "")) - {"path"}
                # Configs of earlier runs have these beside data for every part.
                read |= _options(task) & (_DRAWN | {"level"})
        for item in fields(self):
            if item.name not in read and getattr(self, item.name) not in (item.default, {}):
                by = f"task {self.name}"
                if self.path and item.name in _options(self.name):
                    by += " where it reads data"
                if any(item.name in _options(_task_of(label)) - {"path"} for label in self.weights):
                    by += " where its parts read data"
                raise UnreadError(f"task.{item.name} is not read by {by}; leave it out", item.name)


def task_of(folder: str | Path) -> TaskConfig | None:
    """Return the task that a run was trained on, by its config; None for what is no run with a task."""
    path = Path(folder) / "config.yaml"
    found = read_yaml(path).get("task") if path.is_file() else None
    return from_dict(TaskConfig, found, where=str(path)) if isinstance(found, dict) else None


def _no_file(name: str) -> str:
    """Say what is wrong with a word that is rather a file's name than a task's; '' for others."""
    path = Path(name)
    if path.suffix == ".py":
        return f"task.name = {show(name)}: name the class in it, too: {name}:MyTask"
    near = near_file(path) if path.suffix else ""
    return f"task.name = {show(name)}: no such file; {near}" if near else ""


def _data_in(name: str) -> tuple[str, str] | None:
    """Return the task, and the path, of data that stands in a task's place; None for the name of a task."""
    if name in OPTIONS or is_user_task(name) or name.endswith(".py"):
        return None
    if name.endswith(ENDINGS) or (name and os.path.exists(name)):
        return "jsonl", name
    if "/" in name and is_hub_name(name):
        known = next((label for label, one in HUB_SETS.items() if one.path == name), None)
        return (known, "") if known else ("hub", name)
    return None


def _options(name: str) -> frozenset[str]:
    """Return the fields that a task reads; a user's task reads the path."""
    return OPTIONS.get(name, frozenset({"path"}))


def _read_by(name: str, path: str) -> frozenset[str]:
    """Return the fields that a task reads, with data of the user's or without."""
    read = _options(name)
    if not path and name in NO_PATH_NEEDED:
        read -= {"held_out"}  # generated: the share is the task's own
    elif path and name in NO_PATH_NEEDED:
        read -= _DRAWN | {"level"}
        if name in ("chess-env", "chess-moves"):  # only positions that we make are from Stockfish's games
            read -= {"nodes"}
    return read


def fields_read(config: TaskConfig) -> frozenset[str]:
    """Return the fields that a task reads; those of a mixture's parts are not among them."""
    return frozenset({"name"}) | _read_by(config.name, config.path)


def _needs_path(name: str) -> bool:
    has_own = name in NO_PATH_NEEDED or name in HUB_SETS
    return name in OPTIONS and "path" in OPTIONS[name] and not has_own


def tasks_of(config: TaskConfig) -> set[str]:
    """Return the tasks of a mixture's parts, or the task itself."""
    return set(map(_task_of, config.weights)) if config.name == "mixture" else {config.name}


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
            hint = f", did you mean {match!r}?" if (match := closest(task, names)) else ";"
            raise UserError(f"task.weights.{label}: no such task{hint} expected one of {', '.join(names)}")
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
        options: dict[str, Any] = {
            option: getattr(config, option) for option in _read_by(name, path) - {"path"}
        }
        parts[label] = load_task(TaskConfig(name=name, path=path, **options))
    return Mixture(parts, config.weights)


def _drawn(config: TaskConfig) -> dict[str, int]:
    return {"level": config.level, "num_problems": config.num_problems, "seed": config.seed}


def _kept(config: TaskConfig) -> dict[str, Any]:
    return {"max_bad_rows": config.max_bad_rows, "held_out": config.held_out}


def _images(config: TaskConfig) -> dict[str, Any]:
    return {"images": config.images, "image_root": config.image_root, "image_urls": config.image_urls}


def _rows(config: TaskConfig) -> Jsonl:
    """Make a task of rows: of the user's columns, or of a data set that has a name."""
    return Jsonl(
        config.path,
        name=config.name,
        known=HUB_SETS.get(config.name),
        prompt=config.prompt,
        answer=config.answer,
        solution=config.solution,
        **_images(config),
        config=config.config,
        split=config.split,
        max_rows=config.max_rows,
        **_kept(config),
    )


def _chess(config: TaskConfig) -> Chess:
    return Chess(
        config.name,
        config.path,
        num_problems=config.num_problems,
        seed=config.seed,
        nodes=config.nodes,
        layout=config.layout,
        max_bad_rows=config.max_bad_rows,
    )


def _code(config: TaskConfig) -> Code:
    return Code(
        config.name,
        config.path,
        config=config.config,
        max_rows=config.max_rows,
        **_kept(config),
    )


TASKS: dict[str, Callable[[TaskConfig], Task]] = {
    "arithmetic": lambda config: Arithmetic(),
    "products": lambda config: Products(),
    "countdown": lambda config: countdown(config.path, **_kept(config), **_drawn(config)),
    "letters": lambda config: letters(config.path, **_kept(config), **_drawn(config)),
    "words": lambda config: words(**_drawn(config)),
    "sanity": lambda config: Sanity(),
    "matrices": lambda config: matrices(cell=config.cell, **_drawn(config)),
    "shapes": lambda config: shapes(cell=config.cell, **_drawn(config)),
    "bars": lambda config: bars(cell=config.cell, **_drawn(config)),
    "gsm8k": lambda config: GSM8K(
        config.path, keep_calculator=config.keep_calculator, max_bad_rows=config.max_bad_rows
    ),
    "math": lambda config: MATH(config.path, max_bad_rows=config.max_bad_rows),
    **dict.fromkeys(PROGRAMS, _code),
    "ifeval": lambda config: IFEval(config.path, max_rows=config.max_rows, max_bad_rows=config.max_bad_rows),
    "choice": lambda config: choice(config.path, **_kept(config), **_images(config)),
    "yes_no": lambda config: yes_no(config.path, **_kept(config), **_images(config)),
    "gym": lambda config: Gym(config.path, num_problems=config.num_problems, seed=config.seed),
    **dict.fromkeys(KINDS, _chess),
    **dict.fromkeys(("jsonl", "hub", *ROW_SETS), _rows),
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


def answers_of(task: Task) -> tuple[AnswerType, bool, bool]:
    """Return a task's type of answer, whether it compares answers with gold ones (any part of a mixture), and whether
    it is a published data set (all parts): what `Policy.expect` takes."""
    parts = tasks_inside(task).values()
    needs_gold = any(getattr(part, "needs_gold", True) for part in parts)
    return answer_type_of(task), needs_gold, all(getattr(part, "is_published", False) for part in parts)


def tasks_inside(task: Task) -> dict[str | None, Task]:
    """Return the tasks that read data: the parts of a mixture by label, and the task inside a symbolic one."""
    if isinstance(task, Mixture):
        return {label: next(iter(tasks_inside(part).values())) for label, part in task.parts.items()}
    return tasks_inside(task.task) if isinstance(task, Symbolic) else {None: task}


def check_gold(
    task: Task, problems: Sequence[Problem], why: str, *, instead: str = "leave out what compares answers"
) -> None:
    """Refuse problems without a gold answer where one is compared.

    Args:
        task: Their task. One that judges without gold answers says so: `needs_gold = False`.
        problems: The problems.
        why: What compares them, for the error.
        instead: What to do without gold answers, for the error.

    Raises:
        UserError: With the reason and what to do.
    """
    for label, part in tasks_inside(task).items():
        own = [problem for problem in problems if problem.meta.get(PART) == label]
        without = [problem for problem in own if not problem.answer]
        if without and getattr(part, "needs_gold", True):
            reason = getattr(part, "no_gold", "") or f"first: {without[0].prompt[:60]!r}"
            raise UserError(
                f"task {label or part.name}: {len(without):,} of {len(own):,} problems have no gold answer, but {why} "
                f"({reason}); name its column with --task.answer, or {instead}"
            )


def told_of(task: Task, num_problems: int) -> list[str]:
    """Return what a program that trains says of its data: what was recognised, and that there is little of it."""
    parts = tasks_inside(task).values()
    lines = [
        text for part in parts for name in ("recognised", "divided") if (text := getattr(part, name, ""))
    ]
    if num_problems < FEW_PROBLEMS:
        lines.append(
            f"warning: only {counted(num_problems, 'problem')} to train on: the model will know them by heart "
            "before it has learned anything from them"
        )
    return lines
