"""Statistics of an evaluation: pass@k, majority votes, intervals, paired tests. Pure functions, numpy only.

The unit of resampling is the problem: completions of one problem are not independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
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

    For quantities without bounds (lengths, nats). When all values are equal the interval is a point; for shares use
    `share_interval`.

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


def paired_interval(
    a_P: Sequence[float] | np.ndarray,
    b_P: Sequence[float] | np.ndarray,
    *,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    exact_p: float | None = None,
    confidence: float = 0.95,
) -> tuple[Interval, float]:
    """Compare two systems on the same problems: interval of mean(b) - mean(a) and its two-sided p-value.

    A t interval of the differences with one more problem, which could have gone either way by the largest difference
    seen. With few problems, of which few change, what has not been seen matters most: there plain t and bootstrap
    intervals leave out the truth in up to 60 % of draws. The interval excludes 0 exactly if p < 1 - confidence.

    Args:
        a_P: Scores of the first system (the baseline), one per problem.
        b_P: Scores of the second system, on the same problems in the same order.
        bounds: Least and greatest possible difference. With finite ones the interval of systems that never differ is
            not a point, but what Wilson's interval of n successes in n leaves open for problems that were not sampled.
        exact_p: The p-value of an exact test (McNemar's); without one p is at least that of a sign test in which all
            m problems that changed did so in one direction, 2^(1-m).
        confidence: Coverage in (0, 1).

    Returns:
        (interval of the difference, p-value in (0, 1]).

    Raises:
        ValueError: If the lengths differ, or as in `bootstrap_interval`.

    Source:
        Agresti and Min 2005 (Statistics in Medicine 24:729): for right-or-wrong scores it is their interval with 1/2
        added to each cell of changed problems. Coverage: docs/evaluation.md.
    """
    a, b = _scores("a_P", a_P), _scores("b_P", b_P)
    if a.shape != b.shape:
        raise ValueError(f"paired scores must have one entry per shared problem, got {a.size} and {b.size}")
    difference, size = b - a, a.size + 1
    mean, largest = float(difference.mean()), float(np.abs(difference).max())
    lowest, highest = bounds
    quantile = _t_quantile(confidence, size)
    if largest < 1e-12:
        unseen = _unseen(a.size) if math.isfinite(highest) else 0.0
        return Interval(mean, max(lowest, -unseen), min(highest, unseen)), 1.0

    centre = float(difference.sum()) / size
    squares = float((difference**2).sum()) + largest**2
    error = math.sqrt(max(squares / size - centre**2, 0.0) / size)
    p = t_tails(abs(centre) / error, size)
    if exact_p is None:
        p = max(p, 2.0 ** (1 - int(np.count_nonzero(np.abs(difference) > 1e-12))))
    else:
        p = exact_p if p < 1 - confidence else max(p, exact_p)
    low, high = centre - quantile * error, centre + quantile * error
    if p >= 1 - confidence:  # the interval is the hull of the differences that no test rejects
        low, high = min(low, 0.0), max(high, 0.0)
    return Interval(mean, max(lowest, low), min(highest, high)), p


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
    interval = _wilson(successes / n, n, _two_sided_z(confidence))
    # At 0 and n the ends are exact; rounding must not push them past the estimate.
    low = 0.0 if successes == 0 else interval.low
    high = 1.0 if successes == n else interval.high
    return Interval(interval.mean, low, high)


def _wilson(share: float, n: float, z: float) -> Interval:
    """Give Wilson's interval of a share of n trials, which need not be a whole number."""
    centre = (n * share + z * z / 2) / (n + z * z)
    half = z * math.sqrt(n * share * (1 - share) + z * z / 4) / (n + z * z)
    return Interval(share, centre - half, centre + half)


def share_interval(values_P: Sequence[float] | np.ndarray) -> Interval:
    """Give the 95 % interval of a mean of shares: Wilson's, of as many problems as have the variance that was seen.

    Shares of several samples spread less than verdicts: their mean is as sure as that of P / D verdicts, D being their
    variance over mean (1 - mean). Few problems underestimate D when they miss the rare extreme one, so it is shrunk
    towards 1 by one problem of the largest variance that a share can have, 1/4. Verdicts have D = 1: then, and where
    all are 0 or all are 1, it is `wilson_interval`. If all share another value, it is that value plus or minus what
    Wilson's interval of n successes in n leaves open for problems that were not sampled.

    Args:
        values_P: One share in [0, 1] per problem.

    Raises:
        ValueError: As in `bootstrap_interval`.

    Source:
        Wilson's interval with an effective sample size: Franco et al. 2019 (Journal of Survey Statistics and
        Methodology 7:334), t quantile after Korn and Graubard 1998. Coverage: docs/evaluation.md.
    """
    values = _scores("values_P", values_P)
    if np.isin(values, (0.0, 1.0)).all():
        return wilson_interval(int(values.sum()), values.size)
    mean = float(values.mean())
    if np.ptp(values) < 1e-12:
        unseen = _unseen(values.size)
        return Interval(mean, max(0.0, mean - unseen), min(1.0, mean + unseen))
    verdicts = values.size * mean * (1 - mean)  # the sum of squares, if each were 0 or 1
    effect = (float(((values - mean) ** 2).sum()) + 0.25) / (verdicts + 0.25)
    return _wilson(mean, values.size / effect, _t_quantile(0.95, max(1, values.size - 1)))


def _unseen(n: int) -> float:
    """Return what n equal problems leave open: the width of Wilson's 95 % interval of n successes in n."""
    return 1 - wilson_interval(n, n).low


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


MAX_FREEDOM = 1000
"""Degrees of freedom beyond which t is taken as with so many: its 95 % quantile is then 0.12 % above the normal one."""


def t_tails(t: float, freedom: int) -> float:
    """Return the share of Student's t distribution beyond t >= 0 on both sides.

    Source:
        Abramowitz and Stegun 1964, 26.7.3 and 26.7.4: finite sums. Below 1e-15 what is left of 1 is rounding; there
        the result is that.
    """
    freedom = min(freedom, MAX_FREEDOM)
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term = total = cosine if freedom % 2 else 1.0
    for i in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= cosine**2 * (i - 1) / i
        total += term
    inside = 2 / math.pi * (angle + sine * total * (freedom > 1)) if freedom % 2 else sine * total
    return max(1 - inside, 1e-15)


@lru_cache
def _t_quantile(confidence: float, freedom: int) -> float:
    """Return the t that leaves (1 - confidence) / 2 above it, by bisection."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence}")
    low, high = 0.0, 1.0
    while t_tails(high, freedom) > 1 - confidence:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tails(middle, freedom) > 1 - confidence else (low, middle)
    return high


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
