"""`whet sft`: fine-tune a model on worked solutions; only completion tokens are trained."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from whet.algo.losses import weighted_sum
from whet.algo.packing import TrainingSequence, pack
from whet.checkpoint import commit_folder, load_step, open_run, save_step
from whet.config import align, dump_yaml
from whet.distributed import all_reduce_sum, barrier, rank, shard, sum_gradients
from whet.eval.evaluate import take_problems
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import sequence_seed
from whet.generate.scoring import score_micro_batch
from whet.model.attention import AttentionKind
from whet.model.weights import load_model
from whet.tasks.base import TaskConfig, load_task
from whet.telemetry.display import Display, open_display
from whet.telemetry.environment import write_environment
from whet.telemetry.health import health_warnings
from whet.telemetry.log import RunLog, read_metrics
from whet.telemetry.report import write_report
from whet.train.order import EpochOrder
from whet.train.step import (
    OptimConfig,
    Optimizer,
    autocast_dtype,
    forward_backward,
    learning_rate,
    parameter_dtype,
    prepare_model,
)
from whet.types import MicroBatch, Problem, UserError

# Nothing is sampled here, so nothing has to agree with a sampler: the fused kernel is several times faster.
SFT_ATTENTION: AttentionKind = "fast"
CACHED_DEMONSTRATIONS = 65_536


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Supervised fine-tuning on worked solutions."""

    out: str
    """Run folder to make."""
    policy: PolicyConfig
    """The model to start from."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """The problems with worked solutions."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer, schedule and precision."""
    num_steps: int = 300
    """Optimizer steps."""
    batch_size: int = 32
    """Sequences per optimizer step, over all ranks."""
    empty_thinking_share: float = 0.0
    """Share of demonstrations, drawn anew each epoch, whose thinking is left empty (the answer comes at once)."""
    validation_problems: int = 256
    """Problems of the dev split whose loss is measured; 0 for none."""
    validate_every: int = 100
    """Steps between validations (one at the end always); the best is kept as checkpoints/best."""
    save_every: int = 500
    """Steps between checkpoints (one at the end always)."""
    seed: int = 0
    """Seed of weights, data order and empty scratch-pads."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "validate_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 1 or more")
        if not 0 <= self.empty_thinking_share <= 1:
            raise ValueError(f"empty_thinking_share = {self.empty_thinking_share}: expected 0 to 1")


def demonstration(policy: Policy, problem: Problem, *, empty: bool = False) -> TrainingSequence:
    """Turn a problem and its worked solution into a training sequence."""
    return TrainingSequence(
        prompt_ids=policy.prompt_ids(problem),
        completion_ids=policy.solution_ids(problem, thinking="" if empty else None),
    )


def fitting(policy: Policy, problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems whose demonstration fits in the context: answers are never cut off silently."""
    room = policy.model.config.max_positions
    return [problem for problem in problems if demonstration(policy, problem).num_tokens <= room]


def is_empty(config: SFTConfig, epoch: int, problem: Problem) -> bool:
    """Say whether a problem's scratch-pad is left empty in an epoch."""
    return sequence_seed("empty", config.seed, epoch, problem.uid) / 2**63 < config.empty_thinking_share


