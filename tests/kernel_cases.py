"""What a kernel must do, checked against its eager twin and against float64, on the device that is given.

The tests in tests/kernels run these in Triton's interpreter on a CPU, those in tests/gpu run them for real.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from whet.generate.cache import CacheSize
from whet.kernels import eager

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
INF = float("inf")


def draw(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return values.to(dtype).to(device)


def room(rows: int, positions: int) -> CacheSize:
    """Make room for rows of so many positions, each with a prompt of its own."""
    return CacheSize(rows=rows, prompt=positions, completion=0, context=positions, prompts=rows)


def close(ours: torch.Tensor, theirs: torch.Tensor, ulps: float, dtype: torch.dtype) -> None:
    """Compare within some units in the last place of a dtype, relative to the largest value of the tensor."""
    assert ours.shape == theirs.shape
    assert torch.isfinite(ours).all()
    scale = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
    gap = float((ours.double() - theirs.double()).abs().max()) if theirs.numel() else 0.0
    assert gap <= ulps * ULP[dtype] * scale, f"{gap:.2e} > {ulps} ulp of {dtype} at {scale:.2e}"


def mostly_equal(ours: torch.Tensor, twin: torch.Tensor) -> None:
    """Compare bits: a float32 rounding in an exponential or a root turns a rounding to 16 bits once in thousands."""
    if twin.dtype != torch.float32:
        assert float((ours == twin).float().mean()) > 0.99


ATTENTION_SHAPES = (
    # rows, kv heads, query heads each, capacity, channels, lengths
    (1, 1, 1, 32, 8, (1,)),
    (3, 2, 2, 640, 16, (640, 257, 0)),
    (2, 1, 7, 300, 80, (256, 299)),
    (2, 1, 20, 96, 64, (33, 95)),
)


def check_decode_attention(device: str, dtype: torch.dtype, shape: Any) -> None:
    from whet.kernels.triton import attention as triton_attention

    rows, kv_heads, rep, capacity, channels, lengths = shape
    q = draw(rows, kv_heads * rep, channels, dtype=dtype, device=device)
    keys = draw(rows + 1, kv_heads, capacity, channels, seed=1, dtype=dtype, device=device)
    values = draw(rows + 1, kv_heads, capacity, channels, seed=2, dtype=dtype, device=device)
    at = torch.tensor(lengths, device=device)
    ours = triton_attention.decode_attention(q, keys, values, at)
    twin = eager.decode_attention(q, keys, values, at)
    assert ours.dtype == dtype
    # Both work in float32 and round once, so at most one rounding apart; 24 float32 ulps for 640 added products.
    close(ours, twin, 1 if dtype != torch.float32 else 24, dtype)
    for row, length in enumerate(lengths):
        queries = q[row].view(kv_heads, rep, channels).double()
        scores = queries @ keys[row, :, :length].double().transpose(-1, -2) / math.sqrt(channels)
        exact = torch.softmax(scores, dim=-1) @ values[row, :, :length].double()
        close(ours[row], exact.view(-1, channels), 0.51 if dtype != torch.float32 else 24, dtype)


def check_decode_attention_ignores(device: str, dtype: torch.dtype) -> None:
    """A row is bitwise the same alone, in a longer cache, among other rows, and with any tail behind its length."""
    from whet.kernels.triton.attention import decode_attention as run

    rows, kv_heads, rep, capacity, channels = 3, 1, 2, 320, 16
    q = draw(rows, kv_heads * rep, channels, dtype=dtype, device=device)
    keys, values = (
        draw(rows, kv_heads, capacity, channels, seed=s, dtype=dtype, device=device) for s in (1, 2)
    )
    lengths = torch.tensor([300, 320, 40], device=device)
    whole = run(q, keys, values, lengths)
    for index, length in enumerate(lengths.tolist()):
        short = -(-length // 32) * 32
        one = slice(index, index + 1)
        near = run(q[one], keys[one, :, :short].clone(), values[one, :, :short].clone(), lengths[one])
        assert torch.equal(near, whole[one])
        for filler in (INF, float("nan"), -3e4):
            dirty_keys, dirty_values = keys[one].clone(), values[one].clone()
            dirty_keys[:, :, length:] = filler
            dirty_values[:, :, length:] = filler
            assert torch.equal(run(q[one], dirty_keys, dirty_values, lengths[one]), whole[one])


LOGITS_SHAPES = ((1, 2), (3, 130), (2, 5000), (5, 9001))


def make_logits(rows: int, vocab: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a wide buffer's slice: a far offset, a large spread, a cut tail, and a row whose first part is cut."""
    wide = draw(rows, vocab + 7, device=device)
    logits = wide[:, :vocab]
    logits[0] += 1e4
    if rows > 1:
        logits[1] *= 30
        logits[1, vocab - vocab // 3 :] = -INF
    if rows > 2:
        logits[2, : vocab - 2] = -INF
    targets = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(vocab)).to(device)
    targets[1:2] = 0
    targets[2:3] = vocab - 1
    return logits, targets


