"""Chart data of a run's curves: rows of metrics.jsonl -> figures of panels of series; long ones are thinned."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from whet.report.plots import FIGURES, Panel, Series, fill
from whet.telemetry.display import metric_label
from whet.telemetry.log import clean_metrics
from whet.telemetry.metrics import Metric, find_metric

MAX_POINTS = 3000
"""A longer series is thinned to `NUM_BINS` bins of steps: mean, lowest and highest value of each."""

NUM_BINS = 1000
MAX_SERIES = 6
"""Most series in one panel (the number of colours); more go into further panels."""

TITLES = {
    "rl_learning": "Learning",
    "rl_health": "Health of the policy",
    "rl_signal": "Learning signal",
    "sft": "Fine-tuning",
    "dpo": "Preferences",
    "rft": "Fine-tuning on its own right answers",
    "evaluation": "Validation",
    "rl_speed": "Speed",
    "rl_off_policy": "Sampler against trainer",
    "rl_critic": "Critic",
    "rl_judge": "Judge",
    "rl_self_play": "Self-play",
    "router": "Experts",
    "hardware": "Hardware",
    "other": "Other metrics",
}
"""Figure -> heading, in the order of a page; figures without a heading come last."""


def figures(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn rows of metrics into chart data, as charts.js draws it.

    Args:
        rows: Rows of metrics.jsonl in any order; the later row of a repeated step counts. Read once.

    Returns:
        Figures that have data: {name, title, panels: [{title, unit, smooth, series: [{name, label, meaning, steps,
        values}]}]}. A value that is not finite is None. A long series also has `low` and `high` beside `values`, which
        are then means of bins. Metrics that this version does not know are in the figure 'other'.
    """
    return figures_of(collect(rows))


def figures_of(curves: Series) -> list[dict[str, Any]]:
    """Turn collected curves into chart data, as `figures` does.

    Args:
        curves: Name -> steps and values, from `collect`.
    """
    known = {name: metric for name in curves if (metric := declared(name)) is not None}
    present = [name for name, (_, values) in curves.items() if np.isfinite(values).any()]
    all_steps = [steps for steps, _ in curves.values()]
    span = (
        (min(steps[0] for steps in all_steps), max(steps[-1] for steps in all_steps)) if all_steps else (0, 0)
    )
    tables = {name: FIGURES[name] for name in sorted(FIGURES, key=_place)}
    tables["other"] = tuple(Panel(name, (name,)) for name in present if name not in known)
    found: list[dict[str, Any]] = []
    for figure, panels in tables.items():
        filled = [
            {
                "title": title,
                "unit": "" if (unit := known.get(names[0], Metric("", "")).unit) == "1" else unit,
                "smooth": panel.smooth,
                "series": [_series(name, known.get(name), *curves[name], span) for name in names],
            }
            for panel, title, names in _fill(panels, present)
        ]
        if filled:
            found.append(
                {"name": figure, "title": TITLES.get(figure, metric_label(f"/{figure}")), "panels": filled}
            )
    return found


def overlay(
    own: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], label: str
) -> list[dict[str, Any]]:
    """Add another run's series to the panels that both have.

    Args:
        own: Figures of the run.
        other: Figures of the run to compare with.
        label: Name of the other run, for legends.

    Returns:
        New figures; an added series has `other` set to the label.
    """
    theirs = {
        (figure["name"], panel["title"]): panel["series"] for figure in other for panel in figure["panels"]
    }
    return [
        {
            **figure,
            "panels": [
                {
                    **panel,
                    "series": panel["series"]
                    + [
                        {**series, "other": label}
                        for series in theirs.get((figure["name"], panel["title"]), ())
                    ],
                }
                for panel in figure["panels"]
            ],
        }
        for figure in own
    ]


def collect(rows: Iterable[Mapping[str, Any]]) -> Series:
    """Collect the curve of every metric in compact arrays; values that are not numbers of a step are dropped.

    Args:
        rows: Rows of metrics.jsonl; nothing in them is trusted.

    Returns:
        Name -> ascending steps and their values; NaN where a row has null.
    """
    points: dict[str, tuple[array[int], array[float]]] = {}
    for row in filter(None, map(clean_metrics, rows)):
        for name in (name for name in row if "/" in name):
            steps, values = points.setdefault(name, (array("q"), array("d")))
            steps.append(row["step"])
            values.append(math.nan if row[name] is None else row[name])
    return {name: _latest(np.array(steps), np.array(values)) for name, (steps, values) in points.items()}


def _latest(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort by step; of equal steps keep the last."""
    unique, index = np.unique(steps[::-1], return_index=True)
    return unique, values[::-1][index]


def declared(name: str) -> Metric | None:
    """Return what is known of a metric; None where this version does not know it."""
    try:
        return find_metric(name)
    except ValueError:
        return None


def _place(figure: str) -> int:
    return list(TITLES).index(figure) if figure in TITLES else len(TITLES)


def _fill(panels: Sequence[Panel], present: Sequence[str]) -> Iterator[tuple[Panel, str, list[str]]]:
    """Give each panel its metrics; too many continue in a further panel."""
    for panel, shown in fill(panels, present):
        for start in range(0, len(shown), MAX_SERIES):
            suffix = f" ({start // MAX_SERIES + 1})" if start else ""
            yield panel, panel.title + suffix, shown[start : start + MAX_SERIES]


def _series(
    name: str, metric: Metric | None, steps: np.ndarray, values: np.ndarray, span: tuple[int, int]
) -> dict[str, Any]:
    # After a family's name: what the user chose, unchanged, or the reason.
    families = ("rl/reward/", "rl/signal/", "rl/dropped/")
    family = next((family for family in families if name.startswith(family)), "")
    label = name.removeprefix(family) if family else metric_label(name)
    label = label.replace("_", " ") if family == "rl/dropped/" else label
    series: dict[str, Any] = {
        "name": name,
        "label": label,
        "meaning": "a metric that this version of whet does not know" if metric is None else metric.meaning,
    }
    if len(steps) > MAX_POINTS:
        return series | _thin(steps, values, span)
    return series | {"steps": steps.tolist(), "values": _json(values)}


def _thin(steps: np.ndarray, values: np.ndarray, span: tuple[int, int]) -> dict[str, Any]:
    """Reduce a series to bins of steps that all series of the run share."""
    low, high = span
    keep = np.isfinite(values)
    bins = (steps[keep] - low) * NUM_BINS // (high - low + 1)
    filled, starts = np.unique(bins, return_index=True)
    counts = np.diff([*starts, len(bins)])
    middles = low + (2 * filled + 1) * (high - low + 1) // (2 * NUM_BINS)
    values = values[keep]
    return {
        "steps": middles.tolist(),
        "values": _json(np.add.reduceat(values, starts) / counts),
        "low": _json(np.minimum.reduceat(values, starts)),
        "high": _json(np.maximum.reduceat(values, starts)),
    }


def _json(values: np.ndarray) -> list[float | None]:
    """Round to what a chart can show: six digits."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
