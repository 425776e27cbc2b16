"""Results of a sweep, as text and as a page with plots of time and memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.report.page import render

AXES = {
    "token_budget": "tokens of a micro-batch",
    "max_rows": "sequences decoded together",
    "num_threads": "CPU threads",
}
"""Numeric settings, with their plot labels."""
QUANTITIES = {
    "seconds": "seconds of a step",
    "sample_seconds": "seconds of sampling",
    "train_seconds": "seconds of training",
    "mib": "MiB alive at most",
}
READ = {
    "token_budget": ("seconds", "train_seconds", "mib"),
    "max_rows": ("seconds", "sample_seconds", "mib"),
    "num_threads": ("seconds",),
}
"""Axis -> quantities drawn over it."""
NUM_COLOURS = 6
NOISE = 0.2
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 230, 56, 14, 12, 40
TICK_GAP = 48
"""Least distance of two labels below a chart: '16,384' is 45 wide."""
Json = Mapping[str, Any]
Series = list[tuple[str, list[Json]]]


def settings(point: Json, *, without: str = "") -> str:
    """Format the settings of a point in words, optionally without one of them."""
    words = {
        "token_budget": f"{point['token_budget']:,} tokens",
        "max_rows": f"{point['max_rows']} row{'s' * (point['max_rows'] != 1)}" if point["max_rows"] else "",
        "checkpoint_layers": "recomputed" if point["checkpoint_layers"] else "",
        "num_threads": f"{point['num_threads']} thread{'s' * (point['num_threads'] != 1)}"
        if point["num_threads"]
        else "",
        "compile": "compiled" if point["compile"] else "",
        "precision": point["precision"],
    }
    return ", ".join(text for name, text in words.items() if text and name != without)


def as_text(content: Json) -> str:
    """Format every point, and the recommendation."""
    about = content["about"]
    lines = [
        f"whet {content['program']} {content['recipe']} on {about['device']}, torch {about['torch']}, "
        f"{content['memory_bytes'] / 2**30:.2f} GiB of memory",
        f"{about['samples']} sequences per step, the longest of {about['longest']:,} tokens; medians of "
        f"{content['rounds']} x {content['steps']} steps in alternating order; memory: a step of longest sequences",
    ]
    for stage in content["stages"]:
        width = max(len(settings(row["point"])) for row in stage["points"])
        head = f"{'step, s':>12}{'std':>9}{'tokens/s':>11}{'samples/s':>11}{'batches':>9}{'MiB':>11}"
        lines += ["", f"{stage['name']:<{width + 2}}{head}"]
        for row in stage["points"]:
            cells = row["why"] if row["status"] != "ok" else _cells(row)
            status = "" if row["status"] == "ok" else f"{row['status']}: "
            lines.append(f"{settings(row['point']):<{width + 2}}{status}{cells}")
    return "\n".join([*lines, "", *notes(content)])


def _cells(row: Json) -> str:
    if "seconds" not in row:  # it was interrupted
        return f"{'':>52}{row['peak_bytes'] / 2**20:>11,.1f}"
    spread = "" if row["seconds_std"] is None else f"{row['seconds_std']:.4f}"
    return (
        f"{row['seconds']:>12.4f}{spread:>9}{row['tokens_per_second']:>11,.0f}"
        f"{row['samples_per_second']:>11,.1f}{row['micro_batches']:>9}{row['peak_bytes'] / 2**20:>11,.1f}"
        + ("" if row["fits"] else "  too close to the limit")
    )


def notes(content: Json) -> list[str]:
    """Return the recommendation and the notes."""
    found = []
    rows = [row for stage in content["stages"] for row in stage["points"]]
    noise = max((row["seconds_std"] / row["seconds"] for row in rows if row.get("seconds_std")), default=0.0)
    if noise > NOISE:
        found.append(
            f"steps of one point differ by {noise:.0%} (standard deviation over median): the machine is busy; "
            "repeat the sweep when it is idle"
        )
    if content["is_substituted"]:
        found.append("no reward differed: advantages of 1 and -1 in turn were trained on")
    if content["one_model_bytes"] is not None:
        best = _row_of(content, content["best"])
        found.append(
            f"two models in memory: {best['peak_bytes'] / 2**20:,.1f} MiB; without the reference "
            f"{content['one_model_bytes'] / 2**20:,.1f} MiB"
        )
    found += _precisions(content)
    if content["best"] is None:
        return found
    if content["gain"] is not None:
        words = f"{content['gain']:.2f} times the recipe's tokens per second, measured alternately"
    else:
        words = (
            "the recipe's own settings" if content["best"] == content["base"] else "the recipe's do not fit"
        )
    return [*found, f"recommended ({words}): {content['overrides']}", content["command"]]


def _precisions(content: Json) -> Iterator[str]:
    """Yield the speed of other precisions; they change the numbers, so the user has to choose."""
    rows = next((stage["points"] for stage in content["stages"] if stage["name"] == "precision"), [])
    for row in rows[1:]:
        name = row["point"]["precision"]
        if "seconds" in row and "seconds" in rows[0]:
            ratio = row["tokens_per_second"] / rows[0]["tokens_per_second"]
            memory = f"{row['peak_bytes'] / 2**20:,.1f} instead of {rows[0]['peak_bytes'] / 2**20:,.1f} MiB"
            text = f"{ratio:.2f} times the tokens per second, {memory}"
            yield f"not chosen, because it changes the numbers: --optim.precision {name}: {text}"


def _row_of(content: Json, point: Json) -> Json:
    """Return the last row of a point."""
    return [row for stage in content["stages"] for row in stage["points"] if row["point"] == point][-1]


def write_page(path: Path, content: Json) -> None:
    """Write the page."""
    page = render(
        "sweep.html",
        title=f"Sweep of {content['program']} {content['recipe']}",
        styles=("sweep.css",),
        content=content,
        charts=charts(content),
        notes=notes(content),
        settings=settings,
        box=(WIDTH, HEIGHT, LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM),
    )
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def charts(content: Json) -> list[dict[str, Any]]:
    """Return a plot of every quantity over every numeric setting of which a stage has two values.

    Returns:
        Plots: title, axis, x ticks and y ticks as (position, label), and lines {name, colour, dots, crosses}; dots are
            (x, y, text), crosses (out of memory) are (x, text).
    """
    found = []
    for axis, label in AXES.items():
        series = _series(content["stages"], axis)
        for quantity in READ[axis]:
            dots = [dot for _, rows in series for row in rows if (dot := _value(row, quantity)) is not None]
            if dots and max(dots) > 0 and (quantity != "train_seconds" or content["program"] == "rl"):
                found.append(_chart(axis, label, quantity, series, max(dots)))
    return found


def _series(stages: Sequence[Json], axis: str) -> Series:
    """Return the longest lines of points of one stage that differ in one setting only, with their common settings."""
    found: Series = []
    names: set[str] = set()
    for stage in stages:
        lines: dict[str, list[Json]] = defaultdict(list)
        for row in stage["points"]:
            lines[settings(row["point"], without=axis)].append(row)
        # A stage that goes over the same settings again is a line of its own: it was measured at another time.
        found += [
            (f"{name} ({stage['name']})" if name in names else name, rows) for name, rows in lines.items()
        ]
        names |= {name for name, rows in lines.items() if len(rows) > 1}
    chosen = sorted((line for line in found if len(line[1]) > 1), key=lambda line: -len(line[1]))[
        :NUM_COLOURS
    ]
    return [(name, sorted(rows, key=lambda row: row["point"][axis])) for name, rows in chosen]


def _value(row: Json, quantity: str) -> float | None:
    if quantity == "mib":
        return row["peak_bytes"] / 2**20 or None
    return row.get(quantity)


def _apart(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Leave out labels that would be written over the one to their right; the last always stands."""
    found = [ticks[-1]]
    for place, label in reversed(ticks[:-1]):
        if found[-1][0] - place >= TICK_GAP:
            found.append((place, label))
    return found[::-1]


