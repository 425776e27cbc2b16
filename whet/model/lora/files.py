"""Reads adapter folders of the peft library, and finds their bases: JSON and safetensors, strictly, nothing that can
execute."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from whet.config import user_path
from whet.model.files import check_manifest, hub_folder, is_hub_name, read_json
from whet.model.lora.adapter import CONFIG, WEIGHTS, Adapter, LoRAPair
from whet.model.quant import KINDS
from whet.model.weights import model_folder
from whet.telemetry.provenance import describe_model, no_run
from whet.types import UserError

HUB_PATTERNS = (
    CONFIG,
    WEIGHTS,
    "tokenizer*.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "protocol.json",
)
READ = {"peft_type", "base_model_name_or_path", "revision", "r", "lora_alpha", "use_rslora", "rank_pattern"}
READ |= {"alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform", "ensure_weight_tying"}
READ |= {"init_lora_weights", "use_dora", "target_parameters"}
# Redundant with the tensors themselves, or relevant to training only. fan_in_fan_out follows from the module.
IRRELEVANT = {"auto_mapping", "bias", "eva_config", "fan_in_fan_out", "inference_mode", "layers_pattern"}
IRRELEVANT |= {"lora_dropout", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size"}
IRRELEVANT |= {"runtime_config", "task_type", "loftq_config", "corda_config", "lora_ga_config"}
PLAIN_STARTS = (
    True,
    False,
    None,
    "gaussian",
    "eva",
    "orthogonal",
)  # other initialisations change the base, too
PREFIX = "base_model.model."
"""Beginning of the tensors' names."""
BASE = "base.json"
"""File in which whet notes where an adapter's base is, and the hash of its files."""
PARTS = "whet.parts"
"""Key of the file's metadata: which of whet's modules have their own rows of A and columns of B in one of peft's."""
LORA_NAME = re.compile(r"(?P<module>.+)\.lora_(?:embedding_)?(?P<side>[AB]|magnitude_vector)(?:\.weight)?")
EXPERTS = ("gate_up_proj", "down_proj")
"""Experts' parameters; where both have adapters, peft wraps the module twice, the first one inside."""
MAX_DIMS = 8
"""Of a tensor: PyTorch computes with no more than 64."""
MAX_PATTERN_CHARS, MAX_BRANCHES = (
    200,
    2,
)  # a hostile pattern with more, or with a repeated group, could match forever


def find_model(init: str, adapter: str = "", *, weights: bool = True) -> tuple[Path, Adapter | None]:
    """Find the base and the adapter that a user names; `find_models` takes several adapters.

    Args:
        init: A model (run folder, Hugging Face folder, hub name), or an adapter that names its base.
        adapter: Adapter folder or hub name; empty for none.
        weights: False to download no weights of the base.

    Returns:
        The base's folder, and the adapter.

    Raises:
        UserError: If something is missing or malformed, or both are adapters.
    """
    names = named_adapters(adapter)
    if len(names) > 1:
        raise UserError(
            f"policy.adapter = {adapter[:80]}: several adapters at once are for whet serve and whet.load; name one, or "
            f"combine them: whet merge {' '.join(names.values())[:160]} --out FOLDER"
        )
    adapter = next(iter(names.values()), "")
    path = user_path(init)
    if not _is_adapter(path):
        folder = model_folder(init, weights=weights)
        if not _is_adapter(folder) and (path.exists() or (folder / "config.json").is_file()):
            found = read_adapter(adapter) if adapter else None
            if found is not None:
                _warn_of_other_base(found, init, folder)
            return folder, found
    if adapter:
        raise UserError(
            f"policy.init = {init!r} is an adapter itself: give its base there, or leave out policy.adapter"
        )
    found = read_adapter(init)
    advice = "give the base as policy.init and the adapter as policy.adapter"
    if not found.base:
        raise UserError(f"{found.folder}: the adapter does not name its base; {advice}")
    if found.revision:
        raise UserError(
            f"{found.folder}: the adapter needs revision {found.revision[:40]!r} of its base: download that, {advice}"
        )
    if not user_path(found.base).exists() and (moved := _relative_base(found.folder)) is not None:
        found.base = str(moved)  # both were moved, or copied, together
    try:
        base = model_folder(found.base, weights=weights)
    except UserError as error:
        raise UserError(f"{found.folder}: its base is missing ({error}); {advice}") from None
    if not _is_same(found, base):
        raise UserError(
            f"{found.folder}: its base {found.base} has changed since the adapter was trained on it; restore it, or "
            f"{advice}"
        )
    return base, found


