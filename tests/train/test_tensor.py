"""Matrices that ranks divide: gradients, checkpoints and trust are those of whole ones."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from test_shards import SHAPE, assert_equal, bench, tiny, weights

from whet.algo.config import OffPolicyConfig
from whet.algo.packing import TrainingSequence, pack
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.probe import ProbeResult, probe_divided
from whet.generate.scoring import score_micro_batch, score_texts
from whet.model.config import Block, LayerSpec, ModelConfig
from whet.model.lora.side import LoRAConfig, attach, choose
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model
from whet.ranks.collectives import is_share, rank, shard, sum_gradients, world_size
from whet.ranks.context import sharing
from whet.ranks.fsdp import ParallelConfig, full, gathered, local
from whet.recipes.models import demo_policy
from whet.train import sft
from whet.train.optim.step import OptimConfig, Optimizer, forward_backward, shard_layers
from whet.train.rl_config import RLConfig
from whet.train.rollout.overlap import OverlapConfig
from whet.types import MicroBatch, UserError

TENSOR = ParallelConfig(tensor=2)
WORDS = replace(SHAPE, vocab_size=48)
SHAPES = {
    "plain": WORDS,
    "untied, head norms, biases": replace(
        WORDS, tie_embeddings=False, family="qwen2", block=Block(qk_norm=True)
    ),
    "windows": replace(WORDS, block=Block(layers=(LayerSpec(window=5), LayerSpec()), attention_cap=3.0)),
    "gate": replace(WORDS, block=Block(is_gated=True)),
    "reward": replace(WORDS, is_reward=True),
}


def model_of(shape: ModelConfig) -> LanguageModel:
    model = build_model(shape).double()
    init_weights(model, 0)
    with torch.no_grad():  # larger than a fresh model's, so that attention is no mean; biases are not 0
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(0.1)
    return model


def sequences() -> list[TrainingSequence]:
    """Of lengths that divide well and do not, one prompt shared by two."""
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 48, (count,), generator=generator).tolist())

    shared = ids(9)
    pairs = [(5, 12), (1, 1), (7, 20), (3, 2), (9, 9), (9, 4), (2, 1)]
    return [
        TrainingSequence(prompt_ids=shared if prompt == 9 else ids(prompt), completion_ids=ids(completion))
        for prompt, completion in pairs
    ]


def gradients(name: str, layout: ParallelConfig, *, recompute: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and all gradients of a batch that the ranks have a part of each, summed over them.

    The loss mixes the numbers of a whole sequence, as DPO's and GSPO's do.
    """
    model = model_of(SHAPES[name])
    shard_layers(model, layout)
    model.checkpoint_layers = recompute
    own = sharing(model)

    def score(micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        if model.config.is_reward:
            return score_texts(model, micro).cos().sum(), {}
        logprobs_M, entropy_M = score_micro_batch(model, micro, temperature=0.7)
        weights_M = micro.targets_M.double().cos()
        sums_B = logprobs_M.new_zeros(len(micro.indices_B)).index_add(
            0, micro.sequence_M, logprobs_M * weights_M
        )
        return (sums_B.sin() * 3).sum() + (entropy_M * weights_M).sum(), {}

    everything = sequences()
    mine = [everything[index] for index in shard(len(everything))]
    cut = pack(mine, token_budget=40, dtype=torch.float64, sharing=own).micro_batches
    totals = forward_backward(cut, score, model)
    sum_gradients(model.parameters())
    found = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return totals["loss"], found


def differences(expected: dict[str, tuple[float, dict[str, torch.Tensor]]]) -> list[float]:
    warnings.simplefilter("ignore")
    worst = []
    for place, (name, (loss, wanted)) in enumerate(expected.items()):
        mine, found = gradients(name, TENSOR, recompute=place == 0)
        total = torch.tensor([mine], dtype=torch.float64)
        torch.distributed.all_reduce(total)
        assert found.keys() == wanted.keys()
        pairs = [(total, torch.tensor([loss], dtype=torch.float64))]
        pairs += [(found[name], wanted[name]) for name in wanted]
        worst.append(max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in pairs))
    return worst


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.ci)])
def test_the_gradient_is_that_of_whole_matrices(ranks: int) -> None:
    expected = {name: gradients(name, ParallelConfig(), recompute=False) for name in SHAPES}
    for worst in run_ranks(ranks, differences, expected):
        assert worst == pytest.approx([0.0] * len(SHAPES), abs=1e-12)


OWN = replace(demo_policy(), model=SHAPE)


def held() -> list[Any]:
    """Return what is said of trust and of what a rank holds, and whether whole matrices are the ones from before."""
    warnings.simplefilter("ignore")
    policy = load_policy(OWN, seed=0)
    model, before = policy.model, ProbeResult(exact=True, max_gap=0.0)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = torch.tensor([[1, 2, 3]])
    expected = model.logits(tokens).detach()
    assert str(probe_divided(policy, before)).startswith("exact")
    shard_layers(model, TENSOR)
    shard_layers(model, TENSOR)  # once is enough
    probe = probe_divided(policy, before)
    layers = list(model.layers.parameters())
    share = sum(local(p).numel() for p in layers) / sum(p.numel() for p in layers)
    with gathered(model, None), gathered(model):
        same = all(torch.equal(p, whole[name]) for name, p in model.named_parameters())
        alone = torch.equal(model.logits(tokens), expected) if rank() else True  # no collective in it
    again = sum(map(is_share, model.parameters()))
    with pytest.raises(UserError) as caught:
        Optimizer(model, OptimConfig(adam_bits=8))
    assert world_size() == 2
    return [probe.exact, probe.max_gap, str(probe), share, same, alone, again, str(caught.value)]


