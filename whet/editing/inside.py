"""`whet trace MODEL --prompt ... --subject ...`: looks inside a prompt, and draws what it finds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from whet.cli import Program
from whet.config import align, dump_yaml
from whet.editing.edit import NO_MODEL
from whet.editing.facts import Fact, read_fact, read_facts
from whet.editing.sites import Reader, mark_subject
from whet.editing.trace import (
    LOCATING,
    answer_id,
    attention_maps,
    attribution,
    causal_trace,
    expected_seconds,
    locate,
    logit_lens,
    num_layer_runs,
)
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.model.lora.files import find_model
from whet.report.figures import bars, heat_map
from whet.report.page import render
from whet.report.plots import COLOURS
from whet.storage.folder import check_folder, dated, open_run
from whet.telemetry.display import advancing, clock, open_display

KIND_COLOURS = {"hidden": COLOURS[4], "mlp": COLOURS[2], "attention": COLOURS[3]}


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """A look inside a model at one prompt, or at where it has the facts of a file."""

    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(init=NO_MODEL))
    """The model."""
    prompt: str = ""
    """The prompt, with {} in the subject's place or with the subject in it."""
    subject: str = ""
    """What it is about."""
    answer: str = ""
    """What follows; empty for what the model says."""
    facts: str = ""
    """File of facts in place of one prompt: the mean effect of each layer over all of them."""
    num_facts: int = 100
    """Facts of the file, at most."""
    out: str = ""
    """New folder for trace.html and trace.json; empty for runs/trace-DATE-TIME."""
    noise: float = 3.0
    """Standard deviation of the noise on the subject, in those of what the first layer reads."""
    num_samples: int = 10
    """Draws of the noise."""
    window: int = 0
    """Neighbouring layers that are restored together, of mlp and attention; 0 for a fifth of the layers."""
    seed: int = 0
    """Seed of the noise."""

    def __post_init__(self) -> None:
        if self.policy.init == NO_MODEL and not Path(NO_MODEL).exists():
            raise ValueError(
                "no model: name a run folder, a Hugging Face folder or a hub name after the command"
            )
        if bool(self.facts) == bool(self.prompt):
            raise ValueError("prompt, facts: give one of them, as in --prompt '{} is in' --subject Paris")
        if bool(self.prompt) != bool(self.subject):
            raise ValueError("subject: give it with --prompt, and only then")
        if not 0 < self.noise <= 100:
            raise ValueError(f"noise = {self.noise}: expected a number above 0, up to 100")
        for name in ("num_samples", "num_facts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 1 or more")
        if self.window < 0:
            raise ValueError(f"window = {self.window}: expected 0 (a fifth of the layers) or more")


def plan(config: TraceConfig) -> str:
    """Describe the work without doing it."""
    asked = config.facts or f"{config.prompt} ({config.subject})"
    return align(
        "work", {"model": config.policy.init, "asked": asked, "draws of the noise": config.num_samples}
    )


def check(config: TraceConfig, resume: bool) -> None:
    """Find what would stop the work before it begins, and time a small part of it; creates nothing."""
    find_model(config.policy.init)
    facts = _facts(config)
    if config.out:
        check_folder(Path(config.out), resumable=False)
    policy = load_policy(config.policy, seed=config.seed, plain=True, steers=True)
    print(
        f"checked: model, prompt and folder; tracing would start, and take {_expected(policy, facts, config)}"
    )


def _expected(policy: Policy, facts: Sequence[Fact], config: TraceConfig) -> str:
    """Say how long the traces will take."""
    policy.model.eval()
    own = {"noise": config.noise, "num_samples": config.num_samples, "window": config.window}
    with torch.no_grad():
        seconds = expected_seconds(Reader(policy), facts, **(LOCATING if config.facts else own))
    return f"about {clock(seconds)} (one measurement, extrapolated)"


def _facts(config: TraceConfig) -> list[Fact]:
    if config.facts:
        return read_facts(config.facts, needs_target=False)[: config.num_facts]
    return [_one(config.prompt, config.subject, config.answer)]


