"""The loop of every program that trains on fixed data: draw, step, validate, save, and resume exactly."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from whet.checkpoint import commit_folder, load_step, open_run, save_step
from whet.config import dump_yaml
from whet.distributed import barrier, rank, shard
from whet.generate.policy import Policy, PolicyConfig
from whet.model.attention import AttentionKind
from whet.model.weights import load_model
from whet.telemetry.display import Display, open_display
from whet.telemetry.environment import write_environment
from whet.telemetry.hardware import HardwareMonitor, step_metrics
from whet.telemetry.health import health_warnings
from whet.telemetry.log import RunLog, read_metrics
from whet.telemetry.provenance import write_provenance
from whet.telemetry.report import write_report
from whet.telemetry.trackers import TrackConfig
from whet.telemetry.tracking import Tracking
from whet.train.order import EpochOrder, MixtureOrder
from whet.train.step import OptimConfig, Optimizer, learning_rate, parameter_dtype
from whet.types import Problem, UserError

Item = TypeVar("Item")

# The data is fixed while it is trained on, so nothing has to agree with a sampler: the fused kernel is several times
# faster.
FIT_ATTENTION: AttentionKind = "fast"


class FitConfig(Protocol):
    """What the loop reads of a program's config (a dataclass)."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def out(self) -> str:
        """Run folder."""
        ...

    @property
    def policy(self) -> PolicyConfig:
        """The model that it starts from."""
        ...

    @property
    def optim(self) -> OptimConfig:
        """Optimizer, schedule and precision."""
        ...

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        ...

    @property
    def batch_size(self) -> int:
        """Items per step, over all ranks."""
        ...

    @property
    def validate_every(self) -> int:
        """Steps between validations."""
        ...

    @property
    def save_every(self) -> int:
        """Steps between checkpoints."""
        ...

    @property
    def track(self) -> TrackConfig:
        """Experiment trackers."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step function backpropagated, over all ranks.

    Attributes:
        loss: Value of the loss.
        num_trained_tokens: Tokens that the loss saw.
        num_tokens: Tokens that the model read.
        metrics: Further metrics by name.
    """

    loss: float
    num_trained_tokens: int
    num_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)


def open_tracking(config: FitConfig) -> Tracking:
    """Load the trackers of a run before anything else is done: a missing package is said at once."""
    return Tracking(config.track, Path(config.out), enabled=rank() == 0)


def open_folder(config: FitConfig, *, resume: bool) -> Path:
    """Make the run folder or check that it may go on; return it once all ranks can use it."""
    folder = Path(config.out)
    if rank() == 0:
        open_run(folder, dump_yaml(config), resume=resume)
        write_environment(folder)
    barrier()
    return folder


def write_origin(config: FitConfig, problems: Iterable[Problem]) -> None:
    """Write provenance.json: the run's id, and hashes of everything that it depends on."""
    if rank() == 0:
        write_provenance(
            Path(config.out),
            base=config.policy.init,
            adapter=config.policy.adapter,
            config_yaml=dump_yaml(config),
            problems=problems,
        )


def finish(config: FitConfig) -> None:
    """Write the report and say where everything is."""
    folder = Path(config.out)
    if rank() == 0:
        write_report(folder)
        print(f"done: {folder}  (checkpoint: {folder / 'checkpoints'}, report: {folder / 'report.md'})")


class Fit(Generic[Item]):
    """One run of optimizer steps: what a checkpoint holds, and how it goes on.

    Args:
        stage: Program, the first part of its metrics' names.
        config: Its settings.
        policy: The policy that is trained.
        tracking: The run's trackers, opened and closed by the caller.
        train_batch: Backpropagates this rank's items of a step, given as (epoch, item).
        validate: Measures on held-out data; None for no validation.
        best: Metric of `validate` by which checkpoints/best is kept.
        higher_is_better: Whether the best is the highest.
        headline: Metrics shown while it runs.

    Attributes:
        step: Optimizer steps done.
    """

    def __init__(
        self,
        stage: str,
        config: FitConfig,
        policy: Policy,
        tracking: Tracking,
        train_batch: Callable[[Sequence[tuple[int, Item]]], StepResult],
        validate: Callable[[], dict[str, float]] | None,
        *,
        best: str,
        higher_is_better: bool = False,
        headline: tuple[str, ...],
    ) -> None:
        self.step = 0
        self._stage, self._config, self._policy = stage, config, policy
        self._train_batch, self._validate, self._listener = train_batch, validate, tracking.put
        self._best_name, self._sign = best, -1.0 if higher_is_better else 1.0
        self._headline = headline
        self._folder = Path(config.out)
        self._optimizer = Optimizer(policy.model, config.optim)
        self._tokens = 0
        self._best: float | None = None
        self._last: dict[str, float] = {}
        self._history: list[dict[str, float]] = []

    def restore(self) -> None:
        """Go on from the newest checkpoint, where there is one."""
        found = load_step(self._folder)
        if found is None:
            return
        model_folder, tensors, state = found
        model, _ = load_model(model_folder, dtype=parameter_dtype(self._config.optim.precision))
        self._policy.model.load_state_dict(model.state_dict())
        self._optimizer.load_tensors(tensors)
        self.step, self._tokens = int(state["step"]), int(state["tokens"])
        self._best, self._last = state["best"], dict(state["last"])
        self._history = [
            row
            for row in read_metrics(self._folder)
            if row.get("stage") == self._stage and row["step"] <= self.step
        ]

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
        with (
            RunLog(self._folder, resume_step=self.step, enabled=is_main, listener=self._listener) as log,
            open_display(title, self._config.num_steps, self._headline, enabled=is_main) as display,
            HardwareMonitor() as monitor,
        ):
            for note in notes:
                display.note(note)
            if opening and not self._is_logged(start, opening):
                log.write_metrics(self._stage, start, opening)
                self._last |= opening
            while self.step < end:
                self._advance(order, end, log, display, monitor)

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
    ) -> None:
        """Do one optimizer step, and validate and save where due."""
        config, stage = self._config, self._stage
        began = time.monotonic()
        drawn = order.next(config.batch_size)
        result = self._train_batch([drawn[index] for index in shard(len(drawn))])
        lr = learning_rate(config.optim, self.step, config.num_steps)
        norm = self._optimizer.step(lr)
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
        if self._validate is not None and (self.step % config.validate_every == 0 or self.step == end):
            values |= self._validate()
        self._last |= values
        log.write_metrics(stage, self.step, values)
        for warning in health_warnings(stage, values, self._history):
            display.note(warning, warning=True)
        self._history.append(values)
        display.update(self.step, values)
        if not math.isfinite(result.loss) or not math.isfinite(norm):
            raise UserError(
                f"step {self.step}: loss {result.loss}, gradient norm {norm}: expected finite; lower optim.lr or check "
                "the data"
            )
        if rank() == 0:
            self._save(order.cursor, values, is_due=self.step % config.save_every == 0 or self.step == end)

    def _save(self, cursor: int, values: Mapping[str, float], *, is_due: bool) -> None:
        """Keep the best policy by validation, and a checkpoint where due."""
        score = values.get(self._best_name, math.nan)
        if math.isfinite(score) and (self._best is None or self._sign * (score - self._best) < 0):
            self._best = score
            with commit_folder(self._folder / "checkpoints" / "best") as temporary:
                self._policy.save(temporary)
        if is_due:
            state = {"cursor": cursor, "tokens": self._tokens, "best": self._best, "last": self._last}
            save_step(
                self._folder,
                self.step,
                write_model=self._policy.save,
                tensors=self._optimizer.tensors(),
                state=state,
            )

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
