"""Runs the attacks against a sandbox and checks the damage from outside."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from whet.sandbox.attacks.attacks import Attack
from whet.sandbox.graders.functions import TestsVerdict
from whet.sandbox.inside.lockdown import NOBODY
from whet.sandbox.jobs import Verdict

MEMORY_MIB = 128
SHORT_S, LONG_S = 0.7, 20.0
"""Time limit of an attack that may end in a timeout, and of the others."""

MAX_GROWTH_MIB = 512
"""Permitted growth of this process while the battery runs; a program's output is at most a few MiB."""


class Runner(Protocol):
    """The sandbox under attack: `whet.sandbox.programs.Sandbox`."""

    def run(
        self, code: str, *, stdin: str | bytes = "", timeout_s: float = 10.0, memory_mib: int = 512
    ) -> Verdict:
        """Run a program."""
        ...

    def run_tests(
        self,
        code: str,
        tests: Sequence[str],
        *,
        setup: str = "",
        names: Sequence[str] = (),
        has_objects: bool = False,
        timeout_s: float = 10.0,
        memory_mib: int = 512,
    ) -> TestsVerdict:
        """Run tests against a program."""
        ...


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of an attack.

    Attributes:
        name: The attack's.
        group: The attack's.
        breach: What it got that it must not have; '' when it was contained.
        how: What stopped it.
        seconds: Wall time.
    """

    name: str
    group: str
    breach: str
    how: str
    seconds: float


PLACES = ("/tmp/x", "/dev/shm/x")
"""Files that attacks try to make; one that is there before says nothing."""


class Scene:
    """Things that an attack must not reach, though every user of the machine could. A context manager."""

    def __init__(self) -> None:
        self.secret = f"canary-{secrets.token_hex(8)}"
        self.folder = Path(tempfile.mkdtemp(prefix="battery-"))
        self.folder.chmod(0o777)
        self.places = [place for place in PLACES if not os.path.exists(place)]
        self.canary = self.folder / "answers.txt"
        self.canary.write_text(self.secret)
        self.canary.chmod(0o666)
        os.environ["WHET_BATTERY_SECRET"] = self.secret
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        # It reads until this process closes the pipe, or is gone.
        self.sentinel = subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd="/", **user)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket_name = f"whet-{secrets.token_hex(4)}"
        self.unix.bind(f"\0{self.socket_name}")
        self.unix.listen()
        for listener in (self.tcp, self.unix):
            listener.setblocking(False)

    def fill(self, code: str) -> str:
        """Fill the scene's values into a program's placeholders."""
        for name, value in (
            ("CANARY", self.canary),
            ("FOLDER", self.folder),
            ("SECRET", self.secret),
            ("SENTINEL", self.sentinel.pid),
            ("PARENT", os.getpid()),
            ("PORT", self.tcp.getsockname()[1]),
            ("SOCKET", self.socket_name),
        ):
            code = code.replace(f"@{name}@", str(value))
        return code

    def damage(self) -> str:
        """Return how the scene was damaged; '' if it is intact."""
        if self.sentinel.poll() is not None:
            return "another process was killed"
        if not self.canary.exists() or self.canary.read_text() != self.secret:
            return "a file was changed"
        if len(os.listdir(self.folder)) != 1 or any(map(os.path.exists, self.places)):
            return "a file was made"
        for listener in (self.tcp, self.unix):
            with suppress(BlockingIOError):
                listener.accept()[0].close()
                return "a socket was reached"
        return ""

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        self.sentinel.kill()
        self.sentinel.communicate()
        self.tcp.close()
        self.unix.close()
        os.environ.pop("WHET_BATTERY_SECRET", None)
        shutil.rmtree(self.folder)


def mount_attack(runner: Runner, attack: Attack, scene: Scene) -> Finding:
    """Run one attack and judge it.

    Args:
        runner: The sandbox.
        attack: What to run.
        scene: What it must not reach.
    """
    code = scene.fill(attack.code)
    timeout_s = SHORT_S if "tle" in attack.statuses else LONG_S
    start = time.monotonic()
    if attack.tests:
        tests = runner.run_tests(code, attack.tests, timeout_s=timeout_s, memory_mib=MEMORY_MIB)
        output, status = tests.program.stdout + tests.program.stderr, tests.status
        worst = next((result for result in tests.results if result.status != "ok"), None)
        message = worst.message if worst else ""
    else:
        stdin = b"1\n" * (attack.stdin_bytes // 2)
        verdict = runner.run(code, stdin=stdin, timeout_s=timeout_s, memory_mib=MEMORY_MIB)
        output, status = verdict.stdout + verdict.stderr, verdict.status
        message = verdict.message or next(iter(verdict.stdout.splitlines()), "")
    seconds = time.monotonic() - start
    breach = scene.damage()
    if "BREACH" in output:
        breach = output[output.index("BREACH") :][:80]
    elif scene.secret in output:
        breach = "a secret was read"
    elif status not in attack.statuses:
        breach = f"ended as {status}, expected {' or '.join(attack.statuses)}: {message}"
    return Finding(attack.name, attack.group, breach, f"{status}: {message}", seconds)


def run_battery(
    runner: Runner, attacks: Sequence[Attack], report: Callable[[Finding], None], *, num_workers: int
) -> list[Finding]:
    """Run attacks, several at a time, then look for what they left behind.

    Args:
        runner: The sandbox.
        attacks: The attacks to run.
        report: Called with each finding as it comes, from one thread at a time.
        num_workers: Attacks at the same time.

    Returns:
        One finding per attack, in order, then those about leftovers.
    """
    lock = threading.Lock()
    with Scene() as scene:

        def mount(attack: Attack) -> Finding:
            finding = mount_attack(runner, attack, scene)
            with lock:
                report(finding)
            return finding

        runner.run("", timeout_s=LONG_S)
        killed = _kill_supervisor(
            runner
        )  # first, so that the next supervisor starts with the scene's secret in its environment
        me = psutil.Process()
        before, resident = descendants(me.pid), me.memory_info().rss
        with ThreadPoolExecutor(num_workers) as pool:
            findings = list(pool.map(mount, attacks))
        growth = (me.memory_info().rss - resident) >> 20
        left = descendants(me.pid) - before
        afterwards = [
            Finding("processes left", "afterwards", f"{len(left)} left" if left else "", "none", 0.0),
            Finding(
                "memory of this process",
                "afterwards",
                f"grew by {growth} MiB" if growth > MAX_GROWTH_MIB else "",
                f"{growth:+} MiB",
                0.0,
            ),
            killed,
        ]
    for finding in afterwards:
        report(finding)
    return findings + afterwards


def _kill_supervisor(runner: Runner) -> Finding:
    """Kill the supervisor while a program runs: the program must die with it, and the next program must run."""
    start = time.monotonic()
    before = descendants(os.getpid())
    thread = threading.Thread(
        target=runner.run, args=("import time; time.sleep(600)",), kwargs={"timeout_s": 2.0}
    )
    thread.start()
    child = 0
    while not child and time.monotonic() < start + 10:
        child = next(iter(descendants(os.getpid()) - before), 0)
        time.sleep(0.01)
    with suppress(psutil.Error, ValueError):
        psutil.Process(psutil.Process(child).ppid()).kill()
    breach = "the program outlived it"
    deadline = time.monotonic() + 5
    while breach and time.monotonic() < deadline:
        breach = breach if is_alive(child) else ""
        time.sleep(0.01)
    thread.join()
    if runner.run("print(1)", timeout_s=LONG_S).stdout != "1\n":
        breach = breach or "nothing runs any more"
    return Finding(
        "supervisor killed", "afterwards", breach, "its child died with it", time.monotonic() - start
    )


def is_alive(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> set[int]:
    """Return the running children of a process, their children, and so on."""
    return {child.pid for child in psutil.Process(pid).children(recursive=True) if is_alive(child.pid)}
