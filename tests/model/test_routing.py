"""Experts as the sampler chose them, taken by the trainer; and the load-balancing loss against transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import family_cases as cases
import pytest
import torch

from whet.algo.kept import encode_experts, join_experts
from whet.algo.packing import TrainingSequence, pack
from whet.generate.engine import Engine, Request
from whet.generate.policy import Policy
from whet.generate.rows import Completion
from whet.generate.sampling import SamplingParams
from whet.generate.scoring import hidden_rows
from whet.model.checkpointing import CheckpointKind, Recompute
from whet.model.experts import Router
from whet.model.routing import Routing, record_bytes, times_read
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import LanguageModel
from whet.model.weights import build_model, load_model
from whet.schema import SCHEMAS
from whet.train.optim.balance import Balance
from whet.train.optim.safety import TokenBudget
from whet.train.optim.step import OptimConfig, forward_backward, prepare_model
from whet.types import MicroBatch, Segment

CPU = torch.device("cpu")
KINDS = ("qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3")
"""Softmax with a layer without experts, softmax of the best, sigmoids in groups with an offset (two families)."""
WITH_LOSS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
PROMPTS = (tuple(cases.ids_of(9, seed=1)), tuple(cases.ids_of(21, seed=2)))
CHOOSE = Router._choose


@cache
def loaded(name: str) -> tuple[Any, LanguageModel]:
    """transformers' model of a case, and ours."""
    with TemporaryDirectory() as folder:
        reference = cases.make(cases.CASES[name], Path(folder))
        return reference, load_model(Path(folder))[0]


def make_policy(name: str) -> Policy:
    model = loaded(name)[1]
    model.zero_grad()
    prepare_model(model, OptimConfig())
    policy = Policy(model, Tokenizer.characters("0123456789+=", ()), SCHEMAS["none"])
    model.num_valid_tokens = cases.VOCAB
    return policy


def contrary(self: Router, scores_NE: torch.Tensor) -> torch.Tensor:
    """A sampler whose arithmetic is another one: it prefers what the trainer's router likes least."""
    return -CHOOSE(self, scores_NE) if torch.is_inference_mode_enabled() else CHOOSE(self, scores_NE)


def sample(policy: Policy, *, max_rows: int = 64) -> list[list[Completion]]:
    options: dict[str, Any] = {"trains": True, "records_experts": True, "max_rows": max_rows}
    requests = [Request(prompt_ids=prompt, seeds=(1, 2, 3)) for prompt in PROMPTS]
    return Engine(policy.model, stop_ids=(5, 17), **options).generate(
        requests, SamplingParams(max_new_tokens=14)
    )


def packed(groups: list[list[Completion]], budget: int = 10_000) -> tuple[MicroBatch, ...]:
    sequences = [
        TrainingSequence(
            prompt_ids=prompt, completion_ids=done.ids, sampler_logprobs=done.logprobs, experts=done.experts
        )
        for prompt, row in zip(PROMPTS, groups, strict=True)
        for done in row
    ]
    return pack(sequences, token_budget=budget).micro_batches


@torch.no_grad()
def gap(policy: Policy, micro: MicroBatch) -> float:
    return float((policy.score(micro)[0] - micro.sampler_logprobs_M).abs().max())


@pytest.mark.parametrize("name", KINDS)
def test_the_trainer_takes_the_samplers_experts(name: str) -> None:
    """Where the sampler goes another way, the ratio is 1 with replay, and is not without."""
    policy = make_policy(name)
    with patch.object(Router, "_choose", contrary):
        groups = sample(policy)
    for budget in (10_000, 1):  # prompts shared, and each sequence alone
        micro_batches = packed(groups, budget)
        assert any(segment.shared for micro in micro_batches for segment in micro.segments) == (budget > 1)
        for micro in micro_batches:
            assert gap(policy, micro) == 0.0
            assert gap(policy, replace(micro, experts_NX=None)) > 1e-3
            given_NX = micro.experts_NX
            assert given_NX is not None
            taken, own = (_taken(policy, replace(micro, experts_NX=given)) for given in (given_NX, None))
            known_N = (given_NX != 255).any(1)
            assert torch.equal(taken[known_N], given_NX[known_N])
            assert not torch.equal(own[known_N], given_NX[known_N])
            # What was never read is each completion's last token.
            assert int((~known_N).sum()) == len(micro.indices_B)


