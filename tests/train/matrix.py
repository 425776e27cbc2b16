"""The invariance matrix: every algorithm, cut, packed, ordered and spread over ranks in every way, and compared.

`test_invariance.py` asserts its cells and `bench/invariance.py` prints them. Run as a script, this file is one rank.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import definition
import torch
import torch.distributed as dist
from scene import (
    CASES,
    LR,
    MAX_LENGTH,
    OPTIM,
    REWARD_WEIGHTS,
    SEED,
    TEMPERATURE,
    Case,
    islands_as,
    make_groups,
    make_policy,
    nudge,
    shares,
    shuffled,
)

import whet.train.objective.objective
from whet.algo.packing import pack
from whet.eval.grade import Grade
from whet.generate.policy import Policy
from whet.train.objective.advantage import is_informative, with_advantages
from whet.train.objective.objective import Objective
from whet.train.optim.step import OptimConfig, Optimizer, forward_backward
from whet.train.rollout.rollout import Rollout, rollout_metrics
from whet.types import Group

CUTS = {torch.float64: (1, 5), torch.float32: (5,)}
"""Micro-batches of an update: in float64 a cut's mistakes are seen to the last digit, in float32 the kernels'."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
SINGLE = (
    *(
        "grpo",
        "gspo",
        "gmpo",
        "cispo",
        "sapo",
        "ppo",
        "kl k2_loss",
        "everything",
        "k3_mask",
        "ppo gae, kl in reward",
    ),
    *("filters: everything", "filters: ppo gae, kl in reward", "images: grpo"),
)
"""Cases that the tests compute in float32, too: formulas are seen in float64, and these take each kind of kernel."""
COLUMNS = ("micro-batches", "packing", "order", "ranks", "metrics")


@dataclass(kw_only=True)
class Outcome:
    """What a step did: its metrics, and gradients of every update with the weights after the step, by name.

    `packed` has the sequences of each update of the policy, where whet did the step.
    """

    metrics: dict[str, float]
    tensors: dict[str, torch.Tensor]
    packed: list = field(default_factory=list)


class Recorder(Optimizer):
    """The optimizer, which keeps the gradients that it saw."""

    def __init__(self, model: torch.nn.Module, optim: OptimConfig, prefix: str, seen: list) -> None:
        super().__init__(model, optim)
        self.prefix, self.seen = prefix, seen

    def step(self, lr: float, *, loss: float = 0.0) -> float:
        self.seen.append({self.prefix + n: p.grad.clone() for n, p in self._named if p.grad is not None})
        return super().step(lr, loss=loss)


def groups_of(case: Case) -> tuple[Group, ...]:
    """The groups that a case starts from."""
    return make_groups(case.is_filtered, case.has_images)


def build(case: Case, dtype: torch.dtype, token_budget: int) -> tuple[Policy, Objective, list]:
    """Return policy and objective before the step, nudged, and the list that gradients go to."""
    policy, seen = make_policy(dtype, has_images=case.has_images), []
    optim = replace(OPTIM, token_budget=token_budget)
    objective = Objective(
        policy,
        case.algo,
        optim=optim,
        temperature=TEMPERATURE,
        max_length=MAX_LENGTH,
        off_policy=case.off_policy,
        value=case.value,
        seed=SEED,
    )
    nudge(policy.model, 7)
    critic = objective._critic
    if critic is not None:
        nudge(critic, 8)
        critic.optimizer = Recorder(critic, replace(optim, lr=case.value.lr), "critic/", seen)
    return policy, objective, seen


