"""Print how long an honest client of `whet serve` waits while others flood the server, on this machine alone.

python bench/reliability/floods.py [--minutes M] [--floods NAME ...] [--model FOLDER] [--json FILE]
python bench/reliability/floods.py --beside [--rounds N] [--model FOLDER] [--json FILE]

Each flood runs for M minutes in a process of its own against one server, at 127.0.0.1. Beside it an honest client asks
for one token again and again, each time on a new connection, and reads one stream after the other. Exit status 1 if one
of its requests fails, or if its median is above `--limit`, but for floods with the key that keep all rows busy: there
all wait for their turn.

With --beside, the time between the tokens of one stream: alone, and while each of four crowds comes and is served once.
Exit status 1 if its mean beside one of them is more than `MOST` times what it is alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import torch

from whet.generate.policy import Policy
from whet.model.config import ModelConfig
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model
from whet.processes import end_with_parent, start
from whet.schema import SCHEMAS

HOST, KEY = "127.0.0.1", "honest"
CONTEXT = 4096
SERVE = (
    "import sys; from whet.serve.serve import *; "
    "main(ServeConfig(policy=PolicyConfig(init=sys.argv[1], num_threads=1, max_rows=64), name='model', port=0, "
    "api_key=sys.argv[2]))"
)
PAUSE_S = 0.05
LONGEST_S = 60.0
"""An honest request that takes longer has failed."""
STREAM_TOKENS = 48
START_S = 300.0
ALONE_S = 2.0
"""How long the stream is alone before a crowd comes."""
BESIDE_TOKENS = 3000
MOST = 3.0


def save_model(folder: Path) -> None:
    """Save a model of a million weights that reads 4,096 tokens and never ends early."""
    tokenizer = Tokenizer.bytes()
    shape = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_positions=CONTEXT,
        tie_embeddings=False,
    )
    model = build_model(shape)
    init_weights(model, 0)
    with torch.no_grad():
        model.head_weight[tokenizer.eos_id] = 0.0  # greedy decoding does not draw it
    Policy(model, tokenizer, SCHEMAS["think_answer"], system_prompt=False).save(folder)


# --- floods ---------------------------------------------------------------------------------------------------------


class Wire:
    """One connection of a flood; everything that fails is the server's good right."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Wire:
        self.reader, self.writer = await asyncio.open_connection(HOST, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await asyncio.wait_for(self.writer.drain(), 5)


def head(path: str, more: str = "", *, key: str = KEY, method: str = "POST") -> bytes:
    lines = f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {key}\r\n"
    return f"{lines}Content-Type: application/json\r\n{more}\r\n".encode()


def whole(path: str, body: dict[str, Any] | bytes, *, key: str = KEY) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(path, f"Content-Length: {len(data)}\r\nConnection: close\r\n", key=key) + data


TEXT = "/v1/completions"
CHUNKED = "Transfer-Encoding: chunked\r\n"
CHUNK = b"1\r\n \r\n"


def ask(prompt: str | list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}


async def pour(port: int, start: bytes, part: bytes, count: int) -> None:
    """Send a start, and many parts, and never mind the answer."""
    async with Wire(port) as wire:
        await wire.send(start)
        for _ in range(max(1, count // 1000)):
            await wire.send(part * min(count, 1000))


async def trickle(port: int, start: bytes, part: bytes) -> None:
    """Send a byte now and then."""
    async with Wire(port) as wire:
        await wire.send(start)
        for _ in range(60):
            await wire.send(part)
            await asyncio.sleep(0.5)


async def read_all(port: int, request: bytes) -> None:
    """Send a request and wait for all of its answer."""
    async with Wire(port) as wire:
        await wire.send(request)
        await asyncio.wait_for(wire.reader.read(-1), LONGEST_S)


async def leave(port: int) -> None:
    """Begin a stream and go away."""
    async with Wire(port) as wire:
        await wire.send(whole(TEXT, ask("a", 1000, stream=True)))
        await asyncio.wait_for(wire.reader.readuntil(b"data: {"), LONGEST_S)


async def idle(port: int) -> None:
    """Say nothing."""
    async with Wire(port) as wire:
        await asyncio.wait_for(wire.reader.read(1), 30)


LONG = [65 + place % 26 for place in range(3031)]
NESTED = b'{"model": "model", "prompt": ' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}"
WIDE = b'{"model": "model", "prompt": [' + b"1," * 1_900_000 + b"1]}"
LINES = b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"a:b\r\n" * 12_000
UPGRADE = "Connection: Upgrade\r\nUpgrade: %s\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: YQ==\r\n"
JUNK = (
    head("/", UPGRADE % "websocket", key="x", method="GET") + b"\x81\x85" * 5000,
    head("/health", UPGRADE % "h2c", method="GET") + b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 5000,
    b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n" * 100,
)


class Flood(NamedTuple):
    """Clients that do one thing again and again.

    Attributes:
        num_clients: How many at a time.
        act: What each does, given the port and a number.
        fills_rows: Whether it has the key and keeps all rows busy.
        seconds: As a crowd, how long it goes on; 0 if each client does its thing once.
    """

    num_clients: int
    act: Callable[[int, int], Awaitable[None]]
    fills_rows: bool = False
    seconds: float = 0.0


FLOODS: dict[str, Flood] = {
    "nothing": Flood(0, lambda port, _: idle(port)),
    "wrong key, one-byte chunks": Flood(
        4, lambda port, _: pour(port, head(TEXT, CHUNKED, key="x"), CHUNK, 200_000)
    ),
    "key, one-byte chunks": Flood(8, lambda port, _: pour(port, head(TEXT, CHUNKED), CHUNK, 600_000)),
    "/health with one-byte chunks": Flood(
        8, lambda port, _: pour(port, head("/health", CHUNKED, key="x", method="GET"), CHUNK, 200_000)
    ),
    "pipelined /health": Flood(
        8, lambda port, _: pour(port, b"", head("/health", key="x", method="GET"), 100_000)
    ),
    "key, small packets": Flood(8, lambda port, _: pour(port, head(TEXT, CHUNKED), b"2\r\n  \r\n", 1000)),
    "wrong keys at a high rate": Flood(
        32, lambda port, _: read_all(port, whole(TEXT, ask("a", 1), key="wrong"))
    ),
    "headers that trickle": Flood(400, lambda port, _: trickle(port, b"GET / HTTP/1.1\r\nX: ", b"a")),
    "bodies that trickle": Flood(
        400, lambda port, _: trickle(port, head(TEXT, "Content-Length: 999\r\n"), b" ")
    ),
    "idle connections": Flood(900, lambda port, _: idle(port)),
    "giant headers": Flood(16, lambda port, _: pour(port, b"", LINES, 1)),
    "one giant header": Flood(16, lambda port, _: pour(port, b"GET / HTTP/1.1\r\nX: ", b"a" * 60_000, 1)),
    "nested JSON of 4 MB": Flood(4, lambda port, _: read_all(port, whole(TEXT, NESTED))),
    "wide JSON of 4 MB": Flood(4, lambda port, _: read_all(port, whole(TEXT, WIDE))),
    "upgrades and other protocols": Flood(16, lambda port, place: read_all(port, JUNK[place % len(JUNK)])),
    "32 streams that are left": Flood(32, lambda port, _: leave(port)),
    "four clients of one token": Flood(4, lambda port, _: read_all(port, whole(TEXT, ask("a", 1)))),
    "long prompts": Flood(4, lambda port, _: read_all(port, whole(TEXT, ask(LONG, 1)))),
    "long texts to score": Flood(
        4, lambda port, _: read_all(port, whole(TEXT, ask(LONG, 0, echo=True, logprobs=1)))
    ),
    "250 requests at once": Flood(
        250, lambda port, _: read_all(port, whole(TEXT, ask("a", 16))), fills_rows=True
    ),
}


CROWDS: dict[str, Flood] = {
    "four clients of one token": FLOODS["four clients of one token"]._replace(seconds=5.0),
    "one prompt of 3,031 tokens": FLOODS["long prompts"]._replace(num_clients=1),
    "250 requests at once": FLOODS["250 requests at once"],
    "32 cancelled streams": FLOODS["32 streams that are left"],
}
"""What comes beside a stream with --beside."""


def run_flood(name: str, port: int, seconds: float, count: Any, times: Any, begun: Any, go: Any) -> None:
    """Say that all is ready, wait for `go`, and run a flood; count what its clients did, and note when.

    It goes on for so many seconds; with 0 each client does its thing once.
    """
    end_with_parent()
    flood = (FLOODS | CROWDS)[name]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65536), most))

    begun.set()
    go.wait()
    times[0] = time.monotonic()
    end = times[0] + (seconds or LONGEST_S)

    async def client(place: int) -> None:
        while (left := end - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    await flood.act(port, place)
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.001)
            count.value += 1
            if not seconds:
                return

    async def everyone() -> None:
        await asyncio.gather(*(client(place) for place in range(flood.num_clients)))

    asyncio.run(everyone())
    times[1] = time.monotonic()


