"""Which worker samples what: work is dealt by cost, dealt again where a worker is lost or slow, and counted once.

Only bookkeeping: it knows no process and no clock, so that tests can drive it with their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic, TypeVar

from whet.types import UserError

Worker = TypeVar("Worker", bound=Hashable)
Work = TypeVar("Work")

PORTIONS = 2
"""Parts per worker that a rollout is cut into: more would balance better, fewer fill the engine's rows better."""
REMEMBERED = 64
"""Finished parts whose speeds the deadline is computed from."""
MAX_TRIES = 4
"""Workers that may be lost with the same part: then it is not chance."""
LEAST_S = 2.0
"""No part is late before this many seconds."""


@dataclass(slots=True, eq=False)
class Part(Generic[Work]):
    """Work that one worker does at a stretch.

    Attributes:
        work: What it is.
        cost: How much it is, in any unit.
        tries: Workers that were lost with it.
        num_holders: Workers that have it.
        since: When it was given to the last one of them.
        is_over: Whether it was answered or given up: answers that still come are ignored.
    """

    work: Work
    cost: float
    tries: int = 0
    num_holders: int = 0
    since: float = 0.0
    is_over: bool = False


@dataclass(slots=True)
class _Held(Generic[Work]):
    part: Part[Work]
    since: float


@dataclass(slots=True)
class Dealer(Generic[Worker, Work]):
    """Parts that wait, and parts that workers have.

    Attributes:
        slow_factor: A part is late when it takes this many times the median of those before it, by cost.
        waiting: Parts that no worker has, the next one first.
        num_lost: Parts that came back since their worker was lost.
        num_repeated: Parts that were given to a second worker since the first one was late.
    """

    slow_factor: float
    waiting: deque[Part[Work]] = field(default_factory=deque)
    num_lost: int = 0
    num_repeated: int = 0
    _held: dict[Worker, _Held[Work]] = field(default_factory=dict)
    _speeds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _pace: float | None = None

    def add(self, parts: Sequence[Part[Work]]) -> None:
        """Take new work, after what waits already."""
        self.waiting.extend(parts)

    def deal(self, worker: Worker, now: float) -> Part[Work] | None:
        """Return what an idle worker does next: what waits, else a copy of a part that is late; None for nothing.

        Args:
            worker: The worker.
            now: Time in seconds.
        """
        assert worker not in self._held
        while self.waiting:
            part = self.waiting.popleft()
            if not part.is_over:
                return self._hold(worker, part, now)
        # They stand in the order in which they were given: the one that is late for longest comes first.
        for held in self._held.values():
            if self._is_late(held.part, now):
                self.num_repeated += 1
                return self._hold(worker, held.part, now)
        return None

    def answer(self, worker: Worker, now: float) -> Part[Work] | None:
        """Note that a worker has answered; return its part if this is the first answer that counts."""
        held = self._held.pop(worker)
        held.part.num_holders -= 1
        if held.part.is_over:
            return None
        held.part.is_over = True
        self._speeds.append((now - held.since) / max(held.part.cost, 1e-9))
        self._pace = median(self._speeds)
        return held.part

    def lose(self, worker: Worker) -> None:
        """Note that a worker is gone: what it had comes first, unless another worker has it, too.

        Raises:
            UserError: If too many workers were lost with the same part.
        """
        held = self._held.pop(worker, None)
        if held is None:
            return
        held.part.num_holders -= 1
        if held.part.is_over:
            return
        held.part.tries += 1
        self.num_lost += 1
        if held.part.tries >= MAX_TRIES:
            raise UserError(
                f"cluster: {held.part.tries} rollout workers were lost with the same work; they may run out of memory: "
                "lower policy.max_rows, or see the workers' logs"
            )
        if not held.part.num_holders:
            self.waiting.appendleft(held.part)

    def part_of(self, worker: Worker) -> Part[Work] | None:
        """Return what a worker has; None for nothing."""
        held = self._held.get(worker)
        return None if held is None else held.part

    def stuck(self, now: float) -> Iterator[Worker]:
        """Yield the workers that still compute what nobody waits for, twice as long as would be late already."""
        for worker, held in self._held.items():
            limit = self._limit(held.part)
            if held.part.is_over and limit is not None and now - held.since > 2 * limit + LEAST_S:
                yield worker

    def _hold(self, worker: Worker, part: Part[Work], now: float) -> Part[Work]:
        self._held[worker] = _Held(part, now)
        part.num_holders, part.since = part.num_holders + 1, now
        return part

    def _is_late(self, part: Part[Work], now: float) -> bool:
        limit = self._limit(part)
        return not part.is_over and limit is not None and now - part.since > limit

    def _limit(self, part: Part[Work]) -> float | None:
        """Return the seconds after which a part is late; None while nothing is known."""
        if self._pace is None:
            return None
        return max(LEAST_S, self.slow_factor * self._pace * part.cost)


def portions(costs: Sequence[float], count: int) -> list[list[int]]:
    """Split work into at most `count` portions of nearly equal cost; return the places in each, in order.

    The dearest piece goes first, each to the cheapest portion so far: at most a third above the best split.
    """
    found: list[list[int]] = [[] for _ in range(min(count, len(costs)))]
    sums = [0.0] * len(found)
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        least = min(range(len(found)), key=lambda portion: (sums[portion], portion))
        found[least].append(place)
        sums[least] += costs[place]
    order = sorted(range(len(found)), key=lambda portion: -sums[portion])
    return [sorted(found[portion]) for portion in order]
