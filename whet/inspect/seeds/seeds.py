"""`whet seeds`: runs one recipe with several seeds, stops hopeless ones early, and reports the spread."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from whet import processes
from whet.cli import Program, passed_words
from whet.config import Renamed, closest, dump_yaml
from whet.inspect.seeds.outcome import Board, Measure, Outcome, Status, write_outcomes
from whet.inspect.seeds.spread import FLAT_BELOW, Curve, KillRules, kill_reason
from whet.install import NoPosix
from whet.sandbox.reentry import refuse_reentry
from whet.storage.folder import open_run
from whet.telemetry.display import escape_controls
from whet.telemetry.log import parse_row
from whet.telemetry.metrics import METRICS, find_metric
from whet.train.dpo import DPOConfig
from whet.train.rft import RFTConfig
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig
from whet.types import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = NoPosix()  # pyright: ignore[reportAssignmentType]

WHET = (sys.executable, "-m", "whet")
POLL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class SeedsConfig:
    """One recipe with several seeds: stop the hopeless ones early, report the spread of all."""

    out: str
    """Output folder, with seed-K/ for each seed."""
    recipe: str
    """Recipe, .yaml file or run folder, as the program accepts it."""
    of: Literal["rl", "sft", "dpo", "rft"] = "rl"
    """Program of the recipe."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """Seeds, in starting order."""
    set: tuple[str, ...] = ()
    """Fields of the recipe that are overridden in every seed; written as its own options are: --num-steps 40."""
    parallel: int = 1
    """Seeds that run concurrently."""
    num_threads: int = 0
    """CPU threads of each seed; 0 shares the cores evenly."""
    metric: str = "rl/correct"
    """Metric that seeds are judged by."""
    better: Literal["higher", "lower"] | None = None
    """Which end of the metric is good; None: lower for a loss, else higher."""
    window: int = 5
    """Values of the rolling mean: used by every judgement and the final number."""
    threshold: float | None = None
    """Level of the rolling mean whose first step and time are reported."""
    kill_after: int = 0
    """Steps after which dead and lagging seeds are stopped; 0 stops none."""
    kill_margin: float = 0.25
    """How far below the median of the other seeds a seed may lag, in units of the metric."""
    grace_s: float = 10.0
    """Seconds between asking a seed to end and killing it."""

    RENAMED = {"program": Renamed("of", "rl")}

    def __post_init__(self) -> None:
        twice = sorted({seed for seed in self.seeds if self.seeds.count(seed) > 1})
        if not self.seeds or twice:
            got = f"{twice[0]} twice" if twice else "none"
            raise ValueError(f"seeds: got {got}, expected one or more different numbers")
        for name in ("parallel", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 1 or more")
        for name in ("num_threads", "kill_margin", "grace_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 0 or more")
        if self.kill_after and self.kill_after < 2 * self.window:
            raise ValueError(
                f"kill_after = {self.kill_after}: expected 0 (never) or at least two windows ({2 * self.window}), "
                "since the last window is compared with the first"
            )
        try:
            find_metric(self.metric)
        except ValueError:
            match = closest(self.metric, list(METRICS))
            hint = f", did you mean {match!r}?" if match else "; metrics.jsonl of a run names them"
            raise ValueError(f"metric = {self.metric!r}: no program logs that{hint}") from None
        for item in self.set:
            name = re.split(r"[= ]", item)[0]
            if name in ("out", "seed"):
                raise ValueError(f"{name} differs for each seed; leave it out")


def sign_of(config: SeedsConfig) -> int:
    """Return 1 when more of the metric is better, -1 when less is."""
    lower = config.metric.endswith("loss") if config.better is None else config.better == "lower"
    return -1 if lower else 1


def rules_of(config: SeedsConfig) -> KillRules:
    """Return the rules for stopping a seed early."""
    sign = sign_of(config)
    half = FLAT_BELOW if find_metric(config.metric).unit == "share" and sign > 0 else None
    return KillRules(
        after=config.kill_after,
        window=config.window,
        margin=config.kill_margin,
        sign=sign,
        enough=half if config.threshold is None else config.threshold,
    )


@dataclass(slots=True)
class _Seed:
    """One seed: its process and progress."""

    number: int
    folder: Path
    outcome: Outcome
    process: subprocess.Popen[bytes] | None = None
    offset: int = 0
    inode: int = 0

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    def read(self) -> None:
        """Read the rows appended since the last call, or all of them if a resumed run rewrote its file."""
        with suppress(FileNotFoundError), (self.folder / "metrics.jsonl").open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self.inode:
                self.inode, self.offset = inode, 0
                self.outcome.curve = Curve(self.outcome.curve.metric)
            file.seek(self.offset)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self.offset += len(whole)
            for line in whole.splitlines():
                if (row := parse_row(line)) is not None:
                    self.outcome.curve.add(row)


def plan(config: SeedsConfig) -> str:
    """Return the command line of each seed."""
    return "\n".join(shlex.join(("whet", *_arguments(config, seed))) for seed in config.seeds)


def main(config: SeedsConfig, *, resume: bool = False) -> None:
    """Run the seeds and report."""
    launch(config, resume=resume)


def launch(config: SeedsConfig, *, resume: bool = False, command: Sequence[str] = WHET) -> list[Outcome]:
    """Run the seeds, stop the hopeless ones, write summary.json, report.md and spread.png, and print the table.

    Args:
        config: What to run.
        resume: Continue the interrupted and failed seeds of an earlier call; finished and killed ones stay.
        command: The command that runs whet.

    Returns:
        One outcome per seed.

    Raises:
        UserError: If the program refuses the recipe, the folder does not fit, the metric is never logged, or no seed
            finished.
        KeyboardInterrupt: After Ctrl-C or SIGTERM, when all seeds are stopped and the report is written.
    """
    refuse_reentry("a launch of seeds")
    num_steps = _rehearse(config, command)
    folder = Path(config.out)
    open_run(folder, dump_yaml(config), resume=resume)
    seeds = [
        _load_seed(folder / f"seed-{number}", number, config.metric, num_steps) for number in config.seeds
    ]
    outcomes = [seed.outcome for seed in seeds]
    title = f"{config.of} {config.recipe}"
    measure = Measure(
        metric=config.metric, window=config.window, sign=sign_of(config), threshold=config.threshold
    )
    with _interruption() as is_interrupted:
        with Board(title, measure) as board:
            try:
                _run(config, command, seeds, board, is_interrupted)
            finally:
                left = [seed for seed in seeds if seed.process is not None]
                _stop(left, config.grace_s, "interrupted", "continue with --resume")
                board.show(outcomes)
        text = write_outcomes(folder, outcomes, f"{title}, {len(seeds)} seeds", measure)
        print(
            f"\n{text}\n\ndone: {folder}  (report: {folder / 'report.md'}, curves: {folder / 'spread.png'})"
        )
    if is_interrupted():
        raise KeyboardInterrupt
    if not any(outcome.status == "done" for outcome in outcomes):
        first = next(outcome for outcome in outcomes if outcome.status == "failed")
        raise UserError(f"no seed finished; seed {first.number} says: {first.reason}")
    return outcomes


def _arguments(config: SeedsConfig, seed: int) -> list[str]:
    own = [f"--out={Path(config.out) / f'seed-{seed}'}", f"--seed={seed}"]
    return [config.of, config.recipe, *own, *passed_words(config.set)]


def _rehearse(config: SeedsConfig, command: Sequence[str]) -> int | None:
    """Let the program check recipe and overrides without running; return the number of steps if it prints it."""
    result = processes.run(
        [*command, *_arguments(config, config.seeds[0]), "--resume", "--dry-run"],
        capture_output=True,
        text=True,
        errors="replace",
    )
    if result.returncode:
        raise UserError(f"whet {config.of} refuses: {_last_line(result.stderr)}")
    found = re.search(r"^num_steps: (\d+)$", result.stdout, flags=re.MULTILINE)
    num_steps = int(found[1]) if found else None
    if num_steps is not None and config.kill_after >= num_steps:
        raise UserError(
            f"kill_after = {config.kill_after}: expected less than the {num_steps} steps of a run, or 0 to stop none"
        )
    return num_steps


def _load_seed(folder: Path, number: int, metric: str, num_steps: int | None) -> _Seed:
    """Load a seed's progress from an earlier launch."""
    seed = _Seed(number, folder, Outcome(number, Curve(metric), num_steps))
    if not folder.exists():
        return seed
    _open_log(seed).close()  # fails if another launcher runs it
    killed = folder / "killed.json"
    if killed.exists():
        seed.outcome.status, seed.outcome.reason = "killed", json.loads(killed.read_text())["reason"]
    elif (folder / "summary.json").exists():
        seed.outcome.status = "done"
    seed.read()
    return seed


