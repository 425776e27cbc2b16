# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingImports=false
"""Decode attention in Triton: one program per split of a row's past, then one that merges them in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from whet.kernels.eager import SPLIT

BLOCK = 32


@triton.jit
def _split(
    q_ptr, k_ptr, v_ptr, lengths_ptr, out_ptr, top_ptr, total_ptr, row_stride, head_stride, num_keys, scale,
    REP: tl.constexpr, C: tl.constexpr, QUERIES: tl.constexpr, CHANNELS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attend from the REP query heads of one key/value head to one split of their row's keys."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.minimum(tl.load(lengths_ptr + row), num_keys).to(tl.int32)
    start = split * SPLIT
    # A split behind the row's length writes nothing, and `_merge` reads nothing of it: which splits there are depends
    # on the row's length alone, so neither the batch nor the cache's capacity shows in the bits.
    if start < length:
        query, channel = tl.arange(0, QUERIES), tl.arange(0, CHANNELS)
        pair = row * tl.num_programs(1) + head
        real_q = (query[:, None] < REP) & (channel[None, :] < C)
        q_at = (pair * REP + query[:, None]) * C + channel[None, :]
        q = tl.load(q_ptr + q_at, mask=real_q, other=0.0)
        base = row.to(tl.int64) * row_stride + head * head_stride
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        out = tl.zeros([QUERIES, CHANNELS], tl.float32)
        for first in range(start, tl.minimum(start + SPLIT, length), BLOCK):
            key = first + tl.arange(0, BLOCK)
            seen = key < length
            at = base + key[:, None] * C + channel[None, :]
            real = seen[:, None] & (channel[None, :] < C)
            k = tl.load(k_ptr + at, mask=real, other=0.0)
            v = tl.load(v_ptr + at, mask=real, other=0.0).to(tl.float32)
            # Three TF32 products are float32 to about 2^-21; one keeps only 10 bits of the mantissa.
            scores = tl.dot(q.to(k.dtype), tl.trans(k), input_precision="tf32x3") * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new = tl.maximum(top, tl.max(scores, 1))
            probs, keep = tl.exp(scores - new[:, None]), tl.exp(top - new)
            total = total * keep + tl.sum(probs, 1)
            out = out * keep[:, None] + tl.dot(probs, v, input_precision="tf32x3")
            top = new
        part = (pair * tl.num_programs(0) + split).to(tl.int64) * REP + query
        tl.store(top_ptr + part, top, mask=query < REP)
        tl.store(total_ptr + part, total, mask=query < REP)
        tl.store(out_ptr + part[:, None] * C + channel[None, :], out, mask=real_q)


@triton.jit(do_not_specialize=["num_splits"])
def _merge(
    part_ptr, top_ptr, total_ptr, lengths_ptr, out_ptr, num_splits, num_keys, HEADS: tl.constexpr,
    REP: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one query head, first to last."""
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.minimum(tl.load(lengths_ptr + row), num_keys).to(tl.int32)
    channel = tl.arange(0, CHANNELS)
    pair = row * (HEADS // REP) + head // REP
    top, total = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.float32)
    out = tl.zeros([CHANNELS], tl.float32)
    # From first to last: another order would give other bits.
    for split in range((length + SPLIT - 1) // SPLIT):
        at = (pair * num_splits + split).to(tl.int64) * REP + head % REP
        part_top = tl.load(top_ptr + at)
        part = tl.load(part_ptr + at * C + channel, mask=channel < C, other=0.0)
        new = tl.maximum(top, part_top)
        keep, add = tl.exp(top - new), tl.exp(part_top - new)
        total = total * keep + tl.load(total_ptr + at) * add
        out = out * keep + part * add
        top = new
    out = out / tl.where(total > 0, total, 1.0)
    at = (row * HEADS + head) * C + channel
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=channel < C)


def decode_attention(
    q_BHC: torch.Tensor, keys_BKSC: torch.Tensor, values_BKSC: torch.Tensor, lengths_B: torch.Tensor
) -> torch.Tensor:
    """Attend from one query per row to the row's own past; see `whet.kernels.eager.decode_attention`."""
    rows, heads, channels = q_BHC.shape
    kv_heads, num_keys = keys_BKSC.shape[1:3]
    rep, num_splits = heads // kv_heads, triton.cdiv(num_keys, SPLIT)
    assert keys_BKSC.stride() == values_BKSC.stride()
    assert keys_BKSC.stride()[2:] == (channels, 1)
    q = q_BHC.contiguous()
    out = torch.empty_like(q)
    if rows == 0:
        return out
    part = q.new_empty((rows, kv_heads, num_splits, rep, channels), dtype=torch.float32)
    top, total = part.new_empty((2, *part.shape[:-1])).unbind(0)
    padded = max(16, triton.next_power_of_2(channels))
    _split[(num_splits, kv_heads, rows)](
        q, keys_BKSC, values_BKSC, lengths_B, part, top, total, keys_BKSC.stride(0), keys_BKSC.stride(1),
        num_keys, channels**-0.5, REP=rep, C=channels, QUERIES=max(16, triton.next_power_of_2(rep)), CHANNELS=padded,
        SPLIT=SPLIT, BLOCK=BLOCK,
    )  # fmt: skip
    _merge[(rows, heads)](
        part, top, total, lengths_B, out, num_splits, num_keys, HEADS=heads, REP=rep, C=channels, CHANNELS=padded,
        SPLIT=SPLIT, num_warps=1,
    )  # fmt: skip
    return out
