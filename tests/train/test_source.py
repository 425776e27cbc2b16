"""Where rollouts come from: their age, their control experiment, their punishment of length, their resume."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import make_group, new_policy, problems

from whet.algo.config import AlgoConfig, OffPolicyConfig
from whet.algo.packing import TrainingSequence, pack
from whet.eval.grade import Grade
from whet.generate.policy import PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.generate.scoring import score_micro_batch
from whet.rewards import base
from whet.schema import SCHEMAS
from whet.tasks.made.arithmetic import Arithmetic
from whet.train import rl, setup
from whet.train.objective.objective import Objective
from whet.train.optim.step import OptimConfig
from whet.train.rl_config import RLConfig
from whet.train.rollout import source
from whet.train.rollout.rollout import HARD_PENALTY, Rollout, rollout_metrics
from whet.train.rollout.source import Collected
from whet.types import Group, UserError

pytestmark = pytest.mark.usefixtures("few_problems")
MAX_NEW = 14


@pytest.fixture
def config(tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RLConfig:
    """A run of a second, whose format reward takes many values so that groups teach."""

    def make(schema: Any, task: Any) -> Any:
        def score(problem: Any, text: str) -> float:
            return 1.0 if schema.format_reward(text) == 1.0 else (len(text) % 7) / 10

        return score

    monkeypatch.setitem(base.REWARDS, "format", base.Preset(make, best=1.0, worst=0.0))
    return RLConfig(
        out=str(tmp_path / "run"),
        policy=tiny_policy,
        rewards={"correct": 1.0, "format": 0.5},
        sampling=SamplingParams(max_new_tokens=MAX_NEW),
        optim=OptimConfig(lr=1e-2, warmup_steps=0, token_budget=200),
        num_steps=5,
        num_prompts=2,
        group_size=4,
        save_every=5,
    )


def rows(config: RLConfig, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.out) / f"{name}.jsonl").read_text().splitlines()]


def rescored(policy: Any, groups: list[Group]) -> float:
    """Return the largest difference of the samples' log-probabilities to those of the policy as it is now."""
    sequences = [
        TrainingSequence(
            prompt_ids=s.prompt_ids, completion_ids=s.completion_ids, sampler_logprobs=s.sampler_logprobs
        )
        for group in groups
        for s in group.samples
    ]
    gaps = []
    for micro in pack(sequences, token_budget=400).micro_batches:
        with torch.no_grad():
            logprobs_M, _ = score_micro_batch(policy.model, micro)
        gaps.append(float((logprobs_M - micro.sampler_logprobs_M).abs().max()))
    return max(gaps)


@pytest.mark.parametrize("staleness", [0, 2])
def test_samples_are_of_the_weights_some_steps_ago(
    staleness: int, config: RLConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, off_policy=OffPolicyConfig(staleness=staleness))
    snapshots: list[dict[str, torch.Tensor]] = []
    ages: list[int] = []
    update, collect = Objective.update, source.collect_groups
    num_collected = 0

    def checked(self: Objective, groups: list[Group], *arguments: Any, **options: Any) -> Any:
        step, model = options["step"], self._policy.model
        snapshots.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        exact = []
        for number, weights in enumerate(snapshots):
            model.load_state_dict(weights)
            if rescored(self._policy, groups) == 0.0:
                exact.append(number)
        model.load_state_dict(snapshots[-1])
        assert len(exact) == 1
        ages.append(step - exact[0])
        return update(self, groups, *arguments, **options)

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_collected
        num_collected += 1
        return collect(*arguments, **options)

    monkeypatch.setattr(Objective, "update", checked)
    monkeypatch.setattr(source, "collect_groups", counted)
    rl.train(config)
    assert ages == [min(step, staleness) for step in range(5)]
    assert [row["rl/staleness"] for row in rows(config)] == ages
    assert num_collected == 5  # nothing is sampled that no step will train on
    drifts = [row["rl/ratio_drift"] for row in rows(config)]
    assert [drift > 0 for drift in drifts] == [age > 0 for age in ages]  # and old samples stop no run


