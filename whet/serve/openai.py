"""What a client of `whet serve` asks for: JSON bodies of OpenAI's two completion endpoints, read strictly."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whet.generate.policy import Policy
from whet.generate.rows import Completion, Token
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.serve.stream import ResponseText, StopText, TokenText, silent_ids
from whet.types import UserError

MAX_CHOICES = 128
MAX_PROMPTS = 256
MAX_STOPS = 16
MAX_TOP = 20
MAX_MESSAGE = 400
DEFAULT_NEW_TOKENS = 16
"""Of /v1/completions, as OpenAI has it; a chat may go on to the end of the context."""

COMMON = (
    "model n seed stop stream stream_options temperature top_p top_k min_p max_tokens logprobs user metadata"
)
IGNORED = (
    "store service_tier safety_identifier prompt_cache_key parallel_tool_calls reasoning_effort verbosity"
)
"""Known to OpenAI, and without a meaning here."""
CHAT_FIELDS = frozenset(f"{COMMON} {IGNORED} messages max_completion_tokens top_logprobs".split())
TEXT_FIELDS = frozenset(f"{COMMON} prompt echo".split())
UNSUPPORTED: Mapping[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "audio": None,
    "prediction": None,
    "web_search_options": None,
    "suffix": "",
    "best_of": 1,
}
"""Fields of OpenAI's that are not served, with the value that asks for nothing."""


