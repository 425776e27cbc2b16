"""`whet demo --real`: a pretrained model, SmolLM2-135M-Instruct, learns word problems from some worked solutions and by
reinforcement; then what that is beside brevity, what it carries over to, what it forgot, twenty facts rewritten, the
weight that it cannot do without, and the same answers in llama.cpp. One page."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from whet.algo.packing import pack
from whet.compress.export import export as exporting
from whet.compress.quantize.measure import SuperWeight, find_super_weights
from whet.editing.edit import open_editor, write_and_measure
from whet.editing.editor import MethodConfig
from whet.editing.facts import read_facts
from whet.eval.compare.paired import compare_scores, score_problems
from whet.eval.evaluate import take_problems
from whet.eval.grade import Judged
from whet.eval.measure import EvalResult
from whet.eval.probe.off_domain import ModelProbe, probe_model
from whet.eval.probe.probe import read_text
from whet.eval.record import as_row
from whet.eval.show import show_metric
from whet.generate.engine import Request
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.model.lora.side import LoRAConfig
from whet.recipes import rl as rl_recipes
from whet.recipes import sft as sft_recipes
from whet.recipes.stages import Exam, write_summary
from whet.report.html import CHAPTERS, write_page
from whet.report.markdown import write_report
from whet.report.part import read_part
from whet.report.stages import BESIDE, overview
from whet.serve.stream import chat_prompt
from whet.storage.folder import open_run
from whet.tasks.base import load_task
from whet.telemetry.display import advancing, open_display
from whet.telemetry.provenance import write_environment
from whet.train import rl, sft
from whet.train.data.demonstrations import sequences_of
from whet.train.session import next_steps
from whet.types import Problem, UserError

FACTS = Path(__file__).parent / "data" / "facts.jsonl"
"""Fifty facts after source 004, with what each model should still say of their neighbours."""
NUM_FACTS = 20
EXAM_TOKENS = 64
"""Longest answer when it is measured: more than what is trained with, for the base's answers are longer."""
TALK = (
    "Tom has 14 apples. Then Tom gets 9 more. How many apples does Tom have now?",
    "Rosa collected 8 eggs. Omar collected 13. How many eggs did they collect together?",
    "Which city is the capital of Portugal?",
)
"""A problem of a kind that is trained on, one of another kind, and a question of another world."""
BRIEFLY = "Answer in one short sentence that shows the calculation, such as: 2 + 3 = 5 cats."
STAGES = {
    "base": "SmolLM2-135M-Instruct as it is (dequantised Q4_1), asked as its own template asks",
    "brief": "the same, asked for one short sentence with its calculation",
    "sft": "after fine-tuning on a few hundred worked solutions, for a minute",
    "rl": "after reinforcement: right answers pay, nothing else",
    "base_others": "other kinds of problems, of other people and things: before",
    "sft_others": "after fine-tuning",
    "rl_others": "and after reinforcement: none of them was trained on",
}
TRAINED = {"sft": "fine-tuning", "rl": "reinforcement"}
"""The stages that train."""
TOLD = (
    "A real model learns to reason",
    "SmolLM2-135M-Instruct can chat, and gets one word problem in seven right. It reads a few hundred worked "
    "solutions, once. Then it practises alone: it tries each problem eight times, and right answers pay (GRPO).",
)
EQUATION = re.compile(
    r"(?<![\d.,])(\d+) ?([-+*x×/÷−]) ?(\d+)(?: ?([-+−]) ?(\d+))? ?= ?(?:\$ ?)?(\d+)(?![\d,]|\.\d)"
)


@dataclass(kw_only=True)
class Chapter:
    """One part of the page.

    Attributes:
        title: Heading.
        text: What was done and what it shows, in sentences.
        head: Names of the table's columns; () for no table.
        rows: Its cells.
        talks: Questions, each with what was answered: (who, text).
        note: What limits it.
    """

    title: str
    text: str
    head: Sequence[str] = ()
    rows: list[list[str]] = field(default_factory=list)
    talks: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""


