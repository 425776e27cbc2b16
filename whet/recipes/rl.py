"""Recipes of `whet rl`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whet.algo.config import OffPolicyConfig
from whet.cli import Program
from whet.generate.policy import INHERIT, PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.inspect.memory.room import check_room, sized
from whet.model.lora.side import LoRAConfig
from whet.recipes.models import (
    CHESS,
    OWN,
    ROOKWORLD,
    calculator_policy,
    chess_policy,
    demo_policy,
    rookworld_policy,
)
from whet.recipes.suited import suited
from whet.tasks.base import TaskConfig
from whet.train.objective.objective import AlgoConfig
from whet.train.objective.teacher import TeacherConfig
from whet.train.optim.step import PRESETS, OptimConfig
from whet.train.rl import check, main
from whet.train.rl_config import RLConfig, plan
from whet.train.rollout.overlap import OverlapConfig
from whet.train.rollout.self_play import SelfPlayConfig


def reinforce() -> AlgoConfig:
    """REINFORCE: the reward itself times the log-probability; no baseline, no ratio."""
    return AlgoConfig(
        baseline="none", scale="none", surrogate="logprob", aggregation="sequence_sum", uninformative="keep"
    )


def rloo() -> AlgoConfig:
    """RLOO: REINFORCE with the mean of the other samples as baseline (2402.14740)."""
    return AlgoConfig(
        baseline="leave_one_out",
        scale="none",
        surrogate="logprob",
        aggregation="sequence_sum",
        uninformative="keep",
    )


def grpo() -> AlgoConfig:
    """GRPO as published: group z-scores, mean over sequences of token means (2402.03300), without the KL term."""
    return AlgoConfig(aggregation="sequence_mean", uninformative="keep")


def grpo_kl() -> AlgoConfig:
    """GRPO as published with its KL term: k3 in the loss at weight 0.04 (2402.03300)."""
    return replace(grpo(), kl="k3_loss", kl_coef=0.04)


def grpo_seed001() -> AlgoConfig:
    """GRPO with the constants of the seed's "reasoning engine": a KL of weight 0.1, clip 0.2."""
    return replace(grpo(), kl="k3_loss", kl_coef=0.1)


def dr_grpo() -> AlgoConfig:
    """Dr. GRPO: no standard deviation, constant length denominator, no KL (2503.20783)."""
    return AlgoConfig(scale="none", aggregation="constant", uninformative="keep")


def dapo() -> AlgoConfig:
    """DAPO: clip-higher, dynamic sampling with refill, token-level loss, soft overlong penalty (2503.14476)."""
    return AlgoConfig(
        clip_high=0.28,
        aggregation="token_mean",
        uninformative="refill",
        overlong="soft",
    )


def dapo_seed001() -> AlgoConfig:
    """DAPO with the seed's overlong penalty: -0.5 for a completion cut off without an answer, not the paper's ramp."""
    return replace(dapo(), overlong="hard")


def gspo() -> AlgoConfig:
    """GSPO: ratio and clip of whole sequences (2507.18071)."""
    return AlgoConfig(
        ratio="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregation="sequence_mean",
        uninformative="keep",
    )


def gmpo() -> AlgoConfig:
    """GMPO: geometric mean of token ratios, each clipped in log space (2507.20673)."""
    return AlgoConfig(
        ratio="sequence",
        surrogate="geometric",
        clip_low=0.4,
        clip_high=0.4,
        aggregation="sequence_mean",
        uninformative="keep",
    )


def cispo() -> AlgoConfig:
    """CISPO: truncated importance weights times the log-probability: no token loses its gradient (2506.13585)."""
    return AlgoConfig(surrogate="weight", clip_low=1.0, clip_high=4.0)


def sapo() -> AlgoConfig:
    """SAPO: a soft gate in place of the clip (2511.20347)."""
    return AlgoConfig(surrogate="sigmoid", aggregation="sequence_mean", uninformative="keep")


def reinforce_pp() -> AlgoConfig:
    """REINFORCE++: rewards with a KL penalty by token, whitened over the whole batch (2501.03262)."""
    return AlgoConfig(
        baseline="none", scale="none", whiten=True, kl="k1_reward", kl_coef=0.01, uninformative="keep"
    )


def reinforce_pp_baseline() -> AlgoConfig:
    """REINFORCE++-baseline: less the group's mean, then whitened over the whole batch (2501.03262)."""
    return AlgoConfig(scale="none", whiten=True, kl="k2_loss", kl_coef=0.01, uninformative="keep")


