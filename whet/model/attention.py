"""Attention over packed sequences, and the one kernel that training, prefill and decode share.

Everything in a decoder but attention is per token, so a flat [N, D] tensor serves training, prefill and
decode alike. What a row may see is said by an `AttentionContext` alone.

Why sampler and trainer agree to the last bit on a CPU (measured): (1) the model pads token rows to
`ROW_QUANTUM`, so that matrix products never take the narrow code paths; (2) here at least `MIN_QUERY_ROWS`
query rows are used, keys are padded to `KEY_QUANTUM`, and probabilities times values are summed in key blocks
of fixed size, so that a row's result does not depend on how many masked keys follow it. `exact_attention`
follows these rules; the kind 'fast' is PyTorch's fused kernel, which does not.

Measured with MKL on AVX2 and on AVX-512, one thread and two: 1, 2 and 3 query rows take other code paths than 4 and
more; any number of keys that is a multiple of 16 gives the same bits, as long as no sum runs over more than 192 of
them (256 in one product: up to half of the rows differ).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from whet.kernels import dispatch, eager
from whet.kernels.cpu import attention as cpu_attention
from whet.kernels.cpu.ops import CHANNELS
from whet.model.recurrence import Recurrence, Scan
from whet.model.routing import Routing
from whet.ranks.context import gather_keys, pieces_of
from whet.types import Piece, Segment, Split, UserError

AttentionKind = Literal["exact", "fast"]

ROW_QUANTUM = 16
KEY_QUANTUM = 32
KEY_BLOCK = 128
MIN_QUERY_ROWS = 4
TILE_SCORES = 2**20
QUERY_BLOCK = 128


Runs = tuple[tuple[int, int], ...]
"""First position and the one behind the last of tokens of a sequence that see each other in both directions."""
Ahead = dict[int, Runs]
"""Such runs by the first row of their sequence."""
Shared = dict[int, tuple[torch.Tensor, ...]]
"""Keys and values, by layer, of those that later layers read, too; () until they are there."""


class Rule(NamedTuple):
    """How a layer attends, where it is not plain causal softmax attention.

    `None` stands for plain attention in all layers of a model, the only rule that the compiled kernels and their cache
    know: given any other they are not asked. Whether a kernel runs depends on the model alone, never on lengths, so
    that a row has the same bits wherever it is computed.

    Attributes:
        window: Positions that a query sees, its own included; 0 for all.
        cap: Scores become cap tanh(score / cap); 0 for none.
        sinks_H: A score of each head that takes its share of the softmax and adds nothing; None for none.
    """

    window: int = 0
    cap: float = 0.0
    sinks_H: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is plain attention, in a model whose other layers have other rules."""
        return not self.window and not self.cap and self.sinks_H is None


PLAIN = Rule()


class AttentionContext(Protocol):
    """Says what each row of a flat batch may see, and computes attention accordingly.

    Attributes:
        routing: What routers of experts are told, and what they note; None for nothing.
    """

    routing: Routing | None

    @property
    def longest(self) -> int:
        """Positions that any row may have, from 0 on."""
        ...

    @property
    def segments(self) -> Sequence[Segment]:
        """The sequences of the batch, whose prompts may have images; none where each row is a token of a completion."""
        ...

    def see_ahead(self, spans: Sequence[tuple[int, int]]) -> None:
        """Let rows of these runs, each within one sequence, attend to all of their run, later ones too."""
        ...

    def attend(
        self,
        layer: int,
        q_NHC: torch.Tensor,
        k_NKC: torch.Tensor,
        v_NKC: torch.Tensor,
        rule: Rule | None = None,
    ) -> torch.Tensor:
        """Return attention outputs [N, H, C] of a layer for all rows."""
        ...

    def window(self, layer: int, x_NX: torch.Tensor, width: int) -> torch.Tensor:
        """Return each row's own input (last) and the ones before it in its sequence, [width, N, X]."""
        ...

    def recur(
        self,
        layer: int,
        rule: Recurrence,
        mixed_NX: torch.Tensor,
        decay_NH: torch.Tensor,
        beta_NH: torch.Tensor,
    ) -> torch.Tensor:
        """Return what a recurrent layer reads from its state [N, H, C] for all rows."""
        ...


