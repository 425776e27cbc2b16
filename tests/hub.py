"""A stand-in for the package `datasets` that holds the rows recorded in golden/hub, and refuses what the real one does.

`tests/tasks/test_hub.py` loads the same rows with the real package from folders, and compares rows and errors.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden/hub"
SCRIPTS = {"livecodebench/code_generation_lite": "code_generation_lite.py"}
GATED = ("owner/gated",)
Splits = dict[str, list[dict[str, Any]]]


class DatasetNotFoundError(FileNotFoundError):
    """As `datasets.exceptions` has it."""


def recorded() -> dict[str, dict[str, Splits]]:
    """Return configurations, splits and rows by the name of the data set."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(GOLDEN.glob("*.json"))]
    return {one["path"]: one["configs"] for one in found}


class Stream:
    """Rows that are given one at a time: how many were asked for is counted."""

    num_read = 0

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self._rows:
            Stream.num_read += 1
            yield row


class Hub:
    """The functions of `datasets` that whet calls; `calls` lists what was loaded."""

    def __init__(self, sets: dict[str, dict[str, Splits]]) -> None:
        self.sets = sets
        self.calls: list[tuple[str, str, str]] = []

    def load_dataset(
        self, path: str, name: str | None = None, *, split: str, streaming: bool = False
    ) -> list[dict[str, Any]] | Stream:
        config, splits = self._config(path, name)
        if split not in splits:
            there = list(splits)
            if streaming:
                raise ValueError(f"Bad split: {split}. Available splits: {there}")
            raise ValueError(f'Unknown split "{split}". Should be one of {there}.')
        self.calls.append((path, config, split))
        return Stream(splits[split]) if streaming else list(splits[split])

    def get_dataset_split_names(self, path: str, config_name: str | None = None) -> list[str]:
        return list(self._config(path, config_name)[1])

    def _config(self, path: str, name: str | None) -> tuple[str, Splits]:
        if path in GATED:
            raise DatasetNotFoundError(
                f"Dataset '{path}' is a gated dataset on the Hub. You must be authenticated to access it."
            )
        if path in SCRIPTS:
            raise RuntimeError(f"Dataset scripts are no longer supported, but found {SCRIPTS[path]}")
        if path == "owner/far":
            raise ConnectionError(f"Couldn't reach '{path}' on the Hub (ConnectError)")
        if path not in self.sets:
            raise DatasetNotFoundError(f"Dataset '{path}' doesn't exist on the Hub or cannot be accessed.")
        configs = self.sets[path]
        if name is None:
            if len(configs) > 1 and "default" not in configs:
                first = next(iter(configs))
                raise ValueError(
                    "Config name is missing."
                    f"\nPlease pick one among the available configs: {list(configs)}"
                    f"\nExample of usage:\n\t`load_dataset('{path}', '{first}')`"
                )
            name = "default" if "default" in configs else next(iter(configs))
        if name not in configs:
            raise ValueError(f"BuilderConfig '{name}' not found. Available: {list(configs)}")
        return name, configs[name]


def install(patch: pytest.MonkeyPatch, **more: dict[str, Splits]) -> Hub:
    """Put the stand-in in the place of `datasets`.

    Args:
        patch: Takes it away again.
        more: Further data sets, 'owner__name' for 'owner/name'.
    """
    hub = Hub(recorded() | {name.replace("__", "/"): configs for name, configs in more.items()})
    fake = types.ModuleType("datasets")
    fake.load_dataset = hub.load_dataset  # pyright: ignore[reportAttributeAccessIssue]
    fake.get_dataset_split_names = hub.get_dataset_split_names  # pyright: ignore[reportAttributeAccessIssue]
    patch.setitem(sys.modules, "datasets", fake)
    Stream.num_read = 0
    return hub
