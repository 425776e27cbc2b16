"""Every named algorithm, put together as the objective does, against its published formula: value and gradient."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import losses as reference

from whet.algo.advantages import group_advantages
from whet.algo.config import AlgoConfig, ValueConfig
from whet.algo.losses import (
    aggregation_weight,
    kl_estimate,
    loss_denominator,
    policy_loss,
    unbiased_kl,
    value_loss,
    weighted_sum,
)
from whet.algo.packing import TrainingSequence
from whet.train.objective.advantage import token_advantages

GROUP_SIZE, MAX_LENGTH = 3, 11
SURROGATES = ("clip", "geometric", "weight", "sigmoid", "logprob")
# Sums of some thirty terms of size 1 to 100 in float64.
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
seeds = given(st.integers(0, 2**32))
few = settings(deadline=None, max_examples=8)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """Nine ragged sequences in three groups, the last group with equal rewards: advantages of both signs and 0."""

    lengths: list[int]
    rewards: list[list[float]]
    policy_M: torch.Tensor
    proximal_M: torch.Tensor
    sampler_M: torch.Tensor
    ref_M: torch.Tensor

    @property
    def sequence_M(self) -> torch.Tensor:
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))

    @property
    def rewards_PG(self) -> torch.Tensor:
        return torch.tensor(self.rewards, dtype=torch.float64)

    def rows(self, values_M: torch.Tensor) -> list[list[torch.Tensor]]:
        return [list(row.unbind()) for row in values_M.split(self.lengths)]

    def per_token(self, values: Sequence[float]) -> torch.Tensor:
        return vector(*values)[self.sequence_M]


def make_case(seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    lengths = (2 * torch.randint(0, 4, (9,), generator=generator) + 1).tolist()

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(sum(lengths), generator=generator, dtype=torch.float64)

    sampler_M = -2 - normal(0.5).abs()
    proximal_M = sampler_M + normal(0.2)
    draws = torch.rand(6, generator=generator).tolist()
    rewards = [[0.0, 1.0, draws[0]], [draws[1], 2 + draws[2], -draws[3]], [draws[4]] * 3]
    return Case(
        lengths,
        rewards,
        (proximal_M + normal(0.6)).requires_grad_(),
        proximal_M,
        sampler_M,
        sampler_M + normal(0.5),
    )


def total(
    case: Case,
    advantages_M: torch.Tensor,
    aggregation: Any,
    *,
    weights_M: torch.Tensor | None = None,
    kl_M: torch.Tensor | float = 0.0,
    **options: Any,
) -> torch.Tensor:
    """Whet's loss of a whole step, put together as the objective does."""
    loss_M, _, _ = policy_loss(
        case.policy_M, case.proximal_M, advantages_M, sequence_M=case.sequence_M, **options
    )
    loss_M = (loss_M if weights_M is None else weights_M * loss_M) + kl_M
    return aggregated(loss_M, case.lengths, aggregation)


