"""Time and memory of a training step and of sampling, against tokens, length, group size, vocabulary and layers.

python bench/scaling.py [--quick] [--threads N] [--out docs/results] [--json FILE]

One thing changes at a time around a small model (256 wide, 4 layers, 4,096 words, float32). Per point: the median of
alternating repeats of the seconds (points of a curve in turn, so that a noisy neighbour disturbs all alike), and the
most bytes alive above the weights. `--out` writes scaling.png and the table scaling.json; the reading is in
docs/results/scaling.md. Absolute seconds mean nothing on a shared machine: the shapes of the curves do.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sides
import torch

from whet.algo.packing import TrainingSequence, pack
from whet.generate.engine import Engine, Request
from whet.generate.sampling import SamplingParams
from whet.generate.scoring import score_micro_batch
from whet.inspect.memory.meter import LiveTensors
from whet.model.config import ModelConfig
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model
from whet.report.plots import COLOURS, MUTED, STYLE

BASE = ModelConfig(
    family="qwen2", vocab_size=4096, hidden_size=256, intermediate_size=688, num_layers=4, num_heads=4,
    num_kv_heads=4, head_dim=64, max_positions=4096, tie_embeddings=True,
)  # fmt: skip
LENGTH, TOKENS, PROMPT, NEW = 128, 1024, 256, 64
COLUMNS = 3


@dataclass(frozen=True)
class Point:
    """One measurement: what is done, and the model that does it."""

    x: int
    run: Callable[[], Any]
    model: LanguageModel


@dataclass(frozen=True)
class Curve:
    """What changes, in what, and what stays; whether the work grows with it."""

    name: str
    label: str
    constant: str
    values: tuple[int, ...]
    make: Callable[[int], Point]
    grows: bool = True


def make_model(**changes: Any) -> LanguageModel:
    """Make a random model like the base one."""
    model = build_model(replace(BASE, **changes))
    init_weights(model, 0)
    return model


def train(model: LanguageModel, sequences: list[TrainingSequence]) -> None:
    """Take a gradient of one micro-batch and drop it."""
    (micro,) = pack(sequences, token_budget=10**9).micro_batches
    logprobs, _ = score_micro_batch(model, micro)
    logprobs.sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


def draw(count: int, length: int, vocab: int) -> list[TrainingSequence]:
    """Draw sequences whose first token alone is not trained."""
    rows = sides.draw_prompts(count, length, length, vocab)
    return [TrainingSequence(prompt_ids=ids[:1], completion_ids=ids[1:]) for ids in rows]


def whole_step(x: int, *, tokens: int = TOKENS, length: int = LENGTH, **changes: Any) -> Point:
    """A gradient of `tokens` tokens in sequences of a length."""
    model = make_model(**changes)
    sequences = draw(max(1, tokens // length), length, model.config.vocab_size)
    return Point(x, lambda: train(model, sequences), model)


def group_step(x: int) -> Point:
    """A gradient of x completions of one prompt, which is computed once."""
    model = make_model()
    (prompt,) = sides.draw_prompts(1, PROMPT, PROMPT, BASE.vocab_size)
    completions = sides.draw_prompts(x, NEW, NEW, BASE.vocab_size, seed=1)
    sequences = [TrainingSequence(prompt_ids=prompt, completion_ids=ids) for ids in completions]
    return Point(x, lambda: train(model, sequences), model)


def group_sample(x: int) -> Point:
    """Sampling of x completions of one prompt."""
    model = make_model()
    (prompt,) = sides.draw_prompts(1, PROMPT, PROMPT, BASE.vocab_size)
    request = Request(prompt_ids=prompt, seeds=tuple(range(x)))

    def run() -> None:
        Engine(model, stop_ids=(), max_rows=x).generate([request], SamplingParams(max_new_tokens=NEW))

    return Point(x, run, model)


def curves(*, quick: bool) -> list[Curve]:
    """Return what is measured."""
    found = [
        Curve("tokens", "tokens of a micro-batch", f"sequences of {LENGTH}",
              (256, 512, 1024, 2048, 4096, 8192), lambda x: whole_step(x, tokens=x)),
        Curve("length", "length of a sequence", "4,096 tokens",
              (64, 128, 256, 512, 1024, 2048, 4096), lambda x: whole_step(x, tokens=4096, length=x), False),
        Curve("group (training)", "completions of a prompt", f"prompt {PROMPT}, {NEW} new tokens",
              (1, 2, 4, 8, 16, 32, 64), group_step),
        Curve("group (sampling)", "completions of a prompt", f"prompt {PROMPT}, {NEW} new tokens",
              (1, 2, 4, 8, 16, 32, 64), group_sample),
        Curve("vocabulary", "vocabulary", f"{TOKENS:,} tokens",
              (1024, 4096, 16384, 65536), lambda x: whole_step(x, vocab_size=x)),
        Curve("layers", "layers", f"{TOKENS:,} tokens",
              (1, 2, 4, 8, 16), lambda x: whole_step(x, num_layers=x)),
    ]  # fmt: skip
    return [replace(curve, values=curve.values[:2]) for curve in found] if quick else found


def measure(curve: Curve, repeats: int) -> list[dict[str, float]]:
    """Measure a curve's points in turn."""
    points = [curve.make(x) for x in curve.values]
    seconds: dict[int, list[float]] = {point.x: [] for point in points}
    alive: dict[int, int] = {}
    for point in points:
        gc.collect()
        with LiveTensors(torch.device("cpu")) as meter:
            for parameter in point.model.parameters():
                meter.add(parameter)
            before = meter.now
            point.run()
            alive[point.x] = meter.peak - before
    for number in range(repeats + 1):
        for point in points:
            began = time.perf_counter()
            point.run()
            if number:
                seconds[point.x].append(time.perf_counter() - began)
    return [
        {"x": x, "seconds": statistics.median(values), "bytes": alive[x]} for x, values in seconds.items()
    ]


