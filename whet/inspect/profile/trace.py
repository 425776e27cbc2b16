"""Results of one step under torch.profiler: operators, kernels, and the memory of each phase."""

from __future__ import annotations

import gc
import gzip
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from whet.telemetry.spans import NAMES

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """One operator or kernel.

    Attributes:
        name: Its name.
        calls: How often it ran.
        seconds: Its total duration, without callees.
    """

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Traced:
    """Results of a traced step.

    Attributes:
        seconds: Duration of the step, slowed by the tracing.
        operators: Operators by CPU time, longest first.
        kernels: Kernels and copies by GPU time, longest first; empty without a GPU.
        busy: Share of the step in which the GPU was busy; None without one.
        peaks: Peak of live tensor bytes in each phase, by path.
    """

    seconds: float
    operators: list[Work]
    kernels: list[Work]
    busy: float | None
    peaks: dict[tuple[str, ...], int]


class Tracer:
    """Runs torch.profiler over one step.

    Args:
        device: The device that does the work.
    """

    def __init__(self, device: torch.device) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it logs its stages to stderr
        self._device = device
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profiler = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
        self._before = 0

    def start(self) -> None:
        """Start the trace."""
        # The CPU allocator counts from the start of the profiler, a GPU's from the start of the process.
        self._before = alive_bytes() if self._device.type == "cpu" else 0
        self._profiler.start()

    def stop(self) -> None:
        """End the trace."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._profiler.stop()

    def write(self, path: Path) -> Traced:
        """Write the trace, compressed, and return its results."""
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(plain))
            text = plain.read_bytes()
        path.write_bytes(gzip.compress(text, compresslevel=6))
        events = json.loads(text)["traceEvents"]
        spans = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in NAMES]
        step = next(e for e in spans if e["name"] == "step")
        kernels = [e for e in events if e.get("cat") in KERNELS]
        own = [
            Work(row.key, row.count, row.self_cpu_time_total / 1e6)
            for row in self._profiler.key_averages()
            if row.device_type.name == "CPU" and row.key not in NAMES
        ]
        return Traced(
            seconds=step["dur"] / 1e6,
            operators=sorted(own, key=lambda work: -work.seconds),
            kernels=total(kernels),
            busy=covered(kernels) / step["dur"] if self._device.type == "cuda" else None,
            peaks=peaks(spans, _allocations(events, self._device.type), self._before),
        )


def alive_bytes() -> int:
    """Return the bytes of all CPU tensors that Python holds, counting each storage once."""
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu":
            storage = found.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()  # pyright: ignore[reportPrivateUsage]
    return sum(sizes.values())


def total(kernels: Iterable[Event]) -> list[Work]:
    """Add up events by their names, most time first."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in kernels:
        found[event["name"]].append(event["dur"] / 1e6)
    works = [Work(name, len(seconds), sum(seconds)) for name, seconds in found.items()]
    return sorted(works, key=lambda work: -work.seconds)


def covered(events: Iterable[Event]) -> float:
    """Return the microseconds during which at least one event is active."""
    end, sum_us = float("-inf"), 0.0
    for begin, stop in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        sum_us += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return sum_us


def peaks(
    spans: Sequence[Event], allocations: Iterable[tuple[float, int]], before: int
) -> dict[tuple[str, ...], int]:
    """Return the peak of live bytes in each phase, by path.

    Args:
        spans: The phases of the trace, nested within their threads.
        allocations: (microsecond, live bytes after it) of every allocation and free.
        before: Live bytes when counting started.
    """
    moments: list[tuple[float, int, float, Any]] = [(time, 0, 0.0, alive) for time, alive in allocations]
    moments += [(span["ts"], 1, -span["dur"], span) for span in spans]
    found: dict[tuple[str, ...], int] = {}
    stacks: dict[int, list[tuple[float, tuple[str, ...]]]] = defaultdict(list)  # (end, path) by thread
    now = before
    for time, kind, _, what in sorted(moments, key=lambda moment: moment[:3]):
        for stack in stacks.values():
            while stack and stack[-1][0] <= time:
                stack.pop()
        if kind:
            stack = stacks[what["tid"]]
            stack.append((time + what["dur"], (*(stack[-1][1] if stack else ()), what["name"])))
        else:
            now = before + what
        for _, path in chain.from_iterable(stacks.values()):
            found[path] = max(found.get(path, 0), now)
    return found


def _allocations(events: Iterable[Event], device: str) -> list[tuple[float, int]]:
    kind = {"cpu": 0, "cuda": 1}[device]
    return [
        (event["ts"], event["args"]["Total Allocated"])
        for event in events
        if event["name"] == "[memory]" and event["args"]["Device Type"] == kind
    ]
