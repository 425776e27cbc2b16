"""Clients that never finish their headers keep nobody else out of a server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="whet serve is an extra: pip install 'whet[web]'")
import httpx  # noqa: E402

from whet.serve import headers  # noqa: E402
from whet.serve.serve import listen  # noqa: E402

MOST = 8


async def app(scope: Any, receive: Any, send: Any) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(headers, "HEADERS_S", 1.0)
    options = uvicorn.Config(
        app,
        http=headers.impatient(MOST - 1),
        h11_max_incomplete_event_size=headers.MAX_HEADER_BYTES,
        limit_concurrency=MOST,
        lifespan="off",
        log_level="error",
        timeout_graceful_shutdown=1,
    )
    server, listener = uvicorn.Server(options), listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(30)
    listener.close()


def connected(port: int, sent: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=20)
    client.sendall(sent)
    return client


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_headers_that_trickle_keep_nobody_out(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(3 * MOST):
            stack.enter_context(connected(port, b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: "))
        for _ in range(5):
            assert httpx.get(f"http://127.0.0.1:{port}/").text == "0"
        # Nor do those that have asked once, and say nothing more.
        for _ in range(3 * MOST):
            client = stack.enter_context(connected(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"))
            assert client.recv(12) == b"HTTP/1.1 200"
        assert httpx.get(f"http://127.0.0.1:{port}/").text == "0"


def test_bodies_that_trickle_keep_nobody_out(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(3 * MOST):
            head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\na"
            stack.enter_context(connected(port, head))
            time.sleep(0.01)
        for _ in range(5):
            assert httpx.get(f"http://127.0.0.1:{port}/").text == "0"
            assert httpx.post(f"http://127.0.0.1:{port}/", content=b"a" * 10**6).text == "1000000"


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"], ids=["first", "second"])
def test_headers_have_a_deadline(first: bytes, port: int) -> None:
    with connected(port, first) as client:
        if first:
            assert client.recv(4096)
        began = time.monotonic()
        client.sendall(b"GET / HT")
        for _ in range(4):
            time.sleep(0.2)
            client.sendall(b"T")
        assert is_closed(client)
        assert 0.8 <= time.monotonic() - began < 10


def test_a_slow_body_is_no_slow_header(port: int) -> None:
    with connected(port, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 15\r\n\r\n") as client:
        for _ in range(5):
            time.sleep(0.3)
            client.sendall(b"abc")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("line", [b"X: " + b"a" * 10**7, b"X: a\r\n" * 10**6], ids=["one line", "many lines"])
def test_headers_have_a_size(line: bytes, port: int) -> None:
    with connected(port, b"GET / HTTP/1.1\r\nHost: a\r\n") as client:
        try:
            client.sendall(line)
            answer = client.recv(4096)
        except ConnectionError:
            return
        assert answer.startswith(b"HTTP/1.1 400") or answer == b""
