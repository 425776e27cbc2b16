"""The run log (metrics and samples of a run) and its readers.

Rows are strict JSON in plain ASCII, one object per line, so every reader can parse them whatever a model wrote. `step`
is the number of completed optimizer steps: the first training row is step 1, an evaluation before training is step 0.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from whet.ranks.collectives import gather_json, is_distributed
from whet.telemetry.metrics import RENAMED, find_metric
from whet.types import Group, Problem, Sample, UserError

RENAMED_KEYS = tuple((f'"{old}'.encode(), f'"{new}'.encode()) for old, new in RENAMED.items())
WARNINGS = "warnings.jsonl"
"""File of a run with what it warned of: `step` and `text`."""
RUN_TIME = "run_time_s"
"""Field of a run's rows: the seconds for which it has run, over all its starts, without the pauses between them."""
MAX_NUMBER = 1e90
MAX_TIME_S = 2.0**33
"""Upper bound of a plausible time of a run."""
IMAGES = "images"
"""Folder of a run with the images that rows are too short for."""
MAX_IN_ROW = 4096
"""Characters of a data URI that a row holds itself; all rollouts of a group would repeat a longer one."""
_URI = re.compile(r"data:image/([a-z]{1,8});base64,", re.IGNORECASE)


class RunLog:
    """The log of one run folder: appends to metrics.jsonl and samples.jsonl. A context manager.

    Rows are flushed immediately, so a killed run loses none. A disk error does not stop training: it is counted in
    `num_failed_writes` and reported once on stderr.

    Attributes:
        num_non_finite: NaN and infinite values so far; each is null in its row and named under 'non_finite'.
        num_failed_writes: Failed writes so far.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        resume_step: int | None = None,
        enabled: bool = True,
        listener: Callable[[str, Sequence[Mapping[str, Any]]], None] | None = None,
        began: float | None = None,
    ) -> None:
        """Open the log.

        Args:
            run_dir: Run folder, created if missing.
            resume_step: Optimizer steps done in the checkpoint that the run resumes from; later rows, which the run
                will write again, are dropped. None appends.
            enabled: False on all ranks but one: rows are checked but not written.
            listener: Called with every write: the file's name and its rows.
            began: Time of `time.monotonic()` at which the run would have begun without pauses, for `RUN_TIME`.

        Raises:
            UserError: If a file cannot be opened.
        """
        self._listener, self._began = listener, began
        self.num_non_finite = 0
        self.num_failed_writes = 0
        self._files: dict[str, int] = {}
        self._torn: set[str] = set()
        self._images = run_dir / IMAGES
        if enabled:
            for stale in run_dir.glob(".*.partial"):  # of a killed `replace_file`
                stale.unlink(missing_ok=True)
            _mend(run_dir / WARNINGS, resume_step)
            for name in ("metrics.jsonl", "samples.jsonl"):
                path = run_dir / name
                try:
                    run_dir.mkdir(parents=True, exist_ok=True)
                    _mend(path, resume_step)
                    self._files[name] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                except OSError as error:
                    raise UserError(
                        f"{path}: cannot be written ({error.strerror}); nothing was lost: fix that, then --resume"
                    ) from None

    def write_metrics(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Append one row of metrics.

        Args:
            stage: Program that measured them: 'sft', 'rl', 'eval' ...
            step: Optimizer steps done.
            values: Value per declared metric.

        Raises:
            ValueError: If a metric is not declared.
        """
        row: dict[str, Any] = {"stage": stage, "step": step, "time_s": round(time.time(), 3)}
        if self._began is not None:
            row[RUN_TIME] = round(time.monotonic() - self._began, 3)
        non_finite: dict[str, str] = {}
        for name, value in values.items():
            find_metric(name)
            number = int(value) if isinstance(value, int) else float(value)
            row[name] = self._finite(number)
            if row[name] is None:
                non_finite[name] = str(number)
        if non_finite:
            row["non_finite"] = non_finite
        self._append("metrics.jsonl", [row])

    def write_samples(self, step: int, groups: Sequence[Group]) -> None:
        """Append one row per rollout of the groups of all ranks; every rank calls it.

        Args:
            step: Optimizer steps done.
            groups: This rank's groups of the step, scored.
        """
        rows = [self._sample_row(step, group.problem, sample) for group in groups for sample in group.samples]
        if is_distributed():
            rows = [row for part in gather_json(rows) for row in part]
        if self._files:
            kept = {source: self._kept(source) for row in rows for source in row.get("images", ())}
            for row in rows:
                if "images" in row:
                    row["images"] = [kept[source] for source in row["images"]]
        self._append("samples.jsonl", rows)

    def close(self) -> None:
        """Close both files; further calls do nothing."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kept(self, source: str) -> str:
        """Return what a row says of an image: where it is from, or if that is the image itself, its file in the run."""
        found = _URI.match(source)
        if found is None or len(source) <= MAX_IN_ROW:
            return source
        try:
            data = base64.b64decode(source[found.end() :])
        except binascii.Error:
            return source[:MAX_IN_ROW]
        name = f"{hashlib.sha256(data).hexdigest()[:32]}.{found[1].lower()}"
        path, temporary = self._images / name, self._images / f".{name}.partial"
        try:
            if not path.exists():
                self._images.mkdir(exist_ok=True)
                temporary.write_bytes(data)
                temporary.replace(path)
        except OSError as error:
            self._failed(path.name, error)
        return f"{IMAGES}/{name}"

    def _sample_row(self, step: int, problem: Problem, sample: Sample) -> dict[str, Any]:
        return {
            "step": step,
            "uid": sample.uid,
            "index": sample.index,
            "prompt": _encodable(problem.prompt),
            "answer": _encodable(problem.answer),
            **({"other_answers": list(map(_encodable, others))} if (others := problem.other_answers) else {}),
            **(
                {"images": images} if (images := [image for m in problem.asked for image in m.images]) else {}
            ),
            "completion": _encodable(sample.text),
            "num_completion_tokens": len(sample.completion_ids),
            "num_read_tokens": len(sample.completion_ids) - sample.num_trained,
            "num_turns": max(1, len(sample.turn_ends)),
            "completion_ids": list(sample.completion_ids),
            "sampler_logprobs": [self._finite(round(value, 4) + 0.0) for value in sample.sampler_logprobs],
            "finish_reason": sample.finish_reason,
            "rewards": {name: self._finite(score) for name, score in sample.rewards.items()},
            "reward": self._finite(sample.reward),
            "advantage": self._finite(sample.advantage),
        }

    def _finite(self, value: float | None) -> float | None:
        """Return the value; None, counted, if JSON cannot represent it."""
        if value is None:
            return None
        if math.isfinite(value):
            return value if isinstance(value, int) else float(value)
        self.num_non_finite += 1
        return None

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if name not in self._files:
            return
        data = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode("ascii")
        if name in self._torn:  # a full disk cut a line: the next row starts a new one
            data = b"\n" + data
        try:
            while data:
                data = data[os.write(self._files[name], data) :]
                self._torn.add(name)
            self._torn.discard(name)
        except OSError as error:
            self._failed(name, error)
        if self._listener is not None:
            self._listener(name, rows)

    def _failed(self, name: str, error: OSError) -> None:
        self.num_failed_writes += 1
        if self.num_failed_writes == 1:
            print(
                f"warning: {name} could not be written ({error.strerror}); the run continues", file=sys.stderr
            )


def write_warning(run_dir: Path, step: int, text: str) -> None:
    """Keep a warning for the run's report, once, whatever becomes of the power; a disk error does not stop the run."""
    line, path = json.dumps({"step": step, "text": _encodable(text)}) + "\n", run_dir / WARNINGS
    with suppress(OSError), path.open("a+", encoding="ascii", errors="replace") as file:
        file.seek(0)
        if line not in file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics.jsonl (or of a run folder that has one), oldest first.

    Args:
        path: The file or the run folder; a missing file has no rows.

    Returns:
        One dict per row: 'stage', 'step', 'time_s', and a number or None per metric; rows without step are left out.
    """
    rows = read_rows(path / "metrics.jsonl" if path.is_dir() else path)
    return [row for row in rows if as_number(row.get("step")) is not None]


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Iterate over the objects of a JSON-lines file; unreadable lines are skipped, with one warning."""
    num_bad = 0
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                row = parse_row(line)
                if row is not None:
                    yield row
                num_bad += row is None
    if num_bad:
        warnings.warn(f"{path}: skipped {num_bad} unreadable line(s)", stacklevel=2)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, None if it is not one; metrics have their present names."""
    for old, new in RENAMED_KEYS:
        if old in line:
            line = line.replace(old, new)
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def as_number(value: Any) -> float | None:
    """Return a JSON value as a float; None if it is not a number, or too large to be a measurement (sums would
    overflow)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return number if abs(number) < MAX_NUMBER else None


