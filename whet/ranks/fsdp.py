"""A model in shards over the ranks (FSDP2), applied from outside: the model's own code does not know of them.

Each rank keeps a share of the rows of every parameter, with its gradient and its optimizer state. A layer's weights are
gathered before it computes and dropped after it; gradients are added and dealt out again (sums: losses are divided by
counts of the whole step). What computes without gradients runs within `gathered`: with all weights at once, then
without collectives, so that ranks may do different amounts of it; or layer by layer, where all take part in every pass.

Source: PyTorch FSDP 2304.11277; `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from whet.kernels.cpu.ops import forget
from whet.ranks.collectives import (
    all_reduce_max,
    all_reduce_sum,
    before_collectives,
    gather_json,
    is_share,
    rank,
    together,
    world_size,
)
from whet.ranks.tensor import whole_matrices
from whet.types import UserError

Item = TypeVar("Item")
SHARDING = "_whet_sharding"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks of a run (torchrun) hold the model."""

    kind: Literal["replicate", "fsdp"] = "replicate"
    """replicate: every rank holds all of it; fsdp: a share of each parameter, its gradient and optimizer state."""
    reshard: bool = True
    """With kind = fsdp: drop a layer's weights after its forward pass and gather them again for the backward pass: the
    least memory; false keeps them for all micro-batches of a step, which takes the fewest exchanges."""
    gather: Literal["whole", "layer"] = "whole"
    """With kind = fsdp, what samples and scores: whole gathers all weights once per phase; layer gathers them layer by
    layer in every pass, for a model that no rank can hold."""
    replicas: int = 1
    """With kind = fsdp: groups of ranks that each hold the whole model in shards (HSDP), such as one per node; within a
    group ranks follow each other."""
    reduce: Literal["auto", "float32"] = "auto"
    """With kind = fsdp: dtype in which gradients are added; auto takes that of the parameters."""
    prefetch: int = 0
    """With kind = fsdp: layers that are gathered ahead of the one that computes; 0 leaves it to PyTorch."""
    offload: bool = False
    """With kind = fsdp: keep shards, gradients and optimizer state in host memory, on GPUs."""
    context: int = 1
    """Ranks that compute each micro-batch together, each some positions of every sequence, for sequences whose training
    one rank has no memory for; ranks of a group follow each other."""
    tensor: int = 1
    """Ranks that divide the layers' matrices in training (tensor parallelism), for wide models on one node; ranks of a
    group follow each other."""
    balance: Literal["auto", "on", "off"] = "auto"
    """Deal a step's sequences out to the ranks by estimated work, in as many micro-batches each; auto: where ranks wait
    for each other in every layer (kind = fsdp, context or tensor above 1), else each rank trains on what it drew."""

    def __post_init__(self) -> None:
        for name, least in (("replicas", 1), ("prefetch", 0), ("context", 1), ("tensor", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"parallel.{name} = {getattr(self, name)}: expected {least} or more")
        own = {"context", "tensor", "balance"}
        default = {name: item.default for name, item in self.__dataclass_fields__.items() if name not in own}
        changed = [name for name, value in default.items() if getattr(self, name) != value]
        if self.kind == "replicate" and changed:
            raise ValueError(
                f"parallel.{changed[0]} is read with parallel.kind = fsdp only; leave it out, or set the kind"
            )
        if self.tensor > 1 and (self.kind == "fsdp" or self.context > 1):
            other = "kind = fsdp" if self.kind == "fsdp" else f"context = {self.context}"
            raise ValueError(
                f"parallel.tensor = {self.tensor} with parallel.{other}: each divides the same passes in its own way; "
                "leave one out"
            )
        if self.tensor > 1 and self.balance == "off":
            raise ValueError(
                f"parallel.balance = off with parallel.tensor = {self.tensor}: ranks that share micro-batches deal "
                "them out together; leave it out"
            )
        if self.context > 1 and self.balance == "off":
            raise ValueError(
                f"parallel.balance = off with parallel.context = {self.context}: ranks that share micro-batches deal "
                "them out together; leave it out"
            )


def is_balanced(config: ParallelConfig) -> bool:
    """Say whether the ranks deal a step's sequences out together."""
    waits = config.kind == "fsdp" or config.context > 1 or config.tensor > 1
    return config.balance == "on" or (config.balance == "auto" and waits)


@dataclass(slots=True)
class Sharding:
    """What is known of a sharded model.

    Attributes:
        config: How it is sharded.
        parts: What is gathered by itself: the model (with what is in no layer), then its layers.
        classes: Class of each part before.
        device: Where it computes.
        is_open: Whether `gathered` is at work.
    """

    config: ParallelConfig
    parts: list[Any]
    classes: list[type]
    device: torch.device
    is_open: bool = field(default=False)


def sharding(model: nn.Module) -> Sharding | None:
    """Return what is known of a sharded model; None of one that is not."""
    return getattr(model, SHARDING, None)


def shard_model(
    model: nn.Module,
    layers: Sequence[nn.Module],
    config: ParallelConfig,
    *,
    replicated: Sequence[nn.Parameter] = (),
    device: torch.device | None = None,
) -> None:
    """Shard a model's parameters over the ranks, layer by layer; all ranks hold the same weights before.

    Args:
        model: The model, changed in place: its parameters become DTensors.
        layers: Its layers, each of which is gathered by itself.
        config: How. Does nothing where it asks for replicas, or there is one process.
        replicated: Parameters that every rank keeps whole, such as adapters.
        device: Where the shares of a model on the meta device are made, uninitialised; default: where the model is.

    Raises:
        UserError: If the ranks cannot be divided into that many groups, or there is no GPU to spare the memory of.
    """
    if config.kind != "fsdp" or world_size() == 1 or sharding(model) is not None:
        return
    # Imported here: it takes a second.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    is_empty = next(model.parameters()).device.type == "meta"
    device = device or next(model.parameters()).device
    if world_size() % config.replicas:
        raise UserError(
            f"parallel.replicas = {config.replicas}: expected a divisor of the {world_size()} ranks"
        )
    if config.offload and device.type == "cpu":
        raise UserError(
            "parallel.offload = true on a CPU: expected a GPU, whose memory it spares; leave it out"
        )
    size = world_size() // config.replicas
    shape, names = (
        ((size,), ("shard",)) if config.replicas == 1 else ((config.replicas, size), ("replicas", "shard"))
    )
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, shape, mesh_dim_names=names),
        "mp_policy": MixedPrecisionPolicy(
            reduce_dtype=torch.float32 if config.reduce == "float32" else None, cast_forward_inputs=False
        ),
        "ignored_params": set(replicated),
    }
    if config.offload:
        options["offload_policy"] = CPUOffloadPolicy()
    parts = [model, *layers]
    found = Sharding(config, parts, [type(part) for part in parts], device)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=config.reshard, **options)
    fully_shard(model, **options)  # embeddings, last norm and head, which is read after the forward pass
    for place, part in enumerate(found.parts):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
        # Gathering writes without PyTorch's version counter, so packed copies of the step before would be taken.
        part.register_forward_pre_hook(_forget)
        if config.prefetch and place:
            ahead, behind = found.parts[place + 1 :], found.parts[1:place][::-1]
            part.set_modules_to_forward_prefetch(ahead[: config.prefetch])
            part.set_modules_to_backward_prefetch(behind[: config.prefetch])
    if is_empty:
        model.to_empty(device="cpu" if config.offload else device)
    setattr(model, SHARDING, found)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")


