"""Run the demo over several seeds and print the table of docs/results/demo.md; exit status 1 when a bound is missed.

python bench/demo_seeds.py --seeds 0 1 2 3 4 --split test --out runs/demo-seeds
python bench/demo_seeds.py --vision --seeds 0 1 2 --out runs/demo-vision-seeds        # docs/results/demo_vision.md

A seed that has a summary in the folder is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from whet import processes

METRICS = ("pass@1", "greedy", "pass@16", "maj@16", "format", "thinking_tokens")
STAGES = ("base", "sft", "rl")
UNSEEN = ("rl_blank", "rl_swapped")
LONGEST_S = 600


def run_seed(
    seed: int, split: str, out: Path, *, vision: bool, threads: int
) -> tuple[dict[str, dict[str, float]], float]:
    """Run one demo in its own process, as a user would; return its summary and its wall time in seconds."""
    folder = out / f"seed-{seed}"
    summary = folder / "summary.json"
    if summary.is_file():
        return json.loads(summary.read_text()), 0.0
    command = [
        sys.executable,
        "-m",
        "whet",
        "demo",
        "--out",
        str(folder),
        "--seed",
        str(seed),
        "--split",
        split,
        "--num-threads",
        str(threads),
        *(["--vision"] if vision else []),
    ]
    began = time.perf_counter()
    processes.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    return json.loads(summary.read_text()), seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--split", default="test")
    parser.add_argument("--out", type=Path, default=Path("runs/demo-seeds"))
    parser.add_argument("--vision", action="store_true")
    parser.add_argument("--num-threads", type=int, default=2)
    options = parser.parse_args()
    stages = STAGES + UNSEEN if options.vision else STAGES
    print("| seed | stage | " + " | ".join(METRICS) + " | run time |")
    print("|--:|---|" + "--:|" * (len(METRICS) + 1))
    after: dict[str, list[float]] = {stage: [] for stage in stages}
    longest = 0.0
    for seed in options.seeds:
        summary, seconds = run_seed(
            seed, options.split, options.out, vision=options.vision, threads=options.num_threads
        )
        longest = max(longest, float(summary["seconds"]))  # pyright: ignore[reportArgumentType]
        for stage in stages:
            values = summary[stage]
            cells = [
                f"{values[name]:.1f}" if name.endswith("tokens") else f"{100 * values[name]:.1f}"
                for name in METRICS
            ]
            own = ""
            if stage == "rl":
                own = f"{summary['seconds']:.0f} s"
                if "processor_seconds" in summary:
                    own += f", of processors {summary['processor_seconds']:.0f} s"
                own += f" ({seconds:.0f} s with start-up and report)" if seconds else ""
            print(
                f"| {seed if stage == 'base' else ''} | {stage} | " + " | ".join(cells) + f" | {own} |",
                flush=True,
            )
            after[stage].append(values["pass@1"])
    rl, sft = after["rl"], after["sft"]
    lift = [r - s for r, s in zip(rl, sft, strict=True)]
    checks = {
        f"lowest after RL {min(rl):.3f}, wanted 0.90 or more": min(rl) >= 0.90,
        f"smallest lift {min(lift):.3f}, wanted 0.25 or more": min(lift) >= 0.25,
    }
    own = {
        f"median pass@1 after RL {statistics.median(rl):.3f}, wanted 0.95 or more": statistics.median(rl)
        >= 0.95,
        f"after SFT {min(sft):.3f} to {max(sft):.3f}, wanted 0.35 to 0.75": min(sft) >= 0.35
        and max(sft) <= 0.75,
    }
    if options.vision:
        unseen = max(max(after[stage]) for stage in UNSEEN)
        own = {
            f"highest without the right image {unseen:.3f}, wanted 0.10 or less": unseen <= 0.10,
            f"longest run {longest:.0f} s, wanted {LONGEST_S} s or less": longest <= LONGEST_S,
        }
    checks |= own
    print()
    for text, is_met in checks.items():
        print(f"- {'met' if is_met else 'MISSED'}: {text}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
