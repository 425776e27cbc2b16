"""The decoders against `transformers`: same weights, same logits; in both directions, whole and in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from needs import SHARED, needs
from safetensors.torch import load_file

from whet.algo.logprobs import head_logits
from whet.generate.engine import Engine, Request
from whet.generate.sampling import SamplingParams
from whet.model.attention import AttentionKind, Packed
from whet.model.config import ModelConfig, RopeScaling
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model, load_model, save_model

STORIES = SHARED / "data/models/stories260k"

# Both sides compute in float32 with sums in another order: logits of size 1 to 30 differ by some 1e-6 of that.
# A wrong epsilon, position, bias or head order moves them by 1e-3 and more, since no weight is near zero here.
CLOSE = 1e-4

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 500.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
SMALL = {
    "vocab_size": 91,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-3,
    "rope_parameters": DEFAULT_ROPE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
SMALL_GPT2 = {
    "vocab_size": 91,
    "n_embd": 48,
    "n_head": 6,
    "n_layer": 2,
    "n_inner": 100,
    "n_positions": 160,
    "layer_norm_epsilon": 1e-3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", SMALL | {"tie_word_embeddings": True}),
    "llama-biases": ("llama", SMALL | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}),
    "llama-long-rope": ("llama", SMALL | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-untied": ("llama", SMALL | {"tie_word_embeddings": False}),
    "llama-wide-heads": ("llama", SMALL | {"head_dim": 14}),
    "qwen2": ("qwen2", SMALL | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", SMALL | {"head_dim": 16}),
    "qwen3-bias": ("qwen3", SMALL | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", SMALL_GPT2),
    "gpt2-untied": ("gpt2", SMALL_GPT2 | {"tie_word_embeddings": False, "n_inner": None}),
}
SHAPE: dict[str, Any] = {
    "vocab_size": 91,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_positions": 160,
    "norm_eps": 1e-3,
    "rope_theta": 500.0,
}
SHAPE_GPT2 = SHAPE | {"family": "gpt2", "num_kv_heads": 6, "rope_theta": 10000.0}
LONG = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=24)
OURS: dict[str, ModelConfig] = {
    "llama-gqa": ModelConfig(**SHAPE),
    "llama-biases": ModelConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama-long-rope": ModelConfig(**SHAPE, rope_scaling=LONG),
    "llama-untied": ModelConfig(**SHAPE, tie_embeddings=False),
    "llama-wide-heads": ModelConfig(**(SHAPE | {"head_dim": 14})),
    "qwen2": ModelConfig(**SHAPE, family="qwen2"),
    "qwen3": ModelConfig(**(SHAPE | {"head_dim": 16}), family="qwen3", tie_embeddings=False),
    "gpt2": ModelConfig(**SHAPE_GPT2),
    "gpt2-untied": ModelConfig(**(SHAPE_GPT2 | {"intermediate_size": 192}), tie_embeddings=False),
}


def roughen(model: torch.nn.Module) -> None:
    """Give every weight a size that shows in the logits; biases and norms leave their 0 and 1."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.empty(parameter.shape).normal_(0.0, 0.2, generator=generator)
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)


