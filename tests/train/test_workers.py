"""Rollout workers: a run's weights do not depend on how many there are, on what they lose, or on how slow they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import ThreadCrew
from test_samplers import make_config, run, untimed

from whet.algo.config import OffPolicyConfig
from whet.generate.backends.workers import Workers
from whet.generate.policy import Policy, PolicyConfig
from whet.ranks.ray import ClusterConfig
from whet.train import rl
from whet.train.rollout.overlap import OverlapConfig

pytestmark = pytest.mark.usefixtures("few_problems")
THREE = ClusterConfig(rollout_workers=3)


def with_workers(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[int], str | None] = lambda _: None
) -> list[tuple[Workers, ThreadCrew]]:
    """Let every run with rollout workers have threads; return them with their crews."""
    made: list[tuple[Workers, ThreadCrew]] = []

    def opened(config: ClusterConfig, policy: Policy) -> Workers | None:
        if not config.rollout_workers:
            return None
        crew = ThreadCrew(before)
        made.append((Workers(policy, config, crew, count=config.rollout_workers), crew))
        return made[-1][0]

    monkeypatch.setattr(rl, "open_workers", opened)
    return made


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


@pytest.mark.parametrize(
    "changes",
    [{}, {"off_policy": OffPolicyConfig(staleness=1), "overlap": OverlapConfig(mode="async")}],
    ids=["sync", "async"],
)
def test_workers_that_die_change_no_bit(
    changes: dict[str, Any], tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, rows = run(make_config(tiny_policy, tmp_path / "alone", kept_gib=0.0, **changes))
    draw = random.Random(0)
    fates = {call: draw.choice(["die", "late"]) for call in draw.sample(range(1, 20), 8)}
    made = with_workers(monkeypatch, fates.get)
    config = make_config(tiny_policy, tmp_path / "workers", kept_gib=0.0, cluster=THREE, **changes)
    weights, metrics = run(config)
    ((workers, crew),) = made
    assert same(alone, weights)
    assert [{n: v for n, v in row.items() if n != "rl/sync_seconds"} for row in untimed(metrics)] == untimed(
        rows
    )
    assert crew.is_closed
    assert crew.fired == workers.num_lost == sum(call <= crew.calls for call in fates) > 3
    assert workers.num_started == 3 + crew.fired
    assert metrics[-1]["rl/prompts_consumed"] + metrics[-1]["rl/prompts_dropped"] == 8
