"""`whet rl`: reinforcement learning with verifiable rewards. Every algorithm is a set of arguments of one loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from whet.algo.config import AlgoConfig
from whet.config import dump_yaml
from whet.eval.evaluate import fitting_problems, take_problems
from whet.eval.grade import grade
from whet.eval.measure import evaluate
from whet.generate.backends.choose import open_sampler
from whet.generate.policy import Policy
from whet.generate.probe import GAP_LIMIT, ProbeResult, probe_divided, probe_policy
from whet.model.weights import model_folder
from whet.ranks.collectives import all_reduce_sum, rank, world_size
from whet.ranks.fsdp import gathered
from whet.ranks.ray import run_group
from whet.rewards.base import WeightedReward, own_name
from whet.rewards.judge.divergence import judge_diverges, thin
from whet.rewards.judge.judge import Judge
from whet.storage.checkpoint import Resume
from whet.storage.commit import commit_folder
from whet.tasks.base import told_of
from whet.telemetry.hardware import step_metrics
from whet.telemetry.health import dead_reason, past_rows
from whet.telemetry.heartbeat import alive
from whet.telemetry.spans import span, spanned
from whet.train.objective.advantage import with_advantages, without_advantages
from whet.train.objective.objective import Objective
from whet.train.optim.precision import resolve_precision
from whet.train.record import rl_batch
from whet.train.rl_config import RLConfig
from whet.train.rollout.curriculum import select_problems
from whet.train.rollout.grading import grading
from whet.train.rollout.order import data_order
from whet.train.rollout.rollout import Rollout, age_metrics, longest_sequence, rollout_metrics, sample_note
from whet.train.rollout.self_play import SelfPlayOrder
from whet.train.rollout.source import Collected, DataOrder, RolloutSource
from whet.train.run import Held, Run
from whet.train.session import (
    TrainStep,
    begin,
    end_check,
    finish,
    open_folder,
    question_of,
    watched,
    write_origin,
)
from whet.train.setup import audit_parts, load_rl
from whet.types import Group, Problem, Task, UserError

SOLVED = 0.99
STALE_GAP, STALE_FACTOR = 1e-3, 30
"""A sampler's copy has old weights in it if log-probabilities differ by more nats than this, and by this factor more
than at the start. Measured with vLLM's CPU build: 5e-4, then 1e-3 with an old head, else 3e-7."""
FEW_PLACED, MOST = 0.05, 0.5
"""Shares of a first batch: answers where the schema wants them below which, and groups without a signal above which,
it is warned of."""
HOT = 1.5
"""Sampling temperatures above this are warned of: from 2 on, models write gibberish."""


def main(config: RLConfig, *, resume: Resume = False) -> None:
    """Run the training, write its folder and its report; with `cluster.trainer_ranks` in ranks that Ray starts.

    Raises:
        SystemExit: With the exit status of the ranks, where they fail.
    """
    if config.cluster.trainer_ranks and world_size() == 1 and "RANK" not in os.environ:
        number = [] if isinstance(resume, bool) else [str(resume)]
        words = ["rl", "{folder}/config.yaml", *(["--resume", *number] if resume is not False else [])]
        again = [] if resume is not False else ["--resume"]
        if status := run_group(config.cluster, words, {"config.yaml": dump_yaml(config)}, resume=again):
            raise SystemExit(status)
        return
    train(config, resume=resume)
    finish(config)


def check(config: RLConfig, resume: Resume) -> None:
    """Find what a run would stop at before its first step; loads no weights and creates nothing.

    Raises:
        UserError: As the run would.
    """
    begin(config)
    setup = load_rl(resolve_precision(config), weights=False)
    warnings = [*audit_parts(setup), *heat_warnings(config.sampling.temperature)]
    _held_out(config, setup.policy, setup.task)
    if config.reward_model:
        model_folder(config.reward_model, weights=False)
    told = [setup.policy.describe_prompts(), *told_of(setup.task, len(setup.problems)), *warnings]
    end_check(config, told, resume=resume)


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
    with watched():
        return (yield from _steps(config, resume))


