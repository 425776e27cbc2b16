"""Off-policy weights against products and means written out token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import losses as reference

from whet.algo.corrections import BOUNDS, correction_weights
from whet.algo.losses import kl_estimate, policy_loss, weighted_sum

KINDS = tuple(kind for kind in BOUNDS if kind != "none")
RANGES = {
    "token_truncate": (0.7, 1.3),
    "token_mask": (0.7, 1.3),
    "sequence_truncate": (0.7, 1.3),
    "sequence_mask": (0.7, 1.3),
    "geometric_mask": (0.9, 1.1),
    "k3_mask": (0.0, 0.04),
}
# Float64 on both sides: products and means of at most seven numbers.
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
SEEDS = given(st.integers(0, 2**32))
FEW = settings(deadline=None, max_examples=15)


def make_columns(
    seed: int, num_sequences: int = 12
) -> tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (num_sequences,), generator=generator)
    count = int(lengths.sum())
    sampler_M, noise_M = torch.randn(2, count, generator=generator, dtype=torch.float64)
    sequence_M = torch.arange(num_sequences).repeat_interleave(lengths)
    return lengths.tolist(), sampler_M - 3 + 0.3 * noise_M, sampler_M - 3, sequence_M


def rows_of(values_M: torch.Tensor, lengths: list[int]) -> list[list[torch.Tensor]]:
    return [list(row.unbind()) for row in values_M.split(lengths)]


def by_hand(kind: str, proximal: Any, sampler: Any, low: float, high: float) -> torch.Tensor:
    if kind.startswith("token"):
        rows = reference.token_weights(proximal, sampler, low, high, kind == "token_mask")
    else:
        rows = reference.sequence_weights(proximal, sampler, low, high, kind)
    return torch.tensor([weight for row in rows for weight in row], dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@SEEDS
@FEW
def test_weights_and_the_loss_made_of_them(kind: Any, seed: int) -> None:
    lengths, proximal_M, sampler_M, sequence_M = make_columns(seed)
    low, high = RANGES[kind]
    weights_M, active_M = correction_weights(proximal_M, sampler_M, sequence_M, kind, low=low, high=high)
    proximal, sampler = rows_of(proximal_M, lengths), rows_of(sampler_M, lengths)
    expected_M = by_hand(kind, proximal, sampler, low, high)
    torch.testing.assert_close(weights_M, expected_M, **CLOSE)
    unbounded_M = by_hand(kind, proximal, sampler, 0.0, math.inf)
    assert torch.equal(active_M, (expected_M - unbounded_M).abs() > 1e-9)
    # The policy term is weighed, the KL term is not, and all tokens stay in the denominator.
    generator = torch.Generator().manual_seed(seed)
    noise_M, ref_M, gains_M = torch.randn(3, len(proximal_M), generator=generator, dtype=torch.float64)
    policy_M = (proximal_M + 0.4 * noise_M).requires_grad_()
    loss_M, _, _ = policy_loss(policy_M, proximal_M, gains_M)
    loss_M = weights_M * loss_M + 0.1 * kl_estimate(policy_M, ref_M, "k2")
    got = weighted_sum(loss_M, torch.ones_like(loss_M), len(loss_M))
    logp, ref = rows_of(policy_M, lengths), rows_of(ref_M, lengths)
    gains = [[float(gain) for gain in row] for row in rows_of(expected_M * gains_M, lengths)]
    wanted = reference.token_clip(logp, proximal, gains, 0.2, 0.2) + 0.1 * reference.kl(logp, ref, "k2", ref)
    torch.testing.assert_close(got, wanted, **CLOSE)
    slopes = [torch.autograd.grad(loss, policy_M)[0] for loss in (got, wanted)]
    torch.testing.assert_close(*slopes, **CLOSE)


def test_bounds_are_the_published_ones() -> None:
    # verl's RolloutCorrectionConfig: decoupled_token_is (2), decoupled_token_icepop (0.5 to 5), decoupled_geo_rs (0.999
    # to 1.001), decoupled_k3_rs (0.01). Weights of whole sequences: C up to 10, fengyao.notion.site/off-policy-rl.
    published = {
        "none": (0.0, math.inf),
        "token_truncate": (0.0, 2.0),
        "token_mask": (0.5, 5.0),
        "sequence_truncate": (0.0, 10.0),
        "sequence_mask": (0.0, 10.0),
        "geometric_mask": (0.999, 1.001),
        "k3_mask": (0.0, 0.01),
    }
    assert published == BOUNDS


@pytest.mark.parametrize("kind", KINDS)
def test_the_cases_lie_on_both_sides_of_the_bounds(kind: Any) -> None:
    _, proximal_M, sampler_M, sequence_M = make_columns(0)
    low, high = RANGES[kind]
    _, active_M = correction_weights(proximal_M, sampler_M, sequence_M, kind, low=low, high=high)
    assert 0.1 < float(active_M.double().mean()) < 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", BOUNDS)
def test_on_policy_nothing_is_weighed_or_rejected(kind: Any, dtype: torch.dtype) -> None:
    # Also where sampler and trainer differ by what two kernels differ by.
    low, high = BOUNDS[kind]
    generator = torch.Generator().manual_seed(0)
    start_M = -3 * torch.rand(500, generator=generator, dtype=dtype)
    sequence_M = torch.arange(10).repeat_interleave(50)
    for size in (0.0, 1e-6, 1e-5, 1e-4):
        moved_M = start_M + size * (2 * torch.rand(500, generator=generator, dtype=dtype) - 1)
        weights_M, active_M = correction_weights(moved_M, start_M, sequence_M, kind, low=low, high=high)
        assert not active_M.any(), size
        # 50 tokens of at most 1e-4 each.
        torch.testing.assert_close(weights_M, torch.ones_like(start_M), rtol=0, atol=50 * size + 1e-6)
    assert torch.equal(
        correction_weights(start_M, start_M, sequence_M, kind, low=low, high=high)[0], start_M**0
    )


def test_none_is_one_whatever_the_ratio() -> None:
    weights_M, active_M = correction_weights(
        torch.tensor([0.0, -9.0]), torch.tensor([-9.0, 0.0]), torch.tensor([0, 0]), "none", low=0.0, high=9.0
    )
    assert weights_M.tolist() == [1.0, 1.0]
    assert not active_M.any()


@pytest.mark.parametrize(
    "kind", ["token_truncate", "token_mask", "sequence_mask", "geometric_mask", "k3_mask"]
)
def test_bounds_belong_to_what_is_kept(kind: Any) -> None:
    zeros, edge = torch.zeros(3), 0.0 if kind == "k3_mask" else 1.0
    sequence_M = torch.tensor([0, 0, 1])
    weights_M, active_M = correction_weights(zeros, zeros, sequence_M, kind, low=edge, high=edge)
    assert weights_M.tolist() == [1.0, 1.0, 1.0]
    assert not active_M.any()


def test_a_product_grows_with_length_and_a_geometric_mean_does_not() -> None:
    sampler_M = torch.zeros(100, dtype=torch.float64)
    proximal_M, sequence_M = sampler_M + math.log(1.1), torch.zeros(100, dtype=torch.long)
    wide = {"low": 0.0, "high": math.inf}
    product_M, _ = correction_weights(proximal_M, sampler_M, sequence_M, "sequence_mask", **wide)
    assert product_M.tolist() == pytest.approx([1.1**100] * 100)  # 13,780
    # Beyond e^20 it stops: 100 tokens at e each.
    limited_M, _ = correction_weights(sampler_M + 1.0, sampler_M, sequence_M, "sequence_mask", **wide)
    assert limited_M.tolist() == pytest.approx([math.exp(20)] * 100)
    token_M, _ = correction_weights(proximal_M, sampler_M, sequence_M, "token_mask", **wide)
    assert token_M.tolist() == pytest.approx([1.1] * 100)
    for high, kept in ((1.11, 1.0), (1.09, 0.0)):
        options = {"low": 0.9, "high": high}
        mean_M, _ = correction_weights(proximal_M, sampler_M, sequence_M, "geometric_mask", **options)
        assert mean_M.tolist() == [kept] * 100


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_constants(kind: Any) -> None:
    _, proximal_M, sampler_M, sequence_M = make_columns(1)
    weights_M, _ = correction_weights(
        proximal_M.requires_grad_(), sampler_M.requires_grad_(), sequence_M, kind, low=0.0, high=9.0
    )
    assert not weights_M.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_is_weighed_alone(kind: Any) -> None:
    lengths, proximal_M, sampler_M, sequence_M = make_columns(2)
    low, high = RANGES[kind]
    together_M, _ = correction_weights(proximal_M, sampler_M, sequence_M, kind, low=low, high=high)
    parts = []
    for first_M, second_M in zip(proximal_M.split(lengths), sampler_M.split(lengths), strict=True):
        alone = torch.zeros(len(first_M), dtype=torch.long)
        parts.append(correction_weights(first_M, second_M, alone, kind, low=low, high=high)[0])
    assert torch.equal(together_M, torch.cat(parts))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e30, -1e30])
@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_garbage_stays_in_its_sequence(kind: Any, column: int, bad: float) -> None:
    lengths, *columns, sequence_M = make_columns(3)
    low, high = RANGES[kind]
    clean_M, _ = correction_weights(columns[0], columns[1], sequence_M, kind, low=low, high=high)
    columns[column][sequence_M == 4] = bad
    got_M, _ = correction_weights(columns[0], columns[1], sequence_M, kind, low=low, high=high)
    others = sequence_M != 4
    assert torch.equal(got_M[others], clean_M[others])
    if not math.isnan(bad):
        assert got_M.isfinite().all()
