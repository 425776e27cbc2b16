"""Tiny runs of every training program whose recorded steps the tests replay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from whet.generate.policy import PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.model.config import ModelConfig
from whet.recipes.models import demo_policy
from whet.train.optim.step import OptimConfig
from whet.train.rl_config import RLConfig

SHAPE = ModelConfig(
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
)
POLICY = replace(demo_policy(), model=SHAPE, max_rows=64)
SAMPLING = SamplingParams(max_new_tokens=14)


def rl_config(policy: PolicyConfig, folder: Path, **changes: Any) -> RLConfig:
    return replace(
        RLConfig(
            out=str(folder),
            policy=policy,
            rewards={"correct": 1.0, "format": 0.5},
            sampling=SAMPLING,
            optim=OptimConfig(lr=1e-3, warmup_steps=2, beta2=0.99, token_budget=200),
            num_steps=5,
            num_prompts=4,
            group_size=4,
            save_every=2,
        ),
        **changes,
    )
