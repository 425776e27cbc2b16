"""`whet quantize`: measures each layer of a model on a task, and stores it in 4, 8 or 16 bits under a budget."""

from __future__ import annotations

import csv
import itertools
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from whet.algo.packing import TrainingSequence, pack
from whet.cli import Program
from whet.compress.quantize import page
from whet.compress.quantize.methods import Method
from whet.compress.quantize.select import check_floor, parse_budget, total
from whet.compress.quantize.study import (
    MATRICES,
    WORK,
    Amount,
    Scope,
    Study,
    count_steps,
    expected_seconds,
    num_points,
)
from whet.config import dump_yaml
from whet.eval.evaluate import fitting_problems, take_problems
from whet.eval.measure import evaluate
from whet.generate.engine import Request
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.model.files import read_json
from whet.model.lora.files import find_model
from whet.model.quant import QUANTIZATION, packed_parts, packed_size, places
from whet.model.transformer import LanguageModel
from whet.storage.folder import beside, check_folder, next_line, open_run
from whet.tasks.base import TaskConfig, load_task, task_of
from whet.telemetry.display import advancing, clock, open_display
from whet.telemetry.provenance import write_environment
from whet.train.data.demonstrations import demonstrate, kind_of, sequences_of
from whet.types import MicroBatch, Problem, Task, UserError

