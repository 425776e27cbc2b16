"""Key/value cache with fixed rows, and the attention contexts that fill and read it.

Live sequences occupy rows 0..B-1 without holes: when one ends, the last row moves into its place, so that
decoding reads contiguous memory and never gathers.

With the C++ kernels a prompt is stored once for all its samples, in a separate slot: a row only stores the positions
after its prompt's last whole tile of 16. That saves memory, and a decoding step reads much less of it: with eight
samples of a prompt as long as its completions, little more than half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from whet.kernels import dispatch, eager
from whet.kernels.cpu import attention as cpu_attention
from whet.kernels.cpu.attention import TILE
from whet.model.attention import (
    KEY_BLOCK,
    KEY_QUANTUM,
    MIN_QUERY_ROWS,
    PLAIN,
    AttentionKind,
    Packed,
    Rule,
    exact_attention,
    outside,
    round_up,
    with_sinks,
)
from whet.model.config import ModelConfig, kv_shape
from whet.model.recurrence import Recurrence, step
from whet.model.routing import Routing
from whet.types import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """Capacity of a cache.

    Attributes:
        rows: Concurrent sequences.
        prompt: Positions of the longest prompt.
        completion: Tokens of the longest completion.
        context: Positions of the longest sequence; less than prompt and completion if the model's context is shorter.
        prompts: Different concurrent prompts.
    """

    rows: int
    prompt: int
    completion: int
    context: int
    prompts: int

    @property
    def longest(self) -> int:
        """Positions of the longest sequence."""
        return min(self.prompt + self.completion, self.context)

    @property
    def whole(self) -> int:
        """Positions per row without prompt sharing; rounded up for exact attention."""
        return round_up(self.longest, KEY_QUANTUM if self.longest <= KEY_BLOCK else KEY_BLOCK)

    @property
    def own(self) -> int:
        """Positions per row after its prompt's last whole tile."""
        return round_up(min(self.completion + TILE - 1, self.prompt + self.completion, self.context), TILE)


@dataclass(slots=True)
class _Slot:
    """The prompt in a slot, and how many rows continue it."""

    prompt: object = None
    num_rows: int = 0


