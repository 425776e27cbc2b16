"""Every recipe of every program finds its data: on the hub as it is, or on the spot."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import hub
import pytest

import whet.recipes
from whet.config import to_dict
from whet.tasks.base import TaskConfig, check_gold, load_task
from whet.tasks.sets import HUB_SETS
from whet.train.data.pairs import read_pair_rows
from whet.types import UserError

MODULES = [
    module.name
    for module in pkgutil.iter_modules(whet.recipes.__path__)
    if hasattr(importlib.import_module(f"whet.recipes.{module.name}"), "RECIPES")
]
RECIPES = [
    (module, name) for module in MODULES for name in importlib.import_module(f"whet.recipes.{module}").RECIPES
]
GIVEN = {("dpo", "qwen2.5-0.5b-pairs"): "pairs.jsonl"}
"""Recipes whose data only the user has, and what they are called."""


def tasks_of(config: Any) -> Iterator[TaskConfig]:
    """Yield the tasks of a config, however deep."""
    if isinstance(config, TaskConfig):
        yield config
    elif is_dataclass(config):
        for item in fields(config):
            yield from tasks_of(getattr(config, item.name))


def texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts_of(item)
    elif isinstance(value, str):
        yield value


def test_all_programs_are_here() -> None:
    assert {"sft", "rl", "rft", "dpo", "evaluation", "validation"} <= set(MODULES)
    assert len(RECIPES) > 30
    on_math = [recipe for recipe in RECIPES if "math" in recipe[1]]
    assert len(on_math) >= 18


@pytest.mark.parametrize(("module", "name"), RECIPES, ids=lambda value: str(value))
def test_its_data_loads(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hub's own schema, with the splits that the program reads, and an answer to each problem."""
    hub.install(monkeypatch)
    config = importlib.import_module(f"whet.recipes.{module}").RECIPES[name]()
    assert not any("shared/" in text for text in texts_of(to_dict(config)))  # nobody else has that folder
    if (module, name) in GIVEN:
        assert config.pairs == GIVEN[module, name]
        with pytest.raises(UserError, match="cannot be read"):
            read_pair_rows(config.pairs)
        return
    found = list(tasks_of(config))
    assert found
    for one in found:
        task = load_task(one)
        if one.name in HUB_SETS:
            assert one.path == ""
        for split in ("test",) if module == "evaluation" else ("train",):
            problems = task.problems(split)
            assert problems, (one, split)
            check_gold(task, problems, "it is compared")


def test_training_imports_no_other_trainer() -> None:
    """Fine-tuning and reinforcement are whet's own: TRL, transformers and accelerate could be absent."""
    code = """
import sys
for name in ("trl", "transformers", "accelerate", "peft", "deepspeed", "verl"):
    sys.modules[name] = None
import tempfile
from dataclasses import replace
from whet.recipes import rl as rl_recipes, sft as sft_recipes
from whet.tasks.made.arithmetic import Arithmetic
from whet.train import rl, sft
few = {split: Arithmetic().problems(split)[:8] for split in ("train", "dev", "test")}
Arithmetic.problems = lambda self, split: few[split]
folder = tempfile.mkdtemp()
small = {"num_steps": 1, "save_every": 1}
start = replace(sft_recipes.demo(), out=folder + "/sft", batch_size=2, validation_problems=0, **small)
sft.train(start)
config = rl_recipes.demo()
policy = replace(config.policy, init=folder + "/sft")
rl.train(replace(config, out=folder + "/rl", policy=policy, num_prompts=1, group_size=2, preflight="warn",
                 validation_problems=0, **small))
assert all(sys.modules[name] is None for name in ("trl", "transformers", "accelerate"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
