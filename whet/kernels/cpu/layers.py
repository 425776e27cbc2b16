"""One token of many sequences through all layers of a Llama-like decoder, in one call of the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple

import torch

from whet.kernels.cpu.attention import Cache
from whet.kernels.cpu.ops import _threads, _wide, call

NAMES = (
    "norm1",
    "norm2",
    "q",
    "k",
    "v",
    "o",
    "gate",
    "up",
    "down",
    "q_bias",
    "k_bias",
    "v_bias",
    "o_bias",
    "q_norm",
    "k_norm",
)


PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")
"""Products of a layer that may have an adapter beside them."""


class Side(NamedTuple):
    """An adapter beside a product.

    Attributes:
        a: Packed A, float32.
        b: Packed B, float32.
        rank: Its rank.
        scaling: Factor of the product.
    """

    a: torch.Tensor
    b: torch.Tensor
    rank: int
    scaling: float


KEPT = (
    "norm1",
    "q",
    "k",
    "v",
    "attended",
    "o",
    "norm2",
    "gate",
    "up",
    "gated",
    "down",
    "rstd1",
    "rstd2",
    "lse",
)
"""Per-token results of a layer that are kept for the training step."""


class _Kept(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in KEPT)


class _Side(ctypes.Structure):
    _fields_ = (("a", c_void_p), ("b", c_void_p), ("rank", c_int64), ("scaling", c_float))


class _Sides(ctypes.Structure):
    _fields_ = tuple((name, _Side) for name in PRODUCTS)


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in NAMES),
        ("sides", c_void_p),
        ("cache", Cache),
        ("kept", _Kept),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("rows", "width", "heads", "kv_heads", "channels", "feed")),
        ("eps", c_float),
        ("threads", c_int32),
    )


class _Outside(ctypes.Structure):
    _fields_ = tuple(
        (name, c_void_p) for name in ("x", "embeddings", "norm", "cos", "sin", "memory", "kept", "kept_rstd")
    )


class Layers:
    """The layers' addresses, and memory for `num_rows` tokens.

    Args:
        layers: For each layer its tensors by `NAMES`: norm weights, packed weights and biases (None for none). They are
            kept alive.
        caches: For each layer its part of the cache.
        embeddings: Table [V, D]; its dtype is that of the residual stream.
        norm: Weight of the last norm.
        cos: Rotary table [positions, C], float32.
        sin: The same for the sine.
        num_rows: Most tokens per call.
        heads: Query heads, key/value heads, channels of each, and feed-forward width.
        eps: Epsilon of the norms.
        sides: For each layer, and each adapter, what stands beside its products by `PRODUCTS`; empty without adapters.
    """

    def __init__(
        self,
        layers: Sequence[Mapping[str, torch.Tensor | None]],
        caches: Sequence[Cache],
        *,
        embeddings: torch.Tensor,
        norm: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        num_rows: int,
        heads: tuple[int, int, int, int],
        eps: float,
        sides: Sequence[Sequence[Mapping[str, Side]]] = (),
    ) -> None:
        first = layers[0]["q"]
        assert first is not None
        self._dtype, self._embeddings = first.dtype, embeddings
        self._width = embeddings.shape[1]
        self._layers = (_Layer * len(layers))()
        for entry, tensors, part in zip(self._layers, layers, caches, strict=True):
            for name in NAMES:
                tensor = tensors[name]
                setattr(entry, name, None if tensor is None else tensor.data_ptr())
            entry.cache = part
        tables: list[Any] = []
        for entry, adapters in zip(self._layers, sides, strict=False):
            table = (_Sides * len(adapters))()
            for own, adapter in zip(table, adapters, strict=True):
                for name, side in adapter.items():
                    setattr(own, name, _Side(side.a.data_ptr(), side.b.data_ptr(), side.rank, side.scaling))
            entry.sides = ctypes.addressof(table) if len(table) else None
            tables.append(table)
        self._shape = _Shape(num_rows, self._width, *heads, eps, 0)
        memory = torch.empty(call("layers_memory", ctypes.byref(self._shape)), dtype=torch.uint8)
        x = torch.empty(num_rows, self._width, dtype=embeddings.dtype)
        # The structures below hold plain addresses: whatever they point to is kept alive by `_kept`.
        parts = x, embeddings, norm, cos, sin, memory
        self._outside = _Outside(*(part.data_ptr() for part in parts))
        self._kept: list[Any] = [parts, layers, caches, sides, tables]

    def keep(
        self, layers: Sequence[Mapping[str, torch.Tensor]], last: torch.Tensor, rstd: torch.Tensor
    ) -> None:
        """Set where `run` keeps its results for tokens that have a place.

        Args:
            layers: For each layer its arrays by `KEPT`, one row per place.
            last: Hidden states after the last norm.
            rstd: Reciprocal root mean squares of that norm.
        """
        for entry, tensors in zip(self._layers, layers, strict=True):
            entry.kept = _Kept(*(tensors[name].data_ptr() for name in KEPT))
        self._outside.kept, self._outside.kept_rstd = last.data_ptr(), rstd.data_ptr()
        self._kept += [layers, last, rstd]

    def run(
        self,
        tokens_M: torch.Tensor,
        positions_M: torch.Tensor,
        slots_M: torch.Tensor | None = None,
        places_M: torch.Tensor | None = None,
        adapters_M: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read tokens at their positions; return hidden states [M, D].

        Args:
            tokens_M: Token ids.
            positions_M: Their positions.
            slots_M: None for the next tokens of the cache's rows 0..M-1; else the slots of the tokens' prompts.
            places_M: Places for the kept results (`keep`), below 0 for none; None keeps nothing.
            adapters_M: Number of each token's adapter, int32, below 0 for none; None: all have the first, if there is
                one.
        """
        count = tokens_M.shape[0]
        # Threads are read anew: a caller may have changed their number since. No result depends on it.
        self._shape.rows, self._shape.threads = count, _threads()
        out = torch.empty(count, self._width, dtype=self._embeddings.dtype)
        wide = _wide(out), int(self._dtype == torch.float32)
        shape, outside = ctypes.byref(self._shape), ctypes.byref(self._outside)
        call(
            "layers",
            *wide,
            ctypes.byref(self._layers),
            len(self._layers),
            shape,
            outside,
            tokens_M,
            positions_M,
            slots_M,
            places_M,
            adapters_M,
            out,
        )
        return out
