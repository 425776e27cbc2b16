"""Metrics of graded completions: averages over samples within a problem, then intervals over problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from whet.eval.confidence import answer_entropy, vote_score, vote_share
from whet.eval.grade import Judged
from whet.stats import (
    Interval,
    bootstrap_interval,
    detectable_difference,
    paired_interval,
    pass_at_k,
    share_interval,
    wilson_interval,
)
from whet.types import Problem

NEAR_ZERO = 0.05
CUT_OFTEN = 0.3
"""Share of samples that were cut off above which the limit, and not the model, is what a measurement shows."""
BREAKDOWN = ("part", "subject", "level", "environment")
"""Problem labels by which pass@1 is also reported."""
COUNTS = ("thinking_tokens", "completion_tokens", "turns")
"""Metrics that are not shares."""
Rows = Sequence[Sequence[Judged]]
LENGTHS: dict[str, Callable[[Judged], float]] = {
    "thinking": lambda done: done.grade.thinking_tokens,
    "answer": lambda done: done.answer_tokens,
    "completion": lambda done: done.num_tokens,
}
CONFIDENCE: dict[str, Callable[[Judged], float | None]] = {
    "mean_logprob": lambda done: done.confidence.mean_logprob,
    "answer_logprob": lambda done: done.confidence.answer_logprob,
    "hedges": lambda done: done.confidence.hedges,
    "revisions": lambda done: done.confidence.revisions,
}


def headline(
    samples: Rows, greedy: Sequence[Judged], *, seed: int, ks: Sequence[int] = ()
) -> dict[str, Interval]:
    """Compute the metrics of the table and the run's log.

    Args:
        samples: Graded samples of each problem, the same number for all.
        greedy: Graded greedy completion of each problem.
        seed: Seed of the bootstrap.
        ks: Further k of pass@k besides 1, 2, 4, 8 ... and all samples.

    Raises:
        ValueError: If a k is larger than the number of samples.
    """
    count = len(samples[0])
    correct_P = _right(samples)
    everything = [done for row in samples for done in row]

    def mean_P(measure: Callable[[Judged], float]) -> list[float]:
        return [_mean([measure(done) for done in row]) for row in samples]

    # One value per problem: problems, not completions, are the independent observations.
    per_problem: dict[str, list[float]] = {
        "pass@1": [c / count for c in correct_P],
        "greedy": [float(done.grade.is_correct) for done in greedy],
    }
    for k in _sizes(count, ks):
        per_problem[f"pass@{k}"] = [pass_at_k(count, c, k) for c in correct_P]
    if count > 1:
        per_problem[f"maj@{count}"] = [_majority(row) for row in samples]
    if any(done.rewards for done in everything):
        per_problem[f"best@{count}"] = [best_of_n(row) for row in samples]

    per_problem["format"] = mean_P(lambda done: done.grade.verdict == "perfect")
    per_problem["truncated"] = mean_P(lambda done: done.finish_reason == "length")
    per_problem["thinking_tokens"] = mean_P(lambda done: done.grade.thinking_tokens)
    per_problem["completion_tokens"] = mean_P(lambda done: done.num_tokens)
    if any(done.num_turns > 1 for done in everything):
        per_problem["turns"] = mean_P(lambda done: done.num_turns)

    intervals: dict[str, Interval] = {}
    for name, values in per_problem.items():
        is_count = name in COUNTS
        intervals[name] = bootstrap_interval(values, seed=seed) if is_count else share_interval(values)
    return intervals


def headline_names(count: int, ks: Sequence[int] = ()) -> tuple[str, ...]:
    """Return the names of the metrics that `headline` may compute of so many samples."""
    passes = (f"pass@{k}" for k in _sizes(count, ks))
    majority = (f"maj@{count}",) if count > 1 else ()
    return ("pass@1", "greedy", *passes, *majority, f"best@{count}", "format", "truncated", *COUNTS)


def _sizes(count: int, ks: Sequence[int]) -> list[int]:
    """Return the k above 1 of pass@k: powers of two, those that are asked for, and all samples."""
    powers = [1 << power for power in range(1, count.bit_length()) if 1 << power < count]
    return sorted({*powers, *ks, count} - {1})


def best_of_n(row: Sequence[Judged]) -> float:
    """Score the sample with the highest reward; tied samples share the credit.

    If no sample could be scored, all of them are equally likely to be chosen.
    """
    scored = [done for done in row if done.reward is not None]
    highest = max((done.reward for done in scored if done.reward is not None), default=None)
    return _mean([done.grade.is_correct for done in row if done.reward == highest])


def summarise(
    problems: Sequence[Problem], samples: Rows, metrics: Mapping[str, Interval], *, seed: int = 0
) -> dict[str, Any]:
    """Compute everything else in eval.json, as JSON values.

    Args:
        problems: The problems.
        samples: Graded samples of each problem.
        metrics: The result of `headline`.
        seed: Seed of the bootstrap.
    """
    count, correct_P = len(samples[0]), _right(samples)
    pass_P = {k: [pass_at_k(count, c, k) for c in correct_P] for k in range(1, count + 1)}
    classes = {
        "always": sum(c == count for c in correct_P),
        "mixed": sum(0 < c < count for c in correct_P),
        "never": sum(c == 0 for c in correct_P),
    }
    # With one sample both are the same number, and nothing is open.
    bounds = (0.0, 1.0 if count > 1 else math.inf)
    gap, _ = paired_interval(pass_P[1], pass_P[count], bounds=bounds)
    answers = [[done.grade.answer for done in row] for row in samples]
    votes = [vote_share(row) for row in answers]
    entropies = [value for row in answers if (value := answer_entropy(row)) is not None]
    is_anecdote = count == 1 or len(problems) == 1
    return {
        "remark": remark(
            metrics["pass@1"].mean,
            len(problems),
            count,
            greedy=metrics["greedy"].mean,
            truncated=metrics["truncated"].mean,
        ),
        "anecdote": is_anecdote,
        "num_problems": len(problems),
        "num_samples": count,
        "metrics": {name: asdict(interval) for name, interval in metrics.items()},
        "minimum_detectable_effect": detectable_difference(pass_P[1]),
        "pass@k": {str(k): asdict(share_interval(values)) for k, values in pass_P.items()},
        "consistency": {
            name: asdict(wilson_interval(number, len(problems))) for name, number in classes.items()
        },
        "opportunity": asdict(gap),
        "format": _formats(samples),
        "lengths": {name: _lengths(samples, is_right, seed) for name, is_right in VERDICTS.items()},
        "confidence": {
            **{name: _over_problems(samples, measure, None, seed) for name, measure in CONFIDENCE.items()},
            "vote_share": asdict(share_interval(votes)),
            "answer_entropy": asdict(bootstrap_interval(entropies, seed=seed)) if entropies else None,
        },
        "pass@1 by": {
            label: {value: asdict(interval) for value, interval in rows.items()}
            for label, rows in breakdown(problems, samples).items()
        },
    }


VERDICTS = {"right": True, "wrong": False}


def breakdown(problems: Sequence[Problem], samples: Rows) -> dict[str, dict[str, Interval]]:
    """Return pass@1 for each value of a problem's labels (subject, level ...) that has several values."""
    found: dict[str, dict[str, Interval]] = {}
    for label in BREAKDOWN:
        rows: dict[str, list[float]] = {}
        for problem, row in zip(problems, samples, strict=True):
            if problem.meta.get(label):
                rows.setdefault(problem.meta[label], []).append(_mean([s.grade.is_correct for s in row]))
        if len(rows) > 1:
            found[label] = {value: share_interval(values) for value, values in sorted(rows.items())}
    return found


