"""Diagnosis of a step's cost: memory and time by stage, and its FLOPs relative to this machine's."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from whet.algo.packing import TrainingSequence, pack
from whet.inspect.diagnose.step import BETWEEN, STAGES, Component, Subject, Work, share, staged, timed
from whet.inspect.memory.meter import LiveTensors
from whet.inspect.memory.phases import GIB
from whet.model.config import ModelConfig
from whet.train.optim.step import parameter_dtype
from whet.train.rl_config import RLConfig

MATMULS = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
LOW_MFU = 0.1
NOISE = 0.3


def peaks(subject: Subject, prepare: Callable[[], Work]) -> tuple[dict[str, int], int, int]:
    """Run two steps; return the peak of live bytes in each stage of the second, and the live bytes before and after it.

    The first one fills deliberate caches. On a CPU all tensors that operations return are counted, on a GPU the
    allocator reports.
    """
    device, stage = subject.policy.device, BETWEEN
    found: dict[str, int] = dict.fromkeys((*STAGES, BETWEEN), 0)
    meter = LiveTensors(device) if device.type == "cpu" else None

    def alive() -> int:
        gc.collect()
        return meter.now if meter is not None else torch.cuda.memory_allocated()

    def enter(name: str) -> None:
        nonlocal stage
        if meter is not None:
            peak = meter.restart()
        else:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        found[stage] = max(found[stage], peak)
        stage = name

    with meter or nullcontext():
        if meter is not None:
            for tensor in (*subject.policy.model.parameters(), *subject.optimizer.held()):
                meter.add(tensor)
        work = prepare()
        work()
        before = alive()
        with staged(subject, enter):
            work()
        return found, before, alive()


def memory(subject: Subject) -> Component:
    """Measure the memory peaks of the four stages, and check that a step leaves nothing behind."""
    part = Component("Memory")
    found, before, after = peaks(subject, subject.prepare)
    subject.reset()
    count = sum(p.numel() for p in subject.policy.model.parameters())
    size = sum(p.nbytes for p in subject.policy.model.parameters())
    state = sum(tensor.nbytes for tensor in subject.optimizer.held())
    top = max(STAGES, key=lambda stage: found[stage])
    part.headline = ", ".join(f"{stage} {found[stage] / GIB:.3f}" for stage in STAGES) + " GiB"
    part.facts = {f"{stage}, peak bytes": found[stage] for stage in STAGES}
    part.facts |= {
        "weights, bytes": size,
        "optimizer's state, bytes": state,
        "alive before the step, bytes": before,
        "alive after it, bytes": after,
        "textbook float32 AdamW, 16 bytes a weight": 16 * count,
        "counted": "tensors alive" if subject.policy.device.type == "cpu" else "by the allocator",
    }
    part.bars["Most bytes alive in each stage"] = [
        (stage, found[stage], f"{found[stage] / GIB:.3f} GiB") for stage in STAGES
    ]
    kept = after - before
    is_clean = kept <= max(1 << 16, before // 100)
    part.check("a step leaves nothing behind", is_clean, f"{kept:,} bytes", "at most 1 % of what was there")
    if subject.policy.device.type == "cuda":
        total = torch.cuda.get_device_properties(subject.policy.device).total_memory
        fits = found[top] < 0.9 * total
        part.check("room on the device", fits, share(found[top] / total), "below 90 %", otherwise="warn")
    return part


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Floating-point operations of a training pass, forward and backward.

    Attributes:
        layers: 6 per layer weight and token read.
        attention: Scores and sums of values, only the causal half.
        head: 6 per weight of the head and *trained* token: others never reach it.
        again: Possible recomputation: logits in the backward pass, checkpointed layers.
    """

    layers: float
    attention: float
    head: float
    again: float

    @property
    def model(self) -> float:
        """FLOPs without recomputation: the numerator of MFU."""
        return self.layers + self.attention + self.head


def count_flops(
    shape: ModelConfig,
    layer_weights: int,
    num_pairs: int,
    num_trained: int,
    *,
    num_read: int,
    checkpoint: bool,
) -> Flops:
    """Count the operations of a step.

    Args:
        shape: Shape of the model.
        layer_weights: Elements of the layers' matrices.
        num_pairs: Sum over tokens of the tokens that each attends to, including itself.
        num_trained: Tokens that the loss sees.
        num_read: Tokens that the model read with gradients.
        checkpoint: Whether the backward pass runs the layers again.

    Source: 2 per weight and token forward, twice that backward (2001.08361 section 2.1); attention is two products,
    so 4 per pair, layer and channel forward.
    """
    attention = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * num_pairs
    layers, head = 2.0 * layer_weights * num_read, 2.0 * shape.vocab_size * shape.hidden_size * num_trained
    again = head + (layers + attention if checkpoint else 0.0)
    return Flops(layers=3 * layers, attention=3 * attention, head=3 * head, again=again)


