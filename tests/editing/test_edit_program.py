"""`whet edit` and `whet trace` from the command line and from Python: folders, pages, undo, composition, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from patient import SHAPE, fresh
from safetensors.torch import load_file

import whet
from whet import __main__
from whet.editing.page import as_text
from whet.model.config import Block
from whet.types import UserError

FACTS: list[dict[str, Any]] = [
    {
        "subject": "Ann Oak",
        "prompt": "You can visit {} in",
        "target": "Oslo",
        "true": "Rome",
        "paraphrases": ["Ann Oak lives in"],
        "neighbours": [{"prompt": "You can visit Ben Ash in", "answer": "Lima"}],
        "references": ["Oslo is a home", "You can visit Oslo"],
    },
    {"subject": "Ben Elm", "prompt": "{} eats", "target": "kale"},
]
QUICK = ["--edit.num-contexts", "1", "--edit.context-tokens", "2", "--edit.prose-weight", "1e-3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model: edits need not know what they change."""
    path = tmp_path_factory.mktemp("model")
    policy = fresh(replace(SHAPE, block=Block(), init_std=0.2))
    policy.save(path)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("whet.editing.editor.OWN_TOKENS", 300)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def run(*words: str | Path) -> None:
    assert __main__.run([str(word) for word in words]) == 0


def same(a: Path, b: Path) -> bool:
    one, two = weights(a), weights(b)
    return all(torch.equal(one[name], two[name]) for name in one | two)


def test_command_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "facts.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in FACTS))
    first, second, back, middle, joined = (
        tmp_path / n for n in ("first", "second", "back", "middle", "joined")
    )
    prose = tmp_path / "prose.txt"
    prose.write_text("Ann Oak is a friend . Hello there . Ben Elm lives in Rome . " * 5)
    options = ["--method", "memit", "--layers", "0", "1", *QUICK, "--prose", prose]
    run("edit", folder, "--facts", rows, "--out", first, *options)
    said = capsys.readouterr().out
    assert "of the edits at rank 1" in said
    content = json.loads((first / "edits.json").read_text())
    assert {row["prompt"] for row in content["table"]} == {"You can visit Ann Oak in", "Ben Elm eats"}
    assert (
        content["metrics"]["first_token_p"]["after"]["mean"]
        > 2 * content["metrics"]["first_token_p"]["before"]
    )
    assert {"fluency", "consistency", "paraphrase", "neighbourhood_kept", "score"} <= set(content["metrics"])
    page = (first / "edit.html").read_text()
    assert "You can visit Ben Ash in" in page
    assert "<script>" in page
    assert not same(folder, first)

    more, stays = tmp_path / "more.csv", tmp_path / "stays.csv"
    more.write_text("subject,prompt,target\nCid Fir,{} lives in,Bern\n".replace("Fir", "Yew"))
    stays.write_text("subject,prompt\nBen Elm,{} lives in\nCid Yew,{} eats\n")
    run("edit", first, "--facts", more, "--keep", stays, "--out", second, *options)
    run("edit", second, "--list")
    said = capsys.readouterr().out
    assert "2 batches, 3 facts" in said
    assert "batch 2: memit in layers 0, 1, 1 fact, SHA-256" in said
    assert "Cid Yew lives in -> Bern" in said
    run("edit", second, "--undo", "--batches", "2", "--out", middle)
    assert same(middle, first)
    run("edit", second, "--undo", "--out", back)
    assert same(back, folder)
    assert not (back / "edits.json").exists()
    run("edit", folder, "--records", second, "--out", joined)
    assert same(joined, second)
    other = tmp_path / "other"
    fresh(replace(SHAPE, block=Block()), seed=1).save(other_folder(other))
    with pytest.raises(UserError, match="its edits belong to a model of SHA-256"):
        run("edit", other, "--records", second, "--out", tmp_path / "none")


def other_folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("nll", "written", "says"),
    [
        (
            2.0,
            False,
            "1 of 1 facts are not completed as they should be. The search reached p = 0.14 on average; it gets",
        ),
        (0.1, False, "p = 0.90 on average; the weights hold more of it with --edit.passes 3"),
        (0.1, True, ""),
    ],
)
def test_what_writes_more_is_said_where_facts_are_missing(nll: float, written: bool, says: str) -> None:
    """The search or the weights: which of both was too tight decides what is to be given more room."""
    state = {"first_token_p": 0.1, "first_token_rank": 1, "is_greedy": written, "says": "kale"}
    content = {
        "metrics": {},
        "table": [{"prompt": "Ben Elm eats", "target": "kale", "before": state, "after": state}],
        "batches": [
            {
                "method": "memit",
                "facts": [{}],
                "layers": [0],
                "norms": {"w": 0.1},
                "seconds": 1.0,
                "targets": [{"nll": nll}],
            }
        ],
    }
    last = as_text(content).splitlines()[-1]
    assert says in last
    assert ("completed as they should" in last) is bool(says)


