# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingImports=false
"""RMS norm, rotary positions with the cache write, and SwiGLU in Triton: one pass over memory where eager takes many.

Sums and products are not contracted (`enable_fp_fusion=False`), so that element-wise results are bitwise those of the
twins.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

NORM_PROGRAMS = 256
BLOCK = 1024


@triton.jit
def _rms_forward(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, inverse_ptr, eps, D: tl.constexpr, WIDTH: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    real = column < D
    x = tl.load(x_ptr + row * D + column, mask=real, other=0.0)
    if ADD:
        other = tl.load(residual_ptr + row * D + column, mask=real, other=0.0)
        x = (x.to(tl.float32) + other.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * D + column, x, mask=real)
    x32 = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x32 * x32, 0) / D + eps)
    tl.store(inverse_ptr + row, inverse)
    weight = tl.load(weight_ptr + column, mask=real, other=0.0).to(tl.float32)
    y = weight * (x32 * inverse).to(x.dtype).to(tl.float32)
    tl.store(y_ptr + row * D + column, y.to(y_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["N"])
def _rms_backward(
    grad_ptr, extra_ptr, total_ptr, weight_ptr, inverse_ptr, grad_x_ptr, grad_weight_ptr, N, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows pid, pid + programs, ...: gradient of each row's input, and their share of the weight's gradient."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, WIDTH)
    real = column < D
    weight = tl.load(weight_ptr + column, mask=real, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([WIDTH], tl.float32)
    for row in range(pid, N, programs):
        at = tl.cast(row, tl.int64) * D + column
        grad = tl.load(grad_ptr + at, mask=real, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + row)
        scaled = tl.load(total_ptr + at, mask=real, other=0.0).to(tl.float32) * inverse
        grad_weight += grad * scaled
        inner = grad * weight
        grad_x = inverse * (inner - scaled * (tl.sum(inner * scaled, 0) / D))
        grad_x += tl.load(extra_ptr + at, mask=real, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=real)
    tl.store(grad_weight_ptr + pid * D + column, grad_weight, mask=real)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, width = x.contiguous(), x.shape[-1]
        rows = x.numel() // width
        total = x
        if residual is not None:
            total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
        y = torch.empty_like(x, dtype=torch.promote_types(total.dtype, weight.dtype))
        inverse = x.new_empty(rows, dtype=torch.float32)
        if rows:
            _rms_forward[(rows,)](
                x, x if residual is None else residual.contiguous(), weight, y, total, inverse, eps, D=width,
                WIDTH=triton.next_power_of_2(width), ADD=residual is not None, num_warps=_warps(width),
                enable_fp_fusion=False,
            )  # fmt: skip
        ctx.save_for_backward(total, weight, inverse)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        return y, total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, weight, inverse = ctx.saved_tensors
        width = total.shape[-1]
        rows = total.numel() // width
        programs = min(rows, NORM_PROGRAMS)
        grad_x = torch.empty_like(total)
        grad_weight = total.new_zeros((max(programs, 1), width), dtype=torch.float32)
        if rows:
            _rms_backward[(programs,)](
                grads[0].contiguous(), grads[1].contiguous(), total, weight, inverse, grad_x, grad_weight, rows,
                D=width, WIDTH=triton.next_power_of_2(width), num_warps=_warps(width),
            )  # fmt: skip
        x_dtype, residual_dtype = ctx.dtypes
        grad_residual = None if residual_dtype is None else grad_x.to(residual_dtype)
        return grad_x.to(x_dtype), grad_weight.sum(0).to(weight.dtype), None, grad_residual


def _warps(width: int) -> int:
    return 1 << min(4, (width // 512).bit_length())


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual and normalise; differentiable. See `whet.kernels.eager.rms_norm`."""
    return _RMSNorm.apply(x, weight, eps, residual)  # pyright: ignore[reportReturnType]


@triton.jit
def _normalise_rotate(
    left, right, weight_ptr, cos_ptr, sin_ptr, channel, real, eps, C: tl.constexpr, NORM: tl.constexpr,
    like: tl.constexpr,
):  # fmt: skip
    """Return both halves of one head's channels, normalised (optionally) and rotated, in float32."""
    half: tl.constexpr = C // 2
    left32, right32 = left.to(tl.float32), right.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(left32 * left32, 0) + tl.sum(right32 * right32, 0)) / C + eps)
        left32 = (left32 * inverse).to(left.dtype).to(tl.float32)
        right32 = (right32 * inverse).to(left.dtype).to(tl.float32)
        left32 *= tl.load(weight_ptr + channel, mask=real, other=0.0).to(tl.float32)
        right32 *= tl.load(weight_ptr + half + channel, mask=real, other=0.0).to(tl.float32)
        left32, right32 = left32.to(like).to(tl.float32), right32.to(like).to(tl.float32)
    cos_left = tl.load(cos_ptr + channel, mask=real, other=0.0)
    cos_right = tl.load(cos_ptr + half + channel, mask=real, other=0.0)
    sin_left = tl.load(sin_ptr + channel, mask=real, other=0.0)
    sin_right = tl.load(sin_ptr + half + channel, mask=real, other=0.0)
    return left32 * cos_left - right32 * sin_left, right32 * cos_right + left32 * sin_right


