"""The numbers of samples as numpy columns, and which samples a query chooses among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.pages.samples import clean
from whet.telemetry.log import parse_row

MAX_REWARDS = 64
MAX_LIMIT = 500
MAX_INT = 2**31 - 1

ORDERS = {"step": "id", "reward": "reward", "length": "num_tokens", "advantage": "advantage"}
"""What samples are ordered by, and the column that says it; the file's order is that of the steps."""

TYPES: dict[str, Any] = {
    "id": np.int64,
    "num_bytes": np.int32,
    "step": np.int32,
    "uid": np.int64,
    "index": np.int32,
    "reward": np.float32,
    "advantage": np.float32,
    "num_tokens": np.int32,
    "finish": np.int64,
    "correct": np.int8,
}
"""Columns; `id` is a row's place in the file, `uid` and `finish` are hashes, `correct` and `step` -1 where unknown."""

REWARD = "reward:"
"""Before the name of a reward it is the name of its column."""

Columns = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Which samples, and in which order.

    Attributes:
        step_min: First step; None for all.
        step_max: Last step.
        reward: Reward that the two bounds and the order mean; '' for the total.
        reward_min: Least score.
        reward_max: Largest score.
        correct: Right or wrong samples only.
        uid: Samples of this problem only.
        finish: Samples that ended for this reason only.
        text: Words that completion, prompt or answer hold, in any case.
        order: 'step' (as they were written), 'reward', 'length' or 'advantage'.
        descending: Newest or largest first; samples without the number come last either way.
        offset: Rows to leave out (not with `text`).
        limit: Most rows of an answer.
    """

    step_min: int | None = None
    step_max: int | None = None
    reward: str = ""
    reward_min: float | None = None
    reward_max: float | None = None
    correct: bool | None = None
    uid: str = ""
    finish: str = ""
    text: str = ""
    order: str = "step"
    descending: bool = True
    offset: int = 0
    limit: int = 50

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order = {self.order!r}: expected one of {', '.join(ORDERS)}")
        if not 0 <= self.offset < 2**62:
            raise ValueError(f"offset = {self.offset}: expected 0 or more")
        if not 1 <= self.limit <= MAX_LIMIT:
            raise ValueError(f"limit = {self.limit}: expected 1 to {MAX_LIMIT}")


def read_columns(data: bytes, start: int) -> tuple[Columns, int, bool]:
    """Read the numbers of whole lines.

    Args:
        data: Lines of a samples.jsonl; nothing in them is trusted.
        start: Place of the first one in the file.

    Returns:
        The columns, the number of damaged lines, and whether a row has log-probabilities.
    """
    entries: list[tuple[Any, ...]] = []
    scores: dict[str, tuple[list[int], list[float]]] = {}
    num_damaged, has_logprobs, place = 0, False, start
    for line in data.removesuffix(b"\n").split(b"\n"):
        row = parse_row(line)
        if row is not None:
            has_logprobs |= bool(row.pop("sampler_logprobs", None) or row.pop("logprobs", None))
            sample = clean(row)
            for name, score in list(sample["rewards"].items())[:MAX_REWARDS]:
                places, values = scores.setdefault(name, ([], []))
                places.append(len(entries))
                values.append(_score(score))
            entries.append((place, len(line) + 1, *_numbers(sample)))
        num_damaged += row is None and bool(line.strip())
        place += len(line) + 1
    with np.errstate(over="ignore"):  # a score beyond float32 is infinite
        columns = {
            name: np.array([entry[number] for entry in entries], kind)
            for number, (name, kind) in enumerate(TYPES.items())
        }
        for name, (places, values) in scores.items():
            columns[REWARD + name] = np.full(len(entries), np.nan, np.float32)
            columns[REWARD + name][places] = values
    return columns, num_damaged, has_logprobs


def merge(parts: Sequence[Columns]) -> Columns:
    """Join parts, which lose their columns meanwhile, to save memory; a reward that a part lacks is NaN in it."""
    lengths = [len(part["id"]) for part in parts]
    names = dict.fromkeys([*TYPES, *(name for part in parts for name in part)])
    merged: Columns = {}
    for name in list(names)[: len(TYPES) + MAX_REWARDS]:
        kind = TYPES.get(name, np.float32)
        pieces = [
            part.pop(name) if name in part else np.full(length, np.nan, kind)
            for part, length in zip(parts, lengths, strict=True)
        ]
        merged[name] = np.concatenate([np.empty(0, kind), *pieces])
    return merged


def choose(columns: Columns, query: Query) -> np.ndarray:
    """Return the numbers of the rows that a query chooses, all of them in its order; its text is left aside."""
    kept = np.ones(len(columns["id"]), bool)
    scores = columns.get(REWARD + query.reward) if query.reward else columns["reward"]
    if scores is None:
        scores = np.full(len(kept), np.nan, np.float32)
    for values, low, high in (
        (columns["step"], query.step_min, query.step_max),
        (scores, query.reward_min, query.reward_max),
    ):
        with np.errstate(over="ignore"):  # a bound beyond float32 is infinite
            kept &= True if low is None else values >= low
            kept &= True if high is None else values <= high
    if query.correct is not None:
        kept &= columns["correct"] == int(query.correct)
    for name, wanted in (("uid", query.uid), ("finish", query.finish)):
        if wanted:
            kept &= columns[name] == hash(wanted)
    newest_first = np.flatnonzero(kept)[::-1]
    keys = (scores if query.order == "reward" else columns[ORDERS[query.order]])[newest_first]
    return newest_first[np.argsort(-keys if query.descending else keys, kind="stable")]


def _numbers(sample: dict[str, Any]) -> tuple[Any, ...]:
    """Return a sample's columns after its place and length."""
    return (
        _whole(sample["step"], -1),
        hash(sample["uid"]),
        _whole(sample["index"], -1),
        _score(sample["reward"]),
        _score(sample["advantage"]),
        _whole(sample["num_completion_tokens"], 0),
        hash(sample["finish_reason"]),
        -1 if sample["correct"] is None else int(sample["correct"]),
    )


def _score(value: float | None) -> float:
    return math.nan if value is None else value


def _whole(value: Any, missing: int) -> int:
    return max(-MAX_INT, min(MAX_INT, value)) if isinstance(value, int) else missing
