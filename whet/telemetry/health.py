"""Health warnings of a run, each with a remedy, from its logged rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from whet.telemetry.log import read_metrics

QUIET_ROWS = 20
"""A warning is given when its problem starts, and again only after this many rows without it."""

TREND_ROWS = 40
"""A trend compares the first and the last five of this many rows."""

HISTORY_ROWS = QUIET_ROWS + TREND_ROWS
"""Rows of history that are used: the quiet ones and the longest window."""

LOSS_HIGH, LOSS_BROKEN = 3.0, 8.0
SAME_SHARE = 0.95
RATIO_DRIFT_MAX = 1e-4
COPY_DRIFT_MAX = 0.2
"""As wide as the clip of most recipes: beyond it the sampler's rounding alone clips tokens."""
"""Float rounding between two exact forward passes stays below this."""


def past_rows(run: Path, stage: str, step: int) -> list[dict[str, Any]]:
    """Return the rows that a stage logged up to a step, oldest first, for a resumed run."""
    return [row for row in read_metrics(run) if row.get("stage") == stage and row["step"] <= step]


def health_warnings(stage: str, values: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return new problems, each with a remedy.

    The bands are warnings, not limits. The sign of a loss never matters: a policy-gradient surrogate can have either.

    Args:
        stage: 'sft' or 'rl'; other stages have no warnings.
        values: Metrics of the step.
        history: Metrics of earlier steps, oldest first, without this one; the last 60 are used.

    Returns:
        One line per new problem.
    """
    rows = [*history[-HISTORY_ROWS:], values]
    return [text for _, text in find_warnings(stage, rows, len(rows) - 1)]


def find_warnings(stage: str, rows: Sequence[Mapping[str, Any]], first: int = 0) -> Iterator[tuple[int, str]]:
    """Yield what `health_warnings` returns for each of many rows, in one pass.

    Args:
        stage: 'sft' or 'rl'; other stages have no warnings.
        rows: Metrics of all steps, oldest first.
        first: Number of the first row whose warnings are wanted; those before are its history.

    Yields:
        Number of a row, and one line about a problem that starts there.
    """
    problems = {"sft": _sft_problems, "rl": _rl_problems}.get(stage)
    seen: dict[str, int] = {}
    for index in range(max(0, first - QUIET_ROWS), len(rows) if problems else 0):
        assert problems is not None
        for key, text in problems(rows[max(0, index - HISTORY_ROWS) : index + 1]).items():
            if index >= first and index - seen.get(key, -QUIET_ROWS - 1) > QUIET_ROWS:
                yield index, text
            seen[key] = index


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
    taught = "rl/teacher_kl" in row  # then equal rewards are no lack of signal
    if not taught and max(_last(rows, "rl/reward_std", 10), default=1) < 1e-9:
        problems["std"] = (
            "rl/reward_std is 0 for 10 steps: no learning signal; check rewards, tags and difficulty"
        )
    if not taught and _mean(rows, "rl/zero_variance_groups") > 0.9:
        problems["groups"] = (
            "over 90% of groups have equal rewards: use problems of medium difficulty, or more samples"
        )
    if _mean(rows, "rl/truncated") > 0.2:
        problems["truncated"] = (
            "over 20% of completions are cut off: unless they soon get shorter, raise --sampling.max-new-tokens"
        )
    if min(_last(rows, "rl/unscorable", 5), default=0.0) > 0:
        problems["unscorable"] = (
            f"{row['rl/unscorable']:.0f} samples could not be scored and were dropped in each of 5 steps: look for "
            "'null' rewards in samples.jsonl; "
            "a failing sandbox or judge shows in `whet doctor sandbox`, or rl/judge_failures"
        )
    drift = row.get("rl/ratio_drift") or 0.0
    is_copy = "rl/sync_seconds" in row  # another engine's kernels: it disagrees by its rounding at least
    if drift > (COPY_DRIFT_MAX if is_copy else RATIO_DRIFT_MAX) and not row.get("rl/staleness"):
        remedy = "check precision"
        if is_copy:
            remedy = (
                "raise the sampler's precision, or set off_policy.proximal = recomputed with a correction"
            )
        if not (is_copy and "rl/correction_active" in row):
            problems["drift"] = (
                f"rl/ratio_drift is {drift:.1e} on-policy: sampler and trainer disagree; {remedy}"
            )
    if _mean(rows, "rl/entropy", missing=1.0) < 0.02 and _mean(rows, "rl/correct") < 0.8:
        problems["entropy"] = (
            "rl/entropy fell below 0.02 while answers are wrong: raise clip_high or kl, or lower lr"
        )
    if _mean(rows, "rl/kl") > 1.0:
        problems["kl"] = (
            "rl/kl is above 1 nat per token: the policy left its reference; lower lr or raise the KL weight"
        )
    return problems | _signal_problems(rows) | _trend_problems(rows)


def _signal_problems(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return problems of the learning signal of the last steps."""
    problems: dict[str, str] = {}
    clipped = _mean(rows, "rl/clip_high") + _mean(rows, "rl/clip_low")
    if clipped > 0.3:
        problems["clip"] = (
            f"the clip is active for {clipped:.0%} of tokens: lower lr, fewer updates per batch, or a wider clip range"
        )
    if _mean(rows, "rl/effective_samples", missing=1.0) < 0.8:
        problems["mismatch"] = (
            "rl/effective_samples is below 80%: the sampler is far from the trained policy; lower "
            "off_policy.staleness or lr, or set off_policy.proximal = recomputed with a correction"
        )
    if _mean(rows, "rl/repetition") > 0.5:
        problems["repetition"] = (
            "over half of the completions' 4-grams repeat: degenerate text is being rewarded; look at samples.jsonl"
        )
    if _mean(rows, "rl/cancellation") > 0.5:
        problems["cancellation"] = (
            "rewards cancel: over half of their spread inside groups is lost in the sum; check weights and signs, or "
            "set algo.multi_reward = normalise"
        )
    shares = {name: _mean(rows, name) for name in rows[-1] if name.startswith("rl/signal/")}
    if shares and _mean(rows, "rl/correct", missing=1.0) < 0.9:
        name, share = max(shares.items(), key=lambda item: item[1])
        if len(shares) > 1 and share > 0.9 and name != "rl/signal/correct":
            reward = name.removeprefix("rl/signal/")
            problems["share"] = (
                f"{share:.0%} of the signal comes from the reward '{reward}' while answers are wrong: lower its weight"
            )
        elif share > 0 and "rl/signal/correct" in shares and _mean(rows, "rl/correct", missing=1.0) == 0:
            problems["wrong"] = (
                "no answer was right in five steps, so the other rewards alone are learned: fine-tune first "
                "(whet sft), or use easier problems"
            )
    return problems


def _trend_problems(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return unhealthy trends over the last rows."""
    correct, format_, length = (
        _trend(rows, name) for name in ("rl/correct", "rl/format", "rl/completion_tokens")
    )
    problems: dict[str, str] = {}
    if correct is None or correct[1] - correct[0] > 0.02 or correct[1] > 0.9:
        return problems
    if format_ is not None and format_[1] - format_[0] > 0.15:
        problems["format"] = (
            f"rl/format rose from {format_[0]:.0%} to {format_[1]:.0%} while rl/correct stayed at {correct[1]:.0%}: "
            "only the format is learned; lower its weight, or fine-tune first"
        )
    if length is not None and length[1] > 1.5 * length[0]:
        problems["length"] = (
            f"completions grew from {length[0]:.0f} to {length[1]:.0f} tokens while rl/correct stayed at "
            f"{correct[1]:.0%}: use algo.aggregation = constant or an overlong penalty"
        )
    return problems


IDLE = "nothing was trained"
"""How the warning about a run begins that changed nothing; reports say it first."""


def idle_reason(
    rows: Sequence[Mapping[str, Any]], changes: Mapping[str, float], *, num_samples: int = 0
) -> str:
    """Return why a run has trained nothing, and the remedy; '' where it has, or where that is not known.

    Args:
        rows: Its rows of metrics, oldest first.
        changes: Share of the weights that changed, as `whet.train.session.write_changes` returns it.
        num_samples: Samples of each step.
    """
    signals = [row["rl/groups_with_signal"] for row in rows if row.get("rl/groups_with_signal") is not None]
    has_signal = not signals or any(signals) or any("rl/teacher_kl" in row for row in rows)
    if has_signal and changes.get("weights_changed", 1.0) > 0:
        return ""
    if has_signal:
        return f"{IDLE}: no weight changed; raise optim.lr, or check the data and the rewards"
    unscored = sum(row.get("rl/unscorable") or 0.0 for row in rows)
    if 2 * unscored > num_samples * len(rows):
        why = (
            f"rewards gave no score for {unscored:,.0f} of {num_samples * len(rows):,} samples: look for 'null' in "
            "samples.jsonl and fix those rewards"
        )
    else:
        why = dead_reason(rows[-1])
    return f"{IDLE}: in none of {len(signals):,} steps had a group different rewards; {why}"


def dead_reason(values: Mapping[str, Any]) -> str:
    """Return why no group of a step had a signal, and the remedy."""
    if (values.get("rl/all_wrong_groups") or 0.0) > SAME_SHARE:
        return (
            "every answer is wrong: start from a better model (fine-tune first), use easier problems or more samples "
            "per prompt"
        )
    if (values.get("rl/all_right_groups") or 0.0) > SAME_SHARE:
        return "every answer is right: use harder problems"
    return (
        "all groups have equal rewards: use problems of medium difficulty (curriculum.num_samples measures them), "
        "more samples per prompt, or a higher temperature"
    )


def _non_finite_problems(stage: str, row: Mapping[str, Any]) -> dict[str, str]:
    """Return a problem if loss or gradient is NaN or infinite (null in a row that was read back)."""
    names = [f"{stage}/grad_norm", f"{stage}/loss", f"{stage}/value_grad_norm"]
    for name in (
        names[1:] if row.get(f"{stage}/overflows") else names
    ):  # the loss scale deals with an overflow
        value = row.get(name, 0.0)
        if value is None or not math.isfinite(value):
            return {"finite": f"{name} is not finite: lower lr, clip gradients, or leave fp16"}
    return {}


def _last(rows: Sequence[Mapping[str, Any]], name: str, num_rows: int) -> list[float]:
    """Return the last values of a metric; empty if fewer than num_rows have one."""
    values = list(islice((row[name] for row in reversed(rows) if row.get(name) is not None), num_rows))
    return values if len(values) == num_rows else []


def _mean(rows: Sequence[Mapping[str, Any]], name: str, missing: float = 0.0) -> float:
    """Return the mean of the last five values of a metric."""
    values = _last(rows, name, 5)
    return sum(values) / len(values) if values else missing


def _trend(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float] | None:
    """Return the means of the first and of the last five of the last `TREND_ROWS` values."""
    values = _last(rows, name, TREND_ROWS)
    return (sum(values[-5:]) / 5, sum(values[:5]) / 5) if values else None
