"""`whet plan`: the predicted bytes against those alive in real steps on tiny models, and the published budget."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.config import dump_yaml
from whet.generate.cache import KVCache
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.inspect.memory import (
    Workload,
    cache_bytes,
    fit,
    parameter_sizes,
    peak,
    phases,
    saved_bytes,
    sharded_budget,
)
from whet.inspect.meter import LiveTensors, compare, measure
from whet.inspect.plan import (
    SHAPES,
    PlanConfig,
    _advice,
    find_shape,
    main,
    policy_shape,
    read_recipe,
    workload,
)
from whet.model.config import ModelConfig
from whet.train import rl_config, sft
from whet.train.algorithm import AlgoConfig
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig
from whet.train.step import OptimConfig, parameter_dtype
from whet.types import UserError

DIGITS = "0123456789+="
MANY = "".join(chr(0x4E00 + index) for index in range(3000))


def policy(alphabet: str = DIGITS, **shape: Any) -> PolicyConfig:
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_positions": 96,
    }
    model = ModelConfig(**(values | shape))
    return PolicyConfig(model=model, tokenizer="characters", alphabet=alphabet, device="cpu")


def rl(start: PolicyConfig, *, optim: dict[str, Any] | None = None, **options: Any) -> RLConfig:
    return RLConfig(
        out="unused",
        policy=start,
        num_prompts=4,
        group_size=4,
        sampling=SamplingParams(max_new_tokens=48),
        optim=OptimConfig(max_grad_norm=1e-3, **(optim or {})),  # so that clipping makes its copies
        **options,
    )


def supervised(start: PolicyConfig, **optim: Any) -> SFTConfig:
    return SFTConfig(
        out="unused", policy=start, batch_size=16, optim=OptimConfig(max_grad_norm=1e-3, **optim)
    )


CASES: dict[str, RLConfig | SFTConfig] = {
    "plain": rl(policy()),
    "micro-batches": rl(
        policy(hidden_size=256, intermediate_size=700, head_dim=64), optim={"token_budget": 300}
    ),
    "checkpointed": rl(policy(), optim={"checkpoint_layers": True}),
    "master, large vocabulary": rl(policy(MANY), optim={"precision": "bfloat16_master"}),
    "autocast": rl(policy(), optim={"precision": "bfloat16_autocast"}),
    "reference, entropy": rl(policy(MANY), algo=AlgoConfig(kl="k3_loss", kl_coef=0.1, entropy_coef=0.01)),
    "critic": rl(
        policy(family="qwen3"), algo=AlgoConfig(baseline="value", scale="none", uninformative="keep")
    ),
    "gpt2, deep": rl(policy(family="gpt2", num_kv_heads=4, num_layers=8)),
    "sft": supervised(policy(family="qwen2")),
    "sft, long, checkpointed": supervised(policy(max_positions=300), checkpoint_layers=True),
}


@pytest.mark.parametrize("name", CASES)
def test_prediction_is_within_a_tenth_of_what_is_alive(name: str) -> None:
    run = CASES[name]
    loaded = load_policy(run.policy, seed=0, dtype=parameter_dtype(run.optim.precision))
    program = "rl" if isinstance(run, RLConfig) else "sft"
    work = workload(run, loaded.model.config, PlanConfig(recipe="unused", of=program))
    predicted = phases(work)
    measured = measure(run, loaded, work)
    print(compare(predicted, measured))
    assert set(measured) == ({"rollout"} if program == "rl" else set()) | {"backward", "optimizer step"}
    for phase, value in measured.items():
        names = ("scoring", "backward") if phase == "backward" else (phase,)
        total = max(found.total for found in predicted if found.name in names)
        # What the issue asks for; the rest is short-lived tensors of a layer, which matter in tiny models only.
        assert total == pytest.approx(value, rel=0.10), phase


def test_kept_activations_grow_by_the_layer_as_measured() -> None:
    # The peak's short-lived part does not depend on the depth: the difference of two shows the kept part alone.
    shallow, deep = (supervised(policy(num_layers=depth)) for depth in (2, 6))
    peaks = []
    for run in (shallow, deep):
        loaded = load_policy(run.policy, seed=0)
        work = workload(run, loaded.model.config, PlanConfig(recipe="unused", of="sft"))
        peaks.append(measure(run, loaded, work)["backward"])
    count = sum(parameter_sizes(deep.policy.model)) - sum(parameter_sizes(shallow.policy.model))
    weights_and_moments = (4 + 8) * count
    expected = 4 * saved_bytes(work, 16, 96) + weights_and_moments
    assert peaks[1] - peaks[0] == pytest.approx(expected, rel=0.002)  # a scalar here and there


def test_source_001_budget(capsys: pytest.CaptureFixture[str]) -> None:
    count = sum(parameter_sizes(SHAPES["Qwen/Qwen2.5-3B"]))
    assert count == 3_085_938_688  # the model card says 3.09 B
    values = [value / 1e9 for value in sharded_budget(count, 2).values()]
    assert values == pytest.approx([3.086, 3.086, 12.344, 6.172], abs=5e-4)
    main(PlanConfig(recipe="Qwen/Qwen2.5-3B", of="model", num_devices=2))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:3] == ["3.09", "B", "parameters"]
    assert [line[-1] for line in lines[1:]] == ["3.09", "3.09", "12.34", "6.17"]


@pytest.mark.parametrize(
    ("name", "count"),
    [  # as the hub counts them in the files of these models
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("openai-community/gpt2", 124_439_808),
    ],
)
def test_known_shapes_have_the_published_number_of_parameters(name: str, count: int) -> None:
    assert sum(parameter_sizes(find_shape(name))) == count


def large(**options: Any) -> Workload:
    values: dict[str, Any] = {
        "shape": SHAPES["Qwen/Qwen2.5-0.5B"],
        "precision": "bfloat16_master",
        "device": "cuda",
        "attention": "fast",
        "length": 1280,
        "num_trained": 1024,
        "num_sequences": 256,
        "token_budget": 16384,
        "rows": 256,
        "num_prompts": 32,
    }
    return Workload(**(values | options))


def test_cache_is_as_large_as_the_engine_makes_it() -> None:
    work = large(length=1250, rows=2)
    cache = KVCache(work.shape, 2, 1250, torch.bfloat16, torch.device("cpu"))
    assert cache_bytes(work) == cache.nbytes


def test_what_fits_is_the_largest_that_does() -> None:
    work, limit = large(), 24 * 2**30
    found = fit(work, limit)
    assert found is not None
    assert peak(found) <= limit
    more = replace(found, token_budget=found.token_budget + work.length)
    assert peak(more) > limit or found.micro_sequences == work.num_sequences
    assert peak(replace(found, token_budget=work.length, rows=found.rows + 1)) > limit or found.rows == 256
    assert fit(work, 2**30) is None
    assert "policy.max-rows" in _advice(work, 24)
    assert _advice(work, 1).startswith("does not fit 1 GiB")
    plain = large(precision="float32", attention="exact", device="cpu")
    assert fit(plain, 12 * 2**30) is None
    assert "only with --optim" in _advice(plain, 12)


def test_meter_counts_a_storage_once_and_forgets_it() -> None:
    with LiveTensors(torch.device("cpu")) as meter:
        first = torch.zeros(100)
        view = first[10:].view(9, 10)
        assert meter.now == 400
        second = view + 1
        assert meter.now == 400 + 360
        del first, view
        assert (meter.now, meter.peak) == (360, 760)
        assert meter.restart() == 760
        assert meter.peak == second.nbytes


@pytest.mark.parametrize("program", ["rl", "sft"])
def test_recipe_is_what_the_program_resolves(program: Any, tmp_path: Path) -> None:
    run = CASES["plain"] if program == "rl" else CASES["sft"]
    plan = rl_config.plan(run) if isinstance(run, RLConfig) else sft.plan(run)
    said = tmp_path / "said"
    said.write_text(f"{dump_yaml(run)}\n{plan}\n", encoding="utf-8")
    script = (
        f"import sys; sys.argv[1:] == [{program!r}, 'x', '--seed=0', '--dry-run'] or sys.exit('no'); "
        f"print(open({str(said)!r}).read(), end='')"
    )
    config = PlanConfig(recipe="x", of=program, set=("seed=0",))
    assert read_recipe(config, (sys.executable, "-S", "-c", script)) == run
    with pytest.raises(UserError, match="refuses: no"):
        read_recipe(replace(config, set=()), (sys.executable, "-S", "-c", script))


def test_shapes_without_weights(tmp_path: Path) -> None:
    start = policy()
    assert policy_shape(start) == load_policy(start, seed=0).model.config
    with pytest.raises(UserError, match=r"--set policy.init=Qwen/Qwen2.5-3B$"):
        find_shape("runs/qwen2.5-3b-math-sft")
    with pytest.raises(UserError, match=r"no such run yet.*--set policy.init=FOLDER"):
        find_shape("runs/none")
    with pytest.raises(UserError, match=r"neither a model folder"):
        find_shape(str(tmp_path))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="expected field=value"):
        PlanConfig(recipe="x", set=("seed",))
    with pytest.raises(ValueError, match="num_devices only"):
        PlanConfig(recipe="x", of="model", memory_gib=1)
    with pytest.raises(ValueError, match="num_devices = 0"):
        PlanConfig(recipe="x", num_devices=0)
    run = CASES["plain"]
    for length in (48, 97):
        with pytest.raises(UserError, match=f"length = {length}: expected 49 to the context's 96"):
            workload(run, policy_shape(run.policy), PlanConfig(recipe="x", length=length))
