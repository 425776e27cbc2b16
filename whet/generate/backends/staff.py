"""Workers that are started, given parts of the work, and started again when they are lost: the one loop that rollout
workers and graders share.

Whoever uses it says what a part is sent as, and what is done with its answer; who carries calls is a `Crew`, who has
which part is a `Dealer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from whet.generate.backends.dealing import Dealer, Part
from whet.types import UserError

POLL_S = 0.1
"""Seconds between looks at signals and deadlines while answers are waited for."""
MAX_STARTS = 3
"""Workers in a row that may be lost before they are ready."""

Refs = list[Any]
"""References to what a worker, or the store between them, holds."""
Hand = Hashable
Work = TypeVar("Work")
Note = TypeVar("Note")


class LostError(Exception):
    """A worker died, or its node did, before it answered."""


class Crew(Protocol):
    """Starts workers, and carries calls to them."""

    def put(self, value: Any) -> Any:
        """Lay an object where every worker can read it; return its reference."""
        ...

    def hire(self) -> Hand:
        """Begin to start a worker."""
        ...

    def call(self, hand: Hand, method: str, *arguments: Any) -> Any:
        """Call a method of a worker, after those called before; return a reference to its result."""
        ...

    def wait(self, refs: Refs, timeout_s: float) -> Refs:
        """Return the references whose results are there, or whose workers are lost, within a time."""
        ...

    def result(self, ref: Any) -> Any:
        """Return a result; raise LostError, or what the method raised."""
        ...

    def fire(self, hand: Hand) -> None:
        """Kill a worker."""
        ...

    def close(self) -> None:
        """End all of it."""
        ...


@dataclass(slots=True, eq=False)
class Slot(Generic[Note]):
    """One worker, as the driver sees it.

    Attributes:
        hand: What the crew knows it by.
        ref: The result that it owes; None while it is idle.
        is_ready: Whether it has answered since its start.
        note: What the driver remembers of its last call.
    """

    hand: Hand
    ref: Any
    is_ready: bool = False
    note: Note | None = None


class Staff(Generic[Work, Note]):
    """As many workers as there shall be, with what they have to do. Its users lock it.

    Args:
        crew: Starts them.
        what: Whose workers they are, for what goes wrong.
        count: How many.
        arguments: What the `load` of each gets.
        slow_factor: A part is late when it takes this many times the median of those before it, by cost.
        give: Sends a part to a worker; returns the reference to its answer, and a note.
        take: Takes in the first answer to a part: the slot, the part, the answer.
        fail: Takes in what a worker raised, in place of its answer.

    Attributes:
        dealer: Who has which part.
        slots: The workers.
        num_started: Workers that were started, also in place of lost ones.
    """

    def __init__(
        self,
        crew: Crew,
        what: str,
        *,
        count: int,
        arguments: Sequence[Any],
        slow_factor: float,
        give: Callable[[Slot[Note], Work], tuple[Any, Note]],
        take: Callable[[Slot[Note], Work, Any], None],
        fail: Callable[[Work, Exception], None],
    ) -> None:
        self.dealer: Dealer[Slot[Note], Work] = Dealer(slow_factor=slow_factor)
        self.slots: list[Slot[Note]] = []
        self.num_started = self._num_failed = 0
        self._crew, self._what, self._count, self._arguments = crew, what, count, tuple(arguments)
        self._give, self._take, self._fail = give, take, fail

    @property
    def num_ready(self) -> int:
        """Workers that have answered since their start."""
        return sum(slot.is_ready for slot in self.slots)

    def fill(self) -> None:
        """Start workers where some are missing."""
        while len(self.slots) < self._count:
            hand = self._crew.hire()
            self.slots.append(Slot(hand, self._crew.call(hand, "load", *self._arguments)))
            self.num_started += 1

    def turn(self, *, may_give: bool = True) -> None:
        """Give work to idle workers, and take in what arrives within a moment.

        Raises:
            UserError: If workers are lost again and again.
        """
        self.fill()
        now = time.monotonic()
        for slot in self.slots if may_give else ():
            if slot.is_ready and slot.ref is None and (part := self.dealer.deal(slot, now)) is not None:
                slot.ref, slot.note = self._give(slot, part.work)
        owed = [slot for slot in self.slots if slot.ref is not None]
        done = self._crew.wait([slot.ref for slot in owed], POLL_S) if owed else []
        for slot in owed:
            if slot.ref in done:
                self._receive(slot)
        for slot in list(self.dealer.stuck(time.monotonic())):
            self._drop(slot)

    def _receive(self, slot: Slot[Note]) -> None:
        """Take in what a worker answered: it is ready, it has worked, or it is lost."""
        ref, slot.ref = slot.ref, None
        try:
            answer = self._crew.result(ref)
        except LostError as error:
            self._num_failed = 0 if slot.is_ready else self._num_failed + 1
            if self._num_failed >= MAX_STARTS:
                raise UserError(
                    f"{self._what}: {self._num_failed} workers in a row were lost before they were ready ({error}); "
                    "see their logs"
                ) from None
            self._drop(slot)
            return
        except Exception as error:
            if not slot.is_ready:
                raise
            if (part := self._answered(slot)) is not None:
                self._fail(part.work, error)
            return
        if not slot.is_ready:
            slot.is_ready, self._num_failed = True, 0
        elif (part := self._answered(slot)) is not None:
            self._take(slot, part.work, answer)

    def _answered(self, slot: Slot[Note]) -> Part[Work] | None:
        return self.dealer.answer(slot, time.monotonic())

    def _drop(self, slot: Slot[Note]) -> None:
        """Let go of a worker; what it had is dealt again."""
        self.slots.remove(slot)
        self._crew.fire(slot.hand)
        self.dealer.lose(slot)
