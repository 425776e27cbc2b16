"""`whet validate RECIPE`: fine-tunes, reinforces, evaluates before and after, probes; thresholds are fixed in
advance."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet.config import align, dump_yaml
from whet.eval import evaluate
from whet.eval.evaluate import EvalConfig, chosen_split, fitting_problems
from whet.eval.probe import probe
from whet.eval.probe.probe import ProbeConfig
from whet.generate.policy import load_policy
from whet.inspect.memory.room import check_room
from whet.inspect.validate.reported import Row, beside
from whet.inspect.validate.verdict import NEEDS, STAGES, Item, Status, ThresholdConfig, declared, judge_stage
from whet.report.page import render
from whet.rewards.base import build_rewards
from whet.storage.folder import check_folder, dated, open_run
from whet.tasks.base import load_task, told_of
from whet.telemetry.display import escape_controls
from whet.telemetry.provenance import write_environment
from whet.train import rl, sft
from whet.train.rl_config import RLConfig
from whet.train.session import Stopped
from whet.train.sft import SFTConfig
from whet.types import Problem, Task, UserError

BEFORE = "(the stage before)"
"""Placeholder for the model of an earlier stage in `rl.policy.init` and `eval.policy.init`."""
STYLES: dict[Status, str] = {
    "passed": "green",
    "missed": "bold red",
    "failed": "bold red",
    "skipped": "yellow",
}
MAX_REASON = 300
INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True)
class ValidateConfig:
    """A full pipeline, checked against thresholds that are fixed in advance."""

    out: str = ""
    """Output folder, with one folder per stage; empty for runs/validate-DATE-TIME."""
    sft: SFTConfig
    """Fine-tuning; its model is the starting point."""
    rl: RLConfig
    """Reinforcement of the fine-tuned model."""
    eval: EvalConfig
    """Evaluation of the fine-tuned and of the reinforced model."""
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    """Off-domain probe of fine-tuning's starting model (unless its weights were random), of the fine-tuned and
    of the reinforced model; `probe.transcript` is the prompt of the token-level transcript."""
    thresholds: ThresholdConfig = field(default_factory=ThresholdConfig)
    """Thresholds."""
    reported: Literal["", "gpt2-gsm8k"] = ""
    """Table of a source whose numbers are printed beside those of this run."""

    def __post_init__(self) -> None:
        for name in ("sft", "rl", "eval", "probe"):
            out = getattr(self, name).out
            if out:
                raise ValueError(f"{name}.out = {out!r}: every stage gets a folder in --out; leave it out")
        for name in ("rl", "eval"):
            init = getattr(self, name).policy.init
            if init != BEFORE:
                raise ValueError(
                    f"{name}.policy.init = {init!r}: expected {BEFORE!r}; the starting model is sft.policy.init"
                )
        if self.eval.tasks:
            raise ValueError("eval.tasks: one task is evaluated before and after; set eval.task instead")
        if self.probe.models:
            raise ValueError("probe.models: the stages' models are probed; leave it out")
        if not self.probe.transcript:
            raise ValueError("probe.transcript is empty: expected the prompt of the token-level transcript")


def plan(config: ValidateConfig) -> str:
    """Describe the stages and thresholds, without running anything."""
    rows = {f"{stage}: {what}": demand for stage, what, demand in declared(config.thresholds)}
    return "\n\n".join(
        [align("stages", dict(STAGES)), align("thresholds", rows) if rows else "no thresholds"]
    )


def check(config: ValidateConfig, resume: bool) -> None:
    """Find what the stages would stop at before their first steps; loads no weights and creates nothing.

    Raises:
        UserError: As they would.
    """
    told = _inspect(config)
    if config.out and not resume:
        check_folder(Path(config.out), resumable=False)
    print("".join(f"# {line}\n" for line in told), end="")
    print("# checked: model, data, prompts, rewards and folder; the stages would start")


def _inspect(config: ValidateConfig) -> list[str]:
    """Check what the stages read: the starting model, their data, rewards and prose; return what is to be known.

    Raises:
        UserError: With the first that is missing or does not fit.
    """
    measured = chosen_split(config.eval.split, config.eval.task, config.eval.policy)
    wanted = ((config.sft.task, "train"), (config.rl.task, "train"), (config.eval.task, measured))
    found: list[tuple[Task, list[Problem]]] = []
    for own, split in wanted:
        task = load_task(own)
        if not (problems := task.problems(split)):
            raise UserError(f"task {own.name} has no problems in its split {split!r}; choose another task")
        found.append((task, problems))
    policy = load_policy(config.sft.policy, seed=config.sft.seed, weights=False)
    told: list[str] = []
    for (task, problems), room in zip(found, (1, config.rl.sampling.max_new_tokens, 1), strict=True):
        fitting_problems(policy, problems, min_new_tokens=room)
        told += [line for line in told_of(task, len(problems)) if line not in told]
    build_rewards(config.rl.rewards, policy.schema, found[1][0], config.rl.reward)
    probe.read_text(config.probe.text)
    policy_of_rl = replace(config.rl, policy=replace(config.sft.policy, max_rows=config.rl.policy.max_rows))
    return told + [f"warning: {line}" for run in (config.sft, policy_of_rl) for line in check_room(run)]


def main(config: ValidateConfig) -> None:
    """Run the stages, judge them, and write validation.json, validation.md and validation.html.

    Raises:
        UserError: If an input is missing or does not fit (exit status 2); nothing is written.
        SystemExit: With status 1 if a threshold is missed or a stage fails.
        KeyboardInterrupt: After Ctrl-C, once the report of the finished stages is written.
    """
    _inspect(config)
    folder = Path(config.out or dated("validate"))
    open_run(folder, dump_yaml(config), resumable=False)
    write_environment(folder)
    console = Console()
    console.print(Text(plan(config)))
    items: list[Item] = []
    try:
        for number, (stage, run) in enumerate(_stages(config, folder).items(), start=1):
            limit = config.thresholds.seconds.get(stage)
            most = "" if limit is None else f", at most {limit:g} s"
            console.rule(f"{number}/{len(STAGES)} {STAGES[stage]}{most}")
            new = _run_stage(stage, run, folder, config.thresholds, items)
            items += new
            _print(console, "", new)
    except BaseException:  # Ctrl-C, or a bug: the report must not look finished
        done = {item.stage for item in items}
        for stage in [stage for stage in STAGES if stage not in done]:
            is_first = items[-1].reason != INTERRUPTED if items else True
            items.append(Item(stage, STAGES[stage], "failed" if is_first else "skipped", reason=INTERRUPTED))
        raise
    finally:
        _write(folder, items, config)
        _print(console, f"validation: {verdict(items)}", items)
        _print_reported(console, beside(config.reported, folder))
        console.print(Text(f"report: {folder / 'validation.html'}"))
    if verdict(items) != "passed":
        raise SystemExit(1)


def verdict(items: Sequence[Item]) -> Status:
    """Return the worst status: failed, then missed, then skipped, then passed."""
    order: tuple[Status, ...] = ("failed", "missed", "skipped")
    for status in order:
        if any(item.status == status for item in items):
            return status
    return "passed"


def _stages(config: ValidateConfig, folder: Path) -> dict[str, Callable[[], None]]:
    """Return each stage's function: the programs themselves, on the folders of earlier stages."""
    place = {stage: str(folder / stage) for stage in STAGES}

    def rl_main() -> None:
        policy = replace(config.rl.policy, init=place["sft"])
        rl.main(replace(config.rl, out=place["rl"], policy=policy))

    def eval_main(out: str, model: str) -> None:
        policy = replace(config.eval.policy, init=place[model])
        evaluate.main(replace(config.eval, out=place[out], policy=policy))

    base = [config.sft.policy.init] if config.sft.policy.init else []
    models = (*base, place["sft"], place["rl"])
    return {
        "sft": lambda: sft.main(replace(config.sft, out=place["sft"])),
        "rl": rl_main,
        "eval_sft": lambda: eval_main("eval_sft", "sft"),
        "eval_rl": lambda: eval_main("eval_rl", "rl"),
        "probe": lambda: probe.main(replace(config.probe, out=place["probe"], models=models, transcript="")),
        "transcript": lambda: probe.main(
            replace(config.probe, out=place["transcript"], models=(place["rl"],))
        ),
    }


