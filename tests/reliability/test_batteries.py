"""The short form of bench/reliability: killed and damaged tiny runs end as the undisturbed one, or say why not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BATTERIES = Path(__file__).resolve().parents[2] / "bench" / "reliability"


def run_battery(name: str, *options: str, tmp_path: Path) -> tuple[int, list[dict[str, Any]], str]:
    done = subprocess.run(
        [sys.executable, str(BATTERIES / f"{name}.py"), "--json", *options],
        capture_output=True,
        text=True,
        timeout=600,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, rows, done.stdout + done.stderr


@pytest.mark.ci
def test_killed_runs_end_bitwise_as_the_one_that_was_not(tmp_path: Path) -> None:
    status, trials, output = run_battery("kill", "--trials", "6", "--only", "sft,rl stale", tmp_path=tmp_path)
    assert status == 0, output
    assert len(trials) == 6
    assert sum(trial["killed"] for trial in trials) >= 4, "most kills must find the run alive"


@pytest.mark.ci
def test_damage_is_found_or_harmless(tmp_path: Path) -> None:
    status, trials, output = run_battery("corrupt", "--trials", "4", "--only", "sft", tmp_path=tmp_path)
    assert status == 0, output
    assert len(trials) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "trials"), [("kill", 45), ("corrupt", 60)])
def test_every_program(name: str, trials: int, tmp_path: Path) -> None:
    status, found, output = run_battery(name, "--trials", str(trials), tmp_path=tmp_path)
    assert status == 0, output
    assert len(found) == trials
