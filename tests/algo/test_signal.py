"""Where a step's signal comes from: shares, cancellation and repetition against hand-made groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.algo.signal import cancellation, repeated_share, signal_sums

ALL = torch.ones(1, 4, dtype=torch.bool)
SCORES = st.lists(st.lists(st.integers(-3, 3), min_size=3, max_size=3), min_size=4, max_size=4)


def planes(*columns: list[float]) -> torch.Tensor:
    """One group; a column of scores per reward."""
    return torch.tensor(columns, dtype=torch.float64).T[None]


def measures(
    rewards: torch.Tensor, weights: list[float], scored: torch.Tensor = ALL
) -> tuple[list[float], float]:
    shared, own, total = signal_sums(rewards, weights, scored)
    return [part / total if total else 0.0 for part in shared], cancellation(own, total)


def test_shares_by_hand() -> None:
    # Deviations: a = +-0.5, b = 0.1 x (+-0.5) uncorrelated with a: squares 1 to 0.01.
    shares, cancelled = measures(planes([1, 1, 0, 0], [1, 0, 1, 0]), [1.0, 0.1])
    assert shares == pytest.approx([1 / 1.01, 0.01 / 1.01])
    assert cancelled == pytest.approx(0.0, abs=1e-12)


def test_rewards_that_cancel() -> None:
    shares, cancelled = measures(planes([1, 0, 1, 0], [0, 1, 0, 1]), [1.0, 1.0])
    assert (shares, cancelled) == ([0.0, 0.0], 1.0)
    shares, cancelled = measures(planes([1, 0, 1, 0], [0, 1, 0, 1]), [1.0, 0.5])
    assert shares == pytest.approx([2.0, -1.0])  # deviations 0.5 and -0.25 of a total of 0.25
    assert cancelled == pytest.approx(1 - 0.25 / 1.25)


def test_rewards_that_agree_do_not_cancel() -> None:
    shares, cancelled = measures(planes([1, 0, 1, 0], [1, 0, 1, 0]), [1.0, 1.0])
    assert shares == pytest.approx([0.5, 0.5])
    assert cancelled == 0.0


def test_equal_scores_have_no_share() -> None:
    shares, cancelled = measures(planes([0, 0, 0, 0], [1, 1, 1, 1]), [1.0, 1.0])
    assert (shares, cancelled) == ([0.0, 0.0], 0.0)


def test_unscorable_samples_are_left_out() -> None:
    scored = torch.tensor([[True, True, True, False]])
    shared, own, total = signal_sums(planes([1, 0, 0, 9], [0, 1, 0, -9]), [1.0, 1.0], scored)
    again = signal_sums(planes([1, 0, 0], [0, 1, 0]), [1.0, 1.0], scored[:, :3])
    assert (shared, own, total) == again
    assert total == pytest.approx(2 * (1 / 3) ** 2 + (2 / 3) ** 2)


@settings(max_examples=50, deadline=None)
@given(scores=SCORES, weights=st.lists(st.integers(-2, 2), min_size=3, max_size=3))
def test_shares_add_up_to_the_spread(scores: list[list[int]], weights: list[int]) -> None:
    rewards = torch.tensor([scores], dtype=torch.float64)
    shared, own, total = signal_sums(rewards, weights, ALL)
    sums = (rewards[0] * torch.tensor(weights)).sum(1)
    assert sum(shared) == pytest.approx(total, abs=1e-9)
    assert total == pytest.approx(float((sums - sums.mean()).square().sum()), abs=1e-9)
    assert 0.0 <= cancellation(own, total) <= 1.0


def test_groups_have_means_of_their_own() -> None:
    one, two = planes([1, 0, 1, 0], [0, 0, 0, 1]), planes([9, 8, 9, 9], [5, 5, 5, 5])
    both = signal_sums(torch.cat([one, two]), [1.0, 1.0], ALL.expand(2, 4))
    parts = [signal_sums(group, [1.0, 1.0], ALL) for group in (one, two)]
    assert both[2] == pytest.approx(parts[0][2] + parts[1][2])
    assert both[0] == pytest.approx([a + b for a, b in zip(parts[0][0], parts[1][0], strict=True)])


def test_scaled_groups_count_alike_and_those_without_a_spread_not_at_all() -> None:
    """GRPO divides by the group's deviation: ten times the rewards are no more signal, and rounding is none."""
    small, large = planes([1, 0, 1, 0], [0, 0, 0.5, 0.5]), planes([10, 0, 10, 0], [0, 0, 5, 5])
    dull = planes([0.1 + 0.2, 0.3, 0.3, 0.3], [0, 0, 0, 0])
    shared, own, total = signal_sums(
        torch.cat([small, large, dull]), [1.0, 1.0], ALL.expand(3, 4), scale_groups=True
    )
    assert total == pytest.approx(2.0, rel=1e-12)  # sum(d d) is 1 in each of two groups
    # Deviations +-0.5 and +-0.25, uncorrelated: squares 1 to 1/4.
    assert shared == pytest.approx([2 * 0.8, 2 * 0.2])
    assert own == pytest.approx([2 * 0.8, 2 * 0.2])
    correlated = planes([1, 0, 1, 0], [1, 0, 0.5, 0])  # d_x d, not d_x d_x, is what the group is divided by
    shared, _, total = signal_sums(correlated, [1.0, 1.0], ALL, scale_groups=True)
    assert (sum(shared), total) == (pytest.approx(1.0), pytest.approx(1.0))


@pytest.mark.parametrize(
    ("ids", "share"),
    [
        ([], 0.0),
        ([1, 1, 1], 0.0),  # no 4-gram
        ([1, 2, 3, 4, 5, 6], 0.0),
        ([7] * 8, 4 / 5),  # five 4-grams, one of them new
        ([1, 2, 3, 4, 1, 2, 3, 4], 1 / 5),
        ([1, 2, 1, 2, 1, 2, 1], 2 / 4),
    ],
)
def test_repetition_by_hand(ids: list[int], share: float) -> None:
    assert repeated_share(ids) == pytest.approx(share)
