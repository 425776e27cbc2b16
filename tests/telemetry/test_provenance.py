"""Provenance of a run: ids, hashes, parents; and finding a run again."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from whet.telemetry.provenance import (
    data_hash,
    describe_environment,
    describe_model,
    find_run,
    inputs_of,
    parent_run,
    run_folders,
    run_id,
    write_environment,
    write_provenance,
)
from whet.types import Message, Problem, UserError

PROBLEMS = [Problem(uid=str(i), task="t", prompt=f"{i}+1=", answer=str(i + 1)) for i in range(3)]


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def started(folder: Path, config: str = "seed: 0\n") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    write_environment(folder)
    return folder


def model(folder: Path, weights: str = "w") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(weights)
    return folder


def test_a_run_names_everything_that_it_depends_on(tmp_path: Path) -> None:
    sft = started(tmp_path / "runs" / "sft-one")
    first = write_provenance(sft, config_yaml="seed: 0\n", problems=PROBLEMS)
    model(sft / "checkpoints" / "step_00000009", "old")
    model(sft / "checkpoints" / "step_00000010", "new")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "adapter_model.safetensors").write_text("lora")
    rl = started(tmp_path / "runs" / "rl-one")
    link = {"name": "wandb", "id": "kga9ov93", "url": "https://wandb.ai/x/kga9ov93"}
    found = write_provenance(
        rl, base=str(sft), adapter=str(adapter), config_yaml="seed: 1\n", problems=PROBLEMS[:2], links=[link]
    )
    assert found == json.loads((rl / "provenance.json").read_text())
    assert re.fullmatch(r"rl-one-\d{8}-\d{6}-[0-9a-f]{6}", found["run_id"])
    assert found["config_sha256"] == sha("seed: 1\n")
    assert found["base"]["sha256"]["model.safetensors"] == sha("new"), "the newest checkpoint is loaded"
    assert found["adapter"]["sha256"]["adapter_model.safetensors"] == sha("lora")
    assert (found["num_problems"], found["links"]) == (2, [link])
    assert found["parent"] is None, "the adapter is what was trained on, and no run made it"
    environment = json.loads((rl / "environment.json").read_text())
    assert (found["start_utc"], found["git_commit"]) == (environment["start_utc"], environment["git_commit"])
    later = started(tmp_path / "runs" / "eval-one")
    assert write_provenance(later, base=str(sft))["parent"] == {"folder": str(sft), "run_id": first["run_id"]}


def test_a_resumed_run_keeps_its_identity_and_runs_of_one_second_differ(tmp_path: Path) -> None:
    folders = [started(tmp_path / place / "rl-same") for place in "ab"]
    ids = [write_provenance(folder, config_yaml="seed: 0\n")["run_id"] for folder in folders]
    assert ids[0] != ids[1]
    assert write_provenance(folders[0], config_yaml="seed: 7\n")["run_id"] == ids[0]
    folders[0].rename(tmp_path / "moved")
    assert run_id(tmp_path / "moved") == ids[0]


def test_a_damaged_provenance_is_said_kept_and_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = started(tmp_path / "rl-one")
    first = write_provenance(folder, config_yaml="seed: 0\n", problems=PROBLEMS)
    path, aside = folder / "provenance.json", folder / ".corrupt-provenance.json"
    whole = path.read_text()
    assert write_provenance(folder) == first
    assert capsys.readouterr().out == ""
    for broken in (whole[:-40], "[1]", "", whole.replace('"num_problems": 3', '"num_problems": 2'), "{}"):
        assert broken != whole
        path.write_text(broken)
        found = write_provenance(folder, config_yaml="seed: 0\n", problems=PROBLEMS)
        assert f"whet: warning: {path}: damaged; kept as {aside.name}" in capsys.readouterr().out
        assert aside.read_text() == broken
        assert found == json.loads(path.read_text())
        assert found["data_sha256"] == first["data_sha256"]
    unsealed = {name: value for name, value in first.items() if name != "seal"}
    path.write_text(json.dumps(unsealed))
    assert write_provenance(folder) == unsealed, "of an earlier version"


def test_old_folders_have_an_id_that_stays(tmp_path: Path) -> None:
    a, b = started(tmp_path / "rl", "seed: 0\n"), started(tmp_path / "rl-b", "seed: 1\n")
    assert run_id(a) == run_id(a) != run_id(b)
    assert run_id(a).startswith(f"{tmp_path.name}-rl-"), "a short name gets its parent's before it"


def test_the_data_hash_depends_on_content_and_not_on_order() -> None:
    assert data_hash(PROBLEMS) == data_hash(PROBLEMS[::-1])
    changed = Problem(uid="2", task="t", prompt="2+1=", answer="4")
    assert data_hash([*PROBLEMS[:2], changed])[0] != data_hash(PROBLEMS)[0]
    assert data_hash([]) == (None, 0)


def test_known_hashes_are_taken_and_hub_commits_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(tmp_path / "checkpoint")
    files = {"model.safetensors": {"size": 1, "sha256": "ab" * 32}}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))
    assert describe_model(str(folder))["sha256"]["model.safetensors"] == "ab" * 32
    commit = "67e21dbdbeb243569e965957aa42b82df87d039d"
    cache = tmp_path / "hub" / "models--owner--name"
    snapshot = model(cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    blob = cache / "blobs" / ("cd" * 32)
    blob.parent.mkdir()
    blob.write_text("large")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(blob)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    found = describe_model("owner/name")
    assert found["commit"] == commit
    assert found["sha256"] == {"config.json": sha("{}"), "model.safetensors": "cd" * 32}
    assert describe_model("owner/other")["sha256_of_all"] is None


def test_runs_are_found_by_id_beginning_or_path_and_checkpoints_are_not_entered(tmp_path: Path) -> None:
    one = started(tmp_path / "rl-one")
    two = started(tmp_path / "more" / "rl-two")
    model(one / "checkpoints" / "step_00000001")
    started(one / "checkpoints" / "odd")
    (tmp_path / "notes").mkdir()
    assert list(run_folders(tmp_path)) == [two, one]
    name = write_provenance(two)["run_id"]
    assert (
        find_run(tmp_path, name) == find_run(tmp_path, "rl-two") == find_run(tmp_path, "more/rl-two") == two
    )
    with pytest.raises(UserError, match="'rl-' names 2 runs below .*; give more of the id"):
        find_run(tmp_path, "rl-")
    with pytest.raises(UserError, match="'nothing': no run of that id"):
        find_run(tmp_path, "nothing")
    assert parent_run(str(one / "checkpoints" / "step_00000001")) == one
    assert parent_run("owner/name") is None


def test_damaged_files_are_no_reason_to_stop(tmp_path: Path) -> None:
    folder = started(tmp_path / "rl-one")
    (folder / "environment.json").write_text("{")
    (folder / "provenance.json").write_text("[1]")
    assert run_id(folder).startswith("rl-one-")


@pytest.mark.parametrize(
    ("hip", "cuda", "expected"),
    [("6.4.43482", None, "ROCm 6.4.43482"), (None, "13.0", "CUDA 13.0"), (None, None, None)],
)
def test_environment_names_the_gpu_runtime(monkeypatch, hip, cuda, expected):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert describe_environment()["gpu_runtime"] == expected


def test_environment_of_an_mi300x(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm's PyTorch calls AMD's GPUs cuda; environment.json says what they are."""
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = describe_environment()
    assert (found["gpu_runtime"], found["cuda_device"]) == ("ROCm 6.4.43482", "AMD Instinct MI300X")
    assert (found["gpu_architecture"], found["num_cuda_devices"]) == ("gfx942", 8)
    monkeypatch.setattr(torch.version, "hip", None)
    assert describe_environment()["gpu_architecture"] == "sm_94"


