"""Workers that import a script which starts workers: refused in one line; and nothing outlives whom it served."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from whet.sandbox import reentry
from whet.sandbox.graders.graders import GraderPool
from whet.types import UserError

MARK = "WHET_TEST_SESSION"
LIMIT_S = 10.0
"""No process of a session may be there so long after its end."""


def marked(mark: str) -> dict[int, str]:
    """Return the live processes that a session started, by the environment that they inherited, with their commands."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "environ").read_bytes().split(b"\0")
            is_zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if f"{MARK}={mark}".encode() in words and not is_zombie:
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (OSError, ValueError):
            continue
    return found


def descendants(pid: int) -> set[int]:
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return set()
    return {pid}.union(*map(descendants, children))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left_after(mark: str, pids: set[int], but: int = 0) -> list[str]:
    """Return what is still there at the end of the time limit; most often it is gone within a second."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        left = [command for pid, command in marked(mark).items() if pid != but]
        left += [str(pid) for pid in pids if is_alive(pid)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def start(file: Path, code: str, mark: str, *arguments: str) -> subprocess.Popen[str]:
    file.write_text(textwrap.dedent(code))
    return subprocess.Popen(
        [sys.executable, str(file), *arguments],
        env=os.environ | {MARK: mark, "WHET_KERNELS": "eager", "OMP_NUM_THREADS": "1"},
        cwd=file.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


TRAINING = """
from dataclasses import replace
import torch
from whet.generate.sampling import SamplingParams
from whet.model.config import ModelConfig
from whet.recipes.models import demo_policy
from whet.tasks.made import arithmetic
from whet.tasks.made.arithmetic import Arithmetic
from whet.train.rl import train
from whet.train.rl_config import RLConfig
from whet.train.optim.step import OptimConfig

print("top level")
every, LIMIT = Arithmetic.problems, 1000
arithmetic.NUM_PROBLEMS = 2000
Arithmetic.problems = lambda self, split: every(self, split)[:50]

def share(text):
    return len(text) / LIMIT

def shorter(problem, completion):
    return max(0.0, 1 - share(completion))

shape = ModelConfig(
    hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=64
)
train(RLConfig(
    out="run", policy=replace(demo_policy(), model=shape, max_rows=64), sampling=SamplingParams(max_new_tokens=14),
    optim=OptimConfig(token_budget=200), num_steps=1, num_prompts=2, group_size=2, reward=("api.py:shorter",),
))
print("done")
"""


@pytest.mark.ci
def test_a_script_with_its_reward_in_it_trains(tmp_path: Path) -> None:
    """As every example of TRL has it: no guard, and the reward a few lines above the call."""
    script = start(tmp_path / "api.py", TRAINING, str(tmp_path))
    said, _ = script.communicate(timeout=100)
    assert script.returncode == 0, said
    assert said.count("top level") == 1
    assert said.rstrip().endswith("done")
    samples = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 4
    assert all('"shorter": 0.9' in line or '"shorter": 1.0' in line for line in samples)
    assert left_after(str(tmp_path), set()) == []


@pytest.mark.ci
@pytest.mark.parametrize("how", ["error", "SIGINT", "SIGTERM", "SIGKILL"])
def test_a_script_that_trains_at_its_top_level_leaves_nothing(how: str, tmp_path: Path) -> None:
    """It once started itself without end, below workers that outlived it."""
    code = TRAINING.replace("num_steps=1", "num_steps=100_000").replace("train(RLConfig(", "run(RLConfig(")
    if how == "error":
        code = (
            code.replace("run(RLConfig(", "running = steps(RLConfig(")
            + "next(running)\nraise ValueError('an end')\n"
        )
    code = f"from whet.train.rl import steps, train as run\n{code}"
    script = start(tmp_path / "api.py", code, str(tmp_path))
    rows = tmp_path / "run" / "metrics.jsonl"
    deadline, most = time.monotonic() + 100, 0
    while script.poll() is None and time.monotonic() < deadline:
        most = max(most, len(marked(str(tmp_path))))
        if how != "error" and rows.exists() and rows.stat().st_size:
            break
        time.sleep(0.05)
    seen = descendants(script.pid) - {script.pid}
    if how != "error":
        assert script.poll() is None
        assert len(seen) >= 3  # the keeper, the server, a worker
        script.send_signal(getattr(signal, how))
    said, _ = script.communicate(timeout=60)
    assert left_after(str(tmp_path), seen) == []
    assert said.count("top level") == 1
    assert most <= 8, "a script, its keeper, server and workers: no second training"
    status = {"error": 1, "SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9}[how]
    assert script.returncode == status, said


SESSION = """
import os, subprocess, sys, time
from whet.sandbox.graders.graders import GraderPool
from whet.sandbox.programs import Sandbox

