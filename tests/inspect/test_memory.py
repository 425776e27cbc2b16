"""`whet plan`: the predicted bytes against those alive in real steps on tiny models, and the published budget."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.algo.config import AlgoConfig
from whet.algo.packing import TrainingSequence, pack
from whet.config import dump_yaml
from whet.generate import kernel_speed
from whet.generate.cache import CacheSize, KVCache
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.inspect.memory.meter import LiveTensors, compare, measure
from whet.inspect.memory.phases import (
    SEEN_FAMILIES,
    Workload,
    adapted_bytes,
    cache_bytes,
    fit,
    micro_batches,
    packed_bytes,
    parameter_sizes,
    peak,
    phases,
    saved_bytes,
    sharded_budget,
    state_bytes,
)
from whet.inspect.memory.plan import (
    SHAPES,
    PlanConfig,
    _advice,
    cards,
    find_shape,
    main,
    policy_shape,
    read_recipe,
    workload,
)
from whet.kernels.dispatch import OPERATIONS, Choice, taken
from whet.model.config import ModelConfig
from whet.train.optim.step import OptimConfig, Optimizer, dtypes, lean
from whet.train.rl_config import RLConfig
from whet.train.rollout.source import KEPT_CACHE
from whet.train.sft import SFTConfig
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


def rl(
    start: PolicyConfig, *, optim: dict[str, Any] | None = None, max_new: int = 48, **options: Any
) -> RLConfig:
    return RLConfig(
        out="unused",
        policy=start,
        num_prompts=4,
        group_size=4,
        sampling=SamplingParams(max_new_tokens=max_new),
        optim=OptimConfig(**({"max_grad_norm": 1e-3} | (optim or {}))),  # so that clipping makes its copies
        **options,
    )


def supervised(start: PolicyConfig, **optim: Any) -> SFTConfig:
    return SFTConfig(
        out="unused", policy=start, batch_size=16, optim=OptimConfig(**({"max_grad_norm": 1e-3} | optim))
    )


WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_layers": 4, "head_dim": 32}
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
MORE: dict[str, RLConfig | SFTConfig] = {
    "mlp": supervised(policy(**WIDE), checkpoint_layers=True, checkpoint_kind="mlp"),
    "mlp, gpt2, autocast": supervised(
        policy(family="gpt2", num_kv_heads=4, num_layers=8),
        checkpoint_layers=True,
        checkpoint_kind="mlp",
        precision="bfloat16_autocast",
    ),
    "alternate, even": supervised(policy(**WIDE), checkpoint_layers=True, checkpoint_kind="alternate"),
    "alternate, odd": supervised(
        policy(**(WIDE | {"num_layers": 3})), checkpoint_layers=True, checkpoint_kind="alternate"
    ),
    "8 bits": rl(policy(**(WIDE | {"max_positions": 64})), optim={"adam_bits": 8, "token_budget": 64}),
    "8 bits, master": supervised(policy(MANY, **WIDE), adam_bits=8, precision="bfloat16_master"),
    "lean": rl(
        policy(**(WIDE | {"max_positions": 400})),
        optim=lean() | {"token_budget": 100},
        max_new=300,
    ),
    "lean, large vocabulary": rl(policy(MANY, **WIDE), optim=lean() | {"token_budget": 100}),
    "lean, sft": supervised(policy(**WIDE), **lean()),
    "master, mlp": rl(
        policy(**WIDE),
        optim={"precision": "bfloat16_master", "checkpoint_layers": True, "checkpoint_kind": "mlp"},
    ),
    "qwen3, autocast": supervised(policy(family="qwen3", **WIDE), precision="bfloat16_autocast"),
    "muon": supervised(policy(**WIDE), optimizer="muon", checkpoint_layers=True),
    "qwen3, master": rl(policy(family="qwen3", **WIDE), optim={"precision": "bfloat16_master"}),
}


OFTEN = ("plain", "autocast", "critic", "sft, long, checkpointed")


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ci] * (name not in OFTEN)) for name in CASES | MORE]
)
def test_prediction_is_within_a_tenth_of_what_is_alive(name: str) -> None:
    check((CASES | MORE)[name])


@pytest.mark.ci
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        *(
            pytest.param(name, marks=pytest.mark.ci)
            for name in (
                "master, large vocabulary",
                "critic",
                "sft, long, checkpointed",
                "mlp",
                "8 bits, master",
            )
        ),
    ],
)
def test_prediction_holds_without_a_compiler(name: str) -> None:
    check((CASES | MORE)[name])


@pytest.mark.some(2)
@pytest.mark.parametrize("operations", [("attention",), ("product",), ()])
@pytest.mark.parametrize("name", ["plain", pytest.param("sft", marks=pytest.mark.ci)])
def test_prediction_knows_which_kernels_are_used(name: str, operations: tuple[Any, ...]) -> None:
    """Where a CPU's kernels are slower than PyTorch they are not used: there are no packed weights then."""
    with taken(Choice(frozenset(operations))):
        check(CASES[name])


