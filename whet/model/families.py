"""Model families: from a Hugging Face config.json to a shape, and back.

A family is one reader: a function from its keys to a `ModelConfig`. What it does not read is refused unless
`IRRELEVANT` names it, so that no key is silently ignored. A family beyond the four that can be made from scratch is
written as it was read, with the vocabulary, the ids and the dtype of today. Defaults are transformers'.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Literal

from whet.model.config import (
    PLAIN_BLOCK,
    Delta,
    Experts,
    Family,
    Latent,
    LayerSpec,
    ModelConfig,
    Rope,
    RopeScaling,
)
from whet.model.keys import Keys, check_dtype
from whet.model.vision.shapes import SEEING, TEXT_LEFT, TEXT_SIZES, Seeing
from whet.types import UserError

ROPE_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "max_position_embeddings",
        "attn_factor",  # DeepSeek-R1-0528-Qwen3-8B's; transformers does not read it either
        "mrope_section",  # three axes of positions, which are equal for text
        "mrope_interleaved",
        "llama_4_scaling_beta",
    }
)
"""Keys of a rope that its kind need not read."""
SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
POST_NORM = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
GLM_NORM = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
EXPERT_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")
LFM2_NAMES = (
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
    (".feed_forward.expert_bias", ".mlp.gate.e_score_correction_bias"),
    (".feed_forward.", ".mlp."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".self_attn.q_layernorm.", ".self_attn.q_norm."),
    (".self_attn.k_layernorm.", ".self_attn.k_norm."),
    ("model.embedding_norm.", "model.norm."),
)
MIXERS: dict[str, Literal["delta", "convolution"]] = {"linear_attention": "delta", "conv": "convolution"}
"""Types of layers without attention."""

Reader = Callable[["Keys"], ModelConfig]
RopeFactors = Literal["auto", "short", "long"]


# --- rotary positions ---------------------------------------------------------------------------------------------


def rope_parameters(c: Keys, theta: float = 10000.0, rotated: float = 1.0) -> dict[str, Any]:
    """Return the parameters of a model with one rope, with transformers' precedence.

    `rope_scaling` comes before `rope_parameters`; within either, its own `rope_theta` before the one beside it.

    Args:
        c: The configuration.
        theta: Default base.
        rotated: Default share of rotated channels.
    """
    scaling, parameters = c.get("rope_scaling"), c.get("rope_parameters")
    for name, given in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if given is not None and not isinstance(given, dict):
            raise ValueError(f"{name}: expected an object, got {type(given).__name__}")
    beside, share = c.get("rope_theta"), c.get("partial_rotary_factor")
    found: dict[str, Any] = dict(scaling or parameters or {})
    found.setdefault("rope_theta", theta if beside is None else beside)
    found.setdefault("partial_rotary_factor", rotated if share is None else share)
    return found


def rope(parameters: Mapping[str, Any], head_dim: int, c: Keys) -> tuple[Rope, int]:
    """Read a rope of any kind.

    Args:
        parameters: Its own parameters.
        head_dim: Channels per head.
        c: The configuration, for its context.

    Returns:
        The rope, and the longest context that it computes as transformers does.

    Source: `transformers.modeling_rope_utils`. Deviation: transformers changes the frequencies of 'dynamic' and
    'longrope' when a sequence outgrows the original context, past keys included or not, depending on the cache; here
    such a model's context ends there, where all agree. With rope_factors = long all sequences, short ones too, have the
    frequencies of the stretched context, as vLLM computes them where its longest sequence is longer than the original
    context: 'longrope' those of its long factors, 'dynamic' those of a sequence of factor times the context.
    """
    p, is_long = Keys(parameters), c.get("rope_factors") == "long"
    for name in ("rope_theta", "factor"):
        if p.get(name) is not None and not 0 < float(p[name]) < math.inf:
            raise ValueError(f"model.{name} = {p[name]}: expected a positive number")
    kind = str(p.get("rope_type", p.get("type", "default")))
    context, theta = int(c.get("max_position_embeddings") or 2048), float(p["rope_theta"])
    original = p.get("original_max_position_embeddings")
    original = context if original is None else int(original)
    dims, amplitude = int(head_dim * float(p["partial_rotary_factor"])), 1.0
    count = dims // 2
    divisors: Sequence[float] = ()
    if kind in ("linear", "dynamic"):
        factor = float(p["factor"])
        divisors = (factor,) * count if kind == "linear" else ()
        if kind == "dynamic" and is_long:
            longest = int(factor * context)
            theta *= (factor * longest / context - (factor - 1)) ** (dims / (dims - 2))
            context = longest
    elif kind == "llama3":
        divisors = _llama3(p, theta, dims, original)
    elif kind == "yarn":
        divisors, amplitude = _yarn(p, theta, dims, original, context)
    elif kind in ("longrope", "su"):
        factors = [[float(x) for x in p[name]] for name in ("short_factor", "long_factor")]
        divisors = factors[is_long]
        factor = float(p.get("factor") or context / original)
        given = p.get("attention_factor")
        sharpened = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        amplitude = sharpened if given is None else float(given)
        context = context if is_long else min(context, original)
    elif kind == "proportional":  # frequencies of the whole head, of which the last are 0
        count, dims = int(float(p["partial_rotary_factor"]) * head_dim // 2), head_dim
        divisors = (float(p.get("factor") or 1.0),) * count + (math.inf,) * (dims // 2 - count)
    elif kind != "default":
        raise ValueError(
            f"rope type {kind[:40]!r} is not supported; expected default, linear, dynamic, yarn, llama3, longrope or "
            "proportional"
        )
    unknown = next(
        (name for name in p if name not in p.were_read | ROPE_KEYS and p.get(name) is not None), None
    )
    if unknown is not None:
        raise ValueError(
            f"rope type {kind!r} with {unknown[:60]!r} is not supported; delete it if it changes nothing"
        )
    return Rope(theta=theta, dims=dims, divisors=tuple(divisors), amplitude=amplitude), context


def _llama3(p: Mapping[str, Any], theta: float, dims: int, original: int) -> tuple[float, ...]:
    factor, low, high = (float(p[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    waves = (2 * math.pi * theta ** (2 * i / dims) for i in range(dims // 2))
    smooth = (min(1.0, max(0.0, (original / wave - low) / (high - low))) for wave in waves)
    return tuple(1 / ((1 - s) / factor + s) for s in smooth)


def _yarn(
    p: Mapping[str, Any], theta: float, dims: int, original: int, context: int
) -> tuple[tuple[float, ...], float]:
    """Return divisors and amplitude. Source: YaRN 2309.00071, sections 3.2 to 3.4."""
    factor = float(p.get("factor") or context / original)

    def index(turns: float) -> float:  # of the frequency that makes so many turns in the original context
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(float(p.get("beta_fast") or 32)), index(float(p.get("beta_slow") or 1))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramps = (min(1.0, max(0.0, (i - low) / ((high - low) or 0.001))) for i in range(dims // 2))
    given, one, both = p.get("attention_factor"), p.get("mscale"), p.get("mscale_all_dim")
    if given is not None:
        amplitude = float(given)
    elif one and both:
        amplitude = sharpness(factor, one) / sharpness(factor, both)
    else:
        amplitude = sharpness(factor)
    return tuple(1 / (ramp / factor + 1 - ramp) for ramp in ramps), amplitude


def sharpness(factor: float, scale: float = 1.0) -> float:
    """Return yarn's factor of the scores for a stretch of the context."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


