"""`whet dpo`: learning from preferences. DPO, IPO, RPO, KTO, ORPO and reward models are arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from whet.algo.packing import TrainingSequence, pack, split_by_budget
from whet.algo.preference import (
    OPTIONS_READ,
    PreferenceLoss,
    agreement,
    apo_down_loss,
    apo_zero_loss,
    dpo_loss,
    hinge_loss,
    ipo_loss,
    kto_loss,
    log_ratios,
    mean_nll,
    orpo_loss,
    reward_loss,
    robust_loss,
)
from whet.config import align, counted
from whet.eval.evaluate import fitting_problems, take_problems
from whet.generate.policy import Policy, PolicyConfig
from whet.generate.reward_model import messages_of
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.generate.scoring import score_texts
from whet.model.lora.side import LoRAConfig
from whet.ranks.collectives import all_reduce_sum, barrier, gather_json, joined, rank, shard, sum_gradients
from whet.ranks.context import Sharing, deal, sharing, split
from whet.ranks.fsdp import ParallelConfig, gathered
from whet.storage.checkpoint import Resume
from whet.tasks.base import TaskConfig, answers_of, check_gold, load_task
from whet.tasks.quarantine import write_quarantine
from whet.tasks.read import BadRow
from whet.telemetry.display import advancing, open_display
from whet.telemetry.trackers import TrackConfig
from whet.train.data.harvest import check_sampling, gather_rows, load_rows, sample_judged, write_rows
from whet.train.data.pairs import (
    Pair,
    Pairing,
    encode_conversations,
    is_held_out,
    is_on_hub,
    read_pairs,
    singles,
    with_partners,
)
from whet.train.fit import FIT_ATTENTION, Fit, StepResult
from whet.train.optim.balance import Balance
from whet.train.optim.precision import resolve_precision
from whet.train.optim.safety import SafetyConfig, TokenBudget
from whet.train.optim.step import OptimConfig, forward_backward
from whet.train.rollout.order import EpochOrder
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
from whet.types import MicroBatch, Problem, Task, UnreadError, UserError

# Pairs as micro-batches, and the log-probabilities of their completions.


def pair_micro_batches(
    pairs: Sequence[Pair], token_budget: int, device: torch.device, own: Sharing | None = None
) -> list[MicroBatch]:
    """Pack pairs; both completions of a pair are in the same micro-batch.

    Args:
        pairs: This rank's pairs.
        token_budget: Tokens per micro-batch; a longer pair gets its own.
        device: Device of the tensors.
        own: How all ranks deal out `pairs`, which are all of theirs then; None: these are this rank's.

    Returns:
        Micro-batches in which `indices_B` is 2 i for the chosen and 2 i + 1 for the rejected completion of pair i; one
        that is not there is left out.
    """
    micro_batches = []
    num_tokens = [pair.num_tokens for pair in pairs]
    if own is None:
        bins = split_by_budget(num_tokens, token_budget)
    else:
        work = [
            own.costs.of(0, len(pair.prompt_ids))
            + sum(
                own.costs.of(len(pair.prompt_ids), len(ids)) for ids in (pair.chosen_ids, pair.rejected_ids)
            )
            for pair in pairs
        ]
        bins = deal(num_tokens, work, token_budget, own.num_groups)[own.group]
    for members in bins:
        sides = [2 * member + side for member in members for side in (0, 1)]
        sides = [
            side
            for side in sides
            if (pairs[side // 2].rejected_ids if side % 2 else pairs[side // 2].chosen_ids)
        ]
        if not sides:
            continue
        sequences = [
            TrainingSequence(
                prompt_ids=pairs[side // 2].prompt_ids,
                completion_ids=pairs[side // 2].rejected_ids if side % 2 else pairs[side // 2].chosen_ids,
            )
            for side in sides
        ]
        room = sum(sequence.num_tokens for sequence in sequences)
        (micro,) = pack(sequences, token_budget=room, device=device).micro_batches
        micro = micro if own is None else split(micro, own)
        micro_batches.append(replace(micro, indices_B=tuple(sides[index] for index in micro.indices_B)))
    return micro_batches


def side_values(policy: Policy, micro: MicroBatch) -> dict[int, torch.Tensor]:
    """Score the completions of a micro-batch.

    Returns:
        By index (see `pair_micro_batches`) the summed log-probability of each, or a reward model's score; float64.
    """
    if policy.model.config.is_reward:
        scores_B = score_texts(
            policy.model,
            micro,
            autocast=policy.autocast,
            attention=FIT_ATTENTION,
            routing=policy.routing(micro),
        ).double()
        return dict(zip(micro.indices_B, scores_B.unbind(), strict=True))
    logprobs_M, _ = policy.score(micro, attention=FIT_ATTENTION, all_rows=True)
    parts = logprobs_M.double().split(torch.bincount(micro.sequence_M).tolist())
    return {side: part.sum() for side, part in zip(micro.indices_B, parts, strict=True)}


def pair_values(policy: Policy, micro: MicroBatch) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Score a micro-batch of pairs; return their indices and `side_values` of chosen and rejected completions."""
    values = side_values(policy, micro)
    members = sorted(side // 2 for side in values if side % 2 == 0)
    chosen_B = torch.stack([values[2 * member] for member in members])
    return members, chosen_B, torch.stack([values[2 * member + 1] for member in members])


PAIRS = "pairs.jsonl"
ROLLOUT_FIELDS = ("task", "num_problems", "num_samples", "max_pairs_per_problem", "sampling")
LOSS_FIELDS = (
    *("beta", "label_smoothing", "per_token", "sft_coef"),
    *("desirable_weight", "undesirable_weight", "center_coef"),
)
"""Options of which each loss reads some."""
PORTION = 512
"""Pairs per update of the progress bar while reference log-probabilities are computed."""

Score = Callable[[MicroBatch], tuple[torch.Tensor, dict[str, float]]]


@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """Preference optimisation on pairs of completions."""

    out: str
    """Output folder."""
    policy: PolicyConfig
    """The model to start from; its initial state is also the reference."""
    pairs: str = ""
    """File (JSON lines, JSON, CSV, parquet), hub data set or ultrafeedback: rows with prompt, chosen and rejected
    (texts or chat messages), for kto also prompt, completion and label; empty to create pairs from rollouts."""
    pairs_split: str = ""
    """Split of a hub data set of pairs; empty for train, or the only one."""
    max_bad_rows: int = 0
    """Malformed rows of that file that are skipped before it is an error."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """The task whose completions are paired."""
    num_problems: int = 0
    """Problems of the train split to sample; 0 for all."""
    num_samples: int = 8
    """Completions per problem."""
    max_pairs_per_problem: int = 4
    """Pairs of a right and a wrong completion kept per problem, chosen by hash."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling settings."""
    loss: PreferenceLoss = "dpo"
    """dpo (logistic), ipo (squared distance to a finite gap), hinge, robust, apo_zero or apo_down: pairs, against the
    reference; orpo: pairs, without one; kto: completions by themselves; reward: trains a reward model on pairs."""
    beta: float = 0.1
    """Strength of the pull to the reference, above 0 (for ipo the paper's tau; for orpo the weight of the odds)."""
    label_smoothing: float = 0.0
    """dpo, robust: assumed share of mislabelled pairs, 0 to 0.5."""
    per_token: bool = False
    """Compare log-ratios per token instead of per completion (TRL's ipo and sigmoid_norm)."""
    sft_coef: float = 0.0
    """Weight of the chosen completion's mean negative log-probability per token (RPO's alpha)."""
    desirable_weight: float = 1.0
    """kto: weight of desirable completions; weight x number should be about equal on both sides."""
    undesirable_weight: float = 1.0
    """kto: weight of undesirable completions."""
    center_coef: float = 0.0
    """reward: weight of the squared sum of a pair's scores, which keeps their mean near 0 (0.01 is usual)."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Adapters that are trained in place of the weights."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-6, beta2=0.99))
    """Optimizer, schedule and precision."""
    num_steps: int = 100
    """Optimizer steps."""
    batch_size: int = 32
    """Pairs per optimizer step, over all ranks."""
    validation_share: float = 0.05
    """Share of prompts whose pairs are held out, by hash."""
    validate_every: int = 50
    """Steps between validations (always one at the end); the best is kept as checkpoints/best."""
    save_every: int = 100
    """Steps between checkpoints (always one at the end)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How several ranks hold the model."""
    track: TrackConfig = field(default_factory=TrackConfig)
    """Experiment trackers, in addition to the run's own files."""
    safety: SafetyConfig = field(default_factory=SafetyConfig)
    """Resuming, saving and stopping."""
    seed: int = 0
    """Seed of samples, choice of pairs, held-out prompts and data order."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "max_pairs_per_problem", "validate_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 1 or more")
        if not self.beta > 0:
            raise ValueError(
                f"beta = {self.beta}: expected above 0 (at 0 nothing ties the policy to its reference)"
            )
        if self.loss == "robust" and not self.label_smoothing:
            raise ValueError(
                "loss = robust with label_smoothing = 0 is dpo: give the share of mislabelled pairs"
            )
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing = {self.label_smoothing}: expected 0 to below 0.5")
        for name in ("sft_coef", "desirable_weight", "undesirable_weight", "center_coef"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 0 or more")
        defaults = {item.name: item.default for item in fields(self)}
        for name in LOSS_FIELDS:
            if name not in OPTIONS_READ[self.loss] and getattr(self, name) != defaults[name]:
                readers = ", ".join(loss for loss, names in OPTIONS_READ.items() if name in names)
                raise UnreadError(f"{name} is read by loss = {readers} only; leave it out", name)
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share = {self.validation_share}: expected 0 to below 1")
        if self.num_problems < 0 or self.max_bad_rows < 0:
            raise ValueError(
                f"num_problems = {self.num_problems}, max_bad_rows = {self.max_bad_rows}: expected 0 or more"
            )
        if not self.pairs and self.max_bad_rows:
            raise UnreadError("max_bad_rows is read with a file of pairs only; leave it out", "max_bad_rows")
        if self.pairs_split and not is_on_hub(self.pairs):
            raise UnreadError(
                "pairs_split is read with a hub data set of pairs only; leave it out", "pairs_split"
            )
        check_sampling(self.sampling, self.num_samples)
        if not self.pairs and self.num_samples < 2:
            raise ValueError(
                f"num_samples = {self.num_samples}: a pair needs a right and a wrong completion; expected 2 or more"
            )
        if self.pairs:
            self._check_unread()

    def _check_unread(self) -> None:
        """Refuse fields that only sampling reads, naming all of them at once."""
        spelt, unread = [], []
        for item in fields(self):
            default = item.default if item.default_factory is MISSING else item.default_factory()
            if item.name in ROLLOUT_FIELDS and getattr(self, item.name) != default:
                unread.append(item.name)
                spelt += _overrides(item.name, getattr(self, item.name), default)
        if spelt:
            raise UnreadError(
                f"with a file of pairs nothing is sampled: restore the defaults {' '.join(spelt)}", *unread
            )


def _overrides(name: str, value: Any, default: Any) -> list[str]:
    """Return the options that reset a field, or the fields of a group, to its default."""
    if is_dataclass(value) and is_dataclass(default):
        return [
            text
            for item in fields(value)
            if getattr(value, item.name) != getattr(default, item.name)
            for text in _overrides(
                f"{name}.{item.name}", getattr(value, item.name), getattr(default, item.name)
            )
        ]
    return [f"--{name.replace('_', '-')} {default}"]


def scorer(
    policy: Policy, pairs: Sequence[Pair], num_pairs: float, config: DPOConfig, *, kl: float = 0.0
) -> Score:
    """Return a function that maps a micro-batch of these pairs to its share of the mean loss and metrics.

    Args:
        policy: The policy.
        pairs: This rank's pairs, indexed by the micro-batches.
        num_pairs: Pairs of all micro-batches and ranks: the denominator.
        config: The objective.
        kl: KTO's estimate of the KL to the reference.
    """

    def score(micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        if config.loss == "kto":
            loss_B, metrics = _score_singles(policy, pairs, micro, config, kl)
        else:
            loss_B, metrics = _score_pairs(policy, pairs, micro, config)
        shares = {name: float(values_B.detach().sum()) / num_pairs for name, values_B in metrics.items()}
        return loss_B.sum() / num_pairs, shares

    return score


Scored = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Losses, and metrics by name."""


def _score_pairs(policy: Policy, pairs: Sequence[Pair], micro: MicroBatch, config: DPOConfig) -> Scored:
    """Return loss and metrics of each pair of a micro-batch."""
    members, chosen_B, rejected_B = pair_values(policy, micro)
    own = [pairs[member] for member in members]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=chosen_B.device)

    if config.loss == "reward":
        gap_B = chosen_B - rejected_B
        margins_B = column([pair.margin for pair in own])
        loss_B = reward_loss(chosen_B, rejected_B, margins_B, center_coef=config.center_coef)
        columns = (agreement(gap_B), gap_B, chosen_B, rejected_B)
        names: list[str] = ["dpo/accuracy", *REWARDS]
        return loss_B, dict(zip(names, columns, strict=True))
    chosen_length_B = column([len(pair.chosen_ids) for pair in own])
    rejected_length_B = column([len(pair.rejected_ids) for pair in own])
    nll_B = mean_nll(chosen_B, chosen_length_B)
    if config.loss == "orpo":
        ratios = (chosen_B / chosen_length_B, rejected_B / rejected_length_B)
        loss_B = orpo_loss(*ratios, beta=config.beta)
        chosen_ratio_B, rejected_ratio_B = ratios
    else:
        chosen_ratio_B = log_ratios(chosen_B, column([pair.ref_chosen_logprob for pair in own]))
        rejected_ratio_B = log_ratios(rejected_B, column([pair.ref_rejected_logprob for pair in own]))
        ratios = (chosen_ratio_B, rejected_ratio_B)
        if config.per_token:
            ratios = (chosen_ratio_B / chosen_length_B, rejected_ratio_B / rejected_length_B)
        loss_B = _ratio_loss(config)(*ratios)
    gap_B = chosen_ratio_B - rejected_ratio_B
    rewards = (config.beta * gap_B, config.beta * chosen_ratio_B, config.beta * rejected_ratio_B)
    columns = (agreement(gap_B), *rewards, chosen_B, rejected_B)
    names = ["dpo/accuracy", *REWARDS, *LOGPROBS]
    metrics = dict(zip(names, columns, strict=True))
    if config.sft_coef:
        loss_B = loss_B + config.sft_coef * nll_B
    if _shows_nll(config):
        metrics["dpo/nll"] = nll_B
    return loss_B, metrics


