"""Prepares a run's completions for a page: one pass over the file, an even selection, and compressed chunks.

A file is never held in memory: the pass keeps a few numbers per row, and only selected rows are read again.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from whet.report.boards import board_sources
from whet.report.pictures import MAX_IMAGES, Pictures
from whet.telemetry.log import as_number, parse_row

FILES = ("samples.jsonl", "eval_samples.jsonl")
MAX_TEXT_BYTES = 128 << 20
"""Largest text of the samples in one page, before compression; beyond it fewer samples are taken."""

CHUNK_CHARACTERS = 300_000
"""Text per chunk: a browser opens one in a few milliseconds."""

SNIPPET_CHARACTERS = 110
NUM_RANGES, NUM_BINS, MAX_DISTINCT = 5, 20, 12
MARKS_WIDTH = 20
"""Characters that fit below the narrowest histogram, which is 110 pixels wide."""
USUAL = {"num_read_tokens": 0, "num_turns": 1}
"""Uninformative values."""

TAGS = ("think_open", "think_close", "answer_open", "answer_close")
FORMAT_SCORES = {"perfect": 1.0, "partial": 0.5, "none": 0.0}
COLUMNS = (
    *("step", "uid", "index", "reward", "advantage", "num_completion_tokens", "finish_reason", "correct"),
    *("snippet", "asked"),
)
"""Fields that the list of samples shows and filters by, besides the single rewards."""

SHOWN = {
    *(
        "step",
        "uid",
        "index",
        "sample",
        "prompt",
        "answer",
        "gold",
        "other_answers",
        "completion",
        "text",
        "meta",
    ),
    *(
        "num_completion_tokens",
        "completion_tokens",
        "finish_reason",
        "rewards",
        "reward",
        "advantage",
        "correct",
    ),
    *("completion_ids", "sampler_logprobs", "logprobs"),
}
"""Fields with their own place on the page; other single values of a row are shown unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """Result of one pass over a file of completions: a few numbers of each of its N readable rows.

    Attributes:
        path: The file.
        offsets: Byte at which each row begins.
        sizes: Approximate characters of each row on a page.
        steps: Optimizer steps done; -1 if the row has none (evaluations).
        groups: Number of the group (same step and problem, in a row), from 0.
        scores: Score per reward, NaN where it has none; the total is under ''.
        thinking: Thinking tokens of each row; NaN where they were not counted.
        is_greedy: Whether it is an evaluation's greedy completion.
        num_bad: Lines that could not be read.
        num_torn: 1 if the last line is incomplete: the run was killed while writing it, or is writing it now.
    """

    path: Path
    offsets: np.ndarray
    sizes: np.ndarray
    steps: np.ndarray
    groups: np.ndarray
    scores: dict[str, np.ndarray]
    thinking: np.ndarray
    is_greedy: np.ndarray
    num_bad: int
    num_torn: int

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def reward_names(self) -> list[str]:
        """Names of the single rewards."""
        return [name for name in self.scores if name]


def find_samples(folder: Path) -> Path | None:
    """Return the file of completions in a run or evaluation folder that is not empty, or None."""
    paths = (folder / name for name in FILES)
    return next((path for path in paths if path.is_file() and path.stat().st_size), None)


def clean(row: Mapping[str, Any]) -> dict[str, Any]:
    """Normalise a row of samples.jsonl or eval_samples.jsonl; a value of another type becomes None.

    Args:
        row: An untrusted row.

    Returns:
        The fields of a row of samples.jsonl, and `correct` (bool or None), `sampler_logprobs` (None unless there is
        one for each of `completion_ids`), `images` (their sources), `facts` (further single values by name).
    """
    scores = {"correct": _truth(row.get("correct")), "format": FORMAT_SCORES.get(str(row.get("format")))}
    rewards = {name: score for name, score in scores.items() if score is not None}
    rewards |= {str(name): as_number(value) for name, value in _mapping(row.get("rewards")).items()}
    index, finish = row.get("index", row.get("sample")), row.get("finish_reason")
    ids, logprobs = row.get("completion_ids"), row.get("sampler_logprobs", row.get("logprobs"))
    if not (isinstance(ids, list) and isinstance(logprobs, list) and 0 < len(ids) == len(logprobs)):
        ids = logprobs = None
    others = _list(row.get("other_answers"))
    extra = {"extracted": row.get("answer")} if "gold" in row else {}
    step, right = as_number(row.get("step")), rewards.get("correct")
    tokens = as_number(row.get("num_completion_tokens", row.get("completion_tokens")))
    prompt, gold = _text(row.get("prompt")), _text(row.get("gold", row.get("answer")))
    completion = _text(row.get("completion", row.get("text")))
    images = [source for source in _list(row.get("images")) if isinstance(source, str)]
    return {
        "step": int(step) if step is not None and 0 <= step < 2**53 else None,
        "uid": _text(row.get("uid")),
        "index": index if isinstance(index, (int, str)) else None,
        "prompt": prompt,
        "images": [*images, *board_sources(prompt, gold, completion)][:MAX_IMAGES],
        "answer": gold + "".join(f"\nor {_text(other)}" for other in others),
        "completion": completion,
        "num_completion_tokens": None if tokens is None else int(tokens),
        "finish_reason": None if finish is None else _text(finish),
        "rewards": rewards,
        "reward": as_number(row.get("reward")),
        "advantage": as_number(row.get("advantage")),
        "correct": None if right is None else right >= 1,
        "completion_ids": ids and [value if isinstance(value, int) else -1 for value in ids],
        "sampler_logprobs": logprobs and [as_number(value) for value in logprobs],
        "facts": {
            str(name): value
            for name, value in {**row, **extra}.items()
            if name not in SHOWN
            and (isinstance(value, (str, bool)) or as_number(value) is not None)
            and value != ""
            and USUAL.get(name) != value
        },
    }


