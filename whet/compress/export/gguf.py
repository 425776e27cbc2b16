"""GGUF, llama.cpp's format: whet's own map of shapes and tensors for each family, written through the `gguf` package.

What llama.cpp computes for an architecture is fixed in its source, so a model that has anything else is refused by
name. What can be folded into weights is: Gemma's 1 + w norms, scales of queries.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whet.compress.export.kquants import K_TYPES, encode, k_type
from whet.compress.export.vocabulary import Vocabulary
from whet.model.config import STORED, Block, ModelConfig, Rope
from whet.model.families import rope_parameters
from whet.model.gguf import (
    ARCHITECTURES,
    EMBEDDINGS,
    FACTORS,
    FUSED,
    HEAD,
    LAYER,
    NO_CAP,
    PERMUTED,
    SANDWICHED,
    TABLES,
    TOP,
    Architecture,
    import_gguf,
    model_type,
    neighbours,
    scaled,
    split_name,
)
from whet.model.keys import Keys
from whet.model.lora.adapter import Adapter
from whet.model.transformer import LanguageModel
from whet.types import UserError

FILE_TYPES: dict[str, tuple[int, str]] = {"f32": (0, "F32"), "f16": (1, "F16"), "bf16": (32, "BF16")}
FILE_TYPES |= {"q8_0": (7, "Q8_0")} | K_TYPES
"""Number of the whole file's type, and name of its matrices' type."""
Q8_BLOCK = 32


def architecture(config: ModelConfig) -> Architecture:
    """Return llama.cpp's architecture of a model.

    Raises:
        UserError: If the family, or something that the model computes, is not one that whet writes.
    """
    kind = model_type(config)
    if config.is_reward:
        raise UserError("a reward model, which writes no text, has no place in GGUF; use --to hf")
    if kind not in ARCHITECTURES:
        raise UserError(
            f"GGUF of a {kind} model is not written here; expected one of {', '.join(ARCHITECTURES)}: use --to hf, "
            "then llama.cpp's convert_hf_to_gguf.py on that folder"
        )
    arch, default = ARCHITECTURES[kind], Block()
    for item in fields(Block):
        is_known = item.name in arch.flags | STORED or item.name == "qkv_bias"
        if not is_known and getattr(config.block, item.name) != getattr(default, item.name):
            raise _no(kind, f"{item.name} = {str(getattr(config.block, item.name))[:60]}")
    _check_layers(config, kind, arch)
    if arch.is_square and config.num_heads * config.head_dim != config.hidden_size:
        raise _no(kind, f"heads of {config.head_dim} channels in a width of {config.hidden_size}")
    if arch.is_tied and not config.tie_embeddings:
        raise _no(kind, "head of its own, beside the table of embeddings,")
    experts = config.block.experts
    if experts is not None and (experts.score != "softmax" or not experts.is_normalised or experts.shared):
        raise _no(kind, "experts whose weights are not a softmax that sums to 1")
    if experts is not None and not all(spec.has_experts for spec in config.layers):
        raise _no(kind, "layers without experts among those with them")
    return arch


def _no(kind: str, what: str) -> UserError:
    return UserError(f"GGUF of a {kind} model: llama.cpp has no {what} there; use --to hf")


def _check_layers(config: ModelConfig, kind: str, arch: Architecture) -> None:
    """Refuse layers that differ from what llama.cpp has built in."""
    for index, spec in enumerate(config.layers):
        is_full = not arch.window_every or (index + 1) % arch.window_every == 0
        has_rope = kind != "smollm3" or (index + 1) % 4 != 0
        if spec.mixer != "attention" or spec.source >= 0 or spec.head_dim or spec.num_kv_heads:
            raise _no(kind, f"such layer as layer {index}")
        if has_rope != (spec.rope >= 0):
            raise _no(kind, f"layer {index} {'without' if has_rope else 'with'} rotary positions")
        if arch.window_every and windows(config) and is_full == bool(spec.window):
            raise _no(
                kind, f"layer {index} with window {spec.window}: one layer of {arch.window_every} sees all"
            )


def windows(config: ModelConfig) -> int:
    """Return the windowed layers' window in tokens; 0 where all layers see all positions."""
    found = {spec.window for spec in config.layers if spec.window}
    if len(found) > 1:
        raise _no(model_type(config), "two sizes of windows")
    return next(iter(found), 0)


def context_length(config: ModelConfig) -> int:
    """Return the longest context that llama.cpp computes as whet does.

    An architecture without windows there (Mistral) is the same model up to the first window's length.
    """
    arch, window = ARCHITECTURES[model_type(config)], windows(config)
    return min(config.max_positions, window) if window and not arch.window_every else config.max_positions


