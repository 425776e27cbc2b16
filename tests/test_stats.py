import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from whet import stats
from whet.stats import (
    Interval,
    _interval,
    _t_quantile,
    bootstrap_interval,
    majority_at_k,
    mcnemar_exact,
    minimum_detectable_effect,
    paired_interval,
    pass_at_k,
    share_interval,
    t_tails,
    wilson_interval,
)


def test_pass_at_k_equals_exhaustive_enumeration():
    for n in range(1, 8):
        for c in range(n + 1):
            samples = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = [any(subset) for subset in itertools.combinations(samples, k)]
                assert pass_at_k(n, c, k) == sum(subsets) / len(subsets)


def test_pass_at_k_is_correctly_rounded_for_large_n():
    for n, c, k in [(100_000, 1, 10), (10_000, 3, 5_000), (4_096, 4_000, 64)]:
        product = Fraction(1)  # an independent form: the k samples are drawn one after the other
        for i in range(min(k, n)):
            product *= Fraction(max(n - c - i, 0), n - i)
            if not product:
                break
        assert pass_at_k(n, c, k) == float(1 - product)


def test_pass_at_1_is_the_mean_and_never_the_first_sample():
    assert pass_at_k(8, 3, 1) == 3 / 8


@pytest.mark.parametrize(
    ("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0), (0, 0, 1), (-3, 0, -4)]
)
def test_pass_at_k_refuses(n, c, k):
    with pytest.raises(ValueError, match="num_correct|num_samples"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("answers", "credit"),
    [
        (["7", "7", "3"], 1.0),
        (["7", "3", "3"], 0.0),
        (["7", "3"], 0.5),
        (["7", "3", "4"], 1 / 3),
        (["7", "7", "3", "3", "4"], 0.5),
        ([None, None, None, "7"], 1.0),  # no answer has no vote, however often
        ([None, None, "3", "7"], 0.5),
        ([None, None], 0.0),
    ],
)
def test_majority_gives_expected_credit_on_ties(answers, credit):
    for order in (answers, answers[::-1]):
        assert majority_at_k(order, lambda answer: answer == "7") == credit


def test_majority_counts_every_correct_winner():
    assert majority_at_k(["1/2", "0.5", "3", "3", "1/2", "0.5"], lambda answer: answer != "3") == 2 / 3


def test_majority_refuses_no_samples():
    with pytest.raises(ValueError, match="at least one"):
        majority_at_k([], bool)


COVERAGE = 0.015
"""95 % +- 1.5 points over 2,000 draws: three standard errors of the simulation (0.49 points)."""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("a", "b", "num_problems"),
    [(2, 3, 60), (0.1, 4.9, 200)],
    ids=["middling", "nearly hopeless (2 %)"],
)
def test_bootstrap_interval_covers_the_truth(a, b, num_problems):
    # Scores c/8 of problems with different difficulty; the mean of Beta(a, b) is a / (a + b).
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(2000):
        values = rng.binomial(8, rng.beta(a, b, size=num_problems)) / 8
        interval = bootstrap_interval(values, num_resamples=500, seed=trial)
        hits += interval.low <= a / (a + b) <= interval.high
    assert abs(hits / 2000 - 0.95) <= COVERAGE


def shares(rng, num_draws, num_problems, accuracy, num_samples, shift=0.0):
    """Two systems on problems of differing difficulty, Beta(accuracy, 1 - accuracy) x 2; the second is better by a
    shift of the log odds. Returns both systems' shares of right samples, and the true accuracies."""
    everyone = np.clip(rng.beta(2 * accuracy, 2 * (1 - accuracy), 200_000), 1e-9, 1 - 1e-9)
    first_RP = everyone[: num_draws * num_problems].reshape(num_draws, num_problems)

    def better(p):
        return 1 / (1 + np.exp(-(np.log(p / (1 - p)) + shift)))

    drawn = [rng.binomial(num_samples, p_RP) / num_samples for p_RP in (first_RP, better(first_RP))]
    return *drawn, everyone.mean(), better(everyone).mean()


GRID = [(30, 0.05, 4), (30, 0.05, 16), (30, 0.5, 8), (10, 0.2, 4), (100, 0.05, 8)]


