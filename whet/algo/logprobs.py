"""Log-probability and entropy of chosen tokens, from hidden states, without ever building [N, V].

Sampler and trainer call the same functions here, so what was sampled is what is scored.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from whet.kernels import cpu_head, eager
from whet.kernels.dispatch import asked_for

ROW_QUANTUM = 16
COLUMN_QUANTUM = 16
CHUNK_BYTES_CPU = 64 * 2**20
CHUNK_BYTES_GPU = 2**30


def head_logits(
    hidden_MD: torch.Tensor, weight_VD: torch.Tensor, *, temperature: float, num_valid: int
) -> torch.Tensor:
    """Compute float32 logits of the sampled distribution: head(hidden) / temperature over the valid ids.

    Rows and columns are padded (columns with -inf), so that neither the matrix product nor a later reduction
    depends on how many rows are computed together.

    Args:
        hidden_MD: Hidden states.
        weight_VD: Output projection.
        temperature: Sampling temperature, above 0.
        num_valid: Ids at and above this get -inf.

    Returns:
        Logits [M, V'], V' = V rounded up to `COLUMN_QUANTUM`, float32.
    """
    rows, vocab = hidden_MD.shape[0], weight_VD.shape[0]
    if cpu_head.can_score(hidden_MD, weight_VD):
        logits = cpu_head.logits(hidden_MD, weight_VD)
        logits[:, num_valid:] = float("-inf")
        return logits / temperature if temperature != 1.0 else logits
    surplus_rows = -rows % ROW_QUANTUM
    if surplus_rows:
        hidden_MD = F.pad(hidden_MD, (0, 0, 0, surplus_rows))
    if hidden_MD.is_cuda and weight_VD.dtype == torch.bfloat16:
        logits = torch.mm(hidden_MD.to(torch.bfloat16), weight_VD.t(), out_dtype=torch.float32)
    elif weight_VD.dtype == torch.float64:
        logits = F.linear(hidden_MD.double(), weight_VD)
    else:
        with torch.autocast(hidden_MD.device.type, enabled=False):
            logits = F.linear(hidden_MD.float(), weight_VD.float())
    surplus_columns = -vocab % COLUMN_QUANTUM
    if surplus_columns:
        logits = F.pad(logits, (0, surplus_columns), value=float("-inf"))
    if num_valid < vocab:
        logits[:, num_valid:vocab] = float("-inf")
    if temperature != 1.0:
        logits = logits / temperature
    return logits[:rows] if surplus_rows else logits


def select_logprobs(logits_MV: torch.Tensor, targets_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log softmax(logits)[target] and the log-normaliser, both [M].

    Args:
        logits_MV: Float32 (or float64) logits; -inf columns are outside the support.
        targets_M: int64 ids.
    """
    if cpu_head.can_select(logits_MV):
        return cpu_head.select(logits_MV, targets_M)
    if (kernel := asked_for(eager.logprob_entropy, logits_MV)) is not None:
        return kernel(logits_MV, targets_M)[:2]
    normaliser_M = torch.logsumexp(logits_MV, dim=-1)
    return logits_MV.gather(1, targets_M[:, None]).squeeze(1) - normaliser_M, normaliser_M


def entropy_of(logits_MV: torch.Tensor, normaliser_M: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats of softmax(logits) [M]: log-normaliser minus the mean logit."""
    probs = torch.exp(logits_MV - normaliser_M[:, None])
    return normaliser_M - (probs * logits_MV.masked_fill(logits_MV == float("-inf"), 0.0)).sum(-1)


def chunk_rows(vocab: int, device: torch.device) -> int:
    """Choose how many rows of logits are held at once: a memory budget, within [1024, 16384]."""
    budget = CHUNK_BYTES_GPU if device.type == "cuda" else CHUNK_BYTES_CPU
    return max(1024, min(16384, budget // (4 * vocab)))


class _TokenLogprobs(torch.autograd.Function):
    """Chunked head: the forward keeps hidden states and two numbers a row, the backward recomputes logits.

    Gradient of a row's logits, for upstream g (of the log-probability) and e (of the entropy):
    dz = g (onehot - p) - e p (log p + H). The tests verify it by finite differences.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_M: torch.Tensor,
        temperature: float,
        num_valid: int,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies, normalisers = [], [], []
        for start in range(0, hidden_MD.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = head_logits(hidden_MD[rows], weight_VD, temperature=temperature, num_valid=num_valid)
            if (kernel := asked_for(eager.logprob_entropy, logits)) is not None:
                logprob, normaliser, entropy = kernel(logits, targets_M[rows])
            else:
                logprob, normaliser = select_logprobs(logits, targets_M[rows])
                entropy = entropy_of(logits, normaliser)
            logprobs.append(logprob)
            normalisers.append(normaliser)
            entropies.append(entropy)
        ctx.save_for_backward(hidden_MD, weight_VD, targets_M, torch.cat(normalisers), torch.cat(entropies))
        ctx.options = (temperature, num_valid, chunk)
        return torch.cat(logprobs), torch.cat(entropies)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_MD, weight_VD, targets_M, normaliser_M, entropy_M = ctx.saved_tensors
        temperature, num_valid, chunk = ctx.options
        grad_logprob_M, grad_entropy_M = upstream
        use_entropy = hidden_MD.is_cuda or bool((grad_entropy_M != 0).any())  # a GPU is not waited for
        exact = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
        weight = weight_VD.to(exact)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_hidden = torch.empty_like(hidden_MD) if ctx.needs_input_grad[0] else None
        for start in range(0, hidden_MD.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = head_logits(hidden_MD[rows], weight_VD, temperature=temperature, num_valid=num_valid)
            columns = (
                targets_M[rows],
                normaliser_M[rows],
                entropy_M[rows],
                grad_logprob_M[rows],
                grad_entropy_M[rows],
            )
            if (kernel := asked_for(eager.logprob_entropy_backward_, logits)) is not None:
                dz = kernel(logits, *columns, temperature)
            else:
                dz = _logit_gradient(logits, *columns, use_entropy=use_entropy)
                dz = dz / temperature if temperature != 1.0 else dz
            dz = dz[:, : weight.shape[0]]
            if grad_hidden is not None:
                grad_hidden[rows] = (dz @ weight).to(grad_hidden.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(dz.t(), hidden_MD[rows].to(exact))
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_VD.dtype),
            None,
            None,
            None,
            None,
        )


def _logit_gradient(
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    normaliser_M: torch.Tensor,
    entropy_M: torch.Tensor,
    grad_logprob_M: torch.Tensor,
    grad_entropy_M: torch.Tensor,
    *,
    use_entropy: bool,
) -> torch.Tensor:
    """Return the gradient of logits that are divided by the temperature already."""
    logprobs = logits_MV - normaliser_M[:, None]
    dz = logprobs.exp()
    if use_entropy:
        finite = logprobs.masked_fill(logprobs == float("-inf"), 0.0)
        dz = dz * (-grad_logprob_M[:, None] - grad_entropy_M[:, None] * (finite + entropy_M[:, None]))
    else:
        dz *= -grad_logprob_M[:, None]
    return dz.scatter_add_(1, targets_M[:, None], grad_logprob_M[:, None].to(dz.dtype))


def token_logprobs(
    hidden_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_M: torch.Tensor,
    *,
    temperature: float = 1.0,
    num_valid: int | None = None,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score chosen tokens, differentiably in hidden states and head, holding at most `chunk` rows of logits.

    Args:
        hidden_MD: Hidden states of the rows that predict the targets.
        weight_VD: Output projection.
        targets_M: int64 ids.
        temperature: Temperature that the tokens were sampled at, above 0.
        num_valid: Ids at and above this are outside the support; default all V.
        chunk: Rows of logits held at once; default by a memory budget.

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
    if cpu_head.can_score(hidden_MD, weight_VD):
        options = {"temperature": temperature, "num_valid": valid, "chunk": rows}
        return cpu_head.score(hidden_MD, weight_VD, targets_M, **options)
    result: tuple[torch.Tensor, torch.Tensor] = _TokenLogprobs.apply(  # pyright: ignore[reportAssignmentType]
        hidden_MD, weight_VD, targets_M, temperature, valid, rows
    )
    return result
