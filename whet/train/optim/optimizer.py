"""The AdamW update of one tensor on its own device, by the C++ kernels or by PyTorch's fused kernel."""

from __future__ import annotations

import torch

from whet.kernels.cpu import build
from whet.kernels.cpu import ops as cpu

EVERYTHING = slice(None)
CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Weights unpacked to float32 at a time: within a CPU's cache joining and splitting them is cheap."""


def suits_kernel(gradient: torch.Tensor) -> bool:
    """Say whether the C++ kernels can read a gradient."""
    is_plain = gradient.dtype in cpu.DTYPES and gradient.is_contiguous()
    return is_plain and gradient.device.type == "cpu" and build.library() is not None


def sum_of_squares(gradient: torch.Tensor) -> float:
    """Return the sum of squares in float64; large tensors are first summed by row in float32, to avoid a full copy."""
    if suits_kernel(gradient):
        return cpu.sum_of_squares(gradient)
    if gradient.dtype == torch.float64 or gradient.dim() < 2:
        return float(gradient.double().square().sum())
    rows = torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32)
    return float(rows.double().square().sum())


class Master:
    """The weights that the optimizer updates: the parameter itself, or float32 weights that round to it.

    The float32 weights of a bfloat16 parameter are stored as the parameter plus 16 more bits: 4 bytes per weight
    instead of 6, and exact. A float32 number is its nearest bfloat16 number plus the lower half of its own bits, read
    as a signed integer, in steps of its last place. A number halfway between two bfloat16 numbers rounds away from zero
    (to even, the distance would be +2^15 as often as -2^15, one number too many for 16 bits).

    Args:
        parameter: The parameter; the weights start at its values.
        is_offloaded: Whether the weights are in host memory, as a full copy.
    """

    def __init__(self, parameter: torch.Tensor, *, is_offloaded: bool) -> None:
        self._parameter = parameter.detach()
        self._low: torch.Tensor | None = None
        self._whole = self._parameter
        if is_offloaded:
            dtype = torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype
            self._whole = self._parameter.to("cpu", dtype, copy=True)
        elif parameter.dtype == torch.bfloat16:
            self._low = torch.zeros(parameter.shape, dtype=torch.int16, device=parameter.device)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._whole.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self._whole.dtype if self._low is None else torch.float32

    @property
    def is_split(self) -> bool:
        """Whether the weights are stored as the parameter plus 16 bits."""
        return self._low is not None

    def held(self) -> list[torch.Tensor]:
        """Return the tensors held in addition to the parameter."""
        if self._low is not None:
            return [self._low]
        return [] if self._whole is self._parameter else [self._whole]

    def read(self, part: slice = EVERYTHING) -> torch.Tensor:
        """Return a part of the flat weights: a view, or a copy that `write` must put back."""
        whole = self._whole.view(-1)[part]
        if self._low is None:
            return whole
        bits = whole.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        return bits.add_(self._low.view(-1)[part]).view(torch.float32)

    def write(self, weights: torch.Tensor, part: slice = EVERYTHING) -> None:
        """Set a part of the flat weights, and of the parameter; a copy from `read` is overwritten."""
        target, whole = self._parameter.view(-1)[part], self._whole.view(-1)[part]
        if self._low is not None:
            bits = weights.view(torch.int32)
            self._low.view(-1)[part].copy_(bits)  # the lower half: int16 drops the upper bits
            _round(bits, target)
            return
        if weights.data_ptr() != whole.data_ptr():
            whole.copy_(weights)
        if self._whole is self._parameter:
            return
        if target.dtype == torch.bfloat16:
            _round(whole.view(torch.int32).clone(), target)
        else:
            target.copy_(whole)


def _round(bits: torch.Tensor, target: torch.Tensor) -> None:
    """Write the bfloat16 numbers nearest to float32 ones, given by their bits, which are overwritten."""
    upper = bits.add_(2**15).bitwise_right_shift_(16)
    target.view(torch.int16).copy_(upper)


def adamw(
    master: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    *,
    step: torch.Tensor,
    factor: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """Update one tensor in place, by the C++ kernel if possible, else by PyTorch's.

    Args:
        master: Weights.
        gradient: Gradient, in its own dtype.
        first: First moment, in the dtype of the weights.
        second: Second moment.
        step: Updates including this one, a scalar tensor on the weights' device.
        factor: Factor of the gradient (clipping).
        lr: Learning rate.
        betas: Decays of the moments.
        eps: Added to the denominator.
        decay: Decoupled weight decay.
    """
    beta1, beta2 = betas
    if suits_kernel(gradient) and master.dtype == torch.float32:
        tensors, rates = (master, gradient, first, second), {"lr": lr, "beta1": beta1, "beta2": beta2}
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