def run(
    folder: Path,
    text: str,
    console: Console,
    *,
    num_problems: int,
    num_samples: int,
    num_steps: int,
    split: str,
    lora: bool,
    seed: int,
) -> None:
    """Train, measure, look inside, and write the page.

    Args:
        folder: New folder of it all.
        text: config.yaml.
        console: What it prints to.
        num_problems: Held-out problems of each kind.
        num_samples: Samples per problem.
        num_steps: Steps of reinforcement; 0 for the recipe's.
        split: Split of the problems.
        lora: Train adapters.
        seed: Seed of all random choices.

    Raises:
        UserError: If the model is not there.
    """
    lesson, config = sft_recipes.smollm2_words(), rl_recipes.smollm2_words()
    lesson = replace(lesson, out=str(folder / "sft"), seed=seed)
    taught = replace(config.policy, init=lesson.out)
    config = replace(
        config, out=str(folder / "rl"), policy=taught, seed=seed, num_steps=num_steps or config.num_steps
    )
    if lora:
        low_rank = LoRAConfig(rank=16)
        lesson = replace(lesson, lora=low_rank, optim=replace(lesson.optim, lr=10 * lesson.optim.lr))
        config = replace(config, lora=low_rank, optim=replace(config.optim, lr=10 * config.optim.lr))
    base = load_policy(lesson.policy, seed=seed)  # before a folder is made: it may not be there
    open_run(folder, text, resumable=False)
    console.print(Panel(_introduction(), padding=(1, 2), width=88, title=TOLD[0]))
    console.print(f"kernels: {write_environment(folder)['kernels']}")
    began, began_work = time.perf_counter(), time.process_time()
    others = replace(config.task, level=2)
    exam = Exam(
        folder=folder / "eval",
        config=config.task,
        task=load_task(config.task),
        split=split,
        num_samples=num_samples,
        sampling=SamplingParams(temperature=0.7, max_new_tokens=EXAM_TOKENS),
        seed=seed,
    )
    other_exam = replace(exam, config=others, task=load_task(others))
    problems = take_problems(exam.task, split, num_problems)
    other_problems = take_problems(other_exam.task, split, num_problems)
    results: dict[str, EvalResult] = {}

    def measure(policy: Policy, source: PolicyConfig, stage: str, told: str = "") -> None:
        policy.expect("number")
        beside = {BESIDE: told} if told else {}
        on, rows = (other_exam, other_problems) if stage.endswith("others") else (exam, problems)
        results[stage] = on.measure(policy, source, stage, STAGES[stage], rows, **beside)

    measure(base, lesson.policy, "base")
    measure(base, lesson.policy, "base_others", "Of other kinds the base gets")
    asked = replace(lesson.policy, system_prompt=BRIEFLY)
    measure(load_policy(asked, seed=seed), asked, "brief", "Asked for one short sentence, the base gets")
    after, seconds = base, {}
    for stage, train, out in (
        ("sft", lambda: sft.train(lesson), lesson.out),
        ("rl", lambda: rl.train(config), config.out),
    ):
        began_stage = time.perf_counter(), time.process_time()
        train()
        seconds[stage] = time.perf_counter() - began_stage[0], time.process_time() - began_stage[1]
        trained = PolicyConfig(init=out, max_rows=config.policy.max_rows)
        after = load_policy(trained, seed=seed, merge=True)  # facts are written into whole weights
        measure(after, trained, stage)
        measure(after, trained, f"{stage}_others", f"Of other kinds it gets, after {TRAINED[stage]},")
    results = {stage: results[stage] for stage in STAGES}
    tries = config.num_steps * config.num_prompts * config.group_size
    amount = {
        "sft": f"{lesson.num_steps * lesson.batch_size:,} worked solutions",
        "rl": f"{tries:,} tries of its own",
    }
    chapters = [
        _talks(base, after),
        _learning(results, amount, seconds),
        _transfer(results),
        _forgetting(base, after, seed),
    ]
    for write in (
        lambda: _super_weight(base, exam.task.problems("train")),
        lambda: _exported(config.out, folder / "gguf"),
        lambda: _facts(after, config.out, seed),  # last: it changes the model
    ):
        chapters.append(write())
    (folder / CHAPTERS).write_text(json.dumps([vars(chapter) for chapter in chapters], indent=1) + "\n")
    total, work = time.perf_counter() - began, time.process_time() - began_work
    write_summary(folder, results, total, work)
    for stage in TRAINED:
        write_report(folder / stage)
    found = overview([read_part(folder / "eval" / stage, stage) for stage in results])
    headline = found["headline"] if found else ""
    for chapter in chapters:
        _tell(console, chapter)
    _write_markdown(folder, headline, results, chapters)
    write_page(folder, folder / "report.html")
    console.print(f"\n[bold]{escape(headline)}.[/bold]")
    console.print(
        f"{total / 60:.0f} minutes, {sum(clock for clock, _ in seconds.values()) / 60:.0f} of them training; "
        f"{work:,.0f} s of processor time. Open {folder / 'report.html'} in a browser: all of this, the curves, and "
        "every completion.",
        soft_wrap=True,
        highlight=False,
    )
    print(next_steps(config))  # not by the console, which would wrap it: it is pasted


