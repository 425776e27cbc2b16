"""Samples and grades completions of held-out problems, in chunks, so that a killed evaluation can resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whet.eval.confidence import Confidence, measure_confidence
from whet.eval.grade import AnswerFrom, Judged, grade
from whet.eval.metrics import headline
from whet.generate.engine import Completion
from whet.generate.episode import play
from whet.generate.policy import Policy
from whet.generate.rows import Sampler
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.rewards.base import EPISODE, WeightedReward, score_completions
from whet.stats import Interval
from whet.tasks.tools import environment_for
from whet.telemetry.hardware import ENERGY, FIELDS, rates
from whet.types import Problem, Task, UserError

# Work of an evaluation: tokens sampled, time, and hardware readings over exactly that time.


@dataclass(frozen=True, slots=True)
class Work:
    """A period of sampling.

    Attributes:
        prompt_tokens: Tokens of the prompts, each once for its samples and once for its greedy completion.
        completion_tokens: Tokens that the model wrote.
        requests: Completions.
        seconds: Wall time of sampling alone, without grading.
        hardware: Sensor readings of the period (`HardwareMonitor.window`); None if not recorded.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    requests: int = 0
    seconds: float = 0.0
    hardware: dict[str, Any] | None = None


def total_work(parts: Sequence[Work]) -> Work:
    """Add up periods; hardware readings are given only if all of them were recorded."""
    windows = [part.hardware for part in parts if part.hardware is not None]
    return Work(
        sum(part.prompt_tokens for part in parts),
        sum(part.completion_tokens for part in parts),
        sum(part.requests for part in parts),
        sum(part.seconds for part in parts),
        join_windows(windows) if windows and len(windows) == len(parts) else None,
    )