def named_tensors(seen: list, *modules: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    """Name gradients by update, and weights."""
    tensors = {f"gradient {n}/{name}": grad for n, part in enumerate(seen) for name, grad in part.items()}
    for place, module in enumerate(modules):
        if module is not None:
            tensors |= {
                f"weight {place}/{n}": p.detach() for n, p in module.named_parameters() if p.requires_grad
            }
    return tensors


def run(
    case: Case, groups: Sequence[Group], dtype: torch.dtype, token_budget: int, num_micro: int | None = None
) -> Outcome:
    """Do the step with whet on this rank's groups, from their rewards on.

    Args:
        case: The arguments.
        groups: This rank's groups, with rewards.
        dtype: Of the whole computation.
        token_budget: Tokens of a micro-batch.
        num_micro: Micro-batches that the first update must have; 1 holds for all updates.
    """
    counts: list[int] = []

    def counted(micro_batches: Sequence, *arguments: Any) -> dict[str, float]:
        counts.append(len(micro_batches))
        return forward_backward(micro_batches, *arguments)

    packed: list = []

    def remembered(sequences: Sequence, **options: Any) -> Any:
        if "aggregation" in options:
            packed.append(list(sequences))
        return pack(sequences, **options)

    objective_module = whet.train.objective.objective
    with (
        islands_as(dtype),
        patch.object(objective_module, "forward_backward", counted),
        patch.object(objective_module, "pack", remembered),
    ):
        policy, objective, seen = build(case, dtype, token_budget)
        used = list(groups)
        if case.algo.uninformative != "keep":
            useful = is_informative(groups, case.algo, REWARD_WEIGHTS)
            used = [group for group, is_useful in zip(groups, useful, strict=True) if is_useful]
        used = with_advantages(used, case.algo, REWARD_WEIGHTS)
        metrics = objective.update(used, Recorder(policy.model, OPTIM, "", seen), LR)
    metrics |= {"num_tokens_read": objective.num_tokens_read}
    grades = [[Grade(s.text, s.index == 0, "perfect", s.index) for s in group.samples] for group in groups]
    rollout = Rollout(list(groups), grades, 0.0, 0.0)
    rolled = rollout_metrics(rollout, case.algo, REWARD_WEIGHTS, 0)
    metrics |= {f"rollout/{name}": value for name, value in rolled.items()}
    assert num_micro is None or counts[0] == num_micro, f"{counts} micro-batches, wanted {num_micro}"
    assert num_micro != 1 or set(counts) == {1}
    tensors = named_tensors(seen, policy.model, objective._critic)
    return Outcome(metrics=metrics, tensors=tensors, packed=packed)


def run_definition(case: Case, dtype: torch.dtype) -> tuple[Outcome, list[list[int]]]:
    """Do the step from its definition on padded rows; return the lengths that every update read, too."""
    policy, frozen, trunk = (make_policy(dtype, has_images=case.has_images) for _ in range(3))
    critic = torch.nn.Module()
    critic.trunk = trunk.model
    critic.head = torch.nn.Parameter(torch.zeros(policy.model.config.hidden_size, dtype=dtype))
    nudge(policy.model, 7)
    nudge(critic, 8)
    has_critic = case.algo.baseline == "value"
    stage = definition.Stage(
        config=policy.model.config,
        policy={name: p for name, p in policy.model.named_parameters() if p.requires_grad},
        frozen=dict(frozen.model.named_parameters()),
        critic=dict(critic.named_parameters()),
        algo=case.algo,
        off_policy=case.off_policy,
        value=case.value,
        optim=OPTIM,
        temperature=TEMPERATURE,
        max_length=MAX_LENGTH,
        reward_weights=REWARD_WEIGHTS,
    )
    metrics = definition.update(groups_of(case), stage, LR, case.value.lr, SEED)
    metrics["num_tokens_read"] = float(sum(map(sum, stage.lengths)))
    tensors = named_tensors(stage.gradients, policy.model, critic if has_critic else None)
    return Outcome(metrics=metrics, tensors=tensors), stage.lengths


def budget_for(sequences: Sequence, count: int) -> int:
    """Return a token budget that cuts an update into exactly this many micro-batches."""
    total = sum(sequence.num_tokens for sequence in sequences)
    for budget in range(total // (2 * count), total):
        if len(pack(sequences, token_budget=budget).micro_batches) == count:
            return budget
    raise AssertionError(f"no token budget cuts {total} tokens into {count}")


def difference(got: Outcome, expected: Outcome, metric_names: Sequence[str]) -> tuple[tuple, tuple]:
    """Return the largest relative difference of tensors with the loss, and of metrics, each with its name.

    A tensor's difference is relative to its own largest element, a metric's to its size or 0.01.
    """
    assert got.tensors.keys() == expected.tensors.keys(), got.tensors.keys() ^ expected.tensors.keys()
    found = [(0.0, "")]
    for name, tensor in got.tensors.items():
        assert tensor.dtype == expected.tensors[name].dtype
        distance = float((tensor - expected.tensors[name]).abs().max())
        found.append((distance and distance / max(float(expected.tensors[name].abs().max()), 1e-30), name))
    metrics = []
    for name in metric_names:
        ours, theirs = got.metrics[name], expected.metrics[name]
        metrics.append((abs(ours - theirs) / max(abs(theirs), 0.01), name))
    assert all(math.isfinite(number) for number, _ in found + metrics)
    loss = next(entry for entry in metrics if entry[1] == "rl/loss")
    return max(*found, loss), max(metrics)


def cells(name: str, dtype: torch.dtype) -> dict[str, tuple[float, str]]:
    """Compute a row of the matrix on one rank: in each column the largest relative difference and where it is."""
    case, groups = CASES[name], groups_of(CASES[name])
    defined, lengths = run_definition(case, dtype)
    whole = run(case, groups, dtype, max(map(sum, lengths)), num_micro=1)
    budgets = {cut: budget_for(whole.packed[0], cut) for cut in CUTS[dtype] if cut > 1}
    budgets[1] = max(map(sum, lengths))
    every = list(whole.metrics)
    own = {metric for metric in every if not metric.startswith("rollout/")}
    assert own == defined.metrics.keys(), own ^ defined.metrics.keys()
    table = {"packing": [difference(whole, defined, list(own))], "micro-batches": [], "order": []}
    for cut in CUTS[dtype]:
        order = shuffled(groups)
        table["order"].append(difference(run(case, order, dtype, budgets[cut], cut), whole, every))
        if cut > 1:
            table["micro-batches"].append(
                difference(run(case, groups, dtype, budgets[cut], cut), whole, every)
            )
    row = {column: max(tensors for tensors, _ in pairs) for column, pairs in table.items()}
    return row | {"metrics": max(metrics for pairs in table.values() for _, metrics in pairs)}


def rank_cells(name: str, dtype: torch.dtype, ranks: Sequence[Outcome]) -> tuple[tuple, tuple]:
    """Compare what each of two ranks had after its step with one rank: tensors and loss, then metrics."""
    groups = groups_of(CASES[name])
    whole = run(CASES[name], groups, dtype, 10**6)
    pairs = [difference(outcome, whole, list(whole.metrics)) for outcome in ranks]
    return max(tensors for tensors, _ in pairs), max(metrics for _, metrics in pairs)


def run_rank(folder: Path, rank: int, names: Sequence[str], single: Sequence[str]) -> None:
    """Do one rank's share of every case, in its dtypes, and save what it had after each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results = {}
    for place, name in enumerate(names):
        for shift, dtype in enumerate(TOLERANCE):
            if dtype == torch.float32 and name not in single:
                continue
            mine = shares(groups_of(CASES[name]), rank, (place + shift) % 3)
            outcome = run(CASES[name], mine, dtype, 60)
            results[f"{dtype}/{name}"] = {"metrics": outcome.metrics, "tensors": outcome.tensors}
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()


class Ranks:
    """Two processes that go through the cases while the caller does something else."""

    def __init__(self, folder: Path, names: Sequence[str], single: Sequence[str]) -> None:
        self.folder = folder
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        self.workers = [
            subprocess.Popen(
                [sys.executable, __file__, str(folder), str(rank), "|".join(single), *names],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        self.results: list[dict] = []

    def outcomes(self, name: str, dtype: torch.dtype) -> list[Outcome]:
        """Wait for the processes to end, and return what each rank had after a case."""
        if not self.results:
            outputs = [worker.communicate(timeout=240)[0] for worker in self.workers]
            assert [worker.returncode for worker in self.workers] == [0, 0], "\n".join(outputs)
            paths = [self.folder / f"rank{rank}.pt" for rank in range(2)]
            self.results = [torch.load(path, weights_only=True) for path in paths]
        return [Outcome(**result[f"{dtype}/{name}"]) for result in self.results]

    def stop(self) -> None:
        """End what still runs."""
        for worker in self.workers:
            worker.kill()
            worker.communicate()


if __name__ == "__main__":
    code = 1
    try:
        run_rank(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4:], sys.argv[3].split("|"))
        code = 0
    except BaseException as error:
        print(f"rank {sys.argv[2]}: {error!r}")
        raise
    finally:
        # An ordinary exit after gloo collectives aborts now and then.
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