@pytest.mark.parametrize(("num_problems", "accuracy", "num_samples"), GRID)
def test_intervals_of_few_problems_cover_the_truth(num_problems, accuracy, num_samples):
    rng = np.random.default_rng(0)
    draws = 1000
    first_RP, second_RP, truth, better = shares(rng, draws, num_problems, accuracy, num_samples, 1.0)
    again_RP = shares(np.random.default_rng(0), draws, num_problems, accuracy, num_samples)[1]
    mean, null, real, false_alarms = 0, 0, 0, 0
    for first_P, second_P, again_P in zip(first_RP, second_RP, again_RP, strict=True):
        interval = share_interval(first_P)
        mean += interval.low <= truth <= interval.high
        delta, p = paired_interval(first_P, second_P, bounds=(-1.0, 1.0))
        real += delta.low <= better - truth <= delta.high
        assert (p < 0.05) == (not delta.low <= 0 <= delta.high)
        delta, p = paired_interval(first_P, again_P, bounds=(-1.0, 1.0))
        null += delta.low <= 0 <= delta.high
        false_alarms += p < 0.05
    # Three standard errors of 1,000 draws at 95 % are 2.1 points; below nominal by another point at most.
    assert min(mean, null, real) >= 919
    assert false_alarms <= 71


def test_intervals_of_shares_are_not_wide_for_that():
    rng = np.random.default_rng(2)
    values = rng.binomial(8, rng.beta(1, 2, size=200)) / 8
    plain = 2 * 1.96 * values.std() / math.sqrt(200)
    ours = share_interval(values)
    assert ours.high - ours.low == pytest.approx(plain, rel=0.03)
    other = rng.binomial(8, rng.beta(1, 2, size=200)) / 8
    delta, _ = paired_interval(values, other)
    plain = 2 * 1.96 * (other - values).std() / math.sqrt(200)
    assert delta.high - delta.low == pytest.approx(plain, rel=0.05)


def test_share_interval_is_wilsons_of_as_many_verdicts_as_have_that_variance():
    assert share_interval([0.0, 1.0, 1.0, 0.0, 1.0]) == wilson_interval(3, 5)
    assert share_interval([1.0] * 9) == wilson_interval(9, 9)
    # Halves and three quarters: mean 5/8, squares 16/64, of verdicts 16 * 15/64, and t(15)
    t = 2.131450
    n = 16 / ((16 / 64 + 1 / 4) / (16 * 15 / 64 + 1 / 4))
    centre = (n * 5 / 8 + t * t / 2) / (n + t * t)
    half = t * math.sqrt(n * 15 / 64 + t * t / 4) / (n + t * t)
    interval = share_interval([0.5] * 8 + [0.75] * 8)
    assert (interval.low, interval.high) == (
        pytest.approx(centre - half, abs=1e-6),
        pytest.approx(centre + half, abs=1e-6),
    )


def test_paired_interval_is_that_of_agresti_and_min():
    # 100 problems, 2 lost and 9 won, and 1/2 added to each: (w - l) / N +- t sqrt((w + l - (w - l)^2 / N) / N^2)
    won, lost, size, t = 9.5, 2.5, 101, 1.983731
    half = t * math.sqrt(won + lost - (won - lost) ** 2 / size) / size
    scores = np.zeros((2, 100))
    scores[0, :2] = scores[1, 2:11] = 1
    delta, p = paired_interval(*scores)
    assert delta.mean == pytest.approx(0.07)
    assert (delta.low, delta.high) == (
        pytest.approx(7 / size - half, abs=1e-6),
        pytest.approx(7 / size + half, abs=1e-6),
    )
    assert 0.03 < p < 0.05
    # The scale of the scores does not matter.
    tenth, same = paired_interval(*(scores / 10))
    assert (tenth.low, tenth.high, same) == (
        pytest.approx(delta.low / 10),
        pytest.approx(delta.high / 10),
        pytest.approx(p),
    )


def test_verdicts_have_an_interval_that_excludes_0_exactly_if_mcnemar_does():
    for n in (6, 10, 30, 100):
        for lost, won in itertools.product(range(n + 1), repeat=2):
            if 0 < lost + won <= min(n, 24):
                scores = np.zeros((2, n))
                scores[0, :lost] = scores[1, lost : lost + won] = 1
                exact = mcnemar_exact(lost, won)
                delta, p = paired_interval(*scores, bounds=(-1.0, 1.0), exact_p=exact)
                assert p == exact
                assert (p < 0.05) == (not delta.low <= 0 <= delta.high)
                assert -1 <= delta.low <= delta.mean <= delta.high <= 1