def _steps(config: RLConfig, resume: Resume) -> Generator[TrainStep, None, Policy]:
    tracking = begin(config, watch=True, resume=resume)
    config = resolve_precision(config)
    setup = load_rl(config)
    policy, task = setup.policy, setup.task
    # A run that goes on has passed, by the same data, rewards and settings: a service need not be called again.
    warnings = [] if resume is not False else audit_parts(setup)
    warnings += heat_warnings(config.sampling.temperature)
    folder = open_folder(config, resume=resume)
    held_out = _held_out(config, policy, task)
    write_origin(config, policy, setup.problems, task, held_out)
    with gathered(policy.model):
        alive("probe")
        probe = probe_policy(policy, config.sampling)
        alive("curriculum")
        kept, notes = select_problems(
            policy,
            task,
            setup.problems,
            config.curriculum,
            folder,
            sampling=config.sampling,
            seed=config.seed,
        )
    alive("set up")
    if setup.num_left_out:
        count = len(setup.problems) + setup.num_left_out
        notes.insert(0, f"{setup.num_left_out} of {count} prompts do not fit the context; left out")
    with (
        replace(setup, problems=kept).open_judge(folder) as (rewards, judge),
        open_sampler(config.sampler, policy, folder, config.cluster) as sampler,
        grading(config, task, policy.schema, rewards) as (judged, rewards),
    ):
        objective = Objective.of(config, policy)  # copies the policy, which a run deals out over the ranks
        run = Run(
            "rl",
            config,
            policy,
            tracking,
            best="eval/greedy",
            higher_is_better=True,
            headline=headline(config, policy),
        )
        order: DataOrder = data_order(task, kept, config.seed)
        if config.self_play.share:
            if world_size() > 1:
                raise UserError("self_play.share: games are played in one process; start it without torchrun")
            order = SelfPlayOrder(order, config.self_play, task, config.seed)
        source = RolloutSource.of(config, policy, judged, rewards, order, sampler)
        failures = Failures(rewards)
        saved = run.restore(resume, objective.tensors()) if resume else None
        if saved:
            source.load_state(saved[1]["source"])
            objective.load(saved[0], saved[1]["objective"])
        with gathered(policy.model if sampler else None):
            probe = source.probe(run.step) or probe
        probe = probe_divided(policy, probe)
        trust = Trust(config, probe, judge)
        if saved:
            trust.restore(saved[1])
            failures.restore(saved[1].get("failures", {}))
            if judge is not None:
                judge.restore(saved[1].get("judge", {}))

        def training() -> Held:
            return objective.tensors(), {"objective": objective.state()}

        def counts() -> dict[str, Any]:
            judged = {} if judge is None else {"judge": asdict(judge.stats)}
            return {"failures": failures.state(), **judged}

        def held(
            source_state: Callable[[], dict[str, Any]] = source.state, counted: dict[str, Any] | None = None
        ) -> Held:
            tensors, state = training()
            waiting = source_state()  # first: rewards may still be failing while it waits for the samples
            counted = counts() if counted is None else counted
            return tensors, {**state, **counted, "source": waiting, "dead_steps": trust.dead_steps}

        notes = [policy.describe_prompts(), f"sampler vs trainer: {probe}", *notes]
        with tracking, run.open(f"rl {task.name}", notes=notes, warnings=warnings), closing(source):
            order.look = source.look = run.session.look
            if config.safety.rehearses(policy.device):
                run.beat("rehearse")
                objective.rehearse(longest_sequence(policy, kept, config.sampling))
            save_protocol(policy, folder)
            for step in run.steps():
                with span("step"):
                    began = time.monotonic()
                    run.beat("sample", source.how_far)
                    with (
                        run.before_update(partial(held, source.snapshot(), counts())),
                        gathered(policy.model),
                    ):
                        collected = source.next(step)
                    groups = trained_groups(collected, config)
                    metrics = sampled_metrics(collected, config, step, judge, failures)
                    metrics |= source.order_metrics()
                    sampled = time.monotonic()
                    run.beat("train")
                    outcome = update(run, source, objective, collected, groups, config)
                    metrics |= outcome
                    metrics |= speed(run, source, objective, collected, policy.device, began, sampled)
                    metrics |= run.end_update(outcome, training)
                    metrics |= source.close_step(skipped=run.is_skipped)
                    if held_out and run.is_due(config.validate_every):
                        run.beat("validate")
                        with gathered(policy.model):
                            metrics |= validate(config, policy, task, held_out)
                    run.log_step(metrics, [*groups, *rest_of(collected)])
                    for line in failures.news():
                        run.warn(line)
                    if step == 0 and (
                        told := weak_start(policy, task, collected.rollout, metrics, config.algo)
                    ):
                        run.warn(told)
                    if config.show_samples_every and run.step % config.show_samples_every == 0:
                        run.display.note(sample_note(collected.rollout.groups[0]))
                    trust.check(run.step, metrics)
                    done = run.end_step(held, groups)
                    trust.check_judge(run.step, metrics)
                yield done
    run.write_summary({"sampler_vs_trainer": str(probe), **question_of(task, setup.problems)})
    return policy


