# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingImports=false
"""NF4 dequantisation in Triton: codes to 16- or 32-bit weights, bitwise equal to the twin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from whet.kernels.eager import NF4, NF4_BLOCK, SCALE_BLOCK, dynamic_table, nf4_table

BLOCK = 2048


@triton.jit
def _dequantize(
    codes_ptr, absmax_ptr, scale_ptr, offset_ptr, table_ptr, dynamic_ptr, out_ptr, count, DOUBLE: tl.constexpr,
    NF4_BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    byte = tl.load(codes_ptr + at // 2, mask=real, other=0).to(tl.int32)
    code = (byte >> (4 - 4 * (at % 2)).to(tl.int32)) & 15
    absmax = tl.load(absmax_ptr + at // NF4_BLOCK, mask=real, other=0)
    if DOUBLE:
        absmax = tl.load(dynamic_ptr + absmax.to(tl.int32))
        scale = tl.load(scale_ptr + at // (NF4_BLOCK * SCALE_BLOCK), mask=real, other=0.0)
        absmax = absmax * scale + tl.load(offset_ptr)
    value = tl.load(table_ptr + code) * absmax
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=real)


def nf4_dequantize(packed: NF4, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that the codes stand for; see `whet.kernels.eager.nf4_dequantize`."""
    out = torch.empty(packed.shape, dtype=dtype, device=packed.codes.device)
    absmax, scale, offset = packed.absmax, packed.scale, packed.offset
    if out.numel():
        _dequantize[(triton.cdiv(out.numel(), BLOCK),)](
            packed.codes, absmax, absmax if scale is None else scale, absmax if offset is None else offset,
            nf4_table(out.device), dynamic_table(out.device), out, out.numel(), DOUBLE=scale is not None,
            NF4_BLOCK=NF4_BLOCK, SCALE_BLOCK=SCALE_BLOCK, BLOCK=BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    return out
