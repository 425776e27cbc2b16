"""Shape of a decoder, and its translation from and to a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from whet.types import UserError

Family = Literal["llama", "qwen2", "qwen3", "gpt2"]

MAX_SIZE = 2**24
MAX_LAYERS = 1024

ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
CLASSIFIERS: dict[Family, str] = {
    family: f"{name.removesuffix('ForCausalLM').removesuffix('LMHeadModel')}ForSequenceClassification"
    for family, name in ARCHITECTURES.items()
}
"""What transformers calls a reward model of each family."""
FAMILY_FLAGS: dict[Family, frozenset[str]] = {
    "qwen2": frozenset({"qkv_bias"}),
    "qwen3": frozenset({"qk_norm"}),
}
"""Flags that a family sets; what computes reads flags, and never a family's name."""
SIZES = frozenset(
    {
        "family",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "max_positions",
        "norm_eps",
        "rope_theta",
        "init_std",
    }
)
"""Fields of a config that every path reads: numbers, and the name that config.json has."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling of rotary positions as Llama 3 does it (`rope_type: llama3`)."""

    factor: float
    """Stretch of the low frequencies."""
    low_freq_factor: float
    """Wave lengths above original / this are stretched in full."""
    high_freq_factor: float
    """Wave lengths below original / this are left alone."""
    original_max_positions: int
    """Context length before stretching, in tokens."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only language model; the defaults are the demo's 0.4 M parameter Llama."""

    family: Family = "llama"
    """Architecture: llama, qwen2 (biases on q, k, v), qwen3 (norms on q and k) or gpt2."""
    vocab_size: int = 64
    """Rows of the embedding table. From-scratch programs set it from the tokenizer."""
    hidden_size: int = 128
    """Model width D."""
    intermediate_size: int = 384
    """Feed-forward width F."""
    num_layers: int = 2
    """Decoder layers L."""
    num_heads: int = 4
    """Query heads H."""
    num_kv_heads: int = 2
    """Key/value heads K; divides num_heads."""
    head_dim: int = 32
    """Channels per head C."""
    max_positions: int = 512
    """Longest context in tokens."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm or LayerNorm."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies (unused by gpt2)."""
    rope_scaling: RopeScaling | None = None
    """Llama 3 frequency scaling, or none."""
    tie_embeddings: bool = True
    """Whether the output head is the embedding table."""
    attention_bias: bool = False
    """Biases on q, k, v and o, of llama and qwen3 (qwen2 and gpt2 have their own fixed biases)."""
    mlp_bias: bool = False
    """Llama's biases in the feed-forward part."""
    init_std: float = 0.02
    """Standard deviation of random weights (0.02 suits wide models; narrow ones learn faster from more)."""
    is_reward: bool = False
    """Whether its head scores texts, one number each, in place of the vocabulary; `whet dpo --loss reward` makes
    such a model."""

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v alone have biases."""
        return "qkv_bias" in FAMILY_FLAGS.get(self.family, ())

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys go through an RMSNorm over their channels."""
        return "qk_norm" in FAMILY_FLAGS.get(self.family, ())

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        )
        for name in sizes:
            value, most = getattr(self, name), MAX_LAYERS if name == "num_layers" else MAX_SIZE
            if not 1 <= value <= most:
                raise ValueError(f"model.{name} = {value}: expected 1 to {most:,}")
        for name in ("norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"model.{name} = {getattr(self, name)}: expected a positive number")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads = {self.num_kv_heads}: "
                f"expected a divisor of num_heads = {self.num_heads}"
            )
        if self.family != "gpt2" and self.head_dim % 2:
            raise ValueError(f"model.head_dim = {self.head_dim}: rotary positions need an even number")
        if self.family == "gpt2" and self.hidden_size != self.num_heads * self.head_dim:
            raise ValueError(
                f"model.hidden_size = {self.hidden_size}: "
                f"gpt2 needs num_heads * head_dim = {self.num_heads * self.head_dim}"
            )
        if self.family == "gpt2" and (self.num_kv_heads != self.num_heads or self.rope_scaling is not None):
            raise ValueError("model.family = gpt2: expected num_kv_heads = num_heads, and no rope_scaling")
        if self.attention_bias and self.family not in ("llama", "qwen3"):
            raise ValueError(f"model.attention_bias is for llama and qwen3: {self.family} has its own biases")
        if self.mlp_bias and self.family != "llama":
            raise ValueError(f"model.mlp_bias is for llama only: {self.family} has its own choice of biases")


def options(config: ModelConfig) -> frozenset[str]:
    """Return the names of the fields that change what is computed: all but sizes, where they are not the default.

    A path beside the modules' own forward pass (compiled decoding, kept activations) compares them with those that it
    knows, and declines the rest. So a new flag is never ignored by a path that was written before it.
    """
    changed = (item.name for item in fields(config) if getattr(config, item.name) != item.default)
    return frozenset(changed) - SIZES | FAMILY_FLAGS.get(config.family, frozenset())