def _one(prompt: str, subject: str, answer: str) -> Fact:
    row = {"prompt": prompt, "subject": subject, "true": answer}
    return read_fact(row, "the prompt", needs_target=False)


def main(config: TraceConfig) -> None:
    """Write trace.json and trace.html, and print the effect of each layer."""
    facts = _facts(config)
    policy = load_policy(config.policy, seed=config.seed, plain=True, steers=True)
    folder = Path(config.out or dated("trace"))
    open_run(folder, dump_yaml(config), resumable=False)
    print(f"tracing takes {_expected(policy, facts, config)}", flush=True)
    title, model = f"trace {config.policy.init}", policy.model
    if config.facts:
        steps = len(facts) * num_layer_runs(model, LOCATING["kinds"])
        with open_display(title, steps, (), unit="layer") as display:
            content = located(policy, facts, seed=config.seed, advance=advancing(display))
    else:
        with open_display(title, num_layer_runs(model, window=config.window), (), unit="layer") as display:
            content = look(
                policy,
                config.prompt,
                config.subject,
                config.answer,
                noise=config.noise,
                num_samples=config.num_samples,
                window=config.window,
                seed=config.seed,
                advance=advancing(display),
            )
    content["model"] = config.policy.init
    (folder / "trace.json").write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")
    write_page(folder, content)
    print(f"\n{as_text(content)}\n\ndone: {folder}  (page: {folder / 'trace.html'})")


def located(
    policy: Policy, facts: Sequence[Fact], *, seed: int = 0, advance: Any = lambda count: None
) -> dict[str, Any]:
    """Return the mean effect of each layer's feed-forward part at all of the subject's tokens, over some facts."""
    best, effects = locate(Reader(policy), facts, seed=seed, advance=advance)
    return {"facts": len(facts), "layer": best, "mean_effects": effects}


def look(
    policy: Policy,
    prompt: str,
    subject: str,
    answer: str = "",
    *,
    noise: float = 3.0,
    num_samples: int = 10,
    window: int = 0,
    seed: int = 0,
    advance: Any = lambda count: None,
) -> dict[str, Any]:
    """Return what trace.json holds of one prompt.

    Args:
        policy: The model.
        prompt: With {} in the subject's place, or with the subject in it.
        subject: What it is about.
        answer: What follows; '' for what the model says.
        noise: Standard deviation of the noise.
        num_samples: Draws of it.
        window: Layers restored together; 0 for a fifth.
        seed: Seed of the noise.
        advance: Called with the layers that ran; `num_layer_runs` in all.

    Raises:
        UserError: If the subject is not in the prompt.
    """
    policy.model.eval()
    fact, reader = _one(prompt, subject, answer), Reader(policy)
    marked = mark_subject(policy.tokenizer, fact.prompt, fact.subject)
    wanted = answer_id(reader, fact, marked)
    options: dict[str, Any] = {"noise": noise, "num_samples": num_samples, "window": window, "seed": seed}
    found = causal_trace(reader, fact, advance=advance, **options)
    lens = logit_lens(reader, marked.ids, wanted)
    return {
        "prompt": fact.text,
        "subject": fact.subject,
        "subject_places": list(found.subject),
        "tokens": list(found.tokens),
        "answer": found.answer,
        "p_clean": found.clean,
        "p_corrupted": found.corrupted,
        "noise": noise,
        "window": found.window,
        "effects": {kind: table.tolist() for kind, table in found.effects.items()},
        "subject_effects": {kind: means.tolist() for kind, means in found.together.items()},
        "lens": {"words": lens.words, "shares": lens.shares.tolist(), "answer": lens.answer.tolist()},
        "attribution": attribution(reader, marked.ids, wanted),
        "attention": {layer: maps.tolist() for layer, maps in attention_maps(reader, marked.ids).items()},
    }


