"""An index of a growing samples.jsonl: numbers in numpy columns, texts left in the file.

A background thread reads the newest rows first, then the older ones, then follows appended rows. Rows are read by their
offset when they are viewed; the file is never held in memory.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whet.report.samples import asked, clean, snippet
from whet.telemetry.log import parse_row

# The numbers of samples as numpy columns, and queries on them.

MAX_REWARDS = 64
MAX_LIMIT = 500
MAX_INT = 2**31 - 1

ORDERS = {"step": "id", "reward": "reward", "length": "num_tokens", "advantage": "advantage"}
"""Sort orders and their columns; the file's order is that of the steps."""

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
"""Columns; `id` is a row's offset in the file, `uid` and `finish` are hashes, `correct` and `step` are -1 if
unknown."""

REWARD = "reward:"
"""Prefix of a reward's name that gives its column."""

Columns = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Filters and order of samples.

    Attributes:
        step_min: First step; None for all.
        step_max: Last step.
        reward: Reward of the two bounds and the order; '' for the total.
        reward_min: Least score.
        reward_max: Largest score.
        correct: Right or wrong samples only.
        uid: Samples of this problem only.
        finish: Samples that ended for this reason only.
        text: Text to find in completion, prompt or answer, case-insensitive.
        order: 'step' (as they were written), 'reward', 'length' or 'advantage'.
        descending: Newest or largest first; samples without the value come last either way.
        offset: Rows to skip (not with `text`).
        limit: Maximum number of rows.
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
    """Read the numbers of complete lines.

    Args:
        data: Untrusted lines of a samples.jsonl.
        start: Offset of the first one in the file.

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
    with np.errstate(over="ignore"):  # a score beyond float32 becomes infinite
        columns = {
            name: np.array([entry[number] for entry in entries], kind)
            for number, (name, kind) in enumerate(TYPES.items())
        }
        for name, (places, values) in scores.items():
            columns[REWARD + name] = np.full(len(entries), np.nan, np.float32)
            columns[REWARD + name][places] = values
    return columns, num_damaged, has_logprobs


def merge(parts: Sequence[Columns]) -> Columns:
    """Join parts, consuming their columns to save memory; a reward that a part lacks is NaN."""
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
    """Return the indices of all rows that match a query, in its order; its text is ignored."""
    kept = np.ones(len(columns["id"]), bool)
    scores = columns.get(REWARD + query.reward) if query.reward else columns["reward"]
    if scores is None:
        scores = np.full(len(kept), np.nan, np.float32)
    for values, low, high in (
        (columns["step"], query.step_min, query.step_max),
        (scores, query.reward_min, query.reward_max),
    ):
        with np.errstate(over="ignore"):  # a bound beyond float32 becomes infinite
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
    """Return a sample's columns after its offset and length."""
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


BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
"""Longer lines count as damaged: no sample is that long, and they would fill memory."""

MAX_PARTS = 256
MARK_BYTES = 256
"""Bytes before the end of what was read; if they change, the file was replaced."""

TEXTS = ("completion", "prompt", "answer")
CONTEXT = 50
"""Characters shown before a search hit."""


