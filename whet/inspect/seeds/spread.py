"""Curves of several seeds, rules for stopping a seed early, and their spread. Pure functions, and a plot."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from whet.report.plots import COLOURS, INK, MUTED, STYLE, matplotlib_for
from whet.telemetry.log import RUN_TIME, read_metrics
from whet.telemetry.metrics import find_metric, format_metric

NOISE = 2.0
"""Standard errors from which a gain counts."""
FLAT_BELOW = 0.5
"""Share of right answers from which groups without reward differences are fine: they are too easy."""


@dataclass(slots=True)
class Curve:
    """A run's logged values of one metric.

    Attributes:
        metric: Its name.
        steps: Steps whose row has a finite value, ascending.
        values: The values.
        times: Times at which the rows were written, in seconds of the run; of an earlier version, in Unix time.
        names: All metrics that a row has.
        last_step: Step of the last row, with or without a value.
        began: Time of the first row, in seconds.
        num_flat: Number of consecutive last rows in which no group's rewards differed and most answers were wrong.
        clock: Field that the times are from, as the first row has it.
    """

    metric: str
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    last_step: int = 0
    began: float = math.nan
    num_flat: int = 0
    clock: str = ""

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the next row of metrics.jsonl."""
        self.clock = self.clock or (RUN_TIME if RUN_TIME in row else "time_s")
        self.last_step, time_s = row["step"], row.get(self.clock, math.nan)
        self.began = time_s if math.isnan(self.began) else self.began
        self.names.update(name for name in row if "/" in name)
        if "rl/zero_variance_groups" in row:
            is_flat = row["rl/zero_variance_groups"] == 1 and (row.get("rl/correct") or 0) < FLAT_BELOW
            self.num_flat = self.num_flat + 1 if is_flat else 0
        if row.get(self.metric) is not None:
            self.steps.append(self.last_step)
            self.values.append(float(row[self.metric]))
            self.times.append(time_s)

    def mean_at(self, step: int, window: int) -> float:
        """Return the rolling mean: of the last `window` values up to and including a step; NaN if there is none."""
        end = bisect.bisect_right(self.steps, step)
        values = self.values[max(0, end - window) : end]
        return statistics.fmean(values) if values else math.nan

    def final(self, window: int) -> float:
        """Return the rolling mean at the last row."""
        return self.mean_at(self.last_step, window)


def read_curve(run: Path, metric: str) -> Curve:
    """Read a run's curve of a metric; empty if nothing was logged."""
    curve = Curve(metric)
    for row in read_metrics(run):
        curve.add(row)
    return curve


def first_reach(
    curve: Curve, threshold: float, *, window: int = 5, sign: int = 1
) -> tuple[int, float] | None:
    """Return when the rolling mean first reaches a threshold; only full windows count, so one lucky step does not.

    Args:
        curve: The run.
        threshold: Value to reach.
        window: Values of the rolling mean.
        sign: 1 when more is better, -1 when less is.

    Returns:
        Step, and seconds since the run's first row (without start-up and the first step); None if it never does.
    """
    for end in range(window, len(curve.values) + 1):
        if sign * statistics.fmean(curve.values[end - window : end]) >= sign * threshold:
            return curve.steps[end - 1], curve.times[end - 1] - curve.began
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class KillRules:
    """Rules for stopping a seed early; docs/seeds.md explains them and their risks.

    Attributes:
        after: Steps before which no seed is judged.
        window: Values of a rolling mean.
        margin: Largest lag behind the median of the other seeds, in units of the metric.
        sign: 1 when more is better, -1 when less is.
        enough: Level at which a seed is never called dead; None for no such level.
    """

    after: int
    window: int
    margin: float
    sign: int = 1
    enough: float | None = None


def kill_reason(curve: Curve, peers: Sequence[Curve], rules: KillRules) -> str | None:
    """Return why a seed should be stopped at its last step.

    Args:
        curve: The seed.
        peers: All other seeds, also ended ones; those that are not as far are skipped.
        rules: The rules.

    Returns:
        One readable line, or None to continue.
    """
    if curve.last_step < rules.after:
        return None
    return _no_signal(curve, rules) or _no_gain(curve, rules) or _behind(curve, peers, rules)


def _no_signal(curve: Curve, rules: KillRules) -> str | None:
    if curve.num_flat < rules.after:
        return None
    return (
        f"dead at step {curve.last_step}: no difference in reward within any group for {curve.num_flat} steps"
    )


