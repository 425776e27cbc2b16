"""Deadlines and limits of what clients send before their request is known: headers and bodies that trickle, or never
end."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 10.0
"""Seconds from a connection, or from the first byte of a later request on it, to the end of the request's headers."""
MAX_HEADER_BYTES = 64 * 1024
"""Of a request's first line and headers together; h11 refuses more while they arrive."""


def impatient(max_connections: int) -> type[H11Protocol]:
    """Make the protocol of one server: it closes connections that keep it waiting for their headers.

    Args:
        max_connections: Where there are as many, the one without a request for longest makes way for a new one, else
            the one that has been sending its request's body for longest: clients that send a byte now and then, or
            nothing, do not keep others out.
    """
    idle: dict[Impatient, None] = {}
    sending: dict[Impatient, None] = {}

    class Impatient(H11Protocol):
        deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            if len(self.connections) >= max_connections and (idle or sending):
                next(iter(idle or sending)).give_up()
            idle[self] = None
            self._expect()

        def data_received(self, data: bytes) -> None:
            if self in idle:
                self._expect()
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._end()
            if self.conn.their_state is h11.SEND_BODY:
                sending[self] = None
            else:
                sending.pop(self, None)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            idle[self] = None  # until its next request; uvicorn closes it after a while

        def connection_lost(self, exc: Exception | None) -> None:
            self._end()
            sending.pop(self, None)
            super().connection_lost(exc)

        def give_up(self) -> None:
            self._end()
            sending.pop(self, None)
            self.connections.discard(self)
            self.transport.abort()

        def _expect(self) -> None:
            if self.deadline is None:
                self.deadline = self.loop.call_later(HEADERS_S, self.give_up)

        def _end(self) -> None:
            idle.pop(self, None)
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

    return Impatient
