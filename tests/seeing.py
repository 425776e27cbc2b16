"""A tiny model that sees, of random weights, and images for it."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.model.families import from_hf
from whet.model.lora.side import LoRAConfig
from whet.model.lora.trained import Base, Trained
from whet.model.text.template import PLAIN_TEMPLATE
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model
from whet.schema import SCHEMAS

ALPHABET = "0123456789+= abcdefghij"


def uri(*colours: int, size: tuple[int, int] = (16, 16)) -> str:
    image = Image.new("RGB", (size[0] * len(colours), size[1]))
    for place, colour in enumerate(colours):
        image.paste((colour, 255 - colour, 40 * place), (size[0] * place, 0, size[0] * (place + 1), size[1]))
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def save_model(
    where: Path,
    seed: int = 0,
    *,
    tokenizer: Tokenizer | None = None,
    max_positions: int = 128,
    tied: bool = True,
) -> Path:
    """A model of Qwen3-VL's shape whose patches are 4 pixels wide, so that an image of 16 has 4 tokens."""
    schema = SCHEMAS["think_answer"]
    if tokenizer is None:
        tokenizer = Tokenizer.characters(ALPHABET, [*schema.tags, "<image>"]).with_template(PLAIN_TEMPLATE)
    text = {"model_type": "qwen3_vl_text", "vocab_size": tokenizer.vocab_size, "hidden_size": 64} | {
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": max_positions, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 30.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
        },
    }  # fmt: skip
    tower = {
        "model_type": "qwen3_vl", "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip
    config = from_hf(
        {
            "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
            "image_token_id": tokenizer.encode("<image>")[0], "tie_word_embeddings": tied,
            "text_config": text, "vision_config": tower,
        }
    )  # fmt: skip
    model = build_model(replace(config, init_std=0.2))
    init_weights(model, seed)
    Policy(model, tokenizer, schema).save(where)
    sizes = {"size": {"shortest_edge": 64, "longest_edge": 4096}, "patch_size": 4, "merge_size": 2}
    (where / "preprocessor_config.json").write_text(json.dumps(sizes | {"temporal_patch_size": 2}))
    return where


def save_adapter(model: Path, where: Path) -> Path:
    """An adapter of random matrices on a model."""
    policy = load_policy(PolicyConfig(init=str(model)), seed=0)
    policy.trained = Trained(policy.model, LoRAConfig(rank=4), base=Base(str(model), policy.folder), seed=0)
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    policy.save(where)
    return where


def png(source: str) -> bytes:
    """The file in a data URI."""
    return base64.b64decode(source.partition(",")[2])
