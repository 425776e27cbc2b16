"""`whet plan RECIPE --cluster`: where the time goes on N devices, how many shall train, and what faults cost."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from whet.inspect.cluster.costs import Found, to_json
from whet.inspect.cluster.simulation import Load, Machines, Result, simulate
from whet.report.plots import COLOURS, STYLE, matplotlib_for
from whet.train.rl_config import RLConfig
from whet.types import UserError

STEPS = 40
"""Steps that a split is simulated for."""
AHEAD = (0, 1, 2)
"""Bounds of staleness that are compared."""
GAIN = 1.05
"""Staleness is suggested from this factor on."""


@dataclass(frozen=True, kw_only=True)
class SimConfig:
    """Many processes that fail and dawdle, event by event (with cluster = true)."""

    workers: int = 0
    """Processes that sample; 0 simulates none of this."""
    trainers: int = 1
    """Processes that train; workers and prompts are multiples of it."""
    prompts: int = 0
    """Prompts of a step; 0 takes the recipe's num_prompts."""
    steps: int = STEPS
    """Steps of the run."""
    mtbf_h: float = 0.0
    """Mean hours between failures of one process; 0 for none."""
    restart_s: float = 60.0
    """Seconds until a worker that failed is replaced, or a group of trainers back at its last checkpoint."""
    straggler_share: float = 0.0
    """Share of the portions of work that take longer."""
    straggler_factor: float = 10.0
    """How many times longer they take."""
    seed: int = 0
    """Seed of lengths, failures and stragglers."""

    def __post_init__(self) -> None:
        least = {"workers": 0, "trainers": 1, "prompts": 0, "steps": 2, "mtbf_h": 0, "restart_s": 0}
        for name, bound in (least | {"straggler_factor": 1}).items():
            if not getattr(self, name) >= bound:
                raise ValueError(f"sim.{name} = {getattr(self, name)}: expected {bound} or more")
        if not 0 <= self.straggler_share <= 1:
            raise ValueError(f"sim.straggler_share = {self.straggler_share}: expected 0 to 1")
        if not self.workers and any(getattr(self, f.name) != f.default for f in fields(self)):
            raise ValueError("sim.* is read with sim.workers; give their number, or leave it out")
        if self.workers % self.trainers:
            raise ValueError(
                f"sim.workers = {self.workers}: expected a multiple of sim.trainers = {self.trainers}"
            )


@dataclass(frozen=True, slots=True)
class Row:
    """One way to divide devices.

    Attributes:
        trainers: Those that train.
        workers: Those that sample; 0 where the trainers do, in turn.
        result: A simulated run.
    """

    trainers: int
    workers: int
    result: Result

    @property
    def steps_per_hour(self) -> float:
        """Steps an hour, when pipelines are full."""
        return 3600 / self.result.seconds_per_step

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the trainers' time."""
        result = self.result
        named = {
            "training": result.train_s,
            "sampling": result.wait_s + result.save_s,
            "weight sync": result.sync_s,
        }
        return {name: seconds / result.seconds for name, seconds in named.items()}

    @property
    def busy(self) -> float:
        """Share of the workers' time in which they draw; with shared cores also what waits for a core."""
        return (self.result.drawn_s + self.result.lost_s) / self.result.capacity_s

    @property
    def bottleneck(self) -> str:
        """What the trainers spend most of their time with."""
        return max(self.shares, key=lambda name: self.shares[name])

    def says(self) -> str:
        """Say who does what."""
        if not self.workers:
            return f"{self.trainers} sample and train in turn"
        return f"{self.trainers} train, {self.workers} sample"


def row_of(
    found: Found, load: Load, trainers: int, workers: int, *, steps: int = STEPS, seed: int = 0
) -> Row:
    """Simulate one way to divide devices, without faults.

    Where workers cannot be dealt out evenly, the rank with fewest keeps the others waiting: so many count for each.
    """
    machines = Machines(
        trainers=trainers,
        workers=workers - workers % trainers,
        cores=found.cores,
        trainer_cores=found.trainer_cores,
    )
    if not workers:
        load = replace(load, staleness=0, partial=False)
    costs = found.worker if workers else found.own
    return Row(trainers, workers, simulate(costs, load, machines, num_steps=steps, seed=seed))


