"""`whet compare A B [C ...]`: compares models on the same problems, with significance tests and transcripts."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet.config import SHORT_MODELS, align, counted, dump_yaml, from_dict, load_yaml, read_yaml, user_path
from whet.eval import evaluate
from whet.eval.compare.asked import Asked, own_problem, read_prompts
from whet.eval.compare.page import (
    BEST_NOTE,
    HARDWARE_NOTE,
    count_verdicts,
    devices,
    hardware_table,
    lengths,
    not_sensed,
    number,
    pass_curve,
    side_by_side,
    summarise_side,
    write_page,
)
from whet.eval.compare.paired import (
    Paired,
    compare_pairs,
    compare_scores,
    holm,
    score_problems,
    show,
    show_p,
    unit,
    verdict,
)
from whet.eval.evaluate import EvalConfig
from whet.eval.metrics import BREAKDOWN
from whet.eval.record import ROW, StoredEval, differences, read_eval, unlike
from whet.generate.policy import PolicyConfig, load_policy, written_date
from whet.generate.sampling import SamplingParams
from whet.model.changes import changed_directions, changed_weights, measurable, summarise_directions
from whet.model.changes import describe as describe_changes
from whet.model.config import ModelConfig
from whet.model.files import GGUF, is_hub_name, read_json
from whet.model.vision.reading import shown
from whet.stats import share_interval
from whet.storage.folder import check_folder, dated, open_run, run_of
from whet.tasks.base import TaskConfig, load_task
from whet.telemetry.display import advancing, clock, escape_controls, open_display
from whet.telemetry.provenance import no_run, resolve_run
from whet.types import UserError

# A comparison as tables in the terminal. Model output and file names are plain text, never markup.

MAIN = ("pass@1", "greedy", "maj", "format", "thinking_tokens", "completion_tokens")
"""The metrics of the first table; the others are folded on the page, and all are in compare.json."""
SENSED = ("utilisation", "memory activity", "power")
"""Hardware quantities that need the caution of `HARDWARE_NOTE`."""
SHOWN_TEXT = 600
SUMMARY_SHORT = ("right", "perfect format", "tokens", "thinking", "token probability")
"""What the terminal shows of a summary: 80 columns hold no more."""
FEW = 3
"""So many models are compared pair by pair in full; of more, the terminal prints one row each."""
MANY = 6
"""So many numbers stand in the verdict's row."""
_CHECKPOINT = re.compile(r"(?P<run>.*?)step_0*(?P<step>\d+)")


