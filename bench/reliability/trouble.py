"""What people and programs do to a run from outside: other inputs at its resume, its folder gone, rewards that are no
numbers, answers that lie.

python bench/reliability/trouble.py [--only KIND] [--quick] [--jobs J] [--plant FAULT] [--json]

- `inputs`: a run is killed, and what it reads is changed (rows, a reward's code, weights and tokenizer of its start).
  `--resume` must refuse in one line with status 2; once the change is undone, it must end as the undisturbed run.
- `folder`: the run folder is moved or removed while it runs: one line and status 2; moved back, it goes on and ends as
  the undisturbed run; of a removed one the weights are kept beside it, finite.
- `rewards`: a reward returns 10**400, 1e300, NaN, an object that lies ...: the run ends, or is refused in one line; no
  traceback, no hang, every saved weight is finite.
- `objects`: programs that try to pass tests without being right (the sandbox' attacks on rewards): none is paid, and
  none makes itself unjudgeable.

Exit status 1 on any failure.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_runs import (
    FILES,
    Hook,
    battery_options,
    command,
    content,
    differing,
    leaked,
    make_base,
    plant,
    reference,
    run_trials,
    start,
)

from whet.model.weights import model_folder
from whet.sandbox.attacks.attacks import all_attacks
from whet.sandbox.attacks.battery import run_battery
from whet.sandbox.programs import Sandbox

KINDS = ("inputs", "folder", "rewards", "objects")
HALT = Hook(point="log append", call=9)
"""Where a run is killed: checkpoints are there, and steps remain."""


@dataclass(frozen=True)
class Trial:
    """One trouble and what became of it.

    Attributes:
        kind: A name of KINDS.
        name: What was done.
        outcome: refused, ended, contained or FAILED.
        failure: What is wrong.
    """

    kind: str
    name: str
    outcome: str
    failure: str


def rows(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    """Return what changes the lines of a file of rows."""

    def apply(path: Path) -> None:
        path.write_text("".join(change(path.read_text().splitlines(keepends=True))))

    return apply


def other_weight(path: Path) -> None:
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] += 1e-3
    save_file(tensors, path)


def two_digits(path: Path) -> None:
    """Let two digits of a tokenizer of characters change places."""
    text = path.read_text()
    assert '"7"' in text
    assert '"8"' in text
    path.write_text(text.replace('"7"', '"@"').replace('"8"', '"7"').replace('"@"', '"8"'))


INPUTS: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "row appended": ("rl mixture", "sums.jsonl", rows(lambda lines: [*lines, lines[0]])),
    "rows reordered": ("rl mixture", "sums.jsonl", rows(lambda lines: [*lines[1:], lines[0]])),
    "rows halved": ("rl mixture", "sums.jsonl", rows(lambda lines: lines[: len(lines) // 2])),
    "a row gone": ("rl mixture", "sums.jsonl", rows(lambda lines: lines[1:])),
    "an answer changed": (
        "rl mixture",
        "sums.jsonl",
        rows(lambda lines: [*lines[:3], lines[3].replace('"answer": "', '"answer": "1'), *lines[4:]]),
    ),
    "a reward's code": (
        "rl own",
        "own.py",
        rows(lambda lines: [line.replace("% 7", "% 6") for line in lines]),
    ),
    "weights of its start": ("rl own", "model/model.safetensors", other_weight),
    "digits of its tokenizer": ("rl own", "model/tokenizer.json", two_digits),
    "tags of its protocol": (
        "rl own",
        "model/protocol.json",
        rows(lambda lines: [line.replace("answer", "result") for line in lines]),
    ),
}
"""Name -> program, file (model/: of the policy that it starts from), and what is done to it."""
HARMS = ("moved", "removed")
REWARDS = {
    "10**400": "10 ** 400",
    "-10**400": "-(10 ** 400)",
    "1e300": "1e300",
    "-1e300": "-1e300",
    "largest float": "1.7976931348623157e308",
    "tiny": "5e-324",
    "NaN": "float('nan')",
    "infinity": "float('inf')",
    "text": "'1'",
    "None": "None",
    "a list": "[1.0]",
    "True": "True",
    "complex": "1j",
    "a fraction": "__import__('fractions').Fraction(1, 3)",
    "a float that lies": "type('F', (float,), {'__float__': lambda self: 1e308, '__lt__': lambda *_: True})(0.5)",
    "an int that lies": "type('I', (int,), {'__float__': lambda self: float('nan')})(1)",
    "an object that lies": "type('O', (), {'__float__': lambda self: 10.0 ** 308, '__eq__': lambda *_: True})()",
    "half of them huge": "1e300 if len(completion) % 2 else 0.5",
    "half of them NaN": "float('nan') if len(completion) % 2 else 0.5",
    "raises": "1 / 0",
    "exits": "__import__('os')._exit(0)",
    "huge text": "'x' * 10 ** 7",
    "a recursive list": "(lambda x: x.append(x) or x)([])",
}
"""Name -> what a reward returns."""


def one_line(status: int, output: str) -> str:
    """Return what is wrong with a refusal; '' for one line and status 2."""
    if "Traceback" in output:
        lines = output.strip().splitlines()
        place = next((line.strip() for line in reversed(lines) if line.lstrip().startswith("File ")), "")
        return f"traceback: {lines[-1][:200]}, {place}"
    if status != 2:
        return f"status {status}, expected 2: {output.strip()[-200:]}"
    if output.count("whet: error: ") != 1:
        return "status 2 without its one line"
    return ""


def halted(program: str, work: Path, base: Path) -> tuple[dict[str, str], Path, Path]:
    """Return the content of the undisturbed run, the folder of runs and a copy of one that was killed."""
    known = reference(program, work, base)
    out, kept = work / "run", work / "halted"
    shutil.rmtree(out)
    status, output = start(command(program, out, base), work / "log", HALT).wait()
    assert status == -signal.SIGKILL, output
    out.rename(kept)
    return known.content, out, kept


def try_inputs(work: Path, base: Path, *, quick: bool) -> list[Trial]:
    """Change what a killed run reads, go on, undo it, and go on (`quick`: only after the last change of a program)."""
    done = []
    last = {program: name for name, (program, _, _) in INPUTS.items()}
    for program in dict.fromkeys(program for program, _, _ in INPUTS.values()):
        ground = work / program.replace(" ", "-")
        ground.mkdir()
        own = ground / "base"
        shutil.copytree(base, own)
        for name, text in FILES.items():
            (ground / name).write_text(text)
        known, out, kept = halted(program, ground, own)
        for name, (theirs, file, change) in INPUTS.items():
            if theirs != program:
                continue
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(kept, out)
            place, path = file.rpartition("/")[::2]
            target = Path(model_folder(str(own))) / path if place else ground / path
            before = target.read_bytes()
            change(target)
            assert target.read_bytes() != before, name
            words = [*command(program, out, own), "--resume"]
            failure = one_line(*start(words, ground / "log").wait())
            target.write_bytes(before)
            if not failure and (not quick or name == last[program]):
                status, output = start(words, ground / "log").wait()
                failure = f"undone, it ended with {status}: {output.strip()[-200:]}" if status else ""
                failure = failure or "; ".join(differing(known, content(out))[:3])
            done.append(Trial("inputs", name, "FAILED" if failure else "refused", failure))
    return done


def try_folder(work: Path, base: Path, *, quick: bool) -> list[Trial]:
    """Move or remove the run folder while it is written to."""
    known = reference("rl", work, base).content
    out, aside = work / "run", work / "elsewhere"
    done = []
    for harm in HARMS:
        for folder in (out, aside, work / "run-rescued"):
            shutil.rmtree(folder, ignore_errors=True)
        words = command("rl", out, base)
        hook = Hook(point="log append", call=5, harm=str(out), aside=str(aside) if harm == "moved" else "")
        failure = one_line(*start(words, work / "log", hook).wait())
        if not failure and harm == "moved":
            shutil.rmtree(out, ignore_errors=True)
            aside.rename(out)
            status, output = start([*words, "--resume"], work / "log").wait()
            failure = f"moved back, it ended with {status}: {output.strip()[-200:]}" if status else ""
            failure = failure or "; ".join(differing(known, content(out))[:3])
        elif not failure:
            failure = not_finite(work / "run-rescued")
        done.append(Trial("folder", harm, "FAILED" if failure else "refused", failure))
    return done


def not_finite(folder: Path) -> str:
    """Return what is wrong with the weights below a folder; '' where there are some, all finite."""
    found = sorted(folder.rglob("model.safetensors"))
    bad = [path for path in found if not all(torch.isfinite(t).all() for t in load_file(path).values())]
    return f"{bad[0]}: not finite" if bad else "" if found else f"{folder}: no weights"


def try_rewards(work: Path, base: Path, *, quick: bool) -> list[Trial]:
    """Train with rewards that return what is no reward."""
    done = []
    for name, value in list(REWARDS.items())[:: 4 if quick else 1]:
        out = work / "run"
        shutil.rmtree(out, ignore_errors=True)
        (base.parent / "own.py").write_text(f"def length(problem, completion):\n    return {value}\n")
        run = start([*command("rl own", out, base), "--preflight", "warn"], work / "log")
        status, output = run.wait()
        failure = "hung" if status == 1000 else one_line(status, output) if status else not_finite(out)
        if pids := leaked(run.pid):
            failure = failure or f"processes {pids} live on"
        done.append(
            Trial("rewards", name, "FAILED" if failure else "refused" if status else "ended", failure)
        )
    return done


def try_objects(work: Path, base: Path, *, quick: bool) -> list[Trial]:
    """Mount the attacks on rewards."""
    with Sandbox(num_workers=1) as sandbox:
        attacks = [attack for attack in all_attacks() if attack.group == "rewards"]
        findings = run_battery(sandbox, attacks, lambda _: None, num_workers=1)
    return [
        Trial("objects", found.name, "FAILED" if found.breach else "contained", found.breach)
        for found in findings
    ]


TRY = {"inputs": try_inputs, "folder": try_folder, "rewards": try_rewards, "objects": try_objects}


def worker(arguments: tuple[str, str, str, bool]) -> list[Trial]:
    """Do all trials of a kind in a folder of their own."""
    kind, work, base, quick = arguments
    folder = Path(tempfile.mkdtemp(dir=work))
    shutil.copytree(base, folder / "base")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    done = TRY[kind](folder, folder / "base", quick=quick)
    shutil.rmtree(folder)
    return done


def _failure(trial: Trial) -> str:
    return f"{trial.kind}, {trial.name}: {trial.failure}" if trial.failure else ""


def main() -> int:
    """Run the trials and print the table."""
    parser = battery_options(__doc__)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds, by commas; all: " + ", ".join(KINDS))
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of the rewards, inputs undone only once"
    )
    args = parser.parse_args()
    began = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="whet-trouble-"))
    plant(args.plant)
    base = make_base(work, ["rl"])
    portions = [(kind, str(work), str(base), args.quick) for kind in args.only.split(",")]
    trials: list[Trial] = run_trials(worker, portions, args, _failure)
    shutil.rmtree(work, ignore_errors=True)
    outcomes = ("refused", "ended", "contained", "FAILED")
    print(f"{'':<12}{'trials':>8}" + "".join(f"{outcome:>11}" for outcome in outcomes))
    for kind in dict.fromkeys(trial.kind for trial in trials):
        counts = Counter(trial.outcome for trial in trials if trial.kind == kind)
        print(f"{kind:<12}{counts.total():>8}" + "".join(f"{counts[o]:>11}" for o in outcomes))
    failed = sum(trial.outcome == "FAILED" for trial in trials)
    print(f"{len(trials) - failed} of {len(trials)} as they should be, {time.monotonic() - began:.0f} s")
    return int(failed > 0 or not trials)


if __name__ == "__main__":
    sys.exit(main())
