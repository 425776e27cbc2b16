"""Predicts the peak memory of each phase of a run from shapes alone.

The formulas follow what `whet.train`, `whet.algo.logprobs` and `whet.generate` allocate: live tensors, without an
allocator's cache. tests/inspect/test_memory.py compares them with `whet.inspect.memory.meter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from whet.algo.logprobs import COLUMN_QUANTUM, ROW_QUANTUM, chunk_rows
from whet.algo.packing import split_by_budget
from whet.generate.activations import bytes_per_token, is_known
from whet.generate.cache import CacheSize, fixed_states, kv_places
from whet.generate.engine import PREFILL_TOKENS
from whet.generate.sampling import SMALL_VOCABULARY
from whet.kernels.cpu.attention import TILE
from whet.kernels.cpu.head import KEEP_BYTES
from whet.kernels.cpu.ops import CHANNELS, QUANTUM
from whet.kernels.dispatch import OPERATIONS, Operation
from whet.kernels.eager import RANKS, SLICE
from whet.model.attention import (
    KEY_BLOCK,
    KEY_QUANTUM,
    MIN_QUERY_ROWS,
    QUERY_BLOCK,
    TILE_SCORES,
    AttentionKind,
    round_up,
)
from whet.model.checkpointing import CheckpointKind
from whet.model.config import TOWER, LayerSpec, ModelConfig, has_own_rules, kv_shape
from whet.model.experts import ROW_QUANTUM as EXPERT_ROWS
from whet.model.lora.side import LoRAConfig, choose
from whet.model.lora.trained import modules_to_save
from whet.model.quant import Kind, packed_size, places
from whet.model.recurrence import CHUNK as STEPS
from whet.model.transformer import SIDE_NAMES
from whet.model.vision.store import CACHE_BYTES, PATCHES_TOGETHER
from whet.model.weights import build_model
from whet.train.optim import adam8bit
from whet.train.optim.adam8bit import BLOCK, MIN_NUMBERS
from whet.train.optim.optimizer import CHUNK
from whet.train.optim.step import OptimizerName, Precision
from whet.train.rollout.overlap import Mode
from whet.train.rollout.source import KEPT_CACHE

# The workload of a run, and the bytes of one layer in training and in sampling.


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that determines the memory of a run: shapes, precision, and batch sizes.

    Attributes:
        shape: Shape of the model.
        precision: Precision of the step.
        device: 'cpu' or 'cuda'.
        attention: Kernel of the training passes.
        has_kernels: Whether the C++ kernels are there.
        kernels: Operations that run on them: others were slower than PyTorch's on this machine.
        checkpoint: What the backward pass recomputes; None for nothing.
        offload_inputs: Whether layers' inputs are kept in host memory.
        optimizer: The optimizer.
        adam_bits: Bits per number of the moments.
        offload_state: Whether moments and master weights are in host memory.
        length: Longest sequence, prompt and completion, in tokens.
        num_trained: Trained tokens of such a sequence.
        num_sequences: Sequences of an update, on one rank.
        group_size: Sequences of one prompt.
        token_budget: Tokens of a micro-batch.
        rows: Sequences decoded together; 0 if nothing is sampled.
        num_prompts: Different prompts among the rows.
        overlap: Sampling in parallel with training: 'async' samples from a copy of the weights.
        has_reference: Whether there is a frozen copy of the model.
        has_critic: Whether there is a value model with its own optimizer.
        has_measuring: Whether tokens are scored before the first update.
        has_entropy: Whether the entropy is part of the loss.
        temperature: Temperature of the sampled distribution.
        widens: Whether bfloat16 products go through float32, on a CPU without them.
        num_requests: Different prompts of a rollout.
        kept_gib: Memory for activations that the sampler keeps for the update; 0 if it keeps none.
        quantize: Kind that the layers' matrices are rounded to as they are loaded, or none.
        kinds: Of a folder of `whet quantize` the kind of each matrix, by name without '.weight'.
        lora: Adapters that are trained in place of the weights; rank 0 for none.
        image_tokens: Tokens of a prompt's images, which its length counts, too; 0 for none.
        num_images: Images that are encoded in the run, each one time.
        trains_tower: Whether what turns images into embeddings is trained.
        num_shards: Ranks among which weights, gradients and optimizer state are divided; 1 for none.
        is_resharded: Whether a layer that was gathered for a pass is dropped after it.
        gathers_whole: Whether sampling and scoring gather all layers at once.
        num_ahead: Layers that are gathered before their turn.
        offloads_shards: Whether the shares are in host memory.
    """

    shape: ModelConfig
    precision: Precision
    device: str
    attention: AttentionKind
    has_kernels: bool = False
    kernels: frozenset[Operation] = frozenset(OPERATIONS)
    checkpoint: CheckpointKind | None = None
    offload_inputs: bool = False
    optimizer: OptimizerName = "adamw"
    adam_bits: int = 32
    offload_state: bool = False
    length: int
    num_trained: int
    num_sequences: int
    group_size: int = 1
    token_budget: int
    rows: int = 0
    num_prompts: int = 0
    overlap: Mode = "off"
    has_reference: bool = False
    has_critic: bool = False
    has_measuring: bool = False
    has_entropy: bool = False
    temperature: float = 1.0
    widens: bool = False
    num_requests: int = 0
    kept_gib: float = 0.0
    quantize: Literal["none", "nf4", "int8"] = "none"
    kinds: tuple[tuple[str, str], ...] = ()
    lora: LoRAConfig = LoRAConfig()
    image_tokens: int = 0
    num_images: int = 0
    trains_tower: bool = False
    num_shards: int = 1
    is_resharded: bool = True
    gathers_whole: bool = True
    num_ahead: int = 0
    offloads_shards: bool = False

    @property
    def micro_sequences(self) -> int:
        """Most longest-length sequences per micro-batch; one that exceeds the budget gets its own."""
        return micro_batches(self).sequences

    @property
    def parameter_bytes(self) -> int:
        """Bytes per parameter, gradient, and (in bfloat16) activation between layers."""
        return 2 if self.precision.endswith("_master") else 4

    @property
    def product_bytes(self) -> int:
        """Bytes per element that a matrix product returns."""
        return 4 if self.precision == "float32" else 2

    @property
    def score_bytes(self) -> int:
        """Bytes per element that PyTorch's products read in attention."""
        return 4 if self.widens else self.product_bytes

    @property
    def is_native(self) -> bool:
        """Whether C++ kernels compute norms, the head and products that read the residual stream."""
        is_used = self.has_kernels and "product" in self.kernels and not self.precision.startswith("float16")
        return is_used and self.shape.hidden_size % QUANTUM == 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of activations that the sampler keeps (`whet.generate.activations`), with longest sequences."""
        is_fused = self.is_native and self.has_native_gate and self.has_native_attention
        is_fused = is_fused and "decode" in self.kernels
        is_plain = (
            self.checkpoint is None and not self.precision.endswith("_autocast") and is_known(self.shape)
        )
        is_plain = is_plain and not self.lora.dora and self.lora.init == "default" and not packed_kinds(self)
        if not (is_fused and is_plain):
            return 0
        prompt = self.length - self.num_trained
        tokens = 1 + self.num_requests * (prompt + self.group_size * self.num_trained)
        total = tokens * bytes_per_token(self.shape, self.parameter_bytes)
        return total if total <= self.kept_gib * 2**30 else 0

    @property
    def has_native_gate(self) -> bool:
        """Whether a C++ kernel computes the gated unit."""
        is_plain = self.shape.family != "gpt2" and self.shape.intermediate_size % QUANTUM == 0
        return self.has_kernels and "product" in self.kernels and is_plain

    @property
    def has_native_attention(self) -> bool:
        """Whether a C++ kernel computes attention; it stores no scores and pads nothing."""
        is_used = self.has_kernels and "attention" in self.kernels
        return is_used and self.shape.head_dim in CHANNELS and not has_own_rules(self.shape)


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """An update's micro-batches of longest sequences; a prompt is stored once for its sequences.

    Attributes:
        count: Number of micro-batches; of very many, some.
        tokens: Tokens of the largest.
        sequences: Sequences of the largest.
        all_tokens: Tokens of all.
    """

    count: int
    tokens: int
    sequences: int
    all_tokens: int


SEEN_FAMILIES = 512
"""Prompts, beyond those of the largest micro-batch, after which the planner stops to deal out an update."""


@cache
def micro_batches(work: Workload) -> MicroBatches:
    """Split an update as `whet.algo.packing.pack` does."""
    prompt = work.length - work.num_trained
    most = max(1, (work.token_budget - prompt) // max(1, work.num_trained))
    num_groups, rest = divmod(work.num_sequences, work.group_size)
    # Beyond what fills several micro-batches, more groups fill more of the same.
    enough = work.token_budget // (prompt + work.num_trained) + SEEN_FAMILIES
    group = _cut(work.group_size, most, enough)
    families = group * min(num_groups, -(-enough // len(group))) + _cut(rest, most, enough)
    rows = [prompt + count * work.num_trained for count in families]
    bins = split_by_budget(rows, work.token_budget)
    num_families = num_groups * -(-work.group_size // most) + -(-rest // most)
    return MicroBatches(
        count=len(bins),
        tokens=max(sum(rows[place] for place in members) for members in bins),
        sequences=max(sum(families[place] for place in members) for members in bins),
        all_tokens=num_families * prompt + work.num_sequences * work.num_trained,
    )


def _cut(size: int, most: int, at_most: int) -> list[int]:
    """Cut a group into parts of `most` and the rest; of very many parts only the first."""
    return [min(most, size - start) for start in range(0, size, most)[:at_most]]


PLAIN = LayerSpec()


def saved_bytes(work: Workload, tokens: int, sequences: int, spec: LayerSpec = PLAIN) -> int:
    """Return the bytes that autograd saves for one layer.

    Args:
        work: The shapes.
        tokens: Tokens of a micro-batch.
        sequences: Its sequences, equally long.
        spec: What is the layer's own.
    """
    shape, block = work.shape, work.shape.block
    per_token = shape.hidden_size * norm_bytes(work, 1 if shape.family == "gpt2" else 3) + 4
    per_token += _after_bytes(work, block.norms[1])
    if block.input_width:  # the gate, its activation, their product, and the norm after it
        per_token += work.product_bytes * 3 * block.input_width
        per_token += _after_bytes(work, "norm")
    per_token += _adapter_row(work)
    return tokens * per_token + _mixer_bytes(work, tokens, sequences, spec) + feed_bytes(work, tokens, spec)


def _adapter_row(work: Workload) -> int:
    """Return the bytes per token that the adapters of a layer save: what is between A and B, of 16-bit inputs what
    PyTorch's products read, too."""
    if not work.lora.rank:
        return 0
    numbers = sum(
        round_up(size[0], RANKS) + (0 if work.is_native or work.parameter_bytes == 4 else size[1])
        for name, size in trained_shapes(work)
        if name.endswith("lora_A")
    )
    return 4 * numbers // work.shape.num_layers


