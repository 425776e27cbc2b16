"""Asking an OpenAI-compatible chat server: many requests at once, patient with its hiccups, within a budget."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, cast

from whet.install import install_command
from whet.types import UserError

if TYPE_CHECKING:
    import openai

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
    """What judging took so far.

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
    """A chat server that several threads ask at once, through openai's client. No proxy is used, no redirect followed.

    Each request has `timeout_s` to its last byte, and up to `retries` repetitions with exponential backoff and jitter,
    never sooner than a Retry-After of the server's says. The client's own repetitions are switched off: they would be
    neither counted nor held against the budget.
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

        Raises:
            UserError: If the extra `judge` is not installed.
        """
        self._url = url.rstrip("/")
        self._model = model
        self._key = key
        self._meter = meter
        self._timeout_s = timeout_s
        self._retries = retries
        self._max_reply_tokens = max_reply_tokens
        self._backoff_s = backoff_s
        self._client = self._make_client()
        self._slots = asyncio.Semaphore(concurrency)
        self._ended = asyncio.Event()
        self._closing = asyncio.Event()
        self._end_reason = ""
        self._answered = False
        self._failures_in_a_row = 0
        self._lock = threading.Lock()  # nothing is submitted to a loop that closes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="judge", daemon=True)
        self._thread.start()

    def ask_all(self, messages: Sequence[tuple[str, str]]) -> Iterator[tuple[int, str | None]]:
        """Ask about every (system, user) pair at once.

        Args:
            messages: The pairs.

        Yields:
            Place and reply as they arrive: '' for one cut off by the token limit, None when the request failed.

        Raises:
            UserError: If the budget is spent or the server refuses; after the replies that were under way.
        """
        with self._lock:
            if messages and self._end_reason:
                raise UserError(self._end_reason)
            futures = {
                asyncio.run_coroutine_threadsafe(self._ask(*pair), self._loop): place
                for place, pair in enumerate(messages)
            }
        try:
            for future in as_completed(futures):
                if not future.cancelled() and future.exception() is None:
                    yield futures[future], future.result()
        finally:
            for waiting in futures:
                waiting.cancel()
        for future in futures:
            if future.cancelled():
                raise UserError(self._end_reason)
            future.result()

    def close(self) -> None:
        """End at once: break off requests that are under way and wake those that wait."""
        with self._lock:
            if not self._closing.is_set() and self._thread.is_alive():
                self._end_reason = self._end_reason or "the judge was closed"
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _make_client(self) -> openai.AsyncOpenAI:
        try:
            import openai
        except ImportError:
            raise UserError(f"a judge at a server needs openai: {install_command('judge')}") from None
        # What stands in the environment for openai.com is not sent to another server.
        left_out = ("OpenAI-Organization", "OpenAI-Project", *(() if self._key else ("Authorization",)))
        self._headers = dict.fromkeys(left_out, cast(str, openai.Omit()))
        return openai.AsyncOpenAI(
            base_url=self._url,
            api_key=self._key or "none",
            max_retries=0,
            timeout=None,  # of each read; `_post` limits the whole
            http_client=openai.DefaultAsyncHttpxClient(
                trust_env=False, follow_redirects=False, event_hooks={"response": [_refuse_huge]}
            ),
        )

    async def _live(self) -> None:
        await self._closing.wait()  # what is under way then is cancelled by the runner
        await self._client.close()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    def _end(self, reason: str) -> UserError:
        """Let every later or waiting request fail with this reason; the first reason stays."""
        self._end_reason = self._end_reason or reason
        self._ended.set()
        return UserError(self._end_reason)

    async def _ask(self, system: str, user: str) -> str | None:
        async with self._slots:
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
                    reply, num_tokens = await self._post(system, user)
                except _ItemError as error:
                    reason = str(error)
                    break
                except _PassingError as error:
                    reason = str(error)
                    if attempt < self._retries:
                        pause_s = self._backoff_s * 2**attempt * random.uniform(0.5, 1.5)
                        with suppress(TimeoutError):  # the end of the endpoint ends the pause
                            await asyncio.wait_for(
                                self._ended.wait(), min(max(pause_s, error.wait_s), MAX_WAIT_S)
                            )
                    continue
                self._meter.add(tokens=num_tokens or estimated_tokens(system, user, reply))
                self._answered, self._failures_in_a_row = True, 0
                return reply
            self._meter.add(failures=1)
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise self._end(
                    f"judge at {self._url}: {self._failures_in_a_row} requests in a row failed, the last one: {reason}"
                )
            return None

    async def _post(self, system: str, user: str) -> tuple[str, int]:
        """Send one request; return its reply and token count (0: not told)."""
        import openai

        try:
            async with asyncio.timeout(self._timeout_s):
                completion = await self._client.chat.completions.create(
                    model=self._model,
                    messages=[
                        {"role": "system", "content": _encodable(system)},
                        {"role": "user", "content": _encodable(user)},
                    ],
                    temperature=0,
                    max_tokens=self._max_reply_tokens,
                    extra_headers=self._headers,
                )
            return _read_reply(completion)
        except TimeoutError:
            raise _PassingError(f"no answer within judge.timeout_s = {self._timeout_s:g}") from None
        except openai.APIStatusError as error:
            raise self._refusal(error.response) from None
        except openai.APIConnectionError as error:
            cause = _root(error)
            why = self._clean(str(cause) or type(cause).__name__)
            if isinstance(cause, ConnectionRefusedError):  # asyncio writes "Connect call failed"
                why = "connection refused"
            if isinstance(cause, FIRST_CONTACT) and not self._answered:
                raise self._end(
                    f"judge.url {self._url}: no connection ({why}): start the server, for example "
                    f"'vllm serve {self._model}', or mend judge.url"
                ) from None
            raise _PassingError(f"connection broke ({why})") from None
        except (ValueError, RecursionError, AttributeError, LookupError, TypeError) as error:
            raise _PassingError(f"not a chat completion: {self._clean(str(error))}") from None

    def _refusal(self, response: Any) -> Exception:
        """Say what a status other than 200 means: the end, another try, or none for this item."""
        status, headers = response.status_code, response.headers
        said = f"status {status}: {self._clean(response.text)}"
        if 300 <= status < 400:
            target = self._clean(headers.get("Location", ""))
            return self._end(
                f"judge.url {self._url} redirects to {target}: not followed; give the final address"
            )
        if status in REFUSALS:
            return self._end(f"judge at {self._url}: {REFUSALS[status]} ({said})")
        if status >= 500 or status in RETRIED:
            return _PassingError(said, _retry_after(headers.get("Retry-After", "")))
        return _ItemError(said)

    def _clean(self, text: str) -> str:
        """Quote what a server wrote for an error line: short, without control characters and without the key."""
        return repr(text.replace(self._key, "***") if self._key else text)[:300]


async def _refuse_huge(response: Any) -> None:
    """Stop before a body is read that is no chat completion."""
    if int(response.headers.get("Content-Length", 0)) > MAX_REPLY_BYTES:
        raise _ItemError(f"the answer is larger than {MAX_REPLY_BYTES} bytes")


def _root(error: BaseException) -> BaseException:
    """Return the error that a chain of errors began with."""
    while inner := error.__cause__ or error.__context__:
        error = inner
        if isinstance(error, BaseExceptionGroup):  # one for each address of a host
            error = error.exceptions[0]
    return error


def estimated_tokens(*texts: str) -> int:
    """Estimate tokens as 4 characters each."""
    return sum(map(len, texts)) // 4


def _read_reply(completion: Any) -> tuple[str, int]:
    """Return text and token count of what should be a chat completion; any of several errors when it is none."""
    choice = completion.choices[0]
    text = choice.message.content
    if not isinstance(text, str | None):
        raise TypeError
    total = getattr(completion.usage, "total_tokens", 0)
    num_tokens = total if isinstance(total, int) and 0 <= total < 1 << 40 else 0
    return "" if choice.finish_reason == "length" else text or "", num_tokens


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
