"""Time GRPO steps with and without overlap, alternately: how much of the rollout is hidden, and what a step gains.

python bench/overlap.py [--quick] [--models ab] [--waits 0,5] [--repeats 7] [--json FILE]

`async` is timed against `off` with samples that are one step old: the same samples, prompts and updates on both sides.
Completions end at random (1 token in 48 is a stop token) and at 128 tokens at the latest,
so there is a tail to fill. A wait is slept for each sample by its reward, as a judge or a sandbox would keep one
waiting. Per row: median seconds of a step, their ratio, `rl/overlap`, and the share of the two phases' seconds that
is saved, 1 - T / (T_rollout + T_update).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import sides
import torch
from grpo_step import LR, WordTask, reward

from whet.algo.config import AlgoConfig
from whet.generate.sampling import SamplingParams
from whet.rewards.base import WeightedReward
from whet.train.objective.advantage import with_advantages
from whet.train.objective.objective import Objective
from whet.train.optim.step import OptimConfig, Optimizer
from whet.train.rollout.order import data_order
from whet.train.rollout.overlap import Mode, OverlapConfig
from whet.train.rollout.rollout import RolloutParams
from whet.train.rollout.source import RolloutSource
from whet.types import Problem

NUM_PROMPTS, GROUP_SIZE, NEW_TOKENS, STOP_SHARE = 8, 8, 128, 48


class Side:
    """The steps of one mode on weights of its own."""

    def __init__(self, home: Path, texts: list[str], mode: Mode, *, wait_ms: float) -> None:
        self.policy = sides.load_whet(home, dtype=torch.float32, max_rows=NUM_PROMPTS * GROUP_SIZE)
        self.policy.stop_ids = tuple(range(self.policy.tokenizer.vocab_size // STOP_SHARE))
        self.algo, self.weights = AlgoConfig(uninformative="keep"), {"words": 1.0}
        optim = OptimConfig(lr=LR, schedule="constant", warmup_steps=0)
        task = WordTask(texts)

        def score(problem: Problem, text: str) -> float:
            time.sleep(wait_ms / 1000)
            return reward(text)

        self.source = RolloutSource(
            self.policy,
            task,
            [WeightedReward("words", 1.0, score)],
            data_order(task, task.problems("train"), 0),
            algo=self.algo,
            weights=self.weights,
            num_prompts=NUM_PROMPTS,
            params=RolloutParams(group_size=GROUP_SIZE, sampling=SamplingParams(max_new_tokens=NEW_TOKENS)),
            staleness=1,
            num_steps=10**6,
            seed=0,
            overlap=OverlapConfig(mode=mode),
        )
        self.optimizer = Optimizer(self.policy.model, optim)
        self.objective = Objective(
            self.policy,
            self.algo,
            optim=optim,
            temperature=1.0,
            max_length=NEW_TOKENS,
        )
        self.seconds: list[float] = []
        self.overlaps: list[float] = []
        self.phases: list[float] = []

    def step(self) -> None:
        """Do one step, and note what it took."""
        began = time.perf_counter()
        collected = self.source.next(len(self.seconds))
        rollout = collected.rollout
        groups = with_advantages([rollout.groups[p] for p in collected.used], self.algo, self.weights)
        sampled = time.perf_counter()
        with self.source.updating():
            self.objective.update(groups, self.optimizer, LR)
        trained = time.perf_counter() - sampled
        overlap = self.source.wait()
        self.seconds.append(time.perf_counter() - began)
        self.overlaps.append(overlap)
        self.phases.append(rollout.generate_seconds + rollout.reward_seconds + trained)

    def weights_now(self) -> torch.Tensor:
        """Return all weights."""
        return torch.cat([p.detach().flatten() for p in self.policy.model.parameters()])


def run(home: Path, wait_ms: float, repeats: int) -> dict[str, Any]:
    """Time steps with overlap against those without."""
    shape = sides.SHAPES[home.name]
    prompts = sides.draw_prompts(NUM_PROMPTS, 32, 96, shape.vocab_size)
    texts = [" ".join(map(str, ids[:-1])) for ids in prompts]
    off, on = Side(home, texts, "off", wait_ms=wait_ms), Side(home, texts, "async", wait_ms=wait_ms)
    for _ in range(repeats + 2):
        off.step()
        on.step()
    gap = float((off.weights_now() - on.weights_now()).abs().max())
    pace = [a / b for a, b in zip(off.seconds[2:], on.seconds[2:], strict=True)]
    seconds = statistics.median(on.seconds[2:])
    for side in (off, on):
        side.source.close()
    return {
        "model": home.name,
        "wait_ms": wait_ms,
        "mode": "async",
        "off_seconds": statistics.median(off.seconds[2:]),
        "seconds": seconds,
        "ratio": statistics.median(pace),
        "overlap": statistics.median(on.overlaps[2:]),
        "saved": 1 - seconds / statistics.median(off.phases[2:]),
        "weights_differ_by": gap,
    }


def main() -> None:
    """Print a line per model and wait."""
    parser = sides.parser(__doc__, devices=("cpu",))
    parser.add_argument("--waits", default="0,5", help="milliseconds that the reward of a sample sleeps")
    arguments = parser.parse_args()
    sides.start(arguments)
    repeats = arguments.repeats or (3 if arguments.quick else 7)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models or ("a" if arguments.quick else "ab"):
            home = sides.save_shape(name, Path(folder))
            for wait_ms in map(float, arguments.waits.split(",")):
                row = run(home, wait_ms, repeats)
                rows.append(row)
                print(
                    f"model {name}, reward {wait_ms:g} ms a sample: off {row['off_seconds']:.2f} s, async "
                    f"{row['seconds']:.2f} s, {row['ratio']:.2f}x; overlap {row['overlap']:.0%}, saved "
                    f"{row['saved']:.0%}; weights differ by {row['weights_differ_by']:.0e} "
                    f"(medians of {repeats} alternating steps)",
                    flush=True,
                )
    sides.finish(arguments, rows)


if __name__ == "__main__":
    main()
