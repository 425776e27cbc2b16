"""Continuous batching for requests that come at any time: one thread owns the model, everyone else asks it.

The steps are the engine's own (`Engine.admit`, `decode`, `harvest`), so a completion is what `Engine.generate` makes of
the same prompt and seed, whoever else is being served.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from whet.generate.policy import Policy
from whet.generate.rows import Completion, Job, Request, Rows, Token
from whet.generate.sampling import SamplingParams
from whet.types import UserError

CLOSE_S = 30.0
CLOSING = "the server is closing"

Event = Token | Completion | Exception
Sink = Callable[[int, Event], None]


class BusyError(RuntimeError):
    """As many completions wait as may wait: come back later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Samples wanted of one prompt.

    Attributes:
        request: Prompt and seeds.
        params: How tokens are drawn; `max_new_tokens` is bounded by the context's room.
        stop_strings: Texts that end a completion, besides the policy's own.
        num_top: Give the model's own log-probabilities, with this many alternatives; None for none.
    """

    request: Request
    params: SamplingParams
    stop_strings: tuple[str, ...] = ()
    num_top: int | None = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """The handle of what was asked for together."""

    jobs: tuple[Job, ...]

    def cancel(self) -> None:
        """Free the rows at the next step; no end is announced."""
        for job in self.jobs:
            job.cancelled = True


@dataclass(slots=True, eq=False)
class _Scoring:
    """Texts to score, and who waits for it."""

    prompts: Sequence[Sequence[int]]
    num_top: int
    future: Future[list[list[Token]]]
    results: list[list[Token]] = field(default_factory=list)


class Scheduler:
    """Serves one policy. Use it as a context manager.

    Args:
        policy: The policy; until `close`, nobody else may run its model.
        context: Longest prompt and completion together, in tokens; the cache takes `policy.max_rows` times that.
        max_waiting: Completions that may wait for a row.

    Raises:
        UserError: If the cache does not fit in memory.
    """

    def __init__(self, policy: Policy, *, context: int, max_waiting: int) -> None:
        self.context = min(context, policy.model.config.max_positions)
        self.max_completions = policy.max_rows + max_waiting
        self._engine = policy.engine()
        self._max_rows = policy.max_rows
        self._waiting: deque[Job] = deque()
        self._scorings: deque[_Scoring] = deque()
        self._sinks: dict[Job, Callable[[Event], None]] = {}
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
        """End the thread; what still runs or waits gets an exception."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(CLOSE_S)

    @property
    def num_pending(self) -> int:
        """Completions and texts that are being worked at, or wait."""
        return len(self._sinks) + len(self._scorings)

    def check(self, prompt_ids: Sequence[int], name: str = "the prompt", *, room: int = 1) -> None:
        """Refuse a prompt that cannot be read, or that does not leave `room` tokens in the context.

        Raises:
            UserError: One line.
        """
        if len(prompt_ids) + room > self.context:
            raise UserError(
                f"{name} has {len(prompt_ids)} tokens, the context served here holds {self.context}: shorten it"
            )
        self._engine.check(prompt_ids, name)

    def submit(self, asks: Sequence[Ask], sink: Sink) -> Ticket:
        """Ask for completions, all of them or none.

        Args:
            asks: What is wanted; prompts that `check` lets pass.
            sink: Called in the scheduler's thread with the number of the completion (over all seeds of all asks) and a
                Token for each token, then its Completion, or an Exception. One that raises cancels.

        Returns:
            The handle to cancel by.

        Raises:
            BusyError: If too many wait.
            UserError: If there would never be room for so many.
        """
        jobs: list[Job] = []
        for ask in asks:
            limit = min(ask.params.max_new_tokens, self.context - len(ask.request.prompt_ids))
            request = replace(ask.request, max_new_tokens=limit)
            # One width for all: equal filters are then one group, whatever length was asked for.
            params = replace(ask.params, max_new_tokens=self.context)
            stops = (*self._engine.stop_strings, *ask.stop_strings)
            jobs += [
                Job(request=request, seed=seed, params=params, stop_strings=stops, num_top=ask.num_top)
                for seed in request.seeds
            ]
        with self._wake:
            self._admit_or_refuse(len(jobs))
            self._sinks |= {job: partial(sink, index) for index, job in enumerate(jobs)}
            self._waiting += jobs
            self._wake.notify()
        return Ticket(tuple(jobs))

    def score(self, prompts: Sequence[Sequence[int]], num_top: int) -> Future[list[list[Token]]]:
        """Ask for the log-probabilities of texts' own tokens.

        Args:
            prompts: Texts that `check` lets pass (`room=0`).
            num_top: Likeliest tokens to name in each place.

        Raises:
            BusyError: If too many wait.
        """
        scoring = _Scoring(prompts, num_top, Future())
        with self._wake:
            self._admit_or_refuse(1)
            self._scorings.append(scoring)
            self._wake.notify()
        return scoring.future

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

    def _work(self, ready: Future[None]) -> None:
        try:
            size = self._engine.room(self._max_rows, self.context, self.context)
            with self._engine.session(size) as rows:
                ready.set_result(None)
                while self._await_work(rows):
                    try:
                        self._step(rows)
                    except (
                        Exception
                    ) as error:  # out of memory, or a mistake of ours: the others are served on
                        self._fail(rows, error)
        except Exception as error:
            ready.set_exception(error)
        else:
            self._waiting.clear()
            self._fail(rows, BusyError(CLOSING))
            for work in self._scorings:
                work.future.cancel()

    def _await_work(self, rows: Rows) -> bool:
        with self._wake:
            while not (self._closed or rows.jobs or self._waiting or self._scorings):
                self._wake.wait()
            return not self._closed

    def _step(self, rows: Rows) -> None:
        """Let waiting jobs in, or else draw a token for every row; hand out what is new; score one text."""
        cancelled = [row for row, job in enumerate(rows.jobs) if job.cancelled]
        if cancelled:
            rows.done[cancelled] = True
            self._deliver(self._engine.harvest(rows))
        first = len(rows.jobs)
        if ready := self._next_jobs(self._max_rows - first):
            self._engine.admit(rows, ready)
            with self._wake:  # those above the engine's budget of a prefill
                self._waiting.extendleft(ready)
        elif rows.jobs:
            self._engine.decode(rows)
            first = 0
        fresh = rows.last[first : len(rows.jobs)].tolist()
        for job, index in zip(rows.jobs[first:], fresh, strict=True):
            self._send(job, Token(index) if job.num_top is None else job.notes[-1])
        self._engine.stop_on_text(rows)
        if rows.jobs and bool(rows.done[: len(rows.jobs)].any()):
            self._deliver(self._engine.harvest(rows))
        self._score()

    def _next_jobs(self, num_free: int) -> list[Job]:
        """Take the jobs that rows are free for, the next one last."""
        with self._wake:
            self._forget_cancelled()
            return [self._waiting.popleft() for _ in range(min(num_free, len(self._waiting)))][::-1]

    def _deliver(self, ended: Sequence[Job]) -> None:
        for job in ended:
            if job.completion is not None and not job.cancelled:
                self._send(job, job.completion)
            del self._sinks[job]

    def _send(self, job: Job, event: Event) -> None:
        try:
            self._sinks[job](event)
        except Exception:  # whoever listened is gone
            job.cancelled = True

    def _score(self) -> None:
        if not self._scorings:
            return
        work = self._scorings[0]
        try:
            if not work.future.cancelled():
                work.results.append(self._engine.score(work.prompts[len(work.results)], work.num_top))
                if len(work.results) < len(work.prompts):
                    return
            if work.future.set_running_or_notify_cancel():
                work.future.set_result(work.results)
        except Exception as error:
            work.future.set_exception(error)
        self._scorings.popleft()

    def _fail(self, rows: Rows, error: Exception) -> None:
        """Tell all but those that wait, and begin again with empty rows."""
        del rows.jobs[:]
        with self._wake:
            waiting = set(self._waiting)
            failed = [job for job in self._sinks if job not in waiting]
        for job in failed:
            self._send(job, error)
            del self._sinks[job]
