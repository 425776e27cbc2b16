"""`whet report`: one self-contained HTML page of a run folder, whatever state the folder is in, and its report.md."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
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
from whet.report.part import Part, differences, find_parts, read_part, view
from whet.report.samples import choose, embed, find_tags, histograms
from whet.report.stages import overview
from whet.telemetry.log import replace_file
from whet.telemetry.provenance import no_run
from whet.types import UserError

SCRIPTS = ("uplot.js", "charts.js", "browser.js", "report.js")
STYLES = ("uplot.css", "charts.css", "browser.css", "bars.css", "report.css")
MAX_PARTS = 16
CHAPTERS = "chapters.json"
"""What stands on the page of a folder between its stages and its runs."""
OPEN_FIRST = ("rl", "dpo", "rft", "sft")
"""Kinds of runs of which the page of several opens one: where learning is seen."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """One HTML page of a run: curves, findings, its completions, differences to another run."""

    run: tuple[str, ...] = ()
    """Run folder, evaluation folder, or a folder of runs such as the demo's; the curves of any further runs are drawn
    beside those of the first, and the configs are compared."""
    out: str = ""
    """The page; empty: report.html in the (first) folder."""
    max_samples: int = 20000
    """Most completions in the page, about; of more, whole groups are taken evenly over the steps."""

    def __post_init__(self) -> None:
        if self.max_samples < 0:
            raise ValueError(f"max_samples = {self.max_samples}: expected 0 (none) or more")
        if self.out and Path(self.out).suffix not in (".html", ".htm"):
            raise ValueError(f"out = '{self.out}': expected the name of an .html file")


def main(config: ReportConfig) -> None:
    """Write the page, and report.md where the folder is one run; say where they are."""
    first, *further = config.run or ("",)
    folder = _folder(first)
    names = _parts(folder)
    if further and names != ["."]:
        raise UserError(
            f"several runs: '{folder}' holds {len(names)} itself; give one of them, such as '{folder / names[0]}'"
        )
    out = Path(config.out) if config.out else folder / "report.html"
    if out.is_dir():
        raise UserError(f"--out '{out}': is a folder, expected a new file, as in --out {out / 'report.html'}")
    if out.parent.exists() and not out.parent.is_dir():
        raise UserError(f"--out '{out}': '{out.parent}' is a file, expected a folder")
    others = _others(further, folder)
    parts = _read(folder, names)
    print(write_page(folder, out, others, config.max_samples, parts))
    if names == ["."]:  # a folder of runs has a report.md of its own making
        print(_write_markdown(folder, parts[0]))


def write_page(
    folder: Path,
    out: Path,
    others: Sequence[Part] = (),
    max_samples: int = 20000,
    parts: Sequence[Part] = (),
) -> str:
    """Write the page of a folder and return one line that says where it is and what is in it; see `build_page`."""
    started = time.monotonic()
    parts = parts or _read(folder, _parts(folder))
    page, num_shown = build_page(folder, parts, others, max_samples)
    _write(out, page)
    num_samples = sum(len(part.scan) for part in parts if part.scan is not None)
    return (
        f"{out}: {len(page) / 2**20:.1f} MiB, {num_shown:,} of {num_samples:,} completions, "
        f"{time.monotonic() - started:.1f} s; open it in a browser"
    )


def build_page(
    folder: Path, parts: Sequence[Part], others: Sequence[Part], max_samples: int
) -> tuple[str, int]:
    """Make the page.

    Args:
        folder: The folder that was asked for; it names the page.
        parts: What it holds, read.
        others: The runs to compare with.
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
        for other in others if shown else ():
            shown = overlay(shown, figures_of(other.curves), other.name)
        info: dict[str, Any] | None = None
        if part.scan is not None and len(part.scan):
            chosen = choose(part.scan, max_samples // len(parts)) if max_samples else np.zeros(0, np.int64)
            packed = embed(part.scan, chosen, _speller(part))
            for number, chunk in enumerate(packed.pop("chunks")):
                data[f"chunk-{index}-{number}"] = chunk
            for name in ("columns", "vocabulary", "pictures"):
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
        changed = [
            (
                other.name,
                differences(part.config, other.config) + differences(part.environment, other.environment),
            )
            for other in others
        ]
        views.append(
            view(part)
            | {
                "num_figures": len(shown),
                "samples": info,
                "histograms": [] if part.scan is None else histograms(part.scan),
                "against": [other.name for other in others],
                "differences": changed,
            }
        )
    kinds = [part.kind for part in parts]
    data["start"] = next((kinds.index(kind) for kind in OPEN_FIRST if kind in kinds), 0)
    page = render(
        "report.html",
        title="/".join(folder.resolve().parts[-2:]),
        data=data,
        scripts=SCRIPTS,
        styles=STYLES,
        parts=views,
        overview=overview(parts),
        chapters=_chapters(folder),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    return page, num_shown


def _chapters(folder: Path) -> list[dict[str, Any]]:
    """Return what `whet demo --real` tells besides: title, text, head, rows, talks and note of each chapter."""
    try:
        found = json.loads((folder / CHAPTERS).read_text(encoding="utf-8"))
        return [
            {"head": [], "rows": [], "talks": [], "note": "", "text": "", **one}
            for one in found
            if isinstance(one.get("title"), str)
        ]
    except (OSError, ValueError, TypeError, AttributeError):
        return []


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


def _folder(text: str) -> Path:
    """Check that a folder was named."""
    if not text:
        raise UserError("RUN is missing: give a run folder, as in 'whet report runs/rl'")
    folder = Path(text)
    if folder.is_file():
        raise UserError(f"RUN '{text}' is a file, expected the run folder that it lies in: '{folder.parent}'")
    if not folder.is_dir():
        raise no_run(text)
    return folder


def _parts(folder: Path) -> list[str]:
    names = find_parts(folder)
    if not names:
        raise UserError(
            f"'{folder}' holds no run: expected metrics.jsonl, samples.jsonl or eval.json in it or in its subfolders"
        )
    return names


def _read(folder: Path, names: Sequence[str]) -> list[Part]:
    """Read the runs of a folder, the first of very many."""
    parts = [read_part(folder / name, name) for name in names[:MAX_PARTS]]
    if len(names) > MAX_PARTS:
        parts[0].missing.append(
            f"of {len(names)} runs the first {MAX_PARTS} are shown: give one of the others"
        )
    return parts


def _others(texts: Sequence[str], folder: Path) -> list[Part]:
    """Read the runs to compare with; each is called by as much of its path as tells it apart."""
    found: dict[Path, str] = {}
    for text in texts:
        place = _folder(text).resolve()
        if place in (folder.resolve(), *found):
            raise UserError(f"RUN '{text}' is given twice: give other run folders after the first")
        names = _parts(Path(text))
        if names != ["."]:
            raise UserError(
                f"RUN '{text}' holds {len(names)} runs; give one of them, such as '{Path(text) / names[0]}'"
            )
        found[place] = text
    taken = [place.name for place in (folder.resolve(), *found)]
    return [
        read_part(place, place.name if taken.count(place.name) == 1 else f"{place.parent.name}/{place.name}")
        for place in found
    ]


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise UserError(
            f"--out '{path}': cannot be written ({error.strerror}); choose another --out"
        ) from None


def _write_markdown(folder: Path, part: Part) -> str:
    """Write report.md; the page is there whatever becomes of it."""
    try:
        return f"{write_report(folder, part)}: the same in Markdown, with plots"
    except (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        return f"report.md was not written: {error}"


PROGRAM = Program(config_class=ReportConfig, main=main, positional="run")
