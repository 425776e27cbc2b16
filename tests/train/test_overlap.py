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

from whet import __main__
from whet.algo.config import AlgoConfig, OffPolicyConfig, ValueConfig
from whet.algo.packing import TrainingSequence, pack
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
from whet.train.rollout.overlap import BackgroundSampler, OverlapConfig, part_groups
from whet.train.rollout.rollout import Rollout, RolloutParams
from whet.train.session import Stopped
from whet.types import Group, UserError

OLD = OffPolicyConfig(staleness=1)
STREAM, ASYNC = OverlapConfig(mode="stream"), OverlapConfig(mode="async")
TIMES = ("_seconds", "_per_second", "_gib", "rl/overlap")
THREAD = "whet-rollout"
# Gradients are float32 sums in another order, relative 1e-6; AdamW takes full steps even where one is nearly 0.
CLOSE = 1e-3


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


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], policy: PolicyConfig) -> float:
    """Return how far two runs' weights are apart, as a share of how far training moved them."""
    start = dict(load_policy(policy, seed=0).model.named_parameters())
    gap, moved = (
        torch.cat([(a[name] - b[name]).detach().flatten() for name in one]).norm()
        for a, b in ((one, other), (start, other))
    )
    return float(gap / moved)


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[float]:
    return [float((one[name] - other[name]).abs().max()) for name in one]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algo": AlgoConfig(kl="k2_loss", kl_coef=0.3, entropy_coef=0.01, entropy_coef_final=0.1)},
        {
            "algo": AlgoConfig(
                baseline="none",
                scale="none",
                uninformative="keep",
                aggregation="sequence_mean",
                overlong="filter",
            ),
            "overlap": replace(STREAM, num_parts=6),
        },
    ],
    ids=["plain", "kl", "filter"],
)
def test_stream_computes_what_off_does(
    changes: dict[str, Any], tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    changes = {"overlap": STREAM} | changes
    streamed, rows = run(make_config(tiny_policy, tmp_path / "stream", **changes))
    plain, expected = run(
        make_config(tiny_policy, tmp_path / "off", **changes | {"overlap": OverlapConfig()})
    )
    assert 0 < apart(streamed, plain, tiny_policy) < CLOSE
    for row, wanted in zip(untimed(rows), untimed(expected), strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        assert row["rl/ratio_drift"] == 0.0  # on-policy, bitwise
    assert [row["rl/overlap"] for row in expected] == [0.0] * 3
    assert all(0 < row["rl/overlap"] <= 1 for row in rows)

    def by_sample(name: str) -> list[dict[str, Any]]:
        found = samples(make_config(tiny_policy, tmp_path / name))
        return sorted(found, key=lambda s: (s["step"], s["uid"], s["index"], s["completion"]))

    assert [s["completion"] for s in by_sample("stream")] == [s["completion"] for s in by_sample("off")]


@pytest.mark.ci
def test_the_bits_of_stream_do_not_depend_on_time(
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fast, rows = run(make_config(tiny_policy, tmp_path / "fast", overlap=STREAM))
    kept: list[list[Group]] = []
    decode, add, update = Engine.decode, Objective.add, Objective.update

    def late(original: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slow(*arguments: Any, **named: Any) -> Any:
            time.sleep(seconds)
            return original(*arguments, **named)

        return slow

    def noted(self: Objective, groups: list[Group], *arguments: Any, **named: Any) -> Any:
        kept.append(groups)
        return update(self, groups, *arguments, **named)

    monkeypatch.setattr(Objective, "update", noted)
    for name, owner, original in (("decode", Engine, decode), ("add", Objective, add)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, late(original, 0.01))
            slow, slow_rows = run(make_config(tiny_policy, tmp_path / name, overlap=STREAM))
        assert max(differences(fast, slow)) == 0.0
        assert untimed(rows) == untimed(slow_rows)
        assert samples(make_config(tiny_policy, tmp_path / name)) == samples(
            make_config(tiny_policy, tmp_path / "fast")
        )
    # All groups at once, as a replay has them, are cut into the same parts.
    assert __main__.main(["replay", str(tmp_path / "fast")]) == 0
    assert "all stages bitwise equal" in capsys.readouterr().out
    config = make_config(tiny_policy, tmp_path / "again")
    policy = load_policy(config.policy, seed=0)
    objective = Objective(
        policy,
        config.algo,
        optim=config.optim,
        temperature=1.0,
        max_length=14,
        part_groups=part_groups(STREAM, config.num_prompts),
    )
    optimizer = Optimizer(policy.model, config.optim)
    for groups, row in zip(kept[:3], rows, strict=True):
        objective.update(groups, optimizer, row["rl/lr"])
    assert max(differences(fast, {n: p.detach() for n, p in policy.model.named_parameters()})) == 0.0


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
@pytest.mark.parametrize("overlap", [STREAM, ASYNC], ids=["stream", "async"])
def test_a_killed_run_resumes_bitwise(
    overlap: OverlapConfig, tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    off_policy = OLD if overlap is ASYNC else OffPolicyConfig()
    config = make_config(
        tiny_policy, tmp_path / "straight", overlap=overlap, off_policy=off_policy, num_steps=4, save_every=2
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
@pytest.mark.parametrize(
    ("overlap", "staleness"),
    [(OverlapConfig(), 0), (OverlapConfig(), 1), (STREAM, 0)],
    ids=["off", "stale", "stream"],
)
def test_a_signal_ends_the_sampling_and_the_run_goes_on_bitwise(
    overlap: OverlapConfig,
    staleness: int,
    tiny_policy: PolicyConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing of the step is kept; the one before it is saved, although nothing else asked for that."""
    old = OffPolicyConfig(staleness=staleness)
    config = make_config(tiny_policy, tmp_path / "straight", overlap=overlap, off_policy=old)
    straight, _ = run(config)
    broken = replace(config, out=str(tmp_path / "broken"))
    begin, decode, seen = source.RolloutSource.next, Engine.decode, [0, 0]

    def next_step(self: Any, step: int, *arguments: Any) -> Any:
        seen[0] = step
        return begin(self, step, *arguments)

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
    assert seen[1] <= 3 + (overlap is STREAM)  # in a thread the main one may be told a step later
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


def train_on_ranks(folder: str, policy: PolicyConfig) -> list[float]:
    """Run on this rank both modes and what they are compared with; return the largest differences."""
    base.REWARDS["format"] = base.Preset(length_reward, best=1.0, worst=0.0)
    Arithmetic.problems = lambda self, split: list(PROBLEMS[split])  # type: ignore[method-assign]
    off, new = OverlapConfig(), OffPolicyConfig()
    runs = [
        run(make_config(policy, Path(folder) / str(number), overlap=overlap, off_policy=old, num_steps=2))[0]
        for number, (overlap, old) in enumerate([(off, new), (STREAM, new), (off, OLD), (ASYNC, OLD)])
    ]
    return [apart(runs[0], runs[1], policy), max(differences(runs[2], runs[3]))]


@pytest.mark.ci
def test_two_ranks_overlap_as_well(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    for stream, old in run_ranks(2, train_on_ranks, str(tmp_path), tiny_policy):
        assert 0 < stream < CLOSE
        assert old == 0.0


@pytest.mark.ci
def test_episodes_of_several_turns_stream_too(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    shape = replace(tiny_policy.model, max_positions=128)
    policy = replace(tiny_policy, model=shape, tools=("calculator",), alphabet="0123456789+=,eor: ")
    config = make_config(policy, tmp_path / "stream", overlap=STREAM, num_steps=2, preflight="warn")
    streamed, _ = run(config)
    plain, _ = run(replace(config, out=str(tmp_path / "off"), overlap=OverlapConfig()))
    assert 0 < apart(streamed, plain, policy) < CLOSE


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


@pytest.mark.ci
def test_waiting_for_rewards_is_hidden(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are drawn two at a time, some 45 ms a pair; a group's reward sleeps for 50 ms."""
    asleep, decoding, drawing = 0.05, 0.005, threading.Event()
    slept = 0.0

    def sleeper(schema: Any, task: Any) -> Callable[[Any, str], float]:
        score = length_reward(schema, task)

        def slow(problem: Any, text: str) -> float:
            time.sleep(asleep / 4 if drawing.is_set() else 0.0)
            return score(problem, text)

        return slow

    decode = Engine.decode

    def slow_decode(*arguments: Any) -> None:
        nonlocal slept
        slept += decoding if drawing.is_set() else 0.0
        time.sleep(decoding)
        decode(*arguments)

    monkeypatch.setattr(Engine, "decode", slow_decode)
    monkeypatch.setitem(base.REWARDS, "format", base.Preset(sleeper, best=1.0, worst=0.0))
    seconds: dict[str, float] = {}
    for overlap in (STREAM, OverlapConfig()):
        config = make_config(
            tiny_policy,
            tmp_path / overlap.mode,
            overlap=overlap,
            num_steps=1,
            num_prompts=12,
            preflight="warn",
        )
        next_rollout, slept = rl.RolloutSource.next, 12 * asleep

        def timed(*arguments: Any, mode: str = overlap.mode, call: Any = next_rollout) -> Any:
            drawing.set()
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                seconds[mode] = time.perf_counter() - began
                drawing.clear()

        heard = Heard()
        with monkeypatch.context() as patch, listening(heard):
            patch.setattr(rl.RolloutSource, "next", timed)
            _, (row,) = run(config)
        drawn = heard.told.index(("-rollout_generation", overlap.mode == "off"))
        assert (("+policy_loss_backward", True) in heard.told[:drawn]) == (overlap.mode == "stream")
    # Off, the last: all that decoding and rewards sleep, one behind the other. Stream: the longer of both, and one pair
    # more.
    assert slept > 12 * asleep
    assert seconds["off"] >= slept
    assert seconds["stream"] < seconds["off"] - 0.2
    assert row["rl/overlap"] == 0.0


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
    for overlap, off_policy in ((STREAM, OffPolicyConfig()), (ASYNC, OLD)):
        config = make_config(
            tiny_policy, tmp_path / overlap.mode, overlap=overlap, off_policy=off_policy, num_steps=30
        )
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
        assert engine.generate(requests, params, on_ended=found.__setitem__, is_streamed=True) == expected
        assert found == dict(enumerate(expected))
        if num_rows == 64:  # all begin together: what ends first comes first
            longest = [max(len(done.ids) for done in found[place]) for place in found]
            assert longest != [max(len(done.ids) for done in row) for row in expected]
            assert [-(-n // 4) for n in longest] == sorted(-(-n // 4) for n in longest)
    assert policy.engine().generate([], params, on_ended=found.__setitem__) == []


def test_a_copy_keeps_old_weights_and_a_twin_follows(tiny_policy: PolicyConfig) -> None:
    policy = load_policy(tiny_policy, seed=0)
    sequence = TrainingSequence(prompt_ids=(3, 4), completion_ids=(5, 6, 7))
    (micro,) = pack([sequence], token_budget=100).micro_batches

    @torch.no_grad()
    def scores(model: Any) -> torch.Tensor:
        return score_micro_batch(model, micro)[0]

    with_copy, with_twin = (BackgroundSampler(policy, shares_weights=shares) for shares in (False, True))
    before = scores(policy.model)
    assert torch.equal(scores(with_copy.policy.model), before)
    assert torch.equal(scores(with_twin.policy.model), before)
    if runs_cpp(policy.model.head_weight):
        panels(with_twin.policy.model.head_weight, torch.float32)
    optim = OptimConfig(lr=0.1, warmup_steps=0)
    score_micro_batch(policy.model, micro)[0].sum().backward()
    Optimizer(policy.model, optim).step(0.1)
    after = scores(policy.model)
    assert not torch.equal(after, before)
    assert torch.equal(scores(with_twin.policy.model), after)  # packed weights are packed anew, too
    assert torch.equal(scores(with_copy.policy.model), before)
    with_copy.refresh()
    assert torch.equal(scores(with_copy.policy.model), after)
    assert with_twin.policy.model.head_weight.data_ptr() == policy.model.head_weight.data_ptr()
    for beside in (with_copy, with_twin):
        assert all(p.grad is None for p in beside.policy.model.parameters())
        beside.close()


def test_threads_are_shared_and_given_back(tiny_policy: PolicyConfig) -> None:
    beside = BackgroundSampler(load_policy(tiny_policy, seed=0), shares_weights=True)
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


CRITIC: dict[str, Any] = {"baseline": "value", "scale": "none", "uninformative": "keep"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algo": AlgoConfig(scale="batch")}, "algo.scale = batch"),
        ({"algo": AlgoConfig(whiten=True)}, "algo.whiten"),
        ({"algo": AlgoConfig(multi_reward="normalise")}, "algo.multi_reward = normalise"),
        ({"algo": AlgoConfig(**CRITIC), "value": ValueConfig(lr=0.1)}, "algo.baseline = value"),
        ({"algo": AlgoConfig(kl="k1_reward", kl_coef=0.1)}, "algo.kl = k1_reward"),
        ({"algo": AlgoConfig(entropy_top_share=0.2)}, "algo.entropy_top_share = 0.2"),
        ({"algo": AlgoConfig(uninformative="refill")}, "algo.uninformative = refill"),
        ({"algo": AlgoConfig(num_minibatches=2)}, r"algo.num_minibatches \* algo.num_epochs = 2"),
        ({"algo": AlgoConfig(num_epochs=3)}, r"algo.num_minibatches \* algo.num_epochs = 3"),
        ({"off_policy": OLD}, "off_policy.staleness = 1"),
        (
            {"off_policy": OffPolicyConfig(proximal="recomputed", correction="token_truncate")},
            "off_policy.proximal = recomputed",
        ),
        ({"optim": OptimConfig(compile=True)}, "with optim.compile"),
        ({"overlap": ASYNC}, "async with off_policy.staleness = 0.*set off_policy.staleness to 1"),
        ({"overlap": ASYNC, "off_policy": OLD, "optim": OptimConfig(compile=True)}, "with optim.compile"),
    ],
)
def test_what_cannot_be_overlapped_is_refused(
    changes: dict[str, Any], message: str, tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(tiny_policy, tmp_path, **{"overlap": STREAM} | changes)


def test_an_unread_or_impossible_number_of_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="num_parts = 0: expected 1 or more"):
        OverlapConfig(mode="stream", num_parts=0)
    with pytest.raises(ValueError, match="read with overlap.mode = stream only"):
        OverlapConfig(mode="async", num_parts=3)
    assert [part_groups(replace(STREAM, num_parts=n), 10) for n in (1, 3, 4, 10, 99)] == [10, 4, 3, 1, 1]
    assert part_groups(ASYNC, 10) == part_groups(OverlapConfig(), 10) == 0