def _run(
    config: SeedsConfig,
    command: Sequence[str],
    seeds: Sequence[_Seed],
    board: Board,
    is_interrupted: Callable[[], bool],
) -> None:
    """Start, watch and judge the seeds until all are done or interrupted."""
    while not is_interrupted():
        waiting = [seed for seed in seeds if seed.outcome.status == "waiting"]
        running = [seed for seed in seeds if seed.process is not None]
        if not waiting and not running:
            return
        for seed in waiting[: config.parallel - len(running)]:
            _start(seed, config, command)
        board.show([seed.outcome for seed in seeds])
        time.sleep(POLL_S)
        for seed in running:
            _look_after(seed)
            _check_metric(seed.outcome, config)
        if config.kill_after:
            _judge(seeds, config)


def _start(seed: _Seed, config: SeedsConfig, command: Sequence[str]) -> None:
    """Start the process of a seed, or resume it from its last checkpoint, in its own process group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = str(config.num_threads or max(1, cores // config.parallel))
    resume = ["--resume"] if (seed.folder / "config.yaml").exists() else []
    with _open_log(seed) as log:
        seed.process = processes.start(
            [*command, *_arguments(config, seed.number), *resume],
            death=signal.SIGTERM,  # without its launcher a run saves and stops
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        )
    seed.outcome.status = "running"


def _open_log(seed: _Seed) -> IO[bytes]:
    """Open the log of a seed, locked: the lock lives as long as any process that writes to the log."""
    log = seed.log.open("ab")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        log.close()
        raise UserError(
            f"{seed.folder}: still running, under a launcher that was killed or is still active; wait or end it"
        ) from None
    return log


def _look_after(seed: _Seed) -> None:
    """Read a running seed's log and, if it has ended, how."""
    assert seed.process is not None
    status = seed.process.poll()  # before reading, so that no last row is missed
    seed.read()
    if status is None:
        return
    _signal(seed, signal.SIGKILL)  # anything left in its process group
    seed.process = None
    seed.outcome.status = "failed" if status else "done"
    if status < 0:
        name = signal.Signals(-status).name
        seed.outcome.reason = f"ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    elif status:
        seed.outcome.reason = _last_line(seed.log.read_text(errors="replace"))


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
    return escape_controls(lines[-1].strip().removeprefix("whet: error: "))


