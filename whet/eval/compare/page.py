"""The parts of a comparison besides its statistics: transcripts side by side, curves, lengths, hardware."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.eval.compare.paired import percent
from whet.eval.confidence import vote_share
from whet.eval.record import StoredEval
from whet.report.boards import board_sources
from whet.report.figures import bars, heat_map
from whet.report.page import render
from whet.report.pictures import Pictures
from whet.report.plots import COLOURS
from whet.report.stages import bar
from whet.schema import ResponseSchema
from whet.stats import Interval, pass_at_k
from whet.telemetry.hardware import rates

MAX_CHARACTERS = 20_000
"""Longest text of one completion on the page."""
VERDICTS = ("both right", "fixed", "broken", "both wrong")
BEST_NOTE = (
    "The best of many was chosen on these very problems, so its number flatters: report it from other ones."
)
LABELS = {"pass@1": "right, sampled", "greedy": "right, greedy"}
"""The measures of the chart."""
HARDWARE_NOTE = (
    "Utilisation is the share of time in which some kernel was resident on the device: even a light load, or one that "
    "waits for memory, can reach 100 %. Memory activity is the share of time in which memory was read or written. All "
    "are averages over the window in which that model generated; they do not say why models differ. Models that write "
    "fewer tokens have shorter windows with other batches. Compare tokens per second, joules per token and joules per "
    "request."
)
SENSORS = {
    "utilisation": ("utilisation", "%", False),
    "memory_activity": ("memory activity", "%", False),
    "power_w": ("power", "W", True),
    "temperature_c": ("temperature", "°C", False),
    "memory_gib": ("memory used by all programs", "GiB", True),
}
"""Sensor -> name, unit, and whether devices are summed (else averaged)."""


def write_page(
    path: Path, content: Mapping[str, Any], transcripts: Sequence[Mapping[str, Any]], left_out: int
) -> None:
    """Write compare.html: one file, no network.

    Args:
        path: The file.
        content: What compare.json holds.
        transcripts: From `side_by_side`.
        left_out: Problems whose transcripts are not on the page.
    """
    names = [model["name"] for model in content["models"]]
    pictures = Pictures()
    data = {
        "names": names,
        "transcripts": [
            {
                **problem,
                "images": pictures.numbers(problem.get("images", ())),
                "columns": [
                    {**column, "boards": pictures.numbers(column.get("boards", ()))}
                    for column in problem["columns"]
                ],
            }
            for problem in transcripts
        ],
        "pictures": pictures.shown,
        "curves": content.get("pass@k", {}),
        "pairs": content["pairs"],
        "scored": bool(content["tables"]),
        "steps": _over_steps(content),
    }
    page = render(
        "compare.html",
        title=" vs ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]}: {len(names)} models",
        data=data,
        scripts=("uplot.js", "compare.js"),
        styles=("uplot.css", "bars.css", "compare.css"),
        content=content,
        rows=_bars(content),
        changes=[_changes(row) for row in content.get("weights", ())],
        hardware_note=HARDWARE_NOTE,
        number=number,
        best_note=BEST_NOTE,
        left_out=left_out,
    )
    path.write_text(page, encoding="utf-8")


MAPS = {
    "relative": ("Size of the change over that of the matrix", 1),
    "rank_90": ("Directions that have nine tenths of the change", 2),
    "beyond_chance": ("Change in the matrix's own main directions, over that of a random change", 4),
}
"""What is drawn of each matrix: title, and colour."""


def _changes(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of what changed in the weights, layer by layer."""
    layers = [(name, facts["relative_change"]) for name, facts in row["layers"].items() if facts["numbers"]]
    title = f"{row['name']} beside {row['against']}: norm of the change over that of the weights"
    figures = [{"title": title, "svg": bars(layers, title=title)}] if any(v for _, v in layers) else []
    matrices = row.get("directions") or {}
    columns = list(dict.fromkeys(name for found in matrices.values() for name in found))
    for key, (title, colour) in MAPS.items() if columns else ():
        values = [
            [_of_matrix(found[name], key) if name in found else 0.0 for name in columns]
            for found in matrices.values()
        ]
        svg = heat_map(values, columns, rows=list(matrices), title=title, colour=COLOURS[colour])
        most = max(max(line) for line in values)
        figures.append({"title": f"{title} (darkest: {most:.3g})", "svg": svg})
    return figures


