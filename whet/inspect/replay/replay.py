"""`whet replay RUN --step N`: repeats a recorded step, and shows at which stage and by how much it differs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet.cli import Program
from whet.config import load_yaml
from whet.generate.policy import resolve_device
from whet.inspect.replay.step import Stage, TrainConfig, load_before, replay_step
from whet.telemetry.display import escape_controls
from whet.train.dpo import DPOConfig
from whet.train.optim.safety import set_deterministic
from whet.train.optim.step import Precision
from whet.train.record import Kind, Recorded, describe_machine, find_record, read_record, weights_before
from whet.train.rft import RFTConfig
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig
from whet.types import UserError

CONFIGS: dict[Kind, type[TrainConfig]] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "rft": RFTConfig,
    "dpo": DPOConfig,
}


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Repeats a recorded step on this machine, and shows where and by how much it differs."""

    run: str
    """Run folder of sft, rft, dpo or rl."""
    step: int = 0
    """The step, from 1; runs record the first one after each checkpoint, and every fault. 0 for the newest."""
    precision: Literal["recorded", Precision] = "recorded"
    """Precision of the step here."""
    token_budget: int = 0
    """Tokens per micro-batch here; 0 as recorded."""
    device: str = ""
    """Device here, such as cpu or cuda; empty for the one that the run's settings choose here."""
    num_threads: int = 0
    """CPU threads here; 0 as recorded."""
    init: str = ""
    """Location of the starting model, if it has moved; it is read for step 1, and as a frozen reference."""
    judge: bool = False
    """Query the judge again; otherwise its recorded scores are used."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        for name in ("step", "token_budget", "num_threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 0 or more")


def main(config: ReplayConfig) -> None:
    """Print the differences.

    Raises:
        UserError: If there is no such step, or it cannot be repeated.
        SystemExit: With status 1 if a stage differs by more than numerics explain.
    """
    replayed = replay(config)
    if config.json:
        print(json.dumps(_as_json(config, replayed), indent=1))
    else:
        _print(config, replayed)
    if any(stage.verdict == "DIFFERS" for stage in replayed.stages):
        raise SystemExit(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A repeated step.

    Attributes:
        recorded: The step.
        machine: The machine here, in the form of the record.
        stages: Its stages in order.
    """

    recorded: Recorded
    machine: Mapping[str, Any]
    stages: Sequence[Stage]


def replay(config: ReplayConfig) -> Replayed:
    """Repeat a recorded step; nothing is written to the run.

    Raises:
        UserError: If there is no such step, or it cannot be repeated.
    """
    run = Path(config.run)
    folder = find_record(run, config.step)
    recorded = read_record(folder)
    was = load_yaml(run / "config.yaml", CONFIGS[recorded.kind])
    here = _overridden(was, config, recorded)
    set_deterministic(here.safety.sameness(resolve_device(here.policy.device)))
    before = load_before(here, weights_before(run, recorded.step, folder), config.init)
    is_loose = {was.optim.precision, here.optim.precision} != {"float32"}
    stages = replay_step(recorded, here, before, is_loose=is_loose, ask_judge=config.judge)
    return Replayed(recorded=recorded, machine=describe_machine(before.policy), stages=stages)


def _overridden(was: TrainConfig, config: ReplayConfig, recorded: Recorded) -> TrainConfig:
    """Return the run's settings with this replay's overrides."""
    optim, policy = was.optim, was.policy
    threads = config.num_threads or int(recorded.machine["threads"])
    budget = config.token_budget or int(recorded.batches[0]["token_budget"])
    try:
        if config.precision != "recorded":
            optim = replace(optim, precision=config.precision)
        optim = replace(optim, token_budget=budget)
        policy = replace(policy, num_threads=threads, device=config.device or policy.device)
        return replace(was, optim=optim, policy=policy)
    except ValueError as error:
        raise UserError(f"this run cannot be replayed like this: {error}") from None


def conclusion(stages: Sequence[Stage]) -> str:
    """Return one line: the first stage that differs, and the first with non-finite numbers."""
    counted = [stage for stage in stages if stage.verdict != "skipped"]
    first = next((stage for stage in counted if stage.verdict != "exact"), None)
    beyond = next((stage for stage in counted if stage.verdict == "DIFFERS"), None)
    if first is None:
        text = "all stages bitwise equal"
    elif first is beyond:
        text = f"first difference at stage {_told(stages, first)}"
        text += f", beyond the tolerance of {first.tolerance:g}" if first.tolerance else ""
    else:
        text = (
            f"first difference at stage {_told(stages, first)}, within the tolerance of {first.tolerance:g}; "
        )
        text += f"beyond it first at stage {_told(stages, beyond)}" if beyond else "no stage beyond its own"
    bad = next((stage for stage in stages if not stage.is_finite), None)
    return f"{text}; not finite from stage {stages.index(bad) + 1} ({bad.name}) on" if bad else text


def _told(stages: Sequence[Stage], stage: Stage) -> str:
    return f"{stages.index(stage) + 1} ({stage.name}): {_difference(stage) or stage.here}"


def _difference(stage: Stage) -> str:
    """Return the difference as a number; '' if there is none."""
    if stage.difference is None or math.isinf(stage.difference):
        return ""
    return f"{stage.difference:.2g}"


def _as_json(config: ReplayConfig, replayed: Replayed) -> dict[str, Any]:
    def plain(value: float | None) -> float | str | None:
        return value if value is None or math.isfinite(value) else "inf"

    recorded, stages = replayed.recorded, replayed.stages
    rows = [
        {
            "stage": stage.name,
            "recorded": stage.recorded,
            "here": stage.here,
            "difference": plain(stage.difference),
            "mean_difference": plain(stage.mean),
            "tolerance": stage.tolerance,
            "verdict": stage.verdict,
            "is_finite": stage.is_finite,
            "note": stage.note,
        }
        for stage in stages
    ]
    return {
        "run": config.run,
        "step": recorded.step,
        "kind": recorded.kind,
        "is_fault": recorded.is_fault,
        "recorded_on": dict(recorded.machine),
        "replayed_on": dict(replayed.machine),
        "stages": rows,
        "conclusion": conclusion(stages),
    }


def _print(config: ReplayConfig, replayed: Replayed) -> None:
    """Print a table of the stages, and the conclusion."""
    console, recorded, stages = Console(), replayed.recorded, replayed.stages

    def line(text: str) -> None:
        console.print(Text(escape_controls(text)))

    line(f"{recorded.kind} {'fault at ' * recorded.is_fault}step {recorded.step} of {config.run}")
    for title, where in (("recorded on", recorded.machine), ("done here on", replayed.machine)):
        line(f"  {title:<13}{', '.join(f'{name} {value}' for name, value in where.items())}")
    table = Table(box=SIMPLE_HEAD)
    for name in ("stage", "recorded", "here", "difference", "verdict"):
        table.add_column(name)
    for number, stage in enumerate(stages, start=1):
        row = (f"{number} {stage.name}", stage.recorded, stage.here, _difference(stage), stage.verdict)
        table.add_row(*(Text(escape_controls(cell)) for cell in row))
    console.print(table)
    for number, stage in enumerate(stages, start=1):
        if stage.note:
            line(f"  {number} {stage.name}: {stage.note}")
    line(conclusion(stages))


PROGRAM = Program(config_class=ReplayConfig, main=main, positional="run")