def _introduction() -> str:
    width = max(map(len, STAGES))
    lines = [f"  {name:<{width}}  {told}" for name, told in STAGES.items()]
    return "\n".join([TOLD[1], "", *lines, "", "Every stage is measured on held-out problems only."])


# --- chapters -----------------------------------------------------------------------------------------------------


def answers(policy: Policy, questions: Sequence[str], max_new_tokens: int = 64) -> list[str]:
    """Return a model's greedy answers to questions of a chat."""
    prompts = [chat_prompt(policy, [{"role": "user", "content": question}]) for question in questions]
    params = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens)
    drawn = policy.engine().generate([Request(prompt_ids=ids, seeds=(0,)) for ids in prompts], params)
    return [
        policy.completion_text(ids, done.ids).strip() + (" …" if done.finish_reason == "length" else "")
        for ids, (done,) in zip(prompts, drawn, strict=True)
    ]


def _dialogues(questions: Sequence[str], **said: Sequence[str]) -> list[dict[str, Any]]:
    """Lay out answers by question."""
    return [
        {"question": question, "answers": [[who, texts[n]] for who, texts in said.items()]}
        for n, question in enumerate(questions)
    ]


def _talks(base: Policy, after: Policy) -> Chapter:
    return Chapter(
        title="A chat, before and after",
        text="Greedy answers, not selected: a problem of a kind that was trained on, one of another kind, and a "
        "question that has nothing to do with it.",
        talks=_dialogues(TALK, before=answers(base, TALK), after=answers(after, TALK)),
    )


def equations(text: str) -> tuple[int, int]:
    """Count the equations of whole numbers that a text states, such as `14 + 9 = 23`, and the true ones among them."""
    stated = true = 0
    for match in EQUATION.finditer(text):
        a, sign, b, more, c, result = match.groups()
        x, y = int(a), int(b)
        if sign in "/÷":
            if not y or x % y:
                continue  # a rounded quotient is neither right nor wrong
            value = x // y
        else:
            value = x + y if sign == "+" else x - y if sign in "-−" else x * y
        if more:
            value += int(c) if more == "+" else -int(c)
        stated += 1
        true += value == int(result)
    return stated, true


