"""A LoRA adapter that was read: applied beside a base's weights, taken off again, or merged into them.

An applied adapter runs the code that trained it (`whet.model.lora.side`) and leaves the base's matrices untouched:
taking it off restores the base bitwise, without a second copy of the model. A merged one costs nothing at inference,
but rounding makes the sum irreversible.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from whet.model.config import TOWER, ModelConfig
from whet.model.experts import ExpertWeights
from whet.model.gpt2 import Conv1D
from whet.model.lora.side import EXPERT_SIDES, Beside, Target, make_side, targets_of
from whet.model.names import module_name, own_names
from whet.model.quant import Kind, packed_parts
from whet.model.transformer import SIDE_NAMES, LanguageModel
from whet.model.weights import build_model
from whet.types import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXPERT_ENDS = tuple(f".experts.{name}" for name in EXPERT_SIDES)
"""Of names of the experts' parameters."""


@dataclass(frozen=True, slots=True)
class LoRAPair:
    """The change of one weight: scaling * B A, and with DoRA the lengths of its rows.

    Attributes:
        a_RD: float32 [R, inputs]; of experts [R x E, inputs].
        b_FR: float32 [outputs, R]; of experts [outputs, R x E].
        alpha: lora_alpha.
        scaling: lora_alpha / R, or lora_alpha / sqrt(R) for rsLoRA.
        magnitude_F: DoRA's lengths of the rows [outputs]; None for plain LoRA.
    """

    a_RD: torch.Tensor
    b_FR: torch.Tensor
    alpha: float
    scaling: float
    magnitude_F: torch.Tensor | None = None

    def changed(self, weight: torch.Tensor, *, transposed: bool) -> torch.Tensor:
        """Return a weight with the change, in float32 (float64 for a float64 weight), in the weight's layout.

        Args:
            weight: [outputs, inputs], of experts [E, outputs, inputs].
            transposed: Whether its last two axes are the other way round, as embeddings and GPT-2 store it.
        """
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        a, b = (tensor.to(weight.device, wide) for tensor in (self.a_RD, self.b_FR))
        if weight.dim() == 3:
            count = weight.shape[0]
            change = b.view(b.shape[0], -1, count).permute(2, 0, 1) @ a.view(count, -1, a.shape[1])
        else:
            change = b @ a
        whole = weight.to(wide) + self.scaling * (change.mT if transposed else change)
        if self.magnitude_F is None:
            return whole
        axis = 0 if transposed else 1
        lengths = torch.linalg.vector_norm(whole, dim=axis)
        return whole * (self.magnitude_F.to(weight.device, wide) / lengths).unsqueeze(axis)


class Lost(NamedTuple):
    """What rounding the sum took from a merged adapter.

    Attributes:
        share: Norm of the rounding errors over the norm of the adapter's change; 0 where nothing was lost.
        worst: The largest such share of one weight.
        name: That weight.
    """

    share: float
    worst: float
    name: str

    def __str__(self) -> str:
        worst = f"most in {self.name}: {self.worst:.2%}"
        return f"rounding the merged weights lost {self.share:.2%} of the change ({worst})"


