"""The scores that a judge gave so far, in memory and in a file that outlives the process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from whet.types import UserError

REPLY_KEPT = 400
"""Characters at the end of a reply that the file keeps for the reader."""


class VerdictCache:
    """Verdicts by key. Whole lines are appended to the file, so a killed writer leaves one torn line at most.

    Attributes:
        verdicts: Score by key; None for a completion that could not be scored.
        num_corrupt: Lines of the file that could not be read.
    """

    def __init__(self, path: str, scale: tuple[float, float]) -> None:
        """Read the file and open it for appending; several processes may do so at once.

        Args:
            path: JSON-lines file, made if missing; '' for none.
            scale: Lowest and highest score.

        Raises:
            UserError: If the file cannot be read or written.
        """
        self.verdicts: dict[str, float | None] = {}
        self.num_corrupt = 0
        self._file: int | None = None
        if not path:
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            last = b"\n"
            with open(path, "rb") as lines:
                for last in lines:
                    self._read(last, scale)
            if not last.endswith(b"\n"):  # the last writer was killed within a line
                os.write(self._file, b"\n")
        except OSError as error:
            raise UserError(
                f"judge.cache {path}: {error.strerror}; name a file that can be written"
            ) from None

    def add(self, key: str, uid: str, score: float | None, reply: str) -> None:
        """Keep a verdict; one without a score in memory only, so that a mended judge is asked again.

        Args:
            key: Name of the verdict.
            uid: The problem, for the reader of the file.
            score: The score, or None.
            reply: What the judge wrote, for the reader of the file.
        """
        self.verdicts[key] = score
        if self._file is None or score is None:
            return
        row = {"key": key, "uid": uid, "score": score, "reply": reply[-REPLY_KEPT:]}
        try:
            os.write(self._file, (json.dumps(row) + "\n").encode("ascii"))
        except OSError as error:
            print(f"warning: judge.cache is no longer written ({error.strerror})", file=sys.stderr)
            self.close()

    def close(self) -> None:
        """Close the file; what comes later stays in memory."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self, line: bytes, scale: tuple[float, float]) -> None:
        if not line.strip():
            return
        try:
            row = json.loads(line)
            key, score = row["key"], row["score"]
        except (ValueError, RecursionError, TypeError, KeyError):
            key = score = None
        if isinstance(key, str) and isinstance(score, float) and scale[0] <= score <= scale[1]:
            self.verdicts[key] = score
        else:
            self.num_corrupt += 1
