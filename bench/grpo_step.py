"""Time a whole GRPO step (sample, score, train) of whet and of TRL's GRPOTrainer, alternately in one process.

python bench/grpo_step.py [--quick] [--models abc] [--repeats 7] [--json FILE]
python bench/grpo_step.py --models d --kernels auto triton        (on a GPU)

Same weights, prompts (32 to 96 tokens), number of samples and of new tokens, rewards, updates and learning rate; TRL
with its best settings for this machine (sdpa, no recomputation, dynamic cache, one micro-batch or as few as fit a GPU;
from 11M parameters up also in bfloat16, as autocast and as a bfloat16 model, where the device has products for it;
model d in these alone). whet runs in the precision that `optim.precision = auto` chooses, or `--precision`. Before
anything is timed the gradients of one step on the same samples are compared. The floor is the arithmetic that a step
needs, one forward and one backward pass of each token with prompts once per group, at the matmul peak of the same run.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import sides
import torch

from whet.algo.config import AlgoConfig
from whet.generate.policy import Policy
from whet.generate.sampling import SamplingParams
from whet.kernels.mode import mode
from whet.model.config import ModelConfig
from whet.model.lora.side import LoRAConfig
from whet.rewards.base import WeightedReward
from whet.train.objective.advantage import with_advantages
from whet.train.objective.objective import Objective
from whet.train.optim.step import OptimConfig, Optimizer, Precision, parameter_dtype, prepare_model
from whet.train.rollout.order import data_order
from whet.train.rollout.rollout import RolloutParams
from whet.train.rollout.source import RolloutSource
from whet.types import Group, Problem

LR = 1e-5


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table: model, prompts, samples of each, new tokens, and the ratio aimed at."""

    model: str
    num_prompts: int
    group_size: int
    new_tokens: int
    target: float

    def __str__(self) -> str:
        return f"{self.model} {self.num_prompts}x{self.group_size}x{self.new_tokens}"


CASES = (
    Case("a", 8, 8, 64, 4.0),
    Case("a", 8, 8, 256, 4.0),
    Case("b", 8, 8, 64, 5.0),
    Case("c", 2, 8, 64, 5.0),
    Case("d", 8, 8, 256, 5.0),
)


def reward(text: str) -> float:
    """Score a completion by its words, in eight levels."""
    return sum(int(word) for word in text.split()[:16] if word.isdigit()) % 8 / 8


class WordTask:
    """Random prompts; no answer is ever right."""

    name = "words"

    def __init__(self, texts: list[str], problems: list[Problem] | None = None) -> None:
        self._problems = problems or [
            Problem(uid=f"{n}", task=self.name, prompt=text, answer="none") for n, text in enumerate(texts)
        ]

    def problems(self, split: str) -> list[Problem]:
        """Return all prompts."""
        return self._problems

    def is_correct(self, problem: Problem, answer: str | None) -> bool | None:
        """Say no."""
        return False


class WhetSide:
    """What `whet rl` does in a step, without its logs and files."""

    def __init__(
        self,
        home: Path,
        case: Case,
        texts: list[str],
        precision: Precision,
        lora: LoRAConfig | None = None,
        problems: list[Problem] | None = None,
        kernels: str = "",
        **optim_fields: Any,
    ) -> None:
        self.kernels = kernels or mode()
        max_rows = case.num_prompts * case.group_size
        self.policy: Policy = sides.load_whet(
            home, dtype=parameter_dtype(precision), max_rows=max_rows, lora=lora
        )
        optim = OptimConfig(
            lr=LR,
            schedule="constant",
            warmup_steps=0,
            beta2=0.999,
            precision=precision,
            **optim_fields,
        )
        prepare_model(self.policy.model, optim)
        algo = AlgoConfig(uninformative="keep")
        self.algo, self.weights = algo, {"words": 1.0}
        task = WordTask(texts, problems)
        self.source = RolloutSource(
            self.policy,
            task,
            [WeightedReward("words", 1.0, lambda problem, text: reward(text))],
            data_order(task, task.problems("train"), 0),
            algo=algo,
            weights=self.weights,
            num_prompts=case.num_prompts,
            params=RolloutParams(
                group_size=case.group_size, sampling=SamplingParams(max_new_tokens=case.new_tokens)
            ),
            staleness=0,
            num_steps=10**6,
            seed=0,
            kept_gib=2.0,
        )
        self.optimizer = Optimizer(self.policy.model, optim)
        self.objective = Objective(
            self.policy, algo, optim=optim, temperature=1.0, max_length=case.new_tokens
        )
        self.count = 0
        self.phases: list[tuple[float, float]] = []

    def sample(self) -> list[Group]:
        """Draw and score the groups of the next step."""
        collected = self.source.next(self.count)
        self.count += 1
        groups = [collected.rollout.groups[place] for place in collected.used]
        return with_advantages(groups, self.algo, self.weights)

    def step(self) -> float:
        """Do one step; return its seconds."""
        began = sides.now()
        with sides.kernels(self.kernels):
            groups = self.sample()
            sampled = sides.now()
            self.objective.update(groups, self.optimizer, LR)
        done = sides.now()
        self.phases.append((sampled - began, done - sampled))
        return done - began


