"""Our engine in other processes: rollout workers, each with a copy of the policy, behind the `Sampler` protocol.

A sequence is a function of weights, prompt and seed, so it does not matter which worker draws it, nor how often it is
drawn: what a lost or slow worker had is drawn again by another one, the first answer counts, and a run's results do not
depend on how many workers there are or which of them died. Every call names the weights that it needs, so a worker that
was started again, or was left behind, brings them up by itself.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch

from whet.generate.backends.dealing import PORTIONS, Part, portions
from whet.generate.backends.staff import Crew, LostError, Refs, Slot, Staff
from whet.generate.engine import Engine, EngineStats
from whet.generate.policy import Policy
from whet.generate.rows import Completion, OnEnded, Request, has_stop
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.kernels import dispatch
from whet.model.checkpointing import Recompute
from whet.model.transformer import LanguageModel
from whet.ranks.ray import ClusterConfig, load_ray
from whet.types import UserError

# The policy, and the bytes of its tensors beside it: outside of what is pickled, so that all workers of a node can read
# one copy of them in shared memory.


@dataclass(frozen=True, slots=True)
class _Layout:
    """How bytes are read as a tensor, and whether it is trained."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    is_trained: bool


@dataclass(frozen=True, slots=True)
class Parcel:
    """A policy without its weights, and those of its tensors that never change.

    Attributes:
        skeleton: The policy, the parameters and buffers of its model empty.
        layouts: Those, in their order.
        frozen: Bytes of the ones that never change, by number.
        choice: The kernels that compute it: with other ones the last bits would differ.
    """

    skeleton: Policy
    layouts: list[_Layout]
    frozen: dict[int, np.ndarray]
    choice: dispatch.Choice | None


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()


def _read(data: np.ndarray, layout: _Layout) -> torch.Tensor:
    if not data.size:
        return torch.empty(layout.shape, dtype=layout.dtype)
    with warnings.catch_warnings():
        # Shared memory is read-only, and PyTorch cannot mark tensors so: nothing writes to what is not trained.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.frombuffer(data, dtype=layout.dtype).view(layout.shape)


def _tensors(model: LanguageModel) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def pack(policy: Policy) -> tuple[Parcel, list[torch.Tensor]]:
    """Return a policy as a parcel, and the tensors that it describes; the values of trained ones are sent beside it.

    Args:
        policy: The policy, with whatever stands in its model: adapters, packed matrices.
    """
    tensors = _tensors(policy.model)
    empty: dict[int, Any] = {}
    for tensor in tensors:
        place = torch.empty(0, dtype=tensor.dtype)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        empty[id(tensor)] = torch.nn.Parameter(place, tensor.requires_grad) if is_parameter else place
    skeleton = copy.copy(policy)
    skeleton.activations = skeleton.trained = skeleton.adapter = skeleton.routings = None
    recompute, policy.model.recompute = (
        policy.model.recompute,
        Recompute(),
    )  # it holds what a backward pass needs
    try:
        skeleton.model = copy.deepcopy(policy.model, empty)
    finally:
        policy.model.recompute = recompute
    layouts = [_Layout(t.dtype, tuple(t.shape), t.device.type, t.requires_grad) for t in tensors]
    frozen = {number: _bytes_of(t) for number, t in enumerate(tensors) if not t.requires_grad}
    return Parcel(skeleton, layouts, frozen, dispatch.current()), tensors


@torch.no_grad()
def unpack(parcel: Parcel) -> tuple[Policy, list[torch.Tensor]]:
    """Return the policy of a parcel, its trained tensors undefined, and all tensors that the parcel describes."""
    policy = copy.copy(parcel.skeleton)
    policy.model = copy.deepcopy(policy.model)
    tensors = _tensors(policy.model)
    for number, (tensor, layout) in enumerate(zip(tensors, parcel.layouts, strict=True)):
        if layout.is_trained:
            tensor.data = torch.empty(layout.shape, dtype=layout.dtype, device=layout.device)
        else:
            tensor.data = _read(parcel.frozen[number], layout).to(layout.device)
    dispatch.take(parcel.choice)
    return policy, tensors


