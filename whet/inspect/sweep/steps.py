"""The steps that a sweep times: the recipe's own, repeated from the same weights."""

from __future__ import annotations

import gc
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from whet.algo.packing import TrainingSequence
from whet.generate.policy import Policy, resolve_device
from whet.generate.rows import Completion, Request, Sampler
from whet.inspect.memory.meter import LiveTensors
from whet.inspect.sweep.points import Run
from whet.train.objective.advantage import is_informative, with_advantages
from whet.train.objective.objective import Objective
from whet.train.optim import safety
from whet.train.optim.step import Optimizer, autocast_dtype
from whet.train.rl_config import RLConfig
from whet.train.rollout.order import data_order
from whet.train.rollout.source import KEPT_CACHE
from whet.train.setup import load_rl
from whet.train.sft import SFTConfig, demonstrations_of, encode, load_sft, train_step
from whet.types import Group, Problem, Sample

LR = 0.0
"""Zero, so that every step is the same work at every point; AdamW takes the same time."""

Item = TypeVar("Item")
Mark = Callable[[str], None]
Work = Callable[[Mark], dict[str, float]]
"""Runs one step: calls `mark` at the end of each phase; returns tokens and samples."""


class Steps(ABC):
    """A recipe, loaded, with the problems of its first step and its longest ones.

    Each call below may have other sweep settings, except `optim.compile`, and `optim.precision` if the parameters'
    dtype depends on it.

    Args:
        policy: Its policy, loaded.

    Attributes:
        policy: Its policy.
        longest: Tokens of the longest possible sequence.
        update: Tokens of an update of longest sequences.
        num_samples: Sequences of a step.
    """

    longest: int
    update: int
    num_samples: int

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @abstractmethod
    def _prepare(self, run: Any, *, longest: bool) -> Work:
        """Create optimizer and engine, and return a function that runs a step."""

    def prepare(self, run: Run, *, longest: bool = False) -> Work:
        """Return a function that runs a step with a recipe's settings.

        Args:
            run: The recipe with the settings of a point.
            longest: Use the longest problems, and let no completion end early.
        """
        if run.policy.num_threads:
            torch.set_num_threads(run.policy.num_threads)
        self.policy.model.checkpoint_layers = run.optim.checkpoint_layers
        self.policy.max_rows = run.policy.max_rows
        self.policy.autocast = autocast_dtype(run.optim.precision)
        return self._prepare(run, longest=longest)

    def time(self, run: Run, count: int) -> list[dict[str, float]]:
        """Run one warm-up step, and time `count` more.

        Returns:
            For each its seconds, those of sampling (with rewards) and training, tokens, samples and micro-batches.
        """
        work, passes = self.prepare(run), 0

        def count_pass(*_: object) -> None:
            nonlocal passes
            passes += torch.is_grad_enabled()

        hook = self.policy.model.register_forward_pre_hook(count_pass)
        work(lambda name: None)
        hook.remove()
        return [self._timed(work) | {"micro_batches": passes} for _ in range(count)]

    def _timed(self, work: Work) -> dict[str, float]:
        found = {"sample_seconds": 0.0, "train_seconds": 0.0}
        began = since = time.perf_counter()

        def mark(name: str) -> None:
            nonlocal since
            if self.policy.device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            found[f"{name}_seconds"] += now - since
            since = now

        found |= work(mark)
        return found | {"seconds": time.perf_counter() - began}

    def memory(self, run: Run) -> tuple[dict[str, int], float]:
        """Run one step of the longest sequences; return the peak of live bytes in each phase, and its seconds."""
        gc.collect()
        device, found = self.policy.device, dict[str, int]()
        meter = LiveTensors(device) if device.type == "cpu" else None
        if meter is None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

        def mark(name: str) -> None:
            if meter is not None:
                found[name] = meter.restart()
                return
            torch.cuda.synchronize()
            found[name] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()

        with meter or nullcontext():
            if meter is not None:
                for tensor in (*self.policy.model.parameters(), *self.policy.model.buffers()):
                    meter.add(tensor)
            work = self.prepare(run, longest=True)
            began = time.perf_counter()
            work(mark)
        return found, time.perf_counter() - began


class FineTuning(Steps):
    """Steps of `whet sft`."""

    def __init__(self, run: SFTConfig) -> None:
        _fix_order(run)
        policy, task, problems = load_sft(run)
        super().__init__(policy)
        kept = demonstrations_of(run, self.policy, problems).problems
        drawn = data_order(task, kept, run.seed).next(run.batch_size)
        self._first = encode(run, self.policy, task, drawn)
        whole = replace(run, empty_thinking_share=0.0)
        every = encode(whole, self.policy, task, [(0, problem) for problem in kept])
        self._longest = _top(every, run.batch_size, lambda sequence: sequence.num_tokens)
        self.longest = self._longest[0].num_tokens
        self.update = sum(sequence.num_tokens for sequence in self._longest)
        self.num_samples = run.batch_size

    def _prepare(self, run: SFTConfig, *, longest: bool) -> Work:
        optimizer = Optimizer(self.policy.model, run.optim)
        rows: list[TrainingSequence] = self._longest if longest else self._first

        def work(mark: Mark) -> dict[str, float]:
            loss, _, tokens, _ = train_step(self.policy, rows, run.optim, allowed_coef=run.allowed_coef)
            optimizer.step(LR, loss=loss)
            mark("train")
            return {"tokens": tokens, "samples": len(rows)}

        return work


