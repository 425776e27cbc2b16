"""Recipes of `whet sft`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whet.cli import Program
from whet.generate.policy import PolicyConfig
from whet.inspect.memory.room import check_room, sized
from whet.recipes.models import (
    CHESS,
    CHESS_BOARDS,
    OWN,
    ROOKWORLD,
    STORIES,
    calculator_policy,
    chess_policy,
    demo_policy,
    facts_policy,
    gpt2_policy,
    rookworld_policy,
)
from whet.recipes.suited import suited
from whet.tasks.base import TaskConfig
from whet.train.optim.step import PRESETS, OptimConfig
from whet.train.sft import SFTConfig, check, main, plan


def demo() -> SFTConfig:
    """Sums of two-digit numbers from random weights; half of the demonstrations have an empty scratch-pad."""
    return SFTConfig(
        out="runs/demo-sft",
        policy=demo_policy(),
        optim=OptimConfig(
            lr=2e-3, warmup_steps=30, final_lr_share=0.02, beta2=0.95, weight_decay=0.1, max_grad_norm=1.0
        ),
        num_steps=600,
        batch_size=32,
        empty_thinking_share=0.5,
        validation_problems=128,
        validate_every=200,
        save_every=600,
    )


def demo_vision() -> SFTConfig:
    """Sums of coloured cells in an image, from the random weights that `whet demo --vision` leaves as `base`."""
    config = demo()
    return replace(
        config,
        out="runs/demo-vision-seen",
        policy=PolicyConfig(init="runs/demo-vision-base", train_vision=True, max_rows=512),
        task=TaskConfig(name="matrices", level=1),
        num_steps=500,
        empty_thinking_share=0.0,
        validate_every=100,
        save_every=500,
    )


def demo_vision_habit() -> SFTConfig:
    """A little more of the same, of which three in five skip the working: it could work, but often does not.

    From the start such answers, which nobody can guess, keep so small a model from learning to look numbers up.
    """
    config = demo_vision()
    return replace(
        config,
        out="runs/demo-vision-sft",
        policy=PolicyConfig(init="runs/demo-vision-seen", max_rows=512),
        optim=replace(config.optim, lr=1e-3, warmup_steps=5),
        num_steps=60,
        empty_thinking_share=0.6,
        save_every=60,
    )


def calculator() -> SFTConfig:
    """Products of four-digit numbers with a calculator, which half of the demonstrations do not call."""
    return replace(
        demo(), out="runs/calculator-sft", policy=calculator_policy(), task=TaskConfig(name="products")
    )


def stories260k_gsm8k() -> SFTConfig:
    """A real 264 k parameter Llama (TinyStories) on GSM8K solutions: learns the format, not the maths."""
    return SFTConfig(
        out="runs/stories260k-gsm8k-sft",
        policy=PolicyConfig(init=STORIES, schema="think_answer", template="base", system_prompt=False),
        task=TaskConfig(name="gsm8k"),
        optim=OptimConfig(lr=2e-3, warmup_steps=50, beta2=0.98, weight_decay=0.01),
        num_steps=600,
        batch_size=32,
        validation_problems=200,
        validate_every=100,
        save_every=300,
    )


def gpt2_gsm8k() -> SFTConfig:
    """GPT-2 124M on GSM8K solutions with think/answer tags as tokens."""
    return SFTConfig(
        out="runs/gpt2-gsm8k-sft",
        policy=gpt2_policy(),
        task=TaskConfig(name="gsm8k"),
        optim=OptimConfig(lr=3e-4, warmup_steps=100, weight_decay=0.1, precision="bfloat16_autocast"),
        num_steps=2000,
        batch_size=32,
        validate_every=200,
    )


def smollm2_gsm8k() -> SFTConfig:
    """SmolLM2-135M-Instruct on GSM8K solutions, once through, with think/answer tags as tokens (hours on two cores)."""
    return SFTConfig(
        out="runs/smollm2-gsm8k-sft",
        policy=PolicyConfig(
            init="smollm2", schema="think_answer", tags_as_tokens=True, system_prompt=False, max_rows=128
        ),
        task=TaskConfig(name="gsm8k"),
        optim=OptimConfig(lr=2e-4, warmup_steps=20, weight_decay=0.01, beta2=0.98),
        num_steps=444,
        batch_size=16,
        validation_problems=128,
        validate_every=74,
        save_every=74,
    )


def smollm2_words() -> SFTConfig:
    """SmolLM2-135M-Instruct on 320 worked solutions of word problems (a minute): it solves few of two steps."""
    return SFTConfig(
        out="runs/smollm2-words-sft",
        policy=PolicyConfig(init="smollm2", schema="anywhere", max_rows=64),
        task=TaskConfig(name="words", level=1),
        optim=OptimConfig(lr=2e-5, warmup_steps=10, weight_decay=0.01, beta2=0.99, precision="auto"),
        num_steps=20,
        batch_size=16,
    )


def chess_boards() -> SFTConfig:
    """What moves do, from random weights: the next board, and lists of legal moves; no Stockfish is needed."""
    return SFTConfig(
        out="runs/chess-boards",
        policy=chess_policy(),
        task=CHESS_BOARDS,
        optim=OptimConfig(
            lr=3e-3,
            optimizer="muon",
            muon_lr=1.2e-2,
            schedule="linear",
            warmup_steps=30,
            final_lr_share=0.05,
            beta2=0.98,
            weight_decay=0.05,
        ),
        num_steps=2800,
        batch_size=16,
        validation_problems=256,
        validate_every=700,
        save_every=700,
    )


def chess() -> SFTConfig:
    """Lines of chess from `chess-boards`: best moves by Stockfish, and what moves do.

    The rate is half of that stage's, which random weights can stand: at the same one boards are unlearned for most of
    the run, and with less, moves are learned too slowly (docs/LOG.md).
    """
    boards = chess_boards()
    weights = {"chess-policy": 3.0, "chess-env": 2.0}
    return replace(
        boards,
        out="runs/chess-sft",
        policy=chess_policy("runs/chess-boards"),
        task=replace(CHESS, weights=weights, num_problems=40_000),
        optim=replace(boards.optim, lr=1.5e-3, muon_lr=6e-3),
        allowed_coef=4.0,
        num_steps=10_000,
        validate_every=2500,
        save_every=500,
    )


def facts() -> SFTConfig:
    """Some 2,000 facts in several wordings, and prose, from random weights: the model that docs/editing.md edits.

    `python bench/patient.py RELATIONS runs/facts --only data` writes its texts and its tokenizer.
    """
    return SFTConfig(
        out="runs/facts/model",
        policy=facts_policy(),
        task=TaskConfig(name="jsonl", path="runs/facts/texts.jsonl"),
        optim=OptimConfig(
            lr=3e-3,
            optimizer="muon",
            warmup_steps=55,
            final_lr_share=0.02,
            beta2=0.95,
            weight_decay=0.1,
        ),
        num_steps=1100,
        batch_size=32,
        validation_problems=0,
        save_every=275,
    )


def rookworld_124m() -> SFTConfig:
    """GPT-2 124M on lines of chess, as RookWorld-LM was made: P: and A: lines in one model."""
    return SFTConfig(
        out="runs/rookworld-124m-sft",
        policy=rookworld_policy("openai-community/gpt2"),
        task=replace(ROOKWORLD, num_problems=200_000),
        optim=OptimConfig(
            lr=6e-4, warmup_steps=200, weight_decay=0.1, beta2=0.95, precision="bfloat16_autocast"
        ),
        num_steps=10_000,
        batch_size=64,
        validate_every=500,
        save_every=1000,
    )


def own() -> SFTConfig:
    """Your model and your chats or worked solutions: --model MODEL --data FILE, by default
    Qwen2.5-0.5B-Instruct on GSM8K."""
    return SFTConfig(
        out="runs/own-sft",
        policy=PolicyConfig(init=OWN, max_rows=64),
        task=TaskConfig(name="gsm8k"),
        optim=OptimConfig(lr=1e-5, warmup_steps=10, weight_decay=0.01, beta2=0.99),
        num_steps=200,
        batch_size=16,
        validate_every=50,
        save_every=100,
    )


def _hub(name: str, slug: str, *, lr: float, checkpoint_layers: bool) -> SFTConfig:
    """Fine-tuning of a hub model on MATH solutions: reasoning in tags, full parameters."""
    return SFTConfig(
        out=f"runs/{slug}-math-sft",
        policy=PolicyConfig(init=name, schema="think_answer", template="base", max_rows=128),
        task=TaskConfig(name="math"),
        optim=OptimConfig(
            lr=lr,
            warmup_steps=30,
            weight_decay=0.01,
            beta2=0.99,
            precision="bfloat16_master",
            checkpoint_layers=checkpoint_layers,
        ),
        num_steps=300,
        batch_size=32,
        validate_every=50,
        save_every=100,
    )


def qwen25_05b_math() -> SFTConfig:
    """Qwen2.5-0.5B on worked MATH solutions."""
    return _hub("Qwen/Qwen2.5-0.5B", "qwen2.5-0.5b", lr=2e-5, checkpoint_layers=False)


def qwen25_15b_math() -> SFTConfig:
    """Qwen2.5-1.5B on worked MATH solutions."""
    return _hub("Qwen/Qwen2.5-1.5B", "qwen2.5-1.5b", lr=2e-5, checkpoint_layers=True)


def qwen25_3b_math() -> SFTConfig:
    """Qwen2.5-3B on worked MATH solutions."""
    return _hub("Qwen/Qwen2.5-3B", "qwen2.5-3b", lr=2e-5, checkpoint_layers=True)


def qwen3_06b_math() -> SFTConfig:
    """Qwen3-0.6B-Base on worked MATH solutions."""
    return _hub("Qwen/Qwen3-0.6B-Base", "qwen3-0.6b", lr=2e-5, checkpoint_layers=False)


def qwen3_4b_math() -> SFTConfig:
    """Qwen3-4B-Base primed on worked MATH solutions with the tags of Unsloth's GRPO notebooks."""
    config = _hub("Qwen/Qwen3-4B-Base", "qwen3-4b", lr=1e-5, checkpoint_layers=True)
    return replace(config, policy=replace(config.policy, schema="working_out_solution"))


