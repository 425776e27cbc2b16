"""The short form of bench/reliability/ranks.py: disturbed jobs of two ranks end soon, with a message, and go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BATTERY = Path(__file__).resolve().parents[2] / "bench" / "reliability" / "ranks.py"


def run_battery(tmp_path: Path, *options: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, str(BATTERY), "--json", *options],
        capture_output=True,
        text=True,
        timeout=900,
        env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("kill a rank", marks=pytest.mark.ci),
        pytest.param("unequal work", marks=pytest.mark.slow),
    ],
)
def test_a_killed_and_a_failing_rank(fault: str, tmp_path: Path) -> None:
    trials = run_battery(tmp_path, "--only", "sft", "--faults", fault, "--trials", "1", "--seed", "3")
    assert [trial["fault"] for trial in trials] == [fault]
    assert all(trial["hit"] and trial["seconds"] < 15 for trial in trials)


@pytest.mark.slow
def test_every_fault(tmp_path: Path) -> None:
    trials = run_battery(tmp_path, "--trials", "24")
    assert sum(trial["hit"] for trial in trials) >= 16, "most must find the job going on"
