"""Quantised matrices: bitsandbytes' bits, one product for sampler and trainer, folders, and memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import seeing
import torch
from needs import needs
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from whet.algo.packing import TrainingSequence, pack
from whet.generate import fused
from whet.generate.engine import Engine, Request
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.generate.scoring import score_micro_batch
from whet.inspect.memory.meter import LiveTensors
from whet.inspect.memory.phases import Workload, weight_bytes
from whet.model import quant
from whet.model.attention import Packed
from whet.model.config import ModelConfig
from whet.model.families import from_hf
from whet.model.quant import PackedMatrix
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model, check_weights, load_model, resize_vocabulary, save_model
from whet.train.session import load_trained
from whet.train.sft import SFTConfig
from whet.types import UserError

GOLDEN = Path(__file__).parents[1] / "golden/bitsandbytes.safetensors"
TORCHAO = GOLDEN.with_name("torchao")
SHAPE = ModelConfig(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=64,
    init_std=0.2,
)
MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
SHAPES = {
    "llama": SHAPE,
    "odd": replace(
        SHAPE, intermediate_size=92
    ),  # no multiple of 16: the kernels decline it, and blocks cross rows
    "gpt2": replace(SHAPE, family="gpt2", num_kv_heads=4),
    "experts": from_hf(MIXTURE, where="here"),
}


def make_model(name: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    model = build_model(SHAPES[name])
    init_weights(model, seed=1)
    return model.to(dtype).eval()


def as_packed(vectors: dict[str, torch.Tensor], number: int, kind: str) -> PackedMatrix:
    """A matrix from bitsandbytes' own tensors, as a folder has them."""
    name = f"{number}.{kind}"
    tensors = {
        key.removeprefix(f"{name}."): value for key, value in vectors.items() if key.startswith(f"{name}.")
    }
    tensors["codes"] = vectors[name]
    if kind == "int8":
        tensors = {"codes": vectors[name], "SCB": vectors[f"{number}.SCB"]}
    shape = vectors[f"{number}.weight"].shape
    return quant.read_packed(name, tensors, shape, transposed=False, where="vectors")


