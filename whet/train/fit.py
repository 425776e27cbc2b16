"""The steps of every program that trains on fixed data: draw, update, validate, log, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from whet.algo.packing import TrainingSequence
from whet.generate.policy import Policy
from whet.model.attention import AttentionKind
from whet.ranks.collectives import shard
from whet.ranks.context import sharing
from whet.ranks.fsdp import gathered
from whet.storage.checkpoint import Resume
from whet.telemetry.hardware import step_metrics
from whet.telemetry.log import read_metrics
from whet.telemetry.spans import span
from whet.train.data.pairs import Pair
from whet.train.optim.safety import TokenBudget, rehearse
from whet.train.record import Data, fit_batch
from whet.train.rollout.order import EpochOrder, MixtureOrder
from whet.train.run import Held, Run
from whet.train.session import OnStep, RunConfig

Item = TypeVar("Item")

# The data is fixed while it is trained on, so nothing has to agree with a sampler: the fused kernel is several times
# faster.
FIT_ATTENTION: AttentionKind = "fast"


class FitConfig(RunConfig, Protocol):
    """What the loop reads of a program's config (a dataclass)."""

    @property
    def batch_size(self) -> int:
        """Items per step, over all ranks."""
        ...

    @property
    def validate_every(self) -> int:
        """Steps between validations."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step function backpropagated, over all ranks.

    Attributes:
        loss: Value of the loss.
        num_trained_tokens: Tokens that the loss saw.
        num_tokens: Tokens that the model read.
        metrics: Further metrics by name.
        batch: What was backpropagated of each of this rank's items.
    """

    loss: float
    num_trained_tokens: int
    num_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    batch: Sequence[TrainingSequence | Pair] = ()


class Fit(Generic[Item]):
    """The steps of a program that trains on fixed data.

    Args:
        run: The run around them.
        config: Its settings.
        policy: The policy that is trained.
        train_batch: Backpropagates this rank's items of a step, given as (epoch, item), in micro-batches of a budget.
        validate: Measures on held-out data; None for no validation.
        longest: Returns the tokens of the longest sequence there is.
        on_step: Called after each step.
    """

    def __init__(
        self,
        run: Run,
        config: FitConfig,
        policy: Policy,
        train_batch: Callable[[Sequence[tuple[int, Item]], TokenBudget], StepResult],
        validate: Callable[[], dict[str, float]] | None,
        *,
        longest: Callable[[], int],
        on_step: OnStep | None = None,
    ) -> None:
        self._run, self._config, self._policy = run, config, policy
        self._train_batch, self._validate = train_batch, validate
        self._longest, self._on_step = longest, on_step
        self._budget = TokenBudget(
            config.optim.token_budget,
            policy.model.parameters(),
            is_shared=sharing(policy.model) is not None,
        )
        self._tokens = 0

    def restore(self, resume: Resume) -> None:
        """Go on from a checkpoint, where there is one."""
        held = self._run.restore(resume)
        if held is not None:
            _, state = held
            self._tokens = int(state["tokens"])
            self._budget.tokens = int(state.get("token_budget", self._budget.tokens))

    def train(
        self,
        order: EpochOrder[Item] | MixtureOrder[Item],
        *,
        title: str,
        start: int = 0,
        end: int | None = None,
        notes: Sequence[str] = (),
        opening: Mapping[str, float] | None = None,
    ) -> None:
        """Train up to a step, from where the run is.

        Args:
            order: The data of these steps, from its beginning.
            title: Title of the display.
            start: Step at which `order` begins; what is done of it is skipped.
            end: Step to end at; default the whole run's.
            notes: Lines to print first.
            opening: Metrics of the state before `start`; logged once.

        Raises:
            UserError: If loss or gradient stop being finite.
        """
        run, config = self._run, self._config
        order.cursor = (run.step - start) * config.batch_size
        with run.open(title, notes=notes):
            if config.safety.rehearses(self._policy.device):
                run.beat("rehearse")
                rehearse(self._policy, self._budget, self._longest())
            if opening:
                run.log_opening(start, opening, is_logged=self._is_logged(start, opening))
            for _ in run.steps(end):
                with span("step"):
                    values = self._update(order)
                    if self._validate is not None and run.is_due(config.validate_every):
                        run.beat("validate")
                        with span("validate"), gathered(self._policy.model):
                            values |= self._validate()
                    run.log_step(values)
                    done = run.end_step(partial(self._held, order.cursor))
                if self._on_step is not None:
                    self._on_step(done)

    def _is_logged(self, step: int, values: Mapping[str, float]) -> bool:
        rows = read_metrics(Path(self._config.out))
        return any(row["step"] == step and values.keys() <= row.keys() for row in rows)

    def _update(self, order: EpochOrder[Item] | MixtureOrder[Item]) -> dict[str, float]:
        """Draw a batch, train on it, and return the step's metrics."""
        run, config, stage = self._run, self._config, self._run.stage
        began = time.monotonic()
        run.beat("train")
        order.look = run.session.look
        with run.before_update(partial(self._held, order.cursor)):
            drawn = order.next(config.batch_size)
        mine = [drawn[index] for index in shard(len(drawn))]
        lr = run.lr
        result = self._train_batch(mine, self._budget)
        run.begin_record(lambda: self._described(mine, result))
        norm = run.optimizer.step(lr, loss=result.loss)
        self._tokens += result.num_trained_tokens
        outcome = {
            f"{stage}/loss": result.loss,
            f"{stage}/lr": lr,
            f"{stage}/grad_norm": norm,
            **result.metrics,
        }
        values = {
            **outcome,
            f"{stage}/tokens": float(self._tokens),
            f"{stage}/epoch": order.epochs,
            f"{stage}/tokens_per_second": result.num_tokens / (time.monotonic() - began),
            **step_metrics(run.monitor, stage, began, self._policy.device),
        }
        return values | run.end_update(outcome, lambda: ({}, {}))

    def _described(self, drawn: Sequence[tuple[int, Item]], result: StepResult) -> Data:
        """Describe a step's batch for its record."""
        return fit_batch(
            drawn,
            result.batch,
            self._policy,
            self._config.optim,
            token_budget=self._budget.tokens,
            attention=FIT_ATTENTION,
        )

    def _held(self, cursor: int) -> Held:
        return {}, {"cursor": cursor, "tokens": self._tokens, "token_budget": self._budget.tokens}
