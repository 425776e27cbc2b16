"""How a model's passes are divided among the ranks of a team: attention over a part of the positions of packed
sequences (context parallelism), and which matrices may be divided (tensor parallelism).

Everything else in a decoder is per token, so a rank that has a part of the tokens needs nothing of the others but their
keys and values: these are gathered in each layer, and their gradients are added and dealt out again. Each sequence is
cut into 2 N pieces, of which rank r computes the r-th and the r-th from the end: a later piece sees more keys, and so
all ranks have as much to do.

Source: Llama 3 2407.21783 section 3.3.2 (keys and values gathered; 2 N pieces).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F

from whet.kernels import eager
from whet.model.attention import PLAIN, Rule, outside, with_sinks
from whet.model.config import ModelConfig, kv_shape
from whet.model.parts import Linear
from whet.model.recurrence import Recurrence
from whet.model.routing import Routing
from whet.model.transformer import LanguageModel
from whet.ranks.team import Team, all_rows
from whet.ranks.tensor import Side
from whet.types import Segment, UserError

ATTENTION = ".self_attn"


class Piece(NamedTuple):
    """Consecutive positions of one sequence, which one rank computes.

    Attributes:
        segment: The sequence.
        start: First of them, counted from the segment's own first row.
        stop: Behind the last of them.
    """

    segment: Segment
    start: int
    stop: int


def pieces_of(segments: Sequence[Segment], size: int, place: int) -> list[Piece]:
    """Return what a rank computes of packed sequences, in the order of the flat batch.

    Args:
        segments: The sequences.
        size: Ranks in the team.
        place: The rank's place among them.
    """
    pieces = []
    for segment in segments:
        ends = [segment.length * number // (2 * size) for number in range(2 * size + 1)]
        for number in (place, 2 * size - 1 - place):
            if ends[number] < ends[number + 1]:
                pieces.append(Piece(segment, ends[number], ends[number + 1]))
    return pieces


class Division:
    """How a flat batch is divided among the ranks of a team.

    A rank that has no position of it computes the first one, too, as all take part in every exchange; nothing reads
    what it makes of it.

    Args:
        segments: The sequences.
        team: The team.
        device: Where the index tensors live.

    Attributes:
        pieces: What this rank computes.
        rows_N: Rows of the flat batch that it computes.
        counts: Rows of each rank.
        order_N: Of each row of the flat batch, where it stands among all ranks' rows, each padded to the largest count.
    """

    def __init__(self, segments: Sequence[Segment], team: Team, device: torch.device) -> None:
        self.team, self.segments = team, segments
        total = sum(segment.length for segment in segments)
        everyone = [pieces_of(segments, team.size, place) for place in range(team.size)]
        parts = [
            [torch.arange(p.segment.start + p.start, p.segment.start + p.stop) for p in pieces]
            for pieces in everyone
        ]
        rows = [torch.cat(part) if part else torch.zeros(1, dtype=torch.int64) for part in parts]
        self.counts = [len(row) for row in rows]
        most = max(self.counts)
        order_N = torch.zeros(total, dtype=torch.int64)
        for place, row in enumerate(rows):
            if parts[place]:
                order_N[row] = place * most + torch.arange(len(row))
        self._most = most
        self.pieces = everyone[team.place]
        self.rows_N, self.order_N = rows[team.place].to(device), order_N.to(device)

    def of_rows(self, rows_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int], torch.Tensor]:
        """Divide things that each belong to a row of the flat batch, as the rows are divided.

        Args:
            rows_M: Their rows.

        Returns:
            Indices of this rank's, the places of their rows among `rows_N`, how many each rank has, and what
            `whet.ranks.team.to_leader` needs to restore their order.
        """
        where_M = self.order_N[rows_M]
        owner_M = where_M // self._most
        counts = torch.bincount(owner_M, minlength=self.team.size).tolist()
        order_M = torch.empty_like(owner_M)
        for place in range(self.team.size):
            chosen = (owner_M == place).nonzero()[:, 0]
            order_M[chosen] = place * max(counts) + torch.arange(len(chosen), device=chosen.device)
        mine = (owner_M == self.team.place).nonzero()[:, 0]
        return mine, where_M[mine] % self._most, counts, order_M


class Divided:
    """Causal attention inside each of several packed sequences, for the positions that this rank has.

    Queries see what they see in `Packed`: their own sequence up to themselves, and a prefix that it shares.

    Args:
        division: How the flat batch is divided.
        device: Where masks live.
        routing: What routers of experts are told; None for nothing.
    """

    def __init__(self, division: Division, device: torch.device, routing: Routing | None = None) -> None:
        self.routing = routing
        self._division, self._device = division, device
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def longest(self) -> int:
        """Length of the longest sequence."""
        return max((s.shared + s.length for s in self._division.segments), default=1)

    def attend(
        self,
        layer: int,
        q_NHC: torch.Tensor,
        k_NKC: torch.Tensor,
        v_NKC: torch.Tensor,
        rule: Rule | None = None,
    ) -> torch.Tensor:
        """Return attention outputs [N, H, C] of this rank's rows; row padding behind them is zero."""
        division, rule = self._division, PLAIN if rule is None else rule
        own = division.counts[division.team.place]
        both = torch.cat((k_NKC[:own].flatten(1), v_NKC[:own].flatten(1)), dim=1)
        everyone = all_rows(both, division.team, division.counts, division.order_N)
        width = k_NKC.shape[1] * k_NKC.shape[2]
        k, v = (x.unflatten(1, k_NKC.shape[1:]) for x in (everyone[:, :width], everyone[:, width:]))
        parts, done = [], 0
        for number, piece in enumerate(division.pieces):
            count = piece.stop - piece.start
            parts.append(self._attend(number, piece, q_NHC[done : done + count], k, v, rule))
            done += count
        if not parts:  # so that the backward pass takes part in the exchange all the same
            parts.append(q_NHC[:0] + everyone[:0].sum())
        return F.pad(torch.cat(parts), (0, 0, 0, 0, 0, q_NHC.shape[0] - done))

    def _attend(
        self, number: int, piece: Piece, q_QHC: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Attend from one piece's rows to the keys that any of them sees."""
        segment = piece.segment
        begin, end = segment.shared + piece.start, segment.shared + piece.stop
        first = max(0, begin - rule.window + 1) if rule.window else 0
        keys, values = (
            torch.cat(
                (
                    x[segment.prefix + min(first, segment.shared) : segment.prefix + segment.shared],
                    x[segment.start + max(0, first - segment.shared) : segment.start + piece.stop],
                )
            )
            if segment.shared
            else x[segment.start + first : segment.start + piece.stop]
            for x in (k, v)
        )
        if (number, rule.window) not in self._masks:  # one for all layers of a rule
            query, key = torch.arange(begin, end)[:, None], torch.arange(first, end)[None, :]
            self._masks[number, rule.window] = ~outside(key, query, rule.window).to(self._device)
        mask = self._masks[number, rule.window]
        with torch.autocast(q_QHC.device.type, enabled=False):
            if rule.cap or rule.sinks_H is not None:
                return _by_scores(q_QHC, keys, values, mask, rule)
            q, k, v = (x.transpose(0, 1)[None] for x in (q_QHC, keys, values))
            is_grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=is_grouped)
        return out[0].transpose(0, 1)

    def window(self, layer: int, x_NX: torch.Tensor, width: int) -> torch.Tensor:
        """Not for layers with a state: `refuse_states` comes first."""
        raise AssertionError("a convolution reads rows that other ranks have")

    def recur(
        self,
        layer: int,
        rule: Recurrence,
        mixed_NX: torch.Tensor,
        decay_NH: torch.Tensor,
        beta_NH: torch.Tensor,
    ) -> torch.Tensor:
        """Not for layers with a state: `refuse_states` comes first."""
        raise AssertionError("a state goes on from rows that other ranks have")


