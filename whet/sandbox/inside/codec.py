"""Plain values as JSON text: how arguments and results cross between a program and its tests.

JSON's own null, booleans, strings, finite floats and small integers; all else is an array that begins with a tag.
There are no JSON objects, so no key occurs twice; text that does not fit this grammar exactly is an error. A value of
any other type stays in its process and crosses as a handle.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_BYTES = 8 << 20
MAX_DEPTH = 100
_SAFE_INTEGER = 1 << 53

_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
_MAPPINGS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
_TEXTS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": complex,
    "Decimal": Decimal,
    "Fraction": Fraction,
}
_TYPES = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
}
_BASES = (int, float, str, bytes, tuple, list, dict, set, frozenset)
"""A subclass that compares as one of these (a named tuple, an IntEnum, a defaultdict) is sent as that type."""


class MalformedError(ValueError):
    """Text that is not a value of this grammar."""


def encode(value: Any, to_handle: Callable[[Any], int]) -> str:
    """Write a value as text.

    Args:
        value: Anything.
        to_handle: Called with a value that is not plain; returns its handle number.

    Returns:
        ASCII; a value that is too deep, too large or contains itself becomes one handle.
    """
    try:
        text = json.dumps(_pack(value, to_handle, 0), allow_nan=False, separators=(",", ":"))
    except (MalformedError, RecursionError):
        text = ""
    if not text or len(text) > MAX_BYTES:
        text = json.dumps(["handle", to_handle(value)])
    return text


def _pack(value: Any, to_handle: Callable[[Any], int], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise MalformedError("too deep")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_SAFE_INTEGER < value < _SAFE_INTEGER else ["int", f"{value:x}"]
    if kind is float:
        return value if math.isfinite(value) else ["float", str(value)]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if kind in (complex, Decimal, Fraction):
        return [kind.__name__, str(value)]
    if kind is range:
        return ["range", *(_pack(part, to_handle, depth) for part in (value.start, value.stop, value.step))]
    if kind in (list, tuple, set, frozenset, deque):
        return [kind.__name__, *(_pack(item, to_handle, depth + 1) for item in value)]
    if kind in (dict, OrderedDict, Counter):
        pairs = (part for pair in value.items() for part in pair)
        return [kind.__name__, *(_pack(part, to_handle, depth + 1) for part in pairs)]
    if kind is type and _TYPES.get(value.__name__) is value:
        return ["type", value.__name__]
    for base in _BASES:
        if issubclass(kind, base) and kind.__eq__ is base.__eq__ and kind is not defaultdict:
            return _pack(base(value), to_handle, depth)
    if kind is defaultdict:
        return _pack(dict(value), to_handle, depth)
    return ["handle", to_handle(value)]


def decode(text: str | bytes, from_handle: Callable[[int], Any]) -> Any:
    """Read a value.

    Args:
        text: Untrusted text, as `encode` writes it.
        from_handle: Called with the number of a handle.

    Returns:
        A value of plain types and of what `from_handle` returned.

    Raises:
        MalformedError: If the text does not fit the grammar.
    """
    try:
        return _unpack(json.loads(text, parse_constant=_refuse), from_handle, 0)
    except (ValueError, TypeError, ArithmeticError, RecursionError, LookupError) as error:
        raise MalformedError(f"not a plain value: {error}"[:200]) from None


def _refuse(name: str) -> Any:
    raise MalformedError(f"{name} is not a number")


def _unpack(item: Any, from_handle: Callable[[int], Any], depth: int) -> Any:
    if depth > MAX_DEPTH + 1:
        raise MalformedError("too deep")
    if item is None or type(item) in (bool, int, float, str):
        return item
    if type(item) is not list or not item or type(item[0]) is not str:
        raise MalformedError("an array without a tag, or an object")
    tag, *rest = item
    if tag in _TEXTS:
        (text,) = rest
        if type(text) is not str:
            raise MalformedError(tag)
        return _TEXTS[tag](text)
    if tag == "type":
        return _TYPES["".join(rest)]
    if tag == "handle":
        (number,) = rest
        if type(number) is not int:
            raise MalformedError(tag)
        return from_handle(number)
    parts = [_unpack(part, from_handle, depth + 1) for part in rest]
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](parts)
    if tag in _MAPPINGS:
        return _MAPPINGS[tag](list(zip(parts[::2], parts[1::2], strict=True)))
    if tag == "range":
        return range(*parts)
    raise MalformedError(f"unknown tag {tag!r}")
