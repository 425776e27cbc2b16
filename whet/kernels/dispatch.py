"""Which implementation runs an operation here: a C++ kernel, a Triton kernel, or its eager twin in plain PyTorch.

`run(eager.swiglu, gate, up)` runs one operation; `runs_cpp(x)` says whether larger parts that have no twin (attention,
the head, a whole decoding step) run in C++. `WHET_KERNELS` in the environment decides: `auto`, the default, takes the
C++ kernels that were measured to be as fast as PyTorch on this CPU, and on a GPU the Triton kernels, with CUDA graphs
of decoding steps, where they run; `cpp` takes all C++ kernels without measuring, and PyTorch on a GPU; `triton` takes
the GPU's, or says why it cannot; `eager` takes no kernel.

`whet.generate.kernel_speed` measures and sets the choice once per process, before the first model computes anything: a
sampler and a trainer with different choices would not agree to the last bit. Until then all C++ kernels are used.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch

from whet.kernels import eager
from whet.kernels.cpu import build
from whet.kernels.cpu import ops as cpu
from whet.kernels.mode import VARIABLE, mode
from whet.types import UserError

P = ParamSpec("P")
R = TypeVar("R")

Operation = Literal["product", "attention", "decode"]
OPERATIONS: tuple[Operation, ...] = ("product", "attention", "decode")
"""Products with norms, gates and the head; attention; a whole decoding step in one call, which needs the other two."""
TIE = 0.95
"""For large float32 products both are near the machine's peak; timing cannot resolve a smaller difference."""
ALONE = 1.25
"""Attention alone is a small part of a training step: beside PyTorch's products its gain is lost in the step below this
(1.12 in attention was 0.98 to 1.05 in a step, `bench/isa.py`)."""
PLAUSIBLE: Mapping[Operation, float] = {"product": 20.0, "attention": 20.0, "decode": 50.0}
"""Largest ratios that a CPU can really have; on a busy machine 176 was measured. A decoding step of a small model is
13 times as fast here: in PyTorch most of its time is Python's."""
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Choice:
    """The operations that run in C++, and their measured speed.

    Attributes:
        used: Operations that run on the C++ kernels.
        ratios: Speed over PyTorch's by operation, where it is known: empty if nothing was measured.
        note: What else a user should know about it.
    """

    used: frozenset[Operation] = frozenset(OPERATIONS)
    ratios: Mapping[Operation, float] = field(default_factory=dict)
    note: str = ""

    @classmethod
    def of(cls, ratios: Mapping[Operation, float]) -> Choice:
        """Use the operations that are at least as fast as PyTorch, where a step gains by it."""
        used: set[Operation] = {name for name, ratio in ratios.items() if ratio >= TIE}
        # The decoding step has its own products and attention: with PyTorch's in the trainer, the bits would differ.
        if not {"product", "attention"} <= used:
            used.discard("decode")
        if used == {"attention"} and ratios["attention"] < ALONE:
            used.clear()
        return cls(frozenset(used), plausible(ratios))


def plausible(ratios: object) -> dict[Operation, float]:
    """Return the measurements that can be true: positive numbers that are not absurdly large."""
    if not isinstance(ratios, Mapping):
        return {}
    found: dict[Operation, float] = {}
    for name, largest in PLAUSIBLE.items():
        value = ratios.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= largest:
            found[name] = float(value)
    return found


EAGER = "eager"
"""Identity of PyTorch alone, with which earlier versions put the reason for it."""
_current: Choice | None = None


def current() -> Choice | None:
    """Return this process's choice; None if it is not made yet."""
    return _current


def take(choice: Choice | None) -> None:
    """Set this process's choice."""
    global _current
    _current = choice


@contextmanager
def taken(choice: Choice) -> Iterator[None]:
    """Use another choice within this context, for measurements and tests."""
    before = _current
    take(choice)
    try:
        yield
    finally:
        take(before)


def runs_cpp(*tensors: torch.Tensor, operation: Operation = "product") -> bool:
    """Say whether an operation runs in C++: on the CPU, in float32 or bfloat16, last axis a multiple of 16."""
    # A choice counts for the whole process: with two, sampler and trainer would differ in the last bits.
    if torch.compiler.is_compiling() or not _uses(operation):
        return False
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.dtype not in cpu.DTYPES or tensor.shape[-1] % cpu.QUANTUM:
            return False
    return build.library() is not None


def _uses(operation: Operation) -> bool:
    return _current is None or operation in _current.used


class Kernel(NamedTuple):
    """A kernel with the arguments and the result of its eager twin.

    Attributes:
        function: The kernel.
        accepts: Says whether it computes with these first arguments.
    """

    function: Callable[..., Any]
    accepts: Callable[..., bool]