def test_waiting_samples_survive_json() -> None:
    policy = new_policy()
    group = make_group(
        policy, problems()[0], [{"correct": 1.0, "format": None}, {"correct": 0.0, "format": 0.5}]
    )
    graded = [a_grade(True), a_grade(False)]
    collected = Collected(3, Rollout([group], [graded], 1.5, 0.25), (0,), 4, 1)
    assert Collected.from_json(json.loads(json.dumps(collected.to_json()))) == collected


def test_a_coin_decides_every_reward_of_the_control(config: RLConfig, tmp_path: Path) -> None:
    runs = [
        replace(config, out=str(tmp_path / name), control="random_reward", num_steps=3, num_prompts=4)
        for name in "ab"
    ]
    for run in runs:
        rl.train(run)
    samples = rows(runs[0], "samples")
    assert samples == rows(runs[1], "samples")
    assert all(s["rewards"] == {"random": s["reward"]} for s in samples)
    counts = Counter(s["reward"] for s in samples)
    assert set(counts) == {0.0, 1.0}
    assert abs(counts[1.0] - 24) <= 14  # 48 fair coins: 4 standard deviations
    by_group: dict[tuple[int, str], set[float]] = {}
    for s in samples:
        by_group.setdefault((s["step"], s["uid"]), set()).add(s["reward"])
    assert sum(len(found) == 2 for found in by_group.values()) >= len(by_group) / 2
    for row in rows(runs[0]):
        assert row["rl/signal/random"] == pytest.approx(1.0)
        assert "rl/reward/correct" not in row
        assert 0 <= row["rl/correct"] <= 1


def test_the_control_still_measures_right_answers(config: RLConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arithmetic, "is_correct", lambda self, problem, answer: True)
    monkeypatch.setattr(setup, "preflight", lambda *arguments, **options: [])
    rl.train(replace(config, control="random_reward", num_steps=1))
    (row,) = rows(config)
    assert row["rl/correct"] == 1.0
    assert 0 < row["rl/reward_mean"] < 1


def test_hard_punishment_is_for_answers_that_never_came(config: RLConfig) -> None:
    rl.train(replace(config, algo=AlgoConfig(overlong="hard", uninformative="keep"), num_steps=2))
    seen = set()
    for s in rows(config, "samples"):
        is_silent = SCHEMAS["think_answer"].parse(s["completion"]).answer is None
        punished = s["finish_reason"] == "length" and is_silent
        assert s["rewards"]["overlong"] == (HARD_PENALTY if punished else 0.0)
        assert s["reward"] == pytest.approx(
            s["rewards"]["correct"] + 0.5 * s["rewards"]["format"] + s["rewards"]["overlong"]
        )
        seen.add(s["rewards"]["overlong"])
    assert seen == {0.0, -0.5}
    assert "rl/signal/overlong" in rows(config)[0]