@contextmanager
def flooding(name: str, port: int, seconds: float) -> Iterator[tuple[Any, Any, Any]]:
    """Start the process of a flood, ready to begin; give its count, its times, and what lets it begin."""
    context = multiprocessing.get_context("spawn")
    count, times = context.Value("q", 0), context.Array("d", 2)
    begun, go = context.Event(), context.Event()
    process = context.Process(
        target=run_flood, args=(name, port, seconds, count, times, begun, go), daemon=True
    )
    process.start()
    try:
        if not begun.wait(START_S):
            raise RuntimeError(f"a flood did not begin within {START_S:g} s")
        yield count, times, go
        process.join(2 * LONGEST_S)
    finally:
        if process.is_alive():
            process.kill()


# --- the honest client ----------------------------------------------------------------------------------------------


class Honest:
    """Asks for one token again and again, and reads streams; notes how long that takes.

    Attributes:
        waits: Seconds of each request for one token.
        gaps: When each token of a stream came, and how long after the one before.
    """

    def __init__(self, port: int, stream_tokens: int = STREAM_TOKENS) -> None:
        self._port, self._stream_tokens = port, stream_tokens
        self.waits: list[float] = []
        self.gaps: list[tuple[float, float]] = []
        self.failures: list[str] = []
        self._over = threading.Event()

    @contextmanager
    def going_on(self, *, asks: bool = True) -> Iterator[None]:
        """Read streams, and ask for single tokens if wanted, until the end of the block."""
        acts = (self._stream, self._ask) if asks else (self._stream,)
        threads = [threading.Thread(target=self._loop, args=(act,)) for act in acts]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _loop(self, act: Callable[[], None]) -> None:
        while not self._over.is_set():
            try:
                act()
            except (OSError, HTTPException) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
            self._over.wait(PAUSE_S)

    def _post(self, **more: Any) -> HTTPConnection:
        connection = HTTPConnection(HOST, self._port, timeout=LONGEST_S)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        connection.request("POST", TEXT, json.dumps(ask("hi", 1) | more), headers)
        return connection

    def _ask(self) -> None:
        began = time.monotonic()
        connection = self._post()
        try:
            reply = connection.getresponse()
            reply.read()
            if reply.status != 200:
                self.failures.append(f"status {reply.status}")
            self.waits.append(time.monotonic() - began)
        finally:
            connection.close()

    def _stream(self) -> None:
        connection = self._post(max_tokens=self._stream_tokens, stream=True, ignore_eos=True)
        try:
            reply, last, count, is_whole = connection.getresponse(), None, 0, False
            for line in reply:
                if self._over.is_set():
                    return
                if line.startswith(b"data: {"):
                    now, count = time.monotonic(), count + 1
                    self.gaps += [] if last is None else [(now, now - last)]
                    last = now
                is_whole = line.startswith(b"data: [DONE]") or (is_whole and not line.strip())
            if not is_whole:
                self.failures.append(f"a stream that ended after {count} tokens")
        finally:
            connection.close()


