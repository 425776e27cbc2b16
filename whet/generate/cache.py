"""Key/value cache of fixed rows, and the attention contexts that fill and read it.

Live sequences occupy rows 0..B-1 without holes: when one ends, the last row moves into its place, so that
decoding reads contiguous memory and never gathers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from whet.kernels import cpu_attention, eager
from whet.kernels.cpu_attention import TILE
from whet.kernels.dispatch import asked_for
from whet.model.attention import (
    KEY_BLOCK,
    KEY_QUANTUM,
    MIN_QUERY_ROWS,
    AttentionKind,
    Packed,
    exact_attention,
    round_up,
)
from whet.model.config import ModelConfig


class KVCache:
    """Keys and values of `num_rows` sequences, per layer [rows, K, S, C].

    Args:
        config: Shape of the model.
        num_rows: Sequences held at once.
        capacity: Positions per sequence; rounded up for exact attention.
        dtype: Dtype of keys and values as the model computes them.
        device: Where it lives.
        is_tiled: Keep keys as the C++ kernels read them, [rows, K, S / 16, C, 16].
    """

    def __init__(
        self,
        config: ModelConfig,
        num_rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_tiled: bool = False,
    ) -> None:
        self.is_tiled = is_tiled
        self.capacity = round_up(capacity, KEY_QUANTUM if capacity <= KEY_BLOCK else KEY_BLOCK)
        self.num_rows = num_rows
        shape = (config.num_layers, num_rows, config.num_kv_heads, self.capacity, config.head_dim)
        # Zeros, not empty: a masked position still multiplies its value by an exact 0, and 0 x inf would
        # be nan.
        tiles = (*shape[:3], self.capacity // TILE, config.head_dim, TILE)
        self.keys = torch.zeros(tiles if is_tiled else shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def copy_rows(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of rows onto others, in all layers."""
        if not source:
            return
        from_rows = torch.tensor(source, device=self.keys.device)
        to_rows = torch.tensor(target, device=self.keys.device)
        for tensor, count in (
            (self.keys, -(-length // TILE) if self.is_tiled else length),
            (self.values, length),
        ):
            tensor[:, to_rows, :, :count] = tensor[:, from_rows, :, :count]

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return self.keys.nbytes + self.values.nbytes


class Prefill:
    """Packed causal attention that also writes each sequence's keys and values into its cache row."""

    def __init__(
        self, cache: KVCache, rows: Sequence[int], lengths_B: Sequence[int], kind: AttentionKind
    ) -> None:
        device = cache.keys.device
        self._packed = Packed(lengths_B, device, kind)
        self._cache = cache
        self._row_N = torch.repeat_interleave(torch.tensor(rows), torch.tensor(lengths_B)).to(device)
        self._position_N = torch.cat([torch.arange(length) for length in lengths_B]).to(device)

    def attend(
        self, layer: int, q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor
    ) -> torch.Tensor:
        """Return attention outputs [N, H, C] and remember keys and values."""
        count = self._packed.num_tokens
        if self._cache.is_tiled:
            k, v = k_NKC[:count], v_NKC[:count]
            cached = self._cache.keys[layer], self._cache.values[layer]
            cpu_attention.write_cache(k, v, *cached, self._row_N, self._position_N)
            return self._packed.attend(layer, q_NHC, k_NKC, v_NKC)
        self._cache.keys[layer, self._row_N, :, self._position_N] = k_NKC[:count].to(self._cache.keys.dtype)
        self._cache.values[layer, self._row_N, :, self._position_N] = v_NKC[:count].to(
            self._cache.values.dtype
        )
        return self._packed.attend(layer, q_NHC, k_NKC, v_NKC)


class Decode:
    """One new token per live row: writes its key and value, then attends to the row's own past.

    Args:
        cache: The cache; rows 0..B-1 are live.
        positions_B: Position of the new token of each row.
        num_keys: Key positions to read; a multiple of the quantum that covers every position.
        kind: Attention kernel.
    """

    def __init__(self, cache: KVCache, positions_B: torch.Tensor, num_keys: int, kind: AttentionKind) -> None:
        self._cache = cache
        self._positions = positions_B
        self._rows = torch.arange(positions_B.shape[0], device=positions_B.device)
        self._num_keys = num_keys
        self._kind: AttentionKind = kind
        if cache.is_tiled:
            return
        kv_heads, capacity = cache.keys.shape[2:4]
        hidden = torch.arange(num_keys, device=positions_B.device) > positions_B[:, None]
        bias = torch.zeros(hidden.shape, device=positions_B.device).masked_fill_(hidden, float("-inf"))
        self._bias_Z1S = bias.repeat_interleave(kv_heads, 0)[:, None]
        # Where a layer's keys and values go, the cache seen as rows of one head and position.
        slots = torch.arange(self._rows.shape[0] * kv_heads, device=positions_B.device) * capacity
        self._slots_Z = slots + positions_B.repeat_interleave(kv_heads)

    def attend(
        self, layer: int, q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor
    ) -> torch.Tensor:
        """Return attention outputs [N, H, C]; rows past the live ones (row padding) are zero."""
        rows = self._positions.shape[0]
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        if self._cache.is_tiled:
            new = k_NKC[:rows], v_NKC[:rows]
            cpu_attention.write_cache(*new, keys, values, self._rows, self._positions)
            out = cpu_attention.decode(q_NHC[:rows], keys, values, self._positions)
            surplus = q_NHC.shape[0] - rows
            return F.pad(out, (0, 0, 0, 0, 0, surplus)) if surplus else out
        channels = q_NHC.shape[2]
        for tensor, new in ((keys, k_NKC), (values, v_NKC)):
            rows_ZC = new[:rows].reshape(-1, channels).to(tensor.dtype)
            tensor.view(-1, channels).index_copy_(0, self._slots_Z, rows_ZC)
        surplus = q_NHC.shape[0] - rows
        if (kernel := asked_for(eager.decode_attention, q_NHC)) is not None:
            out = kernel(q_NHC[:rows], keys, values, self._positions + 1)
            return F.pad(out, (0, 0, 0, 0, 0, surplus)) if surplus else out
        count_z = rows * keys.shape[1]
        k_ZSC, v_ZSC = (x.flatten(0, 1)[:count_z, : self._num_keys] for x in (keys, values))
        q_ZQC = q_NHC[:rows].reshape(count_z, -1, channels)
        rep = q_ZQC.shape[1]
        if self._kind == "fast" and q_ZQC.is_cuda:
            mask = self._bias_Z1S.to(q_ZQC.dtype)
            out = F.scaled_dot_product_attention(
                q_ZQC[:, None], k_ZSC[:, None], v_ZSC[:, None], mask[:, None]
            )
        else:
            padded = F.pad(q_ZQC, (0, 0, 0, MIN_QUERY_ROWS - rep)) if rep < MIN_QUERY_ROWS else q_ZQC
            wide = eager.product_dtype(padded)
            query, key, value = (x.to(wide) for x in (padded, k_ZSC, v_ZSC))
            out = exact_attention(query, key, value, self._bias_Z1S)[0][:, :rep].to(q_NHC.dtype)
        out = out.reshape(rows, q_NHC.shape[1], q_NHC.shape[2])
        return F.pad(out, (0, 0, 0, 0, 0, surplus)) if surplus else out
