"""Overlap: it moves work in time and changes nothing else; it resumes, it hides what waits, and says how much."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks

from whet.algo.config import AlgoConfig, OffPolicyConfig
from whet.algo.packing import TrainingSequence, pack
from whet.config import from_dict
from whet.generate.engine import Completion, Engine, Request
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.generate.scoring import score_micro_batch
from whet.kernels.cpu.ops import panels
from whet.kernels.dispatch import runs_cpp
from whet.rewards import base
from whet.storage.checkpoint import saved_steps
from whet.tasks.made.arithmetic import Arithmetic
from whet.telemetry.spans import listening
from whet.train import rl
from whet.train.objective.objective import Objective
from whet.train.optim.step import OptimConfig, Optimizer
from whet.train.rl_config import RLConfig
from whet.train.rollout import source
from whet.train.rollout.order import EpochOrder
from whet.train.rollout.overlap import BackgroundSampler, OverlapConfig
from whet.train.rollout.rollout import Rollout, RolloutParams
from whet.train.session import Stopped
from whet.types import UserError

OLD = OffPolicyConfig(staleness=1)
ASYNC = OverlapConfig(mode="async")
TIMES = ("_seconds", "_per_second", "_gib", "rl/overlap")
THREAD = "whet-rollout"


def length_reward(schema: Any, task: Any) -> Callable[[Any, str], float]:
    """Scores of many values, so that nearly every group teaches."""

    def score(problem: Any, text: str) -> float:
        return 1.0 if schema.format_reward(text) == 1.0 else (len(text) % 7) / 10

    return score


PROBLEMS = {split: tuple(Arithmetic().problems(split)[:60]) for split in ("train", "dev", "test")}


@pytest.fixture(autouse=True)
def quick_scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few problems, made once; rewards that differ; and no thread that outlives its run."""
    monkeypatch.setattr(Arithmetic, "problems", lambda self, split: list(PROBLEMS[split]))
    monkeypatch.setitem(base.REWARDS, "format", base.Preset(length_reward, best=1.0, worst=0.0))
    yield
    assert not [t.name for t in threading.enumerate() if t.name.startswith(THREAD)], (
        "a thread was left behind"
    )


def make_config(policy: PolicyConfig, folder: Path, **changes: Any) -> RLConfig:
    """A run of a second; eight rows at once, so that groups end one after the other."""
    config = RLConfig(
        out=str(folder),
        policy=replace(policy, max_rows=8),
        rewards={"correct": 1.0, "format": 0.5},
        sampling=SamplingParams(max_new_tokens=14),
        optim=OptimConfig(lr=1e-3, warmup_steps=2, token_budget=150),
        num_steps=3,
        num_prompts=6,
        group_size=4,
        save_every=100,
    )
    return replace(config, **changes)


def run(config: RLConfig) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Train; return the weights and the metrics."""
    policy = rl.train(config)
    rows = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    return {n: p.detach() for n, p in policy.model.named_parameters()}, [json.loads(row) for row in rows]


def untimed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{n: v for n, v in row.items() if n[:3] == "rl/" and not n.endswith(TIMES)} for row in rows]


def samples(config: RLConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.out) / "samples.jsonl").read_text().splitlines()]


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[float]:
    return [float((one[name] - other[name]).abs().max()) for name in one]


@pytest.mark.ci
@pytest.mark.parametrize("changes", [{}, {"staleness": 2, "refill": True}], ids=["one", "two"])
def test_async_is_a_run_of_that_staleness_bit_for_bit(
    changes: dict[str, Any], tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    common: dict[str, Any] = {
        "off_policy": OffPolicyConfig(staleness=changes.get("staleness", 1)),
        "num_steps": 5,
    }
    if "refill" in changes:
        common |= {
            "algo": AlgoConfig(uninformative="refill", max_refills=2),
            "group_size": 2,
        }
    beside = make_config(tiny_policy, tmp_path / "async", overlap=ASYNC, **common)
    alone = make_config(tiny_policy, tmp_path / "off", **common)
    (weights, rows), (expected, wanted) = run(beside), run(alone)
    assert max(differences(weights, expected)) == 0.0
    assert untimed(rows) == untimed(wanted)
    assert samples(beside) == samples(alone)
    assert rows[-1]["rl/staleness"] == changes.get("staleness", 1)
    assert max(row["rl/ratio_drift"] for row in rows) > 0  # the samples are of other weights
    assert any(row["rl/groups_refilled"] for row in rows) == ("refill" in changes)
    assert [row["rl/overlap"] for row in wanted] == [0.0] * 5
    assert all(row["rl/overlap"] > 0 for row in rows[: 5 - changes.get("staleness", 1)])
    assert rows[-1]["rl/overlap"] == 0.0  # nothing more to draw


class CrashError(Exception):
    """Stands for a crash."""


@pytest.mark.ci
def test_a_killed_run_resumes_bitwise(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        tiny_policy, tmp_path / "straight", overlap=ASYNC, off_policy=OLD, num_steps=4, save_every=2
    )
    straight, rows = run(config)
    broken = replace(config, out=str(tmp_path / "broken"))
    update = Objective.update

    def fail(*arguments: Any, **options: Any) -> Any:
        if options["step"] == 3:
            raise CrashError
        return update(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Objective, "update", fail)
        with pytest.raises(CrashError):
            rl.train(broken)
    assert saved_steps(tmp_path / "broken") == [2]
    weights = {n: p.detach() for n, p in rl.train(broken, resume=True).model.named_parameters()}
    assert max(differences(weights, straight)) == 0.0
    found = [json.loads(row) for row in (tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()]
    assert untimed(found) == untimed(rows)
    assert samples(broken) == samples(config)


@pytest.mark.ci
@pytest.mark.parametrize("staleness", [0, 1], ids=["off", "stale"])
def test_a_signal_ends_the_sampling_and_the_run_goes_on_bitwise(
    staleness: int,
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing of the step is kept; the one before it is saved, although nothing else asked for that."""
    old = OffPolicyConfig(staleness=staleness)
    config = make_config(tiny_policy, tmp_path / "straight", off_policy=old)
    straight, _ = run(config)
    broken = replace(config, out=str(tmp_path / "broken"))
    begin, decode, seen = source.RolloutSource.next, Engine.decode, [0, 0]

    def next_step(self: Any, step: int) -> Any:
        seen[0] = step
        return begin(self, step)

    def decode_once(*arguments: Any) -> None:
        decode(*arguments)
        seen[1] += seen[0] == 1
        if seen == [1, 3]:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)  # the main thread is told when it runs next

    with monkeypatch.context() as patch:
        patch.setattr(source.RolloutSource, "next", next_step)
        patch.setattr(Engine, "decode", decode_once)
        with pytest.raises(Stopped) as stopped:
            rl.train(broken)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert seen[1] <= 3
    assert saved_steps(tmp_path / "broken") == [1]
    assert "after step 1 of 3, which is saved; go on with: whet rl" in capfd.readouterr().out
    weights = {n: p.detach() for n, p in rl.train(broken, resume=True).model.named_parameters()}
    assert max(differences(weights, straight)) == 0.0
    assert samples(broken) == samples(config)


