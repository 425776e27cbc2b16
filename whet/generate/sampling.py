"""Sampling with counter-based noise: the same token for any batch, slot, order, restart or device count.

One uniform per (sequence seed, token index) from an integer hash, and an inverse-CDF draw: no generator state
anywhere.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from whet.algo.logprobs import exp_logits, select_logprobs

MASK_32 = 0xFFFFFFFF
CDF_BLOCK = 128
SMALL_VOCABULARY = 1024
NUCLEUS_GUESS = 256
LARGEST_UNIFORM = 1 - 2.0**-25
LEAST_TEMPERATURE = 1e-5
"""Below it logits divided by the temperature may overflow float32; the draws are greedy ones long before."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings, applied in order: temperature, top-k, min-p, top-p, then renormalise."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with at least this probability; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the top probability; 0 keeps all."""
    max_new_tokens: int = 256
    """Longest completion in tokens, including the stop token."""

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < 10):
            raise ValueError(
                f"temperature = {self.temperature}: expected 0 (greedy) to 10, not between 0 and {LEAST_TEMPERATURE:g}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k}: expected 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p}: expected above 0, at most 1")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p = {self.min_p}: expected 0 to below 1")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {self.max_new_tokens}: expected 1 or more")

    @property
    def is_filtered(self) -> bool:
        """Whether tokens are removed from the distribution (a trainer has to renormalise over what was kept)."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def sequence_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from the identity of a sequence: (run seed, step, problem uid, sample index)."""
    text = "\x00".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _mix_32(x: torch.Tensor) -> torch.Tensor:
    """Mix 32 bits held in int64 (MurmurHash3's fmix32)."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & MASK_32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & MASK_32
    return x ^ (x >> 16)


def counter_uniforms(seeds_B: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
    """Return one uniform in (0, 1) per sequence, a pure function of (seed, token index).

    Args:
        seeds_B: int64 seeds, 63 bits used.
        index_B: int64 index of the token to draw, 0-based.

    Returns:
        Uniforms, float64, multiples of 2^-24 plus half a step.
    """
    low, high = seeds_B & MASK_32, (seeds_B >> 32) & MASK_32
    key = _mix_32(_mix_32(low) ^ ((high * 0x9E3779B1) & MASK_32))
    bits = _mix_32((key + 0x9E3779B9 * (index_B + 1)) & MASK_32) >> 8
    return (bits.double() + 0.5) * 2.0**-24


def filter_logits(logits_BV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Set the logits of removed tokens to -inf: top-k, then min-p, then top-p, each on the previous filter's output.

    Args:
        logits_BV: Float32 logits, already divided by the temperature.
        params: The filters.

    Returns:
        A new tensor, or the argument if no filter is on.
    """
    if not params.is_filtered:
        return logits_BV
    cut = float("-inf")
    if 0 < params.top_k < logits_BV.shape[1]:
        floor = logits_BV.topk(params.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < floor, cut)
    if params.min_p > 0:
        floor = logits_BV.max(dim=-1, keepdim=True).values + torch.log(torch.tensor(params.min_p))
        logits_BV = logits_BV.masked_fill(logits_BV < floor, cut)
    if params.top_p < 1:
        logits_BV = logits_BV.masked_fill(logits_BV < _nucleus_floor(logits_BV, params.top_p), cut)
    return logits_BV


