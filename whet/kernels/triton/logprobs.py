# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingImports=false
"""Log-probability and entropy in one pass over the logits, and their gradient written over the logits, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _forward(
    z_ptr, targets_ptr, logprob_ptr, normaliser_ptr, entropy_ptr, row_stride, V, BLOCK: tl.constexpr
):  # fmt: skip
    """One row: running max, sum of exp(z - max) and sum of exp(z - max) (z - max)."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * row_stride
    top, total, moment = (
        tl.full([], float("-inf"), tl.float32),
        tl.zeros([], tl.float32),
        tl.zeros([], tl.float32),
    )
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + column, mask=column < V, other=float("-inf"))
        # The moment is taken around the running maximum, so that logits near 10,000 lose nothing. Where a block has
        # no finite logit, -inf - -inf would be nan: hence `base`, `centred` and `moved`.
        new = tl.maximum(top, tl.max(z, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        centred = tl.where(z == float("-inf"), 0.0, z - base)
        probs, keep = tl.exp(z - base), tl.exp(top - base)
        moved = tl.where(top == float("-inf"), 0.0, top - base)
        moment = keep * (moment + total * moved) + tl.sum(probs * centred, 0)
        total = keep * total + tl.sum(probs, 0)
        top = new
    normaliser = top + tl.log(total)
    chosen = tl.load(z_ptr + tl.load(targets_ptr + row))
    tl.store(logprob_ptr + row, (chosen - top) - tl.log(total))
    tl.store(normaliser_ptr + row, normaliser)
    tl.store(entropy_ptr + row, tl.log(total) - moment / total)


@triton.jit
def _backward(
    z_ptr, targets_ptr, normaliser_ptr, entropy_ptr, grad_logprob_ptr, grad_entropy_ptr, temperature,
    row_stride, V, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z_ptr += row * row_stride
    z = tl.load(z_ptr + column, mask=column < V, other=float("-inf"))
    logprobs = z - tl.load(normaliser_ptr + row)
    finite = tl.where(z == float("-inf"), 0.0, logprobs)
    g, e = tl.load(grad_logprob_ptr + row), tl.load(grad_entropy_ptr + row)
    grad = tl.exp(logprobs) * (-g - e * (finite + tl.load(entropy_ptr + row)))
    grad += tl.where(column == tl.load(targets_ptr + row), g, 0.0)
    tl.store(z_ptr + column, grad / temperature, mask=column < V)


def _block(vocab: int) -> int:
    return min(BLOCK, max(128, 1 << (vocab - 1).bit_length()))


def logprob_entropy(
    logits_MV: torch.Tensor, targets_M: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log softmax(logits)[target], log-normaliser, entropy; see `whet.kernels.eager.logprob_entropy`."""
    rows, vocab = logits_MV.shape
    assert logits_MV.dtype == torch.float32
    assert logits_MV.stride(1) == 1
    logprob, normaliser, entropy = logits_MV.new_empty((3, rows)).unbind(0)
    if rows:
        _forward[(rows,)](
            logits_MV, targets_M.contiguous(), logprob, normaliser, entropy, logits_MV.stride(0), vocab,
            BLOCK=_block(vocab), num_warps=8,
        )  # fmt: skip
    return logprob, normaliser, entropy


def logprob_entropy_backward_(
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    normaliser_M: torch.Tensor,
    entropy_M: torch.Tensor,
    grad_logprob_M: torch.Tensor,
    grad_entropy_M: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Overwrite logits with the loss's gradient; see `whet.kernels.eager.logprob_entropy_backward_`."""
    rows, vocab = logits_MV.shape
    assert logits_MV.dtype == torch.float32
    assert logits_MV.stride(1) == 1
    if rows:
        block = _block(vocab)
        _backward[(rows, triton.cdiv(vocab, block))](
            logits_MV, targets_M.contiguous(), normaliser_M.contiguous(), entropy_M.contiguous(),
            grad_logprob_M.float().contiguous(), grad_entropy_M.float().contiguous(), temperature,
            logits_MV.stride(0), vocab, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return logits_MV
