"""What decides the memory of a run, and the bytes that one layer of its model takes in training and in sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from whet.algo.packing import split_by_budget
from whet.generate.activations import bytes_per_token, is_known
from whet.kernels.cpu import CHANNELS, QUANTUM
from whet.kernels.eager import SLICE
from whet.model.attention import (
    KEY_BLOCK,
    KEY_QUANTUM,
    QUERY_BLOCK,
    TILE_SCORES,
    AttentionKind,
    round_up,
)
from whet.model.checkpointing import CheckpointKind
from whet.model.config import ModelConfig
from whet.train.overlap import Mode
from whet.train.step import Precision


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What decides the memory of a run: shapes, precision, and how much is done at once.

    Attributes:
        shape: Shape of the model.
        precision: Precision of the step.
        device: 'cpu' or 'cuda'.
        attention: Kernel of the training passes.
        has_kernels: Whether the C++ kernels run.
        checkpoint: What the backward pass recomputes; None for nothing.
        offload_inputs: Whether layers' inputs are in host memory meanwhile.
        adam_bits: Bits of a number of the moments.
        update_in_backward: Whether each gradient is dropped as soon as it is there.
        offload_state: Whether moments and master weights are in host memory.
        length: Longest sequence, prompt and completion, in tokens.
        num_trained: Trained tokens of such a sequence.
        num_sequences: Sequences of an update, on one rank.
        group_size: Sequences of one prompt.
        token_budget: Tokens of a micro-batch.
        rows: Sequences decoded together; 0 where nothing is sampled.
        num_prompts: Different prompts among the rows.
        overlap: What is sampled while the trainer works: 'async' draws from a copy of the weights.
        has_reference: Whether a frozen copy of the model is held.
        has_critic: Whether a value model with its own optimizer is.
        has_measuring: Whether tokens are scored before the first update.
        has_entropy: Whether the entropy is part of the loss.
        temperature: Temperature of the sampled distribution.
        widens: Whether bfloat16 products go through float32, the CPU having none.
        num_requests: Different prompts of a rollout.
        kept_gib: Memory for what the sampler keeps of its activations for the update; 0 where it keeps none.
    """

    shape: ModelConfig
    precision: Precision
    device: str
    attention: AttentionKind
    has_kernels: bool = False
    checkpoint: CheckpointKind | None = None
    offload_inputs: bool = False
    adam_bits: int = 32
    update_in_backward: bool = False
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

    @property
    def micro_sequences(self) -> int:
        """Longest sequences that one micro-batch takes at most; one that exceeds the budget has it for itself."""
        return micro_batches(self).sequences

    @property
    def parameter_bytes(self) -> int:
        """Bytes of a parameter, of a gradient, and of a number between layers in bfloat16."""
        return 2 if self.precision == "bfloat16_master" else 4

    @property
    def product_bytes(self) -> int:
        """Bytes of what a matrix product returns."""
        return 4 if self.precision == "float32" else 2

    @property
    def score_bytes(self) -> int:
        """Bytes of a number that products of PyTorch read in attention."""
        return 4 if self.widens else self.product_bytes

    @property
    def is_native(self) -> bool:
        """Whether norms, the head and products that read the residual stream are those of the C++ kernels."""
        return self.has_kernels and self.shape.hidden_size % QUANTUM == 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of what the sampler keeps of its activations (`whet.generate.activations`), all being longest."""
        is_fused = self.is_native and self.has_native_gate and self.has_native_attention
        is_plain = self.checkpoint is None and self.precision != "bfloat16_autocast" and is_known(self.shape)
        if not (is_fused and is_plain):
            return 0
        prompt = self.length - self.num_trained
        tokens = 1 + self.num_requests * (prompt + self.group_size * self.num_trained)
        total = tokens * bytes_per_token(self.shape, self.parameter_bytes)
        return total if total <= self.kept_gib * 2**30 else 0

    @property
    def has_native_gate(self) -> bool:
        """Whether the gated unit is the C++ kernels'."""
        is_plain = self.shape.family != "gpt2" and self.shape.intermediate_size % QUANTUM == 0
        return self.has_kernels and is_plain

    @property
    def has_native_attention(self) -> bool:
        """Whether attention is the C++ kernels', which keep no scores and pad nothing."""
        return self.has_kernels and self.shape.head_dim in CHANNELS


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """An update's micro-batches, all sequences being longest; a prompt stands once for its sequences.

    Attributes:
        count: How many there are.
        tokens: Tokens of the largest.
        sequences: Sequences of the largest.
        all_tokens: Tokens of all.
    """

    count: int
    tokens: int
    sequences: int
    all_tokens: int


