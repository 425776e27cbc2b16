"""Writes facts into a loaded model, batch by batch, measures what that did, and takes it back."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from whet.config import to_dict
from whet.editing.facts import Fact, check_facts, comparable
from whet.editing.methods import (
    LOCATED,
    METHODS,
    ROME_CLAMP,
    Change,
    MethodName,
    TuneConfig,
    check_single,
    fine_tune,
    low_rank,
    one_by_one,
    spread_over_layers,
)
from whet.editing.metrics import (
    FactScores,
    interval_of,
    score_facts,
    summarise,
    table_of,
    write_openings,
    written,
)
from whet.editing.record import Batch, Record
from whet.editing.sites import Contexts, Memory, Reader, chosen_memories, find_memories, tokenisation_traps
from whet.editing.statistics import digest_of, gather_moments, own_contexts, own_prose, windows_of
from whet.editing.targets import TargetConfig, check_length
from whet.editing.trace import LOCATING, expected_seconds, locate
from whet.eval.evaluate import fitting_problems, take_problems
from whet.eval.measure import evaluate
from whet.eval.probe.off_domain import measure_perplexity
from whet.generate.policy import Policy
from whet.generate.sampling import SamplingParams
from whet.stats import mcnemar_exact
from whet.tasks.base import TaskConfig, answers_of, check_gold, load_task
from whet.telemetry.display import clock
from whet.telemetry.heartbeat import alive
from whet.types import Problem, Task, UserError

KEEPING: tuple[MethodName, ...] = ("memit", "alphaedit")
"""Methods that can be given facts that stay."""
TIMED_FACTS = 8
"""Facts that are searched for a step or two to say how long all take."""
TIMED_TOKENS = 8
"""Tokens of each window of prose that are written for that."""
TRACED_FACTS = 8
"""Facts whose layer is searched by causal tracing, where none was given."""
PROSE_TOKENS = 100_000
"""Tokens of given prose that are read, at most, as in the papers."""
OWN_TOKENS = 20_000
"""Tokens of prose that the model writes itself, where none was given."""


class Told(Protocol):
    """Takes the name of each phase, as a display does."""

    def __call__(self, phase: str, detail: Callable[[], str] | None = None) -> None:
        """Name what is done from now on, and what says how far it is."""


def untold(phase: str, detail: Callable[[], str] | None = None) -> None:
    """Tell nobody."""


class _Counted:
    """How far a count is, and how long the rest will take."""

    def __init__(self, total: int, unit: str) -> None:
        self._total, self._unit, self._done, self._first, self._began = total, unit, 0, -1, 0.0

    def advance(self, count: int) -> None:
        """Count on; the first call says what was there before."""
        alive()
        self._done += count
        if self._first < 0:
            self._first, self._began = self._done, time.monotonic()

    def text(self) -> str:
        """Write it as '120 of 400 windows, 0:35 left'."""
        own = self._done - max(0, self._first)
        left = (time.monotonic() - self._began) / own * (self._total - self._done) if own else 0.0
        return f"{self._done:,} of {self._total:,} {self._unit}" + (f", {clock(left)} left" if own else "")


class _Searched:
    """How far a search is: facts that are done, and steps of those that are searched now."""

    def __init__(self, num_facts: int, num_steps: int, advance: Callable[[int], None]) -> None:
        self._facts, self._steps, self._advance = num_facts, num_steps, advance
        self._done = self._step = 0

    def advance(self, count: int) -> None:
        """Count facts on; 0 counts a step on."""
        self._done += count
        self._step = 0 if count else self._step + 1
        self._advance(count)

    def text(self) -> str:
        """Write it as '4 of 20 facts, step 12 of at most 25'."""
        return f"{self._done:,} of {self._facts:,} facts, step {self._step} of at most {self._steps}"


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """How facts are written."""

    method: MethodName = "memit"
    """memit: many facts over several layers. rome, r-rome: one after the other into one layer. alphaedit: memit where
    prose has no direction. ft: one matrix fine-tuned within a bound. lora: all matrices fine-tuned by low rank."""
    layers: tuple[int, ...] = ()
    """Layers to write into, from 0; empty: found by causal tracing of the facts."""
    num_layers: int = 0
    """Layers that memit and alphaedit take where none are given, up to the traced one; 0 for a sixth of the model's, at
    least 2."""
    num_contexts: int = 5
    """Beginnings, written by the model, that facts are read behind besides none."""
    context_tokens: int = 10
    """Tokens of each."""
    passes: int = 1
    """Times that facts are written, at most: those that the model then still completes otherwise are written again, in
    a batch of their own, so that what it cost the others is spent on them alone."""
    prose_weight: float = 0.0
    """memit: tokens of prose that an edit has to stand up to (the papers: 15,000 for GPT-J, 20,000 for GPT-2 XL, with C
    a mean over tokens); 0 for as many as a key has numbers."""
    null_share: float = 0.02
    """alphaedit: share of the keys' second moment in the directions that may be changed."""
    ridge: float = 0.1
    """alphaedit: weight of the change's size, of the mean square of the projected keys."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """Search of the target vectors."""
    tune: TuneConfig = field(default_factory=TuneConfig)
    """Fine-tuning, of ft and lora."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method = {self.method!r}: expected {', '.join(METHODS)}")
        if any(layer < 0 for layer in self.layers):
            raise ValueError(f"layers = {self.layers}: expected numbers from 0")
        for name in ("num_layers", "num_contexts"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 0 or more")
        for name in ("context_tokens", "passes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 1 or more")
        if not (math.isfinite(self.prose_weight) and self.prose_weight >= 0):
            raise ValueError(f"prose_weight = {self.prose_weight}: expected 0 (the width of a key) or more")
        if not 0 < self.null_share < 1:
            raise ValueError(f"null_share = {self.null_share}: expected a share between 0 and 1")
        if not (math.isfinite(self.ridge) and self.ridge > 0):
            raise ValueError(f"ridge = {self.ridge}: expected a number above 0")


def check_kept(kept: Sequence[Fact], facts: Sequence[Fact], method: MethodName) -> None:
    """Refuse facts that are to be written and to stay, and methods that know of no keys to keep.

    Raises:
        UserError: At the first.
    """
    if kept and method not in KEEPING:
        raise UserError(f"keep: read by {' and '.join(KEEPING)}, not by {method}; leave it out")
    asked = {comparable(fact.text): fact for fact in facts}
    for fact in kept:
        if (found := asked.get(comparable(fact.text))) is not None:
            raise UserError(
                f"{fact.where}: {fact.text[:60]!r} is to stay, and {found.where} writes it; take it out of one of them"
            )


@dataclass(kw_only=True)
class Measured:
    """What a model says of some facts before or after an edit.

    Attributes:
        scores: Of each fact.
        texts: What it writes of each; empty where that was not wanted.
        perplexity: Of a text; None where that was not wanted.
        right: Whether each problem of a task was completed rightly; empty where that was not wanted.
    """

    scores: list[FactScores]
    texts: list[list[str]] = field(default_factory=list)
    perplexity: float | None = None
    right: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class KnownTask:
    """A task that the model can do, and is to be able to do afterwards.

    Attributes:
        task: It.
        problems: The problems that are asked, greedily.
        max_new_tokens: Longest completion.
    """

    task: Task
    problems: Sequence[Problem]
    max_new_tokens: int

    @classmethod
    def load(cls, policy: Policy, name: str, num_problems: int, max_new_tokens: int) -> KnownTask:
        """Take the first problems of a task's test split that fit the model.

        Raises:
            UserError: If there is no such task, or nothing to ask.
        """
        task, wanted = known_problems(name, num_problems)
        asked = _asking(policy, task)
        problems = fitting_problems(asked, wanted, min_new_tokens=1)
        if not problems:
            raise UserError(f"task = {name}: no problem of its test split fits the model; name another task")
        return cls(task, problems, max_new_tokens)

    def right(self, policy: Policy) -> list[bool]:
        """Return for each problem whether the greedy completion is right."""
        sampling = SamplingParams(max_new_tokens=self.max_new_tokens)
        asked = _asking(policy, self.task)
        result = evaluate(asked, self.task, self.problems, num_samples=1, sampling=sampling, seed=0)
        return [judged.grade.is_correct for judged in result.greedy]


def known_problems(name: str, count: int) -> tuple[Task, list[Problem]]:
    """Return a task and the first problems of its test split, 0 for all.

    Raises:
        UserError: If there is no such task, or its problems have no answers.
    """
    task = load_task(TaskConfig(name=name))
    problems = take_problems(task, "test", count)
    check_gold(task, problems, "pass@1 compares answers")
    return task, problems


def _asking(policy: Policy, task: Task) -> Policy:
    asked = policy.for_tasks()
    asked.expect(*answers_of(task))
    return asked


class Editor:
    """A model that facts are written into.

    Args:
        policy: The model, changed in place by `write` and `undo`; its weights get no gradients.
        name: How it was named.
        record: What was written into it before; default: nothing.
        cache: Where statistics are kept; default: the user's cache.
    """

    def __init__(
        self, policy: Policy, name: str, record: Record | None = None, cache: Path | None = None
    ) -> None:
        if policy.several is not None or (policy.adapter is not None and policy.adapter.is_applied):
            raise UserError(
                "the model has an adapter beside it: merge it first (whet export RUN --to merged --out FOLDER)"
            )
        if policy.steering:
            raise UserError(
                "the model is steered: an edit would be searched beside it; leave policy.steering out"
            )
        find_memories(policy.model)
        policy.model.requires_grad_(False)
        policy.model.eval()
        self.policy, self.reader = policy, Reader(policy)
        self.record = record or Record(model=name, digest=digest_of(policy.model))
        self._cache = cache
        self._windows: list[tuple[int, ...]] = []
        self._kept: tuple[Fact, ...] = ()
        self._contexts: dict[tuple[int, int, int], Contexts] = {}

    def check(self, facts: Sequence[Fact], method: MethodConfig) -> list[str]:
        """Refuse facts that contradict or repeat each other; return what is worth a warning. Changes nothing."""
        check_kept(self._kept, facts, method.method)
        warnings = check_facts(facts)
        for fact in facts:
            warnings += tokenisation_traps(self.policy.tokenizer, fact)
        earlier = {comparable(fact.text): (n, fact) for n, fact in self.record.facts_of_batches()}
        for fact in facts:
            if (found := earlier.get(comparable(fact.text))) is not None:
                warnings.append(
                    f"{fact.where}: batch {found[0]} made {fact.text[:60]!r} {found[1].target!r}; now {fact.target!r}"
                )
        if method.layers and method.method != "lora":
            chosen_memories(self.policy.model, method.layers)
        return warnings

    def set_prose(self, text: str, tokens: int, seed: int = 0) -> None:
        """Choose the prose whose keys edits leave alone; '' lets the model write it."""
        if text:
            self._windows = windows_of(self.policy, text, tokens)
        else:
            self._windows = own_prose(self.policy, tokens, seed)

    def set_kept(self, facts: Sequence[Fact]) -> None:
        """Choose facts that edits leave alone, whatever they complete to: their keys count as much as an edit's."""
        self._kept = tuple(facts)

    def layers_for(self, facts: Sequence[Fact], method: MethodConfig, seed: int = 0) -> tuple[int, ...]:
        """Return the layers to write into: those given, or the ones that causal tracing finds."""
        if method.method == "lora":
            return ()
        if method.layers:
            return tuple(sorted(method.layers))
        best, _ = locate(self.reader, facts[:TRACED_FACTS], seed=seed)
        return self._layers_around(best, method)

    def _layers_around(self, best: int, method: MethodConfig) -> tuple[int, ...]:
        """Return the layers that a method writes into where the tracing found one."""
        memories = find_memories(self.policy.model)
        if method.method not in ("memit", "alphaedit") or memories[best].is_normed:
            return (best,)
        count = method.num_layers or max(2, round(len(self.policy.model.layers) / 6))
        # The target is what the last of them makes of the subject: later layers still have to read it.
        last = min(best + count // 2, len(self.policy.model.layers) - 2)
        return tuple(layer for layer in range(max(0, last - count + 1), last + 1) if layer in memories)

    def write_all(
        self,
        facts: Sequence[Fact],
        method: MethodConfig,
        *,
        seed: int = 0,
        tell: Told = untold,
        advance: Callable[[int], None] = lambda count: None,
    ) -> list[Batch]:
        """Write facts as `write` does, and those that did not take again, in `method.passes` batches at most."""
        batches = [self.write(facts, method, seed=seed, tell=tell, advance=advance)]
        again = replace(method, layers=batches[0].layers)  # traced once
        for turn in range(1, method.passes):
            tell("what did not take")
            scores = score_facts(self.reader, facts)
            missed = [fact for fact, one in zip(facts, scores, strict=True) if not one.prompt.new.is_greedy]
            if not missed:
                break
            batches.append(self.write(missed, again, seed=seed + turn, tell=tell))
            batches[-1].warnings = ()  # they were said of the first
        return batches

    def write(
        self,
        facts: Sequence[Fact],
        method: MethodConfig,
        *,
        seed: int = 0,
        tell: Told = untold,
        advance: Callable[[int], None] = lambda count: None,
    ) -> Batch:
        """Write facts into the model as one batch.

        Args:
            facts: The facts; `check` has seen them.
            method: How.
            seed: Seed of contexts, noise and drawn factors.
            tell: Called with the name of each phase.
            advance: Called with the number of facts that are done.

        Raises:
            UserError: If the facts or the layers do not fit the model; nothing is changed then.
        """
        warnings = self.check(facts, method)
        began = time.monotonic()
        tell("layers")
        layers = self.layers_for(facts, method, seed)
        memories = chosen_memories(self.policy.model, layers) if layers else []
        tell("contexts")
        contexts = self._contexts_of(method, seed)
        check_length(self.reader, [*facts, *self._kept], contexts)
        moments: dict[int, torch.Tensor] = {}
        if method.method in LOCATED:
            moments = self._moments(memories, seed, tell)
        searched = _Searched(len(facts), _num_steps(method), advance)
        tell(method.method, searched.text)
        with self._put_back(memories) as before:
            # What a record holds is applied once, so that it gives the same bits whenever it is applied again.
            change = self._changed(facts, method, memories, contexts, moments, seed, searched.advance)
        self.record.keep(self.policy.model, list(change.deltas))
        batch = Batch(
            method=method.method,
            layers=layers,
            facts=tuple(facts),
            deltas={name: type(d)(d.left_DR.cpu(), d.right_RF.cpu()) for name, d in change.deltas.items()},
            keys={layer: keys.cpu() for layer, keys in change.keys.items()},
            settings={
                "seed": seed,
                "kept": len(self._kept),
                **{k: v for k, v in to_dict(method).items() if k not in ("method", "layers")},
            },
            norms=change.norms,
            warnings=tuple(warnings),
            targets=_searched(change),
        )
        batch.apply(self.policy.model)
        batch.norms = {
            name: float((self.policy.model.get_parameter(name) - before[name]).norm() / before[name].norm())
            for name in batch.deltas
        }
        batch.digest, batch.seconds = digest_of(self.policy.model), time.monotonic() - began
        self.record.batches.append(batch)
        return batch

    @contextmanager
    def _put_back(self, memories: Sequence[Memory]) -> Iterator[dict[str, torch.Tensor]]:
        """Give back what memories (none: all matrices) were, when the block ends; yields it by name."""
        model = self.policy.model
        names = [m.name for m in memories] or [name for name, p in model.named_parameters() if p.dim() == 2]
        before = {name: model.get_parameter(name).detach().clone() for name in names}
        try:
            yield before
        finally:
            with torch.no_grad():
                for name, tensor in before.items():
                    model.get_parameter(name).copy_(tensor)

    def expected_seconds(
        self,
        facts: Sequence[Fact],
        method: MethodConfig,
        *,
        text: str = "",
        writes: bool = False,
        seed: int = 0,
    ) -> float:
        """Return how long it will take, at most about, to write facts and to measure them before and after.

        Up to eight facts are searched for one step and for three, measured once, and little prose is read; the rest is
        extrapolated. Nothing is written and nothing kept. A task's problems, the curve and further passes are not
        counted, nor that statistics may be there already.

        Args:
            facts: The facts, at least one.
            method: How they will be written.
            text: Prose whose perplexity will be measured; '' for none.
            writes: Whether the model will write about each subject.
            seed: Seed of contexts and samples.
        """
        some = sorted(facts, key=lambda fact: len(fact.text))[:: -(-len(facts) // TIMED_FACTS)]
        share = len(facts) / len(some)
        score_facts(self.reader, some[:1])  # compiles and allocates
        found = 2 * share * _seconds(lambda: self.measure(some, writes=writes, seed=seed))
        if text:
            found += 2 * _seconds(lambda: measure_perplexity(self.policy, text))
        layers = tuple(sorted(method.layers))
        if method.method != "lora" and not layers:
            found += expected_seconds(self.reader, facts[:TRACED_FACTS], **LOCATING)
            allowed = list(find_memories(self.policy.model))[:-1]
            layers = self._layers_around(allowed[len(allowed) // 2], method)
        memories = chosen_memories(self.policy.model, layers) if method.method != "lora" else []
        found += _seconds(lambda: self._contexts_of(method, seed))
        moments: dict[int, torch.Tensor] = {}
        if method.method in LOCATED:
            found += self._expected_statistics(memories, seed)
            widths = {memory.layer: memory.matrix().shape[1] for memory in memories}
            moments = {layer: torch.eye(width, dtype=torch.float64) for layer, width in widths.items()}
        contexts, times = self._contexts_of(method, seed), []
        for steps in (1, 3):
            own = replace(
                method,
                target=replace(method.target, steps=steps),
                tune=replace(method.tune, steps=steps),
            )
            with self._put_back(memories):
                change = partial(
                    self._changed, some, own, memories, contexts, moments, seed, lambda count: None
                )
                times.append(_seconds(change))
        step = max(0.0, times[1] - times[0]) / 2
        return found + share * (times[0] + step * (_num_steps(method) - 1))

    def _expected_statistics(self, memories: Sequence[Memory], seed: int) -> float:
        """Return how long the statistics of prose will take: one chunk is read, and some tokens written."""
        found, windows = 0.0, self._windows
        num_tokens = sum(map(len, windows)) or OWN_TOKENS
        if not windows:
            began = time.monotonic()
            windows = own_prose(self.policy, OWN_TOKENS, seed, longest=TIMED_TOKENS)
            found += (time.monotonic() - began) * OWN_TOKENS / sum(map(len, windows))
        some = [windows[place] for place in next(iter(self.reader.chunks(windows)))]
        with tempfile.TemporaryDirectory() as folder:
            own = {"model_digest": "", "folder": Path(folder)}
            read = _seconds(lambda: gather_moments(self.reader, memories, some, **own))
        return found + read * num_tokens / sum(map(len, some))

    def _moments(self, memories: Sequence[Memory], seed: int, tell: Told = untold) -> dict[int, torch.Tensor]:
        """Return C of each memory as the model had it before its first edit: so the papers' sequences have it, too."""
        with self.without_edits():
            if not self._windows:
                tell("prose that the model writes")
                self.set_prose("", OWN_TOKENS, seed)
            counted = _Counted(len(self._windows), "windows of prose")
            tell("statistics", counted.text)
            digest = digest_of(self.policy.model)  # a record of an earlier version names the weights alone
            return gather_moments(
                self.reader,
                memories,
                self._windows,
                model_digest=digest,
                folder=self._cache,
                advance=counted.advance,
            )

    @contextmanager
    def without_edits(self) -> Iterator[None]:
        """Give the model its weights of before the first edit, for as long as the block lasts."""
        model, record = self.policy.model, self.record
        present = {name: model.get_parameter(name).detach().clone() for name in record.originals}
        record.restore(model)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in present.items():
                    model.get_parameter(name).copy_(tensor)

    def _contexts_of(self, method: MethodConfig, seed: int) -> Contexts:
        key = method.num_contexts, method.context_tokens, seed
        if key not in self._contexts:
            self._contexts[key] = own_contexts(self.policy, *key)
        return self._contexts[key]

    def _changed(
        self,
        facts: Sequence[Fact],
        method: MethodConfig,
        memories: Sequence[Memory],
        contexts: Contexts,
        moments: dict[int, torch.Tensor],
        seed: int,
        advance: Callable[[int], None],
    ) -> Change:
        name, reader = method.method, self.reader
        if name == "lora":
            return low_rank(reader, facts, method.tune, seed, advance)
        if name == "ft":
            return fine_tune(reader, check_single(name, memories), facts, method.tune, advance)
        if name in ("rome", "r-rome"):
            memory = check_single(name, memories)
            is_default = method.target.clamp == TargetConfig.clamp
            targets = replace(method.target, clamp=ROME_CLAMP) if is_default else method.target
            return one_by_one(
                reader,
                memory,
                facts,
                contexts,
                moments[memory.layer],
                targets=targets,
                is_refined=name == "r-rome",
                advance=advance,
            )
        width = memories[-1].matrix().shape[1]
        is_alpha = name == "alphaedit"
        return spread_over_layers(
            reader,
            memories,
            facts,
            contexts,
            moments,
            targets=method.target,
            weight=method.ridge if is_alpha else method.prose_weight or float(width),
            earlier=self.record.earlier_keys(facts),
            kept=self._kept,
            null_share=method.null_share if is_alpha else None,
            advance=advance,
        )

    def undo(self, numbers: Sequence[int] = ()) -> None:
        """Take batches back, all by default; the weights are then bit by bit what they were without them."""
        self.record.remove(self.policy.model, numbers)

    def measure(
        self,
        facts: Sequence[Fact],
        *,
        text: str = "",
        writes: bool = False,
        known: KnownTask | None = None,
        seed: int = 0,
    ) -> Measured:
        """Ask the model as it is about some facts.

        Args:
            facts: The facts.
            text: Prose for the perplexity; '' for none.
            writes: Let it write about each subject, too.
            known: A task that it can do; None for none.
            seed: Seed of what it writes.
        """
        return Measured(
            scores=score_facts(self.reader, facts),
            texts=write_openings(self.reader, facts, seed) if writes else [],
            perplexity=measure_perplexity(self.policy, text).perplexity if text else None,
            right=known.right(self.policy) if known is not None else [],
        )


def _num_steps(method: MethodConfig) -> int:
    """Return the steps of a method's search, at most."""
    return (method.tune if method.method in ("ft", "lora") else method.target).steps


def _seconds(do: Callable[[], object]) -> float:
    began = time.monotonic()
    do()
    return time.monotonic() - began


def _searched(change: Change) -> tuple[dict[str, float], ...]:
    found = change.targets
    if found is None:
        return ()
    columns = (found.nll_E, found.kl_E, found.steps_E, found.delta_ED.norm(dim=1))
    names = ("nll", "kl", "steps", "norm")
    return tuple(dict(zip(names, row, strict=True)) for row in torch.stack(list(columns), 1).tolist())


def report_of(
    facts: Sequence[Fact],
    before: Measured,
    after: Measured,
    seed: int = 0,
    batches: Sequence[int] = (),
) -> dict[str, Any]:
    """Return metrics with intervals and tests, drawdown, and the table of all edits.

    Args:
        facts: The facts.
        before: What the model said before the first edit.
        after: What it says now.
        seed: Seed of the bootstrap.
        batches: The batch of each fact, for what became of each batch; none where that is not wanted.
    """
    metrics: dict[str, Any] = summarise(before.scores, after.scores, seed)
    if after.texts:
        old, new = written(facts, before.texts), written(facts, after.texts)
        for name, values in new.items():
            metrics[name] = {
                "after": interval_of(values, is_share=False, seed=seed),
                "before": sum(old[name]) / len(old[name]),
                "facts": len(values),
            }
    if before.perplexity is not None and after.perplexity is not None:
        metrics["perplexity"] = {
            "before": before.perplexity,
            "after": after.perplexity,
            "drawdown": after.perplexity / before.perplexity - 1,
        }
    if before.right:
        pairs = list(zip(before.right, after.right, strict=True))
        metrics["pass@1"] = {
            "after": interval_of([float(right) for right in after.right], is_share=True, seed=seed),
            "before": sum(before.right) / len(before.right),
            "facts": len(before.right),
            "p_value": mcnemar_exact(pairs.count((True, False)), pairs.count((False, True))),
            "test": "McNemar",
        }
    table = table_of(facts, before.scores, after.scores)
    if not batches:
        return {"metrics": metrics, "table": table}
    numbered = [{"batch": number, **row} for number, row in zip(batches, table, strict=True)]
    return {"metrics": metrics, "table": numbered, "by_batch": _by_batch(numbered, seed)}


def _by_batch(table: Sequence[Mapping[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return what the model says now of the facts of each batch: whether earlier ones outlast later ones."""
    found = []
    for number in sorted({row["batch"] for row in table}):
        own = [row for row in table if row["batch"] == number]
        before, after = ([float(row[side]["is_greedy"]) for row in own] for side in ("before", "after"))
        shares = {
            "before": sum(before) / len(before),
            "after": interval_of(after, is_share=True, seed=seed),
        }
        found.append({"batch": number, "facts": len(own), "efficacy_accuracy": shares})
    return found