def aggregated(loss_M: torch.Tensor, lengths: Sequence[int], aggregation: Any) -> torch.Tensor:
    in_group = [sum(lengths[i // GROUP_SIZE * GROUP_SIZE :][:GROUP_SIZE]) for i in range(len(lengths))]
    weights = [aggregation_weight(n, g, aggregation) for n, g in zip(lengths, in_group, strict=True)]
    denominator = loss_denominator(
        aggregation,
        num_tokens=sum(lengths),
        num_sequences=len(lengths),
        num_prompts=len(lengths) // GROUP_SIZE,
        max_length=MAX_LENGTH,
    )
    return weighted_sum(loss_M, vector(*weights).repeat_interleave(torch.tensor(lengths)), denominator)


def assert_same(got: torch.Tensor, expected: torch.Tensor, leaf: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, **CLOSE)
    gradients = [torch.autograd.grad(loss, leaf)[0] for loss in (got, expected)]
    torch.testing.assert_close(*gradients, **CLOSE)


NAMED = {
    "reinforce": ({"baseline": "none", "scale": "none"}, "sequence_sum", {"surrogate": "logprob"}),
    "rloo": ({"baseline": "leave_one_out", "scale": "none"}, "sequence_sum", {"surrogate": "logprob"}),
    "grpo": ({}, "sequence_mean", {}),
    "dr_grpo": ({"scale": "none"}, "constant", {}),
    "dapo": ({}, "token_mean", {"clip_high": 0.28}),
    "dapo_per_prompt": ({}, "prompt_mean", {"clip_high": 0.28}),
    "gspo": ({}, "sequence_mean", {"ratio": "sequence", "clip_low": 0.1, "clip_high": 0.2}),
    "gmpo": (
        {},
        "sequence_mean",
        {"ratio": "sequence", "surrogate": "geometric", "clip_low": 0.4, "clip_high": 0.3},
    ),
    "cispo": ({}, "token_mean", {"surrogate": "weight", "clip_low": 1.0, "clip_high": 0.5}),
    "cispo_two_bounds": ({}, "token_mean", {"surrogate": "weight", "clip_low": 0.3, "clip_high": 0.5}),
    "sapo": ({}, "sequence_mean", {"surrogate": "sigmoid"}),
    "dual_clip": ({}, "token_mean", {"clip_high": 0.28, "dual_clip": 1.5}),
    "two_sided": ({}, "token_mean", {"clip_high": 0.28, "dual_clip": 1.5}),
}


def named_reference(name: str, case: Case) -> torch.Tensor:
    logp, old, ref = (case.rows(v) for v in (case.policy_M, case.proximal_M, case.ref_M))
    flat = [reward for group in case.rewards for reward in group]
    scaled, centred = reference.standardised(case.rewards), reference.centred(case.rewards)
    tokens = [[a] * n for a, n in zip(scaled, case.lengths, strict=True)]
    return {
        "reinforce": lambda: reference.reinforce(logp, flat),
        "rloo": lambda: reference.reinforce(logp, reference.left_out(case.rewards)),
        "grpo": lambda: reference.grpo(logp, old, scaled, ref, 0.0),
        "dr_grpo": lambda: reference.dr_grpo(logp, old, centred, MAX_LENGTH),
        "dapo": lambda: reference.token_clip(logp, old, tokens, 0.2, 0.28),
        "dapo_per_prompt": lambda: reference.per_prompt(logp, old, scaled, GROUP_SIZE),
        "gspo": lambda: reference.gspo(logp, old, scaled, 0.1, 0.2),
        "gmpo": lambda: reference.gmpo(logp, old, scaled, 0.4, 0.3),
        "cispo": lambda: reference.cispo(logp, old, scaled, 1.0, 0.5),
        "cispo_two_bounds": lambda: reference.cispo(logp, old, scaled, 0.3, 0.5),
        "sapo": lambda: reference.sapo(logp, old, scaled),
        "dual_clip": lambda: reference.dual_clip(logp, old, scaled, 1.5),
        "two_sided": lambda: reference.two_sided(logp, old, scaled, 1.5),
    }[name]()


@pytest.mark.parametrize("name", NAMED)
@seeds
@few
def test_named_algorithms_equal_their_formulas(name: str, seed: int) -> None:
    case = make_case(seed)
    estimator, aggregation, options = NAMED[name]
    advantages_B = group_advantages(case.rewards_PG, **estimator).flatten()  # type: ignore[arg-type]
    got = total(case, advantages_B[case.sequence_M], aggregation, **options)
    assert_same(got, named_reference(name, case), case.policy_M)


@seeds
@few
def test_grpo_with_its_kl_term(seed: int) -> None:
    case = make_case(seed)
    advantages_B = group_advantages(case.rewards_PG).flatten()
    kl_M = 0.04 * kl_estimate(case.policy_M, case.ref_M, "k3")
    got = total(case, advantages_B[case.sequence_M], "sequence_mean", kl_M=kl_M)
    rows = [case.rows(v) for v in (case.policy_M, case.proximal_M, case.ref_M)]
    scaled = reference.standardised(case.rewards)
    assert_same(got, reference.grpo(rows[0], rows[1], scaled, rows[2], 0.04), case.policy_M)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "unbiased"])
@seeds
@few
def test_kl_terms_equal_their_formulas(kind: Any, seed: int) -> None:
    case = make_case(seed)
    if kind == "unbiased":
        kl_M = unbiased_kl(case.policy_M, case.ref_M, case.sampler_M)
    else:
        kl_M = kl_estimate(case.policy_M, case.ref_M, kind)
    rows = [case.rows(v) for v in (case.policy_M, case.ref_M, case.sampler_M)]
    expected = reference.kl(rows[0], rows[1], kind, rows[2])
    assert_same(aggregated(kl_M, case.lengths, "token_mean"), expected, case.policy_M)


def training_sequences(case: Case, outcomes: Sequence[float], values_M: torch.Tensor) -> list[Any]:
    columns = [v.detach().split(case.lengths) for v in (case.proximal_M, case.ref_M, values_M)]
    return [
        TrainingSequence(
            prompt_ids=(1,),
            completion_ids=(1,) * n,
            advantage=outcome,
            proximal_logprobs_T=columns[0][i],
            ref_logprobs_T=columns[1][i],
            start_values_T=columns[2][i],
        )
        for i, (n, outcome) in enumerate(zip(case.lengths, outcomes, strict=True))
    ]


@pytest.mark.parametrize("baseline", ["none", "group_mean"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@seeds
@few
def test_reinforce_plus_plus(baseline: Any, beta: float, seed: int) -> None:
    # Reward at the last token less beta k1 at every token, rewards to go, whitened over all tokens, PPO's clip.
    case = make_case(seed)
    algo = AlgoConfig(
        baseline=baseline,
        scale="none",
        whiten=True,
        uninformative="keep",
        kl="k1_reward" if beta else "none",
        kl_coef=beta,
    )
    outcomes = group_advantages(case.rewards_PG, baseline=baseline, scale="none").flatten().tolist()
    sequences = training_sequences(case, outcomes, torch.zeros_like(case.ref_M))
    filled = token_advantages(sequences, algo, ValueConfig(), beta)
    got = total(case, torch.cat([s.advantages_T for s in filled]), "token_mean")
    logp, old, ref = (case.rows(v) for v in (case.policy_M, case.proximal_M, case.ref_M))
    flat = [r for g in case.rewards for r in g] if baseline == "none" else reference.centred(case.rewards)
    raw = [
        reference.to_go(
            [
                -beta * float(o - f) + (outcome if o is row[-1] else 0.0)
                for o, f in zip(row, refs, strict=True)
            ]
        )
        for row, refs, outcome in zip(old, ref, flat, strict=True)
    ]
    expected = reference.token_clip(logp, old, reference.whitened(raw), 0.2, 0.2)
    assert_same(got, expected, case.policy_M)


@pytest.mark.parametrize(("gamma", "lam", "clip"), [(1.0, 1.0, None), (0.9, 0.7, 0.2)])
@seeds
@few
def test_ppo(gamma: float, lam: float, clip: float | None, seed: int) -> None:
    case = make_case(seed)
    starts_M = torch.randn(len(case.ref_M), generator=torch.Generator().manual_seed(seed)).double()
    values_M = (starts_M + 0.3 * (case.ref_M - case.sampler_M)).requires_grad_()
    algo = AlgoConfig(baseline="value", scale="none", whiten=True, uninformative="keep")
    outcomes = [reward for group in case.rewards for reward in group]
    sequences = training_sequences(case, outcomes, starts_M)
    filled = token_advantages(sequences, algo, ValueConfig(gamma=gamma, lam=lam), 0.0)
    got = total(case, torch.cat([s.advantages_T for s in filled]), "token_mean")
    starts = [[float(v) for v in row] for row in case.rows(starts_M)]
    raw = [
        reference.gae([0.0] * (len(row) - 1) + [outcome], row, gamma, lam)
        for row, outcome in zip(starts, outcomes, strict=True)
    ]
    logp, old = case.rows(case.policy_M), case.rows(case.proximal_M)
    expected = reference.token_clip(logp, old, reference.whitened(raw), 0.2, 0.2)
    assert_same(got, expected, case.policy_M)
    targets = [[a + v for a, v in zip(row, base, strict=True)] for row, base in zip(raw, starts, strict=True)]
    loss_M, clipped_M = value_loss(values_M, starts_M, torch.cat([s.returns_T for s in filled]), clip=clip)
    expected = reference.value_objective(case.rows(values_M), starts, targets, clip)
    assert_same(aggregated(loss_M, case.lengths, "token_mean"), expected, values_M)
    assert not clipped_M[(values_M - starts_M).abs() < (clip or math.inf)].any()


@pytest.mark.parametrize("share", [0.2, 0.5])
@seeds
@few
def test_weights_of_tokens_leave_the_denominator(share: float, seed: int) -> None:
    # The 80/20 rule: tokens of low entropy carry no policy gradient, KL acts on all, all count.
    case = make_case(seed)
    kept = reference.entropy_share(case.rows(case.ref_M), share)
    weights_M = vector(*itertools.chain(*kept))
    count = len(weights_M)
    assert 0 < float(weights_M.sum()) < count
    advantages_B = group_advantages(case.rewards_PG).flatten()
    kl_M = 0.1 * kl_estimate(case.policy_M, case.ref_M, "k2")
    got = total(case, advantages_B[case.sequence_M], "token_mean", weights_M=weights_M, kl_M=kl_M)
    scaled = reference.standardised(case.rewards)
    tokens = [[a * k for k in row] for row, a in zip(kept, scaled, strict=True)]
    logp, old, ref = (case.rows(v) for v in (case.policy_M, case.proximal_M, case.ref_M))
    expected = reference.token_clip(logp, old, tokens, 0.2, 0.2) + 0.1 * reference.kl(logp, ref, "k2", ref)
    assert_same(got, expected, case.policy_M)


def test_the_cases_reach_every_branch() -> None:
    reached = set()
    for case in map(make_case, range(5)):
        advantages_M = group_advantages(case.rewards_PG).flatten()[case.sequence_M]
        ratio_M = (case.policy_M - case.proximal_M).exp()
        for ratio, advantage in zip(ratio_M.tolist(), advantages_M.tolist(), strict=True):
            place = (ratio > 0.5) + (ratio > 0.7) + (ratio > 1.5)
            reached.add((place, (advantage > 0) - (advantage < 0)))
    assert reached == set(itertools.product(range(4), (-1, 0, 1)))
    for name in NAMED:
        case = make_case(0)
        assert torch.autograd.grad(named_reference(name, case), case.policy_M)[0].any(), name
