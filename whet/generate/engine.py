"""Continuous batching on the trainer's own module: prompts to tokens, with the log-probabilities they were drawn with.

A prompt is prefilled once for all its samples. Rows that end leave at once and waiting prompts take their place. What
a sequence becomes depends on its prompt and seed alone, not on batch, row or order (given row-invariant arithmetic,
which `whet.generate.probe` measures).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields

import torch

from whet.algo.logprobs import head_logits
from whet.generate.cache import Decode, KVCache, Prefill
from whet.generate.sampling import SamplingParams, sample_tokens
from whet.model.attention import KEY_BLOCK, KEY_QUANTUM, AttentionKind, round_up
from whet.model.transformer import LanguageModel
from whet.types import FinishReason, UserError

PREFILL_TOKENS = 8192
CHECK_EVERY_GPU = 8
CHECK_EVERY_TEXT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt and the seeds of the samples wanted of it; `max_new_tokens` tightens the bound."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Generated ids (stop token included), their log-probabilities (fp32) and why it ended.

    The rest is that of an episode of several turns, see `whet.types.Sample`.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    trained: tuple[bool, ...] = ()
    turn_ends: tuple[int, ...] = ()
    turn_rewards: tuple[float, ...] = ()


@dataclass(slots=True)
class EngineStats:
    """Work done since the engine was made."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    decode_steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Rows:
    """State of the live rows, as tensors of `max_rows`; row r of every field belongs to one sequence."""

    seeds: torch.Tensor
    positions: torch.Tensor
    counts: torch.Tensor
    checked: torch.Tensor
    limits: torch.Tensor
    last: torch.Tensor
    done: torch.Tensor
    stopped: torch.Tensor
    tokens: torch.Tensor
    logprobs: torch.Tensor
    owner: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def empty(cls, num_rows: int, max_new: int, device: torch.device) -> _Rows:
        """Make `num_rows` rows; the buffers have one spare column, where ended rows write."""

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
            tokens=whole(torch.int64, max_new + 1),
            logprobs=whole(torch.float32, max_new + 1),
        )

    def move(self, source: list[int], target: list[int]) -> None:
        """Overwrite rows `target` by rows `source`."""
        for item in fields(self):
            if item.name != "owner":
                tensor = getattr(self, item.name)
                tensor[target] = tensor[source]
        for old, new in zip(source, target, strict=True):
            self.owner[new] = self.owner[old]


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
    """

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
    ) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows = {max_rows}: expected 1 or more")
        if stop_strings and decode is None:
            raise ValueError("stop_strings need a decode function")
        self.model = model
        self.device = model.head_weight.device
        self.stats = EngineStats()
        self._stop_ids = torch.tensor(sorted(set(stop_ids)), dtype=torch.int64, device=self.device)
        self._stop_strings = tuple(stop_strings)
        # Every token spells at least a byte, and a character may begin a few tokens earlier.
        self._stop_tail = max((len(stop.encode()) for stop in stop_strings), default=0) + 4
        self._decode = decode
        self._max_rows = max_rows
        self._attention: AttentionKind = attention
        self._autocast = autocast
        self._cache: KVCache | None = None
        self._head: torch.Tensor | None = None

    def generate(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        *,
        on_finished: Callable[[int], None] | None = None,
    ) -> list[list[Completion]]:
        """Draw every sample of every request.

        Args:
            requests: Prompts with the seeds of their samples.
            params: Temperature, filters and the longest completion.
            on_finished: Called with the number of samples that ended since the last call.

        Returns:
            For every request its completions, in the order of its seeds.

        Raises:
            UserError: If a prompt is empty or leaves no room in the context.
        """
        self._check(requests)
        began = time.perf_counter()
        results: list[list[Completion | None]] = [[None] * len(request.seeds) for request in requests]
        num_samples = sum(len(request.seeds) for request in requests)
        if num_samples == 0:
            return [[] for _ in requests]
        longest = max(len(request.prompt_ids) for request in requests)
        capacity = min(longest + params.max_new_tokens, self.model.config.max_positions)
        context: AbstractContextManager[object] = nullcontext()
        if self._autocast is not None:
            context = torch.autocast(self.device.type, dtype=self._autocast)
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode(), context:
                rows = min(self._max_rows, num_samples)
                self._head = self._head_for_sampling()
                self._reserve(rows, capacity)
                self._run(requests, params, results, rows, on_finished)
        finally:
            self._head = None
            self.model.train(was_training)
        self.stats.seconds += time.perf_counter() - began
        return [[completion for completion in row if completion is not None] for row in results]

    def release(self) -> None:
        """Give the cache's memory back until the next call."""
        self._cache = None

    def _check(self, requests: Sequence[Request]) -> None:
        context = self.model.config.max_positions
        for index, request in enumerate(requests):
            length = len(request.prompt_ids)
            if length == 0:
                raise UserError(f"prompt {index} is empty: expected at least one token (a BOS token will do)")
            if length >= context:
                raise UserError(
                    f"prompt {index} has {length} tokens, the model's context holds {context}: shorten or drop it"
                )
            if max(request.prompt_ids) >= self.model.config.vocab_size or min(request.prompt_ids) < 0:
                bad = min(request.prompt_ids) if min(request.prompt_ids) < 0 else max(request.prompt_ids)
                raise UserError(
                    f"prompt {index} has token id {bad}, the model's vocabulary has "
                    f"{self.model.config.vocab_size} rows: "
                    "the tokenizer does not fit the model"
                )

    def _head_for_sampling(self) -> torch.Tensor:
        weight = self.model.head_weight
        return weight if weight.is_cuda or weight.dtype == torch.float64 else weight.float()

    def _reserve(self, rows: int, capacity: int) -> None:
        dtype = self._autocast or self.model.head_weight.dtype
        cache = self._cache
        if cache is None or cache.num_rows < rows or cache.capacity < capacity or cache.keys.dtype != dtype:
            self._cache = None
            self._cache = KVCache(self.model.config, rows, capacity, dtype, self.device)

    def _run(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        results: list[list[Completion | None]],
        max_rows: int,
        on_finished: Callable[[int], None] | None,
    ) -> None:
        state = _Rows.empty(max_rows, params.max_new_tokens, self.device)
        waiting = [
            (index, sample) for index, request in enumerate(requests) for sample in range(len(request.seeds))
        ]
        waiting.reverse()
        steps = 0
        while waiting or state.owner:
            if waiting and len(state.owner) < max_rows:
                self._admit(requests, params, state, waiting, max_rows)
            else:
                self._decode_step(params, state)
                steps += 1
            if self._stop_strings and steps % CHECK_EVERY_TEXT == 0:
                self._stop_on_text(state)
            if self.device.type == "cuda" and steps % CHECK_EVERY_GPU:
                continue
            live = len(state.owner)
            num_done = int(state.done[:live].sum())
            if num_done and (num_done == live or num_done * 4 >= live or (waiting and num_done * 8 >= live)):
                self._harvest(state, results)
                if on_finished is not None:
                    on_finished(num_done)

    def _admit(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        state: _Rows,
        waiting: list[tuple[int, int]],
        max_rows: int,
    ) -> None:
        """Prefill waiting prompts, each once, as far as rows and the token budget reach; draw their first tokens."""
        assert self._cache is not None
        first = len(state.owner)
        prompts: list[tuple[int, list[int]]] = []
        tokens = 0
        while waiting and len(state.owner) < max_rows:
            index, _ = waiting[-1]
            if not prompts or prompts[-1][0] != index:
                if prompts and tokens + len(requests[index].prompt_ids) > PREFILL_TOKENS:
                    break
                prompts.append((index, []))
                tokens += len(requests[index].prompt_ids)
            prompts[-1][1].append(len(state.owner))
            state.owner.append(waiting.pop())
        lengths = [len(requests[index].prompt_ids) for index, _ in prompts]
        flat = torch.tensor(
            [token for index, _ in prompts for token in requests[index].prompt_ids], device=self.device
        )
        positions = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        context = Prefill(self._cache, [rows[0] for _, rows in prompts], lengths, self._attention)
        hidden = self.model(flat, positions, context)
        for length, (_, rows) in zip(lengths, prompts, strict=True):
            self._cache.copy_rows([rows[0]] * (len(rows) - 1), rows[1:], length)
        ends = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        repeats = torch.tensor([len(rows) for _, rows in prompts], device=self.device)
        logits = self._logits(hidden.index_select(0, ends), params).repeat_interleave(repeats, dim=0)
        new = slice(first, len(state.owner))
        state.seeds[new] = torch.tensor(
            [requests[index].seeds[sample] for index, sample in state.owner[new]], device=self.device
        )
        state.positions[new] = torch.tensor(lengths, device=self.device).repeat_interleave(repeats) - 1
        longest = params.max_new_tokens
        most = [min(requests[index].max_new_tokens or longest, longest) for index, _ in prompts]
        room = [self.model.config.max_positions - length for length in lengths]
        limits = list(map(min, most, room))
        state.limits[new] = torch.tensor(limits, device=self.device).repeat_interleave(repeats)
        for flags in (state.counts, state.checked, state.done, state.stopped):
            flags[new] = 0
        self.stats.prompt_tokens += tokens
        self._append(logits, params, state, new)

    def _logits(self, hidden_BD: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        assert self._head is not None
        temperature = params.temperature or 1.0
        return head_logits(
            hidden_BD, self._head, temperature=temperature, num_valid=self.model.num_valid_tokens
        )

    def _append(self, logits_BV: torch.Tensor, params: SamplingParams, state: _Rows, rows: slice) -> None:
        """Draw one token for each row and note it; ended rows write into the spare column and do not move on."""
        done = state.done[rows]
        tokens, logprobs = sample_tokens(logits_BV, state.seeds[rows], state.counts[rows], params)
        column = torch.where(done, params.max_new_tokens, state.counts[rows])[:, None]
        state.tokens[rows].scatter_(1, column, tokens[:, None])
        state.logprobs[rows].scatter_(1, column, logprobs.float()[:, None])
        live = ~done
        state.last[rows] = tokens
        state.counts[rows] += live
        state.positions[rows] += live
        stopped = torch.isin(tokens, self._stop_ids) & live
        state.stopped[rows] |= stopped
        state.done[rows] |= stopped | (state.counts[rows] >= state.limits[rows])

    def _decode_step(self, params: SamplingParams, state: _Rows) -> None:
        assert self._cache is not None
        live = slice(0, len(state.owner))
        positions = state.positions[live].clone()
        deepest = int(positions.max()) + 1
        num_keys = round_up(deepest, KEY_QUANTUM if deepest <= KEY_BLOCK else KEY_BLOCK)
        context = Decode(self._cache, positions, min(num_keys, self._cache.capacity), self._attention)
        hidden = self.model(state.last[live], positions, context)
        self._append(self._logits(hidden, params), params, state, live)
        self.stats.decode_steps += 1

    def _stop_on_text(self, state: _Rows) -> None:
        """End rows whose text has a stop string, and cut them at the token that completed it.

        Every token of every row is looked at before the row leaves, a stop id's row too: where a sequence ends does not
        depend on when this is called.
        """
        assert self._decode is not None
        counts, checked = state.counts.tolist(), state.checked.tolist()
        for row in range(len(state.owner)):
            if checked[row] == counts[row]:
                continue
            first = max(0, checked[row] - self._stop_tail)
            window = state.tokens[row, first : counts[row]].tolist()
            state.checked[row] = counts[row]
            if not self._has_stop(window):
                continue
            fresh = range(checked[row] - first + 1, len(window) + 1)
            length = next((n for n in fresh if self._has_stop(window[:n])), None)
            if length is not None:
                state.counts[row] = state.checked[row] = first + length
                state.done[row] = True
                state.stopped[row] = True

    def _has_stop(self, ids: Sequence[int]) -> bool:
        assert self._decode is not None
        text = self._decode(ids)
        return any(stop in text for stop in self._stop_strings)

    def _harvest(self, state: _Rows, results: list[list[Completion | None]]) -> None:
        """Hand out ended rows and close the holes with rows from the end."""
        assert self._cache is not None
        if self._stop_strings:
            self._stop_on_text(state)
        live = len(state.owner)
        done = state.done[:live].tolist()
        ended = [row for row in range(live) if done[row]]
        counts, stopped = state.counts.tolist(), state.stopped.tolist()
        tokens, logprobs = state.tokens[ended].tolist(), state.logprobs[ended].tolist()
        for row, row_tokens, row_logprobs in zip(ended, tokens, logprobs, strict=True):
            index, sample = state.owner[row]
            count = counts[row]
            results[index][sample] = Completion(
                ids=tuple(row_tokens[:count]),
                logprobs=tuple(row_logprobs[:count]),
                finish_reason="stop" if stopped[row] else "length",
            )
            self.stats.new_tokens += count
        kept = live - len(ended)
        holes = [row for row in ended if row < kept]
        movers = [row for row in range(kept, live) if not done[row]]
        if movers:
            self._cache.copy_rows(movers, holes, int(state.positions[movers].max()) + 1)
            state.move(movers, holes)
        del state.owner[kept:]
