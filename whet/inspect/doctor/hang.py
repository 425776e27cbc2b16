"""`whet doctor hang RUN`: what every rank of a run does, which one is behind, and where a hung one stood."""

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

from whet.telemetry.display import escape_controls
from whet.telemetry.heartbeat import FOLDER, birth
from whet.telemetry.log import as_number, parse_row
from whet.types import UserError

FRESH_S = 30.0
"""A live process writes about once per second; a file older than this is no sign of life."""
NO_LIMIT_S = 600.0
"""Silence that counts as a hang where the run's own watchdog is off."""
SHOWN_BYTES = 32768
SHOWN_LINES = 24
MAX_BYTES = 65536
MAX_RANKS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One rank, as its heartbeat tells.

    Attributes:
        number: Its rank.
        state: running, finished, preempted or failed (as it said), else what became of it: 'hangs', 'hung' (and ended),
            'died' (without a word), 'stopped' (there, but standing still), 'unreadable' or 'missing' (never heard of).
        phase: What it did last.
        step: In which step.
        silent_s: Seconds since the last one.
        alive: yes, no, or how long ago something was heard of a process that cannot be looked at.
        collective: What it waits for with other ranks; '' for nothing.
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
        """Whether it works, or ended as it should."""
        return self.state in ("running", "finished", "preempted")


def check_hang(runs: Sequence[str]) -> bool:
    """Print the ranks of each run and what is wrong with them.

    Args:
        runs: Run folders.

    Returns:
        Whether all is well.

    Raises:
        UserError: If a folder has no heartbeats.
    """
    found = {run: read_ranks(Path(run)) for run in runs}
    console = Console()
    for run, ranks in found.items():
        console.print(Text(_line(run), style="bold"))
        console.print(_table(ranks))
        for line in findings(ranks):
            print(_line(line))
        for rank in ranks:
            if not rank.is_well and (text := _tail(rank.stacks)):
                print(f"\n{_line(str(rank.stacks))}, its end:\n{text}")
    return all(rank.is_well for ranks in found.values() for rank in ranks)


def read_ranks(run: Path) -> list[Rank]:
    """Read the heartbeats of a run, by rank.

    Raises:
        UserError: If there are none.
    """
    paths = {int(path.stem[5:]): path for path in (run / FOLDER).glob("rank_*.json") if _is_rank(path)}
    if not paths:
        reason = "no heartbeats" if run.is_dir() else "no such folder"
        raise UserError(f"{run}: {reason}; expected the folder of a run that trains, or has trained")
    rows = {number: _load(path) for number, path in paths.items()}
    newest = max(rows.values(), key=lambda row: _number(row, "time"))
    count = int(_number(newest, "ranks")) or len(
        rows
    )  # files of more ranks are of an earlier life of the run
    numbers = range(min(count, MAX_RANKS))
    return [_rank(number, rows.get(number), run / FOLDER / f"rank_{number}.json") for number in numbers]


def findings(ranks: Sequence[Rank]) -> list[str]:
    """Say in one line each what is wrong, and which rank keeps the others waiting."""
    lines = []
    for rank in ranks:
        where = f"rank {rank.number}, phase '{rank.phase}' of step {rank.step}"
        if rank.state == "died":
            held = "in a call that kept the interpreter locked" if _tail(rank.stacks) else "killed?"
            lines.append(f"{where}: its process ended without a word ({held}); go on with --resume")
        elif rank.state == "stopped":
            lines.append(
                f"{where}: its process is there, but stands still (Ctrl-Z, or the interpreter is locked)"
            )
        elif rank.state == "hangs":
            lines.append(
                f"{where}: no sign of life for {rank.silent_s:.0f} s; end it, then go on with --resume"
            )
        elif rank.state == "hung":
            lines.append(f"rank {rank.number} hung and was ended: {rank.reason}; go on with --resume")
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
            state, alive = ("stopped", "yes") if is_here else ("died", f"last heard of {age:.0f} s ago")
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
            Text(_line(rank.state), style=style),
            Text(_line(rank.phase)),
            str(rank.step),
            f"{rank.silent_s:.0f}",
            rank.alive,
            Text(_line(rank.collective)),
        )
    return table


def _tail(path: Path) -> str:
    """Return the last block of a file of stacks, escaped: the main thread's, where it stood when it hung."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - SHOWN_BYTES))
            text = file.read(SHOWN_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    lines = text.strip().split("\n\n")[-1].splitlines()
    return "\n".join(f"  {_line(line)}" for line in lines[:SHOWN_LINES])


def _line(text: str) -> str:
    return escape_controls(" ".join(text.split()))