class SampleIndex:
    """The samples of one run. Thread-safe; close it when done.

    Attributes:
        num_damaged: Lines so far without a sample.
        generation: Increases when the file is replaced, truncated or deleted (a resumed run drops rows): older ids are
            then invalid.
    """

    def __init__(self, path: Path, *, follow_s: float | None = 1.0, block_bytes: int = BLOCK_BYTES) -> None:
        """Open the index without reading anything yet.

        Args:
            path: The samples.jsonl; it may appear later.
            follow_s: Polling interval for new rows in seconds; None starts no thread: the caller calls `advance`.
            block_bytes: Bytes read at a time.
        """
        self.num_damaged = 0
        self.generation = 0
        self._path = path
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._file: _File | None = None
        self._parts: list[Columns] = []
        self._head = self._head_end = self._tail = 0  # read so far: [0, head) and [head_end, tail)
        self._mark = b""
        self._has_logprobs = False
        self._stop = threading.Event()
        if follow_s is not None:
            threading.Thread(target=self._follow, args=(follow_s,), name="samples", daemon=True).start()

    def close(self) -> None:
        """Stop the thread; further calls do nothing."""
        self._stop.set()

    def advance(self) -> bool:
        """Read one block: appended rows first, then older ones. If there is a thread, only that calls it.

        Returns:
            Whether there was anything to read; False if all complete lines are indexed.
        """
        file = self._look()
        if file is None:
            return False
        for is_tail, start, stop in ((True, self._tail, file.size()), (False, self._head, self._head_end)):
            data = self._lines(file, start, stop)
            if not data:  # nothing new, or the last line is still being written
                continue
            part, num_damaged, has_logprobs = read_columns(data, start)
            with self._lock:
                self._parts += [part] if len(part["id"]) else []
                self.num_damaged += num_damaged
                self._has_logprobs |= has_logprobs
                if is_tail:
                    self._tail, self._mark = start + len(data), data[-MARK_BYTES:]
                else:
                    self._head = start + len(data)
            if len(self._parts) > MAX_PARTS:
                self._snapshot()
            return True
        return False

    def info(self) -> dict[str, Any]:
        """Return counts, the first and last step (None if rows have none) and the names of the rewards.

        While older rows are still being read, `num_samples` is estimated from their bytes.
        """
        columns, _ = self._snapshot()
        num_indexed, steps = len(columns["id"]), columns["step"][columns["step"] >= 0]
        num_bytes = int(columns["num_bytes"].sum(dtype=np.int64))
        return {
            "num_samples": num_indexed
            + round(num_indexed * (self._head_end - self._head) / max(1, num_bytes)),
            "num_indexed": num_indexed,
            "num_damaged": self.num_damaged,
            "steps": [int(steps.min()), int(steps.max())] if len(steps) else None,
            "rewards": [name.removeprefix(REWARD) for name in columns if name.startswith(REWARD)],
            "has_logprobs": self._has_logprobs,
            "generation": self.generation,
        }

    def find(self, query: Query, *, after: int | None = None, seconds: float = 0.2) -> dict[str, Any]:
        """Return one page of samples.

        A text search reads the samples that match the rest of the query, in its order, until it has a page or its time
        is up; call it again with `after = next` to continue.

        Args:
            query: Filters and order.
            after: With text: the previous answer's `next`.
            seconds: With text: time limit of reading.

        Returns:
            `rows`; `total`: samples that match all but the text; `indexed`: samples known; `searched`: how many of the
            total were read so far; `next`: where to continue, None at the end.
        """
        columns, file = self._snapshot()
        chosen = choose(columns, query)
        answer = {"total": len(chosen), "indexed": len(columns["id"]), "searched": len(chosen), "next": None}
        if file is None:
            return {"rows": [], **answer}
        ids = columns["id"][chosen]
        if not query.text:
            page = slice(query.offset, query.offset + query.limit)
            found = [
                (place, parse_row(file.line(columns, n)))
                for place, n in zip(ids[page], chosen[page], strict=True)
            ]
            return {"rows": [_listed(int(place), row) for place, row in found if row], **answer}
        at = 0
        if after is not None and len(known := np.flatnonzero(ids == after)):
            at = int(known[0]) + 1
        sieve, deadline, rows = _Sieve(query.text), time.monotonic() + seconds, []
        while at < len(chosen):
            row = sieve.row(file.line(columns, chosen[at]))
            rows += [_listed(int(ids[at]), row, query.text)] if row else []
            at += 1
            if len(rows) == query.limit or time.monotonic() > deadline:
                break
        return {
            "rows": rows,
            **answer,
            "searched": at,
            "next": int(ids[at - 1]) if at < len(chosen) else None,
        }

    def sample(self, place: int) -> dict[str, Any] | None:
        """Return the row of an id, as `whet.report.samples.clean` shapes it; None if it does not exist (any more)."""
        columns, file = self._snapshot()
        number = _number(columns, place)
        row = None if file is None or number is None else parse_row(file.line(columns, number))
        return None if row is None else {"id": place, **clean(row)}

    def group(self, place: int) -> list[int]:
        """Return the ids of all samples of a sample's problem and step, by their index."""
        columns, _ = self._snapshot()
        number = _number(columns, place)
        if number is None:
            return []
        same = (columns["uid"] == columns["uid"][number]) & (columns["step"] == columns["step"][number])
        members = np.flatnonzero(same)
        return columns["id"][members[np.argsort(columns["index"][members], kind="stable")]].tolist()

    def _follow(self, interval_s: float) -> None:
        while not self._stop.is_set():
            has_read = self.advance()
            if not has_read or 0 < self._head <= self._block_bytes < self._head_end:
                self._stop.wait(
                    interval_s
                )  # newest and oldest rows are known: the page can open before the rest is read

    def _look(self) -> _File | None:
        """Return the file, reopened if it was replaced."""
        file = self._file
        try:
            if file is not None and file.is_still(self._path) and file.ends_with(self._mark, self._tail):
                return file
            fresh = _File(self._path)
        except OSError:
            fresh = None
        if file is None and fresh is None:
            return None
        start = 0
        if fresh and (size := fresh.size()) > 2 * self._block_bytes:  # begin with the newest lines
            around = fresh.read(size - self._block_bytes, self._block_bytes)
            start = size - self._block_bytes + end if (end := around.find(b"\n") + 1) else 0
        with self._lock:
            self._file, self._parts, self._mark = fresh, [], b""
            self._head, self._head_end, self._tail = 0, start, start
            self.num_damaged, self._has_logprobs = 0, False
            self.generation += file is not None
        return fresh

    def _lines(self, file: _File, start: int, stop: int) -> bytes:
        """Return complete lines from `start`, a block of them or one longer line; empty if there is none yet."""
        num_bytes = self._block_bytes
        while True:
            data = file.read(start, min(num_bytes, stop - start))
            end = data.rfind(b"\n") + 1
            if end or len(data) < num_bytes:
                return data[:end]
            if num_bytes >= MAX_LINE_BYTES:
                return data
            num_bytes *= 4

    def _snapshot(self) -> tuple[Columns, _File | None]:
        """Return all columns in file order, and their file."""
        with self._lock:
            if len(self._parts) > 1:
                columns = merge(self._parts)
                order = np.argsort(
                    columns["id"], kind="stable"
                )  # older rows come after the newest ones, block by block
                self._parts = [{name: columns.pop(name)[order] for name in list(columns)}]
            return dict(self._parts[0]) if self._parts else merge([]), self._file


