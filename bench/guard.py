"""Compare the ratios of a fresh quick run with this processor's committed ones; exit 1 if one fell by over 20 %.

python bench/guard.py [--programs grpo_step generate ...] [--file docs/results/bench.json] [--update]

A program whose ratio fell is run once more, and the better of both runs counts: a noisy neighbour is no regression.
--update writes what was measured instead of comparing. Ratios are kept for each processor: one commit's differ by a
quarter between two generations with the same instruction set. Where none are committed, the targets stand for them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from whet import processes
from whet.kernels.cpu import build
from whet.telemetry.hardware import cpu_name
from whet.telemetry.provenance import describe_environment

FOLDER = Path(__file__).resolve().parent
FILE = FOLDER.parent / "docs" / "results" / "bench.json"
LIMIT = 0.2
PROGRAMS = ("grpo_step", "sft_step", "generate", "memory", "mfu")
HF_TARGET, VLLM_TARGET, VLLM_BATCHES = 3.0, 1.1, (8, 64)
FACTS = ("cpu", "cuda_device", "num_cpus", "num_torch_threads", "torch", "python")


def ratios(program: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float, float | None]]:
    """Yield the name, the ratio and the target of each row that a program wrote, more being better; None without one.

    Memory is inverted; of training it is the share of the machine's matmul peak.
    """
    for row in rows:
        case = f"{program} {row.get('case') or row.get('model', '')}"
        if program == "generate":
            case += f" batch {row['batch']}"
            if (ratio := row.get("hf_ratio")) is not None:
                yield f"{case} vs HF", ratio, HF_TARGET
            if (ratio := row.get("vllm_ratio")) is not None:
                yield f"{case} vs vLLM", ratio, VLLM_TARGET if row["batch"] in VLLM_BATCHES else None
        elif program == "mfu":
            yield f"{case} {row.get('precision')}", row["mfu"], row.get("target")
        elif program == "memory":  # whet as it is fastest, and as it needs least
            for name, one in row.items():
                if isinstance(one, dict) and "ratio" in one:
                    yield f"{case} {name} vs {_peer(one)}", 1 / one["ratio"], 1 / one["target"]
        else:
            yield f"{case} vs {_peer(row)}", row["ratio"], row.get("target")


def _peer(row: Mapping[str, Any]) -> str:
    """Return a row's peer without its settings, so that the name is stable between runs."""
    return row["peer"].partition(",")[0].partition(" ")[0]


def measure(program: str, folder: Path, options: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Run a program of a folder in its quick form; return its ratios, and targets, by name, more being better."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "rows.json"
        words = [sys.executable, str(folder / f"{program}.py"), "--quick", *options, "--json", str(file)]
        # The ratios are the processor's, also where there is a GPU.
        code = processes.run(words, check=False, env=os.environ | {"WHET_BENCH_DEVICE": "cpu"}).returncode
        if code or not file.is_file():
            raise SystemExit(f"guard: {program}.py ended with status {code}")
        rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    found = list(ratios(program, rows))
    targets = {name: target for name, _, target in found if target is not None}
    return {name: round(ratio, 3) for name, ratio, _ in found}, targets


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


def processor() -> str:
    """Name the processor, which a cloud's own name ("AMD EPYC") does not, and what its kernels compute with."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    facts = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))
    }
    numbers = [facts.get(name, "") for name in ("vendor_id", "cpu family", "model")]
    name = "{} family {} model {}".format(*numbers) if all(numbers) else cpu_name() or "unknown"
    return f"{name}, {build.instruction_set() or f'eager {torch.backends.cpu.get_cpu_capability().lower()}'}"


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Read what is committed: for each processor a date, the machine's facts, and ratios."""
    if not file.is_file():
        raise SystemExit(f"guard: {file} does not exist; write it with --update")
    try:
        sets = json.loads(file.read_text())["sets"]
        return {
            str(name): {**one, "rows": {str(row): float(value) for row, value in one["rows"].items()}}
            for name, one in sets.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        shape = '{"sets": {processor: {"rows": {name: ratio}}}}'
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
    name = processor()
    sets = read(arguments.file) if not arguments.update or arguments.file.is_file() else {}
    before: dict[str, float] = sets.get(name, {}).get("rows", {})
    fresh: dict[str, float] = {}
    targets: dict[str, float] = {}
    for program in arguments.programs:
        measured, aims = measure(program, arguments.folder, options)
        fresh |= measured
        targets |= aims
    if arguments.update:
        facts = {name: value for name, value in describe_environment().items() if name in FACTS}
        kept = {name: value for name, value in before.items() if name.split()[0] not in arguments.programs}
        sets[name] = {"date": time.strftime("%Y-%m-%d"), "machine": facts, "rows": kept | fresh}
        arguments.file.parent.mkdir(parents=True, exist_ok=True)
        arguments.file.write_text(json.dumps({"sets": sets}, indent=1) + "\n")
        print(f"guard: {len(fresh)} ratios of {name} written to {arguments.file}")
        return 0
    if name not in sets:
        known = ", ".join(sorted(sets)) or "none"
        print(
            f"guard: no ratios are committed for {name} (there are: {known}); compared with the targets instead"
        )
    committed = of_programs(before, arguments.programs) if name in sets else targets
    for program in sorted({name.split()[0] for name in fallen(committed, fresh)}):
        again, _ = measure(program, arguments.folder, options)
        fresh |= {name: max(value, fresh.get(name, value)) for name, value in again.items()}
    lost = fallen(committed, fresh)
    for row, text in lost.items():
        print(f"guard: fell: {row}: {text}")
    for row in fresh.keys() - committed.keys():
        print(f"guard: new, not committed yet: {row}: {fresh[row]:.2f}")
    print(f"guard: {len(committed) - len(lost)} of {len(committed)} ratios of {name} within {LIMIT:.0%}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
