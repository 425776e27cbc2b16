"""After an edit: a task that the model knows is asked again, and training goes on from the edited weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from patient import HOMES, LIVES, PEOPLE, SHAPE, fresh, says
from safetensors.torch import load_file

import whet
from whet import __main__
from whet.editing.editor import Measured, report_of
from whet.generate.policy import PolicyConfig, load_policy
from whet.model.config import Block
from whet.stats import mcnemar_exact
from whet.types import UserError

FACT: dict[str, Any] = {"subject": "Ann Oak", "prompt": "You can visit {} in", "target": "Oslo"}
QUICK = ["--edit.num-contexts", "0", "--layers", "0", "--method", "r-rome", "--no-writes"]


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random model with one edit, as a folder."""
    monkeypatch.setattr("whet.editing.statistics.cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr("whet.editing.editor.OWN_TOKENS", 300)
    fresh(replace(SHAPE, block=Block(), init_std=0.2)).save(tmp_path / "model")
    (tmp_path / "facts.jsonl").write_text(json.dumps(FACT) + "\n")
    words = ["edit", str(tmp_path / "model"), "--facts", str(tmp_path / "facts.jsonl")]
    assert __main__.run([*words, "--out", str(tmp_path / "edited"), *QUICK]) == 0
    return tmp_path / "edited"


@pytest.mark.ci
def test_training_goes_on_from_the_edited_weights(edited: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        "".join(json.dumps({"text": f"{p} lives in {HOMES[p]}"}) + "\n" for p in PEOPLE for _ in range(3))
    )
    words = ["sft", "own", "--policy.init", str(edited), "--task.name", "jsonl", "--task.path", str(texts)]
    words += ["--batch-size", "4", "--validation-problems", "0", "--save-every", "2", "--optim.lr", "1e-3"]
    words += ["--optim.optimizer", "adamw", "--num-steps", "4"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert __main__.run([*words, "--out", str(whole)]) == 0
    # How far four steps of at most lr each can go from the edited weights; the edit itself is further.
    before, after, original = (
        load_file(path / "model.safetensors")
        for path in (edited, max((whole / "checkpoints").glob("step_*")), tmp_path / "model")
    )
    name = "model.layers.0.mlp.down_proj.weight"
    moved = float((after[name] - before[name]).abs().max())
    assert 0 < moved < 4.1e-3 < float((before[name] - original[name]).abs().max())
    # Interrupted and resumed it ends with the same bits.
    assert __main__.run([*words, "--out", str(parted)]) == 0
    last = max((parted / "checkpoints").glob("step_*"))
    for path in sorted(last.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    last.rmdir()
    (parted / "summary.json").unlink()
    assert __main__.run([*words, "--out", str(parted), "--resume"]) == 0
    again = load_file(last / "model.safetensors")
    assert all(torch.equal(again[name], after[name]) for name in after)
    # What was trained is edited further; that edit comes out again, the first one has become part of the weights.
    policy = whet.load(whole)
    further = whet.edit(policy, [FACT], "r-rome", layers=(0,), num_contexts=0)
    further.undo()
    held = dict(further.policy.loaded.model.named_parameters())
    assert all(torch.equal(held[name].detach(), after[name]) for name in held)


def test_an_edit_in_memory_is_not_lost_by_training(edited: Path) -> None:
    edit = whet.edit(whet.load(edited.parent / "model"), [FACT], "r-rome", layers=(0,), num_contexts=0)
    with pytest.raises(UserError, match=r"edited in memory: write it with Edit\.save"):
        whet.sft(edit.policy, edited.parent / "facts.jsonl", num_steps=1, out=edited.parent / "run")


@pytest.mark.ci
def test_a_known_task_is_asked_before_and_after(
    edited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"question": head + template.replace("{}", p), "answer": HOMES[p]}) + "\n"
            for p in PEOPLE
            for template in LIVES
            for head in ("", "Hello there. ")
        )
    )
    words = ["edit", str(edited.parent / "model"), "--facts", str(tmp_path / "facts.jsonl")]
    words += ["--out", str(tmp_path / "again"), *QUICK, "--task", str(rows), "--task-tokens", "4"]
    words += ["--policy.schema", "none", "--policy.template", "plain"]
    assert __main__.run(words) == 0
    assert "the task it knows: greedy pass@1" in capsys.readouterr().out
    row = json.loads((tmp_path / "again/edits.json").read_text())["metrics"]["pass@1"]
    assert 0 <= row["before"] <= 1
    assert row["facts"] > 0


def test_a_task_that_is_not_there_is_found_before_the_edit(edited: Path, tmp_path: Path) -> None:
    words = ["edit", str(edited.parent / "model"), "--facts", str(tmp_path / "facts.jsonl"), "--dry-run"]
    with pytest.raises(UserError, match=r"'nowhere\.jsonl': no such file"):
        __main__.run([*words, "--out", str(tmp_path / "more"), "--task", "nowhere.jsonl"])


def test_pass_at_1_is_tested_problem_by_problem() -> None:
    before, after = [True] * 8 + [False] * 2, [True] * 2 + [False] * 7 + [True]
    sides = [Measured(scores=[], right=right) for right in (before, after)]
    row = report_of([], *sides)["metrics"]["pass@1"]
    assert (row["before"], row["after"]["mean"]) == (0.8, 0.3)
    assert row["p_value"] == mcnemar_exact(6, 1)
    assert row["facts"] == 10


def test_an_edited_model_says_it_from_its_folder(edited: Path) -> None:
    """Loaded again, as training loads it, the edited model knows the new fact."""
    asked = [FACT["prompt"].replace("{}", FACT["subject"])]
    original, loaded = (
        load_policy(PolicyConfig(init=str(folder)), seed=0) for folder in (edited.parent / "model", edited)
    )
    assert says(loaded, asked) == ["Oslo"] != says(original, asked)
