"""Shows results of an evaluation: plots, tables and sentences in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from whet.eval.grade import Judged
from whet.report.plots import COLOURS, MUTED, STYLE, matplotlib_for
from whet.stats import Interval

# Plots of one evaluation: pass@k over k, and the lengths of right and wrong completions.

BINS = 30
READINGS = {
    "read_strictly": "strictly, of answers in the schema's place alone: {}",
    "read_anywhere": "read anywhere in the completions: {} (--answer-from anywhere counts so)",
}
"""Names in eval.json of the other ways to read answers, and their line."""


def draw_evaluation(
    summary: Mapping[str, Any], samples: Sequence[Sequence[Judged]], folder: Path
) -> list[str]:
    """Draw the plots of an evaluation.

    Args:
        summary: Content of eval.json.
        samples: Graded samples of each problem.
        folder: Folder of the PNG files; created if missing.

    Returns:
        Names of the plots, without `.png`.
    """
    matplotlib = matplotlib_for(folder)
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    folder.mkdir(parents=True, exist_ok=True)
    drawn = ["eval_lengths"]
    with matplotlib.rc_context(cast(Any, STYLE)):
        thinks = any(done.grade.thinking_tokens != done.num_tokens for row in samples for done in row)
        quantities = ("thinking", "completion") if thinks else ("completion",)
        figure = Figure(figsize=(4 * len(quantities), 2.8), layout="constrained", facecolor="white")
        for place, quantity in enumerate(quantities):
            _histogram(figure.add_subplot(1, len(quantities), place + 1), quantity, samples)
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
    """Draw the shares of right and of wrong completions over length, each normalised separately."""
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


def print_result(
    results: Mapping[str, Mapping[str, Interval]],
    num_problems: int,
    num_samples: int,
    *,
    are_held_out: bool = True,
) -> None:
    """Print a table of results, metrics by name, one row each, with 95 % intervals over problems."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    names = [name for name in table_names(num_samples) if name in next(iter(results.values()))]
    # A plain chat does not think: without thinking tags, every token is counted as thinking.
    if all(found.get("thinking_tokens") == found.get("completion_tokens") for found in results.values()):
        names = ["completion_tokens" if name == "thinking_tokens" else name for name in names]
    title = (
        f"{num_problems} {'held-out ' * are_held_out}problem{'s' * (num_problems != 1)} x {num_samples} "
        f"sample{'s' * (num_samples != 1)}; percent, with 95 % intervals over problems"
    )
    table = Table(title=title, box=SIMPLE_HEAD, leading=1, title_justify="left")
    table.add_column("", style="bold", overflow="fold", min_width=4, max_width=16)
    for name in names:
        table.add_column(name.replace("_", "\n"), justify="right", no_wrap=True)
    for label, metrics in results.items():
        table.add_row(Text(label), *(Text(show_metric(name, metrics[name])) for name in names))
    Console().print(table)


def tell_measures(summary: Mapping[str, Any]) -> list[str]:
    """Return a line about each metric that is the task's own, with its interval."""
    lines: list[str] = []
    for name in summary.get("measures", ()):
        row = summary["metrics"][name]
        is_share = row["low"] >= 0 and row["high"] <= 1 and name not in NO_SHARES
        scale, unit = (100, " %") if is_share else (1, "")
        low, mean, high = (row[end] * scale for end in ("low", "mean", "high"))
        lines.append(f"{name.replace('_', ' ')}: {mean:.1f}{unit} ({low:.1f} to {high:.1f})")
    return lines


NO_SHARES = ("eval_rank", "centipawn_loss", "centipawn_loss_legal", "puzzle_elo")
"""Metrics of tasks that are no shares, whatever their values are."""


def table_names(num_samples: int) -> list[str]:
    """Return the metrics of the table: six, which fit into 80 columns."""
    names = ["pass@1", "greedy", f"pass@{num_samples}", f"maj@{num_samples}", "format", "thinking_tokens"]
    return list(dict.fromkeys(names))


def show_metric(name: str, interval: Interval) -> str:
    """Format a metric and, on a second line, its interval: shares in percent, lengths in tokens."""
    scale = 1.0 if name.endswith("tokens") else 100.0
    mean, low, high = (
        f"{scale * value:.1f}".replace("100.0", "100")
        for value in (interval.mean, interval.low, interval.high)
    )
    return f"{mean}\n{low}-{high}"


