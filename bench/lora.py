"""Time steps of LoRA training of whet and of TRL with peft, alternately in one process; peak memory, each on its own.

python bench/lora.py [--quick] [--models bc] [--repeats 5] [--json FILE]

Rank 16 beside all of the layers' matrices, alpha 32, no dropout, on both sides. The supervised step is that of
`sft_step.py` (32 sequences of 32 to 256 tokens, TRL padded, by length or packed, whichever is fastest), the GRPO step
that of `grpo_step.py` (same prompts, number of samples and of new tokens, rewards and updates). Memory is the peak
resident memory of two GRPO steps above what the process held after its imports, in a process of its own (--quick
leaves it out). "Several adapters" compares whet with itself: the same 32 prompts and 64 new tokens each, with four
adapters in one batch and with one.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpo_step
import memory
import sft_step
import sides
import torch

from whet import processes
from whet.generate.engine import Request
from whet.generate.sampling import SamplingParams
from whet.model.lora.files import read_adapter
from whet.model.lora.several import Several
from whet.model.lora.side import LoRAConfig, sides_of

LORA = LoRAConfig(rank=16)
TARGET, MEMORY_TARGET = 2.0, 1.0
NUM_ADAPTERS, ROWS, NEW_TOKENS, SLOWER_TARGET = 4, 32, 64, 1.3
CASES = {
    "a": grpo_step.Case("a", 8, 8, 64, TARGET),
    "b": grpo_step.Case("b", 8, 8, 64, TARGET),
    "c": grpo_step.Case("c", 2, 8, 64, TARGET),
}


def peft_config() -> Any:
    """Return the same adapters for peft."""
    import peft

    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=LORA.rank,
        lora_alpha=int(LORA.scale),
        lora_dropout=0.0,
        target_modules="all-linear",
    )


def kinds_of(model: str) -> list[str]:
    """Return TRL's precisions that are worth a try."""
    return ["float32"] if model == "a" or not sides.has_bfloat16() else ["float32", "bfloat16 model"]


def time_sft(model: str, home: Path, repeats: int) -> dict[str, Any]:
    """Try TRL's layouts, and time the fastest against whet."""
    rows = sides.draw_prompts(
        sft_step.ROWS, sft_step.SHORTEST, sft_step.LONGEST, sides.SHAPES[model].vocab_size
    )
    tried = {
        (kind, layout): statistics.median(
            sft_step.trl_speeds(home, kind, layout, rows, 2, lambda: None, peft_config=peft_config())[1:]
        )
        for kind in kinds_of(model)
        for layout in ("padded", "by length", "packed")
    }
    best = max(tried, key=lambda key: tried[key])
    side = sft_step.WhetSide(home, sides.auto_precision(model), rows, lora=LORA)
    side.step()
    side.speeds.clear()
    speeds = sft_step.trl_speeds(home, *best, rows, repeats + 1, side.step, peft_config=peft_config())[1:]
    pair = sides.paired([1 / speed for speed in speeds], [1 / speed for speed in side.speeds[1:]])
    return {"work": "SFT", "peer": f"TRL and peft, {' '.join(best)}", **pair}


def time_grpo(model: str, home: Path, repeats: int) -> dict[str, Any]:
    """Time GRPO steps of both sides alternately; TRL's fastest precision counts."""
    case = CASES[model]
    prompts = sides.draw_prompts(case.num_prompts, 32, 96, sides.SHAPES[model].vocab_size)
    texts = [" ".join(map(str, ids[:-1])) for ids in prompts]
    side = grpo_step.WhetSide(home, case, texts, sides.auto_precision(model), lora=LORA)
    rows: dict[str, tuple[list[float], list[float]]] = {}
    for kind in kinds_of(model):
        ours: list[float] = []
        trainer = grpo_step.trl_trainer(
            home,
            case,
            texts,
            kind=kind,
            after=lambda ours=ours: ours.append(side.step()),
            steps=repeats + 1,
            peft_config=peft_config(),
        )
        trainer.train()
        rows[kind] = trainer.clock.seconds[1:], ours[1:]
    best = min(rows, key=lambda kind: statistics.median(rows[kind][0]))
    return {"work": "GRPO", "peer": f"TRL and peft, {best}", **sides.paired(*rows[best])}


def measure(side: str, model: str, home: Path) -> dict[str, float]:
    """Do two GRPO steps of one side in this process; return its memory after the imports and at its peak, in GiB."""
    import peft
    import transformers
    import trl

    del peft, transformers, trl  # imported for their memory
    case = CASES[model]
    prompts = sides.draw_prompts(case.num_prompts, 32, 96, sides.SHAPES[model].vocab_size)
    texts = [" ".join(map(str, ids[:-1])) for ids in prompts]
    base = memory.resident()
    if side == "whet":
        ours = grpo_step.WhetSide(home, case, texts, "float32", lora=LORA)
        for _ in range(memory.STEPS):
            ours.step()
    else:
        sides.default_allocator()  # it takes less then
        trainer = grpo_step.trl_trainer(
            home,
            case,
            texts,
            kind="float32",
            after=lambda: None,
            steps=memory.STEPS,
            peft_config=peft_config(),
        )
        trainer.train()
    memory.note_peak()
    return {"base": base, "peak": memory.peaks[0]}


