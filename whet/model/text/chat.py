"""Conversations as texts to learn from: which characters of the rendered text the assistant wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet.model.text.tokenizer import Tokenizer
from whet.types import UserError

Chat = Sequence[Mapping[str, Any]]
"""Messages as chat templates take them (`Message.as_dict`)."""

OPENED = re.compile(r"<(\w+)>(\s*)\Z")
CLOSED = re.compile(r"</(\w+)>\s*\Z")
THOUGHT = re.compile(r"\s*(?:<(\w*think\w*)>)?(.*?)</(\w*think\w*)>(.*)", re.DOTALL)
"""Thinking inside a reply; the prompt may have opened it."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A rendered conversation and what the assistant wrote in it.

    Attributes:
        text: The whole text.
        turns: Index of each message that is learnt, ascending, with the (start, end) of its characters.
    """

    text: str
    turns: Mapping[int, tuple[tuple[int, int], ...]]

    def spans(self, turns: Sequence[int]) -> list[tuple[int, int]]:
        """Return the (start, end) of some turns, ascending."""
        return [span for turn in turns for span in self.turns[turn]]


def render_passages(
    tokenizer: Tokenizer,
    messages: Chat,
    *,
    values: Mapping[str, Any] | None = None,
    stop_ids: Sequence[int] = (),
) -> list[Passage]:
    """Render a conversation so that each assistant turn stands in the context in which it would have been written.

    A turn's context is the prompt that asks for it: all messages before it and the generation cue. Where the template
    leaves earlier messages alone, all turns stand in one text. Where it rewrites them (Qwen3 and gpt-oss drop the
    thinking of earlier turns), a turn that the full text shows in another context gets a text of its own.

    What the assistant wrote is the template's generation blocks, if it has any, else what follows the prompt in the
    text that ends with the turn, up to the control token that ends it; a template without one gets the tokenizer's EOS.

    Args:
        tokenizer: The tokenizer, with its chat template.
        messages: The conversation; it ends with the assistant's message.
        values: Further names that the template sees, such as tools.
        stop_ids: Further ids that end a turn.

    Returns:
        The texts, those of earlier turns first; each turn is in one of them.

    Raises:
        UserError: If the template fails, or does not begin a reply as it asks for it.
    """
    # What opens a conversation answers nothing: it is context.
    turns = [index for index, message in enumerate(messages) if index and message["role"] == "assistant"]
    passages: list[tuple[str, dict[int, tuple[tuple[int, int], ...]]]] = []
    for turn in reversed(turns):
        text, spans = _turn(tokenizer, messages[: turn + 1], values, stop_ids)
        end = spans[-1][1] if spans else 0
        for later, found in passages:
            if later.startswith(text[:end]):
                found[turn] = spans
                break
        else:
            passages.append((text, {turn: spans}))
    return [
        Passage(text, {turn: found[turn] for turn in sorted(found)}) for text, found in reversed(passages)
    ]


def in_user_turn(messages: Chat) -> list[dict[str, Any]]:
    """Move leading system messages to the start of the first user message, for templates without a system role."""
    rest = [dict(message) for message in messages]
    texts: list[str] = []
    while rest and rest[0]["role"] == "system":
        texts.append(_text_of(rest.pop(0)["content"]))
    if not texts:
        return rest
    system = "\n\n".join(texts)
    first = next((message for message in rest if message["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": system}, *rest]
    content = first["content"]
    if isinstance(content, str):
        first["content"] = f"{system}\n\n{content}"
    else:
        first["content"] = [{"type": "text", "text": f"{system}\n\n"}, *content]
    return rest


def _text_of(content: Any) -> str:
    """Return the text of a message's content, which may come in parts."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or ())


