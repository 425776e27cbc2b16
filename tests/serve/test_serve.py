"""`whet serve` with its real clients: the official openai package, and lm-evaluation-harness."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import tokenizers
import torch
from chess_model import TINY
from needs import needs
from report.chromium import Tab, launch
from seeing import png, save_model, uri
from tokenizers import decoders, models, normalizers

import whet
from whet.algo.packing import TrainingSequence, pack
from whet.eval.chess.games import Player
from whet.generate.engine import Engine, Request
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.rows import Completion, Token
from whet.generate.sampling import SamplingParams
from whet.generate.scoring import score_micro_batch
from whet.model.config import ModelConfig
from whet.model.text.tokenizer import Tokenizer
from whet.model.weights import build_model
from whet.schema import SCHEMAS
from whet.serve import api as serve_api
from whet.serve import openai as serve_reply
from whet.serve import serve
from whet.serve.chess.table import Table
from whet.serve.headers import server_config
from whet.serve.openai import Reply, choice_seeds, parse_chat
from whet.serve.scheduler import Ask, Scheduler
from whet.serve.serve import ServeConfig
from whet.serve.stream import chat_prompt, unread_note
from whet.types import Problem, UserError

for package in ("uvicorn", "starlette", "openai"):
    pytest.importorskip(package, reason="whet serve is an extra: pip install 'whet-rl[web]' openai")
import openai  # noqa: E402
import uvicorn  # noqa: E402

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NAME = "tiny"
HTTP = httpx.Client(timeout=60, verify=False)
"""Made once: each has a TLS context, which takes longer than most requests here."""
START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"


def make_policy(max_rows: int = 8, *, endless: bool = False) -> Policy:
    schema = SCHEMAS["think_answer"]
    tokenizer = Tokenizer.bytes(schema.tags).with_template(CHATML)
    shape = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=4096,
    )
    model = build_model(shape)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():  # logits of a few units
            parameter.normal_(0.0, 0.3, generator=generator) if parameter.dim() > 1 else parameter.fill_(1.0)
        for tag in schema.tags:  # the tags are likely, so that completions have both parts
            model.head_weight[tokenizer.encode(tag)] *= 2.0
    policy = Policy(model.eval(), tokenizer, schema, max_rows=max_rows)
    if endless:  # greedy decoding never draws what ends a completion
        with torch.no_grad():
            model.head_weight[list(policy.stop_ids)] = 0.0
    return policy


@dataclass(frozen=True)
class Running:
    """A server in a thread of ours."""

    policy: Policy
    scheduler: Scheduler
    url: str

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="x", max_retries=0, **options)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        json_type = {"content-type": "application/json"}
        return HTTP.post(f"{self.url}{path}", content=content, headers=json_type | headers)

    def await_idle(self) -> None:
        deadline = time.monotonic() + 60
        while self.scheduler.num_pending and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.scheduler.num_pending == 0


def run_server(
    policy: Policy,
    *,
    max_waiting: int = 256,
    context: int = 1024,
    api_key: str = "",
    image_root: str = "",
    board: bool = False,
) -> Iterator[Running]:
    with Scheduler(policy, context=context, max_waiting=max_waiting) as scheduler:
        api = serve_api.Api(policy, scheduler, name=NAME, split_thinking=True, image_root=image_root)
        chess = None
        if board:
            chess = serve_api.Board(serve.make_table(policy, scheduler), title="chess", path=serve_api.CHESS)
        app = serve_api.make_app(api, api_key=api_key, hosts=serve.LOCAL, board=chess)
        options = server_config(app, app.refuse, max_connections=256, grace_s=1)
        server = uvicorn.Server(options)
        listener = serve.listen("127.0.0.1", 0)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            deadline = time.monotonic() + 60
            while not server.started and time.monotonic() < deadline:
                time.sleep(0.01)
            yield Running(policy, scheduler, f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.should_exit = True
            thread.join(30)
            listener.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    torch.set_num_threads(1)
    yield from run_server(make_policy())


@pytest.fixture(scope="module")
def twin() -> Policy:
    """The same policy once more: the server's belongs to its scheduler."""
    return make_policy()


def by_the_engine(
    policy: Policy, prompt: tuple[int, ...], seed: int, params: SamplingParams, num_choices: int = 1
) -> list[str]:
    """What the engine makes of a prompt on its own, as text."""
    request = Request(prompt_ids=prompt, seeds=choice_seeds(seed, num_choices))
    (row,) = policy.engine().generate([request], params)
    return [policy.completion_text(prompt, done.ids) for done in row]


def split(text: str) -> tuple[str, str]:
    """Part thinking and answer by hand."""
    thinking, closed, rest = text.partition("</think>")
    return thinking, rest.replace("<answer>", "").replace("</answer>", "").strip() if closed else ""


def messages(text: str) -> list[Any]:
    return [{"role": "system", "content": "Add."}, {"role": "user", "content": text}]


def test_chat_with_the_official_client(server: Running, twin: Policy) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, max_new_tokens=60)
    prompt = chat_prompt(twin, messages("1+1=é"))
    with server.client() as client:
        whole = client.chat.completions.create(
            model=NAME, messages=messages("1+1=é"), seed=7, temperature=0.8, top_p=0.9, max_tokens=60, n=3
        )
        stream = client.chat.completions.create(
            model=NAME,
            messages=messages("1+1=é"),
            seed=7,
            temperature=0.8,
            top_p=0.9,
            max_completion_tokens=60,
            n=3,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=2,
        )
        chunks = list(stream)
    expected = [split(text) for text in by_the_engine(twin, prompt, 7, params, 3)]
    assert len(set(expected)) == 3
    got: list[Any] = [choice.message for choice in whole.choices]
    assert [(message.reasoning_content, message.content) for message in got] == expected
    streamed = [["", ""] for _ in expected]
    reasons: dict[int, str] = {}
    logprobs = 0
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            delta: Any = choice.delta
            streamed[choice.index][0] += getattr(delta, "reasoning_content", None) or ""
            streamed[choice.index][1] += delta.content or ""
            logprobs += len((choice.logprobs and choice.logprobs.content) or ())
            reasons |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert [tuple(parts) for parts in streamed] == expected
    assert [reasons[n] for n in range(3)] == [choice.finish_reason for choice in whole.choices]
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert usage == whole.usage
    assert usage.prompt_tokens == len(prompt)
    assert usage.completion_tokens == logprobs > 0
    assert any(thinking and answer for thinking, answer in expected)  # or nothing was split


def test_completions_with_the_official_client(server: Running, twin: Policy) -> None:
    params = SamplingParams(max_new_tokens=20)
    with server.client() as client:
        prompts = ["2+2=", "Once"]
        whole = client.completions.create(model=NAME, prompt=prompts, max_tokens=20, n=2, seed=3)
        ids = client.completions.create(model=NAME, prompt=[list(b"2+2=")], max_tokens=20, n=2, seed=3)
        stream = client.completions.create(
            model=NAME, prompt="2+2=", max_tokens=20, seed=3, stream=True, echo=True
        )
        text = "".join(choice.text for chunk in stream for choice in chunk.choices)
    expected = [by_the_engine(twin, tuple(prompt.encode()), 3, params, 2) for prompt in prompts]
    assert [choice.text for choice in whole.choices] == [*expected[0], *expected[1]]
    assert [choice.text for choice in ids.choices] == expected[0]  # other prompts beside it change nothing
    assert text == "2+2=" + expected[0][0]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 8


