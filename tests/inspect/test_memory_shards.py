"""`whet plan` of one rank among several: its share of the weights, and what it gathers, against what is alive on it."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from gloo import run_ranks
from test_memory import policy, supervised

from whet.generate.policy import load_policy
from whet.inspect.memory import meter, room
from whet.inspect.memory.phases import Workload, peak, phases, sharded_parts
from whet.inspect.memory.plan import PlanConfig, main, workload
from whet.ranks.fsdp import ParallelConfig, gathered, is_share, local
from whet.recipes.rl import RECIPES
from whet.train.optim.step import dtypes, shard_layers
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig
from whet.types import UserError

WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_layers": 6,
    "head_dim": 32,
    "max_positions": 64,
}
LAYOUTS = {
    "resharded": ParallelConfig(kind="fsdp"),
    "kept": ParallelConfig(kind="fsdp", reshard=False),
}


class LiveShards(meter.LiveTensors):
    """The meter, which sees of shares what is here, and of gathered weights when PyTorch frees their storage."""

    def __enter__(self) -> Any:
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            if storage._cdata in self._seen:
                self.now += size - self.sizes.get(storage._cdata, 0)
                self.sizes[storage._cdata] = size
                self.peak = max(self.peak, self.now)
            return plain(storage, size)

        self.patch = mock.patch.object(torch.UntypedStorage, "resize_", resize)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *of: Any) -> None:
        super().__exit__(*of)
        self.patch.stop()

    def add(self, tensor: torch.Tensor) -> None:
        here = local(tensor) if is_share(tensor) else tensor
        key, before = here.untyped_storage()._cdata, len(self._seen)
        super().add(here)
        if len(self._seen) > before:
            self.sizes[key] = here.untyped_storage().nbytes()

    def _forget(self, key: int, size: int) -> None:
        super()._forget(key, self.sizes.pop(key, size))

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.sizes: dict[int, int] = {}


def sft(layout: str, **optim: Any) -> SFTConfig:
    return replace(supervised(policy(**WIDE), **optim), parallel=LAYOUTS[layout], batch_size=16)


def work_of(run: SFTConfig | RLConfig, of: Any = "sft") -> Workload:
    model = load_policy(run.policy, seed=0, **dtypes(run.optim.precision)).model
    return workload(run, model.config, PlanConfig(recipe="x", of=of), num_ranks=2)


def measured(run: SFTConfig) -> tuple[dict[str, int], int]:
    """Return what is alive in a step on this rank, and while all weights are gathered."""
    warnings.simplefilter("ignore")
    work = work_of(run)
    loaded = load_policy(run.policy, seed=0, **dtypes(run.optim.precision))
    shard_layers(loaded.model, run.parallel)
    with mock.patch.object(meter, "LiveTensors", LiveShards):
        found = meter.measure(run, loaded, work)
    with LiveShards(torch.device("cpu")) as alone, gathered(loaded.model):
        for parameter in loaded.model.parameters():
            alone.add(parameter)
        own = {parameter.untyped_storage()._cdata for parameter in loaded.model.parameters()}
        give_up = time.monotonic() + 10
        while alone.sizes.keys() - own and time.monotonic() < give_up:
            time.sleep(0.01)  # a thread of gloo lets go of the last exchange's buffer a moment after it
        whole = alone.now
    return found, whole


@pytest.mark.ci
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget", [64 * 8, 64 * 2])
def test_prediction_is_within_a_tenth_of_what_is_alive_on_a_rank(layout: str, budget: int) -> None:
    run = sft(layout, token_budget=budget)
    (found, whole), (other, _) = run_ranks(2, measured, run)
    work = work_of(run)
    predicted = {phase.name: phase.total for phase in phases(work)}
    for name, total in predicted.items():
        assert found[name] == pytest.approx(total, rel=0.1), (name, found, predicted, other)
    outer, layers = sharded_parts(work)
    assert whole == pytest.approx(outer + sum(layers), rel=0.01)  # rows of an odd number are padded


def rl(**changes: Any) -> RLConfig:
    return replace(RECIPES["demo"](), **{"policy": policy(**WIDE), "num_prompts": 8} | changes)


def test_a_rank_of_several_has_its_part_of_the_step_and_its_share_of_the_weights() -> None:
    whole = workload(rl(), rl().policy.model, PlanConfig(recipe="x"))
    one = workload(
        rl(parallel=ParallelConfig(kind="fsdp", replicas=2, prefetch=1)),
        rl().policy.model,
        PlanConfig(recipe="x"),
        num_ranks=4,
    )
    assert (one.num_sequences, one.rows, one.num_requests) == (whole.num_sequences // 4, whole.rows // 4, 2)
    assert one.num_shards == 2
    before, after = ({p.name: p.parts for p in phases(work)} for work in (whole, one))
    for name in ("rollout", "backward", "optimizer step"):
        assert after[name]["optimizer"] * 2 == before[name]["optimizer"]
    outer, layers = sharded_parts(one)
    # Sampling gathers all of it; training what is in no layer, and a layer at work, one that arrives and one ahead.
    assert after["rollout"]["gathered weights"] == outer + sum(layers)
    assert after["backward"]["gathered weights"] == outer + 3 * layers[0]
    by_layer = replace(one, gathers_whole=False)
    assert phases(by_layer)[0].parts["gathered weights"] == outer + 3 * layers[0]
    away = {p.name: p.parts for p in phases(replace(one, offloads_shards=True))}
    assert away["optimizer step"]["optimizer"] == away["optimizer step"]["gradients"] == 0


@pytest.mark.ci
def test_a_large_model_in_shards_is_planned_for_two_cards(capsys: pytest.CaptureFixture[str]) -> None:
    """S1-11, S1-32: 3B on two cards of 24 GB; whole weights, gradients and two moments in float32 would be 49 GB."""
    words = (
        *("policy.init=Qwen/Qwen2.5-3B", "parallel.kind=fsdp", "optim.precision=bfloat16_master"),
        "optim.checkpoint-layers=true",
    )
    common: dict[str, Any] = {"recipe": "qwen2.5-3b-math-grpo", "device": "cuda", "num_devices": 2}
    main(PlanConfig(**common, set=words))
    said = capsys.readouterr().out
    assert "one of 2 devices, weights in 2 shares" in said
    assert "gathered weights" in said


def test_what_does_not_fit_a_rank_whole_may_fit_in_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check before a run knew nothing of shards, and refused what they are for."""
    config = rl(policy=replace(policy(**WIDE), device="cpu"))
    whole, share = (
        peak(
            replace(
                workload(run, run.policy.model, PlanConfig(recipe="x"), num_ranks=ranks),
                **dict.fromkeys(("num_trained", "num_sequences", "group_size", "rows", "num_prompts"), 1),
                **dict.fromkeys(("length", "token_budget"), 2),
                num_requests=1,
                kept_gib=0.0,
            )
        )
        for run, ranks in ((config, 1), (replace(config, parallel=ParallelConfig(kind="fsdp")), 8))
    )
    assert share < 0.8 * whole
    monkeypatch.setattr(room, "free_memory", lambda: (whole + share) // 2)
    with pytest.raises(UserError, match="gradients and optimizer needs"):
        room.check_room(config)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(UserError, match=r"try --optim lean, --lora\.rank 16, --parallel\.kind fsdp"):
        room.check_room(config)
    shards = replace(config, parallel=ParallelConfig(kind="fsdp"))
    room.check_room(shards)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(UserError, match="more ranks"):  # of one machine, whose memory they share
        room.check_room(shards)


def test_a_measured_step_runs_in_one_process() -> None:
    with pytest.raises(ValueError, match="num_devices = 2 with measure"):
        PlanConfig(recipe="x", num_devices=2, measure=True)
