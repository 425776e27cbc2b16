"""Recorded steps done again: bitwise equal as they were, and every change is found at its stage."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import POLICY, rl_config
from safetensors.torch import load_file, save_file

from whet.algo.config import AlgoConfig
from whet.config import dump_yaml, load_yaml
from whet.generate.policy import PolicyConfig, load_policy
from whet.inspect.replay import step as replay_step
from whet.inspect.replay.replay import ReplayConfig, Replayed, conclusion, main, replay
from whet.inspect.replay.step import Stage, compare
from whet.recipes.rl import ALGORITHMS
from whet.rewards.judge.judge import JudgeConfig
from whet.storage.commit import commit_folder
from whet.tasks.base import TaskConfig, load_task
from whet.tasks.made.arithmetic import Arithmetic
from whet.train import dpo, rft, rl, sft
from whet.train.optim.safety import TokenBudget
from whet.train.optim.step import OptimConfig, Optimizer
from whet.train.record import Recorder, fit_batch, read_record
from whet.train.rl_config import RLConfig
from whet.types import UserError

OPTIM = OptimConfig(lr=3e-3, warmup_steps=2, token_budget=100)
COEF = 0.5
RULED = """
from whet.tasks.made.arithmetic import Arithmetic
class Ruled(Arithmetic):
    def allowed(self, problem):
        return [(0, [problem.answer, "7", "12"])]
"""
PAIRS = [{"prompt": f"{n}+{n}=", "chosen": f"<think></think>{2 * n}", "rejected": f"{n}"} for n in range(8)]


def make_runs(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Do a tiny run of every program, recorded."""
    few = Arithmetic().problems("train")[:40]
    patch.setattr(Arithmetic, "problems", lambda self, split: few)
    patch.setattr(rft, "is_right", lambda graded: True)
    torch.set_num_threads(1)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    out = {name: folder / name for name in ("start", "grpo", "ppo", "sft", "dpo", "rft")}
    out["start"].mkdir()
    load_policy(POLICY, seed=0).save(out["start"])
    grpo = replace(ALGORITHMS["grpo"](), kl="k3_loss", kl_coef=0.1, num_minibatches=2, num_epochs=2)
    rl.train(
        rl_config(PolicyConfig(init=str(out["start"]), max_rows=64), out["grpo"], algo=grpo, num_steps=3)
    )
    rl.train(rl_config(POLICY, out["ppo"], algo=ALGORITHMS["ppo"](), num_steps=3))
    common: dict[str, Any] = {"policy": POLICY, "optim": OPTIM, "batch_size": 6, "save_every": 2}
    (folder / "ruled.py").write_text(RULED)
    ruled = {"task": TaskConfig(name=f"{folder / 'ruled.py'}:Ruled"), "allowed_coef": COEF}
    sft.train(sft.SFTConfig(out=str(out["sft"]), **common, **ruled, num_steps=3, validation_problems=0))
    pairs = str(folder / "pairs.jsonl")
    dpo.train(dpo.DPOConfig(out=str(out["dpo"]), **common, pairs=pairs, num_steps=3, validation_share=0.0))
    round_of: dict[str, Any] = {"num_problems": 6, "num_samples": 2, "steps_per_round": 3}
    sampling = rl_config(POLICY, folder).sampling
    rft.train(rft.RFTConfig(out=str(out["rft"]), **common, **round_of, sampling=sampling))
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Folders of a run of every program."""
    with pytest.MonkeyPatch.context() as patch:
        yield make_runs(tmp_path_factory.mktemp("runs"), patch)


@pytest.fixture
def run(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the GRPO run, to be changed; the others stay as they are."""
    return Path(shutil.copytree(runs["grpo"], tmp_path / "run"))


def again(run: Path, step: int = 3, **options: Any) -> Replayed:
    return replay(ReplayConfig(run=str(run), step=step, **options))


def verdicts(replayed: Replayed) -> dict[str, str]:
    return {stage.name: stage.verdict for stage in replayed.stages}


