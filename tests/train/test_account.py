"""Every prompt that the data order gave out has one state, in every mode, across a restart; a lost one is found."""

from __future__ import annotations

import json
import multiprocessing as mp
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from handmade import make_group, new_policy, problems

from whet.algo.config import AlgoConfig
from whet.generate.sampling import SamplingParams
from whet.telemetry.metrics import find_metric
from whet.train.rollout import source
from whet.train.rollout.order import EpochOrder
from whet.train.rollout.rollout import Rollout, RolloutParams
from whet.train.rollout.source import REASONS, PromptAccount, RolloutSource
from whet.types import Group, Problem, UserError

NUM_STEPS, NUM_PROMPTS = 7, 4
POLICY = new_policy()


def sampled(problem: Problem, seed: tuple[int, ...]) -> Group:
    """One of five kinds of group, by the draw alone: differing (once beside a sample without a score), equal, without
    any score, cut off."""
    kind = (seed[1] + sum(map(ord, problem.uid))) % 5
    differing: list[dict[str, float | None]] = [{"correct": 1.0}, {"correct": 0.0}, {"correct": 0.0}]
    others = {1: [{"correct": 1.0}] * 3, 2: [{"correct": None}] * 3, 4: [*differing[:2], {"correct": None}]}
    scores = others.get(kind, differing)
    return make_group(POLICY, problem, scores, finish="length" if kind == 3 else "stop")


def collect(
    policy: Any, engine: Any, task: Any, rewards: Any, mine: Sequence[Problem], *, seeds: Any, **_: Any
) -> Rollout:
    groups = [sampled(problem, seed) for problem, seed in zip(mine, seeds, strict=True)]
    return Rollout(groups, [[] for _ in groups], 0.0, 0.0)


@pytest.fixture(autouse=True)
def drawn_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "collect_groups", collect)


def new_source(algo: AlgoConfig | None = None, staleness: int = 0) -> RolloutSource:
    return RolloutSource(
        POLICY,
        None,  # type: ignore[arg-type]
        [],
        EpochOrder(problems(5), seed=0),
        algo=algo or AlgoConfig(),
        weights={"correct": 1.0},
        num_prompts=NUM_PROMPTS,
        params=RolloutParams(group_size=3, sampling=SamplingParams(max_new_tokens=10)),
        staleness=staleness,
        num_steps=NUM_STEPS,
        seed=0,
    )


def algo_of(uninformative: str, overlong: str = "none") -> AlgoConfig:
    refills = {"max_refills": 2} if uninformative == "refill" else {}
    return AlgoConfig(uninformative=uninformative, overlong=overlong, **refills)  # type: ignore[arg-type]