def _chart(axis: str, label: str, quantity: str, series: Series, highest: float) -> dict[str, Any]:
    values = sorted({row["point"][axis] for _, rows in series for row in rows})
    low, high = math.log2(values[0]), math.log2(values[-1])
    step = 10 ** math.floor(math.log10(highest))
    step = next(step * factor for factor in (0.2, 0.5, 1, 2) if highest <= 5 * step * factor)
    top = step * math.ceil(highest / step)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(value) - low) / (high - low)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top

    lines = []
    for colour, (name, rows) in enumerate(series, start=1):
        shown = [(row["point"][axis], row, _value(row, quantity)) for row in rows]
        dots = [
            (x(at), y(value), f"{name}: {at:,}, {value:.4g}") for at, _, value in shown if value is not None
        ]
        out = [(x(at), f"{name}: {at:,}, out of memory") for at, row, _ in shown if row["status"] == "oom"]
        lines.append({"name": name, "colour": colour, "dots": dots, "crosses": out})
    ticks = [step * number for number in range(round(top / step) + 1)]
    return {
        "title": f"{QUANTITIES[quantity]} over {label}",
        "axis": label,
        "xs": _apart([(x(value), f"{value:,}") for value in values]),
        "ys": [(y(value), f"{value:.4g}") for value in ticks],
        "lines": lines,
    }
