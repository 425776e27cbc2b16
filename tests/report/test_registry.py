"""`whet runs`: what the small files of runs tell, as table, JSON, Markdown and page."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from whet.config import dump_yaml
from whet.eval.evaluate import EvalConfig
from whet.generate.policy import PolicyConfig
from whet.recipes import dpo, rft, rl, sft
from whet.report.runs import RunsConfig, lineage, main, print_runs, read_runs, results_table
from whet.telemetry.provenance import find_run, run_id, write_provenance
from whet.types import UserError

HOSTILE = "<script>alert(1)</script>|\x1b[31m`"


def made(folder: Path, start: str, config: str, **files: Any) -> Path:
    """Write a run folder; its samples are a folder, so that reading them would fail."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    (folder / "environment.json").write_text(
        json.dumps({"start_utc": start, "git_commit": "741352d8f08d43-dirty"})
    )
    (folder / "eval_samples.jsonl").mkdir()
    (folder / "samples.jsonl").mkdir()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def scored(folder: Path, start: str, init: Path, mean: float, task: str = "gsm8k", **more: Any) -> Path:
    interval = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}
    content = {
        "label": str(init),
        "num_problems": 200,
        "num_samples": 16,
        "metrics": {"pass@1": interval, "greedy": interval},
        "identity": {"task": {"name": task}, "split": "test"},
        "model": {"init": str(init), "sha256": "ab" * 32},
    }
    return made(folder, start, f"answer_from: schema\npolicy:\n  init: {init}\n", eval=content | more)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A base model, fine-tuned (old folder), reinforced (with provenance), and evaluated on two tasks."""
    root = tmp_path / "runs"
    first = made(
        root / "sft-one", "2026-01-01T10:00:00+00:00", "empty_thinking_share: 0.0\npolicy:\n  init: o/base\n"
    )
    second = made(
        root / "rl-one",
        "2026-01-02T10:00:00+00:00",
        f"group_size: 8\npolicy:\n  init: {first}\n",
        summary={"peak_memory_gib": 3.25},
        trackers=[{"name": "wandb", "id": "kga9ov93", "url": "https://wandb.ai/x"}],
    )
    write_provenance(second, base=str(first), config_yaml="x")
    scored(root / "e1", "2026-01-03T10:00:00+00:00", second, 0.25)
    scored(root / "e2", "2026-01-04T10:00:00+00:00", first, 0.125, "math")
    scored(root / "e0", "2026-01-05T10:00:00+00:00", Path("o/base"), 0.0625)
    return root


def test_lineage_goes_from_the_base_to_the_evaluation(runs: Path) -> None:
    found = read_runs(runs)
    assert [run["folder"] for run in found] == ["sft-one", "rl-one", "e1", "e2", "e0"]
    assert [run["kind"] for run in found] == ["sft", "rl", "eval", "eval", "eval"]
    chains = [lineage(run, found) for run in found]
    assert chains[2] == ["o/base", "sft-one", "rl-one", "e1"]
    assert chains[4] == ["o/base", "e0"]
    assert found[1]["links"] == [{"name": "wandb", "id": "kga9ov93", "url": "https://wandb.ai/x"}]


def test_questions_asked_belong_to_the_run_that_answered(tmp_path: Path) -> None:
    """S0-11 and S0-12, by the first seed's names: run, adapter's commit, tracker's run, what was asked."""
    commit = "67e21dbdbeb243569e965957aa42b82df87d039d"
    trained = made(
        tmp_path / "Qwenv3-optimized-mi300x-full-testmini-5",
        "2026-01-04T18:00:00+00:00",
        "group_size: 8\npolicy:\n  init: Qwen/Qwen3-VL-8B-Instruct\n",
        trackers=[
            {"name": "wandb", "id": "kga9ov93", "url": "https://wandb.ai/x/mi300x-qwen-grpo/runs/kga9ov93"}
        ],
    )
    hub = {"name": "owner/adapter", "commit": commit}
    (trained / "provenance.json").write_text(json.dumps({"run_id": trained.name, "adapter": hub}))
    for name, words in (("batch-inf-0104-1950", [str(trained)]), ("batch-inf-0104-2012", ["o/a", "o/b"])):
        config = f"answer_from: schema\nimage_urls: none\nruns: {json.dumps(words)}\npolicy:\n  init: RUN\n"
        made(tmp_path / name, "2026-01-04T19:50:00+00:00", config, infer={"models": []})
    found = {run["folder"]: run for run in read_runs(tmp_path)}
    run = found[trained.name]
    assert (run["adapter_commit"], run["links"][0]["id"]) == (commit, "kga9ov93")
    asked, others = found["batch-inf-0104-1950"], found["batch-inf-0104-2012"]
    assert (asked["kind"], asked["status"]["kind"]) == ("infer", "finished")
    assert lineage(asked, list(found.values()))[-2:] == [trained.name, "batch-inf-0104-1950"]
    assert (others["base"], others["parent"]) == ("o/a, o/b", None)


