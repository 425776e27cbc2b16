"""The scheduler: what is served is what the engine draws, whoever comes and goes; text never loses a character."""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from late import wait_for
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from whet.algo.packing import TrainingSequence, pack
from whet.generate import engine as engine_module
from whet.generate.engine import Completion, Engine, Request
from whet.generate.pieces import Reading
from whet.generate.policy import Policy
from whet.generate.rows import Ends, Job, Rows, Token
from whet.generate.sampling import SamplingParams
from whet.generate.scoring import score_micro_batch
from whet.model.config import ModelConfig
from whet.model.text.template import BASE_TEMPLATE
from whet.model.text.tokenizer import Tokenizer
from whet.model.weights import build_model
from whet.schema import SCHEMAS
from whet.serve import scheduler as scheduler_module
from whet.serve.scheduler import Ask, BusyError, Event, Scheduler, Ticket, _Pace
from whet.serve.stream import ResponseText, StopText, TokenText, chat_prompt
from whet.types import UserError

SHAPE = ModelConfig(
    vocab_size=258,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=256,
)


WIDE = {"hidden_size": 64, "head_dim": 16}
"""Sizes that the C++ kernels take."""


def make_policy(max_rows: int = 3, **shape: Any) -> Policy:
    model = build_model(replace(SHAPE, **shape))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():  # logits of a few units: far from uniform
            parameter.normal_(0.0, 0.3, generator=generator) if parameter.dim() > 1 else parameter.fill_(1.0)
    return Policy(model.eval(), Tokenizer.bytes(), SCHEMAS["think_answer"], max_rows=max_rows)


@pytest.fixture
def policy() -> Policy:
    return make_policy()


@pytest.fixture
def scheduler(policy: Policy) -> Iterator[Scheduler]:
    with Scheduler(policy, context=128, max_waiting=100) as made:
        yield made


PARAMS = (
    SamplingParams(max_new_tokens=30),
    SamplingParams(temperature=0.0, max_new_tokens=12),
    SamplingParams(temperature=0.7, top_k=20, max_new_tokens=25),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.01, max_new_tokens=40),
)


class Inbox:
    """Collects events and waits for the ends."""

    def __init__(self) -> None:
        self.events: queue.Queue[tuple[int, Event]] = queue.Queue()
        self.tokens: dict[int, list[Token]] = {}

    def __call__(self, index: int, event: Event) -> None:
        self.events.put((index, event))

    def wait(self, count: int) -> dict[int, Completion | Exception]:
        ends: dict[int, Completion | Exception] = {}
        while len(ends) < count:
            index, event = self.events.get(timeout=60)
            if isinstance(event, Token):
                self.tokens.setdefault(index, []).append(event)
            else:
                ends[index] = event
        return ends


def test_served_tokens_are_the_engines(policy: Policy, scheduler: Scheduler) -> None:
    """Two dozen completions with four kinds of sampling over three rows: each as if it were alone, to the last bit."""
    asks = [
        Ask(
            request=Request(prompt_ids=tuple(range(65, 67 + n)), seeds=(n, 1000 + n)),
            params=PARAMS[n % 4],
            stop_strings=("\n", "e") if n % 3 == 0 else (),
            num_top=2 if n % 5 == 0 else None,
        )
        for n in range(12)
    ]
    inboxes = [Inbox() for _ in asks]
    for ask, inbox in zip(asks, inboxes, strict=True):
        scheduler.submit([ask], inbox)
    served = [inbox.wait(2) for inbox in inboxes]
    scheduler.close()
    reasons = set()
    for ask, inbox, ends in zip(asks, inboxes, served, strict=True):
        engine = Engine(
            policy.model,
            stop_ids=policy.stop_ids,
            stop_strings=(*policy.stop_strings, *ask.stop_strings),
            decode=policy.tokenizer.decode,
        )
        (alone,) = engine.generate([ask.request], ask.params)
        assert [ends[0], ends[1]] == alone
        assert [[t.id for t in inbox.tokens[i]] for i in (0, 1)] == [list(done.ids) for done in alone]
        reasons |= {done.finish_reason for done in alone}
        assert all((token.logprob is not None) == (ask.num_top is not None) for token in inbox.tokens[0])
    assert reasons == {"stop", "length"}


def alone(policy: Policy, ask: Ask) -> Completion:
    """What the engine draws without others, and without further ends."""
    engine = Engine(policy.model, stop_ids=policy.stop_ids)
    ((done,),) = engine.generate([ask.request], ask.params)
    return done


def served(scheduler: Scheduler, ask: Ask) -> Completion:
    inbox = Inbox()
    scheduler.submit([ask], inbox)
    (end,) = inbox.wait(1).values()
    assert isinstance(end, Completion)
    return end


