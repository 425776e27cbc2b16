"""`whet plan` for models that see: the tower, images and kept features against what is alive in real steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.inspect.memory.meter import compare, measure
from whet.inspect.memory.phases import (
    Workload,
    image_bytes,
    peak,
    phases,
    state_bytes,
    trained_shapes,
    weight_bytes,
)
from whet.inspect.memory.plan import SHAPES, PlanConfig, cards, default_image_tokens, main, workload
from whet.inspect.memory.room import check_room
from whet.model.families import from_hf
from whet.model.lora.side import LoRAConfig
from whet.model.text.template import PLAIN_TEMPLATE
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.vision.store import CACHE_BYTES
from whet.model.weights import build_model
from whet.recipes.rl import qwen3_vl_8b_lora
from whet.schema import SCHEMAS
from whet.train.optim.step import OptimConfig, dtypes
from whet.train.rl_config import RLConfig
from whet.train.session import train_adapters
from whet.train.sft import SFTConfig
from whet.types import UserError

VL = "Qwen/Qwen3-VL-8B-Instruct"
SEEN = 64


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tower has more layers than its decoder, and is as wide as it."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("planned")
    schema = SCHEMAS["think_answer"]
    tokenizer = Tokenizer.characters("0123456789+=", [*schema.tags, "<image>"]).with_template(PLAIN_TEMPLATE)
    text = {
        "model_type": "qwen3_vl_text", "vocab_size": tokenizer.vocab_size, "hidden_size": 128,
        "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 100.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
        },
    }  # fmt: skip
    tower = {
        "model_type": "qwen3_vl", "depth": 4, "hidden_size": 96, "intermediate_size": 256, "num_heads": 4,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2], "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip
    hf = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
    hf |= {"image_token_id": tokenizer.encode("<image>")[0], "tie_word_embeddings": True}
    model = build_model(from_hf(hf | {"text_config": text, "vision_config": tower}))
    init_weights(model, 0)
    Policy(model, tokenizer, schema).save(folder)
    sizes = {"size": {"shortest_edge": 64, "longest_edge": 65536}, "patch_size": 4, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes | {"temporal_patch_size": 2}))
    return folder


def sft(home: Path, policy: dict[str, Any], lora: LoRAConfig | None = None, **optim: Any) -> SFTConfig:
    return SFTConfig(
        out="unused",
        policy=PolicyConfig(init=str(home), device="cpu", **policy),
        batch_size=8,
        num_steps=1,
        lora=lora or LoRAConfig(),
        optim=OptimConfig(token_budget=optim.pop("token_budget", 300), **optim),
    )


def rl(home: Path, policy: dict[str, Any], lora: LoRAConfig | None = None) -> RLConfig:
    return RLConfig(
        out="unused",
        policy=PolicyConfig(init=str(home), device="cpu", **policy),
        num_prompts=4,
        group_size=4,
        num_steps=1,
        lora=lora or LoRAConfig(),
        sampling=SamplingParams(max_new_tokens=48),
    )


LORA = LoRAConfig(rank=8)
TRAINED = {"train_vision": True}
CASES: dict[str, Callable[[Path], RLConfig | SFTConfig]] = {
    "sft": lambda home: sft(home, {}),
    "sft, tower": lambda home: sft(home, TRAINED),
    "sft, tower, master weights": lambda home: sft(home, TRAINED, precision="bfloat16_master"),
    "sft, tower, recomputed": lambda home: sft(home, TRAINED, token_budget=600, checkpoint_layers=True),
    "sft, adapters on both": lambda home: sft(home, TRAINED, LORA),
    "rl": lambda home: rl(home, {}),
    "rl, tower": lambda home: rl(home, TRAINED),
    "rl, adapters beside 4 bits": lambda home: rl(home, {"quantize": "nf4"}, LORA),
    "rl, adapters on both": lambda home: rl(home, TRAINED, LORA),
}
OFTEN = ("sft, tower", "rl, adapters beside 4 bits")


@pytest.mark.ci
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.ci] * (n not in OFTEN)) for n in CASES])
def test_prediction_is_within_a_tenth_of_what_is_alive(name: str, home: Path) -> None:
    run = CASES[name](home)
    policy = load_policy(run.policy, seed=0, **dtypes(run.optim.precision))
    if run.lora.rank:
        train_adapters(policy, run)
    program: Any = "rl" if isinstance(run, RLConfig) else "sft"
    config = PlanConfig(recipe="unused", of=program, image_tokens=SEEN, length=128)
    work = workload(run, policy.model.config, config)
    assert (work.image_tokens, work.num_trained) == (SEEN, 48 if program == "rl" else 63)
    predicted, measured = phases(work), measure(run, policy, work)
    print(compare(predicted, measured))
    for phase, value in measured.items():
        total = max(found.total for found in predicted if found.name == phase)
        assert total == pytest.approx(value, rel=0.10), phase


def test_the_published_number_of_parameters() -> None:
    """8,767,123,696, of which 576 million are the tower's; its image of 512 x 512 pixels has 256 tokens."""
    work = Workload(
        shape=SHAPES[VL],
        precision="bfloat16_master",
        device="cuda",
        attention="fast",
        length=512,
        num_trained=256,
        num_sequences=8,
        token_budget=4096,
        image_tokens=256,
        num_images=100,
    )
    assert weight_bytes(work) == 2 * 8_767_123_696
    every = sum(size.numel() for _, size in trained_shapes(replace(work, trains_tower=True)))
    own = sum(size.numel() for _, size in trained_shapes(work))
    assert every == 8_767_123_696
    assert every - own == 576_388_336
    assert state_bytes(replace(work, trains_tower=True)) - state_bytes(work) == 10 * (every - own)
    assert default_image_tokens(SHAPES[VL]) == 256
    assert default_image_tokens(SHAPES["Qwen/Qwen2.5-3B"]) == 0
    # Four maps of 4,096 channels a token: what goes in, and what is added behind three layers.
    assert image_bytes(work) == 100 * 256 * 4 * 4096 * 2
    assert image_bytes(replace(work, num_images=10**6)) == CACHE_BYTES
    assert image_bytes(replace(work, image_tokens=0)) == 0
    tower = peak(replace(work, trains_tower=True)) - peak(work)
    assert tower > 12 * (every - own)  # moments, master weights, gradients, and activations