def first(replayed: Replayed) -> str:
    return next(stage.name for stage in replayed.stages if stage.verdict not in ("exact", "skipped"))


def rewrite(folder: Path, change: Callable[[Path], None]) -> None:
    """Change a committed folder so that its manifest agrees."""
    with commit_folder(folder) as temporary:
        shutil.copytree(folder, temporary, dirs_exist_ok=True)
        (temporary / "manifest.json").unlink()
        change(temporary)


def change_record(run: Path, change: Callable[[dict[str, Any]], None], step: int = 3) -> None:
    def edit(folder: Path) -> None:
        data = json.loads((folder / "batch.json").read_text())
        change(data)
        (folder / "batch.json").write_text(json.dumps(data))

    rewrite(run / "replay" / f"step_{step:08d}", edit)


def a_sample(data: dict[str, Any]) -> dict[str, Any]:
    collected = data["batches"][0]["collected"]
    return collected["rollout"]["groups"][collected["used"][0]]["samples"][0]


@pytest.mark.some(1)
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("name", ["grpo", "ppo", "sft", "dpo", "rft"])
def test_every_stage_is_bitwise_equal(name: str, step: int, runs: dict[str, Path]) -> None:
    before = {path: path.stat().st_mtime_ns for path in runs[name].rglob("*")}
    replayed = again(runs[name], step)
    found = verdicts(replayed)
    assert {v for k, v in found.items() if not (k == "prompts" and name in ("dpo", "rft"))} == {"exact"}
    assert conclusion(replayed.stages) == "all stages bitwise equal"
    names = list(found)
    if name in ("grpo", "ppo"):
        assert names[:4] == ["prompts and texts", "rewards", "advantages", "log-probs"]
    assert names[-5:] == ["log-probs", "loss", "gradient norm", "metrics", "weights after"]
    assert replayed.recorded.metrics[f"{replayed.recorded.kind}/grad_norm"] > 0
    assert {path: path.stat().st_mtime_ns for path in runs[name].rglob("*")} == before


def test_the_newest_step_is_taken_unless_one_is_named(runs: dict[str, Path]) -> None:
    assert again(runs["sft"], 0).recorded.step == 3