def test_what_runs_on_the_kernels_is_known_without_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, everything = policy().model, frozenset(OPERATIONS)
    monkeypatch.setattr(kernel_speed, "mode", lambda: "auto")
    monkeypatch.setattr(kernel_speed.build, "folder", lambda: tmp_path)
    monkeypatch.setattr(kernel_speed.build, "library", lambda: object())
    assert kernel_speed.expected_kernels(shape, torch.float32) == everything
    ratios = {"product": 0.5, "attention": 2.0, "decode": 2.0}
    monkeypatch.setattr(kernel_speed, "measure", lambda *_: ratios)
    kernel_speed._known(kernel_speed.small(shape), torch.float32)
    assert kernel_speed.expected_kernels(shape, torch.float32) == {"attention"}
    assert kernel_speed.expected_kernels(shape, torch.bfloat16) == everything
    with taken(Choice(frozenset({"product"}))):
        assert kernel_speed.expected_kernels(shape, torch.float32) == {"product"}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16_master", "float16_master"])
def test_optimizers_state_is_as_large_as_planned(kind: Any, precision: Any) -> None:
    run = supervised(policy(family="qwen2", **WIDE), optimizer=kind, precision=precision)
    for bits in (32, 8):
        optim = replace(run.optim, adam_bits=bits)
        loaded = load_policy(run.policy, seed=0, **dtypes(precision))
        held = Optimizer(loaded.model, optim).held()
        work = workload(replace(run, optim=optim), loaded.model.config, PlanConfig(recipe="x", of="sft"))
        steps = 4 * len(list(loaded.model.parameters()))
        assert state_bytes(work) == sum(tensor.nbytes for tensor in held) - steps


