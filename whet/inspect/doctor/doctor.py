"""`whet doctor`: times the kernels, attacks the sandbox, checks training for determinism, examines a
hanging run, or checks the machines of a job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from whet.cli import Program
from whet.config import show
from whet.generate.kernel_speed import measure, small
from whet.inspect.doctor.cluster import check_cluster, refuse_ranks
from whet.inspect.doctor.determinism import check_determinism
from whet.inspect.doctor.hang import check_hang
from whet.kernels import dispatch
from whet.kernels.cpu import build
from whet.model.config import ModelConfig
from whet.ranks.collectives import world_size
from whet.ranks.ray import ClusterConfig, run_group
from whet.sandbox.attacks.attacks import all_attacks
from whet.sandbox.attacks.battery import Finding, run_battery
from whet.sandbox.programs import Sandbox
from whet.telemetry.display import one_line
from whet.types import UserError

SHOWN_HOW = 60
WIDTHS = (128, 512, 1024)
"""Model widths for timing the kernels."""
READ = {
    "kernels": (),
    "sandbox": ("backend", "only", "num_workers"),
    "determinism": ("of",),
    "hang": (),
    "cluster": ("folder", "ranks", "address"),
}
"""The fields that each check reads."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Checks: 'kernels', 'sandbox' (attacks this machine's), 'determinism' (trains twice), 'hang RUN' (examines a run),
    'cluster' (the machines of a job).

    Exit status 1 if the check found a problem, 2 if it could not run.
    """

    check: tuple[str, ...] = ()
    """kernels: the C++ kernels against PyTorch on this machine. sandbox: programs that try to escape, take too much, or
    cheat their tests. determinism [RECIPE]: three training steps of a recipe, or of a small form of the demo's, twice,
    compared bit by bit. hang RUN [RUN ...]: what the ranks
    of a run are doing, and where a hung one stopped. cluster: ranks, links, clocks, versions and a shared folder, under
    torchrun or with --ranks."""
    backend: Literal["auto", "bwrap", "landlock"] = "auto"
    """sandbox: the backend to attack; auto for the one that training would use here."""
    only: str = ""
    """sandbox: run only attacks with this text in their name or group."""
    num_workers: int = 0
    """sandbox: concurrent attacks; 0 for one per core."""
    of: Literal["rl", "sft", "dpo"] = "rl"
    """determinism: the program of the recipe."""
    folder: str = "runs"
    """cluster: the folder that all ranks should see."""
    ranks: int = 0
    """cluster: ranks for Ray to start; 0 where torchrun has started them."""
    address: str = ""
    """cluster: Ray cluster to join, with ranks; empty for RAY_ADDRESS, or a local one."""

    def __post_init__(self) -> None:
        name = self.check[0] if self.check else ""
        if name not in READ:
            raise ValueError(
                f"check = {show(name)}: expected kernels, sandbox, determinism, cluster, or hang RUN"
            )
        if name == "hang" and len(self.check) == 1:
            raise ValueError(
                "check = hang: expected the folder of a run, as in 'whet doctor hang runs/demo-rl'"
            )
        if len(self.check) > {"hang": 1 << 20, "determinism": 2}.get(name, 1):
            raise ValueError(f"check = {show(' '.join(self.check))}: expected nothing after {name}")
        for field in fields(self):
            if field.name not in ("check", *READ[name]) and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name} is not read by the check {name}; leave it out")
        for field in ("num_workers", "ranks"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} = {getattr(self, field)}: expected 0 or more")
        if self.address and not self.ranks:
            raise ValueError("address is read with ranks only; leave it out")


def main(config: DoctorConfig) -> None:
    """Run the check.

    Raises:
        UserError: If it cannot run (exit status 2).
        SystemExit: With status 1 if it found a problem.
    """
    name, *runs = config.check
    if name == "cluster":
        if config.ranks and world_size() == 1:
            words = ["doctor", "cluster", "--folder", str(Path(config.folder).absolute())]
            cluster = ClusterConfig(trainer_ranks=config.ranks, address=config.address)
            if status := run_group(cluster, words, {}, resume=()):
                raise SystemExit(status)
            return
        if not check_cluster(config.folder):
            raise SystemExit(1)
        return
    refuse_ranks(name)
    if name == "kernels":
        is_well = check_kernels()
    elif name == "sandbox":
        is_well = check_sandbox(config.backend, config.only, config.num_workers)
    elif name == "determinism":
        is_well = check_determinism(config.of, *runs)
    else:
        is_well = check_hang(runs)
    if not is_well:
        raise SystemExit(1)


def check_kernels() -> bool:
    """Print the speed of the C++ kernels relative to PyTorch for some widths, and which of them runs would use here.

    Returns:
        Whether there are usable C++ kernels.
    """
    console = Console()
    console.print(f"CPU targets: {', '.join(build.runnable())} (choose one with {build.VARIABLE})")
    if build.library() is None:
        console.print(f"kernels: {dispatch.describe()}", soft_wrap=True)
        return False
    table = Table("width", "numbers", *dispatch.OPERATIONS, "kernels", box=SIMPLE_HEAD)
    for width in WIDTHS:
        shape = small(
            ModelConfig(
                hidden_size=width,
                intermediate_size=3 * width,
                num_heads=width // 64,
                num_kv_heads=width // 64,
                head_dim=64,
            )
        )
        for dtype in (torch.float32, torch.bfloat16):
            ratios = measure(shape, dtype)
            clear = dispatch.plausible(ratios)
            cells = [f"{clear[name]:.1f}x" if name in clear else "unclear" for name in dispatch.OPERATIONS]
            name = str(dtype).removeprefix("torch.")
            table.add_row(str(width), name, *cells, dispatch.describe(dispatch.Choice.of(ratios)))
    console.print(table)
    console.print("speed of the C++ kernels over PyTorch's own; slower ones are not used", soft_wrap=True)
    return True


def check_sandbox(backend: Literal["auto", "bwrap", "landlock"], only: str, num_workers: int) -> bool:
    """Print a table of attacks and their outcomes.

    Args:
        backend: The backend to attack.
        only: Part of a name or group.
        num_workers: Concurrent attacks; 0 for one per core.

    Returns:
        Whether all were contained.

    Raises:
        UserError: If this machine has no usable sandbox.
    """
    attacks = [attack for attack in all_attacks() if only in attack.name or only in attack.group]
    if not attacks:
        groups = ", ".join(dict.fromkeys(attack.group for attack in all_attacks()))
        raise UserError(f"only = {only!r}: no such attack; expected a part of a name, or of {groups}")
    console = Console()
    start = time.monotonic()
    with Sandbox(backend=backend, num_workers=num_workers) as sandbox:
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
            print(f"not contained: {finding.name} ({finding.group}): {one_line(finding.breach)}")
        print(
            f"{sandbox.backend}: {len(findings)} checks, {len(breaches)} breaches, "
            f"{time.monotonic() - start:.1f} s"
        )
    return not breaches


def _table(findings: Sequence[Finding]) -> Table:
    """Format the findings as a table; program output is escaped and never interpreted as markup."""
    table = Table(box=SIMPLE_HEAD)
    for name, width in (("attack", 28), ("group", 12), ("contained", 9), ("ms", 5), ("how", None)):
        table.add_column(name, no_wrap=True, min_width=width, justify="right" if name == "ms" else "left")
    for finding in findings:
        how = one_line(finding.breach or finding.how)
        table.add_row(
            finding.name,
            finding.group,
            Text("NO", style="bold red") if finding.breach else "yes",
            f"{1000 * finding.seconds:.0f}",
            Text(how if len(how) <= SHOWN_HOW else f"{how[: SHOWN_HOW - 1]}…"),
        )
    return table


PROGRAM = Program(config_class=DoctorConfig, main=main, positional="check", shared=True)
