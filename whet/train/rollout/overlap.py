"""Overlap of rollout, reward and update: it changes when the work of a step is done, never its results.

`stream`: a finished group is scored in a thread, and its gradient is computed while other groups are still being
sampled. The weights change once all groups are in, so the step stays on-policy. `async`: the next step's groups are
sampled in a thread from a copy of the weights while this step's update runs; they are one step stale, which their
recorded log-probabilities show and the ratio corrects. Threads suffice, because PyTorch and the kernels release the GIL
while they compute; one thread with two CUDA streams would not, because the host waits for each decode step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal

import torch

from whet.algo.config import AlgoConfig, OffPolicyConfig
from whet.eval.grade import Grade
from whet.generate.backends.base import CopySampler
from whet.generate.engine import Completion, Request
from whet.generate.episode import play
from whet.generate.policy import Policy
from whet.generate.sampling import SamplingParams
from whet.model.quant import packed_tensors
from whet.model.transformer import LanguageModel
from whet.ranks.collectives import world_size
from whet.rewards.base import WeightedReward
from whet.tasks.tools import environment_for
from whet.telemetry.spans import spanned
from whet.train.optim.step import OptimConfig
from whet.train.rollout.rollout import Rollout, RolloutParams, sample_seeds, score_groups
from whet.types import Group, Problem, Task, UnreadError

Mode = Literal["off", "stream", "async"]
NUM_PARTS = 4


@dataclass(frozen=True, kw_only=True)
class OverlapConfig:
    """Parts of a step that run in parallel."""

    mode: Mode = "off"
    """off: sample, score, train in sequence; stream: score and backpropagate groups while others are sampled; async:
    sample the next step's groups while this one is trained on (with off_policy.staleness)."""
    num_parts: int = NUM_PARTS
    """stream: number of parts in which the step's groups are backpropagated, in the order in which they end."""

    def __post_init__(self) -> None:
        if self.num_parts < 1:
            raise ValueError(f"overlap.num_parts = {self.num_parts}: expected 1 or more")
        if self.mode != "stream" and self.num_parts != NUM_PARTS:
            raise UnreadError(
                "overlap.num_parts is read with overlap.mode = stream only; leave it out", "num_parts"
            )


