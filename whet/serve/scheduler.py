"""Continuous batching for requests that arrive at any time; one thread owns the model.

The steps are the engine's own (`Engine.admit`, `read`, `decode`, `harvest`), so a completion equals `Engine.generate`'s
for the same prompt and seed, whatever else is being served. No step reads more than a piece of a prompt, and after each
decoding has its share of the time. While somebody reads a stream, there are as many rows and as long pieces as let it
go on at a third of the pace that it has alone (`_Pace`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter

import torch

from whet.generate.engine import EngineStats
from whet.generate.pieces import PIECE_TOKENS, Reading
from whet.generate.policy import Policy
from whet.generate.rows import Completion, Ends, Job, Request, Rows, Token
from whet.generate.sampling import SamplingParams
from whet.model.attention import KEY_BLOCK
from whet.model.lora.adapter import CONFIG, Adapter
from whet.model.lora.files import base_digest, read_adapter
from whet.model.quant import packed_parts
from whet.model.vision.ids import is_image
from whet.model.weights import load_model
from whet.types import UserError

KNOWN_PARAMS = 64
READING_SHARE = 2.0
"""Most time that reading takes for each second of decoding, while there are rows to decode."""
SLOWDOWN = 3.0
"""Mean time between two tokens of a stream at most, in times of a step that decodes one row and nothing else."""
FOR_READING = 0.5
"""The part of it that is left to reading, however many rows there are: it brings the next ones."""
LEAST_TOKENS = KEY_BLOCK
"""The shortest piece of a prompt: one of attention's blocks, so that sums are the whole prompt's."""
LEAST_ROWS = 4
"""Rows that are decoded together, however slow that is."""
WEIGHT = 0.1
"""Weight of a new measurement in a running mean."""
CLOSE_S = 30.0
CLOSING = "the server is closing"
NO_NUMBERS = (
    "the model's logits are not finite numbers here: its weights, or what it computes of this text, overflow"
)

Event = Token | Completion | Exception
Sink = Callable[[int, Event], None]


class BusyError(RuntimeError):
    """The queue of completions is full: try again later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A request for samples of one prompt.

    Attributes:
        request: Prompt and seeds.
        params: Sampling settings; `max_new_tokens` is capped by the room in the context.
        stop_strings: Texts that stop a completion, besides the policy's own.
        num_top: Return the model's own log-probabilities, with this many alternatives; None for none.
        records: Return what filters left to draw each token from, for a trainer.
        ends: What else ends a completion, or does not.
        streams: Somebody reads along: the time between its tokens matters, and not the last alone.
        scores: Gets the scores of the prompt's own tokens (`Scheduler.score`) from the reading that the completions go
            on from, before their first token; with as many alternatives as `num_top`.
    """

    request: Request
    params: SamplingParams
    stop_strings: tuple[str, ...] = ()
    num_top: int | None = None
    records: bool = False
    ends: Ends | None = None
    streams: bool = False
    scores: Future[list[Token]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _ScoredRequest(Request):
    """A request whose prompt is scored while it is read."""

    num_top: int
    scores: Future[list[Token]]


@dataclass(frozen=True, slots=True)
class Ticket:
    """The handle of one submission."""

    jobs: tuple[Job, ...]

    def cancel(self) -> None:
        """Free the rows at the next step; the sink is not notified."""
        for job in self.jobs:
            job.cancelled = True


@dataclass(slots=True, eq=False)
class _Scoring:
    """Texts to score, the future of the result, and the text that is being read."""

    prompts: Sequence[Sequence[int]]
    num_top: int
    adapter: str
    future: Future[list[list[Token]]]
    results: list[list[Token]] = field(default_factory=list)
    reading: Reading | None = None


@dataclass(slots=True, eq=False)
class _Outlet:
    """Where the events of a job go.

    A job that is started again draws the same tokens again: those that were sent are compared, and not sent twice.
    """

    sink: Callable[[Event], None]
    sent: list[int] = field(default_factory=list)
    place: int = 0

    def send(self, event: Event) -> None:
        """Pass an event on, or raise what the sink raises."""
        if isinstance(event, Token):
            self.place += 1
            if self.place <= len(self.sent):
                if self.sent[self.place - 1] == event.id:
                    return
                event = RuntimeError("a step failed, and the completion could not be drawn again")
                self.sink(event)
                raise event
            self.sent.append(event.id)
        self.sink(event)


@dataclass(slots=True)
class _Long:
    """A prompt that is read in pieces, its jobs, and its tokens' scores if they are wanted."""

    reading: Reading
    jobs: list[Job]
    scores: list[Token] = field(default_factory=list[Token])


