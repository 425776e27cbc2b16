"""Samplers with a copy of the weights: they get each version once, in time, and change nothing else of a run."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.algo.config import OffPolicyConfig
from whet.generate.backends.base import SamplerConfig
from whet.generate.engine import EngineStats
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.rows import Completion, Request
from whet.generate.sampling import SamplingParams
from whet.train import rl
from whet.train.optim.step import OptimConfig
from whet.train.rl_config import RLConfig
from whet.train.rollout.overlap import OverlapConfig
from whet.train.rollout.source import RolloutSource

for package in ("uvicorn", "starlette", "httpx"):
    pytest.importorskip(package, reason="whet serve is an extra: pip install 'whet[web]' httpx")
import uvicorn  # noqa: E402

from whet.serve.api import Api, make_app  # noqa: E402
from whet.serve.scheduler import Scheduler  # noqa: E402
from whet.serve.serve import LOCAL, listen  # noqa: E402

pytestmark = pytest.mark.usefixtures("few_problems")
TIMES = ("_seconds", "_per_second", "_gib", "time_s", "rl/overlap", "gib/cpu", "utilisation/cpu")


class Twin:
    """A copy of the policy that draws with what was pushed last; its tokens may say so."""

    def __init__(self, policy: Policy, *, tells: bool = False) -> None:
        self._policy = copy.copy(policy)
        self._policy.model = copy.deepcopy(policy.model)
        self._engine = self._policy.engine(trains=True)
        self.stats, self.look = EngineStats(), lambda: None
        self._tells = tells
        self.pushed: list[int] = []
        self.closed = 0

    @property
    def max_positions(self) -> int:
        return self._engine.max_positions

    def push(self, version: int, policy: Policy) -> float:
        self._policy.model.load_state_dict(policy.model.state_dict())
        self.pushed.append(version)
        return 0.25

    def generate(
        self, requests: Sequence[Request], params: SamplingParams, **options: Any
    ) -> list[list[Completion]]:
        drawn = self._engine.generate(requests, params, **options)
        if not self._tells:
            return drawn
        # As if the second half of each had been drawn one update before.
        return [[replace(done, versions=self._halves(len(done.ids))) for done in row] for row in drawn]

    def _halves(self, length: int) -> tuple[int, ...]:
        return tuple(self.pushed[-1] - (place >= length // 2) for place in range(length))

    def release(self, above: int = 0) -> None:
        self._engine.release(above)

    def close(self) -> None:
        self.closed += 1


def make_config(policy: PolicyConfig, folder: Path, **changes: Any) -> RLConfig:
    config = RLConfig(
        out=str(folder),
        policy=policy,
        sampling=SamplingParams(max_new_tokens=12),
        optim=OptimConfig(lr=1e-2, warmup_steps=0, token_budget=200),
        num_steps=4,
        num_prompts=2,
        group_size=4,
        save_every=2,
    )
    return replace(config, **changes)


def run(config: RLConfig, **options: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Train; return the weights and the metrics."""
    policy = rl.train(config, **options)
    rows = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    return {n: p.detach().clone() for n, p in policy.model.named_parameters()}, [json.loads(r) for r in rows]


def untimed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{n: v for n, v in row.items() if not n.endswith(TIMES)} for row in rows]


