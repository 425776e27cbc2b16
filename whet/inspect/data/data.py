"""`whet data`: reports on a task's data before training: lengths, duplicates, overlap of train and test."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np

from whet.cli import Program
from whet.config import dump_yaml, user_path
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.inspect.data.overlap import VIEWS, Overlap, Texts, View, compare, fold_prompts
from whet.model.files import read_json
from whet.model.weights import stored_shape
from whet.report.plots import COLOURS, MUTED, STYLE, matplotlib_for
from whet.storage.folder import dated, next_line, open_run
from whet.tasks.base import FEW_PROBLEMS, TaskConfig, answers_of, check_gold, load_task, told_of
from whet.tasks.mixture import Mixture
from whet.tasks.read import FEW_HELD_OUT
from whet.telemetry.display import escape_controls, one_line
from whet.train.data.demonstrations import sequences_of
from whet.train.rollout.curriculum import percentile
from whet.train.session import task_words
from whet.types import Problem, Task, UserError

SPLITS = ("train", "dev", "test")
HELD_OUT = ("dev", "test")
PERCENTS = (50, 90, 99, 100)
SHOWN_TEXT = 600
SHOWN_IN_TERMINAL = 160
NUM_BINS = 60


@dataclass(frozen=True, kw_only=True)
class DataReportConfig:
    """A report on a task's data: lengths, duplicate and contradicting problems, and overlap of dev and test with
    train."""

    out: str = ""
    """Output folder; empty for runs/data-DATE-TIME."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """The task."""
    tokenizer: str = "bytes"
    """Unit of lengths: bytes, or a tokenizer's folder or hub name, by which rows are shown as they are learnt, too."""
    ngram: int = 13
    """Words per n-gram of prompts with at least twice as many words (13 is GPT-3's, arXiv:2005.14165, appendix C)."""
    short_ngram: int = 8
    """Words per n-gram of shorter prompts; those with fewer words are only compared as a whole."""
    overlap_share: float = 0.5
    """A held-out prompt counts as overlapping if at least this share of its n-grams occurs in training prompts."""
    policy: PolicyConfig | None = None
    """Count and show as this model does, with its schema; its weights are not read."""
    num_shown: int = 5
    """Number of worst pairs and repeated prompts to show."""
    num_rendered: int = 2
    """Training rows to show as fine-tuning reads and trains them, with token ids; needs a tokenizer or a policy."""
    fail_on_overlap: bool = False
    """End with exit status 2 if a dev or test prompt, as written, overlaps with train."""

    def __post_init__(self) -> None:
        if not 1 <= self.short_ngram <= self.ngram:
            raise ValueError(
                f"ngram = {self.ngram}, short_ngram = {self.short_ngram}: expected 1 <= short_ngram <= ngram"
            )
        if not 0 < self.overlap_share <= 1:
            raise ValueError(f"overlap_share = {self.overlap_share}: expected above 0, at most 1")
        for name in ("num_shown", "num_rendered"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 0 or more")


def show(policy: Policy, problems: Sequence[Problem]) -> list[list[dict[str, Any]]]:
    """Render problems as fine-tuning reads and trains them.

    Returns:
        For each sequence, from its first token to its last, the pieces that are all trained, or all only read: text
        with special tokens, ids, and whether they are trained.
    """
    shown = []
    for problem in problems:
        for sequence in sequences_of(policy, problem):
            ids = [*sequence.prompt_ids, *sequence.completion_ids]
            trained = sequence.trained or (True,) * len(sequence.completion_ids)
            pieces: list[dict[str, Any]] = []
            done = 0
            for is_trained, run in groupby((*(False,) * len(sequence.prompt_ids), *trained)):
                own = ids[done : done + len(list(run))]
                text = policy.tokenizer.decode_completion(ids[:done], own)
                pieces.append({"trained": is_trained, "text": text, "ids": own})
                done += len(own)
            shown.append(pieces)
    return shown


@dataclass(frozen=True, slots=True)
class Repeated:
    """Problems of one split with the same folded prompt.

    Attributes:
        problems: At least two.
        answers: Their distinct gold answers, at least one.
    """

    problems: list[Problem]
    answers: list[str]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table for terminal and report: title, head, rows and note."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    remark: str = ""


def main(config: DataReportConfig) -> None:
    """Print the report and write its folder.

    Raises:
        UserError: If data cannot be read; at the end, if something overlaps and `fail_on_overlap` is set.
    """
    folder = Path(config.out or dated("data"))
    task = load_task(config.task)
    splits = {split: task.problems(split) for split in SPLITS}
    policy = _policy(config, task)
    lengths = _lengths(splits, policy)
    texts = {split: fold_prompts(problems) for split, problems in splits.items()}
    repeated = {split: find_repeated(task, splits[split], texts[split]) for split in SPLITS}
    overlaps: dict[tuple[str, View], Overlap] = {
        (split, view): compare(
            texts[split],
            texts["train"],
            view,
            ngram=config.ngram,
            short_ngram=config.short_ngram,
            num_pairs=config.num_shown,
        )
        for split in HELD_OUT
        for view in VIEWS
    }
    open_run(folder, dump_yaml(config), resumable=False)
    content = _content(config, task, splits, lengths, repeated, overlaps)
    content["rendered"] = show(policy, splits["train"][: config.num_rendered]) if policy else []
    (folder / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")
    _draw_lengths({split: prompts for split, (prompts, _) in lengths.items()}, _unit(config), folder)
    sheets = list(_sheets(config, content))
    answer = _answer(content)
    _write_markdown(folder, config, answer, sheets, content["rendered"])
    for text in (*content["recognised"], answer):
        print(text)
    _print(sheets)
    _print_rendered(content["rendered"])
    print(f"report: {folder / 'report.md'}")
    flagged = {split: content["overlap"][split]["text"]["overlapping"] for split in HELD_OUT}
    if config.fail_on_overlap and any(flagged.values()):
        found = " and ".join(
            f"{count:,} of {len(splits[split]):,} {split}" for split, count in flagged.items()
        )
        raise UserError(f"{found} prompts overlap with train; see {folder / 'report.md'}, and remove them")
    model = config.policy.init if config.policy is not None else ""
    words = task_words(config.task, "task")
    try:
        check_gold(task, [problem for problems in splits.values() for problem in problems], why="")
    except UserError:  # conversations and texts: nothing to evaluate or to audit
        if model:
            print(next_line(["whet", "sft", "own", "--model", model, *words]))
        return
    if model:
        print(next_line(["whet", "eval", "own", "--model", model, *words]))
    else:  # an audit's task is its first word
        after = ["--task.path" if word == "--data" else word for word in words[words.index("--task") + 1 :]]
        print(next_line(["whet", "audit", *after]))


def _policy(config: DataReportConfig, task: Task) -> Policy | None:
    """Return what encodes and renders; None for bytes."""
    chosen = config.policy
    if chosen is None:
        if config.tokenizer == "bytes":
            return None
        chosen = PolicyConfig(tokenizer=config.tokenizer)
        # Rows with images are encoded with the images' tokens, which are the model's.
        if _sees(user_path(config.tokenizer)):
            chosen = PolicyConfig(init=config.tokenizer)
    elif config.tokenizer != "bytes":
        chosen = replace(chosen, tokenizer=config.tokenizer)
    policy = load_policy(chosen, seed=0, weights=False)
    policy.expect(*answers_of(task))
    return policy


def _sees(folder: Path) -> bool:
    """Return whether a folder holds a model that sees, or an adapter of one that lies on this machine."""
    if (folder / "adapter_config.json").is_file():
        folder = user_path(
            str(read_json(folder / "adapter_config.json").get("base_model_name_or_path") or "")
        )
    return (folder / "config.json").is_file() and stored_shape(folder).vision is not None


def _unit(config: DataReportConfig) -> str:
    return "bytes" if config.tokenizer == "bytes" and config.policy is None else "tokens"


def _lengths(
    splits: Mapping[str, Sequence[Problem]], policy: Policy | None
) -> dict[str, tuple[list[int], list[int]]]:
    """Return by split the lengths of prompts, and of solutions if there are any."""

    def count(text: str) -> int:
        return len(text.encode() if policy is None else policy.tokenizer.encode(text))

    return {
        split: ([count(p.prompt) for p in problems], [count(p.solution) for p in problems if p.solution])
        for split, problems in splits.items()
    }


def find_repeated(task: Task, problems: Sequence[Problem], texts: Texts) -> list[Repeated]:
    """Find prompts that occur more than once, contradicting ones first, then by number of copies.

    Args:
        task: Says whether two gold answers are the same.
        problems: Problems of a split.
        texts: Their folded prompts.
    """
    groups: dict[bytes, list[Problem]] = {}
    for key, problem in zip(texts.keys["text"], problems, strict=True):
        groups.setdefault(key, []).append(problem)
    found = []
    for group in groups.values():
        if len(group) > 1:
            different: list[Problem] = []
            for problem in group:
                if not any(task.is_correct(other, gold) for other in different for gold in problem.answers):
                    different.append(problem)
            found.append(Repeated(group, [problem.answer for problem in different]))
    return sorted(found, key=lambda repeated: (-len(repeated.answers), -len(repeated.problems)))


def _content(
    config: DataReportConfig,
    task: Task,
    splits: Mapping[str, Sequence[Problem]],
    lengths: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    repeated: Mapping[str, Sequence[Repeated]],
    overlaps: Mapping[tuple[str, View], Overlap],
) -> dict[str, Any]:
    """Collect the content of report.json."""
    parts = task.parts.values() if isinstance(task, Mixture) else [task]

    def overlap_of(split: str, view: View) -> dict[str, Any]:
        overlap = overlaps[split, view]
        score = np.nan_to_num(overlap.score)
        return {
            "equal": int(overlap.is_equal.sum()),
            "too_short": int(np.isnan(overlap.score).sum()),
            "any_ngram": int((score > 0).sum()),
            "overlapping": int((score >= config.overlap_share).sum()),
            "pairs": [
                {
                    "share": float(score[held]),
                    "prompt": splits[split][held].prompt,
                    "answer": splits[split][held].answer,
                    "train_prompt": splits["train"][twin].prompt,
                    "train_answer": splits["train"][twin].answer,
                }
                for held, twin in overlap.pairs
            ],
        }

    return {
        "task": Path(config.task.path).name if task.name == "jsonl" else task.name,
        "recognised": told_of(task, FEW_PROBLEMS),
        "unit": _unit(config),
        "bad_rows": sum(len(getattr(part, "bad_rows", ())) for part in parts),
        "repeated_rows": sum(getattr(part, "num_duplicates", 0) for part in parts),
        "splits": {
            split: {
                "problems": len(problems),
                "solutions": len(lengths[split][1]),
                "several_answers": sum(bool(problem.other_answers) for problem in problems),
                "most_answers": max((len(problem.answers) for problem in problems), default=0),
                "prompt_length": _percentiles(lengths[split][0]),
                "solution_length": _percentiles(lengths[split][1]),
                "extra_copies": sum(len(group.problems) - 1 for group in repeated[split]),
                "contradicting": sum(len(group.answers) > 1 for group in repeated[split]),
                "repeated": [
                    {"copies": len(g.problems), "prompt": g.problems[0].prompt, "answers": g.answers}
                    for g in repeated[split][: config.num_shown]
                ],
            }
            for split, problems in splits.items()
        },
        "overlap": {split: {view: overlap_of(split, view) for view in VIEWS} for split in HELD_OUT},
    }


def _percentiles(lengths: Sequence[int]) -> dict[str, int]:
    return {f"{percent}": percentile(lengths, percent) for percent in PERCENTS} if lengths else {}


def _answer(content: Mapping[str, Any]) -> str:
    """Say in a sentence how many problems there are, and what is wrong with them."""
    splits, overlap = content["splits"], content["overlap"]
    counts = ", ".join(f"{_number(splits[split]['problems'])} {split}" for split in SPLITS)
    found = [
        f"{overlap[split]['text']['overlapping']:,} of {splits[split]['problems']:,} {split} prompts overlap with train"
        for split in HELD_OUT
        if overlap[split]["text"]["overlapping"]
    ]
    tested = splits["test"]["problems"] or 0
    if 0 < tested < FEW_HELD_OUT:
        found.append(
            f"{tested} for testing are too few to show a difference (--task.held-out takes more of your rows)"
        )
    for name, told in (
        ("contradicting", "prompts have contradicting answers"),
        ("extra_copies", "repeat another"),
    ):
        if total := sum(splits[split][name] or 0 for split in SPLITS):
            found.append(f"{total:,} {told}")
    return f"{counts} problems: {'; '.join(found) or 'no held-out prompt is in train, none is repeated'}."


def _sheets(config: DataReportConfig, content: Mapping[str, Any]) -> Iterator[Sheet]:
    """Format the content as tables."""
    splits, overlap = content["splits"], content["overlap"]

    def row(name: str, *keys: str) -> list[str]:
        return [name, *(_number(_dig(splits[split], keys)) for split in SPLITS)]

    rows = [
        row("problems", "problems"),
        row("with a worked solution", "solutions"),
        *(
            [row("with several accepted answers", "several_answers"), row("most of one", "most_answers")]
            if any(split["several_answers"] for split in splits.values())
            else []
        ),
        row("further copies of a prompt", "extra_copies"),
        row("prompts with contradicting answers", "contradicting"),
        *(
            row(f"{name}, {content['unit']}: {_quantile(percent)}", f"{name}_length", str(percent))
            for name in ("prompt", "solution")
            for percent in PERCENTS
        ),
    ]
    yield Sheet(
        f"Problems of {content['task']}",
        ["", *SPLITS],
        [cells for cells in rows if set(cells[1:]) != {_number(None)}],
        f"Rows that the task skipped while reading: {content['bad_rows']:,} malformed or without an answer, "
        f"{content['repeated_rows']:,} repeated.",
    )
    share = f"{100 * config.overlap_share:g} %"
    names = {
        "equal": "whole prompt",
        "overlapping": f"overlapping: whole, or {share} of n-grams",
        "any_ngram": "whole, or at least one n-gram",
        "too_short": "too short for n-grams",
    }
    yield Sheet(
        "Held-out prompts in train",
        ["", *(f"{split}, {_view(view)}" for split in HELD_OUT for view in VIEWS)],
        [
            [name, *(_number(overlap[split][view][key]) for split in HELD_OUT for view in VIEWS)]
            for key, name in names.items()
        ],
        f"n-grams of {config.ngram} words; of {config.short_ngram} in prompts of fewer than {2 * config.ngram} words. "
        "Case, white space and punctuation do not count.",
    )
    for split in HELD_OUT:
        for view in VIEWS:
            pairs = overlap[split][view]["pairs"]
            rows = [
                [f"{100 * p['share']:.0f} %", p["prompt"], p["answer"], p["train_prompt"], p["train_answer"]]
                for p in pairs
            ]
            head = ["share", split, "answer", "nearest in train", "answer"]
            yield Sheet(f"Worst pairs: {split}, {_view(view)}", head, rows)
    for split in SPLITS:
        rows = [
            [_number(g["copies"]), g["prompt"], " | ".join(g["answers"])] for g in splits[split]["repeated"]
        ]
        yield Sheet(f"Repeated prompts: {split}", ["copies", "prompt", "answers"], rows)


def _dig(value: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        value = value.get(key)
    return value


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _quantile(percent: int) -> str:
    return {50: "median", 100: "longest"}.get(percent, f"{percent} % up to")


def _view(view: View) -> str:
    return {"text": "as written", "template": "numbers aside"}[view]


def _short(text: str, width: int) -> str:
    line = one_line(text)
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _print(sheets: Sequence[Sheet]) -> None:
    """Print the tables that have rows; data is never interpreted as markup."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for sheet in sheets:
        if not sheet.rows:
            continue
        is_text = len(sheet.head) > 2 and max(len(cell) for row in sheet.rows for cell in row[1:]) > 20
        table = Table(title=sheet.title, box=SIMPLE_HEAD, title_justify="left", show_lines=is_text)
        for index, name in enumerate(sheet.head):
            table.add_column(name, justify="right" if index and not is_text else "left", overflow="fold")
        for row in sheet.rows:
            table.add_row(*(Text(_short(cell, SHOWN_IN_TERMINAL)) for cell in row))
        console.print(table)
        if sheet.remark:
            console.print(Text(sheet.remark, style="dim"))


RENDERED = "As fine-tuning reads it: the exact text and token ids, what is trained in ⟦⟧"


def _print_rendered(rendered: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Print the sequences; what is trained stands in brackets, and in colour where there is any."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for number, pieces in enumerate(rendered):
        if not number:
            console.print(Text(RENDERED, style="italic"))
        for name in ("text", "ids"):
            line = Text()
            for piece in pieces:
                value = piece["text"] if name == "text" else " ".join(map(str, piece["ids"]))
                shown = "\n".join(escape_controls(part) for part in value.split("\n"))
                style = "green" if piece["trained"] else "dim"
                line.append(f"⟦{shown}⟧" if piece["trained"] else shown, style=style)
                line.append(" " if name == "ids" else "")
            console.print(line, soft_wrap=True)


def _rendered_markdown(rendered: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Write the sequences as literal blocks."""
    blocks = [f"## {RENDERED}"] if rendered else []
    for pieces in rendered:
        for name in ("text", "ids"):
            parts = [p["text"] if name == "text" else " ".join(map(str, p["ids"])) for p in pieces]
            joined = (" " if name == "ids" else "").join(
                f"⟦{part}⟧" if piece["trained"] else part for part, piece in zip(parts, pieces, strict=True)
            )
            blocks.append("\n".join(f"    {escape_controls(line)}" for line in joined.split("\n")))
            blocks.append("<!-- -->")
    return blocks


def _write_markdown(
    folder: Path,
    config: DataReportConfig,
    answer: str,
    sheets: Sequence[Sheet],
    rendered: Sequence[Sequence[Mapping[str, Any]]],
) -> None:
    """Write report.md; data is escaped in its cells."""
    blocks = [
        f"# Data of {config.task.name}",
        f"**{answer}**",
        f"![lengths of prompts in {_unit(config)}](prompt_lengths.png)",
    ]
    for sheet in sheets:
        if sheet.rows:
            lines = [f"| {' | '.join(sheet.head)} |", "|---" * len(sheet.head) + "|"]
            lines += [f"| {' | '.join(map(_cell, row))} |" for row in sheet.rows]
            blocks += [f"## {sheet.title}", "\n".join(lines), sheet.remark]
    blocks += _rendered_markdown(rendered)
    text = "\n\n".join(block for block in blocks if block) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8", errors="backslashreplace")


def _cell(text: str) -> str:
    """Write text as literal inline markdown."""
    return re.sub(r"([\\`*_\[\]<>|$&~])", r"\\\1", _short(text, SHOWN_TEXT))


def _draw_lengths(lengths: Mapping[str, Sequence[int]], unit: str, folder: Path) -> None:
    """Draw the prompt lengths of each split; the longest 0.5 % are in the last bin."""
    matplotlib = matplotlib_for(folder)
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    longest = max(percentile(values, 99.5) for values in lengths.values() if values)
    width = max(1, -(-longest // NUM_BINS))
    edges = np.arange(0, longest + width + 1, width)
    with matplotlib.rc_context(cast(Any, STYLE)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=(6.4, 3.2), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        for (split, values), colour in zip(lengths.items(), COLOURS, strict=False):
            if values:
                counts, _ = np.histogram(np.minimum(values, edges[-1] - 1), bins=edges)
                label = f"{split} ({len(values):,})"
                axes.stairs(counts / len(values), edges, color=colour, linewidth=1.6, label=label)
        axes.set_title("prompt lengths")
        axes.text(
            0, 1.03, f"share of each split, by {unit}", transform=axes.transAxes, color=MUTED, fontsize=8
        )
        axes.set_xlabel(unit)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 2):g}%"))
        axes.legend()
        figure.savefig(folder / "prompt_lengths.png", dpi=140)


PROGRAM = Program(config_class=DataReportConfig, main=main, positional="task.name")
