"""What a server takes from clients before it answers: from whom, for how long, how much, in how many parts.

A client without the key costs its headers and no more: it is refused before its body is parsed, and its connection is
closed. A client with the key gets its turn, but never a long one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from whet.serve.openai import ApiError

HEADERS_S = 10.0
"""Seconds from a connection, or from the first byte of a later request on it, to the end of the request's headers."""
MAX_HEADER_BYTES = 64 * 1024
"""Of a request's first line and headers together; h11 refuses more while they arrive."""
MAX_HEADER_LINES = 128
MAX_TARGET_BYTES = 8 * 1024
"""Of the path and query in the first line."""
MAX_PARTS = 256
"""A body may come in so many chunks or packets of any size; more must have `PART_BYTES` on average."""
PART_BYTES = 256
TURN_PARTS = 8
"""Parts of a body that are parsed before other connections have their turn: a third of a millisecond."""
MAX_AHEAD = 8
"""Requests that a client may send before it has the answer to the one before."""
LINGER_S = 1.0
"""How long input of a refused client is discarded: closed at once, it would see a reset and not the answer."""
LINGER_BYTES = 64 * 2**20

Refuse = Callable[[bytes, Sequence[tuple[bytes, bytes]]], ApiError | None]
"""Says from path and headers (names in lower case) why a request is not taken, if it is not."""


class _Meter(h11.Connection):
    """Parses a connection in turns, and stops at a request that is refused.

    Attributes:
        refusal: Why the request is refused.
        turn: Parts of the body that may still be parsed in this turn.
        wire: Bytes that came since the request's headers.
    """

    def __init__(self, max_bytes: int, refuse: Refuse) -> None:
        super().__init__(h11.SERVER, max_bytes)
        self._refuse = refuse
        self.refusal: ApiError | None = None
        self.turn = TURN_PARTS
        self.wire = self._parts = self._size = 0

    @property
    def waits(self) -> bytes:
        """What was received and not parsed yet."""
        return self.trailing_data[0]

    def next_event(self) -> Any:
        if self.refusal is not None or self.turn <= 0:
            return h11.NEED_DATA
        if self.their_state is h11.IDLE and self._has_many_lines():
            self.refusal = ApiError(400, f"more than {MAX_HEADER_LINES} header lines")
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.wire, self._parts, self._size = len(self.waits), 0, 0
            self.refusal = self._objection(event)
        elif isinstance(event, h11.Data):
            self.turn -= 1
            self._parts += 1
            self._size += len(event.data)
            self.refusal = self._slips()
        return event if self.refusal is None else h11.NEED_DATA

    def _has_many_lines(self) -> bool:
        data = self.waits
        if data.count(b"\n") <= MAX_HEADER_LINES:
            return False
        ends = [place for end in (b"\n\r\n", b"\n\n") if (place := data.find(end)) >= 0]
        return data.count(b"\n", 0, min(ends, default=len(data))) > MAX_HEADER_LINES

    def _objection(self, event: h11.Request) -> ApiError | None:
        if len(event.target) > MAX_TARGET_BYTES:
            return ApiError(400, f"the path is longer than {MAX_TARGET_BYTES:,} bytes")
        return self._refuse(event.target.partition(b"?")[0], list(event.headers))

    def _slips(self) -> ApiError | None:
        """Say what is wrong with the form of the body so far."""
        if self._parts > MAX_PARTS + self._size // PART_BYTES:
            return ApiError(
                400,
                f"the body comes in too many parts: {self._parts} of {self._size / self._parts:.0f} bytes on average",
            )
        # What is neither the body nor waits is framing: of chunks as above a fortieth.
        most = 2 * self._size + MAX_HEADER_BYTES
        if self.wire > most and self.wire - len(self.waits) > most:
            return ApiError(400, "the body's chunks have more framing than content")
        return None