# One worker: what runs in the other process.


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a worker answers.

    Attributes:
        rows: For each request its completions. One that ends by its length and is shorter than that was cut.
        stats: The work that it took.
    """

    rows: list[list[Completion]]
    stats: EngineStats


class RolloutWorker:
    """An engine on a copy of a policy; its `generate` runs in one thread, `cut` comes from another one.

    Args:
        num_threads: CPU threads to compute with; 0 leaves PyTorch's choice.
        fetch: Reads references; None for Ray's own.
    """

    def __init__(self, num_threads: int = 0, fetch: Callable[[Refs], list[Any]] | None = None) -> None:
        self._fetch: Callable[[Refs], list[Any]] = load_ray().get if fetch is None else fetch
        self._num_threads = num_threads
        self._engine: Engine | None = None
        self._tensors: list[torch.Tensor] = []
        self._layouts: list[_Layout] = []
        self._have: Refs = []
        self._number, self._is_cut = -1, False
        self._lock = threading.Lock()

    def load(self, parcel: Parcel) -> int:
        """Build the policy; return the process id."""
        if self._num_threads:
            torch.set_num_threads(self._num_threads)
        policy, self._tensors = unpack(parcel)
        self._layouts, self._have = parcel.layouts, []
        self._engine = policy.engine(trains=True)
        self._engine.is_cut = lambda: self._is_cut
        return os.getpid()

    def generate(
        self, number: int, weights: Refs, requests: Sequence[Request], params: SamplingParams
    ) -> Drawn:
        """Draw every sample of every request with the weights that are named.

        Args:
            number: Number of the call, for `cut`.
            weights: The buckets that make up the weights.
            requests: Prompts with the seeds of their samples.
            params: How they are drawn.
        """
        assert self._engine is not None
        with self._lock:
            self._is_cut = self._is_cut and self._number == number  # the cut may come first
            self._number = number
        if self._num_threads:
            torch.set_num_threads(self._num_threads)  # a setting of the thread, and Ray has several
        self._bring_up(weights)
        before, self._engine.stats = self._engine.stats, EngineStats()
        rows = self._engine.generate(requests, params)
        stats, self._engine.stats = self._engine.stats, before
        return Drawn(rows, stats)

    def cut(self, number: int) -> None:
        """End a call where it is, if it is under way or still to come; it returns what is drawn."""
        with self._lock:
            if number >= self._number:
                self._number, self._is_cut = number, True

    @torch.no_grad()
    def _bring_up(self, weights: Refs) -> None:
        known = len(self._have)
        new = weights[known:] if weights[:known] == self._have else weights
        for bucket in self._fetch(new) if new else ():
            for number, data in bucket.items():
                self._tensors[number].copy_(_read(data, self._layouts[number]))
        self._have = list(weights)


Key = tuple[int, int]
"""A sample of a batch: place of its request, and its own index there."""


@dataclass(slots=True, eq=False)
class _Batch:
    """A call of `generate`: the requests, and what is drawn of them so far.

    Attributes:
        requests: Prompts with the seeds of their samples.
        params: How they are drawn.
        version: The weights that its next part is drawn with.
        drawn: Samples by key, also those that were cut and go on.
        left: Samples of each request that have not ended.
        stats: The work that it took.
        ended: Places of the requests that are complete, in the order in which they became so.
        error: What went wrong in a worker, to be raised where it is waited for.
    """

    requests: Sequence[Request]
    params: SamplingParams
    version: int
    drawn: dict[Key, Completion]
    left: list[int]
    stats: EngineStats = field(default_factory=EngineStats)
    ended: list[int] = field(default_factory=list)
    error: BaseException | None = None


@dataclass(slots=True)
class _Work:
    """Samples of one batch that one worker draws together."""

    batch: _Batch
    keys: list[Key]


@dataclass(frozen=True, slots=True)
class _Call:
    """What a worker was asked for last.

    Attributes:
        number: Number of the call.
        version: The weights that it draws with.
        homes: For each request of it, the samples that it draws.
    """

    number: int
    version: int
    homes: list[list[Key]]


_Slot = Slot[_Call]


class Workers:
    """Rollout workers as one sampler.

    Several threads may sample at the same time: whoever waits deals out the work of all.

    Args:
        policy: The policy that is trained; its copies follow it by `push`.
        config: How many workers, and how they are treated.
        crew: Starts them.
        count: This rank's workers.

    Attributes:
        stats: What all workers did for this one.
        num_bytes_pushed: Bytes of weights that were sent since the start.
        look: Called while `generate` waits; may raise to end it.
    """

    def __init__(self, policy: Policy, config: ClusterConfig, crew: Crew, *, count: int) -> None:
        self.stats = EngineStats()
        self.look: Callable[[], None] = lambda: None
        self.num_bytes_pushed = 0
        self._config, self._crew, self._count = config, crew, count
        self._engine = policy.engine(trains=True)  # it checks requests, and never generates
        self._policy = policy
        self._decode = partial(policy.tokenizer.decode_completion, (0,))
        self._lock, self._number = threading.RLock(), 0
        self._short_since: float | None = None
        parcel, tensors = pack(policy)
        self._trained = {number: t for number, t in enumerate(tensors) if t.requires_grad}
        self._parcel = crew.put(parcel)
        self._buckets: list[tuple[Any, dict[int, np.ndarray]]] = []
        self._weights: dict[int, Refs] = {}
        self._pinned: Counter[int] = Counter()
        self._version, self._is_closed = 0, False
        self._staff: Staff[_Work, _Call] = Staff(
            crew,
            "cluster.rollout_workers",
            count=count,
            arguments=(self._parcel,),
            slow_factor=config.slow_factor,
            give=self._give,
            take=self._keep,
            fail=self._fail,
        )
        self.push(0, policy)
        self._staff.fill()

    @property
    def max_positions(self) -> int:
        """Longest context in tokens, prompt and completion together."""
        return self._engine.max_positions

    @property
    def num_started(self) -> int:
        """Workers that were started, also in place of lost ones."""
        return self._staff.num_started

    @property
    def num_lost(self) -> int:
        """Parts of rollouts that were dealt again since their worker was lost."""
        return self._staff.dealer.num_lost

    @property
    def num_repeated(self) -> int:
        """Parts of rollouts that were dealt twice since their worker was slow."""
        return self._staff.dealer.num_repeated

    # Weights

    def push(self, version: int, policy: Policy) -> float:
        """Lay the policy's present weights where the workers read them; return the seconds it took.

        Only tensors that changed are laid down. Sequences that are being drawn keep their weights; with
        `cluster.partial` they are ended where they are and go on with the new ones.

        Args:
            version: Number of the weights.
            policy: The policy that this sampler was made for.
        """
        assert policy.model is self._policy.model
        began = time.perf_counter()
        sent: dict[int, np.ndarray] = {}
        for _, bucket in self._buckets:
            sent |= bucket
        changed: dict[int, np.ndarray] = {}
        for number, tensor in self._trained.items():
            data = _bytes_of(tensor)
            if number not in sent or not np.array_equal(sent[number], data):
                changed[number] = data.copy()
        with self._lock:
            if changed:
                self._buckets = [
                    (ref, left)
                    for ref, bucket in self._buckets
                    if (left := {n: data for n, data in bucket.items() if n not in changed})
                ]
                self._buckets.append((self._crew.put(changed), changed))
                self.num_bytes_pushed += sum(data.nbytes for data in changed.values())
            self._version = version
            self._weights[version] = [ref for ref, _ in self._buckets]
            self._forget()
            if self._config.partial:
                self._cut(lambda slot, _: slot.note is not None and slot.note.version < version)
        return time.perf_counter() - began

    def _forget(self) -> None:
        """Let go of weights that no batch is drawn with."""
        parts = self._parts_left()
        needed = {part.work.batch.version for part in parts} | {self._version, *+self._pinned}
        self._weights = {version: refs for version, refs in self._weights.items() if version in needed}

    def _parts_left(self) -> list[Part[_Work]]:
        """Return the parts that wait, and those that workers have."""
        dealer = self._staff.dealer
        return [*dealer.waiting, *filter(None, map(dealer.part_of, self._staff.slots))]

    def pin(self) -> Pinned:
        """Return a sampler that keeps the weights that were pushed last, until it is closed."""
        with self._lock:
            self._pinned[self._version] += 1
            return Pinned(self, self._version)

    def unpin(self, version: int) -> None:
        """Let go of weights, once as often as they were pinned."""
        with self._lock:
            self._pinned[version] -= 1
            self._forget()

    # Sampling

    def generate(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        *,
        on_ended: OnEnded | None = None,
    ) -> list[list[Completion]]:
        """Draw every sample of every request with the weights that were pushed last; see `Sampler.generate`."""
        return self.draw(self._version, requests, params, on_ended, lambda: self.look())

    def draw(
        self,
        version: int,
        requests: Sequence[Request],
        params: SamplingParams,
        on_ended: OnEnded | None,
        look: Callable[[], None],
    ) -> list[list[Completion]]:
        """Draw every sample of every request with weights that are the present ones, or pinned.

        Args:
            version: Number of the weights; with `cluster.partial` they are those to begin with.
            requests: Prompts with the seeds of their samples.
            params: How they are drawn.
            on_ended: Called with each request that is complete.
            look: Called while answers are waited for; may raise to end it.
        """
        for index, request in enumerate(requests):
            self._engine.check(request.prompt_ids, f"prompt {index}")
            self._engine.check_adapter(request.adapter)
        began = time.perf_counter()
        batch = _Batch(requests, params, version, {}, [len(request.seeds) for request in requests])
        told = 0
        with self._lock:
            self._staff.dealer.add(self._parts(batch))
        try:
            while any(batch.left) or told < len(batch.ended):
                while told < len(batch.ended):
                    if on_ended is not None:
                        on_ended(batch.ended[told], self._row(batch, batch.ended[told]))
                    told += 1
                look()
                with self._lock:
                    if self._is_closed:
                        raise LostError("the sampler was closed")
                    if any(batch.left) and batch.error is None:
                        self._staff.turn(may_give=self._are_enough(time.monotonic()))
                if batch.error is not None:
                    raise batch.error
        except BaseException:
            with self._lock:
                self._abandon(batch)
            raise
        with self._lock:
            _add(self.stats, batch.stats)
            self.stats.seconds += time.perf_counter() - began
        return [self._row(batch, place) for place in range(len(requests))]

    def release(self, above: int = 0) -> None:
        """Do nothing: the caches are those of other processes."""

    def close(self) -> None:
        """End all workers; whoever still waits for them fails."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._crew.close()

    @staticmethod
    def _row(batch: _Batch, place: int) -> list[Completion]:
        return [batch.drawn[place, index] for index in range(len(batch.requests[place].seeds))]

    def _parts(self, batch: _Batch) -> list[Part[_Work]]:
        """Cut a batch into parts of nearly equal cost; few requests are cut by their samples, too."""
        count = max(1, self._count) * PORTIONS
        units: list[list[Key]] = []
        pieces = -(-count // max(1, len(batch.requests)))
        for place, request in enumerate(batch.requests):
            size = max(1, -(-len(request.seeds) // pieces))
            keys = [(place, index) for index in range(len(request.seeds))]
            units += [keys[start : start + size] for start in range(0, len(keys), size)]
        costs = [self._cost(batch, keys) for keys in units]
        return [
            Part(
                _Work(batch, [key for unit in portion for key in units[unit]]), sum(costs[u] for u in portion)
            )
            for portion in portions(costs, count)
        ]

    def _cost(self, batch: _Batch, keys: Sequence[Key]) -> float:
        """Return the tokens to draw at most, and those to read, a tenth each: they are read many at a time."""
        cost = 0.0
        for request, own in self._requests(batch, keys):
            cost += 0.1 * len(request.prompt_ids) + len(own) * self._limit(request, batch.params)
        return cost

    def _limit(self, request: Request, params: SamplingParams) -> int:
        """Return the most tokens that the engine draws for a request."""
        longest = params.max_new_tokens
        return min(longest, request.max_new_tokens or longest, self.max_positions - len(request.prompt_ids))

    def _requests(self, batch: _Batch, keys: Sequence[Key]) -> list[tuple[Request, list[Key]]]:
        """Write requests for samples; one that was cut goes on where it ended, from noise of its own."""
        found: list[tuple[Request, list[Key]]] = []
        for place, group in groupby(keys, key=lambda key: key[0]):
            request, fresh = batch.requests[place], list[Key]()
            for key in group:
                if (done := batch.drawn.get(key)) is None:
                    fresh.append(key)
                    continue
                more = replace(
                    request,
                    prompt_ids=(*request.prompt_ids, *done.ids),
                    seeds=(sequence_seed("continued", request.seeds[key[1]], len(done.ids)),),
                    max_new_tokens=self._limit(request, batch.params) - len(done.ids),
                )
                found.append((more, [key]))
            if fresh:
                seeds = tuple(request.seeds[index] for _, index in fresh)
                found.append((replace(request, seeds=seeds), fresh))
        return found

    def _give(self, slot: _Slot, work: _Work) -> tuple[Any, _Call]:
        """Send a worker its part of a batch."""
        batch = work.batch
        if self._config.partial:
            batch.version = self._version
        self._number += 1
        written = self._requests(batch, work.keys)
        call = _Call(self._number, batch.version, [own for _, own in written])
        requests = [request for request, _ in written]
        arguments = (call.number, self._weights[call.version], requests, batch.params)
        return self._crew.call(slot.hand, "generate", *arguments), call

    def _fail(self, work: _Work, error: Exception) -> None:
        """Leave a mistake in a worker to whoever waits for the batch."""
        work.batch.error = error

    def _keep(self, slot: _Slot, work: _Work, answer: Drawn) -> None:
        """Put what was drawn in its places; what was cut is dealt again, to go on from there."""
        batch, call = work.batch, slot.note
        assert call is not None
        _add(batch.stats, answer.stats)
        cut: list[Key] = []
        for keys, row in zip(call.homes, answer.rows, strict=True):
            for key, done in zip(keys, row, strict=True):
                request = batch.requests[key[0]]
                whole = self._joined(batch.drawn.get(key), done, call.version)
                is_short = len(whole.ids) < self._limit(request, batch.params)
                if whole.ids:
                    batch.drawn[key] = whole
                if whole.finish_reason == "length" and is_short:
                    cut.append(key)
                    continue
                batch.left[key[0]] -= 1
                if not batch.left[key[0]]:
                    batch.ended.append(key[0])
        if cut:
            self._staff.dealer.waiting.appendleft(Part(_Work(batch, cut), self._cost(batch, cut)))

    def _joined(self, before: Completion | None, done: Completion, version: int) -> Completion:
        """Return a sample with what was drawn after it was cut."""
        if self._config.partial:
            done = replace(done, versions=(version,) * len(done.ids))
        if before is None:
            return done
        length, finish_reason = len(before.ids) + len(done.ids), done.finish_reason
        ids = (*before.ids, *done.ids)
        # A stop string may have begun before the cut, where its end was not to be seen.
        tail = max((len(stop.encode()) for stop in self._policy.stop_strings), default=0) + 4
        for end in range(len(before.ids) + 1, min(len(before.ids) + tail, length) + 1):
            window = ids[max(0, len(before.ids) - tail) : end]
            if self._policy.stop_strings and has_stop(window, self._policy.stop_strings, self._decode):
                length, finish_reason = end, "stop"
                break
        return replace(
            done,
            ids=ids[:length],
            logprobs=(*before.logprobs, *done.logprobs)[:length],
            finish_reason=finish_reason,
            kept=(*before.kept, *done.kept)[:length],
            versions=(*before.versions, *done.versions)[:length],
        )

    def _cut(self, chosen: Callable[[_Slot, _Work], bool]) -> None:
        """End calls where they are."""
        for slot in self._staff.slots:
            part = self._staff.dealer.part_of(slot)
            if part is not None and slot.ref is not None and chosen(slot, part.work):
                assert slot.note is not None
                self._crew.call(slot.hand, "cut", slot.note.number)

    def _abandon(self, batch: _Batch) -> None:
        """Give up a batch whose caller has left; its workers are free for others soon."""
        for part in self._parts_left():
            part.is_over = part.is_over or part.work.batch is batch
        self._cut(lambda _, work: work.batch is batch)

    def _are_enough(self, now: float) -> bool:
        """Say whether as many workers are there as have to be.

        Raises:
            UserError: If there have been too few for too long.
        """
        ready, least = self._staff.num_ready, min(self._config.min_workers, self._count)
        if ready >= least:
            self._short_since = None
            return True
        self._short_since = now if self._short_since is None else self._short_since
        if now - self._short_since > self._config.wait_s:
            raise UserError(
                f"cluster.min_workers = {least}: only {ready} rollout workers came in {self._config.wait_s:g} s; "
                "does the cluster have the CPUs and GPUs that they ask for? (ray status)"
            )
        return False


class Pinned:
    """Rollout workers that keep to one version of the weights, for a rollout that other ones overtake."""

    look: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, workers: Workers, version: int) -> None:
        self._workers, self._version = workers, version

    @property
    def max_positions(self) -> int:
        """Longest context in tokens, prompt and completion together."""
        return self._workers.max_positions

    def generate(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        *,
        on_ended: OnEnded | None = None,
    ) -> list[list[Completion]]:
        """Draw every sample of every request with the pinned weights; see `Sampler.generate`."""
        return self._workers.draw(self._version, requests, params, on_ended, self.look)

    def release(self, above: int = 0) -> None:
        """Do nothing: the caches are those of other processes."""

    def close(self) -> None:
        """Let go of the weights."""
        self._workers.unpin(self._version)


def _add(total: EngineStats, more: EngineStats) -> None:
    for name in ("prompt_tokens", "new_tokens", "decode_steps"):
        setattr(total, name, getattr(total, name) + getattr(more, name))
