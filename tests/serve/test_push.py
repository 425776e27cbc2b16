"""`whet push` and `whet pull` through the hub's own client, against a stand-in that refuses what the hub refuses."""

import json
import re
import shutil
from pathlib import Path

import hub_stand_in
import pytest
import torch
import yaml
from hub_stand_in import READ_ONLY, TOKEN, git_sha
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import _runtime
from safetensors.torch import save_file

from whet.__main__ import main
from whet.cli import from_dict
from whet.install import install_command
from whet.report.runs import read_runs
from whet.serve.hub import SECRET, PullConfig, PushConfig, plan, prepare, pull, push, write_card
from whet.types import UserError

# huggingface_hub gives httpx the bytes of a large file in a way that httpx is about to drop
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Point the client at a stand-in, with a token of `me` and an empty cache; XET is another protocol."""
    with hub_stand_in.serve() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
        monkeypatch.setattr("huggingface_hub.file_download.is_xet_available", lambda: False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert not _runtime.is_xet_available()
        yield hub


def estimate(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.01, "high": mean + 0.01}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run folder as `whet rl` writes it, with the evaluations of it and of its parent beside it."""
    folder = tmp_path / "runs" / "rl"
    model = folder / "checkpoints" / "step_00000003"
    (model / "training").mkdir(parents=True)
    save_file({"weight": torch.arange(6.0)}, str(model / "model.safetensors"))
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "tokenizer.json").write_text("{}")
    (model / "training" / "optimizer.pt").write_bytes(b"state")
    (model / "credentials.json").write_text("not a file of a model")
    (folder / "samples.jsonl").write_text('{"prompt": "p"}\n')
    config = {
        "policy": {"init": "Qwen/Qwen3-0.6B"},
        "task": {"name": "gsm8k", "path": "openai/gsm8k"},
        "group_size": 8,
        "algo": {"clip_low": 0.2, "kl_coef": 0.0},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    argv = ["/home/someone/bin/whet", "rl", "gsm8k", "--out=/home/someone/runs/rl"]
    (folder / "environment.json").write_text(
        json.dumps({"whet": "0.1.0", "git_commit": "a" * 40, "argv": argv})
    )
    (folder / "provenance.json").write_text(
        json.dumps(
            {"run_id": "rl-1", "start_utc": "2026-01-01T00:00:00+00:00", "base": {"name": "Qwen/Qwen3-0.6B"}}
        )
    )
    evaluation = tmp_path / "runs" / "rl-eval"
    evaluation.mkdir()
    scores = {
        "label": "rl",
        "num_problems": 100,
        "num_samples": 4,
        "metrics": {"pass@1": estimate(0.7123), "greedy": estimate(0.75)},
        "identity": {"task": {"name": "gsm8k"}, "split": "test"},
        "model": {"init": str(folder)},
    }
    (evaluation / "eval.json").write_text(json.dumps(scores))
    (evaluation / "config.yaml").write_text(yaml.safe_dump({"policy": {"init": str(folder)}}))
    return folder


def config(run: Path, name: str = "me/model", **fields) -> PushConfig:
    return PushConfig(what=(str(run), name), **fields)


def test_the_card_says_what_was_measured_and_how(run: Path) -> None:
    card = write_card(config(run, license="apache-2.0"), run)
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["base_model"] == "Qwen/Qwen3-0.6B"
    assert head["datasets"] == ["openai/gsm8k"]
    assert (head["library_name"], head["license"], head["tags"]) == (
        "transformers",
        "apache-2.0",
        ["whet", "rl", "reasoning"],
    )
    (entry,) = head["model-index"]
    (result,) = entry["results"]
    assert result["dataset"] == {"type": "gsm8k", "name": "gsm8k", "split": "test"}
    assert [(metric["type"], metric["value"]) for metric in result["metrics"]] == [
        ("pass@1", 71.23),
        ("greedy", 75.0),
    ]
    assert "| this one | gsm8k | test | 100 | 4 | 71.2 % (70.2 to 72.2) | 75.0 % (74.0 to 76.0) |" in card
    assert "`whet rl gsm8k --out=rl`" in card
    assert "/home/someone" not in card
    assert "whet 0.1.0 at aaaaaaaaaaaa" in card
    assert "clip_low: 0.2" in card
    parsed = ModelCard(card)  # the hub's own reader of cards
    assert parsed.data.base_model == "Qwen/Qwen3-0.6B"
    assert parsed.data.eval_results is not None
    assert parsed.data.eval_results[0].metric_value == 71.23
    assert hub_stand_in.card_fault(card) == ""


def test_a_card_without_measurements_says_so_and_states_no_licence(run: Path) -> None:
    shutil.rmtree(run.parent / "rl-eval")
    card = write_card(config(run), run)
    head = yaml.safe_load(card.split("---\n")[1])
    assert "model-index" not in head
    assert "license" not in head
    assert "Nothing was measured." in card


def test_only_the_model_is_pushed_unless_more_is_asked_for(run: Path) -> None:
    files, _ = prepare(config(run))
    assert set(files) == {"config.json", "model.safetensors", "tokenizer.json", "whet_config.yaml"}
    files, _ = prepare(config(run, samples=True, optimizer=True))
    assert set(files) >= {"samples.jsonl", "training/optimizer.pt"}
    assert "credentials.json" not in files


@pytest.mark.parametrize(
    "secret",
    ["hf_" + "a" * 30, "sk-" + "b" * 30, "ghp_" + "c" * 30, "AKIA" + "D" * 16, "https://u:p@host/v1"],
)
def test_a_secret_is_never_pushed(run: Path, secret: str) -> None:
    with (run / "config.yaml").open("a") as file:
        file.write(f"note: {secret}\n")
    with pytest.raises(UserError, match="whet_config.yaml: looks like it holds a secret"):
        prepare(config(run))
    assert not SECRET.search("skip-this hf_short https://host/v1")


def test_push_and_pull_return_the_same_files(hub, run: Path, tmp_path: Path, capsys) -> None:
    push(config(run, private=True))
    assert hub.private["me/model"]
    stored = hub.repos["me/model"][hub.heads["me/model"]]
    assert set(stored) == {
        ".gitattributes",
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "whet_config.yaml",
    }
    assert stored["model.safetensors"][1]  # in LFS
    assert "POST /me/model.git/info/lfs/objects/batch" in hub.calls
    out = tmp_path / "copy"
    pull(PullConfig(name="me/model", out=str(out)))
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    original = run / "checkpoints" / "step_00000003"
    for path in out.iterdir():
        assert path.read_bytes() == (original / path.name).read_bytes()
    said = capsys.readouterr().out
    assert hub.heads["me/model"] in said
    assert f"--policy.init {out}" in said
    push(config(run, update=True))
    pushes = json.loads((run / "pushes.json").read_text())["pushes"]
    assert [(row["name"], len(row["id"])) for row in pushes] == [("me/model", 40)] * 2
    assert pushes[-1]["id"] == hub.heads["me/model"]
    (own,) = (one for one in read_runs(run.parent) if one["folder"] == "rl")
    assert [link["id"] for link in own["links"]] == [row["id"] for row in pushes]
    with pytest.raises(UserError, match="exists already"):
        pull(PullConfig(name="me/model", out=str(out)))


def test_an_existing_repository_is_updated_only_when_asked(hub, run: Path) -> None:
    push(config(run))
    first = hub.heads["me/model"]
    with pytest.raises(UserError, match=r"exists already: --update pushes to it.*409"):
        push(config(run))
    assert hub.heads["me/model"] == first
    (run / "checkpoints" / "step_00000003" / "config.json").write_text('{"model_type": "qwen2"}')
    push(config(run, update=True))
    assert hub.heads["me/model"] != first


def test_an_older_revision_can_be_pulled(hub, tmp_path: Path) -> None:
    first = hub.add("you/model", {"config.json": b"{}", "model.safetensors": b"one"})
    hub.add("you/model", {"model.safetensors": b"two"})
    pull(PullConfig(name="you/model", revision=first, out=str(tmp_path / "one")))
    pull(PullConfig(name="you/model", out=str(tmp_path / "two")))
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == b"one"
    assert (tmp_path / "two" / "model.safetensors").read_bytes() == b"two"


def test_what_the_hub_refuses_is_one_line_with_a_remedy(hub, run: Path, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(UserError, match="the token may not write there.*403"):
        push(config(run, "you/model"))
    hub.largest_object = 10
    with pytest.raises(UserError, match="me/model: the hub"):
        push(config(run))
    assert "model.safetensors" not in hub.repos["me/model"][hub.heads["me/model"]]
    with pytest.raises(UserError, match="knows no such model"):
        pull(PullConfig(name="you/nothing", out=str(tmp_path / "a")))
    with pytest.raises(UserError, match="no revision 'v9'"):
        pull(PullConfig(name="me/model", revision="v9", out=str(tmp_path / "a")))
    with pytest.raises(UserError, match="no safetensors"):
        pull(PullConfig(name="me/model", out=str(tmp_path / "a")))
    monkeypatch.setenv("HF_TOKEN", READ_ONLY)
    with pytest.raises(UserError, match="403"):
        push(config(run, update=True))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="asks for a token: `hf auth login`, or HF_TOKEN"):
        push(config(run, "me/other"))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("path", "content"), [("model.safetensors", b"onE"), ("config.json", b"[]"), ("model.safetensors", b"on")]
)
def test_a_file_that_differs_from_what_the_hub_states_is_refused(
    hub, tmp_path: Path, path: str, content: bytes
) -> None:
    hub.add("you/model", {"config.json": b"{}", "model.safetensors": b"one", "evil.py": b"x"})
    hub.damage[path] = content
    with pytest.raises(
        UserError, match="has .* bytes and hash .*, the hub states|did not arrive|Consistency check"
    ):
        pull(PullConfig(name="you/model", out=str(tmp_path / "out")))
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith((".out", "out"))] == []


