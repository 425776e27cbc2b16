"""The loop of every program that trains on fixed data: draw, step, validate, save, and resume exactly."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from whet.algo.packing import TrainingSequence
from whet.generate.policy import Policy
from whet.model.attention import AttentionKind
from whet.ranks.collectives import rank, shard
from whet.storage.checkpoint import Resume
from whet.telemetry.display import Display, open_display
from whet.telemetry.hardware import HardwareMonitor, step_metrics
from whet.telemetry.health import HISTORY_ROWS, health_warnings, past_rows
from whet.telemetry.log import RunLog, read_metrics
from whet.telemetry.spans import span, spanned
from whet.telemetry.trackers import Tracking
from whet.train.data.pairs import Pair
from whet.train.optim.safety import TokenBudget, rehearse
from whet.train.optim.step import Optimizer, learning_rate
from whet.train.record import Data, Kind, Recorder, fit_batch
from whet.train.rollout.order import EpochOrder, MixtureOrder
from whet.train.session import OnStep, RunConfig, Session, Skipped, TrainStep, restore_model

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
    """One run of optimizer steps: what a checkpoint holds, and how it goes on.

    Args:
        stage: Program, the first part of its metrics' names.
        config: Its settings.
        policy: The policy that is trained.
        tracking: The run's trackers, opened and closed by the caller.
        train_batch: Backpropagates this rank's items of a step, given as (epoch, item), in micro-batches of a budget.
        validate: Measures on held-out data; None for no validation.
        best: Metric of `validate` by which checkpoints/best is kept.
        higher_is_better: Whether the best is the highest.
        headline: Metrics shown while it runs.
        longest: Returns the tokens of the longest sequence there is.
        on_step: Called after each step.

    Attributes:
        step: Optimizer steps done.
    """

    def __init__(
        self,
        stage: Kind,
        config: FitConfig,
        policy: Policy,
        tracking: Tracking,
        train_batch: Callable[[Sequence[tuple[int, Item]], TokenBudget], StepResult],
        validate: Callable[[], dict[str, float]] | None,
        *,
        best: str,
        higher_is_better: bool = False,
        headline: tuple[str, ...],
        longest: Callable[[], int],
        on_step: OnStep | None = None,
    ) -> None:
        self.step = 0
        self._stage, self._config, self._policy = stage, config, policy
        self._train_batch, self._validate, self._listener = train_batch, validate, tracking.put
        self._best_name, self._sign = best, -1.0 if higher_is_better else 1.0
        self._headline, self._longest, self._on_step = headline, longest, on_step
        self._folder = Path(config.out)
        self._skipped = Skipped(config.safety.max_skipped)
        self._budget = TokenBudget(config.optim.token_budget, policy.model.parameters())
        self._optimizer = Optimizer(policy.model, config.optim)
        moves_early = config.optim.update_in_backward
        self._recorder = Recorder(self._folder, stage, policy, enabled=not moves_early)
        self._tokens = 0
        self._best: float | None = None
        self._last: dict[str, float] = {}
        self._history: list[dict[str, float]] = []

    def restore(self, resume: Resume) -> None:
        """Go on from a checkpoint, where there is one."""
        found = restore_model(self._config, self._policy, resume)
        if found is None:
            return
        state = found.state
        self._optimizer.load_tensors(found.read(self._optimizer.tensors()))
        self.step, self._tokens = int(state["step"]), int(state["tokens"])
        self._best, self._last = state["best"], dict(state["last"])
        self._skipped.count = int(state.get("skipped", 0))
        self._budget.tokens = int(state.get("token_budget", self._budget.tokens))
        self._history = past_rows(self._folder, self._stage, self.step)[-HISTORY_ROWS:]

    def run(
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
        end = self._config.num_steps if end is None else end
        order.cursor = (self.step - start) * self._config.batch_size
        is_main = rank() == 0
        session = Session(self._stage, self._config, self._policy)
        with (
            session,
            RunLog(self._folder, resume_step=self.step, enabled=is_main, listener=self._listener) as log,
            open_display(title, self._config.num_steps, self._headline, enabled=is_main) as display,
            HardwareMonitor() as monitor,
        ):
            for note in notes:
                display.note(note)
            if self._config.safety.rehearses(self._policy.device):
                session.beat("rehearse", self.step)
                rehearse(self._policy, self._budget, self._longest())
            if opening and not self._is_logged(start, opening):
                log.write_metrics(self._stage, start, opening)
                self._last |= opening
            while self.step < end:
                with span("step"):
                    self._advance(order, end, log, display, monitor, session)

    def _is_logged(self, step: int, values: Mapping[str, float]) -> bool:
        rows = read_metrics(self._folder)
        return any(row["step"] == step and values.keys() <= row.keys() for row in rows)

    def _advance(
        self,
        order: EpochOrder[Item] | MixtureOrder[Item],
        end: int,
        log: RunLog,
        display: Display,
        monitor: HardwareMonitor,
        session: Session,
    ) -> None:
        """Do one optimizer step, and validate and save where due."""
        config, stage = self._config, self._stage
        began = time.monotonic()
        session.beat("train", self.step)
        drawn = order.next(config.batch_size)
        mine = [drawn[index] for index in shard(len(drawn))]
        lr = learning_rate(config.optim, self.step, config.num_steps)
        self._optimizer.begin(lr)
        result = self._train_batch(mine, self._budget)
        self._recorder.begin(lambda: self._described(mine, result))
        norm = self._optimizer.step(lr, loss=result.loss)
        self._tokens += result.num_trained_tokens
        values = {
            f"{stage}/loss": result.loss,
            f"{stage}/lr": lr,
            f"{stage}/grad_norm": norm,
            f"{stage}/tokens": float(self._tokens),
            f"{stage}/epoch": order.epochs,
            f"{stage}/tokens_per_second": result.num_tokens / (time.monotonic() - began),
            **result.metrics,
            **step_metrics(monitor, stage, began, self._policy.device),
        }
        self.step += 1
        skipped = self._skipped.count_step({"loss": result.loss, "gradient norm": norm})
        if skipped:
            values[f"{stage}/skipped"] = float(skipped)
        outcome = {
            f"{stage}/loss": result.loss,
            f"{stage}/lr": lr,
            f"{stage}/grad_norm": norm,
            **result.metrics,
        }
        self._recorder.end(
            self.step, outcome, lambda: (self._optimizer.tensors(), {}), is_skipped=bool(skipped)
        )
        if self._validate is not None and (self.step % config.validate_every == 0 or self.step == end):
            session.beat("validate", self.step)
            with span("validate"):
                values |= self._validate()
        self._last |= values
        with span("log"):
            log.write_metrics(stage, self.step, values)
        for warning in health_warnings(stage, values, self._history):
            display.note(warning, warning=True)
        self._history = [*self._history, values][-HISTORY_ROWS:]
        display.update(self.step, values)
        if skipped:
            display.note(self._skipped.tell(self.step, "lower optim.lr, or check the data"), warning=True)
        is_due = session.is_due(self.step) or self.step == end
        self._save(order.cursor, values, session, is_due=is_due)
        session.stop_if_asked(self.step)
        if self._on_step is not None:
            self._on_step(TrainStep(self.step, config.num_steps, values))

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

    @spanned("save")
    def _save(self, cursor: int, values: Mapping[str, float], session: Session, *, is_due: bool) -> None:
        """Keep the best policy by validation, and a checkpoint where due."""
        score = values.get(self._best_name, math.nan)
        is_best = math.isfinite(score) and (self._best is None or self._sign * (score - self._best) < 0)
        if is_best:
            self._best = score
        state = {
            "cursor": cursor,
            "tokens": self._tokens,
            "best": self._best,
            "last": self._last,
            "skipped": self._skipped.count,
            "token_budget": self._budget.tokens,
        }
        training = (self._optimizer.tensors(), state) if is_due else None
        session.save(self.step, is_best=is_best, training=training)
        self._recorder.is_due |= is_due

    def write_summary(self, extra: Mapping[str, float]) -> None:
        """Write summary.json: the last value of every metric, `extra`, and the best validation."""
        if rank() != 0:
            return
        content = {
            **{name.removeprefix(f"{self._stage}/"): value for name, value in self._last.items()},
            **extra,
        }
        if self._best is not None:
            content[f"best_{self._best_name.rpartition('/')[2]}"] = self._best
        (self._folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
