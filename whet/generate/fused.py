"""Decoding steps as one call of the C++ kernels, if model and machine allow it; the results are bitwise the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from whet.generate.cache import KVCache
from whet.generate.rows import Rows
from whet.kernels import dispatch
from whet.kernels.cpu import ops as cpu
from whet.kernels.cpu.head import RowState
from whet.kernels.cpu.layers import Layers, Side
from whet.model.config import options
from whet.model.lora.several import Mixed
from whet.model.lora.side import Side as LoRASide
from whet.model.lora.side import sides_of
from whet.model.parts import MLP, Linear
from whet.model.quant import packed_parts
from whet.model.transformer import SIDE_NAMES, DecoderLayer, LanguageModel, LlamaLike

CHUNK = 192
"""Prompt tokens per call, so that their activations stay in a core's cache."""
KNOWN_OPTIONS = {"rope_scaling", "tie_embeddings", "attention_bias", "qkv_bias", "qk_norm"}
"""Options of a model that the compiled step computes."""
FUSED_PREFILL = 256
"""Longest prompt read this way: for longer ones attention goes over blocks of queries."""


def can_fuse(model: LanguageModel, cache: KVCache, dtype: torch.dtype) -> bool:
    """Say whether a decoding step can be one call.

    Args:
        model: The model.
        cache: Its cache.
        dtype: Dtype of products.
    """
    if not (isinstance(model, LlamaLike) and cache.is_tiled):
        return False
    if options(model.config) - KNOWN_OPTIONS:
        return False
    is_plain = all(not m._forward_hooks and m._compiled_call_impl is None for m in model.modules())  # pyright: ignore[reportPrivateUsage]
    # Under autocast a head's norm gives float32 queries; the fused step would keep them in the products' dtype.
    has_wide_queries = model.config.qk_norm and model.head_weight.dtype != dtype
    # Under autocast an adapter reads what a norm gives, float32; the fused step has it in the products' dtype.
    sides = [side for _, side in sides_of(model)]
    if sides and (dtype != model.head_weight.dtype or not all(side.is_plain for side in sides)):
        return False
    matrices = [
        p for name, p in model.layers.named_parameters() if p.dim() == 2 and not name.endswith(SIDE_NAMES)
    ]
    # What is not kept would be dequantised for every step; the step reads addresses.
    if any(not part.is_kept or part.shape[-1] % cpu.QUANTUM for part in packed_parts(model)):
        return False
    if not is_plain or has_wide_queries:
        return False
    return dispatch.runs_cpp(model.model.embed_tokens.weight, *matrices, operation="decode")


def fuse(model: LanguageModel, cache: KVCache, dtype: torch.dtype, num_adapters: int = 1) -> Layers:
    """Collect the addresses of a model that `can_fuse`; valid while neither weights nor cache move.

    Args:
        model: The model.
        cache: Its cache.
        dtype: Dtype of products.
        num_adapters: Adapters that stand beside it.
    """
    assert isinstance(model, LlamaLike)
    config, ((cos, sin),) = model.config, model.rotary(cache.keys.device, cache.size.longest)
    layers = [_tensors(layer, dtype) for layer in model.model.layers if isinstance(layer, DecoderLayer)]
    return Layers(
        layers,
        [cache.kernel_cache(index) for index in range(len(layers))],
        embeddings=model.model.embed_tokens.weight.detach(),
        norm=model.model.norm.weight.detach(),
        cos=cos,
        sin=sin,
        num_rows=max(cache.num_rows, CHUNK),
        heads=(config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size),
        eps=config.norm_eps,
        sides=[
            _sides(layer, num_adapters) for layer in model.model.layers if isinstance(layer, DecoderLayer)
        ],
    )


def _parts(layer: DecoderLayer) -> dict[str, Linear]:
    attention, mlp = layer.self_attn, cast(MLP, layer.mlp)
    parts = {name: getattr(attention, f"{name}_proj") for name in "qkvo"}
    return parts | {name: getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")}


def _sides(layer: DecoderLayer, count: int) -> list[dict[str, Side]]:
    """Return the adapters of a layer, packed: for each of `count` adapters what stands beside its products."""
    found: list[dict[str, Side]] = [{} for _ in range(count)]
    for name, part in _parts(layer).items():
        if (beside := part.side) is None:
            continue
        each = beside.numbered if isinstance(beside, Mixed) else {0: cast(LoRASide, beside)}
        for number, side in each.items():
            a, b = (cpu.panels(tensor, torch.float32) for tensor in (side.lora_A, side.lora_B))
            found[number][name] = Side(a, b, side.lora_A.shape[0], side.scaling)
    return found


def prefill(
    layers: Layers,
    tokens_M: torch.Tensor,
    positions_M: torch.Tensor,
    slots: Sequence[int],
    lengths: Sequence[int],
    places_M: torch.Tensor | None = None,
    adapters_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """Read concatenated prompts into slots of the cache; return hidden states [M, D].

    Args:
        layers: The model's layers.
        tokens_M: Token ids of all prompts.
        positions_M: Their positions.
        slots: Slot of each prompt.
        lengths: Tokens of each prompt.
        places_M: Places for each token's activations; None keeps nothing.
        adapters_M: Number of each token's adapter; None where there are not several.
    """
    slots_M = torch.tensor(slots).repeat_interleave(torch.tensor(lengths))
    hidden = []
    for first in range(0, tokens_M.shape[0], CHUNK):
        part = slice(first, first + CHUNK)
        places, adapters = (None if row is None else row[part] for row in (places_M, adapters_M))
        hidden.append(layers.run(tokens_M[part], positions_M[part], slots_M[part], places, adapters))
    return torch.cat(hidden)


def _tensors(layer: DecoderLayer, dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
    attention, parts = layer.self_attn, _parts(layer)
    tensors: dict[str, torch.Tensor | None] = {
        name: cpu.panels(part.weight if part.packed is None else part.packed.dense(dtype), dtype)
        for name, part in parts.items()
    }
    for name in "qkvo":
        bias = parts[name].bias
        tensors[f"{name}_bias"] = None if bias is None else bias.detach().to(dtype)
    norms = {"norm1": layer.input_layernorm, "norm2": layer.post_attention_layernorm}
    norms |= {"q_norm": attention.q_norm, "k_norm": attention.k_norm}
    return tensors | {name: None if part is None else part.weight.detach() for name, part in norms.items()}


def row_state(state: Rows, first: int, stop_ids: torch.Tensor) -> RowState:
    """Return the addresses of an engine's rows from `first` on; valid while the rows live."""
    names = ("seeds", "positions", "counts", "limits", "last", "tokens", "logprobs", "done", "stopped")
    addresses = (getattr(state, name)[first:].data_ptr() for name in names)
    return RowState(*addresses, state.tokens.shape[1], stop_ids.data_ptr(), stop_ids.numel())
