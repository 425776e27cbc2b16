"""Teams of ranks that run training passes together: positions or matrices are divided, and nothing else changes."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from safetensors.torch import load_file

from whet.algo.config import OffPolicyConfig
from whet.algo.kept import encode_kept
from whet.algo.packing import Spread, TrainingSequence, pack, split_evenly
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.probe import ProbeResult, probe_team
from whet.generate.scoring import hidden_rows, score_micro_batch, score_texts
from whet.model.config import Block, LayerSpec, ModelConfig, sequence_flops
from whet.model.split import pieces_of
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model
from whet.ranks.collectives import balanced, shard, sum_gradients, world_size
from whet.ranks.fsdp import ParallelConfig, full
from whet.recipes.models import demo_policy
from whet.train import sft
from whet.train.optim.safety import SafetyConfig, TokenBudget
from whet.train.optim.step import OptimConfig, forward_backward, shard_layers
from whet.train.rl_config import RLConfig
from whet.train.rollout.overlap import OverlapConfig
from whet.train.sft import SFTConfig
from whet.types import MicroBatch, Segment, UserError

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
OWN = replace(SHAPE, vocab_size=ModelConfig.vocab_size)
"""Without a number of words, which come from a tokenizer."""
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


def probed() -> list[Any]:
    """Return what the probe says where ranks share a pass, and the largest difference without one."""
    warnings.simplefilter("ignore")
    found = []
    for layout in (ParallelConfig(), CONTEXT):
        policy = load_policy(replace(demo_policy(), model=OWN), seed=0)
        shard_layers(policy.model, layout)
        result = probe_team(policy, ProbeResult(exact=True, max_gap=0.0))
        found.append([result.exact, result.max_gap, str(result)])
    return found


def test_a_shared_pass_is_never_called_exact() -> None:
    for (exact, _, said), (is_exact, gap, told) in run_ranks(2, probed):
        assert exact
        assert said.startswith("exact")
        assert not is_exact
        assert 0 < gap < 1e-4
        assert told.startswith("approx: max |delta log-prob|")
        assert "parallel.context" in told


def refused() -> list[str]:
    """Return what is said of models and layouts that cannot be shared."""
    warnings.simplefilter("ignore")
    said = []
    odd = replace(SHAPE, num_heads=3, num_kv_heads=3)
    convolution = replace(SHAPE, block=Block(layers=(LayerSpec(mixer="convolution"), LayerSpec())))
    cases = [
        (SHAPE, ParallelConfig(context=4)),
        (convolution, CONTEXT),
        (odd, TENSOR),
        (replace(SHAPE, num_kv_heads=1), TENSOR),
        (replace(SHAPE, intermediate_size=47), TENSOR),
        (replace(SHAPE, attention_bias=True), TENSOR),
        (replace(SHAPE, family="gpt2", num_kv_heads=4), TENSOR),
    ]
    for shape, layout in cases:
        with pytest.raises(UserError) as caught:
            shard_layers(build_model(shape), layout)
        said.append(str(caught.value))
    policy = load_policy(replace(demo_policy(), model=OWN), seed=0)
    shard_layers(policy.model, CONTEXT)

    def full_memory(_: int) -> None:
        raise MemoryError

    with pytest.raises(UserError) as caught:
        TokenBudget(100, policy.model.parameters()).run(full_memory, 10)
    return [*said, str(caught.value)]


def test_what_ranks_cannot_share_is_refused() -> None:
    beginnings = [
        "parallel.context = 4: expected a divisor of the 2 ranks",
        "parallel.context: this model has layers of kind convolution",
        "parallel.tensor = 2: the model has 3 query heads, expected a multiple of 2",
        "parallel.tensor = 2: the model has 1 key/value heads",
        "parallel.tensor = 2: the model has 47 feed-forward channels",
        "parallel.tensor = 2: this model adds biases to sums over heads",
        "parallel.tensor = 2: expected a decoder of grouped-query attention",
        "out of memory with 100 tokens in a micro-batch, which ranks that share a model or its passes cannot halve",
    ]
    for found in run_ranks(2, refused):
        assert [text[: len(start)] for text, start in zip(found, beginnings, strict=True)] == beginnings


def test_settings_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="parallel.tensor = 2 with parallel.kind = fsdp"):
        ParallelConfig(kind="fsdp", tensor=2)
    with pytest.raises(ValueError, match="parallel.tensor = 2 with parallel.context = 2"):
        ParallelConfig(context=2, tensor=2)
    policy = PolicyConfig(init="base")
    with pytest.raises(ValueError, match="overlap.mode = stream with parallel.context"):
        RLConfig(out="", policy=policy, parallel=CONTEXT, overlap=OverlapConfig(mode="stream"))
    with pytest.raises(ValueError, match="router_replay with parallel.tensor"):
        RLConfig(out="", policy=policy, parallel=TENSOR, off_policy=OffPolicyConfig(router_replay=True))


def test_items_are_dealt_by_what_they_cost() -> None:
    costs = [9.0, 1.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0]
    owners = balanced(costs, [index % 2 for index in range(8)], 2)
    loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == place) for place in (0, 1)]
    assert loads == [10.0, 10.0]
    assert balanced(costs, [0] * 8, 1) == [0] * 8
    assert balanced([1.0, 1.0], [0, 1], 2) == [0, 1]  # nothing moves without need
    assert balanced([], [], 3) == []


def test_the_estimate_is_of_weights_and_pairs() -> None:
    """Against counts made by hand: 2 per weight and token, 4 per pair, head and channel."""
    head, layer = 48 * 32, 32 * 8 * (4 + 2 + 2 + 4) + 3 * 32 * 48
    pairs, window = 10 * 11 // 2, 5 * 6 // 2 + 5 * 5
    plain = 10 * 2 * (head + 2 * layer)
    assert sequence_flops(SHAPE, 10) == plain + 4 * 4 * 8 * 2 * pairs
    assert sequence_flops(WINDOWS, 10) == plain + 4 * 4 * 8 * (window + pairs)


def test_ranks_pack_as_many_micro_batches_alike() -> None:
    """The rank with one long sequence has a micro-batch for each of the other's, and the dearest ones meet."""
    ranks = [[60, 20, 20], [50, 50, 50]]
    seen: list[list[float]] = []

    def first(values: list[float]) -> list[float]:
        seen.append(values)
        return []

    for lengths in ranks:
        split_evenly(lengths, [float(n) for n in lengths], 100, Spread(cost=float, agree=first))
    assert seen == [[100.0], [100.0, 50.0]]
    spread = Spread(cost=float, agree=lambda _: [100.0, 50.0])
    packed = [split_evenly(lengths, [float(n) for n in lengths], 100, spread) for lengths in ranks]
    assert packed == [[[0, 2], [1]], [[0, 1], [2]]]
    assert split_evenly([], [], 100, spread) == []