def named_adapters(text: str) -> dict[str, str]:
    """Read what `policy.adapter` names: `math=runs/a,code=runs/b`, or folders alone, whose last parts are the names.

    Returns:
        Folders or hub names, by name.

    Raises:
        UserError: If a name is given twice, or something is missing.
    """
    if not text or user_path(text).exists():  # a folder may have a comma in its name
        return {user_path(text).resolve().name: text} if text else {}
    found: dict[str, str] = {}
    for part in text.split(","):
        name, sign, source = part.strip().partition("=")
        source = source if sign else name
        name = name if sign else user_path(name).resolve().name
        if not name or not source:
            raise UserError(
                f"policy.adapter = {text[:80]!r}: expected folders, or name=folder, between commas"
            )
        if name in found:
            raise UserError(
                f"policy.adapter: two adapters are called {name[:40]!r}; name them: first={found[name]},second={source}"
            )
        found[name] = source
    return found


def find_models(
    init: str, adapters: Mapping[str, str], *, weights: bool = True
) -> tuple[Path, dict[str, Adapter]]:
    """Find the base and several adapters.

    Args:
        init: A model (run folder, Hugging Face folder, hub name).
        adapters: Folders or hub names, by name.
        weights: False to download no weights of the base.

    Returns:
        The base's folder, and the adapters by name.

    Raises:
        UserError: If something is missing or malformed, or `init` is an adapter.
    """
    folder, own = find_model(init, weights=weights)
    if own is not None:
        raise UserError(f"policy.init = {init!r} is an adapter itself: give the base of all of them there")
    found = {name: read_adapter(source) for name, source in adapters.items()}
    for adapter in found.values():
        _warn_of_other_base(adapter, init, folder)
    return folder, found


def _warn_of_other_base(adapter: Adapter, init: str, folder: Path) -> None:
    if not _is_same(adapter, folder):
        text = f"policy.init = {init} is not, or no longer, the model that {adapter.folder} was trained on"
        warnings.warn(f"{text} ({adapter.base})", stacklevel=4)


def _is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def _noted(folder: Path) -> dict[str, Any]:
    """Return what whet noted of an adapter's base; {} for adapters of others."""
    return read_json(folder / BASE) if (folder / BASE).is_file() else {}


def _relative_base(folder: Path) -> Path | None:
    """Return the base's folder as seen from the adapter, if there is a model."""
    place = _noted(folder).get("relative")
    found = Path(os.path.normpath(folder.resolve() / place)) if isinstance(place, str) else None
    return found if found is not None and (found / "config.json").is_file() else None


def _is_same(adapter: Adapter, base: Path) -> bool:
    """Say whether a base has the files that an adapter was trained on, as far as that was noted."""
    noted = adapter.base_sha256
    return noted is None or noted == describe_model(str(base))["sha256_of_all"]


@cache
def base_digest(folder: Path) -> str | None:
    """Return the hash of the files of a model that this process has loaded, which it reads once."""
    return describe_model(str(folder))["sha256_of_all"]


