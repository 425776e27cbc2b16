"""What `whet serve` answers: choices that grow token by token, and their JSON in OpenAI's two formats."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from whet.generate.policy import Policy
from whet.generate.rows import Completion, Token
from whet.generate.stream import ResponseText, StopText, TokenText, silent_ids
from whet.inspect.serve_ask import Asked


@dataclass(slots=True)
class Delta:
    """What one event added to a choice: text, thinking apart from it, and the tokens with log-probabilities."""

    text: str = ""
    thinking: str = ""
    tokens: list[tuple[Token, int]] = field(default_factory=list)
    """Tokens, and where in the text each begins."""
    finish_reason: str | None = None


class Choice:
    """One completion as a client sees it.

    Args:
        policy: Whose tokens they are.
        prompt_ids: What stands before.
        asked: What the client wants.
        splits: Whether thinking goes apart.
        offset: Characters of the prompt that is given back before it.
    """

    def __init__(
        self, policy: Policy, prompt_ids: Sequence[int], asked: Asked, *, splits: bool, offset: int = 0
    ) -> None:
        self._tokens = TokenText(policy.tokenizer, prompt_ids, silent_ids=silent_ids(policy))
        self._stops = StopText(asked.stops)
        self._response = ResponseText(policy.schema) if splits else None
        self._noted = asked.num_top is not None
        self._offset = offset
        self.num_tokens = 0
        self.num_thinking = 0
        self.finish_reason: str | None = None

    def push(self, event: Token | Completion) -> Delta:
        """Add a token, or the end."""
        if isinstance(event, Completion):
            self.finish_reason = event.finish_reason
            piece = self._stops.push(self._tokens.flush()) + self._stops.flush()
            return self._split(piece, Delta(finish_reason=event.finish_reason))
        self.num_tokens += 1
        self.num_thinking += self._response is not None and self._response.is_thinking
        delta = Delta(tokens=[(event, self._offset)] if self._noted else [])
        piece = self._tokens.push(event.id)
        self._offset += len(piece)
        return self._split(self._stops.push(piece), delta)

    def _split(self, text: str, delta: Delta) -> Delta:
        if self._response is None:
            delta.text = text
        else:
            piece = self._response.push(text, last=delta.finish_reason is not None)
            delta.text, delta.thinking = piece.answer, piece.thinking
        return delta


def echo_of(policy: Policy, text: str, scores: Sequence[Token]) -> Delta:
    """Return the prompt as a client gets it back: its text, and the log-probabilities of its tokens.

    Args:
        policy: Whose tokens they are.
        text: The prompt.
        scores: Its scored tokens; none where they were not asked for.
    """
    tokenizer = policy.tokenizer
    spelled, offset = TokenText(tokenizer), 0
    tokens: list[tuple[Token, int]] = []
    for token in scores:
        tokens.append((token, offset))
        is_opening = len(tokens) == 1 and token.id == tokenizer.bos_id
        if not is_opening or text.startswith(
            tokenizer.token_text(token.id)
        ):  # else it was put before the text
            offset += len(spelled.push(token.id))
    return Delta(text=text, tokens=tokens)


def merged(deltas: Sequence[Delta]) -> Delta:
    """Put what came one after the other together."""
    return Delta(
        text="".join(delta.text for delta in deltas),
        thinking="".join(delta.thinking for delta in deltas),
        tokens=[row for delta in deltas for row in delta.tokens],
        finish_reason=deltas[-1].finish_reason if deltas else None,
    )


class Reply:
    """Writes the JSON of one response.

    Args:
        policy: Whose tokens they are.
        model: Name that the model is served by.
        asked: What the client wants.
        is_chat: Which of the two formats.
        splits: Whether thinking goes apart.
    """

    def __init__(self, policy: Policy, model: str, asked: Asked, *, is_chat: bool, splits: bool) -> None:
        self._policy, self._asked, self._is_chat, self._splits = policy, asked, is_chat, splits
        kind = (
            ("chat.completion.chunk" if asked.stream else "chat.completion") if is_chat else "text_completion"
        )
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[tuple[int, Delta]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a response in one piece."""
        rows = []
        for index, delta in choices:
            if not self._is_chat:
                rows.append(self._text_row(index, delta))
                continue
            message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
            if self._splits:
                message["reasoning_content"] = delta.thinking
            rows.append(self._row(index, delta) | {"message": message})
        return self._head | {"choices": rows, "usage": usage}

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the chunk that opens a choice of a chat."""
        if not self._is_chat:
            return None
        return self._chunk([self._row(index, Delta()) | {"delta": {"role": "assistant", "content": ""}}])

    def next(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """Return the chunk for an event; None where it brought nothing to be seen."""
        if not (delta.text or delta.thinking or delta.tokens or delta.finish_reason):
            return None
        if not self._is_chat:
            return self._chunk([self._text_row(index, delta)])
        said = {"reasoning_content": delta.thinking} if delta.thinking else {}
        said |= {"content": delta.text} if delta.text else {}
        return self._chunk([self._row(index, delta) | {"delta": said}])

    def last(self, usage: dict[str, Any]) -> dict[str, Any] | None:
        """Return the chunk with the token counts, where they are wanted."""
        return self._head | {"choices": [], "usage": usage} if self._asked.include_usage else None

    def _chunk(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"choices": rows} | ({"usage": None} if self._asked.include_usage else {})

    def _row(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = None
        if self._asked.num_top is not None and delta.tokens:
            logprobs = {"content": [self._entry(token) for token, _ in delta.tokens], "refusal": None}
        return {"index": index, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def _text_row(self, index: int, delta: Delta) -> dict[str, Any]:
        row = {"index": index, "text": delta.text, "logprobs": None, "finish_reason": delta.finish_reason}
        if self._asked.num_top is not None and delta.tokens:
            tokens = [token for token, _ in delta.tokens]
            row["logprobs"] = {
                "tokens": [self._spell(token.id) for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": [self._tops(token) for token in tokens],
                "text_offset": [offset for _, offset in delta.tokens],
            }
        return row

    def _tops(self, token: Token) -> dict[str, float] | None:
        """Return text -> log-probability, the token's own besides; of tokens that spell the same, the likeliest."""
        if token.logprob is None:
            return None
        pairs = reversed((*token.top, (token.id, token.logprob)))
        return {self._spell(index): logprob for index, logprob in pairs}

    def _entry(self, token: Token) -> dict[str, Any]:
        tops = [self._scored(index, logprob) for index, logprob in token.top]
        return self._scored(token.id, token.logprob) | {"top_logprobs": tops}

    def _scored(self, index: int, logprob: float | None) -> dict[str, Any]:
        text = self._spell(index)
        return {
            "token": text,
            "logprob": logprob,
            "bytes": None
            if "\ufffd" in text
            else list(text.encode()),  # part of a character has no text of its own
        }

    def _spell(self, index: int) -> str:
        return self._policy.tokenizer.token_text(index)


def usage_of(num_prompt: int, choices: Sequence[Choice], *, splits: bool) -> dict[str, Any]:
    """Count tokens: those of every prompt once, and all that were drawn."""
    drawn = sum(choice.num_tokens for choice in choices)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": drawn,
        "total_tokens": num_prompt + drawn,
    }
    if splits:
        thinking = sum(choice.num_thinking for choice in choices)
        usage["completion_tokens_details"] = {"reasoning_tokens": thinking}
    return usage
