"""Compare training on several ranks with training in one process, program by program, in float64.

python bench/ranks_equal.py [--ranks 2 4] [--programs sft grpo ...] [--layouts fsdp ...] [--json FILE]

Every program trains a tiny model for five steps, once in this process and once for each number of gloo ranks and each
layout of the model over them; then all weights are compared. The number is the worst relative difference: of each
tensor the largest difference, divided by its largest weight. Ranks add gradients in another order, which in float64
shows in the last digits alone; anything larger is a fault (a share counted twice, a mean instead of a sum, a stale
copy). Exit status 1 where a number is above the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from whet import processes
from whet.algo.config import AlgoConfig, OffPolicyConfig
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.model.config import ModelConfig
from whet.model.families import from_hf
from whet.model.lora.side import LoRAConfig, Target
from whet.model.text.template import PLAIN_TEMPLATE
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model, load_model, save_model, stored_shape
from whet.ranks.fsdp import ParallelConfig
from whet.recipes.models import demo_policy
from whet.tasks.base import TaskConfig
from whet.train import dpo, rl, sft
from whet.train.dpo import DPOConfig
from whet.train.optim import step
from whet.train.optim.safety import SafetyConfig
from whet.train.optim.step import OptimConfig
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig

LIMIT = 1e-10
MOVED = 1e-4
STEPS = 5
SHAPE = ModelConfig(
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
)
LAYOUTS: dict[str, ParallelConfig] = {
    "replicate": ParallelConfig(),
    "fsdp": ParallelConfig(kind="fsdp"),
    "fsdp, kept between passes": ParallelConfig(kind="fsdp", reshard=False),
    "fsdp, layer by layer": ParallelConfig(kind="fsdp", gather="layer", prefetch=1),
    "hsdp": ParallelConfig(kind="fsdp", replicas=2),
    "balanced": ParallelConfig(balance="on"),
    "context": ParallelConfig(context=2),
    "fsdp, context": ParallelConfig(kind="fsdp", context=2),
    "tensor": ParallelConfig(tensor=2),
}


MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


SEES: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "hidden_act": "gelu_pytorch_tanh",
    },
}
SIZES = {
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
}


def make_bases(folder: Path) -> Path:
    """Make the models that programs start from: dense, and beside it a mixture of experts, and one that sees; return
    the first.
    """
    dense, mixture, sees = folder / "base", folder / "base-mixture", folder / "base-sees"
    policy = load_policy(replace(demo_policy(), model=SHAPE), seed=0, dtype=torch.float64)
    policy.save(dense)
    policy.save_protocol(mixture)
    config = from_hf(MIXTURE | {"vocab_size": policy.model.config.vocab_size}, where="a mixture")
    model = build_model(config).double()
    init_weights(model, 0)
    save_model(model, mixture)
    tokenizer = Tokenizer.bytes([*policy.schema.tags, "<image>"]).with_template(PLAIN_TEMPLATE)
    text = SEES["text_config"] | {"vocab_size": tokenizer.vocab_size}
    own = {"image_token_id": tokenizer.encode("<image>")[0], "text_config": text}
    model = build_model(replace(from_hf(SEES | own, where="a model that sees"), init_std=0.2)).double()
    init_weights(model, 0)
    Policy(model, tokenizer, policy.schema).save(sees)
    (sees / "preprocessor_config.json").write_text(json.dumps(SIZES))
    return dense


def seeing(base: Path) -> Path:
    """Return the model that sees beside a dense one."""
    return base.with_name(f"{base.name}-sees")


def mixture_of(base: Path) -> Path:
    """Return the mixture beside a dense model."""
    return base.with_name(f"{base.name}-mixture")


def _optim(**changes: Any) -> OptimConfig:
    # Micro-batches so small that ranks have different numbers of them.
    return OptimConfig(lr=1e-3, warmup_steps=1, precision="float32", token_budget=80, **changes)


def _policy(base: Path, **changes: Any) -> PolicyConfig:
    return PolicyConfig(init=str(base), max_rows=64, **changes)


def _common(base: Path, out: Path, layout: ParallelConfig) -> dict[str, Any]:
    return {
        "out": str(out),
        "policy": _policy(base),
        "parallel": layout,
        "num_steps": STEPS,
        "save_every": STEPS,
        "safety": SafetyConfig(background=False),
    }


def _sft(base: Path, out: Path, layout: ParallelConfig, **changes: Any) -> None:
    settings: dict[str, Any] = {
        "optim": _optim(),
        "batch_size": 6,
        "num_problems": 60,
        "validation_problems": 4,
    }
    sft.train(SFTConfig(**_common(base, out, layout) | settings | changes))


def _dpo(base: Path, out: Path, layout: ParallelConfig, **changes: Any) -> None:
    pairs = out.parent / "pairs.jsonl"
    rows = [
        {"prompt": f"{a}+{b}", "chosen": f"<think></think>{a + b}", "rejected": f"<think>{a}</think>{b}"}
        for a in range(2, 9)
        for b in range(3, 6)
    ]
    if not pairs.exists():
        pairs.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), pairs.open("x") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    settings: dict[str, Any] = {
        "pairs": str(pairs),
        "optim": _optim(),
        "batch_size": 5,
        "validation_share": 0.2,
    }
    dpo.train(DPOConfig(**_common(base, out, layout) | settings | changes))


def _rl(base: Path, out: Path, layout: ParallelConfig, **changes: Any) -> None:
    settings: dict[str, Any] = {
        "rewards": {"correct": 1.0, "format": 0.5, "repetition": 0.1, "cosine_length": 0.1},
        "sampling": SamplingParams(max_new_tokens=12),
        "optim": _optim(),
        "num_prompts": 4,
        "group_size": 4,
        "preflight": "warn",
        "ratio_tolerance": 1e-5,  # log-probabilities are kept in float32
    }
    rl.train(RLConfig(**_common(base, out, layout) | settings | changes))


PPO = AlgoConfig(
    baseline="value", kl="k3_loss", kl_coef=0.1, num_minibatches=2, uninformative="keep", scale="none"
)
REFILL: dict[str, Any] = {  # of few groups has one a right form: what is missing is no multiple of the ranks
    "algo": AlgoConfig(uninformative="refill", max_refills=3),
    "rewards": {"correct": 1.0, "format": 1.0},
    "num_prompts": 12,
    "group_size": 2,
}
LORA = LoRAConfig(rank=4)
BALANCED = _optim(router_aux_loss_coef=0.1)
PROGRAMS: dict[str, Callable[[Path, Path, ParallelConfig], None]] = {
    "sft": _sft,
    "sft, muon": lambda *where: _sft(*where, optim=_optim(optimizer="muon")),
    "sft, recomputed layers": lambda *where: _sft(*where, optim=_optim(checkpoint_layers=True)),
    "dpo": _dpo,
    "grpo": _rl,
    "grpo, stale": lambda *where: _rl(*where, off_policy=OffPolicyConfig(staleness=1)),
    "grpo, refill": lambda *where: _rl(*where, **REFILL),
    "ppo with a reference": lambda *where: _rl(*where, algo=PPO),
    # Two updates of one group each: in every one a rank has no tokens, for the policy and for the critic.
    "ppo, a rank without tokens": lambda *where: _rl(*where, algo=PPO, num_prompts=2),
    "sft, lora": lambda *where: _sft(*where, lora=LORA),
    "grpo, lora": lambda *where: _rl(*where, lora=LORA),
    "ppo with a reference, lora": lambda *where: _rl(*where, algo=PPO, lora=LORA),
    "sft, qlora": lambda *where: _sft(*where, lora=LORA, policy=_policy(where[0], quantize="nf4")),
    "grpo, qlora": lambda *where: _rl(*where, lora=LORA, policy=_policy(where[0], quantize="nf4")),
    "sft, experts": lambda *where: _sft(mixture_of(where[0]), *where[1:], optim=BALANCED),
    "sft, images": lambda *where: _sft(seeing(where[0]), *where[1:], **_shown()),
    "sft, images, tower": lambda *where: _sft(
        seeing(where[0]), *where[1:], **_shown(), policy=_policy(seeing(where[0]), train_vision=True)
    ),
    "grpo, images": lambda *where: _rl(seeing(where[0]), *where[1:], **_shown()),
    "grpo, images, lora and tower": lambda *where: _rl(
        seeing(where[0]), *where[1:], **_shown(), lora=replace(LORA, targets=("all-linear", "visual.*"))
    ),
    "grpo, experts": lambda *where: _rl(
        mixture_of(where[0]), *where[1:], optim=BALANCED, algo=AlgoConfig(uninformative="keep")
    ),
}


def _shown() -> dict[str, Any]:
    """Return the task of the model that sees: coloured matrices of 16 x 16 pixels, which are four tokens."""
    return {"task": TaskConfig(name="matrices", level=1, num_problems=60, cell=8)}


def fits(program: str, layout: ParallelConfig, world: int) -> bool:
    """Say whether so many ranks can run a program in a layout.

    Tensor parallelism knows no adapters, no experts and no tower, and ranks that share a sequence read no images.
    """
    if "without tokens" in program and world != 2:
        return False
    if "images" in program and (layout.tensor > 1 or layout.context > 1):
        return False
    if layout.tensor > 1 and ("lora" in program or "experts" in program):
        return False
    return world % (layout.replicas * layout.context * layout.tensor) == 0


def run(program: str, layout: str, base: Path, out: Path) -> None:
    """Run a program in this process, or as this rank of several, in float64."""
    wide = property(lambda target: {"device": "cpu", "dtype": torch.float64})  # beside 4 bits, too
    with (
        mock.patch.dict(step.PARAMETERS, float32=torch.float64),
        mock.patch.object(Target, "kind", wide),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        PROGRAMS[program](base, out, LAYOUTS[layout])


def difference(one: Path, other: Path) -> float:
    """Return the worst relative difference between the weights of two folders."""
    worst = 0.0
    for mine, theirs in zip(*map(_weights, (one, other)), strict=True):
        assert mine[0] == theirs[0]
        scale = max(float(mine[1].abs().max()), 1e-30)
        worst = max(worst, float((mine[1] - theirs[1]).abs().max()) / scale)
    return worst


def checked(base: Path, out: Path) -> Path:
    """Return the folder of a run's last checkpoint, whose weights must have moved: else equal ones prove nothing."""
    folder = out / "checkpoints" / f"step_{STEPS:08d}"
    is_adapter = (folder / "adapter_model.safetensors").exists()
    moved = max(float(w.abs().max()) for n, w in _weights(folder) if "lora_B" in n) if is_adapter else 0.0
    if not is_adapter:
        bases = (base, mixture_of(base), seeing(base))
        start = next(one for one in bases if stored_shape(one) == stored_shape(folder))
        moved = difference(start, folder)
    if moved < MOVED:
        raise SystemExit(f"{out.name}: the weights have not moved, so that comparing them proves nothing")
    return folder


