"""Tiny runs of every program in processes of their own, killed at chosen moments, and what a finished one must equal.

A run is a fork of this process after its imports (half a second instead of four); `fresh` starts an interpreter
instead. In both, the moments are hooked from outside: functions are patched before `whet.__main__.main` is called.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import hashlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
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
from whet import processes
from whet.__main__ import main as whet_main
from whet.recipes.models import seeing_model
from whet.tasks.made import arithmetic, products
from whet.tasks.made.arithmetic import Arithmetic
from whet.tasks.made.products import Products

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
    "rl async": [*RL, *"--overlap.mode async --off-policy.staleness 1".split()],
    "rl kl": [
        *RL,
        *"--algo.kl k3_loss --algo.kl-coef 0.05 --algo.kl-target 0.01 --algo.ref-refresh-every 3".split(),
    ],
    "rl curriculum": [*RL, *"--curriculum.num-samples 4 --curriculum.max-problems 24".split()],
    "rl own": [*RL, *"--reward {work}/own.py:length=0.5".split()],
    "rl mixture": [
        *RL,
        *"--task.name mixture --task.weights arithmetic 2 jsonl:sums 1".split(),
        *"--task.paths jsonl:sums {work}/sums.jsonl".split(),
    ],
    "rl bfloat16": [*RL, *"--optim.precision bfloat16_master".split()],
    "rl two threads": [*RL[:-4], *"--policy.num-threads 2".split(), *SAMPLING],
    "rl tools": [
        *"rl calculator --num-steps 4 --num-prompts 4 --group-size 4 --save-every 2 --policy.num-threads 1".split(),
        *"--sampling.max-new-tokens 48 --preflight warn".split(),
    ],
    "sft lora": [
        *"sft demo --num-steps 12 --batch-size 12 --save-every 3 --policy.num-threads 1 --lora.rank 4".split(),
        *"--validation-problems 0".split(),
    ],
    "rl lora": [*RL, *"--lora.rank 4".split(), *VALIDATED],
    "rl images": [
        *"rl demo --num-steps 4 --num-prompts 3 --group-size 3 --save-every 2 --policy.num-threads 1".split(),
        *"--task.name matrices --task.level 1 --task.num-problems 60".split(),
        *"--policy.max-rows 16 --sampling.max-new-tokens 12".split(),
        *"--reward {work}/own.py:length=0.5 --preflight warn".split(),
    ],
    "rl workers": [*RL, *"--cluster.rollout-workers 1".split()],
    "export": "export --num-prompts 2 --max-new-tokens 4".split(),
    "eval": [
        *"eval demo --num-problems 12 --num-samples 3 --policy.max-rows 8 --policy.num-threads 1".split(),
        *SAMPLING,
    ],
}
"""Command lines without --out and --policy.init; workers are Ray's."""
if importlib.util.find_spec("ray") is None:
    del PROGRAMS["rl workers"]
BASE = [
    *"sft demo --num-steps 250 --batch-size 24 --save-every 250 --validate-every 250 --policy.num-threads 1".split(),
    *(f"--policy.model.{part}" for part in SHAPE),
]
"""The policy that the other programs start from: it knows the format, and some sums."""
CALLER = [
    *"sft calculator --num-steps 150 --batch-size 24 --save-every 150 --validate-every 150".split(),
    *"--policy.num-threads 1".split(),
    *(f"--policy.model.{part}" for part in SHAPE),
]
"""The policy of `rl tools`: it calls the calculator."""
FILES = {
    "own.py": "def length(problem, completion):\n    return len(completion) % 7 / 7\n",
    "sums.jsonl": "".join(
        json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n"
        for a in range(1, 9)
        for b in range(1, 9)
    ),
}
"""Files that command lines name as {work}/NAME: they lie beside the base."""

PLANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "optimizer": {"whet.train.optim.step:Optimizer.load_tensors": lambda *_: None},
    "log rows": {"whet.telemetry.log:_mend": lambda *_: None},
    "lock": {"whet.storage.folder:_lock": lambda *_: None},
    "hashes": {
        "whet.storage.checkpoint:verify_folder": lambda *_: None,
        "whet.storage.folder:verify_folder": lambda *_: None,
    },
    "inputs": {"whet.telemetry.provenance:_changed_inputs": lambda *_: []},
    "displaced": {"whet.train.session:displaced": lambda *_: ""},
    "fsync": {"whet.storage.commit:sync": lambda *_: None},
}
"""Faults that can be planted (--plant NAME), to see that a battery finds them: name -> what stands in for which
function. The optimizer is not restored; rows after the checkpoint are kept; two runs may use one folder; files are not
compared with their hashes; changed inputs are not noticed, nor a folder that is gone; nothing is flushed to disk."""
PLANT = "WHET_BATTERY_PLANT"

