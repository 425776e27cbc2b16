"""Attention over packed sequences, and the one kernel that training, prefill and decode share.

Everything in a decoder but attention is per token, so a flat [N, D] tensor serves training, prefill and
decode alike. What a row may see is said by an `AttentionContext` alone.

Why sampler and trainer agree to the last bit on a CPU (measured): (1) the model pads token rows to
`ROW_QUANTUM`, so that matrix products never take the narrow code paths; (2) here at least `MIN_QUERY_ROWS`
query rows are used, keys are padded to `KEY_QUANTUM`, and probabilities times values are summed in key blocks
of fixed size, so that a row's result does not depend on how many masked keys follow it. `exact_attention`
follows these rules; the kind 'fast' is PyTorch's fused kernel, which does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from whet.kernels import cpu_attention
from whet.types import Segment

AttentionKind = Literal["exact", "fast"]

ROW_QUANTUM = 16
KEY_QUANTUM = 32
KEY_BLOCK = 128
MIN_QUERY_ROWS = 4
TILE_SCORES = 2**20


class AttentionContext(Protocol):
    """Says what each row of a flat batch may see, and computes attention accordingly."""

    def attend(
        self, layer: int, q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor
    ) -> torch.Tensor:
        """Return attention outputs [N, H, C] of a layer for all rows."""
        ...


def round_up(value: int, quantum: int) -> int:
    """Return the smallest multiple of `quantum` that is at least `value`."""
    return -(-value // quantum) * quantum


def exact_attention(
    q_BKQC: torch.Tensor, k_BKSC: torch.Tensor, v_BKSC: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Softmax attention whose rows do not depend on the number of rows or of masked keys.

    Args:
        q_BKQC: Queries, grouped by key/value head; Q at least `MIN_QUERY_ROWS` for exact rows.
        k_BKSC: Keys; S a multiple of `KEY_QUANTUM`.
        v_BKSC: Values.
        bias: Additive float32 mask (0 or -inf), broadcastable to [B, K, Q, S].

    Returns:
        Outputs [B, K, Q, C] in the dtype of the values.
    """
    scale = q_BKQC.shape[-1] ** -0.5
    scores = ((q_BKQC * scale) @ k_BKSC.transpose(-1, -2)).float()
    probs = torch.softmax(scores.add_(bias), dim=-1).to(v_BKSC.dtype)
    num_keys = k_BKSC.shape[-2]
    if num_keys <= KEY_BLOCK:
        return probs @ v_BKSC
    out = probs[..., :KEY_BLOCK] @ v_BKSC[..., :KEY_BLOCK, :]
    for start in range(KEY_BLOCK, num_keys, KEY_BLOCK):
        stop = start + KEY_BLOCK
        out = out + probs[..., start:stop] @ v_BKSC[..., start:stop, :]
    return out