def round_up(value: int, quantum: int) -> int:
    """Return the smallest multiple of `quantum` that is at least `value`."""
    return -(-value // quantum) * quantum


def exact_attention(
    q_ZQC: torch.Tensor,
    k_ZSC: torch.Tensor,
    v_ZSC: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    cap: float = 0.0,
    lse_ZQ: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention whose rows do not depend on the number of rows or of masked keys.

    Not differentiable by itself (`_TiledAttention` is): it writes in place.

    Args:
        q_ZQC: Queries; Z counts rows times key/value heads, Q at least `MIN_QUERY_ROWS` for exact rows.
        k_ZSC: Keys; S a multiple of `KEY_QUANTUM`.
        v_ZSC: Values.
        bias: Additive float32 mask (0 or -inf), broadcastable to [Z, Q, S].
        out: Where the outputs go; made where there is none.
        cap: Soft cap of the scores (`Rule`).
        lse_ZQ: Where each row's log-normaliser goes, if anywhere.

    Returns:
        Outputs [Z, Q, C] and probabilities [Z, Q, S] in the dtype of the values.
    """
    if q_ZQC.dtype == torch.float32 and torch.is_autocast_enabled(q_ZQC.device.type):
        with torch.autocast(q_ZQC.device.type, enabled=False):  # it would round the products' arguments
            return exact_attention(q_ZQC, k_ZSC, v_ZSC, bias, out, cap=cap, lse_ZQ=lse_ZQ)
    scale, num_keys = q_ZQC.shape[-1] ** -0.5, k_ZSC.shape[1]
    k_ZCS = k_ZSC.transpose(1, 2)
    if cap:
        scores = eager.wide(torch.bmm(q_ZQC * scale, k_ZCS))
        scores = scores.div_(cap).tanh_().mul_(cap).add_(bias)
    elif q_ZQC.dtype == torch.float32:
        # Mask, scale and product in one call: a pass over the scores less, and two calls less in a decoding step.
        scores = torch.baddbmm(bias.expand(*q_ZQC.shape[:2], num_keys), q_ZQC, k_ZCS, alpha=scale)
    else:
        scores = eager.wide(torch.bmm(q_ZQC * scale, k_ZCS)).add_(bias)
    top = scores.amax(-1) if lse_ZQ is not None else None
    # In place: the scores are the largest thing here, and nobody reads them again.
    probs = torch.softmax(scores, dim=-1, out=scores)
    if lse_ZQ is not None and top is not None:
        # From the largest probability, exp(top - lse): a sum would depend on the number of masked keys.
        torch.sub(top, eager.row_wise(torch.log, probs.amax(-1)), out=lse_ZQ)
    probs = probs.to(v_ZSC.dtype)
    if out is None:
        out = torch.empty_like(q_ZQC)
    torch.bmm(probs[..., :KEY_BLOCK], v_ZSC[:, :KEY_BLOCK], out=out)
    for start in range(KEY_BLOCK, num_keys, KEY_BLOCK):
        part = slice(start, start + KEY_BLOCK)
        if out.dtype == torch.float32:
            out.baddbmm_(probs[..., part], v_ZSC[:, part])
        else:
            out += torch.bmm(probs[..., part], v_ZSC[:, part])
    return out, probs


def outside(key: torch.Tensor, query: torch.Tensor, window: int) -> torch.Tensor:
    """Say which key positions a query's position does not see: later ones, and those before its window, if any."""
    hidden = key > query
    return hidden | (key <= query - window) if window else hidden


def whole_sequences(segments_B: Sequence[int] | Sequence[Segment]) -> list[Segment]:
    """Return segments as they are, and lengths as sequences that follow each other and share nothing."""
    segments, start = [], 0
    for item in segments_B:
        segment = Segment(start, item, 0, 0) if isinstance(item, int) else item
        segments.append(segment)
        start = segment.start + segment.length
    return segments


def positions_of(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """Return the position of every token in its own sequence, int64 [N]."""
    parts = [torch.arange(s.shared, s.shared + s.length) for s in segments]
    return torch.cat(parts).to(device)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries that are computed in one call, and the keys that they see.

    Attributes:
        queries: Their rows among all gathered queries, [Z, Q, C] once they are there.
        keys: Rows of their sequences' keys among all gathered keys, [Z, S, C].
        sizes: Z, Q and S.
        seen: Keys that any of the queries sees; the others are left out.
        bias: Mask [Q, S of these], 0 or -inf; None for 'fast', which needs none.
    """

    queries: slice
    keys: slice
    sizes: tuple[int, int, int]
    seen: slice
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _SharedKeys:
    """Keys of a prefix, that stand before those of several sequences: their gradients are added up.

    Attributes:
        keys: Rows of the sequences' keys among all gathered keys, [R, K, S, C].
        sizes: R, K and S.
        rows: The prefix in the flat batch.
    """

    keys: slice
    sizes: tuple[int, int, int]
    rows: slice


class _Plan:
    """Which rows of a flat batch are computed together, and where their results stand.

    Sequences of similar length are padded to one width. A padded row's tail comes after every real token, so the causal
    mask alone keeps it out. Of sequences that share a prefix the queries are their own tokens alone: a prompt of a
    group is not computed again for each of its samples. One look-up each brings queries, keys and values into the order
    that the products read, and one brings the outputs back: a row of an index is a token's head.

    Args:
        segments: Sequences.
        num_rows: Rows of the queries and of the keys, padding included.
        heads: Query heads.
        kv_heads: Key/value heads.
        device: Where the index tensors live.
        whole: Queries are all of a sequence, its prefix included, and one tile ('fast').
        window: Positions that a query sees; 0 for all.
        pieces: Which queries are here; None for all.
        ahead: Runs of tokens that see all of their run.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        num_rows: tuple[int, int],
        heads: int,
        kv_heads: int,
        device: torch.device,
        *,
        whole: bool,
        window: int = 0,
        pieces: Sequence[Piece] | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        self._ahead = ahead or {}
        self._heads, self._kv_heads, self._whole, self._window = heads, kv_heads, whole, window
        self._biases: dict[tuple[object, ...], torch.Tensor] = {}
        self._device = device
        self.tiles: list[_Tile] = []
        self.shared: list[_SharedKeys] = []
        self._query_parts: list[torch.Tensor] = []
        self._key_parts: list[torch.Tensor] = []
        self._padded_parts: list[torch.Tensor] = []
        self._num_queries = self._num_keys = 0
        sizes = zip(num_rows, (heads, kv_heads), strict=True)
        query_place, key_place = (torch.full(size, -1) for size in sizes)
        self.is_split = pieces is not None
        queries = list(pieces_of(segments, pieces))
        for (prefix, first, width, runs), rows in sorted(self._buckets(queries).items()):
            self._add(rows, prefix, first, width, query_place, key_place, runs)
        # What no sequence has (row padding) reads the zeros behind the last row.
        query_place[query_place < 0] = self._num_queries
        key_place[key_place < 0] = self._num_keys
        self.query_place, self.key_place = (place.view(-1).to(device) for place in (query_place, key_place))
        parts = self._query_parts, self._key_parts, self._padded_parts
        self.query_index, self.key_index, self.padded = (torch.cat(part).to(device) for part in parts)

    def _buckets(
        self, queries: Sequence[tuple[Segment, int, int]]
    ) -> dict[tuple[int, int, int, Runs], list[tuple[int, ...]]]:
        buckets: dict[tuple[int, int, int, Runs], list[tuple[int, ...]]] = {}
        for segment, first, at in queries:
            length = segment.length - first + (segment.shared if self._whole else 0)
            width = round_up(length, KEY_QUANTUM if length <= KEY_BLOCK else KEY_BLOCK // 2)
            prefix = segment.prefix if segment.shared else 0
            # One mask serves all rows of a tile, so that they have their images in the same places.
            runs = self._ahead.get(segment.start, ())
            key = (0, 0, width, ()) if self._whole else (prefix, segment.shared + first, width, runs)
            buckets.setdefault(key, []).append((*segment, at - first))
        return buckets

    def _add(
        self,
        rows: Sequence[tuple[int, ...]],
        prefix: int,
        first: int,
        width: int,
        query_place: torch.Tensor,
        key_place: torch.Tensor,
        runs: Runs,
    ) -> None:
        """Add sequences whose first query is at the same position, and has so many queries with its padding."""
        num_keys, kv_heads = round_up(first + width, KEY_QUANTUM), self._kv_heads
        start, count, own_prefix, shared, at = (column[:, None] for column in torch.tensor(rows).unbind(1))
        column = torch.arange(num_keys)[None, :]
        own = (column >= shared) & (column < shared + count)
        source = torch.where(
            column < shared, own_prefix + column, torch.where(own, start + column - shared, start)
        )
        keys = slice(self._num_keys, self._num_keys + source.numel() * kv_heads)
        place = torch.arange(keys.start, keys.stop).view(len(rows), kv_heads, num_keys).transpose(1, 2)
        key_place[source[own]] = place[own]
        self._key_parts.append((source[:, None] * kv_heads + torch.arange(kv_heads)[:, None]).view(-1))
        self._num_keys = keys.stop
        is_query, query = own, source
        if self.is_split:  # the queries are those from `first` on, and stand elsewhere
            is_query = own & (column >= first)
            query = torch.where(is_query, at + column - shared, at + first - shared)
        elif first:
            sizes = len(rows), kv_heads, num_keys
            self.shared.append(_SharedKeys(keys, sizes, slice(prefix, prefix + first)))
        block = width if self._whole else min(width, QUERY_BLOCK)
        for begin in range(first, first + width, block):
            end = min(begin + block, first + width)
            # Keys before the first query's window are left out by whole blocks: the other sums stay as they are.
            first_seen = max(0, begin - self._window + 1) // KEY_BLOCK * KEY_BLOCK if self._window else 0
            last_seen = max((stop for start, stop in runs if start < end and stop > begin), default=0)
            seen = slice(first_seen, round_up(max(end, last_seen), KEY_QUANTUM))
            num_seen = seen.stop - seen.start
            step = (
                len(rows) if self._whole else max(1, TILE_SCORES // (self._heads * (end - begin) * num_seen))
            )
            for row in range(0, len(rows), step):
                part = slice(row, row + step)
                queries = self._add_queries(query[part, begin:end], is_query[part, begin:end], query_place)
                count_z = source[part].shape[0] * kv_heads
                tile_keys = slice(
                    keys.start + row * kv_heads * num_keys, keys.start + (row * kv_heads + count_z) * num_keys
                )
                sizes = count_z, (queries.stop - queries.start) // count_z, num_keys
                bias = None if self._whole else self._bias(begin, end - begin, seen, runs)
                self.tiles.append(_Tile(queries, tile_keys, sizes, seen, bias))

    def _add_queries(self, source_RQ: torch.Tensor, own_RQ: torch.Tensor, query_place: torch.Tensor) -> slice:
        heads, (rows, length) = self._heads, source_RQ.shape
        queries = slice(self._num_queries, self._num_queries + rows * heads * length)
        place = torch.arange(queries.start, queries.stop).view(rows, heads, length).transpose(1, 2)
        query_place[source_RQ[own_RQ]] = place[own_RQ]
        self._padded_parts.append(place[~own_RQ].view(-1))
        self._query_parts.append((source_RQ[:, None] * heads + torch.arange(heads)[:, None]).view(-1))
        self._num_queries = queries.stop
        return queries

    def _bias(self, begin: int, length: int, seen: slice, runs: Runs) -> torch.Tensor:
        """Return the causal mask of queries from a position on; heads of one key/value head stand one below another."""
        key = begin, length, seen.stop, runs
        if key not in self._biases:
            position = torch.arange(begin, begin + length)[:, None]
            places = torch.arange(seen.start, seen.stop)[None, :]
            hidden = outside(places, position, self._window)
            for start, stop in runs:
                # Only what is later is shown: what lies before the window stays hidden within an image, too.
                inside = (position >= start) & (position < stop) & (places > position) & (places < stop)
                hidden &= ~inside
            bias = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
            self._biases[key] = bias.repeat(self._heads // self._kv_heads, 1).to(self._device)
        return self._biases[key]


def _tiled(
    q_NHC: torch.Tensor,
    k_NKC: torch.Tensor,
    v_NKC: torch.Tensor,
    plan: _Plan,
    kept: list[torch.Tensor] | None,
    rule: Rule = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exact attention [N, H, C] without sinks, and for a rule with sinks the log-normalisers [N, H].

    The tiles' probabilities go to `kept`.
    """
    channels = q_NHC.shape[2]
    q, k, v = _gather(plan, q_NHC, k_NKC, v_NKC)
    out = q.new_empty(q.shape[0] + 1, channels)
    out[-1] = 0.0
    lse = None if rule.sinks_H is None else torch.zeros(q.shape[0] + 1, device=q.device)
    for tile in plan.tiles:
        num_z, _, num_keys = tile.sizes
        keys, values = (x[tile.keys].view(num_z, num_keys, channels)[:, tile.seen] for x in (k, v))
        queries = q[tile.queries].view(num_z, -1, channels)
        where = out[tile.queries].view(num_z, -1, channels)
        lse_ZQ = None if lse is None else lse[tile.queries].view(num_z, -1)
        assert tile.bias is not None
        _, probs = exact_attention(queries, keys, values, tile.bias, where, cap=rule.cap, lse_ZQ=lse_ZQ)
        if kept is not None:
            kept.append(probs)
    attended = out.index_select(0, plan.query_place).view(q_NHC.shape).to(q_NHC.dtype)
    normalisers = q.new_empty(0) if lse is None else lse[plan.query_place].view(q_NHC.shape[:2])
    return attended, normalisers


def _gather(plan: _Plan, q_NHC: torch.Tensor, *keys_NKC: torch.Tensor) -> list[torch.Tensor]:
    """Bring queries, and then keys and values, into the order of the tiles, in the dtype of products."""
    wide, channels = eager.product_dtype(q_NHC), q_NHC.shape[2]
    indices = (plan.query_index, *(plan.key_index for _ in keys_NKC))
    tensors = zip((q_NHC, *keys_NKC), indices, strict=True)
    return [x.reshape(-1, channels).index_select(0, index).to(wide) for x, index in tensors]


class _TiledAttention(torch.autograd.Function):
    """Exact attention with its gradient: probabilities are kept, as autograd would, but nothing else of their size.

    Autograd took 1.5 times as long: it wrote zeros and copies for every slice of keys and every block of them.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: _Plan, rule: Rule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept: list[torch.Tensor] = []
        out, lse = _tiled(q, k, v, plan, kept, rule)
        ctx.plan, ctx.cap, ctx.has_sinks = plan, rule.cap, rule.sinks_H is not None
        ctx.save_for_backward(q, k, v, out, *kept)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_NHC, k_NKC, v_NKC, out, *kept = ctx.saved_tensors
        plan: _Plan = ctx.plan
        channels = q_NHC.shape[2]
        scale, grad = channels**-0.5, upstream[0]
        # Softmax' gradient is p (dp - sum p dp), and the sum is that of output times its gradient.
        delta_N1 = -(eager.wide(grad) * eager.wide(out)).sum(-1).view(-1, 1)
        if ctx.has_sinks:  # that of the log-normaliser is p
            delta_N1 = delta_N1 + upstream[1].view(-1, 1)
        delta = delta_N1.index_select(0, plan.query_index)
        q, k, v = _gather(plan, q_NHC * scale, k_NKC, v_NKC)
        (g,) = _gather(plan, grad)
        g.index_fill_(0, plan.padded, 0.0)  # they stand for the first token of their row
        delta.index_fill_(0, plan.padded, 0.0)
        dq = q.new_empty(q.shape[0] + 1, channels)
        dk, dv = q.new_zeros(2, k.shape[0] + 1, channels).unbind(0)
        dq[-1] = 0.0
        for tile, probs in zip(plan.tiles, kept, strict=True):
            num_z, num_queries, num_keys = tile.sizes
            keys, values, dkeys, dvalues = (
                x[tile.keys].view(num_z, num_keys, channels)[:, tile.seen] for x in (k, v, dk, dv)
            )
            queries, dqueries, dout = (x[tile.queries].view(num_z, num_queries, channels) for x in (q, dq, g))
            # Not accumulated by baddbmm_: into a part of the keys it would be one product after the other.
            dvalues += torch.bmm(probs.transpose(1, 2), dout)
            shift = delta[tile.queries].view(num_z, num_queries, 1)
            if q.dtype == torch.float32:
                dscores = torch.baddbmm(shift.expand_as(probs), dout, values.transpose(1, 2)).mul_(probs)
            else:
                dscores = (
                    eager.wide(torch.bmm(dout, values.transpose(1, 2))).add_(shift).mul_(probs).to(q.dtype)
                )
            if ctx.cap:  # the derivative of cap tanh(score / cap), whose scores are computed again
                tanh = eager.wide(torch.bmm(queries, keys.transpose(1, 2))).div_(ctx.cap).tanh_()
                dscores = dscores.mul_((1 - tanh.square_()).to(dscores.dtype))
            torch.bmm(dscores, keys, out=dqueries)
            dkeys += torch.bmm(dscores.transpose(1, 2), queries)
        if plan.is_split:  # several pieces see the same keys
            wide = [eager.wide(x[:-1]) for x in (dk, dv)]
            grads = [
                x.new_zeros(k_NKC.shape).view(-1, channels).index_add_(0, plan.key_index, x) for x in wide
            ]
            grads = [x.view(k_NKC.shape) for x in grads]
        else:
            grads = [x.index_select(0, plan.key_place).view(k_NKC.shape) for x in (dk, dv)]
        dq = dq.index_select(0, plan.query_place).view(q_NHC.shape).mul_(scale)
        for shared in plan.shared:
            for whole, rows in zip(grads, (dk, dv), strict=True):
                each = rows[shared.keys].view(*shared.sizes, channels)
                length = shared.rows.stop - shared.rows.start
                whole[shared.rows] += eager.wide(each[:, :, :length]).sum(0).transpose(0, 1)
        return dq.to(q_NHC.dtype), *(x.to(k_NKC.dtype) for x in grads), None, None


class Packed:
    """Causal attention inside each of several sequences that lie one after the other in a flat batch.

    On a CPU with a compiler that is one C++ kernel. Else sequences of similar length are computed together (`_Plan`).

    Args:
        segments_B: Sequences in the order of the flat batch, as lengths, or as segments that may share a prefix.
        device: Where the index tensors live.
        kind: 'exact' (row-invariant) or 'fast' (fused kernel).
        routing: What routers of experts are told, and what they note; None for nothing.
        split: How ranks share the batch, each with the queries, keys and values of its rows; None where one has all.
        pieces: The queries that `attend_to` is given, where they are not all of the sequences'.
    """

    def __init__(
        self,
        segments_B: Sequence[int] | Sequence[Segment],
        device: torch.device,
        kind: AttentionKind = "exact",
        routing: Routing | None = None,
        split: Split | None = None,
        pieces: Sequence[Piece] | None = None,
    ) -> None:
        self.routing = routing
        self.kind: AttentionKind = kind
        self._device = device
        self._segments = whole_sequences(segments_B)
        self._split = split
        self._pieces = pieces if split is None else split.pieces
        self.num_tokens = sum(segment.length for segment in self._segments)
        self._table: torch.Tensor | None = None
        self._scan: Scan | None = None
        self._plans: dict[tuple[int, int, int, int, bool], _Plan] = {}
        self._ahead: Ahead = {}

    def see_ahead(self, spans: Sequence[tuple[int, int]]) -> None:
        """Let rows of these runs attend to all of their run."""
        self._ahead = {
            segment.start: tuple(
                (segment.shared + first - segment.start, segment.shared + end - segment.start)
                for first, end in spans
                if segment.start <= first < segment.start + segment.length
            )
            for segment in self._segments
        }

    @property
    def segments(self) -> Sequence[Segment]:
        """The sequences."""
        return self._segments

    @property
    def longest(self) -> int:
        """Length of the longest sequence."""
        return max((segment.shared + segment.length for segment in self._segments), default=1)

    def _kernel_table(self) -> torch.Tensor:
        """Return the segments as the kernel reads them; those that share a prefix, and its own, are one group."""
        if self._table is None:
            groups = {segment.start: segment.start for segment in self._segments if not segment.shared}
            rows = [
                (
                    *segment,
                    groups.get(segment.prefix, segment.prefix) if segment.shared else segment.start,
                    first,
                    at,
                )
                for segment, first, at in pieces_of(self._segments, self._pieces)
            ]
            rows.sort(key=lambda row: (row[4], row[0], row[5]))
            self._table = torch.tensor(rows, dtype=torch.int64).view(-1, 7)
        return self._table

    def attend(
        self,
        layer: int,
        q_NHC: torch.Tensor,
        k_NKC: torch.Tensor,
        v_NKC: torch.Tensor,
        rule: Rule | None = None,
    ) -> torch.Tensor:
        """Return causal attention outputs [N, H, C]; rows past the last sequence (row padding) are zero."""
        if self._split is not None:
            k_NKC, v_NKC = gather_keys(k_NKC, v_NKC, self._split)
            if not self._split.pieces:  # this rank has no rows, but its part in the exchange of gradients
                return 0.0 * (q_NHC + (k_NKC.sum() + v_NKC.sum()))
        return self.attend_to(q_NHC, k_NKC, v_NKC, rule)

    def attend_to(
        self, q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor, rule: Rule | None = None
    ) -> torch.Tensor:
        """Return what `attend` does, of the queries of `pieces` against the keys of whole sequences."""
        has_channels = q_NHC.shape[2] in CHANNELS and q_NHC.dtype == k_NKC.dtype == v_NKC.dtype
        assert rule is not None or not any(self._ahead.values()), "`has_own_rules` is for such models, too"
        if rule is None and has_channels and dispatch.runs_cpp(q_NHC, operation="attention"):
            return cpu_attention.attend(q_NHC, k_NKC, v_NKC, self._kernel_table())
        rule = PLAIN if rule is None else rule
        is_whole = self.kind == "fast" and rule.is_plain and not any(self._ahead.values())
        if is_whole and self._pieces is not None:
            return _fused_pieces(q_NHC, k_NKC, v_NKC, pieces_of(self._segments, self._pieces))
        sizes = q_NHC.shape[0], q_NHC.shape[1], k_NKC.shape[1]
        key = *sizes, rule.window, is_whole
        if key not in self._plans:  # all layers of one rule have one
            options = {"whole": is_whole, "window": rule.window, "pieces": self._pieces, "ahead": self._ahead}
            num_rows = q_NHC.shape[0], k_NKC.shape[0]
            self._plans[key] = _Plan(self._segments, num_rows, *sizes[1:], self._device, **options)
        plan = self._plans[key]
        if is_whole:
            return _fused(q_NHC, k_NKC, v_NKC, plan)
        if not torch.is_grad_enabled():
            out, lse = _tiled(q_NHC, k_NKC, v_NKC, plan, None, rule)
        else:
            out, lse = _TiledAttention.apply(q_NHC, k_NKC, v_NKC, plan, rule)  # pyright: ignore[reportGeneralTypeIssues]
        return out if rule.sinks_H is None else with_sinks(out, lse, rule.sinks_H)

    def window(self, layer: int, x_NX: torch.Tensor, width: int) -> torch.Tensor:
        """Return each row's own input (last) and the ones before it; zeros stand before each sequence."""
        return self.scan(x_NX.shape[0]).window(x_NX, width)

    def recur(
        self,
        layer: int,
        rule: Recurrence,
        mixed_NX: torch.Tensor,
        decay_NH: torch.Tensor,
        beta_NH: torch.Tensor,
    ) -> torch.Tensor:
        """Return outputs [N, H, C]; each sequence starts from an empty state."""
        return self.scan(mixed_NX.shape[0]).run(rule, mixed_NX, decay_NH, beta_NH)[0]

    def scan(self, num_rows: int) -> Scan:
        """Return where the tokens stand, for recurrent layers; made once.

        Raises:
            UserError: If ranks share the batch.
        """
        if self._split is not None:
            raise UserError(
                "parallel.context: a layer of this model goes from token to token (a recurrence or a convolution), "
                "which ranks that share a sequence cannot; leave it out"
            )
        if self._scan is None:
            self._scan = Scan(self._segments, num_rows, self._device)
        return self._scan


def with_sinks(out_NHC: torch.Tensor, lse_NH: torch.Tensor, sinks_H: torch.Tensor) -> torch.Tensor:
    """Give each head's sink its share of the softmax: z / (z + exp(sink)) is left, a sigmoid of log z - sink."""
    share_NH = eager.row_wise(torch.sigmoid, lse_NH - sinks_H.float())
    return out_NHC * share_NH[..., None].to(out_NHC.dtype)


def _fused(q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor, plan: _Plan) -> torch.Tensor:
    """Causal attention by PyTorch's fused kernel; a prefix is computed again in each sequence that shares it."""
    heads, kv_heads, channels = q_NHC.shape[1], k_NKC.shape[1], q_NHC.shape[2]
    q, k, v = _gather(plan, q_NHC, k_NKC, v_NKC)
    outputs = []
    for tile in plan.tiles:
        length = tile.sizes[2]
        queries = q[tile.queries].view(-1, heads, length, channels)
        keys, values = (x[tile.keys].view(-1, kv_heads, length, channels) for x in (k, v))
        out = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=kv_heads != heads
        )
        outputs.append(out.reshape(-1, channels))
    outputs.append(q.new_zeros(1, channels))
    return torch.cat(outputs).index_select(0, plan.query_place).view(q_NHC.shape).to(q_NHC.dtype)


def _fused_pieces(
    q_NHC: torch.Tensor,
    k_NKC: torch.Tensor,
    v_NKC: torch.Tensor,
    queries: Iterable[tuple[Segment, int, int]],
) -> torch.Tensor:
    """Causal attention of some queries of each sequence by PyTorch's fused kernel, one call for each run of them."""
    from torch.nn.attention.bias import causal_lower_right

    wide, outputs, end = eager.product_dtype(q_NHC), [], 0
    for segment, first, at in queries:
        end = at + segment.length - first
        own = slice(segment.start, segment.start + segment.length)
        prefix = slice(segment.prefix, segment.prefix + segment.shared)
        keys, values = (torch.cat((x[prefix], x[own])).to(wide).transpose(0, 1)[None] for x in (k_NKC, v_NKC))
        part = q_NHC[at:end].to(wide).transpose(0, 1)[None]
        mask: Any = causal_lower_right(part.shape[2], keys.shape[2])
        has_groups = part.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(part, keys, values, attn_mask=mask, enable_gqa=has_groups)
        outputs.append(out[0].transpose(0, 1))
    outputs.append(q_NHC.new_zeros(q_NHC.shape[0] - end, *q_NHC.shape[1:]))
    return torch.cat([x.to(q_NHC.dtype) for x in outputs])