def test_the_stand_in_refuses_an_upload_of_another_content(hub) -> None:
    import urllib.error
    import urllib.request

    for body in (b"abc", b"abcd"):
        request = urllib.request.Request(f"{hub.url}/lfs/{'0' * 64}/4", data=body, method="PUT")
        with pytest.raises(urllib.error.HTTPError, match="400") as caught:
            urllib.request.urlopen(request)
        caught.value.close()
    assert git_sha(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"  # as git prints it


def test_dry_run_prints_the_card_and_the_files_and_calls_nobody(run: Path, capsys) -> None:
    assert main(["push", str(run), "me/model", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "base_model: Qwen/Qwen3-0.6B" in said
    assert re.search(r"\n +\d+  model.safetensors\n", said)
    assert "bytes in 5 files" in said
    assert plan(config(run)) in said


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "model"}, "expected OWNER/NAME"),
        ({"evals": ("nowhere",)}, "nowhere: no finished evaluation"),
    ],
)
def test_mistakes_are_one_line(run: Path, fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(config(run, **fields))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run or folder"):
        prepare(config(tmp_path / "nothing"))
    with pytest.raises(UserError, match="neither a model folder"):
        prepare(config(tmp_path))
    with pytest.raises(UserError, match="which model"):
        pull(from_dict(PullConfig, {}, where="whet pull"))


def test_a_missing_client_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=re.escape(install_command("hf"))):
        push(config(run))
