"""Figures as SVG for pages: heat maps of layers over tokens, and bars; text in them is escaped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

from whet.report.plots import COLOURS
from whet.telemetry.display import escape_controls

CELL = 26
LABEL = 120
FOOT = 110
PLOT = (420, 180)
"""Width and height of a plot of lines."""


def heat_map(
    values: Sequence[Sequence[float]],
    columns: Sequence[str],
    *,
    rows: Sequence[str],
    title: str,
    colour: str = COLOURS[0],
    marked: Sequence[int] = (),
    texts: Sequence[Sequence[str]] | None = None,
) -> Markup:
    """Draw a table of numbers as shades, the first row at the bottom.

    Args:
        values: [rows][columns]; negative ones are red.
        columns: Names below.
        rows: Names at the left.
        title: What it shows, also for those who cannot see it.
        colour: Of the largest value.
        marked: Columns whose names are bold.
        texts: Words in the cells, which are wider then.
    """
    width = CELL if texts is None else 84
    most = max((abs(value) for row in values for value in row), default=0.0) or 1.0
    high, wide = CELL * len(values), width * len(columns)
    parts = [
        f'<svg role="img" aria-label="{escape(title)}" width="{LABEL + wide + 10}" height="{high + FOOT}" '
        f'viewBox="0 0 {LABEL + wide + 10} {high + FOOT}" font-size="11" fill="currentColor">'
    ]
    for n, row in enumerate(values):
        top = high - CELL * (n + 1)
        parts.append(f'<text x="{LABEL - 6}" y="{top + 17}" text-anchor="end">{escape(rows[n])}</text>')
        for m, value in enumerate(row):
            shade, fill = abs(value) / most, colour if value >= 0 else COLOURS[3]
            parts.append(
                f'<rect x="{LABEL + width * m}" y="{top}" width="{width - 1}" height="{CELL - 1}" fill="{fill}" '
                f'fill-opacity="{shade:.3f}" stroke="currentColor" stroke-opacity="0.12">'
                f"<title>{escape(f'{rows[n]}, {_shown(columns[m])}: {value:.4f}')}</title></rect>"
            )
            if texts is not None:
                word = _shown(texts[n][m])[:11]
                parts.append(f'<text x="{LABEL + width * m + 4}" y="{top + 17}">{escape(word)}</text>')
    for m, name in enumerate(columns):
        x, y = LABEL + width * m + width // 2, high + 14
        weight = ' font-weight="bold"' if m in marked else ""
        parts.append(
            f'<text x="{x}" y="{y}" text-anchor="end" transform="rotate(-55 {x} {y})"{weight}>'
            f"{escape(_shown(name)[:16])}</text>"
        )
    return Markup("".join([*parts, "</svg>"]))


def bars(values: Sequence[tuple[str, float]], *, title: str) -> Markup:
    """Draw named numbers as horizontal bars from a common zero."""
    most = max((abs(value) for _, value in values), default=0.0) or 1.0
    half, high = 220, 18
    zero = LABEL + half
    parts = [
        f'<svg role="img" aria-label="{escape(title)}" width="{zero + half + 70}" height="{high * len(values) + 6}" '
        'font-size="11" fill="currentColor">'
    ]
    for n, (name, value) in enumerate(values):
        length, top = half * abs(value) / most, high * n
        left = zero if value >= 0 else zero - length
        fill = COLOURS[0] if value >= 0 else COLOURS[3]
        parts.append(f'<text x="{LABEL - 6}" y="{top + 13}" text-anchor="end">{escape(_shown(name))}</text>')
        parts.append(
            f'<rect x="{left:.1f}" y="{top + 2}" width="{length:.1f}" height="{high - 4}" fill="{fill}"/>'
        )
        parts.append(f'<text x="{zero + half + 6}" y="{top + 13}">{value:+.3f}</text>')
    return Markup("".join([*parts, "</svg>"]))


def lines(
    places: Sequence[int], shares: Mapping[str, Sequence[float | None]], *, title: str, unit: str
) -> Markup:
    """Draw shares over a count, whose axis is logarithmic.

    Args:
        places: The counts, 1 or more, ascending.
        shares: Values from 0 to 1 by the name of their line, one for each count; None where there is none.
        title: What it shows, also for those who cannot see it.
        unit: What is counted.
    """
    wide, high = PLOT
    left, top = 46, 10
    first, last = math.log(places[0]), math.log(places[-1])

    def x_of(place: int) -> float:
        return left + wide * ((math.log(place) - first) / (last - first) if last > first else 0.5)

    def y_of(share: float) -> float:
        return top + high * (1 - share)

    parts = [
        f'<svg role="img" aria-label="{escape(title)}" width="{left + wide + 220}" height="{top + high + 40}" '
        'font-size="11" fill="currentColor">'
    ]
    for share in (0.0, 0.5, 1.0):
        y = y_of(share)
        parts.append(
            f'<line x1="{left}" x2="{left + wide}" y1="{y}" y2="{y}" stroke="currentColor" opacity="0.2"/>'
        )
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    for place in places:
        parts.append(
            f'<text x="{x_of(place):.1f}" y="{top + high + 16}" text-anchor="middle">{place:,}</text>'
        )
    parts.append(
        f'<text x="{left + wide / 2}" y="{top + high + 34}" text-anchor="middle">{escape(unit)}</text>'
    )
    for n, (name, values) in enumerate(shares.items()):
        colour = COLOURS[n % len(COLOURS)]
        dots = [(x_of(p), y_of(v), p, v) for p, v in zip(places, values, strict=True) if v is not None]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in dots)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for x, y, place, value in dots:
            told = escape(f"{name}, {place:,} {unit}: {value:.1%}")
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{told}</title></circle>'
            )
        y = top + 14 * (n + 1)
        parts.append(f'<rect x="{left + wide + 14}" y="{y - 8}" width="10" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{left + wide + 28}" y="{y}">{escape(name)}</text>')
    return Markup("".join([*parts, "</svg>"]))


def _shown(text: str) -> str:
    return escape_controls(text).replace(" ", "␣") if text != text.strip() else escape_controls(text)
