"""Two and three gloo ranks: what they reduce and share, and that unequal work is an error and never a wrong number."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from gloo import run_ranks
from torch import nn

from whet.ranks import collectives as distributed
from whet.ranks.collectives import (
    all_gather_values,
    all_reduce_max,
    all_reduce_sum,
    barrier,
    current_collective,
    gather_json,
    on_main,
    rank,
    redeal,
    shard,
    sum_gradients,
)
from whet.types import UserError


class FullError(UserError):
    """A kind of its own."""


def share() -> dict[str, Any]:
    mine = rank()
    return {
        "sum": all_reduce_sum(mine, 0.1, 2**53 + 2.0 * mine),
        "max": all_reduce_max(-1.0 - mine),
        "values": all_gather_values(torch.arange(mine * 2)).tolist(),
        "empty": all_gather_values(torch.zeros(0, dtype=torch.float64)).tolist(),
        "json": gather_json({"rank": mine, "text": "é\n" * mine}),
        "main": on_main(lambda: [mine, {"a": (1, 2)}]),
        "shard": list(shard(5)),
        "waits": current_collective(),
    }


@pytest.mark.ci
def test_all_ranks_get_the_same_and_in_order() -> None:
    found = run_ranks(3, share)
    assert [result.pop("shard") for result in found] == [[0, 3], [1, 4], [2]]
    expected = {
        "sum": [3.0, pytest.approx(0.3), 3 * 2.0**53 + 6],
        "max": -1.0,
        "values": [0, 1, 0, 1, 2, 3],
        "empty": [],
        "json": [{"rank": mine, "text": "é\n" * mine} for mine in range(3)],
        "main": [0, {"a": [1, 2]}],
        "waits": "",
    }
    assert found == [expected] * 3


def test_one_rank_runs_the_same_code() -> None:
    assert share() == {
        "sum": [0.0, 0.1, 2.0**53],
        "max": -1.0,
        "values": [],
        "empty": [],
        "json": [{"rank": 0, "text": ""}],
        "main": [0, {"a": [1, 2]}],
        "shard": [0, 1, 2, 3, 4],
        "waits": "",
    }


def unequal(how: str) -> Any:
    all_reduce_sum(1.0)
    if how == "values":
        return all_reduce_sum(*range(2 + rank()))
    if how == "dtype":
        return all_gather_values(torch.zeros(2, dtype=(torch.float32, torch.float64)[rank()])).tolist()
    if how == "gradients":
        weight = nn.Parameter(torch.zeros(2, 3 + rank()))
        weight.grad = torch.ones_like(weight)
        return sum_gradients([weight])
    return all_reduce_max(1.0) if rank() else barrier()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("values", ["all_reduce_sum of 2 values", "all_reduce_sum of 3 values"]),
        ("dtype", ["all_gather_values of torch.float32", "all_gather_values of torch.float64"]),
        ("gradients", ["sum_gradients of 1 tensors", "sum_gradients of 1 tensors"]),
        ("function", ["barrier", "all_reduce_max"]),
    ],
)
def test_unequal_work_is_said_on_every_rank(how: str, said: list[str]) -> None:
    for kind, text in run_ranks(2, unequal, how):
        assert kind == "RankError"
        first, second = text.removeprefix("ranks are in different collectives: ").split("; ")[:2]
        assert first.startswith(f"rank 0: {said[0]} ")
        assert " in test_distributed.unequal:" in first
        assert second.startswith(f"rank 1: {said[1]} ")


def refuse(kind: str) -> None:
    def failing() -> None:
        raise {"UserError": UserError, "FullError": FullError, "OSError": OSError}[kind]("no room")

    on_main(failing)


@pytest.mark.parametrize(
    ("kind", "others"), [("UserError", "UserError"), ("FullError", "FullError"), ("OSError", "UserError")]
)
def test_what_rank_0_may_not_do_no_rank_does(kind: str, others: str) -> None:
    assert run_ranks(2, refuse, kind) == [(kind, "no room"), (others, "no room")]


def gradients() -> list[Any]:
    distributed.BUCKET_NUMBERS = 5  # several buckets
    generator = torch.Generator().manual_seed(rank())
    tensors = [torch.randn(shape, generator=generator) for shape in ((2, 3), (4,), (), (7,), (1,))]
    parameters = [nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor.clone()
    low = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    low.grad = torch.full_like(low, 1.0 + rank())
    if rank() != 1:
        parameters[1].grad = None  # only rank 1 has one
    frozen, unused = nn.Parameter(torch.zeros(2), requires_grad=False), nn.Parameter(torch.zeros(2))
    frozen.grad = torch.ones(2)  # of no concern to anybody
    sum_gradients([*parameters, low, frozen, unused])
    grads = [None if parameter.grad is None else parameter.grad.tolist() for parameter in (*parameters, low)]
    return [
        [tensor.tolist() for tensor in tensors],
        grads,
        frozen.grad.tolist() == [1.0, 1.0] and unused.grad is None,
    ]


def test_gradients_are_added_and_those_that_nobody_has_stay_none() -> None:
    found = run_ranks(3, gradients)
    assert [result[1] for result in found] == [found[0][1]] * 3
    assert all(untouched for *_, untouched in found)
    own = [[torch.tensor(tensor) for tensor in result[0]] for result in found]
    for place, total in enumerate(found[0][1][:5]):
        parts = [own[1][place]] if place == 1 else [own[number][place] for number in range(3)]
        # Three float32 numbers, added in any order.
        assert torch.allclose(torch.tensor(total), sum(parts, torch.zeros(())), rtol=1e-6, atol=1e-6)
    assert found[0][1][5] == [6.0, 6.0, 6.0]
    assert run_ranks(3, gradients) == found, "the same bits every time"


def look() -> str:
    seen: list[str] = []
    thread = threading.Timer(0.5, lambda: seen.append(current_collective()))
    thread.start()
    if rank():
        time.sleep(1.0)
    barrier()
    thread.join()
    return seen[0]


def test_what_a_rank_waits_for_can_be_seen() -> None:
    first, second = run_ranks(2, look)
    assert first.startswith("barrier in test_distributed.look:")
    assert second == ""


def test_items_that_other_ranks_had_are_dealt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [["a", "c", "e"], ["b", "d"]]

    def dealt(world: int) -> list[list[str]]:
        monkeypatch.setattr(distributed, "world_size", lambda: world)
        shares = []
        for number in range(world):
            monkeypatch.setattr(distributed, "rank", lambda number=number: number)
            shares.append(redeal(parts))
        return shares

    assert dealt(2) == parts
    assert dealt(1) == [["a", "b", "c", "d", "e"]]
    assert dealt(3) == [["a", "d"], ["b", "e"], ["c"]]
