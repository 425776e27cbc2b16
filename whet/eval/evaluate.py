"""`whet eval`: measure a model on held-out problems, with intervals over problems."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from whet.checkpoint import open_run
from whet.config import align, dump_yaml
from whet.eval.grade import AnswerFrom, Grade, grade
from whet.eval.show import print_result
from whet.eval.stats import Interval, bootstrap_interval, majority_at_k, pass_at_k, wilson_interval
from whet.generate.episode import play
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.tasks.base import TaskConfig, answer_type_of, load_task
from whet.tasks.tools import environment_for
from whet.telemetry.display import advancing, open_display
from whet.telemetry.environment import write_environment
from whet.telemetry.log import RunLog
from whet.telemetry.report import write_report
from whet.types import Problem, Task, UserError

NEAR_ZERO = 0.05
BREAKDOWN = ("part", "subject", "level", "environment")
"""Labels of problems by which pass@1 is reported besides."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation of one model on one task."""

    out: str
    """Run folder to make."""
    policy: PolicyConfig
    """The model."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """The problems."""
    split: str = "test"
    """Part of the data: train, dev or test."""
    num_problems: int = 200
    """Problems taken from the front of the split's hash order; 0 takes all."""
    num_samples: int = 16
    """Completions per problem; pass@k is reported for k up to this."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How completions are drawn (greedy decoding is always measured too)."""
    answer_from: AnswerFrom = "schema"
    """schema: only the answer block counts; anywhere: boxes, phrases and the last number count too."""
    precision: str = "float32"
    """Dtype of the parameters: float32 or bfloat16."""
    seed: int = 0
    """Seed of the samples and of the bootstrap."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples = {self.num_samples}: expected 1 or more")
        if self.num_problems < 0:
            raise ValueError(f"num_problems = {self.num_problems}: expected 0 (all) or more")
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature = 0: greedy is measured anyway; expected above 0 for the samples"
            )
        if self.precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision = {self.precision!r}: expected float32 or bfloat16")


@dataclass(frozen=True, slots=True)
class Judged:
    """One graded completion."""

    text: str
    num_tokens: int
    finish_reason: str
    grade: Grade
    num_turns: int = 1


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Metrics with their intervals, and every completion behind them.

    Attributes:
        metrics: 'pass@1', 'greedy', 'pass@k', 'maj@k', 'format', 'thinking_tokens' and more, by name.
        problems: The problems.
        samples: Graded samples of each problem.
        greedy: Graded greedy completion of each problem.
        seconds: Wall time.
    """

    metrics: dict[str, Interval]
    problems: Sequence[Problem]
    samples: Sequence[Sequence[Judged]]
    greedy: Sequence[Judged]
    seconds: float


def evaluate(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    *,
    num_samples: int,
    sampling: SamplingParams,
    seed: int,
    answer_from: AnswerFrom = "schema",
    autocast: torch.dtype | None = None,
    on_finished: Callable[[int], None] | None = None,
) -> EvalResult:
    """Sample and grade completions of every problem, greedy ones too.

    Args:
        policy: The model.
        task: Judges answers.
        problems: Held-out problems.
        num_samples: Completions per problem.
        sampling: How they are drawn.
        seed: Seed of samples and bootstrap.
        answer_from: Where an answer may stand.
        autocast: Compute dtype when it is not the parameters' own.
        on_finished: Called with the number of completions that ended since the last call.

    Returns:
        The result.

    Raises:
        UserError: If there is no problem.
    """
    if not problems:
        raise UserError("nothing to evaluate: the split has no problems")
    began = time.perf_counter()
    engine = policy.engine(autocast)
    environment = environment_for(policy.schema, task)
    seeds = [
        [sequence_seed("eval", seed, problem.uid, index) for index in range(num_samples)]
        for problem in problems
    ]
    drawn = play(policy, engine, problems, seeds, sampling, environment, on_finished=on_finished)
    greedy_params = SamplingParams(temperature=0.0, max_new_tokens=sampling.max_new_tokens)
    once = [[0]] * len(problems)
    best = play(policy, engine, problems, once, greedy_params, environment, on_finished=on_finished)
    rows = [[*row, done] for row, (done,) in zip(drawn, best, strict=True)]
    prompts = [policy.prompt_ids(problem) for problem in problems]
    items = [
        (problem, policy.completion_text(prompt, done.ids), done)
        for problem, prompt, row in zip(problems, prompts, rows, strict=True)
        for done in row
    ]
    grades = grade(policy, task, [(p, text, done.ids) for p, text, done in items], answer_from=answer_from)
    num_unjudged = sum(not graded.is_judged for graded in grades)
    if num_unjudged:
        raise UserError(
            f"task {task.name}: {num_unjudged} of {len(grades)} answers could not be judged, so there is no score; "
            "see `whet doctor sandbox`"
        )
    judged = [
        Judged(text, len(done.ids), done.finish_reason, graded, max(1, len(done.turn_ends)))
        for (_, text, done), graded in zip(items, grades, strict=True)
    ]
    count = num_samples + 1
    samples = [judged[start : start + num_samples] for start in range(0, len(judged), count)]
    greedy = judged[num_samples::count]
    metrics = _metrics(task, problems, samples, greedy, seed)
    return EvalResult(metrics, problems, samples, greedy, time.perf_counter() - began)


