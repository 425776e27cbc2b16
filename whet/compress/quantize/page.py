"""What `whet quantize` found, as text, as plots and as a page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from whet.report.page import render
from whet.report.plots import COLOURS, STYLE, matplotlib_for

Json = Mapping[str, Any]
SHOWN = 12
"""Matrices that the terminal shows; all are on the page and in layers.csv."""
BADGES = {"nf4": COLOURS[0], "int8": COLOURS[1], "bf16": COLOURS[2]}
ERRORS = {
    "weight": "weight error, ||W - Q|| / ||W||",
    "activation": "activation error, ||X(W - Q)|| / ||XW||",
    "worst_token": "worst token, of the median output",
}
FRONT = ("selected", "random", "largest weight error", "largest activation error")


def as_text(content: Json) -> str:
    """Format the choice, the comparison, and pass@1."""
    layers = content["layers"]
    counts = {kind: sum(row["kind"] == kind for row in layers) for kind in BADGES}
    bits = 8 * sum(row["bytes"] for row in layers) / content["numbers"]
    shown = ", ".join(f"{n} of {len(layers)} matrices in {kind}" for kind, n in counts.items() if n)
    lines = [
        f"{content['model']}: {shown}; {bits:.2f} bits a weight",
        *(_super_weight(one) for one in content["super_weights"]),
        ways_text(content["is_exhaustive"], content["calibration_tokens"]),
        "",
        f"{'matrix (most sensitive first)':<44}{'kind':>6}{'method':>8}{'KL in NF4':>11}"
        f"{'weight':>9}{'activ.':>9}{'worst':>9}",
    ]
    ranked = sorted(layers, key=lambda row: -_cost(row))
    for row in ranked[:SHOWN]:
        own = row["errors"]["nf4"]
        lines.append(
            f"{row['name'].removesuffix('.weight')[-43:]:<44}{row['kind']:>6}{row['method'] or '-':>8}"
            f"{_cost(row):>11.2e}{own['weight']:>9.4f}{own['activation']:>9.4f}{own['worst_token']:>9.3f}"
        )
    if len(layers) > SHOWN:
        lines.append(f"... {len(layers) - SHOWN} more: layers.csv")
    lines += [
        "",
        f"{'on held-out text':<44}{'bytes':>13}{'KL':>10}{'worst KL':>10}{'top-1':>8}{'perplexity':>12}",
    ]
    whole = f"{content['full_bytes']:>13,}{0:>10.2g}{0:>10.2g}{100:>6} %{content['perplexity']:>12.4f}"
    lines.append(f"{'full model, its matrices in 16 bits':<44}{whole}")
    for point in content["table"]:
        lines.append(f"{point['name']:<44}" + "".join(_cells(content, point)))
    for name, metrics in content["pass_at_1"].items():
        found = ", ".join(
            f"{m} {v['mean']:.1%} ({v['low']:.1%} to {v['high']:.1%})" for m, v in metrics.items()
        )
        count = f" of {content['num_problems']:,} problems" if content.get("num_problems") else ""
        lines.append(f"{name}: {found}{count}")
    return "\n".join(lines)


def ways_text(is_exhaustive: bool, num_tokens: int) -> str:
    """Say of which ways to store a matrix the KL is measured, and on how many tokens."""
    what = "each way to store it measured"
    if not is_exhaustive:
        what = "NF4 rounded to the nearest measured, other ways estimated from it by the squared errors of its outputs"
    return f"KL of each matrix on {num_tokens:,} tokens: {what}"


def _super_weight(one: Json) -> str:
    return (
        f"super weight {one['name']}[{one['row']}, {one['column']}] = {one['value']:.4g}, kept exact: at zero the loss "
        f"rises from {one['loss']:.3f} to {one['broken_loss']:.3f} nats a token"
    )


def _cost(row: Json) -> float:
    return next(o["cost"] for o in row["options"] if o["kind"] == "nf4" and o["method"] == "rtn")


def _cells(content: Json, point: Json) -> list[str]:
    found = point["divergence"]
    return [
        f"{content['fixed_bytes'] + point['num_bytes']:>13,}",
        f"{found['kl']:>10.2g}",
        f"{found['worst_kl']:>10.2g}",
        f"{100 * found['top1']:>6.1f} %",
        f"{found['perplexity']:>12.4f}",
    ]


def draw(folder: Path, content: Json) -> None:
    """Draw errors.png (by layer) and front.png (bytes against KL)."""
    matplotlib = matplotlib_for(folder)
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    layers = content["layers"]
    with matplotlib.rc_context(cast(Any, STYLE)):
        figure = Figure(figsize=(max(7.0, 0.14 * len(layers)), 8.0), layout="constrained", facecolor="white")
        series = {name: [row["errors"]["nf4"][name] for row in layers] for name in ERRORS}
        series["kl"] = [_cost(row) for row in layers]
        titles = ERRORS | {"kl": "KL of the model with this matrix alone in NF4"}
        colours = [BADGES[row["kind"]] for row in layers]
        for place, (name, values) in enumerate(series.items(), start=1):
            axes = figure.add_subplot(len(series), 1, place)
            axes.bar(range(len(values)), values, color=colours, width=0.8)
            axes.set_title(titles[name])
            axes.set_xticks([])
            if place == len(series):
                axes.set_xlabel("matrices, first layer to last; blue NF4, orange int8, green 16 bits")
        figure.savefig(folder / "errors.png", dpi=120)

        figure = Figure(figsize=(6.5, 4.0), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        for colour, name in zip(COLOURS, FRONT, strict=False):
            points = [point for point in content["front"] if point["name"] == name]
            xs = [8 * point["num_bytes"] / content["numbers"] for point in points]
            ys = [max(point["divergence"]["kl"], 1e-7) for point in points]
            axes.plot(xs, ys, color=colour, marker="o", markersize=3, label=name)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("bits a weight of the layers")
        axes.set_title("KL from the full model on held-out text, nats a token")
        axes.legend()
        figure.savefig(folder / "front.png", dpi=120)


def write_page(folder: Path, content: Json) -> None:
    """Write quantize.html, with the plots in it."""
    rows: Sequence[Json] = content["layers"]
    page = render(
        "quantize.html",
        title=f"Quantisation of {content['model']}",
        content=content,
        ways=ways_text(content["is_exhaustive"], content["calibration_tokens"]),
        super_weights=[_super_weight(one) for one in content["super_weights"]],
        rows=[{"cost": _cost(row), **row} for row in rows],
        points=[{"name": point["name"], "cells": _cells(content, point)} for point in content["table"]],
        images={
            name: "data:image/png;base64," + base64.b64encode((folder / f"{name}.png").read_bytes()).decode()
            for name in ("front", "errors")
        },
    )
    (folder / "quantize.html").write_text(page, encoding="utf-8", errors="backslashreplace")
