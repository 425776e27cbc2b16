"""`whet runs [FOLDER]`: every run below a folder with its origin and scores, as table, JSON and page.

Only the small files of a run are read (provenance, config, environment, summary, eval.json, metrics.jsonl), never its
samples.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet.cli import Program
from whet.report.curves import collect
from whet.report.follow import HEADLINES, glance
from whet.report.page import render
from whet.telemetry.display import escape_controls, metric_label
from whet.telemetry.log import as_number, parse_row, read_rows, replace_file
from whet.telemetry.metrics import format_metric
from whet.telemetry.provenance import (
    PROVENANCE,
    PUSHES,
    find_run,
    no_run,
    parent_run,
    read_json,
    run_folders,
    run_id,
)
from whet.types import UserError

NOTES = "notes.jsonl"
PAGES = ("report.html", "compare.html", "infer.html", "diagnose.html", "sweep.html", "report.md")
"""Pages that a run's folder may hold, which the registry links."""

MAX_CURVE_BYTES = 8 << 20
"""A longer metrics.jsonl is not read for a sparkline."""

MAX_POINTS, SPARK_WIDTH = 60, 120
MAX_CONFIG_BYTES = 1 << 18
KINDS = {
    "group_size": "rl",
    "rounds": "rft",
    "beta": "dpo",
    "empty_thinking_share": "sft",
    "image_urls": "infer",  # before eval: it has that one's field, too
    "answer_from": "eval",
    "recipe": "seeds",
}
"""Field of a config that only one program has -> the program."""
TRAINED = ("sft", "rft", "dpo", "rl")
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, kw_only=True)
class RunsConfig:
    """The registry of runs: program, base model, data, code and scores of each."""

    folder: str = "runs"
    """Folder to search for runs."""
    write: bool = False
    """Write registry.json, registry.md and runs.html into the folder."""
    note: tuple[str, str] | None = None
    """Add a note to a run: its id (or a prefix of it, or its path below the folder) and the text."""


def main(config: RunsConfig) -> None:
    """Print the runs; where asked, write the registry's files.

    Raises:
        UserError: If the folder is missing, contains no run, or cannot be written.
    """
    root = Path(config.folder)
    if not root.is_dir():
        raise no_run(config.folder)
    if config.note is not None:
        add_note(root, *config.note)
    runs = read_runs(root)
    if not runs:
        raise UserError(f"{root}: no run below it (a run folder has config.yaml and environment.json)")
    results = results_table(runs)
    print_runs(runs, results)
    if not config.write:
        print("--write makes a page of them: runs.html, registry.md and registry.json in the folder")
        return
    write_registry(root, runs, results)
    print(f"registry: {root / 'registry.md'}, {root / 'registry.json'}, {root / 'runs.html'}")