@pytest.mark.parametrize("params", [PARAMS[0], PARAMS[3]])
def test_a_completion_ends_where_its_client_wants(
    params: SamplingParams, policy: Policy, scheduler: Scheduler
) -> None:
    """Past the policy's stop ids, at ids of its own, and at its limit; the tokens are those of any other."""
    params = replace(params, max_new_tokens=40)
    asks = [Ask(request=Request(prompt_ids=(65, 66), seeds=(n,)), params=params) for n in range(40)]
    twin = make_policy()
    stopped = next(ask for ask in asks if 2 < len(alone(twin, ask).ids) < 30)
    usual = alone(twin, stopped)
    assert usual.finish_reason == "stop"

    longer = served(scheduler, replace(stopped, ends=Ends(ignores_stop_ids=True)))
    assert (len(longer.ids), longer.finish_reason) == (40, "length")
    assert longer.ids[: len(usual.ids)] == usual.ids
    assert longer.logprobs[: len(usual.ids)] == usual.logprobs
    limit = replace(params, max_new_tokens=len(usual.ids))
    cut = served(scheduler, replace(stopped, params=limit, ends=Ends(ignores_stop_ids=True)))
    assert (cut.ids, cut.finish_reason) == (usual.ids, "length")

    own = frozenset({longer.ids[-1]})
    first = longer.ids.index(longer.ids[-1])
    for ends in (Ends(stop_ids=own, ignores_stop_ids=True), Ends(stop_ids=own | frozenset(policy.stop_ids))):
        end = served(scheduler, replace(stopped, ends=ends))
        assert end.finish_reason == "stop"
        assert end.ids == (longer.ids[: first + 1] if ends.ignores_stop_ids else usual.ids[: first + 1])
    assert served(scheduler, stopped) == usual


def test_nothing_ends_a_completion_before_its_least_length(policy: Policy, scheduler: Scheduler) -> None:
    """What would end it is not drawn: the likeliest of the others is; the scores that are shown are the model's."""
    prompt, twin = (65, 66, 67), make_policy()
    ask = long_ask(length=30)
    ask = replace(ask, request=replace(ask.request, prompt_ids=prompt), num_top=1)
    usual = alone(twin, ask).ids
    barred = frozenset(usual[1:4])
    inbox = Inbox()
    scheduler.submit([replace(ask, ends=Ends(stop_ids=barred, min_new_tokens=8))], inbox)
    (end,) = inbox.wait(1).values()
    assert isinstance(end, Completion)
    with torch.no_grad():
        logits = twin.model.logits(torch.tensor([[*prompt, *end.ids]]))[0, len(prompt) - 1 : -1].double()
    scores = torch.log_softmax(logits, -1)
    for place, token in enumerate(inbox.tokens[0]):
        assert token.logprob == pytest.approx(float(scores[place, token.id]), abs=1e-4)
        if place < 8:
            logits[place, [*barred, *twin.stop_ids]] = float("-inf")
        assert token.id == int(logits[place].argmax())
    assert len(end.ids) >= 9
    assert end.finish_reason == "length" or end.ids[-1] in barred | frozenset(twin.stop_ids)


def test_a_stop_string_is_looked_for_behind_the_least_length(scheduler: Scheduler) -> None:
    request = Request(prompt_ids=(65,), seeds=tuple(range(20)))
    ends = Ends(ignores_stop_ids=True, min_new_tokens=10)
    ask = Ask(request=request, params=SamplingParams(max_new_tokens=60), ends=ends)
    inbox = Inbox()
    scheduler.submit([ask], inbox)
    found = {seed: end.ids for seed, end in inbox.wait(20).items() if isinstance(end, Completion)}
    seed, stop, place = next(
        (seed, chr(index), place)
        for seed, ids in found.items()
        for place, index in enumerate(ids)
        if place >= 10 and 32 < index < 127 and index in ids[:10] and index not in ids[10:place]
    )
    end = served(scheduler, replace(ask, request=replace(request, seeds=(seed,)), stop_strings=(stop,)))
    assert (end.ids, end.finish_reason) == (found[seed][: place + 1], "stop")


