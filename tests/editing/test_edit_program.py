"""`whet edit` and `whet trace` from the command line and from Python: folders, pages, undo, composition, refusals."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from patient import SHAPE, fresh, tokenizer
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parent.parent / "model"))
import family_cases

import whet
from whet import __main__
from whet.editing.metrics import curve_places
from whet.editing.page import as_text
from whet.generate.policy import Policy
from whet.model.config import Block
from whet.model.weights import load_model
from whet.schema import SCHEMAS
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


@pytest.mark.ci
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


SMALL = [
    "--method",
    "r-rome",
    "--layers",
    "1",
    "--edit.num-contexts",
    "0",
    "--edit.target.steps",
    "2",
    "--no-writes",
]


@pytest.mark.ci
def test_the_next_lines_work_as_they_stand(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "facts.jsonl").write_text(json.dumps(LIVES) + "\n")
    monkeypatch.chdir(tmp_path)
    run("edit", folder, "--facts", "facts.jsonl", "--out", "my out", *SMALL)
    _, _, commands = capsys.readouterr().out.partition("next: ")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for command in commands.strip().splitlines():
        assert __main__.main(shlex.split(command)[1:]) == 0, command
    assert same(tmp_path / "my out-undone", folder)


LIVES = {"subject": "Ann Oak", "prompt": "You can visit {} in", "target": "Oslo", "true": "Rome"}
EATS = {"subject": "Ben Elm", "prompt": "{} eats", "target": "kale"}


@pytest.fixture(scope="module")
def edited(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of one fact each: lives (Oslo), again (the same, differently searched), lima (a contradiction), eats."""
    home = tmp_path_factory.mktemp("edited")
    (home / "prose.txt").write_text(
        " ".join(["Ann Oak is a friend . Hello there . Ben Elm lives in Rome ."] * 5)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        for name, fact, more in (
            ("lives", LIVES, []),
            ("again", LIVES, ["--edit.target.lr", "0.5"]),
            ("lima", LIVES | {"target": "Lima"}, []),
            ("eats", EATS, []),
        ):
            rows, texts = (
                home / f"{name}.jsonl",
                ["--prose", home / "prose.txt", "--text", home / "prose.txt"],
            )
            rows.write_text(json.dumps(fact) + "\n")
            run("edit", folder, "--facts", rows, "--out", home / name, *SMALL, *texts, *more)
    return home


def test_records_are_not_composed_twice_nor_against_each_other(
    folder: Path, edited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lives, again, lima, eats = (edited / name for name in ("lives", "again", "lima", "eats"))
    out = tmp_path / "out"
    for words, message in (
        (
            [lives, "--records", lives],
            "batch 1 of .*lives is the same as batch 1 of .*lives: it would be applied twice",
        ),
        ([folder, "--records", lives, lives], "batch 1 of .*lives is the same as batch 1 of .*lives"),
        (
            [folder, "--records", lives, lima],
            "lives and .*lima contradict each other: 'You can visit Ann Oak in' is to be 'Oslo' and 'Lima'",
        ),
        ([lives, "--records", lima], "contradict each other"),
    ):
        for more in ([], ["--dry-run"]):
            with pytest.raises((UserError, SystemExit), match=message):
                run("edit", *words, "--out", out, *SMALL, *more)
    assert not out.exists()
    run("edit", folder, "--records", eats, lives, again, "--out", out, *SMALL)
    assert "again: 'You can visit Ann Oak in' is made 'Oslo' again, after" in capsys.readouterr().out
    assert len(json.loads((out / "edits.json").read_text())["batches"]) == 3


def test_all_facts_are_measured_against_the_model_before_the_first_edit(
    folder: Path, edited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On top of a folder, from records alone, and of what an undone batch leaves."""
    lives, eats = edited / "lives", edited / "eats"
    first = json.loads((lives / "edits.json").read_text())
    on_top, joined, left = (tmp_path / name for name in ("top", "joined", "left"))
    text = ["--text", edited / "prose.txt"]
    prose = ["--prose", edited / "prose.txt", *text]
    run("edit", lives, "--facts", edited / "eats.jsonl", "--out", on_top, *SMALL, *prose)
    run("edit", folder, "--records", lives, eats, "--out", joined, *SMALL, *text)
    run("edit", joined, "--undo", "--batches", "2", "--out", left, *SMALL, *text)
    assert "batches taken out" in capsys.readouterr().out
    for path in (on_top, joined):
        content = json.loads((path / "edits.json").read_text())
        assert [(row["prompt"], row["batch"]) for row in content["table"]] == [
            ("You can visit Ann Oak in", 1),
            ("Ben Elm eats", 2),
        ]
        assert content["table"][0]["before"] == first["table"][0]["before"]  # of the model without any edit
        assert content["metrics"]["first_token_p"]["facts"] == 2
        assert [(row["batch"], row["facts"]) for row in content["by_batch"]] == [(1, 1), (2, 1)]
        assert content["metrics"]["perplexity"]["before"] == first["metrics"]["perplexity"]["before"]
        assert "What is left of each batch" in (path / "edit.html").read_text()
    content = json.loads((left / "edits.json").read_text())
    assert content["metrics"] == first["metrics"]
    assert content["table"] == first["table"]
    assert "You can visit Ann Oak in" in (left / "edit.html").read_text()
    with pytest.raises(UserError, match="batch 0: there are batches 1 to 2"):
        run("edit", joined, "--undo", "--batches", "0", "--out", tmp_path / "none")


def test_the_record_names_the_adapter_that_was_merged(
    folder: Path, edited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights without edits are those of base and adapter, not the base's."""
    adapter, out, back = tmp_path / "tuned", tmp_path / "out", tmp_path / "back"
    shapes = {
        name: tensor.shape for name, tensor in weights(folder).items() if name.endswith("q_proj.weight")
    }
    tensors = {}
    for name, (rows, columns) in shapes.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{stem}.lora_A.weight"] = torch.full((2, columns), 0.1)
        tensors[f"{stem}.lora_B.weight"] = torch.full((rows, 2), 0.1)
    save_file(tensors, other_folder(adapter) / "adapter_model.safetensors")
    lora = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(lora | {"base_model_name_or_path": str(folder)}))
    words = ["--facts", edited / "eats.jsonl", "--prose", edited / "prose.txt", "--out", out, *SMALL]
    run("edit", folder, "--policy.adapter", adapter, *words)
    capsys.readouterr()
    run("edit", out, "--list")
    merged = f"{folder} with the adapter {adapter} merged"
    assert capsys.readouterr().out.startswith(f"{merged}: 1 batch, 1 fact")
    run("edit", out, "--undo", "--out", back)
    assert f"the weights are bit by bit those of {merged} (SHA-256" in capsys.readouterr().out
    assert not same(back, folder)


def test_batches_in_a_row_have_a_curve(folder: Path, tmp_path: Path, edited: Path) -> None:
    """A point is what a model with as many edits says: that of the folder with the first batch alone."""
    rows, out, alone = tmp_path / "rows.jsonl", tmp_path / "out", tmp_path / "alone"
    facts = [LIVES, EATS, {"subject": "Cid Yew", "prompt": "{} eats", "target": "plum"}]
    rows.write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    words = [*SMALL, "--prose", edited / "prose.txt", "--text", edited / "prose.txt"]
    run("edit", folder, "--facts", rows, "--out", out, *words, "--batch-size", "1")
    content = json.loads((out / "edits.json").read_text())
    assert [point["facts"] for point in content["curve"]] == [1, 2, 3]
    first = json.loads((edited / "lives/edits.json").read_text())["metrics"]
    assert content["curve"][0]["metrics"]["first_token_p"] == first["first_token_p"]["after"]["mean"]
    assert content["curve"][0]["drawdown"] == first["perplexity"]["drawdown"]
    assert (
        content["curve"][-1]["metrics"]["first_token_p"]
        == content["metrics"]["first_token_p"]["after"]["mean"]
    )
    page = (out / "edit.html").read_text()
    assert "Over the number of edits" in page
    assert page.count("<polyline") == 1  # no paraphrases, no neighbours
    run("edit", folder, "--facts", rows, "--out", alone, *words, "--batch-size", "2", "--no-curve")
    assert "curve" not in json.loads((alone / "edits.json").read_text())


def test_a_curve_has_eight_points_at_most() -> None:
    assert curve_places(1) == {1}
    assert curve_places(8) == set(range(1, 9))
    assert curve_places(1000) == {1, 3, 7, 19, 52, 139, 373, 1000}  # 1000^(n/7)
    assert max(curve_places(9)) == 9


def test_one_fact_has_no_bootstrap(edited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((edited / "lives/edits.json").read_text())
    for name in ("first_token_p", "efficacy_magnitude"):
        row = content["metrics"][name]
        assert (row["after"]["low"], row["after"]["high"], row["p_value"]) == (None, None, None)
    assert content["metrics"]["efficacy"]["after"]["high"] > 0.7  # Wilson's stays
    lines = as_text(content).splitlines()
    (line,) = (line for line in lines if line.startswith("source's efficacy"))
    assert line.count("too few facts") == 2
    assert "0.0005" not in "\n".join(lines)


def test_a_dry_run_finds_what_files_and_config_show(
    folder: Path, edited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experts, other = tmp_path / "experts", tmp_path / "other"
    family_cases.make(family_cases.CASES["mixtral"], other_folder(tmp_path / "mixtral"))
    mixture, _ = load_model(tmp_path / "mixtral")
    Policy(mixture, tokenizer(), SCHEMAS["none"]).save(other_folder(experts))
    fresh(replace(SHAPE, block=Block()), seed=1).save(other_folder(other))
    rows = edited / "eats.jsonl"
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    for words, message in (
        ([folder, "--records", tmp_path / "none"], "no edits.json"),
        ([other, "--records", edited / "lives"], "its edits belong to a model of SHA-256"),
        ([experts, "--facts", rows], "mixtures of experts"),
        ([folder, "--facts", rows, "--layers", "9"], "the model has layers 0 to 3, got 9"),
        ([folder, "--facts", rows, "--layers", "3"], "the last one"),
        ([folder, "--facts", rows, "--prose", tmp_path / "none"], "prose = .*cannot be read"),
        ([folder, "--facts", rows, "--prose", empty], "prose = .*: it is empty"),
        ([folder, "--facts", rows, "--text", tmp_path / "none"], "text .*cannot be read"),
        ([edited / "lives", "--undo", "--batches", "2"], "batch 2: there are batches 1 to 1"),
        ([folder, "--undo"], "no edits.json"),
    ):
        with pytest.raises((UserError, SystemExit), match=message):
            run("edit", *words, "--out", tmp_path / "out", "--dry-run")
    assert "would start" not in capsys.readouterr().out
    run(
        "edit", folder, "--facts", rows, "--records", edited / "lives", "--out", tmp_path / "out", "--dry-run"
    )
    said = capsys.readouterr().out
    assert re.search(r"the edit would start, and take at most about \d+:\d\d \(a few steps", said)
    assert not (tmp_path / "out").exists()


def other_folder(path: Path) -> Path:
    path.mkdir()
    return path


USED = {"passes": 3, "prose_weight": 2000.0, "ridge": 0.05, "target": {"clamp": 4.0, "steps": 50}}


@pytest.mark.parametrize(
    ("nll", "method", "settings", "says"),
    [
        (
            2.0,
            "memit",
            {"target": {"clamp": 6.0, "steps": 25}},
            "by --edit.target.clamp 6 --edit.target.steps 50 (",
        ),
        (2.0, "memit", USED, "it had room (clamp 4, 50 steps): what is left is other layers"),
        (
            0.1,
            "memit",
            {"passes": 1, "prose_weight": 0.0},
            "with --edit.passes 3, or a smaller --edit.prose-weight (",
        ),
        (0.1, "memit", USED, "with --edit.prose-weight below 2000 ("),
        (0.1, "alphaedit", USED, "with --edit.ridge below 0.05 ("),
        (0.1, "rome", USED, "what is left is other layers"),
    ],
)
def test_advice_that_was_followed_is_not_repeated(
    nll: float, method: str, settings: dict[str, Any], says: str
) -> None:
    state = {"first_token_p": 0.1, "first_token_rank": 1, "is_greedy": False, "says": "kale"}
    batch = {"method": method, "facts": [{}], "layers": [0], "norms": {"w": 0.1}, "seconds": 1.0}
    content = {
        "metrics": {},
        "table": [{"prompt": "Ben Elm eats", "target": "kale", "before": state, "after": state}],
        "batches": [batch | {"targets": [{"nll": nll}], "settings": settings}],
    }
    last = as_text(content).splitlines()[-1]
    assert says in last
    used = [f"--edit.passes {USED['passes']}", "--edit.target.clamp 4"]
    assert settings is not USED or not any(option in last for option in used)


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
        (["edit", folder, "--facts", empty, "--out", out], "empty.csv: no rows in it"),
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


@pytest.mark.ci
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
    assert [(row["target"], row["batch"]) for row in again.table] == [("Oslo", 1), ("kale", 1), ("plum", 2)]
    assert [row["before"] for row in again.table[:2]] == [row["before"] for row in edit.table]
    with pytest.raises(UserError, match="batch 'x': expected a number from 1 to 2"):
        again.undo("x")  # pyright: ignore[reportArgumentType]
    again.undo(2)
    assert again.table == edit.table
    assert again.metrics == edit.metrics
    content = json.loads((again.save(tmp_path / "less") / "edits.json").read_text())
    assert content["table"] == edit.table
    assert "Cid Yew" not in (tmp_path / "less/edit.html").read_text()
    for name, tensor in again.policy.loaded.model.state_dict().items():
        assert torch.equal(tensor, edit.policy.loaded.model.state_dict()[name]), name
    undone = edit.undo()
    for name, tensor in undone.loaded.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert (edit.metrics, edit.table) == ({}, [])
    assert not (edit.save(tmp_path / "bare") / "edits.json").exists()
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
    printed = capsys.readouterr().out
    assert "what comes back" in printed
    assert printed.startswith("tracing takes about 0:0")
    content = json.loads((out / "trace.json").read_text())
    assert [len(means) for means in content["subject_effects"].values()] == [4, 4, 4]
    assert content["subject_places"] == [3, 4]
    assert len(content["effects"]["mlp"]) == 4
    page = (out / "trace.html").read_text()
    assert page.count("<svg") == 6
    found = whet.trace(folder, "You can visit {} in", "Ann Oak", num_samples=2)
    assert found["effects"] == content["effects"]
    rows = tmp_path / "known.jsonl"
    rows.write_text(json.dumps({"subject": "Ann Oak", "prompt": "{} eats", "attribute": "rice"}) + "\n")
    run("trace", folder, "--facts", rows, "--out", tmp_path / "located", "--dry-run")
    assert "tracing would start, and take about 0:0" in capsys.readouterr().out
    assert not (tmp_path / "located").exists()
    run("trace", folder, "--facts", rows, "--out", tmp_path / "located")
    assert len(json.loads((tmp_path / "located/trace.json").read_text())["mean_effects"]) == 4