def ppo() -> AlgoConfig:
    """PPO: a critic with GAE, advantages whitened, two passes of two updates over each batch (1707.06347)."""
    return AlgoConfig(
        baseline="value", scale="none", whiten=True, uninformative="keep", num_minibatches=2, num_epochs=2
    )


def gdpo() -> AlgoConfig:
    """GDPO: each reward normalised in its group before they are added (2601.05242)."""
    return AlgoConfig(multi_reward="normalise", uninformative="keep")


def distill() -> AlgoConfig:
    """On-policy distillation without group statistics: give a teacher, and rewards of weight 0 for it alone."""
    return AlgoConfig(baseline="none", scale="none", surrogate="logprob", uninformative="keep")


ALGORITHMS: dict[str, Callable[[], AlgoConfig]] = {
    "reinforce": reinforce,
    "rloo": rloo,
    "grpo": grpo,
    "grpo_kl": grpo_kl,
    "grpo_seed001": grpo_seed001,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "dapo_seed001": dapo_seed001,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "ppo": ppo,
    "gdpo": gdpo,
    "distill": distill,
}
"""Named algorithms as arguments of the one objective: `whet rl RECIPE --algo NAME`."""


def demo() -> RLConfig:
    """GRPO on sums of two-digit numbers, from the demo's fine-tuned model."""
    return RLConfig(
        out="runs/demo-rl",
        policy=demo_policy("runs/demo-sft"),
        rewards={"correct": 1.0, "format": 0.1},
        sampling=SamplingParams(temperature=1.0, max_new_tokens=48),
        algo=AlgoConfig(clip_high=0.28),
        optim=OptimConfig(
            lr=5e-4, schedule="linear", final_lr_share=0.0, warmup_steps=5, beta2=0.99, max_grad_norm=0.3
        ),
        num_steps=60,
        num_prompts=32,
        group_size=8,
        save_every=60,
    )


def demo_vision() -> RLConfig:
    """GRPO on sums of coloured cells in an image; the tower is frozen, so each image is encoded once."""
    config = demo()
    return replace(
        config,
        out="runs/demo-vision-rl",
        policy=PolicyConfig(init="runs/demo-vision-sft", max_rows=512),
        task=TaskConfig(name="matrices", level=1),
        sampling=replace(config.sampling, max_new_tokens=56),
    )


def demo_distill() -> RLConfig:
    """The demo's fine-tuned model learns from its reinforced one alone: one sample a problem, rewards only measured."""
    return replace(
        demo(),
        out="runs/demo-distill",
        rewards={"correct": 0.0},
        algo=distill(),
        teacher=TeacherConfig(init="runs/demo-rl"),
        num_prompts=64,
        group_size=1,
    )


def calculator() -> RLConfig:
    """GRPO on products of four-digit numbers, with a calculator: right answers teach the model to call it."""
    return replace(
        demo(),
        out="runs/calculator-rl",
        policy=calculator_policy("runs/calculator-sft"),
        task=TaskConfig(name="products"),
    )


def chess() -> RLConfig:
    """GRPO on lines of chess from the fine-tuned small model: python-chess and Stockfish's lines decide what pays.

    Legal moves and exact lines pay most: under the sum of all parts alone nothing moves (docs/LOG.md).
    """
    return RLConfig(
        out="runs/chess-rl",
        policy=chess_policy("runs/chess-sft"),
        task=CHESS,
        rewards={"chess_legal": 1.0, "correct": 1.0, "chess_fen": 0.5, "chess": 0.3, "chess_best": 0.0},
        sampling=SamplingParams(temperature=1.0, max_new_tokens=96),
        algo=AlgoConfig(clip_high=0.28, uninformative="refill"),
        optim=OptimConfig(
            lr=4e-4, schedule="linear", final_lr_share=0.1, warmup_steps=10, beta2=0.98, max_grad_norm=1.0
        ),
        num_steps=450,
        num_prompts=16,
        group_size=8,
        validation_problems=256,
        validate_every=150,
        save_every=150,
    )


OF_POLICY, OF_ENVIRONMENT = ("chess_legal", "chess_best"), ("chess_fen", "chess_flags")
"""Parts of lines that are measured beside what is paid."""


