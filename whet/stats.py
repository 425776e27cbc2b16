"""Statistics of an evaluation: pass@k, majority votes, intervals, paired tests. Pure functions, numpy only.

The unit of resampling is the problem: completions of one problem are not independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

MAX_RESAMPLED_VALUES = 1 << 20
"""Values that one vectorised round of resampling may hold (8 MiB of indices)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval.

    Attributes:
        mean: The point estimate.
        low: Lower end.
        high: Upper end.
    """

    mean: float
    low: float
    high: float


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate without bias the chance that at least one of k samples is right: 1 - C(n-c, k) / C(n, k).

    Integers all the way and one final division, so the result is correctly rounded for every n.

    Args:
        num_samples: Samples drawn for the problem (n).
        num_correct: How many of them are correct (c).
        k: Samples per attempt; 1 gives the mean c/n.

    Returns:
        A probability in [0, 1].

    Raises:
        ValueError: If k < 1, n < k, or c is not in [0, n].

    Source:
        arXiv 2107.03374, equation 1.
    """
    if k < 1 or num_samples < k:
        raise ValueError(
            f"pass@k needs 1 <= k <= num_samples, got k={k}, num_samples={num_samples}: draw more samples"
        )
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct must be in [0, {num_samples}], got {num_correct}")
    ways = math.comb(num_samples, k)
    return (ways - math.comb(num_samples - num_correct, k)) / ways


def majority_at_k(answers: Sequence[str | None], is_correct: Callable[[str], float]) -> float:
    """Score the majority vote over all samples of one problem, with expected credit on ties.

    Args:
        answers: One canonical answer per sample: equal answers are equal strings. None has no vote.
        is_correct: Returns whether a canonical answer is right, or its credit in [0, 1]; called for the winners only.

    Returns:
        The mean credit of the tied winners; 0 when nobody answered.

    Raises:
        ValueError: If there are no samples.
    """
    if not answers:
        raise ValueError("majority@k needs at least one sample, got none")
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    return sum(is_correct(answer) for answer in winners) / len(winners)


