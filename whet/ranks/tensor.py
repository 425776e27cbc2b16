"""Matrices of a decoder's layers divided among the ranks of a group (tensor parallelism), applied from outside.

What goes into a layer's attention or feed-forward part meets a share of the rows of its first matrices, so that a rank
computes some heads, or some channels, alone; the last matrix has the columns that fit, and its products are added over
the ranks. In the backward pass sums go the other way: each rank's gradients are those of what it computed, and add up
over ranks to the whole ones, for the parameters that every rank has, too.

Source: Megatron-LM 1909.08053 section 3; `torch.distributed.tensor.parallel.parallelize_module`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from whet.kernels.cpu.ops import forget
from whet.ranks import collectives
from whet.ranks.collectives import is_share, named, rank, together, world_size
from whet.ranks.context import group_of

DIVIDED = "_whet_divided"
Side = Literal["rows", "columns"]


class _Sum(torch.autograd.Function):
    """Add over a group; each rank's input is part of all ranks' results, so that gradients are added, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _added(x, group)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _added(upstream[0], ctx.group), None


def _added(x: torch.Tensor, group: Any) -> torch.Tensor:
    # 16-bit products are parts of one sum: they are added in float32, as within a product.
    total = x.detach().to(torch.promote_types(x.dtype, torch.float32), copy=True)
    with named("sum of products"):
        dist.all_reduce(total, group=group)
    return total.to(x.dtype)


def divide_layers(model: nn.Module, plan: Mapping[str, Side], size: int) -> None:
    """Divide matrices among the ranks of each group; all ranks hold the same weights before.

    Args:
        model: The model, changed in place: these matrices become DTensors. One that is divided is left alone.
        plan: Side by which each linear layer's matrix [out, in] is divided, by name: rows where its outputs are.
        size: Ranks of a group.
    """
    if hasattr(model, DIVIDED):
        return
    # Imported here: it takes a second.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import distribute_module
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Rows(ColwiseParallel):  # PyTorch counts the sides of the transposed matrix
        """Products with local tensors, by the same kernels as a whole matrix's."""

        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            return distribute_module(module, device_mesh, self._partition_linear_fn)

    class Columns(RowwiseParallel):
        """The same; what this rank's inputs make is added to the others'."""

        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            return distribute_module(module, device_mesh, self._partition_linear_fn)

    parameter, group = next(model.parameters()), group_of(size)
    mesh = DeviceMesh.from_group(group, parameter.device.type, mesh_dim_names=("tensor",))
    styles = {"rows": Rows(), "columns": Columns()}
    parallelize_module(model, mesh, {name: styles[side] for name, side in plan.items()}, src_data_rank=None)
    modules: list[tuple[nn.Module, Side]] = [(model.get_submodule(name), side) for name, side in plan.items()]
    for module, side in modules:
        _multiply_shares(module, group if side == "columns" else None)
    setattr(model, DIVIDED, _Divided(modules, group))
    if collectives.across is None:
        lists = [list(range(place, world_size(), size)) for place in range(size)]
        groups = [dist.new_group(ranks) for ranks in lists]
        collectives.across = groups[rank() % size]


class _Divided:
    """What is known of a divided model: its matrices, the group that has them, and whether they are whole just now."""

    def __init__(self, modules: list[tuple[nn.Module, Side]], group: Any) -> None:
        self.modules, self.group, self.is_whole = modules, group, False


def _multiply_shares(module: Any, group: Any) -> None:
    """Have a linear layer multiply by its share, and add over a group if there is one."""
    module.__dict__["product"] = partial(_product, module, type(module).product, group)


def _product(module: Any, product: Any, group: Any, x: torch.Tensor, bias: Any) -> torch.Tensor:
    share = _Local(module.weight.to_local(), module.packed)
    y = product(share, x, None if bias is None else bias.to_local())
    return y if group is None else _Sum.apply(y, group)  # pyright: ignore[reportReturnType]


class _Local:
    """What `Linear.product` reads of a layer."""

    def __init__(self, weight: torch.Tensor, packed: object) -> None:
        self.weight, self.packed = weight, packed


@contextmanager
def whole_matrices(model: nn.Module) -> Iterator[None]:
    """Compute without gradients as if a model were not divided; all ranks enter and leave.

    Args:
        model: The model, divided or not.
    """
    own: _Divided | None = getattr(model, DIVIDED, None)
    if own is None or own.is_whole:
        yield
        return
    held = [dict(module._parameters) for module, _ in own.modules]
    with together(f"gather {len(held)} matrices"), torch.no_grad():
        for module, _ in own.modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and is_share(parameter):
                    whole: Any = parameter.detach()
                    module._parameters[name] = nn.Parameter(whole.full_tensor(), requires_grad=False)
            del module.__dict__["product"]
    own.is_whole = True
    try:
        yield
    finally:
        own.is_whole = False
        for (module, side), parameters in zip(own.modules, held, strict=True):
            forget(p for p in module._parameters.values() if p is not None)
            module._parameters.update(parameters)
            _multiply_shares(module, own.group if side == "columns" else None)