def _by_scores(
    q_QHC: torch.Tensor, k_SKC: torch.Tensor, v_SKC: torch.Tensor, mask_QS: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """Attend where scores have a cap, or heads a sink, which PyTorch's kernels do not know."""
    repeats = q_QHC.shape[1] // k_SKC.shape[1]
    k_SHC, v_SHC = (eager.wide(x).repeat_interleave(repeats, dim=1) for x in (k_SKC, v_SKC))
    scores = torch.einsum("qhc,shc->hqs", eager.wide(q_QHC) * q_QHC.shape[2] ** -0.5, k_SHC)
    if rule.cap:
        scores = torch.tanh(scores / rule.cap) * rule.cap
    scores = scores.masked_fill(~mask_QS, float("-inf"))
    out_QHC = torch.einsum("hqs,shc->qhc", torch.softmax(scores, dim=-1), v_SHC).to(v_SKC.dtype)
    if rule.sinks_H is None:
        return out_QHC
    return with_sinks(out_QHC, torch.logsumexp(scores, dim=-1).transpose(0, 1), rule.sinks_H)


def refuse_states(config: ModelConfig) -> None:
    """Refuse a model whose layers hand a state from token to token, where positions are divided among ranks.

    Raises:
        UserError: With the kind of layer.
    """
    if mixer := next((spec.mixer for spec in config.layers if spec.mixer != "attention"), ""):
        raise UserError(
            f"parallel.context: this model has layers of kind {mixer}, whose state goes from token to token; expected "
            "attention in all layers: leave it out, or use parallel.kind = fsdp"
        )


def matrix_plan(model: LanguageModel, size: int) -> dict[str, Side]:
    """Return by which side each matrix of the layers is divided among a team: heads and channels are not cut.

    Args:
        model: The model, as it is trained.
        size: Ranks in the team.

    Raises:
        UserError: If its layers are of another kind, or do not divide evenly.
    """
    plan: dict[str, Side] = {}
    for name, _ in model.named_modules():
        if name.endswith(ATTENTION):
            plan |= {f"{name}.{part}": "rows" for part in ("q_proj", "k_proj", "v_proj")}
            plan[f"{name}.o_proj"] = "columns"
        elif name.endswith(".mlp"):
            plan |= {f"{name}.{part}": "rows" for part in ("gate_proj", "up_proj")}
            plan[f"{name}.down_proj"] = "columns"
    config = model.config
    block, found = config.block, dict(model.named_modules())
    is_known = plan and all(type(found.get(name)) is Linear for name in plan)
    if not is_known or block.whole_qk_norm or block.has_sinks or block.latent is not None:
        raise UserError(
            f"parallel.tensor = {size}: expected a decoder of grouped-query attention and gated feed-forward parts "
            "without experts, sinks or norms over all heads; leave it out, or use parallel.kind = fsdp"
        )
    linears = {name: cast(Linear, found[name]) for name in plan}
    if any(layer.side is not None or layer.packed is not None for layer in linears.values()):
        raise UserError(
            f"parallel.tensor = {size} with adapters or matrices in few bits: expected whole weights that are trained; "
            "leave it out"
        )
    if any(linears[name].bias is not None for name, side in plan.items() if side == "columns"):
        raise UserError(
            f"parallel.tensor = {size}: this model adds biases to sums over heads or channels, which each rank would "
            "add; leave it out, or use parallel.kind = fsdp"
        )
    for spec in config.layers:
        counts = {
            "query heads": config.num_heads,
            "key/value heads": kv_shape(spec, config)[0],
            "feed-forward channels": spec.intermediate_size or config.intermediate_size,
        }
        for what, count in counts.items():
            if count % size:
                raise UserError(
                    f"parallel.tensor = {size}: the model has {count} {what}, expected a multiple of {size}"
                )
    return plan