def _check_metric(outcome: Outcome, config: SeedsConfig) -> None:
    """Refuse a metric that this program does not log, as soon as that is certain.

    Raises:
        UserError: With metrics that it does log.
    """
    names, step = outcome.curve.names, outcome.curve.last_step
    if config.metric in names or (not names and outcome.status != "done"):
        return
    group = config.metric.partition("/")[0]
    is_foreign = group != "eval" and not any(name.startswith(f"{group}/") for name in names)
    is_late = bool(config.kill_after) and step >= config.kill_after
    if is_foreign or is_late or outcome.status == "done":
        some = ", ".join(sorted(names)[:6]) or "nothing"
        raise UserError(
            f"metric = {config.metric!r}: seed {outcome.number} did not log it in {step} steps; it logs {some} ..."
        )


def _judge(seeds: Sequence[_Seed], config: SeedsConfig) -> None:
    """Stop seeds by the rules, the worst first, but never the last one that may still finish."""
    rules = rules_of(config)
    doomed: list[tuple[float, _Seed, str]] = []
    for seed in seeds:
        peers = [other.outcome.curve for other in seeds if other is not seed]
        if seed.process is not None and (reason := kill_reason(seed.outcome.curve, peers, rules)):
            doomed.append((rules.sign * seed.outcome.curve.final(config.window), seed, reason))
    for _, seed, reason in sorted(doomed, key=lambda item: item[0]):
        if sum(other.outcome.status in ("waiting", "running", "done") for other in seeds) == 1:
            return
        facts = {"step": seed.outcome.curve.last_step, "time": time.strftime("%FT%T%z"), "reason": reason}
        _stop([seed], config.grace_s, "killed", reason)
        if seed.outcome.status == "killed":
            (seed.folder / "killed.json").write_text(json.dumps(facts, indent=1) + "\n")


def _stop(seeds: Sequence[_Seed], grace_s: float, status: Status, reason: str) -> None:
    """End processes with all their children: ask, wait, kill. One that finished in the meantime counts as done."""
    for seed in seeds:
        _signal(seed, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for seed in seeds:
        assert seed.process is not None
        with suppress(subprocess.TimeoutExpired):
            seed.process.wait(max(0.0, deadline - time.monotonic()))
        _signal(seed, signal.SIGKILL)
        seed.process.wait()
        seed.process = None
        seed.read()
        is_done = (seed.folder / "summary.json").exists()
        seed.outcome.status, seed.outcome.reason = ("done", "") if is_done else (status, reason)


def _signal(seed: _Seed, number: signal.Signals) -> None:
    assert seed.process is not None
    with suppress(ProcessLookupError, PermissionError):  # the group is gone; macOS raises the second error
        os.killpg(seed.process.pid, number)


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Record Ctrl-C, SIGTERM and a closed terminal instead of raising, so that no seed is lost halfway."""
    seen: list[int] = []
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # ignored by nohup, or by a background shell
    ]
    before = {number: signal.signal(number, lambda number, _: seen.append(number)) for number in numbers}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


PROGRAM = Program(
    config_class=SeedsConfig,
    main=main,
    plan=plan,
    resumable=True,
    positional="recipe",
    passes={"rl": RLConfig, "sft": SFTConfig, "dpo": DPOConfig, "rft": RFTConfig},
)