def intervals(summary: Mapping[str, Any]) -> dict[str, Interval]:
    """Return the metrics of an eval.json as intervals."""
    return {name: Interval(**row) for name, row in summary["metrics"].items()}


REFERENCE = {("Qwen/Qwen2.5-3B", "gsm8k"): "70.0 %", ("Qwen/Qwen2.5-3B", "math500"): "about 40 %"}
"""Greedy accuracy that one of whet's sources states for a model, by its hub name, on a task; not measured here."""


def _reference(summary: Mapping[str, Any]) -> list[str]:
    task = (summary.get("identity") or {}).get("task")
    name = task.get("name") if isinstance(task, Mapping) else task
    key = (str((summary.get("model") or {}).get("init")), str(name))
    said = REFERENCE.get(key)
    line = f"reference: {said} of {key[1]} for {key[0]}, greedy, as a source states; prompt and problems may differ"
    return [] if said is None else [line]


def describe(summary: Mapping[str, Any]) -> list[str]:
    """Describe in a few lines what the table omits: consistency, opportunity, lengths, speed, and caveats.

    Args:
        summary: Content of eval.json.
    """
    problems, count = summary["num_problems"], summary["num_samples"]
    others = {
        name: row["mean"]
        for name, row in summary["metrics"].items()
        if name not in table_names(count) and (name.startswith(("pass@", "best@")) or name == "truncated")
    }
    lines = [
        *tell_measures(summary),
        *_tell_otherwise(summary),
        ", ".join(f"{name} {100 * mean:.1f} %" for name, mean in others.items()),
    ]
    if count > 1:
        share = {name: f"{100 * row['mean']:.1f} %" for name, row in summary["consistency"].items()}
        lines += [
            f"consistency: {share['always']} of the problems always right, {share['mixed']} mixed, "
            f"{share['never']} never",
            f"opportunity: pass@{count} - pass@1 = {_points(summary['opportunity'])}; only the mixed problems give a "
            "gradient",
        ]
    lengths = [f"{name} {_length(rows)}" for name, rows in summary["lengths"].items() if rows["completion"]]
    lines.append(f"tokens of a completion: {', '.join(lengths)}")
    if summary["generation_seconds"]:
        lines.append(_speed(summary))
    effect = min(1.0, summary["minimum_detectable_effect"])
    lines.append(
        f"a difference of pass@1 below {100 * effect:.1f} points would go undetected with "
        f"{problems} problem{'s' * (problems != 1)} (two evaluations side by side, 80 % power)"
    )
    lines += _reference(summary)
    return [*lines, summary["remark"]] if summary["remark"] else lines


def _tell_otherwise(summary: Mapping[str, Any]) -> list[str]:
    """Return a line about the other way to read answers: always of the strict one, of a generous one if it differs."""
    lines = []
    for way, words in READINGS.items():
        found = summary.get(way) or {}
        if way == "read_anywhere" and all(
            row["mean"] == summary["metrics"][name]["mean"] for name, row in found.items()
        ):
            continue
        shares = (
            f"{name} {100 * row['mean']:.1f} % ({100 * row['low']:.1f} to {100 * row['high']:.1f})"
            for name, row in found.items()
        )
        lines += [words.format(", ".join(shares))] if found else []
    return lines


def _points(row: Mapping[str, float]) -> str:
    mean, low, high = (f"{100 * row[end]:.1f}" for end in ("mean", "low", "high"))
    return f"{mean} points ({low} to {high})"


def _length(rows: Mapping[str, Any]) -> str:
    whole, thinking = rows["completion"]["mean"], rows["thinking"]["mean"]
    return f"{whole:.1f}" if whole == thinking else f"{whole:.1f} (thinking {thinking:.1f})"


def _speed(summary: Mapping[str, Any]) -> str:
    tokens, seconds = summary["tokens"]["completion"], summary["generation_seconds"]
    text = f"sampling: {tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s"
    joules = (summary["hardware"] or {}).get("joules_per_token")
    return text if joules is None else f"{text}, {joules:.3g} J/token"