Kernels = Mapping[Callable[..., Any], Kernel]
"""Kernels by eager twin."""


# Beyond device, width and dtype, each kernel refuses what its C++ was not written for; the twin then runs.


def _multiplies(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> bool:
    if x.dim() != 2 or not runs_cpp(x, weight):
        return False
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") in cpu.DTYPES
    return x.dtype == weight.dtype


def _adds(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *_: Any) -> bool:
    is_plain = x.dim() == 2 and a.dtype == b.dtype == torch.float32 and y.dtype in cpu.DTYPES
    return is_plain and runs_cpp(x, a)


def _multiplies_all(x: torch.Tensor, parts: Sequence[eager.Adapted]) -> bool:
    if torch.is_autocast_enabled("cpu"):
        return False
    return all(
        _multiplies(x, part.weight)
        and part.a.dtype == part.b.dtype == torch.float32
        and not (part.weight.requires_grad and torch.is_grad_enabled())
        and (part.bias is None or (part.bias.dtype == x.dtype and not part.bias.requires_grad))
        for part in parts
    )


def _normalises(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> bool:
    return x.dtype == weight.dtype and runs_cpp(x, weight)


def _rotates(x: torch.Tensor, cos: torch.Tensor, *_: Any) -> bool:
    return cos.dtype == torch.float32 and runs_cpp(x)


def _gates(gate: torch.Tensor, up: torch.Tensor) -> bool:
    return gate.dim() == 2 and gate.dtype == up.dtype and runs_cpp(gate, up)


CPP: Kernels = {
    eager.linear: Kernel(cpu.linear, _multiplies),
    eager.low_rank: Kernel(cpu.low_rank, _adds),
    eager.products: Kernel(cpu.products, _multiplies_all),
    eager.rms_norm: Kernel(cpu.rms_norm, _normalises),
    eager.rotate: Kernel(cpu.rotate, _rotates),
    eager.swiglu: Kernel(cpu.swiglu, _gates),
}


TRITON_CAPABILITY = (8, 0)
"""Ampere, whose tensor cores multiply as the kernels do; they were measured on a Hopper (docs/results/gpu.md)."""


def has_triton() -> bool:
    """Say whether Triton is installed and PyTorch is built for NVIDIA GPUs, the only ones that the kernels support."""
    return torch.version.cuda is not None and importlib.util.find_spec("triton") is not None


@cache
def triton_kernels() -> Kernels:
    """Import the Triton kernels and return them; empty where they cannot run."""
    if not has_triton():
        return {}
    from whet.kernels.triton import attention, layer, logprobs, nf4

    def accepts(x: torch.Tensor | eager.NF4, *_: Any) -> bool:
        place = x.codes.device if isinstance(x, eager.NF4) else x.device
        # Triton launches on the current device, whatever the tensors' is.
        is_here = place.index is None or place.index == torch.cuda.current_device()
        return is_here and (isinstance(x, eager.NF4) or x.dtype in TRITON_DTYPES)

    return {
        eager.decode_attention: Kernel(attention.decode_attention, accepts),
        eager.logprob_entropy: Kernel(logprobs.logprob_entropy, accepts),
        eager.logprob_entropy_backward_: Kernel(logprobs.logprob_entropy_backward_, accepts),
        eager.rms_norm: Kernel(layer.rms_norm, accepts),
        eager.swiglu: Kernel(layer.swiglu, accepts),
        eager.nf4_dequantize: Kernel(nf4.nf4_dequantize, accepts),
    }


@cache
def triton_refusal() -> str:
    """Return why the Triton kernels do not run on this machine's GPU; '' if they do: one is compiled and tried."""
    if torch.version.cuda is None:
        return "PyTorch is not built for NVIDIA's GPUs"
    if not has_triton():
        return "Triton is not installed"
    if not torch.cuda.is_available():
        return "no GPU"
    if torch.cuda.get_device_capability() < TRITON_CAPABILITY:
        return "the GPU is older than NVIDIA's Ampere"
    try:
        gate, up = torch.linspace(-2, 2, 64, device="cuda").view(2, 2, 16)
        difference = (triton_kernels()[eager.swiglu].function(gate, up) - eager.swiglu(gate, up)).abs().max()
    except Exception as error:  # no C compiler, a driver that is too old: each has its own class
        return f"Triton failed: {(str(error).strip().splitlines() or [type(error).__name__])[-1][:200]}"
    return "" if float(difference) < 1e-5 else "Triton computes something else than PyTorch"


def uses_triton() -> bool:
    """Say whether the Triton kernels run on this machine's GPU.

    Raises:
        UserError: If `WHET_KERNELS=triton` requests kernels on a GPU that has none.
    """
    chosen = mode()
    if chosen == "triton" and not triton_kernels():
        raise UserError(
            f"{VARIABLE} = triton: PyTorch is not built for NVIDIA's GPUs, or Triton is missing: pip install triton"
        )
    return chosen == "triton" or (chosen == "auto" and not triton_refusal())


KERNELS: dict[str, Callable[[], Kernels]] = {
    "cpu": lambda: CPP,
    "cuda": lambda: triton_kernels() if uses_triton() else {},
}
"""The kernels of each type of device; Triton is imported only when an operation runs on a GPU."""


def kernel_for(twin: Callable[P, R], *inputs: Any) -> Callable[P, R] | None:
    """Return the kernel that runs an operation on these inputs; None if PyTorch does.

    Args:
        twin: The operation: a function of `whet.kernels.eager`.
        inputs: Its first arguments; the first one says where it runs.

    Raises:
        UserError: If `WHET_KERNELS=triton` requests kernels on a GPU that has none.
    """
    device = inputs[0].device.type
    # A compiler fuses the twin's operations with their neighbours; it cannot look into a kernel.
    if torch.compiler.is_compiling() or device not in KERNELS:
        return None
    kernel = KERNELS[device]().get(twin)
    return kernel.function if kernel is not None and kernel.accepts(*inputs) else None


def run(twin: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run an operation on its kernel, or on its eager twin: `run(eager.swiglu, gate, up)`."""
    return (kernel_for(twin, *args) or twin)(*args, **kwargs)


def describe(choice: Choice | None = None) -> str:
    """Describe the CPU kernels in a few words: `C++ avx2, 1.4x PyTorch` or `PyTorch (C++ avx2 was 0.8x)`.

    Args:
        choice: Default: this process's choice.
    """
    if build.library() is None:
        return f"PyTorch ({build.reason().removeprefix('eager: ')})"
    choice = choice or _current or Choice()
    return _describe(choice) + (f"; {choice.note}" if choice.note else "")


def _describe(choice: Choice) -> str:
    name, ratios = f"C++ {build.instruction_set()}", choice.ratios
    if failed := build.failed():
        name += f" (not built with {failed})"
    if not choice.used:
        if not ratios:
            return f"PyTorch ({name} has no kernels for this shape)"
        if max(ratios.values()) < TIE:
            return f"PyTorch ({name} was {_mean(ratios.values()):.1f}x)"
        parts = ", ".join(f"{operation} {ratio:.1f}x" for operation, ratio in ratios.items())
        return f"PyTorch ({name}: {parts}, too little in a whole step)"
    speeds = [ratios[operation] for operation in choice.used if operation in ratios]
    text = f"{name}, {_mean(speeds):.1f}x PyTorch" if speeds else name
    for operation in OPERATIONS:
        if operation not in choice.used:
            text += f"; {operation}: PyTorch"
            if operation in ratios:
                why = ", but needs the others" if ratios[operation] >= TIE else ""
                text += f" (C++ was {ratios[operation]:.1f}x{why})"
    return text


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.exp(sum(map(math.log, numbers)) / len(numbers))


def identity() -> str:
    """Identify what the last bits of a result depend on: the built library and the operations in use.

    Without a library that is 'eager', for whatever reason there is none.
    """
    if build.library() is None:
        return EAGER
    left_out = [name for name in OPERATIONS if not _uses(name)]
    return build.reason() + (f" without {', '.join(left_out)}" if left_out else "")


def record() -> dict[str, Any]:
    """Return the choice as a run's environment.json stores it under `kernels_used`."""
    return {
        "library": build.reason(),
        "operations": [name for name in OPERATIONS if build.library() and _uses(name)],
        "ratios": {} if _current is None else dict(_current.ratios),
    }


def restore(folder: Path) -> None:
    """Take the choice of a run's first start, so that it resumes bitwise.

    Args:
        folder: Run folder; ignored if it has no environment.json, or another library has been built since (the
            checkpoint's record then shows that).
    """
    if build.library() is None:
        return
    try:
        stored = json.loads((folder / "environment.json").read_text())["kernels_used"]
        names, library = frozenset(stored["operations"]), stored["library"]
        ratios = plausible(stored.get("ratios"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    if library != build.reason() or not names <= set(OPERATIONS):
        return
    is_other = mode() == "cpp" and len(names) < len(OPERATIONS)
    take(Choice(names, ratios, f"as when the run began, not {VARIABLE}=cpp" if is_other else ""))
