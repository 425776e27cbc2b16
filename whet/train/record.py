"""Records of training steps (batch and results), so that `whet replay` can repeat them and compare."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from whet.algo.packing import TrainingSequence, pack
from whet.generate.policy import Policy
from whet.model.attention import AttentionKind
from whet.ranks.collectives import gather_json, is_share, rank
from whet.ranks.fsdp import full, gathered, whole_copies
from whet.storage.checkpoint import RECORDS, step_folder
from whet.storage.commit import (
    MANIFEST,
    UNREADABLE,
    commit_folder,
    machine,
    remove,
    save_tensors,
    verify_folder,
)
from whet.telemetry.provenance import no_run
from whet.train.data.pairs import Pair
from whet.train.objective.advantage import training_sequences
from whet.train.optim.step import OptimConfig
from whet.train.rl_config import RLConfig
from whet.train.rollout.rollout import rollout_metrics
from whet.train.rollout.source import Collected
from whet.types import Group, Problem, UserError

Kind = Literal["rl", "sft", "rft", "dpo"]
Data = dict[str, Any]
Training = tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]

REPLAY, FAULTS, BATCH = RECORDS, "faults", "batch.json"
FORMAT = 1
KEPT_FAULTS = 3
"""Number of kept faults; each contains a whole model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A recorded step, read from disk.

    Attributes:
        folder: Its folder.
        kind: The program that made it.
        step: Steps done including it, from 1.
        machine: Everything besides program and data that its last bits depend on.
        batches: Each rank's result of `rl_batch` or `fit_batch`.
        metrics: Metrics of the step, by name.
        weights: Sum of each parameter after it.
        is_fault: Whether it is a fault, with the weights before it in its own folder.
    """

    folder: Path
    kind: Kind
    step: int
    machine: Mapping[str, Any]
    batches: Sequence[Data]
    metrics: Mapping[str, float]
    weights: Mapping[str, float]
    is_fault: bool


def rl_batch(
    collected: Collected, groups: Sequence[Group], policy: Policy, config: RLConfig, *, token_budget: int
) -> Data:
    """Describe this rank's batch of an RL step, before its first update.

    Args:
        collected: The sampled groups.
        groups: The groups that the loss uses, with advantages.
        policy: The policy, with the weights before the step.
        config: The run's settings.
        token_budget: Current tokens per micro-batch.
    """
    optim = replace(config.optim, token_budget=token_budget)
    sequences = training_sequences(groups, config.algo)
    untimed = replace(collected.rollout, generate_seconds=0.0, reward_seconds=0.0)
    weights = config.reward_weights
    return {
        "token_budget": token_budget,
        "collected": replace(collected, rollout=untimed).to_json(),
        "advantages": [[sample.advantage for sample in group.samples] for group in groups],
        "logprobs": score_tokens(
            policy,
            sequences,
            optim,
            attention=policy.attention,
            temperature=config.sampling.temperature,
        ),
        "metrics": rollout_metrics(collected.rollout, config.algo, weights, collected.num_refilled),
    }


def fit_batch(
    drawn: Sequence[tuple[int, object]],
    batch: Sequence[TrainingSequence | Pair],
    policy: Policy,
    optim: OptimConfig,
    *,
    token_budget: int,
    attention: AttentionKind,
) -> Data:
    """Describe this rank's batch of a step on fixed data, before the optimizer's step.

    Args:
        drawn: Epoch and item, from the data order.
        batch: The backpropagated sequence or pair of each.
        policy: The policy, with the weights before the step.
        optim: Precision of the step.
        token_budget: Current tokens per micro-batch.
        attention: Attention kernel of the training pass.
    """
    rows: list[Data] = []
    for (epoch, item), trained in zip(drawn, batch, strict=True):
        problem = {"problem": asdict(item)} if isinstance(item, Problem) else {}
        names = ("prompt_ids", "completion_ids", "trained", "allowed")
        content = (
            trained.as_row()
            if isinstance(trained, Pair)
            else {name: getattr(trained, name) for name in names}
        )
        rows.append({"epoch": epoch, **problem, "trained_on": content})
    optim = replace(optim, token_budget=token_budget)
    logprobs = score_tokens(policy, as_sequences(batch), optim, attention=attention)
    return {"token_budget": token_budget, "rows": rows, "logprobs": logprobs, "metrics": {}}


def as_sequences(batch: Sequence[TrainingSequence | Pair]) -> list[TrainingSequence]:
    """Return the sequences that a model reads: for a pair the chosen, then the rejected completion, if there."""
    sequences: list[TrainingSequence] = []
    for item in batch:
        if isinstance(item, Pair):
            both = [ids for ids in (item.chosen_ids, item.rejected_ids) if ids]
            sequences += [TrainingSequence(prompt_ids=item.prompt_ids, completion_ids=ids) for ids in both]
        else:
            sequences.append(item)
    return sequences


@torch.no_grad()
def score_tokens(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    optim: OptimConfig,
    *,
    attention: AttentionKind,
    temperature: float = 1.0,
) -> list[list[float]]:
    """Return the log-probability of every trained token of each sequence, in the micro-batches of training."""
    batch = pack(sequences, token_budget=optim.token_budget, device=policy.device)
    columns: list[list[float]] = [[] for _ in sequences]
    for micro in batch.micro_batches:
        logprobs_M, _ = policy.score(micro, temperature=temperature, attention=attention)
        parts = logprobs_M.split(torch.bincount(micro.sequence_M).tolist())
        for index, part in zip(micro.indices_B, parts, strict=True):
            columns[index] = part.tolist()
    return columns


def weight_sums(model: torch.nn.Module) -> dict[str, float]:
    """Return the sum of each parameter in float64, precise enough to show a change of any single weight."""
    return {
        name: float(full(tensor).detach().sum(dtype=torch.float64))
        for name, tensor in model.named_parameters()
    }


class Recorder:
    """Records the first step after each checkpoint, and every step whose update was skipped, of one run.

    A record is an aid, not a result: if it cannot be written, a warning is printed and training continues.

    Args:
        run: Run folder; once it is gone, nothing is recorded.
        kind: The program.
        policy: The trained policy.
        enabled: Whether to record; False if the weights change before a batch can be described.

    Attributes:
        is_due: Whether to record the next step: the first one, and the first after each checkpoint.
    """

    def __init__(self, run: Path, kind: Kind, policy: Policy, *, enabled: bool = True) -> None:
        self._run, self._kind, self._policy, self._enabled = run, kind, policy, enabled
        self._describe: Callable[[], Data] = dict
        self._batch: Data | None = None
        self.is_due = True

    def begin(self, describe: Callable[[], Data]) -> None:
        """Start a step, before its first update.

        Args:
            describe: Calls `rl_batch` or `fit_batch`: now, if the step is due, or when its update was skipped.
        """
        self._describe = describe
        self._batch = self._described() if self.is_due and self._enabled else None

    def _described(self) -> Data:
        with gathered(self._policy.model):
            return self._describe()

    def end(
        self, step: int, metrics: Mapping[str, float], training: Callable[[], Training], *, is_skipped: bool
    ) -> None:
        """End a step: write RUN/replay/step_N if it was due, RUN/faults/step_N if its update was skipped.

        A record is deleted with its checkpoint; the newest few faults are kept. Every rank must call.

        Args:
            step: Steps done, including it.
            metrics: Metrics of the step, without times.
            training: Returns tensors and JSON values of a checkpoint, which are stored with a fault.
            is_skipped: Whether its update was skipped, because loss or gradient is not finite.
        """
        old: list[Path] = []
        if is_skipped and self._enabled:
            content = self._content(step, self._batch or self._described(), metrics)
            self._commit(self._run / FAULTS, step, content, training())
            old = list(_folders(self._run / FAULTS).values())[:-KEPT_FAULTS]
        elif self._batch is not None:
            self._commit(self._run / REPLAY, step, self._content(step, self._batch, metrics), None)
        for folder in old if rank() == 0 else ():
            remove(folder)
        self._batch, self.is_due = None, False

    def _content(self, step: int, batch: Data, metrics: Mapping[str, float]) -> Data:
        own = {name: value for name, value in batch.items() if name != "metrics"}
        return {
            "format": FORMAT,
            "kind": self._kind,
            "step": step,
            "machine": describe_machine(self._policy),
            "metrics": {**batch["metrics"], **metrics},
            "weights": weight_sums(self._policy.model),
            "batches": gather_json(own),
        }

    def _commit(self, parent: Path, step: int, content: Data, training: Training | None) -> None:
        weights: Mapping[str, torch.Tensor] | None = None
        if training is not None and any(map(is_share, self._policy.model.parameters())):
            weights = whole_copies(self._policy.own_weights())
            training = whole_copies(training[0]), training[1]
        if rank() != 0 or not self._run.is_dir():  # who removed the run folder does not get it back
            return
        try:
            with commit_folder(parent / f"step_{step:08d}") as temporary:
                (temporary / BATCH).write_text(json.dumps(content) + "\n", encoding="ascii")
                if training is not None:
                    self._policy.save(temporary, weights)
                    (temporary / "training").mkdir()
                    tensors = {name: tensor.contiguous() for name, tensor in training[0].items()}
                    save_tensors(tensors, temporary / "training" / "optimizer.safetensors")
                    (temporary / "training" / "state.json").write_text(json.dumps(training[1]) + "\n")
        except UserError as error:
            print(f"whet: warning: {error}; training continues without it", file=sys.stderr, flush=True)


def describe_machine(policy: Policy) -> Data:
    """Return everything besides program and data that the last bits of a step depend on."""
    device = policy.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {**machine(), "device": name}


def is_whole(folder: Path) -> bool:
    """Say whether a folder was committed."""
    return (folder / MANIFEST).is_file()


def _folders(parent: Path) -> dict[int, Path]:
    """Return the committed folders by step, ascending."""
    found = {
        int(path.name[5:]): path
        for path in parent.glob("step_*")
        if re.fullmatch(r"step_\d{8,18}", path.name)
    }
    return {step: found[step] for step in sorted(found) if is_whole(found[step])}


def recorded_steps(run: Path) -> dict[int, Path]:
    """Return the folders of a run's recorded steps, by step; a fault takes precedence."""
    both = _folders(run / REPLAY) | _folders(run / FAULTS)
    return {step: both[step] for step in sorted(both)}


