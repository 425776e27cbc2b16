"""Progress of an evaluation, for resuming: a chunk counts once its note, with a hash, is written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from whet.eval.confidence import Confidence
from whet.eval.grade import Grade, Judged
from whet.eval.measure import Chunk, Work
from whet.eval.record import GREEDY, PROGRESS, SAMPLES, append_lines, append_rows, read_lines, unequal
from whet.types import Problem, UserError


def start_progress(folder: Path, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Start the notes of an evaluation, or check that an earlier start's notes belong to the same one.

    Args:
        folder: The evaluation's folder.
        asked: Identity and model, as JSON.

    Returns:
        The notes of the chunks that earlier starts finished; empty for a new evaluation.

    Raises:
        UserError: If the model or the evaluation's settings have changed, or the notes are lost.
    """
    path = folder / PROGRESS
    asked = json.loads(json.dumps(asked))
    notes: list[dict[str, Any]] = []
    for row, _ in read_lines(path) if path.exists() else ():
        if row is None:
            break
        notes.append(row)
    if not notes:
        if (folder / SAMPLES).exists():
            raise UserError(
                f"{folder}: has completions, but {PROGRESS} is lost, so their model is unknown; "
                "choose another --out"
            )
        path.unlink(missing_ok=True)
        append_lines(path, [asked])
        return []
    changed = [text for key in asked for text in unequal(key, notes[0].get(key), asked[key])]
    if changed:
        raise UserError(
            f"{folder}: cannot resume: since its first start these have changed: {'; '.join(changed)[:300]}; "
            "choose another --out"
        )
    return notes[1:]


def save_chunk(folder: Path, chunk: Chunk, work: Work) -> None:
    """Append a finished chunk: its completions, then its note with a hash over both, which makes them count."""
    size, hashed = append_rows(folder, chunk.problems, chunk.rows)
    note = {"work": asdict(work), "size": size}
    append_lines(folder / PROGRESS, [note | {"sha256": _note_hash(note, hashed)}])


def read_finished(
    folder: Path, notes: Sequence[Mapping[str, Any]], problems: Sequence[Problem], num_samples: int
) -> tuple[list[list[Judged]], list[Work]]:
    """Return the results of earlier starts; anything after the last complete chunk is truncated.

    A damaged chunk is reported and, with all after it, sampled again; the damaged files are kept.

    Args:
        folder: The evaluation's folder.
        notes: The result of `start_progress`.
        problems: All problems, in their order.
        num_samples: Samples of each.

    Returns:
        The completions per problem, and the work of each chunk.

    Raises:
        UserError: If the file has other problems than the task now.
    """
    path, parts, size = folder / SAMPLES, list[Work](), 0
    finished: list[list[Judged]] = []
    path.touch()
    with path.open("rb") as file:
        for number, note in enumerate(notes, start=1):
            expected = note.get("size")
            data = file.read(expected) if isinstance(expected, int) and 0 < expected < 2**40 else b""
            if note.get("sha256") != _note_hash(note, hashlib.sha256(data).hexdigest()):
                for damaged in (path, folder / PROGRESS):
                    shutil.copyfile(damaged, damaged.with_name(f".corrupt-{damaged.name}"))
                text = f"chunk {number} of {len(notes)} is damaged; as found: .corrupt-{SAMPLES}"
                print(f"whet: warning: {path}: {text}; it and all after it are sampled again", flush=True)
                break
            finished += _chunk_of(path, data, problems, len(finished), num_samples)
            parts.append(Work(**note["work"]))
            size += len(data)
    _cut(path, size)
    _cut(folder / PROGRESS, sum(num for _, num in islice(read_lines(folder / PROGRESS), 1 + len(parts))))
    return finished, parts


def _note_hash(note: Mapping[str, Any], hash_of_rows: str) -> str:
    """Hash a chunk's note together with its rows."""
    content = json.dumps([note.get("work"), note.get("size"), hash_of_rows])
    return hashlib.sha256(content.encode()).hexdigest()


def _chunk_of(
    path: Path, data: bytes, problems: Sequence[Problem], first: int, num_samples: int
) -> list[list[Judged]]:
    """Read back a complete chunk; its first problem is `problems[first]`."""
    found: list[Judged] = []
    for place, line in enumerate(data.splitlines(), start=first * (num_samples + 1)):
        row, (index, sample) = json.loads(line), divmod(place, num_samples + 1)
        uid = problems[index].uid if index < len(problems) else None
        if (row.get("uid"), row.get("sample")) != (uid, sample - 1 if sample else GREEDY):
            raise UserError(
                f"{path}: completion {place + 1} does not belong to the task's current problem, so the data has "
                "changed; choose another --out"
            )
        try:
            found.append(_judged(row))
        except KeyError as error:
            raise UserError(f"{path}: a completion has no {error}; choose another --out") from None
    return [found[start : start + num_samples + 1] for start in range(0, len(found), num_samples + 1)]


def _judged(row: Mapping[str, Any]) -> Judged:
    """Read back a row without its tokens: everything that the metrics use is exactly as written."""
    graded = Grade(row["answer"], row["correct"], row["format"], row["thinking_tokens"], row["answer_from"])
    confidence = Confidence(row["mean_logprob"], row["answer_logprob"], row["hedges"], row["revisions"])
    return Judged(
        text=row["text"],
        num_tokens=row["completion_tokens"],
        finish_reason=row["finish_reason"],
        grade=graded,
        num_turns=row["num_turns"],
        confidence=confidence,
        rewards=row["rewards"],
        reward=row["reward"],
    )


def _cut(path: Path, size: int) -> None:
    """Truncate a file to a size."""
    if path.stat().st_size > size:
        with path.open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())