def _rookworld(slug: str, task: TaskConfig, parts: tuple[str, ...]) -> RLConfig:
    """The seed's run of GRPO on RookWorld-LM 124M, with what it lacked.

    Its settings: lr 1e-5, weight decay 0.01, clip 0.2, KL 0.02, eight samples of eight positions at temperature 0.7 and
    top-p 0.95, 1,000 steps. Corrected: the ratio starts from the policy that sampled, the KL from the reference; 144
    new tokens (64 cut an environment's line off); fixed nodes, not time; the best move is the side's to move; the
    warm-up takes place; KL's weight adapts.
    """
    return RLConfig(
        out=f"runs/{slug}-rl",
        policy=rookworld_policy("jrahn/RookWorld-LM-124M"),
        task=task,
        rewards={"rookworld": 1.0, "correct": 0.0} | dict.fromkeys(parts, 0.0),
        sampling=SamplingParams(temperature=0.7, top_p=0.95, max_new_tokens=144),
        algo=replace(grpo(), kl="k3_loss", kl_coef=0.02, kl_target=0.1),
        optim=OptimConfig(
            lr=1e-5,
            schedule="constant",
            warmup_steps=100,
            weight_decay=0.01,
            max_grad_norm=1.0,
            precision="bfloat16_autocast",
        ),
        # 70 % of the problems from games, the rest from the task: the source's share of openings is 0.3.
        self_play=SelfPlayConfig(share=0.7 if task.name != "chess-env" else 0.0),
        num_steps=1000,
        num_prompts=8,
        group_size=8,
        validation_problems=200,
        validate_every=100,
        save_every=100,
    )


def rookworld_124m() -> RLConfig:
    """The seed's GRPO on RookWorld-LM 124M, corrected: three lines of the policy to one of the environment."""
    return _rookworld("rookworld-124m", ROOKWORLD, (*OF_POLICY, *OF_ENVIRONMENT))


def rookworld_124m_p() -> RLConfig:
    """The same on lines of the policy alone (P:)."""
    task = TaskConfig(name="chess-policy", num_problems=ROOKWORLD.num_problems)
    return _rookworld("rookworld-124m-p", task, OF_POLICY)


def rookworld_124m_a() -> RLConfig:
    """The same on lines of the environment alone (A:)."""
    task = TaskConfig(name="chess-env", num_problems=ROOKWORLD.num_problems)
    return _rookworld("rookworld-124m-a", task, OF_ENVIRONMENT)


def stories260k_gsm8k() -> RLConfig:
    """GRPO on GSM8K from the fine-tuned stories260k: format and correctness rewards."""
    return RLConfig(
        out="runs/stories260k-gsm8k-rl",
        policy=PolicyConfig(init="runs/stories260k-gsm8k-sft"),
        task=TaskConfig(name="gsm8k"),
        rewards={"correct": 1.0, "format": 0.5},
        sampling=SamplingParams(max_new_tokens=256),
        algo=AlgoConfig(clip_high=0.28),
        optim=OptimConfig(lr=1e-4, schedule="constant", beta2=0.99),
        num_steps=40,
        num_prompts=8,
        group_size=8,
        save_every=20,
    )


def gpt2_gsm8k() -> RLConfig:
    """DAPO on GSM8K from the fine-tuned GPT-2 124M (with refill of uninformative groups)."""
    return RLConfig(
        out="runs/gpt2-gsm8k-rl",
        policy=PolicyConfig(init="runs/gpt2-gsm8k-sft", max_rows=128),
        task=TaskConfig(name="gsm8k"),
        rewards={"correct": 1.0, "format": 0.5},
        sampling=SamplingParams(max_new_tokens=512),
        algo=replace(dapo(), entropy_coef=0.001),
        optim=OptimConfig(lr=5e-6, schedule="cosine", precision="bfloat16_autocast"),
        num_steps=500,
        num_prompts=8,
        group_size=8,
    )


def smollm2_gsm8k() -> RLConfig:
    """DAPO on GSM8K from the fine-tuned SmolLM2-135M, with the options of a source that trained GPT-2 (hours)."""
    return RLConfig(
        out="runs/smollm2-gsm8k-rl",
        policy=PolicyConfig(init="runs/smollm2-gsm8k-sft", max_rows=64),
        task=TaskConfig(name="gsm8k"),
        rewards={"correct": 1.0, "format": 0.5},
        sampling=SamplingParams(temperature=0.7, max_new_tokens=200),
        algo=AlgoConfig(clip_high=0.28, entropy_coef=0.01, entropy_coef_final=0.001),
        optim=OptimConfig(lr=1e-5, schedule="cosine", warmup_steps=5, beta2=0.99),
        num_steps=200,
        num_prompts=4,
        group_size=8,
        save_every=20,
    )


