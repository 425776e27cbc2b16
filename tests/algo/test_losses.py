"""Losses of single tokens against closed forms and exact expectations over small vocabularies."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from whet.algo.advantages import group_advantages
from whet.algo.losses import (
    aggregation_weight,
    kl_estimate,
    loss_denominator,
    policy_loss,
    weighted_sum,
)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_golden_loss_of_two_samples() -> None:
    # Rewards .7 and .5, ratios 1.167 and 1.062 inside the clip: -mean(1.167 * .1, 1.062 * -.1) = -.00525.
    advantages = group_advantages(vector(0.7, 0.5)[None], scale="none")[0]
    loss_M, high_M, low_M = policy_loss(vector(1.167, 1.062).log(), vector(0, 0), advantages)
    assert float(loss_M.mean()) == pytest.approx(-0.00525, abs=1e-12)
    assert not high_M.any()
    assert not low_M.any()


def test_golden_ratios() -> None:
    current, old = vector(-11.081, -10.820), vector(-11.170, -11.266)
    loss_M, high_M, _ = policy_loss(current, old, vector(1.0, 1.0))
    # Published with four digits; the second ratio is above 1.2 and therefore held there.
    assert float(-loss_M[0]) == pytest.approx(1.0931, abs=5e-5)
    assert float(-loss_M[1]) == pytest.approx(1.2, abs=1e-12)
    unclipped, _, _ = policy_loss(current, old, vector(1.0, 1.0), clip_high=9.0)
    assert float(-unclipped[1]) == pytest.approx(1.5621, abs=5e-5)
    assert high_M.tolist() == [False, True]


def test_min_form_equals_sign_dependent_clamps() -> None:
    generator = torch.Generator().manual_seed(0)
    log_ratio = torch.randn(1000, generator=generator, dtype=torch.float64)
    advantages = torch.randn(1000, generator=generator, dtype=torch.float64)
    low, high = 0.2, 0.28
    loss_M, high_M, low_M = policy_loss(
        log_ratio, torch.zeros_like(log_ratio), advantages, clip_low=low, clip_high=high
    )
    for ratio, advantage, loss, is_high, is_low in zip(
        log_ratio.exp().tolist(), advantages.tolist(), loss_M.tolist(), high_M, low_M, strict=True
    ):
        bounded = min(ratio, 1 + high) if advantage > 0 else max(ratio, 1 - low)
        assert loss == pytest.approx(-bounded * advantage, rel=1e-12)  # the same product in float64
        assert bool(is_high) == (advantage > 0 and ratio > 1 + high)
        assert bool(is_low) == (advantage < 0 and ratio < 1 - low)


def test_the_gradient_stops_exactly_where_a_flag_is_set() -> None:
    # Columns: ratio far above, inside, far below; rows: positive, negative advantage.
    log_ratio = vector(1.0, 0.1, -1.0, 1.0, 0.1, -1.0).requires_grad_()
    advantages = vector(2, 2, 2, -2, -2, -2)
    loss_M, high_M, low_M = policy_loss(log_ratio, torch.zeros(6), advantages)
    loss_M.sum().backward()
    assert log_ratio.grad is not None
    assert high_M.tolist() == [True, False, False, False, False, False]
    assert low_M.tolist() == [False, False, False, False, False, True]
    assert (log_ratio.grad == 0).tolist() == (high_M | low_M).tolist()


def test_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    sampler = -3 * torch.rand(64, generator=generator, dtype=torch.float64)
    advantages = torch.randn(64, generator=generator, dtype=torch.float64)
    # None of these ratios lies within 1e-3 of a kink at .8 or 1.28.
    offset = torch.tensor([-0.5, -0.1, 0.0, 0.2, 0.5, 1.0, -2.0, 0.24], dtype=torch.float64).repeat(8)
    policy = (sampler + offset).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda logprobs: policy_loss(logprobs, sampler, advantages, clip_high=0.28)[0], policy
    )
    for estimator in ("k1", "k2", "k3"):
        assert torch.autograd.gradcheck(
            lambda logprobs, name=estimator: kl_estimate(logprobs, sampler, name), policy
        )


def test_on_policy_gradient_is_reinforce() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 7, generator=generator, dtype=torch.float64).requires_grad_()
    chosen, advantages = torch.tensor([0, 6, 3, 3, 1]), vector(1.5, -0.5, 0.0, 2.0, -1.0)
    logprobs = torch.log_softmax(logits, -1)[torch.arange(5), chosen]
    loss_M, high_M, low_M = policy_loss(logprobs, logprobs.detach(), advantages)
    assert loss_M.tolist() == (-advantages).tolist()
    assert not (high_M | low_M).any()
    (got,) = torch.autograd.grad(loss_M.sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(-(advantages * logprobs).sum(), logits)
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)  # one multiplication by exp(0)


def test_a_huge_ratio_stays_finite() -> None:
    policy = vector(0.0, -2000.0).requires_grad_()
    loss_M, _, _ = policy_loss(policy, vector(-2000.0, 0.0), vector(-1.0, -1.0))
    loss_M.sum().backward()
    assert loss_M.tolist() == [pytest.approx(math.exp(20)), pytest.approx(0.8)]
    assert policy.grad is not None
    assert policy.grad.isfinite().all()


def test_advantages_and_sampler_are_constants() -> None:
    policy, sampler, advantages = (vector(-1.0).requires_grad_() for _ in range(3))
    policy_loss(policy, sampler, advantages)[0].sum().backward()
    kl_estimate(policy, sampler, "k3").sum().backward()
    assert sampler.grad is None
    assert advantages.grad is None


REWARDS = (0.0, 0.25, 1.0)


@pytest.mark.parametrize(
    ("baseline", "factor"), [("none", 1.0), ("leave_one_out", 1.0), ("group_mean", 2 / 3)]
)
def test_expected_gradient_on_a_bandit(baseline: str, factor: float) -> None:
    # All 27 groups of three pulls of three arms, weighted by their probability: REINFORCE and RLOO are unbiased,
    # the group mean shrinks the gradient by (G - 1) / G.
    theta = vector(0.3, -0.2, 0.5).requires_grad_()
    log_probs = torch.log_softmax(theta, 0)
    (exact,) = torch.autograd.grad((log_probs.exp() * vector(*REWARDS)).sum(), theta, retain_graph=True)
    total = torch.zeros(())
    for arms in itertools.product(range(3), repeat=3):
        group = log_probs[list(arms)]
        advantages = group_advantages(
            vector(*(REWARDS[arm] for arm in arms))[None],
            baseline=baseline,  # type: ignore[arg-type]
            scale="none",
        )[0]
        loss_M, _, _ = policy_loss(group, group.detach(), advantages)
        total = total + group.detach().sum().exp() * loss_M.mean()
    (got,) = torch.autograd.grad(total, theta)
    # 27 terms below 1 in float64.
    torch.testing.assert_close(-got, factor * exact, rtol=0, atol=1e-10)


def divergence(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first.exp() * (first - second)).sum()


def test_kl_values_and_expected_gradients() -> None:
    # Exact expectations over a 7-way softmax, not samples: float64 rounding only, hence 1e-10.
    generator = torch.Generator().manual_seed(3)
    theta = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    policy = torch.log_softmax(theta, 0)
    reference = torch.log_softmax(torch.randn(7, generator=generator, dtype=torch.float64), 0)
    probs = policy.detach().exp()
    value, gradient = {}, {}
    for name in ("k1", "k2", "k3"):
        estimate = kl_estimate(policy, reference, name)
        value[name] = float((probs * estimate.detach()).sum())
        (gradient[name],) = torch.autograd.grad((probs * estimate).sum(), theta, retain_graph=True)
    exact = divergence(policy, reference)
    kl = float(exact.detach())
    (reverse,) = torch.autograd.grad(exact, theta, retain_graph=True)
    (forward,) = torch.autograd.grad(divergence(reference, policy), theta)
    assert value["k1"] == pytest.approx(kl, abs=1e-10)
    assert value["k3"] == pytest.approx(kl, abs=1e-10)
    assert abs(value["k2"] - kl) > 0.01
    assert float(gradient["k1"].abs().max()) < 1e-10
    torch.testing.assert_close(gradient["k2"], reverse, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradient["k3"], forward, rtol=0, atol=1e-10)
    assert float((reverse - forward).abs().max()) > 0.01


def test_kl_of_extreme_differences_is_finite() -> None:
    policy = vector(-1000.0, 0.0).requires_grad_()
    for name in ("k1", "k2", "k3"):
        assert kl_estimate(policy, vector(0.0, -1000.0), name).isfinite().all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_weight_zero_hides_even_infinities(bad: float) -> None:
    values = vector(1.0, bad, 3.0).requires_grad_()
    total = weighted_sum(values, vector(2.0, 0.0, 0.5), 4.0)
    total.backward()
    assert float(total.detach()) == (2.0 + 1.5) / 4
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.0, 0.125]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", (1 + 2 + 3 + 10 + 20) / 5),
        ("sequence_mean", ((1 + 2 + 3) / 3 + (10 + 20) / 2) / 2),
        ("constant", (1 + 2 + 3 + 10 + 20) / (2 * 8)),
    ],
)
def test_aggregation(aggregation: str, expected: float) -> None:
    rows = [[1.0, 2.0, 3.0], [10.0, 20.0]]
    weights = [[aggregation_weight(len(row), aggregation)] * len(row) for row in rows]  # type: ignore[arg-type]
    denominator = loss_denominator(aggregation, num_tokens=5, num_sequences=2, max_length=8)  # type: ignore[arg-type]
    parts = [weighted_sum(vector(*r), vector(*w), denominator) for r, w in zip(rows, weights, strict=True)]
    assert float(sum(parts)) == pytest.approx(expected, rel=1e-12)  # a handful of float64 operations


def test_an_empty_step_divides_by_one() -> None:
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        assert loss_denominator(aggregation, num_tokens=0, num_sequences=0, max_length=8) == 1.0
        assert aggregation_weight(0, aggregation) == 1.0