class Adapter:
    """A LoRA adapter: pairs of matrices, and whole tensors that replace the base's.

    Attributes:
        folder: Its folder.
        base: Name or folder of the model that it was trained on; empty if not recorded.
        revision: Hub revision of that model; empty for the newest.
        sha256: Its `adapter_digest`.
        quantize: How the model that it was trained on was rounded as it was loaded; 'none' if it was not.
        base_sha256: Hash of that model's files; None where it was not noted.
        config: Content of its adapter_config.json.
        pairs: By module; of experts by parameter. The names are transformers', after `rename` whet's own.
        saved: Whole tensors by parameter name (biases, modules_to_save), named alike.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        pairs: dict[str, LoRAPair],
        saved: dict[str, torch.Tensor],
        quantize: Kind | Literal["none"] = "none",
        base_sha256: str | None = None,
        parts: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.folder, self.pairs, self.saved = folder, pairs, saved
        self._parts = dict(parts or {})
        self._listed = set(pairs)
        self.quantize: Kind | Literal["none"] = quantize
        self.base_sha256 = base_sha256
        self.base = str(config.get("base_model_name_or_path") or "")
        revision = str(config.get("revision") or "")
        self.revision = "" if revision == "main" else revision
        self.sha256 = adapter_digest(folder)
        self.config = config
        self._kept: dict[str, torch.Tensor] = {}
        self._sides: list[tuple[Target, Beside]] = []

    @property
    def is_applied(self) -> bool:
        """Whether it is currently applied to a model (a merged one is not)."""
        return bool(self._sides or self._kept)

    @property
    def sides(self) -> list[tuple[Target, Beside]]:
        """What stands beside the layers of the model to which it is applied."""
        return list(self._sides)

    def rename(self, config: ModelConfig) -> None:
        """Give pairs and whole tensors whet's own names; what is one module there and several here is split by rows.

        Args:
            config: Shape of the base. Names that are whet's already stay.

        Raises:
            UserError: If a tensor has other rows than what it stands for, or two stand for one.
        """
        pairs: dict[str, LoRAPair] = {}
        saved: dict[str, torch.Tensor] = {}
        for module, pair in self.pairs.items():
            is_expert = module.endswith(EXPERT_ENDS)
            own = own_names(module if is_expert else f"{module}.weight", config)
            names = [name if is_expert else name.removesuffix(".weight") for name in own] or [module]
            parts = [pair] if len(names) == 1 else self._split(module, pair, names, rows_of(config, names))
            for name, part in zip(names, parts, strict=True):
                if part is not None:
                    self._put(pairs, name, part)
        for name, tensor in self.saved.items():
            names = own_names(name, config) or (name,)
            rows = [len(tensor)]
            if len(names) > 1:
                rows = rows_of(config, [own.removesuffix(".weight") for own in names])
            if sum(rows) != len(tensor):
                raise UserError(f"{self.folder}: {name[:80]!r} has {len(tensor)} rows, the model {sum(rows)}")
            for own, part in zip(names, tensor.split(rows), strict=True):
                self._put(saved, own, part)
        self.pairs, self.saved, self._parts = pairs, saved, {}

    def _put(self, found: dict[str, Any], name: str, value: object) -> None:
        if name in found:
            raise UserError(
                f"{self.folder}: {name[:80]!r} occurs twice, by whet's own name and by transformers'"
            )
        found[name] = value

    def _split(
        self, module: str, pair: LoRAPair, names: Sequence[str], rows: list[int]
    ) -> list[LoRAPair | None]:
        """Return the changes of the matrices that a module has one below the other; None for one without a change.

        An adapter that whet wrote has each one's own rows of A and columns of B, which are taken apart again; any other
        has its A in common.
        """
        if sum(rows) != pair.b_FR.shape[0]:
            raise UserError(
                f"{self.folder}: {module[:80]!r} has a change of {pair.b_FR.shape[0]} rows, the model {sum(rows)}: "
                "another base?"
            )
        bs = pair.b_FR.split(rows)
        lengths = [None] * len(rows) if pair.magnitude_F is None else pair.magnitude_F.split(rows)
        own, rank = self._parts.get(module), pair.a_RD.shape[0]
        ends = [name.rpartition(".")[2] for name in names]
        if own is None:
            return [replace(pair, b_FR=b, magnitude_F=m) for b, m in zip(bs, lengths, strict=True)]
        if not own or not set(own) <= set(ends) or rank % len(own):
            raise UserError(f"{self.folder}: {module[:80]!r} of rank {rank} is not made of {str(own)[:80]}")
        size = rank // len(own)
        share = size / rank
        alpha = pair.alpha * (math.sqrt(share) if self.config.get("use_rslora") else share)
        found: list[LoRAPair | None] = []
        for end, b, m in zip(ends, bs, lengths, strict=True):
            if end not in own:
                found.append(None)
                continue
            place = slice(own.index(end) * size, (own.index(end) + 1) * size)
            found.append(LoRAPair(pair.a_RD[place], b[:, place], alpha, pair.scaling, m))
        return found

    def fit(self, model: LanguageModel) -> LanguageModel:
        """Check the adapter against a model, and take whet's own names (`rename`).

        Args:
            model: The base.

        Returns:
            The model. If the adapter changes embeddings or head of a model that ties them, a new model with them untied
            (all other weights are shared with the given one).

        Raises:
            UserError: If a tensor does not exist in the model or has another shape, or a target has no tensors.
        """
        self.rename(model.config)
        table = next(name for name, weight in model.named_parameters() if weight is model.head_weight)
        touched = {table.removesuffix(".weight"), "lm_head"} & (
            set(self.pairs) | {name.rpartition(".")[0] for name in self.saved}
        )
        if touched and table != "lm_head.weight":
            if self.config.get("ensure_weight_tying"):
                raise UserError(
                    f"{self.folder}: ensure_weight_tying with {sorted(touched)[0]!r} is not supported; "
                    "merge the adapter with peft, and give the result"
                )
            if packed_parts(model):
                raise UserError(
                    f"{self.folder}: the adapter changes {sorted(touched)[0]!r}, which the base ties to its other end; "
                    "a quantised base cannot be untied: take the model that it was made of"
                )
            model = _untie(model)
        parameters = dict(model.named_parameters())
        places = {target.name: target for target in targets_of(model)}
        for module, pair in self.pairs.items():
            place = places.get(module)
            weight = parameters.get(f"{module}.weight")
            if place is not None:
                rows, columns = place.shape
            elif weight is not None and weight.dim() == 2:
                rows, columns = weight.shape[::-1] if _is_transposed(model, module) else weight.shape
            else:
                raise UserError(
                    f"{self.folder}: the adapter changes {module[:80]!r}, which the model does not have"
                )
            got = (pair.b_FR.shape[0], pair.a_RD.shape[1])
            is_whole = place is None or not pair.a_RD.shape[0] % place.count
            if got != (rows, columns) or not is_whole:
                raise UserError(
                    f"{self.folder}: {module[:80]!r} has a change of shape {list(got)}, the model {[rows, columns]}: "
                    "another base?"
                )
            if pair.magnitude_F is not None and (
                place is None or place.is_expert or pair.magnitude_F.shape != (rows,)
            ):
                raise UserError(
                    f"{self.folder}: DoRA's lengths of {module[:80]!r} are not those of a matrix of the layers with "
                    f"{rows} rows, the only ones that whet reads"
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

    def merge(self, model: LanguageModel) -> Lost:
        """Add the changes, computed in float32, to the model's weights permanently.

        Args:
            model: The model from `fit`; changed in place.

        Returns:
            What rounding to the weights' dtype lost.

        Raises:
            UserError: If it was merged into the model already.
        """
        if self.sha256 in model.merged_adapters:
            raise UserError(
                f"{self.folder}: the adapter is merged into this model already; load the base again"
            )
        errors: dict[str, tuple[float, float]] = {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter, change in self._values(model, [*self.saved, *self.pairs]):
            with torch.no_grad():
                exact = change()
                before = parameter.detach().to(exact.dtype)
                parameter.copy_(exact)
                error, effect = exact - parameter.to(exact.dtype), exact - before
                errors[names[id(parameter)]] = (float(error.norm()), float(effect.norm()))
        model.merged_adapters = (*model.merged_adapters, self.sha256)
        shares = {name: error / effect if effect else 0.0 for name, (error, effect) in errors.items()}
        worst = max(shares, key=lambda name: shares[name])
        error, effect = (sum(pair[place] ** 2 for pair in errors.values()) ** 0.5 for place in (0, 1))
        return Lost(error / effect if effect else 0.0, shares[worst], worst)

    def merged(self, model: LanguageModel) -> dict[str, torch.Tensor]:
        """Return the weights of a model that has the adapter applied as if it were merged, without the adapter."""
        if packed_parts(model):
            raise UserError(
                f"{self.folder} stands on a quantised base, which stays in few bits: keep base and adapter apart, or "
                "write dense weights with whet export RUN --to merged --out FOLDER"
            )
        places = {
            f"{target.name}{'' if target.is_expert else '.weight'}": target.name for target, _ in self._sides
        }
        found: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            if name in places:
                _, transposed = _weight(model, places[name])
                whole = self.pairs[places[name]].changed(parameter.detach(), transposed=transposed)
                found[name] = whole.to(parameter.dtype)
            elif not name.endswith(SIDE_NAMES):
                found[name] = parameter.detach()
        return found

    def apply(self, model: LanguageModel) -> None:
        """Enable the adapter, without touching the base's matrices.

        Only changed tensors that are not a layer's own matrix are copied: embeddings, head, biases, norms.

        Args:
            model: The model from `fit`. The adapter is frozen.

        Raises:
            ValueError: If it is enabled.
        """
        if self.is_applied:
            raise ValueError(f"{self.folder}: the adapter is already applied")
        places = {target.name: target for target in targets_of(model)}
        live = [
            name for name in self.pairs if name in places and not {name, f"{name}.weight"} & self.saved.keys()
        ]
        whole = [name for name in [*self.saved, *self.pairs] if name not in live]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter, value in self._values(model, whole):
            self._kept.setdefault(names[id(parameter)], parameter.data)
            parameter.data = value().to(parameter.dtype)
            torch.autograd.graph.increment_version(parameter)
        for name in live:
            target, pair = places[name], self.pairs[name]
            to = target.kind
            magnitude = None if pair.magnitude_F is None else pair.magnitude_F.to(**to)
            tensors = pair.a_RD.to(**to), pair.b_FR.to(**to)
            side = make_side(target, *tensors, pair.scaling, magnitude_F=magnitude).requires_grad_(False)
            target.set(side)
            self._sides.append((target, side))

    def remove(self, model: LanguageModel) -> None:
        """Disable the adapter: the model is bitwise as before `apply`.

        Raises:
            ValueError: If it is disabled.
        """
        if not self.is_applied:
            raise ValueError(f"{self.folder}: the adapter is not applied")
        while self._sides:
            self._sides.pop()[0].set(None)
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
                parameter, transposed = _weight(model, name)

                def changed(
                    p: nn.Parameter = parameter, name: str = name, t: bool = transposed
                ) -> torch.Tensor:
                    return self.pairs[name].changed(p.detach(), transposed=t)

                yield parameter, changed

    def _check_targets(self, model: LanguageModel) -> None:
        """Refuse an adapter that lacks tensors for a module that it lists (a half-written file)."""
        targets, config = self.config.get("target_modules"), self.config
        if (
            not isinstance(targets, list)
            or config.get("exclude_modules")
            or config.get("layers_to_transform") is not None
        ):
            return
        for own, module in model.named_modules():
            if not isinstance(module, nn.Linear | Conv1D | nn.Embedding) or own in self.pairs:
                continue
            name, _ = module_name(own, model.config)
            if name not in self._listed and any(
                name == target or name.endswith(f".{target}") for target in targets
            ):
                raise UserError(f"{self.folder}: {CONFIG} lists {name!r}, {WEIGHTS} has no tensors for it")


def adapter_digest(folder: Path) -> str:
    """Return the SHA-256 of an adapter's two files, configuration first: scaling is part of its identity."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@lru_cache(maxsize=8)
