"""Steering vectors: what is added to the residual stream behind some layers, at every token, while a model runs.

`whet steer` makes them (`whet.editing.steer`); `--policy.steering FOLDER=STRENGTH` applies them wherever a model is
asked. They are added by forward hooks: what knows no hooks, such as the compiled decoding step, then stands aside.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from whet.config import user_path
from whet.model.config import ModelConfig
from whet.model.transformer import LanguageModel
from whet.storage.commit import save_tensors
from whet.types import UserError

VECTORS = "steering.safetensors"
_PREFIX = "layer_"


@dataclass(frozen=True)
class Steering:
    """Vectors by layer, and how much of them is added.

    Attributes:
        vectors: Layer -> vector [D], float32.
        strength: Factor; 1 adds the difference that was measured, a negative one takes it away.
        name: Where it was read, for messages.
    """

    vectors: Mapping[int, torch.Tensor] = field(repr=False)
    strength: float = 1.0
    name: str = ""

    @property
    def sha256(self) -> str:
        """Name of what is added: strength and vectors."""
        found = hashlib.sha256(repr(self.strength).encode())
        for layer, vector_D in sorted(self.vectors.items()):
            found.update(f"\0{layer}\0".encode() + vector_D.numpy().tobytes())
        return found.hexdigest()

    def check(self, config: ModelConfig) -> None:
        """Refuse a model that the vectors do not fit.

        Raises:
            UserError: If it has another width, or too few layers.
        """
        width = next(iter(self.vectors.values())).shape[0]
        if width != config.hidden_size or max(self.vectors) >= config.num_layers:
            raise UserError(
                f"{self.name}: vectors of {width} numbers up to layer {max(self.vectors)}; the model has "
                f"{config.hidden_size} and layers 0 to {config.num_layers - 1}: make them with "
                "whet steer MODEL --pairs FILE --out FOLDER"
            )

    def apply(self, model: LanguageModel) -> None:
        """Add the vectors in every later pass of a model."""
        for layer, vector_D in self.vectors.items():
            added_D = (self.strength * vector_D).to(model.head_weight.device)
            model.layers[layer].register_forward_hook(partial(_add, added_D))

    def save(self, folder: Path) -> None:
        """Write the vectors; the strength is chosen where they are applied."""
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(
            {f"{_PREFIX}{layer}": vector_D.contiguous() for layer, vector_D in self.vectors.items()},
            folder / VECTORS,
        )


def _add(added_D: torch.Tensor, module: nn.Module, arguments: Any, out_ND: torch.Tensor) -> torch.Tensor:
    return out_ND + added_D.to(out_ND.dtype)


def read_steering(texts: Sequence[str]) -> list[Steering]:
    """Read vectors that are named as FOLDER or FOLDER=STRENGTH.

    Raises:
        UserError: If a folder has no vectors, or a strength is no number.
    """
    return [_read(*_parted(text)) for text in texts]


def _parted(text: str) -> tuple[Path, float]:
    """Part FOLDER=STRENGTH; a folder that has the whole name goes before."""
    whole = user_path(text)
    folder, sign, number = text.rpartition("=")
    if not sign or whole.exists():
        return whole, 1.0
    try:
        strength = float(number)
    except ValueError:
        strength = math.nan
    if not math.isfinite(strength):
        raise UserError(
            f"policy.steering: got {text!r}, expected FOLDER or FOLDER=STRENGTH, such as calm=1.5"
        )
    return user_path(folder), strength


def _read(folder: Path, strength: float) -> Steering:
    path = folder / VECTORS
    if not path.is_file():
        raise UserError(f"policy.steering: {path} is not there; expected a folder that whet steer made")
    try:
        tensors = load_file(path)
        vectors = {int(name.removeprefix(_PREFIX)): tensor.float() for name, tensor in tensors.items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); make it anew with whet steer") from None
    sizes = {tuple(vector.shape) for vector in vectors.values()}
    is_finite = all(bool(vector.isfinite().all()) for vector in vectors.values())
    if len(sizes) != 1 or len(next(iter(sizes))) != 1 or min(vectors) < 0 or not is_finite:
        raise UserError(f"{path}: expected one finite vector for each layer; make it anew with whet steer")
    return Steering(vectors, strength, str(folder))