def test_a_rank_holds_its_share_and_trust_is_not_called_exact() -> None:
    for exact, gap, told, share, same, alone, again, said in run_ranks(2, held):
        assert not exact
        assert 0 < gap < 1e-4
        assert told.startswith("approx: max |delta log-prob|")
        assert "parallel.tensor" in told
        assert share == pytest.approx(0.5, abs=0.01)
        assert (same, alone, again) == (True, True, 14)
        assert said.startswith("optim.adam_bits = 8 with parallel.tensor")


def refused() -> list[str]:
    """Return what is said of models and layouts that cannot be divided."""
    warnings.simplefilter("ignore")
    shapes = [
        (SHAPE, ParallelConfig(tensor=3)),
        (replace(SHAPE, num_heads=3, num_kv_heads=3), TENSOR),
        (replace(SHAPE, num_kv_heads=1), TENSOR),
        (replace(SHAPE, intermediate_size=47), TENSOR),
        (replace(SHAPE, attention_bias=True), TENSOR),
        (replace(SHAPE, family="gpt2", num_kv_heads=4), TENSOR),
    ]
    models = [(build_model(shape), layout) for shape, layout in shapes]
    adapted = build_model(SHAPE)
    attach(adapted, LoRAConfig(rank=2), choose(adapted, LoRAConfig(rank=2)), 0)
    models.append((adapted, TENSOR))
    said = []
    for model, layout in models:
        with pytest.raises(UserError) as caught:
            shard_layers(model, layout)
        said.append(str(caught.value))
    return said


def test_what_cannot_be_divided_is_refused() -> None:
    beginnings = [
        "parallel.tensor = 3: expected a divisor of the 2 ranks",
        "parallel.tensor = 2: the model has 3 query heads, expected a multiple of 2",
        "parallel.tensor = 2: the model has 1 key/value heads",
        "parallel.tensor = 2: the model has 47 feed-forward channels",
        "parallel.tensor = 2: this model adds biases to sums over heads",
        "parallel.tensor = 2: expected a decoder of grouped-query attention",
        "parallel.tensor = 2 with adapters",
    ]
    for found in run_ranks(2, refused):
        assert [text[: len(start)] for text, start in zip(found, beginnings, strict=True)] == beginnings


def test_settings_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="parallel.tensor = 2 with parallel.kind = fsdp"):
        ParallelConfig(kind="fsdp", tensor=2)
    with pytest.raises(ValueError, match="parallel.tensor = 2 with parallel.context = 2"):
        ParallelConfig(context=2, tensor=2)
    with pytest.raises(ValueError, match="parallel.balance = off with parallel.tensor = 2"):
        ParallelConfig(tensor=2, balance="off")
    with pytest.raises(ValueError, match="overlap.mode = async with parallel.tensor = 2"):
        RLConfig(
            out="",
            policy=PolicyConfig(init="base"),
            parallel=TENSOR,
            overlap=OverlapConfig(mode="async"),
            off_policy=OffPolicyConfig(staleness=1),
        )


def work(folder: str, jobs: list[str]) -> None:
    warnings.simplefilter("ignore")
    for program in jobs:
        bench().run(program, "tensor", Path(folder) / "base", Path(folder) / "tensor" / program)


@pytest.mark.slow
def test_ranks_that_divide_matrices_train_as_one_process(tmp_path: Path) -> None:
    equal, jobs = bench(), ["sft, muon", "dpo", "ppo with a reference"]
    base = equal.make_bases(tmp_path)
    for program in jobs:
        equal.run(program, "replicate", base, tmp_path / "one" / program)
        assert run_ranks(2, work, str(tmp_path), [program]) == [None, None]
        pair = tmp_path / "one" / program, tmp_path / "tensor" / program
        assert equal.difference(*(equal.checked(base, out) for out in pair)) < 1e-11, program


def train(out: str, resume: int, layout: ParallelConfig, deterministic: str = "warn") -> None:
    warnings.simplefilter("ignore")
    config = tiny(Path(out), parallel=layout)
    safety = replace(config.safety, deterministic=deterministic)  # pyright: ignore[reportArgumentType]
    sft.train(replace(config, safety=safety), resume=resume or False)


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    """Bitwise in the same one, up to rounding in one process and in shards, in both directions."""
    run, kept = tmp_path / "run", tmp_path / "kept"
    assert run_ranks(2, train, str(run), 0, TENSOR) == [None, None]
    expected = weights(run)
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    shutil.copytree(run, kept)
    assert run_ranks(2, train, str(run), 2, TENSOR, "strict") == [None, None]
    assert_equal(weights(run), expected, exactly=True)
    for ranks, layout in ((1, TENSOR), (2, ParallelConfig(kind="fsdp"))):
        shutil.rmtree(run)
        shutil.copytree(kept, run)
        assert run_ranks(ranks, train, str(run), 2, layout) == [None] * ranks
        assert_equal(weights(run), expected, exactly=False)
    shutil.rmtree(run)
    assert run_ranks(1, train, str(run), 0, TENSOR) == [None]
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    assert run_ranks(2, train, str(run), 2, TENSOR) == [None, None]  # from what one process wrote
    assert_equal(weights(run), expected, exactly=False)