@pytest.mark.parametrize("length", [1, 7, 100])
def test_a_prompt_that_is_scored_is_read_once(
    length: int, policy: Policy, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Harnesses ask for the prompt's likelihood and one token more."""
    twin, prompt = make_policy(), tuple((7 * n) % 256 for n in range(length))
    params = SamplingParams(max_new_tokens=5)
    ask = Ask(request=Request(prompt_ids=prompt, seeds=(1, 2)), params=params, num_top=2)
    ((first, second),) = twin.engine().generate([ask.request], params)
    (expected,) = scheduler.score([prompt], 2).result(60)
    tokens: list[int] = []
    read = Engine.read
    monkeypatch.setattr(
        Engine, "read", lambda self, text, most: (tokens.append(len(text.ids)), read(self, text, most))[1]
    )
    monkeypatch.setattr(Engine, "admit", lambda *_: pytest.fail("read once more"))
    scores: Future[list[Token]] = Future()
    inbox = Inbox()
    scheduler.submit([replace(ask, scores=scores)], inbox)
    assert scores.result(60) == expected
    assert inbox.wait(2) == {0: first, 1: second}
    assert tokens == [length]


def test_who_waits_for_scores_is_told_of_failures(
    policy: Policy, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores: Future[list[Token]] = Future()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "read", lambda *_: 1 / 0)
        scheduler.submit([replace(long_ask(), scores=scores)], Inbox())
        assert isinstance(scores.exception(60), ZeroDivisionError)
    late: Future[list[Token]] = Future()
    hold = threading.Event()
    monkeypatch.setattr(Engine, "read", lambda *_: hold.wait(60) and 1 / 0)
    scheduler.submit([replace(long_ask(), scores=Future())], Inbox())
    scheduler.submit([replace(long_ask(), scores=late)], Inbox())
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    hold.set()
    closing.join(60)
    assert late.exception(60) is not None


def test_noted_logprobs_are_the_models_own(policy: Policy, scheduler: Scheduler) -> None:
    """Temperature and filters do not touch them: the same as scoring the whole text afterwards."""
    prompt = tuple(b"What is 1+1?")
    inbox, params = Inbox(), SamplingParams(temperature=0.3, top_k=5, max_new_tokens=20)
    scheduler.submit([Ask(request=Request(prompt_ids=prompt, seeds=(4,)), params=params, num_top=3)], inbox)
    (end,) = inbox.wait(1).values()
    assert isinstance(end, Completion)
    (scored,) = scheduler.score([(*prompt, *end.ids)], 3).result(timeout=60)
    assert scored[0] == Token(prompt[0])
    assert inbox.tokens[0] == scored[len(prompt) :]
    scheduler.close()
    ids = torch.tensor([[*prompt, *end.ids]])
    with torch.no_grad():
        expected = torch.log_softmax(policy.model.logits(ids)[0, :-1].double(), -1)
    for place, token in enumerate(scored[1:]):
        assert token.logprob == pytest.approx(float(expected[place, token.id]), abs=1e-4)  # float32 sums
        top = expected[place].topk(3)
        assert [index for index, _ in token.top] == top.indices.tolist()
        assert [logprob for _, logprob in token.top] == pytest.approx(top.values.tolist(), abs=1e-4)
    assert end.logprobs[0] != inbox.tokens[0][0].logprob  # that is under the sampled distribution


def long_ask(seed: int = 0, length: int = 120) -> Ask:
    params = SamplingParams(temperature=0.0, max_new_tokens=length)
    return Ask(request=Request(prompt_ids=(65,), seeds=(seed,)), params=params)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold every decode step until the event is set."""
    go, original = threading.Event(), Engine.decode

    def held(self: Engine, state: Any) -> None:
        assert go.wait(60)
        original(self, state)

    monkeypatch.setattr(Engine, "decode", held)
    return go


def test_the_queue_is_bounded_and_cancelling_makes_room(endless: threading.Event) -> None:
    with Scheduler(make_policy(max_rows=2), context=128, max_waiting=2) as scheduler:
        with pytest.raises(UserError, match="5 completions at once; this server takes at most 4"):
            scheduler.submit([long_ask(n) for n in range(5)], Inbox())
        inbox, last = Inbox(), Inbox()
        ticket = scheduler.submit([long_ask(n) for n in range(3)], inbox)
        with pytest.raises(
            BusyError, match="3 completions run or wait, and 2 more would pass the limit of 4"
        ):
            scheduler.submit([long_ask(n) for n in range(2)], Inbox())
        scheduler.submit([long_ask()], last)
        with pytest.raises(BusyError):
            scheduler.score([(65, 66)], 0)
        ticket.cancel()  # one of the three waits and is forgotten at once
        scheduler.submit([long_ask()], Inbox())
        endless.set()
        (end,) = last.wait(1).values()
        assert isinstance(end, Completion)
        assert len(end.ids) == 120
        assert all(len(tokens) < 5 for tokens in inbox.tokens.values())


def test_a_cancelled_row_is_free_and_the_others_go_on(policy: Policy, scheduler: Scheduler) -> None:
    first, second = Inbox(), Inbox()
    ticket = scheduler.submit([long_ask()], first)
    scheduler.submit([long_ask(1)], second)
    assert isinstance(first.events.get(timeout=60)[1], Token)
    ticket.cancel()
    second.wait(1)
    drawn = policy.model.config.max_positions
    while not first.events.empty():
        _, event = first.events.get()
        drawn -= 1
        assert isinstance(event, Token)  # no end was announced
    assert drawn > policy.model.config.max_positions - 119
    assert scheduler.num_pending == 0


def test_a_listener_that_raises_is_dropped(scheduler: Scheduler) -> None:
    def broken(index: int, event: Event) -> None:
        raise RuntimeError("gone")

    scheduler.submit([long_ask()], broken)
    inbox = Inbox()
    scheduler.submit([long_ask(1, length=5)], inbox)
    assert len(inbox.wait(1)) == 1


def test_a_failing_step_is_told_and_survived(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    original, failed = Engine.decode, threading.Event()

    def fails_once(self: Engine, state: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("CUDA out of memory")
        original(self, state)

    monkeypatch.setattr(Engine, "decode", fails_once)
    inbox, after = Inbox(), Inbox()
    scheduler.submit([long_ask()], inbox)
    (error,) = inbox.wait(1).values()
    assert str(error) == "CUDA out of memory"
    scheduler.submit([long_ask(1, length=7)], after)
    (end,) = after.wait(1).values()
    assert isinstance(end, Completion)
    assert len(end.ids) == 7
    future = scheduler.score([(5, 10_000)], 1)  # an id that nobody checked
    assert future.exception(timeout=60) is not None
    assert scheduler.score([(5, 6)], 1).result(timeout=60)


def engine_of(policy: Policy, stops: tuple[str, ...] = ()) -> Engine:
    strings = (*policy.stop_strings, *stops)
    return Engine(
        policy.model, stop_ids=policy.stop_ids, stop_strings=strings, decode=policy.tokenizer.decode
    )


@pytest.fixture
def costs() -> dict[str, float]:
    """Seconds that the scheduler takes each call of the engine for, whatever the machine does."""
    return {"decode": 1.0, "admit": 1.0, "read": 1.0}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, costs: dict[str, float]) -> list[tuple[str, int, int]]:
    """Note each call of the engine: what it does, rows that live before it, and tokens that it reads."""
    clock = [0.0]
    monkeypatch.setattr(engine_module, "PIECE_TOKENS", 32)
    monkeypatch.setattr(scheduler_module, "PIECE_TOKENS", 32)
    monkeypatch.setattr(scheduler_module, "perf_counter", lambda: clock[0])
    done: list[tuple[str, int, int]] = []
    live: list[int] = [0]

    def note(name: str) -> None:
        original = getattr(Engine, name)

        def noted(self: Engine, *arguments: Any) -> Any:
            before, count = live[0], 0
            result = original(self, *arguments)
            clock[0] += costs.get(name, 0.0)
            if name == "read":
                count = arguments[0].num_read % 32 or 32
            else:
                live[0] = len(arguments[0].jobs)
                prompts = {id(job.request): job.request.prompt_ids for job in arguments[0].jobs[before:]}
                count = sum(map(len, prompts.values()))
            if name != "harvest":
                done.append((name, before, count))
            return result

        monkeypatch.setattr(Engine, name, noted)

    for name in ("decode", "admit", "read", "harvest"):
        note(name)
    return done


def test_every_second_step_decodes_and_no_step_reads_more_than_a_piece(
    policy: Policy, scheduler: Scheduler, steps: list[tuple[str, int, int]]
) -> None:
    """A stream beside clients that ask for one token each, one after the other, for long prompts, and for scores."""
    stop, texts = threading.Event(), [tuple(range(60, 160)), tuple(range(40, 150))]

    def ask_again(length: int, count: int) -> None:
        params = SamplingParams(max_new_tokens=count)
        while not stop.is_set():
            scheduler.generate([Request(prompt_ids=tuple(range(60, 60 + length)), seeds=(3,))], params)

    def score_again() -> None:
        while not stop.is_set():
            scheduler.score(texts, 1).result(timeout=60)

    busy = [threading.Thread(target=ask_again, args=(length, 1)) for length in (4, 30, 32, 100)]
    busy.append(threading.Thread(target=score_again))
    for thread in busy:
        thread.start()
    while not steps:
        time.sleep(0.001)
    inbox, ask = Inbox(), long_ask(length=40)
    scheduler.submit([ask], inbox)
    (end,) = inbox.wait(1).values()
    stop.set()
    for thread in busy:
        thread.join(60)
    assert {name for name, _, _ in steps} == {"decode", "admit", "read"}
    reads = [place for place, (name, live, _) in enumerate(steps) if name != "decode" and live]
    assert all(later - before > 1 for before, later in pairwise(reads))
    assert max(count for name, _, count in steps if name != "decode") <= 32
    scheduler.close()
    assert [[end]] == engine_of(policy).generate([ask.request], ask.params)


@pytest.mark.parametrize(
    "crowd", ["250 requests at once", "32 streams that are cancelled", "12 scored prompts"]
)
def test_a_stream_goes_on_beside_a_crowd(crowd: str, steps: list[tuple[str, int, int]]) -> None:
    """At every second step at least it gets a token, counted in steps: how long one takes is the machine's."""
    policy, ask = make_policy(max_rows=4), long_ask(length=100)
    marks: list[int] = []
    inbox, others = Inbox(), Inbox()
    with Scheduler(policy, context=128, max_waiting=300) as scheduler:
        tickets: dict[int, Ticket] = {}

        def other(number: int, leaves: bool, index: int, event: Event) -> None:
            others(index, event)
            if leaves:
                tickets[number].cancel()

        def come(count: int, new_tokens: int, *, leave: bool = False, score: bool = False) -> None:
            for n in range(count):
                request = Request(prompt_ids=(65 + n % 50,) * (1 + 7 * n % 100), seeds=(n,))
                params = SamplingParams(max_new_tokens=new_tokens)
                asked = Ask(request=request, params=params, scores=Future() if score else None)
                tickets[n] = scheduler.submit([asked], partial(other, n, leave))

        def sink(index: int, event: Event) -> None:
            marks.append(len(steps))
            inbox(index, event)
            if (
                len(marks) == 5
            ):  # in the scheduler's own thread: while the stream is there, whatever the clock says
                if crowd.startswith("250"):
                    come(250, 2)
                elif crowd.startswith("32"):
                    come(32, 100, leave=True)
                else:
                    come(12, 1, score=True)

        scheduler.submit([ask], sink)
        (end,) = inbox.wait(1).values()
    between = steps[marks[4] : marks[-1]]
    assert sum(name != "decode" for name, _, _ in between) > 8
    assert max(later - before for before, later in pairwise(marks)) <= 2
    assert not others.events.empty()
    assert [[end]] == engine_of(policy).generate([ask.request], ask.params)


def test_decoding_has_its_share_of_the_time(
    steps: list[tuple[str, int, int]], costs: dict[str, float]
) -> None:
    """Pieces of prompts that take long: a stream beside them has a third of the time, and they the rest."""
    costs |= {"read": 12.0, "admit": 5.0}
    inbox, others, is_there = Inbox(), Inbox(), threading.Event()
    prompts = [(66,) * 100, (67,) * 20, (68,) * 30]

    def sink(index: int, event: Event) -> None:
        inbox(index, event)
        if not is_there.is_set():
            is_there.set()
            params = SamplingParams(max_new_tokens=1)
            asks = [Ask(request=Request(prompt_ids=ids, seeds=(0,)), params=params) for ids in prompts]
            scheduler.submit(asks, others)

    with Scheduler(make_policy(max_rows=4), context=128, max_waiting=9) as scheduler:
        scheduler.submit([long_ask(length=100)], sink)
        assert len(others.wait(3)) == 3
        assert len(inbox.wait(1)) == 1
    names = [name for name, live, _ in steps if live]
    reads = [place for place, name in enumerate(names) if name != "decode"]
    assert sorted(names[place] for place in reads) == ["admit"] * 2 + ["read"] * 4
    for place, later in pairwise(reads):
        assert later - place - 1 == -(-costs[names[place]] // 2)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of a machine where a step of 16 rows takes 8.5 times as long as one of one row, and 128 tokens of a
    prompt 12 times as long; and the most rows of a step."""
    clock = [0.0, 0.0]
    monkeypatch.setattr(scheduler_module, "perf_counter", lambda: clock[0])
    originals = {name: getattr(Engine, name) for name in ("decode", "admit", "read")}

    def decode(self: Engine, rows: Rows) -> None:
        originals["decode"](self, rows)
        clock[0] += 0.5 + 0.5 * len(rows.jobs)
        clock[1] = max(clock[1], len(rows.jobs))

    def admit(self: Engine, rows: Rows, waiting: list[Job]) -> None:
        before = len(rows.jobs)
        originals["admit"](self, rows, waiting)
        clock[0] += 0.2 * (len(rows.jobs) - before)

    def read(self: Engine, reading: Reading, most: int = 0) -> torch.Tensor:
        first = reading.num_read
        hidden = originals["read"](self, reading, most)
        clock[0] += (reading.num_read - first) * 12 / 128
        return hidden

    for double in (decode, admit, read):
        monkeypatch.setattr(Engine, double.__name__, double)
    return clock


def gaps_beside(
    policy: Policy, asks: list[Ask], clock: list[float], *, leaves: bool, slowdown: float
) -> list[float]:
    """Return the time between the tokens of a stream from when others ask until the last of them is served or gone."""
    stream = replace(long_ask(length=300), streams=True)
    times: list[float] = []
    gone: list[float] = []
    tickets: list[Ticket] = []
    inbox = Inbox()

    def other(number: int, index: int, event: Event) -> None:
        if leaves:
            tickets[number].cancel()
        if leaves or not isinstance(event, Token):
            gone.append(clock[0])

    def sink(index: int, event: Event) -> None:
        times.append(clock[0])
        inbox(index, event)
        if len(times) == 40:
            tickets.extend(scheduler.submit([ask], partial(other, n)) for n, ask in enumerate(asks))

    with Scheduler(policy, context=1000, max_waiting=300, slowdown=slowdown) as scheduler:
        scheduler.submit([stream], sink)
        (end,) = inbox.wait(1).values()
        assert wait_for(lambda: len(gone) == len(asks))
    assert [[end]] == engine_of(policy).generate([stream.request], stream.params)
    beside = [time for time in times[39:] if time <= gone[-1]]
    return [later - before for before, later in pairwise(beside)]


CROWD = [Ask(request=Request(prompt_ids=(65 + n,), seeds=(n,)), params=PARAMS[0]) for n in range(60)]


@pytest.mark.parametrize(
    ("asks", "leaves"),
    [
        pytest.param(CROWD, False, id="rows"),
        pytest.param(
            [Ask(request=Request(prompt_ids=(66,) * 600, seeds=(0,)), params=PARAMS[0])], False, id="long"
        ),
        pytest.param(
            [replace(ask, params=SamplingParams(max_new_tokens=1)) for ask in CROWD], False, id="one"
        ),
        pytest.param([replace(ask, streams=True) for ask in CROWD], True, id="left"),
    ],
)
def test_a_stream_keeps_a_third_of_its_pace(asks: list[Ask], leaves: bool, slow: list[float]) -> None:
    policy = make_policy(max_rows=16, max_positions=1024)
    gaps = gaps_beside(policy, asks, slow, leaves=leaves, slowdown=3.0)
    assert statistics.mean(gaps) <= 3.0
    assert max(gaps) <= 16.0  # a piece of 128 tokens and a step
    if len(asks) == 1:
        assert max(gaps_beside(policy, asks, slow, leaves=leaves, slowdown=0.0)) > 48.0  # a piece of 512
    elif asks is CROWD:
        assert statistics.mean(gaps_beside(policy, asks, slow, leaves=leaves, slowdown=0.0)) > 6.0


def test_nobody_waits_for_the_end_of_another_s_stream() -> None:
    """Where each row takes as long as ten steps, the pace cannot be kept; the others go on, and are measured."""
    pace = _Pace(3.0)
    for rows in (1, 2, 4, 4, 4):
        pace.decoded(rows, 1.0 + 10.0 * (rows - 1))
        assert pace.most_rows == min(4, 2 * rows)
        assert pace.reading_share > 0
    assert pace.piece_tokens == 128


def test_without_a_stream_all_rows_are_used(slow: list[float]) -> None:
    inbox = Inbox()
    with Scheduler(make_policy(max_rows=16), context=128, max_waiting=300) as scheduler:
        scheduler.submit(CROWD, inbox)
        assert len(inbox.wait(60)) == 60
    assert slow[1] == 16


def test_a_place_is_free_when_its_client_hears_of_the_end() -> None:
    """A client that asks again at once is not refused, though there is room for one alone."""
    again = Inbox()

    def sink(_: int, event: Event) -> None:
        if isinstance(event, Completion):
            try:
                scheduler.submit([long_ask(length=3)], again)
            except BusyError as error:
                again(0, error)

    with Scheduler(make_policy(max_rows=1), context=128, max_waiting=0) as scheduler:
        scheduler.submit([long_ask(length=3)], sink)
        (end,) = again.wait(1).values()
        assert isinstance(end, Completion)


def test_long_prompts_are_served_as_the_engine_generates(
    policy: Policy, scheduler: Scheduler, steps: list[tuple[str, int, int]]
) -> None:
    asks = [
        Ask(
            request=Request(prompt_ids=tuple(range(40, 40 + length)), seeds=tuple(range(count))),
            params=PARAMS[length % 4],
            num_top=1 if length % 3 == 0 else None,
        )
        for length, count in ((88, 5), (33, 1), (32, 2), (5, 4), (64, 1), (65, 3))
    ]
    inboxes = [Inbox() for _ in asks]
    for ask, inbox in zip(asks, inboxes, strict=True):
        scheduler.submit([ask], inbox)
    text = tuple(range(30, 127))
    (scored,) = scheduler.score([text], 2).result(timeout=60)
    served = [inbox.wait(len(ask.request.seeds)) for ask, inbox in zip(asks, inboxes, strict=True)]
    scheduler.close()
    for ask, ends in zip(asks, served, strict=True):
        (alone,) = engine_of(policy).generate([ask.request], ask.params)
        assert [ends[place] for place in range(len(alone))] == alone
    micro = pack([TrainingSequence(prompt_ids=text[:1], completion_ids=text[1:])], token_budget=200)
    with torch.no_grad():
        trained = score_micro_batch(policy.model, micro.micro_batches[0], temperature=1.0)[0]
    assert [token.logprob for token in scored] == [None, *trained.tolist()]


@pytest.mark.some(4)
@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    "params",
    [*PARAMS, SamplingParams(max_new_tokens=20, top_k=1), SamplingParams(max_new_tokens=9, top_p=1e-9)],
)
def test_logits_that_are_no_numbers_concern_their_row_alone(params: SamplingParams) -> None:
    policy = make_policy(max_rows=8, tie_embeddings=False, **WIDE)
    with torch.no_grad():
        policy.model.get_parameter("model.embed_tokens.weight")[200] = float("nan")
    policy.model.num_valid_tokens = 200  # it is never drawn
    good = Ask(request=Request(prompt_ids=(65, 66), seeds=(1, 2)), params=params)
    bad = Ask(request=Request(prompt_ids=(65, 200), seeds=(1, 2)), params=params, num_top=1)
    inboxes = [Inbox() for _ in range(3)]
    with Scheduler(policy, context=128, max_waiting=100) as scheduler:
        scheduler.generate([good.request], params)  # the engine looks at the first prompts' logits by itself
        for ask, inbox in zip((good, bad, good), inboxes, strict=True):
            scheduler.submit([ask], inbox)
        served = [inbox.wait(2) for inbox in inboxes]
        with pytest.raises(RuntimeError, match="not finite numbers"):
            scheduler.score([(65, 66), (65, 200, 66)], 1).result(timeout=60)
    assert all("not finite numbers" in str(end) for end in served[1].values())
    (alone,) = engine_of(policy).generate([good.request], params)
    assert [served[0][0], served[0][1]] == [served[2][0], served[2][1]] == alone


@pytest.mark.parametrize("where", ["decode", "admit"])
def test_a_row_that_fails_takes_no_other_with_it(
    where: str, scheduler: Scheduler, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, rotten = getattr(Engine, where), 71

    class PanicError(BaseException):
        """As pyo3's, which is no Exception."""

    def fails(self: Engine, state: Rows, *more: Any) -> None:
        original(self, state, *more)
        if any(rotten in job.request.prompt_ids for job in state.jobs):
            raise PanicError("one row is rotten")

    asks = [Ask(request=Request(prompt_ids=(65, 80 + n), seeds=(n,)), params=PARAMS[n % 4]) for n in range(5)]
    asks.insert(2, Ask(request=Request(prompt_ids=(70, rotten), seeds=(5,)), params=PARAMS[0]))
    inboxes = [Inbox() for _ in asks]
    scheduler.submit([long_ask(length=3)], first := Inbox())
    first.wait(1)
    monkeypatch.setattr(Engine, where, fails)
    for ask, inbox in zip(asks, inboxes, strict=True):
        scheduler.submit([ask], inbox)
    ends = [inbox.wait(1)[0] for inbox in inboxes]
    scheduler.close()
    monkeypatch.undo()
    for ask, inbox, end in zip(asks, inboxes, ends, strict=True):
        if rotten in ask.request.prompt_ids:
            assert str(end) == "PanicError: one row is rotten"
            continue
        (alone,) = engine_of(policy).generate([ask.request], ask.params)
        assert [end] == alone
        assert [token.id for token in inbox.tokens[0]] == list(alone[0].ids)  # none is sent twice


def test_closing_tells_everyone(endless: threading.Event) -> None:
    scheduler = Scheduler(make_policy(), context=128, max_waiting=4)
    inbox = Inbox()
    scheduler.submit([long_ask(n) for n in range(6)], inbox)
    inbox.events.get(timeout=60)
    threading.Timer(0.1, endless.set).start()
    scheduler.close()
    assert {str(end) for end in inbox.wait(6).values()} == {"the server is closing"}
    with pytest.raises(BusyError, match="closing"):
        scheduler.submit([long_ask()], inbox)


def test_who_waits_gets_what_the_engine_gives(policy: Policy, scheduler: Scheduler) -> None:
    requests = [
        Request(prompt_ids=tuple(range(65, 67 + n)), seeds=(n, 1000 + n)[: 1 + n % 2]) for n in range(4)
    ]
    beside = Inbox()
    scheduler.submit([long_ask()], beside)
    served = [scheduler.generate(requests, params) for params in PARAMS]
    beside.wait(1)
    with pytest.raises(UserError, match="has 128 tokens"):
        scheduler.generate([Request(prompt_ids=(65,) * 128, seeds=(0,))], PARAMS[0])
    scheduler.close()
    assert served == [policy.engine().generate(requests, params) for params in PARAMS]
    with pytest.raises(BusyError, match="closing"):
        scheduler.generate(requests, PARAMS[0])


def test_who_waits_is_told_that_the_server_closes(endless: threading.Event) -> None:
    scheduler = Scheduler(make_policy(), context=128, max_waiting=4)
    told: queue.Queue[Exception] = queue.Queue()

    def wait() -> None:
        try:
            scheduler.generate([Request(prompt_ids=(65, 66), seeds=(0, 1, 2, 3))], PARAMS[0])
        except BusyError as error:
            told.put(error)

    threading.Thread(target=wait, daemon=True).start()
    while not scheduler.num_pending:
        pass
    threading.Timer(0.1, endless.set).start()
    scheduler.close()
    assert str(told.get(timeout=60)) == "the server is closing"


def test_prompts_that_do_not_fit(scheduler: Scheduler) -> None:
    scheduler.check((65,) * 127)
    with pytest.raises(UserError, match="has 128 tokens, the context served here holds 128"):
        scheduler.check((65,) * 128)
    scheduler.check((65,) * 128, room=0)
    with pytest.raises(UserError, match="prompt 3 has token id 258"):
        scheduler.check((258,), "prompt 3")


# --- text ------------------------------------------------------------------------------------------------------


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    text = TokenText(tokenizer, (65,))
    return [text.push(index) for index in ids] + [text.flush()]


def test_characters_are_never_cut() -> None:
    """Every token is one byte: a piece comes when its character is whole."""
    tokenizer = Tokenizer.bytes()
    for said in ("aé中😀b", "👩‍👩‍👧", "x\ufffdy"):
        got = pieces(tokenizer, tokenizer.encode(said))
        assert "".join(got) == said
        assert [piece for piece in got if piece] == list(said) or "\ufffd" in said


def test_broken_bytes_are_the_same_as_decoded_at_once() -> None:
    tokenizer, generator = Tokenizer.bytes(), torch.Generator().manual_seed(3)
    for length in (1, 2, 5, 40, 300):
        ids = torch.randint(120, 256, (length,), generator=generator).tolist()
        got = pieces(tokenizer, ids)
        assert "".join(got) == tokenizer.decode(ids)
    # Garbage does not pile up: it is let go of in time.
    assert max(map(len, got)) < 40


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece spells unknown characters as <0x..> tokens, and marks word beginnings."""
    words = {"<unk>": 0, "▁a": 1, "b": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    backend = Backend(models.BPE(vocab=words, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, roles={})


@pytest.mark.parametrize("stop", ["。", "😀", "中。", "b"])
def test_a_stop_string_is_found_among_byte_tokens(policy: Policy, stop: str) -> None:
    """A window that begins inside a character hides nothing: its decoder gives up a whole run of bytes."""
    for num_before in range(9):
        text = "中" * num_before + stop
        ids = [2] if text == "b" else [3 + byte for byte in text.encode()]
        engine = Engine(policy.model, stop_ids=(), decode=byte_fallback_tokenizer().decode)
        state = Rows.empty(1, len(ids), torch.device("cpu"))
        params = SamplingParams(max_new_tokens=len(ids))
        request = Request(prompt_ids=(1,), seeds=(0,))
        state.jobs.append(Job(request=request, seed=0, params=params, stop_strings=(stop,)))
        state.tokens[0, : len(ids)] = torch.tensor(ids)
        for count in range(1, len(ids) + 1):
            state.counts[0] = count
            engine.stop_on_text(state)
            assert bool(state.stopped[0]) == (count == len(ids))


def test_byte_fallback_tokens_become_characters() -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = [1, *(3 + byte for byte in "中😀".encode()), 2, 1]
    assert [piece for piece in pieces(tokenizer, ids) if piece] == [" a", "中", "😀", "b", " a"]


def test_stop_strings_are_cut_and_their_beginnings_held() -> None:
    stops = StopText(["###", "END"])
    assert [stops.push(text) for text in ("a#", "b##", "c E", "N", "d", "#", "##e")] == [
        "a",
        "#b",
        "##c ",
        "",
        "ENd",
        "",
        "",
    ]
    assert stops.push("more") == stops.flush() == ""
    open_end = StopText(["###"])
    assert open_end.push("a##") + open_end.flush() == "a##"


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("schema", "said", "thinking", "answer"),
    [
        ("think_answer", "1+1</think>\n<answer> 2 </answer>", "1+1", "2"),
        ("think_answer", "never closed <answer>2</answer>", "never closed <answer>2</answer>", ""),
        ("think_answer", "t</think>a < b <answer>c</answer> d\n", "t", "a < b c d"),
        ("think_answer", "</think></think>x", "", "</think>x"),
        ("reasoning_answer", "hm <reasoning>t</reasoning><answer>5</answer>", "t", "hm5"),
        ("reasoning_answer", "<reason", "", "<reason"),
        ("r1", "t</think>\n\nSo \\boxed{2} <answer>", "t", "So \\boxed{2} <answer>"),
        ("boxed", "<think>t</think><answer>2</answer>", "", "<think>t</think><answer>2</answer>"),
        ("none", "a <answer>2</answer>", "", "a <answer>2</answer>"),
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>",
            "t",
            "2",
        ),
    ],
)
def test_thinking_and_answer_part_however_they_come(
    schema: str, said: str, thinking: str, answer: str, size: int
) -> None:
    response = ResponseText(SCHEMAS[schema])
    got = [response.push(said[n : n + size]) for n in range(0, len(said), size)] + [
        response.push("", last=True)
    ]
    assert "".join(piece.thinking for piece in got) == thinking
    text = "".join(piece.answer for piece in got)
    assert text == answer.replace("hm5", "hm 5")


def test_conversations_are_asked_as_the_policy_is(policy: Policy) -> None:
    with pytest.raises(UserError, match="bare question: send one user message"):
        chat_prompt(policy, [{"role": "user", "content": "1+1"}])  # with the instruction in front
    policy.system_prompt = False
    asked = [{"role": "user", "content": "1+1="}]
    assert policy.tokenizer.decode(chat_prompt(policy, asked)) == "1+1=<think>"
    base = Policy(policy.model, policy.tokenizer.with_template(BASE_TEMPLATE), policy.schema)
    text = base.tokenizer.decode(chat_prompt(base, asked))
    assert text == f"{base.schema.system_prompt}\n\nQuestion: 1+1=\nAnswer:\n<think>"
    own = chat_prompt(base, [{"role": "system", "content": "Be brief."}, *asked])
    assert base.tokenizer.decode(own) == "Be brief.\n\nQuestion: 1+1=\nAnswer:\n<think>"
    deaf = policy.tokenizer.with_template(
        "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}\n{% endfor %}"
    )
    with pytest.raises(UserError, match=r"drops message 0 \(system\)"):
        chat_prompt(Policy(policy.model, deaf, policy.schema), asked)


def test_equal_params_are_one_group() -> None:
    from whet.generate.rows import by_params

    request = Request(prompt_ids=(1,), seeds=(0,))
    jobs = [Job(request=request, seed=0, params=replace(PARAMS[n % 2])) for n in range(4)]
    assert [members for _, members in by_params(jobs)] == [[0, 2], [1, 3]]
    same = [Job(request=request, seed=0, params=PARAMS[0]) for _ in range(3)]
    assert [members for _, members in by_params(same)] == [None]


def test_what_a_request_becomes_as_a_job(policy: Policy, scheduler: Scheduler) -> None:
    prompt = policy.tokenizer.encode("1+2=")
    long = SamplingParams(max_new_tokens=10**6, top_k=3)
    cases = ((long, True), (replace(long, top_k=0), False), (replace(long, temperature=0.0), False))
    for params, is_recorded in cases:
        ask = Ask(request=Request(prompt_ids=tuple(prompt), seeds=(1, 2)), params=params, records=True)
        ticket = scheduler.submit([ask], lambda index, event: None)
        assert len(ticket.jobs) == 2
        for job in ticket.jobs:
            assert job.request.max_new_tokens == scheduler.context - len(prompt)
            assert (job.kept is not None) == is_recorded
        ticket.cancel()


def test_tokens_that_end_a_completion_are_no_text(policy: Policy) -> None:
    ids = policy.tokenizer.encode("12")
    text = TokenText(policy.tokenizer, silent_ids=frozenset(ids[1:]))
    assert [text.push(index) for index in (*ids, ids[0])] == ["1", "", "1"]
    assert text.flush() == ""


def test_of_several_stop_strings_the_first_in_the_text_cuts() -> None:
    stops = StopText(("cd", "b"))
    assert stops.push("abcd") == "a"
    assert (stops.push("e"), stops.flush()) == ("", "")


def test_a_response_thinks_once() -> None:
    schema = replace(SCHEMAS["think_answer"], opening_in_prompt=False)
    response = ResponseText(schema)
    said = f"{schema.think_open}a{schema.think_close}b {schema.think_open}c"
    piece = response.push(said, last=True)
    assert (piece.thinking, piece.answer) == ("a", f"b {schema.think_open}c")
