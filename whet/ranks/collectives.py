"""Collective operations of the ranks. World size 1 runs the same code: every reduction is then the identity.

Before ranks exchange numbers, they exchange what they are about to do: a mismatch is an error on every rank, never a
hang or a wrong sum. Numbers are exchanged on the CPU; only gradients stay on their device.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from whet.types import UserError

T = TypeVar("T")
BUCKET_NUMBERS = 1 << 23
"""Gradients are added in buckets of at most this many numbers, or of one tensor."""
_TEXT_BYTES = 184
across: Any = None
"""Process group of the ranks that have the same shares, where groups of ranks divide matrices (`whet.ranks.tensor`)."""
_current = ""
_first: Callable[[], None] | None = None


class RankError(RuntimeError):
    """A collective failed because another rank is gone, late, or in a different collective.

    Attributes:
        work: The collective that was waited for; '' if all ranks reached it.
    """

    def __init__(self, text: str, *, work: str = "") -> None:
        super().__init__(text)
        self.work = work


def is_distributed() -> bool:
    """Say whether a process group is up."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return this process's rank, 0 when alone."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if is_distributed() else 1


def current_collective() -> str:
    """Return the collective that this rank waits in, as 'all_reduce_max in train.step.clip:93'; '' if none."""
    return _current


@contextmanager
def together(what: str, number: int = 0) -> Iterator[list[int]]:
    """Run a collective on all ranks once they agree on what it is and where it is called.

    Args:
        what: What is done, with everything that must be the same on all ranks.
        number: A number to share, 0 or more.

    Yields:
        The number of each rank.

    Raises:
        RankError: On every rank, if one is in a different collective; on this one, if another is gone or late.
    """
    work = f"{what} in {_caller()}"
    if _first is not None:
        _first()
    with named(work):
        text = work.encode("ascii", "replace")[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        mine = torch.frombuffer(bytearray(text + number.to_bytes(8, "little")), dtype=torch.uint8)
        parts = [torch.zeros_like(mine) for _ in range(world_size())]
        dist.all_gather(parts, mine)
        found = [bytes(part.numpy()) for part in parts]
        texts = [data[:_TEXT_BYTES].decode().rstrip() for data in found]
        if len(set(texts)) > 1:
            where = "; ".join(f"rank {place}: {text}" for place, text in enumerate(texts[:8]))
            raise RankError(
                f"ranks are in different collectives: {where}; start all with the same code and files"
            )
        yield [int.from_bytes(data[_TEXT_BYTES:], "little") for data in found]


@contextmanager
def before_collectives(function: Callable[[], None] | None) -> Iterator[None]:
    """Call a function before each collective within this context; None calls none."""
    global _first
    before, _first = _first, function
    try:
        yield
    finally:
        _first = before


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
    with together(f"all_reduce_sum of {len(values)} values"):
        dist.all_reduce(tensor)
    return tensor.tolist()


def all_reduce_max(value: float) -> float:
    """Return the largest value of all ranks."""
    if not is_distributed():
        return float(value)
    tensor = torch.tensor([value], dtype=torch.float64)
    with together("all_reduce_max"):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor[0])


