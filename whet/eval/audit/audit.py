"""`whet audit`: tests a task and its rewards before training. `whet rl` runs a short form as its preflight."""

from __future__ import annotations

import csv
import json
import math
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from whet.cli import Program
from whet.config import align, counted, dump_yaml
from whet.eval.audit.dispute import Disputed, dispute, dispute_samples, has_math_verify
from whet.eval.evaluate import take_problems
from whet.eval.grade import judge_answers
from whet.install import install_command
from whet.rewards.base import (
    TIMEOUT_S,
    Item,
    WeightedReward,
    best_total,
    build_rewards,
    check_timeout,
    score_completion,
    score_completions,
)
from whet.schema import ResponseSchema, find_schema
from whet.storage.folder import check_folder, dated, open_run
from whet.tasks.base import TaskConfig, load_task
from whet.tasks.selftest import hostile_answers, mutated_answer, rewritten_answers
from whet.telemetry.display import advancing, escape_controls, open_display
from whet.types import Problem, Task, UserError

T = TypeVar("T")

TOLERANCE = 1e-6
SECONDS_PER_CALL = 1.0
"""Judging hostile text must not take longer than this."""
NEAR_MISSES = 0.5
"""Share of near misses that may count as right: some tasks have several answers."""
NUM_PREFLIGHT = 3
PREFLIGHT_S = 20.0
"""Seconds after which a preflight tries no further case: rewards and judges may be slow."""
TOLD_S = 3.0
"""Seconds without a line after which a preflight says how far it is."""
AT_ONCE = 32
"""Completions that the user's rewards score together: as many as a pool of graders has workers."""
PROBLEMS_AT_ONCE = 8
"""Problems whose completions are scored together, where there is time for all."""
NUM_SHOWN = 5
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """A test of a task and its rewards: right answers must score highest, wrong ones lowest, hostile ones no higher."""

    out: str = ""
    """Folder for audit.json and the sheet of disputed answers; empty for runs/audit-DATE-TIME."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """The task."""
    schema: str = "think_answer"
    """How a response is asked for and read: that of your run (its first lines name it): think_answer, anywhere (plain
    chat), boxed, ... or your own .yaml file."""
    rewards: dict[str, float] = field(default_factory=lambda: {"correct": 1.0, "format": 0.1})
    """Weight of each built-in reward by name."""
    reward: tuple[str, ...] = ()
    """Your own rewards: path.py:function, or path.py:function=0.5."""
    reward_timeout_s: float = TIMEOUT_S
    """Seconds that one call of a reward of your own may take; a longer one gives no score. Calls run in parallel."""
    split: str = "train"
    """Split of the data."""
    num_problems: int = 100
    """Problems to test; 0 for all."""
    samples: str = ""
    """An eval_samples.jsonl of real completions; answers that a second verifier judges differently go to the sheet."""

    def __post_init__(self) -> None:
        if self.num_problems < 0:
            raise ValueError(f"num_problems = {self.num_problems}: expected 0 (all) or more")
        check_timeout(self.reward, self.reward_timeout_s)


@dataclass(slots=True)
class Check:
    """One claim about a task and its rewards.

    Attributes:
        name: The claim.
        is_required: Whether a failure refutes it; otherwise the reader decides.
        num_cases: Number of cases tested.
        failures: The failed cases, one line each.
        tolerated: Share of the cases that may fail.
    """

    name: str
    is_required: bool = True
    tolerated: float = 0.0
    num_cases: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def is_refuted(self) -> bool:
        """Whether a required claim does not hold."""
        return self.is_required and len(self.failures) > self.tolerated * self.num_cases

    def add(self, holds: bool, failure: Callable[[], str]) -> None:
        """Count one case."""
        self.num_cases += 1
        if not holds:
            self.failures.append(failure())


IDLE = "an empty completion pays no more than a wrong answer"


@dataclass(slots=True)
class Audit:
    """The results of an audit.

    Attributes:
        checks: The claims, in the order of the report.
        best: Largest total of a right answer.
        maximum: Largest possible total of the rewards; None if a user's reward does not declare it.
        seconds: Times of single judgements and scores of built-in rewards.
        own_seconds: Times of calls of the user's rewards, many of which run at once.
        peak_bytes: Largest increase of memory during one score.
        disputed: Rows of the sheet.
        num_skipped: Cases, and whole problems, that were left out for lack of time.
    """

    checks: list[Check]
    best: float = -math.inf
    maximum: float | None = None
    seconds: list[float] = field(default_factory=list)
    own_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    disputed: list[Disputed] = field(default_factory=list)
    num_skipped: int = 0


class _Auditor:
    """Tests the claims, one problem after the other."""

    def __init__(
        self,
        task: Task,
        rewards: Sequence[WeightedReward],
        schema: ResponseSchema,
        limit_s: float = math.inf,
        tell: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.task = task
        self.ends_at, self.tell = time.monotonic() + limit_s, tell
        self.num_calls = self.num_skipped = 0
        # Rewards of an environment or judge are not functions of the text, so they cannot be tested here.
        self.rewards = [reward for reward in rewards if reward.function or reward.many]
        self.is_whole = len(self.rewards) == len(rewards)
        # Those of the user run in a pool of processes, many at once, and each call has a deadline there.
        self.pooled = [reward for reward in self.rewards if reward.many is not None]
        self.scores: dict[tuple[str, str], dict[str, float | None]] = {}
        self.answers: dict[str, tuple[str, str, list[tuple[str, str]]]] = {}
        self.schema = schema
        self.gold = Check("a right answer in the right format reaches the maximum")
        self.paying = Check("the rewards pay for the answer, not for the format alone", is_required=False)
        self.spelled = Check("another spelling of a right answer counts as right", is_required=False)
        # A changed answer may be right if several are, but not in most cases.
        self.mutated = Check("a near miss counts as wrong and pays less", tolerated=NEAR_MISSES)
        self.hostile = Check("a hostile answer counts as wrong and pays less")
        self.empty = Check("an empty completion pays less than a right one")
        # A small reward for short completions pays an empty one more than a wrong one: that may be what is wanted.
        self.idle = Check(IDLE, is_required=False)
        self.limit_s = float(getattr(task, "seconds_per_answer", SECONDS_PER_CALL))
        self.quick = Check(f"no judgement of an answer takes longer than {self.limit_s:g} s")
        checks = [self.gold, self.paying, self.spelled, self.mutated, self.hostile, self.empty]
        checks += [self.idle, self.quick]
        self.audit = Audit(checks, maximum=best_total(self.rewards) if self.is_whole else None)

    def try_problems(self, problems: Sequence[Problem], *, num_measured: int) -> None:
        """Test every claim on several problems; their completions are scored together, if there is time for all."""
        if self.ends_at == math.inf:
            self._score_ahead([(problem, self._answers(problem)[0]) for problem in problems])
            self._score_ahead(
                [
                    item
                    for problem in problems
                    if self._total(problem, self._answers(problem)[0]) is not None
                    for item in self._others(problem)
                ]
            )
        for place, problem in enumerate(problems):
            self.try_problem(problem, is_measured=place < num_measured)

    def _answers(self, problem: Problem) -> tuple[str, str, list[tuple[str, str]]]:
        """Return a perfect completion, a wrong answer that is nearly right, and hostile ones with their names."""
        if problem.uid in self.answers:
            return self.answers[problem.uid]
        wrong = getattr(self.task, "wrong_answer", lambda p: mutated_answer(p.answer))(problem)
        hostile = [(name, text) for name, text in hostile_answers(problem, wrong) if name != "near miss"]
        self.answers[problem.uid] = self._render(problem.answer, problem.solution), wrong, hostile
        return self.answers[problem.uid]

    def _others(self, problem: Problem) -> list[Item]:
        """Return the completions that must pay less than a perfect one."""
        _, wrong, hostile = self._answers(problem)
        texts = [self._render(text) for text in ("no answer", wrong, *(text for _, text in hostile))]
        return [(problem, text) for text in ("", *texts)]

    def try_problem(self, problem: Problem, *, is_measured: bool) -> None:
        """Test every claim on one problem."""
        ideal, wrong, hostile = self._answers(problem)
        best = self._total(problem, ideal)
        self._try_gold(problem, best, ideal)
        if best is None:
            return
        # The first batch is always tried, the others while there is time.
        self._score_ahead(self._others(problem))
        spellings = getattr(self.task, "other_spellings", lambda p: rewritten_answers(p.answer))(problem)
        for spelling in (*spellings, *problem.other_answers):
            self.spelled.add(
                self._is_right(problem, spelling) is True,
                lambda text=spelling: f"{problem.uid}: {_show(text)} for {_show(problem.answer)}",
            )
        nothing = self._total(problem, self._render("no answer"))
        pays = self.is_whole and (nothing is None or nothing < best - TOLERANCE)
        if self.is_whole:
            self.paying.add(
                pays,
                lambda: f"{problem.uid}: 'no answer' in the right format pays {_number(nothing)} of {best:g}",
            )
        for check, name, text in [
            (self.mutated, "near miss", wrong),
            *((self.hostile, name, text) for name, text in hostile),
        ]:
            if check is self.hostile and not self._has_time(problem, self._render(text)):
                continue
            verdict = self._is_right(problem, text)
            total = self._total(problem, self._render(text))
            check.add(
                verdict is not True and (total is None or total < best - TOLERANCE or not pays),
                lambda n=name, t=text, v=verdict, s=total: (
                    f"{problem.uid}: {n} {_show(t)}: judged {'right' if v else 'wrong'}, pays {_number(s)} of {best:g}"
                ),
            )
        self._try_empty(problem, best, nothing)
        if is_measured:
            self._measure(problem, [ideal, *(text for _, text in hostile)])

    def _try_gold(self, problem: Problem, best: float | None, ideal: str) -> None:
        maximum = self.audit.maximum
        if best is not None:
            self.audit.best = max(self.audit.best, best)
        reaches = best is not None and (maximum is None or abs(best - maximum) <= TOLERANCE)
        self.gold.add(
            reaches and self._is_right(problem, problem.answer) is not False,
            lambda: (
                self._no_score(problem, ideal, "a perfect")
                or (
                    f"a perfect completion of problem {problem.uid} scores {_number(best)}, expected the maximum "
                    f"{_number(maximum)}; the rewards do not accept what the schema asks for: {_show(ideal, 120)}"
                )
            ),
        )

    def _try_empty(self, problem: Problem, best: float, wrong: float | None) -> None:
        empty = self._total(problem, "")
        scores = (
            f"an empty completion of problem {problem.uid} scores {_number(empty)}, a wrong one {_number(wrong)}, "
            f"a perfect one {best:g}"
        )
        self.empty.add(
            not self.is_whole or empty is not None and empty < best - TOLERANCE,
            lambda: (
                (empty is None and self._no_score(problem, "", "an empty"))
                or f"{scores}; expected empty < perfect: fix the rewards or weights"
            ),
        )
        self.idle.add(
            not self.is_whole or empty is None or wrong is None or empty <= wrong + TOLERANCE,
            lambda: f"{scores}: a model that is mostly wrong may learn to say nothing",
        )

    def _render(self, answer: str, solution: str = "") -> str:
        """Write a completion in the right format; where the whole text is the answer, it is nothing else."""
        is_whole = self.schema.answer_place == "whole" and not self.schema.has_thinking
        return self.schema.render("" if is_whole else solution or "...", answer)

    def _no_score(self, problem: Problem, completion: str, kind: str) -> str:
        """Return which reward gives a completion, of a kind, no score, and why; '' if all give one."""
        known = self.scores.get((problem.uid, completion), {})
        for reward in self.rewards:
            if reward.name in known:
                score = known[reward.name]
            else:
                score = score_completion([reward], problem, completion)[1]
            if score is None:
                reason = reward.failures.latest or "it returned None"
                return f"reward '{reward.name}' gives {kind} completion of problem {problem.uid} no score: {reason}"
        return ""

    def _score_ahead(self, items: Sequence[Item]) -> None:
        """Score completions by the user's rewards, many at once; the first few, and the others while there is time.

        What gets no score is scored once more: a service may be away for a moment.
        """
        if not self.pooled:
            return
        new = list({(problem.uid, text): (problem, text) for problem, text in items}.items())
        new = [(key, item) for key, item in new if key not in self.scores]
        size = AT_ONCE if self.ends_at < math.inf else len(new)  # a slow call holds up no others
        for start in range(0, len(new), size or 1):
            if start and time.monotonic() > self.ends_at:
                return
            left = dict(new[start : start + size])
            for _ in range(2):
                began = time.perf_counter()
                scored = score_completions(self.pooled, list(left.values()))
                self.audit.own_seconds.append((time.perf_counter() - began) / len(left))
                self.scores |= {key: row for key, (row, _) in zip(left, scored, strict=True)}
                self.num_calls += len(left)
                self.tell(self.num_calls)
                left = {key: item for key, item in left.items() if None in self.scores[key].values()}
                if not left:
                    break

    def _has_time(self, problem: Problem, completion: str) -> bool:
        """Say whether a case is tried; count those that are not."""
        has_scores = not self.pooled or (problem.uid, completion) in self.scores
        has_time = has_scores and time.monotonic() <= self.ends_at
        self.num_skipped += not has_time
        return has_time

    def _total(self, problem: Problem, completion: str) -> float | None:
        self._score_ahead([(problem, completion)])
        known = {name: [score] for name, score in self.scores.get((problem.uid, completion), {}).items()}
        ((_, total),) = self._timed(
            lambda: score_completions(self.rewards, [(problem, completion)], known), completion
        )
        self.tell(self.num_calls)
        return total

    def _is_right(self, problem: Problem, answer: str) -> bool | None:
        seen = self.schema.parse(self._render(answer)).answer  # as the rewards see it
        return self._timed(lambda: judge_answers(self.task, [(problem, seen)]), answer)[0]

    def _timed(self, call: Callable[[], T], text: str) -> T:
        began = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - began
        if seconds > self.limit_s:  # a busy machine makes one call slow; a slow check is slow again
            began = time.perf_counter()
            call()
            seconds = min(seconds, time.perf_counter() - began)
        self.audit.seconds.append(seconds)
        self.num_calls += 1
        self.quick.add(
            seconds <= self.limit_s,
            lambda: (
                f"{seconds:.1f} s for {_show(text)} (a task of your own may allow more: seconds_per_answer = "
                f"{10 * self.limit_s:g})"
            ),
        )
        return result

    def _measure(self, problem: Problem, completions: Sequence[str]) -> None:
        """Record the peak memory of one score."""
        for completion in completions:
            tracemalloc.start()
            score_completions([r for r in self.rewards if r not in self.pooled], [(problem, completion)])
            self.audit.peak_bytes = max(self.audit.peak_bytes, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()


def audit_task(
    task: Task,
    rewards: Sequence[WeightedReward],
    schema: ResponseSchema,
    problems: Sequence[Problem],
    *,
    num_measured: int = 3,
    on_done: Callable[[int], None] | None = None,
    limit_s: float = math.inf,
    tell: Callable[[int], object] = lambda _: None,
) -> Audit:
    """Test every claim on every problem, or on as many cases as there is time for.

    Args:
        task: Judges answers. If defined, its `wrong_answer(problem)` makes the near misses, its
            `other_spellings(problem)` the right answers, and `seconds_per_answer` limits the time.
        rewards: The run's rewards; those of an environment are skipped.
        schema: The schema that prompts and rewards share.
        problems: The problems.
        num_measured: Problems whose memory is measured, which is slow.
        on_done: Called with 1 after each problem.
        limit_s: Seconds after which hostile cases and further problems are left out.
        tell: Called with the calls of rewards and judge so far, after each of them.

    Raises:
        UserError: If there is no problem, or a reward fails.
    """
    if not problems:
        raise UserError(f"task {task.name}: nothing to audit, the split has no problems; try another --split")
    auditor = _Auditor(task, rewards, schema, limit_s, tell)
    judge_answers(task, [(problems[0], problems[0].answer)])  # start workers now: not timed
    score_completions(auditor.rewards, [(problems[0], schema.render("...", problems[0].answer))])
    size = PROBLEMS_AT_ONCE if auditor.ends_at == math.inf else 1
    for start in range(0, len(problems), size):
        part = problems[start : start + size]
        if start and time.monotonic() > auditor.ends_at:
            auditor.num_skipped += len(part)
            continue
        auditor.try_problems(part, num_measured=num_measured - start)
        if on_done is not None:
            on_done(len(part))
    auditor.audit.num_skipped += auditor.num_skipped
    return auditor.audit


def preflight(
    task: Task,
    rewards: Sequence[WeightedReward],
    schema: ResponseSchema,
    problems: Sequence[Problem],
    *,
    sign: str = "whet: ",
) -> list[str]:
    """Stop a run whose rewards cannot tell right from wrong, by an audit on a few problems that have a gold answer.

    Args:
        task: The task.
        rewards: Its rewards.
        schema: How completions are read.
        problems: The problems to train on.
        sign: What a line about slow rewards begins with; '# ' in a dry run, whose output is YAML.

    Returns:
        What does not refute the rewards, but should be known before the run.

    Raises:
        UserError: With the first failure of a required claim.
    """
    shown = [problem for problem in problems if problem.answer][:NUM_PREFLIGHT]
    if not shown:  # no completion is known to be right
        return []
    began = told = time.monotonic()

    def tell(count: int) -> None:
        nonlocal told
        if (now := time.monotonic()) - told > TOLD_S:
            told = now
            text = f"trying the rewards before the run: {count} call{'s' * (count != 1)}, {now - began:.0f} s"
            print(f"{sign}preflight: {text} (no new ones after {PREFLIGHT_S:g} s)", flush=True)

    audit = audit_task(task, rewards, schema, shown, num_measured=0, limit_s=PREFLIGHT_S, tell=tell)
    for check in audit.checks:
        if check.is_refuted:
            raise UserError(
                f"preflight: {check.failures[0]} (claim: {check.name}; see `whet audit`, or --preflight warn)"
            )
    doubts = [check.failures[0] for check in audit.checks if check.name == IDLE and check.failures]
    if audit.num_skipped:
        num_cases = sum(check.num_cases for check in audit.checks)
        doubts.append(
            f"{counted(num_cases, 'case')} took {PREFLIGHT_S:g} s, so others were left out: the rewards or the "
            "judge are slow (`whet audit` tries all)"
        )
    return [f"preflight: {text}" for text in doubts]


def plan(config: AuditConfig) -> str:
    """Describe the work without doing it."""
    return align("work", {"task": config.task.name, "problems": config.num_problems or "all"})


def _load(config: AuditConfig) -> tuple[Task, ResponseSchema, list[WeightedReward], list[Problem]]:
    """Return what is audited."""
    task = load_task(config.task)
    schema = find_schema(config.schema)
    rewards = build_rewards(config.rewards, schema, task, config.reward, timeout_s=config.reward_timeout_s)
    return task, schema, rewards, take_problems(task, config.split, config.num_problems)


def check(config: AuditConfig, resume: bool) -> None:
    """Find what an audit would stop at before its first problem; creates nothing.

    Raises:
        UserError: As the audit would.
    """
    *_, problems = _load(config)
    if config.out and not resume:
        check_folder(Path(config.out))
    print(f"checked: {counted(len(problems), 'problem')}, rewards and folder; the audit would start")


def main(config: AuditConfig) -> None:
    """Run the audit, print its table and write its folder.

    Raises:
        UserError: If a required claim fails.
    """
    folder = Path(config.out or dated("audit"))
    task, schema, rewards, problems = _load(config)
    with open_display(f"audit · {task.name}", max(1, len(problems)), (), unit="problem") as display:
        audit = audit_task(task, rewards, schema, problems, on_done=advancing(display))
    second = "math-verify" if has_math_verify() else "plain text and numbers"
    with open_display(f"second verifier · {second}", max(1, len(problems)), (), unit="problem") as display:
        try:
            audit.disputed += dispute(task, problems, on_done=advancing(display))
        except UserError as error:
            second = ""  # its package does not import: what was found until then is worth its minutes
            display.note(f"no second verifier, so no answers are disputed: {error}", warning=True)
    if config.samples and second:
        everything = task.problems(config.split)
        audit.disputed += dispute_samples(task, everything, Path(config.samples))
    open_run(folder, dump_yaml(config), resumable=False)
    _write(folder, audit)
    title = f"audit of {task.name}: {counted(len(problems), 'problem')}, schema {config.schema}"
    print(_table(title, audit))
    for reward in rewards:
        if reward.failures.count:
            print(
                f"reward '{reward.name}': {counted(reward.failures.count, 'call')} gave no score, the last because: "
                f"{reward.failures.latest}"
            )
    print(
        f"disputed answers, for you to judge: {folder / 'disputed.csv'} ({counted(len(audit.disputed), 'row')})"
    )
    failed = [check for check in audit.checks if check.is_refuted]
    if failed:
        raise UserError(
            f"{len(failed)} of {sum(check.is_required for check in audit.checks)} required claims fail, first: "
            f"{failed[0].failures[0]}"
        )


def _table(title: str, audit: Audit) -> str:
    """Return the report as text."""
    lines = [title, ""]
    for check in audit.checks:
        share = f"{check.num_cases - len(check.failures):,} of {check.num_cases:,}"
        mark = "FAIL" if check.is_refuted else "look" if check.failures else "ok  "
        lines.append(f"  {mark}  {share:>16}  {check.name}")
        lines += [f"{'':26}{escape_controls(failure)}" for failure in check.failures[:NUM_SHOWN]]
        if len(check.failures) > NUM_SHOWN:
            lines.append(f"{'':26}and {len(check.failures) - NUM_SHOWN:,} more")
    median, worst = statistics.median(audit.seconds), max(audit.seconds)
    second = (
        "math-verify"
        if has_math_verify()
        else f"plain text and numbers (for math-verify: {install_command('math')})"
    )
    known = (
        f" of {_number(audit.maximum)}"
        if audit.maximum is not None
        else " (a reward of your own names no maximum)"
    )
    own = {}
    if audit.own_seconds:
        each = 1e3 * statistics.mean(audit.own_seconds)
        own = {"time of your rewards": f"{each:,.1f} ms a completion, with many at once"}
    facts = {
        "reachable maximum": f"{_number(audit.best)}{known}",
        "time of a judgement": f"median {1e6 * median:,.0f} us, at most {1e3 * worst:,.1f} ms",
        **own,
        "memory of a call": f"at most {audit.peak_bytes / 2**20:.1f} MiB",
        "second verifier": second,
    }
    return "\n".join([*lines, "", align("facts", facts)])


def _write(folder: Path, audit: Audit) -> None:
    """Write audit.json and the sheet."""
    content = {
        "checks": [
            {"claim": c.name, "required": c.is_required, "cases": c.num_cases, "failures": c.failures}
            for c in audit.checks
        ],
        "best": audit.best if math.isfinite(audit.best) else None,
        "maximum": audit.maximum,
        "median_seconds": statistics.median(audit.seconds),
        "longest_seconds": max(audit.seconds),
        "peak_bytes": audit.peak_bytes,
        "num_disputed": len(audit.disputed),
    }
    (folder / "audit.json").write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")
    with (folder / "disputed.csv").open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["uid", "source", "answer", "gold", "task_says", "second_verifier_says", "prompt"])
        for row in audit.disputed:
            writer.writerow(
                [row.uid, row.source, row.answer, row.gold, row.task_says, row.other_says, row.prompt]
            )


def _show(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    return repr(text if len(text) <= limit else f"{text[:limit]}...")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


PROGRAM = Program(config_class=AuditConfig, main=main, plan=plan, check=check, positional="task.name")
