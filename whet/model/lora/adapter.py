"""A LoRA adapter on a base model: merged into its weights, or applied and removed.

A merged adapter costs nothing at inference and can be trained on, but rounding makes the sum irreversible. An applied
one leaves the base's matrices untouched and adds B A x to their outputs, so that removing it restores the base bitwise,
without a second copy of the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from whet.model.gpt2 import Conv1D
from whet.model.transformer import LanguageModel
from whet.model.weights import build_model
from whet.types import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class LoRAPair:
    """The change of one weight: scaling * B A.

    Attributes:
        a_RF: float32 [R, inputs].
        b_FR: float32 [outputs, R].
        scaling: lora_alpha / R, or lora_alpha / sqrt(R) for rsLoRA.
    """

    a_RF: torch.Tensor
    b_FR: torch.Tensor
    scaling: float

    def delta(self, *, transposed: bool, device: torch.device) -> torch.Tensor:
        """Return the change as float32 [outputs, inputs], or transposed as embeddings and GPT-2 store it."""
        change = self.scaling * (self.b_FR.to(device) @ self.a_RF.to(device))
        return change.t() if transposed else change


class Adapter:
    """A LoRA adapter: pairs of matrices, and whole tensors that replace the base's.

    Attributes:
        folder: Its folder.
        base: Name or folder of the model that it was trained on; empty if not recorded.
        revision: Hub revision of that model; empty for the newest.
        sha256: Its `adapter_digest`.
        pairs: By module of the model.
        saved: Whole tensors by parameter name (biases, modules_to_save).
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        pairs: dict[str, LoRAPair],
        saved: dict[str, torch.Tensor],
    ) -> None:
        self.folder, self.pairs, self.saved = folder, pairs, saved
        self.base = str(config.get("base_model_name_or_path") or "")
        revision = str(config.get("revision") or "")
        self.revision = "" if revision == "main" else revision
        self.sha256 = adapter_digest(folder)
        self._config = config
        self._kept: dict[str, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    @property
    def is_applied(self) -> bool:
        """Whether it is currently applied to a model (a merged one is not)."""
        return bool(self._hooks or self._kept)

    def fit(self, model: LanguageModel) -> LanguageModel:
        """Check the adapter against a model.

        Args:
            model: The base.

        Returns:
            The model. If the adapter changes embeddings or head of a model that ties them, a new model with them untied
            (all other weights are shared with the given one).

        Raises:
            UserError: If a tensor does not exist in the model or has another shape, or a target has no tensors.
        """
        table = next(name for name, weight in model.named_parameters() if weight is model.head_weight)
        touched = {table.removesuffix(".weight"), "lm_head"} & (
            set(self.pairs) | {name.rpartition(".")[0] for name in self.saved}
        )
        if touched and table != "lm_head.weight":
            if self._config.get("ensure_weight_tying"):
                raise UserError(
                    f"{self.folder}: ensure_weight_tying with {sorted(touched)[0]!r} is not supported; "
                    "merge the adapter with peft, and give the result"
                )
            model = _untie(model)
        parameters = dict(model.named_parameters())
        for module, pair in self.pairs.items():
            weight = parameters.get(f"{module}.weight")
            if weight is None or weight.dim() != 2:
                raise UserError(
                    f"{self.folder}: the adapter changes {module[:80]!r}, which the model does not have"
                )
            rows, columns = weight.shape[::-1] if _is_transposed(model, module) else weight.shape
            got = (pair.b_FR.shape[0], pair.a_RF.shape[1])
            if got != (rows, columns):
                raise UserError(
                    f"{self.folder}: {module[:80]!r} has a change of shape {list(got)}, the model {[rows, columns]}: "
                    "another base?"
                )
        for name, tensor in self.saved.items():
            want = parameters[name].shape if name in parameters else None
            if tensor.shape != want:
                raise UserError(
                    f"{self.folder}: tensor {name[:80]!r} has shape {list(tensor.shape)}, the model "
                    f"{'none of that name' if want is None else list(want)}: another base?"
                )
        self._check_targets(model)
        return model

    def merge(self, model: LanguageModel) -> None:
        """Add the changes, computed in float32, to the model's weights permanently.

        Args:
            model: The model from `fit`; changed in place.
        """
        for parameter, change in self._values(model, [*self.saved, *self.pairs]):
            with torch.no_grad():
                parameter.copy_(change())

    def apply(self, model: LanguageModel) -> None:
        """Enable the adapter, without touching the base's matrices.

        Only changed tensors that are not a module's own weight matrix are copied: embeddings, head, biases, norms.

        Args:
            model: The model from `fit`. For inference only: the change is not trained.

        Raises:
            ValueError: If it is enabled.
        """
        if self.is_applied:
            raise ValueError(f"{self.folder}: the adapter is already applied")
        live = [name for name in self.pairs if _is_called(model, name) and f"{name}.weight" not in self.saved]
        whole = [name for name in [*self.saved, *self.pairs] if name not in live]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter, value in self._values(model, whole):
            self._kept.setdefault(names[id(parameter)], parameter.data)
            parameter.data = value()
            torch.autograd.graph.increment_version(parameter)
        for name in live:
            pair = self.pairs[name]
            a_RF, b_FR = pair.a_RF.to(model.head_weight.device), pair.b_FR.to(model.head_weight.device)
            hook = _added(a_RF, b_FR, pair.scaling)
            self._hooks.append(model.get_submodule(name).register_forward_hook(hook))

    def remove(self, model: LanguageModel) -> None:
        """Disable the adapter: the model is bitwise as before `apply`.

        Raises:
            ValueError: If it is disabled.
        """
        if not self.is_applied:
            raise ValueError(f"{self.folder}: the adapter is not applied")
        while self._hooks:
            self._hooks.pop().remove()
        for name, tensor in self._kept.items():
            parameter = model.get_parameter(name)
            parameter.data = tensor
            torch.autograd.graph.increment_version(parameter)
        self._kept.clear()

    @contextmanager
    def off(self, model: LanguageModel) -> Iterator[None]:
        """Disable an applied adapter within a `with` block."""
        self.remove(model)
        try:
            yield
        finally:
            self.apply(model)

    def _values(
        self, model: LanguageModel, names: Sequence[str]
    ) -> Iterator[tuple[nn.Parameter, Callable[[], torch.Tensor]]]:
        """Yield parameters and functions that compute their new values: whole tensors first, then changes of
        modules."""
        for name in names:
            if name in self.saved:
                parameter = model.get_parameter(name)
                yield parameter, lambda p=parameter, name=name: self.saved[name].to(p)
            else:
                parameter, transposed = model.get_parameter(f"{name}.weight"), _is_transposed(model, name)

                def changed(
                    p: nn.Parameter = parameter, name: str = name, t: bool = transposed
                ) -> torch.Tensor:
                    return (p.detach() + self.pairs[name].delta(transposed=t, device=p.device)).to(p.dtype)

                yield parameter, changed

    def _check_targets(self, model: LanguageModel) -> None:
        """Refuse an adapter that lacks tensors for a module that it lists (a half-written file)."""
        targets, config = self._config.get("target_modules"), self._config
        if (
            not isinstance(targets, list)
            or config.get("exclude_modules")
            or config.get("layers_to_transform") is not None
        ):
            return
        for name, module in model.named_modules():
            is_listed = any(name == target or name.endswith(f".{target}") for target in targets)
            if is_listed and isinstance(module, nn.Linear | Conv1D | nn.Embedding) and name not in self.pairs:
                raise UserError(f"{self.folder}: {CONFIG} lists {name!r}, {WEIGHTS} has no tensors for it")


def adapter_digest(folder: Path) -> str:
    """Return the SHA-256 of an adapter's two files, configuration first: scaling is part of its identity."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _is_transposed(model: LanguageModel, module: str) -> bool:
    return isinstance(model.get_submodule(module), Conv1D | nn.Embedding)


def _is_called(model: LanguageModel, module: str) -> bool:
    """Say whether a module multiplies by its own weight: embedding tables and the head are used from outside."""
    return module != "lm_head" and isinstance(model.get_submodule(module), nn.Linear | Conv1D)


def _added(a_RF: torch.Tensor, b_FR: torch.Tensor, scaling: float) -> Callable[..., torch.Tensor]:
    """Return the hook that adds scaling * B A x, computed in float32, to a module's output."""

    def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output_NF: torch.Tensor) -> torch.Tensor:
        change_NF = F.linear(F.linear(inputs[0].float(), a_RF), b_FR) * scaling
        return (output_NF.float() + change_NF).to(output_NF.dtype)

    return hook


def _untie(model: LanguageModel) -> LanguageModel:
    """Return the model with a separate head equal to the embedding table; all other tensors are shared."""
    with torch.device("meta"):
        untied = build_model(replace(model.config, tie_embeddings=False))
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}
    untied.load_state_dict(tensors | {"lm_head.weight": model.head_weight.detach().clone()}, assign=True)
    untied.num_valid_tokens, untied.checkpoint_layers = model.num_valid_tokens, model.checkpoint_layers
    untied.sampling_defaults = model.sampling_defaults
    return untied.requires_grad_(True).eval()
