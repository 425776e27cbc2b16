"""Decoding steps in as few PyTorch calls as possible, for plain Llama-like models in float32 on a CPU.

A step of a small model is hundreds of calls of a few microseconds each, so their number counts. The results are bitwise
those of the model's own forward pass (`tests/generate/test_plain.py` compares them): every sum has the same products in
the same order. It avoids module calls, separate rotations of queries and keys, rebuilding masks and indices in every
layer, and temporaries. Models, options or hooks that are unknown here take the general path.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as module_hooks

from whet.generate.cache import KVCache
from whet.kernels import dispatch, eager
from whet.model.attention import KEY_QUANTUM, MIN_QUERY_ROWS, ROW_QUANTUM, exact_attention, round_up
from whet.model.config import options
from whet.model.parts import MLP, Linear, RMSNorm
from whet.model.transformer import TOWER, Attention, Decoder, DecoderLayer, LanguageModel, LlamaLike

KNOWN_MODULES = (
    LlamaLike,
    Decoder,
    DecoderLayer,
    Attention,
    MLP,
    RMSNorm,
    Linear,
    nn.Embedding,
    nn.ModuleList,
)
# Options of a model that are computed here.
KNOWN_OPTIONS = {"rope_scaling", "tie_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "qk_norm"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
FEW_ROWS = 128
"""Up to this many rows the transposed product W x^T is faster: by 20 % at 64 rows, by 60 % at 16 (MKL, AVX2)."""
SILU_ = partial(F.silu, inplace=True)
WIDE = 512
"""From this width on transposing narrow layers' results back pays off; the feed-forward part's need not be."""


def can_step(model: LanguageModel, kv_cache: KVCache) -> bool:
    """Say whether `PlainSteps` computes exactly what this model does: every feature is known, and no kernel should run.

    Args:
        model: The model.
        kv_cache: Its cache.
    """
    if kv_cache.is_tiled or kv_cache.values.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return False
    # No kernel for any tensors: a model whose width has none may have them for its heads, or for its feed-forward part.
    if options(model.config) - KNOWN_OPTIONS or dispatch.runs_cpp():
        return False
    if any(getattr(module_hooks, f"_global{name}") for name in HOOKS):
        return False
    for name, module in model.named_modules():
        if name.partition(".")[0] == TOWER.rstrip("."):  # no step reads images
            continue
        is_changed = "forward" in module.__dict__ or module._compiled_call_impl is not None  # pyright: ignore[reportPrivateUsage]
        if type(module) not in KNOWN_MODULES or is_changed or any(getattr(module, name) for name in HOOKS):
            return False
    tensors = [*model.parameters(), *model.buffers()]
    return all(x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous() for x in tensors)


@cache
def turns_exactly(num_out: int, width: int) -> bool:
    """Say whether W x^T has the bits of x W^T for a weight of this shape, with a bias and without.

    That held for every shape tried (MKL on AVX2); another BLAS may sum in another order: then the transposed product is
    not used.

    Args:
        num_out: Rows of the weight.
        width: Its columns.
    """
    generator = torch.Generator().manual_seed(0)
    num_out = min(num_out, 1024 + num_out % 64)
    x, weight = (torch.randn(n, width, generator=generator) for n in (2 * FEW_ROWS, num_out))
    bias = torch.randn(num_out, generator=generator)
    plain, biased = F.linear(x, weight), F.linear(x, weight, bias)
    for rows in range(ROW_QUANTUM, FEW_ROWS + 1, ROW_QUANTUM):
        few = x[:rows].t()
        turned = torch.mm(weight, few), torch.addmm(bias[:, None], weight, few)
        if not (torch.equal(turned[0].t(), plain[:rows]) and torch.equal(turned[1].t(), biased[:rows])):
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's weights for the steps; all are views of the model's own tensors."""

    norms: tuple[torch.Tensor, torch.Tensor]
    qkvo: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    mlp: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, layer: DecoderLayer, keys: torch.Tensor, values: torch.Tensor) -> _Layer:
        attention, mlp = layer.self_attn, cast(MLP, layer.mlp)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        feed_forward = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        qkvo, mlp_weights = (
            tuple((part.weight, part.bias) for part in parts) for parts in (projections, feed_forward)
        )
        head_norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            head_norms = attention.q_norm.weight, attention.k_norm.weight
        norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        return cls(norms, qkvo, head_norms, mlp_weights, keys.flatten(0, 1), values.flatten(0, 1))


