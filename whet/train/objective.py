"""The policy objective of a step: from groups with advantages to one update of the weights.

GRPO, Dr. GRPO and DAPO differ in the arguments of `AlgoConfig` alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from whet.algo.advantages import Baseline, Scale, group_advantages
from whet.algo.losses import Aggregation, kl_estimate, loss_denominator, policy_loss, weighted_sum
from whet.algo.packing import TrainingSequence, pack
from whet.distributed import all_reduce_max, all_reduce_sum, sum_gradients
from whet.generate.policy import Policy
from whet.generate.scoring import score_micro_batch
from whet.model.transformer import LanguageModel
from whet.train.rollout import reward_matrix
from whet.train.step import Optimizer, forward_backward
from whet.types import Group, MicroBatch, Sample


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """The policy objective: advantage, clip, aggregation, KL. GRPO by default."""

    baseline: Baseline = "group_mean"
    """What is subtracted from a reward: group_mean (GRPO), leave_one_out (RLOO) or none (REINFORCE)."""
    scale: Scale = "group"
    """What the difference is divided by: its group's standard deviation (GRPO), the batch's, or none (Dr. GRPO)."""
    std_ddof: int = 1
    """1 for the sample, 0 for the population standard deviation."""
    eps: float = 1e-4
    """Added to the standard deviation."""
    advantage_clip: float | None = None
    """Largest absolute advantage, or none."""
    aggregation: Aggregation = "token_mean"
    """token_mean (DAPO), sequence_mean (GRPO as published) or constant (Dr. GRPO); denominators are global."""
    clip_low: float = 0.2
    """Lower clip range of the ratio."""
    clip_high: float = 0.2
    """Upper clip range; 0.28 is DAPO's clip-higher."""
    kl: Literal["none", "k2", "k3"] = "none"
    """KL to the starting policy in the loss: k2 has the gradient of KL(policy || reference), k3 is GRPO's."""
    kl_coef: float = 0.0
    """Weight of the KL term; read only when kl is not none."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    uninformative: Literal["keep", "drop", "refill"] = "drop"
    """Groups whose rewards are all equal: keep them in the denominators, drop them, or sample others (DAPO)."""
    max_refills: int = 4
    """refill: rounds of further sampling before the step goes on with what there is."""
    overlong_cache: int = 0
    """DAPO's soft length punishment ramps over this many tokens before max_new_tokens; 0 for none."""
    mask_truncated: bool = False
    """Leave cut-off completions out of the loss and its denominators (DAPO's overlong filter)."""

    def __post_init__(self) -> None:
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0):
            raise ValueError(
                f"clip_low = {self.clip_low}, clip_high = {self.clip_high}: expected 0 to 1, and 0 or more"
            )
        if (self.kl == "none") != (self.kl_coef == 0):
            raise ValueError(
                f"kl = {self.kl} with kl_coef = {self.kl_coef}: give both or neither (0 loads no reference)"
            )
        if self.kl_coef < 0 or self.eps < 0 or self.max_refills < 0 or self.overlong_cache < 0:
            raise ValueError("kl_coef, eps, max_refills and overlong_cache: expected 0 or more")
        if self.baseline == "none" and self.uninformative != "keep":
            raise ValueError(
                f"uninformative = {self.uninformative} with baseline = none: without a baseline equal rewards teach "
                "too; set uninformative to keep"
            )
        if self.std_ddof not in (0, 1):
            raise ValueError(f"std_ddof = {self.std_ddof}: expected 0 or 1")


def with_advantages(groups: Sequence[Group], algo: AlgoConfig) -> list[Group]:
    """Return the groups with every sample's advantage filled in (None stays for unscorable samples)."""
    if not groups:
        return []
    rewards_PG, scored_PG = reward_matrix(groups)
    advantages_PG = group_advantages(
        rewards_PG,
        scored_PG,
        baseline=algo.baseline,
        scale=algo.scale,
        std_ddof=algo.std_ddof,
        eps=algo.eps,
        clip=algo.advantage_clip,
    ).tolist()
    return [
        replace(
            group,
            samples=tuple(
                sample if sample.reward is None else replace(sample, advantage=advantage)
                for sample, advantage in zip(group.samples, row, strict=True)
            ),
        )
        for group, row in zip(groups, advantages_PG, strict=True)
    ]


def counted_samples(groups: Sequence[Group], *, mask_truncated: bool) -> list[Sample]:
    """Return the samples that enter the loss's denominators: scored, and not cut off where those are masked."""
    return [
        sample
        for group in groups
        for sample in group.samples
        if sample.advantage is not None and not (mask_truncated and sample.finish_reason == "length")
    ]


def training_sequence(sample: Sample) -> TrainingSequence:
    """Turn a sample into what the trainer reads: its very tokens and log-probabilities, never re-encoded text."""
    assert sample.advantage is not None
    return TrainingSequence(
        prompt_ids=sample.prompt_ids,
        completion_ids=sample.completion_ids,
        advantage=sample.advantage,
        sampler_logprobs=sample.sampler_logprobs,
    )