@pytest.mark.parametrize("number", range(3))
def test_the_tensors_of_bitsandbytes_mean_the_same_bits(number: int) -> None:
    vectors = load_file(GOLDEN)
    for dtype in (torch.float32, torch.bfloat16)[number // 2 :]:
        theirs = vectors[f"{number}.nf4.as_{str(dtype)[6:]}"]
        assert torch.equal(as_packed(vectors, number, "nf4").dense(dtype), theirs)
    if number < 2:
        assert torch.equal(
            as_packed(vectors, number, "int8").dense(torch.float32), vectors[f"{number}.int8.as_float32"]
        )


@pytest.mark.parametrize("number", range(3))
def test_rounding_gives_the_codes_of_bitsandbytes(number: int) -> None:
    vectors = load_file(GOLDEN)
    weight, theirs = vectors[f"{number}.weight"], as_packed(vectors, number, "nf4")
    ours = PackedMatrix.of(weight, "nf4")
    count = (weight.numel() + 1) // 2  # behind it is padding
    assert torch.equal(ours.codes[:count], theirs.codes[:count])
    assert ours.scale is not None
    assert theirs.scale is not None
    assert torch.equal(ours.scale, theirs.scale)
    # bitsandbytes looks its 8-bit codes up in steps of 1/256: one in some 500 is the neighbour of the nearest.
    assert (ours.absmax.int() - theirs.absmax.int()).abs().max() <= 1
    assert (ours.absmax != theirs.absmax).float().mean() < 0.01
    if number == 2:
        return
    int8, rows = PackedMatrix.of(weight.half(), "int8"), as_packed(vectors, number, "int8")
    assert torch.equal(int8.absmax, rows.absmax)
    assert torch.equal(int8.codes, rows.codes)


def sample(model: LanguageModel, autocast: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the trainer's log-probabilities, with autograd, and the sampler's."""
    requests = [Request(prompt_ids=tuple(range(1, n + 1)), seeds=(1, 2, 3)) for n in (1, 5, 17)]
    engine = Engine(model, stop_ids=(), autocast=autocast)
    done = engine.generate(requests, SamplingParams(max_new_tokens=9))
    sequences = [
        TrainingSequence(prompt_ids=request.prompt_ids, completion_ids=one.ids, sampler_logprobs=one.logprobs)
        for request, row in zip(requests, done, strict=True)
        for one in row
    ]
    micros = pack(sequences, token_budget=60).micro_batches
    assert len(micros) > 1
    scored = torch.cat([score_micro_batch(model, micro, autocast=autocast)[0] for micro in micros])
    return scored, torch.cat([micro.sampler_logprobs_M for micro in micros])


@pytest.mark.some(8)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("either")
def test_sampler_equals_trainer_bitwise(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(name, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    full = model.logits(torch.arange(12)[None])
    quant.quantize(model, "nf4" if precision != "autocast" else "int8")
    assert not torch.equal(model.logits(torch.arange(12)[None]), full)
    scored, sampled = sample(model, torch.bfloat16 if precision == "autocast" else None)
    assert torch.equal(scored, sampled)
    assert sampled.std() > 0.1
    scored.sum().backward()
    # Without memory for copies, every step dequantises again: the same bits.
    monkeypatch.setattr(quant, "free_bytes", lambda device: 20_000)
    torch.set_num_threads(2)
    again, drawn = sample(model, torch.bfloat16 if precision == "autocast" else None)
    assert torch.equal(again, drawn)


@needs("kernels")  # the step is one of theirs
def test_the_compiled_step_runs_on_quantised_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does while copies are kept; when they are dropped, nothing of them is left."""
    model, calls = make_model("llama"), []
    quant.quantize(model, "nf4")
    real = fused.fuse
    monkeypatch.setattr("whet.generate.engine.fuse", lambda *a: calls.append(1) or real(*a))
    sample(model, None)
    assert len(calls) == 1
    assert not any(part.is_kept for part in quant.packed_parts(model))
    monkeypatch.setattr(quant, "free_bytes", lambda device: 0)
    sample(model, None)
    assert len(calls) == 1


@pytest.mark.parametrize("name", SHAPES)
def test_the_input_s_gradient_is_that_of_the_dense_matrix(name: str) -> None:
    """And dense weights that are put back give the same outputs."""
    model = make_model(name)
    quant.quantize(model, "nf4")
    ids = torch.arange(10)[None]
    table = model.get_parameter("transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight")
    packed = model.logits(ids)
    packed.square().sum().backward()
    own, table.grad = table.grad, None
    quant.dequantize(model, torch.float32)
    assert not quant.packed_parts(model)
    dense = model.logits(ids)
    dense.square().sum().backward()
    assert torch.equal(packed, dense)
    assert own is not None
    torch.testing.assert_close(own, table.grad, rtol=1e-4, atol=1e-4)  # other orders of float32 sums


@pytest.mark.parametrize("name", SHAPES)
def test_a_folder_gives_the_same_model_back(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    quant.quantize(model, "nf4")
    first = next(iter(quant.places(model).values()))
    dense = first.matrices()[0]
    spots = torch.tensor([3, 70])
    ratio = torch.linspace(0.5, 2, dense.shape[-1])
    if not first.is_experts:
        first.unpack(torch.float32)
        first.pack([PackedMatrix.of(dense, "nf4", columns=ratio, spots=spots, transposed=first.transposed)])
    others = list(quant.places(model).values())[1:3]
    others[0].unpack(torch.float32)
    others[1].unpack(torch.float32)
    others[1].pack(
        [PackedMatrix.of(m, "int8", transposed=others[1].transposed) for m in others[1].matrices()]
    )
    save_model(model, tmp_path)
    back, config = load_model(tmp_path)
    assert config.hidden_size == 64
    ids = torch.arange(12)[None]
    assert torch.equal(model.logits(ids), back.logits(ids))
    kinds = json.loads((tmp_path / "quantization.json").read_text())["layers"]
    assert set(kinds.values()) == {"nf4", "int8", "bf16"}
    assert list(kinds.values())[1:3] == ["bf16", "int8"]
    assert {n: t.sum() for n, t in quant.packed_tensors(model)} == {
        n: t.sum() for n, t in quant.packed_tensors(back)
    }
    # What changes the model's shape keeps the matrices.
    grown = resize_vocabulary(back, 64, seed=0)
    assert torch.equal(grown.logits(ids)[..., :61], model.logits(ids))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_model_that_sees_comes_back_from_its_folder(kind: quant.Kind, tmp_path: Path) -> None:
    """Its config.json has an object for each part, and its files other names than its parameters."""
    model, _ = load_model(seeing.save_model(tmp_path / "model"))
    tower = {name: p for name, p in model.named_parameters() if name.startswith("visual.")}
    quant.quantize(model, kind)
    save_model(model, tmp_path / kind)
    check_weights(tmp_path / kind)
    back, config = load_model(tmp_path / kind)
    assert len(quant.packed_parts(back)) == 14
    assert all(torch.equal(back.get_parameter(name), own) for name, own in tower.items())
    ids = torch.arange(12)[None]
    assert torch.equal(model.logits(ids), back.logits(ids))
    # Other programs would look for the family's names: they are to refuse the folder.
    assert json.loads((tmp_path / kind / "config.json").read_text())["quantization_config"] == {
        "quant_method": "whet"
    }
    assert config.vision is not None


def test_super_weights_stay_exact() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    weight[5, 7] = 300.0
    spots = torch.tensor([5 * 64 + 7])
    for kind in ("nf4", "int8"):
        plain, kept = PackedMatrix.of(weight, kind), PackedMatrix.of(weight, kind, spots=spots)
        assert kept.dense(torch.float32)[5, 7] == 300.0
        others = torch.arange(64 * 64) != spots
        errors = [(p.dense(torch.float32) - weight).view(-1)[others].square().mean() for p in (plain, kept)]
        assert errors[1] < errors[0]  # it does not widen its block's range


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_rows_of_zeros_stay_zeros(kind: quant.Kind) -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    weight[1] = 0
    packed = PackedMatrix.of(weight, kind, double=False)
    assert torch.equal(packed.dense(torch.float32)[1], torch.zeros(64))
    assert int(packed.codes.view(4, -1)[1].unique().numel()) == 1  # codes of 0, not of 0 / 0
    assert packed.codes.view(4, -1)[1, 0] == (0 if kind == "int8" else 7 << 4 | 7)


def test_loading_quantises_as_it_reads(tmp_path: Path) -> None:
    model = make_model("llama")
    save_model(model, tmp_path)
    loaded, _ = load_model(tmp_path, quantize="nf4", dtype=torch.bfloat16)
    quant.quantize(model.to(torch.bfloat16), "nf4")
    own = dict(quant.packed_tensors(model))
    assert own.keys() == dict(quant.packed_tensors(loaded)).keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in quant.packed_tensors(loaded))
    # 4 bits, a byte per block and 4 per 256 blocks and matrix, in place of 16.
    names = dict(loaded.named_parameters())
    assert not any(name.endswith("_proj.weight") for name in names)
    size = sum(part.nbytes for part in quant.packed_parts(loaded))
    numbers = sum(part.shape.numel() for part in quant.packed_parts(loaded))
    assert size * 8 / numbers == pytest.approx(4.127, abs=0.03)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_planner_knows_the_bytes(name: str, kind: quant.Kind) -> None:
    model = make_model(name)
    quant.quantize(model, kind)
    tensors = [*model.parameters(), *(tensor for _, tensor in quant.packed_tensors(model))]
    work = Workload(
        shape=SHAPES[name],
        precision="float32",
        device="cpu",
        attention="exact",
        length=8,
        num_trained=7,
        num_sequences=1,
        token_budget=8,
        quantize=kind,
    )
    assert weight_bytes(work) == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.usefixtures("either")
def test_four_bits_stay_four_bits_in_training() -> None:
    """A pass with its backward pass has one dense matrix at a time (and its panels), and saves none."""
    shape = replace(SHAPE, num_layers=6, hidden_size=256, intermediate_size=512, head_dim=64)
    model = build_model(shape)
    init_weights(model, seed=0)
    full = sum(parameter.nbytes for parameter in model.parameters())
    quant.quantize(model, "nf4")
    meter, cpu = LiveTensors(torch.device("cpu")), torch.device("cpu")
    for tensor in (*model.parameters(), *(own for _, own in quant.packed_tensors(model))):
        meter.add(tensor)
    stored = meter.now
    with meter:
        tokens = torch.arange(4)
        model(tokens, tokens, Packed([4], cpu)).square().sum().backward()
    dense, activations = 4 * 256 * 512, 10**6
    assert meter.peak < stored + 3 * dense + activations < full / 2


def test_what_is_wrong_with_a_quantised_folder_is_one_line(tmp_path: Path) -> None:
    model = make_model("llama")
    quant.quantize(model, "nf4")
    save_model(model, tmp_path)
    good = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    def refused(change: dict[str, torch.Tensor | None], words: str) -> None:
        changed = {key: value for key, value in (good | change).items() if value is not None}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=words) as caught:
            load_model(tmp_path)
        assert "\n" not in str(caught.value)

    refused({name: None}, "without its codes")
    refused({name: good[name][:-1]}, "codes do not give")
    refused({f"{name}.absmax": None}, "absmax is missing")
    refused({f"{name}.{quant.STATE}": None}, "4-bit codes without")
    refused({f"{name}.nested_quant_map": good[f"{name}.nested_quant_map"] * 2}, "of another kind")
    refused({f"{name}.spots": torch.tensor([10**6]), f"{name}.spot_values": torch.ones(1)}, "places outside")
    refused({"model.norm.weight": good["model.norm.weight"].to(torch.uint8)}, "belongs to no matrix")
    save_file(good, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="quantised already"):
        load_model(tmp_path, quantize="int8")


def test_folders_as_transformers_saves_them(tmp_path: Path) -> None:
    """NF4 and int8 under the names of bitsandbytes, in config.json's words, and no file of ours."""
    for kind in ("nf4", "int8"):
        model = make_model("llama")
        quant.quantize(model, kind)
        folder = tmp_path / kind
        save_model(model, folder)
        (folder / "quantization.json").unlink()
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": kind == "nf4"}
        (folder / "config.json").write_text(json.dumps(config))
        back, _ = load_model(folder)
        ids = torch.arange(12)[None]
        assert torch.equal(model.logits(ids), back.logits(ids))
    config["quantization_config"] = {"quant_method": "gptq"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="gptq.*bitsandbytes' NF4 and int8"):
        load_model(folder)


@pytest.mark.parametrize(("kind", "num_packed"), [("int8", 7), ("int4", 0), ("float8", 0)])
def test_folders_of_torchao_mean_the_same_numbers(kind: str, num_packed: int, tmp_path: Path) -> None:
    want = load_file(TORCHAO / "logits.safetensors")
    model, _ = load_model(TORCHAO / kind)
    assert len(quant.packed_parts(model)) == num_packed  # int8 by rows stays in 8 bits
    down = model.get_submodule("model.layers.0.mlp.down_proj").matrix()  # pyright: ignore[reportCallIssue]
    # float32's last place: 127 scale / 127.
    torch.testing.assert_close(down, want[f"{kind}.down_proj"], rtol=2e-7, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(torch.arange(24)[None]), want[kind], rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="quantised already"):
        load_model(TORCHAO / kind, quantize="nf4")
    save_model(model, tmp_path)  # a folder of whet's, or dense
    again, _ = load_model(tmp_path)
    assert again.get_submodule("model.layers.0.mlp.down_proj").matrix().equal(down)  # pyright: ignore


def test_parts_of_torchao_may_lie_in_two_files(tmp_path: Path) -> None:
    tensors = load_file(TORCHAO / "int4/model.safetensors")
    with safe_open(TORCHAO / "int4/model.safetensors", "pt") as file:
        metadata = file.metadata()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, own in halves.items():
        save_file({name: tensors[name] for name in own}, tmp_path / shard, metadata=metadata)
    index = {"weight_map": {name: shard for shard, own in halves.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_bytes((TORCHAO / "int4/config.json").read_bytes())
    want = load_file(TORCHAO / "logits.safetensors")["int4"]
    with torch.no_grad():
        found = load_model(tmp_path)[0].logits(torch.arange(24)[None])
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_what_is_wrong_with_a_folder_of_torchao_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rounds or scales its inputs, too") as told:
        load_model(TORCHAO / "dynamic")
    assert "\n" not in str(told.value)
    good = load_file(TORCHAO / "int4/model.safetensors")
    with safe_open(TORCHAO / "int4/model.safetensors", "pt") as file:
        facts = file.metadata()
    (tmp_path / "config.json").write_bytes((TORCHAO / "int4/config.json").read_bytes())
    name = "model.layers.0.mlp.down_proj.weight"
    part = "model.layers.0.mlp.down_proj._weight_"

    def refused(tensors: dict[str, torch.Tensor | None], change: dict[str, str | None], words: str) -> None:
        stored = {key: value for key, value in (good | tensors).items() if value is not None}
        metadata = {key: value for key, value in (facts | change).items() if value is not None}
        save_file(stored, tmp_path / "model.safetensors", metadata=metadata)
        with pytest.raises(UserError, match=words) as told:
            load_model(tmp_path)
        assert "\n" not in str(told.value)

    refused({}, {"tensor_names": None}, "metadata is missing or malformed")
    refused({}, {name: None}, "metadata is missing or malformed")
    refused({}, {name: "[" * 9}, "metadata is missing or malformed")
    refused({}, {name: facts[name].replace("IntxUnpackedToInt8Tensor", "Int4Tensor")}, "torchao's Int4Tensor")
    refused({}, {name: facts[name].replace("[1, 16]", "[1, 7]")}, "blocks of")
    refused({}, {name: facts[name].replace("[1, 16]", "[16]")}, "blocks of")
    refused({}, {name: facts[name].replace("[1, 16]", "[0, 16]")}, "blocks of")
    refused({f"{part}scale": None}, {}, "missing, the first is 'model.layers.0.mlp.down_proj.weight'")
    refused({f"{part}scale": good[f"{part}scale"][:-1]}, {}, "scale or zero_point has not the shape")
    refused({f"{part}qdata": good[f"{part}qdata"].float()}, {}, "is not torchao's")
    refused(
        {f"{part}qdata": good[f"{part}qdata"][:16], f"{part}scale": good[f"{part}scale"][:16]}, {}, "shape"
    )
    refused({name: torch.zeros(32, 48)}, {}, "occurs twice")


def test_policy_option(tmp_path: Path, tiny_policy: PolicyConfig) -> None:
    load_policy(tiny_policy, seed=0).save(tmp_path)
    config = PolicyConfig(init=str(tmp_path), quantize="nf4")
    policy = load_policy(config, seed=0)
    assert len(quant.packed_parts(policy.model)) == 14
    policy.save(tmp_path / "small")
    with pytest.raises(UserError, match="--lora.rank 16"):
        load_trained(
            SFTConfig(out="unused", policy=PolicyConfig(init=str(tmp_path / "small"))), weights=False
        )
    with pytest.raises(UserError, match="cannot be trained"):
        load_trained(SFTConfig(out="unused", policy=config))
    again = load_policy(PolicyConfig(init=str(tmp_path / "small")), seed=0)
    ids = torch.arange(12)[None]
    assert torch.equal(policy.model.logits(ids), again.model.logits(ids))