@dataclass(frozen=True)
class Inner:
    """Settings of a group."""

    init: str = ""
    text: str = "answer\nme"
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    out: str = ""
    inner: Inner = Inner()
    weights: Mapping[str, float] = field(default_factory=lambda: {"correct": 1.0})


def test_inputs_are_the_files_that_settings_name_and_the_problems_in_their_order(tmp_path: Path) -> None:
    folder = model(tmp_path / "base")
    (folder / "tokenizer.json").write_text("ids")
    (folder / "README.md").write_text("no input")
    (tmp_path / "mine.py").write_text("def f(): ...")
    names = (f"{tmp_path}/mine.py:f=0.5", "package.module:f", "correct", "x" * 300)
    config = Settings(out=str(tmp_path / "mine.py"), inner=Inner(init=str(folder), names=names))
    found = inputs_of(config, PROBLEMS)
    assert found.pop("whet").startswith("0.")
    count, _, digest = found.pop("problems").partition(" ")
    assert (count, len(digest)) == ("3", 64)
    assert found == {
        f"inner.init: {folder}/config.json": sha("{}"),
        f"inner.init: {folder}/model.safetensors": sha("w"),
        f"inner.init: {folder}/tokenizer.json": sha("ids"),
        f"inner.names: {tmp_path}/mine.py": sha("def f(): ..."),
    }
    one, two, three = PROBLEMS
    others = [
        [two, one, three],
        [one, two],
        [one, two, replace(three, answer="4")],
        [one, two, replace(three, solution="2+1")],
        [one, two, replace(three, reply="3")],
        [one, two, replace(three, images=("a.png",))],
        [one, two, replace(three, messages=(Message(role="user", content="2+1?"),))],
        [one, two, replace(three, meta={"tests": "assert True"})],
    ]
    hashes = {inputs_of(config, problems)["problems"] for problems in (PROBLEMS, *others)}
    assert len(hashes) == 1 + len(others)
    moved = [one, two, replace(three, meta={"file": "elsewhere.jsonl"})]
    assert inputs_of(config, moved)["problems"] == f"{count} {digest}"