def _metrics(
    task: Task,
    problems: Sequence[Problem],
    samples: Sequence[Sequence[Judged]],
    greedy: Sequence[Judged],
    seed: int,
) -> dict[str, Interval]:
    """Average over samples within a problem, then bootstrap over problems."""
    count = len(samples[0])
    correct_P = [sum(s.grade.is_correct for s in row) for row in samples]
    per_problem: dict[str, list[float]] = {
        "pass@1": [c / count for c in correct_P],
        "greedy": [float(done.grade.is_correct) for done in greedy],
    }
    k = 2
    while k < count:
        per_problem[f"pass@{k}"] = [pass_at_k(count, c, k) for c in correct_P]
        k *= 2
    if count > 1:
        per_problem[f"pass@{count}"] = [pass_at_k(count, c, count) for c in correct_P]
        per_problem[f"maj@{count}"] = [
            majority_at_k(
                [s.grade.answer for s in row], lambda answer, p=problem: bool(task.is_correct(p, answer))
            )
            for problem, row in zip(problems, samples, strict=True)
        ]
    per_problem["format"] = [_mean([s.grade.verdict == "perfect" for s in row]) for row in samples]
    per_problem["truncated"] = [_mean([s.finish_reason == "length" for s in row]) for row in samples]
    per_problem["thinking_tokens"] = [_mean([s.grade.thinking_tokens for s in row]) for row in samples]
    per_problem["completion_tokens"] = [_mean([s.num_tokens for s in row]) for row in samples]
    if any(s.num_turns > 1 for row in samples for s in row):
        per_problem["turns"] = [_mean([s.num_turns for s in row]) for row in samples]
    return {name: _interval(values, seed) for name, values in per_problem.items()}


def _interval(values: Sequence[float], seed: int) -> Interval:
    """Bootstrap over problems; Wilson where each counts 0 or 1 (a bootstrap of nothing but ones claims certainty)."""
    if all(value in (0.0, 1.0) for value in values):
        return wilson_interval(int(sum(values)), len(values))
    return bootstrap_interval(values, seed=seed)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def write_result(folder: Path, result: EvalResult, *, label: str, identity: dict[str, object]) -> None:
    """Write eval.json (metrics with intervals) and eval_samples.jsonl (every completion) into a folder.

    Args:
        folder: Existing folder.
        result: The result.
        label: What was evaluated.
        identity: Protocol, task and sampling: two results compare only when these are equal.
    """
    counts = {"num_problems": len(result.problems), "num_samples": len(result.samples[0])}
    metrics = {name: asdict(interval) for name, interval in result.metrics.items()}
    content = {
        "label": label,
        "remark": remark(result),
        **counts,
        "metrics": metrics,
        "pass@1 by": {
            label: {value: asdict(interval) for value, interval in rows.items()}
            for label, rows in breakdown(result).items()
        },
        "seconds": round(result.seconds, 2),
        "identity": identity,
    }
    (folder / "eval.json").write_text(json.dumps(content, indent=1) + "\n")
    with (folder / "eval_samples.jsonl").open("w", encoding="ascii") as file:
        for problem, row, greedy in zip(result.problems, result.samples, result.greedy, strict=True):
            for index, done in enumerate([greedy, *row]):
                record = {
                    "uid": problem.uid,
                    "prompt": problem.prompt,
                    "gold": problem.answer,
                    "meta": dict(problem.meta),
                    "sample": "greedy" if index == 0 else index - 1,
                    "text": done.text,
                    "answer": done.grade.answer,
                    "answer_from": done.grade.answer_step,
                    "correct": done.grade.is_correct,
                    "format": done.grade.verdict,
                    "thinking_tokens": done.grade.thinking_tokens,
                    "completion_tokens": done.num_tokens,
                    "finish_reason": done.finish_reason,
                }
                file.write(json.dumps(record) + "\n")


