"""Speed of the C++ kernels beside PyTorch's own operations, for every instruction set that this machine can run.

python bench/isa.py [--quick] [--models abc] [--targets x86-64-v3 ...] [--threads 2] [--json FILE]

Each target is built and measured in a process of its own (WHET_KERNELS_ARCH), both sides in turn, by the best time of
each, in float32, geometric means over the models: product (rows of training), attention (forward and backward), decode
(8 rows, the whole step) and train (a supervised step with its update, on the kernels that would be used). `used` says
whether whet would run on the target's kernels here at all: it takes no operation that is slower than PyTorch's. Exit
status 1 where one is below 1 and would be used; such a target is measured up to three times, and the best counts: a
neighbour on the machine can only slow down.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import sides
import torch

from whet import processes
from whet.algo.packing import TrainingSequence
from whet.generate import kernel_speed
from whet.kernels import dispatch
from whet.kernels.cpu import build
from whet.kernels.dispatch import Choice
from whet.train.optim.step import OptimConfig, Optimizer
from whet.train.sft import train_step

NAMES = ("product", "attention", "decode", "train")
TRIES = 3
BUDGET_S = {True: 0.6, False: 3.0}
ROWS, SHORTEST, LONGEST = 16, 32, 192


def mean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def train_ratio(model: str, folder: Path, repeats: int, ours: Choice) -> float:
    """Return the speed of a supervised step with some kernels over that of the same step in PyTorch's operations."""
    home = sides.save_shape(model, folder)
    ids = sides.draw_prompts(ROWS, SHORTEST, LONGEST, sides.SHAPES[model].vocab_size)
    rows = [TrainingSequence(prompt_ids=row[:1], completion_ids=row[1:]) for row in ids]
    config = OptimConfig(precision="float32")
    steps = {}
    for name, used in (("ours", ours), ("theirs", kernel_speed.NONE)):
        policy = sides.load_whet(home, dtype=torch.float32)
        optimizer = Optimizer(policy.model, config)

        def step(policy=policy, optimizer=optimizer, used=used) -> None:
            with dispatch.taken(used):
                loss, *_ = train_step(policy, rows, config)
                optimizer.step(1e-5, loss=loss)

        steps[name] = step
    times = sides.alternate(steps, repeats)
    return min(times["theirs"].seconds) / min(times["ours"].seconds)


def measure(models: str, quick: bool) -> dict[str, object]:
    """Measure the target that this process was started for."""
    shapes = {model: kernel_speed.small(sides.SHAPES[model]) for model in models}
    rows = {
        model: kernel_speed.measure(shape, torch.float32, budget_s=BUDGET_S[quick])
        for model, shape in shapes.items()
    }
    ratios = {name: round(mean(row[name] for row in rows.values()), 3) for name in dispatch.OPERATIONS}
    used = Choice.of(ratios).used
    with tempfile.TemporaryDirectory() as folder:  # with what would be used; with all where that is nothing
        repeats, tried = 3 if quick else 7, Choice(used) if used else Choice()
        trained = {model: round(train_ratio(model, Path(folder), repeats, tried), 3) for model in models}
    models_rows = {model: {**row, "train": trained[model]} for model, row in rows.items()}
    train = round(mean(trained.values()), 3)
    return {**ratios, "train": train, "used": bool(used), "operations": sorted(used), "models": models_rows}


def slow(row: Mapping[str, object]) -> list[str]:
    """Return what of a target would be used although it is slower than PyTorch."""
    used = {*row["operations"], *(("train",) if row["used"] else ())}
    return [name for name in NAMES if name in used and row[name] < 1]


def run_target(target: str, arguments) -> dict:
    """Measure a target in a process of its own."""
    words = [sys.executable, __file__, "--child", "--models", arguments.models]
    words += ["--quick"] if arguments.quick else []
    words += ["--threads", str(arguments.threads)] if arguments.threads else []
    environment = os.environ | {build.VARIABLE: target, "WHET_KERNELS": "cpp"}
    done = processes.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"isa: {target}: its process ended with status {done.returncode}")
    return json.loads(lines[0][7:])


def main() -> int:
    """Print a line per target; return the exit status."""
    parser = sides.parser(__doc__, devices=("cpu",))
    parser.add_argument("--targets", nargs="*", default=build.runnable(), help="default: all that can run")
    parser.add_argument("--child", action="store_true", help="measure this process's own target")
    arguments = parser.parse_args()
    arguments.models = arguments.models or ("ab" if arguments.quick else "abc")
    sides.start(arguments)
    if arguments.child:
        if build.library() is None:
            sys.exit(f"isa: {build.reason()}")
        print("RESULT", json.dumps(measure(arguments.models, arguments.quick)))
        return 0
    if not arguments.targets:
        sys.exit(f"isa: no target can run on this machine; known are {', '.join(build.TARGETS)}")
    targets: dict[str, dict] = {}
    for target in arguments.targets:
        row = run_target(target, arguments)
        for _ in range(TRIES - 1):
            if slow(row):
                again = run_target(target, arguments)
                row = again | {name: max(row[name], again[name]) for name in NAMES}
        targets[target] = row
        numbers = ", ".join(f"{name} {row[name]:.2f}" for name in NAMES)
        used = ", ".join(row["operations"]) if row["used"] else "nothing: PyTorch is faster"
        print(f"isa: {target}: {numbers} times PyTorch; used: {used}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"targets": targets}, indent=1) + "\n")
    bad = {target: slow(row) for target, row in targets.items() if slow(row)}
    for target, names in bad.items():
        print(f"isa: {target}: slower than PyTorch and used all the same: {', '.join(names)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
