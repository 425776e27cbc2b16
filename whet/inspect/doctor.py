"""`whet doctor sandbox`: attack the sandbox of this machine and show what held."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from whet.isolation.attacks import all_attacks
from whet.isolation.battery import Finding, run_battery
from whet.sandbox import Sandbox
from whet.telemetry.display import escape_controls
from whet.types import UserError

SHOWN_HOW = 60


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """A check of the sandbox: programs that try to get out, take too much, or cheat their tests."""

    backend: Literal["auto", "bwrap", "landlock"] = "auto"
    """The wall to attack; auto for the one that training would use here."""
    only: str = ""
    """Run only attacks with this text in their name or group."""
    num_workers: int = 0
    """Attacks at the same time; 0 for one per core."""

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ValueError(f"num_workers = {self.num_workers}: expected 0 or more")


RECIPES: Mapping[str, Callable[[], DoctorConfig]] = {"sandbox": DoctorConfig}


def main(config: DoctorConfig) -> None:
    """Print a table of attacks and what became of them.

    Raises:
        UserError: If this machine has no usable sandbox (exit status 2).
        SystemExit: With status 1 when an attack was not contained.
    """
    attacks = [
        attack for attack in all_attacks() if config.only in attack.name or config.only in attack.group
    ]
    if not attacks:
        groups = ", ".join(dict.fromkeys(attack.group for attack in all_attacks()))
        raise UserError(f"only = {config.only!r}: no such attack; expected a part of a name, or of {groups}")
    console = Console()
    start = time.monotonic()
    with Sandbox(backend=config.backend, num_workers=config.num_workers) as sandbox:
        console.print(f"sandbox: {sandbox.backend}, {len(attacks)} attacks")
        columns = (TextColumn("attacking"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task("", total=len(attacks))
            findings = run_battery(
                sandbox, attacks, lambda _: progress.advance(bar), num_workers=sandbox.num_workers
            )
        console.print(_table(findings))
        breaches = [finding for finding in findings if finding.breach]
        for finding in breaches:
            print(f"not contained: {finding.name} ({finding.group}): {_line(finding.breach)}")
        print(
            f"{sandbox.backend}: {len(findings)} checks, {len(breaches)} breaches, "
            f"{time.monotonic() - start:.1f} s"
        )
    if breaches:
        raise SystemExit(1)


def _line(text: str) -> str:
    return escape_controls(" ".join(text.split()))


def _table(findings: Sequence[Finding]) -> Table:
    """Lay the findings out; what a program wrote is shown escaped and never read as markup."""
    table = Table(box=SIMPLE_HEAD)
    for name, width in (("attack", 28), ("group", 12), ("contained", 9), ("ms", 5), ("how", None)):
        table.add_column(name, no_wrap=True, min_width=width, justify="right" if name == "ms" else "left")
    for finding in findings:
        how = _line(finding.breach or finding.how)
        table.add_row(
            finding.name,
            finding.group,
            Text("NO", style="bold red") if finding.breach else "yes",
            f"{1000 * finding.seconds:.0f}",
            Text(how if len(how) <= SHOWN_HOW else f"{how[: SHOWN_HOW - 1]}…"),
        )
    return table
