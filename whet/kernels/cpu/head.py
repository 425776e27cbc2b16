"""The language-model head on the C++ kernels: logits, log-probabilities and entropies with gradients, sampling."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from typing import Any, Protocol

import torch

from whet.kernels.cpu.ops import QUANTUM, _threads, _wide, call, matmul, panels, product
from whet.kernels.eager import product_dtype

KEEP_BYTES = 256 * 2**20
"""Most logits kept for the backward pass; beyond that they are recomputed."""


def logits(hidden_MD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Return float32 logits [M, V'], V' = V rounded up to 16; columns from V on are left to the caller.

    Products have the weight's dtype and float32 sums: bfloat16 logits would be too coarse.
    """
    vocab = weight_VD.shape[0]
    out = torch.empty(hidden_MD.shape[0], -(-vocab // QUANTUM) * QUANTUM)
    rows = hidden_MD.detach().to(weight_VD.dtype).contiguous()
    return product(rows, panels(weight_VD, weight_VD.dtype), vocab, out=out)


def select(logits_MV: torch.Tensor, targets_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log softmax(logits)[target] and the log-normaliser, both [M], as `score` computes them."""
    z, (rows, whole) = logits_MV.contiguous(), logits_MV.shape
    logprobs, normalisers = torch.empty(2, rows).unbind(0)
    call("score", z, targets_M.contiguous(), logprobs, normalisers, None, rows, whole, whole, 1.0, _threads())
    return logprobs, normalisers


class KeepOnly(Protocol):
    """Sets the logits of what filters removed to -inf, in place."""

    def __call__(self, logits_MV: torch.Tensor, *, first: int) -> object:
        """Take rows of logits, and the index of their first row."""
        ...


def _grad_logits(
    z_MV: torch.Tensor,
    targets_M: torch.Tensor,
    sums: tuple[torch.Tensor, torch.Tensor],
    g_M: torch.Tensor,
    e_M: torch.Tensor | None,
    weight_VD: torch.Tensor,
    valid: int,
    temperature: float,
    *,
    is_finished: bool,
) -> torch.Tensor:
    """Return the gradient [M, V] of the logits, for upstream g of log-probabilities and e of entropies; z is lost.

    `sums` are the normalisers and entropies; `is_finished` says whether the logits went through `score` before.
    """
    # In place where the products take float32. So the kernel must read a row's target before it writes any of the row:
    # the other way round gradients were wrong by up to 34 %.
    dz = z_MV if product_dtype(weight_VD) == torch.float32 else torch.empty(z_MV.shape, dtype=weight_VD.dtype)
    sizes = z_MV.shape[0], valid, z_MV.shape[1], temperature, int(is_finished), _threads()
    call("score_back", _wide(dz), z_MV, targets_M, *sums, g_M, e_M, dz, *sizes)
    return dz[:, : weight_VD.shape[0]]


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        valid: int,
        chunk: int,
        keep_only: KeepOnly | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = hidden.shape[0]
        logprobs, normalisers, entropies = torch.empty(3, rows).unbind(0)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        # Keeping the logits saves the backward pass a product as large as the forward one; chunks bound memory instead.
        # A frozen head needs neither: the gradient of a row's log-probability is computed while its logits are there,
        # and the backward pass only scales it.
        keeps = needs_weight and rows * weight.shape[0] * 4 <= KEEP_BYTES
        slopes = torch.empty(hidden.shape) if needs_hidden and not needs_weight else None
        step = rows if keeps else chunk
        z = hidden
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            z = logits(hidden[part], weight)
            if keep_only is not None:
                keep_only(z, first=start)
            columns = logprobs[part], normalisers[part], entropies[part]
            call("score", z, targets[part], *columns, z.shape[0], valid, z.shape[1], temperature, _threads())
            if slopes is not None:
                ones = torch.ones(z.shape[0])
                dz = _grad_logits(
                    z, targets[part], columns[1:], ones, None, weight, valid, temperature, is_finished=True
                )
                slopes[part] = matmul(dz, weight)
        kept = z if keeps else None
        ctx.save_for_backward(hidden, weight, targets, normalisers, entropies, kept, slopes)
        ctx.facts = temperature, valid, step, keep_only
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, normalisers, entropies, kept, slopes = ctx.saved_tensors
        temperature, valid, step, keep_only = ctx.facts
        g, e = (grad.contiguous() for grad in upstream)
        # Without an entropy term its pass over the logits is left out.
        e = e if bool((e != 0).any()) else None
        if slopes is not None and e is None:
            return (g[:, None] * slopes).to(hidden.dtype), None, None, None, None, None, None
        dtype = weight.dtype
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight: torch.Tensor | None = None
        for start in range(0, hidden.shape[0], step):
            part = slice(start, min(start + step, hidden.shape[0]))
            z = logits(hidden[part], weight) if kept is None else kept
            if keep_only is not None and kept is None:
                keep_only(z, first=start)
            dz = _grad_logits(
                z,
                targets[part],
                (normalisers[part], entropies[part]),
                g[part],
                None if e is None else e[part],
                weight,
                valid,
                temperature,
                is_finished=kept is not None,
            )
            if grad_hidden is not None:
                grad_hidden[part] = matmul(dz, weight).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                share = matmul(dz.t(), hidden[part].to(dtype))
                if step >= hidden.shape[0]:
                    grad_weight = share
                else:
                    # Chunks add up in float32: bfloat16 sums would lose what is small beside the rest.
                    grad_weight = share.float() if grad_weight is None else grad_weight.add_(share)
        if grad_weight is not None:
            grad_weight = grad_weight.to(dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def score(
    hidden_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    temperature: float,
    num_valid: int,
    chunk: int,
    keep_only: KeepOnly | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and entropies [M]; the arguments are those of `whet.algo.logprobs.token_logprobs`.

    `keep_only` sets the logits of what filters removed to -inf, in place, in rows that start at row `first` of all.
    """
    arguments = hidden_MD, weight_VD, targets_M.contiguous(), temperature, num_valid, chunk, keep_only
    return _Score.apply(*arguments)  # pyright: ignore[reportReturnType]


class RowState(ctypes.Structure):
    """Addresses of an engine's row state."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in (
                "seeds",
                "positions",
                "counts",
                "limits",
                "last",
                "tokens",
                "logprobs",
                "done",
                "stopped",
            )
        ),
        ("width", c_int64),
        ("stops", c_void_p),
        ("num_stops", c_int64),
    )


def draw(
    logits_MV: torch.Tensor,
    state: RowState,
    *,
    num_valid: int,
    temperature: float,
) -> None:
    """Sample a token for the first B rows from their own noise, store it, and end the rows that are done.

    Args:
        logits_MV: Logits from `logits`; overwritten.
        state: The rows; row r has the noise of its seed and count (`whet.generate.sampling.counter_uniforms`).
        num_valid: Ids at and above this are never drawn.
        temperature: Divides the logits; 0 takes the most likely token, and scores it at temperature 1.
    """
    sizes = logits_MV.shape[0], num_valid, logits_MV.shape[1]
    call("draw", logits_MV, ctypes.byref(state), *sizes, temperature, _threads())
