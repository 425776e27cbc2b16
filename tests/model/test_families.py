"""Every model family against transformers: logits, greedy text, training with a ratio of exactly 1, and back again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import family_cases as cases
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing._internal.distributed.fake_pg import FakeStore

from whet.algo.packing import TrainingSequence, pack
from whet.generate.cache import CacheSize, KVCache
from whet.generate.engine import Engine, Request
from whet.generate.fused import can_fuse
from whet.generate.plain import can_step
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.generate.scoring import score_micro_batch
from whet.inspect.memory.meter import measure
from whet.inspect.memory.phases import cache_bytes, packed_bytes, parameter_sizes, saved_bytes
from whet.inspect.memory.plan import PlanConfig, policy_shape, workload
from whet.kernels.cpu import build as cpu
from whet.model.attention import Packed
from whet.model.checkpointing import CheckpointKind, Recompute
from whet.model.config import options
from whet.model.families import FAMILIES, WRAPPERS, from_hf, to_hf
from whet.model.text.tokenizer import Tokenizer
from whet.model.vision.shapes import SEEING
from whet.model.weights import as_reward_model, load_model, load_shares, resize_vocabulary, save_model
from whet.ranks.collectives import is_share
from whet.ranks.fsdp import ParallelConfig, local, rows_of
from whet.schema import ResponseSchema
from whet.tasks.base import TaskConfig
from whet.tasks.made.arithmetic import Arithmetic
from whet.train import rl, sft
from whet.train.optim.step import OptimConfig, shard_layers
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig
from whet.types import UserError

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


# The first case of a model type in `make test`; what the others differ in, .ci/run sees.
FIRST = {case.model_type: name for name, case in reversed(cases.CASES.items())}.values()
EVERY = [pytest.param(name, marks=() if name in FIRST else pytest.mark.ci) for name in cases.CASES]


@pytest.mark.some(9)
@pytest.mark.parametrize("name", EVERY)
def test_a_family(name: str, tmp_path: Path) -> None:
    """Load, compare, generate, train, save: a family's line of docs/models.md is what comes out."""
    line = cases.measure(name, tmp_path)
    assert line.count("| yes ") == len(cases.COLUMNS), line
    case = cases.CASES[name]
    if not case.models:
        return
    if cpu.library() is None:  # the page is about machines with a compiler
        line = line.rpartition(" | ")[0]
    assert line in PAGE.read_text(), "docs/models.md is stale: python tests/model/family_cases.py"


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("llama", {"intermediate_size": 75}),
        ("llama", {"hidden_size": 40}),
        ("llama", {"hidden_size": 40, "head_dim": 12, "intermediate_size": 96}),
        ("deepseek_v3", {"q_lora_rank": 32, "v_head_dim": 10}),
    ],
)
def test_sizes_that_the_kernels_decline_have_a_ratio_of_1(
    name: str, odd: dict[str, int], tmp_path: Path
) -> None:
    """Some products run in C++ and some in PyTorch; sampler and trainer must draw the line at the same place."""
    case = cases.CASES[name]
    cases.make(replace(case, config=case.config | odd), tmp_path)
    assert cases.train(load_model(tmp_path)[0], is_rl=True) == 0.0


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", ["llama", "gemma", "gpt_oss"])
@pytest.mark.parametrize("threads", [2, pytest.param(3, marks=pytest.mark.ci)])
def test_any_number_of_threads_has_a_ratio_of_1(name: str, threads: int, tmp_path: Path) -> None:
    wide = {"intermediate_size": 544}  # so that element-wise operations take several threads
    cases.make(replace(cases.CASES[name], config=cases.CASES[name].config | wide), tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert cases.train(load_model(tmp_path)[0], is_rl=True) == 0.0
    finally:
        torch.set_num_threads(before)


@contextmanager
def as_the_last_of_three() -> Iterator[None]:
    """Be one of several ranks, of which the others are not there: nothing may be exchanged.

    Always the same one: PyTorch keeps the first mesh of a shape, with this process's place in it.
    """
    torch.distributed.init_process_group("fake", rank=2, world_size=3, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


SHARD = partial(shard_layers, config=ParallelConfig(kind="fsdp"), device=torch.device("cpu"))


def check_shares(folder: Path) -> None:
    """Load a folder as one of several ranks does, and compare its rows with the whole model's."""
    whole, _ = load_model(folder)
    with as_the_last_of_three():
        model, _ = load_model(folder, shard=SHARD)
        found = {name: (parameter, local(parameter)) for name, parameter in model.named_parameters()}
        for name, expected in whole.named_parameters():
            parameter, share = found[name]
            assert is_share(parameter)
            assert parameter.requires_grad == expected.requires_grad
            assert torch.equal(share, expected.detach()[rows_of(parameter)]), name
            assert 3 * share.numel() <= expected.numel() or len(expected) < 3, name
            share.zero_()
        load_shares(model, folder)
        for name, (parameter, share) in found.items():
            assert torch.equal(share, whole.get_parameter(name).detach()[rows_of(parameter)]), name


@pytest.mark.some(8)
@pytest.mark.parametrize("name", FIRST)
def test_a_rank_reads_its_own_rows(name: str, tmp_path: Path) -> None:
    cases.make(cases.CASES[name], tmp_path)
    check_shares(tmp_path)


def test_what_is_wrong_with_a_folder_is_told_to_one_of_several_ranks(tmp_path: Path) -> None:
    cases.make(cases.CASES["llama"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for change, text in (
        ({name: tensors[name][:-1].clone()}, f"tensor '{name}' has shape"),
        ({name: tensors[name].to(torch.int32)}, f"tensor '{name}' is torch.int32, expected floats"),
        ({"model.more.weight": tensors[name].clone()}, "unexpected tensor 'model.more.weight'"),
        ({name: None}, f"1 tensors are missing, the first is '{name}'"),
    ):
        changed = {key: tensor for key, tensor in (tensors | change).items() if tensor is not None}
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with as_the_last_of_three(), pytest.raises(UserError, match=re.escape(text)):
            load_model(tmp_path, shard=SHARD)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tied = cases.stored_config(tmp_path) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(tied))
    with as_the_last_of_three(), pytest.raises(UserError, match="ties the head to the embeddings"):
        load_model(tmp_path, shard=SHARD)


@pytest.mark.some(6)
@pytest.mark.parametrize("name", EVERY)
def test_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = cases.make(cases.CASES[name], tmp_path)
    model, _ = load_model(tmp_path)
    assert cases.check_gradients(reference, model) < 2e-3
    kept = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    kinds: tuple[CheckpointKind, ...] = ("layer", "mlp")
    for kind in kinds:  # computed again in the backward pass: the same numbers
        model.checkpoint_layers, model.recompute = True, Recompute(kind)
        cases.check_gradients(reference, model)
        for n, p in model.named_parameters():
            assert p.grad is None or torch.equal(p.grad, kept[n]), (kind, n)


def test_the_page_lists_every_model_type() -> None:
    text = PAGE.read_text()
    assert cases.HEADER in text
    assert {case.model_type for case in cases.CASES.values()} == set(FAMILIES)
    for name in (*FAMILIES, *SEEING, *WRAPPERS):
        assert f"`{name}`" in text


@pytest.mark.ci
@pytest.mark.usefixtures("few_problems")
@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "mistral", "gemma2", "deepseek_v3", "gemma4", "lfm2"])
def test_the_programs_train_a_strangers_folder(name: str, tmp_path: Path) -> None:
    """SFT, then GRPO, whose probe and tolerance of 0 stop a run whose ratio is not exactly 1; then transformers."""
    cases.make(cases.CASES[name], tmp_path / "theirs")
    Tokenizer.characters(Arithmetic.alphabet, ResponseSchema().tags).save(tmp_path / "theirs")
    shared: dict[str, Any] = {
        "optim": OptimConfig(lr=1e-3, warmup_steps=1, token_budget=300, precision="float32"),
        "task": TaskConfig(name="arithmetic"),
        "validation_problems": 0,
    }
    start = PolicyConfig(init=str(tmp_path / "theirs"), num_threads=1)
    sft.train(SFTConfig(out=str(tmp_path / "sft"), policy=start, num_steps=2, batch_size=4, **shared))
    tuned = PolicyConfig(init=str(tmp_path / "sft"), num_threads=1)
    sampling, out = SamplingParams(max_new_tokens=12), tmp_path / "rl"
    rl.train(
        RLConfig(
            out=str(out),
            policy=tuned,
            rewards={"correct": 1.0, "format": 0.5},
            sampling=sampling,
            num_steps=2,
            num_prompts=2,
            group_size=3,
            preflight="warn",
            max_dead_steps=100,
            **shared,
        )
    )
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["rl/logprob_gap_max"] for row in steps if "rl/logprob_gap_max" in row]
    assert set(gaps) == {0.0}
    (last,) = (out / "checkpoints").glob("step_*2")
    model, _ = load_model(last)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(last, attn_implementation="eager")
    assert cases.check_load(theirs.eval(), model) < cases.CLOSE


