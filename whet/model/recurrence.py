"""The gated delta rule: a state per head that each token decays, corrects and reads.

Sampler and trainer run the same steps token by token, so that both have the same bits: a chunked form would be faster
in training, but sums in another order, and the ratio of on-policy samples would not be 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from whet.kernels import eager
from whet.model.config import Delta
from whet.types import Segment

CHUNK = 32
"""Steps whose states the backward pass computes again at once; between chunks one state is kept."""


def convolve(window_KNX: torch.Tensor, kernel_KX: torch.Tensor) -> torch.Tensor:
    """Return the convolution at each row, [N, X], from its own input (last) and those before it, by channel."""
    total_NX = window_KNX[0] * kernel_KX[0]
    for x_NX, tap_X in zip(window_KNX[1:], kernel_KX[1:], strict=True):
        total_NX = total_NX + x_NX * tap_X  # in this order, whatever the number of rows
    return total_NX


class Recurrence(NamedTuple):
    """A layer's rule.

    Attributes:
        sizes: Heads and channels.
        kernel_KX: Taps of the convolution over the last tokens, oldest first; X channels of queries, keys and values.
    """

    sizes: Delta
    kernel_KX: torch.Tensor

    def convolve(self, window_KNX: torch.Tensor) -> torch.Tensor:
        """Return silu of the convolution at each row, [N, X], from its own input (last) and those before it."""
        return eager.row_wise(F.silu, convolve(window_KNX, self.kernel_KX))

    def split(self, mixed_NX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys of length 1 for each value head, and values, all float32."""
        s, rows = self.sizes, mixed_NX.shape[0]
        widths = (s.key_heads * s.key_dim, s.key_heads * s.key_dim, s.value_heads * s.value_dim)
        q, k, v = mixed_NX.float().split(widths, dim=-1)
        q, k = (_unit(x.reshape(rows, s.key_heads, s.key_dim)) for x in (q, k))
        q, k = (x.repeat_interleave(s.value_heads // s.key_heads, dim=1) for x in (q, k))
        return q * s.key_dim**-0.5, k, v.reshape(rows, s.value_heads, s.value_dim)

    def start(self, rows: int, like: torch.Tensor) -> torch.Tensor:
        """Return the state before the first token [rows, heads, key channels, value channels]."""
        s = self.sizes
        return torch.zeros(rows, s.value_heads, s.key_dim, s.value_dim, device=like.device)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read one token of each row.

    Args:
        state: [B, heads, key channels, value channels], float32.
        q: Query [B, heads, key channels].
        k: Key.
        v: Value [B, heads, value channels].
        decay: What is left of the state [B, heads].
        beta: Share of the correction [B, heads].

    Returns:
        The next state, and what the query reads from it.

    Source: Gated DeltaNet 2412.06464, equation 10.
    """
    state = state * decay[..., None, None]
    known = (state * k[..., None]).sum(-2)
    correction = (v - known) * beta[..., None]
    state = state + k[..., None] * correction[..., None, :]
    return state, (state * q[..., None]).sum(-2)


def _steps(state: torch.Tensor, *inputs_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outs = []
    for inputs in zip(*(x.unbind(0) for x in inputs_T), strict=True):
        state, out = step(state, *inputs)
        outs.append(out)
    return state, torch.stack(outs)


def scan(state: torch.Tensor, *inputs_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Read several tokens of each row, inputs [T, B, ...] as `step` takes them; return last state and outputs."""
    outs = []
    for start in range(0, inputs_T[0].shape[0], CHUNK):
        part = [x[start : start + CHUNK] for x in inputs_T]
        if torch.is_grad_enabled():
            result = checkpoint(_steps, state, *part, use_reentrant=False, preserve_rng_state=False)
            state, out = result  # pyright: ignore[reportGeneralTypeIssues]
        else:
            state, out = _steps(state, *part)
        outs.append(out)
    return state, torch.cat(outs)


class Scan:
    """Where the tokens of packed sequences stand, for rules that go from token to token.

    All sequences advance together. One that shares a prefix reads it again from the start, which costs a step for each
    token and gives the same bits.

    Args:
        segments: Sequences.
        num_rows: Rows of the flat batch, padding included.
        device: Where the index tensors live.
    """

    def __init__(self, segments: Sequence[Segment], num_rows: int, device: torch.device) -> None:
        lengths = [s.shared + s.length for s in segments]
        longest, empty = max(lengths), num_rows
        rows_BT = torch.full((len(segments), longest), empty)
        place = torch.full((num_rows,), longest * len(segments))
        for row, s in enumerate(segments):
            own = torch.arange(s.start, s.start + s.length)
            rows_BT[row, : lengths[row]] = torch.cat((torch.arange(s.prefix, s.prefix + s.shared), own))
            place[own] = torch.arange(s.shared, lengths[row]) * len(segments) + row
        self._rows_BT, self._place = rows_BT.to(device), place.to(device)
        self.lengths_B = torch.tensor(lengths, device=device)

    def window(self, x_NX: torch.Tensor, width: int) -> torch.Tensor:
        """Return for each row its own input (last) and the ones before it in its sequence, [width, N, X]."""
        empty = x_NX.shape[0]
        padded = F.pad(x_NX, (0, 0, 0, 1))
        history = F.pad(self._rows_BT, (width - 1, 0), value=empty)
        parts = []
        for back in range(width - 1, -1, -1):
            shifted_TB = history[:, width - 1 - back : history.shape[1] - back].t()
            index = torch.cat((shifted_TB.reshape(-1), shifted_TB.new_full((1,), empty)))
            parts.append(padded.index_select(0, index.index_select(0, self._place)))
        return torch.stack(parts)

    def tail(self, x_NX: torch.Tensor, count: int) -> torch.Tensor:
        """Return the last inputs of each sequence, zeros before its first, [B, count, X]."""
        history = F.pad(self._rows_BT, (count, 0), value=x_NX.shape[0])
        index = self.lengths_B[:, None] + torch.arange(count, device=x_NX.device)
        return F.pad(x_NX, (0, 0, 0, 1))[history.gather(1, index)]

    def run(
        self, rule: Recurrence, mixed_NX: torch.Tensor, decay_NH: torch.Tensor, beta_NH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs [N, heads, value channels] and the last state of each sequence."""
        q, k, v = rule.split(mixed_NX)
        # What no sequence has changes nothing: the state of a short one stays until the longest is over.
        fills = ((q, 0.0), (k, 0.0), (v, 0.0), (decay_NH, 1.0), (beta_NH, 0.0))
        padded = (torch.cat((x, x.new_full((1, *x.shape[1:]), fill))) for x, fill in fills)
        inputs = [x[self._rows_BT.t()] for x in padded]
        state, out_TBHC = scan(rule.start(len(self.lengths_B), mixed_NX), *inputs)
        flat = out_TBHC.flatten(0, 1)
        return F.pad(flat, (0, 0, 0, 0, 0, 1)).index_select(0, self._place), state
