"""Short versions of bench/reliability/floods.py: an honest client keeps its answers, and a stream its pace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("uvicorn", "starlette"):
    pytest.importorskip(package, reason="whet serve is an extra: pip install 'whet-rl[web]'")

PROGRAM = Path(__file__).parents[2] / "bench" / "reliability" / "floods.py"
FEW = (
    "wrong key, one-byte chunks",
    "key, one-byte chunks",
    "pipelined /health",
    "four clients of one token",
    "long prompts",
)


@pytest.mark.ci
def test_an_honest_client_is_served_during_floods(tmp_path: Path) -> None:
    """With a limit for a busy machine; what a quiet one measures is in docs/serve.md."""
    found = tmp_path / "found.json"
    options = ["--minutes", "0.05", "--limit", "2", "--json", str(found), "--floods", *FEW]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *options], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["flood"] for row in json.loads(found.read_text())] == list(FEW)


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_a_stream_goes_on_beside_four_crowds(tmp_path: Path) -> None:
    """Tokens come at most three times as slowly as alone. Other work on this machine slows down single rounds: of three
    each crowd has to pass one, and in none may a stream fail."""
    slow: set[str] = set()
    told = []
    for number in range(3):
        file = tmp_path / f"{number}.json"
        words = [sys.executable, str(PROGRAM), "--beside", "--rounds", "1", "--json", str(file)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
        assert file.exists(), done.stdout + done.stderr
        rows = json.loads(file.read_text())
        assert len(rows) == 4
        assert [row["failures"] for row in rows] == [[]] * 4, done.stdout
        late = {
            row["crowd"] for row in rows if row["ratio"] > 3
        }  # of the means: a median leaves out what stalls
        slow = late if number == 0 else slow & late
        told.append(done.stdout)
        if not slow:
            return
    pytest.fail("\n".join([f"slow in each of three rounds: {', '.join(sorted(slow))}", *told]))