def test_rope_scaling_comes_before_rope_parameters_as_in_transformers(tmp_path: Path) -> None:
    """Qwen's yarn recipe, added by hand to a folder that transformers 5 wrote: not silently left unscaled."""
    cases.make(cases.CASES["qwen2"], tmp_path)
    recipe = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 80}
    path, stored = tmp_path / "config.json", cases.stored_config(tmp_path)
    assert "rope_parameters" in stored
    for more in (
        {"rope_scaling": recipe},
        # Of 300 three blended frequencies differ by one rounding, which the logits show as 1e-4; of 1000 as 1.5e-5.
        {"rope_scaling": recipe, "rope_theta": 1000.0},
        {"rope_theta": 7.0},
    ):
        path.write_text(json.dumps(stored | more))
        reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation="eager"
        )
        model, config = load_model(tmp_path)
        assert cases.check_load(reference.eval(), model) < cases.CLOSE
        assert ("rope_scaling" in options(config)) == ("rope_scaling" in more)
    assert config.rope_theta == 500.0  # that of rope_parameters, not the one beside it


OLD_ROPES_DIFFER = {"gemma4_text", "olmo3"}


@pytest.mark.parametrize("name", cases.CASES)
def test_a_folder_is_read_by_readers_that_do_not_know_rope_parameters(name: str) -> None:
    case = cases.CASES[name]
    theirs = transformers.AutoConfig.for_model(case.model_type, **case.config).to_dict()
    config = from_hf(theirs)
    written = to_hf(config, bos_id=1, eos_ids=(2,), dtype="float32")
    assert from_hf(written) == config
    if "num_local_experts" in theirs and case.model_type.startswith("qwen"):
        assert written["num_experts"] == theirs["num_local_experts"]  # the name before transformers 5
    if "rope_parameters" in theirs and written.pop(
        "rope_parameters", None
    ):  # transformers 4 and mlx-lm ignore them
        assert (from_hf(written) == config) != (case.model_type in OLD_ROPES_DIFFER)


