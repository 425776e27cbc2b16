"""A sequence's n-grams: what followed the last time that its last tokens stood in it."""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 3
TRIAL = 24
"""Guesses after which a sequence's share of right ones counts."""
MIN_SHARE = 0.3


class Lookup:
    """A sequence and where its n-grams stood last.

    Args:
        ids: The sequence so far.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}
        self._guessed = self._right = 0
        self._pending = 0
        self.extend(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens."""
        self._guessed += self._pending
        self._right += min(self._pending, len(ids) - 1) if self._pending else 0
        self._pending = 0
        for token in ids:
            self._places[tuple(self._ids[-NGRAM:])] = len(self._ids)
            self._ids.append(token)

    def guess(self, count: int) -> list[int]:
        """Return up to `count` tokens that may come next: none where there is no model for them, or it was wrong."""
        place = self._places.get(tuple(self._ids[-NGRAM:]))
        if place is None or (self._guessed >= TRIAL and self._right < MIN_SHARE * self._guessed):
            return []
        found = self._ids[place : place + count]
        self._pending = len(found)
        return found
