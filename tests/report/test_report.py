import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from whet import __version__
from whet.report import markdown, plots
from whet.report.markdown import write_report
from whet.telemetry.log import RunLog
from whet.telemetry.metrics import METRICS
from whet.telemetry.provenance import write_environment
from whet.types import Group, Problem, Sample

PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = "````\n# not a heading\n</details> | `x` \x1b[31m\ud800"


def make_group(texts, uid="ab12"):
    samples = tuple(
        Sample(
            uid=uid,
            index=index,
            prompt_ids=(1,),
            completion_ids=(1, 2),
            sampler_logprobs=(0.0, 0.0),
            text=text,
            finish_reason="stop",
            rewards={"correct": reward},
            reward=reward,
            advantage=0.0,
        )
        for index, (text, reward) in enumerate(texts)
    )
    return Group(problem=Problem(uid=uid, task="t", prompt="2+2=", answer="4"), samples=samples)


def pngs(run_dir):
    paths = sorted((run_dir / "plots").glob("*.png"))
    assert all(path.read_bytes().startswith(PNG) for path in paths)
    return [path.stem for path in paths]


def test_sft_run(tmp_path):
    with RunLog(tmp_path) as log:
        for step in range(1, 41):
            log.write_metrics("sft", step, {"sft/loss": 2 / step, "sft/lr": 1e-5, "sft/tokens": 100 * step})
    (tmp_path / "config.yaml").write_text("lr: 1.0e-5\n")
    text = write_report(tmp_path).read_text()
    assert pngs(tmp_path) == ["sft"]
    assert "![sft](plots/sft.png)" in text
    assert "| sft/loss | 1.042 | 0.052 | 0.050 | 2.000 | nats/token |" in text  # mean of 2, 1, .667, .5
    assert "```yaml\nlr: 1.0e-5\n```" in text
    assert "Warnings" not in text
    assert "No warning." in text


def test_rl_run_with_samples_and_warnings(tmp_path):
    with RunLog(tmp_path) as log:
        log.write_metrics("eval", 0, {"eval/pass@1": 0.1, "eval/pass@8": 0.3, "eval/algebra": 0.2})
        for step in range(1, 41):
            grad_norm = math.nan if step == 7 else 0.5
            log.write_metrics(
                "rl", step, {"rl/reward_mean": 0.1, "rl/reward/correct": 0.2, "rl/grad_norm": grad_norm}
            )
            log.write_samples(step, [make_group([("middle", 0.5), (f"best {step}", 1.0), (HOSTILE, 0.0)])])
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert pngs(tmp_path) == ["evaluation", "rl_health", "rl_learning"]
    assert "- step 7: rl/grad_norm is not finite" in text
    completions = text.split("## Completions")[1]
    assert completions.count("### Step 1:") == completions.count("### Step 40:") == 2
    assert "best 1\n" in completions
    assert "best 40\n" in completions
    assert "best 20" not in completions
    assert "middle" not in completions
    assert "Step 1: reward 1" in completions
    assert "Step 1: reward 0" in completions
    assert "`````text\n````\n# not a heading\n</details>" in completions  # a fence that the text cannot close
    assert "\x1b" not in text
    assert "\\x1b[31m\\ud800" in text


def test_evaluation_folder(tmp_path):
    estimate = {"mean": 0.812, "low": 0.77, "high": 0.85}
    results = {
        "metrics": {"pass@1": estimate, "best@8": {"mean": 0.5, "low": 0.25, "high": 0.75}},
        "pass@1 by": {"subject": {"alge|bra": estimate}},
        "thinking_tokens": {"mean": 12.3456, "low": 1, "high": 2345},
        "num_problems": 1319,
        "per_problem": [{"uid": "a"}] * 3,
    }
    (tmp_path / "eval.json").write_text(json.dumps(results))
    (tmp_path / "summary.json").write_text("{broken")
    text = write_report(tmp_path).read_text()
    assert "Finished. Pass@1 81.2%." in text
    assert "| pass@1 | 81.2% | 77.0% to 85.0% |  |" in text  # the headline, and among all
    assert "| metrics | pass@1 | 81.2% | 77.0% | 85.0% |" in text
    assert "| metrics | best@8 | 50.0% | 25.0% | 75.0% |" in text
    assert "| pass@1 by · subject | alge\\|bra | 81.2% | 77.0% | 85.0% |" in text
    assert "|  | thinking_tokens | 12 | 1 | 2345 |" in text
    assert '"num_problems": 1319' in text
    assert "summary.json cannot be read" in text
    assert not (tmp_path / "plots").exists()