NO_MODEL = "MODEL"
TOKEN_BUDGET = 2048
"""Tokens that a pass reads at once."""
TIMED_TEXTS = 32
"""Completions that are timed before; one of a few takes longer than one of many."""
TIMED_TOKENS = 800
"""Of a pass that is timed before."""
Completions = Literal["own", "data"]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """A model whose layers are stored in 4, 8 or 16 bits, each as measured on a task."""

    out: str
    """Output folder: a model folder, with quantization.json, the measurements, plots and a page."""
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(init=NO_MODEL))
    """The model."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """What the model is to remain good at: a task with answers, conversations or texts. Calibrated on its train split,
    compared on its test split. On the command line by default a run's own task."""
    budget: str = "4.5bits"
    """What the weights may take: bits for each weight of the layers (4.5bits; all NF4 takes 4.13), a share of the model
    in 16 bits (30%), or bytes of all weights (350MB, 1.2GiB)."""
    methods: tuple[Method, ...] = ("rtn", "gptq", "awq")
    """Ways to find NF4 codes that are tried for each layer: rtn (nearest codes), gptq, awq."""
    completions: Completions = "own"
    """Calibrate on what the model itself writes to a task's problems, or on their worked solutions. Conversations and
    texts are always read as they are."""
    num_calibration: int = 64
    """Rows of the train split that everything is measured and chosen on."""
    num_held_out: int = 64
    """Rows of the test split that choices are compared on."""
    num_problems: int = 64
    """Problems of the test split for pass@1 of the full model, all NF4 and the choice; 0 for none."""
    num_samples: int = 4
    """Completions per problem for pass@1."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How completions are drawn."""
    work: float = WORK
    """Multiply-adds that passes over text may take (a token through a matrix takes one for each weight); 1.5e13 is some
    ten minutes on two CPU cores. Of a model that is too large to measure all within it, KLs are measured on
    less text, and for one way to store each matrix. More where there is a GPU or a night."""
    random_seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the random choices of equal bytes."""
    seed: int = 0
    """Seed of completions and bootstrap."""

    def __post_init__(self) -> None:
        if self.policy.init == NO_MODEL and not Path(NO_MODEL).exists():
            raise ValueError(
                "no model: name a run folder, a Hugging Face folder or a hub name after the command"
            )
        for name in ("num_calibration", "num_held_out", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 1 or more")
        if self.num_problems < 0:
            raise ValueError(f"num_problems = {self.num_problems}: expected 0 (no pass@1) or more")
        if "rtn" not in self.methods:
            raise ValueError(
                f"methods = {','.join(self.methods)}: expected rtn among them, which the others are tried against"
            )
        if not 0 < self.work < math.inf:
            raise ValueError(f"work = {self.work}: expected multiply-adds above 0, such as 1.5e13")
        if self.policy.quantize != "none":
            raise ValueError("policy.quantize: whet quantize chooses by layer; leave it out")
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature = 0: greedy is measured anyway; expected above 0")
        parse_budget(self.budget, 1, 1, 0)


def on_own_task(config: QuantizeConfig, typed: Collection[str]) -> QuantizeConfig:
    """Return the config with the task that a run was trained on, where no option names one."""
    if any(name.partition(".")[0] == "task" for name in typed):
        return config
    return replace(config, task=task_of(config.policy.init) or config.task)


def main(config: QuantizeConfig) -> None:
    """Write the folder and print the tables.

    Raises:
        UserError: If the model is quantised already, the task does not fit it, or the budget is too small.
    """
    content, folder = quantize(config), Path(config.out)
    print(f"\n{page.as_text(content)}\n\ndone: {folder}  (page: {folder / 'quantize.html'})")
    file = ["whet", "export", config.out, "--to", "gguf", "--out", beside(config.out, "gguf")]
    print(next_line(["whet", "chat", config.out], ["whet", "serve", config.out], file))


def quantize(config: QuantizeConfig) -> dict[str, Any]:
    """Measure, choose and write the folder; return what its quantize.json holds.

    Raises:
        UserError: If the model is quantised already, the task does not fit it, or the budget is too small.
    """
    parts = _prepare(config)
    stored, policy, task, rows = parts.stored, parts.policy, parts.task, parts.rows
    model, graded, budget, numbers, fixed = (
        policy.model,
        parts.graded,
        parts.budget,
        parts.numbers,
        parts.fixed,
    )
    folder = Path(config.out)
    check_folder(folder, resumable=False)
    began = time.monotonic()

    num_texts = sum(map(len, rows.values()))
    title = f"quantize {config.policy.init} on {task.name} {config.task.path}".rstrip()
    with open_display(title, num_texts, (), unit="text") as display:
        display.begin("calibration text")
        advance = advancing(display)
        sequences = {split: _sequences(policy, problems, config, advance) for split, problems in rows.items()}
    if _writes(parts, config):
        seconds_each = (time.monotonic() - began) / num_texts
    else:
        _, seconds_each = _timed(parts, config)
    plan = _plan(parts, config, sequences, sequences["calibration"], seconds_each)
    print(f"{config.policy.init}: about {clock(plan.seconds)} from here; {plan.text()}")
    scope = plan.scope
    micros = {
        "calibration": _packed(policy, sequences["calibration"], scope.calibration),
        "held_out": _packed(policy, sequences["held_out"], scope.held_out),
    }
    steps = (
        count_steps(model, micros["calibration"][0], len(config.methods), scope, len(config.random_seeds))
        + len(graded) * (config.num_samples + 1) * 3
    )
    with open_display(f"quantize {config.policy.init}", steps, (), unit="measurement") as display:
        advance = advancing(display)

        def tell(phase: str, detail: Callable[[], str] | None = None) -> None:
            display.begin(phase, detail)
            if phase == MATRICES:  # the pace is that of the steps, not of what comes before them
                display.start(0)

        study = Study(
            model,
            micros["calibration"],
            micros["held_out"],
            sample=None if scope.is_exhaustive else _packed(policy, sequences["calibration"], scope.sample),
            methods=config.methods,
            name=config.policy.init,
            advance=advance,
            tell=tell,
        )
        choice = study.selected(budget)
        display.begin("choices")
        table = study.table(budget, config.random_seeds)
        display.begin("the front of bytes against KL")
        front = study.front(config.seed, scope.steps)
        answers = {}
        for name, own in (("full", {}), ("all NF4", study.all_nf4()), ("selected", choice)) if graded else ():
            display.begin(f"pass@1, {name}")
            with study.applied(own):
                answers[name] = _pass_at_1(policy, task, graded, config, advance)
    chosen = next(point for point in table if point.name == "selected")
    study.apply(choice)
    # Not earlier: if the long measurement is interrupted, no folder is left behind.
    open_run(folder, dump_yaml(config), resumable=False)
    write_environment(folder)
    _save(stored, folder, config, fixed + total(choice), chosen.divergence.kl)
    content: dict[str, Any] = {
        "model": config.policy.init,
        "task": task.name,
        "budget": config.budget,
        "numbers": numbers,
        "fixed_bytes": fixed,
        "full_bytes": fixed + 2 * numbers,
        "perplexity": study.full.perplexity,
        "is_exhaustive": study.is_exhaustive,
        "calibration_tokens": study.num_compared[0],
        "held_out_tokens": study.num_compared[1],
        "expected_seconds": plan.seconds,
        "seconds": time.monotonic() - began,
        "random_seeds": list(config.random_seeds),
        "super_weights": [asdict(one) for one in study.super_weights],
        "table": [asdict(point) for point in table],
        "front": [asdict(point) for point in front],
        "pass_at_1": answers,
        "num_problems": len(graded),
        "layers": [
            {
                "name": name,
                "numbers": study.numbers[name],
                "kind": choice[name].kind,
                "method": choice[name].method.partition(",")[0],
                "bytes": choice[name].num_bytes,
                "errors": {kind: asdict(found[name]) for kind, found in study.errors.items()},
                "options": [asdict(option) for option in options],
            }
            for name, options in study.options.items()
        ],
    }
    (folder / "quantize.json").write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")
    _write_csv(folder / "layers.csv", content["layers"])
    page.draw(folder, content)
    page.write_page(folder, content)
    return content


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """What is there before anything is measured.

    Attributes:
        stored: The model with its own protocol.
        policy: The same with the task's.
        task: The task.
        rows: Rows that are read, by what for.
        graded: Problems of pass@1; none where the task has no answers.
        numbers: Weights that can be quantised.
        fixed: Bytes of all others.
        budget: Bytes that the first may take.
    """

    stored: Policy
    policy: Policy
    task: Task
    rows: dict[str, list[Problem]]
    graded: list[Problem]
    numbers: int
    fixed: int
    budget: int


def _prepare(config: QuantizeConfig) -> _Prepared:
    """Load the model and the rows, and refuse what does not fit them.

    Raises:
        UserError: If the model is quantised already, the task does not fit it, or the budget is too small.
    """
    # Plain: a model without a protocol stays one.
    stored = load_policy(config.policy, seed=config.seed, merge=True, plain=True)
    policy = stored.for_tasks()
    model, task = policy.model, load_task(config.task)
    if packed_parts(model):
        raise UserError(f"{config.policy.init}: quantised already; quantise the model that it was made of")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    numbers = sum(place.shape.numel() for place in places(model).values())
    fixed = _fixed_bytes(config, policy)
    budget = parse_budget(config.budget, numbers, fixed + 2 * numbers, fixed)
    check_floor(budget, _floor(model))  # before anything is measured
    if budget >= 2 * numbers:
        raise UserError(
            f"budget = {config.budget!r}: the matrices take {2 * numbers:,} bytes in 16 bits, which is within it: "
            "nothing to quantise; give a smaller budget, as in --budget 4.5bits"
        )
    rows = {
        "calibration": _rows(policy, task, "train", config.num_calibration, config.completions),
        "held_out": _rows(policy, task, "test", config.num_held_out, config.completions),
    }
    graded = [problem for problem in take_problems(task, "test", config.num_problems) if problem.answer]
    has_answers = bool(config.num_problems) and all(kind_of(p) == "solution" for p in rows["held_out"])
    return _Prepared(
        stored=stored,
        policy=policy,
        task=task,
        rows=rows,
        graded=fitting_problems(policy, graded, min_new_tokens=1) if has_answers else [],
        numbers=numbers,
        fixed=fixed,
        budget=budget,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What will be measured, and how long it will take.

    Attributes:
        scope: How much.
        compared: Tokens whose predictions are compared for each matrix, about, and on held-out text.
        seconds: Until it is done.
    """

    scope: Scope
    compared: tuple[int, int]
    seconds: float

    def text(self) -> str:
        """Say what is measured."""
        sample, held_out = self.compared
        return f"{page.ways_text(self.scope.is_exhaustive, sample)}; choices compared on {held_out:,}"


