"""Activations that the sampler kept: the training step's gradient is the same to the bit, without a forward pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs
from test_plain import make_model

from whet.algo.config import AlgoConfig
from whet.algo.packing import TrainingSequence, pack
from whet.generate import engine as engine_module
from whet.generate.activations import Activations
from whet.generate.engine import Engine, Request
from whet.generate.policy import load_policy
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.generate.scoring import score_micro_batch
from whet.kernels.cpu import ops as cpu
from whet.kernels.cpu.layers import KEPT
from whet.model.config import ModelConfig
from whet.model.lora.side import LoRAConfig, attach, choose, sides_of
from whet.model.transformer import LanguageModel
from whet.recipes.models import demo_policy
from whet.telemetry.log import read_metrics
from whet.train import rl
from whet.train.optim.step import OptimConfig
from whet.train.rl_config import RLConfig
from whet.types import MicroBatch

pytestmark = needs("kernels")

SHAPE = ModelConfig(
    family="llama", vocab_size=97, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=16, max_positions=400,
)  # fmt: skip
SHAPES = {
    "llama": SHAPE,
    "qwen2": replace(SHAPE, family="qwen2"),
    "untied": replace(SHAPE, tie_embeddings=False, attention_bias=True),
}


def make_requests(lengths: tuple[int, ...] = (3, 16, 40, 119), num_samples: int = 4) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    return [
        Request(
            prompt_ids=tuple(torch.randint(0, 97, (length,), generator=generator).tolist()),
            seeds=tuple(sequence_seed("kept", place, sample) for sample in range(num_samples)),
        )
        for place, length in enumerate(lengths)
    ]


def draw(
    model: LanguageModel, kept: Activations | None, requests: list[Request], **options: Any
) -> list[TrainingSequence]:
    filters = {name: options.pop(name) for name in ("top_p", "top_k") if name in options}
    engine = Engine(model, stop_ids=(5, 17), activations=kept, trains=True, **({"max_rows": 7} | options))
    rows = engine.generate(requests, SamplingParams(temperature=0.8, max_new_tokens=20, **filters))
    return [
        TrainingSequence(
            prompt_ids=request.prompt_ids,
            completion_ids=done.ids,
            sampler_logprobs=done.logprobs,
            kept=done.kept,
        )
        for request, row in zip(requests, rows, strict=True)
        for done in row
    ]


def gradient(
    model: LanguageModel, micros: tuple[MicroBatch, ...], kept: Activations | None
) -> tuple[Any, list[Any]]:
    model.zero_grad()
    scored = []
    for micro in micros:
        logprobs, entropies = score_micro_batch(model, micro, temperature=0.8, activations=kept)
        weights = torch.linspace(-1.0, 1.0, len(logprobs))
        ((logprobs * weights).sum() + 0.1 * entropies.sum()).backward()
        scored.append((logprobs.detach(), entropies.detach()))
    return scored, [parameter.grad for parameter in model.parameters()]


def count_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    plain = cpu.product

    def product(x: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        calls.append(x.shape[0])
        return plain(x, *arguments, **named)

    monkeypatch.setattr(cpu, "product", product)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_gradient_is_the_same_to_the_bit(
    name: str, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(threads)  # conftest.py sets it back
    model, kept = make_model(SHAPES[name]).to(dtype).train(), Activations(2**30)
    sequences = draw(model, kept, make_requests())
    assert len({s.num_tokens for s in sequences}) > 5  # ends at random, rows that move, prompts read again
    for budget in (10_000, 400):
        micros = pack(sequences, token_budget=budget).micro_batches
        calls = count_products(monkeypatch)
        expected = gradient(model, micros, None)
        whole = len(calls)
        calls.clear()
        found = gradient(model, micros, kept)
        assert len(calls) < whole / 1.5  # a forward pass less
        for mine, theirs in zip(found[0], expected[0], strict=True):
            assert torch.equal(mine[0], theirs[0])
            assert torch.equal(mine[1], theirs[1])
        for mine, theirs in zip(found[1], expected[1], strict=True):
            assert torch.equal(mine, theirs)
        monkeypatch.undo()


def with_adapters(model: LanguageModel, rank: int, targets: tuple[str, ...]) -> LanguageModel:
    """Freeze a model, and put adapters beside some of its products that change much."""
    config = LoRAConfig(rank=rank, targets=targets)
    model.requires_grad_(False)
    attach(model, config, choose(model, config), 0)
    for _, side in sides_of(model):
        with torch.no_grad():
            side.lora_B.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
    return model


@pytest.mark.parametrize(
    ("dtype", "rank", "targets", "threads"),
    [
        (torch.float32, 3, ("all-linear",), 2),
        (torch.bfloat16, 20, ("all-linear",), 1),
        (torch.bfloat16, 5, ("q_proj", "layers.1.mlp.down_proj"), 2),
    ],
)
def test_adapters_in_one_call_are_those_of_single_operations(
    dtype: torch.dtype, rank: int, targets: tuple[str, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(threads)
    model = with_adapters(make_model(SHAPE).to(dtype).train(), rank, targets)
    kept = Activations(2**30)
    plain = engine_module.can_fuse
    fused: list[bool] = []
    monkeypatch.setattr(engine_module, "can_fuse", lambda *a: fused.append(plain(*a)) or fused[-1])
    sequences = draw(model, kept, make_requests())
    assert fused == [True]
    for budget in (10_000, 400):
        for micro in pack(sequences, token_budget=budget).micro_batches:
            assert kept.tape(model, micro) is not None
            expected, found = (gradient(model, (micro,), given) for given in (None, kept))
            assert torch.equal(expected[0][0][0], micro.sampler_logprobs_M)
            assert torch.equal(found[0][0][0], micro.sampler_logprobs_M)
            for mine, theirs in zip(found[1], expected[1], strict=True):
                assert (mine is None) == (theirs is None)
                assert mine is None or torch.equal(mine, theirs)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (".side." in name), name


@pytest.mark.parametrize("filters", [{"top_p": 0.7}, {"top_k": 2}], ids=str)
def test_filters_need_no_forward_pass_either(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kept = make_model(SHAPE).train(), Activations(2**30)
    sequences = draw(model, kept, make_requests(), **filters)
    (micro,) = pack(sequences, token_budget=10_000).micro_batches
    calls = count_products(monkeypatch)
    expected = gradient(model, (micro,), None)
    whole = len(calls)
    calls.clear()
    found = gradient(model, (micro,), kept)
    assert len(calls) < whole / 1.5
    for scored, same in zip(found[0], expected[0], strict=True):
        assert torch.equal(scored[0], same[0])
        assert torch.equal(scored[0], micro.sampler_logprobs_M)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[1], expected[1], strict=True))


def test_a_second_turn_is_prefilled_with_the_first() -> None:
    """What is trained as a completion was in part a prompt: the first turn, and what a tool answered."""
    model, kept = make_model(SHAPE).train(), Activations(2**30)
    engine = Engine(model, stop_ids=(5, 17), max_rows=7, activations=kept)
    params = SamplingParams(temperature=0.8, max_new_tokens=12)
    first = make_requests((9, 30), 3)
    turns = engine.generate(first, params)
    seconds = [
        Request(
            prompt_ids=(*request.prompt_ids, *done.ids, 40, 41, 42),
            seeds=(sequence_seed("two", place, index),),
        )
        for place, (request, row) in enumerate(zip(first, turns, strict=True))
        for index, done in enumerate(row)
    ]
    ends = [row[0] for row in engine.generate(seconds, params)]
    sequences = []
    for place, (request, end) in enumerate(zip(seconds, ends, strict=True)):
        prompt = first[place // 3].prompt_ids
        sequences.append(
            TrainingSequence(prompt_ids=prompt, completion_ids=(*request.prompt_ids[len(prompt) :], *end.ids))
        )
    micros = pack(sequences, token_budget=10_000).micro_batches
    expected = gradient(model, micros, None)
    assert kept.tape(model, micros[0]) is not None
    found = gradient(model, micros, kept)
    assert torch.equal(found[0][0][0], expected[0][0][0])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[1], expected[1], strict=True))


def test_changed_weights_other_tokens_and_no_gradient_are_computed() -> None:
    model, kept = make_model(SHAPE).train(), Activations(2**30)
    sequences = draw(model, kept, make_requests())
    (micro,) = pack(sequences, token_budget=10_000).micro_batches
    assert kept.tape(model, micro) is not None
    with torch.no_grad():
        assert kept.tape(model, micro) is None
    other = [replace(sequences[0], completion_ids=(*sequences[0].completion_ids, 9)), *sequences[1:]]
    assert kept.tape(model, pack(other, token_budget=10_000).micro_batches[0]) is None
    with torch.no_grad():
        model.head_weight.mul_(1.0)  # the same numbers: but who can tell
    assert kept.tape(model, micro) is None
    draw(model, kept, make_requests((5,)))
    assert kept.tape(model, micro) is None  # of the rollout before
    kept.clear()
    assert not kept._layers


def test_a_wrong_activation_changes_the_gradient() -> None:
    """Control: the numbers of the tape are what the gradient is made of."""
    model, kept = make_model(SHAPE).train(), Activations(2**30)
    sequences = draw(model, kept, make_requests())
    micros = pack(sequences, token_budget=10_000).micro_batches
    expected = gradient(model, micros, kept)[1]
    for name in KEPT:
        with torch.inference_mode():
            kept._layers[1][name][7] += 0.01
        assert any(
            not torch.equal(a, b) for a, b in zip(gradient(model, micros, kept)[1], expected, strict=True)
        ), name
        with torch.inference_mode():
            kept._layers[1][name][7] -= 0.01


def test_what_does_not_fit_or_cannot_be_kept_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests()
    model, kept = make_model(SHAPE).train(), Activations(1000)
    (micro,) = pack(draw(model, kept, requests), token_budget=10_000).micro_batches
    assert kept.tape(model, micro) is None
    kept = Activations(2**30)
    for change in ("checkpoint", "long"):
        model = make_model(SHAPE).train()
        if change == "checkpoint":
            model.checkpoint_layers = True
        else:
            monkeypatch.setattr(
                engine_module, "FUSED_PREFILL", 8
            )  # prompts go through the model's own forward pass
        (micro,) = pack(draw(model, kept, requests), token_budget=10_000).micro_batches
        assert kept.tape(model, micro) is None, change


def test_a_run_is_the_same_without(
    tmp_path: Path, few_problems: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of `whet rl`: weights, metrics and samples; and the tapes were read."""
    shape = ModelConfig(
        hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, max_positions=64
    )  # fmt: skip
    read: list[bool] = []
    plain = Activations.tape

    def tape(self: Activations, *arguments: Any) -> cpu.Tape | None:
        found = plain(self, *arguments)
        read.append(found is not None)
        return found

    monkeypatch.setattr(Activations, "tape", tape)
    results = []
    for gib in (2.0, 0.0):
        config = RLConfig(
            out=str(tmp_path / f"{gib}"),
            policy=replace(demo_policy(), model=shape, max_rows=64),
            sampling=SamplingParams(max_new_tokens=10),
            optim=OptimConfig(lr=1e-3, warmup_steps=0, token_budget=150),
            algo=AlgoConfig(uninformative="keep", entropy_coef=0.01),
            rewards={"format": 1.0, "correct": 1.0},
            num_steps=3,
            num_prompts=4,
            group_size=4,
            kept_gib=gib,
            preflight="warn",
        )
        policy = rl.train(config)
        rows = read_metrics(Path(config.out))
        kept = [
            {n: v for n, v in row.items() if n in ("rl/loss", "rl/grad_norm", "rl/entropy")} for row in rows
        ]
        results.append((kept, (Path(config.out) / "samples.jsonl").read_text(), policy.model.state_dict()))
    assert read
    assert all(read)
    (metrics, samples, weights), (others, same, expected) = results
    assert metrics == others
    assert samples == same
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    start = load_policy(config.policy, seed=config.seed).model.state_dict()
    assert any(not torch.equal(weights[name], start[name]) for name in expected)
