"""Long texts read in pieces, so that decoding can go on in between; the results are bitwise those of one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from whet.generate.cache import KVCache
from whet.model.attention import AttentionKind, Packed, Rule
from whet.model.recurrence import Recurrence, scan
from whet.model.routing import Routing
from whet.types import Piece, Segment

PIECE_TOKENS = 512
"""Tokens of a piece: a multiple of attention's blocks of queries and keys, so that sums are the whole text's."""


class Pieces:
    """Attention of one text whose rows come in pieces; each row sees all rows before it.

    Keys and values are kept here, flat, until the text is complete: a row of the cache is needed only then.

    Args:
        length: Tokens of the whole text.
        device: The model's device.
        kind: Attention kernel.
    """

    routing: Routing | None = None
    segments: Sequence[Segment] = ()

    def __init__(self, length: int, device: torch.device, kind: AttentionKind) -> None:
        self.longest = length
        self._device = device
        self._kind: AttentionKind = kind
        self._first = self._end = 0
        self._packed = Packed([], device, kind)
        self._pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}

    def begin(self, count: int) -> None:
        """Start the next piece, of `count` tokens."""
        self._first, self._end = self._end, self._end + count
        whole, piece = Segment(0, self._end, 0, 0), Piece(0, self._first, count)
        self._packed = Packed([whole], self._device, self._kind, pieces=[piece])

    def see_ahead(self, spans: Sequence[tuple[int, int]]) -> None:
        """Refuse: a text with images is not cut."""
        assert not spans

    def attend(
        self,
        layer: int,
        q_NHC: torch.Tensor,
        k_NKC: torch.Tensor,
        v_NKC: torch.Tensor,
        rule: Rule | None = None,
    ) -> torch.Tensor:
        """Return attention outputs [N, H, C] of the piece's rows; row padding is zero."""
        if layer not in self._pairs:
            self._pairs[layer] = (
                k_NKC.new_empty(self.longest, *k_NKC.shape[1:]),
                v_NKC.new_empty(self.longest, *v_NKC.shape[1:]),
            )
        keys, values = self._pairs[layer]
        for past, new in ((keys, k_NKC), (values, v_NKC)):
            past[self._first : self._end] = new[: self._end - self._first]
        return self._packed.attend_to(q_NHC, keys[: self._end], values[: self._end], rule)

    def window(self, layer: int, x_NX: torch.Tensor, width: int) -> torch.Tensor:
        """Return each row's own input (last) and the ones before it, [width, N, X]; zeros stand before the text."""
        count = self._end - self._first
        before = self._inputs.get(layer, x_NX.new_zeros(width - 1, x_NX.shape[1]))
        history = torch.cat((before, x_NX[:count]))
        self._inputs[layer] = history[count:]
        window = torch.stack([history[start : start + count] for start in range(width)])
        return F.pad(window, (0, 0, 0, x_NX.shape[0] - count))

    def recur(
        self,
        layer: int,
        rule: Recurrence,
        mixed_NX: torch.Tensor,
        decay_NH: torch.Tensor,
        beta_NH: torch.Tensor,
    ) -> torch.Tensor:
        """Return outputs [N, H, C]; the state goes on from the piece before."""
        count = self._end - self._first
        rows = (*rule.split(mixed_NX[:count]), decay_NH[:count], beta_NH[:count])
        state = self._states.get(layer, rule.start(1, mixed_NX))
        self._states[layer], out_T1HC = scan(state, *(x[:, None] for x in rows))
        return F.pad(out_T1HC[:, 0], (0, 0, 0, 0, 0, mixed_NX.shape[0] - count))

    def store(self, cache: KVCache, home: int) -> None:
        """Write the text, which is complete, to a slot from `KVCache.place`."""
        for layer, (keys, values) in self._pairs.items():
            cache.write(layer, home, keys, values)
        for kept, own in ((cache.inputs, self._inputs), (cache.states, self._states)):
            for layer, tensor in own.items():
                kept[layer][home] = tensor.to(kept[layer].dtype)


class Reading:
    """A text that `Engine.read` reads piece by piece.

    Attributes:
        ids: Its tokens.
        adapter: One of several adapters, by name.
        context: Attention over what was read.
        num_read: Tokens read so far.
        last_1D: Hidden state of the last token read; None at the start.
    """

    def __init__(self, ids: Sequence[int], adapter: str, context: Pieces) -> None:
        self.ids, self.adapter, self.context = ids, adapter, context
        self.num_read = 0
        self.last_1D: torch.Tensor | None = None

    @property
    def is_read(self) -> bool:
        """Whether all of it was read."""
        return self.num_read == len(self.ids)