class _File:
    """A file for random access; closed when it is no longer used."""

    def __init__(self, path: Path) -> None:
        self._number = -1
        self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def size(self) -> int:
        return os.fstat(self._number).st_size

    def read(self, start: int, num_bytes: int) -> bytes:
        return os.pread(self._number, num_bytes, start) if num_bytes > 0 else b""

    def line(self, columns: Columns, number: int) -> bytes:
        return self.read(int(columns["id"][number]), int(columns["num_bytes"][number]))

    def ends_with(self, mark: bytes, end: int) -> bool:
        return self.size() >= end and self.read(end - len(mark), len(mark)) == mark

    def is_still(self, path: Path) -> bool:
        return os.path.samestat(os.fstat(self._number), path.stat())

    def __del__(self) -> None:
        if self._number >= 0:
            os.close(self._number)


class _Sieve:
    """Finds a text in rows; most lines are skipped without parsing."""

    def __init__(self, text: str) -> None:
        self._text = text.lower()
        # JSON spells letters beyond ASCII as \u...., whose case differs from the line's: search for an ASCII part
        # first.
        plain = max("".join(c if c.isascii() else "\0" for c in self._text).split("\0"), key=len)
        self._needle = json.dumps(plain)[1:-1].encode()

    def row(self, line: bytes) -> dict[str, Any] | None:
        """Return the row of a line if one of its texts contains the text."""
        row = parse_row(line) if self._needle in line.lower() else None
        return row if row and any(self._text in text.lower() for text in _texts(clean(row))) else None


def _texts(sample: Mapping[str, Any]) -> list[str]:
    return [sample[name] for name in TEXTS]


def _number(columns: Columns, place: int) -> int | None:
    """Return the index of the row with an id."""
    number = int(np.searchsorted(columns["id"], place))
    return number if number < len(columns["id"]) and columns["id"][number] == place else None


def _listed(place: int, row: Mapping[str, Any], text: str = "") -> dict[str, Any]:
    """Return a row's list entry: its numbers, and the end of its text or the surroundings of the hit."""
    sample = clean(row)
    shown = snippet(sample["completion"])
    for found in _texts(sample) if text else ():
        if (at := found.lower().find(text.lower())) >= 0:
            shown = ("… " if at > CONTEXT else "") + snippet(
                found[max(0, at - CONTEXT) : at + len(text) + CONTEXT]
            )
            break
    names = ("step", "uid", "index", "reward", "rewards", "advantage", "correct", "finish_reason")
    numbers = {name: sample[name] for name in names}
    return {
        "id": place,
        **numbers,
        "num_tokens": sample["num_completion_tokens"],
        "snippet": shown,
        "asked": asked(sample["prompt"]),
    }
