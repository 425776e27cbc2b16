"""Tiny runs of every program in processes of their own, killed at chosen moments, and what a finished one must equal.

A run is a fork of this process after its imports (half a second instead of four); `fresh` starts an interpreter
instead. In both, the moments are hooked from outside: functions are patched before `whet.__main__.main` is called.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import whet.recipes.dpo
import whet.recipes.evaluation
import whet.recipes.rft
import whet.recipes.rl
import whet.recipes.sft
import whet.report.html
import whet.train.dpo
import whet.train.rft
import whet.train.rl  # noqa: F401 - loaded before the fork, as all programs
from whet.__main__ import main as whet_main
from whet.tasks.made import arithmetic
from whet.tasks.made.arithmetic import Arithmetic

# ruff: noqa: SIM905 - command lines are read more easily as such
FEW = 40
"""Problems of each split: some epochs are over within a run."""
SHAPE = "hidden-size=32 intermediate-size=64 num-layers=2 num-heads=4 num-kv-heads=2 head-dim=8".split()
SAMPLING = "--sampling.max-new-tokens 24".split()
RL = [
    *"rl demo --num-steps 5 --num-prompts 4 --group-size 4 --save-every 2 --policy.num-threads 1".split(),
    *SAMPLING,
]
VALIDATED = "--validation-problems 4 --validate-every 2".split()
MANY = "--algo.num-minibatches 2 --algo.num-epochs 2".split()
PROGRAMS: dict[str, list[str]] = {
    "sft": [
        *"sft demo --num-steps 12 --batch-size 12 --save-every 3 --validate-every 4 --policy.num-threads 1".split(),
        *"--validation-problems 8".split(),
        *(f"--policy.model.{part}" for part in SHAPE),
    ],
    "rl": [*RL, *VALIDATED],
    "rl updates": [*RL, "--algo", "grpo", *MANY],
    "rl ppo": [*RL, "--algo", "ppo"],
    "rl refill": [*RL, "--algo", "dapo", *VALIDATED],
    "rl stale": [*RL, *"--off-policy.staleness 2".split(), *VALIDATED],
    "dpo": [
        *"dpo demo --num-problems 24 --num-samples 6 --num-steps 8 --batch-size 6 --save-every 2".split(),
        *"--validate-every 3 --policy.num-threads 1".split(),
        *SAMPLING,
    ],
    "rft": [
        *"rft demo --num-problems 24 --num-samples 4 --rounds 2 --steps-per-round 4 --batch-size 6".split(),
        *"--save-every 3 --validation-problems 8 --policy.num-threads 1".split(),
        *SAMPLING,
    ],
    "eval": [
        *"eval demo --num-problems 12 --num-samples 3 --policy.max-rows 8 --policy.num-threads 1".split(),
        *SAMPLING,
    ],
}
"""Command lines without --out and --policy.init."""
BASE = [
    *"sft demo --num-steps 250 --batch-size 24 --save-every 250 --validate-every 250 --policy.num-threads 1".split(),
    *(f"--policy.model.{part}" for part in SHAPE),
]
"""The policy that the other programs start from: it knows the format, and some sums."""

POINTS: dict[str, list[str]] = {
    "sampling": ["whet.generate.engine:Engine._run"],
    "grading": ["whet.train.rollout.rollout:grade", "whet.eval.measure:grade"],
    "backward": ["torch:Tensor.backward"],
    "optimizer": ["whet.train.optim.step:Optimizer._update"],
    "checkpoint write": ["whet.storage.checkpoint:save_file"],
    "hash": ["whet.storage.commit:digest"],
    "fsync": ["os:fsync"],
    "rename": ["os:rename", "os:replace"],
    "purge": ["shutil:rmtree"],
    "record": ["whet.train.record:Recorder.begin", "whet.train.record:Recorder.end"],
    "log append": ["whet.telemetry.log:RunLog._append"],
    "torn append": ["os:write"],
    "report": [
        "whet.train.session:write_report",
        "whet.eval.evaluate:write_report",
    ],
}
"""Moment -> functions, as module:attribute, in which (before, inside, behind) a process is killed."""


@dataclass(frozen=True, kw_only=True)
class Hook:
    """What is patched in a run: it is killed at a call, or its calls are counted.

    Attributes:
        point: Name in POINTS; '' for none.
        call: Number of the call, from 0.
        when: before, after, inside (after `delay_s` seconds of it) or torn (half of the bytes are written).
        delay_s: For inside.
        count: File that gets calls and seconds of every point.
        clock: Wall time: '' right, 'back' runs backwards, 'jumps' jumps by a year each way.
        file_limit: Largest file in bytes that the system lets it write; 0 for any.
    """

    point: str = ""
    call: int = 0
    when: str = "before"
    delay_s: float = 0.0
    count: str = ""
    clock: str = ""
    file_limit: int = 0


@dataclass
class Run:
    """A process that was started.

    Attributes:
        pid: Its id.
        log: Everything that it printed.
        began: time.monotonic() of its start.
    """

    pid: int
    log: Path
    began: float = field(default_factory=time.monotonic)

    def kill(self) -> None:
        """Send SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, limit_s: float = 120.0) -> tuple[int, str]:
        """Return exit status (negative: the signal; 1000: it hung and was killed) and output."""
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status), self.log.read_text(errors="replace")
            if time.monotonic() - self.began > limit_s:
                self.kill()
                os.waitpid(self.pid, 0)
                return 1000, self.log.read_text(errors="replace")
            time.sleep(0.002)


