"""Compare two ways to deal a step's sequences out to ranks: each packs what it drew, or all by estimated work.

python bench/deal.py [--sequences 512] [--budget 16384] [--model NAME] [--json FILE]
python bench/deal.py --long 4096 [--ranks 1 2 4] [--repeats 3]
python bench/deal.py --send 64 --sequences 1024 [--repeats 3]

Lengths are log-normal (a median of 600 tokens, some of 16,000), as of reasoning traces. The work of a sequence is
estimated from the model's shape: its products grow with the tokens, its attention with their square. `total` is the
work of the busiest rank over the mean, for ranks that wait once a step; `in step` is the sum over micro-batches of the
largest that any rank has, over the mean, for ranks that wait in every layer (shards). 1 is perfect.

`--long` trains one sequence of so many tokens on groups of gloo ranks (`parallel.context`), one thread each, of a small
model: seconds of a step, and the most bytes of tensors alive above weights and gradients on any rank.

`--send` measures what one of so many ranks computes to exchange a step's sequences, without the network.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from whet import processes
from whet.algo.packing import (
    Outline,
    TrainingSequence,
    _as_json,
    _everyones,
    _of_json,
    pack,
    split_by_budget,
)
from whet.generate.scoring import score_micro_batch
from whet.inspect.memory.meter import LiveTensors
from whet.model.config import ModelConfig
from whet.model.transformer import init_weights
from whet.model.weights import build_model
from whet.ranks.collectives import sum_gradients
from whet.ranks.context import deal, sharing, split
from whet.ranks.fsdp import ParallelConfig
from whet.train.optim.step import costs_of, shard_layers

SHAPES = {
    "0.5b": ModelConfig(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
    ),
    "7b": ModelConfig(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
    ),
}
STEPS = 20


def lengths_of(count: int, seed: int) -> list[int]:
    """Return log-normal lengths in tokens."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.exp(1.2 * torch.randn(count, generator=generator)) * 600
    return [int(length) for length in drawn.clamp(16, 16_384)]


def excess(work: Sequence[Sequence[float]]) -> tuple[float, float, int, int]:
    """Return `total` and `in step` of the micro-batches of each rank, and the fewest and most that a rank has."""
    mean = sum(map(sum, work)) / len(work)
    counts = [len(own) for own in work]
    in_step = sum(max(column) for column in zip_longest(*work, fillvalue=0.0))
    return max(map(sum, work)) / mean, in_step / mean, min(counts), max(counts)


LONG = ModelConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    max_positions=65_536,
)


def _be_rank(rank: int, ranks: int, folder: str, length: int, repeats: int, pipe: Any) -> None:
    processes.end_with_parent()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if ranks > 1:
        meet = f"file://{folder}/meet"
        torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    model = build_model(LONG)
    init_weights(model, 0)
    shard_layers(model, ParallelConfig(context=ranks))
    own = sharing(model)
    ids = torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    sequence = TrainingSequence(prompt_ids=(1,), completion_ids=tuple(ids[1:]))
    (micro,) = pack([sequence], token_budget=length).micro_batches
    micro = micro if own is None else split(micro, own)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        logprobs_M, _ = score_micro_batch(model, micro)
        (-logprobs_M.sum() / length).backward()
        sum_gradients(model.parameters())

    step()  # packs weights
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    with LiveTensors(torch.device("cpu")) as meter:
        step()
    pipe.send((seconds, meter.peak))


def long(length: int, counts: Sequence[int], repeats: int) -> None:
    """Print time and memory of a step on groups of ranks."""
    spawn = multiprocessing.get_context("spawn")
    for ranks in counts:
        with tempfile.TemporaryDirectory() as folder:
            pipes = [spawn.Pipe(duplex=False) for _ in range(ranks)]
            group = [
                spawn.Process(target=_be_rank, args=(n, ranks, folder, length, repeats, pipes[n][1]))
                for n in range(ranks)
            ]
            with processes.started(group):
                found = [pipe.recv() for pipe, _ in pipes]
        seconds = sorted(max(column) for column in zip(*(times for times, _ in found), strict=True))
        most = max(peak for _, peak in found)
        print(
            f"{length} tokens on {ranks} ranks: {seconds[len(seconds) // 2]:.2f} s a step ({seconds[0]:.2f} to "
            f"{seconds[-1]:.2f}), {most / 2**20:.0f} MiB of tensors on the rank that has most"
        )


