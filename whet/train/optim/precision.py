"""Resolves `optim.precision = auto`: times a layer's step in each precision on the run's device, and takes the
fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from whet.algo.packing import TrainingSequence, pack
from whet.config import load_yaml
from whet.generate.kernel_speed import choose_kernels
from whet.generate.policy import PolicyConfig, resolve_device
from whet.generate.scoring import score_micro_batch
from whet.model.config import ModelConfig
from whet.model.families import from_hf
from whet.model.files import read_json
from whet.model.lora.files import find_model
from whet.model.transformer import init_weights
from whet.model.weights import build_model
from whet.ranks.collectives import on_main, rank
from whet.train.optim.step import Precision, autocast_dtype, parameter_dtype
from whet.train.session import RunConfig
from whet.types import UserError

C = TypeVar("C", bound=RunConfig)
CANDIDATES: tuple[Precision, ...] = ("float32", "bfloat16_master", "bfloat16_autocast")
WITHOUT_BFLOAT16: tuple[Precision, ...] = ("float32", "float16_master", "float16_autocast")
"""Candidates on a GPU whose bfloat16 is emulated: those before compute capability 8.0 (V100, T4, RTX 20)."""
ADVANTAGE = 1.25
"""Minimum speed-up of 16 bits over float32, because they lose digits."""
NUM_SEQUENCES = {"cpu": 4, "cuda": 64}
"""Sequences that are timed: on a GPU few tokens would take the time of launching kernels, whatever the precision."""
LENGTH, VOCABULARY, REPEATS = 128, 4096, 3


def _shape(policy: PolicyConfig) -> ModelConfig:
    if not policy.init:
        return policy.model
    path = find_model(policy.init, policy.adapter)[0] / "config.json"
    return from_hf(read_json(path), where=str(path))


def resolve_precision(config: C, find_shape: Callable[[PolicyConfig], ModelConfig] = _shape) -> C:
    """Return the config with auto replaced by a precision: that of its run folder, or the fastest one here.

    Precisions that the rest of the config refuses are skipped. bfloat16 is refused on a GPU that only emulates it.

    Args:
        config: Settings of a run.
        find_shape: Returns the shape of its model.

    Raises:
        UserError: If the model's config.json cannot be loaded, or the GPU has no bfloat16.
    """
    wanted = config.optim.precision
    if wanted.startswith("bfloat16") and not has_bfloat16(device := resolve_device(config.policy.device)):
        raise UserError(
            f"optim.precision = {wanted}: {torch.cuda.get_device_name(device)} only emulates bfloat16, slowly; use "
            f"{wanted.replace('bfloat16', 'float16')}, which scales the loss"
        )
    if wanted != "auto":
        return config

    def choose() -> str:
        stored = Path(config.out) / "config.yaml"
        if stored.is_file():
            return cast(C, load_yaml(stored, type(config))).optim.precision
        return _fastest(config, find_shape(config.policy))

    return _with(config, cast(Precision, on_main(choose)))


def _with(config: C, precision: Precision) -> C:
    return cast(C, replace(cast(Any, config), optim=replace(config.optim, precision=precision)))


def _fastest(config: RunConfig, shape: ModelConfig) -> Precision:
    device = resolve_device(config.policy.device)
    seconds = measure(shape, device)
    plain = seconds["float32"]
    for precision in sorted(seconds, key=lambda name: seconds[name]):
        try:
            _with(config, precision)
        except ValueError:
            continue  # another field refuses it
        if precision == "float32" or plain >= ADVANTAGE * seconds[precision]:
            break
    else:
        precision = "float32"
    if rank() == 0:
        times = ", ".join(
            f"{name} {value / plain:.2f}" for name, value in seconds.items() if name != "float32"
        )
        print(
            f"whet: optim.precision = {precision} (a layer's step on {device}, over float32's time: {times})"
        )
    return precision


def has_bfloat16(device: torch.device) -> bool:
    """Say whether a device computes in bfloat16: all CPUs (by way of float32), AMD's GPUs, NVIDIA's from Ampere on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)


def measure(shape: ModelConfig, device: torch.device) -> dict[Precision, float]:
    """Time forward and backward of one layer and a head of a model's widths.

    Args:
        shape: The model.
        device: The device for training.

    Returns:
        Median seconds by precision.
    """
    choose_kernels(shape, torch.float32, device)
    shape = replace(shape, num_layers=1, vocab_size=min(shape.vocab_size, VOCABULARY))
    generator = torch.Generator().manual_seed(0)
    length = min(LENGTH, shape.max_positions)
    count = NUM_SEQUENCES.get(device.type, NUM_SEQUENCES["cpu"])
    drawn = torch.randint(shape.vocab_size, (count, length), generator=generator).tolist()
    sequences = [TrainingSequence(prompt_ids=(row[0],), completion_ids=tuple(row[1:])) for row in drawn]
    (micro,) = pack(sequences, token_budget=count * length, device=device).micro_batches
    runs: dict[Precision, Callable[[], None]] = {}
    for precision in CANDIDATES if has_bfloat16(device) else WITHOUT_BFLOAT16:
        model = build_model(shape)
        init_weights(model, 0)
        model.to(device, parameter_dtype(precision))

        def run(model: Any = model, precision: Precision = precision) -> None:
            logprobs, _ = score_micro_batch(model, micro, autocast=autocast_dtype(precision))
            logprobs.sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        runs[precision] = run
    return _medians(runs)


def _medians(runs: Mapping[Precision, Callable[[], None]]) -> dict[Precision, float]:
    seconds: dict[Precision, list[float]] = {precision: [] for precision in runs}
    for number in range(1 + REPEATS):  # alternating, so that other load disturbs all alike
        for precision, run in runs.items():
            began = time.perf_counter()
            run()
            if number:
                seconds[precision].append(time.perf_counter() - began)
    return {precision: sorted(values)[len(values) // 2] for precision, values in seconds.items()}
