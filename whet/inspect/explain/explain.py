"""`whet explain`: worked examples of reinforcement learning, computed by the functions that training uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from whet.algo.advantages import group_advantages
from whet.cli import Program
from whet.inspect.explain import plots as explain_plots
from whet.inspect.explain.maths import (
    ACTION_REWARDS,
    ACTIONS,
    FITTING_REWARDS,
    FORMATS,
    GROUP_RULES,
    POLICIES,
    POLICY_LOGITS,
    PROBABILITIES,
    REF_LOGITS,
    SLIDE_REWARDS,
    SLIDE_TRIPLE,
    TRAPS,
    expected_reward,
    kl_facts,
    log_sum,
    multiplier_cost,
    objective_gradient,
    sampled_gradient,
    surrogate,
    vector,
)
from whet.types import UserError

Topic = Literal["all", "policy_gradient", "ratio", "group", "kl", "clip", "float"]
Row = tuple[str, ...]

HEADING = "# The arithmetic of reinforcement, by example"
NOTE_WIDTH = 88


@dataclass(frozen=True, kw_only=True)
class ExplainConfig:
    """Worked examples: policy gradient, ratio, group advantages, KL, clip and number formats, with plots."""

    topic: Topic = "all"
    """What to explain."""
    out: str = "runs/explain"
    """Folder for report.md and the plots; overwrites those of an earlier `whet explain`."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a note.

    Attributes:
        title: Its title.
        note: One or two sentences that precede it.
        columns: Heads; the first column is text, the others are numbers.
        rows: Cells; an empty row is a gap.
    """

    title: str
    note: str
    columns: Row
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class Lesson:
    """One topic: its title, its tables, and the function that draws its figure into a PNG."""

    title: str
    tables: tuple[Table, ...]
    draw: Callable[[Path], None]


def _policy_gradient() -> Lesson:
    rewards_V = vector(ACTION_REWARDS)
    rows: list[Row] = []
    compared: list[Row] = []
    for name, policy in POLICIES.items():
        policy_V = vector(policy)
        for action, p, r in zip(ACTIONS, policy_V, rewards_V, strict=True):
            rows.append(
                (f"{name}: {action}", _show(p, 2), _show(r, 0), _show(p * r, 2), _show(r * p.log10()))
            )
        total = _show(log_sum(policy_V, rewards_V), 4)
        rows += [(f"{name}: sum", "", "", _show(expected_reward(policy_V, rewards_V), 2), total), ()]
    for name, policy in (POLICIES | TRAPS).items():
        scores = log_sum(vector(policy), rewards_V), expected_reward(vector(policy), rewards_V)
        compared.append((name, _show(scores[0], 4), _show(scores[1], 2)))
    actions = Table(
        "Four moves of Pac-Man",
        "The sum of p r is the expected reward E[R]. The last column is a workshop's score: log base 10, not "
        "weighted by how often an action happens. It puts these three policies in the same order as E[R].",
        ("policy and action", "p", "r", "p r", "r log10 p"),
        rows[:-1],
    )
    objective = Table(
        "The objective is E[R], not the sum of r log p",
        "Compare the last two rows: the sum likes going up for nothing better than eating dots. Training follows "
        "the gradient of E[R], which is E[R grad log p].",
        ("policy", "sum of r log10 p", "E[R]"),
        compared,
    )
    tables = (actions, objective, _baseline_table(rewards_V))
    return Lesson("Policy gradient", tables, explain_plots.draw_policy_gradient)


def _baseline_table(rewards_V: torch.Tensor) -> Table:
    """Compare the gradient of E[R] with the one that training samples, with and without a baseline."""
    policy_V = vector(POLICIES["all equal"])
    expected = expected_reward(policy_V, rewards_V)
    formula_V, exact_V = policy_V * (rewards_V - expected), objective_gradient(policy_V, rewards_V)
    plain_V, plain = sampled_gradient(policy_V, rewards_V, 0.0)
    based_V, based = sampled_gradient(policy_V, rewards_V, expected)
    rows: list[Row] = [
        (f"logit of {action}", *map(_show, cells))
        for action, *cells in zip(ACTIONS, formula_V, exact_V, plain_V, based_V, strict=True)
    ]
    rows += [(), ("variance", "", "", _show(plain, 2), _show(based, 2))]
    high_V = rewards_V + 100
    _, plain = sampled_gradient(policy_V, high_V, 0.0)
    _, based = sampled_gradient(policy_V, high_V, expected_reward(policy_V, high_V))
    rows.append(("variance, rewards + 100", "", "", _show(plain, 2), _show(based, 2)))
    return Table(
        "A baseline keeps the expected gradient and reduces noise",
        "The four columns agree: the formula, E[R] differentiated, and the mean over what one sampled action "
        "gives, whatever is subtracted from its reward. Only the variance of that one sample differs.",
        ("policy: all equal", "p (r - E[R])", "autograd", "sample", "with baseline E[R]"),
        rows,
    )


def _ratio() -> Lesson:
    now_M, sampled_M = vector(PROBABILITIES).unbind(1)
    ratio_M = (now_M.log() - sampled_M.log()).exp()
    good, bad = surrogate(ratio_M, 1.0), surrogate(ratio_M, -1.0)
    columns = (now_M, sampled_M, ratio_M, ratio_M.clamp(0.8, 1.2), *good[:2], *bad[:2])
    rows: list[Row] = [
        (f"{_show(now, 2)} / {_show(sampled, 2)}", *map(_show, cells))
        for now, sampled, *cells in zip(*columns, strict=True)
    ]
    table = Table(
        "Probability now over probability when sampled",
        "The ratio is exp(log p now - log p sampled). Value is min(ratio A, clipped ratio A); push is its "
        "derivative by log p, 0 where the clip stops the gradient. A bad token (A = -1) that has become likely is "
        "never clipped: its push is large.",
        ("now / sampled", "ratio", "clipped", "value A=+1", "push A=+1", "value A=-1", "push A=-1"),
        rows,
    )
    return Lesson("Ratio", (table,), explain_plots.draw_ratio)


def _group() -> Lesson:
    rows: list[Row] = [("slide: 0 0 0 1", "?", *SLIDE_TRIPLE, "")]
    for rewards in (SLIDE_REWARDS, FITTING_REWARDS):
        for kind, ddof in (("population", 0), ("sample", 1)):
            rewards_G = vector(rewards)
            z = group_advantages(rewards_G[None], std_ddof=ddof, eps=0.0)[0, -1]
            numbers = (rewards_G.mean(), rewards_G.std(correction=ddof), z)
            pairs = zip(numbers, SLIDE_TRIPLE, strict=True)
            is_slide = all(_show(number, len(text) - 2) == text for number, text in pairs)
            cells = (_show(numbers[0]), _show(numbers[1], 5), _show(z))
            rows.append((_join(rewards), kind, *cells, "yes" if is_slide else "no"))
    slide = Table(
        "z-score of the best of four samples",
        "A workshop's slide is wrong: its mean and z are not those of its rewards. Its std happens to fit them "
        "(as the population's); all three numbers fit only the last row.",
        ("rewards", "std of the", "mean", "std", "z of the last", "as on the slide"),
        rows,
    )
    groups = (
        SLIDE_REWARDS,
        (10.0, 10.0, 10.0, 11.0),
        (0.0, 0.0, 0.0, 10.0),
        (0.0, 0.0, 1.0, 1.0),
        (0.1,) * 3,
    )
    by_rule: list[Row] = []
    for rewards in groups:
        advantages = [rule(vector(rewards)[None])[0] for rule in GROUP_RULES.values()]
        by_rule.append((_join(rewards), *(f"{_show(a[0])}, {_show(a[-1])}" for a in advantages)))
    rules = Table(
        "Advantage of the first and of the last sample",
        "A constant added to all rewards changes nothing; a factor changes only the rules that do not divide by "
        "the std (of the sample or the population). Equal rewards give no signal: exactly 0, not rounding noise.",
        ("rewards", *GROUP_RULES),
        by_rule,
    )
    return Lesson("Group advantages", (slide, rules), explain_plots.draw_group)


def _kl() -> Lesson:
    facts = kl_facts(vector(POLICY_LOGITS), vector(REF_LOGITS))
    rows: list[Row] = [("KL(policy || reference)", _show(facts.kl, 4), "", "")]
    for name, mean in facts.means.items():
        rows.append((name, _show(mean, 4), _show(mean - facts.kl, 4), _show(facts.stds[name])))
    values = Table(
        f"As a number: every one of {len(POLICY_LOGITS)} tokens enumerated",
        "k1 and k3 are right on average, k2 is a little off; k3 scatters less than k1 and is never negative.",
        ("", "mean (nats)", "bias", "std of one sample"),
        rows,
    )
    targets = (facts.reverse_V, facts.forward_V)
    errors: list[Row] = [
        (name, _tiny(g.norm()), *(_tiny((g - target).norm() / target.norm()) for target in targets))
        for name, g in facts.gradients.items()
    ]
    gradients = Table(
        "As a gradient: relative error against the two true ones",
        "A good number need not be a good loss. k1 as a loss has no gradient at all, k2's is that of KL(policy || "
        "reference), k3's is that of the other KL. Subtracted from the reward, k1 is right and the others are not.",
        ("expected gradient of", "norm", "to KL(policy || ref)", "to KL(ref || policy)"),
        errors,
    )
    return Lesson("KL to the reference", (values, gradients), explain_plots.draw_kl)


def _clip() -> Lesson:
    ratio_M = vector([0.5, 0.9, 1.0, 1.1, 1.25, 1.5])
    good, bad = (surrogate(ratio_M, advantage, clip_low=0.2, clip_high=0.28) for advantage in (1.0, -1.0))
    symmetric, _, _ = surrogate(ratio_M, -1.0, clip_low=0.2, clip_high=0.2)
    rows: list[Row] = [
        tuple(_show(cell, 2) for cell in cells)
        for cells in zip(ratio_M, *good[:2], *bad[:2], symmetric, strict=True)
    ]
    table = Table(
        "Clipped surrogate, ratio held between 1 - 0.2 and 1 + 0.28",
        "A good token (A = +1) gets no push above 1.28, a bad one (A = -1) none below 0.8; nothing else is clipped. "
        "So for A < 0 the upper bound does not matter: the last column has 1 + 0.2 instead.",
        ("ratio", "value A=+1", "push A=+1", "value A=-1", "push A=-1", "value A=-1, 1.2"),
        rows,
    )
    return Lesson("Clip", (table,), explain_plots.draw_clip)


def _float() -> Lesson:
    rows: list[Row] = []
    costs: list[int] = []
    for name, bits in FORMATS.items():
        costs.append(multiplier_cost(*bits))
        gains = (f"{costs[-2] / costs[-1]:.2f}x", f"{costs[0] / costs[-1]:.1f}x") if rows else ("", "")
        rows.append((name, *map(str, bits), str(costs[-1]), *gains))
    table = Table(
        "Cost of a multiplier: exponent bits + mantissa bits squared",
        "A model of circuit area, not a benchmark: shipped GPUs multiply matrices of fp16 and of bf16 at the same "
        "rate. Compare the two 16-bit formats: bits are cheaper in the exponent than in the mantissa.",
        ("format", "exponent", "mantissa", "cost", "less than above", "less than fp32"),
        rows,
    )
    return Lesson("Number formats", (table,), explain_plots.draw_float)


LESSONS: dict[str, Callable[[], Lesson]] = {
    "policy_gradient": _policy_gradient,
    "ratio": _ratio,
    "group": _group,
    "kl": _kl,
    "clip": _clip,
    "float": _float,
}


def main(config: ExplainConfig) -> None:
    """Print the lessons, draw their figures, and write report.md."""
    folder, console = Path(config.out), Console()
    _claim(folder)
    pages = [HEADING]
    for name in LESSONS if config.topic == "all" else (config.topic,):
        lesson = LESSONS[name]()
        console.rule(Text(lesson.title, style="bold"), align="left", style="dim")
        for table in lesson.tables:
            _print_table(console, table)
        lesson.draw(folder / f"{name}.png")
        pages += [f"## {lesson.title}", f"![{lesson.title}]({name}.png)", *map(markdown, lesson.tables)]
    (folder / "report.md").write_text("\n\n".join(pages) + "\n", encoding="utf-8")
    console.print(Text(f"The plots are in {folder}; report.md shows them with these tables."))


def markdown(table: Table) -> str:
    """Format a table, with its title and note, as Markdown."""
    rows = [table.columns, ("---", *["--:"] * (len(table.columns) - 1)), *filter(None, table.rows)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return f"### {table.title}\n\n{table.note}\n\n" + "\n".join(lines)


def _claim(folder: Path) -> None:
    """Create the folder and mark it with a report, or check that an earlier run of this program created it."""
    report = folder / "report.md"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file, expected a folder; choose another --out")
    is_ours = report.is_file() and report.read_text(encoding="utf-8", errors="replace").startswith(HEADING)
    if folder.exists() and any(folder.iterdir()) and not is_ours:
        raise UserError(f"{folder}: contains files that are not from 'whet explain'; choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.write_text(HEADING + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None


def _print_table(console: Console, table: Table) -> None:
    console.print()
    console.print(Text(table.title, style="bold cyan"))
    console.print(Text(table.note), width=min(NOTE_WIDTH, console.width))
    grid = RichTable(box=SIMPLE_HEAD, collapse_padding=True)
    for index, column in enumerate(table.columns):
        grid.add_column(Text(column), justify="right" if index else "left", vertical="bottom")
    for row in table.rows:
        if row:
            grid.add_row(*map(Text, row))
        else:
            grid.add_section()
    console.print(grid)


def _show(value: float | torch.Tensor, decimals: int = 3) -> str:
    return f"{float(value):z.{decimals}f}"


def _tiny(value: torch.Tensor) -> str:
    """Format a norm or an error; pure rounding (1e-17 here) becomes 0."""
    return "0" if value < 1e-12 else _show(value)


def _join(rewards: Sequence[float]) -> str:
    return " ".join(f"{reward:g}" for reward in rewards)


PROGRAM = Program(config_class=ExplainConfig, main=main, positional="topic")
