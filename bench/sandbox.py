"""Print what an execution in the sandbox costs beside a bare interpreter's, in one run, and what many leave behind.

python bench/sandbox.py [--backend auto|bwrap|landlock] [--count 300] [--leaks 10000] [--json FILE]

Rounds of both alternate, so that a machine busy with other work slows both. Exit status 1 when `--leaks` finds a
zombie, a process, a descriptor or a temporary file that was not there before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from whet.sandbox.attacks.battery import descendants
from whet.sandbox.programs import Sandbox

CODE = "print(6 * 7)"
TESTS = ("assert f(1) == 2", "assert f(2) == 3", "assert f(-1) == 0")
NUM_ROUNDS = 6


def bare() -> None:
    done = subprocess.run([sys.executable, "-I", "-c", CODE], capture_output=True, check=True)
    assert done.stdout == b"42\n"


def measure(job: Callable[[], object], count: int) -> list[float]:
    """Return milliseconds of each of `count` runs, one after the other."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        job()
        times.append(1000 * (time.perf_counter() - start))
    return times


def throughput(job: Callable[[], object], count: int, num_workers: int) -> float:
    """Return runs per second with some threads."""
    start = time.perf_counter()
    with ThreadPoolExecutor(num_workers) as pool:
        list(pool.map(lambda _: job(), range(count)))
    return count / (time.perf_counter() - start)


def compare(sandbox: Sandbox, count: int) -> dict[str, dict[str, float]]:
    def isolated() -> None:
        assert sandbox.run(CODE, timeout_s=30).stdout == "42\n"

    def tested() -> None:
        assert sandbox.run_tests("def f(n): return n + 1", TESTS, timeout_s=30).status == "ok"

    jobs: dict[str, Callable[[], None]] = {
        "sandbox": isolated,
        "3 function tests": tested,
        "bare python -I": bare,
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    rates: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(NUM_ROUNDS):
        for name, job in jobs.items():
            share = max(1, count // NUM_ROUNDS)
            times[name] += measure(job, share)
            rates[name].append(throughput(job, share, sandbox.num_workers))
    return {
        name: {
            "median_ms": statistics.median(values),
            "p95_ms": statistics.quantiles(values, n=20)[-1],
            "per_second": statistics.median(rates[name]),
        }
        for name, values in times.items()
    }


def left_behind(sandbox: Sandbox, count: int) -> dict[str, int]:
    """Run a mixture of programs, good and bad, and count what is there that was not."""
    programs = [
        *[CODE] * 6,
        "1 / 0",
        "import os; os._exit(0)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "import os\ntry: os.fork()\nexcept OSError: pass",
        "import os; os.kill(os.getpid(), 9)",
        "x = bytearray(1 << 40)",
    ]

    def state() -> dict[str, int]:
        ours = {os.getpid(), *descendants(os.getpid())}
        table = subprocess.run(
            ["ps", "-eo", "stat=,ppid="], capture_output=True, text=True, check=True
        ).stdout
        return {
            "zombies": sum(
                int(line[1]) in ours for row in table.splitlines() if (line := row.split())[0][0] == "Z"
            ),
            "processes": len(ours) - 1,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "temporary files": len(list(Path(tempfile.gettempdir()).iterdir())),
        }

    sandbox.run(CODE)
    before = state()
    with ThreadPoolExecutor(sandbox.num_workers) as pool:
        for done, _ in enumerate(pool.map(lambda i: sandbox.run(programs[i % len(programs)]), range(count))):
            if done % 1000 == 999:
                print(f"  {done + 1:,} of {count:,}", file=sys.stderr)
    after = state()
    return {name: after[name] - before[name] for name in before}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--leaks", type=int, default=0)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with Sandbox(backend=args.backend) as sandbox:
        load = os.getloadavg()[0]
        rows = compare(sandbox, args.count)
        print(f"{sandbox.backend}, {sandbox.num_workers} workers, load before {load:.1f}\n")
        print(f"{'':18}{'median ms':>12}{'p95 ms':>12}{'per second':>12}{'ratio':>10}")
        for name, row in rows.items():
            ratio = rows["bare python -I"]["median_ms"] / row["median_ms"]
            cells = f"{row['median_ms']:>12.1f}{row['p95_ms']:>12.1f}{row['per_second']:>12.0f}{ratio:>9.1f}x"
            print(f"{name:18}{cells}")
        left = left_behind(sandbox, args.leaks) if args.leaks else {}
        if left:
            print(
                f"\nafter {args.leaks:,} executions: "
                + ", ".join(f"{n:+} {what}" for what, n in left.items())
            )
    if args.json:
        content = {"backend": sandbox.backend, "load": load, "rows": rows, "left": left}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n")
    return int(any(n > 0 for what, n in left.items() if what != "temporary files"))


if __name__ == "__main__":
    sys.exit(main())
