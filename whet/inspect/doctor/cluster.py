"""Checks the machines of a job before a run does: one rank per process, started by torchrun or by Ray."""

from __future__ import annotations

import os
import platform
import secrets
import socket
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import whet
from whet.config import counted
from whet.ranks.collectives import all_reduce_max, barrier, gather_json, is_distributed, rank, world_size
from whet.types import UserError

CLOCK_S = 1.0
"""Difference of clocks that is told as a problem: logs and heartbeats of the ranks could not be compared."""
SLOW_LATENCY_S, SLOW_GB_PER_S = 5e-3, 0.05
"""A link that is slower than these makes every step wait: usually it is the wrong network interface."""
FOLDER_S = 10.0
"""Seconds after which a file has to be seen by all ranks: network file systems keep listings for some."""
ROUNDS, NUMBERS = 20, 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one rank says of itself; what has to be equal on all of them comes first."""

    whet: str
    code: str
    python: str
    torch: str
    host: str
    cpus: int
    memory_gib: float
    gpus: tuple[str, ...]
    clock_s: float = 0.0
    folder: str = ""


EQUAL = {
    "whet": "install the same whet on all machines",
    "code": "copy the same source of whet to all machines",
    "python": "use the same Python on all machines",
    "torch": "install the same torch on all machines",
}
"""Facts that have to be equal, and what to do where they are not."""


@dataclass(frozen=True, slots=True)
class Link:
    """How fast ranks add numbers.

    Attributes:
        backend: What carries them.
        latency_s: Seconds for one number.
        gb_per_s: Bandwidth of each rank for many, as a ring would use it.
    """

    backend: str
    latency_s: float
    gb_per_s: float


def check_cluster(folder: str) -> bool:
    """Check ranks, links, clocks, a shared folder and versions, and print one table; all ranks call it.

    Args:
        folder: A folder that all ranks should see, such as that of the runs; it is made if need be.

    Returns:
        Whether all is well, the same on every rank.
    """
    facts = replace(own_facts(), clock_s=clock_offset(), folder=shared_folder(Path(folder)))
    everyone = [Facts(**{**data, "gpus": tuple(data["gpus"])}) for data in gather_json(asdict(facts))]
    links = [measure_link("gloo", torch.device("cpu"))] if is_distributed() else []
    if is_distributed() and all(other.gpus for other in everyone) and "nccl" in dist.get_backend_config():
        links.append(measure_link("nccl", torch.device("cuda", torch.cuda.current_device())))
    found = problems(everyone, links)
    if rank() == 0:
        _show(everyone, links, folder)
        for line in found:
            print(f"problem: {line}")
        if not is_distributed():
            print(
                "one rank: start it with torchrun on all machines (or --ranks N by Ray) to check the links, too"
            )
        print("no problem found" if not found else f"{counted(len(found), 'problem')} found")
    return not found


def own_facts() -> Facts:
    """Describe this process and its machine."""
    folder = Path(whet.__file__).parent
    code = 0
    for path in sorted(folder.rglob("*.py")):
        code = zlib.crc32(path.read_bytes(), zlib.crc32(str(path.relative_to(folder)).encode(), code))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Facts(
        whet=whet.__version__,
        code=f"{code:08x}",
        python=platform.python_version(),
        torch=torch.__version__,
        host=socket.gethostname(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(count)),
    )


def clock_offset() -> float:
    """Return the seconds that this rank's clock is ahead of rank 0's; as exact as the links are fast."""
    offsets = []
    for _ in range(5):
        barrier()
        first, *_ = times = gather_json(time.time())
        offsets.append(times[rank()] - first)
    return round(statistics.median(offsets), 6)


def shared_folder(folder: Path, *, wait_s: float = FOLDER_S) -> str:
    """Write a file on every rank, and look for those of all others; return '' if they are there, else what is wrong.

    Args:
        folder: The folder; all ranks give the same.
        wait_s: Seconds that a file may take to be seen.
    """
    name = gather_json(f".whet-doctor-{secrets.token_hex(8)}")[0]
    own, wrong = folder / f"{name}-{rank()}", ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own.write_text(name)
    except OSError as error:
        wrong = f"cannot be written ({error.strerror})"
    barrier()
    end = time.monotonic() + wait_s
    others = [folder / f"{name}-{other}" for other in range(world_size())]
    while not wrong and (missing := [path for path in others if not _holds(path, name)]):
        if time.monotonic() > end:
            ranks = ", ".join(path.name.rpartition("-")[2] for path in missing)
            wrong = f"does not show what rank {ranks} wrote"
        time.sleep(0.05)
    barrier()
    with suppress(OSError):
        own.unlink(missing_ok=True)
    return wrong


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_text() == text
    except OSError:
        return False


def measure_link(backend: str, device: torch.device) -> Link:
    """Time sums over all ranks; all call it."""

    def seconds(numbers: int, rounds: int) -> float:
        tensor = torch.zeros(numbers, device=device)
        taken = []
        for _ in range(rounds):
            barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - began)
        return all_reduce_max(statistics.median(taken))

    seconds(1, 3)  # connections are made by the first one
    latency, long = seconds(1, ROUNDS), seconds(NUMBERS, 3)
    sent = 2 * (world_size() - 1) / world_size() * 4 * NUMBERS
    return Link(backend, latency, sent / long / 1e9)


def problems(everyone: Sequence[Facts], links: Sequence[Link]) -> list[str]:
    """Return what is wrong, a line each with what to do.

    Args:
        everyone: What the ranks say, in their order.
        links: How fast they add.
    """
    found: list[str] = []
    for name, remedy in EQUAL.items():
        values = [getattr(facts, name) for facts in everyone]
        if len(set(values)) > 1:
            odd = _ranks(lambda n, values=values: values[n] != values[0], len(values))
            found.append(f"{name} is {values[0]} on rank 0, but {values[odd[0]]} on {_named(odd)}: {remedy}")
    late = _ranks(lambda n: abs(everyone[n].clock_s) > CLOCK_S, len(everyone))
    if late:
        offset = everyone[late[0]].clock_s
        found.append(f"the clock of {_named(late)} differs by {offset:+.1f} s: synchronise it (chrony, ntpd)")
    for text in dict.fromkeys(facts.folder for facts in everyone if facts.folder):
        who = _named(_ranks(lambda n, text=text: everyone[n].folder == text, len(everyone)))
        found.append(
            f"the folder {text}, as {who} sees it: give --folder one that all machines share (NFS, Lustre, EFS), and "
            "put --out there"
        )
    counts = {len(facts.gpus) for facts in everyone}
    if len(counts) > 1:
        found.append(f"ranks see {sorted(counts)} GPUs: expected the same number on each machine")
    for link in links:
        if link.latency_s > SLOW_LATENCY_S or link.gb_per_s < SLOW_GB_PER_S:
            variable = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}[link.backend]
            found.append(
                f"{link.backend} takes {1e3 * link.latency_s:.1f} ms a sum and carries {link.gb_per_s:.2f} GB/s: name "
                f"the fast network interface in {variable} (ip -br addr lists them)"
            )
    return found


def _ranks(is_so: Callable[[int], bool], count: int) -> list[int]:
    return [number for number in range(count) if is_so(number)]


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank {shown}{' and others' if len(ranks) > 8 else ''}"


def _show(everyone: Sequence[Facts], links: Sequence[Link], folder: str) -> None:
    console = Console()
    console.width = max(console.width, 120)  # a cluster's log has no terminal
    table = Table(
        "rank", "host", "python", "torch", "whet", "CPUs", "GiB", "GPUs", "clock", "folder", box=SIMPLE_HEAD
    )
    for number, facts in enumerate(everyone):
        gpus = f"{len(facts.gpus)}x {facts.gpus[0]}" if facts.gpus else "none"
        seen = "NO" if facts.folder else "seen"
        values = (facts.cpus, facts.memory_gib, gpus, f"{1e3 * facts.clock_s:+.1f} ms", seen)
        versions = (facts.python, facts.torch, f"{facts.whet} {facts.code}")
        table.add_row(str(number), facts.host, *versions, *map(str, values))
    console.print(table)
    for link in links:
        console.print(
            f"{link.backend}: {1e6 * link.latency_s:.0f} us a sum, {link.gb_per_s:.2f} GB/s per rank",
            soft_wrap=True,
        )
    console.print(f"folder: {folder}", soft_wrap=True)


def refuse_ranks(check: str) -> None:
    """Refuse a check that is one process's, where there are several.

    Raises:
        UserError: If there are.
    """
    if world_size() > 1:
        raise UserError(f"'whet doctor {check}' runs in one process; start it without torchrun")
