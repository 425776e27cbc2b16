"""Samples and judges the policy's own completions, for `whet rft` and `whet dpo`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from whet.eval.grade import Grade
from whet.generate.policy import Policy
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.ranks.collectives import all_gather_values, rank, shard
from whet.storage.commit import sync
from whet.telemetry.display import advancing, open_display
from whet.train.rollout.rollout import RolloutParams, collect_groups
from whet.types import Problem, Sample, Task, UserError

Judged = list[tuple[Sample, Grade]]
Row = dict[str, Any]

ABSENT = "absent"
FILLS = 4
"""Completions per request, in decoding batches: few, so that discarded ones are freed soon."""


def check_sampling(sampling: SamplingParams, num_samples: int) -> None:
    """Refuse greedy sampling and too few samples."""
    if sampling.temperature == 0:
        raise ValueError(
            "sampling.temperature = 0: all samples of a problem would be equal; expected above 0"
        )
    if num_samples < 1:
        raise ValueError(f"num_samples = {num_samples}: expected 1 or more")


def sample_judged(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    *,
    num_samples: int,
    sampling: SamplingParams,
    seed: int,
    title: str,
) -> Iterator[tuple[Problem, Judged]]:
    """Sample completions of this rank's problems and judge them, with a progress display.

    Args:
        policy: The policy that samples.
        task: Judges answers.
        problems: All ranks' problems.
        num_samples: Completions per problem.
        sampling: Sampling settings.
        seed: Seed of the noise, together with problem and index.
        title: Title of the display.

    Yields:
        Each problem with its samples and their grades.

    Raises:
        UserError: If there is no problem.
    """
    if not problems:
        raise UserError(f"task {task.name}: the train split has no problems")
    engine = policy.engine()
    mine = [problems[index] for index in shard(len(problems))]
    portion = max(1, FILLS * policy.max_rows // num_samples)
    total = max(len(mine) * num_samples, 1)
    with open_display(title, total, (), enabled=rank() == 0, unit="completion") as display:
        advance = advancing(display)
        for start in range(0, len(mine), portion):
            part = mine[start : start + portion]
            rollout = collect_groups(
                policy,
                engine,
                task,
                [],
                part,
                seeds=[(seed,)] * len(part),
                params=RolloutParams(group_size=num_samples, sampling=sampling),
            )
            advance(len(part) * num_samples)
            for group, grades in zip(rollout.groups, rollout.grades, strict=True):
                yield group.problem, list(zip(group.samples, grades, strict=True))


def is_right(graded: Grade) -> bool:
    """Say whether a completion is worth learning from: a right answer in perfect format."""
    return graded.is_correct and graded.verdict == "perfect"


def distinct(samples: Sequence[Sample]) -> list[Sample]:
    """Return the first sample of each text."""
    return list({sample.text: sample for sample in reversed(samples)}.values())[::-1]


def choose(count: int, limit: int, *seed: int | str) -> list[int]:
    """Choose at most `limit` of `count` items by a hash of (seed, index); return their indices, ascending."""
    ranked = sorted(range(count), key=lambda index: sequence_seed("choose", *seed, index))
    return sorted(ranked[:limit])


def gather_rows(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of all ranks, as read back from JSON, in the same order on every rank."""
    text = "".join(json.dumps(row) + "\n" for row in rows) or "\n"
    everything = all_gather_values(torch.frombuffer(bytearray(text.encode("ascii")), dtype=torch.uint8))
    lines = bytes(everything.tolist()).decode("ascii").splitlines()
    return [json.loads(line) for line in sorted(lines) if line]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a JSON-lines file atomically. Its sha256 file is written before and after, and may list two states.

    Raises:
        UserError: If the file cannot be written.
    """
    data = "".join(json.dumps(row) + "\n" for row in rows).encode("ascii")
    states = [_digest(data), _digest(path.read_bytes()) if path.is_file() else ABSENT]
    try:
        _replace(_seal(path), "\n".join(states).encode("ascii"))
        _replace(path, data)
        _replace(_seal(path), states[0].encode("ascii"))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); free space, then --resume") from None


def load_rows(path: Path) -> list[Row]:
    """Read rows from `write_rows`; a missing file has no rows.

    Raises:
        UserError: If the file was changed since.
    """
    try:
        data = path.read_bytes() if path.exists() else None
        states = _seal(path).read_bytes().decode("ascii").split() if _seal(path).exists() else None
        if states is not None and (ABSENT if data is None else _digest(data)) not in states:
            raise ValueError(states)
        return [dict(json.loads(line)) for line in (data or b"").splitlines()]
    except (OSError, ValueError, TypeError, RecursionError):
        raise UserError(f"{path}: damaged: it is not what the run wrote; start a new run") from None


def _seal(path: Path) -> Path:
    return path.with_name(f".{path.name}.sha256")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _replace(path: Path, data: bytes) -> None:
    """Write a file atomically; when this returns, a power cut no longer takes it away, nor puts the old one back."""
    temporary = path.with_suffix(".partial")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)
