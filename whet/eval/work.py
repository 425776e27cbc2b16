"""What an evaluation sampled, how long that took, and what the hardware did over exactly that time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet.telemetry.hardware import ENERGY, FIELDS, rates


@dataclass(frozen=True, slots=True)
class Work:
    """A stretch of sampling.

    Attributes:
        prompt_tokens: Tokens of the prompts, each once for its samples and once for its greedy completion.
        completion_tokens: Tokens that the model wrote.
        requests: Completions.
        seconds: Wall time of sampling alone, without grading.
        hardware: What the sensors read meanwhile (`HardwareMonitor.window`); None where nobody asked.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    requests: int = 0
    seconds: float = 0.0
    hardware: dict[str, Any] | None = None


def total_work(parts: Sequence[Work]) -> Work:
    """Add stretches up; the hardware is told only where every one of them has been watched."""
    windows = [part.hardware for part in parts if part.hardware is not None]
    return Work(
        sum(part.prompt_tokens for part in parts),
        sum(part.completion_tokens for part in parts),
        sum(part.requests for part in parts),
        sum(part.seconds for part in parts),
        join_windows(windows) if windows and len(windows) == len(parts) else None,
    )


def join_windows(windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make one window of several that lie apart: means weighted by time, sums of energy.

    A reading that one of them lacks is absent from the whole, for a sum without it would be too small.

    Args:
        windows: What `HardwareMonitor.window` returned, one or more.
    """
    if len(windows) == 1:
        return dict(windows[0])
    found = {device["id"]: device for window in windows for device in window["devices"]}
    absent = {key: reason for window in windows for key, reason in window["absent"].items()}
    devices: list[dict[str, Any]] = []
    for name, device in found.items():
        rows = [
            (window["seconds"], row)
            for window in windows
            for row in window["devices"]
            if row["id"] == name and window["seconds"] > 0
        ]
        joined = dict(device)
        is_whole = len(rows) == len(windows)
        for field in FIELDS:
            joined[field] = _join([(s, row[field]) for s, row in rows]) if is_whole else None
            if joined[field] is None:
                absent.setdefault(f"{name}/{field}", "not read in every part")
        joules = [row[ENERGY] for _, row in rows]
        joined[ENERGY] = sum(joules) if is_whole and None not in joules else None
        if joined[ENERGY] is None:
            joined["energy_from"] = None
            absent.setdefault(f"{name}/{ENERGY}", "not read in every part")
        joined["num_samples"] = sum(row["num_samples"] for _, row in rows)
        devices.append(joined)
    return {
        "seconds": sum(window["seconds"] for window in windows),
        "num_samples": sum(window["num_samples"] for window in windows),
        "devices": devices,
        "absent": absent,
    }


def show_work(work: Work) -> dict[str, Any]:
    """Return a stretch as eval.json holds it; joules per token and request are there where energy was read."""
    hardware = work.hardware
    if hardware is not None:
        hardware = hardware | rates(hardware, work.completion_tokens, work.requests)
    return {
        "tokens": {"prompt": work.prompt_tokens, "completion": work.completion_tokens},
        "requests": work.requests,
        "generation_seconds": round(work.seconds, 3),
        "hardware": hardware,
    }


def _join(parts: Sequence[tuple[float, Mapping[str, Any] | None]]) -> dict[str, Any] | None:
    """Average readings by time; None where one is missing."""
    known = [(seconds, reading) for seconds, reading in parts if reading is not None]
    if len(known) < len(parts):
        return None
    highs = [reading["max"] for _, reading in known]
    total = sum(seconds for seconds, _ in known)
    return {
        "mean": sum(seconds * reading["mean"] for seconds, reading in known) / total,
        "max": None if None in highs else max(highs),
    }