def trl_trainer(
    home: Path,
    case: Case,
    texts: list[str],
    *,
    kind: str,
    after: Callable[[], None],
    steps: int,
    parts: int = 1,
    recomputes: bool = False,
    peft_config: Any = None,
    peer: tuple[Any, Any] | None = None,
    prompts: dict[str, list[Any]] | None = None,
    **more: Any,
) -> Any:
    """Build TRL's trainer; `after` runs between its steps.

    Args:
        home: Folder of the model.
        case: The work.
        texts: Prompts.
        kind: float32, bfloat16 autocast or bfloat16 model.
        after: Called with the seconds of each step.
        steps: Steps that it will do.
        parts: Micro-batches of a step.
        recomputes: Whether the backward pass recomputes layers.
        peft_config: Adapters to train in place of the weights.
        peer: Model and tokenizer, or processor; those of the folder without.
        prompts: Columns of prompts as TRL reads them, in place of the texts.
        more: Further fields of GRPOConfig.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        """Times the steps."""

        seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = sides.now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(sides.now() - self.began)
            after()

    dtype = torch.bfloat16 if kind == "bfloat16 model" else torch.float32
    model, tokenizer = peer or sides.load_peer(home, dtype=dtype)
    rows = case.num_prompts * case.group_size

    def scores(completions: list[Any], **_: Any) -> list[float]:
        return [reward(text if isinstance(text, str) else text[0]["content"]) for text in completions]

    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not sides.on_gpu(),
        bf16=kind == "bfloat16 autocast",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=recomputes,
        per_device_train_batch_size=rows // parts,
        gradient_accumulation_steps=parts,
        num_generations=case.group_size,
        max_completion_length=case.new_tokens,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_steps=steps,
        save_strategy="no",
        logging_steps=10**6,
        temperature=1.0,
        beta=0.0,
        shuffle_dataset=False,
        **more,
    )
    clock = Clock()
    clock.seconds = []
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=scores,
        args=arguments,
        train_dataset=Dataset.from_dict(prompts or {"prompt": [f"{text} 0" for text in texts]}),
        processing_class=tokenizer,
        callbacks=[clock],
        peft_config=peft_config,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.clock = clock
    return trainer


def gradient_gap(home: Path, case: Case, texts: list[str]) -> float:
    """Return the relative distance of the two sides' float32 gradients on whet's samples."""
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parity"))
    import trl_peer

    side = WhetSide(home, case, texts, "float32")
    groups = side.sample()
    gradients: dict[str, torch.Tensor] = {}

    class Keep(Optimizer):
        """Keeps gradients instead of using them."""

        def step(self, lr: float, *, loss: float = 0.0) -> float:
            for name, parameter in side.policy.model.named_parameters():
                gradients[name] = (
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                )
            return 0.0

    side.objective.update(groups, Keep(side.policy.model, OptimConfig()), LR)
    trainer = trl_trainer(home, case, texts, kind="float32", after=lambda: None, steps=1)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    samples = [s for group in groups for s in group.samples]
    trl_peer.PAD = 0
    inputs = trl_peer.padded_inputs(samples, [s.advantage for s in samples])
    inputs.pop("old_per_token_logps")
    inputs = {name: value.to(sides.device()) for name, value in inputs.items()}
    _, theirs, _ = trl_peer.loss_and_gradients(trainer, inputs)
    gap = sum(float((gradients[name] - grad).double().square().sum()) for name, grad in theirs.items())
    norm = sum(float(grad.double().square().sum()) for grad in theirs.values())
    return math.sqrt(gap / norm)


def floor_flops(case: Case, shape: ModelConfig, prompt_tokens: int) -> float:
    """Return the floating-point operations that a step needs: one forward and one backward pass of each token.

    Prompts once per group; the trainer's forward pass repeats the sampler's, so it is none that is needed.
    """
    rows, width = case.num_prompts * case.group_size, shape.hidden_size
    new = rows * case.new_tokens
    mean_prompt = prompt_tokens / case.num_prompts
    linear, head = sides.linear_weights(shape), shape.vocab_size * width
    attended = shape.num_layers * shape.num_heads * shape.head_dim * 2
    seen = prompt_tokens * mean_prompt / 2 + new * (mean_prompt + case.new_tokens / 2)
    forward = 2 * linear * (prompt_tokens + new) + 2 * head * new + 2 * attended * seen
    return forward + 2 * forward


def trl_seconds(
    home: Path, case: Case, texts: list[str], kind: str, after: Callable[[], None], steps: int
) -> list[float]:
    """Return the seconds of TRL's steps, in as few micro-batches as the memory allows; `after` runs between them."""
    rows, parts = case.num_prompts * case.group_size, 1
    while True:
        try:
            trainer = trl_trainer(home, case, texts, kind=kind, after=after, steps=steps, parts=parts)
            trainer.train()
            return trainer.clock.seconds
        except torch.cuda.OutOfMemoryError:
            parts *= 2
            if parts > rows:
                raise
            print(f"GRPO step {case}: TRL, {kind}, in {parts} micro-batches: fewer do not fit", flush=True)
        trainer = None
        sides.forget()


