"""A reward model as a reward: what it reads, that reinforcement learning raises its score, and wrong settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.reward_model import RewardModel, messages_of
from whet.generate.sampling import SamplingParams
from whet.rewards.base import MODEL
from whet.train import rl
from whet.train.optim.step import OptimConfig
from whet.train.rl_config import RLConfig
from whet.train.setup import load_rl
from whet.types import Message, Problem, UserError


@pytest.fixture
def reward_folder(halfway: Any, tmp_path: Path) -> Path:
    """A reward model with a random head on the half-taught policy's trunk."""
    policy = load_policy(halfway.policy, seed=0, is_reward=True)
    head = policy.model.get_parameter("score.weight")
    with torch.no_grad():
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(0)))
    policy.save(tmp_path / "reward")
    return tmp_path / "reward"


def make_config(halfway: Any, reward_folder: Path, out: Path, **changes: Any) -> RLConfig:
    config = RLConfig(
        out=str(out),
        policy=halfway.policy,
        task=halfway.task,
        rewards={},
        reward_model=str(reward_folder),
        sampling=SamplingParams(max_new_tokens=12),
        optim=OptimConfig(lr=3e-3, warmup_steps=1),
        num_steps=10,
        num_prompts=8,
        group_size=8,
        save_every=10,
    )
    return replace(config, **changes)


@pytest.mark.ci
def test_reinforcement_raises_the_models_score(halfway: Any, reward_folder: Path, tmp_path: Path) -> None:
    # Of 8 prompts a step's mean is mostly which ones were drawn; of 24 the rise is 2 spreads without kernels.
    rl.train(make_config(halfway, reward_folder, tmp_path / "run", num_prompts=24))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    scores = [row["rl/reward/model"] for row in rows]
    assert all(row["rl/reward_mean"] == pytest.approx(row["rl/reward/model"]) for row in rows)
    spread = rows[0]["rl/reward_std"]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.3 * spread


@pytest.mark.ci
def test_the_model_reads_the_conversation_and_the_whole_reply(
    halfway: Any, reward_folder: Path, tmp_path: Path
) -> None:
    config = make_config(halfway, reward_folder, tmp_path / "run")
    setup = load_rl(config)
    assert config.rewards == {"model": 1.0}
    problem = setup.problems[0]
    with setup.open_judge(tmp_path) as (rewards, _):
        (reward,) = rewards
        assert (reward.name, reward.weight) == (MODEL, 1.0)
        assert reward.many is not None
        texts = ["</think><answer>3</answer>", "1" * 60]
        scores = reward.many([(problem, text) for text in texts])
    model = RewardModel(str(reward_folder), device=torch.device("cpu"))
    asked = [{"role": "user", "content": problem.prompt}]
    assert scores[0] == model.score([(asked, "<think>" + texts[0])])[0]
    assert scores[0] != model.score([(asked, texts[0])])[0]
    assert scores[1] is None  # longer than the context of 64 tokens: unscorable, not 0
    turns = (Message(role="system", content="a"), Message(role="user", content="b"))
    chat = Problem(uid="", task="", prompt="b", answer="", messages=turns)
    assert messages_of(chat) == [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]


def test_wrong_settings(halfway: Any, reward_folder: Path, tmp_path: Path, tiny_policy: PolicyConfig) -> None:
    with pytest.raises(ValueError, match="rewards.model needs reward_model"):
        RLConfig(out="x", policy=tiny_policy, rewards={"model": 1.0})
    weighed = RLConfig(out="x", policy=tiny_policy, rewards={"model": 0.5}, reward_model="y")
    assert weighed.reward_weights == {"model": 0.5}
    with pytest.raises(
        UserError, match=r"a language model; expected a reward model \(whet dpo \S+ --loss reward"
    ):
        load_rl(make_config(halfway, reward_folder, tmp_path, reward_model=halfway.policy.init))
    with pytest.raises(ValueError, match="policy.model.is_reward comes from --loss reward"):
        replace(tiny_policy, model=replace(tiny_policy.model, is_reward=True))
