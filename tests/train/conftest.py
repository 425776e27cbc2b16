"""A policy that is sometimes right and sometimes wrong, for the programs that learn from their own completions."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch

from whet.generate.policy import PolicyConfig
from whet.recipes.models import demo_policy
from whet.tasks.base import TaskConfig
from whet.train import sft
from whet.train.optim.step import OptimConfig


@dataclass(frozen=True)
class Halfway:
    """A fine-tuned run folder, as the policy to start from, and the task it half knows."""

    policy: PolicyConfig
    task: TaskConfig


@pytest.fixture(scope="session")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Halfway:
    """Fine-tune a tiny model on sums of two digits until about half of its answers are right."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("halfway")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "solution": ""} for a in range(6) for b in range(6)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TaskConfig(name="jsonl", path=str(folder / "sums.jsonl"))
    start = demo_policy()
    shape = replace(start.model, hidden_size=32, intermediate_size=64, head_dim=8)
    sft.train(
        sft.SFTConfig(
            out=str(folder / "sft"),
            policy=replace(start, model=shape, max_rows=64),
            task=task,
            optim=OptimConfig(lr=1e-2, warmup_steps=2, schedule="constant"),
            num_steps=60,
            batch_size=32,
            validation_problems=0,
        )
    )
    return Halfway(PolicyConfig(init=str(folder / "sft"), max_rows=64), task)
