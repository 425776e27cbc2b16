"""Runs the first training step of a recipe any number of times, and observes its stages from outside."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from whet.algo.config import AlgoConfig
from whet.algo.packing import TrainingSequence
from whet.generate.policy import resolve_device
from whet.model.attention import AttentionKind
from whet.train.fit import FIT_ATTENTION
from whet.train.objective.advantage import is_informative, training_sequences, with_advantages
from whet.train.objective.objective import Objective
from whet.train.optim.safety import set_deterministic
from whet.train.optim.step import OptimConfig, Optimizer, learning_rate
from whet.train.record import score_tokens
from whet.train.rl_config import RLConfig
from whet.train.rollout.order import data_order
from whet.train.rollout.rollout import Rollout
from whet.train.setup import RLSetup, load_rl
from whet.train.sft import SFTConfig, demonstrations_of, encode, load_sft, train_step
from whet.types import Group, Problem, Task

# Results of a diagnosis: components, each with facts, checks, tables and bars.

Status = Literal["pass", "warn", "fail"]
ORDER: tuple[Status, ...] = ("pass", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: What was checked.
        status: Whether it holds.
        found: What was measured.
        expected: What was required.
    """

    name: str
    status: Status
    found: str
    expected: str


@dataclass(slots=True)
class Component:
    """One examined part of the step.

    Attributes:
        name: Title.
        headline: The numbers to read first.
        facts: Quantity, with its unit -> value.
        checks: The checks.
        tables: Title -> rows, all with the same columns.
        bars: Title -> (label, length, text) of each bar.
    """

    name: str
    headline: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    bars: dict[str, list[tuple[str, float, str]]] = field(default_factory=dict)

    def check(self, name: str, holds: bool, found: Any, expected: Any, *, otherwise: Status = "fail") -> None:
        """Add a check, with its status if it does not hold."""
        self.checks.append(Check(name, "pass" if holds else otherwise, show(found), show(expected)))

    @property
    def verdict(self) -> Status:
        """The worst of its checks."""
        return worst([check.status for check in self.checks])

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"verdict": self.verdict, **asdict(self)}


def worst(statuses: Sequence[Status]) -> Status:
    """Return the worst of several statuses."""
    return ORDER[max(map(ORDER.index, statuses), default=0)]


