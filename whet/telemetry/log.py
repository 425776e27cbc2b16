"""What a run measures and where it is kept: the metric table, the run log and its readers.

Rows are strict JSON in plain ASCII, one object per line, so every reader can parse them whatever a model
wrote. `step` is the number of optimizer steps that are done: the first training row is step 1, an evaluation
before training is step 0.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from whet.types import Group, Problem, Sample


@dataclass(frozen=True, slots=True)
class Metric:
    """The declaration of one metric.

    Attributes:
        unit: Unit of the value; 'share' is a fraction in [0, 1], shown as percent.
        meaning: One line that explains it to the reader of a report.
        format: Format specification for display.
    """

    unit: str
    meaning: str
    format: str = ".3f"


def _share(meaning: str) -> Metric:
    return Metric("share", meaning, ".1%")


METRICS: dict[str, Metric] = {
    "sft/loss": Metric("nats/token", "mean negative log-probability of the trained tokens"),
    "sft/validation_loss": Metric("nats/token", "the same on held-out rows"),
    "sft/lr": Metric("1", "learning rate of this step", ".2e"),
    "sft/grad_norm": Metric("1", "gradient norm before clipping"),
    "sft/tokens_per_second": Metric("tokens/s", "all tokens per second of wall time", ",.0f"),
    "sft/tokens": Metric("tokens", "trained tokens so far", ",.0f"),
    "sft/epoch": Metric("epochs", "passes over the data so far", ".2f"),
    "dpo/loss": Metric("1", "mean loss of a pair, the fine-tuning term included", ".4f"),
    "dpo/validation_loss": Metric("1", "the same on held-out pairs", ".4f"),
    "dpo/accuracy": _share("pairs whose chosen completion has the higher implicit reward"),
    "dpo/validation_accuracy": _share("the same on held-out pairs"),
    "dpo/margin": Metric("score", "mean implicit reward of the chosen minus that of the rejected completion"),
    "dpo/chosen_reward": Metric("score", "mean implicit reward of the chosen completions: beta x log-ratio"),
    "dpo/rejected_reward": Metric("score", "the same of the rejected completions"),
    "dpo/chosen_logprob": Metric("nats", "mean log-probability of a whole chosen completion", ".1f"),
    "dpo/rejected_logprob": Metric("nats", "mean log-probability of a whole rejected completion", ".1f"),
    "dpo/nll": Metric("nats/token", "mean over pairs of the chosen completion's nats per token"),
    "dpo/lr": Metric("1", "learning rate of this step", ".2e"),
    "dpo/grad_norm": Metric("1", "gradient norm before clipping"),
    "dpo/tokens_per_second": Metric("tokens/s", "all tokens per second of wall time", ",.0f"),
    "dpo/tokens": Metric("tokens", "trained tokens so far", ",.0f"),
    "dpo/epoch": Metric("epochs", "passes over the pairs so far", ".2f"),
    "rft/loss": Metric("nats/token", "mean negative log-probability of the kept completions' tokens"),
    "rft/sampled": Metric("completions", "completions sampled in the round that begins", ",.0f"),
    "rft/right": _share("sampled completions that are right and in perfect format"),
    "rft/kept": Metric("completions", "different right completions kept for training", ",.0f"),
    "rft/covered": _share("problems with at least one kept completion"),
    "rft/lr": Metric("1", "learning rate of this step", ".2e"),
    "rft/grad_norm": Metric("1", "gradient norm before clipping"),
    "rft/tokens_per_second": Metric("tokens/s", "all tokens per second of wall time", ",.0f"),
    "rft/tokens": Metric("tokens", "trained tokens so far", ",.0f"),
    "rft/epoch": Metric("epochs", "passes over the round's completions so far", ".2f"),
    "rl/reward_mean": Metric("score", "mean total reward of the scorable samples"),
    "rl/reward_std": Metric("score", "standard deviation of the total reward over all samples of the step"),
    "rl/correct": _share("samples whose answer is right"),
    "rl/format": _share("samples in perfect format"),
    "rl/thinking_tokens": Metric("tokens", "mean length of the thinking block", ".0f"),
    "rl/completion_tokens": Metric("tokens", "mean length of a completion", ".0f"),
    "rl/turns": Metric("turns", "mean turns of an episode, calls of tools included", ".2f"),
    "rl/reward_failures": Metric(
        "samples", "scores of your own rewards that hung, failed or were no number, so far", ",.0f"
    ),
    "rl/judge_requests": Metric("requests", "requests to the judge so far, repetitions included", ",.0f"),
    "rl/judge_retries": Metric("requests", "requests to the judge that were repeated so far", ",.0f"),
    "rl/judge_cache_hits": Metric(
        "completions", "completions that needed no request of their own so far", ",.0f"
    ),
    "rl/judge_failures": Metric(
        "completions", "completions without a score, as requests failed, so far", ",.0f"
    ),
    "rl/judge_unscorable": Metric(
        "completions", "completions that the judge gave no readable score, so far", ",.0f"
    ),
    "rl/judge_tokens": Metric("tokens", "tokens that judging took so far", ",.0f"),
    "rl/judge_corrupt_lines": Metric("lines", "unreadable lines of the judge's cache", ",.0f"),
    "rl/truncated": _share("samples cut off by the length limit"),
    "rl/zero_variance_groups": _share(
        "groups whose rewards are all equal: a comparison inside them teaches nothing"
    ),
    "rl/groups_with_signal": Metric(
        "groups", "groups of which a token has an advantage, so that they teach", ".0f"
    ),
    "rl/all_right_groups": _share("groups all of whose answers are right"),
    "rl/all_wrong_groups": _share("groups all of whose answers are wrong"),
    "rl/cancellation": _share(
        "spread of the rewards inside groups that is lost in their sum; 1 when they cancel"
    ),
    "rl/repetition": _share("4-grams of a completion's tokens that occurred in it before"),
    "rl/groups_refilled": Metric("groups", "groups sampled to replace uninformative ones", ".0f"),
    "rl/unscorable": Metric(
        "samples", "samples that no reward could score; they leave every denominator", ".0f"
    ),
    "rl/entropy": Metric("nats/token", "entropy of the policy on the tokens that reach the backward pass"),
    "rl/kl": Metric("nats/token", "divergence from the reference model", ".4f"),
    "rl/kl_coef": Metric("1", "present weight of the KL term", ".2e"),
    "rl/entropy_coef": Metric("1", "present weight of the entropy bonus", ".2e"),
    "rl/ratio_spread": Metric(
        "nats", "mean |log ratio| of a trained token over the step's updates; 0 at the first", ".1e"
    ),
    "rl/clip_high": _share("trained tokens held back by the upper clip"),
    "rl/clip_low": _share("trained tokens held back by the lower clip"),
    "rl/staleness": Metric("steps", "steps between sampling and training; 0 is on-policy", ".0f"),
    "rl/updates": Metric("updates", "optimizer updates made of the step's rollouts", ".0f"),
    "rl/mismatch_k3": Metric(
        "nats/token", "estimated KL of the sampler from the trainer before the first update", ".1e"
    ),
    "rl/effective_samples": _share(
        "tokens that count after weighing trainer / sampler: (sum w)^2 / (n sum w^2)"
    ),
    "rl/correction_active": _share("tokens whose off-policy weight is truncated or masked"),
    "rl/value_loss": Metric("1", "half the mean squared error of the critic"),
    "rl/value_grad_norm": Metric("1", "gradient norm of the critic before clipping"),
    "rl/value_clipped": _share("tokens where the critic's clip holds"),
    "rl/value_explained": Metric(
        "1", "share of the returns' variance that the critic explains; 1 is perfect", ".2f"
    ),
    "rl/ratio_drift": Metric(
        "1", "largest |ratio - 1| at the first update of the step; 0 when on-policy", ".1e"
    ),
    "rl/logprob_gap_mean": Metric("nats", "mean |sampler - trainer| log-probability of a token", ".1e"),
    "rl/logprob_gap_max": Metric("nats", "largest |sampler - trainer| log-probability of a token", ".1e"),
    "rl/loss": Metric("1", "surrogate loss; its sign and size say nothing about health", ".4f"),
    "rl/lr": Metric("1", "learning rate of this step", ".2e"),
    "rl/grad_norm": Metric("1", "gradient norm before clipping"),
    "rl/tokens_per_second": Metric("tokens/s", "completion tokens per second of the whole step", ",.0f"),
    "rl/generate_seconds": Metric("s", "time to sample", ".2f"),
    "rl/reward_seconds": Metric("s", "time to score", ".2f"),
    "rl/train_seconds": Metric("s", "time to train", ".2f"),
    "rl/generate_tokens_per_second": Metric("tokens/s", "completion tokens per second of sampling", ",.0f"),
    "rl/train_tokens_per_second": Metric(
        "tokens/s", "tokens of the policy's updates per second of training", ",.0f"
    ),
    "eval/pass@1": _share("mean share of right samples over problems"),
    "eval/greedy": _share("problems answered right by greedy decoding"),
    "eval/format": _share("completions in perfect format"),
    "eval/truncated": _share("completions cut off by the length limit"),
    "eval/thinking_tokens": Metric("tokens", "mean length of the thinking block", ".0f"),
    "eval/completion_tokens": Metric("tokens", "mean length of a completion", ".0f"),
    "eval/turns": Metric("turns", "mean turns of an episode, calls of tools included", ".2f"),
    "eval/seconds": Metric("s", "time of the evaluation", ".1f"),
}
"""Every metric with its unit and meaning. Logging another name is an error, unless it belongs to a family."""

FAMILIES: dict[str, Metric] = {
    "rl/reward/": Metric("score", "mean unweighted score of this reward"),
    "rl/signal/": _share(
        "part of this reward in the spread of advantages inside groups; negative works against the rest"
    ),
    "eval/": _share("evaluation score"),
}
"""Prefixes of metrics whose last part is a name that the user chose (a reward, a subject, a k)."""


def find_metric(name: str) -> Metric:
    """Look a metric up.

    Args:
        name: `group/quantity`.

    Returns:
        Its declaration, or that of its family.

    Raises:
        ValueError: If it is not declared.
    """
    if name in METRICS:
        return METRICS[name]
    for prefix, family in FAMILIES.items():
        if name.startswith(prefix) and len(name) > len(prefix):
            return family
    close = difflib.get_close_matches(name, METRICS, n=1)
    hint = f"did you mean '{close[0]}'?" if close else "declare it"
    raise ValueError(f"metric '{name}' is not declared in whet/telemetry/log.py: {hint}")


def format_metric(name: str, value: float | None) -> str:
    """Write a value the way its metric asks for; a dash when there is none."""
    if value is None or math.isnan(value):
        return "–"
    return format(value, find_metric(name).format)


class RunLog:
    """The log of one run folder: appends to metrics.jsonl and samples.jsonl. Use it as a context manager.

    Rows go to the system at once, so a killed run loses none that was logged. A disk error stops no training:
    it is counted in `num_failed_writes` and reported once on stderr.

    Attributes:
        num_non_finite: NaN and infinite values so far; each is null in its row and named under 'non_finite'.
        num_failed_writes: Writes that the disk refused so far.
    """

    def __init__(self, run_dir: Path, *, resume_step: int | None = None, enabled: bool = True) -> None:
        """Open the log.

        Args:
            run_dir: Run folder, made if missing.
            resume_step: Optimizer steps done in the checkpoint that the run resumes from; later rows, which
                the run will write again, are dropped. None appends to what is there.
            enabled: False on all ranks but one: everything is checked, nothing is written.
        """
        self.num_non_finite = 0
        self.num_failed_writes = 0
        self._files: dict[str, int] = {}
        if enabled:
            run_dir.mkdir(parents=True, exist_ok=True)
            for name in ("metrics.jsonl", "samples.jsonl"):
                path = run_dir / name
                _mend(path, resume_step)
                self._files[name] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write_metrics(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Append one row of metrics.

        Args:
            stage: Program that measured them: 'sft', 'rl', 'eval' ...
            step: Optimizer steps done.
            values: Value per declared metric.

        Raises:
            ValueError: If a metric is not declared.
        """
        row: dict[str, Any] = {"stage": stage, "step": step, "time_s": round(time.time(), 3)}
        non_finite: dict[str, str] = {}
        for name, value in values.items():
            find_metric(name)
            number = int(value) if isinstance(value, int) else float(value)
            row[name] = self._finite(number)
            if row[name] is None:
                non_finite[name] = str(number)
        if non_finite:
            row["non_finite"] = non_finite
        self._append("metrics.jsonl", [row])

    def write_samples(self, step: int, groups: Sequence[Group]) -> None:
        """Append one row per rollout of the groups.

        Args:
            step: Optimizer steps done.
            groups: Groups of the step, scored.
        """
        self._append(
            "samples.jsonl",
            [self._sample_row(step, group.problem, sample) for group in groups for sample in group.samples],
        )

    def close(self) -> None:
        """Close both files; further calls do nothing."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _sample_row(self, step: int, problem: Problem, sample: Sample) -> dict[str, Any]:
        return {
            "step": step,
            "uid": sample.uid,
            "index": sample.index,
            "prompt": _encodable(problem.prompt),
            "answer": _encodable(problem.answer),
            "completion": _encodable(sample.text),
            "num_completion_tokens": len(sample.completion_ids),
            "num_read_tokens": len(sample.completion_ids) - sample.num_trained,
            "num_turns": max(1, len(sample.turn_ends)),
            "completion_ids": list(sample.completion_ids),
            "finish_reason": sample.finish_reason,
            "rewards": {name: self._finite(score) for name, score in sample.rewards.items()},
            "reward": self._finite(sample.reward),
            "advantage": self._finite(sample.advantage),
        }

    def _finite(self, value: float | None) -> float | None:
        """Return the value, or None after counting it when JSON has no word for it."""
        if value is None:
            return None
        if math.isfinite(value):
            return value if isinstance(value, int) else float(value)
        self.num_non_finite += 1
        return None

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if name not in self._files:
            return
        data = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode("ascii")
        try:
            while data:
                data = data[os.write(self._files[name], data) :]
        except OSError as error:
            self.num_failed_writes += 1
            if self.num_failed_writes == 1:
                print(
                    f"warning: {name} could not be written ({error.strerror}); the run goes on",
                    file=sys.stderr,
                )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics.jsonl (or of a run folder that has one), oldest first.

    Args:
        path: The file or the run folder; a missing file has no rows.

    Returns:
        One dict per row: 'stage', 'step', 'time_s', and a number or None per metric.
    """
    return list(read_rows(path / "metrics.jsonl" if path.is_dir() else path))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Iterate over the objects of a JSON-lines file; unreadable lines are skipped, with one warning."""
    num_bad = 0
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                row = parse_row(line)
                if row is not None:
                    yield row
                num_bad += row is None
    if num_bad:
        warnings.warn(f"{path}: skipped {num_bad} unreadable line(s)", stacklevel=2)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, None when it has none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _mend(path: Path, resume_step: int | None) -> None:
    """Drop a last line cut short by a crash and, on resume, the rows after `resume_step`."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        torn = file.read() != b"\n"
    if not torn and resume_step is None:
        return
    temporary = path.with_suffix(".partial")
    with path.open("rb") as source, temporary.open("wb") as target:
        for line in source:
            row = parse_row(line) or {}
            if line.endswith(b"\n") and (resume_step is None or row.get("step", 0) <= resume_step):
                target.write(line)
        target.flush()
        os.fsync(target.fileno())
    temporary.replace(path)


def _encodable(text: str) -> str:
    r"""Write lone surrogates as \udXXX in the text itself: strict parsers refuse their JSON escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