def _ratio_loss(config: DPOConfig) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss of the log-ratios of chosen and rejected completions."""
    smoothed = {"beta": config.beta, "label_smoothing": config.label_smoothing}
    table: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "dpo": partial(dpo_loss, **smoothed),
        "robust": partial(robust_loss, **smoothed),
        "ipo": partial(ipo_loss, beta=config.beta),
        "hinge": partial(hinge_loss, beta=config.beta),
        "apo_zero": partial(apo_zero_loss, beta=config.beta),
        "apo_down": partial(apo_down_loss, beta=config.beta),
    }
    return table[config.loss]


def _score_singles(
    policy: Policy, completions: Sequence[Pair], micro: MicroBatch, config: DPOConfig, kl: float
) -> Scored:
    """Return KTO's loss and metrics of each completion of a micro-batch; rewards and log-probabilities by label."""
    values = side_values(policy, micro)
    policy_B = torch.stack(list(values.values()))
    wide = {"dtype": torch.float64, "device": policy_B.device}
    own = [completions[side // 2] for side in values]
    refs = [pair.ref_chosen_logprob if pair.chosen_ids else pair.ref_rejected_logprob for pair in own]
    ratios_B = log_ratios(policy_B, torch.tensor(refs, **wide))
    is_desirable_B = torch.tensor([side % 2 == 0 for side in values], device=policy_B.device)
    loss_B = kto_loss(
        ratios_B,
        is_desirable_B,
        kl,
        beta=config.beta,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
    )
    up_B, down_B = is_desirable_B.double(), (~is_desirable_B).double()
    gains_B = (ratios_B - kl) * (up_B - down_B)
    rewards_B = config.beta * ratios_B
    columns = {
        "dpo/accuracy": agreement(gains_B),
        "dpo/desirable": up_B,
        "dpo/chosen_reward": rewards_B * up_B,
        "dpo/rejected_reward": rewards_B * down_B,
        "dpo/chosen_logprob": policy_B * up_B,
        "dpo/rejected_logprob": policy_B * down_B,
    }
    return loss_B, columns


REWARDS: tuple[str, ...] = ("dpo/margin", "dpo/chosen_reward", "dpo/rejected_reward")
LOGPROBS: tuple[str, ...] = ("dpo/chosen_logprob", "dpo/rejected_logprob")


def _shows_nll(config: DPOConfig) -> bool:
    return bool(config.sft_coef) or config.loss == "orpo"


def metric_names(config: DPOConfig) -> list[str]:
    """Return the names of the metrics that `scorer` gives for a loss."""
    if config.loss == "kto":
        return ["dpo/accuracy", "dpo/desirable", *REWARDS[1:], *LOGPROBS]
    names = ["dpo/accuracy", *REWARDS, *(() if config.loss == "reward" else LOGPROBS)]
    return [*names, "dpo/nll"] if _shows_nll(config) else names


def by_label(sums: dict[str, float]) -> dict[str, float]:
    """Turn KTO's sums over all completions into means over the desirable and the undesirable ones, with their gap."""
    share = {"chosen": sums["dpo/desirable"], "rejected": 1.0 - sums["dpo/desirable"]}
    means = {
        name: value / share[side] if side in share else value
        for name, value in sums.items()
        if share.get(side := name.removeprefix("dpo/").partition("_")[0], 1.0) > 0
    }
    if {"dpo/chosen_reward", "dpo/rejected_reward"} <= means.keys():
        means["dpo/margin"] = means["dpo/chosen_reward"] - means["dpo/rejected_reward"]
    return means


@torch.no_grad()
def mismatch_kl(policy: Policy, completions: Sequence[Pair], tokens: int) -> float:
    """Sum the log-ratios of the mismatched completions of this rank, in nats."""
    partners = [pair.partner for pair in completions]
    sums = [
        float(value) - completions[side // 2].ref_kl_logprob
        for micro in pair_micro_batches(partners, tokens, policy.device)
        for side, value in side_values(policy, micro).items()
    ]
    return sum(sums)


def train_step(
    policy: Policy, pairs: Sequence[Pair], config: DPOConfig, budget: TokenBudget | None = None
) -> StepResult:
    """Backpropagate the mean loss over all pairs of the step, on all ranks."""
    trained = sum(len(pair.chosen_ids) + len(pair.rejected_ids) for pair in pairs)
    read = sum(pair.num_tokens for pair in pairs)
    longest = max((pair.num_tokens for pair in pairs), default=0)
    budget = budget or TokenBudget(config.optim.token_budget, policy.model.parameters())
    mismatch = 0.0
    if config.loss == "kto":
        with gathered(policy.model):
            mismatch = budget.run(lambda tokens: mismatch_kl(policy, pairs, tokens), longest)
    num_pairs, num_trained_tokens, num_tokens, mismatch = all_reduce_sum(len(pairs), trained, read, mismatch)
    kl = max(mismatch / max(num_pairs, 1.0), 0.0)

    def cut(tokens: int) -> list[MicroBatch]:
        return pair_micro_batches(pairs, tokens, policy.device)

    coef = config.optim.router_aux_loss_coef
    with gathered(policy.model if coef else None):
        balance = Balance.of(policy, coef, cut, budget, longest, attention=FIT_ATTENTION)
    own = sharing(policy.model)
    dealt = pairs if own is None else _everyones(pairs)

    def work(tokens: int) -> dict[str, float]:
        return forward_backward(pair_micro_batches(dealt, tokens, policy.device, own), score, policy.model)

    score = balance.added_to(scorer(policy, dealt, num_pairs, config, kl=kl))
    totals = budget.run(work, longest=longest)
    sum_gradients(policy.model.parameters())
    names = metric_names(config)
    loss, *sums = all_reduce_sum(totals["loss"], *(totals.get(name, 0.0) for name in names))
    metrics = dict(zip(names, sums, strict=True))
    if config.loss == "kto":
        metrics = by_label(metrics) | {"dpo/kl": kl}
    return StepResult(loss, int(num_trained_tokens), int(num_tokens), metrics | balance.metrics, pairs)


def _everyones(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs of all ranks, in the order in which they were dealt out to the ranks."""
    return [Pair.from_row(row) for row in joined(gather_json([pair.as_row() for pair in pairs]))]


@torch.no_grad()
def validate(policy: Policy, pairs: Sequence[Pair], config: DPOConfig) -> dict[str, float]:
    """Return loss and accuracy on held-out pairs."""
    mine = [pairs[index] for index in shard(len(pairs))]
    kl = 0.0
    if config.loss == "kto":
        (mismatch,) = all_reduce_sum(mismatch_kl(policy, mine, config.optim.token_budget))
        kl = max(mismatch / len(pairs), 0.0)
    score = scorer(policy, mine, len(pairs), config, kl=kl)
    found = [score(micro) for micro in pair_micro_batches(mine, config.optim.token_budget, policy.device)]
    loss, accuracy = all_reduce_sum(
        sum(float(loss) for loss, _ in found), sum(metrics["dpo/accuracy"] for _, metrics in found)
    )
    return {"dpo/validation_loss": loss, "dpo/validation_accuracy": accuracy}


@torch.no_grad()
def with_reference(policy: Policy, pairs: Sequence[Pair], config: OptimConfig) -> list[Pair]:
    """Fill in the pairs' reference log-probabilities, from the policy itself."""
    scored: list[Pair] = []
    total = max(len(pairs), 1)
    names = ("ref_chosen_logprob", "ref_rejected_logprob")
    with open_display(
        "dpo: reference log-probabilities", total, (), enabled=rank() == 0, unit="completion"
    ) as display:
        advance = advancing(display)
        for start in range(0, len(pairs), PORTION):
            part = list(pairs[start : start + PORTION])
            for micro in pair_micro_batches(part, config.token_budget, policy.device):
                for side, value in side_values(policy, micro).items():
                    part[side // 2] = replace(part[side // 2], **{names[side % 2]: float(value)})
            partners = [pair.partner for pair in part]
            for micro in pair_micro_batches(partners, config.token_budget, policy.device):
                for side, value in side_values(policy, micro).items():
                    part[side // 2] = replace(part[side // 2], ref_kl_logprob=float(value))
            scored += part
            advance(len(part))
    return scored


def prepare_pairs(config: DPOConfig, policy: Policy, folder: Path) -> list[Pair]:
    """Create the run's pairs and write them to pairs.jsonl, or read those of an interrupted run.

    Raises:
        UserError: If there are none.
    """
    path = folder / PAIRS
    if not path.is_file():
        pairing = Pairing(config.max_pairs_per_problem, config.seed)
        if config.pairs:
            bad_rows: list[BadRow] = []
            pairs, left_out = read_pairs(
                config.pairs,
                policy,
                config.max_bad_rows,
                bad_rows,
                split=config.pairs_split,
                singly=config.loss == "kto",
                whole=config.loss == "reward",
            )
            if rank() == 0 and (said := write_quarantine(folder, bad_rows)):
                print(f"whet: {said}", flush=True)
            if left_out:
                print(
                    f"whet: warning: {left_out} of {left_out + len(pairs)} pairs do not fit the context; skipped"
                )
        else:
            task, problems = pair_problems(config, policy)
            judged = sample_judged(
                policy,
                task,
                problems,
                num_samples=config.num_samples,
                sampling=config.sampling,
                seed=sequence_seed("dpo", config.seed),
                title=f"dpo {task.name}: sampling",
            )
            found = [(problem, pair) for problem, row in judged for pair in pairing(problem, row)]
            pairs = [pair for _, pair in found]
            if config.loss == "reward":
                prefix, texts = policy.schema.generation_prefix, ("chosen", "rejected")
                pairs = [
                    encode_conversations(
                        policy, messages_of(problem), *(prefix + getattr(pair, name) for name in texts)
                    )
                    for problem, pair in found
                ]
        if config.loss == "kto":
            pairs = _matched(pairs, policy)
        if config.loss not in ("orpo", "reward"):  # these have no reference
            pairs = with_reference(policy, pairs, config.optim)
        rows = gather_rows([pair.as_row() for pair in pairs])
        if not rows and config.pairs:
            raise UserError(
                f"{config.pairs}: no pair fits in the context of {policy.model.config.max_positions} tokens"
            )
        if not rows:
            raise pairing.none_found()
        if rank() == 0:
            write_rows(path, rows)
        barrier()
    return [Pair.from_row(row) for row in load_rows(path)]


def _matched(pairs: Sequence[Pair], policy: Policy) -> list[Pair]:
    """Split this rank's pairs into completions with their mismatched partners, dealt over the ranks anew."""
    rows = gather_rows([one.as_row() for one in singles(pairs)])
    everywhere = with_partners([Pair.from_row(row) for row in rows], policy.model.config.max_positions)
    return [everywhere[index] for index in shard(len(everywhere))]


def plan(config: DPOConfig) -> str:
    """Describe the work without doing it."""
    made = f"{config.num_problems or 'all'} problems x {config.num_samples} completions"
    return align(
        "batch of one step",
        {
            "pairs": config.batch_size,
            "tokens per micro-batch, at most": config.optim.token_budget,
            "optimizer steps": f"{config.num_steps:,}, one per batch",
            "pairs in all": config.batch_size * config.num_steps,
            "pairs come from": config.pairs or made,
            "validation": f"{config.validation_share:.0%} of the prompts, every {config.validate_every:,} steps",
        },
    )


def main(config: DPOConfig, *, resume: Resume = False) -> None:
    """Run the training, write its folder and its report."""
    train(config, resume=resume)
    finish(config)


def check(config: DPOConfig, resume: Resume) -> None:
    """Find what a run would stop at before its first step; loads no weights, samples nothing and creates nothing.

    Raises:
        UserError: As the run would.
    """
    begin(config)
    policy, told = load_start(resolve_precision(config), weights=False), ""
    if config.pairs:
        whole, singly = config.loss == "reward", config.loss == "kto"
        pairs, left_out = read_pairs(
            config.pairs,
            policy,
            config.max_bad_rows,
            [],
            split=config.pairs_split,
            singly=singly,
            whole=whole,
        )
        told = f"{counted(len(pairs), 'pair')}; {left_out:,} more do not fit the context"
    else:
        task, problems = pair_problems(config, policy)
        told = f"{counted(len(problems), 'problem')} of task {task.name} to sample"
    end_check(config, [told], resume=resume)


def load_start(config: DPOConfig, *, weights: bool = True) -> Policy:
    """Load the model that a run starts from.

    Raises:
        UserError: If it is missing, or calls tools.
    """
    policy = load_trained(
        config, plain=bool(config.pairs), is_reward=config.loss == "reward", weights=weights
    )
    if policy.schema.tools:
        raise UserError(
            "this model calls tools, and pairs do not say which tokens a tool wrote; --policy.tools none"
        )
    return policy


def pair_problems(config: DPOConfig, policy: Policy) -> tuple[Task, list[Problem]]:
    """Return the task whose completions become pairs, and those of its problems that fit the context."""
    task = load_task(config.task)
    policy.expect(*answers_of(task))
    problems = take_problems(task, "train", config.num_problems)
    check_gold(task, problems, "pairs are made of right and wrong answers")
    return task, fitting_problems(policy, problems, min_new_tokens=config.sampling.max_new_tokens)


@watched()
def train(config: DPOConfig, *, resume: Resume = False, on_step: OnStep | None = None) -> Policy:
    """Run the training, write its run folder (without a report) and return the trained policy.

    Args:
        config: The run's settings.
        resume: Resume from a checkpoint.
        on_step: Called after each step.

    Raises:
        UserError: If inputs are inconsistent, there are no pairs, or the run cannot resume.
    """
    tracking = begin(config, watch=True, resume=resume)
    config = resolve_precision(config)
    policy = load_start(config)
    folder = open_folder(config, resume=resume)
    with gathered(policy.model):
        pairs = prepare_pairs(config, policy, folder)
    held_out = [pair for pair in pairs if is_held_out(pair.uid, config.seed, config.validation_share)]
    kept = [pair for pair in pairs if not is_held_out(pair.uid, config.seed, config.validation_share)]
    if not kept:
        raise UserError(f"all {len(pairs)} pairs are held out; lower validation_share")
    trained_on, validated_on = ([pair.as_problem() for pair in part] for part in (kept, held_out))
    write_origin(config, policy, trained_on, None, validated_on)

    def train_batch(drawn: Sequence[tuple[int, Pair]], budget: TokenBudget) -> StepResult:
        return train_step(policy, [pair for _, pair in drawn], config, budget)

    run = Run(
        "dpo",
        config,
        policy,
        tracking,
        best="dpo/validation_loss",
        headline=("dpo/loss", "dpo/accuracy", "dpo/margin", "dpo/validation_accuracy"),
        records=config.loss != "reward",  # which has no log-probabilities
    )
    fit = Fit(
        run,
        config,
        policy,
        train_batch,
        (lambda: validate(policy, held_out, config)) if held_out else None,
        longest=lambda: max(pair.num_tokens for pair in kept),
        on_step=on_step,
    )
    if resume:
        fit.restore(resume)
    prompts = counted(len({pair.uid for pair in kept}), "prompt")
    note = f"{counted(len(kept), 'pair')} of {prompts}; {counted(len(held_out), 'pair')} held out"
    with tracking:
        fit.train(EpochOrder(kept, config.seed), title="dpo", notes=[note])
    source = None if config.pairs else load_task(config.task)
    if source is not None:
        source.problems("train")  # read, so that it knows how its rows are divided
    asked = question_of(source, validated_on or trained_on)
    run.write_summary({"train_pairs": len(kept), "held_out_pairs": len(held_out), **asked})
    return policy
