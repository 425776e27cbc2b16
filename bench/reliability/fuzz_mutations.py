"""Hostile values and mutations of JSON trees, bytes and text, all drawn from one random generator."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from random import Random
from typing import Any

CANARY = "@CANARY@"
"""Stands in payloads for the path of a file that must never come to be."""


class _Bomb:
    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> Any:
        import os

        return os.system, (self._command,)


def payloads() -> list[str]:
    """Return texts that make the canary file where somebody evaluates, formats, renders or executes them."""
    touch = f"touch {CANARY}"
    return [
        f"__import__('os').system('{touch}')",
        f"eval(\"open('{CANARY}','w')\")",
        f"$({touch})",
        f"`{touch}`; {touch}",
        f'!!python/object/apply:os.system ["{touch}"]',
        f"{{{{ cycler.__init__.__globals__.os.popen('{touch}').read() }}}}",
        f"{{{{ ''.__class__.__mro__[1].__subclasses__()[137]('{touch}', shell=True) }}}}",
        f"{{% for c in [].__class__.__base__.__subclasses__() %}}{{{{ c('{touch}') }}}}{{% endfor %}}",
        f"<script>{touch}</script></script><img src=x onerror=alert(1)>",
        f"\\input{{|{touch}}}\\write18{{{touch}}}",
        f"sympify: Symbol('x').__class__.__bases__, open('{CANARY}', 'w')",
        "{0.__class__.__init__.__globals__}",
        "%(x)s %n %1000000000d",
        "\x1b]0;owned\x07\x1b[2J[/b][red]",
    ]


def pickled() -> bytes:
    """Return a pickle that makes the canary file when it is loaded."""
    return pickle.dumps(_Bomb(f"touch {CANARY}"))


TEXTS = [
    "",
    " ",
    "\x00",
    "\ud800",
    "a\udfffb",
    "💥" * 40,
    "\u202eabc\u2066",
    "é\u0301" * 50,
    "../../../etc/passwd",
    "/etc/passwd",
    "file:///etc/passwd",
    "-1",
    "nan",
    "1e999",
    "null",
    "None",
    "true",
    "9" * 5000,
    "5",  # fullwidth
    "٣",
    "²",
    "1_0",
    "\n\r\n\u2028\x85",
    "{}",
    "[]",
    "(" * 3000,
    "a" * 200_000,
    "<think>" * 2000,
    "\\frac{" * 800,
    "{{" * 500,
]
NUMBERS: list[Any] = [
    0,
    -1,
    1,
    2,
    3,
    255,
    2**15,
    2**24,
    2**31 - 1,
    2**31,
    2**53 + 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**30,
    10**400,
    -0.0,
    0.5,
    1e-320,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
]


def deep(rng: Random) -> Any:
    """Return a list or object nested so deep that a recursive reader gives up."""
    value: Any = rng.choice([1, "x", [], None])
    kind = rng.randrange(3)
    for _ in range(rng.choice([10, 90, 300])):
        value = [value] if kind == 0 or (kind == 2 and rng.random() < 0.5) else {"a": value}
    return value


def hostile(rng: Random) -> Any:
    """Draw a value that a file's writer did not have in mind."""
    kind = rng.randrange(12)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 7:
        return rng.choice(TEXTS)
    if kind == 7:
        return rng.choice(payloads())
    if kind == 8:
        return rng.choice([None, True, False, [], {}, [[]], [None], {"": None}, {"a": [1, {"b": None}]}])
    if kind == 9:
        return deep(rng)
    if kind == 10:
        return [rng.choice([0, 1, "x", None, float("nan")])] * rng.choice([1, 7, 5000])
    return {rng.choice([*TEXTS[:9], "type", "name", "__class__", "step"]): rng.choice(NUMBERS)}


Path_ = tuple[Any, ...]


def _places(tree: Any, path: Path_ = (), limit: int = 3000) -> list[Path_]:
    found, waiting = [path], [(path, tree)]
    while waiting and len(found) < limit:
        path, value = waiting.pop()
        items = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value[:64])
            if isinstance(value, list)
            else ()
        )
        for key, inner in items:
            found.append((*path, key))
            waiting.append(((*path, key), inner))
    return found


