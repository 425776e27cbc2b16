"""Damage each file of a killed run, fill the disk, bend the clock, start twice at once; then see what --resume does.

python bench/reliability/corrupt.py [--trials N] [--matrix] [--jobs J] [--seed S] [--only PROGRAM] [--plant FAULT]

A run is killed between two checkpoints. In a copy of its folder one file is damaged, and `--resume` must do one of two
things: end as the undisturbed run (bitwise; fallen back loudly to the checkpoint before where a checkpoint was damaged,
with the damaged one kept aside; a damaged log or best policy may only be told of), or stop with one line and status 2,
having lost nothing that was whole. A traceback, a hang, an executed pickle, another end or silence is a failure. `start
from` damages the run that a policy starts from. Exit status 1 on any failure.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tiny_runs import (
    Hook,
    Reference,
    battery_options,
    command,
    content,
    differing,
    make_base,
    plant,
    reference,
    run_trials,
    shared_out,
    start,
)

from whet import processes

HALTS = {
    "sft": Hook(point="log append", call=10),
    "rl stale": Hook(point="log append", call=9),
    "dpo": Hook(point="log append", call=6),
    "rft": Hook(point="log append", call=8),
    "eval": Hook(point="grading", call=1),
}
"""Program -> where its run is killed: at least two checkpoints are there, and steps remain."""
WRONG_JSON = (
    "",
    "null",
    "[]",
    "{}",
    "3",
    '"x"',
    '{"files": {}}',
    '{"step": "x"}\n',
    "[" * 100_000,
    '{"a": 1e999}',
    "{",
)
MATRIX = ("bit flip", "truncated", "deleted", "emptied", "swapped")
"""Damages that --matrix does to every file of the newest checkpoint."""
SPECIAL = ("disk full", "clock back", "clock jumps", "two at once")
START_FROM = "start from"


class Canary:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return _sing, (str(self.path),)


def _sing(path: str) -> None:
    Path(path).touch()


@dataclass(frozen=True)
class Trial:
    """One damage and what became of it.

    Attributes:
        program: Name in HALTS, or START_FROM.
        place: Which part of the folder: newest, older, best, protocol, run; or a special case.
        name: The file.
        damage: What was done to it.
        outcome: equal, fell back, told, refused, or FAILED.
        failure: What is wrong.
        said: The last line of its output.
    """

    program: str
    place: str
    name: str
    damage: str
    outcome: str
    failure: str
    said: str


def flip(path: Path, generator: random.Random, _: Path) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, generator: random.Random, _: Path) -> None:
    path.write_bytes(path.read_bytes()[: generator.randrange(max(1, path.stat().st_size))])


def delete(path: Path, _generator: random.Random, _: Path) -> None:
    path.unlink()


def empty(path: Path, _generator: random.Random, _: Path) -> None:
    path.write_bytes(b"")


def double_line(path: Path, generator: random.Random, _: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True) or [b"\n"]
    at = generator.randrange(len(lines))
    path.write_bytes(b"".join([*lines[: at + 1], *lines[at:]]))


def cut_line(path: Path, generator: random.Random, _: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True) or [b""]
    at = generator.randrange(len(lines))
    path.write_bytes(b"".join([*lines[:at], *lines[at + 1 :]]))


def wrong_json(path: Path, generator: random.Random, _: Path) -> None:
    path.write_text(generator.choice(WRONG_JSON))


def swap(path: Path, _generator: random.Random, root: Path) -> None:
    """Swap it with the file of its name in another checkpoint, else with another file of its folder."""
    inside = (
        path.relative_to(path.parents[len(path.relative_to(root).parts) - 3])
        if "step_" in str(path)
        else None
    )
    others = [p for p in sorted(root.glob(f"checkpoints/step_*/{inside}")) if p != path] if inside else []
    others = others or [p for p in sorted(path.parent.iterdir()) if p != path and p.is_file()] or [path]
    mine, other = path.read_bytes(), others[0].read_bytes()
    path.write_bytes(other)
    others[0].write_bytes(mine)


def canary(path: Path, _generator: random.Random, root: Path) -> None:
    path.write_bytes(pickle.dumps(Canary(root.parent / "canary")))


def folder(path: Path, _generator: random.Random, _: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path, random.Random, Path], None]] = {
    "bit flip": flip,
    "truncated": truncate,
    "deleted": delete,
    "emptied": empty,
    "line doubled": double_line,
    "line cut out": cut_line,
    "wrong JSON": wrong_json,
    "swapped": swap,
    "pickle": canary,
    "a folder": folder,
}


def place_of(name: str, root: Path) -> str:
    """Say which part of a run folder a file belongs to."""
    parts = name.split("/")
    if parts[0] != "checkpoints":
        return "run"
    steps = sorted(path.name for path in (root / "checkpoints").glob("step_*"))
    return parts[1] if not parts[1].startswith("step_") else "newest" if parts[1] == steps[-1] else "older"


def hashes(root: Path) -> dict[str, str]:
    """Return the sha256 of every file of a folder."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def fault_of(status: int, output: str, out: Path) -> str:
    """Return what is wrong with the end of a process, whatever it was to do."""
    if (out.parent / "canary").exists():
        return "a pickle was executed"
    if "Traceback" in output:
        return "traceback: " + output.strip().splitlines()[-1][:200]
    if status not in (0, 2):
        return f"status {status}"
    if status == 2 and output.count("whet: error: ") != 1:
        return "status 2 without its one line"
    return ""


