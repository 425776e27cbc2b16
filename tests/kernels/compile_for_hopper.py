"""Compile every Triton kernel for an H100/H200 (sm_90) as its wrapper launches it: needs no GPU, only ptxas.

A program of its own, because Triton decides at import whether it interprets. Its argument is the dtype; it prints a
line for each compiled kernel, with registers and shared memory after `--resources`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from whet.kernels import eager
from whet.kernels.triton import attention as triton_attention
from whet.kernels.triton import layer as triton_layer
from whet.kernels.triton import logprobs as triton_logprobs
from whet.kernels.triton import nf4 as triton_nf4

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Driver:
    """Stands for a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def resources(kernel: Any) -> str:
    """Registers, stack (spills) and shared memory of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = text.strip().splitlines()[-1]
    return f"{line.strip()} launch-shared:{kernel.metadata.shared} warps:{kernel.metadata.num_warps}"


def main() -> None:
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        print(self.__name__, "compiled", resources(kernel) if "--resources" in sys.argv else "", flush=True)
        return kernel

    JITFunction.run = compile_only  # pyright: ignore[reportAttributeAccessIssue]
    triton.runtime.driver.set_active(Driver())  # pyright: ignore[reportArgumentType]
    dtype = getattr(torch, sys.argv[1])
    make = {"dtype": dtype}
    for rep, channels in ((2, 128), (7, 64)):
        cache = torch.zeros(4, 2, 1024, channels, **make)
        q = torch.zeros(4, 2 * rep, channels, **make)
        triton_attention.decode_attention(q, cache, cache, torch.ones(4, dtype=torch.int64))
    x, weight = torch.zeros(8, 1024, **make, requires_grad=True), torch.ones(1024, **make)
    y, total = triton_layer.rms_norm(x, weight, 1e-6, x)
    (y.sum() + total.sum()).backward()
    triton_layer.rms_norm(x, weight, 1e-6)
    gate = torch.zeros(8, 3072, **make, requires_grad=True)
    triton_layer.swiglu(gate, gate).sum().backward()
    for double in (False, True):
        triton_nf4.nf4_dequantize(eager.nf4_quantize(torch.ones(64, 64), double=double), dtype)
    logits, ids = torch.zeros(4, 151_936), torch.zeros(4, dtype=torch.int64)
    logprob, normaliser, entropy = triton_logprobs.logprob_entropy(logits, ids)
    triton_logprobs.logprob_entropy_backward_(logits, ids, normaliser, entropy, logprob, entropy)


if __name__ == "__main__":
    main()