POINTS: dict[str, list[str]] = {
    "sampling": ["whet.generate.engine:Engine._run"],
    "grading": ["whet.train.rollout.rollout:grade", "whet.eval.measure:grade"],
    "backward": ["torch:Tensor.backward"],
    "optimizer": ["whet.train.optim.step:Optimizer._update"],
    "checkpoint write": ["whet.storage.checkpoint:save_tensors"],
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
        harm: Folder that is gone after the call, instead of a kill: moved to `aside`, or removed; '' for none.
        aside: Where to.
        journal: Folder in which every fsync is written down, for `power.py`; '' for none.
        clock: Wall time: '' right, 'back' runs backwards, 'jumps' jumps by a year each way.
        file_limit: Largest file in bytes that the system lets it write; 0 for any.
    """

    point: str = ""
    call: int = 0
    when: str = "before"
    delay_s: float = 0.0
    count: str = ""
    harm: str = ""
    aside: str = ""
    journal: str = ""
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
            process = processes.start(
                [sys.executable, __file__, spec], stdout=output, stderr=output, start_new_session=True
            )
        process.returncode = 0  # waited for by pid
        return Run(process.pid, log)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return Run(pid, log)
    status = 1
    try:
        processes.end_with_parent(parent)
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
    _take_few(arithmetic, Arithmetic)
    _take_few(products, Products)
    for place in PLOTS:
        _patch(place, lambda _: lambda *_: [])
    torch.set_num_threads(1)
    calls: dict[str, int] = dict.fromkeys(POINTS, 0)
    seconds: dict[str, float] = dict.fromkeys(POINTS, 0.0)
    if hook.journal:
        _patch("os:fsync", lambda function: _writing_down(function, Path(hook.journal)))
        _patch("whet.train.session:save_step", lambda function: _telling(function, Path(hook.journal)))
    for point in POINTS if hook.count else [hook.point] if hook.point else []:
        for place in POINTS[point]:
            _patch(place, lambda function, point=point: _killing(function, point, hook, calls, seconds))
    for place, stand_in in PLANTS.get(os.environ.get(PLANT, ""), {}).items():
        _patch(place, lambda _, stand_in=stand_in: stand_in)
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


def _take_few(module: Any, task: Any) -> None:
    """Cut a task's splits to the first few problems; making all would be half of a run's time."""
    module.NUM_PROBLEMS, original = 50 * FEW, task.problems
    task.problems = lambda self, split: original(self, split)[:FEW]


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
        if is_it and hook.harm:
            if hook.aside:
                Path(hook.harm).rename(hook.aside)
            while not hook.aside and Path(hook.harm).exists():  # a thread may be writing a checkpoint there
                shutil.rmtree(hook.harm, ignore_errors=True)
            is_it = False
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


def _writing_down(fsync: Callable[[int], None], journal: Path) -> Callable[[int], None]:
    """Write down what an fsync has flushed: a file's bytes, or a folder's names."""

    def wrapped(descriptor: int) -> None:
        fsync(descriptor)
        found = os.fstat(descriptor)
        row: dict[str, Any] = {"inode": found.st_ino}
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(descriptor) as entries:
                row["names"] = [(entry.name, entry.inode(), entry.is_dir()) for entry in entries]
        else:
            data = Path(f"/proc/self/fd/{descriptor}").read_bytes()
            row["blob"] = hashlib.sha256(data).hexdigest()
            blob = journal / row["blob"]
            if not blob.exists():  # whole or not at all: the process may be killed here
                partial = journal / f"{blob.name}.{threading.get_ident()}"
                partial.write_bytes(data)
                partial.replace(blob)
        _append(journal, row)

    return wrapped


def _telling(save_step: Callable[..., Any], journal: Path) -> Callable[..., Any]:
    """Write down which step was saved, once that is said to be so."""

    def wrapped(run: Path, step: int, **options: Any) -> Any:
        saved = save_step(run, step, **options)
        _append(journal, {"saved": step})
        return saved

    return wrapped


def _append(journal: Path, row: dict[str, Any]) -> None:
    with (journal / "lines.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


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
    r"((^|/)overlap$|seconds|_per_second|memory|energy|power|hardware|time_s|start_utc|temperature|utilisation)"
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


UNSEALED = ("training/state.json", "training/logs.json", "training/run.json")
"""Files of a checkpoint with times or a run's own id, whose hashes in its manifest are not compared."""


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
                    if (
                        file.removeprefix("training/") in ("state.json", "logs.json", "run.json")
                        or "/optimizer/" in file
                    ):
                        manifest["files"].pop(file)
                data = json.dumps(manifest).encode()
        elif name.endswith(
            "training/run.json"
        ):  # each run has an id of its own, all of its checkpoints the same
            with contextlib.suppress(ValueError, OSError, KeyError, TypeError):
                own = json.loads((folder / "provenance.json").read_bytes())["run_id"]
                data = f"of this run: {json.loads(data)['run_id'] == own}".encode()
        elif "/optimizer/" in name:  # DCP writes the names in its header in any order
            length = int.from_bytes(data[:8], "little")
            with contextlib.suppress(ValueError):
                header = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True)
                data = header.encode() + data[8 + length :]
        elif path.name in ("metrics.jsonl", "summary.json", "state.json", "eval.json"):
            rows = data.splitlines() if path.suffix == ".jsonl" else [data]
            with contextlib.suppress(ValueError):  # damaged: its bytes are compared
                facts = [without_noise(json.loads(row)) for row in rows]
                if path.name == "summary.json":  # shares that weights.json has, too
                    facts = [
                        {k: v for k, v in fact.items() if not k.startswith("weights_")} for fact in facts
                    ]
                data = json.dumps(facts, sort_keys=True).encode()
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


