"""Print the invariance matrix of whet, and TRL's beside it; exit status 1 when a cell of whet is above its tolerance.

python bench/invariance.py [--quick] [--rows NAME ...] [--no-peers] [--json FILE]

A cell is the largest relative difference of loss, gradients and weights after the step from the same step on one rank
in one micro-batch; 'packing' is the difference from an independent definition on padded rows, and 'metrics' the
largest difference of any metric in any of these. The tests (tests/train/test_invariance.py) assert the same cells.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "train"), str(TESTS / "parity")]

import matrix  # noqa: E402
import scene  # noqa: E402

Row = dict[str, float | None]

TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "gspo": {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "luspo": {
        "importance_sampling_level": "sequence",
        "loss_type": "luspo",
        "epsilon": 2e-3,
        "epsilon_high": 2.5e-3,
    },
    "grpo, kl": {"loss_type": "grpo", "beta": 0.1},
    "dapo, entropy bonus": {"loss_type": "dapo", "entropy_coef": 0.05},
    "dapo, entropy top 20 %": {"loss_type": "dapo", "top_entropy_quantile": 0.2},
}
"""Settings of GRPOConfig for each row of TRL's table."""

TRL_CUTS = (2, 4)


def whet_rows(names: list[str]) -> dict[str, dict[str, Row]]:
    """Compute whet's matrix; return rows by dtype and case."""
    table: dict[str, dict[str, Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = matrix.Ranks(Path(folder), names, names)
        try:
            for dtype in matrix.TOLERANCE:
                rows = table[str(dtype).removeprefix("torch.")] = {}
                for name in names:
                    row: Row = {column: number for column, (number, _) in matrix.cells(name, dtype).items()}
                    tensors, metrics = matrix.rank_cells(name, dtype, ranks.outcomes(name, dtype))
                    row |= {"ranks": tensors[0], "metrics": max(row["metrics"] or 0.0, metrics[0])}
                    rows[name] = row
        finally:
            ranks.stop()
    return table


def trl_rows(names: list[str]) -> dict[str, Row]:
    """Run TRL's loss in float32 on one process: 16 rows cut into 1, 2 and 4 micro-batches, and shuffled."""
    import trl_peer as peer

    logging.disable(logging.WARNING)
    model, frozen = peer.tiny_model(), peer.tiny_model()
    peer.nudge(model, 7)
    samples = [s for group in scene.make_groups() for s in group.samples][:16]
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(len(samples), generator=generator).tolist()
    rows: dict[str, Row] = {}
    for name in names:
        settings = dict(TRL_SETTINGS[name])
        beta = settings.pop("beta", 0.0)
        trainer = peer.make_trainer(model, len(samples), scene.GROUP_SIZE, scene.MAX_LENGTH, **settings)
        trainer.beta = beta
        inputs = peer.padded_inputs(samples, advantages)
        peer.with_sampler(trainer, inputs, seed=1)
        if beta:
            peer.with_reference(trainer, inputs, frozen)
        whole = peer.loss_and_gradients(trainer, inputs)
        parts = [peer.loss_and_gradients(trainer, inputs, cut) for cut in TRL_CUTS]
        order = torch.randperm(len(samples), generator=generator)
        mixed = {key: tensor if tensor.dim() == 0 else tensor[order] for key, tensor in inputs.items()}
        other = peer.loss_and_gradients(trainer, mixed)
        rows[name] = {
            "micro-batches": max(tensor_difference(part, whole) for part in parts),
            "packing": None,
            "order": tensor_difference(other, whole),
            "ranks": None,
            "metrics": max(metric_difference(part[2], whole[2]) for part in [*parts, other]),
        }
    return rows


def tensor_difference(got: tuple, expected: tuple) -> float:
    """Compare losses and gradients as whet's matrix does."""
    pairs = [(got[1][name], gradient) for name, gradient in expected[1].items()]
    largest = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)
    return max(largest, abs(got[0] - expected[0]) / max(abs(expected[0]), 0.01))


def metric_difference(got: dict[str, float], expected: dict[str, float]) -> float:
    """Compare token means as whet's matrix does, and leave out what is the mean of minima, maxima or shares."""
    means = [name for name in expected if name in ("entropy", "kl") or "clip_ratio" in name]
    means = [name for name in means if not name.endswith(("min", "max"))]
    return max(abs(got[name] - expected[name]) / max(abs(expected[name]), 0.01) for name in means)


def print_table(title: str, rows: dict[str, Row]) -> None:
    """Print rows as a Markdown table."""
    print(f"\n{title}\n\n| algorithm | " + " | ".join(matrix.COLUMNS) + " |")
    print("|---|" + "--:|" * len(matrix.COLUMNS))
    for name, row in rows.items():
        cells = ["-" if row[column] is None else f"{row[column]:.0e}" for column in matrix.COLUMNS]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the named algorithms only, without variants")
    parser.add_argument("--rows", nargs="+", choices=list(scene.CASES), help="these rows alone")
    parser.add_argument("--no-peers", action="store_true", help="whet alone")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    names = [name for name in scene.CASES if not options.quick or name in scene.ALGORITHMS]
    names = options.rows or names
    table = whet_rows(names)
    for dtype, rows in table.items():
        print_table(f"whet, {dtype}, tolerance {tolerance(dtype):.0e}", rows)
    peers: dict[str, Row] = {}
    if not options.no_peers:
        if importlib.util.find_spec("trl") is None:
            print("\nTRL is not installed (pip install 'whet-rl[peers]'): its table is left out.")
        else:
            peers = trl_rows(list(TRL_SETTINGS)[:8] if options.quick else list(TRL_SETTINGS))
            print_table("TRL's GRPOTrainer, float32, one process", peers)
            print(
                "\n-: GRPOTrainer trains on padded rows only, and several ranks would need a launcher around it."
            )
            print("verl's trainer needs ray and GPUs; tests/parity/test_verl.py compares its loss functions.")
    missed = [
        f"{dtype}, {name}, {column}: {number:.1e}"
        for dtype, rows in table.items()
        for name, row in rows.items()
        for column, number in row.items()
        if number is None or not number <= tolerance(dtype)
    ]
    print(f"\n{len(names)} rows in {time.perf_counter() - began:.0f} s; above tolerance: {len(missed)}")
    for line in missed:
        print(f"- MISSED {line}")
    if options.json:
        options.json.write_text(json.dumps({"whet": table, "trl": peers, "missed": missed}, indent=1))
    return 1 if missed else 0


def tolerance(dtype: str) -> float:
    """Return the largest relative difference that rounding may make."""
    return matrix.TOLERANCE[getattr(torch, dtype)]


if __name__ == "__main__":
    sys.exit(main())