def _of_matrix(found: Mapping[str, float], key: str) -> float:
    return found["overlap"] / found["chance"] if key == "beyond_chance" else float(found[key])


def _over_steps(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the chart over a run's checkpoints: steps, and of each line its means and interval ends."""
    if not content.get("steps"):
        return None
    lines = {
        label: {end: [known[name][end] for known in content["estimates"]] for end in ("mean", "low", "high")}
        for name, label in LABELS.items()
    }
    return {"steps": content["steps"], "lines": lines}


def _bars(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the chart: right answers of each model, sampled and greedy."""
    return (
        [
            {
                "name": model["name"],
                "bars": [bar(label, Interval(**known[name])) for name, label in LABELS.items()],
            }
            for model, known in zip(content["models"], content["estimates"], strict=True)
        ]
        if content["tables"]
        else []
    )


def side_by_side(sides: Sequence[StoredEval], uids: Sequence[str], num_samples: int) -> list[dict[str, Any]]:
    """Collect the completions of the same prompts, with thinking and answer separate.

    Args:
        sides: The models.
        uids: Problems, which all models must have.
        num_samples: Samples per problem, besides the greedy one.

    Returns:
        One object per problem: prompt, images (their sources), gold, labels, and for each model its completions, vote
        share, and boards of its greedy completion where the problem is one of chess.
    """
    schemas = [_schema(side) for side in sides]
    found: list[dict[str, Any]] = []
    for uid in uids:
        first = sides[0].greedy[uid]
        columns = []
        for side, schema in zip(sides, schemas, strict=True):
            rows = side.samples[uid]
            columns.append(
                {
                    "rows": [_completion(row, schema) for row in [side.greedy[uid], *rows[:num_samples]]],
                    "votes": vote_share([row["answer"] for row in rows]) if len(rows) > 1 else None,
                    "right": sum(bool(row["correct"]) for row in rows),
                    "count": len(rows),
                    "boards": board_sources(first["prompt"], first["gold"] or "", side.greedy[uid]["text"]),
                }
            )
        meta = first.get("meta") or {}
        labels = {str(name): str(value)[:200] for name, value in meta.items() if value != uid}  # shown anyway
        found.append(
            {
                "uid": uid,
                "prompt": first["prompt"][:MAX_CHARACTERS],
                "images": [source for source in first.get("images", ()) if isinstance(source, str)],
                "gold": " or ".join([first["gold"], *first.get("other_answers", ())])
                if first["gold"]
                else None,
                "labels": labels,
                "columns": columns,
            }
        )
    return found


def summarise_side(side: StoredEval, name: str, uids: Sequence[str]) -> dict[str, str]:
    """Return one line about what a model wrote: verdicts, lengths and confidence, over its sampled completions.

    Args:
        side: The model.
        name: What it is called.
        uids: The problems.

    Returns:
        Texts by the name of their column; 'right' only where some right answer is known.
    """
    rows = [row for uid in uids for row in side.samples[uid]] or [side.greedy[uid] for uid in uids]
    judged = [row["correct"] for row in rows if row["correct"] is not None]
    found = {"model": name, "completions": f"{len(rows):,}"}
    if judged:
        found["right"] = f"{100 * sum(judged) / len(judged):.1f} % of {len(judged):,}"
    for verdict, column in (("perfect", "perfect format"), ("partial", "partial"), ("none", "no format")):
        found[column] = f"{100 * sum(row['format'] == verdict for row in rows) / len(rows):.1f} %"
    for column, key in (("tokens", "completion_tokens"), ("thinking", "thinking_tokens")):
        found[column] = f"{sum(row[key] for row in rows) / len(rows):.1f}"
    for column, key in (("token probability", "mean_logprob"), ("answer probability", "answer_logprob")):
        values = [row[key] for row in rows if row.get(key) is not None]
        found[column] = f"{math.exp(sum(values) / len(values)):.3f}" if values else "not recorded"
    counts = [row["hedges"] for row in rows if row.get("hedges") is not None]
    found["hedges"] = f"{sum(counts) / len(counts):.1f}" if counts else "not recorded"
    return found


def not_sensed(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Say which readings of the devices whose work is counted are missing, and why; '' if none is."""
    absent: dict[str, str] = {}
    for summary in summaries:
        window = _window(summary)
        has_gpu = any(device.get("kind") == "gpu" for device in window.get("devices", []))
        for name, reason in (window.get("absent") or {}).items():
            is_none = str(reason).startswith(("no NVIDIA GPU", "no AMD GPU"))
            if not (is_none or (has_gpu and (name.startswith("cpu/") or "/" not in name))):
                absent.setdefault(str(name), str(reason)[:200])
    return "; ".join(f"{name} ({reason})" for name, reason in absent.items())


def count_verdicts(a: StoredEval, b: StoredEval, uids: Sequence[str]) -> dict[str, int]:
    """Count the changes of greedy verdicts: both right, fixed, broken, both wrong."""
    names = {(True, True): 0, (False, True): 1, (True, False): 2, (False, False): 3}
    counts = Counter(
        VERDICTS[names[bool(a.greedy[uid]["correct"]), bool(b.greedy[uid]["correct"])]] for uid in uids
    )
    return {name: counts[name] for name in VERDICTS}


def pass_curve(side: StoredEval, uids: Sequence[str], num_samples: int) -> list[float]:
    """Return pass@k for k = 1 ... num_samples, averaged over problems."""
    counts = [sum(bool(row["correct"]) for row in side.samples[uid][:num_samples]) for uid in uids]
    times = Counter(counts)
    return [
        sum(pass_at_k(num_samples, count, k) * number for count, number in times.items()) / len(uids)
        for k in range(1, num_samples + 1)
    ]


def lengths(side: StoredEval, uids: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Return tokens of right and of wrong samples, thinking and total, averaged as in eval.json; and their number."""
    found: dict[str, dict[str, float | None]] = {}
    for name, is_right in (("right", True), ("wrong", False)):
        of_kind = [[row for row in side.samples[uid] if bool(row["correct"]) == is_right] for uid in uids]
        problems = [rows for rows in of_kind if rows]
        found[name] = {"count": sum(map(len, problems))}
        for key in ("thinking_tokens", "completion_tokens"):
            # The mean over problems of the mean over a problem's samples, as in eval.json.
            means = [sum(row[key] for row in rows) / len(rows) for rows in problems]
            found[name][key] = sum(means) / len(means) if means else None
    return found


def hardware_table(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put the hardware readings of evaluations side by side, each over its generation window.

    Args:
        summaries: eval.json of each model.

    Returns:
        One object per quantity: 'name', 'unit', 'values' (None: not recorded), and 'changes' from the first model to
        each other one (`change`; None if there is none). Empty if nothing was recorded.
    """
    columns = [_readings(summary) for summary in summaries]
    units = {name: unit for column in columns for name, (_, unit) in column.items()}
    table: list[dict[str, Any]] = []
    for name, unit in units.items():
        values = [column[name][0] for column in columns]
        base = values[0]
        pairs = [None if base is None or value is None else change(base, value, unit) for value in values[1:]]
        table.append({"name": name, "unit": unit, "values": values, "changes": pairs})
    return table if any(value is not None for row in table for value in row["values"]) else []


def devices(summary: Mapping[str, Any]) -> str:
    """Name the devices that an evaluation was measured on."""
    names = [str(device.get("name")) for device in _window(summary).get("devices", [])]
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in Counter(names).items())


def change(base: float, value: float, unit: str) -> str:
    """Format a difference with both possible percentages, each with its base; degrees have no percentage."""
    difference = value - base
    text = f"{number(difference, '+')} {'points' if unit == '%' else unit}"
    if unit == "°C" or not difference or base <= 0 or value <= 0:
        return text
    back = f"{number(-difference, '+')} {'points' if unit == '%' else unit}"
    return (
        f"{text}, {percent(base, value)} (of {number(base)}); in reverse {back}, {percent(value, base)} "
        f"(of {number(value)})"
    )


def number(value: float, sign: str = "") -> str:
    """Format a number with four digits, or as an integer with thousands separators if larger; sign '+' is always
    written."""
    return f"{value:{sign}.4g}" if abs(value) < 10_000 else f"{value:{sign},.0f}"


def _window(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the hardware window of an evaluation; empty if none was recorded, or it is malformed."""
    window = summary.get("hardware")
    if isinstance(window, dict) and isinstance(window.get("devices"), list) and "seconds" in window:
        return window
    return {}


def _readings(summary: Mapping[str, Any]) -> dict[str, tuple[float | None, str]]:
    """Return quantity -> (value, unit) of one evaluation, all from the same window."""
    window = _window(summary)
    tokens = (summary.get("tokens") or {}).get("completion") or 0
    requests = summary.get("requests") or summary["num_problems"] * (summary["num_samples"] + 1)
    seconds = window.get("seconds") or summary.get("generation_seconds")
    shown = window if window else {"seconds": seconds or 0, "devices": []}
    found = rates(shown, tokens, requests)
    readings: dict[str, tuple[float | None, str]] = {
        "window": (seconds, "s"),
        "tokens written": (tokens or None, "tokens"),
        "speed": (found["tokens_per_second"] if tokens else None, "tokens/s"),
        "energy per token": (found["joules_per_token"], "J"),
        "energy per request": (found["joules_per_request"], "J"),
    }
    all_devices = window.get("devices", [])
    counted = [device for device in all_devices if device.get("kind") == "gpu"] or all_devices
    for sensor, (name, unit, adds_up) in SENSORS.items():
        values = [device[sensor]["mean"] for device in counted if device.get(sensor)]
        mean = None
        if values and len(values) == len(counted):
            mean = sum(values) / (1 if adds_up else len(values)) * (100 if unit == "%" else 1)
        readings[name] = (mean, unit)
    return readings


def _schema(side: StoredEval) -> ResponseSchema | None:
    """Return the tags that a model was prompted for; None if they are not recorded."""
    try:
        return ResponseSchema(**side.summary["identity"]["protocol"]["schema"])
    except (KeyError, TypeError, ValueError):
        return None


def _completion(row: Mapping[str, Any], schema: ResponseSchema | None) -> dict[str, Any]:
    """Shorten a stored completion for the page; text outside perfect tags is kept."""
    shown: dict[str, Any] = {
        "sample": row["sample"],
        "correct": row["correct"],
        "format": row["format"],
        "answer": row["answer"] if row["answer"] is None else row["answer"][:MAX_CHARACTERS],
        "thinking_tokens": row["thinking_tokens"],
        "tokens": row["completion_tokens"],
        "cut": row["finish_reason"] == "length",
        "mean_logprob": row.get("mean_logprob"),
        "logprob": row.get("answer_logprob"),
        "hedges": row.get("hedges"),
        "revisions": row.get("revisions"),
    }
    text = row["text"]
    parsed = schema.parse(text) if schema else None
    if parsed is not None and parsed.thinking is not None and parsed.verdict == "perfect":
        shown["thinking"] = parsed.thinking[:MAX_CHARACTERS]
    else:
        shown["text"] = text[:MAX_CHARACTERS]
    if len(text) > MAX_CHARACTERS:
        shown["left_out"] = len(text) - MAX_CHARACTERS
    return shown
