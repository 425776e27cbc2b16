"""The memory at hand: a run that cannot fit is refused before it starts, and recipes of one's own are sized by it."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from dataclasses import replace
from typing import Literal, TypeVar

import psutil
import torch

from whet.generate.policy import resolve_device
from whet.inspect.memory.phases import GIB, Workload, fit, peak
from whet.inspect.memory.plan import PlanConfig, policy_shape, workload
from whet.inspect.sweep.worker import free_memory
from whet.model.lora.side import LoRAConfig
from whet.train.dpo import DPOConfig
from whet.train.optim.step import lean
from whet.train.rft import RFTConfig
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig
from whet.types import UserError

TrainConfig = RLConfig | SFTConfig | DPOConfig | RFTConfig
Trained = TypeVar("Trained", bound=TrainConfig)
SAMPLE_BYTES = 1_400
"""Least that a sample takes until its step ends: 1,389 bytes of Python's heap were measured, 12 tokens long."""
SHARE = 0.8
"""Share of a machine's whole memory that a recipe of one's own is sized for: the rest is others', and the system's."""
ADAPTER_RANK = 16
"""Of an adapter that takes the place of weights that do not fit."""
ADAPTER_LR, MOST_ADAPTER_LR, ADAPTER_RATIO = 1e-4, 1e-3, 10
"""Least and largest rate of an adapter, and how many times that of whole weights it learns at ("LoRA Without Regret",
Thinking Machines, 2025). For the smallest models that would be 2e-3, where their published rule gives 1.3e-3."""
ROW_TOKENS = 1024
"""Tokens of a row of fine-tuning data, for sizing: most have fewer, and a longer one gets its own micro-batch."""


def check_room(config: TrainConfig) -> list[str]:
    """Compare what a run will need with the memory at hand, before it starts.

    Args:
        config: Its settings.

    Returns:
        A warning where sequences of full length would not fit: most are shorter.

    Raises:
        UserError: If even the smallest batches do not fit.
    """
    work = _work(config)
    if work is None:
        return []
    free, what = _free(work.device)
    if work.device == "cpu":
        free //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # ranks of one machine share its memory
    if isinstance(config, RLConfig):
        samples = config.num_prompts * config.group_size
        if (need := samples * SAMPLE_BYTES) > (host := free_memory()):
            raise UserError(
                f"num_prompts = {config.num_prompts:,} x group_size = {config.group_size:,}: {samples:,} samples of a "
                f"step need {need / GIB:,.0f} GiB or more, and {host / GIB:.1f} GiB are free; lower num_prompts or "
                "group_size"
            )
    if (need := peak(_least(work))) > free:
        advice = "--policy.quantize nf4" if config.lora.rank else "--optim lean, --lora.rank 16"
        if _num_ranks(config) > 1:
            advice += ", more ranks" if work.num_shards > 1 else ", --parallel.kind fsdp"
        raise UserError(
            f"the model with its gradients and optimizer needs {need / GIB:.1f} GiB, and {free / GIB:.1f} GiB of "
            f"{what} are free: try {advice}, or a smaller model (`whet plan` shows each part)"
        )
    if (need := peak(work)) <= free:
        return []
    told = (
        f"sequences of full length would need {need / GIB:.1f} GiB of {what}, {free / GIB:.1f} GiB are free"
    )
    if (found := fit(replace(work, kept_gib=0.0), free)) is None:
        fewer = "num_prompts or sampling.max_new_tokens" if work.rows else "batch_size"
        return [f"{told}; lower {fewer}"]
    rows = f" --policy.max-rows {found.rows}" if work.rows else ""
    return [f"{told}; safe: --optim.token-budget {found.token_budget}{rows}"]


def _least(work: Workload) -> Workload:
    """Return the workload of one sequence of two tokens: what the model itself needs."""
    alone = replace(_alone(work), rows=min(work.rows, 1), image_tokens=0)
    return replace(alone, length=2, num_trained=1, token_budget=2, kept_gib=0.0)


def _alone(work: Workload) -> Workload:
    """Return the workload of one sequence."""
    one = replace(work, num_sequences=1, group_size=1)
    return replace(one, num_prompts=min(work.num_prompts, 1), num_requests=min(work.num_requests, 1))


