"""Every recipe of every program finds its data: on the hub as it is, or on the spot."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import hub
import pytest
from needs import require

import whet.recipes
from whet.config import to_dict
from whet.recipes import rl as rl_recipes
from whet.recipes.models import demo_policy
from whet.tasks.base import FEW_PROBLEMS, TaskConfig, check_gold, load_task, told_of
from whet.tasks.sets import HUB_SETS, PAIR_SETS
from whet.train.data.pairs import read_pair_rows
from whet.train.setup import load_rl
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


def write_facts(folder: Path) -> None:
    """Write what the recipe `facts` reads, with the program that it names, from relations of few rows."""
    relations = folder / "relations"
    relations.mkdir()
    for name, templates in (("capital", ["{} is the capital of"]), ("river", ["{} flows through"])):
        rows = [{"subject": f"{name.title()} {n}", "object": f"Land {n % 5}"} for n in range(60)]
        about = {
            "name": name,
            "prompt_templates": templates,
            "prompt_templates_zs": ["{} is in", "{} lies in"],
        }
        (relations / f"{name}.json").write_text(json.dumps({**about, "samples": rows}))
    program = Path(__file__).resolve().parents[2] / "bench/patient.py"
    done = subprocess.run(
        [sys.executable, program, relations, folder / "runs/facts", "--only", "data"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


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


@pytest.mark.some(12)
@pytest.mark.parametrize(("module", "name"), RECIPES, ids=lambda value: str(value))
def test_its_data_loads(module: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the hub's own schema, with the splits that the program reads, and an answer to each problem."""
    hub.install(monkeypatch)
    config = importlib.import_module(f"whet.recipes.{module}").RECIPES[name]()
    assert not any("shared/" in text for text in texts_of(to_dict(config)))  # nobody else has that folder
    if (module, name) in GIVEN:
        assert config.pairs == GIVEN[module, name]
        with pytest.raises(UserError, match="cannot be read"):
            read_pair_rows(config.pairs)
        return
    if name == "facts":
        write_facts(tmp_path)
        monkeypatch.chdir(tmp_path)
        assert Path(config.policy.tokenizer, "tokenizer.json").is_file()
    found = list(tasks_of(config))
    assert found
    for one in found:
        if one.name.startswith("chess") or any(name.startswith("chess") for name in one.weights):
            require("stockfish")
            one = replace(one, num_problems=60)  # each is searched
        task = load_task(one)
        if one.name in HUB_SETS:
            assert one.path == ""
        for split in ("test",) if module == "evaluation" else ("train",):
            problems = task.problems(split)
            assert problems, (one, split)
            if name != "facts":  # plain text, to be learned as it is
                check_gold(task, problems, "it is compared")


@pytest.mark.ci
def test_training_imports_no_other_trainer() -> None:
    """Fine-tuning and reinforcement are whet's own: TRL, transformers and accelerate could be absent."""
    code = """
import sys
for name in ("trl", "transformers", "accelerate", "peft", "deepspeed", "verl"):
    sys.modules[name] = None
import tempfile
from dataclasses import replace
from whet.recipes import rl as rl_recipes, sft as sft_recipes
from whet.tasks.made import arithmetic
from whet.tasks.made.arithmetic import Arithmetic
from whet.train import rl, sft
arithmetic.NUM_PROBLEMS = 1000
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


def test_without_gold_answers_only_what_compares_them_is_refused(tmp_path: Path) -> None:
    """Chats can be learned; a reward of right answers, an evaluation and rejection sampling need a gold answer."""
    path = tmp_path / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": "Hm."}]}
        for n in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TaskConfig(name="jsonl", path=str(path))
    loaded = load_task(task)
    with pytest.raises(UserError) as caught:
        check_gold(loaded, loaded.problems("train"), "an evaluation compares answers")
    assert str(caught.value) == (
        "task jsonl: 27 of 27 problems have no gold answer, but an evaluation compares answers (chats.jsonl: 30 of "
        "30 rows have no final answer in the last assistant message (first: 1)); name its column with --task.answer, "
        "or leave out what compares answers"
    )
    small = replace(
        rl_recipes.demo(),
        out=str(tmp_path / "rl"),
        policy=demo_policy(),
        task=task,
        num_steps=1,
        preflight="warn",
    )
    with pytest.raises(UserError, match="but the reward 'correct' compares answers"):
        load_rl(small)
    assert len(load_rl(replace(small, rewards={"format": 1.0})).problems) == 27
    assert not (tmp_path / "rl").exists()
    mixed = TaskConfig(name="mixture", weights={"arithmetic": 1.0, "jsonl": 1.0}, paths={"jsonl": str(path)})
    both = load_task(mixed)
    with pytest.raises(UserError, match="^task jsonl: 27 of 27 problems"):
        check_gold(both, both.problems("train"), "it is compared")


def test_what_training_says_of_its_data(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+1?", "answer": n + 1}) + "\n" for n in range(12)))
    task = load_task(TaskConfig(name="jsonl", path=str(path), symbolic=True))
    count = len(task.problems("train"))
    first, divided, second = told_of(task, count)
    assert first.startswith(
        "rows.jsonl: prompt = 'question', answer = 'answer'\n  question: '0+1?'\n  answer: '1'"
    )
    assert divided.startswith(
        "rows.jsonl: 11 of 12 rows are trained on, 1 held out for validation, 0 for testing"
    )
    assert second.startswith("warning: only 11 problems to train on")
    assert told_of(task, FEW_PROBLEMS) == [first, divided]


def test_the_page_lists_every_set() -> None:
    """docs/tasks.md has a row for each, with what the table says."""
    page = (Path(__file__).parents[2] / "docs/tasks.md").read_text(encoding="utf-8")
    for name, one in (HUB_SETS | PAIR_SETS).items():
        paths = " and ".join(dict.fromkeys(f"`{part.path}`" for part in one.parts.values()))
        assert f"| `{name}` | {one.about} | {paths} | {one.licence} | {one.card} |" in page
