"""Tokens per second of supervised steps (forward, backward, update) of whet and of TRL's SFTTrainer, alternately.

python bench/sft_step.py [--quick] [--models abc] [--repeats 5] [--json FILE]

32 sequences a step, 32 to 256 tokens long, every token but the first trained. TRL runs padded, padded in batches of
similar length, and packed into rows of 256 ('wrapped', the packing that needs no flash attention; it lets neighbours
see each other, whet's does not), in float32 and bfloat16; its best counts. Both update with AdamW. The allocator's
settings are whet's, which speed TRL up, too; once more TRL runs with glibc's defaults, as its own process would.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sides
import torch

from whet.__main__ import keep_freed_memory
from whet.algo.packing import TrainingSequence
from whet.model.lora.side import LoRAConfig
from whet.train.optim.step import OptimConfig, Optimizer, Precision, parameter_dtype
from whet.train.sft import train_step

ROWS, SHORTEST, LONGEST = 32, 32, 256
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
        began = time.perf_counter()
        loss, _, tokens, _ = train_step(self.policy, self.rows, self.config)
        self.optimizer.step(1e-5, loss=loss)
        self.speeds.append(tokens / (time.perf_counter() - began))


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
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            speeds.append(tokens / (time.perf_counter() - self.began))
            after()

    model, tokenizer = sides.load_peer(
        home, dtype=torch.bfloat16 if kind == "bfloat16 model" else torch.float32
    )
    total = sum(map(len, rows))
    packed_rows = total // LONGEST
    parts = 4 if layout == "by length" else 1
    ordered = sorted(rows, key=len) if layout == "by length" else rows
    tokens = packed_rows * LONGEST if layout == "packed" else total
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=kind == "bfloat16 autocast",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=packed_rows if layout == "packed" else ROWS // parts,
        gradient_accumulation_steps=parts,
        max_length=LONGEST,
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


def run_case(model: str, folder: Path, repeats: int) -> dict[str, Any]:
    """Try TRL's settings, and time its best against whet."""
    home = sides.save_shape(model, folder)
    rows = sides.draw_prompts(ROWS, SHORTEST, LONGEST, sides.SHAPES[model].vocab_size)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).tolist()
    rows = [rows[place] for place in order]
    kinds, layouts = ["float32"], ["padded", "by length", "packed"]
    if model != "a" and sides.has_bfloat16():
        kinds += ["bfloat16 autocast", "bfloat16 model"]
    if model == "c" and len(kinds) > 1:  # minutes a step in those that are never the best
        kinds, layouts = kinds[1:], layouts[1:]
    tried = {
        (kind, layout): statistics.median(
            trl_speeds(home, kind, layout, rows, 2 if model == "c" else 3, lambda: None)[1:]
        )
        for kind in kinds
        for layout in layouts
    }
    best = max(tried, key=lambda key: tried[key])
    precision = sides.auto_precision(model)
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
    return {
        "model": model,
        "peer": f"TRL, {best[0]}, {best[1]}",
        "peer_tokens_per_second": theirs,
        "whet_tokens_per_second": mine,
        "precision": precision,
        **pair,
        "ratio_shipped": statistics.median(side.speeds[1:]) / statistics.median(shipped[1:]),
        "target": TARGET,
        "tried": {" ".join(key): mine / speed for key, speed in tried.items()},
    }


def main() -> None:
    """Print a line per model."""
    arguments = sides.parser(__doc__).parse_args()
    sides.start(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models or ("a" if arguments.quick else "abc"):
            repeats = arguments.repeats or (3 if arguments.quick else 5)
            row = run_case(model, Path(folder), repeats)
            rows.append(row)
            print(
                f"SFT step {model}, {row['precision']}: {sides.times(row)} the tokens per second of {row['peer']} "
                f"(target {TARGET}x), "
                f"{row['ratio_shipped']:.1f}x beside TRL with the allocator's defaults, "
                f"medians of {repeats} alternating steps",
                flush=True,
            )
    sides.finish(arguments, rows)


if __name__ == "__main__":
    main()