def send(ranks: int, count: int, repeats: int) -> None:
    """Print what a rank computes to exchange sequences: all with all, or outlines, and each with who trains on it.

    Args:
        ranks: Ranks, of which this process is one; what the others send is made here.
        count: Sequences of each.
        repeats: Measurements, both kinds in turn.
    """
    lengths = lengths_of(ranks * count, 0)
    sequences = [
        TrainingSequence(
            prompt_ids=(number,) * 100,
            completion_ids=tuple(range(length)),
            advantage=0.3,
            sampler_logprobs=tuple(
                torch.randn(length, generator=torch.Generator().manual_seed(number)).tolist()
            ),
        )
        for number, length in enumerate(lengths)
    ]
    own = sequences[:count]
    everyones = [
        json.dumps([_as_json(s) for s in sequences[r * count : (r + 1) * count]]) for r in range(ranks)
    ]
    taken: dict[str, list[float]] = {"all": [], "own": []}
    for _ in range(repeats):
        began = time.perf_counter()
        line = json.dumps([_as_json(sequence) for sequence in own])
        read = [[_of_json(row) for row in json.loads(text)] for text in everyones]
        taken["all"].append(time.perf_counter() - began)
        assert len(read) == ranks
        del read
        began = time.perf_counter()
        outlines = _everyones([Outline.of(sequence) for sequence in own])[0]
        line = json.dumps([_as_json(sequence) for sequence in own])
        mine = [_of_json(row) for row in json.loads(line)]  # as much arrives as leaves, on average
        taken["own"].append(time.perf_counter() - began)
        assert len(outlines) == len(mine) == count
    tokens = sum(lengths)
    print(f"{ranks} ranks, {count} sequences each, {tokens:,} tokens in all; one process, no network:")
    for name, size in (("all", sum(map(len, everyones))), ("own", len(line) + 40 * len(lengths))):
        found = sorted(taken[name])
        print(
            f"{name}: {size / 2**20:.1f} MiB arrive at a rank, {found[len(found) // 2]:.2f} s "
            f"({found[0]:.2f} to {found[-1]:.2f})"
        )


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--budget", type=int, default=16_384)
    parser.add_argument("--model", choices=list(SHAPES), default="7b")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--long", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--send", type=int, default=0)
    options = parser.parse_args()
    if options.send:
        send(options.send, options.sequences // options.send, options.repeats)
        return
    if options.long:
        long(options.long, options.ranks, options.repeats)
        return
    costs = costs_of(SHAPES[options.model])
    rows = []
    for ranks in (2, 4, 8, 16, 32):
        found: dict[str, list[tuple[float, float, int, int]]] = {"as drawn": [], "by work": []}
        for seed in range(STEPS):
            lengths = lengths_of(options.sequences, seed)
            work = [costs.of(0, length) for length in lengths]
            drawn = [range(rank, len(lengths), ranks) for rank in range(ranks)]
            packed = [split_by_budget([lengths[i] for i in own], options.budget) for own in drawn]
            found["as drawn"].append(
                excess(
                    [
                        [sum(work[own[i]] for i in m) for m in bins]
                        for own, bins in zip(drawn, packed, strict=True)
                    ]
                )
            )
            dealt = deal(lengths, work, options.budget, ranks)
            found["by work"].append(excess([[sum(work[i] for i in m) for m in bins] for bins in dealt]))
        for name, values in found.items():
            columns = [sorted(column) for column in zip(*values, strict=True)]
            (total, in_step), (few, many) = columns[:2], (columns[2][0], columns[3][-1])
            half = len(total) // 2
            rows.append({"ranks": ranks, "dealt": name, "total": total[half], "in_step": in_step[half]})
            print(
                f"{ranks:3} ranks, {name:8}: total {total[half]:.3f} ({total[0]:.3f} to {total[-1]:.3f}), in step "
                f"{in_step[half]:.3f} ({in_step[0]:.3f} to {in_step[-1]:.3f}), micro-batches {few} to {many}"
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
