"""What a client of `whet serve` asks for: JSON bodies of OpenAI's two completion endpoints, and of those that bring new
weights, read strictly."""

from __future__ import annotations

import json
import re
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from whet.generate.policy import Policy
from whet.generate.rows import Completion, Ends, Token
from whet.generate.sampling import LEAST_TEMPERATURE, SamplingParams, sequence_seed
from whet.model.text.tokenizer import CUES, RESERVED, THOUGHTS
from whet.model.vision.asking import images_in
from whet.serve.stream import ResponseText, StopText, TokenText, silent_ids
from whet.types import UserError

MAX_CHOICES = 128
MAX_PROMPTS = 256
OPTION = re.compile(r" \(?--[a-z]")
MAX_STOPS = 16
MAX_STOP_IDS = 256
MAX_VALUE = 200
"""Characters of a value for the chat template."""
MAX_IMAGES = 16
"""Of a conversation."""
MAX_TOP = 20
MAX_MESSAGE = 400
DEFAULT_NEW_TOKENS = 16
"""Of /v1/completions, as OpenAI has it; a chat may go on to the end of the context."""

IGNORED = frozenset({"model", "user", "metadata"})
"""Without a meaning here; the model's name has been looked at before."""
IGNORED_IN_CHATS = IGNORED | {
    "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
}  # fmt: skip
UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": (),
    "tools": (),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "functions": (),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "suffix": (),
    "best_of": (1,),
    # vLLM's and SGLang's, which their clients send along.
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "bad_words": (),
    "logits_processors": (),
    "priority": (0,),
}
"""Unsupported fields, and their values that change nothing; empty values are always accepted."""
UNSUPPORTED_IN_CHATS: Mapping[str, Sequence[Any]] = UNSUPPORTED | {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "echo": (False,),
    "documents": (),
    "return_token_ids": (False,),
}
UNSUPPORTED_IN_TEXTS: Mapping[str, Sequence[Any]] = UNSUPPORTED | {"add_special_tokens": (True,)}
EMPTY = (None, "", [], {})
SUPPORTED_IN_MESSAGES = frozenset({"role", "content", "name", *THOUGHTS})
SUPPORTED_IN_PARTS = frozenset({"type", "text", "image_url"})
OWN_NAMES = frozenset({*RESERVED, *CUES, "chat_template", "tools", "documents", "self", "policy"})
"""Names that templates see, or that mean something else on the way to them: no client's to set."""
LEAST_LOGPROB = -9999.0
"""JSON has no infinity: OpenAI's number for what cannot be."""


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
        seeds: Seeds of all choices, in place of those that are made of `seed`.
        returns_ids: Give back the drawn tokens' ids, with the log-probabilities they were drawn with.
        stop_ids: Ids that the client takes completions to end at; None for whatever is here.
        ends: Where completions end otherwise than the policy's do.
        skips_special: Whether control tokens have no text, as programs have it that look at no tags.
        template_values: Further values for the chat template: by the field of the request that gives them, and once
            they are checked (`check_read`) by their names there.
        counts_usage: Whether every chunk of a stream has the token counts so far.
    """

    messages: tuple[dict[str, Any], ...] = ()
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
    seeds: tuple[int, ...] | None = None
    returns_ids: bool = False
    stop_ids: frozenset[int] | None = None
    ends: Ends | None = None
    skips_special: bool = False
    template_values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    counts_usage: bool = False


MAX_VALUES = 2**18
"""Commas of a body: many times what fits into any context."""


def parse_json(body: bytes) -> dict[str, Any]:
    """Read a JSON object; numbers that JSON does not have are refused."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    if body.count(b",") > MAX_VALUES:  # reading them would stop all other threads for a second
        raise ApiError(400, f"the body has more than {MAX_VALUES:,} values or commas")
    try:
        value = json.loads(body, parse_constant=refuse)
        if any(mark in body for mark in (b"\\ud", b"\\uD", b"\xed")):  # how halves of characters are written
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body's text holds a lone surrogate, half a character") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}; expected an object")
    return value


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str


class _ImageUrl(BaseModel):
    url: str = Field(min_length=1)
    detail: Literal["auto", "low", "high"] = "auto"
    """Has no effect: the model's own limits of size hold."""


