"""Grading in other processes: a run's answers are judged, and its own rewards computed, by workers that Ray starts.

Where graders are slow (programs in a sandbox, a user's function), the trainer's host is not what a step waits for. Each
worker has the run's task, with its sandbox, and the same grader pools as a run without them. What comes back are
verdicts and outcomes; what follows from these is computed here, by the code of a run without workers. What a lost or
late worker had is graded again by another one.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from whet.eval.grade import judge_answers
from whet.generate.backends.crew import RayCrew
from whet.generate.backends.dealing import PORTIONS, Part, portions
from whet.generate.backends.staff import Crew, Slot, Staff
from whet.ranks.collectives import shard
from whet.rewards.base import REWARDS, TIMEOUT_S, Item, WeightedReward, own_name, own_pool, own_reward
from whet.rewards.presets import ProgramTask
from whet.sandbox.graders.graders import GraderPool, Outcome
from whet.schema import ResponseSchema
from whet.tasks.base import TaskConfig, load_task
from whet.train.rl_config import RLConfig
from whet.types import Problem, Task

KEPT = 1 << 16
"""Verdicts that are remembered: the reward and the metrics ask for the same ones."""

Answer = tuple[Problem, str | None]
Verdict = tuple[bool | None, dict[str, float] | None]
"""Whether an answer is right, and the scores of a program by name."""


class GradingWorker:
    """A task and the pools of a run's own rewards, in a process of their own."""

    def __init__(self) -> None:
        self._task: Task | None = None
        self._pools: dict[str, GraderPool] = {}

    def load(self, config: TaskConfig, own: Sequence[str], folder: str, timeout_s: float = TIMEOUT_S) -> int:
        """Make the task and the pools; return the process id.

        Args:
            config: The run's task.
            own: The run's own rewards, as `whet.rewards.base.own_pool` reads them.
            folder: Where the run was started: paths are relative to it.
            timeout_s: Seconds that one call of an own reward may take.
        """
        with suppress(OSError):  # another machine may not have it, nor need it
            os.chdir(folder)
        self._task = load_task(config)
        self._task.problems("train")  # some tasks judge only what they have read
        self._pools = {spec: own_pool(spec, timeout_s) for spec in own}
        return os.getpid()

    def judge(self, items: Sequence[Answer]) -> list[Verdict]:
        """Judge answers by the task; with programs, also score their parts."""
        assert self._task is not None
        verdicts, task = judge_answers(self._task, items), self._task
        scores = [task.code_scores(*item) if isinstance(task, ProgramTask) else None for item in items]
        return list(zip(verdicts, scores, strict=True))

    def own(self, spec: str, items: Sequence[Item]) -> list[Outcome]:
        """Run one of the user's rewards."""
        return self._pools[spec].map(items)


@dataclass(slots=True, eq=False)
class _Call:
    """A call of `Graders.map`: what is graded, by which method, and what is known so far.

    Attributes:
        method: A method of `GradingWorker`.
        items: What it grades.
        first: What it takes before them.
        results: By place.
        error: What a grader raised.
    """

    method: str
    items: Sequence[Any]
    first: tuple[Any, ...]
    results: list[Any]
    error: Exception | None = None


_Work = tuple[_Call, list[int]]
"""A call, and the places that one worker grades."""


class Graders:
    """Workers that grade; usable from several threads, one at a time.

    Args:
        crew: Starts them.
        count: How many.
        arguments: What each of them loads.
        slow_factor: See `whet.ranks.ray.ClusterConfig`.
    """

    def __init__(self, crew: Crew, *, count: int, arguments: Sequence[Any], slow_factor: float = 4.0) -> None:
        self._crew, self._count = crew, count
        self._staff: Staff[_Work, None] = Staff(
            crew,
            "cluster.reward_workers",
            count=count,
            arguments=arguments,
            slow_factor=slow_factor,
            give=self._give,
            take=self._take,
            fail=self._fail,
        )
        self._lock = threading.Lock()
        self._staff.fill()

    @property
    def num_started(self) -> int:
        """Workers that were started, also in place of lost ones."""
        return self._staff.num_started

    @property
    def num_lost(self) -> int:
        """Parts that were graded again since their worker was lost."""
        return self._staff.dealer.num_lost

    def map(self, method: str, items: Sequence[Any], *first: Any) -> list[Any]:
        """Grade items; return the results in their order.

        Args:
            method: A method of `GradingWorker` that takes a list of them.
            items: What is graded.
            first: What the method takes before them.

        Raises:
            UserError: If workers are lost again and again, or what a grader raised.
        """
        call = _Call(method, items, first, [None] * len(items))
        with self._lock:
            parts = [
                Part((call, places), float(len(places)))
                for places in portions([1.0] * len(items), self._count * PORTIONS)
            ]
            self._staff.dealer.add(parts)
            try:
                while not all(part.is_over for part in parts):
                    self._staff.turn()
                    if call.error is not None:
                        raise call.error
            finally:
                for part in parts:
                    part.is_over = True
        return call.results

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            self._crew.close()

    def _give(self, slot: Slot[None], work: _Work) -> tuple[Any, None]:
        call, places = work
        chosen = [call.items[place] for place in places]
        return self._crew.call(slot.hand, call.method, *call.first, chosen), None

    def _take(self, slot: Slot[None], work: _Work, answer: Sequence[Any]) -> None:
        call, places = work
        for place, value in zip(places, answer, strict=True):
            call.results[place] = value

    def _fail(self, work: _Work, error: Exception) -> None:
        work[0].error = error


