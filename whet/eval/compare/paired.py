"""Paired statistics of two evaluations, per metric: difference, interval, exact test, detectable effect.

Pure functions, numpy only. The unit is the problem: both models answered it, so its score in one is paired with its
score in the other. Completions of one problem are averaged first; they are not independent observations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from whet.eval.confidence import answer_entropy, vote_score, vote_share
from whet.stats import (
    Interval,
    mcnemar_exact,
    paired_interval,
    pass_at_k,
)

ALPHA = 0.05
POWER = 0.8
FEWEST_FLIPS = 6
"""Problems that must change, all in one direction, before the exact McNemar test can reach p < 0.05 (2 / 2**6 =
0.031)."""
UNITS = {
    "answer_logprob": "nats",
    "answer_entropy": "nats",
    "hedges": "per completion",
    "revisions": "per completion",
}
"""Units of metrics that are neither shares nor tokens."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Paired:
    """One metric of two models on their common problems.

    Attributes:
        metric: Name.
        a: Mean of the first model.
        b: Mean of the second.
        difference: b - a with its 95 % interval over problems.
        p: Two-sided p-value: exact McNemar for one right-or-wrong verdict per problem, else t (`paired_interval`).
        p_holm: The same, corrected for the number of models compared with the first.
        flips: Problems that only the first has right, and that only the second has right; None if a score is not a
            verdict.
        detectable: Smallest true difference that 4 of 5 such comparisons would detect; None with one problem.
        num_problems: Problems behind it.
    """

    metric: str
    a: float
    b: float
    difference: Interval
    p: float
    p_holm: float
    flips: tuple[int, int] | None
    detectable: float | None
    num_problems: int

    @property
    def is_shown(self) -> bool:
        """Whether the difference is significant at the 5 % level."""
        return self.p_holm < ALPHA


def score_problems(
    samples: Sequence[Sequence[Row]], greedy: Sequence[Row], num_samples: int
) -> dict[str, list[float | None]]:
    """Turn the stored completions of one model into one score per problem and metric.

    Args:
        samples: Sampled completions of each problem, as rows of eval_samples.jsonl.
        greedy: The greedy completion of each problem.
        num_samples: Samples per problem that are used; the same number for both models.

    Returns:
        Metric -> score of each problem, None if a problem has none. A metric that no row has is skipped.
    """
    rows = [row[:num_samples] for row in samples]
    num_correct = [sum(bool(done["correct"]) for done in row) for row in rows]
    scores: dict[str, list[float | None]] = {
        "pass@1": [count / num_samples for count in num_correct],
        "greedy": [float(done["correct"]) for done in greedy],
    }

    # Votes and pass@k above 1 need several samples.
    if num_samples > 1:
        powers = [2**i for i in range(1, num_samples.bit_length()) if 2**i < num_samples]
        for k in (*powers, num_samples):
            scores[f"pass@{k}"] = [pass_at_k(num_samples, count, k) for count in num_correct]
        answers = [[done["answer"] for done in row] for row in rows]
        scores[f"maj@{num_samples}"] = [_majority(row) for row in rows]
        scores["vote_share"] = list(map(vote_share, answers))
        scores["answer_entropy"] = list(map(answer_entropy, answers))

    scores["format"] = [_mean([done["format"] == "perfect" for done in row]) for row in rows]
    scores["truncated"] = [_mean([done["finish_reason"] == "length" for done in row]) for row in rows]
    for name in ("thinking_tokens", "completion_tokens", "answer_logprob", "hedges", "revisions"):
        scores[name] = [_mean_of_known(row, name) for row in rows]

    return {name: values for name, values in scores.items() if any(value is not None for value in values)}


def _mean_of_known(row: Sequence[Row], name: str) -> float | None:
    """Return the mean of a field over the completions that have it; None if none has."""
    values = [done[name] for done in row if done.get(name) is not None]
    return _mean(values) if values else None


def compare_scores(metric: str, a_P: Sequence[float | None], b_P: Sequence[float | None]) -> Paired | None:
    """Compare one metric of two models (`paired_interval`); its interval excludes 0 exactly if p < 5 %.

    Args:
        metric: Its name.
        a_P: Scores of the first model, one per problem; None if it has none.
        b_P: Scores of the second on the same problems.

    Returns:
        The comparison over problems where both have a score; None if there is no such problem.
    """
    pairs = [(a, b) for a, b in zip(a_P, b_P, strict=True) if a is not None and b is not None]
    if not pairs:
        return None
    a, b = (np.array(values) for values in zip(*pairs, strict=True))
    difference, n = b - a, len(pairs)
    flips = exact_p = None
    if metric == "greedy" or metric.startswith("maj@"):  # in a tied vote more than half must be right
        right_a, right_b = a > 0.5, b > 0.5
        flips = (int((right_a & ~right_b).sum()), int((right_b & ~right_a).sum()))
        exact_p = mcnemar_exact(*flips)
    bounds = (-1.0, 1.0) if unit(metric) == "%" else (-math.inf, math.inf)
    interval, p = paired_interval(a, b, bounds=bounds, exact_p=exact_p)
    return Paired(
        metric=metric,
        a=float(a.mean()),
        b=float(b.mean()),
        difference=interval,
        p=p,
        p_holm=p,
        flips=flips,
        detectable=_detectable(difference, unit(metric) == "%", is_verdict=flips is not None),
        num_problems=n,
    )


