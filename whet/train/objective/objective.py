"""The policy objective of a step: turns groups with advantages into one or more weight updates.

Every algorithm takes this path; they differ only in the arguments (`AlgoConfig`, `OffPolicyConfig`, `ValueConfig`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from whet.algo.config import AlgoConfig, OffPolicyConfig, ValueConfig
from whet.algo.corrections import correction_weights
from whet.algo.logprobs import reverse_kl
from whet.algo.losses import (
    kl_estimate,
    log_ratio,
    loss_denominator,
    policy_loss,
    teacher_gains,
    unbiased_kl,
    value_loss,
    weighted_sum,
)
from whet.algo.packing import TrainingSequence, pack
from whet.generate.policy import Policy
from whet.generate.sampling import sequence_seed
from whet.generate.scoring import hidden_rows, of_all_ranks, score_micro_batch
from whet.model.transformer import LanguageModel
from whet.ranks.collectives import all_gather_values, all_reduce_sum, sum_gradients
from whet.ranks.context import sharing
from whet.ranks.fsdp import ParallelConfig, gathered
from whet.telemetry.spans import span, spanned
from whet.train.objective.advantage import token_advantages, training_sequences
from whet.train.objective.reference import REPLICATE, Coefficients, Critic, Reference
from whet.train.objective.tally import (
    Tally,
    add_up,
    critic_metrics,
    gap_sums,
    mean_of,
    sampler_metrics,
    teacher_metrics,
    value_sums,
)
from whet.train.objective.teacher import ServerTeacher, TeacherConfig, load_teacher
from whet.train.optim.balance import Balance
from whet.train.optim.safety import TokenBudget, rehearse
from whet.train.optim.step import OptimConfig, Optimizer, forward_backward, shard_layers
from whet.train.rl_config import RLConfig
from whet.types import Group, MicroBatch

# Selection of a step's data for the gradient: sequences with signal, tokens of highest entropy.


def longest(sequences: Sequence[TrainingSequence]) -> int:
    """Return the tokens of the longest sequence, which is never split, whatever the micro-batch budget."""
    return max((sequence.num_tokens for sequence in sequences), default=0)


def has_advantage(sequence: TrainingSequence) -> bool:
    """Say whether any token of a sequence has a non-zero advantage."""
    if sequence.advantages_T is None:
        return sequence.advantage != 0
    return bool((sequence.advantages_T != 0).any())


def keep_top_entropy(
    sequences: Sequence[TrainingSequence],
    entropies: Sequence[torch.Tensor],
    share: float,
    dtype: torch.dtype,
) -> list[TrainingSequence]:
    """Set the policy weight of all tokens to 0 except the share of highest entropy in the whole step; keep ties.

    Args:
        sequences: This rank's sequences; every rank must call.
        entropies: Entropy of each trained token.
        share: Share of tokens to keep.
        dtype: Dtype of the weights.
    """
    # The empty tensor: a rank without sequences has nothing to concatenate, and must take part all the same.
    mine = torch.cat([*(part.cpu() for part in entropies), torch.zeros(0, dtype=dtype)])
    everywhere = all_gather_values(mine)
    # 0.07 x 100 is a little above 7 in floating point; without the subtraction that would be 8 tokens.
    count = max(1, math.ceil(share * everywhere.numel() - 1e-9))
    if not everywhere.numel():
        return list(sequences)
    floor = everywhere.topk(count).values[-1]
    kept = []
    for sequence, entropy_T in zip(sequences, entropies, strict=True):
        chosen_T = (entropy_T >= floor.to(entropy_T.device)).to(dtype)
        weights_T = sequence.policy_weights_T
        kept.append(
            replace(sequence, policy_weights_T=chosen_T if weights_T is None else weights_T * chosen_T)
        )
    return kept


class Objective:
    """The objective of one run, with a reference, a critic and a teacher if the arguments need them.

    Args:
        policy: The policy to train; reference and critic start as copies of its current state.
        algo: The objective.
        off_policy: Handling of stale samples.
        value: The critic's arguments; read with baseline 'value'.
        optim: Optimizer arguments; the critic's are derived from them; also micro-batch budget and precision.
        temperature: Sampling temperature of the rollouts.
        max_length: Longest completion in tokens, the constant of Dr. GRPO.
        seed: Seed of the order of minibatches.
        teacher: The teacher that samples are pulled to.
        parallel: How the ranks hold policy, reference and critic; a teacher is whole on each.

    Attributes:
        num_tokens_read: Tokens, including prompts, read by the last step's training passes, over all ranks.
    """

    def __init__(
        self,
        policy: Policy,
        algo: AlgoConfig,
        *,
        optim: OptimConfig,
        temperature: float,
        max_length: int,
        off_policy: OffPolicyConfig | None = None,
        value: ValueConfig | None = None,
        seed: int = 0,
        teacher: TeacherConfig | None = None,
        parallel: ParallelConfig = REPLICATE,
    ) -> None:
        self._policy = policy
        self._algo = algo
        self._off_policy = off_policy or OffPolicyConfig()
        self._value = value or ValueConfig()
        self._temperature = temperature
        self._max_length = max_length
        self._seed = seed
        self.num_tokens_read = 0.0
        self._coefficients = Coefficients(algo)
        self._reference = Reference(policy.model, algo, parallel) if algo.kl != "none" else None
        self._critic = Critic(policy, self._value, optim, parallel) if algo.baseline == "value" else None
        shard_layers(policy.model, parallel)  # after its copies
        self._teaches = teacher or TeacherConfig()
        self._teacher = load_teacher(self._teaches, policy)
        self._balance_coef = optim.router_aux_loss_coef
        # Their gradients are dropped when a pass runs out of memory and starts over with smaller micro-batches.
        trained = [policy.model, *([self._critic] if self._critic is not None else [])]
        self._budget = TokenBudget(
            optim.token_budget,
            [p for part in trained for p in part.parameters()],
            is_shared=sharing(policy.model) is not None,
        )
        wide = policy.model.head_weight.dtype == torch.float64
        self._dtype = torch.float64 if wide else torch.float32

    @classmethod
    def of(
        cls,
        config: RLConfig,
        policy: Policy,
        *,
        optim: OptimConfig | None = None,
        value: ValueConfig | None = None,
    ) -> Objective:
        """Create the objective of a run from its config.

        Args:
            config: The run's settings.
            policy: The policy to train.
            optim: Other settings of the update.
            value: Other settings of the critic.
        """
        return cls(
            policy,
            config.algo,
            optim=optim or config.optim,
            temperature=config.sampling.temperature,
            max_length=config.sampling.max_new_tokens,
            off_policy=config.off_policy,
            value=value or config.value,
            seed=config.seed,
            teacher=config.teacher,
            parallel=config.parallel,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint tensors of reference and critic."""
        return {
            name: tensor
            for part in (self._reference, self._critic)
            if part is not None
            for name, tensor in part.tensors().items()
        }

    def state(self) -> dict[str, Any]:
        """Return the rest of the checkpoint state."""
        return {**self._coefficients.state(), "token_budget": self._budget.tokens}

    def load(self, tensors: Mapping[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Restore the results of `tensors` and `state`."""
        for part in (self._reference, self._critic):
            if part is not None:
                part.load_tensors(tensors)
        self._coefficients.load_state(state)
        self._budget.tokens = int(state.get("token_budget", self._budget.tokens))

    def rehearse(self, longest: int) -> None:
        """Run a full micro-batch of sequences of `longest` tokens as a trial."""
        rehearse(self._policy, self._budget, longest)

    def update(
        self,
        groups: Sequence[Group],
        optimizer: Optimizer,
        lr: float,
        *,
        step: int = 0,
        progress: float = 0.0,
    ) -> dict[str, float]:
        """Run the step's updates: backpropagate over all micro-batches and ranks, then update the weights.

        Args:
            groups: This rank's groups that the loss uses, with advantages.
            optimizer: Optimizer of the policy's model.
            lr: Learning rate of this step.
            step: Steps done before this one.
            progress: Completed share of the run, 0 to 1.

        Returns:
            Metrics of the step: means over its updates.
        """
        algo = self._algo
        self._coefficients.begin_step(progress)
        self.num_tokens_read = 0.0
        sequences, tally = self._prepare(training_sequences(groups, algo))
        teaching = {s.group for s in sequences if self._divergence_in_loss or has_advantage(s)}
        metrics = {"rl/groups_with_signal": all_reduce_sum(len(teaching))[0]}
        is_warmup = self._critic is not None and step < self._value.warmup_steps
        results: list[dict[str, float]] = []
        for epoch in range(algo.num_epochs):
            for part in self._minibatches(sequences, step, epoch):
                if not is_warmup:
                    # Sampler and trainer are compared at the first update only: later ones have moved the policy.
                    gap = tally if not results and not self._is_recomputed else None
                    result = self._update_policy(part, optimizer, lr, gap)
                    results += [result] if result else []
                if self._critic is not None:
                    self._update_critic(part, lr * self._critic.lr_ratio, tally)
        metrics |= mean_of(results) | {"rl/updates": float(len(results))}
        metrics |= sampler_metrics(tally, has_correction=self._off_policy.correction != "none")
        if self._critic is not None:
            metrics |= critic_metrics(tally)
        if self._teacher is not None and not self._divergence_in_loss:
            metrics |= teacher_metrics(tally)
        if self._reference is not None:
            self._reference.follow(self._policy.model, step + 1)
            metrics["rl/kl_coef"] = self._coefficients.kl
        else:
            metrics.pop("rl/kl", None)
        if algo.has_entropy_bonus:
            metrics["rl/entropy_coef"] = self._coefficients.entropy
        kl, entropy = metrics.get("rl/kl", 0.0), metrics.get("rl/entropy", math.nan)
        # One nan would stay in an adaptive coefficient for the rest of the run.
        if results and math.isfinite(kl) and math.isfinite(entropy):
            self._coefficients.end_step(kl=kl, entropy=entropy)
        return metrics

    @property
    def _is_recomputed(self) -> bool:
        return self._off_policy.proximal == "recomputed"

    @property
    def _kl_in_loss(self) -> bool:
        return self._algo.kl not in ("none", "log", "k1_reward")

    @property
    def _divergence_in_loss(self) -> bool:
        return self._teacher is not None and self._teaches.kind == "full"

    def _prepare(self, sequences: list[TrainingSequence]) -> tuple[list[TrainingSequence], Tally]:
        """Compute everything that the objective needs before its first update, and the per-token advantages."""
        algo, tally = self._algo, Tally()
        needs_policy = self._is_recomputed or algo.entropy_top_share < 1
        frozen = self._reference, self._critic, None if self._divergence_in_loss else self._local_teacher
        if needs_policy or any(part is not None for part in frozen):
            models = [
                self._policy.model if needs_policy else None,
                None if self._reference is None else self._reference.model,
                None if self._critic is None else self._critic.trunk,
            ]
            with gathered(*models):
                measured, tally = self._budget.run(
                    lambda tokens: self._measure_all(sequences, needs_policy, tokens), longest(sequences)
                )
            entropies = {index: parts.pop("entropy") for index, parts in measured.items()}
            for index, parts in measured.items():
                sequences[index] = replace(sequences[index], **parts)
            if algo.entropy_top_share < 1:
                ordered = [entropies[index] for index in range(len(sequences))]
                sequences = keep_top_entropy(sequences, ordered, algo.entropy_top_share, self._dtype)
        if algo.is_token_level:
            with span("advantage_computation"):
                sequences = token_advantages(sequences, algo, self._value, self._coefficients.kl)
        if isinstance(self._teacher, ServerTeacher):
            found = self._teacher.score(sequences)
            sequences = [
                replace(s, teacher_logprobs_T=logprobs_T)
                for s, logprobs_T in zip(sequences, found, strict=True)
            ]
        if self._teacher is not None and not self._divergence_in_loss:
            sequences = [self._taught(sequence, tally) for sequence in sequences]
        return sequences, tally

    @property
    def _local_teacher(self) -> LanguageModel | None:
        return self._teacher if isinstance(self._teacher, LanguageModel) else None

    def _taught(self, sequence: TrainingSequence, tally: Tally) -> TrainingSequence:
        """Add what a teacher says about each sampled token to its advantage."""
        assert sequence.teacher_logprobs_T is not None
        logprobs_T = sequence.proximal_logprobs_T
        if logprobs_T is None:
            logprobs_T = torch.tensor(sequence.sampler_logprobs, dtype=torch.float32)
        pair = logprobs_T.double().cpu(), sequence.teacher_logprobs_T.double().cpu()
        tally.add(
            {"teacher_kl": float(kl_estimate(*pair, "k3").sum()), "teacher_tokens": float(len(logprobs_T))}
        )
        gains_T = teacher_gains(*pair, self._teaches.coef)
        own = sequence.advantage if sequence.advantages_T is None else sequence.advantages_T.double().cpu()
        return replace(sequence, advantages_T=own + gains_T)

    @spanned("measure_logprobs")
    @torch.no_grad()
    def _measure_all(
        self, sequences: Sequence[TrainingSequence], needs_policy: bool, token_budget: int
    ) -> tuple[dict[int, dict[str, torch.Tensor]], Tally]:
        """Score all sequences before the first update; return columns per sequence, and sums over all tokens."""
        measured: dict[int, dict[str, torch.Tensor]] = {}
        tally = Tally()
        for micro in self._pack(sequences, token_budget):
            columns = self._measure(micro, needs_policy, tally)
            # A micro-batch orders its sequences by length; `indices_B` leads back to the step's order. None of them is
            # without a trained token, so each has a stretch of the columns.
            ends = torch.bincount(micro.sequence_M).cumsum(0).tolist()
            for index, start, end in zip(micro.indices_B, [0, *ends], ends, strict=False):
                measured[index] = {name: column_M[start:end] for name, column_M in columns.items()}
        return measured, tally

    def _measure(self, micro: MicroBatch, needs_policy: bool, tally: Tally) -> dict[str, torch.Tensor]:
        """Score a micro-batch before the first update; return columns by the names of `TrainingSequence`."""
        columns: dict[str, torch.Tensor] = {"entropy": torch.zeros_like(micro.weights_M)}
        if needs_policy:
            logprobs_M, columns["entropy"] = self._policy.score(micro, temperature=self._temperature)
            if self._is_recomputed:
                low, high = self._off_policy.bounds
                kind = self._off_policy.correction
                # The loss's ratio then starts at 1, and the gap between sampler and trainer is a weight of its own.
                columns["proximal_logprobs_T"] = logprobs_M
                columns["policy_weights_T"], active_M = correction_weights(
                    logprobs_M, micro.sampler_logprobs_M, micro.sequence_M, kind, low=low, high=high
                )
                tally.add(gap_sums(logprobs_M, micro.sampler_logprobs_M))
                tally.add({"correction_active": float(active_M.sum())})
        frozen = {"ref_logprobs_T": None if self._reference is None else self._reference.model}
        frozen["teacher_logprobs_T"] = None if self._divergence_in_loss else self._local_teacher
        for name, model in frozen.items():
            if model is not None:
                columns[name], _ = score_micro_batch(
                    model,
                    micro,
                    temperature=self._temperature,
                    autocast=self._policy.autocast,
                    attention=self._policy.attention,
                )
        if self._critic is not None:
            columns["start_values_T"] = self._critic.values(micro)
        return columns

    @spanned("pack")
    def _pack(
        self, sequences: Sequence[TrainingSequence], tokens: int, **options: Any
    ) -> tuple[MicroBatch, ...]:
        place: dict[str, Any] = {"device": self._policy.device, "dtype": self._dtype}
        return pack(sequences, token_budget=tokens, **place, **options).micro_batches

    def _minibatches(
        self, sequences: Sequence[TrainingSequence], step: int, epoch: int
    ) -> list[list[TrainingSequence]]:
        """Distribute whole groups over minibatches by a hash of their names.

        The distribution depends neither on the number of ranks nor on which of them has a group.
        """
        count = self._algo.num_minibatches
        if count == 1:
            return [list(sequences)]
        keys = {s.group: sequence_seed("minibatch", self._seed, step, epoch, s.group) for s in sequences}
        mine = torch.tensor(list(keys.values()), dtype=torch.int64)
        everywhere = sorted(set(all_gather_values(mine).tolist()))
        # Equal stretches of the sorted hashes of all ranks: minibatches differ by at most one group.
        number_of = {key: index * count // len(everywhere) for index, key in enumerate(everywhere)}
        minibatches: list[list[TrainingSequence]] = [[] for _ in range(count)]
        for sequence in sequences:
            minibatches[number_of[keys[sequence.group]]].append(sequence)
        return minibatches

    def _update_policy(
        self, counted: Sequence[TrainingSequence], optimizer: Optimizer, lr: float, tally: Tally | None
    ) -> dict[str, float]:
        """Run one update of the policy; return its metrics, or none if no token carries signal and nothing is
        updated."""
        # Denominators count all scored samples; only those that carry signal are run. So dropping the others saves
        # time without changing the gradient.
        trained = self._teaching(counted)
        num_tokens, num_sequences, num_prompts, num_scored_tokens, num_read = all_reduce_sum(
            sum(s.num_trained for s in counted),
            len(counted),
            sum(s.num_trained / s.num_group_tokens for s in counted),
            sum(sequence.num_trained for sequence in trained),
            sum(sequence.num_tokens for sequence in trained),
        )
        self.num_tokens_read += num_read
        denominator = loss_denominator(
            self._algo.aggregation,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            num_prompts=round(num_prompts),
            max_length=self._max_length,
        )

        with gathered(self._policy.model if self._balance_coef else None):
            balance = Balance.of(
                self._policy,
                self._balance_coef,
                lambda tokens: self._pack(trained, tokens),
                self._budget,
                longest(trained),
            )
        totals, sums = self._budget.run(
            lambda tokens: self._backpropagate(counted, tokens, denominator, tally is not None, balance),
            longest(trained),
        )
        if tally is not None:
            tally.join(sums)
        # Every rank must take part in the collectives, even one without a trained token; so the decision to skip the
        # update depends on the sum over ranks.
        sum_gradients(self._policy.model.parameters())
        if num_scored_tokens == 0:
            return {}
        names = ["loss", "entropy", "kl", "clip_high", "clip_low", "ratio_spread"]
        names += ["teacher_kl"] if self._divergence_in_loss else []
        loss, *counts = all_reduce_sum(*(totals.get(name, 0.0) for name in names))
        norm = optimizer.step(lr, loss=loss)
        shares = {
            f"rl/{name}": value / num_scored_tokens for name, value in zip(names[1:], counts, strict=True)
        }
        return {"rl/loss": loss, **shares, "rl/grad_norm": norm, **balance.metrics}

    def _teaching(self, counted: Sequence[TrainingSequence]) -> list[TrainingSequence]:
        needs_all = self._kl_in_loss or self._divergence_in_loss or self._algo.has_entropy_bonus
        needs_all = needs_all or self._balance_coef > 0
        return [s for s in counted if needs_all or has_advantage(s)]

    @spanned("policy_loss_backward")
    def _backpropagate(
        self,
        counted: Sequence[TrainingSequence],
        tokens: int,
        denominator: float,
        measures: bool,
        balance: Balance,
    ) -> tuple[dict[str, float], Tally]:
        """Accumulate the gradient of sequences, in micro-batches of `tokens` tokens; return sums for the metrics."""
        sums = Tally()
        model = self._policy.model
        options: dict[str, Any] = {"aggregation": self._algo.aggregation, "sharing": sharing(model)}
        micro_batches = self._pack(self._teaching(counted), tokens, **options)
        own = sums if measures else None
        score = partial(self._micro_loss, denominator=denominator, tally=own)
        return forward_backward(micro_batches, balance.added_to(score), model), sums

    def _micro_loss(
        self, micro: MicroBatch, denominator: float, tally: Tally | None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return a micro-batch's share of the objective, and its sums for the metrics."""
        algo = self._algo
        hidden_MD = self._policy.hidden(micro) if self._divergence_in_loss else None
        given: dict[str, Any] = {"hidden_MD": hidden_MD, "temperature": self._temperature}
        logprobs_M, entropy_M = self._policy.score(micro, **given)
        policy_M, high_M, low_M = policy_loss(
            logprobs_M,
            micro.proximal_logprobs_M,
            micro.advantages_M,
            sequence_M=micro.sequence_M,
            ratio=algo.ratio,
            surrogate=algo.surrogate,
            clip_low=algo.clip_low,
            clip_high=algo.clip_high,
            dual_clip=algo.dual_clip,
            tau_positive=algo.tau_positive,
            tau_negative=algo.tau_negative,
        )
        # `where` before the product: a rejected token's loss may be inf or nan, and 0 x inf is nan.
        used_M = micro.policy_weights_M != 0
        loss_M = torch.where(used_M, policy_M, 0.0) * micro.policy_weights_M
        # Penalties come after the policy's weights: they hold for every scored token, whatever its correction.
        if algo.kl == "k3_unbiased":
            kl_M = unbiased_kl(logprobs_M, micro.ref_logprobs_M, micro.sampler_logprobs_M)
            loss_M = loss_M + self._coefficients.kl * kl_M
        elif algo.kl in ("k2_loss", "k3_loss"):
            estimator = "k2" if algo.kl == "k2_loss" else "k3"
            loss_M = loss_M + self._coefficients.kl * kl_estimate(logprobs_M, micro.ref_logprobs_M, estimator)
        divergence_M = None
        if hidden_MD is not None:
            divergence_M = self._divergence(micro, hidden_MD)
            loss_M = loss_M + self._teaches.coef * divergence_M
        if self._coefficients.entropy:
            loss_M = loss_M - self._coefficients.entropy * entropy_M
        with torch.no_grad():
            if tally is not None and micro.is_counted:
                tally.add(gap_sums(logprobs_M, micro.sampler_logprobs_M))
            sums = {
                "entropy": entropy_M,
                "clip_high": high_M & used_M,
                "clip_low": low_M & used_M,
                "ratio_spread": log_ratio(logprobs_M, micro.proximal_logprobs_M).abs(),
            }
            if self._reference is not None:
                sums["kl"] = kl_estimate(logprobs_M, micro.ref_logprobs_M, "k3")
            if divergence_M is not None:
                sums["teacher_kl"] = divergence_M
            totals = add_up(sums)
        # A plain sum: weights and denominator count over the whole step and all ranks, so no split of the step into
        # micro-batches changes the gradient.
        return weighted_sum(loss_M, micro.weights_M, denominator), totals

    def _divergence(self, micro: MicroBatch, hidden_MD: torch.Tensor) -> torch.Tensor:
        """Return KL(policy || teacher) over the whole vocabulary, of each trained token's distribution."""
        teacher, policy = self._local_teacher, self._policy
        assert teacher is not None
        with torch.no_grad():
            teacher_MD = hidden_rows(teacher, micro, autocast=policy.autocast, attention=policy.attention)
        divergence_M = reverse_kl(
            hidden_MD,
            policy.model.head_weight,
            teacher_MD,
            teacher.head_weight,
            temperature=self._temperature,
            num_valid=policy.model.num_valid_tokens,
            cap=policy.model.config.block.logit_cap,
            teacher_cap=teacher.config.block.logit_cap,
        )
        return of_all_ranks(divergence_M, micro, policy.model.head_weight)

    def _update_critic(self, counted: Sequence[TrainingSequence], lr: float, tally: Tally) -> None:
        """Run one update of the critic on all tokens of a minibatch, with half the mean squared error."""
        assert self._critic is not None
        critic = self._critic
        (num_tokens,) = all_reduce_sum(sum(sequence.num_trained for sequence in counted))
        sums = Tally()

        def score(micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
            values_M = critic.values(micro)
            loss_M, clipped_M = value_loss(
                values_M, micro.start_values_M, micro.returns_M, clip=self._value.clip
            )
            if micro.is_counted:
                sums.add(value_sums(values_M, micro.start_values_M, micro.returns_M, clipped_M))
            # Without a token on any rank the loss is 0, not nan.
            return weighted_sum(loss_M, torch.ones_like(loss_M), max(num_tokens, 1.0)), {}

        def backpropagate(tokens: int) -> None:
            sums.clear()  # of an attempt that ran out of memory
            micro_batches = self._pack(counted, tokens, sharing=sharing(critic.trunk))
            forward_backward(micro_batches, score, critic.trunk)

        with span("value_loss_backward"):
            self._budget.run(backpropagate, longest(counted))
        tally.join(sums)
        sum_gradients(critic.parameters())
        if num_tokens:
            norm = critic.optimizer.step(lr)
            if (
                not critic.optimizer.num_overflows
            ):  # otherwise its loss scale is lower now, and no update was done
                tally.add({"value_norm": norm, "value_updates": 1.0})
            critic.optimizer.num_overflows = 0