def train_step(
    policy: Policy, sequences: Sequence[TrainingSequence], config: OptimConfig
) -> tuple[float, int, int]:
    """Backpropagate the mean negative log-probability over all completion tokens of the step, on all ranks.

    Returns:
        Loss in nats per token, trained tokens and all tokens of the step.
    """
    batch = pack(sequences, token_budget=config.token_budget, device=policy.device)
    read = sum(sequence.num_tokens for sequence in sequences)
    num_trained_tokens, num_tokens = all_reduce_sum(batch.num_trained_tokens, read)

    def score(micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        logprobs_M, _ = score_micro_batch(
            policy.model, micro, autocast=autocast_dtype(config.precision), attention=SFT_ATTENTION
        )
        return weighted_sum(-logprobs_M, micro.weights_M, num_trained_tokens), {}

    totals = forward_backward(batch.micro_batches, score)
    sum_gradients(policy.model.parameters())
    (loss,) = all_reduce_sum(totals["loss"])
    return loss, int(num_trained_tokens), int(num_tokens)


def validation_loss(policy: Policy, problems: Sequence[Problem], config: OptimConfig) -> float:
    """Return the mean negative log-probability in nats per completion token of held-out demonstrations."""
    sequences = [demonstration(policy, problems[index]) for index in shard(len(problems))]
    batch = pack(sequences, token_budget=config.token_budget, device=policy.device)
    total = 0.0
    with torch.no_grad():
        for micro in batch.micro_batches:
            logprobs_M, _ = score_micro_batch(
                policy.model, micro, autocast=autocast_dtype(config.precision), attention=SFT_ATTENTION
            )
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


def main(config: SFTConfig, *, resume: bool = False) -> None:
    """Run the training, write its folder and its report."""
    folder = Path(config.out)
    train(config, resume=resume)
    if rank() == 0:
        write_report(folder)
        print(f"done: {folder}  (checkpoint: {folder / 'checkpoints'}, report: {folder / 'report.md'})")


def train(config: SFTConfig, *, resume: bool = False) -> Policy:
    """Run the training, write its run folder (without a report) and return the trained policy.

    Raises:
        UserError: If inputs do not fit together, or the run cannot go on.
    """
    folder = Path(config.out)
    task = load_task(config.task)
    policy = load_policy(config.policy, seed=config.seed, dtype=parameter_dtype(config.optim.precision))
    prepare_model(policy.model, config.optim)
    problems = task.problems("train")
    kept = fitting(policy, problems)
    if not kept:
        raise UserError(f"no demonstration fits in the context of {policy.model.config.max_positions} tokens")
    held_out = (
        fitting(policy, take_problems(task, "dev", config.validation_problems))
        if config.validation_problems
        else []
    )
    if rank() == 0:
        open_run(folder, dump_yaml(config), resume=resume)
        write_environment(folder)
    barrier()
    run = _Run(config, policy, EpochOrder(kept, config.seed), held_out)
    start = run.restore(folder) if resume else 0
    title = f"sft {task.name}"
    headline = ("sft/loss", "sft/validation_loss", "sft/lr", "sft/tokens_per_second")
    with (
        RunLog(folder, resume_step=start if resume else None, enabled=rank() == 0) as log,
        open_display(title, config.num_steps, headline, enabled=rank() == 0) as display,
    ):
        if len(kept) < len(problems):
            left_out = len(problems) - len(kept)
            display.note(f"{left_out} of {len(problems)} demonstrations do not fit the context; left out")
        for step in range(start, config.num_steps):
            run.advance(step, folder, log, display)
    if rank() == 0:
        run.write_summary(folder, {"train_problems": len(kept), "left_out": len(problems) - len(kept)})
    return policy


class _Run:
    """State of one fine-tuning run: what a checkpoint holds."""

    def __init__(
        self, config: SFTConfig, policy: Policy, order: EpochOrder[Problem], held_out: Sequence[Problem]
    ) -> None:
        self.config = config
        self.policy = policy
        self.order = order
        self.held_out = held_out
        self.optimizer = Optimizer(policy.model, config.optim)
        self.tokens = 0
        self.best = math.inf
        self.last: dict[str, float] = {}
        self.history: list[dict[str, float]] = []
        self._encoded: dict[tuple[str, bool], TrainingSequence] = {}

    def encode(self, problem: Problem, empty: bool) -> TrainingSequence:
        """Return a demonstration's tokens, kept for later epochs while there is room."""
        key = (problem.uid, empty)
        if key in self._encoded:
            return self._encoded[key]
        sequence = demonstration(self.policy, problem, empty=empty)
        if len(self._encoded) < CACHED_DEMONSTRATIONS:
            self._encoded[key] = sequence
        return sequence

    def restore(self, folder: Path) -> int:
        """Go on from the newest checkpoint; return the steps that are done."""
        found = load_step(folder)
        if found is None:
            return 0
        model_folder, tensors, state = found
        model, _ = load_model(model_folder, dtype=parameter_dtype(self.config.optim.precision))
        self.policy.model.load_state_dict(model.state_dict())
        self.optimizer.load_tensors(tensors)
        self.order.cursor, self.tokens = int(state["cursor"]), int(state["tokens"])
        self.best = math.inf if state["best"] is None else float(state["best"])
        self.last = dict(state["last"])
        self.history = [
            row for row in read_metrics(folder) if row["stage"] == "sft" and row["step"] <= state["step"]
        ]
        return int(state["step"])

    def advance(self, step: int, folder: Path, log: RunLog, display: Display) -> None:
        """Do one optimizer step, and validate and save where due."""
        config = self.config
        began = time.perf_counter()
        drawn = self.order.next(config.batch_size)
        mine = [drawn[index] for index in shard(len(drawn))]
        sequences = [self.encode(problem, is_empty(config, epoch, problem)) for epoch, problem in mine]
        loss, trained, read = train_step(self.policy, sequences, config.optim)
        lr = learning_rate(config.optim, step, config.num_steps)
        norm = self.optimizer.step(lr)
        self.tokens += trained
        values = {
            "sft/loss": loss,
            "sft/lr": lr,
            "sft/grad_norm": norm,
            "sft/tokens": float(self.tokens),
            "sft/epoch": self.order.epochs,
            "sft/tokens_per_second": read / (time.perf_counter() - began),
        }
        done = step + 1
        is_last = done == config.num_steps
        if self.held_out and (done % config.validate_every == 0 or is_last):
            values["sft/validation_loss"] = validation_loss(self.policy, self.held_out, config.optim)
        self.last |= values
        log.write_metrics("sft", done, values)
        for warning in health_warnings("sft", values, self.history):
            display.note(warning, warning=True)
        self.history.append(values)
        display.update(done, values)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise UserError(
                f"step {done}: loss {loss}, gradient norm {norm}: expected finite; lower optim.lr or check the data"
            )
        if values.get("sft/validation_loss", math.inf) < self.best and rank() == 0:
            self.best = values["sft/validation_loss"]
            with commit_folder(folder / "checkpoints" / "best") as temporary:
                self.policy.save(temporary)
        if (done % config.save_every == 0 or is_last) and rank() == 0:
            self.save(folder, done)

    def save(self, folder: Path, step: int) -> None:
        """Commit a checkpoint."""
        state = {
            "cursor": self.order.cursor,
            "tokens": self.tokens,
            "best": self.best if math.isfinite(self.best) else None,
            "last": self.last,
        }
        save_step(folder, step, write_model=self.policy.save, tensors=self.optimizer.tensors(), state=state)

    def write_summary(self, folder: Path, extra: dict[str, float]) -> None:
        """Write summary.json."""
        content = {**{name.removeprefix("sft/"): value for name, value in self.last.items()}, **extra}
        if math.isfinite(self.best):
            content["best_validation_loss"] = self.best
        (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
