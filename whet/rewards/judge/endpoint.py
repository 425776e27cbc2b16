"""Asking an OpenAI-compatible chat server: many requests at once, patient with its hiccups, within a budget."""

from __future__ import annotations

import http.client
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from whet.types import UserError

MAX_REPLY_BYTES = 1 << 20
"""A larger answer is no chat completion."""

MAX_WAIT_S = 120.0
"""Longest pause before a retry, whatever the server asks for."""

MAX_FAILURES_IN_A_ROW = 16
"""Requests that failed for good, none succeeding between them, after which the run stops."""

REFUSALS = {
    401: "the key was refused; set the variable that judge.api_key_env names",
    402: "the account has no credit",
    403: "access was refused; look at the key and its rights",
    404: "no such address or model; look at judge.url (it ends before /chat/completions) and judge.model",
    405: "not a chat endpoint; look at judge.url (it ends before /chat/completions)",
}
"""Statuses that no later request can mend."""

RETRIED = (408, 409, 425, 429)
"""Statuses besides 5xx that are worth another try."""

FIRST_CONTACT = (ConnectionRefusedError, socket.gaierror, ssl.SSLError)
"""Errors that end the run at once when the server never answered before."""


@dataclass(frozen=True, slots=True)
class JudgeStats:
    """What judging took so far, in this process.

    Attributes:
        requests: Requests sent, retries included.
        cache_hits: Items that needed no request of their own: judged before, or equal to another item.
        retries: Requests that were sent again after an error, and reminders after an unreadable verdict.
        failures: Items without a score because their requests failed; asked again when they come again.
        unscorable: Items without a score because the judge gave none in the form asked for.
        tokens: Tokens of prompts and replies as the server counts them, else estimated as 4 characters each.
        corrupt_lines: Lines of the cache file that could not be read.
    """

    requests: int = 0
    cache_hits: int = 0
    retries: int = 0
    failures: int = 0
    unscorable: int = 0
    tokens: int = 0
    corrupt_lines: int = 0


class Meter:
    """Counts what judging takes and ends it when the budget is spent. Threads may share it."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        """Set the budget; 0 is no limit."""
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self._stats = JudgeStats()
        self._lock = threading.Lock()

    @property
    def stats(self) -> JudgeStats:
        """The counts so far."""
        return self._stats

    def add(self, **counts: int) -> None:
        """Add to counts, by name."""
        with self._lock:
            old = self._stats
            self._stats = replace(old, **{name: getattr(old, name) + count for name, count in counts.items()})

    def take(self, num_requests: int = 1) -> None:
        """Count requests that are about to be sent.

        Raises:
            UserError: If the budget does not allow them; then none is counted.
        """
        with self._lock:
            spent = self._stats
            if self.max_requests and spent.requests + num_requests > self.max_requests:
                name, limit = "max_requests", self.max_requests
            elif self.max_tokens and spent.tokens >= self.max_tokens:
                name, limit = "max_tokens", self.max_tokens
            else:
                self._stats = replace(spent, requests=spent.requests + num_requests)
                return
        raise UserError(
            f"judge.{name} = {limit} is spent ({spent.requests} requests, {spent.tokens} tokens): the run stops here. "
            "Scores so far are in the cache; go on with --resume (each start has the budget anew)"
        )


class _PassingError(Exception):
    """The request failed in a way that may pass."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class _ItemError(Exception):
    """The server refuses this one request; others may pass."""