def _plan(
    parts: _Prepared,
    config: QuantizeConfig,
    sequences: Mapping[str, Sequence[TrainingSequence]],
    timed: Sequence[TrainingSequence],
    seconds_each: float,
) -> _Plan:
    """Time a pass and a layer, and say what fits into the work.

    Args:
        parts: The model and the rows.
        config: The configuration.
        sequences: What the model will read; or some of it, for which all stand.
        timed: Some of it, which is run.
        seconds_each: Seconds of a completion; 0 for no pass@1.
    """
    model, policy = parts.policy.model, parts.policy
    amounts = {}
    for split, problems in parts.rows.items():
        amount = Amount.of(_packed(policy, sequences[split]))
        is_part = kind_of(problems[0]) == "solution" and len(sequences[split]) < len(problems)
        share = len(problems) / len(sequences[split]) if is_part else 1.0
        amounts[split] = Amount(amount.tokens * share, amount.trained * share)
    num_seeds, num_methods = len(config.random_seeds), len(config.methods)
    texts = amounts["calibration"], amounts["held_out"]
    scope = Scope.of(model, *texts, num_methods, num_seeds, config.work)
    seconds = expected_seconds(
        model,
        _packed(policy, timed, TIMED_TOKENS),
        *texts,
        config.methods,
        scope,
        num_points(scope.steps, num_seeds),
    )
    seconds += seconds_each * len(parts.graded) * (config.num_samples + 1) * 3
    sample = texts[0].cut(scope.calibration).cut(scope.sample)
    return _Plan(
        scope=scope,
        compared=(round(sample.trained), round(texts[1].cut(scope.held_out).trained)),
        seconds=seconds,
    )


