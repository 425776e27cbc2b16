"""`whet rft`: rejection-sampling fine-tuning. Samples, keeps verified completions, trains on them, for several
rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from whet.algo.packing import TrainingSequence
from whet.config import align
from whet.eval.evaluate import fitting_problems, take_problems
from whet.generate.policy import Policy, PolicyConfig
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.model.lora.side import LoRAConfig
from whet.ranks.collectives import all_reduce_sum, barrier, rank, shard
from whet.ranks.fsdp import ParallelConfig, gathered
from whet.storage.checkpoint import Resume
from whet.tasks.base import TaskConfig, answers_of, check_gold, load_task, told_of
from whet.telemetry.heartbeat import alive
from whet.telemetry.trackers import TrackConfig
from whet.train.data.harvest import (
    Row,
    check_sampling,
    choose,
    distinct,
    gather_rows,
    is_right,
    load_rows,
    sample_judged,
    write_rows,
)
from whet.train.fit import Fit, StepResult
from whet.train.optim.precision import resolve_precision
from whet.train.optim.safety import SafetyConfig, TokenBudget
from whet.train.optim.step import OptimConfig
from whet.train.rollout.order import EpochOrder
from whet.train.rollout.rollout import RolloutParams, collect_groups, longest_sequence
from whet.train.run import Run
from whet.train.session import (
    OnStep,
    begin,
    end_check,
    finish,
    load_trained,
    open_folder,
    question_of,
    watched,
    write_origin,
)
from whet.train.sft import train_step
from whet.types import Problem, Task, UserError

KEPT, ROUNDS = "kept.jsonl", "rounds.jsonl"


@dataclass(frozen=True, kw_only=True)
class RFTConfig:
    """Rejection-sampling fine-tuning on the policy's own verified completions."""

    out: str
    """Output folder."""
    policy: PolicyConfig
    """The model to start from."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """The task; its worked solutions are not used."""
    num_problems: int = 0
    """Problems of the train split to sample in each round; 0 for all."""
    num_samples: int = 8
    """Completions per problem and round."""
    max_per_problem: int = 4
    """Right completions kept per problem and round: distinct texts, chosen by hash."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling settings."""
    rounds: int = 1
    """Rounds of sampling and training, each from the newest weights."""
    steps_per_round: int = 100
    """Optimizer steps per round; the learning-rate schedule spans all rounds."""
    batch_size: int = 32
    """Sequences per optimizer step, over all ranks."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Adapters that are trained in place of the weights."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5, beta2=0.99))
    """Optimizer, schedule and precision."""
    validation_problems: int = 0
    """Problems of the dev split to answer greedily before and after each round; 0 for none."""
    save_every: int = 100
    """Steps between checkpoints (always one at the end of each round)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How several ranks hold the model."""
    track: TrackConfig = field(default_factory=TrackConfig)
    """Experiment trackers, in addition to the run's own files."""
    safety: SafetyConfig = field(default_factory=SafetyConfig)
    """Resuming, saving and stopping."""
    seed: int = 0
    """Seed of samples, choice and data order."""

    def __post_init__(self) -> None:
        for name in ("max_per_problem", "rounds", "steps_per_round", "batch_size", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 1 or more")
        if self.num_problems < 0 or self.validation_problems < 0:
            raise ValueError(
                f"num_problems = {self.num_problems}, validation_problems = {self.validation_problems}: "
                "expected 0 or more"
            )
        check_sampling(self.sampling, self.num_samples)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of all rounds."""
        return self.rounds * self.steps_per_round

    @property
    def validate_every(self) -> int:
        """Steps between validations: a round."""
        return self.steps_per_round


def plan(config: RFTConfig) -> str:
    """Describe the work without doing it."""
    problems = config.num_problems or "all"
    return align(
        "one round",
        {
            "rounds": config.rounds,
            "problems": problems,
            "completions per problem": config.num_samples,
            "kept per problem, at most": config.max_per_problem,
            "new tokens per completion, at most": config.sampling.max_new_tokens,
            "optimizer steps": f"{config.steps_per_round:,} of {config.batch_size} sequences",
            "optimizer steps in all": config.num_steps,
        },
    )


def main(config: RFTConfig, *, resume: Resume = False) -> None:
    """Run the training, write its folder and its report."""
    train(config, resume=resume)
    finish(config)


def check(config: RFTConfig, resume: Resume) -> None:
    """Find what a run would stop at before its first step; loads no weights and creates nothing.

    Raises:
        UserError: As the run would.
    """
    begin(config)
    _, task, problems, _ = load_rft(resolve_precision(config), weights=False)
    end_check(config, told_of(task, len(problems)), resume=resume)


def load_rft(config: RFTConfig, *, weights: bool = True) -> tuple[Policy, Task, list[Problem], list[Problem]]:
    """Load the policy of a run, its task, the problems that it samples, and those that it is validated on.

    Raises:
        UserError: If something is missing, or does not fit together.
    """
    task = load_task(config.task)
    policy = load_trained(config, weights=weights)
    policy.expect(*answers_of(task))
    wanted = take_problems(task, "train", config.num_problems)
    check_gold(task, wanted, "rejection sampling keeps right answers")
    problems = fitting_problems(policy, wanted, min_new_tokens=config.sampling.max_new_tokens)
    held_out: list[Problem] = []
    if config.validation_problems:
        wanted = take_problems(task, "dev", config.validation_problems)
        held_out = fitting_problems(policy, wanted, min_new_tokens=1)
    return policy, task, problems, held_out


@watched()
def train(config: RFTConfig, *, resume: Resume = False, on_step: OnStep | None = None) -> Policy:
    """Run all rounds, write the run folder (without a report) and return the trained policy.

    Args:
        config: The run's settings.
        resume: Resume from a checkpoint.
        on_step: Called after each step.

    Raises:
        UserError: If inputs are inconsistent, no completion can be kept, or the run cannot resume.
    """
    tracking = begin(config, watch=True, resume=resume)
    config = resolve_precision(config)
    policy, task, problems, held_out = load_rft(config)
    folder = open_folder(config, resume=resume)
    write_origin(config, policy, problems, task, held_out)

    def train_batch(drawn: Sequence[tuple[int, TrainingSequence]], budget: TokenBudget) -> StepResult:
        rows = [sequence for _, sequence in drawn]
        return StepResult(*train_step(policy, rows, config.optim, budget), batch=rows)

    def validate() -> dict[str, float]:
        return {"eval/greedy": greedy_accuracy(config, policy, task, held_out)}

    run = Run(
        "rft",
        config,
        policy,
        tracking,
        best="eval/greedy",
        higher_is_better=True,
        headline=("rft/loss", "rft/right", "eval/greedy", "rft/tokens_per_second"),
    )
    fit = Fit(
        run,
        config,
        policy,
        train_batch,
        validate if held_out else None,
        longest=lambda: longest_sequence(policy, problems, config.sampling),
        on_step=on_step,
    )
    if resume:
        fit.restore(resume)
    with tracking:
        for number in range(config.rounds):
            start = number * config.steps_per_round
            if run.step >= start + config.steps_per_round:
                continue
            done = stored_round(folder, number)
            if done is None:
                alive("sample")
                with gathered(policy.model):
                    before = validate() if held_out and number == 0 else {}
                    kept, counts = sample_round(config, policy, task, problems, number)
                done = store_round(folder, number, kept, {"step": start, **counts, **before})
            kept, counts = done
            title = f"rft {task.name}, round {number + 1} of {config.rounds}"
            note = (
                f"round {number + 1}: {counts['rft/kept']:,.0f} of {counts['rft/sampled']:,.0f} completions kept "
                f"({counts['rft/right']:.1%} right), for {counts['rft/covered']:.1%} of {len(problems):,} problems"
            )
            order = EpochOrder([_sequence(row) for row in kept], config.seed)
            end = start + config.steps_per_round
            fit.train(order, title=title, start=start, end=end, notes=[note], opening=counts)
    run.write_summary(question_of(task, held_out or problems))
    return policy


def _sequence(row: Row) -> TrainingSequence:
    return TrainingSequence(
        prompt_ids=tuple(row["prompt_ids"]),
        completion_ids=tuple(row["completion_ids"]),
        trained=tuple(row["trained"]),
    )


def greedy_accuracy(config: RFTConfig, policy: Policy, task: Task, problems: Sequence[Problem]) -> float:
    """Return the share of problems answered right by greedy decoding."""
    mine = [problems[index] for index in shard(len(problems))]
    greedy = SamplingParams(temperature=0.0, max_new_tokens=config.sampling.max_new_tokens)
    rollout = collect_groups(
        policy,
        policy.engine(),
        task,
        [],
        mine,
        seeds=[(0,)] * len(mine),
        params=RolloutParams(group_size=1, sampling=greedy),
    )
    (right,) = all_reduce_sum(sum(graded.is_correct for row in rollout.grades for graded in row))
    return right / len(problems)


def sample_round(
    config: RFTConfig, policy: Policy, task: Task, problems: Sequence[Problem], number: int
) -> tuple[list[Row], dict[str, float]]:
    """Sample a round's completions and keep the right ones.

    Returns:
        Kept completions of all ranks, and the round's counts as metrics.

    Raises:
        UserError: If none is right in perfect format.
    """
    kept: list[Row] = []
    num_sampled = num_right = num_covered = 0
    for problem, judged in sample_judged(
        policy,
        task,
        problems,
        num_samples=config.num_samples,
        sampling=config.sampling,
        seed=sequence_seed("rft", config.seed, number),
        title=f"rft {task.name}, round {number + 1}: sampling",
    ):
        right = [sample for sample, graded in judged if is_right(graded)]
        num_sampled += len(judged)
        num_right += len(right)
        num_covered += bool(right)
        texts = distinct(right)
        for index in choose(len(texts), config.max_per_problem, config.seed, number, problem.uid):
            kept.append(
                {
                    "uid": problem.uid,
                    "round": number,
                    "step": number * config.steps_per_round,
                    "prompt": problem.prompt,
                    "completion": texts[index].text,
                    "prompt_ids": texts[index].prompt_ids,
                    "completion_ids": texts[index].completion_ids,
                    "trained": texts[index].trained,
                }
            )
    sampled, right, covered = all_reduce_sum(num_sampled, num_right, num_covered)
    if not right:
        raise UserError(
            f"round {number + 1}: none of {int(sampled):,} completions is right in perfect format: nothing to "
            "train on; start from a better model (whet sft first), use easier problems, or raise num_samples"
        )
    rows = gather_rows(kept)
    return rows, {
        "rft/sampled": sampled,
        "rft/right": right / sampled,
        "rft/kept": float(len(rows)),
        "rft/covered": covered / len(problems),
    }


def store_round(
    folder: Path, number: int, kept: Sequence[Row], account: Row
) -> tuple[list[Row], dict[str, float]]:
    """Write a sampled round and return it as `stored_round` does; its line in rounds.jsonl, written last, makes it
    valid."""
    if rank() == 0:
        earlier = [row for row in load_rows(folder / KEPT) if row["round"] < number]
        write_rows(folder / KEPT, [*earlier, *kept])
        write_rows(folder / ROUNDS, [*load_rows(folder / ROUNDS), {"round": number, **account}])
    barrier()
    stored = stored_round(folder, number)
    assert stored is not None
    return stored


def stored_round(folder: Path, number: int) -> tuple[list[Row], dict[str, float]] | None:
    """Return a sampled round's kept completions and metrics; None if its sampling was not finished."""
    account = next((row for row in load_rows(folder / ROUNDS) if row["round"] == number), None)
    if account is None:
        return None
    kept = [row for row in load_rows(folder / KEPT) if row["round"] == number]
    return kept, {name: value for name, value in account.items() if "/" in name}