def judge(
    status: int, output: str, out: Path, name: str, place: str, before: dict[str, str], known: Reference
) -> tuple[str, str]:
    """Return outcome and failure of a resumed run."""
    fault = fault_of(status, output, out)
    if fault:
        return "FAILED", fault
    after = hashes(out)
    if status == 2:
        lost = [
            path
            for path, digest in before.items()
            if path.startswith("checkpoints/")
            and "/.tmp-" not in path
            and path != name
            and digest not in after.values()
        ]
        return ("FAILED", f"refused, but lost {lost[:3]}") if lost else ("refused", "")
    unequal = differing(known.content, content(out))
    is_told = "warning" in output and name.split("/")[-1 if place in ("run", "newest") else 1] in output
    aside = [path for path in after if "/.corrupt-" in f"/{path}"]
    if place == "newest":
        if unequal:
            return "FAILED", f"another end: {unequal[:3]}"
        if not is_told or not aside:
            return "FAILED", "used or passed over without a word, or not kept aside"
        return "fell back", ""
    record = name.startswith(("replay/", "faults/"))
    own = f"{Path(name).parent}/" if record else name if place == "run" else f"checkpoints/{place}/"
    # Without its best policy a run ends with the best of what comes after, and says how far that one moved.
    owned = (own, "weights.json") if place == "best" and is_told else (own,)
    foreign = [text for text in unequal if not text.startswith(owned)]
    if foreign:
        return "FAILED", f"another end: {foreign[:3]}"
    if unequal and not is_told:
        return "FAILED", f"silence about {unequal[0]}"
    return ("told" if unequal else "equal"), ""