@torch.no_grad()
def _taken(policy: Policy, micro: MicroBatch) -> torch.Tensor:
    routing = policy.routing(micro) or Routing(policy.model.config)
    hidden_rows(policy.model, micro, routing=routing)
    return routing.encoded(len(micro.tokens_N))


@pytest.mark.parametrize("name", KINDS)
def test_on_policy_replay_changes_no_bit(name: str) -> None:
    policy = make_policy(name)
    (micro,) = packed(sample(policy))
    gradients = []
    for given in (micro.experts_NX, None):
        policy.model.zero_grad()
        logprobs_M, _ = policy.score(replace(micro, experts_NX=given))
        assert torch.equal(logprobs_M.detach(), micro.sampler_logprobs_M)
        logprobs_M.sum().backward()
        gradients.append([p.grad for p in policy.model.parameters() if p.grad is not None])
    for mine, theirs in zip(*gradients, strict=True):
        assert torch.equal(mine, theirs)


def test_a_record_does_not_depend_on_who_else_is_sampled() -> None:
    policy = make_policy("qwen3_moe")
    whole = sample(policy)
    assert sample(policy, max_rows=2) == whole
    width = record_bytes(policy.model.config)
    assert width == 2 * 2  # two layers of experts, two experts a token
    for prompt, row in zip(PROMPTS, whole, strict=True):
        for done in row:
            parts = [(done.experts[0], len(prompt)), (done.experts[1], len(done.ids) - 1)]
            assert join_experts(parts, CPU).shape == (len(prompt) + len(done.ids) - 1, width)
    (plain,) = Engine(policy.model, stop_ids=(5, 17), trains=True).generate(
        [Request(prompt_ids=PROMPTS[0], seeds=(1,))], SamplingParams(max_new_tokens=14)
    )
    assert plain[0] == replace(whole[0][0], experts=())


@pytest.mark.parametrize("count", [6, 255, 256, 300])
def test_records_of_any_number_of_experts(count: int) -> None:
    """One byte or two; what is not recorded is never taken for an expert."""
    config = loaded("qwen3_moe")[1].config
    experts = config.block.experts
    assert experts is not None
    config = replace(config, block=replace(config.block, experts=replace(experts, count=count)))
    generator = torch.Generator().manual_seed(count)
    which_LNK = torch.rand(2, 7, count, generator=generator).topk(2)[1]
    which_LNK[0, 0, 0] = count - 1
    own_NK, probs_NE = torch.zeros(7, 2, dtype=torch.int64), torch.zeros(7, count)
    noting = Routing(config)
    for place, index in enumerate((0, 2)):
        part = noting.layer(index)
        assert part is not None
        part.settle(torch.cat([which_LNK[place], own_NK[:3]]), probs_NE)  # with row padding
    assert noting.layer(1) is None
    record_NX = noting.encoded(7)
    assert record_NX.shape[1] == record_bytes(config) == (4 if count < 256 else 8)
    text = encode_experts(record_NX[:5])
    joined_NX = join_experts([(text, 5), (text, 6), ("", 2)], CPU)
    again = Routing(config, given_NX=joined_NX)
    for place, index in enumerate((0, 2)):
        part = again.layer(index)
        assert part is not None
        taken = part.settle(torch.ones(16, 2, dtype=torch.int64), torch.zeros(16, count))
        known = which_LNK[place, :5]
        assert torch.equal(taken, torch.cat([known, known, taken.new_ones(6, 2)]))


