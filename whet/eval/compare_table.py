"""A comparison as tables in the terminal. Whatever a model or a file name says is text, never markup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet.eval.compare_page import HARDWARE_NOTE, number
from whet.telemetry.display import escape_controls

SPOKEN = ("pass@1", "greedy", "maj", "format", "thinking_tokens")
"""Metrics whose verdict is said in a sentence."""
TOLD = ("speed", "energy per token", "energy per request", "power", "memory activity")
"""Hardware quantities whose difference is said in a sentence."""
SHOWN_TEXT = 600


def print_comparison(content: Mapping[str, Any], transcripts: Sequence[Mapping[str, Any]]) -> None:
    """Print a comparison.

    Args:
        content: What compare.json holds.
        transcripts: Of `whet.eval.compare_page.side_by_side`; the first is shown where there are no scores.
    """
    console = Console()
    names = [model["name"] for model in content["models"]]
    for model in content["models"]:
        left = f"; {model['left_out']} of its problems are not in all, left out" if model["left_out"] else ""
        remark = f"; {model['remark']}" if model["remark"] else ""
        _say(console, f"{model['name']}: {model['folder']}, {model['num_problems']} problems{left}{remark}")
    for note in content["different"]:
        console.print(_text(f"NOT ALIKE, compared by --force: {note}"), style="bold red")
    for table, counts in zip(content["tables"], content.get("verdicts", ()), strict=True):
        _significance(console, names[0], table, content)
        _say(console, "greedy: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    if content.get("matrix"):
        cells = [[_cell(cell) for cell in row] for row in content["matrix"]]
        rows = [[name, *row] for name, row in zip(names, cells, strict=True)]
        _table(console, "pass@1, row minus column, points (p, Holm over all pairs)", ["", *names], rows)
    _print_hardware(console, names, content["hardware"])
    if not content["tables"]:
        _print_transcript(console, names, transcripts)


def _significance(console: Console, first: str, table: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    rows = []
    for row in table["rows"]:
        text = row["text"]
        name = row["metric"].removesuffix("_tokens").replace("_", " ")
        star = " *" if row["is_shown"] else ""
        rows.append(
            [
                name,
                text["a"],
                text["b"],
                f"{text['difference']}{star}",
                text["interval"],
                text["p"],
                text["detectable"] or "-",
            ]
        )
    corrected = ", corrected for several models (Holm)" if len(content["tables"]) > 1 else ""
    title = (
        f"{len(content['uids'])} problems that all have x {content['num_samples']} samples; shares in percent, "
        f"differences in points, lengths in tokens; 95 % intervals over problems; * p < 0.05{corrected}"
    )
    head = ["", first, table["name"], "difference", "95 %", "p", "unseen\nbelow"]
    _table(console, title, head, rows)
    for row in table["rows"]:
        if row["metric"].partition("@")[0] in SPOKEN or row["metric"] in SPOKEN:
            _say(console, f"  {row['metric'].replace('_', ' ')}: {row['verdict']}")


def _print_hardware(console: Console, names: Sequence[str], table: Sequence[Mapping[str, Any]]) -> None:
    if not table:
        _say(console, "hardware: not recorded")
        return
    rows = []
    seen = [row for row in table if any(value is not None for value in row["values"])]
    for row in seen:
        values = ["not recorded" if value is None else number(value) for value in row["values"]]
        rows.append([f"{row['name']}, {row['unit']}", *values])
    _table(console, "hardware, each over the window in which it generated", ["", *names], rows)
    if len(seen) < len(table):
        _say(console, "not recorded: " + ", ".join(row["name"] for row in table if row not in seen))
    for row in table:
        for name, text in zip(names[1:], row["changes"], strict=True):
            if text and "%" in text and row["name"] in TOLD:
                _say(console, f"  {row['name']}, {name} against {names[0]}: {text}")
    _say(console, HARDWARE_NOTE, style="dim")


def _print_transcript(
    console: Console, names: Sequence[str], transcripts: Sequence[Mapping[str, Any]]
) -> None:
    for problem in transcripts[:3]:
        console.print(_text(problem["prompt"][:SHOWN_TEXT]), style="bold")
        for name, column in zip(names, problem["columns"], strict=True):
            row = column["rows"][0]
            text = row.get("text") or f"{row.get('thinking', '')}\n-> {row['answer']}"
            facts = f"{row['format']}, {row['tokens']} tokens"
            console.print(_text(f"{name} ({facts}): {text[:SHOWN_TEXT]}"))


def _cell(cell: Mapping[str, Any] | None) -> str:
    return "" if cell is None else f"{cell['text']} ({cell['p']})"


def _table(console: Console, title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="", pad_edge=False)
    for place, name in enumerate(head):
        table.add_column(
            _text(name), justify="right" if place else "left", overflow="fold", no_wrap=place > 0
        )
    for row in rows:
        table.add_row(*map(_text, row))
    console.print(table)


def _say(console: Console, text: str, *, style: str = "") -> None:
    console.print(_text(text), style=style, soft_wrap=False)


def _text(text: str) -> Text:
    return Text(escape_controls(text))
