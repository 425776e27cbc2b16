"""Recipes of `whet rft`."""

from __future__ import annotations

from collections.abc import Callable

from whet.cli import Program
from whet.generate.policy import PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.inspect.memory.room import check_room
from whet.recipes.models import demo_policy
from whet.tasks.base import TaskConfig
from whet.train.optim.step import PRESETS, OptimConfig
from whet.train.rft import RFTConfig, check, main, plan


def demo() -> RFTConfig:
    """Two rounds on the demo's fine-tuned model: only right sums are kept, and most of them show their working."""
    return RFTConfig(
        out="runs/demo-rft",
        policy=demo_policy("runs/demo-sft"),
        num_problems=1024,
        sampling=SamplingParams(max_new_tokens=48),
        rounds=2,
        steps_per_round=100,
        optim=OptimConfig(lr=5e-4, warmup_steps=10, beta2=0.99),
        validation_problems=256,
    )


def qwen25_05b_math() -> RFTConfig:
    """Rejection sampling on MATH problems from the fine-tuned Qwen2.5-0.5B."""
    return RFTConfig(
        out="runs/qwen2.5-0.5b-math-rft",
        policy=PolicyConfig(init="runs/qwen2.5-0.5b-math-sft", max_rows=256),
        task=TaskConfig(name="math"),
        sampling=SamplingParams(max_new_tokens=1024),
        steps_per_round=300,
        optim=OptimConfig(
            lr=1e-5, warmup_steps=20, beta2=0.99, precision="bfloat16_master", checkpoint_layers=True
        ),
        validation_problems=200,
    )


RECIPES: dict[str, Callable[[], RFTConfig]] = {"demo": demo, "qwen2.5-0.5b-math": qwen25_05b_math}


PROGRAM = Program(
    config_class=RFTConfig,
    main=main,
    recipes=RECIPES,
    plan=plan,
    resumable=True,
    shared=True,
    check=check,
    before=check_room,
    presets={"optim": PRESETS},
)