def test_a_signal_in_the_first_step_leaves_a_run_that_can_begin_again(
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = make_config(tiny_policy, tmp_path / "run", num_steps=1)
    decode = Engine.decode

    def decode_once(*arguments: Any) -> None:
        decode(*arguments)
        if len(
            list(tmp_path.glob("run/checkpoints/protocol"))
        ):  # the probe before the first step decodes, too
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "decode", decode_once)
        with pytest.raises(Stopped):
            rl.train(config)
    assert saved_steps(tmp_path / "run") == []
    assert "in its first step: nothing is saved yet; go on with: whet rl" in capfd.readouterr().out
    rl.train(config, resume=True)
    assert saved_steps(tmp_path / "run") == [1]


def train_on_ranks(folder: str, policy: PolicyConfig) -> float:
    """Run on this rank with overlap and what that is compared with; return the largest difference."""
    base.REWARDS["format"] = base.Preset(length_reward, best=1.0, worst=0.0)
    Arithmetic.problems = lambda self, split: list(PROBLEMS[split])  # type: ignore[method-assign]
    plain, beside = (
        run(make_config(policy, Path(folder) / overlap.mode, overlap=overlap, off_policy=OLD, num_steps=2))[0]
        for overlap in (OverlapConfig(), ASYNC)
    )
    return max(differences(plain, beside))


