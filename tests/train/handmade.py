"""A very small policy and groups written by hand: what the objective's tests train on, in milliseconds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from whet.algo.config import AlgoConfig, OffPolicyConfig, ValueConfig
from whet.generate.policy import Policy, load_policy
from whet.generate.scoring import score_micro_batch
from whet.model.config import ModelConfig
from whet.recipes.models import demo_policy
from whet.tasks.made.arithmetic import Arithmetic
from whet.train.objective.advantage import training_sequences, with_advantages
from whet.train.objective.objective import Objective, pack
from whet.train.optim.step import OptimConfig, Optimizer
from whet.types import Group, Problem, Sample

SHAPE = ModelConfig(
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=64,
)
WEIGHTS = {"correct": 1.0, "format": 0.5}
MAX_LENGTH = 10


def new_policy() -> Policy:
    return load_policy(replace(demo_policy(), model=SHAPE, max_rows=64), seed=0)


@cache
def problems(count: int = 6) -> tuple[Problem, ...]:
    return tuple(Arithmetic().problems("train")[:count])


def weights_of(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in policy.model.parameters()])


def make_group(
    policy: Policy,
    problem: Problem,
    scores: Sequence[Mapping[str, float | None]],
    *,
    lengths: Sequence[int] | None = None,
    finish: str = "stop",
    seed: int = 0,
) -> Group:
    """A group with these scores by reward name; None makes a sample unscorable. Log-probabilities are made up."""
    draw = random.Random(f"{seed} {problem.uid}")
    lengths = [draw.randint(3, 9) for _ in scores] if lengths is None else lengths
    samples = []
    for index, (parts, length) in enumerate(zip(scores, lengths, strict=True)):
        mean = draw.uniform(-3.2, -2.6)  # around that of the policy, which begins with all tokens alike
        values = [None if part is None else WEIGHTS[name] * part for name, part in parts.items()]
        samples.append(
            Sample(
                uid=problem.uid,
                index=index,
                prompt_ids=policy.prompt_ids(problem),
                completion_ids=tuple(draw.randint(3, 12) for _ in range(length)),
                sampler_logprobs=tuple(mean + draw.uniform(-1.2, 1.2) for _ in range(length)),
                text="",
                finish_reason=finish,  # type: ignore[arg-type]
                rewards=dict(parts),
                reward=None if None in values else sum(value for value in values if value is not None),
            )
        )
    return Group(problem=problem, samples=tuple(samples))


def random_groups(policy: Policy, count: int = 6) -> list[Group]:
    draw = random.Random(5)
    return [
        make_group(
            policy,
            problem,
            [
                {"correct": float(draw.random() < 0.5), "format": draw.choice([0.0, 0.5, 1.0])}
                for _ in range(4)
            ],
            finish=draw.choice(["stop", "length"]),
        )
        for problem in problems(count)
    ]


def on_policy(policy: Policy, groups: Sequence[Group]) -> list[Group]:
    """Replace the made-up log-probabilities by the policy's own."""
    fresh = []
    for group in with_advantages(groups, AlgoConfig(), WEIGHTS):
        batch = pack(training_sequences([group], AlgoConfig()), token_budget=100_000)
        (micro,) = batch.micro_batches
        with torch.no_grad():
            logprobs_M, _ = score_micro_batch(policy.model, micro)
        ends = torch.bincount(micro.sequence_M).cumsum(0).tolist()
        rows = {
            index: tuple(logprobs_M[start:end].tolist())
            for index, start, end in zip(micro.indices_B, [0, *ends], ends, strict=False)
        }
        samples = tuple(
            replace(s, sampler_logprobs=rows[i], advantage=None) for i, s in enumerate(group.samples)
        )
        fresh.append(replace(group, samples=samples))
    return fresh


@dataclass
class Play:
    """What some steps on the same groups did."""

    policy: Policy
    objective: Objective
    rows: list[dict[str, float]]

    @property
    def weights(self) -> torch.Tensor:
        return weights_of(self.policy)


def play(
    algo: AlgoConfig,
    *,
    off_policy: OffPolicyConfig | None = None,
    value: ValueConfig | None = None,
    groups: Sequence[Group] | None = None,
    num_steps: int = 2,
    lr: float = 1e-2,
    reward_weights: dict[str, float] = WEIGHTS,
) -> Play:
    """Train a fresh policy for some steps on fixed groups."""
    policy = new_policy()
    optim = OptimConfig(lr=lr, token_budget=400)
    objective = Objective(
        policy,
        algo,
        optim=optim,
        temperature=1.0,
        max_length=MAX_LENGTH,
        off_policy=off_policy,
        value=value,
    )
    optimizer = Optimizer(policy.model, optim)
    filled = with_advantages(random_groups(policy) if groups is None else list(groups), algo, reward_weights)
    rows = [
        objective.update(filled, optimizer, lr, step=step, progress=step / max(1, num_steps - 1))
        for step in range(num_steps)
    ]
    return Play(policy, objective, rows)
