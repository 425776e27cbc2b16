"""No process outlives what started it: however it was started, and however its parent ends."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from whet import processes

ROOT = Path(__file__).parents[1]
STARTS = """
import multiprocessing, os, signal, subprocess, sys, threading, time
from whet import processes
SLEEP = ["sleep", "100"]
if __name__ == "__mp_main__":
    time.sleep(100)  # it imports, and has asked for nothing yet
def be_child():
    processes.end_with_parent()
    time.sleep(100)
def in_thread(start):
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
if __name__ == "__main__":
    kept, parent = [], os.getpid()
    kept.append(processes.start(SLEEP))
    kept.append(processes.start(SLEEP, start_new_session=True))
    kept.append(processes.start(["sh", "-c", "sleep 100 & sleep 100"], tree=True))
    in_thread(lambda: kept.append(processes.start(SLEEP)))
    threading.Thread(target=processes.run, args=(SLEEP,), daemon=True).start()
    kept.append(multiprocessing.get_context("fork").Process(target=be_child, daemon=True))
    kept[-1].start()
    kept.append(processes.started([multiprocessing.get_context("spawn").Process(target=be_child)]))
    kept[-1].__enter__()
    if not (pid := os.fork()):
        processes.end_with_parent(parent)
        time.sleep(100)
    sys.platform = "another"
    kept.append(processes.start(SLEEP))
    if not os.fork():
        processes.end_with_parent(parent)
        time.sleep(100)
    print("started", flush=True)
    sys.stdin.read()
    if "exit" in sys.argv:
        os._exit(0)
"""
SPAWNS = {
    *("subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call"),
    *("subprocess.check_output", "os.popen", "os.posix_spawn", "os.spawnv"),
}
OTHERWISE = {
    "whet/processes.py": "the mechanism",
    "whet/sandbox/launch.py": "the supervisor reads its socket to the end",
    "whet/sandbox/graders/graders.py": "the keeper reads its pipe to the end",
    "whet/sandbox/graders/worker.py": "asks the kernel itself: it imports nothing of whet",
    "whet/sandbox/graders/server.py": "asks the kernel itself",
    "whet/sandbox/inside/supervisor.py": "asks the kernel itself, after a change of user",
    "whet/sandbox/attacks/battery.py": "cat reads its pipe to the end",
    "whet/kernels/cpu/toolchain.py": "a keeper ends the compiler's group",
    "whet/kernels/cpu/build.py": "sysctl ends at once",
    "whet/ranks/ray.py": "the watcher itself, which reads its pipe to the end",
    "bench/sandbox.py": "a bare interpreter, which is measured; it ends at once",
}


def left_of(pids: set[int], limit_s: float) -> set[int]:
    """Wait until processes are gone; return those that are not."""
    deadline = time.monotonic() + limit_s
    while (left := {pid for pid in pids if is_running(pid)}) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "exit"])
def test_every_child_ends_with_its_parent(how: str, tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    words = [sys.executable, str(script), how]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, stdin=pipe, stdout=pipe, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        below = {child.pid for child in psutil.Process(parent.pid).children(recursive=True)}
        assert len(below) >= 11
        assert all(map(is_running, below))
        if how != "exit":
            parent.send_signal(getattr(signal, how))
        parent.stdin.close()
        parent.wait()
    assert [psutil.Process(pid).cmdline() for pid in left_of(below, 20)] == []


def test_a_program_runs_as_it_would_without_a_guard(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; print(sys.stdin.read(), os.getcwd(), os.environ['A'], signal.getsignal(13))"
    )
    words = [sys.executable, "-S", "-c", code]
    options = {"input": "in", "capture_output": True, "text": True, "cwd": tmp_path, "env": {"A": "b"}}
    assert processes.run(words, **options).stdout == subprocess.run(words, check=True, **options).stdout
    done = processes.run(
        ["sh", "-c", "yes | head -1"], capture_output=True
    )  # yes ends by SIGPIPE, in silence
    assert (done.stdout, done.stderr) == (b"y\n", b"")
    assert processes.run(["sh", "-c", "kill -9 $$"]).returncode == -signal.SIGKILL
    with pytest.raises(subprocess.CalledProcessError, match=r"Command '\['false'\]' returned"):
        processes.run(["false"], check=True)
    with pytest.raises(subprocess.TimeoutExpired, match=r"Command '\['sleep', '9'\]' timed out"):
        processes.run(["sleep", "9"], timeout=0.05)
    with pytest.raises(FileNotFoundError, match="no such program"):
        processes.run(["no such program"])


def test_a_parent_that_is_gone_already_starts_nothing(tmp_path: Path) -> None:
    words = [*processes._PYTHON, processes._BECOME, "1", "9", "-1", "touch", str(tmp_path / "made")]
    subprocess.run(words, check=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_tree", [False, True])
def test_what_watches_ends_with_the_child(is_tree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "another")
    before = {child.pid for child in psutil.Process().children()}
    child = processes.start(["true"], tree=is_tree)
    assert child.wait() == 0
    assert {child.pid for child in psutil.Process().children()} <= before


@pytest.mark.ci
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "passes"])
def test_what_tests_start_ends_with_them(how: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(f"""
import subprocess, time
def test_it():
    subprocess.Popen(["sh", "-c", "setsid sleep 100 & echo $! > {tmp_path}/pid; wait"], start_new_session=True)
    time.sleep(100 if {how != "passes"} else 1)
""")
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        str(tmp_path),
    ]
    file = tmp_path / "pid"
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = own | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    with subprocess.Popen(words, cwd=tmp_path, env=environment) as parent:
        while not (file.exists() and file.read_text().strip()):
            assert parent.poll() is None
            time.sleep(0.05)
        pid = int(file.read_text())
        assert is_running(pid)
        if how != "passes":
            parent.send_signal(getattr(signal, how))
        parent.wait()
    assert left_of({pid}, 20) == set()


def test_every_program_that_spawns_has_the_guard() -> None:
    found = []
    for path in (*ROOT.glob("whet/**/*.py"), *ROOT.glob("bench/**/*.py")):
        text, name = path.read_text(), str(path.relative_to(ROOT))
        if name in OTHERWISE or not any(
            word in text for word in ("subprocess", "os.fork", "multiprocessing")
        ):
            continue
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
        found += [(name, call) for call in calls & SPAWNS]
        is_forking = "os.fork" in calls or re.search("^(import|from) multiprocessing", text, re.MULTILINE)
        if is_forking and "end_with_parent" not in text:
            found.append((name, "no end_with_parent"))
    assert found == []
