"""The C++ kernels against float64 PyTorch, values and gradients; a row's bits against the row alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from needs import needs

from whet.algo.logprobs import token_logprobs
from whet.generate.sampling import counter_uniforms, draw_tokens
from whet.inspect.memory.meter import LiveTensors
from whet.kernels import eager
from whet.kernels.cpu import attention as cpu_attention
from whet.kernels.cpu import build
from whet.kernels.cpu import head as cpu_head
from whet.kernels.cpu import ops as cpu
from whet.model.attention import Packed
from whet.types import Segment

pytestmark = needs("kernels")

DTYPES = (torch.float32, torch.bfloat16)
# Of the largest element: sums of some hundred float32 products; one rounding to bfloat16 of 8 bits, twice in gradients.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return noise.to(dtype).requires_grad_()


def check(ours: Callable, reference: Callable, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compare value and gradients; return our value."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    got, expected = ours(*inputs), reference(*wide)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    got.backward(grad.to(got.dtype))
    expected.backward(grad.to(got.dtype).double())
    tolerance = TOLERANCE[inputs[0].dtype]
    pairs = [
        (got.detach(), expected.detach()),
        *((a.grad, b.grad) for a, b in zip(inputs, wide, strict=True)),
    ]
    for number, (a, b) in enumerate(pairs):
        assert a is not None
        assert b is not None
        assert float((a.double() - b).abs().max()) <= tolerance * float(b.abs().max()), f"tensor {number}"
    return got.detach()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "columns"), [(1, 16, 1), (13, 48, 33), (37, 64, 70), (200, 160, 129)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_linear(rows: int, width: int, columns: int, transposed: bool, dtype: torch.dtype) -> None:
    shape = (width, 16 * columns) if transposed else (columns, width)
    x, weight, bias = (draw(*s, dtype=dtype) for s in ((rows, width), shape, (shape[int(transposed)],)))
    out = check(
        lambda x, w, b: cpu.linear(x, w, b, transposed=transposed),
        lambda x, w, b: F.linear(x, w.t() if transposed else w, b),
        [x, weight, bias],
    )
    alone = [cpu.linear(x[row : row + 1], weight, bias, transposed=transposed) for row in range(rows)]
    assert torch.equal(torch.cat([row for row in alone if row is not None]), out)


@pytest.mark.parametrize("columns", [1, 8, 24, 101, 128])
def test_gradients_of_many_rows_for_any_number_of_columns(columns: int) -> None:
    """From `MANY_ROWS` on the gradient of the input is a packed product over the columns: routers have 8, heads 1."""
    inputs = [draw(*shape, dtype=torch.float32) for shape in ((cpu.MANY_ROWS + 9, 64), (columns, 64))]
    check(cpu.linear, F.linear, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [3, 16, 20])
@pytest.mark.parametrize("columns", [(64,), (64, 32, 32), (48, 24)])  # 24 fill no whole vector
def test_products_with_adapters_at_once(dtype: torch.dtype, rank: int, columns: tuple[int, ...]) -> None:
    """Same bits as one after the other; values and gradients are those of the formula."""
    rows, width = 205, 80
    x = draw(rows, width, dtype=dtype)
    frozen = [
        (draw(n, width, dtype=dtype, seed=n).detach(), draw(n, dtype=dtype).detach() if n != 32 else None)
        for n in columns
    ]
    trained = [
        (0.3 * draw(*shape, dtype=torch.float32, seed=place)).detach().requires_grad_()
        for place, n in enumerate(columns)
        for shape in ((rank, width), (n, rank))
    ]

    def parts(trained: Sequence[torch.Tensor]) -> list[eager.Adapted]:
        sides = zip(trained[::2], trained[1::2], strict=True)
        return [eager.Adapted(w, b, a, c, 0.7) for (w, b), (a, c) in zip(frozen, sides, strict=True)]

    def formula(x: torch.Tensor, *trained: torch.Tensor) -> torch.Tensor:
        sides = zip(frozen, trained[::2], trained[1::2], strict=True)
        return torch.cat(
            [
                x @ (w.to(x.dtype) + 0.7 * (c @ a).to(x.dtype)).t() + (0 if b is None else b.to(x.dtype))
                for (w, b), a, c in sides
            ],
            dim=1,
        )

    out = check(lambda x, *own: torch.cat(cpu.products(x, parts(own)), dim=1), formula, [x, *trained])
    apart = [
        cpu.low_rank(x, cpu.linear(x, part.weight, part.bias), part.a, part.b, part.scaling)
        for part in parts(trained)
    ]
    assert torch.equal(torch.cat(apart, dim=1), out)
    with torch.no_grad():
        assert torch.equal(torch.cat(cpu.products(x[3:4], parts(trained)), dim=1), out[3:4])


def test_a_changed_weight_is_packed_again() -> None:
    x, weight = draw(3, 32, dtype=torch.float32), draw(40, 32, dtype=torch.float32)
    first = cpu.linear(x, weight, None)
    assert first is not None
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(cpu.linear(x, weight, None), 2 * first)
    with torch.no_grad():
        weight.data = weight.data / 2
    assert torch.equal(cpu.linear(x, weight, None), first)
    cpu.forget([weight])
    assert cpu.PANELS not in weight.__dict__


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype: torch.dtype) -> None:
    x, weight = draw(131, 48, dtype=dtype), draw(48, dtype=dtype)
    check(
        lambda x, w: cpu.rms_norm(x, w, 1e-6)[0],
        lambda x, w: w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
        [x, weight],
    )
    residual = draw(131, 48, dtype=dtype, seed=3)
    normed, total = cpu.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, cpu.rms_norm(total, weight, 1e-6)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [16, 64])
def test_rotate(channels: int, dtype: torch.dtype) -> None:
    angles = torch.randn(7, 1, channels // 2, generator=torch.Generator().manual_seed(1)).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()

    def reference(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin

    check(lambda x: cpu.rotate(x, cos, sin), reference, [draw(7, 3, channels, dtype=dtype)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    inputs = [draw(9, 80, dtype=dtype), draw(9, 80, dtype=dtype, seed=5)]
    check(cpu.swiglu, lambda gate, up: F.silu(gate) * up, inputs)
    far = torch.tensor([[-1e4, -100.0, -88.0, 88.0, 100.0, 1e4, 0.0, -0.0] * 2])
    torch.testing.assert_close(cpu.swiglu(far, torch.ones_like(far)), F.silu(far), atol=1e-30, rtol=1e-6)


# A prompt of 5 with completions of 7 and 20 that share it, a sequence of its own, and three rows of nobody.
SEGMENTS = (Segment(0, 5, 0, 0), Segment(5, 7, 0, 5), Segment(12, 20, 0, 5), Segment(32, 33, 0, 0))
ROWS = 68


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones(ROWS, ROWS, dtype=torch.bool)
    for segment in SEGMENTS:
        for place in range(segment.length):
            row = segment.start + place
            hidden[row, segment.prefix : segment.prefix + segment.shared] = False
            hidden[row, segment.start : row + 1] = False
    rep, used = q.shape[1] // k.shape[1], ~hidden.all(1)
    scores = torch.einsum("nhc,mhc->hnm", q, k.repeat_interleave(rep, 1)) / q.shape[2] ** 0.5
    probs = scores.masked_fill(hidden & used[:, None], float("-inf")).softmax(-1) * used[:, None]
    return torch.einsum("hnm,mhc->nhc", probs, v.repeat_interleave(rep, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "heads"), [(16, 2), (32, 6), (64, 10), (128, 4)])
def test_attention_with_a_shared_prefix(channels: int, heads: int, dtype: torch.dtype) -> None:
    q, k, v = (draw(ROWS, h, channels, dtype=dtype, seed=n) for n, h in enumerate((heads, 2, 2)))
    context = Packed(SEGMENTS, torch.device("cpu"))
    out = check(lambda q, k, v: context.attend(0, q, k, v), definition, [q, k, v])
    assert not out[65:].any()
    # The same query against a cache gives the same bits.
    keys, values = (
        torch.zeros(2, 2, 3, channels, 16, dtype=dtype),
        torch.zeros(2, 2, 48, channels, dtype=dtype),
    )
    k_own, v_own = (torch.cat([x[:5], x[12:32]]).detach() for x in (k, v))
    cpu_attention.write_cache(k_own, v_own, keys, values, torch.ones(25).long(), torch.arange(25))
    queries = torch.stack([q[0], q[31]]).detach()
    positions, alone = torch.tensor([0, 24]), torch.zeros(2, 2, dtype=torch.int64)
    cached = cpu_attention.Cache.of(keys, values, keys, values, alone)
    assert torch.equal(cpu_attention.decode(queries, cached, 2, positions)[1], out[31])
    # And so it does when the first tile lies in a prompt's slot.
    own_keys, own_values = torch.full_like(keys, math.nan), torch.full_like(values, math.nan)
    own_keys[1, :, :2], own_values[1, :, :32] = keys[1, :, 1:], values[1, :, 16:]
    cached = cpu_attention.Cache.of(own_keys, own_values, keys, values, torch.tensor([[0, 0], [1, 16]]))
    assert torch.equal(cpu_attention.decode(queries, cached, 2, positions)[1], out[31])


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", ["exact", "fast"])
def test_eager_attention_knows_shared_prefixes_too(kind: str) -> None:
    q, k, v = (draw(ROWS, h, 32, dtype=torch.float32, seed=n) for n, h in enumerate((4, 2, 2)))
    context = Packed(SEGMENTS, torch.device("cpu"), kind)  # pyright: ignore[reportArgumentType]
    out = context.attend(0, q[:65], k[:65], v[:65])
    torch.testing.assert_close(out, definition(q, k, v)[:65], atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [7, 1024])
@pytest.mark.parametrize("keep", [0, 2**30])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_scores(
    dtype: torch.dtype, chunk: int, keep: int, is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_head, "KEEP_BYTES", keep)
    # Logits of a few units, as a model's are: the error of a probability is that of its logit.
    hidden, weight = draw(40, 64, dtype=dtype), (0.2 * draw(101, 64, dtype=dtype)).detach().requires_grad_()
    targets = torch.arange(40) * 2

    def reference(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logprobs = (hidden @ weight.t() / 0.7)[:, :97].log_softmax(-1)
        return torch.stack([logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)])

    options: dict[str, Any] = {"temperature": 0.7, "num_valid": 97, "chunk": chunk}
    if not is_frozen:
        own = [hidden, weight]
        check(lambda h, w: torch.stack(token_logprobs(h, w, targets, **options)), reference, own)
        return
    weight = weight.detach()
    wide = weight.double()
    check(
        lambda h: torch.stack(token_logprobs(h, weight, targets, **options)),
        lambda h: reference(h, wide.to(h.dtype)),
        [hidden],
    )
    hidden.grad = None
    # Without an entropy in the loss only a factor is left for the backward pass.
    check(
        lambda h: token_logprobs(h, weight, targets, **options)[0],
        lambda h: reference(h, wide.to(h.dtype))[0],
        [hidden],
    )


@pytest.mark.parametrize("vocab", [97, 1000, 5000])
def test_draws_are_those_of_the_eager_sampler(vocab: int) -> None:
    """Equal but where a uniform falls within a rounding of a boundary: none of these 512."""
    rows = 512
    z = torch.full((rows, -(-vocab // 16) * 16), 1e9)
    z[:, :vocab] = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    seeds = torch.arange(rows) * 0x9E3779B97F4A7C & 2**62 - 1
    state = {
        "seeds": seeds,
        "positions": torch.arange(rows),
        "counts": torch.arange(rows) % 5,
        "limits": torch.full((rows,), 5),
        "last": torch.zeros(rows, dtype=torch.int64),
        "tokens": torch.zeros(rows, 6, dtype=torch.int64),
        "logprobs": torch.zeros(rows, 6),
        "done": torch.arange(rows) % 7 == 0,
        "stopped": torch.zeros(rows, dtype=torch.bool),
    }
    before = {name: tensor.clone() for name, tensor in state.items()}
    cut = z.clone()
    cut[:, vocab:] = float("-inf")
    expected = draw_tokens(cut, counter_uniforms(seeds, before["counts"]))
    stops = expected[3:4].clone()
    place = cpu_head.RowState(*(t.data_ptr() for t in state.values()), 6, stops.data_ptr(), 1)
    cpu_head.draw(z, place, num_valid=vocab, temperature=1.0)
    assert torch.equal(state["last"], expected)
    column = torch.where(before["done"], 5, before["counts"])[:, None]
    assert torch.equal(state["tokens"].gather(1, column)[:, 0], expected)
    scored = cut.double().log_softmax(-1).gather(1, expected[:, None])[:, 0]
    torch.testing.assert_close(state["logprobs"].gather(1, column)[:, 0].double(), scored, atol=3e-6, rtol=0)
    live = ~before["done"]
    assert torch.equal(state["counts"], before["counts"] + live)
    assert torch.equal(state["positions"], before["positions"] + live)
    assert torch.equal(state["stopped"], live & (expected == stops))
    assert torch.equal(state["done"], ~live | (expected == stops) | (state["counts"] >= 5))


def test_adamw_and_its_norm() -> None:
    count = 4096 * 2 + 5
    grad, master = draw(count, dtype=torch.bfloat16).detach(), torch.randn(count)
    assert cpu.sum_of_squares(grad) == pytest.approx(float(grad.double().square().sum()), rel=1e-6)
    first, second = torch.zeros(count), torch.zeros(count)
    reference = torch.nn.Parameter(master.double())
    optimizer = torch.optim.AdamW([reference], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    options = {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "decay": 0.2}
    for step in (1, 2, 3):
        cpu.adamw(master, grad, first, second, step=float(step), factor=0.5, **options)
        reference.grad = 0.5 * grad.double()
        optimizer.step()
    torch.testing.assert_close(master.double(), reference.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WHET_KERNELS": "eager"}, "eager: WHET_KERNELS=eager"),
        ({"PATH": "/nowhere", "CXX": ""}, "eager: no C++ compiler"),
        ({"CXX": "/bin/false", "PATH": "/nowhere"}, "eager: the kernels could not be built"),
    ],
)
def test_without_kernels_it_says_why(
    environment: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ({"XDG_CACHE_HOME": str(tmp_path)} | environment).items():
        monkeypatch.setenv(name, value)
    library, reason, folder, _ = build._load.__wrapped__()  # as in a process that has not loaded them yet
    assert (library, folder) == (None, None)
    assert reason.startswith(said)


@pytest.mark.parametrize("wide", [False, True])
def test_a_product_by_blocks_has_the_bits_of_the_whole(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "product_dtype", lambda x: torch.float32)
    monkeypatch.setattr(cpu, "WIDENED", 2**14)
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in ((2048, 64, 512), (300, 70, 200), (40, 900, 130), (7, 5, 3)):
        left = torch.randn(rows, inner, generator=generator)
        left = left if wide else left.bfloat16()
        right = torch.randn(inner, columns, generator=generator).bfloat16()
        expected = (left.float() @ right.float()).bfloat16()
        with LiveTensors(torch.device("cpu")) as meter:
            got = cpu.matmul(left, right)
            assert meter.peak - got.nbytes < 2**20  # the first one's float32 result alone has 4 MiB
        assert torch.equal(got, expected)
        assert torch.equal(cpu.matmul(left.t().contiguous().t(), right), expected)