def _pairs(sequences: Sequence[TrainingSequence], token_budget: int) -> int:
    """Sum the tokens that each token attends to, packed as in training: a shared prompt's own tokens count once."""
    found = [s for micro in pack(sequences, token_budget=token_budget).micro_batches for s in micro.segments]
    return sum(s.length * s.shared + s.length * (s.length + 1) // 2 for s in found)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best FLOP/s of square matrix products on this machine now."""
    best = 0.0
    for size in MATMULS[device.type]:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        for _ in range(3):
            began = _now(device)
            torch.mm(left, right)
            best = max(best, 2 * size**3 / (_now(device) - began))
    return best


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def quick_mfu(num_parameters: int, num_tokens: int, seconds: float, peak: float) -> float:
    """Return the MFU of a forward pass as quick scripts count it: 2 FLOPs per parameter and token, no attention."""
    return 2.0 * num_parameters * num_tokens / seconds / peak


def speed(subject: Subject, repeats: int, flops_tokens: int = 0) -> Component:
    """Time the stages, and compare the step's FLOPs with matrix products run in between.

    Args:
        subject: The step.
        repeats: Timed steps.
        flops_tokens: Tokens that `quick_mfu` is told, to set its number beside ours; 0 for none.
    """
    part, run, model, device = Component("Time"), subject.run, subject.policy.model, subject.policy.device
    dtype = subject.policy.autocast or parameter_dtype(run.optim.precision)
    read = 0

    def count(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal read
        read += inputs[0].shape[0] if torch.is_grad_enabled() else 0

    work = subject.prepare()
    hook = subject.policy.model.register_forward_pre_hook(count)
    timed(subject, work)  # warm-up
    hook.remove()
    rows, rates = [], []
    for _ in range(repeats):
        rates.append(matmul_rate(device, dtype))
        rows.append(timed(subject, work))
    subject.reset()
    median = {stage: statistics.median(row[stage] for row in rows) for stage in rows[0]}
    whole, peak, flops = median.pop("step"), max(rates), _step_flops(subject, read)
    parts = sum(median.values())  # medians of parts do not add up to the median of all
    passes = median["forward"] + median["backward"]
    reached = flops.model / whole / peak
    times = ", ".join(f"{stage} {1000 * median[stage]:.1f}" for stage in STAGES[1:])
    part.headline = f"{times} ms; {read / whole:,.0f} tokens/s, MFU {share(reached)}"
    part.facts = {f"{stage}, s": seconds for stage, seconds in median.items()} | {"step, s": whole}
    part.facts |= {f"{stage}, share of the step": share(value / parts) for stage, value in median.items()}
    part.facts |= {
        "forward, share of forward and backward": share(median["forward"] / passes),
        "steps timed": repeats,
        "tokens read": read,
        "tokens per second": read / whole,
        "FLOPs of layers, 6 per weight and token": flops.layers,
        "FLOPs of attention": flops.attention,
        "FLOPs of the head, 6 per weight and trained token": flops.head,
        "FLOPs computed again, at most": flops.again,
        "peak, FLOP/s": peak,
        "peak is": f"the best {str(dtype).removeprefix('torch.')} matrix product here, between the timed steps",
        "MFU of the step": reached,
        "MFU of forward and backward": flops.model / passes / peak,
        "share of the peak with that": (flops.model + flops.again) / whole / peak,
    }
    if subject.rollout is not None:
        sampled, scored = subject.rollout.generate_seconds, subject.rollout.reward_seconds
        trained = share(whole / (whole + sampled + scored))
        part.facts |= {"sampling, s": sampled, "rewards, s": scored, "training, share of all three": trained}
    part.bars["Seconds of the step"] = [
        (stage, value, f"{1000 * value:.1f} ms, {share(value / parts)}") for stage, value in median.items()
    ]
    part.check("MFU is a share", 0 < reached <= 1, share(reached), "above 0, at most 100 %")
    text = f"at least {share(LOW_MFU)}; small models and batches are bound by overhead"
    part.check("MFU", reached >= LOW_MFU, share(reached), text, otherwise="warn")
    if flops_tokens:
        size = sum(p.numel() for p in model.parameters())
        for tokens in (flops_tokens, read):
            part.facts[f"MFU of forward, 2 per parameter and token, of {tokens:,} tokens"] = quick_mfu(
                size, tokens, median["forward"], peak
            )
        wrong = share(flops_tokens / read)
        text = f"{flops_tokens:,} tokens counted, {read:,} read: the MFU is {wrong} of the real one"
        part.check("tokens of the FLOPs", flops_tokens == read, text, "all that were read", otherwise="warn")
    spread = max(row["step"] for row in rows) / whole - 1
    found = f"slowest step {share(spread)} above the median"
    part.check("quiet measurement", spread < NOISE, found, f"below {share(NOISE)}", otherwise="warn")
    return part


def _step_flops(subject: Subject, num_read: int) -> Flops:
    run, model, trained, passes = subject.run, subject.policy.model, subject.sequences, 1
    if isinstance(run, RLConfig):  # tokens without signal never reach the backward pass
        passes = run.algo.num_epochs
        needs_all = run.algo.is_token_level or run.algo.has_entropy_bonus or run.algo.kl != "none"
        trained = [s for s in trained if s.advantage or needs_all]
    return count_flops(
        model.config,
        sum(p.numel() for p in model.layers.parameters() if p.dim() >= 2),
        passes * _pairs(trained, run.optim.token_budget),
        passes * sum(s.num_trained for s in trained),
        num_read=num_read,
        checkpoint=run.optim.checkpoint_layers,
    )