def test_the_chat_page_holds_no_foreign_resource_and_no_secret(server: Running) -> None:
    answer = httpx.get(f"{server.url}/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', answer.text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'self'" in policy[1].replace("&#39;", "'")
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", answer.text)
    assert NAME not in answer.text.partition("<main>")[2].partition("<script")[0]
    assert httpx.get(f"{server.url}/", headers={"host": "evil.example"}).status_code == 403


@pytest.mark.ci
def test_the_chat_page_asks_the_adapter_that_is_chosen(server: Running) -> None:
    """Two models are listed here, though this server has one: what the page sends is what counts."""
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    cards.append(cards[0] | {"id": "math", "max_model_len": 77})
    with launch() as browser:
        page = Tab(browser, width=400).page
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": cards}))
        page.goto(server.url)
        page.locator("#about", has_text=NAME).wait_for()
        page.select_option("#model", "math")
        assert page.locator("#about").inner_text().startswith("math · context of 77 tokens")
        page.locator("#question").fill("2+2=")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.locator("#question").press("Enter")
        assert sent.value.post_data_json["model"] == "math"
        page.locator(".note.bad", has_text="'math' does not exist").wait_for()


@pytest.mark.ci
def test_the_chat_page_streams_folds_and_shows_probabilities(server: Running, tmp_path: Path) -> None:
    with launch() as browser:
        tab = Tab(browser, width=400)
        page = tab.page
        page.goto(server.url)
        page.locator("#about", has_text=f"{NAME} · context of 1,024 tokens").wait_for()
        page.locator("#temperature").fill("0.8")
        page.locator("#max-tokens").fill("60")
        page.locator("#seed").fill("5")
        page.locator("#question").fill("<img src=x onerror=window.__hacked=1>")
        page.locator("#question").press("Enter")
        page.locator("button.probabilities").wait_for()
        reply = server.client().chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "<img src=x onerror=window.__hacked=1>"}],
            temperature=0.8,
            max_tokens=60,
            seed=5,
            logprobs=True,
        )
        assert reply.usage is not None
        assert reply.usage.completion_tokens_details is not None
        message, spent = (
            reply.choices[0].message,
            reply.usage.completion_tokens_details.reasoning_tokens,
        )
        assert page.locator("details.thinking summary").inner_text() == f"thought for {spent} tokens"
        assert (page.locator("details.thinking").get_attribute("open") is None) == bool(message.content)
        shown = page.evaluate("(text) => visible(text)", message.content)
        assert page.locator(".answer-text").text_content() == shown
        assert page.locator("span.token").count() == 0  # drawn on demand
        page.locator("button.probabilities").click()
        assert reply.choices[0].logprobs is not None
        tokens = reply.choices[0].logprobs.content or []
        assert page.locator("span.token").count() == len(tokens) > 10
        assert f"{tokens[0].logprob:.3f} nats" in (
            page.locator("span.token").first.get_attribute("title") or ""
        )
        page.locator("#question").fill("and again, endlessly")
        page.locator("#max-tokens").fill("")
        page.locator("#temperature").fill("-1")
        page.locator("#send").click()
        page.locator(".note.bad", has_text="temperature").wait_for()  # what the server refuses is shown
        tab.slips = [slip for slip in tab.slips if "400" not in slip]
        assert tab.slips == []
        assert not tab.is_hacked()
        for dark in (False, True):
            tab.show(dark=dark, width=400)
            assert tab.overflow() <= 0
            tab.shoot(tmp_path, f"chat-{'dark' if dark else 'light'}")
        page.locator("#new").click()
        assert page.locator(".turn").count() == 0
        tab.close()


def test_a_prompt_that_the_model_cannot_read_is_told() -> None:
    letters = Tokenizer.characters("0123456789+= ", tags=SCHEMAS["think_answer"].tags)
    assert unread_note(letters, ("12+30=", "7")) == ""
    assert "no token for 'hélo'" in unread_note(letters, ("hé", "llo 12"))
    assert unread_note(Tokenizer.bytes(), ("héllo\n",)) == ""
    asked = parse_chat({"messages": [{"role": "user", "content": "x"}]}, 8)
    said = [
        Reply(make_policy(), NAME, asked, is_chat=True, splits=True, warning=warning).whole([], {})
        for warning in ("no token", "")
    ]
    assert said[0]["warning"] == "no token"
    assert "warning" not in said[1]


def test_a_stop_string_is_cut_from_the_text(server: Running, twin: Policy) -> None:
    (free,) = by_the_engine(twin, tuple(b"abc"), 5, SamplingParams(max_new_tokens=80))
    place = next(
        n for n in range(5, len(free)) if free[n : n + 2].isascii() and free.find(free[n : n + 2]) == n
    )
    stop = free[place : place + 2]
    with server.client() as client:
        options: dict[str, Any] = {
            "model": NAME,
            "prompt": "abc",
            "max_tokens": 80,
            "seed": 5,
            "stop": [stop],
        }
        whole = client.completions.create(**options)
        streamed = "".join(c.choices[0].text for c in client.completions.create(**options, stream=True))
    assert whole.choices[0].text == streamed == free[:place]
    assert whole.choices[0].finish_reason == "stop"


def replies(server: Running, body: dict[str, Any]) -> list[tuple[str, str, str | None]]:
    """The thinking, content and reason of a chat, in one piece and streamed."""
    whole = server.post(CHAT, body).json()["choices"][0]
    found = [(whole["message"]["reasoning_content"], whole["message"]["content"], whole["finish_reason"])]
    thinking, content, reason = "", "", None
    for line in server.post(CHAT, body | {"stream": True}).text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            thinking += choice["delta"].get("reasoning_content", "")
            content += choice["delta"].get("content", "")
            reason = choice["finish_reason"] or reason
    return [*found, (thinking, content, reason)]


@pytest.mark.ci
def test_a_stop_string_is_looked_for_in_the_content_alone(server: Running, twin: Policy) -> None:
    """A client that does not see the thinking does not stop it; the row of a completion that ended is free."""
    asked = messages("1+1=")
    texts = by_the_engine(twin, chat_prompt(twin, asked), 3, SamplingParams(max_new_tokens=120), 32)
    seeds, pairs = choice_seeds(3, 32), [split(text) for text in texts]
    tried = {True: 0, False: 0}
    for seed, (thinking, content) in zip(seeds, pairs, strict=True):
        letters = [letter for letter in thinking if letter.isascii() and letter.isalnum()]
        if len(content) < 4 or not letters:
            continue
        stop = next((letter for letter in letters if letter in content), letters[0])
        if tried[stop in content] == 2:
            continue
        tried[stop in content] += 1
        body = {"model": NAME, "messages": asked, "seed": seed, "max_tokens": 120, "stop": [stop]}
        for got in replies(server, body | {"temperature": 1.0}):
            assert got[:2] == (thinking, content.partition(stop)[0])
            assert got[2] == "stop" or stop not in content
    assert tried[True]
    server.await_idle()


@pytest.mark.parametrize("stop", ["\n\n", "Step", "</think>", "7", "2", "72", "<answer>"])
def test_what_a_chat_shows_is_what_stops_it(stop: str) -> None:
    said = "Let me add.\n\nStep one.</think>\n\n<answer>72</answer>"
    policy = make_policy()
    asked = parse_chat({"messages": [{"role": "user", "content": "x"}], "stop": [stop]}, 99)
    choice = serve_reply.Choice(policy, (65,), asked, splits=True)
    content, thinking = "", ""
    events: list[Any] = [Token(index) for index in policy.tokenizer.encode(said)]
    for event in [*events, Completion(ids=(), logprobs=(), finish_reason="length")]:
        if choice.finish_reason is None:
            delta = choice.push(event)
            content, thinking = content + delta.text, thinking + delta.thinking
    assert content == "72".partition(stop)[0]
    assert thinking == "Let me add.\n\nStep one."
    assert choice.finish_reason == ("stop" if stop in "72" else "length")


EXTREMES: list[dict[str, Any]] = [
    *({"temperature": value} for value in (1e-37, 5e-324, 1e-45, 9.99e-6, 1e-5, 9.999999)),
    *({"top_p": value} for value in (5e-324, 1e-45, 0.9999999999999999)),
    *({"min_p": value} for value in (5e-324, 1e-45, 0.9999999999999999)),
    *({"top_k": value} for value in (-1, 1, 10**30)),
    {"temperature": 1e-5, "top_p": 1e-300, "min_p": 0.9999999, "top_k": 1},
    *({"max_tokens": value} for value in (1, 10**30)),
    *({"seed": value} for value in (-(2**63), 2**63 - 1)),
    *({"temperature": value} for value in (-0.0, -5e-324, 10.0, 1e308)),
    *({"logit_bias": {"1": value}} for value in (-100, 1e308)),
    *({name: value} for name in ("presence_penalty", "frequency_penalty") for value in (5e-324, -1e308)),
    {"stop": ["\x00", "\U0010ffff", " " * 5000]},
]


