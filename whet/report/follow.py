"""Status of a run from its folder alone: whether it is running, its newest values, warnings and new metric rows."""

from __future__ import annotations

import re
import statistics
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from whet.report.curves import figures
from whet.telemetry.display import metric_label
from whet.telemetry.health import HISTORY_ROWS, find_warnings
from whet.telemetry.heartbeat import FOLDER
from whet.telemetry.log import RUN_TIME, as_number, clean_metrics, parse_row
from whet.telemetry.metrics import find_metric, format_metric

MARK_BYTES = 256
CHECKED_ROWS = 20_000
"""Newest rows that are checked for warnings when a run is opened; each takes some 50 microseconds."""

GLANCE_BYTES = 1 << 16

MAX_WARNINGS = 20
SILENT_S, SILENT_STEPS = 60.0, 8.0
"""A run counts as silent after this many seconds, and this many usual step times, without a row."""

HEADLINES = {
    "rl": (
        "rl/correct eval/greedy rl/reward_mean rl/format rl/completion_tokens rl/entropy rl/tokens_per_second"
    ),
    "sft": "sft/loss sft/validation_loss sft/grad_norm sft/tokens_per_second sft/epoch",
    "dpo": "dpo/loss dpo/validation_loss dpo/accuracy dpo/margin dpo/tokens_per_second",
    "rft": "rft/right rft/loss rft/kept rft/covered rft/tokens_per_second",
}
"""Stage -> the numbers shown large, the most important first."""


class RunFollower:
    """Follows the metrics.jsonl of one run folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "metrics.jsonl"
        self._lock = threading.Lock()
        self._cursor = ""
        self._recent: deque[dict[str, Any]] = deque()
        self._warnings: deque[dict[str, Any]] = deque()
        self._numbers: dict[str, float] = {}

    def state(self, cursor: str = "") -> dict[str, Any]:
        """Return what a page shows of the run.

        Args:
            cursor: The previous answer's `cursor`, to get only new points of the curves; '' for everything.

        Returns:
            `status` {kind, text, step, num_steps}, `headline` [{label, value, meaning}], `warnings` [{step, text}], the
            newest first, `figures` of the rows after the cursor, `whole`: whether these are all rows (the file is new
            or was replaced), and the new `cursor`.
        """
        with self._lock:
            self._catch_up()
            rows, new_cursor, whole = read_appended(self._path, cursor)
            changed = whole or new_cursor != cursor
            return {
                "status": run_status(self._folder, self._recent, time.time()),
                "headline": self._headline(),
                "warnings": list(reversed(self._warnings)),
                "figures": figures(rows) if changed else [],
                "whole": whole,
                "cursor": new_cursor,
            }

    def _catch_up(self) -> None:
        """Read the rows appended since the last call."""
        rows, self._cursor, whole = read_appended(self._path, self._cursor)
        if whole:
            self._recent = deque(maxlen=HISTORY_ROWS)
            self._warnings = deque(maxlen=MAX_WARNINGS)
            self._numbers = {}
            rows = deque(rows, maxlen=CHECKED_ROWS + HISTORY_ROWS)
        newer = [row for row in map(clean_metrics, rows) if row is not None]
        found: list[tuple[int, str]] = []
        for stage in dict.fromkeys(row["stage"] for row in newer):
            history = [row for row in self._recent if row["stage"] == stage]
            own = history + [row for row in newer if row["stage"] == stage]
            found += [(own[at]["step"], text) for at, text in find_warnings(stage, own, len(history))]
        self._warnings += [{"step": step, "text": text} for step, text in sorted(found)]
        self._recent += newer
        for row in newer:
            self._numbers |= {name: value for name, value in row.items() if "/" in name and value is not None}

    def _headline(self) -> list[dict[str, str]]:
        stage = self._recent[-1]["stage"] if self._recent else ""
        names = [name for name in HEADLINES.get(stage, "").split() if name in self._numbers]
        return [
            {
                "label": metric_label(name) + (" (validation)" if name.startswith("eval/") else ""),
                "value": format_metric(name, self._numbers[name]),
                "meaning": find_metric(name).meaning,
            }
            for name in names
        ]


RESULTS = {"eval.json": "an evaluation, finished", "infer.json": "questions asked, finished"}
"""What is written at the end of what trains nothing."""


def run_status(folder: Path, recent: Iterable[Mapping[str, Any]], now: float) -> dict[str, Any]:
    """Return whether a run is running, and for how much longer.

    Args:
        folder: Its folder.
        recent: Its last rows of metrics.
        now: The time, as time.time() gives it.

    Returns:
        `kind` ('running', 'finished', 'stopped', 'silent', 'waiting' or 'gone'), `text`, `step`, `num_steps` (None if
        unknown).
    """
    if not folder.is_dir():
        return {
            "kind": "gone",
            "text": "the run folder is gone: deleted, or moved",
            "step": 0,
            "num_steps": None,
        }
    num_steps = planned_steps(folder)
    steps = [int(step) for row in recent if (step := as_number(row.get("step"))) is not None]
    result = next((text for name, text in RESULTS.items() if (folder / name).is_file()), None)
    if result is not None:
        return {"kind": "finished", "text": result, "step": max(steps, default=0), "num_steps": num_steps}
    if not steps:
        kind, text = "waiting", "waiting: no metrics logged yet"
        if (folder / "eval_samples.jsonl").is_file():
            text = "an evaluation without a result yet"
        elif (folder / "summary.json").is_file():  # a folder of runs, such as the demo's
            kind, text = "finished", "finished"
        return {"kind": kind, "text": text, "step": 0, "num_steps": num_steps}
    times = [time_s for row in recent if (time_s := as_number(row.get("time_s"))) is not None]
    ran = [run_s for row in recent if (run_s := as_number(row.get(RUN_TIME))) is not None]
    ran = ran if len(ran) == len(steps) else times  # of an earlier version, with the pauses before a resume
    gaps = [after - before for before, after in pairwise(ran) if after > before]
    usual = statistics.median(gaps) if gaps else 0.0
    age = max(0.0, now - times[-1]) if times else 0.0
    place = f"step {steps[-1]:,}" + (f" of {num_steps:,}" if num_steps else "")
    ago = f"last row {duration(age)} ago"
    if (num_steps is not None and steps[-1] >= num_steps) or is_summed_up(
        folder, times[-1] if times else 0.0
    ):
        kind, text = "finished", f"finished · {place} · {ago}"
    elif ended := _ended(folder, times[-1] if times else 0.0):
        kind, text = "stopped", f"{ended} · {place} · {ago}"
    elif age > max(SILENT_S, SILENT_STEPS * usual):
        kind, text = "silent", f"stopped, or in a long step · {place} · {ago}"
    else:
        left = (num_steps or 0) - steps[-1]
        when = f" · about {duration(left * usual)} left" if left > 0 and usual else ""
        kind, text = "running", f"running · {place} · {ago}{when}"
    return {"kind": kind, "text": text, "step": steps[-1], "num_steps": num_steps}


def _ended(folder: Path, last_s: float) -> str:
    """Say how a run's process ended after its last row, by its heartbeat; '' while it lives, or was killed."""
    try:
        beat = parse_row((folder / FOLDER / "rank_0.json").read_bytes()) or {}
    except OSError:
        return ""
    written_s = as_number(beat.get("time"))
    if written_s is None or written_s < last_s:
        return ""
    return {"preempted": "stopped by a signal, and saved", "failed": "failed"}.get(str(beat.get("state")), "")


