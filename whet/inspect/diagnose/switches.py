"""Diagnosis of the switches: bfloat16, attention, checkpointing, batch, compilation, each against the recipe."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from whet.inspect.diagnose.speed import peaks
from whet.inspect.diagnose.step import Component, Subject, Work, timed
from whet.inspect.memory.phases import GIB
from whet.model.attention import AttentionKind
from whet.train.optim.step import OptimConfig, autocast_dtype, prepare_model
from whet.train.rl_config import RLConfig

LARGER = 4
GAIN = 1.15
"""Speed-up from which an unused switch is reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Another way to do the same step.

    Attributes:
        name: The switch.
        optim: Settings of the step.
        attention: Attention kernel; None keeps the recipe's.
        repeat: Repetitions of the data in the batch.
    """

    name: str
    optim: OptimConfig
    attention: AttentionKind | None = None
    repeat: int = 1


def variants(subject: Subject, *, compiles: bool) -> list[Variant]:
    """Return every applicable switch for this recipe, each alone."""
    run, optim = subject.run, subject.run.optim
    found = []
    if optim.precision in ("float32", "bfloat16_autocast"):
        other, word = ("float32", "without ") if optim.precision != "float32" else ("bfloat16_autocast", "")
        found.append(Variant(name=f"{word}bfloat16 autocast", optim=replace(optim, precision=other)))
    if isinstance(run, RLConfig) and subject.policy.attention == "exact":
        found.append(Variant(name="fused attention", optim=optim, attention="fast"))
    word = "without " if optim.checkpoint_layers else ""
    flipped = replace(optim, checkpoint_layers=not optim.checkpoint_layers)
    found.append(Variant(name=f"{word}checkpointing", optim=flipped))
    larger = replace(optim, token_budget=LARGER * optim.token_budget)
    found.append(Variant(name=f"{LARGER} times the micro-batch", optim=larger, repeat=LARGER))
    if compiles and not optim.compile:
        found.append(Variant(name="torch.compile", optim=replace(optim, compile=True)))
    return found


def together(base: OptimConfig, chosen: Sequence[Variant]) -> Variant:
    """Combine several switches."""
    optim, attention, repeat = base, None, 1
    for variant in chosen:
        changed = {
            name: getattr(variant.optim, name)
            for name in ("precision", "checkpoint_layers", "token_budget", "compile")
            if getattr(variant.optim, name) != getattr(base, name)
        }
        optim, attention = replace(optim, **changed), variant.attention or attention
        repeat = max(repeat, variant.repeat)
    return Variant(name=" + ".join(v.name for v in chosen), optim=optim, attention=attention, repeat=repeat)


@contextmanager
def switched(subject: Subject, variant: Variant) -> Iterator[Callable[[], Work]]:
    """Apply the switches of a variant; the yielded function prepares a step."""
    policy, model, before = subject.policy, subject.policy.model, subject.policy.attention
    parts = [module for module in model.modules() if module is not model]
    compiled = [module._compiled_call_impl for module in parts]
    policy.attention = variant.attention or before
    policy.autocast = autocast_dtype(variant.optim.precision)
    try:
        prepare_model(
            model, replace(variant.optim, compile=variant.optim.compile and not subject.run.optim.compile)
        )
        yield lambda: subject.prepare(variant.optim, repeat=variant.repeat)
    finally:
        policy.attention, model.checkpoint_layers = before, subject.run.optim.checkpoint_layers
        policy.autocast = autocast_dtype(subject.run.optim.precision)
        for module, impl in zip(parts, compiled, strict=True):
            module._compiled_call_impl = impl


def toggles(subject: Subject, rounds: int, *, compiles: bool) -> Component:
    """Time every switch alone and together, each alternating with the unchanged recipe."""
    part, optim = Component("Switches"), subject.run.optim
    base = Variant(name="as the recipe is", optim=optim)
    own = _peak(subject, base)
    rows: list[dict[str, Any]] = []
    gains: dict[str, list[float]] = {}

    def measure(variant: Variant) -> None:
        row: dict[str, Any] = {"switch": variant.name}
        try:
            ratios = _alternate(subject, base, variant, rounds)
            row |= {
                "speed": f"{statistics.median(ratios):.2f}x",
                "rounds": f"{min(ratios):.2f} to {max(ratios):.2f}",
            }
            peak = (
                0 if variant.optim.compile else _peak(subject, variant)
            )  # the memory meter would be compiled, too
            row["peak memory"] = f"{peak / GIB:.3f} GiB, {peak / own:.2f}x" if peak else "not measured"
            gains[variant.name] = ratios
        except Exception as error:  # any error of a kernel or compiler is a finding
            row |= {"speed": "failed", "rounds": "", "peak memory": _line(error)}
        subject.reset()
        rows.append(row)

    alone = variants(subject, compiles=compiles)
    for variant in alone:
        measure(variant)
    fine = [variant for variant in alone if variant.name in gains]
    faster = [variant for variant in fine if statistics.median(gains[variant.name]) > 1]
    for several in (fine, faster) if len(faster) < len(fine) else (fine,):
        if len(several) > 1:
            measure(together(optim, several))
    middle = {name: statistics.median(ratios) for name, ratios in gains.items()}
    part.tables["Tokens per second against the recipe as it is, measured in turn"] = rows
    title = "Speed, 1 is the recipe as it is"
    part.bars[title] = [(name, ratio, f"{ratio:.2f}x") for name, ratio in middle.items()]
    part.facts = {"rounds": rounds, "peak of the recipe as it is, bytes": own}
    if not (compiles or optim.compile):
        part.facts["not tried"] = "torch.compile (--compile tries it, minutes)"
    best = max(middle, key=lambda name: middle[name], default="")
    part.headline = f"best: {best} {middle[best]:.2f}x" if best else "no switch worked"
    failed = [row["switch"] for row in rows if row["speed"] == "failed"]
    part.check("all switches work", not failed, failed or "all", "all", otherwise="warn")
    sure = [v.name for v in fine if middle[v.name] >= GAIN and min(gains[v.name]) > 1]
    left = [f"{name} {middle[name]:.2f}x" for name in sure]
    expected = f"none that alone gains {GAIN:g}x, and in every round"
    part.check("faster settings that are off", not left, left or "none", expected, otherwise="warn")
    return part


def _peak(subject: Subject, variant: Variant) -> int:
    with switched(subject, variant) as prepare:
        return max(peaks(subject, prepare)[0].values())


def _alternate(subject: Subject, base: Variant, variant: Variant, rounds: int) -> list[float]:
    """Time base and variant alternately; return the ratio of their tokens per second in each round."""
    ratios = []
    for _ in range(rounds + 1):
        took = []
        for side in (base, variant):
            with switched(subject, side) as prepare:
                work = prepare()
                took.append(timed(subject, work)["step"] / side.repeat)
        ratios.append(took[0] / took[1])
    return ratios[1:]  # the first round warms up


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"