def _no_gain(curve: Curve, rules: KillRules) -> str | None:
    """Compare the last window with the first one; the noise is measured on neighbours, so that a trend does not count
    as noise."""
    values, window = curve.values, rules.window
    if len(values) < 2 * window:
        return None
    first, last = statistics.fmean(values[:window]), statistics.fmean(values[-window:])
    if rules.enough is not None and rules.sign * last >= rules.sign * rules.enough:
        return None
    variance = statistics.fmean((b - a) ** 2 for a, b in zip(values, values[1:], strict=False)) / 2
    noise = NOISE * math.sqrt(2 * variance / window)
    if rules.sign * (last - first) > noise:
        return None
    start, now, width = (format_metric(curve.metric, value) for value in (first, last, noise))
    return f"dead at step {curve.last_step}: {curve.metric} began at {start} and is {now}; noise {width}"


def _behind(curve: Curve, peers: Sequence[Curve], rules: KillRules) -> str | None:
    step = curve.last_step
    means = [peer.mean_at(step, rules.window) for peer in peers if peer.last_step >= step]
    means = [mean for mean in means if not math.isnan(mean)]
    if len(means) < 2 or len(curve.values) < rules.window:
        return None
    own, median = curve.mean_at(step, rules.window), statistics.median(means)
    if rules.sign * (median - own) <= rules.margin:
        return None
    shown, middle = format_metric(curve.metric, own), format_metric(curve.metric, median)
    return f"behind at step {step}: {curve.metric} {shown}, median of {len(means)} others {middle}"


@dataclass(frozen=True, slots=True)
class Spread:
    """Summary statistics of a number over seeds.

    Attributes:
        num: Seeds.
        mean: Their mean.
        std: Sample standard deviation (divides by num - 1); None for one seed.
        min: Smallest.
        median: Median.
        max: Largest.
    """

    num: int
    mean: float
    std: float | None
    min: float
    median: float
    max: float


def spread(values: Sequence[float | None]) -> Spread | None:
    """Summarise one value per seed; None (nothing logged) is skipped; returns None if nothing is left."""
    kept = [value for value in values if value is not None]
    if not kept:
        return None
    std = statistics.stdev(kept) if len(kept) > 1 else None
    return Spread(len(kept), statistics.fmean(kept), std, min(kept), statistics.median(kept), max(kept))


def band(curves: Sequence[Curve], window: int) -> list[tuple[int, float, float, float]]:
    """Return (step, min, median, max) of the rolling means, at each step over the curves that reach it."""
    rows: list[tuple[int, float, float, float]] = []
    for step in sorted({step for curve in curves for step in curve.steps}):
        means = [curve.mean_at(step, window) for curve in curves if curve.steps and curve.steps[-1] >= step]
        present = [mean for mean in means if not math.isnan(mean)]
        rows.append((step, min(present), statistics.median(present), max(present)))
    return rows


def draw_spread(
    path: Path, curves: Mapping[str, Curve], *, stopped: set[str], window: int, threshold: float | None = None
) -> None:
    """Draw all seeds, their median and their range into one PNG.

    Args:
        path: The file.
        curves: Label -> curve; those without a value are skipped; without any nothing is drawn.
        stopped: Labels of unfinished runs: dashed, with a cross at the end.
        window: Values of the rolling mean that is drawn.
        threshold: A level to mark.
    """
    matplotlib = matplotlib_for(path.parent)
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    drawn = {label: curve for label, curve in curves.items() if curve.values}
    if not drawn:
        return
    rows = band(list(drawn.values()), window)
    metric = next(iter(drawn.values())).metric
    with matplotlib.rc_context(cast(Any, STYLE)):
        figure = Figure(figsize=(8.4, 4.4), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        steps, low, middle, high = zip(*rows, strict=True)
        axes.fill_between(steps, low, high, color=COLOURS[0], alpha=0.09, linewidth=0, label="min to max")
        for index, (label, curve) in enumerate(drawn.items()):
            colour, ended = COLOURS[index % len(COLOURS)], label not in stopped
            means = [curve.mean_at(step, window) for step in curve.steps]
            style = "-" if ended else (0, (4, 2))
            axes.plot(
                curve.steps, means, color=colour, linewidth=1.2, linestyle=style, alpha=0.85, label=label
            )
            mark, size = (".", 6) if ended else ("x", 6)
            axes.plot(curve.steps[-1], means[-1], mark, color=colour, markersize=size, markeredgewidth=1.6)
        axes.plot(steps, middle, color=INK, linewidth=2.4, label="median", solid_capstyle="round")
        if threshold is not None:
            axes.axhline(threshold, color=MUTED, linewidth=1, linestyle=(0, (1, 2)), label="threshold")
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
        if find_metric(metric).unit == "share":
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 4):g}%"))
        axes.margins(x=0.02)
        axes.set_title(metric)
        axes.set_xlabel("step")
        note = f"rolling mean of {window}; median and range over the seeds that reach a step"
        note += "; dashed with a cross: stopped early" if stopped else ""
        axes.text(0, 1.025, note, transform=axes.transAxes, color=MUTED, fontsize=8)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)
        figure.savefig(path, dpi=140)