def _run_stage(
    stage: str, run: Callable[[], None], folder: Path, thresholds: ThresholdConfig, earlier: Sequence[Item]
) -> list[Item]:
    """Run one stage and judge it; an error becomes an item, so that independent stages continue."""
    title, needed = STAGES[stage], NEEDS.get(stage, "")
    if any(item.stage == needed and item.name == STAGES[needed] and item.seconds is None for item in earlier):
        return [Item(stage, title, "skipped", reason=f"needs the model of {STAGES[needed]}")]
    limit = thresholds.seconds.get(stage)
    demand = "" if limit is None else f"<= {limit:g} s"
    began = time.perf_counter()
    try:
        run()
        seconds = time.perf_counter() - began
        checks = judge_stage(stage, folder, thresholds)
    except Stopped:  # a signal: the user's wish, and no finding; the stages after it must not start
        raise
    except (Exception, SystemExit) as error:  # any failure of a program is a finding
        (folder / f"{stage}.error.txt").write_text(
            traceback.format_exc(), encoding="utf-8", errors="backslashreplace"
        )
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = " ".join(f"{kind}{error}".split())
        return [Item(stage, title, "failed", threshold=demand, reason=escape_controls(reason)[:MAX_REASON])]
    status: Status = "missed" if limit is not None and seconds > limit else "passed"
    return [Item(stage, title, status, seconds, threshold=demand), *checks]


