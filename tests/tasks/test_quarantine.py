"""Rows that were left out are kept in a file of the run, with line, reason and what stood there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from whet.tasks.gsm8k import GSM8K
from whet.tasks.jsonl import Jsonl
from whet.tasks.mixture import Mixture
from whet.tasks.quarantine import QUARANTINE, write_quarantine
from whet.tasks.read import read_jsonl
from whet.types import Task

GOOD = '{"prompt": "1+1", "answer": "2"}'


def left_out(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / QUARANTINE).read_text().splitlines()]


def test_bad_rows_of_a_task_and_of_the_parts_of_a_mixture(tmp_path: Path) -> None:
    data, run, wide = tmp_path / "data.jsonl", tmp_path / "run", b"[" + b"7" * 9000
    run.mkdir()
    lines = [GOOD.encode(), b'{"prompt": " ", "answer": "3"}', b"\xff{\x1b", wide, GOOD.encode()]
    data.write_bytes(b"\n".join(lines) + b"\n")
    task = Jsonl(data, max_bad_rows=3)
    assert write_quarantine(run, task) == ""
    assert not (run / QUARANTINE).exists(), "nothing has been read yet"
    task.problems("train")
    assert write_quarantine(run, task) == (
        f"3 bad rows of the data skipped (1 with an empty field): see {run / QUARANTINE}; "
        "1 row of the data is repeated"
    )
    expected = [
        ("data.jsonl line 2", 2, "'prompt' is empty", '{"prompt": " ", "answer": "3"}'),
        ("data.jsonl line 3", 3, "not UTF-8 (byte 0)", "\\xff{\x1b"),
        ("data.jsonl line 4", 4, "not JSON (Expecting ',' delimiter at column 9002)", wide[:2000].decode()),
    ]
    found = left_out(run)
    assert found[2]["reason"].startswith("not JSON")
    expected[2] = (*expected[2][:2], found[2]["reason"], expected[2][3])
    assert [tuple(row[name] for name in ("where", "line", "reason", "raw")) for row in found] == expected
    before = (run / QUARANTINE).read_bytes()
    write_quarantine(run, task)
    assert (run / QUARANTINE).read_bytes() == before, "a resumed run writes the same file"
    sums = tmp_path / "gsm8k"
    sums.mkdir()
    row = '{"question": "q", "answer": "#### 1"}\n'
    (sums / "train.jsonl").write_text(row * 2 + '{"question": "r", "answer": "1"}\n')
    both = Mixture({"jsonl": task, "gsm8k": GSM8K(sums, max_bad_rows=1)}, {"jsonl": 1.0, "gsm8k": 1.0})
    both.problems("train")
    assert "4 bad rows" in (said := write_quarantine(run, both))
    assert "2 rows of the data are repeated" in said
    assert left_out(run)[3]["where"] == "train.jsonl line 3"


def test_rows_beside_a_task_and_a_task_without_rows(tmp_path: Path) -> None:
    class Plain:
        """A task of somebody else's, with an attribute of that name."""

        name, bad_rows = "plain", [1, 2]

    plain: Task = Plain()  # pyright: ignore[reportAssignmentType]
    assert write_quarantine(tmp_path, plain) == ""
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"5\n{GOOD}\n")
    _, bad = read_jsonl(path, required=["prompt"], max_bad_rows=1)
    assert write_quarantine(tmp_path, bad).startswith("1 bad row of the data skipped: see")
    assert [row["raw"] for row in left_out(tmp_path)] == ["5"]
