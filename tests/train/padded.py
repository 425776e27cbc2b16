"""An independent forward pass on padded rows: what packed log-probabilities and values are held against."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence

import torch
from torch.nn import Parameter

from whet.model.config import ModelConfig
from whet.types import Sample

Weights = dict[str, Parameter]
SEEN: dict[int, torch.Tensor] = {}
"""What stands in the place of an image's ids: rows of width D."""


def padded_hidden(
    config: ModelConfig, weights: Weights, rows: Sequence[Sequence[int]], prefix: str = ""
) -> torch.Tensor:
    """An independent forward: right-padded rows [B, T], a dense mask, complex rotations; hidden states [B, T, D]."""
    dtype = weights[prefix + "model.norm.weight"].dtype
    longest = max(len(row) for row in rows)
    places = [
        (n, t, SEEN[token]) for n, row in enumerate(rows) for t, token in enumerate(row) if token in SEEN
    ]
    read = [[0 if token in SEEN else token for token in row] for row in rows]
    tokens_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in read])
    heads, kv_heads, channels = config.num_heads, config.num_kv_heads, config.head_dim
    exponents = torch.arange(0, channels, 2, dtype=dtype) / channels
    angles = torch.arange(longest, dtype=dtype)[:, None] / config.rope_theta**exponents
    turn = torch.polar(torch.ones_like(angles), angles)[None, :, None, :]
    blocked = torch.ones(longest, longest, dtype=torch.bool).triu(1)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[prefix + name]

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[prefix + name].T

    def rotate(x_BTHC: torch.Tensor) -> torch.Tensor:
        left, right = x_BTHC[..., : channels // 2], x_BTHC[..., channels // 2 :]
        turned = torch.complex(left, right) * turn
        return torch.cat((turned.real, turned.imag), -1)

    x = weights[prefix + "model.embed_tokens.weight"][tokens_BT]
    if places:
        first, second, seen = zip(*places, strict=True)
        x = x.index_put((torch.tensor(first), torch.tensor(second)), torch.stack(seen).to(dtype))
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}."
        y = norm(x, name + "input_layernorm.weight")
        q = rotate(project(y, name + "self_attn.q_proj.weight").unflatten(-1, (heads, channels)))
        k = rotate(project(y, name + "self_attn.k_proj.weight").unflatten(-1, (kv_heads, channels)))
        v = project(y, name + "self_attn.v_proj.weight").unflatten(-1, (kv_heads, channels))
        k, v = (z.repeat_interleave(heads // kv_heads, dim=2) for z in (k, v))
        scores = torch.einsum("bqhc,bkhc->bhqk", q, k) / channels**0.5
        probs = scores.masked_fill(blocked, float("-inf")).softmax(-1)
        out = torch.einsum("bhqk,bkhc->bqhc", probs, v).flatten(2)
        x = x + project(out, name + "self_attn.o_proj.weight")
        y = norm(x, name + "post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(project(y, name + "mlp.gate_proj.weight"))
        x = x + project(gate * project(y, name + "mlp.up_proj.weight"), name + "mlp.down_proj.weight")
    return norm(x, "model.norm.weight")


def score_rows(
    config: ModelConfig, weights: Weights, samples: Sequence[Sample], temperature: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probability and entropy of each completion token, one tensor [T] per sample."""
    rows = [(*s.prompt_ids, *s.completion_ids) for s in samples]
    hidden = padded_hidden(config, weights, rows)
    logits = hidden @ weights["model.embed_tokens.weight"].T / temperature
    logps, entropies = [], []
    for number, s in enumerate(samples):
        start = len(s.prompt_ids) - 1
        part = logits[number, start : start + len(s.completion_ids)]
        if s.kept:  # each token's distribution is that over its own set: picked out bit by bit, or by its ids
            found = [
                (torch.log_softmax(row[ids], -1), ids.index(token))
                for row, ids, token in zip(part, map(kept_ids, s.kept), s.completion_ids, strict=True)
            ]
            logps.append(torch.stack([spread[place] for spread, place in found]))
            entropies.append(torch.stack([-(spread.exp() * spread).sum() for spread, _ in found]))
            continue
        spread = torch.log_softmax(part, -1)
        logps.append(spread[torch.arange(len(part)), torch.tensor(s.completion_ids)])
        entropies.append(-(spread.exp() * spread).sum(-1))
    return logps, entropies


def kept_ids(text: str) -> list[int]:
    """Read a set of `whet.algo.kept` over at most 32 tokens: always one word, a bit per token."""
    (word,) = struct.unpack("<I", base64.b64decode(text))
    return [number for number in range(32) if word >> number & 1]


def value_rows(config: ModelConfig, critic: Weights, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """Value estimate from before each completion token, one tensor [T] per sample."""
    rows = [(*s.prompt_ids, *s.completion_ids) for s in samples]
    values = padded_hidden(config, critic, rows, "trunk.") @ critic["head"]
    cuts = [(len(s.prompt_ids) - 1, len(s.completion_ids)) for s in samples]
    return [values[number, start : start + count] for number, (start, count) in enumerate(cuts)]