def smollm2_words() -> RLConfig:
    """GRPO on word problems from the fine-tuned SmolLM2-135M-Instruct: right answers alone pay (ten minutes)."""
    return RLConfig(
        out="runs/smollm2-words-rl",
        policy=PolicyConfig(init="runs/smollm2-words-sft", max_rows=128),
        task=TaskConfig(name="words", level=1),
        rewards={"correct": 1.0},
        sampling=SamplingParams(max_new_tokens=40),
        algo=AlgoConfig(clip_high=0.28),
        # 2e-5 unlearned two steps within ten updates of few groups (docs/results/words_smollm2.md).
        optim=OptimConfig(
            lr=5e-6, schedule="linear", final_lr_share=0.1, warmup_steps=2, beta2=0.99, precision="auto"
        ),
        num_steps=75,
        num_prompts=16,
        group_size=8,
        save_every=25,
    )


def own() -> RLConfig:
    """Your model and your data: --model MODEL --data FILE, by default Qwen2.5-0.5B-Instruct on GSM8K."""
    return RLConfig(
        out="runs/own-rl",
        policy=PolicyConfig(init=OWN, max_rows=64),
        task=TaskConfig(name="gsm8k"),
        rewards={"correct": 1.0, "format": 0.1},
        sampling=SamplingParams(max_new_tokens=512),
        algo=AlgoConfig(clip_high=0.28),
        optim=OptimConfig(lr=1e-6, schedule="constant", warmup_steps=5, beta2=0.99),
        num_steps=100,
        num_prompts=8,
        group_size=8,
        save_every=20,
    )


def _hub(slug: str, algo: AlgoConfig, *, lr: float = 1e-6, base: str = "", schema: str = INHERIT) -> RLConfig:
    """RL on MATH problems from a fine-tuned (or base) hub model, full parameters."""
    return RLConfig(
        out=f"runs/{slug}-math-rl",
        policy=PolicyConfig(init=base or f"runs/{slug}-math-sft", schema=schema, max_rows=256),
        task=TaskConfig(name="math"),
        rewards={"correct": 1.0, "format": 0.1},
        sampling=SamplingParams(max_new_tokens=1024),
        algo=algo,
        optim=OptimConfig(
            lr=lr,
            schedule="constant",
            warmup_steps=10,
            beta2=0.99,
            precision="bfloat16_master",
            checkpoint_layers=True,
        ),
        num_steps=200,
        num_prompts=32,
        group_size=8,
        validation_problems=200,
        save_every=25,
    )


def qwen25_05b_math() -> RLConfig:
    """Dr. GRPO on MATH from the fine-tuned Qwen2.5-0.5B."""
    return _hub("qwen2.5-0.5b", dr_grpo())


def qwen25_15b_math() -> RLConfig:
    """Dr. GRPO on MATH from the fine-tuned Qwen2.5-1.5B."""
    return _hub("qwen2.5-1.5b", dr_grpo())


def qwen25_3b_math_grpo() -> RLConfig:
    """GRPO with KL 0.1 to the reference on MATH from the fine-tuned Qwen2.5-3B."""
    return replace(
        _hub("qwen2.5-3b", replace(grpo(), kl="k3_loss", kl_coef=0.1)), out="runs/qwen2.5-3b-math-grpo"
    )


def qwen25_3b_math_grpo_overlapped() -> RLConfig:
    """The same, trained while the next step's completions are sampled: one step off-policy, as the ratio knows."""
    return replace(
        qwen25_3b_math_grpo(),
        out="runs/qwen2.5-3b-math-grpo-overlapped",
        overlap=OverlapConfig(mode="async"),
        off_policy=OffPolicyConfig(staleness=1),
    )


def qwen25_3b_math_dr_grpo() -> RLConfig:
    """Dr. GRPO on MATH from the fine-tuned Qwen2.5-3B."""
    return replace(_hub("qwen2.5-3b", dr_grpo()), out="runs/qwen2.5-3b-math-dr-grpo")


def qwen25_3b_math_dapo() -> RLConfig:
    """DAPO on MATH from the fine-tuned Qwen2.5-3B."""
    return replace(_hub("qwen2.5-3b", dapo()), out="runs/qwen2.5-3b-math-dapo")


def qwen3_06b_math() -> RLConfig:
    """DAPO on MATH from the fine-tuned Qwen3-0.6B."""
    return _hub("qwen3-0.6b", dapo())


def qwen3_4b_math() -> RLConfig:
    """DAPO on MATH from the primed Qwen3-4B."""
    return _hub("qwen3-4b", dapo())


def llama32_1b_math() -> RLConfig:
    """Dr. GRPO on MATH from the fine-tuned Llama-3.2-1B."""
    return _hub("llama-3.2-1b", dr_grpo())


