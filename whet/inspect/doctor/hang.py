"""`whet doctor hang RUN`: shows what every rank of a run is doing, which one is behind, and where a hung one
stopped."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet.telemetry.display import one_line
from whet.telemetry.heartbeat import FOLDER, birth
from whet.telemetry.log import as_number, parse_row
from whet.telemetry.provenance import no_run, resolve_run
from whet.types import UserError

FRESH_S = 30.0
"""A live process writes about once per second; an older file means that it is not alive."""
NO_LIMIT_S = 600.0
"""Silence that counts as a hang if the run's own watchdog is off."""
SHOWN_BYTES = 32768
SHOWN_LINES = 24
MAX_BYTES = 65536
MAX_RANKS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One rank, according to its heartbeat.

    Attributes:
        number: Its rank.
        state: running, finished, preempted or failed (as it reported), else: 'hangs', 'hung' (and was ended), 'died'
            (without a report), 'stopped' (alive but suspended), 'unreadable' or 'missing' (no heartbeat).
        phase: Its last phase.
        step: Its last step.
        silent_s: Seconds since the last heartbeat.
        alive: yes, no, or the time since the last heartbeat of a process that cannot be inspected.
        collective: The collective that it waits in; '' for none.
        reason: Why it ended.
        stacks: File of its stacks.
    """

    number: int
    state: str
    phase: str = ""
    step: int = 0
    silent_s: float = 0.0
    alive: str = ""
    collective: str = ""
    reason: str = ""
    stacks: Path

    @property
    def is_well(self) -> bool:
        """Whether it is running or ended normally."""
        return self.state in ("running", "finished", "preempted")


def check_hang(runs: Sequence[str]) -> bool:
    """Print the ranks of each run and their problems.

    Args:
        runs: Run folders.

    Returns:
        Whether all is well.

    Raises:
        UserError: If a folder has no heartbeats.
    """
    found = {run: read_ranks(Path(resolve_run(run))) for run in runs}
    console = Console()
    for run, ranks in found.items():
        console.print(Text(one_line(run), style="bold"))
        console.print(_table(ranks))
        for line in findings(ranks):
            print(one_line(line))
        for rank in ranks:
            if not rank.is_well and (text := _tail(rank.stacks)):
                print(f"\n{one_line(str(rank.stacks))}, last lines:\n{text}")
    return all(rank.is_well for ranks in found.values() for rank in ranks)


def read_ranks(run: Path) -> list[Rank]:
    """Read the heartbeats of a run, by rank.

    Raises:
        UserError: If there are none.
    """
    paths = {int(path.stem[5:]): path for path in (run / FOLDER).glob("rank_*.json") if _is_rank(path)}
    if not paths:
        if not run.is_dir():
            raise no_run(str(run))
        raise UserError(f"{run}: no heartbeats; expected the folder of a training run")
    rows = {number: _load(path) for number, path in paths.items()}
    newest = max(rows.values(), key=lambda row: _number(row, "time"))
    count = int(_number(newest, "ranks")) or len(
        rows
    )  # files of further ranks are from an earlier start of the run
    numbers = range(min(count, MAX_RANKS))
    return [_rank(number, rows.get(number), run / FOLDER / f"rank_{number}.json") for number in numbers]


def findings(ranks: Sequence[Rank]) -> list[str]:
    """Return one line per problem, and which rank keeps the others waiting."""
    lines = []
    for rank in ranks:
        where = f"rank {rank.number}, phase '{rank.phase}' of step {rank.step}"
        if rank.state == "died":
            held = "in a call that held the GIL" if _tail(rank.stacks) else "killed?"
            lines.append(f"{where}: its process died without a report ({held}); continue with --resume")
        elif rank.state == "stopped":
            lines.append(f"{where}: its process exists, but is suspended (Ctrl-Z, or the GIL is held)")
        elif rank.state == "hangs":
            lines.append(
                f"{where}: no heartbeat for {rank.silent_s:.0f} s; end it, then continue with --resume"
            )
        elif rank.state == "hung":
            lines.append(f"rank {rank.number} hung and was ended: {rank.reason}; continue with --resume")
        elif not rank.is_well:
            lines.append(f"{where}: {rank.state}: {rank.reason}")
    lines = lines or ["all is well"]
    begun = [rank for rank in ranks if rank.state not in ("finished", "preempted", "unreadable", "missing")]
    waiting = [rank for rank in begun if rank.collective]
    behind = [rank for rank in begun if not rank.collective] if waiting else []
    if not behind and len({rank.step for rank in begun}) > 1:
        behind = [rank for rank in begun if rank.step == min(rank.step for rank in begun)]
    if behind:
        names = ", ".join(f"rank {rank.number} ('{rank.phase}' of step {rank.step})" for rank in behind)
        others = ", ".join(f"rank {rank.number} in {rank.collective}" for rank in waiting)
        lines.append(f"behind: {names}{f'; waiting: {others}' if others else ''}")
    return lines


def _is_rank(path: Path) -> bool:
    return path.stem[5:].isascii() and path.stem[5:].isdecimal() and len(path.stem) < 15


def _load(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return parse_row(file.read(MAX_BYTES)) or {}


def _rank(number: int, row: dict[str, Any] | None, path: Path) -> Rank:
    stacks = path.with_suffix(".stacks.txt")
    if not row:
        state = "missing" if row is None else "unreadable"
        return Rank(number=number, state=state, reason=f"expected {path}", stacks=stacks)
    state, limit = str(row.get("state"))[:20], _number(row, "timeout_s") or NO_LIMIT_S
    age = max(0.0, time.time() - _number(row, "time"))
    silent_s, alive = _number(row, "silent_s") + age, "no"
    if state == "running":
        is_here = row.get("host") == socket.gethostname() and isinstance(row.get("born"), int)
        if is_here and birth(int(_number(row, "pid"))) != row["born"]:
            state = "died"
        elif age > FRESH_S:
            state, alive = ("stopped", "yes") if is_here else ("died", f"last heartbeat {age:.0f} s ago")
        else:
            state, alive = "hangs" if silent_s > limit else state, "yes"
    return Rank(
        number=number,
        state=state,
        phase=str(row.get("phase"))[:60],
        step=int(_number(row, "step")),
        silent_s=silent_s,
        alive=alive,
        collective=str(row.get("collective") or "")[:120],
        reason=str(row.get("reason") or "")[:600],
        stacks=stacks,
    )


def _number(row: dict[str, Any], name: str) -> float:
    return as_number(row.get(name)) or 0.0


def _table(ranks: Sequence[Rank]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name in ("rank", "state", "phase", "step", "seconds since", "alive", "waits for others in"):
        table.add_column(name, justify="right" if name in ("rank", "step", "seconds since") else "left")
    for rank in ranks:
        style = "" if rank.is_well else "bold red"
        table.add_row(
            str(rank.number),
            Text(one_line(rank.state), style=style),
            Text(one_line(rank.phase)),
            str(rank.step),
            f"{rank.silent_s:.0f}",
            rank.alive,
            Text(one_line(rank.collective)),
        )
    return table


def _tail(path: Path) -> str:
    """Return the last block of a file of stacks, escaped: the main thread's stack at the hang."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - SHOWN_BYTES))
            text = file.read(SHOWN_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    lines = text.strip().split("\n\n")[-1].splitlines()
    return "\n".join(f"  {one_line(line)}" for line in lines[:SHOWN_LINES])