def check_logprob_entropy(device: str, shape: tuple[int, int], temperature: float) -> None:
    from whet.kernels.triton import logprobs as triton_logprobs

    logits, targets = make_logits(*shape, device)
    exact = logits.double().requires_grad_()
    logprobs = torch.log_softmax(exact, dim=-1)
    finite = torch.where(logprobs == -INF, 0.0, logprobs)
    chosen, entropy = (
        logprobs.gather(1, targets[:, None]).squeeze(1),
        -(finite.exp() * finite).where(logprobs > -INF, 0.0).sum(-1),
    )
    normaliser = torch.logsumexp(exact, dim=-1)
    kept = logits.clone()
    ours = triton_logprobs.logprob_entropy(logits, targets)
    twin = eager.logprob_entropy(logits, targets)
    assert torch.equal(logits, kept)
    # A float32 normaliser is within an ulp of the largest logit, near 1e4 in one row; every log-probability is off by
    # as much, which the twin's entropy sums up; the kernel centres its moment, and no size enters.
    sizes = torch.maximum(logits.masked_fill(logits == -INF, 0.0).abs().amax(-1), ours[1].abs()).clamp(min=8)
    for results in (ours, twin):
        for result, right in zip(results[:2], (chosen, normaliser), strict=True):
            assert bool(((result - right.detach()).abs() <= 2 * ULP[torch.float32] * sizes).all())
    assert bool(((twin[2] - entropy).abs() <= 2 * ULP[torch.float32] * sizes * (1 + entropy)).all())
    close(ours[2], entropy.detach(), 16, torch.float32)
    g, e = draw(shape[0], seed=5, device=device), draw(shape[0], seed=6, device=device)
    ((chosen * g).sum() + (entropy * e).sum()).backward()
    assert exact.grad is not None
    wanted = torch.where(logprobs == -INF, 0.0, exact.grad) / temperature
    # Probabilities are exp(z - normaliser), and so off by the normaliser's error relative to 1; entropies add as much.
    bound = 8 * ULP[torch.float32] * float(sizes.max())
    for backward in (triton_logprobs.logprob_entropy_backward_, eager.logprob_entropy_backward_):
        buffer = kept.clone()
        grad = backward(buffer, targets, ours[1], ours[2], g, e, temperature)
        assert grad.data_ptr() == buffer.data_ptr()
        assert float((grad.double() - wanted).abs().max()) <= bound * float(wanted.abs().max())


def check_entropy_far_from_zero(device: str) -> None:
    """An offset that shifts every logit exactly (a power of two over multiples of 2^-10) changes no entropy much."""
    from whet.kernels.triton import logprobs as triton_logprobs

    logits = (draw(2, 700, device=device) * 1024).round() / 1024
    targets = torch.tensor([3, 699], device=device)
    near = triton_logprobs.logprob_entropy(logits, targets)[2]
    far = triton_logprobs.logprob_entropy(logits + 4096, targets)[2]
    assert float((near - far).abs().max()) <= 2e-6  # without the centred moment it would be 5e-4