def test_only_groups_that_the_loss_reads_have_a_signal(
    config: RLConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlong = filter a step whose completions are all cut off is dead, whatever their rewards."""
    collect = source.collect_groups

    def cut_off(*arguments: Any, **options: Any) -> Any:
        rollout = collect(*arguments, **options)
        rollout.groups[:] = [
            replace(group, samples=tuple(replace(s, finish_reason="length") for s in group.samples))
            for group in rollout.groups
        ]
        return rollout

    monkeypatch.setattr(source, "collect_groups", cut_off)
    algo = AlgoConfig(overlong="filter", uninformative="keep")
    with pytest.raises(UserError, match="2 steps in a row without a signal"):
        rl.train(replace(config, algo=algo, max_dead_steps=2))
    for row in rows(config):
        assert row["rl/reward_std"] > 0
        assert row["rl/groups_with_signal"] == row["rl/updates"] == row["rl/grad_norm"] == 0


def test_refilled_groups_are_sampled_before_the_update(
    config: RLConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    algo = AlgoConfig(uninformative="refill", max_refills=3)
    rl.train(replace(config, algo=algo, rewards={"correct": 1.0}, num_steps=1))
    (row,) = rows(config)
    assert row["rl/groups_refilled"] == 3 * 2  # nothing is ever right here
    assert row["rl/groups_with_signal"] == row["rl/updates"] == 0


def hand_rollout(table: list[list[tuple[float | None, float | None]]], right: list[list[bool]]) -> Rollout:
    policy = new_policy()
    groups = [
        make_group(policy, problem, [{"correct": c, "format": f} for c, f in row])
        for problem, row in zip(problems(), table, strict=False)
    ]
    grades = [[a_grade(is_right) for is_right in row] for row in right]
    return Rollout(groups, grades, 0.0, 0.0)


def a_grade(is_right: bool) -> Grade:
    verdict = "perfect" if is_right else "none"
    return Grade(answer="7" if is_right else None, is_correct=is_right, verdict=verdict, thinking_tokens=2)


def test_the_metrics_of_a_rollout_by_hand() -> None:
    table: list[list[tuple[float | None, float | None]]] = [
        [(1.0, 0.0), (0.0, 1.0)],  # weighted: 1 and 0.5
        [(1.0, 1.0), (1.0, 1.0)],
        [(0.0, 0.0), (0.0, None)],
    ]
    values = rollout_metrics(
        hand_rollout(table, [[True, False], [True, True], [False, False]]),
        AlgoConfig(scale="none"),
        {"correct": 1.0, "format": 0.5},
        num_refilled=5,
    )
    assert values["rl/all_right_groups"] == values["rl/all_wrong_groups"] == pytest.approx(1 / 3)
    assert values["rl/zero_variance_groups"] == pytest.approx(2 / 3)
    assert values["rl/groups_refilled"] == 5
    assert values["rl/unscorable"] == 1
    assert values["rl/reward_mean"] == pytest.approx((1 + 0.5 + 1.5 + 1.5 + 0) / 5)
    assert values["rl/reward/format"] == pytest.approx(3 / 5)
    assert values["rl/correct"] == pytest.approx(0.5)
    # Deviations in the first group: correct +-0.5, format -+0.25, total +-0.25.
    assert values["rl/signal/correct"] == pytest.approx(0.5 * 0.25 / 0.25**2)
    assert values["rl/signal/format"] == pytest.approx(-0.25 * 0.25 / 0.25**2)
    assert values["rl/cancellation"] == pytest.approx(1 - 0.25**2 / (0.5**2 + 0.25**2))
    assert not math.isnan(values["rl/repetition"])


def test_a_group_of_one_has_no_comparison_to_report() -> None:
    values = rollout_metrics(
        hand_rollout([[(1.0, 0.0)], [(0.0, 1.0)]], [[True], [False]]),
        AlgoConfig(baseline="none", scale="none", uninformative="keep"),
        {"correct": 1.0, "format": 0.5},
        num_refilled=0,
    )
    assert values["rl/reward_mean"] == pytest.approx(0.75)
    assert not [name for name in values if "signal" in name or "variance" in name or "cancel" in name]


def test_signal_shares_are_those_of_the_advantages() -> None:
    # Group 1 differs in correct alone, group 2 in format alone (weight 0.1): 99 % and 1 % of the rewards' spread.
    table: list[list[tuple[float | None, float | None]]] = [
        [(1.0, 1.0), (0.0, 1.0)],
        [(0.0, 1.0), (0.0, 0.0)],
    ]
    weights = {"correct": 1.0, "format": 0.1}
    right = [[True, False], [False, False]]
    plain = rollout_metrics(hand_rollout(table, right), AlgoConfig(scale="none"), weights, num_refilled=0)
    assert plain["rl/signal/correct"] == pytest.approx(1 / 1.01)
    # Divided by its own standard deviation each group pulls with the same force.
    for algo in (AlgoConfig(), AlgoConfig(uninformative="keep")):
        scaled = rollout_metrics(hand_rollout(table, right), algo, weights, num_refilled=0)
        assert scaled["rl/signal/correct"] == pytest.approx(0.5)
        assert scaled["rl/signal/format"] == pytest.approx(0.5)
    # GDPO: each reward is normalised by itself before its weight counts.
    algo = AlgoConfig(multi_reward="normalise", eps=0.0)
    normalised = rollout_metrics(hand_rollout(table, right), algo, weights, num_refilled=0)
    assert normalised["rl/signal/correct"] == pytest.approx(1 / 1.01)
    both: list[list[tuple[float | None, float | None]]] = [[(1.0, 0.01), (0.0, 0.0)]]
    even = rollout_metrics(hand_rollout(both, [[True, False]]), algo, {"correct": 1.0, "format": 1.0}, 0)
    assert even["rl/signal/format"] == pytest.approx(0.5)
