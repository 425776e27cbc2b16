"""Bytes that a run holds at once, phase by phase, computed from shapes alone.

The formulas follow what `whet.train`, `whet.algo.logprobs` and `whet.generate` allocate: tensors that are alive, not
what an allocator keeps besides. tests/inspect/test_memory.py holds them against `whet.inspect.meter`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from whet.algo.logprobs import COLUMN_QUANTUM, ROW_QUANTUM, chunk_rows
from whet.generate.engine import PREFILL_TOKENS
from whet.generate.sampling import SMALL_VOCABULARY
from whet.model.attention import (
    KEY_BLOCK,
    KEY_QUANTUM,
    MIN_QUERY_ROWS,
    TILE_SCORES,
    AttentionKind,
    round_up,
)
from whet.model.config import ModelConfig
from whet.model.weights import build_model
from whet.train.step import Precision

GIB = 2**30
COLUMN_BYTES = 3 * 8 + 7 * 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What decides the memory of a run: shapes, precision, and how much is done at once.

    Attributes:
        shape: Shape of the model.
        precision: Precision of the step.
        device: 'cpu' or 'cuda'.
        attention: Kernel of the training passes.
        checkpoint_layers: Whether the backward pass recomputes each layer.
        length: Longest sequence, prompt and completion, in tokens.
        num_trained: Trained tokens of such a sequence.
        num_sequences: Sequences of an update, on one rank.
        token_budget: Tokens of a micro-batch.
        rows: Sequences decoded together; 0 where nothing is sampled.
        num_prompts: Different prompts among the rows.
        has_reference: Whether a frozen copy of the model is held.
        has_critic: Whether a value model with its own optimizer is.
        has_measuring: Whether tokens are scored before the first update.
        has_entropy: Whether the entropy is part of the loss.
        temperature: Temperature of the sampled distribution.
    """

    shape: ModelConfig
    precision: Precision
    device: str
    attention: AttentionKind
    checkpoint_layers: bool = False
    length: int
    num_trained: int
    num_sequences: int
    token_budget: int
    rows: int = 0
    num_prompts: int = 0
    has_reference: bool = False
    has_critic: bool = False
    has_measuring: bool = False
    has_entropy: bool = False
    temperature: float = 1.0

    @property
    def micro_sequences(self) -> int:
        """Longest sequences that one micro-batch takes; one that exceeds the budget has it for itself."""
        return min(self.num_sequences, max(1, self.token_budget // self.length))

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of an update, all sequences being longest."""
        return -(-self.num_sequences // self.micro_sequences)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of a parameter, and of a gradient."""
        return 2 if self.precision == "bfloat16_master" else 4

    @property
    def product_bytes(self) -> int:
        """Bytes of what a matrix product returns."""
        return 4 if self.precision == "float32" else 2


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes by what they are for, all held in the phase's fullest moment."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


@cache
def parameter_sizes(shape: ModelConfig) -> tuple[int, ...]:
    """Return the number of elements of every parameter; a tied head counts once."""
    with torch.device("meta"):
        return tuple(parameter.numel() for parameter in build_model(shape).parameters())


def sharded_budget(num_parameters: int, num_devices: int) -> dict[str, float]:
    """Return the textbook budget of a device in bytes, model and optimizer sharded evenly.

    Args:
        num_parameters: Trained parameters.
        num_devices: Devices that share them.

    Source: source 001's table (bfloat16 weights and gradients, float32 Adam). Deviation: it leaves out the float32
        master weights without which small updates are lost to rounding; they are listed apart.
    """
    share = num_parameters / num_devices
    return {
        "weights, bfloat16": 2 * share,
        "gradients, bfloat16": 2 * share,
        "Adam's two moments, float32": 8 * share,
        "master weights, float32": 4 * share,
    }


def phases(work: Workload) -> list[Phase]:
    """Predict the fullest moment of each phase of a step, in the order in which they come."""
    sizes = parameter_sizes(work.shape)
    kept = _kept(work, sum(sizes))
    found = []
    if work.rows:
        kept = kept | {"kv cache": cache_bytes(work)}  # the run's engine keeps it while it trains
        found.append(Phase("rollout", kept | _rollout(work)))
    if work.has_measuring:
        found.append(Phase("scoring", kept | _scoring(work, sum(sizes))))
    found.append(Phase("backward", kept | _backward(work, sum(sizes))))
    found.append(Phase("optimizer step", kept | _update(work, sizes)))
    return found


def peak(work: Workload) -> int:
    """Return the bytes of the fullest phase."""
    return max(phase.total for phase in phases(work))


def fit(work: Workload, num_bytes: int) -> Workload | None:
    """Return the workload with as many rows and then as long micro-batches as fit in memory; None if none do.

    Neither changes the mathematics. No more rows are taken than asked for, no more tokens than the update has.
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
    """Return the largest number from 1 to `most` that fits, 1 being known to; all below one that fits fit."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def cache_bytes(work: Workload) -> int:
    """Return the bytes of keys and values of all rows."""
    shape = work.shape
    capacity = min(work.length, shape.max_positions)
    capacity = round_up(capacity, KEY_QUANTUM if capacity <= KEY_BLOCK else KEY_BLOCK)
    per_position = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * work.product_bytes
    return work.rows * capacity * per_position


def _kept(work: Workload, count: int) -> dict[str, int]:
    """Bytes that stay from the first step to the last."""
    shape, model = work.shape, count * work.parameter_bytes
    moments = 8 * count + (4 * count if work.precision == "bfloat16_master" else 0)
    tables = 0 if shape.family == "gpt2" else 2 * 4 * shape.max_positions * shape.head_dim
    parts = {"weights": model + tables, "optimizer": moments}
    if work.has_reference:
        parts["reference"] = model + tables
    if work.has_critic:
        parts["critic"] = model + tables + moments
    return parts


def _rollout(work: Workload) -> dict[str, int]:
    shape = work.shape
    vocabulary = round_up(shape.vocab_size, COLUMN_QUANTUM)
    draw = 30 if vocabulary <= SMALL_VOCABULARY else 12
    logits = round_up(work.rows, ROW_QUANTUM) * vocabulary * (draw + (4 if work.temperature != 1 else 0))
    states = work.rows * (6 * 8 + 2 + 12 * (work.num_trained + 1))
    prompt = work.length - work.num_trained
    tokens = min(work.num_prompts * prompt, max(prompt, PREFILL_TOKENS))
    heads = shape.num_kv_heads * max(shape.num_heads // shape.num_kv_heads, MIN_QUERY_ROWS)
    is_fused = work.attention == "fast" and work.device == "cuda"
    scores = 0 if is_fused else 3 * 4 * work.rows * heads * round_up(work.length, KEY_QUANTUM)
    decode = logits + max(0, scores + _passing(work, work.rows, 1) - logits)
    parts = {"activations": states + max(decode, _passing(work, tokens, prompt))}
    if work.precision == "bfloat16_master" and work.device == "cpu":
        parts["float32 head"] = 4 * shape.vocab_size * shape.hidden_size
    return parts


def _scoring(work: Workload, count: int) -> dict[str, int]:
    rows, length = work.micro_sequences, work.length
    chunk = 4 * 4 * _chunk_elements(work)
    passing = _passing(work, rows * length, length)
    return {
        "activations": _batch_bytes(work) + passing,
        "head": max(0, chunk - passing),
    } | _copies(work, count)


def _backward(work: Workload, count: int) -> dict[str, int]:
    shape, rows, length = work.shape, work.micro_sequences, work.length
    tokens, trained = rows * length, rows * work.num_trained
    layer = saved_bytes(work, rows, length)
    residual = 2 if work.precision == "bfloat16_master" else 4
    stored = residual * shape.hidden_size * tokens if work.checkpoint_layers else layer
    frame = tokens * (2 * 4 * shape.head_dim + _norm_bytes(work, 0) * shape.hidden_size)
    frame += trained * residual * shape.hidden_size + _batch_bytes(work)
    table = shape.vocab_size * shape.hidden_size
    earlier = count if work.num_micro_batches > 1 else 0
    # The fullest moment is in the head (all activations, logits), in the last layer, or at the end (all gradients).
    chunks = -(-trained // chunk_rows(shape.vocab_size, torch.device(work.device)))
    copies = (6 if work.has_entropy else 3) + (chunks > 1) + (work.temperature != 1)
    backward = 4 * copies * _chunk_elements(work) + table * (4 if work.parameter_bytes == 4 else 8)
    backward += trained * shape.hidden_size * residual
    head = max(backward, 4 * 4 * _chunk_elements(work))  # the forward pass measures the entropy
    inside = (layer if work.checkpoint_layers else 0) + _backward_passing(work, rows, length)
    activations = shape.num_layers * stored + frame
    moments = [
        {"activations": activations, "head": head, "gradients": earlier * work.parameter_bytes},
        {"activations": activations + inside, "gradients": (earlier + table) * work.parameter_bytes},
        {
            "activations": _batch_bytes(work) + residual * shape.hidden_size * tokens,
            "gradients": (max(count, earlier) + table) * work.parameter_bytes,
        },
    ]
    fullest = max(moments, key=lambda parts: sum(parts.values()))
    return fullest | _copies(work, count)


def _update(work: Workload, sizes: Sequence[int]) -> dict[str, int]:
    """Gradients, their float32 copies, and either the copies scaled by clipping or one tensor's squares in float64."""
    count = sum(sizes)
    wide = 4 * count if work.parameter_bytes == 2 else 0
    return {
        "activations": _batch_bytes(work) if work.rows else 0,
        "gradients": count * work.parameter_bytes + wide + max(4 * count, 2 * 8 * max(sizes)),
    }


def saved_bytes(work: Workload, rows: int, length: int) -> int:
    """Return the bytes that autograd keeps of one layer, for equally long sequences."""
    shape, a = work.shape, work.product_bytes
    tokens = rows * length
    width, heads, keys = (
        shape.hidden_size,
        shape.num_heads * shape.head_dim,
        shape.num_kv_heads * shape.head_dim,
    )
    is_gpt2 = shape.family == "gpt2"
    per_token = width * (_norm_bytes(work, 1 if is_gpt2 else 3) + _norm_bytes(work, 1 if is_gpt2 else 2)) + 8
    per_token += a * (heads + (2 if is_gpt2 else 4) * shape.intermediate_size)
    if shape.family == "qwen3":
        per_token += (heads + keys) * (8 if a == 4 else 6)
    padded = rows * _padded(length)
    attention = padded * a * (heads + 2 * keys)
    if work.attention == "exact":
        attention += rows * shape.num_heads * _num_scores(length) * (4 if a == 4 else 6)
    else:
        attention += padded * (a * heads + 4 * shape.num_heads)
    return tokens * per_token + attention


def _norm_bytes(work: Workload, num_readers: int) -> int:
    """Bytes per channel that a norm and the products that read it keep; under autocast each reader has a copy."""
    if work.shape.family == "gpt2":
        return {"float32": 4 + 4 * (num_readers > 0), "bfloat16_master": 2 + 2 * (num_readers > 0)}.get(
            work.precision, 4 + 2 * num_readers
        )
    return {"float32": 8 + 4 * (num_readers > 0), "bfloat16_master": 6 + 2 * (num_readers > 0)}.get(
        work.precision, 8 + 2 * num_readers
    )


def _padded(length: int) -> int:
    return round_up(length, KEY_QUANTUM if length <= KEY_BLOCK else KEY_BLOCK)


def _num_scores(length: int) -> int:
    """Scores of one head and sequence: query blocks read the keys up to their own end."""
    width = _padded(length)
    block = min(width, KEY_BLOCK)
    return sum(block * stop for stop in range(block, width + 1, block))


def _tile_bytes(work: Workload, rows: int, length: int) -> int:
    """Bytes of one tile of scores in exact attention."""
    if work.attention != "exact":
        return 0
    width = _padded(length)
    one = work.shape.num_heads * min(width, KEY_BLOCK) * width
    return 4 * min(rows * one, max(one, TILE_SCORES))


def _passing(work: Workload, tokens: int, length: int) -> int:
    """Bytes of a forward pass without autograd in its fullest moment: the widest part of one layer.

    Args:
        work: Says the shape.
        tokens: Tokens of all sequences.
        length: Tokens of each, packed; 1 in decoding, where nothing is padded.
    """
    shape, a = work.shape, work.product_bytes
    heads, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    residual = 2 if work.precision == "bfloat16_master" else 4
    mlp = tokens * (2 * residual * shape.hidden_size + 3 * a * shape.intermediate_size)
    attention = tokens * (2 * residual * shape.hidden_size + a * (heads + 2 * keys))
    if length > 1:
        padded = -(-tokens // length) * _padded(length)
        attention += padded * a * (2 * heads + 2 * keys) + 2 * _tile_bytes(work, tokens // length, length)
    norm = tokens * 4 * 4 * shape.hidden_size
    return max(mlp, attention, norm) + tokens * 2 * 4 * shape.head_dim


def _backward_passing(work: Workload, rows: int, length: int) -> int:
    """Bytes that the backward pass of a layer needs besides what was kept."""
    shape, a = work.shape, work.product_bytes
    tokens, padded = rows * length, rows * _padded(length)
    heads, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    residual = 2 if work.precision == "bfloat16_master" else 4
    is_gpt2 = shape.family == "gpt2"
    mlp = tokens * (2 * residual * shape.hidden_size + a * shape.intermediate_size)
    attention = tokens * residual * shape.hidden_size + padded * a * (2 * heads + 5 * keys)
    attention += 2 * _tile_bytes(work, rows, length)
    freed = _norm_bytes(work, 1 if is_gpt2 else 2) * shape.hidden_size
    freed += (
        a * (2 if is_gpt2 else 4) * shape.intermediate_size
    )  # by the feed-forward part, which comes first
    return max(mlp, attention - tokens * freed)


def _chunk_elements(work: Workload) -> int:
    """Logits that the head holds at once."""
    vocabulary = round_up(work.shape.vocab_size, COLUMN_QUANTUM)
    rows = min(
        work.micro_sequences * work.num_trained, chunk_rows(work.shape.vocab_size, torch.device(work.device))
    )
    return round_up(rows, ROW_QUANTUM) * vocabulary


def _batch_bytes(work: Workload) -> int:
    """Bytes of a step's packed tokens and columns, all micro-batches."""
    return work.num_sequences * (8 * work.length + COLUMN_BYTES * work.num_trained)


def _copies(work: Workload, count: int) -> dict[str, int]:
    """Bytes of autocast's copies of the weights, which the graph keeps (in inference mode there are none to keep)."""
    if work.precision != "bfloat16_autocast" or work.checkpoint_layers:
        return {}
    shape = work.shape
    tables = shape.vocab_size * shape.hidden_size * (1 if shape.tie_embeddings else 2)
    tables += shape.max_positions * shape.hidden_size if shape.family == "gpt2" else 0
    return {"bfloat16 weights": 2 * (count - tables)}