def _mean(old: float | None, new: float, weight: float = WEIGHT) -> float:
    """Return a running mean, in which a moment that the machine spent elsewhere counts twice the mean at most."""
    return new if old is None else old + weight * (min(new, 2 * old) - old)


class _Pace:
    """How long steps take here, measured, and how much of what others want fits between two tokens of a stream.

    Args:
        slowdown: How many times longer than alone a stream may take for a token.

    On a GPU a step of 64 rows takes hardly longer than one of one row, and nothing is held back; on a CPU it takes
    eight times as long.
    """

    def __init__(self, slowdown: float) -> None:
        self.slowdown = slowdown
        self._lone_s: float | None = None
        self._step_s: float | None = None
        self._more_s: float | None = None
        self._read_s: float | None = None
        self._most_tried = 1

    def decoded(self, num_rows: int, seconds: float) -> None:
        """Note a step of decoding."""
        self._step_s = _mean(self._step_s, seconds)
        if self._lone_s is None or seconds < self._lone_s:
            self._lone_s = _mean(self._lone_s, seconds)
        elif num_rows == 1:
            # It grows with the context, slowly: a row by itself is not alone while requests keep Python busy.
            self._lone_s = _mean(self._lone_s, seconds, WEIGHT / 100)
        if num_rows > 1:
            self._more_s = _mean(self._more_s, max(seconds - self._lone_s, 1e-9) / (num_rows - 1))
        self._most_tried = max(self._most_tried, num_rows)

    def has_read(self, num_tokens: int, seconds: float) -> None:
        """Note a reading of tokens."""
        self._read_s = _mean(self._read_s, seconds / num_tokens)

    @property
    def most_rows(self) -> int:
        """Rows that a step has time for; never more than twice as many as were ever tried, and always a few: nobody
        waits for the end of another's stream."""
        if self._lone_s is None or self._more_s is None:
            return 2 * self._most_tried
        fitting = 1 + int((self.slowdown - FOR_READING - 1) * self._lone_s / self._more_s)
        return min(max(fitting, LEAST_ROWS), 2 * self._most_tried)

    @property
    def reading_share(self) -> float:
        """Seconds of reading that there is time for in each second of decoding."""
        if self._lone_s is None or self._step_s is None:
            return READING_SHARE
        # It never stops: who waits to be read would else wait for ever beside rows that are slow anyway.
        left_s = max(self.slowdown * self._lone_s - self._step_s, FOR_READING * self._lone_s)
        return left_s / self._step_s

    @property
    def piece_tokens(self) -> int:
        """Tokens of a prompt to read in one go: as many as take no longer than the reading between two tokens."""
        if self._lone_s is None or self._read_s is None:
            return LEAST_TOKENS
        fitting = int((self.slowdown - 1) * self._lone_s / self._read_s)
        return min(max(fitting // LEAST_TOKENS * LEAST_TOKENS, LEAST_TOKENS), PIECE_TOKENS)


class Scheduler:
    """Serves one policy. A context manager.

    Args:
        policy: The policy; until `close`, no other thread may run its model.
        context: Longest prompt and completion together, in tokens; the cache holds `policy.max_rows` times that.
        max_waiting: Completions that may wait for a row.
        slowdown: While somebody reads a stream, so many other completions run beside it as let it take this many times
            longer for a token than alone; 0 for as many as there are rows.

    Raises:
        UserError: If the cache does not fit in memory.
    """

    def __init__(self, policy: Policy, *, context: int, max_waiting: int, slowdown: float = SLOWDOWN) -> None:
        self.context = min(context, policy.model.config.max_positions)
        self.max_completions = policy.max_rows + max_waiting
        self._policy, self._engine = policy, policy.engine()
        self._max_rows = policy.max_rows
        self._waiting: deque[Job] = deque()
        self._scorings: deque[_Scoring] = deque()
        self._updates: deque[tuple[Update, Future[None]]] = deque()
        self._params: dict[SamplingParams, SamplingParams] = {}
        self._sinks: dict[Job, _Outlet] = {}
        # Jobs of a step that failed, in groups that run one after the other; what waits comes after them.
        self._suspects: deque[deque[Job]] = deque()
        self._long: _Long | None = None
        self._readers = deque((self._admit_short, self._read_long, self._score))
        self._owed_s = 0.0
        self._pace = _Pace(slowdown) if slowdown else None
        self._streams: set[Job] = set()
        self._wake = threading.Condition()
        self._closed = False
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(ready,), name="whet-scheduler", daemon=True)
        self._thread.start()
        try:
            ready.result()
        except (RuntimeError, MemoryError) as error:
            raise UserError(
                f"no room for the cache, {self._max_rows} rows of {self.context:,} tokens "
                f"({str(error).splitlines()[0][:120]}): lower policy.max_rows or context"
            ) from None

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; running and waiting requests get an exception."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(CLOSE_S)

    @property
    def stats(self) -> EngineStats:
        """Work done so far."""
        return self._engine.stats

    @property
    def num_pending(self) -> int:
        """Running and waiting completions and texts."""
        return len(self._sinks) + len(self._scorings)

    def check(self, prompt_ids: Sequence[int], name: str = "the prompt", *, room: int = 1) -> None:
        """Refuse a prompt that is invalid, or does not leave `room` tokens in the context.

        Raises:
            UserError: One line.
        """
        if len(prompt_ids) + room > self.context:
            raise UserError(
                f"{name} has {len(prompt_ids)} tokens, the context served here holds {self.context}: shorten it"
            )
        self._engine.check(prompt_ids, name)

    def submit(self, asks: Sequence[Ask], sink: Sink) -> Ticket:
        """Request completions, all of them or none.

        Args:
            asks: The requests; their prompts must pass `check`.
            sink: Called in the scheduler's thread with the index of the completion (over all seeds of all asks) and a
                Token for each token, then its Completion, or an Exception. If it raises, the submission is cancelled.

        Returns:
            The handle for cancelling.

        Raises:
            BusyError: If the queue is full.
            UserError: If the submission exceeds the server's limit, or names an adapter that is not here.
        """
        jobs: list[Job] = []
        streamed: list[Job] = []
        for ask in asks:
            self._engine.check_adapter(ask.request.adapter)
            limit = min(ask.params.max_new_tokens, self.context - len(ask.request.prompt_ids))
            request = replace(ask.request, max_new_tokens=limit)
            if ask.scores is not None:
                given = {item.name: getattr(request, item.name) for item in fields(request)}
                request = _ScoredRequest(**given, num_top=ask.num_top or 0, scores=ask.scores)
            # The same limit for all jobs, so that jobs with equal filters form one group whatever length was requested.
            params = self._shared(replace(ask.params, max_new_tokens=self.context))
            records = ask.records and params.is_filtered and params.temperature > 0
            own = self._policy.named(ask.request.adapter).stop_strings
            is_endless = ask.ends is not None and ask.ends.ignores_stop_ids
            stops = ask.stop_strings if is_endless else (*own, *ask.stop_strings)
            jobs += [
                Job(
                    request=request,
                    seed=seed,
                    params=params,
                    stop_strings=stops,
                    num_top=ask.num_top,
                    kept=[] if records else None,
                    ends=ask.ends,
                )
                for seed in request.seeds
            ]
            streamed += jobs[-len(request.seeds) :] if ask.streams else ()
        with self._wake:
            # Checked and queued under one lock: a submission is accepted as a whole or refused as a whole.
            self._admit_or_refuse(len(jobs))
            self._sinks |= {job: _Outlet(partial(sink, index)) for index, job in enumerate(jobs)}
            self._streams.update(streamed)
            self._waiting += jobs
            self._wake.notify()
        return Ticket(tuple(jobs))

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        """Draw every sample of every request, as `Engine.generate` does, beside whatever else is served; wait for it.

        Args:
            requests: Prompts with the seeds of their samples.
            params: Temperature, filters and the longest completion.

        Returns:
            For every request its completions, in the order of its seeds.

        Raises:
            BusyError: If the queue is full, or the server closes.
            UserError: If a prompt does not fit.
        """
        for request in requests:
            self.check(request.prompt_ids)
        events: SimpleQueue[tuple[int, Event]] = SimpleQueue()
        ticket = self.submit(
            [Ask(request=request, params=params) for request in requests],
            lambda index, event: None if isinstance(event, Token) else events.put((index, event)),
        )
        found: dict[int, Completion] = {}
        while len(found) < len(ticket.jobs):
            index, event = events.get()
            if isinstance(event, Exception):
                ticket.cancel()
                raise event
            if isinstance(event, Completion):
                found[index] = event
        ended = iter(found[index] for index in range(len(found)))
        return [[next(ended) for _ in request.seeds] for request in requests]

    def score(
        self, prompts: Sequence[Sequence[int]], num_top: int, adapter: str = ""
    ) -> Future[list[list[Token]]]:
        """Request the log-probabilities of texts' own tokens.

        Args:
            prompts: Texts that pass `check` (`room=0`).
            num_top: Number of most likely alternatives per position.
            adapter: One of several adapters, by name.

        Raises:
            BusyError: If the queue is full.
        """
        scoring = _Scoring(prompts, num_top, adapter, Future())
        with self._wake:
            self._admit_or_refuse(1)
            self._scorings.append(scoring)
            self._wake.notify()
        return scoring.future

    def update(self, change: Update) -> Future[None]:
        """Replace weights between two completions: those under way end with the old ones, those that wait get the new.

        Args:
            change: What replaces them, as `read_update` checked it.

        Raises:
            BusyError: If the server is closing.
        """
        done: Future[None] = Future()
        with self._wake:
            if self._closed:
                raise BusyError(CLOSING)
            self._updates.append((change, done))
            self._wake.notify()
        return done

    def _shared(self, params: SamplingParams) -> SamplingParams:
        """Return the one object of equal settings: rows of one object are drawn together, without a look at each."""
        if len(self._params) > KNOWN_PARAMS:
            self._params.clear()
        return self._params.setdefault(params, params)

    def _admit_or_refuse(self, count: int) -> None:
        self._forget_cancelled()
        if self._closed:
            raise BusyError(CLOSING)
        if count > self.max_completions:
            raise UserError(f"{count} completions at once; this server takes at most {self.max_completions}")
        if self.num_pending + count > self.max_completions:
            raise BusyError(
                f"{self.num_pending} completions run or wait, and {count} more would pass the limit of "
                f"{self.max_completions}: try again later"
            )

    def _forget_cancelled(self) -> None:
        gone = {job for job in self._waiting if job.cancelled}
        if gone:
            self._waiting = deque(job for job in self._waiting if job not in gone)
            for job in gone:
                del self._sinks[job]
            self._streams -= gone

    def _work(self, ready: Future[None]) -> None:
        rows: Rows | None = None
        try:
            size = self._engine.room(self._max_rows, self.context, self.context)
            while not self._closed:
                with self._engine.session(size) as rows:
                    if not ready.done():
                        ready.set_result(None)
                    while self._await_work(rows):
                        try:
                            self._step(rows)
                        except BaseException as error:  # out of memory, or a bug: keep serving
                            self._retry(rows, error)
                self._replace_weights()  # outside of the session, which holds their addresses
        except BaseException as error:
            self._closed = True
            if not ready.done():
                ready.set_exception(error)
                return
        self._waiting.clear()
        self._fail(list(self._sinks), BusyError(CLOSING))
        for work in self._scorings:
            work.future.cancel()
        for _, done in self._updates:
            done.cancel()

    def _await_work(self, rows: Rows) -> bool:
        """Wait until there is something to do; return whether it is to be done in this session."""
        with self._wake:
            while not (
                self._closed or self._is_under_way(rows) or self._waiting or self._scorings or self._updates
            ):
                self._wake.wait()
            return not self._closed and not (self._updates and not self._is_under_way(rows))

    def _is_under_way(self, rows: Rows) -> bool:
        """Say whether anything was begun that has to end with the weights it began with."""
        is_scoring = bool(self._scorings) and self._scorings[0].reading is not None
        return bool(rows.jobs or self._suspects or self._long or is_scoring)

    @torch.no_grad()
    def _replace_weights(self) -> None:
        """Copy what `update` was given into the parameters, or let an adapter stand beside them."""
        policy = self._policy
        parameters = dict(policy.model.named_parameters())
        while self._updates:
            change, done = self._updates.popleft()
            try:
                if isinstance(change, Adapter):
                    if policy.adapter is not None:
                        policy.adapter.remove(policy.model)
                    change.apply(policy.model)
                    policy.adapter = change
                else:
                    for name, tensor in change.items():
                        parameters[name].copy_(tensor)
            except Exception as error:  # out of memory: whoever sent it is told, the others are served
                done.set_exception(error)
            else:
                done.set_result(None)

    def _step(self, rows: Rows) -> None:
        """Sample a token for every row, or else read: admit jobs, read a piece of a prompt or of a text to score."""
        # Only this thread touches `rows`; other threads queue jobs and set `cancelled`, which is read once per step.
        cancelled = [row for row, job in enumerate(rows.jobs) if job.cancelled]
        if cancelled:
            rows.done[cancelled] = True
            self._deliver(self._engine.harvest(rows))

        # Reading goes first, since it fills rows. Then decoding has the time that it is owed, and one step at least: a
        # piece of a prompt may take as long as forty steps, and clients that keep asking must not stop the others.
        began, num_rows = perf_counter(), len(rows.jobs)
        if num_rows and (self._owed_s > 0 or not self._read(rows)):
            self._engine.decode(rows)
            self._announce(rows, 0)
            seconds = perf_counter() - began
            if self._pace:
                self._pace.decoded(num_rows, seconds)
            self._owed_s = max(0.0, self._owed_s - seconds)
        elif num_rows:
            share = self._pace.reading_share if self._pace and self._streams else READING_SHARE
            self._owed_s = (perf_counter() - began) / share
        else:
            self._read(rows)
            self._owed_s = 0.0

    def _num_free(self, rows: Rows) -> int:
        """Return how many more rows may be decoded; fewer than there are while they would slow a stream down."""
        most = self._max_rows
        if self._pace and self._streams:
            most = min(most, self._pace.most_rows)
        return max(most - len(rows.jobs), 0 if rows.jobs else 1)

    def _piece_tokens(self, rows: Rows) -> int:
        """Return how many tokens of prompts may be read in one go."""
        return self._pace.piece_tokens if self._pace and self._streams and rows.jobs else PIECE_TOKENS

    def _read(self, rows: Rows) -> bool:
        """Let the next kind of reading that has something to do take its turn; return whether there was any."""
        for _ in range(len(self._readers)):
            self._readers.rotate(-1)
            if self._readers[-1](rows):
                return True
        return False

    def _announce(self, rows: Rows, first: int) -> None:
        """Deliver the new tokens of the rows from `first` on, and what ended."""
        live = slice(first, len(rows.jobs))
        fresh = rows.last[live].tolist()
        scores = rows.logprobs[live].gather(1, rows.counts[live, None] - 1)[:, 0]
        failed = (~scores.isfinite()).tolist()
        for job, index, is_failed in zip(rows.jobs[live], fresh, failed, strict=True):
            if is_failed:
                self._fail([job], RuntimeError(NO_NUMBERS))
            else:
                self._send(job, Token(index) if job.num_top is None else job.notes[-1])

        # Tokens are delivered before rows end: a client sees the last token before the completion.
        self._engine.stop_on_text(rows)
        if rows.jobs and bool(rows.done[: len(rows.jobs)].any()):
            self._deliver(self._engine.harvest(rows))

    def _queue(self, rows: Rows) -> deque[Job]:
        """Return where the next jobs are taken from: those that wait, or a group that is tried again by itself."""
        while self._suspects and not (self._suspects[0] or rows.jobs or self._long):
            self._suspects.popleft()
        if self._suspects:
            return self._suspects[0]
        return deque() if self._updates else self._waiting

    def _admit_short(self, rows: Rows) -> bool:
        """Admit jobs whose prompts together are no longer than a piece, or one whose prompt is not cut."""
        ready: list[Job] = []
        with self._wake:
            self._forget_cancelled()
            queue = self._queue(rows)
            # A long prompt has the row that is free when its turn comes, however many short ones come after it.
            most = self._piece_tokens(rows)
            is_due = self._long is not None or (bool(queue) and _is_long(queue[0], most))
            num_free = self._num_free(rows) - is_due
            tokens, request = 0, None
            for job in tuple(queue):
                if _is_long(job, most):
                    continue
                tokens += len(job.request.prompt_ids) if job.request is not request else 0
                if len(ready) >= num_free or (ready and tokens > most):
                    break
                request = job.request
                ready.append(job)
                queue.remove(job)
        if ready:
            self._admit(rows, ready)
        return bool(ready)

    def _admit(self, rows: Rows, jobs: Sequence[Job]) -> None:
        """Admit jobs; if that fails, request by request, so that none fails with another."""
        first, waiting = len(rows.jobs), list(jobs[::-1])
        try:
            while waiting:
                self._engine.admit(rows, waiting)
        except BaseException as error:
            self._engine.give_up(rows, first)
            requests = list({id(job.request): job.request for job in jobs}.values())
            if len(requests) == 1:
                self._fail(jobs, error)
                return
            _restart(jobs)
            for request in requests:
                self._admit(rows, [job for job in jobs if job.request is request])
        else:
            self._announce(rows, first)

    def _next_long(self, rows: Rows) -> _Long | None:
        """Take the next prompt that is longer than a piece."""
        with self._wake:
            self._forget_cancelled()
            queue = self._queue(rows)
            most = self._piece_tokens(rows)
            found = next((job.request for job in queue if _is_long(job, most)), None)
            if found is None:
                return None
            jobs = [job for job in queue if job.request is found]
            for job in jobs:
                queue.remove(job)
        return _Long(self._engine.begin(found.prompt_ids, found.adapter), jobs)

    def _read_long(self, rows: Rows) -> bool:
        """Read a piece of a long prompt; once it is complete, admit its jobs as rows become free."""
        first, num_free = len(rows.jobs), self._num_free(rows)
        if self._long is None and num_free:
            self._long = self._next_long(rows)
        if (long := self._long) is None:
            return False
        cancelled = [job for job in long.jobs if job.cancelled]
        self._deliver(cancelled)
        jobs = [job for job in long.jobs if not job.cancelled]
        if not jobs or (long.reading.is_read and not num_free):
            self._long = long if jobs else None
            return False
        ready, long.jobs = jobs[:num_free], jobs[num_free:]
        try:
            if not long.reading.is_read:
                request = jobs[0].request
                scored = request if isinstance(request, _ScoredRequest) else None
                long.scores += self._read_piece(rows, long.reading, scored.num_top if scored else None)
                if scored and long.reading.is_read:
                    _check_scores(long.scores)
                    with suppress(InvalidStateError):  # the client is gone
                        scored.scores.set_result(long.scores)
            if not (ready and long.reading.is_read):
                long.jobs = jobs
                return True
            self._engine.admit_read(rows, long.reading, ready)
        except BaseException as error:
            self._engine.give_up(rows, first)
            self._long = None
            self._fail(jobs, error)
        else:
            self._long = long if long.jobs else None
            self._announce(rows, first)
        return True

    def _read_piece(self, rows: Rows, reading: Reading, num_top: int | None) -> list[Token]:
        """Read a piece of a text; return its tokens' scores, if `num_top` is given."""
        began, most = perf_counter(), self._piece_tokens(rows)
        count = min(most, len(reading.ids) - reading.num_read)
        scores: list[Token] = []
        if num_top is None:
            self._engine.read(reading, most)
        else:
            scores = self._engine.score_piece(reading, num_top, most)
        if self._pace and count >= LEAST_TOKENS:
            self._pace.has_read(count, perf_counter() - began)
        return scores

    def _score(self, rows: Rows) -> bool:
        """Score a piece of a text."""
        if not self._scorings or (self._updates and self._scorings[0].reading is None):
            return False
        work = self._scorings[0]
        try:
            if not work.future.cancelled():
                if work.reading is None:
                    work.reading = self._engine.begin(work.prompts[len(work.results)], work.adapter)
                    work.results.append([])
                work.results[-1] += self._read_piece(rows, work.reading, work.num_top)
                if not work.reading.is_read:
                    return True
                work.reading = None
                _check_scores(work.results[-1])
                if len(work.results) < len(work.prompts):
                    self._scorings.rotate(-1)  # round robin: one client must not block others
                    return True
            if work.future.set_running_or_notify_cancel():
                work.future.set_result(work.results)
        except BaseException as error:
            with suppress(InvalidStateError):  # cancelled in this moment
                work.future.set_exception(error)
        self._scorings.popleft()
        return True

    def _deliver(self, ended: Sequence[Job]) -> None:
        for job in ended:
            self._send(job, job.completion, is_last=True)

    def _send(self, job: Job, event: Event | None, *, is_last: bool = False) -> None:
        """Tell a job's client, if it still listens; after the last event, its place is free before it hears of it."""
        outlet = self._sinks.pop(job, None) if is_last else self._sinks.get(job)
        if is_last:
            self._streams.discard(job)
        if outlet is None or event is None or job.cancelled:
            return
        try:
            outlet.send(event)
        except Exception:  # the client is gone
            job.cancelled = True

    def _fail(self, jobs: Sequence[Job], error: BaseException) -> None:
        """End jobs with an error."""
        told = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        for job in jobs:
            if isinstance(job.request, _ScoredRequest):
                with suppress(InvalidStateError):
                    job.request.scores.set_exception(told)
            self._send(job, told, is_last=True)
            job.cancelled = True

    def _retry(self, rows: Rows, error: BaseException) -> None:
        """Start the jobs of a step that failed again, in two groups, one after the other.

        Where one of them was the cause, its group fails again, and is parted again, until it fails alone. The rows'
        state is unknown after an error, but a job draws the same tokens again.
        """
        gone = [job for job in rows.jobs if job.cancelled]
        jobs = [job for job in rows.jobs if not job.cancelled]
        self._engine.give_up(rows, 0)
        self._deliver(gone)
        if len(jobs) == 1:
            self._fail(jobs, error)
        elif jobs:
            _restart(jobs)
            for job in jobs:
                self._sinks[job].place = 0
            half = len(jobs) // 2
            self._suspects.extendleft((deque(jobs[half:]), deque(jobs[:half])))


def _is_long(job: Job, most: int) -> bool:
    """Say whether a job's prompt is read in pieces of `most` tokens; one with images is not: an image cannot be cut.

    A prompt that is scored is, too, however short: its hidden states are wanted.
    """
    ids = job.request.prompt_ids
    is_scored = isinstance(job.request, _ScoredRequest)
    return is_scored or (len(ids) > most and not any(map(is_image, ids)))


def _check_scores(tokens: Sequence[Token]) -> None:
    """Refuse scores that are no numbers."""
    if any(token.logprob != token.logprob for token in tokens):
        raise RuntimeError(NO_NUMBERS)


def _restart(jobs: Sequence[Job]) -> None:
    """Forget what jobs recorded."""
    for job in jobs:
        job.notes.clear()
        job.completion = None
        if job.kept is not None:
            job.kept.clear()


Update = Mapping[str, torch.Tensor] | Adapter
"""What replaces weights: parameters by name, or the adapter that stands beside them."""


def read_update(policy: Policy, folder: str) -> Update:
    """Read the weights, or the adapter, that shall replace a policy's.

    Args:
        policy: The policy.
        folder: Hugging Face folder of the same model, or folder of an adapter on it.

    Returns:
        Every parameter by name; or the adapter.

    Raises:
        UserError: If there is no such folder, it holds another model or an adapter on one, or the policy's weights
            cannot be replaced.
    """
    path, given = Path(folder), f"model_path {folder[:200]!r}"
    if not path.is_dir():  # never a hub's name
        raise UserError(f"{given}: no folder of this machine")
    if policy.several is not None:
        raise UserError("weights beside several adapters cannot be replaced: serve the model itself")
    if (path / CONFIG).is_file():
        return _read_adapter(policy, path, given)
    if policy.adapter is not None or packed_parts(policy.model):
        raise UserError(
            "weights beside an adapter, or rounded ones, cannot be replaced: serve the model itself"
        )
    parameters = dict(policy.model.named_parameters())
    first = next(iter(parameters.values()))
    model, _ = load_model(folder, dtype=first.dtype, device=first.device)
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in parameters.items()}:
        raise UserError(f"{given}: another model than the one that is served")
    return tensors


