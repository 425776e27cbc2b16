"""Weights from a trainer to processes that sample, by broadcast: over gloo between CPUs, over NCCL between GPUs.

The group is none of torch.distributed's default world: trainer and samplers are started apart, and each may have ranks
of its own. It meets as groups of OpenRLHF, verl and SGLang do (`init_custom_process_group`): the same store, with the
same prefixes as `torch.distributed.distributed_c10d._new_process_group_helper` makes, so either side may be theirs.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from whet.types import UserError

Backend = Literal["gloo", "nccl"]
DEVICES: dict[Backend, str] = {"gloo": "cpu", "nccl": "cuda"}
"""Where the tensors of each are."""
TRAINER = 0
"""Rank of the one that sends."""


class WeightGroup:
    """A trainer, rank 0, and processes that receive what it sends.

    Args:
        address: The trainer's address, as the others reach it.
        port: Where it waits for them.
        rank: This process's rank; 0 sends.
        size: Processes in the group.
        name: Name of the group, the same everywhere.
        backend: gloo for CPU tensors, nccl for those on GPUs.
        timeout_s: Seconds that one waits for the others, here and in each transfer.

    Raises:
        UserError: If they do not meet in time.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        rank: int,
        size: int,
        name: str,
        backend: Backend = "gloo",
        timeout_s: float = 600.0,
    ) -> None:
        limit = timedelta(seconds=timeout_s)
        self.backend: Backend = backend
        self._rank = rank
        try:
            self._store = TCPStore(address, port, size, rank == TRAINER, timeout=limit)
            prefixed: Store = self._store
            for prefix in (name, f"{name}/", f"{DEVICES[backend]}/"):
                prefixed = PrefixStore(prefix, prefixed)
            kind: Any = (
                dist.ProcessGroupGloo if backend == "gloo" else getattr(dist, "ProcessGroupNCCL", None)
            )
            if kind is None:
                raise UserError("weights by NCCL: this PyTorch has none; use gloo, or files")
            self._group = kind(prefixed, rank, size, limit)
        except (RuntimeError, ValueError, OSError) as error:  # of the store, of the address, of the backend
            told = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(
                f"the group for weights at {address} port {port} does not meet: {told[:200]}"
            ) from None

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors to all others, one after the other; only the trainer does.

        Raises:
            UserError: If somebody is gone, or late.
        """
        assert self._rank == TRAINER
        self._broadcast(tensor.detach().to(DEVICES[self.backend]).contiguous() for tensor in tensors)

    def receive(self, outline: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
        """Return what the trainer sends.

        Args:
            outline: Dtype and shape of each tensor, in the order in which they come.

        Raises:
            UserError: If somebody is gone, or late.
        """
        found = {
            name: torch.empty(shape, dtype=dtype, device=DEVICES[self.backend])
            for name, (dtype, shape) in outline.items()
        }
        self._broadcast(found.values())
        return found

    def _broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = TRAINER, 0
        try:
            for tensor in tensors:
                self._group.broadcast([tensor], options).wait()
        except RuntimeError as error:
            told = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise UserError(
                f"weights by broadcast: a process of the group is gone or late: {told[:200]}"
            ) from None

    def close(self) -> None:
        """Leave the group."""
        del self._group
        del self._store


def free_port(address: str) -> int:
    """Return a port that is free at one of this machine's addresses.

    Raises:
        UserError: If the address is not this machine's.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
            free.bind((address, 0))
            return free.getsockname()[1]
    except OSError as error:
        raise UserError(f"{address}: no address of this machine ({error.strerror or error})") from None


def address_towards(host: str, port: int) -> str:
    """Return this machine's address as a server at `host` sees it: that of the interface that leads there.

    Raises:
        UserError: If there is no way to it.
    """
    try:
        kind, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            return probe.getsockname()[0]
    except OSError as error:
        raise UserError(f"{host}: no way to it ({error.strerror or error})") from None
