"""Activation checkpointing: what of a layer is kept for the backward pass, what is computed again, and where."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from whet.kernels.cpu import ops as cpu
from whet.model.parts import Layer

CheckpointKind = Literal["layer", "mlp", "alternate"]


def _nothing() -> None:  # a lambda could not be sent to another process
    return None


class Recompute:
    """How layers run when neither their activations nor, on a CPU, their packed weights are kept.

    Args:
        kind: 'layer' keeps a layer's input alone; 'mlp' keeps what attention keeps and its output, and computes the
            feed-forward part again; 'alternate' does as 'layer' with every second layer.
        offload: Keep the inputs in pinned host memory: copied there beside the computation, and back one layer ahead.
    """

    def __init__(self, kind: CheckpointKind = "layer", *, offload: bool = False) -> None:
        self._kind: CheckpointKind = kind
        self._offload = offload
        self._last: Callable[[], _Kept | None] = _nothing

    def run(self, layer: Layer, x_ND: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Return what a layer returns.

        Args:
            layer: A decoder layer.
            x_ND: Its input.
            rest: Its other arguments; the last one is its place.
        """
        index: int = rest[-1]
        if self._kind == "alternate" and index % 2 == 0:
            return layer(x_ND, *rest)
        if self._kind == "mlp":
            x_ND = layer.mix(x_ND, *rest)
            return _checkpoint(_unpacked(layer.mlp, layer.feed), x_ND, *rest)
        if not self._offload:
            return _checkpoint(_unpacked(layer, layer), x_ND, *rest)
        kept = _Kept(x_ND, self._last() if index else None)
        self._last, first = weakref.ref(kept), [x_ND]
        # The first call is the forward pass. The next one is its repetition, whose input must not be held until then.
        return _checkpoint(lambda *rest: layer(first.pop() if first else kept.fetch(), *rest), *rest)


def _unpacked(part: nn.Module, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Give back the packed copies of a part's weights after its forward pass: to pack them takes less than to read."""

    def run(*arguments: object) -> torch.Tensor:
        try:
            return function(*arguments)
        finally:  # the repetition ends early, by an exception, when the last activation is there
            cpu.forget(part.parameters())

    return run


def _checkpoint(function: Callable[..., torch.Tensor], *arguments: object) -> torch.Tensor:
    """Run a function whose saved tensors are computed again in the backward pass; nothing in it is random.

    As `torch.utils.checkpoint.checkpoint(use_reentrant=False)`, which imports PyTorch's compiler: 3 s, and 100 MB of
    what it is to save.
    """
    again = _Again(function, arguments)
    with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
        return function(*arguments)


class _Again:
    """The saved tensors of one call: none until the backward pass asks for the first, then all by another call."""

    def __init__(self, function: Callable[..., torch.Tensor], arguments: tuple[object, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._count, self._tensors = 0, dict[int, torch.Tensor]()
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self._autocast = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in kinds]

    def pack(self, _: torch.Tensor) -> int:
        """Take note of a saved tensor instead of keeping it."""
        self._count += 1
        return self._count - 1

    def unpack(self, place: int) -> torch.Tensor:
        """Return a saved tensor, once."""
        if place not in self._tensors:
            with suppress(_AllThereError), ExitStack() as stack:
                for kind, dtype, is_on in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
                stack.enter_context(torch.enable_grad())
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, _none))
                self._function(*(_leaf(argument) for argument in self._arguments))
            assert len(self._tensors) == self._count, "a recomputed layer saved other tensors"
        return self._tensors.pop(place)

    def _keep(self, tensor: torch.Tensor) -> None:
        self._tensors[len(self._tensors)] = tensor.detach()
        if len(self._tensors) == self._count:
            raise _AllThereError


class _AllThereError(Exception):
    """Ends the repetition of a call when all that it saves is there."""


def _leaf(argument: object) -> object:
    """Cut a tensor off from its graph: the repetition's own graph is never used."""
    return (
        argument.detach().requires_grad_(argument.requires_grad)
        if isinstance(argument, torch.Tensor)
        else argument
    )


def _none(_: object) -> torch.Tensor:
    raise AssertionError("the repetition's graph is never run")


class _Kept:
    """A layer's input in host memory.

    It stays on the device, too, until the next layer's is kept: so the last one never comes back, and memory is used
    again only when the copy is done.

    Args:
        x_ND: The input.
        previous: That of the layer before.
    """

    def __init__(self, x_ND: torch.Tensor, previous: _Kept | None) -> None:
        self._needs_grad = x_ND.requires_grad
        self._device = x_ND.device
        self._here: torch.Tensor | None = x_ND.detach()
        self._host = torch.empty(x_ND.shape, dtype=x_ND.dtype, pin_memory=x_ND.is_cuda)
        self._copied = _copy(self._host, self._here)
        self._previous = (lambda: None) if previous is None else weakref.ref(previous)
        if previous is not None:
            _wait(previous._copied, previous._device)
            previous._here = None

    def __del__(self) -> None:
        """Let the memory be used again only when the copy is done, also where a backward pass was given up."""
        _wait(self._copied, self._device)

    def fetch(self) -> torch.Tensor:
        """Return the input on the device, and begin to bring the one before it."""
        self._bring()
        previous = self._previous()
        if previous is not None:
            previous._bring()
        _wait(self._copied, self._device)
        here, self._here = self._here, None
        assert here is not None
        return here.requires_grad_(self._needs_grad)

    def _bring(self) -> None:
        if self._here is None:
            self._here = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)
            self._copied = _copy(self._here, self._host)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Event | None:
    """Copy beside the computation, after what is under way now; return what tells of its end."""
    device = source.device if source.is_cuda else target.device
    if device.type != "cuda":
        target.copy_(source)
        return None
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
        return side.record_event()


def _wait(event: torch.Event | None, device: torch.device) -> None:
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