def _print(console: Console, title: str, items: Sequence[Item]) -> None:
    """Print items as a table."""
    table = Table(title=Text(title) if title else None, box=SIMPLE_HEAD, title_justify="left")
    for name in ("item", "status", "duration", "measured", "threshold"):
        table.add_column(name, justify="right" if name == "duration" else "left", overflow="fold")
    for item in items:
        name, *cells = _cells(item)
        style = "bold" if _is_stage(item) else ""
        table.add_row(
            Text(name, style=style), Text(cells[0], style=STYLES[item.status]), *map(Text, cells[1:])
        )
    console.print(table)


def _print_reported(console: Console, rows: Sequence[Row]) -> None:
    """Print what a source reports beside what was measured; nothing without rows."""
    if not rows:
        return
    table = Table(title="a source's numbers beside this run's", box=SIMPLE_HEAD, title_justify="left")
    for name in ("", "step", "reported", "this run"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(row.title, *_reported_cells(row))
    console.print(table)


def _reported_cells(row: Row) -> list[str]:
    measured = "-" if row.measured is None else f"{row.measured:.4f}"
    return [f"{row.step:,}", f"{row.said:.4f}", measured]


def _is_stage(item: Item) -> bool:
    return item.name == STAGES[item.stage]


def _cells(item: Item) -> list[str]:
    """Return name, status, duration, measured value (or the reason why not) and threshold."""
    name = item.name if _is_stage(item) else f"  {item.name}"
    took = "" if item.seconds is None else f"{item.seconds:.1f} s"
    return [name, item.status, took, escape_controls(item.reason or item.measured), item.threshold]


def _write(folder: Path, items: Sequence[Item], config: ValidateConfig) -> None:
    """Write the report in three formats."""
    counts = {status: sum(item.status == status for item in items) for status in STYLES}
    seconds = sum(item.seconds or 0.0 for item in items)
    content: dict[str, Any] = {"verdict": verdict(items), "seconds": round(seconds, 1), "counts": counts}
    content["thresholds"] = [list(row) for row in declared(config.thresholds)]
    content["items"] = [asdict(item) for item in items]
    reported = beside(config.reported, folder)
    content["reported"] = [asdict(row) for row in reported]
    (folder / "validation.json").write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")
    (folder / "validation.md").write_text(
        _markdown(folder, items, reported), encoding="utf-8", errors="backslashreplace"
    )
    evals = {
        name: _read(folder / f"eval_{stage}/eval.json")
        for name, stage in (("before", "sft"), ("after", "rl"))
    }
    page = render(
        "validate.html",
        title=f"Validation of {folder.resolve().name}",
        content=content,
        stages=STAGES,
        evals={name: result["metrics"] for name, result in evals.items() if result},
        probes=(_read(folder / "probe/probe.json") or {}).get("models", []),
        transcripts=_read(folder / "transcript/transcript.json") or [],
        links=[f"{name}/report.md" for name in STAGES if (folder / name / "report.md").is_file()],
    )
    (folder / "validation.html").write_text(page, encoding="utf-8", errors="backslashreplace")


def _markdown(folder: Path, items: Sequence[Item], reported: Sequence[Row]) -> str:
    lines = [f"# Validation of {folder.resolve().name}: {verdict(items)}", ""]
    lines += ["| item | status | duration | measured | threshold |", "|---|---|--:|---|---|"]
    for item in items:
        name, *cells = (cell.replace("|", "\\|") for cell in _cells(item))
        lines.append(f"| {f'**{name}**' if _is_stage(item) else name} | {' | '.join(cells)} |")
    if reported:
        lines += ["", "## A source's numbers beside this run's", ""]
        lines += ["| | step | reported | this run |", "|---|--:|--:|--:|"]
        lines += [f"| {row.title} | {' | '.join(_reported_cells(row))} |" for row in reported]
    return "\n".join([*lines, ""])


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
