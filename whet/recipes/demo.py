"""`whet demo`: the whole pipeline in a minute: random weights, fine-tuning, reinforcement, and an evaluation of
each."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from whet.cli import Program
from whet.config import dump_yaml
from whet.eval.evaluate import take_problems
from whet.eval.measure import EvalResult, evaluate
from whet.eval.record import describe_weights, write_result
from whet.eval.show import print_result, show_metric
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.recipes import rl as rl_recipes
from whet.recipes import sft as sft_recipes
from whet.report.html import write_page
from whet.report.markdown import write_report
from whet.report.part import read_part
from whet.report.stages import overview
from whet.storage.folder import dated, open_run
from whet.tasks.base import TaskConfig
from whet.tasks.made.arithmetic import Arithmetic
from whet.telemetry.display import advancing, open_display
from whet.telemetry.provenance import write_environment
from whet.train import rl, sft

STAGES = {
    "base": "random weights",
    "sft": "after fine-tuning on worked solutions, half of which skip the working",
    "rl": "after reinforcement: right answers pay (and, a little, the format)",
}
NUM_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The demo: sums of two-digit numbers, from random weights to a model that thinks before it answers."""

    out: str = ""
    """Output folder; empty for runs/demo-DATE-TIME."""
    seed: int = 0
    """Seed of all random choices."""
    num_problems: int = 512
    """Held-out problems of the test split."""
    num_samples: int = 16
    """Samples per problem."""
    split: str = "test"
    """Split to evaluate on; the recipe was tuned on dev."""
    num_threads: int = 2
    """CPU threads."""

    def __post_init__(self) -> None:
        for name in ("num_problems", "num_samples", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 1 or more")


def main(config: DemoConfig) -> None:
    """Train, evaluate, and print the results."""
    console = Console()
    folder = Path(config.out or dated("demo"))
    open_run(folder, dump_yaml(config), resumable=False)
    torch.set_num_threads(config.num_threads)
    console.print(_introduction())
    began = time.perf_counter()
    sft_config = replace(sft_recipes.demo(), out=str(folder / "sft"), seed=config.seed)
    rl_config = rl_recipes.demo()
    policy_from_sft = replace(rl_config.policy, init=str(folder / "sft"))
    rl_config = replace(rl_config, out=str(folder / "rl"), policy=policy_from_sft, seed=config.seed)
    results: dict[str, EvalResult] = {}
    base = load_policy(sft_config.policy, seed=config.seed)
    console.print(f"kernels: {write_environment(folder)['kernels']}")
    results["base"] = _measure(base, config, folder, "base", sft_config.policy)
    results["sft"] = _measure(sft.train(sft_config), config, folder, "sft", PolicyConfig(init=sft_config.out))
    results["rl"] = _measure(rl.train(rl_config), config, folder, "rl", PolicyConfig(init=rl_config.out))
    seconds = time.perf_counter() - began
    _write_summary(folder, results, seconds)
    print()
    metrics = {stage: result.metrics for stage, result in results.items()}
    print_result(metrics, len(results["rl"].problems), config.num_samples)
    _show_samples(console, results)
    for part in ("sft", "rl"):
        write_report(folder / part)
    found = overview([read_part(folder / "eval" / stage, stage) for stage in results])
    headline = found["headline"] if found else ""
    _write_story(folder, results, config, headline)
    write_page(folder, folder / "report.html")
    console.print(Text(f"{headline}.", style="bold"))
    console.print(
        Text(
            f"{seconds:.0f} s with {config.num_threads} threads. Open {folder / 'report.html'} in a browser: "
            "the curves, and every completion before and after."
        )
    )


def _introduction() -> Panel:
    text = Text()
    text.append("A model learns to think\n\n", style="bold")
    text.append(
        "A 0.4 M parameter Llama starts from random weights. It reads worked sums (47+85+39=, digit by digit: "
        "7+5=12+9=21, 2+4=6+8=14+3=17, so 171), of which half skip the working: it can then work an answer out, "
        "but often does not bother. Then it practises alone: it tries, and right answers pay (GRPO).\n\n"
    )
    for number, (name, what) in enumerate(STAGES.items(), start=1):
        text.append(f"  {number}  {name:<5}", style="bold")
        text.append(f"{what}\n")
    text.append("\nEach stage is measured on the same held-out problems, which no training ever sees.")
    return Panel(text, padding=(1, 2), width=88)


def _measure(
    policy: Policy, config: DemoConfig, folder: Path, stage: str, source: PolicyConfig
) -> EvalResult:
    """Evaluate one stage on the held-out problems and keep every completion."""
    task = Arithmetic()
    problems = take_problems(task, config.split, config.num_problems)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=rl_recipes.demo().sampling.max_new_tokens)
    total = len(problems) * (config.num_samples + 1)
    with open_display(f"measure {stage}: {STAGES[stage]}", total, (), unit="completion") as display:
        result = evaluate(
            policy,
            task,
            problems,
            num_samples=config.num_samples,
            sampling=sampling,
            seed=config.seed,
            on_finished=advancing(display),
        )
    target = folder / "eval" / stage
    target.mkdir(parents=True)
    identity: dict[str, object] = {
        "protocol": policy.protocol(),
        "task": asdict(TaskConfig()),
        "split": config.split,
        "sampling": asdict(sampling),
        "answer_from": "schema",
        "precision": "float32",
        "seed": config.seed,
        "num_samples": config.num_samples,
    }
    write_result(target, result, label=stage, identity=identity, model=describe_weights(source, policy))
    return result


