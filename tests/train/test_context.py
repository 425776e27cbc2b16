"""Micro-batches over the ranks: how they are dealt out and cut, and what ranks that share one compute."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from test_shards import SHAPE, assert_equal, bench, tiny, weights

from whet.algo.kept import encode_kept, join_kept, keep_only, kept_of
from whet.algo.packing import TrainingSequence, _exchange, pack, split_by_budget
from whet.generate.policy import load_policy
from whet.generate.sampling import SamplingParams
from whet.model import attention
from whet.model.attention import Packed, Rule
from whet.ranks import context
from whet.ranks.context import Costs, Sharing, cut, deal, sharing
from whet.ranks.fsdp import ParallelConfig
from whet.recipes.models import demo_policy
from whet.train import rl, sft
from whet.train.optim.safety import TokenBudget
from whet.train.optim.step import OptimConfig, costs_of, shard_layers
from whet.train.rl_config import RLConfig
from whet.types import MicroBatch, Segment, Split, UserError

SEGMENTS = (  # a long one, a prompt with two long completions, a short one, and a prompt with short completions
    *(Segment(0, 150, 0, 0), Segment(150, 21, 0, 0), Segment(171, 70, 150, 21), Segment(241, 37, 150, 21)),
    *(Segment(278, 5, 0, 0), Segment(283, 4, 0, 0), Segment(287, 3, 283, 4), Segment(290, 9, 283, 4)),
)
ROWS = 299
COSTS = Costs(((0, 0.02), (16, 0.01)))


# Work, and how it is dealt out.


def test_the_work_of_a_sequence_counts_its_pairs() -> None:
    for window in (0, 1, 7, 50):
        for first, count in ((0, 1), (0, 40), (3, 4), (6, 9), (60, 5)):
            pairs = sum(min(p + 1, window or p + 1) for p in range(first, first + count))
            assert Costs(((window, 0.5),)).of(first, count) == count + 0.5 * pairs, (window, first, count)


def test_a_models_costs_follow_its_shape() -> None:
    shape = replace(SHAPE, vocab_size=100)
    layer = 32 * (2 * 4 * 8 + 2 * 2 * 8 + 3 * 64)
    assert costs_of(shape).pairs == ((0, 2 * 2 * 4 * 8 / (2 * layer + 100 * 32)),)


def skewed(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.exp(torch.randn(count, generator=generator) * 1.2 + 5)
    return [int(n) for n in drawn.clamp(2, 4000)]


def lockstep(work: list[list[float]]) -> float:
    """Return the time of groups that wait for each other after every micro-batch."""
    return sum(map(max, zip_longest(*work, fillvalue=0.0)))


def test_every_group_gets_as_many_micro_batches_and_as_much_work() -> None:
    lengths = skewed(200)
    costs = [Costs(((0, 1e-3),)).of(0, n) for n in lengths]
    for groups in (1, 2, 4, 8):
        dealt = deal(lengths, costs, 4096, groups)
        assert sorted(i for bins in dealt for members in bins for i in members) == list(range(200))
        assert len({len(bins) for bins in dealt}) == 1
        assert all(
            sum(lengths[i] for i in members) <= 4096 or len(members) == 1
            for bins in dealt
            for members in bins
        )
        plain = [split_by_budget(lengths[group::groups], 4096) for group in range(groups)]
        before = [[sum(costs[group::groups][i] for i in m) for m in bins] for group, bins in enumerate(plain)]
        after = [[sum(costs[i] for i in m) for m in bins] for bins in dealt]
        assert abs(sum(map(sum, after)) - sum(costs)) < 1e-6
        if groups > 1:
            assert lockstep(after) < 0.93 * lockstep(before), groups
            assert max(map(sum, after)) < 0.93 * max(map(sum, before)), groups
        assert dealt == deal(lengths, costs, 4096, groups)
    assert [len(bins) for bins in deal([9, 5], [9.0, 5.0], 4, 4)] == [1, 1, 0, 0]
    assert deal([], [], 4, 2) == [[], []]


def test_ranks_of_a_group_have_all_rows_once_and_as_much_work() -> None:
    for count in (2, 3, 4):
        parts = cut(SEGMENTS, count, COSTS)
        rows = [
            SEGMENTS[p.segment].start + row
            for part in parts
            for p in part
            for row in range(p.first, p.first + p.length)
        ]
        assert sorted(rows) == list(range(ROWS))
    long = [Segment(0, 4096, 0, 0)]
    work = [sum(COSTS.of(piece.first, piece.length) for piece in part) for part in cut(long, 4, COSTS)]
    assert max(work) == pytest.approx(min(work), rel=1e-3)  # the halves alone would differ threefold
    assert max(sum(p.length for p in part) for part in cut(long, 4, COSTS)) == 1024


def test_sequences_come_back_from_other_ranks_bitwise() -> None:
    row = TrainingSequence(
        prompt_ids=(1, 2),
        completion_ids=(3, 4),
        trained=(True, False),
        advantage=1 / 3,
        group="a",
        num_group_tokens=2,
        sampler_logprobs=(-0.1,),
        kept=("AAAA",),
        turn_rewards=((0, 0.5),),
        advantages_T=torch.tensor([1 / 7]),
    )
    (again,) = _exchange([row], [(0, 0)], [[0]], Sharing(1, COSTS)).values()
    assert again.advantages_T is not None
    assert torch.equal(again.advantages_T, torch.tensor([1 / 7]).double())
    assert replace(again, advantages_T=None) == replace(row, advantages_T=None)


def test_sets_of_some_tokens() -> None:
    left = (
        torch.rand(6, 70, generator=torch.Generator().manual_seed(0)) < torch.tensor([0.05, 0.9] * 3)[:, None]
    )
    left[:, 0] = True
    kept = join_kept(encode_kept(left), torch.device("cpu"))
    some = torch.tensor([0, 3, 5])
    logits = torch.zeros(3, 70)
    assert torch.equal(keep_only(logits, kept_of(kept, some)) == 0, left[some])


# Attention of ranks that share a batch, one after the other in this process.


def split_of(place: int, count: int) -> Split:
    micro = MicroBatch.__new__(MicroBatch)  # only what `split` reads
    object.__setattr__(micro, "segments", SEGMENTS)
    object.__setattr__(micro, "tokens_N", torch.zeros(ROWS, dtype=torch.int64))
    found: list[Split] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "rank", lambda: place)
        patch.setattr(context, "replace", lambda micro, split: found.append(split))
        context.split(micro, Sharing(count, COSTS))
    return found[0]


@pytest.mark.parametrize(
    ("kind", "rule", "dtype", "channels"),
    [
        ("exact", None, torch.float32, 16),  # the C++ kernel
        ("exact", None, torch.float32, 8),
        ("exact", None, torch.float64, 8),
        ("fast", None, torch.float64, 8),
        ("exact", Rule(window=16), torch.float64, 8),
        ("exact", Rule(window=40, cap=5.0), torch.float32, 8),
        ("exact", Rule(sinks_H=torch.tensor([0.5, -1.0, 2.0, 0.0])), torch.float64, 8),
    ],
)
def test_ranks_compute_their_rows_as_one_would(
    kind: Any, rule: Rule | None, dtype: torch.dtype, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (
        torch.randn(ROWS, heads, channels, generator=generator).to(dtype) for heads in (4, 2, 2, 4)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    cpu = torch.device("cpu")
    whole = Packed(SEGMENTS, cpu, kind).attend(0, q, k, v, rule)
    expected = torch.autograd.grad(whole, (q, k, v), grad)
    monkeypatch.setattr(attention, "gather_keys", lambda k, v, _: (k, v))
    for count in (2, 4):
        sums = [torch.zeros_like(x) for x in (q, k, v)]
        for place in range(count):
            found = split_of(place, count)
            rows = found.rows_N
            padded = torch.cat((q[rows], q[:5]))  # row padding
            out = Packed(SEGMENTS, cpu, kind, split=found).attend(0, padded, k, v, rule)
            assert not out[len(rows) :].any()
            if dtype == torch.float32:
                assert torch.equal(out[: len(rows)], whole[rows])
            else:
                torch.testing.assert_close(out[: len(rows)], whole[rows], rtol=0, atol=1e-13)
            up = torch.cat((grad[rows], torch.ones_like(grad[:5])))
            for total, part in zip(sums, torch.autograd.grad(out, (q, k, v), up), strict=True):
                total += part
        limit = 1e-12 if dtype == torch.float64 else 2e-5
        for total, x in zip(sums, expected, strict=True):
            torch.testing.assert_close(total, x, rtol=0, atol=limit)


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="parallel.context = 0: expected 1 or more"):
        ParallelConfig(context=0)
    with pytest.raises(ValueError, match="parallel.balance = off with parallel.context = 2"):
        ParallelConfig(context=2, balance="off")


# Real ranks.


def refused() -> list[str]:
    said = []
    policy = load_policy(replace(demo_policy(), model=SHAPE), seed=0)
    other = load_policy(replace(demo_policy(), model=SHAPE), seed=0)
    layers = tuple(replace(spec, mixer="convolution") for spec in other.model.config.layers)
    config = replace(other.model.config, block=replace(other.model.config.block, layers=layers))
    object.__setattr__(other.model, "config", config)
    for model, layout in (
        (policy.model, ParallelConfig(context=3)),
        (other.model, ParallelConfig(context=2)),
    ):
        with pytest.raises(UserError) as caught:
            shard_layers(model, layout)
        said.append(str(caught.value))

    def full(_: int) -> None:
        raise MemoryError

    with pytest.raises(UserError) as caught:
        TokenBudget(100, [], is_shared=True).run(full, 10)
    return [*said, str(caught.value)]


@pytest.mark.ci
def test_what_cannot_be_shared_is_refused() -> None:
    beginnings = [
        "parallel.context = 3: expected a divisor of the 2 ranks",
        "parallel.context = 2: layers of this model go from token to token",
        "out of memory with 100 tokens in a micro-batch, which ranks that share a model or micro-batches cannot",
    ]
    for found in run_ranks(2, refused):
        assert [text[: len(start)] for text, start in zip(found, beginnings, strict=True)] == beginnings


def scored(lengths: list[int]) -> list[float]:
    """Return each token's gradient and the loss of a tiny batch, also where a rank has no row or no token."""
    warnings.simplefilter("ignore")
    policy = load_policy(replace(demo_policy(), model=SHAPE), seed=0, dtype=torch.float64)
    alone = load_policy(replace(demo_policy(), model=SHAPE), seed=0, dtype=torch.float64)
    shard_layers(policy.model, ParallelConfig(context=2))
    own = sharing(policy.model)
    assert own is not None
    rows = [
        TrainingSequence(prompt_ids=(1, n % 7), completion_ids=tuple(2 + i * n % 9 for i in range(n - 2)))
        for n in lengths
    ]
    everything = pack(rows, token_budget=10_000, dtype=torch.float64).micro_batches[0]
    shared = context.split(everything, own)
    worst = []
    losses = []
    for subject, micro in ((policy, shared), (alone, everything)):
        logprobs_M, entropy_M = subject.score(micro)
        loss = (logprobs_M.square() * torch.arange(1, len(logprobs_M) + 1)).sum() + entropy_M.sum()
        loss.backward()
        losses.append(float(loss.detach()))
    for mine, theirs in zip(policy.model.parameters(), alone.model.parameters(), strict=True):
        total = torch.zeros_like(mine) if mine.grad is None else mine.grad.clone()
        torch.distributed.all_reduce(total)
        expected = torch.zeros_like(mine) if theirs.grad is None else theirs.grad
        worst.append(float((total - expected).abs().max()) / max(1e-9, float(expected.abs().max())))
    return [max(worst), abs(losses[0] - losses[1])]


