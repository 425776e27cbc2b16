"""Rollout workers on this machine: what a step gains, whether kills change a run, and whether it learns.

python bench/cluster.py --workers 1 2 4 8 --steps 20 --init FOLDER      steps of the demo's RL beside one process
python bench/cluster.py --kills 50 --workers 3 --steps 150 --init ...   kill -9 of random workers; weights, samples
python bench/cluster.py --learn --workers 3 --init runs/demo-sft        the demo's target, with samples 2 steps old

Needs Ray (extra `ray`). Without --init the model has the demo's shape and random weights: its completions are as long
as they get, and most groups teach nothing. Both sides take the same steps on the same samples; the update runs in the
driver, on as many threads as in one process.
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
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from sides import paired

from whet.algo.config import OffPolicyConfig
from whet.eval.measure import evaluate
from whet.generate.backends import crew
from whet.generate.backends.workers import Workers
from whet.generate.policy import Policy
from whet.ranks.ray import ClusterConfig, open_ray
from whet.recipes.models import demo_policy
from whet.recipes.rl import RECIPES
from whet.tasks.made.arithmetic import Arithmetic
from whet.telemetry.log import read_metrics
from whet.train import rl
from whet.train.rl_config import RLConfig
from whet.train.rollout.overlap import OverlapConfig

SKIPPED = 3


def make_config(folder: Path, num_steps: int, workers: int, init: str) -> RLConfig:
    """The demo's RL, from its fine-tuned model or from random weights."""
    return replace(
        RECIPES["demo"](),
        out=str(folder),
        policy=demo_policy(init),
        num_steps=num_steps,
        save_every=num_steps,
        validation_problems=0,
        max_dead_steps=1 << 20,
        preflight="warn",
        cluster=ClusterConfig(rollout_workers=workers),
    )


def speed(steps: int, workers: list[int], init: str) -> dict[str, Any]:
    """Time steps with and without workers, alternating."""
    counts = [0, *workers]
    with tempfile.TemporaryDirectory() as folder, open_ray("", cpus=sum(counts)):
        sides = {
            count: rl.steps(make_config(Path(folder) / f"w{count}", steps, count, init)) for count in counts
        }
        seconds: dict[int, list[float]] = {count: [] for count in sides}
        drawn: dict[int, list[float]] = {count: [] for count in sides}
        synced: dict[int, list[float]] = {count: [] for count in sides}
        for _ in range(steps):
            for count, side in sides.items():
                began = time.perf_counter()
                done = next(side)
                seconds[count].append(time.perf_counter() - began)
                drawn[count].append(done.metrics["rl/generate_seconds"])
                synced[count].append(done.metrics.get("rl/sync_seconds", 0.0))
        for side in sides.values():
            side.close()
    rows = []
    print(f"{'':13}{'s/step':>8}{'sampling':>10}{'sync':>8}{'x one process':>22}")
    for count in counts:
        # The first steps start processes and measure kernels.
        ours, alone = seconds[count][SKIPPED:-1], seconds[0][SKIPPED:-1]  # the last one saves
        row = {
            "workers": count,
            "step_s": statistics.median(ours),
            "sampling_s": statistics.median(drawn[count][SKIPPED:-1]),
            "sync_s": statistics.median(synced[count][SKIPPED:-1]),
            **paired(alone, ours),
        }
        rows.append(row)
        name, times = f"{count} workers" if count else "one process", f"{row['ratio']:.2f} {row['range']}"
        print(f"{name:13}{row['step_s']:>8.2f}{row['sampling_s']:>10.2f}{row['sync_s']:>8.3f}{times:>22}")
    return {"steps": steps, "rows": rows}


