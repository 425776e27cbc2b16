"""`whet rl`: reinforcement learning with verifiable rewards. Every algorithm is a set of arguments of one loop."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from whet.eval.evaluate import fitting_problems, take_problems
from whet.eval.measure import evaluate
from whet.generate.policy import Policy
from whet.generate.probe import ProbeResult, probe_policy
from whet.ranks.collectives import all_reduce_sum, rank
from whet.rewards.base import WeightedReward
from whet.rewards.judge.divergence import judge_diverges, thin
from whet.rewards.judge.judge import Judge
from whet.storage.checkpoint import Resume
from whet.storage.commit import commit_folder
from whet.telemetry.display import Display, open_display
from whet.telemetry.hardware import HardwareMonitor, step_metrics
from whet.telemetry.health import HISTORY_ROWS, dead_reason, health_warnings, past_rows
from whet.telemetry.log import RunLog
from whet.telemetry.spans import span, spanned
from whet.train.objective.advantage import with_advantages, without_advantages
from whet.train.objective.objective import Objective
from whet.train.optim.precision import resolve_precision
from whet.train.optim.step import Optimizer, learning_rate
from whet.train.record import Recorder, rl_batch
from whet.train.rl_config import RLConfig
from whet.train.rollout.curriculum import select_problems
from whet.train.rollout.order import DataOrder, data_order
from whet.train.rollout.rollout import Rollout, longest_sequence, rollout_metrics, sample_note
from whet.train.rollout.source import Collected, RolloutSource
from whet.train.session import (
    Session,
    Skipped,
    TrainStep,
    begin,
    finish,
    open_folder,
    restore_model,
    write_origin,
)
from whet.train.setup import audit_parts, load_rl
from whet.types import Group, Problem, Task, UserError

HEADLINE = ("rl/correct", "rl/reward_mean", "rl/thinking_tokens", "rl/entropy", "rl/groups_with_signal")
APPROX_GAP_LIMIT = 0.1
SOLVED = 0.99


def main(config: RLConfig, *, resume: Resume = False) -> None:
    """Run the training, write its folder and its report."""
    train(config, resume=resume)
    finish(config)


def train(config: RLConfig, *, resume: Resume = False) -> Policy:
    """Run the training, write its run folder (without a report) and return the trained policy.

    Raises:
        UserError: If inputs do not fit together, or the run cannot go on.
    """
    running = steps(config, resume=resume)
    while True:
        try:
            next(running)
        except StopIteration as end:
            return end.value


def steps(config: RLConfig, *, resume: Resume = False) -> Generator[TrainStep, None, Policy]:
    """Do what `train` does, and yield each step when it is over, logged and saved where due.

    Raises:
        UserError: If inputs do not fit together, or the run cannot go on.
    """
    is_main = rank() == 0
    tracking = begin(config)
    config = resolve_precision(config)
    setup = load_rl(config)
    policy, task = setup.policy, setup.task
    warnings = audit_parts(setup)
    folder = open_folder(config, resume=resume)
    write_origin(config, setup.problems, task)
    probe = probe_policy(policy, temperature=config.sampling.temperature)
    held_out = _held_out(config, policy, task)
    kept, notes = select_problems(
        policy,
        task,
        setup.problems,
        config.curriculum,
        folder,
        sampling=config.sampling,
        seed=config.seed,
    )
    if setup.num_left_out:
        count = len(setup.problems) + setup.num_left_out
        notes.insert(0, f"{setup.num_left_out} of {count} prompts do not fit the context; left out")
    with replace(setup, problems=kept).open_judge(folder) as (rewards, judge):
        run = _Run(config, policy, task, rewards, data_order(task, kept, config.seed), held_out, probe)
        run.judge = judge
        start = run.restore(resume) if resume else 0
        with (
            tracking,
            RunLog(
                folder, resume_step=start if resume else None, enabled=is_main, listener=tracking.put
            ) as log,
            open_display(f"rl {task.name}", config.num_steps, HEADLINE, enabled=is_main) as display,
            run.monitor,
            run.session,
            closing(run.source),
        ):
            for note in (f"sampler vs trainer: {probe}", *notes):
                display.note(note)
            for warning in warnings:
                display.note(warning, warning=True)
            if config.safety.rehearses(policy.device):
                run.session.beat("rehearse", start)
                run.objective.rehearse(longest_sequence(policy, kept, config.sampling))
            for step in range(start, config.num_steps):
                with span("step"):
                    done = run.advance(step, folder, log, display)
                yield done
    if is_main:
        _write_summary(folder, run)
    return policy


def _held_out(config: RLConfig, policy: Policy, task: Task) -> list[Problem]:
    """Return the dev problems that are answered while it trains."""
    if not config.validation_problems:
        return []
    return fitting_problems(policy, take_problems(task, "dev", config.validation_problems), min_new_tokens=1)


def _write_summary(folder: Path, run: _Run) -> None:
    """Write summary.json: the last value of every metric, and how exact sampler and trainer agree."""
    content = {name.removeprefix("rl/"): value for name, value in run.last.items()}
    content |= {"sampler_vs_trainer": str(run.probe)}
    (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")


class _Run:
    """State of one RL run: what a checkpoint holds, and one step of it."""

    def __init__(
        self,
        config: RLConfig,
        policy: Policy,
        task: Task,
        rewards: list[WeightedReward],
        order: DataOrder,
        held_out: Sequence[Problem],
        probe: ProbeResult,
    ) -> None:
        self.config = config
        self.policy = policy
        self.task = task
        self.failures = {reward.name: reward.failures for reward in rewards}
        self.shown_failures = dict.fromkeys(self.failures, 0)
        self.held_out = held_out
        self.probe = probe
        self.weights = config.reward_weights
        self.source = RolloutSource.of(config, policy, task, rewards, order)
        self.optimizer = Optimizer(policy.model, config.optim)
        self.objective = Objective.of(config, policy)
        self.judge: Judge | None = None
        self.monitor = HardwareMonitor()
        self.session = Session("rl", config, policy)
        self.skipped = Skipped(config.safety.max_skipped)
        self.recorder = Recorder(Path(config.out), "rl", policy)
        self.best = -math.inf
        self.dead_steps = 0
        self.last: dict[str, float] = {}
        self.history: list[dict[str, float]] = []
        self.judged: list[dict[str, float]] = []

    def restore(self, resume: Resume) -> int:
        """Go on from a checkpoint; return the steps that are done."""
        found = restore_model(self.config, self.policy, resume)
        if found is None:
            return 0
        state = found.state
        tensors = found.read(self.optimizer.tensors() | self.objective.tensors())
        self.optimizer.load_tensors(tensors)
        self.source.load_state(state["source"])
        self.objective.load(tensors, state["objective"])
        self.skipped.count = int(state.get("skipped", 0))
        self.dead_steps = int(state["dead_steps"])
        self.best = -math.inf if state["best"] is None else float(state["best"])
        self.last = dict(state["last"])
        rows = past_rows(Path(self.config.out), "rl", int(state["step"]))
        self.history, self.judged = rows[-HISTORY_ROWS:], [thin(row) for row in rows]
        return int(state["step"])

    def advance(self, step: int, folder: Path, log: RunLog, display: Display) -> TrainStep:
        """Sample, score, train; validate and save where due."""
        config = self.config
        began = time.monotonic()
        self.session.beat("sample", step)
        progress = step / max(1, config.num_steps - 1)
        collected = self.source.next(step, partial(self.objective.add, progress=progress))
        rollout = collected.rollout
        with span("advantage_computation"):
            groups = with_advantages(
                [rollout.groups[place] for place in collected.used], config.algo, self.weights
            )
        sampled = time.monotonic()
        values = rollout_metrics(rollout, config.algo, self.weights, collected.num_refilled)
        if self.judge is not None:
            values |= {f"rl/judge_{name}": float(n) for name, n in asdict(self.judge.stats).items()}
        if self.config.reward:
            values["rl/reward_failures"] = float(sum(f.count for f in self.failures.values()))
        values["rl/staleness"] = float(step - collected.step)
        lr = learning_rate(config.optim, step, config.num_steps)
        self.session.beat("train", step)
        outcome = self.train_on(step, progress, collected, groups, lr)
        values |= outcome
        values |= self.speed(rollout, began, sampled)
        count = step + 1
        finite = ("rl/loss", "rl/grad_norm", "rl/value_grad_norm")
        skipped = self.skipped.count_step({name: values.get(name, 0.0) for name in finite})
        if skipped:
            values["rl/skipped"] = float(skipped)
        self.recorder.end(count, outcome, self.training, is_skipped=bool(skipped))
        values |= self.source.settle(skipped=bool(skipped))
        if self.held_out and (count % config.validate_every == 0 or count == config.num_steps):
            self.session.beat("validate", step)
            values |= self.validate()
        self.last |= values
        with span("log"):
            log.write_metrics("rl", count, values)
            unused = [group for place, group in enumerate(rollout.groups) if place not in collected.used]
            log.write_samples(count, [*groups, *without_advantages(unused)])
        self.save_protocol(folder)
        for warning in health_warnings("rl", values, self.history):
            display.note(warning, warning=True)
        self.show_failures(display)
        if config.show_samples_every and count % config.show_samples_every == 0:
            display.note(sample_note(rollout.groups[0]))
        row = {"step": count, **values}
        self.history = [*self.history, row][-HISTORY_ROWS:]
        display.update(count, values)
        if skipped:
            display.note(self.skipped.tell(count, "lower optim.lr"), warning=True)
        self.check(values, count)
        self.save(count, values)
        self.session.stop_if_asked(count)
        self.judged += [thin(row)] if self.judge is not None else []
        if self.judge is not None and (reason := judge_diverges(self.judged)):
            raise UserError(f"step {count}: {reason}")
        return TrainStep(count, config.num_steps, values, groups)

    def save_protocol(self, folder: Path) -> None:
        """Keep what the rollouts are spelt and tagged with, so that they can be read before the first checkpoint."""
        final = folder / "checkpoints" / "protocol"
        if rank() == 0 and not final.exists():
            with commit_folder(final) as temporary:
                self.policy.save_protocol(temporary)

    def show_failures(self, display: Display) -> None:
        """Tell of a reward that gives no score: at its first failure, and whenever there are twice as many."""
        for name, failures in self.failures.items():
            if failures.count >= max(1, 2 * self.shown_failures[name]):
                self.shown_failures[name] = failures.count
                display.note(
                    f"reward '{name}' gave no score {failures.count} times so far, these samples are left out; last: "
                    f"{failures.latest}",
                    warning=True,
                )

    @spanned("validate")
    def validate(self) -> dict[str, float]:
        """Return the share of dev problems answered right, greedily and by samples."""
        result = evaluate(
            self.policy,
            self.task,
            self.held_out,
            num_samples=self.config.validation_samples,
            sampling=self.config.sampling,
            seed=self.config.seed,
        )
        return {f"eval/{name}": result.metrics[name].mean for name in ("greedy", "pass@1")}

    def check(self, values: dict[str, float], step: int) -> None:
        """Stop a run that cannot be trusted or cannot learn.

        Raises:
            UserError: With the reason and the remedy.
        """
        drift, gap = values.get("rl/ratio_drift", 0.0), values.get("rl/logprob_gap_mean", 0.0)
        is_fresh = values["rl/staleness"] == 0
        if is_fresh and self.probe.exact and drift > self.config.ratio_tolerance:
            raise UserError(
                f"step {step}: on-policy ratio drifts by {drift:.1e}, expected at most {self.config.ratio_tolerance:g} "
                "since the probe said exact; sampler and trainer disagree: raise ratio_tolerance only if you know why"
            )
        if is_fresh and not self.probe.exact and gap > APPROX_GAP_LIMIT:
            raise UserError(
                f"step {step}: sampler and trainer differ by {gap:.2f} nats per token on average, expected at most "
                f"{APPROX_GAP_LIMIT}; use policy.attention = exact or a higher precision"
            )
        self.dead_steps = self.dead_steps + 1 if values["rl/groups_with_signal"] == 0 else 0
        if self.dead_steps >= self.config.max_dead_steps and values["rl/correct"] < SOLVED:
            raise UserError(
                f"step {step}: {self.dead_steps} steps in a row without a signal: {dead_reason(values)}"
            )

    def speed(self, rollout: Rollout, began: float, sampled: float) -> dict[str, float]:
        """Return what a step took that ends now, as metrics."""
        trained = time.monotonic() - sampled
        overlap, trained_beside = self.source.wait()
        trained += trained_beside
        done = time.monotonic()
        tokens = all_reduce_sum(sum(len(s.completion_ids) for g in rollout.groups for s in g.samples))[0]
        return {
            "rl/generate_seconds": rollout.generate_seconds,
            "rl/reward_seconds": rollout.reward_seconds,
            "rl/train_seconds": trained,
            "rl/overlap": overlap,
            "rl/tokens_per_second": tokens / (done - began),
            "rl/generate_tokens_per_second": tokens / max(rollout.generate_seconds, 1e-9),
            "rl/train_tokens_per_second": self.objective.num_tokens_read / trained,
            **step_metrics(self.monitor, "rl", began, self.policy.device),
        }

    def train_on(
        self, step: int, progress: float, collected: Collected, groups: list[Group], lr: float
    ) -> dict[str, float]:
        """Do the updates of a step, and begin its record; return its metrics."""
        config, budget = self.config, self.objective.state()["token_budget"]
        self.recorder.begin(lambda: rl_batch(collected, groups, self.policy, config, token_budget=budget))
        with self.source.updating():
            found = self.objective.update(groups, self.optimizer, lr, step=step, progress=progress)
        return found | {"rl/lr": lr}

    def training(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return what a fault's record is given to begin with."""
        return self.optimizer.tensors() | self.objective.tensors(), {"objective": self.objective.state()}

    @spanned("save")
    def save(self, step: int, values: dict[str, float]) -> None:
        """Keep the best policy by validation, and a checkpoint where due."""
        score = values.get("eval/greedy", -math.inf)
        is_best = score > self.best
        self.best = max(score, self.best)
        is_due = self.session.is_due(step)
        training = None
        if is_due:
            tensors, state = self.training()
            state |= {
                "source": self.source.state(),
                "dead_steps": self.dead_steps,
                "best": self.best if math.isfinite(self.best) else None,
                "last": self.last,
                "skipped": self.skipped.count,
            }
            training = tensors, state
        self.session.save(step, is_best=is_best, training=training)
        self.recorder.is_due |= is_due
