"""Settings that a sweep tries, their order, and the choice among them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, Literal

from whet.train.optim.precision import CANDIDATES
from whet.train.optim.step import Precision
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig

Run = RLConfig | SFTConfig
Status = Literal["ok", "oom", "failed"]

FLAGS = {
    "token_budget": "--optim.token-budget",
    "max_rows": "--policy.max-rows",
    "checkpoint_layers": "--optim.checkpoint-layers",
    "num_threads": "--policy.num-threads",
    "compile": "--optim.compile",
    "precision": "--optim.precision",
}
"""Setting -> the option of the program that sets it."""

PRECISIONS = CANDIDATES
HEADROOM = 0.9
"""A setting is recommended if its longest step takes at most this share of memory: allocators need the rest."""
TIE = 0.03
"""Speeds that differ by less count as equal: then the recipe's setting is kept, else the least memory decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Settings of a step. Only the precision changes the result.

    Attributes:
        token_budget: Tokens of a micro-batch.
        max_rows: Sequences decoded together; 0 if nothing is sampled.
        checkpoint_layers: Whether the backward pass recomputes the layers.
        num_threads: CPU threads; 0 on a GPU.
        compile: Whether the layers are compiled.
        precision: Precision of the step.
    """

    token_budget: int
    max_rows: int
    checkpoint_layers: bool
    num_threads: int
    compile: bool
    precision: Precision

    @classmethod
    def of(cls, run: Run, num_threads: int) -> Point:
        """Return the settings of a recipe.

        Args:
            run: The recipe.
            num_threads: Its CPU threads.
        """
        is_rl = isinstance(run, RLConfig)
        return cls(
            token_budget=run.optim.token_budget,
            max_rows=min(run.policy.max_rows, run.num_prompts * run.group_size) if is_rl else 0,
            checkpoint_layers=run.optim.checkpoint_layers,
            num_threads=num_threads,
            compile=run.optim.compile,
            precision=run.optim.precision,
        )

    def apply(self, run: Run) -> Run:
        """Return the recipe with these settings."""
        optim = replace(
            run.optim,
            token_budget=self.token_budget,
            checkpoint_layers=self.checkpoint_layers,
            compile=self.compile,
            precision=self.precision,
        )
        policy = replace(
            run.policy, num_threads=self.num_threads, max_rows=self.max_rows or run.policy.max_rows
        )
        return replace(run, optim=optim, policy=policy)

    def words(self, base: Point, always: Sequence[str] = ()) -> list[str]:
        """Return the command line options that turn `base` into this.

        Args:
            base: The program's settings without options.
            always: Settings that are written even if equal to `base`.
        """
        found = []
        for name, flag in FLAGS.items():
            value = getattr(self, name)
            if not value and name == "max_rows" or (value == getattr(base, name) and name not in always):
                continue
            if isinstance(value, bool):
                group, _, last = flag.rpartition(".")
                found.append(flag if value else f"{group}.no-{last}")
            else:
                found += [flag, str(value)]
        return found

    def needs(self, other: Point) -> bool:
        """Say whether this needs at least the memory of another point, as far as that is known in advance."""
        same = ("checkpoint_layers", "compile", "precision")
        return (
            all(getattr(self, name) == getattr(other, name) for name in same)
            and self.token_budget >= other.token_budget
            and self.max_rows >= other.max_rows
        )


@dataclass(slots=True)
class Measured:
    """Measurements of one point.

    Attributes:
        point: The settings.
        status: 'oom' if a step of longest sequences, or a timed one, ran out of memory.
        why: The error message if it is not ok.
        peaks: Peak of live bytes in each phase of a step of longest sequences.
        longest_seconds: Duration of that step, cold and with the memory meter.
    """

    point: Point
    status: Status = "ok"
    why: str = ""
    peaks: dict[str, int] = field(default_factory=dict)
    longest_seconds: float = 0.0
    steps: list[dict[str, float]] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Peak of live bytes in the whole step."""
        return max(self.peaks.values(), default=0)

    def median(self, name: str = "seconds") -> float:
        """Median of a quantity over the timed steps."""
        return statistics.median(step[name] for step in self.steps)

    def rate(self, name: str) -> float:
        """Median of a quantity per second."""
        return statistics.median(step[name] / step["seconds"] for step in self.steps)

    def rates(self) -> list[float]:
        """Median of the tokens per second in each round."""
        rounds = sorted({step["round"] for step in self.steps})
        return [
            statistics.median(s["tokens"] / s["seconds"] for s in self.steps if s["round"] == number)
            for number in rounds
        ]

    def fits(self, num_bytes: int) -> bool:
        """Say whether it ran, with headroom, within the given memory."""
        return self.status == "ok" and bool(self.steps) and self.peak <= HEADROOM * num_bytes

    def to_json(self, num_bytes: int) -> dict[str, Any]:
        """Return it as JSON values, with the table's numbers."""
        found = {**asdict(self), "fits": self.fits(num_bytes), "peak_bytes": self.peak}
        if not self.steps or self.status != "ok":
            return found
        seconds = [step["seconds"] for step in self.steps]
        return found | {
            "seconds": statistics.median(seconds),
            "seconds_std": statistics.stdev(seconds) if len(seconds) > 1 else None,
            "sample_seconds": self.median("sample_seconds"),
            "train_seconds": self.median("train_seconds"),
            "tokens_per_second": self.rate("tokens"),
            "samples_per_second": self.rate("samples"),
            "micro_batches": int(self.median("micro_batches")),
        }


