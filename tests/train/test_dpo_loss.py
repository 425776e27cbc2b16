"""The preference loss and its gradient: the papers' formulas, whatever the micro-batches, the order and the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.model.attention import Packed
from whet.train import dpo
from whet.train import dpo as pair_scores
from whet.train.data.pairs import Pair
from whet.train.dpo import DPOConfig, train_step, validate
from whet.train.optim.step import OptimConfig


def make_pairs(vocab: int, count: int = 5) -> list[Pair]:
    """Pairs of odd lengths with made-up reference log-probabilities."""
    generator = torch.Generator().manual_seed(1)

    def ids(low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(0, vocab, (length,), generator=generator).tolist())

    return [
        Pair(
            uid=str(number),
            prompt="",
            chosen="",
            rejected="",
            prompt_ids=ids(1, 9),
            chosen_ids=ids(1, 12),
            rejected_ids=ids(1, 12),
            ref_chosen_logprob=-20.0 - number,
            ref_rejected_logprob=-22.0 + number,
        )
        for number in range(count)
    ]


def random_policy(tiny_policy: PolicyConfig) -> Policy:
    """Clearly non-uniform outputs, in float64."""
    policy = load_policy(tiny_policy, seed=0)
    policy.model.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return policy


def logprob_alone(policy: Policy, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """One sequence by itself, through the whole vocabulary."""
    row = torch.tensor([*prompt, *completion])
    hidden = policy.model(row, torch.arange(len(row)), Packed((len(row),), row.device, "exact"))
    logits = hidden @ policy.model.head_weight.T
    logits = logits[:, : policy.model.num_valid_tokens]
    scores = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return scores[torch.arange(len(completion)), list(completion)].sum()


def oracle(policy: Policy, pairs: Sequence[Pair], config: DPOConfig) -> tuple[torch.Tensor, list[float]]:
    """Mean loss over pairs from the formulas of the papers, and the margins."""
    losses, margins = [], []
    for pair in pairs:
        chosen = logprob_alone(policy, pair.prompt_ids, pair.chosen_ids)
        rejected = logprob_alone(policy, pair.prompt_ids, pair.rejected_ids)
        up, down = chosen - pair.ref_chosen_logprob, rejected - pair.ref_rejected_logprob
        margins.append(config.beta * float((up - down).detach()))
        if config.per_token:
            up, down = up / len(pair.chosen_ids), down / len(pair.rejected_ids)
        if config.loss == "ipo":
            loss = (up - down - 1 / (2 * config.beta)) ** 2
        else:
            right = torch.sigmoid(config.beta * (up - down))
            loss = -(1 - config.label_smoothing) * right.log() - config.label_smoothing * (1 - right).log()
        losses.append(loss - config.sft_coef * chosen / len(pair.chosen_ids))
    return torch.stack(losses).mean(), margins


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    taken = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad(set_to_none=True)
    return taken


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "objective",
    [
        {"beta": 0.3},
        {"beta": 0.3, "label_smoothing": 0.1, "sft_coef": 0.7},
        {"beta": 0.3, "loss": "ipo"},
        {"beta": 0.5, "loss": "ipo", "per_token": True},
    ],
)
def test_loss_and_gradient_do_not_depend_on_the_cut(
    objective: dict[str, Any], tiny_policy: PolicyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Float64 throughout: 1e-10 separates rounding from a lost or doubled pair (1e-2 and more).
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(pair_scores, "FIT_ATTENTION", "exact")
    policy = random_policy(tiny_policy)
    pairs = make_pairs(policy.tokenizer.vocab_size)
    config = DPOConfig(out="unused", policy=tiny_policy, **objective)
    expected, margins = oracle(policy, pairs, config)
    expected.backward()
    reference = gradients(policy)
    sizes = sorted(pair.num_tokens for pair in pairs)
    cuts = {10**6: 1, sum(sizes[-2:]): None, 1: 5}
    seen = set()
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1]):
        for budget, count in cuts.items():
            shuffled = [pairs[index] for index in order]
            number = len(dpo.pair_micro_batches(shuffled, budget, policy.device))
            assert count in (None, number)
            seen.add(number)
            cut = replace(config, optim=OptimConfig(token_budget=budget))
            result = train_step(policy, shuffled, cut)
            assert result.loss == pytest.approx(float(expected.detach()), rel=1e-10)
            assert result.metrics["dpo/margin"] == pytest.approx(sum(margins) / 5, rel=1e-10)
            assert result.metrics["dpo/accuracy"] == sum(margin > 0 for margin in margins) / 5
            assert result.num_trained_tokens == sum(len(p.chosen_ids) + len(p.rejected_ids) for p in pairs)
            assert result.num_tokens == sum(sizes)
            found = gradients(policy)
            assert found.keys() == reference.keys()
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, reference[name], rtol=1e-10, atol=1e-10)
            held = validate(policy, shuffled, cut)
            assert held["dpo/validation_loss"] == pytest.approx(result.loss, rel=1e-10)
            assert held["dpo/validation_accuracy"] == result.metrics["dpo/accuracy"]
    assert len(seen) == 3
    assert 0 < sum(margin > 0 for margin in margins) < 5


def test_a_pair_stays_in_one_micro_batch(tiny_policy: PolicyConfig) -> None:
    pairs = make_pairs(20, count=40)
    for budget in (1, 50, 200):
        found = []
        for micro in dpo.pair_micro_batches(pairs, budget, torch.device("cpu")):
            members = sorted(index // 2 for index in micro.indices_B)
            assert members == sorted(2 * sorted(set(members)))
            assert sum(micro.lengths_B) <= budget or len(members) == 2
            for index, length in zip(micro.indices_B, micro.lengths_B, strict=True):
                pair = pairs[index // 2]
                completion = pair.rejected_ids if index % 2 else pair.chosen_ids
                assert length == len(pair.prompt_ids) + len(completion)
            found += members
        assert sorted(found) == sorted(2 * list(range(40)))


def test_the_step_divides_by_the_pairs_of_all_ranks(
    tiny_policy: PolicyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(tiny_policy, seed=0)
    pairs = make_pairs(policy.tokenizer.vocab_size)
    config = DPOConfig(out="unused", policy=tiny_policy)
    alone = train_step(policy, pairs, config)
    reference = gradients(policy)
    calls: list[tuple[float, ...]] = []

    def doubled(*values: float) -> list[float]:  # another rank with as many pairs
        calls.append(values)
        return [2 * value for value in values] if len(calls) == 1 else list(values)

    monkeypatch.setattr(dpo, "all_reduce_sum", doubled)
    shared = train_step(policy, pairs, config)
    assert calls[0][0] == 5
    assert shared.loss == pytest.approx(alone.loss / 2, rel=1e-6)
    for name, gradient in gradients(policy).items():
        torch.testing.assert_close(2 * gradient, reference[name], rtol=1e-5, atol=1e-7)