def test_empty_folder_and_missing_folder(tmp_path):
    assert "there is no metrics.jsonl, so no curves" in write_report(tmp_path).read_text()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "samples.jsonl").touch()
    assert "no completions were saved" in write_report(tmp_path).read_text()
    with pytest.raises(ValueError, match="no run folder"):
        write_report(tmp_path / "typo")


def test_metrics_that_are_all_non_finite_or_unknown(tmp_path):
    with RunLog(tmp_path) as log:
        log.write_metrics("rl", 1, {"rl/kl": math.nan})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "step": 1, "old/name": 1.0}\n')
    text = write_report(tmp_path).read_text()
    assert "| rl/kl | – | – | – | – |" in text
    assert "old/name" not in text
    assert not (tmp_path / "plots").exists()


def test_report_is_repeatable_and_later_rows_count(tmp_path):
    with RunLog(tmp_path) as log:
        for step, loss in [(1, 3.0), (2, 2.0), (2, 1.0)]:
            log.write_metrics("sft", step, {"sft/loss": loss})
    first = write_report(tmp_path).read_text()
    assert "| sft/loss | 3.000 | 1.000 | 1.000 | 3.000 |" in first
    assert write_report(tmp_path).read_text() == first


def test_last_samples_are_found_in_a_long_file(tmp_path):
    with RunLog(tmp_path) as log:
        for step in range(1, 101):
            log.write_samples(step, [make_group([(f"text {step}", 1.0)])])
    completions = write_report(tmp_path).read_text().split("## Completions")[1]
    assert "text 1\n" in completions
    assert "text 100\n" in completions


def test_every_metric_has_its_panel():
    named = [name for panels in plots.FIGURES.values() for panel in panels for name in panel.names]
    assert len(named) == len(set(named))
    assert set(METRICS) == {name for name in named if name[-1] not in "/@"}
    for panels in plots.FIGURES.values():
        for panel in panels:
            assert len({METRICS[name].unit for name in panel.names if name in METRICS}) <= 1


def test_rolling_mean_is_the_mean_of_the_window():
    values = np.array([1.0, 5.0, 3.0, 7.0])
    np.testing.assert_allclose(plots._rolling_mean(values, 1), [3.0, 3.0, 5.0, 5.0], rtol=1e-12)
    np.testing.assert_allclose(plots._rolling_mean(values, 0), values, rtol=1e-12)


def test_hostile_reward_names_are_drawn_and_escaped(tmp_path):
    names = ["rl/reward/$x_", "rl/reward/漢|<b>", "rl/reward/_a", *(f"rl/reward/r{i}" for i in range(6))]
    with RunLog(tmp_path) as log:
        log.write_metrics("rl", 1, dict.fromkeys(names, 0.5))
    assert "rl/reward/漢\\|\\<b\\>" in write_report(tmp_path).read_text(encoding="utf-8")
    assert pngs(tmp_path) == ["rl_learning"]


