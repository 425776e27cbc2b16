"""The load-balancing loss of mixtures of experts, over all tokens of an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from whet.generate.policy import Policy
from whet.model.attention import AttentionKind
from whet.model.routing import Routing
from whet.ranks.collectives import all_reduce_sum
from whet.telemetry.spans import spanned
from whet.train.optim.safety import TokenBudget
from whet.types import MicroBatch

Score = Callable[[MicroBatch], tuple[torch.Tensor, dict[str, float]]]


@dataclass(frozen=True, slots=True)
class Balance:
    """The load-balancing loss of one update.

    With f_e the share of tokens that go to expert e and P_e its mean probability, both over all layers with experts and
    all tokens of the update (prompts included; the tokens of a prompt count for each of its completions), the loss is
    E sum_e f_e P_e: top_k if all experts are used alike, E if tokens and probability go to the same top_k. Gradients
    come from P alone, which is a sum over tokens. f is counted before, in a pass of its own over all micro-batches and
    ranks: so the gradient is that of the whole update, however it is cut.

    Args:
        policy: The policy.
        coef: Weight of the loss; at 0 nothing is counted, added or measured.
        slopes_E: Derivative of the weighted loss by each expert's summed probability.
        metrics: The loss, unweighted, and the loads of the busiest and the idlest expert.

    Source: Switch Transformers 2101.03961 equations 4 to 6, for several experts per token and pooled over layers as
    `load_balancing_loss_func` of transformers. Deviation: that function takes the tokens of one micro-batch of one rank
    (2501.11873 compares the two); scores of sigmoid routers are divided by their sum (2412.19437 equation 19).
    """

    policy: Policy
    coef: float
    slopes_E: torch.Tensor
    metrics: dict[str, float]

    @classmethod
    def of(
        cls,
        policy: Policy,
        coef: float,
        cut: Callable[[int], Sequence[MicroBatch]],
        budget: TokenBudget,
        longest: int,
        *,
        attention: AttentionKind | None = None,
    ) -> Balance:
        """Count where the tokens of an update go; every rank must call.

        Args:
            policy: The policy, with the weights before the update.
            coef: Weight of the loss.
            cut: Returns this rank's micro-batches of so many tokens.
            budget: Tokens per micro-batch.
            longest: Tokens of the longest sequence.
            attention: Attention kernel of the training pass, if not the policy's.
        """
        if not coef:
            return cls(policy, coef, torch.zeros(0), {})
        load_LE, mass_E = budget.run(lambda tokens: _count(policy, cut(tokens), attention), longest)
        num_layers, count = load_LE.shape
        experts = policy.model.config.block.experts
        assert experts is not None
        sums = all_reduce_sum(*load_LE.flatten().tolist(), *mass_E.tolist())
        load_LE = torch.tensor(sums[:-count], dtype=torch.float64).view(num_layers, count)
        mass_E = torch.tensor(sums[-count:], dtype=torch.float64)
        # Each layer's loads add up to top_k times the tokens.
        num_tokens = max(float(load_LE[0].sum()) / experts.top_k, 1.0)
        slopes_E = count * load_LE.sum(0) / (num_layers * num_tokens) ** 2
        metrics = {
            "router/balance_loss": float(slopes_E @ mass_E),
            "router/load_max": float(load_LE.max()) / num_tokens,
            "router/load_min": float(load_LE.min()) / num_tokens,
        }
        return cls(policy, coef, coef * slopes_E, metrics)

    def added_to(self, score: Score) -> Score:
        """Return a function that adds a micro-batch's part to the gradient of its loss, but not to its value.

        Args:
            score: Returns the loss and metrics of a micro-batch, scored by the policy.
        """
        if not self.coef:
            return score

        def both(micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
            with _noted(self.policy) as routings:
                loss, metrics = score(micro)
            mass_E = torch.stack([routing.mass_E() for routing in routings]).sum(0)
            part = (self.slopes_E.to(mass_E) * mass_E).sum()
            return loss + (part - part.detach()), metrics

        return both


@contextmanager
def _noted(policy: Policy) -> Iterator[list[Routing]]:
    """Have the policy note what routers do in its passes."""
    policy.routings = []
    try:
        yield policy.routings
    finally:
        policy.routings = None


@spanned("count_experts")
@torch.no_grad()
def _count(
    policy: Policy, micro_batches: Sequence[MicroBatch], attention: AttentionKind | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loads [L, E] and summed probabilities [E] of this rank's tokens, float64 on the host."""
    config = policy.model.config
    experts = config.block.experts
    assert experts is not None
    load_LE = torch.zeros(sum(spec.has_experts for spec in config.layers), experts.count, dtype=torch.float64)
    mass_E = torch.zeros(experts.count, dtype=torch.float64)
    for micro in micro_batches:
        with _noted(policy) as routings:
            policy.hidden(micro, attention=attention)
        (routing,) = routings
        load_LE += routing.load_LE().cpu()
        mass_E += routing.mass_E().double().cpu()
    return load_LE, mass_E
