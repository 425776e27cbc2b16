from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from whet import cli
from whet.inspect.doctor import doctor
from whet.inspect.doctor.hang import findings, read_ranks
from whet.telemetry.heartbeat import Heartbeat, birth


def check(*words: str) -> int:
    parsed = cli.parse("whet doctor", doctor.DoctorConfig, {}, words, resumable=False, positional="check")
    return cli.guard(lambda: doctor.main(parsed.config))


def beat(run: Path, rank: int, *, stacks: str = "", **changes: Any) -> None:
    """Write the heartbeat of a rank that works, in this process, with some fields changed."""
    content: dict[str, Any] = {
        "rank": rank,
        "ranks": 2,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "born": birth(os.getpid()),
        "state": "running",
        "reason": "",
        "phase": "train",
        "step": 4,
        "beats": 20,
        "silent_s": 0.5,
        "timeout_s": 60.0,
        "collective": "",
        "time": time.time(),
    }
    folder = run / "heartbeats"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank_{rank}.json").write_text(json.dumps(content | changes))
    (folder / f"rank_{rank}.stacks.txt").write_text(stacks)


def states(run: Path) -> list[str]:
    return [rank.state for rank in read_ranks(run)]


def dead_pid() -> int:
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def test_a_run_that_works_and_one_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Heartbeat(tmp_path / "a", 0, timeout_s=60) as heartbeat:
        heartbeat.beat("reward", 5)
        beat(tmp_path / "b", 0)
        beat(tmp_path / "b", 1)
        assert check("hang", str(tmp_path / "a"), str(tmp_path / "b")) == 0
    assert check("hang", str(tmp_path / "a")) == 0
    printed = capsys.readouterr().out
    assert printed.count("all is well") == 3
    assert "finished" in printed


def test_dead_hanging_stopped_missing(tmp_path: Path) -> None:
    beat(tmp_path, 0, ranks=7, pid=dead_pid())
    beat(tmp_path, 1, ranks=7, silent_s=61.0)
    beat(tmp_path, 2, ranks=7, silent_s=61.0, timeout_s=0)  # no watchdog: ten minutes count as a hang
    beat(tmp_path, 3, ranks=7, silent_s=601.0, timeout_s=0)
    beat(tmp_path, 4, ranks=7, time=time.time() - 40)
    beat(tmp_path, 5, ranks=7, time=time.time() - 40, host="elsewhere")
    beat(tmp_path, 9, ranks=10, time=time.time() - 500)  # of an earlier life with more ranks
    found = read_ranks(tmp_path)
    assert [rank.state for rank in found] == [
        "died",
        "hangs",
        "running",
        "hangs",
        "stopped",
        "died",
        "missing",
    ]
    assert [rank.alive[:10] for rank in found] == ["no", "yes", "yes", "yes", "yes", "last heart", ""]
    assert [rank.is_well for rank in found] == [False, False, True, False, False, False, False]
    assert [rank.silent_s for rank in found[:5]] == pytest.approx(
        [0.5, 61, 61, 601, 40.5], abs=15
    )  # slow machines


def test_the_newest_says_how_many_ranks_there_are(tmp_path: Path) -> None:
    for old, new in ((0, 1), (1, 0)):
        beat(tmp_path, old, ranks=old + 1, time=time.time() - 500)
        beat(tmp_path, new, ranks=new + 1)
        assert len(states(tmp_path)) == new + 1


def test_one_bad_run_of_two_is_enough(tmp_path: Path) -> None:
    beat(tmp_path / "a", 0, ranks=1, state="failed")
    beat(tmp_path / "b", 0, ranks=1)
    assert check("hang", str(tmp_path / "a"), str(tmp_path / "b")) == 1


def test_a_process_id_that_another_process_got(tmp_path: Path) -> None:
    beat(tmp_path, 0, ranks=1, born=(birth(os.getpid()) or 0) - 1)
    assert states(tmp_path) == ["died"]


def test_who_is_behind(tmp_path: Path) -> None:
    beat(tmp_path, 0, step=4)
    beat(tmp_path, 1, step=3, phase="reward")
    assert findings(read_ranks(tmp_path)) == ["all is well", "behind: rank 1 ('reward' of step 3)"]
    beat(tmp_path, 0, step=3, collective="sum of gradients")
    assert findings(read_ranks(tmp_path)) == [
        "all is well",
        "behind: rank 1 ('reward' of step 3); waiting: rank 0 in sum of gradients",
    ]
    beat(
        tmp_path, 1, step=3, beats=99, collective="sum of gradients"
    )  # rank 0 saves, too: it gives more signs
    assert findings(read_ranks(tmp_path)) == ["all is well"]
    beat(tmp_path, 1, step=3, silent_s=99.0)
    lines = findings(read_ranks(tmp_path))
    assert "no heartbeat for" in lines[0]
    assert lines[1].startswith("behind: rank 1 ")


def test_a_hung_run_is_shown_with_the_main_threads_stack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = "Thread 1 (most recent call first):\n  File a.py, line 1 in other\n\n"
    main = "Thread 2 (most recent call first):\n  File \x1b[2Jb.py, line 7 in stuck\n  File b.py, line 9 in <module>\n"
    beat(tmp_path, 0, ranks=1, state="hung", reason="no sign of life [red]", pid=1, stacks=threads + main)
    assert check("hang", str(tmp_path)) == 1
    printed = capsys.readouterr().out
    assert "rank 0 hung and was ended: no sign of life [red]; continue with --resume" in printed
    assert "line 7 in stuck" in printed
    assert "line 1 in other" not in printed
    assert "\x1b" not in printed


def test_died_with_stacks_was_locked(tmp_path: Path) -> None:
    beat(tmp_path, 0, ranks=1, pid=dead_pid())
    assert "(killed?)" in findings(read_ranks(tmp_path))[0]
    beat(tmp_path, 0, ranks=1, pid=dead_pid(), stacks="Timeout (0:01:00)!\nThread 1:\n  File a.py\n")
    assert "held the GIL" in findings(read_ranks(tmp_path))[0]


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"{", b"\xff", b'{"state": {}, "pid": "x", "ranks": 1e300, "time": "now"}']
)
def test_hostile_heartbeats(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats" / "rank_0.json").write_bytes(content)
    (tmp_path / "heartbeats" / "rank_x.json").write_bytes(b"{}")
    assert check("hang", str(tmp_path)) in (0, 1)
    assert "rank" in capsys.readouterr().out


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["hang", str(tmp_path)], f"{tmp_path}: no heartbeats; expected the folder of a training run"),
        (["hang", str(tmp_path / "no")], "no such run or folder"),
        (["hang"], "check = hang: expected the folder of a run, as in 'whet doctor hang runs/demo-rl'"),
        ([], "check = '': expected kernels, sandbox, determinism, cluster, or hang RUN"),
        (["sandbox", "x"], "check = 'sandbox x': expected nothing after sandbox"),
        (["hang", str(tmp_path), "--only", "x"], "only is not read by the check hang; leave it out"),
        (["sandbox", "--of", "sft"], "of is not read by the check sandbox; leave it out"),
        (["determinism", "--num-workers", "1"], "num_workers is not read by the check determinism"),
    ):
        assert cli.guard(lambda words=words: check(*words)) == 2
        assert message in capsys.readouterr().err
