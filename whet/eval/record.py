"""The files of an evaluation: written so that a killed one can resume, read for comparisons."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from whet.eval.grade import Judged
from whet.eval.measure import EvalResult, show_work
from whet.eval.metrics import summarise
from whet.generate.policy import Policy, PolicyConfig
from whet.model.quant import packed_tensors
from whet.model.transformer import LanguageModel
from whet.stats import Interval
from whet.storage.commit import digest
from whet.tasks.images import all_images
from whet.telemetry.log import parse_row
from whet.telemetry.provenance import describe_model
from whet.types import Problem, UserError

# The evaluated weights: their origin and hash.


def describe_weights(config: PolicyConfig, policy: Policy) -> dict[str, Any]:
    """Describe the evaluated weights.

    Args:
        config: Their location, as configured.
        policy: The loaded policy.

    Returns:
        init; folder and sha256 of the base's files (`sha256_of_all` of `whet.telemetry.provenance.describe_model`), of
        all parameters if there are no files; adapter, the hash of a LoRA adapter on it, or None; steering, where
        vectors are added, the hashes of those with their strengths.
    """
    adapter = policy.adapter
    base = adapter.base if adapter is not None and not config.adapter else config.init
    files = describe_model(base) if base else {}
    steering = {"steering": [vectors.sha256 for vectors in policy.steering]} if policy.steering else {}
    return {
        "init": config.init,
        "folder": files.get("folder"),
        "sha256": files.get("sha256_of_all") or _model_digest(policy.model),
        "adapter": None if adapter is None else adapter.sha256,
        **steering,
    }


def _model_digest(model: LanguageModel) -> str:
    digest = hashlib.sha256()
    for name, parameter in (*model.named_parameters(), *packed_tensors(model)):
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


SUMMARY = "eval.json"
SAMPLES = "eval_samples.jsonl"
PROGRESS = "eval_progress.jsonl"
"""Identity of an unfinished evaluation, and the work of each chunk with a hash; deleted once eval.json exists."""
GREEDY = "greedy"
IDENTITY = ("protocol", "task", "split", "sampling", "answer_from", "precision")
"""Parts of the identity in which two evaluations must agree to be compared. Excluded are `seed` (other noise, same
question), `num_samples` (pass@1 does not depend on it; pass@k and maj@n have it in their names) and the selection of
problems: common problems are compared."""
ELSEWHERE = ("task.path", "task.held_out")
"""Parts that may differ: the same data may be in another folder, or another share of it measured; the problems show
whether they are the same."""


KINDS: dict[str, Any] = {
    **dict.fromkeys(("num_problems", "num_samples", "thinking_tokens", "completion_tokens"), int),
    **dict.fromkeys(("uid", "prompt", "text", "finish_reason", "samples_sha256"), str),
    **dict.fromkeys(("metrics", "identity"), dict),
    **dict.fromkeys(("tokens", "hardware", "model", "meta"), dict | None),
    "images": list,
    **dict.fromkeys(("answer_logprob", "hedges", "revisions"), int | float | None),
    "format": str | dict,  # a completion's verdict; eval.json has shares
    "answer": str | None,
    "correct": bool,
}
"""Types of the fields of eval.json and its completions."""
ROW = ("uid", "prompt", "gold", "text", "answer", "correct", "format", "finish_reason")
ROW += ("thinking_tokens", "completion_tokens")
"""Fields that a completion needs to be compared, besides its number."""


@dataclass(frozen=True, slots=True)
class StoredEval:
    """A finished evaluation, read from disk.

    Attributes:
        folder: Its folder.
        label: What was evaluated.
        summary: Content of eval.json.
        samples: Rows of eval_samples.jsonl by uid of the problem: samples 0, 1, 2 ... of each.
        greedy: Row of the greedy completion by uid.
    """

    folder: Path
    label: str
    summary: dict[str, Any]
    samples: dict[str, list[dict[str, Any]]]
    greedy: dict[str, dict[str, Any]]


def read_eval(folder: str | Path, needed: Sequence[str] = ("uid", "text", "correct")) -> StoredEval:
    """Read a finished evaluation.

    Args:
        folder: A folder that `whet eval` wrote.
        needed: Fields that every completion must have.

    Raises:
        UserError: If it is not an evaluation, not finished, or damaged.
    """
    folder = Path(folder)
    path = folder / SUMMARY
    if not path.is_file():
        unfinished = (folder / PROGRESS).is_file()
        what = (
            "the evaluation is not finished; continue with --resume" if unfinished else f"no {SUMMARY} in it"
        )
        raise UserError(f"{folder}: {what}; expected the folder of a finished `whet eval`")
    summary = parse_row(path.read_bytes())
    if summary is not None and "tasks" in summary:
        names = ", ".join(str(folder / name) for name in summary["tasks"])
        raise UserError(f"{folder}: contains several tasks; give the folder of one of them: {names}")
    if summary is None or not _holds(
        summary, ("label", "metrics", "identity", "num_problems", "num_samples")
    ):
        raise UserError(f"{path}: damaged, or not written by whet; evaluate again")
    samples: dict[str, list[dict[str, Any]]] = {}
    greedy: dict[str, dict[str, Any]] = {}
    for number, (row, _) in enumerate(read_lines(folder / SAMPLES), start=1):
        if row is None or not _holds(row, ("sample", *needed)):
            raise UserError(f"{folder / SAMPLES}: line {number} is damaged; evaluate again")
        if row["sample"] == GREEDY:
            greedy[row["uid"]] = row
        else:
            samples.setdefault(row["uid"], []).append(row)
    count = summary["num_samples"]
    is_whole = all([row["sample"] for row in rows] == list(range(len(rows))) for rows in samples.values())
    is_whole = is_whole and all(len(rows) == count for rows in samples.values())
    if not is_whole or greedy.keys() != samples.keys() or len(greedy) != summary["num_problems"]:
        raise UserError(f"{folder / SAMPLES}: completions are missing; evaluate again")
    if summary.get("samples_sha256", hashed := digest(folder / SAMPLES)) != hashed:
        raise UserError(
            f"{folder / SAMPLES}: changed since the evaluation wrote it (damaged, or edited); evaluate again"
        )
    return StoredEval(folder, str(summary["label"]), summary, samples, greedy)


def _holds(row: Mapping[str, Any], needed: Sequence[str]) -> bool:
    """Say whether a JSON object has the needed fields, all of the right type and finite."""
    return all(name in row for name in needed) and all(
        isinstance(row[name], kind) and (not isinstance(row[name], float) or isfinite(row[name]))
        for name, kind in KINDS.items()
        if name in row
    )


def differences(a: StoredEval, b: StoredEval) -> list[str]:
    """Return the differences in protocol of two evaluations; empty if their results are comparable.

    Args:
        a: One evaluation.
        b: The other.

    Returns:
        Such as `protocol.system_prompt (True, False)`; long values are omitted.
    """
    found = unlike(a.summary["identity"], b.summary["identity"])
    shared = a.greedy.keys() & b.greedy.keys()
    if not shared:
        found.append("problems (none in common)")
    elif any(a.greedy[uid]["gold"] != b.greedy[uid]["gold"] for uid in shared):
        found.append("gold answers of the same problems")
    return found


def unlike(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """Return where two identities differ that have to agree, as `differences` does."""
    parts = (part for part in IDENTITY if part in one or part in two)
    if "all" in (one.get("split"), two.get("split")):  # has the other's problems, and those are compared
        parts = (part for part in parts if part != "split")
    return [text for part in parts for text in unequal(part, one.get(part), two.get(part))]


def unequal(name: str, a: Any, b: Any) -> list[str]:
    """Return the dotted names at which two JSON values differ, followed by short values."""
    if a == b or name in ELSEWHERE:
        return []
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [text for key in keys for text in unequal(f"{name}.{key}", a.get(key), b.get(key))]
    shown = [json.dumps(value) for value in (a, b)]
    return [f"{name} ({', '.join(shown)})" if max(map(len, shown)) <= 40 else name]


def write_result(
    folder: Path,
    result: EvalResult,
    *,
    label: str,
    identity: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
) -> None:
    """Write eval.json (metrics with intervals) and eval_samples.jsonl (every completion) of an evaluation in memory.

    Args:
        folder: Existing folder.
        result: The result.
        label: What was evaluated.
        identity: Protocol, task and sampling: two results are comparable only if these are equal.
        model: Origin and hash of the weights.
    """
    rows = [[greedy, *row] for greedy, row in zip(result.greedy, result.samples, strict=True)]
    (folder / SAMPLES).unlink(missing_ok=True)
    append_rows(folder, result.problems, rows)
    write_summary(folder, result, label=label, identity=identity, model=model)


def write_summary(
    folder: Path,
    result: EvalResult,
    *,
    label: str,
    identity: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    measures: Mapping[str, Interval] | None = None,
    details: Mapping[str, Any] | None = None,
    beside: Mapping[str, Mapping[str, Interval]] | None = None,
) -> dict[str, Any]:
    """Write only eval.json, atomically, and return its content; arguments as in `write_result`.

    Args:
        measures: Metrics that are the task's own: their means stand at the top of the file, too.
        details: What these are made of.
        beside: Metrics of these names by the other way to read answers: `read_strictly` or `read_anywhere`.
    """
    found = {
        way: {name: asdict(interval) for name, interval in shares.items()}
        for way, shares in (beside or {}).items()
    }
    content = {
        "label": label,
        **{name: interval.mean for name, interval in (measures or {}).items()},
        **({"measures": list(measures), "details": dict(details or {})} if measures else {}),
        **summarise(result.problems, result.samples, result.metrics, seed=result.seed),
        **found,
        "seconds": round(result.seconds, 2),
        **show_work(result.work),
        "model": dict(model) if model else None,
        "identity": identity,
        "samples_sha256": digest(folder / SAMPLES),
    }
    write_json(folder / SUMMARY, content)
    return content


def write_json(path: Path, content: object) -> None:
    """Write a JSON file atomically."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("w", encoding="ascii") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def append_rows(
    folder: Path, problems: Sequence[Problem], rows: Sequence[Sequence[Judged]]
) -> tuple[int, str]:
    """Append the completions of problems to eval_samples.jsonl, the greedy one first, and sync them to disk.

    Returns:
        Size and SHA-256 of the written bytes.
    """
    return append_lines(
        folder / SAMPLES,
        (
            as_row(problem, GREEDY if index == 0 else index - 1, done)
            for problem, row in zip(problems, rows, strict=True)
            for index, done in enumerate(row)
        ),
    )