def test_what_a_reward_imports_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules beside the file, of packages, relative ones, and what they import; no installed package."""
    files = {
        "mine/reward.py": "import json, helper\nfrom parts import units as u\ndef f():\n    import late",
        "mine/helper.py": "import helper, numpy",
        "mine/late.py": "",
        "mine/unused.py": "",
        "mine/parts/__init__.py": "",
        "mine/parts/units.py": "from . import tables\nfrom ..mine import nothing",
        "mine/parts/tables.py": "this is no Python",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    found = inputs_of(Settings(inner=Inner(names=("mine/reward.py:f=0.5",))), PROBLEMS)
    of_mine = {name.partition(": ")[2] for name in found if ":" in name}
    assert of_mine == set(files) - {"mine/unused.py"}
    monkeypatch.chdir(tmp_path / "mine")
    found = inputs_of(Settings(inner=Inner(names=("parts.units:f",))), PROBLEMS)
    of_mine = {name.partition(": ")[2] for name in found if ":" in name}
    assert of_mine == {"parts/units.py", "parts/tables.py"}


def test_inputs_are_named_as_settings_name_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project may be moved as a whole; a folder that holds a tokenizer alone counts, and a model's own tools."""
    home = tmp_path / "old"
    (home / "tok").mkdir(parents=True)
    model(home / "base")
    run = home / "run" / "checkpoints" / "step_00000002"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (home / "tok" / "tokenizer.json").write_text('{"7": 0, "8": 1}')
    (home / "tool.py").write_text("def add(text): ...")
    config = Settings(inner=Inner(init="base", names=("tok", "run")))
    monkeypatch.chdir(home)
    found = inputs_of(config, PROBLEMS, tools=("calculator", "tool.py:add"))
    assert sorted(name for name in found if ":" in name) == [
        "inner.init: base/config.json",
        "inner.init: base/model.safetensors",
        "inner.names: run/checkpoints/step_00000002/config.json",
        "inner.names: tok/tokenizer.json",
        "tools: tool.py",
    ]
    home.rename(tmp_path / "new")
    monkeypatch.chdir(tmp_path / "new")
    assert inputs_of(config, PROBLEMS, tools=("calculator", "tool.py:add")) == found
    Path("tok/tokenizer.json").write_text('{"8": 0, "7": 1}')
    Path("tool.py").write_text("def add(text): return 1")
    changed = inputs_of(config, PROBLEMS, tools=("calculator", "tool.py:add"))
    assert {name for name in found if found[name] != changed[name]} == {
        "inner.names: tok/tokenizer.json",
        "tools: tool.py",
    }


def test_validation_problems_are_inputs() -> None:
    one, two, _ = PROBLEMS
    alone, with_two = (inputs_of(Settings(), [one], held_out=held) for held in ((), [two]))
    assert with_two.keys() - alone.keys() == {"validation problems"}
    other = inputs_of(Settings(), [one], held_out=[replace(two, answer="9")])
    assert other["validation problems"] != with_two["validation problems"]


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_inputs_are_compared_with_a_checkpoints_where_provenance_is_gone(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, now = {"problems": "3 abc"}, {"problems": "2 def"}
    for step, inputs in ((2, now), (10, before)):
        training = tmp_path / "checkpoints" / f"step_{step:08d}" / "training"
        training.mkdir(parents=True)
        (training / "state.json").write_text(json.dumps({"step": step, "inputs": inputs}))
    first = write_provenance(tmp_path, inputs=before)
    path = tmp_path / "provenance.json"
    for inputs, refused in ((before, False), (now, True)):
        path.unlink(missing_ok=True)
        if damage == "cut":
            path.write_text('{"run_id": "')
        if not refused:
            again = write_provenance(tmp_path, inputs=inputs)
            assert again["inputs"] == before
            assert again["run_id"] != first["run_id"]
            assert "new id" in capsys.readouterr().out
            continue
        with pytest.raises(UserError, match=r"has changed .*problems \(3, now 2\)"):
            write_provenance(tmp_path, inputs=inputs)
        path.unlink(missing_ok=True)
        noted = write_provenance(tmp_path, inputs=inputs, may_differ=True)
        assert noted["inputs"] == now
        assert noted["input_changes"][0]["changed"] == {"problems": ["3 abc", "2 def"]}