def breakdown(result: EvalResult) -> dict[str, dict[str, Interval]]:
    """Return pass@1 for each value of a problem's labels (subject, level ...), where a label has several values."""
    found: dict[str, dict[str, Interval]] = {}
    for label in BREAKDOWN:
        rows: dict[str, list[float]] = {}
        for problem, samples in zip(result.problems, result.samples, strict=True):
            if problem.meta.get(label):
                right = _mean([sample.grade.is_correct for sample in samples])
                rows.setdefault(problem.meta[label], []).append(right)
        if len(rows) > 1:
            found[label] = {value: _interval(values, 0) for value, values in sorted(rows.items())}
    return found


def remark(result: EvalResult) -> str:
    """Say plainly what the numbers must not be taken for."""
    accuracy = result.metrics["pass@1"].mean
    if accuracy >= NEAR_ZERO:
        return ""
    return (
        f"accuracy is near zero (pass@1 {100 * accuracy:.1f} %): the model does not solve this task; right answers of "
        "this share, and the pass@k made of them, are what lucky guesses give. Read format and samples instead."
    )


def take_problems(task: Task, split: str, count: int) -> list[Problem]:
    """Return the first `count` problems of a split by uid (0: all): a fixed random sample."""
    problems = sorted(task.problems(split), key=lambda problem: problem.uid)
    return problems[:count] if count else problems


def fitting_problems(policy: Policy, problems: Sequence[Problem], *, min_new_tokens: int) -> list[Problem]:
    """Return the problems whose prompt leaves room in the model's context.

    Args:
        policy: Gives tokenizer and context.
        problems: Candidates.
        min_new_tokens: Room wanted. Training asks for the longest completion, so that the context cuts none off; an
            evaluation asks for one token and counts what is cut off, so that hard problems do not drop out.

    Raises:
        UserError: If none fits, or the tokenizer cannot spell them.
    """
    policy.check_alphabet(problems)
    context = policy.model.config.max_positions
    lengths = [len(policy.prompt_ids(problem)) for problem in problems]
    kept = [
        problem
        for problem, length in zip(problems, lengths, strict=True)
        if length + min_new_tokens <= context
    ]
    if problems and not kept:
        raise UserError(
            f"no prompt fits: the context holds {context} tokens, the shortest prompt has {min(lengths)}, completions "
            f"need {min_new_tokens}; lower sampling.max_new_tokens or take a model with a longer context"
        )
    return kept


def plan(config: EvalConfig) -> str:
    """Describe the work without doing it."""
    return align(
        "work",
        {
            "problems": f"{config.num_problems or 'all'} of {config.task.name}/{config.split}",
            "completions per problem": f"{config.num_samples} sampled + 1 greedy",
            "new tokens per completion, at most": config.sampling.max_new_tokens,
        },
    )


def main(config: EvalConfig) -> None:
    """Run the evaluation and write its folder."""
    folder = Path(config.out)
    task = load_task(config.task)
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    policy = load_policy(config.policy, seed=config.seed, dtype=dtype)
    policy.expect(answer_type_of(task))
    environment_for(policy.schema, task)  # a tool that is not there is found before the folder is made
    wanted = take_problems(task, config.split, config.num_problems)
    problems = fitting_problems(policy, wanted, min_new_tokens=1)
    open_run(folder, dump_yaml(config), resumable=False)
    write_environment(folder)
    total = len(problems) * (config.num_samples + 1)
    with open_display(f"eval {task.name}/{config.split}", total, (), unit="completion") as display:
        if len(problems) < len(wanted):
            display.note(
                f"{len(wanted) - len(problems)} of {len(wanted)} problems do not fit the context; left out"
            )

        result = evaluate(
            policy,
            task,
            problems,
            num_samples=config.num_samples,
            sampling=config.sampling,
            seed=config.seed,
            answer_from=config.answer_from,
            on_finished=advancing(display),
        )
    identity: dict[str, object] = {
        "protocol": policy.protocol(),
        "task": asdict(config.task),
        "split": config.split,
        "sampling": asdict(config.sampling),
        "answer_from": config.answer_from,
        "seed": config.seed,
        "left_out": len(wanted) - len(problems),
    }
    write_result(folder, result, label=config.policy.init or "random weights", identity=identity)
    with RunLog(folder) as log:
        log.write_metrics(
            "eval", 0, {f"eval/{name}": interval.mean for name, interval in result.metrics.items()}
        )
    write_report(folder)
    print_result(
        {Path(config.policy.init).name or "random": result.metrics}, len(problems), config.num_samples
    )
    if remark(result):
        print(remark(result))
    print(f"report: {folder / 'report.md'}")
