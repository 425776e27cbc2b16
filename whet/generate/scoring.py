"""Log-probabilities on the trainer's side: packed sequences through the sampler's own module and head."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from whet.algo.logprobs import token_logprobs
from whet.generate.activations import Activations
from whet.kernels.cpu.ops import replaying
from whet.model.attention import AttentionKind, Packed, positions_of
from whet.model.transformer import LanguageModel
from whet.telemetry.spans import span
from whet.types import MicroBatch


def hidden_rows(
    model: LanguageModel,
    micro: MicroBatch,
    *,
    autocast: torch.dtype | None = None,
    attention: AttentionKind = "exact",
    activations: Activations | None = None,
) -> torch.Tensor:
    """Return the hidden states [M, D] that score a micro-batch's trained tokens.

    Args:
        model: The model.
        micro: Packed sequences.
        autocast: Compute dtype if it is not the parameters' own.
        attention: Attention kernel; 'exact' equals the sampler's.
        activations: The sampler's activations of these tokens, if kept.
    """
    tape = None if activations is None or autocast is not None else activations.tape(model, micro)
    device = micro.tokens_N.device
    positions_N = positions_of(micro.segments, device)
    with nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast), replaying(tape):
        hidden_ND = model(micro.tokens_N, positions_N, Packed(micro.segments, device, attention))
    return hidden_ND.index_select(0, micro.source_M)


def score_micro_batch(
    model: LanguageModel,
    micro: MicroBatch,
    *,
    temperature: float = 1.0,
    autocast: torch.dtype | None = None,
    attention: AttentionKind = "exact",
    activations: Activations | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score a micro-batch's trained tokens.

    Args:
        model: The model.
        micro: Packed sequences.
        temperature: Temperature at which the tokens were sampled.
        autocast: Compute dtype if it is not the parameters' own.
        attention: Attention kernel; 'exact' equals the sampler's.
        activations: The sampler's activations of these tokens, if kept.

    Returns:
        Log-probabilities [M] and entropies [M] in nats; differentiable unless autograd is off.
    """
    options = {"autocast": autocast, "attention": attention}
    hidden_MD = hidden_rows(model, micro, activations=activations, **options)
    with span("head"):
        return token_logprobs(
            hidden_MD,
            model.head_weight,
            micro.targets_M,
            temperature=temperature,
            num_valid=model.num_valid_tokens,
            cap=model.config.block.logit_cap,
        )
