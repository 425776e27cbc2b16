"""What `whet edit` found, as text and as a page with every edit before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import Markup

from whet.editing.metrics import TOO_FEW
from whet.report.figures import lines
from whet.report.page import render

Json = Mapping[str, Any]
SHOWN = 20
"""Edits that the terminal shows; all are on the page and in edits.json."""
LABELS = {
    "efficacy": "efficacy: P(new) > P(true)",
    "paraphrase": "paraphrases: P(new) > P(true)",
    "neighbourhood": "neighbours: P(true) > P(new)",
    "efficacy_accuracy": "efficacy: greedy decoding writes the target (rank 1)",
    "paraphrase_accuracy": "paraphrases: greedy decoding writes the target",
    "neighbourhood_accuracy": "neighbours: greedy decoding writes what is true",
    "neighbourhood_kept": "neighbours: likeliest token as before",
    "first_token_p": "source's efficacy: p of the first token",
    "first_token_rank_1": "source's success: first token at rank 1",
    "efficacy_magnitude": "magnitude: P(new) - P(true)",
    "paraphrase_magnitude": "magnitude of paraphrases",
    "neighbourhood_magnitude": "magnitude of neighbours, P(true) - P(new)",
    "pass@1": "the task it knows: greedy pass@1",
    "fluency": "fluency: n-gram entropy in bits",
    "consistency": "consistency: cosine with reference texts",
}
"""Metrics in the order of the tables."""
SHARES = ("efficacy", "paraphrase", "neighbourhood", "first_token_rank_1", "pass@1")


def _cell(name: str, value: float) -> str:
    is_share = name in SHARES or name.endswith(("_accuracy", "_kept"))
    return f"{value:.1%}" if is_share else f"{value:.4f}"


def rows_of(content: Json) -> list[dict[str, str]]:
    """Return the table of metrics as texts."""
    found = []
    for name, label in LABELS.items():
        row = content["metrics"].get(name)
        if row is None:
            continue
        after, interval = row["after"], TOO_FEW
        if after["low"] is not None:
            interval = f"{_cell(name, after['low'])} to {_cell(name, after['high'])}"
        test, p_value = row.get("test", ""), row.get("p_value")
        found.append(
            {
                "label": label,
                "before": _cell(name, row["before"]),
                "after": _cell(name, after["mean"]),
                "interval": interval,
                "p": test if p_value is None else f"{p_value:.2g} ({test})",
                "facts": str(row["facts"]),
            }
        )
    return found


def headline(content: Json) -> str:
    """Say in a sentence what was reached."""
    metrics = content["metrics"]
    if not metrics:
        return f"{len(content['batches'])} batches applied"
    parts = [
        f"{_cell('efficacy_accuracy', metrics['efficacy_accuracy']['after']['mean'])} of the edits at rank 1"
    ]
    if "score" in metrics:
        parts.append(f"score {metrics['score']['after']:.1f} (before {metrics['score']['before']:.1f})")
    if "perplexity" in metrics:
        parts.append(f"perplexity {metrics['perplexity']['drawdown']:+.2%}")
    return "; ".join(parts)


def as_text(content: Json) -> str:
    """Format metrics, and the first edits."""
    lines = [headline(content), ""]
    rows = rows_of(content)
    if rows:
        lines.append(f"{'metric':<54}{'before':>9}{'after':>9}  {'95 % interval':<22}p")
    for row in rows:
        lines.append(
            f"{row['label']:<54}{row['before']:>9}{row['after']:>9}  {row['interval']:<22}{row['p']}".rstrip()
        )
    if content["table"]:
        lines += ["", f"{'edit':<60}{'p before':>10}{'p after':>10}{'rank':>6}  says"]
    for row in content["table"][:SHOWN]:
        before, after = row["before"], row["after"]
        text = f"{row['prompt']} -> {row['target']}"
        lines.append(
            f"{text[:59]:<60}{before['first_token_p']:>10.4f}{after['first_token_p']:>10.4f}"
            f"{after['first_token_rank']:>6}  {after['says'].strip()}"
        )
    if len(content["table"]) > SHOWN:
        lines.append(f"... {len(content['table']) - SHOWN} more: edits.json")
    now = {row["batch"]: row for row in content.get("by_batch", ())}
    for number, batch in enumerate(content["batches"], 1):
        norms: Sequence[float] = list(batch["norms"].values())
        layers = ", ".join(map(str, batch["layers"])) or "all"
        lines.append(
            f"{batch['method']}: {len(batch['facts'])} facts, layers {layers}, |change| / |weight| up to "
            f"{max(norms):.4f}, {batch['seconds']:.1f} s{_left(now.get(number)) if len(content['batches']) > 1 else ''}"
        )
    return "\n".join([*lines, *_advice(content)])


def _left(row: Json | None) -> str:
    """Say what is left of a batch, behind those that followed it."""
    if row is None:
        return "; all written again since"
    after = row["efficacy_accuracy"]["after"]
    return f"; of its {row['facts']} facts {_cell('efficacy_accuracy', after['mean'])} at rank 1 now"


def _advice(content: Json) -> list[str]:
    """Say what writes more facts, where fewer than nine in ten were written by a search: in a line, or none."""
    searched = [row for batch in content["batches"] for row in batch["targets"]]
    missing = sum(not row["after"]["is_greedy"] for row in content["table"])
    if not searched or 10 * missing <= len(content["table"]):
        return []
    reached = fmean(math.exp(-row["nll"]) for row in searched)
    last = next(batch for batch in reversed(content["batches"]) if batch["targets"])
    return [
        f"{missing:,} of {len(content['table']):,} facts are not completed as they should be. The search reached "
        f"p = {reached:.2f} on average; {_more(last['method'], last.get('settings', {}), reached)} "
        "(at the cost of neighbours and perplexity)"
    ]


def _more(method: str, settings: Json, reached: float) -> str:
    """Name the settings that write more facts and were not used yet."""
    target = settings.get("target", {})
    clamp, steps = target.get("clamp", 0.0), target.get("steps", 0)
    elsewhere = "what is left is other layers (--layers), or fewer facts at once (--num-facts)"
    if reached < 0.5:
        if clamp >= ROOM["clamp"] and steps >= ROOM["steps"]:
            return f"it had room (clamp {clamp:g}, {steps} steps): {elsewhere}"
        wider = f"{max(clamp, ROOM['clamp']):g} --edit.target.steps {max(steps, ROOM['steps'])}"
        return f"it gets more room by --edit.target.clamp {wider}"
    ways: list[str] = []
    if settings.get("passes", 1) < ROOM["passes"]:
        ways.append(f"--edit.passes {ROOM['passes']}")
    if method == "memit":
        weight = settings.get("prose_weight")
        ways.append(f"--edit.prose-weight below {weight:g}" if weight else "a smaller --edit.prose-weight")
    if method == "alphaedit":
        ways.append(f"--edit.ridge below {settings.get('ridge', 0.1):g}")
    return f"the weights hold more of it with {', or '.join(ways)}" if ways else elsewhere


ROOM: dict[str, Any] = {"clamp": 4.0, "steps": 50, "passes": 3}
"""Settings beyond which more of the same was not measured to help."""

CURVES = {
    "efficacy_accuracy": "edits at rank 1",
    "paraphrase_accuracy": "paraphrases at rank 1",
    "neighbourhood_kept": "neighbours as before",
}
"""Lines of the curve over the number of edits."""


def curve_of(content: Json) -> Markup | None:
    """Draw what edits, paraphrases and neighbours became with the number of edits; None where that is not known."""
    points = content.get("curve") or []
    if len(points) < 2:
        return None
    named = {label: [one["metrics"].get(name) for one in points] for name, label in CURVES.items()}
    shares = {label: values for label, values in named.items() if any(v is not None for v in values)}
    return lines(
        [one["facts"] for one in points], shares, title="Shares over the number of edits", unit="edits"
    )


def write_page(folder: Path, content: Json) -> None:
    """Write edit.html."""
    page = render(
        "edit.html",
        title=f"Edits of {content['model']}",
        headline=headline(content),
        content=content,
        rows=rows_of(content),
        curve=curve_of(content),
    )
    (folder / "edit.html").write_text(page, encoding="utf-8", errors="backslashreplace")
