"""The figures of `whet explain`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from whet.algo.losses import kl_estimate
from whet.inspect.explain.maths import (
    ACTION_REWARDS,
    ESTIMATORS,
    FORMATS,
    GROUP_RULES,
    POLICIES,
    POLICY_LOGITS,
    PROBABILITIES,
    REF_LOGITS,
    SLIDE_REWARDS,
    expected_reward,
    kl_facts,
    log_sum,
    multiplier_cost,
    sampled_gradient,
    surrogate,
    vector,
)
from whet.report.plots import COLOURS, GRID, INK, MUTED, STYLE, matplotlib_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, AMBER, GREEN, RED, PURPLE, SLATE = COLOURS
PALE_BLUE, PALE_GREEN = "#bfdbfe", "#a7f3d0"
DASHED = (0, (3, 2))


def draw_policy_gradient(path: Path) -> None:
    """Draw the objective, the sum of r log p (which it is not), and the variance of a sample over the baseline."""
    rewards_V = vector(ACTION_REWARDS)
    chances = torch.linspace(0.01, 0.6, 60, dtype=torch.float64)
    policies = [torch.stack([(1 - p) / 3, (1 - p) / 3, (1 - p) / 3, p]) for p in chances]
    baselines = torch.linspace(-10, 6, 33).tolist()
    with _sheet(path, 3) as (objective, score, noise):
        for axes, scoring in ((objective, expected_reward), (score, log_sum)):
            axes.plot(chances, [scoring(policy_V, rewards_V) for policy_V in policies], color=SLATE)
        for (name, policy), colour in zip(POLICIES.items(), (BLUE, RED, GREEN), strict=True):
            policy_V = vector(policy)
            expected = expected_reward(policy_V, rewards_V)
            objective.plot(policy[-1], expected, "o", color=colour, label=name)
            score.plot(policy[-1], log_sum(policy_V, rewards_V), "o", color=colour)
            variances = [sampled_gradient(policy_V, rewards_V, baseline)[1] for baseline in baselines]
            noise.plot(baselines, variances, color=colour, linewidth=1.8)
            noise.plot(expected, sampled_gradient(policy_V, rewards_V, expected)[1], "o", color=colour)
        noise.set_ylim(bottom=0)
        noise.set_xticks([-10, -5, 0, 5])
        _head(objective, "The objective", x="probability of the step to the right (reward -10)", y="E[R]")
        _head(
            score,
            "Not the objective",
            x="probability of the step to the right (reward -10)",
            y="sum of r log10 p",
        )
        _head(
            noise, "Noise of one sample", x="baseline (dots: E[R])", y="variance of the gradient, all logits"
        )
        _legend(objective, 3)


def draw_ratio(path: Path) -> None:
    """Draw where the clip lets the gradient of a token pass, over its two probabilities."""
    from matplotlib.colors import ListedColormap

    axis = torch.logspace(-2.3, 0, 300, dtype=torch.float64)
    now_M, sampled_M = vector(PROBABILITIES).unbind(1)
    with _sheet(path, 2, width=4.0, height=4.4) as panels:
        for axes, advantage in zip(panels, (1.0, -1.0), strict=True):
            _, _, region = surrogate((axis[:, None] / axis).flatten(), advantage)
            colours = ListedColormap(["white", "#dbeafe"])
            shaded = region.reshape(300, 300).numpy()
            axes.pcolormesh(axis.numpy(), axis.numpy(), shaded, cmap=colours, vmin=0, vmax=1)
            axes.plot(axis, axis, color=MUTED, linewidth=0.8)
            _, _, passes_M = surrogate(now_M / sampled_M, advantage)
            for now, sampled, passes in zip(now_M, sampled_M, passes_M, strict=True):
                axes.plot(
                    sampled, now, "o", color=BLUE, markerfacecolor=BLUE if passes else "white", clip_on=False
                )
            axes.set(xscale="log", yscale="log", aspect="equal")
            axes.set_xticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
            axes.set_yticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
            axes.minorticks_off()
            axes.grid(False)
            title = "Good token, A = +1" if advantage > 0 else "Bad token, A = -1"
            _head(axes, title, x="p when sampled", y="p now; shaded, full dots: the gradient passes")


def draw_group(path: Path) -> None:
    """Draw one group under several rules, and the advantages of right and wrong over difficulty."""
    size = 16
    shares = [num_right / size for num_right in range(1, size)]
    with _sheet(path, 2, width=5.2, height=3.5) as (group, difficulty):
        for index, (name, rule) in enumerate(GROUP_RULES.items()):
            values = rule(vector(SLIDE_REWARDS)[None])[0].tolist()
            left = [sample + 0.2 * (index - 1.5) for sample in range(len(values))]
            group.bar(left, values, width=0.17, color=COLOURS[index], label=name)
        group.set_xticks(range(len(SLIDE_REWARDS)), [f"reward {reward:g}" for reward in SLIDE_REWARDS])
        for name, label, colour in (("GRPO, sample", "GRPO", BLUE), ("Dr. GRPO", "Dr. GRPO", GREEN)):
            groups = [vector([1.0] * k + [0.0] * (size - k)) for k in range(1, size)]
            advantages = [GROUP_RULES[name](rewards_G[None])[0] for rewards_G in groups]
            right, wrong = ([float(a[end]) for a in advantages] for end in (0, -1))
            difficulty.plot(shares, right, color=colour, linewidth=1.8, label=f"{label}: right")
            difficulty.plot(
                shares, wrong, color=colour, linestyle=DASHED, linewidth=1.8, label=f"{label}: wrong"
            )
        for axes in (group, difficulty):
            axes.axhline(0, color=MUTED, linewidth=0.8)
            _legend(axes, 2)
        _head(group, "One right answer in four", x="", y="advantage of each sample")
        _head(difficulty, "Hard and easy questions", x=f"share of right answers among {size}", y="advantage")


def draw_kl(path: Path) -> None:
    """Draw the KL estimators, and their expected gradients as losses next to the true ones."""
    facts = kl_facts(vector(POLICY_LOGITS), vector(REF_LOGITS))
    log_ratio_M = torch.linspace(-2.5, 2.5, 201, dtype=torch.float64)
    tokens = torch.arange(len(POLICY_LOGITS)).numpy()
    with _sheet(path, 2, width=5.2, height=3.7) as (value, gradient):
        truths = (
            ("KL(policy || ref)", facts.reverse_V, -0.2, PALE_BLUE),
            ("KL(ref || policy)", facts.forward_V, 0.2, PALE_GREEN),
        )
        for name, truth_V, offset, colour in truths:
            gradient.bar(
                tokens + offset, truth_V.numpy(), width=0.36, color=colour, label=f"gradient of {name}"
            )
        for name, offset, colour in zip(ESTIMATORS, (0.0, -0.2, 0.2), (AMBER, BLUE, GREEN), strict=True):
            estimates_M = kl_estimate(log_ratio_M, torch.zeros_like(log_ratio_M), name)
            value.plot(log_ratio_M, estimates_M, color=colour, linewidth=1.8, label=name)
            loss_V = facts.gradients[f"{name} as a loss"]
            gradient.plot(tokens + offset, loss_V, "o", color=colour, markersize=5, label=f"{name} as a loss")
        for axes in (value, gradient):
            axes.axhline(0, color=MUTED, linewidth=0.8, zorder=1)
        gradient.set_xticks(tokens)
        _head(value, "Three estimates of KL", x="log policy - log reference of the sampled token", y="nats")
        _head(gradient, "As losses", x="token", y="expected gradient by its logit")
        _legend(value, 3)
        _legend(gradient, 2)


def draw_clip(path: Path) -> None:
    """Draw the clipped surrogate over the ratio, and its derivative by the log-probability."""
    ratio_M = torch.linspace(0.4, 1.8, 1401, dtype=torch.float64)
    with _sheet(path, 2, width=4.6, height=3.5) as panels:
        for axes, advantage in zip(panels, (1.0, -1.0), strict=True):
            value_M, push_M, passes_M = surrogate(ratio_M, advantage, clip_low=0.2, clip_high=0.28)
            axes.axvspan(0.8, 1.28, color=GRID, alpha=0.5, linewidth=0)
            axes.axhline(0, color=MUTED, linewidth=0.8)
            axes.plot(ratio_M, value_M, color=PALE_BLUE, linewidth=5, label="value (minus the loss)")
            axes.plot(ratio_M, push_M, color=BLUE, linewidth=1.5, label="push on log p")
            title = "Good token, A = +1" if advantage > 0 else "Bad token, A = -1"
            _head(axes, title, x="ratio (grey: 0.8 to 1.28)", y="clipped surrogate")
            _legend(axes, 2)


def draw_float(path: Path) -> None:
    """Draw the modelled cost of each format as labelled bars."""
    with _sheet(path, 1, width=6.4) as (axes,):
        for height, (name, bits) in enumerate(reversed(FORMATS.items())):
            cost = multiplier_cost(*bits)
            axes.barh(name, cost, color=BLUE, height=0.6)
            axes.text(cost + 8, height, str(cost), va="center", color=INK)
        axes.grid(False)
        _head(
            axes,
            "A model, not a benchmark",
            x="exponent bits + mantissa bits squared",
            y="area of a multiplier",
        )


@contextmanager
def _sheet(path: Path, num_panels: int, *, width: float = 4.0, height: float = 3.4) -> Iterator[list[Axes]]:
    """Open a row of panels, each of this size in inches, and save it. No pyplot: its figures are global state."""
    matplotlib = matplotlib_for(path.parent)
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(cast(Any, STYLE)):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        figure = Figure(figsize=(width * num_panels, height), layout=layout, facecolor="white")
        yield [figure.add_subplot(1, num_panels, 1 + index) for index in range(num_panels)]
        figure.savefig(path, dpi=140)


def _head(axes: Axes, title: str, *, x: str, y: str) -> None:
    """Write the title, the label of the vertical axis below it, and that of the horizontal axis."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.text(0, 1.05, y, transform=axes.transAxes, color=MUTED, fontsize=8)


def _legend(axes: Axes, columns: int) -> None:
    """Put the legend below the panel."""
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.2), borderaxespad=0.2, ncols=columns)
