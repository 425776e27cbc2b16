"""`whet probe`: measures what a model has forgotten, by off-domain questions and the perplexity of plain prose.

A reasoner that was rewarded only for numbers may learn to answer everything with a number. The probe shows it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet.cli import Program
from whet.config import align, dump_yaml
from whet.eval.probe.off_domain import KINDS, PROMPTS, Kind, ModelProbe, Perplexity, Reply, probe_model
from whet.eval.probe.transcript import transcribe
from whet.generate.engine import Request
from whet.generate.policy import Policy, PolicyConfig, TemplateName, load_policy
from whet.generate.sampling import SamplingParams
from whet.model.lora.files import find_model
from whet.stats import paired_interval, share_interval
from whet.storage.folder import check_folder, dated, open_run
from whet.telemetry.display import advancing, escape_controls, open_display
from whet.telemetry.provenance import write_environment
from whet.types import Problem, UserError

GENERAL_TEXT = Path(__file__).parent / "data/general.txt"
MAX_TEXT_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """What one or several checkpoints still know outside their training domain."""

    models: tuple[str, ...] = ()
    """Run folders, Hugging Face folders or hub names; the others are compared with the first."""
    out: str = ""
    """Output folder; empty for runs/probe-DATE-TIME (a transcript is then only printed)."""
    transcript: str = ""
    """Show each model's greedy completion of this one prompt token by token, instead of probing."""
    text: str = ""
    """Text file for the perplexity; empty for the bundled page of English prose."""
    stride: int = 0
    """Tokens by which windows over the text advance; 0 for half the context."""
    num_samples: int = 3
    """Sampled completions of each prompt, besides the greedy one."""
    sampling: SamplingParams = field(
        default_factory=lambda: SamplingParams(temperature=0.7, max_new_tokens=128)
    )
    """Sampling settings."""
    template: TemplateName = "auto"
    """Prompt template; auto takes the one that a model was trained with, as in policy.template."""
    system_prompt: bool = True
    """Start with the schema's instruction if a model was trained with it, or its training is unknown."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the parameters."""
    device: str = "auto"
    """Device such as cpu or cuda; auto takes cuda if available."""
    seed: int = 0
    """Seed of the samples."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples = {self.num_samples}: expected 1 or more")
        if self.stride < 0:
            raise ValueError(f"stride = {self.stride}: expected 0 (half the context) or more")
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature = 0: greedy is shown anyway; expected above 0")
        twice = [name for name, count in Counter(self.models).items() if count > 1]
        if twice:
            raise ValueError(f"models: {twice[0]!r} is given twice; expected different ones")


def plan(config: ProbeConfig) -> str:
    """Describe the work without doing it."""
    return align(
        "work",
        {
            "models": len(config.models),
            "prompts": f"{len(PROMPTS)} of {len(KINDS)} kinds",
            "completions per prompt": f"{config.num_samples} sampled + 1 greedy",
            "text": config.text or "the bundled page of prose",
        },
    )


def check(config: ProbeConfig, resume: bool) -> None:
    """Find what a probe would stop at before its first completion; loads no weights and creates nothing.

    Raises:
        UserError: As the probe would.
    """
    _find(config)
    if config.out and not resume:
        check_folder(Path(config.out))
    print("checked: models, text and folder; the probe would start")


def _find(config: ProbeConfig) -> str:
    """Find the models: a misspelt name fails before the first one runs; return the text."""
    if not config.models:
        raise UserError("models: got none; name one or more: whet probe runs/demo-sft runs/demo-rl")
    for name in config.models:
        find_model(name)
    return "" if config.transcript else read_text(config.text)


def main(config: ProbeConfig) -> None:
    """Probe the models and write probe.json, probe_samples.jsonl and probe.md; or show transcripts."""
    text = _find(config)
    if config.transcript:
        _transcripts(config)
        return
    first = _load(config, config.models[0])  # a model that does not load fails before the folder is created
    folder = Path(config.out or dated("probe"))
    open_run(folder, dump_yaml(config), resumable=False)
    write_environment(folder)
    probes: list[ModelProbe] = []
    for place, name in enumerate(config.models):
        policy = _load(config, name) if place else first
        with open_display(
            f"probe {name}", len(PROMPTS) * (config.num_samples + 1), (), unit="completion"
        ) as display:
            display.note(policy.describe_prompts())
            probe = probe_model(
                policy,
                name,
                text,
                num_samples=config.num_samples,
                sampling=config.sampling,
                stride=config.stride,
                seed=config.seed,
                on_finished=advancing(display),
            )
            if probe.remark:
                display.note(probe.remark, warning=True)
        probes.append(probe)
    content = summarise(probes, config)
    (folder / "probe.json").write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")
    with (folder / "probe_samples.jsonl").open("w", encoding="ascii") as file:
        for probe in probes:
            for prompt, row in probe.replies.items():
                about = {"model": probe.name, "kind": prompt.kind, "prompt": prompt.text}
                for reply in row:
                    record = about | {"accepted": list(prompt.accepted)} | asdict(reply)
                    file.write(json.dumps(record) + "\n")
    (folder / "probe.md").write_text(_page(probes, content), encoding="utf-8", errors="backslashreplace")
    _print(content)
    print(f"side by side: {folder / 'probe.md'}")


def summarise(probes: Sequence[ModelProbe], config: ProbeConfig) -> dict[str, Any]:
    """Return probe.json: for each model its shares by kind with intervals over prompts, and its losses against the
    first.

    Args:
        probes: One or more.
        config: The settings.
    """
    models = []
    for probe in probes:
        kinds = {kind: _kind(probe, (kind,)) for kind in KINDS}
        about: dict[str, Any] = {"model": probe.name, "remark": probe.remark, "skipped": dict(probe.skipped)}
        about["kinds"] = kinds | {"all": _kind(probe, KINDS)}
        about["perplexity"] = _perplexity(probe.perplexity)
        if probe is not probes[0]:
            about["against_first"] = _against(probes[0], probe)
        models.append(about | {"protocol": probe.protocol})
    counts = {"num_prompts": len(PROMPTS), "num_samples": config.num_samples}
    return counts | {"text": config.text or "bundled", "sampling": asdict(config.sampling), "models": models}


def _perplexity(found: Perplexity | None) -> dict[str, Any] | None:
    if found is None:
        return None
    ratios = {name: getattr(found, name) for name in ("perplexity", "nats_per_token", "nats_per_byte")}
    return ratios | {"num_tokens": found.num_tokens, "num_bytes": found.num_bytes}


def _kind(probe: ModelProbe, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Average over the samples of a prompt, then over the prompts of some kinds."""
    rows = {prompt: row for prompt, row in probe.replies.items() if prompt.kind in kinds}
    checked = [row for prompt, row in rows.items() if prompt.accepted]
    worded = [row for prompt, row in rows.items() if not prompt.asks_number]

    # The first reply of each prompt is the greedy one, the others are samples.
    sampled_lengths = [reply.num_tokens for row in rows.values() for reply in row[1:]]
    right = [[bool(reply.is_right) for reply in row[1:]] for row in checked]
    greedy_right = [[bool(row[0].is_right)] for row in checked]
    numeric = [[reply.is_numeric for reply in row[1:]] for row in worded]

    return {
        "num_prompts": len(rows),
        "num_checked": len(checked),
        "right": _share(right),
        "greedy": _share(greedy_right),
        "numeric": _share(numeric),
        "tokens": sum(sampled_lengths) / len(sampled_lengths) if sampled_lengths else None,
    }