def from_hf(data: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """Read a Hugging Face model configuration.

    Args:
        data: Parsed config.json.
        where: Name for error messages.

    Returns:
        The same shape as a `ModelConfig`.

    Raises:
        UserError: If the family is not supported, or an option of it is not.
    """
    asked = data.get("model_type")
    family: Family | None = next((name for name in ARCHITECTURES if name == asked), None)
    if family is None:
        raise UserError(
            f"{where}: model_type {str(asked)[:40]!r} is not supported; "
            f"expected one of {', '.join(ARCHITECTURES)}"
        )
    if "auto_map" in data:
        raise UserError(
            f"{where}: the model asks for remote code (auto_map), which whet never runs; "
            f"use a plain {family} folder"
        )
    try:
        shape = _from_gpt2(data) if family == "gpt2" else _from_llama_like(family, data)
        return replace(shape, is_reward=_is_reward(family, data))
    except KeyError as missing:
        raise UserError(f"{where}: field {missing} is missing") from None
    except (TypeError, ValueError, OverflowError) as error:  # OverflowError: int(Infinity)
        raise UserError(f"{where}: {error}") from None


def _is_reward(family: Family, data: Mapping[str, Any]) -> bool:
    """Say whether it is a sequence classifier; refuse one of several labels."""
    if CLASSIFIERS[family] not in (data.get("architectures") or ()):
        return False
    num_labels = data.get("num_labels", len(data.get("id2label") or (0, 1)))
    if num_labels != 1:
        raise ValueError(f"a classifier of {num_labels} labels is not supported; a reward model has 1")
    return True


def _from_gpt2(data: Mapping[str, Any]) -> ModelConfig:
    width, heads = int(data["n_embd"]), int(data["n_head"])
    activation = data.get("activation_function", "gelu_new")
    if activation != "gelu_new":
        raise ValueError(f"activation_function {activation!r} is not supported; expected 'gelu_new'")
    fixed = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    for name, expected in (fixed | {"add_cross_attention": False}).items():
        if data.get(name, expected) != expected:
            raise ValueError(f"{name} = {data[name]!r} is not supported; expected {expected}")
    return ModelConfig(
        family="gpt2",
        vocab_size=int(data["vocab_size"]),
        hidden_size=width,
        intermediate_size=int(data.get("n_inner") or 4 * width),
        num_layers=int(data["n_layer"]),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // max(heads, 1),
        max_positions=int(data["n_positions"]),
        norm_eps=float(data.get("layer_norm_epsilon", 1e-5)),
        tie_embeddings=bool(data.get("tie_word_embeddings", True)),
    )


def _from_llama_like(family: Family, data: Mapping[str, Any]) -> ModelConfig:
    if data.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {str(data['hidden_act'])[:60]!r} is not supported; expected 'silu'")
    if data.get("use_sliding_window"):
        raise ValueError("use_sliding_window is not supported; expected false")
    rope: Any = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters: expected an object, got {type(rope).__name__}")
    if data.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor is not supported; expected 1")
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    elif kind != "default":
        raise ValueError(f"rope type {kind!r} is not supported; expected 'default' or 'llama3'")
    heads = int(data["num_attention_heads"])
    channels = 128 if family == "qwen3" else int(data["hidden_size"]) // max(heads, 1)
    return ModelConfig(
        family=family,
        vocab_size=int(data["vocab_size"]),
        hidden_size=int(data["hidden_size"]),
        intermediate_size=int(data["intermediate_size"]),
        num_layers=int(data["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(data.get("num_key_value_heads") or heads),
        head_dim=int(data.get("head_dim") or channels),
        max_positions=int(data.get("max_position_embeddings", 2048)),
        norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope_theta=float(data.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=scaling,
        tie_embeddings=bool(data.get("tie_word_embeddings", False)),
        attention_bias=bool(data.get("attention_bias", False)) and family != "qwen2",
        mlp_bias=bool(data.get("mlp_bias", False)) and family == "llama",
    )


def to_hf(
    config: ModelConfig,
    *,
    bos_id: int | None,
    eos_ids: tuple[int, ...],
    dtype: str,
    pad_id: int | None = None,
) -> dict[str, Any]:
    """Write the configuration so that `transformers` (4 and 5) loads the folder.

    Args:
        config: Shape of the model.
        bos_id: Beginning-of-sequence id, if any.
        eos_ids: Ids that end a generation.
        dtype: Name of the stored floating-point type, such as 'float32'.
        pad_id: Padding id of a reward model, if any: transformers scores a text at the last token that is another.

    Returns:
        The content of config.json.
    """
    eos: int | list[int] | None = eos_ids[0] if len(eos_ids) == 1 else (list(eos_ids) or None)
    shared = {
        "architectures": [(CLASSIFIERS if config.is_reward else ARCHITECTURES)[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "bos_token_id": bos_id,
        "eos_token_id": eos,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if config.is_reward:
        shared |= {
            "num_labels": 1,
            "id2label": {"0": "score"},
            "label2id": {"score": 0},
            "pad_token_id": pad_id,
        }
    if config.family == "gpt2":
        return shared | {
            "activation_function": "gelu_new",
            "n_embd": config.hidden_size,
            "n_head": config.num_heads,
            "n_inner": None
            if config.intermediate_size == 4 * config.hidden_size
            else config.intermediate_size,
            "n_layer": config.num_layers,
            "n_positions": config.max_positions,
            "n_ctx": config.max_positions,
            "layer_norm_epsilon": config.norm_eps,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_positions,
        }
    return shared | {
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling is not None else None,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
    }
