"""AdamW's moments in 8 bits a number: block-wise codes, unpacked to float32 for every update.

Source: 2110.02861 (blocks with their own largest number, dynamic tree code). Deviations: blocks of 256, not 2,048; the
second moment is kept as its square root, which has the range of the first; rounding is stochastic, unbiased, since a
decay of 0.001 a step is less than half a code and would be rounded away for ever; the signed code has both its ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F

BLOCK = 256
CHUNK = 2**20
"""Numbers that are float32 at once; a multiple of `BLOCK`."""
MIN_NUMBERS = 4096
"""Tensors with fewer numbers (norms, biases) keep float32 moments, as in the paper's code."""
DECADES = 7


@cache
def dynamic_code(*, is_signed: bool, device: torch.device) -> torch.Tensor:
    """Return the 256 values of a byte, ascending, from 0 or -1 to 1: fine near 1, and down to 10^-7.

    Args:
        is_signed: Whether one bit is the sign.
        device: Where the values go.
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2 ** (decade + (not is_signed))
        values += [10.0 ** (decade + 1 - DECADES) * (0.1 + 0.9 * (k + 0.5) / count) for k in range(count)]
    if is_signed:  # -1 takes the place of the least number below 0
        values += [-value for value in values if value > min(filter(None, values))]
    return torch.tensor(sorted(values), device=device)


def encode(
    x_N: torch.Tensor, code: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round numbers to codes, up or down by chance so that the mean is right; what is above 0 stays above 0.

    Args:
        x_N: Float32 numbers.
        code: Values of a byte, ascending.
        generator: Decides which way.

    Returns:
        Codes uint8 [N], and the largest magnitude of each block of `BLOCK`.
    """
    blocks = F.pad(x_N, (0, -x_N.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    y = blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    low = torch.bucketize(y, code, right=True, out_int32=True).sub_(1).clamp_(0, len(code) - 2)
    floor, ceiling = (code.index_select(0, index.flatten()).view_as(y) for index in (low, low + 1))
    chance = torch.rand(y.shape, generator=generator, device=y.device)
    low += chance < (y - floor) / (ceiling - floor)
    codes = torch.maximum(low, (y > 0).int())
    return codes.to(torch.uint8).flatten()[: x_N.numel()], scales


def decode(codes_N: torch.Tensor, scales: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers [N] that `encode` rounded to."""
    count = codes_N.numel()
    values = F.pad(code.index_select(0, codes_N.int()), (0, -count % BLOCK))
    return (values.view(-1, BLOCK) * scales[:, None]).flatten()[:count]


class Moments:
    """Both moments of one tensor: 2.03 bytes a number.

    Args:
        like: The tensor; the moments begin as zeros.
    """

    def __init__(self, like: torch.Tensor) -> None:
        blocks = -(-like.numel() // BLOCK)
        self._codes = [torch.zeros(like.numel(), dtype=torch.uint8, device=like.device) for _ in range(2)]
        self._scales = [torch.zeros(blocks, device=like.device) for _ in range(2)]
        self._values = [dynamic_code(is_signed=signed, device=like.device) for signed in (True, False)]

    def parts(self, seed: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield the moments in float32, part by part; what the caller leaves in them is rounded and kept.

        Args:
            seed: Of the rounding; the same seed rounds in the same way.

        Yields:
            Where the part is in the flat tensor, its first moments, and its second.
        """
        generator = torch.Generator(self._scales[0].device).manual_seed(seed)
        count = self._codes[0].numel()
        for start in range(0, count, CHUNK):
            part = slice(start, min(start + CHUNK, count))
            blocks = slice(start // BLOCK, -(-part.stop // BLOCK))
            packed = zip(self._codes, self._scales, self._values, strict=True)
            first, root = (decode(codes[part], scales[blocks], values) for codes, scales, values in packed)
            second = root.square_()
            yield part, first, second
            for place, moment in enumerate((first, second.sqrt_())):
                codes, scales = encode(moment, self._values[place], generator)
                self._codes[place][part], self._scales[place][blocks] = codes, scales

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state as named tensors."""
        names = ("exp_avg", "exp_avg_root")
        codes = {f"{name}/codes": tensor for name, tensor in zip(names, self._codes, strict=True)}
        return codes | {f"{name}/scales": tensor for name, tensor in zip(names, self._scales, strict=True)}
