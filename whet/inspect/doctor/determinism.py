"""`whet doctor determinism`: runs three training steps twice, in separate processes, and compares them by stage."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors.torch import load_file

from whet import processes
from whet.telemetry.display import one_line
from whet.telemetry.log import RUN_TIME, as_number, read_metrics, read_rows
from whet.telemetry.metrics import METRICS
from whet.types import UserError

NUM_STEPS = 3
STAGES = ("rollouts", "rewards", "training")
REWARDS = frozenset({"rewards", "reward", "advantage"})
"""Fields of a row of samples.jsonl that are computed from the rollout."""
MACHINE_UNITS = frozenset({"s", "tokens/s", "GiB", "W", "J", "°C"})
"""Units of machine measurements, which are never the same twice."""
SMALLER = 64
"""The other micro-batch budget is smaller by this factor."""

TINY = [
    *("--policy.model.hidden-size", "32", "--policy.model.intermediate-size", "64"),
    *("--policy.model.num-layers", "2", "--policy.model.num-heads", "4", "--policy.model.num-kv-heads", "2"),
    *("--policy.model.head-dim", "8", "--policy.num-threads", "1"),
]
BASE = ["sft", "demo", *TINY, "--num-steps", "250", "--batch-size", "24", "--validation-problems", "0"]
"""A model that knows the demo's format and some sums: with random weights no rewards would differ."""
FROM_BASE = ["--policy.num-threads", "1", "--sampling.max-new-tokens", "24", "--policy.init"]
SMALL: dict[str, list[str]] = {
    "sft": ["demo", *TINY, "--batch-size", "8", "--validation-problems", "8"],
    "rl": ["demo", "--num-prompts", "4", "--group-size", "4", *FROM_BASE],
    "dpo": ["demo", "--num-problems", "512", "--num-samples", "8", "--batch-size", "6", *FROM_BASE],
}
"""The runs without a recipe; after a final --policy.init comes the folder of BASE."""


@dataclass(frozen=True)
class Trace:
    """The folder of a run of NUM_STEPS steps."""

    folder: Path

    @cached_property
    def rows(self) -> dict[tuple[int, str], list[dict[str, Any]]]:
        """Results of each stage of each step, without machine measurements."""
        found: dict[tuple[int, str], list[dict[str, Any]]] = {}
        for row in read_rows(self.folder / "samples.jsonl"):
            paid = {name: value for name, value in row.items() if name in REWARDS}
            written = {name: value for name, value in row.items() if name not in REWARDS}
            for stage, part in (("rollouts", written), ("rewards", paid)):
                found.setdefault((int(row["step"]), stage), []).append(part)
        for row in read_metrics(self.folder):
            computed = {name: value for name, value in row.items() if not _is_measured(name)}
            found.setdefault((int(row["step"]), "training"), []).append(computed)
        return found

    @cached_property
    def files(self) -> dict[str, Path]:
        """The last checkpoint's tensors: parameters and optimizer state, with file names if there are several."""
        steps = sorted((self.folder / "checkpoints").glob("step_*"))
        found = sorted(steps[-1].rglob("*.safetensors")) if steps else []
        kinds = [("optimizer state" if path.parent != steps[-1] else "parameters", path) for path in found]
        many = {kind for kind, _ in kinds if [k for k, _ in kinds].count(kind) > 1}
        return {f"{kind} {path.name}" if kind in many else kind: path for kind, path in kinds}


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison: a hash of the first run's value, and how the other differs; '' if equal."""

    where: str
    digest: str
    difference: str