def read_outline(
    policy: Policy, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Read what weights will come from a trainer.

    Returns:
        Dtype and shape of every parameter by name, in the order in which they come.

    Raises:
        UserError: If they are another model's, or the policy's weights cannot be replaced.
    """
    if policy.several is not None or policy.adapter is not None or packed_parts(policy.model):
        raise UserError(
            "weights beside an adapter, or rounded ones, cannot be replaced: serve the model itself"
        )
    if not len(names) == len(dtypes) == len(shapes):
        raise UserError(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: expected as many of each"
        )
    kinds = [getattr(torch, name, None) for name in dtypes]
    if bad := next(
        (n for n, kind in zip(dtypes, kinds, strict=True) if not isinstance(kind, torch.dtype)), None
    ):
        raise UserError(f"dtypes: {bad[:40]!r} is none")
    own = {name: tuple(parameter.shape) for name, parameter in policy.model.named_parameters()}
    if len(set(names)) < len(names) or own != {n: tuple(s) for n, s in zip(names, shapes, strict=True)}:
        raise UserError("names and shapes: another model than the one that is served")
    return {n: (kind, own[n]) for n, kind in zip(names, kinds, strict=True) if kind is not None}


def _read_adapter(policy: Policy, folder: Path, given: str) -> Adapter:
    """Read an adapter that shall stand beside the served model, in place of one that was pushed before."""
    adapter = read_adapter(folder, is_new=True)
    if policy.folder is None:
        raise UserError(f"{given}: the served model has no folder that an adapter could have been trained on")
    if adapter.base_sha256 not in (None, base_digest(policy.folder)):
        raise UserError(
            f"{given}: the adapter is trained beside another model ({adapter.base}) than the one that is served "
            f"({policy.folder}): serve that one"
        )
    kinds = {packed.kind for packed in packed_parts(policy.model)} or {"none"}
    if kinds != {adapter.quantize}:
        raise UserError(
            f"{given}: the adapter is trained with policy.quantize = {adapter.quantize}, the served model has "
            f"{' and '.join(sorted(kinds))}: start whet serve with the same --policy.quantize"
        )
    if adapter.fit(policy.model) is not policy.model:
        raise UserError(
            f"{given}: the adapter unties embeddings and head, which cannot be done while they are served; leave them "
            "out of lora.modules_to_save"
        )
    return adapter