def _outputs(config: ModelConfig) -> dict[str, int]:
    """Return the outputs of a model's matrices by module."""
    with torch.device("meta"):
        named = build_model(config).named_parameters()
    return {name.removesuffix(".weight"): p.shape[0] for name, p in named if p.dim() == 2}


def rows_of(config: ModelConfig, modules: Sequence[str]) -> list[int]:
    """Return the outputs of some of a model's matrices."""
    outputs = _outputs(config)
    return [outputs[module] for module in modules]


def _is_transposed(model: LanguageModel, module: str) -> bool:
    return isinstance(model.get_submodule(module), Conv1D | nn.Embedding)


def _weight(model: LanguageModel, name: str) -> tuple[nn.Parameter, bool]:
    """Return the weight that a pair changes, and whether it is stored the other way round."""
    owner = name.rpartition(".")[0]
    if owner and isinstance(module := model.get_submodule(owner), ExpertWeights):
        return module.get_parameter(name.rpartition(".")[2]), module.is_clamped
    return model.get_parameter(f"{name}.weight"), _is_transposed(model, name)


def _untie(model: LanguageModel) -> LanguageModel:
    """Return the model with a separate head equal to the embedding table; all other tensors are shared."""
    with torch.device("meta"):
        untied = build_model(replace(model.config, tie_embeddings=False))
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}
    untied.load_state_dict(tensors | {"lm_head.weight": model.head_weight.detach().clone()}, assign=True)
    untied.num_valid_tokens, untied.checkpoint_layers = model.num_valid_tokens, model.checkpoint_layers
    untied.sampling_defaults, untied.images = model.sampling_defaults, model.images
    for name, weight in untied.named_parameters():
        weight.requires_grad_(not name.startswith(TOWER))
    return untied.eval()