def _after_bytes(work: Workload, name: str) -> int:
    """Return the bytes per token that a norm behind a product saves; '' for no norm."""
    return work.product_bytes * work.shape.hidden_size + 4 if name else 0


def _mixer_bytes(work: Workload, tokens: int, sequences: int, spec: LayerSpec) -> int:
    """Return the bytes that autograd saves between the norms around what mixes positions."""
    shape, block, a = work.shape, work.shape.block, work.product_bytes
    if spec.mixer == "convolution":  # products, windows, what is gated, and gated again
        return tokens * a * (5 + block.kernel) * shape.hidden_size
    if spec.mixer == "delta" and block.delta is not None:
        return _delta_bytes(work, tokens, sequences)
    kv_heads, channels = kv_shape(spec, shape)
    heads, keys = shape.num_heads * channels, kv_heads * channels
    own = keys if spec.source < 0 else 0  # a layer that reads another's keys and values saves none
    per_token = a * heads  # input of the output projection
    if shape.qk_norm or block.whole_qk_norm:
        per_token += (heads + own) * a + 4 * (shape.num_heads + kv_heads)
    if block.has_value_norm:
        per_token += own * a + 4 * kv_heads
    if block.has_sinks:  # what their share multiplies
        per_token += a * heads
    if block.is_gated:  # the gate, and what it multiplies
        per_token += 2 * a * heads
    if work.has_native_attention:
        return tokens * (per_token + a * (heads + 2 * keys) + 4 * shape.num_heads)
    if is_exact(work, spec):
        attention = tokens * a * (heads + 2 * own)
        scores = _Rows.of(work, tokens, sequences, window=spec.window).scores
        attention += shape.num_heads * scores * work.score_bytes
    else:
        padded = sequences * padded_length(work.length)
        attention = padded * (2 * a * heads + 2 * a * keys + 4 * shape.num_heads)
    return tokens * per_token + attention


def is_exact(work: Workload, spec: LayerSpec) -> bool:
    """Say whether a layer's scores are kept: PyTorch's fused kernel takes plain attention alone."""
    block = work.shape.block
    return work.attention == "exact" or bool(spec.window or block.attention_cap or block.has_sinks)