def measure(name: str, port: int, seconds: float) -> dict[str, Any]:
    """Run one flood beside the honest client; return what that saw."""
    honest = Honest(port)
    with flooding(name, port, seconds) as (count, _, go), honest.going_on():
        go.set()
        time.sleep(seconds)
    row: dict[str, Any] = {"flood": name, "acts": count.value, "requests": len(honest.waits)}
    for key, times in (("wait", honest.waits), ("gap", [gap for _, gap in honest.gaps])):
        row[f"{key}_median_s"] = statistics.median(times) if times else float("inf")
        row[f"{key}_worst_s"] = max(times, default=float("inf"))
    return row | {"failures": honest.failures}


def measure_beside(name: str, port: int, rounds: int) -> dict[str, Any]:
    """Let a crowd come beside a stream; return the seconds between its tokens before and meanwhile."""
    alone: list[float] = []
    beside: list[float] = []
    failures: list[str] = []
    lasted: list[float] = []
    for _ in range(rounds):
        honest = Honest(port, BESIDE_TOKENS)
        with flooding(name, port, CROWDS[name].seconds) as (_, times, go):
            with honest.going_on(asks=False):
                time.sleep(ALONE_S)
                go.set()
                while not times[1]:
                    time.sleep(0.01)
            came, left = times
        alone += [gap for when, gap in honest.gaps if when < came]
        beside += [gap for when, gap in honest.gaps if when > came and when - gap < left]
        lasted.append(left - came)
        failures += honest.failures
    row: dict[str, Any] = {"crowd": name, "seconds": statistics.median(lasted), "tokens": len(beside)}
    for key, gaps in (("alone", alone), ("beside", beside)):
        row[f"{key}_median_s"], row[f"{key}_mean_s"] = statistics.median(gaps), statistics.mean(gaps)
        row[f"{key}_worst_s"] = max(gaps)
    return row | {"ratio": row["beside_mean_s"] / row["alone_mean_s"], "failures": failures}


