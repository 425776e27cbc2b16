"""Start-up probe: checks that sampler and trainer agree to the last bit on this machine, with this model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from whet.algo.packing import TrainingSequence, pack
from whet.generate.backends.base import CopySampler
from whet.generate.engine import Request
from whet.generate.policy import Policy
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.ranks.collectives import all_reduce_max
from whet.ranks.context import sharing, split
from whet.ranks.fsdp import gathered
from whet.types import UserError

PROBE_PROMPTS = 6
PROBE_SAMPLES = 5
PROBE_TOKENS = 24
GAP_LIMIT = 0.1
"""Largest mean difference, in nats, of log-probabilities that can be called those of the same model."""
RAW_LIMIT = 1e-3


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of the probe.

    Attributes:
        exact: Whether all log-probabilities were equal.
        max_gap: Largest difference in nats.
        mean_gap: Mean difference in nats, where the sampler has a copy of the weights; else None.
        is_divided: Whether ranks divide the trainer's matrices, whose products then are no sampler's to the last bit.
    """

    exact: bool
    max_gap: float
    mean_gap: float | None = None
    is_divided: bool = False

    def __str__(self) -> str:
        if self.exact and self.mean_gap is None:
            return "exact: sampler and trainer log-probabilities are bitwise equal on this machine"
        if self.exact:
            return "exact: the log-probabilities of the sampler's copy and of the trainer are bitwise equal"
        if self.is_divided:
            return (
                f"approx: max |delta log-prob| {self.max_gap:.1e}, because ranks that divide the trainer's matrices "
                "(parallel.tensor) add their products in another order than the sampler"
            )
        if self.mean_gap is not None:
            return (
                f"approx: max |delta log-prob| {self.max_gap:.1e}, mean {self.mean_gap:.1e}, because the sampler's "
                "kernels round in another way than the trainer's"
            )
        return (
            f"approx: max |delta log-prob| {self.max_gap:.1e}, because arithmetic here is not row-invariant"
        )


def probe_policy(
    policy: Policy, sampling: SamplingParams | None = None, sampler: CopySampler | None = None
) -> ProbeResult:
    """Sample a few completions of odd lengths in an odd batch, and score them as the trainer does.

    Args:
        policy: The policy as it will be trained.
        sampling: Temperature, above 0, and filters of the rollouts; default: temperature 1 without filters.
        sampler: What samples in place of the policy's engine; it has its present weights.

    Returns:
        Whether all log-probabilities are bitwise equal, and the largest difference.

    Raises:
        UserError: If those of a sampler with a copy are not the trainer's by far: other weights, or not those of the
            distribution that was drawn from.
    """
    generator = torch.Generator().manual_seed(0)
    room = policy.model.config.max_positions
    new_tokens = max(1, min(PROBE_TOKENS, room // 2))
    requests = []
    for index in range(PROBE_PROMPTS):
        length = min(3 + 7 * index, room - new_tokens)
        ids = torch.randint(0, policy.model.num_valid_tokens, (length,), generator=generator).tolist()
        seeds = tuple(sequence_seed("probe", index, sample) for sample in range(PROBE_SAMPLES))
        requests.append(Request(prompt_ids=tuple(ids), seeds=seeds))
    params = replace(sampling or SamplingParams(), max_new_tokens=new_tokens)
    completions = (sampler or policy.engine(trains=True)).generate(requests, params)
    sequences = [
        TrainingSequence(
            prompt_ids=request.prompt_ids,
            completion_ids=done.ids,
            sampler_logprobs=done.logprobs,
            kept=done.kept,
            experts=done.experts,
        )
        for request, row in zip(requests, completions, strict=True)
        for done in row
    ]
    (micro,) = pack(sequences, token_budget=2**30, device=policy.device).micro_batches
    with torch.no_grad():
        scored, _ = policy.score(micro, temperature=params.temperature)
    gaps_M = (scored.float() - micro.sampler_logprobs_M).abs()
    gap, mean = float(gaps_M.max()), float(gaps_M.mean())
    # float16 is never called exact: its products run in other kernels, whose differences its rounding hides at first.
    is_half = torch.float16 in (policy.autocast, policy.model.head_weight.dtype)
    is_exact = gap == 0.0 and not is_half
    if sampler is None:
        return ProbeResult(is_exact, gap)
    with torch.no_grad():
        raw, _ = policy.score(replace(micro, kept=None))
    raw_mean = float((raw.float() - micro.sampler_logprobs_M).abs().mean())
    if mean > 10 * raw_mean and mean > RAW_LIMIT:
        raise UserError(
            f"the sampler's log-probabilities are those at temperature 1 (they differ by {raw_mean:.1e} nats from the "
            f"trainer's, by {mean:.1e} at temperature {params.temperature:g}): start vLLM with --logprobs-mode "
            "processed_logprobs"
        )
    if mean > GAP_LIMIT:
        raise UserError(
            f"the sampler's log-probabilities differ by {mean:.2f} nats per token from the trainer's, expected at most "
            f"{GAP_LIMIT}: it has another model or tokenizer, did not take the weights, or computes in a precision "
            "that is too low"
        )
    return ProbeResult(is_exact, gap, mean)


def probe_divided(policy: Policy, before: ProbeResult) -> ProbeResult:
    """Compare the log-probabilities of matrices that ranks divide with those of whole ones; all ranks call.

    Args:
        policy: The policy as it is trained.
        before: How sampler and trainer agree where every rank has whole matrices.

    Returns:
        How they agree in training, never exactly; the argument where nothing is divided.
    """
    own = sharing(policy.model)
    if own is None or not own.has_all_rows:
        return before
    generator = torch.Generator().manual_seed(0)
    room, sequences = min(policy.model.config.max_positions, 8 * PROBE_TOKENS), []
    for index in range(PROBE_PROMPTS):
        count = max(2, room * (index + 1) // PROBE_PROMPTS)
        ids = tuple(torch.randint(0, policy.model.num_valid_tokens, (count,), generator=generator).tolist())
        sequences.append(TrainingSequence(prompt_ids=ids[:1], completion_ids=ids[1:]))
    (micro,) = pack(sequences, token_budget=2**30, device=policy.device).micro_batches
    with torch.no_grad():
        divided, _ = policy.score(split(micro, own))
        with gathered(policy.model):
            whole, _ = policy.score(micro)
    gap = all_reduce_max(float((divided - whole).abs().max()))
    return replace(before, exact=False, max_gap=max(before.max_gap, gap), is_divided=True)
