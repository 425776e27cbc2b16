"""Which implementation runs where, seen without a GPU."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from needs import needs
from wiring_cases import check_wiring

from whet.kernels import dispatch
from whet.kernels import eager as twins
from whet.kernels.cpu import ops as cpu
from whet.kernels.dispatch import Choice, Kernel
from whet.kernels.mode import VARIABLE
from whet.types import UserError

WIRED = ("rms_norm", "swiglu", "decode_attention", "logprob_entropy", "logprob_entropy_backward_")


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that PyTorch was built for CUDA."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv(VARIABLE, "triton")
    dispatch.triton_kernels.cache_clear()


def teardown_module() -> None:
    dispatch.triton_kernels.cache_clear()


class OnGPU:
    """As much of a tensor on a GPU as the choice of a kernel looks at."""

    device = torch.device("cuda")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def check_twins(kernels: dispatch.Kernels, home: str) -> None:
    for twin, kernel in kernels.items():
        assert twin.__name__ == kernel.function.__name__
        assert kernel.function.__module__.startswith(home)
        assert inspect.signature(twin) == inspect.signature(kernel.function)


def test_a_gpu_is_tried_before_its_kernels_are_the_default(
    nvidia: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without one, a GPU that is too old, one whose compiler fails, one that computes something else."""

    def refusal() -> str:
        dispatch.triton_refusal.cache_clear()
        return dispatch.triton_refusal()

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert refusal() == "no GPU"
        patch.setattr(torch.version, "cuda", None)
        assert refusal() == "PyTorch is not built for NVIDIA's GPUs"
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
        assert refusal() == "the GPU is older than NVIDIA's Ampere"
        patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        plain = torch.linspace
        patch.setattr(torch, "linspace", lambda *args, device: plain(*args))
        for kernel, expected in (
            (twins.swiglu, ""),
            (lambda gate, up: gate * up, "Triton computes something else than PyTorch"),
            (broken, "Triton failed: Failed to find C compiler. Please specify via CC environment variable."),
        ):
            table = {twins.swiglu: Kernel(kernel, lambda *_: True)}
            patch.setattr(dispatch, "triton_kernels", lambda table=table: table)
            assert refusal() == expected
    dispatch.triton_refusal.cache_clear()


def broken(*_: object) -> None:
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")


def test_every_kernel_has_its_twins_signature(nvidia: None) -> None:
    assert (len(dispatch.CPP), len(dispatch.triton_kernels())) == (6, 6)
    check_twins(dispatch.CPP, "whet.kernels.cpu.")
    check_twins(dispatch.triton_kernels(), "whet.kernels.triton.")


def test_a_gpu_has_kernels_where_they_are_asked_for(nvidia: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from whet.kernels.triton import layer, nf4

    x = OnGPU(torch.bfloat16)
    assert dispatch.kernel_for(twins.swiglu, x, x) is layer.swiglu
    assert dispatch.kernel_for(twins.swiglu, OnGPU(torch.float64)) is None
    assert dispatch.kernel_for(twins.rotate, x) is None  # no kernel
    packed = twins.nf4_quantize(torch.ones(64))
    moved = replace(packed, codes=OnGPU(torch.uint8))  # pyright: ignore[reportArgumentType]
    assert dispatch.kernel_for(twins.nf4_dequantize, moved, torch.float32) is nf4.nf4_dequantize
    for other in ("cpp", "eager"):
        monkeypatch.setenv(VARIABLE, other)
        assert dispatch.kernel_for(twins.swiglu, x, x) is None
    monkeypatch.setenv(VARIABLE, "auto")  # those that were tried on the GPU at hand
    for refusal, kernel in (("", layer.swiglu), ("the GPU is too old", None)):
        monkeypatch.setattr(dispatch, "triton_refusal", lambda refusal=refusal: refusal)
        assert dispatch.kernel_for(twins.swiglu, x, x) is kernel
    other_card = OnGPU(torch.bfloat16)
    other_card.device = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv(VARIABLE, "triton")
    assert dispatch.kernel_for(twins.swiglu, other_card, other_card) is None
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(UserError, match="WHET_KERNELS = 'fast': expected auto, cpp, eager or triton"):
        dispatch.kernel_for(twins.swiglu, x)


def test_kernels_that_are_asked_for_and_missing_are_an_error(
    nvidia: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = OnGPU(torch.float32)
    monkeypatch.setattr(torch.version, "cuda", None)  # a CPU or ROCm build
    with pytest.raises(UserError, match="WHET_KERNELS = triton: .*pip install triton"):
        dispatch.kernel_for(twins.swiglu, x)
    monkeypatch.setenv(VARIABLE, "auto")
    assert dispatch.kernel_for(twins.swiglu, x) is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    dispatch.triton_kernels.cache_clear()
    with pytest.raises(UserError, match="WHET_KERNELS = triton: .*pip install triton"):
        dispatch.kernel_for(twins.swiglu, x)


@pytest.mark.ci
def test_a_cpu_never_imports_triton() -> None:
    code = (
        "import sys, torch; from whet.kernels import dispatch, eager; x = torch.ones(2, 3)\n"
        "dispatch.run(eager.swiglu, x, x); dispatch.has_triton(); sys.exit('triton' in sys.modules)"
    )
    environment = os.environ | {VARIABLE: "triton"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@needs("kernels")
def test_a_cpu_kernel_takes_what_it_accepts() -> None:
    x, short, wide, flat = torch.ones(2, 16), torch.ones(2, 15), torch.ones(2, 16).double(), torch.ones(16)
    half, norm, table = x.bfloat16(), torch.ones(16), torch.ones(2, 1, 16)

    def serves(twin: Callable[..., Any], *inputs: torch.Tensor) -> bool:
        found = dispatch.kernel_for(twin, *inputs)
        assert found in (None, getattr(cpu, twin.__name__, None))
        return found is not None

    assert serves(twins.linear, x, x, norm)
    assert serves(twins.linear, half, half)
    for other in (half, short, wide):
        assert not serves(twins.linear, x, other)
    assert not serves(twins.linear, flat, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert serves(twins.linear, half, x)
    with torch.autocast("cpu", dtype=torch.float16):
        assert not serves(twins.linear, x, x)
    assert serves(twins.rms_norm, x, norm)
    assert not serves(twins.rms_norm, half, norm)
    assert serves(twins.rotate, x[:, None], table, table)
    assert not serves(twins.rotate, x[:, None], table.bfloat16(), table)
    assert serves(twins.swiglu, x, x)
    assert not serves(twins.swiglu, x, half)
    assert not serves(twins.swiglu, flat, flat)
    assert not serves(twins.decode_attention, x)  # no kernel of this form
    with dispatch.taken(Choice(frozenset({"attention"}))):
        assert not serves(twins.swiglu, x, x)
        assert dispatch.runs_cpp(x, operation="attention")


@pytest.mark.usefixtures("eager")
def test_asked_for_kernels_serve_models_head_and_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twins stand for the kernels here; tests/kernels/interpreted.py runs the kernels themselves."""
    called: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            called.append(name)
            return getattr(twins, name)(*arguments, **named)

        return run

    table = {getattr(twins, name): Kernel(counted(name), lambda *_: True) for name in WIRED}
    monkeypatch.setattr(dispatch, "triton_kernels", lambda: table)
    monkeypatch.setattr(dispatch, "KERNELS", {"cpu": dispatch.KERNELS["cuda"]})
    check_wiring(monkeypatch)
    assert set(called) == set(WIRED)
