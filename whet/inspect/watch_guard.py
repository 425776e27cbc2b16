"""Who may ask `whet watch`: a token, the names of this machine, and the headers of every answer."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

Asgi = Callable[[Any, Any, Any], Any]
HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
DATA_POLICY = "default-src 'none'; frame-ancestors 'none'"


class Guard:
    """Stands before an application: answers only who has the token, and only under this machine's own names."""

    def __init__(self, app: Asgi, *, token: str, cookie: str, hosts: Sequence[str] | None) -> None:
        """Take the post.

        Args:
            app: The ASGI application behind it.
            token: Secret of the address; a page that was opened with it gets it as a cookie.
            cookie: Name of the cookie.
            hosts: Names that a request may call this machine by, against sites whose name is made to lead here;
                None permits addresses in numbers, too, for a server that others may reach.
        """
        self._app = app
        self._token = token
        self._cookie = cookie
        self._hosts = hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Let one request through, or refuse it."""
        assert scope["type"] == "http"  # the server is started without the other protocols
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        extra = dict(HEADERS)
        if not self._is_named(headers.get("host", "")):
            await self._refuse(send, 421, "this name does not lead to a whet watch")
        elif scope["method"] not in ("GET", "HEAD"):
            await self._refuse(send, 405, "only reading is possible here")
        elif self._fits(given):
            extra["set-cookie"] = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            await self._app(scope, receive, _adding(send, extra))
        elif self._fits(_cookie(headers.get("cookie", ""), self._cookie)):
            await self._app(scope, receive, _adding(send, extra))
        else:
            await self._refuse(send, 403, "open the address that the terminal printed, with its token")

    def _fits(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self._token.encode())

    def _is_named(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.strip("[]").lower()
        if self._hosts is not None:
            return name in self._hosts
        return name == "localhost" or is_address(name)

    async def _refuse(self, send: Any, status: int, why: str) -> None:
        headers = {
            **HEADERS,
            "content-type": "text/plain; charset=utf-8",
            "content-security-policy": DATA_POLICY,
        }
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": f"whet watch: {why}\n".encode()})


def is_address(text: str) -> bool:
    """Say whether a text is an IP address in numbers."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _cookie(header: str, name: str) -> str:
    """Return the value of a cookie, '' without it; those of other programs on this machine may look like anything."""
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return next((value for key, _, value in pairs if key == name), "")


def _adding(send: Any, extra: Mapping[str, str]) -> Any:
    """Return a `send` that adds headers to an answer."""

    async def add(message: Any) -> None:
        if message["type"] == "http.response.start":
            pairs = [(name.encode(), value.encode()) for name, value in extra.items()]
            message = {**message, "headers": [*message.get("headers", []), *pairs]}
        await send(message)

    return add