def all_gather_values(values: torch.Tensor) -> torch.Tensor:
    """Return the numbers of all ranks, one after the other in the order of ranks.

    Args:
        values: This rank's numbers, one-dimensional; their count may differ between ranks.
    """
    if not is_distributed():
        return values
    with together(f"all_gather_values of {values.dtype}", values.numel()) as counts:
        padded = torch.zeros(max(counts), dtype=values.dtype)
        padded[: values.numel()] = values
        parts = [torch.zeros_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
    everything = [part[:count] for part, count in zip(parts, counts, strict=True)]
    return torch.cat(everything).to(values.device)


def gather_json(value: Any) -> list[Any]:
    """Return the JSON values of all ranks, in the order of ranks, as read back from JSON."""
    line = json.dumps(value) + "\n"
    everything = all_gather_values(torch.frombuffer(bytearray(line.encode()), dtype=torch.uint8))
    return [json.loads(line) for line in bytes(everything.numpy()).splitlines()]


def exchange_json(values: Sequence[Any]) -> list[Any]:
    """Send each rank a JSON value of its own; return those for this rank, in the order of ranks.

    Args:
        values: One for each rank.
    """
    assert len(values) == world_size()
    if not is_distributed():
        return [json.loads(json.dumps(value)) for value in values]
    lines = [json.dumps(value).encode() for value in values]
    with together("exchange_json"):
        sizes = torch.tensor([len(line) for line in lines])
        arriving = torch.empty_like(sizes)
        dist.all_to_all_single(arriving, sizes)
        sent = torch.frombuffer(bytearray(b"".join(lines)), dtype=torch.uint8)
        counts = arriving.tolist()
        got = torch.empty(sum(counts), dtype=torch.uint8)
        dist.all_to_all_single(got, sent, counts, sizes.tolist())
    return [json.loads(bytes(part.numpy())) for part in got.split(counts)]


def on_main(function: Callable[[], T]) -> T:
    """Run a function on rank 0 only, and share its result or error.

    Args:
        function: Returns a JSON value.

    Returns:
        That value, on every rank, as read back from JSON.

    Raises:
        UserError: On every rank, of the class and with the text that the function raised.
        OSError: On rank 0, where the function raised it; the others have it as UserError.
    """
    outcome: list[Any] = []
    failed: UserError | OSError | None = None
    if rank() == 0:
        try:
            outcome = ["", "", function()]
        except (UserError, OSError) as error:
            failed, outcome = error, [type(error).__name__, str(error), None]
    kind, text, value = gather_json(outcome)[0]
    if failed is not None:
        raise failed
    if kind:
        raise {known.__name__: known for known in UserError.__subclasses__()}.get(kind, UserError)(text)
    return value


def barrier() -> None:
    """Wait for all ranks, for instance until rank 0 has prepared a folder that all of them read."""
    if is_distributed():
        with together("barrier"):
            pass


def is_share(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a rank's share of a larger one: a DTensor, whose import takes a second."""
    return hasattr(tensor, "device_mesh")


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Add gradients over all ranks.

    Losses are divided by global counts, so the sum is the gradient of the whole batch. A parameter without a gradient
    here but with one on other ranks counts as zero; one without a gradient on any rank stays without. Gradients of
    parameters that are sharded over all ranks were added when they were dealt out; those of matrices that groups divide
    are added over the ranks that have the same share.
    """
    if not is_distributed():
        return
    everything = [p for p in parameters if p.requires_grad]
    trained = [p for p in everything if not is_share(p)]
    layout = repr([(parameter.dtype, tuple(parameter.shape)) for parameter in trained])
    work = f"sum_gradients of {len(trained)} tensors ({zlib.crc32(layout.encode()):08x})"
    num_missing = sum(parameter.grad is None for parameter in trained)
    with together(work, num_missing) as missing:
        if any(missing):
            has_gradient = torch.tensor([parameter.grad is not None for parameter in trained]).int()
            dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX)
            trained = [p for p, has in zip(trained, has_gradient.tolist(), strict=True) if has]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([p.grad for p in trained if p.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))
    if divided := [p for p in everything if is_share(p) and _mesh_size(p) < world_size()]:
        _sum_shares(divided)


def _mesh_size(share: Any) -> int:
    return share.device_mesh.size()


def _sum_shares(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Add the gradients of shares over the ranks that have the same ones."""
    if not all_reduce_max(float(any(parameter.grad is not None for parameter in parameters))):
        return
    with named(f"sum_gradients of {len(parameters)} shares"):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            share: Any = parameter.grad
            dist.all_reduce(share.to_local(), group=across)


def shard(count: int) -> range:
    """Return this rank's share of `count` indices: every world_size-th, starting at its rank."""
    return range(rank(), count, world_size())


def redeal(parts: Sequence[Sequence[T]]) -> list[T]:
    """Return this rank's share of items that `shard` had split, perhaps over another number of ranks.

    Args:
        parts: The items of each of those ranks.
    """
    if len(parts) == world_size():
        return list(parts[rank()])
    items = joined(parts)
    return [items[index] for index in shard(len(items))]


def joined(parts: Sequence[Sequence[T]]) -> list[T]:
    """Return the items that `shard` had split, in their order.

    Args:
        parts: The items of each rank.
    """
    longest = max(map(len, parts), default=0)
    return [part[place] for place in range(longest) for part in parts if place < len(part)]


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut gradients, in their order, into lists of one dtype and device."""
    bucket: list[torch.Tensor] = []
    for gradient in gradients:
        size = sum(other.numel() for other in bucket) + gradient.numel()
        kind = (gradient.dtype, gradient.device)
        if bucket and (size > BUCKET_NUMBERS or kind != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


@contextmanager
def named(work: str) -> Iterator[None]:
    """Make `current_collective` return this meanwhile; turn what gloo and nccl raise into one line."""
    global _current
    before, _current = _current, work
    try:
        yield
    except (RankError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), "")[:200]
        raise RankError(f"{work}: {reason}", work=work) from error
    finally:
        _current = before


def _caller() -> str:
    """Return module, function and line of who called into this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, "contextlib"):
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__", "")).removeprefix("whet.")
    return f"{module}.{frame.f_code.co_qualname}:{frame.f_lineno}"
