"""Recipes of `whet eval`."""

from __future__ import annotations

from collections.abc import Callable

from whet.cli import Program
from whet.eval.compare.compare import CompareConfig
from whet.eval.compare.compare import check as compare_check
from whet.eval.compare.compare import main as compare_main
from whet.eval.compare.compare import plan as compare_plan
from whet.eval.evaluate import EvalConfig, check, main, plan
from whet.generate.policy import PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.recipes.models import OWN, calculator_policy, chess_policy, demo_policy
from whet.recipes.suited import suited
from whet.tasks.base import TaskConfig


def own() -> EvalConfig:
    """Your model on your rows: --model MODEL --data FILE, by default Qwen2.5-0.5B-Instruct on GSM8K; answers
    count wherever they stand."""
    return EvalConfig(
        out="runs/own-eval",
        policy=PolicyConfig(init=OWN, max_rows=64),
        task=TaskConfig(name="gsm8k"),
        num_samples=8,
        sampling=SamplingParams(max_new_tokens=512),
        answer_from="anywhere",
    )


def demo() -> EvalConfig:
    """The demo's trained model on 512 held-out sums."""
    return EvalConfig(
        out="runs/demo-eval",
        policy=demo_policy("runs/demo-rl"),
        num_problems=512,
        sampling=SamplingParams(max_new_tokens=48),
    )


def calculator() -> EvalConfig:
    """Products of four-digit numbers, with the tools that the model was trained with: 512 problems x 8 samples."""
    return EvalConfig(
        out="runs/calculator-eval",
        policy=calculator_policy("runs/calculator-rl"),
        task=TaskConfig(name="products"),
        num_problems=512,
        num_samples=8,
        sampling=SamplingParams(max_new_tokens=96),
    )


def gsm8k() -> EvalConfig:
    """Any model (--policy.init) on 200 GSM8K test problems x 16 samples at temperature 0.7."""
    return EvalConfig(
        out="runs/gsm8k-eval",
        policy=PolicyConfig(init="Qwen/Qwen2.5-0.5B"),
        task=TaskConfig(name="gsm8k"),
        sampling=SamplingParams(temperature=0.7, top_k=50, max_new_tokens=400),
    )


def math500() -> EvalConfig:
    """Any model (--policy.init) on MATH-500 x 4 samples at temperature 0.7."""
    return EvalConfig(
        out="runs/math500-eval",
        policy=PolicyConfig(init="Qwen/Qwen2.5-0.5B"),
        task=TaskConfig(name="math500"),
        num_problems=0,
        num_samples=4,
        sampling=SamplingParams(temperature=0.7, max_new_tokens=1024),
        answer_from="anywhere",
        precision="bfloat16",
    )


def chess() -> EvalConfig:
    """Any chess model (--policy.init) on positions of your file (--task.path) or of ours: legal moves, best moves, the
    environment to the letter, centipawn loss, puzzles; with --games.num-games 20 also games."""
    return EvalConfig(
        out="runs/chess-eval",
        policy=chess_policy("runs/chess-rl"),
        task=TaskConfig(name="chess"),
        num_problems=0,
        num_samples=1,
        sampling=SamplingParams(max_new_tokens=144),
    )


RECIPES: dict[str, Callable[[], EvalConfig]] = {
    "own": own,
    "demo": demo,
    "calculator": calculator,
    "gsm8k": gsm8k,
    "math500": math500,
    "chess": chess,
}


PROGRAM = Program(
    config_class=EvalConfig, main=main, recipes=RECIPES, plan=plan, check=check, resumable=True, sized=suited
)


COMPARE = Program(
    config_class=CompareConfig,
    main=compare_main,
    plan=compare_plan,
    check=compare_check,
    presets={"eval": RECIPES},
    positional="models",
    resumable=True,
)
