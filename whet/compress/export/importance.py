"""Importance of a matrix's inputs, by which llama.cpp's quantiser weighs errors (an imatrix): measured, or read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from whet.compress.export import gguf
from whet.compress.export.parity import greedy
from whet.generate.policy import Policy
from whet.model.gpt2 import Conv1D
from whet.model.parts import Linear
from whet.types import UserError

Importance = dict[str, np.ndarray]
"""Mean square of each input, float32, by the matrix's name in GGUF; of experts one row after the other."""
SUMS, COUNTS = ".in_sum2", ".counts"
"""Ends of the names of an imatrix file's tensors (llama.cpp's tools/imatrix)."""


@torch.no_grad()
def measure(policy: Policy, prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> Importance:
    """Measure the inputs of a model's matrices on prompts and its own greedy answers.

    Experts' matrices are left out: llama.cpp rounds those without weights. The head's input is the last norm's output.

    Args:
        policy: The policy, its adapter applied.
        prompts: Tokens of each prompt.
        max_new_tokens: Longest answer.
    """
    model = policy.model
    sums: dict[str, torch.Tensor] = {}
    rows = 0

    def add(label: str, x: torch.Tensor) -> None:
        squares = x.reshape(-1, x.shape[-1])[:rows].float().square().sum(0).cpu()
        sums[label] = squares if label not in sums else sums[label] + squares

    def before(label: str, _: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        add(label, given[0])

    def behind(label: str, _: torch.nn.Module, __: object, out: torch.Tensor) -> None:
        add(label, out)

    labels = gguf.labels(model)
    hooks = [
        module.register_forward_pre_hook(partial(before, label))
        for name, module in model.named_modules()
        if isinstance(module, Linear | Conv1D)
        and (label := labels.get(f"{name}.weight")) not in (None, gguf.HEAD)
    ]
    last = model.get_submodule("transformer.ln_f" if model.config.family == "gpt2" else "model.norm")
    head = gguf.HEAD if gguf.HEAD in labels.values() else gguf.EMBEDDINGS
    hooks.append(last.register_forward_hook(partial(behind, head)))
    total = 0
    try:
        for ids, said in zip(prompts, greedy(policy, prompts, max_new_tokens), strict=True):
            text = torch.tensor([[*ids, *said]], device=policy.device)
            rows = text.shape[1]  # those that pad a pass come after them
            total += rows
            model.logits(text)
    finally:
        for hook in hooks:
            hook.remove()
    return {label: (squares / total).numpy() for label, squares in sums.items()}


def read(path: Path) -> Importance:
    """Read an imatrix file of llama.cpp in GGUF.

    Raises:
        UserError: If it is none.
    """
    package = gguf.import_gguf()
    found: Importance = {}
    try:
        tensors = {tensor.name: tensor.data for tensor in package.GGUFReader(str(path)).tensors}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise UserError(
            f"imatrix {path}: not a readable GGUF file ({str(error)[:100]}); write one with llama-imatrix, or give "
            "--imatrix auto"
        ) from None
    for name in tensors:
        counts = tensors.get(name.removesuffix(SUMS) + COUNTS)
        if name.endswith(SUMS) and counts is not None:
            counts = counts.reshape(-1, 1)
            sums = tensors[name].reshape(len(counts), -1)
            # An expert that no token went to weighs all its inputs alike, as in llama.cpp.
            mean = np.where(counts > 0, sums / np.maximum(counts, 1), 1.0)
            found[name.removesuffix(SUMS)] = np.ascontiguousarray(mean.reshape(-1), dtype=np.float32)
    if not found:
        raise UserError(
            f"imatrix {path}: no tensors named *{SUMS} and *{COUNTS} in it; write it with llama-imatrix"
        )
    return found


def check(importance: Mapping[str, np.ndarray], shapes: Mapping[str, torch.Size], where: str) -> None:
    """Refuse what is not of this model: matrices that it has not, rows of another length, numbers that are none.

    Args:
        importance: The importance.
        shapes: Shape of each matrix by its name in GGUF.
        where: Its file.
    """
    for name, values in importance.items():
        if name not in shapes:
            raise UserError(
                f"imatrix {where}: {name[:80]!r} is no matrix of this model; measure it on this one"
            )
        shape = shapes[name]
        want = shape[-1] * (shape[0] if len(shape) == 3 else 1)
        if values.size != want:
            raise UserError(f"imatrix {where}: {name[:80]!r} has {values.size} numbers, expected {want}")
        if not np.isfinite(values).all():
            raise UserError(f"imatrix {where}: {name[:80]!r} has numbers that are not finite")