def with_twin(monkeypatch: pytest.MonkeyPatch, *, tells: bool = False) -> list[Twin]:
    """Let every run sample from a twin; return the twins."""
    twins: list[Twin] = []
    original = RolloutSource.__init__

    def begun(self: RolloutSource, policy: Policy, *arguments: Any, **options: Any) -> None:
        twins.append(Twin(policy, tells=tells))
        original(self, policy, *arguments, **{**options, "sampler": twins[-1]})

    monkeypatch.setattr(RolloutSource, "__init__", begun)
    return twins


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"off_policy": OffPolicyConfig(staleness=1), "overlap": OverlapConfig(mode="async")},
        {"overlap": OverlapConfig(mode="stream")},
    ],
    ids=["off", "async", "stream"],
)
def test_a_copy_of_the_weights_draws_the_same(
    changes: dict[str, Any], tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # kept_gib = 0: activations are the engine's own; with them the same bits are computed by other calls.
    weights, rows = run(make_config(tiny_policy, tmp_path / "own", kept_gib=0.0, **changes))
    twins = with_twin(monkeypatch)
    config = make_config(tiny_policy, tmp_path / "copy", kept_gib=0.0, **changes)
    copied, metrics = run(config)
    assert all(bool((weights[name] == copied[name]).all()) for name in weights)
    assert untimed(metrics) == untimed(rows)
    assert [row["rl/sync_seconds"] for row in metrics] == [0.25] * 4
    assert not any("rl/sync_seconds" in row for row in rows)
    assert [(twin.pushed, twin.closed) for twin in twins] == [([0, 1, 2, 3], 1)]

    if changes:
        return
    resumed = replace(config, out=str(tmp_path / "resumed"))
    broken = rl.steps(resumed)
    assert [next(broken).step, next(broken).step] == [1, 2]
    broken.close()
    again, _ = run(resumed, resume=True)
    assert twins[-1].pushed == [2, 3]  # the restored weights first, by their own number
    assert all(bool((weights[name] == again[name]).all()) for name in weights)


def test_tokens_say_how_old_their_weights_are(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_twin(monkeypatch, tells=True)
    seen: list[tuple[int, int]] = []
    collect = rl.sampled_metrics

    def noted(collected: Any, *arguments: Any) -> dict[str, float]:
        samples = [s for group in collected.rollout.groups for s in group.samples]
        assert all(len(s.versions) == len(s.completion_ids) for s in samples)
        seen.append(
            (
                sum(len(s.versions) - len(s.versions) // 2 for s in samples),
                sum(len(s.versions) for s in samples),
            )
        )
        return collect(collected, *arguments)

    monkeypatch.setattr(rl, "sampled_metrics", noted)
    _, rows = run(make_config(tiny_policy, tmp_path, num_steps=2))
    assert [row["rl/token_age"] for row in rows] == [old / total for old, total in seen]


@contextmanager
def whet_server(policy: Policy, *, updates: bool = True, context: int = 64) -> Iterator[str]:
    """Serve a copy of a policy in a thread of ours; give its address."""
    served = copy.copy(policy)
    served.model = copy.deepcopy(policy.model)
    served.max_rows = 5  # rows of another number than the trainer's, in an order of their own
    with Scheduler(served, context=context, max_waiting=64) as scheduler:
        api = Api(served, scheduler, name="tiny", split_thinking=False, updates=updates)
        server = uvicorn.Server(
            uvicorn.Config(make_app(api, api_key="", hosts=LOCAL), log_level="error", access_log=False)
        )
        with listen("127.0.0.1", 0) as listener:
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
            finally:
                server.should_exit = True
                thread.join(30)


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(max_new_tokens=12), SamplingParams(max_new_tokens=12, temperature=0.7, top_k=5)],
)
def test_whet_serve_as_sampler_changes_no_bit(
    sampling: SamplingParams, tiny_policy: PolicyConfig, tmp_path: Path
) -> None:
    config = make_config(tiny_policy, tmp_path / "own", sampling=sampling)
    weights, rows = run(config)
    policy = load_policy(tiny_policy, seed=1)  # other weights: what it draws with is pushed
    with whet_server(policy) as url:
        served = replace(config, out=str(tmp_path / "served"), sampler=SamplerConfig(kind="openai", url=url))
        copied, metrics = run(served)
    assert all(bool((weights[name] == copied[name]).all()) for name in weights)
    assert untimed(metrics) == untimed(rows)
    assert all(row.get("rl/ratio_drift", 0.0) == 0.0 < row["rl/sync_seconds"] for row in metrics)
    summary = json.loads((Path(served.out) / "summary.json").read_text())
    assert summary["sampler_vs_trainer"].startswith("exact: the log-probabilities of the sampler's copy")
