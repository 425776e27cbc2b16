"""`whet sft`: supervised fine-tuning on worked solutions, conversations or plain texts; only what the assistant wrote
is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from whet.algo.kept import kept_of
from whet.algo.losses import weighted_sum
from whet.algo.packing import TrainingSequence, pack
from whet.config import align
from whet.eval.evaluate import take_problems
from whet.generate.policy import Policy, PolicyConfig
from whet.generate.sampling import sequence_seed
from whet.model.lora.side import LoRAConfig
from whet.ranks.collectives import all_reduce_sum, shard, sum_gradients
from whet.ranks.context import Sharing, sharing
from whet.ranks.fsdp import ParallelConfig, gathered
from whet.storage.checkpoint import Resume
from whet.tasks.base import TaskConfig, answers_of, load_task, told_of
from whet.tasks.tools import environment_for
from whet.telemetry.spans import span
from whet.telemetry.trackers import TrackConfig
from whet.train.data.demonstrations import (
    Demonstrations,
    TooLong,
    Turns,
    demonstrate,
    demonstration,
    kind_of,
    learn_ends,
)
from whet.train.fit import FIT_ATTENTION, Fit, StepResult
from whet.train.optim.balance import Balance
from whet.train.optim.precision import resolve_precision
from whet.train.optim.safety import SafetyConfig, TokenBudget
from whet.train.optim.step import OptimConfig, forward_backward
from whet.train.rollout.order import data_order
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
from whet.types import MicroBatch, Problem, RuledTask, Task, UserError

CACHED_DEMONSTRATIONS = 65_536


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Supervised fine-tuning on worked solutions, conversations or plain texts."""

    out: str
    """Output folder."""
    policy: PolicyConfig
    """The model to start from."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """The task: problems with worked solutions, conversations, or texts."""
    num_problems: int = 0
    """Rows of the train split to learn from, drawn by hash; 0 for all."""
    turns: Turns = "all"
    """Turns of the assistant that a conversation teaches: all, or the last."""
    too_long: TooLong = "skip"
    """A conversation or text that does not fit in the context: skip it, or cut whole turns (of a text tokens) off its
    end; worked solutions are always skipped."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Adapters that are trained in place of the weights."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer, schedule and precision."""
    num_steps: int = 300
    """Optimizer steps."""
    batch_size: int = 32
    """Sequences per optimizer step, over all ranks."""
    empty_thinking_share: float = 0.0
    """Share of worked solutions with empty thinking (the answer comes immediately), redrawn each epoch."""
    allowed_coef: float = 0.0
    """Weight of a second loss in worked solutions: -log of the probability of all that the rules of the task allow in a
    place, where the task knows it (chess: the legal moves); 0 for none."""
    validation_problems: int = 256
    """Problems of the dev split for the validation loss; 0 for none."""
    validate_every: int = 100
    """Steps between validations (always one at the end); the best is kept as checkpoints/best."""
    save_every: int = 500
    """Steps between checkpoints (always one at the end)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How several ranks hold the model."""
    track: TrackConfig = field(default_factory=TrackConfig)
    """Experiment trackers, in addition to the run's own files."""
    safety: SafetyConfig = field(default_factory=SafetyConfig)
    """Resuming, saving and stopping."""
    seed: int = 0
    """Seed of weights, data order and empty scratch-pads."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "validate_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 1 or more")
        if self.policy.attention != "auto":
            raise ValueError(
                "policy.attention is read only by programs that sample; sft trains with the fast kernel"
            )
        if self.num_problems < 0:
            raise ValueError(f"num_problems = {self.num_problems}: expected 0 (all) or more")
        if not 0 <= self.empty_thinking_share <= 1:
            raise ValueError(f"empty_thinking_share = {self.empty_thinking_share}: expected 0 to 1")
        if not (math.isfinite(self.allowed_coef) and self.allowed_coef >= 0):
            raise ValueError(f"allowed_coef = {self.allowed_coef}: expected 0 or more")


def rows_of(config: SFTConfig, task: Task) -> list[Problem]:
    """Return the rows of the train split that a run learns from."""
    return (
        take_problems(task, "train", config.num_problems) if config.num_problems else task.problems("train")
    )


def load_sft(config: SFTConfig, *, weights: bool = True) -> tuple[Policy, Task, list[Problem]]:
    """Load the policy of a run, its task, and the rows that it learns from.

    Where all rows are chats or texts, a model that has no schema stays without one: nothing that it learned asks for
    tags, so no later prompt may.

    Raises:
        UserError: If something is missing, or does not fit together.
    """
    task = load_task(config.task)
    problems = rows_of(config, task)
    plain = all(kind_of(problem) != "solution" for problem in problems)
    policy = load_trained(config, plain=plain, weights=weights)
    answer_type, _, is_published = answers_of(task)
    policy.expect(answer_type, needs_gold=not plain, is_published=is_published)
    check_rules(config, task, problems)
    return policy, task, problems


def demonstrations_of(config: SFTConfig, policy: Policy, problems: Sequence[Problem]) -> Demonstrations:
    """Find what a run learns from the rows of its train split.

    Raises:
        UserError: If nothing of them fits in the context, or a setting has nothing to act on.
    """
    found = demonstrate(policy, problems, turns=config.turns, too_long=config.too_long)
    if not found.problems:
        raise UserError(f"no demonstration fits in the context of {policy.model.config.max_positions} tokens")
    kinds = {kind_of(problem) for problem in found.problems}
    for name, is_set, what in (
        ("empty_thinking_share", config.empty_thinking_share > 0, "solution"),
        ("turns", config.turns != "all", "chat"),
        ("too_long", config.too_long != "skip", "chat text"),
    ):
        if is_set and not kinds & set(what.split()):
            rows = {"solution": "worked solution", "chat": "conversation"}.get(
                what, "conversation or plain text"
            )
            raise UserError(f"{name} is not read: no row is a {rows}; leave it out")
    return found


def check_rules(config: SFTConfig, task: Task, problems: Sequence[Problem]) -> None:
    """Refuse a weight of what the rules allow where they say nothing of any answer.

    Raises:
        UserError: If so.
    """
    if not config.allowed_coef:
        return
    ruled = isinstance(task, RuledTask) and any(
        task.allowed(problem) for problem in problems if kind_of(problem) == "solution"
    )
    if not ruled:
        raise UserError(
            f"allowed_coef is not read: {task.name} has no rules that allow several answers; leave it out"
        )


def is_empty(config: SFTConfig, epoch: int, problem: Problem) -> bool:
    """Say whether a problem's scratch-pad is empty in an epoch."""
    return sequence_seed("empty", config.seed, epoch, problem.uid) / 2**63 < config.empty_thinking_share