def bootstrap_interval(
    values_P: Sequence[float] | np.ndarray,
    *,
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Give the bootstrap interval of a mean, resampling problems: BCa (corrected for bias and skew), widened for few.

    With 50 problems of which few are ever solved, plain percentile intervals cover the truth in 90 % of draws instead
    of 95 %, these in 92 %. When all values are equal the interval is a point; for a proportion use `wilson_interval`.

    Args:
        values_P: One finite score per problem.
        num_resamples: Bootstrap rounds; 2000 or more for a 95 % interval.
        confidence: Coverage in (0, 1).
        seed: Seed of the resampling.

    Returns:
        The mean with its interval.

    Raises:
        ValueError: If there are no values, a value is not finite, or an argument is out of range.

    Source:
        Efron and Tibshirani 1993, section 14.3. The acceleration of a mean is its skewness / (6 sqrt(P)) in closed
        form (their equation 14.15); ties with the mean count half in the bias correction. Widened for small P by
        Hesterberg 2015 (arXiv 1411.5279), section 5.3.
    """
    values = _scores("values_P", values_P)
    return _interval(values, _resampled_means(values, num_resamples, seed), confidence)


def paired_bootstrap(
    a_P: Sequence[float] | np.ndarray,
    b_P: Sequence[float] | np.ndarray,
    *,
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> tuple[Interval, float]:
    """Compare two systems on the same problems: interval of mean(b) - mean(a) and its two-sided p-value.

    The p-value shifts the resampled differences to the null hypothesis (mean difference 0) and counts those
    at least as extreme as the observed one, itself included; it is therefore never 0.

    Args:
        a_P: Scores of the first system (the baseline), one per problem.
        b_P: Scores of the second system, on the same problems in the same order.
        num_resamples: Bootstrap rounds.
        confidence: Coverage in (0, 1).
        seed: Seed of the resampling.

    Returns:
        (interval of the difference (BCa), p-value in (0, 1]).

    Raises:
        ValueError: If the lengths differ, or as in `bootstrap_interval`.

    Source:
        Efron and Tibshirani 1993, section 16.4 (one-sample test), with the +1 of Davison and Hinkley 1997,
        equation 4.11.
    """
    a, b = _scores("a_P", a_P), _scores("b_P", b_P)
    if a.shape != b.shape:
        raise ValueError(f"paired scores must have one entry per shared problem, got {a.size} and {b.size}")
    difference = b - a
    means = _resampled_means(difference, num_resamples, seed)
    observed = float(difference.mean())
    # The slack keeps exact ties (frequent with 0/1 scores) from being decided by the last bit.
    extreme = np.abs(means - observed) >= abs(observed) - 1e-12
    return _interval(difference, means, confidence), (1 + int(extreme.sum())) / (1 + num_resamples)


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Give the Wilson score interval of a proportion; it stays valid at 0 and 1, where the bootstrap collapses.

    Args:
        successes: Successes in [0, n].
        n: Independent trials, at least 1.
        confidence: Coverage in (0, 1).

    Returns:
        The proportion with its interval (without continuity correction).

    Raises:
        ValueError: If an argument is out of range.

    Source:
        Wilson 1927; method 3 of Newcombe 1998 (Statistics in Medicine 17:857).
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(
            f"Wilson interval needs n >= 1 and 0 <= successes <= n, got successes={successes}, n={n}"
        )
    z = _two_sided_z(confidence)
    share = successes / n
    centre = (successes + z * z / 2) / (n + z * z)
    half = z * math.sqrt(n * share * (1 - share) + z * z / 4) / (n + z * z)
    # At 0 and n the ends are exact; rounding must not push them past the estimate.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return Interval(share, low, high)


def share_interval(values_P: Sequence[float], seed: int = 0) -> Interval:
    """Give the 95 % interval of a mean of shares: Wilson's if each is 0 or 1, `unanimous` if all are equal, else BCa.

    Args:
        values_P: One share in [0, 1] per problem.
        seed: Seed of the resampling.

    Raises:
        ValueError: As in `bootstrap_interval`.
    """
    values = _scores("values_P", values_P)
    if np.isin(values, (0.0, 1.0)).all():
        return wilson_interval(int(values.sum()), values.size)
    if np.ptp(values) < 1e-12:
        return unanimous(float(values[0]), values.size)
    return bootstrap_interval(values, seed=seed)


def unanimous(value: float, n: int, lowest: float = 0.0) -> Interval:
    """Give the interval of a mean of n equal values: the bootstrap would give zero width.

    Args:
        value: The value, a share or a difference of shares.
        n: Problems, at least 1.
        lowest: The least that the value can be: 0, or -1 for a difference. The most is 1.

    Returns:
        The value, widened by what Wilson's interval of n successes in n leaves open for problems that were not drawn.
    """
    unseen = 1 - wilson_interval(n, n).low
    return Interval(value, max(lowest, value - unseen), min(1.0, value + unseen))


def mcnemar_exact(b: int, c: int) -> float:
    """Give the exact two-sided McNemar p-value for two systems judged right or wrong on the same problems.

    Args:
        b: Problems that only the first system has right.
        c: Problems that only the second system has right.

    Returns:
        min(1, 2 P(X <= min(b, c))) with X ~ Binomial(b + c, 1/2); 1 when they never disagree.

    Raises:
        ValueError: If a count is negative.
    """
    if b < 0 or c < 0:
        raise ValueError(f"McNemar counts must be >= 0, got b={b}, c={c}")
    tail = term = 1
    for i in range(min(b, c)):
        term = term * (b + c - i) // (i + 1)  # C(n, i + 1), exact: the division leaves no remainder
        tail += term
    return min(1.0, 2 * tail / 2 ** (b + c))


def fisher_exact(a: int, num_a: int, b: int, num_b: int) -> float:
    """Give Fisher's exact two-sided p-value for two proportions of unpaired observations.

    For two systems on the same problems use `mcnemar_exact`, which has more power.

    Args:
        a: Successes of the first system.
        num_a: Its trials.
        b: Successes of the second system.
        num_b: Its trials.

    Returns:
        The probability of all tables with the same margins that are as unlikely as the observed one, or more.

    Raises:
        ValueError: If a count is out of range.

    Source:
        Fisher 1935; the two-sided rule is that of R and scipy. Integers up to the last division: no tie is missed.
    """
    if not (0 <= a <= num_a and 0 <= b <= num_b and num_a and num_b):
        raise ValueError(
            f"expected 0 <= successes <= trials, trials >= 1, got {a} of {num_a}, {b} of {num_b}"
        )
    total = a + b
    counts = range(max(0, total - num_b), min(num_a, total) + 1)
    ways = [math.comb(num_a, count) * math.comb(num_b, total - count) for count in counts]
    observed = math.comb(num_a, a) * math.comb(num_b, b)
    return sum(number for number in ways if number <= observed) / math.comb(num_a + num_b, total)


def detectable_difference(
    values_P: Sequence[float] | np.ndarray, power: float = 0.8, confidence: float = 0.95
) -> float:
    """Give the smallest difference of means that two unpaired evaluations like this one would detect.

    For scores of 0 and 1 it is `minimum_detectable_effect`; several samples per problem make it smaller. When all
    scores are equal the formula gives 0, which is too good: at least one problem is assumed to differ.

    Args:
        values_P: One finite score in [0, 1] per problem.
        power: Chance to see a difference of that size, in (0, 1).
        confidence: 1 minus the two-sided significance level, in (0, 1).

    Raises:
        ValueError: If an argument is out of range.
    """
    values = _scores("values_P", values_P)
    edge = 1 / (values.size + 1)
    variance = max(float(values.var()), edge * (1 - edge))
    share = (1 + math.sqrt(max(0.0, 1 - 4 * variance))) / 2  # p with p (1-p) = variance
    return minimum_detectable_effect(share, values.size, power, confidence)


def minimum_detectable_effect(p: float, n: int, power: float = 0.8, confidence: float = 0.95) -> float:
    """Give the smallest difference between two unpaired evaluations that is detected with the given power.

    Args:
        p: Proportion around which both lie, in [0, 1].
        n: Problems in each evaluation.
        power: Chance to see a difference of that size, in (0, 1).
        confidence: 1 minus the two-sided significance level, in (0, 1).

    Returns:
        (z of significance + z of power) * sqrt(2 p (1-p) / n), as a difference of proportions.

    Raises:
        ValueError: If an argument is out of range.

    Source:
        The usual normal approximation with one common variance; for n=200, p=2 % it gives 3.9 points.
    """
    if n < 1 or not 0 <= p <= 1 or not 0 < power < 1:
        raise ValueError(f"expected n >= 1, p in [0, 1] and power in (0, 1), got n={n}, p={p}, power={power}")
    return (_two_sided_z(confidence) + NormalDist().inv_cdf(power)) * math.sqrt(2 * p * (1 - p) / n)


def _two_sided_z(confidence: float) -> float:
    """Return the normal quantile that leaves (1 - confidence) / 2 above it."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _widened(z: float, size: int) -> float:
    """Return the quantile that corrects for resampled spreads being too small: sqrt(n / (n-1)) t(n-1), in two terms."""
    freedom = max(1, size - 1)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return t * math.sqrt((freedom + 1) / freedom)


def _scores(name: str, values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the values as a checked one-dimensional float64 array."""
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or scores.size == 0 or not np.isfinite(scores).all():
        raise ValueError(f"{name} must be a non-empty list of finite scores, got shape {scores.shape}")
    return scores


def _resampled_means(values_P: np.ndarray, num_resamples: int, seed: int) -> np.ndarray:
    """Return the mean of each resample with replacement, in rounds of bounded memory."""
    if num_resamples < 1:
        raise ValueError(f"num_resamples must be >= 1, got {num_resamples}")
    rng = np.random.default_rng(seed)
    rows = max(1, MAX_RESAMPLED_VALUES // values_P.size)
    means = np.empty(num_resamples)
    for start in range(0, num_resamples, rows):
        stop = min(start + rows, num_resamples)
        means[start:stop] = values_P[rng.integers(values_P.size, size=(stop - start, values_P.size))].mean(
            axis=1
        )
    return means


def _interval(values_P: np.ndarray, means: np.ndarray, confidence: float) -> Interval:
    """Return the mean of the values with the BCa interval of the resampled means."""
    z = _widened(_two_sided_z(confidence), values_P.size)
    mean, normal = values_P.mean(), NormalDist()
    below = ((means < mean).mean() + (means <= mean).mean()) / 2
    bias = normal.inv_cdf(min(max(float(below), 0.5 / means.size), 1 - 0.5 / means.size))
    deviations = values_P - mean
    squares = float((deviations**2).sum())
    acceleration = float((deviations**3).sum()) / (6 * squares**1.5) if squares else 0.0
    ends = []
    for side in (bias - z, bias + z):
        stretch = 1 - acceleration * side  # <= 0 only with a handful of values: then skip the correction
        ends.append(normal.cdf(bias + (side / stretch if stretch > 0 else side)))
    low, high = np.quantile(means, ends)
    return Interval(float(mean), min(float(low), float(mean)), max(float(high), float(mean)))