def _weights(folder: Path) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    if (folder / "adapter_model.safetensors").exists():
        return sorted(load_file(folder / "adapter_model.safetensors").items())
    model, _ = load_model(folder, dtype=torch.float64)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def _be_rank(rank: int, world: int, folder: str, jobs: Sequence[tuple[str, str, str]]) -> None:
    import torch.distributed as dist

    processes.end_with_parent()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meet{world}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
        for program, layout, out in jobs:
            run(program, layout, Path(folder) / "base", Path(out))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # no rank waits for the others' threads


def start(world: int, folder: Path, jobs: Sequence[tuple[str, str, str]]) -> None:
    """Run programs on some ranks; SystemExit where one fails."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_be_rank, args=(n, world, str(folder), jobs)) for n in range(world)]
    with processes.started(ranks):
        pass
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")


def main() -> int:
    """Run the comparison; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS), metavar="NAME"
    )
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), metavar="NAME")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = make_bases(folder)
        for program in options.programs:
            run(program, "replicate", base, folder / "one" / program)
            checked(base, folder / "one" / program)
        for world in options.ranks:
            jobs = [
                (program, layout, str(folder / f"{world} {layout}" / program))
                for layout in options.layouts
                for program in options.programs
                if fits(program, LAYOUTS[layout], world)
            ]
            start(world, folder, jobs)
            for program, layout, out in jobs:
                worst = difference(*(checked(base, where) for where in (folder / "one" / program, Path(out))))
                rows.append({"program": program, "layout": layout, "ranks": world, "difference": worst})
                mark = "" if worst <= LIMIT else f"  above {LIMIT:g}"
                print(f"{program}, {layout}, {world} ranks: {worst:.1e}{mark}", flush=True)
    worst = max(row["difference"] for row in rows)
    print(
        f"worst relative difference of {len(rows)} runs to one process, after {STEPS} steps, float64: {worst:.1e}"
    )
    if options.json:
        facts = {"limit": LIMIT, "steps": STEPS, "torch": torch.__version__, "worst": worst, "rows": rows}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
