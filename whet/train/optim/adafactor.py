"""Adafactor: no first moment, and of a matrix's second moment the means of its rows and columns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from whet.train.optim.optimizer import CHUNK, Master

DECAY, CLIP, EPS, LEAST = 0.8, 1.0, 1e-30, 1e-3
"""The paper's exponent of the second moment's decay, largest root mean square of an update, number added to squared
gradients, and least root mean square of the weights that scale a learning rate."""


class Factors:
    """The second moment of one tensor: of each matrix the means of rows and columns; of a vector the moment itself.

    Args:
        parameter: The tensor; with more than two axes a stack of matrices.
        master: Its weights; the moment has their dtype and device.

    Source: 1804.04235 algorithms 4 and 5, as `transformers.Adafactor` with `relative_step=False`: the learning rate is
    the schedule's, and weight decay is decoupled. Deviation: sums over blocks of rows are float64.
    """

    def __init__(self, parameter: torch.Tensor, master: Master) -> None:
        self._is_matrix, self._width = (
            parameter.dim() >= 2,
            parameter.shape[-1] if parameter.dim() >= 2 else 1,
        )
        place: dict[str, Any] = {"dtype": master.dtype, "device": master.device}
        self._rows = torch.zeros(parameter.shape[:-1] if self._is_matrix else parameter.shape, **place)
        columns = (*parameter.shape[:-2], self._width) if self._is_matrix else (0,)
        self._columns = torch.zeros(columns, **place)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state as named tensors."""
        if not self._is_matrix:
            return {"exp_avg_sq": self._rows}
        return {"exp_avg_sq_row": self._rows, "exp_avg_sq_col": self._columns}

    def update(
        self,
        master: Master,
        gradient: torch.Tensor,
        *,
        step: float,
        factor: float,
        lr: float,
        decay: float,
        is_relative: bool,
    ) -> None:
        """Update the weights in place. What is computed exists by blocks of rows: the gradient is read three times.

        Args:
            master: The weights.
            gradient: Their gradient.
            step: Updates including this one.
            factor: Factor of the gradient (clipping of the global norm).
            lr: Learning rate.
            decay: Decoupled weight decay.
            is_relative: Whether the learning rate is a share of the weights' root mean square.
        """
        blocks, flat, count = list(self._blocks(master.device)), gradient.reshape(-1), gradient.numel()
        if is_relative:
            squares = sum(_squares(master.read(part)) for part, _, _ in blocks)
            lr *= max(LEAST, math.sqrt(squares / count))

        def read(part: slice) -> torch.Tensor:
            return flat[part].to(master.dtype).mul(factor).view(-1, self._width)

        # The moments: the first update's decay is 0, so that they need no correction.
        weight = step**-DECAY
        means = torch.empty_like(self._rows).view(-1)
        sums = torch.zeros_like(self._columns, dtype=torch.float64).view(-1, self._width)
        for part, rows, index in blocks:
            squares_RC = read(part).square_().add_(EPS)
            means[rows] = squares_RC.mean(1)
            if self._is_matrix:
                sums[index] += squares_RC.sum(0, dtype=torch.float64)
        self._rows.lerp_(means.view_as(self._rows), weight)
        if self._is_matrix:
            new = sums.div_(self._rows.shape[-1]).to(self._columns.dtype)
            self._columns.lerp_(new.view_as(self._columns), weight)

        # The update: the gradient divided by the root of the moment, and no larger on average than CLIP.
        share = self._rows / self._rows.mean(-1, keepdim=True) if self._is_matrix else self._rows
        row_scale, column_scale = share.rsqrt().view(-1, 1), self._columns.rsqrt().view(-1, self._width)

        def moved(part: slice, rows: slice, index: int) -> torch.Tensor:
            scaled = read(part).mul_(row_scale[rows])
            return scaled.mul_(column_scale[index]) if self._is_matrix else scaled

        size = math.sqrt(sum(_squares(moved(*block)) for block in blocks) / count)
        for block in blocks:
            weights = master.read(block[0])
            weights.mul_(1 - lr * decay).sub_(moved(*block).view(-1), alpha=lr / max(1.0, size / CLIP))
            master.write(weights, block[0])

    def _blocks(self, device: torch.device) -> Iterator[tuple[slice, slice, int]]:
        """Yield blocks of rows: their numbers in the flat tensor, themselves among all rows, and their matrix."""
        height, width = self._rows.shape[-1], self._width
        step = max(1, CHUNK[device.type] // width)
        for first in range(0, self._rows.numel(), height):
            for start in range(first, first + height, step):
                stop = min(start + step, first + height)
                yield slice(start * width, stop * width), slice(start, stop), first // height


def _squares(x: torch.Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))