def _writes(parts: _Prepared, config: QuantizeConfig) -> bool:
    """Say whether the model writes its own calibration text."""
    return config.completions == "own" and kind_of(parts.rows["held_out"][0]) == "solution"


def _timed(parts: _Prepared, config: QuantizeConfig) -> tuple[list[TrainingSequence], float]:
    """Let the model write some completions where any will be needed; return them and the seconds of one."""
    if not (_writes(parts, config) or parts.graded):
        return [], 0.0
    problems = (parts.rows["calibration"] if _writes(parts, config) else parts.graded)[:TIMED_TEXTS]
    began = time.monotonic()
    sequences = _written(parts.policy, problems, config)
    return sequences, (time.monotonic() - began) / len(problems)


def check(config: QuantizeConfig, resume: bool) -> None:
    """Find what would stop the work before it begins, and time a small part of it; creates nothing.

    Raises:
        UserError: As the work would.
    """
    check_folder(Path(config.out), resumable=False)
    parts = _prepare(config)
    parts.policy.model.eval()
    some, seconds_each = _timed(parts, config)
    if _writes(parts, config):
        sequences, seconds = (
            dict.fromkeys(parts.rows, some),
            seconds_each * sum(map(len, parts.rows.values())),
        )
    else:
        sequences = {split: _sequences(parts.policy, rows, config) for split, rows in parts.rows.items()}
        seconds = 0.0
    plan = _plan(parts, config, sequences, sequences["calibration"], seconds_each)
    print(
        f"checked: model, task, budget and folder; it would start, and take about {clock(seconds + plan.seconds)} "
        f"(completions, a layer and a pass timed, the rest extrapolated; less with --work {config.work / 2:.2g}, fewer "
        f"--methods, or fewer texts): {plan.text()}"
    )


def _rows(policy: Policy, task: Task, split: str, count: int, completions: Completions) -> list[Problem]:
    """Return rows of a split that fit in the context, with what is read of them."""
    problems = take_problems(task, split, 0)
    if not problems:
        raise UserError(f"task {task.name}: no rows in its {split} split, which is calibrated or compared on")
    if any(kind_of(problem) != "solution" for problem in problems[:1]):
        kept = demonstrate(policy, problems[:count], too_long="cut").problems
    elif completions == "data":
        kept = demonstrate(policy, problems[: 4 * count]).problems[:count]
    else:
        kept = fitting_problems(policy, problems[: 4 * count], min_new_tokens=2)[:count]
    if not kept:
        raise UserError(f"task {task.name}: no row of its {split} split fits in the model's context")
    return kept


def _sequences(
    policy: Policy,
    problems: Sequence[Problem],
    config: QuantizeConfig,
    advance: Callable[[int], None] = lambda count: None,
) -> list[TrainingSequence]:
    """Return what the model reads: rows as they are, or problems with its own completions."""
    if config.completions == "data" or kind_of(problems[0]) != "solution":
        advance(len(problems))
        return [sequence for problem in problems for sequence in sequences_of(policy, problem)]
    return _written(policy, problems, config, advance)