class _ImagePart(BaseModel):
    type: Literal["image_url"]
    image_url: _ImageUrl


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[_TextPart | _ImagePart, Field(discriminator="type")]]
    name: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None
    reasoning: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return a message as templates know it: its content is a text, or its parts where some are images."""
        role = "system" if self.role == "developer" else self.role
        more = {name: text for name in ("name", *THOUGHTS) if (text := getattr(self, name))}
        return {"role": role, "content": self._plain_content(), **more}

    def _plain_content(self) -> str | list[dict[str, str]]:
        if isinstance(self.content, str):
            return self.content
        if all(isinstance(part, _TextPart) for part in self.content):
            return text_of(self.model_dump())
        parts: list[dict[str, str]] = [
            {"type": "text", "text": part.text}
            if isinstance(part, _TextPart)
            else {"type": "image", "image": part.image_url.url}
            for part in self.content
        ]
        return parts


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, without its images."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _alone(value: Any) -> Any:
    """Put a single text, or the ids of one, into a list."""
    is_ids = isinstance(value, list) and bool(value) and isinstance(value[0], int)
    return [value] if isinstance(value, str) or is_ids else value


SAMPLED_BY = frozenset({"temperature", "top_p", "top_k", "min_p"})
"""Fields that say how tokens are drawn: with any of them the others are OpenAI's defaults, without one the model's."""
OPENAIS = SamplingParams()


class _Body(BaseModel):
    """What both endpoints read; a field that is not here is refused, and no value is converted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    seed: int = Field(default_factory=lambda: secrets.randbits(62), ge=-(2**63), le=2**63 - 1)
    stop: Annotated[list[str], BeforeValidator(_alone), Field(max_length=MAX_STOPS)] = []
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, max_length=MAX_STOP_IDS)
    skip_special_tokens: bool = False

    def asked(
        self, max_new_tokens: int, *, own: SamplingParams, adds_stop_ids: bool = True, **more: Any
    ) -> Asked:
        """Return the request with what its endpoint adds; it is drawn as `own` says where it does not say how."""
        if self.min_tokens > max_new_tokens:
            told = f"min_tokens: expected at most max_tokens = {max_new_tokens}, got {self.min_tokens}"
            raise ApiError(400, told, param="min_tokens")
        ends = Ends(
            stop_ids=frozenset(self.stop_token_ids or () if adds_stop_ids else ()),
            ignores_stop_ids=self.ignore_eos,
            min_new_tokens=self.min_tokens,
        )
        try:
            params = replace(own, max_new_tokens=max_new_tokens)
            if self.model_fields_set & SAMPLED_BY:
                params = SamplingParams(
                    # Clients ask for 1e-7 where they mean greedy, since some servers refuse 0.
                    temperature=0.0 if 0 < self.temperature < LEAST_TEMPERATURE else self.temperature,
                    top_p=self.top_p,
                    top_k=max(0, self.top_k),  # -1 is how vLLM says 'all'
                    min_p=self.min_p,
                    max_new_tokens=max_new_tokens,
                )
        except ValueError as error:
            raise ApiError(400, str(error), param=str(error).split(" ")[0]) from None
        return Asked(
            params=params,
            num_choices=self.n,
            seed=self.seed,
            stops=tuple(stop for stop in self.stop if stop),
            stream=self.stream,
            include_usage=self.stream_options.include_usage,
            counts_usage=self.stream_options.include_usage and self.stream_options.continuous_usage_stats,
            ends=None if ends == Ends() else ends,
            skips_special=self.skip_special_tokens,
            **more,
        )


B = TypeVar("B", bound=_Body)


class _Chat(_Body):
    messages: list[_Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP)
    reasoning_effort: str | None = Field(default=None, max_length=MAX_VALUE)
    chat_template_kwargs: dict[
        str, bool | int | float | Annotated[str, Field(max_length=MAX_VALUE)] | None
    ] = Field(default={}, max_length=MAX_STOPS)

    @property
    def template_values(self) -> dict[str, Any]:
        """Values for the template, by the field that gives them."""
        given = {f"chat_template_kwargs.{name}": value for name, value in self.chat_template_kwargs.items()}
        return {
            name: v
            for name, v in {"reasoning_effort": self.reasoning_effort, **given}.items()
            if v is not None
        }