def impatient(max_connections: int, refuse: Refuse = lambda *_: None) -> type[H11Protocol]:
    """Make the protocol of one server.

    Args:
        max_connections: Where there are as many, the one without a request for longest makes way for a new one, else
            the one that has been sending its request's body for longest: clients that send a byte now and then, or
            nothing, do not keep others out.
        refuse: Who is turned away at their headers.
    """
    idle: dict[Impatient, None] = {}
    sending: dict[Impatient, None] = {}
    turns: dict[Impatient, None] = {}
    is_due = False

    def take_turn(loop: asyncio.AbstractEventLoop) -> None:
        # One in each round of the event loop, however many wait: a loop may accept one connection a round, and
        # behind a thousand short bodies of clients that are gone already an honest one would wait for a minute.
        nonlocal is_due
        try:
            if turns:
                next(iter(turns)).go_on()
        finally:
            is_due = bool(turns)
            if is_due:
                loop.call_soon(take_turn, loop)

    def start_turns(loop: asyncio.AbstractEventLoop) -> None:
        nonlocal is_due
        is_due = True
        loop.call_soon(take_turn, loop)

    class Impatient(H11Protocol):
        deadline: asyncio.TimerHandle | None = None
        is_refused = False
        num_ahead = num_discarded = 0

        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, app_state, _loop)
            self.conn = self.meter = _Meter(MAX_HEADER_BYTES, refuse)

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            if len(self.connections) >= max_connections and (idle or sending):
                next(iter(idle or sending)).give_up()
            idle[self] = None
            self._expect(HEADERS_S)

        def data_received(self, data: bytes) -> None:
            if self.is_refused:
                self.num_discarded += len(data)
                if self.num_discarded > LINGER_BYTES:
                    self.give_up()
                return
            if self in idle:
                self._expect(HEADERS_S)
            self.meter.wire += len(data)
            if self not in turns:
                super().data_received(data)
                return
            self.meter.receive_data(data)
            self._bound()

        def handle_events(self) -> None:
            self.meter.turn = TURN_PARTS
            super().handle_events()
            if self.meter.refusal is not None:
                self._turn_away(self.meter.refusal)
            if self.is_refused or self.transport.is_closing():
                return
            if self.meter.their_state is not h11.IDLE:
                self._end()
            if self.meter.their_state is h11.SEND_BODY:
                sending[self] = None
            else:
                sending.pop(self, None)
            if self.meter.turn <= 0:
                turns[self] = None
                if not is_due:
                    start_turns(self.loop)
                self._bound()

        def send_400_response(self, msg: str) -> None:
            self._turn_away(ApiError(400, msg.rstrip(".")))

        def on_response_complete(self) -> None:
            is_ahead = self.meter.their_state is h11.DONE and bool(self.meter.waits)
            self.num_ahead = self.num_ahead + 1 if is_ahead else 0
            if self.num_ahead > MAX_AHEAD and not self.transport.is_closing():
                self._hang_up()
                return
            super().on_response_complete()
            if self.meter.their_state is h11.IDLE and not self.is_refused:
                idle[self] = None  # until its next request; uvicorn closes it after a while

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def give_up(self) -> None:
            self._forget()
            self.connections.discard(self)
            self.transport.abort()

        def go_on(self) -> None:
            del turns[self]
            if not (self.transport.is_closing() or self.is_refused):
                self.flow.resume_reading()
                self.handle_events()

        def _bound(self) -> None:
            """Read no more for now where much waits; else reading goes on, and a client that is gone is noticed."""
            if len(self.meter.waits) > MAX_HEADER_BYTES:
                self.flow.pause_reading()

        def _turn_away(self, error: ApiError) -> None:
            """Answer, and hear nothing more of this client."""
            if self.is_refused or self.transport.is_closing():
                return
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                self.give_up()  # an answer is under way, or was given
                return
            body = json.dumps(error.body()).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            start = h11.Response(
                status_code=error.status, headers=headers, reason=STATUS_PHRASES.get(error.status, b"")
            )
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
            self._hang_up()

        def _hang_up(self) -> None:
            """Close this side, and the other once the client has read the answer, or does not stop sending."""
            self._forget()
            self._unset_keepalive_if_required()
            self.is_refused = True
            idle[self] = None
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._expect(LINGER_S)

        def _expect(self, seconds: float) -> None:
            if self.deadline is None:
                self.deadline = self.loop.call_later(seconds, self.give_up)

        def _end(self) -> None:
            idle.pop(self, None)
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

        def _forget(self) -> None:
            self._end()
            sending.pop(self, None)
            turns.pop(self, None)

    return Impatient


def server_config(app: ASGIApp, refuse: Refuse, *, max_connections: int, grace_s: int, **more: Any) -> Config:
    """Return how uvicorn serves an app to strangers.

    Args:
        app: The app.
        refuse: Who is turned away at their headers.
        max_connections: Most connections; one more makes way for the next.
        grace_s: Seconds for open requests once the server is to end.
        more: Further settings of uvicorn's.
    """
    return uvicorn.Config(
        app,
        http=impatient(max_connections - 1, refuse),
        ws="none",
        lifespan="off",
        log_level="error",  # a stranger's slips are no news
        access_log=False,
        server_header=False,
        limit_concurrency=max_connections,
        timeout_graceful_shutdown=grace_s,
        **more,
    )
