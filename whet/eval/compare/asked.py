"""Compares models on the user's own prompts, without gold answers: transcripts only, no scores."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from whet.eval.grade import Judged
from whet.eval.measure import evaluate, show_work
from whet.eval.record import StoredEval
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.telemetry.display import advancing, open_display
from whet.telemetry.hardware import HardwareMonitor
from whet.telemetry.log import read_rows
from whet.types import Problem, UserError, problem_uid

FILES = (".txt", ".md", ".jsonl", ".json", ".csv")
MAX_BYTES = 1 << 20


class OwnPrompts:
    """Problems without known answers: there are no verdicts."""

    name = "prompts"

    def __init__(self, prompts: Sequence[str]) -> None:
        self._problems = [
            Problem(uid=problem_uid(self.name, text), task=self.name, prompt=text, answer="")
            for text in dict.fromkeys(prompts)
        ]

    def problems(self, split: str) -> list[Problem]:
        """Return the prompts; there is one split."""
        assert split == "test", split
        return self._problems

    def is_correct(self, problem: Problem, answer: str | None) -> bool:
        """Return False; `ask` removes the verdict."""
        return False


def read_prompts(words: Sequence[str]) -> list[str]:
    """Read prompts: each word is a text, or a file with one prompt per line (.jsonl: one object with `prompt` per
    line).

    Raises:
        UserError: If a file is missing, empty or has no prompts.
    """
    prompts: list[str] = []
    for word in words:
        path = Path(word)
        if len(word) > 255 or not (path.is_file() or path.suffix in FILES):
            prompts.append(word)
            continue
        if not path.is_file():
            raise UserError(f"prompts: no such file {word!r}")
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"prompts: {word} is larger than {MAX_BYTES} bytes")
        if path.suffix == ".jsonl":
            found = [row.get("prompt") for row in read_rows(path)]
        else:
            found = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
        kept = [text for text in found if isinstance(text, str) and text.strip()]
        if not kept:
            what = "object with `prompt`" if path.suffix == ".jsonl" else "line"
            raise UserError(f"prompts: {word} has no {what} to ask")
        prompts += kept
    if not all(text.strip() for text in prompts):
        raise UserError("prompts: one is empty")
    return prompts


def ask(
    policies: Sequence[PolicyConfig],
    names: Sequence[str],
    prompts: Sequence[str],
    num_samples: int,
    sampling: SamplingParams,
    seed: int,
    folder: Path,
) -> list[StoredEval]:
    """Run every prompt through every model: a greedy completion and some samples, written to folder/NAME.jsonl.

    Args:
        policies: The models, loaded one after the other.
        names: Their names.
        prompts: The questions.
        num_samples: Completions per prompt, besides the greedy one.
        sampling: Sampling settings.
        seed: Their seed.
        folder: Existing folder.

    Returns:
        One object per model like an evaluation's, whose rows have None for `correct` and `gold`.
    """
    task = OwnPrompts(prompts)
    sides: list[StoredEval] = []
    for config, name in zip(policies, names, strict=True):
        policy = load_policy(config, seed=seed)
        problems = task.problems("test")
        total = len(problems) * (num_samples + 1)
        with (
            HardwareMonitor() as monitor,
            open_display(f"ask {name}", total, (), unit="completion") as display,
        ):
            start = time.monotonic()
            result = evaluate(
                policy,
                task,
                problems,
                num_samples=num_samples,
                sampling=sampling,
                seed=seed,
                on_finished=advancing(display),
            )
            window = monitor.window(start, time.monotonic())
        samples: dict[str, list[dict[str, Any]]] = {}
        for problem, greedy, row in zip(problems, result.greedy, result.samples, strict=True):
            samples[problem.uid] = [
                _row(problem, "greedy" if index == 0 else index - 1, done)
                for index, done in enumerate([greedy, *row])
            ]
        summary = show_work(result.work) | {
            "hardware": window,
            "num_problems": len(problems),
            "num_samples": num_samples,
            "identity": {"protocol": policy.protocol()},
        }
        path = folder / f"{quote(name, safe='')}.jsonl"
        with path.open("w", encoding="ascii") as file:
            file.writelines(json.dumps(row) + "\n" for rows in samples.values() for row in rows)
        greedy_rows = {uid: rows[0] for uid, rows in samples.items()}
        sampled = {uid: rows[1:] for uid, rows in samples.items()}
        sides.append(StoredEval(path, config.init, summary, sampled, greedy_rows))
    return sides


def _row(problem: Problem, sample: int | str, done: Judged) -> dict[str, Any]:
    """Return a completion as a row of eval_samples.jsonl, without a verdict."""
    return {
        "uid": problem.uid,
        "prompt": problem.prompt,
        "gold": None,
        "sample": sample,
        "text": done.text,
        "answer": done.grade.answer,
        "correct": None,
        "format": done.grade.verdict,
        "thinking_tokens": done.grade.thinking_tokens,
        "completion_tokens": done.num_tokens,
        "finish_reason": done.finish_reason,
        "answer_logprob": done.confidence.answer_logprob,
        "hedges": done.confidence.hedges,
        "revisions": done.confidence.revisions,
    }
