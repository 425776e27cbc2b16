"""Learning ablation: every algorithm from the same fine-tuned starts, several seeds; a table and curves.

python bench/ablation.py --recipe demo --sft-recipe demo --out runs/ablation                       # two CPU cores
python bench/ablation.py --recipe qwen2.5-3b-math-grpo --init runs/qwen2.5-3b-math-sft --out ...   # a GPU

Each run is a process of its own (`whet rl RECIPE --algo NAME ...`); a run whose folder is finished is not repeated.
Held-out pass@1 is sampled while training. Seconds are training alone (sampling, scoring, updates), without start-up
and validation; peak memory is the process's largest resident set (on a GPU see the report's memory instead).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet import processes
from whet.report.plots import COLOURS, MUTED, STYLE
from whet.telemetry.log import read_metrics

ROWS: dict[str, tuple[str, list[str]]] = {
    "GRPO": ("grpo", []),
    "Dr. GRPO": ("dr_grpo", []),
    "DAPO": ("dapo", []),
    "RLOO": ("rloo", []),
    "REINFORCE++": ("reinforce_pp", []),
    "REINFORCE++-baseline": ("reinforce_pp_baseline", []),
    "GDPO": ("gdpo", []),
    "GRPO, 4 updates": ("grpo", ["--algo.num-minibatches", "4"]),
    "GSPO, 4 updates": ("gspo", ["--algo.num-minibatches", "4"]),
    "GMPO, 4 updates": ("gmpo", ["--algo.num-minibatches", "4"]),
    "SAPO, 4 updates": ("sapo", ["--algo.num-minibatches", "4"]),
    "CISPO, 4 updates": ("cispo", ["--algo.num-minibatches", "4"]),
    "PPO, 4 updates": ("ppo", []),
    "control: no baseline": ("reinforce", []),
    "control: random reward": ("grpo", ["--control", "random_reward"]),
}
"""Label -> named algorithm and what is changed about it."""

METRIC = "eval/pass@1"


@dataclass
class Run:
    """What one run measured: curve of held-out pass@1 by step, seconds of training by step, peak memory in bytes."""

    label: str
    seed: int
    steps: list[int]
    values: list[float]
    seconds: list[float]
    peak_bytes: int

    def reach(self, threshold: float) -> tuple[int, float] | None:
        """First step, and its seconds, at which held-out pass@1 is at least the threshold."""
        for step, value, seconds in zip(self.steps, self.values, self.seconds, strict=True):
            if value >= threshold:
                return step, seconds
        return None


def execute(command: list[str], log: Path) -> int:
    """Run a command to its end; return its peak resident memory in bytes. Stop with its output when it fails."""
    with log.open("wb") as output:
        child = processes.start(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(child.pid, 0)
    if status != 0:
        print(log.read_text()[-2000:], file=sys.stderr)
        raise SystemExit(f"{' '.join(command)} failed; see {log}")
    return usage.ru_maxrss * 1024


def slug(label: str) -> str:
    return label.lower().replace(",", "").replace(":", "").replace(".", "").replace(" ", "-")


def whet(*words: str) -> list[str]:
    return [sys.executable, "-m", "whet", *words]


def measure(label: str, seed: int, start: str, options: argparse.Namespace) -> Run:
    """Train one algorithm with one seed, unless it is done; read what it logged."""
    name, overrides = ROWS[label]
    folder = options.out / f"{slug(label)}-{seed}"
    peak = options.out / f"{slug(label)}-{seed}.json"
    if not peak.exists():
        words = ["rl", options.recipe, "--algo", name, *overrides]
        if name == "ppo" and options.value_lr is not None:
            words += ["--value.lr", str(options.value_lr)]
        words += ["--policy.init", start, "--out", str(folder), "--seed", str(seed)]
        words += ["--validation-problems", str(options.problems), "--validate-every", str(options.every)]
        words += ["--validation-samples", str(options.samples), *options.set]
        if (folder / "config.yaml").exists():
            words.append("--resume")
        peak.write_text(json.dumps({"peak_bytes": execute(whet(*words), folder.with_suffix(".log"))}))
    rows = [row for row in read_metrics(folder) if row["stage"] == "rl"]
    steps, values, seconds, spent = [], [], [], 0.0
    for row in rows:
        spent += row["rl/generate_seconds"] + row["rl/reward_seconds"] + row["rl/train_seconds"]
        if row.get(METRIC) is not None:
            steps.append(row["step"])
            values.append(row[METRIC])
            seconds.append(spent)
    return Run(label, seed, steps, values, seconds, json.loads(peak.read_text())["peak_bytes"])


def show_median(found: list[float | None], digits: int, num_runs: int) -> str:
    """Median over the runs that got there; how many did, where not all."""
    reached = [value for value in found if value is not None]
    if not reached:
        return "never"
    text = f"{statistics.median(reached):.{digits}f}"
    return text if len(reached) == num_runs else f"{text} ({len(reached)} of {num_runs})"


def table(runs: dict[str, list[Run]], threshold: float) -> str:
    """Markdown: medians over seeds, and the range of the final value."""
    lines = [
        f"| algorithm | steps to {threshold:.2f} | seconds to {threshold:.2f} | final pass@1 | peak memory |",
        "|---|--:|--:|--:|--:|",
    ]
    for label, found in runs.items():
        reached = [run.reach(threshold) for run in found]
        final = [100 * run.values[-1] for run in found]
        lines.append(
            f"| {label} | {show_median([r and r[0] for r in reached], 0, len(found))} "
            f"| {show_median([r and r[1] for r in reached], 1, len(found))} "
            f"| {statistics.median(final):.1f} ({min(final):.1f}-{max(final):.1f}) "
            f"| {max(run.peak_bytes for run in found) / 2**20:,.0f} MiB |"
        )
    return "\n".join(lines)


def draw(shown: list[str], runs: dict[str, list[Run]], threshold: float, path: Path) -> None:
    """Small multiples: one panel an algorithm, every seed a line, the medians of all others pale behind it."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    style: Any = STYLE
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(3.0 * columns, 2.3 * rows), layout="constrained", facecolor="white")
        for index, label in enumerate(shown):
            axes = figure.add_subplot(rows, columns, index + 1)
            for other in runs.values():
                medians = [statistics.median(v) for v in zip(*(run.values for run in other), strict=True)]
                axes.plot(other[0].steps, medians, color=MUTED, alpha=0.2, linewidth=0.8)
            for run in runs[label]:
                colour = COLOURS[3] if label.startswith("control") else COLOURS[0]
                axes.plot(run.steps, run.values, color=colour, linewidth=1.4, alpha=0.9)
            axes.axhline(threshold, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
            axes.set_ylim(0, 1.02)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}%"))
            axes.set_title(label, pad=6)
            if index >= len(shown) - columns:
                axes.set_xlabel("step")
        figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--sft-recipe", default="", help="fine-tune a start for each seed with this recipe")
    parser.add_argument("--init", default="", help="or start every seed from this folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--problems", type=int, default=128, help="held-out problems (dev split)")
    parser.add_argument("--samples", type=int, default=4, help="samples of each for pass@1")
    parser.add_argument("--every", type=int, default=4, help="steps between validations")
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--value-lr", type=float, help="PPO's critic; default 5 times the policy's")
    parser.add_argument("--set", nargs="*", default=[], help="further words for every `whet rl`")
    options = parser.parse_args()
    if bool(options.init) == bool(options.sft_recipe):
        parser.error("give either --init or --sft-recipe")
    options.out.mkdir(parents=True, exist_ok=True)
    starts = {}
    for seed in options.seeds:
        starts[seed] = options.init or str(options.out / f"sft-{seed}")
        if options.sft_recipe and not (Path(starts[seed]) / "summary.json").exists():
            print(f"fine-tuning the start of seed {seed}", flush=True)
            words = ["sft", options.sft_recipe, "--out", starts[seed], "--seed", str(seed)]
            execute(whet(*words), options.out / f"sft-{seed}.log")
    runs: dict[str, list[Run]] = {label: [] for label in options.only}
    for seed in options.seeds:
        for label in options.only:
            run = measure(label, seed, starts[seed], options)
            runs[label].append(run)
            print(f"seed {seed}  {label:<24} final pass@1 {run.values[-1]:.3f}", flush=True)
    text = table(runs, options.threshold)
    print("\n" + text)
    (options.out / "ablation.md").write_text(text + "\n")
    results = {label: [vars(run) for run in found] for label, found in runs.items()}
    (options.out / "ablation.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(list(runs), runs, options.threshold, options.out / "ablation.png")
    (options.out / "curves").mkdir(exist_ok=True)
    for label in runs:
        draw([label], runs, options.threshold, options.out / "curves" / f"{slug(label)}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
