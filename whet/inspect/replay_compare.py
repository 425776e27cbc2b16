"""A stage of a recorded step beside the same stage computed here: by how much they differ, and what that means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from whet.train.recorded import weight_sums

Values = Sequence[float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage, as it was recorded and as it came out here.

    Attributes:
        name: Its name.
        recorded: What was recorded, in few words.
        here: The same, computed here.
        difference: Largest |here - recorded| / max(1, |recorded|); None where nothing was computed again.
        mean: Mean of the same.
        tolerance: Largest difference that numerics may make.
        note: What else there is to say.
        is_finite: Whether all numbers computed here are finite.
    """

    name: str
    recorded: str
    here: str
    difference: float | None
    mean: float = 0.0
    tolerance: float = 0.0
    note: str = ""
    is_finite: bool = True

    @property
    def verdict(self) -> str:
        """exact, approx (within tolerance), DIFFERS, or skipped."""
        if self.difference is None:
            return "skipped"
        return (
            "exact" if self.difference == 0 else "approx" if self.difference <= self.tolerance else "DIFFERS"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Largest differences that are numerics and no fault, by stage.

    Attributes:
        logprobs: Of a token's log-probability, nats.
        sums: Of loss and gradient norm.
        metrics: Of any other metric: a clipped share moves by whole tokens.
        weights: Of the mean weight of a parameter, after the update.
    """

    logprobs: float
    sums: float
    metrics: float
    weights: float


EXACT = 1e-9
"""Tolerance of arithmetic in float64: advantages."""
TOLERANCES = {
    "float32": Tolerance(logprobs=1e-4, sums=1e-4, metrics=1e-3, weights=1e-4),
    "bfloat16": Tolerance(logprobs=0.25, sums=0.1, metrics=0.25, weights=1e-2),
}


def largest(recorded: Values, here: Values) -> tuple[float, float]:
    """Return the largest and the mean difference, relative above 1; equal NaNs and absences differ by nothing."""
    if len(recorded) != len(here):
        return math.inf, math.inf
    gaps = [_gap(was, now) for was, now in zip(recorded, here, strict=True)]
    return max(gaps, default=0.0), math.fsum(gaps) / max(1, len(gaps)) if math.inf not in gaps else math.inf


def _gap(was: float | None, now: float | None) -> float:
    if was == now or (was is not None and now is not None and math.isnan(was) and math.isnan(now)):
        return 0.0
    if was is None or now is None or not (math.isfinite(was) and math.isfinite(now)):
        return math.inf
    return abs(now - was) / max(1.0, abs(was))


def compare(name: str, recorded: Values, here: Values, tolerance: float, note: str = "") -> Stage:
    """Compare the numbers of a stage; one is shown as it is, several by their root mean square."""
    difference, mean = largest(recorded, here)
    return Stage(
        name=name,
        recorded=_shown(recorded),
        here=_shown(here),
        difference=difference,
        mean=mean,
        tolerance=tolerance,
        note=note,
        is_finite=all(value is None or math.isfinite(value) for value in here),
    )


def _shown(values: Values) -> str:
    numbers = [value for value in values if value is not None]
    bad = sum(not math.isfinite(value) for value in numbers)
    if len(values) == 1 and numbers:
        return f"{numbers[0]:.7g}"
    if bad:
        return f"{bad:,} of {len(values):,} not finite"
    missing = f", {len(values) - len(numbers):,} without" if len(numbers) < len(values) else ""
    size = math.sqrt(math.fsum(value * value for value in numbers) / max(1, len(numbers)))
    return f"{len(numbers):,}, rms {size:.4g}{missing}"


def compare_ids(name: str, pairs: Sequence[tuple[object, object]], note: str = "") -> Stage:
    """Compare things that are equal or not: prompts, texts."""
    unequal = sum(was != now for was, now in pairs)
    here = f"{len(pairs) - unequal:,} equal" + (f", {unequal:,} others" if unequal else "")
    return Stage(
        name=name, recorded=f"{len(pairs):,}", here=here, difference=math.inf if unequal else 0.0, note=note
    )


def skipped(name: str, note: str) -> Stage:
    """Make a stage that nothing is computed of."""
    return Stage(name=name, recorded="", here="", difference=None, note=note)


def compare_metrics(recorded: Mapping[str, float], here: Mapping[str, float], tolerance: float) -> Stage:
    """Compare metrics by name; name the one that differs most."""
    names = sorted(here)
    was = [recorded.get(name) for name in names]
    now = [here[name] for name in names]
    gaps = {name: _gap(a, b) for name, a, b in zip(names, was, now, strict=True)}
    unequal = {name: gap for name, gap in gaps.items() if gap}
    worst = max(unequal, key=lambda name: unequal[name], default="")
    note = f"most: {worst} {recorded.get(worst, math.nan):.6g} -> {here[worst]:.6g}" if worst else ""
    stage = compare("metrics", was, now, tolerance, note)
    equal = f"{len(names) - len(unequal)} equal" + (f", {len(unequal)} others" if unequal else "")
    return replace(stage, recorded=f"{len(names)} metrics", here=equal)


def compare_weights(recorded: Mapping[str, float], model: torch.nn.Module, tolerance: float) -> Stage:
    """Compare the sums of parameters; the difference is that of a parameter's mean weight."""
    here = weight_sums(model)
    sizes = {name: tensor.numel() for name, tensor in model.named_parameters()}
    gaps = {
        name: _gap(recorded[name], total) and abs(total - recorded[name]) / sizes[name]
        if name in recorded
        else math.inf
        for name, total in here.items()
    }
    unequal = {name: gap for name, gap in gaps.items() if gap}
    worst = max(unequal, key=lambda name: unequal[name], default="")
    return Stage(
        name="weights after",
        recorded=f"{len(recorded)} parameters",
        here=f"{len(here) - len(unequal)} equal" + (f", {len(unequal)} others" if unequal else ""),
        difference=max(gaps.values(), default=0.0),
        mean=math.fsum(gaps.values()) / max(1, len(gaps)),
        tolerance=tolerance,
        note=f"most: {worst}" if worst else "",
    )