def _detectable(difference_P: np.ndarray, is_share: bool, *, is_verdict: bool) -> float | None:
    """Return (z of 5 % + z of the power) x standard error of the mean difference.

    For shares, at least what an exact test needs: six problems of n that change, each as much as those did that changed
    here; wholly for a verdict, or if none did. With few problems the standard error alone promises a difference that no
    outcome could show.
    """
    n = len(difference_P)
    if n < 2:
        return None
    normal = NormalDist()
    z = normal.inv_cdf(1 - ALPHA / 2) + normal.inv_cdf(POWER)
    effect = z * float(difference_P.std(ddof=1)) / math.sqrt(n)
    if not is_share:
        return effect
    changes = np.abs(difference_P[difference_P != 0])
    change = 1.0 if is_verdict or not changes.size else float(changes.mean())
    return max(effect, min(1.0, FEWEST_FLIPS / n) * change)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's step-down method.

    Source:
        Holm 1979: the i-th smallest of m is multiplied by m - i + 1, made monotone and capped at 1.
    """
    corrected, running = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = running
    return corrected


def compare_pairs(
    scores: Sequence[Mapping[str, Sequence[float | None]]],
    pairs: Sequence[tuple[int, int]],
) -> list[dict[str, Paired]]:
    """Compare pairs of models, each metric corrected for the number of pairs (Holm).

    Args:
        scores: Scores of each model (`score_problems`), all over the same problems in the same order.
        pairs: Indices of the models that are compared, the earlier one first.

    Returns:
        For every pair: metric -> comparison, over the metrics that both have.
    """
    tables: list[dict[str, Paired]] = []
    for a, b in pairs:
        found = {
            name: compare_scores(name, values, scores[b][name])
            for name, values in scores[a].items()
            if name in scores[b]
        }
        tables.append({name: row for name, row in found.items() if row is not None})
    for name in dict.fromkeys(name for table in tables for name in table):
        having = [table for table in tables if name in table]
        for table, p in zip(having, holm([table[name].p for table in having]), strict=True):
            table[name] = replace(table[name], p_holm=p)
    return tables


def unit(metric: str) -> str:
    """Return the unit of a metric: '%' for shares (whose differences are points), tokens, nats, or a count."""
    return "tokens" if metric.endswith("tokens") else UNITS.get(metric, "%")


def show(metric: str, value: float, *, signed: bool = False) -> str:
    """Write a value of a metric without its unit: shares in percent."""
    if unit(metric) == "%":
        value *= 100
    digits = 1 if unit(metric) in ("%", "tokens") else 3
    text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    return text.replace("-", "+" if signed else "") if not float(text) else text


def show_p(p: float) -> str:
    """Write a p-value."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def verdict(row: Paired, name_a: str, name_b: str) -> str:
    """Describe in plain words what a comparison shows, but not why."""
    of = {"%": " points", "tokens": " tokens", "nats": " nats"}.get(unit(row.metric), "")
    if row.is_shown:
        word = "higher" if row.difference.mean > 0 else "lower"
        if unit(row.metric) == "tokens":
            word = "longer" if row.difference.mean > 0 else "shorter"
        size = show(row.metric, abs(row.difference.mean))
        share = f" ({percent(row.a, row.b)} of {name_a})" if unit(row.metric) == "tokens" and row.a else ""
        return f"{name_b} is {word} by {size}{of}{share}"
    if row.detectable is None:
        return "one problem is an anecdote: nothing can be shown"
    if not row.detectable:
        return "the same on every problem"
    limit = show(row.metric, row.detectable)
    return f"no difference could be shown; differences below {limit}{of} would mostly go undetected"


def percent(base: float, value: float) -> str:
    """Format the difference of a value from a base, in percent of the base."""
    return f"{100 * (value - base) / abs(base):+.1f} %"


def _majority(row: Sequence[Row]) -> float:
    return vote_score([done["answer"] for done in row], [bool(done["correct"]) for done in row])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
