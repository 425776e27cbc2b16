"""Ways to round a matrix: to the nearest codes (rtn), with the errors made up for by later columns (gptq), and with
columns scaled by what they multiply (awq)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from whet.kernels import eager
from whet.model.quant import Kind, PackedMatrix

Method = Literal["rtn", "gptq", "awq"]
DAMPING = 0.01
"""Share of the mean diagonal that is added to the second moments before they are inverted (GPTQ, section 3.3)."""
SHRINKING = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7)
"""Factors of the blocks' largest magnitudes that GPTQ chooses from: less range, finer steps."""
PASSES = 8
"""Most times that GPTQ's codes are gone over again."""
LEAST_GAIN = 0.005
"""Share of the outputs' squared error that a pass over the codes has to take away for another one to follow."""
BLOCK = 64
"""Columns whose errors reach the columns outside by one product."""
PULL = 0.5
"""Share of what the layers before have changed that a matrix makes up for; whole, it is fitted to the calibration text
more than to other text (stories260k: the same KL on held-out text, 4 to 8 % less on the calibration text)."""
SCALE_ROWS = 256
"""Rows of a matrix, evenly spaced, that AWQ's scales are tried on: columns are scaled for all rows alike."""
GRID = 20
"""Exponents of AWQ's scales that are tried, from 0 (no scaling) on, in steps of 1/20."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a matrix multiplies.

    Attributes:
        moments: Second moments X^T X / tokens, float32 [D, D].
        magnitudes: Mean magnitude of each input, float32 [D].
        tokens: How many they are means over.
    """

    moments: torch.Tensor
    magnitudes: torch.Tensor
    tokens: int = 1


def pack(
    weight_FD: torch.Tensor,
    kind: Kind,
    method: Method,
    inputs: Inputs | None,
    *,
    spots: torch.Tensor | None = None,
    transposed: bool = False,
) -> PackedMatrix:
    """Round a matrix.

    Args:
        weight_FD: The matrix; [D, F] if `transposed`.
        kind: Kind of its codes.
        method: How they are found.
        inputs: What it multiplies; rtn reads none.
        spots: Places in the flattened matrix that stay exact.
        transposed: Whether it is stored [in, out]; then it is rounded to the nearest codes.
    """
    own = {"spots": spots, "transposed": transposed}
    # Scales of GPT-2's columns would be those of outputs: its rows are rounded one by one.
    if method == "rtn" or inputs is None or transposed:
        return PackedMatrix.of(weight_FD, kind, **own)
    if method == "awq":
        return PackedMatrix.of(weight_FD, kind, columns=_scales(weight_FD, kind, inputs), **own)
    return gptq(weight_FD, kind, inputs.moments, spots=spots)


