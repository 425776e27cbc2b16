"""Tokens per second of supervised steps (forward, backward, update) of whet and of TRL's SFTTrainer, alternately.

python bench/sft_step.py [--quick] [--models abc] [--repeats 5] [--json FILE]

32 sequences a step, 32 to 256 tokens long (model d: 64 to 512), every token but the first trained. TRL runs padded,
padded in batches of similar length, and packed into rows of the longest ('wrapped', the packing that needs no flash
attention; it lets neighbours see each other, whet's does not), in float32 and bfloat16 (models c and d in bfloat16
alone where the device has products for it); its best of what fits the memory counts. whet runs in the precision that
`optim.precision = auto` chooses, or `--precision`. Both update with AdamW. The allocator's settings are whet's, which
speed TRL up, too; once more TRL runs with glibc's defaults, as its own process would.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import sides
import torch

from whet.__main__ import keep_freed_memory
from whet.algo.packing import TrainingSequence
from whet.model.lora.side import LoRAConfig
from whet.train.optim.step import OptimConfig, Optimizer, Precision, parameter_dtype
from whet.train.sft import train_step

ROWS, SHORTEST, LONGEST = 32, 32, 256
SCALE = 2
"""Model d's sequences are so many times as long."""
TARGET = 1.5


class WhetSide:
    """What `whet sft` does in a step, without its logs and files."""

    def __init__(
        self, home: Path, precision: Precision, rows: list[tuple[int, ...]], lora: LoRAConfig | None = None
    ) -> None:
        self.policy = sides.load_whet(home, dtype=parameter_dtype(precision), lora=lora)
        self.config = OptimConfig(precision=precision)
        self.optimizer = Optimizer(self.policy.model, self.config)
        self.rows = [TrainingSequence(prompt_ids=ids[:1], completion_ids=ids[1:]) for ids in rows]
        self.speeds: list[float] = []

    def step(self) -> None:
        """Do one step and note its tokens per second."""
        began = sides.now()
        loss, _, tokens, _ = train_step(self.policy, self.rows, self.config)
        self.optimizer.step(1e-5, loss=loss)
        self.speeds.append(tokens / (sides.now() - began))


def trl_speeds(
    home: Path,
    kind: str,
    layout: str,
    rows: list[tuple[int, ...]],
    steps: int,
    after: Callable[[], None],
    before: Callable[[], None] = lambda: None,
    peft_config: Any = None,
) -> list[float]:
    """Return TRL's tokens per second in each step; `before` runs ahead of a step, `after` behind it.

    With `peft_config` it trains adapters.
    """
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    speeds: list[float] = []

    class Clock(TrainerCallback):
        """Times the steps."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            before()
            self.began = sides.now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            speeds.append(tokens / (sides.now() - self.began))
            after()

    model, tokenizer = sides.load_peer(
        home, dtype=torch.bfloat16 if kind == "bfloat16 model" else torch.float32
    )
    total, longest = sum(map(len, rows)), max(map(len, rows))
    packed_rows = total // longest
    parts = 4 if layout == "by length" else 1
    ordered = sorted(rows, key=len) if layout == "by length" else rows
    tokens = packed_rows * longest if layout == "packed" else total
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not sides.on_gpu(),
        bf16=kind == "bfloat16 autocast",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=packed_rows if layout == "packed" else ROWS // parts,
        gradient_accumulation_steps=parts,
        max_length=longest,
        packing=layout == "packed",
        packing_strategy="wrapped",
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_steps=steps,
        save_strategy="no",
        logging_steps=10**6,
        dataloader_drop_last=True,  # packing leaves a last, nearly empty row
        train_sampling_strategy="sequential",
        dataset_num_proc=None,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": [list(ids) for ids in ordered]}),
        processing_class=tokenizer,
        callbacks=[Clock()],
        peft_config=peft_config,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return speeds


def run_case(model: str, folder: Path, repeats: int, precision: Precision = "auto") -> dict[str, Any]:
    """Try TRL's settings, and time its best against whet."""
    home = sides.save_shape(model, folder)
    scale = SCALE if model == "d" else 1
    rows = sides.draw_prompts(ROWS, scale * SHORTEST, scale * LONGEST, sides.SHAPES[model].vocab_size)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).tolist()
    rows = [rows[place] for place in order]
    kinds, layouts = ["float32"], ["padded", "by length", "packed"]
    if model != "a" and sides.has_bfloat16():
        kinds += ["bfloat16 autocast", "bfloat16 model"]
    if model in "cd" and len(kinds) > 1:  # minutes a step in those that are never the best
        kinds, layouts = kinds[1:], layouts[1:]
    tried: dict[tuple[str, str], float] = {}
    for kind in kinds:
        for layout in layouts:
            try:
                speeds = trl_speeds(home, kind, layout, rows, 2 if model == "c" else 3, lambda: None)
                tried[kind, layout] = statistics.median(speeds[1:])
            except torch.cuda.OutOfMemoryError:  # a padded batch's logits may not fit a GPU
                print(f"SFT step {model}: TRL, {kind}, {layout} does not fit the GPU's memory", flush=True)
            sides.forget()
    best = max(tried, key=lambda key: tried[key])
    precision = sides.auto_precision(model) if precision == "auto" else precision
    side = WhetSide(home, precision, rows)
    side.step()
    side.speeds.clear()
    speeds = trl_speeds(home, *best, rows, repeats + 1, side.step)[1:]
    theirs, mine = statistics.median(speeds), statistics.median(side.speeds[1:])
    pair = sides.paired([1 / speed for speed in speeds], [1 / speed for speed in side.speeds[1:]])
    side.speeds.clear()

    def step() -> None:
        keep_freed_memory()
        side.step()

    shipped = trl_speeds(home, *best, rows, repeats + 1, step, sides.default_allocator)
    keep_freed_memory()
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    return {
        "model": model,
        "peer": f"TRL, {best[0]}, {best[1]}",
        "peer_tokens_per_second": theirs,
        "whet_tokens_per_second": mine,
        "precision": precision,
        "peak_flops": sides.matmul_peak(dtype),
        **pair,
        "ratio_shipped": statistics.median(side.speeds[1:]) / statistics.median(shipped[1:]),
        "target": TARGET,
        "tried": {" ".join(key): mine / speed for key, speed in tried.items()},
    }


def main() -> None:
    """Print a line per model."""
    parser = sides.parser(__doc__)
    parser.add_argument("--precision", default="auto", choices=get_args(Precision), help="whet's")
    arguments = parser.parse_args()
    sides.start(arguments)
    rows = []
    with sides.weights_folder(arguments) as folder:
        for model in arguments.models or ("a" if arguments.quick else "abc"):
            repeats = arguments.repeats or (3 if arguments.quick else 5)
            row = run_case(model, folder, repeats, arguments.precision)
            rows.append(row)
            print(
                f"SFT step {model}, {row['precision']}: {sides.times(row)} the tokens per second of {row['peer']} "
                f"(target {TARGET}x; whet {row['whet_tokens_per_second']:,.0f}), "
                f"{row['ratio_shipped']:.1f}x beside TRL with the allocator's defaults, "
                f"medians of {repeats} alternating steps",
                flush=True,
            )
    sides.finish(arguments, rows)


if __name__ == "__main__":
    main()
