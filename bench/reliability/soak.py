"""Train the demo's model for thousands of steps in a watched process: nothing may grow, and nothing may stay behind.

python bench/reliability/soak.py [--steps N] [--quick] [--start FOLDER] [--work FOLDER] [--json] [-- WORDS FOR whet rl]

GRPO on the demo's sums from its fine-tuned model (made first; --start names one that is there) with validation and
checkpoints, 8 prompts x 4 samples, at a learning rate so small that every step still has something to learn. A reward
of one's own is graded in worker processes, so that there are processes to leak. From outside, through /proc, are read:
memory of the process and of all that it started, threads, open files, processes, files of the run folder but for logs.

Failures (exit status 1): memory grows by 1 MB per 1,000 steps or more (least squares, or the median of all pairs'
slopes, over the second half); threads, open files, processes or files grow (medians of the second and the last
quarter); the run fails; a process, a temporary file or shared memory is left; a step in ten or more taught nothing.
--quick is 400 steps, with a limit of 25 MB: it finds leaks of a large object per step, files, threads and processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from whet import processes

MARK = "WHET_SOAK_MARK"
"""Environment variable by which a process is known that the run started, whatever session it is in."""
LIMIT_MB, QUICK_LIMIT_MB = 1.0, 25.0
QUICK_STEPS = 400
MEMORY = ("memory_mb", "children_mb")
SHARED = ("sem.", "psm_", "wnsm_", "torch_", "pym-", "whet")
GRACE_S = 5.0
"""How long a process may still take to end after the run."""
PAGE = os.sysconf("SC_PAGE_SIZE")
SFT = "sft demo --policy.num-threads 1"
RL = (
    "rl demo --num-prompts 8 --group-size 4 --policy.num-threads 1 --optim.lr 1e-7 --optim.schedule constant "
    "--validation-problems 16 --max-dead-steps 1000000"
)
REWARD = "def short(problem, completion):\n    return -0.001 * len(completion)\n"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was seen of a run at one moment.

    Attributes:
        step: Steps that it had done.
        memory_mb: Resident memory of the process.
        children_mb: Resident memory of all processes that it started.
        threads: Its threads.
        files: Its open files.
        processes: The processes that it started.
        run_files: Files in the run folder but for logs.
    """

    step: int
    memory_mb: float
    children_mb: float
    threads: int
    files: int
    processes: int
    run_files: int


def marked(mark: str) -> list[int]:
    """Return the living processes that were started with a mark in their environment."""
    needle, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if needle in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 1e6
    except (OSError, IndexError):
        return 0.0


class Steps:
    """Number of the last row of a metrics.jsonl that grows; each byte is read once."""

    def __init__(self, path: Path) -> None:
        self._path, self._position, self.step, self.taught = path, 0, 0, 0

    def read(self) -> int:
        """Read the new whole lines; return the last step."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._position += len(whole)
            for row in map(json.loads, whole.splitlines()):
                self.step = int(row["step"])
                self.taught += row.get("rl/updates", 0) > 0
        return self.step


def run_files(folder: Path) -> list[Path]:
    """Return the files of a run folder that are no logs."""
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".jsonl"]


def watch(process: subprocess.Popen[bytes], mark: str, folder: Path, every_s: float) -> Iterator[Reading]:
    """Read a process until it ends."""
    steps = Steps(folder / "metrics.jsonl")
    while process.poll() is None:
        started = [pid for pid in marked(mark) if pid != process.pid]
        try:
            threads = len(os.listdir(f"/proc/{process.pid}/task"))
            files = len(os.listdir(f"/proc/{process.pid}/fd"))
            yield Reading(
                step=steps.read(),
                memory_mb=resident_mb(process.pid),
                children_mb=sum(map(resident_mb, started)),
                threads=threads,
                files=files,
                processes=len(started),
                run_files=len(run_files(folder)),
            )
        except OSError:  # it has just ended, or a checkpoint was renamed while it was counted
            pass
        time.sleep(every_s)


def least_squares(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the line with the least squared distance."""
    return statistics.linear_regression(x, y).slope


def median_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the median slope over pairs of points (Theil and Sen): a single jump does not move it."""
    thin = max(1, len(x) // 300)
    points = list(zip(x, y, strict=True))[::thin]
    slopes = [
        (b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] > a[0]
    ]
    return statistics.median(slopes)


def growth(
    readings: Sequence[Reading], num_steps: int, limit_mb: float
) -> tuple[dict[str, float], list[str]]:
    """Judge the readings of the second half; return the slopes per 1,000 steps, and what grows."""
    half = [r for r in readings if num_steps / 2 <= r.step < num_steps]
    if len({r.step for r in half}) < 10:
        return {}, [
            f"only {len(half)} readings of the second half: the run is too short, or --every too long"
        ]
    steps = [float(r.step) for r in half]
    slopes: dict[str, float] = {}
    failures = []
    for name in MEMORY:
        values = [getattr(r, name) for r in half]
        found = 1000 * least_squares(steps, values), 1000 * median_slope(steps, values)
        slopes[f"{name} least squares"], slopes[f"{name} median slope"] = found
        if max(found) >= limit_mb:
            failures.append(
                f"{name} grows by {found[0]:.2f} (least squares), {found[1]:.2f} (median) per 1,000 steps; expected "
                f"below {limit_mb:g}"
            )
    for name in (field.name for field in fields(Reading) if field.name not in ("step", *MEMORY)):
        early = [getattr(r, name) for r in readings if num_steps / 4 <= r.step < num_steps / 2]
        late = [getattr(r, name) for r in half if r.step >= 3 * num_steps / 4]
        if early and late and statistics.median(late) > statistics.median(early):
            failures.append(f"{name} grow from {statistics.median(early):g} to {statistics.median(late):g}")
    return slopes, failures


def shared_memory() -> set[str]:
    """Return what is in /dev/shm under the names that Python, torch and whet give."""
    names = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    return {name for name in names if name.startswith(SHARED)}


def is_mapped(name: str) -> bool:
    """Say whether a living process holds a piece of shared memory: another program's."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if name in maps.read_text(errors="replace"):
                return True
        except OSError:
            continue
    return False