def weights_before(run: Path, step: int, folder: Path) -> Path | None:
    """Return the folder of the weights before a recorded step; None for the starting policy."""
    if folder.parent.name == FAULTS:
        return folder
    return None if step == 1 else step_folder(run, step - 1)


def find_record(run: Path, step: int) -> Path:
    """Return the folder of a recorded step whose preceding weights exist.

    Args:
        run: Run folder.
        step: Steps done, including it; 0 for the newest.

    Raises:
        UserError: If there is no such record, or the weights before it are gone.
    """
    if not run.is_dir():
        raise no_run(str(run))
    if not (run / "config.yaml").is_file():
        raise UserError(
            f"{run}: no config.yaml, so it is not a run folder; expected one of sft, rft, dpo or rl"
        )
    steps = recorded_steps(run)
    before = {number: weights_before(run, number, folder) for number, folder in steps.items()}
    whole = [
        number for number, weights in before.items() if weights is None or (weights / MANIFEST).is_file()
    ]
    wanted = step or max(whole, default=0)
    if wanted in whole:
        return steps[wanted]
    listed = ", ".join(map(str, whole)) or "none (sft, rft, dpo and rl record the step after each save)"
    what = "no step can be replayed"
    if step:
        what = f"step {step} is not recorded"
    if step in steps:
        what = f"step {step} is recorded, but the weights before it are gone ({before[step]})"
    raise UserError(f"{run}: {what}; those that can be replayed: {listed}")


def read_record(folder: Path) -> Recorded:
    """Read a record.

    Raises:
        UserError: If it is damaged, or from another version.
    """
    verify_folder(folder)
    try:
        data = json.loads((folder / BATCH).read_text(encoding="ascii"))
        if data["format"] != FORMAT or data["kind"] not in get_args(Kind):
            raise ValueError(data["format"])
        return Recorded(
            folder=folder,
            kind=data["kind"],
            step=int(data["step"]),
            machine=dict(data["machine"]),
            batches=[dict(batch) for batch in data["batches"]],
            metrics={str(name): float(value) for name, value in data["metrics"].items()},
            weights={str(name): float(value) for name, value in data["weights"].items()},
            is_fault=folder.parent.name == FAULTS,
        )
    except UNREADABLE as error:
        raise UserError(
            f"{folder / BATCH}: not a record of this version ({type(error).__name__}: {error})"
        ) from None
