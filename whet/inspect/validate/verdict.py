"""Thresholds of a validation, fixed before it runs, and their measurement afterwards."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from whet.eval.compare.paired import compare_scores
from whet.eval.record import StoredEval, read_eval
from whet.telemetry.log import read_metrics

Status = Literal["passed", "missed", "failed", "skipped"]
STAGES = {
    "sft": "fine-tuning",
    "rl": "reinforcement",
    "eval_sft": "evaluation before",
    "eval_rl": "evaluation after",
    "probe": "off-domain probe",
    "transcript": "token-level transcript",
}
NEEDS = {"rl": "sft", "eval_sft": "sft", "eval_rl": "rl", "probe": "rl", "transcript": "rl"}
"""The stage whose model a stage needs."""


@dataclass(frozen=True, kw_only=True)
class ThresholdConfig:
    """Thresholds; None disables one. A threshold that cannot be measured counts as failed."""

    validation_loss: float | None = None
    """Largest loss of held-out solutions at fine-tuning's best step, in nats per token."""
    pass_at_1: float | None = None
    """Minimum pass@1 after reinforcement."""
    gain: float | None = None
    """Minimum gain in pass@1 over the fine-tuned model."""
    gain_p: float | None = None
    """The gain must be above 0 with a paired p-value below this."""
    format: float | None = None
    """Minimum share of perfectly formatted completions after reinforcement."""
    ratio_drift: float | None = None
    """Largest |ratio - 1| of any step's first update."""
    kl: float | None = None
    """Largest divergence from the reference in any step, in nats per token; needs a KL term in rl.algo."""
    perplexity_ratio: float | None = None
    """Largest perplexity of general text after reinforcement, relative to that of the first model probed."""
    off_domain_loss: float | None = None
    """Largest loss of the share of right off-domain answers against the first model probed."""
    numeric: float | None = None
    """Largest share of numeric answers to questions that ask for none, after reinforcement."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Largest wall time of a stage by name (sft, rl, eval_sft, eval_rl, probe, transcript), in seconds; checked after
    the stage has ended, not enforced."""

    def __post_init__(self) -> None:
        for name in ("pass_at_1", "format", "numeric", "gain_p"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"thresholds.{name} = {value}: expected 0 to 1 (a share, not percent)")
        for name in ("validation_loss", "gain", "ratio_drift", "kl", "perplexity_ratio", "off_domain_loss"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"thresholds.{name} = {value}: expected 0 or more")
        for stage, limit in self.seconds.items():
            if stage not in STAGES:
                raise ValueError(
                    f"thresholds.seconds.{stage}: no such stage; expected one of {', '.join(STAGES)}"
                )
            if not limit > 0:
                raise ValueError(f"thresholds.seconds.{stage} = {limit}: expected above 0")


@dataclass(frozen=True, slots=True)
class Check:
    """One kind of threshold.

    Attributes:
        stage: The stage after which it is measured.
        title: Its title.
        sign: Comparison of the measured value with the threshold.
        form: Format of both.
        limit: Returns the threshold from the config; None if not set.
    """

    stage: str
    title: str
    sign: Literal[">=", "<=", "<"]
    form: str
    limit: Callable[[ThresholdConfig], float | None]

    def demand(self, limit: float) -> str:
        """Format the threshold."""
        return f"{self.sign} {format(limit, self.form)}"

    def holds(self, value: float, limit: float) -> bool:
        """Compare; NaN never holds."""
        if self.sign == ">=":
            return value >= limit
        return value < limit if self.sign == "<" else value <= limit


