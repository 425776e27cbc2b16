"""Rollout workers: a run's weights do not depend on how many there are, on what they lose, or on how slow they are."""

from __future__ import annotations

import heapq
import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import ThreadCrew
from handmade import problems
from late import wait_for
from test_samplers import make_config, run, untimed

from whet.algo.config import OffPolicyConfig
from whet.algo.packing import TrainingSequence, pack
from whet.generate.backends import crew as crew_of_ray
from whet.generate.backends import dealing
from whet.generate.backends.dealing import Dealer, Part, portions
from whet.generate.backends.workers import Workers
from whet.generate.engine import Engine
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.rows import Completion, Request
from whet.generate.sampling import SamplingParams
from whet.model.lora.side import LoRAConfig
from whet.ranks.ray import ClusterConfig
from whet.train import rl
from whet.train.optim.step import OptimConfig
from whet.train.rollout.overlap import OverlapConfig
from whet.types import UserError

pytestmark = [pytest.mark.usefixtures("few_problems"), pytest.mark.ci]
THREE = ClusterConfig(rollout_workers=3)


def with_workers(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[int], str | None] = lambda _: None
) -> list[tuple[Workers, ThreadCrew]]:
    """Let every run with rollout workers have threads; return them with their crews."""
    made: list[tuple[Workers, ThreadCrew]] = []

    def opened(config: ClusterConfig, policy: Policy) -> Workers:
        crew = ThreadCrew(before)
        made.append((Workers(policy, config, crew, count=config.rollout_workers), crew))
        return made[-1][0]

    monkeypatch.setattr(crew_of_ray, "open_workers", opened)
    return made


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()


ASYNC: dict[str, Any] = {
    "off_policy": OffPolicyConfig(staleness=2),
    "overlap": OverlapConfig(mode="async"),
    "num_steps": 6,
}


