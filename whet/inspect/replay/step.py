"""Repeats a recorded step stage by stage, each from the recorded results of the previous ones."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from whet.algo.advantages import overlong_penalty
from whet.algo.packing import TrainingSequence
from whet.eval.grade import grade
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.model.weights import load_model
from whet.rewards.base import EPISODE, JUDGE, MODEL, WeightedReward, build_rewards, score_completions
from whet.storage.checkpoint import Loaded
from whet.storage.commit import UNREADABLE, verify_folder
from whet.tasks.base import answers_of, load_task
from whet.train import dpo, sft
from whet.train.data.pairs import Pair
from whet.train.dpo import DPOConfig
from whet.train.fit import FIT_ATTENTION
from whet.train.objective.advantage import training_sequences, with_advantages
from whet.train.objective.objective import Objective
from whet.train.optim.safety import TokenBudget
from whet.train.optim.step import Optimizer, dtypes, learning_rate, prepare_model
from whet.train.record import Recorded, as_sequences, score_tokens, weight_sums
from whet.train.rft import RFTConfig
from whet.train.rl_config import RLConfig
from whet.train.rollout.rollout import HARD_PENALTY, Rollout, rollout_metrics
from whet.train.rollout.source import Collected
from whet.train.session import train_adapters
from whet.train.setup import open_judge
from whet.train.sft import SFTConfig
from whet.types import Group, Problem, Sample, Task, UserError

# Comparison of a recorded stage with the same stage computed here.

Values = Sequence[float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage, as recorded and as computed here.

    Attributes:
        name: Its name.
        recorded: The recorded result, in short form.
        here: The same, computed here.
        difference: Largest |here - recorded| / max(1, |recorded|); None if nothing was recomputed.
        mean: Mean of the same.
        tolerance: Largest difference that numerics explain.
        note: Further remarks.
        is_finite: Whether all numbers computed here are finite.
    """

    name: str
    recorded: str
    here: str
    difference: float | None
    mean: float = 0.0
    tolerance: float = 0.0
    note: str = ""
    is_finite: bool = True

    @property
    def verdict(self) -> str:
        """exact, approx (within tolerance), DIFFERS, or skipped."""
        if self.difference is None:
            return "skipped"
        return (
            "exact" if self.difference == 0 else "approx" if self.difference <= self.tolerance else "DIFFERS"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Largest differences that numerics explain, by stage.

    Attributes:
        logprobs: For a token's log-probability, in nats.
        sums: For loss and gradient norm.
        metrics: For other metrics: a clipped share changes by whole tokens.
        weights: For the mean weight of a parameter, after the update.
    """

    logprobs: float
    sums: float
    metrics: float
    weights: float


EXACT = 1e-9
"""Tolerance of arithmetic in float64: advantages."""
TOLERANCES = {
    "float32": Tolerance(logprobs=1e-4, sums=1e-4, metrics=1e-3, weights=1e-4),
    "bfloat16": Tolerance(logprobs=0.25, sums=0.1, metrics=0.25, weights=1e-2),
}


def largest(recorded: Values, here: Values) -> tuple[float, float]:
    """Return the largest and the mean difference, relative above 1; equal NaNs and missing values do not differ."""
    if len(recorded) != len(here):
        return math.inf, math.inf
    gaps = [_gap(was, now) for was, now in zip(recorded, here, strict=True)]
    return max(gaps, default=0.0), math.fsum(gaps) / max(1, len(gaps)) if math.inf not in gaps else math.inf


def _gap(was: float | None, now: float | None) -> float:
    if was == now or (was is not None and now is not None and math.isnan(was) and math.isnan(now)):
        return 0.0
    if was is None or now is None or not (math.isfinite(was) and math.isfinite(now)):
        return math.inf
    return abs(now - was) / max(1.0, abs(was))


def compare(name: str, recorded: Values, here: Values, tolerance: float, note: str = "") -> Stage:
    """Compare the numbers of a stage; a single one is shown itself, several by their root mean square."""
    difference, mean = largest(recorded, here)
    return Stage(
        name=name,
        recorded=_shown(recorded),
        here=_shown(here),
        difference=difference,
        mean=mean,
        tolerance=tolerance,
        note=note,
        is_finite=all(value is None or math.isfinite(value) for value in here),
    )


def _shown(values: Values) -> str:
    numbers = [value for value in values if value is not None]
    bad = sum(not math.isfinite(value) for value in numbers)
    if len(values) == 1 and numbers:
        return f"{numbers[0]:.7g}"
    if bad:
        return f"{bad:,} of {len(values):,} not finite"
    missing = f", {len(values) - len(numbers):,} without" if len(numbers) < len(values) else ""
    size = math.sqrt(math.fsum(value * value for value in numbers) / max(1, len(numbers)))
    return f"{len(numbers):,}, rms {size:.4g}{missing}"


def compare_ids(name: str, pairs: Sequence[tuple[object, object]], note: str = "") -> Stage:
    """Compare values for equality: prompts, texts."""
    unequal = sum(was != now for was, now in pairs)
    here = f"{len(pairs) - unequal:,} equal" + (f", {unequal:,} others" if unequal else "")
    return Stage(
        name=name, recorded=f"{len(pairs):,}", here=here, difference=math.inf if unequal else 0.0, note=note
    )


def skipped(name: str, note: str) -> Stage:
    """Create a stage that was not recomputed."""
    return Stage(name=name, recorded="", here="", difference=None, note=note)


def compare_metrics(recorded: Mapping[str, float], here: Mapping[str, float], tolerance: float) -> Stage:
    """Compare metrics by name; report the one that differs most."""
    names = sorted(here)
    was = [recorded.get(name) for name in names]
    now = [here[name] for name in names]
    gaps = {name: _gap(a, b) for name, a, b in zip(names, was, now, strict=True)}
    unequal = {name: gap for name, gap in gaps.items() if gap}
    worst = max(unequal, key=lambda name: unequal[name], default="")
    note = f"most: {worst} {recorded.get(worst, math.nan):.6g} -> {here[worst]:.6g}" if worst else ""
    stage = compare("metrics", was, now, tolerance, note)
    equal = f"{len(names) - len(unequal)} equal" + (f", {len(unequal)} others" if unequal else "")
    return replace(stage, recorded=f"{len(names)} metrics", here=equal)


def compare_weights(recorded: Mapping[str, float], model: torch.nn.Module, tolerance: float) -> Stage:
    """Compare sums of parameters; the difference is per mean weight of a parameter."""
    here = weight_sums(model)
    sizes = {name: tensor.numel() for name, tensor in model.named_parameters()}
    gaps = {
        name: _gap(recorded[name], total) and abs(total - recorded[name]) / sizes[name]
        if name in recorded
        else math.inf
        for name, total in here.items()
    }
    unequal = {name: gap for name, gap in gaps.items() if gap}
    worst = max(unequal, key=lambda name: unequal[name], default="")
    return Stage(
        name="weights after",
        recorded=f"{len(recorded)} parameters",
        here=f"{len(here) - len(unequal)} equal" + (f", {len(unequal)} others" if unequal else ""),
        difference=max(gaps.values(), default=0.0),
        mean=math.fsum(gaps.values()) / max(1, len(gaps)),
        tolerance=tolerance,
        note=f"most: {worst}" if worst else "",
    )


TrainConfig = RLConfig | SFTConfig | RFTConfig | DPOConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """State before a step.

    Attributes:
        policy: The policy with the weights before the step.
        optimizer: The optimizer with its state.
        objective: The objective of an RL step, with reference, critic and coefficients.
        num_idle: Steps without an update so far, which the learning rate's schedule does not count.
    """

    policy: Policy
    optimizer: Optimizer
    objective: Objective | None
    num_idle: int = 0


def load_before(config: TrainConfig, weights: Path | None, init: str) -> Before:
    """Load the state before a step; nothing is written.

    Args:
        config: The run's settings, overridden.
        weights: Folder of weights and state; None for the starting policy.
        init: Location of the starting model, if it has moved.

    Raises:
        UserError: If something is missing, damaged, or inconsistent.
    """
    source, kinds = config.policy, dtypes(config.optim.precision)
    frozen = isinstance(config, RLConfig) and config.algo.kl != "none"
    if weights is not None:
        verify_folder(weights)
    if weights is not None and not frozen:  # the starting model is needed only as a frozen reference
        source = PolicyConfig(
            init=str(weights),
            attention=source.attention,
            device=source.device,
            num_threads=source.num_threads,
        )
    elif init:
        source = replace(source, init=init)
    if config.lora.rank:
        source = config.policy if not init else replace(config.policy, init=init)
    policy = load_policy(source, seed=config.seed, merge=not config.lora.rank, **kinds)
    if config.lora.rank:
        train_adapters(policy, config)
    prepare_model(policy.model, config.optim)
    objective = Objective.of(config, policy) if isinstance(config, RLConfig) else None
    if weights is None:
        return Before(policy=policy, optimizer=Optimizer(policy.model, config.optim), objective=objective)
    try:
        if policy.trained is not None:
            policy.trained.restore(weights)
        else:
            model, _ = load_model(weights, dtype=kinds["dtype"])
            policy.model.load_state_dict(model.state_dict())
        optimizer = Optimizer(policy.model, config.optim)
        like = optimizer.tensors() | (objective.tensors() if objective is not None else {})
        stored = Loaded(weights, {})
        # Another precision may have masters where the run had none; they start from the weights.
        names = stored.names()
        tensors = dict(stored.read({name: tensor for name, tensor in like.items() if name in names}))
        optimizer.load_tensors(optimizer.tensors() | tensors)
        state: Any = json.loads((weights / "training" / "state.json").read_text())
        num_idle = int(state.get("idle", 0))  # older checkpoints have none
        if objective is not None:
            budget = {"token_budget": config.optim.token_budget}
            objective.load(objective.tensors() | tensors, state["objective"] | budget)
    except (RuntimeError, SafetensorError, *UNREADABLE) as error:
        if isinstance(error, UserError):
            raise
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise UserError(f"{weights}: does not fit the run's config.yaml ({reason})") from None
    return Before(policy=policy, optimizer=optimizer, objective=objective, num_idle=num_idle)


def replay_step(
    recorded: Recorded, config: TrainConfig, before: Before, *, is_loose: bool, ask_judge: bool
) -> list[Stage]:
    """Repeat a recorded step.

    Args:
        recorded: The step.
        config: The run's settings, overridden.
        before: The state before it; changed by the update.
        is_loose: Whether one of the two is in bfloat16.
        ask_judge: Whether to query the judge again.

    Raises:
        UserError: If the record is incomplete.
    """
    replay = _Replay(recorded, config, before, is_loose=is_loose)
    try:
        if isinstance(config, RLConfig):
            return replay.rl(config, ask_judge=ask_judge)
        return replay.fit(config)
    except UNREADABLE as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{recorded.folder}: the record does not fit the run ({type(error).__name__}: {error})"
        ) from None


class _Replay:
    """One replay: state shared by its stages."""

    def __init__(self, recorded: Recorded, config: TrainConfig, before: Before, *, is_loose: bool) -> None:
        self.recorded, self.before = recorded, before
        self.tolerance = TOLERANCES["bfloat16" if is_loose else "float32"]
        self.lr = learning_rate(config.optim, recorded.step - 1 - before.num_idle, config.num_steps)

    def rl(self, config: RLConfig, *, ask_judge: bool) -> list[Stage]:
        """Return the stages of an RL step."""
        policy, objective = self.before.policy, self.before.objective
        assert objective is not None
        task = load_task(config.task)
        policy.expect(*answers_of(task))
        parts = [Collected.from_json(batch["collected"]) for batch in self.recorded.batches]
        collected = _merged(parts)
        pairs = [(group.problem, sample) for group in collected.rollout.groups for sample in group.samples]
        prompts = [
            (
                (sample.prompt_ids, sample.text),
                (
                    policy.prompt_ids(problem),
                    policy.completion_text(sample.prompt_ids, sample.completion_ids),
                ),
            )
            for problem, sample in pairs
        ]
        scoring = _rewards_stage(policy, task, config, collected, pairs, ask_judge=ask_judge)
        used = [collected.rollout.groups[place] for place in collected.used]
        rows = [row for batch in self.recorded.batches for row in batch["advantages"]]
        here = with_advantages(used, config.algo, config.reward_weights)
        groups = [_advised(group, row) for group, row in zip(used, rows, strict=True)]
        stages = [
            compare_ids("prompts and texts", prompts),
            scoring,
            compare("advantages", _advantages(groups), _advantages(here), EXACT),
            self.logprobs(
                score_tokens(
                    policy,
                    training_sequences(groups, config.algo),
                    config.optim,
                    attention=policy.attention,
                    temperature=config.sampling.temperature,
                )
            ),
        ]
        step = self.recorded.step - 1
        metrics = rollout_metrics(
            collected.rollout, config.algo, config.reward_weights, collected.num_refilled
        )
        progress = step / max(1, config.num_steps - 1)
        metrics |= objective.update(groups, self.before.optimizer, self.lr, step=step, progress=progress)
        return stages + self.outcome("rl", metrics | {"rl/lr": self.lr})

    def fit(self, config: SFTConfig | RFTConfig | DPOConfig) -> list[Stage]:
        """Return the stages of a step on fixed data."""
        kind, policy = self.recorded.kind, self.before.policy
        rows = [row for batch in self.recorded.batches for row in batch["rows"]]
        if isinstance(config, DPOConfig):
            pairs = [Pair.from_row(row["trained_on"]) for row in rows]
            sequences = as_sequences(pairs)
        else:
            pairs, sequences = [], [_sequence(row["trained_on"]) for row in rows]
        stages = [_demonstrations(policy, config, rows, sequences)]
        stages.append(self.logprobs(score_tokens(policy, sequences, config.optim, attention=FIT_ATTENTION)))
        budget = TokenBudget(config.optim.token_budget, policy.model.parameters())
        if isinstance(config, DPOConfig):
            result = dpo.train_step(policy, pairs, config, budget)
            loss, metrics = result.loss, dict(result.metrics)
        else:
            coef = config.allowed_coef if isinstance(config, SFTConfig) else 0.0
            found = sft.train_step(policy, sequences, config.optim, budget, allowed_coef=coef)
            loss, _, _, metrics = found
        norm = self.before.optimizer.step(self.lr, loss=loss)
        metrics |= {f"{kind}/loss": loss, f"{kind}/grad_norm": norm, f"{kind}/lr": self.lr}
        return stages + self.outcome(kind, metrics)

    def logprobs(self, here: Sequence[Sequence[float]]) -> Stage:
        """Compare the log-probabilities of the trained tokens, by their absolute difference."""
        was = [p for batch in self.recorded.batches for row in batch["logprobs"] for p in row]
        return compare("log-probs", was, [p for row in here for p in row], self.tolerance.logprobs)

    def outcome(self, kind: str, here: Mapping[str, float]) -> list[Stage]:
        """Compare loss, gradient norm, the other metrics, and the weights after the update."""
        was, tolerance, stages = self.recorded.metrics, self.tolerance, []
        for name, title in (("loss", "loss"), ("grad_norm", "gradient norm")):
            key = f"{kind}/{name}"
            stages.append(compare(title, [was.get(key)], [here[key]], tolerance.sums))
        others = {
            name: value for name, value in here.items() if name not in (f"{kind}/loss", f"{kind}/grad_norm")
        }
        stages.append(compare_metrics(was, others, tolerance.metrics))
        model = self.before.policy.model
        return [*stages, compare_weights(self.recorded.weights, model, tolerance.weights)]


def _merged(parts: Sequence[Collected]) -> Collected:
    """Concatenate the ranks' samples: one process repeats what several ranks trained on."""
    groups: list[Group] = []
    grades = [row for part in parts for row in part.rollout.grades]
    used: list[int] = []
    for part in parts:
        used += [len(groups) + place for place in part.used]
        groups += part.rollout.groups
    return replace(parts[0], rollout=Rollout(groups, grades, 0.0, 0.0), used=tuple(used))


def _advised(group: Group, advantages: Sequence[float | None]) -> Group:
    """Return a group with its recorded advantages."""
    members = zip(group.samples, advantages, strict=True)
    return replace(
        group, samples=tuple(replace(sample, advantage=advantage) for sample, advantage in members)
    )


def _advantages(groups: Sequence[Group]) -> list[float | None]:
    return [sample.advantage for group in groups for sample in group.samples]


def _rewards_stage(
    policy: Policy,
    task: Task,
    config: RLConfig,
    collected: Collected,
    pairs: Sequence[tuple[Problem, Sample]],
    *,
    ask_judge: bool,
) -> Stage:
    """Grade and score the recorded texts again."""
    graded = grade(policy, task, [(problem, s.text, s.completion_ids) for problem, s in pairs])
    recorded = [row for rows in collected.rollout.grades for row in rows]
    unequal = sum(was != now for was, now in zip(recorded, graded, strict=True))
    notes = [f"{unequal} of {len(graded)} grades differ"] if unequal else []
    rewards = build_rewards(
        config.rewards, policy.schema, task, config.reward, timeout_s=config.reward_timeout_s
    )
    if config.control == "random_reward":
        rewards, notes = [], [*notes, "the rewards were random: not recomputed"]
        totals = [sample.reward for _, sample in pairs]
    else:
        with ExitStack() as stack:
            if ask_judge:
                scratch = stack.enter_context(tempfile.TemporaryDirectory())
                judge = replace(config.judge, cache="")
                opened = open_judge(judge, rewards, Path(scratch), policy.schema, pairs[0][0])
                rewards = stack.enter_context(opened)[0]
            rewards = [_as_recorded(reward, pairs, ask_judge=ask_judge) for reward in rewards]
            kept = [r.name for r in rewards if _is_kept(r.name, ask_judge)]
            notes += [f"'{name}' as recorded" for name in kept]
            scored = score_completions(rewards, [(problem, sample.text) for problem, sample in pairs])
        totals = [_total(policy, config, s, total) for (_, s), (_, total) in zip(pairs, scored, strict=True)]
    stage = compare("rewards", [sample.reward for _, sample in pairs], totals, 0.0, ", ".join(notes))
    return replace(stage, difference=math.inf) if unequal else stage


def _is_kept(name: str, ask_judge: bool) -> bool:
    """Say whether a reward's recorded scores are taken: it is no function of the text, or needs another model."""
    return name in (EPISODE, MODEL) or (name == JUDGE and not ask_judge)


def _as_recorded(
    reward: WeightedReward, pairs: Sequence[tuple[Problem, Sample]], *, ask_judge: bool
) -> WeightedReward:
    """Make a reward that is not a function of the text return its recorded scores."""
    if not _is_kept(reward.name, ask_judge):
        return reward
    scores = [sample.rewards.get(reward.name) for _, sample in pairs]
    return replace(reward, many=lambda _: list(scores))


def _total(policy: Policy, config: RLConfig, sample: Sample, total: float | None) -> float | None:
    """Add the overlong penalty, as sampling did."""
    penalty, kind = 0.0, config.algo.overlong
    if kind == "hard" and sample.finish_reason == "length":
        penalty = HARD_PENALTY if policy.schema.parse(sample.text).answer is None else 0.0
    elif kind == "soft":
        limit = config.sampling.max_new_tokens
        penalty = overlong_penalty(
            len(sample.completion_ids), max_length=limit, cache_length=config.algo.ramp(limit)
        )
    return total if total is None or kind not in ("soft", "hard") else total + penalty


def _sequence(row: Mapping[str, Any]) -> TrainingSequence:
    return TrainingSequence(
        prompt_ids=tuple(row["prompt_ids"]),
        completion_ids=tuple(row["completion_ids"]),
        trained=tuple(row["trained"]),
        allowed=tuple(row.get("allowed", ())),
    )


def _demonstrations(
    policy: Policy,
    config: TrainConfig,
    rows: Sequence[Mapping[str, Any]],
    recorded: Sequence[TrainingSequence],
) -> Stage:
    """Re-encode the demonstrations of fine-tuning."""
    if not isinstance(config, SFTConfig):
        return skipped("prompts", "sampled tokens, as recorded")
    task = load_task(config.task)
    policy.expect(*answers_of(task))
    problems = [(row["epoch"], Problem(**row["problem"])) for row in rows]
    here = sft.encode(config, policy, task, problems)
    return compare_ids("prompts and texts", list(zip(recorded, here, strict=True)))
