"""Ranks that run each training pass together: a share of the positions each, or of the weights' rows and columns.

A team is `size` ranks that follow each other. The rank that a micro-batch belongs to leads its pass: it tells the
others what to run, gets the numbers of all trained tokens, computes the loss as it would alone, and hands each rank the
gradient of what that computed. So losses, metrics and data know nothing of teams. Every rank's graph is the exact
derivative of its part, so that gradients are summed over ranks as ever.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from whet.ranks.collectives import gather_json, rank, waiting, world_size
from whet.types import UserError

TEAM = "_whet_team"
Kind = Literal["context", "tensor"]
_teams: dict[tuple[Kind, int], Team] = {}
# PyTorch 2.13 has these under other names, and warns of the old ones.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(slots=True)
class Team:
    """A rank's team.

    Attributes:
        kind: What its ranks share: the positions of a micro-batch (context), or the layers' weights (tensor).
        size: Ranks in it.
        group: Their process group.
        state: 'leads' from where this rank begins a micro-batch of its own until its pass, 'has led' after it.
    """

    kind: Kind
    size: int
    group: Any
    state: Literal["", "leads", "has led"] = ""

    @property
    def place(self) -> int:
        """This rank's place among them."""
        return rank() % self.size

    @property
    def first(self) -> int:
        """The first of its ranks."""
        return rank() - self.place

    def __deepcopy__(self, _: object) -> Team:
        return self  # a model's copies are on the same ranks

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Have this rank's next differentiable pass, of which there must be one, run by the team."""
        self.state = "leads"
        try:
            yield
            assert self.state == "has led", "the loss has called no model, and the others wait"
        finally:
            self.state = ""

    def begins(self) -> bool:
        """Say whether a pass that begins here is one that this rank leads."""
        if not self.state or not torch.is_grad_enabled():
            return False
        assert self.state == "leads", "a micro-batch has one differentiable pass"
        self.state = "has led"
        return True

    def schedule(self, count: int) -> list[int]:
        """Return who leads each of a step's passes, by place; the order is that of the ranks.

        Args:
            count: Micro-batches of this rank.
        """
        counts = [int(number) for number in gather_json(count)]
        mine = counts[self.first : self.first + self.size]
        return [place for place, number in enumerate(mine) for _ in range(number)]

    def tell(self, header: dict[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Send to the others, from the rank that leads.

        Args:
            header: JSON.
            tensors: Whole numbers of any shape.
        """
        sizes = [list(tensor.shape) for tensor in tensors]
        text = json.dumps({**header, "sizes": sizes}).encode()
        parts = [torch.frombuffer(bytearray(text), dtype=torch.uint8).long()]
        parts += [tensor.detach().reshape(-1).cpu().long() for tensor in tensors]
        flat = torch.cat(parts)
        with waiting(f"tell the {self.kind} team of a pass"):
            source = self.first + self.place
            dist.broadcast(torch.tensor([len(text), flat.numel()]), source, group=self.group)
            dist.broadcast(flat, source, group=self.group)

    def hear(self, leader: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Return what the rank that leads has told; int64 tensors on the host."""
        with waiting(f"hear of a pass of the {self.kind} team"):
            sizes = torch.zeros(2, dtype=torch.int64)
            dist.broadcast(sizes, self.first + leader, group=self.group)
            flat = torch.zeros(int(sizes[1]), dtype=torch.int64)
            dist.broadcast(flat, self.first + leader, group=self.group)
        length = int(sizes[0])
        header = json.loads(bytes(flat[:length].to(torch.uint8).numpy()))
        shapes = [torch.Size(shape) for shape in header.pop("sizes")]
        parts = flat[length:].split([shape.numel() for shape in shapes])
        return header, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def team_of(model: nn.Module) -> Team | None:
    """Return the team that runs a model's training passes; None where each rank runs its own."""
    return getattr(model, TEAM, None)


def has_teams() -> bool:
    """Say whether this run's ranks work in teams."""
    return bool(_teams)


def join_team(model: nn.Module, kind: Kind, size: int) -> Team | None:
    """Have a model's training passes run by teams of ranks; all ranks call it.

    Args:
        model: The model, which will know its team.
        kind: What they share.
        size: Ranks in a team; with 1, or in one process, there are none.

    Raises:
        UserError: If the ranks cannot be divided so.
    """
    if size == 1 or world_size() == 1:
        return None
    if world_size() % size:
        raise UserError(f"parallel.{kind} = {size}: expected a divisor of the {world_size()} ranks")
    if (kind, size) not in _teams:
        group, _ = dist.new_subgroups(group_size=size)
        _teams[kind, size] = Team(kind, size, group)
    setattr(model, TEAM, _teams[kind, size])
    return _teams[kind, size]


class _AllRows(torch.autograd.Function):
    """Bring the rows of all ranks together on each; the gradient is the sum of what all ranks make of a rank's rows."""

    @staticmethod
    def forward(
        ctx: Any, own_NX: torch.Tensor, team: Team, counts: Sequence[int], order_N: torch.Tensor
    ) -> torch.Tensor:
        ctx.team, ctx.counts, ctx.dtype = team, counts, own_NX.dtype
        ctx.save_for_backward(order_N)
        return _all_rows(own_NX, team, counts).index_select(0, order_N)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order_N,) = ctx.saved_tensors
        team: Team = ctx.team
        most, grad = max(ctx.counts), upstream[0]
        # 16-bit gradients of keys are sums over all later queries: they are added in float32.
        wide = torch.promote_types(grad.dtype, torch.float32)
        everyone = torch.zeros(team.size * most, grad.shape[1], dtype=wide, device=grad.device)
        everyone.index_copy_(0, order_N, grad.to(wide))
        own = everyone.new_empty(most, grad.shape[1])
        with waiting(f"add gradients in the {team.kind} team"):
            _reduce_scatter(own, everyone, group=team.group)
        return own[: ctx.counts[team.place]].to(ctx.dtype), None, None, None


class _ToLeader(torch.autograd.Function):
    """Bring the rows of all ranks together for the rank that leads; its gradient comes back to theirs."""

    @staticmethod
    def forward(
        ctx: Any,
        own_MX: torch.Tensor,
        team: Team,
        leader: int,
        counts: Sequence[int],
        order_M: torch.Tensor,
    ) -> torch.Tensor:
        ctx.team, ctx.leader, ctx.counts = team, leader, counts
        ctx.save_for_backward(order_M)
        return _all_rows(own_MX, team, counts).index_select(0, order_M)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (order_M,) = ctx.saved_tensors
        team: Team = ctx.team
        grad = upstream[0].contiguous()  # of the others' nothing counts: what they have no loss
        with waiting(f"hand out gradients in the {team.kind} team"):
            dist.broadcast(grad, team.first + ctx.leader, group=team.group)
        most, own = max(ctx.counts), team.place
        everyone = grad.new_zeros(team.size * most, grad.shape[1]).index_copy_(0, order_M, grad)
        return everyone[own * most : own * most + ctx.counts[own]], None, None, None, None


def _all_rows(own_NX: torch.Tensor, team: Team, counts: Sequence[int]) -> torch.Tensor:
    """Gather rows, padded to the largest count."""
    most = max(counts)
    padded = own_NX.new_zeros(most, own_NX.shape[1])
    padded[: own_NX.shape[0]] = own_NX
    everyone = own_NX.new_empty(team.size * most, own_NX.shape[1])
    with waiting(f"gather rows in the {team.kind} team"):
        _gather(everyone, padded, group=team.group)
    return everyone


def all_rows(own_NX: torch.Tensor, team: Team, counts: Sequence[int], order_N: torch.Tensor) -> torch.Tensor:
    """Return rows of all ranks of a team, differentiable; all of them call it.

    Args:
        own_NX: This rank's rows.
        team: The team.
        counts: Rows of each rank.
        order_N: Of each row that is returned, rank times the largest count plus its place among that rank's rows.
    """
    return _AllRows.apply(own_NX, team, counts, order_N)  # pyright: ignore[reportReturnType]


def to_leader(
    own_MX: torch.Tensor, team: Team, leader: int, counts: Sequence[int], order_M: torch.Tensor
) -> torch.Tensor:
    """Return rows of all ranks, of whose losses only that of the rank that leads counts; as `all_rows` otherwise."""
    return _ToLeader.apply(own_MX, team, leader, counts, order_M)  # pyright: ignore[reportReturnType]
