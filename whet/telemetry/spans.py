"""Named ranges of a step, which profilers show as its phases. They cost nothing without a listener.

    with span("forward"):
        ...

The listener is by default nobody; under `whet profile` a `Recorder` (times), then `TraceRanges` (torch.profiler); with
WHET_NVTX in the environment `NvtxRanges` (Nsight Systems and Compute; on AMD, the same PyTorch calls reach roctx).
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from whet.types import UserError

STEP = "step"
NAMES: dict[str, str] = {
    STEP: "one whole step",
    "rollout_generation": "completions are sampled",
    "prefill": "prompts are read, first tokens sampled",
    "decode": "one more token for every live row",
    "sample": "tokens are sampled from logits",
    "reward_computation": "completions are graded and scored",
    "advantage_computation": "rewards become advantages",
    "count_experts": "what each expert of a mixture gets, for the load-balancing loss",
    "measure_logprobs": "reference, recomputed policy or critic score the tokens before the first update",
    "policy_loss_backward": "loss of the policy, forward and backward over all micro-batches",
    "value_loss_backward": "the same of the critic",
    "pack": "sequences become micro-batches",
    "forward": "model, head and loss of a micro-batch",
    "head": "logits, or log-probabilities, from hidden states",
    "backward": "gradients of a micro-batch",
    "optimizer_step": "gradients are clipped, weights updated",
    "weight_sync": "the present weights go to a sampler with a copy of them",
    "async_next_rollout": "the next step's rollout, in parallel with the update",
    "policy_update": "the update, in parallel with the next rollout",
    "validate": "held-out problems are answered or scored",
    "log": "metrics and completions are written",
    "save": "checkpoints are written",
}
"""Every range, with its meaning."""

VARIABLE = "WHET_NVTX"
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Listener(Protocol):
    """Called for every range, in the thread that runs it."""

    def enter(self, name: str) -> None:
        """Called when a range begins."""
        ...

    def exit(self, name: str) -> None:
        """Called when it ends."""
        ...


class _Span:
    """A range with a listener."""

    __slots__ = ("_listener", "_name")

    def __init__(self, listener: Listener, name: str) -> None:
        assert name in NAMES, name
        self._listener, self._name = listener, name

    def __enter__(self) -> None:
        self._listener.enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._listener.exit(self._name)


_OFF = nullcontext()
_listener: Listener | None = None


def span(name: str) -> AbstractContextManager[object]:
    """Return a context that is a range of this name, one of `NAMES`."""
    return _OFF if _listener is None else _Span(_listener, name)


def spanned(name: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Make every call of a function a range, as a decorator."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def ranged(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            if _listener is None:
                return function(*arguments, **named)
            with span(name):
                return function(*arguments, **named)

        return ranged

    return decorate


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Replace the listener within this context."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


class NvtxRanges:
    """Pushes ranges to NVTX, and turns on Nsight's capture for some steps.

    The backward pass then runs in the thread that calls it: NVTX ranges belong to threads, and kernels launched by
    another thread would belong to no phase.

    Args:
        first: Steps before the capture.
        count: Captured steps; 0 does not touch the capture.
    """

    def __init__(self, first: int = 0, count: int = 0) -> None:
        self._first, self._count, self._step = first, count, 0

    def enter(self, name: str) -> None:
        """Push a range."""
        if name == STEP:
            torch.autograd.set_multithreading_enabled(False)
            if self._count and self._step == self._first:
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
        torch.cuda.nvtx.range_push(name)

    def exit(self, name: str) -> None:
        """Pop it."""
        torch.cuda.nvtx.range_pop()
        if name == STEP:
            self._step += 1
            if self._count and self._step == self._first + self._count:
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()


class TraceRanges:
    """Writes ranges into the trace of the active torch.profiler."""

    def __init__(self) -> None:
        self._open = threading.local()

    def enter(self, name: str) -> None:
        """Begin a range."""
        entered = torch.profiler.record_function(name).__enter__()
        self._open.__dict__.setdefault("stack", []).append(entered)

    def exit(self, name: str) -> None:
        """End it."""
        if stack := self._open.__dict__.get("stack"):  # else it began before the trace
            stack.pop().__exit__(None, None, None)


@dataclass(frozen=True, slots=True)
class Range:
    """One range that has ended.

    Attributes:
        path: Names from the outermost range around it, in its thread, to its own.
        step: Completed steps when it ended.
        seconds: Its duration. On a GPU by events on its stream, so that nothing synchronises.
    """

    path: tuple[str, ...]
    step: int
    seconds: float


class Recorder:
    """Records how long every range took.

    Args:
        device: The device that does the work.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._open = threading.local()
        self._ended: list[tuple[tuple[str, ...], int, Any, Any]] = []
        self._step = 0

    def enter(self, name: str) -> None:
        """Begin a range."""
        stack = self._open.__dict__.setdefault("stack", [])
        path = (*stack[-1][0], name) if stack else (name,)
        stack.append((path, self._now()))

    def exit(self, name: str) -> None:
        """End it."""
        if stack := self._open.__dict__.get("stack"):  # else it began before the recorder
            end = self._now()
            path, begin = stack.pop()
            self._ended.append((path, self._step, begin, end))
            self._step += path == (STEP,)

    def ranges(self) -> list[Range]:
        """Return the ranges that have ended, in that order."""
        if self._is_cuda:
            torch.cuda.synchronize()
        return [
            Range(path, step, begin.elapsed_time(end) / 1e3 if self._is_cuda else end - begin)
            for path, step, begin, end in self._ended
            if begin is not None and end is not None
        ]

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():  # an event would become part of the graph
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def from_environment(text: str) -> Listener | None:
    """Return the listener at start-up.

    Args:
        text: WHET_NVTX: '' for nobody, 1 for NVTX ranges, 2:3 to capture three steps after the first two as well.

    Raises:
        UserError: If it is anything else, or there is no GPU.
    """
    if not text:
        return None
    found = re.fullmatch(r"1|(\d{1,9}):([1-9]\d{0,8})", text, flags=re.ASCII)
    if found is None:
        raise UserError(
            f"{VARIABLE} = {text!r}: expected 1, or STEPS:STEPS as 2:3 (skip two, capture three); unset it"
        )
    if not torch.cuda.is_available():
        raise UserError(
            f"{VARIABLE} = {text}: this PyTorch sees no GPU, so there are no NVTX ranges; unset it"
        )
    return NvtxRanges(int(found[1] or 0), int(found[2] or 0))


_listener = from_environment(os.environ.get(VARIABLE, ""))
