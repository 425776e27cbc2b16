"""Asks models one's own questions: transcripts, and verdicts where the right answers are known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from whet.eval.grade import AnswerFrom
from whet.eval.measure import Chunk, evaluate, show_work, total_work
from whet.eval.record import GREEDY, StoredEval, append_lines, as_row
from whet.generate.policy import Policy
from whet.generate.sampling import SamplingParams
from whet.rewards.answers.equal import answers_equal
from whet.rewards.answers.texts import Column, column_of
from whet.telemetry.display import advancing, open_display
from whet.telemetry.hardware import HardwareMonitor
from whet.telemetry.log import read_rows
from whet.types import Problem, UserError, problem_uid

FILES = (".txt", ".md", ".jsonl", ".json", ".csv")
MAX_BYTES = 1 << 20
INTERVAL_S = 0.1
"""Seconds between readings of sensors: a chunk may be short, and one without a reading has no energy."""


class OwnProblems:
    """One's own questions; those with a known answer are judged.

    Args:
        problems: The questions; equal ones count once.
    """

    name = "prompts"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._problems = list({problem.uid: problem for problem in problems}.values())
        self._column: Column = column_of(problem.answer for problem in self._problems if problem.answer)

    def problems(self, split: str) -> list[Problem]:
        """Return the questions; there is one split."""
        assert split == "test", split
        return self._problems

    def is_correct(self, problem: Problem, answer: str | None) -> bool:
        """Judge an answer; False where the right one is not known (then there is no verdict)."""
        if answer is None:
            return False
        golds = filter(None, problem.answers)
        return any(answers_equal(answer, gold, ordered=True, column=self._column) for gold in golds)


def own_problem(
    prompt: str, answer: str = "", images: Sequence[str] = (), names: Sequence[str] = ()
) -> Problem:
    """Return a question as a problem.

    Args:
        prompt: What is asked.
        answer: The right answer; '' if it is not known.
        images: Sources of its images.
        names: A name of each, the same on every machine.
    """
    uid = problem_uid(OwnProblems.name, prompt, names)
    return Problem(uid=uid, task=OwnProblems.name, prompt=prompt, answer=answer, images=tuple(images))


def read_prompts(words: Sequence[str]) -> list[str]:
    """Read prompts as `read_questions` does, without answers."""
    return [prompt for prompt, _ in read_questions(words)]


def read_questions(words: Sequence[str]) -> list[tuple[str, str]]:
    """Read questions and their answers, '' where none is known.

    Args:
        words: Each a text, or a file with one prompt per line (.jsonl: one object with `prompt`, or `prompt` and
            `answer`, per line).

    Raises:
        UserError: If a file is missing, empty or has no prompts.
    """
    found: list[tuple[str, str]] = []
    for word in words:
        path = Path(word)
        if len(word) > 255 or not (path.is_file() or path.suffix in FILES):
            found.append((word, ""))
            continue
        if not path.is_file():
            raise UserError(f"prompts: no such file {word!r}")
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"prompts: {word} is larger than {MAX_BYTES} bytes")
        if path.suffix == ".jsonl":
            rows = [(row.get("prompt"), answer_text(row.get("answer"))) for row in read_rows(path)]
        else:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            rows = [(line.strip(), "") for line in lines]
        kept = [(text, answer) for text, answer in rows if isinstance(text, str) and text.strip()]
        if not kept:
            what = "object with `prompt`" if path.suffix == ".jsonl" else "line"
            raise UserError(f"prompts: {word} has no {what} to ask")
        found += kept
    if not all(text.strip() for text, _ in found):
        raise UserError("prompts: one is empty")
    return found


def answer_text(value: Any) -> str:
    """Return a row's answer as text; lists are vectors; '' for none."""
    if value is None or isinstance(value, dict):
        return ""
    return value.strip() if isinstance(value, str) else json.dumps(value)


class Asked:
    """The completions of one model, written to FOLDER/NAME.jsonl as they come, so that nothing is lost.

    Args:
        folder: Existing folder.
        name: The model's name.
        label: Where it is from.
        weights: From `describe_weights`; None where nothing is to be noted.

    Attributes:
        name: The model's name.
        path: The file.
    """

    def __init__(self, folder: Path, name: str, label: str, weights: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.path = folder / f"{quote(name, safe='')}.jsonl"
        self._label, self._weights = label, weights
        self._greedy: dict[str, dict[str, Any]] = {}
        self._samples: dict[str, list[dict[str, Any]]] = {}
        self._summary: dict[str, Any] = {}

    def ask(
        self,
        policy: Policy,
        problems: Sequence[Problem],
        *,
        num_samples: int,
        sampling: SamplingParams,
        seed: int,
        answer_from: AnswerFrom = "schema",
        chunk_rounds: int = 1,
    ) -> None:
        """Draw a greedy completion of each problem and some samples.

        Args:
            policy: The model.
            problems: The questions.
            num_samples: Completions of each, besides the greedy one.
            sampling: How they are drawn.
            seed: Their seed.
            answer_from: Where answers are searched.
            chunk_rounds: Completions that are drawn before they are written, in multiples of `policy.max_rows`.
        """
        task = OwnProblems(problems)
        about = {"num_problems": len(problems), "num_samples": num_samples, "model": self._weights}
        self._summary = about | {"identity": {"protocol": policy.protocol()}}
        total = len(problems) * (num_samples + 1)
        work = []
        with (
            HardwareMonitor(INTERVAL_S) as monitor,
            open_display(f"ask {self.name}", total, (), unit="completion") as display,
        ):

            def keep(chunk: Chunk) -> None:
                self._keep(chunk)
                # Grading and writing are no part of the window that energy is counted over.
                window = monitor.window(chunk.start_s, chunk.end_s)
                work.append(replace(chunk.work, hardware=window))
                self._summary |= show_work(total_work(work))

            evaluate(
                policy,
                task,
                problems,
                num_samples=num_samples,
                sampling=sampling,
                seed=seed,
                answer_from=answer_from,
                on_finished=advancing(display),
                on_chunk=keep,
                chunk_rounds=chunk_rounds,
            )

    def _keep(self, chunk: Chunk) -> None:
        found: list[dict[str, Any]] = []
        for problem, done in zip(chunk.problems, chunk.rows, strict=True):
            rows = [
                as_row(problem, index - 1 if index else GREEDY, judged)
                | _verdict(problem, judged.grade.is_correct)
                for index, judged in enumerate(done)
            ]
            self._greedy[problem.uid], self._samples[problem.uid] = rows[0], rows[1:]
            found += [{"model": self.name} | row for row in rows]
        append_lines(self.path, found)

    def stored(self) -> StoredEval:
        """Return what was drawn so far, like an evaluation; rows without a known answer have None for `correct`."""
        return StoredEval(self.path, self._label, self._summary, self._samples, self._greedy)


def _verdict(problem: Problem, is_correct: bool) -> dict[str, Any]:
    return (
        {"gold": problem.answer, "correct": is_correct} if problem.answer else {"gold": None, "correct": None}
    )
