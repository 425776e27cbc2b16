"""Clients that never finish their headers keep nobody else out of a server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="whet serve is an extra: pip install 'whet-rl[web]'")
import h11  # noqa: E402
import httpx  # noqa: E402

from whet.serve import headers  # noqa: E402
from whet.serve.api import Guard  # noqa: E402
from whet.serve.serve import LOCAL, listen  # noqa: E402

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
    yield from running(headers.server_config(app, lambda *_: None, max_connections=MOST, grace_s=1))


def running(options: uvicorn.Config) -> Iterator[int]:
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
        answer = b""
        while first and not answer.endswith(b"0\r\n\r\n"):  # some loops send it in parts
            answer += client.recv(4096)
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


KEY = b"Authorization: Bearer secret\r\n"


@pytest.fixture
def guarded() -> Iterator[int]:
    """A server with a key, whose app says how large a body was."""
    guard = Guard(app, api_key="secret", hosts=frozenset())
    yield from running(headers.server_config(guard, guard.refuse, max_connections=64, grace_s=1))


def head(path: str = "/v1/x", more: bytes = b"", method: str = "POST") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: a\r\n".encode() + more + b"\r\n"


CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNK = b"1\r\na\r\n"


def answers(client: socket.socket) -> bytes:
    """All that comes until the server closes its side."""
    found = b""
    while part := client.recv(65536):
        found += part
    return found


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "sent",
    [
        head(more=b"Content-Length: 1000000\r\n"),
        head(more=CHUNKED + b"Authorization: Bearer wrong\r\n"),
        head(more=b"Authorization: Basic secret\r\n"),
        head("/v1/models", method="GET"),
        head("/health", CHUNKED, "GET"),  # what needs no key takes no body
    ],
)
def test_who_has_no_key_is_answered_at_the_headers_and_hung_up_on(sent: bytes, guarded: int) -> None:
    with connected(guarded, sent) as client:
        for _ in range(20):  # it goes on sending, and sees the answer
            client.sendall(CHUNK * 100)
        reply = answers(client)
        status = b"400" if b"/health" in sent else b"401"
        assert reply.startswith(b"HTTP/1.1 " + status)
        assert b"connection: close" in reply
        assert reply.endswith(b"}")  # one answer, whatever came after it
        assert lasts(client) < 5


def lasts(client: socket.socket) -> float:
    """Seconds until nothing can be sent any more; 10 at most."""
    began = time.monotonic()
    while (took := time.monotonic() - began) < 10:
        try:
            client.sendall(CHUNK)
        except ConnectionError:
            break
        time.sleep(0.05)
    return took


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER   "])
def test_the_schemes_name_has_no_case(scheme: bytes, guarded: int) -> None:
    more = b"Authorization: " + scheme + b"secret\r\nConnection: close\r\nContent-Length: 2\r\n"
    with connected(guarded, head(more=more) + b"ab") as client:
        assert b"\r\n2\r\n" in answers(client)


def chunks(text: bytes, size: int) -> bytes:
    rows = [text[at : at + size] for at in range(0, len(text), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(row), row) for row in rows) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (chunks(b"a" * 200, 1), b"\r\n200\r\n"),  # a few small ones are nobody's harm
        (chunks(b"a" * 10**6, 300), b"\r\n1000000\r\n"),
        (chunks(b"a" * 10**6, 9), b"too many parts: "),
        (chunks(b"a" * 600_000, 1), b"too many parts: "),
        ((b"1;" + b"x" * 30_000 + b"\r\na\r\n") * 9, b"more framing than content"),
    ],
    ids=["few", "long", "short", "bytes", "extensions"],
)
def test_chunks_and_bytes_on_the_wire_are_counted(body: bytes, expected: bytes, guarded: int) -> None:
    with connected(guarded, head(more=KEY + CHUNKED + b"Connection: close\r\n")) as client:
        client.sendall(body)
        reply = answers(client)
        assert expected in reply
        assert reply.startswith(b"HTTP/1.1 200" if expected.startswith(b"\r\n") else b"HTTP/1.1 400")


def test_few_requests_are_taken_ahead_of_the_answer(guarded: int) -> None:
    ask, last = head("/health", method="GET"), head("/health", b"Connection: close\r\n", "GET")
    for count in (headers.MAX_AHEAD, 5000):
        with connected(guarded, ask * count + last) as client:
            assert answers(client).count(b"HTTP/1.1 200") == headers.MAX_AHEAD + 1


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c"])
def test_no_protocol_is_switched_to(upgrade: bytes, guarded: int) -> None:
    more = b"Connection: Upgrade\r\nUpgrade: " + upgrade + b"\r\nSec-WebSocket-Version: 13\r\n"
    with connected(guarded, head("/v1/x", more + b"Sec-WebSocket-Key: YQ==\r\n", "GET")) as client:
        assert answers(client).startswith(b"HTTP/1.1 401")


def test_a_turn_is_short() -> None:
    """A body of many parts is parsed a few at a time, however many have come."""
    meter = headers._Meter(headers.MAX_HEADER_BYTES, lambda *_: None)
    meter.receive_data(head(more=CHUNKED) + chunks(b"a" * 100, 1))
    parts = []
    while meter.their_state is not h11.DONE:
        meter.turn, found = headers.TURN_PARTS, 0
        while (event := meter.next_event()) is not h11.NEED_DATA and meter.their_state is not h11.DONE:
            found += isinstance(event, h11.Data)
        parts.append(found)
    assert parts == [8] * 12 + [4]


@pytest.mark.parametrize(
    ("host", "is_taken"),
    [
        ("localhost", True),
        ("LocalHost:8000", True),
        ("127.0.0.1:1", True),
        ("[::1]:8000", True),
        ("localhost:", True),
        ("localhost:evil.com", False),
        ("localhost:80:evil.com", False),
        ("[localhost]", False),
        ("evil.com", False),
        ("localhost.evil.com", False),
        ("evil.com#localhost", False),
        ("localhost/health", False),
        ("user@localhost", False),
        ("", False),
    ],
)
def test_only_names_of_this_machine_are_answered(host: str, is_taken: bool) -> None:
    guard = Guard(app, api_key="", hosts=LOCAL)
    error = guard.refuse(b"/v1/models", [(b"host", host.encode())])
    assert (error is None) == is_taken
    assert error is None or error.status == 403
