"""The short form of bench/reliability/soak.py: what grows or stays behind is found, in stand-ins that leak."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "bench/reliability/soak.py"
NUM_STEPS = 200
STAND_IN = """
import json, os, pathlib, subprocess, sys, tempfile, threading, time
folder, kept = pathlib.Path(sys.argv[1]), []
(folder / "checkpoints").mkdir(parents=True)
def leak(step):
    {leak}
for step in range(1, {steps} + 1):
    leak(step)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({{"step": step, "rl/updates": 1.0}}) + "\\n")
    time.sleep(0.005)  # so slow that a busy machine reads it often enough
"""


@pytest.fixture(scope="module")
def soak() -> Any:
    spec = importlib.util.spec_from_file_location("soak", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    module.GRACE_S = 0.3
    return module


def failures(soak: Any, work: Path, leak: str) -> str:
    """Watch the stand-in that leaks in one way; return what was found, as one text."""
    script = work / "stand_in.py"
    script.write_text(STAND_IN.format(leak=leak, steps=NUM_STEPS))
    command = [sys.executable, str(script), str(work / "run")]
    status, readings, left = soak.watched(command, work / "run", work, 0.01)
    assert status == 0, (work / "log").read_text()
    _, grown = soak.growth(readings, NUM_STEPS, 25.0)
    return "; ".join([*grown, *left])


LEAKS = {
    "memory_mb grows": "kept.append(bytearray(100_000))",
    "threads grow": "step % 10 or threading.Thread(target=time.sleep, args=(2,), daemon=True).start()",
    "files grow": "kept.append(open(os.devnull))",
    "processes grow": "step % 40 or kept.append(subprocess.Popen(['sleep', '9'], start_new_session=True))",
    "run_files grow": "(folder / f'{step}.txt').touch()",
    "temporary file": "step == 50 and kept.append(tempfile.mkstemp())",
    ".tmp-step_1 is left": "(folder / 'checkpoints' / '.tmp-step_1').mkdir(exist_ok=True)",
    "lives on": "step == 199 and subprocess.Popen(['sleep', '60'], start_new_session=True)",
}


def test_what_keeps_still_passes(soak: Any, tmp_path: Path) -> None:
    assert failures(soak, tmp_path, "kept[:] = [bytearray(100_000)]") == ""


@pytest.mark.ci
@pytest.mark.parametrize("finding", LEAKS)
def test_a_leak_is_found(soak: Any, tmp_path: Path, finding: str) -> None:
    assert finding in failures(soak, tmp_path, LEAKS[finding])


def readings_of(soak: Any, memory: Any) -> list[Any]:
    still = {"children_mb": 0.0, "threads": 1, "files": 3, "processes": 0, "run_files": 5}
    return [soak.Reading(step=step, memory_mb=memory(step), **still) for step in range(0, 5000, 10)]


def test_slopes_are_those_of_the_second_half(soak: Any) -> None:
    slopes, found = soak.growth(readings_of(soak, lambda step: 300 + min(step, 2500) * 0.1), 5000, 1.0)
    assert slopes["memory_mb least squares"] == pytest.approx(0.0, abs=1e-9)
    assert found == []
    slopes, found = soak.growth(readings_of(soak, lambda step: 300 + step * 0.002), 5000, 1.0)
    assert slopes["memory_mb least squares"] == pytest.approx(2.0)
    assert slopes["memory_mb median slope"] == pytest.approx(2.0)
    assert len(found) == 1


def test_a_run_too_short_is_a_failure(soak: Any) -> None:
    assert soak.growth(readings_of(soak, float)[:300], 5000, 1.0)[1]


@pytest.mark.slow
def test_the_demo_keeps_still(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--quick", "--work", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