@pytest.mark.ci
def test_two_ranks_overlap_as_well(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    assert run_ranks(2, train_on_ranks, str(tmp_path), tiny_policy) == [0.0, 0.0]


class Heard:
    """Notes ranges, and whether the main thread is in them."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bool]] = []

    def enter(self, name: str) -> None:
        self._note("+", name)

    def exit(self, name: str) -> None:
        self._note("-", name)

    def _note(self, sign: str, name: str) -> None:
        self.told.append((sign + name, threading.current_thread() is threading.main_thread()))


def test_the_rollout_is_hidden_behind_the_update(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, decode = Objective.update, Engine.decode
    heard = Heard()

    def slow_update(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.6)
        return update(*arguments, **named)

    def slow_decode(*arguments: Any) -> None:
        time.sleep(0.005)
        decode(*arguments)

    monkeypatch.setattr(Objective, "update", slow_update)
    monkeypatch.setattr(Engine, "decode", slow_decode)
    config = make_config(tiny_policy, tmp_path / "run", overlap=ASYNC, off_policy=OLD, num_steps=2)
    with listening(heard):
        _, rows = run(config)
    # 3 * 14 decode steps sleep for 0.2 s of the update's 0.6 s.
    assert rows[0]["rl/overlap"] > 0.5
    assert heard.told.count(("+async_next_rollout", False)) == heard.told.count(("+policy_update", True)) == 1
    assert ("+rollout_generation", False) in heard.told


@pytest.mark.ci
def test_what_goes_wrong_beside_is_told_in_one_line(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(schema: Any, task: Any) -> Callable[[Any, str], float]:
        score, count = length_reward(schema, task), iter(range(10**6))
        return lambda problem, text: float("nan") if next(count) > 250 else score(problem, text)

    monkeypatch.setitem(base.REWARDS, "format", base.Preset(broken, best=1.0, worst=0.0))
    config = make_config(tiny_policy, tmp_path / "run", overlap=ASYNC, off_policy=OLD, num_steps=30)
    with pytest.raises(UserError, match="reward 'format' returned nan"):
        rl.train(config)


def test_requests_are_handed_over_as_they_end(tiny_policy: PolicyConfig) -> None:
    policy = load_policy(tiny_policy, seed=3)
    requests = [
        Request(prompt_ids=policy.prompt_ids(problem), seeds=tuple(range(9 * place, 9 * place + 3)))
        for place, problem in enumerate(Arithmetic().problems("train")[:7])
    ]
    params = SamplingParams(max_new_tokens=20)
    expected = policy.engine().generate(requests, params)
    assert {done.finish_reason for row in expected for done in row} == {"stop", "length"}
    for num_rows in (1, 4, 64):
        found: dict[int, list[Completion]] = {}
        engine = load_policy(replace(tiny_policy, max_rows=num_rows), seed=3).engine()
        assert engine.generate(requests, params, on_ended=found.__setitem__) == expected
        assert found == dict(enumerate(expected))
    assert policy.engine().generate([], params, on_ended=found.__setitem__) == []


def test_a_copy_keeps_old_weights_until_it_is_refreshed(tiny_policy: PolicyConfig) -> None:
    policy = load_policy(tiny_policy, seed=0)
    sequence = TrainingSequence(prompt_ids=(3, 4), completion_ids=(5, 6, 7))
    (micro,) = pack([sequence], token_budget=100).micro_batches

    @torch.no_grad()
    def scores(model: Any) -> torch.Tensor:
        return score_micro_batch(model, micro)[0]

    beside = BackgroundSampler(policy)
    before = scores(policy.model)
    assert torch.equal(scores(beside.policy.model), before)
    if runs_cpp(policy.model.head_weight):
        panels(beside.policy.model.head_weight, torch.float32)
    optim = OptimConfig(lr=0.1, warmup_steps=0)
    score_micro_batch(policy.model, micro)[0].sum().backward()
    Optimizer(policy.model, optim).step(0.1)
    after = scores(policy.model)
    assert not torch.equal(after, before)
    assert torch.equal(scores(beside.policy.model), before)
    beside.refresh()
    assert torch.equal(scores(beside.policy.model), after)  # packed weights are packed anew, too
    assert all(p.grad is None for p in beside.policy.model.parameters())
    beside.close()


def test_threads_are_shared_and_given_back(tiny_policy: PolicyConfig) -> None:
    beside = BackgroundSampler(load_policy(tiny_policy, seed=0))
    for whole, half in ((2, 1), (1, 1), (7, 3)):
        torch.set_num_threads(whole)
        with beside.sharing_threads():
            assert torch.get_num_threads() == half
        assert torch.get_num_threads() == whole
    beside.close()


def test_prompts_are_accounted_for_while_some_are_drawn(
    tiny_policy: PolicyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "collect_groups", lambda *arguments, **named: Rollout([], [], 0.0, 0.0))
    drawn = source.RolloutSource(
        load_policy(tiny_policy, seed=0),
        Arithmetic(),
        [],
        EpochOrder(PROBLEMS["train"], seed=0),
        algo=AlgoConfig(),
        weights={"correct": 1.0},
        num_prompts=0,
        params=RolloutParams(group_size=2, sampling=SamplingParams(max_new_tokens=4)),
        staleness=1,
        num_steps=3,
        seed=0,
        overlap=ASYNC,
    )
    for step in range(3):
        assert drawn.next(step).step == max(0, step - 1)
        assert len(drawn.state()["pending"][0]) == (step < 2)  # a checkpoint waits for what is being drawn
    drawn.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlap": ASYNC}, "async with off_policy.staleness = 0.*set off_policy.staleness to 1"),
        ({"overlap": ASYNC, "off_policy": OLD, "optim": OptimConfig(compile=True)}, "with optim.compile"),
    ],
)
def test_what_cannot_be_overlapped_is_refused(
    changes: dict[str, Any], message: str, tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(tiny_policy, tmp_path, **changes)


def test_the_mode_of_an_earlier_version_is_refused_unless_it_was_off() -> None:
    for data, what in (
        ({"mode": "stream", "num_parts": 4}, "mode = stream"),
        ({"num_parts": 2}, "num_parts"),
    ):
        with pytest.raises(
            UserError, match=f"config: {what} is gone: use mode = async with off_policy.staleness"
        ):
            from_dict(OverlapConfig, data, where="config")
    assert from_dict(OverlapConfig, {"mode": "async", "num_parts": 4}, where="config") == ASYNC