def part_groups(overlap: OverlapConfig, num_prompts: int) -> int:
    """Return the groups per part on this rank, for `num_prompts` over all ranks; 0 without parts."""
    return -(-num_prompts // (world_size() * overlap.num_parts)) if overlap.mode == "stream" else 0


def check_overlap(
    overlap: OverlapConfig, algo: AlgoConfig, off_policy: OffPolicyConfig, optim: OptimConfig
) -> None:
    """Refuse settings that would not compute the same in parallel.

    Args:
        overlap: The overlap settings.
        algo: The objective.
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
    if mode != "stream":
        return
    waits = {
        f"off_policy.staleness = {off_policy.staleness}": off_policy.staleness > 0,
        f"off_policy.proximal = {off_policy.proximal}": off_policy.proximal == "recomputed",
        f"algo.scale = {algo.scale}": algo.scale == "batch",
        f"algo.multi_reward = {algo.multi_reward}": algo.multi_reward == "normalise",
        "algo.whiten": algo.whiten,
        f"algo.baseline = {algo.baseline}": algo.baseline == "value",
        f"algo.kl = {algo.kl}": algo.kl == "k1_reward",
        f"algo.entropy_top_share = {algo.entropy_top_share}": algo.entropy_top_share < 1,
        f"algo.uninformative = {algo.uninformative}": algo.uninformative == "refill",
        "optim.router_aux_loss_coef": optim.router_aux_loss_coef > 0,
        f"algo.num_minibatches * algo.num_epochs = {algo.num_updates}": algo.num_updates > 1,
    }
    if what := next((name for name, is_so in waits.items() if is_so), None):
        raise ValueError(
            f"overlap.mode = stream with {what}: groups would have to wait for each other; use off or async"
        )


class BackgroundSampler:
    """Samples in a background thread, from weights that do not change meanwhile; on a GPU on its own stream.

    Args:
        policy: The trained policy.
        shares_weights: Sample from the policy's own weights, or from a copy as of the last `refresh`.
        sampler: What samples in place of an engine here, with a copy of its own.

    Attributes:
        policy: The sampling policy.
        engine: Its engine, or the sampler.
        overlap: Share of the last rollout's seconds that was hidden behind other work.
        train_seconds: Seconds of training during the last rollout (`stream`).
    """

    def __init__(self, policy: Policy, *, shares_weights: bool, sampler: CopySampler | None = None) -> None:
        self._trained, self._shares = policy.model, shares_weights or sampler is not None
        self._is_own = sampler is None
        self.policy = policy
        if sampler is None:
            self.policy = copy.copy(policy)
            self.policy.model = _twin(policy.model, shares_weights=shares_weights)
        self.engine = sampler or self.policy.engine(trains=True)
        self.overlap = self.train_seconds = 0.0
        self._pool = ThreadPoolExecutor(2, "whet-rollout")
        self._job: Future[tuple[Any, float]] | None = None
        is_cuda = policy.device.type == "cuda"
        self._stream = torch.cuda.Stream(policy.device, priority=-1) if is_cuda else None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights of the trained policy."""
        if not self._shares:
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

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue small work, run one at a time in parallel with the background job."""
        return self._pool.submit(work, *arguments)

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

    def pop_timings(self) -> tuple[float, float]:
        """Return `overlap` and `train_seconds`, and reset them to 0 until the next rollout."""
        values = self.overlap, self.train_seconds
        self.overlap = self.train_seconds = 0.0
        return values

    def close(self) -> None:
        """Wait for running work, ignoring its outcome, and end the threads."""
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


def _twin(model: LanguageModel, *, shares_weights: bool) -> LanguageModel:
    """Copy the modules of a model, with their modes and autocast's cached casts.

    Shared weights keep their version counter, which shows when packed copies of them are stale.
    """
    known = {
        id(parameter): torch.nn.Parameter(
            parameter.detach()
            if shares_weights or not parameter.requires_grad  # beside adapters
            else parameter.detach().clone(),
            parameter.requires_grad,
        )
        for parameter in model.parameters()
    }
    shared = {id(tensor): tensor for _, tensor in packed_tensors(model)}  # nothing ever changes them
    return copy.deepcopy(model, known | shared)


@spanned("rollout_generation")
def _draw(
    background: BackgroundSampler,
    task: Task,
    problems: Sequence[Problem],
    names: Sequence[Sequence[int]],
    params: SamplingParams,
    on_ended: Callable[[int, list[Completion]], None],
) -> None:
    """Sample groups; single-turn ones are handed over as they end, multi-turn ones all together."""
    policy, engine = background.policy, background.engine
    environment = environment_for(policy.schema, task)
    if environment is not None:
        for place, row in enumerate(play(policy, engine, problems, names, params, environment)):
            on_ended(place, row)
        return
    requests = [
        Request(prompt_ids=policy.prompt_ids(problem), seeds=tuple(row))
        for problem, row in zip(problems, names, strict=True)
    ]
    engine.generate(requests, params, on_ended=on_ended, is_streamed=True)


def stream_groups(
    background: BackgroundSampler,
    train: Callable[[Group], None],
    task: Task,
    rewards: list[WeightedReward],
    problems: Sequence[Problem],
    *,
    seeds: Sequence[tuple[int, ...]],
    params: RolloutParams,
) -> Rollout:
    """Sample groups in one thread, score them in a second one, and train on them in the caller's as they arrive.

    Args:
        background: The background sampler.
        train: Called with each scored group.
        task: Judges answers.
        rewards: The run's rewards.
        problems: One group each.
        seeds: See `collect_groups`.
        params: How groups are sampled and scored.

    Returns:
        Groups in the order in which they ended; multi-turn episodes end together.
    """
    names = sample_seeds(problems, seeds, params.group_size)
    ended: SimpleQueue[Future[tuple[Group, list[Grade], float]] | None] = SimpleQueue()

    def score(place: int, row: list[Completion]) -> tuple[Group, list[Grade], float]:
        began, chosen = time.perf_counter(), slice(place, place + 1)
        (group,), (grades,) = score_groups(
            background.policy, task, rewards, problems[chosen], names[chosen], [row], params
        )
        return group, grades, time.perf_counter() - began

    def draw() -> None:
        try:
            _draw(
                background,
                task,
                problems,
                names,
                params.sampling,
                lambda *done: ended.put(background.submit(score, *done)),
            )
        finally:
            ended.put(None)

    began = time.perf_counter()
    scored: list[tuple[Group, list[Grade], float]] = []
    trained = 0.0
    background.start(draw)
    while (future := ended.get()) is not None:
        scored.append(future.result())
        begun = time.perf_counter()
        with background.sharing_threads():
            train(scored[-1][0])
        trained += time.perf_counter() - begun
    _, generated = background.wait()
    wall, rewarded = time.perf_counter() - began, sum(seconds for _, _, seconds in scored)
    hidden = generated + rewarded + trained - wall
    background.overlap, background.train_seconds = (
        min(1.0, max(0.0, hidden / (generated + rewarded))),
        trained,
    )
    return Rollout(
        [group for group, _, _ in scored], [grades for _, grades, _ in scored], generated, rewarded
    )
