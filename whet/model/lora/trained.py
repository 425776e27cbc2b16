"""The adapters that a run trains: chosen, made or taken over at its start, written and restored at its checkpoints."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from whet.config import user_path
from whet.model.gpt2 import Conv1D
from whet.model.lora.adapter import CONFIG, WEIGHTS, Adapter
from whet.model.lora.files import BASE, PARTS, PREFIX, base_digest, expert_places, read_adapter
from whet.model.lora.side import Beside, LoRAConfig, Target, attach, choose, sides_of, targets_of
from whet.model.names import module_name
from whet.model.quant import packed_parts
from whet.model.transformer import LanguageModel
from whet.storage.commit import save_tensors
from whet.types import UserError

KEPT_WHEN_CONTINUED = ("rank", "lr_ratio")
"""Settings that an adapter which is trained on does not bring along."""


@dataclass(frozen=True, slots=True)
class Base:
    """The model that adapters stand beside.

    Attributes:
        name: Hub name, or absolute folder.
        folder: Its local folder.
        quantize: How its matrices were rounded as they were loaded; 'none' if they were not.
    """

    name: str
    folder: Path
    quantize: str = "none"

    @classmethod
    def of(cls, init: str, folder: Path, quantize: str = "none") -> Base:
        """Name the model that a run starts from, so that it is found from any folder."""
        is_local = user_path(init).exists()
        return cls(str(folder.resolve()) if is_local else init, folder, quantize)

    def write(self, folder: Path) -> None:
        """Write beside an adapter where its base is, and the hash of its files."""
        place = os.path.relpath(self.folder.resolve(), folder.resolve())
        facts = {"name": self.name, "relative": place, "sha256": base_digest(self.folder)}
        if self.quantize != "none":  # the adapter makes up for the rounding, too
            facts["quantize"] = self.quantize
        (folder / BASE).write_text(json.dumps(facts, indent=1) + "\n")


EXPERTS_BEFORE = (".gate_proj", ".up_proj", ".down_proj", ".w1", ".w2", ".w3")
"""Ends of the names that experts' matrices had in transformers 4."""


@dataclass(frozen=True, slots=True)
class _Written:
    """A module of transformers that has an adapter.

    Attributes:
        name: Its name; of experts that of the parameter.
        parts: Whet's names of its parts, in their order; () where it is one here, too.
        places: Whet's adapters of it.
    """

    name: str
    parts: tuple[str, ...]
    places: list[tuple[Target, Beside]]

    @property
    def rank(self) -> int:
        """Rank of the adapter that is written: a start that is subtracted doubles it, and those of parts add up."""
        return sum(rank_of(*place) * (2 if place[1].start is not None else 1) for place in self.places)

    @property
    def is_expert(self) -> bool:
        """Whether it is a parameter of experts."""
        return self.places[0][0].is_expert

    @property
    def ends(self) -> list[str]:
        """Ends of the names of the parts that have adapters, in their order."""
        own = {target.name for target, _ in self.places}
        return [name.rpartition(".")[2] for name in self.parts if name in own]


