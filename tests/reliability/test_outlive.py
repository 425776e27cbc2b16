"""Every program that spawns, ended by SIGTERM and by SIGKILL: nothing of what it started is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_processes import is_running, left_of

ROOT = Path(__file__).resolve().parents[2]
TINY = "--num-steps 5000 --policy.num-threads 1"

PROGRAMS = {
    "ranks_equal": "bench/ranks_equal.py --ranks 2 --programs sft --layouts replicate",
    "deal": "bench/deal.py --long 4096 --ranks 2",
    "shards": "bench/shards.py --model a --only time --layouts replicate",
    "isa": "bench/isa.py --quick",
    "ablation": "bench/ablation.py --sft-recipe demo --seeds 0 --only GRPO",
    "demo_seeds": "bench/demo_seeds.py --seeds 0",
    "guard": "bench/guard.py --programs grpo_step",
    "memory": "bench/memory.py --quick",
    "serve": "bench/serve.py --streams 4",
    "ranks": "bench/reliability/ranks.py --trials 2 --only sft",
    "ranks, fresh": "bench/reliability/ranks.py --trials 2 --only sft --fresh",
    "kill": "bench/reliability/kill.py --trials 4 --only sft",
    "kill, fresh": "bench/reliability/kill.py --trials 4 --only sft --fresh",
    "fuzz": "bench/reliability/fuzz.py --trials 2000",
    "soak": "bench/reliability/soak.py --quick",
    "whet sft --restarts": f"-m whet sft demo {TINY} --restarts 2",
    "whet seeds": "-m whet seeds demo --of sft --seeds 0 1 --out seeds --num-steps 5000",
    "whet sweep": "-m whet sweep demo --of sft --mode quick",
    "whet doctor determinism": "-m whet doctor determinism",
    "whet doctor sandbox": "-m whet doctor sandbox",
}
GRACE_S = {"whet sft --restarts": 60, "whet seeds": 60, "ranks, fresh": 60, "ranks_equal": 20}
"""Runs that are asked to save and stop, and ranks that look for torchrun; the others are killed."""


def lasting(pid: int) -> set[int]:
    """Return a process's descendants if one of them has lived for a while, as no mere question has."""
    below = psutil.Process(pid).children(recursive=True)
    ages = [time.time() - child.create_time() for child in below if is_running(child.pid)]
    return {child.pid for child in below} if max(ages, default=0.0) > 1.0 else set()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "how"),
    [  # one signal of each in CI
        pytest.param(name, how, marks=[] if (how == "SIGTERM") == (name in GRACE_S) else pytest.mark.slow)
        for name in PROGRAMS
        for how in ("SIGTERM", "SIGKILL")
    ],
)
def test_nothing_is_left(name: str, how: str, tmp_path: Path) -> None:
    first, *rest = PROGRAMS[name].split()
    words = [sys.executable, first if first == "-m" else str(ROOT / first), *rest]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            words, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ) as program,
    ):
        below: set[int] = set()
        deadline = time.monotonic() + 240
        while not below and program.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            below = lasting(program.pid) if program.poll() is None else set()
        assert below, f"it ended, or started nothing: {log.read_text()[-2000:]}"
        program.send_signal(getattr(signal, how))
        deadline = time.monotonic() + GRACE_S.get(name, 20)
        while (
            program.poll() is None and time.monotonic() < deadline
        ):  # one that stops in order may start more
            below |= {child.pid for child in psutil.Process(program.pid).children(recursive=True)}
            time.sleep(0.02)
        left = left_of(below, GRACE_S.get(name, 20))
        said = {pid: psutil.Process(pid).cmdline() for pid in left if is_running(pid)}
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        program.kill()
    assert said == {}
