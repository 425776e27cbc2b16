"""Sends a run to its trackers without ever waiting for them.

The JSON lines of the run folder are the truth, a tracker is a copy. Each tracker has a thread of its own behind a
bounded queue, so one that fails, hangs or is slow costs rows at the tracker, never a step of training, and
`whet track RUN --to NAME` sends all of them afterwards.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from whet.config import read_yaml
from whet.telemetry.log import as_number
from whet.telemetry.trackers import (
    COLUMNS,
    Link,
    Row,
    TrackConfig,
    TrackedRun,
    Tracker,
    brief,
    load_tracker,
)

LINKS = "trackers.json"
MAX_WAITING = 1000
"""Rows that wait for a tracker; more are left out."""

CLOSE_SECONDS = 5.0
"""How long the end of a run waits for all its trackers together."""

MAX_TEXT = 2000


class Tracking:
    """The trackers of one run, as a context manager around it; no method raises because of a tracker.

    A tracker is opened when the first row comes, so a run that ends before leaves no trace anywhere. What became of
    each stands in RUN/trackers.json.
    """

    def __init__(self, config: TrackConfig, folder: Path, *, enabled: bool = True) -> None:
        """Load the trackers.

        Args:
            config: Which.
            folder: The run folder; it may not exist yet. A tracker that it knows goes on with the same run.
            enabled: False on all ranks but one: nothing is loaded or sent.

        Raises:
            UserError: If one is not installed or cannot be used like this.
        """
        self._config, self._folder = config, folder
        loaded = [(name, load_tracker(name, config)) for name in config.to] if enabled else []
        self._workers = [_Worker(name, tracker, folder, self._save) for name, tracker in loaded]
        self._lock = threading.Lock()

    def put(self, file: str, rows: Sequence[Row]) -> None:
        """Take in what was written to the run's log.

        Args:
            file: metrics.jsonl or samples.jsonl.
            rows: Rows of one step.
        """
        if self._workers and (item := as_item(file, rows, self._config.num_samples)) is not None:
            for worker in self._workers:
                worker.put(item)

    def close(self, *, failed: bool = False) -> None:
        """Wait at most CLOSE_SECONDS for what is under way, then leave it and say what is missing."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for worker in self._workers:
            worker.end(failed)
        for worker in self._workers:
            worker.wait(deadline - time.monotonic())
        self._workers = []

    def _save(self, entry: dict[str, Any]) -> None:
        """Put a tracker's entry into trackers.json."""
        with self._lock:
            save_entry(self._folder, entry)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


@dataclass(frozen=True, slots=True)
class Item:
    """Rows on their way to a tracker.

    Attributes:
        step: Optimizer steps done.
        time_s: When the values were measured, in seconds since 1970.
        values: Values of a row by name.
        table: Completions, as rows of COLUMNS.
    """

    step: int
    time_s: float
    values: Mapping[str, float]
    table: list[list[Any]]

    def send(self, tracker: Tracker) -> None:
        """Give it to a tracker."""
        if self.values:
            tracker.log(self.step, self.time_s, self.values)
        if self.table:
            tracker.log_samples(self.step, self.table)


def as_item(file: str, rows: Sequence[Row], num_samples: int) -> Item | None:
    """Make what a tracker gets of rows of one step.

    Args:
        file: metrics.jsonl (then one row) or samples.jsonl.
        rows: The rows.
        num_samples: Completions to keep, evenly over the rows.

    Returns:
        None when there is nothing to send, or the rows have no step: anybody may have written them.
    """
    step = as_number(rows[0].get("step", 0)) if rows else None
    if step is None or abs(step) >= 2**53:
        return None
    if file == "metrics.jsonl":
        (row,) = rows
        values = {name: value for name, value in row.items() if "/" in name and as_number(value) is not None}
        return Item(int(step), as_number(row.get("time_s")) or 0.0, values, []) if values else None
    if not num_samples:
        return None
    chosen = rows[:: math.ceil(len(rows) / num_samples)]
    return Item(int(step), 0.0, {}, [[_cell(row.get(name)) for name in COLUMNS] for row in chosen])