def print_comparison(content: Mapping[str, Any], transcripts: Sequence[Mapping[str, Any]]) -> None:
    """Print a comparison.

    Args:
        content: The content of compare.json.
        transcripts: From `whet.eval.compare.page.side_by_side`; the first is shown if there are no scores.
    """
    console = Console()
    names = [model["name"] for model in content["models"]]
    for note in content["different"]:
        console.print(_text(f"NOT COMPARABLE, compared with --force: {note}"), style="bold red")
    if content["verdict"]:
        _say(console, content["verdict"], style="bold")
    for model in content["models"]:
        if content.get("overview") and not model["left_out"] and not model["remark"]:
            continue
        left = f"; {model['left_out']} of its problems are not in all, skipped" if model["left_out"] else ""
        remark = f"; {model['remark']}" if model["remark"] else ""
        _say(
            console,
            f"{model['name']}: {model['folder']}, {counted(model['num_problems'], 'problem')}{left}{remark}",
        )
    if rows := content.get("overview"):
        head = [str(name) for name in rows[0] if name.partition("@")[0] not in ("maj", "format")]
        # 80 columns hold no more.
        short = {
            "thinking tokens": "thinking",
            "completion tokens": "tokens",
            "from the one before": "change",
        }
        asked = counted(len(content["uids"]), "problem")
        title = f"{asked} x {counted(content['num_samples'], 'sample')}; percent, tokens; p (Holm)"
        cells = [[row[name] for name in head] for row in rows]
        _table(console, title, [short.get(name, name) for name in head], cells)
        _say(console, BEST_NOTE, style="dim")
    pairs = () if rows else zip(content["tables"], content.get("verdicts", ()), strict=True)
    for table, counts in pairs:
        _significance(console, table, content)
        _say(console, "greedy: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    if content.get("matrix") and not rows:
        cells = [[_cell(cell) for cell in row] for row in content["matrix"]]
        lines = [[name, *row] for name, row in zip(names, cells, strict=True)]
        _table(console, "pass@1, row minus column, points (p, Holm over all pairs)", ["", *names], lines)
    for weights in content.get("weights", ()):
        _say(console, f"weights of {weights['name']} beside {weights['against']}: {weights['text']}")
    if not rows:  # the page has every pair, and the hardware
        _print_hardware(console, names, content)
    if not content["tables"]:
        rows = content["summary"]
        short = [
            {"model": row["model"]} | {name: row[name] for name in SUMMARY_SHORT if name in row}
            for row in rows
        ]
        _table(console, "what they wrote", list(short[0]), [list(row.values()) for row in short])
        _print_transcript(console, names, transcripts)


def _significance(console: Console, table: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Print the main metrics of a pair; one that is 0 on both sides says nothing."""
    shown = [row for row in table["rows"] if row["is_main"] and (row["a"] or row["b"])]
    lengths = {row["metric"]: (row["a"], row["b"]) for row in shown}
    if lengths.get("thinking_tokens") == lengths.get(
        "completion_tokens"
    ):  # neither thinks: all tokens count as such
        shown = [row for row in shown if row["metric"] != "thinking_tokens"]
    rows: list[list[str]] = []
    for row in shown:
        text = row["text"]
        star = " *" if row["is_shown"] else ""
        name = row["metric"].replace("_", " ")
        rows.append([name, text["a"], text["b"], f"{text['difference']}{star}", text["interval"], text["p"]])
    corrected = " (Holm)" if len(content["tables"]) > 1 else ""
    count = f"{counted(len(content['uids']), 'problem')} x {counted(content['num_samples'], 'sample')}"
    title = f"{count}; percent, points, tokens; * p < 0.05{corrected}"
    _table(console, title, ["", table["against"], table["name"], "difference", "95 %", "p"], rows)
    for row in shown:
        if not row["is_shown"]:  # what was shown, the numbers say
            _say(console, f"  {row['metric'].replace('_', ' ')}: {row['verdict']}")


def _print_hardware(console: Console, names: Sequence[str], content: Mapping[str, Any]) -> None:
    table = content["hardware"]
    if not table:
        _say(console, "hardware: not recorded")
        return
    rows: list[list[str]] = []
    for row in table:
        if any(value is not None for value in row["values"]):
            values = ["not recorded" if value is None else number(value) for value in row["values"]]
            # The same difference with the other base is on the page.
            changes = [(text or "").partition("; in reverse")[0] for text in row["changes"]]
            unit_ = "" if row["name"].startswith(row["unit"]) else f", {row['unit']}"
            rows.append([f"{row['name']}{unit_}", *values, *(changes if len(names) == 2 else [])])
    head = ["", *names, *(["difference"] if len(names) == 2 else [])]
    _table(console, "hardware, each over its generation window", head, rows)
    if content.get("not_sensed"):
        _say(console, f"not recorded: {content['not_sensed']}", style="dim")
    if any(row["name"] in SENSED and row["values"][0] is not None for row in table):
        _say(console, HARDWARE_NOTE, style="dim")


def _print_transcript(
    console: Console, names: Sequence[str], transcripts: Sequence[Mapping[str, Any]]
) -> None:
    for problem in transcripts[:3]:
        images = ", ".join(shown(source) for source in problem["images"])
        title = problem["prompt"][:SHOWN_TEXT] + (f"  [{images}]" if images else "")
        console.print(_text(title), style="bold")
        for name, column in zip(names, problem["columns"], strict=True):
            row = column["rows"][0]
            text = row.get("text") or f"{row.get('thinking', '')}\n-> {row['answer']}"
            facts = f"{row['format']}, {row['tokens']} tokens"
            console.print(_text(f"{name} ({facts}): {text[:SHOWN_TEXT]}"))


def _cell(cell: Mapping[str, Any] | None) -> str:
    return "·" if cell is None else f"{cell['text']} ({cell['p']})"


def _table(console: Console, title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="", pad_edge=False)
    for place, name in enumerate(head):
        table.add_column(
            _text(name), justify="right" if place else "left", overflow="fold", no_wrap=place > 0
        )
    for row in rows:
        table.add_row(*map(_text, row))
    console.print(table)


def _say(console: Console, text: str, *, style: str = "") -> None:
    console.print(_text(text), style=style, soft_wrap=False)


def _text(text: str) -> Text:
    return Text(escape_controls(text))


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Two or more models on the same problems: differences, their significance, and transcripts."""

    models: tuple[str, ...] = ()
    """Evaluation folders; or models (run or Hugging Face folder, adapter, run id, hub name), evaluated first."""
    out: str = ""
    """Output folder; empty for runs/compare-DATE-TIME."""
    eval: EvalConfig | None = None
    """Protocol for models: --eval RECIPE of `whet eval`; default: that of the first evaluation folder, else the task
    that the runs were trained on. Its out and policy.init are set for each model."""
    force: bool = False
    """Compare even if protocol, task, split or sampling differ; the page then warns in red."""
    prompts: tuple[str, ...] = ()
    """Prompts to use instead of a task's problems: texts, or files with one prompt per line (.jsonl: field prompt)."""
    prompt_samples: int = 3
    """Completions per prompt of `prompts`, besides the greedy one."""
    sampling: SamplingParams = field(
        default_factory=lambda: SamplingParams(temperature=0.7, max_new_tokens=512)
    )
    """Sampling settings for completions of `prompts`."""
    shown_problems: int = 500
    """Problems with transcripts on the page: the first by uid, which is a fixed random sample."""
    shown_samples: int = 3
    """Samples of each shown problem, besides the greedy completion."""
    directions: bool = False
    """Also measure in how many and in which directions each matrix changed, of models of one shape: heat maps over the
    layers (some seconds for each matrix of 1,000 x 1,000)."""
    seed: int = 0
    """Seed of the completions of `prompts`."""

    def __post_init__(self) -> None:
        if len(self.models) == 1:
            raise ValueError(f"models = {self.models[0]}: expected two or more, as in `whet compare A B`")
        least = {"shown_problems": 1, "shown_samples": 0, "prompt_samples": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} = {getattr(self, name)}: expected {low} or more")
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature = 0: a greedy completion is generated anyway; expected above 0"
            )


def plan(config: CompareConfig) -> str:
    """Describe the work without doing it."""
    places = [locate(word) for word in config.models]
    rows = {place: "read" if _is_evaluation(place) else "model" for place in places}
    if config.prompts:
        rows["prompts"] = str(len(read_prompts(config.prompts)))
    return align("models", rows)


def check(config: CompareConfig, resume: bool) -> None:
    """Find what a comparison would stop at before its first completion; loads no weights and creates nothing.

    Raises:
        UserError: As the comparison would.
    """
    places, names = _places(config)
    folder = Path(config.out or "compare")
    told: list[str] = []
    if config.prompts:
        _is_plain(config, _asked_alike([_policy_of(config, place) for place in places]))
    else:
        jobs = _jobs(config, places, names, folder)
        if jobs and not config.force:
            _refuse_unlike(jobs, places, names, _date(places))
        for number, job in jobs.items():
            told += [f"{names[number]}: {line}" for line in evaluate.inspect(job)]
        for place in filter(_is_evaluation, places):
            read_eval(place, ROW)
    if config.out and not resume:
        check_folder(folder)
    print("".join(f"{line}\n" for line in told), end="")
    print("checked: models, data, prompts and folder; the comparison would start")


def _places(config: CompareConfig) -> tuple[list[str], list[str]]:
    """Return where the models or evaluations are, and what they are called."""
    if not config.models:
        raise UserError("nothing to compare: name two models or evaluation folders, as in `whet compare A B`")
    places = [locate(word) for word in config.models]
    if len({Path(place).resolve() for place in places}) < len(places):
        raise UserError(f"models = {', '.join(config.models)}: one of them is given twice")
    return places, short_names(places)


def main(config: CompareConfig, *, resume: bool = False) -> None:
    """Compare, print the tables, and write compare.json and compare.html; `resume` continues unfinished evaluations."""
    places, names = _places(config)
    folder = Path(config.out or dated("compare"))
    needs_work = bool(config.prompts) or not all(map(_is_evaluation, places))
    prompts = read_prompts(config.prompts)
    jobs = {} if prompts else _jobs(config, places, names, folder)
    if jobs and config.eval is None:
        job = next(iter(jobs.values()))
        why = "as the other evaluation" if any(map(_is_evaluation, places)) else "as trained"
        count = len(evaluate.take_problems(load_task(job.task), job.split, job.num_problems))
        told = f"{job.task.name}/{job.split}, {why}: {counted(count, 'problem')} x {counted(job.num_samples, 'sample')}"
        print(f"evaluated on {told}; --eval RECIPE for something else", flush=True)
    if jobs and "test" in (job.split for job in jobs.values()):
        job = next(iter(jobs.values()))
        asked = replace(job, split=_protocol(config, places).split)
        if note := evaluate.split_note(asked, job.task, load_task(job.task), job.split, "--eval.split"):
            print(f"whet: {note}", flush=True)
    policies = _asked_alike([_policy_of(config, place) for place in places]) if prompts else []
    plain = bool(prompts) and _is_plain(config, policies)
    date = _date(places)
    if jobs and not config.force:
        _refuse_unlike(jobs, places, names, date)
    if needs_work:  # else the folder is created once there is something to write
        open_run(folder, dump_yaml(config), resume=resume)
    if prompts:
        sides = [
            _ask(config, policy, name, prompts, folder, plain=plain)
            for policy, name in zip(policies, names, strict=True)
        ]
        content = describe(sides, names, list(sides[0].greedy))
    else:
        try:
            _evaluate(jobs, names, date)
        except KeyboardInterrupt as error:
            again = f"the same command with {shlex.join(['--out', str(folder)])} --resume goes on"
            raise type(error)(again) from None
        sides = [read_eval(jobs[i].out if i in jobs else place, ROW) for i, place in enumerate(places)]
        content = compare(sides, names, config)
    if not needs_work:
        open_run(folder, dump_yaml(config), resume=resume)
    shown = content["uids"][: config.shown_problems]
    transcripts = side_by_side(sides, shown, config.shown_samples)
    content["weights"] = _weights(places, names, directions=config.directions)
    (folder / "compare.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    write_page(folder / "compare.html", content, transcripts, len(content["uids"]) - len(shown))
    print_comparison(content, transcripts)
    print(f"page: {folder / 'compare.html'}")


def _ask(
    config: CompareConfig,
    policy: PolicyConfig,
    name: str,
    prompts: Sequence[str],
    folder: Path,
    *,
    plain: bool,
) -> StoredEval:
    """Run every prompt through a model; `plain` as in `load_policy`."""
    asked = Asked(folder, name, policy.init)
    problems = [own_problem(prompt) for prompt in dict.fromkeys(prompts)]
    loaded = load_policy(policy, seed=config.seed, steers=True, plain=plain)
    print(f"whet: {name}: {loaded.describe_prompts()}", flush=True)
    asked.ask(
        loaded,
        problems,
        num_samples=config.prompt_samples,
        sampling=config.sampling,
        seed=config.seed,
    )
    return asked.stored()


def _evaluate(jobs: Mapping[int, EvalConfig], names: Sequence[str], date: str) -> None:
    """Run the evaluations that are missing, one after the other, and say how long the rest will take."""
    began = time.monotonic()
    for count, (place, job) in enumerate(jobs.items()):
        left = f", {clock((time.monotonic() - began) / count * (len(jobs) - count))} left" if count else ""
        print(f"model {count + 1} of {len(jobs)}: {names[place]}{left}", flush=True)
        evaluate.run(job, resume=(Path(job.out) / "config.yaml").is_file(), date=date)


def _weights(places: Sequence[str], names: Sequence[str], *, directions: bool) -> list[dict[str, Any]]:
    """Return how many weights differ between each model and the one before, and if asked in which directions; nothing
    of evaluations, or other shapes."""
    found: list[dict[str, Any]] = []
    for a, b in pairwise(range(len(places))):
        if _is_evaluation(places[a]) or _is_evaluation(places[b]):
            continue
        with suppress(UserError, OSError):
            facts = changed_weights(places[a], places[b]).facts()
            if facts["numbers"]:
                row = {"name": names[b], "against": names[a], "text": describe_changes(facts), **facts}
                if directions:
                    total = max(1, len(measurable(places[a], places[b])))
                    with open_display(f"directions · {names[b]}", total, (), unit="matrix") as display:
                        changed = changed_directions(places[a], places[b], advancing(display))
                    row["directions"] = {
                        layer: {name: asdict(one) for name, one in matrices.items()}
                        for layer, matrices in changed.items()
                    }
                    row["text"] += summarise_directions(changed)
                found.append(row)
    return found


def compare(sides: Sequence[StoredEval], names: Sequence[str], config: CompareConfig) -> dict[str, Any]:
    """Compare evaluations on the problems that all of them have.

    Args:
        sides: Two or more.
        names: What they are called; each is compared with the one before it.
        config: Whether to accept differing protocols, and what is shown.

    Returns:
        The content of compare.json.

    Raises:
        UserError: If their protocols differ, or no problem is in all of them.
    """
    uids = [uid for uid in sorted(sides[0].samples) if all(uid in side.samples for side in sides[1:])]
    if not uids:
        raise UserError(f"{' and '.join(names)} have no problem in common: evaluate them on the same task")
    different = {note for side in sides[1:] for note in differences(sides[0], side)}
    if not config.force:
        _check_alike(different, names)
    num_samples = min(len(side.samples[uid]) for side in sides for uid in uids)
    scores = [
        score_problems([side.samples[uid] for uid in uids], [side.greedy[uid] for uid in uids], num_samples)
        for side in sides
    ]
    pairs = list(pairwise(range(len(sides))))
    tables = compare_pairs(scores, pairs)
    content = describe(sides, names, uids) | {"different": sorted(different), "num_samples": num_samples}
    content["pairs"] = pairs
    content["tables"] = [
        {
            "name": names[b],
            "against": names[a],
            "rows": [_shown(row, names[a], names[b]) for row in table.values()],
            "reasoning": _reasoning(table.get("thinking_tokens"), names[a], names[b]),
        }
        for (a, b), table in zip(pairs, tables, strict=True)
    ]
    content["estimates"] = [
        {
            name: asdict(share_interval([value for value in score[name] if value is not None]))
            for name in ("pass@1", "greedy")
        }
        for score in scores
    ]
    content["matrix"] = _matrix(scores) if len(sides) > 2 else None
    steps = [table["pass@1"] for table in tables]
    if len(sides) > FEW:
        content["verdict"] = _verdict_of_many(names, [steps[0].a, *(row.b for row in steps)], content)
    else:
        content["verdict"] = _verdict(names, steps)
    content["steps"] = _steps(names)
    content["overview"] = _overview(names, content) if len(sides) > FEW else []
    content["verdicts"] = [count_verdicts(sides[a], sides[b], uids) for a, b in pairs]
    content["by"] = _by_label(sides, scores, uids)
    content["pass@k"] = {
        name: pass_curve(side, uids, num_samples) for name, side in zip(names, sides, strict=True)
    }
    content["lengths"] = {name: lengths(side, uids) for name, side in zip(names, sides, strict=True)}
    return content


def describe(sides: Sequence[StoredEval], names: Sequence[str], uids: Sequence[str]) -> dict[str, Any]:
    """Describe the compared models and their hardware readings, without scores."""
    models = [
        {
            "name": name,
            "folder": str(side.folder),
            "label": side.label,
            "num_problems": len(side.samples),
            "left_out": len(side.samples) - len(uids),
            "remark": side.summary.get("remark", ""),
            "model": side.summary.get("model"),
            "devices": devices(side.summary),
        }
        for name, side in zip(names, sides, strict=True)
    ]
    return {
        "models": models,
        "uids": list(uids),
        "different": [],
        "verdict": "",
        "pairs": [],
        "estimates": [],
        "tables": [],
        "matrix": None,
        "steps": None,
        "overview": [],
        "summary": [summarise_side(side, name, uids) for side, name in zip(sides, names, strict=True)],
        "by": {},
        "hardware": hardware_table([side.summary for side in sides]),
        "not_sensed": not_sensed([side.summary for side in sides]),
    }


def locate(word: str) -> str:
    """Resolve a command line argument: the path of a folder, a run id, or a hub name.

    Raises:
        UserError: If it is none of them, or a folder with neither evaluation nor model.
    """
    path = user_path(word)
    if path.is_dir():
        if _is_evaluation(word) or any(
            (path / name).exists() for name in ("config.json", "adapter_config.json", "checkpoints")
        ):
            return str(path)
        below = sorted(
            str(found.parent) for found in [*path.glob("*/eval.json"), *path.glob("*/*/eval.json")]
        )
        hint = f"; it contains evaluations, name them: {' '.join(below[:4])}" if below else ""
        raise UserError(f"{word}: neither an evaluation (eval.json) nor a model{hint}")
    if path.exists() and path.suffix != GGUF:
        raise UserError(
            f"{word}: is a file; expected the folder of an evaluation or of a model, or a GGUF file"
        )
    if path.exists() or word in SHORT_MODELS:
        return word
    if (found := resolve_run(word)) != word:
        return found
    if word.count("/") == 1 and is_hub_name(word) and not word.startswith("runs/"):
        return word
    raise no_run(word, or_hub=True)


def short_names(places: Sequence[str]) -> list[str]:
    """Name places by as few trailing path parts as distinguish them; a checkpoint's step without its zeros."""
    trimmed = [re.sub(r"(?<![^/])step_0+(?=\d)", "step_", place) for place in places]
    parts = [Path(place).parts for place in (trimmed if len(set(trimmed)) == len(places) else places)]
    depth = 1
    while len(names := {Path(*part[-depth:]) for part in parts}) < len(parts) and depth < max(
        map(len, parts)
    ):
        depth += 1
    assert len(names) == len(parts), places
    return [str(Path(*part[-depth:])) for part in parts]


def _is_evaluation(place: str) -> bool:
    return (user_path(place) / "eval.json").is_file()


def _jobs(
    config: CompareConfig, places: Sequence[str], names: Sequence[str], folder: Path
) -> dict[int, EvalConfig]:
    """Return the evaluations still to run, into folder/evals/NAME, by the location of their model."""
    jobs: dict[int, EvalConfig] = {}
    for index, place in enumerate(places):
        if not _is_evaluation(place):
            start = _protocol(config, places)
            if start.tasks:
                raise UserError("eval.tasks: compare works on one task; leave it out and set eval.task.name")
            out = str(folder / "evals" / quote(names[index], safe=""))
            jobs[index] = replace(start, out=out, policy=_with_init(start.policy, place))
    # None of them is measured on rows that one was trained on.
    splits = {evaluate.chosen_split(job.split, job.task, job.policy) for job in jobs.values()}
    if "test" in splits:
        jobs = {index: replace(job, split="test") for index, job in jobs.items()}
    asked = _asked_alike([job.policy for job in jobs.values()])
    return {index: replace(jobs[index], policy=policy) for index, policy in zip(jobs, asked, strict=True)}


ASKED_BY = (
    *("schema", "template", "template_values", "system_prompt", "tools"),
    *("tags_as_tokens", "padded_vocab_size", "max_image_tokens"),
)
"""Fields of a policy that decide how a model is asked."""


def _asked_alike(policies: Sequence[PolicyConfig]) -> list[PolicyConfig]:
    """Ask a model that has no protocol of its own as the first run among the others was trained, in what the caller
    leaves open: what a run began from knows nothing of the schema or the template that the run was given."""
    given: dict[str, Any] = {}
    for policy in policies:
        path = run_of(policy.init) / "config.yaml"
        fields = read_yaml(path).get("policy") if path.is_file() else None
        if isinstance(fields, Mapping) and not given:
            own = from_dict(PolicyConfig, fields, where=f"{path}: policy")
            given = {name: getattr(own, name) for name in ASKED_BY}
    default = PolicyConfig(init="any")

    def asked(policy: PolicyConfig) -> PolicyConfig:
        if any((run_of(policy.init) / name).is_file() for name in ("config.yaml", "protocol.json")):
            return policy
        open_ = (name for name in given if getattr(policy, name) == getattr(default, name))
        return replace(policy, **{name: given[name] for name in open_})

    return list(map(asked, policies))


def _is_plain(config: CompareConfig, policies: Sequence[PolicyConfig]) -> bool:
    """Say whether one's own prompts are written as the templates alone have them: no model was trained to a schema."""
    loaded = [load_policy(p, seed=config.seed, weights=False, steers=True, plain=True) for p in policies]
    return all(policy.is_plain for policy in loaded)


def _written(content: Any, *names: str) -> str:
    """Return a text below names within names; '' where a file of somebody's own has something else there."""
    for name in names:
        content = content.get(name) if isinstance(content, Mapping) else None
    return content if isinstance(content, str) else ""


def _date(places: Sequence[str]) -> str:
    """Return the date that the prompts of a run or evaluation among the models were written with; '' where their
    templates have none. What is evaluated later is asked on the same day."""
    for place in places:
        if _is_evaluation(place):
            found = _written(read_json(user_path(place) / "eval.json"), "identity", "protocol", "date")
        else:
            found = written_date(user_path(place))
        if found:
            return found
    return ""


def _refuse_unlike(
    jobs: Mapping[int, EvalConfig], places: Sequence[str], names: Sequence[str], date: str
) -> None:
    """Refuse to evaluate models whose results could not be compared, before anything is sampled.

    Raises:
        UserError: With what differs.
    """
    facts = [
        evaluate.protocol_of(jobs[number], date)
        if number in jobs
        else read_eval(place, ROW).summary["identity"]
        for number, place in enumerate(places)
    ]
    _check_alike({note for other in facts[1:] for note in unlike(facts[0], other)}, names)


def _check_alike(notes: Collection[str], names: Sequence[str]) -> None:
    if notes:
        raise UserError(
            f"{', '.join(names)} are not comparable: {'; '.join(sorted(notes))}. Results of different protocols do "
            "not compare: evaluate them alike (as in --eval.policy.schema boxed, for all of them), or use --force"
        )


def _protocol(config: CompareConfig, places: Sequence[str]) -> EvalConfig:
    """Return the protocol for evaluating models."""
    if config.eval is not None:
        return config.eval
    folders = [Path(place) for place in places if _is_evaluation(place)]
    stored = next((path for place in folders if (path := place / "config.yaml").is_file()), None)
    if stored is not None:
        return load_yaml(stored, EvalConfig)
    if (own := _training_task(places)) is not None:
        return own
    raise UserError(
        f"{places[0]}: is a model, to be evaluated first; give the protocol: --eval gsm8k, or another recipe"
    )


def _training_task(places: Sequence[str]) -> EvalConfig | None:
    """Return a protocol of the task that runs were trained on, sampled as the last of them was; None if there is none.

    Raises:
        UserError: If they were trained on several tasks.
    """
    found: dict[str, TaskConfig] = {}
    sampling = SamplingParams(max_new_tokens=512)
    for place in places:
        path = run_of(place) / "config.yaml"
        if not path.is_file():
            continue
        fields = read_yaml(path)
        if isinstance(fields.get("task"), Mapping):
            found[place] = from_dict(TaskConfig, fields["task"], where=str(path))
            if isinstance(fields.get("sampling"), Mapping):
                sampling = from_dict(SamplingParams, fields["sampling"], where=str(path))
    if not found:
        return None
    if len({dump_yaml(task) for task in found.values()}) > 1:
        told = ", ".join(f"{place}: {task.name}" for place, task in found.items())
        raise UserError(
            f"the runs were trained on different tasks ({told}); say which: --eval gsm8k, or another recipe"
        )
    return EvalConfig(
        out="",
        policy=PolicyConfig(init=next(iter(found))),
        task=next(iter(found.values())),
        num_samples=8,
        sampling=sampling,
    )


def _policy_of(config: CompareConfig, place: str) -> PolicyConfig:
    """Return the policy for own prompts: a model, or that of an evaluation."""
    if not _is_evaluation(place):
        return _with_init(config.eval.policy, place) if config.eval else PolicyConfig(init=place)
    stored = Path(place) / "config.yaml"
    if not stored.is_file():
        raise UserError(f"{place}: has no config.yaml that names its model; with --prompts name the model")
    return load_yaml(stored, EvalConfig).policy


def _with_init(policy: PolicyConfig, init: str) -> PolicyConfig:
    if policy.init:
        return replace(policy, init=init, adapter="")
    made = {"tokenizer": "", "alphabet": "", "tags_as_tokens": False, "padded_vocab_size": 0}
    return replace(policy, init=init, adapter="", model=ModelConfig(), **made)


def _shown(row: Paired, name_a: str, name_b: str) -> dict[str, Any]:
    """Return a row of the table as JSON, with its words and printed numbers."""
    low, high = row.difference.low, row.difference.high
    return asdict(row) | {
        "unit": unit(row.metric),
        "is_main": row.metric in MAIN or row.metric.partition("@")[0] in MAIN,
        "is_shown": row.is_shown,
        "verdict": verdict(row, name_a, name_b),
        "text": {
            "a": show(row.metric, row.a),
            "b": show(row.metric, row.b),
            "difference": show(row.metric, row.difference.mean, signed=True),
            "interval": f"{show(row.metric, low, signed=True)}, {show(row.metric, high, signed=True)}",
            "p": show_p(row.p_holm),
            "detectable": "" if row.detectable is None else show(row.metric, row.detectable),
        },
    }


def _verdict(names: Sequence[str], steps: Sequence[Paired]) -> str:
    """Say in a sentence which model is right more often, step by step, and where that cannot be said."""
    means = " → ".join(show("pass@1", mean) for mean in (steps[0].a, *(row.b for row in steps)))
    told: list[str] = []
    for row, (name_a, name_b) in zip(steps, pairwise(names), strict=True):
        size = f"{show('pass@1', row.difference.mean, signed=True)} points"
        if len(steps) == 1:  # with more models the tables say it
            low, high = (
                show("pass@1", end, signed=True) for end in (row.difference.low, row.difference.high)
            )
            p = show_p(row.p_holm)
            size += f", 95 % interval {low} to {high}, p {p if p[0] == '<' else '= ' + p}"
        word = "better" if row.difference.mean > 0 else "worse"
        told.append(
            f"{name_b} is {word} than {name_a} ({size})"
            if row.is_shown
            else f"between {name_a} and {name_b} no difference could be shown ({size})"
        )
    said = "; ".join(told)
    said = said if told[0].startswith(names[1]) else said[0].upper() + said[1:]
    return f"{said}: {means} % of the sampled answers to {steps[0].num_problems:,} problems are right."


def _verdict_of_many(names: Sequence[str], means: Sequence[float], content: Mapping[str, Any]) -> str:
    """Say which of many models is right most often, and which others it could not be told from."""
    best = max(range(len(names)), key=lambda place: means[place])
    others = [place for place in range(len(names)) if place != best]
    beaten = [place for place in others if (cell := content["matrix"][best][place]) and cell["p_holm"] < 0.05]
    equal = [place for place in others if place not in beaten]
    told: list[str] = []
    if beaten:
        told.append(f"better than {_listed(names, beaten)}")
    if equal:
        told.append(f"no difference from {_listed(names, equal)} could be shown")
    shown = [show("pass@1", mean) for mean in means]
    chain = " → ".join(shown if len(shown) <= MANY else [shown[0], "...", shown[-1]])
    return (
        f"{names[best]} is right most often ({shown[best]} %): {'; '.join(told)}. {chain} % of the sampled answers to "
        f"{len(content['uids']):,} problems are right."
    )


def _listed(names: Sequence[str], places: Sequence[int]) -> str:
    """List some of the models, or say how many of the others they are."""
    if len(places) == len(names) - 1:
        return f"the other {len(places)}"
    chosen = [names[place] for place in places]
    if len(chosen) > FEW:
        return f"{', '.join(chosen[:FEW])} and {len(chosen) - FEW} more"
    return " and ".join(filter(None, [", ".join(chosen[:-1]), chosen[-1]]))


def _steps(names: Sequence[str]) -> list[int] | None:
    """Return the training steps of the models, rising, where three or more are checkpoints of one run."""
    found = [_CHECKPOINT.fullmatch(name) for name in names]
    steps = [int(match["step"]) for match in found if match]
    of_one = len({match["run"] for match in found if match}) == 1
    is_run = len(steps) == len(names) >= FEW and of_one and steps == sorted(set(steps))
    return steps if is_run else None


def _overview(names: Sequence[str], content: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a row for each of many models: its main metrics, and what changed from the one before."""
    rows: list[dict[str, str]] = []
    for place, name in enumerate(names):
        table = content["tables"][max(0, place - 1)]
        side = "b" if place else "a"
        row = {"model": name}
        for metric in (row_ for row_ in table["rows"] if row_["is_main"]):
            row[metric["metric"].replace("_", " ")] = metric["text"][side]
        known = content["estimates"][place]["pass@1"]
        row["pass@1"] += f" {show('pass@1', known['low'])}-{show('pass@1', known['high'])}"
        first = table["rows"][0]
        row["from the one before"] = first["text"]["difference"] if place else ""
        row["p"] = first["text"]["p"] if place else ""
        rows.append(row)
    return rows


def _reasoning(row: Paired | None, name_a: str, name_b: str) -> str:
    """Describe whether the reasoning got shorter, with both lengths and the interval."""
    if row is None:
        return ""
    text = _shown(row, name_a, name_b)["text"]
    lengths = f"{name_a} {text['a']} tokens, {name_b} {text['b']}, difference {text['difference']}"
    return f"{lengths} [{text['interval']}]: {verdict(row, name_a, name_b)}"


def _matrix(scores: Sequence[Mapping[str, Sequence[float | None]]]) -> list[Any]:
    """Compare pass@1 of every pair, corrected for the number of pairs; row minus column, None on the diagonal."""
    pairs = list(combinations(range(len(scores)), 2))
    rows = [compare_scores("pass@1", scores[i]["pass@1"], scores[j]["pass@1"]) for i, j in pairs]
    found = [row for row in rows if row is not None]
    cells: list[list[Any]] = [[None] * len(scores) for _ in scores]
    for (i, j), row, p in zip(pairs, found, holm([row.p for row in found]), strict=True):
        for top, left, sign in ((i, j, -1), (j, i, 1)):
            mean = sign * row.difference.mean
            cells[top][left] = {
                "text": show("pass@1", mean, signed=True),
                "p": show_p(p),
                "mean": mean,
                "p_holm": p,
            }
    return cells


def _by_label(
    sides: Sequence[StoredEval],
    scores: Sequence[Mapping[str, Sequence[float | None]]],
    uids: Sequence[str],
) -> dict[str, list[dict[str, Any]]]:
    """Compare pass@1 within each value of a label (subject, level), every other model with the first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for label in BREAKDOWN:
        places: dict[str, list[int]] = {}
        for place, uid in enumerate(uids):
            if value := (sides[0].greedy[uid].get("meta") or {}).get(label):
                places.setdefault(str(value), []).append(place)
        for value, inside in sorted(places.items() if len(places) > 1 else ()):
            parts = [[score["pass@1"][place] for place in inside] for score in scores]
            rows = [compare_scores("pass@1", parts[0], part) for part in parts[1:]]
            cells = [_shown(row, "", "") for row in rows if row is not None]
            found.setdefault(label, []).append({"value": value, "num_problems": len(inside), "cells": cells})
    return found
