"""Shape of a decoder as data: sizes, flags of its one block, and what differs from layer to layer.

`whet.model.families` reads it from a Hugging Face config.json; nothing below that reads a family's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from whet.config import INTERNAL

Family = Literal["llama", "qwen2", "qwen3", "gpt2"]

MAX_SIZE = 2**24
MAX_LAYERS = 1024

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
STORED = frozenset({"fused", "renamed", "expert_names", "has_turned_experts", "is_part", "num_ahead"})
"""Fields of a block that say how weights are stored, and change nothing that is computed."""


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
class Rope:
    """Rotary positions of a layer; every kind of scaling is a divisor of each frequency (`whet.model.families`)."""

    theta: float
    """Base of the frequencies."""
    dims: int
    """Rotated channels, the first ones of a head."""
    divisors: tuple[float, ...] = ()
    """Divisor of each frequency, dims / 2 of them; none for all 1."""
    amplitude: float = 1.0
    """Factor of cos and sin (yarn and longrope sharpen attention with it)."""
    is_interleaved: bool = False
    """Whether channels 2 i and 2 i + 1 turn together, not i and i + dims / 2."""

    def __post_init__(self) -> None:
        if not 0 < self.theta < float("inf"):
            raise ValueError(f"model.rope_theta = {self.theta}: expected a positive number")
        if self.dims < 2 or self.dims % 2:
            raise ValueError(f"{self.dims} rotated channels: rotary positions need an even number")
        if self.divisors and len(self.divisors) != self.dims // 2:
            raise ValueError(f"{len(self.divisors)} rope factors: expected {self.dims // 2}")


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What differs from layer to layer."""

    mixer: Literal["attention", "delta", "convolution"] = "attention"
    """What mixes positions: attention, the gated delta rule, or a short convolution between two gates."""
    window: int = 0
    """Positions that attention sees, its own included; 0 for all."""
    rope: int = 0
    """Index of the layer's rope; -1 for no positions."""
    has_experts: bool = False
    """Whether the feed-forward part is a mixture of experts."""
    num_kv_heads: int = 0
    """Key/value heads; 0 for the model's number."""
    head_dim: int = 0
    """Channels per head; 0 for the model's number."""
    intermediate_size: int = 0
    """Feed-forward width; 0 for the model's."""
    has_values: bool = True
    """Whether values have a product of their own; else they are the keys before norm and rotation."""
    source: int = -1
    """Layer before it whose keys and values it reads; -1 for its own."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts as feed-forward part."""

    count: int
    """Experts E."""
    top_k: int
    """Experts that a token goes to."""
    width: int
    """Feed-forward width of each."""
    router: str = "gate"
    """Name of the router among the parameters."""
    score: Literal["softmax", "sigmoid", "softmax_of_top"] = "softmax"
    """Weights of the experts: softmax over all or over the chosen ones, or each one's sigmoid."""
    is_normalised: bool = True
    """Whether the chosen ones' weights are divided by their sum."""
    sum_eps: float = 0.0
    """Added to that sum."""
    scale: float = 1.0
    """Factor of the weights."""
    has_offset: bool = False
    """Whether an offset of each expert joins the scores for the choice alone (e_score_correction_bias)."""
    num_groups: int = 1
    """Groups of experts; the best ones are chosen first."""
    top_groups: int = 1
    """Groups that a token's experts come from."""
    shared: str = ""
    """Name of the part that all tokens go through; '' for none."""
    shared_width: int = 0
    """Its feed-forward width."""
    has_shared_gate: bool = False
    """Whether a sigmoid weighs it."""
    is_clamped: bool = False
    """gpt-oss: biases, weights stored [in, out] with gate and up interleaved, clamped (up + 1) * gate * sigmoid."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.count <= 4096 or not 1 <= self.width <= MAX_SIZE:
            raise ValueError(
                f"{self.count} experts of width {self.width}, {self.top_k} per token: out of range"
            )
        if self.count % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"{self.count} experts in {self.num_groups} groups, {self.top_groups} chosen: no"
            )


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Sizes of the gated delta rule."""

    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    """Heads of values; a multiple of the former."""
    key_dim: int
    """Channels of a key."""
    value_dim: int
    """Channels of a value."""
    kernel: int
    """Width of the convolution, in tokens."""
    is_grouped: bool = False
    """Whether one product gives each key head's query, key, values and gates one after the other (Qwen3-Next)."""

    def __post_init__(self) -> None:
        sizes = (self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.kernel)
        if not all(1 <= size <= MAX_SIZE for size in sizes):
            raise ValueError(f"linear attention of {self}: expected sizes of 1 and more")
        if self.value_heads % self.key_heads or self.kernel < 2:
            raise ValueError(f"linear_num_value_heads = {self.value_heads}: expected a multiple of key heads")


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Ranks of multi-head latent attention (DeepSeek)."""

    query_rank: int
    """Rank of the queries' projection; 0 for a whole one."""
    key_rank: int
    """Rank of the joint projection of keys and values."""
    plain_dim: int
    """Channels of a head without positions."""
    rope_dim: int
    """Channels with positions, shared by all heads' keys."""
    value_dim: int
    """Channels of a value."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Flags of the decoder block; the defaults are Llama's."""

    layers: tuple[LayerSpec, ...] = ()
    """Each layer's own; none for all alike."""
    ropes: tuple[Rope, ...] = ()
    """Ropes that layers name; none for the one of `rope_theta` and `rope_scaling`."""
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    """Names of the norms before and after attention, before and after the feed-forward part; '' for none."""
    norm_offset: float = 0.0
    """Added to the weights of the norms (1 for Gemma, whose stored weights are around 0)."""
    qk_norm: bool = False
    """A norm of each head's queries and keys."""
    whole_qk_norm: bool = False
    """A norm of all heads' queries and one of all keys."""
    qkv_bias: bool = False
    """Biases of q, k and v alone."""
    has_value_norm: bool = False
    """A norm of each head's values, without weights."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the feed-forward part's gate."""
    query_scale: float = 1.0
    """Factor of the queries, on top of 1 / sqrt(head_dim)."""
    is_unscaled: bool = False
    """Whether scores are not divided by sqrt(head_dim)."""
    position_scale: tuple[float, int] = (0.0, 1)
    """(beta, original context): queries are multiplied by 1 + beta log(1 + floor(position / original))."""
    attention_cap: float = 0.0
    """Scores become cap tanh(score / cap); 0 for none."""
    logit_cap: float = 0.0
    """The same for logits."""
    embedding_scale: float = 1.0
    """Factor of the embeddings."""
    input_width: int = 0
    """Width of what each layer reads of the tokens themselves, from a second table; 0 for nothing."""
    input_rows: int = 0
    """Rows of that table, at least; it has one for each token."""
    has_layer_scale: bool = False
    """Whether each layer's output is multiplied by a stored number."""
    residual_scale: float = 1.0
    """Factor of what attention and the feed-forward part add."""
    logit_scale: float = 1.0
    """Factor of the logits."""
    has_sinks: bool = False
    """Whether each head has a learned score that takes attention from all positions."""
    is_gated: bool = False
    """Whether attention's output is multiplied by the sigmoid of a gate, projected together with the queries."""
    qkv_clip: float = 0.0
    """Largest magnitude of queries, keys and values before rotation; 0 for none."""
    experts: Experts | None = None
    """Of the layers that have them."""
    delta: Delta | None = None
    """Of the layers that mix so."""
    latent: Latent | None = None
    """Latent attention."""
    kernel: int = 0
    """Width of the short convolution, in tokens, of the layers that mix so."""
    has_kernel_bias: bool = False
    """Whether that convolution and the products around it have biases."""
    fused: tuple[str, ...] = ()
    """Tensors of a file that are several parameters one below the other: qkv_proj, gate_up_proj."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of a file's names, and what they are called here; of each name the first that fits is replaced."""
    is_part: bool = False
    """Whether it is the text part of a checkpoint with images."""
    num_ahead: int = 0
    """Layers after the last one, which draw tokens further ahead and are left out."""
    expert_names: tuple[str, str, str, str] = ("", "", "", "")
    """How a file names an expert's own tensors: (part, gate, up, down); '' if all experts are in one tensor."""
    has_turned_experts: bool = False
    """Whether a file's tensors of all experts are [E, in, out]."""


