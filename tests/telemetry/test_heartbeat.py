from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from late import wait_for

from whet.telemetry.heartbeat import EXIT_HUNG, Heartbeat, birth
from whet.types import UserError

# Without torch, which whet.ranks.collectives imports: most of the seconds would be its.
BEGIN = """
import ctypes, os, sys, time, types
from pathlib import Path
sys.modules["whet.ranks.collectives"] = types.ModuleType("whet.ranks.collectives")
sys.modules["whet.ranks.collectives"].current_collective = lambda: ""
sys.modules["whet.ranks.collectives"].world_size = lambda: 1
sys.modules["whet.ranks.collectives"].is_distributed = lambda: False
sys.modules["whet.ranks.collectives"].gather_json = lambda value: [value]
from whet.telemetry.heartbeat import Heartbeat
run = Path(sys.argv[1])
"""


def start(run: Path, code: str) -> subprocess.Popen[str]:
    """Run code in a process of its own, after BEGIN."""
    words = [sys.executable, "-c", BEGIN + textwrap.dedent(code), str(run)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def state(run: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((run / "heartbeats" / f"rank_{rank}.json").read_bytes())


def stacks(run: Path) -> str:
    return (run / "heartbeats" / "rank_0.stacks.txt").read_text()


def test_a_sleeping_thread_is_found_and_the_process_ends(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        def stuck():
            time.sleep(60)
        with Heartbeat(run, 0, timeout_s=0.6) as heartbeat:
            heartbeat.beat("reward", 7)
            stuck()
        """,
    )
    _, errors = process.communicate(timeout=30)
    assert process.returncode == EXIT_HUNG == 3
    (line,) = errors.strip().splitlines()
    assert re.match(
        r"whet: error: rank 0 hangs: no sign of life for \d s in phase 'reward' of step 7; ", line
    )
    assert str(tmp_path / "heartbeats" / "rank_0.stacks.txt") in line
    assert f"whet doctor hang {tmp_path}" in line
    assert "--resume" in line
    assert "in stuck" in stacks(tmp_path)
    found = state(tmp_path)
    assert (found["state"], found["phase"], found["step"]) == ("hung", "reward", 7)
    assert found["reason"] in line


def test_a_call_that_keeps_the_interpreter_to_itself_is_found(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        def stuck():
            ctypes.PyDLL(None).sleep(60)
        with Heartbeat(run, 0, timeout_s=0.6) as heartbeat:
            heartbeat.beat("train", 2)
            time.sleep(0.4)
            stuck()
        """,
    )
    _, errors = process.communicate(timeout=30)
    assert process.returncode == EXIT_HUNG
    (line,) = errors.strip().splitlines()
    assert (
        "rank 0 hangs: no sign of life for 1 s in or after phase 'train' of step 2, in a call that keeps the"
        in line
    )
    assert str(tmp_path / "heartbeats" / "rank_0.stacks.txt") in line
    assert "in stuck" in stacks(tmp_path)
    assert state(tmp_path)["state"] == "running"  # no Python code could run


def test_a_line_for_the_shell_is_only_printed(tmp_path: Path) -> None:
    run = tmp_path / "it's $(touch made) `touch made` % \\n; touch made"
    process = start(
        run,
        """
        with Heartbeat(run, 0, timeout_s=0.4):
            ctypes.PyDLL(None).sleep(60)
        """,
    )
    _, errors = process.communicate(timeout=30)
    assert process.returncode == EXIT_HUNG
    assert f"whet doctor hang {run}" in errors
    assert not Path("made").exists()


def test_without_a_folder_the_stacks_go_to_stderr(tmp_path: Path) -> None:
    for call in ("time", "ctypes.PyDLL(None)"):
        process = start(
            tmp_path,
            f"""
            def stuck():
                {call}.sleep(60)
            with Heartbeat(None, 0, timeout_s=0.4, phase="preflight"):
                stuck()
            """,
        )
        _, errors = process.communicate(timeout=30)
        assert process.returncode == EXIT_HUNG
        assert "in stuck" in errors
        assert re.search("whet: error: rank 0 hangs: .*'preflight' of step 0.*start it again", errors)
    assert not (tmp_path / "heartbeats").exists()


def test_signs_of_life_from_wherever_work_is_done(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        from whet.telemetry.display import PlainDisplay, advancing
        from whet.telemetry.heartbeat import alive, current
        alive("nobody listens")
        advance = advancing(PlainDisplay("pass rates", 20, (), stream=sys.stdout))
        with Heartbeat(run, 0, timeout_s=0.6):
            alive("curriculum")
            for _ in range(15):
                time.sleep(0.1)
                advance(1)
        assert current() is None
        """,
    )
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert state(tmp_path)["phase"] == "curriculum"


@pytest.mark.ci
def test_a_download_may_take_longer_than_the_limit_but_not_keep_the_interpreter(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        from whet.telemetry.heartbeat import downloading
        def stuck():
            ctypes.PyDLL(None).sleep(60)
        with downloading(), downloading():  # nobody watches
            pass
        with Heartbeat(run, 0, timeout_s=0.4, phase="load"):
            with downloading():
                time.sleep(1.5)
            time.sleep(0.2)
            with downloading():
                stuck()
        """,
    )
    _, errors = process.communicate(timeout=30)
    assert process.returncode == EXIT_HUNG
    assert "in stuck" in stacks(tmp_path)
    assert "in or after phase 'load' of step 0, in a call that keeps the interpreter to itself" in errors


def test_a_hang_while_it_ends_is_bounded_too(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        from whet.telemetry import heartbeat as module
        module.GRACE_S, put_off = 0.25, module._Deadline.put_off
        module._Deadline.put_off = lambda self, seconds, line: seconds == 0.25 and put_off(self, seconds, line)
        module.faulthandler.dump_traceback = lambda *rest, **options: time.sleep(60)
        with Heartbeat(run, 0, timeout_s=0.4):
            time.sleep(60)
        """,
    )
    _, errors = process.communicate(timeout=30)
    assert process.returncode == EXIT_HUNG
    assert "rank 0 hangs: no sign of life for 0 s in phase 'start' of step 0" in errors


def test_no_processes_of_the_isolation_stay_behind(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        from whet.sandbox.graders.graders import GraderPool
        from whet.sandbox.programs import Sandbox
        pool, box = GraderPool("os.path:basename", num_workers=1), Sandbox(num_workers=1)
        assert pool.map([["a/b"]])[0].value == "b" and box.run("print(1)").stdout == "1\\n"
        with Heartbeat(run, 0, timeout_s=0.4):
            children = set()
            for stat in Path("/proc").glob("[0-9]*/stat"):
                words = stat.read_text().rpartition(")")[2].split()
                if int(words[1]) == os.getpid():
                    children.add(stat.parent.name)
            print(*children, flush=True)
            time.sleep(60)
        """,
    )
    output, errors = process.communicate(timeout=30)
    assert process.returncode == EXIT_HUNG, errors
    children = [int(word) for word in output.split()]
    assert len(children) >= 2
    deadline = time.monotonic() + 5
    while any(birth(child) is not None for child in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [child for child in children if birth(child) is not None] == []


def test_json_that_always_parses_and_no_thread_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.telemetry.heartbeat.INTERVAL_S", 0.002)
    before = threading.active_count()
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats" / ".rank_1.json.7.partial").write_text("of a killed process")
    with Heartbeat(tmp_path, 1, timeout_s=60) as heartbeat:
        end, step, seen = time.monotonic() + 20, 0, set()
        while len(seen) <= 20 and time.monotonic() < end:
            step += 1
            heartbeat.beat("sample", step)
            found = state(tmp_path, 1)
            assert found["state"] == "running"
            seen.add(found["beats"])
            time.sleep(0.0005)
    assert len(seen) > 20
    assert threading.active_count() == before
    found = state(tmp_path, 1)
    assert (found["state"], found["step"], found["pid"], found["rank"]) == ("finished", step, os.getpid(), 1)
    assert [path.name for path in (tmp_path / "heartbeats").iterdir()] == ["rank_1.json"]


@pytest.mark.ci
def test_no_false_alarm_whatever_the_clock_on_the_wall_says(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        """
        calls = iter(range(10**6))
        time.time = lambda: 1e9 * (-1) ** next(calls)
        with Heartbeat(run, 0, timeout_s=1.0) as heartbeat:
            for step in range(15):
                heartbeat.beat("train", step)
                time.sleep(0.1)
        time.sleep(1.4)  # nobody watches any more
        """,
    )
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert state(tmp_path)["state"] == "finished"


def test_timeout_0_watches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.telemetry.heartbeat.INTERVAL_S", 0.02)
    with Heartbeat(tmp_path, 0, timeout_s=0):
        # the thread goes on writing, and nothing ends
        assert wait_for(lambda: state(tmp_path)["silent_s"] > 0.03)
    assert state(tmp_path)["state"] == "finished"


@pytest.mark.parametrize(
    ("error", "expected", "reason"),
    [
        (KeyboardInterrupt(), "preempted", ""),
        (SystemExit(128 + signal.SIGTERM), "preempted", ""),
        (SystemExit(0), "finished", ""),
        (SystemExit(2), "failed", "SystemExit: 2"),
        (UserError("step 3: loss is nan\nmore"), "failed", "UserError: step 3: loss is nan"),
        (ValueError(), "failed", "ValueError"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, error: BaseException, expected: str, reason: str) -> None:
    def run() -> None:
        with Heartbeat(tmp_path, 0, timeout_s=60) as heartbeat:
            heartbeat.beat("train", 3)
            raise error

    with pytest.raises(type(error)):
        run()
    found = state(tmp_path)
    assert (found["state"], found["reason"], found["step"]) == (expected, reason, 3)


def test_the_collective_that_a_rank_waits_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.ranks.collectives.current_collective", lambda: "sum of gradients")
    with Heartbeat(tmp_path, 0, timeout_s=60):
        assert state(tmp_path)["collective"] == "sum of gradients"
    assert state(tmp_path)["collective"] == ""


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "heartbeats").write_text("a file")
    with pytest.raises(UserError, match="cannot be written"), Heartbeat(tmp_path, 0, timeout_s=1):
        pass
    with pytest.raises(ValueError, match="timeout_s = nan: expected 0 or more"):
        Heartbeat(tmp_path, 0, timeout_s=float("nan"))


def test_birth_tells_processes_apart() -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert (birth(child.pid) or 0) >= (birth(os.getpid()) or 0) > 0
    child.kill()
    while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT) is None:
        pass
    assert birth(child.pid) is None  # dead, and not waited for
    child.wait()
    assert birth(child.pid) is None
