"""What Ollama makes of a Modelfile: its parser's rules, and the part of Go's text/template that ours use."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

COMMANDS = ("FROM", "TEMPLATE", "SYSTEM", "PARAMETER")
ACTION = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)


def read_modelfile(text: str) -> list[tuple[str, str]]:
    """Read a Modelfile as Ollama's parser/parser.go does: no escapes, and a value that begins with quotes ends at the
    end of a line after its closing ones.

    Returns:
        Name and value of each command, a parameter under its own name.

    Raises:
        ValueError: If a command is not one of ours, or a value does not end.
    """
    found: list[tuple[str, str]] = []
    rest = text
    while rest := rest.lstrip():
        name, _, rest = rest.partition(" ")
        if name not in COMMANDS:
            raise ValueError(f"command {name[:40]!r}: expected one of {', '.join(COMMANDS)}")
        if name == "PARAMETER":
            name, _, rest = rest.partition(" ")
        places = (
            at
            for at, letter in enumerate(rest)
            if letter == "\n" and _unquoted(rest[:at].strip()) is not None
        )
        if (end := next(places, None)) is None:
            raise ValueError(f"the value of {name[:40]} does not end")
        found.append((name, _unquoted(rest[:end].strip()) or ""))
        rest = rest[end:]
    return found


def _unquoted(value: str) -> str | None:
    """Return a value without its quotes; None if they are still open."""
    for quotes in ('"""', '"'):
        if value.startswith(quotes):
            ends = value.endswith(quotes) and len(value) >= 2 * len(quotes)
            return value[len(quotes) : -len(quotes)] if ends else None
    return value


def ollama_writes(template: str, messages: Sequence[Mapping[str, str]], system: str = "") -> str:
    """Write a conversation as Ollama does: `.System` is the text of all system messages, the Modelfile's if there is
    none; a template without `.Messages` has the last question as `.Prompt`.

    Args:
        template: The Modelfile's.
        messages: Role and content.
        system: The Modelfile's system message.
    """
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    told = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    data = {"System": told, "Messages": messages, "Prompt": messages[-1]["content"]}
    pieces = ACTION.split(template)  # text, action, text, ...
    out: list[str] = []
    end = _run(pieces, 0, data, {"": data}, out)
    assert end == len(pieces), "an end too many"
    return "".join(out)


def _run(pieces: list[str], at: int, dot: Any, names: dict[str, Any], out: list[str] | None) -> int:
    """Run to the end, else or end of a block; `out` is None where nothing is written. Return where it stopped."""
    while at < len(pieces):
        if at % 2 == 0:
            if out is not None:
                out.append(pieces[at])
            at += 1
            continue
        words = pieces[at].strip()
        if words in ("else", "end"):
            return at
        if words.startswith("if "):
            is_true = out is not None and bool(_value(words[3:], dot, names))
            at = _run(pieces, at + 1, dot, names, out if is_true else None)
            if pieces[at].strip() == "else":
                at = _run(pieces, at + 1, dot, names, None if is_true or out is None else out)
        elif words == "range .Messages":
            start = at + 1
            at = _run(pieces, start, dot, names, None)
            for message in dot["Messages"] if out is not None else ():
                _run(pieces, start, {"Role": message["role"], "Content": message["content"]}, names, out)
        elif found := re.fullmatch(r"\$(\w+) :?= (true|false)", words):
            if out is not None:
                names[found[1]] = found[2] == "true"
        elif out is not None:
            out.append(str(_value(words, dot, names)))
        at += 1
    return at


def _value(words: str, dot: Any, names: Mapping[str, Any]) -> Any:
    if words.startswith('"'):
        return json.loads(words)
    if words.startswith("not "):
        return not _value(words[4:], dot, names)
    if found := re.fullmatch(r'eq (\S+) ("\w+")', words):
        return _value(found[1], dot, names) == json.loads(found[2])
    if words.startswith("$."):
        return names[""][words[2:]]
    if words.startswith("$"):
        return names[words[1:]]
    assert re.fullmatch(r"\.\w+", words), words
    return dot[words[1:]]
