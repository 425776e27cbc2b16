"""Work in progress of the engine: a job for every completion, and the tensors of the live rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

import torch

from whet.algo.kept import encode_kept
from whet.algo.logprobs import select_logprobs
from whet.generate.sampling import SamplingParams, counter_uniforms, filter_logits, sample_tokens, without
from whet.types import FinishReason

CHARACTER_TOKENS = 4
"""Most tokens that one character may be split into."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt and the seeds of its samples; `max_new_tokens` tightens the limit, `adapter` names one of several."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    max_new_tokens: int | None = None
    adapter: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Generated ids (including the stop token), their log-probabilities (fp32) and why it ended.

    The other fields are for filters, experts, multi-turn episodes and samplers whose weights change meanwhile, see
    `whet.types.Sample`.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    trained: tuple[bool, ...] = ()
    kept: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    turn_ends: tuple[int, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()


OnEnded = Callable[[int, list[Completion]], None]
"""Called with the place of a request and its completions, once its last one has ended."""


class Sampler(Protocol):
    """Where completions come from: the engine here, or a server that draws with the same weights."""

    @property
    def max_positions(self) -> int:
        """Longest context in tokens, prompt and completion together."""
        ...

    def generate(
        self, requests: Sequence[Request], params: SamplingParams, *, on_ended: OnEnded | None = None
    ) -> list[list[Completion]]:
        """Draw every sample of every request.

        Args:
            requests: Prompts with the seeds of their samples.
            params: Temperature, filters and the longest completion.
            on_ended: Called with each request that is complete, in an order that may depend on what is drawn.

        Returns:
            For every request its completions, in the order of its seeds.
        """
        ...

    def release(self, above: int = 0) -> None:
        """Give memory back until the next call, if more bytes than `above` are held for it."""
        ...


@dataclass(frozen=True, slots=True)
class Token:
    """A token, its log-probability under the model itself (temperature 1, no filter), and the most likely alternatives.

    Attributes:
        id: Token id.
        logprob: Natural logarithm; None if not requested, or for the first token.
        top: (id, log-probability) of the most likely tokens, best first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """What ends one completion, where it is not what ends all of an engine's.

    Attributes:
        stop_ids: Further ids that end it.
        ignores_stop_ids: Whether the engine's stop ids are ids like any others.
        min_new_tokens: No stop id is drawn before it has as many tokens, and no stop string is looked for in them.
    """

    stop_ids: frozenset[int] = frozenset()
    ignores_stop_ids: bool = False
    min_new_tokens: int = 0


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """One completion to generate.

    Attributes:
        request: Its prompt; adjacent jobs of one request share a prefill.
        seed: Seed of its noise.
        params: Sampling settings.
        stop_strings: Texts that stop it.
        ends: What else ends it, or does not; None for the engine's stop ids alone.
        num_top: Record the model's own log-probabilities, with this many alternatives; None records none.
        notes: The recorded tokens.
        kept: What the filters left to draw each token from, if a trainer needs it; None records nothing.
        prompt_experts: The experts of its prompt's tokens, if a trainer needs them.
        cancelled: The result is no longer needed; any thread may set it.
        completion: The result, once it has ended.
        tail: Number of last tokens that may contain a stop string: each has at least one byte, a character may take
            several.
    """

    request: Request
    seed: int
    params: SamplingParams
    stop_strings: tuple[str, ...] = ()
    ends: Ends | None = None
    num_top: int | None = None
    notes: list[Token] = field(default_factory=list)
    kept: list[str] | None = None
    prompt_experts: str = ""
    cancelled: bool = False
    completion: Completion | None = None
    tail: int = field(init=False)

    def __post_init__(self) -> None:
        self.tail = max((len(stop.encode()) for stop in self.stop_strings), default=0) + 4


@dataclass(slots=True)
class Rows:
    """State of the live rows, as tensors of fixed capacity; row r of every field belongs to one job.

    Kernels and CUDA graphs hold the tensors' addresses, so every change is in place.

    Attributes:
        seeds: Seed of each row's noise.
        positions: Position at which `last` will be read.
        counts: Tokens drawn so far; also the index of the next one's noise.
        checked: Tokens that were searched for stop strings.
        limits: Most tokens to draw.
        last: The newest token, which no step has read yet.
        done: Whether the row has ended; it is computed along until `Engine.harvest`, without effect.
        stopped: Whether a stop id or a stop string ended it, not its limit.
        noise: Uniforms of all tokens, where `draw_noise` was called.
        bases: Where activations are kept: the place of position p is base + p.
        tokens: Drawn tokens, with a spare column for ended rows.
        logprobs: Their log-probabilities.
        experts: Bytes of the experts of each drawn token that was read, where they are recorded.
        jobs: The job of each live row.
    """

    seeds: torch.Tensor
    positions: torch.Tensor
    counts: torch.Tensor
    checked: torch.Tensor
    limits: torch.Tensor
    last: torch.Tensor
    done: torch.Tensor
    stopped: torch.Tensor
    noise: torch.Tensor
    bases: torch.Tensor
    tokens: torch.Tensor
    logprobs: torch.Tensor
    experts: torch.Tensor
    jobs: list[Job] = field(default_factory=list)

    @classmethod
    def empty(cls, num_rows: int, max_new: int, device: torch.device, *, record_bytes: int = 0) -> Rows:
        """Create `num_rows` rows; the buffers have one spare column, where ended rows write.

        Args:
            num_rows: Capacity in rows.
            max_new: Longest completion in tokens.
            device: Where they live.
            record_bytes: Bytes per token of the experts; 0 where they are not recorded.
        """

        def whole(dtype: torch.dtype, *width: int) -> torch.Tensor:
            return torch.zeros(num_rows, *width, dtype=dtype, device=device)

        return cls(
            seeds=whole(torch.int64),
            positions=whole(torch.int64),
            counts=whole(torch.int64),
            checked=whole(torch.int64),
            limits=whole(torch.int64),
            last=whole(torch.int64),
            done=whole(torch.bool),
            stopped=whole(torch.bool),
            noise=whole(torch.float64, max_new + 1),
            bases=whole(torch.int64),
            tokens=whole(torch.int64, max_new + 1),
            logprobs=whole(torch.float32, max_new + 1),
            experts=whole(torch.uint8, max_new + 1, record_bytes),
        )

    @property
    def num_rows(self) -> int:
        """Capacity in rows."""
        return self.seeds.shape[0]

    def take(
        self, rows: slice, tokens_B: torch.Tensor, logprobs_B: torch.Tensor, stop_ids: torch.Tensor
    ) -> None:
        """Store a sampled token for each row; ended rows write into the spare column and do not advance."""
        # Without a branch per row, and without reading a value back: on a GPU this is part of a graph.
        # `done` and `counts` are views, so the in-place operations below update the state.
        done, counts = self.done[rows], self.counts[rows]
        live = ~done
        column = torch.where(live, counts, self.tokens.shape[1] - 1)[:, None]
        self.tokens[rows].scatter_(1, column, tokens_B[:, None])
        self.logprobs[rows].scatter_(1, column, logprobs_B[:, None])
        self.last[rows] = tokens_B
        counts += live
        self.positions[rows] += live
        if stop_ids.numel():
            stopped = torch.isin(tokens_B, stop_ids) & live
            self.stopped[rows] |= stopped
            done |= stopped
        done |= counts >= self.limits[rows]

    def end_as_asked(self, rows: slice) -> None:
        """End rows at their own stop ids, and let those go on that ignore the engine's; none had ended before."""
        fresh, counts = self.last[rows].tolist(), self.counts[rows].tolist()
        limits, stopped = self.limits[rows].tolist(), self.stopped[rows].tolist()
        for place, job in enumerate(self.jobs[rows]):
            if job.ends is None:
                continue
            is_own = fresh[place] in job.ends.stop_ids
            if is_own or (stopped[place] and job.ends.ignores_stop_ids):
                self.stopped[rows.start + place] = is_own
                self.done[rows.start + place] = is_own or counts[place] >= limits[place]

    def draw_noise(self, rows: slice, longest: int) -> None:
        """Compute the uniforms of all tokens that new rows may sample: per step it would be two dozen calls."""
        index = torch.arange(longest, device=self.seeds.device)
        self.noise[rows, :longest] = counter_uniforms(self.seeds[rows, None], index)

    def draw(
        self, rows: slice, logits_BV: torch.Tensor, *, has_noise: bool, undrawn: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample a token for each row, with its job's settings.

        Args:
            rows: The rows.
            logits_BV: Their logits at temperature 1.
            has_noise: Whether `draw_noise` was called for them.
            undrawn: An id that is never drawn; None for none.

        Returns:
            Ids [B] and log-probabilities [B], float32.
        """
        jobs = self.jobs[rows]
        seeds, counts = self.seeds[rows], self.counts[rows]
        noise = self.noise[rows].gather(1, counts[:, None]).squeeze(1) if has_noise else None
        tokens, logprobs = torch.empty_like(self.last[rows]), torch.empty_like(self.logprobs[rows, 0])
        for params, members in by_params(jobs):
            scale = 1.0 if params.temperature in (0.0, 1.0) else params.temperature  # greedy is scored at 1
            if members is None:  # all rows have the same settings: no gather and scatter
                logits = logits_BV if scale == 1.0 else logits_BV / scale
                kept = _filtered(logits, params, jobs, undrawn)
                drawn, scores = sample_tokens(logits, seeds, counts, params, noise, kept, undrawn)
                return drawn, scores.float()
            index = torch.tensor(members, device=logits_BV.device)
            own = None if noise is None else noise[index]
            logits = logits_BV[index] / scale
            kept = _filtered(logits, params, [jobs[member] for member in members], undrawn)
            tokens[index], scores = sample_tokens(
                logits, seeds[index], counts[index], params, own, kept, undrawn
            )
            logprobs[index] = scores.float()
        return tokens, logprobs

    def clear(self) -> None:
        """Reset all rows to zero, in place."""
        self.jobs.clear()
        for item in fields(self):
            if item.name != "jobs":
                getattr(self, item.name).zero_()

    def move(self, source: list[int], target: list[int]) -> None:
        """Overwrite rows `target` with rows `source`."""
        for item in fields(self):
            if item.name != "jobs":
                tensor = getattr(self, item.name)
                tensor[target] = tensor[source]
        for old, new in zip(source, target, strict=True):
            self.jobs[new] = self.jobs[old]


def has_stop(
    ids: Sequence[int], stop_strings: Sequence[str], decode: Callable[[Sequence[int]], str] | None
) -> bool:
    """Say whether the tokens' text contains a stop string; the first token may start within a character."""
    assert decode is not None
    for skipped in range(CHARACTER_TOKENS):  # SentencePiece garbles all bytes after a cut character
        text = decode(ids[skipped:])
        if any(stop in text for stop in stop_strings):
            return True
        if "\ufffd" not in text:
            break
    return False


def are_plain(jobs: Sequence[Job]) -> bool:
    """Say whether all jobs have the same settings without filters, record nothing, and end like all others."""
    params = jobs[0].params
    return not params.is_filtered and all(
        job.params is params and job.num_top is None and job.ends is None for job in jobs
    )


def barred(
    logits_BV: torch.Tensor, jobs: Sequence[Job], counts_B: torch.Tensor, stop_ids: torch.Tensor
) -> torch.Tensor:
    """Return the logits with -inf for what would end a job before its least length; the argument if there is none.

    Args:
        logits_BV: Logits of the jobs' next tokens.
        jobs: The jobs.
        counts_B: Tokens that each has.
        stop_ids: Ids that end all jobs.
    """
    drawn = zip(jobs, counts_B.tolist(), strict=True)
    short = {row: job.ends for row, (job, n) in enumerate(drawn) if job.ends and n < job.ends.min_new_tokens}
    if short:
        logits_BV = logits_BV.clone()
    for row, ends in short.items():
        logits_BV[row, [*stop_ids.tolist(), *ends.stop_ids]] = float("-inf")
    return logits_BV


def by_params(jobs: Sequence[Job]) -> Iterable[tuple[SamplingParams, list[int] | None]]:
    """Group jobs by sampling settings: (params, indices), None for all if there is one group."""
    first = jobs[0].params
    if all(job.params is first for job in jobs):
        return [(first, None)]
    groups: dict[SamplingParams, list[int]] = {}
    for index, job in enumerate(jobs):
        groups.setdefault(job.params, []).append(index)
    return groups.items()


def _filtered(
    logits_BV: torch.Tensor, params: SamplingParams, jobs: Sequence[Job], undrawn: int | None
) -> torch.Tensor | None:
    """Filter logits and append what is left to the jobs that record it; None if no job does."""
    if all(job.kept is None for job in jobs):
        return None
    kept_BV = filter_logits(without(logits_BV, undrawn), params)
    for job, kept in zip(jobs, encode_kept(kept_BV > float("-inf")), strict=True):
        if job.kept is not None:
            job.kept.append(kept)
    return kept_BV


def note(logits_BV: torch.Tensor, tokens_B: torch.Tensor, jobs: Sequence[Job]) -> None:
    """Append the model's own score of the newest token to the jobs that record it."""
    rows = [row for row, job in enumerate(jobs) if job.num_top is not None]
    if not rows:
        return
    most = max(jobs[row].num_top or 0 for row in rows)
    for row, token in zip(rows, noted(logits_BV[rows], tokens_B[rows], most), strict=True):
        jobs[row].notes.append(replace(token, top=token.top[: jobs[row].num_top]))


def noted(logits_BV: torch.Tensor, tokens_B: torch.Tensor, num_top: int) -> list[Token]:
    """Score tokens under the model's own distribution.

    Args:
        logits_BV: Logits at temperature 1.
        tokens_B: The sampled tokens.
        num_top: Number of most likely alternatives.
    """
    chosen_B, normaliser_B = select_logprobs(logits_BV, tokens_B)
    top_logits, top_ids = logits_BV.topk(min(num_top, logits_BV.shape[1]), dim=-1)
    top_logprobs = top_logits - normaliser_B[:, None]

    rows = zip(tokens_B.tolist(), chosen_B.tolist(), top_ids.tolist(), top_logprobs.tolist(), strict=True)
    tokens: list[Token] = []
    for token, logprob, ids, logprobs in rows:
        pairs = zip(ids, logprobs, strict=True)
        # Columns outside the vocabulary have -inf; they are not alternatives.
        tokens.append(Token(token, logprob, tuple(pair for pair in pairs if pair[1] > float("-inf"))))
    return tokens
