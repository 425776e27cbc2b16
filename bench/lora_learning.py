"""Train the demo with adapters and with whole weights, over seeds; print the tables of docs/results/lora.md.

python bench/lora_learning.py [--seeds 0 1 2] [--out FOLDER] [--parts pipeline rl nf4] [--json FILE]

pipeline: random weights, SFT, RL, as `whet demo`, beside the same with adapters of full rank (and the embeddings and
norms whole, since they start from random numbers). rl: RL alone, from the fully trained SFT model, with adapters of
ranks 8 to 128. nf4: the same RL beside that model in NF4. Exit status 1 when a claim of the page is missed. With --json
a program that was cut off goes on: what is in the file is not run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from whet.eval.evaluate import take_problems
from whet.eval.measure import evaluate
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.model.lora.side import LoRAConfig
from whet.recipes import rl as rl_recipes
from whet.recipes import sft as sft_recipes
from whet.tasks.made.arithmetic import Arithmetic
from whet.train import rl, sft

FULL_RANK = 128
"""The narrower side of the demo's widest matrices: B A can be any matrix."""
SFT_LORA = LoRAConfig(
    rank=FULL_RANK,
    alpha=32,
    lr_ratio=4,
    modules_to_save=("embed_tokens", "input_layernorm", "post_attention_layernorm", "model.norm"),
)
SFT_LR, RL_LR = 2e-3, 1e-3
"""Of SFT: that of whole weights, so that embeddings and norms learn as they do there; B at 4 times that (LoRA+), and
an eighth of the usual factor (alpha 32 for 256). With one rate for all, 600 steps are too few."""
GOING_ON_LR = 5e-4
"""Of RL that goes on with the full-rank adapter: its embeddings and norms are whole weights."""
RANKS = (8, 16, 32, FULL_RANK)
NF4_RANKS = (16,)
WITHIN = 0.02
"""Points of accuracy between adapters of full rank and whole weights, by the mean over seeds."""
TARGET = 0.95
"""Median pass@1 after RL that bench/demo_seeds.py wants of the demo."""


Measured = dict[str, float]
"""pass@1, and skill: the share of right answers among the samples that are worked out. An SFT model works out half of
them, so that its pass@1 is near 50 % whatever its skill."""


@dataclass(frozen=True)
class Bench:
    """Where the runs go and how they are measured."""

    out: Path
    num_problems: int = 512
    num_samples: int = 16

    def measure(self, policy: Policy, seed: int) -> Measured:
        """Measure on the held-out problems that `whet demo` measures on."""
        task = Arithmetic()
        sampling = SamplingParams(max_new_tokens=rl_recipes.demo().sampling.max_new_tokens)
        problems = take_problems(task, "test", self.num_problems)
        found = evaluate(policy, task, problems, num_samples=self.num_samples, sampling=sampling, seed=seed)
        worked = [one.grade.is_correct for row in found.samples for one in row if "=" in one.text]
        return {"pass@1": found.metrics["pass@1"].mean, "skill": statistics.mean(worked or [0.0])}

    def base(self, seed: int) -> Path:
        """Return the folder of the demo's random weights, which an adapter needs as its base."""
        folder = self.out / f"{seed}/base"
        if not folder.exists():
            load_policy(sft_recipes.demo().policy, seed=seed).save(folder)
        return folder

    def run_sft(self, seed: int, lora: LoRAConfig | None = None, lr: float = SFT_LR) -> Measured:
        """Run the demo's SFT, of the weights or of adapters, and measure it."""
        recipe = replace(sft_recipes.demo(), seed=seed, out=str(self.out / f"{seed}/sft"))
        if lora is not None:
            recipe = replace(
                recipe,
                out=f"{recipe.out}-lora",
                policy=PolicyConfig(init=str(self.base(seed)), max_rows=recipe.policy.max_rows),
                lora=lora,
                optim=replace(recipe.optim, lr=lr),
            )
        shutil.rmtree(recipe.out, ignore_errors=True)  # of a program that was cut off
        return self.measure(sft.train(recipe), seed)

    def run_rl(
        self,
        seed: int,
        name: str,
        init: str,
        lora: LoRAConfig | None = None,
        lr: float = RL_LR,
        *,
        nf4: bool = False,
    ) -> Measured:
        """Run the demo's RL from a run of this seed, and measure it."""
        recipe = rl_recipes.demo()
        start = replace(
            recipe.policy, init=str(self.out / f"{seed}/{init}"), quantize="nf4" if nf4 else "none"
        )
        recipe = replace(recipe, seed=seed, out=str(self.out / f"{seed}/{name}"), policy=start)
        if lora is not None:
            recipe = replace(recipe, lora=lora, optim=replace(recipe.optim, lr=lr))
        shutil.rmtree(recipe.out, ignore_errors=True)
        measured = self.measure(rl.train(recipe), seed)
        rows = [json.loads(line) for line in (Path(recipe.out) / "metrics.jsonl").read_text().splitlines()]
        # A step without a group that teaches anything (all right, say) updates nothing.
        drifts = {row["rl/ratio_drift"] for row in rows if row["rl/groups_with_signal"]}
        assert drifts == {0.0}, "sampler and trainer differ"
        return measured


