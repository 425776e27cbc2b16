"""Stand-ins for `nsys` and `ncu`: they refuse what the real ones refuse, and run the program that they are given.

From the documented command lines of Nsight Systems (User Guide: a long option has its value after an equal sign, a
short one after a space) and of Nsight Compute (CLI manual). Only options that a profile may use are known; any other is
an error.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

NSYS = {
    "trace": "(cuda|nvtx|osrt|cublas|cublas-verbose|cudnn|opengl|openacc|openmp|mpi|ucx|none)",
    "sample": "(process-tree|system-wide|cpu|none)",
    "cpuctxsw": "(process-tree|system-wide|none)",
    "capture-range": "(none|cudaProfilerApi|hotkey|nvtx)",
    "capture-range-end": r"(none|stop|stop-shutdown|repeat(:\d+)?|repeat-shutdown:\d+)",
    "cuda-graph-trace": "(graph|node)(:host-only)?",
    "force-overwrite": "(true|false)",
    "kill": "(none|sigkill|sigterm|[0-9]+)",
    "output": ".+",
}
NSYS_SHORT = {"t": "trace", "s": "sample", "c": "capture-range", "f": "force-overwrite", "o": "output"}
NCU_FLAGS = {"nvtx", "force-overwrite"}
NCU = {
    "clock-control": "(base|boost|none|reset)",
    "profile-from-start": "(on|off|yes|no|1|0)",
    "launch-count": r"[1-9]\d*",
    "launch-skip": r"\d+",
    "nvtx-include": r"([^/@]+@)?[^/]+(/[^/]+)*/?",
    "kernel-name": ".+",
    "export": ".+",
    "section": "(SpeedOfLight|ComputeWorkloadAnalysis|MemoryWorkloadAnalysis|Occupancy|LaunchStats|SchedulerStats|"
    "WarpStateStats|InstructionStats|SourceCounters|WorkloadDistribution|PmSampling|Nvlink|C2CLink)",
}
NCU_SHORT = {
    "f": "force-overwrite",
    "o": "export",
    "c": "launch-count",
    "s": "launch-skip",
    "k": "kernel-name",
}


def install(tool: str, folder: Path) -> Path:
    """Write an executable stand-in for `tool` (nsys or ncu) into a folder; return its path."""
    program = folder / tool
    folder.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{__file__}" {tool} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return program


class RefusedError(Exception):
    """What the real tool would say before it starts the program."""


def parse(tool: str, words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the options' values, and the command line of the program to be profiled.

    Raises:
        RefusedError: If the real tool would refuse the words.
    """
    words = list(words)
    if tool == "nsys":
        if words[:1] != ["profile"]:
            raise RefusedError(f"nsys: unknown command {words[:1]}")
        words.pop(0)
    known, short, flags = (NSYS, NSYS_SHORT, set()) if tool == "nsys" else (NCU, NCU_SHORT, NCU_FLAGS)
    found: dict[str, list[str]] = {}
    while words and words[0].startswith("-"):
        word = words.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        is_long = word.startswith("--")
        name = name if is_long else short.get(name, f"-{name}")
        if name in flags:
            if equals:
                raise RefusedError(f"{tool}: option '--{name}' does not take any arguments")
            value = ""
        elif name not in known:
            raise RefusedError(f"{tool}: unrecognised option '{word}'")
        elif not equals:
            if (is_long and tool == "nsys") or not words:
                raise RefusedError(f"{tool}: the required argument for option '{word}' is missing")
            value = words.pop(0)
        elif not is_long:
            raise RefusedError(f"{tool}: unrecognised option '{word}'")
        if name in known:
            values = value.split(",") if name == "trace" else [value]
            for one in values:
                if not re.fullmatch(known[name], one):
                    raise RefusedError(f"{tool}: illegal value {one!r} for --{name}")
        if name in found and name not in ("nvtx-include", "section"):
            raise RefusedError(f"{tool}: option '--{name}' cannot be specified more than once")
        found.setdefault(name, []).append(value)
    if not words:
        raise RefusedError(f"{tool}: no application was given")
    if "nvtx-include" in found and "nvtx" not in found:
        raise RefusedError("ncu: --nvtx-include requires --nvtx")
    if "capture-range-end" in found and found.get("capture-range", ["none"]) == ["none"]:
        raise RefusedError("nsys: --capture-range-end without --capture-range has no effect")
    for pattern in found.get("kernel-name", []):
        if pattern.startswith("regex:"):
            re.compile(pattern.removeprefix("regex:"))
    return found, words


def main(tool: str, words: list[str]) -> int:
    """Run the program as the tool does; the report is written where it captured something."""
    try:
        found, command = parse(tool, words)
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 1
    out = found.get("output" if tool == "nsys" else "export")
    report = Path(f"{out[0]}.{'nsys' if tool == 'nsys' else 'ncu'}-rep") if out else None
    if report is not None and not report.parent.is_dir():
        print(f"{tool}: {report.parent} does not exist", file=sys.stderr)
        return 1
    overwrites = found.get("force-overwrite", ["false"])[0] != "false"
    if report is not None and report.exists() and not overwrites:
        print(f"{tool}: {report} exists; use --force-overwrite", file=sys.stderr)
        return 1
    code = subprocess.run(command, check=False).returncode
    if report is not None:
        report.write_text(f"{os.environ.get('WHET_NVTX', '')}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
