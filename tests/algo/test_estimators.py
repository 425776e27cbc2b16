"""What every estimator estimates: expectations by enumeration of small softmax bandits, float64, no sampling.

Sums of at most a few hundred terms below 10 differ by less than 1e-12 from the exact ones; a missing factor or a
detached term by more than 1e-3.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from whet.algo.advantages import group_advantages, rewards_to_go
from whet.algo.corrections import correction_weights
from whet.algo.logprobs import token_logprobs
from whet.algo.losses import kl_estimate, policy_loss, unbiased_kl, weighted_sum

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-10}
NUM_ARMS = 6
REWARDS_V = torch.tensor([0.0, 0.25, 1.0, 1.0, -0.5, 3.0], dtype=torch.float64)
RIGHT_V = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
INFINITE = float("inf")


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


THETA_V = normal(0, NUM_ARMS).requires_grad_()
POLICY_V = torch.log_softmax(THETA_V, 0)
REF_V = torch.log_softmax(normal(1, NUM_ARMS), 0)
SAMPLER_V = torch.log_softmax(0.7 * THETA_V.detach() + 0.5 * normal(2, NUM_ARMS), 0)


def gradient(value: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, THETA_V, retain_graph=True)[0]


def reward_gradient(rewards_V: torch.Tensor = REWARDS_V) -> torch.Tensor:
    return gradient((POLICY_V.exp() * rewards_V).sum())


def divergence(first_V: torch.Tensor, second_V: torch.Tensor) -> torch.Tensor:
    return (first_V.exp() * (first_V - second_V)).sum()


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


def expected_update(
    size: int, estimator: dict[str, Any], rewards_V: torch.Tensor = REWARDS_V, **options: Any
) -> torch.Tensor:
    """Mean over all groups of `size` pulls, by their probability, of the direction that the policy moves in."""
    arms_B = torch.tensor(list(itertools.product(range(NUM_ARMS), repeat=size))).flatten()
    chosen_B = POLICY_V[arms_B]
    probs_P = chosen_B.detach().view(-1, size).sum(1).exp()
    advantages_PG = group_advantages(rewards_V[arms_B].view(-1, size), **estimator)
    loss_B, _, _ = policy_loss(
        chosen_B,
        chosen_B.detach(),
        advantages_PG.flatten(),
        sequence_M=torch.arange(len(arms_B)),
        **options,
    )
    return -gradient(weighted_sum(loss_B, probs_P.repeat_interleave(size), size))


FORMS = {
    "reinforce": {"surrogate": "logprob"},
    "ppo": {},
    "dual_clip": {"dual_clip": 3.0},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {"ratio": "sequence", "surrogate": "geometric", "clip_low": 0.4, "clip_high": 0.4},
    "cispo": {"surrogate": "weight"},
    "sapo": {"surrogate": "sigmoid"},
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("baseline", ["none", "leave_one_out", "group_mean"])
def test_on_policy_every_surrogate_estimates_the_policy_gradient(baseline: str, form: str, size: int) -> None:
    # REINFORCE and RLOO without bias; the group's mean contains the sample itself and shrinks it by (G - 1) / G.
    factor = (size - 1) / size if baseline == "group_mean" else 1.0
    got = expected_update(size, {"baseline": baseline, "scale": "none"}, **FORMS[form])
    torch.testing.assert_close(got, factor * reward_gradient(), **CLOSE)


def test_a_constant_baseline_changes_nothing() -> None:
    loss_V, _, _ = policy_loss(POLICY_V, POLICY_V.detach(), REWARDS_V - 1.7, surrogate="logprob")
    got = -gradient(weighted_sum(loss_V, POLICY_V.detach().exp(), 1.0))
    torch.testing.assert_close(got, reward_gradient(), **CLOSE)


def test_division_by_the_groups_deviation_estimates_something_else() -> None:
    # For pairs the z-score is sign(R - R') / sqrt(2): the gradient of the chance to win, not of the reward.
    wins_VV = torch.sign(REWARDS_V[:, None] - REWARDS_V[None])
    probs_V = POLICY_V.detach().exp()
    winning = gradient((POLICY_V.exp() * (wins_VV @ probs_V)).sum()) / math.sqrt(2)
    got = expected_update(2, {"eps": 0.0})
    torch.testing.assert_close(got, winning, **CLOSE)
    for size in (2, 3):
        got, exact = expected_update(size, {"eps": 0.0}), reward_gradient()
        # Not even the direction is kept: 16 and 18 % of it lie beside the exact gradient for these rewards.
        beside = got - (got @ exact) / (exact @ exact) * exact
        assert float(beside.norm() / got.norm()) > 0.1


@pytest.mark.parametrize("size", [2, 3])
def test_division_by_the_groups_mean_estimates_a_truncated_logarithm(size: int) -> None:
    # MaxRL with right or wrong: log p = -sum_k (1 - p)^k / k, of which a group of G gives the first G - 1 terms.
    chance = (POLICY_V.exp() * RIGHT_V).sum()
    series = -sum(((1 - chance) ** k / k for k in range(1, size)), torch.zeros(()))
    got = expected_update(size, {"scale": "mean"}, RIGHT_V)
    torch.testing.assert_close(got, gradient(series), **CLOSE)


def test_kl_as_number_and_as_loss() -> None:
    probs_V = POLICY_V.detach().exp()
    estimates = {kind: kl_estimate(POLICY_V, REF_V, kind) for kind in ("k1", "k2", "k3")}
    exact = divergence(POLICY_V, REF_V)
    for kind in ("k1", "k3"):
        torch.testing.assert_close((probs_V * estimates[kind]).sum(), exact, **CLOSE)
    assert abs(float(((probs_V * estimates["k2"]).sum() - exact).detach())) > 0.01
    slopes = {kind: gradient((probs_V * estimate).sum()) for kind, estimate in estimates.items()}
    reverse, forward = gradient(exact), gradient(divergence(REF_V, POLICY_V))
    torch.testing.assert_close(slopes["k1"], torch.zeros_like(reverse), **CLOSE)
    torch.testing.assert_close(slopes["k2"], reverse, **CLOSE)
    torch.testing.assert_close(slopes["k3"], forward, **CLOSE)
    assert relative_error(slopes["k3"], reverse) > 0.1


@pytest.mark.parametrize("surrogate", ["logprob", "clip"])
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_in_the_reward(kind: Any, surrogate: Any) -> None:
    # Less k1, the score function gives -grad KL(policy || reference); with k3 it gives neither direction.
    penalty_V = kl_estimate(POLICY_V, REF_V, kind).detach()
    loss_V, _, _ = policy_loss(POLICY_V, POLICY_V.detach(), -penalty_V, surrogate=surrogate)
    got = gradient(weighted_sum(loss_V, POLICY_V.detach().exp(), 1.0))
    error = relative_error(got, gradient(divergence(POLICY_V, REF_V)))
    assert error < 1e-10 if kind == "k1" else error > 0.5


def test_kl_from_another_policys_samples() -> None:
    drawn_V = SAMPLER_V.exp()
    exact = divergence(POLICY_V, REF_V)
    unbiased = (drawn_V * unbiased_kl(POLICY_V, REF_V, SAMPLER_V)).sum()
    torch.testing.assert_close(unbiased, exact, **CLOSE)
    torch.testing.assert_close(gradient(unbiased), gradient(exact), **CLOSE)
    for kind in ("k2", "k3"):
        plain = (drawn_V * kl_estimate(POLICY_V, REF_V, kind)).sum()
        assert relative_error(gradient(plain), gradient(exact)) > 0.1


def off_policy_update(weights_V: torch.Tensor, start_V: torch.Tensor, **options: Any) -> torch.Tensor:
    """Mean update over the arms that the sampler draws, each with its correction weight."""
    loss_V, _, _ = policy_loss(POLICY_V, start_V, REWARDS_V, **options)
    return -gradient(weighted_sum(weights_V * loss_V, SAMPLER_V.exp(), 1.0))


@pytest.mark.parametrize("options", [{"surrogate": "logprob"}, {"clip_low": 1.0, "clip_high": 99.0}])
def test_importance_weights_without_bounds_remove_the_samplers_bias(options: dict[str, Any]) -> None:
    each = torch.arange(NUM_ARMS)
    weights_V, active_V = correction_weights(
        POLICY_V, SAMPLER_V, each, "token_truncate", low=0.0, high=INFINITE
    )
    assert not active_V.any()
    got = off_policy_update(weights_V, POLICY_V.detach(), **options)
    torch.testing.assert_close(got, reward_gradient(), **CLOSE)
    uncorrected = off_policy_update(torch.ones(NUM_ARMS), POLICY_V.detach(), **options)
    assert relative_error(uncorrected, reward_gradient()) > 0.1


@pytest.mark.parametrize("kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_bounded_importance_weights_are_biased_by_what_they_cut(kind: Any) -> None:
    low, high = 0.8, 1.2
    each = torch.arange(NUM_ARMS)
    weights_V, active_V = correction_weights(POLICY_V, SAMPLER_V, each, kind, low=low, high=high)
    probs_V, drawn_V = POLICY_V.detach().exp(), SAMPLER_V.exp()
    inside_V = (probs_V >= low * drawn_V) & (probs_V <= high * drawn_V)
    bounded_V = torch.minimum(torch.maximum(probs_V, low * drawn_V), high * drawn_V)
    counted_V = bounded_V if kind.endswith("truncate") else probs_V * inside_V
    assert torch.equal(active_V, ~inside_V)
    assert active_V.any()
    assert inside_V.any()
    got = off_policy_update(weights_V, POLICY_V.detach(), surrogate="logprob")
    torch.testing.assert_close(got, gradient((counted_V * REWARDS_V * POLICY_V).sum()), **CLOSE)
    assert relative_error(got, reward_gradient()) > 0.05


def test_the_ratio_itself_corrects_where_it_starts_from_the_sampler() -> None:
    # r = policy / sampler, no weight: exact while the clip is wide; CISPO's constant weight does the same.
    for options in ({"clip_low": 1.0, "clip_high": 99.0}, {"surrogate": "weight", "clip_high": 99.0}):
        options = {"clip_low": 1.0} | options
        got = off_policy_update(torch.ones(NUM_ARMS), SAMPLER_V, **options)
        torch.testing.assert_close(got, reward_gradient(), **CLOSE)
    clipped = off_policy_update(torch.ones(NUM_ARMS), SAMPLER_V)
    assert relative_error(clipped, reward_gradient()) > 0.05


def test_entropy_and_what_is_no_entropy_bonus() -> None:
    # -log p of the drawn token has no gradient in expectation; the entropy's is -p (log p + H).
    bonus = policy_loss(POLICY_V, POLICY_V.detach(), torch.ones(NUM_ARMS), surrogate="logprob")[0]
    nothing = gradient(weighted_sum(bonus, POLICY_V.detach().exp(), 1.0))
    torch.testing.assert_close(nothing, torch.zeros(NUM_ARMS, dtype=torch.float64), **CLOSE)
    head_VD = torch.eye(NUM_ARMS, dtype=torch.float64)
    logprob_M, entropy_M = token_logprobs(THETA_V[None], head_VD, torch.tensor([2]))
    torch.testing.assert_close(logprob_M[0], POLICY_V[2], **CLOSE)
    probs_V = POLICY_V.exp()
    exact = -(probs_V * POLICY_V).sum()
    torch.testing.assert_close(entropy_M[0], exact, **CLOSE)
    torch.testing.assert_close(gradient(entropy_M[0]), -probs_V * (POLICY_V + exact), **CLOSE)


class TwoSteps:
    """All nine sequences of two tokens out of three; the second step's policy depends on the first token."""

    def __init__(self) -> None:
        self.first = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
        self.second = torch.tensor([0, 1, 2] * 3)
        self.theta = normal(5, 12).requires_grad_()
        self.policy_BT = self.logprobs(self.theta)
        self.sampler_BT = self.logprobs(self.theta.detach() + 0.5 * normal(6, 12))
        self.ref_BT = self.logprobs(normal(7, 12))
        self.rewards_B = normal(8, 9)
        self.sequence_M = torch.arange(9).repeat_interleave(2)

    def logprobs(self, theta: torch.Tensor) -> torch.Tensor:
        start, then = torch.log_softmax(theta[:3], 0), torch.log_softmax(theta[3:].view(3, 3), 1)
        return torch.stack((start[self.first], then[self.first, self.second]), 1)

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, self.theta, retain_graph=True)[0]

    def update(
        self, weights_M: torch.Tensor, advantages_M: torch.Tensor, probs_B: torch.Tensor
    ) -> torch.Tensor:
        flat = self.policy_BT.flatten()
        loss_M, _, _ = policy_loss(flat, flat.detach(), advantages_M, surrogate="logprob")
        return -self.gradient(weighted_sum(weights_M * loss_M, probs_B.repeat_interleave(2), 1.0))


