"""Disturb tiny runs of two ranks under torchrun, look how they end, go on with --resume, and compare.

python bench/reliability/ranks.py [--trials N] [--jobs J] [--seed S] [--only PROGRAM] [--faults F] [--fresh] [--json]

At a random moment one rank is killed (SIGKILL), stopped (SIGSTOP) or asked to end (SIGTERM), torchrun itself is asked
to end, a rank raises an error, or a rank does unequal work. The ranks hold the model whole, or in shards (programs
ending in -fsdp). The job must end within 15 s with one message and, unless it was done, not with status 0; nothing may
live on. Then --resume on two ranks must end bitwise as the undisturbed run of two ranks: the same files are compared as
by kill.py. In every fourth trial --resume goes on with one rank instead: the same problems in the same order, and
metrics and weights up to rounding. A waiting rank gives up after 6 s (WHET_COLLECTIVE_TIMEOUT_S; by default 10
minutes). Exit status 1 on any failure; --fresh starts torchrun as a command
instead of forking its agent and ranks from here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config  # loaded before the forks: switching determinism on asks for it
from safetensors.torch import load_file
from tiny_runs import SAMPLING, SHAPE, Hook, content, differing, leaked, make_base, run_here, start
from tiny_runs import _patch as patch

from whet import processes

# ruff: noqa: SIM905 - command lines are read more easily as such
END_LIMIT_S = 15.0
TIMEOUT_S = 6.0
FAULTS = ("kill a rank", "stop a rank", "end a rank", "end torchrun", "a rank raises", "unequal work")
SIGNALS = {"kill a rank": signal.SIGKILL, "stop a rank": signal.SIGSTOP, "end a rank": signal.SIGTERM}
PROGRAMS = {
    "rl": [
        *"rl demo --num-steps 8 --num-prompts 4 --group-size 4 --save-every 2 --policy.num-threads 1".split(),
        *"--validation-problems 4 --validate-every 4".split(),
        *SAMPLING,
    ],
    "sft": [
        *"sft demo --num-steps 24 --batch-size 12 --save-every 5 --validate-every 8 --policy.num-threads 1".split(),
        *"--validation-problems 8".split(),
        *(f"--policy.model.{part}" for part in SHAPE),
    ],
}
PROGRAMS["rl-refill"] = [
    *"rl demo --algo dapo --num-steps 6 --num-prompts 6 --group-size 4 --save-every 2 --policy.num-threads 1".split(),
    *"--validation-problems 0".split(),
    *SAMPLING,
]
FSDP = "--parallel.kind fsdp".split()
PROGRAMS |= {f"{name}-fsdp": [*words, *FSDP] for name, words in PROGRAMS.items()}
WORK = {"rl": "whet.train.objective.objective:all_reduce_sum", "sft": "whet.train.sft:all_reduce_sum"}
"""What is made unequal."""
TOLERANCE = 1e-5
"""One rank adds in another order: rounding, and what ten steps of AdamW make of it."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is done to a rank from inside.

    Attributes:
        rank: Which one.
        call: Number of the call, from 0.
        raises: Place whose call raises; '' for none.
        unequal: Place whose call gets a value too many; '' for none.
    """

    rank: int = 0
    call: int = 0
    raises: str = ""
    unequal: str = ""


@dataclass(frozen=True)
class Trial:
    """A disturbed run.

    Attributes:
        program: Name in PROGRAMS.
        fault: Name in FAULTS.
        at: Seconds, or number of the call.
        hit: Whether the run was still going on.
        seconds: From the fault to the end of the job.
        status: torchrun's exit status.
        ranks: With how many --resume went on.
        message: What the job said.
        failures: What is wrong.
    """

    program: str
    fault: str
    at: str
    hit: bool
    seconds: float
    status: int
    ranks: int
    message: str
    failures: list[str]


@dataclass(frozen=True)
class Plan:
    """What all trials share: seed, names in FAULTS, folders of the battery and of the first policy, and how."""

    seed: int
    faults: tuple[str, ...]
    work: Path
    base: Path
    num_programs: int
    fresh: bool


class Job:
    """Two ranks under torchrun, in a session of their own."""

    def __init__(self, argv: list[str], work: Path, fault: Fault, *, fresh: bool = False) -> None:
        self.log, self.folder = work / "log", work / "pids"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.began = time.monotonic()
        self.status: int | None = None
        spec = json.dumps([argv, asdict(fault), str(self.folder), not fresh])
        if fresh:
            command = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2"]
            with self.log.open("wb") as output:
                words = [*map(str, command), __file__, spec]
                # SIGTERM, for torchrun to end its ranks.
                process = processes.start(
                    words, death=signal.SIGTERM, stdout=output, stderr=output, start_new_session=True
                )
            process.returncode = 0  # waited for by pid
            self.pid = process.pid
            return
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            processes.end_with_parent(parent)
            os.setsid()
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os._exit(agent(spec))

    def pids(self) -> dict[int, int]:
        """Return the processes of the ranks that have begun."""
        return {
            int(path.name): int(path.read_text()) for path in self.folder.iterdir() if path.stat().st_size
        }

    def is_over(self) -> bool:
        """Say whether torchrun has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def wait(self, limit_s: float) -> float:
        """Wait for its end, at most so long; return the seconds that it took."""
        began = time.monotonic()
        while not self.is_over() and time.monotonic() - began < limit_s:
            time.sleep(0.01)
        return time.monotonic() - began

    def clear(self) -> None:
        """Kill what is left of it."""
        for pid in {self.pid, *self.pids().values()}:
            if pid in leaked(self.pid):
                os.kill(pid, signal.SIGKILL)
        self.wait(5.0)