def test_the_older_form_of_ropes_is_transformers_4_s() -> None:
    yarn = cases.BASE | cases.YARN | {"model_type": "llama"}
    written = to_hf(from_hf(yarn), bos_id=1, eos_ids=(2,), dtype="float32")
    given = dict(yarn["rope_parameters"])
    assert written["rope_theta"] == given.pop("rope_theta")
    assert written["rope_scaling"] == given
    long = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "rope_theta": 500.0}
    long |= {"original_max_position_embeddings": 64, "partial_rotary_factor": 0.5}
    phi = cases.BASE | {"model_type": "phi3", "rope_parameters": long, "head_dim": 24}
    phi["original_max_position_embeddings"] = 64
    written = to_hf(from_hf(phi), bos_id=1, eos_ids=(2,), dtype="float32")
    assert written["rope_scaling"].keys() == {
        "type",
        "short_factor",
        "long_factor",
    }  # Phi3Config takes no other
    assert written["original_max_position_embeddings"] == 64
    assert written["partial_rotary_factor"] == 0.5
    both = {"full_attention": cases.scaled("linear", factor=8.0)["rope_parameters"]}
    both["sliding_attention"] = {"rope_type": "default", "rope_theta": 100.0}
    gemma = cases.GEMMA | {"model_type": "gemma3_text", "rope_parameters": both}
    written = to_hf(from_hf(gemma), bos_id=1, eos_ids=(2,), dtype="float32")
    assert written["rope_local_base_freq"] == 100.0
    assert written["rope_theta"] == both["full_attention"]["rope_theta"]
    assert written["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    plain = cases.BASE | {
        "model_type": "glm4",
        "rope_parameters": cases.THETA | {"partial_rotary_factor": 0.5},
    }
    written = to_hf(from_hf(plain), bos_id=1, eos_ids=(2,), dtype="float32")
    assert written["rope_scaling"] is None  # mlx-lm's GLM-4.5 asks for the key
    short = cases.CASES["lfm2"].config | {"model_type": "lfm2"}
    written = to_hf(from_hf(short), bos_id=1, eos_ids=(2,), dtype="float32")
    assert written["block_dim"] == short["hidden_size"]  # mlx-lm's LFM2 asks for it


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_rope_that_changes_with_length_ends_where_it_changes(kind: str, tmp_path: Path) -> None:
    name = "phi3-longrope" if kind == "longrope" else "llama-dynamic"
    cases.make(cases.CASES[name], tmp_path)
    assert load_model(tmp_path)[1].max_positions == (300 if kind == "longrope" else 320)


