"""Causal attention on the C++ kernels: over packed sequences that may share a prefix, and against a cache."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from typing import Any

import torch

from whet.kernels.cpu.ops import _threads, _wide, call, recorded

TILE = 16


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if (found := recorded()) is not None:
            attended, lse = found
            assert attended is not None
            out = attended.view(q.shape)
            ctx.save_for_backward(q, k, v, out, lse, segments)
            return out
        out = torch.zeros_like(q)  # rows outside all segments (row padding) are never written
        lse = torch.empty(q.shape[:2])
        count, (heads, channels), kv_heads = segments.shape[0], q.shape[1:], k.shape[1]
        call("attend", _wide(q), q, k, v, out, lse, heads, kv_heads, channels, segments, count, _threads())
        ctx.save_for_backward(q, k, v, out, lse, segments)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, segments = ctx.saved_tensors
        grad, dq = upstream[0].contiguous(), torch.zeros_like(q)
        # Float32 for any dtype: a key's gradient is a sum over all queries that see it, also those of other segments.
        dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)
        shape = q.shape[1], k.shape[1], q.shape[2]
        count = segments.shape[0]
        call(
            "attend_back", _wide(q), q, k, v, out, lse, grad, dq, dk, dv, *shape, segments, count, _threads()
        )
        return dq, dk.to(k.dtype), dv.to(v.dtype), None


def attend(
    q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor, segments: torch.Tensor
) -> torch.Tensor:
    """Attend causally within the segments of a flat batch.

    Args:
        q_NHC: Queries; rows outside all segments give zeros.
        k_NKC: Keys; as many as queries, unless other ranks have the queries of some.
        v_NKC: Values.
        segments: int64 [segments, 7]: first row, rows, first row of the prefix, its length, group, first of these rows
            that is a query here, row of this query. A row attends to the prefix and to its own segment up to itself;
            segments that share keys are adjacent and have the same group.

    Returns:
        Outputs [N, H, C], differentiable.
    """
    return _Attend.apply(q_NHC, k_NKC, v_NKC, segments)  # pyright: ignore[reportReturnType]


def write_cache(
    k_NKC: torch.Tensor,
    v_NKC: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows_N: torch.Tensor,
    positions_N: torch.Tensor,
) -> None:
    """Write keys and values into one layer's cache.

    Args:
        k_NKC: New keys.
        v_NKC: New values.
        keys: Cache [rows, K, S / 16, C, 16], updated in place.
        values: Cache [rows, K, S, C], updated in place.
        rows_N: Cache row of each token.
        positions_N: Position of each token.
    """
    count, kv_heads, channels = k_NKC.shape
    k, v = k_NKC.contiguous(), v_NKC.contiguous()
    shape = count, kv_heads, channels, values.shape[2]
    call("write_cache", _wide(k), k, v, keys, values, rows_N, positions_N, *shape, _threads())


class Cache(ctypes.Structure):
    """One layer's cache: the rows' keys and values, those of prompts, the capacities of both, and what each row
    shares."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "prompt_keys", "prompt_values")),
        ("capacity", c_int64),
        ("prompt_capacity", c_int64),
        ("shared", c_void_p),
    )
    _kept: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls,
        keys: torch.Tensor,
        values: torch.Tensor,
        prompt_keys: torch.Tensor,
        prompt_values: torch.Tensor,
        shared_B2: torch.Tensor,
    ) -> Cache:
        """Store the addresses of tensors, and keep the tensors alive.

        Args:
            keys: [rows, K, S / 16, C, 16].
            values: [rows, K, S, C].
            prompt_keys: [prompts, K, P / 16, C, 16].
            prompt_values: [prompts, K, P, C].
            shared_B2: int64; the prompt that a row continues, and how many of its positions it shares, a multiple of
                16.
        """
        tensors = keys, values, prompt_keys, prompt_values
        sizes = values.shape[2], prompt_values.shape[2]
        cache = cls(*(tensor.data_ptr() for tensor in tensors), *sizes, shared_B2.data_ptr())
        cache._kept = (*tensors, shared_B2)
        return cache


def decode(q_BHC: torch.Tensor, cache: Cache, kv_heads: int, positions_B: torch.Tensor) -> torch.Tensor:
    """Attend with one query per cache row to its positions 0 to `positions_B`; rows 0 to B - 1 of the cache."""
    q = q_BHC.contiguous()
    out = torch.empty_like(q)
    rows, heads, channels = q.shape
    call(
        "decode",
        _wide(q),
        q,
        ctypes.byref(cache),
        out,
        positions_B,
        rows,
        heads,
        kv_heads,
        channels,
        _threads(),
    )
    return out
