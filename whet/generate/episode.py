"""Episodes: generate, let the environment answer, repeat; a single turn without an environment.

Tokens in, tokens out: the policy's text stays the sampled tokens, and the environment's answers are encoded once and
appended. Nothing is decoded and re-encoded, so the trainer reads exactly what the sampler saw.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from whet.generate.engine import Completion, Request
from whet.generate.policy import Policy
from whet.generate.rows import Sampler
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.types import Environment, FinishReason, Problem

MAX_TURNS = 16
"""Turns after which an episode is truncated."""


@dataclass(slots=True, eq=False)
class _Episode:
    """One sample in progress."""

    place: int
    prompt_ids: tuple[int, ...]
    seed: int
    state: Any
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    experts: bytes = b""
    turn_ends: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def prefix(self) -> tuple[int, ...]:
        """Everything that the next token is conditioned on."""
        return (*self.prompt_ids, *self.ids)

    def write(self, done: Completion) -> None:
        """Append the policy's tokens."""
        self.ids += done.ids
        self.logprobs += done.logprobs
        self.kept += done.kept
        self.versions += done.versions
        if done.experts:
            # Its prompt is all that came before: of this, what was drawn keeps the experts that it was drawn with.
            read, own = map(b64decode, done.experts)
            self.experts += read[len(self.experts) :] + own
        self.trained += [True] * len(done.ids)
        self.turn_ends.append(sum(self.trained))
        self.turn_rewards.append(0.0)

    def read(self, ids: Sequence[int]) -> None:
        """Append the environment's tokens."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.trained += [False] * len(ids)
        self.kept += [""] * len(ids) if self.kept else []
        self.versions += self.versions[-1:] * len(ids)

    def _split_experts(self) -> tuple[str, ...]:
        """Return the experts of the prompt's and of the other tokens, of which all but the last were read."""
        if not self.experts:
            return ()
        place = len(self.experts) // (len(self.prefix) - 1) * len(self.prompt_ids)
        return tuple(b64encode(part).decode() for part in (self.experts[:place], self.experts[place:]))

    def completion(self) -> Completion:
        """Return the ended episode."""
        assert self.finish_reason is not None
        return Completion(
            ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            trained=() if all(self.trained) else tuple(self.trained),
            kept=tuple(self.kept),
            experts=self._split_experts(),
            turn_ends=tuple(self.turn_ends),
            turn_rewards=tuple(self.turn_rewards),
            versions=tuple(self.versions),
        )


def play(
    policy: Policy,
    engine: Sampler,
    problems: Sequence[Problem],
    seeds: Sequence[Sequence[int]],
    params: SamplingParams,
    environment: Environment | None = None,
    *,
    on_finished: Callable[[int], None] | None = None,
) -> list[list[Completion]]:
    """Sample every episode of every problem to its end.

    Args:
        policy: The policy.
        engine: Its engine.
        problems: The problems.
        seeds: Seeds of the samples of each problem; a later turn's seed is derived from it and the turn's number.
        params: Sampling settings; `max_new_tokens` bounds a whole episode, including the environment's tokens.
        environment: The environment; without one every episode is one turn.
        on_finished: Called with the number of samples that ended since the last call.

    Returns:
        For every problem its completions, in the order of its seeds.
    """
    prompts = [policy.prompt_ids(problem) for problem in problems]
    if environment is None:
        requests = [
            Request(prompt_ids=ids, seeds=tuple(row)) for ids, row in zip(prompts, seeds, strict=True)
        ]
        on_ended = None if on_finished is None else lambda _, row: on_finished(len(row))
        return engine.generate(requests, params, on_ended=on_ended)
    episodes = [
        _Episode(place, prompts[place], seed, environment.reset(problem))
        for place, (problem, row) in enumerate(zip(problems, seeds, strict=True))
        for seed in row
    ]
    active = episodes
    for turn in range(MAX_TURNS):
        _advance(policy, engine, active, params, environment, turn)
        left = [episode for episode in active if episode.finish_reason is None]
        if on_finished is not None and len(left) < len(active):
            on_finished(len(active) - len(left))
        active = left
    return [[episode.completion() for episode in row] for row in _by_problem(episodes, len(problems))]


def _advance(
    policy: Policy,
    engine: Sampler,
    active: Sequence[_Episode],
    params: SamplingParams,
    environment: Environment,
    turn: int,
) -> None:
    """Play one turn of every episode: generate and, if it continues, read the answer."""
    going: list[_Episode] = []
    texts: list[str] = []
    for episode, done in zip(active, _generate(engine, active, params, turn), strict=True):
        before = episode.prefix
        episode.write(done)
        if done.finish_reason == "length":
            episode.finish_reason = "length"
        else:
            going.append(episode)
            texts.append(policy.completion_text(before, done.ids))
    answers = environment.step([episode.state for episode in going], texts) if going else []
    for episode, answer in zip(going, answers, strict=True):
        episode.turn_rewards[-1] = answer.reward
        if answer.observation is None:
            episode.finish_reason = "stop"
            continue
        ids = policy.observation_ids(answer.observation, episode.ids[-1], inline=answer.inline)
        room = min(params.max_new_tokens, engine.max_positions - len(episode.prompt_ids))
        if turn + 1 == MAX_TURNS or len(episode.ids) + len(ids) >= room:
            episode.finish_reason = "length"
        else:
            episode.read(ids)


def _generate(
    engine: Sampler, active: Sequence[_Episode], params: SamplingParams, turn: int
) -> list[Completion]:
    """Generate the next turn of every episode; adjacent equal prefixes are prefilled once."""
    requests = []
    for _, members in groupby(active, key=lambda episode: (episode.place, episode.prefix)):
        row = list(members)
        seeds = [episode.seed if turn == 0 else sequence_seed("turn", episode.seed, turn) for episode in row]
        left = params.max_new_tokens - len(row[0].ids)
        requests.append(Request(prompt_ids=row[0].prefix, seeds=tuple(seeds), max_new_tokens=left))
    return [done for row in engine.generate(requests, params) for done in row]


def _by_problem(episodes: Sequence[_Episode], num_problems: int) -> list[list[_Episode]]:
    rows: list[list[_Episode]] = [[] for _ in range(num_problems)]
    for episode in episodes:
        rows[episode.place].append(episode)
    return rows
