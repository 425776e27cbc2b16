"""The Triton kernels in Triton's interpreter, against their eager twins and float64; no GPU is needed.

Run by test_triton.py in a process of its own, since Triton decides at its first import whether it interprets, and other
tests may have imported it. By hand: TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted.py
"""

from __future__ import annotations

from typing import Any

import kernel_cases as cases
import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def bits_of(values: torch.Tensor) -> np.ndarray[Any, Any]:
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16)


def floats_of(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mend four faults of Triton's interpreter, which a GPU has not.

    It cuts floats to bfloat16 instead of rounding them and multiplies the bits of bfloat16 matrices as integers (3.6
    and 3.7); with numpy 2.4 it cannot loop to a bound that was read from memory (3.6). It multiplies by the BLAS,
    in which a row's sum depends on where the row stands in the tile (OpenBLAS with AVX2; not with AVX-512): here the
    inner axis is summed from its first element to its last, for every row alike.
    """
    cast = interpreter.InterpreterBuilder.cast_impl
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def rounded(self: Any, source: Any, to: Any) -> Any:
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            data = torch.from_numpy(np.ascontiguousarray(source.data))
            return interpreter.TensorHandle(bits_of(data).reshape(source.data.shape), tl.bfloat16)
        return cast(self, source, to)

    def multiplied(self: Any, a: Any, b: Any, total: Any, *rest: Any) -> Any:
        left, right = (
            floats_of(x.data) if x.dtype.scalar == tl.bfloat16 else x.data.astype(total.data.dtype)
            for x in (a, b)
        )
        product = np.zeros_like(total.data)
        for inner in range(left.shape[-1]):
            product += left[..., inner, None] * right[..., inner, None, :]
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    for name in ("cast_impl", "create_fp_trunc"):
        monkeypatch.setattr(interpreter.InterpreterBuilder, name, rounded)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiplied)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((dtype, shape) for dtype in (torch.float32, torch.bfloat16) for shape in cases.ATTENTION_SHAPES),
        (torch.float16, cases.ATTENTION_SHAPES[0]),
    ],
)
def test_decode_attention(dtype: torch.dtype, shape: Any) -> None:
    cases.check_decode_attention("cpu", dtype, shape)


def test_decode_attention_ignores_batch_capacity_and_tail() -> None:
    cases.check_decode_attention_ignores("cpu", torch.bfloat16)


@pytest.mark.parametrize("shape", cases.LOGITS_SHAPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprob_entropy(shape: tuple[int, int], temperature: float) -> None:
    cases.check_logprob_entropy("cpu", shape, temperature)


def test_entropy_far_from_zero() -> None:
    cases.check_entropy_far_from_zero("cpu")


@pytest.mark.parametrize("case", cases.RMS_CASES)
def test_rms_norm(case: Any) -> None:
    cases.check_rms_norm("cpu", case)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    cases.check_swiglu("cpu", dtype, 3, 1030)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7, 93), (130, 136)])
def test_nf4(dtype: torch.dtype, shape: tuple[int, ...], double: bool) -> None:
    cases.check_nf4("cpu", dtype, shape, double)


def test_models_head_and_sampling_on_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from wiring_cases import check_wiring

    from whet.kernels import dispatch

    torch.set_num_threads(1)
    monkeypatch.setattr("whet.kernels.cpu.build.library", lambda: None)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(dispatch, "KERNELS", {"cpu": dispatch.KERNELS["cuda"]})
    check_wiring(monkeypatch)