def headline(config: RLConfig, policy: Policy) -> tuple[str, ...]:
    """Return the metrics that a step's line shows: also each other reward, and a penalty, that is in the mean."""
    own = [f"rl/reward/{name}" for name, weight in config.rewards.items() if weight and name != "correct"]
    own += [f"rl/reward/{own_name(reward)}" for reward in config.reward]
    own += ["rl/reward/overlong"] if config.algo.overlong in ("soft", "hard") else []
    length = "rl/thinking_tokens" if policy.schema.has_thinking else "rl/completion_tokens"
    return ("rl/correct", "rl/reward_mean", *own, length, "rl/entropy", "rl/groups_with_signal")


def heat_warnings(temperature: float) -> list[str]:
    """Return a warning for a sampling temperature at which little of what is written makes sense."""
    if temperature <= HOT:
        return []
    return [
        f"sampling.temperature = {temperature:g}: above {HOT} rollouts turn into gibberish, which teaches nothing; 1.0 "
        "to 1.2 is usual (for more variety raise group_size; sampling.min_p = 0.1 removes the unlikely tokens)"
    ]


def weak_start(
    policy: Policy, task: Task, rollout: Rollout, values: Mapping[str, float], algo: AlgoConfig
) -> str:
    """Return a warning about a first batch that teaches little, with the option that helps; '' for another.

    The run's own first answers are what a test before it would have to sample.

    Args:
        policy: The policy that wrote it.
        task: Judges answers.
        rollout: This rank's share of the batch.
        values: Its metrics.
        algo: The objective.
    """
    graded = [one for row in rollout.grades for one in row]
    num_placed, place = sum(one.answer is not None for one in graded), policy.schema.answer_place
    if graded and place not in ("anywhere", "whole") and num_placed < FEW_PLACED * len(graded):
        samples = [(group.problem, one) for group in rollout.groups for one in group.samples]
        items = [(problem, one.text, one.completion_ids) for problem, one in samples]
        right = sum(one.is_correct for one in grade(policy, task, items, answer_from="anywhere"))
        remedy = (
            "--policy.schema anywhere asks for no format, and counts those"
            if right
            else "fine-tune first (whet sft teaches the format), or start with easier problems"
        )
        return (
            f"{num_placed} of {len(graded)} answers of the first batch are where the schema wants them "
            f"({policy.where_read()}), and {right / len(graded):.0%} are right when read anywhere: {remedy}"
        )
    dull = values.get("rl/zero_variance_groups", 0.0)
    can_refill = algo.uninformative == "drop"
    is_scored = any(sample.reward is not None for group in rollout.groups for sample in group.samples)
    if can_refill and is_scored and dull > MOST and values["rl/correct"] < SOLVED:
        most = 1 + algo.max_refills
        return (
            f"{dull:.0%} of the groups of the first batch have equal rewards, which teach nothing: "
            f"--algo.uninformative refill samples other problems for them (up to {most} times the samples)"
        )
    return ""


def _held_out(config: RLConfig, policy: Policy, task: Task) -> list[Problem]:
    """Return the dev problems that are answered while it trains."""
    if not config.validation_problems:
        return []
    return fitting_problems(policy, take_problems(task, "dev", config.validation_problems), min_new_tokens=1)


def save_protocol(policy: Policy, folder: Path) -> None:
    """Keep what the rollouts are spelt and tagged with, so that they can be read before the first checkpoint."""
    final = folder / "checkpoints" / "protocol"
    if rank() == 0 and not final.exists():
        with commit_folder(final) as temporary:
            policy.save_protocol(temporary)


