"""`whet track`: send a finished or killed run to experiment trackers, from its own files."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from whet.cli import Program
from whet.config import from_dict, read_yaml
from whet.telemetry.log import read_rows
from whet.telemetry.provenance import no_run
from whet.telemetry.trackers import (
    Item,
    TrackConfig,
    Tracker,
    TrackerName,
    as_item,
    brief,
    entry_of,
    load_tracker,
    open_run,
    save_entry,
)
from whet.types import UserError


@dataclass(frozen=True, kw_only=True)
class TrackRunConfig:
    """Send a run folder to experiment trackers: all its values, its config and some completions, as a new run."""

    run: str = ""
    """Run folder."""
    to: tuple[TrackerName, ...] = ()
    """Trackers; empty for those of the run's config."""
    project: str = ""
    """Project; empty for the one of the run's config."""
    name: str = ""
    """Name of the run; empty for the one of the run's config, or the folder's name."""
    offline: bool = False
    """wandb: only write files below RUN/wandb."""
    uri: str = ""
    """mlflow: a server, sqlite:///FILE or a folder; empty for the one of the run's config."""


def main(config: TrackRunConfig) -> None:
    """Send the run to each tracker and print its location.

    Raises:
        UserError: If there is no such run, a tracker is not installed, or one fails.
    """
    folder = Path(config.run)
    settings = track_settings(config, folder)
    trackers = [(name, load_tracker(name, settings)) for name in settings.to]
    for name, tracker in trackers:
        print(f"{name}: {send(name, tracker, folder, settings.num_samples)}")


def track_settings(config: TrackRunConfig, folder: Path) -> TrackConfig:
    """Return the run's tracker settings, with the given options applied.

    Raises:
        UserError: If there is no such run, or no tracker is named.
    """
    if not config.run:
        raise UserError("which run? whet track RUN --to tensorboard")
    if not folder.is_dir():
        raise no_run(config.run)
    try:
        stored = read_yaml(folder / "config.yaml").get("track")
    except UserError:
        raise UserError(f"{folder}: no readable config.yaml, so it is not a run folder") from None
    where = str(folder / "config.yaml")
    started = from_dict(TrackConfig, stored, where=where) if isinstance(stored, dict) else TrackConfig()
    asked = {
        key: value for key in ("to", "project", "name", "offline", "uri") if (value := getattr(config, key))
    }
    if not (asked.get("to") or started.to):
        raise UserError(f"{folder} was started without a tracker: name one, as in --to tensorboard")
    try:
        return replace(started, **asked)
    except ValueError as error:
        raise UserError(str(error)) from None


def send(name: str, tracker: Tracker, folder: Path, num_samples: int) -> str:
    """Send a whole run folder to a tracker as a new run, and record it in trackers.json.

    Returns:
        Its location.

    Raises:
        UserError: If the run has no rows, or the tracker fails.
    """
    sent = 0
    items = rows_in_order(folder, num_samples)
    first = next(items, None)
    if first is None:
        raise UserError(f"{folder}: no rows in metrics.jsonl, nothing to send")
    try:
        link = open_run(tracker, folder, first.step, None)
        for item in (first, *items):
            item.send(tracker)
            sent += 1
        tracker.close(failed=not (folder / "summary.json").is_file())
    except Exception as error:
        raise UserError(f"tracker {name}: {brief(error)}; {sent} rows were sent") from None
    save_entry(folder, entry_of(name, link, sent, 0, ""))
    return f"{sent} rows, {link.url or folder / link.path}"


def rows_in_order(folder: Path, num_samples: int) -> Iterator[Item]:
    """Yield the items of both files of a run, by step; the files are streamed."""

    def items(file: str) -> Iterator[Item]:
        rows: Iterator[dict[str, Any]] = read_rows(folder / file)
        if file == "metrics.jsonl":
            parts = ([row] for row in rows)
        else:
            parts = (list(part) for _, part in groupby(rows, key=lambda row: row.get("step", 0)))
        for part in parts:
            if (item := as_item(file, part, num_samples)) is not None:
                yield item

    return heapq.merge(items("metrics.jsonl"), items("samples.jsonl"), key=lambda item: item.step)


PROGRAM = Program(config_class=TrackRunConfig, main=main, positional="run")
