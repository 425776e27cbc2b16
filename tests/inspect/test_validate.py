"""`whet validate` on a tiny model: thresholds that are met and missed, stages that fail, Ctrl-C, and bad inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hub
import pytest

from whet import cli
from whet.eval import evaluate
from whet.eval.evaluate import EvalConfig
from whet.eval.probe import probe
from whet.eval.probe.probe import ProbeConfig
from whet.generate.policy import PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.inspect.validate.reported import REPORTED
from whet.inspect.validate.validate import BEFORE, ValidateConfig, main, plan, verdict
from whet.inspect.validate.verdict import (
    CHECKS,
    MEASURES,
    STAGES,
    Item,
    ThresholdConfig,
    declared,
    judge_stage,
)
from whet.recipes.validation import RECIPES
from whet.report import markdown as report
from whet.tasks.made.arithmetic import Arithmetic
from whet.train import rl, sft
from whet.train.optim.step import OptimConfig
from whet.train.rl_config import RLConfig
from whet.train.session import Stopped
from whet.train.sft import SFTConfig

PROGRAMS = {"sft": sft, "rl": rl, "eval": evaluate, "probe": probe}


FEW = {split: Arithmetic().problems(split)[:200] for split in ("train", "dev", "test")}


@pytest.fixture(autouse=True)
def few_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred problems a split, made once, and reports without curves: what takes most of a tiny run's time."""
    monkeypatch.setattr(Arithmetic, "problems", lambda self, split: FEW[split])
    monkeypatch.setattr(report, "draw_figures", lambda series, folder: [])


