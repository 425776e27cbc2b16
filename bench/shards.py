"""Time and memory of a supervised step on ranks that hold the whole model, or shares of it in every layout.

python bench/shards.py [--model b] [--ranks 2] [--repeats 7] [--compile] [--layouts NAME ...] [--json FILE]

32 sequences a step, 32 to 256 tokens long, in micro-batches of 1,024 tokens. All layouts alternate in the same
processes (gloo, one thread a rank); times are relative to whole models. Memory is the peak of two steps of rank 0 above
what its process holds after its imports, in processes of their own, in micro-batches of 256 tokens and without packed
copies of the weights (WHET_KERNELS=eager), which only CPUs have: what is left is mostly weights, gradients and state.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import sides
import torch

from whet import processes
from whet.algo.packing import TrainingSequence
from whet.generate.policy import Policy
from whet.model.config import ModelConfig
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model
from whet.ranks.fsdp import ParallelConfig
from whet.schema import ResponseSchema
from whet.train.optim.step import OptimConfig, Optimizer, prepare_model, shard_layers
from whet.train.sft import train_step

ROWS, SHORTEST, LONGEST, BUDGET = 32, 32, 256, 1024
sides.SHAPES["e"] = replace(sides.SHAPES["c"], vocab_size=8192)  # 91M, nearly all of it in layers
os.environ[sides.DEVICE_VARIABLE] = "cpu"  # its ranks exchange by gloo
FEW, SMALL = 4, 256
"""Sequences of a rank, and tokens of a micro-batch, where memory is measured."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {},
    "fsdp": {"kind": "fsdp"},
    "fsdp, prefetch 1": {"kind": "fsdp", "prefetch": 1},
    "fsdp, prefetch 2": {"kind": "fsdp", "prefetch": 2},
    "fsdp, kept between passes": {"kind": "fsdp", "reshard": False},
    "tensor": {"tensor": 2},
}


class Side:
    """A model in one layout, and its optimizer."""

    def __init__(
        self, home: Path, layout: str, rows: list[TrainingSequence], budget: int, *, compiled: bool
    ) -> None:
        self.config = OptimConfig(precision="float32", token_budget=budget, compile=compiled)
        self.policy = sides.load_whet(home, dtype=torch.float32, parallel=ParallelConfig(**LAYOUTS[layout]))
        prepare_model(self.policy.model, self.config)
        self.optimizer = Optimizer(self.policy.model, self.config)
        self.rows = rows

    def step(self) -> None:
        """Do one step."""
        loss, *_ = train_step(self.policy, self.rows, self.config)
        self.optimizer.step(1e-5, loss=loss)


def _import_all(layout: str) -> None:
    """Take a step of next to nothing, for which PyTorch imports all that it needs."""
    shape = ModelConfig(
        hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16
    )
    model = build_model(shape)
    init_weights(model, 0)
    shard_layers(model, ParallelConfig(**LAYOUTS[layout]))
    optimizer = Optimizer(model, OptimConfig(precision="float32"))
    policy = Policy(model, Tokenizer.characters("0123456789", ()), ResponseSchema())
    rows = [TrainingSequence(prompt_ids=(1,), completion_ids=(2, 3))]
    loss, *_ = train_step(policy, rows, OptimConfig(precision="float32"))
    optimizer.step(1e-5, loss=loss)


def status(key: str) -> int:
    """Return a line of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def work(
    rank: int, world: int, options: argparse.Namespace, layouts: list[str], folder: str, *, timed: bool
) -> None:
    """Be one rank; rank 0 writes what it measured."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard  # noqa: F401 (no part of what is measured)

    processes.end_with_parent()
    home = Path(folder)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        meet = f"file://{folder}/meet_{'_'.join(layouts)}_{timed}".replace(" ", "").replace(",", "")
        dist.init_process_group(
            "gloo", init_method=meet, rank=rank, world_size=world, timeout=timedelta(minutes=10)
        )
        drawn = sides.draw_prompts(ROWS, SHORTEST, LONGEST, sides.SHAPES[options.model].vocab_size)
        rows = [TrainingSequence(prompt_ids=ids[:1], completion_ids=ids[1:]) for ids in drawn[rank::world]]
        if not timed:
            _import_all(layouts[0])
        before = status("VmRSS")
        if not timed:
            sides.default_allocator()
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        size = (rows, BUDGET) if timed else (rows[:FEW], SMALL)
        made = {name: Side(home / "model", name, *size, compiled=options.compile) for name in layouts}
        found: dict[str, Any] = {name: [] for name in layouts}
        for turn in range(options.repeats + 2 if timed else 2):
            for name, side in made.items():
                dist.barrier()
                began = time.perf_counter()
                side.step()
                dist.barrier()
                if turn > 1:
                    found[name].append(time.perf_counter() - began)
        if not timed:
            found = {layouts[0]: status("VmHWM") - before}
        if rank == 0:
            (home / f"{'times' if timed else layouts[0]}.json").write_text(json.dumps(found))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def start(options: argparse.Namespace, layouts: list[str], folder: Path, *, timed: bool) -> dict[str, Any]:
    """Run ranks, and return what rank 0 measured."""
    context = multiprocessing.get_context("spawn")
    arguments = (options.ranks, options, layouts, str(folder))
    ranks = [
        context.Process(target=work, args=(number, *arguments), kwargs={"timed": timed})
        for number in range(options.ranks)
    ]
    with mock.patch.dict(os.environ, {} if timed else {"WHET_KERNELS": "eager"}), processes.started(ranks):
        pass
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")
    return json.loads((folder / f"{'times' if timed else layouts[0]}.json").read_text())


def main() -> None:
    """Print a line per layout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=list(sides.SHAPES), default="b")
    parser.add_argument("--only", choices=["time", "memory"], default="")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", action="store_true", help="compile the per-token parts of each layer")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), metavar="NAME")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = list(dict.fromkeys(["replicate", *options.layouts]))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = sides.save_shape(options.model, folder)
        if home != folder / "model":
            home.rename(folder / "model")
        times = {} if options.only == "memory" else start(options, chosen, folder, timed=True)
        for layout in chosen:
            row: dict[str, Any] = {"layout": layout}
            words = []
            if times:
                ratios = [mine / whole for mine, whole in zip(times[layout], times["replicate"], strict=True)]
                row |= {"time": statistics.median(ratios), "range": [min(ratios), max(ratios)]}
                words.append(f"{row['time']:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times a step")
            if options.only != "time":
                row["peak_bytes"] = start(options, [layout], folder, timed=False)[layout]
                words.append(f"peak {row['peak_bytes'] / 2**20:.0f} MiB")
            rows.append(row)
            print(f"{layout:28} {', '.join(words)}", flush=True)
    if options.json:
        facts = {
            "model": options.model,
            "ranks": options.ranks,
            "compile": options.compile,
            "isa": sides.isa(),
        }
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
