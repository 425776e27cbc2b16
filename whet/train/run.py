"""One training run around its steps, the same for every program: log, display, records, best policy, checkpoints."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from whet.generate.policy import Policy
from whet.ranks.collectives import rank, world_size
from whet.ranks.fsdp import ParallelConfig
from whet.storage.checkpoint import Resume
from whet.telemetry.display import Display, open_display
from whet.telemetry.hardware import HardwareMonitor
from whet.telemetry.health import HISTORY_ROWS, health_warnings, idle_reason, past_rows
from whet.telemetry.log import RUN_TIME, RunLog, as_number, write_warning
from whet.telemetry.spans import span, spanned
from whet.telemetry.trackers import Tracking
from whet.train.optim.step import Optimizer, learning_rate, shard_layers, warm_up_warning
from whet.train.record import Data, Kind, Recorder
from whet.train.session import (
    Interrupted,
    RunConfig,
    Session,
    Skipped,
    TrainStep,
    restore_model,
    settle,
    write_changes,
)
from whet.types import Group, UserError

Held = tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]
"""What a program holds besides model and optimizer: tensors, and JSON values."""
FINITE = ("loss", "grad_norm", "value_grad_norm")
"""Results of an update that have to be finite, where it has them."""
REMEDY = "lower optim.lr, or check the data"


class Run:
    """One run of optimizer steps: what all programs keep between steps, and how a step ends.

    A step is a list of sentences in its program: `for step in run.steps()`, then `begin_record`, the update,
    `end_update`, `log_step` and `end_step`, in this order. A step is logged before it is saved, so that a checkpoint
    never holds a step that the log lacks.

    Args:
        stage: Program, the first part of its metrics' names.
        config: Its settings.
        policy: The policy that is trained.
        tracking: The run's trackers, opened and closed by the caller.
        best: Metric by which checkpoints/best is kept.
        higher_is_better: Whether the best is the highest.
        headline: Metrics that the display shows.
        records: Whether steps are recorded for `whet replay`.

    Attributes:
        stage: Program, the first part of its metrics' names.
        policy: The policy that is trained.
        step: Steps done.
        last: Last value of every metric.
        optimizer: Moves the policy's weights.
        is_skipped: Whether the last update was left out, since something in it was not finite.
        best: Best value of the metric so far; None before the first.
        session: Signals, heartbeat and checkpoints; while the run is open.
        display: Shows the steps; while the run is open.
        monitor: The machine's sensors; while the run is open.
    """

    session: Session
    display: Display
    monitor: HardwareMonitor
    _log: RunLog

    def __init__(
        self,
        stage: Kind,
        config: RunConfig,
        policy: Policy,
        tracking: Tracking,
        *,
        best: str,
        higher_is_better: bool = False,
        headline: tuple[str, ...],
        records: bool = True,
    ) -> None:
        self.step = 0
        self._was_opened = False
        self.last: dict[str, float] = {}
        self.best: float | None = None
        shard_layers(policy.model, config.parallel)
        self.optimizer = Optimizer(policy.model, config.optim)
        self.stage: Kind = stage
        self.policy = policy
        self._config, self._tracking = config, tracking
        self._best_name, self._sign = best, -1.0 if higher_is_better else 1.0
        self._headline = headline
        self._folder = Path(config.out)
        self._recorder = Recorder(self._folder, stage, policy, enabled=records)
        self._skipped = Skipped(config.safety.max_skipped)
        self._num_overflows = self._num_idle = 0
        self._history: list[dict[str, float]] = []
        self._end = config.num_steps
        self._ran_s = 0.0  # before this start
        self._saved = 0
        self._values: Mapping[str, float] = {}

    @property
    def is_skipped(self) -> bool:
        """Whether the last update was left out, since something in it was not finite."""
        return self._skipped.count > 0 or self._num_overflows > 0

    def restore(self, resume: Resume, tensors: Mapping[str, torch.Tensor] | None = None) -> Held | None:
        """Load the weights, the optimizer and the counters of a checkpoint.

        Args:
            resume: Which checkpoint.
            tensors: The program's own tensors as they are now, by the names under which `end_step` saved them.

        Returns:
            The program's tensors and state as saved; None where there is no checkpoint yet.
        """
        found = restore_model(self._config, self.policy, resume)
        if found is not None:
            self._check_layout(found.state)
        settle(self._config)
        if found is None:
            return None
        saved = found.read(self.optimizer.tensors() | dict(tensors or {}))
        self.optimizer.load_tensors(saved)
        state = found.state
        self.step = self._saved = int(state["step"])
        self.best = None if state["best"] is None else float(state["best"])
        self.last = dict(state["last"])
        self._skipped.count = int(state.get("skipped", 0))
        self._num_idle = int(state.get("idle", 0))
        self._history = past_rows(self._folder, self.stage, self.step)[-HISTORY_ROWS:]
        if self._history:
            self._ran_s = as_number(self._history[-1].get(RUN_TIME)) or 0.0
        return saved, state

    def _check_layout(self, state: Mapping[str, Any]) -> None:
        """Refuse, or warn of, a checkpoint of ranks that held the model in another way.

        Raises:
            UserError: If the run is to be bitwise the same.
        """
        saved, now = state.get("parallel"), asdict(self._config.parallel)
        saved = saved and asdict(ParallelConfig()) | saved  # of a run before there were all of its fields
        sameness = self._config.safety.sameness(self.policy.device)
        if saved in (None, now) or world_size() == 1 or sameness == "off":
            return
        name = next(name for name, value in now.items() if saved.get(name) != value)
        text = f"saved with parallel.{name} = {saved.get(name)}, resumed with {now[name]}: not bitwise the same run"
        if sameness == "strict":
            raise UserError(f"{self._folder}: {text}; continue anyway with --deterministic warn")
        if rank() == 0:
            print(f"whet: warning: {self._folder}: {text}", flush=True)

    @contextmanager
    def open(self, title: str, *, notes: Sequence[str] = (), warnings: Sequence[str] = ()) -> Iterator[None]:
        """Open log and display, take over signals, and begin to watch the machine.

        Args:
            title: Title of the display.
            notes: Lines to print first.
            warnings: Warnings to print after them.
        """
        is_main = rank() == 0
        listener = self._tracking.put
        with (
            RunLog(
                self._folder,
                resume_step=self.step,
                enabled=is_main,
                listener=listener,
                began=self._tracking.began - self._ran_s,
            ) as self._log,
            open_display(
                title, self._config.num_steps, self._headline, enabled=is_main, first_step=self.step
            ) as self.display,
            HardwareMonitor() as self.monitor,
            Session(self.stage, self._config, self.policy) as self.session,
        ):
            self._was_opened = True
            for note in notes:
                self.display.note(note)
            # A run that goes on cannot change what this warns of.
            short = "" if self.step else warm_up_warning(self._config.optim, self._config.num_steps)
            for warning in (*warnings, short):
                if warning:
                    self.warn(warning, step=0)
            yield

    def warn(self, text: str, *, step: int | None = None) -> None:
        """Print a warning, and keep it for the report under a step (default: the newest)."""
        self.display.note(text, warning=True)
        if rank() == 0:
            write_warning(self._folder, self.step if step is None else step, text)

    def steps(self, end: int | None = None) -> Iterator[int]:
        """Yield the number of steps done, until `end` (default: the end of the run); `end_update` counts on.

        Raises:
            Stopped: After a signal, when the step is saved and over.
        """
        self._end = self._config.num_steps if end is None else end
        while self.step < self._end:
            yield self.step
            # Not in `end_step`: whoever follows the steps also gets the one that was saved before the stop.
            self.session.stop_if_asked(self.step)

    @contextmanager
    def before_update(self, held: Callable[[], Held]) -> Iterator[None]:
        """Around the part of a step before the weights move: a signal ends it there.

        Nothing of that part is kept. What is saved, where it is not yet, is the state after the step before.

        Args:
            held: Returns what the program held besides model and optimizer after that step.

        Raises:
            Stopped: After a signal.
        """
        try:
            yield
        except Interrupted:
            if self.step > self._saved:
                self.session.save(self.step, is_best=False, training=self._training(held))
            self.session.stop_if_asked(self.step)

    def beat(self, phase: str, detail: Callable[[], str] | None = None) -> None:
        """Tell heartbeat and display what is done next; `detail` says how far it is."""
        self.session.beat(phase, self.step)
        self.display.begin(phase, detail)

    def is_due(self, every: int) -> bool:
        """Return whether something that is done every so many steps follows the step that was just counted."""
        return self.step % every == 0 or self.step == self._end

    @property
    def lr(self) -> float:
        """Learning rate of the next update: a step without one (no group with a signal, or not finite) is no step of
        the schedule, or a weak start would spend the warm-up without moving."""
        return learning_rate(self._config.optim, self.step - self._num_idle, self._config.num_steps)

    @property
    def progress(self) -> float:
        """Share of the run's steps that are done: 0 at the first step, 1 at the last."""
        return self.step / max(1, self._config.num_steps - 1)

    def begin_record(self, describe: Callable[[], Data]) -> None:
        """Take what the step is trained on into its record, where this step is recorded."""
        self._recorder.begin(describe)

    def end_update(self, outcome: Mapping[str, float], training: Callable[[], Held]) -> dict[str, float]:
        """Count a step whose update is over, and end its record.

        Args:
            outcome: Results of the update as metrics.
            training: Returns what the program holds besides model and optimizer, for the record of a fault.

        Returns:
            Further metrics of the step.
        """
        self.step += 1
        names = (f"{self.stage}/{name}" for name in FINITE)
        metrics: dict[str, float] = {}
        # An overflow of float16's scaled gradients is how the scale is found: neither a fault nor a skip that counts.
        self._num_overflows, self.optimizer.num_overflows = self.optimizer.num_overflows, 0
        if self.optimizer.loss_scale is not None:
            metrics[f"{self.stage}/loss_scale"] = self.optimizer.loss_scale
        if self._num_overflows:
            metrics[f"{self.stage}/overflows"] = float(self._num_overflows)
            names = (f"{self.stage}/{name}" for name in FINITE if name != "grad_norm")
        skipped = self._skipped.count_step({name: outcome[name] for name in names if name in outcome})
        num_idle = self._num_idle

        def held() -> Held:
            tensors, state = training()
            return {**self.optimizer.tensors(), **tensors}, {**state, "idle": num_idle}

        self._recorder.end(self.step, outcome, held, is_skipped=bool(skipped))
        # A critic's warm-up moves the critic alone: those steps count.
        has_update = outcome.get("rl/updates", 1.0) or outcome.get("rl/value_grad_norm", 0.0)
        self._num_idle += self.is_skipped or not has_update
        return metrics | ({f"{self.stage}/skipped": float(skipped)} if skipped else {})

    def log_opening(self, step: int, values: Mapping[str, float], *, is_logged: bool = False) -> None:
        """Log metrics of the state after `step`, before the first step that follows it.

        Args:
            step: The step.
            values: Its metrics.
            is_logged: Whether a run that was killed has logged them; its checkpoint may be from before.
        """
        if not is_logged:
            self._log.write_metrics(self.stage, step, values)
        if self.step == step:
            self.last |= values

    def log_step(self, values: Mapping[str, float], groups: Sequence[Group] | None = None) -> None:
        """Log and show the step that was just counted, with warnings about it.

        Args:
            values: Its metrics.
            groups: This rank's samples of the step; None in a program that samples nothing.

        Raises:
            UserError: If too many steps in a row were not finite.
        """
        peak = f"{self.stage}/peak_memory_gib"
        if peak in values:  # of this process; a resumed run is a new one
            values = {**values, peak: max(values[peak], self.last.get(peak, 0.0))}
        self.last |= values
        self._values = values
        with span("log"):
            self._log.write_metrics(self.stage, self.step, values)
            if groups is not None:  # all ranks write together, also one that has no group
                self._log.write_samples(self.step, groups)
        for warning in health_warnings(self.stage, values, self._history):
            self.warn(warning)
        self._history = [*self._history, {"step": self.step, **values}][-HISTORY_ROWS:]
        self.display.update(self.step, values)
        if self._num_overflows:
            text = f"step {self.step}: gradients overflowed in float16, the update was left out; "
            self.display.note(f"{text}loss scale {self.optimizer.loss_scale:g} from here on")
        if self._skipped.count:
            self.warn(self._skipped.tell(self.step, REMEDY))

    def end_step(self, held: Callable[[], Held], groups: Sequence[Group] = ()) -> TrainStep:
        """Save the step where that is due.

        Args:
            held: Returns what the program holds besides model and optimizer.
            groups: What the step was trained on, for the caller of the run.

        Raises:
            UserError: If the weights are not finite, or cannot be saved.
        """
        self._save(held)
        return TrainStep(self.step, self._config.num_steps, self._values, groups)

    @spanned("save")
    def _save(self, held: Callable[[], Held]) -> None:
        score = self._values.get(self._best_name, math.nan)
        is_best = math.isfinite(score) and (self.best is None or self._sign * (score - self.best) < 0)
        if is_best:
            self.best = score
        is_due = self.session.is_due(self.step) or self.step == self._end
        training: Held | None = None
        if is_due:
            training, self._saved = self._training(held), self.step
        if is_best or is_due:
            self.display.begin("save")
        self.session.save(self.step, is_best=is_best, training=training)
        self._recorder.is_due |= is_due

    def _training(self, held: Callable[[], Held]) -> Held:
        """Return everything that training goes on from, besides the weights."""
        tensors, state = held()
        own = {"best": self.best, "last": self.last, "skipped": self._skipped.count, "idle": self._num_idle}
        if world_size() > 1:
            own["parallel"] = asdict(self._config.parallel)
        return {**self.optimizer.tensors(), **tensors}, {**state, **own}

    def write_summary(self, extra: Mapping[str, float | str]) -> None:
        """Write summary.json: the last value of every metric, `extra`, how many weights changed, and the best
        validation.

        Raises:
            UserError: If the run folder went since the last save; the weights are kept.
        """
        if self._was_opened:  # else it had been finished, and goes no further
            self.session.check_place(self.step)
        if rank() != 0:
            return
        content: dict[str, float | str] = {
            name.removeprefix(f"{self.stage}/"): value for name, value in self.last.items()
        }
        content |= {**extra, **(changes := write_changes(self._config))}
        num_samples = getattr(self._config, "num_prompts", 0) * getattr(self._config, "group_size", 0)
        rows = past_rows(self._folder, self.stage, self.step)
        if text := idle_reason(rows, changes, num_samples=num_samples):
            write_warning(self._folder, self.step, text)
            print(f"whet: warning: {text}", file=sys.stderr, flush=True)
        if self.best is not None:
            content[f"best_{self._best_name.rpartition('/')[2]}"] = self.best
        (self._folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
