"""What mixes positions in place of grouped-query attention: latent attention and the gated delta rule."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from whet.kernels import eager
from whet.model.attention import AttentionContext
from whet.model.config import Delta, Latent, LayerSpec, ModelConfig
from whet.model.parts import Linear, RMSNorm
from whet.model.recurrence import Recurrence
from whet.model.rotary import Angles, turn

LATENT_EPS = 1e-6
"""Epsilon of the norms between the two products of a latent, whatever the model's."""


class LatentAttention(nn.Module):
    """Attention whose keys and values are projected from one small latent; each head's keys share their rotated part.

    Keys and values are cached whole, not as latents: simple, and exact with the trainer.

    Source: DeepSeek-V2 2405.04434, section 2.1.
    """

    def __init__(self, config: ModelConfig, spec: LayerSpec, latent: Latent) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_heads
        self.latent, self.query_scale = latent, config.block.query_scale
        self.is_interleaved = config.block.ropes[spec.rope].is_interleaved
        queries = heads * (latent.plain_dim + latent.rope_dim)
        if latent.query_rank:
            self.q_a_proj = Linear(width, latent.query_rank, bias=False)
            self.q_a_layernorm = RMSNorm(latent.query_rank, LATENT_EPS)
            self.q_b_proj = Linear(latent.query_rank, queries, bias=False)
        else:
            self.q_proj = Linear(width, queries, bias=False)
        self.kv_a_proj_with_mqa = Linear(width, latent.key_rank + latent.rope_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(latent.key_rank, LATENT_EPS)
        self.kv_b_proj = Linear(latent.key_rank, heads * (latent.plain_dim + latent.value_dim), bias=False)
        self.o_proj = Linear(heads * latent.value_dim, width, bias=False)

    def forward(
        self, x_ND: torch.Tensor, angles: Angles | None, context: AttentionContext, layer: int
    ) -> torch.Tensor:
        """Project, rotate, attend within the context, project back."""
        assert angles is not None
        s, rows = self.latent, x_ND.shape[0]
        whole = s.plain_dim + s.rope_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_ND))) if s.query_rank else self.q_proj(x_ND)
        q_plain, q_turned = q.view(rows, -1, whole).split((s.plain_dim, s.rope_dim), dim=-1)
        latent, k_turned = self.kv_a_proj_with_mqa(x_ND).split((s.key_rank, s.rope_dim), dim=-1)
        keys = self.kv_b_proj(self.kv_a_layernorm(latent)).view(rows, -1, s.plain_dim + s.value_dim)
        k_plain, v = keys.split((s.plain_dim, s.value_dim), dim=-1)
        parts = (q_turned, k_turned[:, None])
        q_turned, k_turned = (turn(x, angles, is_interleaved=self.is_interleaved) for x in parts)
        q = torch.cat((q_plain, q_turned.to(v.dtype)), dim=-1) * self.query_scale
        k = torch.cat((k_plain, k_turned.to(v.dtype).expand(-1, v.shape[1], -1)), dim=-1)
        # Values are as wide as keys in the cache and in every kernel; what is added stays zero.
        out = context.attend(layer, q, k, F.pad(v, (0, whole - s.value_dim)))
        return self.o_proj(out[..., : s.value_dim].reshape(rows, -1))


class _Taps(nn.Module):
    """The convolution's weights, stored as those of an nn.Conv1d over channels of their own."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


class DeltaMixer(nn.Module):
    """Gated delta rule with a short convolution before it and a gated norm behind it (Qwen3.5)."""

    def __init__(self, config: ModelConfig, delta: Delta) -> None:
        super().__init__()
        width, values = config.hidden_size, delta.value_heads * delta.value_dim
        mixed = 2 * delta.key_heads * delta.key_dim + values
        self.delta = delta
        self.in_proj_qkv = Linear(width, mixed, bias=False)
        self.in_proj_z = Linear(width, values, bias=False)
        self.in_proj_b = Linear(width, delta.value_heads, bias=False)
        self.in_proj_a = Linear(width, delta.value_heads, bias=False)
        self.conv1d = _Taps(mixed, delta.kernel)
        self.A_log = nn.Parameter(torch.zeros(delta.value_heads))
        self.dt_bias = nn.Parameter(torch.ones(delta.value_heads))
        self.norm = RMSNorm(delta.value_dim, config.norm_eps)
        self.out_proj = Linear(values, width, bias=False)

    def forward(
        self, x_ND: torch.Tensor, angles: Angles | None, context: AttentionContext, layer: int
    ) -> torch.Tensor:
        """Project, go from token to token within the context, gate, project back."""
        rows = x_ND.shape[0]
        beta_NH = eager.row_wise(torch.sigmoid, self.in_proj_b(x_ND)).float()
        time_NH = eager.row_wise(F.softplus, self.in_proj_a(x_ND).float() + self.dt_bias.float())
        decay_NH = eager.row_wise(torch.exp, -self.A_log.float().exp() * time_NH)
        rule = Recurrence(self.delta, self.conv1d.weight[:, 0].t())
        out_NHC = context.recur(layer, rule, self.in_proj_qkv(x_ND), decay_NH, beta_NH).to(x_ND.dtype)
        gate_NHC = self.in_proj_z(x_ND).view(rows, -1, self.delta.value_dim)
        gated_NHC = self.norm(out_NHC) * eager.row_wise(F.silu, gate_NHC.float())
        return self.out_proj(gated_NHC.to(x_ND.dtype).reshape(rows, -1))
