"""Micro-batches over the ranks: dealt out by their FLOPs, and each computed by several ranks (context parallelism).

Of a long sequence no rank computes all positions: a group of ranks has the same micro-batch, and each of them some of
its rows. Everything in a decoder but attention is per token; for attention each rank gathers the group's keys and
values, and attends with its own queries, so its rows have the bits that one rank's would have. Losses are computed of
all tokens' log-probabilities, by every rank of the group alike, and each backpropagates its own tokens' share: so the
sum of gradients over all ranks is the gradient, as everywhere else.

Source: head and tail chunks as in Llama 3 2407.21783, section 3.3.2, which also gathers keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whet.ranks.collectives import named, rank, world_size
from whet.types import MicroBatch, Piece, Segment, Split, UserError

SHARING = "_whet_sharing"
WORTH = 0.98
"""More micro-batches must save so much of the time."""
LEAST_ROWS = 8
"""Shorter pieces are not worth their own call of a kernel: a sequence without two of them per rank stays whole."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Work of a sequence, in that of a token without its attention.

    Attributes:
        pairs: (window, cost) of a query that sees a key, of all layers with this window; window 0 sees all.
    """

    pairs: tuple[tuple[int, float], ...] = ()

    def of(self, first: int, count: int) -> float:
        """Return the work of `count` tokens from position `first` on."""
        return count + sum(cost * _num_pairs(first, count, window) for window, cost in self.pairs)


def _num_pairs(first: int, count: int, window: int) -> int:
    """Return the keys that are seen from positions on, added up."""
    whole = count * first + count * (count + 1) // 2
    if not window:
        return whole
    beyond = max(0, first + count - max(first, window))  # queries whose window does not reach the beginning
    last = first + count - window  # what the last of them does not see; the others one less each
    return whole - beyond * last + beyond * (beyond - 1) // 2


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the ranks share a model's micro-batches.

    Attributes:
        context: Ranks that compute one together.
        costs: Work of a sequence.
        has_all_rows: Whether each of them computes all rows, with its part of the layers' matrices.
    """

    context: int
    costs: Costs
    has_all_rows: bool = False

    @property
    def num_groups(self) -> int:
        """Groups of ranks, each with its own micro-batches."""
        return world_size() // self.context

    @property
    def group(self) -> int:
        """This rank's group; ranks of a group follow each other."""
        return rank() // self.context


def share_micro_batches(model: nn.Module, context: int, costs: Costs, *, has_all_rows: bool = False) -> None:
    """Have the ranks deal out a model's micro-batches by their work, and share each.

    Args:
        model: The model, which only takes note of it.
        context: Ranks that compute a micro-batch together.
        costs: Work of a sequence.
        has_all_rows: Whether each of them computes all rows, with its part of the layers' matrices.

    Raises:
        UserError: If the ranks cannot be divided into such groups.
    """
    if world_size() % context:
        name = "tensor" if has_all_rows else "context"
        raise UserError(f"parallel.{name} = {context}: expected a divisor of the {world_size()} ranks")
    setattr(model, SHARING, Sharing(context, costs, has_all_rows))
    if context > 1:
        group_of(context)


def sharing(model: nn.Module) -> Sharing | None:
    """Return how the ranks share a model's micro-batches; None where each makes its own."""
    return getattr(model, SHARING, None)