@pytest.mark.ci
def test_extremes_of_sampling_concern_nobody_else(server: Running, twin: Policy) -> None:
    honest = GOOD_TEXT | {"max_tokens": 60, "seed": 9, "stream": True}
    (expected,) = by_the_engine(twin, tuple(b"hi"), 9, SamplingParams(max_new_tokens=60))
    text: list[str] = []
    seen = {200: 0, 400: 0}
    for extreme in EXTREMES:
        beside = threading.Thread(target=lambda: text.append(server.post(TEXT, honest).text))
        beside.start()
        reply = server.post(TEXT, GOOD_TEXT | {"logprobs": 2, "n": 2} | extreme)
        assert reply.status_code in seen, (extreme, reply.text)
        seen[reply.status_code] += 1
        beside.join(60)
    assert seen[200] > 15
    assert seen[400] > 5
    for stream in text:
        rows = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
        assert "".join(row["choices"][0]["text"] for row in rows) == expected
    greedy = server.post(TEXT, GOOD_TEXT | {"temperature": 0}).json()["choices"]
    assert server.post(TEXT, GOOD_TEXT | {"temperature": 1e-37}).json()["choices"] == greedy


def test_logprobs_have_the_bytes_of_part_characters(server: Running) -> None:
    body = {"model": NAME, "messages": messages("é"), "seed": 4, "max_tokens": 80, "logprobs": True}
    rows = server.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert any("\ufffd" in row["token"] for row in rows)
    assert all(bytes(row["bytes"]).decode(errors="replace") == row["token"] for row in rows)


@pytest.mark.ci
def test_sixty_four_streams_at_once(server: Running, twin: Policy) -> None:
    """Eight rows, 64 clients, four kinds of sampling: nothing mixed, and the server is alive afterwards."""
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 30}]

    async def one(client: openai.AsyncOpenAI, index: int) -> str:
        kind: dict[str, Any] = dict(kinds[index % 4])
        extra = {"extra_body": {"top_k": kind.pop("top_k")}} if "top_k" in kind else {}
        stream = await client.completions.create(
            model=NAME,
            prompt=f"{index}+{index}=",
            seed=index,
            max_tokens=10 + index % 30,
            stream=True,
            **kind,
            **extra,
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*[one(client, index) for index in range(64)])

    got = asyncio.run(everyone())
    for index, text in enumerate(got):
        params = SamplingParams(max_new_tokens=10 + index % 30, **kinds[index % 4])  # type: ignore[arg-type]
        assert [text] == by_the_engine(twin, tuple(f"{index}+{index}=".encode()), index, params)
    server.await_idle()
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "pending": 0}


def trainer_scores(policy: Policy, ids: list[int], start: int) -> list[float]:
    """Log-probabilities of ids[start:] by the trainer's code."""
    sequence = TrainingSequence(
        prompt_ids=tuple(ids[:start]),
        completion_ids=tuple(ids[start:]),
        sampler_logprobs=(0.0,) * (len(ids) - start),
    )
    (micro,) = pack([sequence], token_budget=10_000).micro_batches
    with torch.no_grad():
        return score_micro_batch(policy.model, micro)[0].tolist()


def test_echo_scores_the_prompt(server: Running, twin: Policy) -> None:
    """As harnesses measure likelihoods: token ids in, the logarithms of every token but the first out."""
    prompt = list("2+2=é.".encode())
    options: dict[str, Any] = {
        "model": NAME,
        "prompt": [prompt],
        "echo": True,
        "logprobs": 2,
        "temperature": 0,
    }
    with server.client() as client:
        (alone,) = client.completions.create(**options, max_tokens=0).choices
        (more,) = client.completions.create(**options, max_tokens=1).choices
    assert alone.logprobs is not None
    assert more.logprobs is not None
    scores = alone.logprobs.token_logprobs
    assert scores is not None
    assert scores[0] is None
    assert scores[1:] == trainer_scores(twin, prompt, 1)  # exact arithmetic: to the last bit
    assert more.logprobs.token_logprobs is not None
    assert more.logprobs.token_logprobs[:-1] == scores
    assert alone.logprobs.tokens == ["2", "+", "2", "=", "\ufffd", "\ufffd", "."]
    assert alone.logprobs.text_offset == [0, 1, 2, 3, 4, 4, 5]
    assert alone.text == "2+2=é."
    assert (alone.finish_reason, more.finish_reason) == ("length", "length")
    tops = more.logprobs.top_logprobs
    assert tops is not None
    assert tops[0] is None
    assert more.logprobs.token_logprobs[-1] == max(tops[-1].values())  # greedy
    # As OpenAI does it, the token itself is among them: up to one more than was asked for.
    tokens = more.logprobs.tokens
    assert tokens is not None
    for place in range(1, len(tops)):
        assert tops[place][tokens[place]] >= more.logprobs.token_logprobs[place]
        assert len(tops[place]) <= 3


