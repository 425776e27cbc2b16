"""Parts of a step's gradient: the sum of any parts is the whole, whatever the memory says meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from handmade import MAX_LENGTH, WEIGHTS, new_policy, random_groups
from scene import islands_as

from whet.algo.config import AlgoConfig
from whet.train.objective.advantage import is_informative, with_advantages
from whet.train.objective.objective import Objective
from whet.train.optim.step import OptimConfig, Optimizer
from whet.types import Group


class Kept(Optimizer):
    """Keeps the gradients that it saw, and clears them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model, OptimConfig())
        self.seen: list[torch.Tensor] = []

    def step(self, lr: float, *, loss: float = 0.0) -> float:
        self.seen.append(torch.cat([p.grad.flatten().clone() for _, p in self._named if p.grad is not None]))
        for _, parameter in self._named:
            parameter.grad = None
        return 0.0


class Scene:
    """An objective in float64 on groups by hand."""

    def __init__(self, algo: AlgoConfig, part_groups: int, token_budget: int = 400) -> None:
        policy = new_policy()
        policy.model.to(torch.float64)
        self.optimizer = Kept(policy.model)
        self.objective = Objective(
            policy,
            algo,
            optim=OptimConfig(token_budget=token_budget),
            temperature=1.0,
            max_length=MAX_LENGTH,
            part_groups=part_groups,
        )
        groups = with_advantages(random_groups(policy), algo, WEIGHTS)
        used = is_informative(groups, algo, WEIGHTS)
        self.groups = [
            g for g, teaches in zip(groups, used, strict=True) if teaches or algo.uninformative == "keep"
        ]

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        return self.objective.update(groups, self.optimizer, 0.1, progress=0.5)

    @property
    def gradient(self) -> torch.Tensor:
        return self.optimizer.seen[-1]


ALGOS = {
    "token_mean": AlgoConfig(),
    "sequence_mean": AlgoConfig(aggregation="sequence_mean", uninformative="keep"),
    "prompt_mean": AlgoConfig(aggregation="prompt_mean", overlong="filter"),
    "constant": AlgoConfig(aggregation="constant", scale="none"),
    "kl": AlgoConfig(kl="k3_loss", kl_coef=0.5, entropy_coef_final=0.2),
    "gspo": AlgoConfig(ratio="sequence", aggregation="sequence_mean"),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", ALGOS)
def test_parts_add_up_to_the_whole(name: str) -> None:
    with islands_as(torch.float64):  # what float32 sums round depends on the cut
        check_parts(name)


def check_parts(name: str) -> None:
    whole, one = Scene(ALGOS[name], 0), Scene(ALGOS[name], 9)
    expected = whole.update(whole.groups)
    assert whole.gradient.abs().max() > 1e-3
    one.update(one.groups)
    assert (one.gradient - whole.gradient).norm() < 1e-12 * whole.gradient.norm()
    for part_groups in (1, 2, 4):
        parts = Scene(ALGOS[name], part_groups)
        for group in parts.groups[:-1]:
            parts.objective.add(group, 0.5)
        assert parts.update(parts.groups) == pytest.approx(expected, rel=1e-10)
        assert (
            parts.gradient - one.gradient
        ).norm() < 1e-12 * one.gradient.norm()  # float64 sums, another order
        assert parts.objective.num_tokens_read == whole.objective.num_tokens_read
        again = Scene(ALGOS[name], part_groups)
        again.update(again.groups)
        assert torch.equal(again.gradient, parts.gradient)  # given at once, they are cut into the same parts


def test_a_memory_that_is_too_small_restarts_all_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = Scene(AlgoConfig(), 2, token_budget=100)
    expected.update(expected.groups)
    scene, count = Scene(AlgoConfig(), 2, token_budget=200), 0
    original = Objective._micro_loss

    def fail(self: Objective, *arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:  # in the middle of the second part
            raise torch.OutOfMemoryError("no room")
        return original(self, *arguments, **options)

    monkeypatch.setattr(Objective, "_micro_loss", fail)
    for group in scene.groups:
        scene.objective.add(group, 0.0)
    scene.update(scene.groups)
    assert "micro-batches now have 100 tokens" in capsys.readouterr().out
    assert torch.equal(scene.gradient, expected.gradient)


def test_groups_that_come_in_another_order_are_a_fault() -> None:
    scene = Scene(AlgoConfig(), 2)
    scene.objective.add(scene.groups[1], 0.0)
    with pytest.raises(AssertionError):
        scene.update(scene.groups)