def rows_of(found: Found, run: RLConfig, devices: int, load: Load | None = None) -> list[Row]:
    """Simulate every way to divide devices that the recipe allows, the one without rollout workers first."""
    load = found.load(run) if load is None else load
    ways = [(devices, 0), *((trainers, devices - trainers) for trainers in range(1, devices // 2 + 1))]
    return [row_of(found, load, *way) for way in ways if not run.num_prompts % way[0]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is printed, as values."""

    devices: int
    found: Found
    rows: list[Row]
    ahead: dict[int, list[Row]]
    sim: tuple[SimConfig, Row, Row] | None

    @property
    def best(self) -> Row:
        """The fastest way."""
        return max(self.rows, key=lambda row: row.steps_per_hour)


def make_plan(run: RLConfig, found: Found, devices: int, sim: SimConfig) -> Plan:
    """Simulate what a plan of so many devices compares.

    Raises:
        UserError: If the recipe allows no division.
    """
    load = found.load(run)
    rows = rows_of(found, run, devices)
    if not rows:
        raise UserError(
            f"num_devices = {devices}: no number of trainers divides num_prompts = {run.num_prompts}; change one"
        )
    ahead = {
        staleness: [
            row for row in rows_of(found, run, devices, replace(load, staleness=staleness)) if row.workers
        ]
        for staleness in AHEAD
    }
    return Plan(devices, found, rows, ahead, _faults(run, found, load, sim) if sim.workers else None)


def _faults(run: RLConfig, found: Found, load: Load, sim: SimConfig) -> tuple[SimConfig, Row, Row]:
    """Simulate a large run with and without faults."""
    prompts = sim.prompts or run.num_prompts
    if prompts % sim.trainers:
        raise UserError(
            f"sim.trainers = {sim.trainers}: expected a divisor of the {prompts} prompts of a step"
        )
    load = replace(load, num_prompts=prompts)
    calm = Machines(trainers=sim.trainers, workers=sim.workers, slow_factor=run.cluster.slow_factor)
    harsh = replace(
        calm,
        mtbf_s=3600 * sim.mtbf_h,
        restart_s=sim.restart_s,
        straggler_share=sim.straggler_share,
        straggler_factor=sim.straggler_factor,
    )
    one, other = (
        Row(
            sim.trainers,
            sim.workers,
            simulate(found.worker, load, machines, num_steps=sim.steps, seed=sim.seed),
        )
        for machines in (calm, harsh)
    )
    return sim, one, other


# What is shown.


def as_text(plan: Plan) -> str:
    """Write the answer, the table, and what was simulated."""
    lines = [headline(plan), f"costs: {plan.found.source}", ""]
    lines.append(
        f"{'':<28}{'s/step':>10}{'steps/h':>12}{'training':>10}{'waiting':>9}{'sync':>7}{'samplers':>10}"
    )
    for row in sorted(plan.rows, key=lambda row: -row.steps_per_hour):
        shares = row.shares
        busy = f"{row.busy:>9.0%}" if row.workers else f"{'':>9}"
        lines.append(
            f"{row.says():<28}{row.result.seconds_per_step:>10.3g}{_rate(row.steps_per_hour):>12}"
            f"{shares['training']:>10.0%}{shares['sampling']:>9.0%}{shares['weight sync']:>7.0%} {busy}"
        )
    lines.append("(shares of the trainers' time; samplers: share of theirs in which they draw)")
    best = {k: max(rows, key=lambda row: row.steps_per_hour) for k, rows in plan.ahead.items() if rows}
    if best:
        told = "; ".join(f"{k}: {_rate(row.steps_per_hour)} ({row.says()})" for k, row in best.items())
        lines.append(f"steps/h by bound of staleness (overlap.mode async, off_policy.staleness): {told}")
    if plan.sim is not None:
        lines += ["", _sim_text(*plan.sim)]
    return "\n".join(lines)


def _rate(steps_per_hour: float) -> str:
    return f"{steps_per_hour:,.0f}" if steps_per_hour >= 100 else f"{steps_per_hour:.3g}"


def headline(plan: Plan) -> str:
    """Write the answer in one sentence."""
    best = plan.best
    shares = best.shares
    why = f"trainers train {shares['training']:.0%} of the time and wait {shares['sampling']:.0%}"
    if best.workers:
        why += f", samplers draw {best.busy:.0%}"
    told = f"best split of {plan.devices}: {best.says()}: {_rate(best.steps_per_hour)} steps/h; "
    told += f"{best.bottleneck} is the bottleneck ({why})"
    others = [
        (row, k)
        for k, rows in plan.ahead.items()
        for row in rows
        if row.steps_per_hour > GAIN * best.steps_per_hour
    ]
    if others:
        row, staleness = max(others, key=lambda pair: pair[0].steps_per_hour)
        told += (
            f"; with samples up to {staleness} steps old {row.says()}: {_rate(row.steps_per_hour)} steps/h"
        )
    return told


def _sim_text(sim: SimConfig, calm: Row, harsh: Row) -> str:
    result = harsh.result
    total = max(1, result.ages.total())
    ages = ", ".join(f"{age}: {count / total:.0%}" for age, count in sorted(result.ages.items()))
    lost = result.lost_s / max(1e-9, result.lost_s + result.drawn_s)
    undone = result.num_undone / (result.num_undone + result.steps)
    lines = [
        f"{sim.workers:,} samplers and {sim.trainers:,} trainers, {sim.steps} steps, seed {sim.seed}: "
        f"{_rate(3600 * sim.steps / result.seconds)} steps/h, goodput {goodput(calm, harsh):.1%} "
        "of the same run without faults",
        f"  {result.num_failed} processes failed: {result.num_lost} parts were drawn again, {result.num_repeated} late "
        f"ones repeated, {result.num_undone} steps undone ({undone:.1%})",
        f"  lost: {lost:.1%} of the samplers' drawing; the trainers were down {result.down_s / result.seconds:.1%} of "
        f"the time, waited {harsh.shares['sampling']:.0%}; samplers drew {harsh.busy:.0%}",
        f"  age of tokens, in updates: {ages}",
    ]
    if result.num_stops:
        lines.append(
            f"  a real run would have ended {result.num_stops} times: 4 workers lost with the same work"
        )
    return "\n".join(lines)


def goodput(calm: Row, harsh: Row) -> float:
    """Return the share of its speed that a run keeps with faults."""
    return calm.result.seconds / harsh.result.seconds


def as_json(plan: Plan) -> str:
    """Write the plan as JSON."""

    def values(row: Row) -> dict[str, Any]:
        return {
            "trainers": row.trainers,
            "workers": row.workers,
            "seconds_per_step": row.result.seconds_per_step,
            "steps_per_hour": row.steps_per_hour,
            "bottleneck": row.bottleneck,
            "shares": row.shares,
            "samplers_busy": row.busy,
        }

    content: dict[str, Any] = {
        "answer": headline(plan),
        "devices": plan.devices,
        "costs": to_json(plan.found),
        "best": values(plan.best),
        "splits": list(map(values, plan.rows)),
        "by_staleness": {str(k): list(map(values, rows)) for k, rows in plan.ahead.items()},
    }
    if plan.sim is not None:
        _, calm, harsh = plan.sim
        result = harsh.result
        content["simulation"] = values(harsh) | {
            "goodput": goodput(calm, harsh),
            "failed": result.num_failed,
            "parts_lost": result.num_lost,
            "parts_repeated": result.num_repeated,
            "steps_undone": result.num_undone,
            "lost_seconds": result.lost_s,
            "drawn_seconds": result.drawn_s,
            "ages": {str(age): count for age, count in sorted(result.ages.items())},
        }
    return json.dumps(content, indent=1)


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw steps an hour by the number of trainers and bound of staleness, and where the trainers' time goes."""
    matplotlib = matplotlib_for(path.parent)
    from matplotlib.figure import Figure

    with matplotlib.rc_context(cast(Any, STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=(8.4, 3.2), layout="constrained", facecolor="white")
        speed, time = figure.subplots(1, 2)
        for (staleness, rows), colour in zip(plan.ahead.items(), COLOURS, strict=False):
            if rows:
                places = [row.trainers for row in rows]
                speeds = [row.steps_per_hour for row in rows]
                speed.plot(places, speeds, "o-", color=colour, label=f"up to {staleness} steps old")
        alone = next((row for row in plan.rows if not row.workers), None)
        if alone is not None:
            speed.axhline(alone.steps_per_hour, color=COLOURS[5], linestyle="--", label="all in turn")
        speed.set_title(f"steps an hour of {plan.devices} devices")
        speed.set_xlabel("devices that train")
        speed.set_ylim(bottom=0)
        speed.legend()
        _draw_shares(time, plan.rows)
        figure.savefig(path, dpi=140)


def _draw_shares(axes: Any, rows: Sequence[Row]) -> None:
    bottom = [0.0] * len(rows)
    names = [f"{row.trainers} + {row.workers}" for row in rows]
    for name, colour in zip(("training", "sampling", "weight sync"), COLOURS, strict=False):
        values = [row.shares[name] for row in rows]
        label = "waiting for samples" if name == "sampling" else name
        axes.bar(names, values, bottom=bottom, color=colour, label=label)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axes.set_title("the trainers' time")
    axes.set_xlabel("trainers + samplers")
    axes.set_ylim(0, 1.25)
    axes.legend(loc="upper right", ncols=3)
