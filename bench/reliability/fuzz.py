"""Feed hostile input to everything of whet that reads files, texts or words of others, and count what goes wrong.

python bench/reliability/fuzz.py [--trials 20000] [--seed 0] [--json] [--surface NAME] [--index I] [--out FOLDER]

An input is either taken or refused with a UserError (one line). Failures are: any other exception, more than 5 s of
processor time (or 20 s of clock), more than 1 GiB of growth, a process killed, anything executed (a canary file, a
process or a connection started, a file opened for writing outside the input's own folder). Inputs are made from the
seed, the surface and their number alone; a failing one is written to `--out` with the command that repeats it. Exit
status 1 on any failure.

Children are forked from a process that has loaded everything; a child takes inputs until one kills it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["MPLBACKEND"] = "agg"
os.environ["WHET_KERNELS"] = "cpp"  # a measurement of their speed would be written outside an input's folder
sys.path.insert(0, str(Path(__file__).parent))

import torch
from fuzz_mutations import CANARY
from fuzz_surfaces import SURFACES, Case, Surface

from whet import processes
from whet.cli import escape
from whet.kernels.cpu.build import library
from whet.types import UserError

sys.dont_write_bytecode = True  # of what an input imports: that would be a file written outside its folder
MAX_CPU_S, MAX_CLOCK_S = 5.0, 20.0
MAX_GROWTH = 1 << 30
MAX_LINE = 2000
"""Characters that an error shown to a person may have."""
FORBIDDEN = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "pickle.find_class"}
FORBIDDEN |= {"socket.connect", "socket.bind", "ctypes.dlopen"}


HARMS = ("raises", "hangs", "grows", "dies", "executes", "writes")
"""What no input may do; `--surface self-test` does each in turn."""


def harm(case: Case, folder: Path) -> None:
    """Do what no input may do, to see that it is noticed."""
    (kind,) = case.words
    if kind == "raises":
        raise KeyError("x")
    if kind == "hangs":
        while True:
            pass
    if kind == "grows":
        block = bytearray(2 * MAX_GROWTH)
        block[:: resource.getpagesize()] = b"x" * len(range(0, len(block), resource.getpagesize()))
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "executes":
        os.system(f"touch {folder.parent / 'canary'}")
    if kind == "writes":
        Path(f"/tmp/whet-fuzz-stray-{os.getpid()}").open("w").close()


@dataclass
class Row:
    """One surface: what became of its inputs."""

    inputs: int = 0
    taken: int = 0
    refused: int = 0
    long: list[dict[str, Any]] = field(default_factory=list)
    """Refused with a line that nobody reads to its end: a blemish, no failure."""
    seconds: float = 0.0
    slowest_s: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)


class Watch:
    """Notes what an input must not do; armed only while one is being taken."""

    def __init__(self) -> None:
        self.home = ""
        self.seen: list[str] = []
        library()  # the kernels are built and loaded once, before anything is watched
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.home:
            return
        if event in FORBIDDEN and "graders/worker.py" not in str(args):  # where whet itself renders templates
            self.seen.append(f"{event} {str(args)[:200]}")
        elif event == "open" and isinstance(args[0], str) and isinstance(args[2], int):
            writes = args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            inside = os.path.realpath(args[0]).startswith((self.home, "/dev/null"))
            if writes and not inside:
                self.seen.append(f"opened {args[0]} for writing")


def case_of(surface: str, index: int, seed: int) -> Case:
    """Make an input; -1 is the valid one, which must be taken."""
    if surface == "self-test":
        return Case(words=[HARMS[index % len(HARMS)]])
    if index < 0:
        return SURFACES[surface].valid()
    return SURFACES[surface].make(Random(f"{seed}/{surface}/{index}"))


def take(surface: str, case: Case, folder: Path, watch: Watch) -> tuple[str, str]:
    """Run one input; return ('taken' | 'refused' | 'failed', message)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    canary = folder.parent / "canary"
    case.write(folder, canary)
    case.words = [word.replace(CANARY, str(canary)) for word in case.words]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    watch.seen, watch.home = [], os.path.realpath(folder.parent)
    outcome, message = "taken", ""
    try:
        SURFACES[surface].run(case, folder)
    except UserError as error:
        outcome, message = "refused", str(error)
        if len(escape(message)) > MAX_LINE:
            outcome, message = (
                "long",
                f"an error line of {len(escape(message)):,} characters: {message[:200]}",
            )
    except SystemExit as error:
        if error.code not in (0, None):
            outcome, message = "failed", f"SystemExit({error.code!r})"
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        outcome, message = "failed", "\n".join(line[:300] for line in text.splitlines())[-3000:]
    watch.home = ""
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if growth > MAX_GROWTH:
        outcome, message = "failed", f"memory grew by {growth / 2**30:.1f} GiB; {message[-1500:]}"
    if watch.seen or canary.exists():
        canary.unlink(missing_ok=True)
        outcome, message = "failed", f"executed: {watch.seen or 'the canary file is there'}"
    return outcome, message


