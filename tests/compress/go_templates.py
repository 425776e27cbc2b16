"""The part of Go's text/template that our Modelfiles use, with what Ollama gives to it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

ACTION = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)


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