BESIDE = ("alone_mean_s", "beside_median_s", "beside_mean_s", "beside_worst_s")


def beside_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of `measure_beside` as a table."""
    lines = ["| beside a stream | lasts, s | alone, mean | beside, median | mean | worst | mean / alone |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        cells = [row["crowd"], f"{row['seconds']:.1f}", *(f"{row[key]:.4f}" for key in BESIDE)]
        lines.append(f"| {' | '.join(cells)} | {row['ratio']:.1f} |")
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    lines = ["| flood | its acts | requests | median, s | worst, s | gap, median | gap, worst | failed |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        times = [
            f"{row[key]:.3f}" for key in ("wait_median_s", "wait_worst_s", "gap_median_s", "gap_worst_s")
        ]
        cells = [row["flood"], f"{row['acts']:,}", f"{row['requests']:,}", *times, str(len(row["failures"]))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of each flood")
    parser.add_argument("--floods", nargs="*", default=list(FLOODS), choices=list(FLOODS), metavar="NAME")
    parser.add_argument("--model", type=Path, help="model to serve; else one of a million weights is made")
    parser.add_argument(
        "--limit", type=float, default=0.1, help="highest median of the honest client, seconds"
    )
    parser.add_argument("--beside", action="store_true", help="measure a stream beside four crowds instead")
    parser.add_argument("--rounds", type=int, default=3, help="times that each crowd comes")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    show = beside_table if options.beside else table
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder) / "model"
        if options.model is None:
            save_model(model)
        command = [sys.executable, "-c", SERVE, str(model), KEY]
        with start(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                line = process.stdout.readline()
                port = int(line.split("http://")[1].split(":")[1].split("/")[0])
                print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {line.strip()}", flush=True)
                for name in CROWDS if options.beside else options.floods:
                    if options.beside:
                        rows.append(measure_beside(name, port, options.rounds))
                    else:
                        rows.append(measure(name, port, 60 * options.minutes))
                    print(show(rows[-1:]).splitlines()[-1], *rows[-1]["failures"][:1], flush=True)
            finally:
                process.terminate()
    print(f"\n{show(rows)}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.beside:
        slow = [row for row in rows if row["ratio"] > MOST]
    else:
        slow = [
            row
            for row in rows
            if row["wait_median_s"] > options.limit and not FLOODS[row["flood"]].fills_rows
        ]
    return int(bool(slow) or any(row["failures"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