@pytest.mark.parametrize("name", ["phi3-longrope", "llama-dynamic"])
def test_long_rope_factors_are_those_of_the_whole_context(name: str, tmp_path: Path) -> None:
    """Chosen once for all lengths: as transformers computes sequences beyond the original context, and the same for
    short ones, so that what is sampled does not change when a row grows past it."""
    case = cases.CASES[name]
    context = {"max_position_embeddings": 96 if name == "llama-dynamic" else 320}
    original = {} if name == "llama-dynamic" else {"original_max_position_embeddings": 96}
    reference = cases.make(replace(case, config=case.config | context | original), tmp_path / "theirs")
    short, config = load_model(tmp_path / "theirs")
    assert config.max_positions == 96
    model, config = load_model(tmp_path / "theirs", rope_factors="long")
    assert config.max_positions == (288 if name == "llama-dynamic" else 320)
    # transformers stretches 'dynamic' to the length at hand: the whole context's is the one that both compute.
    row = cases.ids_of(288)
    expected = cases.their_logits(reference, row)
    for kind in ("exact", "fast"):
        gap = cases.our_logits(model, [row, row[:50]], kind) - torch.cat([expected, expected[:50]])
        assert gap.abs().max() < cases.CLOSE
    few = (cases.our_logits(m, [row[:90]]) for m in (short, model))
    assert torch.sub(*few).abs().max() > 0.05
    # Rows cross the original context, in training as in sampling, and what is saved remembers its factors.
    requests = [Request(prompt_ids=tuple(row[:80]), seeds=(0, 1))]
    ((sample, _),) = Engine(model, stop_ids=()).generate(requests, SamplingParams(max_new_tokens=60))
    (micro,) = pack(
        [TrainingSequence(prompt_ids=tuple(row[:80]), completion_ids=sample.ids)],
        token_budget=300,
        device=torch.device("cpu"),
    ).micro_batches
    assert torch.equal(score_micro_batch(model, micro)[0].detach(), torch.tensor(sample.logprobs))
    save_model(model, tmp_path / "ours", bos_id=1, eos_ids=(2,))
    assert load_model(tmp_path / "ours")[1] == model.config
    assert load_model(tmp_path / "ours", rope_factors="short")[1].max_positions == 96
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    gap = cases.our_logits(model, [row]) - cases.their_logits(theirs.eval(), row)
    assert gap.abs().max() < cases.CLOSE