def open_run(tracker: Tracker, folder: Path, first_step: int, known: Link | None) -> Link:
    """Open a run at a tracker, with the config that stands in its folder."""
    config = dict(read_yaml(folder / "config.yaml"))
    return tracker.open(TrackedRun(folder=folder, config=config, first_step=first_step, known=known))


def read_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of a run's trackers.json by name; none where it is missing or damaged."""
    try:
        rows = json.loads((folder / LINKS).read_text(encoding="utf-8"))
        return {str(row["name"]): dict(row) for row in rows}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}


def save_entry(folder: Path, entry: dict[str, Any]) -> None:
    """Put an entry into trackers.json; a disk that refuses stops nothing."""
    entries = read_entries(folder) | {entry["name"]: entry}
    temporary = folder / f".{LINKS}.partial"
    try:
        temporary.write_text(json.dumps(list(entries.values()), indent=1) + "\n", encoding="ascii")
        temporary.replace(folder / LINKS)
    except OSError as error:
        _say(f"{folder / LINKS} could not be written ({error.strerror})")


def entry_of(name: str, link: Link, sent: int, unsent: int, error: str) -> dict[str, Any]:
    """Make an entry of trackers.json."""
    return {"name": name, **asdict(link), "rows_sent": sent, "rows_not_sent": unsent, "error": error}


class _Worker:
    """One tracker, its queue and its thread. Rows are counted on both sides, so that none is lost unnoticed."""

    def __init__(
        self, name: str, tracker: Tracker, folder: Path, save: Callable[[dict[str, Any]], None]
    ) -> None:
        self._name, self._tracker, self._folder, self._save = name, tracker, folder, save
        self._items: SimpleQueue[Item | bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._link = Link(id="")
        self._offered = self._sent = 0
        self._sent_before = self._unsent_before = 0
        self._error = ""

    def put(self, item: Item) -> None:
        self._offered += 1
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, args=(item.step,), name=f"tracker {self._name}", daemon=True
            )
            self._thread.start()
        if self._thread.is_alive() and self._items.qsize() < MAX_WAITING:
            self._items.put(item)
        elif not self._error:
            self._fail(f"too slow: {MAX_WAITING} rows wait for it" if self._thread.is_alive() else "it ended")

    def end(self, failed: bool) -> None:
        self._items.put(failed)

    def wait(self, seconds: float) -> None:
        if self._thread is None:
            return
        self._thread.join(max(0.0, seconds))
        unsent = self._offered - self._sent
        if self._thread.is_alive() and not self._error:
            self._error = f"not done within {CLOSE_SECONDS:g} s of the end"
        if unsent or self._thread.is_alive():
            _say(
                f"tracker {self._name}: {unsent} of {self._offered} rows were not sent ({self._error}); "
                f"`whet track {self._folder} --to {self._name}` sends them all"
            )
        self._store()

    def _work(self, first_step: int) -> None:
        """Send until the end; whatever a tracker raises, SystemExit included, ends here."""
        try:
            entry = read_entries(self._folder).get(self._name)
            known = None
            if entry is not None and entry["id"]:
                known = Link(id=entry["id"], url=entry["url"], path=entry["path"])
                self._sent_before, self._unsent_before = entry["rows_sent"], entry["rows_not_sent"]
            self._link = open_run(self._tracker, self._folder, first_step, known)
            self._store()
            while not isinstance(item := self._items.get(), bool):
                try:
                    item.send(self._tracker)
                    self._sent += 1
                except Exception as error:
                    self._fail(brief(error))
            self._tracker.close(failed=item)
        except BaseException as error:
            self._fail(brief(error))
        self._store()

    def _fail(self, reason: str) -> None:
        """Say the first failure aloud."""
        if not self._error:
            self._error = reason
            _say(f"tracker {self._name}: {reason}; the run goes on, and its own files have everything")

    def _store(self) -> None:
        sent, unsent = self._sent_before + self._sent, self._unsent_before + self._offered - self._sent
        self._save(entry_of(self._name, self._link, sent, unsent, self._error))


def _say(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def _cell(value: Any) -> Any:
    """Write a field of samples.jsonl as a number or a text of bounded length."""
    if isinstance(value, dict):
        value = json.dumps(value)
    return value[:MAX_TEXT] if isinstance(value, str) else value