def test_prompts_that_went_other_ways_are_computed_apart() -> None:
    def sequence(prompt: bytes) -> TrainingSequence:
        texts = [
            encode_experts(torch.frombuffer(bytearray(part), dtype=torch.uint8)) for part in (prompt, b"x")
        ]
        return TrainingSequence(prompt_ids=(1, 2), completion_ids=(3, 4), experts=tuple(texts))

    plain = TrainingSequence(prompt_ids=(1, 2), completion_ids=(5,))
    (micro,) = pack(
        [sequence(b"ab"), sequence(b"ab"), sequence(b"ac"), plain], token_budget=100
    ).micro_batches
    assert sum(segment.shared > 0 for segment in micro.segments) == 2
    assert micro.experts_NX is not None
    assert micro.experts_NX.shape == (6 + 4 + 3, 1)
    rows = {tuple(micro.experts_NX[s.start : s.start + s.length, 0].tolist()) for s in micro.segments}
    assert rows == {(97, 98), (120, 255), (97, 99, 120, 255), (255, 255, 255)}


@pytest.mark.parametrize("name", KINDS)
def test_gradients_over_given_experts_are_finite_differences(name: str) -> None:
    """In float64, of router and embeddings, where the router itself would choose others."""
    policy = make_policy(name)
    with patch.object(Router, "_choose", contrary):
        groups = sample(policy)
    (micro,) = packed(groups)
    with patch.object(torch.Tensor, "float", torch.Tensor.double):
        model = build_model(policy.model.config).double()
        model.load_state_dict(policy.model.state_dict())
        wide = Policy(model, policy.tokenizer, policy.schema)
        model.num_valid_tokens = cases.VOCAB

        def loss() -> torch.Tensor:
            weights_M = torch.linspace(-1, 1, len(micro.targets_M), dtype=torch.float64)
            return (wide.score(micro)[0].double() * weights_M).sum()

        loss().backward()
        routers = [part for part in model.modules() if isinstance(part, Router)]
        for router in routers:
            grad = router.weight.grad
            assert grad is not None
            step = grad / grad.norm() * 3e-4  # uphill: in another direction rounding may be all there is
            with torch.no_grad():
                router.weight += step
                above = loss()
                router.weight -= 2 * step
                below = loss()
                router.weight += step
            expected = float((grad * step).sum())
            assert float(above - below) / 2 == pytest.approx(expected, rel=1e-5)


# The load-balancing loss.

ROWS = [(PROMPTS[0], tuple(cases.ids_of(length, seed=length))) for length in (3, 12, 7)]
ROWS += [(PROMPTS[1], tuple(cases.ids_of(30, seed=30)))]


def cut(tokens: int) -> tuple[MicroBatch, ...]:
    sequences = [TrainingSequence(prompt_ids=prompt, completion_ids=own) for prompt, own in ROWS]
    return pack(sequences, token_budget=tokens).micro_batches


def nothing(policy: Policy) -> Callable[[MicroBatch], tuple[torch.Tensor, dict[str, float]]]:
    """A loss without gradient of its own, which still runs the model."""
    return lambda micro: (policy.score(micro)[0].sum() * 0.0, {})


