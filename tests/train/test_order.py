"""The order of the data."""

from __future__ import annotations

from collections import Counter

import pytest

from whet.train.order import EpochOrder

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