def target(
    weight_FD: torch.Tensor,
    moments: torch.Tensor,
    cross: torch.Tensor,
    *,
    spots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the matrix whose products with changed inputs are nearest to the full model's, half of the way there.

    Args:
        weight_FD: The matrix.
        moments: Second moments Y^T Y / tokens of its inputs Y in the model that is quantised before it.
        cross: X^T Y / tokens, with its inputs X in the full model.
        spots: Places in the flattened matrix that stay exact.

    Source: QEP 2504.09629: W + alpha W (X - Y)^T Y (Y^T Y)^-1, alpha = `PULL`; damped as GPTQ's.
    """
    weight = weight_FD.detach().float()
    damped = moments.double().clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += DAMPING * diagonal.mean()
    change = torch.linalg.solve(damped, (cross - moments).double(), left=False).float()
    found = weight + PULL * (weight @ change)
    if spots is not None:
        found.view(-1)[spots] = weight.reshape(-1)[spots]
    return found


def activation_error(delta_FD: torch.Tensor, weight_FD: torch.Tensor, moments: torch.Tensor) -> float:
    """Return ||X Delta^T|| / ||X W^T|| from the second moments of X."""
    top, bottom = squared_outputs(delta_FD, moments), squared_outputs(weight_FD, moments)
    return math.sqrt(top / max(bottom, 1e-30))


def squared_outputs(weight_FD: torch.Tensor, moments: torch.Tensor) -> float:
    """Return ||X W^T||^2 / tokens from the second moments of X."""
    return max(0.0, float(((weight_FD @ moments) * weight_FD).sum()))


def _scales(weight_FD: torch.Tensor, kind: Kind, inputs: Inputs) -> torch.Tensor:
    """Return the factors of the columns that leave the least error of the outputs.

    Source: AWQ 2306.00978, section 3.2. Deviation: the scales are divided out of the dequantised matrix, where AWQ
        folds them into the operation before; so they cost 4 bytes a column, and any layer can have them.
    """
    weight = weight_FD[:: max(1, len(weight_FD) // SCALE_ROWS)].float()
    size = inputs.magnitudes.clamp(min=1e-4 * float(inputs.magnitudes.max()) + 1e-12)
    best, least = torch.ones_like(size), float("inf")
    for step in range(GRID):
        scales = size ** (step / GRID)
        scales = scales / (scales.max() * scales.min()).sqrt()
        found = PackedMatrix.of(weight, kind, columns=scales).dense(torch.float32)
        error = squared_outputs(found - weight, inputs.moments)
        if error < least:
            best, least = scales, error
    return best


def gptq(
    weight_FD: torch.Tensor, kind: Kind, moments: torch.Tensor, *, spots: torch.Tensor | None = None
) -> PackedMatrix:
    """Round column by column; what is not rounded yet makes up for the error.

    Args:
        weight_FD: The matrix.
        kind: Kind of its codes.
        moments: Second moments of what it multiplies.
        spots: Places in the flattened matrix that stay exact.

    Source: GPTQ 2210.17323, algorithm 1. Deviations: columns in the order of falling second moment
        (its `act_order`); the scales are found before, where each block of NF4 takes of `SHRINKING` the one that leaves
        the least error, weighted by the inputs' second moments; and after the last column all are gone over again,
        each code becoming the best one given all others (QuantEase 2309.01885, equation 10), which a first pass, that
        knows nothing of later columns' errors, cannot do.
    """
    rows, width = weight_FD.shape
    plain = PackedMatrix.of(weight_FD, kind, spots=spots)
    if kind == "nf4":
        plain = _with_fitted_scales(plain, weight_FD, moments)
    scales_DF, codes_of = _scaled_codes(plain, rows, width)

    hessian = moments.double().clone()
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1.0
    diagonal += DAMPING * diagonal.mean()
    order = diagonal.argsort(descending=True)
    hessian = hessian[order][:, order]
    inverse = torch.linalg.cholesky(
        torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True
    ).float()

    # Columns in the order of rounding, until the codes are done; each is a row of these matrices, so that it lies in
    # one piece of memory. A column's error reaches the other columns of its block at once, and all others by one
    # product for the block: column by column the whole matrix would be written.
    full = weight_FD.detach().float().t()[order]
    weight, scales_DF = full.clone(), scales_DF[order]
    codes = torch.empty(width, rows, dtype=torch.uint8 if kind == "nf4" else torch.int8, device=full.device)
    values = torch.empty_like(full)
    is_spot: torch.Tensor | None = None
    if spots is not None:
        is_spot = torch.zeros(rows * width, dtype=torch.bool, device=full.device)
        is_spot[spots] = True
        is_spot = is_spot.view(rows, width).t()[order]

    def round_column(column: int, wanted: torch.Tensor) -> torch.Tensor:
        codes[column], value = codes_of(wanted, scales_DF[column])
        return value if is_spot is None else torch.where(is_spot[column], full[column], value)

    blocks = [slice(start, min(start + BLOCK, width)) for start in range(0, width, BLOCK)]
    pivots = inverse.diagonal().tolist()
    for block in blocks:
        own, errors = weight[block].clone(), torch.empty_like(weight[block])
        for place, column in enumerate(range(block.start, block.stop)):
            value = values[column] = round_column(column, own[place])
            errors[place] = (own[place] - value) / pivots[column]
            own[place + 1 :].addr_(inverse[column, column + 1 : block.stop], errors[place], alpha=-1)
        weight[block.stop :] -= inverse[block, block.stop :].t() @ errors

    damped = hessian.float()
    slopes = damped @ (values - full)  # half the gradient of the outputs' squared error
    error, pivots = float(((values - full) * slopes).sum()), damped.diagonal().tolist()
    for _ in range(PASSES):
        for block in blocks:
            own, changes = slopes[block].clone(), torch.empty_like(slopes[block])
            for place, column in enumerate(range(block.start, block.stop)):
                value = round_column(column, values[column] - own[place] / pivots[column])
                changes[place] = value - values[column]
                own[place + 1 :].addr_(damped[column, column + 1 : block.stop], changes[place])
                values[column] = value
            slopes += damped[:, block] @ changes
        before, error = error, float(((values - full) * slopes).sum())
        if before - error <= LEAST_GAIN * before:
            break
    return _with_codes(plain, torch.empty_like(codes).index_copy_(0, order, codes).t())


def _with_fitted_scales(plain: PackedMatrix, weight_FD: torch.Tensor, moments: torch.Tensor) -> PackedMatrix:
    """Return a matrix in NF4 whose blocks' absmax are shrunk as far as that lessens the error of the outputs."""
    full = weight_FD.detach().float().clone()
    if plain.spots is not None:
        full.view(-1)[plain.spots] = 0
    blocks = eager.nf4_blocks(full)
    importance = eager.nf4_blocks(moments.diagonal().expand(full.shape))
    largest = blocks.abs().amax(-1)
    table = eager.nf4_table(blocks.device)
    best, least = largest, torch.full_like(largest, float("inf"))
    for factor in SHRINKING:
        absmax = largest * factor
        values = table[eager.nf4_codes(blocks, absmax).long()] * absmax[:, None]
        error = ((values - blocks).square() * importance).sum(-1)
        best, least = torch.where(error < least, absmax, best), torch.minimum(error, least)
    found = eager.nf4_pack(eager.nf4_codes(blocks, best), best, tuple(full.shape), double=True)
    return PackedMatrix(
        "nf4", tuple(full.shape), found.codes, found.absmax, found.scale, found.offset, spots=plain.exact
    )


Codes = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _scaled_codes(plain: PackedMatrix, rows: int, width: int) -> tuple[torch.Tensor, Codes]:
    """Return the scale of every number, [width, rows], and what rounds numbers of given scales to codes and their
    values."""
    if plain.kind == "int8":
        scales = (plain.absmax / 127).expand(width, rows)

        def int8(values: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            codes = (values / scale.masked_fill(scale == 0, 1.0)).round().clamp(-127, 127)
            return codes.to(torch.int8), codes * scale

        return scales, int8
    absmax = eager.nf4_absmax(plain.absmax, plain.scale, plain.offset)
    scales = absmax.repeat_interleave(eager.NF4_BLOCK)[: rows * width].view(rows, width).t().contiguous()
    table = eager.nf4_table(scales.device)
    middles = (table[1:] + table[:-1]) / 2
    # Where a block is zero its values are below: their codes stand for zero whatever they are divided by.
    scales = scales.masked_fill(scales == 0, torch.finfo(torch.float32).tiny)

    def nf4(values: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.bucketize(values / scale, middles)
        return codes.to(torch.uint8), table[codes] * scale

    return scales, nf4


def _with_codes(plain: PackedMatrix, codes: torch.Tensor) -> PackedMatrix:
    """Return a packed matrix with other codes of the same scales."""
    if plain.kind == "nf4":
        flat = codes.reshape(-1)
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % eager.NF4_BLOCK), value=7)
        codes = flat[::2] << 4 | flat[1::2]
    return PackedMatrix(
        plain.kind, tuple(plain.shape), codes, plain.absmax, plain.scale, plain.offset, spots=plain.exact
    )
