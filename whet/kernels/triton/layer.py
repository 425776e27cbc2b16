# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingImports=false
"""RMS norm and SwiGLU in Triton: one reading of memory where eager takes many.

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
        grad_weight += grad * scaled  # float32 over all rows of this program; the host adds the programs up
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
