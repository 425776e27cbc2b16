"""What the parts of a step take: read from a run's record, measured here, or computed from a card's data sheet."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from whet.config import load_yaml
from whet.generate.engine import EngineStats
from whet.generate.rows import Request
from whet.inspect.cluster.simulation import Costs, Load, decode_steps
from whet.inspect.memory.phases import parameter_sizes
from whet.model.config import ModelConfig
from whet.telemetry.log import read_metrics, read_rows
from whet.train.objective.advantage import is_informative, with_advantages
from whet.train.objective.objective import Objective
from whet.train.optim.step import Optimizer, prepare_model
from whet.train.rl_config import RLConfig
from whet.train.rollout.rollout import sample_seeds
from whet.train.setup import load_rl
from whet.types import Group, UserError

SKIPPED = 2
"""First steps of a record, in which kernels are chosen and pages touched."""
LEAST_STEPS = 6
SHARES = (1.0, 0.5, 0.25, 0.125)
"""Parts of a rollout that are drawn to tell what a decoding step takes from what a row does."""
ROUNDS = 3
HOST_BYTES_S = 10e9
"""Weights to rollout workers, bytes a second: an object store over a 100 Gbit/s network."""
DRAWN = 256
"""Groups that are drawn from an assumed distribution of lengths."""
SPREAD = 0.8
"""Standard deviation of the logarithm of lengths, where they are not known: a long tail."""

CardName = Literal["", "a100", "h100", "h200", "l40s", "rtx4090"]


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU's data sheet.

    Attributes:
        flops: Dense bfloat16 products a second, accumulated in float32.
        memory_bytes_s: Bytes of memory a second.
        link_bytes_s: Bytes a second to another card of its machine, in one direction.
    """

    flops: float
    memory_bytes_s: float
    link_bytes_s: float


CARDS: dict[CardName, Card] = {
    "a100": Card(312e12, 2.039e12, 300e9),
    "h100": Card(989e12, 3.35e12, 450e9),
    "h200": Card(989e12, 4.8e12, 450e9),
    "l40s": Card(362e12, 0.864e12, 32e9),
    "rtx4090": Card(165e12, 1.008e12, 32e9),
}
"""NVIDIA's data sheets of A100 80 GB SXM, H100 SXM, H200 SXM, L40S (PCIe) and GeForce RTX 4090 (PCIe)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Costs of a recipe, and where they come from.

    Attributes:
        worker: Those of a process that samples, and of training.
        own: Those of a process that samples and trains in turn: it samples with all of its threads.
        groups: Lengths of completions by group.
        prompt_tokens: Tokens of a prompt.
        source: One line: what was read, measured or assumed.
        cores: Cores that all processes share; 0 where each has a device of its own.
        trainer_cores: Cores that a training rank uses.
    """

    worker: Costs
    own: Costs
    groups: tuple[tuple[int, ...], ...]
    prompt_tokens: float
    source: str
    cores: float = 0.0
    trainer_cores: float = 1.0

    def load(self, run: RLConfig) -> Load:
        """Return what a step of a recipe consists of."""
        return Load(
            groups=self.groups,
            num_prompts=run.num_prompts,
            prompt_tokens=self.prompt_tokens,
            max_rows=run.policy.max_rows,
            staleness=run.off_policy.staleness if run.overlap.mode == "async" else 0,
            partial=run.cluster.partial,
            save_every=run.save_every,
        )