def test_a_changed_reward_is_found(run: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        a_sample(data)["reward"] += 0.25

    change_record(run, change)
    replayed = again(run)
    assert verdicts(replayed)["prompts and texts"] == "exact"
    stage = replayed.stages[1]
    assert (stage.name, stage.verdict, stage.difference) == ("rewards", "DIFFERS", 0.25)
    assert conclusion(replayed.stages) == "first difference at stage 2 (rewards): 0.25"
    # Later stages begin with what was recorded: the recorded advantages, which are those of the true reward.
    assert verdicts(replayed)["advantages"] == "DIFFERS"
    assert verdicts(replayed)["loss"] == "exact"


def test_a_changed_grade_is_found(run: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        grades = data["batches"][0]["collected"]["rollout"]["grades"][0][0]
        grades["is_correct"] = not grades["is_correct"]

    change_record(run, change)
    replayed = again(run)
    assert first(replayed) == "rewards"
    assert replayed.stages[1].note == "1 of 16 grades differ"


@pytest.mark.parametrize("field", ["prompt_ids", "text"])
def test_a_changed_prompt_or_text_is_found(field: str, run: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        sample = a_sample(data)
        sample[field] = sample[field][:-1]

    change_record(run, change)
    replayed = again(run)
    assert first(replayed) == "prompts and texts"
    assert replayed.stages[0].here == "15 equal, 1 others"


def test_a_changed_advantage_is_found(run: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["batches"][0]["advantages"][0][0] += 1e-3

    change_record(run, change)
    assert first(again(run)) == "advantages"


@pytest.mark.parametrize(("name", "first_name"), [("grpo", "log-probs"), ("sft", "log-probs")])
def test_one_changed_bit_of_a_weight_is_found(
    name: str, first_name: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs[name], tmp_path / name))

    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.0.mlp.down_proj.weight"].view(torch.int32)[0, 0] ^= 1 << 22
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    rewrite(run / "checkpoints" / "step_00000002", change)
    replayed = again(run)
    assert first(replayed) == first_name
    assert verdicts(replayed)["weights after"] != "exact"


def test_another_precision_is_found_and_tolerated(run: Path) -> None:
    for precision in ("bfloat16_autocast", "bfloat16_master"):
        replayed = again(run, precision=precision)
        assert first(replayed) == "log-probs"
        assert set(verdicts(replayed).values()) == {"exact", "approx"}
        assert replayed.stages[3].tolerance == 0.25


def test_other_micro_batches_change_sums_only(run: Path) -> None:
    replayed = again(run, token_budget=40)
    # Each token is scored bitwise the same in any micro-batch; the sums over them are not.
    assert verdicts(replayed)["log-probs"] == "exact"
    assert first(replayed) in ("loss", "gradient norm", "metrics")
    assert set(verdicts(replayed).values()) == {"exact", "approx"}
    assert "within the tolerance" in conclusion(replayed.stages)


def test_a_changed_pair_is_found(runs: dict[str, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs["dpo"], tmp_path / "dpo"))

    def change(data: dict[str, Any]) -> None:
        data["batches"][0]["rows"][0]["trained_on"]["ref_chosen_logprob"] += 1.0

    change_record(run, change)
    replayed = again(run)
    assert first(replayed) == "loss"


def test_a_changed_demonstration_is_found(runs: dict[str, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs["sft"], tmp_path / "sft"))

    def change(data: dict[str, Any]) -> None:
        data["batches"][0]["rows"][0]["trained_on"]["completion_ids"][0] += 1

    change_record(run, change)
    assert first(again(run)) == "prompts and texts"


def test_a_judge_is_asked_only_if_that_is_wanted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_yaml(run / "config.yaml", RLConfig)
    rewards = {**config.rewards, "judge": 2.0}
    judged = replace(config, rewards=rewards, judge=JudgeConfig(model="x"), validation_problems=1)
    (run / "config.yaml").write_text(dump_yaml(judged))

    def change(data: dict[str, Any]) -> None:
        for group in data["batches"][0]["collected"]["rollout"]["groups"]:
            for sample in group["samples"]:
                sample["rewards"]["judge"] = 0.25
                sample["reward"] += 0.5

    change_record(run, change)
    stage = again(run).stages[1]
    assert (stage.verdict, stage.note) == ("exact", "'judge' as recorded")

    @contextmanager
    def open_judge(config: Any, rewards: Any, folder: Path, *rest: Any) -> Iterator[Any]:
        assert run not in folder.parents  # nothing of the run is written
        yield (
            [replace(r, many=lambda items: [0.75] * len(items)) if r.name == "judge" else r for r in rewards],
            None,
        )

    monkeypatch.setattr(replay_step, "open_judge", open_judge)
    stage = again(run, judge=True).stages[1]
    assert (stage.verdict, stage.difference, stage.note) == ("DIFFERS", 1.0, "")  # 2 * (0.75 - 0.25)


def test_a_frozen_reference_is_looked_for_where_it_is_said_to_be(run: Path, runs: dict[str, Path]) -> None:
    start = str(runs["start"])
    text = (run / "config.yaml").read_text()
    assert text.count(start) == 1
    (run / "config.yaml").write_text(text.replace(start, "/nowhere/model"))
    with pytest.raises(UserError, match="nowhere/model"):
        again(run)
    assert set(verdicts(again(run, init=start)).values()) == {"exact"}


def test_a_fault_stands_alone(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(runs["sft"], tmp_path / "sft"))
    policy = load_policy(PolicyConfig(init=str(run)), seed=0)
    with torch.no_grad():
        dict(policy.model.named_parameters())["model.norm.weight"].fill_(3e38)  # what it makes is not finite
    problems = Arithmetic().problems("train")[:4]
    config = load_yaml(run / "config.yaml", sft.SFTConfig)
    drawn = [(0, problem) for problem in problems]
    rows = sft.encode(config, policy, load_task(config.task), drawn)
    recorder = Recorder(run, "sft", policy)
    recorder.is_due = False  # the batch is described when the fault is known
    recorder.begin(lambda: fit_batch(drawn, rows, policy, OPTIM, token_budget=64, attention="fast"))
    optimizer = Optimizer(policy.model, OPTIM)
    budget = TokenBudget(64, policy.model.parameters())
    loss, _, _, found = sft.train_step(policy, rows, OPTIM, budget, allowed_coef=COEF)
    assert not math.isfinite(loss)
    metrics = found | {"sft/loss": loss, "sft/grad_norm": optimizer.step(1e-3, loss=loss), "sft/lr": OPTIM.lr}
    recorder.end(2, metrics, lambda: (optimizer.tensors(), {}), is_skipped=True)
    shutil.rmtree(run / "checkpoints")
    replayed = again(run, 2)
    assert replayed.recorded.is_fault
    assert set(verdicts(replayed).values()) == {"exact"}
    assert conclusion(replayed.stages) == "all stages bitwise equal; not finite from stage 2 (log-probs) on"
    main(ReplayConfig(run=str(run), step=2))
    assert "sft fault at step 2" in capsys.readouterr().out
    assert again(run, 0).recorded.step == 2


def test_table_json_and_exit_status(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(ReplayConfig(run=str(run)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all stages bitwise equal"
    assert any(line.split()[:2] == ["4", "log-probs"] and line.split()[-1] == "exact" for line in lines)
    change_record(run, lambda data: data["metrics"].update({"rl/loss": 7.0}))
    with pytest.raises(SystemExit) as ended:
        main(ReplayConfig(run=str(run), json=True))
    assert ended.value.code == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["kind"], told["is_fault"]) == (3, "rl", False)
    assert told["recorded_on"] == told["replayed_on"]
    (loss,) = [stage for stage in told["stages"] if stage["stage"] == "loss"]
    # |here - 7| / 7, and the loss here is near 0
    assert (loss["verdict"], round(loss["difference"], 1)) == ("DIFFERS", 1.0)
    assert told["conclusion"].startswith("first difference at stage 5 (loss): 1, beyond the tolerance")


def test_one_line_errors(run: Path, tmp_path: Path) -> None:
    def error(folder: Path, step: int = 3, **options: Any) -> str:
        with pytest.raises(UserError) as caught:
            again(folder, step, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "step 2 is not recorded; those that can be replayed: 1, 3" in error(run, 2)
    assert "not a run folder" in error(tmp_path)
    (tmp_path / "config.yaml").write_text("model: x\n")
    assert "no step can be replayed; those that can be replayed: none (sft, rft," in error(tmp_path, 0)
    (run / "config.yaml").rename(tmp_path / "kept.yaml")
    (run / "config.yaml").write_text("out: x\nbatch_size: 3\n")
    assert "batch_size" in error(run)
    (tmp_path / "kept.yaml").rename(run / "config.yaml")
    batch = run / "replay" / "step_00000003" / "batch.json"
    whole = batch.read_bytes()
    batch.write_bytes(whole.replace(b"7", b"8", 1))
    assert "differs from its manifest (corrupt)" in error(run)
    batch.write_bytes(whole)
    change_record(run, lambda data: data.update({"format": 9}))
    assert "not a record of this version" in error(run)
    change_record(run, lambda data: data.update({"format": 1, "batches": [{"token_budget": 200}]}))
    assert "the record does not fit the run (KeyError: 'collected')" in error(run)
    change_record(run, lambda data: data["batches"][0].update({"collected": {}}))
    weights = run / "checkpoints" / "step_00000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert "differs from its manifest (corrupt)" in error(run)
    shutil.rmtree(run / "checkpoints" / "step_00000002")
    gone = "step 3 is recorded, but the weights before it are gone"
    assert gone in error(run)
    assert "those that can be replayed: 1" in error(run)
    assert again(run, 0).recorded.step == 1


def test_options_that_the_run_cannot_take(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    assert "ref_ema: null" in text
    (run / "config.yaml").write_text(text.replace("ref_ema: null", "ref_ema: 0.9"))
    with pytest.raises(UserError, match="cannot be replayed like this: algo.ref_ema"):
        again(run, precision="bfloat16_master")
    with pytest.raises(ValueError, match=r"token_budget = -1: expected 0 or more"):
        ReplayConfig(run="x", token_budget=-1)


def test_samples_of_several_ranks_are_put_side_by_side(run: Path) -> None:
    """The groups of a step, dealt to two ranks, give the step of one rank but for the order of sums."""

    def deal(data: dict[str, Any]) -> None:
        (whole,) = data["batches"]
        collected, rollout = whole["collected"], whole["collected"]["rollout"]
        assert collected["used"] == list(range(4))
        counts = [sum(x is not None for x in row) for row in whole["advantages"]]
        split = sum(counts[:1])
        data["batches"] = [
            whole
            | {
                "collected": collected
                | {
                    "used": list(range(len(places))),
                    "rollout": rollout | {k: [rollout[k][p] for p in places] for k in ("groups", "grades")},
                },
                "advantages": [whole["advantages"][p] for p in places],
                "logprobs": whole["logprobs"][:split] if places[0] == 0 else whole["logprobs"][split:],
            }
            for places in ([0], [1, 2, 3])
        ]

    change_record(run, deal)
    assert len(read_record(run / "replay" / "step_00000003").batches) == 2
    assert set(verdicts(again(run)).values()) == {
        "exact"
    }  # the same order here, as ranks stand one after the other


def test_differences() -> None:
    nan, inf = math.nan, math.inf

    def difference(was: list[float | None], now: list[float | None]) -> float | None:
        return compare("x", was, now, 0.1).difference

    assert difference([1.0, nan, inf, None], [1.0, nan, inf, None]) == 0.0
    assert difference([0.5, 10.0], [0.7, 11.0]) == pytest.approx(0.2)  # absolute up to 1, relative above
    assert difference([10.0], [13.0]) == pytest.approx(0.3)
    for was, now in ((1.0, nan), (nan, 1.0), (None, 1.0), (inf, -inf)):
        assert difference([was], [now]) == inf
    assert difference([1.0], [1.0, 2.0]) == inf
    assert compare("x", [1.0], [1.05], 0.1).verdict == "approx"
    assert compare("x", [1.0], [1.2], 0.1).verdict == "DIFFERS"
    assert not compare("x", [nan], [nan], 0.1).is_finite


def test_conclusion_names_the_first_beyond_tolerance_too() -> None:
    def stage(name: str, difference: float) -> Stage:
        return Stage(name=name, recorded="", here="", difference=difference, tolerance=0.1)

    told = conclusion([stage("a", 0.0), stage("b", 0.05), stage("c", 0.3)])
    assert told == (
        "first difference at stage 2 (b): 0.05, within the tolerance of 0.1; beyond it first at stage 3 (c): 0.3"
    )


def test_soft_and_hard_length_and_coins_are_scored_again(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        few = Arithmetic().problems("train")[:40]
        patch.setattr(Arithmetic, "problems", lambda self, split: few)
        for overlong in ("soft", "hard"):
            algo = AlgoConfig(overlong=overlong)  # type: ignore[arg-type]
            rl.train(rl_config(POLICY, tmp_path / overlong, algo=algo, num_steps=1))
        rl.train(rl_config(POLICY, tmp_path / "coin", control="random_reward", num_steps=1))
        for name in ("soft", "hard", "coin"):
            replayed = again(tmp_path / name, 1)
            assert set(verdicts(replayed).values()) == {"exact"}, name
            samples = replayed.recorded.batches[0]["collected"]["rollout"]["groups"][0]["samples"]
            assert any(s["rewards"].get("overlong") for s in samples) or name == "coin"
    assert replayed.stages[1].note == "the rewards were random: not recomputed"
