"""`whet report`: one self-contained HTML page of a run folder, whatever state the folder is in, and its report.md."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from whet.cli import Program
from whet.model.text.tokenizer import Tokenizer
from whet.report.curves import figures_of, overlay
from whet.report.markdown import write_report
from whet.report.page import render
from whet.report.part import KINDS, MAX_FILE_BYTES, Part, differences, facts, find_parts, read_part
from whet.report.samples import choose, embed, find_tags, histograms
from whet.stats import Interval, bootstrap_interval, wilson_interval
from whet.telemetry.log import as_number, leads_out, replace_file
from whet.telemetry.metrics import METRICS, find_metric, format_metric
from whet.types import UserError

SCRIPTS = ("uplot.js", "charts.js", "browser.js", "report.js")
STYLES = ("uplot.css", "charts.css", "browser.css", "report.css")
MAX_PARTS = 16
MAX_DEPTH = 8
CARDS = {
    "rl": ("rl/completion_tokens", "rl/thinking_tokens", "eval/pass@1"),
    "sft": ("sft/loss", "sft/validation_loss", "sft/grad_norm", "sft/tokens_per_second"),
    "dpo": ("dpo/loss", "dpo/validation_accuracy", "dpo/accuracy", "dpo/margin"),
    "rft": ("rft/right", "eval/greedy", "rft/covered", "rft/loss"),
}
"""Headline metrics by kind; of reinforcement learning they follow the rewards."""

EVAL_CARDS = ("pass@1", "greedy", "format", "truncated", "thinking_tokens", "completion_tokens")
SHARES = ("pass@", "consistency", "format", "eval/opportunity", "eval/vote_share")
"""Groups of an evaluation whose numbers are shares, and single shares in other groups."""

OPEN_FIRST = ("rl", "dpo", "rft", "sft")
"""Kinds of runs of which the page of several opens one: where learning is seen."""
FILES = ("config.yaml", "environment.json", "summary.json", "eval.json")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """One HTML page of a run: curves, findings, its completions, differences to another run."""

    run: str = ""
    """Run folder, evaluation folder, or a folder of runs such as the demo's."""
    out: str = ""
    """The page; empty: report.html in the folder."""
    against: str = ""
    """Another run folder: its curves are drawn beside these, and the two configs are compared."""
    max_samples: int = 20000
    """Most completions in the page, about; of more, whole groups are taken evenly over the steps."""

    def __post_init__(self) -> None:
        if self.max_samples < 0:
            raise ValueError(f"max_samples = {self.max_samples}: expected 0 (none) or more")
        if self.out and Path(self.out).suffix not in (".html", ".htm"):
            raise ValueError(f"out = '{self.out}': expected the name of an .html file")


def main(config: ReportConfig) -> None:
    """Write the page, and report.md where the folder is one run; say where they are."""
    folder = _folder(config.run, "RUN")
    names = _parts(folder)
    if config.against and names != ["."]:
        raise UserError(
            f"--against compares single runs, and '{folder}' holds {len(names)}; give '{folder / names[0]}'"
        )
    out = Path(config.out) if config.out else folder / "report.html"
    if not out.parent.is_dir() or out.is_dir():
        raise UserError(f"--out '{out}': expected a new file in a folder that exists")
    other = _other(config.against, folder) if config.against else None
    print(write_page(folder, out, other, config.max_samples))
    if names == ["."]:  # a folder of runs has a report.md of its own making
        print(_write_markdown(folder))


def write_page(folder: Path, out: Path, other: Part | None = None, max_samples: int = 20000) -> str:
    """Write the page of a folder and return one line that says where it is and what is in it; see `build_page`."""
    started = time.monotonic()
    names = _parts(folder)
    parts = [read_part(folder / name, name) for name in names[:MAX_PARTS]]
    if len(names) > MAX_PARTS:
        parts[0].missing.append(
            f"of {len(names)} runs the first {MAX_PARTS} are shown: give one of the others"
        )
    page, num_shown = build_page(folder, parts, other, max_samples)
    _write(out, page)
    num_samples = sum(len(part.scan) for part in parts if part.scan is not None)
    return (
        f"{out}: {len(page) / 2**20:.1f} MiB, {num_shown:,} of {num_samples:,} completions, "
        f"{time.monotonic() - started:.1f} s; open it in a browser"
    )


