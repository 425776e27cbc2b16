"""GPT-2 on flat tokens: learned positions, LayerNorm, GELU, Hugging Face's transposed ("Conv1D") weights."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from whet.kernels import dispatch, eager
from whet.model.attention import AttentionContext
from whet.model.config import ModelConfig
from whet.model.parts import Layer, embedding
from whet.model.quant import PackedMatrix
from whet.model.transformer import LanguageModel, heads


class Conv1D(nn.Module):
    """A linear layer whose weight is stored [in, out], as GPT-2 checkpoints have it.

    Attributes:
        packed: The quantised matrix in place of `weight`, which is None then; else None.
        side: An adapter beside the weight, as `Linear` has it.
    """

    transposed = True
    side: nn.Module | None

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.register_module("side", None)
        self.weight = nn.Parameter(torch.empty(num_in, num_out))
        self.bias = nn.Parameter(torch.zeros(num_out))
        self.packed: PackedMatrix | None = None

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return x W + b, and what the adapter adds."""
        return self.product(x_ND, self.bias) if self.side is None else self.side(x_ND, self)

    def product(self, x_ND: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W + bias, of the weight alone."""
        if self.packed is not None:
            return self.packed(x_ND, bias)
        return dispatch.run(eager.linear, x_ND, self.weight, bias, transposed=True)

    def matrix(self) -> torch.Tensor:
        """Return W [out, in]."""
        return (self.weight if self.packed is None else self.packed.dense(torch.float32)).t()


class GPT2Attention(nn.Module):
    """Multi-head attention with one fused projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.c_attn = Conv1D(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = Conv1D(config.hidden_size, config.hidden_size)

    def forward(self, x_ND: torch.Tensor, context: AttentionContext, layer: int) -> torch.Tensor:
        """Project, attend within the context, project back."""
        rows = x_ND.shape[0]
        q, k, v = (part.reshape(rows, -1, self.head_dim) for part in self.c_attn(x_ND).chunk(3, dim=-1))
        return self.c_proj(context.attend(layer, q, k, v).reshape(rows, -1))


class GPT2MLP(nn.Module):
    """Two-layer feed-forward part with the tanh form of GELU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.hidden_size, config.intermediate_size)
        self.c_proj = Conv1D(config.intermediate_size, config.hidden_size)

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return W2 gelu(W1 x)."""
        return self.c_proj(eager.gelu(self.c_fc(x_ND)))


class GPT2Block(Layer):
    """Pre-norm attention and feed-forward with residual connections."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = GPT2Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = GPT2MLP(config)

    def mix(self, x_ND: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Return the residual stream after attention; `rest` is what that takes beside its input."""
        return x_ND + self.attn(self.ln_1(x_ND), *rest)

    def feed(self, x_ND: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Return the residual stream after the feed-forward part; nothing of `rest` is read."""
        return x_ND + self.mlp(self.ln_2(x_ND))


class GPT2Decoder(nn.Module):
    """Token and position embeddings, blocks and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wte = embedding(config.vocab_size, config.hidden_size)
        self.wpe = embedding(config.max_positions, config.hidden_size)
        self.h = nn.ModuleList(GPT2Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


class GPT2(LanguageModel):
    """GPT-2 with its tied language-model head, or a reward model's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.transformer = GPT2Decoder(config)
        self.lm_head, self.score = heads(config)

    @property
    def head_weight(self) -> torch.Tensor:
        """Output projection [V, D]."""
        return self.transformer.wte.weight if self.lm_head is None else self.lm_head.weight

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers, first to last."""
        return self.transformer.h

    def _forward(
        self, tokens_N: torch.Tensor, positions_N: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        x_ND = F.embedding(tokens_N, self.transformer.wte.weight) + F.embedding(
            positions_N, self.transformer.wpe.weight
        )
        for index, block in enumerate(self.transformer.h):
            x_ND = self._run(cast(Layer, block), x_ND, context, index)
        return self.transformer.ln_f(x_ND)
