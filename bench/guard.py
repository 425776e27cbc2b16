"""Compare the ratios of a fresh quick run with the committed ones; exit status 1 when one falls by more than 20 %.

python bench/guard.py [--programs grpo_step generate ...] [--file docs/results/bench.json] [--update]

A program whose ratio fell is run once more, and the better of both runs counts: a noisy neighbour is no regression.
--update writes what was measured instead of comparing. Ratios are kept for each instruction set (avx2, avx512-bf16):
they carry over between machines of one, not from one to another. Where none are committed yet nothing is compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from whet.inspect.bench import PROGRAMS, results
from whet.kernels.cpu import build
from whet.telemetry.provenance import describe_environment

FOLDER = Path(__file__).resolve().parent
FILE = FOLDER.parent / "docs" / "results" / "bench.json"
LIMIT = 0.2
FACTS = ("cpu", "cuda_device", "num_cpus", "num_torch_threads", "torch", "python")


def measure(program: str, folder: Path, options: list[str]) -> dict[str, float]:
    """Run a program of a folder in its quick form; return its ratios by name, more being better."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "rows.json"
        words = [sys.executable, str(folder / f"{program}.py"), "--quick", *options, "--json", str(file)]
        code = subprocess.run(words, check=False).returncode
        if code or not file.is_file():
            raise SystemExit(f"guard: {program}.py ended with status {code}")
        rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return {result.name: round(result.ratio, 3) for result in results(program, rows)}


def fallen(committed: Mapping[str, float], fresh: Mapping[str, float]) -> dict[str, str]:
    """Return what is missing or fell by more than the limit, with the numbers."""
    found = {}
    for name, before in committed.items():
        if name not in fresh:
            found[name] = f"{before:.2f} before, not measured now"
        elif fresh[name] < (1 - LIMIT) * before:
            found[name] = f"{before:.2f} before, {fresh[name]:.2f} now ({fresh[name] / before - 1:+.0%})"
    return found


def of_programs(rows: Mapping[str, float], programs: Iterable[str]) -> dict[str, float]:
    """Return the rows that some programs measure."""
    chosen = set(programs)
    return {name: value for name, value in rows.items() if name.split()[0] in chosen}


def instruction_set() -> str:
    """Name what this machine computes with, as the programs do."""
    return build.instruction_set() or f"eager {torch.backends.cpu.get_cpu_capability().lower()}"


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Read what is committed: for each instruction set a date, the machine's facts, and ratios."""
    if not file.is_file():
        raise SystemExit(f"guard: {file} does not exist; write it with --update")
    try:
        sets = json.loads(file.read_text())["sets"]
        return {
            str(name): {**one, "rows": {str(row): float(value) for row, value in one["rows"].items()}}
            for name, one in sets.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        shape = '{"sets": {instruction set: {"rows": {name: ratio}}}}'
        raise SystemExit(f"guard: {file}: expected {shape}: {error}") from None


def main(argv: list[str] | None = None) -> int:
    """Measure and compare, or update; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--file", type=Path, default=FILE, help="committed ratios")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the programs are")
    parser.add_argument("--threads", default="", help="intra-op threads; default all cores")
    parser.add_argument("--update", action="store_true", help="write the ratios instead of comparing them")
    arguments = parser.parse_args(argv)
    options = ["--threads", arguments.threads] if arguments.threads else []
    isa = instruction_set()
    sets = read(arguments.file) if not arguments.update or arguments.file.is_file() else {}
    before: dict[str, float] = sets.get(isa, {}).get("rows", {})
    if isa not in sets and not arguments.update:
        known = ", ".join(sorted(sets)) or "none"
        print(f"guard: no ratios are committed for {isa} (there are: {known}): add them with --update")
        return 0
    fresh: dict[str, float] = {}
    for program in arguments.programs:
        fresh |= measure(program, arguments.folder, options)
    if arguments.update:
        facts = {name: value for name, value in describe_environment().items() if name in FACTS}
        kept = {name: value for name, value in before.items() if name.split()[0] not in arguments.programs}
        sets[isa] = {"date": time.strftime("%Y-%m-%d"), "machine": facts, "rows": kept | fresh}
        arguments.file.parent.mkdir(parents=True, exist_ok=True)
        arguments.file.write_text(json.dumps({"sets": sets}, indent=1) + "\n")
        print(f"guard: {len(fresh)} ratios of {isa} written to {arguments.file}")
        return 0
    committed = of_programs(before, arguments.programs)
    for program in sorted({name.split()[0] for name in fallen(committed, fresh)}):
        again = measure(program, arguments.folder, options)
        fresh |= {name: max(value, fresh.get(name, value)) for name, value in again.items()}
    lost = fallen(committed, fresh)
    for name, text in lost.items():
        print(f"guard: fell: {name}: {text}")
    for name in fresh.keys() - committed.keys():
        print(f"guard: new, not committed yet: {name}: {fresh[name]:.2f}")
    print(f"guard: {len(committed) - len(lost)} of {len(committed)} ratios of {isa} within {LIMIT:.0%}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