def test_a_model_s_peak_is_of_its_own_process_not_of_the_machine(tmp_path: Path) -> None:
    machine = {"devices": [{"id": "cpu", "memory_gib": {"mean": 90.0, "max": 100.0}}]}
    for name, hardware in (("a", machine | {"peak_memory_gib": 2.5}), ("b", machine), ("c", None)):
        scored(tmp_path / name, "2026-01-05T10:00:00+00:00", Path(f"o/{name}"), 0.5, hardware=hardware)
    rows = results_table(read_runs(tmp_path))["rows"]
    assert {row["model"]: row["peak_memory_gib"] for row in rows} == {"o/a": 2.5, "o/b": None, "o/c": None}


def test_moved_runs_keep_their_recorded_parents(runs: Path, tmp_path: Path) -> None:
    write_provenance(runs / "sft-one")
    (runs / "rl-one" / "provenance.json").unlink()
    write_provenance(runs / "rl-one", base=str(runs / "sft-one"))
    moved = runs.rename(tmp_path / "elsewhere")
    found = read_runs(moved)
    assert lineage(found[1], found)[-2:] == ["sft-one", "rl-one"]


def test_a_moved_demo_s_evaluations_are_those_of_its_stages(tmp_path: Path) -> None:
    for stage in ("sft", "rl"):
        (tmp_path / "demo-x" / stage / "checkpoints").mkdir(parents=True)
        (tmp_path / "demo-x" / stage / "config.yaml").write_text("num_steps: 1\n")
        (tmp_path / "demo-x" / stage / "environment.json").write_text("{}")
    folder = tmp_path / "demo-x" / "eval" / "rl"
    folder.mkdir(parents=True)
    estimate = {"mean": 0.5, "low": 0.4, "high": 0.6}
    content = {"label": "rl", "metrics": {"pass@1": estimate}, "num_problems": 4, "num_samples": 2}
    for base, known in (("old/demo-x/rl", "demo-x/rl"), ("old/other/rl", None)):
        (folder / "eval.json").write_text(json.dumps(content | {"model": {"init": base}}))
        (own,) = (run for run in read_runs(tmp_path) if run["folder"] == "demo-x/eval/rl")
        assert (own["parent"] or {}).get("known") == known


def test_a_long_origin_shows_its_end_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "64")
    run = {
        "run_id": "demo-rl-20261123-112634-580fa6",
        "kind": "rl",
        "status": {"kind": "finished"},
        "notes": [],
    }
    run |= {"folder": "demo-rl", "parent": None, "base": "runs/demo-20261123-105621/sft"}
    print_runs([run], {"tasks": {}, "rows": []})
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "demo-rl-" in line)
    assert line.rstrip().endswith("621/sft")
    assert "…" in line


