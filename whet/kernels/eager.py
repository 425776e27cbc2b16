"""The eager twins: what every kernel computes, in plain PyTorch, on any device.

A kernel has its twin's name, arguments and result; `whet.kernels.dispatch` chooses between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

SPLIT = 256
NF4_BLOCK = 64
SCALE_BLOCK = 256
# fmt: off
NF4_CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


def decode_attention(
    q_BHC: torch.Tensor, keys_BKSC: torch.Tensor, values_BKSC: torch.Tensor, lengths_B: torch.Tensor
) -> torch.Tensor:
    """Attend from one query a row to the row's own past, in splits of `SPLIT` keys merged from first to last.

    A row's result depends neither on the other rows nor on what stands at or after its length, even inf and nan.

    Args:
        q_BHC: Queries; the heads of one key/value head stand together.
        keys_BKSC: Keys; may have more rows than there are queries.
        values_BKSC: Values.
        lengths_B: Integers on the device: positions that a row may see; 0 gives zeros.

    Returns:
        Outputs [B, H, C] in the dtype of the queries; the arithmetic is float32.
    """
    rows, heads, channels = q_BHC.shape
    kv_heads, num_keys = keys_BKSC.shape[1:3]
    q = q_BHC.reshape(rows, kv_heads, heads // kv_heads, channels).float()
    top = q.new_full((*q.shape[:3], 1), float("-inf"))
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, num_keys, SPLIT):
        k, v = keys_BKSC[:rows, :, start : start + SPLIT], values_BKSC[:rows, :, start : start + SPLIT]
        hidden = torch.arange(start, start + k.shape[2], device=q.device) >= lengths_B[:, None]
        scores = (q @ k.float().transpose(-1, -2)) * channels**-0.5
        scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = new.masked_fill(new == float("-inf"), 0.0)
        probs, keep = torch.exp(scores - base), torch.exp(top - base)
        total = total * keep + probs.sum(-1, keepdim=True)
        out = out * keep + probs @ v.float().masked_fill(hidden[:, None, :, None], 0.0)
        top = new
    out = out / total.masked_fill(total == 0, 1.0)
    return out.reshape(rows, heads, channels).to(q_BHC.dtype)


def logprob_entropy(
    logits_MV: torch.Tensor, targets_M: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log softmax(logits)[target], the log-normaliser and the entropy in nats, each [M].

    Args:
        logits_MV: Float32 (or float64) logits; -inf columns are outside the support.
        targets_M: int64 ids.
    """
    normaliser_M = torch.logsumexp(logits_MV, dim=-1)
    chosen_M = logits_MV.gather(1, targets_M[:, None]).squeeze(1)
    logprobs = logits_MV - normaliser_M[:, None]
    entropy_M = -(logprobs.exp() * logprobs.masked_fill(logprobs == float("-inf"), 0.0)).sum(-1)
    return chosen_M - normaliser_M, normaliser_M, entropy_M


