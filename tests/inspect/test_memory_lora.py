"""`whet plan` with adapters and quantised bases: the predicted bytes against those alive in real steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whet.algo.config import AlgoConfig
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.inspect.memory import room
from whet.inspect.memory.meter import compare, measure
from whet.inspect.memory.phases import packed_kinds, peak, phases, weight_bytes
from whet.inspect.memory.plan import PlanConfig, policy_shape, workload
from whet.model.config import ModelConfig
from whet.model.lora.side import LoRAConfig
from whet.model.quant import PackedMatrix, packed_parts, places
from whet.model.weights import load_model, save_model
from whet.train.objective.reference import shared_copy
from whet.train.optim.step import OptimConfig, dtypes, lean
from whet.train.rl_config import RLConfig
from whet.train.session import train_adapters
from whet.train.sft import SFTConfig

ALPHABET = "0123456789+="


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, and one of which half of the matrices are in few bits, as `whet quantize` stores it."""
    folder = tmp_path_factory.mktemp("planned")
    shape = ModelConfig(
        hidden_size=192, intermediate_size=512, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=32
    )
    start = PolicyConfig(model=replace(shape, max_positions=96), tokenizer="characters", alphabet=ALPHABET)
    load_policy(replace(start, device="cpu"), seed=0).save(folder / "base")
    load_policy(replace(start, device="cpu"), seed=0).save(folder / "mixed")
    model, _ = load_model(folder / "base")
    for number, place in enumerate(places(model).values()):
        if number % 2:
            kind = "nf4" if number % 3 else "int8"
            place.pack([PackedMatrix.of(part, kind) for part in place.matrices()])
    save_model(model, folder / "mixed", bos_id=None, eos_ids=())
    return folder


def fine_tuning(base: Path, lora: LoRAConfig, quantized: Any = "none", **optim: Any) -> SFTConfig:
    policy = PolicyConfig(init=str(base), device="cpu", quantize=quantized)
    return SFTConfig(out="unused", policy=policy, batch_size=16, lora=lora, optim=OptimConfig(**optim))


def reinforcement(base: Path, lora: LoRAConfig, quantized: Any = "none", **options: Any) -> RLConfig:
    return RLConfig(
        out="unused",
        policy=PolicyConfig(init=str(base), device="cpu", quantize=quantized),
        num_prompts=4,
        group_size=4,
        lora=lora,
        sampling=SamplingParams(max_new_tokens=48),
        **options,
    )


LORA = LoRAConfig(rank=8)
CASES: dict[str, Callable[[Path], RLConfig | SFTConfig]] = {
    "sft": lambda home: fine_tuning(home / "base", LORA),
    "sft, master, pissa": lambda home: fine_tuning(
        home / "base", LoRAConfig(rank=16, init="pissa"), precision="bfloat16_master", token_budget=200
    ),
    "sft, nf4": lambda home: fine_tuning(home / "base", LORA, "nf4", checkpoint_layers=True),
    "sft of a quantised folder": lambda home: fine_tuning(
        home / "mixed", LoRAConfig(rank=64), token_budget=200
    ),
    "rl, reference": lambda home: reinforcement(
        home / "base", LORA, algo=AlgoConfig(kl="k3_loss", kl_coef=0.1)
    ),
    "rl, int8": lambda home: reinforcement(home / "base", LORA, "int8"),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", CASES)
def test_prediction_is_near_what_is_alive(name: str, home: Path) -> None:
    run = CASES[name](home)
    policy = load_policy(run.policy, seed=0, **dtypes(run.optim.precision))
    train_adapters(policy, run)
    program = "rl" if isinstance(run, RLConfig) else "sft"
    work = workload(run, policy.model.config, PlanConfig(recipe="unused", of=program))
    predicted, measured = phases(work), measure(run, policy, work)
    print(compare(predicted, measured))
    for phase, value in measured.items():
        names = ("scoring", "backward") if phase == "backward" else (phase,)
        total = max(found.total for found in predicted if found.name in names)
        assert total == pytest.approx(value, rel=0.10), phase


@pytest.mark.filterwarnings("ignore:.*changes are all zero")
def test_a_quantised_folder_is_counted_as_it_is_stored(home: Path, tmp_path: Path) -> None:
    run = fine_tuning(home / "mixed", LORA)
    work = workload(run, policy_shape(run.policy), PlanConfig(recipe="unused", of="sft"))
    model, _ = load_model(home / "mixed")
    stored = sum(p.nbytes for p in model.parameters()) + sum(part.nbytes for part in packed_parts(model))
    assert weight_bytes(work) == stored
    assert {kind for kind, _, _ in packed_kinds(work).values()} == {"nf4", "int8"}
    # An adapter that was trained on it is planned with its base.
    policy = load_policy(run.policy, seed=0)
    train_adapters(policy, run)
    policy.save(tmp_path / "adapter")
    again = replace(run, policy=PolicyConfig(init=str(tmp_path / "adapter"), device="cpu"))
    assert (
        weight_bytes(workload(again, policy_shape(again.policy), PlanConfig(recipe="unused", of="sft")))
        == stored
    )


def test_reference_and_base_in_few_bits_are_one(home: Path) -> None:
    run = reinforcement(home / "base", LORA, "nf4")
    policy = load_policy(run.policy, seed=0)
    train_adapters(policy, run)
    ours, theirs = (
        [part.codes.data_ptr() for part in packed_parts(m)] for m in (policy.model, shared_copy(policy.model))
    )
    assert len(ours) == 21
    assert ours == theirs


def test_what_does_not_fit_whole_is_trained_as_an_adapter(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = fine_tuning(home / "base", LoRAConfig(), lr=1e-5)
    for rounded, quantize in (("none", ""), ("nf4", "beside a base in 4 bits ")):
        work = workload(
            fine_tuning(home / "base", LoRAConfig(rank=16), rounded, **lean()),
            policy_shape(whole.policy),
            PlanConfig(recipe="unused", of="sft", length=96),
        )
        least = peak(replace(work, token_budget=96))
        monkeypatch.setattr(room, "_whole", lambda _, least=least: int(1.01 * least / room.SHARE))
        found = room.sized(whole, set())
        assert (found.lora.rank, found.policy.quantize, found.optim.lr) == (16, rounded, room.ADAPTER_LR)
        assert quantize in capsys.readouterr().err
        assert room.sized(whole, {"lora.rank"}).lora.rank == 0