def test_results_are_models_by_tasks_with_dashes_until_run(runs: Path) -> None:
    main(RunsConfig(folder=str(runs), write=True))
    results = json.loads((runs / "registry.json").read_text())["results"]
    assert results["tasks"] == ["gsm8k/test", "math/test"]
    assert [row["model"] for row in results["rows"]] == ["o/base", "sft-one", "rl-one"]
    lines = (runs / "registry.md").read_text().splitlines()
    assert "| rl-one | 25.0 [15.0, 35.0], greedy 25.0 | – | 3.25 |" in lines
    assert "| sft-one | – | 12.5 [2.5, 22.5], greedy 12.5 | – |" in lines
    page = (runs / "runs.html").read_text()
    assert "25.0 [15.0, 35.0]" in page
    assert "kga9ov93" in page


def test_of_equally_good_models_none_is_called_the_best(runs: Path) -> None:
    main(RunsConfig(folder=str(runs), write=True))
    assert "Best on gsm8k/test: rl-one, 25.0 % of" in (runs / "runs.html").read_text()
    scored(runs / "e8", "2026-01-31T10:00:00+00:00", Path("o/base"), 0.25)
    main(RunsConfig(folder=str(runs), write=True))
    assert "Best on" not in (runs / "runs.html").read_text()


def test_the_newest_evaluation_of_a_model_counts(runs: Path) -> None:
    scored(runs / "e9", "2026-02-01T10:00:00+00:00", runs / "rl-one", 0.5)
    cells = next(row for row in results_table(read_runs(runs))["rows"] if row["model"] == "rl-one")["cells"]
    assert cells["gsm8k/test"]["pass@1"]["mean"] == 0.5


def test_each_data_set_of_one_s_own_has_a_column(tmp_path: Path) -> None:
    for name, path, hashed in (
        ("a", "x/rows.csv", "1" * 64),
        ("b", "x/rows.csv", "1" * 64),
        ("c", "y/rows.csv", "2" * 64),
        ("d", "other.jsonl", "3" * 64),
        ("e", "", "4" * 64),
        ("f", "", "5" * 64),  # of a data set with a name: more or fewer of the same problems
    ):
        task = {"name": "jsonl" if path else "gsm8k", "path": path}
        identity = {"task": task, "split": "test", "problems_sha256": hashed}
        scored(tmp_path / name, "2026-01-05T10:00:00+00:00", Path(f"o/{name}"), 0.5, identity=identity)
    table = results_table(read_runs(tmp_path))
    assert table["tasks"] == [
        "gsm8k/test",
        "other.jsonl/test",
        "rows.csv/test #111111",
        "rows.csv/test #222222",
    ]
    where = {row["model"]: [task for task, cell in row["cells"].items() if cell] for row in table["rows"]}
    assert where["o/a"] == where["o/b"] == ["rows.csv/test #111111"]
    assert where["o/c"] == ["rows.csv/test #222222"]
    assert where["o/e"] == where["o/f"] == ["gsm8k/test"]