def agent(spec: str) -> int:
    """Be torchrun, with forks of this process as ranks."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=str(os.getpid()),
        start_method="fork",
        max_restarts=0,
        monitor_interval=0.1,
    )
    logging.disable()  # to format an error, torch would import its compiler: 8 s
    try:
        elastic_launch(config, be_rank)(spec)
    except (ChildFailedError, SignalException) as error:
        print(f"torchrun: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
        return 1
    return 0


def be_rank(spec: str) -> None:
    """Be one rank: say so, be disturbed, run."""
    argv, fault, folder, is_fork = json.loads(spec)
    fault = Fault(**fault)
    (Path(folder) / os.environ["RANK"]).write_text(str(os.getpid()))
    if fault.rank == int(os.environ["RANK"]):
        if fault.raises:
            patch(fault.raises, lambda function: at_call(function, fault.call, fail))
        if fault.unequal:
            patch(fault.unequal, lambda function: at_call(function, fault.call, one_more(function)))
    if is_fork:  # the agent waits for what its fork returns
        patch(
            "whet.ranks.launch:_end", lambda end: lambda status: end(status) if status else return_to_agent()
        )
    with contextlib.suppress(Done):
        run_here(argv, Hook())


class Done(BaseException):
    """A rank ended with status 0."""


def return_to_agent() -> None:
    """End a rank as its fork does: wait until the agent has read the result, which it does not once it ends itself.

    The command torchrun starts ranks that wait for nobody; an agent of forks would kill them after 30 s.
    """
    unread = threading.Timer(3.0, os._exit, [0])
    unread.daemon = True
    unread.start()
    raise Done


def at_call(function: Callable[..., Any], number: int, other: Callable[..., Any]) -> Callable[..., Any]:
    """Call another function instead, once."""
    calls = [0]

    def wrapped(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        return (other if calls[0] == number + 1 else function)(*arguments, **named)

    return wrapped


def fail(*_: Any, **__: Any) -> Any:
    """Raise what no program expects."""
    raise ZeroDivisionError("injected")


def one_more(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function a value more."""
    return lambda *arguments: function(*arguments, 1.0)


def compared(folder: Path) -> dict[str, str]:
    """Return what must be equal of a run folder: a run that was asked to end has one checkpoint more on its way."""
    last = sorted((folder / "checkpoints").glob("step_*"))[-1].name
    found = content(folder).items()
    return {
        name: value
        for name, value in found
        if not name.startswith("heartbeats/")
        and ("/step_" not in name or name.startswith(f"checkpoints/{last}/"))
    }


def stage_of(program: str) -> str:
    """Return the command that a program is."""
    return program.partition("-")[0]


def words_for(program: str, out: Path, base: Path) -> list[str]:
    """Return the command line of a program."""
    init = [] if stage_of(program) == "sft" else ["--policy.init", str(base)]
    return [*PROGRAMS[program], "--out", str(out), *init]