def left_behind(mark: str, temporary: Path, folder: Path, before: set[str]) -> list[str]:
    """Name what outlives the run: processes, temporary files, shared memory, half-made files of the run folder."""
    deadline = time.monotonic() + GRACE_S
    while (alive := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = [f"process {pid} lives on" for pid in alive]
    found += [f"temporary file {path} is left" for path in sorted(temporary.iterdir())]
    found += [f"shared memory {n} is left" for n in sorted(shared_memory() - before) if not is_mapped(n)]
    inside = (
        path for path in folder.rglob(".*") if path.name.startswith((".tmp-", ".old-", ".del-", ".corrupt-"))
    )
    return found + [f"{path.relative_to(folder)} is left in the run folder" for path in sorted(inside)]


def make_start(work: Path) -> Path:
    """Fine-tune the demo's model from random weights; return its run folder."""
    out = work / "sft"
    if not out.exists():
        command = [sys.executable, "-m", "whet", *SFT.split(), "--out", str(out)]
        processes.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


def watched(
    command: Sequence[str], folder: Path, work: Path, every_s: float
) -> tuple[int, list[Reading], list[str]]:
    """Run a command that makes a run folder; return its status, the readings, and what it left behind."""
    temporary, mark, before = work / "tmp", uuid.uuid4().hex, shared_memory()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    environment = {**os.environ, MARK: mark, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    with (work / "log").open("wb") as log:
        process = processes.start(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    readings: list[Reading] = []
    try:
        for reading in watch(process, mark, folder, every_s):
            readings.append(reading)
            if sys.stderr.isatty():
                print(f"\r{reading.step}  {reading.memory_mb:.1f} MB", end="", file=sys.stderr)
        return process.returncode, readings, left_behind(mark, temporary, folder, before)
    finally:
        for pid in marked(mark):  # only after an error, or what was left behind
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def soak(args: argparse.Namespace, work: Path) -> tuple[list[Reading], dict[str, float], list[str], int]:
    """Do the run; return readings, slopes, failures, and how many steps taught."""
    start, folder = Path(args.start) if args.start else make_start(work), work / "run"
    (work / "short.py").write_text(REWARD)
    often = str(max(10, args.steps // 50))
    words = [*RL.split(), "--num-steps", str(args.steps), "--save-every", often, "--validate-every", often]
    words += ["--policy.init", str(start), "--reward", f"{work / 'short.py'}:short", "--out", str(folder)]
    status, readings, left = watched(
        [sys.executable, "-m", "whet", *words, *args.words], folder, work, args.every
    )
    slopes, failures = growth(readings, args.steps, QUICK_LIMIT_MB if args.quick else LIMIT_MB)
    steps = Steps(folder / "metrics.jsonl")
    if status or steps.read() != args.steps:
        tail = (work / "log").read_text(errors="replace").strip()[-500:]
        failures.append(f"the run ended at step {steps.step} with status {status}: {tail}")
    if steps.taught < 0.9 * args.steps:
        failures.append(f"only {steps.taught} of {args.steps} steps had something to learn")
    return readings, slopes, failures + left, steps.taught


def table(readings: Sequence[Reading], slopes: dict[str, float], num_steps: int) -> str:
    """Return lines: what was read along the run, and the slopes."""
    names = [field.name for field in fields(Reading)]
    lines = ["".join(f"{name:>13}" for name in names)]
    for share in (0.05, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0):
        seen = [r for r in readings if r.step <= share * num_steps]
        if seen:
            shown = (getattr(seen[-1], name) for name in names)
            lines.append("".join(f"{v:>13.1f}" if isinstance(v, float) else f"{v:>13,}" for v in shown))
    lines += [f"{name}: {slope:+.3f} MB per 1,000 steps" for name, slope in slopes.items()]
    return "\n".join(lines)


def main() -> int:
    """Soak, and print what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", "--trials", type=int, default=0, help="default 12000, with --quick 400")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--start", default="", help="run folder of the demo's fine-tuned model; made if not given"
    )
    parser.add_argument(
        "--work", default="", help="folder to work in, which is kept; default a temporary one"
    )
    parser.add_argument("--every", type=float, default=0.5, help="seconds between readings")
    parser.add_argument(
        "--json", action="store_true", help="print the readings as JSON lines before the table"
    )
    parser.add_argument("words", nargs="*", help="further words for whet rl, behind --")
    args = parser.parse_args()
    args.steps = args.steps or (QUICK_STEPS if args.quick else 12_000)
    work = Path(args.work or tempfile.mkdtemp(prefix="whet-soak-"))
    work.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    readings, slopes, failures, taught = soak(args, work)
    if args.json:
        for reading in readings:
            print(json.dumps(asdict(reading)))
        print(json.dumps({"slopes": slopes, "failures": failures, "taught": taught}))
    print(table(readings, slopes, args.steps))
    for failure in failures:
        print(f"FAILED: {failure}")
    print(f"{args.steps} steps, {taught} with something to learn, {time.monotonic() - began:.0f} s")
    if failures:
        print(f"the run's folder is kept below {work}", file=sys.stderr)
    elif not args.work:
        shutil.rmtree(work, ignore_errors=True)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
