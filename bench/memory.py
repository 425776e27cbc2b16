"""Peak memory of a GRPO step of whet and of TRL, each in a process of its own.

python bench/memory.py [--quick] [--models c] [--json FILE]

One prompt of 64 tokens, 8 completions of 512 (--quick: 64), two steps; the optimizer has its state. Counted is the
peak resident memory, and without what the process held after its imports.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpo_step
import sides

TARGET = 0.4
STEPS = 2


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
    case = grpo_step.Case(model, 1, 8, new_tokens, 0.0)
    (prompt,) = sides.draw_prompts(1, 64, 64, sides.SHAPES[model].vocab_size)
    texts = [" ".join(map(str, prompt[:-1]))]
    base = resident()
    if side == "whet":
        ours = grpo_step.WhetSide(home, case, texts, "float32" if model == "a" else "bfloat16_master")
        for _ in range(STEPS):
            ours.step()
    else:
        trainer = grpo_step.trl_trainer(home, case, texts, kind=side, after=lambda: None, steps=STEPS)
        trainer.train()
    return {"base": base, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


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
    rows = []
    for model in arguments.models or ("a" if arguments.quick else "c"):
        kinds = ["float32"] if model == "a" else ["bfloat16 model", "bfloat16 autocast"]
        results: dict[str, dict[str, Any]] = {}
        with tempfile.TemporaryDirectory() as folder:
            sides.save_shape(model, Path(folder))
            for side in ("whet", *kinds):
                command = [sys.executable, __file__, "--side", side, "--models", model, "--folder", folder]
                command += ["--quick"] if arguments.quick else []
                command += ["--threads", str(arguments.threads)] if arguments.threads else []
                output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                line = next(line for line in output.splitlines() if line.startswith("RESULT "))
                results[side] = json.loads(line[7:])
        best = min(kinds, key=lambda kind: results[kind]["peak"])
        mine, theirs = results["whet"], results[best]
        row = {
            "model": model,
            "peer": f"TRL, {best}",
            "ratio": (mine["peak"] - mine["base"]) / (theirs["peak"] - theirs["base"]),
            "ratio_with_imports": mine["peak"] / theirs["peak"],
            "target": TARGET,
            "gib": {side: round(r["peak"] - r["base"], 2) for side, r in results.items()},
        }
        rows.append(row)
        print(
            f"memory {model}, 8x{new_tokens}: {row['ratio']:.2f} of {row['peer']} (target {TARGET}), with the imports "
            f"{row['ratio_with_imports']:.2f}; GiB {row['gib']}",
            flush=True,
        )
    sides.finish(arguments, rows)


if __name__ == "__main__":
    main()