@pytest.mark.ci
@pytest.mark.parametrize("lengths", [[60, 33, 9, 4], [3], [40]])
def test_gradients_of_a_shared_batch_add_up_to_one_ranks(lengths: list[int]) -> None:
    for worst, gap in run_ranks(2, scored, lengths):
        assert worst < 1e-11
        assert gap < 1e-9


def work(folder: str, jobs: list[tuple[str, str]]) -> None:
    warnings.simplefilter("ignore")
    equal = bench()
    for program, layout in jobs:
        equal.run(program, layout, Path(folder) / "base", Path(folder) / layout / program)


@pytest.mark.slow
def test_ranks_that_share_micro_batches_train_as_one_process(tmp_path: Path) -> None:
    equal = bench()
    base = equal.make_bases(tmp_path)
    jobs = [
        ("sft, recomputed layers", "context"),
        ("grpo, experts", "context"),
        ("ppo with a reference", "fsdp, context"),
        ("dpo", "balanced"),
    ]
    for program, _ in jobs:
        equal.run(program, "replicate", base, tmp_path / "one" / program)
    for job in jobs:
        assert run_ranks(2, work, str(tmp_path), [job]) == [None, None], job
    for program, layout in jobs:
        pair = tmp_path / "one" / program, tmp_path / layout / program
        assert equal.difference(*(equal.checked(base, out) for out in pair)) < 1e-11, program


