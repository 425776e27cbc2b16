"""Log-probabilities on the trainer's side: packed sequences through the sampler's own module and head."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from whet.algo.kept import take_kept
from whet.algo.logprobs import token_logprobs
from whet.generate.activations import Activations
from whet.kernels.cpu.ops import replaying
from whet.model.attention import AttentionKind, Packed, positions_of
from whet.model.routing import Routing
from whet.model.split import Divided, Division
from whet.model.transformer import LanguageModel
from whet.ranks.team import Team, team_of, to_leader
from whet.telemetry.spans import span
from whet.types import KeptSets, MicroBatch, Segment


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
    if (team := team_of(model)) is not None and team.begins():
        assert routing is None, "routers are not told of other ranks' tokens"
        return _lead(team, model, micro, {"temperature": None, "autocast": _name(autocast)})
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
    routing: Routing | None = None,
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
        routing: What routers of experts are told, and what they note; None leaves them alone.
        hidden_MD: Result of `hidden_rows`, where it is there already.

    Returns:
        Log-probabilities [M] and entropies [M] in nats, over what the sampler's filters left; differentiable unless
        autograd is off.
    """
    if hidden_MD is None:
        if (team := team_of(model)) is not None and team.begins():
            assert routing is None, "routers are not told of other ranks' tokens"
            asked = {"temperature": temperature, "autocast": _name(autocast)}
            logprobs_M, entropy_M = _lead(team, model, micro, asked).unbind(1)
            return logprobs_M, entropy_M
        options: dict[str, Any] = {"autocast": autocast, "attention": attention, "routing": routing}
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


def follow(team: Team, model: LanguageModel, leader: int) -> torch.Tensor:
    """Take part in a differentiable pass of a team that another rank leads.

    Args:
        team: The team.
        model: This rank's copy or share of the same model.
        leader: The place of the rank that leads.

    Returns:
        A number to call `backward` on when that rank does; the gradients come from there, whatever it is.
    """
    asked, (tokens_N, segments, source_M, targets_M, words_Z, starts) = team.hear(leader)
    device = model.head_weight.device
    rows = [tensor.to(device) for tensor in (tokens_N, source_M, targets_M)]
    sets = KeptSets(words_Z.int().to(device), tuple(starts.tolist())) if len(starts) else None
    layout = tuple(Segment(*numbers) for numbers in segments.tolist())
    return _pass(team, model, leader, asked, rows, layout, sets).sum()


def _lead(team: Team, model: LanguageModel, micro: MicroBatch, asked: dict[str, Any]) -> torch.Tensor:
    """Have a team run a micro-batch of this rank's: return hidden states [M, D], or numbers [M, 2] of the head."""
    kept = micro.kept or KeptSets(torch.zeros(0), ())
    segments = torch.tensor(micro.segments)
    rows = [micro.tokens_N, micro.source_M, micro.targets_M]
    team.tell(asked, [rows[0], segments, *rows[1:], kept.words_Z, torch.tensor(kept.starts)])
    return _pass(team, model, team.place, asked, rows, micro.segments, micro.kept)


def _pass(
    team: Team,
    model: LanguageModel,
    leader: int,
    asked: dict[str, Any],
    rows: list[torch.Tensor],
    segments: tuple[Segment, ...],
    kept: KeptSets | None,
) -> torch.Tensor:
    """Run this rank's part of a pass, its part of the head included, and bring the parts together.

    Args:
        team: The team.
        model: The model.
        leader: The place of the rank whose micro-batch it is.
        asked: Temperature, None for hidden states alone; name of the compute dtype.
        rows: Tokens [N], scoring rows [M] and trained tokens [M].
        segments: Where each sequence lies.
        kept: What the sampler's filters left to draw from.
    """
    tokens_N, source_M, targets_M = rows
    device = tokens_N.device
    positions_N = positions_of(segments, device)
    autocast = None if asked["autocast"] is None else getattr(torch, asked["autocast"])
    with nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast):
        if team.kind == "context":
            division = Division(segments, team, device)
            mine, places, counts, order_M = division.of_rows(source_M)
            own = tokens_N[division.rows_N], positions_N[division.rows_N]
            hidden_MD = model(*own, Divided(division, device)).index_select(0, places)
        else:
            # Every rank has all hidden states, and takes an equal share of the head's work.
            count = len(source_M)
            ends = [count * place // team.size for place in range(team.size + 1)]
            counts = [stop - start for start, stop in zip(ends, ends[1:], strict=False)]
            mine = torch.arange(ends[team.place], ends[team.place + 1], device=device)
            order_M = torch.cat([p * max(counts) + torch.arange(n) for p, n in enumerate(counts)]).to(device)
            hidden_ND = model(tokens_N, positions_N, Packed(segments, device))
            hidden_MD = hidden_ND.index_select(0, source_M[mine])
    if asked["temperature"] is None:
        return to_leader(hidden_MD, team, leader, counts, order_M)
    if not len(mine):  # the head does not take nothing; the others wait in the backward pass
        wide = torch.float64 if hidden_MD.dtype == torch.float64 else torch.float32
        return to_leader(hidden_MD[:, :2].to(wide), team, leader, counts, order_M)
    with span("head"):
        numbers = token_logprobs(
            hidden_MD,
            model.head_weight,
            targets_M[mine],
            temperature=asked["temperature"],
            num_valid=model.num_valid_tokens,
            cap=model.config.block.logit_cap,
            kept=None if kept is None else take_kept(kept, mine.tolist()),
        )
    return to_leader(torch.stack(numbers, dim=1), team, leader, counts, order_M)


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
