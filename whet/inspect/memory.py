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
from whet.generate.cache import CacheSize
from whet.generate.engine import PREFILL_TOKENS
from whet.generate.sampling import SMALL_VOCABULARY
from whet.inspect.workload import (
    Workload,
    backward_bytes,
    feed_bytes,
    micro_batches,
    norm_bytes,
    passing_bytes,
    saved_bytes,
    table_bytes,
)
from whet.kernels.cpu import QUANTUM
from whet.kernels.cpu_attention import TILE
from whet.kernels.cpu_head import KEEP_BYTES
from whet.model.attention import KEY_QUANTUM, MIN_QUERY_ROWS, round_up
from whet.model.config import ModelConfig
from whet.model.weights import build_model
from whet.train import adam8bit
from whet.train.adam8bit import BLOCK, MIN_NUMBERS
from whet.train.optimizer import CHUNK
from whet.train.source import KEPT_CACHE

GIB = 2**30
COLUMN_BYTES = 3 * 8 + 7 * 4
PANEL = 32
CHUNK_COPIES = 11
"""Float32 copies of a chunk of 8-bit moments while it is updated and packed again."""


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
def parameter_shapes(shape: ModelConfig) -> tuple[tuple[str, torch.Size], ...]:
    """Return the name and the shape of every parameter; a tied head counts once."""
    with torch.device("meta"):
        return tuple((name, parameter.shape) for name, parameter in build_model(shape).named_parameters())


def parameter_sizes(shape: ModelConfig) -> tuple[int, ...]:
    """Return the number of elements of every parameter; a tied head counts once."""
    return tuple(size.numel() for _, size in parameter_shapes(shape))


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
    kept = _kept(work, sizes)
    packed = {"packed weights": packed_bytes(work)} if work.is_native else {}
    found = []
    if work.kept_bytes:
        kept = kept | {"kept activations": work.kept_bytes}
    if work.rows:
        cache = {"kv cache": cache_bytes(work)}
        found.append(Phase("rollout", kept | packed | cache | _rollout(work)))
        if work.overlap != "off" or cache_bytes(work) <= KEPT_CACHE:
            kept = kept | cache  # the run's engine keeps it while it trains
    if work.has_measuring:
        found.append(Phase("scoring", kept | packed | _scoring(work, sum(sizes))))
    beside = {} if work.overlap == "off" else {"rollout beside": _rollout(work)["activations"]}
    found.append(Phase("backward", kept | _backward(work, sizes) | beside))
    if work.is_native:
        packed = {"packed weights": packed_bytes(work, in_training=True)}
    found.append(Phase("optimizer step", kept | packed | _update(work, sizes)))
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
    shape, prompt = work.shape, work.length - work.num_trained
    size = CacheSize(
        rows=work.rows,
        prompt=prompt,
        completion=work.num_trained,
        context=shape.max_positions,
        prompts=min(work.rows, work.num_requests),
    )
    per_position = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * work.product_bytes
    if not work.has_native_attention:
        return size.rows * size.whole * per_position
    return (size.rows * size.own + size.prompts * round_up(prompt, TILE)) * per_position


def _kept(work: Workload, sizes: Sequence[int]) -> dict[str, int]:
    """Bytes that stay from the first step to the last."""
    shape, model = work.shape, sum(sizes) * work.parameter_bytes
    state = 0 if work.offload_state else state_bytes(work, sizes)
    tables = table_bytes(work) * shape.max_positions
    parts = {"weights": model + tables, "optimizer": state}
    if work.overlap != "off":
        parts["sampler"] = packed_bytes(work) + (model + tables if work.overlap == "async" else 0)
    if work.has_reference:
        parts["reference"] = model + tables + packed_bytes(work)
    if work.has_critic:
        parts["critic"] = model + tables + state + packed_bytes(work, has_head=False)
    return parts


