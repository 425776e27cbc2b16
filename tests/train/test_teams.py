"""Teams of ranks that run training passes together: positions or matrices are divided, and nothing else changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from gloo import run_ranks

from whet.algo.kept import encode_kept
from whet.algo.packing import TrainingSequence, pack
from whet.generate.scoring import hidden_rows, score_micro_batch, score_texts
from whet.model.config import Block, LayerSpec, ModelConfig
from whet.model.split import pieces_of
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model
from whet.ranks.collectives import shard, sum_gradients, world_size
from whet.ranks.fsdp import ParallelConfig, full
from whet.train.optim.step import forward_backward, shard_layers
from whet.types import MicroBatch, Segment

SHAPE = ModelConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
)
WINDOWS = replace(SHAPE, block=Block(layers=(LayerSpec(window=5), LayerSpec())))
CAPS = replace(
    SHAPE, block=Block(attention_cap=2.0, has_sinks=True, layers=(LayerSpec(window=3), LayerSpec()))
)
REWARD = replace(SHAPE, is_reward=True)
SHAPES = {"plain": SHAPE, "windows": WINDOWS, "caps and sinks": CAPS, "reward": REWARD}
WORDS = [(5, 12), (1, 1), (7, 20), (3, 2), (9, 9), (9, 4), (2, 1)]
"""Prompt and completion lengths; what divides well, what leaves ranks without a position, and a shared prompt."""


def model_of(shape: ModelConfig) -> LanguageModel:
    model = build_model(shape).double()
    init_weights(model, 0)
    with torch.no_grad():  # larger than a fresh model's, so that attention is no mean
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(0.1)
    return model


def sequences_of(*, has_sets: bool = False) -> list[TrainingSequence]:
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 48, (count,), generator=generator).tolist())

    found, shared = [], ids(9)
    for prompt, completion in WORDS:
        own = ids(completion)
        kept = torch.rand(completion, 48, generator=generator) < 0.5
        kept[torch.arange(completion), torch.tensor(own)] = True
        sets = tuple(encode_kept(kept)) if has_sets else ()
        found.append(
            TrainingSequence(prompt_ids=shared if prompt == 9 else ids(prompt), completion_ids=own, kept=sets)
        )
    return found


def by_tokens(model: LanguageModel, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
    """A loss that mixes the numbers of a whole sequence, as DPO's and GSPO's do."""
    logprobs_M, entropy_M = score_micro_batch(model, micro, temperature=0.7)
    weights_M = micro.targets_M.double().cos()
    sums_B = torch.zeros(len(micro.indices_B), dtype=torch.float64).index_add(
        0, micro.sequence_M, logprobs_M * weights_M
    )
    return (sums_B.sin() * 3).sum() + (entropy_M * weights_M).sum(), {"count": float(len(micro.indices_B))}


def by_hidden(model: LanguageModel, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
    hidden_MD = hidden_rows(model, micro)
    return (hidden_MD.sin() * micro.targets_M[:, None]).sum(), {}


def by_texts(model: LanguageModel, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
    return score_texts(model, micro).cos().sum(), {}


Score = Callable[[LanguageModel, MicroBatch], tuple[torch.Tensor, dict[str, float]]]


def gradients(
    shape: ModelConfig,
    score: Score,
    layout: ParallelConfig,
    *,
    has_sets: bool = False,
    recompute: bool = False,
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Return loss, a metric and all gradients of this rank's share of the sequences, summed over ranks."""
    model = model_of(shape)
    shard_layers(model, layout)
    model.checkpoint_layers = recompute
    sequences = sequences_of(has_sets=has_sets)
    mine = [sequences[index] for index in shard(len(sequences))]
    cut = pack(mine, token_budget=40, dtype=torch.float64).micro_batches
    totals = forward_backward(cut, lambda micro: score(model, micro), model)
    sum_gradients(model.parameters())
    found = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return totals["loss"], totals.get("count", 0.0), found


CASES: list[tuple[str, Score, dict[str, Any]]] = [
    ("plain", by_tokens, {}),
    ("plain", by_tokens, {"has_sets": True, "recompute": True}),
    ("plain", by_hidden, {}),
    ("windows", by_tokens, {}),
    ("caps and sinks", by_tokens, {}),
    ("reward", by_texts, {}),
]


def differences(layouts: Sequence[ParallelConfig], expected: list[Any]) -> list[float]:
    warnings.simplefilter("ignore")
    worst = []
    for layout in layouts:
        for (name, score, options), (loss, count, wanted) in zip(CASES, expected, strict=True):
            if layout.tensor > 1 and name not in ("plain", "windows"):
                continue
            found = gradients(SHAPES[name], score, layout, **options)
            totals = torch.tensor(found[:2], dtype=torch.float64)
            if world_size() > 1:
                torch.distributed.all_reduce(totals)
            assert found[2].keys() == wanted.keys()
            pairs = [(totals, torch.tensor([loss, count], dtype=torch.float64))]
            pairs += [(found[2][name], wanted[name]) for name in wanted]
            worst.append(max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in pairs))
    return worst


def expected() -> list[Any]:
    return [gradients(SHAPES[name], score, ParallelConfig(), **options) for name, score, options in CASES]


CONTEXT = ParallelConfig(context=2)


def test_ranks_that_divide_positions_have_the_gradient_of_one() -> None:
    for worst in run_ranks(2, differences, [CONTEXT], expected()):
        assert worst == pytest.approx([0.0] * len(CASES), abs=1e-12)


TENSOR = ParallelConfig(tensor=2)


def test_ranks_that_divide_matrices_have_the_gradient_of_one() -> None:
    for worst in run_ranks(2, differences, [TENSOR], expected()):
        assert worst == pytest.approx([0.0] * len(worst), abs=1e-12)


@pytest.mark.ci
def test_four_ranks_divide_positions_and_shards() -> None:
    layouts = [TENSOR, CONTEXT, ParallelConfig(context=4), ParallelConfig(kind="fsdp", context=2)]
    for worst in run_ranks(4, differences, layouts, expected()):
        assert len(worst) > 3 * len(CASES)
        assert worst == pytest.approx([0.0] * len(worst), abs=1e-12)


def test_the_gradient_is_that_of_finite_differences() -> None:
    """Of one process, with which the others are compared."""
    model, sequences = model_of(SHAPES["caps and sinks"]), sequences_of()
    (micro,) = pack(sequences, token_budget=10_000, dtype=torch.float64).micro_batches
    loss, _ = by_tokens(model, micro)
    loss.backward()
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.sinks"):
        parameter = model.get_parameter(name)
        assert parameter.grad is not None
        flat, step = parameter.data.view(-1), 1e-5
        values = []
        for move in (step, -2 * step):
            flat[1] += move
            with torch.no_grad():
                values.append(float(by_tokens(model, micro)[0]))
        slope = (values[0] - values[1]) / (2 * step)
        assert float(parameter.grad.view(-1)[1]) == pytest.approx(slope, rel=1e-5)
        flat[1] += step


def test_every_position_is_computed_once_and_all_ranks_see_as_many_keys() -> None:
    segments = [Segment(0, 100, 0, 0), Segment(100, 3, 0, 50), Segment(103, 1, 0, 0), Segment(104, 240, 0, 0)]
    for size in (2, 3, 4):
        ranks = [pieces_of(segments, size, place) for place in range(size)]
        rows = [row for p in ranks for s, a, b in p for row in range(s.start + a, s.start + b)]
        assert sorted(rows) == list(range(344))
        seen = [sum(s.shared + row + 1 for s, a, b in p for row in range(a, b)) for p in ranks]
        assert max(seen) < 1.05 * min(seen)