class PlainSteps:
    """Decoding steps of a model that `can_step`; valid while neither weights nor cache move.

    Args:
        model: The model.
        kv_cache: Its cache.
    """

    def __init__(self, model: LanguageModel, kv_cache: KVCache) -> None:
        assert isinstance(model, LlamaLike)
        config = model.config
        self._heads, self._kv_heads, self._channels = config.num_heads, config.num_kv_heads, config.head_dim
        self._eps, self._capacity = config.norm_eps, kv_cache.capacity
        self._embeddings, self._norm = model.model.embed_tokens.weight, model.model.norm.weight
        self._layers = [
            _Layer.of(cast(DecoderLayer, layer), kv_cache.keys[index], kv_cache.values[index])
            for index, layer in enumerate(model.model.layers)
        ]
        ((cos, sin),) = model.rotary(kv_cache.keys.device, kv_cache.size.longest)
        half = config.head_dim // 2
        # Rotation is x cos + (x with swapped halves) sin, with the sign folded into the first half of the sine.
        self._angles = torch.stack((cos, torch.cat((-sin[:, :half], sin[:, half:]), dim=1)), dim=1)
        # Row r of this view masks the keys from position capacity - r on, so that a mask is one lookup.
        line = torch.zeros(2 * self._capacity)
        line[self._capacity :] = float("-inf")
        self._masks = line.as_strided((self._capacity, self._capacity), (1, 1))
        self._row_starts = torch.arange(kv_cache.num_rows * self._kv_heads) * self._capacity
        shapes = (
            (config.intermediate_size, config.hidden_size),
            (config.hidden_size, config.intermediate_size),
        )
        self._turns_mlp = all(turns_exactly(*shape) for shape in shapes)
        projected, attended = (
            self._channels * (self._heads + 2 * self._kv_heads),
            self._channels * self._heads,
        )
        shapes = ((projected, config.hidden_size), (config.hidden_size, attended))
        is_wide = config.hidden_size >= WIDE
        self._turns_attention = is_wide and all(turns_exactly(*shape) for shape in shapes)

    def run(self, tokens_B: torch.Tensor, positions_B: torch.Tensor, deepest: int) -> torch.Tensor:
        """Read one token for each of the cache's first rows; return the hidden states [B, D] that score the next
        tokens.

        Args:
            tokens_B: The tokens.
            positions_B: Their positions.
            deepest: The largest of them.
        """
        count = tokens_B.shape[0]
        surplus = -count % ROW_QUANTUM
        positions_Z = positions_B.repeat_interleave(self._kv_heads)
        slots_Z = self._row_starts[: positions_Z.shape[0]] + positions_Z
        num_keys = min(round_up(deepest + 1, KEY_QUANTUM), self._capacity)
        bias_Z1S = self._masks[:, :num_keys].index_select(0, self._capacity - 1 - positions_Z)[:, None]
        if surplus:
            tokens_B, positions_B = F.pad(tokens_B, (0, surplus)), F.pad(positions_B, (0, surplus))
        rows = tokens_B.shape[0]
        cos_N1C, sin_N1C = self._angles.index_select(0, positions_B)[:, :, None].unbind(1)
        x_ND = self._embeddings.index_select(0, tokens_B)
        attended_ND = x_ND.new_zeros(rows, self._heads * self._channels)
        # Fewer than four queries per head take another BLAS path with other bits: pad with zeros.
        group = self._heads // self._kv_heads
        queries = x_ND.new_zeros(count, self._kv_heads, max(group, MIN_QUERY_ROWS), self._channels)
        for layer in self._layers:
            q, k, v = self._project(
                layer, eager.rms_norm(x_ND, layer.norms[0], self._eps)[0], cos_N1C, sin_N1C
            )
            layer.keys.view(-1, self._channels).index_copy_(0, slots_Z, k[:count].reshape(-1, self._channels))
            layer.values.view(-1, self._channels).index_copy_(
                0, slots_Z, v[:count].reshape(-1, self._channels)
            )
            queries[:, :, :group] = q[:count].view(count, self._kv_heads, group, self._channels)
            out_ZQC, _ = exact_attention(
                queries.flatten(0, 1),
                layer.keys[: slots_Z.shape[0], :num_keys],
                layer.values[: slots_Z.shape[0], :num_keys],
                bias_Z1S,
            )
            attended_ND[:count].view(-1, group, self._channels).copy_(out_ZQC[:, :group])
            x_ND += _product(attended_ND, *layer.qkvo[3], turned=self._turns_attention)
            x_ND += self._feed_forward(layer, eager.rms_norm(x_ND, layer.norms[1], self._eps)[0])
        return eager.rms_norm(x_ND, self._norm, self._eps)[0][:count]

    def _project(
        self, layer: _Layer, x_ND: torch.Tensor, cos_N1C: torch.Tensor, sin_N1C: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated queries and keys, and values, of all heads."""
        rows, channels, num_rotated = x_ND.shape[0], self._channels, self._heads + self._kv_heads
        widths = [heads * channels for heads in (self._heads, self._kv_heads, self._kv_heads)]
        if self._turns_attention and rows <= FEW_ROWS:
            joined = x_ND.new_empty(sum(widths), rows)
            for (weight, bias), out in zip(layer.qkvo[:3], joined.split(widths), strict=True):
                _into(out, weight, x_ND.t(), None if bias is None else bias[:, None])
            joined = joined.t().contiguous()
        else:
            joined = x_ND.new_empty(rows, sum(widths))
            for (weight, bias), out in zip(layer.qkvo[:3], joined.split(widths, dim=1), strict=True):
                _into(out, x_ND, weight.t(), bias)
        heads = joined.view(rows, -1, channels)
        both = heads[:, :num_rotated]
        if layer.head_norms is not None:
            parts = zip(both.split((self._heads, self._kv_heads), dim=1), layer.head_norms, strict=True)
            both = torch.cat([eager.rms_norm(part, weight, self._eps)[0] for part, weight in parts], dim=1)
        both = (both * cos_N1C).addcmul_(both.roll(channels // 2, -1), sin_N1C)
        return both[:, : self._heads], both[:, self._heads :], heads[:, num_rotated:]

    def _feed_forward(self, layer: _Layer, x_ND: torch.Tensor) -> torch.Tensor:
        gate, up, down = layer.mlp
        if not (self._turns_mlp and x_ND.shape[0] <= FEW_ROWS):
            gated = eager.row_wise(SILU_, F.linear(x_ND, *gate))
            return F.linear(gated.mul_(F.linear(x_ND, *up)), *down)
        # Transposed throughout: the element-wise operations between the products do not care.
        x_DN = x_ND.t()
        gated = eager.row_wise(SILU_, _turned(x_DN, *gate))
        return _turned(gated.mul_(_turned(x_DN, *up)), *down).t()


def _into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> None:
    if bias is None:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(bias, left, right, out=out)


def _turned(x_DN: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None) -> torch.Tensor:
    """Return W x + b [F, N]."""
    return torch.mm(weight_FD, x_DN) if bias_F is None else torch.addmm(bias_F[:, None], weight_FD, x_DN)


def _product(
    x_ND: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None, *, turned: bool
) -> torch.Tensor:
    if turned and x_ND.shape[0] <= FEW_ROWS:
        return _turned(x_ND.t(), weight_FD, bias_F).t()
    return F.linear(x_ND, weight_FD, bias_F)