def read_adapter(source: str | Path, *, is_new: bool = False) -> Adapter:
    """Read an adapter: adapter_config.json and adapter_model.safetensors, nothing that can execute.

    Args:
        source: Folder or hub name.
        is_new: Whether it may change nothing yet, which otherwise is warned of.

    Returns:
        The adapter, not yet checked against a model.

    Raises:
        UserError: If a file is missing or malformed, or the kind of adapter is not supported.

    Source: LoRA 2106.09685, rsLoRA 2312.03732, in the format of the peft library (0.21).
    """
    folder = _adapter_folder(source)
    check_manifest(folder)
    config = read_json(folder / CONFIG)
    _check_config(config, folder / CONFIG)
    names, parts = _stored_names(folder / WEIGHTS)
    experts = _expert_names(config, names)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    saved: dict[str, torch.Tensor] = {}
    for stored, tensor in _tensors(folder / WEIGHTS):
        name = stored.removeprefix(PREFIX)
        if name == stored:
            raise UserError(
                f"{folder / WEIGHTS}: unexpected tensor {stored[:80]!r}: names begin with base_model.model."
            )
        match = LORA_NAME.fullmatch(name)
        module = experts.get(match["module"], match["module"]) if match else ""
        place, key = (sides.setdefault(module, {}), match["side"]) if match else (saved, "")
        key = key or name.replace(".base_layer.", ".")
        if key in place:
            raise UserError(f"{folder / WEIGHTS}: tensor {stored[:80]!r} occurs twice")
        place[key] = tensor
    if not sides:
        raise UserError(f"{folder / WEIGHTS}: no LoRA tensors")
    counted = set(experts.values())
    pairs = {
        module: _pair(module, found, config, folder, is_expert=module in counted)
        for module, found in sides.items()
    }
    idle = sum(not (pair.a_RD.any() and pair.b_FR.any()) for pair in pairs.values())
    if idle and not is_new:
        warnings.warn(
            f"{folder}: {idle} of {len(pairs)} changes are all zero: was the adapter trained, and saved completely?",
            stacklevel=2,
        )
    noted = _noted(folder)
    rounded, sha256 = noted.get("quantize", "none"), noted.get("sha256")
    if rounded not in ("none", *KINDS):
        raise UserError(f"{folder / BASE}: quantize = {str(rounded)[:40]!r}: expected {' or '.join(KINDS)}")
    return Adapter(folder, config, pairs, saved, rounded, None if sha256 is None else str(sha256), parts)


def _adapter_folder(source: str | Path) -> Path:
    folder = user_path(source)
    if (folder / "checkpoints").is_dir():  # a run that trained one
        folder = model_folder(folder)
    if not folder.exists() and "/" in str(source) and is_hub_name(str(source)):
        folder = hub_folder(str(source), HUB_PATTERNS)
    if not folder.exists():
        raise no_run(str(source), or_hub=True)
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: no {CONFIG} there; point at the folder that peft's save_pretrained wrote")
    if not (folder / WEIGHTS).is_file():
        pickle = (folder / "adapter_model.bin").is_file()
        hint = (
            "; adapter_model.bin is a pickle, which whet never reads: save it as safetensors"
            if pickle
            else ""
        )
        raise UserError(f"{folder}: no {WEIGHTS}{hint}")
    return folder


def _check_config(config: Mapping[str, Any], where: Path) -> None:
    """Refuse options that change the arithmetic in an unsupported way."""
    if config.get("peft_type") != "LORA":
        raise UserError(f"{where}: peft_type = {str(config.get('peft_type'))[:40]!r}: only LORA is supported")
    strange = sorted(key for key, value in config.items() if value and key not in READ | IRRELEVANT)
    if strange:
        raise UserError(
            f"{where}: {strange[0][:40]!r} is set, which whet does not support: merge the adapter with peft, and give "
            "the result"
        )
    if config.get("init_lora_weights") not in PLAIN_STARTS:
        raise UserError(
            f"{where}: init_lora_weights = {str(config['init_lora_weights'])[:40]!r} changes the base, too: "
            "convert the adapter to plain LoRA with peft (path_initial_model_for_weight_conversion)"
        )
    for key, most in (("rank_pattern", 2**16), ("alpha_pattern", 2**20)):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict):
            raise UserError(f"{where}: {key} is not an object")
        for text, value in pattern.items():
            _check_number(f"{key}[{text[:40]!r}]", value, most, where)
            is_wild = len(re.findall(r"[*+?{|]", text)) > MAX_BRANCHES or re.search(r"\)[*+?{]", text)
            if is_wild or len(text) > MAX_PATTERN_CHARS or not _compiles(text):
                raise UserError(f"{where}: {key}: {text[:40]!r} is not a simple pattern of a module name")
    _check_number("r", config.get("r"), 2**16, where)
    _check_number("lora_alpha", config.get("lora_alpha"), 2**20, where)


