"""CUDA graphs of a decode step, one per batch size: the host launches one thing a token instead of a thousand."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch
import torch.nn.functional as F

from whet.algo.logprobs import head_logits
from whet.generate.cache import KVCache
from whet.generate.rows import Rows
from whet.generate.sampling import SamplingParams, sample_tokens
from whet.kernels import dispatch, eager
from whet.model.transformer import LanguageModel

BUCKETS = (1, 2, 4, 8, *range(16, 257, 8))


class StaticDecode:
    """`whet.generate.cache.Decode` for graphs: every shape is fixed and how far a row sees is read on the device.

    Args:
        cache: The cache; rows 0..B-1 are live.
        positions_B: Position of the new token of each row.
    """

    def __init__(self, cache: KVCache, positions_B: torch.Tensor) -> None:
        self._cache = cache
        self._positions = positions_B
        self._lengths = positions_B + 1
        self._rows = torch.arange(positions_B.shape[0], device=positions_B.device)

    def attend(
        self, layer: int, q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor
    ) -> torch.Tensor:
        """Return attention outputs [N, H, C]; rows past the live ones (row padding) are zero."""
        count = self._positions.shape[0]
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self._positions] = k_NKC[:count].to(keys.dtype)
        values[self._rows, :, self._positions] = v_NKC[:count].to(values.dtype)
        attention = dispatch.pick(eager.decode_attention, keys.device, keys.dtype)
        out = attention(q_NHC[:count], keys, values, self._lengths)
        surplus = q_NHC.shape[0] - count
        return F.pad(out, (0, 0, 0, 0, 0, surplus)) if surplus else out


class DecodeGraphs:
    """Runs a decode step, from its second time at a batch size on as a replay of what the first time launched.

    A step is captured for the batch sizes in `BUCKETS` and run for the next larger one: the rows behind the live ones
    are drawn along and must be harmless. The first run takes the largest size, since the graphs share one memory pool
    and the later, smaller ones then fit into it. Elsewhere than on a GPU, with `WHET_KERNELS=eager`, and for more rows
    than the largest bucket, the step just runs.

    Args:
        step: Runs one decode step of rows 0..n-1. It reads and writes tensors that stay where they are, leaves nothing
            else behind, and never asks the device for a value.
        tensors: Returns these tensors (parameters, cache, state of the rows). Their values may change between two runs;
            when one has moved or changed its shape, all graphs are dropped and captured again.
        num_rows: Rows that exist.
        device: Where the tensors are.
    """

    def __init__(
        self,
        step: Callable[[int], None],
        tensors: Callable[[], Iterable[torch.Tensor]],
        num_rows: int,
        device: torch.device,
    ) -> None:
        self._step = step
        self._tensors = tensors
        self._buckets = sorted({*(size for size in BUCKETS if size < num_rows), min(num_rows, BUCKETS[-1])})
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._places: list[tuple[int, torch.Size, torch.dtype]] = []
        self._graphs: dict[tuple[Hashable, int], torch.cuda.CUDAGraph] = {}

    def run(self, num_live: int, key: Hashable = None) -> None:
        """Run one step.

        Args:
            num_live: Rows 0..num_live-1 are live.
            key: What else decides which operations the step launches: sampling parameters, adapters on or off.
        """
        if self._stream is None or num_live > BUCKETS[-1] or dispatch.mode() == "eager":
            self._step(num_live)
            return
        places = [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in self._tensors()]
        if places != self._places:
            self.clear()
            self._places = places
        rows = next(size for size in self._buckets if size >= num_live) if self._graphs else self._buckets[-1]
        graph = self._graphs.get((key, rows))
        if graph is None:
            self._graphs[key, rows] = self._capture(rows, self._stream)
        else:
            graph.replay()

    def clear(self) -> None:
        """Drop all graphs and the memory that they hold."""
        self._graphs.clear()
        self._places = []

    def _capture(self, rows: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """Run the step for real, which compiles kernels and warms libraries up, then record it, which runs nothing."""
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        cached = torch.is_autocast_cache_enabled()
        # A weight's cast that autocast keeps would be freed, or stale, when the graph reads it: cast inside the graph.
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()
        try:
            current = torch.cuda.current_stream(self._device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self._step(rows)
            current.wait_stream(stream)
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._step(rows)
        finally:
            torch.set_autocast_cache_enabled(cached)
        return graph


def can_graph(model: LanguageModel, cache: KVCache) -> bool:
    """Say whether steps are to be graphs: on a GPU with `WHET_KERNELS=triton`, unless a module has hooks.

    Args:
        model: The model.
        cache: Its cache.
    """
    is_plain = all(not module._forward_hooks for module in model.modules())
    return is_plain and cache.keys.device.type in dispatch.KERNELS and dispatch.mode() == "triton"


class StaticSteps:
    """Decode steps on rows that stay where they are, so that a step can be a graph.

    Args:
        model: The model.
        cache: Its cache.
        state: The rows; those behind the live ones are drawn along as ended ones.
        stop_ids: Ids that end a row.
    """

    def __init__(self, model: LanguageModel, cache: KVCache, state: Rows, stop_ids: torch.Tensor) -> None:
        self.state = state
        self._model, self._cache, self._stop_ids = model, cache, stop_ids
        self._params = SamplingParams()
        self._graphs = DecodeGraphs(self._step, self._tensors, state.num_rows, cache.keys.device)

    def fits(self, cache: KVCache, state: Rows) -> bool:
        """Say whether these rows do for a session that wants others."""
        return self._cache is cache and self.state.tokens.shape == state.tokens.shape

    def run(self, num_live: int, params: SamplingParams) -> None:
        """Draw the next token of the first rows."""
        self.state.done[num_live:] = True
        self._params = params
        self._graphs.run(num_live, params)

    def _tensors(self) -> list[torch.Tensor]:
        state = self.state
        own = [
            state.seeds,
            state.positions,
            state.counts,
            state.limits,
            state.last,
            state.done,
            state.stopped,
        ]
        kept = [state.tokens, state.logprobs, self._cache.keys, self._cache.values, self._stop_ids]
        return [*own, *kept, *self._model.parameters()]

    def _step(self, count: int) -> None:
        state, rows, params = self.state, slice(0, count), self._params
        context = StaticDecode(self._cache, state.positions[rows].clone())
        hidden = self._model(state.last[rows], state.positions[rows], context)
        temperature = params.temperature or 1.0
        valid = self._model.num_valid_tokens
        logits = head_logits(hidden, self._model.head_weight, temperature=temperature, num_valid=valid)
        tokens, logprobs = sample_tokens(logits, state.seeds[rows], state.counts[rows], params)
        state.take(rows, tokens, logprobs.float(), self._stop_ids)


def static_steps(
    before: StaticSteps | None, model: LanguageModel, cache: KVCache, state: Rows, stop_ids: torch.Tensor
) -> StaticSteps | None:
    """Return the steps of a session: those of the session before, emptied, where they fit; None without graphs."""
    if not can_graph(model, cache):
        return None
    if before is None or not before.fits(cache, state):
        return StaticSteps(model, cache, state, stop_ids)
    before.state.clear()
    return before
