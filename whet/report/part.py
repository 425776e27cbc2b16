"""A run or evaluation folder, read from whatever files are there, and what report.html and report.md both say of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from whet.report.curves import collect
from whet.report.follow import is_summed_up
from whet.report.plots import Series
from whet.report.samples import Scan, find_samples, read_json, scan
from whet.stats import Interval, bootstrap_interval, share_interval
from whet.telemetry.health import HISTORY_ROWS, IDLE, find_warnings
from whet.telemetry.log import RUN_TIME, WARNINGS, as_number, clean_metrics, leads_out, parse_row, read_rows
from whet.telemetry.metrics import METRICS, find_metric, format_metric

KINDS = {
    "rl": "Reinforcement learning",
    "sft": "Supervised fine-tuning",
    "dpo": "Preference optimisation",
    "rft": "Fine-tuning on its own right answers",
    "eval": "Evaluation",
}
MARKS = ("metrics.jsonl", "eval.json", "eval_samples.jsonl", "samples.jsonl")
"""A folder with one of them is a run or an evaluation."""

MAX_HEALTH_ROWS = 50_000
"""Newest rows of a stage that are checked for warnings: some 50 microseconds each."""

MAX_FILE_BYTES = 1 << 20
MAX_FIELDS, MAX_DEPTH, MAX_GROUPS = 5000, 30, 8
CARDS = {
    "rl": ("rl/completion_tokens", "rl/thinking_tokens", "eval/pass@1"),
    "sft": ("sft/loss", "sft/validation_loss", "sft/grad_norm", "sft/tokens_per_second"),
    "dpo": ("dpo/loss", "dpo/validation_accuracy", "dpo/accuracy", "dpo/margin"),
    "rft": ("rft/right", "eval/greedy", "rft/covered", "rft/loss"),
}
"""Headline metrics by kind; of reinforcement learning they follow the rewards."""

EVAL_CARDS = ("pass@1", "greedy", "format", "truncated", "thinking_tokens", "completion_tokens")
SHARES = ("pass@", "consistency", "format", "eval/opportunity", "eval/vote_share")
"""Groups of an evaluation whose numbers are shares, and single shares in other groups."""
FILES = ("config.yaml", "environment.json", "summary.json", "eval.json", "weights.json")

ALIVE_S = 120.0
"""A run without summary.json whose last row is younger counts as running."""


@dataclass(kw_only=True)
class Part:
    """One run or evaluation, as read.

    Attributes:
        name: Its name on the page.
        folder: Its location.
        stages: Stages of its metrics, in order.
        curves: Its metrics.
        findings: Warnings as (step, text), in order.
        first_s: Unix time of the first row; None without rows.
        last_s: Unix time of the last row.
        run_s: Seconds for which it ran, without the pauses between its starts; None if a row does not say.
        scan: Its completions.
        config: config.yaml; {} without.
        environment: environment.json.
        summary: summary.json, which a run writes at its end.
        evaluation: eval.json.
        missing: Descriptions of missing or damaged files.
    """

    name: str
    folder: Path
    stages: list[str] = field(default_factory=list)
    curves: Series = field(default_factory=dict)
    findings: list[tuple[int, str]] = field(default_factory=list)
    first_s: float | None = None
    last_s: float | None = None
    run_s: float | None = None
    scan: Scan | None = None
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The run's main stage, a key of `KINDS`; '' if unknown."""
        if self.evaluation or (self.scan is not None and self.scan.path.name == "eval_samples.jsonl"):
            return "eval"
        return next((kind for kind in KINDS if kind in self.stages), "rl" if self.scan is not None else "")

    @property
    def last_step(self) -> int:
        """Last logged step."""
        return max((int(steps[-1]) for steps, _ in self.curves.values()), default=0)

    @property
    def state(self) -> str:
        """'finished', 'running' or 'stopped'."""
        if self.evaluation or (self.summary and is_summed_up(self.folder, self.last_s or 0.0)):
            return "finished"
        return "running" if self.last_s is not None and time.time() - self.last_s < ALIVE_S else "stopped"


