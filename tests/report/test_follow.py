"""What a run's folder says of the run: status by the clock, new rows once each, a resumed or deleted run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from whet.report.follow import (
    HEADLINES,
    RunFollower,
    duration,
    glance,
    planned_steps,
    read_appended,
    run_status,
)
from whet.report.part import read_part
from whet.telemetry.metrics import METRICS


def write(folder: Path, steps: range, mode: str = "a", **values: Any) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open(mode) as file:
        for step in steps:
            row = {
                "stage": "rl",
                "step": step,
                "time_s": 1000.0 + 10 * step,
                "rl/correct": step / 100,
                **values,
            }
            file.write(json.dumps(row) + "\n")


def steps_of(state: dict[str, Any]) -> list[int]:
    """The steps of rl/correct in the figures of a state."""
    for figure in state["figures"]:
        for panel in figure["panels"]:
            for series in panel["series"]:
                if series["name"] == "rl/correct":
                    return series["steps"]
    return []


def test_only_new_rows_are_sent(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    follower = RunFollower(tmp_path)
    first = follower.state()
    assert (steps_of(first), first["whole"]) == ([1, 2, 3], True)
    again = follower.state(first["cursor"])
    assert (again["figures"], again["whole"], again["cursor"]) == ([], False, first["cursor"])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "step": 4, "time_s": 1040.0, "rl/cor')
    assert follower.state(first["cursor"])["cursor"] == first["cursor"]  # torn: waited for
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('rect": 0.4}\n{damaged\n')
    write(tmp_path, range(5, 6))
    newer = follower.state(first["cursor"])
    assert (steps_of(newer), newer["whole"]) == ([4, 5], False)
    assert steps_of(follower.state()) == [1, 2, 3, 4, 5]  # somebody else begins
    assert newer["headline"][0] == {
        "label": "correct",
        "value": "5.0%",
        "meaning": METRICS["rl/correct"].meaning,
    }


def test_a_resumed_run_is_sent_whole(tmp_path: Path) -> None:
    write(tmp_path, range(1, 9), **{"rl/zero_variance_groups": 1.0})
    follower = RunFollower(tmp_path)
    state = follower.state()
    assert "over 90%" in state["warnings"][0]["text"]
    assert state["warnings"][0]["step"] == 5  # a mean of five rows
    write(tmp_path, range(1, 4), mode="w")
    newer = follower.state(state["cursor"])
    assert (steps_of(newer), newer["whole"], newer["warnings"]) == ([1, 2, 3], True, [])
    (tmp_path / "metrics.jsonl").unlink()
    gone = follower.state(newer["cursor"])
    assert (gone["figures"], gone["whole"], gone["status"]["kind"]) == ([], True, "waiting")


def test_cursors_of_nobody_are_the_beginning(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    for cursor in ("", "x", "5-0", "999999999-0", "-1-0", "10-zz", "9" * 40):
        rows, _, whole = read_appended(tmp_path / "metrics.jsonl", cursor)
        assert whole
        assert len(list(rows)) == 3


def test_status_goes_by_the_clock(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for now, kind, text in (
        (1052.0, "running", "running · step 5 · last row 2 s ago"),
        (1129.0, "running", "running · step 5 · last row 79 s ago"),  # eight of its steps take 80 s
        (1131.0, "silent", "stopped, or in a long step · step 5 · last row 81 s ago"),
        (900.0, "running", "running · step 5 · last row 0 s ago"),  # clocks differ
    ):
        status = run_status(tmp_path, rows, now)
        assert (status["kind"], status["text"]) == (kind, text)
    (tmp_path / "config.yaml").write_text("out: x\nnum_steps: 35\noptim:\n  num_steps: 7\n")
    assert (
        run_status(tmp_path, rows, 1052.0)["text"]
        == "running · step 5 of 35 · last row 2 s ago · about 5 min left"
    )
    (tmp_path / "config.yaml").write_text("num_steps: 5\n")
    assert run_status(tmp_path, rows, 9e9)["kind"] == "finished"
    assert run_status(tmp_path, [], 0.0)["kind"] == "waiting"
    assert run_status(tmp_path / "none", rows, 0.0)["kind"] == "gone"
    (tmp_path / "eval_samples.jsonl").touch()
    assert run_status(tmp_path, [], 0.0)["text"] == "an evaluation without a result yet"
    (tmp_path / "eval.json").touch()
    assert run_status(tmp_path, [], 0.0)["text"] == "an evaluation, finished"
    (tmp_path / "config.yaml").unlink()
    assert run_status(tmp_path, rows, 9e9)["kind"] == "finished", "its own row of metrics is old"


def test_the_time_left_is_told_without_the_pause_before_a_resume(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("num_steps: 12\n")
    rows = [
        {"step": 1, "time_s": 1000.0, "run_time_s": 10.0},
        {"step": 2, "time_s": 9000.0, "run_time_s": 40.0},
    ]
    found = run_status(tmp_path, rows, 9001.0)["text"]
    assert found == "running · step 2 of 12 · last row 1 s ago · about 5 min left"


def test_a_summary_newer_than_the_metrics_ends_a_run(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    last_s = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["time_s"]
    (tmp_path / "summary.json").write_text('{"a": 1}')
    os.utime(tmp_path / "metrics.jsonl", (last_s + 900, last_s + 900))  # copied after the summary
    os.utime(tmp_path / "summary.json", (last_s, last_s))
    assert glance(tmp_path)["kind"] == "finished"
    assert read_part(tmp_path, ".").state == "finished"
    os.utime(tmp_path / "summary.json", (last_s - 60, last_s - 60))  # resumed, to go further
    assert glance(tmp_path)["kind"] == "silent"
    assert read_part(tmp_path, ".").state == "stopped"


def test_a_glance_reads_the_end_alone(tmp_path: Path) -> None:
    write(tmp_path, range(1, 2000), **{"rl/reward/x": 0.123456789})
    assert (tmp_path / "metrics.jsonl").stat().st_size > 2 * 65536
    assert glance(tmp_path)["step"] == 1999
    assert glance(tmp_path / "none")["kind"] == "gone"


def test_hostile_rows_and_configs(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for row in (
            {"stage": ["rl"], "step": 10**30, "rl/correct": 1.0},
            {"stage": "rl", "step": 1, "rl/correct": "<b>", "rl/grad_norm": None},
            {"stage": "rl", "step": "2", "rl/correct": 0.5},
            {"stage": "rl", "step": 3, "time_s": "now", "rl/<img>": 0.5},
        ):
            file.write(json.dumps(row) + "\n")
    (tmp_path / "config.yaml").write_bytes(b"num_steps: " + b"9" * 5000 + b"\n\xff\xfe\n")
    state = RunFollower(tmp_path).state()
    assert state["status"]["step"] == 3
    assert state["status"]["num_steps"] is None
    assert [warning["text"][:13] for warning in state["warnings"]] == ["rl/grad_norm "]
    assert planned_steps(tmp_path) is None


def test_every_headline_is_a_declared_metric() -> None:
    for names in HEADLINES.values():
        assert set(names.split()) <= METRICS.keys()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (99, "99 s"), (150, "2 min"), (5999, "100 min"), (9000, "2.5 h"), (200000, "2 days")],
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_warnings_of_long_runs_come_at_once_and_words_are_no_warning(tmp_path: Path) -> None:
    rows = [
        {"stage": "rl", "step": step, "rl/grad_norm": None if step == 50 else 1.0}
        for step in range(1, 10_000)
    ]
    rows[99]["rl/grad_norm"] = "word"
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    follower = RunFollower(tmp_path)
    assert [warning["step"] for warning in follower.state()["warnings"]] == [50]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "step": 10000, "rl/grad_norm": null}\n')
    assert [warning["step"] for warning in follower.state()["warnings"]] == [10_000, 50]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "step": 10001, "rl/grad_norm": 1.0}\n')
    assert [warning["step"] for warning in follower.state()["warnings"]] == [10_000, 50]


def test_a_run_that_a_signal_stopped_is_stopped_and_no_longer_when_it_goes_on(tmp_path: Path) -> None:
    rows = [{"step": step, "time_s": 1000.0 + step} for step in range(1, 6)]
    (tmp_path / "config.yaml").write_text("num_steps: 20\n")
    (tmp_path / "heartbeats").mkdir()
    beat = tmp_path / "heartbeats/rank_0.json"
    for state, time_s, kind in (
        ("running", 1006.0, "running"),
        ("preempted", 1006.0, "stopped"),
        ("failed", 1006.0, "stopped"),
        ("preempted", 1003.0, "running"),  # before it was resumed
    ):
        beat.write_text(json.dumps({"state": state, "time": time_s}))
        found = run_status(tmp_path, rows, 1010.0)
        assert found["kind"] == kind, state
    beat.write_text(json.dumps({"state": "preempted", "time": 1006.0}))
    assert run_status(tmp_path, rows, 9000.0)["text"] == (
        "stopped by a signal, and saved · step 5 of 20 · last row 2.2 h ago"
    )
