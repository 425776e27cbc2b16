"""Recipes of `whet dpo`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whet.cli import Program
from whet.generate.policy import PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.inspect.memory.room import check_room, sized
from whet.recipes.models import OWN, demo_policy
from whet.recipes.suited import suited
from whet.tasks.base import TaskConfig
from whet.train.dpo import DPOConfig, check, main, plan
from whet.train.optim.step import PRESETS, OptimConfig


def own() -> DPOConfig:
    """Your model and your pairs: --policy.init MODEL --pairs FILE (prompt, chosen, rejected), by default
    Qwen2.5-0.5B-Instruct on UltraFeedback."""
    return DPOConfig(
        out="runs/own-dpo",
        policy=PolicyConfig(init=OWN, max_rows=64),
        pairs="ultrafeedback",
        optim=OptimConfig(lr=5e-7, warmup_steps=20, beta2=0.99),
        num_steps=300,
        batch_size=32,
    )


def demo() -> DPOConfig:
    """Right against wrong sums of the demo's fine-tuned model, with RPO's fine-tuning term, which keeps the format."""
    return DPOConfig(
        out="runs/demo-dpo",
        policy=demo_policy("runs/demo-sft"),
        num_problems=1024,
        sampling=SamplingParams(max_new_tokens=48),
        sft_coef=1.0,
        optim=OptimConfig(lr=2e-4, warmup_steps=10, beta2=0.99),
        num_steps=100,
        batch_size=32,
    )


def demo_reward() -> DPOConfig:
    """A reward model that tells the demo's right sums from wrong ones, for `whet rl --reward-model`."""
    return replace(
        demo(),
        out="runs/demo-reward",
        loss="reward",
        sft_coef=0.0,
        optim=OptimConfig(lr=1e-3, warmup_steps=10, beta2=0.99),
    )


def qwen25_05b_math() -> DPOConfig:
    """DPO with RPO's fine-tuning term on MATH problems, from the fine-tuned Qwen2.5-0.5B."""
    return DPOConfig(
        out="runs/qwen2.5-0.5b-math-dpo",
        policy=PolicyConfig(init="runs/qwen2.5-0.5b-math-sft", max_rows=256),
        task=TaskConfig(name="math"),
        sampling=SamplingParams(max_new_tokens=1024),
        sft_coef=1.0,
        optim=OptimConfig(
            lr=5e-7, warmup_steps=20, beta2=0.99, precision="bfloat16_master", checkpoint_layers=True
        ),
        num_steps=300,
        batch_size=64,
    )


def qwen25_05b_pairs() -> DPOConfig:
    """DPO on your own pairs (--pairs FILE: prompt, chosen, rejected) from Qwen2.5-0.5B-Instruct."""
    return DPOConfig(
        out="runs/qwen2.5-0.5b-pairs-dpo",
        policy=PolicyConfig(init="Qwen/Qwen2.5-0.5B-Instruct", system_prompt=False),
        pairs="pairs.jsonl",
        optim=OptimConfig(
            lr=5e-7, warmup_steps=20, beta2=0.99, precision="bfloat16_master", checkpoint_layers=True
        ),
        num_steps=300,
        batch_size=64,
    )


RECIPES: dict[str, Callable[[], DPOConfig]] = {
    "own": own,
    "demo": demo,
    "demo-reward": demo_reward,
    "qwen2.5-0.5b-math": qwen25_05b_math,
    "qwen2.5-0.5b-pairs": qwen25_05b_pairs,
}


PROGRAM = Program(
    config_class=DPOConfig,
    main=main,
    recipes=RECIPES,
    plan=plan,
    resumable=True,
    shared=True,
    check=check,
    before=check_room,
    sized=lambda config, typed: sized(suited(config, typed), typed),
    presets={"optim": PRESETS},
)