def llama32_3b_math() -> RLConfig:
    """Dr. GRPO on MATH from the fine-tuned Llama-3.2-3B."""
    return _hub("llama-3.2-3b", dr_grpo())


def qwen25_05b_instruct_math() -> RLConfig:
    """Dr. GRPO on MATH from Qwen2.5-0.5B-Instruct, without priming: its chat template, answers in boxes."""
    return _hub("qwen2.5-0.5b-instruct", dr_grpo(), base="Qwen/Qwen2.5-0.5B-Instruct", schema="boxed")


def llama32_3b_instruct_math() -> RLConfig:
    """Dr. GRPO on MATH from Llama-3.2-3B-Instruct, without priming: its chat template, answers in boxes."""
    return _hub("llama-3.2-3b-instruct", dr_grpo(), base="meta-llama/Llama-3.2-3B-Instruct", schema="boxed")


def r1_distill_qwen_15b_math() -> RLConfig:
    """Dr. GRPO on MATH from DeepSeek-R1-Distill-Qwen-1.5B, whose template opens the thinking; longer responses."""
    base = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    config = _hub("r1-distill-qwen-1.5b", dr_grpo(), base=base, schema="r1")
    return replace(config, sampling=replace(config.sampling, max_new_tokens=4096))


def qwen3_vl_8b_lora() -> RLConfig:
    """GRPO with LoRA on questions of MathVista with a number for an answer, from Qwen3-VL-8B-Instruct, on one GPU."""
    return RLConfig(
        out="runs/qwen3-vl-8b-lora",
        policy=PolicyConfig(
            init="Qwen/Qwen3-VL-8B-Instruct", schema="reasoning_answer", max_image_tokens=256, max_rows=16
        ),
        # A benchmark, as the original trained on it: a tenth is held out, and its score says nothing afterwards.
        task=TaskConfig(name="mathvista_numbers", split="testmini"),
        rewards={"correct": 2.0, "tag_count": 1.0, "format_soft": 1.0, "format_strict": 1.0},
        sampling=SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=1024),
        algo=grpo(),
        lora=LoRAConfig(rank=16, alpha=32.0),
        optim=OptimConfig(
            lr=5e-6,
            schedule="linear",
            warmup_steps=0,
            final_lr_share=0.0,
            precision="bfloat16_master",
            checkpoint_layers=True,
            token_budget=12_288,
        ),
        num_steps=250,
        num_prompts=2,
        group_size=8,
        validation_problems=50,
        validate_every=25,
        save_every=25,
        seed=42,
    )


RECIPES: dict[str, Callable[[], RLConfig]] = {
    "own": own,
    "demo": demo,
    "demo-distill": demo_distill,
    "calculator": calculator,
    "chess": chess,
    "rookworld-124m": rookworld_124m,
    "rookworld-124m-p": rookworld_124m_p,
    "rookworld-124m-a": rookworld_124m_a,
    "stories260k-gsm8k": stories260k_gsm8k,
    "gpt2-gsm8k": gpt2_gsm8k,
    "smollm2-gsm8k": smollm2_gsm8k,
    "smollm2-words": smollm2_words,
    "qwen2.5-0.5b-math": qwen25_05b_math,
    "qwen2.5-1.5b-math": qwen25_15b_math,
    "qwen2.5-3b-math-grpo": qwen25_3b_math_grpo,
    "qwen2.5-3b-math-grpo-overlapped": qwen25_3b_math_grpo_overlapped,
    "qwen2.5-3b-math-dr-grpo": qwen25_3b_math_dr_grpo,
    "qwen2.5-3b-math-dapo": qwen25_3b_math_dapo,
    "qwen3-0.6b-math": qwen3_06b_math,
    "qwen3-4b-math": qwen3_4b_math,
    "qwen2.5-0.5b-instruct-math": qwen25_05b_instruct_math,
    "llama3.2-3b-instruct-math": llama32_3b_instruct_math,
    "r1-distill-qwen-1.5b-math": r1_distill_qwen_15b_math,
    "llama3.2-1b-math": llama32_1b_math,
    "llama3.2-3b-math": llama32_3b_math,
    "qwen3-vl-8b-lora": qwen3_vl_8b_lora,
}


PROGRAM = Program(
    config_class=RLConfig,
    main=main,
    recipes=RECIPES,
    plan=plan,
    resumable=True,
    shared=True,
    check=check,
    before=check_room,
    sized=lambda config, typed: sized(suited(config, typed), typed),
    presets={"algo": ALGORITHMS, "optim": PRESETS},
)
