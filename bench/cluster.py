"""Rollout workers on this machine: what a step gains, and whether kills change a run.

python bench/cluster.py [--steps 20] [--workers 2] [--json FILE]     the demo's RL steps, alternating with one process
python bench/cluster.py --kills 50                                   kill -9 of random workers; weights, prompts

Needs Ray (extra `ray`). The model has the demo's shape and random weights, so its completions are as long as they get.
Both sides take the same steps on the same samples; the update runs in the driver, on as many threads as in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from whet.ranks.ray import ClusterConfig
from whet.recipes.models import demo_policy
from whet.recipes.rl import RECIPES
from whet.train import rl
from whet.train.rl_config import RLConfig


def make_config(folder: Path, num_steps: int, workers: int) -> RLConfig:
    """The demo's RL from random weights."""
    return replace(
        RECIPES["demo"](),
        out=str(folder),
        policy=demo_policy(),
        num_steps=num_steps,
        save_every=num_steps,
        validation_problems=0,
        max_dead_steps=1 << 20,
        preflight="warn",
        cluster=ClusterConfig(rollout_workers=workers),
    )


def speed(steps: int, workers: int) -> dict[str, Any]:
    """Time steps with and without workers, alternating."""
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            count: rl.steps(make_config(Path(folder) / f"w{count}", steps, count)) for count in (0, workers)
        }
        seconds: dict[int, list[float]] = {count: [] for count in sides}
        tokens: dict[int, list[float]] = {count: [] for count in sides}
        for _ in range(steps):
            for count, side in sides.items():
                began = time.perf_counter()
                done = next(side)
                seconds[count].append(time.perf_counter() - began)
                tokens[count].append(done.metrics["rl/generate_seconds"])
        for side in sides.values():
            side.close()
    # The first steps start processes and measure kernels.
    step = {count: statistics.median(values[3:]) for count, values in seconds.items()}
    drawn = {count: statistics.median(values[3:]) for count, values in tokens.items()}
    for count in sides:
        name = f"{count} workers" if count else "one process"
        print(f"{name:12} {step[count]:.3f} s a step, {drawn[count]:.3f} s of it sampling")
    ratio = step[0] / step[workers]
    gain = drawn[0] / drawn[workers]
    print(f"{workers} workers against one process: {ratio:.2f}x as fast a step, {gain:.2f}x the sampling")
    return {"steps": steps, "workers": workers, "step_s": step, "sampling_s": drawn, "ratio": ratio}


def battery(kills: int, workers: int) -> dict[str, Any]:
    """Kill random workers of a run, and compare its weights with those of an undisturbed run in one process."""
    with tempfile.TemporaryDirectory() as folder:
        steps = max(8, 2 * kills)
        alone = rl.train(make_config(Path(folder) / "alone", steps, 0))
        is_over, killed, draw = threading.Event(), [0], random.Random(0)

        def kill() -> None:
            while killed[0] < kills and not is_over.wait(draw.uniform(0.5, 3.0)):
                found = [
                    process
                    for process in psutil.Process().children(recursive=True)
                    if "RolloutWorker" in " ".join(process.cmdline())
                ]
                if found:
                    with suppress(ProcessLookupError):
                        os.kill(draw.choice(found).pid, signal.SIGKILL)
                        killed[0] += 1

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        began = time.perf_counter()
        config = make_config(Path(folder) / "killed", steps, workers)
        policy = rl.train(config)
        is_over.set()
        thread.join()
        rows = [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]
    pairs = zip(alone.model.parameters(), policy.model.parameters(), strict=True)
    is_same = all(torch.equal(one, other) for one, other in pairs)
    counted = rows[-1]["rl/prompts_consumed"] + rows[-1]["rl/prompts_dropped"]
    lost = steps * config.num_prompts - counted
    print(
        f"{killed[0]} kills in {steps} steps ({time.perf_counter() - began:.0f} s): weights "
        f"{'equal bit by bit' if is_same else 'DIFFER'}, {lost:+.0f} prompts lost or doubled"
    )
    return {"kills": killed[0], "steps": steps, "equal": is_same, "lost": lost}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    found = battery(given.kills, given.workers) if given.kills else speed(given.steps, given.workers)
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n")
    if not found.get("equal", True) or found.get("lost", 0):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