class _Text(_Body):
    prompt: Annotated[
        list[str | Annotated[list[int], Field(min_length=1)]],
        BeforeValidator(_alone),
        Field(min_length=1, max_length=MAX_PROMPTS),
    ]
    echo: bool = False
    max_tokens: int = Field(default=DEFAULT_NEW_TOKENS, ge=0)
    seeds: list[Annotated[int, Field(ge=0, lt=2**63)]] | None = None
    return_token_ids: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP)


def parse_chat(body: Mapping[str, Any], context: int, own: SamplingParams = OPENAIS) -> Asked:
    """Read the body of /v1/chat/completions.

    Args:
        body: The JSON object.
        context: Longest completion where none is asked for, in tokens.
        own: How tokens are drawn where the request does not say how.

    Raises:
        ApiError: What is wrong, with the field to blame.
    """
    body = {**body, "messages": _supported(body.get("messages"))}
    chat = _read(_Chat, body, IGNORED_IN_CHATS, UNSUPPORTED_IN_CHATS)
    if chat.top_logprobs and not chat.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs = true", param="top_logprobs")
    if (role := chat.messages[-1].role) != "user":
        name = f"messages[{len(chat.messages) - 1}].role"
        raise ApiError(400, f"{name}: expected user for the last message, got {role}", param=name)
    messages = tuple(message.plain() for message in chat.messages)
    _check_images(messages)
    return chat.asked(
        chat.max_completion_tokens or chat.max_tokens or context,
        own=own,
        messages=messages,
        num_top=chat.top_logprobs if chat.logprobs else None,
        template_values=chat.template_values,
    )


def _supported(messages: Any) -> Any:
    """Return messages without fields that are empty; refuse those that their prompt would silently lack."""
    if not isinstance(messages, list):
        return messages
    found: list[Any] = []
    for place, message in enumerate(messages):
        if isinstance(message, dict):
            _check_keys(message, SUPPORTED_IN_MESSAGES, f"messages[{place}]")
            content = message.get("content")
            for index, part in enumerate(content if isinstance(content, list) else ()):
                if isinstance(part, dict):
                    _check_keys(part, SUPPORTED_IN_PARTS, f"messages[{place}].content[{index}]")
            is_silent = content is None and message.get("role") == "assistant"
            message = message | {"content": ""} if is_silent else message
        found.append(message)
    return found