@cache
def micro_batches(work: Workload) -> MicroBatches:
    """Cut an update as `whet.algo.packing.pack` does."""
    prompt = work.length - work.num_trained
    most = max(1, (work.token_budget - prompt) // max(1, work.num_trained))
    families = []
    for first in range(0, work.num_sequences, work.group_size):
        left = min(work.group_size, work.num_sequences - first)
        families += [min(most, left - start) for start in range(0, left, most)]
    rows = [prompt + count * work.num_trained for count in families]
    bins = split_by_budget(rows, work.token_budget)
    return MicroBatches(
        count=len(bins),
        tokens=max(sum(rows[place] for place in members) for members in bins),
        sequences=max(sum(families[place] for place in members) for members in bins),
        all_tokens=sum(rows),
    )


def saved_bytes(work: Workload, tokens: int, sequences: int) -> int:
    """Return the bytes that autograd keeps of one layer.

    Args:
        work: Says the shape.
        tokens: Tokens of a micro-batch.
        sequences: Its sequences, equally long.
    """
    shape, a = work.shape, work.product_bytes
    heads, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    per_token = shape.hidden_size * norm_bytes(work, 1 if shape.family == "gpt2" else 3) + 4
    per_token += a * heads  # what the output projection reads
    if shape.family == "qwen3":
        per_token += (heads + keys) * a + 4 * (shape.num_heads + shape.num_kv_heads)
    if work.has_native_attention:
        return tokens * (per_token + a * (heads + 2 * keys) + 4 * shape.num_heads) + feed_bytes(work, tokens)
    if work.attention == "exact":
        attention = tokens * a * (heads + 2 * keys)
        attention += shape.num_heads * _Rows.of(work, tokens, sequences).scores * work.score_bytes
    else:
        padded = sequences * padded_length(work.length)
        attention = padded * (2 * a * heads + 2 * a * keys + 4 * shape.num_heads)
    return tokens * per_token + attention + feed_bytes(work, tokens)


def feed_bytes(work: Workload, tokens: int) -> int:
    """Return the bytes that autograd keeps of a layer's feed-forward part, its norm and its input included."""
    shape, is_gpt2 = work.shape, work.shape.family == "gpt2"
    per_token = shape.hidden_size * norm_bytes(work, 1 if is_gpt2 else 2) + 4
    per_token += work.product_bytes * _kept_widths(work) * shape.intermediate_size
    return tokens * per_token


def _kept_widths(work: Workload) -> int:
    """Tensors of the feed-forward width that are kept: gate, up and their product."""
    return 2 if work.shape.family == "gpt2" else 3


def norm_bytes(work: Workload, num_readers: int) -> int:
    """Return the bytes per channel that a norm and the products that read it keep.

    Under autocast each reader has its own copy.

    Args:
        work: Says the family and the precision.
        num_readers: Products that read it.
    """
    residual = work.parameter_bytes
    copies = 2 * num_readers if work.precision == "bfloat16_autocast" else residual * (num_readers > 0)
    return residual + copies


def padded_length(length: int) -> int:
    """Return the length of a sequence's row in padded attention."""
    return round_up(length, KEY_QUANTUM if length <= KEY_BLOCK else KEY_BLOCK // 2)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one head in exact attention without the C++ kernels, padding included (`whet.model.attention`).

    Attributes:
        queries: Queries of all sequences, a shared prompt's once.
        keys: Keys, each sequence having its prompt's for itself.
        scores: Pairs of them that are computed: blocks of queries read the keys up to their own end.
        tile: Scores of all heads in the largest call.
    """

    queries: int
    keys: int
    scores: int
    tile: int

    @classmethod
    def of(cls, work: Workload, tokens: int, sequences: int) -> _Rows:
        """Count those of a micro-batch, as `whet.algo.packing` lays it out.

        Args:
            work: Says the lengths.
            tokens: Its tokens.
            sequences: Its sequences.
        """
        prompt = work.length - work.num_trained
        families = (tokens - sequences * work.num_trained) // prompt
        if families >= sequences:
            return cls.add_up(work, [(sequences, 0, work.length)])
        return cls.add_up(work, [(families, 0, prompt), (sequences, prompt, work.num_trained)])

    @classmethod
    def add_up(cls, work: Workload, kinds: Sequence[tuple[int, int, int]]) -> _Rows:
        """Add up rows of several kinds: how many, position of the first query, queries."""
        queries = keys = scores = tile = 0
        for count, first, length in kinds:
            width = padded_length(length)
            blocks = range(first, first + width, min(width, QUERY_BLOCK))
            ends = [min(begin + QUERY_BLOCK, first + width) for begin in blocks]
            each = [
                (end - begin) * round_up(end, KEY_QUANTUM) for begin, end in zip(blocks, ends, strict=True)
            ]
            queries += count * width
            keys += count * round_up(first + width, KEY_QUANTUM)
            scores += count * sum(each)
            one = work.shape.num_heads * max(each)
            tile = max(tile, min(count * one, max(one, TILE_SCORES)))
        return cls(queries, keys, scores, tile)


def passing_bytes(work: Workload, tokens: int, sequences: int = 0, length: int = 1) -> int:
    """Return the bytes of a forward pass without autograd in its fullest moment: the widest part of one layer.

    Args:
        work: Says the shape.
        tokens: Tokens of all sequences.
        sequences: Sequences that they belong to; 0 in decoding, where nothing is padded.
        length: Tokens of each of them.
    """
    shape, a = work.shape, work.product_bytes
    heads, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    residual = work.parameter_bytes * shape.hidden_size
    mlp = tokens * (2 * residual + 3 * a * shape.intermediate_size)
    attention = tokens * (2 * residual + a * (heads + 2 * keys))
    if sequences and not work.has_native_attention:
        rows = _Rows.add_up(work, [(sequences, 0, length)])
        attention += work.score_bytes * (2 * rows.queries * heads + 2 * rows.keys * keys)
        attention += 4 * rows.tile if work.attention == "exact" else 0
    norm = tokens * (2 * residual if work.is_native else 4 * 4 * shape.hidden_size)
    return max(mlp, attention, norm) + tokens * table_bytes(work)


def table_bytes(work: Workload) -> int:
    """Return the bytes of a token's rotary angles."""
    return 0 if work.shape.family == "gpt2" else 2 * 4 * work.shape.head_dim


def backward_bytes(work: Workload, tokens: int, sequences: int) -> int:
    """Return the bytes that the backward pass of a layer needs besides what was kept.

    Args:
        work: Says the shape.
        tokens: Tokens of a micro-batch.
        sequences: Its sequences, equally long.
    """
    shape, a = work.shape, work.product_bytes
    heads, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    residual = work.parameter_bytes * shape.hidden_size
    feed = a * shape.intermediate_size
    # The gradients of gate and up beside that of their product, whose own numbers are gone.
    mlp = tokens * (residual + 2 * feed)
    if not work.has_native_gate and shape.family != "gpt2":
        mlp += 2 * a * min(tokens * shape.intermediate_size, SLICE)
    if work.widens and a == 2:  # the last product's gradients in float32, with what they are made of
        mlp = max(mlp, 6 * tokens * (shape.hidden_size + shape.intermediate_size))
    attention = tokens * (residual + a * (heads + 2 * keys) + 8 * keys)
    if not work.has_native_attention:
        rows = _Rows.of(work, tokens, sequences)
        attention = tokens * residual + work.score_bytes * (3 * rows.queries * heads + 4 * rows.keys * keys)
        attention += tokens * a * (2 * heads + 2 * keys)
        if work.attention == "exact":
            attention += rows.tile * (4 if work.score_bytes == 4 else 6)
    freed = feed_bytes(work, tokens)  # by the feed-forward part, which comes first
    return max(mlp, attention - freed)
