"""Whole runs on a GPU, as users have them: Triton kernels and CUDA graphs where they run; the same on a CPU.

python -m pytest tests/gpu -m gpu
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.kernels.mode import VARIABLE
from whet.model.config import ModelConfig
from whet.model.lora.side import LoRAConfig
from whet.recipes.models import demo_policy
from whet.train import rl, sft
from whet.train.optim.step import OptimConfig
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig

pytestmark = pytest.mark.usefixtures("few_problems", "no_figures")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
SHAPE = ModelConfig(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=64,
)


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def policy(device: str) -> PolicyConfig:
    return replace(demo_policy(), model=SHAPE, max_rows=64, device=device)


def supervised(folder: Path, device: str, **changes: Any) -> SFTConfig:
    config = SFTConfig(
        out=str(folder),
        policy=policy(device),
        optim=OptimConfig(lr=1e-3, warmup_steps=2, beta2=0.99),
        num_steps=4,
        batch_size=8,
        validation_problems=8,
        validate_every=2,
        save_every=4,
    )
    return replace(config, **changes)


def reinforced(folder: Path, init: PolicyConfig, **changes: Any) -> RLConfig:
    config = RLConfig(
        out=str(folder),
        policy=init,
        rewards={"correct": 1.0, "format": 0.5},
        sampling=SamplingParams(max_new_tokens=14),
        optim=OptimConfig(lr=1e-3, warmup_steps=2, beta2=0.99, token_budget=400),
        num_steps=3,
        num_prompts=4,
        group_size=4,
        save_every=3,
    )
    return replace(config, **changes)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_steps(folder: Path, count: int, gap: float) -> None:
    """Each step has finite numbers, and the sampler's log-probabilities are near the trainer's."""
    steps = [row for row in rows(folder) if "rl/reward_mean" in row or "rl/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, count + 1))
    for row in steps:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float)), row
        assert row["rl/logprob_gap_mean"] <= gap
    assert any(row["rl/grad_norm"] > 0 for row in steps)


@pytest.mark.parametrize("device", DEVICES)
def test_fine_tuning_computes_what_a_cpu_does(device: str, tmp_path: Path) -> None:
    sft.train(supervised(tmp_path / "run", device))
    sft.train(supervised(tmp_path / "cpu", "cpu"))
    for own, plain in zip(rows(tmp_path / "run"), rows(tmp_path / "cpu"), strict=True):
        assert own["sft/loss"] == pytest.approx(plain["sft/loss"], rel=1e-4)
    assert load_policy(PolicyConfig(init=str(tmp_path / "run"), device=device), seed=0).device.type == device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("precision", "gap"), [("float32", 1e-5), ("bfloat16_autocast", 0.02)], ids=["float32", "bfloat16"]
)
def test_reinforcement_is_on_policy(device: str, precision: Any, gap: float, tmp_path: Path) -> None:
    config = reinforced(tmp_path / "run", policy(device))
    config = replace(config, optim=replace(config.optim, precision=precision))
    rl.train(config)
    check_steps(tmp_path / "run", 3, gap)


@pytest.mark.some(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quantize", ["none", "nf4", "int8"])
def test_adapters_train_on_dense_and_quantised_weights(device: str, quantize: Any, tmp_path: Path) -> None:
    sft.train(supervised(tmp_path / "base", device))
    init = PolicyConfig(init=str(tmp_path / "base"), device=device, max_rows=64, quantize=quantize)
    rl.train(reinforced(tmp_path / "run", init, lora=LoRAConfig(rank=4)))
    check_steps(tmp_path / "run", 3, 1e-4)