def child(surface: str, indices: list[int], seed: int, scratch: Path, pipe: int) -> None:
    """Take inputs one after the other and report each; never returns."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.unraisablehook = lambda _: None
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 3 * MAX_GROWTH, size + 3 * MAX_GROWTH))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_GROWTH, MAX_GROWTH))
    os.chdir(scratch)
    watch = Watch()
    for index in indices:
        case = case_of(surface, index, seed)
        os.write(pipe, f"start {index}\n".encode())
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # the default action of both signals ends the process
        signal.setitimer(signal.ITIMER_REAL, MAX_CLOCK_S)
        outcome, message = take(surface, case, scratch / "case", watch)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        note = {
            "index": index,
            "outcome": outcome,
            "message": message,
            "seconds": time.process_time() - began,
        }
        os.write(pipe, (json.dumps(note) + "\n").encode())
    os._exit(0)


def fork(surface: str, indices: list[int], seed: int, row: Row) -> list[int]:
    """Run inputs in a child until one kills it; return those that are left."""
    with tempfile.TemporaryDirectory(prefix="whet-fuzz-", ignore_cleanup_errors=True) as scratch:
        reader, writer = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                processes.end_with_parent(parent)
                os.close(reader)
                child(surface, indices, seed, Path(scratch), writer)
            except BaseException:
                os.write(writer, ("broken " + json.dumps(traceback.format_exc()) + "\n").encode())
            finally:
                os._exit(99)
        os.close(writer)
        left, current = list(indices), None
        with os.fdopen(reader) as lines:
            for line in lines:
                if line.startswith("start "):
                    current = int(line[6:])
                    continue
                if line.startswith("broken "):
                    raise RuntimeError(f"{surface}: an input could not be made:\n{json.loads(line[7:])}")
                note = json.loads(line)
                current = None
                left.remove(note["index"])
                count(row, note)
        _, status = os.waitpid(pid, 0)
        if current is not None:
            left.remove(current)
            code = os.waitstatus_to_exitcode(status)
            reasons = {-signal.SIGPROF: f"more than {MAX_CPU_S:g} s of processor time",
                       -signal.SIGALRM: f"more than {MAX_CLOCK_S:g} s"}  # fmt: skip
            message = reasons.get(code, f"the process ended with status {code}")
            count(row, {"index": current, "outcome": "failed", "message": message, "seconds": MAX_CPU_S})
        elif left and status:
            raise RuntimeError(f"{surface}: a child ended with status {status} between inputs {left[:3]}")
    return left


def count(row: Row, note: dict[str, Any]) -> None:
    row.inputs += 1
    row.seconds += note["seconds"]
    row.slowest_s = max(row.slowest_s, note["seconds"])
    if note["outcome"] == "failed" or (note["index"] < 0 and note["outcome"] != "taken"):
        row.failures.append({"index": note["index"], "message": note["message"]})
    elif note["outcome"] == "taken":
        row.taken += 1
    else:
        row.refused += 1
        if note["outcome"] == "long":
            row.long.append({"index": note["index"], "message": note["message"]})


def keep(surface: str, index: int, seed: int, message: str, out: Path) -> str:
    """Write a failing input and the command that repeats it; return the command."""
    command = (
        f"python bench/reliability/fuzz.py --seed {seed} --surface {json.dumps(surface)} --index {index}"
    )
    folder = out / f"{surface.replace(' ', '_')}-{seed}-{index}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case = case_of(surface, index, seed)
    case.write(folder, folder / "canary")
    (folder / "words.json").write_text(json.dumps(case.words, indent=1))
    (folder / "repeat.txt").write_text(f"{command}\n\n{message}\n", errors="backslashreplace")
    return command


def run_surface(surface: str, indices: list[int], seed: int, num_workers: int) -> Row:
    row = Row()
    shares = [indices[start::num_workers] for start in range(num_workers)]

    def work(left: list[int]) -> None:
        while left:
            left = fork(surface, left[:500], seed, row) + left[500:]

    with ThreadPoolExecutor(num_workers) as threads:
        list(threads.map(work, shares))
    return row


def kind_of(message: str) -> str:
    """Name a failure by its last line and the place in whet where it was raised: equal ones are one fault."""
    lines = message.strip().splitlines()
    places = [line.split("/whet/")[-1].split(", in")[0] for line in lines if "/whet/" in line]
    return f"{lines[-1][:110] if lines else '?'}  [{places[-1] if places else '-'}]"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20_000, help="inputs in all, shared out by weight")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--surface", default="", choices=["", *SURFACES, "self-test"])
    parser.add_argument("--skip", action="append", default=[], choices=SURFACES, help="leave a surface out")
    parser.add_argument("--index", type=int, default=None, help="repeat this one input of --surface")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", default="/tmp/whet-fuzz", help="folder for failing inputs")
    args = parser.parse_args()
    if args.surface == "self-test":
        SURFACES["self-test"] = Surface(lambda _: Case(), harm, 1, Case)
        global MAX_CPU_S, MAX_GROWTH  # what is seen is that there are limits, not where
        MAX_CPU_S, MAX_GROWTH = 2.0, 1 << 28
    chosen = [args.surface] if args.surface else [name for name in SURFACES if name not in args.skip]
    total = sum(SURFACES[name].weight for name in chosen)
    rows: dict[str, Row] = {}
    for name in chosen:
        number = max(1, round(args.trials * SURFACES[name].weight / total))
        valid = [] if name == "self-test" else [-1]
        indices = [args.index] if args.index is not None else [*valid, *range(number)]
        rows[name] = run_surface(name, indices, args.seed, 1 if args.index is not None else args.workers)
        for failure in rows[name].failures:
            failure["repeat"] = keep(name, failure["index"], args.seed, failure["message"], Path(args.out))
        if not args.json:
            show(name, rows[name], is_first=name == chosen[0], whole=args.index is not None)
    num_failures = sum(len(row.failures) for row in rows.values())
    num_inputs = sum(row.inputs for row in rows.values())
    if args.json:
        content = {"seed": args.seed, "inputs": num_inputs, "failures": num_failures}
        print(
            json.dumps(content | {"surfaces": {name: row.__dict__ for name, row in rows.items()}}, indent=1)
        )
    else:
        print(f"{'all':20}{num_inputs:>10,}{'':>50}{num_failures:>10}")
    return int(num_failures > 0)


def show(name: str, row: Row, *, is_first: bool, whole: bool) -> None:
    if is_first:
        names = ("inputs", "taken", "refused", "long", "cpu s", "slowest s", "failures")
        print(f"{'surface':20}" + "".join(f"{name:>10}" for name in names))
    counts = (row.inputs, row.taken, row.refused, len(row.long))
    cells = "".join(f"{number:>10,}" for number in counts) + f"{row.seconds:>10.1f}{row.slowest_s:>10.2f}"
    print(f"{name:20}{cells}{len(row.failures):>10}", flush=True)
    for note in row.long[:1]:
        print(f"       long: input {note['index']}: {escape(note['message'])[:120]}")
    kinds: dict[str, list[dict[str, Any]]] = {}
    for failure in row.failures:
        kinds.setdefault(kind_of(failure["message"]), []).append(failure)
    for kind, found in kinds.items():
        print(f"    {len(found):>4} x {escape(kind)}\n           {found[0]['repeat']}", flush=True)
        if whole:
            print(found[0]["message"])


if __name__ == "__main__":
    sys.exit(main())
