"""Names of parameters: whet's, those of a family's files, and those of transformers' modules."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from whet.model.config import ModelConfig

HEAD = "lm_head.weight"
OUTSIDE_TEXT = ("vision_tower.", "visual.", "multi_modal_projector.", "mtp.", "audio_tower.", "embed_vision.")
OUTSIDE_TEXT += ("embed_audio.",)
"""Parts of a checkpoint with images or sound, or that draw several tokens ahead, which are not loaded."""
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}


class StoredPlace(NamedTuple):
    """Where a stored tensor, or a part of it, goes.

    Attributes:
        name: Parameter of the module.
        part: Part of it; () for all.
    """

    name: str
    part: tuple[int | slice, ...] = ()


def find_places(stored: str, config: ModelConfig) -> tuple[StoredPlace, ...]:
    """Say where a stored tensor goes: to several parameters one below the other if more than one; none: left out."""
    name, block = stored, config.block
    if config.vision is not None:
        name = _with_prefix(name, config.vision.renamed)
    if name.endswith(("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")):
        return ()  # buffers of old checkpoints
    if config.family == "gpt2" and not name.startswith(("transformer.", "lm_head.", "score.")):
        name = f"transformer.{name}"
    if block.is_part or block.num_ahead:
        if name.removeprefix("model.").startswith(OUTSIDE_TEXT):
            return ()
        name = name.replace("model.language_model.", "model.", 1)
        prefix = max((p for p in TEXT_PREFIXES if name.startswith(p)), key=len, default=None)
        if prefix is not None:
            name = TEXT_PREFIXES[prefix] + name.removeprefix(prefix)
    name = _renamed(name, block.renamed)
    if name.startswith("model.layers.") and block.num_ahead:
        number = name.split(".")[2]
        if number.isdecimal() and int(number) >= config.num_layers:
            return ()
    found = re.fullmatch(r"model\.layers\.(\d{1,4})\.self_attn\.(k_proj|v_proj|k_norm)\..*", name)
    if found is not None and int(found[1]) < len(block.layers) and block.layers[int(found[1])].source >= 0:
        return ()  # Gemma 4's files have tensors of layers that read another one's keys and values
    for whole in block.fused:
        if name.endswith(f".{whole}.weight"):
            return tuple(StoredPlace(name.replace(whole, part)) for part in FUSED[whole])
    part, gate, up, down = block.expert_names
    if part:
        name = name.replace(f".{part}.", ".mlp.")
        found = re.fullmatch(r"(.*\.mlp\.experts)\.(\d{1,4})\.(\w+)\.weight", name)
        if found is not None and block.experts is not None:
            number, width = int(found[2]), block.experts.width
            indices = {gate: slice(0, width), up: slice(width, 2 * width)}
            if number < block.experts.count and found[3] == down:
                return (StoredPlace(f"{found[1]}.down_proj", (number,)),)
            if number < block.experts.count and found[3] in indices:
                return (StoredPlace(f"{found[1]}.gate_up_proj", (number, indices[found[3]])),)
    return (StoredPlace(name),)


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def own_names(name: str, config: ModelConfig) -> tuple[str, ...]:
    """Return what whet calls a parameter that transformers' module of the family has: several for one that whet keeps
    apart, one below the other in it; none if whet has no such parameter."""
    return tuple(place.name for place in find_places(name, config))


def stored_places(stored: str, config: ModelConfig) -> tuple[tuple[str, tuple[int | slice, ...]], ...]:
    """Return where the rows of a tensor of the family's files go: parameters, each with the part of it, () for all."""
    return tuple((place.name, place.part) for place in find_places(stored, config))


def module_name(name: str, config: ModelConfig) -> tuple[str, tuple[str, ...]]:
    """Return what transformers calls a module or parameter, as adapters in peft's format do: what `own_names` undoes.

    Args:
        name: Whet's name of it.
        config: Shape of the model.

    Returns:
        The name, and whet's names of the modules that are one there, in their order; () where it is one in both.
    """
    parts: tuple[str, ...] = ()
    head, _, leaf = name.rpartition(".")
    is_own = leaf in ("weight", "bias")
    module, _, last = head.rpartition(".") if is_own else (head, "", leaf)
    for whole in config.block.fused:
        if last in FUSED[whole]:
            ends = f".{leaf}" if is_own else ""
            parts = tuple(f"{module}.{part}{ends}" for part in FUSED[whole])
            name = f"{module}.{whole}{ends}"
    back = [(here, stored) for stored, here in config.block.renamed]
    name = _renamed(f"{name}.", back)[:-1]
    pairs = [] if config.vision is None else config.vision.renamed
    theirs = [(here, there) for there, here in pairs if there.startswith("model.") and there != here]
    if config.block.is_part and _has_inner_text(config.source):
        theirs = [("model.", "model.language_model.")]
    here, there = next(((h, t) for h, t in theirs if name.startswith(h)), ("", ""))
    return there + name.removeprefix(here), parts


@lru_cache(maxsize=8)
def _has_inner_text(source: str) -> bool:
    """Say whether transformers loads a text part within the model with images that it comes from."""
    return json.loads(source).get("model_type") in ("gemma4_text", "ministral3", "mistral")


def as_stored(tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return parameters by the names, and in the pieces, that the family's files have: what `find_places` undoes."""
    found: dict[str, torch.Tensor] = {}
    back = [(here, stored) for stored, here in config.block.renamed]
    part, gate, up, down = config.block.expert_names
    for name, tensor in tensors.items():
        is_one_of = {
            w: name.endswith(tuple(f".{part}.weight" for part in FUSED[w])) for w in config.block.fused
        }
        whole = next((w for w, is_in in is_one_of.items() if is_in), None)
        if whole is not None:
            parts = FUSED[whole]
            if name.endswith(f".{parts[0]}.weight"):
                rows = [tensors[name.replace(parts[0], other)] for other in parts]
                found[name.replace(parts[0], whole)] = torch.cat(rows)
        elif part and ".mlp.experts." in name:
            head = name.replace(".mlp.", f".{part}.").rpartition(".")[0]
            for number, own in enumerate(tensor):
                if name.endswith(".down_proj"):
                    found[f"{head}.{number}.{down}.weight"] = own
                else:
                    halves = zip((gate, up), own.chunk(2), strict=True)
                    found |= {f"{head}.{number}.{half}.weight": rows for half, rows in halves}
        elif config.block.has_turned_experts and ".mlp.experts." in name:
            found[name] = tensor.transpose(1, 2)
        elif part and ".mlp.gate." in name:
            found[name.replace(".mlp.", f".{part}.")] = tensor
        else:
            found[name] = tensor
    found = {_renamed(name, back): tensor.contiguous() for name, tensor in found.items()}
    if config.vision is None:
        return found
    prefixes = [(here, stored) for stored, here in config.vision.renamed]
    return {_with_prefix(name, prefixes): tensor for name, tensor in found.items()}


def _renamed(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Replace the first part that a name has."""
    return next((name.replace(old, new) for old, new in pairs if old in name), name)


def _with_prefix(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Replace the longest beginning that a name has; of equal ones the first counts."""
    old, new = max(
        (pair for pair in pairs if name.startswith(pair[0])), key=lambda p: len(p[0]), default=("", "")
    )
    return new + name.removeprefix(old)