def snippet(completion: str) -> str:
    """Return the end of a completion, where the answer is, in one line."""
    text = " ".join(completion[-4 * SNIPPET_CHARACTERS :].split())
    return text if len(text) <= SNIPPET_CHARACTERS else "… " + text[-SNIPPET_CHARACTERS:]


def asked(prompt: str) -> str:
    """Return the beginning of a prompt in one line."""
    text = " ".join(prompt[: 4 * SNIPPET_CHARACTERS].split())
    return text if len(text) <= SNIPPET_CHARACTERS else text[:SNIPPET_CHARACTERS] + " …"


def find_tags(folder: Path) -> dict[str, str] | None:
    """Return the four tags of a run's completions, from its evaluation or checkpoints, or None."""
    evaluation = _mapping(_mapping(read_json(folder / "eval.json")).get("identity"))
    newest = sorted(folder.glob("checkpoints/*/protocol.json"), reverse=True)
    for protocol in (evaluation.get("protocol"), *map(read_json, newest[:1])):
        schema = _mapping(_mapping(protocol).get("schema"))
        if all(isinstance(schema.get(tag), str) and schema[tag] for tag in TAGS):
            return {tag: schema[tag] for tag in TAGS}
    return None


def read_json(path: Path) -> Any:
    """Read a JSON file; None if it is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def scan(path: Path) -> Scan:
    """Pass once over a file of completions, up to its current end.

    Args:
        path: samples.jsonl or eval_samples.jsonl.
    """
    offsets, sizes, steps, groups = array("q"), array("q"), array("q"), array("q")
    scores: dict[str, array[float]] = {"": array("d")}
    thinking, is_greedy = array("d"), array("b")
    num_bad = num_torn = 0
    last: Any = None
    end = path.stat().st_size
    with path.open("rb") as file:
        while (offset := file.tell()) < end:
            line = file.readline()
            row = parse_row(line)
            if row is None:
                num_torn, num_bad = num_torn + (line[-1:] != b"\n"), num_bad + (line[-1:] == b"\n")
                continue
            sample = clean(row)
            key = (sample["step"], sample["uid"])
            groups.append((groups[-1] + (key != last)) if groups else 0)
            last = key
            offsets.append(offset)
            logged = len(sample["completion_ids"] or ())
            sizes.append(300 + len(sample["prompt"]) + len(sample["completion"]) + 16 * logged)
            steps.append(-1 if sample["step"] is None else sample["step"])
            num_thinking = as_number(row.get("thinking_tokens"))
            thinking.append(math.nan if num_thinking is None else num_thinking)
            is_greedy.append(sample["index"] == "greedy")
            for name, score in {"": sample["reward"], **sample["rewards"]}.items():
                if name not in scores:
                    scores[name] = array("d", [math.nan]) * (len(offsets) - 1)
                scores[name].append(math.nan if score is None else score)
            for column in scores.values():
                column.extend([math.nan] * (len(offsets) - len(column)))
    return Scan(
        path=path,
        offsets=np.array(offsets),
        sizes=np.array(sizes),
        steps=np.array(steps),
        groups=np.array(groups),
        scores={name: np.array(column) for name, column in scores.items()},
        thinking=np.array(thinking),
        is_greedy=np.array(is_greedy, bool),
        num_bad=num_bad,
        num_torn=num_torn,
    )


def choose(found: Scan, max_samples: int) -> np.ndarray:
    """Select whole groups, evenly over the file and hence over the steps.

    Args:
        found: The scanned file.
        max_samples: Most samples; fewer if their text would exceed `MAX_TEXT_BYTES`.

    Returns:
        Ascending row numbers.
    """
    if not len(found):
        return np.zeros(0, np.int64)
    share = min(1.0, max_samples / len(found), MAX_TEXT_BYTES / int(found.sizes.sum()))
    num_groups = int(found.groups[-1]) + 1
    num_taken = max(1, int(num_groups * share))
    edges = np.arange(num_taken + 1) * num_groups // num_taken
    # One random group of each stretch: every tenth could be the same problem at all steps.
    taken = np.random.default_rng(0).integers(edges[:-1], edges[1:])
    return np.flatnonzero(np.isin(found.groups, taken))


def embed(found: Scan, rows: np.ndarray, spell: Callable[[int], str] | None) -> dict[str, Any]:
    """Pack selected rows for the sample browser of a page.

    Args:
        found: The scanned file.
        rows: Ascending row numbers; they are the ids of the samples in the page.
        spell: Text of a token; without it log-probabilities are omitted.

    Returns:
        'columns' (what filters and the list need), 'chunks' (the rows), 'vocabulary' (texts of the tokens) and
        'pictures' (of which rows have the numbers), each gzip in base64, and 'starts' (index of each chunk's first
        selected row), 'rewards', 'has_logprobs'.
    """
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    scores: dict[str, list[Any]] = {name: [] for name in found.reward_names}
    chunks: list[str] = []
    starts = [0]
    gathered: list[str] = []
    held = 0
    vocabulary: dict[int, str] = {}
    pictures = Pictures(found.path.parent)
    for place, sample in enumerate(read_samples(found, rows)):
        if spell is None:
            sample["completion_ids"] = sample["sampler_logprobs"] = None
        else:
            new = set(sample["completion_ids"] or ()) - vocabulary.keys()
            vocabulary |= {index: spell(index) for index in new}
        sample["images"] = pictures.numbers(sample["images"])
        made = {"snippet": snippet(sample["completion"]), "asked": asked(sample["prompt"])}
        for name in COLUMNS:
            columns[name].append(made[name] if name in made else sample[name])
        for name, column in scores.items():
            column.append(sample["rewards"].get(name))
        gathered.append(_dump(sample))
        held += len(gathered[-1])
        if held > CHUNK_CHARACTERS or place == len(rows) - 1:
            chunks.append(_pack(f"[{','.join(gathered)}]"))
            starts.append(place + 1)
            gathered, held = [], 0
    return {
        "columns": _pack(_dump({"id": rows.tolist(), **columns, "scores": scores})),
        "chunks": chunks,
        "starts": starts[:-1],
        "vocabulary": _pack(_dump(vocabulary)),
        "pictures": _pack(_dump(pictures.shown)),
        "rewards": found.reward_names,
        "has_logprobs": bool(vocabulary),
    }


def histograms(found: Scan) -> list[dict[str, Any]]:
    """Compute histograms of every reward by ranges of steps, over all rows of the file.

    Args:
        found: The scanned file.

    Returns:
        Per reward (the total first, as 'total') {name, bars: [what each counts], few (a bar for each different value,
        else `NUM_BINS` bins), marks (texts below the axis), peak (largest share), ranges: [{label, count, shares}]}, of
        up to `NUM_RANGES` equal ranges of the logged steps.
    """
    parts = np.array_split(np.unique(found.steps), NUM_RANGES) if len(found) else []
    ranges = [(int(part[0]), int(part[-1])) for part in parts if len(part)]
    tables: list[dict[str, Any]] = []
    for name, values in found.scores.items():
        finite = np.isfinite(values)
        distinct = np.unique(values[finite])
        if not len(distinct):
            continue
        few = len(distinct) <= MAX_DISTINCT
        edges = distinct if few else np.linspace(distinct[0], distinct[-1], NUM_BINS + 1)
        texts = [f"{edge:.4g}" for edge in edges.tolist()]
        is_short = sum(len(text) + 1 for text in texts) <= MARKS_WIDTH
        rows: list[dict[str, Any]] = []
        for first, last in ranges:
            inside = values[finite & (found.steps >= first) & (found.steps <= last)]
            counts = np.histogram(inside, np.append(edges, np.inf) if few else edges)[0]
            label = "all" if last < 0 else f"step {first:,}" if first == last else f"steps {first:,}–{last:,}"
            shares = (counts / max(1, len(inside))).tolist()
            rows.append({"label": label, "count": len(inside), "shares": shares})
        tables.append(
            {
                "name": name or "total",
                "few": few,
                "bars": texts if few else [f"{low} to {high}" for low, high in pairwise(texts)],
                "marks": texts if few and is_short else [texts[0], texts[-1]],
                "peak": max(max(row["shares"]) for row in rows),
                "ranges": rows,
            }
        )
    return tables


def read_samples(found: Scan, rows: np.ndarray) -> Iterator[dict[str, Any]]:
    """Read rows of the scanned file again."""
    with found.path.open("rb") as file:
        for offset in found.offsets[rows].tolist():
            file.seek(offset)
            yield clean(parse_row(file.readline()) or {})


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _pack(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _truth(value: Any) -> float | None:
    return float(value) if isinstance(value, bool) else None
