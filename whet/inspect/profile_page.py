"""The page of a profile: steps as bars of their phases, and the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.pages.page import render
from whet.telemetry.spans import NAMES

REST = "rest of the step"
NUM_COLOURS = 6
OTHERS = "everything else"
Part = dict[str, Any]


def write_page(path: Path, content: Mapping[str, Any]) -> None:
    """Write the page of what `whet.inspect.profile.describe` returns."""
    bars, legend = stacked(content["phases"], content["steps"])
    title = f"Profile of {content['program']} {content['recipe']}"
    page = render(
        "profile.html",
        title=title,
        styles=("profile.css",),
        content=content,
        bars=bars,
        legend=legend,
        names=NAMES,
        rest=REST,
        mean=sum(content["steps"]) / len(content["steps"]),
    )
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def stacked(
    phases: Sequence[Mapping[str, Any]], steps: Sequence[float]
) -> tuple[list[list[Part]], list[Part]]:
    """Cut each step into its phases, in the order in which they come.

    Args:
        phases: Phases as JSON values, the step itself first.
        steps: Seconds of each step.

    Returns:
        For each step its parts {name, colour, x, width, seconds}, x and width in percent of the longest step; and the
        legend {name, colour, seconds}, seconds of all steps. The longest phases have a colour of their own.
    """
    outer = [phase for phase in phases if len(phase["path"]) == 2 and phase["share"] is not None]
    longest = sorted(outer, key=lambda phase: -phase["seconds"])[: NUM_COLOURS - 1]
    series = [(phase["path"][-1], phase["by_step"]) for phase in outer if phase in longest]
    rest = [seconds - sum(values[step] for _, values in series) for step, seconds in enumerate(steps)]
    series.append((OTHERS, rest))
    scale = 100 / max(steps)
    bars: list[list[Part]] = []
    for step in range(len(steps)):
        x, bar = 0.0, []
        for colour, (name, values) in enumerate(series, start=NUM_COLOURS + 1 - len(series)):
            width = scale * values[step]
            part = {"name": name, "colour": colour, "x": x, "width": width, "seconds": values[step]}
            bar.append(part)
            x += width
        bars.append(bar)
    legend = [
        {**part, "seconds": sum(bar[place]["seconds"] for bar in bars)} for place, part in enumerate(bars[0])
    ]
    return bars, legend
