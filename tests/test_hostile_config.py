"""YAML that the fuzzer found: refused in one line, whatever it does to PyYAML or to Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from whet.config import load_yaml
from whet.telemetry.log import read_rows
from whet.telemetry.trackers import Link, TrackedRun, as_item, open_run, read_entries
from whet.types import UserError


@dataclass(frozen=True, kw_only=True)
class Config:
    """Two fields."""

    seed: int = 0
    names: tuple[str, ...] = ()


BOMB = "names:\n" + "".join(f"- &x{i} [{', '.join([f'*x{i - 1}'] * 9) if i else 'x'}]\n" for i in range(12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, r"alias \*x0"),
        ("seed: !!timestamp 2001", "malformed YAML"),
        ("seed: !!bool maybe", "malformed YAML"),
        (f"seed: 0x{'f' * 5000}", "thousands of digits"),
        (f"names: [0x{'f' * 5000}]", "thousands of digits"),
    ],
)
def test_hostile_yaml_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_yaml(tmp_path / "config.yaml", Config)
    assert "\n" not in str(caught.value)


def test_trackers_read_the_config_as_strictly(tmp_path: Path) -> None:
    class Opened:
        """A tracker that keeps what it is opened with."""

        def open(self, run: TrackedRun) -> Link:
            self.config = run.config
            return Link(id="x")

    tracker: Any = Opened()
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    open_run(tracker, tmp_path, 0, None)
    assert tracker.config == {"seed": 3}
    (tmp_path / "config.yaml").write_text(BOMB)
    with pytest.raises(UserError, match="alias"):
        open_run(tracker, tmp_path, 0, None)


def test_a_folder_in_the_place_of_a_log_has_no_rows(tmp_path: Path) -> None:
    assert list(read_rows(tmp_path)) == []


def test_rows_of_strangers_are_sent_where_they_have_a_step_and_numbers() -> None:
    row = {"step": 3, "time_s": 5.0, "a/b": 1, "a/c": [1], "a/d": 10**400, "a/e": True, "a/f": float("nan")}
    item = as_item("metrics.jsonl", [row], 2)
    assert item is not None
    assert (item.step, item.time_s, item.values) == (3, 5.0, {"a/b": 1})
    for step in ("\x00", [3], {}, None, 10**400, 2**60, float("inf")):
        assert as_item("metrics.jsonl", [row | {"step": step}], 2) is None
        assert as_item("samples.jsonl", [{"step": step, "completion": "x"}], 2) is None
    late = as_item("metrics.jsonl", [row | {"time_s": ["x"]}], 2)
    assert late is not None
    assert late.time_s == 0.0


def test_entries_of_trackers_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    for text in ("[" * 100_000, "{", "[1]", '[{"id": 1}]', "3"):
        (tmp_path / "trackers.json").write_text(text)
        assert read_entries(tmp_path) == {}