def _check_keys(fields: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    name = next((name for name, value in fields.items() if value and name not in known), None)
    if name is not None:
        name = f"{where}.{name[:80]}"
        raise ApiError(400, f"{name} is not supported by this server: leave it out", param=name)


def check_read(policy: Policy, asked: Asked) -> dict[str, Any]:
    """Return the values that a conversation's template is given; refuse what it would not read.

    Raises:
        ApiError: With the field to blame.
    """
    tokenizer, values = policy.tokenizer, dict[str, Any]()
    for field_name, value in asked.template_values.items():
        name = field_name.removeprefix("chat_template_kwargs.")
        is_own = name in OWN_NAMES or name.endswith("_token")
        if not is_own and tokenizer.reads(name):
            values[name] = tokenizer.quoted(value) if isinstance(value, str) else value
        elif value and not (
            field_name == "reasoning_effort" and value == "none" and not policy.schema.has_thinking
        ):
            raise _unread(field_name)
    knows_thoughts = any(map(tokenizer.reads, THOUGHTS))
    for place, message in enumerate(asked.messages):
        for name in THOUGHTS:
            if name in message and not (knows_thoughts and message["role"] == "assistant"):
                raise _unread(f"messages[{place}].{name}")
    named = [place for place, message in enumerate(asked.messages) if "name" in message]
    if named:
        bare = [{k: v for k, v in message.items() if k != "name"} for message in asked.messages]
        if policy.chat_text(bare, **values) == policy.chat_text(asked.messages, **values):
            raise _unread(f"messages[{named[0]}].name")
    return values


def _unread(name: str) -> ApiError:
    return ApiError(400, f"{name}: the model's chat template does not read it: leave it out", param=name)


def _check_images(messages: Sequence[Mapping[str, Any]]) -> None:
    for place, message in enumerate(messages):
        if message["role"] != "user" and images_in([message]):
            name = f"messages[{place}].content"
            raise ApiError(400, f"{name}: images stand in messages of the user's alone", param=name)
    if (count := len(images_in(messages))) > MAX_IMAGES:
        raise ApiError(400, f"messages: expected at most {MAX_IMAGES} images, got {count}", param="messages")


def parse_text(body: Mapping[str, Any], own: SamplingParams = OPENAIS) -> Asked:
    """Read the body of /v1/completions.

    Args:
        body: The JSON object.
        own: How tokens are drawn where the request does not say how.

    Raises:
        ApiError: What is wrong, with the field to blame.
    """
    text = _read(_Text, body, IGNORED, UNSUPPORTED_IN_TEXTS)
    if not text.max_tokens and not text.echo:
        raise ApiError(400, "max_tokens = 0: expected 1 or more, or echo = true", param="max_tokens")
    if text.seeds is not None and len(text.seeds) != text.n:
        raise ApiError(
            400, f"seeds: expected one for each of n = {text.n}, got {len(text.seeds)}", param="seeds"
        )
    if text.return_token_ids and text.stream:
        raise ApiError(400, "return_token_ids is not supported in streams: leave one out", param="stream")
    # What is drawn then has neither the model's distribution nor what filters left of it.
    if text.return_token_ids and text.min_tokens:
        raise ApiError(400, "return_token_ids is not supported with min_tokens", param="min_tokens")
    return text.asked(
        max(1, text.max_tokens),
        own=OPENAIS if text.return_token_ids else own,  # a trainer's: the model's whole distribution
        prompts=tuple(row if isinstance(row, str) else tuple(row) for row in text.prompt),
        num_top=text.logprobs,
        echo=text.echo,
        generate=text.max_tokens > 0,
        seeds=None if text.seeds is None else tuple(text.seeds),
        returns_ids=text.return_token_ids,
        # A trainer says where its completions end, and has to agree with the server; others have further ends.
        stop_ids=frozenset(text.stop_token_ids)
        if text.return_token_ids and text.stop_token_ids is not None
        else None,
        adds_stop_ids=not text.return_token_ids,
    )


class _Tokenize(BaseModel):
    """Fields as vLLM has them; those of a conversation are read as a chat's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | None = None
    messages: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False


def parse_tokenize(body: Mapping[str, Any]) -> tuple[Asked, bool]:
    """Read the body of /tokenize, without the model's name; return what is to be read, and whether tokens are spelled.

    Raises:
        ApiError: What is wrong, with the field to blame.
    """
    given = _model(_Tokenize, {name: value for name, value in body.items() if value is not None})
    if (given.prompt is None) == (given.messages is None):
        raise ApiError(400, "expected prompt or messages", param="prompt")
    if given.messages is None:
        if given.add_special_tokens is False:
            raise ApiError(400, "add_special_tokens = false is not supported by this server: leave it out")
        asked = parse_text({"prompt": given.prompt, "max_tokens": 1})
        return replace(asked, generate=False), given.return_token_strs
    if given.add_special_tokens:
        raise ApiError(400, "add_special_tokens is not supported with messages: leave it out")
    fields = {"messages": given.messages, "chat_template_kwargs": given.chat_template_kwargs}
    asked = replace(parse_chat(fields, 1), generate=False)
    if images_in(asked.messages):
        raise ApiError(400, "messages: images have no tokens of the tokenizer", param="messages")
    return asked, given.return_token_strs


class _Detokenize(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


def parse_detokenize(body: Mapping[str, Any]) -> list[int]:
    """Read the body of /detokenize, without the model's name.

    Raises:
        ApiError: What is wrong, with the field to blame.
    """
    return _model(_Detokenize, body).tokens


class _Group(BaseModel):
    """What all requests about a group for weights name; fields as SGLang has them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    group_name: str = Field(default="weight_update_group", min_length=1, max_length=80)


class Joining(_Group):
    """Join a group, see `whet.ranks.broadcast.WeightGroup`."""

    master_address: str
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2)
    backend: Literal["gloo", "nccl"] = "nccl"