def run_case(
    case: Case, folder: Path, repeats: int, *, kernels: list[str], precision: Precision = "auto"
) -> list[dict[str, Any]]:
    """Compare the gradients, then time both sides alternately; return a row for each set of whet's kernels."""
    home = sides.save_shape(case.model, folder)
    shape = sides.SHAPES[case.model]
    prompts = sides.draw_prompts(case.num_prompts, 32, 96, shape.vocab_size)
    texts = [" ".join(map(str, ids[:-1])) for ids in prompts]
    gap = gradient_gap(home, Case(case.model, case.num_prompts, case.group_size, 16, 0.0), texts)
    sides.forget()
    kinds = ["float32"]
    if case.model != "a" and sides.has_bfloat16():
        kinds += ["bfloat16 autocast", "bfloat16 model"]
        kinds = kinds[1:] if case.model == "d" else kinds
    precision = sides.auto_precision(case.model) if precision == "auto" else precision
    ours = {name: WhetSide(home, case, texts, precision, kernels=name) for name in kernels}
    theirs: dict[str, list[float]] = {}
    mine: dict[str, dict[str, list[float]]] = {}
    for kind in kinds:
        found: dict[str, list[float]] = {name: [] for name in kernels}

        def after(found: dict[str, list[float]] = found) -> None:
            for name, side in ours.items():
                found[name].append(side.step())

        theirs[kind] = trl_seconds(home, case, texts, kind, after, repeats + 1)[1:]
        mine[kind] = {name: seconds[-repeats:] for name, seconds in found.items()}
        sides.forget()
    best = min(theirs, key=lambda kind: statistics.median(theirs[kind]))
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    peak = sides.matmul_peak(dtype)
    floor = floor_flops(case, shape, sum(map(len, prompts))) / peak
    rows = []
    for name, side in ours.items():
        seconds = statistics.median(mine[best][name])
        sampled, trained = (statistics.median(phase) for phase in zip(*side.phases[1:], strict=True))
        rows.append(
            {
                "case": str(case) if len(ours) == 1 else f"{case} {name}",
                "kernels": name,
                "precision": precision,
                "gradient gap": gap,
                "peer": f"TRL, {best}",
                "peer_seconds": statistics.median(theirs[best]),
                "whet_seconds": seconds,
                **sides.paired(theirs[best], mine[best][name]),
                "target": case.target,
                "peak_flops": peak,
                "floor_seconds": floor,
                "floor_ratio": statistics.median(theirs[best]) / floor,
                "share_of_floor": floor / seconds,
                "sample_seconds": sampled,
                "train_seconds": trained,
                "all": {kind: sides.paired(theirs[kind], mine[kind][name])["ratio"] for kind in kinds},
            }
        )
    return rows


def main() -> None:
    """Print a line per case and set of kernels."""
    parser = sides.parser(__doc__, has_kernels=True)
    parser.add_argument("--precision", default="auto", choices=get_args(Precision), help="whet's")
    arguments = parser.parse_args()
    sides.start(arguments)
    repeats = arguments.repeats or (3 if arguments.quick else 7)
    chosen = [
        case for case in CASES if case.model in (arguments.models or ("a" if arguments.quick else "abc"))
    ]
    rows = []
    with sides.weights_folder(arguments) as folder:
        for case in chosen[:1] if arguments.quick and not arguments.models else chosen:
            options = {"kernels": arguments.kernels, "precision": arguments.precision}
            for row in run_case(case, folder, repeats, **options):
                rows.append(row)
                print(
                    f"GRPO step {row['case']:>10}, {row['precision']}: {row['peer']} {row['peer_seconds']:.2f} s, whet "
                    f"{row['whet_seconds']:.2f} s ({row['sample_seconds']:.2f} sample + {row['train_seconds']:.2f} "
                    f"train), {sides.times(row)} (target {row['target']:g}x, floor {row['floor_ratio']:.1f}x, "
                    f"{row['share_of_floor']:.0%} of it), medians of {repeats} alternating steps; "
                    f"gradients differ by {row['gradient gap']:.0e}",
                    flush=True,
                )
            sides.forget()
    sides.finish(arguments, rows)


if __name__ == "__main__":
    main()
