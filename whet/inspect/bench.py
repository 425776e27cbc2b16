"""`whet bench`: runs the repository's bench/ programs, which time whet and its peers at the same work."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whet import processes
from whet.cli import Program
from whet.config import dump_yaml
from whet.install import install_command
from whet.report.page import json_for_script, render
from whet.storage.folder import dated, open_run
from whet.telemetry.display import escape_controls
from whet.telemetry.provenance import describe_environment
from whet.types import UserError

BENCH = Path(__file__).resolve().parents[2] / "bench"
PEERS = {
    "trl": install_command("peers"),
    "hf": install_command("peers"),
    "vllm": "set VLLM_PYTHON to the Python of an environment with vLLM (its CPU build if there is no GPU)",
}
"""Peer -> how to install it."""
PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "grpo_step": ("GRPO step", ("trl",)),
    "sft_step": ("SFT step", ("trl",)),
    "generate": ("generation", ("hf", "vllm")),
    "memory": ("memory of a GRPO step", ("trl",)),
    "mfu": ("training MFU", ()),
}
"""File in bench/ -> what it measures, and against which peers."""
MODELS = {"a": "1.07 M", "b": "11.4 M", "c": "124 M", "d": "494 M"}
"""Model of bench/ -> its parameters."""
HF_TARGET, VLLM_TARGET, VLLM_BATCHES = 3.0, 1.1, (8, 64)


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Speed and memory against TRL, transformers and vLLM on this machine: ratio, target and floor.

    Exit status 1 if a program fails.
    """

    against: tuple[str, ...] = ()
    """Peers: trl, hf, vllm; empty for those that are installed."""
    programs: tuple[str, ...] = tuple(PROGRAMS)
    """Programs to run."""
    quick: bool = False
    """The smallest model and few repeats: minutes instead of an hour."""
    models: str = ""
    """Models, such as ab: a 1.07M, b 11.4M, c 124M and d 494M parameters (for a GPU); empty for each program's own
    choice."""
    repeats: int = 0
    """Timed runs of each side; 0 for each program's own choice."""
    threads: int = 0
    """CPU threads of both sides; 0 for all cores."""
    out: str = ""
    """Output folder for bench.json and bench.html; empty for runs/bench-DATE-TIME."""

    def __post_init__(self) -> None:
        for name, words, known in (("against", self.against, PEERS), ("programs", self.programs, PROGRAMS)):
            if unknown := set(split(words)) - known.keys():
                raise ValueError(
                    f"{name}: got {', '.join(sorted(unknown))}, expected some of {', '.join(known)}"
                )
        if set(self.models) - set(MODELS):
            raise ValueError(f"models = {self.models}: expected some of {', '.join(MODELS)}")
        for name in ("repeats", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 0 or more")

    @property
    def options(self) -> list[str]:
        """Options for every program."""
        words = ["--quick"] if self.quick else []
        words += ["--models", self.models] if self.models else []
        words += ["--repeats", str(self.repeats)] if self.repeats else []
        return words + (["--threads", str(self.threads)] if self.threads else [])


def split(words: Iterable[str]) -> list[str]:
    """Return words that are separate or comma-separated."""
    return [word for text in words for word in text.split(",") if word]


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table.

    Attributes:
        program: Program that measured it.
        case: Model and work.
        peer: The peer, with its best settings; '' for the machine's own limit.
        value: Speed ratio; for memory and MFU a share.
        target: The target; None without one.
        floor: Ratio at which only the arithmetic remains; None if unknown.
        share: Reached share of the floor.
        is_lower_better: Whether small values are good: memory.
    """

    program: str
    case: str
    peer: str
    value: float
    target: float | None = None
    floor: float | None = None
    share: float | None = None
    is_lower_better: bool = False

    @property
    def name(self) -> str:
        """Its name, stable between runs."""
        peer = self.peer.partition(",")[0].partition(" ")[0]
        return f"{self.program} {self.case}{f' vs {peer}' if peer else ''}"

    @property
    def ratio(self) -> float:
        """The value, or its inverse: more is better."""
        return 1 / self.value if self.is_lower_better else self.value

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.is_lower_better else self.value >= self.target


def results(program: str, rows: Iterable[Mapping[str, Any]]) -> list[Result]:
    """Read the rows that a program of bench/ wrote."""
    found = []
    for row in rows:
        case, precision = row.get("case") or row.get("model", ""), row.get("precision")
        share, target = row.get("share_of_floor"), row.get("target")
        if program == "generate":
            case = f"{case} batch {row['batch']}"
            aim = VLLM_TARGET if row["batch"] in VLLM_BATCHES else None
            for peer, target in ((f"HF, {row.get('hf_best')}", HF_TARGET), ("vLLM", aim)):
                if (value := row.get(f"{peer.partition(',')[0].lower()}_ratio")) is not None:
                    found.append(Result(program, case, peer, value, target, value / share, share))
        elif program == "mfu":
            found.append(Result(program, f"{case} {precision}", "", row["mfu"], target))
        elif program == "memory":  # whet as it is fastest, and as it needs least
            for name, one in row.items():
                if isinstance(one, dict) and "ratio" in one:
                    peer, ratio, target = one["peer"], one["ratio"], one["target"]
                    found.append(Result(program, f"{case} {name}", peer, ratio, target, is_lower_better=True))
        else:
            floor = row.get("floor_ratio")
            found.append(Result(program, case, row["peer"], row["ratio"], target, floor, share))
    return found


def main(config: BenchConfig) -> None:
    """Run the programs in sequence, and print and write one table.

    Raises:
        UserError: If bench/ or a requested peer is missing.
        SystemExit: With status 1 when a program fails.
    """
    if not (BENCH / "sides.py").is_file():
        raise UserError(
            f"whet bench: the benchmark programs are not part of the installed package (no {BENCH}); get the "
            "repository with its bench/ folder, there pip install -e '.[peers]', and run whet bench again"
        )
    chosen, notes = select(config)
    folder = Path(config.out or dated("bench"))
    open_run(folder, dump_yaml(config), resumable=False)
    for note in notes:
        print(note)
    rows: dict[str, Any] = {}
    failed = []
    for program, extra in chosen.items():
        found = run_program(BENCH / f"{program}.py", [*config.options, *extra])
        if found is None:
            failed.append(program)
        else:
            rows[program] = found
    found = [result for program, content in rows.items() for result in results(program, content["rows"])]
    content = {
        "machine": describe_environment(),
        "quick": config.quick,
        "notes": notes,
        "failed": failed,
        "rows": {result.name: result.ratio for result in found},
        "results": [asdict(result) | {"name": result.name, "is_met": result.is_met} for result in found],
        "programs": rows,
    }
    text = json.dumps(json.loads(json_for_script(content)), indent=1)
    (folder / "bench.json").write_text(text + "\n", encoding="ascii")
    page = render(
        "bench.html",
        title="whet against its peers",
        styles=("bench.css",),
        content=content,
        found=found,
        answer=answer(found),
        titles={name: title for name, (title, _) in PROGRAMS.items()},
        models={
            letter: text for letter, text in MODELS.items() if any(letter in r.case.split() for r in found)
        },
        scale=scale(found),
        shown=shown,
        verdict=verdict,
    )
    (folder / "bench.html").write_text(page, encoding="utf-8", errors="backslashreplace")
    head = f"{told}\n\n" if (told := answer(found)) else ""
    print(escape_controls(f"\n{table(found)}\n\n{head}{folder / 'bench.html'} shows everything"))
    if failed:
        print(f"failed: {', '.join(failed)}")
        raise SystemExit(1)


def select(config: BenchConfig) -> tuple[dict[str, list[str]], list[str]]:
    """Return the programs that can run, their further options, and notes on what is skipped.

    Raises:
        UserError: If a requested peer is missing, or nothing is left to run.
    """
    asked, programs = split(config.against), split(config.programs)
    missing = [peer for peer in PEERS if not is_installed(peer)]
    if lacking := [peer for peer in asked if peer in missing]:
        raise UserError(f"--against {lacking[0]}: not installed; {PEERS[lacking[0]]}, or leave it out")
    wanted = [peer for peer in asked or PEERS if peer not in missing]
    notes = [f"{peer} is skipped: not installed; {PEERS[peer]}" for peer in missing if not asked]
    chosen: dict[str, list[str]] = {}
    for program in programs:
        beside = PROGRAMS[program][1]
        present = [peer for peer in beside if peer in wanted]
        if beside and not present:
            continue
        chosen[program] = ["--against", *present] if len(beside) > 1 else []
    if not chosen:
        raise UserError(
            f"no program of {', '.join(programs)} has a peer here: {PEERS['trl']}, or choose other --programs"
        )
    return chosen, notes


def is_installed(peer: str) -> bool:
    """Say whether a peer is installed."""
    if peer == "vllm":
        return bool(os.environ.get("VLLM_PYTHON"))
    return importlib.util.find_spec({"trl": "trl", "hf": "transformers"}[peer]) is not None


def run_program(path: Path, options: Sequence[str]) -> dict[str, Any] | None:
    """Run a benchmark program with its output shown; return its results, or None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        words = [sys.executable, str(path), *options, "--json", str(file)]
        sys.stdout.flush()
        code = processes.run(words, check=False).returncode
        if code or not file.is_file():
            print(f"{path.name} ended with status {code}", flush=True)
            return None
        return json.loads(file.read_text(encoding="utf-8"))


def shown(result: Result, value: float | None) -> str:
    """Write a value, target or floor of a result."""
    if value is None:
        return ""
    return f"{100 * value:.0f} %" if result.program == "mfu" else f"{value:.2f}x"


def verdict(result: Result) -> str:
    """Say whether the target is met."""
    return {None: "", True: "met", False: "missed"}[result.is_met]


def answer(found: Sequence[Result]) -> str:
    """Say in one sentence how whet stands beside each peer, work by work, with the range over models and sizes."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in found:
        if result.peer:
            groups.setdefault((result.program, result.peer.partition(",")[0]), []).append(result)
    told: list[str] = []
    for (program, peer), results in groups.items():
        low, high = min(r.value for r in results), max(r.value for r in results)
        ends = dict.fromkeys(f"{value:.1f}" if value >= 1 else f"{value:.2f}" for value in (low, high))
        reach = " to ".join(ends)
        end = "of {}'s" if results[0].is_lower_better else "times as fast as {}"
        told.append(f"{PROGRAMS[program][0]} {reach} {end.format('transformers' if peer == 'HF' else peer)}")
    return f"{'; '.join(told)}." if told else ""


def scale(found: Sequence[Result]) -> dict[str, float]:
    """Return the value at the end of each program's bars: one scale for all of a program, so that bars compare."""
    widest: dict[str, float] = {}
    for result in found:
        most = max(result.value, result.target or 0, result.floor or 0)
        widest[result.program] = max(widest.get(result.program, 0), most)
    return widest


def table(found: Sequence[Result]) -> str:
    """Lay out the results as text."""
    lines = [f"{'work':<48}{'peer':<32}{'whet':>8}{'target':>9}{'floor':>8}{'reached':>9}"]
    for result in found:
        share = "" if result.share is None else f"{100 * result.share:.0f} %"
        target = shown(result, result.target)
        target = f"{'<=' if result.is_lower_better else ''}{target}" if target else ""
        lines.append(
            f"{PROGRAMS[result.program][0] + ' ' + result.case:<48}{result.peer or 'matmul peak':<32}"
            f"{shown(result, result.value):>8}{target:>9}{shown(result, result.floor):>8}{share:>9}  {verdict(result)}"
        )
    return "\n".join(lines)


PROGRAM = Program(config_class=BenchConfig, main=main)