def test_long_rope_factors_are_refused_where_no_rope_has_them(tmp_path: Path) -> None:
    for name in ("qwen3", "gpt2"):
        cases.make(cases.CASES[name], tmp_path)
        with pytest.raises(UserError, match="rope_factors = long: no rope of this model changes with length"):
            load_model(tmp_path, rope_factors="long")
        assert load_model(tmp_path, rope_factors="short")[1].max_positions == 320


def test_a_rotary_table_is_no_longer_than_what_is_read(tmp_path: Path) -> None:
    case = cases.CASES["llama"]
    long = cases.Case(family="", model_type="llama", config=case.config | {"max_position_embeddings": 2**20})
    cases.make(long, tmp_path)
    model: Any = load_model(tmp_path)[0]
    first = cases.our_logits(model, [cases.ids_of(250)])
    ((cos, _),) = model.rotary(torch.device("cpu"), 250)
    assert cos.shape[0] == 256
    cases.our_logits(model, [[1] * 300])
    ((longer, _),) = model.rotary(torch.device("cpu"), 250)
    assert longer.shape[0] == 512
    assert torch.equal(longer[:256], cos)
    assert torch.equal(cases.our_logits(model, [cases.ids_of(250)]), first)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "smollm3", "granite", "glm4", "ministral3"])
def test_a_path_that_does_not_know_an_option_declines(name: str, tmp_path: Path) -> None:
    cases.make(cases.CASES[name], tmp_path)
    model, _ = load_model(tmp_path)
    engine = Engine(model, stop_ids=())
    with engine.session(engine.room(2, 8, 8)):
        cache = engine._cache
        assert cache is not None
        assert not can_fuse(model, cache, torch.float32)
        assert not can_step(model, cache)


@pytest.mark.parametrize("name", ["llama-yarn", "qwen3", "mistral-whole"])
def test_the_compiled_step_serves_every_rope_of_whole_heads(name: str, tmp_path: Path) -> None:
    cases.make(cases.CASES[name], tmp_path)
    model, _ = load_model(tmp_path)
    engine = Engine(model, stop_ids=())
    with engine.session(engine.room(2, 8, 8)):
        assert engine._layers is not None or engine._plain is not None


def test_a_wrapper_gives_its_text_part(tmp_path: Path) -> None:
    """A checkpoint with images whose tower is not read: other prefixes, other tensors."""
    reference = cases.make(cases.CASES["mistral"], tmp_path)
    tensors, text = load_file(tmp_path / "model.safetensors"), cases.stored_config(tmp_path)
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
        save_file(renamed | {"vision_tower.x": torch.zeros(2)}, tmp_path / "model.safetensors")
        outer = {"model_type": "mistral3", "text_config": text, "vision_config": {"hidden_size": 4}}
        (tmp_path / "config.json").write_text(json.dumps(outer))
        model, config = load_model(tmp_path)
        assert config.block.is_part
        assert cases.check_load(reference, model) < cases.CLOSE