@triton.jit(do_not_specialize=["B"])
def _rope(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, out_ptr, keys_ptr, values_ptr, positions_ptr, q_weight_ptr, k_weight_ptr,
    eps, q_stride, k_stride, v_stride, row_stride, head_stride, B, H: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One head of one row: of the queries, then of the keys, then of the values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = C // 2
    channel = tl.arange(0, HALF)
    real = channel < half
    like: tl.constexpr = out_ptr.dtype.element_ty
    kept: tl.constexpr = keys_ptr.dtype.element_ty
    cos_ptr += row * C
    sin_ptr += row * C
    if head < H:
        at = q_ptr + row * q_stride + head * C + channel
        left, right = tl.load(at, mask=real, other=0.0), tl.load(at + half, mask=real, other=0.0)
        left, right = _normalise_rotate(
            left, right, q_weight_ptr, cos_ptr, sin_ptr, channel, real, eps, C, NORM, like
        )
        to = out_ptr + (row * H + head) * C + channel
        tl.store(to, left.to(like), mask=real)
        tl.store(to + half, right.to(like), mask=real)
    elif row < B:
        kv_head = (head - H) % K
        slot = row * row_stride + kv_head * head_stride + tl.load(positions_ptr + row) * C + channel
        if head < H + K:
            at = k_ptr + row * k_stride + kv_head * C + channel
            left, right = tl.load(at, mask=real, other=0.0), tl.load(at + half, mask=real, other=0.0)
            left, right = _normalise_rotate(
                left, right, k_weight_ptr, cos_ptr, sin_ptr, channel, real, eps, C, NORM, like
            )
            tl.store(keys_ptr + slot, left.to(like).to(kept), mask=real)
            tl.store(keys_ptr + slot + half, right.to(like).to(kept), mask=real)
        else:
            at = v_ptr + row * v_stride + kv_head * C + channel
            tl.store(values_ptr + slot, tl.load(at, mask=real, other=0.0).to(kept), mask=real)
            tl.store(values_ptr + slot + half, tl.load(at + half, mask=real, other=0.0).to(kept), mask=real)


def rope_into_cache(
    q_NHC: torch.Tensor,
    k_NKC: torch.Tensor,
    v_NKC: torch.Tensor,
    cos_N1C: torch.Tensor,
    sin_N1C: torch.Tensor,
    keys_BKSC: torch.Tensor,
    values_BKSC: torch.Tensor,
    positions_B: torch.Tensor,
    *,
    q_weight_C: torch.Tensor | None = None,
    k_weight_C: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Normalise, rotate and write into the cache; see `whet.kernels.eager.rope_into_cache`."""
    rows, heads, channels = q_NHC.shape
    kv_heads = k_NKC.shape[1]
    assert all(x.stride()[1:] == (channels, 1) for x in (q_NHC, k_NKC, v_NKC))
    assert keys_BKSC.stride() == values_BKSC.stride()
    assert keys_BKSC.stride()[2:] == (channels, 1)
    norm = q_weight_C is not None and k_weight_C is not None
    dtype = torch.promote_types(q_NHC.dtype, q_weight_C.dtype) if q_weight_C is not None else q_NHC.dtype
    out = torch.empty((rows, heads, channels), dtype=dtype, device=q_NHC.device)
    _rope[(rows, heads + 2 * kv_heads)](
        q_NHC, k_NKC, v_NKC, cos_N1C.contiguous(), sin_N1C.contiguous(), out, keys_BKSC, values_BKSC, positions_B,
        q_weight_C if norm else out, k_weight_C if norm else out, eps, q_NHC.stride(0), k_NKC.stride(0),
        v_NKC.stride(0), keys_BKSC.stride(0), keys_BKSC.stride(1), positions_B.shape[0], H=heads, K=kv_heads,
        C=channels, HALF=triton.next_power_of_2(channels // 2), NORM=norm, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _swiglu_forward(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < F
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=real, other=0.0)
    up = tl.load(up_ptr + row * up_stride + column, mask=real, other=0.0)
    gate32 = gate.to(tl.float32)
    silu = (gate32 / (1 + tl.exp(-gate32))).to(gate.dtype)
    tl.store(out_ptr + row * F + column, (silu.to(tl.float32) * up.to(tl.float32)).to(up.dtype), mask=real)


@triton.jit
def _swiglu_backward(
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, gate_stride, up_stride, F, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < F
    grad = tl.load(grad_ptr + row * F + column, mask=real, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=real, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=real, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-gate))
    grad_up = grad.to(tl.float32) * gate * share
    grad_gate = grad.to(tl.float32) * up * share * (1 + gate * (1 - share))
    tl.store(grad_up_ptr + row * F + column, grad_up.to(grad.dtype), mask=real)
    tl.store(grad_gate_ptr + row * F + column, grad_gate.to(grad.dtype), mask=real)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        rows, width = gate.shape
        gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (gate, up))
        out = torch.empty((rows, width), dtype=gate.dtype, device=gate.device)
        if rows:
            _swiglu_forward[(rows, triton.cdiv(width, BLOCK))](
                gate, up, out, gate.stride(0), up.stride(0), width, BLOCK=BLOCK, enable_fp_fusion=False
            )
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = ctx.saved_tensors
        rows, width = gate.shape
        grad_gate, grad_up = gate.new_empty((2, rows, width)).unbind(0)
        if rows:
            _swiglu_backward[(rows, triton.cdiv(width, BLOCK))](
                grads[0].contiguous(),
                gate,
                up,
                grad_gate,
                grad_up,
                gate.stride(0),
                up.stride(0),
                width,
                BLOCK=BLOCK,
            )
        return grad_gate, grad_up


def swiglu(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up; differentiable. See `whet.kernels.eager.swiglu`."""
    return _SwiGLU.apply(gate_NF, up_NF)  # pyright: ignore[reportReturnType]
