"""Shapes and prompts of the models that recipes start from."""

from __future__ import annotations

from dataclasses import replace

from whet.generate.policy import PolicyConfig
from whet.model.config import ModelConfig
from whet.tasks.made.arithmetic import Arithmetic
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


def gpt2_policy() -> PolicyConfig:
    """GPT-2 124M with the four tags in its padded vocabulary (50257-50260 of 50304 rows)."""
    return PolicyConfig(
        init="openai-community/gpt2",
        tags_as_tokens=True,
        padded_vocab_size=50304,
        template="base",
        max_rows=128,
    )