def build_page(folder: Path, parts: Sequence[Part], other: Part | None, max_samples: int) -> tuple[str, int]:
    """Make the page.

    Args:
        folder: The folder that was asked for; it names the page.
        parts: What it holds, read.
        other: The run to compare with.
        max_samples: Most completions in the page, about.

    Returns:
        The HTML, and how many completions are in it.
    """
    data: dict[str, Any] = {}
    num_shown = 0
    views: list[dict[str, Any]] = []
    for index, part in enumerate(parts):
        shown = (
            figures_of(part.curves) if part.kind != "eval" else []
        )  # one point each: the numbers say it all
        if other is not None and shown:
            shown = overlay(shown, figures_of(other.curves), other.name)
        info: dict[str, Any] | None = None
        if part.scan is not None and len(part.scan):
            chosen = choose(part.scan, max_samples // len(parts)) if max_samples else np.zeros(0, np.int64)
            packed = embed(part.scan, chosen, _speller(part))
            for number, chunk in enumerate(packed.pop("chunks")):
                data[f"chunk-{index}-{number}"] = chunk
            for name in ("columns", "vocabulary"):
                data[f"{name}-{index}"] = packed.pop(name)
            steps = part.scan.steps
            info = packed | {
                "num_samples": len(part.scan),
                "num_indexed": len(chosen),
                "steps": [int(steps[steps >= 0].min()), int(steps.max())] if steps.max() >= 0 else None,
                "tags": find_tags(part.folder),
            }
            num_shown += len(chosen)
        data[f"part-{index}"] = {"figures": shown, "samples": info}
        views.append(_view(part, other, num_figures=len(shown), info=info))
    kinds = [part.kind for part in parts]
    data["start"] = next((kinds.index(kind) for kind in OPEN_FIRST if kind in kinds), 0)
    page = render(
        "report.html",
        title="/".join(folder.resolve().parts[-2:]),
        data=data,
        scripts=SCRIPTS,
        styles=STYLES,
        parts=views,
        evaluations=_cross_table(parts),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    return page, num_shown


def _view(
    part: Part, other: Part | None, *, num_figures: int, info: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return what the template shows of a part."""
    cards = _cards(part)
    text, tone = _verdict(part, cards)
    return {
        "name": part.name,
        "kind": KINDS.get(part.kind, "Run"),
        "verdict": text,
        "tone": tone,
        "facts": facts(part),
        "missing": part.missing,
        "cards": cards,
        "estimates": [] if part.kind != "eval" else list(_estimates(part.evaluation)),
        "findings": [f"step {step:,}: {text}" for step, text in part.findings],
        "num_figures": num_figures,
        "samples": info,
        "histograms": [] if part.scan is None else histograms(part.scan),
        "against": None if other is None else other.name,
        "differences": []
        if other is None
        else differences(part.config, other.config) + differences(part.environment, other.environment),
        "files": [(name, text) for name in FILES if (text := _read_text(part.folder / name))],
    }


def _verdict(part: Part, cards: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """Say in a line how it stands: state, the first numbers, warnings; and the tone of it."""
    planned = part.config.get("num_steps")
    of = f" of {planned:,}" if isinstance(planned, int) and planned != part.last_step else ""
    state = {
        "finished": "Finished." if part.kind == "eval" else f"Finished after {part.last_step:,}{of} steps.",
        "running": f"Still running: step {part.last_step:,}{of}.",
        "stopped": f"Stopped at step {part.last_step:,}{of} without a summary: killed, or interrupted.",
    }[part.state]
    told = [f"{card['label'].capitalize()} {card['value']}{card['began']}." for card in cards[:2]]
    count = len(part.findings)
    if part.kind in ("rl", "sft"):
        told.append(f"{count} warning{'s' * (count != 1)}." if count else "No warning.")
    remark = part.evaluation.get("remark")
    told += [remark[0].upper() + remark[1:]] if isinstance(remark, str) and remark else []
    tone = "bad" if part.state == "stopped" else "warn" if count or remark else "good"
    return " ".join([state, *told]), tone


def _cards(part: Part) -> list[dict[str, str]]:
    """Return the headline numbers: {label, value, note, began}; with intervals where they are estimates."""
    cards: list[dict[str, str]] = []
    if part.kind == "eval":
        metrics = part.evaluation.get("metrics")
        estimates = {
            name: row for group, name, *row in _estimates({"metrics": metrics}) if group == "metrics"
        }
        wide = [f"{kind}@{part.evaluation.get('num_samples')}" for kind in ("pass", "maj", "best")]
        for name in dict.fromkeys((*EVAL_CARDS[:2], *wide, *EVAL_CARDS[2:])):
            if name in estimates:
                mean, low, high = estimates[name][:3]
                label = name.replace("_", " ")
                cards.append({"label": label, "value": mean, "note": f"{low} to {high}", "began": ""})
    elif part.scan is not None and len(part.scan) and part.scan.steps.max() > 0:
        names = ["correct", "", *part.scan.reward_names]
        for name in dict.fromkeys(name for name in names if name in part.scan.scores):
            card = _reward_card(part, name)
            cards += [card] if card else []
    for name in CARDS.get(part.kind, ()):
        if name in part.curves:
            values = part.curves[name][1]
            values = values[np.isfinite(values)]
            few = max(1, min(10, len(values) // 10))
            if len(values):
                first, last = (_value(name, float(piece.mean())) for piece in (values[:few], values[-few:]))
                unit = find_metric(name).unit
                label = name.partition("/")[2].replace("_", " ")
                note = "" if unit in ("1", "share") else unit
                began = f", from {first}" if len(values) > 1 else ""
                cards.append({"label": label, "value": last, "note": note, "began": began})
    return cards


def _reward_card(part: Part, name: str) -> dict[str, str] | None:
    """Return the mean of a reward over the last tenth of the steps, with its interval over groups."""
    found = part.scan
    assert found is not None
    steps = np.unique(found.steps)
    few = max(1, len(steps) // 10)
    ends: list[Interval] = []
    for chosen in (steps[:few], steps[-few:]):
        keep = np.isin(found.steps, chosen) & np.isfinite(found.scores[name])
        groups = np.unique(found.groups[keep], return_inverse=True)[1]
        if not len(groups):
            return None
        values = np.bincount(groups, found.scores[name][keep]) / np.bincount(groups)
        certain = bool(np.isin(values, (0.0, 1.0)).all())
        ends.append(
            wilson_interval(int(values.sum()), len(values)) if certain else bootstrap_interval(values)
        )
    first, last = ends
    show = (lambda value: f"{value:.1%}") if name == "correct" else (lambda value: f"{value:.4g}")
    return {
        "label": name or "total reward",
        "value": show(last.mean),
        "note": f"{show(last.low)} to {show(last.high)}"
        if last.low < last.high
        else "the same in all groups",
        "began": f", from {show(first.mean)}",
    }


def _estimates(content: Mapping[str, Any], group: str = "") -> Sequence[tuple[str, str, str, str, str]]:
    """Return (group, name, mean, low, high) of every estimate in nested results."""
    rows: list[tuple[str, str, str, str, str]] = []
    for key, inner in content.items():
        name = str(key) or "–"
        if not isinstance(inner, dict):
            continue
        numbers = [as_number(inner.get(end)) for end in ("mean", "low", "high")]
        if all(number is not None for number in numbers):
            shown = [_value(f"eval/{name}", number, group) for number in numbers if number is not None]
            rows.append((group, name, shown[0], shown[1], shown[2]))
        elif group.count(" · ") < MAX_DEPTH:
            rows += _estimates(inner, f"{group} · {name}" if group else name)
    return rows


def _cross_table(parts: Sequence[Part]) -> dict[str, Any] | None:
    """Return the evaluations of a folder side by side: metrics that all of them have."""
    tables = [
        (
            str(part.evaluation.get("label") or part.name),
            {row[1]: row[2:] for row in _estimates(part.evaluation)},
        )
        for part in parts
        if part.kind == "eval" and part.evaluation
    ]
    if len(tables) < 2:
        return None
    names = [name for name in tables[0][1] if all(name in table for _, table in tables)]
    return {"names": names, "rows": [(label, [table[name] for name in names]) for label, table in tables]}


def _value(name: str, value: float, group: str = "metrics") -> str:
    """Write a value the way its metric asks for."""
    is_share = group == "metrics" and find_metric(name).unit == "share"
    if name in METRICS or is_share or group.startswith(SHARES) or name in SHARES:
        return format_metric(name, value)
    return f"{value:,.4g}"


def _speller(part: Part) -> Callable[[int], str] | None:
    """Return what spells a token of the run's model; None where no tokenizer is at hand."""
    model = part.evaluation.get("model")
    init = model.get("init") if isinstance(model, dict) else None
    for folder in (part.folder, *([Path(init)] if isinstance(init, str) and os.path.isdir(init) else [])):
        for path in (
            folder / "tokenizer.json",
            *sorted(folder.glob("checkpoints/*/tokenizer.json"), reverse=True),
        ):
            if path.is_file():
                try:
                    return cache(Tokenizer.load(path.parent).token_text)
                except (UserError, OSError, ValueError):
                    part.missing.append(
                        f"the tokenizer in {path.parent} cannot be read: no token probabilities"
                    )
                    return None
    return None


def _folder(text: str, what: str) -> Path:
    """Check that a folder was named."""
    if not text:
        raise UserError(f"{what} is missing: give a run folder, as in 'whet report runs/rl'")
    folder = Path(text)
    if folder.is_file():
        raise UserError(
            f"{what} '{text}' is a file, expected the run folder that it lies in: '{folder.parent}'"
        )
    if not folder.is_dir():
        raise UserError(f"{what} '{text}': there is no such folder")
    return folder


def _parts(folder: Path) -> list[str]:
    names = find_parts(folder)
    if not names:
        raise UserError(
            f"'{folder}' holds no run: expected metrics.jsonl, samples.jsonl or eval.json in it or in its subfolders"
        )
    return names


def _other(text: str, folder: Path) -> Part:
    """Read the run to compare with."""
    other = _folder(text, "--against")
    if other.resolve() == folder.resolve():
        raise UserError(f"--against '{text}' is the run itself: give another run folder")
    names = _parts(other)
    if names != ["."]:
        raise UserError(
            f"--against '{text}' holds {len(names)} runs; give one of them, such as '{other / names[0]}'"
        )
    own, name = folder.resolve().name, other.resolve().name
    return read_part(other, name if name != own else f"{other.resolve().parent.name}/{name}")


def _read_text(path: Path) -> str:
    if not path.is_file() or leads_out(path):
        return ""
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES).decode("utf-8", "replace")


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text)
    except OSError as error:
        raise UserError(
            f"--out '{path}': cannot be written ({error.strerror}); choose another --out"
        ) from None


def _write_markdown(folder: Path) -> str:
    """Write report.md; the page is there whatever becomes of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the page says which lines are damaged
            return f"{write_report(folder)}: the same in Markdown, with plots"
    except (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        return f"report.md was not written: {error}"


PROGRAM = Program(config_class=ReportConfig, main=main, positional="run")