def test_a_prompt_that_is_echoed_and_continued_is_read_once(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-evaluation-harness asks for the prompt's likelihood and one token more."""
    tokens: list[int] = []
    read, admit = Engine.read, Engine.admit

    def reads(self: Engine, text: Any, most: int = 0) -> torch.Tensor:
        tokens.append(len(text.ids))
        return read(self, text, most)

    def admits(self: Engine, state: Any, waiting: list[Any]) -> None:
        tokens.extend(len(job.request.prompt_ids) for job in waiting)
        admit(self, state, waiting)

    monkeypatch.setattr(Engine, "read", reads)
    monkeypatch.setattr(Engine, "admit", admits)
    asked = {"model": NAME, "prompt": list(b"2+2=4, 3+3="), "logprobs": 2, "max_tokens": 1}
    assert server.post(TEXT, asked | {"echo": True}).status_code == 200
    assert tokens == [11]


@pytest.mark.parametrize("streams", [True, False])
def test_the_scheduler_knows_which_requests_are_streams(
    streams: bool, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep a share of their pace beside others."""
    asks: list[Ask] = []
    submit = server.scheduler.submit
    monkeypatch.setattr(
        server.scheduler, "submit", lambda given, sink: (asks.extend(given), submit(given, sink))[1]
    )
    for path, body in ((CHAT, GOOD_CHAT), (TEXT, GOOD_TEXT)):
        assert server.post(path, body | {"stream": streams}).status_code == 200
    assert [ask.streams for ask in asks] == [streams] * 2


def sentencepiece_policy() -> Policy:
    """A policy as Llama's are: a BOS before every prompt, and a space that opens it and is not shown."""
    words = {"<unk>": 0, "<s>": 1, "▁": 2, "a": 3, "b": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend, roles={"bos_token": "<s>", "unk_token": "<unk>"}, adds_bos=True)
    return Policy(make_policy().model, tokenizer, SCHEMAS["think_answer"], max_rows=64)


def test_offsets_of_an_echo_are_places_in_its_text() -> None:
    """The BOS that the server put before a text has no place in it, nor has the space that opens it."""
    policy = sentencepiece_policy()
    for text, ids, offsets in (
        ("ab a", [1, 2, 3, 4, 2, 3], [0, 0, 0, 1, 2, 3]),
        ("<s> a", [1, 2, 3], [0, 3, 4]),
    ):
        echo = serve_reply.echo_of(policy, text, [Token(index) for index in ids])
        assert [offset for _, offset in echo.tokens] == offsets


def test_a_stop_string_that_begins_with_a_space_is_found_at_the_start() -> None:
    policy = sentencepiece_policy()
    engine = policy.engine()
    engine.stop_strings = (" a",)
    request = Request(prompt_ids=(1, 2, 4), seeds=tuple(range(300)))
    (rows,) = engine.generate([request], SamplingParams(max_new_tokens=8))
    texts = [policy.tokenizer.decode_completion(request.prompt_ids, row.ids) for row in rows]
    assert " a" in texts  # two tokens, the first of the completion
    for row, text in zip(rows, texts, strict=True):
        assert (row.finish_reason == "stop") == (" a" in text)
        assert " a" not in text[:-1]


def test_a_client_that_leaves_frees_its_row() -> None:
    with contextmanager(run_server)(make_policy(endless=True)) as server:
        for body in ({"stream": True}, {"n": 2}):
            asked = {"model": NAME, "temperature": 0, "prompt": "a", "max_tokens": 1000}
            data = json.dumps(asked | body).encode()
            host, port = server.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as connection:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
                connection.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
                deadline = time.monotonic() + 60
                while not server.scheduler.num_pending and time.monotonic() < deadline:
                    time.sleep(0.001)
            server.await_idle()
        stats = server.scheduler._engine.stats
        assert stats.decode_steps < 1900  # to the end they would be 999 for either


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GOOD_CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
GOOD_TEXT = {"model": NAME, "prompt": "hi", "max_tokens": 2}
BAD: list[tuple[str, dict[str, Any], int, str]] = [
    (CHAT, {"model": "gpt-5"}, 404, "the model 'gpt-5' does not exist; this server has 'tiny'"),
    (CHAT, {"model": None}, 400, "model: expected a name"),
    (CHAT, {"messages": []}, 400, "messages: expected a list of at least 1 item, got []"),
    (
        CHAT,
        {"messages": [{"role": "robot", "content": "x"}]},
        400,
        "messages[0].role: expected 'system', 'developer', 'user' or 'assistant', got",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": 5}]},
        400,
        "messages[0].content: expected a valid string or a valid list, got 5",
    ),
    (CHAT, {"messages": [{"role": "assistant", "content": "x"}]}, 400, "expected user for the last message"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "text holds a lone surrogate"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        400,
        "the context served here holds 1024",
    ),
    (CHAT, {"temperature": "hot"}, 400, 'temperature: expected a valid number, got "hot"'),
    (CHAT, {"temperature": -1}, 400, "temperature = -1.0: expected 0 (greedy) to 10"),
    (CHAT, {"top_p": 0}, 400, "top_p = 0.0: expected above 0"),
    (CHAT, {"n": 0}, 400, "n: expected greater than or equal to 1, got 0"),
    (CHAT, {"n": 129}, 400, "n: expected less than or equal to 128, got 129"),
    (CHAT, {"n": True}, 400, "n: expected a valid integer, got true"),
    (CHAT, {"max_tokens": 0}, 400, "max_tokens: expected greater than or equal to 1, got 0"),
    (CHAT, {"stop": [1]}, 400, "stop[0]: expected a valid string, got 1"),
    (CHAT, {"stop": ["a"] * 17}, 400, "stop: expected a list of at most 16 items, got"),
    (CHAT, {"top_logprobs": 3}, 400, "top_logprobs needs logprobs = true"),
    (CHAT, {"frequency_penalty": 0.5}, 400, "frequency_penalty is not supported by this server"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools is not supported"),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice is not supported by this server: leave it out"),
    (CHAT, {"parallel_tool_calls": False}, 400, "parallel_tool_calls is not supported"),
    (CHAT, {"repetition_penalty": 1.1}, 400, "repetition_penalty is not supported"),
    (CHAT, {"spaces_between_special_tokens": False}, 400, "spaces_between_special_tokens is not supported"),
    (CHAT, {"add_generation_prompt": False}, 400, "add_generation_prompt is not supported"),
    (CHAT, {"continue_final_message": True}, 400, "continue_final_message is not supported"),
    (TEXT, {"add_special_tokens": False}, 400, "add_special_tokens is not supported"),
    (CHAT, {"verbosity": "low"}, 400, "verbosity is not supported"),
    (CHAT, {"reasoning_effort": "high"}, 400, "reasoning_effort: the model's chat template does not read it"),
    (
        CHAT,
        {"chat_template_kwargs": {"a": True}},
        400,
        "chat_template_kwargs.a: the model's chat template does not",
    ),
    (
        CHAT,
        {"stream_options": {"chunks": 2}},
        400,
        "Unrecognized request argument supplied: stream_options.chunks",
    ),
    (CHAT, {"min_tokens": 3}, 400, "min_tokens: expected at most max_tokens = 2, got 3"),
    (CHAT, {"min_tokens": -1}, 400, "min_tokens: expected greater than or equal to 0, got -1"),
    (CHAT, {"stop_token_ids": [99999]}, 400, "stop_token_ids: expected ids below 262, got 99999"),
    (CHAT, {"ignore_eos": "yes"}, 400, 'ignore_eos: expected a valid boolean, got "yes"'),
    (
        TEXT,
        {"min_tokens": 1, "return_token_ids": True},
        400,
        "return_token_ids is not supported with min_tokens",
    ),
    (
        TEXT,
        {"stop_token_ids": [7], "return_token_ids": True},
        400,
        "stop_token_ids: this server ends completions at [256, 261], got [7]: both must have the same schema",
    ),
    *(
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "x", **extra}, *GOOD_CHAT["messages"]]},
            400,
            words,
        )
        for extra, words in (
            ({"name": "Ann"}, "messages[0].name: the model's chat template does not read it: leave it out"),
            (
                {"reasoning_content": "so"},
                "messages[0].reasoning_content: the model's chat template does not read",
            ),
            ({"prefix": True}, "messages[0].prefix is not supported by this server: leave it out"),
            ({"cache_control": {"type": "ephemeral"}}, "messages[0].cache_control is not supported"),
            (
                {"content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
                "messages[0].content[0].cache_control is not supported",
            ),
            ({"name": 5}, "messages[0].name: expected a valid string, got 5"),
        )
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": None}]},
        400,
        "messages[0].content: expected a valid string",
    ),
    (
        CHAT,
        {
            "messages": [
                {"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]},
                *GOOD_CHAT["messages"],
            ]
        },
        400,
        "messages[0].tool_calls is not supported by this server",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f"}}]},
        400,
        "messages[0].function_call is not supported",
    ),
    (
        CHAT,
        {"messages": [{"role": "tool", "content": "4", "tool_call_id": "a"}]},
        400,
        "messages[0].tool_call_id is not supported",
    ),
    (CHAT, {"temprature": 1}, 400, "Unrecognized request argument supplied: temprature"),
    (
        CHAT,
        {"seed": 2**70},
        400,
        "seed: expected less than or equal to 9223372036854775807, got",
    ),
    (TEXT, {"prompt": ""}, 400, "the prompt is empty: expected at least one token"),
    (TEXT, {"prompt": None}, 400, "prompt: expected a value, got null"),
    (TEXT, {"prompt": [1, 99999]}, 400, "has token id 99999, the model's vocabulary has 262 rows"),
    (TEXT, {"prompt": [10**30]}, 400, "has token id 1000000000000000000000000000000"),
    (TEXT, {"prompt": ["a", [1, "b"]]}, 400, 'prompt[1][1]: expected a valid integer, got "b"'),
    (TEXT, {"prompt": ["a"] * 257}, 400, "prompt: expected a list of at most 256 items, got"),
    (TEXT, {"stream_options": 5}, 400, "stream_options: expected a valid dictionary, got 5"),
    (TEXT, {"logprobs": 50}, 400, "logprobs: expected less than or equal to 20, got 50"),
    (TEXT, {"max_tokens": 0}, 400, "max_tokens = 0: expected 1"),
    (TEXT, {"prompt": ["a"] * 4, "n": 128}, 400, "512 completions at once; this server takes at most 264"),
    (TEXT, {"stream": 1}, 400, "stream: expected a valid boolean, got 1"),
]


@pytest.mark.parametrize(("path", "changes", "status", "message"), BAD)
def test_mistakes_are_told_in_one_line(
    server: Running, path: str, changes: dict[str, Any], status: int, message: str
) -> None:
    reply = server.post(path, (GOOD_CHAT if path == CHAT else GOOD_TEXT) | changes)
    error = reply.json()["error"]
    assert reply.status_code == status
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


NOTHING: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"tool_choice": "auto"}),
    (
        CHAT,
        {
            "tool_choice": "none",
            "tools": [],
            "parallel_tool_calls": True,
            "response_format": {"type": "text"},
        },
    ),
    (CHAT, {"repetition_penalty": 1.0, "length_penalty": 1.0, "presence_penalty": 0, "logit_bias": {}}),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False}),
    (CHAT, {"chat_template_kwargs": {}, "documents": None, "verbosity": "medium"}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),  # the template has no such switch
    (CHAT, {"skip_special_tokens": True, "spaces_between_special_tokens": True}),
    (CHAT, {"stop_token_ids": [], "ignore_eos": False, "min_tokens": 0, "include_stop_str_in_output": False}),
    (CHAT, {"stream_options": {"include_usage": True, "include_obfuscation": False}}),
    (TEXT, {"add_special_tokens": True, "use_beam_search": False, "best_of": 1, "suffix": ""}),
    (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": "hi", "name": None},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": None,
                    "refusal": None,
                    "annotations": [],
                },
                {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": None}]},
            ]
        },
    ),
]


