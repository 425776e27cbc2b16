"""Log-probability and entropy of chosen tokens, from hidden states, without materialising [N, V].

Sampler and trainer call the same functions, so the trainer scores exactly the distribution that was sampled.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from whet.algo.kept import keep_only
from whet.kernels import dispatch, eager
from whet.kernels.cpu import head as cpu_head
from whet.types import KeptSets

ROW_QUANTUM = 16
COLUMN_QUANTUM = 16
CHUNK_BYTES_CPU = 64 * 2**20
CHUNK_BYTES_GPU = 2**30


def head_logits(
    hidden_MD: torch.Tensor, weight_VD: torch.Tensor, *, temperature: float, num_valid: int, cap: float = 0.0
) -> torch.Tensor:
    """Compute float32 logits of the sampled distribution: head(hidden) / temperature over the valid ids.

    Rows and columns are padded (columns with -inf), so that neither the matrix product nor a later reduction depends on
    the number of rows in the call.

    Args:
        hidden_MD: Hidden states.
        weight_VD: Output projection.
        temperature: Sampling temperature, above 0.
        num_valid: Ids at and above this get -inf.
        cap: Logits become cap tanh(logit / cap) before the division by the temperature; 0 for none.

    Returns:
        Logits [M, V'], V' = V rounded up to `COLUMN_QUANTUM`, float32.
    """
    rows, vocab = hidden_MD.shape[0], weight_VD.shape[0]
    if not cap and dispatch.runs_cpp(hidden_MD, weight_VD):
        logits = cpu_head.logits(hidden_MD, weight_VD)
        logits[:, num_valid:] = float("-inf")
        return logits / temperature if temperature != 1.0 else logits
    surplus_rows = -rows % ROW_QUANTUM
    if surplus_rows:
        hidden_MD = F.pad(hidden_MD, (0, 0, 0, surplus_rows))
    if hidden_MD.is_cuda and weight_VD.dtype in (torch.bfloat16, torch.float16):
        logits = torch.mm(hidden_MD.to(weight_VD.dtype), weight_VD.t(), out_dtype=torch.float32)
    elif weight_VD.dtype == torch.float64:
        logits = F.linear(hidden_MD.double(), weight_VD)
    else:
        with torch.autocast(hidden_MD.device.type, enabled=False):
            logits = F.linear(hidden_MD.float(), weight_VD.float())
    if cap:
        logits = eager.row_wise(torch.tanh, logits / cap) * cap
    surplus_columns = -vocab % COLUMN_QUANTUM
    if surplus_columns:
        logits = F.pad(logits, (0, surplus_columns), value=float("-inf"))
    if num_valid < vocab:
        logits[:, num_valid:vocab] = float("-inf")
    if temperature != 1.0:
        logits = logits / temperature
    return logits[:rows] if surplus_rows else logits


def exp_logits(logits_MV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return exp(logits - largest) [M, V], its sums [M] and the log-normaliser [M].

    Sampler and trainer both take their normaliser from here, so that it is bitwise the same. The sampler draws from the
    exponentials and the trainer builds its gradient from them; they dominate the cost and are computed once.

    Args:
        logits_MV: Float32 (or float64) logits; -inf columns are outside the support.
    """
    top_M1 = logits_MV.amax(-1, keepdim=True)
    weights_MV = (logits_MV - top_M1).exp_()
    # PyTorch splits the sum of a single long row over threads, which gives other bits than the same row in a batch.
    rows = weights_MV.expand(2, -1) if weights_MV.shape[0] == 1 else weights_MV
    total_M = rows.sum(-1)[: weights_MV.shape[0]]
    return weights_MV, total_M, total_M.log() + top_M1.squeeze(1)


def select_logprobs(
    logits_MV: torch.Tensor, targets_M: torch.Tensor, normaliser_M: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log softmax(logits)[target] and the log-normaliser, both [M].

    Args:
        logits_MV: Float32 (or float64) logits; -inf columns are outside the support.
        targets_M: int64 ids.
        normaliser_M: The normaliser of `exp_logits`, if it was called; kernels compute their own.
    """
    if logits_MV.dtype == torch.float32 and not logits_MV.requires_grad and dispatch.runs_cpp(logits_MV):
        return cpu_head.select(logits_MV, targets_M)
    if (kernel := dispatch.kernel_for(eager.logprob_entropy, logits_MV)) is not None:
        return kernel(logits_MV, targets_M)[:2]
    if normaliser_M is None:
        normaliser_M = exp_logits(logits_MV)[2]
    return logits_MV.gather(1, targets_M[:, None]).squeeze(1) - normaliser_M, normaliser_M


def chunk_rows(vocab: int, device: torch.device) -> int:
    """Choose the rows of logits held at once: a memory budget, within [1024, 16384]."""
    budget = CHUNK_BYTES_GPU if device.type == "cuda" else CHUNK_BYTES_CPU
    return max(1024, min(16384, budget // (4 * vocab)))


class _TokenLogprobs(torch.autograd.Function):
    """Chunked head: the forward saves hidden states and three numbers per row, the backward recomputes logits.

    If the logits are small enough, it saves their exponentials instead, which avoids a matrix product and a pass of exp
    (a tenth of a small model's training step). Gradient of a row's logits, for upstream g (of the log-probability) and
    e (of the entropy): dz = g (onehot - p) - e p (log p + H). The tests verify it by finite differences.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_M: torch.Tensor,
        temperature: float,
        num_valid: int,
        sets: KeptSets | None,
        chunk: int,
        keeps: bool,
        cap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns: list[tuple[torch.Tensor, ...]] = []
        kept: list[torch.Tensor] = []
        for start in range(0, hidden_MD.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = head_logits(
                hidden_MD[rows], weight_VD, temperature=temperature, num_valid=num_valid, cap=cap
            )
            keep_only(logits, sets, start)
            if (kernel := dispatch.kernel_for(eager.logprob_entropy, logits)) is not None:
                logprob, normaliser, entropy = kernel(logits, targets_M[rows])
                total = normaliser  # the gradient kernel accepts no other
            else:
                weights, total, normaliser = exp_logits(logits)
                logprob, _ = select_logprobs(logits, targets_M[rows], normaliser)
                if sets is not None:
                    logits.masked_fill_(weights == 0, 0.0)  # in the entropy 0 x -inf would be nan
                entropy = _entropy(logits, weights, total, normaliser, num_valid)
                if keeps:
                    kept.append(weights)
            columns.append((logprob, entropy, normaliser, total))
            logits = weights = None  # not held beside those of the next chunk
        logprobs, entropies, normalisers, totals = (torch.cat(part) for part in zip(*columns, strict=True))
        ctx.save_for_backward(hidden_MD, weight_VD, targets_M, normalisers, entropies, totals, *kept)
        ctx.options = (temperature, num_valid, sets, chunk, cap)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_MD, weight_VD, targets_M, normaliser_M, entropy_M, total_M, *kept = ctx.saved_tensors
        temperature, num_valid, sets, chunk, cap = ctx.options
        grad_logprob_M, grad_entropy_M = upstream
        use_entropy = hidden_MD.is_cuda or bool(
            (grad_entropy_M != 0).any()
        )  # do not synchronise with the GPU
        exact = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
        gradient = partial(_logit_gradient, temperature=temperature, use_entropy=use_entropy)
        weight = weight_VD.to(exact)
        grad_weight = None
        grad_hidden = torch.empty_like(hidden_MD) if ctx.needs_input_grad[0] else None
        for start in range(0, hidden_MD.shape[0], chunk):
            rows = slice(start, start + chunk)
            targets, entropy = targets_M[rows], entropy_M[rows]
            grads = grad_logprob_M[rows], grad_entropy_M[rows]
            if kept:
                dz = gradient(kept[0], total_M[rows], targets, entropy, *grads)
            else:
                logits = head_logits(
                    hidden_MD[rows], weight_VD, temperature=temperature, num_valid=num_valid, cap=cap
                )
                keep_only(logits, sets, start)
                slope = _slope(logits, temperature, cap) if cap else None
                if (kernel := dispatch.kernel_for(eager.logprob_entropy_backward_, logits)) is not None:
                    dz = kernel(logits, targets, normaliser_M[rows], entropy, *grads, temperature)
                else:
                    weights, total, _ = exp_logits(logits)
                    del logits
                    dz = gradient(weights, total, targets, entropy, *grads)
                dz = dz if slope is None else dz * slope
            dz = dz[:, : weight.shape[0]]
            if grad_hidden is not None:
                grad_hidden[rows] = (dz @ weight).to(grad_hidden.dtype)
            if ctx.needs_input_grad[1]:
                hidden = hidden_MD[rows].to(exact)
                grad_weight = dz.t() @ hidden if grad_weight is None else grad_weight.addmm_(dz.t(), hidden)
            logits = weights = dz = slope = None  # not held beside those of the next chunk
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight_VD.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


def _slope(logits_MV: torch.Tensor, temperature: float, cap: float) -> torch.Tensor:
    """Return the derivative of the soft cap at each logit; 0 outside the support."""
    tanh = logits_MV * (temperature / cap)
    return (1 - tanh * tanh).masked_fill(logits_MV == float("-inf"), 0.0)


def _entropy(
    logits_MV: torch.Tensor,
    weights_MV: torch.Tensor,
    total_M: torch.Tensor,
    normaliser_M: torch.Tensor,
    num_valid: int,
) -> torch.Tensor:
    """Return the entropy in nats of softmax(logits) [M]: log-normaliser minus the mean logit."""
    # Columns outside the support are sliced off, not masked: 0 x -inf is nan, and a mask costs three more passes.
    logits_MV, weights_MV = logits_MV[:, :num_valid], weights_MV[:, :num_valid]
    return normaliser_M - (weights_MV * logits_MV).sum(-1) / total_M


def _logit_gradient(
    weights_MV: torch.Tensor,
    total_M: torch.Tensor,
    targets_M: torch.Tensor,
    entropy_M: torch.Tensor,
    grad_logprob_M: torch.Tensor,
    grad_entropy_M: torch.Tensor,
    *,
    temperature: float,
    use_entropy: bool,
) -> torch.Tensor:
    """Return the gradient of the logits before the division by temperature, from the exponentials after it."""
    if use_entropy:
        probs = weights_MV / total_M[:, None]
        logprobs = probs.log().masked_fill_(probs == 0, 0.0)
        dz = probs * (-grad_logprob_M[:, None] - grad_entropy_M[:, None] * (logprobs + entropy_M[:, None]))
    else:
        dz = weights_MV * (-grad_logprob_M / total_M)[:, None]
    dz.scatter_add_(1, targets_M[:, None], grad_logprob_M[:, None].to(dz.dtype))
    return dz if temperature == 1.0 else dz.div_(temperature)


def token_logprobs(
    hidden_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    temperature: float = 1.0,
    num_valid: int | None = None,
    kept: KeptSets | None = None,
    chunk: int | None = None,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score chosen tokens, differentiably in hidden states and head, with at most `chunk` rows of logits in memory.

    Args:
        hidden_MD: Hidden states of the rows that predict the targets.
        weight_VD: Output projection.
        targets_M: int64 ids.
        temperature: Temperature at which the tokens were sampled, above 0.
        num_valid: Ids at and above this are outside the support; default: all V.
        kept: What filters left to draw each target from: both results are over that set; None: everything.
        chunk: Rows of logits held at once; default: by a memory budget.
        cap: Soft cap of the logits; 0 for none.

    Returns:
        Log-probabilities [M] and entropies [M] in nats, float32 (float64 for float64 heads).

    Raises:
        ValueError: If the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature}: expected a positive number")
    vocab = weight_VD.shape[0]
    if targets_M.numel() == 0:
        empty = hidden_MD.sum() * 0.0 + torch.zeros(0, device=hidden_MD.device)
        return empty, empty.detach()
    rows = chunk or chunk_rows(vocab, hidden_MD.device)
    valid = vocab if num_valid is None else num_valid
    is_small = targets_M.numel() * vocab * 4 <= cpu_head.KEEP_BYTES
    keeps = chunk is None and is_small and not cap and torch.is_grad_enabled() and not hidden_MD.is_cuda
    if not cap and dispatch.runs_cpp(hidden_MD, weight_VD):
        finish = None if kept is None else partial(keep_only, kept=kept)
        options = {"temperature": temperature, "num_valid": valid, "chunk": rows}
        return cpu_head.score(hidden_MD, weight_VD, targets_M, keep_only=finish, **options)
    result: tuple[torch.Tensor, torch.Tensor] = _TokenLogprobs.apply(  # pyright: ignore[reportAssignmentType]
        hidden_MD,
        weight_VD,
        targets_M,
        temperature,
        valid,
        kept,
        max(rows, len(targets_M)) if keeps else rows,
        keeps,
        cap,
    )
    return result


def _distributions(
    hidden_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    teacher_MD: torch.Tensor,
    teacher_weight_VD: torch.Tensor,
    *,
    temperature: float,
    num_valid: int,
    cap: float,
    teacher_cap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the probabilities p and log p - log q over the valid ids [M, V], and the slope of p's cap, if any."""
    options = {"temperature": temperature, "num_valid": num_valid}
    # Columns outside the support are sliced off: 0 x (-inf - -inf) is nan.
    logits = head_logits(hidden_MD, weight_VD, cap=cap, **options)[:, :num_valid]
    logp = logits.log_softmax(-1)
    taught = head_logits(teacher_MD, teacher_weight_VD, cap=teacher_cap, **options)
    logq = taught[:, :num_valid].log_softmax(-1)
    return logp.exp(), logp - logq, _slope(logits, temperature, cap) if cap else None


class _ReverseKL(torch.autograd.Function):
    """Chunked KL(p || q): the backward computes the logits again.

    Gradient of a row's policy logits, for upstream g: dz = g p (log p - log q - KL), times the slope of a soft cap.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: torch.Tensor,
        weight_VD: torch.Tensor,
        teacher_MD: torch.Tensor,
        teacher_weight_VD: torch.Tensor,
        temperature: float,
        num_valid: int,
        chunk: int,
        cap: float,
        teacher_cap: float,
    ) -> torch.Tensor:
        options = {
            "temperature": temperature,
            "num_valid": num_valid,
            "cap": cap,
            "teacher_cap": teacher_cap,
        }
        parts = []
        for start in range(0, hidden_MD.shape[0], chunk):
            rows = slice(start, start + chunk)
            probs, gaps, _ = _distributions(
                hidden_MD[rows], weight_VD, teacher_MD[rows], teacher_weight_VD, **options
            )
            parts.append((probs * gaps).sum(-1))
        divergence_M = torch.cat(parts)
        ctx.save_for_backward(hidden_MD, weight_VD, teacher_MD, teacher_weight_VD, divergence_M)
        ctx.options = (options, chunk)
        return divergence_M

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_MD, weight_VD, teacher_MD, teacher_weight_VD, divergence_M = ctx.saved_tensors
        options, chunk = ctx.options
        (grad_M,) = upstream
        exact = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
        weight = weight_VD[: options["num_valid"]].to(exact)
        grad_hidden, grad_weight = torch.empty_like(hidden_MD), torch.zeros_like(weight_VD, dtype=exact)
        for start in range(0, hidden_MD.shape[0], chunk):
            rows = slice(start, start + chunk)
            probs, gaps, slope = _distributions(
                hidden_MD[rows], weight_VD, teacher_MD[rows], teacher_weight_VD, **options
            )
            dz = grad_M[rows, None] * probs * (gaps - divergence_M[rows, None]) / options["temperature"]
            dz = dz if slope is None else dz * slope
            grad_hidden[rows] = (dz @ weight).to(grad_hidden.dtype)
            grad_weight[: weight.shape[0]].addmm_(dz.t(), hidden_MD[rows].to(exact))
        return grad_hidden, grad_weight.to(weight_VD.dtype), *(None,) * 7


def reverse_kl(
    hidden_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    teacher_MD: torch.Tensor,
    teacher_weight_VD: torch.Tensor,
    *,
    temperature: float,
    num_valid: int,
    chunk: int | None = None,
    cap: float = 0.0,
    teacher_cap: float = 0.0,
) -> torch.Tensor:
    """Compute KL(policy || teacher) over the whole vocabulary, differentiably in the policy's hidden states and head.

    Args:
        hidden_MD: The policy's hidden states of the rows that predict the trained tokens.
        weight_VD: Its output projection.
        teacher_MD: The teacher's hidden states of the same rows, of its own width (constants).
        teacher_weight_VD: Its output projection, of at least `num_valid` rows.
        temperature: Temperature of both distributions, above 0.
        num_valid: Ids at and above this are outside the support of both.
        chunk: Rows of logits held at once; default: by a memory budget.
        cap: Soft cap of the policy's logits; 0 for none.
        teacher_cap: The teacher's.

    Returns:
        Divergences [M] in nats, float32 (float64 for float64 heads).
    """
    if hidden_MD.shape[0] == 0:
        return hidden_MD.sum() * 0.0 + torch.zeros(0, device=hidden_MD.device)
    rows = chunk or chunk_rows(2 * weight_VD.shape[0], hidden_MD.device)
    result: torch.Tensor = _ReverseKL.apply(  # pyright: ignore[reportAssignmentType]
        hidden_MD, weight_VD, teacher_MD, teacher_weight_VD, temperature, num_valid, rows, cap, teacher_cap
    )
    return result
