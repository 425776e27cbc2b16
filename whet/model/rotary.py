"""Rotary positions: tables of cos and sin, and the rotation."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from whet.kernels import dispatch, eager
from whet.model.config import ModelConfig, RopeScaling, VisionConfig

FEWEST = 256
"""Rows of the smallest table; larger ones have twice as many, until the context is covered."""


class Angles(NamedTuple):
    """What a layer reads of its rows' positions.

    Attributes:
        cos_N1C: Float32 cos of the rotated channels.
        sin_N1C: The same for the sine.
        query_scale_N11: Factor of the queries, where it depends on the position.
    """

    cos_N1C: torch.Tensor
    sin_N1C: torch.Tensor
    query_scale_N11: torch.Tensor | None = None


def table_rows(longest: int, config: ModelConfig) -> int:
    """Return the rows of a table for positions below `longest`: few sizes, so that it rarely grows."""
    rows = FEWEST
    while rows < longest:
        rows *= 2
    return min(rows, config.max_positions)


def rotary_tables(
    config: ModelConfig, device: torch.device, rows: int | None = None, rope: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cos and sin of positions and rotated channels, float32, each [rows, C].

    Args:
        config: Shape of the model.
        device: Where they live.
        rows: Positions; default: the whole context.
        rope: Index of the rope.

    Source: RoFormer 2104.09864; Llama 3 frequency scaling as in `transformers` (`rope_type: llama3`).
    """
    own = config.block.ropes[rope] if config.block.ropes else None
    channels, theta = (config.head_dim, config.rope_theta) if own is None else (own.dims, own.theta)
    exponents = torch.arange(0, channels, 2, device=device, dtype=torch.int64).float() / channels
    waves = theta**exponents
    if own is not None and own.divisors:
        waves = waves * waves.new_tensor(own.divisors)
    frequencies = 1.0 / waves
    if own is None and config.rope_scaling is not None:
        frequencies = _stretch(frequencies, config.rope_scaling)
    count = config.max_positions if rows is None else rows
    angles = torch.arange(count, device=device).float()[:, None] * frequencies[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if own is None or own.amplitude == 1.0 else (cos * own.amplitude, sin * own.amplitude)


def axes_of(table_PC: torch.Tensor, positions_N3: torch.Tensor, vision: VisionConfig) -> torch.Tensor:
    """Return rows [N, C] of a table of cos or sin, each frequency by the axis that it turns by (M-RoPE).

    Tokens with three equal positions get the very numbers of the table's row.

    Args:
        table_PC: The table.
        positions_N3: Positions by time, row and column.
        vision: Which frequencies belong to which axis.

    Source: Qwen2-VL 2409.12191, section 2.1; taking turns: Qwen3-VL 2511.21631, section 2.
    """
    count = table_PC.shape[1] // 2
    axes = torch.zeros(count, dtype=torch.int64)
    first, rows, columns = vision.sections
    if vision.has_mixed_sections:
        for axis, size in ((1, rows), (2, columns)):
            axes[axis : 3 * size : 3] = axis
    else:
        axes[first : first + rows], axes[first + rows : first + rows + columns] = 1, 2
    both_C = torch.cat((axes, axes)).to(table_PC.device)
    channels_C = torch.arange(2 * count, device=table_PC.device)
    return table_PC[positions_N3[:, both_C], channels_C]


def _stretch(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    ratio = scaling.original_max_positions / wavelengths
    smooth = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def turn(x_NHC: torch.Tensor, angles: Angles, *, is_interleaved: bool) -> torch.Tensor:
    """Rotate the first channels of each head, as many as the tables have.

    Args:
        x_NHC: Queries or keys.
        angles: Tables at the rows' positions.
        is_interleaved: Channels 2 i and 2 i + 1 turn together: they are brought into halves first, and stay so, since
            queries and keys are reordered alike and only their products are used.
    """
    dims = angles.cos_N1C.shape[-1]
    if dims == x_NHC.shape[-1] and not is_interleaved:
        return dispatch.run(eager.rotate, x_NHC, angles.cos_N1C, angles.sin_N1C)
    part, rest = x_NHC[..., :dims], x_NHC[..., dims:]
    if is_interleaved:
        part = torch.cat((part[..., 0::2], part[..., 1::2]), dim=-1)
    turned = dispatch.run(eager.rotate, part, angles.cos_N1C, angles.sin_N1C)
    return torch.cat((turned, rest), dim=-1)