def start(argv: list[str], log: Path, hook: Hook | None = None, *, fresh: bool = False) -> Run:
    """Start `whet ARGV` as a process of its own session."""
    hook = hook or Hook()
    if fresh:
        spec = json.dumps([argv, hook.__dict__])
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, __file__, spec], stdout=output, stderr=output, start_new_session=True
            )
        process.returncode = 0  # waited for by pid
        return Run(process.pid, log)
    pid = os.fork()
    if pid:
        return Run(pid, log)
    status = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        status = run_here(argv, hook)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def run_here(argv: list[str], hook: Hook) -> int:
    """Patch this process, and run a command line in it."""
    arithmetic.NUM_PROBLEMS = 50 * FEW  # the same first ones; making all would be half of a run's time
    original = Arithmetic.problems
    Arithmetic.problems = lambda self, split: original(self, split)[:FEW]
    for place in PLOTS:
        _patch(place, lambda _: lambda *_: [])
    torch.set_num_threads(1)
    calls: dict[str, int] = dict.fromkeys(POINTS, 0)
    seconds: dict[str, float] = dict.fromkeys(POINTS, 0.0)
    for point in POINTS if hook.count else [hook.point] if hook.point else []:
        for place in POINTS[point]:
            _patch(place, lambda function, point=point: _killing(function, point, hook, calls, seconds))
    if hook.clock:
        _bend_time(hook.clock)
    if hook.file_limit:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as a full disk: an error, no signal
        resource.setrlimit(resource.RLIMIT_FSIZE, (hook.file_limit, hook.file_limit))
    status = whet_main(argv)
    if hook.count:
        table = {point: [calls[point], seconds[point] / max(1, calls[point])] for point in POINTS}
        Path(hook.count).write_text(json.dumps(table))
    return status


def _patch(place: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module, _, path = place.partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, wrap(getattr(owner, name)))


