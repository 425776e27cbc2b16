"""Continuous batching on the trainer's own module: prompts to tokens, with the log-probabilities they were drawn with.

A prompt is prefilled once for all its samples. Rows that end leave at once and waiting prompts take their place. What
a sequence becomes depends on its prompt and seed alone, not on batch, row or order (given row-invariant arithmetic,
which `whet.generate.probe` measures).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from whet.algo.kept import encode_experts
from whet.algo.logprobs import head_logits
from whet.generate.activations import NOWHERE, Activations
from whet.generate.cache import CacheSize, Decode, KVCache, Prefill
from whet.generate.fused import FUSED_PREFILL, can_fuse, fuse, prefill, row_state
from whet.generate.graphs import StaticSteps, static_steps
from whet.generate.pieces import PIECE_TOKENS, Pieces, Reading
from whet.generate.plain import PlainSteps, can_step
from whet.generate.rows import (
    Completion,
    Job,
    OnEnded,
    Request,
    Rows,
    Token,
    are_plain,
    barred,
    has_stop,
    note,
    noted,
)
from whet.generate.sampling import SamplingParams
from whet.kernels import dispatch
from whet.kernels.cpu import head as cpu_head
from whet.kernels.cpu.layers import Layers
from whet.kernels.cpu.ops import CHANNELS
from whet.model.attention import KEY_QUANTUM, AttentionKind, round_up
from whet.model.config import has_own_rules
from whet.model.lora.several import Several
from whet.model.quant import dense_copies
from whet.model.routing import Routing, record_bytes
from whet.model.transformer import LanguageModel
from whet.model.vision.ids import IMAGE, is_image
from whet.telemetry.spans import spanned
from whet.types import UserError

PREFILL_TOKENS = 8192
"""Most prompt tokens of one prefill, which bounds its activations; a longer single prompt is read alone."""
CHECK_EVERY_GPU = 8
"""Steps between looks at which rows have ended, on a GPU: each look waits for everything launched before it."""
CHECK_EVERY_TEXT = 4
"""Steps between searches for stop strings: they decode text on the host, and a late find only costs drawn tokens."""


@dataclass(slots=True)
class EngineStats:
    """Work done since the engine was made."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    decode_steps: int = 0
    seconds: float = 0.0


