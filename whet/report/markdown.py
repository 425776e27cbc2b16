"""The report of a run folder: report.md with curves, tables and completions, from the files that it left.

Nothing in a run folder is trusted to be markdown: values are escaped in tables, and fenced in blocks that
they cannot close.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whet.report.plots import Series, draw_figures
from whet.telemetry.display import escape_controls
from whet.telemetry.health import find_warnings
from whet.telemetry.log import (
    as_number,
    clean_metrics,
    leads_out,
    parse_row,
    read_metrics,
    read_rows,
    replace_file,
)
from whet.telemetry.metrics import METRICS, find_metric, format_metric

MAX_WARNINGS = 20
MAX_TEXT = 4000
TAIL_BYTES = 4 << 20
MAX_DEPTH = 8
"""Deeper objects of a result file are only counted."""


def write_report(run_dir: Path) -> Path:
    """Write report.md and plots/*.png into a run folder, from whatever of its files is there.

    Reads metrics.jsonl, samples.jsonl, summary.json, eval.json, config.yaml and environment.json. In the two
    result files an object with `mean`, `low` and `high` is an estimate with its interval; other objects are
    nested groups.

    Args:
        run_dir: Folder of a fine-tuning run, a reinforcement-learning run or an evaluation.

    Returns:
        Path of report.md.

    Raises:
        ValueError: If there is no such folder.
    """
    if not run_dir.is_dir():
        raise ValueError(f"no run folder at '{run_dir}'")
    rows = [row for row in map(clean_metrics, read_metrics(run_dir)) if row is not None]
    series = _series(rows)
    sections = [
        f"# {_cell(run_dir.resolve().name)}\n\n{_outline(rows)}",
        _result_section("Headline numbers", run_dir / "summary.json"),
        _result_section("Evaluation", run_dir / "eval.json"),
        _health_section(rows),
        _curve_section(series, run_dir / "plots"),
        _metric_section(series),
        _sample_section(run_dir / "samples.jsonl"),
        _file_section("Configuration", run_dir / "config.yaml"),
        _file_section("Environment", run_dir / "environment.json"),
    ]
    path = run_dir / "report.md"
    replace_file(path, "\n\n".join(section for section in sections if section) + "\n")
    return path


def _series(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Turn rows into curves; of a step logged twice the later row counts; unknown names are left out."""
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if "/" in name:
                points.setdefault(name, {})[row["step"]] = math.nan if value is None else value
    curves: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, by_step in points.items():
        try:
            find_metric(name)
        except ValueError:  # a folder written by another version
            continue
        steps = sorted(by_step)
        curves[name] = (np.array(steps), np.array([by_step[step] for step in steps]))
    return curves


def _outline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say in one line what the folder holds."""
    if not rows:
        return "No metrics were logged."
    stages = ", ".join(dict.fromkeys(row["stage"] for row in rows))
    times = [row["time_s"] for row in rows if row["time_s"] is not None]
    minutes = (max(times) - min(times)) / 60 if times else 0.0
    last = max(row["step"] for row in rows)
    return f"Stages: {_cell(stages)} · last step {last:,} · {minutes:.1f} minutes from first to last row"


def _result_section(title: str, path: Path) -> str:
    """Return the numbers of a result file as a table."""
    if not path.is_file():
        return ""
    rows = _flat(_read_json(path), ())
    return f"## {title}\n\n" + _table(("", "value"), rows) if rows else ""


def _flat(value: Any, keys: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (name, text) of every leaf; an estimate is one leaf, long lists are only counted."""
    if isinstance(value, dict) and len(keys) < MAX_DEPTH:
        if {"mean", "low", "high"} <= value.keys():
            mean, low, high = (_number(keys, value[end]) for end in ("mean", "low", "high"))
            return [(" / ".join(keys), f"{mean} ({low} to {high})")]
        return [row for key, inner in value.items() for row in _flat(inner, (*keys, str(key)))]
    if isinstance(value, dict) or (
        isinstance(value, list) and (len(value) > 8 or any(isinstance(item, (dict, list)) for item in value))
    ):
        return [(" / ".join(keys), f"{len(value):,} entries")]
    text = (
        ", ".join(_number(keys, item) for item in value) if isinstance(value, list) else _number(keys, value)
    )
    return [(" / ".join(keys), text)]


def _number(keys: Sequence[str], value: Any) -> str:
    """Write a leaf the way its metric asks for, found by the innermost key that names one."""
    if as_number(value) is None:
        return "–" if value is None or isinstance(value, (int, float, dict, list)) else str(value)
    for key in reversed(keys):
        name = key if key in METRICS else f"eval/{key}"
        if name in METRICS or key.startswith(("pass@", "maj@", "best@")):
            return format_metric(name, value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _health_section(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the warnings that the run's rows give rise to."""
    found: list[str] = []
    for stage in ("sft", "rl"):
        own = [row for row in rows if row["stage"] == stage]
        found += [
            f"- step {own[index]['step']:,}: {_cell(text)}" for index, text in find_warnings(stage, own)
        ]
    if len(found) > MAX_WARNINGS:
        found[MAX_WARNINGS:] = [f"- and {len(found) - MAX_WARNINGS} more"]
    return "## Warnings\n\n" + "\n".join(found) if found else ""


def _curve_section(series: Series, folder: Path) -> str:
    """Draw the figures that have data and return the section that shows them."""
    figures = draw_figures(series, folder)
    if not figures:
        return ""
    note = "Points are logged values; lines are centred rolling means over a fifteenth of the run."
    images = [f"![{figure.replace('_', ' ')}](plots/{figure}.png)" for figure in figures]
    return "\n\n".join(["## Curves", note, *images])


def _metric_section(series: Series) -> str:
    """Return the table of all metrics: means at its start and end, extremes, meaning."""
    rows: list[tuple[str, ...]] = []
    order = {name: index for index, name in enumerate(METRICS)}
    for name in sorted(series, key=lambda name: (order.get(name, len(order)), name)):
        values = series[name][1][np.isfinite(series[name][1])]
        few = max(1, min(10, len(values) // 10))
        numbers = (
            (values[:few].mean(), values[-few:].mean(), values.min(), values.max())
            if len(values)
            else (math.nan,) * 4
        )
        metric = find_metric(name)
        unit = "" if metric.unit in ("1", "share") else metric.unit
        rows.append((name, *(format_metric(name, float(number)) for number in numbers), unit, metric.meaning))
    if not rows:
        return ""
    head = ("metric", "start", "end", "min", "max", "unit", "meaning")
    return (
        "## Metrics\n\nStart and end are means of the first and last tenth of the rows, ten rows at most.\n\n"
        + _table(head, rows, "lrrrrll")
    )


def _sample_section(path: Path) -> str:
    """Return the best and the worst completion of the first and of the last logged step."""
    if not path.is_file():
        return ""
    first: list[dict[str, Any]] = []
    for row in read_rows(path):
        if first and row.get("step") != first[0].get("step"):
            break
        first.append(row)
    tail = _tail_rows(path)
    last = [row for row in tail if row.get("step") == tail[-1].get("step")]
    steps = [first, last] if first and last and first[0].get("step") != last[0].get("step") else [first]
    chosen: list[dict[str, Any]] = []
    for rows in steps:
        scores = [as_number(row.get("reward")) for row in rows]
        order = np.argsort([math.inf if score is None else -score for score in scores], kind="stable")
        ranked = [rows[index] for index in order]
        chosen += [ranked[0], ranked[-1]] if len(ranked) > 1 else ranked
    return "## Completions\n\n" + "\n\n".join(_sample(row) for row in chosen) if chosen else ""


def _tail_rows(path: Path) -> list[dict[str, Any]]:
    """Return the last rows of a JSON-lines file that may be large."""
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - TAIL_BYTES)
        file.seek(start)
        lines = file.read().split(b"\n")[1 if start else 0 :]
    return [row for line in lines if (row := parse_row(line)) is not None]


def _sample(row: Mapping[str, Any]) -> str:
    """Write one rollout."""
    rewards, total = row.get("rewards"), as_number(row.get("reward"))
    scores = ", ".join(
        f"{name} {'–' if (score := as_number(value)) is None else f'{score:g}'}"
        for name, value in (rewards.items() if isinstance(rewards, dict) else ())
    )
    reward = "unscorable" if total is None else f"reward {total:.3g}"
    facts = f"{row.get('num_completion_tokens', 0)} tokens, finish {row.get('finish_reason')}" + (
        f", {scores}" if scores else ""
    )
    return (
        f"### Step {_cell(str(row.get('step')))}: {reward}\n\n"
        f"Problem {_cell(str(row.get('uid')))}, sample {_cell(str(row.get('index')))}: {_cell(facts)}\n\n"
        f"Prompt\n\n{_fence(str(row.get('prompt')))}\n\nGold answer\n\n{_fence(str(row.get('answer')))}\n\n"
        f"Completion\n\n{_fence(str(row.get('completion')))}"
    )


def _file_section(title: str, path: Path) -> str:
    """Return a text file as a folded block."""
    if not path.is_file() or leads_out(path):
        return ""
    text = _fence(path.read_text(encoding="utf-8", errors="replace"), path.suffix[1:])
    return f"## {title}\n\n<details><summary>{path.name}</summary>\n\n{text}\n\n</details>"


def _read_json(path: Path) -> Any:
    """Read a result file; an unreadable one says so in the report."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        return {"unreadable": str(error)}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "lr") -> str:
    """Write a markdown table; cells are escaped."""
    rule = "".join("|---" if side == "l" else "|--:" for side in align) + "|"
    return "\n".join(
        [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)]
    )


def _cell(text: str) -> str:
    """Write text as literal inline markdown."""
    return re.sub(r"([\\`*\[\]<>|$&])", r"\\\1", escape_controls(" ".join(text.split())))


def _fence(text: str, language: str = "text") -> str:
    """Write text as a code block that it cannot close."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}\n… {len(text) - MAX_TEXT:,} more characters"
    longest = max(map(len, re.findall("`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}{language}\n{escape_controls(text).rstrip()}\n{ticks}"
