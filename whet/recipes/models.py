"""Shapes and prompts of the models that recipes start from."""

from __future__ import annotations

from dataclasses import replace

from whet.generate.policy import Policy, PolicyConfig
from whet.model.config import ModelConfig
from whet.model.families import from_hf
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model
from whet.schema import SCHEMAS
from whet.tasks.base import TaskConfig
from whet.tasks.made.arithmetic import Arithmetic
from whet.tasks.made.drawing import COLOURS
from whet.tasks.made.products import Products

OWN = "Qwen/Qwen2.5-0.5B-Instruct"
"""Where `own` recipes start from, until the user names a model."""
STORIES = "models/stories260k"
"""A folder that transformers can read, made from stories260K of karpathy/tinyllamas; the hub has none in that form."""


def demo_policy(init: str = "") -> PolicyConfig:
    """A 0.4 M parameter Llama over characters, from random weights or from an earlier stage."""
    shape = ModelConfig(
        hidden_size=128,
        intermediate_size=384,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_positions=64,
        rope_theta=30.0,
        init_std=0.06,
    )
    if init:
        return PolicyConfig(init=init, max_rows=512)
    return PolicyConfig(
        model=shape,
        tokenizer="characters",
        alphabet=Arithmetic.alphabet,
        tags_as_tokens=True,
        schema="think_answer",
        template="plain",
        max_rows=512,
    )


SPACED = tuple(f" {piece}" for piece in (*"0123456789", *COLOURS))
SEEN = (
    "Assuming that all",
    " =",
    ",",
    " and",
    ". What is the sum of each row?",
    "s",
    "Row",
    ":",
    "\n",
    " ",
    "+",
    "=",
)
"""Pieces of the first level of `matrices`: colours and numbers begin with their space, as in any large vocabulary, so
that a number stands beside its colour."""


def seeing_model(seed: int) -> Policy:
    """A 0.9 M parameter Qwen3-VL with random weights: a tower of one layer, deepstack, and a decoder of three."""
    schema = SCHEMAS["think_answer"]
    tokenizer = Tokenizer.words([*SEEN, *"0123456789", *SPACED], [*schema.tags, "<image>"])
    decoder = {
        "model_type": "qwen3_vl_text",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 96,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 30.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }
    tower = {
        "model_type": "qwen3_vl",
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": decoder["hidden_size"],
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
    }
    config = from_hf(
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "image_token_id": tokenizer.encode("<image>")[0],
            "video_token_id": 0,
            "vision_start_token_id": 0,
            "vision_end_token_id": 0,
            "tie_word_embeddings": True,
            "text_config": decoder,
            "vision_config": tower,
        }
    )
    model = build_model(replace(config, init_std=0.06))
    init_weights(model, seed)
    return Policy(model, tokenizer, schema)


def calculator_policy(init: str = "") -> PolicyConfig:
    """The demo's Llama with room for a long multiplication, and a calculator that it may call."""
    if init:
        return PolicyConfig(init=init, max_rows=512)
    policy = demo_policy()
    return replace(
        policy,
        model=replace(policy.model, max_positions=128),
        alphabet=Products.alphabet,
        tools=("calculator",),
    )


CHESS_BOARDS = TaskConfig(name="mixture", weights={"chess-env": 3.0, "chess-moves": 2.0}, num_problems=20_000)
"""What moves do, by the rules alone: a small model has to learn it before it can choose among them."""
CHESS = TaskConfig(
    name="mixture", weights={"chess-policy": 1.0, "chess-env": 1.0}, num_problems=20_000, nodes=1000
)
"""Lines of the policy and of the environment in equal shares."""
ROOKWORLD = TaskConfig(name="mixture", weights={"chess-policy": 3.0, "chess-env": 1.0}, num_problems=20_000)
"""Three lines of the policy to one of the environment, as the source mixes them."""


def rookworld_policy(init: str) -> PolicyConfig:
    """A GPT-2 124M that reads and writes lines of chess with its own tokenizer."""
    return PolicyConfig(init=init, schema="none", template="plain", max_rows=128)


def chess_policy(init: str = "") -> PolicyConfig:
    """A Qwen3 of 1.2 M parameters over pieces on squares, moves and numbers, random or from an earlier stage.

    What stands on a square is looked up by its content, however far back: norms on queries and keys, and few channels
    that turn fast with the distance, let attention find it sooner (docs/LOG.md).
    """
    if init:
        return PolicyConfig(init=init, max_rows=256)
    shape = ModelConfig(
        family="qwen3",
        hidden_size=128,
        intermediate_size=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        max_positions=256,
        rope_theta=1e9,
        init_std=0.05,
    )
    return PolicyConfig(model=shape, tokenizer="boards", schema="none", template="plain", max_rows=256)


def facts_policy() -> PolicyConfig:
    """A Llama of 3 M parameters whose memories are wide for its size, over a tokenizer made for its facts."""
    shape = ModelConfig(
        hidden_size=128,
        intermediate_size=2048,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        max_positions=256,
        init_std=0.04,
    )
    return PolicyConfig(model=shape, tokenizer="runs/facts/tokenizer", schema="none", template="plain")


def gpt2_policy() -> PolicyConfig:
    """GPT-2 124M with the four tags in its padded vocabulary (50257-50260 of 50304 rows)."""
    return PolicyConfig(
        init="openai-community/gpt2",
        tags_as_tokens=True,
        padded_vocab_size=50304,
        template="base",
        max_rows=128,
    )
