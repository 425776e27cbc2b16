"""Peak memory of a GRPO step of whet and of TRL, each in a process of its own.

python bench/memory.py [--quick] [--models c] [--json FILE]

One prompt of 64 tokens, 8 completions of 512 (--quick: 64), two steps; the optimizer has its state. Counted is the
peak resident memory without what the process held after its imports. TRL trains on the whole batch at once, which is
its fastest setting here, and again in its lean one: a micro-batch of one completion. whet trains on micro-batches of
1,024 tokens: its gradient does not depend on them, and the seconds of the second step show what they cost.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpo_step
import sides

TARGET = 0.4
STEPS = 2
GROUP = 8
TOKEN_BUDGET = 1024
LEAN = ", micro-batches of 1"


def resident() -> float:
    """Return this process's present memory in GiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


def run_side(side: str, model: str, new_tokens: int, folder: Path) -> dict[str, float]:
    """Do the steps of one side in this process; return its memory after the imports and at its peak, in GiB."""
    import torch
    import transformers
    import trl

    del torch, transformers, trl  # imported for their memory
    home = sides.save_shape(model, folder)
    case = grpo_step.Case(model, 1, GROUP, new_tokens, 0.0)
    (prompt,) = sides.draw_prompts(1, 64, 64, sides.SHAPES[model].vocab_size)
    texts = [" ".join(map(str, prompt[:-1]))]
    base = resident()
    if side == "whet":
        precision = "float32" if model == "a" else "bfloat16_master"
        ours = grpo_step.WhetSide(home, case, texts, precision, TOKEN_BUDGET)
        seconds = [ours.step() for _ in range(STEPS)][-1]
    else:
        ends: list[float] = []
        kind, parts = side.removesuffix(LEAN), GROUP if side.endswith(LEAN) else 1
        trainer = grpo_step.trl_trainer(
            home,
            case,
            texts,
            kind=kind,
            after=lambda: ends.append(time.perf_counter()),
            steps=STEPS,
            parts=parts,
        )
        trainer.train()
        seconds = ends[-1] - ends[-2]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"base": base, "peak": peak, "seconds": seconds}


def run_model(model: str, new_tokens: int, extra: list[str]) -> dict[str, Any]:
    """Run every side in a process of its own."""
    kinds = ["float32"] if model == "a" else ["bfloat16 model", "bfloat16 autocast"]
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        sides.save_shape(model, Path(folder))
        for side in ("whet", *kinds, kinds[0] + LEAN):
            command = [
                sys.executable,
                __file__,
                "--side",
                side,
                "--models",
                model,
                "--folder",
                folder,
                *extra,
            ]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            line = next(line for line in output.splitlines() if line.startswith("RESULT "))
            results[side] = json.loads(line[7:])
    best = min(kinds, key=lambda kind: results[kind]["peak"])

    def above(side: str) -> float:
        return results[side]["peak"] - results[side]["base"]

    return {
        "model": model,
        "new_tokens": new_tokens,
        "peer": f"TRL, {best}",
        "ratio": above("whet") / above(best),
        "ratio_lean": above("whet") / above(kinds[0] + LEAN),
        "ratio_with_imports": results["whet"]["peak"] / results[best]["peak"],
        "target": TARGET,
        "gib": {side: round(above(side), 2) for side in results},
        "speed": {side: round(r["seconds"] / results["whet"]["seconds"], 2) for side, r in results.items()},
    }


def main() -> None:
    """Print a line per model."""
    parser = sides.parser(__doc__)
    parser.add_argument("--side", help="run one side in this process and print its memory")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    sides.start(arguments)
    new_tokens = 64 if arguments.quick else 512
    if arguments.side:
        print("RESULT", json.dumps(run_side(arguments.side, arguments.models, new_tokens, arguments.folder)))
        return
    extra = ["--quick"] if arguments.quick else []
    extra += ["--threads", str(arguments.threads)] if arguments.threads else []
    rows = []
    for model in arguments.models or ("a" if arguments.quick else "c"):
        row = run_model(model, new_tokens, extra)
        rows.append(row)
        print(
            f"memory {model}, {GROUP}x{new_tokens}: {row['ratio']:.2f} of {row['peer']} (target {TARGET}), "
            f"{row['ratio_lean']:.2f} of it with micro-batches of 1, with the imports "
            f"{row['ratio_with_imports']:.2f}; GiB {row['gib']}; seconds of a step over whet's {row['speed']}",
            flush=True,
        )
    sides.finish(arguments, rows)


if __name__ == "__main__":
    main()