def balanced(
    policy: Policy, tokens: int, coef: float = 3.0
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return metrics and gradients of the load-balancing loss alone."""
    policy.model.zero_grad()
    budget = TokenBudget(tokens, policy.model.parameters())
    balance = Balance.of(policy, coef, cut, budget, longest=60)
    totals = forward_backward(cut(tokens), balance.added_to(nothing(policy)), policy.model)
    assert totals["loss"] == 0.0
    assert policy.routings is None
    found = {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}
    return balance.metrics, found


@pytest.mark.usefixtures("eager")  # where rows are padded
@pytest.mark.parametrize("name", WITH_LOSS)
def test_the_load_balancing_loss_is_that_of_transformers(name: str) -> None:
    """Rows of several lengths, padded there and packed here; a prompt that three of ours share."""
    reference, _ = loaded(name)
    policy = make_policy(name)
    longest = max(len(prompt + own) for prompt, own in ROWS)
    ids = torch.tensor([[*prompt, *own, *[0] * (longest - len(prompt + own))] for prompt, own in ROWS])
    mask = torch.tensor([[n < len(prompt + own) for n in range(longest)] for prompt, own in ROWS]).long()
    reference.zero_grad()
    out = reference(ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    (3.0 * out.aux_loss).backward()
    theirs = dict(reference.named_parameters())
    for tokens in (10_000, 45, 1):
        metrics, found = balanced(policy, tokens)
        assert metrics["router/balance_loss"] == pytest.approx(out.aux_loss.item(), rel=1e-5)
        seen = 0
        for key, gradient in found.items():
            if "router" in key or key.endswith("mlp.gate.weight"):
                seen += 1
                torch.testing.assert_close(gradient, theirs[key].grad, rtol=1e-3, atol=1e-6)
        assert seen >= 2
        _, first = next(item for item in found.items() if "embed_tokens" in item[0])
        expected = theirs["model.embed_tokens.weight"].grad[1:]  # transformers learns nothing for id 0
        assert expected.abs().max() > 1e-5
        torch.testing.assert_close(first[1:], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["glm4_moe", "gpt_oss"])
def test_the_load_balancing_loss_does_not_depend_on_the_split(name: str) -> None:
    policy = make_policy(name)
    metrics, whole = balanced(policy, 10_000)
    experts = policy.model.config.block.experts
    assert experts is not None
    assert 0 <= metrics["router/load_min"] < experts.top_k / experts.count < metrics["router/load_max"] <= 1
    policy.routings = noted = []
    policy.hidden(cut(10_000)[0])
    policy.routings = None
    num_tokens = sum(len(prompt + own) for prompt, own in ROWS)
    num_layers = sum(spec.has_experts for spec in policy.model.config.layers)
    assert noted[0].mass_E().sum().item() == pytest.approx(num_tokens * num_layers), "no probabilities"
    for tokens in (60, 1):
        assert len(cut(tokens)) > 1
        again, parts = balanced(policy, tokens)
        assert again == pytest.approx(metrics, rel=1e-6)
        for key, gradient in parts.items():
            torch.testing.assert_close(gradient, whole[key], rtol=1e-4, atol=1e-7)


def test_computing_layers_again_changes_nothing() -> None:
    """Activation checkpointing repeats a layer in the backward pass: with its experts, and without counting twice."""
    policy = make_policy("qwen3_moe")
    with patch.object(Router, "_choose", contrary):
        groups = sample(policy)

    def gradients() -> dict[str, torch.Tensor]:
        policy.model.zero_grad()
        budget = TokenBudget(60, policy.model.parameters())
        parts = packed(groups, 60)
        balance = Balance.of(policy, 1.0, lambda _: parts, budget, longest=60)
        score = balance.added_to(lambda micro: (policy.score(micro)[0].sum(), {}))
        forward_backward(parts, score, policy.model)
        return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}

    plain = gradients()
    kinds: tuple[CheckpointKind, ...] = ("layer", "mlp", "alternate")
    try:
        for kind in kinds:
            policy.model.checkpoint_layers, policy.model.recompute = True, Recompute(kind)
            for key, gradient in gradients().items():
                assert torch.equal(gradient, plain[key]), (kind, key)
    finally:
        policy.model.checkpoint_layers = False


def test_a_row_counts_for_every_sequence_that_reads_it() -> None:
    segments = (Segment(0, 2, 0, 0), Segment(2, 3, 0, 2), Segment(5, 1, 0, 2), Segment(6, 4, 0, 0))
    assert times_read(segments, CPU).tolist() == [2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