# --- readers ------------------------------------------------------------------------------------------------------


def _sizes(c: Keys, head_dim: int | None = None) -> dict[str, Any]:
    """Return what every decoder but GPT-2 has; `head_dim` where none is given."""
    heads = int(c["num_attention_heads"])
    width = int(c["hidden_size"])
    is_given = "rms_norm_eps" in c  # null is no default: the error names the key
    return {
        "vocab_size": int(c["vocab_size"]),
        "hidden_size": width,
        "intermediate_size": int(c["intermediate_size"]),
        "num_layers": int(c["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": int(c.get("num_key_value_heads") or heads),
        "head_dim": int(c.get("head_dim") or head_dim or width // max(heads, 1)),
        "max_positions": int(c.get("max_position_embeddings") or 2048),
        "norm_eps": float(c["rms_norm_eps"]) if is_given else 1e-6,
        "tie_embeddings": bool(c.get("tie_word_embeddings", False)),
    }


def _flagged(config: ModelConfig, **flags: Any) -> ModelConfig:
    """Set flags of the block."""
    return replace(config, block=replace(config.block, **flags))


def _decoder(
    c: Keys,
    *,
    theta: float = 10000.0,
    rotated: float | None = None,
    head_dim: int | None = None,
    is_interleaved: bool = False,
    family: Family = "llama",
    **more: Any,
) -> ModelConfig:
    """Read a decoder with one rope: what Llama and all families after it share.

    Args:
        c: The configuration.
        theta: Default base of the rope.
        rotated: Default share of rotated channels; None where the family rotates whole heads.
        head_dim: Default channels per head; None for hidden_size / num_attention_heads.
        is_interleaved: Whether neighbouring channels turn together.
        family: Module class.
        more: Other fields of the config.
    """
    activation = c.get("hidden_act") or "silu"
    if activation not in ("silu", "gelu_pytorch_tanh"):
        raise ValueError(f"hidden_act {str(activation)[:60]!r} is not supported; expected 'silu'")
    sizes = _sizes(c, head_dim)
    parameters = rope_parameters(c, theta, 1.0 if rotated is None else rotated)
    if rotated is None and parameters["partial_rotary_factor"] != 1.0:
        raise ValueError("partial_rotary_factor is not supported for this model_type; expected 1")
    own, context = rope(parameters, max(sizes["head_dim"], 2), c)
    sizes["max_positions"] = context
    own = replace(own, is_interleaved=is_interleaved)
    kind = parameters.get("rope_type", parameters.get("type"))
    is_whole = own.dims == sizes["head_dim"] and not is_interleaved
    if is_whole and kind == "llama3":
        sizes["rope_scaling"] = RopeScaling(
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_positions=int(parameters.get("original_max_position_embeddings") or context),
        )
    sizes["rope_theta"] = own.theta
    config = ModelConfig(family=family, **(sizes | more))
    is_stretched = own.divisors or own.amplitude != 1.0 or own.theta != float(parameters["rope_theta"])
    if not is_whole or (kind != "llama3" and is_stretched):
        config = _flagged(config, ropes=(own,))
    return config if activation == "silu" else _flagged(config, activation="gelu_tanh")


def _with_windows(
    config: ModelConfig, types: Sequence[str], window: int | None, ropes: Mapping[str, int] | None = None
) -> ModelConfig:
    """Give each layer the window and the rope of its type."""
    known = {"full_attention", "sliding_attention"}
    known |= {"linear_attention"} if config.block.delta is not None else set()
    known |= {"conv"} if config.block.kernel else set()
    wrong = next((name for name in types if name not in known), None)
    if wrong is not None:
        raise ValueError(
            f"layer type {str(wrong)[:40]!r} is not supported; expected one of {', '.join(sorted(known))}"
        )
    # A window of the whole context is none: paths without windows may compute it.
    width = int(window) if window and int(window) < config.max_positions else 0
    layers = tuple(
        LayerSpec(
            mixer=MIXERS.get(name, "attention"),
            window=width if name == "sliding_attention" else 0,
            rope=(ropes or {}).get(name, 0),
        )
        for name in types
    )
    if len(layers) != config.num_layers:
        raise ValueError(f"layer_types: got {len(layers)}, expected num_hidden_layers = {config.num_layers}")
    return config if set(layers) == {LayerSpec()} else _flagged(config, layers=layers)


def _types(c: Keys, is_full: Callable[[int], bool]) -> list[str]:
    """Return each layer's type: those that are given, or those that a rule says."""
    kinds = "sliding_attention", "full_attention"
    return list(c.get("layer_types") or (kinds[is_full(i)] for i in range(int(c["num_hidden_layers"]))))


def _llama(c: Keys) -> ModelConfig:
    return _decoder(c, attention_bias=bool(c.get("attention_bias")), mlp_bias=bool(c.get("mlp_bias")))


def _qwen(c: Keys, family: Family) -> ModelConfig:
    bias = bool(c.get("attention_bias")) and family == "qwen3"  # qwen2 has its own, whatever this says
    head_dim = 128 if family == "qwen3" else None
    config = _decoder(c, family=family, head_dim=head_dim, attention_bias=bias)
    first, window = int(c.get("max_window_layers", 28)), c.get("sliding_window", 4096)
    types = _types(c, lambda i: i < first)
    return _with_windows(config, types, window) if c.get("use_sliding_window") else config


def _everywhere(c: Keys, config: ModelConfig, window: int | None) -> ModelConfig:
    return _with_windows(config, ["sliding_attention"] * config.num_layers, c.get("sliding_window", window))


def _mistral(c: Keys) -> ModelConfig:
    return _everywhere(c, _decoder(c), 4096)


def _ministral(c: Keys) -> ModelConfig:
    return _with_windows(_decoder(c), _types(c, lambda _: False), c.get("sliding_window", 4096))


def _ministral3(c: Keys) -> ModelConfig:
    p = rope_parameters(c)
    beta, original = float(p["llama_4_scaling_beta"]), int(p["original_max_position_embeddings"])
    return _flagged(_everywhere(c, _decoder(c, head_dim=128), None), position_scale=(beta, original))


def _phi3(c: Keys) -> ModelConfig:
    c.fixed(attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1)
    original = int(c.get("original_max_position_embeddings") or 4096)
    p = rope_parameters(c)
    kind = p.get("rope_type", p.get("type", "default"))
    if kind in ("su", "yarn", "longrope"):  # the first two are old names of the third
        p |= {"rope_type": "longrope", "type": "longrope", "original_max_position_embeddings": original}
    inner = c.changed(rope_scaling=p)
    config = _everywhere(inner, _decoder(inner, rotated=1.0), None)
    return _flagged(config, fused=("qkv_proj", "gate_up_proj"))


def _smollm3(c: Keys) -> ModelConfig:
    config = _decoder(
        c, theta=2e6, attention_bias=bool(c.get("attention_bias")), mlp_bias=bool(c.get("mlp_bias"))
    )
    every = int(c.get("no_rope_layer_interval") or 4)
    default = [int((i + 1) % every != 0) for i in range(config.num_layers)]
    has_rope = c.get("no_rope_layers") or default  # 1 where there is a rope
    window = c.get("sliding_window") if c.get("use_sliding_window") else None
    c.get("max_window_layers")  # transformers does not read it here
    config = _with_windows(config, _types(c, lambda i: window is None or bool(has_rope[i])), window)
    if len(has_rope) != config.num_layers:
        raise ValueError(f"no_rope_layers: got {len(has_rope)}, expected {config.num_layers}")
    layers = zip(config.layers, has_rope, strict=True)
    return _flagged(config, layers=tuple(replace(spec, rope=0 if on else -1) for spec, on in layers))


def _granite(c: Keys) -> ModelConfig:
    config = _decoder(c, attention_bias=bool(c.get("attention_bias")), mlp_bias=bool(c.get("mlp_bias")))
    return _flagged(
        config,
        query_scale=float(c.get("attention_multiplier", 1.0)) * math.sqrt(config.head_dim),
        embedding_scale=float(c.get("embedding_multiplier", 1.0)),
        residual_scale=float(c.get("residual_multiplier", 1.0)),
        logit_scale=1 / float(c.get("logits_scaling", 1.0)),
    )


def _gemma(c: Keys) -> ModelConfig:
    # The first Gemma's files say 'gelu' and mean the tanh form, as transformers knows.
    c.fixed(use_bidirectional_attention=False)
    for name in ("hidden_act", "hidden_activation"):
        if c.get(name) not in (None, "gelu", "gelu_pytorch_tanh"):
            raise ValueError(f"{name} {str(c[name])[:60]!r} is not supported; expected 'gelu_pytorch_tanh'")
    tied = bool(c.get("tie_word_embeddings", True))
    inner = c.changed(hidden_act="gelu_pytorch_tanh", tie_word_embeddings=tied)
    config = _decoder(inner, head_dim=256, attention_bias=bool(c.get("attention_bias")))
    return _flagged(config, norm_offset=1.0, embedding_scale=math.sqrt(config.hidden_size))


def _gemma2(c: Keys) -> ModelConfig:
    config = _gemma(c)
    c.get("sliding_window_size")  # repeats the other
    config = _with_windows(config, _types(c, lambda i: i % 2 == 1), c.get("sliding_window", 4096))
    scalar = float(c.get("query_pre_attn_scalar", 256))
    return _flagged(
        config,
        norms=SANDWICH,
        query_scale=math.sqrt(config.head_dim / scalar),
        attention_cap=float(c.get("attn_logit_softcapping", 50.0) or 0.0),
        logit_cap=float(c.get("final_logit_softcapping", 30.0) or 0.0),
    )


def _gemma3(c: Keys) -> ModelConfig:
    every = int(c.get("sliding_window_pattern") or 6)
    whole, local = _two_ropes(c, 1e6, c.get("rope_local_base_freq") or 10000.0)
    caps = {name: c.get(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    types = _types(c, lambda i: (i + 1) % every == 0)
    none = dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta"))  # both ropes are read here
    config = _gemma2(c.changed(**none, layer_types=types, **caps))
    return _flagged(_per_type(c, config, types, whole, local), qk_norm=True)


def _gemma4(c: Keys) -> ModelConfig:
    c.fixed(enable_moe_block=False, use_bidirectional_attention="vision")  # the latter: of images alone
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        c.get(name)  # of the mixture
    for name in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
        c.fixed(**{name: None})  # transformers does not read them here
    types = _types(c, lambda i: (i + 1) % 6 == 0)
    types[-1] = "full_attention"
    inner = c.changed(rope_parameters=None, use_bidirectional_attention=None)
    config = _flagged(_gemma(inner), norm_offset=0.0)
    layers = _with_windows(config, types, c.get("sliding_window", 512), {"sliding_attention": 1}).layers
    layers = _shared_keys(c, types, _own_shapes(c, types, layers, config), config.intermediate_size)
    both = c.get("rope_parameters") or {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    ropes, contexts = [], []
    for kind in ("full_attention", "sliding_attention"):
        sizes = {
            spec.head_dim or config.head_dim for spec, name in zip(layers, types, strict=True) if name == kind
        }
        if len(sizes) > 1:
            raise ValueError(
                f"layers of type {kind} with heads of {sorted(sizes)} channels are not supported"
            )
        parameters = {"partial_rotary_factor": 1.0} | both[kind]
        if parameters.get("rope_type", "default") == "default" and parameters["partial_rotary_factor"] != 1:
            raise ValueError(
                "partial_rotary_factor with rope type 'default' is not supported here; expected 1"
            )
        own, context = rope(parameters, next(iter(sizes), config.head_dim), c)
        ropes.append(own)
        contexts.append(context)
    width, rows = (
        int(c.get("hidden_size_per_layer_input", 256) or 0),
        c.get("vocab_size_per_layer_input", 262144),
    )
    if width and int(rows) < config.vocab_size:
        raise ValueError(
            f"vocab_size_per_layer_input = {rows}: expected vocab_size = {config.vocab_size} or more"
        )
    return _flagged(
        replace(config, max_positions=min(contexts)),
        layers=layers,
        ropes=tuple(ropes),
        norms=SANDWICH,
        qk_norm=True,
        has_value_norm=True,
        is_unscaled=True,
        logit_cap=float(c.get("final_logit_softcapping") or 0.0),
        has_layer_scale=True,
        input_width=width,
        input_rows=int(rows) if width else 0,
    )


def _own_shapes(
    c: Keys, types: Sequence[str], layers: Sequence[LayerSpec], config: ModelConfig
) -> list[LayerSpec]:
    """Give Gemma 4's layers their heads: full layers have wider ones, and may have fewer keys, values at once."""
    is_same = bool(c.get("attention_k_eq_v"))
    given, heads = c.get("per_layer_config"), c.get("num_global_key_value_heads")
    wide = {"head_dim": c.get("global_head_dim") or 512, "num_key_value_heads": heads if is_same else None}
    found = []
    for index, (spec, kind) in enumerate(zip(layers, types, strict=True)):
        is_full = kind == "full_attention"
        own = (wide if is_full else {}) if given is None else given.get(str(index), given.get(index)) or {}
        unknown = set(own) - set(wide)
        if unknown:
            raise ValueError(f"per_layer_config with {sorted(unknown)[0][:60]!r} is not supported")
        shape = int(own.get("num_key_value_heads") or 0), int(own.get("head_dim") or 0)
        plain = config.num_kv_heads, config.head_dim
        kv_heads, channels = (
            0 if value == usual else value for value, usual in zip(shape, plain, strict=True)
        )
        found.append(
            replace(spec, num_kv_heads=kv_heads, head_dim=channels, has_values=not (is_same and is_full))
        )
    return found


def _shared_keys(
    c: Keys, types: Sequence[str], layers: Sequence[LayerSpec], width: int
) -> tuple[LayerSpec, ...]:
    """Let Gemma 4's last layers read the keys and values of the last one of their type that has its own."""
    first = len(layers) - int(c.get("num_kv_shared_layers") or 0)
    doubled = 2 * width if c.get("use_double_wide_mlp") else 0
    found = list(layers)
    for index in range(max(first, 0), len(layers)):
        sources = [place for place in range(first) if types[place] == types[index]]
        if not sources:
            raise ValueError(
                f"num_kv_shared_layers = {len(layers) - first}: no layer before is of {types[index]}"
            )
        found[index] = replace(layers[index], source=sources[-1], intermediate_size=doubled)
    return tuple(found)


def _two_ropes(c: Keys, theta: float, local_theta: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of full and of windowed layers' ropes; an old config's scaling is the former's alone."""
    both, scaling = c.get("rope_parameters") or {}, c.get("rope_scaling") or {}
    if not isinstance(both, dict) or not isinstance(scaling, dict):
        raise ValueError("rope_parameters: expected an object")
    unknown = set(both) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(
            f"rope_parameters: expected full_attention and sliding_attention, got {sorted(unknown)[0]!r}"
        )
    beside = c.get("rope_theta")
    whole = {"rope_theta": theta if beside is None else beside} | (both.get("full_attention") or {}) | scaling
    local = {"rope_theta": local_theta} | (both.get("sliding_attention") or {})
    return {"partial_rotary_factor": 1.0} | whole, {"partial_rotary_factor": 1.0} | local


def _per_type(
    c: Keys, config: ModelConfig, types: Sequence[str], whole: dict[str, Any], local: dict[str, Any]
) -> ModelConfig:
    """Give full layers one rope and windowed layers another."""
    ropes, contexts = zip(
        *(rope(parameters, config.head_dim, c) for parameters in (whole, local)), strict=True
    )
    config, window = replace(config, max_positions=min(contexts)), c.get("sliding_window", 4096)
    if ropes[0] == ropes[1]:
        return _with_windows(_flagged(config, ropes=ropes[:1]), types, window)
    return _with_windows(_flagged(config, ropes=ropes), types, window, {"sliding_attention": 1})


def _olmo2(c: Keys) -> ModelConfig:
    config = _decoder(c, attention_bias=bool(c.get("attention_bias")))
    return _flagged(config, norms=POST_NORM, whole_qk_norm=True)


def _olmo3(c: Keys) -> ModelConfig:
    given = c.get("rope_parameters")
    if isinstance(given, dict) and not {"full_attention", "sliding_attention"} & set(given):
        # Written by transformers 4: one rope, whose scaling the full layers alone have.
        whole, local = _two_ropes(Keys({"rope_scaling": given}), 5e5, given.get("rope_theta", 5e5))
    else:
        # transformers takes rope_theta for the full layers' rope, and its default for the others.
        whole, local = _two_ropes(c, 5e5, 5e5)
    types = _types(c, lambda i: (i + 1) % 4 == 0)
    for name in ("rope_scaling", "rope_theta"):
        c.get(name)  # a flat rope comes first
    config = _olmo2(c.changed(rope_parameters=None, rope_scaling=None, rope_theta=None))
    return _per_type(c, config, types, whole, local)


def _glm(c: Keys) -> ModelConfig:
    config = _decoder(c, rotated=0.5, head_dim=128, is_interleaved=True)
    return _flagged(config, qkv_bias=bool(c.get("attention_bias", True)), fused=("gate_up_proj",))


def _glm4(c: Keys) -> ModelConfig:
    return _flagged(_glm(c), norms=GLM_NORM)


def _qwen3_5(c: Keys) -> ModelConfig:
    c.fixed(attn_output_gate=True, output_gate_type="swish", mamba_ssm_dtype="float32")
    for name in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"):
        c.get(name)  # heads that draw several tokens ahead: neither loaded nor written
    config = _decoder(c, rotated=0.25, head_dim=256, attention_bias=bool(c.get("attention_bias")))
    every = int(c.get("full_attention_interval") or 4)
    kinds = "linear_attention", "full_attention"
    types = c.get("layer_types") or [kinds[(i + 1) % every == 0] for i in range(config.num_layers)]
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    key_heads, value_heads, key_dim, value_dim, kernel = (int(c[f"linear_{name}"]) for name in names)
    delta = Delta(
        key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, kernel=kernel
    )
    config = _with_windows(_flagged(config, delta=delta), types, None)
    # Qwen3.5's files have a layer that draws a token ahead (mtp).
    return _flagged(config, qk_norm=True, norm_offset=1.0, is_gated=True, num_ahead=1)


def _with_experts(
    config: ModelConfig,
    experts: Experts,
    has_experts: Callable[[int], bool] = lambda _: True,
    names: tuple[str, str, str, str] = EXPERT_NAMES,
) -> ModelConfig:
    layers = (replace(spec, has_experts=has_experts(i)) for i, spec in enumerate(config.layers))
    return _flagged(config, experts=experts, layers=tuple(layers), expert_names=names)


def _first(c: Keys, *names: str) -> int:
    """Return the value of the first name that is there: transformers writes some keys by another name than it reads."""
    found = [c.get(name) for name in names]
    return int(next((value for value in found if value is not None), None) or c[names[-1]])


def _qwen3_moe(c: Keys) -> ModelConfig:
    base = _decoder(c, attention_bias=bool(c.get("attention_bias")))
    window = c.get("sliding_window", 4096) if c.get("use_sliding_window") else None
    config = _with_windows(base, ["sliding_attention"] * base.num_layers, window)
    c.get("max_window_layers")  # transformers does not read it here
    dense, step = c.get("mlp_only_layers") or (), int(c.get("decoder_sparse_step", 1))
    experts = Experts(
        count=_first(c, "num_local_experts", "num_experts"),
        top_k=int(c["num_experts_per_tok"]),
        width=int(c["moe_intermediate_size"]),
        is_normalised=bool(c.get("norm_topk_prob")),
    )
    return _flagged(
        _with_experts(config, experts, lambda i: i not in dense and (i + 1) % step == 0), qk_norm=True
    )


def _qwen3_next(c: Keys) -> ModelConfig:
    config = _qwen3_5(c)
    delta = config.block.delta
    assert delta is not None
    dense, step = c.get("mlp_only_layers") or (), int(c.get("decoder_sparse_step", 1))
    experts = replace(_qwen_experts(c), is_normalised=bool(c.get("norm_topk_prob", True)))
    config = _with_experts(config, experts, lambda i: i not in dense and (i + 1) % step == 0)
    return _flagged(config, delta=replace(delta, is_grouped=True))


def _qwen3_5_moe(c: Keys) -> ModelConfig:
    experts = _qwen_experts(c)
    return _with_experts(_qwen3_5(c.changed(intermediate_size=experts.width)), experts)


def _qwen_experts(c: Keys) -> Experts:
    """Read a mixture with a gated part that all tokens go through."""
    return Experts(
        count=_first(c, "num_local_experts", "num_experts"),
        top_k=int(c["num_experts_per_tok"]),
        width=int(c["moe_intermediate_size"]),
        shared="shared_expert",
        shared_width=int(c["shared_expert_intermediate_size"]),
        has_shared_gate=True,
    )


def _mixtral(c: Keys) -> ModelConfig:
    experts = Experts(
        count=_first(c, "num_local_experts", "num_experts"),
        top_k=int(c["num_experts_per_tok"]),
        width=int(c["intermediate_size"]),
    )
    config = _everywhere(c, _decoder(c, theta=1e6), None)
    return _with_experts(config, experts, names=("block_sparse_moe", "w1", "w3", "w2"))


def _olmoe(c: Keys) -> ModelConfig:
    experts = Experts(
        count=_first(c, "num_local_experts", "num_experts"),
        top_k=int(c["num_experts_per_tok"]),
        width=int(c["intermediate_size"]),
        is_normalised=bool(c.get("norm_topk_prob")),
    )
    config = _with_experts(_decoder(c, attention_bias=bool(c.get("attention_bias"))), experts)
    return _flagged(config, whole_qk_norm=True, qkv_clip=float(c.get("clip_qkv") or 0.0))


def _gpt_oss(c: Keys) -> ModelConfig:
    c.fixed(swiglu_limit=7.0, swiglu_alpha=1.702)
    for name in ("initial_context_length", "experts_per_token", "quantization_config"):
        c.get(name)  # the first two repeat other keys; of the last only MXFP4 comes here
    config = _decoder(c, theta=150000.0, head_dim=64, attention_bias=bool(c.get("attention_bias", True)))
    config = _with_windows(config, _types(c, lambda i: i % 2 == 1), c.get("sliding_window", 128))
    experts = Experts(
        count=_first(c, "num_local_experts", "num_experts"),
        top_k=int(c["num_experts_per_tok"]),
        width=config.intermediate_size,
        router="router",
        score="softmax_of_top",
        is_clamped=True,
    )
    return _flagged(_with_experts(config, experts, names=("", "", "", "")), has_sinks=True)


def _grouped_experts(c: Keys) -> Experts:
    """Read the mixture of DeepSeek-V3 and GLM-4.5: sigmoids, an offset for the choice, groups, a shared part."""
    c.fixed(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, ep_size=1, seq_aux=True)
    c.get("aux_loss_alpha")  # the offset balances the load, no loss does
    width = int(c["moe_intermediate_size"])
    return Experts(
        count=_first(c, "num_local_experts", "n_routed_experts"),
        top_k=int(c["num_experts_per_tok"]),
        width=width,
        score="sigmoid",
        is_normalised=bool(c.get("norm_topk_prob", True)),
        sum_eps=1e-20,
        scale=float(c["routed_scaling_factor"]),
        has_offset=True,
        num_groups=int(c.get("n_group") or 1),
        top_groups=int(c.get("topk_group") or 1),
        shared="shared_experts",
        shared_width=width * int(c["n_shared_experts"]),
    )


def _lfm2(c: Keys) -> ModelConfig:
    inner = int(c.get("block_ff_dim") or c["intermediate_size"])
    multiplier, multiple = c.get("block_ffn_dim_multiplier", 1.0), int(c.get("block_multiple_of", 256))
    if c.get("block_auto_adjust_ff_dim", True):
        inner = int(2 * inner / 3)
        if multiplier is not None:
            inner = -(-int(multiplier * inner) // multiple) * multiple
    return _lfm(c, inner)


def _lfm2_moe(c: Keys) -> ModelConfig:
    dense = int(c.get("num_dense_layers", 2))
    experts = Experts(
        count=_first(c, "num_local_experts", "num_experts"),
        top_k=int(c["num_experts_per_tok"]),
        width=int(c["moe_intermediate_size"]),
        score="sigmoid",
        is_normalised=bool(c.get("norm_topk_prob", True)),
        sum_eps=1e-6,
        scale=float(c.get("routed_scaling_factor", 1.0)),
        has_offset=bool(c.get("use_expert_bias", True)),
    )
    return _with_experts(
        _lfm(c, int(c["intermediate_size"])), experts, lambda i: i >= dense, ("mlp", "w1", "w3", "w2")
    )


def _lfm(c: Keys, inner: int) -> ModelConfig:
    """Read what LFM2's dense models and mixtures share; the first files name some sizes twice."""
    width, eps, tied = int(c["hidden_size"]), c.get("norm_eps", 1e-5), c.get("tie_word_embeddings", True)
    c.fixed(block_dim=width, conv_dim=width, conv_dim_out=width, num_heads=int(c["num_attention_heads"]))
    c.fixed(block_norm_eps=eps, block_use_swiglu=True, use_pos_enc=True)
    for name in (
        "block_mlp_init_scale",
        "block_out_init_scale",
        "block_use_xavier_init",
        "conv_use_xavier_init",
    ):
        c.get(name)  # initialisation
    chosen = c.get("full_attn_idxs")
    changed = {"intermediate_size": inner, "rms_norm_eps": eps}
    config = _decoder(c.changed(tie_word_embeddings=c.get("tie_embedding", tied), **changed), theta=1e6)
    places = range(config.num_layers) if chosen is None else chosen
    kinds = ("conv", "full_attention")
    types = c.get("layer_types") or [kinds[index in places] for index in range(config.num_layers)]
    config = _flagged(
        config, kernel=int(c.get("conv_L_cache", 3)), has_kernel_bias=bool(c.get("conv_bias", False))
    )
    norms = ("operator_norm", "", "ffn_norm", "")
    return _flagged(_with_windows(config, types, None), norms=norms, qk_norm=True, renamed=LFM2_NAMES)


def _num_ahead(c: Keys) -> int:
    """Return the layers after the last one that draw tokens further ahead; they are not loaded."""
    numbers = (c.get(name) for name in ("num_mtp_layers", "num_nextn_predict_layers"))
    return max(int(number or 0) for number in numbers)


def _glm4_moe(c: Keys) -> ModelConfig:
    config = _decoder(c, rotated=0.5)
    first = int(c.get("first_k_dense_replace", 1))
    config = _with_experts(config, _grouped_experts(c), lambda i: i >= first)
    qkv_bias, qk_norm = bool(c.get("attention_bias")), bool(c.get("use_qk_norm"))
    return _flagged(config, qkv_bias=qkv_bias, qk_norm=qk_norm, num_ahead=_num_ahead(c))


def _deepseek_v3(c: Keys) -> ModelConfig:
    c.fixed(attention_bias=False)
    plain, turned = int(c["qk_nope_head_dim"]), int(c["qk_rope_head_dim"])
    latent = Latent(
        query_rank=int(c.get("q_lora_rank") or 0),
        key_rank=int(c["kv_lora_rank"]),
        plain_dim=plain,
        rope_dim=turned,
        value_dim=int(c["v_head_dim"]),
    )
    for name in ("head_dim", "qk_head_dim", "num_key_value_heads"):
        c.get(name)  # follow from the others
    sizes = {"head_dim": plain + turned, "num_key_value_heads": None}
    p = rope_parameters(c)
    own, context = rope(p, turned, c)
    own = replace(own, is_interleaved=bool(c.get("rope_interleave", True)))
    config = _decoder(c.changed(rope_parameters=None, rope_scaling=None, rope_theta=None, **sizes))
    config = replace(config, max_positions=context, num_kv_heads=config.num_heads)
    is_scaled = p.get("rope_type", p.get("type", "default")) != "default" and p.get("mscale_all_dim")
    scale = sharpness(float(p["factor"]), float(p["mscale_all_dim"])) ** 2 if is_scaled else 1.0
    first = int(c.get("first_k_dense_replace", 3))
    config = _with_experts(config, _grouped_experts(c), lambda i: i >= first)
    return _flagged(config, ropes=(own,), latent=latent, query_scale=scale, num_ahead=_num_ahead(c))


def _gpt2(c: Keys) -> ModelConfig:
    width, heads = int(c["n_embd"]), int(c["n_head"])
    activation = c.get("activation_function", "gelu_new")
    if activation != "gelu_new":
        raise ValueError(f"activation_function {activation!r} is not supported; expected 'gelu_new'")
    fixed = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    for name, expected in (fixed | {"add_cross_attention": False}).items():
        if c.get(name, expected) != expected:
            raise ValueError(f"{name} = {c[name]!r} is not supported; expected {expected}")
    return ModelConfig(
        family="gpt2",
        vocab_size=int(c["vocab_size"]),
        hidden_size=width,
        intermediate_size=int(c.get("n_inner") or 4 * width),
        num_layers=int(c["n_layer"]),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // max(heads, 1),
        max_positions=int(c["n_positions"]),
        norm_eps=float(c.get("layer_norm_epsilon", 1e-5)),
        tie_embeddings=bool(c.get("tie_word_embeddings", True)),
    )


FAMILIES: dict[str, tuple[str, Reader]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "qwen2": ("Qwen2ForCausalLM", lambda c: _qwen(c, "qwen2")),
    "qwen3": ("Qwen3ForCausalLM", lambda c: _qwen(c, "qwen3")),
    "gpt2": ("GPT2LMHeadModel", _gpt2),
    "mistral": ("MistralForCausalLM", _mistral),
    "ministral": ("MinistralForCausalLM", _ministral),
    "ministral3": ("Ministral3ForCausalLM", _ministral3),
    "phi3": ("Phi3ForCausalLM", _phi3),
    "smollm3": ("SmolLM3ForCausalLM", _smollm3),
    "granite": ("GraniteForCausalLM", _granite),
    "gemma": ("GemmaForCausalLM", _gemma),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3_text": ("Gemma3ForCausalLM", _gemma3),
    "gemma4_text": ("Gemma4ForCausalLM", _gemma4),
    "olmo2": ("Olmo2ForCausalLM", _olmo2),
    "olmo3": ("Olmo3ForCausalLM", _olmo3),
    "glm": ("GlmForCausalLM", _glm),
    "glm4": ("Glm4ForCausalLM", _glm4),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", _qwen3_5),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", _qwen3_5_moe),
    "qwen3_next": ("Qwen3NextForCausalLM", _qwen3_next),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "olmoe": ("OlmoeForCausalLM", _olmoe),
    "gpt_oss": ("GptOssForCausalLM", _gpt_oss),
    "glm4_moe": ("Glm4MoeForCausalLM", _glm4_moe),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _deepseek_v3),
    "lfm2": ("Lfm2ForCausalLM", _lfm2),
    "lfm2_moe": ("Lfm2MoeForCausalLM", _lfm2_moe),
}
"""The class that transformers has for a model type, and its reader."""
CLASSIFIERS: dict[str, str] = {
    kind: name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    + ("Text" if kind.endswith("_text") else "")
    + "ForSequenceClassification"
    for kind, (name, _) in FAMILIES.items()
}
"""What transformers calls a reward model of each type, where it has one (granite, olmoe and glm4_moe have none)."""


def _qwen3_vl_moe(c: Keys) -> ModelConfig:
    config = _qwen3_moe(c.changed(norm_topk_prob=True))  # always, whatever it says
    return _flagged(config, expert_names=("", "", "", ""), has_turned_experts=True)


def _qwen2_5_vl(c: Keys) -> ModelConfig:
    scaling = c.get("rope_scaling")
    if isinstance(scaling, dict) and "mrope" in (scaling.get("type"), scaling.get("rope_type")):
        scaling = {**scaling, "type": "default", "rope_type": "default"}  # the sections are read elsewhere
    return _qwen(c.changed(rope_scaling=scaling), "qwen2")


DECODERS: dict[str, Reader] = {
    "qwen2_5_vl_text": _qwen2_5_vl,
    "qwen3_vl_text": lambda c: _qwen(c, "qwen3"),
    "qwen3_vl_moe_text": _qwen3_vl_moe,
}
"""Readers of decoders that are published with a tower alone."""
WRAPPERS: dict[str, tuple[str, ...]] = {
    "gemma4": ("gemma4_text",),
    "mistral3": ("ministral3", "mistral"),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}
"""Checkpoints with images whose tower is not read, and the types of text part that are loaded from them."""
LINEAR: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
LINEAR_MIXTURE = LINEAR | {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        # Gemma 3's own checkpoints with images leave these out.
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
    "smollm3": {"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    "ministral": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    "ministral3": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "gemma": {"num_key_value_heads": 16, "max_position_embeddings": 8192},
    "gemma2": {"num_key_value_heads": 4, "max_position_embeddings": 8192},
    "gemma4_text": {"num_key_value_heads": 4, "max_position_embeddings": 131072},
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5},
    "glm": {"num_key_value_heads": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7},
    "glm4": {"num_key_value_heads": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7},
    "qwen3_5_text": LINEAR | {"num_key_value_heads": 4},
    "qwen3_5_moe_text": LINEAR_MIXTURE | {"num_experts": 256, "num_experts_per_tok": 8},
    "qwen3_next": LINEAR_MIXTURE | {"num_experts": 512, "num_experts_per_tok": 10},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "mixtral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "olmoe": {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "gpt_oss": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "glm4_moe": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "routed_scaling_factor": 1.0,
        "num_mtp_layers": 1,
    },
    "deepseek_v3": {
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "num_mtp_layers": 1,
    },
    "lfm2": {"num_key_value_heads": 8, "max_position_embeddings": 128000},
    "lfm2_moe": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
    },
    "qwen2": {"max_position_embeddings": 32768},
    "qwen2_5_vl_text": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "vocab_size": 152064,
    },
    "qwen3_vl_moe_text": {
        "max_position_embeddings": 128000,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "rope_theta": 500000.0,
        "vocab_size": 151936,
    },
    "qwen3_vl_text": {"max_position_embeddings": 128000, "rope_theta": 500000.0, "vocab_size": 151936},
    "qwen3": {"max_position_embeddings": 32768},
}
"""What a missing key means where it differs from Llama's."""


def from_hf(
    data: Mapping[str, Any], *, where: str = "config.json", rope_factors: RopeFactors = "auto"
) -> ModelConfig:
    """Read a Hugging Face model configuration.

    Args:
        data: Parsed config.json.
        where: Name for error messages.
        rope_factors: Of ropes that change with the length of sequences (`rope`); auto takes what whet wrote into the
            file, else short. The choice is written with the model.

    Returns:
        Its shape; of a checkpoint with images whose tower is not supported, that of the text part.

    Raises:
        UserError: If the family is not supported, or an option of it is not.
    """
    outer, inner = data, data.get("text_config")
    asked = data.get("model_type")
    if isinstance(asked, str) and asked in SEEING:
        return _read_seeing(data, SEEING[asked], where, rope_factors)
    if isinstance(asked, str) and asked in WRAPPERS and isinstance(inner, dict):
        parts = WRAPPERS[asked]
        data = {"model_type": parts[0]} | inner
        if data["model_type"] not in parts:
            raise UserError(
                f"{where}: text part {str(data['model_type'])[:40]!r} of {asked} is not supported"
            )
        asked = data["model_type"]
        if "tie_word_embeddings" in outer:
            data["tie_word_embeddings"] = outer["tie_word_embeddings"]
    if not isinstance(asked, str) or asked not in FAMILIES:
        names = [*FAMILIES, *SEEING, *WRAPPERS]
        near = get_close_matches(str(asked)[:40], names, n=4, cutoff=0.5) or ["llama", "qwen3", "gemma3"]
        raise UserError(
            f"{where}: model_type {str(asked)[:40]!r} is not supported; expected one of {len(names)} such as "
            f"{', '.join(near)} (docs/models.md)"
        )
    architecture, read = FAMILIES[asked]
    _refuse_foreign(outer, architecture, where)
    is_part = outer is not data
    if is_packed(outer):  # of the weights, not of the shape
        data = {key: value for key, value in data.items() if key != "quantization_config"}
    if rope_factors != "auto":
        data = {**data, "rope_factors": rope_factors}
    keys = Keys(data, DEFAULTS.get(asked))
    try:
        check_dtype(outer)
        check_dtype(data)
        _check_factors(keys, read)
        config = replace(read(keys), is_reward=_is_reward(outer, keys, CLASSIFIERS[asked]))
        keys.refuse_unread()
    except KeyError as missing:
        raise UserError(f"{where}: field {missing} is missing") from None
    except (TypeError, ValueError, ArithmeticError) as error:  # the last: int(Infinity), a division by 0
        raise UserError(f"{where}: {error}") from None
    if is_part:
        config = _flagged(config, is_part=True)
    return replace(config, source=json.dumps(dict(data)))


def _read_seeing(
    data: Mapping[str, Any], family: Seeing, where: str, rope_factors: RopeFactors
) -> ModelConfig:
    """Read a model with images: its decoder, and then the tower."""
    _refuse_foreign(data, family.architecture, where)
    if is_packed(data):  # of the weights, not of the shape
        data = {key: value for key, value in data.items() if key != "quantization_config"}
    text, tower = _text_keys(data, family), data.get("vision_config") or {}
    kind = text.setdefault("model_type", family.texts[0] if family.texts else "llama")
    if not isinstance(kind, str) or kind not in (family.texts or FAMILIES):
        known = ", ".join(family.texts or FAMILIES)
        raise UserError(f"{where}: text_config of model_type {str(kind)[:40]!r}: expected one of {known}")
    if not isinstance(tower, dict):
        raise UserError(f"{where}: vision_config: expected an object, got {type(tower).__name__}")
    if rope_factors != "auto":
        text["rope_factors"] = rope_factors
    read = DECODERS[kind] if kind in DECODERS else FAMILIES[kind][1]
    sizes = TEXT_SIZES.get(kind, {}) if not family.texts else {}
    keys, outer = Keys(text, sizes | DEFAULTS.get(kind, {})), Keys(data)
    keys.fixed(qk_layer_norms=False, use_resampler=False)
    for name in TEXT_LEFT:
        keys.get(name)
    seen = Keys(tower, family.defaults)
    seen.get("tie_word_embeddings")  # older versions of transformers write it into each part
    try:
        for part in (data, text, tower):
            check_dtype(part)
        _check_factors(keys, read)
        config = read(keys)
        vision = family.read(outer, seen, config)
        if family.has_axes:
            vision = replace(vision, sections=_sections(keys, config))
        keys.refuse_unread()
        seen.refuse_unread()
        if "text_config" in data:
            for name in ("text_config", "vision_config", "tie_word_embeddings", *family.outer):
                outer.get(name)
            outer.refuse_unread()
    except KeyError as missing:
        raise UserError(f"{where}: field {missing} is missing") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{where}: {error}") from None
    return replace(config, vision=vision, source=json.dumps(dict(data)))


def _text_keys(data: Mapping[str, Any], family: Seeing) -> dict[str, Any]:
    """Return the decoder's part of the config.json of a model with images."""
    text = data.get("text_config")
    if isinstance(text, dict):
        text = dict(text)
    else:  # the first files of Qwen2.5-VL have the decoder's keys among the others
        apart = {"model_type", "vision_config", "image_token_id", *family.outer}
        text = {name: value for name, value in data.items() if name not in apart}
    if "tie_word_embeddings" in data:
        text["tie_word_embeddings"] = data["tie_word_embeddings"]
    return text


def _sections(c: Keys, config: ModelConfig) -> tuple[int, int, int]:
    """Return the frequencies of each axis of positions."""
    given = rope_parameters(c).get("mrope_section")
    sections = tuple(int(n) for n in given or ())
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != config.head_dim // 2:
        raise ValueError(
            f"mrope_section = {str(given)[:60]}: expected three numbers with the sum {config.head_dim // 2}"
        )
    return sections[0], sections[1], sections[2]


def _check_factors(c: Keys, read: Reader) -> None:
    """Refuse rope factors that are none, and long ones of a model whose ropes have no other than short ones."""
    factors = c.get("rope_factors", "short")
    if factors not in ("short", "long"):
        raise ValueError(f"rope_factors = {str(factors)[:40]!r}: expected short or long")
    if factors == "long" and read(c).max_positions == read(c.changed(rope_factors="short")).max_positions:
        raise ValueError(
            "rope_factors = long: no rope of this model changes with length (longrope, dynamic), so its context stays "
            "as it is; leave it out"
        )


def _is_reward(outer: Mapping[str, Any], c: Keys, classifier: str) -> bool:
    """Say whether it is a sequence classifier; refuse one of several labels."""
    num_labels = c.get("num_labels")
    if classifier not in (outer.get("architectures") or ()):
        return False
    if num_labels is None:
        num_labels = len(c.get("id2label") or (0, 1))
    if num_labels != 1:
        raise ValueError(f"a classifier of {num_labels} labels is not supported; a reward model has 1")
    return True


def is_packed(data: Mapping[str, Any]) -> bool:
    """Say whether the weights are stored in a quantised form that `whet.model.quant` reads."""
    return quant_method(data) in ("bitsandbytes", "torchao", "whet")


def quant_method(data: Mapping[str, Any]) -> str:
    """Return which library quantised the weights beside a config.json; '' if none did."""
    quantised = data.get("quantization_config")
    return str(quantised.get("quant_method")) if isinstance(quantised, dict) else ""


def _refuse_foreign(data: Mapping[str, Any], architecture: str, where: str) -> None:
    """Refuse a model with code of its own, or with weights in another form."""
    if "auto_map" in data:
        code = data["auto_map"]
        own = code.get("AutoModelForCausalLM") if isinstance(code, dict) else None
        # Phi-3 and DeepSeek name a copy of the class that transformers has itself.
        if not isinstance(own, str) or own.rpartition(".")[2] != architecture:
            raise UserError(
                f"{where}: the model asks for remote code (auto_map), which whet never runs; "
                f"use a plain folder of its family"
            )
    quantised = data.get("quantization_config")
    if quantised is not None:
        # gpt-oss' experts in 4 bits are read into floats: no other form of them was published.
        if architecture == "GptOssForCausalLM" and quantised.get("quant_method") == "mxfp4":
            return
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        if is_packed(data):
            return
        raise UserError(
            f"{where}: quantization_config ({str(method or 'unnamed')[:40]}): the weights are quantised in a form that "
            "is not supported (bitsandbytes' NF4 and int8, torchao's plain ones, and whet's own are); use the folder "
            "with bfloat16 or float32 weights, which whet rounds itself (--policy.quantize nf4)"
        )


def _with_older_keys(found: dict[str, Any]) -> dict[str, Any]:
    """Write what transformers 5 alone reads also as transformers 4 and mlx-lm read it: of `rope_parameters` they take
    another base and no scaling without a word. A family that has no such form stays as it is."""
    inner = found.get("text_config", found)
    given = inner.get("rope_parameters")
    more: dict[str, Any] = {}
    if inner.get("model_type", "").startswith("qwen"):
        more["num_experts"] = inner.get("num_local_experts")
    if inner.get("model_type") == "lfm2":
        more["block_dim"] = inner.get("hidden_size")
    if isinstance(given, dict):
        more |= _older_rope(given, inner.get("model_type", ""))
    own = {name: value for name, value in more.items() if value is not None and inner.get(name) is None}
    if isinstance(given, dict) and "rope_scaling" not in inner | own:
        own["rope_scaling"] = None  # mlx-lm does not read GLM-4.5 without it
    if not own:
        return found
    older = found | {"text_config": inner | own} if "text_config" in found else found | own
    try:
        return older if from_hf(older) == from_hf(found) else found
    except UserError:
        return found


def _older_rope(given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the keys that `rope_parameters` had before there were any; None for what they do not say."""
    whole, more = given.get("full_attention", given), {}
    if kind.startswith("gemma3") and "sliding_attention" in given:
        more["rope_local_base_freq"] = given["sliding_attention"].get("rope_theta")
    more |= {name: whole.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    scaling = {name: value for name, value in whole.items() if name not in more}
    if scaling.get("rope_type") == "longrope":  # Phi-3's reader wants these three
        more["original_max_position_embeddings"] = scaling.get("original_max_position_embeddings")
        scaling = {"type": "longrope"} | {name: scaling.get(name) for name in ("short_factor", "long_factor")}
    if scaling.keys() - {"rope_type"}:
        more["rope_scaling"] = scaling
    return more


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
        "vocab_size": config.vocab_size,
        "bos_token_id": bos_id,
        "eos_token_id": eos,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if config.block.input_width:
        shared["vocab_size_per_layer_input"] = config.input_rows
    if config.is_reward:
        shared |= {
            "num_labels": 1,
            "id2label": {"0": "score"},
            "label2id": {"score": 0},
            "pad_token_id": pad_id,
        }
    found = json.loads(config.source or "{}")
    kind = found.get("model_type", config.family)
    if config.vision is not None:
        for name in ("dtype", "auto_map", "quantization_config"):
            found.pop(name, None)
        found |= {"architectures": [SEEING[kind].architecture]}
        if (
            "text_config" not in found
        ):  # the first files of Qwen2.5-VL have the decoder's keys among the others
            return _with_older_keys(found | shared)
        names = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "torch_dtype")
        outer = {name: shared[name] for name in names}
        return _with_older_keys(found | outer | {"text_config": found["text_config"] | shared})
    architecture = CLASSIFIERS[kind] if config.is_reward else FAMILIES[kind][0]
    if config.block != PLAIN_BLOCK or kind != config.family:
        for name in ("dtype", "auto_map", "quantization_config"):
            found.pop(name, None)
        return _with_older_keys(found | {"architectures": [architecture]} | shared)
    shared = {"architectures": [architecture], "model_type": config.family} | shared
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