def test_gemma_4_as_its_makers_write_it(tmp_path: Path) -> None:
    """Within a checkpoint with images and sound, heads by other keys, and tensors of layers that read others' keys."""
    reference = cases.make(cases.CASES["gemma4-small"], tmp_path)
    tensors, text = load_file(tmp_path / "model.safetensors"), cases.stored_config(tmp_path)
    assert set(text.pop("per_layer_config")["1"].values()) == {32}
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    unread = ("k_proj", "v_proj", "k_norm")
    beside = {f"model.language_model.layers.4.self_attn.{name}.weight": torch.zeros(3) for name in unread}
    beside |= {f"model.{name}.x": torch.zeros(2) for name in ("audio_tower", "embed_audio", "embed_vision")}
    save_file(renamed | beside, tmp_path / "model.safetensors")
    outer = {"model_type": "gemma4", "text_config": text | {"global_head_dim": 32}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    model, config = load_model(tmp_path)
    assert cases.check_load(reference, model) < cases.CLOSE
    assert [spec.source for spec in config.layers] == [-1, -1, 0, 1, 1]
    # More tokens: both tables grow, and what was there stays.
    grown = resize_vocabulary(model, cases.VOCAB + 5, seed=0)
    assert cases.check_load(reference, grown) < cases.CLOSE
    save_model(grown, tmp_path / "grown")
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "grown", attn_implementation="eager"
    )
    assert theirs.eval().model.embed_tokens_per_layer.weight.shape[0] == cases.VOCAB + 5
    row = cases.ids_of(50)
    gap = cases.our_logits(grown, [row]) - cases.their_logits(theirs, row)[:, : cases.VOCAB]
    assert gap.abs().max() < cases.CLOSE


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("gemma4", {"enable_moe_block": True}, "enable_moe_block = 'True' is not supported; expected False"),
        (
            "gemma4",
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention = 'all' is not supported",
        ),
        ("gemma4", {"rope_theta": 5.0}, "rope_theta = '5.0' is not supported; expected None"),
        (
            "gemma4",
            {"per_layer_config": {"1": {"sliding_window": 3}}},
            "per_layer_config with 'sliding_window'",
        ),
        (
            "gemma4",
            {"num_kv_shared_layers": 2},
            "num_kv_shared_layers = 2: no layer before is of full_attention",
        ),
        (
            "gemma4-small",
            {"vocab_size_per_layer_input": 80},
            "vocab_size_per_layer_input = 80: expected vocab_size",
        ),
        ("lfm2", {"conv_dim": 32}, "conv_dim = '32' is not supported; expected 64"),
        ("lfm2", {"layer_types": ["conv", "linear_attention", "conv"]}, "layer type 'linear_attention'"),
        ("mistral", {"rope_factors": "longer"}, "rope_factors = 'longer': expected short or long"),
    ],
)
def test_what_a_family_does_not_have_is_refused_by_name(
    name: str, wrong: dict[str, Any], message: str
) -> None:
    case = cases.CASES[name]
    stored = transformers.AutoConfig.for_model(case.model_type, **case.config).to_dict()
    with pytest.raises(UserError, match=re.escape(message)):
        from_hf(stored | wrong)


def test_lfm2_as_its_makers_write_it() -> None:
    """The first files name sizes twice, and the feed-forward width and the layers of attention otherwise."""
    shared = {name: cases.LFM[name] for name in ("vocab_size", "hidden_size", "num_attention_heads")}
    shared |= {"num_hidden_layers": 3, "num_key_value_heads": 2, "model_type": "lfm2", "rope_theta": 1e6}
    first = {"block_dim": 64, "conv_dim": 64, "conv_dim_out": 64, "num_heads": 4, "block_norm_eps": 1e-5}
    first |= {"block_ff_dim": 1000, "block_multiple_of": 16, "full_attn_idxs": [1], "tie_embedding": False}
    first |= {"block_use_swiglu": True, "use_pos_enc": True, "block_use_xavier_init": True}
    config = from_hf(shared | first)
    assert (config.intermediate_size, config.tie_embeddings) == (672, False)  # 2/3 of 1000, in steps of 16
    assert [spec.mixer for spec in config.layers] == ["convolution", "attention", "convolution"]
    theirs = transformers.AutoConfig.for_model(**(shared | first)).to_dict()
    assert from_hf(theirs) == config


