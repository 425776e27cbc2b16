"""Reinforcement learning: on-policy ratios, denominators, exact resume, and runs that stop with a reason."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from whet.algo.config import AlgoConfig, OffPolicyConfig, ValueConfig
from whet.eval.grade import grade
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.probe import ProbeResult
from whet.generate.sampling import SamplingParams
from whet.model.config import ModelConfig
from whet.recipes.models import demo_policy
from whet.recipes.rl import ALGORITHMS
from whet.rewards import base
from whet.schema import SCHEMAS, ResponseSchema
from whet.storage.checkpoint import saved_steps
from whet.tasks.base import TaskConfig
from whet.tasks.made.arithmetic import Arithmetic
from whet.telemetry import heartbeat
from whet.train import rl, setup
from whet.train.objective.objective import Objective
from whet.train.optim.safety import SafetyConfig
from whet.train.optim.step import OptimConfig, Optimizer
from whet.train.rl import main, steps, train
from whet.train.rl_config import RLConfig, plan
from whet.train.rollout import source
from whet.train.rollout.curriculum import CurriculumConfig
from whet.types import Group, Problem, Sample, Task, UserError

pytestmark = pytest.mark.usefixtures("few_problems")

# Rates and durations differ between any two runs.
TIMES = ("_seconds", "_per_second", "time_s", "_gib", "hardware/utilisation/cpu", "hardware/memory_gib/cpu")
MAX_NEW = 14


def make_config(tiny_policy: PolicyConfig, folder: Path, **changes: Any) -> RLConfig:
    return replace(
        RLConfig(
            out=str(folder),
            policy=tiny_policy,
            rewards={"correct": 1.0, "format": 0.5},
            sampling=SamplingParams(max_new_tokens=MAX_NEW),
            optim=OptimConfig(lr=1e-3, warmup_steps=2, beta2=0.99, token_budget=200),
            num_steps=6,
            num_prompts=4,
            group_size=4,
            save_every=3,
        ),
        **changes,
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.endswith(TIMES)} for row in rows]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return rows_of(folder / "metrics.jsonl")


def samples(folder: Path, step: int | None = None) -> list[dict[str, Any]]:
    return [row for row in rows_of(folder / "samples.jsonl") if step in (None, row["step"])]


def groups_of(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups = defaultdict(list)
    for row in rows:
        groups[row["uid"]].append(row)
    return list(groups.values())


def differ(group: list[dict[str, Any]]) -> bool:
    rewards = [row["reward"] for row in group if row["reward"] is not None]
    return bool(rewards) and max(rewards) > min(rewards)


def final_files(folder: Path, step: int) -> dict[str, Any]:
    checkpoint = folder / "checkpoints" / f"step_{step:08d}"
    names = ("model.safetensors", "training/optimizer.safetensors")
    state = json.loads((checkpoint / "training" / "state.json").read_text())
    state["last"] = {name: value for name, value in state["last"].items() if not name.endswith(TIMES)}
    return {name: (checkpoint / name).read_bytes() for name in names} | {"state": state}


def set_reward(
    monkeypatch: pytest.MonkeyPatch, name: str, score: Callable[[ResponseSchema, Problem, str], Any]
) -> None:
    def make(schema: ResponseSchema, task: Task) -> Callable[[Problem, str], Any]:
        return lambda problem, completion: score(schema, problem, completion)

    monkeypatch.setitem(base.REWARDS, name, base.Preset(make, best=1.0, worst=0.0))


def length_reward(schema: ResponseSchema, problem: Problem, completion: str) -> float:
    """Scores of many values, so that nearly every group has a spread; preflight's completions keep their order."""
    if schema.format_reward(completion) == 1.0:
        return 1.0
    return 0.0 if not completion else (len(completion) % 7) / 10


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_ratio_is_exactly_one_at_every_step(
    temperature: float, tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    sampling = SamplingParams(temperature=temperature, max_new_tokens=MAX_NEW)
    train(make_config(tiny_policy, tmp_path / "run", sampling=sampling))
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row["rl/ratio_drift"] == row["rl/logprob_gap_max"] == row["rl/logprob_gap_mean"] == 0.0
        assert row["rl/clip_high"] == row["rl/clip_low"] == 0.0
    assert any(row["rl/grad_norm"] > 0 for row in rows)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["sampler_vs_trainer"].startswith("exact")


AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


@pytest.mark.some(3)
@pytest.mark.parametrize("uninformative", ["keep", "drop"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_denominators(
    aggregation: str, uninformative: str, tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    algo = AlgoConfig(aggregation=aggregation, uninformative=uninformative)  # type: ignore[arg-type]
    train(make_config(tiny_policy, tmp_path, algo=algo, num_steps=1, num_prompts=8))
    (row,) = metrics(tmp_path)
    groups = groups_of(samples(tmp_path))
    dull = [group for group in groups if not differ(group)]
    assert row["rl/zero_variance_groups"] == len(dull) / 8
    assert 0 < len(dull) < 8  # else this test would not tell keep from drop
    counted = [s for group in groups if uninformative == "keep" or differ(group) for s in group]
    lengths = [s["num_completion_tokens"] for s in counted]
    # On-policy every ratio is 1: a token's loss is minus its advantage.
    totals = {
        "token_mean": sum(s["advantage"] * n for s, n in zip(counted, lengths, strict=True)) / sum(lengths),
        "sequence_mean": sum(s["advantage"] for s in counted) / len(counted),
        "constant": sum(s["advantage"] * n for s, n in zip(counted, lengths, strict=True))
        / (len(counted) * MAX_NEW),
    }
    # A float32 sum of a few hundred numbers of size 1.
    assert row["rl/loss"] == pytest.approx(-totals[aggregation], abs=1e-4)


def test_metrics_describe_the_samples(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    train(make_config(tiny_policy, tmp_path, num_steps=1))
    (row,) = metrics(tmp_path)
    drawn = samples(tmp_path)
    rewards = [s["reward"] for s in drawn]
    assert len(drawn) == 16
    assert [s["index"] for s in drawn] == [0, 1, 2, 3] * 4
    for s in drawn:
        assert s["reward"] == pytest.approx(s["rewards"]["correct"] + 0.5 * s["rewards"]["format"])
        assert s["rewards"]["format"] == SCHEMAS["think_answer"].format_reward(s["completion"])
    mean = sum(rewards) / 16
    assert row["rl/reward_mean"] == pytest.approx(mean)
    assert row["rl/reward_std"] == pytest.approx(math.sqrt(sum((r - mean) ** 2 for r in rewards) / 16))
    assert row["rl/completion_tokens"] == sum(s["num_completion_tokens"] for s in drawn) / 16
    assert row["rl/truncated"] == sum(s["finish_reason"] == "length" for s in drawn) / 16
    assert row["rl/unscorable"] == 0
    for group in groups_of(drawn):
        scores = [s["reward"] for s in group]
        centre = sum(scores) / 4
        deviation = math.sqrt(sum((score - centre) ** 2 for score in scores) / 3)
        expected = [(score - centre) / (deviation + 1e-4) if deviation else 0.0 for score in scores]
        assert [s["advantage"] for s in group] == pytest.approx(expected, abs=1e-9)
        assert len({s["completion"] for s in group}) > 1  # samples of a group have seeds of their own


class CrashError(Exception):
    """Stands for a crash."""


FOLLOWING = AlgoConfig(
    kl="k2_loss", kl_coef=0.5, kl_target=10.0, ref_ema=0.5, entropy_coef=0.1, entropy_target=10.0
)
REFRESHED = AlgoConfig(kl="k1_reward", kl_coef=0.5, ref_refresh_every=2, num_minibatches=2, num_epochs=2)
RESUMED = {
    "critic": {"algo": ALGORITHMS["ppo"](), "value": ValueConfig(lr=1e-2, warmup_steps=1)},
    "following": {"algo": FOLLOWING},
    "refreshed": {"algo": REFRESHED},
    "staleness": {
        "off_policy": OffPolicyConfig(staleness=2, proximal="recomputed", correction="token_mask"),
    },
    "gdpo": {
        "algo": ALGORITHMS["gdpo"](),
        "rewards": {"correct": 0.5, "format": 1.0},
        "curriculum": CurriculumConfig(max_problems=12, num_samples=2, min_pass_rate=None, max_pass_rate=0.5),
    },
    "refill_kl": {"algo": AlgoConfig(uninformative="refill", kl="k2_loss", kl_coef=0.1, entropy_coef=0.01)},
    "validation, bfloat16": {
        "validation_problems": 5,
        "validate_every": 2,
        "optim": OptimConfig(lr=1e-3, warmup_steps=2, precision="bfloat16_master"),
    },
}


OFTEN = ("critic", "staleness", "refill_kl")


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ci] * (name not in OFTEN)) for name in RESUMED]
)
def test_resume_is_exact(
    name: str, tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_reward(monkeypatch, "format", length_reward)
    config = make_config(tiny_policy, tmp_path / "straight", **RESUMED[name])
    train(config)
    broken = replace(config, out=str(tmp_path / "broken"))
    original = Objective.update

    def fail(*arguments: Any, **options: Any) -> Any:
        if options["step"] == 4:
            raise CrashError
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Objective, "update", fail)
        with pytest.raises(CrashError):
            train(broken)
    assert saved_steps(tmp_path / "broken") == [3]
    assert len(metrics(tmp_path / "broken")) == 4
    train(broken, resume=True)
    straight, resumed = tmp_path / "straight", tmp_path / "broken"
    assert metrics(resumed) == metrics(straight)
    assert samples(resumed) == samples(straight)
    assert final_files(resumed, 6) == final_files(straight, 6)
    assert saved_steps(resumed) == saved_steps(straight) == [3, 6]
    assert max(row["rl/grad_norm"] for row in metrics(straight)) > 0


def test_a_step_without_an_update_is_no_step_of_the_learning_rate_s_schedule(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sometimes(schema: ResponseSchema, problem: Problem, completion: str) -> float:
        score = length_reward(schema, problem, completion)
        return score if score == 1.0 or int(problem.uid[-1], 16) % 2 else 0.0

    set_reward(monkeypatch, "format", sometimes)
    optim = OptimConfig(lr=1e-3, warmup_steps=3, schedule="linear", final_lr_share=0.0, token_budget=200)
    options: dict[str, Any] = {"num_prompts": 1, "num_steps": 8, "optim": optim}
    train(make_config(tiny_policy, tmp_path / "straight", **options))
    rows = metrics(tmp_path / "straight")
    has_update = [row["rl/updates"] > 0 for row in rows]
    assert 0 < sum(has_update[:5]) < 5
    # From 1e-3 / 3 on by thirds, then by fifths of what is left: 3 warm-up steps of 8.
    planned = [1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3, 0.0]
    expected = [planned[sum(has_update[:step])] for step in range(8)]
    assert [row["rl/lr"] for row in rows] == pytest.approx(expected)

    broken = make_config(tiny_policy, tmp_path / "broken", **options)
    for number, _ in enumerate(running := steps(broken), start=1):
        if number == 4:  # one after the checkpoint of step 3
            running.close()
            break
    train(broken, resume=True)
    assert metrics(tmp_path / "broken") == rows
    assert final_files(tmp_path / "broken", 8) == final_files(tmp_path / "straight", 8)


@pytest.mark.some(6)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_named_algorithm_trains(
    name: str, tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_reward(monkeypatch, "format", length_reward)
    algo = ALGORITHMS[name]()
    if algo.overlong_cache:
        algo = replace(algo, overlong_cache=8)
    config = make_config(tiny_policy, tmp_path / "run", algo=algo, num_steps=1)
    start = load_policy(tiny_policy, seed=0).model.head_weight
    trained = train(config)
    (row,) = metrics(tmp_path / "run")
    assert row["rl/grad_norm"] > 0
    assert row["rl/updates"] == algo.num_updates
    assert row["rl/ratio_drift"] == 0.0
    assert not torch.equal(trained.model.head_weight, start)


def test_a_run_is_reproducible_and_its_seed_matters(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(make_config(tiny_policy, tmp_path / name, num_steps=2, seed=seed))
    assert samples(tmp_path / "a") == samples(tmp_path / "b")
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert samples(tmp_path / "a") != samples(tmp_path / "c")


def test_refill_samples_until_the_batch_is_full(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    algo = AlgoConfig(uninformative="refill", max_refills=10)
    train(make_config(tiny_policy, tmp_path, algo=algo, num_steps=3))
    refilled = 0
    for row in metrics(tmp_path):
        groups = groups_of(samples(tmp_path, row["step"]))
        assert len(groups) == 4 + row["rl/groups_refilled"]
        assert sum(differ(group) for group in groups) == 4
        refilled += row["rl/groups_refilled"]
        counted = [s for group in groups if differ(group) for s in group]
        lengths = [s["num_completion_tokens"] for s in counted]
        expected = sum(s["advantage"] * n for s, n in zip(counted, lengths, strict=True)) / sum(lengths)
        assert row["rl/loss"] == pytest.approx(-expected, abs=1e-4)  # a float32 sum, as above
    assert refilled > 0


def test_refill_gives_up_after_its_rounds(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algo = AlgoConfig(uninformative="refill", max_refills=2)
    train(make_config(tiny_policy, tmp_path, algo=algo, num_steps=2, rewards={"correct": 1.0}))
    for row in metrics(tmp_path):
        assert row["rl/groups_refilled"] == 2 * 4
        assert row["rl/zero_variance_groups"] == 1.0
        assert row["rl/loss"] == row["rl/grad_norm"] == 0.0


@pytest.mark.some(1)
@pytest.mark.parametrize("kl", ["k2_loss", "k1_reward"])  # in the loss, in the reward
def test_kl_to_the_starting_policy(
    kl: str, tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_reward(monkeypatch, "format", length_reward)
    optim = OptimConfig(lr=1e-2, warmup_steps=0)
    values = {}
    for coefficient in (1e-6, 5.0):
        algo = AlgoConfig(kl=kl, kl_coef=coefficient)  # type: ignore[arg-type]
        folder = tmp_path / str(coefficient)
        train(make_config(tiny_policy, folder, algo=algo, optim=optim, num_steps=5))
        values[coefficient] = [row["rl/kl"] for row in metrics(folder)]
        assert values[coefficient][0] == 0.0  # the reference is the policy that the run began with
        assert min(values[coefficient][2:]) > 0  # and does not move along with it
    assert sum(values[5.0]) < 0.7 * sum(values[1e-6])  # a strong pull back keeps the policy closer
    train(make_config(tiny_policy, tmp_path / "none", num_steps=1))
    assert "rl/kl" not in metrics(tmp_path / "none")[0]


def unless_ideal(value: Any) -> Callable[[ResponseSchema, Problem, str], Any]:
    """A reward that passes preflight and then returns `value` for about a third of what a model writes."""

    def score(schema: ResponseSchema, problem: Problem, completion: str) -> Any:
        if completion == "" or schema.format_reward(completion) == 1.0:
            return float(bool(completion))
        return value if len(completion) % 3 == 1 else (len(completion) % 7) / 10

    return score


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_stops_the_run(
    bad: float, tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_reward(monkeypatch, "format", unless_ideal(bad))
    with pytest.raises(
        UserError, match=r"reward 'format' returned (nan|inf) for problem \w+: expected a finite"
    ):
        train(make_config(tiny_policy, tmp_path / "run"))


@pytest.mark.parametrize("uninformative", ["keep", "drop"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_unscorable_samples_leave_statistics_and_denominators(
    aggregation: str,
    uninformative: str,
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_reward(monkeypatch, "format", unless_ideal(None))
    algo = AlgoConfig(aggregation=aggregation, uninformative=uninformative, scale="none")  # type: ignore[arg-type]
    train(make_config(tiny_policy, tmp_path, algo=algo, num_steps=1))
    (row,) = metrics(tmp_path)
    drawn = samples(tmp_path)
    scored = [s for s in drawn if s["reward"] is not None]
    assert 0 < len(scored) < len(drawn)
    assert row["rl/unscorable"] == len(drawn) - len(scored)
    assert row["rl/reward_mean"] == pytest.approx(sum(s["reward"] for s in scored) / len(scored))
    assert all((s["advantage"] is None) == (s["reward"] is None) for s in drawn)
    terms, lengths = [], []
    for group in groups_of(scored):
        if uninformative == "drop" and not differ(group):
            continue
        centre = sum(s["reward"] for s in group) / len(group)
        for s in group:
            assert s["advantage"] == pytest.approx(s["reward"] - centre)
            terms.append(s["reward"] - centre)
            lengths.append(s["num_completion_tokens"])
    by_token = sum(term * length for term, length in zip(terms, lengths, strict=True))
    expected = {
        "token_mean": by_token / sum(lengths),
        "sequence_mean": sum(terms) / len(terms),
        "constant": by_token / (len(terms) * MAX_NEW),
    }[aggregation]
    assert row["rl/loss"] == pytest.approx(-expected, abs=1e-4)  # a float32 sum, as above


def test_masked_truncated_samples_leave_denominators(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_reward(monkeypatch, "format", length_reward)
    algo = AlgoConfig(overlong="filter", scale="none", uninformative="keep")
    train(make_config(tiny_policy, tmp_path, algo=algo, num_steps=1))
    (row,) = metrics(tmp_path)
    whole = [s for s in samples(tmp_path) if s["finish_reason"] == "stop"]
    assert 0 < len(whole) < 16
    total = sum(s["advantage"] * s["num_completion_tokens"] for s in whole)
    expected = total / sum(s["num_completion_tokens"] for s in whole)
    assert row["rl/loss"] == pytest.approx(-expected, abs=1e-4)  # a float32 sum, as above


def test_overlong_penalty_is_added(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    train(make_config(tiny_policy, tmp_path, algo=AlgoConfig(overlong="soft", overlong_cache=8), num_steps=1))
    penalties = set()
    for s in samples(tmp_path):
        penalty = -max(0, s["num_completion_tokens"] - (MAX_NEW - 8)) / 8
        parts = s["rewards"]
        assert s["reward"] == pytest.approx(parts["correct"] + 0.5 * parts["format"] + penalty)
        penalties.add(penalty)
    assert {-1.0, 0.0} < penalties


def test_preflight_stops_rewards_with_other_tags(
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = SCHEMAS["working_out_solution"]
    set_reward(monkeypatch, "format", lambda schema, problem, completion: other.format_reward(completion))
    with pytest.raises(UserError, match="preflight: a perfect completion"):
        train(make_config(tiny_policy, tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    capsys.readouterr()
    train(make_config(tiny_policy, tmp_path / "run", preflight="warn", num_steps=1))
    assert "preflight: a perfect completion" in capsys.readouterr().out


def test_a_run_without_any_signal_stops(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    config = make_config(
        tiny_policy, tmp_path, rewards={"correct": 1.0}, max_dead_steps=3, num_steps=10, num_prompts=2
    )
    with pytest.raises(UserError, match="step 3: 3 steps in a row without a signal: every answer is wrong"):
        train(config)
    assert len(metrics(tmp_path)) == 3


def test_a_run_that_solves_everything_is_not_dead(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arithmetic, "is_correct", lambda self, problem, answer: True)
    monkeypatch.setattr(setup, "preflight", lambda *arguments, **options: [])
    set_reward(monkeypatch, "correct", lambda schema, problem, completion: 1.0)
    config = make_config(tiny_policy, tmp_path, rewards={"correct": 1.0}, max_dead_steps=2, num_steps=4)
    train(config)
    assert [row["rl/zero_variance_groups"] for row in metrics(tmp_path)] == [1.0] * 4


def test_disagreement_of_sampler_and_trainer_stops_the_run(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = source.collect_groups

    def shifted(*arguments: Any, **options: Any) -> Any:
        rollout = original(*arguments, **options)
        for number, group in enumerate(rollout.groups):
            moved = tuple(
                replace(s, sampler_logprobs=tuple(value + 1e-3 for value in s.sampler_logprobs))
                for s in group.samples
            )
            rollout.groups[number] = replace(group, samples=moved)
        return rollout

    monkeypatch.setattr(source, "collect_groups", shifted)
    with pytest.raises(UserError, match=r"on-policy ratio drifts by 1\.0e-03"):
        train(make_config(tiny_policy, tmp_path))
    assert saved_steps(tmp_path) == []


def test_a_gradient_that_is_not_finite_stops_the_run(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_reward(monkeypatch, "format", length_reward)
    monkeypatch.setattr(Optimizer, "step", lambda self, lr, loss: math.inf)
    with pytest.raises(UserError, match=r"step 3: rl/grad_norm inf, .* left out, 3 in a row"):
        train(make_config(tiny_policy, tmp_path, safety=SafetyConfig(max_skipped=2)))
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["rl/skipped"] == 3
    assert last["rl/dropped/skipped_update"] > 0


def test_prompts_must_leave_room(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    config = make_config(tiny_policy, tmp_path / "run", sampling=SamplingParams(max_new_tokens=64))
    with pytest.raises(UserError, match="no prompt fits: the context holds 64 tokens"):
        train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sampling": SamplingParams(temperature=0.0)}, "temperature = 0"),
        ({"group_size": 1}, "at least 2"),
        ({"num_steps": 0}, "num_steps = 0"),
        ({"max_dead_steps": 0}, "max_dead_steps = 0"),
        ({"algo": AlgoConfig(overlong="soft", overlong_cache=10_000)}, "overlong_cache = 10000"),
    ],
)
def test_config_refuses(
    wrong: dict[str, Any], message: str, tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(tiny_policy, tmp_path, **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kl": "k2_loss"},
        {"kl_coef": 0.1},
        {"kl": "k3_loss", "kl_coef": -0.1},
        {"clip_low": 1.5},
        {"clip_high": -0.1},
        {"std_ddof": 2},
        {"eps": -1.0},
        {"max_refills": -1},
    ],
)
def test_algo_config_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected|both or neither"):
        AlgoConfig(**wrong)


def test_an_old_folder_is_never_written_to(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    config = make_config(tiny_policy, tmp_path / "run", num_steps=1)
    train(config)
    with pytest.raises(UserError, match=r"already exists.*--resume"):
        train(config)
    with pytest.raises(UserError, match="has 'group_size: 4', you gave 'group_size: 2'"):
        train(replace(config, group_size=2), resume=True)


@pytest.mark.usefixtures("whole_start")
def test_main_writes_the_run_folder(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tiny_policy, tmp_path / "run", num_steps=2, validation_problems=4, validate_every=1)
    main(config)
    run = tmp_path / "run"
    output = capsys.readouterr().out
    assert "sampler vs trainer: exact" in output
    assert "done:" in output
    assert (run / "report.md").is_file()
    assert (run / "checkpoints" / "best" / "model.safetensors").is_file()
    assert all("eval/greedy" in row for row in metrics(run))
    assert json.loads((run / "summary.json").read_text())["reward_mean"] == metrics(run)[-1]["rl/reward_mean"]
    assert re.search(r"\b16\b(.|\n)*\b224\b", plan(config))  # completions, and their tokens at most
    # The saved folder is a policy with the same prompt protocol and weights.
    again = load_policy(PolicyConfig(init=str(run)), seed=9)
    stored = load_policy(PolicyConfig(init=str(run / "checkpoints" / "best")), seed=9)
    assert torch.equal(again.model.head_weight, stored.model.head_weight)
    assert again.schema == SCHEMAS["think_answer"]


def test_a_problem_drawn_twice_in_a_step_is_sampled_anew(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TaskConfig(name="jsonl", path=str(data))
    train(make_config(tiny_policy, tmp_path / "run", task=task, num_steps=1, num_prompts=120))
    for group in groups_of(samples(tmp_path / "run")):
        assert len(group) >= 8  # drawn at least twice
        first, second = ([s["completion"] for s in group[start : start + 4]] for start in (0, 4))
        assert first != second


def test_logged_advantages_are_the_trained_ones_with_batch_scale(
    tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    algo = AlgoConfig(scale="batch", aggregation="sequence_mean", uninformative="drop")
    train(make_config(tiny_policy, tmp_path, algo=algo, num_steps=1, num_prompts=8))
    (row,) = metrics(tmp_path)
    counted = [s for group in groups_of(samples(tmp_path)) if differ(group) for s in group]
    # Means over sequences of advantages sum to zero, token losses do not show their scale: the gradient does.
    assert row["rl/zero_variance_groups"] > 0
    rewards = torch.tensor([s["reward"] for s in counted], dtype=torch.float64)
    centred = [
        s["reward"] - sum(other["reward"] for other in group) / len(group)
        for group in groups_of(counted)
        for s in group
    ]
    expected = torch.tensor(centred, dtype=torch.float64) / (rewards.std() + 1e-4)
    advantages = [s["advantage"] for group in groups_of(counted) for s in group]
    assert advantages == pytest.approx(expected.tolist(), abs=1e-9)


def test_no_training_problems_is_a_user_error(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arithmetic, "problems", lambda self, split: [])
    with pytest.raises(UserError):
        train(make_config(tiny_policy, tmp_path / "run"))


def test_the_mean_of_one_reward_counts_the_samples_that_it_scored(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_reward(monkeypatch, "format", unless_ideal(None))
    set_reward(monkeypatch, "correct", lambda schema, problem, completion: float(bool(completion)))
    monkeypatch.setattr(setup, "preflight", lambda *arguments, **options: [])
    train(make_config(tiny_policy, tmp_path, num_steps=1))
    (row,) = metrics(tmp_path)
    scores = [s["rewards"]["correct"] for s in samples(tmp_path)]
    assert row["rl/unscorable"] > 0
    assert row["rl/reward/correct"] == pytest.approx(sum(scores) / len(scores))


def test_a_step_with_a_single_trained_token_is_taken(tiny_policy: PolicyConfig) -> None:
    policy = load_policy(tiny_policy, seed=0)
    problem = Arithmetic().problems("train")[0]
    sample = Sample(
        uid=problem.uid,
        index=0,
        prompt_ids=policy.prompt_ids(problem),
        completion_ids=(5,),
        sampler_logprobs=(-3.0,),
        text="",
        finish_reason="stop",
        reward=1.0,
        advantage=1.0,
    )
    objective = Objective(
        policy, AlgoConfig(), temperature=1.0, max_length=8, optim=OptimConfig(token_budget=100)
    )
    before = policy.model.head_weight.detach().clone()
    optimizer = Optimizer(policy.model, OptimConfig(lr=0.1))
    result = objective.update([Group(problem=problem, samples=(sample,))], optimizer, 0.1)
    assert result["rl/grad_norm"] > 0
    assert not torch.equal(policy.model.head_weight, before)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


SCORE = "def score(problem, text):\n    return min(len(text), 50) / 500\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RLConfig:
    """A run on rows, with a reward and a KL reference of the user's own, that is over."""
    home = tmp_path_factory.mktemp("inputs")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "mine.py").write_text(SCORE)
    shape = replace(demo_policy().model, hidden_size=32, intermediate_size=64, head_dim=8)
    start = replace(demo_policy(), model=shape, max_rows=64)
    load_policy(start, seed=0).save(home / "base")
    config = replace(
        make_config(replace(start, init=str(home / "base"), model=ModelConfig()), home / "run"),
        task=TaskConfig(name="jsonl", path=str(home / "rows.jsonl")),
        reward=(f"{home / 'mine.py'}:score=0.5",),
        algo=AlgoConfig(kl="k3_loss", kl_coef=0.1),
        num_steps=2,
        num_prompts=2,
        group_size=2,
    )
    train(config)
    return config


@contextmanager
def edited(path: Path, change: Callable[[str], str]) -> Iterator[None]:
    """Change a file meanwhile."""
    before = path.read_bytes()
    path.write_text(change(before.decode()))
    yield
    path.write_bytes(before)


CHANGES: dict[str, tuple[str, Callable[[str], str], str]] = {
    "a row is gone": ("rows.jsonl", lambda text: text.partition("\n")[2], r"problems \(\d+, now \d+\)"),
    "a row more": (
        "rows.jsonl",
        lambda text: text + '{"prompt": "77+1=", "answer": "78"}\n',
        r"task\.path: .*rows\.jsonl",
    ),
    "another order": (
        "rows.jsonl",
        lambda text: "".join(sorted(text.splitlines(keepends=True), reverse=True)),
        r"task\.path: .*rows\.jsonl",
    ),
    "another answer": (
        "rows.jsonl",
        lambda text: text.replace('"answer": "9"', '"answer": "8"'),
        "task.path: ",
    ),
    "another reward": ("mine.py", lambda text: text.replace("50)", "40)"), r"reward: .*mine\.py"),
    "another tokenizer": (
        "base/tokenizer.json",
        lambda text: text + "\n",
        r"policy\.init: .*tokenizer\.json",
    ),
    "another config": ("base/config.json", lambda text: text + "\n", r"policy\.init: .*config\.json"),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", CHANGES)
def test_a_run_does_not_resume_with_other_inputs(name: str, finished: RLConfig) -> None:
    home = Path(finished.out).parent
    file, change, told = CHANGES[name]
    before = {path: path.read_bytes() for path in Path(finished.out).rglob("*.json*")}
    with (
        edited(home / file, change),
        pytest.raises(UserError, match=rf"has changed since it was started: .*{told}.*--deterministic warn"),
    ):
        train(finished, resume=True)
    at_every_start = {Path(finished.out) / name for name in ("environment.json", "heartbeats/rank_0.json")}
    assert all(path.read_bytes() == text for path, text in before.items() if path not in at_every_start)
    train(finished, resume=True)


def test_inputs_are_bound_to_the_checkpoint(finished: RLConfig, tmp_path: Path) -> None:
    """Where provenance.json is gone, the checkpoint still knows what was read."""
    run = Path(finished.out)
    file, change, told = CHANGES["another config"]
    kept = (run / "provenance.json").rename(tmp_path / "provenance.json")
    try:
        with (
            edited(run.parent / file, change),
            pytest.raises(UserError, match=rf"has changed since .*{told}"),
        ):
            train(finished, resume=True)
    finally:
        shutil.copy(kept, run / "provenance.json")
    train(finished, resume=True)


def test_a_reference_of_other_weights_is_refused_or_told_of(
    finished: RLConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, run = Path(finished.out).parent, tmp_path / "run"
    shutil.copytree(finished.out, run)
    weights = load_file(home / "base/model.safetensors")
    save_file({name: tensor + 1e-3 for name, tensor in weights.items()}, home / "base/model.safetensors")
    config = replace(finished, out=str(run))
    with pytest.raises(UserError, match=r"policy\.init: .*model\.safetensors"):
        train(config, resume=True)
    capsys.readouterr()
    train(replace(config, safety=SafetyConfig(deterministic="warn")), resume=True)
    assert "what the run reads has changed" in capsys.readouterr().out
    (note,) = json.loads((run / "provenance.json").read_text())["input_changes"]
    ((changed, (was, now)),) = note["changed"].items()
    assert changed.endswith("base/model.safetensors")
    assert was != now
    train(config, resume=True)  # from now on these are its inputs
    save_file(weights, home / "base/model.safetensors")


def test_the_watchdog_begins_before_the_first_step_and_ends_with_the_run(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, seen = make_config(tiny_policy, tmp_path / "run"), []
    path = tmp_path / "run" / "heartbeats" / "rank_0.json"

    def look(then: Callable[..., Any], *words: Any, **options: Any) -> Any:
        now = heartbeat.current()
        assert now is not None
        seen.append((now._beat.phase, path.exists()))
        return then(*words, **options)

    def fail(*words: Any, **options: Any) -> Any:
        raise UserError("no problem is left")

    with monkeypatch.context() as patch:
        patch.setattr(setup, "load_task", partial(look, setup.load_task))
        patch.setattr(setup, "preflight", partial(look, setup.preflight))
        patch.setattr(rl, "select_problems", partial(look, fail))
        with pytest.raises(UserError, match="no problem is left"):
            train(config)
    assert seen == [("load", False), ("preflight", False), ("curriculum", True)]
    assert heartbeat.current() is None
    found = json.loads(path.read_text())
    assert (found["state"], found["reason"]) == ("failed", "UserError: no problem is left")
    running = steps(config)
    next(running)
    assert heartbeat.current() is not None
    running.close()  # whoever called has seen enough
    assert heartbeat.current() is None


def test_steps_without_a_signal_count_only_in_a_row(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    trust = rl.Trust(make_config(tiny_policy, tmp_path, max_dead_steps=3), ProbeResult(True, 0.0), None)
    dead = {"rl/staleness": 0.0, "rl/groups_with_signal": 0.0, "rl/correct": 0.1}
    dead |= {"rl/all_wrong_groups": 0.5, "rl/all_right_groups": 0.0}
    alive = dead | {"rl/groups_with_signal": 0.25}
    for step, values in enumerate((dead, dead, alive, dead, dead), start=1):
        trust.check(step, values)
    assert trust.dead_steps == 2
    with pytest.raises(UserError, match="step 6: 3 steps in a row without a signal"):
        trust.check(6, dead)
    solved = dead | {"rl/correct": 1.0}
    trust = rl.Trust(make_config(tiny_policy, tmp_path, max_dead_steps=1), ProbeResult(True, 0.0), None)
    trust.check(1, solved)  # nothing is left to learn
    trust.restore({"dead_steps": 7, "step": 1})
    assert trust.dead_steps == 7


def test_limits_of_what_may_part_sampler_and_trainer(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    """0.1 nats a token on average where rounding parts them, ratio_tolerance where nothing should; stale tokens may."""
    values = {"rl/staleness": 0.0, "rl/groups_with_signal": 1.0, "rl/correct": 0.5}
    trust = rl.Trust(make_config(tiny_policy, tmp_path), ProbeResult(False, 1e-3), None)
    trust.check(1, values | {"rl/logprob_gap_mean": 0.09})
    far = values | {"rl/logprob_gap_mean": 0.11}
    with pytest.raises(UserError, match=r"differ by 0\.11 nats per token on average, expected at most 0\.1"):
        trust.check(1, far)
    trust.check(1, far | {"rl/staleness": 1.0})
    trust.check(1, far | {"rl/token_age": 0.5})
    # A sampler with a copy of the weights: no further off than it was at the start, times a factor.
    copied = rl.Trust(make_config(tiny_policy, tmp_path), ProbeResult(False, 1e-2, mean_gap=1e-3), None)
    limit = rl.STALE_FACTOR * 1e-3
    assert rl.STALE_GAP < limit < 0.09
    copied.check(1, values | {"rl/logprob_gap_mean": 0.99 * limit})
    with pytest.raises(UserError, match="did not take all of the weights"):
        copied.check(1, values | {"rl/logprob_gap_mean": 1.01 * limit})
    exact = rl.Trust(make_config(tiny_policy, tmp_path), ProbeResult(True, 0.0), None)
    drifts = values | {"rl/ratio_drift": 1e-3}
    exact.check(1, drifts | {"rl/staleness": 1.0})
    exact.check(1, drifts | {"rl/token_age": 0.5})
    with pytest.raises(UserError, match="ratio drifts"):
        exact.check(1, drifts)


def test_hot_sampling_is_warned_of() -> None:
    assert rl.heat_warnings(rl.HOT) == []
    assert "gibberish" in rl.heat_warnings(rl.HOT + 0.01)[0]


ANSWERED = "</think><answer>7</answer>"
PLACED = "are where the schema wants them (between <answer> and </answer>)"


@pytest.mark.parametrize(
    ("texts", "dull", "algo", "told"),
    [
        (
            ["It is 5."] * 6 + ["It is 6."] * 34,
            0.9,
            {},
            f"0 of 40 answers of the first batch {PLACED}, and 15%",
        ),
        ([ANSWERED] + ["It is 5."] * 39, 0.9, {}, f"1 of 40 answers of the first batch {PLACED}, and 98%"),
        (["It is 5."], 0.0, {}, "right when read anywhere: --policy.schema anywhere asks for no format"),
        (["Hm."] * 40, 0.9, {}, "0% are right when read anywhere: fine-tune first (whet sft"),
        ([ANSWERED] * 2 + ["Hm."] * 38, 0.75, {}, "75% of the groups of the first batch have equal rewards"),
        ([ANSWERED], 0.75, {}, "--algo.uninformative refill samples other problems"),
        ([ANSWERED], 0.5, {}, ""),
        ([ANSWERED], 0.9, {"uninformative": "refill"}, ""),
        ([ANSWERED], 0.9, {"uninformative": "keep"}, ""),
    ],
)
def test_a_weak_start_is_told_of_once_with_the_option_that_helps(
    tiny_policy: PolicyConfig, texts: list[str], dull: float, algo: dict[str, Any], told: str
) -> None:
    policy, task = load_policy(tiny_policy, seed=0), Arithmetic()
    problem = Problem(uid="a", task="arithmetic", prompt="2+3=", answer="5")
    items = [(problem, text, tuple(policy.stop_ids[:1])) for text in texts]
    drawn: Any = [SimpleNamespace(text=text, completion_ids=ids, reward=0.0) for _, text, ids in items]
    rollout: Any = SimpleNamespace(
        groups=[SimpleNamespace(problem=problem, samples=drawn)], grades=[grade(policy, task, items)]
    )
    values = {"rl/zero_variance_groups": dull, "rl/correct": 0.1}
    found = rl.weak_start(policy, task, rollout, values, AlgoConfig(**algo))
    assert told in found
    assert bool(found) == bool(told)
    assert "\n" not in found


def test_the_first_batch_of_a_run_is_judged_and_no_other(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tiny_policy, tmp_path, num_steps=2, rewards={"correct": 1.0})
    train(config)
    assert capsys.readouterr().out.count("of the first batch") == 1
    warnings = (tmp_path / "warnings.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in warnings if "of the first batch" in line] == [1]


def test_a_folder_that_cannot_be_used_is_refused_before_a_reward_is_called(
    tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    """Hundreds of calls of somebody's service, a second each, told nobody that there is nothing to resume."""
    calls = tmp_path / "calls"
    (tmp_path / "mine.py").write_text(
        f"def pay(problem, completion):\n    open({str(calls)!r}, 'a').write('x')\n    return 1.0\n"
    )
    config = make_config(tiny_policy, tmp_path / "run", reward=(f"{tmp_path / 'mine.py'}:pay=0.5",))
    with pytest.raises(UserError, match="nothing to resume"):
        train(config, resume=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine\n")
    with pytest.raises(UserError, match="already exists"):
        train(config)
    assert not calls.exists()


def test_a_run_that_goes_on_is_not_audited_again(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its preflight has passed; somebody's service, a second a call, is called for completions alone."""
    config = make_config(tiny_policy, tmp_path / "run", num_steps=2)
    audited: list[object] = []
    monkeypatch.setattr(rl, "audit_parts", lambda setup: audited.append(setup) or [])
    train(replace(config, num_steps=1))
    assert len(audited) == 1
    train(config, resume=True)
    assert len(audited) == 1
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2


def test_rewards_that_fail_are_told_of_at_the_first_and_at_every_doubling() -> None:
    reward = base.WeightedReward("mine", 1.0, lambda problem, completion: 0.0)
    reward.failures.count = 7  # in the preflight, whose completions are no samples
    failures = rl.Failures([reward])
    told = []
    for count in range(10):
        reward.failures.count = 7 + count
        told += [(count, line.partition(",")[0]) for line in failures.news()]
    assert [count for count, _ in told] == [1, 2, 4, 8]
    assert told[0][1] == "reward 'mine' gave no score once so far"
    assert told[2][1] == "reward 'mine' gave no score 4 times so far"
    assert failures.count == 9


def test_failures_of_rewards_are_counted_on_in_a_resumed_run(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def mine(problem, text):\n    return 1 / (len(text) % 3)\n")
    own = {"reward": (f"{tmp_path}/mine.py:mine=0.5",), "preflight": "warn"}
    config = make_config(tiny_policy, tmp_path / "straight", save_every=1, num_steps=4, **own)
    train(config)
    broken = replace(config, out=str(tmp_path / "broken"))
    original = Objective.update

    def fail(*arguments: Any, **options: Any) -> Any:
        if options["step"] == 2:
            raise CrashError
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Objective, "update", fail)
        with pytest.raises(CrashError):
            train(broken)
    train(broken, resume=True)
    counts = [row["rl/reward_failures"] for row in metrics(tmp_path / "broken")]
    assert counts == [row["rl/reward_failures"] for row in metrics(tmp_path / "straight")]
    assert 0 < counts[1] < counts[3]
    warned = [(tmp_path / name / "warnings.jsonl").read_text() for name in ("straight", "broken")]
    assert warned[0] == warned[1]
    assert "gave no score" in warned[0]


def test_a_kl_above_its_limit_stops_the_run(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    config = make_config(tiny_policy, tmp_path)
    config = replace(config, algo=replace(config.algo, kl="k3_loss", kl_coef=0.01, kl_stop=0.5))
    trust = rl.Trust(config, ProbeResult(True, 0.0), None)
    values = {"rl/staleness": 0.0, "rl/groups_with_signal": 1.0, "rl/correct": 0.5}
    trust.check(1, values | {"rl/kl": 0.5})
    with pytest.raises(UserError, match=r"the KL to the reference is 0\.510 nats per token"):
        trust.check(2, values | {"rl/kl": 0.51})


def test_the_rest_of_a_step_is_what_the_loss_does_not_use() -> None:
    problems = [Problem(uid=str(n), task="t", prompt="", answer="", solution="") for n in range(4)]
    groups = [Group(problem=problem, samples=()) for problem in problems]
    collected: Any = SimpleNamespace(rollout=SimpleNamespace(groups=groups), used=(0, 2))
    assert [group.problem.uid for group in rl.rest_of(collected)] == ["1", "3"]


def test_speed_divides_tokens_by_the_time_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl, "step_metrics", lambda *_: {})
    monkeypatch.setattr(rl.time, "monotonic", lambda: 110.0)
    samples = [SimpleNamespace(completion_ids=(1,) * n) for n in (2, 4)]
    rollout = SimpleNamespace(
        groups=[SimpleNamespace(samples=samples)], generate_seconds=3.0, reward_seconds=0.5
    )
    stubs: Any = SimpleNamespace(
        monitor=None, wait=lambda: 0.25, sync_metrics=dict, num_tokens_read=50, rollout=rollout
    )
    # Ten seconds in all; sampled after six, so that four were training.
    found = rl.speed(stubs, stubs, stubs, stubs, torch.device("cpu"), 100.0, 106.0)
    assert found["rl/train_seconds"] == 4.0
    assert found["rl/overlap"] == 0.25
    assert found["rl/tokens_per_second"] == pytest.approx(6 / 10)
    assert found["rl/generate_tokens_per_second"] == pytest.approx(6 / 3)
    assert found["rl/train_tokens_per_second"] == pytest.approx(50 / 4)


def test_staleness_is_how_many_steps_ago_it_was_sampled(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rl, "rollout_metrics", lambda *_: {})
    monkeypatch.setattr(rl, "age_metrics", lambda *_: {})
    collected: Any = SimpleNamespace(step=4, rollout=None, num_refilled=0)
    found = rl.sampled_metrics(collected, make_config(tiny_policy, tmp_path), 6, None, rl.Failures([]))
    assert found == {"rl/staleness": 2.0}


@pytest.mark.usefixtures("no_figures", "few_problems")
def test_a_run_that_trained_nothing_says_so_first_and_its_report_has_what_was_warned_of(
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        base.REWARDS,
        "correct",
        replace(
            base.REWARDS["correct"], make=lambda schema, task: lambda problem, text: 0.0, is_reached=False
        ),
    )
    out = tmp_path / "run"
    optim = OptimConfig(lr=1e-3, warmup_steps=9)
    changes: Any = {"rewards": {"correct": 1.0}, "optim": optim, "num_steps": 2, "preflight": "warn"}
    main(make_config(tiny_policy, out, **changes))
    printed = capsys.readouterr()
    idle = "nothing was trained: in none of 2 steps had a group different rewards"
    assert f"whet: warning: {idle}" in printed.err
    report = (out / "report.md").read_text(encoding="utf-8")
    verdict = next(line for line in report.splitlines() if "Finished" in line)
    assert "Nothing was trained: in none of 2 steps" in verdict.partition("Finished")[0]
    assert "No warning." not in report
    for text in (idle, "optim.warmup_steps = 9 and the run has 2 steps", "preflight: "):
        assert text in report.replace("\\", "").partition("## Warnings")[2], text


def test_a_step_s_line_has_own_rewards_the_penalty_and_the_length_that_is_measured(
    tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    config = make_config(tiny_policy, tmp_path / "run", reward=("mine.py:pay=0.5",))
    plain: Any = SimpleNamespace(schema=SCHEMAS["none"])
    thinks: Any = SimpleNamespace(schema=SCHEMAS["r1"])
    paid = ("rl/reward/format", "rl/reward/pay")  # what the mean is made of, beside right answers
    assert rl.headline(config, plain)[2:5] == (*paid, "rl/completion_tokens")
    assert rl.headline(config, thinks)[2:5] == (*paid, "rl/thinking_tokens")
    soft = replace(config, reward=(), rewards={"correct": 1.0}, algo=AlgoConfig(overlong="soft"))
    assert rl.headline(soft, plain)[2] == "rl/reward/overlong"