def expected(curve: Curve, rows: list[dict[str, float]], key: str) -> list[float]:
    """Return what each point would be if cost grew as the work does: from the last point back, or as the first one."""
    if not curve.grows:
        return [rows[0][key]] * len(rows)
    return [rows[-1][key] * row["x"] / rows[-1]["x"] for row in rows]


def plot(results: list[tuple[Curve, list[dict[str, float]]]], path: Path) -> None:
    """Draw seconds, and below them memory, on logarithmic axes; dashed is as the work grows."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    plain = FuncFormatter(lambda value, _: f"{value:,.0f}")
    lines = -(-len(results) // COLUMNS)
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(3.6 * COLUMNS, 4.6 * lines), layout="constrained", facecolor="white")
        axes = figure.subplots(2 * lines, COLUMNS, squeeze=False)
        for place, (curve, rows) in enumerate(results):
            xs = [row["x"] for row in rows]
            for line, (key, unit, scale) in enumerate((("seconds", "ms", 1e3), ("bytes", "MiB", 2**-20))):
                values = [row[key] * scale for row in rows]
                panel = axes[2 * (place // COLUMNS) + line][place % COLUMNS]
                panel.plot(xs, values, "o-", color=COLOURS[line], linewidth=1.8, markersize=4)
                dashed = [value * scale for value in expected(curve, rows, key)]
                panel.plot(xs, dashed, "--", color=MUTED, linewidth=1)
                panel.set_xscale("log", base=2)
                panel.set_yscale("log", base=10)
                panel.set_ylim(0.8 * min(values), 1.25 * max(values))
                panel.xaxis.set_major_locator(FixedLocator(xs[:: -(-len(xs) // 5)]))
                panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                for axis in (panel.xaxis, panel.yaxis):
                    axis.set_major_formatter(plain)
                    axis.set_minor_formatter(NullFormatter())
                panel.set_xlabel(curve.label)
                panel.set_title(f"{curve.name}: {unit}")
        for place in range(len(results), lines * COLUMNS):
            for line in range(2):
                axes[2 * (place // COLUMNS) + line][place % COLUMNS].axis("off")
        figure.savefig(path, dpi=110)


def table(curve: Curve, rows: list[dict[str, float]]) -> str:
    """Return a curve as text: seconds and bytes, and each over what it would be if cost grew as the work does."""
    lines = [f"{curve.name}: {curve.label} ({curve.constant})"]
    seconds, size = expected(curve, rows, "seconds"), expected(curve, rows, "bytes")
    for row, plain_seconds, plain_size in zip(rows, seconds, size, strict=True):
        lines.append(
            f"  {row['x']:>6,.0f}  {row['seconds'] * 1e3:>9.1f} ms ({row['seconds'] / plain_seconds:.2f})"
            f"  {row['bytes'] / 2**20:>8.1f} MiB ({row['bytes'] / plain_size:.2f})"
        )
    return "\n".join(lines)


def main() -> None:
    """Print a table per curve."""
    parser = sides.parser(__doc__, devices=("cpu",))
    parser.add_argument("--out", type=Path, help="folder for scaling.png and scaling.json")
    arguments = parser.parse_args()
    sides.start(arguments)
    repeats = arguments.repeats or (2 if arguments.quick else 5)
    results = []
    for curve in curves(quick=arguments.quick):
        rows = measure(curve, repeats)
        results.append((curve, rows))
        print(table(curve, rows), flush=True)
    flat = [{"curve": curve.name, **row} for curve, rows in results for row in rows]
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        plot(results, arguments.out / "scaling.png")
        content = {"threads": torch.get_num_threads(), "rows": flat}
        (arguments.out / "scaling.json").write_text(json.dumps(content, indent=1) + "\n")
    sides.finish(arguments, flat)


if __name__ == "__main__":
    main()