class KVCache:
    """Keys and values of sequences, per layer [rows, K, S, C].

    Args:
        config: Shape of the model.
        size: Its capacity.
        dtype: Dtype of the model's keys and values.
        device: Its device.
        is_tiled: Store keys in the C++ kernels' layout, [rows, K, S / 16, C, 16], and a prompt once for all its rows.

    Attributes:
        keys: Keys of the rows, [L, rows, K, ...]; if tiled, without the shared prompts. Layers with heads of another
            shape have other tensors.
        values: The same for values.
        prompt_keys: Keys of the prompts if tiled, else empty.
        prompt_values: The same for values.
        inputs: By layer with a convolution: its last inputs [rows, T, X], oldest first.
        states: By layer with the delta rule: its float32 state.
        shared_B2: Slot of the prompt that each row continues, and the positions shared from it; 0 if not tiled.
    """

    def __init__(
        self,
        config: ModelConfig,
        size: CacheSize,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_tiled: bool = False,
    ) -> None:
        self.is_tiled = is_tiled
        self.size = size
        self.capacity = size.own if is_tiled else size.whole
        self.num_rows = size.rows
        self.inputs: dict[int, torch.Tensor] = {}
        self.states: dict[int, torch.Tensor] = {}
        for index, (inputs, state) in fixed_states(config).items():
            self.inputs[index] = torch.zeros(size.rows, *inputs, dtype=dtype, device=device)
            if state:
                self.states[index] = torch.zeros(size.rows, *state, device=device)
        places = kv_places(config)
        shapes = [(len(m), size.rows, heads, self.capacity, c) for (heads, c), m in places.items()]
        self.shared_B2 = torch.zeros(size.rows, 2, dtype=torch.int64)
        self._slots = [_Slot() for _ in range(size.prompts if is_tiled else 0)]
        if is_tiled:
            # The kernels never read behind a row's last position, so it need not be zero.
            ((layers, _, heads, _, channels),) = shapes
            prompts = (layers, size.prompts, heads, round_up(size.prompt, TILE), channels)
            keys, self.prompt_keys = (torch.empty(_tiles(s), dtype=dtype) for s in (shapes[0], prompts))
            values, self.prompt_values = (torch.empty(s, dtype=dtype) for s in (shapes[0], prompts))
            self._pairs = [(keys, values)]
        else:
            # Zeros, not empty: a masked position still multiplies its value by an exact 0, and 0 x inf would be nan.
            zeros = partial(torch.zeros, dtype=dtype, device=device)
            self._pairs = [(zeros(shape), zeros(shape)) for shape in shapes]
            self.prompt_keys = self.prompt_values = torch.empty(0)
        self.keys, self.values = self._pairs[0]
        self._place = {
            layer: (pair, place)
            for pair, members in zip(self._pairs, places.values(), strict=True)
            for place, layer in enumerate(members)
        }

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values, [rows, K, ...]."""
        (keys, values), place = self._place[layer]
        return keys[place], values[place]

    def fits(self, size: CacheSize) -> bool:
        """Say whether the cache has at least this capacity."""
        mine = self.size
        prompts = mine.prompts >= size.prompts and mine.prompt >= size.prompt
        has_length = mine.own >= size.own if self.is_tiled else mine.whole >= size.whole
        return mine.rows >= size.rows and has_length and (prompts or not self.is_tiled)

    def clear(self) -> None:
        """Forget all rows and prompts."""
        self._slots = [_Slot() for _ in self._slots]

    def place(self, prompts: Sequence[object], rows: Sequence[Sequence[int]]) -> list[int]:
        """Choose the slots into which prompts are read.

        Args:
            prompts: A distinct key for each prompt.
            rows: The new rows of each prompt.

        Returns:
            A slot for each: the one that it already has for other rows (reading it again writes the same numbers), or a
            free one. Without sharing, its first row.
        """
        if not self.is_tiled:
            return [members[0] for members in rows]
        # By identity: a slot holds a reference to its prompt, so the id of a held prompt cannot be reused.
        held = {id(slot.prompt): number for number, slot in enumerate(self._slots) if slot.num_rows}
        free = (number for number, slot in enumerate(self._slots) if not slot.num_rows)
        homes = []
        for prompt, members in zip(prompts, rows, strict=True):
            home = held.get(id(prompt))
            if home is None:
                home = next(free)
            held[id(prompt)] = home
            self._slots[home].prompt = prompt
            self._slots[home].num_rows += len(members)
            homes.append(home)
        return homes

    def give(self, homes: Sequence[int], rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Attach rows to their prompts, which have been read.

        Args:
            homes: Slots from `place`.
            rows: The rows of each prompt.
            lengths: Tokens of each prompt.
        """
        if not self.is_tiled:
            for home, members, length in zip(homes, rows, lengths, strict=True):
                self._copy([home] * (len(members) - 1), members[1:], length)
            return
        # One entry per row: the row, its prompt's slot, and its prompt's length.
        counts = torch.tensor([len(members) for members in rows])
        row_B = torch.tensor([row for members in rows for row in members])
        slot_B = torch.repeat_interleave(torch.tensor(homes), counts)
        length_B = torch.repeat_interleave(torch.tensor(lengths), counts)

        # Only whole tiles are shared: a row must not write its own tokens into a tile that other rows read.
        shared_B = length_B // TILE * TILE
        self.shared_B2[row_B] = torch.stack((slot_B, shared_B), dim=1)

        # The partial tile at the prompt's end is copied to every row: the row's own tokens continue in it.
        has_rest = shared_B < length_B
        target, slots, tiles = row_B[has_rest], slot_B[has_rest], shared_B[has_rest] // TILE
        self.keys[:, target, :, 0] = self.prompt_keys[:, slots, :, tiles].transpose(0, 1)
        own_values = self.values.unflatten(3, (-1, TILE))
        prompt_values = self.prompt_values.unflatten(3, (-1, TILE))
        own_values[:, target, :, 0] = prompt_values[:, slots, :, tiles].transpose(0, 1)

    def write(self, layer: int, home: int, keys_NKC: torch.Tensor, values_NKC: torch.Tensor) -> None:
        """Store the keys and values of a whole prompt, which was read before, in its slot from `place`."""
        count = keys_NKC.shape[0]
        if self.is_tiled:
            cached = self.prompt_keys[layer], self.prompt_values[layer]
            rows_N = torch.full((count,), home)
            cpu_attention.write_cache(keys_NKC, values_NKC, *cached, rows_N, torch.arange(count))
            return
        for tensor, new_NKC in zip(self.of_layer(layer), (keys_NKC, values_NKC), strict=True):
            tensor[home, :, :count] = new_NKC.transpose(0, 1).to(tensor.dtype)

    def recount(self, num_live: int) -> None:
        """Count the rows of each prompt's slot again, after an admission that failed.

        Args:
            num_live: Rows 0..B-1 that live.
        """
        slots = self.shared_B2[:num_live, 0].tolist() if self.is_tiled else []
        for number, slot in enumerate(self._slots):
            slot.num_rows = slots.count(number)

    def leave(self, rows: Sequence[int]) -> None:
        """Free rows, and the slots of prompts without further rows."""
        for slot in self.shared_B2[list(rows), 0].tolist() if self.is_tiled else ():
            self._slots[slot].num_rows -= 1

    def move(self, source: Sequence[int], target: Sequence[int], deepest: int) -> None:
        """Copy live rows over ended ones.

        Args:
            source: The live rows.
            target: The ended rows.
            deepest: Largest position of any of them.
        """
        if self.is_tiled and source:
            # A row's own positions start after its shared ones: the row that shares least has most of its own.
            self.shared_B2[list(target)] = self.shared_B2[list(source)]
            deepest -= int(self.shared_B2[list(target), 1].min())
        self._copy(source, target, min(deepest + 1, self.capacity))

    def _copy(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of rows over others, in all layers."""
        if not source:
            return
        from_rows = torch.tensor(source, device=self.keys.device)
        to_rows = torch.tensor(target, device=self.keys.device)
        num_keys = -(-length // TILE) if self.is_tiled else length  # tiles of 16 positions, or positions
        for keys, values in self._pairs:
            keys[:, to_rows, :, :num_keys] = keys[:, from_rows, :, :num_keys]
            values[:, to_rows, :, :length] = values[:, from_rows, :, :length]
        for tensor in (*self.inputs.values(), *self.states.values()):
            tensor[to_rows] = tensor[from_rows]

    def kernel_cache(self, layer: int) -> cpu_attention.Cache:
        """Return a layer's part for the C++ kernels; valid while the cache lives."""
        own = self.keys[layer], self.values[layer]
        return cpu_attention.Cache.of(
            *own, self.prompt_keys[layer], self.prompt_values[layer], self.shared_B2
        )

    @property
    def nbytes(self) -> int:
        """Size of keys, values and states in bytes."""
        tensors = [tensor for pair in self._pairs for tensor in pair]
        tensors += [self.prompt_keys, self.prompt_values, *self.inputs.values(), *self.states.values()]
        return sum(tensor.nbytes for tensor in tensors)


def kv_places(config: ModelConfig) -> dict[tuple[int, int], list[int]]:
    """Return the layers that have keys and values of their own, by heads and channels; the model's shape first."""
    places: dict[tuple[int, int], list[int]] = {(config.num_kv_heads, config.head_dim): []}
    for index, spec in enumerate(config.layers):
        if spec.mixer == "attention" and spec.source < 0:
            places.setdefault(kv_shape(spec, config), []).append(index)
    return places


def fixed_states(config: ModelConfig) -> dict[int, tuple[tuple[int, int], tuple[int, ...]]]:
    """Return what a row keeps in place of keys and values, by layer without attention.

    Returns:
        Shapes of its last inputs, in the dtype of the model, and of its float32 state, () for none.
    """
    found: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {}
    for index, spec in enumerate(config.layers):
        s = config.block.delta
        if spec.mixer == "convolution":
            found[index] = (config.block.kernel - 1, config.hidden_size), ()
        elif spec.mixer == "delta" and s is not None:
            mixed = 2 * s.key_heads * s.key_dim + s.value_heads * s.value_dim
            found[index] = (s.kernel - 1, mixed), (s.value_heads, s.key_dim, s.value_dim)
    return found


def _tiles(shape: tuple[int, int, int, int, int]) -> tuple[int, ...]:
    """Return the tiled shape of keys for a shape of values."""
    return (*shape[:3], shape[3] // TILE, shape[4], TILE)


class Prefill:
    """Packed causal attention that also writes each prompt's keys and values to its slot from `KVCache.place`."""

    def __init__(
        self,
        cache: KVCache,
        homes: Sequence[int],
        lengths_B: Sequence[int],
        kind: AttentionKind,
        routing: Routing | None = None,
    ) -> None:
        self.routing = routing
        device = cache.keys.device
        self._packed = Packed(lengths_B, device, kind)
        self._cache, self.longest = cache, cache.size.longest
        self._homes = torch.tensor(homes, device=device)
        self._row_N = torch.repeat_interleave(torch.tensor(homes), torch.tensor(lengths_B)).to(device)
        self._position_N = torch.cat([torch.arange(length) for length in lengths_B]).to(device)

    @property
    def segments(self) -> Sequence[Segment]:
        """The prompts."""
        return self._packed.segments

    def see_ahead(self, spans: Sequence[tuple[int, int]]) -> None:
        """Let rows of these runs attend to all of their run."""
        self._packed.see_ahead(spans)

    def attend(
        self,
        layer: int,
        q_NHC: torch.Tensor,
        k_NKC: torch.Tensor,
        v_NKC: torch.Tensor,
        rule: Rule | None = None,
    ) -> torch.Tensor:
        """Return attention outputs [N, H, C] and store keys and values in the cache."""
        count = self._packed.num_tokens
        if self._cache.is_tiled:
            k, v = k_NKC[:count], v_NKC[:count]
            cached = self._cache.prompt_keys[layer], self._cache.prompt_values[layer]
            cpu_attention.write_cache(k, v, *cached, self._row_N, self._position_N)
            return self._packed.attend(layer, q_NHC, k_NKC, v_NKC, rule)
        for tensor, new_NKC in zip(self._cache.of_layer(layer), (k_NKC, v_NKC), strict=True):
            tensor[self._row_N, :, self._position_N] = new_NKC[:count].to(tensor.dtype)
        return self._packed.attend(layer, q_NHC, k_NKC, v_NKC, rule)

    def window(self, layer: int, x_NX: torch.Tensor, width: int) -> torch.Tensor:
        """Return each row's own input (last) and the ones before it, and store each prompt's last ones."""
        inputs = self._cache.inputs[layer]
        scan = self._packed.scan(x_NX.shape[0])
        inputs[self._homes] = scan.tail(x_NX, inputs.shape[1]).to(inputs.dtype)
        return scan.window(x_NX, width)

    def recur(
        self,
        layer: int,
        rule: Recurrence,
        mixed_NX: torch.Tensor,
        decay_NH: torch.Tensor,
        beta_NH: torch.Tensor,
    ) -> torch.Tensor:
        """Return outputs [N, H, C] and store each prompt's state in the cache."""
        scan = self._packed.scan(mixed_NX.shape[0])
        out_NHC, state = scan.run(rule, mixed_NX, decay_NH, beta_NH)
        self._cache.states[layer][self._homes] = state
        return out_NHC


class Decode:
    """One new token per live row: writes its key and value, then attends to the row's own past.

    Args:
        cache: The cache; rows 0..B-1 are live.
        positions_B: Position of the new token of each row.
        num_keys: Key positions to read; a multiple of the quantum that covers every position.
        kind: Attention kernel.
        routing: What routers of experts note; None for nothing.
    """

    def __init__(
        self,
        cache: KVCache,
        positions_B: torch.Tensor,
        num_keys: int,
        kind: AttentionKind,
        routing: Routing | None = None,
    ) -> None:
        self.routing = routing
        self._cache, self.longest = cache, cache.size.longest
        self._positions = positions_B
        self._rows = torch.arange(positions_B.shape[0], device=positions_B.device)
        self._num_keys = num_keys
        self._kind: AttentionKind = kind
        if cache.is_tiled:
            # A row's own part of the cache starts after the positions that it shares with its prompt's other samples.
            self._own_B = positions_B - cache.shared_B2[: positions_B.shape[0], 1]
            return
        # Everything that depends only on positions is computed once per step, not in every layer.
        self._biases: dict[tuple[int, int], torch.Tensor] = {}
        self._slots: dict[int, torch.Tensor] = {}

    segments: Sequence[Segment] = ()

    def see_ahead(self, spans: Sequence[tuple[int, int]]) -> None:
        """Refuse: no token of a completion sees later ones."""
        assert not spans

    def window(self, layer: int, x_NX: torch.Tensor, width: int) -> torch.Tensor:
        """Return each row's own input (last) and the ones before it, and store it; row padding is zero."""
        rows = self._positions.shape[0]
        inputs = self._cache.inputs[layer][:rows]
        window = torch.cat((inputs.transpose(0, 1), x_NX[None, :rows].to(inputs.dtype)))
        assert window.shape[0] == width
        inputs.copy_(window[1:].transpose(0, 1))
        return F.pad(window, (0, 0, 0, x_NX.shape[0] - rows))

    def recur(
        self,
        layer: int,
        rule: Recurrence,
        mixed_NX: torch.Tensor,
        decay_NH: torch.Tensor,
        beta_NH: torch.Tensor,
    ) -> torch.Tensor:
        """Return outputs [N, H, C]; rows past the live ones (row padding) are zero."""
        rows = self._positions.shape[0]
        states = self._cache.states[layer][:rows]
        state, out = step(states, *rule.split(mixed_NX[:rows]), decay_NH[:rows], beta_NH[:rows])
        states.copy_(state)
        return F.pad(out, (0, 0, 0, 0, 0, mixed_NX.shape[0] - rows))

    def _slots_of(self, kv_heads: int) -> torch.Tensor:
        """Return the new tokens' places [Z] in a layer's cache, viewed as rows of one head and position."""
        if kv_heads not in self._slots:
            count, device = self._rows.shape[0] * kv_heads, self._positions.device
            first = torch.arange(count, device=device) * self._cache.capacity
            self._slots[kv_heads] = first + self._positions.repeat_interleave(kv_heads)
        return self._slots[kv_heads]

    def _bias(self, window: int, kv_heads: int) -> torch.Tensor:
        """Return the mask [Z, 1, S] of a window."""
        if (window, kv_heads) not in self._biases:
            key = torch.arange(self._num_keys, device=self._positions.device)
            hidden = outside(key, self._positions[:, None], window)
            bias = torch.zeros(hidden.shape, device=key.device).masked_fill_(hidden, float("-inf"))
            self._biases[window, kv_heads] = bias.repeat_interleave(kv_heads, 0)[:, None]
        return self._biases[window, kv_heads]

    def attend(
        self,
        layer: int,
        q_NHC: torch.Tensor,
        k_NKC: torch.Tensor,
        v_NKC: torch.Tensor,
        rule: Rule | None = None,
    ) -> torch.Tensor:
        """Return attention outputs [N, H, C]; rows past the live ones (row padding) are zero."""
        rows = self._positions.shape[0]
        keys, values = self._cache.of_layer(layer)
        if self._cache.is_tiled:
            assert rule is None, "the engine makes no tiled cache for such a model"
            new = k_NKC[:rows], v_NKC[:rows]
            cpu_attention.write_cache(*new, keys, values, self._rows, self._own_B)
            cached = self._cache.kernel_cache(layer)
            out = cpu_attention.decode(q_NHC[:rows], cached, k_NKC.shape[1], self._positions)
            surplus = q_NHC.shape[0] - rows
            return F.pad(out, (0, 0, 0, 0, 0, surplus)) if surplus else out
        channels = q_NHC.shape[2]
        for tensor, new in ((keys, k_NKC), (values, v_NKC)):
            rows_ZC = new[:rows].reshape(-1, channels).to(tensor.dtype)
            tensor.view(-1, channels).index_copy_(0, self._slots_of(keys.shape[1]), rows_ZC)
        surplus = q_NHC.shape[0] - rows
        is_plain = rule is None or rule.is_plain
        kernel = dispatch.kernel_for(eager.decode_attention, q_NHC) if is_plain else None
        if kernel is not None:
            out = kernel(q_NHC[:rows], keys, values, self._positions + 1)
            return F.pad(out, (0, 0, 0, 0, 0, surplus)) if surplus else out
        count_z = rows * keys.shape[1]
        k_ZSC, v_ZSC = (x.flatten(0, 1)[:count_z, : self._num_keys] for x in (keys, values))
        q_ZQC = q_NHC[:rows].reshape(count_z, -1, channels)
        rep = q_ZQC.shape[1]
        if self._kind == "fast" and q_ZQC.is_cuda and is_plain:
            mask = self._bias(0, keys.shape[1]).to(q_ZQC.dtype)
            out = F.scaled_dot_product_attention(
                q_ZQC[:, None], k_ZSC[:, None], v_ZSC[:, None], mask[:, None]
            )
        else:
            # Fewer query rows take another BLAS path with other bits than the trainer's: pad with zeros.
            padded = F.pad(q_ZQC, (0, 0, 0, MIN_QUERY_ROWS - rep)) if rep < MIN_QUERY_ROWS else q_ZQC
            wide = eager.product_dtype(padded)
            query, key, value = (x.to(wide) for x in (padded, k_ZSC, v_ZSC))
            window, cap, sinks_H = rule or PLAIN
            lse = None if sinks_H is None else torch.empty(query.shape[:2], device=query.device)
            bias = self._bias(window, keys.shape[1])
            out, _ = exact_attention(query, key, value, bias, cap=cap, lse_ZQ=lse)
            out = out[:, :rep].to(q_NHC.dtype)
            if lse is not None and sinks_H is not None:
                heads = q_NHC.shape[1]
                out = with_sinks(out.reshape(rows, heads, -1), lse[:, :rep].reshape(rows, heads), sinks_H)
        out = out.reshape(rows, q_NHC.shape[1], q_NHC.shape[2])
        return F.pad(out, (0, 0, 0, 0, 0, surplus)) if surplus else out