def metadata(config: ModelConfig) -> dict[str, bool | int | float | str]:
    """Return the shape as GGUF's keys, without the architecture's name before each."""
    arch, block, kind = architecture(config), config.block, model_type(config)
    found: dict[str, bool | int | float | str] = {
        "context_length": context_length(config),
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "vocab_size": config.vocab_size,
    }
    if config.family == "gpt2":
        return found | {"attention.layer_norm_epsilon": config.norm_eps}
    found |= {
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    found |= _rope_metadata(config, arch)
    if arch.window_every:  # an absent key means another window there
        found["attention.sliding_window"] = windows(config) or config.max_positions
    if block.attention_cap and arch.name == "gemma3":
        raise _no(kind, "cap of attention's scores")
    if arch.name == "gemma2":  # absent keys mean Gemma 2's own values, and 0 makes every logit 0
        found["attn_logit_softcapping"] = block.attention_cap or NO_CAP
        found["final_logit_softcapping"] = block.logit_cap or NO_CAP
    elif block.logit_cap:
        found["final_logit_softcapping"] = block.logit_cap
    if arch.name == "granite":
        found |= {
            "embedding_scale": block.embedding_scale,
            "residual_scale": block.residual_scale,
            "logit_scale": 1 / block.logit_scale,
            "attention.scale": block.query_scale / math.sqrt(config.head_dim),
        }
    if block.experts is not None:
        found |= {
            "expert_count": block.experts.count,
            "expert_used_count": block.experts.top_k,
            "expert_feed_forward_length": block.experts.width,
        }
        if arch.name == "llama":
            found["feed_forward_length"] = block.experts.width
    return found


def _rope_metadata(config: ModelConfig, arch: Architecture) -> dict[str, bool | int | float | str]:
    main, local = _two_ropes(config, arch)
    found: dict[str, bool | int | float | str] = {
        "rope.freq_base": main.theta if main else config.rope_theta,
        "rope.dimension_count": main.dims if main else config.head_dim,
    }
    if main is not None and (
        main.is_interleaved or (main.dims != config.head_dim and not arch.has_part_ropes)
    ):
        raise _no(model_type(config), "rotation of a part of each head")
    if main is not None and arch.name in FACTORS:
        if main.amplitude != 1.0:
            found["rope.scaling.attn_factor"] = main.amplitude
    elif main is not None and len(set(main.divisors)) > 1:
        found |= _yarn_metadata(config, main)
    elif main is not None and main.amplitude != 1.0:
        raise _no(model_type(config), "sharpened rotary positions of one divisor")
    elif main is not None and set(main.divisors) - {1.0}:
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": main.divisors[0]}
    if config.rope_scaling is not None and arch.name not in FACTORS:
        raise _no(model_type(config), "scaling of rotary positions of the kind llama3")
    if arch.name == "gemma3":
        if local is not None and (local.divisors or local.amplitude != 1.0):
            raise _no(model_type(config), "scaling of the windowed layers' rotary positions")
        found["rope.freq_base_swa"] = local.theta if local is not None else found["rope.freq_base"]
    return found


def _two_ropes(config: ModelConfig, arch: Architecture) -> tuple[Rope | None, Rope | None]:
    """Return the layers' rope and, for Gemma 3, that of those which have a window there; None for the plain one.

    A layer's place decides: in llama.cpp it turns as windowed layers do even if the file's window is the context.
    """
    ropes = config.block.ropes
    if not ropes:
        return None, None
    places: tuple[set[int], set[int]] = (set(), set())
    for index, spec in enumerate(config.layers):
        is_local = arch.name == "gemma3" and (index + 1) % arch.window_every != 0
        if spec.rope >= 0:
            places[is_local].add(spec.rope)
    if any(len(found) > 1 for found in places):
        raise _no(model_type(config), "such order of two rotary positions")
    main, local = (ropes[next(iter(found), 0)] for found in places)
    return main, local


def _yarn_metadata(config: ModelConfig, rope: Rope) -> dict[str, int | float | str]:
    """Return yarn's settings for an architecture that computes the divisors itself.

    Source: ggml's rope_yarn and ggml_rope_yarn_corr_dims; llama-context.cpp sets the amplitude to 0.1 ln(factor) + 1,
    times attn_factor.
    """
    given = rope_parameters(Keys(json.loads(config.source or "{}")))
    kind = given.get("rope_type", given.get("type"))
    refused = _no(model_type(config), f"scaling of rotary positions of the kind {str(kind)[:40]}")
    if kind != "yarn" or len(config.block.ropes) > 1:
        raise refused
    original = int(given.get("original_max_position_embeddings") or config.max_positions)
    factor = float(given.get("factor") or config.max_positions / original)

    def index(turns: float) -> float:
        return rope.dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = max(math.floor(index(32)), 0), min(math.ceil(index(1)), rope.dims - 1)  # others are not read
    ramps = (min(1.0, max(0.0, (i - low) / max(0.001, high - low))) for i in range(rope.dims // 2))
    theirs = (1 / (ramp / factor + 1 - ramp) for ramp in ramps)
    if any(abs(a - b) > 1e-6 * a for a, b in zip(rope.divisors, theirs, strict=True)):
        raise refused
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": rope.amplitude / usual,
    }


def rope_divisors(config: ModelConfig) -> torch.Tensor | None:
    """Return the divisor of each rotary frequency, where there are any."""
    if config.rope_scaling is not None:
        scaling, dims = config.rope_scaling, config.head_dim
        waves = 2 * math.pi * config.rope_theta ** (torch.arange(0, dims, 2, dtype=torch.float64) / dims)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = ((scaling.original_max_positions / waves - low) / (high - low)).clamp(0, 1)
        return (1 / ((1 - smooth) / scaling.factor + smooth)).float()
    rope = config.block.ropes[0] if config.block.ropes else None
    return torch.tensor(rope.divisors) if rope is not None and rope.divisors else None


def check_names(model: LanguageModel) -> None:
    """Refuse a model with a tensor that has no place in GGUF."""
    arch, kind = architecture(model.config), model_type(model.config)
    metadata(model.config)
    names = LAYER | (SANDWICHED if arch.has_sandwich else {})
    for name, _ in model.named_parameters():
        if name in TOP:
            continue
        _, part, end = split_name(name)
        if part == "mlp.experts":
            continue
        if part not in names:
            raise _no(kind, f"tensor {name!r}")
        has_bias = part.startswith(("attn.", "ln_", "mlp.c_")) or part.rpartition(".")[2] in arch.biases
        has_bias |= "mlp" in arch.biases and part.startswith("mlp.")
        if end == "bias" and not has_bias:
            raise _no(kind, f"bias {name!r}")


def tensors(model: LanguageModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's tensors in float32 under GGUF's names, as llama.cpp multiplies with them.

    Raises:
        UserError: If a tensor has no place there.
    """
    check_names(model)
    config = model.config
    arch, kind = architecture(config), model_type(config)
    names = LAYER | (SANDWICHED if arch.has_sandwich else {})
    parameters = dict(model.named_parameters())
    divisors = rope_divisors(config)
    if divisors is not None:
        for label in FACTORS.get(arch.name, ()):
            yield f"{label}.weight", divisors
    for name, parameter in parameters.items():
        tensor = parameter.detach().float().cpu()
        if config.block.norm_offset and name.endswith("norm.weight"):
            tensor = tensor + config.block.norm_offset
        if name in TOP:
            # Rows that are no token's are left out: whet never draws them, and llama.cpp would.
            yield TOP[name], tensor[: model.num_valid_tokens] if name in TABLES else tensor
            continue
        layer, part, end = split_name(name)
        if arch.name in FUSED and part == "mlp.gate_proj":
            continue  # beside `up_proj`
        if arch.name in FUSED and part == "mlp.up_proj":
            gate = parameters[name.replace("up_proj", "gate_proj")].detach().float().cpu()
            tensor = torch.cat((gate, tensor))
        if part == "mlp.experts":
            yield from _experts(f"blk.{layer}", end, tensor)
            continue
        if kind == "gpt2" and end == "weight" and tensor.dim() == 2:
            tensor = tensor.t().contiguous()
        if arch.name in PERMUTED and part in ("self_attn.q_proj", "self_attn.k_proj"):
            tensor = neighbours(tensor, config.head_dim)
        tensor = scaled(part, tensor, config, arch)
        yield f"blk.{layer}.{names[part]}.{end}", tensor


def labels(model: LanguageModel) -> dict[str, str]:
    """Return GGUF's names of a model's matrices by whet's; experts' and what is joined to another one are left out."""
    arch = architecture(model.config)
    names = LAYER | (SANDWICHED if arch.has_sandwich else {})
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if name in TOP:
            found[name] = TOP[name]
            continue
        layer, part, end = split_name(name)
        is_joined = arch.name in FUSED and part == "mlp.gate_proj"
        if parameter.dim() == 2 and part in names and not is_joined:
            found[name] = f"blk.{layer}.{names[part]}.{end}"
    return found


def _experts(block: str, end: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if end == "gate_up_proj":
        gate, up = tensor.chunk(2, dim=1)
        yield f"{block}.ffn_gate_exps.weight", gate.contiguous()
        yield f"{block}.ffn_up_exps.weight", up.contiguous()
    else:
        yield f"{block}.ffn_down_exps.weight", tensor


def stored_type(name: str, shape: torch.Size, kind: str, config: ModelConfig) -> str:
    """Return the type of one tensor in a file of a type: vectors and routers stay in float32, as in llama.cpp's own
    files, and rows that blocks of 32 do not fill are float16."""
    is_matrix = len(shape) >= 2 and not name.endswith(("ffn_gate_inp.weight", "position_embd.weight"))
    if not is_matrix:
        return "F32"
    if kind == "q8_0" and shape[-1] % Q8_BLOCK:
        return "F16"
    return k_type(name, shape[-1], kind, config) if kind in K_TYPES else FILE_TYPES[kind][1]


def write_gguf(
    model: LanguageModel,
    vocabulary: Vocabulary,
    path: Path,
    kind: str,
    *,
    name: str = "",
    importance: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write one GGUF file.

    Args:
        model: The model.
        vocabulary: Its tokens, as `vocabulary.express` gives them.
        path: The file.
        kind: Type of the matrices, a name of `FILE_TYPES`.
        name: Name of the model in the file.
        importance: Of types below 8 bits, weight of each matrix's inputs by its name; None for all alike.

    Raises:
        UserError: If the model cannot be expressed, or the `gguf` package is missing.
    """
    gguf = import_gguf()
    arch = architecture(model.config)
    facts = metadata(model.config) | {"vocab_size": model.num_valid_tokens}
    writer = gguf.GGUFWriter(str(path), arch.name)
    try:
        writer.add_type("model")
        writer.add_name(vocabulary.model_name(name or path.stem))
        writer.add_file_type(FILE_TYPES[kind][0])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, value in facts.items():
            _add(writer, f"{arch.name}.{key}", value)
        for key, value in vocabulary.facts.items():
            _add(writer, f"tokenizer.{key}", value)
        types, sizes = {}, {}
        for label, tensor in tensors(model):  # their shapes come first in a file
            number = gguf.GGMLQuantizationType[stored_type(label, tensor.shape, kind, model.config)]
            block, size = gguf.GGML_QUANT_SIZES[number]
            row = tensor.shape[-1] // block * size
            types[label] = number
            bytes_ = (*tensor.shape[:-1], row)
            sizes[label] = math.prod(bytes_)
            writer.add_tensor_info(label, bytes_, np.dtype(np.uint8), sizes[label], raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for label, tensor in tensors(model):  # one after the other: a copy of all would double the memory
            values, number = np.ascontiguousarray(tensor.numpy()), types[label]
            if kind in K_TYPES and number.name[0] == "Q":
                data = encode(values, int(number), sizes[label], (importance or {}).get(label))
            else:
                data = gguf.quants.quantize(values, number)
            writer.write_tensor_data(data)
    finally:
        writer.close()


def write_lora(adapter: Adapter, model: LanguageModel, path: Path) -> None:
    """Write an adapter's pairs as llama.cpp's --lora reads them, beside any GGUF file of its base.

    Args:
        adapter: The adapter, under whet's own names.
        model: Its base.
        path: The file.

    Raises:
        UserError: If something of it has no place there: whole tensors, DoRA, experts, embeddings, Phi-3's joined gate.
    """
    gguf, arch, names = import_gguf(), architecture(model.config), labels(model)
    if adapter.saved or any(pair.magnitude_F is not None for pair in adapter.pairs.values()):
        raise UserError("llama.cpp's adapters have no whole tensors and no DoRA")
    writer = gguf.GGUFWriter(str(path), arch.name)
    try:
        writer.add_type("adapter")
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)  # none: B is scaled, for ranks may differ
        for module, pair in adapter.pairs.items():
            label = names.get(f"{module}.weight")
            is_joined = arch.name in FUSED and module.endswith("mlp.up_proj")
            if label is None or label == EMBEDDINGS or is_joined:
                raise UserError(f"llama.cpp's adapters have no place for a change of {module[:80]!r}")
            part = "" if label == HEAD else split_name(f"{module}.weight")[1]
            b = pair.scaling * pair.b_FR.float().cpu()
            if arch.name in PERMUTED and part in ("self_attn.q_proj", "self_attn.k_proj"):
                b = neighbours(b, model.config.head_dim)
            b = scaled(part, b, model.config, arch)
            for side, tensor in (("a", pair.a_RD.float().cpu()), ("b", b)):
                writer.add_tensor(f"{label}.lora_{side}", np.ascontiguousarray(tensor.numpy()))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    """Write a key with the type that llama.cpp reads it as."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
