"""Start-up probe: checks that sampler and trainer agree to the last bit on this machine, with this model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from whet.algo.packing import TrainingSequence, pack
from whet.generate.engine import Request
from whet.generate.policy import Policy
from whet.generate.sampling import SamplingParams, sequence_seed

PROBE_PROMPTS = 6
PROBE_SAMPLES = 5
PROBE_TOKENS = 24


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of the probe: whether all log-probabilities were equal, and the largest difference in nats."""

    exact: bool
    max_gap: float

    def __str__(self) -> str:
        if self.exact:
            return "exact: sampler and trainer log-probabilities are bitwise equal on this machine"
        return (
            f"approx: max |delta log-prob| {self.max_gap:.1e}, because arithmetic here is not row-invariant"
        )


def probe_policy(policy: Policy, sampling: SamplingParams | None = None) -> ProbeResult:
    """Sample a few completions of odd lengths in an odd batch, and score them as the trainer does.

    Args:
        policy: The policy as it will be trained.
        sampling: Temperature, above 0, and filters of the rollouts; default: temperature 1 without filters.

    Returns:
        Whether all log-probabilities are bitwise equal, and the largest difference.
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
    completions = policy.engine(trains=True).generate(requests, params)
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
    gap = float((scored.float() - micro.sampler_logprobs_M).abs().max())
    # float16 is never called exact: its products run in other kernels, whose differences its rounding hides at first.
    is_half = torch.float16 in (policy.autocast, policy.model.head_weight.dtype)
    return ProbeResult(gap == 0.0 and not is_half, gap)
