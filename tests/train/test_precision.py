"""optim.precision = auto: what is measured, what is chosen, and that a run keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from whet.algo.config import AlgoConfig
from whet.config import load_yaml
from whet.generate.policy import PolicyConfig
from whet.train import sft
from whet.train.optim import precision
from whet.train.optim.precision import CANDIDATES, measure, resolve_precision
from whet.train.optim.step import OptimConfig, Precision
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig


def config(tmp_path: Path, policy: PolicyConfig, precision: Precision = "auto") -> SFTConfig:
    return SFTConfig(
        out=str(tmp_path / "run"),
        policy=policy,
        optim=OptimConfig(precision=precision, warmup_steps=0),
        num_steps=2,
        save_every=1,
        batch_size=4,
        validation_problems=0,
    )


def pretend(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> list[int]:
    """Let the measurement say something; return a list that grows with each."""
    asked: list[int] = []

    def answer(shape: object, device: torch.device) -> dict[str, float]:
        asked.append(1)
        return {name: seconds[name] for name in CANDIDATES}

    monkeypatch.setattr(precision, "measure", answer)
    return asked


def test_every_precision_is_measured(tiny_policy: PolicyConfig) -> None:
    seconds = measure(tiny_policy.model, torch.device("cpu"))
    assert set(seconds) == set(CANDIDATES)
    assert all(0 < value < 10 for value in seconds.values())


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ((1.0, 0.5, 0.9), "bfloat16_master"),
        ((1.0, 0.9, 0.5), "bfloat16_autocast"),
        ((1.0, 0.85, 0.9), "float32"),
        ((1.0, 3.0, 2.0), "float32"),
    ],
)
def test_the_fastest_is_taken_and_bfloat16_for_a_reason(
    tmp_path: Path,
    tiny_policy: PolicyConfig,
    monkeypatch: pytest.MonkeyPatch,
    times: tuple[float, ...],
    chosen: Precision,
) -> None:
    pretend(monkeypatch, **dict(zip(CANDIDATES, times, strict=True)))
    assert resolve_precision(config(tmp_path, tiny_policy)).optim.precision == chosen


def test_what_another_field_refuses_is_not_taken(
    tmp_path: Path,
    tiny_policy: PolicyConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretend(monkeypatch, float32=1.0, bfloat16_master=0.4, bfloat16_autocast=0.6)
    wanted = RLConfig(
        out=str(tmp_path / "run"),
        policy=tiny_policy,
        optim=OptimConfig(precision="auto"),
        algo=AlgoConfig(kl="k2_loss", kl_coef=0.1, ref_ema=0.9),
    )
    assert resolve_precision(wanted).optim.precision == "bfloat16_autocast"
    said = capsys.readouterr().out
    assert "optim.precision = bfloat16_autocast" in said
    assert "bfloat16_master 0.40, bfloat16_autocast 0.60" in said


def test_a_given_precision_is_not_measured(
    tmp_path: Path, tiny_policy: PolicyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = pretend(monkeypatch, float32=1.0, bfloat16_master=0.1, bfloat16_autocast=0.1)
    given = config(tmp_path, tiny_policy, "float32")
    assert resolve_precision(given) is given
    assert not asked


@pytest.mark.usefixtures("few_problems")
def test_a_run_keeps_its_precision_when_it_goes_on(
    tmp_path: Path, tiny_policy: PolicyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = pretend(monkeypatch, float32=1.0, bfloat16_master=0.4, bfloat16_autocast=0.6)
    sft.train(config(tmp_path, tiny_policy))
    stored = load_yaml(tmp_path / "run" / "config.yaml", SFTConfig)
    assert stored.optim.precision == "bfloat16_master"
    pretend(monkeypatch, float32=1.0, bfloat16_master=9.0, bfloat16_autocast=9.0)
    sft.train(config(tmp_path, tiny_policy), resume=True)
    assert len(asked) == 1
