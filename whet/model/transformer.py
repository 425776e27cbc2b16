"""The Llama, Qwen2/2.5 and Qwen3 decoders on flat tokens: one module that trains, prefills and decodes.

Parameter names are Hugging Face's. Positions are always explicit; rotary tables are float32; there is no
dropout anywhere.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from whet.kernels import dispatch, eager
from whet.model.attention import ROW_QUANTUM, AttentionContext, Packed, round_up
from whet.model.checkpointing import Recompute
from whet.model.config import ModelConfig, RopeScaling


class Linear(nn.Linear):
    """A linear layer without PyTorch's default initialisation: it is loaded, or drawn by `init_weights`."""

    def reset_parameters(self) -> None:
        """Leave the weights uninitialised."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b."""
        return dispatch.run(eager.linear, input, self.weight, self.bias)


def embedding(num_rows: int, width: int) -> nn.Embedding:
    """Make an uninitialised embedding table (PyTorch's own initialisation would import its compiler, 3 s)."""
    return nn.Embedding(num_rows, width, _weight=torch.empty(num_rows, width))


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in float32, scaled in the input's dtype (as `transformers` does it)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis."""
        return dispatch.run(eager.rms_norm, x, self.weight, self.eps)[0]


def rotary_tables(config: ModelConfig, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cos and sin of every position and channel, float32, each [max_positions, C].

    Source: RoFormer 2104.09864; Llama 3 frequency scaling as in `transformers` (`rope_type: llama3`).
    """
    exponents = (
        torch.arange(0, config.head_dim, 2, device=device, dtype=torch.int64).float() / config.head_dim
    )
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        frequencies = _stretch(frequencies, config.rope_scaling)
    angles = torch.arange(config.max_positions, device=device).float()[:, None] * frequencies[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _stretch(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    ratio = scaling.original_max_positions / wavelengths
    smooth = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


class Attention(nn.Module):
    """Grouped-query self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, channels = config.hidden_size, config.head_dim
        qkv_bias = config.attention_bias or config.qkv_bias
        self.head_dim = channels
        self.q_proj = Linear(width, config.num_heads * channels, bias=qkv_bias)
        self.k_proj = Linear(width, config.num_kv_heads * channels, bias=qkv_bias)
        self.v_proj = Linear(width, config.num_kv_heads * channels, bias=qkv_bias)
        self.o_proj = Linear(config.num_heads * channels, width, bias=config.attention_bias)
        self.q_norm = RMSNorm(channels, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(channels, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x_ND: torch.Tensor,
        cos_N1C: torch.Tensor,
        sin_N1C: torch.Tensor,
        context: AttentionContext,
        layer: int,
    ) -> torch.Tensor:
        """Project, rotate, attend within the context, project back."""
        rows = x_ND.shape[0]
        q = self.q_proj(x_ND).view(rows, -1, self.head_dim)
        k = self.k_proj(x_ND).view(rows, -1, self.head_dim)
        v = self.v_proj(x_ND).view(rows, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        # A head's norm under autocast gives float32; products are of one dtype.
        q, k = (dispatch.run(eager.rotate, x, cos_N1C, sin_N1C).to(v.dtype) for x in (q, k))
        out = context.attend(layer, q, k, v)
        return self.o_proj(out.reshape(rows, -1))


class MLP(nn.Module):
    """SwiGLU feed-forward part."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return down(silu(gate(x)) * up(x))."""
        gate_NF, up_NF = self.gate_proj(x_ND), self.up_proj(x_ND)
        return self.down_proj(dispatch.run(eager.swiglu, gate_NF, up_NF))


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward with residual connections."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        x_ND: torch.Tensor,
        cos_N1C: torch.Tensor,
        sin_N1C: torch.Tensor,
        context: AttentionContext,
        layer: int,
    ) -> torch.Tensor:
        """Return the residual stream after this layer."""
        x_ND = x_ND + self.self_attn(self.input_layernorm(x_ND), cos_N1C, sin_N1C, context, layer)
        return x_ND + self.mlp(self.post_attention_layernorm(x_ND))


class Decoder(nn.Module):
    """Embeddings, layers and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


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
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.num_valid_tokens = config.vocab_size
        self.score: nn.Module | None = None
        self.checkpoint_layers = False
        self.loss_scale = 1.0
        self.recompute = Recompute()

    def forward(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """Run the decoder on flat tokens.

        Args:
            tokens_N: int64 token ids of all sequences, without padding.
            positions_N: int64 position of each token in its own sequence.
            context: What each row may see.

        Returns:
            Hidden states [N, D] after the final norm.
        """
        count = tokens_N.shape[0]
        # The kernels' products do not care how many rows there are.
        quantum = 1 if dispatch.runs_cpp(self.head_weight) else ROW_QUANTUM
        surplus = round_up(count, quantum) - count
        if surplus:
            tokens_N, positions_N = F.pad(tokens_N, (0, surplus)), F.pad(positions_N, (0, surplus))
        hidden = self._forward(tokens_N, positions_N, context)
        return hidden[:count] if surplus else hidden

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
        return F.linear(hidden_ND, self.head_weight).view(rows, length, -1)

    @property
    def head_weight(self) -> torch.Tensor:
        """Output projection [V, D]."""
        raise AssertionError("abstract")

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers, first to last."""
        raise AssertionError("abstract")

    def _run(self, layer: nn.Module, x_ND: torch.Tensor, *rest: object) -> torch.Tensor:
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
    """Llama, Qwen2/2.5 or Qwen3 with a language-model head, or a reward model's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.model = Decoder(config)
        self.lm_head, self.score = heads(config)
        self._rotary: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def head_weight(self) -> torch.Tensor:
        """Output projection [V, D]."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers, first to last."""
        return self.model.layers

    def rotary(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of every position, float32 [max_positions, C] each; made once."""
        if self._rotary is None or self._rotary[0].device != device:
            # Made under no autograd mode and kept float32: a bfloat16 or inference-mode table would break
            # equality or training.
            with torch.inference_mode(False), torch.no_grad():
                self._rotary = rotary_tables(self.config, device)
        return self._rotary

    def _forward(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        tables = self.rotary(tokens_N.device)
        cos_N1C, sin_N1C = (table.index_select(0, positions_N)[:, None, :] for table in tables)
        x_ND = F.embedding(tokens_N, self.model.embed_tokens.weight)
        for index, layer in enumerate(self.model.layers):
            x_ND = self._run(layer, x_ND, cos_N1C, sin_N1C, context, index)
        return self.model.norm(x_ND)


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
