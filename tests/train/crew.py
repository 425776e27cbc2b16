"""Rollout workers as threads: they refuse what other processes would (what cannot be pickled), and die when told to."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from whet.generate.backends.staff import LostError, Refs
from whet.generate.backends.workers import RolloutWorker


class Hand:
    """A worker, with a thread for each of two calls at a time, as Ray's actors here."""

    def __init__(self, crew: ThreadCrew) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.worker: Any = (
            RolloutWorker(fetch=lambda refs: [pickle.loads(crew.store[ref]) for ref in refs])
            if crew.actor is None
            else crew.actor()
        )
        self.owed: set[Future[Any]] = set()
        self.is_dead = False


class ThreadCrew:
    """Threads in place of processes.

    Args:
        before: Called in the worker before each call that works, with its number over all workers; what it returns:
            None to go on, 'die' to be lost, 'late' to be lost after the answer was drawn.
        actor: The workers' class; None for rollout workers.
    """

    def __init__(
        self, before: Callable[[int], str | None] = lambda _: None, actor: Callable[[], Any] | None = None
    ) -> None:
        self.actor = actor
        self.store: dict[int, bytes] = {}
        self.hands: list[Hand] = []
        self.calls, self.fired, self.is_closed = 0, 0, False
        self._before, self._lock = before, threading.Lock()

    def put(self, value: Any) -> int:
        self.store[len(self.store)] = pickle.dumps(value)
        return len(self.store) - 1

    def hire(self) -> Hand:
        self.hands.append(Hand(self))
        return self.hands[-1]

    def call(self, hand: Hand, method: str, *arguments: Any) -> Future[Any]:
        ref: Future[Any] = Future()
        if hand.is_dead:
            ref.set_exception(LostError("dead"))
            return ref
        hand.owed.add(ref)
        if method == "load" and self.actor is None:
            arguments = (pickle.loads(self.store[arguments[0]]),)
        hand.pool.submit(self._run, hand, ref, method, pickle.dumps(arguments))
        return ref

    def _run(self, hand: Hand, ref: Future[Any], method: str, sent: bytes) -> None:
        order = result = None
        try:
            if method not in ("load", "cut"):
                with self._lock:
                    self.calls += 1
                    number = self.calls
                order = self._before(number)
            if order != "die":
                result = pickle.loads(pickle.dumps(getattr(hand.worker, method)(*pickle.loads(sent))))
        except Exception as error:
            if ref in hand.owed:
                hand.owed.discard(ref)
                ref.set_exception(error)
            return
        if order in ("die", "late"):
            self.kill(hand)
        elif ref in hand.owed:
            hand.owed.discard(ref)
            ref.set_result(result)

    def kill(self, hand: Hand) -> None:
        hand.is_dead = True
        for ref in list(hand.owed):
            hand.owed.discard(ref)
            ref.set_exception(LostError("killed"))

    def wait(self, refs: Refs, timeout_s: float) -> Refs:
        done, _ = wait(refs, timeout_s, FIRST_COMPLETED)
        return [ref for ref in refs if ref in done]

    def result(self, ref: Future[Any]) -> Any:
        return ref.result(timeout=0)

    def fire(self, hand: Hand) -> None:
        self.fired += 1
        self.kill(hand)
        hand.pool.shutdown(wait=False)

    def close(self) -> None:
        self.is_closed = True
        for hand in self.hands:
            hand.pool.shutdown(wait=False)
