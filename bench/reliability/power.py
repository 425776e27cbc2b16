"""Cut the power at any moment: rebuild what a disk may hold then, go on with --resume, and compare bitwise.

python bench/reliability/power.py [--trials N] [--jobs J] [--seed S] [--only PROGRAM] [--plant FAULT] [--json]

A kill leaves the system's memory of files whole, a power cut does not: what was not flushed may be lost, in any order.
Each fsync of a run is written down (a file's bytes, a folder's names); at the moment of the kill, what no fsync covered
is taken away. Three kinds of disk: `worst` keeps nothing else; `names` keeps all names and no data (files are empty, or
full of zeros); `mixed` decides for each name and each file by lot (lost, kept, halved, zeros). This is harsher than any
file system in use: ext4 and btrfs keep the order of names.

A step that was said to be saved must be there, whole; the resumed run must end as the undisturbed one. A run without a
saved step may be refused in one line. Exit status 1 on any failure.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from kill import choose, go_on, kill_once
from tiny_runs import (
    PROGRAMS,
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

DISKS = ("worst", "names", "mixed")
RUNS = ("sft", "rl", "rl stale", "dpo", "rft")
"""Programs of the trials, unless --only names others."""
Names = dict[str, tuple[int, bool]]
"""Name in a folder -> inode, and whether it is a folder itself."""


@dataclass(frozen=True)
class Trial:
    """A power cut and what became of it.

    Attributes:
        program: Name in PROGRAMS.
        moment: When it was cut.
        disk: A name of DISKS.
        saved: Newest step that was said to be saved; 0 for none.
        outcome: equal, refused or FAILED.
        failure: What is wrong.
    """

    program: str
    moment: str
    disk: str
    saved: int
    outcome: str
    failure: str


class Disk:
    """What a disk holds after a power cut: what was flushed, and of the rest what its kind keeps.

    Args:
        journal: Folder in which the run wrote down its fsyncs.
        cached: The run folder as the system's memory has it.
        kind: A name of DISKS.
        generator: Draws for `mixed`.
    """

    def __init__(self, journal: Path, cached: Path, kind: str, generator: random.Random) -> None:
        self.kind, self.generator = kind, generator
        self.blobs = journal
        self.files: dict[int, str] = {}
        self.folders: dict[int, Names] = {}
        self.saved = 0
        lines = journal / "lines.jsonl"
        for line in lines.read_text().splitlines() if lines.exists() else []:
            try:
                row = json.loads(line)
            except ValueError:  # it was killed while it wrote this
                continue
            if "saved" in row:
                self.saved = max(self.saved, row["saved"])
            elif "names" in row:
                self.folders[row["inode"]] = {name: (ino, is_dir) for name, ino, is_dir in row["names"]}
            else:
                self.files[row["inode"]] = row["blob"]
        # An inode may have become another file's since it was flushed: then what was flushed is stale, as on a disk.
        self.paths = {path.stat().st_ino: path for path in [cached, *cached.rglob("*")]}
        self.root = cached.stat().st_ino

    def write(self, target: Path) -> None:
        """Write it as a folder."""
        self._folder(self.root, target)

    def _folder(self, inode: int, target: Path) -> None:
        target.mkdir()
        for name, (child, is_dir) in sorted(self._names(inode).items()):
            if is_dir:
                self._folder(child, target / name)
            else:
                (target / name).write_bytes(self._bytes(child))

    def _names(self, inode: int) -> Names:
        flushed = self.folders.get(inode, {})
        path = self.paths.get(inode)
        cached = (
            {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(path)}
            if path is not None and path.is_dir()
            else flushed
        )
        if self.kind == "worst":
            return flushed
        if self.kind == "names":
            return cached
        chosen: Names = {}
        for name in sorted(flushed.keys() | cached.keys()):
            found = self.generator.choice((flushed, cached)).get(name)
            if found is not None:
                chosen[name] = found
        return chosen

    def _bytes(self, inode: int) -> bytes:
        blob = self.files.get(inode)
        flushed = None if blob is None else (self.blobs / blob).read_bytes()
        path = self.paths.get(inode)
        cached = path.read_bytes() if path is not None and path.is_file() else flushed or b""
        if flushed == cached:
            return cached
        # Of a file that only grew, what was flushed stays.
        kept = flushed or b""
        rest = cached[len(kept) :] if cached.startswith(kept) else b""
        lost = [kept, kept + bytes(len(rest))]
        if self.kind == "worst":
            return kept
        if self.kind == "names":
            return self.generator.choice(lost)
        return self.generator.choice([*lost, cached, kept + rest[: len(rest) // 2]])


def newest_manifest(run: Path) -> int:
    """Return the newest step of a run folder that has a manifest; 0 for none."""
    found = (run / "checkpoints").glob("step_*/manifest.json")
    return max((int(path.parent.name[5:]) for path in found if path.stat().st_size), default=0)


def attempt(program: str, number: int, seed: int, work: Path, base: Path, known: Reference) -> Trial:
    """Cut the power of one run, go on with what the disk holds, and compare."""
    generator = random.Random(f"{seed} {program} {number}")
    out, journal, log = work / "run", work / "journal", work / "log"
    for folder in (out, journal):
        shutil.rmtree(folder, ignore_errors=True)
    journal.mkdir()
    words = command(program, out, base)
    moment, hook, at = choose(generator, known, number)
    status, output, _ = kill_once(words, log, replace(hook, journal=str(journal)), at, fresh=False)
    kind = DISKS[number % len(DISKS)]
    if status not in (0, -9):
        return Trial(program, moment, kind, 0, "FAILED", f"status {status}: {output.strip()[-300:]}")
    if not out.exists():  # killed before there was anything
        return Trial(program, moment, kind, 0, "equal", "")
    disk = Disk(journal, out, kind, generator)
    image = work / "image"
    shutil.rmtree(image, ignore_errors=True)
    disk.write(image)
    shutil.rmtree(out)
    image.rename(out)
    if disk.saved > newest_manifest(out):
        text = f"step {disk.saved} was saved, the newest there is {newest_manifest(out)}"
        return Trial(program, moment, kind, disk.saved, "FAILED", text)
    status, output = start(go_on(words, out), log).wait()
    if "Traceback" in output:
        failure = f"traceback: {output.strip().splitlines()[-1][:200]}"
    elif status == 2 and not disk.saved and output.count("whet: error: ") == 1:
        return Trial(program, moment, kind, 0, "refused", "")
    elif status:
        failure = f"status {status}: {output.strip()[-300:]}"
    else:
        failure = "; ".join(differing(known.content, content(out))[:3])
    return Trial(program, moment, kind, disk.saved, "FAILED" if failure else "equal", failure)


def worker(arguments: tuple[str, list[int], int, str, str]) -> list[Trial]:
    """Do some trials of one program in a folder of their own."""
    program, numbers, seed, work, base = arguments
    folder = Path(tempfile.mkdtemp(dir=work))
    known = reference(program, folder, Path(base))
    done = [attempt(program, number, seed, folder, Path(base), known) for number in numbers]
    shutil.rmtree(folder)
    return done


def table(trials: list[Trial]) -> str:
    """Return lines: outcomes per program and per kind of disk."""
    outcomes = ("equal", "refused", "FAILED")
    lines = [f"{'':<16}{'trials':>8}{'saved':>8}" + "".join(f"{outcome:>9}" for outcome in outcomes)]
    for title in ("program", "disk"):
        for value in dict.fromkeys(getattr(trial, title) for trial in trials):
            own = [trial for trial in trials if getattr(trial, title) == value]
            counts = Counter(trial.outcome for trial in own)
            saved = sum(trial.saved > 0 for trial in own)
            lines.append(f"{value:<16}{len(own):>8}{saved:>8}" + "".join(f"{counts[o]:>9}" for o in outcomes))
    return "\n".join(lines)


def _failure(trial: Trial) -> str:
    where = f"{trial.program}, {trial.moment}, {trial.disk}, step {trial.saved} saved"
    return f"{where}: {trial.failure}" if trial.failure else ""


def main() -> int:
    """Run the trials and print the table."""
    parser = battery_options(__doc__, 150)
    parser.add_argument("--only", default=",".join(RUNS), help="programs, by commas: " + ", ".join(PROGRAMS))
    args = parser.parse_args()
    programs = args.only.split(",")
    began = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="whet-power-"))
    plant(args.plant)
    base = make_base(work, programs)
    shares = shared_out(programs, args.trials)
    portions = [
        (name, numbers, args.seed, str(work), str(base)) for name, numbers in shares.items() if numbers
    ]
    trials: list[Trial] = run_trials(worker, portions, args, _failure)
    shutil.rmtree(work, ignore_errors=True)
    print(table(trials))
    failed = sum(trial.outcome == "FAILED" for trial in trials)
    print(f"{len(trials) - failed} of {len(trials)} as they should be, {time.monotonic() - began:.0f} s")
    return int(failed > 0 or len(trials) != args.trials)


if __name__ == "__main__":
    sys.exit(main())