class Engine:
    """Generates completions with a model that stays the trainer's own: there is no second copy of the weights.

    Args:
        model: The policy.
        stop_ids: Token ids that end a completion (kept in it).
        stop_strings: Texts that end a completion; needs `decode`.
        decode: Turns completion ids into text, for stop strings.
        max_rows: Sequences decoded together.
        attention: 'exact' (rows do not depend on the batch) or 'fast'.
        autocast: Compute dtype of products when it is not the parameters' own (bfloat16 for float32 parameters).
        activations: Where `generate` keeps what it computes, if anywhere.
        trains: Whether completions will be trained on: `generate` then records what filters left of each distribution.
        records_experts: Whether to record the experts that each token goes to, too.
        several: Adapters that stand beside the model, one of which a request may name.

    Attributes:
        look: Called before every decoding step of `generate`; may raise to end it.
        is_cut: Asked before every decoding step of `generate`: once it says so, all rows end where they are, and what
            waits stays empty. They end by their length then, and are shorter than that.
    """

    look: Callable[[], None] = staticmethod(lambda: None)
    is_cut: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(
        self,
        model: LanguageModel,
        *,
        stop_ids: Sequence[int],
        stop_strings: Sequence[str] = (),
        decode: Callable[[Sequence[int]], str] | None = None,
        max_rows: int = 256,
        attention: AttentionKind = "exact",
        autocast: torch.dtype | None = None,
        activations: Activations | None = None,
        trains: bool = False,
        records_experts: bool = False,
        several: Several | None = None,
    ) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows = {max_rows}: expected 1 or more")
        if stop_strings and decode is None:
            raise ValueError("stop_strings need a decode function")
        self.model = model
        self.device = model.head_weight.device
        self.stats = EngineStats()
        self._stop_ids = torch.tensor(sorted(set(stop_ids)), dtype=torch.int64, device=self.device)
        self.stop_strings = tuple(stop_strings)
        self._decode = decode
        self._max_rows = max_rows
        self._attention: AttentionKind = attention
        self._autocast = autocast
        self._activations, self._keeps = activations, False
        self._trains, self._records_experts = trains, records_experts
        self._several = several
        self._cache: KVCache | None = None
        self._is_checked = False
        self._head: torch.Tensor | None = None
        self._layers: Layers | None = None
        self._plain: PlainSteps | None = None
        self._static: StaticSteps | None = None

    def generate(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        *,
        on_ended: OnEnded | None = None,
    ) -> list[list[Completion]]:
        """Draw every sample of every request.

        Args:
            requests: Prompts with the seeds of their samples.
            params: Temperature, filters and the longest completion.
            on_ended: Called with each request whose samples have all ended. The order of calls depends on what is
                drawn, not on time.

        Returns:
            For every request its completions, in the order of its seeds.

        Raises:
            UserError: If a prompt is empty or leaves no room in the context.
        """
        for index, request in enumerate(requests):
            self.check(request.prompt_ids, f"prompt {index}")
            self.check_adapter(request.adapter)
        began = time.perf_counter()
        records = self._trains and params.is_filtered and params.temperature > 0
        jobs = [
            [
                Job(
                    request=request,
                    seed=seed,
                    params=params,
                    stop_strings=self.stop_strings,
                    kept=[] if records else None,
                )
                for seed in request.seeds
            ]
            for request in requests
        ]
        # The samples of a prompt stay together: adjacent jobs of one request share a prefill.
        waiting = [job for row in jobs for job in row]
        if not waiting:
            return [[] for _ in requests]
        longest = max(len(request.prompt_ids) for request in requests)
        size = self.room(min(self._max_rows, len(waiting)), longest, params.max_new_tokens, len(requests))
        with self.session(size) as rows:
            if self._activations is not None and self._layers is not None:
                begun = self._layers, requests, params.max_new_tokens
                self._keeps = self._autocast is None and self._activations.begin(self.model, *begun)
            places = {job: place for place, row in enumerate(jobs) for job in row}
            left = [len(row) for row in jobs]
            for job in self._run(rows, waiting):
                place = places[job]
                left[place] -= 1
                if on_ended is not None and not left[place]:
                    on_ended(place, _completions(jobs[place]))
        self.stats.seconds += time.perf_counter() - began
        return [_completions(row) for row in jobs]

    @property
    def max_positions(self) -> int:
        """Longest context in tokens, prompt and completion together."""
        return self.model.config.max_positions

    def room(self, rows: int, prompt: int, completion: int, requests: int | None = None) -> CacheSize:
        """Say what a `session` is to hold.

        Args:
            rows: Jobs that are live at once.
            prompt: Longest prompt in tokens.
            completion: Longest completion in tokens.
            requests: Different prompts; None if each job may have its own.
        """
        context = self.model.config.max_positions
        prompts = rows if requests is None else min(rows, requests)
        return CacheSize(rows=rows, prompt=prompt, completion=completion, context=context, prompts=prompts)

    @contextmanager
    def session(self, size: CacheSize) -> Iterator[Rows]:
        """Make room for rows and be ready to `admit` jobs to them and to `decode` them.

        Args:
            size: What they take, from `room`.
        """
        context: AbstractContextManager[object] = nullcontext()
        if self._autocast is not None:
            context = torch.autocast(self.device.type, dtype=self._autocast)
        was_training = self.model.training
        self.model.eval()
        try:
            copies = dense_copies(self.model, self._autocast or self.model.head_weight.dtype)
            with copies, torch.inference_mode(), context:
                # The fast paths hold addresses of weights and cache. Between sessions the trainer may replace the
                # weights, so they are collected anew for each one and dropped at its end.
                self._head = self._head_for_sampling()
                self._reserve(size)
                assert self._cache is not None
                if can_fuse(self.model, self._cache, self._cache.values.dtype):
                    count = 1 if self._several is None else len(self._several.names)
                    self._layers = fuse(self.model, self._cache, self._cache.values.dtype, count)
                elif can_step(self.model, self._cache):
                    self._plain = PlainSteps(self.model, self._cache)
                record = record_bytes(self.model.config) if self._records_experts else 0
                state = Rows.empty(size.rows, size.completion, self.device, record_bytes=record)
                self._static = static_steps(self._static, self.model, self._cache, state, self._stop_ids)
                yield self._static.state if self._static else state
        finally:
            self._head, self._layers, self._plain, self._keeps = None, None, None, False
            if self._several is not None:
                self._several.clear()
            self.model.train(was_training)

    def release(self, above: int = 0) -> None:
        """Give the cache's memory back until the next call, if it takes more bytes than `above`."""
        if self._cache is not None and self._cache.nbytes > above:
            self._cache = None

    def check(self, prompt_ids: Sequence[int], name: str = "the prompt") -> None:
        """Refuse a prompt that the model cannot read, or that leaves no room in its context.

        Raises:
            UserError: One line that calls it by `name`.
        """
        context, vocabulary = self.model.config.max_positions, self.model.config.vocab_size
        if not prompt_ids:
            raise UserError(f"{name} is empty: expected at least one token (a BOS token will do)")
        if len(prompt_ids) >= context:
            raise UserError(
                f"{name} has {len(prompt_ids)} tokens, the model's context holds {context}: shorten or drop it"
            )
        text = prompt_ids
        if any(map(is_image, prompt_ids)):
            if self.model.images is None:
                raise UserError(
                    f"{name} has an image, and the model reads text alone: take a model that sees"
                )
            self.model.images.check(prompt_ids, name)
            text = [token for token in prompt_ids if not is_image(token)] or [0]
        if max(text) >= vocabulary or min(text) < 0:
            bad = min(text) if min(text) < 0 else max(text)
            raise UserError(
                f"{name} has token id {bad}, the model's vocabulary has {vocabulary} rows: "
                "the tokenizer does not fit the model"
            )

    def check_adapter(self, name: str) -> None:
        """Refuse the name of an adapter that is not here; '' is the model as it stands.

        Raises:
            UserError: One line.
        """
        if self._several is not None:
            self._several.numbers([name])
        elif name:
            raise UserError(f"no adapter {name[:80]!r} here: the model was loaded without several adapters")

    def _adapters(
        self, requests: Sequence[Request], lengths: Sequence[int] | None = None
    ) -> torch.Tensor | None:
        """Tell the layers which adapter each row of the next pass has; return the numbers, None without several.

        Args:
            requests: The rows' requests.
            lengths: Rows of each; None for one.
        """
        if self._several is None:
            return None
        counts = lengths or [1] * len(requests)
        names = [r.adapter for r, count in zip(requests, counts, strict=True) for _ in range(count)]
        return self._several.select(names, self.device)

    def _head_for_sampling(self) -> torch.Tensor:
        weight = self.model.head_weight
        if dispatch.runs_cpp(weight):
            return weight
        return weight if weight.is_cuda or weight.dtype == torch.float64 else weight.float()

    def _reserve(self, size: CacheSize) -> None:
        dtype = self._autocast or self.model.head_weight.dtype
        cache = self._cache
        if cache is None or not cache.fits(size) or cache.keys.dtype != dtype:
            self._cache = None
            # As the trainer's attention decides: by heads and their dtype, whatever the model's width.
            head_dim = self.model.config.head_dim
            q_HC = torch.empty(0, head_dim, dtype=dtype, device=self.device)
            is_tiled = head_dim in CHANNELS and dispatch.runs_cpp(q_HC, operation="attention")
            is_tiled = is_tiled and not has_own_rules(self.model.config)
            self._cache = KVCache(self.model.config, size, dtype, self.device, is_tiled=is_tiled)
        else:
            cache.clear()

    def _run(self, state: Rows, waiting: list[Job]) -> Iterator[Job]:
        """Schedule, run, take: admit waiting jobs, decode live rows, and yield the jobs that ended."""
        waiting.reverse()  # the next job is the one that `pop` takes
        steps = 0
        while waiting or state.jobs:
            self.look()
            if self.is_cut():
                yield from self._cut(state, waiting)
                return
            # Free rows are filled before the next step, which reads all weights whatever the number of rows.
            if waiting and len(state.jobs) < state.num_rows:
                self.admit(state, waiting)
            else:
                self.decode(state)
                steps += 1
            if steps % CHECK_EVERY_TEXT == 0:
                self.stop_on_text(state)
            if self.device.type == "cuda" and steps % CHECK_EVERY_GPU:
                continue
            live = len(state.jobs)
            num_done = int(state.done[:live].sum())  # on a GPU the host waits here
            # To close a hole costs a copy of a row's cache; a row that ended costs a row of every product.
            is_worth_it = num_done * 4 >= live or (waiting and num_done * 8 >= live)
            if num_done and is_worth_it:
                yield from self.harvest(state)

    def _cut(self, state: Rows, waiting: list[Job]) -> Iterator[Job]:
        """Yield all jobs as they are."""
        state.done[: len(state.jobs)] = True
        yield from self.harvest(state)
        while waiting:
            waiting[-1].completion = Completion(ids=(), logprobs=(), finish_reason="length")
            yield waiting.pop()

    @spanned("prefill")
    def admit(self, state: Rows, waiting: list[Job]) -> None:
        """Prefill waiting prompts, each once, as far as rows and the token budget reach; draw their first tokens.

        Args:
            state: Live rows; at least one is free.
            waiting: Jobs, the next one last; those admitted leave it.
        """
        assert self._cache is not None
        first = len(state.jobs)
        prompts: list[tuple[Request, list[int]]] = []
        tokens = 0
        while waiting and len(state.jobs) < state.num_rows:
            # Where the rows run out within a request, its prompt is read again with the samples left over.
            request = waiting[-1].request
            if not prompts or prompts[-1][0] is not request:
                if prompts and tokens + len(request.prompt_ids) > PREFILL_TOKENS:
                    break
                prompts.append((request, []))
                tokens += len(request.prompt_ids)
            prompts[-1][1].append(len(state.jobs))
            state.jobs.append(waiting.pop())
        lengths = [len(request.prompt_ids) for request, _ in prompts]
        ids = [token for request, _ in prompts for token in request.prompt_ids]
        flat = torch.tensor(ids, device=self.device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        rows = [members for _, members in prompts]
        homes = self._cache.place([request for request, _ in prompts], rows)
        state.bases[first : len(state.jobs)] = NOWHERE
        adapters = self._adapters([request for request, _ in prompts], lengths)
        is_text = self.model.images is None or max(ids) < IMAGE
        if self._layers is not None and max(lengths) <= FUSED_PREFILL and is_text:
            places = self._places(state, prompts) if self._keeps else None
            hidden = prefill(self._layers, flat, positions, homes, lengths, places, adapters)
        else:
            routing = self._routing()
            hidden = self.model(
                flat, positions, Prefill(self._cache, homes, lengths, self._attention, routing)
            )
            if routing is not None:
                parts = routing.encoded(tokens).split(lengths)
                for part_NX, members in zip(parts, rows, strict=True):
                    text = encode_experts(part_NX)
                    for row in members:
                        state.jobs[row].prompt_experts = text
        self._cache.give(homes, rows, lengths)
        ends = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        self.stats.prompt_tokens += tokens
        self._start(state, first, hidden.index_select(0, ends), lengths, [len(members) for members in rows])

    def _start(
        self, state: Rows, first: int, last_PD: torch.Tensor, lengths: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Set up the rows from `first` on, whose prompts were read, and draw their first tokens.

        Args:
            state: Live rows, with the new jobs.
            first: First new row.
            last_PD: Hidden state of each prompt's last token.
            lengths: Tokens of each prompt.
            counts: Rows of each prompt.
        """
        repeats = torch.tensor(counts, device=self.device)
        logits = self._logits(last_PD)
        if not self._is_checked:
            self._check_logits(logits)
        logits = logits.repeat_interleave(repeats, dim=0)
        new = slice(first, len(state.jobs))
        state.seeds[new] = torch.tensor([job.seed for job in state.jobs[new]], device=self.device)
        # The position of the prompt's last token: drawing a token moves the row on to where that token will be read.
        state.positions[new] = torch.tensor(lengths, device=self.device).repeat_interleave(repeats) - 1
        state.limits[new] = torch.tensor([self._limit(job) for job in state.jobs[new]], device=self.device)
        for flags in (state.counts, state.checked, state.done, state.stopped):
            flags[new] = 0
        if not dispatch.runs_cpp(logits):  # the kernel that draws makes its own noise, the same numbers
            state.draw_noise(new, max(self._limit(job) for job in state.jobs[new]))
        self._append(logits, state, new)

    def give_up(self, state: Rows, num_live: int) -> None:
        """Take back an admission that failed, or with `num_live` = 0 all rows, whose state is then unknown."""
        assert self._cache is not None
        del state.jobs[num_live:]
        self._cache.recount(num_live)

    def begin(self, ids: Sequence[int], adapter: str = "") -> Reading:
        """Return a text to be read by `read`, inside one `session`; its images, if any, are not cut."""
        return Reading(ids, adapter, Pieces(len(ids), self.device, self._attention))

    def read(self, reading: Reading, most: int = 0) -> torch.Tensor:
        """Read the next piece of a text, of at most so many tokens; return its hidden states [N, D]."""
        first = reading.num_read
        piece = reading.ids[first : first + (most or PIECE_TOKENS)]
        tokens = torch.tensor(piece, device=self.device)
        positions = torch.arange(first, first + len(piece), device=self.device)
        reading.context.begin(len(piece))
        with nullcontext() if self._several is None else self._several.all_rows(reading.adapter):
            hidden = self.model(tokens, positions, reading.context)
        reading.num_read += len(piece)
        reading.last_1D = hidden[len(piece) - 1 : len(piece)]
        return hidden

    def admit_read(self, state: Rows, reading: Reading, jobs: Sequence[Job]) -> None:
        """Admit jobs of one prompt that was read piece by piece, and draw their first tokens.

        Args:
            state: Live rows; at least one is free for each job.
            reading: The prompt, complete.
            jobs: The jobs, of one request.
        """
        assert self._cache is not None
        assert reading.last_1D is not None
        first, length = len(state.jobs), len(reading.ids)
        state.jobs += jobs
        rows = list(range(first, len(state.jobs)))
        homes = self._cache.place([jobs[0].request], [rows])
        reading.context.store(self._cache, homes[0])
        self._cache.give(homes, [rows], [length])
        state.bases[first : len(state.jobs)] = NOWHERE
        self.stats.prompt_tokens += length
        self._start(state, first, reading.last_1D, [length], [len(rows)])

    def _places(self, state: Rows, prompts: Sequence[tuple[Request, list[int]]]) -> torch.Tensor:
        """Choose where the activations of new rows are kept; return the places of their prompts' tokens."""
        assert self._activations is not None
        places = []
        for request, rows in prompts:
            start, length = self._activations.prompt(request), len(request.prompt_ids)
            places.append(torch.arange(start, start + length))
            for row in rows:
                state.bases[row] = self._activations.completion(self._limit(state.jobs[row])) - length
        return torch.cat(places)

    def _limit(self, job: Job) -> int:
        longest, length = job.params.max_new_tokens, len(job.request.prompt_ids)
        return min(longest, job.request.max_new_tokens or longest, self.model.config.max_positions - length)

    @spanned("head")
    def _logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        assert self._head is not None
        model = self.model
        options = {"num_valid": model.num_valid_tokens, "cap": model.config.block.logit_cap}
        return head_logits(hidden_BD, self._head, temperature=1.0, **options)

    def _check_logits(self, logits_BV: torch.Tensor) -> None:
        """Refuse a model that cannot be sampled from, at its first prompts: nothing is written yet.

        Raises:
            UserError: If the largest logit of a row is no number: a NaN counts as one, -infinity only if all are.
        """
        if not bool(logits_BV.amax(-1).isfinite().all()):
            dtype = str(self._autocast or self.model.head_weight.dtype).removeprefix("torch.")
            raise UserError(
                f"the model's logits contain NaN or infinity, so it cannot write: its weights are too large for "
                f"{dtype}, or a training diverged; take another precision or an earlier checkpoint"
            )
        self._is_checked = True

    @spanned("sample")
    def _append(self, logits_BV: torch.Tensor, state: Rows, rows: slice) -> None:
        """Draw one token for each row and note it; ended rows write into the spare column and do not move on."""
        jobs = state.jobs[rows]
        params = jobs[0].params
        undrawn = self.model.undrawn_id
        if undrawn is None and are_plain(jobs) and dispatch.runs_cpp(logits_BV):
            where, valid = row_state(state, rows.start, self._stop_ids), self.model.num_valid_tokens
            cpu_head.draw(logits_BV, where, num_valid=valid, temperature=params.temperature)
            return
        is_served = any(job.num_top is not None or job.ends is not None for job in jobs)
        drawn_BV = barred(logits_BV, jobs, state.counts[rows], self._stop_ids) if is_served else logits_BV
        tokens, logprobs = state.draw(
            rows, drawn_BV, has_noise=not dispatch.runs_cpp(logits_BV), undrawn=undrawn
        )
        if is_served:
            note(logits_BV, tokens, jobs)
        state.take(rows, tokens, logprobs, self._stop_ids)
        if is_served:
            state.end_as_asked(rows)

    @spanned("decode")
    def decode(self, state: Rows) -> None:
        """Draw the next token of every live row."""
        self.stats.decode_steps += 1
        # One graph of all of it, drawing included. Filters are left out: top-p looks at values, which a graph cannot.
        if self._static is not None and are_plain(state.jobs):
            self._static.run(len(state.jobs), state.jobs[0].params)
            return
        live = slice(0, len(state.jobs))
        self._append(self._logits(self._read(state, live)), state, live)

    def _read(self, state: Rows, live: slice) -> torch.Tensor:
        """Read the last token of every live row by the fastest path that computes this model; return [B, D]."""
        assert self._cache is not None
        last, positions = state.last[live], state.positions[live]
        adapters = self._adapters([job.request for job in state.jobs])
        if self._layers is not None:
            places = state.bases[live] + positions if self._keeps else None
            return self._layers.run(last, positions, places_M=places, adapters_M=adapters)
        # The cache is written at these positions while the rows' own positions may move on.
        positions = positions.clone()
        deepest = int(positions.max())
        if self._plain is not None:
            return self._plain.run(last, positions, deepest)
        num_keys = min(round_up(deepest + 1, KEY_QUANTUM), self._cache.capacity)
        routing = self._routing()
        context = Decode(self._cache, positions, num_keys, self._attention, routing)
        hidden_BD = self.model(last, positions, context)
        if routing is not None:
            # A row that ended writes where its last token, which nothing reads, would stand.
            count = len(state.jobs)
            place_B = state.counts[live] - 1
            state.experts[torch.arange(count, device=self.device), place_B] = routing.encoded(count)
        return hidden_BD

    def _routing(self) -> Routing | None:
        """Return what notes the experts of a pass, where they are recorded."""
        return Routing(self.model.config) if self._records_experts else None

    def stop_on_text(self, state: Rows) -> None:
        """End rows whose text has a stop string, and cut them at the token that completed it.

        Every token of every row is looked at before the row leaves, a stop id's row too: where a sequence ends does not
        depend on when this is called.
        """
        if not any(job.stop_strings for job in state.jobs):
            return
        counts, checked = state.counts.tolist(), state.checked.tolist()
        for row, job in enumerate(state.jobs):
            if checked[row] == counts[row] or not job.stop_strings:
                continue
            # A stop string may have begun in tokens that were looked at before.
            first = max(job.ends.min_new_tokens if job.ends else 0, checked[row] - job.tail)
            window = state.tokens[row, first : counts[row]].tolist()
            state.checked[row] = counts[row]
            if not has_stop(window, job.stop_strings, self._decode):
                continue
            # The shortest text that has it: what came after it is cut, however late the search is.
            fresh = range(max(0, checked[row] - first) + 1, len(window) + 1)
            length = next((n for n in fresh if has_stop(window[:n], job.stop_strings, self._decode)), None)
            if length is not None:
                state.counts[row] = state.checked[row] = first + length
                state.done[row] = True
                state.stopped[row] = True

    def harvest(self, state: Rows) -> list[Job]:
        """Complete the jobs that ended, return them, and close the holes with rows from the end."""
        assert self._cache is not None
        self.stop_on_text(state)
        live = len(state.jobs)
        done = state.done[:live].tolist()
        ended = [row for row in range(live) if done[row]]
        counts, stopped = state.counts.tolist(), state.stopped.tolist()
        tokens, logprobs = state.tokens[ended].tolist(), state.logprobs[ended].tolist()
        jobs = [state.jobs[row] for row in ended]
        for row, job, row_tokens, row_logprobs in zip(ended, jobs, tokens, logprobs, strict=True):
            count = counts[row]
            job.completion = Completion(
                ids=tuple(row_tokens[:count]),
                logprobs=tuple(row_logprobs[:count]),
                finish_reason="stop" if stopped[row] else "length",
                kept=tuple((job.kept or ())[:count]),
                experts=(job.prompt_experts, encode_experts(state.experts[row, : count - 1]))
                if self._records_experts
                else (),
            )
            self.stats.new_tokens += count
            if self._keeps and self._activations is not None:
                own = int(state.bases[row]) + len(job.request.prompt_ids)
                self._activations.note(job.request, own, job.completion.ids)
        self._cache.leave(ended)
        # Live rows stay 0..B-1 without gaps, so that a step reads contiguous memory: the last ones move into the holes.
        # A row's bits depend on nothing but the row, so moving changes no result.
        kept = live - len(ended)
        holes = [row for row in ended if row < kept]
        movers = [row for row in range(kept, live) if not done[row]]
        if movers:
            self._cache.move(movers, holes, int(state.positions[movers].max()))
            state.move(movers, holes)
        del state.jobs[kept:]
        return jobs

    def score(self, prompt_ids: Sequence[int], num_top: int, adapter: str = "") -> Iterator[list[Token]]:
        """Score a text's own tokens, inside a `session`: yield those of each piece that was read.

        The first token has no score, since nothing stands before it.
        """
        reading = self.begin(prompt_ids, adapter)
        while not reading.is_read:
            yield self.score_piece(reading, num_top)

    def score_piece(self, reading: Reading, num_top: int, most: int = 0) -> list[Token]:
        """Read the next piece of a text, of at most so many tokens, and score the text's tokens that it foretells."""
        first, ids = reading.num_read, reading.ids
        hidden_ND = self.read(reading, most)
        scored = range(first + 1, min(reading.num_read, len(ids) - 1) + 1)
        targets = torch.tensor([ids[place] for place in scored], device=self.device)
        tokens = [] if first else [Token(ids[0])]
        if len(targets):
            tokens += noted(self._logits(hidden_ND[: len(targets)]), targets, num_top)
        return tokens


def _completions(jobs: Sequence[Job]) -> list[Completion]:
    return [job.completion for job in jobs if job.completion is not None]
