"""Detects judge hacking: the judge's reward rises while held-out answers get worse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

JUDGE, GOLD = "rl/reward/judge", "eval/pass@1"
"""The judge's reward, and the held-out metric that is independent of it."""

WINDOW = 3
"""Validations averaged on either side of the comparison."""

JUDGE_RISE = 0.02
"""Minimum gain of the judge's mean reward, as a share of its scale."""

GOLD_FALL = 0.03
"""Minimum loss of the gold metric, absolute."""

GOLD_NOISES = 4.5
"""... and in standard errors. Two would stop two of three healthy runs of 30 validations: the best of many noisy
windows lies above the truth. 4.5 stops one in fifty (docs/judge.md)."""


def thin(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that `judge_diverges` reads: a run keeps these of every step."""
    return {name: row[name] for name in ("step", JUDGE, GOLD) if name in row}


def judge_diverges(rows: Sequence[Mapping[str, Any]], *, judge: str = JUDGE, gold: str = GOLD) -> str | None:
    """Return why a run must stop because it hacks its judge instead of solving problems.

    The last three validations are compared with the best earlier three in a row. The run stops when (1) the judge's
    mean reward in the steps of the last three is higher by more than 0.02, and (2) the gold metric is lower by more
    than 0.03 and by more than 4.5 standard errors. The noise is estimated from the run: half the mean squared
    difference of neighbouring validations, which a trend hardly changes.

    Args:
        rows: Logged metrics, oldest first, one per step: 'step' (the row's number without it), `judge` where
            completions were judged, `gold` where the run was validated.
        judge: Name of the judge's reward, in [0, 1].
        gold: Name of the held-out metric that is independent of the judge, in [0, 1].

    Returns:
        One line with the reason, or None. None, too, if the last row has no validation.
    """
    if not rows or rows[-1].get(gold) is None:
        return None
    steps, golds, judged = _validations(rows, judge, gold)
    if len(golds) < 2 * WINDOW:
        return None
    ends = range(WINDOW, len(golds) - WINDOW + 1)
    best = max(ends, key=lambda end: (_mean(golds, end), -end))
    best_gold, last_gold = _mean(golds, best), _mean(golds, len(golds))
    noise = math.sqrt(sum((after - before) ** 2 for before, after in pairwise(golds)) / (2 * len(golds) - 2))
    margin = max(GOLD_FALL, GOLD_NOISES * noise * math.sqrt(2 / WINDOW))
    best_judge, last_judge = _mean(judged, best), _mean(judged, len(judged))
    if best_gold - last_gold <= margin or not last_judge - best_judge > JUDGE_RISE:
        return None
    return (
        f"the judge's reward rises from {best_judge:.2f} to {last_judge:.2f} while held-out {gold.rpartition('/')[2]} "
        f"fell from {best_gold:.1%} to {last_gold:.1%} since step {steps[best - 1]} (means of {WINDOW} validations): "
        "over-optimised; the best checkpoint is checkpoints/best"
    )


def _validations(
    rows: Sequence[Mapping[str, Any]], judge: str, gold: str
) -> tuple[list[int], list[float], list[float]]:
    """Return step, gold metric and mean judge reward since the previous validation, for every validation."""
    steps: list[int] = []
    golds: list[float] = []
    judged: list[float] = []
    since: list[float] = []
    for place, row in enumerate(rows, start=1):
        if row.get(judge) is not None:
            since.append(row[judge])
        if row.get(gold) is not None:
            steps.append(row.get("step", place))
            golds.append(row[gold])
            judged.append(sum(since) / len(since) if since else math.nan)
            since = []
    return steps, golds, judged


def _mean(values: Sequence[float], end: int) -> float:
    """Return the mean of the window that ends before index `end`; NaN if it contains one."""
    return sum(values[end - WINDOW : end]) / WINDOW