CHECKS: dict[str, Check] = {
    "validation_loss": Check("sft", "held-out loss at its best", "<=", ".4f", lambda t: t.validation_loss),
    "ratio_drift": Check("rl", "ratio drift", "<=", ".1e", lambda t: t.ratio_drift),
    "kl": Check("rl", "KL, nats per token", "<=", ".3f", lambda t: t.kl),
    "pass_at_1": Check("eval_rl", "pass@1", ">=", ".1%", lambda t: t.pass_at_1),
    "gain": Check("eval_rl", "gain in pass@1, points", ">=", ".1%", lambda t: t.gain),
    "gain_p": Check("eval_rl", "p-value of that gain", "<", ".3g", lambda t: t.gain_p),
    "format": Check("eval_rl", "perfect format", ">=", ".1%", lambda t: t.format),
    "perplexity_ratio": Check("probe", "perplexity ratio", "<=", ".3g", lambda t: t.perplexity_ratio),
    "off_domain_loss": Check("probe", "off-domain loss", "<=", ".1%", lambda t: t.off_domain_loss),
    "numeric": Check("probe", "numbers not asked for", "<=", ".1%", lambda t: t.numeric),
}
"""Every threshold except the seconds, by its name in `ThresholdConfig`."""


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the report.

    Attributes:
        stage: Key of `STAGES`.
        name: The stage's title, or that of a check.
        status: passed, missed (a threshold), failed (an error, or nothing to measure) or skipped.
        seconds: Wall time of a stage; None for a check.
        measured: What was measured, as text.
        threshold: The threshold; empty if there is none.
        reason: Why it failed or was skipped, in one line.
    """

    stage: str
    name: str
    status: Status
    seconds: float | None = None
    measured: str = ""
    threshold: str = ""
    reason: str = ""


def declared(thresholds: ThresholdConfig) -> list[tuple[str, str, str]]:
    """Return (stage, what, threshold) of all thresholds, in the order of the stages."""
    rows = []
    for stage, title in STAGES.items():
        if stage in thresholds.seconds:
            rows.append((stage, f"{title}: seconds", f"<= {thresholds.seconds[stage]:g}"))
        for check in CHECKS.values():
            limit = check.limit(thresholds)
            if check.stage == stage and limit is not None:
                rows.append((stage, check.title, check.demand(limit)))
    return rows


def judge_stage(stage: str, folder: Path, thresholds: ThresholdConfig) -> list[Item]:
    """Check the thresholds of a finished stage.

    Args:
        stage: Key of `STAGES`.
        folder: Folder of the validation, with the stage's folder in it.
        thresholds: The thresholds.

    Returns:
        One item per threshold.
    """
    checks = [
        (name, check, limit)
        for name, check in CHECKS.items()
        if check.stage == stage and (limit := check.limit(thresholds)) is not None
    ]
    found = MEASURES[stage](folder) if checks else {}
    items = []
    for name, check, limit in checks:
        value, note = found[name]
        title, demand = check.title, check.demand(limit)
        if value is None:
            items.append(Item(stage, title, "failed", threshold=demand, reason=f"not measured: {note}"))
            continue
        status: Status = "passed" if check.holds(value, limit) else "missed"
        shown = f"{format(value, check.form)}{f' ({note})' if note else ''}"
        items.append(Item(stage, title, status, measured=shown, threshold=demand))
    return items


Measured = dict[str, tuple[float | None, str]]
"""Value and remark by name of the check; None with the reason if it could not be measured."""


def _measure_sft(folder: Path) -> Measured:
    found = [
        (row["sft/validation_loss"], row["step"])
        for row in read_metrics(folder / "sft")
        if row.get("sft/validation_loss") is not None
    ]
    if not found:
        return {"validation_loss": (None, "no step measured it; set sft.validation_problems")}
    loss, step = min(found)
    return {"validation_loss": (loss, f"step {step:,}")}


def _measure_rl(folder: Path) -> Measured:
    rows = read_metrics(folder / "rl")
    found: Measured = {}
    for name in ("ratio_drift", "kl"):
        values = [row[f"rl/{name}"] for row in rows if f"rl/{name}" in row]
        finite = [math.inf if value is None else float(value) for value in values]  # null means NaN
        found[name] = (max(finite), "") if finite else (None, "no step logged it")
    return found


def _measure_eval(folder: Path) -> Measured:
    metrics = _read(folder / "eval_rl/eval.json")["metrics"]

    def interval(name: str) -> tuple[float, str]:
        return metrics[name]["mean"], f"{metrics[name]['low']:.1%} to {metrics[name]['high']:.1%}"

    found: Measured = {"pass_at_1": interval("pass@1"), "format": interval("format")}
    if not (folder / "eval_sft/eval.json").is_file():
        return found | dict.fromkeys(
            ("gain", "gain_p"), (None, "there is no evaluation before reinforcement")
        )
    before, after = read_eval(folder / "eval_sft"), read_eval(folder / "eval_rl")
    if before.greedy.keys() != after.greedy.keys():
        return found | dict.fromkeys(
            ("gain", "gain_p"), (None, "the two evaluations have different problems")
        )

    def scores(evaluation: StoredEval) -> tuple[list[float], list[float]]:
        rows = [evaluation.samples[uid] for uid in before.greedy]
        shares = [sum(row["correct"] for row in samples) / len(samples) for samples in rows]
        return shares, [float(evaluation.greedy[uid]["correct"]) for uid in before.greedy]

    gain, greedy = map(compare_scores, ("pass@1", "greedy"), scores(before), scores(after))
    assert gain is not None
    assert greedy is not None
    assert greedy.flips is not None
    lost, won = greedy.flips
    found["gain"] = gain.difference.mean, f"{gain.difference.low:.1%} to {gain.difference.high:.1%}"
    note = f"greedy: {won} problems won, {lost} lost, exact McNemar p {greedy.p:.2g}"
    is_gain = gain.difference.mean > 0
    found["gain_p"] = (gain.p, note) if is_gain else (1.0, f"there is no gain; {note}")
    return found


def _measure_probe(folder: Path) -> Measured:
    *others, last = _read(folder / "probe/probe.json")["models"]
    remarks = [model["remark"] for model in (last, *others) if model["remark"]]
    missing = remarks[0] if remarks else "there is nothing to compare with"
    against = last.get("against_first") or {}
    found: Measured = dict.fromkeys(("perplexity_ratio", "off_domain_loss", "numeric"), (None, missing))
    if against.get("perplexity_ratio") is not None:
        found["perplexity_ratio"] = against["perplexity_ratio"], ""
    if (right := against.get("right")) is not None:
        found["off_domain_loss"] = -right["mean"], f"{-right['high']:.1%} to {-right['low']:.1%}"
    if (numeric := last["kinds"]["all"]["numeric"]) is not None:
        found["numeric"] = numeric["mean"], f"{numeric['low']:.1%} to {numeric['high']:.1%}"
    return found


MEASURES: Mapping[str, Callable[[Path], Measured]] = {
    "sft": _measure_sft,
    "rl": _measure_rl,
    "eval_rl": _measure_eval,
    "probe": _measure_probe,
}


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
