"""Log-probabilities on the trainer's side: packed sequences through the sampler's own module and head."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch

from whet.algo.logprobs import token_logprobs
from whet.generate.activations import Activations
from whet.kernels.cpu.ops import replaying
from whet.model.attention import AttentionKind, Packed, positions_of
from whet.model.routing import Routing
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
    routing: Routing | None = None,
) -> torch.Tensor:
    """Return the hidden states [M, D] that score a micro-batch's trained tokens.

    Args:
        model: The model.
        micro: Packed sequences.
        autocast: Compute dtype if it is not the parameters' own.
        attention: Attention kernel; 'exact' equals the sampler's.
        activations: The sampler's activations of these tokens, if kept.
        routing: What routers of experts are told, and what they note; None leaves them alone.
    """
    tape = None if activations is None or autocast is not None else activations.tape(model, micro)
    device = micro.tokens_N.device
    positions_N = positions_of(micro.segments, device)
    with nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast), replaying(tape):
        hidden_ND = model(micro.tokens_N, positions_N, Packed(micro.segments, device, attention, routing))
    return hidden_ND.index_select(0, micro.source_M)


def score_texts(
    model: LanguageModel,
    micro: MicroBatch,
    *,
    autocast: torch.dtype | None = None,
    attention: AttentionKind = "exact",
    routing: Routing | None = None,
) -> torch.Tensor:
    """Score whole sequences with a reward model: its head's number at the last token, differentiable.

    Args:
        model: A reward model.
        micro: Packed sequences.
        autocast: Compute dtype if it is not the parameters' own.
        attention: Attention kernel.
        routing: What routers of experts are told, and what they note; None leaves them alone.

    Returns:
        Scores [B] in the order of `micro.indices_B`, float32 (float64 for float64 models).
    """
    assert model.score is not None
    prompts = {segment.prefix for segment in micro.segments if segment.shared}
    whole = [s for s in micro.segments if s.shared or s.start not in prompts]
    ends_B = torch.tensor([s.start + s.length - 1 for s in whole], device=micro.tokens_N.device)
    rows = replace(micro, source_M=ends_B)
    hidden_BD = hidden_rows(model, rows, autocast=autocast, attention=attention, routing=routing)
    weight_1D = model.get_parameter("score.weight")
    wide = torch.float64 if weight_1D.dtype == torch.float64 else torch.float32
    return hidden_BD.to(wide) @ weight_1D.to(wide)[0]


def score_micro_batch(
    model: LanguageModel,
    micro: MicroBatch,
    *,
    temperature: float = 1.0,
    autocast: torch.dtype | None = None,
    attention: AttentionKind = "exact",
    activations: Activations | None = None,
    hidden_MD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score a micro-batch's trained tokens.

    Args:
        model: The model.
        micro: Packed sequences.
        temperature: Temperature at which the tokens were sampled.
        autocast: Compute dtype if it is not the parameters' own.
        attention: Attention kernel; 'exact' equals the sampler's.
        activations: The sampler's activations of these tokens, if kept.
        hidden_MD: Result of `hidden_rows`, where it is there already.

    Returns:
        Log-probabilities [M] and entropies [M] in nats, over what the sampler's filters left; differentiable unless
        autograd is off.
    """
    if hidden_MD is None:
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
            kept=micro.kept,
        )
