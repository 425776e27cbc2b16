"""Warnings about a run that begins to go wrong, each with its remedy. Pure functions over logged rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

QUIET_ROWS = 20
"""A warning comes when its problem begins, and again only after this many rows without the problem."""

HISTORY_ROWS = QUIET_ROWS + 10
"""Rows of history that are looked at: the quiet ones and the longest window."""

LOSS_HIGH, LOSS_BROKEN = 3.0, 8.0
RATIO_DRIFT_MAX = 1e-4
"""Float rounding between two exact forward passes stays below this."""


def health_warnings(stage: str, values: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what begins to go wrong, with the remedy.

    The bands are warnings, no limits. The sign of a loss is never a reason: a policy-gradient surrogate takes
    either one.

    Args:
        stage: 'sft' or 'rl'; other stages have no warnings.
        values: Metrics of the step.
        history: Metrics of earlier steps, oldest first, without this one; the last 30 are looked at.

    Returns:
        One line per new problem.
    """
    problems = {"sft": _sft_problems, "rl": _rl_problems}.get(stage)
    if problems is None:
        return []
    rows = [*history[-HISTORY_ROWS:], values]
    ends = range(max(1, len(rows) - QUIET_ROWS), len(rows))
    known = {key for end in ends for key in problems(rows[:end])}
    return [text for key, text in problems(rows).items() if key not in known]


def _sft_problems(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the problems of the last row of fine-tuning, by key."""
    problems = _non_finite_problems("sft", rows[-1])
    if min(_last(rows, "sft/loss", 3), default=0) > LOSS_BROKEN:
        problems["broken"] = (
            "sft/loss stays above 8 nats: something is broken; check tokenizer, weights and loss mask"
        )
    elif min(_last(rows, "sft/loss", 10), default=0) > LOSS_HIGH:
        problems["high"] = (
            "sft/loss stays above 3 nats (0.3 to 3 is usual): check the chat template and the loss mask"
        )
    return problems


def _rl_problems(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the problems of the last row of reinforcement learning, by key."""
    row = rows[-1]
    problems = _non_finite_problems("rl", row)
    if max(_last(rows, "rl/reward_std", 10), default=1) < 1e-9:
        problems["std"] = (
            "rl/reward_std is 0 for 10 steps: no learning signal; check rewards, tags and difficulty"
        )
    if _mean(rows, "rl/zero_variance_groups") > 0.9:
        problems["groups"] = (
            "over 90% of groups have equal rewards: take problems of middling difficulty, or more samples"
        )
    if _mean(rows, "rl/truncated") > 0.2:
        problems["truncated"] = (
            "over 20% of completions are cut off: raise the completion limit or use the overlong reward"
        )
    drift = row.get("rl/ratio_drift") or 0.0
    if drift > RATIO_DRIFT_MAX and not row.get("rl/staleness"):
        problems["drift"] = (
            f"rl/ratio_drift is {drift:.1e} on-policy: sampler and trainer disagree; check precision"
        )
    if _mean(rows, "rl/entropy", missing=1.0) < 0.02 and _mean(rows, "rl/correct") < 0.8:
        problems["entropy"] = (
            "rl/entropy fell below 0.02 while answers are wrong: raise clip_high or kl, or lower lr"
        )
    if _mean(rows, "rl/kl") > 1.0:
        problems["kl"] = (
            "rl/kl is above 1 nat per token: the policy left its reference; lower lr or raise the KL weight"
        )
    return problems


def _non_finite_problems(stage: str, row: Mapping[str, Any]) -> dict[str, str]:
    """Return a problem when loss or gradient is NaN or infinite (null in a row that was read back)."""
    for name in (f"{stage}/grad_norm", f"{stage}/loss"):
        value = row.get(name, 0.0)
        if value is None or not math.isfinite(value):
            return {"finite": f"{name} is not finite: lower lr, clip gradients, or leave fp16"}
    return {}


def _last(rows: Sequence[Mapping[str, Any]], name: str, num_rows: int) -> list[float]:
    """Return the last values of a metric; nothing when fewer than num_rows have one."""
    values = list(islice((row[name] for row in reversed(rows) if row.get(name) is not None), num_rows))
    return values if len(values) == num_rows else []


def _mean(rows: Sequence[Mapping[str, Any]], name: str, missing: float = 0.0) -> float:
    """Return the mean of the last five values of a metric."""
    values = _last(rows, name, 5)
    return sum(values) / len(values) if values else missing
