"""Plots a run's curves as PNG files: small multiples, raw points under a rolling mean."""

from __future__ import annotations

import atexit
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from whet.config import cache_folder, temporary_folder, user_path
from whet.telemetry.display import escape_controls, metric_label
from whet.telemetry.metrics import Metric, find_metric
from whet.types import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Steps (ascending, unique) and values of each declared metric, by name."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One small plot of metrics that share a unit.

    Attributes:
        title: What it shows.
        names: Metrics; a name that ends in '/' or '@' stands for all others with this prefix.
        smooth: Whether a rolling mean is drawn; not for schedules and counters.
    """

    title: str
    names: tuple[str, ...]
    smooth: bool = True


FIGURES: dict[str, tuple[Panel, ...]] = {
    "sft": (
        Panel("loss", ("sft/loss", "sft/validation_loss")),
        Panel("outside what the rules allow", ("sft/outside_rules",)),
        Panel("gradient norm", ("sft/grad_norm",)),
        Panel("consecutive steps skipped", ("sft/skipped",), smooth=False),
        Panel("float16: loss scale", ("sft/loss_scale",), smooth=False),
        Panel("float16: steps that overflowed", ("sft/overflows",), smooth=False),
        Panel("learning rate", ("sft/lr",), smooth=False),
        Panel("speed", ("sft/tokens_per_second",)),
        Panel("tokens trained", ("sft/tokens",), smooth=False),
        Panel("epochs", ("sft/epoch",), smooth=False),
        Panel("peak memory", ("sft/peak_memory_gib",), smooth=False),
    ),
    "dpo": (
        Panel("loss", ("dpo/loss", "dpo/validation_loss")),
        Panel("accuracy", ("dpo/accuracy", "dpo/validation_accuracy")),
        Panel("implicit rewards", ("dpo/chosen_reward", "dpo/rejected_reward", "dpo/margin")),
        Panel("log-probability of a completion", ("dpo/chosen_logprob", "dpo/rejected_logprob")),
        Panel("loss of the chosen", ("dpo/nll",)),
        Panel("KL estimate", ("dpo/kl",)),
        Panel("desirable completions", ("dpo/desirable",), smooth=False),
        Panel("gradient norm", ("dpo/grad_norm",)),
        Panel("consecutive steps skipped", ("dpo/skipped",), smooth=False),
        Panel("float16: loss scale", ("dpo/loss_scale",), smooth=False),
        Panel("float16: steps that overflowed", ("dpo/overflows",), smooth=False),
        Panel("learning rate", ("dpo/lr",), smooth=False),
        Panel("speed", ("dpo/tokens_per_second",)),
        Panel("tokens trained", ("dpo/tokens",), smooth=False),
        Panel("epochs", ("dpo/epoch",), smooth=False),
        Panel("peak memory", ("dpo/peak_memory_gib",), smooth=False),
    ),
    "rft": (
        Panel("loss", ("rft/loss",)),
        Panel("right and covered", ("rft/right", "rft/covered"), smooth=False),
        Panel("completions", ("rft/sampled", "rft/kept"), smooth=False),
        Panel("gradient norm", ("rft/grad_norm",)),
        Panel("consecutive steps skipped", ("rft/skipped",), smooth=False),
        Panel("float16: loss scale", ("rft/loss_scale",), smooth=False),
        Panel("float16: steps that overflowed", ("rft/overflows",), smooth=False),
        Panel("learning rate", ("rft/lr",), smooth=False),
        Panel("speed", ("rft/tokens_per_second",)),
        Panel("tokens trained", ("rft/tokens",), smooth=False),
        Panel("epochs", ("rft/epoch",), smooth=False),
        Panel("peak memory", ("rft/peak_memory_gib",), smooth=False),
    ),
    "evaluation": (
        Panel(
            "accuracy", ("eval/pass@1", "eval/greedy", "eval/pass@", "eval/maj@", "eval/best@"), smooth=False
        ),
        Panel("format and truncation", ("eval/format", "eval/truncated"), smooth=False),
        Panel("length", ("eval/thinking_tokens", "eval/completion_tokens"), smooth=False),
        Panel("turns", ("eval/turns",), smooth=False),
        Panel("other scores", ("eval/",), smooth=False),
        Panel("evaluation time", ("eval/seconds",), smooth=False),
    ),
    "rl_learning": (
        Panel("mean reward", ("rl/reward_mean",)),
        Panel("right and well formed", ("rl/correct", "rl/format")),
        Panel("reward components", ("rl/reward/",)),
        Panel("length", ("rl/thinking_tokens", "rl/completion_tokens")),
        Panel("truncated", ("rl/truncated",)),
        Panel("turns", ("rl/turns",)),
        Panel("spread of rewards (std)", ("rl/reward_std",)),
    ),
    "rl_signal": (
        Panel("groups that teach", ("rl/groups_with_signal", "rl/groups_refilled")),
        Panel(
            "groups without differences",
            ("rl/zero_variance_groups", "rl/all_right_groups", "rl/all_wrong_groups"),
        ),
        Panel("where the signal comes from", ("rl/signal/",)),
        Panel("rewards that cancel", ("rl/cancellation",)),
        Panel("repetition", ("rl/repetition",)),
        Panel(
            "prompts so far",
            ("rl/prompts_consumed", "rl/prompts_dropped", "rl/prompts_in_flight"),
            smooth=False,
        ),
        Panel("why prompts were dropped", ("rl/dropped/",), smooth=False),
        Panel("unscorable samples", ("rl/unscorable", "rl/reward_failures")),
    ),
    "rl_health": (
        Panel("entropy", ("rl/entropy",)),
        Panel("KL to the reference", ("rl/kl",)),
        Panel("KL to the teacher", ("rl/teacher_kl",)),
        Panel("clipped tokens", ("rl/clip_high", "rl/clip_low")),
        Panel("spread of the ratio", ("rl/ratio_spread",)),
        Panel("gradient norm", ("rl/grad_norm",)),
        Panel("consecutive steps skipped", ("rl/skipped",), smooth=False),
        Panel("float16: loss scale", ("rl/loss_scale",), smooth=False),
        Panel("float16: steps that overflowed", ("rl/overflows",), smooth=False),
        Panel("learning rate", ("rl/lr",), smooth=False),
        Panel("surrogate loss", ("rl/loss",)),
        Panel("coefficients", ("rl/kl_coef", "rl/entropy_coef"), smooth=False),
        Panel("updates per batch", ("rl/updates",), smooth=False),
    ),
    "rl_off_policy": (
        Panel("ratio drift", ("rl/ratio_drift",)),
        Panel("sampler against trainer", ("rl/logprob_gap_mean", "rl/logprob_gap_max")),
        Panel("divergence of the sampler", ("rl/mismatch_k3",)),
        Panel("effective samples", ("rl/effective_samples",)),
        Panel("correction", ("rl/correction_active",)),
        Panel("staleness", ("rl/staleness", "rl/token_age"), smooth=False),
    ),
    "rl_critic": (
        Panel("critic's loss", ("rl/value_loss",)),
        Panel("critic's clip", ("rl/value_clipped",)),
        Panel("explained variance", ("rl/value_explained",)),
        Panel("critic's gradient norm", ("rl/value_grad_norm",)),
    ),
    "rl_judge": (
        Panel("requests to the judge", ("rl/judge_requests", "rl/judge_retries"), smooth=False),
        Panel(
            "judged completions",
            ("rl/judge_cache_hits", "rl/judge_failures", "rl/judge_unscorable"),
            smooth=False,
        ),
        Panel("tokens of judging", ("rl/judge_tokens",), smooth=False),
        Panel("unreadable lines of the cache", ("rl/judge_corrupt_lines",), smooth=False),
    ),
    "rl_speed": (
        Panel("time per step", ("rl/generate_seconds", "rl/reward_seconds", "rl/train_seconds")),
        Panel("overlap", ("rl/overlap",)),
        Panel("weights to the sampler", ("rl/sync_seconds",)),
        Panel("speed of the step", ("rl/tokens_per_second",)),
        Panel("speed of its parts", ("rl/generate_tokens_per_second", "rl/train_tokens_per_second")),
        Panel("peak memory", ("rl/peak_memory_gib",), smooth=False),
    ),
    "rl_self_play": (
        Panel("positions of own games", ("rl/self_play_buffer",), smooth=False),
        Panel("moves of own games", ("rl/self_play_moves",), smooth=False),
        Panel("own games that ended", ("rl/self_play_games",), smooth=False),
        Panel("waiting for Stockfish", ("rl/engine_wait_seconds",), smooth=False),
    ),
    "router": (
        Panel("load-balancing loss", ("router/balance_loss",)),
        Panel("tokens of the busiest and the idlest expert", ("router/load_max", "router/load_min")),
    ),
    "hardware": (
        Panel("utilisation", ("hardware/utilisation/",)),
        Panel("memory activity", ("hardware/memory_activity/",)),
        Panel("power", ("hardware/power_w/",)),
        Panel("temperature", ("hardware/temperature_c/",)),
        Panel("memory in use", ("hardware/memory_gib/",)),
    ),
}
"""PNG file stem -> panels. Every declared metric is in one of them; a test checks that."""

NUM_COLUMNS = 3
MAX_LABEL = 40
INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
COLOURS = ("#2563eb", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#64748b")
STYLE: dict[str, Any] = {
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # a reward may be named '$'
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 24,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 1.0,
    "legend.columnspacing": 1.2,
}


def matplotlib_for(folder: Path) -> Any:
    """Import matplotlib with a cache that can be written: its own, whet's, a temporary one, or one in a folder.

    Without a cache matplotlib prints two lines and looks for its fonts at every start; without a temporary folder it
    does not start at all.

    Args:
        folder: Where it draws to; holds the cache until the process ends, if there is no other place.

    Raises:
        OSError: If nothing can be written.
    """
    if "MPLCONFIGDIR" not in os.environ and not all(map(_can_be_made, _own_caches())):
        os.environ["MPLCONFIGDIR"] = str(_other_cache(folder))
    import matplotlib

    return matplotlib


def _own_caches() -> list[Path]:
    homes = {"XDG_CONFIG_HOME": "~/.config", "XDG_CACHE_HOME": "~/.cache"}
    return [user_path(os.environ.get(name) or home) / "matplotlib" for name, home in homes.items()]


def _other_cache(folder: Path) -> Path:
    for base in (cache_folder, temporary_folder):
        with suppress(UserError, OSError):
            if _can_be_made(place := base() / "matplotlib"):
                place.mkdir(parents=True, exist_ok=True)
                return place
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=".matplotlib-", dir=folder))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


def _can_be_made(place: Path) -> bool:
    """Say whether a folder can be written or made."""
    if not place.is_absolute():  # a home folder that cannot be found
        return False
    nearest = next(path for path in (place, *place.parents) if os.path.exists(path))
    return os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)


def draw_figures(series: Series, folder: Path) -> list[str]:
    """Draw every figure that has data.

    Args:
        series: Curves by declared metric.
        folder: Where `<figure>.png` go; created if anything is drawn.

    Returns:
        Names of the figures that were drawn.
    """
    drawn: list[str] = []
    present = [name for name, (_, values) in series.items() if np.isfinite(values).any()]
    for figure, panels in FIGURES.items():
        filled = [(panel, names[: len(COLOURS)]) for panel, names in fill(panels, present)]
        if filled:
            folder.mkdir(parents=True, exist_ok=True)
            _draw(filled, series, folder / f"{figure}.png")
            drawn.append(figure)
    return drawn


def fill(panels: Sequence[Panel], present: Sequence[str]) -> list[tuple[Panel, list[str]]]:
    """Give each panel its present metrics; an exact name takes precedence over prefixes."""
    named = {name for panel in panels for name in panel.names}
    free = [name for name in present if name not in named]
    filled: list[tuple[Panel, list[str]]] = []
    for panel in panels:
        shown = [name for name in panel.names if name in present]
        for prefix in (name for name in panel.names if name[-1] in "/@"):
            shown += [name for name in free if name.startswith(prefix)]
            free = [name for name in free if not name.startswith(prefix)]
        if shown:
            filled.append((panel, shown))
    return filled


def _draw(panels: Sequence[tuple[Panel, Sequence[str]]], series: Series, path: Path) -> None:
    """Draw panels, three in a row, into one PNG. No pyplot: its figures are global state."""
    matplotlib = matplotlib_for(path.parent)
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    num_rows = math.ceil(len(panels) / NUM_COLUMNS)
    num_columns = min(NUM_COLUMNS, len(panels))
    with matplotlib.rc_context(cast(Any, STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the font lacks some scripts
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        figure = Figure(figsize=(4.0 * num_columns, 2.7 * num_rows), layout=layout, facecolor="white")
        for index, (panel, names) in enumerate(panels):
            axes = figure.add_subplot(num_rows, num_columns, index + 1)
            _draw_curves(axes, names, panel.smooth, series)
            _scale(axes, find_metric(names[0]), np.concatenate([series[name][1] for name in names]))
            _head(axes, panel, names)
        figure.savefig(path, dpi=140)


def _draw_curves(axes: Axes, names: Sequence[str], smooth: bool, series: Series) -> None:
    """Draw pale raw points and a strong line for each metric."""
    for name, colour in zip(names, COLOURS, strict=False):
        steps, values = series[name]
        keep = np.isfinite(values)
        steps, values = steps[keep], values[keep]
        line = _rolling_mean(values, len(values) // 30) if smooth else values
        sparse = len(values) <= 30
        alpha, size = (0.9, 6) if sparse else (0.25, 3)
        axes.plot(steps, values, ".", color=colour, alpha=alpha, markersize=size, markeredgewidth=0)
        axes.plot(steps, line, color=colour, linewidth=1.8, label=_label(name), solid_capstyle="round")


def _head(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    """Write the title, below it the unit and, if the title is not enough, a legend."""
    unit = find_metric(names[0]).unit
    axes.set_title(panel.title)
    axes.set_xlabel("step")
    axes.text(0, 1.05, "" if unit == "1" else unit, transform=axes.transAxes, color=MUTED, fontsize=8)
    if len(panel.names) > 1 or any(name.endswith("/") for name in panel.names):
        if sum(len(_label(name)) + 5 for name in names) <= 45:  # fits beside the unit
            axes.legend(loc="lower right", bbox_to_anchor=(1.02, 0.99), borderaxespad=0.2, ncols=len(names))
        else:
            axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.26), borderaxespad=0.2, ncols=2)


def _label(name: str) -> str:
    """Write a metric's legend without what title and unit say, and without matplotlib's control characters."""
    if name.startswith("rl/reward/"):
        label = escape_controls(name.removeprefix("rl/reward/"))
        return (label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 1] + "…").replace("$", r"\$")
    if name.startswith("hardware/"):
        return name.rpartition("/")[2]
    label = metric_label(name).removeprefix("logprob gap ")
    return label.removesuffix(" tokens per second").removesuffix(" seconds").removesuffix(" tokens")


def _scale(axes: Axes, metric: Metric, values: np.ndarray) -> None:
    """Set limits and ticks; a constant is shown at its value, not magnified to rounding noise."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(finite.max())
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = (min(0.0, 2 * low), max(0.0, 2 * high)) if high else (0.0, 1.0)
    margin = 0.06 * (high - low)
    axes.set_ylim(low - margin, high + margin)
    whole = metric.format == ".0f" and high - low <= 8
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=whole))
    if metric.unit == "share":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 4):g}%"))
    elif metric.unit in ("tokens", "tokens/s"):
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))


def _rolling_mean(values: np.ndarray, half: int) -> np.ndarray:
    """Return the centred mean over 2 half + 1 points; the window shrinks at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)