def state_bytes(work: Workload, sizes: Sequence[int]) -> int:
    """Return the bytes of moments and of what master weights have beyond the parameters."""
    masters = 2 * sum(sizes) if work.precision == "bfloat16_master" else 0
    packed = [n for n in sizes if work.adam_bits == 8 and n >= MIN_NUMBERS]
    return masters + 8 * (sum(sizes) - sum(packed)) + sum(2 * (n + 4 * -(-n // BLOCK)) for n in packed)


def packed_bytes(work: Workload, *, has_head: bool = True, in_training: bool = False) -> int:
    """Return the bytes of the weights' copies that the C++ kernels read; 0 without them.

    Args:
        work: Says the shape and the precision.
        has_head: Whether the head is used, too.
        in_training: Without those that are given back after each use, of parts that are recomputed.
    """
    if not work.is_native:
        return 0
    shape = work.shape
    total = sum(
        size
        for layer, sizes in enumerate(_packed_layers(work))
        for part, size in sizes.items()
        if not (in_training and _is_recomputed(work, layer, part))
    )
    head = round_up(shape.vocab_size, PANEL) * shape.hidden_size * work.parameter_bytes
    return total + (head if has_head else 0)


def _packed_layers(work: Workload) -> list[dict[str, int]]:
    """Return for each layer the bytes of packed weights of its feed-forward part, and of the rest."""
    shape = work.shape
    layers = [{"mlp": 0, "attention": 0} for _ in range(shape.num_layers)]
    for name, size in parameter_shapes(shape):
        is_table = "embed" in name or "wte" in name or "wpe" in name or "lm_head" in name
        if len(size) == 2 and not is_table:
            layer = next(int(word) for word in name.split(".") if word.isdigit())
            rows, width = reversed(size) if shape.family == "gpt2" else size
            held = 0 if width % QUANTUM else round_up(rows, PANEL) * width * work.product_bytes
            layers[layer]["mlp" if ".mlp." in name else "attention"] += held
    return layers


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
    if work.is_native:  # the logits of the prompts, once more for each row
        prefill = max(prefill, logits + work.num_prompts * vocabulary * 4)
    parts = {"activations": states + max(decode, prefill)}
    if work.precision == "bfloat16_master" and work.device == "cpu" and not work.is_native:
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
    frame = tokens * table_bytes(work) + _batch_bytes(work)
    ends = tokens * norm_bytes(work, 0) * shape.hidden_size + trained * residual
    table = shape.vocab_size * shape.hidden_size
    earlier = count if micro.count > 1 and not work.update_in_backward else 0
    whole = max(sizes) if work.update_in_backward else max(count, earlier)
    # The fullest moment is in the head (all activations, logits), in the last layer, or at the end (all gradients).
    inside = again + backward_bytes(work, tokens, micro.sequences)
    packed = packed_bytes(work, in_training=True)
    one = max(
        sum(size for part, size in sizes.items() if _is_recomputed(work, layer, part))
        for layer, sizes in enumerate(_packed_layers(work))
    )
    moments = [
        {
            "activations": stored + frame + ends,
            "head": _head(work, trained),
            "gradients": earlier * work.parameter_bytes,
            "packed weights": packed,
        },
        {
            "activations": stored + frame + inside,
            "gradients": (earlier + table) * work.parameter_bytes,
            "packed weights": packed + (one if work.is_native else 0),
        },
        {
            "activations": _batch_bytes(work) + residual * tokens,
            "gradients": (whole + table) * work.parameter_bytes,
            "packed weights": packed,
        },
    ]
    if work.rows:  # before the first layer: what the rollout has packed is there
        moments.append({"activations": frame, "packed weights": packed_bytes(work)})
    if not work.is_native:
        for parts in moments:
            del parts["packed weights"]
    fullest = max(moments, key=lambda parts: sum(parts.values()))
    return fullest | _copies(work, count)


def _stored(work: Workload) -> tuple[int, int]:
    """Return what all layers keep until the backward pass, and what it computes again of the last one."""
    micro, layers = micro_batches(work), work.shape.num_layers
    layer = saved_bytes(work, micro.tokens, micro.sequences)
    row = work.parameter_bytes * work.shape.hidden_size * micro.tokens
    if work.checkpoint is None:
        return layers * layer, 0
    if work.checkpoint == "mlp":
        feed = feed_bytes(work, micro.tokens)
        return layers * (layer - feed + row), feed - row
    if work.checkpoint == "alternate":
        return (layers + 1) // 2 * layer + layers // 2 * row, 0 if layers % 2 else layer - row
    return (min(2, layers) if work.offload_inputs else layers) * row, layer - row


def _head(work: Workload, trained: int) -> int:
    """Bytes of the head's backward pass, the logits that it kept included, or of its forward pass."""
    shape, p = work.shape, work.parameter_bytes
    table, logits = shape.vocab_size * shape.hidden_size, _chunk_elements(work)
    if work.is_native:
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


def _update(work: Workload, sizes: Sequence[int]) -> dict[str, int]:
    """Gradients, and where they are not read where they are, copies of them; or the moments that are unpacked."""
    parts = {"activations": _batch_bytes(work) if work.rows else 0}
    if work.update_in_backward:
        return parts
    count = sum(sizes)
    has_kernels = work.device == "cpu" and work.has_kernels
    if work.offload_state:
        copies = 0
    elif work.adam_bits == 8:
        copies = 4 * CHUNK_COPIES * min(max(sizes), adam8bit.CHUNK)
    elif (
        work.precision == "bfloat16_master"
    ):  # weights, and where PyTorch updates them the gradient, as is and scaled
        copies = (4 if has_kernels else 12) * min(max(sizes), CHUNK[work.device])
    else:
        copies = 0 if has_kernels else 4 * count  # scaled by clipping
    return parts | {"gradients": count * work.parameter_bytes + copies}


def _chunk_elements(work: Workload) -> int:
    """Logits that the head holds at once."""
    vocabulary = round_up(work.shape.vocab_size, COLUMN_QUANTUM)
    trained = micro_batches(work).sequences * work.num_trained
    rows = min(trained, chunk_rows(work.shape.vocab_size, torch.device(work.device)))
    return (rows if work.is_native else round_up(rows, ROW_QUANTUM)) * vocabulary


def _batch_bytes(work: Workload) -> int:
    """Bytes of a step's packed tokens and columns, all micro-batches."""
    return 8 * micro_batches(work).all_tokens + work.num_sequences * COLUMN_BYTES * work.num_trained


def _copies(work: Workload, count: int) -> dict[str, int]:
    """Bytes of autocast's copies of the weights, which the graph keeps (in inference mode there are none to keep)."""
    is_kept = work.precision == "bfloat16_autocast" and work.checkpoint != "layer"
    if not is_kept or work.is_native or work.widens:
        return {}
    shape = work.shape
    tables = shape.vocab_size * shape.hidden_size * (1 if shape.tie_embeddings else 2)
    tables += shape.max_positions * shape.hidden_size if shape.family == "gpt2" else 0
    return {"bfloat16 weights": 2 * (count - tables)}
