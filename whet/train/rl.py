"""`whet rl`: reinforcement learning with verifiable rewards. GRPO, Dr. GRPO and DAPO are arguments of one loop."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from whet.checkpoint import commit_folder, load_step, open_run, save_step
from whet.config import align, dump_yaml
from whet.distributed import all_reduce_sum, barrier, rank, shard, world_size
from whet.eval.evaluate import evaluate, fitting_problems, take_problems
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.probe import ProbeResult, probe_policy
from whet.generate.sampling import SamplingParams
from whet.model.weights import load_model
from whet.rewards.base import best_total, build_rewards, score_completion
from whet.schema import preflight
from whet.tasks.base import TaskConfig, load_task
from whet.telemetry.display import Display, open_display
from whet.telemetry.environment import write_environment
from whet.telemetry.health import health_warnings
from whet.telemetry.log import RunLog, read_metrics
from whet.telemetry.report import write_report
from whet.train.objective import AlgoConfig, Objective, with_advantages
from whet.train.order import EpochOrder
from whet.train.rollout import Rollout, collect_groups, is_informative, rollout_metrics
from whet.train.step import (
    OptimConfig,
    Optimizer,
    autocast_dtype,
    learning_rate,
    parameter_dtype,
    prepare_model,
)
from whet.types import Group, Problem, Task, UserError

APPROX_GAP_LIMIT = 0.1


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """Reinforcement learning with verifiable rewards, one update per rollout batch (strictly on-policy)."""

    out: str
    """Run folder to make."""
    policy: PolicyConfig
    """The model to start from."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """The problems."""
    rewards: dict[str, float] = field(default_factory=lambda: {"correct": 1.0, "format": 0.1})
    """Weight of each reward by name."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How rollouts are drawn; filters (top-k, top-p, min-p) are refused in training."""
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    """The objective."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-6, schedule="constant", beta2=0.99))
    """Optimizer, schedule and precision."""
    num_steps: int = 100
    """Optimizer steps."""
    num_prompts: int = 32
    """Problems per step, over all ranks."""
    group_size: int = 8
    """Samples per problem."""
    validation_problems: int = 0
    """Problems of the dev split that are answered greedily while training; 0 for none."""
    validate_every: int = 20
    """Steps between validations; the best is kept as checkpoints/best."""
    save_every: int = 100
    """Steps between checkpoints (one at the end always)."""
    ratio_tolerance: float = 0.0
    """Largest |ratio - 1| accepted on-policy where the start-up probe says exact; more stops the run."""
    max_dead_steps: int = 50
    """Steps in a row without any reward difference after which the run stops."""
    seed: int = 0
    """Seed of data order and of every sample."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_prompts", "validate_every", "save_every", "max_dead_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 1 or more")
        if self.group_size < 2 and self.algo.baseline != "none":
            raise ValueError(f"group_size = {self.group_size}: a group-relative baseline needs at least 2")
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature = 0: greedy rollouts have no ratio and no variety; use 1.0 for training"
            )
        if self.sampling.is_filtered:
            raise ValueError(
                "sampling.top_k, top_p, min_p: filters make the trained ratio wrong; leave them out in training"
            )
        if self.algo.overlong_cache > self.sampling.max_new_tokens:
            raise ValueError(
                f"algo.overlong_cache = {self.algo.overlong_cache}: expected at most sampling.max_new_tokens"
            )