@cache
def group_of(size: int) -> Any:
    """Return this rank's group of so many ranks that follow each other; all ranks must call."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world_size(), size)]
    return groups[rank() // size]


def deal(
    tokens: Sequence[int], costs: Sequence[float], token_budget: int, num_groups: int
) -> list[list[list[int]]]:
    """Deal items out into micro-batches, as many and as much work for each group of ranks.

    Largest first, each to the micro-batch with the least work that has room. Micro-batches of similar work are run at
    the same time: groups whose model is in shards wait for each other in every layer.

    Args:
        tokens: Tokens of each item.
        costs: Work of each.
        token_budget: Largest sum of tokens of a micro-batch; a longer single item gets its own.
        num_groups: Groups of ranks.

    Returns:
        The items of each micro-batch of each group, the same for the same items on every rank. Without items for all
        groups some have a micro-batch less.
    """
    order = sorted(range(len(tokens)), key=lambda index: (-costs[index], -tokens[index], index))
    least = max(1, -(-sum(tokens) // max(1, token_budget * num_groups)))
    best: tuple[float, list[list[int]]] | None = None
    rounds, last = least, least + max(1, least // 2)
    # Bins that are full of tokens leave little choice: a few more may be faster than waiting for the slowest.
    while best is None or rounds <= last:
        bins = _fill(order, tokens, costs, token_budget, rounds * num_groups)
        if bins is not None:
            sums = sorted((sum(costs[index] for index in members) for members in bins), reverse=True)
            time = sum(sums[::num_groups])  # of each round the largest
            if best is None or time < WORTH * best[0]:
                best = time, bins
        rounds += 1
    bins = [members for members in best[1] if members]
    work = [sum(costs[index] for index in members) for members in bins]
    by_work = sorted(range(len(bins)), key=lambda place: (-work[place], place))
    dealt: list[list[list[int]]] = [[] for _ in range(num_groups)]
    done = [0.0] * num_groups
    for start in range(0, len(bins), num_groups):
        # Who has done most so far gets the least of this round.
        groups = sorted(range(num_groups), key=lambda group: (done[group], group))
        for group, place in zip(groups, by_work[start : start + num_groups], strict=False):
            dealt[group].append(sorted(bins[place]))
            done[group] += work[place]
    return dealt


def _fill(
    order: Sequence[int], tokens: Sequence[int], costs: Sequence[float], token_budget: int, count: int
) -> list[list[int]] | None:
    """Put items into so many bins; None where one does not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    used, work = [0] * count, [0.0] * count
    for index in order:
        fitting = [n for n in range(count) if not bins[n] or used[n] + tokens[index] <= token_budget]
        if not fitting:
            return None
        best = min(fitting, key=lambda n: (work[n], n))
        bins[best].append(index)
        used[best] += tokens[index]
        work[best] += costs[index]
    return bins


# One micro-batch on the ranks of a group.


def split(micro: MicroBatch, own: Sharing) -> MicroBatch:
    """Return a micro-batch of which this rank computes its share of the rows, if ranks share it.

    Args:
        micro: The same on all ranks of the group.
        own: How they share it.
    """
    if own.context == 1:
        return micro
    parts = cut(micro.segments, own.context, own.costs)
    rows = [
        [row for piece in part for row in range(*_rows(micro.segments[piece.segment], piece))]
        for part in parts
    ]
    most = max(map(len, rows))
    order = torch.empty(sum(map(len, rows)), dtype=torch.int64)
    for place, part in enumerate(rows):
        order[part] = torch.arange(len(part)) + place * most
    place, device = rank() % own.context, micro.tokens_N.device
    found = Split(
        place=place,
        num_ranks=own.context,
        pieces=tuple(parts[place]),
        rows_N=torch.tensor(rows[place], dtype=torch.int64, device=device),
        most_rows=most,
        order_N=order.to(device),
        has_all_rows=own.has_all_rows,
    )
    return replace(micro, split=found)


def _rows(segment: Segment, piece: Piece) -> tuple[int, int]:
    return segment.start + piece.first, segment.start + piece.first + piece.length