def _killing(
    function: Callable[..., Any], point: str, hook: Hook, calls: dict[str, int], seconds: dict[str, float]
) -> Callable[..., Any]:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def later() -> None:
        time.sleep(hook.delay_s)
        die()

    def wrapped(*arguments: Any, **named: Any) -> Any:
        is_it = hook.point == point and calls[point] == hook.call
        calls[point] += 1
        if is_it and point == "torn append":
            function(arguments[0], arguments[1][: len(arguments[1]) // 2])
            die()
        if is_it and hook.when == "before":
            die()
        if is_it and hook.when == "inside":
            threading.Thread(target=later, daemon=True).start()
        began = time.perf_counter()
        result = function(*arguments, **named)
        seconds[point] += time.perf_counter() - began
        if is_it:
            die()
        return result

    return wrapped


def _bend_time(how: str) -> None:
    true_time, started = time.time, time.time()
    count = [0]

    def bent() -> float:
        count[0] += 1
        if how == "back":
            return started - 3600.0 * count[0]
        return true_time() + (1 if count[0] % 2 else -1) * 365 * 86400.0

    time.time = bent
    time.time_ns = lambda: int(bent() * 1e9)


PLOTS = ("whet.report.markdown:draw_figures", "whet.eval.evaluate:draw_evaluation")
"""Left out: nothing is resumed from pictures, and they would take most of a tiny run's time."""
NOISY = re.compile(
    r"(seconds|_per_second|memory|energy|power|hardware|time_s|start_utc|temperature|utilisation)"
)
"""Times and readings of sensors."""
UNCOMPARED = frozenset(
    {"environment.json", "provenance.json", "report.md", "report.html", "plots", "heartbeats"}
)


def without_noise(value: Any) -> Any:
    """Leave out of a JSON value what is NOISY."""
    if isinstance(value, dict):
        return {k: without_noise(v) for k, v in value.items() if not NOISY.search(k)}
    return [without_noise(item) for item in value] if isinstance(value, list) else value


def content(folder: Path) -> dict[str, str]:
    """Return a hash of everything in a run folder that must not depend on when the run was killed, by path."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "logs.json" or path.name.endswith(
            ".sha256"
        ):  # hashes of rows with times, or of what is here
            continue
        if not path.is_file() or name.split("/")[0] in UNCOMPARED or "/.corrupt-" in f"/{name}":
            continue
        data = path.read_bytes()
        if path.name == "manifest.json":
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                manifest = json.loads(data)
                manifest.pop("sha256")
                for file in list(manifest["files"]):
                    if file in ("training/state.json", "training/logs.json") or "/optimizer/" in file:
                        manifest["files"].pop(file)
                data = json.dumps(manifest).encode()
        elif "/optimizer/" in name:  # DCP writes the names in its header in any order
            length = int.from_bytes(data[:8], "little")
            with contextlib.suppress(ValueError):
                header = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True)
                data = header.encode() + data[8 + length :]
        elif path.name in ("metrics.jsonl", "summary.json", "state.json", "eval.json"):
            rows = data.splitlines() if path.suffix == ".jsonl" else [data]
            with contextlib.suppress(ValueError):  # damaged: its bytes are compared
                data = json.dumps([without_noise(json.loads(row)) for row in rows], sort_keys=True).encode()
        found[name] = hashlib.sha256(data).hexdigest()[:16]
    return found


def differing(expected: dict[str, str], got: dict[str, str]) -> list[str]:
    """Name the files that differ, are missing or are too many."""
    names = sorted(expected.keys() | got.keys())
    return [
        f"{name} ({'missing' if name not in got else 'left over' if name not in expected else 'differs'})"
        for name in names
        if expected.get(name) != got.get(name)
    ]


def leaked(session: int) -> list[int]:
    """Return the processes that live on in a run's session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(words[3]) == session and words[0] != "Z":
                found.append(int(entry.name))
    return found


def make_base(work: Path) -> Path:
    """Train the policy that the other programs start from; return its run folder."""
    base = work / "base"
    if not base.exists():
        status, output = start([*BASE, "--out", str(base)], work / "base.log").wait()
        assert status == 0, output
    return base


def command(program: str, out: Path, base: Path) -> list[str]:
    """Return the command line of a program's tiny run."""
    init = [] if program == "sft" else ["--policy.init", str(base)]
    return [*PROGRAMS[program], "--out", str(out), *init]


@dataclass(frozen=True)
class Reference:
    """The run that nobody disturbs: content of its folder, seconds, calls and mean seconds per moment."""

    content: dict[str, str]
    seconds: float
    points: dict[str, tuple[int, float]]


def reference(program: str, work: Path, base: Path) -> Reference:
    """Run a program undisturbed, twice: the two must be equal themselves; the second is counted."""
    found: list[dict[str, str]] = []
    times: list[float] = []
    counts = work / "counts.json"
    for hook in (Hook(), Hook(count=str(counts))):
        out = work / "run"
        shutil.rmtree(out, ignore_errors=True)
        run = start(command(program, out, base), work / "reference.log", hook)
        status, output = run.wait()
        assert status == 0, f"{program}: {output}"
        times.append(time.monotonic() - run.began)
        found.append(content(out))
    unequal = differing(*found)
    assert not unequal, f"{program}: two undisturbed runs differ in {', '.join(unequal)}"
    points = {
        name: (int(calls), mean) for name, (calls, mean) in json.loads(counts.read_text()).items() if calls
    }
    keep = work / f"reference {program}"
    shutil.rmtree(keep, ignore_errors=True)
    shutil.copytree(work / "run", keep)
    return Reference(found[0], min(times), points)


if __name__ == "__main__":
    words, settings = json.loads(sys.argv[1])
    sys.exit(run_here(words, Hook(**settings)))