def test_t_distribution_equals_scipys():
    scipy_stats = pytest.importorskip("scipy.stats")
    for freedom in (1, 2, 3, 4, 7, 30, 101, 1000):
        for t in (0.0, 0.3, 1.0, 2.5, 6.0):
            assert t_tails(t, freedom) == pytest.approx(2 * scipy_stats.t.sf(t, freedom), abs=1e-12)
        for confidence in (0.5, 0.95, 0.999):
            theirs = scipy_stats.t.ppf((1 + confidence) / 2, freedom)
            assert _t_quantile(confidence, freedom) == pytest.approx(theirs, rel=1e-9)
    assert t_tails(2.0, 10**6) == pytest.approx(2 * scipy_stats.t.sf(2.0, 1000), abs=1e-12)
    assert t_tails(1e9, 50) > 0


def test_wilson_interval_covers_the_truth():
    # Exact: the binomial's probabilities of the counts whose interval holds p, averaged over p (it oscillates with p).
    for n in (50, 200):
        covered = []
        for p in np.linspace(0.02, 0.98, 193):
            log_odds = math.log(p / (1 - p))
            weights = [math.comb(n, k) * math.exp(k * log_odds + n * math.log1p(-p)) for k in range(n + 1)]
            holds = [wilson_interval(k, n).low <= p <= wilson_interval(k, n).high for k in range(n + 1)]
            covered.append(sum(w for w, inside in zip(weights, holds, strict=True) if inside))
        assert abs(np.mean(covered) - 0.95) <= COVERAGE


def test_bootstrap_interval_equals_scipys():
    scipy_stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    for values in (rng.binomial(8, rng.beta(1, 9, 120)) / 8, rng.random(80), rng.exponential(size=60)):
        ours = bootstrap_interval(values, num_resamples=20_000)
        theirs = scipy_stats.bootstrap(
            (values,), np.mean, n_resamples=20_000, method="BCa", rng=np.random.default_rng(1)
        ).confidence_interval
        # Two sets of 20,000 resamples: a quantile errs by about 0.013 standard errors, the widening adds up to 0.06.
        slack = 0.12 * values.std() / math.sqrt(values.size)
        assert ours.low == pytest.approx(theirs.low, abs=slack)
        assert ours.high == pytest.approx(theirs.high, abs=slack)


def test_paired_p_value_is_near_the_permutation_tests():
    scipy_stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(3)
    first = rng.binomial(8, rng.beta(1, 2, 150)) / 8
    second = np.clip(first + rng.choice([-0.125, 0, 0.125], 150, p=[0.25, 0.4, 0.35]), 0, 1)
    _, ours = paired_interval(first, second)
    theirs = scipy_stats.permutation_test(
        (second, first),
        lambda b, a, axis: np.mean(b - a, axis=axis),
        permutation_type="samples",
        n_resamples=20_000,
        vectorized=True,
        rng=np.random.default_rng(0),
    ).pvalue
    assert 0.01 < theirs < 0.3  # a case in which the two could differ
    assert ours == pytest.approx(theirs, abs=0.02)


def test_mcnemar_equals_statsmodels():
    tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    for b, c in itertools.product(range(9), range(9)):
        theirs = tables.mcnemar([[5, b], [c, 7]], exact=True).pvalue
        assert mcnemar_exact(b, c) == pytest.approx(theirs, rel=1e-12)


def test_wilson_equals_statsmodels():
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    for successes, n in itertools.product(range(0, 41, 5), (40, 200)):
        low, high = proportion.proportion_confint(successes, n, method="wilson")
        ours = wilson_interval(successes, n)
        assert (ours.low, ours.high) == (pytest.approx(low, abs=1e-12), pytest.approx(high, abs=1e-12))


