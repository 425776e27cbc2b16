"""`whet profile RECIPE`: time and memory of a step by phase, and commands for NVIDIA's tools."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from whet import processes
from whet.cli import Program, passed_words
from whet.generate.policy import resolve_device
from whet.inspect.memory.plan import PlanConfig, read_recipe
from whet.inspect.profile.trace import Traced, Tracer
from whet.report.page import render
from whet.telemetry.spans import NAMES, STEP, VARIABLE, Listener, Range, Recorder, TraceRanges, listening
from whet.telemetry.trackers import TrackConfig
from whet.train import rl, sft
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig
from whet.types import UserError

# The page of a profile: steps as bars of their phases, and tables.

REST = "rest of the step"
NUM_COLOURS = 6
OTHERS = "everything else"
Part = dict[str, Any]


def write_page(path: Path, content: Mapping[str, Any]) -> None:
    """Write the page for the content from `describe`."""
    bars, legend = stacked(content["phases"], content["steps"])
    title = f"Profile of {content['program']} {content['recipe']}"
    page = render(
        "profile.html",
        title=title,
        styles=("profile.css",),
        content=content,
        bars=bars,
        legend=legend,
        names=NAMES,
        rest=REST,
        others=OTHERS,
        mean=sum(content["steps"]) / len(content["steps"]),
    )
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def stacked(
    phases: Sequence[Mapping[str, Any]], steps: Sequence[float]
) -> tuple[list[list[Part]], list[Part]]:
    """Split each step into its phases, in order.

    Args:
        phases: Phases as JSON values, the step itself first.
        steps: Seconds of each step.

    Returns:
        For each step its parts {name, colour, x, width, seconds}, x and width in percent of the longest step; and the
        legend {name, colour, seconds}, with seconds of all steps. The longest phases have their own colour.
    """
    outer = [phase for phase in phases if len(phase["path"]) == 2 and phase["share"] is not None]
    longest = sorted(outer, key=lambda phase: -phase["seconds"])[: NUM_COLOURS - 1]
    series = [(phase["path"][-1], phase["by_step"]) for phase in outer if phase in longest]
    rest = [seconds - sum(values[step] for _, values in series) for step, seconds in enumerate(steps)]
    series.append((OTHERS, rest))
    scale = 100 / max(steps)
    bars: list[list[Part]] = []
    for step in range(len(steps)):
        x, bar = 0.0, []
        for colour, (name, values) in enumerate(series, start=NUM_COLOURS + 1 - len(series)):
            width = scale * values[step]
            part = {"name": name, "colour": colour, "x": x, "width": width, "seconds": values[step]}
            bar.append(part)
            x += width
        bars.append(bar)
    legend = [
        {**part, "seconds": sum(bar[place]["seconds"] for bar in bars)} for place, part in enumerate(bars[0])
    ]
    return bars, legend


NUM_SHOWN = 15
"""Number of printed operators and kernels; the page shows more, profile.json all."""

GEMMS = "regex:gemm|nvjet|xmma|cutlass"
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats")
UNTRAINED = (
    "no sample of the timed steps had an advantage, so nothing was trained: profile a model that is sometimes right, "
    "or with --control random_reward"
)
FILTERS = {"rl": ("policy_loss_backward",), "sft": ("forward", "backward")}
TOOLS = {"nsys": "Nsight Systems", "ncu": "Nsight Compute"}
VARIANTS = {
    "recipe": (),
    "overlap": ("overlap.mode=async", "off_policy.staleness=1"),
    "grpo": ("algo=grpo",),
    "dr_grpo": ("algo=dr_grpo",),
    "dapo": ("algo=dapo",),
}
"""What `--variants` profiles: the recipe as it is, with overlapped rollouts, and with each of three algorithms."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Time and memory of a recipe's steps by phase, with a trace for Perfetto and a page."""

    recipe: str
    """Recipe, .yaml file or run folder, as the program accepts it."""
    of: Literal["rl", "sft"] = "rl"
    """Program of the recipe."""
    set: tuple[str, ...] = ()
    """Fields of the recipe that are overridden; written as its own options are: --policy.init MODEL."""
    warmup: int = 2
    """Warm-up steps."""
    steps: int = 3
    """Timed steps; one more is traced."""
    variants: bool = False
    """Profile the recipe as it is, with overlapped rollouts, and as GRPO, Dr. GRPO and DAPO, side by side."""
    tool: Literal["", "nsys", "ncu"] = ""
    """Run these steps under Nsight Systems or Nsight Compute instead."""
    out: str = ""
    """Folder; results go to profiles/ in it. Empty: the recipe's, with -profile appended."""

    def __post_init__(self) -> None:
        for name, least in (("warmup", 0), ("steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}: expected {least} or more")
        if self.variants and self.of != "rl":
            raise ValueError(f"variants with of = {self.of}: they are of rl only; leave one of the two out")


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a step; all numbers are means over the timed steps.

    Attributes:
        path: Names from the step's to its own.
        calls: Number of calls.
        seconds: Its duration, including nested phases.
        own_seconds: Its duration without them.
        share: Its share of the step's time; None if it ran in parallel, in another thread.
        peak_bytes: Peak of live tensor bytes in the traced step; None if that step had no such phase.
        by_step: Seconds in each timed step.
    """

    path: tuple[str, ...]
    calls: float
    seconds: float
    own_seconds: float
    share: float | None
    peak_bytes: int | None
    by_step: list[float]


class _EnoughError(Exception):
    """All requested steps are done."""


class _Steps:
    """Skips some steps, times some, traces one, and then ends the run before its next step."""

    def __init__(self, device: torch.device, warmup: int, steps: int) -> None:
        self.recorder, self.tracer = Recorder(device), Tracer(device)
        self._begin, self._end, self._count = warmup, warmup + steps, 0
        self._listener: Listener | None = None

    def enter(self, name: str) -> None:
        """Forward a range to this step's listener."""
        if name == STEP and self._count == self._begin:
            self._listener = self.recorder
        if name == STEP and self._count == self._end:
            self.tracer.start()
            self._listener = TraceRanges()
        if name == STEP and self._count > self._end:
            raise _EnoughError
        if self._listener is not None:
            self._listener.enter(name)

    def exit(self, name: str) -> None:
        """Forward its end."""
        if self._listener is not None:
            self._listener.exit(name)
        if name == STEP:
            self._count += 1
            if self._count > self._end:
                self.tracer.stop()
                self._listener = None


def main(config: ProfileConfig) -> None:
    """Run the steps, write the files and print the tables; with `variants` for each, and one table of all."""
    if not config.variants:
        _ = _profile(config, _read(config))
        return
    # All are read before the first is run: a conflict of the last does not cost the time of the others.
    asked: list[tuple[str, ProfileConfig, RLConfig | SFTConfig]] = []
    for name, words in VARIANTS.items():
        own = replace(config, set=(*config.set, *words), variants=False)
        try:
            run = _read(own)
        except UserError as error:
            raise UserError(f"variant {name}: {error}") from error
        asked.append((name, own, run))
    out = _folder(config, asked[0][2])
    found: dict[str, dict[str, Any]] = {}
    for number, (name, own, run) in enumerate(asked, start=1):
        print(f"variant {number} of {len(asked)}: {name}", flush=True)
        content = _profile(replace(own, out=str(out / name)), run)
        if content is not None:
            found[name] = content
        print(flush=True)
    if found:
        path = out / "variants.json"
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="ascii")
        print(f"{side_by_side(found)}\n\n{out}: variants.json, and a folder for each variant")


