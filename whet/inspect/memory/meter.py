"""Measures the memory of one real step with the longest sequences, to compare with a plan."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whet.algo.packing import TrainingSequence
from whet.generate.activations import Activations
from whet.generate.engine import Engine
from whet.generate.policy import Policy
from whet.generate.rows import Completion, Request
from whet.inspect.memory.phases import Phase, Workload
from whet.model.transformer import LanguageModel
from whet.model.vision.pixels import Preprocessing
from whet.model.vision.store import Picture
from whet.train.objective.objective import Objective
from whet.train.optim.step import Optimizer, prepare_model
from whet.train.rl_config import RLConfig
from whet.train.rollout.source import KEPT_CACHE
from whet.train.sft import SFTConfig, train_step
from whet.types import Group, Problem, Sample, UserError


class LiveTensors(TorchDispatchMode):
    """Meter of live tensors: counts every storage once, from the operation that returns it until it is freed.

    Temporary allocations inside an operation are not counted.

    Args:
        device: Only storages on it are counted.

    Attributes:
        now: Live bytes.
        peak: Peak of live bytes since the start, or since `restart`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._device = device
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor that existed before the meter."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()  # pyright: ignore[reportPrivateUsage]
        if tensor.device.type != self._device.type or key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def restart(self) -> int:
        """Return the peak, and reset it to the live bytes."""
        before, self.peak = self.peak, self.now
        return before

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


class _CudaPeak(AbstractContextManager["_CudaPeak"]):
    """The same as `LiveTensors` from PyTorch's GPU allocator, which also counts temporary allocations."""

    def __exit__(self, *_: object) -> None:
        return

    def restart(self) -> int:
        """Return the peak, and reset it."""
        torch.cuda.synchronize()
        before = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return before


def measure(run: RLConfig | SFTConfig, policy: Policy, work: Workload) -> dict[str, int]:
    """Run one real step of the longest sequences and return the peak of live bytes in each phase.

    Args:
        run: The recipe; nothing is written.
        policy: Its policy, loaded; the step changes it.
        work: The predicted workload.
    """
    prepare_model(policy.model, run.optim)
    meter = LiveTensors(policy.device) if policy.device.type == "cpu" else _CudaPeak()
    found: dict[str, int] = {}
    with meter:
        if isinstance(meter, LiveTensors):
            for tensor in (*policy.model.parameters(), *policy.model.buffers()):
                meter.add(tensor)
        optimizer = Optimizer(policy.model, run.optim)
        step = _metered(optimizer, meter, found)
        meter.restart()
        if isinstance(run, SFTConfig):
            first = 1 + max(1, work.image_tokens)  # an image is never trained on
            ids = [_prompt(place, work.length, policy.model, work) for place in range(work.num_sequences)]
            train_step(
                policy,
                [TrainingSequence(prompt_ids=i[:first], completion_ids=i[first:]) for i in ids],
                run.optim,
            )
            step(run.optim.lr)
            return found
        objective = Objective.of(run, policy, value=replace(run.value, warmup_steps=0))
        policy.max_rows = work.rows
        policy.activations = Activations(int(work.kept_gib * 2**30)) if work.kept_bytes else None
        engine = policy.engine(stops=False, trains=True)
        groups = _longest_groups(run, engine, work)
        engine.release(above=KEPT_CACHE)
        found["rollout"] = meter.restart()
        objective.update(groups, optimizer, run.optim.lr)
        meter.restart()
        short = replace(run, sampling=replace(run.sampling, max_new_tokens=2))
        _longest_groups(short, engine, work)  # now with everything that the update has allocated
        found["rollout"] = max(found["rollout"], meter.restart())
    return found


def _metered(
    optimizer: Optimizer, meter: LiveTensors | _CudaPeak, found: dict[str, int]
) -> Callable[..., float]:
    """Make the optimizer's step end the previous phase, and record its own."""
    plain = optimizer.step

    def step(lr: float, *, loss: float = 0.0) -> float:
        found["backward"] = max(found.get("backward", 0), meter.restart())
        norm = plain(lr, loss=loss)
        found["optimizer step"] = max(found.get("optimizer step", 0), meter.restart())
        return norm

    optimizer.step = step
    return step


def _longest_groups(run: RLConfig, engine: Engine, work: Workload) -> list[Group]:
    """Sample the longest completions of the longest prompts, with advantages of both signs."""
    prompts = [
        _prompt(place, work.length - work.num_trained, engine.model, work) for place in range(run.num_prompts)
    ]
    requests = [
        Request(prompt_ids=prompt, seeds=tuple(range(place * run.group_size, (place + 1) * run.group_size)))
        for place, prompt in enumerate(prompts)
    ]

    def sample(prompt: tuple[int, ...], index: int, done: Completion) -> Sample:
        return Sample(
            uid="",
            index=index,
            prompt_ids=prompt,
            completion_ids=done.ids,
            sampler_logprobs=done.logprobs,
            kept=done.kept,
            experts=done.experts,
            text="",
            finish_reason="length",
            reward=float(index % 2),
            advantage=1.0 if index % 2 else -1.0,
        )

    return [
        Group(
            problem=Problem(uid=str(place), task="plan", prompt="", answer=""),
            samples=tuple(sample(prompts[place], index, done) for index, done in enumerate(row)),
        )
        for place, row in enumerate(engine.generate(requests, run.sampling))
    ]


def _prompt(place: int, length: int, model: LanguageModel, work: Workload) -> tuple[int, ...]:
    """Return tokens that start differently for every index, of an image if there are some, behind the first token."""
    seen = ()
    if work.image_tokens and model.images is not None:
        seen = model.images.add(_picture(place, model.images.preprocessing, work.image_tokens))
    if len(seen) >= length:
        raise UserError(
            f"image_tokens = {work.image_tokens}: an image of {len(seen)} tokens leaves no room in a prompt of {length}"
        )
    ids = _ids(place, length - len(seen), model.num_valid_tokens)
    return (*ids[:1], *seen, *ids[1:])


def _picture(place: int, preprocessing: Preprocessing, num_tokens: int) -> Picture:
    """Return an image of its own colour that has about so many tokens."""
    rows = max(n for n in range(1, math.isqrt(num_tokens) + 1) if num_tokens % n == 0)
    unit = preprocessing.vision.patch_size * preprocessing.vision.merge
    pixels_HWC = np.full((rows * unit, num_tokens // rows * unit, 3), place % 256, dtype=np.uint8)
    return Picture.of(f"image {place}".encode(), pixels_HWC)


def _ids(place: int, length: int, vocabulary: int) -> tuple[int, ...]:
    """Return tokens that start differently for every index, so that no prompts are shared."""
    digits = (place % vocabulary, place // vocabulary % vocabulary)[:length]
    return (*digits, *(index % vocabulary for index in range(length - len(digits))))


def compare(predicted: Sequence[Phase], measured: dict[str, int]) -> str:
    """Format predicted against measured bytes; scoring and backward are measured together."""
    lines = [f"{'bytes alive':<18}{'predicted':>18}{'measured':>18}{'error':>9}"]
    for name, value in measured.items():
        names = ("scoring", "backward") if name == "backward" else (name,)
        total = max(phase.total for phase in predicted if phase.name in names)
        lines.append(f"{name:<18}{total:18,}{value:18,}{100 * (total / value - 1):+8.1f}%")
    return "\n".join(lines)