def hang(kind):
    subprocess.Popen(["sleep", "100"])
    subprocess.Popen(["sleep", "100"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        time.sleep(100)
    open("hanging", "a").write("x")
    time.sleep(100)

def import_hangs():
    subprocess.Popen(["sleep", "100"], start_new_session=True)
    open("hanging", "a").write("x")
    while True:
        pass

how = sys.argv[1]
if how == "import":
    GraderPool(hang, prepare=f"{__file__.replace('session', 'slow')}:import_hangs")
box = Sandbox(num_workers=1)
assert box.run("print(1)").stdout == "1\\n"
pool = GraderPool(hang, deadline_s=90.0, num_workers=1)
if (fork := os.fork()) == 0:  # such as a loader of data: it holds copies of all sockets and pipes
    time.sleep(60)
    os._exit(0)
import threading
threading.Thread(target=pool.map, args=([("",)],), daemon=True).start()
while not os.path.exists("hanging"):
    time.sleep(0.01)
print(fork, flush=True)
sys.stdin.read()
if how == "exception":
    raise ValueError("an end")
"""


@pytest.mark.some(2)
@pytest.mark.parametrize("how", ["normal", "exception", "SIGINT", "SIGTERM", "SIGKILL", "import"])
def test_nothing_is_left_after_any_end(how: str, tmp_path: Path) -> None:
    """Of workers that hang, of what these started and hid in sessions of its own, of the sandbox; also mid-import."""
    slow = SESSION.partition("def import_hangs")[2].partition("how =")[0]
    (tmp_path / "slow.py").write_text(f"import os, subprocess\ndef import_hangs{slow}")
    session = start(tmp_path / "session.py", SESSION, str(tmp_path), how)
    assert session.stdin is not None
    assert session.stdout is not None
    fork = 0
    if how == "import":
        while not (tmp_path / "hanging").exists():
            assert session.poll() is None, session.stdout.read()
            time.sleep(0.01)
    else:
        fork = int(session.stdout.readline())
    deadline = time.monotonic() + 10
    while True:  # a program that has just begun shows no environment yet
        seen = descendants(session.pid) - {session.pid, fork}
        if len(seen & marked(str(tmp_path)).keys()) >= 3:
            break
        assert time.monotonic() < deadline, marked(str(tmp_path))
        time.sleep(0.01)
    if how not in ("normal", "exception"):
        session.send_signal(getattr(signal, how, signal.SIGKILL))
    session.stdin.close()  # what it waits for
    session.wait(30)
    left = left_after(str(tmp_path), seen, but=fork)
    if fork:
        os.kill(fork, signal.SIGKILL)
    assert left == []
    session.stdout.close()


LIBRARY = """
from whet.sandbox.graders.graders import GraderPool
import helper

def score(x):
    return x + helper.NUMBER + BELOW

def nested(x):
    return GraderPool("whet.rewards.answers.extract:extract_answer").map([(x,)])[0].value

def chain(x):
    return GraderPool(f"{__file__}:score").map([(x,)])[0].value

if BEGINS:
    POOL = GraderPool(score)
BELOW = 1
"""


def library(folder: Path, *, begins: bool) -> str:
    (folder / "helper.py").write_text("NUMBER = 10\n")
    (folder / "library.py").write_text(LIBRARY.replace("BEGINS", str(begins)))
    return f"{folder / 'library.py'}:"


def test_a_file_that_starts_workers_when_imported_gives_its_function_nonetheless(tmp_path: Path) -> None:
    """With the module beside it, which the import of the file would find, too."""
    with GraderPool(library(tmp_path, begins=True) + "score", num_workers=1) as graders:
        (outcome,) = graders.map([(5,)])
    assert (outcome.value, outcome.message) == (16, "")


def test_a_worker_starts_no_pool_but_runs_what_is_whets_own(tmp_path: Path) -> None:
    spec = library(tmp_path, begins=False)
    with GraderPool(spec + "nested", num_workers=1) as graders:
        assert graders.map([("#### 12",)])[0].value == "12"
    with GraderPool(spec + "chain", num_workers=1) as graders:
        (outcome,) = graders.map([(5,)])
    assert outcome.kind == "error"
    assert "\n" not in outcome.message
    assert "a pool of graders was started inside the worker process of" in outcome.message
    assert "move the call under if __name__ == '__main__':" in outcome.message


def test_a_worker_and_an_import_start_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    reentry.refuse_reentry("a training")
    with reentry.importing("task.py"):
        reentry.refuse_in_worker("a pool of graders")
        with pytest.raises(UserError, match="a training was started inside the import of task.py, and would"):
            reentry.refuse_reentry("a training")
    reentry.refuse_reentry("a training")
    monkeypatch.setenv(reentry.VARIABLE, "api.py:shorter")
    for refuse in (reentry.refuse_reentry, reentry.refuse_in_worker):
        with pytest.raises(UserError, match="inside the worker process of 'api.py:shorter', and would"):
            refuse("a training")


def outside(x: int) -> int:
    return x + 1


def test_functions_of_modules_are_imported_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a module that another process finds under no such name: by its file then."""
    with GraderPool(outside, num_workers=1) as graders:
        assert graders.map([(1,)])[0].value == 2
    (tmp_path / "hidden.py").write_text("TABLE = iter([1, 2])\ndef f(x): return next(TABLE) + x\n")
    import importlib.util

    spec = importlib.util.spec_from_file_location("an_odd_name", tmp_path / "hidden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "an_odd_name", module)
    spec.loader.exec_module(module)
    with GraderPool(module.f, num_workers=1) as graders:
        assert graders.map([(10,)])[0].value == 11


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    """Used by `whet sweep`, whose worker looks for requests only between two steps of a training."""
    below = "import time; from whet.sandbox import reentry; reentry.end_with_parent(); time.sleep(100)"
    code = f"""
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", {below!r}])
    time.sleep(0.5)
    print("ready", flush=True)
    time.sleep(100)
    """
    session = start(tmp_path / "session.py", code, str(tmp_path))
    assert session.stdout is not None
    assert session.stdout.readline() == "ready\n"
    assert len(marked(str(tmp_path))) == 2
    session.kill()
    session.communicate()
    assert left_after(str(tmp_path), set()) == []
