# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingImports=false
"""A row-invariant matrix product in Triton: fixed tiles, no split of the inner axis.

cuBLAS chooses tiles by shape, so a token's logits change with its batch. This one is slower, and used only in parity
mode, where sampler and trainer must agree to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

ROWS, COLUMNS, INNER = 128, 128, 64


@triton.jit(do_not_specialize=["M"])
def _linear(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, V, D, x_stride, weight_stride, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x_at = row.to(tl.int64)[:, None] * x_stride
    weight_at = column.to(tl.int64)[None, :] * weight_stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, D, INNER):
        inner = start + tl.arange(0, INNER)
        x = tl.load(x_ptr + x_at + inner[None, :], mask=(row[:, None] < M) & (inner[None, :] < D), other=0.0)
        weight = tl.load(
            weight_ptr + weight_at + inner[:, None],
            mask=(inner[:, None] < D) & (column[None, :] < V),
            other=0.0,
        )
        total = tl.dot(x, weight, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column < V, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * V + column[None, :]
    tl.store(
        out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(row[:, None] < M) & (column[None, :] < V)
    )


class _Linear(torch.autograd.Function):
    """The backward pass needs no invariance and is PyTorch's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        flat, weight = (t if t.stride(-1) == 1 else t.contiguous() for t in (flat, weight))
        rows, columns = flat.shape[0], weight.shape[0]
        out = torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
        if rows:
            _linear[(triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))](
                flat, weight, weight if bias is None else bias, out, rows, columns, flat.shape[1], flat.stride(0),
                weight.stride(0), BIAS=bias is not None, ROWS=ROWS, COLUMNS=COLUMNS, INNER=INNER, num_warps=8,
                num_stages=2 if x.dtype == torch.float32 else 3,
            )  # fmt: skip
        ctx.save_for_backward(flat, weight)
        ctx.has_bias, ctx.shape = bias is not None, x.shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        grad_x, grad_weight, grad_bias = ctx.needs_input_grad
        return (
            (grad @ weight).view(ctx.shape) if grad_x else None,
            grad.t() @ flat if grad_weight else None,
            grad.sum(0) if grad_bias else None,
        )


def linear(x: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, with rows independent of the batch; differentiable. See
    `whet.kernels.eager.linear`."""
    return _Linear.apply(x, weight_VD, bias_V)  # pyright: ignore[reportReturnType]