def train(out: str, resume: int = 0, **layout: Any) -> None:
    warnings.simplefilter("ignore")
    sft.train(tiny(Path(out), parallel=ParallelConfig(**layout)), resume=resume or False)


@pytest.mark.slow
def test_a_run_of_shared_batches_goes_on_in_another_layout(tmp_path: Path) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    assert run_ranks(2, train_shared, str(run)) == [None, None]
    expected, told = weights(run), losses(run)
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    shutil.copytree(run, kept)
    assert run_ranks(1, train, str(run), 2) == [None]  # one process
    assert_equal(weights(run), expected, exactly=False)
    assert losses(run) == pytest.approx(told, rel=1e-5)  # counted once, though two ranks compute them
    for resume, exactly in ((train_shared, True), (train_in_shards, False)):
        shutil.rmtree(run)
        shutil.copytree(kept, run)
        assert run_ranks(2, resume, str(run), 2) == [None, None]
        assert_equal(weights(run), expected, exactly=exactly)


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row["sft/loss"] for row in rows if "sft/loss" in row}
    return [found[step] for step in (3, 4)]


def train_shared(out: str, resume: int = 0) -> None:
    train(out, resume, context=2)


def train_in_shards(out: str, resume: int) -> None:
    train(out, resume, kind="fsdp")


def sampled(out: str, head_dim: int) -> list[float]:
    warnings.simplefilter("ignore")
    config = RLConfig(
        out=out,
        policy=replace(demo_policy(), model=replace(SHAPE, head_dim=head_dim), max_rows=64),
        parallel=ParallelConfig(context=2),
        rewards={"repetition": 1.0, "cosine_length": 1.0},
        sampling=SamplingParams(max_new_tokens=30),
        optim=OptimConfig(lr=1e-3, warmup_steps=1),
        num_steps=2,
        num_prompts=4,
        group_size=4,
        preflight="warn",
        validation_problems=3,
    )
    for _ in rl.steps(config):
        pass
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [row["rl/ratio_drift"] for row in rows if "rl/loss" in row]


@pytest.mark.ci
@pytest.mark.parametrize("head_dim", [8, 16])
def test_the_ratio_is_exactly_one_where_ranks_share_sequences(tmp_path: Path, head_dim: int) -> None:
    """Each rank samples alone, and computes its rows of a shared batch with the same bits: by either kernel."""
    assert run_ranks(2, sampled, str(tmp_path), head_dim) == [[0.0, 0.0]] * 2