def _delta_bytes(work: Workload, tokens: int, sequences: int) -> int:
    """Return the bytes that autograd saves for a gated delta rule: a state for each chunk of steps, and its inputs."""
    s, a = work.shape.block.delta, work.product_bytes
    assert s is not None
    values = s.value_heads * s.value_dim
    mixed = 2 * s.key_heads * s.key_dim + values
    per_token = (a * s.kernel + 8) * mixed  # windows, their sum and its activation
    per_token += (16 + a) * values  # outputs, norm, gate
    per_token += 16 * s.value_heads  # decay and share of the correction
    steps = sequences * work.length * 4 * s.value_heads * (2 * s.key_dim + s.value_dim + 2)
    states = sequences * -(-work.length // STEPS) * 4 * values * s.key_dim
    return tokens * per_token + steps + states


def feed_bytes(work: Workload, tokens: int, spec: LayerSpec = PLAIN) -> int:
    """Return the bytes that autograd saves for a layer's feed-forward part, including its norms and input."""
    shape, block, is_gpt2 = work.shape, work.shape.block, work.shape.family == "gpt2"
    per_token = shape.hidden_size * norm_bytes(work, 1 if is_gpt2 else 2) + 4
    per_token += _after_bytes(work, block.norms[3])
    e = block.experts
    if not spec.has_experts or e is None:
        width = spec.intermediate_size or shape.intermediate_size
        return tokens * (per_token + work.product_bytes * _kept_channels(work, width))
    a, width = work.product_bytes, shape.hidden_size
    per_token += a * e.top_k * width + 8 * e.count + 40 * e.top_k  # what experts return, and the router's
    per_token += a * _kept_channels(work, e.shared_width) + (a * width if e.has_shared_gate else 0)
    widths = 8 if e.is_clamped else 3  # gate and up together and clamped, up + 1, its products, the sigmoid
    return tokens * per_token + _expert_rows(work, tokens) * a * (width + widths * e.width)


def _expert_rows(work: Workload, tokens: int) -> int:
    """Return the rows of all experts, each padded to their quantum."""
    e = work.shape.block.experts
    assert e is not None
    return tokens * e.top_k + min(e.count, tokens * e.top_k) * EXPERT_ROWS // 2


def _kept_channels(work: Workload, width: int) -> int:
    """Return the channels of the tensors that a feed-forward part of some width saves: gate (with GELU what goes in and
    what comes out), up and their product."""
    if work.shape.family == "gpt2":
        return 2 * width
    return (4 if work.shape.block.activation == "gelu_tanh" else 3) * width


def norm_bytes(work: Workload, num_readers: int) -> int:
    """Return the bytes per channel that a norm and its readers save.

    Under autocast each reader has its own copy.

    Args:
        work: Family and precision.
        num_readers: Products that read it.
    """
    residual = work.parameter_bytes
    copies = 2 * num_readers if work.precision.endswith("_autocast") else residual * (num_readers > 0)
    return residual + copies


def padded_length(length: int) -> int:
    """Return the padded length of a sequence in attention."""
    return round_up(length, KEY_QUANTUM if length <= KEY_BLOCK else KEY_BLOCK // 2)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows per head in exact attention without the C++ kernels, including padding (`whet.model.attention`).

    Attributes:
        queries: Queries of all sequences; a shared prompt's count once.
        keys: Keys; each sequence has its own copy of its prompt's.
        scores: Computed pairs: blocks of queries read the keys up to their own end.
        tile: Scores of all heads in the largest call.
    """

    queries: int
    keys: int
    scores: int
    tile: int

    @classmethod
    def of(cls, work: Workload, tokens: int, sequences: int, *, window: int = 0) -> _Rows:
        """Count those of a micro-batch, as `whet.algo.packing` lays it out.

        Args:
            work: The lengths.
            tokens: Its tokens.
            sequences: Its sequences.
            window: Positions that a query sees; 0 for all.
        """
        prompt = work.length - work.num_trained
        families = (tokens - sequences * work.num_trained) // prompt
        if families >= sequences:
            return cls.add_up(work, [(sequences, 0, work.length)], window=window)
        kinds = [(families, 0, prompt), (sequences, prompt, work.num_trained)]
        return cls.add_up(work, kinds, window=window)

    @classmethod
    def add_up(cls, work: Workload, kinds: Sequence[tuple[int, int, int]], *, window: int = 0) -> _Rows:
        """Add up rows of several kinds: how many, position of the first query, queries."""
        queries = keys = scores = tile = 0
        for count, first, length in kinds:
            width = padded_length(length)
            blocks = range(first, first + width, min(width, QUERY_BLOCK))
            ends = [min(begin + QUERY_BLOCK, first + width) for begin in blocks]
            each = [
                (end - begin)
                * (
                    round_up(end, KEY_QUANTUM)
                    - max(0, begin - window + 1) // KEY_BLOCK * KEY_BLOCK * bool(window)
                )
                for begin, end in zip(blocks, ends, strict=True)
            ]
            queries += count * width
            keys += count * round_up(first + width, KEY_QUANTUM)
            scores += count * sum(each)
            one = work.shape.num_heads * max(each)
            tile = max(tile, min(count * one, max(one, TILE_SCORES)))
        return cls(queries, keys, scores, tile)


def passing_bytes(work: Workload, tokens: int, sequences: int = 0, length: int = 1) -> int:
    """Return the peak bytes of a forward pass without autograd: the widest part of the widest layer.

    Args:
        work: The shapes.
        tokens: Tokens of all sequences.
        sequences: Sequences that they belong to; 0 in decoding, where nothing is padded.
        length: Tokens of each of them.
    """
    shape = work.shape
    norm = tokens * (2 * work.parameter_bytes if work.is_native else 4 * 4) * shape.hidden_size
    parts = (
        part
        for spec in set(shape.layers)
        for part in (
            _passing_feed(work, tokens, spec),
            _passing_mixer(work, tokens, sequences, length, spec),
        )
    )
    return max(norm, *parts) + tokens * table_bytes(work)


def _passing_feed(work: Workload, tokens: int, spec: LayerSpec) -> int:
    shape, a, e = work.shape, work.product_bytes, work.shape.block.experts
    residual = 2 * work.parameter_bytes * shape.hidden_size
    if not spec.has_experts or e is None:
        return tokens * (residual + 3 * a * (spec.intermediate_size or shape.intermediate_size))
    # What experts read and return; the widest of them is at most all rows.
    rows = _expert_rows(work, tokens)
    return tokens * residual + rows * a * 2 * shape.hidden_size + tokens * a * 3 * e.width


def _passing_mixer(work: Workload, tokens: int, sequences: int, length: int, spec: LayerSpec) -> int:
    shape, a, s = work.shape, work.product_bytes, work.shape.block.delta
    residual = 2 * work.parameter_bytes * shape.hidden_size
    if spec.mixer == "convolution":  # products, what is gated, and its windows twice: as parts and together
        return tokens * (residual + a * (4 + 2 * shape.block.kernel) * shape.hidden_size)
    if spec.mixer == "delta" and s is not None:
        mixed = (2 * s.key_heads * s.key_dim + s.value_heads * s.value_dim) * a
        states = 4 * max(1, sequences) * s.value_heads * s.key_dim * s.value_dim * 4
        return tokens * (residual + (1 + 2 * s.kernel) * mixed) + states
    kv_heads, channels = kv_shape(spec, shape)
    heads, keys = shape.num_heads * channels, kv_heads * channels
    attention = tokens * (residual + a * (heads + 2 * keys))
    if sequences and not work.has_native_attention:
        rows = _Rows.add_up(work, [(sequences, 0, length)])
        attention += work.score_bytes * (2 * rows.queries * heads + 2 * rows.keys * keys)
        attention += 4 * rows.tile if is_exact(work, spec) else 0
    return attention


def table_bytes(work: Workload) -> int:
    """Return the bytes of a token's rotary angles."""
    ropes = work.shape.block.ropes
    channels = sum(rope.dims for rope in ropes) if ropes else work.shape.head_dim
    return 0 if work.shape.family == "gpt2" else 2 * 4 * channels


def backward_bytes(work: Workload, tokens: int, sequences: int, spec: LayerSpec = PLAIN) -> int:
    """Return the bytes that the backward pass of a layer needs in addition to the saved ones.

    Args:
        work: The shapes.
        tokens: Tokens of a micro-batch.
        sequences: Its sequences, equally long.
        spec: What is the layer's own.
    """
    shape, a, s = work.shape, work.product_bytes, work.shape.block.delta
    kv_heads, channels = kv_shape(spec, shape)
    heads, keys = shape.num_heads * channels, kv_heads * channels
    residual = work.parameter_bytes * shape.hidden_size
    feed = a * shape.intermediate_size
    # The gradients of gate and up next to that of their product, which itself is freed.
    mlp = tokens * (residual + 2 * feed)
    if not work.has_native_gate and shape.family != "gpt2":
        mlp += 2 * a * min(tokens * shape.intermediate_size, SLICE)
    if work.widens and a == 2:  # the last product's gradients in float32, with their inputs
        mlp = max(mlp, 6 * tokens * (shape.hidden_size + shape.intermediate_size))
    attention = tokens * (residual + a * (heads + 2 * keys) + 8 * keys)
    if not work.has_native_attention:
        rows = _Rows.of(work, tokens, sequences)
        attention = tokens * residual + work.score_bytes * (3 * rows.queries * heads + 4 * rows.keys * keys)
        attention += tokens * a * (2 * heads + 2 * keys)
        if is_exact(work, spec):
            attention += rows.tile * (4 if work.score_bytes == 4 else 6)
    if work.lora.rank:  # an adapter's backward pass: the gradient in float32, and its own part of the input's
        mlp += tokens * (4 * shape.intermediate_size * (a == 2) + a * shape.hidden_size)
    if spec.mixer == "convolution":
        attention = tokens * (residual + a * (3 + 2 * shape.block.kernel) * shape.hidden_size)
    if spec.mixer == "delta" and s is not None:  # the states of a chunk's steps, before and after decay
        attention = tokens * residual + sequences * 4 * s.value_heads * s.key_dim * s.value_dim * 2 * STEPS
    freed = feed_bytes(work, tokens, spec)  # freed by the feed-forward part, which comes first
    return max(mlp, attention - freed)


GIB = 2**30
COLUMN_BYTES = 3 * 8 + 7 * 4
PANEL = 32
COPIES = "dense copies"
"""Part of a rollout that is made as memory allows."""
CHUNK_COPIES = 11
"""Float32 copies of a chunk of 8-bit moments during its update and requantisation."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes by purpose, all live at the phase's peak."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self.parts.values())


@cache
def parameter_shapes(shape: ModelConfig) -> tuple[tuple[str, torch.Size], ...]:
    """Return the name and the shape of every parameter; a tied head counts once."""
    with torch.device("meta"):
        return tuple((name, parameter.shape) for name, parameter in build_model(shape).named_parameters())


def parameter_sizes(shape: ModelConfig) -> tuple[int, ...]:
    """Return the number of elements of every parameter; a tied head counts once."""
    return tuple(size.numel() for _, size in parameter_shapes(shape))


def _without_tower(shape: ModelConfig) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, size) for name, size in parameter_shapes(shape) if not name.startswith(TOWER))


@cache
def trained_shapes(work: Workload) -> tuple[tuple[str, torch.Size], ...]:
    """Return the name and the shape of every tensor that is trained: all parameters (those of a tower where it is
    trained, too), or adapters in their place."""
    if not work.lora.rank:
        return parameter_shapes(work.shape) if work.trains_tower else _without_tower(work.shape)
    with torch.device("meta"):
        model = build_model(work.shape)
    found: list[tuple[str, torch.Size]] = []
    targets = choose(model, work.lora)
    for target in targets:
        (rows, columns), width = target.shape, work.lora.rank * target.count
        name = f"{target.name}.side"
        found += [
            (f"{name}.lora_A", torch.Size((width, columns))),
            (f"{name}.lora_B", torch.Size((rows, width))),
        ]
        if work.lora.dora:
            found.append((f"{name}.magnitude", torch.Size((rows,))))
    for name, module in modules_to_save(model, work.lora, targets):
        found += [(f"{name}.{part}", p.shape) for part, p in module.named_parameters()]
    return tuple(found)


def _trained_bytes(work: Workload, name: str) -> int:
    """Return the bytes per number of a trained tensor: those of adapters are float32 whatever the base is."""
    return 4 if name.endswith(SIDE_NAMES) else work.parameter_bytes


def gradient_bytes(work: Workload) -> list[int]:
    """Return the bytes of the gradient of every tensor that is trained."""
    return [size.numel() * _trained_bytes(work, name) for name, size in trained_shapes(work)]


def sharded_parts(work: Workload) -> tuple[int, list[int]]:
    """Return the bytes of what shards divide: in no layer, and in each layer; matrices in few bits are whole on every
    rank."""
    packed, layers, outer = packed_kinds(work), [0] * work.shape.num_layers, 0
    for name, size in parameter_shapes(work.shape):
        if name in packed:
            continue
        number = (
            None if name.startswith(TOWER) else next((int(w) for w in name.split(".") if w.isdigit()), None)
        )
        if number is None:
            outer += size.numel() * work.parameter_bytes
        else:
            layers[number] += size.numel() * work.parameter_bytes
    return outer, layers


def _gathered(work: Workload, *, is_training: bool = False, models: int = 1) -> dict[str, int]:
    """Return the bytes of weights that are gathered from the ranks at a phase's peak, beside the shares.

    What is in no layer stays gathered. A layer is received in one piece, and copied to where it is read.

    Args:
        work: The shapes, and how they are divided.
        is_training: Whether a backward pass follows, for which a layer may be kept.
        models: Models that are gathered together.
    """
    if work.num_shards == 1:
        return {}
    outer, layers = sharded_parts(work)
    one = max(layers)
    is_whole = not work.is_resharded if is_training else work.gathers_whole
    inner = sum(layers) + one * is_training if is_whole else (2 + work.num_ahead) * one
    return {"gathered weights": models * (outer + min(inner, sum(layers) + one))}


def _share(work: Workload, num_bytes: int) -> int:
    """Return the bytes of what is divided that a rank's device holds."""
    return 0 if work.offloads_shards else -(-num_bytes // work.num_shards)


def adapter_bytes(work: Workload) -> int:
    """Return the bytes of the adapters' own tensors; PiSSA keeps where they started."""
    own = [(name, 4 * size.numel()) for name, size in trained_shapes(work) if name.endswith(SIDE_NAMES)]
    start = sum(size for name, size in own if "magnitude" not in name) if work.lora.init == "pissa" else 0
    return start + sum(size for _, size in own)


def sharded_budget(num_parameters: int, num_devices: int) -> dict[str, float]:
    """Return the textbook budget of a device in bytes, model and optimizer sharded evenly.

    Args:
        num_parameters: Trained parameters.
        num_devices: Devices that share them.

    Source: mixed-precision AdamW, arXiv 1910.02054 section 3.1 (bfloat16 weights and gradients, float32 Adam). The
        float32 master weights, without which small updates are lost to rounding, are listed separately.
    """
    share = num_parameters / num_devices
    return {
        "weights, bfloat16": 2 * share,
        "gradients, bfloat16": 2 * share,
        "Adam's two moments, float32": 8 * share,
        "master weights, float32": 4 * share,
    }


NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4: 4 bits, a byte for each 64 of them, and a float32 scale for each 256 of those."""


def adapted_bytes(work: Workload, rank: int, *, is_quantised: bool) -> int:
    """Return the bytes of a step that trains LoRA beside a frozen bfloat16 base, by formula, with recomputed layers.

    Args:
        work: Shapes and sizes.
        rank: Dimensions of the adapters of all matrices in the layers; weights, gradients and moments are float32.
        is_quantised: Whether those matrices are stored in NF4; one layer is then in bfloat16 at a time.

    Source: 2106.09685 (LoRA), 2305.14314 section 3 (NF4 with double quantisation).
    """
    work = replace(work, checkpoint="layer", precision="bfloat16_master")
    matrices = [
        s for n, s in _without_tower(work.shape) if len(s) == 2 and any(w.isdigit() for w in n.split("."))
    ]
    frozen = sum(size.numel() for size in matrices)
    base = 2 * (sum(parameter_sizes(work.shape)) - frozen)
    base += int(NF4_BYTES * frozen) + 2 * frozen // work.shape.num_layers if is_quantised else 2 * frozen
    adapters = 16 * rank * sum(sum(size) for size in matrices)
    micro, (stored, again) = micro_batches(work), _stored(work)
    inside = again + backward_bytes(work, micro.tokens, micro.sequences, work.shape.layers[-1])
    hidden = 2 * 2 * micro.tokens * work.shape.hidden_size
    return base + adapters + stored + max(inside, 2 * 4 * _chunk_elements(work) + hidden) + _batch_bytes(work)


def phases(work: Workload) -> list[Phase]:
    """Predict the peak of each phase of a step, in their order."""
    sizes = [size.numel() for _, size in _read_shapes(work)]
    kept = _kept(work)
    packed = {"packed weights": packed_bytes(work)} if work.is_native else {}
    found = []
    if work.kept_bytes:
        kept = kept | {"kept activations": work.kept_bytes}
    if work.rows:
        cache = {"kv cache": cache_bytes(work)}
        found.append(Phase("rollout", kept | packed | cache | _gathered(work) | _rollout(work)))
        if work.overlap != "off" or cache_bytes(work) <= KEPT_CACHE:
            kept = kept | cache  # the engine keeps its cache during training
    if work.has_measuring:
        models = 1 + (work.has_reference + work.has_critic) * (not work.lora.rank)
        found.append(
            Phase("scoring", kept | packed | _gathered(work, models=models) | _scoring(work, sum(sizes)))
        )
    beside = {} if work.overlap == "off" else {"rollout beside": _rollout(work)["activations"]}
    gathered = _gathered(work, is_training=True)
    found.append(Phase("backward", kept | gathered | _backward(work, sizes) | beside))
    if work.is_native:
        packed = {"packed weights": packed_bytes(work, in_training=True)}
    found.append(Phase("optimizer step", kept | packed | _update(work)))
    return found


def _read_shapes(work: Workload) -> tuple[tuple[str, torch.Size], ...]:
    """Return what each training pass reads: a tower that is not trained is computed once for each image, before."""
    return parameter_shapes(work.shape) if work.trains_tower else _without_tower(work.shape)


def _feature_bytes(work: Workload) -> int:
    """Return the bytes of what the decoder reads of a prompt's images."""
    vision = work.shape.vision
    if vision is None:
        return 0
    return work.image_tokens * vision.out_width * (1 + len(vision.deep)) * work.product_bytes


def _num_patches(work: Workload) -> int:
    """Return the patches of a prompt's images."""
    return 0 if work.shape.vision is None else work.image_tokens * work.shape.vision.merge**2


def image_bytes(work: Workload) -> int:
    """Return the bytes that are kept of all images: features, and on a CPU the patches in the same memory."""
    vision = work.shape.vision
    if vision is None or not work.image_tokens:
        return 0
    patch = 4 * 3 * max(1, vision.frames) * vision.patch_size**2
    is_kept = bool(work.rows) or not work.trains_tower  # of a pass that trains the tower none are
    one = is_kept * _feature_bytes(work) + (_num_patches(work) * patch if work.device == "cpu" else 0)
    return max(one, min(CACHE_BYTES, work.num_images * one))


def encoding_bytes(work: Workload, prompts: int) -> int:
    """Return the peak bytes of encoding prompts' images without autograd, one layer after the other.

    Args:
        work: The step.
        prompts: Different prompts whose images are wanted at once: small ones are computed together by the kernels.
    """
    vision, one = work.shape.vision, _num_patches(work)
    if vision is None or not one:
        return 0
    together = max(1, min(prompts, -(-PATCHES_TOGETHER // one))) if work.is_native else 1
    a, width, inner = work.product_bytes, vision.width, vision.intermediate_size
    attention = (
        a * 9 * width
    )  # residual stream, norm, queries, keys and values, the first two turned, and the result
    return together * one * max(attention, a * (3 * width + (3 if vision.is_rms else 2) * inner))


def tower_bytes(work: Workload) -> int:
    """Return the bytes that autograd saves in a tower that is trained, for a prompt's images."""
    vision = work.shape.vision
    if vision is None or not work.trains_tower:
        return 0
    a, width = work.product_bytes, vision.width
    # Two inputs of norms and what they return; queries, keys and values as they come, turned, and attended.
    layer = 2 * work.parameter_bytes * width + a * (
        9 * width + (4 if vision.is_rms else 2) * vision.intermediate_size
    )
    mergers = 2 * a * width * (1 + len(vision.deep)) * (2 if vision.projector == "merge" else 1)
    return _num_patches(work) * (vision.num_layers * layer + mergers)


def _families(work: Workload) -> int:
    """Return the different prompts of a micro-batch."""
    micro, prompt = micro_batches(work), work.length - work.num_trained
    return max(1, (micro.tokens - micro.sequences * work.num_trained) // max(1, prompt))


def peak(work: Workload) -> int:
    """Return the bytes of the largest phase, without dense copies of what is in few bits: those are made of as much as
    half of the free memory holds."""
    return max(phase.total - phase.parts.get(COPIES, 0) for phase in phases(work))


def fit(work: Workload, num_bytes: int) -> Workload | None:
    """Return the workload with as many rows and then as long micro-batches as fit in memory; None if none do.

    Neither changes the mathematics. Rows do not exceed the request, tokens not those of the update.
    """
    least = replace(work, rows=min(work.rows, 1), token_budget=work.length)
    if peak(least) > num_bytes:
        return None
    rows = _largest(work.rows, lambda n: peak(replace(least, rows=n)) <= num_bytes) if work.rows else 0
    least = replace(least, rows=rows)
    count = _largest(
        work.num_sequences, lambda n: peak(replace(least, token_budget=n * work.length)) <= num_bytes
    )
    return replace(least, token_budget=count * work.length)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `most` that fits, by doubling and bisection; 1 must fit."""
    low, high = 1, most
    while 2 * low < most and fits(2 * low):
        low *= 2
    high = min(most, 2 * low)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def cache_bytes(work: Workload) -> int:
    """Return the bytes of keys and values of all rows."""
    shape, prompt = work.shape, work.length - work.num_trained
    size = CacheSize(
        rows=work.rows,
        prompt=prompt,
        completion=work.num_trained,
        context=shape.max_positions,
        prompts=min(work.rows, work.num_requests),
    )
    numbers = sum(len(layers) * heads * channels for (heads, channels), layers in kv_places(shape).items())
    per_position = 2 * numbers * work.product_bytes
    if not work.has_native_attention:
        return size.rows * (size.whole * per_position + row_state_bytes(shape, work.product_bytes))
    return (size.rows * size.own + size.prompts * round_up(prompt, TILE)) * per_position


def row_state_bytes(shape: ModelConfig, product_bytes: int) -> int:
    """Return the bytes that a row keeps in layers without attention, whatever its length."""
    return sum(
        math.prod(inputs) * product_bytes + (4 * math.prod(state) if state else 0)
        for inputs, state in fixed_states(shape).values()
    )


def _kept(work: Workload) -> dict[str, int]:
    """Return the bytes that live from the first step to the last."""
    shape, model = work.shape, _held_bytes(work)
    state = 0 if work.offload_state else state_bytes(work)
    state = state if work.lora.rank else _share(work, state)  # adapters are whole on every rank
    tables = table_bytes(work) * shape.max_positions
    own = adapter_bytes(work)
    parts = {"weights": model + tables} | ({"adapters": own} if own else {}) | {"optimizer": state}
    if seen := image_bytes(work):
        parts["images"] = seen
    if work.overlap != "off":
        parts["sampler"] = packed_bytes(work) + (model + tables if work.overlap == "async" else 0)
    if work.lora.rank:  # reference and critic share the base; a reference at the start is the base
        if work.has_critic:
            parts["critic"] = (
                own + state + (0 if shape.tie_embeddings else packed_bytes(work, has_head=False))
            )
        return parts
    if work.has_reference:
        parts["reference"] = model + tables + packed_bytes(work)
    if work.has_critic:
        parts["critic"] = model + tables + state + packed_bytes(work, has_head=False)
    return parts


@cache
def packed_kinds(work: Workload) -> Mapping[str, tuple[Kind, torch.Size, bool]]:
    """Return the kind, the shape, and whether it is of experts, of each parameter that is stored in few bits."""
    if work.quantize == "none" and not work.kinds:
        return {}
    with torch.device("meta"):
        own = places(build_model(work.shape))
    given = dict(work.kinds)
    found: dict[str, tuple[Kind, torch.Size, bool]] = {}
    for name, place in own.items():
        kind = given.get(name.removesuffix(".weight"), "16-bit") if given else work.quantize
        if kind in ("nf4", "int8"):
            found[name] = kind, torch.Size(place.shape), place.is_experts
    return found


def _held_bytes(work: Workload) -> int:
    """Return the bytes of the model's parameters that a rank holds."""
    outer, layers = sharded_parts(work)
    divided = outer + sum(layers)
    return weight_bytes(work) - divided + _share(work, divided)


def weight_bytes(work: Workload) -> int:
    """Return the bytes of the model's parameters, or of what is stored in their place."""
    packed = packed_kinds(work)
    shapes = parameter_shapes(work.shape)
    total = sum(size.numel() for name, size in shapes if name not in packed) * work.parameter_bytes
    for kind, size, is_experts in packed.values():
        one = size[1:] if is_experts else size
        total += packed_size(kind, one) * (size[0] if is_experts else 1)
    return total


def dense_bytes(work: Workload) -> int:
    """Return the bytes of dense copies of what is stored in few bits, which a rollout keeps as memory allows."""
    return sum(size.numel() for _, size, _ in packed_kinds(work).values()) * work.product_bytes


def state_bytes(work: Workload) -> int:
    """Return the bytes of the optimizer's state, and of master weights beyond the parameters."""
    each = {"bfloat16_master": 2, "float16_master": 4}.get(work.precision, 0)
    total = 0
    for name, size in trained_shapes(work):
        count = size.numel()
        total += 0 if name.endswith(SIDE_NAMES) else each * count  # adapters are their own master weights
        is_hidden = len(size) == 2 and any(word.isdigit() for word in name.split("."))
        if work.optimizer == "muon" and is_hidden:
            total += 4 * count
            continue
        total += (
            2 * (count + 4 * -(-count // BLOCK))
            if work.adam_bits == 8 and count >= MIN_NUMBERS
            else 8 * count
        )
    return total


def packed_bytes(work: Workload, *, has_head: bool = True, in_training: bool = False) -> int:
    """Return the bytes of the packed weights for the C++ kernels; 0 without them.

    Args:
        work: Shapes and precision.
        has_head: Whether the head is used, too.
        in_training: Exclude packed weights of recomputed parts, which are freed after each use.
    """
    if not work.is_native:
        return 0
    shape = work.shape
    total = sum(
        size
        for layer, sizes in enumerate(_packed_layers(work, in_training=in_training))
        for part, size in sizes.items()
        if not (in_training and _is_recomputed(work, layer, part))
    )
    head = round_up(shape.vocab_size, PANEL) * shape.hidden_size * work.parameter_bytes
    own = 0 if in_training and work.checkpoint == "layer" else _adapter_panels(work)
    return total + own + _tower_panels(work) + (head if has_head else 0)


def _adapter_panels(work: Workload) -> int:
    """Return the bytes of the packed adapters, float32."""
    if not work.lora.rank:
        return 0
    sizes = (size for name, size in trained_shapes(work) if name.endswith(SIDE_NAMES) and len(size) == 2)
    count = sum(round_up(rows, PANEL) * round_up(width, QUANTUM) for rows, width in sizes)
    return 4 * count * (2 if work.lora.init == "pissa" else 1)


def _packed_layers(work: Workload, *, in_training: bool = False) -> list[dict[str, int]]:
    """Return for each layer the bytes of packed weights of its feed-forward part, and of the rest."""
    shape = work.shape
    layers = [{"mlp": 0, "attention": 0} for _ in range(shape.num_layers)]
    few = packed_kinds(work) if in_training else {}  # dequantised for each use, and dropped
    for name, size in parameter_shapes(shape):
        if name in few or name.startswith(TOWER):
            continue
        is_table = "embed" in name or "wte" in name or "wpe" in name or "lm_head" in name
        if len(size) == 2 and not is_table:
            # What stands outside the layers (Gemma 4's projection of inputs) counts with the first one.
            layer = next((int(word) for word in name.split(".") if word.isdigit()), 0)
            held = _panels(work, *(reversed(size) if shape.family == "gpt2" else size))
            layers[layer]["mlp" if ".mlp." in name else "attention"] += held
    return layers


def _tower_panels(work: Workload) -> int:
    """Return the bytes of a tower's packed weights; none of its layers is recomputed."""
    sizes = (
        size for name, size in parameter_shapes(work.shape) if name.startswith(TOWER) and "embed" not in name
    )
    return sum(_panels(work, *size) for size in sizes if len(size) == 2)


def _panels(work: Workload, rows: int, width: int) -> int:
    return 0 if width % QUANTUM else round_up(rows, PANEL) * width * work.product_bytes


def _is_recomputed(work: Workload, layer: int, part: str) -> bool:
    if work.checkpoint == "mlp":
        return part == "mlp"
    return work.checkpoint == "layer" or (work.checkpoint == "alternate" and layer % 2 == 1)


def _rollout(work: Workload) -> dict[str, int]:
    shape = work.shape
    vocabulary = round_up(shape.vocab_size, COLUMN_QUANTUM)
    draw = 30 if vocabulary <= SMALL_VOCABULARY else 12
    copies = draw + (4 if work.temperature != 1 else 0)
    logits = (
        work.rows * vocabulary * 4
        if work.is_native
        else round_up(work.rows, ROW_QUANTUM) * vocabulary * copies
    )
    states = work.rows * (6 * 8 + 2 + 12 * (work.num_trained + 1))
    prompt = work.length - work.num_trained
    tokens = min(work.num_prompts * prompt, max(prompt, PREFILL_TOKENS))
    heads = shape.num_kv_heads * max(shape.num_heads // shape.num_kv_heads, MIN_QUERY_ROWS)
    is_fused = work.attention == "fast" and work.device == "cuda"
    scores = 0 if is_fused else 3 * 4 * work.rows * heads * round_up(work.length, KEY_QUANTUM)
    if work.has_native_attention:
        scores = 0
    decode = logits + max(0, scores + passing_bytes(work, work.rows) - logits)
    prefill = passing_bytes(work, tokens, -(-tokens // prompt), prompt)
    prefill += -(-tokens // prompt) * _feature_bytes(work)  # gathered from those that are kept
    if work.is_native:  # the prompts' logits, repeated for each row
        prefill = max(prefill, logits + work.num_prompts * vocabulary * 4)
    parts = {"activations": states + max(decode, prefill, encoding_bytes(work, -(-tokens // prompt)))}
    if copies := dense_bytes(work):
        parts[COPIES] = copies
    if work.precision.endswith("_master") and work.device == "cpu" and not work.is_native:
        parts["float32 head"] = 4 * shape.vocab_size * shape.hidden_size
    return parts


def _scoring(work: Workload, count: int) -> dict[str, int]:
    micro = micro_batches(work)
    chunk = (1 if work.is_native else 3) * 4 * _chunk_elements(work)
    passing = passing_bytes(work, micro.tokens, micro.sequences, work.length)
    return {
        "activations": _batch_bytes(work) + passing,
        "head": max(0, chunk - passing),
    } | _copies(work, count)


def _backward(work: Workload, sizes: Sequence[int]) -> dict[str, int]:
    shape, micro, count = work.shape, micro_batches(work), sum(sizes)
    tokens, trained = micro.tokens, micro.sequences * work.num_trained
    residual = work.parameter_bytes * shape.hidden_size
    stored, again = _stored(work)
    stored += _families(work) * tower_bytes(work)
    frame = tokens * table_bytes(work) + _batch_bytes(work)
    ends = tokens * norm_bytes(work, 0) * shape.hidden_size + trained * residual
    table, gradients = shape.vocab_size * shape.hidden_size * work.parameter_bytes, gradient_bytes(work)
    if work.lora.rank:
        table = 0  # frozen
    earlier = sum(gradients) if micro.count > 1 else 0
    whole = sum(gradients)
    exchanged = 0
    if work.num_shards > 1 and not work.lora.rank:
        # Those of one layer as they were computed, and as they are sent.
        outer, layers = sharded_parts(work)
        exchanged = 2 * max(max(layers), outer)
        earlier, whole = _share(work, earlier), _share(work, whole) + exchanged
        if not work.is_resharded and micro.count > 1:  # exchanged once, behind the last of a step's passes
            earlier = outer + sum(layers)
    # The peak is in the head (all activations, logits), in the last layer, or at the end (all gradients).
    inside = again + backward_bytes(work, tokens, micro.sequences, shape.layers[-1])
    packed = packed_bytes(work, in_training=True)
    one = max(
        sum(size for part, size in sizes.items() if _is_recomputed(work, layer, part))
        for layer, sizes in enumerate(_packed_layers(work, in_training=True))
    )
    moments = [
        {
            "activations": stored + frame + ends,
            "head": _head(work, trained),
            "gradients": earlier,
            "packed weights": packed,
        },
        {
            "activations": stored + frame + inside,
            "gradients": earlier + table + exchanged,
            "packed weights": packed + (one if work.is_native else 0),
        },
        {
            "activations": _batch_bytes(work) + residual * tokens,
            "gradients": whole + table,
            "packed weights": packed,
        },
    ]
    if work.rows or work.image_tokens:  # before the first layer: the rollout's packed weights still exist
        moments.append(
            {
                "activations": frame + encoding_bytes(work, _families(work)),
                "packed weights": packed_bytes(work),
            }
        )
    if not work.is_native:
        for parts in moments:
            del parts["packed weights"]
    fullest = max(moments, key=lambda parts: sum(parts.values()))
    return fullest | _copies(work, count)


def _stored(work: Workload) -> tuple[int, int]:
    """Return the bytes that all layers save for the backward pass, and those recomputed for the last one."""
    micro, specs = micro_batches(work), work.shape.layers
    each = [saved_bytes(work, micro.tokens, micro.sequences, spec) for spec in specs]
    row, count = work.parameter_bytes * work.shape.hidden_size * micro.tokens, len(each)
    if work.checkpoint is None:
        return sum(each), 0
    if work.checkpoint == "mlp":
        feeds = [feed_bytes(work, micro.tokens, spec) for spec in specs]
        return sum(each) - sum(feeds) + count * row, feeds[-1] - row
    if work.checkpoint == "alternate":
        return sum(each[::2]) + count // 2 * row, 0 if count % 2 else each[-1] - row
    return (min(2, count) if work.offload_inputs else count) * row, each[-1] - row


def _head(work: Workload, trained: int) -> int:
    """Return the bytes of the head's backward pass including saved logits, or of its forward pass, whichever is
    larger."""
    shape, p = work.shape, work.parameter_bytes
    table, logits = shape.vocab_size * shape.hidden_size, _chunk_elements(work)
    if work.lora.rank:
        table = 0  # a frozen head has no gradient
    if work.is_native:
        if work.lora.rank:  # its chunks' gradients are computed beside their logits, and kept in float32
            chunk = logits // round_up(shape.vocab_size, COLUMN_QUANTUM)
            wide = 4 if p == 4 or work.widens else 6
            return logits * wide + trained * shape.hidden_size * 4 + chunk * shape.hidden_size * p
        if trained * shape.vocab_size * 4 <= KEEP_BYTES:
            logits = trained * round_up(shape.vocab_size, COLUMN_QUANTUM)
            chunk, share = trained, table * p
        else:
            chunk, share = logits // round_up(shape.vocab_size, COLUMN_QUANTUM), table * (4 + p)
            logits *= 2
        hidden = trained * shape.hidden_size * p
        return (
            logits * (4 if p == 4 or work.widens else 6) + hidden + max(chunk * shape.hidden_size * p, share)
        )
    every = trained * round_up(shape.vocab_size, COLUMN_QUANTUM)
    if work.device == "cpu" and trained * shape.vocab_size * 4 <= KEEP_BYTES:
        logits = every
    copies = 5 if work.has_entropy else 2
    backward = 4 * copies * logits + table * (4 if p == 4 else 8) + trained * shape.hidden_size * p
    return max(backward, 4 * 3 * logits)  # the forward pass measures the entropy


def _update(work: Workload) -> dict[str, int]:
    """Return the bytes of gradients and of copies of them, if not read in place; or of unpacked moments."""
    parts = {"activations": _batch_bytes(work) if work.rows else 0}
    trained = trained_shapes(work)
    sizes = [size.numel() for _, size in trained]
    count = sum(sizes)
    has_kernels = work.device == "cpu" and work.has_kernels
    if work.offload_state:
        copies = 0
    elif work.optimizer == "muon":  # gradient and weights of a matrix, and what is computed from them
        copies = 4 * 3 * max(size.numel() for name, size in trained if "embed" not in name)
    elif work.adam_bits == 8:
        copies = 4 * CHUNK_COPIES * min(max(sizes), adam8bit.CHUNK)
    elif work.precision.endswith(
        "_master"
    ):  # weights and, if PyTorch updates them, the gradient, original and scaled
        copies = (4 if has_kernels else 12) * min(max(sizes), CHUNK[work.device])
    else:
        copies = 0 if has_kernels else 4 * count  # scaled by clipping
    total = sum(gradient_bytes(work)) + copies
    return parts | {"gradients": total if work.lora.rank else _share(work, total)}


def _chunk_elements(work: Workload) -> int:
    """Return the number of logits that the head holds at once."""
    vocabulary = round_up(work.shape.vocab_size, COLUMN_QUANTUM)
    trained = micro_batches(work).sequences * work.num_trained
    rows = min(trained, chunk_rows(work.shape.vocab_size, torch.device(work.device)))
    return (rows if work.is_native else round_up(rows, ROW_QUANTUM)) * vocabulary


def _batch_bytes(work: Workload) -> int:
    """Return the bytes of a step's packed tokens and columns over all micro-batches."""
    return 8 * micro_batches(work).all_tokens + work.num_sequences * COLUMN_BYTES * work.num_trained


def _copies(work: Workload, count: int) -> dict[str, int]:
    """Return the bytes of autocast's copies of the weights, which the graph keeps (none in inference mode)."""
    is_kept = work.precision.endswith("_autocast") and work.checkpoint != "layer"
    if not is_kept or work.is_native or work.widens:
        return {}
    shape = work.shape
    tables = shape.vocab_size * shape.hidden_size * (1 if shape.tie_embeddings else 2)
    tables += shape.max_positions * shape.hidden_size if shape.family == "gpt2" else 0
    return {"bfloat16 weights": 2 * (count - tables)}
