"""Rewards of many values for tiny runs, so that every group teaches something."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from whet.train.rollout.source import RolloutSource
from whet.types import Group


def reward_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace each sample's reward by one that its tokens decide."""
    plain = RolloutSource._collect

    def collect(self: RolloutSource, step: int, rollout: Any) -> Any:
        return plain(self, step, replace(rollout, groups=[scored(group) for group in rollout.groups]))

    monkeypatch.setattr(RolloutSource, "_collect", collect)


def scored(group: Group) -> Group:
    """Return the group with those rewards."""
    samples = (replace(s, reward=(sum(s.completion_ids) % 7) / 7) for s in group.samples)
    return replace(group, samples=tuple(samples))
