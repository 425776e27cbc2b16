"""The arithmetic of editing a linear memory W k = v: pure functions, float64, no model.

A down projection is read as a memory: it maps a key k [F] (what the subject's last token brings) to a value v [D]. An
edit is a change of low rank, left [D, R] times right [R, F], that gives some keys new values and disturbs those of
other text as little as it can: how much is said by C = E[k k^T], the second moment of the keys of prose.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Delta(NamedTuple):
    """A change of a matrix [D, F], in two factors.

    Attributes:
        left_DR: The values that are added.
        right_RF: What of a key they answer to.
    """

    left_DR: torch.Tensor
    right_RF: torch.Tensor

    def dense(self) -> torch.Tensor:
        """Return the change as a matrix [D, F], float64."""
        return self.left_DR.double() @ self.right_RF.double()


def rank_one(
    residual_D: torch.Tensor, direction_F: torch.Tensor, key_F: torch.Tensor, moment_FF: torch.Tensor
) -> Delta:
    """Give one key a new value exactly, with the least change for keys of prose.

    Args:
        residual_D: The new value minus the present one, v - W k.
        direction_F: The key whose direction C^-1 turns; the mean over contexts in ROME.
        key_F: The key that gets the value. R-ROME: the same as `direction_F`. ROME's published code has the key of the
            bare prompt here, and the mean there: after some edits in a row such a model breaks.
        moment_FF: C.

    Returns:
        A change of rank 1 with (W + change) k = v.

    Source:
        arXiv 2202.05262, equation 2; R-ROME: arXiv 2403.07175, section 3.
    """
    turned_F = solve(moment_FF, direction_F.double()[:, None])[:, 0]
    scale = turned_F @ key_F.double()
    return Delta(residual_D.double()[:, None] / scale, turned_F[None, :])


def spread(residual_ED: torch.Tensor, keys_EF: torch.Tensor, moment_FF: torch.Tensor, weight: float) -> Delta:
    """Give many keys new values at once, by least squares: R K^T (weight C + K K^T)^-1.

    It minimises sum_e |change k_e - r_e|^2 + weight E|change k|^2 over the keys k of prose. The inverse couples all
    edits: two with similar keys share what they change.

    Args:
        residual_ED: What is added to each key's value.
        keys_EF: The keys.
        moment_FF: C, a mean over tokens: `weight` is then on the scale of the paper (15,000 to 20,000).
        weight: How much prose counts.

    Source:
        arXiv 2210.07229, equation 14.
    """
    keys = keys_EF.double()
    turned_FE = solve(weight * moment_FF.double() + keys.t() @ keys, keys.t())
    return Delta(residual_ED.double().t(), turned_FE.t())


def null_space(moment_FF: torch.Tensor, share: float) -> torch.Tensor:
    """Return the projection [F, F] onto the directions that keys of prose hardly have.

    Args:
        moment_FF: C.
        share: The directions with the smallest eigenvalues are kept free, as many as have this share of the trace
            together. (The published code compares eigenvalues with 0.02, whatever the model's keys are scaled like.)

    Source:
        arXiv 2410.02355, section 3.2.
    """
    values_F, vectors_FF = torch.linalg.eigh(moment_FF.double())
    values_F = values_F.clamp(min=0)
    is_free_F = values_F.cumsum(0) <= share * values_F.sum()
    free = vectors_FF[:, is_free_F]
    return free @ free.t()


def project(
    residual_ED: torch.Tensor,
    keys_EF: torch.Tensor,
    projection_FF: torch.Tensor,
    earlier_XF: torch.Tensor | None = None,
    weight: float = 10.0,
) -> Delta:
    """Give keys new values by a change that is zero outside of a projection: R K^T P (K K^T P + E E^T P + weight)^-1.

    Args:
        residual_ED: What is added to each key's value.
        keys_EF: The keys.
        projection_FF: P, of `null_space`.
        earlier_XF: Keys of earlier edits, which keep the values that they got; None for none.
        weight: Of the change's own size, in units of squared keys.

    Source:
        arXiv 2410.02355, equation 13 (AlphaEdit).
    """
    keys = keys_EF.double()
    gram_FF = keys.t() @ keys
    if earlier_XF is not None:
        gram_FF = gram_FF + earlier_XF.double().t() @ earlier_XF.double()
    # In the coordinates of the projection's range the matrix is symmetric and positive: a smaller, safer system.
    values, vectors = torch.linalg.eigh(projection_FF.double())
    basis_FP = vectors[:, values > 0.5]
    inner_PP = basis_FP.t() @ gram_FF @ basis_FP
    inner_PP = inner_PP + weight * torch.eye(len(inner_PP), dtype=torch.float64, device=inner_PP.device)
    turned_PE = torch.linalg.solve(inner_PP, basis_FP.t() @ keys.t())
    return Delta(residual_ED.double().t(), (basis_FP @ turned_PE).t())


def solve(matrix_FF: torch.Tensor, right_FX: torch.Tensor) -> torch.Tensor:
    """Solve a symmetric positive system in float64; a singular one in the least-squares sense.

    C is singular where fewer tokens were seen than a key has numbers, or some of those are always 0.
    """
    matrix = matrix_FF.double()
    factor, failed = torch.linalg.cholesky_ex(matrix)
    diagonal = factor.diagonal()
    if not int(failed) and float(diagonal.min()) > 1e-7 * float(diagonal.max()):
        return torch.cholesky_solve(right_FX.double(), factor)
    values, vectors = torch.linalg.eigh(matrix)
    least = 1e-12 * float(values.max())
    inverse = torch.where(values > least, 1 / values.clamp(min=max(least, 1e-300)), 0.0)
    return vectors @ (inverse[:, None] * (vectors.t() @ right_FX.double()))


def disturbance(delta: Delta, moment_FF: torch.Tensor) -> float:
    """Return how far the values of prose move: sqrt(E|change k|^2), the norm of the change in C."""
    left, right = delta.left_DR.double(), delta.right_RF.double()
    inner_RR = right @ moment_FF.double() @ right.t()
    return float((left.t() @ left * inner_RR).sum().clamp(min=0).sqrt())


def capped(vectors_ED: torch.Tensor, lengths_E: torch.Tensor) -> torch.Tensor:
    """Shorten those of some vectors that are longer than allowed."""
    norms_E = vectors_ED.norm(dim=1)
    return vectors_ED * (lengths_E / norms_E.clamp(min=1e-30)).clamp(max=1.0)[:, None]
