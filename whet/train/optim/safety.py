"""Safety of a run: settings of resuming and saving, deterministic sums, and a micro-batch that fits into memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from whet.algo.packing import TrainingSequence, pack
from whet.generate.policy import Policy
from whet.ranks.collectives import is_share, shard
from whet.ranks.context import sharing
from whet.storage.checkpoint import Sameness
from whet.train.optim.step import forward_backward
from whet.types import MicroBatch, UserError

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class SafetyConfig:
    """Resuming, saving and stopping; computed numbers do not depend on it."""

    deterministic: Literal["auto", "off", "warn", "strict"] = "auto"
    """strict: only deterministic operations, and a resumed run is bitwise the same or refused; warn: only warn of both;
    off; auto: strict on a CPU, off elsewhere."""
    keep: int = 2
    """Checkpoints to keep, besides the best; at least 2."""
    save_minutes: float = 0.0
    """Also save after this time since the last checkpoint; 0 disables."""
    background: bool = True
    """Write checkpoints in the background, from a copy in memory."""
    disk_full: Literal["stop", "continue"] = "stop"
    """Reaction to a full disk; earlier checkpoints stay intact either way."""
    rehearse: Literal["auto", "on", "off"] = "auto"
    """Run one full micro-batch of the longest sequences first, so that running out of memory shows early; auto: on a
    GPU."""
    max_skipped: int = 3
    """Consecutive steps that may be skipped because loss or gradient is not finite; one more stops the run."""
    hang_timeout_s: float = 3600.0
    """Seconds without progress after which all stacks are written and the process ends; 0 disables."""

    def __post_init__(self) -> None:
        if self.keep < 2:
            raise ValueError(
                f"safety.keep = {self.keep}: expected 2 or more (a single one is lost while the next is written)"
            )
        for name in ("save_minutes", "hang_timeout_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"safety.{name} = {getattr(self, name)}: expected 0 or more")
        if self.max_skipped < 0:
            raise ValueError(f"safety.max_skipped = {self.max_skipped}: expected 0 or more")

    def rehearses(self, device: torch.device) -> bool:
        """Say whether to run a trial micro-batch first on a device."""
        return self.rehearse == "on" or (self.rehearse == "auto" and device.type != "cpu")

    def sameness(self, device: torch.device) -> Sameness:
        """Return the reaction, on a device, to results that are not bitwise reproducible."""
        if self.deterministic == "auto":
            return "strict" if device.type == "cpu" else "off"
        return self.deterministic


def set_deterministic(sameness: Sameness, *, compiles: bool = False) -> None:
    """Restrict PyTorch to deterministic operations, warn of others, or allow any.

    Args:
        sameness: The requested mode.
        compiles: Whether to configure the compiler, too; importing it takes 76 MB and 1.5 s.
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
    """Tokens per micro-batch: as configured, and permanently halved when memory runs out.

    Results do not depend on it: losses are divided by counts of the whole step.

    Args:
        tokens: Initial tokens per micro-batch.
        parameters: Parameters whose gradients are dropped before a retry.
        is_shared: Whether ranks deal micro-batches out together, so that none can change its own.

    Attributes:
        tokens: Current tokens per micro-batch.
    """

    def __init__(
        self, tokens: int, parameters: Iterable[torch.nn.Parameter], *, is_shared: bool = False
    ) -> None:
        self.tokens, self._is_shared = tokens, is_shared
        self._parameters = list(parameters)

    def run(self, work: Callable[[int], Result], longest: int) -> Result:
        """Run work that accumulates gradients from zero; when out of memory, drop them, halve the budget and retry.

        Args:
            work: Called with the tokens per micro-batch.
            longest: Tokens of the longest sequence, which is never split: below it halving does not help.

        Raises:
            UserError: If one sequence does not fit into memory.
        """
        while True:
            try:
                return work(self.tokens)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            if self._is_shared or any(map(is_share, self._parameters)):
                raise UserError(
                    f"out of memory with {self.tokens} tokens in a micro-batch, which ranks that share a model "
                    "or micro-batches cannot halve each for itself: lower optim.token_budget, then --resume"
                )
            for parameter in self._parameters:
                parameter.grad = None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if self.tokens <= longest:
                raise UserError(
                    f"out of memory with {longest} tokens in a micro-batch, the length of one sequence: use "
                    "--optim.checkpoint-layers true, shorter completions, or a smaller model ('whet plan' shows what "
                    "fits)"
                )
            self.tokens = max(longest, self.tokens // 2)
            print(f"whet: warning: out of memory; micro-batches now have {self.tokens} tokens", flush=True)


def rehearse(policy: Policy, budget: TokenBudget, length: int) -> None:
    """Run a micro-batch of the largest possible size, forward and backward; only the budget may change.

    Args:
        policy: The policy.
        budget: Tokens per micro-batch; halved here if they do not fit into memory.
        length: Tokens of the longest sequence.

    Raises:
        UserError: If one sequence does not fit into memory.
    """
    length = min(max(length, 2), policy.model.config.max_positions)
    rest, vocab = (0,) * (length - 1), policy.model.config.vocab_size

    def score(micro: MicroBatch) -> tuple[torch.Tensor, dict[str, float]]:
        logprobs_M, _ = policy.score(micro)
        return logprobs_M.sum(), {}

    def work(tokens: int) -> None:
        own = sharing(policy.model)
        count = max(1, tokens // length) * (1 if own is None else own.num_groups)
        # Distinct prompts, as far as there are tokens: sequences of one prompt would take less memory.
        rows = [TrainingSequence(prompt_ids=(n % vocab,), completion_ids=rest) for n in range(count)]
        if own is not None:
            rows = [rows[index] for index in shard(count)]
        batch = pack(rows, token_budget=max(tokens, length), device=policy.device, sharing=own)
        forward_backward(batch.micro_batches, score, policy.model)

    budget.run(work, length)
    for parameter in policy.model.parameters():
        parameter.grad = None


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means out of memory, on a GPU or on the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