def _share(rows: Sequence[Sequence[bool]]) -> dict[str, float] | None:
    """Return the mean of the rows' means with its interval over rows; None without rows."""
    return asdict(share_interval([sum(row) / len(row) for row in rows])) if rows else None


def _against(first: ModelProbe, other: ModelProbe) -> dict[str, Any]:
    """Compare with the first model on their common prompts, and on the text."""
    both = [prompt for prompt in first.replies if prompt in other.replies and prompt.accepted]
    found: dict[str, Any] = {"right": None, "p": None, "nats_per_byte": None, "perplexity_ratio": None}
    if both:
        first_P, other_P = (
            [_share_right(probe.replies[prompt][1:]) for prompt in both] for probe in (first, other)
        )
        gain, found["p"] = paired_interval(first_P, other_P, bounds=(-1.0, 1.0))
        found["right"] = asdict(gain)
    old, new = first.perplexity, other.perplexity
    if old is not None and new is not None:
        found["nats_per_byte"] = new.nats_per_byte - old.nats_per_byte
        if old.num_tokens == new.num_tokens:  # tokenised identically
            found["perplexity_ratio"] = math.exp(min(new.nats_per_token - old.nats_per_token, 700.0))
    return found


def _share_right(replies: Sequence[Reply]) -> float:
    """Return the share of right replies."""
    return sum(bool(reply.is_right) for reply in replies) / len(replies)


def _load(config: ProbeConfig, name: str) -> Policy:
    policy = PolicyConfig(
        init=name, template=config.template, system_prompt=config.system_prompt, device=config.device
    )
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    return load_policy(policy, seed=config.seed, dtype=dtype)


def read_text(path: str) -> str:
    """Read the text whose perplexity is measured.

    Raises:
        UserError: If it is missing, empty, too long, or not UTF-8.
    """
    source = Path(path) if path else GENERAL_TEXT
    try:
        size = source.stat().st_size
        if size > MAX_TEXT_BYTES:
            raise UserError(
                f"text {path}: {size:,} bytes; expected at most {MAX_TEXT_BYTES:,}: give an excerpt"
            )
        text = source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"text {path}: byte {error.start} is not UTF-8; expected a plain text file") from None
    except OSError as error:
        raise UserError(f"text {path}: cannot be read ({error.strerror}); expected a text file") from None
    if not text.strip():
        raise UserError(f"text {path}: it is empty; expected at least a page of prose")
    return text


