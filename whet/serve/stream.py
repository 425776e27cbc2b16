"""Streaming text of a completion: whole characters, cut at stop strings, thinking separate from the answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whet.generate.policy import Policy
from whet.model.text.template import BASE_TEMPLATE, PLAIN_TEMPLATE
from whet.model.text.tokenizer import Tokenizer
from whet.model.vision.ids import is_image
from whet.schema import ResponseSchema
from whet.types import UserError

BROKEN = "\ufffd"
HELD_TOKENS = 4
"""A character has at most four bytes, and a token at least one."""
LONG_WINDOW = 16


def has_turns(policy: Policy) -> bool:
    """Say whether a policy's template supports conversations; the templates for base models have one question."""
    return policy.tokenizer.chat_template not in (BASE_TEMPLATE, PLAIN_TEMPLATE)


def chat_prompt(policy: Policy, messages: Sequence[Mapping[str, Any]], **values: Any) -> tuple[int, ...]:
    """Return the prompt tokens of a conversation, with the policy's template, opening tag and instruction.

    Args:
        policy: The policy.
        messages: Maps with 'role' (system, user or assistant) and 'content', a text or a list of parts with images; a
            system message replaces the policy's own instruction.
        values: Further values for the template.

    Raises:
        UserError: If the template fails, or drops a user or system message; or an image cannot be read.
    """
    messages = policy.schema.messages(messages, has_system=policy.system_prompt)
    if policy.tokenizer.chat_template == PLAIN_TEMPLATE and len(messages) > 1:
        raise UserError("this model's prompt is the bare question: send one user message and no other")
    text = policy.chat_text(messages, **values)
    for index, message in enumerate(messages):
        content = message["content"]
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        if message["role"] != "assistant" and any(part.strip() not in text for part in parts):
            raise UserError(f"the model's chat template drops message {index} ({message['role']})")
    return policy.chat_ids(messages, **values)


def unread_note(tokenizer: Tokenizer, texts: Iterable[str]) -> str:
    """Say which characters of a prompt the tokenizer has no token for: the model cannot see them; '' for none."""
    lacking = [
        character
        for character in dict.fromkeys("".join(texts))
        if tokenizer.unk_id in (ids := tokenizer.encode(character)) or not (ids or character.isspace())
    ]
    if not lacking:
        return ""
    return f"this model's tokenizer has no token for {''.join(lacking)[:40]!r}: the model cannot read these characters"


def silent_ids(policy: Policy) -> frozenset[int]:
    """Return the tokens that end a completion without being text: all stop ids except the schema's closing tags."""
    tags = (*policy.schema.tags, *policy.schema.tool_tags)
    return frozenset(i for i in policy.stop_ids if policy.tokenizer.token_text(i) not in tags)


class TokenText:
    """Decodes tokens one by one; holds back the bytes of an unfinished character.

    The concatenated pieces equal `Tokenizer.decode_completion` of all tokens.

    Args:
        tokenizer: The tokenizer.
        prompt_ids: The preceding tokens.
        silent_ids: Tokens without text, see `silent_ids`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        silent_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer, self._silent_ids = tokenizer, silent_ids
        # An image may stand last, where the template adds nothing: its ids are no tokens of the tokenizer.
        self._before = [token for token in prompt_ids[-1:] if not is_image(token)]
        self._window: list[int] = []
        self._shown = 0

    def push(self, index: int) -> str:
        """Add a token and return the text that is now final."""
        if index in self._silent_ids:
            return ""
        self._window.append(index)
        text = self._spell(self._window)
        certain = text
        for _ in range(HELD_TOKENS - 1):  # the bytes of an unfinished character decode to up to three U+FFFD
            certain = certain.removesuffix(BROKEN)
        piece = certain[self._shown :]
        self._shown += len(piece)
        if certain == text:
            self._drop(len(self._window), len(text))
        elif (
            len(self._window) > LONG_WINDOW
        ):  # garbage: release tokens whose text does not depend on the others
            for count in range(len(self._window) - HELD_TOKENS, 0, -1):
                head, tail = self._spell(self._window[:count]), self._spell(self._window[count:])
                if head + tail == text and len(head) <= self._shown:
                    self._drop(count, len(head))
                    break
        return piece

    def flush(self) -> str:
        """Return the held-back text; unfinished characters are U+FFFD."""
        piece = self._spell(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return piece

    def _spell(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode_completion(self._before, ids)

    def _drop(self, count: int, num_chars: int) -> None:
        self._before = self._window[count - 1 : count]
        del self._window[:count]
        self._shown -= num_chars


def held(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the start of one of the marks."""
    for count in range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1):
        if any(mark.startswith(text[-count:]) for mark in marks):
            return count
    return 0


class StopText:
    """Passes text up to the first stop string, and never a part of one.

    Args:
        stops: Non-empty texts.

    Attributes:
        has_ended: Whether one was found.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._kept = ""
        self.has_ended = False

    def push(self, text: str) -> str:
        """Add text and return what is certainly before any stop string."""
        if self.has_ended or not self._stops:
            return "" if self.has_ended else text
        text = self._kept + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.has_ended = bool(found)
        cut = min(found) if found else len(text) - held(text, self._stops)
        self._kept = "" if found else text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the held-back text, since no stop string followed."""
        kept, self._kept = self._kept, ""
        return kept


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a response: thinking, or answer."""

    thinking: str = ""
    answer: str = ""


class ResponseText:
    """Splits a streaming response into thinking and answer; the tags themselves are dropped.

    Text outside both blocks belongs to the answer; white space around an answer is dropped. A thinking block
    that never closes leaves the answer empty.

    Args:
        schema: The tags.
    """

    def __init__(self, schema: ResponseSchema) -> None:
        self._schema = schema
        self.is_thinking = schema.opening_in_prompt
        self._may_think = schema.has_thinking and not schema.opening_in_prompt
        self._kept = ""
        self._space = ""
        self._answered = False

    def push(self, text: str, *, last: bool = False) -> Piece:
        """Add text and return what is now final.

        Args:
            text: The next text.
            last: Whether it is the last.
        """
        self._kept += text
        thinking, answer = "", ""
        while True:
            marks = self._marks()
            found = [(place, mark) for mark in marks if (place := self._kept.find(mark)) >= 0]
            place, mark = min(found) if found else (len(self._kept), "")
            if not found and not last:
                place -= held(self._kept, marks)
            if self.is_thinking:
                thinking += self._kept[:place]
            else:
                answer += self._trim(self._kept[:place])
            self._kept = self._kept[place + len(mark) :]
            if not mark:
                return Piece(thinking, answer)
            self._pass(mark)

    def _marks(self) -> tuple[str, ...]:
        schema = self._schema
        if self.is_thinking:
            return (schema.think_close,)
        opening = (schema.think_open,) if self._may_think else ()
        return (
            (*opening, schema.answer_open, schema.answer_close) if schema.answer_place == "tag" else opening
        )

    def _pass(self, mark: str) -> None:
        self.is_thinking = mark == self._schema.think_open
        self._may_think = self._may_think and not self.is_thinking
        if mark == self._schema.answer_open and not self._answered:
            self._space = ""

    def _trim(self, text: str) -> str:
        """Drop white space before the answer, and hold back trailing white space until more text follows."""
        text = self._space + text
        if not self._answered:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        self._answered = self._answered or bool(body)
        return body
