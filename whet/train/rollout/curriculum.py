"""Selects training problems: not too long, and neither hopeless nor mastered for the starting policy."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whet.eval.grade import grade
from whet.generate.episode import play
from whet.generate.policy import Policy
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.ranks.collectives import all_reduce_sum, rank, shard
from whet.tasks.tools import environment_for
from whet.telemetry.display import advancing, open_display
from whet.types import Problem, Task, UnreadError, UserError

DIFFICULTY_FILE = "difficulty.jsonl"
ROWS_PER_PORTION = 16
"""Samples per batch, in multiples of the engine's rows: bounds memory, keeps the rows full."""

BANDS = (0.25, 0.5, 0.75)
"""Bin edges of the histogram of pass rates between 'never' and 'always'."""


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Selection of training problems; by default all. With num_samples, those with 0 < pass rate < 1 are kept."""

    max_prompt_percentile: float = 100.0
    """Drop prompts that are longer, in tokens, than this percentile of the training prompts; 100 keeps all."""
    num_samples: int = 0
    """Completions of the starting policy per problem to measure its pass rate; 0 measures none."""
    difficulty_file: str = ""
    """difficulty.jsonl of an earlier run, or its folder: its pass rates are used instead of measuring."""
    min_pass_rate: float | None = 0.0
    """Keep problems whose pass rate is strictly above this; None for no lower bound."""
    max_pass_rate: float | None = 1.0
    """Keep problems whose pass rate is strictly below this; None for no upper bound."""
    max_problems: int = 0
    """Measure only this many problems, chosen by hash, and drop the others; 0 measures all."""
    unmeasured: Literal["error", "keep", "drop"] = "error"
    """Whether to keep or drop problems that difficulty_file does not have."""

    def __post_init__(self) -> None:
        if not 0 < self.max_prompt_percentile <= 100:
            raise ValueError(
                f"max_prompt_percentile = {self.max_prompt_percentile}: expected above 0, at most 100"
            )
        for name in ("num_samples", "max_problems"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 0 or more")
        low, high = _bounds(self)
        if not low < high or not (math.isinf(low) or low >= 0) or not (math.isinf(high) or high <= 1):
            raise ValueError(
                f"min_pass_rate = {self.min_pass_rate}, max_pass_rate = {self.max_pass_rate}: expected 0 to 1 or None, "
                "the first below the second"
            )
        if self.num_samples and self.difficulty_file:
            raise ValueError(
                "num_samples measures pass rates, difficulty_file reads them: give one of the two"
            )
        if math.isinf(low) and math.isinf(high) and self.by_difficulty:
            raise ValueError(
                "min_pass_rate and max_pass_rate are both None: nothing would be filtered; give one"
            )
        if self.num_samples == 1 and not (math.isinf(low) or math.isinf(high)):
            raise ValueError("num_samples = 1: a pass rate is then 0 or 1, none between; expected 2 or more")
        if self.max_problems and not self.num_samples:
            raise UnreadError("max_problems is read with num_samples only; leave it out", "max_problems")
        if self.unmeasured != "error" and not self.difficulty_file:
            raise UnreadError("unmeasured is read with difficulty_file only; leave it out", "unmeasured")
        if (self.min_pass_rate, self.max_pass_rate) != (0.0, 1.0) and not self.by_difficulty:
            raise ValueError(
                "min_pass_rate and max_pass_rate need pass rates: give num_samples or difficulty_file"
            )

    @property
    def by_difficulty(self) -> bool:
        """Whether problems are selected by pass rate."""
        return self.num_samples > 0 or bool(self.difficulty_file)


def _bounds(config: CurriculumConfig) -> tuple[float, float]:
    """Return the open interval of pass rates to keep."""
    low = -math.inf if config.min_pass_rate is None else config.min_pass_rate
    return low, math.inf if config.max_pass_rate is None else config.max_pass_rate


@dataclass(frozen=True, slots=True)
class PassRate:
    """Pass rate of a problem."""

    num_right: int
    num_samples: int

    @property
    def share(self) -> float:
        """Right samples over all."""
        return self.num_right / self.num_samples


def select_problems(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    config: CurriculumConfig,
    folder: Path,
    *,
    sampling: SamplingParams,
    seed: int,
) -> tuple[list[Problem], list[str]]:
    """Return the training problems that a curriculum selects; the same on every rank.

    Args:
        policy: The starting policy, before a checkpoint is restored.
        task: Judges answers.
        problems: Candidates that fit the context; not empty.
        config: The selection.
        folder: The existing run folder: measured pass rates are written to its difficulty.jsonl, and read from there on
            resume.
        sampling: Sampling settings of the run's rollouts; pass rates are measured with the same.
        seed: The run's seed.

    Returns:
        The selected problems in their original order, and lines to show.

    Raises:
        UserError: If nothing is kept, or pass rates are missing or malformed.
    """
    notes: list[str] = []
    kept = list(problems)
    if config.max_prompt_percentile < 100:
        lengths = [len(policy.prompt_ids(problem)) for problem in kept]
        cut = percentile(lengths, config.max_prompt_percentile)
        kept = [problem for problem, length in zip(kept, lengths, strict=True) if length <= cut]
        notes.append(
            f"prompts of more than {cut:,} tokens (percentile {config.max_prompt_percentile:g}) are dropped: "
            f"{len(lengths) - len(kept):,} of {len(lengths):,}, the longest of {max(lengths):,} tokens"
        )
    if not config.by_difficulty:
        return kept, notes
    own = folder / DIFFICULTY_FILE
    if config.difficulty_file:
        given = Path(config.difficulty_file)
        rates = read_difficulty(given / DIFFICULTY_FILE if given.is_dir() else given)
    else:
        kept = hash_sample(kept, config.max_problems)
        if own.exists():
            rates = read_difficulty(own)
        else:
            rates = measure_difficulty(
                policy,
                task,
                kept,
                num_samples=config.num_samples,
                sampling=sampling,
                seed=seed,
            )
            if rank() == 0:
                write_difficulty(own, kept, rates)
    kept, note = _within(kept, rates, config)
    return kept, [*notes, note]


def percentile(lengths: Sequence[int], percent: float) -> int:
    """Return the smallest length that at least `percent` % of all lengths do not exceed (nearest rank).

    Args:
        lengths: Not empty.
        percent: Above 0, at most 100.
    """
    # Rounded, because 0.07 * 100 is a little more than 7, and a ceiling would make it 8.
    place = math.ceil(round(percent * len(lengths) / 100, 9))
    return sorted(lengths)[max(place, 1) - 1]


def hash_sample(problems: Sequence[Problem], count: int) -> list[Problem]:
    """Return `count` problems chosen by a hash of their uids, in their original order; all if count is 0 or too
    large."""
    if not 0 < count < len(problems):
        return list(problems)
    drawn = sorted(range(len(problems)), key=lambda index: (_place(problems[index].uid), index))[:count]
    return [problems[index] for index in sorted(drawn)]


def _place(uid: str) -> bytes:
    # Not the uid itself: a validation uses the first problems by uid.
    return hashlib.sha256(f"curriculum\x00{uid}".encode()).digest()


def measure_difficulty(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    *,
    num_samples: int,
    sampling: SamplingParams,
    seed: int,
) -> dict[str, PassRate]:
    """Measure the policy's pass rate on every problem; each rank samples its share, all get all results.

    Args:
        policy: The policy.
        task: Judges answers; only the schema's answer block counts, as in the reward.
        problems: The problems; repeated uids are measured once.
        num_samples: Completions per problem.
        sampling: Sampling settings.
        seed: Seed of the noise, together with a problem's uid and the sample's index.

    Returns:
        Pass rate by uid.
    """
    unique = list({problem.uid: problem for problem in problems}.values())
    mine = list(shard(len(unique)))
    counts = [0] * len(unique)
    engine = policy.engine()
    environment = environment_for(policy.schema, task)
    portion = max(1, ROWS_PER_PORTION * policy.max_rows // num_samples)
    title = f"pass rates of the starting policy, {task.name}"
    with open_display(
        title, max(len(mine), 1) * num_samples, (), enabled=rank() == 0, unit="completion"
    ) as display:
        advance = advancing(display)
        for start in range(0, len(mine), portion):
            places = mine[start : start + portion]
            asked = [unique[place] for place in places]
            seeds = [
                [sequence_seed("difficulty", seed, problem.uid, index) for index in range(num_samples)]
                for problem in asked
            ]
            drawn = play(policy, engine, asked, seeds, sampling, environment, on_finished=advance)
            items = [
                (problem, policy.completion_text(policy.prompt_ids(problem), done.ids), done.ids)
                for problem, row in zip(asked, drawn, strict=True)
                for done in row
            ]
            grades = grade(policy, task, items)
            for index, place in enumerate(places):
                judged = grades[index * num_samples : (index + 1) * num_samples]
                counts[place] = sum(graded.is_correct for graded in judged)
    totals = all_reduce_sum(*counts)
    return {
        problem.uid: PassRate(int(total), num_samples) for problem, total in zip(unique, totals, strict=True)
    }


def write_difficulty(path: Path, problems: Sequence[Problem], rates: Mapping[str, PassRate]) -> None:
    """Write pass rates as JSON lines (uid, prompt, num_right, num_samples), atomically."""
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("w", encoding="ascii") as file:
        for problem in {problem.uid: problem for problem in problems}.values():
            rate = rates[problem.uid]
            record = {"uid": problem.uid, "prompt": problem.prompt}
            record |= {"num_right": rate.num_right, "num_samples": rate.num_samples}
            file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_difficulty(path: Path) -> dict[str, PassRate]:
    """Read pass rates from `write_difficulty`.

    Raises:
        UserError: If the file cannot be read or a line is malformed.
    """
    rates: dict[str, PassRate] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: pass rates cannot be read ({error}); check curriculum.difficulty_file"
        ) from None
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            uid, right, samples = row["uid"], row["num_right"], row["num_samples"]
            if not (type(uid) is str and type(right) is type(samples) is int and 0 <= right <= samples > 0):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f"{path} line {number}: expected a JSON object with uid, num_right and num_samples; measure again"
            ) from None
        rates[uid] = PassRate(right, samples)
    return rates


def _within(
    problems: Sequence[Problem], rates: Mapping[str, PassRate], config: CurriculumConfig
) -> tuple[list[Problem], str]:
    """Return the problems whose pass rate is within the bounds, and a line about them."""
    low, high = _bounds(config)
    known = [problem for problem in problems if problem.uid in rates]
    unknown = len(problems) - len(known)
    if unknown and (config.unmeasured == "error" or not known):
        raise UserError(
            f"{unknown:,} of {len(problems):,} problems have no measured pass rate in "
            f"{config.difficulty_file or DIFFICULTY_FILE}; measure them (curriculum.num_samples), or set "
            "curriculum.unmeasured to keep or drop"
        )
    shares = [rates[problem.uid].share for problem in known]
    chosen = {problem.uid for problem, share in zip(known, shares, strict=True) if low < share < high}
    if not chosen:
        raise UserError(
            f"no problem has {_interval(low, high)} under the starting policy ({histogram(shares)}); "
            f"{_remedy(shares)}, or widen curriculum.min_pass_rate and max_pass_rate"
        )
    kept = [
        problem
        for problem in problems
        if problem.uid in chosen or (problem.uid not in rates and config.unmeasured == "keep")
    ]
    count = sum(problem.uid in chosen for problem in known)
    note = f"{count:,} of {len(known):,} problems have {_interval(low, high)} under the starting policy; "
    note += f"{histogram(shares)}"
    return kept, note + (f"; {unknown:,} unmeasured: {config.unmeasured}" if unknown else "")


def _interval(low: float, high: float) -> str:
    return f"{'' if math.isinf(low) else f'{low:g} < '}pass rate{'' if math.isinf(high) else f' < {high:g}'}"


def _remedy(shares: Sequence[float]) -> str:
    if max(shares) == 0:
        return "start from a better model (SFT first), or use easier problems or more samples"
    return "use harder problems" if min(shares) == 1 else "use other problems or more samples"


def histogram(shares: Sequence[float]) -> str:
    """Format the counts of pass rates that are 0, in bands between, and 1: 'never right 95, below 25 % 3, ..., always
    right 5'."""
    between = [share for share in shares if 0 < share < 1]
    edges = (0.0, *BANDS, 1.0)
    bands = [
        f"{100 * low:g}-{100 * high:g} % {sum(low <= share < high for share in between):,}"
        for low, high in zip(edges, edges[1:], strict=False)
    ]
    never, always = sum(share == 0 for share in shares), sum(share == 1 for share in shares)
    return ", ".join([f"never right {never:,}", *bands, f"always right {always:,}"])
