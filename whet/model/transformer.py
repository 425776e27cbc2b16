"""The decoder on flat tokens: one module that trains, prefills and decodes, for all families with rotary positions.

Parameter names are Hugging Face's. Positions are always explicit; rotary tables are float32; there is no
dropout anywhere.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from whet.kernels import dispatch, eager
from whet.kernels.cpu import ops as cpu
from whet.model.attention import ROW_QUANTUM, AttentionContext, Packed, Rule, Shared, round_up
from whet.model.checkpointing import Recompute
from whet.model.config import TOWER, Block, LayerSpec, ModelConfig, has_own_rules, kv_shape
from whet.model.experts import MixtureOfExperts
from whet.model.mixers import ConvolutionMixer, DeltaMixer, LatentAttention
from whet.model.parts import MLP, Layer, Linear, RMSNorm, UnitNorm, embedding, outputs
from whet.model.quant import packed_parts
from whet.model.rotary import Angles, axes_of, rotary_tables, table_rows, turn
from whet.model.routing import Routing
from whet.model.vision.ids import IMAGE
from whet.model.vision.pixels import read_preprocessing
from whet.model.vision.store import ImageRows, ImageStore
from whet.model.vision.tower import make_tower


class Attention(nn.Module):
    """Grouped-query self-attention.

    Args:
        config: Shape of the model.
        spec: What is this layer's own.
    """

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        width, block = config.hidden_size, config.block
        num_kv_heads, channels = kv_shape(spec, config)
        heads, kv_heads = config.num_heads * channels, num_kv_heads * channels
        qkv_bias = config.attention_bias or config.qkv_bias
        self.head_dim, self.clip, self.query_scale = channels, block.qkv_clip, _query_scale(block, channels)
        self.is_gated, self.has_whole_norms = block.is_gated, block.whole_qk_norm
        self.has_values = spec.has_values
        self.is_interleaved = bool(block.ropes) and spec.rope >= 0 and block.ropes[spec.rope].is_interleaved
        self.rule = Rule(spec.window, block.attention_cap) if has_own_rules(config) else None
        self.q_proj = Linear(width, heads * (2 if block.is_gated else 1), bias=qkv_bias)
        self.k_proj = Linear(width, kv_heads, bias=qkv_bias)
        if spec.has_values:
            self.v_proj = Linear(width, kv_heads, bias=qkv_bias)
        self.o_proj = Linear(heads, width, bias=config.attention_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm or block.whole_qk_norm:
            widths = (heads, kv_heads) if block.whole_qk_norm else (channels, channels)
            self.q_norm, self.k_norm = (RMSNorm(n, config.norm_eps, block.norm_offset) for n in widths)
        self.v_norm = UnitNorm(config.norm_eps) if block.has_value_norm else None
        if block.has_sinks:
            self.sinks = nn.Parameter(torch.zeros(config.num_heads))

    def forward(
        self,
        x_ND: torch.Tensor,
        angles: Angles | None,
        context: AttentionContext,
        shared: Shared,
        layer: int,
    ) -> torch.Tensor:
        """Project, rotate, attend within the context, project back."""
        rows = x_ND.shape[0]
        readers = (self.q_proj, self.k_proj, *((self.v_proj,) if self.has_values else ()))
        q, k, *rest = outputs(x_ND, *readers)
        gate = None
        if self.is_gated:
            q, gate = (
                part.reshape(rows, -1) for part in q.view(rows, -1, 2 * self.head_dim).chunk(2, dim=-1)
            )
        v = (rest[0] if rest else k).view(rows, -1, self.head_dim)
        if self.v_norm is not None:
            v = self.v_norm(v)
        if not self.has_whole_norms:
            q, k = q.view(rows, -1, self.head_dim), k.view(rows, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.view(rows, -1, self.head_dim), k.view(rows, -1, self.head_dim)
        if self.clip:
            q, k, v = (x.clamp(-self.clip, self.clip) for x in (q, k, v))
        if angles is not None:
            q, k = (turn(x, angles, is_interleaved=self.is_interleaved) for x in (q, k))
            if angles.query_scale_N11 is not None:
                q = q * angles.query_scale_N11
        # A head's norm under autocast gives float32; products are of one dtype.
        q, k = q.to(v.dtype), k.to(v.dtype)
        if self.query_scale != 1.0:
            q = q * self.query_scale
        rule = self.rule
        if rule is not None and hasattr(self, "sinks"):
            rule = rule._replace(sinks_H=self.sinks)
        if layer in shared:
            shared[layer] = k, v
        out = context.attend(layer, q, k, v, rule).reshape(rows, -1)
        out = out if gate is None else out * eager.row_wise(torch.sigmoid, gate)
        return outputs(out, self.o_proj)[0]


def _query_scale(block: Block, channels: int) -> float:
    """Return the factor of queries whose products with keys are divided by sqrt(channels)."""
    return block.query_scale * (math.sqrt(channels) if block.is_unscaled else 1.0)


class ReadingAttention(nn.Module):
    """Attention to the keys and values of a layer before it, as the last layers of Gemma 4's small models have it.

    Args:
        config: Shape of the model.
        spec: What is this layer's own.
    """

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        width, block = config.hidden_size, config.block
        channels = kv_shape(spec, config)[1]
        heads = config.num_heads * channels
        self.head_dim, self.source, self.query_scale = channels, spec.source, _query_scale(block, channels)
        self.rule = Rule(spec.window, block.attention_cap)
        self.q_proj = Linear(width, heads, bias=config.attention_bias)
        self.o_proj = Linear(heads, width, bias=config.attention_bias)
        self.q_norm = RMSNorm(channels, config.norm_eps, block.norm_offset)

    def forward(
        self,
        x_ND: torch.Tensor,
        angles: Angles | None,
        context: AttentionContext,
        shared: Shared,
        layer: int,
    ) -> torch.Tensor:
        """Project queries, rotate, attend within the context, project back."""
        rows = x_ND.shape[0]
        k, v = shared[self.source]
        q = self.q_norm(self.q_proj(x_ND).view(rows, -1, self.head_dim))
        if angles is not None:
            q = turn(q, angles, is_interleaved=False)
        q = q.to(v.dtype) * self.query_scale
        # Under the source's name: a cache writes the same keys and values again where they are.
        out = context.attend(self.source, q, k, v, self.rule)
        return self.o_proj(out.reshape(rows, -1))


class DecoderLayer(Layer):
    """Attention and feed-forward part with residual connections; norms before, after or around each.

    Args:
        config: Shape of the model.
        spec: What is this layer's own.
    """

    self_attn: Attention
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        block = config.block
        if spec.mixer == "delta" and block.delta is not None:
            self.mixer = "linear_attn"
            self.linear_attn = DeltaMixer(config, block.delta)
        elif spec.mixer == "convolution":
            self.mixer = "conv"
            self.conv = ConvolutionMixer(config)
        else:
            self.mixer = "self_attn"
            if block.latent is not None:
                own = LatentAttention(config, spec, block.latent)
            elif spec.source >= 0:
                own = ReadingAttention(config, spec)
            else:
                own = Attention(config, spec)
            self.add_module("self_attn", own)
        if spec.has_experts and block.experts is not None:
            self.mlp = MixtureOfExperts(config, block.experts)
        else:
            self.mlp = MLP(config, spec.intermediate_size)
        self.scale = config.block.residual_scale
        self.norms = config.block.norms
        for name in filter(None, self.norms):
            self.add_module(name, RMSNorm(config.hidden_size, config.norm_eps, config.block.norm_offset))
        if block.input_width:
            self.per_layer_input_gate = Linear(config.hidden_size, block.input_width, bias=False)
            self.per_layer_projection = Linear(block.input_width, config.hidden_size, bias=False)
            self.post_per_layer_input_norm = RMSNorm(config.hidden_size, config.norm_eps, block.norm_offset)
        if block.has_layer_scale:
            self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False)

    def mix(self, x_ND: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Return the residual stream after attention; `rest` is what that takes beside its input."""
        before, after = self.norms[:2]
        mixed_ND = self.get_submodule(self.mixer)(self._normed(before, x_ND), *rest)
        return self._add(x_ND, self._normed(after, mixed_ND))

    def feed(self, x_ND: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Return the residual stream after the feed-forward part; `rest` is what `mix` takes, for routers."""
        before, after = self.norms[2:]
        _, context, _, index = rest
        routing: Routing | None = context.routing
        routed = None if routing is None else routing.layer(index)
        told = () if routed is None else (routed,)
        return self._add(x_ND, self._normed(after, self.mlp(self._normed(before, x_ND), *told)))

    def finish(self, x_ND: torch.Tensor, input_NP: torch.Tensor | None) -> torch.Tensor:
        """Return the residual stream after what the layer reads of the tokens themselves, and the layer's scale."""
        if input_NP is not None:
            gate_NP = eager.gelu(self.per_layer_input_gate(x_ND))
            read_ND = self.per_layer_projection(gate_NP * input_NP)
            x_ND = x_ND + self.post_per_layer_input_norm(read_ND)
        return x_ND * self.layer_scalar

    def _normed(self, name: str, x_ND: torch.Tensor) -> torch.Tensor:
        return getattr(self, name)(x_ND) if name else x_ND

    def _add(self, x_ND: torch.Tensor, part_ND: torch.Tensor) -> torch.Tensor:
        return x_ND + (part_ND if self.scale == 1.0 else part_ND * self.scale)


class Decoder(nn.Module):
    """Embeddings, layers and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, spec) for spec in config.layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.block.norm_offset)
        width = config.block.input_width
        if width:
            self.embed_tokens_per_layer = embedding(config.input_rows, config.num_layers * width)
            self.per_layer_model_projection = Linear(
                config.hidden_size, config.num_layers * width, bias=False
            )
            self.per_layer_projection_norm = RMSNorm(width, config.norm_eps, config.block.norm_offset)

    def inputs(self, tokens_N: torch.Tensor, x_ND: torch.Tensor) -> torch.Tensor:
        """Return what each layer reads of the tokens themselves [N, L, P].

        Args:
            tokens_N: The tokens.
            x_ND: Their embeddings.
        """
        layers, width = len(self.layers), self.per_layer_projection_norm.weight.shape[0]
        own = _scaled(F.embedding(tokens_N, self.embed_tokens_per_layer.weight), math.sqrt(width))
        projected = self.per_layer_model_projection(x_ND) * x_ND.shape[1] ** -0.5
        normed_NLP = self.per_layer_projection_norm(projected.view(-1, layers, width))
        return (normed_NLP + own.view(-1, layers, width)) * 2**-0.5


def _scaled(x_ND: torch.Tensor, scale: float) -> torch.Tensor:
    """Multiply by a number, rounded first, as a tensor of the parameters' dtype would be."""
    return x_ND * torch.tensor(scale).to(x_ND.dtype).item()


SIDE_NAMES = (".lora_A", ".lora_B", ".side.magnitude")
"""Parameters of adapters."""


class LanguageModel(nn.Module):
    """What both architectures share: flat tokens in, hidden states out; the caller computes the logits.

    Attributes:
        config: Shape of the model.
        num_valid_tokens: Ids at and above this are never scored nor sampled (unused rows of a padded
            vocabulary).
        score: A reward model's head; None in a language model.
        checkpoint_layers: Whether training recomputes layers' activations in the backward pass.
        recompute: What of them, where `checkpoint_layers` is on.
        loss_scale: Factor of the losses that training backpropagates; 1 outside float16.
        sampling_defaults: What the folder's generation_config.json says of sampling, for chats and what is written.
        merged_adapters: SHA-256 of the adapters that were merged into the weights.
        images: The images that prompts may name (`whet.model.vision`); None for a model that reads text alone.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.num_valid_tokens = config.vocab_size
        self.score: nn.Module | None = None
        self.checkpoint_layers = False
        self.loss_scale = 1.0
        self.recompute = Recompute()
        self.sampling_defaults: dict[str, Any] = {}
        self.merged_adapters: tuple[str, ...] = ()
        self.images: ImageStore | None = None

    @property
    def undrawn_id(self) -> int | None:
        """An image's placeholder, which is never sampled: no image would belong to it. None without images."""
        return None if self.config.vision is None else self.config.vision.token_id

    def forward(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """Run the decoder on flat tokens.

        Args:
            tokens_N: int64 token ids of all sequences, without padding; of images those that their store gave.
            positions_N: int64 position of each token in its own sequence.
            context: What each row may see.

        Returns:
            Hidden states [N, D] after the final norm.
        """
        count = tokens_N.shape[0]
        # The kernels' products do not care how many rows there are; PyTorch's, for what they decline, do.
        serves = dispatch.kernel_for(eager.linear, self.head_weight, self.head_weight) is not None
        quantum = 1 if serves and not self.has_odd_products else ROW_QUANTUM
        surplus = round_up(count, quantum) - count
        if surplus:
            tokens_N, positions_N = F.pad(tokens_N, (0, surplus)), F.pad(positions_N, (0, surplus))
        hidden = self._forward(tokens_N, positions_N, context)
        return hidden[:count] if surplus else hidden

    @cached_property
    def has_odd_products(self) -> bool:
        """Whether some product has a size that the kernels decline."""
        own = [
            p.shape
            for name, p in self.named_parameters()
            if not name.endswith(SIDE_NAMES) and not name.startswith(TOWER)  # padded, and run by itself
        ]
        shapes = [*own, *(part.shape for part in packed_parts(self))]
        return any(len(shape) == 2 and shape[-1] % cpu.QUANTUM for shape in shapes)

    def _forward(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        raise AssertionError("abstract")

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T, V] of whole rows, for a quick look; training and sampling never build them.

        Args:
            tokens_BT: int64 token ids, without padding.
        """
        rows, length = tokens_BT.shape
        positions_N = torch.arange(length, device=tokens_BT.device).repeat(rows)
        hidden_ND = self(tokens_BT.reshape(-1), positions_N, Packed([length] * rows, tokens_BT.device))
        logits_NV, cap = F.linear(hidden_ND, self.head_weight), self.config.block.logit_cap
        return (torch.tanh(logits_NV / cap) * cap if cap else logits_NV).view(rows, length, -1)

    @property
    def head_weight(self) -> torch.Tensor:
        """Output projection [V, D]."""
        raise AssertionError("abstract")

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers, first to last."""
        raise AssertionError("abstract")

    def _run(self, layer: Layer, x_ND: torch.Tensor, *rest: object) -> torch.Tensor:
        if self.checkpoint_layers and torch.is_grad_enabled():
            return self.recompute.run(layer, x_ND, *rest)
        return layer(x_ND, *rest)


def heads(config: ModelConfig) -> tuple[Linear | None, Linear | None]:
    """Make what follows the decoder: an untied output head (None: tied), or a reward model's head of one number."""
    if config.is_reward:
        return None, Linear(config.hidden_size, 1, bias=False)
    if config.tie_embeddings:
        return None, None
    return Linear(config.hidden_size, config.vocab_size, bias=False), None


class LlamaLike(LanguageModel):
    """A decoder with rotary positions and a language-model head, or a reward model's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head, self.score = heads(config)
        if config.vision is not None:
            self.visual = make_tower(config.vision)
            self.images = ImageStore(read_preprocessing({}, config.vision, "the defaults"))
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def head_weight(self) -> torch.Tensor:
        """Output projection [V, D]."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers, first to last."""
        return self.model.layers

    def rotary(
        self, device: torch.device, longest: int | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return cos and sin of each rope, float32 [positions, C] each; kept until a longer sequence comes.

        Args:
            device: Where they live.
            longest: Positions that are read; default: the whole context.
        """
        rows = table_rows(longest or self.config.max_positions, self.config)
        if not self._tables or self._tables[0][0].device != device or self._tables[0][0].shape[0] < rows:
            # Made under no autograd mode and kept float32: a bfloat16 or inference-mode table would break
            # equality or training.
            with torch.inference_mode(False), torch.no_grad():
                count = max(1, len(self.config.block.ropes))
                self._tables = [rotary_tables(self.config, device, rows, rope) for rope in range(count)]
        return self._tables

    def _angles(
        self, positions_N: torch.Tensor, longest: int, positions_N3: torch.Tensor | None = None
    ) -> list[Angles]:
        beta, original = self.config.block.position_scale
        scale = None
        if beta:
            stretched = eager.row_wise(torch.log1p, (positions_N // original).float()[:, None])
            scale = (1 + beta * stretched)[..., None]
        tables = self.rotary(positions_N.device, longest)
        if positions_N3 is not None:
            assert self.config.vision is not None
            vision = self.config.vision
            cos, sin = (axes_of(table, positions_N3, vision)[:, None] for table in tables[0])
            return [Angles(cos, sin, scale)]
        return [
            Angles(
                cos.index_select(0, positions_N)[:, None], sin.index_select(0, positions_N)[:, None], scale
            )
            for cos, sin in tables
        ]

    def _images(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, context: AttentionContext
    ) -> ImageRows | None:
        """Return what this pass reads of images; a step of decoding has none."""
        if self.images is None or not context.segments:
            return None
        found = self.images.rows(tokens_N, positions_N, context.segments, self.visual)
        if found is not None:
            context.see_ahead(found.spans)
        return found

    def _forward(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        block, images = self.config.block, self._images(tokens_N, positions_N, context)
        if images is not None:  # what stands for them in the table is not read
            tokens_N = tokens_N.masked_fill(tokens_N >= IMAGE, 0)
        angles = self._angles(positions_N, context.longest, None if images is None else images.positions_N3)
        x_ND = F.embedding(tokens_N, self.model.embed_tokens.weight)
        if block.embedding_scale != 1.0:
            x_ND = _scaled(x_ND, block.embedding_scale)
        if images is not None:
            x_ND = x_ND.index_copy(0, images.rows_I, images.features.tokens_ID.to(x_ND.dtype))
        inputs_NLP = self.model.inputs(tokens_N, x_ND) if block.input_width else None
        shared: Shared = {spec.source: () for spec in self.config.layers if spec.source >= 0}
        for index, spec in enumerate(self.config.layers):
            layer = cast(Layer, self.model.layers[index])
            own = angles[spec.rope] if spec.rope >= 0 else None
            x_ND = self._run(layer, x_ND, own, context, shared, index)
            if block.has_layer_scale and isinstance(layer, DecoderLayer):
                x_ND = layer.finish(x_ND, None if inputs_NLP is None else inputs_NLP[:, index])
            if images is not None and index < len(images.features.deep):
                x_ND = x_ND.index_add(0, images.rows_I, images.features.deep[index].to(x_ND.dtype))
        x_ND = self.model.norm(x_ND)
        # The head is a product: a factor of the logits may as well be one of its input.
        return x_ND if block.logit_scale == 1.0 else x_ND * block.logit_scale


def init_weights(model: LanguageModel, seed: int) -> None:
    """Fill a model from scratch: N(0, init_std), residual projections times 1/sqrt(2 L), biases 0, norms 1.

    Args:
        model: The model, changed in place.
        seed: Seed of its own generator; nothing global is touched.

    Source: GPT-2 (Radford et al. 2019), section 2.3.
    """
    generator = torch.Generator().manual_seed(seed)
    std = model.config.init_std
    residual = std / math.sqrt(2 * model.config.num_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight", "c_proj.weight"))
                drawn = torch.empty(parameter.shape).normal_(
                    0.0, residual if is_residual else std, generator=generator
                )
                parameter.copy_(drawn)
