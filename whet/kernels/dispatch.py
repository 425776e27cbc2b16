"""The table of implementations: which kernel runs which operation on which device.

`WHET_KERNELS=eager` in the environment switches every operation to its eager twin; `auto`, the default, follows the
table, and on a CPU uses the C++ kernels that are measured to be faster than PyTorch; `cpp` uses these without
measuring; `triton` uses the GPU kernels and CUDA graphs in models, head and sampling, too. Triton is imported only when
an operation runs on a device that it serves.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch

from whet.kernels import eager
from whet.types import UserError

P = ParamSpec("P")
R = TypeVar("R")

VARIABLE = "WHET_KERNELS"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def mode() -> Literal["auto", "cpp", "eager", "triton"]:
    """Read the `WHET_KERNELS` switch.

    Raises:
        UserError: If its value is unknown.
    """
    value = os.environ.get(VARIABLE, "auto")
    if value == "auto" or value == "cpp" or value == "eager" or value == "triton":
        return value
    raise UserError(
        f"{VARIABLE} = {value!r}: expected auto, cpp, eager or triton; unset it or set one of them"
    )


def has_triton() -> bool:
    """Say whether Triton is installed and PyTorch is built for NVIDIA GPUs, the only ones that the kernels support."""
    return torch.version.cuda is not None and importlib.util.find_spec("triton") is not None


@cache
def _cuda_kernels() -> dict[Callable[..., Any], Callable[..., Any]]:
    if not has_triton():
        return {}
    from whet.kernels.triton import attention as triton_attention
    from whet.kernels.triton import layer as triton_layer
    from whet.kernels.triton import logprobs as triton_logprobs
    from whet.kernels.triton import nf4 as triton_nf4

    return {
        eager.decode_attention: triton_attention.decode_attention,
        eager.logprob_entropy: triton_logprobs.logprob_entropy,
        eager.logprob_entropy_backward_: triton_logprobs.logprob_entropy_backward_,
        eager.rms_norm: triton_layer.rms_norm,
        eager.swiglu: triton_layer.swiglu,
        eager.nf4_dequantize: triton_nf4.nf4_dequantize,
    }


# Device type -> a function that imports the device's kernels and returns them by eager twin.
KERNELS = {"cuda": _cuda_kernels}


def pick(twin: Callable[P, R], device: torch.device, dtype: torch.dtype = torch.float32) -> Callable[P, R]:
    """Return the implementation of an eager twin on a device: `pick(eager.swiglu, x.device, x.dtype)(gate, up)`.

    Args:
        twin: A function of `whet.kernels.eager`; returned itself if there is no kernel.
        device: Device of the tensors.
        dtype: Their dtype; kernels are for float16, bfloat16 and float32.
    """
    if device.type not in KERNELS or dtype not in DTYPES or mode() == "eager":
        return twin
    return cast("Callable[P, R]", KERNELS[device.type]().get(twin, twin))


def kernel_for(twin: Callable[P, R], tensor: torch.Tensor) -> Callable[P, R] | None:
    """Return the kernel of an eager twin if `WHET_KERNELS=triton` requests it; None: use the default path.

    Args:
        twin: A function of `whet.kernels.eager`.
        tensor: Its input.

    Raises:
        UserError: If it is requested on a GPU without kernels.
    """
    serves = tensor.device.type in KERNELS and tensor.dtype in DTYPES and not torch.compiler.is_compiling()
    if not serves or mode() != "triton":
        return None
    found = KERNELS[tensor.device.type]()
    if not found:
        raise UserError(
            f"{VARIABLE} = triton: PyTorch is not built for NVIDIA's GPUs, or Triton is missing: pip install triton"
        )
    return cast("Callable[P, R] | None", found.get(twin))