def _at(tree: Any, path: Path_) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def mutate_tree(tree: Any, rng: Random) -> Any:
    """Change one to four places of a JSON tree: other values and types, removals, renamed keys, wraps, splices."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        places = _places(tree)
        # a place near the root is as likely as one of thousands of leaves
        depth = rng.choice(sorted({len(place) for place in places}))
        path = rng.choice([place for place in places if len(place) == depth])
        if not path:
            tree = hostile(rng) if rng.random() < 0.3 else tree
            continue
        parent, key = _at(tree, path[:-1]), path[-1]
        action = rng.randrange(10)
        if action < 5:
            parent[key] = hostile(rng)
        elif action == 5:
            del parent[key]
        elif action == 6:
            parent[key] = [parent[key]] if rng.random() < 0.5 else {"a": parent[key]}
        elif action == 7:
            parent[key] = json.loads(json.dumps(_at(tree, rng.choice(places))))
        elif action == 8 and isinstance(parent, dict):
            parent[rng.choice([*TEXTS[:10], "x", f"{key} "])] = parent.pop(key)
        elif isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
            factor, more = rng.choice([-1, 0, 2, 0.5, 1000]), rng.choice([0, 1, -1])
            is_huge = (
                isinstance(parent[key], int) and abs(parent[key]) > 10**300
            )  # no float can be made of it
            parent[key] = parent[key] * (2 if is_huge and factor == 0.5 else factor) + more
        elif isinstance(parent[key], str):
            parent[key] = mutate_text(parent[key], rng)
        else:
            parent[key] = str(parent[key])[:1000]
    return tree


def mutate_text(text: str, rng: Random) -> str:
    """Cut, repeat, swap and poison a text."""
    for _ in range(rng.choice([1, 1, 2, 5])):
        start = rng.randrange(len(text) + 1)
        stop = min(len(text), start + rng.choice([0, 1, 1, 5, 40]))
        piece = rng.choice(
            [
                "",
                text[start:stop] * rng.choice([2, 50]),
                rng.choice(TEXTS[:28]),
                rng.choice(payloads()),
                rng.choice("\"'{}[](),:;#&*!|>%@`\\/\n\t\x00$^_=<>~-+."),
                str(rng.choice(NUMBERS)) if rng.random() < 0.9 else "1e999999999",
            ]
        )
        text = text[:start] + piece + text[stop:]
    return text


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """Flip, cut, repeat and replace bytes, or the whole file."""
    kind = rng.randrange(14)
    if kind == 0:
        return rng.choice(
            [b"", b"\x00" * 1000, b"\xef\xbb\xbf" + data, pickled(), b"[" * 200_000, b'{"a":' * 100_000]
        )
    if kind == 1:
        return data[: rng.randrange(len(data) + 1)]
    if kind == 2:
        return data + rng.choice([data, b"\x00", b"\n" * 9, b"}", pickled()])
    if kind == 3:
        return data.decode("latin-1").encode(rng.choice(["utf-16", "utf-8", "utf-32"]))
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 20])):
        place = rng.randrange(len(out) + 1)
        if kind < 9 and place < len(out):
            out[place] ^= 1 << rng.randrange(8)
        elif kind < 12:
            out[place : place + rng.choice([0, 1, 8])] = rng.choice(
                [
                    b"\xff",
                    b"\x00",
                    b"\n",
                    b'"',
                    b"9" * 5000,
                    b"NaN",
                    b"\xed\xa0\x80",
                    b"-",
                    struct.pack("<Q", 2**63),
                ]
            )
        else:
            del out[place : place + rng.choice([1, 4, 100])]
    return bytes(out)


def dump(tree: Any, rng: Random) -> bytes:
    """Write JSON the way a hostile or careless writer may: NaN, lone surrogates, repeated keys, odd spacing."""
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.7, indent=rng.choice([None, None, 1]))
    if isinstance(tree, dict) and tree and rng.random() < 0.05:
        key, value = next(iter(tree.items()))
        text = "{" + json.dumps(key) + ": " + json.dumps(value) + ", " + text[1:]
    return text.encode("utf-8", errors="surrogatepass")


def mutate_json(data: bytes, rng: Random, change: Callable[[Any, Random], Any] = mutate_tree) -> bytes:
    """Mutate the tree of a JSON file, or now and then its bytes."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):  # mutated before
        return mutate_bytes(data, rng)
    return mutate_bytes(data, rng) if rng.random() < 0.2 else dump(change(tree, rng), rng)


def mutate_lines(data: bytes, rng: Random) -> bytes:
    """Mutate some rows of a JSON-lines file: their trees, their order, their bytes."""
    lines = data.splitlines()
    for _ in range(rng.choice([1, 1, 2, 6])):
        lines = lines or [b""]
        place = rng.randrange(len(lines))
        kind = rng.randrange(8)
        if kind < 5:
            lines[place] = mutate_json(lines[place], rng).replace(b"\n", b" ")
        elif kind == 5:
            lines.insert(place, lines[rng.randrange(len(lines))])
        elif kind == 6 and len(lines) > 1:
            del lines[place]
        else:
            lines[place] = mutate_bytes(lines[place], rng)
        lines = lines or [b"{}"]
    text = b"\n".join(lines) + b"\n"
    return mutate_bytes(text, rng) if rng.random() < 0.08 else text