def points(values: Sequence[float]) -> str:
    """Show accuracies in percent, with their mean."""
    return " | ".join(f"{100 * value:.1f}" for value in (*values, statistics.mean(values)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/lora-learning"))
    parser.add_argument("--parts", nargs="+", default=["pipeline", "rl", "nf4"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bench = Bench(options.out)
    stored = options.json is not None and options.json.is_file()
    rows: dict[str, dict[str, Measured]] = json.loads(options.json.read_text()) if stored else {}

    def note(seed: int, name: str, measure: Callable[[], Measured]) -> None:
        """Measure a row for a seed, unless it was before, and store it."""
        own = rows.setdefault(name, {})
        if str(seed) not in own:
            own[str(seed)] = measure()
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"seed {seed}, {name}: {own[str(seed)]}", file=sys.stderr, flush=True)

    for seed in options.seeds:
        note(seed, "SFT", partial(bench.run_sft, seed))
        note(seed, "RL", partial(bench.run_rl, seed, "rl", "sft"))
        if "pipeline" in options.parts:
            note(seed, "SFT, full rank", partial(bench.run_sft, seed, SFT_LORA))
            # The same adapter goes on, with the modules that are trained whole beside it.
            full = LoRAConfig(rank=FULL_RANK)
            going_on = partial(bench.run_rl, seed, "rl-lora", "sft-lora", full, GOING_ON_LR)
            note(seed, "SFT and RL, full rank", going_on)
        for rank in RANKS if "rl" in options.parts else ():
            run = partial(bench.run_rl, seed, f"rl-{rank}", "sft", LoRAConfig(rank=rank))
            note(seed, f"RL, rank {rank}", run)
        if "nf4" in options.parts:
            nf4 = PolicyConfig(init=str(options.out / f"{seed}/sft"), quantize="nf4", max_rows=512)
            note(
                seed,
                "SFT in NF4",
                lambda seed=seed, nf4=nf4: bench.measure(load_policy(nf4, seed=seed), seed),
            )
            for rank in NF4_RANKS:
                lora = LoRAConfig(rank=rank)
                run = partial(bench.run_rl, seed, f"rl-nf4-{rank}", "sft", lora, nf4=True)
                note(seed, f"RL, rank {rank} on NF4", run)
    shown = {
        name: [own[str(seed)]["pass@1"] for seed in options.seeds]
        for name, own in rows.items()
        if all(str(seed) in own for seed in options.seeds)
    }
    skills = {
        f"{name}: right of what is worked out": [rows[name][str(seed)]["skill"] for seed in options.seeds]
        for name in shown
        if name.startswith("SFT") and "RL" not in name
    }
    seeds = [f"seed {seed}" for seed in options.seeds]
    print(f"| pass@1, % | {' | '.join(seeds)} | mean |")
    print(f"|---|{'--:|' * (len(seeds) + 1)}")
    for name, values in (shown | skills).items():
        print(f"| {name} | {points(values)} |")
    print()
    mean = {name: statistics.mean(values) for name, values in shown.items()}
    checks: dict[str, bool] = {}
    for name, beside in (
        ("SFT, full rank", "SFT"),
        ("SFT and RL, full rank", "RL"),
        (f"RL, rank {FULL_RANK}", "RL"),
    ):
        if name in mean:
            apart = mean[name] - mean[beside]
            checks[f"{name}: {100 * apart:+.1f} points of {beside}, wanted -2 or more"] = apart >= -WITHIN
    for rank in NF4_RANKS if f"RL, rank {NF4_RANKS[0]} on NF4" in shown else ():
        middle = statistics.median(shown[f"RL, rank {rank} on NF4"])
        checks[f"RL, rank {rank} on NF4: median {middle:.3f}, wanted {TARGET} or more"] = middle >= TARGET
    for text, is_met in checks.items():
        print(f"- {'met' if is_met else 'MISSED'}: {text}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
