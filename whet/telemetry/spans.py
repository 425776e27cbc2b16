"""Named ranges of a step: what profilers show as its phases. They cost nothing until somebody listens.

    with span("forward"):
        ...

Who listens: nobody; under `whet profile` a `Recorder` (times), then `TraceRanges` (torch.profiler); with WHET_NVTX in
the environment `NvtxRanges` (Nsight Systems and Compute; on AMD, PyTorch's same calls reach roctx).
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
    STEP: "everything of one step",
    "rollout_generation": "completions are drawn",
    "prefill": "prompts are read, first tokens drawn",
    "decode": "one token more of every live row",
    "sample": "tokens are drawn from logits",
    "reward_computation": "completions are graded and scored",
    "advantage_computation": "rewards become advantages",
    "measure_logprobs": "reference, recomputed policy or critic score the tokens before the first update",
    "policy_loss_backward": "loss of the policy, forward and backward over all micro-batches",
    "value_loss_backward": "the same of the critic",
    "pack": "sequences become micro-batches",
    "forward": "model, head and loss of a micro-batch",
    "head": "logits, or log-probabilities, from hidden states",
    "backward": "gradients of a micro-batch",
    "optimizer_step": "gradients are clipped, weights updated",
    "async_next_rollout": "the next step's rollout, beside the update",
    "policy_update": "the update beside which the next rollout is drawn",
    "validate": "held-out problems are answered or scored",
    "log": "metrics and completions are written",
    "save": "checkpoints are written",
}
"""Every range, with its meaning. Those of source 001 (its NVTX ranges) keep its names exactly."""

VARIABLE = "WHET_NVTX"
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Listener(Protocol):
    """Who is told of every range, in the thread that runs it."""

    def enter(self, name: str) -> None:
        """A range begins."""
        ...

    def exit(self, name: str) -> None:
        """It ends."""
        ...


class _Span:
    """A range that somebody listens to."""

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
    """Let somebody listen, instead of who does now."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


class NvtxRanges:
    """Pushes ranges to NVTX, and turns the capture of Nsight on for some steps.

    The backward pass then runs in the thread that calls it: NVTX ranges belong to threads, and the kernels of another
    one would belong to no phase.

    Args:
        first: Steps before the capture.
        count: Steps that are captured; 0 leaves the capture alone.
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
    """Writes ranges into the trace of the torch.profiler that runs."""

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
        step: Steps that had ended when it ended.
        seconds: How long it took. On a GPU by the clock of its stream, so that nobody has to wait for kernels.
    """

    path: tuple[str, ...]
    step: int
    seconds: float


class Recorder:
    """Records how long every range took.

    Args:
        device: Where the work is done.
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
        """Return what has ended, in that order."""
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
        if torch.cuda.is_current_stream_capturing():  # a mark would become a part of the graph
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def from_environment(text: str) -> Listener | None:
    """Return who listens from the start.

    Args:
        text: WHET_NVTX: '' for nobody, 1 for NVTX ranges, 2:3 to capture three steps after the first two as well.

    Raises:
        UserError: If it is anything else, or there is no GPU whose tools would see ranges.
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