@pytest.fixture
def config(tiny_policy: PolicyConfig, tmp_path: Path) -> ValidateConfig:
    later = replace(tiny_policy, init=BEFORE, model=type(tiny_policy.model)(), tokenizer="", alphabet="")
    later = replace(later, schema="inherit", template="auto", tags_as_tokens=False)
    optim = OptimConfig(lr=1e-3, warmup_steps=1)
    sampling = SamplingParams(max_new_tokens=8)
    fine_tuning = SFTConfig(out="", policy=tiny_policy, optim=optim, num_steps=2, batch_size=4)
    return ValidateConfig(
        out=str(tmp_path / "out"),
        sft=replace(fine_tuning, validation_problems=0),
        rl=RLConfig(
            out="", policy=later, optim=optim, sampling=sampling, num_steps=2, num_prompts=2, group_size=2
        ),
        eval=EvalConfig(out="", policy=later, num_problems=6, num_samples=2, sampling=sampling),
        probe=ProbeConfig(transcript="1+1=", sampling=replace(sampling, temperature=0.7)),
        thresholds=ThresholdConfig(
            ratio_drift=1e-3, pass_at_1=0.0, format=0.0, gain=0.0, seconds={"sft": 500}
        ),
    )


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the programs by ones that leave the files of a run at once."""

    def write(path: Path, content: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content) + "\n")

    def train(config: SFTConfig | RLConfig) -> None:
        write(Path(config.out) / "metrics.jsonl", {"stage": "rl", "step": 1, "rl/ratio_drift": 0.0})

    def measure(config: EvalConfig) -> None:
        is_after = config.policy.init.endswith("rl")
        made_up(Path(config.out), [[is_after, True, False]] * 4 + [[False, is_after, is_after]] * 6)

    def ask(config: ProbeConfig) -> None:
        if config.transcript:
            line = ["[  0] id=    1  '1'", "dim"]
            write(Path(config.out) / "transcript.json", [{"model": "rl", "lines": [line]}])
            return
        none = {kind: {"right": None, "numeric": None} for kind in ("knowledge", "all")}
        remark = "all prompts are skipped"
        models = [{"model": m, "kinds": none, "perplexity": None, "remark": remark} for m in config.models]
        write(Path(config.out) / "probe.json", {"models": models})

    for program, stub in ((sft, train), (rl, train), (evaluate, measure), (probe, ask)):
        monkeypatch.setattr(program, "main", stub)


def made_up(folder: Path, table: list[list[bool]]) -> None:
    """Write an evaluation: of each problem the greedy verdict, then the samples'."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "uid": str(uid),
            "gold": "1",
            "text": "",
            "sample": index - 1 if index else "greedy",
            "correct": is_right,
        }
        for uid, row in enumerate(table)
        for index, is_right in enumerate(row)
    ]
    (folder / "eval_samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mean = sum(sum(row[1:]) / len(row[1:]) for row in table) / len(table)
    metrics = dict.fromkeys(("pass@1", "format"), {"mean": mean, "low": 0.0, "high": 1.0})
    content = {"label": "x", "metrics": metrics, "identity": {}, "num_problems": len(table)}
    (folder / "eval.json").write_text(json.dumps(content | {"num_samples": len(table[0]) - 1}))


def run(config: ValidateConfig) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the exit status, validation.json and its items by name."""
    status = cli.guard(lambda: main(config))
    path = Path(config.out) / "validation.json"
    content = json.loads(path.read_text()) if path.exists() else {"items": []}
    return status, content, {item["name"]: item for item in content["items"]}


def statuses(content: dict[str, Any]) -> dict[str, str]:
    return {
        item["stage"]: item["status"] for item in content["items"] if item["name"] == STAGES[item["stage"]]
    }


def breaking(monkeypatch: pytest.MonkeyPatch, program: str, error: BaseException, at: int = 0) -> None:
    """Let the n-th call of a program's main raise."""
    original: Callable[..., None] = PROGRAMS[program].main
    calls: list[object] = []

    def broken(config: Any) -> None:
        calls.append(config)
        if len(calls) == at + 1:
            raise error
        original(config)

    monkeypatch.setattr(PROGRAMS[program], "main", broken)


@pytest.mark.ci
def test_a_real_run(config: ValidateConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """Random rewards, so that every step has an update; a random model answers nothing right."""
    own = ThresholdConfig(
        pass_at_1=1.0, format=0.0, ratio_drift=1e-3, gain=0.0, seconds={"sft": 500, "rl": 1e-9}
    )
    config = replace(config, rl=replace(config.rl, control="random_reward", preflight="warn"), thresholds=own)
    status, content, items = run(config)
    assert status == 1
    assert content["verdict"] == "missed"
    assert statuses(content) == dict.fromkeys(STAGES, "passed") | {"rl": "missed"}
    assert all(items[title]["seconds"] > 0 for title in STAGES.values())
    assert items["ratio drift"]["measured"] == "0.0e+00"
    assert items["ratio drift"]["status"] == "passed"
    assert items["pass@1"]["status"] == "missed"  # a missed threshold stops nothing
    folder = Path(config.out)
    assert (folder / "rl/checkpoints").is_dir()
    page = (folder / "validation.html").read_text()
    assert "Content-Security-Policy" in page
    assert all(title in page for title in STAGES.values())
    assert "[  0] id=" in page  # the transcript
    assert "the tokenizer cannot spell them" in page  # a model of digits: said, not hidden
    before = capsys.readouterr().out.partition("1/6")[0]
    assert "<= 500" in before  # the thresholds stand there before anything ran
    assert "ratio drift" in before


@pytest.mark.usefixtures("stubs")
def test_everything_passes(config: ValidateConfig) -> None:
    status, content, items = run(config)
    assert status == 0
    assert content["verdict"] == "passed"
    assert {item["status"] for item in content["items"]} == {"passed"}
    assert len(items) == len(STAGES) + 4
    assert "| **reinforcement** | passed |" in (Path(config.out) / "validation.md").read_text()
    assert run(config)[0] == 2  # the folder is never overwritten


@pytest.mark.usefixtures("stubs")
def test_missed_thresholds_are_status_1(config: ValidateConfig) -> None:
    hard = replace(config.thresholds, pass_at_1=1.0, seconds={"sft": 1e-9})
    status, content, items = run(replace(config, thresholds=hard))
    assert status == 1
    assert content["verdict"] == "missed"
    assert items["pass@1"]["status"] == "missed"
    assert items["pass@1"]["threshold"] == ">= 100.0%"
    assert items["pass@1"]["measured"] == "80.0% (0.0% to 100.0%)"
    assert items["perfect format"]["status"] == "passed"
    assert statuses(content) == dict.fromkeys(STAGES, "passed") | {"sft": "missed"}
    page = (Path(config.out) / "validation.html").read_text()
    assert "&gt;= 100.0%" in page
    assert '<span class="badge bad">missed</span>' in page


@pytest.mark.usefixtures("stubs")
def test_what_cannot_be_measured_has_failed(config: ValidateConfig) -> None:
    impossible = ThresholdConfig(perplexity_ratio=2.0, numeric=0.5, kl=0.1)
    status, content, items = run(replace(config, thresholds=impossible))
    assert status == 1
    assert items["perplexity ratio"]["status"] == items["numbers not asked for"]["status"] == "failed"
    assert "not measured: all prompts are skipped" in items["perplexity ratio"]["reason"]
    assert items["KL, nats per token"]["reason"] == "not measured: no step logged it"
    assert statuses(content) == dict.fromkeys(STAGES, "passed")


@pytest.mark.usefixtures("stubs")
@pytest.mark.parametrize(
    ("program", "at", "error", "expected"),
    [
        ("sft", 0, RuntimeError("boom <b>\x1b[2J"), {"sft": "failed", "rl": "skipped", "eval_sft": "skipped",
         "eval_rl": "skipped", "probe": "skipped", "transcript": "skipped"}),
        ("rl", 0, ValueError("no reward"), {"rl": "failed", "eval_rl": "skipped", "probe": "skipped",
         "transcript": "skipped"}),
        ("eval", 0, SystemExit(3), {"eval_sft": "failed"}),
        ("probe", 1, MemoryError(), {"transcript": "failed"}),
    ],
    ids=["sft", "rl", "eval", "transcript"],
)  # fmt: skip
def test_a_failing_stage(
    config: ValidateConfig, monkeypatch: pytest.MonkeyPatch, program: str, at: int, error: BaseException,
    expected: dict[str, str],
) -> None:  # fmt: skip
    breaking(monkeypatch, program, error, at)
    status, content, items = run(config)
    assert status == 1
    assert content["verdict"] == "failed"
    assert statuses(content) == dict.fromkeys(STAGES, "passed") | expected
    stage = next(iter(expected))
    reason = items[STAGES[stage]]["reason"]
    assert {"sft": r"RuntimeError: boom <b>\x1b[2J", "rl": "no reward"}.get(
        program, type(error).__name__
    ) in reason
    assert "Traceback" in (Path(config.out) / f"{stage}.error.txt").read_text()
    page = (Path(config.out) / "validation.html").read_text()
    assert "<b>" not in page
    assert "\x1b" not in page
    if program == "eval":  # what needs both evaluations says so
        assert "there is no evaluation before" in items["gain in pass@1, points"]["reason"]
    if program == "sft":
        assert items["reinforcement"]["reason"] == "needs the model of fine-tuning"


@pytest.mark.usefixtures("stubs")
def test_ctrl_c_leaves_what_was_done(config: ValidateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    breaking(monkeypatch, "rl", KeyboardInterrupt())
    status, content, items = run(config)
    assert status == 130
    expected = dict.fromkeys(STAGES, "skipped") | {"sft": "passed", "rl": "failed"}
    assert statuses(content) == expected
    assert items["reinforcement"]["reason"] == items["off-domain probe"]["reason"] == "interrupted"
    assert (Path(config.out) / "sft/metrics.jsonl").is_file()
    assert "interrupted" in (Path(config.out) / "validation.html").read_text()


def test_the_gain_is_paired_by_problem(tmp_path: Path) -> None:
    made_up(tmp_path / "eval_sft", [[False, False, True]] * 10)
    made_up(tmp_path / "eval_rl", [[True, True, True]] * 9 + [[False, False, False]])
    found = MEASURES["eval_rl"](tmp_path)
    assert found["pass_at_1"][0] == 0.9
    gain, _ = found["gain"]
    assert gain == pytest.approx(0.4)
    p, note = found["gain_p"]
    assert p is not None
    assert p < 0.05
    # Nine problems won greedily and none lost: 2 / 2^9 by the binomial tail.
    assert f"greedy: 9 problems won, 0 lost, exact McNemar p {2 / 2**9:.2g}" in note


def test_a_loss_is_no_gain_however_significant(tmp_path: Path) -> None:
    made_up(tmp_path / "eval_sft", [[True, True]] * 20)
    made_up(tmp_path / "eval_rl", [[False, False]] * 20)
    items = judge_stage("eval_rl", tmp_path, ThresholdConfig(gain=0.0, gain_p=0.05))
    assert [item.status for item in items] == ["missed", "missed"]
    assert "there is no gain" in items[1].measured
    made_up(tmp_path / "eval_rl", [[False, False]] * 19)
    items = judge_stage("eval_rl", tmp_path, ThresholdConfig(gain=0.0))
    assert items[0].status == "failed"
    assert "different problems" in items[0].reason


def test_drift_is_that_of_the_worst_step_and_nan_never_holds(tmp_path: Path) -> None:
    limits = ThresholdConfig(ratio_drift=0.5, kl=0.5)
    for values, expected in (([0.1, 0.4, 0.2], "passed"), ([0.1, 0.6, 0.2], "missed"), ([None], "missed")):
        rows = [{"stage": "rl", "step": n, "rl/ratio_drift": v, "rl/kl": v} for n, v in enumerate(values, 1)]
        (tmp_path / "rl").mkdir(exist_ok=True)
        (tmp_path / "rl/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        items = judge_stage("rl", tmp_path, limits)
        assert [item.status for item in items] == [expected, expected]
    assert all(not check.holds(math.nan, 0.5) for check in CHECKS.values())


def test_probe_measures(tmp_path: Path) -> None:
    share = {"mean": 0.25, "low": 0.1, "high": 0.4}
    first = {"remark": "", "kinds": {"all": {"numeric": share}}}
    change = {"mean": -0.3, "low": -0.5, "high": -0.1}
    last = first | {"against_first": {"right": change, "perplexity_ratio": 3.0}}
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe/probe.json").write_text(json.dumps({"models": [first, first, last]}))
    limits = ThresholdConfig(perplexity_ratio=2.0, off_domain_loss=0.4, numeric=0.25)
    ratio, loss, numeric = judge_stage("probe", tmp_path, limits)
    assert (ratio.status, loss.status, numeric.status) == ("missed", "passed", "passed")
    assert loss.measured == "30.0% (10.0% to 50.0%)"
    (tmp_path / "probe/probe.json").write_text(json.dumps({"models": [first]}))
    assert (
        judge_stage("probe", tmp_path, limits)[0].reason == "not measured: there is nothing to compare with"
    )


def test_verdict_is_the_worst() -> None:
    items = [Item("sft", "a", status) for status in ("passed", "skipped", "missed", "failed")]
    assert [verdict(items[: count + 1]) for count in range(4)] == ["passed", "skipped", "missed", "failed"]
    assert verdict([]) == "passed"


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str) -> None:
    config = RECIPES[name]()
    assert RECIPES[name].__doc__
    assert cli.from_dict(ValidateConfig, cli.to_dict(config), where=name) == config
    assert declared(config.thresholds)
    assert "ratio drift" in plan(config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "needs a RECIPE"),
        ("demmo", "did you mean 'demo'?"),
        (
            "demo --thresholds.pass-at-1 90",
            "thresholds.pass_at_1 = 90.0: expected 0 to 1 (a share, not percent)",
        ),
        ("demo --thresholds.kl=-1", "thresholds.kl = -1.0: expected 0 or more"),
        ("demo --thresholds.ratio-drift nan", "thresholds.ratio_drift = nan"),
        (
            "demo --thresholds.seconds.sfft 10",
            "thresholds.seconds.sfft: no such stage; expected one of sft, rl",
        ),
        ("demo --thresholds.seconds.sft 0", "thresholds.seconds.sft = 0.0: expected above 0"),
        ("demo --sft.out runs/x", "sft.out = 'runs/x': every stage gets a folder in --out"),
        ("demo --rl.policy.init runs/x", "the starting model is sft.policy.init"),
        ("demo --eval.tasks arithmetic products", "eval.tasks: one task is evaluated before and after"),
        ("demo --probe.models runs/x", "probe.models: the stages' models are probed"),
        ("demo --probe.transcript=", "probe.transcript is empty"),
        ("demo --probe.text nowhere.txt", "text nowhere.txt: cannot be read"),
        ("stories260k-gsm8k --sft.policy.init runs/nowhere", "'runs/nowhere': no such run or folder"),
        ("stories260k-gsm8k --sft.task.path ./nowhere", "nowhere"),
        ("quick --rl.num-steps 0", "num_steps = 0: expected 1 or more"),
    ],
)
def test_bad_input_is_one_line_and_makes_nothing(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for program in PROGRAMS.values():
        monkeypatch.setattr(program, "main", lambda config: pytest.fail("a stage was started"))
    hub.install(monkeypatch)
    argv = [*words.split(), "--out", str(tmp_path / "out")] if words else []

    def program() -> None:
        main(cli.parse("whet validate", ValidateConfig, RECIPES, argv, resumable=False).config)

    assert cli.guard(program) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()


def test_a_signal_ends_the_validation(
    config: ValidateConfig, stubs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends a training run with its exit status once it is saved: that is no failed stage, and no next one."""
    breaking(monkeypatch, "rl", Stopped(143))
    status, content, _ = run(config)
    assert status == 143
    reasons = {item["stage"]: item["reason"] for item in content["items"] if item["reason"]}
    assert reasons == dict.fromkeys(list(STAGES)[1:], "interrupted")


def test_a_sources_numbers_stand_beside_ours(
    config: ValidateConfig, stubs: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: SFTConfig | RLConfig) -> None:
        folder = Path(config.out)
        folder.mkdir(parents=True)
        rows: list[dict[str, Any]] = [
            {"step": 200, "sft/loss": 2.5, "sft/validation_loss": 2.25},
            {"step": 400, "sft/loss": 2.0, "sft/validation_loss": 1.5},
            {"step": 600, "sft/loss": 1.9, "sft/validation_loss": 1.75},
        ]
        if folder.name == "rl":
            rows = [{"step": 51, "rl/reward_mean": 0.625, "rl/ratio_drift": 0.0}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    for program in (sft, rl):
        monkeypatch.setattr(program, "main", train)
    limits = ThresholdConfig(validation_loss=1.4)
    status, content, items = run(replace(config, thresholds=limits, reported="gpt2-gsm8k"))
    assert status == 1
    assert items["held-out loss at its best"]["measured"] == "1.5000 (step 400)"
    found = {(row["title"], row["step"]): (row["said"], row["measured"]) for row in content["reported"]}
    assert found["training loss", 200] == (2.1233, 2.5)
    assert found["held-out loss", 400] == (1.6516, 1.5)
    assert found["mean reward", 50] == (0.587, 0.625)  # the source counts its iterations from 0
    assert found["held-out loss", 1600] == (1.2973, None)
    folder = Path(config.out)
    assert "| held-out loss | 400 | 1.6516 | 1.5000 |" in (folder / "validation.md").read_text()
    assert "1.6516" in (folder / "validation.html").read_text()
    assert "0.5870" in capsys.readouterr().out


def test_the_sources_tables_agree_with_what_its_text_says() -> None:
    """It says: the training loss drops by 68.1 %, the best held-out loss is 1.2973 at iteration 1600."""
    train, held_out, rewards = (series.values for series in REPORTED["gpt2-gsm8k"])
    assert round(1 - train[2000] / train[0], 3) == 0.681
    assert min(held_out, key=held_out.__getitem__) == 1600
    assert held_out[1600] == 1.2973
    assert len(train) == len(held_out) == len(rewards) == 11
    recipe = RECIPES["gpt2-gsm8k"]()
    assert recipe.sft.num_steps == max(train)
    assert recipe.rl.num_steps == max(rewards) + 1
    assert (recipe.sft.batch_size, recipe.rl.num_prompts * recipe.rl.group_size) == (32, 32)
    assert max(train) % recipe.sft.validate_every == 0


def test_an_empty_split_is_found_before_anything_runs(
    config: ValidateConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Arithmetic, "problems", lambda self, split: [1] if split == "test" else [])
    assert run(config)[0] == 2
    assert "task arithmetic has no problems in its split 'train'" in capsys.readouterr().err
    assert not Path(config.out).exists()
