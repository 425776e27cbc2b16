"""--restarts: what counts as a crash, when it is given up, and a training that is killed and goes on by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from needs import needs

from whet import __main__
from whet.config import dump_yaml
from whet.recipes.sft import demo
from whet.telemetry.heartbeat import birth
from whet.train import restarts
from whet.train.restarts import again, newest_step, supervise
from whet.types import UserError

# ruff: noqa: SIM905 - a command line is read more easily as such
TRAINING = """
import json, os, sys, time
from pathlib import Path
run = Path(sys.argv[1])
ends = json.loads((run / "ends.json").read_text())
starts = run / "starts"
number = len(starts.read_text().splitlines()) if starts.exists() else 0
with starts.open("a") as file:
    print(*sys.argv[2:], file=file)
step, end = ends[number]
if step >= 0:
    (run / "config.yaml").touch()
if step > 0:
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").touch()
if end == "wait":
    time.sleep(60)
os.kill(os.getpid(), -end) if end < 0 else os._exit(end)
"""
"""A stand-in: at each start it saves a step (-1: it does not even begin), and ends with a status or by a signal."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(restarts, "COMMAND", (sys.executable, "-c", TRAINING))
    monkeypatch.setattr(restarts, "FIRST_S", 0.01)
    return tmp_path


CASES = [
    ([(8, 0)], 3, 0, 1, ""),
    (
        [(2, -9), (4, -11), (8, 0)],
        3,
        0,
        3,
        "killed (SIGKILL) after saving step 2; start 1 of 3 anew in 0.01 s",
    ),
    (
        [(2, 1), (4, 3), (8, 0)],
        3,
        0,
        3,
        "ended with status 3 after saving step 4; start 2 of 3 anew in 0.02 s",
    ),
    ([(0, -9), (8, 0)], 1, 0, 2, "(SIGKILL) after saving step 0"),
    ([(-1, 1), (-1, 1)], 9, 1, 2, "error: the training ended with status 1, no step was saved since"),
    (
        [(2, -9), (2, -9)],
        9,
        137,
        2,
        "no step was saved since the crash before (step 2): it is not started again",
    ),
    ([(2, -9), (4, -9)], 1, 137, 2, "(SIGKILL) after step 4, and --restarts 1 is used up"),
    ([(2, 2)], 3, 2, 1, ""),  # a mistake of the user's
    ([(2, -9), (4, 2)], 3, 2, 2, "start 1 of 3 anew"),
    ([(2, 128 + 15)], 3, 143, 1, ""),  # asked to stop, and saved
    ([(2, 128 + 2)], 3, 130, 1, ""),
    ([(0, -15)], 3, 143, 1, ""),  # asked before it listened
]