class Trained:
    """Adapters of a model, trained while the weights beside them are frozen.

    Args:
        model: The model; what is not trained no longer requires gradients.
        config: What gets an adapter, and which.
        base: The model as it is stored.
        seed: Seed of the adapters' random start.
        adapter: An adapter that stands in the model already, to train on; None for new ones.

    Raises:
        UserError: If a target matches nothing, or the settings are not those of the adapter that is trained on.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: LoRAConfig,
        *,
        base: Base,
        seed: int,
        adapter: Adapter | None = None,
    ) -> None:
        self._model, self._base = model, base
        if adapter is None:
            targets = choose(model, config)
            saved = [name for name, _ in modules_to_save(model, config, targets)]
            model.requires_grad_(False)
            attach(model, config, targets, seed)
            self._alphas = {target.name: config.scale for target in targets}
            self._rslora = config.rslora
        else:
            check_continued(adapter, config)
            saved = sorted({name.rpartition(".")[0] for name in adapter.saved})
            model.requires_grad_(False)
            self._alphas = {name: pair.alpha for name, pair in adapter.pairs.items()}
            self._rslora = bool(adapter.config.get("use_rslora"))
        self.saved = saved
        for _, side in sides_of(model):
            side.requires_grad_(True)
            side.lr_ratio = config.lr_ratio
            if side.start is not None:
                side.start.requires_grad_(False)
        for name in saved:
            model.get_submodule(name).requires_grad_(True)

    def lines(self) -> list[str]:
        """Say what is trained, for the start of a run."""
        names = Counter(target.name.rpartition(".")[2] for target, _ in sides_of(self._model))
        matched = ", ".join(f"{name} x {count}" for name, count in names.items())
        sizes = [(p.numel(), p.requires_grad) for p in self._model.parameters()]
        trained, whole = sum(n for n, is_trained in sizes if is_trained), sum(n for n, _ in sizes)
        whole += sum(part.shape.numel() for part in packed_parts(self._model))
        rank = next(rank_of(target, side) for target, side in sides_of(self._model))
        found = [f"lora: rank {rank} beside {sum(names.values())} matrices: {matched}"]
        if self.saved:
            found.append(f"lora: trained whole: {', '.join(self.saved)}")
        share = f"{trained / whole:.2%}"
        return [*found, f"lora: {trained:,} of {whole:,} numbers are trained ({share})"]

    @property
    def written_rank(self) -> int:
        """Rank of the adapters as `write` writes them: a start that is subtracted doubles it."""
        return max(theirs.rank for theirs in self._written())

    def check_plain(self) -> None:
        """Refuse adapters that vLLM and SGLang cannot have: they know A, B and one scaling of the layers' matrices.

        Raises:
            UserError: With what to leave out.
        """
        places = list(sides_of(self._model))
        others = {
            "lora.dora": any(side.magnitude is not None for _, side in places),
            "lora.modules_to_save": bool(self.saved),
            "experts in lora.targets": any(target.is_expert for target, _ in places),
            "different lora_alpha in the adapter that is trained on": len(set(self._alphas.values())) > 1,
        }
        if found := next((name for name, is_so in others.items() if is_so), None):
            raise UserError(
                f"{found}: vLLM and SGLang cannot have such an adapter; leave it out, or sample with whet serve, "
                "rollout workers (cluster.rollout_workers) or sampler.kind = engine"
            )

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is trained, by name."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def write(
        self, folder: Path, weights: Mapping[str, torch.Tensor] | None = None, *, is_plain: bool = False
    ) -> None:
        """Write the adapter in peft's format, and where its base is.

        Args:
            folder: The folder.
            weights: What is written in place of the current parameters, by name: a copy that was taken earlier.
            is_plain: Write rsLoRA's factor as that of plain LoRA, for readers that know no other (SGLang).
        """
        weights = dict(self.named_parameters()) if weights is None else weights
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        written = self._written()
        places_of_experts = expert_places([one.name for one in written if one.is_expert])
        for one in written:
            stem = f"{PREFIX}{places_of_experts.get(one.name, one.name)}"
            a, b, lengths = self._joined(one, weights)
            tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = a, b
            if lengths is not None:
                tensors[f"{stem}.lora_magnitude_vector"] = lengths
        modules: list[str] = []
        for module in self.saved:
            theirs, own = module_name(module, self._model.config)
            modules += [theirs] * (theirs not in modules)
            for part, _ in self._model.get_submodule(module).named_parameters():
                rows = [
                    weights.get(name, self._model.get_parameter(name)).detach().cpu()
                    for name in (f"{each}.{part}" for each in own or (module,))
                ]
                name, _ = module_name(f"{module}.{part}", self._model.config)
                tensors[f"{PREFIX}{name}"] = torch.cat(rows) if len(rows) > 1 else rows[0]
        table = next(
            name for name, weight in self._model.named_parameters() if weight is self._model.head_weight
        )
        table, _ = module_name(table, self._model.config)
        if table in {name.removeprefix(PREFIX) for name in tensors} and not table.startswith("lm_head."):
            # A tied head: peft has a copy of it beside the embeddings, which would stay as it was.
            tensors[f"{PREFIX}lm_head.weight"] = tensors[f"{PREFIX}{table}"].clone()
            modules.append("lm_head")
        facts = {"format": "pt"}
        if parts := {one.name: one.ends for one in written if one.ends}:
            facts[PARTS] = json.dumps(parts)
        save_tensors({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS, facts)
        settings = self._facts(written, modules, is_plain=is_plain)
        (folder / CONFIG).write_text(json.dumps(settings, indent=1) + "\n")
        self._base.write(folder)

    def _written(self) -> list[_Written]:
        """List the modules that have adapters as transformers has them: some of whet's are one there."""
        found: dict[str, _Written] = {}
        for target, side in sides_of(self._model):
            name, own = module_name(target.name, self._model.config)
            found.setdefault(name, _Written(name, own, [])).places.append((target, side))
        return list(found.values())

    def _joined(
        self, one: _Written, weights: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return A, B and DoRA's lengths of a module of transformers.

        Where whet keeps its parts apart, A has their rows one below the other, and B is block-diagonal: exactly their
        changes. Parts without an adapter have rows of zeros.
        """
        found: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        for target, side in one.places:
            own = prefix_of(target)
            a, b = (weights[f"{own}.lora_{letter}"].detach().cpu() for letter in "AB")
            if side.start is not None:
                a, b = _with_start(target, a, b, side.start)
            lengths = None if side.magnitude is None else weights[f"{own}.magnitude"].detach().cpu()
            found[target.name] = a, b, lengths
        if not one.parts:
            return found[one.places[0][0].name]
        for name in one.parts:
            if name not in found:
                (target,) = (target for target in targets_of(self._model) if target.name == name)
                rows, columns = target.shape
                matrix = target.matrices()[0].float().cpu()
                found[name] = torch.empty(0, columns), torch.empty(rows, 0), matrix.norm(dim=1)
        each = [found[name] for name in one.parts]
        has_lengths = one.places[0][1].magnitude is not None
        lengths = torch.cat([m for _, _, m in each if m is not None]) if has_lengths else None
        return torch.cat([a for a, _, _ in each]), torch.block_diag(*(b for _, b, _ in each)), lengths

    def _facts(self, written: list[_Written], modules: list[str], *, is_plain: bool) -> dict[str, Any]:
        """Return the content of adapter_config.json."""
        target, side = written[0].places[0]
        # vLLM and SGLang make room for the rank that the file names first, and take its scaling for all.
        rank = max(one.rank for one in written)
        alphas: dict[str, float] = {}
        for one in written:
            own, _ = one.places[0]
            growth = one.rank / rank_of(*one.places[0])
            if self._rslora:
                growth = math.sqrt(growth) * (math.sqrt(one.rank) if is_plain else 1)
            alphas[one.name] = self._alphas[own.name] * growth
        common = Counter(alphas[one.name] for one in written if one.rank == rank).most_common(1)[0][0]
        ranks = {one.name: one.rank for one in written if one.rank != rank}
        dense = [one.name for one in written if not one.is_expert]
        # Of a mixture peft takes matrices of these names for the experts' in files of transformers 4: as parameters,
        # which DoRA does not know, it finds them.
        is_mixture = self._model.config.block.experts is not None and side.magnitude is None
        as_parameters = [name for name in dense if is_mixture and name.endswith(EXPERTS_BEFORE)]
        parameters = [one.name for one in written if one.is_expert]
        parameters += [f"{name}.weight" for name in as_parameters]
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._base.name,
            "r": rank,
            "lora_alpha": common,
            "rank_pattern": {re.escape(name): own for name, own in ranks.items()},
            "alpha_pattern": {re.escape(name): alpha for name, alpha in alphas.items() if alpha != common},
            "use_rslora": self._rslora and not is_plain,
            "use_dora": side.magnitude is not None,
            "target_modules": [name for name in dense if name not in as_parameters],
            "target_parameters": parameters or None,
            "modules_to_save": modules or None,
            "fan_in_fan_out": isinstance(target.module, Conv1D),
            "bias": "none",
            "lora_dropout": 0.0,
            "init_lora_weights": True,
            "inference_mode": True,
        }

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Load what `write` wrote.

        Raises:
            UserError: If it is another adapter.
        """
        stored = read_adapter(folder, is_new=True)  # a run may be stopped before anything was trained
        stored.rename(self._model.config)
        places = {target.name: (target, side) for target, side in sides_of(self._model)}
        if stored.pairs.keys() != places.keys():
            differs = sorted(stored.pairs.keys() ^ places.keys())[0]
            raise UserError(
                f"{folder}: not the adapter that this run trains: {differs!r} is on one side only"
            )
        for name, (target, side) in places.items():
            pair = stored.pairs[name]
            a, b = pair.a_RD, pair.b_FR
            if side.start is not None:
                (a, a_start), (b, b_start) = _halves(target, a, b)
                side.start.lora_A.copy_(a_start)
                side.start.lora_B.copy_(-b_start)
            if a.shape != side.lora_A.shape or b.shape != side.lora_B.shape:
                raise UserError(f"{folder}: not the adapter that this run trains: {name!r} has another rank")
            side.lora_A.copy_(a)
            side.lora_B.copy_(b)
            if side.magnitude is not None and pair.magnitude_F is not None:
                side.magnitude.copy_(pair.magnitude_F)
        for name, tensor in stored.saved.items():
            if name != "lm_head.weight" or not self._model.config.tie_embeddings:
                self._model.get_parameter(name).copy_(tensor)


def rank_of(target: Target, side: Beside) -> int:
    """Return the rank of an adapter, without the start that is subtracted."""
    return side.lora_A.shape[0] // target.count


def prefix_of(target: Target) -> str:
    """Return the name of a weight's adapter in the model."""
    return f"{target.name.rpartition('.')[0] if target.is_expert else target.name}.{target.attribute}"


def _with_start(
    target: Target, a: torch.Tensor, b: torch.Tensor, start: Beside
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join an adapter and the start that is subtracted to one of twice the rank, as peft converts PiSSA."""
    a_start, b_start = start.lora_A.detach().cpu(), -start.lora_B.detach().cpu()
    if not target.is_expert:
        return torch.cat((a, a_start)), torch.cat((b, b_start), dim=1)
    each = [part.view(target.count, -1, part.shape[1]) for part in (a, a_start)]
    columns = [part.view(part.shape[0], -1, target.count) for part in (b, b_start)]
    return torch.cat(each, dim=1).flatten(0, 1), torch.cat(columns, dim=1).flatten(1)


Halves = tuple[torch.Tensor, torch.Tensor]


def _halves(target: Target, a: torch.Tensor, b: torch.Tensor) -> tuple[Halves, Halves]:
    """Undo `_with_start`."""
    a_parts = a.view(target.count, -1, a.shape[1]).chunk(2, dim=1)
    b_parts = b.view(b.shape[0], -1, target.count).chunk(2, dim=1)
    return (
        (a_parts[0].flatten(0, 1), a_parts[1].flatten(0, 1)),
        (b_parts[0].flatten(1), b_parts[1].flatten(1)),
    )


def modules_to_save(
    model: LanguageModel, config: LoRAConfig, targets: list[Target]
) -> list[tuple[str, torch.nn.Module]]:
    """Find the modules that are trained whole.

    Args:
        model: The model.
        config: Names them.
        targets: The weights that get an adapter.

    Raises:
        UserError: If a name matches nothing, or a module with an adapter.
    """
    found: dict[str, torch.nn.Module] = {}
    named = {name: module for name, module in model.named_modules() if any(True for _ in module.parameters())}
    for text in config.modules_to_save:
        own = {name: m for name, m in named.items() if name == text or name.endswith(f".{text}")}
        if not own:
            ends = sorted(
                {name.rpartition(".")[2] for name in named if not name.rpartition(".")[2].isdecimal()} - {""}
            )
            tied = text == "lm_head" and model.config.tie_embeddings
            why = "; the head is tied to the embeddings: name those" if tied else ""
            raise UserError(
                f"lora.modules_to_save: {text!r} matches no module{why}; expected ends of names: {', '.join(ends)}"
            )
        found |= own
    for name in found:
        if inside := next((t.name for t in targets if f"{t.name}.".startswith(f"{name}.")), None):
            raise UserError(
                f"lora.modules_to_save: {name} would be trained whole, but {inside} gets an adapter: choose"
            )
    return [
        (name, m) for name, m in found.items() if not any(name.startswith(f"{other}.") for other in found)
    ]


def check_continued(adapter: Adapter, config: LoRAConfig) -> None:
    """Refuse settings that are not those of the adapter which is trained on.

    Args:
        adapter: The adapter; before it stands in a model, its configuration says its rank.
        config: The run's settings.

    Raises:
        UserError: With the setting.
    """
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name in KEPT_WHEN_CONTINUED or value == item.default:
            continue
        if item.name == "alpha" and {pair.alpha for pair in adapter.pairs.values()} == {value}:
            continue
        if item.name in ("rslora", "dora") and bool(adapter.config.get(f"use_{item.name}")) == value:
            continue
        raise UserError(
            f"lora.{item.name} = {value}: the run trains {adapter.folder} on, whose own setting counts; leave it out"
        )
    ranks: set[Any] = {side.lora_A.shape[0] // target.count for target, side in adapter.sides}
    ranks = ranks or {adapter.config.get("r"), *(adapter.config.get("rank_pattern") or {}).values()}
    if ranks != {config.rank}:
        there = ", ".join(sorted(map(str, ranks)))
        raise UserError(
            f"lora.rank = {config.rank}: the run trains {adapter.folder} on, which has rank {there}; give that, or "
            f"merge it first (whet export {adapter.folder} --to merged --dtype f32 --out FOLDER)"
        )
    left = sorted(adapter.pairs.keys() - {target.name for target, _ in adapter.sides})
    if left and adapter.sides:
        raise UserError(
            f"{adapter.folder}: {left[0]!r} (head or embeddings) cannot be trained on as an adapter; merge it"
        )
