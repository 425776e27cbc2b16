"""report.md: what report.html says, as plain text with PNG curves, for a terminal, a repository or another program.

Nothing in a run folder is trusted to be markdown: values are escaped in tables, and fenced in blocks that
they cannot close.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whet.config import counted
from whet.report.curves import declared
from whet.report.part import Part, read_part, view
from whet.report.plots import Series, draw_figures
from whet.report.samples import Scan, read_samples
from whet.telemetry.display import escape_controls, one_line
from whet.telemetry.log import replace_file
from whet.telemetry.metrics import METRICS, find_metric, format_metric

MAX_WARNINGS = 20
MAX_TEXT, MAX_FILE = 4000, 20_000
"""Characters of a prompt or completion, and of a file."""


def write_report(folder: Path, part: Part | None = None) -> Path:
    """Write report.md and plots/*.png into a run folder, from whatever of its files is there.

    Args:
        folder: Folder of a training run or an evaluation.
        part: The same folder, where it has been read already.

    Returns:
        Path of report.md.

    Raises:
        ValueError: If there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"no run folder at '{folder}'")
    part = part or read_part(folder, ".")
    said = view(part)
    curves = {name: curve for name, curve in part.curves.items() if declared(name) is not None}
    sections = [
        f"# {_cell(folder.resolve().name)}\n\n{_cell(said['verdict'])}",
        _table(("", ""), said["facts"], "ll"),
        f"Missing or damaged: {_cell('; '.join(part.missing))}." if part.missing else "",
        _card_section(said["cards"]),
        _table(("group", "measure", "mean", "low", "high"), said["estimates"], "llrrr"),
        _warning_section(said["findings"]),
        _curve_section(curves, folder / "plots"),
        _metric_section(curves),
        "" if part.scan is None else _sample_section(part.scan),
        *(
            f"<details><summary>{name}</summary>\n\n{_fence(text, name.rpartition('.')[2], MAX_FILE)}\n\n</details>"
            for name, text in said["files"]
        ),
    ]
    path = folder / "report.md"
    replace_file(path, "\n\n".join(section for section in sections if section) + "\n")
    return path


def _card_section(cards: Sequence[Mapping[str, str]]) -> str:
    rows = [(card["label"], card["value"], card["note"], card["began"].lstrip(", ")) for card in cards]
    return "## In numbers\n\n" + _table(("", "value", "", ""), rows, "lrll") if rows else ""


def _warning_section(findings: Sequence[str]) -> str:
    lines = [f"- {_cell(text)}" for text in findings[:MAX_WARNINGS]]
    if len(findings) > MAX_WARNINGS:
        lines.append(f"- and {len(findings) - MAX_WARNINGS} more")
    return "## Warnings\n\n" + "\n".join(lines) if lines else ""


def _curve_section(curves: Series, folder: Path) -> str:
    """Draw the figures that have data and return the section that shows them."""
    try:
        figures = draw_figures(curves, folder)
    except OSError as error:  # the numbers are there without them
        reason = error.strerror or str(error).partition("\n")[0]
        print(f"whet: warning: {folder}: no curves were drawn ({reason})", file=sys.stderr, flush=True)
        return ""
    if not figures:
        return ""
    note = "Points are logged values; lines are centred rolling means over a fifteenth of the run."
    images = [f"![{figure.replace('_', ' ')}](plots/{figure}.png)" for figure in figures]
    return "\n\n".join(["## Curves", note, *images])


def _metric_section(curves: Series) -> str:
    """Return the table of all metrics: means at its start and end, extremes, meaning."""
    rows: list[tuple[str, ...]] = []
    order = {name: index for index, name in enumerate(METRICS)}
    for name in sorted(curves, key=lambda name: (order.get(name, len(order)), name)):
        values = curves[name][1][np.isfinite(curves[name][1])]
        few = max(1, min(10, len(values) // 10))
        numbers = (math.nan,) * 4
        if len(values):
            numbers = (values[:few].mean(), values[-few:].mean(), values.min(), values.max())
        metric = find_metric(name)
        unit = "" if metric.unit in ("1", "share") else metric.unit
        rows.append((name, *(format_metric(name, float(number)) for number in numbers), unit, metric.meaning))
    if not rows:
        return ""
    head = ("metric", "start", "end", "min", "max", "unit", "meaning")
    note = "Start and end are means of the first and last tenth of the rows, ten rows at most."
    return f"## Metrics\n\n{note}\n\n" + _table(head, rows, "lrrrrll")


def _sample_section(found: Scan) -> str:
    """Return the best and the worst completion of the first and of the last logged step."""
    chosen: list[int] = []
    scores = found.scores[""]
    if not np.isfinite(scores).any():  # an evaluation: right or wrong
        scores = found.scores.get("correct", scores)
    for step in dict.fromkeys((found.steps.min(), found.steps.max())) if len(found) else ():
        rows = np.flatnonzero(found.steps == step)
        ranked = rows[np.argsort(-scores[rows], kind="stable")]  # unscorable ones come last
        chosen += dict.fromkeys((int(ranked[0]), int(ranked[-1])))
    texts = [_sample(sample) for sample in read_samples(found, np.array(chosen, np.int64))]
    return "## Completions\n\n" + "\n\n".join(texts) if texts else ""


def _sample(sample: Mapping[str, Any]) -> str:
    """Write one completion."""
    scores = [f"{name} {'–' if score is None else f'{score:g}'}" for name, score in sample["rewards"].items()]
    count = sample["num_completion_tokens"]  # of a file: None or a text, where that is damaged
    tokens = counted(count, "token") if isinstance(count, int) else f"{count} tokens"
    facts = [tokens, f"finish {sample['finish_reason']}", *scores]
    place = "" if sample["step"] is None else f"Step {sample['step']}: "
    reward = "no reward" if sample["reward"] is None else f"reward {sample['reward']:.3g}"
    return (
        f"### {place}{reward}\n\n"
        f"Problem {_cell(sample['uid'])}, sample {_cell(str(sample['index']))}: {_cell(', '.join(facts))}\n\n"
        f"Prompt\n\n{_fence(sample['prompt'])}\n\nGold answer\n\n{_fence(sample['answer'])}\n\n"
        f"Completion\n\n{_fence(sample['completion'])}"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    """Write a markdown table with escaped cells; '' without rows."""
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    rule = "".join("|---" if side == "l" else "|--:" for side in align) + "|"
    return "\n".join([f"| {' | '.join(head)} |", rule, *lines]) if lines else ""


def _cell(text: str) -> str:
    """Write text as literal inline markdown."""
    return re.sub(r"([\\`*\[\]<>|$&])", r"\\\1", one_line(text))


def _fence(text: str, language: str = "text", limit: int = MAX_TEXT) -> str:
    """Write text as a code block that it cannot close."""
    if len(text) > limit:
        text = f"{text[:limit]}\n… {len(text) - limit:,} more characters"
    longest = max(map(len, re.findall("`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}{language}\n{escape_controls(text).rstrip()}\n{ticks}"
