"""The arithmetic of one tensor's update, where the tensor is: by the C++ kernels, or by PyTorch's fused one."""

from __future__ import annotations

import torch

from whet.kernels import cpu


def suits_kernel(gradient: torch.Tensor) -> bool:
    """Say whether the C++ kernels can read a gradient."""
    is_plain = gradient.dtype in cpu.DTYPES and gradient.is_contiguous()
    return is_plain and gradient.device.type == "cpu" and cpu.library() is not None


def sum_of_squares(gradient: torch.Tensor) -> float:
    """Return the sum of squares in float64, of rows in float32 first where there are many: no copy of the whole."""
    if suits_kernel(gradient):
        return cpu.sum_of_squares(gradient)
    if gradient.dtype == torch.float64 or gradient.dim() < 2:
        return float(gradient.double().square().sum())
    rows = torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32)
    return float(rows.double().square().sum())


def master_of(parameter: torch.Tensor, is_offloaded: bool) -> torch.Tensor:
    """Return what is updated in a parameter's place: itself, or a copy in float32 or in host memory."""
    dtype = torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype
    if not is_offloaded:
        return parameter.detach().to(dtype)
    return parameter.detach().to("cpu", dtype, copy=True)


def adamw(
    master: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    copy: torch.Tensor | None,
    *,
    step: torch.Tensor,
    factor: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """Update one tensor in place, by the C++ kernel where that can be, else by PyTorch's.

    Args:
        master: Weights.
        gradient: Gradient, in its own dtype.
        first: First moment, in the dtype of the weights.
        second: Second moment.
        copy: Bfloat16 parameter that takes the rounded weights; None for none.
        step: Updates with this one, a scalar tensor where the weights are.
        factor: What the gradient is multiplied by (clipping).
        lr: Learning rate.
        betas: Decays of the moments.
        eps: Added to the denominator.
        decay: Decoupled weight decay.
    """
    beta1, beta2 = betas
    if suits_kernel(gradient) and master.dtype == torch.float32:
        tensors, rates = (master, gradient, first, second, copy), {"lr": lr, "beta1": beta1, "beta2": beta2}
        cpu.adamw(*tensors, step=float(step), factor=factor, eps=eps, decay=decay, **rates)
        return
    wide = gradient.to(master.dtype)
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        [master],
        [wide * factor if factor < 1 else wide],
        [first],
        [second],
        [],
        [step],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    if copy is not None:
        copy.copy_(master)