def qwen3_4b_priming() -> SFTConfig:
    """Qwen3-4B-Base shown the format before RL: 600 worked MATH solutions, twice, with the words of Unsloth's
    notebooks; your own R1 traces with --task.path."""
    config = qwen3_4b_math()
    return replace(
        config,
        out="runs/qwen3-4b-priming",
        policy=replace(config.policy, schema="workshop"),
        optim=replace(config.optim, warmup_steps=5),
        num_problems=600,
        batch_size=8,
        num_steps=2 * 600 // 8,
        save_every=150,
    )


def llama32_1b_math() -> SFTConfig:
    """Llama-3.2-1B on worked MATH solutions."""
    return _hub("meta-llama/Llama-3.2-1B", "llama-3.2-1b", lr=2e-5, checkpoint_layers=False)


def llama32_3b_math() -> SFTConfig:
    """Llama-3.2-3B on worked MATH solutions."""
    return _hub("meta-llama/Llama-3.2-3B", "llama-3.2-3b", lr=1e-5, checkpoint_layers=True)


RECIPES: dict[str, Callable[[], SFTConfig]] = {
    "own": own,
    "demo": demo,
    "calculator": calculator,
    "stories260k-gsm8k": stories260k_gsm8k,
    "gpt2-gsm8k": gpt2_gsm8k,
    "smollm2-gsm8k": smollm2_gsm8k,
    "smollm2-words": smollm2_words,
    "chess-boards": chess_boards,
    "chess": chess,
    "facts": facts,
    "rookworld-124m": rookworld_124m,
    "qwen2.5-0.5b-math": qwen25_05b_math,
    "qwen2.5-1.5b-math": qwen25_15b_math,
    "qwen2.5-3b-math": qwen25_3b_math,
    "qwen3-0.6b-math": qwen3_06b_math,
    "qwen3-4b-math": qwen3_4b_math,
    "qwen3-4b-priming": qwen3_4b_priming,
    "llama3.2-1b-math": llama32_1b_math,
    "llama3.2-3b-math": llama32_3b_math,
}


PROGRAM = Program(
    config_class=SFTConfig,
    main=main,
    recipes=RECIPES,
    plan=plan,
    resumable=True,
    shared=True,
    check=check,
    before=check_room,
    sized=lambda config, typed: sized(suited(config, typed), typed),
    presets={"optim": PRESETS},
)