def _read(config: ProfileConfig) -> RLConfig | SFTConfig:
    run = read_recipe(PlanConfig(recipe=config.recipe, of=config.of, set=config.set))
    if run.num_steps <= config.warmup + config.steps:
        raise UserError(
            f"num_steps = {run.num_steps} of {config.of} {config.recipe}: {config.warmup} steps of warm-up, "
            f"{config.steps} timed and 1 traced need {config.warmup + config.steps + 1}; lower --warmup or --steps"
        )
    return run


def _folder(config: ProfileConfig, run: RLConfig | SFTConfig) -> Path:
    return Path(config.out or f"{run.out.rstrip('/')}-profile")


def _profile(config: ProfileConfig, run: RLConfig | SFTConfig) -> dict[str, Any] | None:
    """Profile one recipe and return what `describe` does; None if NVIDIA's tool ran the steps."""
    out = _folder(config, run)
    folder = out / "profiles"
    commands = tool_commands(config, out, tracks=bool(run.track.to))
    if config.tool:
        run_tool(config.tool, commands[config.tool], config, folder)
        return None
    folder.mkdir(parents=True, exist_ok=True)
    ranges, traced = take(run, config.warmup, config.steps, folder / "trace.json.gz")
    content = describe(config, run, phases(ranges, traced.peaks), traced, commands)
    (folder / "profile.json").write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")
    write_page(folder / "profile.html", content)
    print(tables(content))
    for name, text in content["commands"].items():
        print(f"\n{TOOLS[name]} (or --tool {name}):\n{text}")
    print(f"\n{folder}: profile.html, profile.json, trace.json.gz (open it in https://ui.perfetto.dev)")
    return content