@pytest.mark.parametrize("changes", [{}, ASYNC], ids=["sync", "async"])
def test_workers_that_die_change_no_bit(
    changes: dict[str, Any], tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, rows = run(make_config(tiny_policy, tmp_path / "alone", kept_gib=0.0, **changes))
    draw = random.Random(0)
    fates = {call: draw.choice(["die", "late"]) for call in draw.sample(range(1, 20), 8)}
    monkeypatch.setattr(dealing, "MAX_TRIES", len(fates) + 1)  # which part a call gets is up to the clock
    made = with_workers(monkeypatch, fates.get)
    config = make_config(tiny_policy, tmp_path / "workers", cluster=THREE, **changes)
    weights, metrics = run(config)
    ((workers, crew),) = made
    assert same(alone, weights)
    # Beside the steps, what is dropped is known one step later.
    ignored = (
        "rl/sync_seconds",
        *(("rl/prompts_in_flight", "rl/prompts_dropped", "rl/dropped") if changes else ()),
    )
    assert without(metrics, ignored) == without(rows, ignored)
    assert crew.is_closed
    assert crew.fired == workers.num_lost == sum(call <= crew.calls for call in fates) > 3
    assert workers.num_started == 3 + crew.fired
    counts = [metrics[-1][f"rl/prompts_{name}"] for name in ("consumed", "dropped")]
    assert sum(counts) == 2 * config.num_steps
    # Each version of the weights was sent once, and what changed alone.
    trained = sum(tensor.nbytes for tensor in weights.values())
    assert workers.num_bytes_pushed == config.num_steps * trained


def without(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {n: v for n, v in row.items() if not n.startswith(tuple(names) or ("\0",))} for row in untimed(rows)
    ]


def test_a_driver_that_ends_with_rollouts_in_flight_goes_on_with_them(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_workers(monkeypatch)
    config = make_config(tiny_policy, tmp_path / "whole", cluster=THREE, **ASYNC)
    whole, _ = run(config)
    config = replace(config, out=str(tmp_path / "broken"))
    broken = rl.steps(config)
    assert [next(broken).step for _ in range(3)] == [1, 2, 3]  # of which two are saved
    broken.close()
    saved = tmp_path / "broken/checkpoints/step_00000002/training/state.json"
    assert len(json.loads(saved.read_text())["source"]["flights"][0]) == 2
    resumed, _ = run(config, resume=True)
    assert same(whole, resumed)
    assert all(crew.is_closed for _, crew in made)
    # The same rollouts, where nothing samples elsewhere any more.
    again = replace(config, out=str(tmp_path / "broken"), cluster=ClusterConfig())
    alone, _ = run(again, resume=4)
    assert same(whole, alone)


def test_what_a_slow_worker_has_is_drawn_by_an_idle_one(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, _ = run(make_config(tiny_policy, tmp_path / "alone", kept_gib=0.0))
    monkeypatch.setattr(dealing, "LEAST_S", 0.3)
    is_over = threading.Event()

    def before(call: int) -> str | None:
        if call == 8:  # hangs for ever, for what the run would wait
            is_over.wait(20)
        return None

    made = with_workers(monkeypatch, before)
    config = make_config(tiny_policy, tmp_path / "workers", cluster=THREE)
    weights, _ = run(config)
    is_over.set()
    ((workers, _),) = made
    assert same(alone, weights)
    assert workers.num_repeated == 1


def test_work_that_kills_every_worker_ends_the_run(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_workers(monkeypatch, lambda call: "die")
    config = make_config(tiny_policy, tmp_path, cluster=ClusterConfig(rollout_workers=1))
    with pytest.raises(UserError, match=r"4 rollout workers were lost with the same work"):
        run(config)
    assert made[0][1].is_closed


def test_a_mistake_in_a_worker_is_told_here(
    tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(call: int) -> None:
        raise UserError("no memory for 7 rows")

    with_workers(monkeypatch, fail)
    with pytest.raises(UserError, match="no memory for 7 rows"):
        run(make_config(tiny_policy, tmp_path, cluster=THREE))


@pytest.mark.parametrize("kind", ["lora", "nf4", "bfloat16_autocast"])
def test_adapters_packed_matrices_and_short_numbers_are_sent(
    kind: str, tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"num_steps": 2}
    policy = tiny_policy
    if kind == "bfloat16_autocast":
        changes["optim"] = OptimConfig(lr=1e-2, warmup_steps=0, precision=kind)
    else:
        load_policy(tiny_policy, seed=0).save(tmp_path / "base")
        policy = PolicyConfig(
            init=str(tmp_path / "base"), max_rows=64, quantize="nf4" if kind == "nf4" else "none"
        )
        changes["lora"] = LoRAConfig(rank=2)
    alone, _ = run(make_config(policy, tmp_path / "alone", **changes))
    made = with_workers(monkeypatch)
    weights, metrics = run(make_config(policy, tmp_path / "workers", cluster=THREE, **changes))
    assert same(alone, weights)
    assert all(row["rl/ratio_drift"] == 0 for row in metrics)
    trained = sum(p.nbytes for p in made[0][0]._policy.model.parameters() if p.requires_grad)
    assert made[0][0].num_bytes_pushed <= 2 * trained  # of adapters, nothing of their base


def test_a_sequence_that_meets_new_weights_goes_on_with_them(tiny_policy: PolicyConfig) -> None:
    policy = load_policy(tiny_policy, seed=0)
    crew = ThreadCrew()
    config = ClusterConfig(rollout_workers=1, partial=True)
    workers = Workers(policy, config, crew, count=1)
    params = SamplingParams(max_new_tokens=24)
    prompt = policy.prompt_ids(problems(1)[0])
    requests = [Request(prompt_ids=prompt, seeds=(1, 2, 3, 4))]
    decode, steps = Engine.decode, iter(range(1 << 20))

    def decoded(self: Engine, state: Any) -> None:
        decode(self, state)
        if next(steps) == 6:  # in the middle of both parts' rows
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.mul_(1.05)
            workers.push(1, policy)
            assert wait_for(lambda: crew.hands[0].worker._is_cut)

    before = load_policy(tiny_policy, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "decode", decoded)
        (row,) = workers.generate(requests, params)
    workers.close()
    kinds = {tuple(dict.fromkeys(done.versions)) for done in row}
    assert (0, 1) in kinds
    for done in row:
        assert len(done.versions) == len(done.ids) == len(done.logprobs)
        assert list(done.versions) == sorted(done.versions)
        assert done.finish_reason == ("stop" if done.ids[-1] in policy.stop_ids else "length")
        # Each token's log-probability is the one that its own version gives it after all before.
        for version, scorer in enumerate((before, policy)):
            sequence = TrainingSequence(
                prompt_ids=prompt, completion_ids=done.ids, sampler_logprobs=done.logprobs
            )
            (micro,) = pack([sequence], token_budget=1 << 20).micro_batches
            with torch.no_grad():
                scores, _ = scorer.score(micro)
            for place, own in enumerate(done.versions):
                if own == version:
                    assert scores[place].item() == done.logprobs[place]


def test_a_stop_string_across_the_cut_ends_the_sequence(tiny_policy: PolicyConfig) -> None:
    policy = load_policy(tiny_policy, seed=0)
    policy.stop_strings = ("12",)
    workers = Workers(policy, ClusterConfig(rollout_workers=1, partial=True), ThreadCrew(), count=1)
    one, two, three = (policy.tokenizer.encode(text) for text in ("31", "24", "55"))
    before = Completion(
        ids=tuple(one), logprobs=(0.0,) * len(one), finish_reason="length", versions=(0,) * len(one)
    )
    more = (*two, *three)
    done = Completion(ids=more, logprobs=(-1.0,) * len(more), finish_reason="length")
    joined = workers._joined(before, done, 1)
    assert policy.tokenizer.decode_completion((0,), joined.ids).strip() == "312"
    assert (joined.finish_reason, joined.versions) == ("stop", (0, 0, 1))
    assert len(joined.logprobs) == 3
    assert (
        workers._joined(before, replace(done, ids=tuple(three), logprobs=(-1.0,) * 2), 1).finish_reason
        == "length"
    )
    workers.close()


def test_portions_are_of_nearly_equal_cost() -> None:
    draw = random.Random(1)
    costs = [draw.uniform(1, 50) for _ in range(101)]
    found = portions(costs, 7)
    assert sorted(place for portion in found for place in portion) == list(range(101))
    sums = [sum(costs[place] for place in portion) for portion in found]
    assert max(sums) / min(sums) < 1.02
    assert portions([5.0], 4) == [[0]]


def test_a_thousand_workers_that_die_and_dawdle_do_each_part_once() -> None:
    """The books alone, with a clock of their own: every part is answered once, and stragglers hold nothing up."""
    draw, dealer = random.Random(2), Dealer[int, int](slow_factor=3.0)
    dealer.add([Part(number, 10.0) for number in range(4000)])
    idle, ends, now, done, fresh = list(range(1000)), [], 0.0, [], 1000
    while len(done) < 4000:
        while idle and (part := dealer.deal(idle[-1], now)) is not None:
            fate = draw.random()
            seconds = 1e6 if fate < 0.01 else draw.uniform(2, 12)  # some hang for ever
            heapq.heappush(ends, (now + seconds, idle.pop(), fate > 0.97))
        if not ends or ends[0][0] > now + 1:
            now += 1
            continue
        now, worker, is_dead = heapq.heappop(ends)
        if is_dead:
            dealer.lose(worker)
            idle.append(fresh)
            fresh += 1
            continue
        if (part := dealer.answer(worker, now)) is not None:
            done.append(part.work)
        idle.append(worker)
    assert sorted(done) == list(range(4000))
    assert dealer.num_lost > 50
    assert dealer.num_repeated > 20
    assert now < 100  # four rounds of 7 s, and the deadlines of those that hang, 21 s each