def logprob_entropy_backward_(
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    normaliser_M: torch.Tensor,
    entropy_M: torch.Tensor,
    grad_logprob_M: torch.Tensor,
    grad_entropy_M: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Overwrite logits by the loss's gradient: (g (onehot - p) - e p (log p + H)) / temperature.

    Args:
        logits_MV: Logits as `logprob_entropy` read them; overwritten.
        targets_M: int64 ids.
        normaliser_M: From the forward pass.
        entropy_M: From the forward pass.
        grad_logprob_M: Upstream gradient g.
        grad_entropy_M: Upstream gradient e.
        temperature: What divided the logits before, so that the gradient is that of the undivided ones.

    Returns:
        The argument.

    Source: engine.md, part 5; the tests verify it against autograd.
    """
    logprobs = logits_MV.sub_(normaliser_M[:, None])
    finite = logprobs.masked_fill(logprobs == float("-inf"), 0.0)
    scale = -grad_logprob_M[:, None] - grad_entropy_M[:, None] * (finite + entropy_M[:, None])
    grad_MV = logprobs.exp_().mul_(scale)
    grad_MV.scatter_add_(1, targets_M[:, None], grad_logprob_M[:, None].to(grad_MV.dtype))
    return grad_MV.div_(temperature)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual, normalise by the root mean square in float32 and scale; differentiable.

    Args:
        x: Input; the last axis is normalised.
        weight: Scale of that axis.
        eps: Added to the mean square.
        residual: Added to the input first; None adds nothing.

    Returns:
        The normalised sum and the sum itself (the next residual).
    """
    total = x if residual is None else x + residual
    return weight * _normalised(total, eps), total


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rope_into_cache(
    q_NHC: torch.Tensor,
    k_NKC: torch.Tensor,
    v_NKC: torch.Tensor,
    cos_N1C: torch.Tensor,
    sin_N1C: torch.Tensor,
    keys_BKSC: torch.Tensor,
    values_BKSC: torch.Tensor,
    positions_B: torch.Tensor,
    *,
    q_weight_C: torch.Tensor | None = None,
    k_weight_C: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Normalise (Qwen3) and rotate queries and keys, and write keys and values into the cache: one decode step.

    Args:
        q_NHC: Queries as projected; may be a slice of a wider projection.
        k_NKC: Keys as projected.
        v_NKC: Values.
        cos_N1C: Float32 rotary table at each row's position.
        sin_N1C: The same of the sine.
        keys_BKSC: Cache, written at [row, :, position] for the first B rows; the other N - B are row padding.
        values_BKSC: Cache, likewise.
        positions_B: int64 position of each row's token.
        q_weight_C: Scale of the queries' RMS norm; None: no norm of either.
        k_weight_C: Scale of the keys' norm.
        eps: Of these norms.

    Returns:
        Rotated queries [N, H, C].
    """
    if q_weight_C is not None and k_weight_C is not None:
        q_NHC, k_NKC = q_weight_C * _normalised(q_NHC, eps), k_weight_C * _normalised(k_NKC, eps)
    count = positions_B.shape[0]
    rows = torch.arange(count, device=positions_B.device)
    k_NKC = _rotated(k_NKC, cos_N1C, sin_N1C)
    keys_BKSC[rows, :, positions_B] = k_NKC[:count].to(keys_BKSC.dtype)
    values_BKSC[rows, :, positions_B] = v_NKC[:count].to(values_BKSC.dtype)
    return _rotated(q_NHC, cos_N1C, sin_N1C)


def _rotated(x_NHC: torch.Tensor, cos_N1C: torch.Tensor, sin_N1C: torch.Tensor) -> torch.Tensor:
    x32 = x_NHC.float()
    left, right = x32.chunk(2, dim=-1)
    return (x32 * cos_N1C + torch.cat((-right, left), dim=-1) * sin_N1C).to(x_NHC.dtype)


def swiglu(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up; differentiable."""
    return F.silu(gate_NF) * up_NF


def linear(x: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias; differentiable. The kernel's rows do not depend on how many there are.

    Args:
        x: Input [..., D].
        weight_VD: Weight of the input's dtype.
        bias_V: Added to the product before it is rounded.
    """
    return F.linear(x, weight_VD, bias_V)


@dataclass(frozen=True, slots=True)
class NF4:
    """A tensor in 4-bit NormalFloat.

    Attributes:
        codes: uint8, two codes a byte, the first in the high half; the end is filled up to a whole block.
        absmax: Largest magnitude of each block of `NF4_BLOCK`: float32, or int8 when doubly quantised.
        scale: Float32 step of each `SCALE_BLOCK` entries of an int8 `absmax`; else None.
        offset: Float32 mean that was taken off `absmax` before; else None.
        shape: Shape of the tensor.
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    scale: torch.Tensor | None
    offset: torch.Tensor | None
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        parts = (self.codes, self.absmax, self.scale, self.offset)
        return sum(part.nbytes for part in parts if part is not None)


@cache
def nf4_table(device: torch.device) -> torch.Tensor:
    """Return the 16 code values on a device; made once, since a copy from the host cannot be captured in a graph."""
    with torch.inference_mode(False):
        return torch.tensor(NF4_CODES, device=device)


def nf4_quantize(tensor: torch.Tensor, *, double: bool = True) -> NF4:
    """Round a tensor to the nearest codes of its blocks of 64.

    Args:
        tensor: Weights of any shape and float dtype.
        double: Quantise the blocks' absmax to int8 too (4.127 bits a weight instead of 4.5).

    Source: QLoRA 2305.14314, section 3 and appendix E. Deviation: the second quantisation is to int8 with one
    offset, where the paper takes 8-bit floats.
    """
    surplus = -tensor.numel() % NF4_BLOCK
    blocks = F.pad(tensor.detach().reshape(-1).float(), (0, surplus)).view(-1, NF4_BLOCK)
    absmax, scale, offset = blocks.abs().amax(-1), None, None
    table = nf4_table(tensor.device)
    if double:
        offset = absmax.mean()
        rows = F.pad(absmax - offset, (0, -absmax.numel() % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
        scale = rows.abs().amax(-1) / 127
        steps = rows / scale.masked_fill(scale == 0, 1.0)[:, None]
        absmax = steps.round().to(torch.int8).view(-1)[: absmax.numel()].clone()
    kept = nf4_absmax(absmax, scale, offset)
    middles = (table[1:] + table[:-1]) / 2
    index = (
        torch.bucketize(blocks / kept.masked_fill(kept == 0, 1.0)[:, None], middles)
        .to(torch.uint8)
        .view(-1, 2)
    )
    return NF4(index[:, 0] << 4 | index[:, 1], absmax, scale, offset, tuple(tensor.shape))


def nf4_absmax(absmax: torch.Tensor, scale: torch.Tensor | None, offset: torch.Tensor | None) -> torch.Tensor:
    """Return the float32 absmax of each block, undoing its own quantisation."""
    if scale is None or offset is None:
        return absmax
    return absmax.float() * scale.repeat_interleave(SCALE_BLOCK)[: absmax.numel()] + offset


def nf4_dequantize(packed: NF4, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that the codes stand for: code x absmax in float32, rounded once to `dtype`."""
    table = nf4_table(packed.codes.device)
    pairs = torch.cartesian_prod(table, table)  # one look-up a byte is twice as fast as one a code (CPU)
    values = F.embedding(packed.codes.int(), pairs).view(-1, NF4_BLOCK)
    values = values * nf4_absmax(packed.absmax, packed.scale, packed.offset)[:, None]
    count = torch.Size(packed.shape).numel()
    return values.view(-1)[:count].to(dtype).view(packed.shape)
