"""A short version of bench/reliability/floods.py: no flood keeps an honest client from its answers."""

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
