"""Plots of one evaluation: pass@k over k, and the lengths of right and wrong completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from whet.eval.grade import Judged
from whet.telemetry.plots import COLOURS, MUTED, STYLE

BINS = 30


def draw_evaluation(
    summary: Mapping[str, Any], samples: Sequence[Sequence[Judged]], folder: Path
) -> list[str]:
    """Draw what an evaluation gives rise to.

    Args:
        summary: Content of eval.json.
        samples: Graded samples of each problem.
        folder: Where the PNG files go; made if missing.

    Returns:
        Names of the plots, without `.png`.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    folder.mkdir(parents=True, exist_ok=True)
    drawn = ["eval_lengths"]
    with matplotlib.rc_context(cast(Any, STYLE)):
        figure = Figure(figsize=(8, 2.8), layout="constrained", facecolor="white")
        for place, quantity in enumerate(("thinking", "completion")):
            _histogram(figure.add_subplot(1, 2, place + 1), quantity, samples)
        figure.savefig(folder / "eval_lengths.png", dpi=140)
        if summary["num_samples"] > 1:
            curve = summary["pass@k"]
            ks, rows = [int(k) for k in curve], list(curve.values())
            figure = Figure(figsize=(4.5, 2.8), layout="constrained", facecolor="white")
            axes = figure.add_subplot()
            low, mean, high = ([row[end] for row in rows] for end in ("low", "mean", "high"))
            axes.fill_between(ks, low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
            axes.plot(ks, mean, color=COLOURS[0], marker="o", markersize=3)
            axes.set_title("pass@k, with 95 % interval over problems")
            axes.set_xlabel("k")
            axes.set_ylim(0, 1.02)
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            figure.savefig(folder / "eval_pass_at_k.png", dpi=140)
            drawn.insert(0, "eval_pass_at_k")
    return drawn


def _histogram(axes: Any, quantity: str, samples: Sequence[Sequence[Judged]]) -> None:
    """Draw the share of right and of wrong completions over length, each of its own number."""
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for row in samples:
        for done in row:
            value = done.num_tokens if quantity == "completion" else done.grade.thinking_tokens
            lengths[done.grade.is_correct].append(value)
    longest = max(1, *lengths[True], *lengths[False])
    edges = np.linspace(0, longest + 1, min(BINS, longest + 1) + 1)
    for is_right, label, colour in ((True, "right", COLOURS[2]), (False, "wrong", COLOURS[3])):
        values = lengths[is_right]
        if values:
            weights = np.full(len(values), 1 / len(values))
            text = f"{label} ({len(values):,})"
            axes.hist(values, edges, weights=weights, color=colour, alpha=0.5, label=text)
    axes.set_title(f"{quantity} tokens")
    axes.set_ylabel("share of its kind", color=MUTED)
    axes.legend()
