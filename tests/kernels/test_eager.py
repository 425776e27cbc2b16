"""The eager twins against the model's own code, the algorithms' own code and published numbers; no Triton."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import kernel_cases as cases
import pytest
import torch
import torch.nn.functional as F

from whet.algo.logprobs import select_logprobs, token_logprobs
from whet.generate.cache import Decode, KVCache
from whet.kernels import dispatch, eager
from whet.model.config import ModelConfig
from whet.model.parts import RMSNorm
from whet.model.rotary import rotary_tables

SHAPE = ModelConfig(
    hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=600
)  # fmt: skip


def filled_cache(dtype: torch.dtype) -> KVCache:
    cache = KVCache(SHAPE, cases.room(4, 600), dtype, torch.device("cpu"))
    for tensor, seed in ((cache.keys, 1), (cache.values, 2)):
        tensor.copy_(cases.draw(*tensor.shape, seed=seed))
    return cache


ELEMENTS = {"silu": F.silu, "sigmoid": torch.sigmoid, "softplus": F.softplus, "exp": torch.exp}
SMOOTH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: partial(eager.row_wise, function) for name, function in ELEMENTS.items()
}
SMOOTH["gelu"] = eager.gelu


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 6, 7, 12])
@pytest.mark.parametrize("name", SMOOTH)
def test_a_number_has_the_same_bits_wherever_it_stands(name: str, threads: int) -> None:
    """PyTorch deals numbers to threads in shares that end inside a vector, whose rest scalar code computes."""
    x = 3 * torch.randn(400, 672, generator=torch.Generator().manual_seed(threads))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = SMOOTH[name](x)
        for rows in (1, 24, 25, 48, 49, 100, 333, 399):
            assert torch.equal(SMOOTH[name](x[:rows]), whole[:rows])
            assert torch.equal(SMOOTH[name](x[1 : rows + 1, 5:70]), whole[1 : rows + 1, 5:70])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_is_the_caches_own(dtype: torch.dtype) -> None:
    """Rotate, write, attend: what `Decode` does with the model's functions."""
    positions = torch.tensor([0, 300, 599])
    q, k, v = (cases.draw(3, heads, 8, seed=heads, dtype=dtype) for heads in (4, 2, 2))
    cos, sin = (table[positions][:, None] for table in rotary_tables(SHAPE, torch.device("cpu")))
    norms = [RMSNorm(8, 1e-6).to(dtype) for _ in "qk"]
    for norm, seed in zip(norms, (3, 4), strict=True):
        norm.weight.data.copy_(cases.draw(8, seed=seed))
    with torch.no_grad():
        theirs = filled_cache(dtype)
        q_turned, k_turned = (
            dispatch.run(eager.rotate, norm(x), cos, sin) for norm, x in zip(norms, (q, k), strict=True)
        )
        wanted = Decode(theirs, positions, theirs.capacity, "exact").attend(0, q_turned, k_turned, v)
        ours = filled_cache(dtype)
        rows = torch.arange(3)
        turned, keys = (
            eager.rotate(eager.rms_norm(x, norm.weight, 1e-6)[0], cos, sin)
            for x, norm in zip((q, k), norms, strict=True)
        )
        ours.keys[0][rows, :, positions], ours.values[0][rows, :, positions] = keys, v
        out = eager.decode_attention(turned, ours.keys[0], ours.values[0], positions + 1)
    assert torch.equal(turned, q_turned)
    assert torch.equal(ours.keys, theirs.keys)
    assert torch.equal(ours.values, theirs.values)
    # `Decode` rounds the scaled query, probabilities and each block's sum to 16 bits where the twin keeps float32.
    cases.close(out, wanted, 24 if dtype == torch.float32 else 2, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_attention_ignores_batch_capacity_and_tail(dtype: torch.dtype) -> None:
    """Near, not bitwise: PyTorch's own products are not row-invariant."""
    q = cases.draw(2, 4, 8, dtype=dtype)
    cache = filled_cache(dtype)
    keys, values = cache.keys[0], cache.values[0]
    lengths = torch.tensor([300, 0])
    whole = eager.decode_attention(q, keys, values, lengths)
    assert torch.equal(whole[1], torch.zeros_like(whole[1]))
    for filler in (cases.INF, float("nan"), -3e4):
        keys[:, :, 300:], values[:, :, 300:] = filler, filler
        again = eager.decode_attention(q, keys[:, :, :320], values[:, :, :320], lengths)
        cases.close(again, whole, 4 if dtype == torch.float32 else 0.5, dtype)


def test_logprobs_and_gradient_are_the_algorithms_own() -> None:
    logits = cases.draw(6, 50).double()
    logits[2, 40:] = -cases.INF
    targets = torch.tensor([0, 49, 3, 7, 7, 12])
    logprob, normaliser, entropy = eager.logprob_entropy(logits, targets)
    wanted, wanted_normaliser = select_logprobs(logits, targets)
    assert torch.equal(logprob, wanted)
    assert torch.equal(normaliser, wanted_normaliser)
    logprobs = torch.log_softmax(logits, -1)
    wanted_entropy = -(logprobs.exp() * logprobs).nansum(-1)  # 0 x -inf is nan, and counts as 0
    torch.testing.assert_close(entropy, wanted_entropy, rtol=1e-13, atol=1e-13)

    hidden, weight = cases.draw(6, 8).double().requires_grad_(), cases.draw(50, 8, seed=1).double()
    g, e = cases.draw(6, seed=5).double(), cases.draw(6, seed=6).double()
    scores = token_logprobs(hidden, weight, targets, temperature=0.7, num_valid=50)
    (wanted_grad,) = torch.autograd.grad((scores[0] * g).sum() + (scores[1] * e).sum(), hidden)
    logits = hidden.detach() @ weight.t() / 0.7
    _, normaliser, entropy = eager.logprob_entropy(logits, targets)
    dz = eager.logprob_entropy_backward_(logits, targets, normaliser, entropy, g, e, 0.7)
    torch.testing.assert_close(dz @ weight, wanted_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
)
def test_rms_norm_is_the_models_own(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    norm = RMSNorm(24, 1e-5).to(weight_dtype)
    norm.weight.data.copy_(cases.draw(24, seed=1))
    x, residual = cases.draw(5, 24, dtype=dtype), cases.draw(5, 24, seed=2, dtype=dtype)
    y, total = eager.rms_norm(x, norm.weight, 1e-5, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, norm(x + residual))
    y, total = eager.rms_norm(x, norm.weight, 1e-5)
    assert torch.equal(total, x)
    assert torch.equal(y, norm(x))


def test_nf4_codes_are_the_papers() -> None:
    """2305.14314, appendix E: quantiles of N(0, 1), 8 above zero and 7 below, scaled to [-1, 1]."""
    inverse = statistics.NormalDist().inv_cdf
    edge = 0.9677083  # the mean of 1 - 1/30 and 1 - 1/32
    above = [inverse(edge + (0.5 - edge) * i / 8) for i in range(8)]
    below = [-inverse(edge + (0.5 - edge) * i / 7) for i in range(7)]
    codes = sorted([*above, 0.0, *below])
    assert pytest.approx([code / max(codes) for code in codes], abs=1e-6) == eager.NF4_CODES


@pytest.mark.parametrize("double", [False, True])
def test_nf4_round_trip(double: bool) -> None:
    """Blocks whose values are codes times their largest come back; so do zeros."""
    scales = torch.tensor([1.0, 0.5, 2.0, 0.0])
    codes = torch.tensor(eager.NF4_CODES).repeat(4, 4)[
        :, torch.randperm(64, generator=torch.Generator().manual_seed(0))
    ]
    weights = (codes * scales[:, None]).view(16, 16)
    packed = eager.nf4_quantize(weights, double=double)
    back = eager.nf4_dequantize(packed, torch.float32)
    # The 8-bit absmax is off by half of the widest step, 1.125 x 0.9 / 64 / 2 here, times codes up to 1.
    assert float((back - weights).abs().max()) <= (0.008 if double else 0.0)
    assert torch.equal(back.view(4, 64)[3], torch.zeros(64))


@pytest.mark.parametrize(("double", "bits"), [(False, 4.5), (True, 4.127)])
def test_nf4_error_and_size(double: bool, bits: float) -> None:
    weights = cases.draw(512, 512) * 0.02
    packed = eager.nf4_quantize(weights, double=double)
    back = eager.nf4_dequantize(packed, torch.float32)
    assert packed.nbytes * 8 / weights.numel() == pytest.approx(bits, abs=2e-3)
    # The widest gap of the codes is 0.304: no value is further than half of it from a code, in units of its absmax.
    absmax = weights.view(-1, 64).abs().amax(-1)
    worst = (back - weights).view(-1, 64).abs().amax(-1) / absmax
    assert float(worst.max()) <= 0.152 + (0.02 if double else 1e-6)
    # Measured before, independently, for Gaussian weights: 0.092 (shared/anchors.md).
    assert float((back - weights).norm() / weights.norm()) == pytest.approx(0.092, abs=0.003)


@pytest.mark.parametrize("shape", [(1,), (7, 93), (3, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_nf4_odd_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Each value is a code times its block's absmax, found without tables of pairs."""
    packed = eager.nf4_quantize(cases.draw(*shape), double=True)
    back = eager.nf4_dequantize(packed, dtype)
    assert back.shape == shape
    assert back.dtype == dtype
    scale, offset, table = packed.scale, packed.offset, eager.dynamic_table(torch.device("cpu"))
    assert scale is not None
    assert offset is not None
    for index, value in enumerate(back.flatten().tolist()):
        code = int(packed.codes[index // 2]) >> (0 if index % 2 else 4) & 15
        absmax = table[int(packed.absmax[index // 64])] * scale[index // 64 // 256] + offset
        assert value == (torch.tensor(eager.NF4_CODES[code]) * absmax).to(dtype).item()