class ApiError(Exception):
    """A refusal, in OpenAI's shape.

    Args:
        status: HTTP status.
        message: One line.
        param: Field that is to blame.
        code: Machine-readable reason.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return the error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self)[:MAX_MESSAGE],
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A request to generate, checked.

    Attributes:
        messages: The conversation; empty for plain completions.
        prompts: Texts or token ids to be continued; empty for chats.
        params: How tokens are drawn.
        num_choices: Completions per prompt.
        seed: Seed of the first choice; the others' are made of it.
        stops: Texts that end a completion and are not given back.
        num_top: Give log-probabilities, with this many alternatives; None for none.
        stream: Whether tokens are sent as they come.
        include_usage: Whether a stream ends with the token counts.
        echo: Whether the prompt is given back, with its log-probabilities where those are asked for.
        generate: Whether there is anything to draw (an echo may be asked for alone).
    """

    messages: tuple[dict[str, str], ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    params: SamplingParams
    num_choices: int
    seed: int
    stops: tuple[str, ...]
    num_top: int | None
    stream: bool
    include_usage: bool
    echo: bool = False
    generate: bool = True


def parse_json(body: bytes) -> dict[str, Any]:
    """Read a JSON object; numbers that JSON does not have are refused."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(body, parse_constant=refuse)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body's text holds a lone surrogate, half a character") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}; expected an object")
    return value


def parse_chat(body: Mapping[str, Any], context: int) -> Asked:
    """Read the body of /v1/chat/completions.

    Args:
        body: The JSON object.
        context: Longest completion where none is asked for, in tokens.

    Raises:
        ApiError: What is wrong, with the field to blame.
    """
    body = _known(body, CHAT_FIELDS)
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    wants_logprobs = _flag(body, "logprobs")
    num_top = _number(body, "top_logprobs", int, 0, 0, MAX_TOP)
    if num_top and not wants_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs = true", param="top_logprobs")
    return Asked(
        messages=_messages(body.get("messages")),
        params=_params(body, _number(body, name, int, context, 1)),
        num_top=num_top if wants_logprobs else None,
        **_shared(body),
    )


def parse_text(body: Mapping[str, Any]) -> Asked:
    """Read the body of /v1/completions.

    Args:
        body: The JSON object.

    Raises:
        ApiError: What is wrong, with the field to blame.
    """
    body = _known(body, TEXT_FIELDS)
    echo = _flag(body, "echo")
    max_new_tokens = _number(body, "max_tokens", int, DEFAULT_NEW_TOKENS, 0 if echo else 1)
    return Asked(
        prompts=_prompts(body.get("prompt")),
        params=_params(body, max(1, max_new_tokens)),
        num_top=_number(body, "logprobs", int, 0, 0, MAX_TOP) if "logprobs" in body else None,
        echo=echo,
        generate=max_new_tokens > 0,
        **_shared(body),
    )


def _known(body: Mapping[str, Any], fields: frozenset[str]) -> dict[str, Any]:
    """Refuse unknown fields as OpenAI does, and those that would change the answer but are not served."""
    for name, value in body.items():
        if name in UNSUPPORTED:
            if value is not None and value != UNSUPPORTED[name] and value:
                raise ApiError(400, f"{name} is not supported by this server: leave it out", param=name)
        elif name not in fields:
            raise ApiError(400, f"Unrecognized request argument supplied: {name[:80]}", param=name[:80])
    return {name: value for name, value in body.items() if value is not None and name not in UNSUPPORTED}


def _shared(body: Mapping[str, Any]) -> dict[str, Any]:
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise _expected("stream_options", "an object", options)
    stops = body.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if (
        not isinstance(stops, list)
        or not all(isinstance(stop, str) for stop in stops)
        or len(stops) > MAX_STOPS
    ):
        raise _expected("stop", f"a text or at most {MAX_STOPS} texts", stops)
    return {
        "num_choices": _number(body, "n", int, 1, 1, MAX_CHOICES),
        "seed": _number(body, "seed", int, secrets.randbits(62), -(2**63), 2**63 - 1),
        "stops": tuple(stop for stop in stops if stop),
        "stream": _flag(body, "stream"),
        "include_usage": _flag(options, "include_usage"),
    }


def _params(body: Mapping[str, Any], max_new_tokens: int) -> SamplingParams:
    try:
        return SamplingParams(
            temperature=_number(body, "temperature", float, 1.0),
            top_p=_number(body, "top_p", float, 1.0),
            top_k=max(0, _number(body, "top_k", int, 0)),  # -1 is how vLLM says 'all'
            min_p=_number(body, "min_p", float, 0.0),
            max_new_tokens=max_new_tokens,
        )
    except ValueError as error:
        raise ApiError(400, str(error), param=str(error).split(" ")[0]) from None


def _number(
    body: Mapping[str, Any],
    name: str,
    kind: type[int] | type[float],
    default: Any,
    low: float = float("-inf"),
    high: float = float("inf"),
) -> Any:
    value = body.get(name, default)
    kinds = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise _expected(name, "a whole number" if kind is int else "a number", value)
    if not low <= value <= high:
        bounds = f"{low} or more" if high == float("inf") else f"{low} to {high}"
        raise ApiError(400, f"{name} = {value}: expected {bounds}", param=name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise _expected(name, "true or false", value)
    return value


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise _expected("messages", "a list with at least one message", value)
    messages = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise _expected(where, "an object with role and content", message)
        role = "system" if message.get("role") == "developer" else message.get("role")
        if role not in ("system", "user", "assistant"):
            raise _expected(f"{where}.role", "system, developer, user or assistant", role)
        messages.append({"role": role, "content": _content(message.get("content"), f"{where}.content")})
    if messages[-1]["role"] != "user":
        raise _expected(
            f"messages[{len(messages) - 1}].role", "user for the last message", messages[-1]["role"]
        )
    return tuple(messages)


def _content(value: Any, where: str) -> str:
    """Read a message's text: a text, or OpenAI's list of parts, of which only text is served."""
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, dict) and part.get("type") == "text"]
        texts = [text for text in parts if isinstance(text, str)]
        value = "".join(texts) if len(texts) == len(value) else value
    if not isinstance(value, str):
        raise _expected(where, "text", value)
    return value


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Read a prompt: a text, token ids, or a list of either."""
    rows = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_PROMPTS:
        raise _expected("prompt", f"a text, token ids, or a list of 1 to {MAX_PROMPTS} of either", value)
    for index, row in enumerate(rows):
        if not isinstance(row, str) and not _is_ids(row):
            raise _expected(f"prompt[{index}]", "a text or a list of token ids", row)
    return tuple(row if isinstance(row, str) else tuple(row) for row in rows)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(index) is int for index in value)


def _expected(name: str, what: str, got: Any) -> ApiError:
    shown = json.dumps(got)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    return ApiError(400, f"{name}: expected {what}, got {shown}", param=name)


def refusal(error: UserError) -> ApiError:
    """Turn a mistake that the engine or the tokenizer found into a refusal."""
    text = str(error)
    too_long = "tokens, the" in text
    return ApiError(400, text, code="context_length_exceeded" if too_long else None)


def choice_seeds(seed: int, count: int) -> tuple[int, ...]:
    """Return the seeds of a prompt's choices: the first is the seed itself, the others are made of it."""
    return (seed, *(sequence_seed("choice", seed, index) for index in range(1, count)))


# What `whet serve` answers: choices that grow token by token, and their JSON in OpenAI's two formats.


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