def same_json(one: Path, other: Path) -> bool:
    """Say whether two files are the same JSON: a blank may become another."""
    try:
        return json.loads(one.read_bytes()) == json.loads(other.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False


class Ground:
    """A folder of its own for trials of one program: the undisturbed run, and a killed one to copy."""

    def __init__(self, program: str, work: Path, base: Path) -> None:
        self.program, self.work, self.base = program, Path(tempfile.mkdtemp(dir=work)), base
        self.out, self.halted = self.work / "run", self.work / "halted"
        if program == START_FROM:
            self.base, self.halted = self.work / "base", base
            shutil.copytree(base, self.base)
            self.known = reference("eval", self.work, self.base)
            return
        self.known = reference(program, self.work, base)
        shutil.rmtree(self.out)
        status, output = start(command(program, self.out, base), self.work / "log", HALTS[program]).wait()
        assert status == -signal.SIGKILL, output
        self.out.rename(self.halted)

    def resume(self, hook: Hook | None = None, *, again: bool = True) -> tuple[int, str]:
        words = command(self.program, self.out, self.base)
        run = start([*words, "--resume"] if again else words, self.work / "log", hook)
        return run.wait()

    def newest_files(self) -> list[str]:
        """Return the files of the killed run's newest checkpoint."""
        return [name for name in hashes(self.halted) if place_of(name, self.halted) == "newest"]

    def damage(self, generator: random.Random, name: str = "", kind: str = "") -> Trial:
        """Damage one file and resume, or start from the damaged run.

        Args:
            generator: Draws what is not given, and where in the file.
            name: Which file; '' for any.
            kind: A key of DAMAGES; '' for any.
        """
        is_start = self.program == START_FROM
        target = self.base if is_start else self.out
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.halted, target)
        names = [name for name in hashes(target) if "/plots/" not in name]
        if is_start:
            names = [name for name in names if "/best/" in name]
        # Every part of the folder is met as often: it is chosen first.
        place = generator.choice(sorted({place_of(each, target) for each in names}))
        name = name or generator.choice([each for each in names if place_of(each, target) == place])
        place = place_of(name, target)
        kind = kind or generator.choice(list(DAMAGES))
        before = hashes(target)
        DAMAGES[kind](target / name, generator, target)
        changed = [path for path in before if hashes(target).get(path) != before[path]]
        if not changed or (name.endswith("manifest.json") and same_json(self.halted / name, target / name)):
            return Trial(self.program, place, name, kind, "equal", "", "nothing changed")
        if not is_start:
            place = "newest" if any(place_of(path, target) == "newest" for path in changed) else place
            status, output = self.resume()
            outcome, failure = judge(status, output, self.out, name, place, before, self.known)
        else:
            words = command("eval", self.out, self.base)
            status, output = start(words, self.work / "log").wait()
            failure = fault_of(status, output, self.out)
            if not failure and status == 0 and differing(self.known.content, content(self.out)):
                failure = "used as if it were whole"
            outcome = "FAILED" if failure else "refused" if status else "equal"
        return Trial(
            self.program, place, name, kind, outcome, failure, (output.strip().splitlines() or [""])[-1]
        )

    def special(self, kind: str, generator: random.Random) -> Trial:
        """Resume under trouble from outside."""
        shutil.rmtree(self.out, ignore_errors=True)
        if kind == "two at once":
            again = generator.random() < 0.5
            if again:
                shutil.copytree(self.halted, self.out)
            words = command(self.program, self.out, self.base) + ["--resume"] * again
            runs = [
                start(words, self.work / f"log{number}")
                for number in range(2)
                if number == 0 or not time.sleep(generator.uniform(0, 0.3))
            ]
            ends = [run.wait() for run in runs]
            failure = next((text for end in ends if (text := fault_of(*end, self.out))), "")
            at_work = [len(re.findall(r"^step \d+/", text, re.MULTILINE)) > 0 for _, text in ends]
            came_later = [status for status, _ in ends] == [0, 0] and not all(at_work)
            if not failure and not came_later and sorted(status for status, _ in ends) != [0, 2]:
                failure = f"statuses {[status for status, _ in ends]}: both used the folder"
            output = max(ends)[1]
        else:
            shutil.copytree(self.halted, self.out)
            output, failure = self._full(generator) if kind == "disk full" else self._bent(kind)
        unequal = [] if failure else differing(self.known.content, content(self.out))
        if unequal and "could not be written" not in output:
            failure = f"another end: {unequal[:3]}"
        outcome = "FAILED" if failure else "told" if unequal else "equal"
        return Trial(
            self.program, kind, "", kind, outcome, failure, (output.strip().splitlines() or [""])[-1]
        )

    def _bent(self, kind: str) -> tuple[str, str]:
        status, output = self.resume(Hook(clock=kind.removeprefix("clock ")))
        return output, fault_of(status, output, self.out) or (f"status {status}" if status else "")

    def _full(self, generator: random.Random) -> tuple[str, str]:
        """Resume on a small disk that is full, then on one with room."""
        before = hashes(self.out)
        with SmallDisk(self.out, generator) as hook:
            status, first = self.resume(hook)
            failure = fault_of(status, first, self.out)
            steps = {path: digest for path, digest in before.items() if path.startswith("checkpoints/step_")}
            lost = [path for path, digest in steps.items() if digest not in hashes(self.out).values()]
            if status == 2 and lost:
                failure = failure or f"lost {lost[:3]}"
        if failure:
            return first, failure
        status, output = self.resume()
        return first + output, fault_of(status, output, self.out) or (f"status {status}" if status else "")


