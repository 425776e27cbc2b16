"""What mixes positions in place of grouped-query attention: latent attention, the gated delta rule, convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from whet.kernels import eager
from whet.model.attention import AttentionContext, Shared
from whet.model.config import Delta, Latent, LayerSpec, ModelConfig
from whet.model.parts import Linear, RMSNorm
from whet.model.recurrence import Recurrence, convolve
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
        self,
        x_ND: torch.Tensor,
        angles: Angles | None,
        context: AttentionContext,
        shared: Shared,
        layer: int,
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

    def __init__(self, channels: int, width: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.zeros(channels)) if has_bias else None

    @property
    def kernel_KX(self) -> torch.Tensor:
        """The taps, oldest first."""
        return self.weight[:, 0].t()


class DeltaMixer(nn.Module):
    """Gated delta rule with a short convolution before it and a gated norm behind it (Qwen3.5)."""

    def __init__(self, config: ModelConfig, delta: Delta) -> None:
        super().__init__()
        width, values = config.hidden_size, delta.value_heads * delta.value_dim
        mixed = 2 * delta.key_heads * delta.key_dim + values
        self.delta = delta
        if delta.is_grouped:
            self.in_proj_qkvz = Linear(width, mixed + values, bias=False)
            self.in_proj_ba = Linear(width, 2 * delta.value_heads, bias=False)
        else:
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
        self,
        x_ND: torch.Tensor,
        angles: Angles | None,
        context: AttentionContext,
        shared: Shared,
        layer: int,
    ) -> torch.Tensor:
        """Project, go from token to token within the context, gate, project back."""
        rows = x_ND.shape[0]
        mixed_NX, gate_NX, b_NH, a_NH = self._project(x_ND)
        beta_NH = eager.row_wise(torch.sigmoid, b_NH).float()
        time_NH = eager.row_wise(F.softplus, a_NH.float() + self.dt_bias.float())
        decay_NH = eager.row_wise(torch.exp, -self.A_log.float().exp() * time_NH)
        rule = Recurrence(self.delta, self.conv1d.kernel_KX)
        mixed_NX = rule.convolve(context.window(layer, mixed_NX, self.delta.kernel))
        out_NHC = context.recur(layer, rule, mixed_NX, decay_NH, beta_NH).to(x_ND.dtype)
        gate_NHC = gate_NX.view(rows, -1, self.delta.value_dim)
        gated_NHC = self.norm(out_NHC) * eager.row_wise(F.silu, gate_NHC.float())
        return self.out_proj(gated_NHC.to(x_ND.dtype).reshape(rows, -1))

    def _project(self, x_ND: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what is convolved, gates, and what share of the correction and decay are computed from."""
        s, rows = self.delta, x_ND.shape[0]
        if not s.is_grouped:
            b_NH, a_NH = self.in_proj_b(x_ND), self.in_proj_a(x_ND)
            return self.in_proj_qkv(x_ND), self.in_proj_z(x_ND), b_NH, a_NH
        values = s.value_heads // s.key_heads * s.value_dim
        grouped = self.in_proj_qkvz(x_ND).view(rows, s.key_heads, -1)
        parts = grouped.split((s.key_dim, s.key_dim, values, values), dim=-1)
        *qkv, gate_NX = (part.reshape(rows, -1) for part in parts)
        b_NH, a_NH = (
            part.reshape(rows, -1)
            for part in self.in_proj_ba(x_ND).view(rows, s.key_heads, -1).chunk(2, dim=-1)
        )
        return torch.cat(qkv, dim=-1), gate_NX, b_NH, a_NH


class ConvolutionMixer(nn.Module):
    """Convolution over the last few tokens, by channel, with a gate before it and one behind it (LFM2).

    Source: LFM2 technical report 2511.23404, section 2.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.kernel, has_bias = config.hidden_size, config.block.kernel, config.block.has_kernel_bias
        self.in_proj = Linear(width, 3 * width, bias=has_bias)
        self.conv = _Taps(width, self.kernel, has_bias=has_bias)
        self.out_proj = Linear(width, width, bias=has_bias)

    def forward(
        self,
        x_ND: torch.Tensor,
        angles: Angles | None,
        context: AttentionContext,
        shared: Shared,
        layer: int,
    ) -> torch.Tensor:
        """Project, gate, convolve within the context, gate, project back."""
        before_ND, after_ND, inner_ND = self.in_proj(x_ND).chunk(3, dim=-1)
        mixed_ND = convolve(context.window(layer, before_ND * inner_ND, self.kernel), self.conv.kernel_KX)
        if self.conv.bias is not None:
            mixed_ND = mixed_ND + self.conv.bias
        return self.out_proj(after_ND * mixed_ND)