def supervised(name: str, folder: Path, **more: Any) -> SFTConfig:
    """Return a run of a tiny model whose memory is planned."""
    case = cases.CASES[name]
    cases.make(replace(case, config=case.config | {"max_position_embeddings": 96} | more), folder)
    Tokenizer.characters("".join(chr(0x4E00 + number) for number in range(cases.VOCAB - 5))).save(folder)
    start, optim = PolicyConfig(init=str(folder), device="cpu"), OptimConfig(max_grad_norm=1e-3)
    return SFTConfig(out="unused", policy=start, batch_size=16, optim=optim)


@pytest.mark.parametrize("name", ["lfm2", "gemma4-small", "qwen3_5"])
def test_the_planned_cache_of_layers_of_several_kinds(name: str, tmp_path: Path) -> None:
    """States in place of keys, heads of two sizes, layers without keys of their own."""
    run = supervised(name, tmp_path)
    shape = policy_shape(run.policy)
    work = workload(run, shape, PlanConfig(recipe="unused", of="sft"))
    work = replace(work, length=90, num_trained=60, rows=3, num_requests=1, precision="bfloat16_master")
    size = CacheSize(rows=3, prompt=30, completion=60, context=96, prompts=1)
    assert cache_bytes(work) == KVCache(shape, size, torch.bfloat16, torch.device("cpu")).nbytes


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("gemma3", ["sliding_attention", "full_attention"]),
        ("gemma4-small", ["full_attention"]),
        ("lfm2", ["conv"]),
        ("qwen3_5_moe", ["linear_attention"]),
    ],
)
def test_planned_activations_grow_by_the_layer_as_measured(
    name: str, types: list[str], tmp_path: Path
) -> None:
    """The difference of two depths: windows, gates, experts, convolutions and the delta rule's states."""
    peaks, rest = [], []
    for times in (1, 3):
        layers = [*types * times, *["full_attention"] * (len(types) == 1)]
        more = {"num_hidden_layers": len(layers), "layer_types": layers}
        more |= {"num_kv_shared_layers": 0} if name == "gemma4-small" else {}
        run = supervised(name, tmp_path / str(times), **more)
        loaded = load_policy(run.policy, seed=0)
        work = workload(run, loaded.model.config, PlanConfig(recipe="unused", of="sft"))
        peaks.append(measure(run, loaded, work)["backward"])
        count = sum(parameter_sizes(work.shape))
        rest.append(12 * count + packed_bytes(work, in_training=True))
    added = work.shape.layers[: 2 * len(types)]
    expected = sum(saved_bytes(work, 16 * 96, 16, spec) for spec in added) + rest[1] - rest[0]
    assert peaks[1] - peaks[0] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", [name for name in cases.CASES if name != "gpt2"])
def test_what_a_missing_key_means_is_what_transformers_takes(name: str) -> None:
    """Sizes alone: all else is the family's default. GPT-2's sizes have other names, and its folder has all of them."""
    kind = cases.CASES[name].model_type
    sizes = {k: cases.BASE[k] for k in list(cases.BASE)[:5]} | {
        "num_attention_heads": 32,
        "hidden_size": 4096,
    }
    theirs = transformers.AutoConfig.for_model(kind, **sizes).to_dict()
    assert from_hf(sizes | {"model_type": kind}) == from_hf(theirs)


def test_a_key_that_nobody_reads_is_refused_in_every_family() -> None:
    for case in cases.CASES.values():
        stored = transformers.AutoConfig.for_model(case.model_type, **case.config).to_dict()
        from_hf(stored)
        with pytest.raises(UserError, match="key 'score_bonus' is not known"):
            from_hf(stored | {"score_bonus": 2.0})


