"""What became of every prompt that the data order gave out: counted by state, saved, and audited each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from whet.types import UserError

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

    def audit(self, cursor: int, waiting: int) -> None:
        """Check, between two steps, that no prompt is lost and none is counted twice.

        Args:
            cursor: Prompts that the data order has given out.
            waiting: Prompts in the samples that wait for their training.

        Raises:
            UserError: With the sums, where they differ.
        """
        total = self.pending + self.in_flight + self.consumed + sum(self.dropped.values())
        counts = (self.pending, self.in_flight, self.consumed, *self.dropped.values())
        if total == cursor and self.in_flight == waiting and not self.pending and min(counts) >= 0:
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
            "in_flight": self.in_flight,
        }
        values |= {f"dropped/{reason}": number for reason, number in self.dropped.items() if number}
        return {f"rl/prompts_{name}": float(value) for name, value in values.items()}

    def state(self) -> dict[str, Any]:
        """Return the counts as JSON values, for a checkpoint."""
        return {
            "pending": self.pending,
            "in_flight": self.in_flight,
            "consumed": self.consumed,
            "dropped": self.dropped,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None, *, cursor: int, waiting: int) -> PromptAccount:
        """Put back what `state` returned, and audit it; None begins an account for a checkpoint that has none.

        Args:
            state: What the checkpoint holds.
            cursor: Prompts that the data order had given out.
            waiting: Prompts in the samples that waited for their training.

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
        account.audit(cursor, waiting)
        return account
