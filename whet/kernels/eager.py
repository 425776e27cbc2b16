"""The eager twins: the reference of every kernel, in plain PyTorch, on any device.

A kernel has its twin's name, arguments and result; `whet.kernels.dispatch` chooses between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

LANES = 64
"""Numbers of the widest loop over vectors."""
GRAIN = 32768
"""Numbers below which PyTorch gives an element-wise operation to one thread (at::internal::GRAIN_SIZE)."""
SPLIT = 256
NF4_BLOCK = 64
SCALE_BLOCK = 256
SLICE = 2**18
"""Numbers per slice: a few such arrays fit into a core's share of the cache."""
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
    """Attend from one query per row to the row's own past, in splits of `SPLIT` keys merged from first to last.

    A row's result depends neither on the other rows nor on the contents at or after its length, even inf and nan.

    Args:
        q_BHC: Queries; the heads of one key/value head are adjacent.
        keys_BKSC: Keys; may have more rows than queries.
        values_BKSC: Values.
        lengths_B: Integers on the device: positions that a row attends to; 0 gives zeros.

    Returns:
        Outputs [B, H, C] in the dtype of the queries; the arithmetic is float32 (float64 for float64).
    """
    rows, heads, channels = q_BHC.shape
    kv_heads, num_keys = keys_BKSC.shape[1:3]
    q = wide(q_BHC.reshape(rows, kv_heads, heads // kv_heads, channels))
    top = q.new_full((*q.shape[:3], 1), float("-inf"))
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, num_keys, SPLIT):
        k, v = keys_BKSC[:rows, :, start : start + SPLIT], values_BKSC[:rows, :, start : start + SPLIT]
        hidden = torch.arange(start, start + k.shape[2], device=q.device) >= lengths_B[:, None]
        scores = (q @ wide(k).transpose(-1, -2)) * channels**-0.5
        scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        base = new.masked_fill(new == float("-inf"), 0.0)
        probs, keep = torch.exp(scores - base), torch.exp(top - base)
        total = total * keep + probs.sum(-1, keepdim=True)
        out = out * keep + probs @ wide(v).masked_fill(hidden[:, None, :, None], 0.0)
        top = new
    out = out / total.masked_fill(total == 0, 1.0)
    return out.reshape(rows, heads, channels).to(q_BHC.dtype)


def row_wise(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *, needs_all_from: int = 0
) -> torch.Tensor:
    """Apply an element-wise function so that a number's bits do not depend on where it stands.

    PyTorch's vector code of silu, gelu or exp differs from the scalar code that computes what is left of a thread's
    share after the last whole vector, so the same row would have other bits in a larger batch. Shares of whole vectors
    leave nothing to the scalar code.

    Args:
        function: An element-wise function that takes zeros; it may overwrite its argument.
        x: Its input, of any shape.
        needs_all_from: Numbers above which it takes all threads; 0: one thread more for every `GRAIN` numbers.
    """
    x = x.contiguous()
    flat, count = x.view(-1), x.numel()
    surplus = -count % LANES
    if surplus:
        flat = F.pad(flat, (0, surplus))
    first = _evenly_shared(flat, needs_all_from)
    y = function(flat) if first == len(flat) else torch.cat((function(flat[:first]), function(flat[first:])))
    return y[:count].view(x.shape)


def _evenly_shared(x: torch.Tensor, needs_all_from: int) -> int:
    """Return how many numbers, from the first, PyTorch deals to its threads in shares of whole vectors.

    It deals ceil(numel / threads) numbers to each thread. So little is left over that it goes to one thread.
    """
    count, most = x.numel(), torch.get_num_threads()
    if x.is_cuda or torch.compiler.is_compiling():
        return count
    if needs_all_from:
        threads = most if count > needs_all_from else 1
        return count // (threads * LANES) * threads * LANES
    if count % (min(most, -(-count // GRAIN)) * LANES) == 0:
        return count
    full = count // GRAIN
    return full * GRAIN or count if full < most else count // (most * LANES) * most * LANES


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return GELU in its tanh form, with `row_wise`'s bits."""
    return row_wise(partial(F.gelu, approximate="tanh"), x, needs_all_from=16384)


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
    """Overwrite logits with the loss's gradient: (g (onehot - p) - e p (log p + H)) / temperature.

    Args:
        logits_MV: Logits as `logprob_entropy` read them; overwritten.
        targets_M: int64 ids.
        normaliser_M: From the forward pass.
        entropy_M: From the forward pass.
        grad_logprob_M: Upstream gradient g.
        grad_entropy_M: Upstream gradient e.
        temperature: Temperature that already divided the logits; the gradient is that of the undivided ones.

    Returns:
        The argument.

    The tests verify it against autograd.
    """
    logprobs = logits_MV.sub_(normaliser_M[:, None])
    finite = logprobs.masked_fill(logprobs == float("-inf"), 0.0)
    scale = -grad_logprob_M[:, None] - grad_entropy_M[:, None] * (finite + entropy_M[:, None])
    grad_MV = logprobs.exp_().mul_(scale)
    grad_MV.scatter_add_(1, targets_M[:, None], grad_logprob_M[:, None].to(grad_MV.dtype))
    return grad_MV.div_(temperature)


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return numbers as sums need them: in float32, or in float64 where they are."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual, normalise by the root mean square in float32 (float64) and scale; differentiable.

    Args:
        x: Input; the last axis is normalised.
        weight: Scale of that axis.
        eps: Added to the mean square.
        residual: Added to the input first; None adds nothing.

    Returns:
        The normalised sum and the sum itself (the next residual).
    """
    total = x if residual is None else x + residual
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Norm.apply(total, weight, eps), total  # pyright: ignore[reportReturnType]
    return _scaled(weight, _normalised(total, eps)[0], total.dtype), total


def _normalised(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x over its root mean square, and one over that [..., 1], both float32."""
    x32 = wide(x)
    # Not torch.linalg.vecdot, which autocast would run in bfloat16; not mean, which is slower than sum.
    rstd = (x32.square().sum(-1, keepdim=True) * (1 / x.shape[-1]) + eps).rsqrt()
    return x32 * rstd, rstd


def _scaled(weight: torch.Tensor, normalised: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rounded = normalised.to(dtype)
    return (
        weight * rounded
        if rounded.dtype != weight.dtype or rounded is not normalised
        else rounded.mul_(weight)
    )


class _Norm(torch.autograd.Function):
    """The norm with its gradient in six passes over memory; autograd takes a dozen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normalised, rstd = _normalised(x, eps)
        ctx.save_for_backward(x, weight, rstd)
        return _scaled(weight, normalised, x.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        grad, width = wide(upstream[0]), x.shape[-1]
        normalised = wide(x) * rstd
        grad_weight = (grad * normalised).view(-1, width).sum(0) if ctx.needs_input_grad[1] else None
        grad = grad * wide(weight)
        mean = (grad * normalised).sum(-1, keepdim=True) * (1 / width)
        grad_x = grad.addcmul_(normalised, mean, value=-1).mul_(rstd).to(x.dtype)
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype), None


def rotate(x_NHC: torch.Tensor, cos_N1C: torch.Tensor, sin_N1C: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions in float32 and return the input's dtype; differentiable.

    Args:
        x_NHC: Queries or keys.
        cos_N1C: Float32 table at each row's position; its halves are equal.
        sin_N1C: The same for the sine.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Rotate.apply(x_NHC, cos_N1C, sin_N1C)  # pyright: ignore[reportReturnType]
    return _rotated(x_NHC, cos_N1C, sin_N1C, 1.0)


def _rotated(x_NHC: torch.Tensor, cos_N1C: torch.Tensor, sin_N1C: torch.Tensor, sign: float) -> torch.Tensor:
    x32 = wide(x_NHC)
    left, right = x32.chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return (x32 * cos_N1C).addcmul_(turned, sin_N1C, value=sign).to(x_NHC.dtype)


class _Rotate(torch.autograd.Function):
    """Rotation; its gradient is rotated back by the same angle."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(upstream[0], cos, sin, -1.0), None, None


def swiglu(gate_NF: torch.Tensor, up_NF: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up; differentiable."""
    if torch.is_grad_enabled() and gate_NF.dim() == 2 and not torch.compiler.is_compiling():
        return _SwiGLU.apply(gate_NF, up_NF)  # pyright: ignore[reportReturnType]
    return row_wise(F.silu, gate_NF) * up_NF


class _SwiGLU(torch.autograd.Function):
    """The gated unit with its gradient, in slices of rows that stay in the CPU's cache between passes.

    Its arrays are the largest of a training step besides the logits. The backward pass recomputes silu: reading it from
    memory would take as long.
    """

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        for part in _slices(gate):
            torch.mul(row_wise(F.silu, gate[part]), up[part], out=out[part])
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = ctx.saved_tensors
        grad = upstream[0]
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        for part in _slices(gate):
            torch.mul(F.silu(gate[part]), grad[part], out=grad_up[part])
            grad_gate[part] = torch.ops.aten.silu_backward(grad[part] * up[part], gate[part])
        return grad_gate, grad_up


def _slices(x_NF: torch.Tensor) -> list[slice]:
    rows, step = x_NF.shape[0], max(1, SLICE // x_NF.shape[1])
    # On a GPU every slice is another launch, and there is no cache to stay in.
    return [slice(None)] if x_NF.is_cuda else [slice(start, start + step) for start in range(0, rows, step)]


@cache
def has_bfloat16_products() -> bool:
    """Say whether PyTorch multiplies bfloat16 matrices on this CPU with more than plain loops.

    These were 15 times slower than float32 for a training step on AVX2 (11M parameters: 48 s against 3).
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of products with a tensor: float32 on a CPU for float16, and for bfloat16 without such
    products."""
    is_slow = x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and not has_bfloat16_products())
    return torch.float32 if is_slow and x.device.type == "cpu" else x.dtype


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, transposed: bool = False
) -> torch.Tensor:
    """Return x @ weight.T + bias; differentiable.

    Args:
        x: Input [..., D].
        weight: Weight [F, D] of the input's dtype; [D, F] if `transposed`.
        bias: Added to the product before it is rounded.
        transposed: Whether the weight is stored as GPT-2 stores it.
    """
    weight = weight.t() if transposed else weight
    rounded = x.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x
    wide = product_dtype(rounded)
    if wide == rounded.dtype:
        return F.linear(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        return _Widened.apply(rounded, weight, bias)  # pyright: ignore[reportReturnType]


RANKS = 16
"""Ranks are padded with zeros to a multiple of it: PyTorch's products of fewer columns depend on the number of rows."""


def low_rank(
    x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return y + scaling x A^T B^T, computed in the dtype of A and B and rounded to that of y; differentiable.

    Autocast is ignored: rounding the products of an adapter that has just begun would lose most of what it learned.

    Args:
        x: Input [..., D].
        y: What is added to [..., F].
        a: Matrix [R, D], float32 (float64 for a float64 model).
        b: Matrix [F, R].
        scaling: Factor of the product.
    """
    surplus = -a.shape[0] % RANKS
    if surplus:
        a, b = F.pad(a, (0, 0, 0, surplus)), F.pad(b, (0, surplus))
    with torch.autocast(x.device.type, enabled=False):
        inner = F.linear(x.to(a.dtype), a) * scaling
        return (y.to(a.dtype) + F.linear(inner, b)).to(y.dtype)


class Adapted(NamedTuple):
    """A weight with an adapter beside it.

    Attributes:
        weight: Weight [F, D].
        bias: Added to its product; None for none.
        a: Matrix [R, D] of the adapter.
        b: Matrix [F, R].
        scaling: Factor of the adapter's product.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor
    scaling: float


def products(x: torch.Tensor, parts: Sequence[Adapted]) -> list[torch.Tensor]:
    """Return the product of x with each weight and its adapter.

    Args:
        x: Input [..., D].
        parts: Weights, frozen, and adapters that read the same input.
    """
    return [low_rank(x, linear(x, w, bias), a, b, scaling) for w, bias, a, b, scaling in parts]


class _Widened(torch.autograd.Function):
    """A 16-bit product computed in float32; it saves 16-bit inputs and the weight itself for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        rounded = None if bias is None else bias.to(x.dtype).float()
        return F.linear(x.float(), weight.to(x.dtype).float(), rounded).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad, width = upstream[0].float(), x.shape[-1]
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = (grad @ weight.to(x.dtype).float()).to(x.dtype)
        rows = grad.reshape(-1, grad.shape[-1])
        if needs_weight:
            grad_weight = (rows.t() @ x.reshape(-1, width).float()).to(weight.dtype)
        if ctx.bias_dtype is not None and needs_bias:
            grad_bias = rows.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias


@dataclass(frozen=True, slots=True)
class NF4:
    """A tensor in 4-bit NormalFloat, as bitsandbytes stores it.

    Attributes:
        codes: uint8, two codes per byte, the first in the high half; padded to a whole block.
        absmax: Largest magnitude of each block of `NF4_BLOCK`: float32, or codes of `dynamic_table` when doubly
            quantised.
        scale: Float32 largest magnitude of each `SCALE_BLOCK` entries of a doubly quantised `absmax`; else None.
        offset: Float32 mean subtracted from `absmax` before; else None.
        shape: Shape of the tensor.
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    scale: torch.Tensor | None
    offset: torch.Tensor | None
    shape: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        parts = (self.codes, self.absmax, self.scale, self.offset)
        return sum(part.nbytes for part in parts if part is not None)


@cache
def nf4_table(device: torch.device) -> torch.Tensor:
    """Return the 16 code values on a device; cached, because a copy from the host cannot be captured in a CUDA
    graph."""
    with torch.inference_mode(False):
        return torch.tensor(NF4_CODES, device=device)


@cache
def dynamic_table(device: torch.device) -> torch.Tensor:
    """Return the 256 values of the 8-bit floats that blocks' absmax are quantised to, in ascending order.

    Bits that the exponent leaves free go to the fraction: powers 10^-6 to 10^0 have 1 to 64 fractions of each sign.

    Source: 8-bit optimizers via block-wise quantization, 2110.02861, section 2.2, as bitsandbytes rounds it.
    """
    with torch.inference_mode(False):
        values = [0.0, 1.0]
        for exponent in range(7):
            edges = torch.linspace(0.1, 1, 2**exponent + 1)
            fractions = 10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
            values += [*fractions.tolist(), *(-fractions).tolist()]
        return torch.tensor(sorted(values), device=device)


def nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the index, uint8, of the entry of an ascending table that is nearest to each value."""
    return torch.bucketize(values, (table[1:] + table[:-1]) / 2).to(torch.uint8)


def nf4_quantize(tensor: torch.Tensor, *, double: bool = True) -> NF4:
    """Round a tensor to the nearest codes of its blocks of 64, as bitsandbytes does.

    Args:
        tensor: Weights of any shape and float dtype.
        double: Quantise the blocks' absmax to 8 bits, too (4.127 bits per weight instead of 4.5).

    Source: QLoRA 2305.14314, section 3 and appendix E.
    """
    blocks = nf4_blocks(tensor)
    absmax = blocks.abs().amax(-1)
    codes = nf4_codes(blocks, absmax)
    return nf4_pack(codes, absmax, tuple(tensor.shape), double=double)


def nf4_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as rows of `NF4_BLOCK` float32 numbers, padded with zeros to a whole block."""
    flat = tensor.detach().reshape(-1).float()
    return F.pad(flat, (0, -flat.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)


def nf4_codes(blocks: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """Return the nearest codes, uint8, of numbers that end in an axis of one absmax each."""
    # Times the reciprocal, as bitsandbytes has it: at a tie a quotient may fall on the other side.
    return nearest(blocks * (1.0 / absmax.masked_fill(absmax == 0, 1.0))[..., None], nf4_table(blocks.device))


def nf4_pack(codes: torch.Tensor, absmax: torch.Tensor, shape: tuple[int, ...], *, double: bool) -> NF4:
    """Put codes [blocks, 64] and their absmax [blocks] together."""
    pairs = codes.view(-1, 2)
    packed = pairs[:, 0] << 4 | pairs[:, 1]
    if not double:
        return NF4(packed, absmax, None, None, shape)
    offset = absmax.mean()
    rows = F.pad(absmax - offset, (0, -absmax.numel() % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
    scale = rows.abs().amax(-1)
    steps = rows * (1.0 / scale.masked_fill(scale == 0, 1.0))[:, None]
    kept = nearest(steps, dynamic_table(absmax.device)).view(-1)[: absmax.numel()].clone()
    return NF4(packed, kept, scale, offset, shape)


def nf4_absmax(absmax: torch.Tensor, scale: torch.Tensor | None, offset: torch.Tensor | None) -> torch.Tensor:
    """Return the float32 absmax of each block, undoing its own quantisation."""
    if scale is None or offset is None:
        return absmax
    values = F.embedding(absmax.int(), dynamic_table(absmax.device)[:, None])[:, 0]
    return values * scale.repeat_interleave(SCALE_BLOCK)[: absmax.numel()] + offset


def nf4_dequantize(packed: NF4, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that the codes stand for: code x absmax in float32, rounded once to `dtype`."""
    device, count = packed.codes.device, torch.Size(packed.shape).numel()
    table = nf4_table(device)
    pairs = torch.cartesian_prod(table, table)  # one lookup per byte is twice as fast as one per code (CPU)
    absmax = nf4_absmax(packed.absmax, packed.scale, packed.offset)[:, None]
    codes = packed.codes.view(-1, NF4_BLOCK // 2)
    out = torch.empty(codes.shape[0], NF4_BLOCK, dtype=dtype, device=device)
    # In slices: the indices and the float32 values of a whole matrix would take ten times its codes' memory.
    step = codes.shape[0] if device.type == "cuda" else SLICE // NF4_BLOCK
    for start in range(0, codes.shape[0], max(1, step)):
        part = slice(start, start + step)
        values = F.embedding(codes[part].int(), pairs).view(-1, NF4_BLOCK)
        out[part] = values.mul_(absmax[part])
    return out.view(-1)[:count].view(packed.shape)