def as_row(problem: Problem, sample: int | str, done: Judged) -> dict[str, Any]:
    """Return a completion as a row of eval_samples.jsonl."""
    return {
        "uid": problem.uid,
        "prompt": problem.prompt,
        "gold": problem.answer,
        **({"other_answers": list(problem.other_answers)} if problem.other_answers else {}),
        **({"images": list(images)} if (images := all_images(problem)) else {}),
        "meta": dict(problem.meta),
        "sample": sample,
        "text": done.text,
        "answer": done.grade.answer,
        "answer_from": done.grade.answer_step,
        "correct": done.grade.is_correct,
        "format": done.grade.verdict,
        "thinking_tokens": done.grade.thinking_tokens,
        "completion_tokens": done.num_tokens,
        "finish_reason": done.finish_reason,
        "num_turns": done.num_turns,
        "completion_ids": list(done.ids),
        "logprobs": list(done.logprobs),
        **asdict(done.confidence),
        "rewards": dict(done.rewards),
        "reward": done.reward,
    }


def read_lines(path: Path) -> Iterator[tuple[dict[str, Any] | None, int]]:
    """Yield every line's object, None for a torn or unreadable one, with its size in bytes."""
    try:
        with path.open("rb") as file:
            for line in file:
                yield (parse_row(line) if line.endswith(b"\n") else None), len(line)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> tuple[int, str]:
    """Append rows and sync them to disk; return size and SHA-256 of the written bytes."""
    size, hashed = 0, hashlib.sha256()
    try:
        with path.open("ab") as file:
            for row in rows:
                line = (json.dumps(row) + "\n").encode("ascii")
                hashed.update(line)
                size += file.write(line)
            file.flush()
            os.fsync(file.fileno())
            return size, hashed.hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); free space, then --resume") from None