def choose(found: Sequence[Measured], base: Point, num_bytes: int) -> Point | None:
    """Return the fastest point that fits; of equally fast ones `base`, or else the one with the least memory.

    If `base` fits, another point must be faster in every round, so that noise is no reason to change.

    Args:
        found: The points, measured alternately.
        base: The settings to keep if nothing is gained.
        num_bytes: Bytes of memory.
    """
    fitting = [item for item in found if item.fits(num_bytes)]
    own = next((item for item in fitting if item.point == base), None)
    if own is not None:
        pace = own.rates()
        fitting = [
            item
            for item in fitting
            if item is own or all(rate > before for rate, before in zip(item.rates(), pace, strict=False))
        ]
    if not fitting:
        return None
    fastest = max(item.rate("tokens") for item in fitting)
    near = [item for item in fitting if item.rate("tokens") >= (1 - TIE) * fastest]
    return min(near, key=lambda item: (item.point != base, item.peak)).point


def candidates(
    base: Point, about: Mapping[str, Any], chosen: Mapping[str, Sequence[int]], *, most: int
) -> dict[str, list[Any]]:
    """Return the values to try for each setting, those with least memory first.

    Args:
        base: The recipe's settings.
        about: Facts about machine and recipe: 'longest', 'update' (tokens of an update of longest sequences),
            'samples', 'cores' and 'is_cuda'.
        chosen: Values given by the user, by setting; others are generated here.
        most: Most values per setting.
    """
    update, longest, samples = about["update"], about["longest"], about["samples"]
    tokens = [2**n for n in range(4, 31) if longest <= 2**n < 2 * update]
    if base.token_budget >= update:  # a larger one has no effect
        tokens = [value for value in tokens if value < update]
    rows = [-(-samples // 2**n) for n in range(most)] if base.max_rows else []
    threads = [2**n for n in range(10) if 2**n < about["cores"]] + [about["cores"]]
    made: dict[str, Sequence[int]] = {"token_budget": tokens, "max_rows": rows}
    made["num_threads"] = [] if about["is_cuda"] else threads
    values: dict[str, list[Any]] = {name: [] for name in ("num_threads", "token_budget", "max_rows")}
    values["checkpoint_layers"] = [True, False]
    for name, automatic in made.items():
        own, kept = chosen.get(name) or (), getattr(base, name)
        values[name] = sorted({*own, kept}) if own else spread(sorted({*automatic, kept}), most, kept)
    return {name: found for name, found in values.items() if len(found) > 1}


def spread(values: Sequence[int], most: int, kept: int) -> list[int]:
    """Return at most `most` of ascending values, evenly spread, including the first, the last and `kept`."""
    if len(values) <= most:
        return list(values)
    places = {round(n * (len(values) - 1) / (most - 1)) for n in range(most)}
    own = values.index(kept)
    if own not in places:
        inner = sorted(places)[1:-1] or sorted(places)[-1:]
        places.discard(min(inner, key=lambda place: abs(place - own)))
        places.add(own)
    return [values[place] for place in sorted(places)]


def grid(base: Point, values: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Return every combination, the last setting changing fastest."""
    names = list(values)
    return [
        replace(base, **dict(zip(names, combination, strict=True)))
        for combination in product(*(values[name] for name in names))
    ]