def glance(folder: Path) -> dict[str, Any]:
    """Return `run_status` from the end of a run's metrics only, for lists of many runs."""
    path = folder / "metrics.jsonl"
    try:
        start = max(0, path.stat().st_size - GLANCE_BYTES)
        with path.open("rb") as file:
            file.seek(start)
            lines = file.read(GLANCE_BYTES).split(b"\n")[1 if start else 0 :]
    except OSError:
        lines = []
    rows = [clean_metrics(parse_row(line) or {}) for line in lines]
    return run_status(folder, [row for row in rows if row is not None], time.time())


def is_summed_up(folder: Path, last_s: float) -> bool:
    """Say whether a run's summary is newer than its last row: a resumed run still has its previous summary.

    Args:
        folder: The run folder; a copy may have other file times, but none before the run's own.
        last_s: Unix time of the last row.
    """
    try:
        written_s = (folder / "summary.json").stat().st_mtime
        return written_s >= last_s or written_s >= (folder / "metrics.jsonl").stat().st_mtime
    except OSError:
        return False


def read_appended(path: Path, cursor: str) -> tuple[Iterator[dict[str, Any]], str, bool]:
    """Read the rows after a cursor; an incomplete last line is left for later.

    Args:
        path: A JSON-lines file; it may be missing.
        cursor: What the previous call returned; '' for the beginning.

    Returns:
        The rows, the new cursor, and whether these are all rows: there was no cursor, or the file was rewritten (a
        resumed run drops rows).
    """
    try:
        with path.open("rb") as file:
            found = re.fullmatch(r"(\d{1,15})-([0-9a-f]{1,8})", cursor)
            start = int(found[1]) if found else 0
            whole = found is None or f"{zlib.crc32(_before(file, start)):x}" != found[2]
            file.seek(0 if whole else start)
            end = start = file.tell()
            while chunk := file.read(1 << 20):
                if b"\n" in chunk:
                    end = file.tell() - len(chunk) + chunk.rfind(b"\n") + 1
            cursor = f"{end}-{zlib.crc32(_before(file, end)):x}"
    except OSError:
        return iter(()), "", True
    return _rows(path, start, end), cursor, whole


def planned_steps(folder: Path) -> int | None:
    """Return the number of steps in a run's config, None if it has none."""
    try:
        with (folder / "config.yaml").open(encoding="utf-8", errors="replace") as file:
            found = re.search(r"^num_steps: (\d{1,9})$", file.read(1 << 20), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def duration(seconds: float) -> str:
    """Write a duration in its largest fitting unit: 12 s, 3 min, 2.5 h, 4 days."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def _before(file: Any, end: int) -> bytes:
    """Return the bytes before an offset, which show whether the file is still the same; b'?' if it is shorter."""
    start = max(0, end - MARK_BYTES)
    file.seek(start)
    data = file.read(end - start)
    return data if len(data) == end - start else b"?"


def _rows(path: Path, start: int, end: int) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            file.seek(start)
            while (left := end - file.tell()) > 0 and (line := file.readline(left)):
                if (row := parse_row(line)) is not None:
                    yield row
    except OSError:  # deleted meanwhile: the next call reports it
        return