@spanned("advantage_computation")
def trained_groups(collected: Collected, config: RLConfig) -> list[Group]:
    """Return the groups that the loss uses, with advantages."""
    used = [collected.rollout.groups[place] for place in collected.used]
    return with_advantages(used, config.algo, config.reward_weights)


def rest_of(collected: Collected) -> list[Group]:
    """Return the groups that the loss does not use."""
    groups = enumerate(collected.rollout.groups)
    return without_advantages([group for place, group in groups if place not in collected.used])


def sampled_metrics(
    collected: Collected, config: RLConfig, step: int, judge: Judge | None, failures: Failures
) -> dict[str, float]:
    """Return the metrics of what was sampled for a step, and of what scored it."""
    values = rollout_metrics(collected.rollout, config.algo, config.reward_weights, collected.num_refilled)
    if judge is not None:
        values |= {f"rl/judge_{name}": float(n) for name, n in asdict(judge.stats).items()}
    if config.reward:
        values["rl/reward_failures"] = float(failures.count)
    values["rl/staleness"] = float(step - collected.step)
    values |= age_metrics(collected.rollout, step)
    return values


def update(
    run: Run,
    source: RolloutSource,
    objective: Objective,
    collected: Collected,
    groups: list[Group],
    config: RLConfig,
) -> dict[str, float]:
    """Move the weights, begin the step's record, and return the metrics of the update."""
    budget, lr = objective.state()["token_budget"], run.lr
    run.begin_record(lambda: rl_batch(collected, groups, run.policy, config, token_budget=budget))
    with source.updating():
        found = objective.update(groups, run.optimizer, lr, step=run.step, progress=run.progress)
    return found | {"rl/lr": lr}


def speed(
    run: Run,
    source: RolloutSource,
    objective: Objective,
    collected: Collected,
    device: torch.device,
    began: float,
    sampled: float,
) -> dict[str, float]:
    """Return what a step took whose update ends now, as metrics.

    Args:
        run: The run.
        source: Where its rollouts come from.
        objective: Its objective.
        collected: What the step trained on.
        device: The policy's device.
        began: Time at which the step began, in seconds.
        sampled: Time at which its samples were there.
    """
    rollout, trained = collected.rollout, time.monotonic() - sampled
    overlap = source.wait()
    done = time.monotonic()
    tokens = all_reduce_sum(sum(len(s.completion_ids) for g in rollout.groups for s in g.samples))[0]
    return {
        "rl/generate_seconds": rollout.generate_seconds,
        "rl/reward_seconds": rollout.reward_seconds,
        "rl/train_seconds": trained,
        "rl/overlap": overlap,
        "rl/tokens_per_second": tokens / (done - began),
        "rl/generate_tokens_per_second": tokens / max(rollout.generate_seconds, 1e-9),
        "rl/train_tokens_per_second": objective.num_tokens_read / trained,
        **source.sync_metrics(),
        **step_metrics(run.monitor, "rl", began, device),
    }


@spanned("validate")
def validate(config: RLConfig, policy: Policy, task: Task, held_out: Sequence[Problem]) -> dict[str, float]:
    """Return the share of dev problems answered right, greedily and by samples."""
    result = evaluate(
        policy,
        task,
        held_out,
        num_samples=config.validation_samples,
        sampling=config.sampling,
        seed=config.seed,
    )
    return {f"eval/{name}": result.metrics[name].mean for name in ("greedy", "pass@1")}


