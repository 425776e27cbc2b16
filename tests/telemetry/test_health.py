"""The doctor of reinforcement learning: every warning comes with its remedy, and none to a healthy run."""

from __future__ import annotations

import random
from typing import Any

import pytest

from whet.telemetry import health
from whet.telemetry.health import (
    HISTORY_ROWS,
    QUIET_ROWS,
    TREND_ROWS,
    dead_reason,
    find_warnings,
    health_warnings,
    idle_reason,
)

Row = dict[str, Any]


def healthy(step: int, **changes: Any) -> Row:
    """A run that learns: right answers and format rise together, with the noise of small batches."""
    draw, progress = random.Random(step), min(1.0, step / 60)
    noise = draw.uniform(-0.05, 0.05)
    correct = 0.2 + 0.6 * progress + noise
    return {
        "rl/loss": draw.uniform(-0.1, 0.1),
        "rl/grad_norm": draw.uniform(0.05, 0.9),
        "rl/reward_mean": correct + 0.05,
        "rl/reward_std": 0.45,
        "rl/correct": correct,
        "rl/format": 0.5 + 0.45 * progress,
        "rl/completion_tokens": 30 + 20 * progress,
        "rl/truncated": 0.1 - 0.08 * progress,
        "rl/zero_variance_groups": 0.4 + noise,
        "rl/all_wrong_groups": 0.2,
        "rl/all_right_groups": 0.2,
        "rl/entropy": 0.6 - 0.4 * progress,
        "rl/kl": 0.01 * progress,
        "rl/clip_high": 0.02,
        "rl/clip_low": 0.01,
        "rl/ratio_drift": 0.0,
        "rl/staleness": 0.0,
        "rl/effective_samples": 1.0,
        "rl/repetition": 0.05,
        "rl/cancellation": 0.1,
        "rl/signal/correct": 0.95,
        "rl/signal/format": 0.05,
    } | changes


def warnings_of(rows: list[Row]) -> list[tuple[int, str]]:
    return [(i, text) for i, row in enumerate(rows) for text in health_warnings("rl", row, rows[:i])]


def test_a_healthy_run_has_no_warning() -> None:
    assert warnings_of([healthy(step) for step in range(120)]) == []


PROBLEMS = [
    ({"rl/grad_norm": None}, "grad_norm is not finite", "lower lr"),
    ({"rl/reward_std": 0.0}, "no learning signal", "check rewards, tags and difficulty"),
    ({"rl/unscorable": 3.0}, "3 samples could not be scored", "whet doctor sandbox"),
    ({"rl/zero_variance_groups": 0.95}, "over 90% of groups", "problems of medium difficulty"),
    ({"rl/truncated": 0.3}, "cut off", "raise --sampling.max-new-tokens"),
    ({"rl/ratio_drift": 1e-3}, "sampler and trainer disagree", "check precision"),
    ({"rl/entropy": 0.01, "rl/correct": 0.3}, "entropy fell", "raise clip_high"),
    ({"rl/kl": 2.0}, "left its reference", "raise the KL weight"),
    ({"rl/clip_high": 0.25, "rl/clip_low": 0.1}, "the clip is active for 35% of tokens", "lower lr"),
    ({"rl/effective_samples": 0.7}, "effective_samples is below 80%", "lower off_policy.staleness"),
    ({"rl/repetition": 0.6}, "4-grams repeat", "look at samples.jsonl"),
    ({"rl/cancellation": 0.6}, "rewards cancel", "algo.multi_reward = normalise"),
    (
        {"rl/signal/correct": 0.05, "rl/signal/format": 0.95},
        "95% of the signal comes from the reward 'format'",
        "lower its weight",
    ),
    (
        {
            "rl/correct": 0.0,
            "rl/format": 0.4,
            "rl/signal/correct": 0.0,
            "rl/signal/format": 0.5,
            "rl/signal/mine": 0.5,
        },
        "no answer was right in five steps",
        "fine-tune first (whet sft)",
    ),
]


@pytest.mark.parametrize(("sick", "symptom", "remedy"), PROBLEMS)
def test_each_warning_comes_once_with_its_remedy(sick: Row, symptom: str, remedy: str) -> None:
    rows = [healthy(step) for step in range(15)] + [healthy(step, **sick) for step in range(15, 45)]
    found = warnings_of(rows)
    assert len(found) == 1, found
    step, text = found[0]
    assert 15 <= step < 26
    assert symptom in text
    assert remedy in text
    assert "\n" not in text


@pytest.mark.parametrize("sick", [sick for sick, _, _ in PROBLEMS[1:] if "rl/ratio_drift" not in sick])
def test_one_bad_step_is_no_warning(sick: Row) -> None:
    rows = [healthy(step, **(sick if step == 20 else {})) for step in range(40)]
    assert warnings_of(rows) == []


def trend_rows(**ends: tuple[float, float]) -> list[Row]:
    """Rows whose metrics move in a line from one value to another."""
    last = TREND_ROWS - 1
    return [
        healthy(0, **{f"rl/{name}": a + (b - a) * i / last for name, (a, b) in ends.items()})
        for i in range(TREND_ROWS)
    ]


