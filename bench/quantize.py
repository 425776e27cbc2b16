"""Selected layers beside all-NF4 and other choices of equal bytes: KL from the full model on held-out text.

    python bench/quantize.py --demo runs/demo-sft --stories ../shared/data/models/stories260k --seeds 0 1 2 --json FILE

Each seed draws other text, which the model writes itself (the demo's to its task's problems, stories260k's from an
empty prompt): one half to measure and choose on, one to compare on. Prints docs/results/quantize.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from whet.algo.packing import TrainingSequence, pack
from whet.compress.quantize.study import Point, Study
from whet.generate.engine import Request
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.tasks.base import TaskConfig, load_task
from whet.types import MicroBatch

BITS = 4.5
"""Of the budget: what NF4 takes with bitsandbytes' default, a float32 absmax for each block."""


def written(policy: Policy, prompts: Sequence[tuple[int, ...]], seed: int, length: int) -> list[MicroBatch]:
    """Return what the model writes to prompts, packed."""
    requests = [
        Request(prompt_ids=prompt, seeds=(1_000_003 * seed + place,)) for place, prompt in enumerate(prompts)
    ]
    done = policy.engine().generate(requests, SamplingParams(max_new_tokens=length))
    rows = zip(prompts, done, strict=True)
    sequences = [TrainingSequence(prompt_ids=prompt, completion_ids=one.ids) for prompt, (one,) in rows]
    return list(pack(sequences, token_budget=2048).micro_batches)


def measured(policy: Policy, name: str, seed: int, count: int) -> list[Point]:
    """Return the table of one model and seed."""
    if name == "demo":
        task = load_task(TaskConfig())
        problems = [problem for split in ("train", "test") for problem in task.problems(split)[:4000]]
        halves = [
            [policy.prompt_ids(problem) for problem in problems[start + count * seed :][:count]]
            for start in (0, len(problems) // 2)
        ]
        length = 64
    else:
        assert policy.tokenizer.bos_id is not None
        halves, length = [[(policy.tokenizer.bos_id,)] * count] * 2, 128
    calibration, held_out = (
        written(policy, half, 2 * seed + place, length) for place, half in enumerate(halves)
    )
    for parameter in policy.model.parameters():
        parameter.requires_grad_(False)
    study = Study(policy.model, calibration, held_out, methods=("rtn", "gptq"))
    return study.table(int(BITS / 16 * study.ceiling), (seed,))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", type=Path, help="run folder of `whet sft demo` or `whet demo`")
    parser.add_argument("--stories", type=Path, help="folder of stories260k")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--count", type=int, default=48, help="texts of each half")
    parser.add_argument("--json", type=Path, help="file that the rows go to; other models' rows in it stay")
    options = parser.parse_args()
    stored = options.json is not None and options.json.is_file()
    results = json.loads(options.json.read_text()) if stored else {}
    for name, folder in (("demo", options.demo), ("stories260k", options.stories)):
        if folder is None:
            continue
        rows: dict[str, list[Point]] = defaultdict(list)
        for seed in options.seeds:
            policy = load_policy(PolicyConfig(init=str(folder)), seed=0, plain=name != "demo")
            for point in measured(policy, name, seed, options.count):
                rows["random" if point.name.startswith("random") else point.name].append(point)
        print(f"\n### {name}\n")
        print(
            "| choice | bytes | KL by seed "
            + ", ".join(map(str, options.seeds))
            + " | mean KL | same top-1 |"
        )
        print("|---|---|---|---|---|")
        for choice, points in rows.items():
            kls = [point.divergence.kl for point in points]
            size = max(point.num_bytes for point in points)
            top1 = statistics.mean(point.divergence.top1 for point in points)
            each = ", ".join(f"{kl:.4f}" for kl in kls)
            print(f"| {choice} | {size:,} | {each} | {statistics.mean(kls):.4f} | {top1:.1%} |", flush=True)
        results[name] = {
            "seeds": options.seeds,
            "texts": options.count,
            "rows": {choice: [asdict(point) for point in points] for choice, points in rows.items()},
        }
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
