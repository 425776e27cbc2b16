"""The gold check: it stops the run that pleases its judge, and leaves alone the one that learns."""

from __future__ import annotations

import random
from typing import Any

import pytest

from whet.rewards.judge.divergence import judge_diverges

EVERY = 5
"""Steps between validations."""


def rows(judge: list[float], gold: list[float]) -> list[dict[str, Any]]:
    """One row a step; the judge's level and the gold metric of each validation."""
    made: list[dict[str, Any]] = []
    for level, value in zip(judge, gold, strict=True):
        made += [{"step": len(made) + k + 1, "rl/reward/judge": level} for k in range(EVERY)]
        made[-1]["eval/pass@1"] = value
    return made


RISING = [0.50, 0.55, 0.60, 0.64, 0.68, 0.72, 0.76, 0.80]
FALLING = [0.50, 0.58, 0.60, 0.60, 0.57, 0.50, 0.42, 0.40]


def test_a_judge_that_rises_while_gold_falls_stops_the_run() -> None:
    reason = judge_diverges(rows(RISING, FALLING))
    # best three in a row: validations 2 to 4 (59.3 %, judge 0.597), which end at step 20; the last: 44.0 %, 0.76
    assert reason == (
        "the judge's reward rises from 0.60 to 0.76 while held-out pass@1 fell from 59.3% to 44.0% since step 20 "
        "(means of 3 validations): over-optimised; the best checkpoint is checkpoints/best"
    )


@pytest.mark.parametrize(
    ("judge", "gold"),
    [
        (RISING, [0.50, 0.55, 0.60, 0.62, 0.64, 0.66, 0.68, 0.70]),  # both rise: it learns
        ([0.6, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4], FALLING),  # both fall: a collapse, but the judge is right
        (
            [0.700, 0.701, 0.702, 0.703, 0.704, 0.705, 0.706, 0.707],
            FALLING,
        ),  # the judge rises by less than 0.02
        (RISING, [0.60, 0.60, 0.60, 0.60, 0.60, 0.58, 0.58, 0.58]),  # gold falls by 0.02 only, without noise
        (RISING, [0.60, 0.40, 0.60, 0.40, 0.60, 0.40, 0.60, 0.30]),  # falls by 0.10, within this run's noise
        (RISING[:5], [0.6, 0.6, 0.6, 0.3, 0.3]),  # five validations: too few for two windows of three
    ],
)
def test_nothing_is_stopped_without_reason(judge: list[float], gold: list[float]) -> None:
    assert judge_diverges(rows(judge, gold)) is None


def test_the_limits_are_those_that_are_told() -> None:
    """Without noise a fall of 0.03 decides; the noise of one step of 0.04 in 7 pairs demands more than that."""
    assert judge_diverges(rows(RISING, [0.6, 0.6, 0.6, 0.6, 0.6, 0.589, 0.578, 0.567])) is None  # by 0.022
    assert judge_diverges(rows(RISING, [0.6, 0.6, 0.6, 0.59, 0.58, 0.57, 0.56, 0.55])) is not None  # by 0.04
    judge = [0.5] * 5
    assert judge_diverges(rows([*judge, 0.519, 0.519, 0.519], FALLING)) is None
    assert judge_diverges(rows([*judge, 0.521, 0.521, 0.521], FALLING)) is not None


def test_only_a_row_with_a_validation_speaks() -> None:
    made = rows(RISING, FALLING)
    assert judge_diverges([*made, {"step": 41, "rl/reward/judge": 0.8}]) is None
    assert judge_diverges([]) is None


def test_missing_values_are_no_values() -> None:
    """Rows read back hold None for NaN; a step may have no judged sample; live rows have no 'step'."""
    made = rows(RISING, FALLING)
    holes = [row | {"rl/reward/judge": None} if row["step"] % EVERY == 2 else row for row in made]
    assert judge_diverges(holes) == judge_diverges(made)
    assert judge_diverges([{k: v for k, v in row.items() if k != "step"} for row in made]) == judge_diverges(
        made
    )
    silent = [{k: v for k, v in row.items() if k != "rl/reward/judge"} for row in made]
    assert judge_diverges(silent) is None


def noisy(truth: list[float], num_problems: int, draw: random.Random) -> list[float]:
    return [sum(draw.random() < p for _ in range(num_problems)) / num_problems for p in truth]


def first_stop(gold: list[float]) -> int | None:
    judge = [0.4 + 0.02 * k for k in range(len(gold))]
    made = rows(judge, gold)
    ends = range(EVERY, len(made) + 1, EVERY)
    return next((end // EVERY for end in ends if judge_diverges(made[:end])), None)


def test_noise_rarely_stops_a_healthy_run_and_a_fall_is_found() -> None:
    """The worst case: a judge that always rises, 200 problems drawn anew each time (a run's are the same)."""
    draw = random.Random(5)
    flat = [first_stop(noisy([0.6] * 20, 200, draw)) for _ in range(60)]
    assert (
        sum(stop is not None for stop in flat) <= 3
    )  # 1 in 100 expected; with 2 standard errors it is about 30
    fall = [0.6] * 8 + [max(0.4, 0.6 - 0.03 * k) for k in range(1, 13)]
    stops = [first_stop(noisy(fall, 200, draw)) for _ in range(20)]
    found = [stop for stop in stops if stop is not None and stop > 8]
    assert len(found) >= 18
