"""Kill tiny runs of every program with SIGKILL, go on with --resume, and compare with the run that was never killed.

python bench/reliability/kill.py [--trials N] [--jobs J] [--seed S] [--only PROGRAM] [--fresh] [--json]

Equal must be, bitwise: every file of every checkpoint (weights, optimizer, tokenizer; of state.json all but times),
samples.jsonl, pairs.jsonl, kept.jsonl, rounds.jsonl, eval_samples.jsonl; and all rows of metrics.jsonl, summary.json
and eval.json but for times and readings of sensors. Nothing may be left over, no file and no process. A third of the
kills comes at a random time, the others before, inside or behind a random call at a named moment; a third of the trials
is killed again while it resumes, some of them twice. Exit status 1 on any failure; --fresh starts an interpreter for
each run.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from tiny_runs import (
    LINGER_S,
    PROGRAMS,
    RAY_LINGERS_S,
    Hook,
    Reference,
    battery_options,
    command,
    content,
    differing,
    leaked,
    make_base,
    plant,
    reference,
    run_trials,
    shared_out,
    start,
)

TIME = "any time"
BACK_AGAIN = (0.67, 0.9)
"""Trials above the first are killed twice, above the second three times."""


@dataclass(frozen=True)
class Trial:
    """A killed run.

    Attributes:
        program: Name in PROGRAMS.
        moments: Where it was killed, kill by kill.
        killed: Kills that found it alive.
        failures: What is wrong; empty when it ended as the undisturbed run.
        seconds: Wall time of all its starts.
    """

    program: str
    moments: list[str]
    killed: int
    failures: list[str]
    seconds: float


def choose(generator: random.Random, known: Reference, number: int) -> tuple[str, Hook, float]:
    """Choose a moment: its name, the hook in the process, and the time of a kill from outside (0 for none)."""
    names = [TIME, *known.points]
    name = names[number % len(names)] if generator.random() < 0.67 else TIME
    if name == TIME:
        at = generator.uniform(0.0, known.seconds)
        return f"{TIME} ({at:.2f} s)", Hook(), max(at, 1e-3)
    calls, mean = known.points[name]
    call = generator.randrange(calls)
    when = "torn" if name == "torn append" else generator.choice(("before", "inside", "after"))
    delay = generator.uniform(0.0, mean)
    return f"{name} {call + 1} of {calls}, {when}", Hook(point=name, call=call, when=when, delay_s=delay), 0.0


def kill_once(words: list[str], log: Path, hook: Hook, at: float, *, fresh: bool) -> tuple[int, str, int]:
    """Start a run and kill it; return its status, its output and its session."""
    run = start(words, log, hook, fresh=fresh)
    if at:
        time.sleep(at)
        run.kill()
    return *run.wait(), run.pid


def go_on(words: list[str], out: Path) -> list[str]:
    """Add --resume where there is a run to resume; what was killed before its config.yaml starts anew."""
    return [*words, "--resume"] if (out / "config.yaml").is_file() else words


def attempt(
    program: str, number: int, seed: int, work: Path, base: Path, known: Reference, *, fresh: bool
) -> Trial:
    """Kill a run, resume it to its end and compare."""
    generator = random.Random(f"{seed} {program} {number}")
    out = work / "run"  # the same path as the reference: config.yaml names it
    shutil.rmtree(out, ignore_errors=True)
    words, log = command(program, out, base), work / "log"
    began, killed, moments, failures, sessions = time.monotonic(), 0, [], [], []
    draw = generator.random()
    for number_of_kill in range(1 + sum(draw > border for border in BACK_AGAIN)):
        name, hook, at = choose(generator, known, number + 5 * number_of_kill)
        if number_of_kill:  # a resumed run makes fewer calls
            hook = Hook(**{**asdict(hook), "call": int(hook.call * generator.random())})
        moments.append(name)
        argv = go_on(words, out) if number_of_kill else words
        status, output, session = kill_once(argv, log, hook, at, fresh=fresh)
        sessions.append(session)
        killed += status == -signal.SIGKILL
        if status not in (0, -signal.SIGKILL):
            failures.append(f"start {number_of_kill + 1} ended with status {status}: {output.strip()[-300:]}")
    status, output = 0, ""
    if program != "export" or not out.exists():  # a folder that is there is whole: no export goes over it
        run = start(go_on(words, out), log, fresh=fresh)
        sessions.append(run.pid)
        status, output = run.wait()
    if status:
        failures.append(f"--resume ended with status {status}: {output.strip()[-300:]}")
    else:
        failures += differing(known.content, content(out))
    linger_s = RAY_LINGERS_S if program == "rl workers" else LINGER_S
    failures += [f"process {pid} lives on" for session in sessions for pid in leaked(session, linger_s)]
    return Trial(program, moments, killed, failures, time.monotonic() - began)


def worker(arguments: tuple[str, list[int], int, str, str, bool]) -> list[Trial]:
    """Do some trials of one program in a folder of their own: run paths are part of what is compared."""
    program, numbers, seed, work, base, fresh = arguments
    folder = Path(tempfile.mkdtemp(dir=work))
    known = reference(program, folder, Path(base))
    done = [attempt(program, n, seed, folder, Path(base), known, fresh=fresh) for n in numbers]
    if not any(trial.failures for trial in done):
        shutil.rmtree(folder)
    return done


def table(trials: list[Trial]) -> str:
    """Return lines: per program and per moment, trials, kills that hit, and equal ends."""
    rows: dict[str, list[Trial]] = {}
    for trial in trials:
        rows.setdefault(trial.program, []).append(trial)
    lines = [f"{'':<22}{'trials':>8}{'killed':>8}{'kills':>8}{'equal':>8}"]
    moments = Counter(_kind(moment) for trial in trials for moment in trial.moments)
    lines += [_line(program, own) for program, own in rows.items()]
    lines.append(_line("all", trials))
    lines.append(
        "moments of the kills: " + ", ".join(f"{name} {count}" for name, count in moments.most_common())
    )
    return "\n".join(lines)


def _kind(moment: str) -> str:
    return (
        TIME if moment.startswith(TIME) else moment.partition(",")[0].rpartition(" of ")[0].rpartition(" ")[0]
    )


def _line(name: str, trials: list[Trial]) -> str:
    killed, kills = sum(t.killed > 0 for t in trials), sum(t.killed for t in trials)
    return f"{name:<22}{len(trials):>8}{killed:>8}{kills:>8}{sum(not t.failures for t in trials):>8}"


def _failure(trial: Trial) -> str:
    return (
        f"{trial.program}, killed at {'; '.join(trial.moments)}: {trial.failures}" if trial.failures else ""
    )


def main() -> int:
    """Run the trials and print the table."""
    parser = battery_options(__doc__, 200)
    parser.add_argument("--only", default="", help="programs, by commas; all: " + ", ".join(PROGRAMS))
    parser.add_argument("--fresh", action="store_true", help="an interpreter for each run, instead of a fork")
    args = parser.parse_args()
    programs = args.only.split(",") if args.only else list(PROGRAMS)
    began = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="whet-kill-"))
    plant(args.plant)
    base = make_base(work, programs)
    portions = []
    for program, numbers in shared_out(programs, args.trials).items():
        size = max(10, -(-len(numbers) // 2))
        for first in range(0, len(numbers), size):
            portions.append(
                (program, numbers[first : first + size], args.seed, str(work), str(base), args.fresh)
            )
    trials: list[Trial] = run_trials(worker, portions, args, _failure)
    print(table(trials))
    failed = sum(bool(trial.failures) for trial in trials)
    print(f"{len(trials) - failed} of {len(trials)} ended bitwise equal, {time.monotonic() - began:.0f} s")
    if failed:
        print(f"the folders of the failures are kept below {work}", file=sys.stderr)
    else:
        shutil.rmtree(work, ignore_errors=True)
    return int(failed > 0 or len(trials) != args.trials)


if __name__ == "__main__":
    sys.exit(main())