PLAIN_BLOCK = Block()


TOWER = "visual."
"""What the names of all parameters of a tower begin with."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Shape of what turns images into embeddings: a tower over patches, and a projection to the decoder's width."""

    tower: Literal["qwen", "clip"]
    """Names and order of its modules: those of Qwen's, or of CLIP's and SigLIP's."""
    projector: Literal["merge", "pool", "mlp", "shuffle"]
    """From the tower to the decoder: Qwen's merger, Gemma's average pooling, LLaVA's two products, Idefics' shuffle."""
    num_layers: int
    """Layers of the tower."""
    width: int
    """Its width."""
    intermediate_size: int
    """Its feed-forward width."""
    num_heads: int
    """Its heads."""
    out_width: int
    """Width of the decoder."""
    patch_size: int
    """Side of a patch in pixels."""
    token_id: int
    """Id of the placeholder token."""
    start_id: int = -1
    """Token before an image's placeholders, which alone stands for it in a chat template; -1 where they do."""
    end_id: int = -1
    """Token behind them."""
    activation: str = "gelu_pytorch_tanh"
    """Activation of the feed-forward part, as Hugging Face names it."""
    norm_eps: float = 1e-6
    """Epsilon of the norms."""
    is_rms: bool = False
    """Whether it has RMS norms, a gated feed-forward part, and patches without bias (Qwen2.5-VL)."""
    frames: int = 0
    """Copies of the picture that a patch holds (a film has different ones); 0 for one axis less in the weights."""
    merge: int = 1
    """Side of the square of patches that one placeholder token stands for."""
    image_size: int = 0
    """Side of the square that images are resized to, in pixels; 0 where any size is read."""
    positions: int = 0
    """Rows of the table of learned positions; 0 for none."""
    window: int = 0
    """Side of the window that attention sees, in placeholder tokens; 0 for the whole image."""
    whole_layers: tuple[int, ...] = ()
    """Layers that see the whole image nevertheless."""
    deep: tuple[int, ...] = ()
    """Layers whose outputs are added to the decoder's first layers (deepstack)."""
    has_class: bool = False
    """CLIP: a token of the whole image, left out of the features; a norm before the layers; patches without bias."""
    used_layers: int = 0
    """Layers before the projection, without the final norm; the others are stored only. 0 for all and the norm."""
    projector_activation: str = "gelu"
    """Activation between the projection's products."""
    has_projector_bias: bool = True
    """Whether those have biases."""
    sections: tuple[int, int, int] = (0, 0, 0)
    """Frequencies that turn by the axes time, row and column (M-RoPE); zeros where images have plain positions."""
    has_mixed_sections: bool = False
    """Whether the axes take turns from frequency to frequency (Qwen3-VL), and not section after section."""
    is_bidirectional: bool = False
    """Whether the tokens of an image attend to each other in both directions (Gemma 3)."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Beginnings of a file's names and what they are here; the first one of each is written."""

    @property
    def has_positions(self) -> bool:
        """Whether rows and columns of an image are positions of the decoder (M-RoPE)."""
        return any(self.sections)

    def __post_init__(self) -> None:
        sizes = ("width", "intermediate_size", "num_heads", "out_width", "patch_size", "merge")
        for name in (*sizes, "num_layers"):
            value, most = getattr(self, name), MAX_LAYERS if name == "num_layers" else MAX_SIZE
            if not 1 <= value <= most:
                raise ValueError(f"vision_config: {name} = {value}: expected 1 to {most:,}")
        channels = self.width // self.num_heads
        if self.width % self.num_heads or (self.tower == "qwen" and channels % 4):
            raise ValueError(
                f"vision_config: a width of {self.width} in {self.num_heads} heads: expected whole channels, of a "
                "multiple of 4 where they turn"
            )
        for name in ("positions", "frames", "image_size", "window"):
            if not 0 <= getattr(self, name) <= MAX_SIZE:
                raise ValueError(f"vision_config: {name} = {getattr(self, name)}: out of range")
        layers = (*self.deep, *self.whole_layers)
        if not all(0 <= layer < self.num_layers for layer in self.deep) or any(layer < 0 for layer in layers):
            raise ValueError(f"vision_config: layers {layers}: expected 0 to {self.num_layers - 1}")


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
    block: Block = field(default=PLAIN_BLOCK, metadata=INTERNAL)
    """What other families have, from their config.json alone."""
    vision: VisionConfig | None = field(default=None, metadata=INTERNAL)
    """What turns images into embeddings; None for a model that reads text alone."""
    source: str = field(default="", compare=False, repr=False, metadata=INTERNAL)
    """That config.json's text, from which such a family's is written again."""

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v alone have biases."""
        return self.block.qkv_bias or "qkv_bias" in FAMILY_FLAGS.get(self.family, ())

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys go through an RMSNorm over their channels."""
        return self.block.qk_norm or "qk_norm" in FAMILY_FLAGS.get(self.family, ())

    @property
    def input_rows(self) -> int:
        """Rows of the table of what layers read of the tokens themselves."""
        return max(self.block.input_rows, self.vocab_size)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Each layer's own flags."""
        return (self.block.layers or (LayerSpec(),) * self.num_layers)[: self.num_layers]

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
        for spec in self.block.layers:
            kv_heads, channels = kv_shape(spec, self)
            if self.num_heads % kv_heads or channels % 2:
                raise ValueError(
                    f"a layer of {kv_heads} key/value heads of {channels} channels: expected a divisor of num_heads = "
                    f"{self.num_heads}, and an even number"
                )
        if self.attention_bias and self.family not in ("llama", "qwen3"):
            raise ValueError(f"model.attention_bias is for llama and qwen3: {self.family} has its own biases")
        if self.mlp_bias and self.family != "llama":
            raise ValueError(f"model.mlp_bias is for llama only: {self.family} has its own choice of biases")
        if self.block.layers and len(self.block.layers) < self.num_layers:
            raise ValueError(f"{len(self.block.layers)} layer types: expected {self.num_layers}")