class Objective:
    """The objective of one run, with its frozen reference where a KL term is on.

    Args:
        policy: The policy that is trained; as it is now, it becomes the reference.
        algo: The objective.
        temperature: Sampling temperature of the rollouts.
        max_length: Longest completion in tokens, the constant of Dr. GRPO.
        token_budget: Tokens of one micro-batch.
        autocast: Compute dtype when it is not the parameters' own.

    Attributes:
        num_tokens_read: Tokens, prompts included, that the last update's training pass read, over all ranks.
    """

    def __init__(
        self,
        policy: Policy,
        algo: AlgoConfig,
        *,
        temperature: float,
        max_length: int,
        token_budget: int,
        autocast: torch.dtype | None,
    ) -> None:
        self._policy = policy
        self._algo = algo
        self._temperature = temperature
        self._max_length = max_length
        self._token_budget = token_budget
        self._autocast = autocast
        self.num_tokens_read = 0.0
        self._reference: LanguageModel | None = None
        if algo.kl != "none":
            self._reference = copy.deepcopy(policy.model).requires_grad_(False)

    def update(self, groups: Sequence[Group], optimizer: Optimizer, lr: float) -> dict[str, float]:
        """Backpropagate the objective over all micro-batches and ranks, and update the weights once.

        Args:
            groups: Groups that the loss uses, with advantages.
            optimizer: Optimizer of the policy's model.
            lr: Learning rate of this step.

        Returns:
            Metrics of the update.
        """
        algo = self._algo
        counted = counted_samples(groups, mask_truncated=algo.mask_truncated)
        needs_all = algo.kl != "none" or algo.entropy_coef != 0
        trained = [training_sequence(s) for s in counted if needs_all or s.advantage != 0]
        batch = pack(
            trained,
            token_budget=self._token_budget,
            aggregation=algo.aggregation,
            device=self._policy.device,
        )
        num_tokens, num_sequences, num_scored_tokens, self.num_tokens_read = all_reduce_sum(
            sum(len(s.completion_ids) for s in counted),
            len(counted),
            batch.num_trained_tokens,
            sum(sequence.num_tokens for sequence in trained),
        )
        denominator = loss_denominator(
            algo.aggregation,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            max_length=self._max_length,
        )
        num_scored = max(num_scored_tokens, 1.0)
        totals = forward_backward(
            batch.micro_batches, lambda micro: self._micro_loss(micro, denominator, num_scored)
        )
        sum_gradients(self._policy.model.parameters())
        if num_scored_tokens == 0:
            return {"rl/loss": 0.0, "rl/grad_norm": 0.0, "rl/logprob_gap_mean": 0.0, "rl/ratio_drift": 0.0}
        norm = optimizer.step(lr)
        names = ["loss", "entropy", "kl", "clip_high", "clip_low", "logprob_gap_mean"]
        summed = dict(zip(names, all_reduce_sum(*(totals.get(name, 0.0) for name in names)), strict=True))
        gap = all_reduce_max(totals.get("logprob_gap_max", 0.0))
        if self._reference is None:
            summed.pop("kl")
        metrics = {f"rl/{name}": value for name, value in summed.items()}
        return metrics | {
            "rl/grad_norm": norm,
            "rl/logprob_gap_max": gap,
            "rl/ratio_drift": math.expm1(min(gap, 20.0)),
        }

    def _micro_loss(
        self, micro: MicroBatch, denominator: float, num_scored: float
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return a micro-batch's share of the objective and of the metrics."""
        algo = self._algo
        options = {
            "temperature": self._temperature,
            "autocast": self._autocast,
            "attention": self._policy.attention,
        }
        logprobs_M, entropy_M = score_micro_batch(self._policy.model, micro, **options)
        loss_M, high_M, low_M = policy_loss(
            logprobs_M,
            micro.sampler_logprobs_M,
            micro.advantages_M,
            clip_low=algo.clip_low,
            clip_high=algo.clip_high,
        )
        kl_sum = 0.0
        if self._reference is not None and algo.kl != "none":
            with torch.no_grad():
                ref_logprobs_M, _ = score_micro_batch(self._reference, micro, **options)
            loss_M = loss_M + algo.kl_coef * kl_estimate(logprobs_M, ref_logprobs_M, algo.kl)
            kl_sum = float(kl_estimate(logprobs_M.detach(), ref_logprobs_M, "k3").sum())
        if algo.entropy_coef:
            loss_M = loss_M - algo.entropy_coef * entropy_M
        with torch.no_grad():
            gap_M = (logprobs_M - micro.sampler_logprobs_M).abs()
            metrics = {
                "entropy": float(entropy_M.sum()) / num_scored,
                "kl": kl_sum / num_scored,
                "clip_high": float(high_M.sum()) / num_scored,
                "clip_low": float(low_M.sum()) / num_scored,
                "logprob_gap_mean": float(gap_M.sum()) / num_scored,
                "logprob_gap_max": float(gap_M.max()),
            }
        return weighted_sum(loss_M, micro.weights_M, denominator), metrics
