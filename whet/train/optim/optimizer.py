"""The update of one tensor on its own device: AdamW by the C++ kernels or by PyTorch's, Muon, and the loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from whet.kernels.cpu import build
from whet.kernels.cpu import ops as cpu
from whet.kernels.eager import product_dtype

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


AXIS = 1_000_003
"""Longest axis whose places have numbers of their own; beyond it two weights may draw the same bits."""


def _random_bits(index: torch.Tensor, key: int) -> torch.Tensor:
    """Return a signed integer of 16 bits for each index: a hash (the finaliser of SplitMix64), the same everywhere."""
    mixed = index + key
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        # Shifts of negative numbers bring ones in from the left, which the mask takes away.
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * factor
    return (mixed >> 48).to(torch.int32)


class Master:
    """The weights that the optimizer updates: the parameter itself, or float32 weights that round to it.

    Float16 parameters have a float32 copy: their weights do not share upper bits.

    The float32 weights of a bfloat16 parameter are stored as the parameter plus 16 more bits: 4 bytes per weight
    instead of 6, and exact. A float32 number is its nearest bfloat16 number plus the lower half of its own bits, read
    as a signed integer, in steps of its last place. A number halfway between two bfloat16 numbers rounds away from zero
    (to even, the distance would be +2^15 as often as -2^15, one number too many for 16 bits).

    The weights of a 16-bit parameter start anywhere among the float32 numbers that round to it (`dither`). Started at
    the parameter itself, every weight would stay where it is until its updates add up to half a step of 16 bits, that
    is 0.2 % of it in bfloat16: at the small learning rates of fine-tuning nothing happens for tens of steps.

    Args:
        parameter: The parameter.
        is_offloaded: Whether the weights are in host memory, as a full copy.
    """

    def __init__(self, parameter: torch.Tensor, *, is_offloaded: bool) -> None:
        self._parameter = parameter.detach()
        self._low: torch.Tensor | None = None
        self._whole = self._parameter
        if is_offloaded or parameter.dtype == torch.float16:
            dtype = torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
            self._whole = self._parameter.to("cpu" if is_offloaded else parameter.device, dtype, copy=True)
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

    def dither(self, places: Sequence[torch.Tensor], key: int) -> None:
        """Add lower bits at random to the weights of a 16-bit parameter, which stays as it is; zeros stay zeros.

        The parameter then moves by its update on average, in each step, whatever the update's size.

        Args:
            places: For each axis the places of the parameter's part in the whole one, so that ranks draw what one
                process would.
            key: Of the parameter.
        """
        if self._parameter.dtype not in (torch.bfloat16, torch.float16):
            return
        rows, *rest = places or [torch.zeros(1, dtype=torch.int64)]
        width = max(1, math.prod(map(len, rest)))
        step = max(1, CHUNK[self.device.type] // width)
        kept = self._parameter.view(len(rows), -1)
        for start in range(0, len(rows), step):
            index = rows[start : start + step]
            part = slice(start * width, (start + len(index)) * width)
            for axis in rest:
                index = index[..., None] * AXIS + axis  # beyond 64 bits it wraps around
            low = _random_bits(index.to(self.device), key).view(-1)
            chosen = kept[start : start + step].reshape(-1).to(self.device)
            low = low.where((chosen != 0) & chosen.isfinite(), 0)
            if self._low is not None:
                self._low.view(-1)[part].copy_(low)
            else:
                # Of float16 13 bits are lost; an exact half would be rounded to even.
                low = (
                    low
                    if chosen.dtype == torch.bfloat16
                    else low.bitwise_right_shift_(3).clamp_(min=1 - 2**12)
                )
                self._whole.view(-1)[part].view(torch.int32).add_(low)

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
        [wide * factor if factor != 1 else wide],
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


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def muon(
    weights_AB: torch.Tensor,
    gradient_AB: torch.Tensor,
    momentum_AB: torch.Tensor,
    *,
    lr: float,
    decay: float,
    momentum: float,
    scale: Literal["rms", "spectral"],
    direction: Callable[[torch.Tensor], torch.Tensor] | None = None,
    shape: Sequence[int] = (),
) -> None:
    """Update a matrix in place by its orthogonalised Nesterov momentum.

    Args:
        weights_AB: Weights [rows, columns], or a rank's share of them.
        gradient_AB: Gradient in the dtype of the weights.
        momentum_AB: Running mean of the gradients.
        lr: Learning rate.
        decay: Decoupled weight decay.
        momentum: Decay of the running mean.
        scale: Size of the update, see `OptimConfig.muon_scale`.
        direction: Orthogonalises the momentum; default: `orthogonalise`. Of a share it needs the whole.
        shape: Rows and columns of the whole matrix; default: those of the weights.

    Source: kellerjordan.github.io/posts/muon (2024) for the iteration and 'spectral'; 2502.16982 section 2.2 for 'rms'
    and the weight decay. As `torch.optim.Muon`, but the iteration is in float32 on a CPU without bfloat16 products.
    """
    rows, columns = shape or weights_AB.shape
    momentum_AB.lerp_(gradient_AB, 1 - momentum)
    update_AB = (direction or orthogonalise)(gradient_AB.lerp(momentum_AB, momentum))
    size = 0.2 * math.sqrt(max(rows, columns)) if scale == "rms" else math.sqrt(max(1, rows / columns))
    weights_AB.mul_(1 - lr * decay)
    weights_AB.add_(update_AB, alpha=-lr * size)


def orthogonalise(matrix_AB: torch.Tensor) -> torch.Tensor:
    """Move all singular values of a matrix to about 1 (0.7 to 1.2) by five Newton-Schulz steps."""
    a, b, c = NEWTON_SCHULZ
    x = matrix_AB.bfloat16()
    x = x.to(product_dtype(x))
    if is_tall := x.shape[0] > x.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class LossScale:
    """The dynamic factor of float16's losses: halved when gradients overflow, doubled after 2,000 updates without.

    Attributes:
        value: The factor, a power of 2, float32.
        num_good: Updates since it changed, int64.

    Source: 1710.03740 section 3.2; numbers and behaviour of `torch.amp.GradScaler`.
    """

    FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000

    def __init__(self) -> None:
        self.value = torch.tensor(self.FIRST)
        self.num_good = torch.tensor(0)

    def update(self, *, is_finite: bool) -> None:
        """Take note of an update, or of one left out because its gradients were not finite."""
        if not is_finite:
            self.value *= self.BACKOFF
            self.num_good.zero_()
            return
        self.num_good += 1
        if self.num_good == self.INTERVAL:
            self.value *= self.GROWTH
            self.num_good.zero_()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state as named tensors, for a checkpoint."""
        return {"loss_scale": self.value, "loss_scale/num_good": self.num_good}