@pytest.mark.some(4)
@pytest.mark.parametrize(("ends", "limit", "status", "starts", "said"), CASES)
def test_what_is_started_again(
    ends: list[tuple[int, int]],
    limit: int,
    status: int,
    starts: int,
    said: str,
    run: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (run / "ends.json").write_text(json.dumps(ends))
    handler = signal.getsignal(signal.SIGTERM)
    assert supervise([str(run), "--resume", "40", "--lr", "1"], run, limit) == status
    assert signal.getsignal(signal.SIGTERM) == handler
    given = (run / "starts").read_text().splitlines()
    assert len(given) == starts
    assert given[0] == "--resume 40 --lr 1"
    # Of a run that did not begin there is nothing to go on with.
    assert given[1:] == ["--lr 1" + " --resume" * (ends[0][0] >= 0)] * (starts - 1)
    errors = capfd.readouterr().err
    assert said in errors
    assert ("whet:" in errors) == bool(said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_waiting_process_ends_both(number: int, run: Path) -> None:
    (run / "ends.json").write_text(json.dumps([(2, "wait"), (4, "wait")]))
    process = waiting(run)
    process.send_signal(number)
    assert process.wait(20) == 128 + number
    assert len((run / "starts").read_text().splitlines()) == 1


def test_under_nohup_a_lost_terminal_ends_neither(run: Path) -> None:
    (run / "ends.json").write_text(json.dumps([(2, "wait")]))
    process = waiting(run, "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM


def waiting(run: Path, first: str = "") -> subprocess.Popen[bytes]:
    """Supervise the stand-in in a process of its own; return when it waits."""
    code = first + (
        f"import sys; from pathlib import Path; from whet.train import restarts\n"
        f"restarts.COMMAND = (sys.executable, '-c', {TRAINING!r})\n"
        f"sys.exit(restarts.supervise([{str(run)!r}], Path({str(run)!r}), 3))"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 20
    while not newest_step(run) and time.monotonic() < end:
        time.sleep(0.02)
    return process


@needs("linux")
def test_the_training_ends_with_the_process_that_waits(run: Path) -> None:
    (run / "ends.json").write_text(json.dumps([(2, "wait")]))
    process = waiting(run)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    process.kill()
    process.wait()
    end = time.monotonic() + 10
    while birth(int(children[0])) is not None and time.monotonic() < end:
        time.sleep(0.02)
    assert birth(int(children[0])) is None


def test_a_signal_while_it_waits_to_start_again_ends_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_S", 60.0)
    (run / "ends.json").write_text(json.dumps([(2, -9)]))
    monkeypatch.setattr(restarts, "_say", lambda text: os.kill(os.getpid(), signal.SIGTERM))
    assert supervise([str(run)], run, 3) == 143


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["rl", "demo"], ["rl", "demo"]),
        (["rl", "demo", "--resume", "--lr", "3"], ["rl", "demo", "--lr", "3"]),
        (["rl", "demo", "--resume", "auto"], ["rl", "demo"]),
        (["rl", "--resume", "40", "demo"], ["rl", "demo"]),
        (["rl", "demo", "--resume=40", "--n", "40"], ["rl", "demo", "--n", "40"]),
    ],
)
def test_how_it_goes_on(words: list[str], kept: list[str], tmp_path: Path) -> None:
    assert again(words, tmp_path) == kept
    (tmp_path / "config.yaml").touch()
    assert again(words, tmp_path) == [*kept, "--resume"]


def test_newest_step(tmp_path: Path) -> None:
    assert newest_step(tmp_path) == 0
    for name in ("step_00000009", "step_00000010", ".tmp-step_00000011", "step_00000012"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if not name.endswith("12"):  # not whole
            (tmp_path / "checkpoints" / name / "manifest.json").touch()
    assert newest_step(tmp_path) == 10


def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given: list[tuple[list[str], Path, int]] = []
    monkeypatch.setattr(restarts, "supervise", lambda *words: given.append(words) or 7)
    assert __main__.run(["sft", "demo", "--restarts", "3", "--out", "runs/x", "--resume"]) == 7
    assert __main__.run(["dpo", "demo", "--out=runs/x", "--restarts=2"]) == 7
    assert given == [
        (["sft", "demo", "--out", "runs/x", "--resume"], Path("runs/x"), 3),
        (["dpo", "demo", "--out=runs/x"], Path("runs/x"), 2),
    ]
    # With --resume a run folder that is the recipe would be the run.
    (tmp_path / "config.yaml").write_text(dump_yaml(replace(demo(), out="runs/y")))
    assert __main__.run(["sft", str(tmp_path), "--restarts", "2"]) == 7
    assert given[2:] == [(["sft", str(tmp_path), "--out", "runs/y"], Path("runs/y"), 2)]
    for wrong in ("0", "-1", "x", "1.5"):
        with pytest.raises(UserError, match="--restarts .*: expected how often to start again after a crash"):
            __main__.run(["sft", "demo", "--restarts", wrong])
    with pytest.raises(UserError, match="unknown field '--restarts'|--restarts"):
        __main__.run(["eval", "demo", "--restarts", "3"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="under torchrun give torchrun --max-restarts"):
        __main__.run(["sft", "demo", "--restarts", "3"])
    __main__.run(["sft", "--help"])
    assert "--restarts N" in capsys.readouterr().out
    __main__.run(["eval", "--help"])
    assert "--restarts" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_training_that_is_killed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """A whole command: `kill -9` of the training, twice; its weights are those of an undisturbed run, bitwise."""
    words = (
        "sft demo --num-steps 60 --batch-size 8 --save-every 5 --validation-problems 0 --policy.num-threads 1 "
        "--policy.model.hidden-size 32 --policy.model.intermediate-size 64 --policy.model.num-layers 2"
    ).split()
    whet = [sys.executable, "-m", "whet", *words]
    subprocess.run([*whet, "--out", str(tmp_path / "straight")], check=True, capture_output=True)
    run = tmp_path / "run"
    command = [*whet, "--out", str(run), "--restarts", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        killed: list[int] = []
        while process.poll() is None and len(killed) < 2:
            beat = run / "heartbeats" / "rank_0.json"
            pid = json.loads(beat.read_text())["pid"] if beat.exists() else 0
            if pid not in (0, *killed) and newest_step(run) >= 10 * (1 + len(killed)):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            time.sleep(0.01)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert len(killed) == 2
    assert output.count("the training was killed (SIGKILL) after saving step ") == 2
    final = "checkpoints/step_00000060/model.safetensors"
    assert (run / final).read_bytes() == (tmp_path / "straight" / final).read_bytes()