@pytest.mark.some(6)
@pytest.mark.parametrize("name", cases.CASES)
def test_a_reward_model_of_every_family(name: str, tmp_path: Path) -> None:
    """Its head replaces the output head, the trunk stays; transformers, where it has the class, scores alike."""
    case = cases.CASES[name]
    cases.make(case, tmp_path / "plain")
    model = as_reward_model(load_model(tmp_path / "plain")[0])
    with torch.no_grad():
        head = model.get_parameter("score.weight")
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(0)))
    save_model(model, tmp_path / "reward", bos_id=1, eos_ids=(2,), pad_id=0)
    with pytest.raises(UserError, match="a reward model, which scores texts"):
        load_model(tmp_path / "reward")
    again, config = load_model(tmp_path / "reward", is_reward=True)
    assert config.is_reward
    assert config == model.config
    ours = {name: p.requires_grad for name, p in model.named_parameters()}
    assert ours == {name: p.requires_grad for name, p in again.named_parameters()}
    row = [3 + token % (cases.VOCAB - 3) for token in cases.ids_of(100)]
    tokens = torch.tensor(row)
    with torch.no_grad():
        hidden_ND = again(tokens, torch.arange(100), Packed([100], torch.device("cpu")))
        score = hidden_ND[-1] @ again.get_parameter("score.weight")[0]
    if config.block.logit_scale != 1.0 or not hasattr(transformers, from_file(tmp_path / "reward")):
        return
    options: dict[str, Any] = {"output_loading_info": True, "attn_implementation": "eager"}
    loaded: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "reward", **options
    )
    theirs, info = loaded
    assert not {key: value for key, value in info.items() if value}
    with torch.no_grad():
        expected = theirs.eval()(tokens[None], use_cache=False).logits[0, 0]
    torch.testing.assert_close(score, expected, rtol=1e-4, atol=1e-4)


def from_file(folder: Path) -> str:
    """Return the class that a folder names."""
    return json.loads((folder / "config.json").read_text())["architectures"][0]


def test_experts_in_mxfp4_are_read_as_transformers_unpacks_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = cases.CASES["gpt_oss"].config | {"hidden_size": 64, "intermediate_size": 32}
    reference = cases.make(cases.Case(family="", model_type="gpt_oss", config=config), tmp_path)
    tensors, generator = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(1)
    expected = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        shape = (count, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape[:-1], generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, tmp_path / "model.safetensors")
    stored = cases.stored_config(tmp_path) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    model, _ = load_model(tmp_path)
    for name, tensor in expected.items():
        assert torch.equal(model.get_parameter(name), tensor.float()), name
        reference.get_parameter(name).data.copy_(tensor.float())
    check_shares(tmp_path)
    assert cases.check_load(reference, model) < cases.CLOSE
    assert cases.check_save(model, tmp_path / "ours") < cases.CLOSE
    assert "quantization_config" not in cases.stored_config(tmp_path / "ours")
    save_file({n: t for n, t in tensors.items() if not n.endswith("_scales")}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="tensors are missing"):
        load_model(tmp_path)


def test_a_loaded_policy_is_saved_in_the_dtype_of_its_source(tmp_path: Path) -> None:
    import whet

    cases.make(cases.CASES["qwen2"], tmp_path / "theirs")
    Tokenizer.characters(Arithmetic.alphabet, ResponseSchema().tags).save(tmp_path / "theirs")
    stored = cases.stored_config(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(stored | {"dtype": "bfloat16"}))
    policy = whet.load(str(tmp_path / "theirs"), device="cpu")
    for dtype, expected in (("", torch.float32), ("source", torch.bfloat16), ("float16", torch.float16)):
        folder = policy.save(tmp_path / f"as_{dtype}", dtype=dtype)
        assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {expected}
    with pytest.raises(UserError, match="dtype = 'int8': expected source, float32"):
        policy.save(tmp_path / "other", dtype="int8")