def compare_memory(model: str, home: Path) -> dict[str, Any]:
    """Run both sides in processes of their own."""
    above: dict[str, float] = {}
    for side in ("whet", "TRL"):
        words = [sys.executable, __file__, "--side", side, "--models", model, "--folder", str(home)]
        output = processes.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
        line = next(line for line in output.splitlines() if line.startswith("RESULT "))
        found = json.loads(line[7:])
        above[side] = found["peak"] - found["base"]
    share = above["whet"] / above["TRL"]
    return {"work": "memory", "peer": "TRL and peft, float32", "share": share, "gib": above}


def time_several(model: str, home: Path, repeats: int) -> dict[str, Any]:
    """Time decoding with several adapters in one batch, and with one, alternately; return seconds and their ratio."""
    dtype = torch.bfloat16 if sides.auto_precision(model).startswith("bfloat16") else torch.float32
    names = [f"{home.name}-adapter-{number}" for number in range(NUM_ADAPTERS)]
    for seed, name in enumerate(names):
        made = sides.load_whet(home, dtype=dtype, lora=LORA)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, side in sides_of(made.model):
                side.lora_B.normal_(0, 0.01, generator=generator)
        assert made.trained is not None
        made.trained.write(home.parent / name)
    one, four = (sides.load_whet(home, dtype=dtype, max_rows=ROWS) for _ in range(2))
    adapter = read_adapter(home.parent / names[0])
    adapter.apply(adapter.fit(one.model))
    four.several = Several({name: read_adapter(home.parent / name) for name in names})
    four.several.apply(four.model)
    prompts = sides.draw_prompts(ROWS, 8, 24, sides.SHAPES[model].vocab_size)
    alone = [Request(prompt_ids=ids, seeds=(place,)) for place, ids in enumerate(prompts)]
    mixed = [replace(request, adapter=names[place % NUM_ADAPTERS]) for place, request in enumerate(alone)]
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    seconds: dict[str, list[float]] = {"one": [], "several": []}
    for turn in range(repeats + 1):
        for kind, policy, requests in (("one", one, alone), ("several", four, mixed)):
            began = time.perf_counter()
            drawn = policy.engine(stops=False).generate(requests, params)
            if turn:  # the first of each warms up
                seconds[kind].append(time.perf_counter() - began)
            assert sum(len(done.ids) for row in drawn for done in row) == ROWS * NEW_TOKENS
    ratios = [b / a for a, b in zip(seconds["one"], seconds["several"], strict=True)]
    return {"work": "several adapters", "dtype": str(dtype).removeprefix("torch."), "seconds": seconds} | {
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "target": SLOWER_TARGET,
    }


def main() -> None:
    """Print four lines per model."""
    parser = sides.parser(__doc__, devices=("cpu",))
    parser.add_argument("--side", help="run one side in this process and print its memory")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    sides.start(arguments)
    if arguments.side:
        print("RESULT", json.dumps(measure(arguments.side, arguments.models, arguments.folder)))
        return
    repeats = arguments.repeats or (2 if arguments.quick else 5)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models or ("a" if arguments.quick else "bc"):
            home = sides.save_shape(model, Path(folder))
            for run in (time_sft, time_grpo):
                row = {"model": model, **run(model, home, repeats), "target": TARGET}
                rows.append(row)
                text = f"LoRA {row['work']} step {model}: {sides.times(row)} the speed of {row['peer']}"
                print(f"{text} (target {TARGET}x), medians of {repeats} alternating steps", flush=True)
            row = {"model": model, **time_several(model, home, max(repeats, 5))}
            rows.append(row)
            one, several = (statistics.median(row["seconds"][kind]) for kind in ("one", "several"))
            print(
                f"several adapters {model}: {row['ratio']:.2f} ({row['range'][0]:.2f} to {row['range'][1]:.2f}) times "
                f"the time of one adapter ({several:.3f} s, {one:.3f} s; {row['dtype']}; target {SLOWER_TARGET}x)",
                flush=True,
            )
            if not arguments.quick:
                row = {"model": model, **compare_memory(model, home), "target": MEMORY_TARGET}
                rows.append(row)
                sizes = ", ".join(f"{side} {gib:.2f} GiB" for side, gib in row["gib"].items())
                print(f"LoRA memory {model}: {row['share']:.2f} of {row['peer']} ({sizes})", flush=True)
    sides.finish(arguments, rows)


if __name__ == "__main__":
    main()
