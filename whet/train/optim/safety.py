"""What keeps a run from being lost: its settings, the order of sums, and a micro-batch that fits the memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from whet.algo.packing import TrainingSequence, pack
from whet.generate.policy import Policy
from whet.storage.checkpoint import Sameness
from whet.train.optim.step import forward_backward
from whet.types import MicroBatch, UserError

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class SafetyConfig:
    """Resuming, saving and stopping; no number that a run computes depends on it."""

    deterministic: Literal["auto", "off", "warn", "strict"] = "auto"
    """strict: only operations whose sums have a fixed order, and a resumed run is bitwise the same or refused; warn:
    tell of both instead; off; auto: strict on a CPU, off elsewhere."""
    keep: int = 2
    """Checkpoints kept besides the best; at least 2."""
    save_minutes: float = 0.0
    """Save also when this long has passed since the last time; 0 for never."""
    background: bool = True
    """Write checkpoints while training goes on, from a copy in memory."""
    disk_full: Literal["stop", "continue"] = "stop"
    """What a full disk does to the run; earlier checkpoints stay whole either way."""
    rehearse: Literal["auto", "on", "off"] = "auto"
    """Run one full micro-batch of the longest sequences first, so that memory fails before data is spent; auto: on a
    GPU."""
    max_skipped: int = 3
    """Steps in a row that are left out because loss or gradient is not finite; at one more the run stops."""
    hang_timeout_s: float = 3600.0
    """Seconds without any progress after which all stacks are written down and the process ends; 0 for never."""

    def __post_init__(self) -> None:
        if self.keep < 2:
            raise ValueError(
                f"safety.keep = {self.keep}: expected 2 or more (one alone is lost while the next is written)"
            )
        for name in ("save_minutes", "hang_timeout_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"safety.{name} = {getattr(self, name)}: expected 0 or more")
        if self.max_skipped < 0:
            raise ValueError(f"safety.max_skipped = {self.max_skipped}: expected 0 or more")

    def rehearses(self, device: torch.device) -> bool:
        """Say whether a micro-batch is tried out first on a device."""
        return self.rehearse == "on" or (self.rehearse == "auto" and device.type != "cpu")

    def sameness(self, device: torch.device) -> Sameness:
        """Return what is done on a device where a result could not be repeated bitwise."""
        if self.deterministic == "auto":
            return "strict" if device.type == "cpu" else "off"
        return self.deterministic


def set_deterministic(sameness: Sameness, *, compiles: bool = False) -> None:
    """Let PyTorch use operations only whose sums have a fixed order, tell of others, or use any.

    Args:
        sameness: What is wanted.
        compiles: Whether the compiler, too, has to know; it takes 76 MB and 1.5 s to import.
    """
    if sameness != "off":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cudnn.benchmark = False
    if compiles:
        torch.use_deterministic_algorithms(sameness != "off", warn_only=sameness == "warn")
    else:
        torch.set_deterministic_debug_mode({"off": "default", "warn": "warn", "strict": "error"}[sameness])


class TokenBudget:
    """Tokens of a micro-batch: as configured, and halved for good when the memory does not hold so many.

    The mathematics does not depend on it: losses are divided by counts of the whole step.

    Args:
        tokens: Tokens of a micro-batch at first.
        parameters: Whose gradients are dropped before a step is tried again.

    Attributes:
        tokens: Tokens of a micro-batch now.
    """

    def __init__(self, tokens: int, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.tokens = tokens
        self._parameters = list(parameters)

    def run(self, work: Callable[[int], Result], longest: int) -> Result:
        """Do what fills the gradients from nothing; out of memory, drop them, halve the budget and do it again.

        Args:
            work: Called with the tokens of a micro-batch.
            longest: Tokens of the longest sequence, which is never cut: below it halving is of no use.

        Raises:
            UserError: If the memory does not hold one sequence.
        """
        while True:
            try:
                return work(self.tokens)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            for parameter in self._parameters:
                parameter.grad = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if self.tokens <= longest:
                raise UserError(
                    f"out of memory with {longest} tokens in a micro-batch, the length of one sequence: use "
                    "--optim.checkpoint-layers true, shorter completions, or a smaller model ('whet plan' tells what "
                    "fits)"
                )
            self.tokens = max(longest, self.tokens // 2)
            print(f"whet: warning: out of memory; micro-batches now have {self.tokens} tokens", flush=True)


def rehearse(policy: Policy, budget: TokenBudget, length: int) -> None:
    """Run a micro-batch as large as there will be any, forward and backward; nothing but the budget changes.

    Args:
        policy: The policy.
        budget: Tokens of a micro-batch, halved here where the memory does not hold them.
        length: Tokens of the longest sequence.

    Raises:
        UserError: If the memory does not hold one sequence.
    """
    length = min(max(length, 2), policy.model.config.max_positions)
    rest, vocab = (0,) * (length - 1), policy.model.config.vocab_size

    def score(micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        logprobs_M, _ = policy.score(micro)
        return logprobs_M.sum(), {}

    def work(tokens: int) -> None:
        count = max(1, tokens // length)
        # Each prompt another, as far as tokens go: sequences of one prompt would take less memory.
        rows = [TrainingSequence(prompt_ids=(n % vocab,), completion_ids=rest) for n in range(count)]
        batch = pack(rows, token_budget=count * length, device=policy.device)
        forward_backward(batch.micro_batches, score, policy.model)

    budget.run(work, length)
    for parameter in policy.model.parameters():
        parameter.grad = None


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error is the memory's, of a GPU or of the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