class Failures:
    """Rewards that give no score: counted, and told of at the first one and whenever there are twice as many.

    What failed before, in the preflight, was no sample of the run and does not count.

    Args:
        rewards: The run's rewards.
    """

    def __init__(self, rewards: Sequence[WeightedReward]) -> None:
        self._failures = {reward.name: reward.failures for reward in rewards}
        self._before = {name: failures.count for name, failures in self._failures.items()}
        self._shown = dict.fromkeys(self._failures, 0)

    @property
    def count(self) -> int:
        """Failures of all rewards so far."""
        return sum(failures.count - self._before[name] for name, failures in self._failures.items())

    def state(self) -> dict[str, Any]:
        """Return failures and those told of by reward, as JSON values, for a checkpoint."""
        return {
            name: [failures.count - self._before[name], self._shown[name]]
            for name, failures in self._failures.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Count on from what `state` returned."""
        for name in self._failures.keys() & state.keys():
            count, self._shown[name] = state[name]
            self._before[name] -= count

    def news(self) -> Iterator[str]:
        """Yield a warning for each reward that should be told of now."""
        for name, failures in self._failures.items():
            count = failures.count - self._before[name]
            if count >= max(1, 2 * self._shown[name]):
                self._shown[name] = count
                often = "once" if count == 1 else f"{count} times"
                left = "this sample is" if count == 1 else "these samples are"
                yield f"reward '{name}' gave no score {often} so far, {left} left out; last: {failures.latest}"


class Trust:
    """Stops a run that cannot be trusted or cannot learn.

    Args:
        config: Its limits.
        probe: How sampler and trainer agreed before the first step.
        judge: The run's judge; None without one.

    Attributes:
        dead_steps: Steps in a row without a signal, just now.
    """

    def __init__(self, config: RLConfig, probe: ProbeResult, judge: Judge | None) -> None:
        self._config, self._probe, self._judge = config, probe, judge
        self._judged: list[dict[str, float]] = []
        self.dead_steps = 0

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state, and from the log up to it."""
        self.dead_steps = int(state["dead_steps"])
        if self._judge is not None:
            rows = past_rows(Path(self._config.out), "rl", int(state["step"]))
            self._judged = [thin(row) for row in rows]

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Check a step before it is saved.

        Raises:
            UserError: If sampler and trainer disagree, or nothing is learned; with the remedy.
        """
        drift, gap = values.get("rl/ratio_drift", 0.0), values.get("rl/logprob_gap_mean", 0.0)
        tolerance = self._config.ratio_tolerance
        is_fresh = values["rl/staleness"] == 0 and not values.get("rl/token_age")
        if is_fresh and self._probe.exact and drift > tolerance:
            raise UserError(
                f"step {step}: on-policy ratio drifts by {drift:.1e}, expected at most {tolerance:g} "
                "since the probe said exact; sampler and trainer disagree: raise ratio_tolerance only if you know why"
            )
        if is_fresh and not self._probe.exact and gap > GAP_LIMIT:
            is_copy = self._probe.mean_gap is not None
            remedy = (
                "a higher precision in the sampler"
                if is_copy
                else "policy.attention = exact or a higher precision"
            )
            raise UserError(
                f"step {step}: sampler and trainer differ by {gap:.2f} nats per token on average, expected at most "
                f"{GAP_LIMIT}; use {remedy}"
            )
        first = self._probe.mean_gap
        if (
            is_fresh
            and first is not None
            and not self._probe.exact
            and gap > max(STALE_GAP, STALE_FACTOR * first)
        ):
            raise UserError(
                f"step {step}: sampler and trainer differ by {gap:.1e} nats per token on average, at the start by "
                f"{first:.1e}: the sampler did not take all of the weights (a tied head, say, that it packs once); "
                "let whet start it (sampler.kind = vllm), or update the server"
            )
        limit, kl = self._config.algo.kl_stop, values.get("rl/kl", 0.0)
        if limit is not None and kl > limit:
            raise UserError(
                f"step {step}: the KL to the reference is {kl:.3f} nats per token, above algo.kl_stop = {limit:g}; "
                "lower optim.lr, give the KL a weight (algo.kl_coef), or go on from the last checkpoint with a higher "
                "limit"
            )
        self.dead_steps = self.dead_steps + 1 if values["rl/groups_with_signal"] == 0 else 0
        if self.dead_steps >= self._config.max_dead_steps and values["rl/correct"] < SOLVED:
            raise UserError(
                f"step {step}: {self.dead_steps} steps in a row without a signal: {dead_reason(values)}"
            )

    def check_judge(self, step: int, values: Mapping[str, float]) -> None:
        """Check that the judge's reward and the measured accuracy do not part, after the step was saved.

        Raises:
            UserError: If they do.
        """
        if self._judge is not None:
            self._judged.append(thin({"step": step, **values}))
            if reason := judge_diverges(self._judged):
                raise UserError(f"step {step}: {reason}")