def join_windows(windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge separate windows into one: time-weighted means, sums of energy.

    A reading that one of them lacks is absent from the result: a sum without it would be too small.

    Args:
        windows: What `HardwareMonitor.window` returned, one or more.
    """
    if len(windows) == 1:
        return dict(windows[0])
    found = {device["id"]: device for window in windows for device in window["devices"]}
    absent = {key: reason for window in windows for key, reason in window["absent"].items()}
    devices: list[dict[str, Any]] = []
    for name, device in found.items():
        rows = [
            (window["seconds"], row)
            for window in windows
            for row in window["devices"]
            if row["id"] == name and window["seconds"] > 0
        ]
        joined = dict(device)
        is_whole = len(rows) == len(windows)
        for field in FIELDS:
            joined[field] = _join([(s, row[field]) for s, row in rows]) if is_whole else None
            if joined[field] is None:
                absent.setdefault(f"{name}/{field}", "not read in every part")
        joules = [row[ENERGY] for _, row in rows]
        joined[ENERGY] = sum(joules) if is_whole and None not in joules else None
        if joined[ENERGY] is None:
            joined["energy_from"] = None
            absent.setdefault(f"{name}/{ENERGY}", "not read in every part")
        joined["num_samples"] = sum(row["num_samples"] for _, row in rows)
        devices.append(joined)
    return {
        "seconds": sum(window["seconds"] for window in windows),
        "num_samples": sum(window["num_samples"] for window in windows),
        "devices": devices,
        "absent": absent,
    }


def show_work(work: Work) -> dict[str, Any]:
    """Return a period as in eval.json, with joules per token and request if energy was read."""
    hardware = work.hardware
    if hardware is not None:
        hardware = hardware | rates(hardware, work.completion_tokens, work.requests)
    return {
        "tokens": {"prompt": work.prompt_tokens, "completion": work.completion_tokens},
        "requests": work.requests,
        "generation_seconds": round(work.seconds, 3),
        "hardware": hardware,
    }


def _join(parts: Sequence[tuple[float, Mapping[str, Any] | None]]) -> dict[str, Any] | None:
    """Average readings by time; None if one is missing."""
    known = [(seconds, reading) for seconds, reading in parts if reading is not None]
    if len(known) < len(parts):
        return None
    highs = [reading["max"] for _, reading in known]
    total = sum(seconds for seconds, _ in known)
    return {
        "mean": sum(seconds * reading["mean"] for seconds, reading in known) / total,
        "max": None if None in highs else max(highs),
    }


CHUNK_ROUNDS = 4
"""Sequences per chunk, in multiples of the engine's rows: few, so that little is lost; enough to keep rows full."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some finished problems.

    Attributes:
        problems: The problems.
        rows: Per problem the greedy completion, then its samples.
        work: Their sampling work.
        start_s: When sampling began, `time.monotonic()`.
        end_s: When it ended.
    """

    problems: Sequence[Problem]
    rows: Sequence[Sequence[Judged]]
    work: Work
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Metrics with their intervals, and every completion behind them.

    Attributes:
        metrics: 'pass@1', 'greedy', 'pass@k', 'maj@n', 'best@n', 'format', 'thinking_tokens' and more, by name.
        problems: The problems.
        samples: Graded samples of each problem.
        greedy: Graded greedy completion of each problem.
        seconds: Wall time.
        work: Its sampling work.
        seed: Seed of samples and bootstrap.
    """

    metrics: dict[str, Interval]
    problems: Sequence[Problem]
    samples: Sequence[Sequence[Judged]]
    greedy: Sequence[Judged]
    seconds: float
    work: Work = Work()
    seed: int = 0


def evaluate(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    *,
    num_samples: int,
    sampling: SamplingParams,
    seed: int,
    answer_from: AnswerFrom = "schema",
    rewards: Sequence[WeightedReward] = (),
    ks: Sequence[int] = (),
    known: Sequence[Sequence[Judged]] = (),
    on_finished: Callable[[int], None] | None = None,
    on_chunk: Callable[[Chunk], None] | None = None,
    chunk_rounds: int = 0,
) -> EvalResult:
    """Sample and grade completions of every problem, greedy ones too.

    A sample's noise is keyed by seed, problem and index, so that results do not depend on how the work is split.

    Args:
        policy: The model.
        task: Judges answers.
        problems: Held-out problems.
        num_samples: Completions per problem.
        sampling: How they are drawn.
        seed: Seed of samples and bootstrap.
        answer_from: Where answers are searched.
        rewards: Score every completion; none for no best-of-n.
        ks: Further k of pass@k.
        known: Completions of the first problems, greedy first, from an earlier start: they are not sampled again.
        on_finished: Called with the number of completions that ended since the last call.
        on_chunk: Called with every finished chunk, to save it; the tokens of its completions are released afterwards.
            Without it everything is sampled in one chunk and kept.
        chunk_rounds: Completions of a chunk, in multiples of the engine's rows; 0 for CHUNK_ROUNDS.

    Returns:
        The result.

    Raises:
        UserError: If there is no problem, or answers could not be judged.
    """
    if not problems:
        raise UserError("nothing to evaluate: the split has no problems")
    began = time.perf_counter()
    engine = policy.engine()
    rows = [list(row) for row in known]
    parts: list[Work] = []
    while len(rows) < len(problems):
        waiting = problems[len(rows) :]
        if on_chunk is not None:
            most = max(1, (chunk_rounds or CHUNK_ROUNDS) * policy.max_rows // num_samples)
            waiting = waiting[: math.ceil(len(waiting) / math.ceil(len(waiting) / most))]  # of equal size
        chunk = _finish(
            policy,
            engine,
            task,
            waiting,
            num_samples=num_samples,
            sampling=sampling,
            seed=seed,
            answer_from=answer_from,
            rewards=rewards,
            on_finished=on_finished,
        )
        parts.append(chunk.work)
        if on_chunk is None:
            rows += [list(row) for row in chunk.rows]
        else:
            on_chunk(chunk)
            rows += [[replace(done, ids=(), logprobs=()) for done in row] for row in chunk.rows]
    samples, greedy = [row[1:] for row in rows], [row[0] for row in rows]
    metrics = headline(samples, greedy, seed=seed, ks=ks)
    return EvalResult(
        metrics, problems, samples, greedy, time.perf_counter() - began, total_work(parts), seed
    )


def _finish(
    policy: Policy,
    engine: Sampler,
    task: Task,
    problems: Sequence[Problem],
    *,
    num_samples: int,
    sampling: SamplingParams,
    seed: int,
    answer_from: AnswerFrom,
    rewards: Sequence[WeightedReward],
    on_finished: Callable[[int], None] | None,
) -> Chunk:
    """Sample and grade the completions of some problems."""
    environment = environment_for(policy.schema, task)
    seeds = [
        [sequence_seed("eval", seed, problem.uid, index) for index in range(num_samples)]
        for problem in problems
    ]
    greedy_params = SamplingParams(temperature=0.0, max_new_tokens=sampling.max_new_tokens)
    once = [[0]] * len(problems)
    start = time.monotonic()
    drawn = play(policy, engine, problems, seeds, sampling, environment, on_finished=on_finished)
    best = play(policy, engine, problems, once, greedy_params, environment, on_finished=on_finished)
    end = time.monotonic()
    prompts = [policy.prompt_ids(problem) for problem in problems]
    items = [
        (problem, prompt, done)
        for problem, prompt, row, (greedy,) in zip(problems, prompts, drawn, best, strict=True)
        for done in (greedy, *row)
    ]
    judged = _judge(policy, task, items, answer_from, rewards)
    count = num_samples + 1
    work = Work(
        prompt_tokens=2 * sum(map(len, prompts)),
        completion_tokens=sum(sum(done.trained) if done.trained else len(done.ids) for *_, done in items),
        requests=len(items),
        seconds=end - start,
    )
    rows = [judged[first : first + count] for first in range(0, len(judged), count)]
    return Chunk(problems, rows, work, start, end)


def _judge(
    policy: Policy,
    task: Task,
    items: Sequence[tuple[Problem, tuple[int, ...], Completion]],
    answer_from: AnswerFrom,
    rewards: Sequence[WeightedReward],
) -> list[Judged]:
    """Grade and score completions, and measure their confidence."""
    texts = [policy.completion_text(prompt, done.ids) for _, prompt, done in items]
    asked = [(problem, text) for (problem, _, _), text in zip(items, texts, strict=True)]
    grades = grade(
        policy,
        task,
        [(p, text, d.ids) for (p, _, d), text in zip(items, texts, strict=True)],
        answer_from=answer_from,
    )
    num_unjudged = sum(not graded.is_judged for graded in grades)
    if num_unjudged:
        raise UserError(
            f"task {task.name}: {num_unjudged} of {len(grades)} answers could not be judged, so there is no score; "
            "see `whet doctor sandbox`"
        )
    paid = [math.fsum(done.turn_rewards) for *_, done in items]
    none: tuple[dict[str, float | None], float | None] = ({}, None)
    scored = score_completions(rewards, asked, {EPISODE: paid}) if rewards else [none] * len(items)
    return [
        Judged(
            text=text,
            num_tokens=len(done.ids),
            finish_reason=done.finish_reason,
            grade=graded,
            num_turns=max(1, len(done.turn_ends)),
            ids=done.ids,
            logprobs=tuple(round(value, 4) + 0.0 for value in done.logprobs),  # no -0.0
            confidence=_confidence(policy, prompt, done, text, graded.answer),
            rewards=scores,
            reward=total,
        )
        for (_, prompt, done), text, graded, (scores, total) in zip(items, texts, grades, scored, strict=True)
    ]


def _confidence(
    policy: Policy, prompt: tuple[int, ...], done: Completion, text: str, answer: str | None
) -> Confidence:
    def num_characters(count: int) -> int:
        """Count the characters of the first tokens; the full text excludes the final end-of-text token."""
        if count == len(done.ids):
            return len(text)
        return len(policy.tokenizer.decode_completion(prompt, done.ids[:count]))

    return measure_confidence(
        text, answer, policy.schema, done.logprobs, trained=done.trained, num_characters=num_characters
    )