@pytest.mark.ci
def test_the_seeds_recipe_on_three_cards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base in bfloat16 fits 192 and 80 GiB with the recipe's own batches; 24 GiB with room to spare take 4 bits."""
    run = qwen3_vl_8b_lora()
    found = {}
    for quantize in ("none", "nf4"):
        config = replace(run, policy=replace(run.policy, quantize=quantize))
        work = workload(config, SHAPES[VL], PlanConfig(recipe="unused", device="cuda", length=2048 + 1024))
        assert work.micro_sequences >= 1
        assert work.image_tokens == 256
        found[quantize] = {phase.name: phase.total / 2**30 for phase in phases(work)}
    dense, packed = found["none"], found["nf4"]
    assert 23 < max(dense.values()) < 40
    assert packed["backward"] < dense["backward"] - 9  # 7 billion matrices in half a byte each, not two
    monkeypatch.setattr("whet.inspect.memory.plan.read_recipe", lambda config: run)
    main(PlanConfig(recipe="qwen3-vl-8b-lora", device="cuda", memory_gib=192))
    text = capsys.readouterr().out
    assert "sequences of 1,536 tokens, 256 of images, 16 rows decoded together" in text
    assert "fits 192 GiB with at most: --optim.token-budget 24576 --policy.max-rows 16" in text
    assert "images  " in text
    main(PlanConfig(recipe="qwen3-vl-8b-lora", device="cuda", image_tokens=1024))
    assert "sequences of 2,304 tokens, 1,024 of images" in capsys.readouterr().out


def test_cards_quantise_the_decoder_alone() -> None:
    sizes = cards(SHAPES[VL], 1024)
    assert 2 * 576_388_336 < sizes["QLoRA, rank 16, NF4"] < sizes["LoRA, rank 16"]


def test_what_is_refused(home: Path) -> None:
    run = rl(home, {})
    for config, what in (
        (
            PlanConfig(recipe="x", image_tokens=64, length=100),
            "length = 100: expected 113 to the context's 512 tokens",
        ),
        (PlanConfig(recipe="x", image_tokens=600), "length = 512: expected 649"),
    ):
        with pytest.raises(UserError, match=what):
            workload(run, load_policy(run.policy, seed=0).model.config, config)
    with pytest.raises(UserError, match="the model reads text alone; leave it out"):
        workload(run, SHAPES["Qwen/Qwen2.5-3B"], PlanConfig(recipe="x", image_tokens=64))
    with pytest.raises(ValueError, match="image_tokens = -1: expected 0 or more"):
        PlanConfig(recipe="x", image_tokens=-1)
    for of in ("model", "cards"):
        with pytest.raises(ValueError, match="leave out set, .*image_tokens"):
            PlanConfig(recipe="x", of=of, image_tokens=64)
    assert check_room(run) == []  # a tower with more layers than the decoder is counted, too