RMS_CASES = (
    # rows (of one or two axes), width, x dtype, weight dtype, residual dtype or None
    (1, 16, torch.float32, torch.float32, None),
    (5, 100, torch.float32, torch.float32, torch.float32),
    (3, 896, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (3, 896, torch.bfloat16, torch.bfloat16, None),
    (4, 64, torch.bfloat16, torch.float32, torch.float32),
    (2, 48, torch.float16, torch.float16, torch.float16),
)


def check_rms_norm(device: str, case: tuple[int, int, torch.dtype, torch.dtype, torch.dtype | None]) -> None:
    from whet.kernels.triton import layer as triton_layer

    rows, width, x_dtype, weight_dtype, residual_dtype = case
    shape = (rows, width) if rows != 4 else (2, 2, width)
    x = draw(*shape, device=device, dtype=x_dtype)
    weight = draw(width, seed=1, device=device, dtype=weight_dtype)
    residual = None if residual_dtype is None else draw(*shape, seed=2, device=device, dtype=residual_dtype)
    inputs = [t for t in (x, weight, residual) if t is not None]
    upstream = None
    results = []
    for function in (triton_layer.rms_norm, eager.rms_norm):
        leaves = [t.clone().requires_grad_() for t in inputs]
        y, total = function(leaves[0], leaves[1], 1e-5, leaves[2] if residual is not None else None)
        if upstream is None:
            upstream = draw(*shape, seed=3, device=device), draw(*shape, seed=4, device=device)
        ((y.float() * upstream[0]).sum() + (total.float() * upstream[1]).sum()).backward()
        results.append((y.detach(), total.detach(), [leaf.grad for leaf in leaves]))
    (y, total, grads), (twin_y, twin_total, _) = results
    assert (y.dtype, total.dtype) == (twin_y.dtype, twin_total.dtype)
    assert torch.equal(total, twin_total)
    # The inverse root differs by float32 roundings, which may turn one rounding to a shorter dtype, twice.
    close(y, twin_y, 1 if y.dtype != torch.float32 else 8, y.dtype)
    mostly_equal(y, twin_y)
    exact = [t.double().requires_grad_() for t in inputs]
    summed = exact[0] if residual is None else exact[0] + exact[2]
    normed = exact[1] * summed * torch.rsqrt(summed.square().mean(-1, keepdim=True) + 1e-5)
    assert upstream is not None
    ((normed * upstream[0].double()).sum() + (summed * upstream[1].double()).sum()).backward()
    for mine, right, given in zip(grads, exact, inputs, strict=True):
        assert mine is not None
        assert right.grad is not None
        assert mine.dtype == given.dtype
        # 16-bit inputs: the sum, y's gradient and the result are each rounded once.
        shortest = max((t.dtype for t in (x, weight, total)), key=lambda dtype: ULP[dtype])
        close(mine, right.grad, 16 if shortest == torch.float32 else 2, shortest)


def check_swiglu(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    from whet.kernels.triton import layer as triton_layer

    fused = draw(rows, 2 * width, device=device, dtype=dtype)
    fused[:, 0], fused[:, 1] = 60.0, -60.0
    gate, up = (part.detach().requires_grad_() for part in fused.split(width, dim=1))
    upstream = draw(rows, width, seed=1, device=device, dtype=dtype)
    ours = triton_layer.swiglu(gate, up)
    grads = torch.autograd.grad(ours, (gate, up), upstream)
    twin = eager.swiglu(gate, up).detach()
    assert ours.dtype == dtype
    # exp differs by float32 roundings; silu and the product are rounded once each.
    close(ours.detach(), twin, 1 if dtype != torch.float32 else 4, dtype)
    mostly_equal(ours.detach(), twin)
    exact = gate.detach().double().requires_grad_(), up.detach().double().requires_grad_()
    wanted = torch.autograd.grad(F.silu(exact[0]) * exact[1], exact, upstream.double())
    for mine, right in zip(grads, wanted, strict=True):
        close(mine, right, 0.51 if dtype != torch.float32 else 8, dtype)


def check_nf4(device: str, dtype: torch.dtype, shape: tuple[int, ...], double: bool) -> None:
    from whet.kernels.triton import nf4 as triton_nf4

    weights = draw(*shape, device=device) * 0.02
    packed = eager.nf4_quantize(weights, double=double)
    ours = triton_nf4.nf4_dequantize(packed, dtype)
    assert ours.dtype == dtype
    assert torch.equal(ours, eager.nf4_dequantize(packed, dtype))