def take(run: RLConfig | SFTConfig, warmup: int, steps: int, trace: Path) -> tuple[list[Range], Traced]:
    """Run a recipe's first steps by its program, in a temporary folder.

    Args:
        run: The recipe. Only its output folder is changed, and trackers are disabled.
        warmup: Warm-up steps.
        steps: Steps that are timed.
        trace: File for the trace of the step after them.

    Returns:
        The ranges of the timed steps, and the trace's results.
    """
    listener = _Steps(resolve_device(run.policy.device), warmup, steps)
    with tempfile.TemporaryDirectory() as folder, listening(listener), suppress(_EnoughError):
        run = replace(run, out=str(Path(folder) / "run"), track=TrackConfig())
        _ = rl.train(run) if isinstance(run, RLConfig) else sft.train(run)
    return listener.recorder.ranges(), listener.tracer.write(trace)


def phases(ranges: Sequence[Range], peaks: Mapping[tuple[str, ...], int]) -> list[Phase]:
    """Add up ranges by phase: each is followed by its nested ones, in order.

    Args:
        ranges: Ranges of whole steps.
        peaks: Peak of live bytes, by path.
    """
    num_steps = 1 + max(item.step for item in ranges)
    by_step: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0.0] * num_steps)
    calls: dict[tuple[str, ...], int] = defaultdict(int)
    inside: dict[tuple[str, ...], float] = defaultdict(float)
    for item in ranges:
        by_step[item.path][item.step] += item.seconds
        calls[item.path] += 1
        inside[item.path[:-1]] += item.seconds
    step_seconds = sum(by_step[STEP,])
    children: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
    for path in by_step:
        children[path[:-1]].append(path)
    found: list[Phase] = []

    def add(path: tuple[str, ...]) -> None:
        seconds = sum(by_step[path])
        found.append(
            Phase(
                path,
                calls[path] / num_steps,
                seconds / num_steps,
                (seconds - inside[path]) / num_steps,
                seconds / step_seconds if path[0] == STEP else None,
                peaks.get(path),
                by_step[path],
            )
        )
        for child in children[path]:
            add(child)

    for root in sorted(children[()], key=lambda path: path != (STEP,)):
        add(root)
    return found


def has_trained(found: Sequence[Phase]) -> bool:
    """Say whether a timed step trained on anything: not where no sample had an advantage."""
    return any(phase.path[-1] == "forward" and "policy_loss_backward" in phase.path for phase in found)


