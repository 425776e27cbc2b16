from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.sandbox.inside.codec import MalformedError, decode, encode

Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def refuse(value: Any) -> int:
    raise AssertionError(f"a handle for {value!r}")


def there_and_back(value: Any) -> Any:
    return decode(encode(value, refuse), lambda number: ("handle", number))


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            False,
            0,
            -1,
            2**53,
            -(2**64),
            10**4000,
            0.1,
            -0.0,
            1e308,
            math.inf,
            -math.inf,
            "",
            "é\ud800\0",
        ),
        *(b"\0\xff", bytearray(b"ab"), 1 + 2j, Decimal("1.10"), Fraction(1, 3), range(1, 9, 2), int, dict),
        *(
            [],
            [1, [2, (3,)]],
            (),
            (1,),
            {1, 2},
            frozenset({"a"}),
            {},
            {"a": 1, 2: [3], (4, 5): None},
            deque([1, 2]),
        ),
        *(Counter("aab"), OrderedDict(b=1, a=2), [True, 1, 1.0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_nan_arrives() -> None:
    assert math.isnan(there_and_back(math.nan))


def test_subclasses_that_compare_as_their_base_arrive_as_it() -> None:
    assert type(there_and_back(Point(1, 2))) is tuple
    assert type(there_and_back(Colour.RED)) is int
    assert type(there_and_back(defaultdict(int, a=1))) is dict


@pytest.mark.parametrize("value", [Liar(5), object(), print, iter([])])
def test_other_objects_stay_and_travel_as_handles(value: Any) -> None:
    kept: list[Any] = []
    text = encode([value], lambda item: kept.append(item) or 7)
    assert kept[0] is value
    assert decode(text, lambda number: f"handle {number}") == ["handle 7"]


def test_what_is_too_deep_or_contains_itself_is_one_handle() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    for value in (endless, deep, "x" * (9 << 20)):
        assert decode(encode(value, lambda item: 3), lambda number: number) == 3


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "[",
            "{}",
            '{"a": 1, "a": 2}',
            "[]",
            "[1]",
            "NaN",
            "Infinity",
            '["nothing"]',
            '["list", [1]]',
            "[[]]",
        ),
        *(
            '["int", "zz"]',
            '["int", 5]',
            '["int"]',
            '["set", ["list"]]',
            '["dict", 1]',
            '["dict", ["list"], 1]',
        ),
        *('["handle", "x"]', '["handle", true]', '["bytes", "x"]', '["Decimal", "x"]', '["Fraction", "1/0"]'),
        *(
            '["range", "a"]',
            '["type", "object"]',
            "[" * 100_000,
            "9" * 5000,
            '["list"' * 200 + "]" * 200,
            b"\xff",
        ),
    ],
    ids=lambda text: str(text)[:20],
)
def test_anything_else_is_refused(text: str | bytes) -> None:
    with pytest.raises(MalformedError):
        decode(text, lambda number: number)


@pytest.mark.ci
@settings(max_examples=200, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x)))
def test_json_is_a_plain_value_or_refused(value: Any) -> None:
    with suppress(MalformedError):
        decode(json.dumps(value), lambda number: number)
    assert there_and_back(value) == value