def test_format_that_rises_alone_is_called_out() -> None:
    rows = trend_rows(correct=(0.3, 0.3), format=(0.3, 0.9))
    ((step, text),) = warnings_of(rows)
    assert step == TREND_ROWS - 1
    assert "rl/format rose from 33% to 87% while rl/correct stayed at 30%" in text
    assert "lower its weight, or fine-tune first" in text
    assert warnings_of(trend_rows(correct=(0.3, 0.5), format=(0.3, 0.9))) == []
    assert warnings_of(trend_rows(correct=(0.95, 0.95), format=(0.3, 0.9))) == []
    assert warnings_of(rows[1:]) == []  # too early to call it a trend


def test_length_that_grows_for_nothing_is_called_out() -> None:
    ((_, text),) = warnings_of(trend_rows(correct=(0.3, 0.28), completion_tokens=(100.0, 300.0)))
    assert "completions grew from 110 to 290 tokens" in text
    assert "algo.aggregation = constant or an overlong penalty" in text
    assert warnings_of(trend_rows(correct=(0.3, 0.5), completion_tokens=(100.0, 300.0))) == []
    assert warnings_of(trend_rows(correct=(0.3, 0.3), completion_tokens=(100.0, 140.0))) == []


def test_old_samples_may_drift_and_a_single_reward_has_all_the_signal() -> None:
    stale = [healthy(step, **{"rl/ratio_drift": 0.3, "rl/staleness": 2.0}) for step in range(40)]
    assert warnings_of(stale) == []
    rows = [healthy(step) for step in range(30)]
    for row in rows:
        del row["rl/signal/correct"], row["rl/signal/format"]
        row["rl/signal/random"] = 1.0
        row["rl/correct"] = 0.1
    assert warnings_of(rows) == []


def test_the_reward_for_right_answers_may_have_all_the_signal() -> None:
    rows = [
        healthy(step, **{"rl/signal/correct": 1.0, "rl/signal/format": 0.0, "rl/correct": 0.3})
        for step in range(30)
    ]
    assert warnings_of(rows) == []


@pytest.mark.parametrize(
    ("wrong", "right", "reason"),
    [
        (1.0, 0.0, "every answer is wrong: start from a better model"),
        (0.0, 1.0, "every answer is right: use harder problems"),
        (0.5, 0.5, "all groups have equal rewards: .*medium difficulty"),
        (0.0, 0.0, "all groups have equal rewards: .*more samples per prompt"),
    ],
)
def test_a_dead_run_gets_its_reason(wrong: float, right: float, reason: str) -> None:
    text = dead_reason({"rl/all_wrong_groups": wrong, "rl/all_right_groups": right})
    before, _, after = reason.partition(".*")
    assert text.startswith(before)
    assert after in text


def test_a_run_that_trained_nothing_blames_failing_rewards_only_where_most_samples_have_no_score() -> None:
    rows = [
        {
            "rl/groups_with_signal": 0.0,
            "rl/all_wrong_groups": 1.0,
            "rl/unscorable": 1.0,
            "rl/reward_failures": n,
        }
        for n in (1.0, 2.0, 3.0)
    ]
    text = idle_reason(rows, {}, num_samples=8)
    assert text.startswith("nothing was trained: in none of 3 steps")
    assert "every answer is wrong" in text
    for row in rows:
        row["rl/unscorable"] = 7.0
    assert "rewards gave no score for 21 of 24 samples" in idle_reason(rows, {}, num_samples=8)


def test_many_rows_give_the_warnings_that_each_row_gives_and_every_row_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = random.Random(1)
    sick = [change for change, _, _ in PROBLEMS]
    rows = [healthy(step, **(draw.choice(sick) if step // 30 in (1, 3, 5) else {})) for step in range(300)]
    rows[240] = rows[261] = rows[281] = healthy(
        240, **{"rl/grad_norm": None}
    )  # 20 quiet rows between, then 19
    problems = [health._rl_problems(rows[max(0, end - HISTORY_ROWS - 1) : end]) for end in range(1, 301)]
    expected = [
        (at, text)
        for at, found in enumerate(problems)
        for key, text in found.items()
        if not any(key in earlier for earlier in problems[max(0, at - QUIET_ROWS) : at])
    ]
    assert len(expected) > 5
    assert (261, problems[261]["finite"]) in expected
    assert (281, problems[281]["finite"]) not in expected
    assert list(find_warnings("rl", rows)) == expected == warnings_of(rows)
    assert list(find_warnings("rl", rows, 150)) == [found for found in expected if found[0] >= 150]
    assert list(find_warnings("dpo", rows)) == []
    looked_at: list[int] = []
    monkeypatch.setattr(health, "_rl_problems", lambda found: looked_at.append(len(found)) or {})
    assert list(find_warnings("rl", rows)) == []
    assert len(looked_at) == len(rows)
    assert max(looked_at) == HISTORY_ROWS + 1