@pytest.mark.parametrize("kind", ["sequence_truncate", "sequence_mask", "token_truncate", "token_mask"])
def test_weights_of_whole_sequences_are_exact_and_those_of_tokens_are_not(kind: Any) -> None:
    steps = TwoSteps()
    exact = steps.gradient((steps.policy_BT.sum(1).exp() * steps.rewards_B).sum())
    columns = (steps.policy_BT.flatten(), steps.sampler_BT.flatten(), steps.sequence_M)
    weights_M, _ = correction_weights(*columns, kind, low=0.0, high=INFINITE)
    advantages_M = steps.rewards_B.repeat_interleave(2)
    got = steps.update(weights_M, advantages_M, steps.sampler_BT.sum(1).exp())
    error = relative_error(got, exact)
    assert error < 1e-10 if kind.startswith("sequence") else error > 0.05
    on_policy = steps.update(torch.ones(18), advantages_M, steps.policy_BT.detach().sum(1).exp())
    torch.testing.assert_close(on_policy, exact, **CLOSE)


def test_over_sequences_only_kl_in_the_reward_is_exact() -> None:
    # A token's own k2 knows nothing of how it changes the later tokens' KL; rewards to go do.
    steps = TwoSteps()
    probs_B = steps.policy_BT.sum(1).exp()
    exact = steps.gradient((probs_B * (steps.policy_BT - steps.ref_BT).sum(1)).sum())
    k1_BT = kl_estimate(steps.policy_BT, steps.ref_BT, "k1").detach()
    advantages_M = torch.cat([rewards_to_go(-row_T) for row_T in k1_BT])
    got = -steps.update(torch.ones(18), advantages_M, probs_B.detach())
    torch.testing.assert_close(got, exact, **CLOSE)
    k2_BT = kl_estimate(steps.policy_BT, steps.ref_BT, "k2")
    assert relative_error(steps.gradient((probs_B.detach() * k2_BT.sum(1)).sum()), exact) > 0.05


@pytest.mark.parametrize("surrogate", ["clip", "geometric"])
def test_ratio_of_a_sequence_spreads_its_gradient_over_the_tokens(surrogate: Any) -> None:
    steps = TwoSteps()
    exact = steps.gradient((steps.policy_BT.sum(1).exp() * steps.rewards_B).sum())
    flat, advantages_M = steps.policy_BT.flatten(), steps.rewards_B.repeat_interleave(2)
    options: dict[str, Any] = {"sequence_M": steps.sequence_M, "ratio": "sequence", "surrogate": surrogate}
    loss_M, _, _ = policy_loss(flat, flat.detach(), advantages_M, **options)
    probs_M = steps.policy_BT.detach().sum(1).exp().repeat_interleave(2)
    # Each token carries 1 / 2 of its sequence, and the geometric mean's gradient is 1 / 2 of the sum's.
    got = -steps.gradient(weighted_sum(loss_M, probs_M / 2, 1.0))
    torch.testing.assert_close(got, exact / 2, **CLOSE)
