"""CUDA graphs of a decode step, one per batch size: the host launches one graph per token instead of a thousand
kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
import torch.nn.functional as F

from whet.algo.logprobs import head_logits
from whet.generate.cache import KVCache
from whet.generate.rows import Rows
from whet.generate.sampling import SamplingParams, sample_tokens
from whet.kernels import dispatch, eager
from whet.kernels.mode import mode
from whet.model.attention import Rule
from whet.model.config import options
from whet.model.lora.several import Mixed
from whet.model.lora.side import sides_of
from whet.model.quant import packed_parts
from whet.model.transformer import LanguageModel, LlamaLike
from whet.types import Segment

KNOWN_OPTIONS = {
    "rope_scaling",
    "tie_embeddings",
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "qk_norm",
    "whole_qk_norm",
    "norms",
    "norm_offset",
    "activation",
    "ropes",
    "query_scale",
    "position_scale",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "is_gated",
    "qkv_clip",
}
"""Options of a model whose step is a fixed sequence of launches with plain attention."""
BUCKETS = (1, 2, 4, 8, *range(16, 257, 8))


class StaticDecode:
    """`whet.generate.cache.Decode` for graphs: every shape is fixed, and the length of each row is read on the device.

    Args:
        cache: The cache; rows 0..B-1 are live.
        positions_B: Position of the new token of each row.
    """

    routing = None  # a model with experts has no graphs
    segments: Sequence[Segment] = ()

    def see_ahead(self, spans: Sequence[tuple[int, int]]) -> None:
        """Refuse: no token of a completion sees later ones."""
        assert not spans

    def __init__(self, cache: KVCache, positions_B: torch.Tensor) -> None:
        self._cache, self.longest = cache, cache.size.longest
        self._positions = positions_B
        self._lengths = positions_B + 1
        self._rows = torch.arange(positions_B.shape[0], device=positions_B.device)

    def attend(
        self,
        layer: int,
        q_NHC: torch.Tensor,
        k_NKC: torch.Tensor,
        v_NKC: torch.Tensor,
        rule: Rule | None = None,
    ) -> torch.Tensor:
        """Return attention outputs [N, H, C]; rows past the live ones (row padding) are zero."""
        assert rule is None, "`can_graph` declines such a model"
        count = self._positions.shape[0]
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self._positions] = k_NKC[:count].to(keys.dtype)
        values[self._rows, :, self._positions] = v_NKC[:count].to(values.dtype)
        out = dispatch.run(eager.decode_attention, q_NHC[:count], keys, values, self._lengths)
        surplus = q_NHC.shape[0] - count
        return F.pad(out, (0, 0, 0, 0, 0, surplus)) if surplus else out

    def recur(self, *_: object) -> torch.Tensor:
        """Refuse: `can_graph` declines a model with such layers."""
        raise AssertionError("no graph of a recurrent layer")


class DecodeGraphs:
    """Runs a decode step; from the second run at a batch size on it replays the first run's launches.

    A step is captured for the batch sizes in `BUCKETS` and run at the next larger one: the padding rows are computed
    along and must be harmless. The largest size is captured first: the graphs share one memory pool, and smaller ones
    then fit into it. Without a GPU, with `WHET_KERNELS=eager`, and for more rows than the largest bucket, the step runs
    eagerly.

    Args:
        step: Runs one decode step of rows 0..n-1. It only reads and writes tensors at fixed addresses, has no other
            side effects, and never synchronises with the device.
        tensors: Returns these tensors (parameters, cache, state of the rows). Their values may change between runs; if
            one moves or changes shape, all graphs are dropped and captured again.
        num_rows: Number of rows.
        device: Device of the tensors.
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
            key: Everything else that determines the launched operations: sampling parameters, adapters on or off.
        """
        if self._stream is None or num_live > BUCKETS[-1] or mode() == "eager":
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
        """Drop all graphs and free their memory."""
        self._graphs.clear()
        self._places = []

    def _capture(self, rows: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """Run the step, which compiles kernels and warms up libraries, then capture it, which executes nothing."""
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        cached = torch.is_autocast_cache_enabled()
        # A weight cast cached by autocast would be freed or stale when the graph reads it: cast inside the graph.
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
    """Say whether to use graphs: on a GPU with Triton kernels, unless a module has hooks or the model options that the
    static step does not know.

    Args:
        model: The model.
        cache: Its cache.
    """
    # Only the kernel reads the rows' lengths on the device; other attention would be recorded with today's.
    has_kernel = dispatch.kernel_for(eager.decode_attention, cache.keys) is not None
    is_plain = all(not module._forward_hooks for module in model.modules()) and not packed_parts(model)
    # Rows with different adapters are gathered: which they are changes between the runs of a graph.
    is_plain = is_plain and not any(isinstance(side, Mixed) for _, side in sides_of(model))
    return has_kernel and is_plain and not options(model.config) - KNOWN_OPTIONS


class StaticSteps:
    """Decode steps on rows at fixed addresses, so that a step can be a graph.

    Args:
        model: The model.
        cache: Its cache.
        state: The rows; those after the live ones are computed along as ended ones.
        stop_ids: Ids that end a row.
    """

    def __init__(self, model: LanguageModel, cache: KVCache, state: Rows, stop_ids: torch.Tensor) -> None:
        self.state = state
        self._model, self._cache, self._stop_ids = model, cache, stop_ids
        self._params = SamplingParams()
        self._graphs = DecodeGraphs(self._step, self._tensors, state.num_rows, cache.keys.device)

    def fits(self, cache: KVCache, state: Rows) -> bool:
        """Say whether these rows are large enough for another session's."""
        return self._cache is cache and self.state.tokens.shape == state.tokens.shape

    def run(self, num_live: int, params: SamplingParams) -> None:
        """Sample the next token of the first rows."""
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
        where = self._cache.keys.device, self._cache.size.longest
        tables = self._model.rotary(*where) if isinstance(self._model, LlamaLike) else []
        return [*own, *kept, *self._model.parameters(), *(table for pair in tables for table in pair)]

    def _step(self, count: int) -> None:
        state, rows, params = self.state, slice(0, count), self._params
        context = StaticDecode(self._cache, state.positions[rows].clone())
        hidden = self._model(state.last[rows], state.positions[rows], context)
        temperature = params.temperature or 1.0
        valid = self._model.num_valid_tokens
        logits = head_logits(hidden, self._model.head_weight, temperature=temperature, num_valid=valid)
        tokens, logprobs = sample_tokens(
            logits, state.seeds[rows], state.counts[rows], params, undrawn=self._model.undrawn_id
        )
        state.take(rows, tokens, logprobs.float(), self._stop_ids)


def static_steps(
    before: StaticSteps | None, model: LanguageModel, cache: KVCache, state: Rows, stop_ids: torch.Tensor
) -> StaticSteps | None:
    """Return the steps of a session: the previous session's, cleared, if they fit; None without graphs."""
    if not can_graph(model, cache):
        return None
    if before is None or not before.fits(cache, state):
        return StaticSteps(model, cache, state, stop_ids)
    before.state.clear()
    return before
