"""Overlap of rollout and update: it changes when the work of a step is done, never its results.

`async`: the next step's groups are sampled in a thread from a copy of the weights while this step's update runs; they
are one step stale, which their recorded log-probabilities show and the ratio corrects. A thread suffices, because
PyTorch and the kernels release the GIL while they compute; one thread with two CUDA streams would not, because the host
waits for each decode step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from whet.algo.config import OffPolicyConfig
from whet.config import Removed
from whet.generate.backends.base import CopySampler
from whet.generate.policy import Policy
from whet.model.quant import packed_tensors
from whet.model.transformer import LanguageModel
from whet.train.optim.step import OptimConfig

Mode = Literal["off", "async"]
ASYNC = "use mode = async with off_policy.staleness = 1, or off"


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """Parts of a step that run in parallel."""

    mode: Mode = "off"
    """off: sample, score, train in sequence; async: sample the next step's groups while this one is trained on (with
    off_policy.staleness)."""

    RENAMED = {"mode=stream": Removed(None, ASYNC), "num_parts": Removed(4, ASYNC)}


def check_overlap(overlap: OverlapConfig, off_policy: OffPolicyConfig, optim: OptimConfig) -> None:
    """Refuse settings that would not compute the same in parallel.

    Args:
        overlap: The overlap settings.
        off_policy: Staleness of the samples.
        optim: The update's settings.

    Raises:
        ValueError: One line: what, why, and what to change.
    """
    mode = overlap.mode
    if mode != "off" and optim.compile:
        raise ValueError(
            f"overlap.mode = {mode} with optim.compile: PyTorch's compiler does not support two threads; leave one out"
        )
    if mode == "async" and not off_policy.staleness:
        raise ValueError(
            "overlap.mode = async with off_policy.staleness = 0: samples drawn during an update come from the weights "
            "before it; set off_policy.staleness to 1"
        )


class BackgroundSampler:
    """Samples in a background thread, from a copy of the weights as of the last `refresh`; on a GPU on its own stream.

    Args:
        policy: The trained policy.
        sampler: What samples in place of an engine here, with a copy of its own.

    Attributes:
        policy: The sampling policy.
        engine: Its engine, or the sampler.
        overlap: Share of the last rollout's seconds that was hidden behind other work.
    """

    def __init__(self, policy: Policy, *, sampler: CopySampler | None = None) -> None:
        self._trained, self._is_own = policy.model, sampler is None
        self.policy = policy
        if sampler is None:
            self.policy = copy.copy(policy)
            self.policy.model = _twin(policy.model)
        self.engine = sampler or self.policy.engine(trains=True)
        self.overlap = 0.0
        self._pool = ThreadPoolExecutor(1, "whet-rollout")
        self._job: Future[tuple[Any, float]] | None = None
        is_cuda = policy.device.type == "cuda"
        self._stream = torch.cuda.Stream(policy.device, priority=-1) if is_cuda else None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights of the trained policy."""
        if self._is_own:
            for mine, theirs in zip(self.policy.model.parameters(), self._trained.parameters(), strict=True):
                if theirs.requires_grad:
                    mine.copy_(theirs)

    def start(self, work: Callable[[], Any]) -> None:
        """Start the background job; the previous one must be done."""
        assert self._job is None
        event = None
        if self._stream is not None:  # wait for the caller's pending writes to the weights
            event = torch.cuda.current_stream(self._stream.device).record_event()
        self._job = self._pool.submit(self._run, work, event)

    def wait(self) -> tuple[Any, float]:
        """Return the background job's result and seconds; re-raise its exception."""
        assert self._job is not None
        began = time.perf_counter()
        job, self._job = self._job, None
        result, seconds = job.result()
        waited = time.perf_counter() - began
        self.overlap = min(1.0, max(0.0, 1.0 - waited / max(seconds, 1e-9)))
        return result, seconds

    @contextmanager
    def sharing_threads(self) -> Iterator[None]:
        """Compute with half of the CPU threads; the other half belongs to the background job, if it computes here."""
        count = torch.get_num_threads()
        if self._stream is None and self._is_own:
            torch.set_num_threads(max(1, count // 2))
        try:
            yield
        finally:
            torch.set_num_threads(count)

    def pop_overlap(self) -> float:
        """Return `overlap`, and reset it to 0 until the next rollout."""
        overlap, self.overlap = self.overlap, 0.0
        return overlap

    def close(self) -> None:
        """Wait for running work, ignoring its outcome, and end the thread."""
        self._pool.shutdown()

    def _run(self, work: Callable[[], Any], event: Any) -> tuple[Any, float]:
        began = time.perf_counter()
        with torch.cuda.stream(self._stream):  # no-op without a stream
            if self._stream is not None and event is not None:
                self._stream.wait_event(event)
            result = work()
            if self._stream is not None:
                self._stream.synchronize()
        return result, time.perf_counter() - began


def _twin(model: LanguageModel) -> LanguageModel:
    """Copy the modules of a model, with their modes and autocast's cached casts; what is not trained is shared."""
    known = {
        id(parameter): torch.nn.Parameter(
            parameter.detach().clone() if parameter.requires_grad else parameter.detach(),
            parameter.requires_grad,
        )
        for parameter in model.parameters()
    }
    shared = {id(tensor): tensor for _, tensor in packed_tensors(model)}  # nothing ever changes them
    return copy.deepcopy(model, known | shared)