def options(config: ModelConfig) -> frozenset[str]:
    """Return the names of the fields that change what is computed: all but sizes, where they are not the default.

    A path beside the modules' own forward pass (compiled decoding, kept activations, graphs) compares them with those
    that it knows, and declines the rest. So a new flag is never ignored by a path that was written before it.
    A tower is not among them: it changes prompts with images alone, which only the modules' own forward pass reads.
    """
    block = config.block
    changed = {item.name for item in fields(config) if getattr(config, item.name) != item.default}
    changed |= {item.name for item in fields(block) if getattr(block, item.name) != item.default}
    if len(block.ropes) == 1 and is_plain(block.ropes[0], config):
        # Whatever scales the frequencies of whole heads is in the tables that all paths read.
        changed = changed - {"ropes"} | {"rope_scaling"}
    return frozenset(changed - SIZES - STORED - {"block", "source", "vision"}) | FAMILY_FLAGS.get(
        config.family, frozenset()
    )


def has_own_rules(config: ModelConfig) -> bool:
    """Say whether any layer mixes positions by another rule than plain attention.

    Then none of them uses the compiled attention, whose cache has no place for the others: sampler and trainer must
    take the same path.
    """
    block, plain = config.block, (config.num_kv_heads, config.head_dim)
    is_other = any(
        spec.window or spec.mixer != "attention" or spec.source >= 0 or kv_shape(spec, config) != plain
        for spec in config.layers
    )
    sees_ahead = config.vision is not None and config.vision.is_bidirectional
    return is_other or bool(block.attention_cap) or block.has_sinks or sees_ahead


def has_experts(config: ModelConfig) -> bool:
    """Say whether any layer's feed-forward part is a mixture of experts."""
    return any(spec.has_experts for spec in config.layers)


def kv_shape(spec: LayerSpec, config: ModelConfig) -> tuple[int, int]:
    """Return a layer's key/value heads, and the channels of each."""
    return spec.num_kv_heads or config.num_kv_heads, spec.head_dim or config.head_dim


def is_plain(rope: Rope, config: ModelConfig) -> bool:
    """Say whether a rope turns all of a head's channels, half against half."""
    return rope.dims == config.head_dim and not rope.is_interleaved
