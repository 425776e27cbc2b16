"""Shapes of models that see: from the config.json of such a family to its tower and to its decoder's keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from whet.model.config import ModelConfig, VisionConfig
from whet.model.keys import Keys

Reader = Callable[[Keys, Keys, ModelConfig], VisionConfig]


class Seeing(NamedTuple):
    """A family of models with images.

    Attributes:
        architecture: Its class in transformers.
        texts: Types of decoder that it may have; () for any.
        read: From its keys, those of its vision_config and its decoder to the tower.
        defaults: What a missing key of vision_config means.
        outer: Keys beside vision_config and text_config that are not read: ids of tokens that the tokenizer has.
        has_axes: Whether the decoder's positions have the axes time, row and column (M-RoPE).
    """

    architecture: str
    texts: tuple[str, ...]
    read: Reader
    defaults: Mapping[str, Any]
    outer: tuple[str, ...] = ()
    has_axes: bool = False


QWEN_NAMES = (
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
    ("visual.", "visual."),
    ("model.", "model."),
)
QWEN2_NAMES = (
    ("visual.", "visual."),
    ("model.", "model."),
    ("model.visual.", "visual."),
    ("model.language_model.", "model."),
)


def _qwen(outer: Keys, c: Keys, text: ModelConfig, **more: Any) -> VisionConfig:
    c.fixed(in_channels=3, in_chans=3)
    rope = c.get("rope_parameters") or {}
    if rope.get("rope_theta", 10000.0) != 10000.0 or rope.get("rope_type", "axial") != "axial":
        raise ValueError(f"vision_config: rope_parameters {rope} are not supported")
    out = int(c["out_hidden_size"])
    if out != text.hidden_size:
        raise ValueError(f"vision_config: out_hidden_size = {out}: expected hidden_size = {text.hidden_size}")
    return VisionConfig(
        num_layers=int(c["depth"]),
        width=int(c["hidden_size"]),
        intermediate_size=int(c["intermediate_size"]),
        num_heads=int(c["num_heads"]),
        out_width=out,
        patch_size=int(c["patch_size"]),
        frames=int(c["temporal_patch_size"]),
        merge=int(c["spatial_merge_size"]),
        activation=_activation(c),
        token_id=int(outer.get("image_token_id", 151655)),
        **more,
    )


def _qwen3_vl(outer: Keys, c: Keys, text: ModelConfig) -> VisionConfig:
    positions = int(c["num_position_embeddings"])
    if round(positions**0.5) ** 2 != positions:
        raise ValueError(f"vision_config: num_position_embeddings = {positions}: expected a square number")
    return _qwen(
        outer,
        c,
        text,
        positions=positions,
        deep=tuple(int(layer) for layer in c["deepstack_visual_indexes"]),
        has_mixed_sections=True,
        renamed=QWEN_NAMES,
    )


def _qwen2_5_vl(outer: Keys, c: Keys, text: ModelConfig) -> VisionConfig:
    c.fixed(spatial_patch_size=int(c["patch_size"]))
    c.get("tokens_per_second")  # of films
    window = int(c["window_size"]) // int(c["spatial_merge_size"]) // int(c["patch_size"])
    if not window:
        raise ValueError(
            f"vision_config: window_size = {c['window_size']}: expected that of one token, at least"
        )
    return _qwen(
        outer,
        c,
        text,
        is_rms=True,
        window=window,
        whole_layers=tuple(int(layer) for layer in c["fullatt_block_indexes"]),
        renamed=QWEN2_NAMES,
    )


def _activation(c: Keys) -> str:
    name = str(c["hidden_act"])
    if name not in ("gelu_pytorch_tanh", "gelu", "quick_gelu", "silu"):
        raise ValueError(f"vision_config: hidden_act {name[:40]!r} is not supported")
    return name


QWEN_OUTER = ("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")
QWEN3_TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}
QWEN2_TOWER = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
SEEING: dict[str, Seeing] = {
    "qwen3_vl": Seeing(
        "Qwen3VLForConditionalGeneration",
        ("qwen3_vl_text",),
        _qwen3_vl,
        QWEN3_TOWER,
        QWEN_OUTER,
        has_axes=True,
    ),
    "qwen3_vl_moe": Seeing(
        "Qwen3VLMoeForConditionalGeneration",
        ("qwen3_vl_moe_text",),
        _qwen3_vl,
        QWEN3_TOWER,
        QWEN_OUTER,
        has_axes=True,
    ),
    "qwen2_5_vl": Seeing(
        "Qwen2_5_VLForConditionalGeneration",
        ("qwen2_5_vl_text",),
        _qwen2_5_vl,
        QWEN2_TOWER,
        QWEN_OUTER,
        has_axes=True,
    ),
}
"""Families of models with images, by model_type."""