def test_environment_says_what_a_number_depends_on(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("HF_TOKEN", "secret")
    written = write_environment(tmp_path / "run")
    path = tmp_path / "run" / "environment.json"
    environment = json.loads(path.read_text())
    assert environment == written
    assert environment["kernels"]
    assert environment["whet"] == __version__
    assert environment["argv"] == sys.argv
    assert environment["environment"] == {
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": None,
        "TORCHELASTIC_RUN_ID": None,
    }
    assert "secret" not in path.read_text()
    for key in ("python", "torch", "numpy", "platform", "num_cpus", "num_torch_threads", "start_utc"):
        assert environment[key]
    assert environment["start_utc"].endswith("+00:00")
    assert "environment.json" in write_report(tmp_path / "run").read_text()


def test_wrongly_typed_values_stop_no_report(tmp_path):
    row = {"stage": "rl", "step": 1, "time_s": 1e9, "rl/kl": 0.5}
    odd = ["drei", [1], {"a": 1}, True, 10**400, 1e300, "", -(10**400)]
    rows = [row | {"rl/grad_norm": value, "rl/correct": value, "rl/unscorable": value} for value in odd]
    rows += [row | {"step": value} for value in odd] + [
        row | {"stage": value, "time_s": value} for value in odd
    ]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, row | {"step": 9, "rl/kl": 2.0}])
    (tmp_path / "metrics.jsonl").write_text(text + '{"stage":"rl","step":3,"rl/kl":NaN}\n[1]\n')
    sample = {"step": 1, "uid": "a", "index": 0, "completion": "first", "rewards": {"a": 1.0}, "reward": 1.0}
    samples = [dict.fromkeys(sample, value) for value in odd] + [sample]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    (tmp_path / "summary.json").write_text(
        '{"a": 1' + "0" * 400 + ', "b": ' + '{"c":' * 400 + "1" + "}" * 401
    )
    text = write_report(tmp_path).read_text()
    assert re.search(r"\d+ damaged lines of metrics.jsonl skipped", text)
    assert "Finished after 9 steps." in text
    assert "| rl/kl | 0.5000 | 2.0000 |" in text
    assert "first" in text
    assert text.count("is not finite") == 1  # of the numbers too large to be any; words are no measurement


def test_a_link_is_neither_followed_out_of_the_folder_nor_written_through(tmp_path):
    run, secret = tmp_path / "run", tmp_path / "secret"
    run.mkdir()
    secret.write_text("key: hunter2\n")
    (run / "config.yaml").symlink_to(secret)
    (run / "report.md").symlink_to(secret)
    text = write_report(run).read_text()
    assert "hunter2" not in text
    assert secret.read_text() == "key: hunter2\n"
    assert not (run / "report.md").is_symlink()


@pytest.mark.parametrize("place", ["own", "whet's", "temporary", "the run's"])
def test_matplotlib_gets_a_cache_that_can_be_written(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    closed, folder = tmp_path / "file" / "x", tmp_path / "run"
    monkeypatch.delenv("MPLCONFIGDIR", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config" if place == "own" else closed))
    monkeypatch.setenv(
        "XDG_CACHE_HOME", str(closed if place in ("temporary", "the run's") else tmp_path / "cache")
    )
    monkeypatch.setattr(tempfile, "tempdir", str(closed if place == "the run's" else tmp_path))
    plots.matplotlib_for(folder)
    chosen = os.environ.get("MPLCONFIGDIR", "")
    monkeypatch.delenv("MPLCONFIGDIR", raising=False)
    expected = {
        "own": "",
        "whet's": str(tmp_path / "cache/whet/matplotlib"),
        "temporary": str(tmp_path / f"whet-{os.getuid()}/matplotlib"),
        "the run's": str(folder / ".matplotlib-"),
    }[place]
    assert chosen.startswith(expected)
    assert bool(chosen) == bool(expected)
    assert not chosen or Path(chosen).is_dir()


def test_a_report_without_curves_where_they_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Matplotlib requires access to a writable cache directory\nand more")

    monkeypatch.setattr("whet.report.markdown.draw_figures", refuse)
    assert markdown._curve_section({}, tmp_path) == ""
    reason = "Matplotlib requires access to a writable cache directory"
    assert capsys.readouterr().err == f"whet: warning: {tmp_path}: no curves were drawn ({reason})\n"