def remark(
    pass_at_1: float, num_problems: int, num_samples: int, *, greedy: float = 0.0, truncated: float = 0.0
) -> str:
    """Return a warning about what the numbers do not show; '' if there is none."""
    found: list[str] = []
    if num_samples == 1 or num_problems == 1:
        why = "one problem" if num_problems == 1 else "one sample per problem"
        found.append(f"anecdote: {why} says little about the model; use more before you draw conclusions.")
    if pass_at_1 < NEAR_ZERO <= greedy:
        found.append(
            f"accuracy is near zero when sampled (pass@1 {100 * pass_at_1:.1f} %), "
            f"not greedily ({100 * greedy:.1f} %): lower sampling.temperature, or read greedy."
        )
    elif pass_at_1 < NEAR_ZERO:
        found.append(
            f"accuracy is near zero (pass@1 {100 * pass_at_1:.1f} %): the model does not solve this task; right "
            "answers of this share, and the pass@k made of them, are what lucky guesses give. Read format and samples "
            "instead."
        )
    if truncated > CUT_OFTEN:
        found.append(
            f"{100 * truncated:.0f} % of the samples were cut off before they ended, and count as wrong where their "
            "answer did not come: raise --sampling.max-new-tokens."
        )
    return " ".join(found)


def _right(samples: Rows) -> list[int]:
    return [sum(done.grade.is_correct for done in row) for row in samples]


def _majority(row: Sequence[Judged]) -> float:
    return vote_score([done.grade.answer for done in row], [done.grade.is_correct for done in row])


def _formats(samples: Rows) -> dict[str, float]:
    verdicts = [done.grade.verdict for row in samples for done in row]
    return {name: verdicts.count(name) / len(verdicts) for name in ("perfect", "partial", "none")}


def _lengths(samples: Rows, is_right: bool, seed: int) -> dict[str, dict[str, Any] | None]:
    return {name: _over_problems(samples, measure, is_right, seed) for name, measure in LENGTHS.items()}


def _over_problems(
    samples: Rows, measure: Callable[[Judged], float | None], is_right: bool | None, seed: int
) -> dict[str, Any] | None:
    """Average a quantity within each problem that has such samples, then over problems; quartiles are of samples.

    Args:
        samples: Graded samples of each problem.
        measure: The quantity; None where a sample has none.
        is_right: Right samples, wrong ones, or all (None).
        seed: Seed of the bootstrap.

    Returns:
        mean, low, high, quartiles and the number of samples behind them; None without any sample.
    """
    kept = [
        [measure(done) for done in row if is_right is None or done.grade.is_correct == is_right]
        for row in samples
    ]
    rows = [numbers for row in kept if (numbers := [value for value in row if value is not None])]
    if not rows:
        return None
    values = [value for row in rows for value in row]
    return {
        **asdict(bootstrap_interval([_mean(row) for row in rows], seed=seed)),
        "quartiles": [float(value) for value in np.quantile(values, (0.25, 0.5, 0.75))],
        "num_problems": len(rows),
        "num_samples": len(values),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
