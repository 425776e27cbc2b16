"""What the sampler's choices were, from the sampler to the trainer: sets of tokens, and experts.

Filters (top-k, top-p, min-p) leave a set of tokens to draw from. The trainer must renormalise over the sampler's own
sets: the weights have moved when it computes them again, and where they have not, rounding may still decide the last
token of a set differently. The same holds for the experts that the routers of a mixture choose.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from whet.types import KeptSets

WORD_BITS = 32


def encode_kept(kept_BV: torch.Tensor) -> list[str]:
    """Write each row's set as text, which a checkpoint and a record can hold: base64 of little-endian 32-bit words.

    The words are ids in ascending order, or one bit per id of the vocabulary where that is not longer: a set takes at
    most V/8 bytes, whatever the filters leave.

    Args:
        kept_BV: Whether a token was left; V is the width of the logits.
    """
    return [encode_ids(ids, kept_BV.shape[1]) for ids in _ids(kept_BV)]


def encode_ids(ids: np.ndarray, vocab: int) -> str:
    """Write one set as `encode_kept` does.

    Args:
        ids: Its ids, ascending.
        vocab: Width of the logits.
    """
    num_words = -(-vocab // WORD_BITS)
    words = ids.astype("<i4")
    if len(ids) >= num_words:
        bits = np.zeros(num_words * WORD_BITS, dtype=np.uint8)
        bits[ids] = 1
        words = np.packbits(bits, bitorder="little")
    return b64encode(words.tobytes()).decode()


def _ids(kept_BV: torch.Tensor) -> Sequence[np.ndarray]:
    """Return the ids of each row's set; from a GPU only these are transferred."""
    if kept_BV.device.type == "cpu":  # row by row: PyTorch's `nonzero` takes eight times as long
        return [np.flatnonzero(kept_V) for kept_V in kept_BV.numpy()]
    ends = kept_BV.sum(-1).cumsum(0).tolist()
    return np.split(kept_BV.nonzero()[:, 1].int().cpu().numpy(), ends[:-1])


def join_kept(rows: Sequence[str], device: torch.device) -> KeptSets:
    """Put the sets of a micro-batch's trained tokens one after the other.

    Args:
        rows: Sets from `encode_kept`; '' keeps every token.
        device: Where the words go.
    """
    parts = [b64decode(row) for row in rows]
    words = torch.from_numpy(np.frombuffer(bytearray(b"".join(parts)), dtype="<i4"))
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part) // 4)
    return KeptSets(words.to(device), tuple(starts))


def kept_of(kept: KeptSets, tokens_M: torch.Tensor) -> KeptSets:
    """Return the sets of some tokens.

    Args:
        kept: Those of all trained tokens.
        tokens_M: int64 indices of tokens, ascending.
    """
    ranges = [(kept.starts[index], kept.starts[index + 1]) for index in tokens_M.tolist()]
    words = [kept.words_Z[first:last] for first, last in ranges]
    starts = [0, *accumulate(last - first for first, last in ranges)]
    return KeptSets(torch.cat([kept.words_Z[:0], *words]), tuple(starts))


def encode_experts(experts_NX: torch.Tensor) -> str:
    """Write the bytes of consecutive tokens' experts as text: base64.

    Args:
        experts_NX: uint8, from `whet.model.routing.Routing.encoded`.
    """
    return b64encode(experts_NX.cpu().numpy().tobytes()).decode()


def join_experts(parts: Sequence[tuple[str, int]], device: torch.device) -> torch.Tensor:
    """Put the experts of a micro-batch's tokens one after the other, uint8 [N, X].

    Args:
        parts: Text from `encode_experts` and number of tokens, of each run of tokens. Tokens behind the text's, such as
            a completion's last one, which the sampler never read, have all bits set: there the router chooses.
        device: Where the bytes go.
    """
    runs = [(b64decode(text), count) for text, count in parts]
    # Each row has as many bytes; a completion lacks one or more rows, a prompt none.
    width = max(len(run) // count for run, count in runs)
    whole = b"".join(run.ljust(width * count, b"\xff") for run, count in runs)
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8).view(-1, width).to(device)


def keep_only(logits_MV: torch.Tensor, kept: KeptSets | None, first: int = 0) -> torch.Tensor:
    """Set the logits of all other tokens to -inf, in place.

    Args:
        logits_MV: Logits of consecutive trained tokens.
        kept: The sets of all trained tokens; None keeps everything.
        first: Index of the first of these tokens.

    Returns:
        The argument.
    """
    if kept is None:
        return logits_MV
    rows, vocab = logits_MV.shape
    device, num_words = logits_MV.device, -(-vocab // WORD_BITS)
    starts = torch.tensor(kept.starts[first : first + rows + 1])
    sizes = starts.diff()
    words = kept.words_Z[int(starts[0]) : int(starts[-1])]
    is_map = sizes == num_words
    of_map = is_map.repeat_interleave(sizes).to(device)
    owners = torch.arange(rows).repeat_interleave(sizes)[~of_map.cpu()].to(device)
    removed = (sizes > 0).to(device)[:, None].repeat(1, vocab)
    removed[owners, words[~of_map].long()] = False
    if is_map.any():
        shifts = torch.arange(WORD_BITS, device=device)
        bits = words[of_map].view(-1, num_words, 1).bitwise_right_shift(shifts) & 1
        removed[is_map.to(device)] = bits.view(-1, num_words * WORD_BITS)[:, :vocab] == 0
    return logits_MV.masked_fill_(removed, float("-inf"))