def encode(
    config: SFTConfig, policy: Policy, task: Task, drawn: Sequence[tuple[int, Problem]]
) -> list[TrainingSequence]:
    """Return the training sequences of drawn problems.

    Args:
        config: The run's settings.
        policy: Renders and encodes them.
        task: Their task.
        drawn: Epoch and problem, from the data order.
    """
    rules = task if config.allowed_coef and isinstance(task, RuledTask) else None
    return [
        demonstration(policy, problem, empty=is_empty(config, epoch, problem), rules=rules)
        for epoch, problem in drawn
    ]


def train_step(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    config: OptimConfig,
    budget: TokenBudget | None = None,
    *,
    allowed_coef: float = 0.0,
) -> tuple[float, int, int, dict[str, float]]:
    """Backpropagate the mean negative log-probability over all completion tokens of the step, on all ranks.

    Where the rules say what may stand in a token's place, `allowed_coef` times -log of the sum of p over all that may
    is added: the token's log-probability among those, less that among all. Both are divided by the number of trained
    tokens.

    Args:
        policy: The policy.
        sequences: This rank's sequences.
        config: Precision, and tokens per micro-batch without a budget.
        budget: Tokens per micro-batch.
        allowed_coef: Weight of what the rules allow.

    Returns:
        Loss in nats per token, without what the rules add, trained tokens and all tokens of the step, and metrics of
        the load-balancing loss and of the rules.

    Source:
        The second loss is the marginal likelihood of a set of labels: Jin and Ghahramani, Learning with Multiple
        Labels, NeurIPS 2002.
    """
    num_trained_tokens, num_tokens = all_reduce_sum(
        sum(sequence.num_trained for sequence in sequences),
        sum(sequence.num_tokens for sequence in sequences),
    )

    def score(micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        hidden_MD = policy.hidden(micro, attention=FIT_ATTENTION)
        logprobs_M, _ = policy.score(micro, hidden_MD=hidden_MD, all_rows=True)
        loss = weighted_sum(-logprobs_M, micro.weights_M, num_trained_tokens)
        if not allowed_coef or micro.allowed is None:
            return loss, {}
        found_R = torch.tensor(micro.allowed.starts).diff().nonzero()[:, 0]
        ruled_R = found_R.to(policy.device)
        part = replace(micro, kept=micro.allowed)
        if micro.split is None:  # ranks that share it compute all tokens
            part = replace(micro, targets_M=micro.targets_M[ruled_R], kept=kept_of(micro.allowed, found_R))
            hidden_MD = hidden_MD[ruled_R]
        among, _ = policy.score(part, hidden_MD=hidden_MD, all_rows=True)
        among_R = among if micro.split is None else among[ruled_R]
        outside = (among_R - logprobs_M[ruled_R]).sum()
        found = {"outside": float(outside.detach()), "ruled": float(len(ruled_R))}
        return loss + allowed_coef * outside / num_trained_tokens, found

    budget = budget or TokenBudget(config.token_budget, policy.model.parameters())

    def cut(tokens: int, own: Sharing | None = None) -> tuple[MicroBatch, ...]:
        with span("pack"):
            return pack(sequences, token_budget=tokens, device=policy.device, sharing=own).micro_batches

    longest = max((sequence.num_tokens for sequence in sequences), default=0)
    coef = config.router_aux_loss_coef
    with gathered(policy.model if coef else None):
        balance = Balance.of(policy, coef, cut, budget, longest, attention=FIT_ATTENTION)
    totals = budget.run(
        lambda tokens: forward_backward(
            cut(tokens, sharing(policy.model)), balance.added_to(score), policy.model
        ),
        longest,
    )
    sum_gradients(policy.model.parameters())
    names = ("loss", "outside", "ruled")
    loss, outside, ruled = all_reduce_sum(*(totals.get(name, 0.0) for name in names))
    metrics = dict(balance.metrics)
    if allowed_coef and ruled:
        metrics["sft/outside_rules"] = outside / ruled
        loss -= allowed_coef * outside / num_trained_tokens
    return loss, int(num_trained_tokens), int(num_tokens), metrics


def validation_loss(policy: Policy, problems: Sequence[Problem], config: OptimConfig) -> float:
    """Return the mean negative log-probability in nats per completion token of held-out demonstrations."""
    sequences = [demonstration(policy, problems[index]) for index in shard(len(problems))]
    batch = pack(sequences, token_budget=config.token_budget, device=policy.device)
    total = 0.0
    with torch.no_grad():
        for micro in batch.micro_batches:
            logprobs_M, _ = policy.score(micro, attention=FIT_ATTENTION, all_rows=True)
            total -= float(logprobs_M.double().sum())
    total, count = all_reduce_sum(total, batch.num_trained_tokens)
    return total / max(count, 1.0)


def plan(config: SFTConfig) -> str:
    """Describe the work without doing it."""
    return align(
        "batch of one step",
        {
            "demonstrations": config.batch_size,
            "tokens per micro-batch, at most": config.optim.token_budget,
            "optimizer steps": f"{config.num_steps:,}, one per batch",
            "demonstrations in all": config.batch_size * config.num_steps,
            "validation": f"{config.validation_problems:,} problems every {config.validate_every:,} steps",
        },
    )


def main(config: SFTConfig, *, resume: Resume = False) -> None:
    """Run the training, write its folder and its report."""
    train(config, resume=resume)
    finish(config)


def check(config: SFTConfig, resume: Resume) -> None:
    """Find what a run would stop at before its first step; loads no weights and creates nothing.

    Raises:
        UserError: As the run would.
    """
    begin(config)
    policy, task, problems = load_sft(resolve_precision(config), weights=False)
    environment_for(policy.schema, task)
    learnt = demonstrations_of(config, policy, problems)
    validation_rows(config, policy, task)
    end_check(config, [*told_of(task, len(learnt.problems)), *learnt.notes], resume=resume)


def validation_rows(config: SFTConfig, policy: Policy, task: Task) -> list[Problem]:
    """Return the rows of the dev split whose loss is measured."""
    if not config.validation_problems:
        return []
    rows = take_problems(task, "dev", config.validation_problems)
    return demonstrate(policy, rows, turns=config.turns, too_long=config.too_long).problems


@watched()
def train(config: SFTConfig, *, resume: Resume = False, on_step: OnStep | None = None) -> Policy:
    """Run the training, write its run folder (without a report) and return the trained policy.

    Args:
        config: The run's settings.
        resume: Resume from a checkpoint.
        on_step: Called after each step.

    Raises:
        UserError: If inputs are inconsistent, or the run cannot resume.
    """
    tracking = begin(config, watch=True, resume=resume)
    config = resolve_precision(config)
    policy, task, problems = load_sft(config)
    environment_for(policy.schema, task)  # fails here, before anything is created, if a tool is missing
    learnt = demonstrations_of(config, policy, problems)
    kept = learnt.problems
    held_out = validation_rows(config, policy, task)
    notes = [*learnt.notes, *learn_ends(policy, learnt.end_ids)]
    open_folder(config, resume=resume)
    write_origin(config, policy, kept, task, held_out)
    encoded: dict[tuple[int, bool], TrainingSequence] = {}

    def learnt_of(epoch: int, problem: Problem) -> TrainingSequence:
        # Two conversations may begin alike, and have one uid; the objects in `kept` live as long as the cache.
        key = id(problem), is_empty(config, epoch, problem)
        sequence = encoded.get(key) or encode(config, policy, task, [(epoch, problem)])[0]
        if len(encoded) < CACHED_DEMONSTRATIONS:
            encoded[key] = sequence
        return sequence

    def train_batch(drawn: Sequence[tuple[int, Problem]], budget: TokenBudget) -> StepResult:
        with span("pack"):
            rows = [learnt_of(*item) for item in drawn]
        found = train_step(policy, rows, config.optim, budget, allowed_coef=config.allowed_coef)
        return StepResult(*found, batch=rows)

    def validate() -> dict[str, float]:
        return {"sft/validation_loss": validation_loss(policy, held_out, config.optim)}

    run = Run(
        "sft",
        config,
        policy,
        tracking,
        best="sft/validation_loss",
        headline=("sft/loss", "sft/validation_loss", "sft/lr", "sft/tokens_per_second"),
    )
    fit = Fit(
        run,
        config,
        policy,
        train_batch,
        validate if held_out else None,
        longest=lambda: learnt.longest,
        on_step=on_step,
    )
    if resume:
        fit.restore(resume)
    left_out = learnt.num_left_out
    if left_out:
        notes.insert(0, f"{left_out} of {len(problems)} demonstrations do not fit the context; skipped")
    with tracking:
        fit.train(data_order(task, kept, config.seed), title=f"sft {task.name}", notes=notes)
    run.write_summary(
        {"train_problems": len(kept), "left_out": left_out, **question_of(task, held_out or kept)}
    )
    return policy