@pytest.mark.parametrize(("path", "changes"), NOTHING)
def test_what_asks_for_nothing_changes_nothing(server: Running, path: str, changes: dict[str, Any]) -> None:
    body = (GOOD_CHAT if path == CHAT else GOOD_TEXT) | {"seed": 3, "max_tokens": 8}
    plain = [
        {"role": m["role"], "content": "hi" if m["role"] == "user" else ""}
        for m in changes.get("messages", [])
    ]
    usual = server.post(path, body | ({"messages": plain} if plain else {})).json()
    got = server.post(path, body | changes).json()
    assert got.get("choices") == usual["choices"], got


def chunks_of(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]


def test_guidellms_requests_are_answered_with_as_many_tokens_as_they_ask_for(
    server: Running, twin: Policy
) -> None:
    """The bodies of guidellm 0.8's benchmarks; its table is made of the token counts."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    for length in (1, 5, 70):
        body = {"model": NAME, "prompt": "Once", "stream": True, "stream_options": options, "stop": None}
        chunks = chunks_of(server.post(TEXT, body | {"max_tokens": length, "ignore_eos": True}))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert chunks[-1]["usage"] == {
            "prompt_tokens": 4, "completion_tokens": length, "total_tokens": 4 + length
        }  # fmt: skip
        assert [row["finish_reason"] for chunk in chunks for row in chunk["choices"]][-1] == "length"
        said = [{"role": "user", "content": [{"type": "text", "text": "Once"}]}]
        body = {"model": NAME, "messages": said, "stream": True, "stream_options": options, "stop": None}
        chunks = chunks_of(server.post(CHAT, body | {"max_completion_tokens": length, "ignore_eos": True}))
        usage = chunks[-1]["usage"]
        assert usage["completion_tokens"] == length
        assert usage["prompt_tokens"] == len(chat_prompt(twin, [{"role": "user", "content": "Once"}]))


def test_ends_and_special_tokens_as_vllm_has_them(server: Running, twin: Policy) -> None:
    body = GOOD_TEXT | {"seed": 5, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    row = server.post(TEXT, body).json()["choices"][0]
    ids, policy = row["token_ids"], twin
    assert len(ids) == 60
    silent = {*policy.stop_ids} - {policy.tokenizer.encode(tag)[0] for tag in policy.schema.tags}
    at = next(n for n, index in enumerate(ids) if n > 5 and 32 < index < 127)
    more = {"stop_token_ids": [ids[at]], "return_token_ids": False}
    cut = server.post(TEXT, body | more).json()
    first = ids.index(ids[at])
    assert cut["choices"][0]["finish_reason"] == "stop"
    said = [index for index in ids[:first] if index not in silent]  # without the token that ended it
    assert cut["choices"][0]["text"] == policy.tokenizer.decode(said)
    assert cut["usage"]["completion_tokens"] == first + 1
    least = server.post(TEXT, body | more | {"min_tokens": 30}).json()
    assert least["usage"]["completion_tokens"] >= 31
    assert row["text"] == policy.tokenizer.decode([index for index in ids if index not in silent])
    special = policy.tokenizer.special_ids - {policy.tokenizer.encode(tag)[0] for tag in policy.schema.tags}
    skipped = server.post(TEXT, body | {"skip_special_tokens": True}).json()["choices"][0]["text"]
    assert skipped == policy.tokenizer.decode([index for index in ids if index not in special])


THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.name %}{{ m.name }}: {% endif %}"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n"
    "{% endfor %}{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    """A model whose template reads what clients say beside the words, and can leave thinking out."""
    policy = make_policy()
    schema = replace(SCHEMAS["none"], think_open="<think>", think_close="</think>", opening_in_prompt=True)
    yield from run_server(Policy(policy.model, policy.tokenizer.with_template(THINKING), schema, max_rows=8))


def test_what_the_template_reads_reaches_it(thinking: Running) -> None:
    asked = [
        {"role": "user", "content": "hi", "name": "Ann<think>"},
        {"role": "assistant", "content": "yes", "reasoning_content": "so"},
        {"role": "user", "content": "why"},
    ]
    values = {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}
    found = thinking.post(
        "/tokenize", {"messages": asked, "chat_template_kwargs": {"enable_thinking": False}}
    ).json()
    text = "<|user|>Ann<think>: hi\n<|assistant|>yes\n<|user|>why\n"
    tokenizer = thinking.policy.tokenizer
    assert tokenizer.decode(found["tokens"]) == f"{text}<|assistant|><think>\n\n</think>\n\n"
    assert found["tokens"].count(tokenizer.encode("<think>")[0]) == 1  # a name's is text
    body = {"model": NAME, "messages": asked, "seed": 1, "max_tokens": 40, "ignore_eos": True}
    quiet = thinking.post(CHAT, body | values).json()
    assert quiet["usage"]["prompt_tokens"] == found["count"] + len("[high]")
    for given, expected in (({}, ("x", "")), ({"enable_thinking": False}, ("", "x"))):
        asks = replace(parse_chat({"messages": [{"role": "user", "content": "?"}]}, 9), template_values=given)
        choice = serve_reply.Choice(thinking.policy, (65,), asks, splits=True)
        delta = choice.push(Token(ord("x")))
        assert (delta.thinking, delta.text) == expected
    for more, message in (
        (
            {"chat_template_kwargs": {"mood": "gay"}},
            "chat_template_kwargs.mood: the model's chat template does not",
        ),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages: the model's"),
        ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs.enable_thinking"),
    ):
        refused = thinking.post(CHAT, body | more)
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]


def test_texts_and_conversations_are_tokenised_as_they_are_asked(server: Running, twin: Policy) -> None:
    text = server.post("/tokenize", {"model": NAME, "prompt": "aé<think>", "return_token_strs": True}).json()
    assert text == {
        "count": 4, "max_model_len": 1024, "tokens": twin.tokenizer.encode("aé<think>"),
        "token_strs": ["a", "\ufffd", "\ufffd", "<think>"],
    }  # fmt: skip
    chat = server.post("/tokenize", {"messages": messages("1+1=")}).json()
    assert chat["tokens"] == list(chat_prompt(twin, messages("1+1=")))
    assert server.post("/detokenize", {"tokens": text["tokens"]}).json() == {"prompt": "aé<think>"}
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": messages("b")}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "a", "model": "x"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "abc"}),
        ("/detokenize", {}),
    ):
        assert server.post(path, body).status_code in (400, 404)


def test_the_server_tells_what_it_is_and_what_it_did(server: Running) -> None:
    assert HTTP.get(f"{server.url}/version").json() == {"version": whet.__version__}

    def counts() -> dict[str, float]:
        reply = HTTP.get(f"{server.url}/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        rows = [line.split() for line in reply.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in rows}

    server.await_idle()
    before = counts()
    usage = server.post(TEXT, GOOD_TEXT | {"max_tokens": 7, "ignore_eos": True}).json()["usage"]
    server.await_idle()
    after = counts()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["whet_prompt_tokens_total"] == usage["prompt_tokens"]
    assert grown["whet_completion_tokens_total"] == usage["completion_tokens"] == 7
    assert grown["whet_completions_pending"] == 0


def test_a_page_of_another_origin_is_answered_if_it_is_allowed() -> None:
    page, asks = "http://localhost:3000", {"access-control-request-method": "POST"}
    idle = cast(Scheduler, None)
    allowing = "access-control-allow-origin"

    async def ask(origins: list[str]) -> None:
        api = serve_api.Api(make_policy(), idle, name=NAME, split_thinking=True)
        guard = serve_api.make_app(api, api_key="k", hosts=frozenset(), origins=origins)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://x") as client:
            headers = {"origin": page, **asks, "access-control-request-headers": "authorization,content-type"}
            preflight = await client.options(TEXT, headers=headers)
            assert preflight.status_code == (200 if origins else 401)
            assert (allowing in preflight.headers) is bool(origins)
            other = await client.options(TEXT, headers=headers | {"origin": "https://evil.example"})
            assert (allowing in other.headers) is ("*" in origins)
            # It opens nothing: without the key there is no other answer.
            assert (
                await client.post(TEXT, json=GOOD_TEXT, headers={"origin": page, **asks})
            ).status_code == 401
            assert (await client.get("/version", headers={"origin": page, **asks})).status_code == 401
            told = await client.get("/version", headers={"origin": page, "authorization": "Bearer k"})
            assert told.status_code == 200
            assert (told.headers.get(allowing) in (page, "*")) is bool(origins)

    for origins in ([], [page], ["*"]):
        asyncio.run(ask(origins))


def test_options_of_whets_do_not_reach_clients(server: Running) -> None:
    shown = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    told = server.post(CHAT, GOOD_CHAT | {"messages": [{"role": "user", "content": shown}]}).json()["error"][
        "message"
    ]
    assert "the model reads text alone" in told
    assert "--" not in told
    for text, left in (
        (
            "image x: no public address; to read from there: --task.image-urls any",
            "image x: no public address",
        ),
        ("x is wrong: allow it with --task.y z, or give the file", "x is wrong"),
        ("x is wrong (--policy.template plain)", "x is wrong"),
        ("a -- b: expected c", "a -- b: expected c"),
    ):
        assert str(serve_reply.refusal(UserError(text))) == left


def test_bodies_that_are_no_requests(server: Running) -> None:
    for body, message in (
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"model": NaN}', "NaN is not JSON"),
        (b"[]", "a JSON list; expected an object"),
        (b"\xff\xfe", "not JSON"),
        # Half a character: in a stop string it would have failed everyone who is being served.
        (b'{"model": "tiny", "prompt": "a", "stop": "\\ud83d"}', "holds a lone surrogate"),
        (b'{"model": "tiny", "prompt": "a", "\\udc00": 1}', "holds a lone surrogate"),
        (b'{"model": "tiny", "prompt": "\xed\xa0\xbd"}', "holds a lone surrogate"),
        (b'{"model": "tiny", "prompt": [' + b"1," * 2**18 + b"1, 1]}", "more than 262,144 values or commas"),
        (b'{"model": "tiny", "prompt": "a", "max_tokens": 0}', "max_tokens = 0: expected 1 or more"),
    ):
        reply = server.post(TEXT, body)
        assert reply.status_code == 400
        assert message in reply.json()["error"]["message"]
    assert server.post(TEXT, b" " * (serve_api.MAX_BODY_BYTES + 1)).status_code == 413
    sends_all_first = HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    json_type = {"content-type": "application/json"}
    sends_all_first.request("POST", TEXT, b" " * 6 * serve_api.MAX_BODY_BYTES, json_type)
    assert sends_all_first.getresponse().status == 413
    sends_all_first.close()
    form = httpx.post(f"{server.url}{TEXT}", data={"prompt": "x"})
    assert (form.status_code, "application/json" in form.text) == (415, True)
    assert httpx.get(f"{server.url}{TEXT}").status_code == 405
    missing = httpx.get(f"{server.url}/v1/embeddings")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
    # A web page whose host name was made to point here.
    assert server.post(TEXT, GOOD_TEXT, host="evil.example").status_code == 403
    assert server.post(TEXT, GOOD_TEXT).status_code == 200


def test_errors_reach_the_official_client(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with server.client() as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="x", prompt="a")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=NAME, prompt="a" * 2000)
        assert caught.value.code == "context_length_exceeded"
        with monkeypatch.context() as patch:  # what cannot fit is refused before it is tokenised
            patch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("tokenised"))
            with pytest.raises(openai.BadRequestError, match=r"1,000,000 characters, more than the context"):
                client.completions.create(model=NAME, prompt="a" * 1_000_000)
            with pytest.raises(openai.BadRequestError, match=r"1,000,000 characters, more than the context"):
                client.chat.completions.create(
                    model=NAME, messages=[{"role": "user", "content": "a" * 1_000_000}]
                )
        assert [model.id for model in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).id == NAME


def test_a_slow_body_is_cut_off(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_api, "RECEIVE_S", 0.2)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{{"
        connection.sendall(head.encode())
        assert b" 408 " in connection.recv(4096).partition(b"\r\n")[0]


def test_a_full_server_says_so_and_a_key_is_asked_for() -> None:
    with contextmanager(run_server)(
        make_policy(max_rows=1, endless=True), max_waiting=0, api_key="secret"
    ) as server:
        assert server.post(TEXT, GOOD_TEXT).status_code == 401
        assert server.post(TEXT, GOOD_TEXT, authorization="Bearer wrong").status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200
        with httpx.Client(headers={"authorization": "Bearer secret"}, timeout=60) as client:
            body = GOOD_TEXT | {"max_tokens": 1000, "stream": True, "temperature": 0}
            with client.stream("POST", f"{server.url}{TEXT}", json=body) as first:
                lines = first.iter_lines()
                next(lines)
                refused = client.post(f"{server.url}{TEXT}", json=GOOD_TEXT)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "overloaded"
            assert refused.headers["retry-after"] == "1"
            server.await_idle()
            assert client.post(f"{server.url}{TEXT}", json=GOOD_TEXT).status_code == 200


# --- chess -----------------------------------------------------------------------------------------------------

MOVE = {"moves": ["e2e4", "e7e5"], "side": "white", "move": "g1f3"}


@pytest.fixture
def chess_server() -> Iterator[Running]:
    pytest.importorskip("chess", reason="python-chess is not installed: the extra chess")
    yield from run_server(load_policy(TINY, seed=0), board=True, api_key="secret")


@pytest.mark.ci
def test_the_board_answers_as_whet_chess_does(chess_server: Running, server: Running) -> None:
    assert httpx.get(f"{chess_server.url}/chess").status_code == 200  # it asks for the key itself
    assert httpx.get(f"{server.url}/chess").status_code == 404
    assert chess_server.post("/chess/play", MOVE).status_code == 401
    key = {"authorization": "Bearer secret"}
    given = chess_server.post("/chess/play", MOVE, **key).json()
    table = Table(Player(load_policy(TINY, seed=0), tries=serve.TRIES), START)
    assert given == table.answer(MOVE)
    assert given["moves"][:3] == ["e2e4", "e7e5", "g1f3"]
    assert len(given["moves"]) == 4
    for body, told in (
        ({"moves": ["e2e5"]}, "'e2e5' is not a legal move"),
        ({"moves": 3}, "expected {moves"),
    ):
        answer = chess_server.post("/chess/play", body, **key)
        assert answer.status_code == 400
        assert told in answer.json()["error"]["message"]


def test_a_board_that_cannot_be_asked_says_why() -> None:
    pytest.importorskip("chess", reason="python-chess is not installed: the extra chess")
    with contextmanager(run_server)(load_policy(TINY, seed=0), board=True, context=16) as server:
        answer = server.post("/chess/play", MOVE)
        assert answer.status_code == 400
        assert "the context served here holds 16: shorten it" in answer.json()["error"]["message"]


@pytest.mark.ci
def test_the_board_in_a_browser_asks_for_the_key(chess_server: Running) -> None:
    with launch() as browser:
        tab = Tab(browser)
        tab.page.goto(f"{chess_server.url}/chess")
        tab.page.locator("#state", has_text="asks for its key").wait_for()
        tab.page.locator("#key").fill("secret")
        tab.page.locator("#key-form button").click()
        tab.page.locator("#state", has_text="your move").wait_for()
        tab.page.locator("#move").fill("e2e4")
        tab.page.locator("#move-form button[type=submit]").click()
        tab.page.locator("#names", has_text="1. e4 ").wait_for()
        tab.page.locator("#note", has_text="nothing it named is legal").wait_for()
        assert not tab.page.locator("#key-form").is_visible()
        tab.close()


# --- lm-evaluation-harness -------------------------------------------------------------------------------------


@needs("lm_eval", "tenacity", "aiohttp")
@pytest.mark.filterwarnings("ignore")
def test_the_harness_measures_what_the_trainer_measures(
    server: Running, twin: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own client classes: likelihoods through echo, and texts until a stop string, plain and as a chat."""
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    twin.tokenizer.save(tmp_path)
    text: Any = LocalCompletionsAPI(
        base_url=f"{server.url}{TEXT}",
        model=NAME,
        tokenizer=str(tmp_path),
        tokenizer_backend="huggingface",
        num_concurrent=4,
        max_length=512,
        seed=1,
    )

    def asked(kind: str, rows: list[tuple[Any, ...]]) -> list[Any]:
        return [
            Instance(request_type=kind, doc={}, arguments=row, idx=index)  # type: ignore[arg-type]
            for index, row in enumerate(rows)
        ]

    pairs = [("Question: 2+2=", " 4"), ("Question: 2+2=", " five"), ("A", "AAA")]
    for (context, continuation), (logprob, greedy) in zip(
        pairs, text.loglikelihood(asked("loglikelihood", pairs)), strict=True
    ):
        ids = list((context + continuation).encode())
        scores = trainer_scores(twin, ids, len(context.encode()))
        assert logprob == pytest.approx(sum(scores), abs=1e-4)
        (best,) = twin.engine().generate(
            [Request(prompt_ids=tuple(context.encode()), seeds=(0,))],
            SamplingParams(temperature=0, max_new_tokens=len(scores)),
        )
        assert greedy == (list(best[0].ids) == ids[-len(scores) :])
    rules = {"until": ["\n"], "max_gen_toks": 30, "temperature": 0}
    (said,) = text.generate_until(asked("generate_until", [("Once", rules)]))
    (free,) = by_the_engine(twin, tuple(b"Once"), 1, SamplingParams(temperature=0, max_new_tokens=30))
    assert said == free.partition("\n")[0]
    chat: Any = LocalChatCompletion(
        base_url=f"{server.url}{CHAT}", model=NAME, tokenizer_backend=None, num_concurrent=1
    )
    from lm_eval.models.api_models import JsonChatStr

    row = (JsonChatStr(json.dumps([{"role": "user", "content": "hi"}])), rules | {"until": ["~~"]})
    (reply,) = chat.generate_until(asked("generate_until", [row]))
    prompt = chat_prompt(twin, [{"role": "user", "content": "hi"}])
    (raw,) = by_the_engine(twin, prompt, 1, SamplingParams(temperature=0, max_new_tokens=30))
    assert reply == split(raw)[1]