def _forget(module: nn.Module, _: object) -> None:
    forget(module.parameters())


@contextmanager
def gathered(*models: nn.Module | None) -> Iterator[None]:
    """Compute without gradients within a `with` block, where weights are sharded; all ranks enter and leave it.

    With `parallel.gather = whole` a rank may run any number of passes, and models are as if they were not sharded. With
    'layer' a rank that leaves the block, or waits for the others in it, takes part in the passes of those that go on.

    Args:
        models: What computes; None and models that are not sharded are left alone.
    """
    found = [
        (m, own) for m in models if m is not None and (own := sharding(m)) is not None and not own.is_open
    ]
    with ExitStack() as stack:
        for model in filter(None, models):
            stack.enter_context(whole_matrices(model))
        for _, own in found:
            own.is_open = True
            stack.callback(setattr, own, "is_open", False)
            if own.config.gather == "whole":
                stack.enter_context(_whole(own))
        if turns := [own for _, own in found if own.config.gather == "layer"]:
            stack.enter_context(_in_turn(turns))
        yield


@contextmanager
def _whole(own: Sharding) -> Iterator[None]:
    """Gather all weights; the modules lose FSDP's class and hooks, which would rule out the fast paths, meanwhile."""
    hooks = [(part._forward_pre_hooks, part._forward_hooks) for part in own.parts]
    classes = [type(part) for part in own.parts]
    with together(f"gather {len(own.parts)} parts"):
        for part in own.parts:
            part.unshard()
    for part, plain in zip(own.parts, own.classes, strict=True):
        forget(part.parameters())
        part.__class__ = plain
        part._forward_pre_hooks, part._forward_hooks = type(hooks[0][0])(), type(hooks[0][1])()
    try:
        yield
    finally:
        for part, kind, (before, after) in zip(own.parts, classes, hooks, strict=True):
            forget(part.parameters())
            part.__class__ = kind
            part._forward_pre_hooks, part._forward_hooks = before, after
            part.reshard()


@contextmanager
def _in_turn(models: Sequence[Sharding]) -> Iterator[None]:
    """Gather weights layer by layer, in passes of which all ranks take part.

    What is in no layer (embeddings, head) stays gathered, as the head is read outside of the pass.
    """
    with ExitStack() as stack:
        for number, own in enumerate(models, start=1):
            with together(f"gather {len(own.parts)} parts in turn"):
                # Once outside of inference mode, in which PyTorch would make tensors that cannot train.
                for part in own.parts:
                    part.unshard()
                    part.reshard()
                own.parts[0].unshard()
            stack.callback(own.parts[0].reshard)
            for part in own.parts[1:]:
                part.set_reshard_after_forward(True, recurse=False)
                stack.callback(part.set_reshard_after_forward, own.config.reshard, recurse=False)
            handle = own.parts[0].register_forward_pre_hook(partial(_announcing, number), prepend=True)
            stack.callback(handle.remove)

        def take_part() -> None:
            while number := _announce(0):
                for part in models[number - 1].parts[1:]:
                    part.unshard()
                    part.reshard()

        with before_collectives(take_part):
            yield
            take_part()


