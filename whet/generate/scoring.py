"""Log-probabilities on the trainer's side: packed sequences through the sampler's own module and head."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch

from whet.algo.kept import kept_of
from whet.algo.logprobs import token_logprobs
from whet.generate.activations import Activations
from whet.kernels.cpu.ops import replaying
from whet.model.attention import AttentionKind, Packed, positions_of
from whet.model.routing import Routing
from whet.model.transformer import LanguageModel
from whet.ranks.context import all_tokens, own_tokens
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

    Where ranks share the micro-batch, those of this rank's tokens (`own_tokens`).

    Args:
        model: The model.
        micro: Packed sequences.
        autocast: Compute dtype if it is not the parameters' own.
        attention: Attention kernel; 'exact' equals the sampler's.
        activations: The sampler's activations of these tokens, if kept.
        routing: What routers of experts are told, and what they note; None leaves them alone.
    """
    split = micro.split
    is_read = activations is not None and autocast is None and split is None
    tape = activations.tape(model, micro) if is_read and activations is not None else None
    device = micro.tokens_N.device
    positions_N = positions_of(micro.segments, device)
    tokens_N, source_M = micro.tokens_N, micro.source_M
    if split is not None and split.has_all_rows:
        source_M, split = own_tokens(source_M, split)[1], None
    elif split is not None:
        # A rank without rows reads one that nobody attends to: all take part in every layer's exchange.
        rows_N = split.rows_N if len(split.rows_N) else torch.zeros_like(tokens_N[:1])
        tokens_N, positions_N = tokens_N[rows_N], positions_N[rows_N]
        source_M = own_tokens(source_M, split)[1]
    context = Packed(micro.segments, device, attention, routing, split)
    with nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast), replaying(tape):
        hidden_ND = model(tokens_N, positions_N, context)
    return hidden_ND.index_select(0, source_M)


def of_all_ranks(values_MX: torch.Tensor, micro: MicroBatch, *whole: torch.Tensor) -> torch.Tensor:
    """Return what was computed of `hidden_rows` for all trained tokens, of this rank's where several share them.

    Args:
        values_MX: One row of numbers for each of this rank's tokens, differentiable.
        micro: The micro-batch.
        whole: Parameters that it was computed with. A rank without tokens backpropagates zeros to them, as where they
            are in shards all ranks must.
    """
    if micro.split is None:
        return values_MX
    if not len(values_MX):
        for parameter in whole:
            values_MX = values_MX + 0.0 * parameter.sum().to(values_MX.dtype)
    return all_tokens(values_MX, micro.source_M, micro.split)


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
    return of_all_ranks(hidden_BD.to(wide) @ weight_1D.to(wide)[0], rows, weight_1D)


def score_micro_batch(
    model: LanguageModel,
    micro: MicroBatch,
    *,
    temperature: float = 1.0,
    autocast: torch.dtype | None = None,
    attention: AttentionKind = "exact",
    activations: Activations | None = None,
    hidden_MD: torch.Tensor | None = None,
    all_rows: bool = False,
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
        all_rows: Count rows of the head that are no token's among the possible ones, as other programs do.

    Returns:
        Log-probabilities [M] and entropies [M] in nats, over what the sampler's filters left; differentiable unless
        autograd is off.
    """
    if hidden_MD is None:
        options = {"autocast": autocast, "attention": attention}
        hidden_MD = hidden_rows(model, micro, activations=activations, **options)
    targets_M, kept = micro.targets_M, micro.kept
    if micro.split is not None:
        mine, _ = own_tokens(micro.source_M, micro.split)
        targets_M, kept = targets_M[mine], None if kept is None else kept_of(kept, mine)
    with span("head"):
        logprobs_M, entropies_M = token_logprobs(
            hidden_MD,
            model.head_weight,
            targets_M,
            temperature=temperature,
            num_valid=None if all_rows else model.num_valid_tokens,
            cap=model.config.block.logit_cap,
            kept=kept,
        )
    if micro.split is None:
        return logprobs_M, entropies_M
    wide = torch.promote_types(model.head_weight.dtype, torch.float32)
    both_M2 = torch.stack((logprobs_M, entropies_M), 1).to(wide)
    logprobs_M, entropies_M = of_all_ranks(both_M2, micro, model.head_weight).unbind(1)
    return logprobs_M, entropies_M