class GradedTask:
    """A task whose answers are judged elsewhere; all else is the task's own.

    Args:
        task: The task.
        graders: Who judges.
    """

    def __init__(self, task: Task, graders: Graders) -> None:
        self._inner, self._graders = task, graders
        self.name = task.name
        self._known: OrderedDict[tuple[str, str | None], Verdict] = OrderedDict()
        self._guard = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def problems(self, split: str) -> list[Problem]:
        """Return the task's problems of a split."""
        return self._inner.problems(split)

    def is_correct(self, problem: Problem, answer: str | None) -> bool | None:
        """Judge an answer; see `Task.is_correct`."""
        return self.verdicts([(problem, answer)])[0][0]

    def judge_many(self, items: Sequence[Answer]) -> list[bool | None]:
        """Judge answers."""
        return [is_right for is_right, _ in self.verdicts(items)]

    def verdicts(self, items: Sequence[Answer]) -> list[Verdict]:
        """Judge answers, equal ones to one problem once; those that were judged before are remembered."""
        keys = [(problem.uid, answer) for problem, answer in items]
        with self._guard:
            found = {key: self._known[key] for key in keys if key in self._known}
        missing = {key: item for key, item in zip(keys, items, strict=True) if key not in found}
        if missing:
            found |= dict(zip(missing, self._graders.map("judge", list(missing.values())), strict=True))
        with self._guard:
            # Where the sandbox failed, the next question is a new attempt, as it is without workers.
            self._known |= {key: found[key] for key in missing if found[key][0] is not None}
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return [found[key] for key in keys]


class GradedPrograms(GradedTask):
    """A task of programs, judged elsewhere."""

    def code_scores(self, problem: Problem, answer: str | None) -> dict[str, float] | None:
        """Return a program's scores; see `whet.rewards.presets.ProgramTask`."""
        return self.verdicts([(problem, answer)])[0][1]


class GradedPool:
    """One of the user's rewards, computed elsewhere.

    Args:
        spec: The reward.
        graders: Who computes it.
    """

    def __init__(self, spec: str, graders: Graders) -> None:
        self._spec, self._graders = spec, graders

    def map(self, calls: Sequence[Item]) -> list[Outcome]:
        """Run the reward on every item; see `GraderPool.map`."""
        return self._graders.map("own", calls, self._spec)


@contextmanager
def grading(
    config: RLConfig, task: Task, schema: ResponseSchema, rewards: Sequence[WeightedReward]
) -> Iterator[tuple[Task, list[WeightedReward]]]:
    """Have a run's answers graded by workers, if it has any.

    Args:
        config: The run's settings.
        task: Its task.
        schema: Its schema.
        rewards: Its rewards.

    Yields:
        The task and the rewards, of which those that need the task or are the user's own are computed by the workers.

    Raises:
        UserError: If Ray is missing, or there is no such cluster.
    """
    if not config.cluster.reward_workers:
        yield task, list(rewards)
        return
    count = len(shard(config.cluster.reward_workers))
    crew = RayCrew(config.cluster, GradingWorker, count=count, cpus=1)
    folder, slow_factor = str(Path.cwd()), config.cluster.slow_factor
    graders = Graders(
        crew,
        count=count,
        arguments=(config.task, config.reward, folder, config.reward_timeout_s),
        slow_factor=slow_factor,
    )
    try:
        yield graded(config, task, schema, rewards, graders)
    finally:
        graders.close()


def graded(
    config: RLConfig, task: Task, schema: ResponseSchema, rewards: Sequence[WeightedReward], graders: Graders
) -> tuple[Task, list[WeightedReward]]:
    """Return a task and rewards that leave their work to graders."""
    kind = GradedPrograms if isinstance(task, ProgramTask) else GradedTask
    elsewhere = kind(task, graders)
    own = {own_name(spec): spec for spec in config.reward}

    def moved(reward: WeightedReward) -> WeightedReward:
        if reward.name in own:
            spec = own[reward.name]
            pool = GradedPool(spec, graders)
            return own_reward(spec, pool, reward.failures, timeout_s=config.reward_timeout_s)
        if reward.many is None and reward.name in REWARDS:
            return replace(reward, function=REWARDS[reward.name].make(schema, elsewhere))
        return reward

    return elsewhere, list(map(moved, rewards))