def _learning(
    results: dict[str, EvalResult], amount: dict[str, str], seconds: dict[str, tuple[float, float]]
) -> Chapter:
    """Say what is brevity, and what is reasoning.

    Args:
        results: Evaluations by stage.
        amount: What each stage that trains has read or written, in words.
        seconds: Of the clock and of processors, by stage.
    """
    rows = []
    for stage in ("base", "brief", *TRAINED):
        found = results[stage]
        texts = [done.text for row in found.samples for done in row]
        counted = [equations(text) for text in texts]
        stated, true = sum(s for s, _ in counted), sum(t for _, t in counted)
        some = sum(1 for s, _ in counted if s) / len(counted)
        rows.append(
            [
                stage,
                *(_metric(found, name) for name in ("pass@1", "greedy", "truncated", "completion_tokens")),
                f"{some:.0%}",
                f"{true / stated:.0%} of {stated:,}" if stated else "none",
            ]
        )
    right, tokens = (
        {stage: results[stage].metrics[name].mean for stage in ("base", "brief", *TRAINED)}
        for name in ("pass@1", "completion_tokens")
    )
    took = ", then ".join(
        f"{amount[stage]} in {clock / 60:.1f} minutes by the clock ({work:,.0f} s of processor time)"
        for stage, (clock, work) in seconds.items()
    )
    return Chapter(
        title="Reasoning, or brevity?",
        text=f"It had {took}. Asked for one short sentence, the base writes {tokens['brief']:.0f} tokens instead of "
        f"{tokens['base']:.0f}, and gets {right['brief']:.0%} right instead of {right['base']:.0%}. Fine-tuned, it "
        f"writes {tokens['sft']:.0f}, and gets {right['sft']:.0%} right; reinforced {tokens['rl']:.0f}, and "
        f"{right['rl']:.0%}. The last columns count the equations that answers state, and the true ones among them: "
        "arithmetic by itself.",
        head=(
            "",
            "right (pass@1)",
            "greedy",
            "cut off",
            "tokens",
            "state an equation",
            "true among those stated",
        ),
        rows=rows,
    )


def _metric(found: EvalResult, name: str) -> str:
    return show_metric(name, found.metrics[name]).replace("\n", " (") + ")"


def _scores(found: EvalResult) -> dict[str, list[float | None]]:
    def rows(done: Sequence[Judged], problem: Problem) -> list[dict[str, Any]]:
        return [as_row(problem, n, one) for n, one in enumerate(done)]

    samples = [rows(row, problem) for problem, row in zip(found.problems, found.samples, strict=True)]
    greedy = [rows([done], problem)[0] for problem, done in zip(found.problems, found.greedy, strict=True)]
    return score_problems(samples, greedy, len(samples[0]))


SIGNS = {"+": "a + b", "-": "a - b", "*": "a × b", "/": "a ÷ b", "+-": "a + b - c", "-+": "a - b + c"}
"""What the working of a problem computes, as the page names it."""


def _gains(told: str, metric: str, scores: Sequence[Sequence[float | None]]) -> list[str]:
    """Return a row of the table of what carries over: the stages, the last compared with each of those before."""
    *earlier, last = scores
    shares, gains = [], []
    for one in earlier:
        found = compare_scores(metric, one, last)
        assert found is not None
        gain = found.difference
        shares = [*shares[:-1], f"{found.a:.1%}", f"{found.b:.1%}"]
        gains.append(f"{100 * gain.mean:+.1f} ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})")
    return [told, metric, *shares, *gains]


def _transfer(results: dict[str, EvalResult]) -> Chapter:
    """Compare the stages by problem, on kinds that were trained on, and on others."""
    rows = []
    for told, end in (("kinds that were trained on", ""), ("other kinds", "_others")):
        stages = [_scores(results[stage + end]) for stage in ("base", *TRAINED)]
        rows += [_gains(told, metric, [one[metric] for one in stages]) for metric in ("pass@1", "greedy")]
        problems = results["base" + end].problems
        signs = ["".join(re.findall(" ([-+*/]) ", problem.solution)) for problem in problems]
        for kind in sorted(set(signs), key=lambda text: (len(text), text)):
            places = [place for place, text in enumerate(signs) if text == kind]
            told_kind = f"{len(places)} of these: {SIGNS.get(kind, kind)}"
            picked = [[one["pass@1"][place] for place in places] for one in stages]
            rows.append(_gains(told_kind, "pass@1", picked))
    return Chapter(
        title="What carries over",
        text="The other kinds of problems (adding what two people have, how many more, selling and getting, dividing) "
        "have other names and things, too. None was trained on. Differences are paired, problem by problem, with "
        "95 % intervals.",
        head=(
            "problems",
            "measure",
            "base",
            "fine-tuned",
            "reinforced",
            "points, both stages",
            "points, reinforcement",
        ),
        rows=rows,
    )