def clean_metrics(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Normalise an untrusted row of metrics.jsonl to the form that `RunLog` writes.

    Args:
        row: A row as read.

    Returns:
        'stage' (text), 'step' (int), 'time_s', 'run_time_s' (None if implausible), and every metric that is a number,
        or None if it was not finite; values of other types are dropped. None if the row has no step.
    """
    step, stage = as_number(row.get("step")), row.get("stage")
    if step is None or abs(step) >= 2**53:
        return None
    values = {
        name: as_number(value)
        for name, value in row.items()
        if "/" in name
        and (value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)))
    }
    return {
        "stage": stage if isinstance(stage, str) else "",
        "step": int(step),
        **{
            name: number
            if (number := as_number(row.get(name))) is not None and 0 < number < MAX_TIME_S
            else None
            for name in ("time_s", RUN_TIME)
        },
        **values,
    }


def replace_file(path: Path, text: str) -> None:
    """Write a text file atomically; a symbolic link in its place is replaced, not followed."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def leads_out(path: Path) -> bool:
    """Say whether a symbolic link leads out of its folder: its target may be somebody else's file, and is not shown."""
    return not os.path.realpath(path).startswith(os.path.join(os.path.realpath(path.parent), ""))


def _mend(path: Path, resume_step: int | None) -> None:
    """Drop a last line cut short by a crash and, on resume, rows after `resume_step`, doubled and unreadable ones."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        torn = file.read() != b"\n"
    if not torn and resume_step is None:
        return
    temporary = path.with_suffix(".partial")
    try:
        with path.open("rb") as source, temporary.open("wb") as target:
            before = b""
            for line in source:
                row = parse_row(line)
                step = None if row is None else as_number(row.get("step"))
                is_kept = resume_step is None or (step is not None and step <= resume_step and line != before)
                if line.endswith(b"\n") and is_kept:
                    target.write(line)
                    before = line
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _encodable(text: str) -> str:
    r"""Write lone surrogates as literal \udXXX text: strict parsers refuse their JSON escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
