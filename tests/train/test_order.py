"""The order of the data."""

from __future__ import annotations

from collections import Counter

import pytest

from whet.tasks.made.arithmetic import Arithmetic
from whet.tasks.mixture import Mixture
from whet.train.rollout import order as order_module
from whet.train.rollout.order import EpochOrder, MixtureOrder, data_order
from whet.types import UserError

ITEMS = [f"item {number}" for number in range(23)]


def take(order: EpochOrder[str], *counts: int) -> list[tuple[int, str]]:
    return [drawn for count in counts for drawn in order.next(count)]


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    drawn = take(EpochOrder(ITEMS, seed=0), 23 * 4)
    epochs = [[item for epoch, item in drawn if epoch == number] for number in range(4)]
    assert [epoch for epoch, _ in drawn] == [number for number in range(4) for _ in ITEMS]
    for items in epochs:
        assert Counter(items) == Counter(ITEMS)
    assert len({tuple(items) for items in [*epochs, ITEMS]}) == 5


@pytest.mark.parametrize("counts", [(46,), (1,) * 46, (7, 20, 0, 19)])
def test_batch_sizes_do_not_matter(counts: tuple[int, ...]) -> None:
    assert take(EpochOrder(ITEMS, seed=3), *counts) == take(EpochOrder(ITEMS, seed=3), 46)


@pytest.mark.parametrize("cursor", [0, 1, 22, 23, 24, 45])
def test_it_goes_on_from_a_cursor_alone(cursor: int) -> None:
    whole = take(EpochOrder(ITEMS, seed=3), 60)
    resumed = EpochOrder(ITEMS, seed=3, cursor=cursor)
    assert take(resumed, 5, 55 - cursor) == whole[cursor:]
    moved = EpochOrder(ITEMS, seed=3)
    moved.next(30)
    moved.cursor = cursor
    assert moved.next(60 - cursor) == whole[cursor:]


def test_seeds_differ_and_nothing_global_is_touched() -> None:
    import torch

    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first, second = (EpochOrder(ITEMS, seed=seed).next(23) for seed in (0, 1))
    assert first != second
    assert torch.equal(torch.rand(1), expected)


def test_epochs_counts_parts() -> None:
    order = EpochOrder(ITEMS, seed=0)
    order.next(23)
    assert order.epochs == 1.0
    order.next(10)
    assert order.epochs == pytest.approx(33 / 23)


def test_a_single_item() -> None:
    assert EpochOrder(["only"], seed=0).next(3) == [(0, "only"), (1, "only"), (2, "only")]


PARTS = {"a": [f"a{number}" for number in range(7)], "b": [f"b{number}" for number in range(40)], "c": ["c0"]}
WEIGHTS = {"a": 5.0, "b": 3.0, "c": 0.5}


def mixed(cursor: int = 0, seed: int = 3, **weights: float) -> MixtureOrder[str]:
    return MixtureOrder(PARTS, WEIGHTS | weights, seed, cursor)


def of_part(drawn: list[tuple[int, str]], part: str) -> list[tuple[int, str]]:
    return [(epoch, item) for epoch, item in drawn if item.startswith(part)]


def test_a_mixture_draws_by_weight() -> None:
    count = 20_000
    drawn = mixed().next(count)
    for part, weight in WEIGHTS.items():
        share = weight / sum(WEIGHTS.values())
        deviation = (count * share * (1 - share)) ** 0.5
        assert abs(len(of_part(drawn, part)) - count * share) < 4 * deviation
    follows = Counter(zip((i[0] for _, i in drawn), (i[0] for _, i in drawn[1:]), strict=False))
    share = (5 / 8.5) ** 2  # an 'a' after an 'a', if draws are independent
    assert abs(follows["a", "a"] - count * share) < 5 * (count * share * (1 - share)) ** 0.5


def test_each_part_has_epochs_of_its_own() -> None:
    drawn = mixed().next(2_000)
    for part, items in PARTS.items():
        mine = of_part(drawn, part)
        for epoch in range(mine[-1][0]):
            assert Counter(item for number, item in mine if number == epoch) == Counter(items)
        assert [epoch for epoch, _ in mine] == sorted(epoch for epoch, _ in mine)
    firsts = [[item for epoch, item in of_part(drawn, "a") if epoch == number] for number in range(4)]
    assert len({tuple(items) for items in firsts}) > 1


def test_weights_do_not_change_the_order_within_a_part() -> None:
    few, many = (of_part(mixed(a=weight).next(3_000), "a") for weight in (1.0, 50.0))
    assert many[: len(few)] == few
    assert of_part(mixed(seed=4).next(100), "a") != of_part(mixed().next(100), "a")


def test_parts_of_one_length_have_different_orders() -> None:
    items = list(range(50))
    order = MixtureOrder(
        {"x": [("x", i) for i in items], "y": [("y", i) for i in items]}, {"x": 1, "y": 1}, 0
    )
    drawn = [item for epoch, item in order.next(400) if epoch == 0]
    assert [i for part, i in drawn if part == "x"] != [i for part, i in drawn if part == "y"]


@pytest.mark.parametrize("cursor", [0, 1, 7, 8, 100, 999])
def test_a_mixture_goes_on_from_a_cursor_alone(cursor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "REPLAY_BLOCK", 8)
    whole = take(mixed(), 400, 1, 0, 799)
    assert mixed(cursor).next(1_200 - cursor) == whole[cursor:]
    moved = mixed()
    moved.next(50)
    moved.cursor = cursor
    assert moved.cursor == cursor
    assert take(moved, 3, 1_197 - cursor) == whole[cursor:]


def test_mixture_epochs() -> None:
    order = mixed()
    order.next(72)
    assert order.cursor == 72
    assert order.epochs == 72 / 48


def test_data_order_of_a_mixture_and_of_a_task() -> None:
    task = Mixture(
        {"arithmetic": Arithmetic(), "arithmetic:2": Arithmetic()}, {"arithmetic": 1, "arithmetic:2": 9}
    )
    problems = task.problems("dev")
    order = data_order(task, problems, 0)
    assert isinstance(order, MixtureOrder)
    drawn = [problem.meta["part"] for _, problem in order.next(1_000)]
    assert 50 < drawn.count("arithmetic") < 150
    plain = Arithmetic().problems("dev")
    assert data_order(Arithmetic(), plain, 5).next(9) == EpochOrder(plain, 5).next(9)
    with pytest.raises(UserError, match=r"no problem of arithmetic:2 is left to train on"):
        data_order(task, [p for p in problems if p.meta["part"] == "arithmetic"], 0)


@pytest.mark.parametrize("kind", ["epochs", "mixture"])
def test_very_many_draws_look_up_now_and_then_and_may_be_ended(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_module, "LOOK_EVERY", 100)
    order = EpochOrder([1, 2, 3], 0) if kind == "epochs" else MixtureOrder({"a": [1, 2]}, {"a": 1.0}, 0)
    looks: list[int] = []

    def look() -> None:
        looks.append(order.cursor)
        if len(looks) == 3:
            raise KeyboardInterrupt

    order.look = look
    order.next(99)
    assert looks == []
    order.next(250)
    assert looks == [198, 298]
    with pytest.raises(KeyboardInterrupt):
        order.next(100)