def samplers() -> list[psutil.Process]:
    """The processes of rollout workers below this one that are ready; Ray's titles say what each is doing."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if "RolloutWorker" in title and not title.rstrip().endswith(("__init__", "load")):
                found.append(process)
    return found


@contextmanager
def watched() -> Iterator[list[Workers]]:
    """Keep the samplers of the runs that begin meanwhile, to read their counts."""
    made: list[Workers] = []
    opened = crew.open_workers

    def open_workers(config: ClusterConfig, policy: Policy) -> Workers:
        made.append(opened(config, policy))
        return made[-1]

    crew.open_workers = open_workers
    try:
        yield made
    finally:
        crew.open_workers = opened


def samples_of(folder: str) -> Counter[tuple[Any, ...]]:
    """Every sample of a run: step, prompt, number and text."""
    lines = (Path(folder) / "samples.jsonl").read_text().splitlines()
    rows = map(json.loads, lines)
    return Counter((row["step"], row["uid"], row["index"], row["completion"]) for row in rows)


def battery(kills: int, workers: int, steps: int, init: str) -> dict[str, Any]:
    """Kill random workers of a run; compare its weights and samples with those of an undisturbed run in one process.

    Kills are spread evenly over the steps, no more than one in each, at a random moment of it: a clock would kill
    faster than a busy machine works, and a run ends, as it shall, when four workers die with the same work.
    """
    with tempfile.TemporaryDirectory() as folder:
        alone_config = make_config(Path(folder) / "alone", steps, 0, init)
        began = time.perf_counter()
        alone = rl.train(alone_config)
        pace, draw, killed = (time.perf_counter() - began) / steps, random.Random(0), 0

        def kill() -> None:
            nonlocal killed
            time.sleep(draw.uniform(0.0, pace))
            while not (found := samplers()):
                time.sleep(0.05)  # all are starting
            # Whoever ended by itself meanwhile was no kill: another one is.
            with suppress(ProcessLookupError):
                os.kill(draw.choice(found).pid, signal.SIGKILL)
                killed += 1

        began = time.perf_counter()
        config = make_config(Path(folder) / "killed", steps, workers, init)
        with watched() as made:
            run = rl.steps(config)
            for step in range(steps):
                is_chosen = step > 0 and step * kills // (steps - 1) > (step - 1) * kills // (steps - 1)
                killer = threading.Thread(target=kill, daemon=True) if is_chosen else None
                if killer is not None:
                    killer.start()
                next(run)
                if killer is not None:
                    killer.join()
            try:
                next(run)
            except StopIteration as end:
                policy: Policy = end.value
            else:
                raise AssertionError("a run of more steps than it was asked for")
        seconds = time.perf_counter() - began
        rows = read_metrics(Path(config.out))
        one, other = samples_of(alone_config.out), samples_of(config.out)
    pairs = zip(alone.model.parameters(), policy.model.parameters(), strict=True)
    is_same = all(torch.equal(one, other) for one, other in pairs)
    counted = rows[-1]["rl/prompts_consumed"] + rows[-1]["rl/prompts_dropped"]
    lost = steps * config.num_prompts - counted
    missing, extra = (one - other).total(), (other - one).total()
    print(
        f"{killed} kills in {steps} steps ({seconds:.0f} s): weights "
        f"{'equal bit by bit' if is_same else 'DIFFER'}, {lost:+.0f} prompts lost or doubled; of {one.total()} samples "
        f"{missing} missing, {extra} doubled or different; {made[0].num_lost} parts drawn again, "
        f"{made[0].num_started} workers started"
    )
    return {
        "kills": killed,
        "steps": steps,
        "equal": is_same,
        "lost": lost,
        "samples": one.total(),
        "missing": missing,
        "doubled": extra,
        "parts_again": made[0].num_lost,
        "started": made[0].num_started,
        "seconds": seconds,
        "wanted": kills,
    }


def learn(init: str, workers: int, staleness: int, out: str) -> dict[str, Any]:
    """Run the demo's whole RL with samplers that run ahead, and measure it on its test split, as `whet demo` does."""
    config = replace(
        RECIPES["demo"](),
        out=out,
        policy=demo_policy(init),
        off_policy=OffPolicyConfig(staleness=staleness),
        overlap=OverlapConfig(mode="async" if staleness else "off"),
        cluster=ClusterConfig(rollout_workers=workers),
    )
    began = time.perf_counter()
    policy = rl.train(config)
    seconds = time.perf_counter() - began
    ages = [row["rl/staleness"] for row in read_metrics(Path(out)) if "rl/staleness" in row]
    task = Arithmetic()
    problems = task.problems("test")[:512]
    score = evaluate(policy, task, problems, num_samples=16, sampling=config.sampling, seed=0).metrics[
        "pass@1"
    ]
    print(
        f"{workers} workers, staleness up to {max(ages):.0f} (median {statistics.median(ages):.0f}): pass@1 "
        f"{score.mean:.3f} on 512 held-out problems x 16 after {len(ages)} steps, {seconds:.0f} s"
    )
    return {
        "workers": workers,
        "staleness": max(ages),
        "steps": len(ages),
        "pass@1": score.mean,
        "seconds": seconds,
        "equal": score.mean >= 0.9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument(
        "--init", default="", help="the demo's fine-tuned model; random weights teach nothing"
    )
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    if given.learn:
        with tempfile.TemporaryDirectory() as folder:
            found = learn(given.init, given.workers[0], given.staleness, f"{folder}/rl")
    elif given.kills:
        found = battery(given.kills, given.workers[0], given.steps, given.init)
    else:
        found = speed(given.steps, given.workers, given.init)
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n")
    is_short = found.get("kills", 0) < found.get("wanted", 0)
    if (
        not found.get("equal", True)
        or is_short
        or any(found.get(n, 0) for n in ("lost", "missing", "doubled"))
    ):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
