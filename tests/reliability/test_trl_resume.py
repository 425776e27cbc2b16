"""The short form of bench/reliability/trl_resume.py: a kill inside a generation, in whet and in TRL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs

PROGRAM = Path(__file__).parents[2] / "bench/reliability/trl_resume.py"


@pytest.mark.slow
@needs("trl", "datasets", "accelerate")
def test_whet_goes_on_exactly_inside_a_generation_and_trl_at_its_end(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(PROGRAM),
            "--json",
            "--trials",
            "1",
            "--points",
            "end of a generation,inside a generation",
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trials = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {(trial["side"], trial["point"]): trial for trial in trials}
    assert len(found) == 4
    assert all(trial["killed"] and trial["resumed"] for trial in trials)
    equal = {
        key: trial["parameters"] and trial["optimizer"] and trial["rows"] for key, trial in found.items()
    }
    assert equal["whet", "end of a generation"]
    assert equal["whet", "inside a generation"]
    assert equal["TRL", "end of a generation"]  # the harness does not disturb TRL
    assert not equal[
        "TRL", "inside a generation"
    ]  # else TRL was mended: say so in docs/results/reliability.md
    assert not list(tmp_path.iterdir())