def test_a_sequence_is_the_same_on_another_rank() -> None:
    sequence = TrainingSequence(
        prompt_ids=(1, 2),
        completion_ids=(3, 4, 5),
        trained=(True, False, True),
        advantage=1 / 3,
        group="ä",
        sampler_logprobs=(-0.1, -float("inf")),
        kept=("QQ==", ""),
        turn_rewards=((1, 0.1),),
        advantages_T=torch.tensor([1 / 3, 2.0], dtype=torch.float64),
        ref_logprobs_T=torch.tensor([0.1, -0.2]),
    )
    found = TrainingSequence.from_row(json.loads(json.dumps(sequence.as_row())))
    for item in fields(sequence):
        mine, theirs = getattr(sequence, item.name), getattr(found, item.name)
        if isinstance(mine, torch.Tensor):
            assert theirs.dtype == mine.dtype
            assert torch.equal(theirs, mine)
        else:
            assert theirs == mine


def train(out: str, resume: int, layout: ParallelConfig, deterministic: str) -> None:
    warnings.simplefilter("ignore")
    config = SFTConfig(
        out=out,
        policy=replace(demo_policy(), model=OWN, max_rows=64),
        parallel=layout,
        optim=OptimConfig(lr=1e-3, warmup_steps=1, token_budget=100),
        num_steps=4,
        save_every=2,
        batch_size=6,
        validation_problems=0,
        safety=SafetyConfig(background=False, deterministic=deterministic),  # pyright: ignore[reportArgumentType]
    )
    sft.train(config, resume=resume or False)


@pytest.mark.ci
@pytest.mark.parametrize("layout", [CONTEXT, TENSOR])
def test_a_run_of_a_team_goes_on_in_one_process_and_back(tmp_path: Path, layout: ParallelConfig) -> None:
    """Bitwise in the same layout, up to rounding in one process; what one process wrote, a team reads."""
    run, last = tmp_path / "run", Path("checkpoints") / "step_00000004"

    def weights() -> dict[str, torch.Tensor]:
        return load_file(run / last / "model.safetensors")

    assert run_ranks(2, train, str(run), 0, layout, "strict") == [None, None]
    expected = weights()
    shutil.rmtree(run / last)
    assert run_ranks(2, train, str(run), 2, layout, "strict") == [None, None]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights().items())
    for ranks in (1, 2):
        shutil.rmtree(run / "checkpoints" / "step_00000004")
        if ranks == 2:  # from the first step of one process
            shutil.rmtree(run)
            assert run_ranks(1, train, str(run), 0, layout, "warn") == [None]
            shutil.rmtree(run / last)
        assert run_ranks(ranks, train, str(run), 2, layout, "warn") == [None] * ranks
        for name, tensor in weights().items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-6)
