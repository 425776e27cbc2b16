"""`whet diagnose RECIPE`: examines one real training step by component, each with a verdict and reasons."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet.cli import Program
from whet.config import dump_yaml, to_dict
from whet.inspect.diagnose.model import environment, forward, parameters, tokenizer
from whet.inspect.diagnose.objective import objective
from whet.inspect.diagnose.speed import memory, speed
from whet.inspect.diagnose.step import ORDER, Component, Status, Subject, captured, show, worst
from whet.inspect.diagnose.switches import toggles
from whet.inspect.diagnose.update import gradients, optimizer
from whet.inspect.memory.plan import PlanConfig, read_recipe
from whet.report.page import json_for_script, render
from whet.storage.folder import dated, open_run
from whet.telemetry.display import escape_controls, open_display
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig
from whet.types import UserError

STYLES: dict[Status, str] = {"pass": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, kw_only=True)
class DiagnoseConfig:
    """One real step of a recipe, component by component: pass, warn or fail, with reasons.

    Exit status 1 if a component fails, 2 if the step could not run.
    """

    recipe: str
    """Recipe, .yaml file or run folder, as the program accepts it."""
    of: Literal["rl", "sft"] = "rl"
    """Program of the recipe."""
    set: tuple[str, ...] = ()
    """Fields of the recipe that are overridden; written as its own options are: --policy.init MODEL."""
    out: str = ""
    """Output folder for diagnose.log, .json and .html; empty for runs/diagnose-DATE-TIME."""
    repeats: int = 5
    """Timed steps."""
    rounds: int = 3
    """Rounds in which each switch (bfloat16, checkpointing ...) is timed, alternating with the unchanged recipe; 0 for
    none."""
    flops_tokens: int = 0
    """Also compute the MFU as scripts do that count 2 FLOPs per parameter and token of one forward pass, for this
    number of tokens; a warning if the pass read another number. 0 (default) disables."""
    compile: bool = False
    """Also try torch.compile as a switch; takes minutes."""

    def __post_init__(self) -> None:
        PlanConfig(recipe=self.recipe, of=self.of, set=self.set)
        if self.repeats < 1:
            raise ValueError(f"repeats = {self.repeats}: expected 1 or more")
        if self.flops_tokens < 0:
            raise ValueError(f"flops_tokens = {self.flops_tokens}: expected 0 or more")
        if self.rounds < 0:
            raise ValueError(f"rounds = {self.rounds}: expected 0 or more")
        if self.compile and not self.rounds:
            raise ValueError("compile is read with rounds only: leave it out, or give 1 or more rounds")


def main(config: DiagnoseConfig) -> None:
    """Run the step, examine it, and write diagnose.log, diagnose.json and diagnose.html.

    Raises:
        UserError: If the step cannot run.
        SystemExit: With status 1 when a component fails.
    """
    run = read_recipe(PlanConfig(recipe=config.recipe, of=config.of, set=config.set))
    console, title = Console(), f"{config.of} {config.recipe}"
    folder = Path(config.out or dated("diagnose"))
    num_components = 9 + bool(config.rounds)
    with open_display(f"diagnose · {title}", num_components, (), unit="component") as display:
        display.begin("load the recipe")
        subject = Subject(run)
        open_run(folder, dump_yaml(config), resumable=False)
        with (folder / "diagnose.log").open("w", encoding="utf-8", errors="backslashreplace") as file:
            num_begun = 0

            def say(text: str) -> None:
                nonlocal num_begun
                lines = escape_controls(text).splitlines()
                if lines[0].endswith(" ..."):
                    if num_begun:
                        display.update(num_begun, {})
                    num_begun += 1
                    display.begin(lines[0].removesuffix(" ..."))
                    if not console.is_terminal:
                        display.note(lines[0])
                file.writelines(f"{time.strftime('%F %T')}  {line}\n" for line in lines)
                file.flush()

            say(f"whet diagnose {title}\n{dump_yaml(run)}")
            components = examine(subject, config, say)
            verdict = worst([component.verdict for component in components.values()])
            display.update(num_components, {})
            say(f"verdict: {verdict}")
    content = {
        "verdict": verdict,
        "program": config.of,
        "recipe": config.recipe,
        "components": {name: component.to_json() for name, component in components.items()},
        "config": to_dict(run),
    }
    text = json.dumps(json.loads(json_for_script(content)), indent=1)
    (folder / "diagnose.json").write_text(text + "\n", encoding="ascii")
    page = render(
        "diagnose.html", title=f"Diagnosis of {title}", styles=("diagnose.css",), content=content, show=show
    )
    (folder / "diagnose.html").write_text(page, encoding="utf-8", errors="backslashreplace")
    _print(console, title, components)
    console.print(Text(f"verdict: {verdict}; {folder / 'diagnose.html'} shows everything"))
    if verdict == "fail":
        raise SystemExit(1)


def examine(subject: Subject, config: DiagnoseConfig, say: Callable[[str], None]) -> dict[str, Component]:
    """Examine every component of the first step.

    Args:
        subject: The recipe, loaded.
        config: Number of timed steps, and switches to try.
        say: Called with the next action.

    Returns:
        Components by name, in the order of the report.
    """
    found: dict[str, Component] = {}
    gc.freeze()  # otherwise every measurement would scan existing objects again

    def look(name: str, work: Callable[[], Component]) -> None:
        say(f"{name} ...")
        try:
            found[name] = work()
        except Exception as error:  # a faulty step may raise; that is the finding
            if isinstance(error, UserError):
                reason = str(error)
            else:
                reason = f"{type(error).__name__}: {error}"
                say(traceback.format_exc())
            subject.reset()
            found[name] = Component(name.capitalize())
            found[name].check("could be examined", False, " ".join(reason.split())[:300], "no error")
        say(as_text(found[name]))

    look("environment", lambda: environment(subject))
    look("tokenizer", lambda: tokenizer(subject))
    look("parameters", lambda: parameters(subject))
    look("memory", lambda: memory(subject))
    look("forward", lambda: forward(subject))
    look("objective", lambda: objective(subject))
    with captured(subject, apply=True) as updates:
        subject.prepare()()
    if not updates:
        raise UserError("the step makes no update: none of its tokens carries signal")
    look("optimizer", lambda: optimizer(subject, updates[0]))
    subject.reset()
    look("gradients", lambda: gradients(subject, updates[0]))
    updates.clear()
    found["optimizer"] = found.pop("optimizer")
    look("time", lambda: speed(subject, config.repeats, config.flops_tokens))
    if config.rounds:
        look("switches", lambda: toggles(subject, config.rounds, compiles=config.compile))
    gc.unfreeze()
    return found


def as_text(component: Component) -> str:
    """Format a component with all findings."""
    lines = [f"{component.name}: {component.verdict}; {component.headline}"]
    lines += [f"  {name}: {show(value)}" for name, value in component.facts.items()]
    lines += [f"  [{c.status}] {c.name}: {c.found}; expected {c.expected}" for c in component.checks]
    for title, rows in component.tables.items():
        lines += [f"  {title}", *(f"    {show(row)}" for row in rows)]
    return "\n".join(lines)


def _print(console: Console, title: str, components: Mapping[str, Component]) -> None:
    """Print a line for each component, and the reasons of failures and warnings, worst first."""
    table = Table(title=Text(f"one step of {title}"), box=SIMPLE_HEAD, title_justify="left")
    for name in ("component", "verdict", "found"):
        table.add_column(name, overflow="fold")
    for component in components.values():
        verdict = Text(component.verdict, style=STYLES[component.verdict])
        table.add_row(component.name, verdict, Text(escape_controls(component.headline)))
    console.print(table)
    for status in ORDER[:0:-1]:
        for component in components.values():
            for check in component.checks:
                if check.status == status:
                    reason = f"{component.name}: {check.name}: {check.found}; expected {check.expected}"
                    console.print(Text(status, style=STYLES[status]), Text(escape_controls(reason)))


PROGRAM = Program(
    config_class=DiagnoseConfig, main=main, positional="recipe", passes={"rl": RLConfig, "sft": SFTConfig}
)