def _write_summary(folder: Path, results: Mapping[str, EvalResult], seconds: float) -> None:
    """Write summary.json: for each stage the means by name, and their intervals."""
    content: dict[str, object] = {"seconds": round(seconds, 1)}
    for stage, result in results.items():
        means = {name: interval.mean for name, interval in result.metrics.items()}
        intervals = {name: [interval.low, interval.high] for name, interval in result.metrics.items()}
        content[stage] = {**means, "intervals_95": intervals}
    (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n")


def _show_samples(console: Console, results: Mapping[str, EvalResult]) -> None:
    """Print the first sample of the first problems, before and after: not selected, just the first."""
    rows: Sequence[int] = range(min(NUM_SHOWN, len(results["rl"].problems)))
    text = Text("\nThe first sample of the first held-out problems, before and after\n\n", style="bold")
    for row in rows:
        problem = results["rl"].problems[row]
        text.append(f"{problem.prompt}", style="bold cyan")
        text.append(f"   (gold {problem.answer})\n", style="dim")
        for stage in results:
            judged = results[stage].samples[row][0]
            is_correct = judged.grade.is_correct
            text.append(f"  {stage:<5}")
            text.append("right  " if is_correct else "wrong  ", style="green" if is_correct else "red")
            text.append(f"{judged.text!r}\n" if stage == "base" else f"{judged.text}\n")
    console.print(text)


def _write_story(folder: Path, results: Mapping[str, EvalResult], config: DemoConfig, headline: str) -> None:
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
        "# A model learns to think",
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
        lines.append(f"{results['rl'].problems[row].prompt}  (gold {results['rl'].problems[row].answer})")
        for stage, result in results.items():
            judged = result.samples[row][0]
            lines.append(f"  {stage:<5}{'right' if judged.grade.is_correct else 'wrong'}  {judged.text!r}")
    lines += [
        "```",
        "",
        "Details: [fine-tuning](sft/report.md), [reinforcement](rl/report.md);",
        "every completion: eval/*/eval_samples.jsonl.",
        "",
    ]
    (folder / "report.md").write_text("\n".join(lines), encoding="utf-8")


PROGRAM = Program(config_class=DemoConfig, main=main)
