"""The evaluations of one folder as stages of one model: a headline, a chart and six columns, all from their data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.report.part import Part, estimates
from whet.stats import Interval, share_interval
from whet.telemetry.log import as_number

ORDER = ("base", "sft", "rft", "dpo", "rl")
"""Labels of stages in the order in which a model goes through them; others follow, oldest first."""

NOUNS = {"arithmetic": "sums", "matrices": "coloured matrices", "words": "word problems"}
"""Task -> what its problems are called."""

PADS = {"arithmetic": "the scratch-pad", "matrices": "the scratch-pad"}
"""Task -> what its thinking is called."""

BLIND = {"blank": "white images", "swapped": "another problem's image"}
"""What was shown instead of a problem's images -> in words."""

BESIDE = "beside"
"""In an evaluation's identity: that it is no stage of learning, and the words before how much is right there."""

COLUMNS = ("right, sampled", "right, greedy", "thinks first", "perfect format", "tokens")
"""Of the short table; one that no stage has a value for is left out."""

EVERY_TIME, ALMOST_EVERY_TIME = 0.995, 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One evaluation, in numbers.

    Attributes:
        name: Its label.
        right: Share of sampled answers that are right (pass@1).
        greedy: Share of right greedy answers; None where it was not measured.
        thinks: Share of sampled completions with thinking and then an answer, each within its tags; None where it was
            not recorded.
        tokens: Tokens of a completion.
        format: Share of completions in perfect format.
        right_with: Share of right ones among samples with thinking; None without such samples.
        right_without: The same among samples without thinking.
    """

    name: str
    right: Interval
    greedy: Interval | None = None
    thinks: Interval | None = None
    tokens: Interval | None = None
    format: Interval | None = None
    right_with: float | None = None
    right_without: float | None = None


def overview(parts: Sequence[Part]) -> dict[str, Any] | None:
    """Return what the page of a folder with several evaluations begins with; None for fewer than two.

    Args:
        parts: What the folder holds, read.

    Returns:
        'headline' and 'evidence' (sentences, '' where the evaluations are not of the same problems), 'bars' (rows of
        the chart), 'rows' (name and cells of the short table), 'labels' and 'measures' (every estimate, by name).
    """
    found = [part for part in parts if part.kind == "eval" and part.evaluation]
    found.sort(key=lambda part: ORDER.index(label) if (label := _label(part)) in ORDER else len(ORDER))
    stages = [stage for part in found if (stage := _stage(part)) is not None]
    if len(found) < 2:
        return None
    # With other images than the problems' own it is no stage of learning, but shows what the last one rests on.
    real = [part for part in found if not _shown(part) and not _beside(part)]
    steps = [stage for part in real if (stage := _stage(part)) is not None]
    blind = [(stage, _shown(part)) for part in found if _shown(part) and (stage := _stage(part)) is not None]
    tables = [{row[1]: row[2:] for row in estimates(part.evaluation)} for part in found]
    names = [name for name in tables[0] if all(name in table for table in tables)]
    headline, evidence = "", ""
    if len(steps) == len(real) > 1 and len({_asked(part) for part in real}) == 1:
        headline, evidence = tell(steps, real[0].evaluation)
        for stage, what in blind:
            evidence += f" With {BLIND.get(what, what)} {_percent(stage.right.mean)} % are right."
        for part in found:
            if (words := _beside(part)) and (stage := _stage(part)) is not None:
                evidence += f" {words} {_percent(stage.right.mean)} % right."
        evidence = evidence.strip()
    shown = [n for n in range(len(COLUMNS)) if any(_columns(stage)[n][0] is not None for stage in stages)]
    return {
        "headline": headline,
        "evidence": evidence,
        "bars": [_bars(stage) for stage in stages],
        "columns": [COLUMNS[n] for n in shown],
        "rows": [(stage.name, [_cell(*_columns(stage)[n]) for n in shown]) for stage in stages],
        "labels": [_label(part) for part in found],
        "measures": [(name, [table[name] for table in tables]) for name in names],
    }


def tell(stages: Sequence[Stage], evaluation: Mapping[str, Any]) -> tuple[str, str]:
    """Say in a sentence how the share of right answers went from stage to stage, and what the last step rests on.

    The reason is arithmetic, not a guess: the last gain is split into what more (or less) thinking explains at the
    stages' own accuracies with and without it, and the rest (Kitagawa 1955). It is named when it explains half.

    Args:
        stages: Two or more, in their order, on the same problems.
        evaluation: eval.json of one of them.

    Returns:
        The headline, and a sentence of evidence ('' where thinking was not recorded).
    """
    task, split, count = _task(evaluation), str(_identity(evaluation).get("split") or ""), _count(evaluation)
    pad = PADS.get(task, "")
    use, uses = (f"using {pad}", f"uses {pad}") if pad else ("thinking first", "thinks before it answers")
    noun = NOUNS.get(task, "problems")
    held_out = f"{split} {noun}" if split == "train" else f"held-out {noun}"
    shares = f"{' → '.join(_percent(stage.right.mean) for stage in stages)} % of {held_out}"
    before, after = stages[-2:]
    gain = after.right.mean - before.right.mean
    if before.right.low <= after.right.high and after.right.low <= before.right.high:
        # Overlap is no proof of no difference: `whet compare` tests it problem by problem.
        return f"{shares}: the intervals of {before.name} and {after.name} overlap ({count} {noun})", ""
    if before.thinks is None or after.thinks is None:
        return shares, ""
    was, now = before.thinks.mean, after.thinks.mean
    evidence = f"{_habit(before, f'{before.name} {uses}')}; {_habit(after, f'{after.name} {uses}')}."
    contrasts = [
        stage.right_with - stage.right_without
        for stage in (before, after)
        if stage.right_with is not None and stage.right_without is not None
    ]
    explained = (now - was) * sum(contrasts) / len(contrasts) if contrasts else 0.0
    if abs(explained) >= abs(gain) / 2 and explained * gain > 0:
        often = f"in {_percent(now)} % of its answers instead of {_percent(was)} %"
        if now >= ALMOST_EVERY_TIME and now > was:
            often = f"{'' if now >= EVERY_TIME else 'almost '}every time"
        return f"{shares}, because it now {uses} {often}", evidence
    how = "right more often" if gain > 0 else "wrong more often"
    return f"{shares}; its answers became {how}, which {use} more or less often does not explain", evidence


def _habit(stage: Stage, subject: str) -> str:
    """Say how often a stage thinks, and how often it is right with thinking and without."""
    assert stage.thinks is not None
    told = [
        f"in {_percent(share)} % of {which}"
        for share, which in ((stage.right_with, "those"), (stage.right_without, "the others"))
        if share is not None
    ]
    return f"{subject} in {_percent(stage.thinks.mean)} % of its answers and is right {' and '.join(told)}"


def _stage(part: Part) -> Stage | None:
    metrics = part.evaluation.get("metrics")
    known = {name: _interval(value) for name, value in (metrics if isinstance(metrics, dict) else {}).items()}
    right = known.get("pass@1")
    if right is None:
        return None
    protocol = _identity(part.evaluation).get("protocol")
    schema = protocol.get("schema") if isinstance(protocol, dict) else None
    is_plain = isinstance(schema, dict) and schema.get("think_open") == ""  # it was not asked to think
    thinks, with_, without = (None, None, None) if is_plain else _thinking(part)
    return Stage(
        name=_label(part),
        right=right,
        greedy=known.get("greedy"),
        thinks=thinks,
        tokens=known.get("completion_tokens"),
        format=None if is_plain else known.get("format"),
        right_with=with_,
        right_without=without,
    )


def _thinking(part: Part) -> tuple[Interval | None, float | None, float | None]:
    """Return the share of sampled completions that think, and the shares of right ones with and without thinking."""
    found = part.scan
    if found is None or "correct" not in found.scores:
        return None, None, None
    right = found.scores["correct"]
    is_formed = (
        found.scores.get("format", np.ones(len(found))) >= 1
    )  # babble between stray tags is no thinking
    keep = ~found.is_greedy & np.isfinite(found.thinking) & np.isfinite(right)
    if not keep.any():
        return None, None, None
    thinks, right = (found.thinking > 0)[keep] & is_formed[keep], right[keep]
    groups = np.unique(found.groups[keep], return_inverse=True)[1]
    share = share_interval((np.bincount(groups, thinks) / np.bincount(groups)).tolist())
    with_, without = (float(right[rows].mean()) if rows.any() else None for rows in (thinks, ~thinks))
    return share, with_, without


def _columns(stage: Stage) -> list[tuple[Interval | None, str]]:
    shares = (stage.right, stage.greedy, stage.thinks, stage.format)
    return [*((share, "share") for share in shares), (stage.tokens, "tokens")]


def _cell(value: Interval | None, kind: str) -> tuple[str, str]:
    """Return mean and range as text."""
    if value is None:
        return "–", ""
    scale, end = (100, " %") if kind == "share" else (1, "")
    mean, low, high = (f"{scale * number:.1f}" for number in (value.mean, value.low, value.high))
    return f"{mean}{end}", f"{low} to {high}"


def _bars(stage: Stage) -> dict[str, Any]:
    """Return a row of the chart: right answers, and where it was recorded the share with thinking."""
    shown = [("right", stage.right), *([("thinks first", stage.thinks)] if stage.thinks is not None else [])]
    return {"name": stage.name.replace("_", " "), "bars": [bar(label, value) for label, value in shown]}


def bar(label: str, value: Interval) -> dict[str, Any]:
    """Return a bar of the chart, in percent: label, mean, low, high and its text."""
    text, note = _cell(value, "share")
    mean, low, high = (round(100 * number, 3) for number in (value.mean, value.low, value.high))
    return {"label": label, "mean": mean, "low": low, "high": high, "text": text, "note": note}


def _percent(share: float) -> str:
    """Write a share in percent without decimals, unless that would say all or none where it is not."""
    text = f"{100 * share:.0f}"
    if text in ("0", "100") and share not in (0, 1):
        text = f"{100 * share:.1f}"
        text = {"0.0": "< 0.1", "100.0": "> 99.9"}.get(text, text)
    return text


def _interval(value: Any) -> Interval | None:
    numbers = (
        [as_number(value.get(end)) for end in ("mean", "low", "high")] if isinstance(value, dict) else [None]
    )
    known = [number for number in numbers if number is not None]
    return Interval(*known) if len(known) == len(numbers) else None


def _label(part: Part) -> str:
    return str(part.evaluation.get("label") or part.name)


def _identity(evaluation: Mapping[str, Any]) -> Mapping[str, Any]:
    found = evaluation.get("identity")
    return found if isinstance(found, dict) else {}


def _shown(part: Part) -> str:
    """Return what stood in place of the problems' images; '' for their own."""
    return str(_identity(part.evaluation).get("images") or "")


def _beside(part: Part) -> str:
    """Return the words for an evaluation that is no stage of learning; '' for a stage."""
    return str(_identity(part.evaluation).get(BESIDE) or "")


def _task(evaluation: Mapping[str, Any]) -> str:
    task = _identity(evaluation).get("task")
    return str(task.get("name") if isinstance(task, dict) else task or "")


def _count(evaluation: Mapping[str, Any]) -> str:
    count = as_number(evaluation.get("num_problems"))
    return "its" if count is None else f"{int(count):,}"


def _asked(part: Part) -> str:
    """Return what was asked, to tell whether two evaluations are of the same problems."""
    identity = _identity(part.evaluation)
    return repr(
        [identity.get(name) for name in ("task", "split", "sampling")] + [part.evaluation.get("num_problems")]
    )
