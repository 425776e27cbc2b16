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


KILL = ("kill", "--trials", "6", "--only", "sft,rl stale")
CORRUPT = ("corrupt", "--trials", "18", "--only", "sft")
POWER = ("power", "--trials", "9", "--only", "sft")
TROUBLE = ("trouble", "--quick", "--only", "inputs,folder")
"""The batteries as CI runs them."""


@pytest.mark.ci
def test_killed_runs_end_bitwise_as_the_one_that_was_not(tmp_path: Path) -> None:
    status, trials, output = run_battery(*KILL, tmp_path=tmp_path)
    assert status == 0, output
    assert len(trials) == 6
    assert sum(trial["killed"] for trial in trials) >= 4, "most kills must find the run alive"


@pytest.mark.ci
def test_damage_is_found_or_harmless(tmp_path: Path) -> None:
    status, trials, output = run_battery(*CORRUPT, tmp_path=tmp_path)
    assert status == 0, output
    assert len(trials) == 18
    assert len({(trial["name"], trial["damage"]) for trial in trials}) > 9


@pytest.mark.slow
def test_every_damage_of_every_file_is_found_or_harmless(tmp_path: Path) -> None:
    status, trials, output = run_battery(
        "corrupt", "--trials", "4", "--only", "sft", "--matrix", tmp_path=tmp_path
    )
    assert status == 0, output
    matrix = {(trial["name"], trial["damage"]) for trial in trials if trial["place"] == "newest"}
    files = {name for name, _ in matrix}
    assert len(files) >= 9
    assert {"model.safetensors", "optimizer.safetensors", "manifest.json"} <= {Path(f).name for f in files}
    assert len(matrix) >= 5 * len(files) - 1
    assert "two at once" in {trial["place"] for trial in trials}


@pytest.mark.ci
def test_what_was_saved_survives_a_power_cut(tmp_path: Path) -> None:
    status, trials, output = run_battery(*POWER, tmp_path=tmp_path)
    assert status == 0, output
    assert len(trials) == 9
    assert sum(trial["saved"] > 0 for trial in trials) >= 4, "most cuts must come after a saved step"
    assert {trial["disk"] for trial in trials} == {"worst", "names", "mixed"}


@pytest.mark.slow
def test_trouble_from_outside_is_one_line(tmp_path: Path) -> None:
    status, trials, output = run_battery(*TROUBLE, tmp_path=tmp_path)
    assert status == 0, output
    assert [trial["outcome"] for trial in trials] == ["refused"] * 11


PLANTED = [
    ("optimizer", KILL),
    ("log rows", KILL),
    ("lock", CORRUPT),
    ("hashes", CORRUPT),
    ("fsync", POWER),
    ("inputs", TROUBLE),
    ("displaced", TROUBLE),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "battery"), PLANTED)
def test_a_planted_fault_is_found(fault: str, battery: tuple[str, ...], tmp_path: Path) -> None:
    """By the size that CI runs: a battery that finds nothing in a broken program proves nothing."""
    status, trials, output = run_battery(*battery, "--plant", fault, tmp_path=tmp_path)
    assert status == 1, output
    assert sum(bool(trial.get("failures") or trial.get("failure")) for trial in trials) >= 1
    assert "AssertionError" not in output


@pytest.mark.slow
@pytest.mark.parametrize(("name", "trials"), [("kill", 90), ("corrupt", 60), ("power", 50)])
def test_every_program(name: str, trials: int, tmp_path: Path) -> None:
    status, found, output = run_battery(name, "--trials", str(trials), tmp_path=tmp_path)
    assert status == 0, output
    assert len(found) == trials


@pytest.mark.slow
def test_every_trouble(tmp_path: Path) -> None:
    status, found, output = run_battery("trouble", tmp_path=tmp_path)
    assert status == 0, output
    assert len(found) >= 85