class Receiving(_Group):
    """Take weights from a group, in this order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class Leaving(_Group):
    """Leave a group."""


G = TypeVar("G", bound=_Group)


def parse_group(kind: type[G], body: Mapping[str, Any]) -> G:
    """Read a request about a group for weights.

    Raises:
        ApiError: With what is wrong.
    """
    return _model(kind, body)


M = TypeVar("M", bound=BaseModel)


def _model(kind: type[M], body: Mapping[str, Any]) -> M:
    try:
        return kind.model_validate(dict(body))
    except ValidationError as error:
        raise _refused(error, body) from None


def _read(
    kind: type[B], body: Mapping[str, Any], ignored: frozenset[str], unsupported: Mapping[str, Sequence[Any]]
) -> B:
    """Check a body, without the fields that ask for nothing; refuse those that would change the answer."""
    for name, value in body.items():
        if name in unsupported and value not in EMPTY and value not in unsupported[name]:
            raise ApiError(400, f"{name} is not supported by this server: leave it out", param=name)
    left_out = ignored | unsupported.keys()
    return _model(kind, {k: v for k, v in body.items() if v is not None and k not in left_out})


def _refused(error: ValidationError, body: Mapping[str, Any]) -> ApiError:
    """Turn what pydantic found into a line: `n: expected less than or equal to 128, got 500`."""
    found: dict[str, tuple[Any, list[str]]] = {}
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        name, value = "", cast(Any, body)
        for key in item["loc"]:
            if isinstance(value, list) and isinstance(key, int):
                name, value = f"{name}[{key}]", value[key]
            elif isinstance(value, dict) and (key in value or item["type"] == "missing"):
                name, value = f"{name}.{key}" if name else str(key), value.get(key)
            # Else pydantic names a kind of value that it tried.
        if item["type"] == "extra_forbidden":
            return ApiError(400, f"Unrecognized request argument supplied: {name[:80]}", param=name[:80])
        wanted = item["msg"].removeprefix("Input should be ").partition(" or instance of ")[0]
        wanted = re.sub(r"\w+ should have (.*) after validation.*", r"a list of \1", wanted)
        wanted = wanted.replace("Field required", "a value")
        found.setdefault(name, (value, []))[1].append(wanted)
    name = max(found, key=len)  # of the kinds that a value may be, the one that it nearly is
    value, choices = found[name]
    shown = json.dumps(value)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    return ApiError(400, f"{name}: expected {' or '.join(dict.fromkeys(choices))}, got {shown}", param=name)


def refusal(error: UserError) -> ApiError:
    """Turn a mistake that the engine or the tokenizer found into a refusal; options of whet's are no client's."""
    text = str(error)
    if option := OPTION.search(text):
        text = text[: option.start()].rstrip(" :")
        cut = max(text.rfind(mark) for mark in ":;,")
        text = text[:cut] if cut > 0 and "(" not in option[0] else text
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
    completion: Completion | None = None
    """All of the choice, at its end."""


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
        tokenizer, ends = policy.tokenizer, asked.ends or Ends()
        silent = silent_ids(policy) | ends.stop_ids
        if asked.skips_special:
            tags = (*policy.schema.tags, *policy.schema.tool_tags)
            silent |= {index for index in tokenizer.special_ids if tokenizer.token_text(index) not in tags}
        self._least = ends.min_new_tokens
        self._tokens = TokenText(tokenizer, prompt_ids, silent_ids=silent)
        # Where thinking is apart, a stop string is looked for in the content alone, which is what the client sees.
        self._stops = StopText(asked.stops)
        values = asked.template_values
        schema = policy.response_schema(**values) if values else policy.schema
        self._response = ResponseText(schema) if splits else None
        self._noted = asked.num_top is not None
        self._offset = offset
        self.num_tokens = 0
        self.num_thinking = 0
        self.finish_reason: str | None = None

    def push(self, event: Token | Completion) -> Delta:
        """Add a token, or the end; after a stop string in the content nothing is to be added."""
        if isinstance(event, Completion):
            self.finish_reason = event.finish_reason
            delta = Delta(finish_reason=event.finish_reason, completion=event)
            return self._add(self._tokens.flush(), delta)
        self.num_tokens += 1
        self.num_thinking += self._response is not None and self._response.is_thinking
        delta = Delta(tokens=[(event, self._offset)] if self._noted else [])
        piece = self._tokens.push(event.id)
        self._offset += len(piece)
        return self._add(piece, delta)

    def _add(self, text: str, delta: Delta) -> Delta:
        is_last = delta.finish_reason is not None
        if self._response is not None:
            piece = self._response.push(text, last=is_last)
            delta.thinking, text = piece.thinking, piece.answer
        # Nothing ends a completion before its least length.
        delta.text = text if self.num_tokens <= self._least and not is_last else self._stops.push(text)
        if self._stops.has_ended and self._response is not None:
            self.finish_reason = delta.finish_reason = "stop"
        elif is_last:
            delta.text += self._stops.flush()
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
        completion=deltas[-1].completion if deltas else None,
    )


class Reply:
    """Writes the JSON of one response.

    Args:
        policy: Whose tokens they are.
        model: Name that the model is served by.
        asked: What the client wants.
        is_chat: Which of the two formats.
        splits: Whether thinking goes apart.
        warning: What the client should know of its prompt; every object carries it.
    """

    def __init__(
        self, policy: Policy, model: str, asked: Asked, *, is_chat: bool, splits: bool, warning: str = ""
    ) -> None:
        self._policy, self._asked, self._is_chat, self._splits = policy, asked, is_chat, splits
        kind = (
            ("chat.completion.chunk" if asked.stream else "chat.completion") if is_chat else "text_completion"
        )
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        } | ({"warning": warning} if warning else {})

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

    def first(self, index: int, usage: dict[str, Any]) -> dict[str, Any] | None:
        """Return the chunk that opens a choice of a chat."""
        if not self._is_chat:
            return None
        return self._chunk(
            [self._row(index, Delta()) | {"delta": {"role": "assistant", "content": ""}}], usage
        )

    def next(self, index: int, delta: Delta, usage: dict[str, Any]) -> dict[str, Any] | None:
        """Return the chunk for an event; None where it brought nothing to be seen."""
        if not (delta.text or delta.thinking or delta.tokens or delta.finish_reason):
            return None
        if not self._is_chat:
            return self._chunk([self._text_row(index, delta)], usage)
        said = {"reasoning_content": delta.thinking} if delta.thinking else {}
        said |= {"content": delta.text} if delta.text else {}
        return self._chunk([self._row(index, delta) | {"delta": said}], usage)

    def last(self, usage: dict[str, Any]) -> dict[str, Any] | None:
        """Return the chunk with the token counts, where they are wanted."""
        return self._head | {"choices": [], "usage": usage} if self._asked.include_usage else None

    def _chunk(self, rows: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        counts = {"usage": usage if self._asked.counts_usage else None} if self._asked.include_usage else {}
        return self._head | {"choices": rows} | counts

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
                "token_logprobs": [_finite(token.logprob) for token in tokens],
                "top_logprobs": [self._tops(token) for token in tokens],
                "text_offset": [offset for _, offset in delta.tokens],
            }
        if self._asked.returns_ids and delta.completion is not None:
            done = delta.completion
            row |= {"token_ids": done.ids, "sampled_logprobs": done.logprobs, "kept": done.kept}
        return row

    def _tops(self, token: Token) -> dict[str, float] | None:
        """Return text -> log-probability, the token's own besides; of tokens that spell the same, the likeliest."""
        if token.logprob is None:
            return None
        pairs = reversed((*token.top, (token.id, token.logprob)))
        return {self._spell(index): max(logprob, LEAST_LOGPROB) for index, logprob in pairs}

    def _entry(self, token: Token) -> dict[str, Any]:
        tops = [self._scored(index, logprob) for index, logprob in token.top]
        return self._scored(token.id, token.logprob) | {"top_logprobs": tops}

    def _scored(self, index: int, logprob: float | None) -> dict[str, Any]:
        return {
            "token": self._spell(index),
            "logprob": _finite(logprob),
            "bytes": self._policy.tokenizer.token_bytes(index),
        }

    def _spell(self, index: int) -> str:
        return self._policy.tokenizer.token_text(index)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


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