def expected(groups: Sequence[Group], algo: AlgoConfig) -> Counter[str]:
    """Count states of groups that were sampled, from the definitions of the words."""
    found: Counter[str] = Counter()
    for group in groups:
        rewards = {sample.reward for sample in group.samples}
        if rewards == {None}:
            found["dropped/unscored"] += 1
        elif algo.overlong == "filter" and {s.finish_reason for s in group.samples} == {"length"}:
            found["dropped/cut_off"] += 1
        elif algo.uninformative != "keep" and len(rewards) == 1:
            found["dropped/uninformative"] += 1
        else:
            found["consumed"] += 1
    return found


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("overlong", ["none", "filter"])
@pytest.mark.parametrize("uninformative", ["keep", "drop", "refill"])
def test_every_prompt_has_one_state_after_every_step(
    uninformative: str, overlong: str, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    algo = algo_of(uninformative, overlong)
    made: list[Group] = []

    def kept(*arguments: Any, **named: Any) -> Rollout:
        rollout = collect(*arguments, **named)
        made.extend(rollout.groups)
        return rollout

    monkeypatch.setattr(source, "collect_groups", kept)
    run, trained = new_source(algo, staleness), 0
    values: dict[str, float] = {}
    want: Counter[str] = Counter()
    for step in range(NUM_STEPS):
        collected = run.next(step)
        trained += expected(collected.rollout.groups, algo)["consumed"]
        values = run.close_step()
        want = expected(made, algo)
        assert values["rl/prompts_consumed"] == trained
        assert values["rl/prompts_in_flight"] == want.pop("consumed") - trained
        assert values["rl/prompts_dropped"] == sum(want.values())
        assert {n: v for n, v in values.items() if "dropped/" in n} == {f"rl/{n}": v for n, v in want.items()}
        states = [values[f"rl/prompts_{name}"] for name in ("consumed", "dropped", "in_flight")]
        assert sum(states) == run.state()["cursor"] == len(made)
        assert all(find_metric(name) for name in values)
    assert len(made) >= NUM_STEPS * NUM_PROMPTS
    assert (len(made) > NUM_STEPS * NUM_PROMPTS) == (uninformative == "refill")
    assert values["rl/prompts_in_flight"] == 0
    assert len(want) >= 1 + (overlong == "filter")


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("uninformative", ["keep", "drop", "refill"])
def test_a_run_that_is_killed_at_any_step_accounts_the_same(uninformative: str, staleness: int) -> None:
    algo = algo_of(uninformative)
    whole = new_source(algo, staleness)
    rows, states = [], [json.loads(json.dumps(whole.state()))]
    for step in range(NUM_STEPS):
        whole.next(step)
        rows.append(whole.close_step(skipped=step == 3))
        states.append(json.loads(json.dumps(whole.state())))
    assert rows[3]["rl/dropped/skipped_update"] > 0
    for start in range(NUM_STEPS):
        again = new_source(algo, staleness)
        again.load_state(states[start])
        for step in range(start, NUM_STEPS):
            again.next(step)
            assert again.close_step(skipped=step == 3) == rows[step]
        assert again.state() == states[-1]


def test_a_step_that_nobody_closes_counts_as_trained() -> None:
    told, silent = new_source(staleness=2), new_source(staleness=2)
    for step in range(3):
        told.next(step)
        told.close_step()
        silent.next(step)
    assert silent.state() == told.state()
    assert silent.close_step() == told.close_step()  # and nothing is counted twice


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_prompt_that_gets_lost_is_found(staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def losing(*arguments: Any, **named: Any) -> Rollout:
        rollout = collect(*arguments, **named)
        return replace(rollout, groups=rollout.groups[:-1], grades=rollout.grades[:-1])

    monkeypatch.setattr(source, "collect_groups", losing)
    run = new_source(staleness=staleness)
    run.next(0)
    with pytest.raises(UserError, match=r"lost or counted twice.* [13]+ pending"):
        run.close_step()


def test_waiting_samples_that_get_lost_are_found() -> None:
    run = new_source(algo_of("keep"), staleness=2)
    run.next(0)
    run._pending.pop()
    with pytest.raises(UserError, match="expected 12 given out, 2 of them in flight"):
        run.close_step()


@pytest.mark.parametrize(
    "change",
    [
        {"cursor": 17},
        {"account": {"pending": 0, "in_flight": 0, "consumed": 15, "dropped": {}}},
        {"account": {"pending": 1, "in_flight": 0, "consumed": 15, "dropped": {}}},
        {"account": {"pending": 0, "in_flight": 0, "consumed": 18, "dropped": {"unscored": -2}}},
        {"account": {"pending": 0, "in_flight": 1, "consumed": 15, "dropped": {}}},
    ],
)
def test_a_checkpoint_that_does_not_add_up_is_refused(change: dict[str, Any]) -> None:
    run = new_source()
    good = {"cursor": 16, "collected": 4, "pending": []}
    run.load_state(good | {"account": {"pending": 0, "in_flight": 0, "consumed": 16, "dropped": {}}})
    account = {"pending": 0, "in_flight": 0, "consumed": 16, "dropped": {}}
    with pytest.raises(UserError, match="lost or counted twice"):
        run.load_state(good | {"account": account} | change)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_checkpoint_of_before_the_account_goes_on(staleness: int) -> None:
    whole = new_source(staleness=staleness)
    for step in range(3):
        whole.next(step)
    state = json.loads(json.dumps(whole.state()))
    num_waiting = state.pop("account")["in_flight"]
    (state["pending"],) = state["pending"]  # of one rank
    for collected in state["pending"]:
        del collected["num_taught"]
    again = new_source(staleness=staleness)
    again.load_state(state)
    values = again.close_step()
    assert values["rl/dropped/unknown"] == state["cursor"] - num_waiting
    assert values["rl/prompts_in_flight"] == num_waiting
    for step in range(3, NUM_STEPS):
        again.next(step)
        again.close_step()


def test_reasons_are_metrics_and_states_are_whole_numbers() -> None:
    account = PromptAccount()
    account.draw(len(REASONS) + 1)
    account.sample(1, dict.fromkeys(REASONS, 1))
    account.train(1, skipped=False)
    account.audit(len(REASONS) + 1, 0)
    assert {f"rl/dropped/{reason}" for reason in REASONS} < set(account.metrics())


def _rank(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    source.collect_groups = collect  # type: ignore[assignment]
    run, rows = new_source(algo_of("refill")), []
    for step in range(3):
        run.next(step)
        rows.append(run.close_step())
    Path(f"{store}.{rank}").write_text(json.dumps([rows, run.state()["cursor"]]))
    dist.destroy_process_group()


def test_ranks_count_together(tmp_path: Path) -> None:
    """Each rank sees its own groups only; both must know the counts of all."""
    store = str(tmp_path / "store")
    context = mp.get_context("fork")  # seconds faster than a fresh interpreter
    ranks = [context.Process(target=_rank, args=(rank, store)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    first, second = (json.loads(Path(f"{store}.{rank}").read_text()) for rank in range(2))
    assert first == second
    rows, cursor = first
    assert sum(rows[-1][f"rl/prompts_{name}"] for name in ("consumed", "dropped", "in_flight")) == cursor