def check_determinism(program: str, recipe: str = "") -> bool:
    """Run a recipe twice, and with two variations for information; print what is equal and what is not.

    Args:
        program: sft, rl or dpo.
        recipe: As on the command line; '' for a small form of the demo's.

    Returns:
        Whether the repeated run is bitwise the same.

    Raises:
        UserError: If a run fails.
    """
    console = Console()
    with tempfile.TemporaryDirectory(prefix="whet-doctor-") as name:
        work = Path(name)
        words = [recipe] if recipe else SMALL[program]
        if words[-1] == "--policy.init":
            words = [*words, str(_run(console, work, "tiny model", BASE).folder)]
        words = [program, *words, "--num-steps", str(NUM_STEPS)]
        first = _run(console, work, "first run", words)
        again = compare(first, _run(console, work, "same again", words))
        config = yaml.safe_load((first.folder / "config.yaml").read_text())
        threads = 2 if (config["policy"]["num_threads"] or torch.get_num_threads()) == 1 else 1
        tokens = max(1, config["optim"]["token_budget"] // SMALLER)
        others = {
            f"{threads} thread{'s' * (threads > 1)}": ["--policy.num-threads", str(threads)],
            f"micro-batches of {tokens} tokens": ["--optim.token-budget", str(tokens)],
        }
        informed = {
            label: compare(first, _run(console, work, label, _with(words, extra)))
            for label, extra in others.items()
        }
    console.print(_table(again))
    bad = [cell for cell in again if cell.difference]
    if bad:
        print(one_line(f"not the same twice: {bad[0].where} differs first: {bad[0].difference}"))
    else:
        print(f"the same twice: {len(again)} comparisons of {NUM_STEPS} steps, all bitwise equal")
    print("\nfor information (another order of sums; bitwise equality is not promised):")
    for label, cells in informed.items():
        far = [cell for cell in cells if cell.difference]
        last = [f"{cell.where} {cell.difference}" for cell in far if cell.where in first.files]
        text = f"differs first in {far[0].where}: {far[0].difference}" if far else "bitwise equal"
        print(one_line(f"{label}: {'; '.join([text, *last])}"))
    return not bad


def compare(first: Trace, other: Trace) -> list[Cell]:
    """Compare two runs, in the order in which things are computed."""
    cells = []
    keys = first.rows.keys() | other.rows.keys()
    for step, stage in sorted(keys, key=lambda key: (key[0], STAGES.index(key[1]))):
        mine, theirs = first.rows.get((step, stage), []), other.rows.get((step, stage), [])
        cells.append(Cell(f"step {step} {stage}", _hash(mine), _row_difference(mine, theirs)))
    for kind in first.files.keys() | other.files.keys():
        if kind not in first.files or kind not in other.files:
            cells.append(Cell(kind, "", "in one of both only"))
            continue
        mine, theirs = first.files[kind].read_bytes(), other.files[kind].read_bytes()
        difference = "" if mine == theirs else tensor_difference(first.files[kind], other.files[kind])
        cells.append(Cell(kind, hashlib.sha256(mine).hexdigest()[:12], difference))
    return cells


def tensor_difference(mine: Path, theirs: Path) -> str:
    """Describe how two files of tensors differ: names, shapes, or the largest difference and where."""
    left, right = load_file(mine), load_file(theirs)
    if {n: t.shape for n, t in left.items()} != {n: t.shape for n, t in right.items()}:
        return "other tensors"
    gaps = {
        name: float((left[name].double() - right[name].double()).abs().max())
        for name in left
        if left[name].numel()
    }
    name = max(gaps, key=lambda name: gaps[name])
    return f"max |delta| {gaps[name]:.1e} in {name}" if gaps[name] else "other bytes, same numbers"


def _run(console: Console, work: Path, label: str, words: Sequence[str]) -> Trace:
    """Run a whet command in a separate process, into a new folder."""
    folder, log = work / re.sub(r"\W", "_", label), work / "log"
    command = [sys.executable, "-m", "whet", *words, "--out", str(folder)]
    began = time.monotonic()
    with log.open("wb") as output, console.status(label):
        status = processes.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output).returncode
    if status:
        last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1][:500]
        raise UserError(
            f"{label}: 'whet {' '.join(words)}' ended with status {status}: {last.removeprefix('whet: error: ')}"
        )
    console.print(f"{label}: {time.monotonic() - began:.1f} s", highlight=False)
    return Trace(folder)


def _with(words: Sequence[str], override: Sequence[str]) -> list[str]:
    """Put an override into a command line, replacing that field's."""
    option, value = override
    place = words.index(option) if option in words else len(words)
    return [*words[:place], option, value, *words[place + 2 :]]


def _is_measured(name: str) -> bool:
    metric = METRICS.get(name)
    return (
        name in ("time_s", RUN_TIME)
        or name.startswith("hardware/")
        or (metric is not None and metric.unit in MACHINE_UNITS)
    )


def _hash(rows: Sequence[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:12]


def _row_difference(mine: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> str:
    """Describe in how many rows and in which field two lists of rows first differ, and by how much; '' if equal."""
    if len(mine) != len(theirs):
        return f"{len(mine)} against {len(theirs)} rows"
    differing = [(a, b) for a, b in zip(mine, theirs, strict=True) if a != b]
    if not differing:
        return ""
    a, b = differing[0]
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    gap = _gap(a.get(names[0]), b.get(names[0]))
    text = names[0] + ("" if gap is None else f" by {gap:.1e}")
    if len(names) > 1:
        text += f" and {len(names) - 1} more"
    return f"{len(differing)} of {len(mine)} rows, {text}" if len(mine) > 1 else text


def _gap(a: Any, b: Any) -> float | None:
    """Return the largest difference of two JSON values; None if they are not numbers, or not equally many."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        gaps = [_gap(x, y) for x, y in zip(a, b, strict=True)]
        return max((gap for gap in gaps if gap is not None), default=None)
    left, right = as_number(a), as_number(b)
    return None if left is None or right is None else abs(left - right)


def _table(cells: Sequence[Cell]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("stage", "sha256", "the second time"):
        table.add_column(name, no_wrap=name != "the second time")
    for cell in cells:
        text = (
            Text(f"differs: {one_line(cell.difference)}", style="bold red")
            if cell.difference
            else Text("equal")
        )
        table.add_row(cell.where, cell.digest, text)
    return table