def describe(
    config: ProfileConfig,
    run: RLConfig | SFTConfig,
    found: Sequence[Phase],
    traced: Traced,
    commands: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Return all results as JSON values."""
    device = resolve_device(run.policy.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    threads = torch.get_num_threads()
    return {
        "program": config.of,
        "recipe": config.recipe,
        "set": list(config.set),
        "machine": f"{name}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}, {run.optim.precision}",
        "warmup": config.warmup,
        "note": "" if config.of != "rl" or has_trained(found) else UNTRAINED,
        "steps": found[0].by_step,
        "traced_seconds": traced.seconds,
        "gpu_busy": traced.busy,
        "phases": [asdict(phase) for phase in found],
        "operators": [asdict(work) for work in traced.operators],
        "kernels": [asdict(work) for work in traced.kernels],
        "commands": {
            tool: f"{VARIABLE}={_window(config)} {shlex.join(words)}" for tool, words in commands.items()
        },
    }


def tables(content: Mapping[str, Any]) -> str:
    """Format phases, operators and kernels as text."""
    steps = content["steps"]
    mean = statistics.fmean(steps)
    lines = [
        f"whet {content['program']} {content['recipe']} on {content['machine']}",
        f"{len(steps)} steps after {content['warmup']} of warm-up: {mean:.4f} s per step ({min(steps):.4f} to "
        f"{max(steps):.4f}); traced, {content['traced_seconds']:.4f} s",
        *([f"warning: {content['note']}"] if content["note"] else []),
        "",
        f"{'phase':<40}{'calls':>9}{'seconds':>11}{'share':>8}{'own':>11}{'memory, MiB':>14}",
    ]
    for phase in content["phases"]:
        depth = len(phase["path"]) - 1
        share = "beside" if phase["share"] is None else f"{phase['share']:.1%}"
        peak = "" if phase["peak_bytes"] is None else f"{phase['peak_bytes'] / 2**20:,.1f}"
        lines.append(
            f"{'  ' * depth + phase['path'][-1]:<40}{phase['calls']:>9,.4g}{phase['seconds']:>11.4f}{share:>8}"
            f"{phase['own_seconds']:>11.4f}{peak:>14}"
        )
    rest = content["phases"][0]["own_seconds"]
    lines.append(f"{'  ' + REST:<40}{'':>9}{rest:>11.4f}{rest / mean:>8.1%}")
    for title, works in (("operators", content["operators"]), ("GPU kernels", content["kernels"])):
        if works:
            lines += ["", f"{title + ' of the traced step':<62}{'calls':>9}{'seconds':>11}{'share':>8}"]
            lines += [
                f"{work['name'][:60]:<62}{work['calls']:>9,}{work['seconds']:>11.4f}"
                f"{work['seconds'] / content['traced_seconds']:>8.1%}"
                for work in works[:NUM_SHOWN]
            ]
    if content["gpu_busy"] is None:
        share = sum(work["seconds"] for work in content["operators"]) / content["traced_seconds"]
        lines += [
            "",
            f"operators take {share:.1%} of the traced step; the rest is Python, and native code outside operators",
        ]
    else:
        lines += ["", f"the GPU is busy in {content['gpu_busy']:.1%} of the traced step"]
    return "\n".join(lines)


def side_by_side(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the seconds per step of each phase, a column for each profile.

    A phase stands below the one that it is nested in, even if only a later profile has it.

    Args:
        found: Contents from `describe`, by name; the first is what the others are compared with.
    """
    seconds = {
        name: {tuple(phase["path"]): phase["seconds"] for phase in content["phases"]}
        for name, content in found.items()
    }
    order: dict[tuple[str, ...], None] = {path: None for row in seconds.values() for path in row}
    lines = [f"{'seconds per step':<28}" + "".join(f"{name:>10}" for name in found)]

    def add(parent: tuple[str, ...]) -> None:
        for path in order:
            if path[:-1] == parent:
                cells = (f"{row[path]:.4f}" if path in row else "-" for row in seconds.values())
                lines.append(
                    f"{'  ' * len(parent) + path[-1]:<28}" + "".join(f"{cell:>10}" for cell in cells)
                )
                add(path)

    add(())
    steps = [row[STEP,] for row in seconds.values()]
    lines.append(
        f"{'step, relative to ' + next(iter(found)):<28}" + "".join(f"{s / steps[0]:>10.2f}" for s in steps)
    )
    peaks = [max((p["peak_bytes"] or 0 for p in c["phases"]), default=0) for c in found.values()]
    lines.append(f"{'peak memory, MiB':<28}" + "".join(f"{peak / 2**20:>10,.1f}" for peak in peaks))
    return "\n".join(lines)


def tool_commands(config: ProfileConfig, out: Path, *, tracks: bool) -> dict[str, list[str]]:
    """Return the command lines that run the same steps under NVIDIA's tools, by tool.

    They run the program one step longer than the capture: its last step validates and saves.

    Args:
        config: The profiled recipe.
        out: Its folder.
        tracks: Whether the recipe sends its metrics to trackers.
    """
    own = {"num_steps", "out"}
    kept = [item for item in config.set if re.split(r"[= ]", item)[0].replace("-", "_") not in own]
    overrides = passed_words(kept)
    folder = out / "profiles"

    def run(tool: str) -> list[str]:
        names = (
            out / (f"{tool}-run" if number == 1 else f"{tool}-run-{number}") for number in range(1, 10_000)
        )
        free = next(path for path in names if not path.exists())
        words = ["whet", config.of, config.recipe, *overrides, f"--out={free}"]
        words.append(f"--num-steps={config.warmup + config.steps + 1}")
        return words + (["--track.to"] if tracks else [])

    nsys = "nsys profile -t cuda,nvtx,osrt --sample=none --cpuctxsw=none --capture-range=cudaProfilerApi"
    ncu = "ncu --nvtx --clock-control none --profile-from-start off --launch-count 20"
    filters = [word for name in FILTERS[config.of] for word in ("--nvtx-include", f"{name}/")]
    sections = [word for name in SECTIONS for word in ("--section", name)]
    return {
        "nsys": [
            *nsys.split(),
            *("--capture-range-end=stop", "--force-overwrite=true", "-o", str(folder / "nsys")),
            *run("nsys"),
        ],
        "ncu": [
            *ncu.split(),
            *filters,
            *("--kernel-name", GEMMS, *sections, "--force-overwrite", "-o", str(folder / "ncu")),
            *run("ncu"),
        ],
    }


def run_tool(tool: str, command: Sequence[str], config: ProfileConfig, folder: Path) -> None:
    """Run a command line of `tool_commands` and print where its report is.

    Raises:
        UserError: If the tool or a GPU is missing, or it fails.
    """
    program = shutil.which(tool)
    if program is None:
        raise UserError(
            f"--tool {tool}: not found on PATH; install {TOOLS[tool]} (developer.nvidia.com), or leave it out"
        )
    if not torch.cuda.is_available():
        raise UserError(
            f"--tool {tool}: this PyTorch sees no NVIDIA GPU; leave it out, the trace works on a CPU"
        )
    folder.mkdir(parents=True, exist_ok=True)
    place = command.index("whet")
    words = [program, *command[1:place], sys.executable, "-m", *command[place:]]
    code = processes.run(words, env=os.environ | {VARIABLE: _window(config)}, check=False).returncode
    if code:
        raise UserError(f"--tool {tool}: it ended with status {code}; the command was: {shlex.join(command)}")
    found = sorted(str(path) for path in folder.glob(f"{tool}.*"))
    print(f"{TOOLS[tool]}: {', '.join(found) or 'no report was written'}")


def _window(config: ProfileConfig) -> str:
    return f"{config.warmup}:{config.steps}"


PROGRAM = Program(
    config_class=ProfileConfig, main=main, positional="recipe", passes={"rl": RLConfig, "sft": SFTConfig}
)