def _written(
    policy: Policy,
    problems: Sequence[Problem],
    config: QuantizeConfig,
    advance: Callable[[int], None] = lambda count: None,
) -> list[TrainingSequence]:
    """Return problems with the model's own completions."""
    prompts = [policy.prompt_ids(problem) for problem in problems]
    requests = [
        Request(prompt_ids=prompt, seeds=(sequence_seed("quantize", config.seed, problem.uid, 0),))
        for prompt, problem in zip(prompts, problems, strict=True)
    ]
    done = policy.engine().generate(requests, config.sampling, on_ended=lambda *_: advance(1))
    return [
        TrainingSequence(prompt_ids=prompt, completion_ids=one.ids)
        for prompt, (one,) in zip(prompts, done, strict=True)
    ]


def _packed(
    policy: Policy, sequences: Sequence[TrainingSequence], most: float = math.inf
) -> list[MicroBatch]:
    """Pack the first sequences, at least one, up to so many tokens."""
    totals = itertools.accumulate(sequence.num_tokens for sequence in sequences)
    count = sum(total <= most for total in totals)
    kept = sequences[: max(1, count)]
    return list(pack(kept, token_budget=TOKEN_BUDGET, device=policy.device).micro_batches)


def _pass_at_1(
    policy: Policy,
    task: Task,
    problems: Sequence[Problem],
    config: QuantizeConfig,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Return pass@1 and greedy accuracy, with their intervals over problems."""
    own = {"num_samples": config.num_samples, "sampling": config.sampling, "seed": config.seed}
    result = evaluate(policy, task, problems, on_finished=advance, **own)
    return {metric: asdict(result.metrics[metric]) for metric in ("pass@1", "greedy")}


def _floor(model: LanguageModel) -> int:
    """Return the bytes of all matrices in NF4."""
    shapes = [(place.shape, place.is_experts) for place in places(model).values()]
    return sum(packed_size("nf4", s[1:]) * s[0] if many else packed_size("nf4", s) for s, many in shapes)


def _fixed_bytes(config: QuantizeConfig, policy: Policy) -> int:
    """Return the bytes of all parameters that are never quantised, as they are stored."""
    own, size = places(policy.model), _other_dtype(config).itemsize
    return sum(p.numel() * size for name, p in policy.model.named_parameters() if name not in own)


def _other_dtype(config: QuantizeConfig) -> torch.dtype:
    """Return the dtype of what is not quantised: the source's own."""
    facts = read_json(find_model(config.policy.init, config.policy.adapter)[0] / "config.json")
    return DTYPES.get(str(facts.get("torch_dtype", facts.get("dtype"))), torch.float32)


def _save(policy: Policy, folder: Path, config: QuantizeConfig, num_bytes: int, kl: float) -> None:
    """Write the model's folder, with the choice applied."""
    own, other = places(policy.model), _other_dtype(config)
    weights = {
        name: parameter.detach().to(torch.bfloat16 if name in own else other)
        for name, parameter in policy.model.named_parameters()
    }
    policy.save(folder, weights)
    facts = read_json(folder / QUANTIZATION)
    facts |= {"bytes": num_bytes, "kl": kl, "model": config.policy.init, "budget": config.budget}
    (folder / QUANTIZATION).write_text(json.dumps(facts, indent=1) + "\n", encoding="ascii")


def _write_csv(path: Path, layers: Sequence[Mapping[str, Any]]) -> None:
    """Write a line for each matrix: what it got, its errors, and what each way to store it costs."""
    with path.open("w", newline="", encoding="ascii") as file:
        table = csv.writer(file)
        errors = [f"{kind} {name}" for kind, own in layers[0]["errors"].items() for name in own]
        ways = [f"kl {_way(option)}" for option in layers[0]["options"]]
        table.writerow(["name", "numbers", "kind", "method", "bytes", *errors, *ways])
        for row in layers:
            values = [value for own in row["errors"].values() for value in own.values()]
            costs = [option["cost"] for option in row["options"]]
            facts = [row[name] for name in ("name", "numbers", "kind", "method", "bytes")]
            table.writerow([*facts, *(f"{value:.6g}" for value in (*values, *costs))])


def _way(option: Mapping[str, Any]) -> str:
    return " ".join(filter(None, (option["kind"], option["method"])))


PROGRAM = Program(
    config_class=QuantizeConfig, main=main, check=check, positional="policy.init", sized=on_own_task
)
