"""Ranks and reductions. World size 1 runs the same code: every reduction is then the identity."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


def is_distributed() -> bool:
    """Say whether a process group is up."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return this process's rank, 0 when alone."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if is_distributed() else 1


def all_reduce_sum(*values: float) -> list[float]:
    """Add numbers over all ranks, in float64.

    Args:
        values: This rank's shares; the same count on every rank.

    Returns:
        The sums, the same on every rank.
    """
    if not is_distributed():
        return [float(value) for value in values]
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def all_reduce_max(value: float) -> float:
    """Return the largest value of all ranks."""
    if not is_distributed():
        return float(value)
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor[0])


def all_gather_values(values: torch.Tensor) -> torch.Tensor:
    """Return the numbers of all ranks, one after the other in the order of ranks.

    Args:
        values: This rank's numbers, one-dimensional; their count may differ between ranks.
    """
    if not is_distributed():
        return values
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([values.numel()]))
    padded = torch.zeros(int(max(counts)), dtype=values.dtype)
    padded[: values.numel()] = values
    parts = [torch.zeros_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])


def barrier() -> None:
    """Wait for all ranks, for instance until rank 0 has prepared a folder that all of them read."""
    if is_distributed():
        dist.barrier()


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Add gradients over all ranks.

    Losses are divided by global counts, so the sum is the gradient of the whole batch. A parameter without a
    gradient here counts as zero, so that ranks with less work stay in step.
    """
    if not is_distributed():
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)


def shard(count: int) -> range:
    """Return the indices of `count` items that are this rank's: every world_size-th, from its rank on."""
    return range(rank(), count, world_size())