@pytest.mark.parametrize("name", ["ties", "right skew", "left skew"])
def test_bca_equals_its_definition(name):
    """Midranks for the bias, the jackknife for the acceleration, t for the width: none of it as `_interval` does it."""
    scipy_stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    values = {
        "ties": np.repeat([0.0, 1.0], [28, 12]),  # an eighth of all resampled means is the mean itself
        "right skew": rng.exponential(size=40),
        "left skew": -rng.exponential(size=40),
    }[name]
    # Without the two smallest values: the median of the means is off, so that the bias counts.
    means = rng.choice(np.sort(values)[2:], size=(4000, 40)).mean(axis=1)
    midrank = scipy_stats.percentileofscore(means, values.mean(), kind="mean") / 100
    bias = scipy_stats.norm.ppf(midrank)
    left_out = (values.sum() - values) / 39
    pulls = left_out.mean() - left_out
    acceleration = (pulls**3).sum() / (6 * (pulls**2).sum() ** 1.5)
    z = scipy_stats.t.ppf(0.975, 39) * math.sqrt(40 / 39)
    ends = [scipy_stats.norm.cdf(bias + (bias + s) / (1 - acceleration * (bias + s))) for s in (-z, z)]
    ours = _interval(values, means, 0.95)
    # The two terms of the t quantile are right to 1e-4 at 39 degrees of freedom: less than a rank of 4,000.
    for end, share in ((ours.low, ends[0]), (ours.high, ends[1])):
        ranks = np.clip([share - 1 / 4000, share + 1 / 4000], 0, 1)
        assert np.quantile(means, ranks[0]) <= end <= np.quantile(means, ranks[1])
    assert abs(bias) > 0.05
    assert abs(acceleration) > 0.01


def test_a_handful_of_values_does_not_turn_the_interval_over():
    # 1 - a (z0 + z) is below 0 here: taken at its word, the upper end would be the lowest mean of all.
    interval = bootstrap_interval([0.0, 0.0, 1.0], confidence=0.999)
    assert (interval.low, interval.high) == (0.0, 1.0)


def test_bootstrap_interval_agrees_with_the_normal_approximation():
    values = np.arange(400) % 2
    interval = bootstrap_interval(values, num_resamples=20_000)
    half = 1.959964 * math.sqrt(0.25 / 400)
    assert interval.mean == 0.5
    # The quantile error of 20,000 resamples is about 0.0005, the grid of means 0.0025.
    assert interval.low == pytest.approx(0.5 - half, abs=0.003)
    assert interval.high == pytest.approx(0.5 + half, abs=0.003)


def test_bootstrap_is_seeded_and_independent_of_the_memory_bound(monkeypatch):
    values = np.random.default_rng(1).random(50)
    whole = bootstrap_interval(values, num_resamples=500, seed=3)
    assert bootstrap_interval(values, num_resamples=500, seed=3) == whole
    assert bootstrap_interval(values, num_resamples=500, seed=4) != whole
    monkeypatch.setattr(stats, "MAX_RESAMPLED_VALUES", 333)
    assert bootstrap_interval(values, num_resamples=500, seed=3) == whole


def test_bootstrap_of_a_single_problem_is_a_point():
    assert bootstrap_interval([0.25]) == Interval(0.25, 0.25, 0.25)


@pytest.mark.parametrize("values", [[], [float("nan")], [[0.0, 1.0]]])
def test_bootstrap_refuses_bad_scores(values):
    with pytest.raises(ValueError, match="values_P"):
        bootstrap_interval(values)


@pytest.mark.parametrize("options", [{"confidence": 1.0}, {"confidence": 0}, {"num_resamples": 0}])
def test_bootstrap_refuses_bad_options(options):
    with pytest.raises(ValueError, match="confidence|num_resamples"):
        bootstrap_interval([0.0, 1.0], **options)


# Newcombe 1998, Statistics in Medicine 17:857, table I, method 3 (four decimals printed).
@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_has_the_published_values(successes, n, low, high):
    interval = wilson_interval(successes, n)
    assert interval.mean == successes / n
    assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    mirrored = wilson_interval(n - successes, n)
    assert (mirrored.low, mirrored.high) == (
        pytest.approx(1 - interval.high),
        pytest.approx(1 - interval.low),
    )


def test_wilson_interval_holds_its_estimate_at_the_ends():
    for n in range(1, 60):
        assert wilson_interval(0, n).low == 0.0
        assert wilson_interval(n, n).high == 1.0


@pytest.mark.parametrize("arguments", [(1, 0), (3, 2), (-1, 2), (1, 2, 1.5)])
def test_wilson_interval_refuses(arguments):
    with pytest.raises(ValueError, match="Wilson|confidence"):
        wilson_interval(*arguments)


