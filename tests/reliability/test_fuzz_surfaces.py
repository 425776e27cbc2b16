"""The short form of bench/reliability/fuzz.py: some inputs of every surface are taken or refused, none does harm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "bench/reliability/fuzz.py"


def fuzz(*words: str, out: Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, str(PROGRAM), "--json", "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


SLOW = ("chat template", "report of a run")  # 0.5 s and 2 s an input


@pytest.mark.ci
def test_hostile_input_of_every_cheap_surface(tmp_path: Path) -> None:
    words = [word for name in SLOW for word in ("--skip", name)]
    status, found = fuzz("--trials", "270", "--seed", "7", *words, out=tmp_path)
    failures = [failure for row in found["surfaces"].values() for failure in row["failures"]]
    assert (status, failures) == (0, [])
    assert len(found["surfaces"]) == 15
    for name, row in found["surfaces"].items():
        assert row["inputs"] >= 5, name
        assert row["taken"] >= 1, name
        assert row["refused"] >= 1 or name in ("completions", "report of an eval"), name


@pytest.mark.slow
def test_hostile_input_of_the_slow_surfaces(tmp_path: Path) -> None:
    for name in SLOW:
        assert fuzz("--trials", "15", "--seed", "7", "--surface", name, out=tmp_path)[0] == 0


@pytest.mark.ci
def test_each_kind_of_harm_is_seen_and_kept(tmp_path: Path) -> None:
    status, found = fuzz("--surface", "self-test", "--trials", "6", out=tmp_path)
    assert status == 1
    failures = {failure["index"]: failure for failure in found["surfaces"]["self-test"]["failures"]}
    messages = ("KeyError", "more than", "memory grew", "status -11", "os.system", "for writing")
    assert len(failures) == len(messages)
    for index, message in enumerate(messages):
        assert message in failures[index]["message"]
        assert f"--index {index}" in failures[index]["repeat"]
    assert len(list(tmp_path.glob("self-test-*/repeat.txt"))) == len(messages)