def plan(config: RLConfig) -> str:
    """Describe the batch of a step without doing it."""
    samples = config.num_prompts * config.group_size
    tokens = samples * config.sampling.max_new_tokens
    budget = config.optim.token_budget
    return align(
        "batch of one step",
        {
            "prompts": config.num_prompts,
            "samples per prompt": config.group_size,
            "completions": samples,
            "new tokens, at most": tokens,
            "tokens per micro-batch": budget,
            "micro-batches, at most": f"{-(-tokens // budget)}, and more by the share of prompts",
            "optimizer steps": f"{config.num_steps:,}, one per batch",
            "completions in all": samples * config.num_steps,
        },
    )


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
    if config.num_prompts % world_size():
        raise UserError(
            f"num_prompts = {config.num_prompts}: expected a multiple of the {world_size()} ranks"
        )
    if config.algo.scale == "batch" and world_size() > 1:
        raise UserError(
            "algo.scale = batch: the batch's standard deviation is not shared between ranks; use group"
        )
    task = load_task(config.task)
    policy = load_policy(config.policy, seed=config.seed, dtype=parameter_dtype(config.optim.precision))
    prepare_model(policy.model, config.optim)
    problems = task.problems("train")
    kept = fitting_problems(policy, problems, min_new_tokens=config.sampling.max_new_tokens)
    if not kept:
        raise UserError(f"task {task.name}: the train split has no problems")
    rewards = build_rewards(config.rewards, policy.schema, task)
    preflight(
        policy.schema, lambda p, text: score_completion(rewards, p, text)[1], kept[0], best_total(rewards)
    )
    if rank() == 0:
        open_run(folder, dump_yaml(config), resume=resume)
        write_environment(folder)
    barrier()
    autocast = autocast_dtype(config.optim.precision)
    probe = probe_policy(policy, temperature=config.sampling.temperature, autocast=autocast)
    held_out: list[Problem] = []
    if config.validation_problems:
        wanted = take_problems(task, "dev", config.validation_problems)
        held_out = fitting_problems(policy, wanted, min_new_tokens=1)
    run = _Run(config, policy, task, EpochOrder(kept, config.seed), held_out, probe)
    start = run.restore(folder) if resume else 0
    headline = ("rl/correct", "rl/reward_mean", "rl/thinking_tokens", "rl/entropy", "rl/ratio_drift")
    with (
        RunLog(folder, resume_step=start if resume else None, enabled=rank() == 0) as log,
        open_display(f"rl {task.name}", config.num_steps, headline, enabled=rank() == 0) as display,
    ):
        display.note(f"sampler vs trainer: {probe}")
        if len(kept) < len(problems):
            display.note(
                f"{len(problems) - len(kept)} of {len(problems)} prompts do not fit the context; left out"
            )
        for step in range(start, config.num_steps):
            run.advance(step, folder, log, display)
    if rank() == 0:
        content = {name.removeprefix("rl/"): value for name, value in run.last.items()}
        content |= {"sampler_vs_trainer": str(probe)}
        (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
    return policy


class _Run:
    """State of one RL run: what a checkpoint holds, and one step of it."""

    def __init__(
        self,
        config: RLConfig,
        policy: Policy,
        task: Task,
        order: EpochOrder[Problem],
        held_out: Sequence[Problem],
        probe: ProbeResult,
    ) -> None:
        self.config = config
        self.policy = policy
        self.task = task
        self.order = order
        self.held_out = held_out
        self.probe = probe
        self.rewards = build_rewards(config.rewards, policy.schema, task)
        self.autocast = autocast_dtype(config.optim.precision)
        self.engine = policy.engine(self.autocast)
        self.optimizer = Optimizer(policy.model, config.optim)
        self.objective = Objective(
            policy,
            config.algo,
            temperature=config.sampling.temperature,
            max_length=config.sampling.max_new_tokens,
            token_budget=config.optim.token_budget,
            autocast=self.autocast,
        )
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
        self.order.cursor, self.dead_steps = int(state["cursor"]), int(state["dead_steps"])
        self.best = -math.inf if state["best"] is None else float(state["best"])
        self.last = dict(state["last"])
        self.history = [
            row for row in read_metrics(folder) if row["stage"] == "rl" and row["step"] <= state["step"]
        ]
        return int(state["step"])

    def advance(self, step: int, folder: Path, log: RunLog, display: Display) -> None:
        """Sample, score, train; validate and save where due."""
        config = self.config
        began = time.perf_counter()
        rollout, used, num_refilled = self.collect(step)
        groups = with_advantages(used, config.algo)
        sampled = time.perf_counter()
        values = rollout_metrics(rollout, self.rewards, num_refilled)
        lr = learning_rate(config.optim, step, config.num_steps)
        values |= self.objective.update(groups, self.optimizer, lr)
        done = time.perf_counter()
        tokens = all_reduce_sum(sum(len(s.completion_ids) for g in rollout.groups for s in g.samples))[0]
        values |= {
            "rl/generate_seconds": rollout.generate_seconds,
            "rl/reward_seconds": rollout.reward_seconds,
            "rl/train_seconds": done - sampled,
            "rl/tokens_per_second": tokens / (done - began),
            "rl/generate_tokens_per_second": tokens / max(rollout.generate_seconds, 1e-9),
            "rl/train_tokens_per_second": self.objective.num_tokens_read / (done - sampled),
            "rl/lr": lr,
        }
        count = step + 1
        if self.held_out and (count % config.validate_every == 0 or count == config.num_steps):
            values["eval/greedy"] = self.validate()
        self.last |= values
        log.write_metrics("rl", count, values)
        trained = {id(before): after for before, after in zip(used, groups, strict=True)}
        unused = with_advantages([g for g in rollout.groups if id(g) not in trained], config.algo)
        log.write_samples(count, [*groups, *unused])
        for warning in health_warnings("rl", values, self.history):
            display.note(warning, warning=True)
        self.history.append(values)
        display.update(count, values)
        self.check(values, count)
        if rank() == 0:
            self.save(folder, count, values)

    def collect(self, step: int) -> tuple[Rollout, list[Group], int]:
        """Sample the step's groups; refill uninformative ones where the recipe says so.

        Returns:
            Everything that was sampled, the groups that the loss uses, and how many groups were sampled as refills.
        """
        config = self.config
        rollout = self._sample(config.num_prompts, step)
        if config.algo.uninformative == "keep":
            return rollout, rollout.groups, 0
        used = [g for g, useful in zip(rollout.groups, is_informative(rollout.groups), strict=True) if useful]
        num_refilled = 0
        for _ in range(config.algo.max_refills if config.algo.uninformative == "refill" else 0):
            (total,) = all_reduce_sum(len(used))
            missing = config.num_prompts - int(total)
            if missing <= 0:
                break
            missing += -missing % world_size()
            more = self._sample(missing, step)
            num_refilled += missing
            used += [g for g, useful in zip(more.groups, is_informative(more.groups), strict=True) if useful]
            rollout = Rollout(
                rollout.groups + more.groups,
                rollout.grades + more.grades,
                rollout.generate_seconds + more.generate_seconds,
                rollout.reward_seconds + more.reward_seconds,
            )
        return rollout, used, num_refilled

    def _sample(self, num_prompts: int, step: int) -> Rollout:
        drawn = self.order.next(num_prompts)
        mine = [drawn[index] for index in shard(num_prompts)]
        return collect_groups(
            self.policy,
            self.engine,
            self.task,
            self.rewards,
            [problem for _, problem in mine],
            seeds=[(self.config.seed, step, epoch) for epoch, _ in mine],
            group_size=self.config.group_size,
            sampling=self.config.sampling,
            overlong_cache=self.config.algo.overlong_cache,
        )

    def validate(self) -> float:
        """Return the share of dev problems answered right by greedy decoding."""
        result = evaluate(
            self.policy,
            self.task,
            self.held_out,
            num_samples=1,
            sampling=self.config.sampling,
            seed=self.config.seed,
            autocast=self.autocast,
        )
        return result.metrics["greedy"].mean

    def check(self, values: dict[str, float], step: int) -> None:
        """Stop a run that cannot be trusted or cannot learn.

        Raises:
            UserError: With the reason and the remedy.
        """
        drift, gap = values["rl/ratio_drift"], values["rl/logprob_gap_mean"]
        if self.probe.exact and drift > self.config.ratio_tolerance:
            raise UserError(
                f"step {step}: on-policy ratio drifts by {drift:.1e}, expected at most {self.config.ratio_tolerance:g} "
                "since the probe said exact; sampler and trainer disagree: raise ratio_tolerance only if you know why"
            )
        if not self.probe.exact and gap > APPROX_GAP_LIMIT:
            raise UserError(
                f"step {step}: sampler and trainer differ by {gap:.2f} nats per token on average, expected at most "
                f"{APPROX_GAP_LIMIT}; use policy.attention = exact or a higher precision"
            )
        if not math.isfinite(values["rl/grad_norm"]):
            raise UserError(
                f"step {step}: gradient norm {values['rl/grad_norm']}; nothing was updated: lower optim.lr"
            )
        self.dead_steps = self.dead_steps + 1 if values["rl/zero_variance_groups"] == 1.0 else 0
        if self.dead_steps >= self.config.max_dead_steps and values["rl/correct"] < 0.5:
            raise UserError(
                f"step {step}: {self.dead_steps} steps in a row without any difference in reward: nothing to learn "
                "from; start from a better model (SFT first), take easier problems or more samples per prompt"
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
            "cursor": self.order.cursor,
            "dead_steps": self.dead_steps,
            "best": self.best if math.isfinite(self.best) else None,
            "last": self.last,
        }
        save_step(folder, step, write_model=self.policy.save, tensors=self.optimizer.tensors(), state=state)