def test_paired_interval_sees_a_paired_difference_and_its_direction():
    rng = np.random.default_rng(0)
    difficulty = rng.random(200)
    a, b = difficulty, difficulty + 0.05 + 0.02 * rng.standard_normal(200)
    delta, p_value = paired_interval(a, b)
    assert (
        0.04 < delta.low < delta.mean < delta.high < 0.06
    )  # spread between problems (0.29) has left the interval
    assert p_value < 1e-12
    reverse, same = paired_interval(b, a)
    assert (reverse.low, reverse.high) == (pytest.approx(-delta.high), pytest.approx(-delta.low))
    assert same == p_value


def test_paired_p_value_is_uniform_under_the_null():
    rng = np.random.default_rng(0)
    p_values = np.array([paired_interval(rng.random(40), rng.random(40))[1] for _ in range(2000)])
    # 5 % nominal, 2,000 trials: standard error 0.5 %; one problem more of the largest difference makes it careful.
    assert 0.02 <= (p_values <= 0.05).mean() <= 0.06
    assert 0.42 <= (p_values <= 0.5).mean() <= 0.53


def test_systems_that_never_differ():
    assert paired_interval([0, 1, 1], [0, 1, 1]) == (Interval(0.0, 0.0, 0.0), 1.0)
    unseen = 1 - wilson_interval(3, 3).low
    assert paired_interval([0, 1, 1], [0, 1, 1], bounds=(-1.0, 1.0)) == (Interval(0.0, -unseen, unseen), 1.0)
    assert paired_interval([0, 1, 1], [0, 1, 1], bounds=(0.0, 1.0)) == (Interval(0.0, 0.0, unseen), 1.0)


def test_paired_interval_refuses_different_problems():
    with pytest.raises(ValueError, match="2 and 3"):
        paired_interval([0, 1], [0, 1, 1])


def test_mcnemar_has_its_closed_form():
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(0, 5) == 2 / 32
    assert mcnemar_exact(1, 7) == 2 * (1 + 8) / 256
    assert mcnemar_exact(6, 2) == mcnemar_exact(2, 6) == 2 * (1 + 8 + 28) / 256
    assert mcnemar_exact(4, 4) == 1.0
    for b, c in itertools.product(range(12), repeat=2):
        tail = sum(math.comb(b + c, i) for i in range(min(b, c) + 1))
        assert mcnemar_exact(b, c) == min(1.0, 2 * tail / 2 ** (b + c))


def test_mcnemar_stands_large_counts():
    assert mcnemar_exact(5_000, 6_000) == pytest.approx(
        2 * 0.5 * math.erfc(999 / math.sqrt(11_000) / math.sqrt(2)), rel=0.02
    )


def test_mcnemar_refuses_negative_counts():
    with pytest.raises(ValueError, match=">= 0"):
        mcnemar_exact(-1, 3)


def test_minimum_detectable_effect_golden():
    # requirements 6.10: n=200, p=2 % -> 3.9 points unpaired at 80 % power, 95 % half-width 1.9 points.
    assert round(100 * minimum_detectable_effect(0.02, 200), 1) == 3.9
    assert round(100 * 1.959964 * math.sqrt(0.02 * 0.98 / 200), 1) == 1.9
    assert minimum_detectable_effect(0.5, 100) == pytest.approx(
        (1.959964 + 0.841621) * math.sqrt(0.5 / 100), rel=1e-6
    )


def test_minimum_detectable_effect_is_seen_with_the_promised_power():
    rng = np.random.default_rng(0)
    n, p = 400, 0.4
    effect = minimum_detectable_effect(p + 0.05, n)
    a, b = rng.binomial(n, p, 20_000) / n, rng.binomial(n, p + effect, 20_000) / n
    pooled = (a + b) / 2
    seen = np.abs(b - a) / np.sqrt(2 * pooled * (1 - pooled) / n) > 1.959964
    assert seen.mean() == pytest.approx(
        0.8, abs=0.015
    )  # standard error 0.003, plus the common-variance approximation


@pytest.mark.parametrize("arguments", [(1.5, 10), (0.5, 0), (0.5, 10, 1.0), (0.5, 10, 0.8, 0.0)])
def test_minimum_detectable_effect_refuses(arguments):
    with pytest.raises(ValueError, match="power|confidence"):
        minimum_detectable_effect(*arguments)