LINGER_S, RAY_LINGERS_S = 10.0, 60.0
"""Seconds after its end in which a run's processes may still end; Ray's agents notice late that their node is gone."""


def leaked(session: int, linger_s: float = LINGER_S) -> list[int]:
    """Return the processes that live on in a run's session, however long they are given to end."""
    end = time.monotonic() + linger_s
    while (found := _members(session)) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def _members(session: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(words[3]) == session and words[0] != "Z":
                found.append(int(entry.name))
    return found


def make_base(work: Path, programs: Collection[str]) -> Path:
    """Train the policies that programs start from, and write what else they read; return the first's run folder."""
    base = work / "base"
    for words, folder, wanted in (
        (BASE, base, {*programs} - {"sft", "rl tools", "rl images"}),  # fine-tuning starts without one
        (CALLER, _caller(base), {*programs} & {"rl tools"}),
    ):
        if wanted and not folder.exists():
            status, output = start([*words, "--out", str(folder)], work / "base.log").wait()
            assert status == 0, output
    if "rl images" in programs and not _seer(base).exists():
        seeing_model(0).save(_seer(base))
    for name, text in FILES.items():
        (work / name).write_text(text)
    return base


def _caller(base: Path) -> Path:
    return base.with_name("caller")


def _seer(base: Path) -> Path:
    return base.with_name("seer")


def command(program: str, out: Path, base: Path) -> list[str]:
    """Return the command line of a program's tiny run."""
    start_from = {"rl tools": _caller(base), "rl images": _seer(base)}.get(program, base)
    init = [] if program == "sft" else ["--policy.init", str(start_from)]
    words = [word.replace("{work}", str(base.parent)) for word in PROGRAMS[program]]
    return [*words, "--out", str(out), *init]


def battery_options(doc: str | None, num_trials: int | None = None) -> argparse.ArgumentParser:
    """Return the options that all batteries have, with --trials and --seed where they draw trials."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if num_trials is not None:
        parser.add_argument("--trials", type=int, default=num_trials)
        parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--json", action="store_true", help="print the trials as JSON lines before the table")
    parser.add_argument(
        "--plant", choices=PLANTS, help="plant a fault, to see that the battery finds it (exit status 1)"
    )
    return parser


def shared_out(programs: Sequence[str], num_trials: int) -> dict[str, list[int]]:
    """Deal numbers of trials out to programs, in turn."""
    return {name: list(range(place, num_trials, len(programs))) for place, name in enumerate(programs)}


def run_trials(
    worker: Callable[[Any], list[Any]],
    portions: Sequence[Any],
    args: argparse.Namespace,
    failure: Callable[[Any], str],
) -> list[Any]:
    """Do portions of trials in processes of their own, and print each as it is done.

    Args:
        worker: Does one portion; returns its trials, dataclasses.
        portions: What it is called with.
        args: What `battery_options` read: how many at once, and whether to print JSON.
        failure: What to print of a trial; '' if it did not fail.
    """
    trials: list[Any] = []
    with multiprocessing.get_context("fork").Pool(args.jobs, processes.end_with_parent) as pool:
        for done in pool.imap_unordered(worker, portions, chunksize=1):
            trials += done
            for trial in done:
                if args.json:
                    print(json.dumps(asdict(trial)), flush=True)
                elif text := failure(trial):
                    print(f"FAILED {text}", flush=True)
    return trials


def plant(name: str | None) -> None:
    """Plant a fault in all runs that are started from now on."""
    if name is not None:
        os.environ[PLANT] = name


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