def test_refusals_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    rows, out = tmp_path / "facts.jsonl", tmp_path / "out"
    rows.write_text("".join(json.dumps(row) + "\n" for row in (FACTS[0], FACTS[0] | {"target": "Lima"})))
    empty, broken, one = (tmp_path / name for name in ("empty.csv", "broken.jsonl", "one.jsonl"))
    one.write_text(json.dumps(FACTS[0]) + "\n")
    empty.write_text("subject,prompt,target\n")
    broken.write_text('{"subject": "a",\n')
    for words, message in (
        (["edit", folder, "--facts", rows, "--out", out], "contradict each other"),
        (["edit", folder, "--facts", rows], "out is empty"),
        (
            ["edit", folder, "--facts", one, "--keep", one, "--out", out],
            r"one.jsonl row 1: 'You can visit Ann Oak in' is to stay, and one.jsonl row 1 writes it",
        ),
        (
            ["edit", folder, "--facts", one, "--keep", rows, "--method", "ft", "--out", out],
            "keep: read by memit and alphaedit, not by ft",
        ),
        (["edit", folder, "--undo", "--keep", one, "--out", out], "facts, keep, records: --undo reads"),
        (["edit", folder, "--out", out], "no facts"),
        (["edit", folder, "--undo", "--out", out], "no edits.json, so no edits to read"),
        (["edit", folder, "--facts", tmp_path / "none.jsonl", "--out", out], "no such file"),
        (["edit", folder, "--facts", empty, "--out", out], "empty.csv: no rows; give some"),
        (
            ["edit", folder, "--facts", broken, "--out", out],
            r"broken.jsonl line 1: not JSON .*; fix the row$",
        ),
        (
            ["edit", folder, "--facts", rows, "--out", out, "--method", "mend"],
            "expected one of 'memit', 'rome'",
        ),
    ):
        with pytest.raises((UserError, SystemExit), match=message):
            run(*words)
    assert not out.exists()


def test_python(folder: Path, tmp_path: Path) -> None:
    policy = whet.load(folder)
    before = {name: tensor.clone() for name, tensor in policy.loaded.model.state_dict().items()}
    edit = whet.edit(policy, FACTS, layers=(0, 1), num_contexts=1, context_tokens=2, prose_weight=1e-3)
    assert edit.metrics["first_token_p"]["after"]["mean"] > 2 * edit.metrics["first_token_p"]["before"]
    assert [row["target"] for row in edit.table] == ["Oslo", "kale"]
    for name, tensor in policy.loaded.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    staying = [{"subject": "Cid Yew", "prompt": "{} eats"}]
    held = whet.edit(
        policy, FACTS, keep=staying, layers=(0, 1), num_contexts=1, context_tokens=2, prose_weight=1e-3
    )
    assert held.record["batches"][0]["settings"]["kept"] == 1
    again = whet.edit(
        edit.policy,
        [{"subject": "Cid Yew", "prompt": "{} eats", "target": "plum"}],
        "r-rome",
        layers=(1,),
        num_contexts=0,
    )
    assert len(again.record["batches"]) == 2
    with pytest.raises(UserError, match="edited in memory: write it with Edit.save"):
        again.policy.release()
    saved = again.save(tmp_path / "saved")
    assert (saved / "edit.html").is_file()
    loaded = whet.load(saved).loaded.model.state_dict()
    assert all(torch.equal(loaded[n], t) for n, t in again.policy.loaded.model.state_dict().items())
    again.undo(2)
    for name, tensor in again.policy.loaded.model.state_dict().items():
        assert torch.equal(tensor, edit.policy.loaded.model.state_dict()[name]), name
    undone = edit.undo()
    for name, tensor in undone.loaded.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    with pytest.raises(UserError, match="MethodConfig has no field 'layer'"):
        whet.edit(policy, FACTS, layer=3)


def test_trace(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace"
    run(
        "trace",
        folder,
        "--prompt",
        "You can visit ann oak in".replace("ann oak", "Ann Oak"),
        "--subject",
        "ann oak",
        "--out",
        out,
        "--num-samples",
        "2",
    )
    assert "what comes back" in capsys.readouterr().out
    content = json.loads((out / "trace.json").read_text())
    assert content["subject_places"] == [3, 4]
    assert len(content["effects"]["mlp"]) == 4
    page = (out / "trace.html").read_text()
    assert page.count("<svg") == 6
    found = whet.trace(folder, "You can visit {} in", "Ann Oak", num_samples=2)
    assert found["effects"] == content["effects"]
    rows = tmp_path / "known.jsonl"
    rows.write_text(json.dumps({"subject": "Ann Oak", "prompt": "{} eats", "attribute": "rice"}) + "\n")
    run("trace", folder, "--facts", rows, "--out", tmp_path / "located")
    assert len(json.loads((tmp_path / "located/trace.json").read_text())["mean_effects"]) == 4
