"""Numbers that a source reports for a recipe, step by step, to be read beside those of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from whet.telemetry.log import read_metrics


@dataclass(frozen=True, slots=True)
class Series:
    """What a source reports of one metric.

    Attributes:
        stage: The stage (a key of `STAGES`) whose run is compared.
        title: Its title.
        metric: Name in metrics.jsonl.
        offset: Our step minus the source's, which may count from 0.
        values: Value by the source's step.
    """

    stage: str
    title: str
    metric: str
    offset: int
    values: Mapping[int, float]


_STEPS = range(0, 2001, 200)
_TRAIN = (3.7935, 2.1233, 1.6287, 1.3880, 1.3583, 1.2812, 1.2700, 1.2405, 1.1899, 1.2060, 1.2093)
_HELD_OUT = (3.5871, 2.0798, 1.6516, 1.4401, 1.4566, 1.4125, 1.3986, 1.3786, 1.2973, 1.3358, 1.3459)
_REWARDS = {0: 0.600, 50: 0.587, 100: 0.592, 150: 0.592, 200: 0.574, 250: 0.616, 300: 0.577} | {
    350: 0.592,
    400: 0.584,
    450: 0.592,
    499: 0.541,
}

REPORTED: dict[str, tuple[Series, ...]] = {
    "gpt2-gsm8k": (
        Series("sft", "training loss", "sft/loss", 0, dict(zip(_STEPS, _TRAIN, strict=True))),
        Series("sft", "held-out loss", "sft/validation_loss", 0, dict(zip(_STEPS, _HELD_OUT, strict=True))),
        Series("rl", "mean reward", "rl/reward_mean", 1, _REWARDS),
    )
}
"""Tables of sources by the name in `reported`.

gpt2-gsm8k: "GPU Validation Results" of a5c-ai/nanoGPT. GPT-2 124M, 2,000 iterations of 32 worked solutions at 3e-4 with
a cosine, then 500 iterations of GRPO with 4 x 8 completions. Its rewards stay near 0.6, which format (0.5) and length
(0.1) pay alone; the highest accuracy of a batch was 3 of 32."""


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a source beside ours.

    Attributes:
        stage: The stage.
        title: What it is.
        step: The source's step.
        said: What the source reports.
        measured: What this run logged at the same step; None if nothing.
    """

    stage: str
    title: str
    step: int
    said: float
    measured: float | None


def beside(name: str, folder: Path) -> list[Row]:
    """Set the numbers of a source beside a run's.

    Args:
        name: Key of `REPORTED`; empty for none.
        folder: Folder of the validation, with the stages' folders in it.
    """
    rows = []
    for series in REPORTED[name] if name else ():
        logged = {
            row["step"]: row[series.metric]
            for row in read_metrics(folder / series.stage)
            if row.get(series.metric) is not None
        }
        for step, said in series.values.items():
            rows.append(Row(series.stage, series.title, step, said, logged.get(step + series.offset)))
    return rows