TASKS = {
    "pick": """
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc}]
""",
    "write": """
output_type: generate_until
doc_to_target: "{{said}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 40, temperature: 0}
metric_list: [{metric: exact_match}]
""",
    "reply": """
output_type: generate_until
doc_to_target: "{{replied}}"
generation_kwargs: {until: ["~~"], max_gen_toks: 40, temperature: 0}
metric_list: [{metric: exact_match}]
""",
}
"""Tasks of lm_eval, of one local file."""


def run_harness(folder: Path, model: str, tasks: str, *more: str, **fields: str) -> tuple[Any, Path]:
    """Run the program lm_eval; return what it reports, and where its samples are."""
    fields |= {"model": NAME, "num_concurrent": "2"}
    words = ["--model", model, "--tasks", tasks, "--include_path", str(folder), "--log_samples", *more]
    words += [
        "--model_args",
        ",".join(f"{k}={v}" for k, v in fields.items()),
        "--output_path",
        str(folder / model),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    environment = os.environ | offline | {"OPENAI_API_KEY": "x"}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = (folder / model).rglob("results_*.json")
    return json.loads(found.read_text())["results"], found.parent


@pytest.mark.slow
@needs("lm_eval")
def test_the_whole_harness_reports_what_whet_measures(server: Running, twin: Policy, tmp_path: Path) -> None:
    """The program itself, unchanged: of five rows three are right by whet's own likelihoods and texts."""
    greedy = SamplingParams(temperature=0, max_new_tokens=40)
    choices, rows, sums = [" four", " five", "!"], [], []
    for n in range(99):
        question, is_right = f"Question {n}: {n}+{n}=", len(rows) < 3
        prompt = list(question.encode())
        (said,) = by_the_engine(twin, tuple(prompt), 1, greedy)
        asked = chat_prompt(twin, [{"role": "user", "content": question}])
        reply = split(by_the_engine(twin, asked, 1, greedy)[0])[1]
        said = said.partition("\n")[0]
        if len(rows) == 5 or not reply or not said.strip() == said != "":
            continue
        ids = [prompt + list(choice.encode()) for choice in choices]
        sums.append([sum(trainer_scores(twin, row, len(prompt))) for row in ids])
        gold = (sums[-1].index(max(sums[-1])) + (not is_right)) % 3
        texts = {"said": said, "replied": reply} if is_right else {"said": "other", "replied": "other"}
        rows.append({"question": question, "choices": choices, "gold": gold, **texts})
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for name, task in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.json'}}}}}\n"
        heads = f'task: {name}\n{data}test_split: test\ndoc_to_text: "{{{{question}}}}"\n'
        (tmp_path / f"{name}.yaml").write_text(heads + task)
    twin.tokenizer.save(tmp_path / "tokenizer")
    found, samples = run_harness(
        tmp_path, "local-completions", "pick,write",
        base_url=f"{server.url}{TEXT}", tokenizer=str(tmp_path / "tokenizer"), max_length="512",
    )  # fmt: skip
    assert found["pick"]["acc,none"] == found["write"]["exact_match,none"] == 0.6
    (path,) = samples.glob("samples_pick_*.jsonl")
    for line in path.read_text().splitlines():
        row = json.loads(line)
        own = [float(resp[0][0]) for resp in row["resps"]]
        assert own == pytest.approx(sums[row["doc_id"]], abs=1e-4)
    found, _ = run_harness(
        tmp_path, "local-chat-completions", "reply", "--apply_chat_template", base_url=f"{server.url}{CHAT}"
    )
    assert found["reply"]["exact_match,none"] == 0.6


# --- the program -----------------------------------------------------------------------------------------------


def test_configs_that_cannot_be_served() -> None:
    for options, message in (
        ({"host": "0.0.0.0"}, "host = '0.0.0.0' can be reached from other machines: give --api-key KEY"),
        ({"host": "example.com"}, "can be reached from other machines"),
        ({"port": -1}, "port = -1: expected 0"),
        ({"context": 1}, "context = 1: expected 2 or more"),
        ({"max_waiting": -1}, "max_waiting = -1: expected 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            ServeConfig(policy=PolicyConfig(init="x"), **options)
    ServeConfig(policy=PolicyConfig(init="x"), host="0.0.0.0", api_key="k")
    ServeConfig(policy=PolicyConfig(init="x"), host="::1")
    with pytest.raises(ValueError, match="no model: name a run folder"):
        ServeConfig()


def test_addresses_that_cannot_be_had() -> None:
    with serve.listen("127.0.0.1", 0) as taken:
        with socket.create_connection(taken.getsockname()[:2], timeout=10):
            pass  # the address can be printed now: nobody who reads it is refused
        with pytest.raises(
            UserError, match="cannot listen at 127.0.0.1 port .*: Address already in use; try another --port"
        ):
            serve.listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(
        UserError, match="cannot listen at 192.0.2.1.*expected an address of this machine as --host"
    ):
        serve.listen("192.0.2.1", 0)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(UserError, match=r"whet serve needs uvicorn: .*pip install .*\[web\]'"):
        serve.main(ServeConfig(policy=PolicyConfig(init="x")))


@pytest.mark.ci
def test_the_program_serves_a_folder_until_interrupted(tmp_path: Path) -> None:
    make_policy(endless=True).save(tmp_path / "mine")
    code = (
        # A shell's background job ignores SIGINT, and so would this one if the tests run in such a job.
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from whet.serve.serve import *; "
        "main(ServeConfig(policy=PolicyConfig(init=sys.argv[1], max_rows=4), port=0, context=4096))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "mine")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "(4 rows of 4,096 tokens), a chat page at /; Ctrl-C ends it" in line, line
        url = line.split(" at ")[1].split(" ")[0]
        body = {"model": "mine", "prompt": "a", "max_tokens": 3}
        assert (
            httpx.post(f"{url}/completions", json=body, timeout=60).json()["usage"]["completion_tokens"] <= 3
        )
        body |= {"max_tokens": 4000, "temperature": 0, "stream": True, "n": 4}
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            rest = "".join(lines)  # an open stream is ended, not torn off
        assert "the server is closing" in rest or "[DONE]" in rest
        assert process.stdout.read() == "stopped\n"
        assert process.wait(60) == 0


# Images: OpenAI's parts, for a model that sees.


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("seeing")
    (folder / "shown").mkdir()
    (folder / "shown" / "a.png").write_bytes(png(uri(1, 200)))
    (folder / "secret.png").write_bytes(png(uri(9)))
    (folder / "shown" / "link.png").symlink_to(folder / "secret.png")
    save_model(folder / "model")
    policy = load_policy(PolicyConfig(init=str(folder / "model"), system_prompt=False, max_rows=8), seed=0)
    yield from run_server(policy, context=128, image_root=str(folder / "shown"))


def with_images(text: str, *urls: str, **more: Any) -> list[Any]:
    images = [{"type": "image_url", "image_url": {"url": url} | more} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def test_images_are_what_the_engine_is_asked_about(seeing: Running) -> None:
    """Of files and data URIs, alone and several, streamed and whole; another image is another prompt."""
    client, policy = seeing.client(), seeing.policy
    asked = [
        with_images("ab=", uri(1, 200)),
        with_images("ab=", "a.png", detail="low"),
        with_images("ab=", uri(2, 100)),
        with_images("ab=", uri(2), uri(3)),
    ]
    options: dict[str, Any] = {"model": NAME, "seed": 5, "max_tokens": 12, "logprobs": True}
    texts = []
    for messages in asked:
        done = client.chat.completions.create(messages=messages, **options)
        urls = [part["image_url"]["url"] for part in messages[0]["content"][:-1]]
        sources = tuple(uri(1, 200) if url == "a.png" else url for url in urls)
        problem = Problem(uid="x", task="x", prompt="ab=", answer="", images=sources)
        ids = policy.prompt_ids(problem)
        (drawn,) = policy.engine().generate(
            [Request(prompt_ids=ids, seeds=(5,))], SamplingParams(max_new_tokens=12)
        )[0]
        assert done.usage is not None
        assert done.usage.prompt_tokens == len(ids)
        said = done.choices[0].logprobs
        assert said is not None
        assert said.content is not None
        assert [token.logprob for token in said.content] == pytest.approx(list(drawn.logprobs), abs=1e-12)
        stream = client.chat.completions.create(messages=messages, stream=True, **options)
        assert (
            "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
            == done.choices[0].message.content
        )
        texts.append([token.token for token in said.content])
    assert texts[0] == texts[1], "the same file"
    assert texts[0] != texts[2]


@pytest.mark.ci
def test_images_that_are_refused_get_one_clear_line(seeing: Running, server: Running) -> None:
    broken = png(uri(1))[:60]
    cases = [
        (with_images("a", "http://127.0.0.1:9/a.png"), "not fetched by this server: send a data URI"),
        (with_images("a", "file:///etc/passwd"), "not a file of this server's images"),
        (with_images("a", "/etc/passwd"), "'/etc/passwd': not a file of this server's images"),
        (with_images("a", "../secret.png"), "not a file of this server's images"),
        (with_images("a", "link.png"), "not a file of this server's images"),
        (with_images("a", "nothing.png"), "not a file of this server's images"),
        (with_images("a", "data:image/png;base64,AAAA"), "not an image"),
        (with_images("a", "data:image/png;base64," + base64.b64encode(broken).decode()), "broken"),
        (with_images("a", "data:image/svg+xml;base64,PHN2Zz48L3N2Zz4="), "SVG"),
        (with_images("a", *[uri(1)] * 17), "expected at most 16 images, got 17"),
        (with_images("a", *[uri(1, size=(512, 512))] * 2), "shorten it"),
        (with_images("a<image>", uri(1)), "image placeholders"),
        ([{"role": "assistant", "content": with_images("a", uri(1))[0]["content"]}], "expected user"),
        (
            [
                {"role": "system", "content": with_images("a", uri(1))[0]["content"]},
                *with_images("a", uri(1)),
            ],
            "messages of the user's alone",
        ),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}], "content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ""}}]}], "image_url.url"),
    ]
    for messages, expected in cases:
        answer = seeing.post("/v1/chat/completions", {"model": NAME, "messages": messages, "max_tokens": 2})
        assert answer.status_code == 400, (expected, answer.text)
        said = answer.json()["error"]["message"]
        assert expected in said
        assert "\n" not in said
        assert len(said) <= 400
    blind = server.post("/v1/chat/completions", {"model": NAME, "messages": with_images("a", uri(1))})
    assert (blind.status_code, "reads text alone" in blind.text) == (400, True)
    assert server.post("/v1/chat/completions", {"messages": "x" * (5 << 20)}).status_code == 413
    # Nothing of what was refused is kept, and the next request is answered.
    fine = {"model": NAME, "messages": with_images("a", uri(1)), "max_tokens": 2}
    assert seeing.post("/v1/chat/completions", fine).status_code == 200


@pytest.mark.ci
def test_files_of_images_are_not_kept_for_ever(seeing: Running) -> None:
    images = seeing.policy.model.images
    assert images is not None
    for place in range(2 * serve_api.KEPT_IMAGES):
        fine = {"model": NAME, "messages": with_images("a", uri(place, 77)), "max_tokens": 1}
        assert seeing.post("/v1/chat/completions", fine).status_code == 200
    assert (
        len(images._pictures) <= serve_api.KEPT_IMAGES + 8
    )  # and those that the test above asked the engine about


@pytest.mark.ci
def test_the_chat_page_shows_the_model_images(seeing: Running, server: Running, tmp_path: Path) -> None:
    files = []
    for place in range(2):
        files.append(tmp_path / f"{place}.png")
        files[-1].write_bytes(png(uri(place, 90)))
    with launch() as browser:
        tab = Tab(browser, width=400)
        page = tab.page
        page.goto(server.url)
        page.locator("#about", has_text=NAME).wait_for()
        assert not page.locator("#images").is_visible(), "the model reads text alone"
        page.goto(seeing.url)
        page.locator("#about", has_text=NAME).wait_for()
        page.locator("#max-tokens").fill("4")
        page.locator("#question").fill("ab=")
        page.locator("#images").set_input_files(files)
        with page.expect_request("**/v1/chat/completions") as sent:
            page.locator("#question").press("Enter")
        assert sent.value.post_data_json["messages"] == with_images("ab=", uri(0, 90), uri(1, 90))
        page.locator("button.probabilities").wait_for()
        assert page.locator(".turn .pictures img").count() == 2, "a question waits until its images are read"
        assert page.locator("#pending img").count() == 0
        page.locator("#question").fill("ab=")
        with page.expect_request("**/v1/chat/completions") as sent:
            page.locator("#question").press("Enter")
        assert sent.value.post_data_json["messages"][-1]["content"] == "ab="
        page.locator("button.probabilities").nth(1).wait_for()
        files[0].write_text("no image")
        page.locator("#images").set_input_files(files)
        page.locator("#images").set_input_files(files[:1])
        page.wait_for_function("document.querySelectorAll('#pending img').length === 1")
        page.wait_for_timeout(100)
        assert page.locator("#pending img").count() == 1, "of two choices the later one counts"
        page.locator("#question").fill("a=")
        page.locator("#send").click()
        page.locator(".note.bad", has_text="not an image").wait_for()
        assert [slip for slip in tab.slips if "400" not in slip and "Failed to load" not in slip] == []
        for dark in (False, True):
            tab.show(dark=dark, width=400)
            tab.shoot(tmp_path, f"seeing-{'dark' if dark else 'light'}")
            assert tab.overflow() <= 0


def test_paths_and_urls_are_refused_unless_permitted(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    (tmp_path / "a.png").write_bytes(png(uri(1)))
    policy = load_policy(PolicyConfig(init=str(tmp_path / "model"), system_prompt=False), seed=0)
    with Scheduler(policy, context=128, max_waiting=1) as scheduler:
        api = serve_api.Api(policy, scheduler, name=NAME, split_thinking=True)
        for source in (str(tmp_path / "a.png"), "a.png", "https://example.org/a.png"):
            with pytest.raises((UserError, serve_reply.ApiError), match="send (it|a data|the file)"):
                api._encode_chat(
                    policy, [{"role": "user", "content": [{"type": "image", "image": source}]}], {}
                )
    with pytest.raises(ValueError, match="no such folder"):
        ServeConfig(policy=PolicyConfig(init="x"), image_root=str(tmp_path / "nowhere"))
