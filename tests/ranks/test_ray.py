"""Ray itself: rollout workers as actors that are killed, and a driver that is."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed (extra ray)")
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from test_samplers import make_config, run
from test_workers import same

from whet.generate.backends import crew
from whet.generate.backends.crew import open_workers
from whet.generate.backends.workers import Workers
from whet.generate.policy import Policy, PolicyConfig
from whet.ranks.ray import ClusterConfig

pytestmark = [
    pytest.mark.usefixtures("few_problems"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


def actors() -> list[psutil.Process]:
    """The processes of rollout workers below this one."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if "RolloutWorker" in " ".join(process.cmdline())]


def test_killed_actors_change_no_bit_and_nothing_is_left(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, _ = run(make_config(tiny_policy, tmp_path / "alone"))
    made: list[Workers] = []

    def opened(config: ClusterConfig, policy: Policy) -> Workers:
        made.append(open_workers(config, policy))
        begin, calls = made[0]._crew.call, iter(range(1000))

        def call(hand: object, method: str, *arguments: object) -> object:
            ref = begin(hand, method, *arguments)
            if method == "generate" and next(calls) in (2, 6):
                os.kill(actors()[0].pid, signal.SIGKILL)
            return ref

        monkeypatch.setattr(made[0]._crew, "call", call)
        return made[0]

    monkeypatch.setattr(crew, "open_workers", opened)
    config = make_config(tiny_policy, tmp_path / "workers", cluster=ClusterConfig(rollout_workers=2))
    weights, metrics = run(config)
    assert same(alone, weights)
    assert made[0].num_lost >= 1
    assert made[0].num_started >= 3
    assert metrics[-1]["rl/prompts_consumed"] + metrics[-1]["rl/prompts_dropped"] == 8
    assert not actors()