def add_note(root: Path, name: str, text: str) -> Path:
    """Append a note to a run, in its own folder; return the folder."""
    if not text.strip():
        raise UserError("note: the text is empty")
    folder = find_run(root, name)
    row = {"utc": datetime.now(UTC).isoformat(timespec="seconds"), "note": text}
    try:
        with (folder / NOTES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise UserError(f"{folder / NOTES}: cannot be written ({error.strerror})") from None
    return folder


def read_runs(root: Path) -> list[dict[str, Any]]:
    """Read the runs below a folder, oldest first; those without a recorded start come before all others.

    Args:
        root: The folder.

    Returns:
        One object per run: run_id, folder (below `root`), kind, start_utc, git_commit, base, adapter, config_sha256,
        data_sha256, parent (folder and run_id), links, notes, task, split, scores, peak_memory_gib; status ('kind',
        'text'), pages (those in its folder), curve ('metric', 'points', first and last value; None without).
    """
    runs = [_read_run(root, folder) for folder in run_folders(root)]
    runs.sort(key=lambda run: (str(run["start_utc"] or ""), run["folder"]))
    by_id = {run["run_id"]: run["folder"] for run in runs}
    for run in runs:
        if run["parent"] is not None:
            run["parent"]["known"] = by_id.get(run["parent"].get("run_id"))
    return runs


def lineage(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a run's ancestors, oldest first: names of base models, then run folders."""
    by_folder = {other["folder"]: other for other in runs}
    chain: list[str] = []
    current: Mapping[str, Any] | None = run
    while current is not None and current["folder"] not in chain:
        chain.append(current["folder"])
        parent = current["parent"]
        if parent is None:
            base = current["base"]
            if base:
                chain.append(base)
            elif current["kind"] in TRAINED:
                chain.append("random weights")
            break
        current = by_folder.get(parent["known"] or "")
        if current is None:
            chain.append(parent["folder"])
    return chain[::-1]


def results_table(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collect evaluation scores in one table of models by tasks; None where nothing was measured.

    Args:
        runs: From `read_runs`.

    Returns:
        'tasks' and 'rows' (model, peak_memory_gib, cells by task). Trained models without evaluation are rows, too. The
        newest evaluation of a model on a task counts.
    """
    trained = {run["folder"]: run for run in runs if run["kind"] in TRAINED}
    rows: dict[str, dict[str, Any]] = {}
    tasks: dict[str, None] = {}
    columns = _columns(runs)
    for run in runs:
        if not run["scores"]:
            continue
        parent = (run["parent"] or {}).get("known") if run["parent"] else None
        model = parent or run["base"] or run["label"] or run["folder"]
        task = columns[run["folder"]]
        tasks[task] = None
        row = rows.setdefault(model, {"model": model, "cells": {}})
        row["cells"][task] = run["scores"] | {"run_id": run["run_id"], "folder": run["folder"]}
    for folder in trained:
        rows.setdefault(folder, {"model": folder, "cells": {}})
    order = {run["folder"]: place for place, run in enumerate(runs)}
    for model, row in rows.items():
        run = trained.get(model)
        peaks = [cell.get("peak_memory_gib") for cell in row["cells"].values()]
        row["peak_memory_gib"] = run["peak_memory_gib"] if run else next(filter(None, peaks), None)
        row["cells"] = {task: row["cells"].get(task) for task in sorted(tasks)}
    return {
        "tasks": sorted(tasks),
        "rows": sorted(rows.values(), key=lambda row: order.get(row["model"], -1)),
    }


def _columns(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the column of each run's scores: task and split, or a file's name; other rows are another column."""
    names, hashes = dict[str, str](), dict[str, set[str]]()
    for run in runs:
        name = Path(run["path"]).name if run["path"] else run["task"]
        names[run["folder"]] = name = f"{name}/{run['split']}" if run["split"] else name
        if run["scores"]:
            hashes.setdefault(name, set()).add(run["problems_sha256"])
    # Of a task with a name other problems are others of the same; of one's own file, another file or an edited one.
    own = {run["folder"]: run["problems_sha256"][:6] for run in runs if run["path"]}
    return {
        folder: f"{name} #{own[folder]}" if len(hashes.get(name, ())) > 1 and own.get(folder) else name
        for folder, name in names.items()
    }


def write_registry(root: Path, runs: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> None:
    """Write registry.json, registry.md and runs.html into the folder of the runs."""
    shown = [dict(run) | {"lineage": lineage(run, runs)} for run in runs]
    lines: list[str] = ["# Runs", "", "| run id | started (UTC) | commit | from | linked | notes |"]
    lines.append("|---|---|---|---|---|---|")
    for run in shown:
        chain = " → ".join(run["lineage"][:-1])
        cells = [
            run["run_id"],
            run["start_utc"],
            _short(str(run["git_commit"] or "–")),
            chain,
            "; ".join(map(_linked, _rows(run["links"]))),
            "; ".join(run["notes"]),
        ]
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    lines += [
        "",
        "# Results",
        "",
        "Greedy and sampled pass@1 in percent, with 95 % intervals over problems.",
        "",
    ]
    lines += [f"| model | {' | '.join(map(_cell, results['tasks']))} | peak memory, GiB |"]
    lines += ["|---|" + "---|" * len(results["tasks"]) + "--:|"]
    for row in results["rows"]:
        cells = [_score(row["cells"][task]) for task in results["tasks"]]
        lines.append(f"| {_cell(row['model'])} | {' | '.join([*cells, _memory(row)])} |")
    page = render(
        "runs.html",
        title=f"Runs in {root.resolve().name}",
        styles=("compare.css", "runs.css"),
        runs=shown[::-1],
        results=results,
        best=_best(results),
        score=_score,
        memory=_memory,
        short=_short,
        link=lambda run, name: quote(f"{run['folder']}/{name}"),
    )
    try:
        replace_file(root / "registry.json", json.dumps({"runs": shown, "results": results}, indent=1) + "\n")
        replace_file(root / "registry.md", "\n".join(lines) + "\n")
        replace_file(root / "runs.html", page)
    except OSError as error:
        raise UserError(f"{root}: the registry cannot be written ({error.strerror})") from None


def _linked(link: Mapping[str, Any]) -> str:
    return f"{link['name'] or ''} {_short(link['id'] or '')}".strip()


def print_runs(runs: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> None:
    """Print the runs and the results table."""
    console = Console()
    table = Table(box=SIMPLE_HEAD)
    has_notes = any(run["notes"] for run in runs)
    for name in ("run id", "kind", "status", "from", *(["notes"] if has_notes else [])):
        table.add_column(name, overflow="fold", no_wrap=name in ("run id", "kind", "status"))
    rows = [("run id", "kind", "status"), *((r["run_id"], r["kind"], r["status"]["kind"]) for r in runs)]
    taken = sum(max(len(str(row[column])) for row in rows) for column in range(3))
    room = max(8, console.width - taken - 4 * 2 - 5)  # two spaces a column, three lines and two edges
    for run in runs:
        origin = lineage(run, runs)[-2::-1]  # the nearest first; the page has the whole line
        source = origin[0] if origin else "-"
        if len(source) > room and "/" in source:  # the end of a path tells more than its beginning
            source = f"…{source[1 - room :]}"
        cells = [run["run_id"], run["kind"], run["status"]["kind"], source]
        cells += ["; ".join(run["notes"])] if has_notes else []
        table.add_row(*(Text(escape_controls(str(cell))) for cell in cells))
    console.print(table)
    if results["tasks"]:
        table = Table(title="pass@1 and greedy, percent", box=SIMPLE_HEAD, title_justify="left")
        for name in ("", *results["tasks"], "peak GiB"):
            table.add_column(Text(escape_controls(name)), overflow="fold")
        for row in results["rows"]:
            cells = [row["model"], *(_score(row["cells"][task]) for task in results["tasks"]), _memory(row)]
            table.add_row(*(Text(escape_controls(cell)) for cell in cells))
        console.print(table)


def _read_run(root: Path, folder: Path) -> dict[str, Any]:
    """Read one run from its files."""
    provenance, evaluation = read_json(folder / PROVENANCE), read_json(folder / "eval.json")
    environment, summary = read_json(folder / "environment.json"), read_json(folder / "summary.json")
    config = _read_config(folder / "config.yaml")
    policy, model, identity = (
        _object(config.get("policy")),
        _object(evaluation.get("model")),
        _object(evaluation.get("identity")),
    )
    of_base, of_adapter = _object(provenance.get("base")), _object(provenance.get("adapter"))
    base = str(of_base.get("name") or model.get("init") or policy.get("init") or "")
    adapter = str(of_adapter.get("name") or policy.get("adapter") or "")
    kind = _kind(config, evaluation, environment)
    if kind == "infer":  # of several models; the first is what it is from
        words = config["runs"] if isinstance(config.get("runs"), list) else []
        base = ", ".join(map(str, words))
        adapter = str(words[0]) if len(words) == 1 else ""
    task = identity.get("task", config.get("task"))
    path = task.get("path", "") if isinstance(task, dict) else ""
    task = task.get("name", "") if isinstance(task, dict) else task
    parent = _object(provenance.get("parent"))
    if _text(parent.get("folder")):
        parent = {name: _text(parent.get(name)) for name in ("folder", "run_id")}
    else:
        parent = _find_parent(folder, adapter or base, evaluation)
    links = [*_rows(provenance.get("links")), *_rows(_json(folder / "trackers.json"))]
    links += _rows(_object(_json(folder / PUSHES)).get("pushes"))
    return {
        "run_id": run_id(folder),
        "folder": str(folder.relative_to(root)),
        "kind": kind,
        "start_utc": _text(provenance.get("start_utc")) or _text(environment.get("start_utc")),
        "git_commit": _text(provenance.get("git_commit")) or _text(environment.get("git_commit")),
        "whet": _text(environment.get("whet")),
        "base": base,
        "adapter": adapter,
        "base_sha256": _text(of_base.get("sha256_of_all")) or _text(model.get("sha256")),
        "base_commit": _text(of_base.get("commit")),
        "adapter_sha256": _text(of_adapter.get("sha256_of_all")),
        "adapter_commit": _text(of_adapter.get("commit")),
        "config_sha256": _text(provenance.get("config_sha256")),
        "data_sha256": _text(provenance.get("data_sha256")),
        "parent": parent,
        "links": [{name: _text(link.get(name)) for name in ("name", "id", "url")} for link in links],
        "notes": _notes(folder),
        "task": str(task or ""),
        "path": _text(path) or "",
        "problems_sha256": _text(identity.get("problems_sha256")) or "",
        "split": str(identity.get("split") or ""),
        "label": str(evaluation.get("label") or ""),
        "scores": _scores(evaluation),
        "status": {name: glance(folder)[name] for name in ("kind", "text")},
        "pages": [name for name in PAGES if (folder / name).is_file()],
        "curve": _curve(folder),
        "peak_memory_gib": _peak(summary),
    }


def _find_parent(folder: Path, source: str, evaluation: Mapping[str, Any]) -> dict[str, Any] | None:
    """Find the run that contains an old folder's model; the demo's evaluations name the stage next to them."""
    beside = folder.parent.parent / str(evaluation.get("label") or "")
    if not source and evaluation.get("label") and beside != folder:
        source = str(beside) if os.path.isdir(beside / "checkpoints") else ""
    parent = parent_run(source)
    # A demo that was moved, or is read from elsewhere: its evaluations name the stage by the path of that time.
    is_stage = Path(source).parts[-2:] == beside.parts[-2:] and beside != folder
    if parent is None and evaluation.get("label") and is_stage:
        parent = parent_run(str(beside))
    if parent is None or parent == folder.resolve():
        return None
    return {"folder": str(parent), "run_id": run_id(parent)}


def _read_config(path: Path) -> dict[str, Any]:
    """Return the fields of any program's config.yaml; empty if it cannot be read."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            return {}
        content = YAML_LOADER(path.read_bytes()).get_single_data()
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _kind(config: Mapping[str, Any], evaluation: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """Identify the program: by a field that only its config has, else by the command line."""
    if evaluation.get("metrics"):
        return "eval"
    argv = environment.get("argv")
    command = argv[1] if isinstance(argv, list) and len(argv) > 1 else ""
    known = next((kind for field, kind in KINDS.items() if field in config), "")
    return known or (command if isinstance(command, str) and command.isalpha() else "")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _scores(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return pass@1 and greedy with their intervals, and the numbers of problems and samples; empty without scores."""
    metrics = _object(evaluation.get("metrics"))
    found = {
        name: {end: as_number(_object(metrics.get(name)).get(end)) for end in ("mean", "low", "high")}
        for name in ("pass@1", "greedy")
    }
    if any(value is None for estimate in found.values() for value in estimate.values()):
        return {}
    # Not the devices' readings, which are of all programs on the machine.
    peak = as_number(_object(evaluation.get("hardware")).get("peak_memory_gib"))
    counts = {name: as_number(evaluation.get(name)) for name in ("num_problems", "num_samples")}
    counts = {name: None if count is None else int(count) for name, count in counts.items()}
    return {**found, **counts, "peak_memory_gib": peak}


def _curve(folder: Path) -> dict[str, Any] | None:
    """Return the run's first headline metric as a sparkline of `SPARK_WIDTH` x 20; None where there is none to draw."""
    path = folder / "metrics.jsonl"
    try:
        if path.stat().st_size > MAX_CURVE_BYTES:
            return None
    except OSError:
        return None
    curves = collect(read_rows(path))
    stages = (name for names in HEADLINES.values() for name in names.split())
    metric = next((name for name in stages if name in curves and len(curves[name][0]) > 1), None)
    if metric is None:
        return None
    steps, values = (column[np.isfinite(curves[metric][1])] for column in curves[metric])
    if len(values) < 2:
        return None
    chosen = np.unique(np.linspace(0, len(values) - 1, MAX_POINTS).round().astype(int))
    span, height = (steps[-1] - steps[0]) or 1, np.ptp(values) or 1.0
    x = SPARK_WIDTH * (steps[chosen] - steps[0]) / span
    y = 19 - 18 * (values[chosen] - values.min()) / height
    return {
        "metric": metric_label(metric),
        "points": " ".join(f"{left:.1f},{top:.1f}" for left, top in zip(x, y, strict=True)),
        "first": format_metric(metric, float(values[0])),
        "last": format_metric(metric, float(values[-1])),
    }


def _peak(summary: Mapping[str, Any]) -> float | None:
    found = [as_number(value) for name, value in summary.items() if name.endswith("peak_memory_gib")]
    return max((value for value in found if value is not None), default=None)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _rows(value: Any) -> list[dict[str, Any]]:
    return [dict(row) for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def _notes(folder: Path) -> list[str]:
    try:
        lines = (folder / NOTES).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows = [parse_row(line.encode()) for line in lines]
    return [str(row["note"]) for row in rows if row and "note" in row]


def _score(cell: Mapping[str, Any] | None) -> str:
    """Write one cell of the results table: pass@1 with its interval, and greedy."""
    if cell is None:
        return "–"
    one, greedy = cell["pass@1"], cell["greedy"]
    interval = f"{100 * one['mean']:.1f} [{100 * one['low']:.1f}, {100 * one['high']:.1f}]"
    return f"{interval}, greedy {100 * greedy['mean']:.1f}"


def _best(results: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return each task of which several models were measured, with the row of the highest pass@1; none for a tie."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for task in results["tasks"]:
        rows = [row for row in results["rows"] if row["cells"][task] is not None]
        shares = {id(row): row["cells"][task]["pass@1"]["mean"] for row in rows}
        first = max(rows, key=lambda row: shares[id(row)], default=None)
        if first is not None and list(shares.values()).count(shares[id(first)]) < 2 <= len(rows):
            found.append((task, first))
    return found


def _memory(row: Mapping[str, Any]) -> str:
    return "–" if row["peak_memory_gib"] is None else f"{row['peak_memory_gib']:.2f}"


def _short(commit: str) -> str:
    """Shorten a commit to ten digits; keep a trailing -dirty."""
    hash_, _, state = commit.partition("-")
    return hash_[:10] + (f"-{state}" if state else "")


def _cell(value: Any) -> str:
    """Make a value safe for one cell of a Markdown table."""
    text = escape_controls(str(value or "")).replace("\n", " ")
    for character, written in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("`", "\\`"), ("[", "\\[")):
        text = text.replace(character, written)
    return text


PROGRAM = Program(config_class=RunsConfig, main=main, positional="folder")