def _check_number(name: str, value: object, most: int, where: Path) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise UserError(f"{where}: {name} = {str(value)[:40]}: expected a number above 0, at most {most:,}")


def _compiles(pattern: str) -> bool:
    try:
        return bool(re.compile(rf"(.*\.)?({pattern})"))  # as in `_pattern`: flags are only valid at the start
    except (re.error, RecursionError, OverflowError):
        return False


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a safetensors file as float32; refuse non-finite ones."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open has no iterator)
                tensor = file.get_tensor(name)
                if not tensor.is_floating_point():
                    raise UserError(f"{path}: tensor {name[:80]!r} is {tensor.dtype}, expected floats")
                if tensor.dim() > MAX_DIMS:
                    raise UserError(f"{path}: tensor {name[:80]!r} has {tensor.dim()} dimensions, expected 2")
                tensor = tensor.float()
                if not tensor.isfinite().all():
                    raise UserError(f"{path}: tensor {name[:80]!r} contains NaN or infinity")
                yield name, tensor
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({str(error)[:300]})") from None


def _stored_names(path: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Return the tensors' names, and of what parts modules were made (`PARTS`)."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            parts = json.loads((file.metadata() or {}).get(PARTS, "{}"))
            return list(file.keys()), parts if isinstance(parts, dict) else {}
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: {PARTS} in its metadata is not JSON ({error})") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({str(error)[:300]})") from None


def expert_places(names: Sequence[str]) -> dict[str, str]:
    """Return the stored name of the module around each of the experts' parameters that have adapters.

    Args:
        names: Parameters such as model.layers.0.mlp.experts.down_proj.
    """
    found: dict[str, str] = {}
    for name in names:
        module, _, part = name.rpartition(".")
        is_inside = part == EXPERTS[0] and f"{module}.{EXPERTS[1]}" in names
        found[name] = f"{module}.base_layer" if is_inside else module
    return found


def _expert_names(config: Mapping[str, Any], stored: Sequence[str]) -> dict[str, str]:
    """Return the parameter of experts that each stored module of them stands for."""
    wanted = config.get("target_parameters") or []
    modules = {
        match["module"].removesuffix(".base_layer")
        for name in stored
        if (match := LORA_NAME.fullmatch(name.removeprefix(PREFIX)))
    }
    modules = {module for module in modules if module.endswith("experts")}
    names: list[str] = []
    for module in modules:
        for part in EXPERTS:
            name = f"{module}.{part}"
            if any(isinstance(text, str) and (name == text or name.endswith(f".{text}")) for text in wanted):
                names.append(name)
    return {place: name for name, place in expert_places(names).items()}


def _pair(
    module: str,
    found: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    folder: Path,
    *,
    is_expert: bool,
) -> LoRAPair:
    """Join A and B, checking their rank."""
    is_dora = bool(config.get("use_dora"))
    if set(found) - {"magnitude_vector"} != {"A", "B"}:
        raise UserError(
            f"{folder}: {module[:80]!r} has lora_{min(found)} only; the adapter was not saved completely"
        )
    if ("magnitude_vector" in found) != (is_dora and not is_expert):
        raise UserError(
            f"{folder}: {module[:80]!r} has {'no' if is_dora else 'a'} lora_magnitude_vector, use_dora is {is_dora}"
        )
    a_RD, b_FR = found["A"], found["B"]
    rank = int(_pattern(config.get("rank_pattern"), module, config["r"]))
    is_right = a_RD.dim() == b_FR.dim() == 2 and a_RD.shape[0] == b_FR.shape[1]
    is_right = is_right and (not a_RD.shape[0] % rank if is_expert else a_RD.shape[0] == rank)
    if not is_right:
        shapes = f"A {list(a_RD.shape)} and B {list(b_FR.shape)}"
        raise UserError(f"{folder}: {module[:80]!r} has {shapes}, {CONFIG} says rank {rank}")
    alpha = float(_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    lengths = found.get("magnitude_vector")
    return LoRAPair(a_RD, b_FR, alpha, scaling, None if lengths is None else lengths.flatten())


def _pattern(patterns: Mapping[str, float] | None, module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of a module's name, as peft does."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default
