"""What a killed evaluation goes on from: chunks that count once their note is there, each with a hash."""

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
    """Begin the notes of an evaluation, or check that those of an earlier start are of the same one.

    Args:
        folder: The evaluation's folder.
        asked: Identity and model, as JSON.

    Returns:
        The notes of the chunks that earlier starts finished; empty for a new evaluation.

    Raises:
        UserError: If the model or what is asked of it has changed, or the notes are lost.
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
                f"{folder}: has completions, but {PROGRESS} is lost, so nobody knows of which model; "
                "choose another --out"
            )
        path.unlink(missing_ok=True)
        append_lines(path, [asked])
        return []
    changed = [text for key in asked for text in unequal(key, notes[0].get(key), asked[key])]
    if changed:
        raise UserError(
            f"{folder}: cannot go on, since its first start there has changed {'; '.join(changed)[:300]}; "
            "choose another --out"
        )
    return notes[1:]


def save_chunk(folder: Path, chunk: Chunk, work: Work) -> None:
    """Append a finished chunk: its completions, then the note by which they count, as it has the hash of both."""
    size, hashed = append_rows(folder, chunk.problems, chunk.rows)
    note = {"work": asdict(work), "size": size}
    append_lines(folder / PROGRESS, [note | {"sha256": _note_hash(note, hashed)}])


def read_finished(
    folder: Path, notes: Sequence[Mapping[str, Any]], problems: Sequence[Problem], num_samples: int
) -> tuple[list[list[Judged]], list[Work]]:
    """Return what earlier starts left of the first problems; what is behind the last whole chunk is cut off.

    A chunk that is not as it was written is told of and, with all behind it, sampled again; the files are kept.

    Args:
        folder: The evaluation's folder.
        notes: What `start_progress` returned.
        problems: All problems, in their order.
        num_samples: Samples of each.

    Returns:
        The completions per problem, and what each chunk of them took.

    Raises:
        UserError: If the file holds other problems than the task gives now.
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
                print(f"whet: warning: {path}: {text}; it and what follows is sampled again", flush=True)
                break
            finished += _chunk_of(path, data, problems, len(finished), num_samples)
            parts.append(Work(**note["work"]))
            size += len(data)
    _cut(path, size)
    _cut(folder / PROGRESS, sum(num for _, num in islice(read_lines(folder / PROGRESS), 1 + len(parts))))
    return finished, parts


def _note_hash(note: Mapping[str, Any], hash_of_rows: str) -> str:
    """Hash what a chunk took together with its rows."""
    content = json.dumps([note.get("work"), note.get("size"), hash_of_rows])
    return hashlib.sha256(content.encode()).hexdigest()


def _chunk_of(
    path: Path, data: bytes, problems: Sequence[Problem], first: int, num_samples: int
) -> list[list[Judged]]:
    """Read a whole chunk back; its first problem is `problems[first]`."""
    found: list[Judged] = []
    for place, line in enumerate(data.splitlines(), start=first * (num_samples + 1)):
        row, (index, sample) = json.loads(line), divmod(place, num_samples + 1)
        uid = problems[index].uid if index < len(problems) else None
        if (row.get("uid"), row.get("sample")) != (uid, sample - 1 if sample else GREEDY):
            raise UserError(
                f"{path}: completion {place + 1} is not of the problem that the task gives now, so the data has "
                "changed; choose another --out"
            )
        try:
            found.append(_judged(row))
        except KeyError as error:
            raise UserError(f"{path}: a completion has no {error}; choose another --out") from None
    return [found[start : start + num_samples + 1] for start in range(0, len(found), num_samples + 1)]


def _judged(row: Mapping[str, Any]) -> Judged:
    """Read a row back, but for its tokens: what the metrics are made of is exactly what was written."""
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
    """Cut a file to its whole lines."""
    if path.stat().st_size > size:
        with path.open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())
