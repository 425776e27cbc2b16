"""CUDA graphs of a decode step, one per batch size: the host launches one thing a token instead of a thousand."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch
import torch.nn.functional as F

from whet.generate.cache import KVCache
from whet.kernels import dispatch, eager

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