def _transcripts(config: ProbeConfig) -> None:
    """Show the greedy completion of one prompt token by token; write transcript.json if a folder is given."""
    problem = Problem(uid="", task="probe", prompt=config.transcript, answer="")
    found = []
    params = SamplingParams(temperature=0.0, max_new_tokens=config.sampling.max_new_tokens)
    for name in config.models:
        policy = _load(config, name)
        policy.check_alphabet([problem])
        ids = policy.prompt_ids(problem)
        ((done,),) = policy.engine().generate([Request(prompt_ids=ids, seeds=(0,))], params)
        transcript = transcribe(policy.tokenizer, policy.schema, ids, done.ids)
        parts = ("prompt", "generated", "thinking", "answer")
        counts = {part: transcript.count(part) for part in parts}
        rows = [asdict(row) for row in transcript.rows]
        about = {"model": name, "prompt": config.transcript, "text": transcript.text, "counts": counts}
        found.append(about | {"rows": rows, "lines": list(transcript.lines())})
        Console().print(Text(f"\n{escape_controls(name)}\n", style="bold"), transcript.render(), sep="")
    if config.out:
        folder = Path(config.out)
        open_run(folder, dump_yaml(config), resumable=False)
        write_environment(folder)
        (folder / "transcript.json").write_text(json.dumps(found, indent=1) + "\n", encoding="ascii")


def _cell(share: Mapping[str, float] | None) -> str:
    if share is None:
        return "-"
    mean, low, high = (f"{100 * share[name]:.0f}" for name in ("mean", "low", "high"))
    return f"{mean} ({low}-{high})"


def _labels(names: Sequence[str]) -> list[str]:
    """Shorten paths to as few trailing parts as distinguish them; escape terminal control characters."""
    parts = [Path(name).parts for name in names]
    for count in range(1, max(map(len, parts)) + 1):
        short = ["/".join(row[-count:]) for row in parts]
        if len(set(short)) == len(short):
            return [escape_controls(label).replace("\n", " ") for label in short]
    return [escape_controls(name).replace("\n", " ") for name in names]


def _print(content: Mapping[str, Any]) -> None:
    """Print a column per model: right answers by kind, numeric answers, perplexity."""
    models = content["models"]
    asked = f"{len(PROMPTS)} off-domain prompts x {content['num_samples']} samples"
    title = f"{asked}: percent right, with 95 % intervals over prompts"
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    table.add_column("", style="bold")
    for label in _labels([model["model"] for model in models]):
        table.add_column(Text(label, overflow="fold"), justify="right")
    for kind in (*KINDS, "all"):
        if kind != "creative":
            table.add_row(kind, *(Text(_cell(model["kinds"][kind]["right"])) for model in models))
    numeric = [Text(_cell(model["kinds"]["all"]["numeric"])) for model in models]
    table.add_row("a number where the question asks for none", *numeric, end_section=True)
    for name, digits in (("perplexity", 2), ("nats_per_byte", 3)):
        rows = [model["perplexity"] for model in models]
        cells = ["-" if row is None else f"{row[name]:,.{digits}f}" for row in rows]
        table.add_row({"nats_per_byte": "nats per byte"}.get(name, name) + " of the text", *cells)
    Console().print(table)


def _page(probes: Sequence[ModelProbe], content: Mapping[str, Any]) -> str:
    """Write probe.md: a row per model and kind, then the completions of all models side by side."""
    lines = [
        "# Off-domain probe",
        "",
        "Percent, with 95 % intervals over prompts. *Numeric*: answers that are a number though the prompt asks for",
        "none. The prompts are few: intervals are wide, and only a large change shows.",
        "",
        "| model | kind | prompts | right | greedy right | numeric | tokens |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    names = [name.replace("|", "\\|") for name in _labels([model["model"] for model in content["models"]])]
    for name, model in zip(names, content["models"], strict=True):
        for kind, row in model["kinds"].items():
            cells = [_cell(row[share]) for share in ("right", "greedy", "numeric")]
            tokens = "-" if row["tokens"] is None else f"{row['tokens']:.0f}"
            lines.append(f"| {name} | {kind} | {row['num_prompts']} | {' | '.join(cells)} | {tokens} |")
    lines += ["", "| model | perplexity | nats/token | nats/byte | remark |", "|---|--:|--:|--:|---|"]
    for name, model in zip(names, content["models"], strict=True):
        keys, prose = ("perplexity", "nats_per_token", "nats_per_byte"), model["perplexity"]
        cells = [f"{prose[key]:.4g}" if prose else "-" for key in keys]
        lines.append(f"| {name} | {' | '.join(cells)} | {model['remark']} |")
    lines += ["", "## Side by side", ""]
    for prompt in PROMPTS:
        lines += [f"### {prompt.kind}: {prompt.text}", ""]
        for name, probe in zip(names, probes, strict=True):
            for reply in probe.replies.get(prompt, ()):
                mark = {True: ", right", False: ", wrong", None: ""}[reply.is_right]
                head = f"{name}, {reply.sample}: {reply.num_tokens} tokens, {reply.finish_reason}{mark}"
                # An indented block: model output cannot end it.
                shown = [escape_controls(line) for line in [head, *reply.text.split("\n")]]
                lines += [f"    {line}" for line in shown] + [""]
    return "\n".join(lines)


PROGRAM = Program(config_class=ProbeConfig, main=main, plan=plan, check=check, positional="models")