def sized(config: Trained, typed: Collection[str]) -> Trained:
    """Fit a recipe of one's own to this machine: micro-batches and rows; where it must be, the lean optimizer; where
    all weights cannot be trained at all, an adapter in their place, at last beside a base in 4 bits.

    Micro-batches and rows change nothing that is learned; the lean optimizer rounds (`whet.train.optim.step.lean`); an
    adapter is another run, which is said. It goes by the whole memory of the machine, so that the same command gives
    the same run.

    Args:
        config: The recipe, overrides applied.
        typed: Fields that the user gave.

    Returns:
        The config, changed only in fields that the user did not give.
    """
    work = _work(config)
    if work is None:
        return config
    room = int(SHARE * _whole(work.device))
    found = fit(work, room)
    if found is None and fit(_alone(work), room) is not None:
        return config  # it is the number of sequences that does not fit: said when the run starts
    is_free = not any(name.startswith("optim.") and name != "optim.lr" for name in typed)
    if found is None and is_free:
        preset = lean()
        config = replace(config, optim=replace(config.optim, **preset))
        work = _work(config) or work
        found = fit(replace(work, kept_gib=0.0), room)
    is_free = is_free and not any(name.startswith(("lora.", "policy.quantize")) for name in typed)
    if found is None and is_free and config.policy.init:
        for quantize in (config.policy.quantize, "nf4"):
            adapted = _adapted(config, typed, quantize)
            own = _work(adapted)
            found = None if own is None else fit(replace(own, kept_gib=0.0), room)
            if own is not None and found is not None:
                beside = " beside a base in 4 bits" if quantize == "nf4" else ""
                print(
                    f"whet: all weights do not fit {room / GIB:.1f} GiB: an adapter of rank {ADAPTER_RANK} is trained "
                    f"in their place{beside} (--lora.rank 0 trains all)",
                    file=sys.stderr,
                    flush=True,
                )
                config, work = adapted, own
                break
    if found is None:
        return config  # refused, with reasons, when it starts
    if "optim.token_budget" not in typed and found.token_budget < config.optim.token_budget:
        config = replace(config, optim=replace(config.optim, token_budget=found.token_budget))
    if work.rows and "policy.max_rows" not in typed and found.rows < config.policy.max_rows:
        config = replace(config, policy=replace(config.policy, max_rows=found.rows))
    return config


def adapter_rate(whole: float) -> float:
    """Return the learning rate of an adapter by that of all weights."""
    return min(max(ADAPTER_RATIO * whole, ADAPTER_LR), MOST_ADAPTER_LR)


def _adapted(config: Trained, typed: Collection[str], quantize: Literal["none", "nf4", "int8"]) -> Trained:
    """Return a recipe that trains an adapter, at a learning rate that suits one."""
    optim = config.optim
    if "optim.lr" not in typed:
        optim = replace(optim, lr=max(optim.lr, adapter_rate(optim.lr)))
    policy = replace(config.policy, quantize=quantize)
    return replace(config, lora=LoRAConfig(rank=ADAPTER_RANK), policy=policy, optim=optim)


def _work(config: TrainConfig) -> Workload | None:
    """Return the workload of a run; None where the model's shape is not known yet, and the run will say why."""
    try:
        if config.optim.precision == "auto":
            # the run measures which; none that it takes needs more than float32
            config = replace(config, optim=replace(config.optim, precision="float32"))
        shape, ranks = policy_shape(config.policy), _num_ranks(config)
        if isinstance(config, DPOConfig | RFTConfig):
            # A pair is two sequences (its reference is scored before); what rft samples takes less than its training.
            count = 2 if isinstance(config, DPOConfig) else 1
            config = SFTConfig(
                out=config.out,
                policy=replace(config.policy, attention="auto"),
                parallel=config.parallel,
                optim=config.optim,
                lora=config.lora,
                batch_size=count * config.batch_size,
            )
        if isinstance(config, RLConfig):
            return workload(config, shape, PlanConfig(recipe=config.out), num_ranks=ranks)
        length = min(shape.max_positions, config.optim.token_budget, ROW_TOKENS)
        return workload(
            config, shape, PlanConfig(recipe=config.out, of="sft", length=length), num_ranks=ranks
        )
    except UserError:
        return None


def _num_ranks(config: TrainConfig) -> int:
    """Return the ranks of the run: of this process's job, or those that Ray will start."""
    started = config.cluster.trainer_ranks if isinstance(config, RLConfig) else 0
    return max(started, int(os.environ.get("WORLD_SIZE", "1")))


def _free(device: str) -> tuple[int, str]:
    """Return the free bytes of a kind of device, and its name."""
    if device == "cuda" and torch.cuda.is_available():
        return torch.cuda.mem_get_info(resolve_device("cuda"))[0], "the GPU's memory"
    return free_memory(), "memory"


def _whole(device: str) -> int:
    """Return all bytes of a kind of device."""
    if device == "cuda" and torch.cuda.is_available():
        return torch.cuda.mem_get_info(resolve_device("cuda"))[1]
    return psutil.virtual_memory().total
