"""The routes of `whet serve`: OpenAI's /v1/chat/completions, /v1/completions and /v1/models, /health, a chat page."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whet import __version__
from whet.generate import rows
from whet.generate.policy import Policy, own_sampling
from whet.model.lora.adapter import Adapter
from whet.model.vision.asking import images_in
from whet.model.vision.ids import keys_in
from whet.model.vision.reading import Urls, is_data_uri, is_url, locate, shown
from whet.ranks.broadcast import WeightGroup
from whet.report.page import render
from whet.serve.chess.table import Table
from whet.serve.openai import (
    ApiError,
    Asked,
    Choice,
    Delta,
    G,
    Joining,
    Leaving,
    Receiving,
    Reply,
    check_read,
    choice_seeds,
    echo_of,
    merged,
    parse_chat,
    parse_detokenize,
    parse_group,
    parse_json,
    parse_text,
    parse_tokenize,
    refusal,
    text_of,
    usage_of,
)
from whet.serve.scheduler import Ask, BusyError, Event, Scheduler, Ticket, read_outline, read_update
from whet.serve.stream import chat_prompt, has_turns, unread_note
from whet.types import UserError

MAX_BODY_BYTES = 4 * 2**20
MAX_BODY_BYTES_WITH_IMAGES = 32 * 2**20
"""Of a chat with a model that sees: image files, in base64."""
READ_AWAY = 8
"""A body up to so many times too large is read to its end: a client that still sends sees no reply, but a reset."""
KEPT_IMAGES = 16
"""Image files that are kept when no request shows them any more."""
RECEIVE_S = 30.0
SEND_S = 60.0
"""A client that takes nothing for so long is cut off, and its rows are free."""

PAGE_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
"""The rest of the page's policy, with the hashes of its scripts, is in the page."""

MAX_BOARDS = 16
"""Moves of chess that are answered at a time; more wait."""
CHESS = "/chess"
OPEN = ("/", CHESS, "/favicon.ico", "/health")
"""Paths that need no key: they tell nothing of the model, and take no body."""
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/?#@\\\s]+)(:[0-9]{0,5})?", re.ASCII | re.IGNORECASE)
"""A name or an address, and a port."""
SMALL_BODY = 64 * 1024
NUM_QUICK = 4
"""Threads that read small requests; large ones, which take seconds, have others and do not hold them up."""

_Route = tuple[str, Callable[[Request], Any], str]
"""Path, function and method."""

GONE = Response(status_code=499)
HANDLED = (ApiError, UserError, BusyError, HTTPException, ClientDisconnect, Exception)


class _Parsed(NamedTuple):
    """A request: the model's name and its policy, what is asked, the prompts' tokens, and what to say of them."""

    model: str
    policy: Policy
    asked: Asked
    ids: list[tuple[int, ...]]
    warning: str


