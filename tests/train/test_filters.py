"""Reinforcement learning on filtered rollouts: the ratio is 1 on policy, and old samples keep their sets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from many_rewards import reward_lengths

from whet.algo.config import AlgoConfig, OffPolicyConfig
from whet.generate.policy import Policy, PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.inspect.replay.replay import ReplayConfig
from whet.inspect.replay.replay import main as replay
from whet.recipes.rl import ALGORITHMS
from whet.storage.checkpoint import saved_steps
from whet.train.objective.objective import Objective
from whet.train.optim.step import OptimConfig
from whet.train.rl import heat_warnings, train
from whet.train.rl_config import RLConfig
from whet.train.rollout.overlap import OverlapConfig
from whet.types import Group, MicroBatch

pytestmark = pytest.mark.usefixtures("few_problems")

KEEP = AlgoConfig(uninformative="keep", entropy_coef=0.01)
FILTERS: dict[str, dict[str, Any]] = {"top-p": {"top_p": 0.7}, "top-k": {"top_k": 6}, "min-p": {"min_p": 0.3}}
SETTINGS: dict[str, dict[str, Any]] = {
    "kl, checkpointed": {
        "algo": replace(KEEP, kl="k3_loss", kl_coef=0.1),
        "optim": OptimConfig(lr=1e-3, warmup_steps=0, token_budget=300, checkpoint_layers=True),
    },
    "minibatches": {"algo": replace(KEEP, num_minibatches=2, num_epochs=2)},
    "critic": {"algo": replace(ALGORITHMS["ppo"](), uninformative="keep")},
    "stale": {"off_policy": OffPolicyConfig(staleness=2, proximal="recomputed", correction="token_truncate")},
    "async": {"overlap": OverlapConfig(mode="async"), "off_policy": OffPolicyConfig(staleness=1)},
}


def make_config(policy: PolicyConfig, folder: Path, **changes: Any) -> RLConfig:
    return replace(
        RLConfig(
            out=str(folder),
            policy=policy,
            rewards={"format": 1.0, "correct": 1.0},
            sampling=SamplingParams(max_new_tokens=12, top_p=0.7),
            optim=OptimConfig(lr=1e-3, warmup_steps=0, token_budget=150),
            algo=KEEP,
            num_steps=4,
            num_prompts=4,
            group_size=4,
            save_every=2,
            preflight="warn",
        ),
        **changes,
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("filters", FILTERS)
def test_the_ratio_is_exactly_one(
    filters: str, tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward_lengths(monkeypatch)
    sampling = SamplingParams(temperature=0.9, max_new_tokens=12, **FILTERS[filters])
    train(make_config(tiny_policy, tmp_path, sampling=sampling))
    for row in rows(tmp_path):
        assert row["rl/ratio_drift"] == row["rl/logprob_gap_max"] == 0.0
        assert row["rl/grad_norm"] > 0
        assert 0 < row["rl/entropy"] < 3


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.ci] * (name not in ("async", "minibatches")))
        for name in SETTINGS
    ],
)
def test_runs_keep_their_sets_and_resume_exactly(
    name: str, tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two halves with the samples that wait between them, or one run: the same weights, to the bit."""
    reward_lengths(monkeypatch)
    seen: list[float] = []
    plain = Policy.score

    def score(self: Policy, micro: MicroBatch, **options: Any) -> Any:
        result = plain(self, micro, **options)
        # A log-probability over a token's own set is never below the sampler's by more than the weights moved.
        assert micro.kept is not None
        assert len(micro.kept.starts) == len(micro.targets_M) + 1
        seen.append(float((result[0].detach() - micro.sampler_logprobs_M).abs().max()))
        return result

    monkeypatch.setattr(Policy, "score", score)
    config = make_config(tiny_policy, tmp_path / "straight", **SETTINGS[name])
    whole = train(config)
    if name in ("kl, checkpointed", "critic"):
        assert all(row["rl/logprob_gap_max"] == 0.0 for row in rows(tmp_path / "straight"))
    elif name == "minibatches":
        assert all(
            row["rl/logprob_gap_max"] == 0.0 and row["rl/ratio_spread"] > 0
            for row in rows(tmp_path / "straight")
        )
    else:
        assert rows(tmp_path / "straight")[0]["rl/logprob_gap_max"] == 0.0
        assert max(seen) > 0
    assert max(seen) < 1.0
    halves = replace(config, out=str(tmp_path / "halves"))
    update = Objective.update

    def stop(self: Objective, groups: Sequence[Group], *arguments: Any, step: int, **options: Any) -> Any:
        if step == 3:
            raise RuntimeError("stopped")
        return update(self, groups, *arguments, step=step, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Objective, "update", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            train(halves)
    assert saved_steps(tmp_path / "halves") == [2]
    again = train(halves, resume=True)
    for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_recorded_step_is_replayed_with_its_sets(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(make_config(tiny_policy, tmp_path, num_steps=2))
    capsys.readouterr()
    replay(ReplayConfig(run=str(tmp_path)))
    said = capsys.readouterr().out
    assert "bitwise" in said or "equal" in said, said


def test_episodes_have_sets_for_the_policys_tokens_alone(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    caller = replace(
        tiny_policy,
        model=replace(tiny_policy.model, max_positions=96),
        tools=("calculator",),
        alphabet="0123456789+=,eor: ",
    )
    sampling = SamplingParams(max_new_tokens=80, min_p=0.2)
    train(make_config(caller, tmp_path, sampling=sampling, group_size=12, num_steps=2))
    turns = [row.get("rl/turns", 1.0) for row in rows(tmp_path)]
    assert max(turns) > 1.0
    assert all(row["rl/ratio_drift"] < 1e-4 for row in rows(tmp_path))


def test_hot_sampling_is_warned_of(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert heat_warnings(1.5) == []
    train(
        make_config(
            tiny_policy, tmp_path, sampling=SamplingParams(temperature=2.5, max_new_tokens=4), num_steps=1
        )
    )
    assert "sampling.temperature = 2.5: above 1.5 rollouts turn into gibberish" in capsys.readouterr().out