def attempt(program: str, number: int, plan: Plan, work: Path, known: dict[str, str], length: float) -> Trial:
    """Disturb a run, see it end, resume it and compare."""
    generator = random.Random(f"{plan.seed} {program} {number}")
    kind = plan.faults[number // plan.num_programs % len(plan.faults)]
    fresh = plan.fresh
    out = work / "run"
    shutil.rmtree(out, ignore_errors=True)
    words = words_for(program, out, plan.base)
    fault, at = Fault(), generator.uniform(0.0, 0.7 * length)
    call = generator.randrange(6)
    if kind == "a rank raises":
        fault = Fault(rank=generator.randrange(2), call=call, raises="torch:Tensor.backward")
    if kind == "unequal work":
        fault = Fault(rank=generator.randrange(2), call=call, unequal=WORK[stage_of(program)])
    job = Job(words, work, fault, fresh=fresh)
    hit = disturb(job, kind, at, generator)
    seconds = job.wait(60.0)
    output = job.log.read_text(errors="replace")
    failures = judge(job, output, seconds, hit=hit)
    said = "; ".join(
        line for line in output.splitlines() if line.startswith(("whet: error", "rank ", "whet: stopped"))
    )
    job.clear()
    if kind in ("a rank raises", "unequal work"):
        hit, at = job.status != 0, float(call)
    ranks = 1 if number % 4 == 3 else 2
    failures += resume(program, words, out, work, known, ranks=ranks, fresh=fresh)
    return Trial(program, kind, f"{at:.2f}", hit, seconds, job.status or 0, ranks, said[:300], failures)


def disturb(job: Job, kind: str, at: float, generator: random.Random) -> bool:
    """Send a signal at a time after the ranks have begun; say whether the job was still going on."""
    while len(job.pids()) < 2 and not job.is_over():
        time.sleep(0.005)
    if kind in ("a rank raises", "unequal work"):
        inside = (job.folder.parent / "run" / "metrics.jsonl").exists
        while not inside() and not job.is_over():  # the clock runs from the first step on
            time.sleep(0.005)
        return True
    until = time.monotonic() + at
    while time.monotonic() < until and not job.is_over():
        time.sleep(0.002)
    if job.is_over():
        return False
    try:
        if kind == "end torchrun":
            os.kill(job.pid, signal.SIGTERM)
        else:
            os.kill(job.pids()[generator.randrange(2)], SIGNALS[kind])
    except ProcessLookupError:
        return False
    return True


def judge(job: Job, output: str, seconds: float, *, hit: bool) -> list[str]:
    """Say what is wrong with how a job ended."""
    failures: list[str] = []
    if job.status is None:
        failures.append(f"it did not end within {seconds:.0f} s")
    elif seconds > END_LIMIT_S:
        failures.append(f"it took {seconds:.1f} s to end")
    told = [
        line for line in output.splitlines() if line.startswith(("whet: error", "whet: interrupted", "rank "))
    ]
    ended = [line for line in output.splitlines() if line.startswith(("whet: stopped", "done:"))]
    if hit and not told and not ended:
        failures.append(f"it ended with status {job.status} without a message: {output[-300:]}")
    if len(told) > 1 or output.count("Traceback") > output.count("torchrun: ") + 1:
        failures.append(f"it said more than one thing: {output[-1000:]}")
    if job.status == 0 and not ended:
        failures.append("status 0, though it was not done")
    time.sleep(0.1)
    return failures + [f"process {pid} lives on" for pid in leaked(job.pid)]


def resume(
    program: str, words: list[str], out: Path, work: Path, known: dict[str, str], *, ranks: int, fresh: bool
) -> list[str]:
    """Go on to the end of the run, and compare."""
    more = ["--resume"] if (out / "config.yaml").is_file() else []
    if ranks == 2:
        job = Job([*words, *more], work, Fault(rank=-1), fresh=fresh)
        job.wait(120.0)
        status, output = job.status, job.log.read_text(errors="replace")
        job.clear()
    else:
        more += ["--safety.deterministic", "warn"] if more else []
        status, output = start([*words, *more], work / "log", fresh=fresh).wait()
    if status != 0:
        return [f"--resume on {ranks} ranks ended with status {status}: {output.strip()[-600:]}"]
    return differing(known, compared(out)) if ranks == 2 else far(program, work / "reference", out)


def far(program: str, reference: Path, out: Path) -> list[str]:
    """Say where a run that one rank ended is further than rounding from that of two."""
    failures, stage = [], stage_of(program)
    rows = [[json.loads(line) for line in (path / "metrics.jsonl").open()] for path in (reference, out)]
    if len(rows[0]) != len(rows[1]):
        failures.append(f"{len(rows[1])} rows of metrics, expected {len(rows[0])}")
    for name in (f"{stage}/lr", *(("sft/epoch", "sft/tokens") if stage == "sft" else ())):
        first, second = ([row[name] for row in own if f"{stage}/lr" in row] for own in rows)
        if first != second:
            failures.append(f"{name} differs")
    if stage == "rl" and len({str(asked(path)) for path in (reference, out)}) > 1:
        failures.append("other problems were asked, or in another order")
    for name in (f"{stage}/loss", f"{stage}/grad_norm", "rl/reward_mean"):
        for one, two in zip(*rows, strict=False):
            if not math.isclose(one.get(name, 0.0), two.get(name, 0.0), rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                failures.append(f"{name} of step {one['step']}: {two.get(name)}, expected {one.get(name)}")
                break
    newest = [
        sorted((path / "checkpoints").glob("step_*"))[-1] / "model.safetensors" for path in (reference, out)
    ]
    tensors = [load_file(path) for path in newest]
    for name, tensor in tensors[0].items():
        if not torch.allclose(tensor, tensors[1][name], rtol=TOLERANCE, atol=TOLERANCE):
            failures.append(f"{name} differs by {float((tensor - tensors[1][name]).abs().max()):.1e}")
            break
    return failures


def asked(run: Path) -> dict[int, list[str]]:
    """Return the problems of each step, by id."""
    found: dict[int, list[str]] = {}
    for line in (run / "samples.jsonl").open():
        row = json.loads(line)
        found.setdefault(row["step"], []).append(row["uid"])
    return {step: sorted(uids) for step, uids in found.items()}


def worker(program: str, numbers: list[int], plan: Plan) -> list[Trial]:
    """Do some trials of one program in a folder of their own: run paths are part of what is compared."""
    folder, trials = Path(tempfile.mkdtemp(dir=plan.work)), []
    job = Job(words_for(program, folder / "run", plan.base), folder, Fault(rank=-1), fresh=plan.fresh)
    length = job.wait(120.0)
    assert job.status == 0, job.log.read_text()
    known = compared(folder / "run")
    shutil.copytree(folder / "run", folder / "reference")
    for number in numbers:
        trials.append(attempt(program, number, plan, folder, known, length))
        if trials[-1].failures:
            shutil.copytree(folder / "run", folder / f"failed {number}", dirs_exist_ok=True)
    if not any(trial.failures for trial in trials):
        shutil.rmtree(folder)
    return trials


def table(trials: list[Trial]) -> str:
    """Return lines: per fault, trials, those that found the run going on, the longest end, and sound ones."""
    lines = [f"{'':<16}{'trials':>8}{'hit':>8}{'longest end':>14}{'sound':>8}"]
    for name in [*FAULTS, "all"]:
        own = [trial for trial in trials if name in ("all", trial.fault)]
        longest = max((trial.seconds for trial in own if trial.hit), default=0.0)
        sound = sum(not trial.failures for trial in own)
        lines.append(f"{name:<16}{len(own):>8}{sum(t.hit for t in own):>8}{longest:>12.1f} s{sound:>8}")
    return "\n".join(lines)


def main() -> int:
    """Run the trials and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--jobs", type=int, default=1, help="trials at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="programs, by commas; all: " + ", ".join(PROGRAMS))
    parser.add_argument("--faults", default=",".join(FAULTS), help="by commas; all: %(default)s")
    parser.add_argument("--fresh", action="store_true", help="start the command torchrun, instead of forks")
    parser.add_argument("--json", action="store_true", help="print the trials as JSON lines before the table")
    args = parser.parse_args()
    os.environ["WHET_COLLECTIVE_TIMEOUT_S"] = str(TIMEOUT_S)
    programs = args.only.split(",") if args.only else list(PROGRAMS)
    began, work = time.monotonic(), Path(tempfile.mkdtemp(prefix="whet-ranks-"))
    base = make_base(work, ["rl"]) if "rl" in map(stage_of, programs) else work
    plan = Plan(args.seed, tuple(args.faults.split(",")), work, base, len(programs), args.fresh)
    numbers = [list(range(place, args.trials, len(programs))) for place in range(len(programs))]
    trials: list[Trial] = []
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(args.jobs, fork, processes.end_with_parent) as pool:
        for done in pool.map(worker, programs, numbers, [plan] * len(programs)):
            trials += done
            for trial in done:
                if args.json:
                    print(json.dumps(asdict(trial)), flush=True)
                elif trial.failures:
                    print(
                        f"FAILED {trial.program}, {trial.fault} at {trial.at}: {trial.failures}", flush=True
                    )
    print(table(trials))
    failed = sum(bool(trial.failures) for trial in trials)
    print(f"{len(trials) - failed} of {len(trials)} sound, {time.monotonic() - began:.0f} s")
    if failed:
        print(f"the folders of the failures are kept below {work}", file=sys.stderr)
    else:
        shutil.rmtree(work, ignore_errors=True)
    return int(failed > 0 or len(trials) != args.trials)


if __name__ == "__main__":
    if "RANK" in os.environ:
        be_rank(sys.argv[1])
    sys.exit(main())