def find_parts(folder: Path) -> list[str]:
    """Return the names of the runs in a folder: ['.'] for itself, or paths of its subfolders, oldest first."""
    if any((folder / mark).is_file() for mark in MARKS):
        return ["."]
    inner = {
        path.parent for mark in MARKS for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{mark}")
    }
    if inner:
        return [str(path.relative_to(folder)) for path in sorted(inner, key=_age)]
    return ["."] if (folder / "config.yaml").is_file() and (folder / "environment.json").is_file() else []


def read_part(folder: Path, name: str) -> Part:
    """Read everything in a run or evaluation folder except the texts of its completions.

    Args:
        folder: The folder; any file may be missing or damaged.
        name: Its name on the page.
    """
    part = Part(name=name, folder=folder)
    part.summary, part.evaluation, part.environment = (
        _read_object(folder / file, part.missing)
        for file in ("summary.json", "eval.json", "environment.json")
    )
    if not part.evaluation or (folder / "config.yaml").exists():  # an evaluation inside a demo has none
        part.config = _read_config(folder / "config.yaml", part.missing)
    path = find_samples(folder)
    part.scan = None if path is None else scan(path)
    if part.scan is not None:
        _say_damage(part, path.name if path else "", part.scan.num_bad, part.scan.num_torn)
    if (folder / "metrics.jsonl").is_file():
        recent: dict[str, deque[dict[str, Any]]] = {}
        part.curves = collect(_rows(part, recent))
        part.stages = list(recent)
        part.findings = _warned(folder) or sorted(
            found for stage, rows in recent.items() for found in _findings(stage, list(rows))
        )
    elif part.kind != "eval":
        part.missing.append("there is no metrics.jsonl, so no curves")
    if path is None and part.kind not in ("sft", "dpo", "rft"):  # these do not log completions
        part.missing.append("no completions were saved")
    return part


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every leaf of nested mappings; deeper levels count as leaves."""
    if isinstance(value, Mapping) and name.count(".") < MAX_DEPTH:
        for key, inner in value.items():
            yield from flatten(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Compare two configs.

    Args:
        own: Nested mapping of the run.
        other: That of the run to compare with.

    Returns:
        (dotted field, own value, other value) where they differ; '–' where a side lacks the field.
    """
    left, right = (dict(islice(flatten(config), MAX_FIELDS)) for config in (own, other))
    return [
        (name, str(left.get(name, "–"))[:200], str(right.get(name, "–"))[:200])
        for name in left | right
        if name not in left or name not in right or left[name] != right[name]
    ]


