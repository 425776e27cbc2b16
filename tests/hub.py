"""A stand-in for the package `datasets` that holds the rows recorded in golden/hub, and refuses what the real one does.

`tests/tasks/test_hub.py` loads the same rows with the real package from folders, and compares rows and errors.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import PIL.Image
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

    def stored(image: dict[str, Any]) -> dict[str, Any]:
        return {**image, "bytes": base64.b64decode(image["bytes"])}

    return {
        one["path"]: {
            config: {split: changed(rows, stored) for split, rows in splits.items()}
            for config, splits in one["configs"].items()
        }
        for one in found
    }


class Image:
    """The type of a column of images, as `datasets` calls it."""


class List:
    """The type of a column of lists."""

    def __init__(self, feature: Any) -> None:
        self.feature = feature


def features_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the types of the columns that hold images; those of others do not matter here."""
    row = rows[0] if rows else {}
    found = {name: Image() for name, value in row.items() if is_stored(value)}
    columns = ((name, value) for name, value in row.items() if isinstance(value, list))
    lists = {name: List(Image()) for name, value in columns if any(map(is_stored, value))}
    return dict.fromkeys(row) | found | lists


def is_stored(value: Any) -> bool:
    """Say whether a value is an image as files of the hub hold it."""
    return isinstance(value, dict) and value.keys() == {"bytes", "path"}


def changed(value: Any, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a row, or a value of one, with its images changed."""
    if is_stored(value):
        return change(value)
    if isinstance(value, dict):
        return {name: changed(inner, change) for name, inner in value.items()}
    return [changed(inner, change) for inner in value] if isinstance(value, list) else value


def picture(stored: dict[str, Any]) -> Any:
    """Decode an image, as `datasets` does unless it is told not to."""
    return PIL.Image.open(io.BytesIO(stored["bytes"]))


class Rows(list[dict[str, Any]]):
    """Rows that were downloaded, with their images decoded."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__(changed(row, picture) for row in rows)
        self.features = features_of(rows)
        self._stored = rows

    def with_format(self, kind: str) -> Rows:
        assert kind == "arrow"
        return self

    def iter(self, batch_size: int) -> Iterator[Any]:
        for start in range(0, len(self), batch_size):
            rows = self._stored[start : start + batch_size]
            yield types.SimpleNamespace(to_pylist=lambda rows=rows: rows)


class Stream:
    """Rows that are given one at a time: how many were asked for is counted."""

    num_read = 0

    def __init__(self, rows: list[dict[str, Any]], *, decoded: bool = True) -> None:
        self._rows, self._decoded = rows, decoded
        self.features = features_of(rows)

    def decode(self, enable: bool = True) -> Stream:
        return Stream(self._rows, decoded=enable)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self._rows:
            Stream.num_read += 1
            yield changed(row, picture) if self._decoded else row


class Hub:
    """The functions of `datasets` that whet calls; `calls` lists what was loaded."""

    def __init__(self, sets: dict[str, dict[str, Splits]]) -> None:
        self.sets = sets
        self.calls: list[tuple[str, str, str]] = []

    def load_dataset(
        self, path: str, name: str | None = None, *, split: str, streaming: bool = False
    ) -> Rows | Stream:
        config, splits = self._config(path, name)
        if split not in splits:
            there = list(splits)
            if streaming:
                raise ValueError(f"Bad split: {split}. Available splits: {there}")
            raise ValueError(f'Unknown split "{split}". Should be one of {there}.')
        self.calls.append((path, config, split))
        return Stream(splits[split]) if streaming else Rows(splits[split])

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