class SmallDisk:
    """Moves a folder to a 6 MB file system with a random little room left, and back; where mounting is not allowed, a
    limit on the size of files stands in (its hook)."""

    def __init__(self, folder: Path, generator: random.Random) -> None:
        self.folder, self.generator = folder, generator
        self.aside = folder.with_name("aside")

    def __enter__(self) -> Hook:
        shutil.rmtree(self.aside, ignore_errors=True)
        shutil.copytree(self.folder, self.aside)
        mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(self.folder)]
        self.is_mounted = processes.run(mount, capture_output=True).returncode == 0
        if not self.is_mounted:
            return Hook(file_limit=self.generator.randrange(100, 200_000))
        shutil.copytree(self.aside, self.folder, dirs_exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        (self.folder / ".ballast").write_bytes(b"\0" * max(0, free - self.generator.randrange(0, 400_000)))
        return Hook()

    def __exit__(self, *_: object) -> None:
        if self.is_mounted:
            (self.folder / ".ballast").unlink()
            shutil.rmtree(self.aside)
            shutil.copytree(self.folder, self.aside)
            processes.run(["umount", str(self.folder)], check=True)
            shutil.rmtree(self.folder)
            self.aside.rename(self.folder)


def worker(arguments: tuple[str, list[int], int, str, str]) -> list[Trial]:
    """Do some trials of one program; without numbers, the matrix: each damage to each file of the newest checkpoint,
    and each trouble from outside."""
    program, numbers, seed, work, base = arguments
    ground = Ground(program, Path(work), Path(base))
    done = []
    if not numbers:
        done = [
            ground.damage(random.Random(f"{seed} {program} {name} {kind}"), name, kind)
            for name in ground.newest_files()
            for kind in MATRIX
        ]
        done += [ground.special(kind, random.Random(f"{seed} {program} {kind}")) for kind in SPECIAL]
    for number in numbers:
        generator = random.Random(f"{seed} {program} {number}")
        is_special = program != START_FROM and generator.random() < 0.2
        trial = (
            ground.special(generator.choice(SPECIAL), generator) if is_special else ground.damage(generator)
        )
        done.append(trial)
    shutil.rmtree(ground.work, ignore_errors=True)
    return done


def table(trials: list[Trial]) -> str:
    """Return lines: outcomes per part of the folder and per damage."""
    outcomes = ("equal", "fell back", "told", "refused", "FAILED")
    lines = [f"{'':<24}{'trials':>8}" + "".join(f"{outcome:>11}" for outcome in outcomes)]
    for title in ("program", "place", "damage"):
        for value in dict.fromkeys(getattr(trial, title) for trial in trials):
            counts = Counter(trial.outcome for trial in trials if getattr(trial, title) == value)
            lines.append(f"{value:<24}{counts.total():>8}" + "".join(f"{counts[o]:>11}" for o in outcomes))
        lines.append("")
    return "\n".join(lines)


def _failure(trial: Trial) -> str:
    return f"{trial.program}, {trial.name} {trial.damage}: {trial.failure}" if trial.failure else ""


def main() -> int:
    """Run the trials and print the table."""
    parser = battery_options(__doc__, 300)
    parser.add_argument(
        "--matrix",
        action="store_true",
        help="besides, each of five damages to each file of the newest checkpoint, and each special case",
    )
    parser.add_argument(
        "--only", default="", help=f"programs, by commas; all: {', '.join(HALTS)}, {START_FROM}"
    )
    args = parser.parse_args()
    programs = args.only.split(",") if args.only else [*HALTS, START_FROM]
    began = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="whet-corrupt-"))
    plant(args.plant)
    base = make_base(work, programs)
    shares = shared_out(programs, args.trials)
    portions = [
        (name, numbers, args.seed, str(work), str(base)) for name, numbers in shares.items() if numbers
    ]
    if args.matrix:
        portions += [(name, [], args.seed, str(work), str(base)) for name in programs if name in HALTS]
    trials: list[Trial] = run_trials(worker, portions, args, _failure)
    shutil.rmtree(work, ignore_errors=True)
    print(table(trials))
    failed = sum(trial.outcome == "FAILED" for trial in trials)
    print(f"{len(trials) - failed} of {len(trials)} as they should be, {time.monotonic() - began:.0f} s")
    return int(failed > 0 or len(trials) < args.trials)


if __name__ == "__main__":
    sys.exit(main())