def _forgetting(base: Policy, after: Policy, seed: int) -> Chapter:
    """Ask what has nothing to do with word problems."""
    found: list[ModelProbe] = []
    for policy, name in ((base, "before"), (after, "after")):
        with open_display(f"what it forgot: {name}", 24, (), unit="completion") as display:
            found.append(
                probe_model(
                    policy,
                    name,
                    read_text(""),
                    num_samples=0,
                    sampling=SamplingParams(temperature=0.0, max_new_tokens=64),
                    stride=0,
                    seed=seed,
                    on_finished=advancing(display),
                )
            )
    rows: list[list[str]] = []
    names: tuple[str, ...] = ()
    for probe in found:
        assert probe.perplexity is not None
        by_kind: dict[str, list[bool]] = {}
        for prompt, (reply,) in probe.replies.items():
            if reply.is_right is not None:
                by_kind.setdefault(prompt.kind, []).append(reply.is_right)
        kinds = [f"{sum(row)} of {len(row)}" for row in by_kind.values()]
        right = [one for row in by_kind.values() for one in row]
        rows.append(
            [probe.name, f"{probe.perplexity.perplexity:.2f}", f"{sum(right)} of {len(right)}", *kinds]
        )
        names = tuple(by_kind)
    return Chapter(
        title="What it forgot",
        text="Perplexity of a page of English prose, and questions of knowledge, science, logic and arithmetic.",
        head=("", "perplexity", "right", *names),
        rows=rows,
        note="So few questions show a collapse, not a small loss; `whet probe` asks more.",
    )


def _super_weight(base: Policy, problems: Sequence[Problem]) -> Chapter:
    """Find the weights that the model does not work without, and show what it says without the first."""
    title = f"One number of {sum(parameter.numel() for parameter in base.model.parameters()):,}"
    rows = [sequence for problem in islice(problems, 16) for sequence in sequences_of(base, problem)]
    micros = pack(rows, token_budget=2048, device=base.device).micro_batches
    found: list[SuperWeight] = find_super_weights(base.model, micros, name="smollm2")
    if not found:
        return Chapter(title=title, text="No super weight was found: no single number breaks this model.")
    first = found[0]
    before = answers(base, TALK[:1] + TALK[2:])
    weight = base.model.get_parameter(first.name)
    with torch.no_grad():
        weight[first.row, first.column] = 0.0
    without = answers(base, TALK[:1] + TALK[2:])
    with torch.no_grad():
        weight[first.row, first.column] = first.value
    return Chapter(
        title=title,
        text="Some numbers carry more than others (super weights, arXiv:2411.07191). Set to zero, one of them takes "
        "the model's speech away; then it is put back.",
        head=("parameter", "row, column", "value", "loss with it", "loss without it (nats a token)"),
        rows=[
            [
                one.name,
                f"{one.row}, {one.column}",
                f"{one.value:.3f}",
                f"{one.loss:.2f}",
                f"{one.broken_loss:.2f}",
            ]
            for one in found
        ],
        talks=_dialogues(TALK[:1] + TALK[2:], **{"with it": before, "without it": without}),
        note="From the second row on, the loss without it is that without those above it, too."
        if found[1:]
        else "",
    )


def _exported(model: str, out: Path) -> Chapter:
    """Write the model for llama.cpp, and let that answer."""
    title = "The same answers in llama.cpp"
    config = exporting.ExportConfig(
        policy=PolicyConfig(init=model, device="cpu"), to="gguf", dtype="q8_0", out=str(out), num_prompts=8
    )
    try:
        report = exporting.export(config)
    except UserError as error:
        return Chapter(title=title, text=f"Not written: {error}")
    return Chapter(
        title=title,
        text=f"The trained model as one file in 8 bits a weight: {out / 'model.gguf'}. What the program that it is for "
        "answers to held-out problems, beside what whet answers:",
        head=("report",),
        rows=[[line.strip()] for line in exporting.lines(report)],
    )


