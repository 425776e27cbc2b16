"""Share of the machine's matmul peak that whet's training passes reach (MFU), on packed sequences.

python bench/mfu.py [--quick] [--models bc] [--repeats 5] [--json FILE]

FLOPs are those of the forward pass times three: products of the layers, attention over what is seen, and the head at
trained rows. The peak is measured before and after each case in the same run, and the larger counts. The optimizer's
time is part of the step.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import sides
import torch

from whet.algo.packing import TrainingSequence
from whet.train.optim.step import OptimConfig, Optimizer, Precision, parameter_dtype
from whet.train.sft import train_step

LENGTH, TOKENS, TOKENS_GPU = 256, 4096, 16384
TARGET = {"float32": 0.60, "bfloat16_master": 0.45}


def step_flops(model: str, sequences: list[TrainingSequence]) -> float:
    """Return the FLOPs of a step on whole sequences."""
    shape = sides.SHAPES[model]
    tokens = sum(s.num_tokens for s in sequences)
    trained = sum(s.num_trained for s in sequences)
    seen = sum(s.num_tokens * (s.num_tokens + 1) / 2 for s in sequences)
    attended = 4 * shape.num_layers * shape.num_heads * shape.head_dim * seen
    forward = (
        2 * sides.linear_weights(shape) * tokens
        + 2 * shape.vocab_size * shape.hidden_size * trained
        + attended
    )
    return 3 * forward


def run_case(model: str, precision: Precision, folder: Path, repeats: int, tokens: int) -> dict[str, Any]:
    """Time steps of one model in one precision."""
    home = sides.save_shape(model, folder)
    policy = sides.load_whet(home, dtype=parameter_dtype(precision))
    config = OptimConfig(precision=precision)
    optimizer = Optimizer(policy.model, config)
    rows = sides.draw_prompts(tokens // LENGTH, LENGTH, LENGTH, sides.SHAPES[model].vocab_size)
    sequences = [TrainingSequence(prompt_ids=ids[:1], completion_ids=ids[1:]) for ids in rows]
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    peaks, seconds = [sides.matmul_peak(dtype)], []
    for number in range(repeats + 1):
        began = sides.now()
        train_step(policy, sequences, config)
        optimizer.step(1e-5)
        if number:
            seconds.append(sides.now() - began)
        peaks.append(sides.matmul_peak(dtype, seconds=0.3))
    flops, peak = step_flops(model, sequences), max(peaks)
    return {
        "model": model,
        "precision": precision,
        "mfu": flops / statistics.median(seconds) / peak,
        "target": TARGET[precision],
        "peak_flops": peak,
        "tokens": tokens,
    }


def main() -> None:
    """Print a line per model and precision."""
    arguments = sides.parser(__doc__).parse_args()
    sides.start(arguments)
    rows = []
    tokens = TOKENS_GPU if sides.on_gpu() else TOKENS
    with sides.weights_folder(arguments) as folder:
        for model in arguments.models or ("b" if arguments.quick else "bc"):
            for precision in ("float32", "bfloat16_master"):
                repeats = arguments.repeats or (2 if arguments.quick else 5)
                row = run_case(model, precision, folder, repeats, tokens // (4 if arguments.quick else 1))
                sides.forget()
                rows.append(row)
                print(
                    f"MFU {model}, {precision}: {row['mfu']:.0%} of the matmul peak of the same run (target "
                    f"{row['target']:.0%}), {row['tokens']} packed tokens a step, median of {repeats} steps",
                    flush=True,
                )
    sides.finish(arguments, rows)


if __name__ == "__main__":
    main()