class Reinforcement(Steps):
    """Steps of `whet rl`, without curriculum, refills and overlap.

    Args:
        run: The recipe.
        stack: Closes its judge, if any.

    Attributes:
        is_substituted: Whether no reward of the last step differed, so that all groups got alternating advantages of 1
            and -1.
    """

    def __init__(self, run: RLConfig, stack: ExitStack) -> None:
        _fix_order(run)
        self._setup = setup = load_rl(run)
        super().__init__(setup.policy)
        policy, kept = setup.policy, setup.problems
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._rewards, _ = stack.enter_context(setup.open_judge(folder))
        self._prompts = _top([policy.prompt_ids(problem) for problem in kept], run.num_prompts, len)
        new, group = run.sampling.max_new_tokens, run.group_size
        self.longest = len(self._prompts[0]) + new
        tokens = sum(group * (len(ids) + new) for ids in self._prompts)
        self.update = -(-tokens // run.algo.num_minibatches)
        self.num_samples = run.num_prompts * group
        self.is_substituted = False

    def _prepare(self, run: RLConfig, *, longest: bool) -> Work:
        optimizer = Optimizer(self.policy.model, run.optim)
        objective = Objective.of(run, self.policy)
        engine = self.policy.engine(stops=not longest, trains=True)
        sample = self._longest_groups(run, engine) if longest else self._first_groups(run, engine)

        def work(mark: Mark) -> dict[str, float]:
            groups, tokens = sample()
            engine.release(above=KEPT_CACHE)
            mark("sample")
            objective.update(groups, optimizer, LR, step=run.value.warmup_steps)
            mark("train")
            return {"tokens": tokens, "samples": self.num_samples}

        return work

    def _first_groups(self, run: RLConfig, engine: Sampler) -> Callable[[], tuple[list[Group], int]]:
        def sample() -> tuple[list[Group], int]:
            rollout = replace(self._setup, config=run).first_rollout(engine, self._rewards)
            informative = is_informative(rollout.groups, run.algo, run.reward_weights)
            is_kept = run.algo.uninformative == "keep"
            used = [g for g, teaches in zip(rollout.groups, informative, strict=True) if teaches or is_kept]
            groups = with_advantages(used, run.algo, run.reward_weights)
            self.is_substituted = not any(s.advantage for group in groups for s in group.samples)
            samples = [s for group in rollout.groups for s in group.samples]
            tokens = sum(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
            return list(map(_taught, rollout.groups)) if self.is_substituted else groups, tokens

        return sample

    def _longest_groups(self, run: RLConfig, engine: Sampler) -> Callable[[], tuple[list[Group], int]]:
        size = run.group_size
        requests = [
            Request(prompt_ids=ids, seeds=tuple(range(place * size, (place + 1) * size)))
            for place, ids in enumerate(self._prompts)
        ]

        def sample() -> tuple[list[Group], int]:
            rows = engine.generate(requests, run.sampling)
            groups = [
                _taught(_group(str(place), ids, row))
                for place, (ids, row) in enumerate(zip(self._prompts, rows, strict=True))
            ]
            return groups, sum(len(s.prompt_ids) + len(s.completion_ids) for g in groups for s in g.samples)

        return sample


def _fix_order(run: Run) -> None:
    """Apply the recipe's determinism settings, before anything is loaded."""
    sameness = run.safety.sameness(resolve_device(run.policy.device))
    safety.set_deterministic(sameness, compiles=run.optim.compile)


def load(run: Run, stack: ExitStack) -> FineTuning | Reinforcement:
    """Load a recipe; the stack closes what it opens."""
    return FineTuning(run) if isinstance(run, SFTConfig) else Reinforcement(run, stack)


@contextmanager
def memory_errors() -> Iterator[None]:
    """Make running out of memory an error: a training step would retry with smaller micro-batches."""
    plain = safety.is_out_of_memory
    safety.is_out_of_memory = lambda error: False
    try:
        yield
    finally:
        safety.is_out_of_memory = plain


def _top(items: Sequence[Item], count: int, size: Callable[[Item], int]) -> list[Item]:
    """Return the `count` largest items, repeating them if there are fewer."""
    ordered = sorted(items, key=size, reverse=True)
    return [ordered[place % len(ordered)] for place in range(count)]


def _group(uid: str, prompt_ids: tuple[int, ...], row: Sequence[Completion]) -> Group:
    samples = [
        Sample(
            uid=uid,
            index=index,
            prompt_ids=prompt_ids,
            completion_ids=done.ids,
            sampler_logprobs=done.logprobs,
            kept=done.kept,
            experts=done.experts,
            text="",
            finish_reason="length",
        )
        for index, done in enumerate(row)
    ]
    return Group(problem=Problem(uid=uid, task="sweep", prompt="", answer=""), samples=tuple(samples))


def _taught(group: Group) -> Group:
    """Return a group whose samples have rewards 1 and 0, and advantages 1 and -1, in turn."""
    samples = (
        replace(sample, reward=float(index % 2 == 0), advantage=1.0 if index % 2 == 0 else -1.0)
        for index, sample in enumerate(group.samples)
    )
    return replace(group, samples=tuple(samples))