class Api:
    """Answers requests with one policy, and the adapters that stand beside it.

    Args:
        policy: The policy.
        scheduler: What draws its tokens.
        name: Name that the model is served by; of several adapters each has its own, and this is the base's.
        split_thinking: Whether chats get their thinking as `reasoning_content`.
        updates: Whether clients may replace the weights by files of this machine.
        image_root: Folder whose image files clients may name; '' for none: they send the file itself.
        image_urls: Which URLs of images are fetched.
    """

    def __init__(
        self,
        policy: Policy,
        scheduler: Scheduler,
        *,
        name: str,
        split_thinking: bool,
        updates: bool = False,
        image_root: str = "",
        image_urls: Urls = "none",
    ) -> None:
        self._policy, self._scheduler, self._updates = policy, scheduler, updates
        adapters = () if policy.several is None else policy.several.names
        if name in adapters:
            raise UserError(f"name = {name!r}: an adapter has that name; give the base another with --name")
        self._base, self._adapters = name, {name: "", **{adapter: adapter for adapter in adapters}}
        self._splits = split_thinking
        self._sampling = {is_chat: own_sampling(policy, is_chat=is_chat) for is_chat in (True, False)}
        self._groups: dict[str, WeightGroup] = {}
        self._image_root = image_root
        self._image_urls: Urls = image_urls
        sees = policy.model.images is not None
        self._max_bytes = MAX_BODY_BYTES_WITH_IMAGES if sees else MAX_BODY_BYTES
        self._shown: Counter[int] = Counter()
        self._idle: deque[int] = deque()
        self._showing = threading.Lock()
        self._quick = ThreadPoolExecutor(NUM_QUICK, "whet-requests")

    async def page(self, _: Request) -> Response:
        """Return the chat page; it holds nothing of the model, and asks for the key where there is one."""
        data = {
            "chat": {
                "remembers": has_turns(self._policy),
                "splits": self._splits,
                "sees": self._policy.model.images is not None,
            }
        }
        scripts, styles = ("browser.js", "chat.js"), ("browser.css", "chat.css")
        text = render(
            "chat.html", title="whet serve", data=data, scripts=scripts, styles=styles, connect=True
        )
        return HTMLResponse(text, headers=PAGE_HEADERS)

    async def health(self, _: Request) -> Response:
        """Say that the server is alive, and how much it has to do."""
        return JSONResponse({"status": "ok", "pending": self._scheduler.num_pending})

    async def models(self, _: Request) -> Response:
        """List the model, and its adapters."""
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._adapters]})

    async def model(self, request: Request) -> Response:
        """Describe one of them."""
        return JSONResponse(self._card(self._check_model(request.path_params["name"])))

    async def version(self, _: Request) -> Response:
        """Name the program, as vLLM does."""
        return JSONResponse({"version": __version__})

    async def metrics(self, _: Request) -> Response:
        """Return what has been done, in Prometheus' text format."""
        stats = self._scheduler.stats
        rows = (
            (
                "completions_pending",
                "gauge",
                "Completions and texts that run or wait",
                self._scheduler.num_pending,
            ),
            ("prompt_tokens_total", "counter", "Tokens of prompts that were continued", stats.prompt_tokens),
            ("completion_tokens_total", "counter", "Tokens of completions that have ended", stats.new_tokens),
            ("decode_steps_total", "counter", "Steps that drew one token for each row", stats.decode_steps),
        )
        lines = [
            f"# HELP whet_{name} {told}.\n# TYPE whet_{name} {kind}\nwhet_{name} {value}\n"
            for name, kind, told, value in rows
        ]
        return Response("".join(lines), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text or of a conversation, as vLLM does."""
        body = await _receive(request)
        return JSONResponse(await asyncio.get_running_loop().run_in_executor(None, self._tokenize, body))

    def _tokenize(self, body: bytes) -> dict[str, Any]:
        fields = parse_json(body)
        policy = self._policy.named(self._adapters[self._check_model(fields.pop("model", self._base))])
        asked, spells = parse_tokenize(fields)
        asked = replace(asked, template_values=check_read(policy, asked))
        (prompt,) = asked.prompts or (asked.messages,)
        ids = self._encode(policy, prompt, 0, asked)
        texts = [policy.tokenizer.token_text(index) for index in ids] if spells else None
        told = {"count": len(ids), "max_model_len": self._scheduler.context, "tokens": list(ids)}
        return told | {"token_strs": texts}

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens, as vLLM does."""
        fields = await _read(request)
        policy = self._policy.named(self._adapters[self._check_model(fields.pop("model", self._base))])
        ids = parse_detokenize(fields)
        return JSONResponse({"prompt": await asyncio.to_thread(policy.tokenizer.decode, ids)})

    async def chat(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self._answer(request, await _receive(request, self._max_bytes), is_chat=True)

    async def completions(self, request: Request) -> Response:
        """Continue texts or token ids, or score them."""
        return await self._answer(request, await _receive(request), is_chat=False)

    async def update_weights(self, request: Request) -> Response:
        """Replace the weights, or the adapter beside them, by those of a folder; completions under way keep the old."""
        if not self._updates:
            raise ApiError(403, "this server keeps its weights: clients cannot replace them")
        body = await _read(request)
        folder = body.get("model_path")
        if not isinstance(folder, str) or set(body) - {"model_path"}:
            raise ApiError(
                400, "expected model_path, a folder of this machine, and nothing else", param="model_path"
            )
        began = time.monotonic()
        try:
            change = await asyncio.to_thread(read_update, self._policy, folder)
        except UserError as error:  # whet's trainers need the hint with whet's options
            raise ApiError(400, str(error)) from None
        await asyncio.wrap_future(self._scheduler.update(change))
        what = "an adapter" if isinstance(change, Adapter) else f"{len(change)} tensors"
        return JSONResponse({"success": True, "message": f"{what} in {time.monotonic() - began:.2f} s"})

    async def join_group(self, request: Request) -> Response:
        """Join the group through which a trainer sends weights; answer when all have met."""
        asked = await self._group_request(request, Joining)
        if asked.group_name in self._groups:
            raise ApiError(
                400, f"group_name: {asked.group_name[:80]!r} is a group already", param="group_name"
            )
        self._groups[asked.group_name] = await asyncio.to_thread(
            WeightGroup,
            asked.master_address,
            asked.master_port,
            rank=asked.rank_offset,
            size=asked.world_size,
            name=asked.group_name,
            backend=asked.backend,
        )
        return JSONResponse({"success": True, "message": f"rank {asked.rank_offset} of {asked.world_size}"})

    async def receive_weights(self, request: Request) -> Response:
        """Replace the weights by those that a trainer sends to a group; completions under way keep the old."""
        asked = await self._group_request(request, Receiving)
        if asked.group_name not in self._groups:
            raise ApiError(400, f"group_name: no group {asked.group_name[:80]!r} here", param="group_name")
        began = time.monotonic()
        outline = read_outline(self._policy, asked.names, asked.dtypes, asked.shapes)
        tensors = await asyncio.to_thread(self._groups[asked.group_name].receive, outline)
        await asyncio.wrap_future(self._scheduler.update(tensors))
        told = f"{len(tensors)} tensors in {time.monotonic() - began:.2f} s"
        return JSONResponse({"success": True, "message": told})

    async def leave_group(self, request: Request) -> Response:
        """Leave a group."""
        asked = await self._group_request(request, Leaving)
        group = self._groups.pop(asked.group_name, None)
        if group is None:
            raise ApiError(400, f"group_name: no group {asked.group_name[:80]!r} here", param="group_name")
        group.close()
        return JSONResponse({"success": True, "message": f"left {asked.group_name}"})

    async def _group_request(self, request: Request, kind: type[G]) -> G:
        """Read a request about a group."""
        if not self._updates:
            raise ApiError(403, "this server keeps its weights: clients cannot replace them")
        return parse_group(kind, await _read(request))

    def _card(self, model: str) -> dict[str, Any]:
        card = {"id": model, "object": "model", "created": 0, "owned_by": "whet"}
        card |= {"max_model_len": self._scheduler.context}
        return card | ({"parent": self._base} if model != self._base else {})  # as vLLM has it of adapters

    def _check_model(self, name: object) -> str:
        here = ", ".join(map(repr, self._adapters))
        if not isinstance(name, str):
            raise ApiError(400, f"model: expected a name; this server has {here}", param="model")
        if name not in self._adapters:
            raise ApiError(
                404,
                f"the model {name[:80]!r} does not exist; this server has {here}",
                param="model",
                code="model_not_found",
            )
        return name

    def _encode(self, policy: Policy, prompt: Any, index: int, asked: Asked) -> tuple[int, ...]:
        """Return the tokens of a conversation, a text or token ids; refuse what cannot be served.

        Args:
            policy: Whose tokens.
            prompt: The conversation, text or ids.
            index: Its place among the prompts.
            asked: The request; its template's values are checked.
        """
        tokenizer = policy.tokenizer
        # Before it is tokenised, which takes a second for each megabyte, or many where a text has no spaces.
        texts: list[Any] = [text_of(message) for message in asked.messages] or [prompt]
        size = sum(len(text) for text in texts if isinstance(text, str))
        if size > self._scheduler.context * tokenizer.longest:
            raise ApiError(
                400,
                f"the prompt has {size:,} characters, more than the context served here holds in any tokens "
                f"({self._scheduler.context:,} of up to {tokenizer.longest} characters): shorten it",
                code="context_length_exceeded",
            )
        if asked.messages:
            ids = self._encode_chat(policy, prompt, asked.template_values)
        elif isinstance(prompt, str):
            bos = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
            ids = tokenizer.encode(prompt)
            ids = tuple(ids if ids[:1] == bos else [*bos, *ids])
        else:
            ids = prompt
        name = "the prompt" if asked.messages or len(asked.prompts) == 1 else f"prompt[{index}]"
        try:
            self._scheduler.check(ids, name, room=int(asked.generate))
        except UserError:
            if asked.messages:
                self._hide(ids)
            raise
        return ids

    def _encode_chat(
        self, policy: Policy, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Return the tokens of a conversation; its images are read here, and counted as shown (`_hide`)."""
        sources = images_in(messages)
        images = policy.model.images
        if not sources or images is None:
            # A model without images says that it reads text alone.
            return chat_prompt(policy, messages, **values)
        files = {source: self._permitted(source) for source in sources}
        with self._showing:
            ids = chat_prompt(policy, _with_sources(messages, files), **values)
            keys = keys_in(ids)
            self._shown.update(keys)
        try:
            for key in keys:  # decoded now: what is broken concerns this request alone, and holds up no other
                images.patches(key)
        except BaseException:
            self._hide(ids)
            raise
        return ids

    def _permitted(self, source: str) -> str:
        """Return where an image is read from; refuse what clients may not name."""
        if is_data_uri(source):
            return source
        if is_url(source) and self._image_urls == "none":
            raise ApiError(
                400,
                f"image_url: {shown(source)} is not fetched by this server: send a data URI",
                param="messages",
            )
        root = self._image_root or None
        try:
            path = locate(source, root=root, paths=bool(root), urls=self._image_urls)
        except UserError:
            if is_url(source) or not root:
                raise
            path = None
        if (
            path is None or not path.is_file()
        ):  # one line for all: clients learn nothing of this machine's files
            raise ApiError(
                400,
                f"image {shown(source)}: not a file of this server's images: send a data URI",
                param="messages",
            )
        return str(path)

    def _hide(self, *prompts: Sequence[int]) -> None:
        """Let go of the images of prompts, except those that other requests show."""
        keys = [key for ids in prompts for key in keys_in(ids)]
        images = self._policy.model.images
        if not keys or images is None:
            return
        with self._showing:
            self._shown.subtract(keys)
            self._idle.extend(keys)
            # Not at once: the scheduler may be reading the prompt of a request that was cancelled this moment.
            while len(self._idle) > KEPT_IMAGES:
                key = self._idle.popleft()
                if self._shown[key] <= 0 and key not in self._idle:
                    del self._shown[key]
                    images.forget([key])

    def _parse(self, body: bytes, *, is_chat: bool) -> _Parsed:
        """Read what a client asks for, and the tokens of its prompts; takes seconds where they are long."""
        fields = parse_json(body)
        model = self._check_model(fields.get("model"))
        own = self._sampling[is_chat]
        asked = parse_chat(fields, self._scheduler.context, own) if is_chat else parse_text(fields, own)
        policy = self._policy.named(self._adapters[model])  # an adapter is asked as it was trained
        if asked.stop_ids is not None and asked.stop_ids != frozenset(policy.stop_ids):
            raise ApiError(
                400,
                f"stop_token_ids: this server ends completions at {sorted(policy.stop_ids)}, got "
                f"{sorted(asked.stop_ids)[:20]}: both must have the same schema",
                param="stop_token_ids",
            )
        if asked.ends is not None and max(asked.ends.stop_ids, default=0) >= policy.model.config.vocab_size:
            raise ApiError(
                400,
                f"stop_token_ids: expected ids below {policy.model.config.vocab_size}, got "
                f"{max(asked.ends.stop_ids)}",
                param="stop_token_ids",
            )
        asked = replace(asked, template_values=check_read(policy, asked))
        prompts: Sequence[Any] = [asked.messages] if is_chat else asked.prompts
        ids = [self._encode(policy, prompt, index, asked) for index, prompt in enumerate(prompts)]
        texts = [text for text in asked.prompts if isinstance(text, str)]
        texts += [text_of(message) for message in asked.messages]
        return _Parsed(model, policy, asked, ids, unread_note(policy.tokenizer, texts))

    async def _answer(self, request: Request, body: bytes, *, is_chat: bool) -> Response:
        threads = self._quick if len(body) <= SMALL_BODY else None
        parse = partial(self._parse, body, is_chat=is_chat)
        parsed = await asyncio.get_running_loop().run_in_executor(threads, parse)
        model, policy, asked, ids, warning = parsed
        adapter = self._adapters[model]
        splits = is_chat and self._splits
        reply = Reply(policy, model, asked, is_chat=is_chat, splits=splits, warning=warning)
        session = _Session(
            policy,
            self._scheduler,
            request,
            asked,
            ids,
            adapter=adapter,
            splits=splits,
            on_end=lambda: self._hide(*ids) if is_chat else None,
        )
        try:
            await session.begin()
            if asked.stream:
                return StreamingResponse(session.events(reply), media_type="text/event-stream")
            answer = JSONResponse(await session.body(reply))
        except BaseException:
            session.end()
            raise
        session.end()
        return answer


class Board:
    """The page with a chess board, and the moves that it asks for; neither tells anything of the model by itself.

    Args:
        table: What plays.
        title: Heading of the page.
        side: The user's side.
        path: Where the page is served; its moves are below it.
    """

    def __init__(self, table: Table, *, title: str, side: str = "white", path: str = "/") -> None:
        self._table, self._title, self._side = table, title, side
        self._paths = path, f"{path.rstrip('/')}/play"
        # Apart from the threads that read prompts, which must not wait for completions.
        self._threads = ThreadPoolExecutor(MAX_BOARDS, "whet-board")

    @property
    def routes(self) -> list[_Route]:
        """The page, and what answers it."""
        page, play = self._paths
        return [(page, self._page, "GET"), (play, self._move, "POST")]

    async def _page(self, _: Request) -> Response:
        data = {"chess": {"side": self._side, "path": self._paths[1]}}
        scripts, styles = ("chess.js",), ("chess.css",)
        text = render(
            "chess.html", title=self._title, data=data, scripts=scripts, styles=styles, connect=True
        )
        return HTMLResponse(text, headers=PAGE_HEADERS)

    async def _move(self, request: Request) -> Response:
        asked = await _read(request)
        loop = asyncio.get_running_loop()
        return JSONResponse(await loop.run_in_executor(self._threads, self._table.answer, asked))


class _Session:
    """One request that generates: its choices, and an eye on whether its client is still there."""

    def __init__(
        self,
        policy: Policy,
        scheduler: Scheduler,
        request: Request,
        asked: Asked,
        prompts: Sequence[tuple[int, ...]],
        *,
        adapter: str,
        splits: bool,
        on_end: Callable[[], None],
    ) -> None:
        self._adapter, self._on_end = adapter, on_end
        self._policy, self._scheduler, self._request, self._asked = policy, scheduler, request, asked
        self._prompts, self._splits = prompts, splits
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._echoes: list[Delta] = []
        self._choices: list[Choice] = []
        self._ticket = Ticket(())
        self._scorings: list[Future[Any]] = []
        self._watch = asyncio.create_task(self._await_disconnect())

    def end(self) -> None:
        """Stop whatever is still being done for this request."""
        self._leave()
        self._watch.cancel()
        on_end, self._on_end = self._on_end, lambda: None
        on_end()

    async def begin(self) -> None:
        """Ask for what is to be scored and to be drawn; return once all is scored.

        A prompt that is scored and continued is read once for both.
        """
        asked = self._asked
        scores: list[Future[list[rows.Token]]] = [Future() for _ in self._prompts]
        is_scored = asked.echo and asked.num_top is not None
        texts = [p if isinstance(p, str) else self._policy.tokenizer.decode(p) for p in asked.prompts]
        for index, prompt in enumerate(self._prompts):
            offset = len(texts[index]) if asked.echo else 0
            self._choices += [
                Choice(self._policy, prompt, asked, splits=self._splits, offset=offset)
                for _ in range(asked.num_choices)
            ]
        if asked.generate:
            seeds = asked.seeds or choice_seeds(asked.seed, asked.num_choices)
            loop = asyncio.get_running_loop()

            def sink(index: int, event: Event) -> None:
                loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))

            self._ticket = self._scheduler.submit(
                [
                    Ask(
                        request=rows.Request(prompt_ids=prompt, seeds=seeds, adapter=self._adapter),
                        params=asked.params,
                        # Those of split chats are looked for in the content alone, by `Choice`.
                        stop_strings=() if self._splits else asked.stops,
                        num_top=asked.num_top,
                        records=asked.returns_ids,
                        ends=asked.ends,
                        streams=asked.stream,
                        scores=own if is_scored else None,
                    )
                    for prompt, own in zip(self._prompts, scores, strict=True)
                ],
                sink,
            )
        if asked.echo:
            found = await self._scored(scores) if is_scored else [()] * len(texts)
            pairs = zip(texts, found, strict=True)
            self._echoes = [echo_of(self._policy, text, tokens) for text, tokens in pairs]
            if not asked.generate:
                for echo in self._echoes:
                    echo.finish_reason = "length"

    async def body(self, reply: Reply) -> dict[str, Any]:
        """Return the response in one piece."""
        parts = [[delta] if (delta := self._echo(index)) else [] for index in range(len(self._choices))]
        async for index, delta in self._deltas():
            parts[index].append(delta)
        return reply.whole([(index, merged(deltas)) for index, deltas in enumerate(parts)], self._usage())

    async def events(self, reply: Reply) -> AsyncIterator[str]:
        """Yield the response as server-sent events."""
        try:
            for index in range(len(self._choices)):
                usage = self._usage()
                echo = reply.next(index, self._echo(index) or Delta(), usage)
                for chunk in (reply.first(index, usage), echo):
                    if chunk:
                        yield _event(chunk)
            async for index, delta in self._deltas():
                if chunk := reply.next(index, delta, self._usage()):
                    yield _event(chunk)
            if chunk := reply.last(self._usage()):
                yield _event(chunk)
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body())
        except ClientDisconnect:
            return
        finally:
            self.end()

    def _echo(self, index: int) -> Delta | None:
        return self._echoes[index // self._asked.num_choices] if self._echoes else None

    async def _deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield what each event adds to its choice, until all have ended."""
        left = len(self._choices) if self._asked.generate else 0
        while left:
            index, event = await self._queue.get()
            if isinstance(event, ClientDisconnect):
                raise event
            if isinstance(event, Exception):
                raise _as_api_error(event)
            if (choice := self._choices[index]).finish_reason is not None:
                continue  # it ended at a stop string; these were under way
            delta = choice.push(event)
            if choice.finish_reason is not None:
                left -= 1
                self._ticket.jobs[index].cancelled = True
            yield index, delta
        self._watch.cancel()

    async def _scored(self, scores: Sequence[Future[list[rows.Token]]]) -> list[list[rows.Token]]:
        """Await the scores of the prompts: those that come with their completions, or all that is asked for."""
        self._scorings = [*scores]
        try:
            if self._asked.generate:
                return [await asyncio.wrap_future(own) for own in scores]
            alone = self._scheduler.score(self._prompts, self._asked.num_top or 0, self._adapter)
            self._scorings = [alone]
            return await asyncio.wrap_future(alone)
        except asyncio.CancelledError:
            raise ClientDisconnect from None

    def _leave(self) -> None:
        """Cancel what is being done; nothing of it is awaited any more."""
        self._ticket.cancel()
        for scoring in self._scorings:
            scoring.cancel()

    def _usage(self) -> dict[str, Any]:
        return usage_of(sum(map(len, self._prompts)), self._choices, splits=self._splits)

    async def _await_disconnect(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._leave()
        self._queue.put_nowait((0, ClientDisconnect()))


def _with_sources(messages: Sequence[Mapping[str, Any]], files: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return messages whose images are where they are read from."""
    found = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                {**part, "image": files[part["image"]]} if part["type"] == "image" else part
                for part in content
            ]
        found.append({**message, "content": content})
    return found


async def _receive(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Receive a JSON body within bounds of size and time."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "expected the header Content-Type: application/json")
    body, size = bytearray(), 0
    too_large = ApiError(413, f"the body is larger than {max_bytes:,} bytes")
    try:
        async with asyncio.timeout(RECEIVE_S):
            async for part in request.stream():
                size += len(part)
                if size > READ_AWAY * max_bytes:
                    raise too_large
                if size <= max_bytes:
                    body += part
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {RECEIVE_S:g} s") from None
    if size > max_bytes:
        raise too_large
    return bytes(body)


async def _read(request: Request) -> dict[str, Any]:
    """Receive and read a JSON object."""
    return await asyncio.to_thread(parse_json, await _receive(request))


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return refusal(error)
    if isinstance(error, BusyError):
        return ApiError(503, str(error), code="overloaded")
    if isinstance(error, HTTPException):
        return ApiError(
            error.status_code, f"{error.detail}: see /v1/models, /v1/chat/completions, /v1/completions"
        )
    return ApiError(500, f"the server failed: {type(error).__name__}: {str(error)[:200]}")


async def _refuse(_: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return GONE
    failure = _as_api_error(error)
    headers = {"Retry-After": "1"} if failure.status == 503 else {}
    headers |= {"Connection": "close"} if failure.status in (401, 403, 408, 413) else {}
    return JSONResponse(failure.body(), status_code=failure.status, headers=headers)


class Guard:
    """Turns away strangers (the key; on this machine alone, other host names), and clients that take nothing.

    `refuse` is for the server's protocol, which asks before it parses a body, and is asked here again: whatever serves
    the app, it is safe.
    """

    def __init__(
        self, app: ASGIApp, *, api_key: str, hosts: frozenset[str], has_origins: bool = False
    ) -> None:
        self._app, self._api_key, self._hosts = app, api_key.encode(), hosts
        self._has_origins = has_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def bounded(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)

        error = self.refuse(scope["path"].encode(), scope["headers"], method=scope["method"])
        try:
            if error is not None:
                await (await _refuse(Request(scope), error))(scope, receive, bounded)
            else:
                await self._app(scope, receive, bounded)
        except (TimeoutError, OSError):
            return  # the client takes nothing any more, or is gone

    def refuse(
        self, path: bytes, headers: Sequence[tuple[bytes, bytes]], *, method: str = "OPTIONS"
    ) -> ApiError | None:
        """Say from path and headers (names in lower case) why a request is not taken, if it is not.

        A browser asks without the key whether a page of another origin may ask at all: a preflight, without a body.
        """
        found = dict(reversed(headers))  # the first of each
        host = HOST.fullmatch(found.get(b"host", b"").decode("latin-1"))
        name = host[1].strip("[]").lower() if host else ""
        if self._hosts and name not in self._hosts:  # a web page whose name was pointed at this machine
            return ApiError(403, "this server answers to localhost only")
        is_preflight = self._has_origins and method == "OPTIONS" and b"access-control-request-method" in found
        if path.decode("latin-1") in OPEN or is_preflight:
            if b"transfer-encoding" in found or found.get(b"content-length", b"0").strip(b"0 "):
                return ApiError(400, "expected no body here")
            return None
        scheme, _, given = found.get(b"authorization", b"").strip().partition(b" ")
        has_key = scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._api_key)
        if self._api_key and not has_key:
            return ApiError(401, "Incorrect API key provided", code="invalid_api_key")
        return None


def make_app(
    api: Api,
    *,
    api_key: str,
    hosts: frozenset[str],
    board: Board | None = None,
    origins: Sequence[str] = (),
) -> Guard:
    """Put the routes together.

    Args:
        api: What answers.
        api_key: Key that clients must give as a bearer token; empty for none.
        hosts: Host names that are answered to; empty for any.
        board: A chess board; None for none.
        origins: Web pages (scheme, host and port) whose scripts may read the answers; '*' for all.
    """
    routes: list[_Route] = [
        ("/", api.page, "GET"),
        ("/favicon.ico", lambda _: Response(status_code=204), "GET"),
        ("/health", api.health, "GET"),
        ("/version", api.version, "GET"),
        ("/metrics", api.metrics, "GET"),
        ("/tokenize", api.tokenize, "POST"),
        ("/detokenize", api.detokenize, "POST"),
        ("/v1/models", api.models, "GET"),
        ("/v1/models/{name:path}", api.model, "GET"),
        ("/v1/chat/completions", api.chat, "POST"),
        ("/v1/completions", api.completions, "POST"),
        ("/update_weights_from_disk", api.update_weights, "POST"),
        ("/init_weights_update_group", api.join_group, "POST"),
        ("/update_weights_from_distributed", api.receive_weights, "POST"),
        ("/destroy_weights_update_group", api.leave_group, "POST"),
        *(board.routes if board is not None else ()),
    ]
    return _guarded(routes, api_key=api_key, hosts=hosts, origins=origins)


def make_board_app(board: Board, *, hosts: frozenset[str]) -> Guard:
    """Serve a chess board alone, without a key.

    Args:
        board: The board.
        hosts: Host names that are answered to.
    """
    return _guarded(board.routes, api_key="", hosts=hosts)


def _guarded(
    routes: Sequence[_Route], *, api_key: str, hosts: frozenset[str], origins: Sequence[str] = ()
) -> Guard:
    app: ASGIApp = Starlette(
        routes=[Route(path, function, methods=[method]) for path, function, method in routes],
        exception_handlers=dict.fromkeys(HANDLED, _refuse),
    )
    if origins:
        methods = sorted({method for _, _, method in routes})
        app = CORSMiddleware(app, allow_origins=origins, allow_methods=methods, allow_headers=["*"])
    return Guard(app, api_key=api_key, hosts=hosts, has_origins=bool(origins))
