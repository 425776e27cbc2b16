"""The Triton kernels and the decode graphs for real: the checks of tests/kernels and more, on a CUDA device.

python -m pytest tests/gpu -m gpu
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kernel_cases as cases
import pytest
import torch

from whet.algo.logprobs import head_logits
from whet.generate.cache import Decode, KVCache
from whet.generate.graphs import DecodeGraphs, StaticDecode
from whet.kernels import dispatch, eager
from whet.kernels.mode import VARIABLE
from whet.model.config import ModelConfig
from whet.model.transformer import LlamaLike, init_weights

pytestmark = pytest.mark.gpu
CUDA = "cuda"


@pytest.fixture(autouse=True)
def plain_float32() -> Iterator[None]:
    """The twins' float32 products must be float32, not TF32."""
    pytest.importorskip("triton", reason="triton is not installed")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        *cases.ATTENTION_SHAPES,
        (64, 8, 2, 2048, 128, tuple(range(1, 2048, 32))),
        (2, 2, 7, 4096, 64, (4095, 2049)),
    ],
)
def test_decode_attention(dtype: torch.dtype, shape: Any) -> None:
    cases.check_decode_attention(CUDA, dtype, shape)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_decode_attention_ignores_batch_capacity_and_tail(dtype: torch.dtype) -> None:
    cases.check_decode_attention_ignores(CUDA, dtype)


@pytest.mark.parametrize("shape", [*cases.LOGITS_SHAPES, (64, 151_936)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprob_entropy(shape: tuple[int, int], temperature: float) -> None:
    cases.check_logprob_entropy(CUDA, shape, temperature)


def test_entropy_far_from_zero() -> None:
    cases.check_entropy_far_from_zero(CUDA)


@pytest.mark.parametrize("case", [*cases.RMS_CASES, (1000, 4096, *(torch.bfloat16,) * 3)])
def test_rms_norm(case: Any) -> None:
    cases.check_rms_norm(CUDA, case)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    cases.check_swiglu(CUDA, dtype, 300, 3072 + 6)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7, 93), (1024, 3072)])
def test_nf4(dtype: torch.dtype, shape: tuple[int, ...], double: bool) -> None:
    cases.check_nf4(CUDA, dtype, shape, double)


def test_a_gpu_gets_its_kernels_unless_they_are_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    from whet.kernels.triton import attention as triton_attention

    assert dispatch.triton_refusal() == ""
    query = torch.ones(1, 1, 16, device=CUDA, dtype=torch.bfloat16)
    for name in ("auto", "triton"):
        monkeypatch.setenv(VARIABLE, name)
        assert dispatch.kernel_for(eager.decode_attention, query) is triton_attention.decode_attention
    for name in ("cpp", "eager"):
        monkeypatch.setenv(VARIABLE, name)
        assert dispatch.kernel_for(eager.decode_attention, query) is None


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What graphs are used with."""
    monkeypatch.setenv(VARIABLE, "triton")


class Decoding:
    """A small model that decodes greedily from a random cache, with the state of its rows in tensors that stay."""

    num_rows = 20

    def __init__(self, dtype: torch.dtype) -> None:
        config = ModelConfig(
            family="qwen3", vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4,
            num_kv_heads=2, head_dim=32, max_positions=384,
        )  # fmt: skip
        self.device = torch.device(CUDA)
        self.model = LlamaLike(config)
        init_weights(self.model, 0)
        self.model.to(self.device, dtype)
        self.cache = KVCache(config, cases.room(self.num_rows, 384), dtype, self.device)
        self.cache.keys.copy_(cases.draw(*self.cache.keys.shape))
        self.cache.values.copy_(cases.draw(*self.cache.values.shape, seed=1))
        self.positions = torch.arange(250, 250 + self.num_rows, device=self.device)
        self.last = torch.arange(self.num_rows, device=self.device)
        self.logits = torch.zeros(self.num_rows, 512, device=self.device)

    def tensors(self) -> list[torch.Tensor]:
        return [
            *self.model.parameters(),
            self.cache.keys,
            self.cache.values,
            self.positions,
            self.last,
            self.logits,
        ]

    @torch.inference_mode()
    def step(self, rows: int, *, static: bool = True) -> None:
        positions = self.positions[:rows].clone()
        context = (
            StaticDecode(self.cache, positions) if static else Decode(self.cache, positions, 384, "exact")
        )
        hidden = self.model(self.last[:rows], positions, context)
        logits = head_logits(hidden, self.model.head_weight, temperature=1.0, num_valid=512)
        self.logits[:rows] = logits
        self.last[:rows] = logits.argmax(-1)
        self.positions[:rows] += 1


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_are_the_eager_step(dtype: torch.dtype) -> None:
    """Bitwise: a replay launches what the step launches; also after an update of the weights in place."""
    replayed, stepped = Decoding(dtype), Decoding(dtype)
    runner = DecodeGraphs(replayed.step, replayed.tensors, Decoding.num_rows, replayed.device)
    for index, (live, bucket) in enumerate(
        [(20, 20), (20, 20), (11, 16), (11, 16), (11, 16), (3, 4), (3, 4), (17, 20)]
    ):
        if index == 4:
            for one in (replayed, stepped):
                with torch.no_grad():
                    one.model.head_weight.mul_(-1)
        runner.run(live)
        stepped.step(bucket)
        for name in ("logits", "last", "positions"):
            assert torch.equal(getattr(replayed, name), getattr(stepped, name)), (index, name)
    assert torch.equal(replayed.cache.keys, stepped.cache.keys)


@pytest.mark.usefixtures("triton_kernels")
def test_graphs_follow_moved_parameters() -> None:
    replayed, stepped = Decoding(torch.bfloat16), Decoding(torch.bfloat16)
    runner = DecodeGraphs(replayed.step, replayed.tensors, Decoding.num_rows, replayed.device)
    for live in (20, 20, 20):
        runner.run(live)
        stepped.step(live)
    for one in (replayed, stepped):
        weight = one.model.head_weight
        weight.data = -weight.data.clone()
    for live in (20, 20):
        runner.run(live)
        stepped.step(live)
        assert torch.equal(replayed.logits, stepped.logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_static_step_is_near_the_exact_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    static, exact = Decoding(dtype), Decoding(dtype)
    for one, name, is_static in ((static, "triton", True), (exact, "eager", False)):
        with monkeypatch.context() as patch:
            patch.setenv(VARIABLE, name)
            one.step(20, static=is_static)
    # Three layers of activations near 1, each rounded to the dtype several times on either side.
    assert float((static.logits - exact.logits).abs().max()) <= (1e-4 if dtype == torch.float32 else 5e-2)