def _facts(after: Policy, source: str, seed: int) -> Chapter:
    """Write twenty facts into the trained model at once."""
    facts = read_facts(FACTS)[:NUM_FACTS]
    shown = facts[:: max(1, len(facts) // 3)][:3]
    questions = [f"Go on: {fact.text}" for fact in shown]
    before = answers(after, questions, 24)
    editor = open_editor(after, source)
    with open_display("write facts", len(facts), (), unit="fact") as display:
        content = write_and_measure(
            editor, facts, MethodConfig(), seed=seed, tell=display.begin, advance=advancing(display)
        )
    rows = []
    for name, told in (
        ("efficacy_accuracy", "greedy decoding writes the new fact"),
        ("first_token_rank_1", "its first token is the likeliest (the source's success)"),
        ("paraphrase_accuracy", "so it does when asked in other words"),
        ("neighbourhood_kept", "neighbouring facts: the same likeliest token as before"),
    ):
        row = content["metrics"].get(name)
        if row is not None:
            low, high = row["after"]["low"], row["after"]["high"]
            interval = "" if low is None else f" ({low:.0%} to {high:.0%})"
            rows.append([told, f"{row['before']:.0%}", f"{row['after']['mean']:.0%}{interval}"])
    return Chapter(
        title=f"{len(facts)} facts, rewritten",
        text="MEMIT writes them all at once into a few matrices, whose layers it finds by causal tracing. All are "
        "false, as those of source 004: so one sees where an answer is from.",
        head=("", "before", "after"),
        rows=rows,
        talks=_dialogues(questions, before=before, after=answers(after, questions, 24)),
    )


# --- what is written ------------------------------------------------------------------------------------------------


def _tell(console: Console, chapter: Chapter) -> None:
    """Print a chapter."""
    console.print(f"\n[bold]{escape(chapter.title)}[/bold]")
    console.print(escape(chapter.text), highlight=False)
    if chapter.head:
        table = Table(*map(escape, chapter.head), box=None, header_style="dim", pad_edge=False)
        for row in chapter.rows:
            table.add_row(*map(escape, row))
        console.print(table, highlight=False)
    for talk in chapter.talks:
        console.print(f"  [cyan]{escape(talk['question'])}[/cyan]", highlight=False)
        for who, text in talk["answers"]:
            console.print(f"    {escape(who)}: {escape(text)}", highlight=False)
    if chapter.note:
        console.print(f"[dim]{escape(chapter.note)}[/dim]", highlight=False)


def _write_markdown(
    folder: Path, headline: str, results: dict[str, EvalResult], chapters: Sequence[Chapter]
) -> None:
    """Write report.md: the headline, the stages, and the chapters."""
    shown = ("pass@1", "greedy", "pass@4", "truncated", "completion_tokens")
    names = [name for name in shown if name in results["rl"].metrics]
    count, samples = len(results["rl"].problems), len(results["rl"].samples[0])
    lines = [
        f"# {TOLD[0]}",
        "",
        f"**{headline}.**",
        "",
        f"{count} held-out problems x {samples} samples; in brackets 95 % intervals over problems.",
        "",
        *_markdown_table(
            ["", *(name.replace("_", " ") for name in names)],
            [[stage, *(_metric(found, name) for name in names)] for stage, found in results.items()],
        ),
        "",
        *(f"- `{stage}`: {told}" for stage, told in STAGES.items()),
        "",
        "![learning curve](rl/plots/rl_learning.png)",
    ]
    for chapter in chapters:
        lines += ["", f"## {chapter.title}", "", chapter.text]
        if chapter.head:
            lines += ["", *_markdown_table(list(chapter.head), chapter.rows)]
        for talk in chapter.talks:
            lines += ["", f"> {talk['question']}", ""]
            lines += [f"- {who}: {' '.join(text.split())}" for who, text in talk["answers"]]
        if chapter.note:
            lines += ["", chapter.note]
    (folder / "report.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    written = ["| " + " | ".join(row) + " |" for row in cells]
    return [written[0], "|" + "---|" * len(head), *written[1:]]
