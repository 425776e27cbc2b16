"""Which implementation runs where, seen without a GPU."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from wiring_cases import check_wiring

from whet.kernels import dispatch, eager
from whet.kernels import eager as twins
from whet.types import UserError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that PyTorch was built for CUDA."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    dispatch._cuda_kernels.cache_clear()


def teardown_module() -> None:
    dispatch._cuda_kernels.cache_clear()


def test_every_kernel_has_its_twins_signature(nvidia: None) -> None:
    table = dispatch._cuda_kernels()
    assert len(table) == 8
    for twin, kernel in table.items():
        assert twin.__name__ == kernel.__name__
        assert kernel.__module__.startswith("whet.kernels.triton.")
        assert inspect.signature(twin) == inspect.signature(kernel)


def test_pick(nvidia: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from whet.kernels.triton import layer as triton_layer

    assert dispatch.pick(eager.swiglu, CUDA) is triton_layer.swiglu
    assert dispatch.pick(eager.swiglu, CUDA, torch.bfloat16) is triton_layer.swiglu
    assert dispatch.pick(eager.swiglu, CUDA, torch.float64) is eager.swiglu
    assert dispatch.pick(eager.swiglu, CPU) is eager.swiglu
    assert dispatch.pick(eager.nf4_quantize, CUDA) is eager.nf4_quantize  # no kernel: its own answer
    monkeypatch.setenv(dispatch.VARIABLE, "eager")
    assert dispatch.pick(eager.swiglu, CUDA) is eager.swiglu
    monkeypatch.setenv(dispatch.VARIABLE, "fast")
    with pytest.raises(UserError, match="WHET_KERNELS = 'fast': expected auto, cpp, eager or triton"):
        dispatch.pick(eager.swiglu, CUDA)


def test_without_triton_or_nvidia_all_is_eager(nvidia: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert dispatch.pick(eager.swiglu, CUDA) is eager.swiglu
    monkeypatch.undo()
    dispatch._cuda_kernels.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", None)  # a CPU or ROCm build
    assert dispatch.pick(eager.swiglu, CUDA) is eager.swiglu


def test_a_cpu_never_imports_triton() -> None:
    code = (
        "import sys, torch; from whet.kernels import dispatch, eager; x = torch.ones(2, 3)\n"
        "dispatch.pick(eager.swiglu, x.device)(x, x); dispatch.has_triton(); sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.usefixtures("eager")
def test_asked_for_kernels_serve_models_head_and_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twins stand for the kernels here; tests/kernels/interpreted.py runs the kernels themselves."""
    called: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            called.append(name)
            return getattr(twins, name)(*arguments, **named)

        return run

    names = ("rms_norm", "swiglu", "decode_attention", "logprob_entropy", "logprob_entropy_backward_")
    table = {getattr(twins, name): counted(name) for name in names}
    monkeypatch.setattr(dispatch, "KERNELS", {"cpu": lambda: table})
    check_wiring(monkeypatch)
    assert set(called) == set(names)


def test_kernels_that_are_asked_for_and_missing_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 16)
    monkeypatch.setattr(dispatch, "KERNELS", {"cpu": dict})
    assert dispatch.kernel_for(twins.swiglu, x) is None
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    with pytest.raises(UserError, match="WHET_KERNELS = triton: .*pip install triton"):
        dispatch.kernel_for(twins.swiglu, x)
    assert dispatch.kernel_for(twins.swiglu, x.double()) is None
    monkeypatch.setattr(dispatch, "KERNELS", {})
    assert dispatch.kernel_for(twins.swiglu, x) is None, "a CPU goes on as always"