def show(value: Any) -> str:
    """Format a value for display."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {show(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(show, value))
    return "none" if value is None else str(value)


def share(value: float) -> str:
    """Format a share in percent, small ones with two digits."""
    return f"{100 * value:.1f} %" if value >= 0.01 or value <= 0 else f"{100 * value:.2g} %"


STAGES = ("batch", "forward", "backward", "optimizer")
"""Packing, with the forward passes of a reference or critic; the model's forward passes and the loss; backward;
update."""
BETWEEN = "other"
Work = Callable[[], dict[str, float]]


class Subject:
    """A recipe, loaded, with the data of its first step.

    Args:
        run: The recipe.

    Attributes:
        policy: Its policy.
        problems: The problems of the step.
        rollout: The sampled rollout (`rl`).
        groups: Groups that the loss uses, with advantages (`rl`).
        num_informative: Groups whose rewards differ.
        is_substituted: Whether no reward differed, so that 1, 0, 1, ... were substituted to get a gradient.
        sequences: The training sequences.
        optimizer: A fresh optimizer.
        lr: Scheduled learning rate of the step.
    """

    def __init__(self, run: RLConfig | SFTConfig) -> None:
        self.run = run
        set_deterministic(run.safety.sameness(resolve_device(run.policy.device)), compiles=run.optim.compile)
        self.rollout: Rollout | None = None
        self.groups: list[Group] = []
        self.num_informative, self.is_substituted = 0, False
        if isinstance(run, SFTConfig):
            self.policy, task, problems = load_sft(run)
            self.sequences = self._demonstrations(run, task, problems)
        else:
            setup = load_rl(run)
            self.policy = setup.policy
            self._sample(run, setup)
            self.sequences = training_sequences(self.groups, run.algo)
        self._start = {name: p.detach().clone() for name, p in self.policy.model.named_parameters()}
        self.optimizer = Optimizer(self.policy.model, run.optim)
        self.lr = learning_rate(run.optim, 0, run.num_steps)

    @property
    def temperature(self) -> float:
        """Temperature of the distribution that tokens are scored under."""
        return self.run.sampling.temperature if isinstance(self.run, RLConfig) else 1.0

    @property
    def attention(self) -> AttentionKind:
        """Attention kernel of the training passes."""
        return FIT_ATTENTION if isinstance(self.run, SFTConfig) else self.policy.attention

    def _demonstrations(
        self, run: SFTConfig, task: Task, problems: Sequence[Problem]
    ) -> list[TrainingSequence]:
        kept = demonstrations_of(run, self.policy, problems).problems
        drawn = data_order(task, kept, run.seed).next(run.batch_size)
        self.problems = [problem for _, problem in drawn]
        return encode(run, self.policy, task, drawn)

    def _sample(self, run: RLConfig, setup: RLSetup) -> None:
        """Sample and score the first step's groups."""
        self.problems = [problem for _, problem in setup.first_problems()]
        with tempfile.TemporaryDirectory() as scratch, setup.open_judge(Path(scratch)) as (rewards, _):
            self.rollout = setup.first_rollout(self.policy.engine(trains=True), rewards)
        groups, weights = self.rollout.groups, run.reward_weights
        informative = is_informative(groups, run.algo, weights)
        self.num_informative = sum(informative)
        is_kept = run.algo.uninformative == "keep"
        used = [group for group, teaches in zip(groups, informative, strict=True) if teaches or is_kept]
        self.groups = with_advantages(used, run.algo, weights)
        if not any(sample.advantage for group in self.groups for sample in group.samples):
            self.is_substituted = True
            self.groups = with_advantages(_substituted(groups, list(weights)), run.algo, weights)

    def scores(
        self, sequences: Sequence[TrainingSequence] | None = None, *, token_budget: int = 0
    ) -> list[list[float]]:
        """Return the trainer's log-probabilities of trained tokens, by sequence; with gradients, as in training.

        Args:
            sequences: Default: those of the step.
            token_budget: Tokens of a micro-batch; 0 takes the recipe's.
        """
        optim = replace(self.run.optim, token_budget=token_budget or self.run.optim.token_budget)
        return score_tokens(
            self.policy,
            self.sequences if sequences is None else sequences,
            optim,
            attention=self.attention,
            temperature=self.temperature,
        )

    def prepare(
        self,
        optim: OptimConfig | None = None,
        *,
        groups: Sequence[Group] | None = None,
        algo: AlgoConfig | None = None,
        repeat: int = 1,
    ) -> Work:
        """Return a function that runs the step as its program does.

        Args:
            optim: Other settings of the step.
            groups: Other groups (`rl`).
            algo: Another objective (`rl`).
            repeat: Repetitions of the data in the batch.
        """
        run, optim = self.run, optim or self.run.optim
        if isinstance(run, SFTConfig):
            rows = self.sequences * repeat

            def fit() -> dict[str, float]:
                loss, *_ = train_step(self.policy, rows, optim, allowed_coef=run.allowed_coef)
                return {"loss": loss, "grad_norm": self.optimizer.step(self.lr, loss=loss)}

            return fit
        if algo is None:
            objective = Objective.of(run, self.policy, optim=optim)
        else:
            objective = Objective(
                self.policy,
                algo,
                optim=optim,
                temperature=run.sampling.temperature,
                max_length=run.sampling.max_new_tokens,
                seed=run.seed,
            )
        chosen = list(self.groups if groups is None else groups) * repeat

        def reinforce() -> dict[str, float]:
            found = objective.update(chosen, self.optimizer, self.lr, step=run.value.warmup_steps)
            return {name.removeprefix("rl/"): value for name, value in found.items()}

        return reinforce

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the optimizer updates: the parameters, or their float32 masters."""
        state = self.optimizer.tensors()
        return {
            name: state.get(f"{name}/master", parameter.detach())
            for name, parameter in self.policy.model.named_parameters()
        }

    def changed(self) -> float:
        """Return the share of the model's weights that differ from the initial ones."""
        pairs = [(p, self._start[name]) for name, p in self.policy.model.named_parameters()]
        return sum(float((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the initial weights, with a fresh optimizer."""
        for name, parameter in self.policy.model.named_parameters():
            parameter.copy_(self._start[name])
            parameter.grad = None
        self.optimizer = Optimizer(self.policy.model, self.run.optim)


def _substituted(groups: Sequence[Group], names: Sequence[str]) -> list[Group]:
    """Return groups whose rewards are 1, 0, 1, ... in turn."""
    changed = []
    for place, group in enumerate(groups):
        values = [float((place + index + 1) % 2) for index in range(len(group.samples))]
        samples = zip(group.samples, values, strict=True)
        changed.append(
            replace(
                group,
                samples=tuple(
                    replace(sample, reward=value, rewards=dict.fromkeys(names, value))
                    for sample, value in samples
                ),
            )
        )
    return changed


@dataclass(slots=True)
class Update:
    """One call of the optimizer.

    Attributes:
        lr: Its learning rate.
        norm: Its returned gradient norm.
        gradients: Gradients before clipping, by parameter, without None.
        before: Weights before it.
        after: Weights after it.
    """

    lr: float
    norm: float
    gradients: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


@contextmanager
def captured(subject: Subject, *, apply: bool) -> Iterator[list[Update]]:
    """Record the inputs of the optimizer's first call.

    Args:
        subject: The recipe.
        apply: Whether it updates the weights; otherwise the gradients are only recorded and cleared.
    """
    optimizer, model, found = subject.optimizer, subject.policy.model, list[Update]()
    plain = optimizer.step

    def step(lr: float, *, loss: float = 0.0) -> float:
        named = dict(model.named_parameters())
        update = None
        if not found:
            scale = optimizer.loss_scale or 1.0
            gradients = {n: p.grad.detach() / scale for n, p in named.items() if p.grad is not None}
            before = {n: w.clone() for n, w in subject.weights().items()} if apply else {}
            update = Update(lr, 0.0, gradients, before, {})
            found.append(update)
        norm = plain(lr, loss=loss) if apply else 0.0
        if update is not None:
            update.norm = norm
            update.after = {n: w.clone() for n, w in subject.weights().items()} if apply else {}
        for parameter in named.values():
            parameter.grad = None
        return norm

    optimizer.step = step
    try:
        yield found
    finally:
        optimizer.step = plain


@contextmanager
def staged(subject: Subject, enter: Callable[[str], None]) -> Iterator[None]:
    """Call `enter(stage)` whenever a step enters another stage; it starts with 'batch'."""
    optimizer, backward, update = subject.optimizer, torch.autograd.backward, subject.optimizer.step

    def backward_stage(*arguments: object, **options: object) -> None:
        enter("backward")
        backward(*arguments, **options)  # pyright: ignore[reportArgumentType]
        enter(BETWEEN)

    def optimizer_stage(lr: float, *, loss: float = 0.0) -> float:
        enter("optimizer")
        norm = update(lr, loss=loss)
        enter(BETWEEN)
        return norm

    hook = subject.policy.model.register_forward_pre_hook(lambda *_: enter("forward"))
    torch.autograd.backward, optimizer.step = backward_stage, optimizer_stage
    try:
        enter("batch")
        yield
        enter(BETWEEN)
    finally:
        torch.autograd.backward, optimizer.step = backward, update
        hook.remove()


def timed(subject: Subject, work: Work) -> dict[str, float]:
    """Run a step; return the seconds of each stage, of the time between them, and of the whole as 'step'."""
    seconds: dict[str, float] = dict.fromkeys((*STAGES, BETWEEN), 0.0)
    stage, since = BETWEEN, 0.0

    def enter(name: str) -> None:
        nonlocal stage, since
        if subject.policy.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds[stage] += now - since if since else 0.0
        stage, since = name, now

    with staged(subject, enter):
        work()
    return seconds | {"step": sum(seconds.values())}
