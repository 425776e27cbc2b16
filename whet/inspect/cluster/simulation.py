"""A run on many processes as a queue: who waits for whom, computed from the seconds that each part of a step takes.

A discrete-event simulation with a clock of its own. The rollouts are cut and dealt by the code of a real run
(`whet.generate.backends.dealing`), so that lost and late work is treated as it is there; the order of a step is that of
`whet.train.rollout.source`: push the weights, begin the rollouts up to `staleness` steps ahead, wait for the own one,
update. Everything random comes from one seed.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from whet.generate.backends.dealing import PORTIONS, Dealer, Part, portions
from whet.types import UserError

LOOKS = 4
"""Times that idle workers look for late work while a median part is drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds that the parts of a step take on a process that has its device to itself.

    Attributes:
        call_s: A call of a worker, whatever it draws.
        decode_s: A decoding step, whatever the number of rows.
        row_s: A token of one row of it.
        prompt_s: A token of a prompt.
        reward_s: Scoring a sample, by its trainer rank, beside its training if rollouts run ahead.
        update_s: A step's update, whatever its size.
        token_s: A token that is trained on, by one rank alone.
        reduce_s: Adding up the gradients of very many ranks; of T ranks (T - 1) / T of it, as in a ring.
        push_s: Laying down new weights.
        fetch_s: Reading them, by a worker.
        rest_s: What else a step takes.
    """

    decode_s: float = 0.0
    row_s: float = 0.0
    call_s: float = 0.0
    prompt_s: float = 0.0
    reward_s: float = 0.0
    update_s: float = 0.0
    token_s: float = 0.0
    reduce_s: float = 0.0
    push_s: float = 0.0
    fetch_s: float = 0.0
    rest_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a step consists of.

    Attributes:
        groups: Lengths of completions, by group, that those of a step are drawn from; each group has as many.
        num_prompts: Groups of a step, over all ranks.
        prompt_tokens: Tokens of a prompt.
        max_rows: Sequences that a process decodes together.
        staleness: Updates that the weights of a rollout are behind; 0 samples and trains in turn.
        partial: Whether sequences go on with new weights when these come.
        save_every: Steps between checkpoints, which wait for the rollouts that are under way.
    """

    groups: tuple[tuple[int, ...], ...]
    num_prompts: int
    prompt_tokens: float = 0.0
    max_rows: int = 1 << 30
    staleness: int = 0
    partial: bool = False
    save_every: int = 0

    @property
    def group_size(self) -> int:
        """Samples of a group."""
        return len(self.groups[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Who works, on what, and how it fails.

    Attributes:
        trainers: Ranks that train.
        workers: Processes that sample, over all ranks; 0 lets the ranks sample in turn with training.
        cores: Cores that all processes share; 0 gives each a device of its own.
        trainer_cores: Cores that a training rank uses.
        slow_factor: Times the median after which a part is late (`cluster.slow_factor`).
        mtbf_s: Mean time between failures of one process; 0 for none.
        restart_s: Seconds until a lost worker's successor is ready, or a lost group of ranks.
        straggler_share: Share of parts that take longer by `straggler_factor`.
        straggler_factor: See there.
    """

    trainers: int = 1
    workers: int = 1
    cores: float = 0.0
    trainer_cores: float = 1.0
    slow_factor: float = 4.0
    mtbf_s: float = 0.0
    restart_s: float = 30.0
    straggler_share: float = 0.0
    straggler_factor: float = 10.0


@dataclass(slots=True)
class Result:
    """What a run of some steps took.

    Attributes:
        steps: Steps that count, each once.
        seconds: Time of all of them.
        train_s: Of it, updates and what else the trainer does (also those that a failure undid).
        sync_s: Of it, laying down weights.
        wait_s: Of it, waiting for samples.
        save_s: Of it, waiting for rollouts that a checkpoint includes.
        down_s: Of it, restarts of the trainer.
        step_s: Time at which each step ended.
        drawn_s: Seconds in which workers drew what counted.
        lost_s: Seconds in which workers drew what did not: it was lost with them, or repeated.
        capacity_s: Seconds of all workers.
        tokens: Tokens that were trained on, in steps that count.
        ages: Tokens by how many updates their weights were behind.
        num_lost: Parts that were drawn again since their worker was lost.
        num_repeated: Parts that were given to a second worker.
        num_failed: Processes that failed.
        num_stops: Times that a real run would have ended: too many workers lost with one part.
        num_undone: Steps that were done again after a trainer failed.
    """

    steps: int = 0
    seconds: float = 0.0
    train_s: float = 0.0
    sync_s: float = 0.0
    wait_s: float = 0.0
    save_s: float = 0.0
    down_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    drawn_s: float = 0.0
    lost_s: float = 0.0
    capacity_s: float = 0.0
    tokens: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    num_lost: int = 0
    num_repeated: int = 0
    num_failed: int = 0
    num_stops: int = 0
    num_undone: int = 0

    @property
    def seconds_per_step(self) -> float:
        """Seconds of a step, without the first quarter: there, pipelines fill."""
        first = len(self.step_s) // 4
        if len(self.step_s) < 2:
            return self.seconds / max(1, self.steps)
        return (self.step_s[-1] - self.step_s[first]) / (len(self.step_s) - 1 - first)


def decode_steps(lengths: Sequence[int], max_rows: int) -> int:
    """Return the steps in which an engine decodes sequences, where a row that ends makes room for the next one."""
    if len(lengths) <= max_rows:
        return max(lengths, default=0)
    ends = [0] * max_rows
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def drawing_s(lengths: Sequence[int], costs: Costs, load: Load) -> float:
    """Return the seconds in which one process alone draws sequences of these lengths."""
    prompts = -(-len(lengths) // load.group_size)
    return (
        costs.call_s
        + costs.decode_s * decode_steps(lengths, load.max_rows)
        + costs.row_s * sum(lengths)
        + costs.prompt_s * load.prompt_tokens * prompts
    )


@cache
def parts_of(num_prompts: int, group_size: int, workers: int) -> tuple[tuple[int, ...], ...]:
    """Return how a rank deals a rollout out: for each part, the numbers of its samples; see `Workers._parts`."""
    count = workers * PORTIONS
    pieces = -(-count // num_prompts)
    size = max(1, -(-group_size // pieces))
    units = [
        range(group * group_size + start, group * group_size + min(start + size, group_size))
        for group in range(num_prompts)
        for start in range(0, group_size, size)
    ]
    found = portions([float(len(unit)) for unit in units], count)
    return tuple(tuple(sample for unit in portion for sample in units[unit]) for portion in found)


@dataclass(slots=True, eq=False)
class _Rollout:
    """One rank's rollout of a step."""

    step: int
    rank: int
    begun: int
    lengths: list[int]
    left: int
    ages: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class _Job:
    """Work under way: a part that a worker draws, or something that a trainer does.

    Attributes:
        kind: What it is.
        demand: Cores that it uses.
        end: When it ends, in units of the clock that runs slower where cores are shared.
        begun: When it was begun, on the real clock.
        worker: Who draws it.
        rollout: What it belongs to.
        samples: Samples that it draws.
        version: Weights with which it draws.
        since: When it got them, on the shared clock.
        work: Its seconds on a device of its own.
        is_over: Whether it was given up.
    """

    kind: Literal["draw", "score", "train", "push"]
    demand: float
    end: float
    begun: float
    work: float
    worker: int = -1
    rollout: _Rollout | None = None
    samples: tuple[int, ...] = ()
    version: int = 0
    since: float = 0.0
    is_over: bool = False


Piece = tuple[_Rollout, tuple[int, ...]]


class Simulation:
    """A run of some steps, event by event.

    Args:
        costs: What everything takes.
        load: What there is to do.
        machines: Who does it.
        seed: Of lengths, failures and stragglers.
    """

    def __init__(self, costs: Costs, load: Load, machines: Machines, *, seed: int = 0) -> None:
        if load.num_prompts % machines.trainers:
            raise ValueError(f"{load.num_prompts} prompts: expected a multiple of {machines.trainers} ranks")
        if machines.workers % machines.trainers:
            raise ValueError(
                f"{machines.workers} workers: expected a multiple of {machines.trainers} ranks, or 0"
            )
        self._costs, self._load, self._machines = costs, load, machines
        # A rank without workers is its own one: the same work, without calls and without copies of the weights.
        self._own = not machines.workers
        if self._own:
            assert not load.staleness, "ranks that sample themselves do it in turn with training"
            self._costs = replace(costs, call_s=0.0, push_s=0.0, fetch_s=0.0)
        self._per_rank = 1 if self._own else machines.workers // machines.trainers
        self._num_workers = self._per_rank * machines.trainers
        # Lengths do not depend on what fails.
        self._lengths, self._chance = random.Random(f"{seed} lengths"), random.Random(f"{seed} faults")
        self._now = self._shared = self._demand = 0.0
        self._heap: list[tuple[float, int, _Job]] = []
        self._count = 0
        self.result = Result()

    # Clock and events

    def _rate(self) -> float:
        cores = self._machines.cores
        return min(1.0, cores / self._demand) if cores and self._demand else 1.0

    def _begin(self, job: _Job) -> None:
        job.begun, job.since, job.end = self._now, self._shared, self._shared + job.work
        self._demand += job.demand
        self._push_event(job)

    def _push_event(self, job: _Job) -> None:
        self._count += 1
        heapq.heappush(self._heap, (job.end, self._count, job))

    def _give_up(self, job: _Job) -> None:
        job.is_over = True
        self._demand -= job.demand

    def _advance(self, now: float) -> None:
        self._shared += (now - self._now) * self._rate()
        self._now = now

    def _next(self) -> _Job | None:
        """Return the job that ends next, or None if something else comes before: a failure, a restart or a look."""
        while self._heap and (self._heap[0][2].is_over or self._heap[0][0] != self._heap[0][2].end):
            heapq.heappop(self._heap)
        end = self._now + (self._heap[0][0] - self._shared) / self._rate() if self._heap else float("inf")
        other = min(self._fails, self._starts[0][0] if self._starts else float("inf"), self._looks())
        assert min(end, other) < float("inf"), "nothing will ever happen"
        if other < end:
            self._advance(other)
            return None
        job = heapq.heappop(self._heap)[2]
        self._now, self._shared = end, job.end
        self._give_up(job)
        return job

    def _looks(self) -> float:
        """Return when an idle worker next looks for late work, and the driver for workers that nobody waits for."""
        has_idle = len(self._drawing) < self._num_workers - len(self._starts)
        if self._own or not self._drawing or not (has_idle or self._useless):
            self._look_at = float("inf")
        elif self._look_at == float("inf"):
            self._look_at = self._now + max(1e-9, self._typical) / LOOKS
        return self._look_at

    # The run

    def run(self, num_steps: int) -> Result:
        """Do some steps."""
        machines, load, result = self._machines, self._load, self.result
        self._num_steps = num_steps
        self._fails = float("inf")
        self._starts: list[tuple[float, int]] = []
        self._typical, self._look_at = 0.0, float("inf")
        self._steps: dict[int, list[list[int]]] = {}
        self._ready: dict[int, int] = {}
        self._spans: dict[int, Counter[int]] = {}
        self._reset()
        self._draw_failure()
        ends: list[float] = []
        step = saved = 0
        kept: dict[int, Counter[int]] = {}
        while step < num_steps:
            done = self._step(step)
            if done and load.save_every and (step + 1) % load.save_every == 0:
                began = self._now
                done = self._wait(lambda: all(self._ready.get(s) == machines.trainers for s in self._begun))
                result.save_s += self._now - began
                if done:
                    saved, kept = step + 1, {s: self._spans[s] for s in self._begun if s > step}
            if not done:  # a rank is lost, and with it the group
                result.num_undone += step - saved
                result.down_s += machines.restart_s
                self._now += machines.restart_s
                self._reset()
                for number, spans in kept.items():
                    self._ready[number], self._spans[number] = machines.trainers, Counter(spans)
                    self._begun.add(number)
                self._draw_failure()
                step = saved
                ends = ends[:saved]
                continue
            ends.append(self._now)
            step += 1
        result.steps, result.seconds, result.step_s = num_steps, self._now, ends
        result.capacity_s = self._now * self._per_rank * machines.trainers
        for number in range(num_steps):
            result.ages.update(self._spans[number])
        result.tokens = sum(map(sum, (lengths for row in self._steps.values() for lengths in row)))
        return result

    def _reset(self) -> None:
        """Start with idle workers, and nothing under way."""
        for _, _, job in self._heap:
            if not job.is_over:
                if job.kind == "draw":
                    self.result.lost_s += self._now - job.begun
                self._give_up(job)
        self._heap.clear()
        trainers = self._machines.trainers
        self._dealers = [Dealer[int, Piece](slow_factor=self._machines.slow_factor) for _ in range(trainers)]
        self._idle = [
            deque(range(rank * self._per_rank, (rank + 1) * self._per_rank)) for rank in range(trainers)
        ]
        self._have = dict.fromkeys(range(trainers * self._per_rank), 0)
        self._drawing: dict[int, _Job] = {}
        self._scores: list[deque[_Rollout]] = [deque() for _ in range(trainers)]
        self._starts.clear()
        self._ready.clear()
        self._begun: set[int] = set()
        self._changed: set[int] = set()
        """Ranks of which a worker has become idle, or that have new work."""
        self._useless = 0
        """Copies of parts that others have, too: at most so many workers draw what nobody waits for."""
        self._is_down, self._version = False, 0

    def _draw_failure(self) -> None:
        machines = self._machines
        if machines.mtbf_s:
            count = machines.trainers * (1 + (0 if self._own else self._per_rank))
            self._fails = self._now + self._chance.expovariate(count / machines.mtbf_s)

    def _step(self, step: int) -> bool:
        """Do a step; return False if a trainer was lost."""
        costs, load, machines, result = self._costs, self._load, self._machines, self.result
        began = self._now
        if costs.push_s:
            if not self._do(_Job("push", 1.0, 0.0, 0.0, costs.push_s)):
                return False
            result.sync_s += self._now - began
        self._version = step
        if load.partial:
            self._renew()
        for number in range(step, min(step + load.staleness, self._num_steps - 1) + 1):
            if number not in self._begun:
                self._launch(number, step)
        began = self._now
        if not self._wait(lambda: self._ready.get(step) == machines.trainers):
            result.wait_s += self._now - began
            return False
        result.wait_s += self._now - began
        began = self._now
        most = max(sum(lengths) + load.prompt_tokens * len(lengths) for lengths in self._steps[step])
        seconds = (
            costs.update_s
            + costs.token_s * most
            + costs.reduce_s * (machines.trainers - 1) / machines.trainers
            + costs.rest_s
        )
        done = self._do(_Job("train", machines.trainers * machines.trainer_cores, 0.0, 0.0, seconds))
        result.train_s += self._now - began
        return done

    def _do(self, job: _Job) -> bool:
        """Do what the trainer does; return False if it was lost."""
        self._begin(job)
        return self._wait(lambda: job.is_over)

    def _wait(self, is_so: Callable[[], bool]) -> bool:
        """Let things happen until something is so; return False if a trainer was lost."""
        while True:
            self._deal()
            if self._is_down or is_so():
                return not self._is_down
            job = self._next()
            if job is None:
                self._happen()
            elif job.kind == "draw":
                self._drawn(job)
            elif job.kind == "score":
                self._scored(job)

    # Rollouts

    def _launch(self, number: int, step: int) -> None:
        """Begin the rollout of a step on all ranks."""
        load, trainers = self._load, self._machines.trainers
        if number not in self._steps:  # it is the same one after a restart
            count = load.num_prompts // trainers
            self._steps[number] = [
                [length for _ in range(count) for length in self._lengths.choice(load.groups)]
                for _ in range(trainers)
            ]
        self._begun.add(number)
        self._ready[number], self._spans[number] = 0, Counter()
        for rank, lengths in enumerate(self._steps[number]):
            parts = parts_of(load.num_prompts // trainers, load.group_size, self._per_rank)
            if self._own:
                parts = (tuple(range(len(lengths))),)
            rollout = _Rollout(number, rank, step, lengths, len(parts))
            self._changed.add(rank)
            self._dealers[rank].add([Part((rollout, samples), float(len(samples))) for samples in parts])

    def _deal(self) -> None:
        """Give idle workers what waits."""
        for rank in self._changed:
            dealer, idle = self._dealers[rank], self._idle[rank]
            while idle and dealer.waiting and self._give(idle[0], dealer):
                idle.popleft()
        self._changed.clear()

    def _give(self, worker: int, dealer: Dealer[int, Piece]) -> bool:
        """Let a worker draw the next part, or repeat one that is late."""
        repeated = dealer.num_repeated
        part = dealer.deal(worker, self._now)
        if part is None:
            return False
        self.result.num_repeated += dealer.num_repeated - repeated
        self._useless += dealer.num_repeated - repeated
        (rollout, samples), costs = part.work, self._costs
        version = self._version if self._load.partial else rollout.begun
        work = drawing_s([rollout.lengths[sample] for sample in samples], costs, self._load)
        if self._have[worker] != version:
            self._have[worker] = version
            work += costs.fetch_s
        machines = self._machines
        if machines.straggler_share and self._chance.random() < machines.straggler_share:
            work *= machines.straggler_factor
        demand = machines.trainer_cores if self._own else 1.0
        job = _Job("draw", demand, 0.0, 0.0, work, worker, rollout, samples, version)
        self._drawing[worker] = job
        self._begin(job)
        return True

    def _drawn(self, job: _Job) -> None:
        """Take in a part."""
        assert job.rollout is not None
        rank, seconds = job.rollout.rank, self._now - job.begun
        del self._drawing[job.worker]
        self._idle[rank].append(job.worker)
        self._changed.add(rank)
        if self._dealers[rank].answer(job.worker, self._now) is None:
            self._useless -= 1
            self.result.lost_s += seconds
            return
        self.result.drawn_s += seconds
        self._typical = min(seconds, 2 * self._typical) if self._typical else seconds
        self._note(job, self._shared)
        job.rollout.left -= 1
        if not job.rollout.left:
            queue = self._scores[rank]
            queue.append(job.rollout)
            if len(queue) == 1:
                self._score(job.rollout)

    def _note(self, job: _Job, until: float) -> None:
        """Note the tokens that a job has drawn with its present weights."""
        assert job.rollout is not None
        tokens = sum(job.rollout.lengths[sample] for sample in job.samples)
        share = (until - job.since) / job.work if job.work else 1.0
        job.rollout.ages[job.rollout.step - job.version] += round(tokens * share)
        job.since = until

    def _renew(self) -> None:
        """Let the workers go on with the present weights."""
        for job in self._drawing.values():
            self._note(job, self._shared)
            again = self._costs.fetch_s + self._costs.call_s
            job.version, job.end, job.work = self._version, job.end + again, job.work + again
            self._have[job.worker] = self._version
            self._push_event(job)

    def _score(self, rollout: _Rollout) -> None:
        self._begin(
            _Job("score", 1.0, 0.0, 0.0, self._costs.reward_s * len(rollout.lengths), rollout=rollout)
        )

    def _scored(self, job: _Job) -> None:
        """Take in a rollout that is scored."""
        assert job.rollout is not None
        rollout = job.rollout
        self._ready[rollout.step] += 1
        self._spans[rollout.step].update(rollout.ages)
        queue = self._scores[rollout.rank]
        queue.popleft()
        if queue:
            self._score(queue[0])

    # What goes wrong

    def _happen(self) -> None:
        """Let happen what is due now: a failure, a restart, a look at what is late."""
        if self._now >= self._fails:
            self._fail()
        elif self._starts and self._now >= self._starts[0][0]:
            worker = heapq.heappop(self._starts)[1]
            self._have[worker] = -1
            self._idle[worker // self._per_rank].append(worker)
            self._changed.add(worker // self._per_rank)
        else:
            self._look_at = float("inf")
            for rank, (dealer, idle) in enumerate(zip(self._dealers, self._idle, strict=True)):
                for worker in list(dealer.stuck(self._now)) if self._useless else ():
                    self._useless -= 1
                    self._end(worker, rank)
                while idle and self._give(idle[0], dealer):
                    idle.popleft()

    def _fail(self) -> None:
        """Let a process fail, whichever."""
        machines = self._machines
        self._draw_failure()
        workers = 0 if self._own else machines.trainers * self._per_rank
        number = self._chance.randrange(machines.trainers + workers)
        self.result.num_failed += 1
        if number >= workers:
            self._is_down = True
            return
        rank = number // self._per_rank
        if number in self._drawing:
            self.result.num_lost += 1
            self._end(number, rank)
        elif number in self._idle[rank]:
            self._idle[rank].remove(number)
            heapq.heappush(self._starts, (self._now + machines.restart_s, number))

    def _end(self, worker: int, rank: int) -> None:
        """End a worker that draws; what it had is dealt again, and another one is started."""
        job, dealer = self._drawing.pop(worker), self._dealers[rank]
        self._give_up(job)
        self.result.lost_s += self._now - job.begun
        self._changed.add(rank)
        part = dealer.part_of(worker)
        assert part is not None
        try:
            dealer.lose(worker)
        except UserError:
            self.result.num_stops += 1
            part.tries = 0
            if not part.num_holders:
                dealer.waiting.appendleft(part)
        heapq.heappush(self._starts, (self._now + self._machines.restart_s, worker))


def simulate(costs: Costs, load: Load, machines: Machines, *, num_steps: int, seed: int = 0) -> Result:
    """Do some steps of a run on a clock of its own; see `Simulation`."""
    return Simulation(costs, load, machines, seed=seed).run(num_steps)
