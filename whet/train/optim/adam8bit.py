"""AdamW's moments in 8 bits: block-wise codes, unpacked to float32 for every update.

Source: 2110.02861 (blocks with their own maximum, dynamic tree code). Deviations: blocks of 256, not 2,048; the
second moment is kept as its square root, which has the range of the first; rounding is stochastic and unbiased, because
a decay of 0.001 per step is less than half a code and would always be rounded away; the signed code has both ends, -1
and 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

BLOCK = 256
CHUNK = 2**18
"""Numbers unpacked to float32 at a time; a multiple of `BLOCK`."""
MIN_NUMBERS = 4096
"""Tensors with fewer numbers (norms, biases) keep float32 moments, as in the paper's code."""
DECADES = 7


@cache
def dynamic_code(*, is_signed: bool, device: torch.device) -> torch.Tensor:
    """Return the 256 values of a byte, ascending, from 0 or -1 to 1: fine near 1, and down to 10^-7.

    Args:
        is_signed: Whether one bit is the sign.
        device: Device of the values.
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2 ** (decade + (not is_signed))
        values += [10.0 ** (decade + 1 - DECADES) * (0.1 + 0.9 * (k + 0.5) / count) for k in range(count)]
    if is_signed:  # -1 replaces the smallest negative number
        values += [-value for value in values if value > min(filter(None, values))]
    return torch.tensor(sorted(values), device=device)


@dataclass(frozen=True, slots=True)
class Code:
    """The values of a byte, and tables that find a number's code without a search.

    Attributes:
        values: Ascending, 256 of them.
        above: The next higher value of each; infinity for the last.
        density: Codes per unit from each to the next; 0 for the last.
        start: By the upper 16 bits of a float32 number: the code below all numbers that start with them. These numbers
            differ by at most 2^-7 of themselves, less than neighbouring codes do: the right code is this one or the
            next.
    """

    values: torch.Tensor
    above: torch.Tensor
    density: torch.Tensor
    start: torch.Tensor


@cache
def code_of(*, is_signed: bool, device: torch.device) -> Code:
    """Return `dynamic_code` with its tables; cached."""
    values = dynamic_code(is_signed=is_signed, device=device)
    above = torch.cat((values[1:], values.new_tensor([math.inf])))
    density = 1 / (above - values)

    # For each pattern of the upper 16 bits, the code below the smallest number with that pattern.
    upper = torch.arange(2**16, dtype=torch.int32, device=device)
    # The smallest of the numbers that start with these bits: below 0 it has the largest magnitude.
    least = (torch.where(upper < 2**15, upper, upper + 1) << 16).view(torch.float32)
    least[-1] = -math.inf  # the last pattern is no number's (NaN); one more would wrap to +0
    start = (torch.bucketize(least, values, right=True) - 1).clamp_(0, 255).to(torch.uint8)
    return Code(values, above, density, start)


def encode(x_N: torch.Tensor, code: Code, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Round numbers to codes stochastically, without bias; positive numbers stay positive.

    Args:
        x_N: Float32 numbers.
        code: Values of a byte.
        generator: Source of randomness.

    Returns:
        Codes uint8 [N], and the largest magnitude of each block of `BLOCK`.
    """
    # Scale every block to [-1, 1]; a block of zeros stays zero.
    blocks = F.pad(x_N, (0, -x_N.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    smallest = torch.finfo(torch.float32).tiny
    y = (blocks / scales.clamp(min=smallest)[:, None]).view(-1)

    # The code below each number, without a search: a table lookup by its upper 16 bits, then at most one step up.
    upper = y.view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF)
    low = code.start.index_select(0, upper).int()
    low += y >= code.above.index_select(0, low)

    # Round up with a probability equal to the share of the way to the next code.
    share = (y - code.values.index_select(0, low)).mul_(code.density.index_select(0, low))
    low += _chances(y.numel(), generator) < share

    # Positive numbers get at least code 1: a second moment of 0 would make the next update huge.
    codes = torch.maximum(low, (y > 0).int())
    return codes.to(torch.uint8)[: x_N.numel()], scales


def _chances(count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw uniforms in [0, 1) in steps of 2^-16, four from each random number."""
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)[:count].float().add_(2**15 + 0.5).mul_(2.0**-16)


def decode(codes_N: torch.Tensor, scales: torch.Tensor, code: Code) -> torch.Tensor:
    """Return the float32 numbers [N] of codes from `encode`."""
    count = codes_N.numel()
    values = F.pad(code.values.index_select(0, codes_N.int()), (0, -count % BLOCK))
    return (values.view(-1, BLOCK) * scales[:, None]).flatten()[:count]


class Moments:
    """Both moments of one tensor: 2.03 bytes per number.

    Args:
        count: Numbers in the tensor; the moments start at zero.
        device: Their device.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        blocks = -(-count // BLOCK)
        self._codes = [torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2)]
        self._scales = [torch.zeros(blocks, device=device) for _ in range(2)]
        self._values = [code_of(is_signed=signed, device=device) for signed in (True, False)]

    def parts(self, seed: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield the moments in float32, part by part; the caller's changes are rounded and stored.

        Args:
            seed: Seed of the rounding.

        Yields:
            The part's slice of the flat tensor, its first moments, and its second moments.
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