def facts(part: Part) -> list[tuple[str, str]]:
    """Return a run's kind, start, duration and machine.

    Args:
        part: The run.

    Returns:
        (label, text) of the known facts.
    """
    config, machine = part.config, part.environment
    policy, task = config.get("policy"), config.get("task")
    model = policy.get("init") if isinstance(policy, dict) else None
    protocol = part.evaluation.get("identity")
    name = task.get("name") if isinstance(task, dict) else task
    if isinstance(task, dict) and task.get("path") and name in ("jsonl", "hub"):
        name = task["path"]
    if config.get("pairs"):  # of DPO: no task is read then
        name = config["pairs"]
    if name is None and isinstance(protocol, dict):
        asked = protocol.get("task")
        name = asked.get("name") if isinstance(asked, dict) else asked
    # The first row is written at the end of the first step; a resumed run's environment is of its resumption.
    known_s = [at for at in (_unix(machine.get("start_utc")), part.first_s) if at]
    began_s = min(known_s) if part.first_s else None
    start = (
        datetime.fromtimestamp(began_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
        if began_s
        else machine.get("start_utc")
    )
    seconds = as_number(part.evaluation.get("seconds"))
    seconds = part.run_s if seconds is None else seconds
    if seconds is None and began_s is not None and part.last_s is not None:
        seconds = part.last_s - began_s
    device = machine.get("cuda_device") or machine.get("cpu")
    if machine.get("cuda_device") and machine.get("gpu_runtime"):
        device = f"{device} ({machine['gpu_runtime']})"
    counts = [part.evaluation.get(name) for name in ("num_problems", "num_samples")]
    found = {
        "what": None if part.name == "." else KINDS.get(part.kind, "run"),
        "task": name,
        "begins from": model or None,
        "problems × samples": " × ".join(map(str, counts)) if None not in counts else None,
        "began": start,
        "took": None if seconds is None else _duration(seconds),
        "machine": device and f"{device}, {machine.get('num_cpus')} cores, torch {machine.get('torch')}",
        "whet": machine.get("whet") and f"{machine['whet']}, commit {str(machine.get('git_commit'))[:10]}",
        "seed": config.get("seed"),
        "weights that changed": _changes(part.folder / "weights.json"),
    }
    return [(label, str(value)) for label, value in found.items() if value is not None and value != ""]


def _unix(text: Any) -> float | None:
    """Return the Unix time of an ISO date; None for anything else."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def _changes(path: Path) -> str | None:
    """Say how many weights a run changed, as `whet.model.changes` counted them."""
    found = _read_object(path, []) if path.is_file() else {}
    whole, rounded = (as_number(found.get(name)) for name in ("changed", "beyond_bfloat16"))
    if whole is None or rounded is None:
        return None
    text = f"{whole:.1%}, {rounded:.1%} beyond bfloat16's rounding"
    layers = found.get("layers")
    shares = {
        name: share
        for name, facts in (layers.items() if isinstance(layers, dict) else ())
        if isinstance(facts, dict) and (share := as_number(facts.get("beyond_bfloat16"))) is not None
    }
    if not shares:
        return text
    least, most = (choose(shares, key=lambda name: shares[name]) for choose in (min, max))
    return f"{text} (from {shares[least]:.1%}, {least}, to {shares[most]:.1%}, {most})"


def view(part: Part) -> dict[str, Any]:
    """Return what a report of any format says of a part.

    Args:
        part: The run or evaluation.

    Returns:
        'name', 'kind'; 'verdict' (one line) and its 'tone' (good, warn, bad); 'facts' (label, text); 'missing'; 'cards'
        {label, value, note, began}; 'estimates' (group, name, mean, low, high); 'findings'; 'files' (name, text).
    """
    cards = _cards(part)
    text, tone = _verdict(part, cards)
    return {
        "name": part.name,
        "kind": KINDS.get(part.kind, "Run"),
        "verdict": text,
        "tone": tone,
        "facts": facts(part),
        "missing": part.missing,
        "cards": cards,
        "estimates": estimates(part.evaluation) if part.kind == "eval" else [],
        "findings": [f"step {step:,}: {text}" for step, text in part.findings],
        "files": [(name, text) for name in FILES if (text := _read_text(part.folder / name))],
    }


def _verdict(part: Part, cards: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """Say in a line how it stands: state, the first numbers, warnings; and the tone of it."""
    planned = part.config.get("num_steps")
    of = f" of {planned:,}" if isinstance(planned, int) and planned != part.last_step else ""
    state = {
        "finished": "Finished." if part.kind == "eval" else f"Finished after {part.last_step:,}{of} steps.",
        "running": f"Still running: step {part.last_step:,}{of}.",
        "stopped": f"Stopped at step {part.last_step:,}{of} without a summary: killed, or interrupted.",
    }[part.state]
    told = [f"{card['label'].capitalize()} {card['value']}{card['began']}." for card in cards[:2]]
    idle = [text for _, text in part.findings if text.startswith(IDLE)]
    told = [f"{text[0].upper()}{text[1:]}." for text in idle] + told
    count = len(part.findings)
    if part.kind in ("rl", "sft") or count:
        told.append(f"{count} warning{'s' * (count != 1)}." if count else "No warning.")
    remark = part.evaluation.get("remark")
    told += [remark[0].upper() + remark[1:]] if isinstance(remark, str) and remark else []
    tone = "bad" if part.state == "stopped" or idle else "warn" if count or remark else "good"
    return " ".join([*told[: len(idle)], state, *told[len(idle) :]]), tone


def _cards(part: Part) -> list[dict[str, str]]:
    """Return the headline numbers: {label, value, note, began}; with intervals where they are estimates."""
    cards: list[dict[str, str]] = []
    if part.kind == "eval":
        metrics = part.evaluation.get("metrics")
        found = {name: row for group, name, *row in estimates({"metrics": metrics}) if group == "metrics"}
        wide = [f"{kind}@{part.evaluation.get('num_samples')}" for kind in ("pass", "maj", "best")]
        for name in dict.fromkeys((*EVAL_CARDS[:2], *wide, *EVAL_CARDS[2:])):
            is_whole = name == "thinking_tokens" and found.get(name) == found.get("completion_tokens")
            if name in found and not is_whole:  # without thinking tags every token counts as thinking
                mean, low, high = found[name][:3]
                label = name.replace("_", " ")
                cards.append({"label": label, "value": mean, "note": f"{low} to {high}", "began": ""})
    elif part.scan is not None and len(part.scan) and part.scan.steps.max() > 0:
        names = ["correct", "", *part.scan.reward_names]
        for name in dict.fromkeys(name for name in names if name in part.scan.scores):
            card = _reward_card(part, name)
            cards += [card] if card else []
    for name in CARDS.get(part.kind, ()):
        whole = part.curves.get("rl/completion_tokens")
        is_whole = name == "rl/thinking_tokens" and whole and np.array_equal(part.curves[name][1], whole[1])
        if name in part.curves and not is_whole:
            values = part.curves[name][1]
            values = values[np.isfinite(values)]
            few = max(1, min(10, len(values) // 10))
            if len(values):
                first, last = (_value(name, float(piece.mean())) for piece in (values[:few], values[-few:]))
                unit = find_metric(name).unit
                label = name.partition("/")[2].replace("_", " ")
                note = "" if unit in ("1", "share") or label.endswith(unit) else unit
                began = f", from {first}" if len(values) > 1 else ""
                cards.append({"label": label, "value": last, "note": note, "began": began})
    return cards


def _reward_card(part: Part, name: str) -> dict[str, str] | None:
    """Return the mean of a reward over the last tenth of the steps, with its interval over groups."""
    found = part.scan
    assert found is not None
    steps = np.unique(found.steps)
    few = max(1, len(steps) // 10)
    ends: list[tuple[float, Interval]] = []
    for chosen in (steps[:few], steps[-few:]):
        keep = np.isin(found.steps, chosen) & np.isfinite(found.scores[name])
        groups = np.unique(found.groups[keep], return_inverse=True)[1]
        if not len(groups):
            return None
        scores = found.scores[name][keep]
        values = np.bincount(groups, scores) / np.bincount(groups)
        are_shares = bool(((values >= 0) & (values <= 1)).all())
        interval = share_interval(values) if are_shares else bootstrap_interval(values)
        ends.append(
            (float(scores.mean()), interval)
        )  # over samples, as the log has it: groups may miss scores
    (first, _), (last, around) = ends
    show = (lambda value: f"{value:.1%}") if name == "correct" else (lambda value: f"{value:.4g}")
    count = f"{few} steps" if few > 1 else "step"
    return {
        "label": name or "total reward",
        "value": show(last),
        "note": f"{show(around.low)} to {show(around.high)}"
        if around.low < around.high
        else "the same in all groups",
        "began": f" in the last {count}, from {show(first)} in the first",
    }


def estimates(content: Mapping[str, Any], group: str = "") -> Sequence[tuple[str, str, str, str, str]]:
    """Return (group, name, mean, low, high) of every estimate in nested results."""
    rows: list[tuple[str, str, str, str, str]] = []
    for key, inner in content.items():
        name = str(key) or "–"
        if not isinstance(inner, dict):
            continue
        numbers = [as_number(inner.get(end)) for end in ("mean", "low", "high")]
        if all(number is not None for number in numbers):
            shown = [_value(f"eval/{name}", number, group) for number in numbers if number is not None]
            rows.append((group, name, shown[0], shown[1], shown[2]))
        elif group.count(" · ") < MAX_GROUPS:
            rows += estimates(inner, f"{group} · {name}" if group else name)
    return rows


def _value(name: str, value: float, group: str = "metrics") -> str:
    """Write a value the way its metric asks for."""
    is_share = group == "metrics" and find_metric(name).unit == "share"
    if name in METRICS or is_share or group.startswith(SHARES) or name in SHARES:
        return format_metric(name, value)
    return f"{value:,.4g}"


def _read_text(path: Path) -> str:
    if not path.is_file() or leads_out(path):
        return ""
    with path.open("rb") as file:
        return file.read(MAX_FILE_BYTES).decode("utf-8", "replace")


def _age(folder: Path) -> float:
    """Return when a run started or an evaluation was written."""
    path = next(path for mark in MARKS if (path := folder / mark).is_file())
    with path.open("rb") as file:
        row = parse_row(file.readline()) or {}
    return as_number(row.get("time_s")) or path.stat().st_mtime


def _rows(part: Part, recent: dict[str, deque[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Read metrics.jsonl row by row; keep the newest rows of each stage, the times and the damage."""
    num_bad = num_torn = 0
    with (part.folder / "metrics.jsonl").open("rb") as file:
        for line in file:
            row = clean_metrics(parse_row(line) or {})
            if row is None:
                num_torn, num_bad = num_torn + (line[-1:] != b"\n"), num_bad + (line[-1:] == b"\n")
                continue
            if not recent or part.run_s is not None:  # else begun by an earlier version: its rows do not say
                part.run_s = row[RUN_TIME]
            seconds = row["time_s"]
            if seconds is not None:
                part.first_s = seconds if part.first_s is None else min(part.first_s, seconds)
                part.last_s = seconds if part.last_s is None else max(part.last_s, seconds)
            recent.setdefault(row["stage"], deque(maxlen=MAX_HEALTH_ROWS + HISTORY_ROWS)).append(row)
            yield row
    _say_damage(part, "metrics.jsonl", num_bad, num_torn)


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return (
        f"{hours} h {minute} min" if hours else f"{minute} min {second} s" if minute else f"{seconds:.1f} s"
    )


def _say_damage(part: Part, name: str, num_bad: int, num_torn: int) -> None:
    if num_bad:
        part.missing.append(f"{num_bad:,} damaged line{'s' * (num_bad > 1)} of {name} skipped")
    if num_torn:
        part.missing.append(f"the last line of {name} is cut off and was skipped")


def _warned(folder: Path) -> list[tuple[int, str]]:
    """Return what a run warned of, each once; [] for one of an earlier version, which kept nothing."""
    found = (
        (int(step), text)
        for row in read_rows(folder / WARNINGS)
        if (step := as_number(row.get("step"))) is not None and isinstance(text := row.get("text"), str)
    )
    return sorted(dict.fromkeys(found), key=lambda one: one[0]) if (folder / WARNINGS).is_file() else []


def _findings(stage: str, rows: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return the health warnings of a stage's rows, with their steps."""
    first = max(0, len(rows) - MAX_HEALTH_ROWS)
    return [(rows[index]["step"], text) for index, text in find_warnings(stage, rows, first)]


def _read_object(path: Path, missing: list[str]) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict) and path.exists():
        missing.append(f"{path.name} cannot be read")
    return content if isinstance(content, dict) else {}


def _read_config(path: Path, missing: list[str]) -> dict[str, Any]:
    """Read a config.yaml of any version as plain data."""
    try:
        with path.open("rb") as file:
            content = yaml.safe_load(file.read(MAX_FILE_BYTES))
    except FileNotFoundError:
        missing.append("there is no config.yaml")
        return {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        content = None
    if not isinstance(content, dict):
        missing.append("config.yaml cannot be read")
    return content if isinstance(content, dict) else {}