def _turn(
    tokenizer: Tokenizer, messages: Chat, values: Mapping[str, Any] | None, stop_ids: Sequence[int]
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Render a conversation up to its last message, the assistant's; return what it wrote there, too."""
    before = messages[:-1]
    if messages[0]["role"] == "system" and tokenizer.system_role == "refused":
        messages, before = in_user_turn(messages), in_user_turn(before)
    text, blocks = tokenizer.render_turn(messages, cue=False, values=values)
    if blocks is not None:
        _, earlier = tokenizer.render_turn(before, cue=False, values=values)
        return text, tuple(blocks[len(earlier or ()) :])
    prompt, _ = tokenizer.render_turn(before, cue=True, values=values)
    message, template = messages[-1], tokenizer.chat_template or ""
    stops = {tokenizer.token_text(index) for index in {*tokenizer.stop_ids, *stop_ids}}
    begins = text.startswith(prompt)
    start = len(prompt) if begins else len(_before_tag(prompt, text))
    content, rest = str(message.get("content") or ""), text[start:]
    end = _end(rest, content, tokenizer.ends, stops)
    body = rest[: end[0]] if end else _without_break(rest, content)
    written = (
        body if begins and not _is_dropped(message, rest, template) else _own_words(prompt, message, body)
    )
    eos = "" if tokenizer.eos_id is None else tokenizer.token_text(tokenizer.eos_id)
    written += rest[slice(*end)] if end else eos
    said = _answer(content).strip()
    if said not in written and not message.get("tool_calls"):
        raise UserError(f"chat template leaves out the reply {said[:40]!r}; fix the template")
    whole = prompt + written
    return text if text.startswith(whole) else whole, ((len(prompt), len(whole)),)


def _before_tag(prompt: str, text: str) -> str:
    """Return the prompt without a thinking tag that it ends with.

    Raises:
        UserError: If the reply's text begins in yet another way.
    """
    tag = OPENED.search(prompt) or CLOSED.search(prompt)
    before = prompt[: tag.start()] if tag else prompt
    if tag and tag[0].startswith("</"):  # <think></think>: both are the prompt's
        opened = before.rfind(f"<{tag[1]}>")
        before = before[:opened] if opened >= 0 else before
    if not text.startswith(before) or tag is None:
        raise UserError(
            "chat template is not prefix-preserving: a reply does not begin with the prompt that asks for it, so that "
            "training and sampling would differ; fix the template"
        )
    return before


def _without_break(rest: str, content: str) -> str:
    """Return what a template writes of a reply, without the white space that ends the turn."""
    place = rest.rfind(content)
    return rest[: place + len(content)] if content and place >= 0 else rest.rstrip()


def _end(text: str, content: str, ends: tuple[str, ...], stops: set[str]) -> tuple[int, int] | None:
    """Find the control token that ends the last turn of a text; None if white space at most follows the reply.

    Among several at the end it is the first at which generation stops (Phi-3 writes <|end|>, then <|endoftext|> after
    the whole conversation), else the last.
    """
    found: list[tuple[int, int]] = []
    rest = text.rstrip()
    while rest.endswith(ends):
        last = next(end for end in ends if rest.endswith(end))
        found.append((len(rest) - len(last), len(rest)))
        rest = rest[: -len(last)].rstrip()
    stopping = [place for place in found if text[slice(*place)] in stops]
    if stopping:
        return stopping[-1]
    is_said = bool(content.strip()) and text.rstrip().endswith(content.rstrip())
    return found[0] if found and not is_said else None


def _is_dropped(message: Mapping[str, Any], written: str, template: str) -> bool:
    """Say whether a template that knows of thinking leaves this message's out (DeepSeek-R1's does, in every turn)."""
    thinking = str(message.get("reasoning_content") or "").strip()
    if thinking:
        return "</think>" in template and thinking not in written
    inline = THOUGHT.match(str(message.get("content") or ""))
    return inline is not None and inline[2].strip() not in written


def _answer(content: str) -> str:
    """Return a reply without the thinking inside it."""
    inline = THOUGHT.match(content)
    return inline[4] if inline else content


def _own_words(prompt: str, message: Mapping[str, Any], body: str) -> str:
    """Return what the assistant writes after a prompt, where the template does not show it: its thinking, too.

    Args:
        prompt: The prompt.
        message: The reply.
        body: What the template writes of it.
    """
    content, thinking = str(message.get("content") or ""), str(message.get("reasoning_content") or "")
    opened, inline = OPENED.search(prompt), THOUGHT.match(content)
    tag = opened[1] if opened else "think"
    if CLOSED.search(prompt):  # asked not to think
        return _answer(body).lstrip("\n")
    if opened and body.startswith(f"<{tag}>") and not _is_dropped(message, body, "</think>"):
        return body[len(tag) + 2 :].removeprefix(opened[2])  # what the prompt has opened is not opened again
    if inline and not message.get("tool_calls"):
        return content[inline.start(2) :].removeprefix(opened[2]) if opened else content
    opening = "" if opened else f"<{tag}>\n"
    thinking = thinking or (inline[2] if inline else "")
    closing = f"\n</{tag}>\n\n"
    return opening + thinking.strip("\n") + closing + _answer(body).lstrip("\n")
