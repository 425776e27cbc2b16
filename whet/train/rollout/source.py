"""Where a step's rollouts come from: sampled, refilled where groups teach nothing, and aged where that is asked."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, Literal

from whet.algo.config import AlgoConfig
from whet.eval.grade import Grade
from whet.generate.activations import Activations
from whet.generate.backends.base import CopySampler
from whet.generate.backends.workers import Pinned, Workers
from whet.generate.policy import Policy
from whet.generate.probe import ProbeResult, probe_policy
from whet.ranks.collectives import all_reduce_sum, gather_json, rank, redeal, shard, world_size
from whet.ranks.context import sharing
from whet.ranks.fsdp import sharding
from whet.rewards.base import WeightedReward
from whet.tasks.tools import environment_for
from whet.telemetry.spans import span, spanned
from whet.train.objective.advantage import counted_samples, is_informative, without_advantages
from whet.train.rl_config import RLConfig
from whet.train.rollout import order as orders
from whet.train.rollout.overlap import BackgroundSampler, OverlapConfig
from whet.train.rollout.rollout import Rollout, RolloutParams, collect_groups
from whet.train.rollout.self_play import SelfPlayOrder
from whet.types import Group, Problem, Sample, Task, UserError

DataOrder = orders.DataOrder | SelfPlayOrder
"""What problems are drawn from."""

# What became of every prompt that the data order gave out: counted by state, saved, and audited each step.

Reason = Literal["unscored", "cut_off", "uninformative", "skipped_update", "unknown"]

REASONS: dict[Reason, str] = {
    "unscored": "no reward could score any sample of the group",
    "cut_off": "no sample enters the loss: all were cut off, and algo.overlong filters those",
    "uninformative": "rewards do not differ in the group, and algo.uninformative leaves such groups out",
    "skipped_update": "the step's update was left out, as its loss or gradient was not finite",
    "unknown": "trained or dropped before the account began, in a run of an older version",
}
"""Why a prompt that was given out is not trained on."""


@dataclass(slots=True)
class PromptAccount:
    """Counts of prompts, over all ranks, by what became of them. One that comes round again counts again.

    Attributes:
        pending: Given out, not sampled yet: 0 between steps.
        in_flight: Sampled, to be trained on.
        consumed: Trained on.
        dropped: Left out for good, by reason.
    """

    pending: int = 0
    in_flight: int = 0
    consumed: int = 0
    dropped: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))

    def draw(self, count: int) -> None:
        """Note prompts that the data order gives out."""
        self.pending += count

    def sample(self, count: int, dropped: Mapping[Reason, int]) -> None:
        """Note prompts whose groups were sampled.

        Args:
            count: Those that wait for their training.
            dropped: Those that the loss leaves out, by reason.
        """
        self.pending -= count + sum(dropped.values())
        self.in_flight += count
        for reason, number in dropped.items():
            self.dropped[reason] += number

    def train(self, count: int, *, skipped: bool) -> None:
        """Note prompts whose step is over; `skipped`: without its update."""
        self.in_flight -= count
        if skipped:
            self.dropped["skipped_update"] += count
        else:
            self.consumed += count

    def audit(self, cursor: int, waiting: int, flying: int = 0) -> None:
        """Check, between two steps, that no prompt is lost and none is counted twice.

        Args:
            cursor: Prompts that the data order has given out.
            waiting: Prompts in the samples that wait for their training.
            flying: Prompts that are being sampled while steps go on.

        Raises:
            UserError: With the sums, where they differ.
        """
        total = self.pending + self.in_flight + self.consumed + sum(self.dropped.values())
        counts = (self.pending, self.in_flight, self.consumed, *self.dropped.values())
        if (total, self.in_flight, self.pending) == (cursor, waiting, flying) and min(counts) >= 0:
            return
        dropped = ", ".join(f"{number} {reason}" for reason, number in self.dropped.items() if number)
        raise UserError(
            f"prompts lost or counted twice: {self.consumed} consumed + {self.in_flight} in flight + {self.pending} "
            f"pending + dropped ({dropped or 'none'}) = {total}, expected {cursor} given out, {waiting} of them in "
            "flight and none pending; go on from an earlier checkpoint, and report this"
        )

    def metrics(self) -> dict[str, float]:
        """Return the counts as metrics; reasons that never occurred are left out."""
        values = {
            "consumed": self.consumed,
            "dropped": sum(self.dropped.values()),
            "in_flight": self.in_flight + self.pending,
        }
        found = {f"rl/prompts_{name}": float(value) for name, value in values.items()}
        return found | {f"rl/dropped/{why}": float(count) for why, count in self.dropped.items() if count}

    def state(self) -> dict[str, Any]:
        """Return the counts as JSON values, for a checkpoint."""
        return {
            "pending": self.pending,
            "in_flight": self.in_flight,
            "consumed": self.consumed,
            "dropped": dict(self.dropped),
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any] | None, *, cursor: int, waiting: int, flying: int = 0
    ) -> PromptAccount:
        """Put back what `state` returned, and audit it; None begins an account for a checkpoint that has none.

        Args:
            state: What the checkpoint holds.
            cursor: Prompts that the data order had given out.
            waiting: Prompts in the samples that waited for their training.
            flying: Prompts of rollouts that were sampled while steps went on, and not sorted yet.

        Raises:
            UserError: If the sums differ.
        """
        account = cls()
        if state is None:
            account.in_flight, account.dropped["unknown"] = waiting, cursor - waiting
        else:
            account.pending, account.in_flight = int(state["pending"]), int(state["in_flight"])
            account.consumed = int(state["consumed"])
            account.dropped |= {reason: int(state["dropped"].get(reason, 0)) for reason in REASONS}
        account.audit(cursor, waiting, flying)
        return account


KEPT_CACHE = 64 * 2**20
"""Bytes of keys and values that are not given back for the training pass."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What one step trains on.

    Attributes:
        step: Steps that were done when it was sampled.
        rollout: Everything that was sampled.
        used: Places in `rollout.groups` of the groups that the loss uses.
        num_refilled: Groups sampled as refills, over all ranks.
        num_taught: Groups of which a sample enters the loss, over all ranks.
    """

    step: int
    rollout: Rollout
    used: tuple[int, ...]
    num_refilled: int
    num_taught: int

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Collected:
        """Put back together what `to_json` returned."""

        def sample(fields: dict[str, Any]) -> Sample:
            frozen: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
            return Sample(**frozen)

        rollout = data["rollout"]
        groups = [
            Group(problem=Problem(**group["problem"]), samples=tuple(map(sample, group["samples"])))
            for group in rollout["groups"]
        ]
        grades = [[Grade(**grade) for grade in row] for row in rollout["grades"]]
        seconds = (rollout["generate_seconds"], rollout["reward_seconds"])
        used = tuple(data["used"])
        taught = data.get("num_taught", len(used))
        return cls(data["step"], Rollout(groups, grades, *seconds), used, data["num_refilled"], taught)


@dataclass(frozen=True, slots=True)
class Flight:
    """A rollout that is sampled elsewhere while steps go on.

    Attributes:
        step: Steps that were done when it was begun.
        rollout: What comes of it.
    """

    step: int
    rollout: Future[Rollout]

    def to_json(self) -> dict[str, Any]:
        """Wait for it, and return it as JSON values, for a checkpoint."""
        return Collected(self.step, self.rollout.result(), (), 0, 0).to_json()

    @classmethod
    def over(cls, collected: Collected) -> Flight:
        """Return a flight that has ended, from what a checkpoint held."""
        future: Future[Rollout] = Future()
        future.set_result(collected.rollout)
        return cls(collected.step, future)


LOOK_S = 0.1
"""Seconds between looks at signals while a flight is waited for."""


class RolloutSource:
    """Samples the rollouts of a run, `staleness` steps ahead of their training.

    Args:
        policy: The policy that samples, with its present weights.
        task: Judges answers.
        rewards: The run's rewards.
        order: The problems' order.
        algo: Says what happens to groups without differences, and to long completions.
        weights: Weight of each reward by name, as `is_informative` reads them.
        num_prompts: Problems per step, over all ranks.
        params: How their groups are sampled and scored.
        staleness: Steps between sampling and training.
        num_steps: Steps of the run: nothing is sampled beyond its end.
        seed: The run's seed.
        overlap: What is sampled beside the training.
        kept_gib: Memory for what the sampler computes of each token, for the update (`whet.generate.activations`).
        sampler: What samples in place of the policy's own engine, with a copy of its weights; closed by `close`.

    Attributes:
        look: Called between the decoding steps of `next`; may raise to end it. What is drawn beside an update goes on
            to its end: without it the update's step could not be saved.
    """

    look: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        policy: Policy,
        task: Task,
        rewards: list[WeightedReward],
        order: DataOrder,
        *,
        algo: AlgoConfig,
        weights: dict[str, float],
        num_prompts: int,
        params: RolloutParams,
        staleness: int,
        num_steps: int,
        seed: int,
        overlap: OverlapConfig | None = None,
        kept_gib: float = 0.0,
        sampler: CopySampler | None = None,
    ) -> None:
        self._mode = "off" if overlap is None else overlap.mode
        self._beside: BackgroundSampler | None = None
        # Workers with versions of the weights go on while steps do: a rollout ends when its own step needs it.
        self._flights: deque[Flight] = deque()
        self._workers, self._pool = sampler if isinstance(sampler, Workers) else None, None
        if self._mode == "async" and self._workers is not None:
            # An environment may not bear two rollouts at a time.
            count = staleness + 1 if environment_for(policy.schema, task) is None else 1
            self._pool = ThreadPoolExecutor(count, "whet-flight")
        elif self._mode != "off":
            self._beside = BackgroundSampler(policy, sampler=sampler)
            policy = self._beside.policy
        self._policy, self._task, self._rewards, self._order = policy, task, rewards, order
        self._algo, self._weights = algo, weights
        self._num_prompts, self._params = num_prompts, params
        self._staleness, self._num_steps, self._seed = staleness, num_steps, seed
        keeps = self._beside is None and sampler is None and not staleness
        if keeps and kept_gib and sharding(policy.model) is None and sharing(policy.model) is None:
            policy.activations = Activations(int(kept_gib * 2**30))
        self._sampler, self._version, self._sync_seconds = sampler, -1, 0.0
        self._engine = sampler or (
            policy.engine(trains=True) if self._beside is None else self._beside.engine
        )
        self._pending: deque[Collected] = deque()
        self._num_collected = 0
        self._account = PromptAccount()
        self._training: Collected | None = None
        self._begun: int | None = None
        self._scoring, self._hidden = Lock(), 0.0

    @classmethod
    def of(
        cls,
        config: RLConfig,
        policy: Policy,
        task: Task,
        rewards: list[WeightedReward],
        order: DataOrder,
        sampler: CopySampler | None = None,
    ) -> RolloutSource:
        """Make that of a run from its config, and what samples for it in other processes."""
        return cls(
            policy,
            task,
            rewards,
            order,
            algo=config.algo,
            weights=config.reward_weights,
            num_prompts=config.num_prompts,
            params=config.rollout,
            staleness=config.off_policy.staleness,
            num_steps=config.num_steps,
            seed=config.seed,
            overlap=config.overlap,
            kept_gib=config.kept_gib,
            sampler=sampler,
        )

    def how_far(self) -> str:
        """Say how far the sampling is, for the display of a long step."""
        stats = self._engine.stats
        return f"{stats.decode_steps:,} decoding steps, {stats.new_tokens:,} tokens since the start of this process"

    def next(self, step: int) -> Collected:
        """Return what a step trains on; the step before it is then over.

        Args:
            step: Steps done before it.
        """
        self.close_step()
        ahead = min(step + self._staleness, self._num_steps - 1)
        if self._beside is not None:
            self._beside.refresh()
        self._push(step)
        if self._pool is not None:
            self._training = self._land(step, ahead)
            return self._training
        now = max(step, ahead - 1) if self._mode == "async" else ahead
        unwatched, self._engine.look = self._engine.look, self.look
        try:
            while self._num_collected <= now:
                self._keep(step, self._work(self._num_prompts)())
        finally:
            self._engine.look = unwatched
        self._training = self._pending.popleft()
        if self._beside is not None and self._num_collected <= ahead:
            self._begun = step
            self._beside.start(spanned("async_next_rollout")(self._work(self._num_prompts)))
        return self._training

    def _land(self, step: int, ahead: int) -> Collected:
        """Begin the rollouts up to that of step `ahead`, and return that of `step`."""
        assert self._pool is not None
        assert self._workers is not None
        while self._num_collected + len(self._flights) <= ahead:
            number = self._num_collected + len(self._flights)
            pinned = self._workers.pin()
            work = self._work(self._num_prompts, number, pinned)
            self._flights.append(Flight(step, self._pool.submit(_flown, pinned, work)))
        if not self._pending:  # a checkpoint of a run without workers may have left some
            flight, began = self._flights[0], time.perf_counter()
            while not wait([flight.rollout], LOOK_S).done:
                self.look()
            rollout = flight.rollout.result()
            waited = time.perf_counter() - began
            self._hidden = max(0.0, 1.0 - waited / max(rollout.generate_seconds, 1e-9))
            self._flights.popleft()
            unwatched, self._engine.look = self._engine.look, self.look
            try:
                self._keep(flight.step, rollout)
            finally:
                self._engine.look = unwatched
        return self._pending.popleft()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Let the next rollout, where it is drawn beside an update, have its share of the processor meanwhile."""
        if self._beside is None or self._begun is None:
            yield
            return
        with span("policy_update"), self._beside.sharing_threads():
            yield

    def wait(self) -> float:
        """Wait for what is drawn beside the update; return the share of its seconds that other work hid."""
        if self._beside is None:
            hidden, self._hidden = self._hidden, 0.0
            return hidden
        if self._begun is not None:
            rollout, _ = self._beside.wait()
            step, self._begun = self._begun, None
            self._keep(step, rollout)
        return self._beside.pop_overlap()

    def close(self) -> None:
        """End what is drawn beside the update."""
        if self._beside is not None:
            self._beside.close()
        if self._sampler is not None:
            self._sampler.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def order_metrics(self) -> dict[str, float]:
        """Return what self-play did so far; empty without."""
        return self._order.metrics() if isinstance(self._order, SelfPlayOrder) else {}

    def sync_metrics(self) -> dict[str, float]:
        """Return what bringing the weights to the sampler took in the last step; empty for the policy's own engine."""
        return {} if self._sampler is None else {"rl/sync_seconds": self._sync_seconds}

    def probe(self, version: int) -> ProbeResult | None:
        """Compare the log-probabilities of a sampler with a copy with the trainer's; None for the policy's own engine.

        Args:
            version: Number of updates that made the present weights.

        Raises:
            UserError: If they are not those of the same model.
        """
        if self._sampler is None:
            return None
        self._push(version)
        return probe_policy(self._policy, self._params.sampling, self._sampler)

    def _push(self, version: int) -> None:
        """Bring the weights to a sampler with a copy, if it does not have those of this version."""
        if self._sampler is None or version == self._version:
            return
        with span("weight_sync"):
            self._sync_seconds = self._sampler.push(version, self._policy)
        self._version = version

    def _keep(self, step: int, rollout: Rollout) -> None:
        self._pending.append(self._collect(step, rollout))
        self._num_collected += 1

    def close_step(self, *, skipped: bool = False) -> dict[str, float]:
        """Account for the prompts of the step that is over, and audit all prompts; return the counts as metrics.

        Args:
            skipped: Whether the step's update was left out.

        Raises:
            UserError: If a prompt is lost or counted twice.
        """
        if self._pool is None:
            self.wait()
        if self._policy.activations is not None:
            self._policy.activations.clear()
        if self._training is not None:
            self._account.train(self._training.num_taught, skipped=skipped)
            self._training = None
        self._account.audit(self._order.cursor, self._num_waiting(), len(self._flights) * self._num_prompts)
        return self._account.metrics()

    def _num_waiting(self) -> int:
        return sum(collected.num_taught for collected in self._pending)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs, as JSON values: position, waiting samples, and what became of each prompt.

        All ranks call it; the samples of all are in it.
        """
        self.close_step()
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the `state` as it is now, between two steps, also within the next one."""
        counts: dict[str, Any] = {"cursor": self._order.cursor, "collected": self._num_collected}
        if isinstance(self._order, SelfPlayOrder):
            counts["self_play"] = self._order.state()
        pending, account, flights = list(self._pending), self._account.state(), list(self._flights)

        def state() -> dict[str, Any]:
            flying = {"flights": gather_json([flight.to_json() for flight in flights])} if flights else {}
            return {
                **counts,
                "pending": gather_json([collected.to_json() for collected in pending]),
                "account": account,
                **flying,
            }

        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` returned."""
        self._order.cursor = int(state["cursor"])
        if isinstance(self._order, SelfPlayOrder) and "self_play" in state:
            self._order.load_state(state["self_play"])
        self._num_collected = int(state["collected"])
        pending = state["pending"]
        if pending and isinstance(pending[0], dict):  # of one rank, in checkpoints of earlier versions
            pending = [pending]
        self._pending = deque(_dealt(pending))
        self._flights = deque(map(Flight.over, _dealt(state["flights"]))) if "flights" in state else deque()
        self._account = PromptAccount.from_state(
            state.get("account"),
            cursor=self._order.cursor,
            waiting=self._num_waiting(),
            flying=len(self._flights) * self._num_prompts,
        )
        if self._pool is None:  # the same rollouts, sorted at once: nothing else of them is left to sample
            while self._flights:
                flight = self._flights.popleft()
                self._keep(flight.step, flight.rollout.result())

    def _collect(self, step: int, rollout: Rollout) -> Collected:
        """Refill uninformative groups where the recipe says so, and account for all."""
        if self._params.sampling.is_filtered:
            samples = [sample for group in rollout.groups for sample in group.samples]
            assert all(len(s.kept) == len(s.completion_ids) for s in samples), "the sampler records no sets"
        if self._policy.replays_experts and not all(s.experts for g in rollout.groups for s in g.samples):
            raise UserError(
                "off_policy.router_replay: the sampler does not say which experts its tokens went to; sample with "
                "whet's own engine, or leave it out"
            )
        num_refilled = 0
        for _ in range(self._algo.max_refills if self._algo.uninformative == "refill" else 0):
            (total,) = all_reduce_sum(sum(self._informative(rollout)))
            missing = self._num_prompts - int(total)
            if missing <= 0:
                break
            more = self._work(missing)()
            num_refilled += missing
            rollout = Rollout(
                rollout.groups + more.groups,
                rollout.grades + more.grades,
                rollout.generate_seconds + more.generate_seconds,
                rollout.reward_seconds + more.reward_seconds,
            )
        if isinstance(self._order, SelfPlayOrder):
            self._order.observe(rollout.groups)
        self._engine.release(above=KEPT_CACHE)
        is_kept = self._algo.uninformative == "keep"
        useful = [is_kept or teaches for teaches in self._informative(rollout)]
        used = tuple(place for place, is_used in enumerate(useful) if is_used)
        return Collected(step, rollout, used, num_refilled, self._sort(rollout, useful))

    def _sort(self, rollout: Rollout, useful: list[bool]) -> int:
        """Account for the sampled prompts, over all ranks; return of how many a sample enters the loss."""
        reasons: list[Reason | None] = []
        members = counted_samples(without_advantages(rollout.groups), self._algo)
        for group, counted, is_used in zip(rollout.groups, members, useful, strict=True):
            if all(sample.reward is None for sample in group.samples):
                reasons.append("unscored")
            elif not counted:
                reasons.append("cut_off")
            else:
                reasons.append(None if is_used else "uninformative")
        num_taught, *dropped = map(int, all_reduce_sum(*map(reasons.count, (None, *REASONS))))
        self._account.sample(num_taught, dict(zip(REASONS, dropped, strict=True)))
        return num_taught

    def _informative(self, rollout: Rollout) -> list[bool]:
        return is_informative(rollout.groups, self._algo, self._weights)

    def _work(
        self, num_prompts: int, number: int | None = None, pinned: Pinned | None = None
    ) -> Callable[[], Rollout]:
        """Draw problems; return what samples and scores their groups.

        Args:
            num_prompts: Problems, over all ranks.
            number: Number of the rollout, where others before it are not collected yet.
            pinned: What samples them, where not the run's sampler does.
        """
        drawn = self._order.next(num_prompts)
        self._account.draw(num_prompts)
        mine = [drawn[index] for index in shard(num_prompts)]
        problems = [problem for _, problem in mine]
        number = self._num_collected if number is None else number
        seeds = [(self._seed, number, epoch) for epoch, _ in mine]
        scored = self._task, self._rewards, problems
        options: dict[str, Any] = {"seeds": seeds, "params": self._params}
        if self._pool is not None:
            options["scoring"] = self._scoring
        return partial(collect_groups, self._policy, pinned or self._engine, *scored, **options)


def _flown(pinned: Pinned, work: Callable[[], Rollout]) -> Rollout:
    try:
        return work()
    finally:
        pinned.close()


def _dealt(parts: Sequence[Sequence[Mapping[str, Any]]]) -> list[Collected]:
    """Return this rank's waiting samples, of those that as many ranks, or another number of them, had."""
    if len(parts) == world_size():
        return [Collected.from_json(data) for data in parts[rank()]]
    dealt = []
    for data in zip(*parts, strict=True):
        theirs = [Collected.from_json(part) for part in data]
        items = [
            [
                (*pair, place in part.used)
                for place, pair in enumerate(zip(part.rollout.groups, part.rollout.grades, strict=True))
            ]
            for part in theirs
        ]
        own = redeal(items)
        rollout = Rollout([group for group, _, _ in own], [grades for _, grades, _ in own], 0.0, 0.0)
        used = tuple(place for place, (_, _, is_used) in enumerate(own) if is_used)
        dealt.append(replace(theirs[0], rollout=rollout, used=used))
    return dealt