def fold_queries(q_BTHC: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Bring queries [B, T, H, C] to [B, K, rep * T, C]: heads of one key/value head share a product."""
    rows, length, heads, channels = q_BTHC.shape
    rep = heads // num_kv_heads
    folded = q_BTHC.reshape(rows, length, num_kv_heads, rep, channels).permute(0, 2, 3, 1, 4)
    return folded.reshape(rows, num_kv_heads, rep * length, channels)


def unfold_outputs(out_BKQC: torch.Tensor, length: int) -> torch.Tensor:
    """Undo `fold_queries`: [B, K, rep * T, C] to [B, T, H, C]."""
    rows, kv_heads, queries, channels = out_BKQC.shape
    rep = queries // length
    out = out_BKQC.view(rows, kv_heads, rep, length, channels).permute(0, 3, 1, 2, 4)
    return out.reshape(rows, length, kv_heads * rep, channels)


def whole_sequences(segments_B: Sequence[int] | Sequence[Segment]) -> list[Segment]:
    """Return segments as they are, and lengths as sequences that follow each other and share nothing."""
    segments, start = [], 0
    for item in segments_B:
        segment = Segment(start, item, 0, 0) if isinstance(item, int) else item
        segments.append(segment)
        start = segment.start + segment.length
    return segments


def positions_of(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """Return the position of every token in its own sequence, int64 [N]."""
    parts = [torch.arange(s.shared, s.shared + s.length) for s in segments]
    return torch.cat(parts).to(device)


class Packed:
    """Causal attention inside each of several sequences that lie one after the other in a flat batch.

    On a CPU with a compiler that is one C++ kernel. Else sequences of similar length are computed together as padded
    rows; a padded row's tail comes after every real token, so the causal mask alone keeps it out.

    Args:
        segments_B: Sequences in the order of the flat batch, as lengths, or as segments that may share a prefix.
        device: Where the index tensors live.
        kind: 'exact' (row-invariant) or 'fast' (fused kernel).
    """

    def __init__(
        self,
        segments_B: Sequence[int] | Sequence[Segment],
        device: torch.device,
        kind: AttentionKind = "exact",
    ) -> None:
        self.kind: AttentionKind = kind
        self._device = device
        self._segments = whole_sequences(segments_B)
        self.num_tokens = sum(segment.length for segment in self._segments)
        self._table: torch.Tensor | None = None
        self._gathers: list[tuple[int, torch.Tensor]] = []
        self._position_of: torch.Tensor | None = None

    def _pad(self) -> None:
        """Choose the rows that are computed together, and where their results stand."""
        buckets: dict[int, list[Segment]] = {}
        for segment in self._segments:
            length = segment.shared + segment.length
            width = round_up(length, KEY_QUANTUM if length <= KEY_BLOCK else KEY_BLOCK)
            buckets.setdefault(width, []).append(segment)
        position_of = torch.zeros(self.num_tokens, dtype=torch.int64)
        offset = 0
        for width, rows in sorted(buckets.items()):
            start, count, prefix, shared = (column[:, None] for column in torch.tensor(rows).unbind(1))
            column = torch.arange(width)[None, :]
            own = (column >= shared) & (column < shared + count)
            source = torch.where(
                column < shared, prefix + column, torch.where(own, start + column - shared, start)
            )
            target = offset + torch.arange(len(rows))[:, None] * width + column
            position_of[source[own]] = target.expand_as(source)[own]
            self._gathers.append((width, source.reshape(-1).to(self._device)))
            offset += len(rows) * width
        self._position_of = position_of.to(self._device)

    def _kernel_table(self) -> torch.Tensor:
        """Return the segments as the kernel reads them; those that share a prefix, and its own, are one group."""
        if self._table is None:
            groups = {segment.start: segment.start for segment in self._segments if not segment.shared}
            rows = [
                (*segment, groups.get(segment.prefix, segment.prefix) if segment.shared else segment.start)
                for segment in self._segments
            ]
            self._table = torch.tensor(sorted(rows, key=lambda row: (row[4], row[0])), dtype=torch.int64)
        return self._table

    def attend(
        self, layer: int, q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor
    ) -> torch.Tensor:
        """Return causal attention outputs [N, H, C]; rows past the last sequence (row padding) are zero."""
        if cpu_attention.can_attend(q_NHC, k_NKC, v_NKC):
            return cpu_attention.attend(q_NHC, k_NKC, v_NKC, self._kernel_table())
        if self._position_of is None:
            self._pad()
        assert self._position_of is not None
        outputs = []
        for width, source in self._gathers:
            rows = source.numel() // width
            q, k, v = (
                x.index_select(0, source).view(rows, width, x.shape[1], x.shape[2])
                for x in (q_NHC, k_NKC, v_NKC)
            )
            outputs.append(self._attend_padded(q, k, v).reshape(rows * width, q_NHC.shape[1], q_NHC.shape[2]))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        out = joined.index_select(0, self._position_of)
        surplus = q_NHC.shape[0] - self.num_tokens
        return F.pad(out, (0, 0, 0, 0, 0, surplus)) if surplus else out

    def _attend_padded(
        self, q_BTHC: torch.Tensor, k_BTKC: torch.Tensor, v_BTKC: torch.Tensor
    ) -> torch.Tensor:
        k, v = k_BTKC.transpose(1, 2), v_BTKC.transpose(1, 2)
        if self.kind == "fast":
            out = F.scaled_dot_product_attention(
                q_BTHC.transpose(1, 2), k, v, is_causal=True, enable_gqa=k.shape[1] != q_BTHC.shape[2]
            )
            return out.transpose(1, 2)
        return _causal_exact(q_BTHC, k.contiguous(), v.contiguous())


def _causal_exact(q_BTHC: torch.Tensor, k_BKTC: torch.Tensor, v_BKTC: torch.Tensor) -> torch.Tensor:
    """Causal exact attention [B, T, H, C], in tiles that stay in the cache of a CPU core.

    Queries go in blocks that read only the keys up to their own, and rows in slices: neither changes a row's result.
    """
    rows, length, heads, _ = q_BTHC.shape
    kv_heads = k_BKTC.shape[1]
    block = min(length, KEY_BLOCK)
    outputs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        hidden = (
            torch.arange(stop, device=q_BTHC.device)[None, :]
            > torch.arange(start, stop, device=q_BTHC.device)[:, None]
        )
        bias = torch.zeros(hidden.shape, device=q_BTHC.device).masked_fill_(hidden, float("-inf"))
        bias = bias.repeat(heads // kv_heads, 1)
        step = max(1, TILE_SCORES // (heads * (stop - start) * stop))
        tiles = []
        for row in range(0, rows, step):
            queries = fold_queries(q_BTHC[row : row + step, start:stop], kv_heads)
            keys, values = k_BKTC[row : row + step, :, :stop], v_BKTC[row : row + step, :, :stop]
            tiles.append(unfold_outputs(exact_attention(queries, keys, values, bias), stop - start))
        outputs.append(tiles[0] if len(tiles) == 1 else torch.cat(tiles))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
