"""quarantine.jsonl of a run folder: the rows of the data that were skipped, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whet.config import counted
from whet.tasks.base import tasks_inside
from whet.tasks.read import BadRow
from whet.telemetry.log import replace_file
from whet.types import Task

QUARANTINE = "quarantine.jsonl"


def write_quarantine(folder: Path, source: Task | Sequence[BadRow]) -> str:
    """Write skipped rows of the data to a run's quarantine.jsonl; without any there is no file.

    Args:
        folder: The run folder.
        source: A task whose splits have been read, or bad rows of `read_jsonl`.

    Returns:
        One readable line: how many rows were skipped, how many of them are empty, and how many are repeated; '' if
        none.
    """
    parts: Sequence[Any] = [source] if isinstance(source, Sequence) else [*tasks_inside(source).values()]
    rows = [row for part in parts for row in _bad_rows(part)]
    names = ("num_duplicates", "num_repeated")  # dropped, and kept
    num_repeated = sum(getattr(part, name, 0) for part in parts for name in names)
    sentences = []
    (folder / QUARANTINE).unlink(missing_ok=True)  # of a run that never reached its first checkpoint
    if rows:
        content = [{"where": r.where, "line": r.number, "reason": r.reason, "raw": r.raw} for r in rows]
        replace_file(folder / QUARANTINE, "".join(json.dumps(row) + "\n" for row in content))
        num_empty = sum(row.reason.endswith("is empty") for row in rows)
        empty = f" ({num_empty:,} with an empty field)" if num_empty else ""
        sentences.append(
            f"{len(rows):,} bad row{'s' * (len(rows) != 1)} of the data skipped{empty}: see {folder / QUARANTINE}"
        )
    if num_repeated:
        sentences.append(
            f"{counted(num_repeated, 'row')} of the data {'is' if num_repeated == 1 else 'are'} repeated"
        )
    return "; ".join(sentences)


def _bad_rows(part: Any) -> list[BadRow]:
    found = part if isinstance(part, Sequence) else getattr(part, "bad_rows", ())
    return [row for row in found if isinstance(row, BadRow)]