def _announcing(number: int, *_: object) -> None:
    _announce(number)


def _announce(number: int) -> int:
    """Tell the other ranks which model this rank runs next, 0 for none; return which one any rank runs."""
    with before_collectives(None):
        return int(all_reduce_max(float(number)))


def evened(items: Sequence[Item], model: nn.Module) -> list[Item | None]:
    """Return micro-batches with as many None behind them as the rank with most has more, where weights are sharded.

    Args:
        items: This rank's.
        model: The model that they are read by.
    """
    if sharding(model) is None:
        return list(items)
    return [*items, *[None] * (int(all_reduce_max(float(len(items)))) - len(items))]


def begin_backward(model: nn.Module, *, is_last: bool) -> None:
    """Say whether a micro-batch's is the last backward pass of a step: gradients are exchanged then, or each time.

    Args:
        model: The model, sharded or not.
        is_last: Whether it is.
    """
    own = sharding(model)
    if own is not None and not own.config.reshard:
        own.parts[0].set_requires_gradient_sync(is_last)
        own.parts[0].set_reshard_after_backward(is_last)


def outer_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters of a sharded model that are in no layer."""
    own = sharding(model)
    inner = set() if own is None else {id(p) for part in own.parts[1:] for p in part.parameters()}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in inner]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of a tensor, without its graph: of one that is not sharded, itself."""
    return cast(Any, tensor.detach()).to_local() if is_share(tensor) else tensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor, on every rank; all ranks call it."""
    return cast(Any, tensor.detach()).full_tensor() if is_share(tensor) else tensor


def like(share: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a rank's share of something that has a parameter's shape (a moment) as the parameter is sharded.

    Args:
        share: The share; the result is a view of it.
        parameter: The parameter; where it is not sharded, `share` is returned.
    """
    if not is_share(parameter):
        return share
    from torch.distributed.tensor import DTensor

    whole = cast(Any, parameter)
    return DTensor.from_local(
        share.view(local(parameter).shape),
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def share_of(source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return of a tensor, sharded or whole, this rank's part, as of another one."""
    if not is_share(like):
        return source
    return local(source) if is_share(source) else source.detach()[part_of(like)]


@torch.no_grad()
def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor, or this rank's share of it, into another one.

    Args:
        target: What is overwritten, sharded or not.
        source: Sharded as the target is, or whole.
    """
    local(target).detach().copy_(share_of(source, target))


def part_of(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return the part of a sharded tensor that this rank holds, by axis."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole = cast(Any, tensor)
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, whole.device_mesh, whole.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def places_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return for each axis the places in the whole tensor, sharded or not, of what this rank holds (int64)."""
    if not is_share(tensor):
        return [torch.arange(size) for size in tensor.shape]
    return [torch.arange(part.start, part.stop) for part in part_of(tensor)]


def rows_of(tensor: torch.Tensor) -> slice:
    """Return the rows of a tensor, sharded by rows, that this rank holds."""
    return part_of(tensor)[0]


def sum_over_shares(parameters: Sequence[torch.Tensor], values: Sequence[float]) -> float:
    """Add numbers that each were computed of one parameter's (share's) gradient, over all ranks.

    Args:
        parameters: The parameters; those that are not sharded have the same number on all ranks, which counts once.
        values: The numbers.
    """
    pairs = list(zip(parameters, values, strict=True))
    mine = [value for parameter, value in pairs if is_share(parameter)]
    rest = sum(value for parameter, value in pairs if not is_share(parameter))
    if world_size() == 1 or not any(map(is_share, parameters)):
        return rest
    mesh = cast(Any, next(filter(is_share, parameters))).device_mesh
    # Those of one mesh (HSDP), or groups that divide matrices.
    replicas = mesh.size(0) if mesh.ndim > 1 else world_size() // mesh.size()
    return rest + all_reduce_sum(sum(mine))[0] / replicas


def whole_copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather tensors one by one into rank 0's host memory; the other ranks, which must call it too, get empty ones.

    Args:
        tensors: By name, the same names on all ranks; what is not sharded is returned as it is.
    """
    if not any(map(is_share, tensors.values())):
        return dict(tensors)
    found: dict[str, torch.Tensor] = {}
    with together(f"whole_copies of {len(tensors)} tensors"):
        for name, tensor in tensors.items():
            if not is_share(tensor):
                found[name] = tensor.detach()
                continue
            whole = full(tensor)
            found[name] = whole.cpu() if rank() == 0 else whole.new_empty(0, device="cpu")
    return found


def agreed(text: str) -> str:
    """Return the first text of any rank that is not empty."""
    return next(filter(None, gather_json(text)), "") if world_size() > 1 else text
