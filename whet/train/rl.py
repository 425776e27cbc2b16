"""`whet rl`: reinforcement learning with verifiable rewards. Every algorithm is a set of arguments of one loop."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from whet.checkpoint import commit_folder, load_step, open_run, save_step
from whet.config import dump_yaml
from whet.distributed import all_reduce_sum, barrier, rank, world_size
from whet.eval.audit import preflight
from whet.eval.evaluate import fitting_problems, take_problems
from whet.eval.measure import evaluate
from whet.generate.policy import Policy, load_policy
from whet.generate.probe import ProbeResult, probe_policy
from whet.model.weights import load_model
from whet.rewards.base import EPISODE, WeightedReward, build_rewards
from whet.rewards.divergence import judge_diverges
from whet.rewards.judge import Judge
from whet.tasks.base import answer_type_of, load_task
from whet.tasks.mixture import PART
from whet.tasks.tools import environment_for
from whet.telemetry.display import Display, open_display
from whet.telemetry.environment import write_environment
from whet.telemetry.hardware import HardwareMonitor, step_metrics
from whet.telemetry.health import dead_reason, health_warnings
from whet.telemetry.log import RunLog, read_metrics
from whet.telemetry.provenance import write_provenance
from whet.telemetry.report import write_report
from whet.telemetry.tracking import Tracking
from whet.train.advantage import with_advantages, without_advantages
from whet.train.curriculum import select_problems
from whet.train.judging import open_judge
from whet.train.objective import Objective
from whet.train.order import DataOrder, data_order
from whet.train.rl_config import RLConfig
from whet.train.rollout import rollout_metrics, sample_note
from whet.train.source import RolloutSource
from whet.train.step import (
    Optimizer,
    autocast_dtype,
    learning_rate,
    parameter_dtype,
    prepare_model,
)
from whet.types import Problem, Task, UserError

HEADLINE = ("rl/correct", "rl/reward_mean", "rl/thinking_tokens", "rl/entropy", "rl/groups_with_signal")
APPROX_GAP_LIMIT = 0.1
SOLVED = 0.99


def main(config: RLConfig, *, resume: bool = False) -> None:
    """Run the training, write its folder and its report."""
    folder = Path(config.out)
    train(config, resume=resume)
    if rank() == 0:
        write_report(folder)
        print(f"done: {folder}  (checkpoint: {folder / 'checkpoints'}, report: {folder / 'report.md'})")


def train(config: RLConfig, *, resume: bool = False) -> Policy:
    """Run the training, write its run folder (without a report) and return the trained policy.

    Raises:
        UserError: If inputs do not fit together, or the run cannot go on.
    """
    folder = Path(config.out)
    is_main = rank() == 0
    tracking = Tracking(config.track, folder, enabled=is_main)
    _check_ranks(config)
    task = load_task(config.task)
    policy = load_policy(config.policy, seed=config.seed, dtype=parameter_dtype(config.optim.precision))
    policy.expect(answer_type_of(task))
    prepare_model(policy.model, config.optim)
    problems = task.problems("train")
    fitting = fitting_problems(policy, problems, min_new_tokens=config.sampling.max_new_tokens)
    if not fitting:
        raise UserError(f"task {task.name}: no problem of the train split fits the context")
    rewards = build_rewards(config.rewards, policy.schema, task, config.reward)
    environment_for(policy.schema, task)  # a tool that is not there is found before anything is made
    if EPISODE in config.rewards and getattr(task, "environment", None) is None:
        raise UserError(f"rewards.episode: task {task.name} has no environment that pays; leave it out")
    warnings = _preflight(config, task, rewards, policy, fitting)
    if is_main:
        _open_folder(config, fitting, resume=resume)
    barrier()
    autocast = autocast_dtype(config.optim.precision)
    probe = probe_policy(policy, temperature=config.sampling.temperature, autocast=autocast)
    held_out = _held_out(config, policy, task)
    kept, notes = select_problems(
        policy,
        task,
        fitting,
        config.curriculum,
        folder,
        sampling=config.sampling,
        seed=config.seed,
        autocast=autocast,
    )
    if len(fitting) < len(problems):
        left_out = len(problems) - len(fitting)
        notes.insert(0, f"{left_out} of {len(problems)} prompts do not fit the context; left out")
    with open_judge(config.judge, rewards, folder, policy.schema, kept[0]) as (rewards, judge):
        run = _Run(config, policy, task, rewards, data_order(task, kept, config.seed), held_out, probe)
        run.judge = judge
        start = run.restore(folder) if resume else 0
        resume_step = start if resume else None
        with (
            tracking,
            RunLog(folder, resume_step=resume_step, enabled=is_main, listener=tracking.put) as log,
            open_display(f"rl {task.name}", config.num_steps, HEADLINE, enabled=is_main) as display,
            run.monitor,
        ):
            for note in (f"sampler vs trainer: {probe}", *notes):
                display.note(note)
            for warning in warnings:
                display.note(warning, warning=True)
            for step in range(start, config.num_steps):
                run.advance(step, folder, log, display)
    if is_main:
        _write_summary(folder, run)
    return policy


def _open_folder(config: RLConfig, problems: Sequence[Problem], *, resume: bool) -> None:
    """Make the run folder, or check that it may go on; write what the run is made of."""
    folder, text = Path(config.out), dump_yaml(config)
    open_run(folder, text, resume=resume)
    write_environment(folder)
    write_provenance(
        folder,
        base=config.policy.init,
        adapter=config.policy.adapter,
        config_yaml=text,
        problems=problems,
    )


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


def _preflight(
    config: RLConfig,
    task: Task,
    rewards: Sequence[WeightedReward],
    policy: Policy,
    problems: Sequence[Problem],
) -> list[str]:
    """Audit each part of the task in short; return what failed where that is only to be shown."""
    failures = []
    for part in {problem.meta.get(PART): None for problem in problems}:
        try:
            preflight(task, rewards, policy.schema, [p for p in problems if p.meta.get(PART) == part])
        except UserError as error:
            if config.preflight == "stop":
                raise
            failures.append(str(error))
    return failures


def _check_ranks(config: RLConfig) -> None:
    """Refuse what several ranks cannot do."""
    if config.off_policy.staleness and world_size() > 1:
        raise UserError(
            "off_policy.staleness: checkpoints do not hold waiting samples of several ranks; use 0, or one rank"
        )
    if config.num_prompts % world_size():
        raise UserError(
            f"num_prompts = {config.num_prompts}: expected a multiple of the {world_size()} ranks"
        )


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
        self.autocast = autocast_dtype(config.optim.precision)
        self.source = RolloutSource(
            policy,
            task,
            rewards,
            order,
            algo=config.algo,
            weights=self.weights,
            num_prompts=config.num_prompts,
            group_size=config.group_size,
            sampling=config.sampling,
            staleness=config.off_policy.staleness,
            num_steps=config.num_steps,
            seed=config.seed,
            autocast=self.autocast,
            random_reward=config.control == "random_reward",
        )
        self.optimizer = Optimizer(policy.model, config.optim)
        self.objective = Objective(
            policy,
            config.algo,
            optim=config.optim,
            temperature=config.sampling.temperature,
            max_length=config.sampling.max_new_tokens,
            off_policy=config.off_policy,
            value=config.value,
            seed=config.seed,
        )
        self.judge: Judge | None = None
        self.monitor = HardwareMonitor()
        self.best = -math.inf
        self.dead_steps = 0
        self.last: dict[str, float] = {}
        self.history: list[dict[str, float]] = []

    def restore(self, folder: Path) -> int:
        """Go on from the newest checkpoint; return the steps that are done."""
        found = load_step(folder)
        if found is None:
            return 0
        model_folder, tensors, state = found
        model, _ = load_model(model_folder, dtype=parameter_dtype(self.config.optim.precision))
        self.policy.model.load_state_dict(model.state_dict())
        self.optimizer.load_tensors(tensors)
        self.source.load_state(state["source"])
        self.objective.load(tensors, state["objective"])
        self.dead_steps = int(state["dead_steps"])
        self.best = -math.inf if state["best"] is None else float(state["best"])
        self.last = dict(state["last"])
        self.history = [
            row for row in read_metrics(folder) if row.get("stage") == "rl" and row["step"] <= state["step"]
        ]
        return int(state["step"])

    def advance(self, step: int, folder: Path, log: RunLog, display: Display) -> None:
        """Sample, score, train; validate and save where due."""
        config = self.config
        began = time.monotonic()
        collected = self.source.next(step)
        rollout = collected.rollout
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
        values |= self.objective.update(
            groups, self.optimizer, lr, step=step, progress=step / max(1, config.num_steps - 1)
        )
        done = time.monotonic()
        tokens = all_reduce_sum(sum(len(s.completion_ids) for g in rollout.groups for s in g.samples))[0]
        values |= {
            "rl/generate_seconds": rollout.generate_seconds,
            "rl/reward_seconds": rollout.reward_seconds,
            "rl/train_seconds": done - sampled,
            "rl/tokens_per_second": tokens / (done - began),
            "rl/generate_tokens_per_second": tokens / max(rollout.generate_seconds, 1e-9),
            "rl/train_tokens_per_second": self.objective.num_tokens_read / (done - sampled),
            "rl/lr": lr,
            **step_metrics(self.monitor, "rl", began, self.policy.device),
        }
        count = step + 1
        if self.held_out and (count % config.validate_every == 0 or count == config.num_steps):
            values |= self.validate()
        self.last |= values
        log.write_metrics("rl", count, values)
        unused = [group for place, group in enumerate(rollout.groups) if place not in collected.used]
        log.write_samples(count, [*groups, *without_advantages(unused)])
        self.save_protocol(folder)
        for warning in health_warnings("rl", values, self.history):
            display.note(warning, warning=True)
        self.show_failures(display)
        if config.show_samples_every and count % config.show_samples_every == 0:
            display.note(sample_note(rollout.groups[0]))
        self.history.append({"step": count, **values})
        display.update(count, values)
        self.check(values, count)
        if rank() == 0:
            self.save(folder, count, values)
        if self.judge is not None and (reason := judge_diverges(self.history)):
            raise UserError(f"step {count}: {reason}")

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

    def validate(self) -> dict[str, float]:
        """Return the share of dev problems answered right, greedily and by samples."""
        result = evaluate(
            self.policy,
            self.task,
            self.held_out,
            num_samples=self.config.validation_samples,
            sampling=self.config.sampling,
            seed=self.config.seed,
            autocast=self.autocast,
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
        for name in ("rl/grad_norm", "rl/value_grad_norm"):
            if not math.isfinite(values.get(name, 0.0)):
                raise UserError(
                    f"step {step}: {name} is {values[name]}; that update was left out: lower the learning rate"
                )
        self.dead_steps = self.dead_steps + 1 if values["rl/groups_with_signal"] == 0 else 0
        if self.dead_steps >= self.config.max_dead_steps and values["rl/correct"] < SOLVED:
            raise UserError(
                f"step {step}: {self.dead_steps} steps in a row without a signal: {dead_reason(values)}"
            )

    def save(self, folder: Path, step: int, values: dict[str, float]) -> None:
        """Keep the best policy by validation, and a checkpoint where due."""
        score = values.get("eval/greedy", -math.inf)
        if score > self.best:
            self.best = score
            with commit_folder(folder / "checkpoints" / "best") as temporary:
                self.policy.save(temporary)
        if step % self.config.save_every and step != self.config.num_steps:
            return
        state = {
            "source": self.source.state(),
            "objective": self.objective.state(),
            "dead_steps": self.dead_steps,
            "best": self.best if math.isfinite(self.best) else None,
            "last": self.last,
        }
        tensors = self.optimizer.tensors() | self.objective.tensors()
        save_step(folder, step, write_model=self.policy.save, tensors=tensors, state=state)