def their_model(kind: str) -> transformers.PreTrainedModel:
    family, options = THEIRS[kind]
    config = transformers.AutoConfig.for_model(family, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    roughen(model)
    return model


def their_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def our_logits(model: LanguageModel, rows: list[list[int]], kind: AttentionKind = "exact") -> torch.Tensor:
    tokens = torch.tensor([token for row in rows for token in row])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    lengths = [len(row) for row in rows]
    with torch.no_grad():
        hidden = model(tokens, positions, Packed(lengths, torch.device("cpu"), kind))
        logits = head_logits(hidden, model.head_weight, temperature=1.0, num_valid=model.num_valid_tokens)
    return logits[:, : model.config.vocab_size]


def some_ids(length: int, vocab: int = 91, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


def load_theirs(folder: Path) -> transformers.PreTrainedModel:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    faults = {key: value for key, value in info.items() if value}
    assert not faults, f"transformers complains about our folder: {faults}"
    return model.eval()


@pytest.mark.parametrize("kind", THEIRS)
def test_theirs_loads_here(kind: str, tmp_path: Path) -> None:
    reference = their_model(kind)
    reference.save_pretrained(tmp_path)
    model, config = load_model(tmp_path)
    assert config.family == THEIRS[kind][0]
    ids = some_ids(150)  # beyond the 24 original positions of the stretched rope, and beyond one key block
    expected = their_logits(reference, ids)
    assert expected.std() > 0.5
    for attention in ("exact", "fast"):
        torch.testing.assert_close(our_logits(model, [ids], attention), expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("kind", OURS)
def test_ours_loads_there(kind: str, tmp_path: Path) -> None:
    model = build_model(OURS[kind])
    init_weights(model, seed=1)
    roughen(model)
    save_model(model, tmp_path, bos_id=1, eos_ids=(2, 5))
    reference = load_theirs(tmp_path)
    ids = some_ids(150)
    torch.testing.assert_close(our_logits(model, [ids]), their_logits(reference, ids), atol=CLOSE, rtol=0)
    assert type(reference).__name__ == json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    assert reference.generation_config.eos_token_id == [2, 5]
    again, config = load_model(tmp_path)
    assert config == OURS[kind]
    for (name, ours), (_, loaded) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(ours, loaded), name


def test_the_stretched_rope_matters() -> None:
    """Control: the llama3 cases above would not notice a rope that is never stretched, if it changed nothing."""
    model = build_model(OURS["llama-gqa"])
    init_weights(model, seed=1)
    roughen(model)
    stretched = build_model(OURS["llama-long-rope"])
    stretched.load_state_dict(model.state_dict())
    ids = some_ids(150)
    assert (our_logits(model, [ids]) - our_logits(stretched, [ids])).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["llama-untied", "gpt2"])
def test_shards_both_ways(kind: str, tmp_path: Path) -> None:
    reference = their_model(kind)
    reference.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    model, _ = load_model(tmp_path / "theirs")
    ids = some_ids(40)
    expected = their_logits(reference, ids)
    torch.testing.assert_close(our_logits(model, [ids]), expected, atol=CLOSE, rtol=0)
    save_model(model, tmp_path / "ours", shard_bytes=20_000)
    files = sorted((tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 2
    stored = [name for file in files for name in load_file(file)]
    assert sorted(stored) == sorted(name for name, _ in model.named_parameters())
    for file in files:  # a tensor is never split, so one larger than the limit has a file of its own
        sizes = [tensor.nbytes for tensor in load_file(file).values()]
        assert sum(sizes) <= 20_000 or len(sizes) == 1
    torch.testing.assert_close(their_logits(load_theirs(tmp_path / "ours"), ids), expected, atol=1e-6, rtol=0)
    again, _ = load_model(tmp_path / "ours")
    assert torch.equal(our_logits(again, [ids]), our_logits(model, [ids]))


def test_a_tied_head_is_one_tensor_here_and_there(tmp_path: Path) -> None:
    model = build_model(OURS["llama-gqa"])
    init_weights(model, seed=1)
    save_model(model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded, _ = load_model(tmp_path)
    embeddings = loaded.get_parameter("model.embed_tokens.weight")
    assert loaded.head_weight is embeddings
    assert embeddings.requires_grad
    reference: Any = load_theirs(tmp_path)
    assert reference.lm_head.weight.data_ptr() == reference.model.embed_tokens.weight.data_ptr()


def test_bfloat16_is_stored_and_read_as_such(tmp_path: Path) -> None:
    model = build_model(OURS["qwen2"])
    init_weights(model, seed=1)
    model = model.to(torch.bfloat16)
    save_model(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert load_theirs(tmp_path).dtype == torch.bfloat16
    loaded, _ = load_model(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(loaded.head_weight, model.head_weight)


@pytest.mark.parametrize("attention", ["exact", "fast"])
@pytest.mark.parametrize("kind", ["llama-gqa", "gpt2"])
def test_packed_rows_do_not_see_each_other(kind: str, attention: AttentionKind) -> None:
    model = build_model(OURS[kind])
    init_weights(model, seed=1)
    roughen(model)
    rows = [some_ids(length, seed=length) for length in (1, 33, 7, 130, 32, 2)]
    packed = our_logits(model, rows, attention)
    alone = torch.cat([our_logits(model, [row], attention) for row in rows])
    # The same float32 sums up to their order; a token that sees its neighbour changes by whole units.
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=0)
    other = [rows[0], some_ids(33, seed=99), *rows[2:]]
    changed = (our_logits(model, other, attention) - packed).abs().amax(-1)
    assert changed[:1].max() < 2e-5
    assert changed[34:].max() < 2e-5
    assert changed[1:34].max() > 1.0


def test_gpt2_small_has_its_published_size() -> None:
    """124,439,808 parameters in 148 tensors: openai-community/gpt2 without its attention-mask buffers."""
    with torch.device("meta"):
        model = build_model(
            ModelConfig(
                family="gpt2",
                vocab_size=50257,
                hidden_size=768,
                intermediate_size=3072,
                num_layers=12,
                num_heads=12,
                num_kv_heads=12,
                head_dim=64,
                max_positions=1024,
            )
        )
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert (sum(sizes), len(sizes)) == (124_439_808, 148)


@needs("shared/data/models/stories260k")
def test_stories_writes_the_same_story() -> None:
    reference: Any = load_theirs(STORIES)
    model, config = load_model(STORIES)
    tokenizer = Tokenizer.load(STORIES)
    bos = tokenizer.bos_id
    assert bos is not None
    prompt = [bos, *tokenizer.encode("Once upon a time, there was a little")]
    expected = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=200,
        min_new_tokens=200,
        pad_token_id=0,
    )[0].tolist()
    assert len(expected) == len(prompt) + 200
    torch.testing.assert_close(
        our_logits(model, [expected]), their_logits(reference, expected), atol=CLOSE, rtol=0
    )
    assert config.vocab_size == tokenizer.vocab_size == 512
    request = Request(prompt_ids=tuple(prompt), seeds=(0,))
    engine = Engine(model, stop_ids=())
    ((story,),) = engine.generate([request], SamplingParams(temperature=0.0, max_new_tokens=200))
    assert prompt + list(story.ids) == expected