def test_registry_markdown_has_id_time_commit_and_notes(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(RunsConfig(folder=str(runs), write=True, note=("rl-one", "clip too | low")))
    main(RunsConfig(folder=str(runs), write=True, note=("rl-one", "second")))
    name = run_id(runs / "rl-one")
    row = (
        f"| {name} | 2026-01-02T10:00:00+00:00 | 741352d8f0-dirty | o/base → sft-one | wandb kga9ov93 | "
        "clip too \\| low; second |"
    )
    assert row in (runs / "registry.md").read_text().splitlines()
    out = capsys.readouterr().out
    assert name in out
    assert "\x1b" not in out


def test_the_seeds_run_and_its_batches_by_their_own_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run, adapter's commit on the hub, tracker's run, and the two evaluations of it, as the reference has them."""
    name, root = "Qwenv3-optimized-mi300x-full-testmini-5", tmp_path / "runs"
    config = "group_size: 8\npolicy:\n  init: Qwen/Qwen3-VL-8B-Instruct\n"
    commit = "67e21dbdbeb243569e965957aa42b82df87d039d"
    trained = made(
        root / name,
        "2026-01-04T17:00:00+00:00",
        config,
        trackers=[{"name": "wandb mi300x-qwen-grpo", "id": "kga9ov93", "url": "https://wandb.ai/x"}],
        pushes={"pushes": [{"name": "Thunderbird2410/grpo-vl-lora", "id": commit, "url": "https://hf.co/x"}]},
    )
    write_provenance(trained, base="Qwen/Qwen3-VL-8B-Instruct")
    scored(root / "batch-inf-0104-2012", "2026-01-04T20:12:00+00:00", Path("Qwen/Qwen3-VL-8B-Instruct"), 0.25)
    scored(root / "batch-inf-0104-1950", "2026-01-04T19:50:00+00:00", trained, 0.5)
    main(
        RunsConfig(
            folder=str(root), write=True, note=(name, "rewards read the tags that the prompt asks for")
        )
    )
    found = {run["folder"]: run for run in read_runs(root)}
    assert lineage(found["batch-inf-0104-1950"], list(found.values())) == [
        "Qwen/Qwen3-VL-8B-Instruct",
        name,
        "batch-inf-0104-1950",
    ]
    assert find_run(root, name) == find_run(root, found[name]["run_id"]) == trained
    assert found[name]["run_id"].startswith(f"{name}-20260104-170000-")
    row = next(
        line for line in (root / "registry.md").read_text().splitlines() if line.startswith(f"| {name}")
    )
    assert row == (
        f"| {found[name]['run_id']} | 2026-01-04T17:00:00+00:00 | 741352d8f0-dirty | Qwen/Qwen3-VL-8B-Instruct | "
        "wandb mi300x-qwen-grpo kga9ov93; Thunderbird2410/grpo-vl-lora 67e21dbdbe | rewards read the tags that the "
        "prompt asks for |"
    )
    assert commit in (root / "runs.html").read_text()
    assert {row["model"] for row in results_table(list(found.values()))["rows"]} == {
        "Qwen/Qwen3-VL-8B-Instruct",
        name,
    }
    assert name in capsys.readouterr().out.replace("\n", "")


def test_every_program_is_recognised_by_its_config(tmp_path: Path) -> None:
    configs = {
        "sft": sft.RECIPES["demo"](),
        "rl": rl.RECIPES["demo"](),
        "dpo": next(iter(dpo.RECIPES.values()))(),
        "rft": next(iter(rft.RECIPES.values()))(),
        "eval": EvalConfig(out="x", policy=PolicyConfig(init="x")),
    }
    for name, config in configs.items():
        made(tmp_path / f"run-of-{name}", "2026-01-01T00:00:00+00:00", dump_yaml(config))
    assert {run["folder"]: run["kind"] for run in read_runs(tmp_path)} == {f"run-of-{n}": n for n in configs}


@pytest.mark.ci
def test_hundreds_of_runs_are_read_quickly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = dump_yaml(rl.RECIPES["demo"]())
    for number in range(200):
        made(
            tmp_path / f"rl-run-{number:03d}",
            f"2026-01-01T00:{number // 60:02d}:{number % 60:02d}+00:00",
            config,
        )
    began = time.process_time()
    main(RunsConfig(folder=str(tmp_path), write=True))
    assert time.process_time() - began < 10, "2 s on an idle machine"
    assert len(json.loads((tmp_path / "registry.json").read_text())["runs"]) == 200
    assert capsys.readouterr().out.count("rl-run-") == 200


def test_what_stands_in_old_or_foreign_files_is_text(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = scored(runs / "bad", "2026-03-01T00:00:00+00:00", Path("x"), 0.5, label=HOSTILE)
    content = json.loads((bad / "eval.json").read_text())
    content["model"], content["identity"]["task"] = {"init": HOSTILE}, HOSTILE
    (bad / "eval.json").write_text(json.dumps(content))
    (runs / "rl-one" / "trackers.json").write_text(
        json.dumps([{"name": "x", "id": HOSTILE, "url": "javascript:alert(1)"}])
    )
    for number, text in enumerate(
        ("[]", '{"metrics": {"pass@1": 3}, "model": "x", "identity": 4}', "{", '{"hardware": 5}')
    ):
        odd = made(
            runs / f"odd-{number}", "2026-04-01T00:00:00+00:00", "- a\n- {b: !!python/object:os.system x}\n"
        )
        (odd / "eval.json").write_text(text)
        (odd / "provenance.json").write_text('{"base": 3, "parent": "x", "links": 4, "run_id": 7}')
    main(RunsConfig(folder=str(runs), write=True))
    page = (runs / "runs.html").read_text()
    assert "<script>alert" not in page
    assert 'href="javascript' not in page
    assert "<script>alert" not in (runs / "registry.md").read_text()
    assert "\x1b" not in capsys.readouterr().out


def test_mistakes_get_one_line(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"folder": str(tmp_path / "nowhere")}, "no such run or folder"),
        ({"folder": str(tmp_path / "empty")}, "no run below it"),
        ({"folder": str(runs), "note": ("zzz", "x")}, "no run of that id"),
        ({"folder": str(runs), "note": ("runs-e", "x")}, "names 3 runs"),
        ({"folder": str(runs), "note": ("rl-one", " ")}, "the text is empty"),
        ({"folder": str(runs / "e1" / "config.yaml")}, "is a file, expected a run or a folder"),
    ]
    for fields, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            main(RunsConfig(**fields))
        assert "\n" not in str(caught.value)


ODD = ["x" * 600, "~nobody/x", "a\0b", ["x"], {"a": 1}, True, 10**400, None]


@pytest.mark.parametrize("odd", ODD, ids=[str(value)[:9] for value in ODD])
def test_wrongly_typed_fields_and_impossible_paths_stop_no_registry(
    tmp_path: Path, odd: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps({"policy": {"init": odd, "adapter": odd}, "group_size": 4})
    facts = {
        "run_id": odd,
        "start_utc": odd,
        "git_commit": odd,
        "base": odd,
        "adapter": {"name": odd, "commit": odd},
    }
    facts |= {"parent": {"folder": "elsewhere", "run_id": odd}, "links": [odd, {"name": odd}, {"url": odd}]}
    made(tmp_path / "one", odd, config, summary={"rl/peak_memory_gib": odd})
    made(tmp_path / "two", "2026-01-01", config, provenance=facts, trackers=[{"id": odd}])
    estimate = {"mean": odd, "low": odd, "high": odd}
    scores = {"metrics": {"pass@1": estimate, "greedy": estimate}, "num_problems": odd, "label": odd}
    scores |= {
        "identity": {"task": odd, "split": odd},
        "hardware": {"devices": [{"memory_gib": {"max": odd}}, odd], "peak_memory_gib": odd},
    }
    made(tmp_path / "three", "2026-01-01", "x: 1\n", eval=scores)
    main(RunsConfig(folder=str(tmp_path), write=True))
    assert {run["folder"] for run in json.loads((tmp_path / "registry.json").read_text())["runs"]} == {
        "one",
        "two",
        "three",
    }
    assert "not recorded" in (tmp_path / "runs.html").read_text()
    assert "Traceback" not in capsys.readouterr().err


def test_a_run_shows_its_state_its_curve_and_its_pages(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs / "rl-one"
    rows = [
        {"stage": "rl", "step": step, "time_s": 1e9 + step, "rl/correct": 0.2 * step, "rl/kl": 1}
        for step in range(1, 5)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "report.html").write_text("x")
    found = {run["folder"]: run for run in read_runs(runs)}
    assert (found["rl-one"]["status"]["kind"], found["e1"]["status"]["kind"]) == ("finished", "finished")
    curve = found["rl-one"]["curve"]
    assert (curve["metric"], curve["first"], curve["last"]) == ("correct", "20.0%", "80.0%")
    assert curve["points"] == "0.0,19.0 40.0,13.0 80.0,7.0 120.0,1.0"
    assert found["e1"]["curve"] is None
    main(RunsConfig(folder=str(runs), write=True))
    page = (runs / "runs.html").read_text()
    assert '<a href="rl-one/report.html">report.html</a>' in page
    assert page.count("<polyline") == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if "rl-one" in line)
    assert "finished" in line