def as_text(content: Mapping[str, Any]) -> str:
    """Format the effect of each layer at the subject's tokens together and at the prompt's last token."""
    if "mean_effects" in content:
        lines = [
            f"{content['facts']} facts: most comes back at layer {content['layer']} (mlp, all tokens of the subject)"
        ]
        return "\n".join(
            [*lines, *(f"layer {n:>3}  {e:+.4f}" for n, e in enumerate(content["mean_effects"]))]
        )
    lines = [
        f"{content['prompt']!r} -> {content['answer']!r}: p {content['p_clean']:.4f}, with noise on "
        f"{content['subject']!r} {content['p_corrupted']:.4f}",
        "",
        "what comes back when states are restored: of the subject's tokens together, and of the prompt's last token:",
        f"{'layer':>5}{'hidden':>10}{'mlp':>10}{'attention':>11}{'hidden, end':>13}  the layer would say",
    ]
    effects, together = content["effects"], content["subject_effects"]
    for n in range(len(effects["hidden"])):
        said = content["lens"]["words"][n][-1].strip()
        lines.append(
            f"{n:>5}{together['hidden'][n]:>+10.4f}{together['mlp'][n]:>+10.4f}"
            f"{together['attention'][n]:>+11.4f}{effects['hidden'][n][-1]:>+13.4f}  {said}"
        )
    return "\n".join(lines)


def write_page(folder: Path, content: Mapping[str, Any]) -> None:
    """Write trace.html."""
    figures: list[dict[str, Any]] = []
    if "mean_effects" in content:
        named = [(f"layer {n}", value) for n, value in enumerate(content["mean_effects"])]
        title = "Mean indirect effect of each layer's feed-forward part at all of the subject's tokens"
        figures.append({"title": title, "svg": bars(named, title=title), "note": ""})
        heading = f"{content['facts']} facts: most comes back at layer {content['layer']}"
    else:
        heading = f"{content['prompt']} → {content['answer']}"
        figures += _figures(content)
    page = render(
        "trace.html", title=f"Inside {content['model']}", heading=heading, content=content, figures=figures
    )
    (folder / "trace.html").write_text(page, encoding="utf-8", errors="backslashreplace")


def _figures(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    tokens, count = content["tokens"], len(content["effects"]["hidden"])
    first, last = content["subject_places"]
    layers = [f"layer {n}" for n in range(count)]
    options: dict[str, Any] = {"rows": layers, "marked": range(first, last + 1)}
    figures = []
    for kind, table in content["effects"].items():
        title = (
            f"Causal trace: probability of {content['answer']!r} that a restored state brings back, {kind}"
        )
        note = "" if kind == "hidden" else f"{content['window']} neighbouring layers restored together"
        own = [[*row, whole] for row, whole in zip(table, content["subject_effects"][kind], strict=True)]
        columns = [*tokens, "(subject, together)"]
        svg = heat_map(own, columns, title=title, colour=KIND_COLOURS[kind], **options)
        figures.append({"title": title, "svg": svg, "note": note})
    title = "Logit lens: what each layer would say, were it the last"
    lens = content["lens"]
    svg = heat_map(lens["shares"], tokens, title=title, texts=lens["words"], **options)
    figures.append({"title": title, "svg": svg, "note": "Shade: probability of the word."})
    title = f"Direct logit attribution: what each part adds to the logit of {content['answer']!r}"
    figures.append(
        {"title": title, "svg": bars(list(content["attribution"].items()), title=title), "note": ""}
    )
    title = "Attention from the prompt's last token, mean over heads"
    rows = [f"layer {layer}" for layer in content["attention"]]
    means = [
        [sum(head[-1][place] for head in maps) / len(maps) for place in range(len(tokens))]
        for maps in content["attention"].values()
    ]
    if means:
        svg = heat_map(means, tokens, rows=rows, title=title, marked=range(first, last + 1))
        figures.append({"title": title, "svg": svg, "note": "Every head and token: trace.json."})
    return figures


PROGRAM = Program(config_class=TraceConfig, main=main, plan=plan, check=check, positional="policy.init")
