"""GaLore: a matrix's gradient in the space of its largest singular vectors, where AdamW's moments are small."""

from __future__ import annotations

from typing import Any

import torch

from whet.train.optim.optimizer import Master

COLUMNS = 1024
"""Columns of a gradient that are widened to float64 at a time."""


class Projection:
    """The space of one matrix's updates: `rank` orthonormal vectors along its shorter axis.

    Args:
        parameter: The matrix.
        master: Its weights; the vectors have their dtype and device.
        rank: Vectors; below the shorter axis.
        every: Updates after which they are chosen anew.

    Attributes:
        shape: Shape of a projected gradient.

    Source: 2403.03507 algorithm 2 and its code (github.com/jiaweizzhao/GaLore, proj_type 'std'): singular vectors of
        the current gradient at update 1, 1 + every, ..., moments stay as they are when the space changes. Deviations:
        the vectors are eigenvectors of the gradient times its transpose in float64, which are the singular vectors
        but for their sign; AdamW's epsilon and decay as in PyTorch.
    """

    def __init__(self, parameter: torch.Tensor, master: Master, *, rank: int, every: int) -> None:
        rows, columns = parameter.shape
        self._every, self._is_turned = every, rows >= columns
        short, long = min(rows, columns), max(rows, columns)
        place: dict[str, Any] = {"dtype": master.dtype, "device": master.device}
        self._basis_SR = torch.zeros(short, rank, **place)
        self.shape = rank, long

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state as named tensors."""
        return {"basis": self._basis_SR}

    def down(self, gradient: torch.Tensor, *, step: int) -> torch.Tensor:
        """Project a gradient, after choosing the vectors where it is time.

        Args:
            gradient: Gradient of the matrix.
            step: Updates including this one.
        """
        wide_SL = self._turned(gradient).to(self._basis_SR.dtype)
        if (step - 1) % self._every == 0:
            gram_SS = torch.zeros(len(wide_SL), len(wide_SL), dtype=torch.float64, device=wide_SL.device)
            for part in wide_SL.split(COLUMNS, dim=1):
                gram_SS.addmm_(part.double(), part.double().t())
            rank = self._basis_SR.shape[
                1
            ]  # largest first: moments stay those of the first, second, ... direction
            self._basis_SR.copy_(torch.linalg.eigh(gram_SS).eigenvectors[:, -rank:].flip(1))
        return (self._basis_SR.t() @ wide_SL).contiguous()

    def add(self, weights: torch.Tensor, change_RL: torch.Tensor, *, scale: float) -> None:
        """Add a projected change to the matrix in place.

        Args:
            weights: The matrix.
            change_RL: The change, of `shape`.
            scale: Its factor.
        """
        self._turned(weights).addmm_(self._basis_SR, change_RL, alpha=scale)

    def _turned(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.t() if self._is_turned else matrix
