"""Perplexity of a text: every token scored once, in windows of the model's context that overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from whet.algo.packing import TrainingSequence, pack
from whet.generate.policy import Policy
from whet.generate.scoring import score_micro_batch
from whet.types import UserError

MAX_WINDOW = 4096
"""Tokens of a window where the context is longer: what lies further back hardly changes a prediction in prose."""
TOKEN_BUDGET = 8192


@dataclass(frozen=True, slots=True)
class Perplexity:
    """How well a model predicts a text.

    Attributes:
        nats: Sum of the negative log-probabilities of the scored tokens.
        num_tokens: Scored tokens.
        num_bytes: Bytes of text that they spell.
    """

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def nats_per_token(self) -> float:
        """Mean over tokens: comparable between checkpoints with one tokenizer."""
        return self.nats / self.num_tokens

    @property
    def nats_per_byte(self) -> float:
        """Mean over bytes: comparable whatever the tokenizer."""
        return self.nats / self.num_bytes

    @property
    def perplexity(self) -> float:
        """exp(nats per token)."""
        return math.exp(min(self.nats_per_token, 700.0))


def text_ids(policy: Policy, text: str) -> list[int]:
    """Return the tokens of bare text, behind BOS where the tokenizer's prompts begin with it."""
    tokenizer = policy.tokenizer
    start = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    return start + tokenizer.encode(text)


def measure_perplexity(policy: Policy, text: str, *, stride: int = 0) -> Perplexity:
    """Score a text.

    The first token is scored only behind a BOS. Window after window moves on by `stride` tokens and scores those that
    are new to it, so that each but the first ones is predicted from at least (window - stride) tokens.

    Args:
        policy: The model.
        text: The text; the tokenizer must be able to spell it.
        stride: New tokens of each window after the first; 0 for half a window.

    Returns:
        The sum with its counts.

    Raises:
        UserError: If the text has fewer than two tokens, or the stride is no smaller than the window.
    """
    ids = text_ids(policy, text)
    if len(ids) < 2:
        raise UserError(f"the text has {len(ids)} tokens: expected at least 2 to predict one from the other")
    has_bos = ids[0] == policy.tokenizer.bos_id and policy.tokenizer.adds_bos
    unscored = 0 if has_bos else len(policy.tokenizer.token_text(ids[0]).encode())
    window = min(policy.model.config.max_positions, MAX_WINDOW)
    if not 0 <= stride < window:
        raise UserError(
            f"stride = {stride}: expected 0 (half a window) to {window - 1}, for a window of {window}"
        )
    sequences = _windows(ids, window, stride or max(1, window // 2))
    batch = pack(sequences, token_budget=max(window, TOKEN_BUDGET), device=policy.device)
    total = 0.0
    with torch.no_grad():
        for micro in batch.micro_batches:
            logprobs_M, _ = score_micro_batch(policy.model, micro, attention=policy.attention)
            total -= float(logprobs_M.double().sum())
    return Perplexity(total, len(ids) - 1, len(text.encode()) - unscored)


def _windows(ids: Sequence[int], window: int, stride: int) -> list[TrainingSequence]:
    """Cut ids into windows that score each token but the first once."""
    found = []
    start, scored = 0, 1
    while scored < len(ids):
        end = min(start + window, len(ids))
        found.append(
            TrainingSequence(prompt_ids=tuple(ids[start:scored]), completion_ids=tuple(ids[scored:end]))
        )
        start, scored = start + stride, end
    return found