def fit_costs(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Return the costs, none below 0, that explain times best, and the median relative error of what they explain.

    Args:
        features: For each time, how often each cost occurs in it.
        seconds: The times. Their relative errors are made small, since large ones vary more.
    """
    rows, times = np.asarray(features, dtype=float), np.asarray(seconds, dtype=float)
    scaled = rows / times[:, None]
    best, least = [0.0] * rows.shape[1], math.inf
    for count in range(rows.shape[1], 0, -1):
        for chosen in combinations(range(rows.shape[1]), count):
            found = np.linalg.lstsq(scaled[:, chosen], np.ones(len(times)), rcond=None)[0]
            if (found < 0).any():
                continue
            loss = float(((scaled[:, chosen] @ found - 1) ** 2).sum())
            if loss < least - 1e-12:
                least, best = loss, [0.0] * rows.shape[1]
                for place, value in zip(chosen, found, strict=True):
                    best[place] = float(value)
    errors = abs(rows @ np.asarray(best) / times - 1)
    return best, float(np.median(errors))


def cores_of(run: RLConfig) -> tuple[float, float]:
    """Return the cores that processes on this machine's CPU share, and those that a trainer uses."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return float(cores), float(min(cores, run.policy.num_threads or torch.get_num_threads()))


# From the record of a run.


def recorded_costs(folder: Path, run: RLConfig) -> Found:
    """Read the costs of a recipe from the record of a run of it in one process.

    Args:
        folder: The run folder.
        run: The recipe.

    Raises:
        UserError: If the run is too short, or was another kind of run.
    """
    made = load_yaml(folder / "config.yaml", RLConfig)
    if made.cluster.rollout_workers or made.overlap.mode != "off":
        what = (
            "cluster.rollout_workers"
            if made.cluster.rollout_workers
            else f"overlap.mode = {made.overlap.mode}"
        )
        raise UserError(
            f"{folder}: its times overlap ({what}); expected the record of a run without, or --measure"
        )
    rows = [row for row in read_metrics(folder) if row["stage"] == "rl" and "rl/generate_seconds" in row]
    lengths: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row in read_rows(folder / "samples.jsonl"):
        lengths[row["step"]][row["uid"]].append(row["num_completion_tokens"])
    rows = [row for row in rows[SKIPPED:] if row["step"] in lengths]
    if len(rows) < LEAST_STEPS:
        raise UserError(
            f"{folder}: {len(rows)} recorded steps after the first {SKIPPED}; expected {LEAST_STEPS} or more, "
            "or --measure"
        )
    drawn, update, trained, all_tokens = [], [], 0.0, 0.0
    for row in rows:
        own = [length for group in lengths[row["step"]].values() for length in group]
        read = row["rl/train_tokens_per_second"] * row["rl/train_seconds"]
        drawn.append((decode_steps(own, made.policy.max_rows), sum(own)))
        update.append((1.0, read))
        trained, all_tokens = trained + read, all_tokens + sum(own)
    (decode_s, row_s), error = fit_costs(drawn, [row["rl/generate_seconds"] for row in rows])
    (update_s, token_s), _ = fit_costs(update, [row["rl/train_seconds"] for row in rows])
    gaps = [after["time_s"] - row["time_s"] for row, after in zip(rows, rows[1:], strict=False)]
    parts = ("rl/generate_seconds", "rl/reward_seconds", "rl/train_seconds")
    rest = statistics.median(
        [gap - sum(row[name] for name in parts) for gap, row in zip(gaps, rows[1:], strict=True)]
    )
    costs = Costs(
        decode_s=decode_s,
        row_s=row_s,
        reward_s=statistics.median(row["rl/reward_seconds"] for row in rows)
        / (made.num_prompts * made.group_size),
        update_s=update_s,
        token_s=token_s * trained / all_tokens,
        rest_s=max(0.0, rest),
    )
    groups = tuple(
        tuple(group) for step in lengths.values() for group in step.values() if len(group) == made.group_size
    )
    if not groups:
        raise UserError(f"{folder}: no group of {made.group_size} samples in samples.jsonl; use --measure")
    cores, trainer_cores = cores_of(run)
    return Found(
        worker=costs,
        own=costs,
        groups=groups,
        prompt_tokens=0.0,
        source=f"the record of {folder}: {len(rows)} steps, rollouts explained to {error:.0%}",
        cores=cores if made.policy.device != "cuda" and not torch.cuda.is_available() else 0.0,
        trainer_cores=trainer_cores,
    )


# Measured here.


def measured_costs(run: RLConfig) -> Found:
    """Measure the parts of a recipe's first step on this machine; nothing is written.

    Args:
        run: The recipe; rollout workers compute with `cluster.worker_threads`.
    """
    threads = run.policy.num_threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    setup = load_rl(run)
    policy = setup.policy
    prepare_model(policy.model, run.optim)
    drawn = setup.first_problems()
    problems = [problem for _, problem in drawn]
    names = sample_seeds(problems, [(run.seed, 0, epoch) for epoch, _ in drawn], run.group_size)
    requests = [
        Request(prompt_ids=policy.prompt_ids(problem), seeds=tuple(row))
        for problem, row in zip(problems, names, strict=True)
    ]
    engine = policy.engine(trains=True)
    is_cpu = policy.device.type == "cpu"
    costs: dict[str, list[float]] = {}
    lengths: list[tuple[int, ...]] = []
    errors = []
    for who, count in (("worker", max(1, run.cluster.worker_threads)), ("own", threads)):
        if is_cpu:
            torch.set_num_threads(count)
        features, seconds = [], []
        for number in range(1 + ROUNDS):
            for share in SHARES:
                chosen = requests[: max(1, round(share * len(requests)))]
                engine.stats = EngineStats()
                began = time.perf_counter()
                rows = engine.generate(chosen, run.sampling)
                if number:  # the first round warms up
                    seconds.append(time.perf_counter() - began)
                    features.append((1.0, engine.stats.decode_steps, engine.stats.new_tokens))
                if share == 1.0:
                    lengths = [tuple(len(done.ids) for done in row) for row in rows]
        costs[who], error = fit_costs(features, seconds)
        errors.append(error)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder, setup.open_judge(Path(folder)) as (rewards, _):
        rollout = setup.first_rollout(engine, rewards)
    informative = is_informative(rollout.groups, run.algo, run.reward_weights)
    is_kept = run.algo.uninformative == "keep"
    used = [g for g, teaches in zip(rollout.groups, informative, strict=True) if teaches or is_kept]
    groups = with_advantages(used, run.algo, run.reward_weights)
    if not any(sample.advantage for group in groups for sample in group.samples):
        groups = list(map(_taught, rollout.groups))
    objective, optimizer = Objective.of(run, policy), Optimizer(policy.model, run.optim)
    features, seconds = [], []
    for number in range(1 + ROUNDS):
        for share in (1.0, 0.5):
            began = time.perf_counter()
            objective.update(
                groups[: max(1, round(share * len(groups)))], optimizer, 0.0, step=run.value.warmup_steps
            )
            if number:
                seconds.append(time.perf_counter() - began)
                features.append((1.0, objective.num_tokens_read))
    (update_s, token_s), error = fit_costs(features, seconds)
    errors.append(error)
    prompt_tokens = statistics.fmean(len(request.prompt_ids) for request in requests)
    all_tokens = sum(map(sum, lengths)) + prompt_tokens * len(requests) * run.group_size
    trained = [len(s.prompt_ids) + len(s.completion_ids) for group in groups for s in group.samples]
    push_s, fetch_s = _copying([p for p in policy.model.parameters() if p.requires_grad])
    shared = Costs(
        reward_s=rollout.reward_seconds / (run.num_prompts * run.group_size),
        update_s=update_s,
        token_s=token_s * sum(trained) / all_tokens,
        push_s=push_s,
        fetch_s=fetch_s,
    )
    own, worker = (
        replace(shared, call_s=values[0], decode_s=values[1], row_s=values[2])
        for values in (costs["own"], costs["worker"])
    )
    cores, trainer_cores = cores_of(run)
    return Found(
        worker=worker,
        own=own,
        groups=tuple(lengths),
        prompt_tokens=prompt_tokens,
        source=f"measured here: {len(SHARES) * ROUNDS} rollouts twice, {2 * ROUNDS} updates, explained to "
        f"{max(errors):.0%}",
        cores=cores if is_cpu else 0.0,
        trainer_cores=trainer_cores,
    )


def _taught(group: Group) -> Group:
    """Return a group whose samples have advantages 1 and -1 in turn."""
    samples = (
        replace(sample, advantage=1.0 if index % 2 == 0 else -1.0)
        for index, sample in enumerate(group.samples)
    )
    return replace(group, samples=tuple(samples))


@torch.no_grad()
def _copying(tensors: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return the seconds in which weights are compared and copied for workers, and copied by a worker."""
    began = time.perf_counter()
    copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    _ = [torch.equal(copy, tensor.cpu()) for copy, tensor in zip(copies, tensors, strict=True)]
    pushed = time.perf_counter()
    for copy, tensor in zip(copies, tensors, strict=True):
        tensor.copy_(copy)
    return pushed - began, time.perf_counter() - pushed


# From a data sheet.


def card_costs(
    name: CardName,
    shape: ModelConfig,
    run: RLConfig,
    *,
    tokens: float,
    prompt_tokens: float,
    flops_share: float,
    memory_share: float,
) -> Found:
    """Compute the costs of a recipe from a card's data sheet.

    A decoding step reads all weights once (bfloat16); each row adds its products and its keys and values. Training
    takes 6 products per weight and token, 8 where layers are recomputed; the optimizer reads and writes 28 bytes a
    weight; gradients are added up in float32. Launches, padding and pipeline bubbles are in the shares.

    Args:
        name: The card.
        shape: The model.
        run: The recipe.
        tokens: Mean length of completions.
        prompt_tokens: Mean length of prompts.
        flops_share: Share of the card's products that training and prompts reach.
        memory_share: Share of its memory's speed that decoding reaches.
    """
    card, count = CARDS[name], sum(parameter_sizes(shape))
    flops, memory = card.flops * flops_share, card.memory_bytes_s * memory_share
    cached = 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim  # bytes a token, keys and values
    context = prompt_tokens + tokens / 2
    costs = Costs(
        decode_s=2 * count / memory,
        row_s=2 * count / flops + cached * context / memory,
        prompt_s=2 * count / flops,
        update_s=28 * count / memory,
        token_s=(8 if run.optim.checkpoint_layers else 6) * count / flops,
        reduce_s=2 * 4 * count / card.link_bytes_s,
        push_s=2 * count / HOST_BYTES_S,
        fetch_s=2 * count / HOST_BYTES_S,
    )
    draw = random.Random(0)
    longest = run.sampling.max_new_tokens
    middle = math.log(tokens) - SPREAD**2 / 2
    groups = tuple(
        tuple(max(1, min(longest, round(draw.lognormvariate(middle, SPREAD)))) for _ in range(run.group_size))
        for _ in range(DRAWN)
    )
    return Found(
        worker=costs,
        own=costs,
        groups=groups,
        prompt_tokens=prompt_tokens,
        source=f"data sheet of {name} at {flops_share:.0%} of its products and {memory_share:.0%} of its memory's "
        f"speed (assumed, not measured); completions of {tokens:g} tokens, spread as a lognormal of {SPREAD:g}",
    )


def to_json(found: Found) -> dict[str, Any]:
    """Return the costs as JSON values."""
    return json.loads(
        json.dumps({"source": found.source, "cores": found.cores, "worker": _fields(found.worker)})
    )


def _fields(costs: Costs) -> dict[str, float]:
    return {name: getattr(costs, name) for name in Costs.__dataclass_fields__}
