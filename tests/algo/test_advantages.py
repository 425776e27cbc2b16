"""Advantages against closed forms, hand-made examples and the references."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import losses as reference

from whet.algo.advantages import (
    generalised_advantages,
    group_advantages,
    has_spread,
    normalised_rewards,
    overlong_penalty,
    rewards_to_go,
    standard_deviation,
)
from whet.algo.config import AlgoConfig
from whet.train.objective.advantage import with_advantages
from whet.types import Group, Problem, Sample

GRID = st.integers(-256, 256).map(lambda number: number / 64)
GROUPS = st.integers(2, 7).flatmap(
    lambda size: st.lists(st.lists(GRID, min_size=size, max_size=size), min_size=1, max_size=3)
)
# Sums of at most 21 numbers of size 4 in float64; advantages are at most a few units.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def matrix(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("rewards", "ddof", "expected"),
    [
        ([0, 0, 0, 1], 0, [-0.57735, -0.57735, -0.57735, 1.73205]),
        ([0, 0, 0, 1], 1, [-0.5, -0.5, -0.5, 1.5]),
        ([0, 0.25, 0.25, 1], 1, [-0.86603, -0.28868, -0.28868, 1.44338]),
        ([0, 0.25, 0.25, 1], 0, [-1.0, -1 / 3, -1 / 3, 5 / 3]),
    ],
)
def test_golden_z_scores(rewards: list[float], ddof: int, expected: list[float]) -> None:
    got = group_advantages(matrix([rewards]), std_ddof=ddof, eps=0.0)
    # The published numbers have five digits.
    torch.testing.assert_close(got, matrix([expected]), rtol=0, atol=1e-5)


@given(GROUPS, st.sampled_from([0, 1]))
@settings(deadline=None, max_examples=60)
def test_group_scale_is_the_z_score(rows: list[list[float]], ddof: int) -> None:
    got = group_advantages(matrix(rows), std_ddof=ddof, eps=1e-4)
    for row, advantages in zip(rows, got.tolist(), strict=True):
        deviation = (statistics.stdev if ddof else statistics.pstdev)(row)
        mean = statistics.fmean(row)
        expected = [(reward - mean) / (deviation + 1e-4) if deviation else 0.0 for reward in row]
        assert advantages == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(GROUPS)
@settings(deadline=None, max_examples=60)
def test_baselines_without_scale(rows: list[list[float]]) -> None:
    size = len(rows[0])
    centred = group_advantages(matrix(rows), scale="none")
    left_out = group_advantages(matrix(rows), baseline="leave_one_out", scale="none")
    by_hand = [[r - (sum(row) - r) / (size - 1) for r in row] for row in rows]
    torch.testing.assert_close(left_out, matrix(by_hand), **CLOSE)
    torch.testing.assert_close(left_out, size / (size - 1) * centred, **CLOSE)
    assert torch.equal(group_advantages(matrix(rows), baseline="none", scale="none"), matrix(rows))


@given(GROUPS, st.sampled_from(["group", "batch", "none"]), GRID, st.sampled_from([0.5, 2.0, 3.0]))
@settings(deadline=None, max_examples=60)
def test_shift_scale_sum_and_permutation(
    rows: list[list[float]], scale: str, shift: float, factor: float
) -> None:
    rewards_PG = matrix(rows)
    base = group_advantages(rewards_PG, scale=scale, eps=0.0)  # type: ignore[arg-type]
    shifted = group_advantages(rewards_PG + shift, scale="group", eps=0.0)
    torch.testing.assert_close(shifted, group_advantages(rewards_PG, scale="group", eps=0.0), **CLOSE)
    scaled = group_advantages(rewards_PG * factor, scale=scale, eps=0.0)  # type: ignore[arg-type]
    torch.testing.assert_close(scaled, base * (factor if scale == "none" else 1.0), **CLOSE)
    torch.testing.assert_close(base.sum(1), torch.zeros(len(rows), dtype=torch.float64), **CLOSE)
    order = torch.randperm(rewards_PG.shape[1], generator=torch.Generator().manual_seed(len(rows)))
    permuted = group_advantages(rewards_PG[:, order], scale=scale, eps=0.0)  # type: ignore[arg-type]
    torch.testing.assert_close(permuted, base[:, order], **CLOSE)


VALUES = (0.1, 0.3, 0.7, 1 / 3, 1.1, -0.2, 5.6, 1e-3, 123.456, 0.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_equal_rewards_give_exactly_zero(dtype: torch.dtype, baseline: str) -> None:
    # The mean of equal floats is often an ulp off; a division by that ulp would make advantages of size 1.
    for value, size, scale in itertools.product(VALUES, range(2, 18), ("group", "batch", "none")):
        rewards_PG = torch.full((2, size), value, dtype=dtype)
        rewards_PG[1, 0] += 1.0
        got = group_advantages(rewards_PG, baseline=baseline, scale=scale, eps=0.0)  # type: ignore[arg-type]
        assert not got[0].any(), (value, size, scale)
        assert got[1].all(), (value, size, scale)
        alone = group_advantages(rewards_PG[:1], baseline=baseline, scale=scale, eps=0.0)  # type: ignore[arg-type]
        assert not alone.any(), (value, size, scale)


@pytest.mark.parametrize("scale", ["group", "batch", "mean", "none"])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_792_groups_of_equal_float32_rewards(baseline: str, scale: str) -> None:
    # Rewards .01 to .99 in groups of 2 to 9. In float32 more than 200 of the 792 means are an ulp off, and a division
    # by that ulp gives advantages of size 1.
    traps = 0
    for size in range(2, 10):
        rewards_PG = (torch.arange(1, 100) / 100)[:, None].expand(99, size)
        traps += int((rewards_PG.contiguous().mean(1) != rewards_PG[:, 0]).sum())
        options = {"baseline": baseline, "scale": scale, "eps": 1e-9}
        assert not group_advantages(rewards_PG, **options).any()  # type: ignore[arg-type]
        for row_G in rewards_PG[::9]:
            assert not group_advantages(row_G[None], **options).any()  # type: ignore[arg-type]
    assert traps > 200


def test_rounding_errors_of_summed_rewards_are_no_spread() -> None:
    noisy = matrix([[0.1 + 0.2, 0.3, 0.3], [0.1 + 0.2, 0.3, 0.301]])
    assert has_spread(noisy, torch.ones(2, 3, dtype=torch.bool)).tolist() == [False, True]
    # Sums in float32 of another order differ by a few units in the last place, 2^-23 of their size; parts that cancel
    # leave the rounding of what was there before. One character of 8,192 is a difference: a reward of length counts it.
    for largest in (1.0, 1000.0):
        pair = matrix([[largest, largest * (1 - 4 * 2**-23)], [largest, largest * (1 - 1 / 8192)]])
        assert has_spread(pair, torch.ones(2, 2, dtype=torch.bool)).tolist() == [False, True]
    assert not has_spread(matrix([[0.1 + 0.2 - 0.3, 0.0]]), torch.ones(1, 2, dtype=torch.bool)).any()


def test_what_has_no_score_makes_no_spread() -> None:
    scored = torch.tensor([[True, True, False]])
    for unscored in (-9.0, 9.0, 1e9, math.nan):
        assert not has_spread(matrix([[1.0, 1.0, unscored]]), scored).any()
        # Nor does it hide one: what counts as rounding is relative to the scored rewards.
        assert has_spread(matrix([[1.0, 0.9, unscored]]), scored).all()


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_without_a_baseline_equal_rewards_are_not_blown_up(scale: str) -> None:
    got = group_advantages(matrix([[1.0, 1.0, 1.0]]), baseline="none", scale=scale)  # type: ignore[arg-type]
    assert got.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "none"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_unscorable_samples_leave_statistics(baseline: str, scale: str) -> None:
    rewards_PG = matrix([[1.0, math.nan, 0.0, 0.5], [2.0, 0.0, math.inf, 1.0]])
    scored_PG = torch.tensor([[True, False, True, True], [True, True, False, True]])
    got = group_advantages(rewards_PG, scored_PG, baseline=baseline, scale=scale)  # type: ignore[arg-type]
    without = group_advantages(
        matrix([[1.0, 0.0, 0.5], [2.0, 0.0, 1.0]]),
        baseline=baseline,
        scale=scale,  # type: ignore[arg-type]
    )
    torch.testing.assert_close(got[scored_PG], without.flatten(), **CLOSE)
    assert got[~scored_PG].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("num_scored", [0, 1])
def test_a_group_with_hardly_any_score_has_no_advantage(num_scored: int) -> None:
    scored_PG = torch.arange(4)[None] < num_scored
    for baseline, scale in itertools.product(("group_mean", "leave_one_out"), ("group", "batch", "none")):
        got = group_advantages(
            matrix([[3.0, 1.0, 2.0, 0.0]]),
            scored_PG,
            baseline=baseline,
            scale=scale,  # type: ignore[arg-type]
        )
        assert not got.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_scored_reward_must_be_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(matrix([[0.0, bad]]))


def test_a_group_of_one_needs_no_group_statistics() -> None:
    one = matrix([[2.0]])
    for baseline, scale in (("group_mean", "none"), ("leave_one_out", "batch"), ("none", "group")):
        with pytest.raises(ValueError, match="at least 2"):
            group_advantages(one, baseline=baseline, scale=scale)  # type: ignore[arg-type]
    assert group_advantages(one, baseline="none", scale="none").tolist() == [[2.0]]


@pytest.mark.parametrize("ddof", [0, 1])
def test_batch_scale_divides_by_the_deviation_of_all_rewards(ddof: int) -> None:
    rows = [[0.0, 1.0, 1.0], [2.0, 2.0, 5.0]]
    flat = [reward for row in rows for reward in row]
    deviation = (statistics.stdev if ddof else statistics.pstdev)(flat)
    expected = [[(r - statistics.fmean(row)) / (deviation + 0.01) for r in row] for row in rows]
    got = group_advantages(matrix(rows), scale="batch", std_ddof=ddof, eps=0.01)
    torch.testing.assert_close(got, matrix(expected), **CLOSE)


def test_batch_scale_takes_the_deviation_of_all_ranks_from_the_caller() -> None:
    rows = matrix([[0.0, 1.0], [2.0, 5.0]])
    got = group_advantages(rows, scale="batch", batch_std=2.0, eps=0.5)
    torch.testing.assert_close(got, matrix([[-0.2, 0.2], [-0.6, 0.6]]), **CLOSE)
    whole = standard_deviation(rows.flatten(), 1)
    parts = [group_advantages(row[None], scale="batch", batch_std=whole) for row in rows]
    torch.testing.assert_close(torch.cat(parts), group_advantages(rows, scale="batch"), **CLOSE)
    assert group_advantages(rows, scale="batch", batch_std=0.0).tolist() == [[-0.5, 0.5], [-1.5, 1.5]]


def test_scale_mean_divides_by_a_positive_mean_only() -> None:
    got = group_advantages(matrix([[0, 0, 0, 1], [1, 3, 1, 3], [-1, 0, 0, 0], [-1, 1, -1, 1]]), scale="mean")
    expected = [[-1, -1, -1, 3], [-0.5, 0.5, -0.5, 0.5], [0, 0, 0, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(got, matrix(expected), **CLOSE)


@pytest.mark.parametrize("ddof", [0, 1])
def test_standard_deviation(ddof: int) -> None:
    values = [1.0, 2.0, 4.0, 9.0]
    expected = (statistics.stdev if ddof else statistics.pstdev)(values)
    assert standard_deviation(torch.tensor(values).double(), ddof) == pytest.approx(expected, rel=1e-12)
    for flat in ([], [3.0], [0.1] * 7, [0.3, 0.1 + 0.2]):
        assert standard_deviation(torch.tensor(flat, dtype=torch.float64), ddof) == 0.0


PLANES = st.integers(0, 2**32).map(
    lambda seed: torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
)


def groups_of(rewards_PGX: torch.Tensor) -> list[Group]:
    samples = [
        tuple(
            Sample(
                uid=str(row),
                index=index,
                prompt_ids=(1,),
                completion_ids=(1,),
                sampler_logprobs=(0.0,),
                text="",
                finish_reason="stop",
                rewards=dict(zip("abc", scores, strict=True)),
                reward=sum(scores),
            )
            for index, scores in enumerate(rows)
        )
        for row, rows in enumerate(rewards_PGX.tolist())
    ]
    return [
        Group(problem=Problem(uid=group[0].uid, task="", prompt="", answer=""), samples=group)
        for group in samples
    ]


@given(PLANES)
@settings(deadline=None, max_examples=20)
def test_several_rewards_normalised_by_themselves(rewards_PGX: torch.Tensor) -> None:
    # One reward is a thousandth of the others' size, one is equal throughout the first group.
    rewards_PGX = rewards_PGX * torch.tensor([1.0, 1e-3, 1.0]).double()
    rewards_PGX[0, :, 2] = 0.1
    weights = {"a": 1.0, "b": 0.5, "c": -2.0}
    planes = [plane.tolist() for plane in rewards_PGX.unbind(-1)]
    everywhere = torch.ones(2, 4, dtype=torch.bool)
    sums_PG = normalised_rewards(rewards_PGX, list(weights.values()), everywhere, std_ddof=1, eps=1e-4)
    expected = [
        sum(w * z for w, z in zip(weights.values(), column, strict=True))
        for column in zip(*(reference.standardised(plane) for plane in planes), strict=True)
    ]
    torch.testing.assert_close(sums_PG.flatten(), torch.tensor(expected, dtype=torch.float64), **CLOSE)
    algo = AlgoConfig(multi_reward="normalise", uninformative="keep")
    filled = with_advantages(groups_of(rewards_PGX), algo, weights)
    got = [sample.advantage for group in filled for sample in group.samples]
    assert got == pytest.approx(reference.multi_reward(planes, list(weights.values())), rel=1e-9, abs=1e-9)


def test_generalised_advantages_by_hand() -> None:
    # Rewards 0, 0, 1; values .5, .6, .8. TD errors with gamma .9: .04, .12, .2.
    rewards, values = matrix([[0, 0, 1]]), matrix([[0.5, 0.6, 0.8]])
    trained = torch.ones(1, 3, dtype=torch.bool)
    got, returns = generalised_advantages(rewards, values, trained, gamma=0.9, lam=0.5)
    expected = [0.04 + 0.45 * (0.12 + 0.45 * 0.2), 0.12 + 0.45 * 0.2, 0.2]
    torch.testing.assert_close(got, matrix([expected]), **CLOSE)
    torch.testing.assert_close(returns, got + values, **CLOSE)
    monte_carlo, returns = generalised_advantages(rewards, values, trained, gamma=1.0, lam=1.0)
    torch.testing.assert_close(monte_carlo, 1.0 - values, **CLOSE)
    torch.testing.assert_close(returns, torch.ones(1, 3, dtype=torch.float64), **CLOSE)
    errors, _ = generalised_advantages(rewards, values, trained, gamma=0.9, lam=0.0)
    torch.testing.assert_close(errors, matrix([[0.04, 0.12, 0.2]]), **CLOSE)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from([0.0, 0.6, 1.0]), st.integers(0, 99)
)
@settings(deadline=None, max_examples=30)
def test_generalised_advantages_of_ragged_rows(lengths: list[int], lam: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths) + 1)
    rewards_BT, values_BT = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    trained_BT = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
    for garbage in (math.nan, math.inf, 1e30):
        got_BT, returns_BT = generalised_advantages(
            rewards_BT.masked_fill(~trained_BT, garbage),
            values_BT.masked_fill(~trained_BT, garbage),
            trained_BT,
            gamma=0.9,
            lam=lam,
        )
        assert not got_BT[~trained_BT].any()
        assert not returns_BT[~trained_BT].any()
        for row, count in enumerate(lengths):
            rewards, values = rewards_BT[row, :count].tolist(), values_BT[row, :count].tolist()
            expected = reference.gae(rewards, values, 0.9, lam)
            assert got_BT[row, :count].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
            targets = [a + v for a, v in zip(expected, values, strict=True)]
            assert returns_BT[row, :count].tolist() == pytest.approx(targets, rel=1e-9, abs=1e-9)


def test_rewards_to_go() -> None:
    rewards_T = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
    assert rewards_to_go(rewards_T).tolist() == [1.5, 1.0, 2.0, 2.0]
    assert rewards_to_go(rewards_T).tolist() == reference.to_go(rewards_T.tolist())


def test_clip() -> None:
    got = group_advantages(matrix([[0.0, 0.0, 0.0, 1.0]]), eps=0.0, clip=1.0)
    torch.testing.assert_close(got, matrix([[-0.5, -0.5, -0.5, 1.0]]), **CLOSE)
    below = group_advantages(matrix([[1.0, 1.0, 1.0, 0.0]]), eps=0.0, clip=1.0)
    torch.testing.assert_close(below, matrix([[0.5, 0.5, 0.5, -1.0]]), **CLOSE)


def test_arguments_are_not_written_to() -> None:
    rewards_PG = matrix([[1.0, math.nan, 0.0]])
    scored_PG = torch.tensor([[True, False, True]])
    group_advantages(rewards_PG, scored_PG, clip=0.1)
    assert rewards_PG[0, 0] == 1.0
    assert rewards_PG[0, 1].isnan()


@pytest.mark.parametrize(
    ("length", "expected"),
    [(16384, 0.0), (17408, -0.25), (18432, -0.5), (20480, -1.0), (20481, -1.0), (1, 0.0), (40000, -1.0)],
)
def test_overlong_penalty(length: int, expected: float) -> None:
    # DAPO's own lengths; all of these fractions are exact in binary.
    assert overlong_penalty(length, max_length=20480, cache_length=4096) == expected
