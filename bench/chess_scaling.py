"""The errors of models of chess against the compute that trained them, and what the source's figures would take.

python bench/chess_scaling.py EVAL [EVAL ...] [--out docs/results]

EVAL are folders of `whet eval chess`, of models that `whet sft chess-boards` and `whet sft chess` made with the
recipes' schedules and other numbers of steps or widths. Compute is 6 x parameters x tokens, prompts included, of all
stages that a model begins from. A line is fitted to log(error) over log(compute), each point weighted by how many
positions it is from; ranges are 95 % of 2,000 resamplings of each point's positions. What lies beyond the points is
extrapolated: it says what would be needed if the line went on, and lines of this kind bend. `--out` writes
chess_scaling.png and chess_scaling.json.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import yaml

from whet.generate.policy import PolicyConfig, load_policy
from whet.report.plots import COLOURS, MUTED, STYLE
from whet.tasks.base import TaskConfig, load_task

GOALS = {"legal": 0.99, "env_exact": 0.999, "best_move": 0.30}
"""The source's figures for a model of 124M parameters."""
NAMES = {
    "legal": "best move illegal",
    "env_exact": "environment not exact",
    "best_move": "best move not Stockfish's",
}
RESAMPLES = 2000
NUM_LINES = 200
NEVER = 30.0
"""log10 of more FLOP than anybody has."""


@dataclass(frozen=True)
class Point:
    """A model: what it was trained with, and what it does.

    Attributes:
        name: Its run.
        parameters: Parameters.
        lines: Lines that it was shown, with repetition.
        flops: 6 x parameters x tokens.
        right: Of each measure the share that is right.
        asked: Of each measure, of how many positions.
    """

    name: str
    parameters: int
    lines: int
    flops: float
    right: dict[str, float]
    asked: dict[str, int]


def stages(run: Path) -> list[dict[str, Any]]:
    """Return the configs of a run and of those that it began from, the last first."""
    found = []
    while (run / "config.yaml").is_file():
        found.append(yaml.safe_load((run / "config.yaml").read_text()))
        run = Path(found[-1]["policy"]["init"] or "nothing")
    return found


def read(folder: Path, tokens_per_line: dict[str, float]) -> Point:
    """Read an evaluation and the runs behind it."""
    found = json.loads((folder / "eval.json").read_text())
    run = Path(yaml.safe_load((folder / "config.yaml").read_text())["policy"]["init"])
    policy = load_policy(PolicyConfig(init=str(run)), seed=0)
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    lines, tokens = 0, 0.0
    for config in stages(run):
        count = config["num_steps"] * config["batch_size"]
        weights = config["task"]["weights"]
        share = sum(weights.values())
        if not tokens_per_line:
            tokens_per_line |= measure_lines(policy)
        tokens += count * sum(weights[kind] / share * tokens_per_line[kind] for kind in weights)
        lines += count
    sizes = found["details"]
    asked = {name: sizes["num_steps"] if name == "env_exact" else sizes["num_positions"] for name in GOALS}
    return Point(
        run.name, parameters, lines, 6 * parameters * tokens, {name: found[name] for name in GOALS}, asked
    )


def measure_lines(policy: Any) -> dict[str, float]:
    """Return how many tokens a line of each kind has."""
    found = {}
    for kind in ("chess-policy", "chess-env", "chess-moves"):
        task = load_task(TaskConfig(name=kind, num_problems=20 * NUM_LINES, nodes=1000))
        problems = task.problems("dev")[:NUM_LINES]
        lengths = [
            len(policy.prompt_ids(problem)) + len(policy.tokenizer.encode(problem.answer)) + 1
            for problem in problems
        ]
        found[kind] = sum(lengths) / len(lengths)
    return found


def fit(flops: np.ndarray, errors: np.ndarray, asked: np.ndarray) -> tuple[float, float]:
    """Return offset and slope of log10(error) over log10(compute), weighted by the variance of log(error)."""
    weight = np.sqrt(asked * errors / np.maximum(1 - errors, 1e-3))
    slope, offset = np.polyfit(np.log10(flops), np.log10(errors), 1, w=weight)
    return float(offset), float(slope)


