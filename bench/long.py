"""Measure what long sequences cost on several ranks: how evenly they are dealt, and what sharing a pass spares.

python bench/long.py deal [--ranks 8] [--batches 50]
python bench/long.py share [--ranks 2] [--tokens 4096] [--repeats 5]

`deal` draws batches of skewed lengths, deals them as whet does (every W-th, then by FLOPs) and packs each rank's share.
The load is the busiest rank's FLOPs over the mean; the pace is what ranks reach that wait for each other after every
micro-batch, as those that share a model's weights do: the sum over micro-batches of the dearest one, over the mean.

`share` runs a training pass over one long sequence in one process, and shared by gloo ranks (`parallel.context`,
`parallel.tensor`), in turns: seconds, and the growth of a rank's peak memory.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from whet.algo.packing import Spread, TrainingSequence, pack, split_by_budget, split_evenly
from whet.generate.scoring import score_micro_batch
from whet.model.config import ModelConfig, sequence_flops
from whet.model.transformer import init_weights
from whet.model.weights import build_model
from whet.ranks.collectives import balanced
from whet.ranks.fsdp import ParallelConfig
from whet.train.optim.step import forward_backward, shard_layers
from whet.types import MicroBatch

QWEN = ModelConfig(  # the shape of Qwen2.5-0.5B
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    max_positions=32768,
)
SMALL = ModelConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=704,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    max_positions=1 << 17,
)
BUDGET = 16384
MEDIAN, SPREAD = 800.0, 1.2
"""Lengths are log-normal, cut at the budget: the median and the standard deviation of the logarithm."""


def deal(ranks: int, batches: int) -> None:
    """Print how evenly skewed batches are dealt."""
    generator = torch.Generator().manual_seed(0)
    print(f"{ranks} ranks, {batches} batches, median {MEDIAN:g} tokens, micro-batches of {BUDGET} tokens")
    for size in (4 * ranks, 16 * ranks, 64 * ranks):
        found: dict[str, list[list[float]]] = {"every W-th": [], "by FLOPs": [], "by FLOPs, alike packs": []}
        for _ in range(batches):
            drawn = torch.randn(size, generator=generator, dtype=torch.float64)
            lengths = [min(BUDGET, max(16, int(x))) for x in (MEDIAN * (SPREAD * drawn).exp()).tolist()]
            costs = [sequence_flops(QWEN, length) for length in lengths]
            plain = [index % ranks for index in range(size)]
            dealt = balanced(costs, plain, ranks)
            found["every W-th"].append(_evenness(lengths, costs, plain, ranks))
            found["by FLOPs"].append(_evenness(lengths, costs, dealt, ranks))
            found["by FLOPs, alike packs"].append(_evenness(lengths, costs, dealt, ranks, are_alike=True))
        for name, rows in found.items():
            load, pace, unequal = zip(*rows, strict=True)
            print(
                f"{size:5} sequences, {name:21}: load {statistics.median(load):.3f} (worst {max(load):.3f}), pace "
                f"{statistics.median(pace):.3f} (worst {max(pace):.3f}), unequal numbers of micro-batches in "
                f"{sum(unequal) / batches:.0%}"
            )


def _evenness(
    lengths: Sequence[int],
    costs: Sequence[float],
    owners: Sequence[int],
    ranks: int,
    *,
    are_alike: bool = False,
) -> list[float]:
    shares = [[index for index, owner in enumerate(owners) if owner == place] for place in range(ranks)]
    profiles = []
    for mine in shares:
        parts = split_by_budget([lengths[i] for i in mine], BUDGET)
        profiles.append(sorted((sum(costs[mine[index]] for index in part) for part in parts), reverse=True))
    most = [max(column) for column in itertools.zip_longest(*profiles, fillvalue=0.0)]
    bins = []
    for mine in shares:
        own, dear = [lengths[i] for i in mine], [costs[i] for i in mine]
        if are_alike:
            spread = Spread(cost=float, agree=lambda _: list(most))
            parts = split_evenly(own, dear, BUDGET, spread)
        else:
            parts = split_by_budget(own, BUDGET)
        bins.append([sum(dear[index] for index in part) for part in parts])
    mean, longest = sum(costs) / ranks, max(map(len, bins))
    pace = sum(max(own[place] if place < len(own) else 0.0 for own in bins) for place in range(longest))
    return [max(map(sum, bins)) / mean, pace / mean, float(len(set(map(len, bins))) > 1)]


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def _pass(tokens: int, layout: ParallelConfig, rank: int) -> tuple[float, float, float]:
    """Return seconds, MiB by which the peak grew, and the difference to a pass alone, of rank 0's sequence."""
    model = build_model(SMALL)
    init_weights(model, 0)
    shard_layers(model, layout)
    ids = torch.randint(0, SMALL.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    sequence = TrainingSequence(prompt_ids=tuple(ids[:1]), completion_ids=tuple(ids[1:]))
    cut = pack([sequence] if rank == 0 else [], token_budget=tokens).micro_batches

    def score(micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        return -score_micro_batch(model, micro, attention="fast")[0].sum(), {}

    forward_backward(
        pack([replaced(sequence)] if rank == 0 else [], token_budget=64).micro_batches, score, model
    )
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    began = time.perf_counter()
    forward_backward(cut, score, model)
    return time.perf_counter() - began, (_status("VmHWM") - before) / 2**20, 0.0


def replaced(sequence: TrainingSequence) -> TrainingSequence:
    """Return the beginning of a sequence, to warm up with."""
    return TrainingSequence(prompt_ids=sequence.prompt_ids, completion_ids=sequence.completion_ids[:63])


def _be_rank(rank: int, world: int, folder: str, tokens: int, layout: ParallelConfig, pipe: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world > 1:
        options: dict[str, Any] = {"rank": rank, "world_size": world, "timeout": timedelta(seconds=300)}
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", **options)
    pipe.send(_pass(tokens, layout, rank))
    os._exit(0)


def _once(world: int, tokens: int, layout: ParallelConfig) -> tuple[float, float]:
    """Return the slowest rank's seconds and the largest growth of memory."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            context.Process(target=_be_rank, args=(place, world, folder, tokens, layout, pipes[place][1]))
            for place in range(world)
        ]
        for process in ranks:
            process.start()
        found = [pipe.recv() for pipe, _ in pipes]
        for process in ranks:
            process.join()
    return max(row[0] for row in found), max(row[1] for row in found)


def share(world: int, tokens: int, repeats: int) -> None:
    """Print what a pass over one long sequence takes alone and shared."""
    layouts = {"one process": (1, ParallelConfig()), "context": (world, ParallelConfig(context=world))}
    layouts["tensor"] = world, ParallelConfig(tensor=world)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in layouts}
    for _ in range(repeats):
        for name, (count, layout) in layouts.items():
            found[name].append(_once(count, tokens, layout))
    print(
        f"one sequence of {tokens} tokens, forward and backward, 1 thread a rank, {repeats} repeats in turns"
    )
    for name, rows in found.items():
        seconds, growth = zip(*rows, strict=True)
        print(
            f"{name:12} {layouts[name][0]} ranks: {statistics.median(seconds):6.2f} s ({min(seconds):.2f} to "
            f"{max(seconds):.2f}), a rank's peak grows by {statistics.median(growth):6.0f} MiB "
            f"({min(growth):.0f} to {max(growth):.0f})"
        )


def main() -> int:
    """Run one of the two; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["deal", "share"])
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.what == "deal":
        deal(options.ranks or 8, options.batches)
    else:
        share(options.ranks or 2, options.tokens, options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