def check(run: RLConfig | SFTConfig) -> None:
    loaded = load_policy(run.policy, seed=0, **dtypes(run.optim.precision))
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


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("kept", [True, False])
def test_logits_that_are_not_kept_are_made_in_chunks(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:
        for module in ("whet.kernels.cpu.head", "whet.inspect.memory.phases"):
            monkeypatch.setattr(f"{module}.KEEP_BYTES", 2**20)
        # 15 rows are less than one chunk: what is measured is that two chunks are there at once.
        monkeypatch.setattr("whet.algo.logprobs.chunk_rows", lambda *_: 512)
        monkeypatch.setattr("whet.inspect.memory.phases.chunk_rows", lambda *_: 512)
    check(supervised(policy(MANY, num_layers=1)))


@pytest.mark.usefixtures("either")
def test_kept_activations_grow_by_the_layer_as_measured() -> None:
    # The peak's short-lived part does not depend on the depth: the difference of two shows the kept part alone.
    shallow, deep = (supervised(policy(num_layers=depth)) for depth in (2, 6))
    peaks, packed = [], []
    for run in (shallow, deep):
        loaded = load_policy(run.policy, seed=0)
        work = workload(run, loaded.model.config, PlanConfig(recipe="unused", of="sft"))
        peaks.append(measure(run, loaded, work)["backward"])
        packed.append(packed_bytes(work))
    count = sum(parameter_sizes(deep.policy.model)) - sum(parameter_sizes(shallow.policy.model))
    weights_and_moments = (4 + 8) * count + packed[1] - packed[0]
    expected = 4 * saved_bytes(work, 16 * 96, 16) + weights_and_moments
    assert peaks[1] - peaks[0] == pytest.approx(expected, rel=0.002)  # a scalar here and there


def test_micro_batches_are_cut_as_the_trainer_cuts_them() -> None:
    for group, num_sequences, budget in (
        (1, 7, 40),
        (4, 16, 60),
        (4, 16, 25),
        (8, 20, 500),
        (4, 10, 44),
        (1, 601, 60),
    ):
        work = large(
            length=20, num_trained=12, num_sequences=num_sequences, group_size=group, token_budget=budget
        )
        sequences = [
            TrainingSequence(prompt_ids=(index // group, *range(7)), completion_ids=(1,) * 12)
            for index in range(num_sequences)
        ]
        found = pack(sequences, token_budget=budget).micro_batches
        got = micro_batches(work)
        assert (
            got.count == len(found) or num_sequences > SEEN_FAMILIES
        )  # of so many, those of some are counted
        assert got.tokens == max(micro.tokens_N.numel() for micro in found)
        assert got.sequences == max(len(micro.indices_B) for micro in found)
        assert got.all_tokens == sum(micro.tokens_N.numel() for micro in found)


def test_a_rollout_beside_the_training_is_held_at_the_same_time() -> None:
    alone, together = large(), large(overlap="async")
    plain, beside = (
        dict(zip(("rollout", "backward", "step"), phases(w), strict=True)) for w in (alone, together)
    )
    weights = plain["rollout"].parts["weights"]
    assert beside["rollout"].total - plain["rollout"].total == weights
    rollout = plain["rollout"].parts["activations"]
    cache = beside["backward"].parts[
        "kv cache"
    ]  # it is given back before training where nothing samples meanwhile
    assert beside["backward"].total - plain["backward"].total == weights + rollout + cache
    assert cache == plain["rollout"].parts["kv cache"] > KEPT_CACHE


def test_what_is_in_host_memory_is_not_on_the_gpu() -> None:
    work = large(checkpoint="layer")
    parts = {phase.name: phase.parts for phase in phases(work)}
    host = {phase.name: phase.parts for phase in phases(replace(work, offload_state=True))}
    count = sum(parameter_sizes(work.shape))
    assert (
        parts["backward"]["optimizer"] == 10 * count
    )  # two moments, and what the weights have beyond bfloat16
    assert host["backward"]["optimizer"] == 0
    assert host["optimizer step"]["gradients"] == 2 * count  # neither widened nor scaled there
    rows = {phase.name: phase.parts for phase in phases(replace(work, offload_inputs=True))}
    inputs = 2 * work.shape.hidden_size * micro_batches(work).tokens
    spared = parts["backward"]["activations"] - rows["backward"]["activations"]
    assert spared == (work.shape.num_layers - 2) * inputs
    packed = {phase.name: phase.parts for phase in phases(replace(work, adam_bits=8))}
    # 2 bytes a parameter, 4 a block of 256 for each moment, 2 for the master; small tensors keep 8 and 2.
    assert packed["backward"]["optimizer"] == pytest.approx(count * (4 + 8 / 256), rel=1e-3)


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
        "num_requests": 32,
    }
    return Workload(**(values | options))


def test_cache_is_as_large_as_the_engine_makes_it() -> None:
    work = large(length=1250, rows=2)
    size = CacheSize(
        rows=2, prompt=1250 - work.num_trained, completion=work.num_trained, context=4096, prompts=2
    )
    for is_tiled in (False, True):
        cache = KVCache(work.shape, size, torch.bfloat16, torch.device("cpu"), is_tiled=is_tiled)
        assert cache_bytes(replace(work, has_kernels=is_tiled)) == cache.nbytes


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
    # What is kept of a rollout is given up before anything else is.
    kept = large(
        kept_gib=2.0,
        has_kernels=True,
        device="cpu",
        num_requests=2,
        group_size=2,
        length=300,
        num_trained=200,
        rows=4,
    )
    assert 0 < kept.kept_bytes < 2 * 2**30
    limit = (peak(replace(kept, rows=1, token_budget=kept.length)) - kept.kept_bytes // 2) / 2**30
    assert _advice(kept, limit).startswith(f"fits {limit:g} GiB only with --kept-gib 0 ")
    assert replace(kept, checkpoint="layer").kept_bytes == replace(kept, kept_gib=0.0).kept_bytes == 0
    plain = large(precision="float32", attention="exact", device="cpu")
    assert fit(plain, 12 * 2**30) is None
    assert "only with --optim" in _advice(plain, 12)
    assert "--optim.precision bfloat16_master --optim.adam-bits 8 --optim.token" in _advice(plain, 8)
    assert "--optim.offload-state --optim.token" in _advice(
        replace(plain, device="cuda", attention="fast"), 5
    )
    assert "does not fit" in _advice(plain, 5)


def test_adapters_are_counted_by_formula(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "Qwen/Qwen2.5-0.5B"
    work = large(num_sequences=2, rows=0, length=1024, num_trained=1023, token_budget=1024)
    sizes = {rank: adapted_bytes(work, rank, is_quantised=False) for rank in (16, 32)}
    # Query and output, key and value (two heads of 64), gate, up and down; in float32 with gradient and two moments.
    inputs_and_outputs = 24 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    assert sizes[32] - sizes[16] == 16 * 16 * inputs_and_outputs
    frozen = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)
    # 4.127 bits a weight (2305.14314 section 3) instead of 16, and one layer in bfloat16.
    spared = sizes[16] - adapted_bytes(work, 16, is_quantised=True)
    assert spared == pytest.approx((16 - 4.127) / 8 * frozen - 2 * frozen / 24, rel=1e-4)
    found = cards(find_shape(name), 1024)
    assert sorted(found.values(), reverse=True) == list(found.values())
    main(PlanConfig(recipe=name, of="cards"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["QLoRA,", "rank", "16,", "NF4", "1.9", "yes", "yes", "yes"]
    with pytest.raises(ValueError, match="of = cards reads length only"):
        PlanConfig(recipe=name, of="cards", memory_gib=8)
    with pytest.raises(UserError, match="length = 99999: expected 2 to the context's 32768"):
        main(PlanConfig(recipe=name, of="cards", length=99999))
    # A model whose context is shorter than the usual sequence is planned at its context.
    shape = replace(find_shape(name), max_positions=64)
    monkeypatch.setattr("whet.inspect.memory.plan.find_shape", lambda _: shape)
    main(PlanConfig(recipe=name, of="cards"))
    assert "64 tokens" in capsys.readouterr().out


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
    said = tmp_path / "said"
    said.write_text(dump_yaml(run), encoding="utf-8")
    words = [program, "x", "--seed=0", "--rewards", "correct", "2", "--print-config"]
    script = (
        f"import sys; sys.argv[1:] == {words!r} or sys.exit('no'); print(open({str(said)!r}).read(), end='')"
    )
    config = PlanConfig(recipe="x", of=program, set=("seed=0", "rewards correct 2"))
    assert read_recipe(config, (sys.executable, "-S", "-c", script)) == run
    with pytest.raises(UserError, match="refuses: no"):
        read_recipe(replace(config, set=()), (sys.executable, "-S", "-c", script))


def test_shapes_without_weights(tmp_path: Path) -> None:
    start = policy()
    assert policy_shape(start) == load_policy(start, seed=0).model.config
    with pytest.raises(UserError, match=r"--policy.init Qwen/Qwen2.5-3B$"):
        find_shape("runs/qwen2.5-3b-math-sft")
    with pytest.raises(UserError, match=r"no such run or folder.*--policy.init FOLDER"):
        find_shape("runs/none")
    with pytest.raises(UserError, match=r"neither a model folder"):
        find_shape(str(tmp_path))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="num_devices only"):
        PlanConfig(recipe="x", of="model", memory_gib=1)
    with pytest.raises(ValueError, match="num_devices = 0"):
        PlanConfig(recipe="x", num_devices=0)
    run = CASES["plain"]
    for length in (48, 97):
        with pytest.raises(UserError, match=f"length = {length}: expected 49 to the context's 96"):
            workload(run, policy_shape(run.policy), PlanConfig(recipe="x", length=length))