class ChatEndpoint:
    """A chat server that several threads ask at once. No proxy is used and no redirect followed.

    Each request has a connection of its own, `timeout_s` to its last byte, and up to `retries` repetitions with
    exponential backoff and jitter, never sooner than a Retry-After of the server's says.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key: str | None,
        *,
        meter: Meter,
        timeout_s: float,
        retries: int,
        concurrency: int,
        max_reply_tokens: int,
        backoff_s: float = 0.5,
    ) -> None:
        """Prepare; nothing is sent.

        Args:
            url: Base address, such as http://localhost:8000/v1.
            model: Name of the model at the server.
            key: Sent as bearer token; it enters no message.
            meter: Counts requests and tokens.
            timeout_s: Seconds for one request.
            retries: Repetitions of a failed request.
            concurrency: Requests under way at once.
            max_reply_tokens: Longest reply.
            backoff_s: Pause before the first repetition; it doubles each time.
        """
        self._url = url.rstrip("/")
        self._model = model
        self._key = key
        self._meter = meter
        self._timeout_s = timeout_s
        self._retries = retries
        self._max_reply_tokens = max_reply_tokens
        self._backoff_s = backoff_s
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="judge")
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._ended = threading.Event()
        self._end_reason = ""
        self._answered = False
        self._failures_in_a_row = 0

    def ask_all(self, messages: Sequence[tuple[str, str]]) -> Iterator[tuple[int, str | None]]:
        """Ask about every (system, user) pair at once.

        Args:
            messages: The pairs.

        Yields:
            Place and reply as they arrive: '' for one cut off by the token limit, None when the request failed.

        Raises:
            UserError: If the budget is spent or the server refuses; after the replies that were under way.
        """
        futures = {self._pool.submit(self._ask, *pair): place for place, pair in enumerate(messages)}
        try:
            for future in as_completed(futures):
                if not future.cancelled() and future.exception() is None:
                    yield futures[future], future.result()
                elif self._end_reason:
                    for waiting in futures:
                        waiting.cancel()
        finally:
            for waiting in futures:
                waiting.cancel()
        for future in futures:
            if future.cancelled():
                raise UserError(self._end_reason)
            future.result()

    def close(self) -> None:
        """End at once: break off requests that are under way and wake those that wait."""
        self._end("the judge was closed")
        with self._lock:
            for connected in self._sockets:
                with suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)
        self._pool.shutdown(wait=False)  # those that wait find the reason and raise it

    def _end(self, reason: str) -> UserError:
        """Let every later or waiting request fail with this reason; the first reason stays."""
        with self._lock:
            self._end_reason = self._end_reason or reason
        self._ended.set()
        return UserError(self._end_reason)

    def _ask(self, system: str, user: str) -> str | None:
        roles = (("system", system), ("user", user))
        body = {
            "model": self._model,
            "messages": [{"role": role, "content": _encodable(text)} for role, text in roles],
            "temperature": 0,
            "max_tokens": self._max_reply_tokens,
        }
        data = json.dumps(body).encode("ascii")
        reason = ""
        for attempt in range(self._retries + 1):
            if self._end_reason:
                raise UserError(self._end_reason)
            try:
                self._meter.take()
            except UserError as error:
                raise self._end(str(error)) from None
            self._meter.add(retries=int(attempt > 0))
            try:
                reply, num_tokens = self._post(data)
            except _ItemError as error:
                reason = str(error)
                break
            except _PassingError as error:
                reason = str(error)
                pause_s = self._backoff_s * 2**attempt * random.uniform(0.5, 1.5)
                if attempt < self._retries:
                    self._ended.wait(min(max(pause_s, error.wait_s), MAX_WAIT_S))
                continue
            self._meter.add(tokens=num_tokens or estimated_tokens(system, user, reply))
            with self._lock:
                self._answered, self._failures_in_a_row = True, 0
            return reply
        self._meter.add(failures=1)
        with self._lock:
            self._failures_in_a_row += 1
            in_a_row = self._failures_in_a_row
        if in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise self._end(
                f"judge at {self._url}: {in_a_row} requests in a row failed, the last one: {reason}"
            )
        return None

    def _post(self, data: bytes) -> tuple[str, int]:
        """Send one request; return its reply and token count (0: not told)."""
        try:
            status, headers, raw = self._exchange(data)
        except FIRST_CONTACT as error:
            if not self._answered:
                raise self._end(
                    f"judge.url {self._url}: no connection ({error.strerror or error}): start the server, for example "
                    f"'vllm serve {self._model}', or mend judge.url"
                ) from None
            raise _PassingError(f"no connection ({error.strerror or error})") from None
        except TimeoutError:
            raise _PassingError(f"no answer within judge.timeout_s = {self._timeout_s:g}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _PassingError(
                f"connection broke ({self._clean(str(error) or type(error).__name__)})"
            ) from None
        if len(raw) > MAX_REPLY_BYTES:
            raise _ItemError(f"the answer is larger than {MAX_REPLY_BYTES} bytes")
        said = f"status {status}: {self._clean(raw.decode('utf-8', 'replace'))}"
        if 300 <= status < 400:
            target = self._clean(headers.get("Location", ""))
            raise self._end(
                f"judge.url {self._url} redirects to {target}: not followed; give the final address"
            )
        if status in REFUSALS:
            raise self._end(f"judge at {self._url}: {REFUSALS[status]} ({said})")
        if status >= 500 or status in RETRIED:
            raise _PassingError(said, _retry_after(headers.get("Retry-After", "")))
        if status != 200:
            raise _ItemError(said)
        try:
            return _read_reply(raw)
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise _PassingError(
                f"not a chat completion: {self._clean(raw.decode('utf-8', 'replace'))}"
            ) from None

    def _exchange(self, data: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Return status, headers and at most one byte more than the permitted body."""
        deadline = time.monotonic() + self._timeout_s
        parts = urlsplit(self._url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port or kind.default_port, timeout=self._timeout_s)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        connected = None
        try:
            connection.connect()
            connected = connection.sock
            with self._lock:
                self._sockets.add(connected)
            connection.request("POST", f"{parts.path}/chat/completions", data, headers)
            response = connection.getresponse()
            raw = b""
            while len(raw) <= MAX_REPLY_BYTES:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                connected.settimeout(left_s)
                part = response.read1(MAX_REPLY_BYTES + 1 - len(raw))
                if not part:
                    break
                raw += part
            return response.status, response.headers, raw
        finally:
            with self._lock:
                self._sockets.discard(connected)  # pyright: ignore[reportArgumentType]
            connection.close()

    def _clean(self, text: str) -> str:
        """Quote what a server wrote for an error line: short, without control characters and without the key."""
        return repr(text.replace(self._key, "***") if self._key else text)[:300]


def estimated_tokens(*texts: str) -> int:
    """Estimate tokens as 4 characters each."""
    return sum(map(len, texts)) // 4


def _read_reply(raw: bytes) -> tuple[str, int]:
    """Return text and token count of a chat completion; any of several errors when it is none."""
    answer = json.loads(raw)
    choice = answer["choices"][0]
    text = choice["message"]["content"]
    if not isinstance(text, str | None):
        raise TypeError
    total = (answer.get("usage") or {}).get("total_tokens", 0)
    num_tokens = total if isinstance(total, int) and 0 <= total < 1 << 40 else 0
    return "" if choice.get("finish_reason") == "length" else text or "", num_tokens


def _retry_after(text: str) -> float:
    """Return the seconds that a Retry-After header asks for, given as such or as a date; 0 when it is neither."""
    if text.isascii() and text.isdigit():
        return float(text[:6])
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def _encodable(text: str) -> str:
    r"""Write lone surrogates as \udXXX in the text itself: servers refuse their JSON escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