def meets(offset: float, slope: float, goal: float) -> float:
    """Return log10 of the compute at which a line meets a goal; `NEVER` where it does not fall, or beyond."""
    return min((goal - offset) / slope, NEVER) if slope < 0 else NEVER


def needed(points: list[Point], name: str) -> dict[str, Any]:
    """Return the fitted line of a measure and the compute at which it meets the goal, with ranges."""
    flops = np.array([point.flops for point in points])
    asked = np.array([point.asked[name] for point in points])
    errors = np.array([1 - point.right[name] for point in points])
    random, goal = np.random.default_rng(0), np.log10(1 - GOALS[name])
    draws = []
    for _ in range(RESAMPLES):
        drawn = np.clip(random.binomial(asked, errors) / asked, 0.5 / asked, 1 - 0.5 / asked)
        offset, slope = fit(flops, drawn, asked)
        draws.append((offset, slope, meets(offset, slope, goal)))
    offset, slope = fit(flops, errors, asked)
    low, high = np.percentile([draw[2] for draw in draws], (2.5, 97.5))
    return {
        "offset": offset,
        "slope": slope,
        "slope_range": list(np.percentile([draw[1] for draw in draws], (2.5, 97.5))),
        "goal": GOALS[name],
        "log10_flops": meets(offset, slope, goal),
        "log10_flops_range": [float(low), float(high)],
    }


def draw(points: list[Point], found: dict[str, Any], path: Path) -> None:
    """Draw errors over compute, and each line as far as the points go; dashed beyond."""
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE | {"text.parse_math": True}):
        figure, axis = plt.subplots(figsize=(7.2, 4.4))
        flops = np.array([point.flops for point in points])
        for colour, (name, line) in zip(COLOURS, found.items(), strict=False):
            errors = np.array([1 - point.right[name] for point in points])
            asked = np.array([point.asked[name] for point in points])
            spread = 1.96 * np.sqrt(errors * (1 - errors) / asked)
            axis.errorbar(flops, errors, spread, fmt="o", ms=4, color=colour, label=NAMES[name])
            for ends, style in (((flops.min(), flops.max()), "-"), ((flops.max(), 1e3 * flops.max()), "--")):
                x = np.array(ends)
                axis.plot(x, 10 ** (line["offset"] + line["slope"] * np.log10(x)), style, color=colour, lw=1)
            axis.axhline(1 - line["goal"], color=MUTED, lw=0.6, ls=":")
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="FLOP of training",
            ylabel="share that is wrong",
            ylim=(5e-4, 1.1),
        )
        axis.legend(frameon=False)
        figure.savefig(path, dpi=150, bbox_inches="tight")
        plt.close(figure)


def main() -> None:
    """Read, fit, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("evals", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    tokens_per_line: dict[str, float] = {}
    points = sorted((read(folder, tokens_per_line) for folder in args.evals), key=lambda point: point.flops)
    print("| model | parameters | lines | FLOP | legal | environment exact | best move |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for point in points:
        shares = " | ".join(f"{100 * point.right[name]:.1f} %" for name in GOALS)
        print(
            f"| {point.name} | {point.parameters / 1e6:.2f} M | {point.lines:,} | {point.flops:.1e} | {shares} |"
        )
    found = {name: needed(points, name) for name in GOALS}
    for name, line in found.items():
        low, high = line["slope_range"]
        print(f"{NAMES[name]}: error ~ compute^{line['slope']:.2f} ({low:.2f} to {high:.2f})", end="; ")
        low, high = line["log10_flops_range"]
        if line["log10_flops"] == NEVER:
            print(f"{line['goal']:.1%} cannot be extrapolated")
            continue
        print(
            f"{line['goal']:.1%} at 10^{line['log10_flops']:.1f} FLOP (10^{low:.1f} to "
            f"{'more than ' if high == NEVER else ''}10^{high:.1f}), "
            f"{10 ** line['log10_flops'] / points[-1].flops:,.0f} times the largest run: extrapolated"
        )
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        rows = {"points": [asdict(point) for point in points], "lines": found}
        (args.out / "chess_scaling.json").write_text(json.dumps(rows, indent=1) + "\n")
        draw(points, found, args.out / "chess_scaling.png")


if __name__ == "__main__":
    main()
