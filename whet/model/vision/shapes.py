"""Shapes of models that see: from the config.json of such a family to its tower and to its decoder's keys."""

from __future__ import annotations

import math
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
LLAVA_NAMES = (
    ("vision_tower.vision_model.", "visual.tower."),
    ("multi_modal_projector.", "visual.projector."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "visual.tower."),
    ("model.vision_tower.", "visual.tower."),
    ("model.vision_tower.vision_model.", "visual.tower."),
    ("model.multi_modal_projector.", "visual.projector."),
    ("model.language_model.", "model."),
)
IDEFICS_NAMES = (
    ("model.vision_model.", "visual.tower."),
    ("model.connector.", "visual.projector."),
    ("model.text_model.", "model."),
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
        tower="qwen",
        projector="merge",
        num_layers=int(c["depth"]),
        width=int(c["hidden_size"]),
        intermediate_size=int(c["intermediate_size"]),
        num_heads=int(c["num_heads"]),
        out_width=out,
        patch_size=int(c["patch_size"]),
        frames=int(c["temporal_patch_size"]),
        merge=int(c["spatial_merge_size"]),
        activation=_activation(c, "silu"),
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


def _clip(outer: Keys, c: Keys, text: ModelConfig, kind: str, **more: Any) -> VisionConfig:
    """Read a tower of CLIP or SigLIP."""
    has_class = kind == "clip_vision_model"
    c.fixed(num_channels=3)
    for name in ("projection_dim", "vocab_size", "initializer_factor", "vision_use_head", "model_type"):
        c.get(name)  # of what is trained beside the tower
    size, patch = int(c["image_size"]), int(c["patch_size"])
    if not 0 < patch <= size:
        raise ValueError(
            f"vision_config: patches of {patch} pixels of an image of {size}: expected smaller ones"
        )
    return VisionConfig(
        tower="clip",
        num_layers=int(c["num_hidden_layers"]),
        width=int(c["hidden_size"]),
        intermediate_size=int(c["intermediate_size"]),
        num_heads=int(c["num_attention_heads"]),
        out_width=text.hidden_size,
        patch_size=patch,
        image_size=size,
        positions=(size // patch) ** 2 + has_class,
        has_class=has_class,
        activation=_activation(c, "quick_gelu" if has_class else "gelu_pytorch_tanh"),
        norm_eps=float(c.get("layer_norm_eps", 1e-5 if has_class else 1e-6)),
        **more,
    )


def _gemma3(outer: Keys, c: Keys, text: ModelConfig) -> VisionConfig:
    c.fixed(model_type="siglip_vision_model")
    tokens, patches = int(outer.get("mm_tokens_per_image", 256)), int(c["image_size"]) // int(c["patch_size"])
    side = math.isqrt(tokens)
    if side**2 != tokens or patches % side:
        raise ValueError(
            f"mm_tokens_per_image = {tokens}: expected a square number whose root divides {patches} patches"
        )
    return _clip(
        outer,
        c,
        text,
        "siglip_vision_model",
        projector="pool",
        merge=patches // side,
        token_id=int(outer.get("image_token_index", outer.get("image_token_id", 262144))),
        start_id=int(outer.get("boi_token_index", 255999)),
        end_id=int(outer.get("eoi_token_index", 256000)),
        is_bidirectional=True,
        renamed=LLAVA_NAMES,
    )


def _llava(outer: Keys, c: Keys, text: ModelConfig) -> VisionConfig:
    kind = c.get("model_type", "clip_vision_model")
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise ValueError(
            f"vision_config: model_type {str(kind)[:40]!r} is not supported; expected clip_vision_model or "
            "siglip_vision_model"
        )
    strategy = "default" if kind == "clip_vision_model" else "full"
    if outer.get("vision_feature_select_strategy", "default") != strategy:
        raise ValueError(f"vision_feature_select_strategy: expected {strategy!r} for a {kind}")
    layer, layers = outer.get("vision_feature_layer", -2), int(c["num_hidden_layers"])
    if not isinstance(layer, int) or not -layers <= layer <= layers or layer == 0:
        raise ValueError(
            f"vision_feature_layer = {str(layer)[:40]}: expected the number of one of {layers} layers"
        )
    return _clip(
        outer,
        c,
        text,
        kind,
        projector="mlp",
        used_layers=layer if layer > 0 else layers + 1 + layer,
        projector_activation=_activation(outer, "gelu", "projector_hidden_act"),
        has_projector_bias=bool(outer.get("multimodal_projector_bias", True)),
        token_id=int(outer.get("image_token_index", outer.get("image_token_id", 32000))),
        renamed=LLAVA_NAMES,
    )


def _idefics3(outer: Keys, c: Keys, text: ModelConfig) -> VisionConfig:
    for name in ("max_image_size", "size", "use_base_siglip", "tie_word_embeddings"):
        c.get(name)  # of the processor, which says so itself
    side = int(outer.get("scale_factor", 2))
    patches = int(c["image_size"]) // int(c["patch_size"])
    if not 0 < side <= patches or patches % side:
        raise ValueError(f"scale_factor = {side}: expected a divisor of {patches} patches")
    return _clip(
        outer,
        c,
        text,
        "siglip_vision_model",
        projector="shuffle",
        merge=side,
        token_id=int(outer.get("image_token_id", 128257)),
        renamed=IDEFICS_NAMES,
    )


def _activation(c: Keys, default: str, key: str = "hidden_act") -> str:
    name = str(c.get(key, default))
    if name not in ("gelu_pytorch_tanh", "gelu", "quick_gelu", "silu"):
        raise ValueError(f"{key} {name[:40]!r} is not supported")
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
SIGLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}
CLIP = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
IDEFICS = SIGLIP | {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
IDEFICS_OUTER = ("vocab_size", "_pad_token_id")
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
    "gemma3": Seeing(
        "Gemma3ForConditionalGeneration",
        ("gemma3_text",),
        _gemma3,
        SIGLIP,
        ("boi_token_index", "eoi_token_index", "vision_token_id"),
    ),
    "llava": Seeing(
        "LlavaForConditionalGeneration",
        (),
        _llava,
        CLIP,
        ("ignore_index", "image_seq_length", "vocab_size"),
    ),
    "idefics3": Seeing("Idefics3ForConditionalGeneration", (), _idefics3, IDEFICS, IDEFICS_OUTER),
    "smolvlm": Seeing("SmolVLMForConditionalGeneration", (), _idefics3, IDEFICS, IDEFICS_OUTER),
}
"""Families of models with images, by model_type."""
TEXT_SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
"""Sizes of decoders that LLaVA's published files leave out."""
TEXT_LEFT = ("neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor")
"""Keys that SmolVLM's decoders have of parts that they do not."""