def cut(segments: Sequence[Segment], count: int, costs: Costs) -> list[list[Piece]]:
    """Cut segments into pieces, for ranks that are to have as much work each.

    A long segment is cut into 2 W chunks, of which rank r takes the r-th from either end: the early ones see few keys,
    the late ones many. Short ones stay whole, largest first with the rank that has least.

    Args:
        segments: Those of a micro-batch.
        count: Ranks.
        costs: Work of a sequence.

    Returns:
        The pieces of each rank, in the order of its rows.
    """
    parts: list[list[Piece]] = [[] for _ in range(count)]
    work = [0.0] * count
    short = []
    for index, segment in enumerate(segments):
        if segment.length < 2 * count * LEAST_ROWS:
            short.append((costs.of(segment.shared, segment.length), index))
            continue
        ends = [segment.length * chunk // (2 * count) for chunk in range(2 * count + 1)]
        for place in range(count):
            for chunk in (place, 2 * count - 1 - place):
                piece = Piece(index, ends[chunk], ends[chunk + 1] - ends[chunk])
                parts[place].append(piece)
                work[place] += costs.of(segment.shared + piece.first, piece.length)
    for cost, index in sorted(short, key=lambda item: (-item[0], item[1])):
        place = min(range(count), key=lambda n: (work[n], n))
        parts[place].append(Piece(index, 0, segments[index].length))
        work[place] += cost
    return [sorted(part) for part in parts]


def gather_keys(k_NKC: torch.Tensor, v_NKC: torch.Tensor, found: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of all rows of a micro-batch, of this rank's; differentiable.

    Args:
        k_NKC: Keys of this rank's rows; what follows them (row padding) is left out.
        v_NKC: Values.
        found: How the ranks share the micro-batch.
    """
    return _Keys.apply(k_NKC, v_NKC, found)  # pyright: ignore[reportReturnType]


class _Keys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: torch.Tensor, v: torch.Tensor, found: Split
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.found, ctx.rows, ctx.dtypes = found, k.shape[0], (k.dtype, v.dtype)
        count = found.rows_N.shape[0]
        both = torch.stack((k[:count], v[:count]), 1)
        k_all, v_all = _all_rows(both, found.most_rows, found.num_ranks)[found.order_N].unbind(1)
        return k_all.contiguous(), v_all.contiguous()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found: Split = ctx.found
        # Of all ranks' queries: added in float32 at least.
        wide = torch.promote_types(upstream[0].dtype, torch.float32)
        both = torch.stack(upstream, 1).to(wide)
        padded = both.new_zeros(found.num_ranks * found.most_rows, *both.shape[1:])
        padded[found.order_N] = both
        mine = torch.empty_like(padded[: found.most_rows])
        with named("gradients of keys and values"):
            dist.reduce_scatter(mine, list(padded.chunk(found.num_ranks)), group=group_of(found.num_ranks))
        count = found.rows_N.shape[0]
        grads = mine.new_zeros(ctx.rows, *mine.shape[1:])
        grads[:count] = mine[:count]
        return *(x.to(dtype) for x, dtype in zip(grads.unbind(1), ctx.dtypes, strict=True)), None


def _all_rows(x: torch.Tensor, most: int, num_ranks: int) -> torch.Tensor:
    """Return the rows of a group's ranks, each filled up with zeros to the `most` that one has."""
    padded = x.new_zeros(most, *x.shape[1:])
    padded[: x.shape[0]] = x
    parts = padded.new_empty(num_ranks * most, *x.shape[1:])
    with named("keys and values" if x.dim() > 2 else "log-probabilities"):
        dist.all_gather(list(parts.chunk(num_ranks)), padded, group=group_of(num_ranks))
    return parts


def own_tokens(source_M: torch.Tensor, found: Split) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens this rank scores, and which of its rows scores each of them.

    Args:
        source_M: Row of the micro-batch that scores each token.
        found: How the ranks share it.
    """
    places_M = found.order_N[source_M]
    mine = (places_M // found.most_rows == found.place).nonzero().squeeze(1)
    if found.has_all_rows:
        return mine, source_M[mine]
    return mine, places_M[mine] % found.most_rows


def all_tokens(values_MX: torch.Tensor, source_M: torch.Tensor, found: Split) -> torch.Tensor:
    """Return what the ranks of a group computed of their tokens, of all tokens [M, X].

    Every rank computes the same loss of it, so that each backpropagates its own tokens' gradient as it is.

    Args:
        values_MX: This rank's, of `own_tokens`.
        source_M: Row of the micro-batch that scores each token.
        found: How the ranks share it.
    """
    return _Tokens.apply(values_MX, source_M, found)  # pyright: ignore[reportReturnType]


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, source_M: torch.Tensor, found: Split) -> torch.Tensor:
        owner_M = found.order_N[source_M] // found.most_rows
        ctx.mine = (owner_M == found.place).nonzero().squeeze(1)
        counts = torch.bincount(owner_M, minlength=found.num_ranks).tolist()
        most = max(counts)
        # Each rank's tokens are in the order of the micro-batch.
        order = torch.cat([torch.arange(n) + place * most for place, n in enumerate(counts)]).to(
            owner_M.device
        )
        places_M = torch.empty_like(owner_M)
        places_M[torch.argsort(owner_M, stable=True)] = order
        return _all_rows(values, most, found.num_ranks)[places_M]

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return upstream[0][ctx.mine], None, None


def pieces_of(
    segments: Sequence[Segment], pieces: Sequence[Piece] | None = None
) -> Iterator[tuple[Segment, int, int]]:
    """Yield what is computed here: a segment, its first row that is, and where this row stands among the queries.

    Args:
        segments: Those of a micro-batch.
        pieces: This rank's, of whose segments only the rows up to their last are yielded; None: all segments whole.
    """
    if pieces is None:
        yield from ((segment, 0, segment.start) for segment in segments)
        return
    for piece, end in zip(pieces, accumulate(piece.length for piece in pieces), strict=True):
        whole = segments[piece.segment]
        yield whole._replace(length=piece.first + piece.length), piece.first, end - piece.length