def _nucleus_floor(logits_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the smallest kept logit of each row [B, 1]; looks further only in rows whose nucleus the guess misses."""
    probs = torch.softmax(logits_BV, dim=-1)
    last_B1 = torch.empty(len(probs), 1, dtype=torch.int64, device=probs.device)
    rows = torch.arange(len(probs), device=probs.device)
    count = min(NUCLEUS_GUESS, probs.shape[1])
    while len(rows):
        values, indices = probs[rows].topk(count, dim=-1)
        before = values.double().cumsum(-1) - values.double()
        last = (before < top_p).long().sum(-1, keepdim=True) - 1
        last.clamp_(min=0)  # logits that are not numbers: a place that exists, see `draw_tokens`
        last_B1[rows] = indices.gather(1, last)
        if count == probs.shape[1]:
            break
        rows = rows[values.double().sum(-1) < top_p]
        count = min(count * 8, probs.shape[1])
    return logits_BV.gather(1, last_B1)


def draw_tokens(
    logits_BV: torch.Tensor, uniforms_B: torch.Tensor, weights_BV: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw one id per row by inverse CDF, two-level for large vocabularies; rows don't affect each other.

    Args:
        logits_BV: Float32 logits; -inf is never drawn. V a multiple of 16.
        uniforms_B: Float64 uniforms in (0, 1).
        weights_BV: exp(logits - largest), if known.

    Returns:
        int64 ids [B]; one that exists even where a row's logits are not numbers, so that no other row fails with it.
    """
    rows, vocab = logits_BV.shape
    if weights_BV is None:
        weights_BV, _, _ = exp_logits(logits_BV)
    if vocab <= SMALL_VOCABULARY:
        return _search(weights_BV, uniforms_B)
    surplus = -vocab % CDF_BLOCK
    padded = torch.nn.functional.pad(weights_BV, (0, surplus)) if surplus else weights_BV
    blocks = padded.view(rows, -1, CDF_BLOCK)
    sums = blocks.sum(-1).double()
    cumulative = sums.cumsum(-1)
    wanted = uniforms_B * cumulative[:, -1]
    block = torch.searchsorted(cumulative, wanted[:, None], right=True)
    block.masked_fill_(block >= sums.shape[1], 0)  # no number: the first id, as below
    before = cumulative.gather(1, block) - sums.gather(1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, CDF_BLOCK)).squeeze(1)
    share = ((wanted[:, None] - before) / sums.gather(1, block)).squeeze(1)
    return block.squeeze(1) * CDF_BLOCK + _search(inside, share)


def _search(weights_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Return the first index whose cumulative weight exceeds uniform * total; never one with zero weight.

    A uniform is at least 2^-25 below 1, so the target is below the total in float64, and the first larger sum is one
    that grew. Within a block the remainder may be one last bit outside [0, 1), because the block's sum is rounded.
    """
    cumulative = weights_BV.cumsum(-1, dtype=torch.float64)
    wanted = uniforms_B.clamp(0.0, LARGEST_UNIFORM) * cumulative[:, -1]
    found_B1 = torch.searchsorted(cumulative, wanted[:, None], right=True)
    return found_B1.masked_fill_(found_B1 >= weights_BV.shape[1], 0).squeeze(1)


def without(logits_BV: torch.Tensor, undrawn: int | None) -> torch.Tensor:
    """Return the logits with -inf for an id that is never drawn; the argument where there is none."""
    if undrawn is None:
        return logits_BV
    left_BV = logits_BV.clone()
    left_BV[:, undrawn] = float("-inf")
    return left_BV


def sample_tokens(
    logits_BV: torch.Tensor,
    seeds_B: torch.Tensor,
    index_B: torch.Tensor,
    params: SamplingParams,
    uniforms_B: torch.Tensor | None = None,
    kept_BV: torch.Tensor | None = None,
    undrawn: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample the next token of each sequence and score it under the sampled distribution.

    An id that is never drawn keeps its share of the scores where no filter is on, as in transformers, and gets a tiny
    one: a model has never seen it where it writes.

    Args:
        logits_BV: Float32 logits divided by the temperature (by 1 for greedy).
        seeds_B: Sequence seeds.
        index_B: Index of the token to draw in its completion, 0-based.
        params: Temperature and filters.
        uniforms_B: The `counter_uniforms` of seeds and index, if known.
        kept_BV: The `filter_logits` of the logits, if known.
        undrawn: An id that is never drawn; None for none.

    Returns:
        Ids [B] and log-probabilities [B] (float32; renormalised over the kept set if filters are on; at temperature 1
        if greedy).
    """
    drawable_BV = without(logits_BV, undrawn)
    if params.temperature == 0:
        tokens = drawable_BV.argmax(-1)
        return tokens, select_logprobs(logits_BV, tokens)[0]
    if uniforms_B is None:
        uniforms_B = counter_uniforms(seeds_B, index_B)
    if undrawn is not None and not params.is_filtered:
        tokens = draw_tokens(drawable_BV, uniforms_B)
        return tokens, select_logprobs(logits_BV, tokens)[0]
    if kept_BV is None:
        kept_BV = filter_logits(drawable_BV, params)
    # Sampling and scoring share the same exponentials.
    weights, _, normaliser = exp_logits(kept_BV)
    tokens = draw_tokens(kept_BV, uniforms_B, weights)
    return tokens, select_logprobs(kept_BV, tokens, normaliser)[0]
