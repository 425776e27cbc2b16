"""Keeps the sampler's activations for the training step, which then needs no forward pass.

Sampler and trainer compute the same numbers to the last bit (C++ kernels), so an on-policy step need not compute them
twice; that saves a third of its training pass. They take as much memory as autograd would save for all tokens of the
step at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from whet.generate.rows import Request
from whet.kernels.cpu import ops as cpu
from whet.kernels.cpu.layers import PRODUCTS, Layers
from whet.model.config import ModelConfig, options
from whet.model.lora.side import sides_of
from whet.model.parts import Linear
from whet.model.quant import packed_parts
from whet.model.transformer import LanguageModel, LlamaLike
from whet.types import MicroBatch

KNOWN_OPTIONS = {"rope_scaling", "tie_embeddings", "attention_bias", "qkv_bias"}
"""Options of a model whose forward pass has the sequence of calls that is kept."""
NOWHERE = -(2**40)
"""A base for tokens that are not kept: every place counted from it is below 0."""
NOTHING = 0
"""Place of a token that the sampler never read: the last one of a completion. No later token attends to it, and its
hidden state scores no token, so zeros serve as well."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Location of a sequence: first place of its prefilled tokens, first place of its sampled tokens, number prefilled.

    The prefilled tokens are not always the training prompt: in a multi-turn episode they include earlier turns and
    their observations.
    """

    prefilled: int
    drawn: int
    length: int

    def places(self, first: int, last: int) -> torch.Tensor:
        """Return the places of tokens `first` to `last` - 1 of the sequence."""
        position = torch.arange(first, last)
        return torch.where(
            position < self.length, self.prefilled + position, self.drawn + position - self.length
        )


class Activations:
    """Activations of one rollout.

    Args:
        max_bytes: Memory limit; a rollout that needs more keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._layers: list[dict[str, torch.Tensor]] = []
        self._last = self._rstd = torch.empty(0)
        self._free = self._size = 0
        self._prompts: dict[int, tuple[Request, int]] = {}
        self._found: dict[tuple[int, ...], _Found] = {}
        self._versions: tuple[int, ...] = ()
        self._sides: list[set[str]] = []

    def clear(self) -> None:
        """Forget everything, and free the memory."""
        self._layers, self._last, self._rstd = [], torch.empty(0), torch.empty(0)
        self._free = self._size = 0
        self._prompts.clear()
        self._found.clear()

    def begin(self, model: LanguageModel, layers: Layers, requests: Sequence[Request], max_new: int) -> bool:
        """Allocate memory for a rollout; say whether it fits.

        Args:
            model: The policy.
            layers: Its fused layers.
            requests: Prompts with the seeds of their samples.
            max_new: Longest completion.
        """
        self.clear()
        widths, dtype = _widths(model.config), model.head_weight.dtype
        # The worst case: every completion has maximum length. Place 0 (`NOTHING`) is the one of zeros.
        size = 1 + sum(len(r.prompt_ids) + len(r.seeds) * max_new for r in requests)
        if not can_keep(model) or size * bytes_per_token(model.config, dtype.itemsize) > self._max_bytes:
            return False
        for _ in range(model.config.num_layers):
            arrays = {name: torch.empty(size, width, dtype=dtype) for name, width in widths.items()}
            arrays |= {name: torch.empty(size) for name in ("rstd1", "rstd2")}
            self._layers.append(arrays | {"lse": torch.empty(size, model.config.num_heads)})
        self._last, self._rstd = torch.empty(size, model.config.hidden_size, dtype=dtype), torch.empty(size)
        for tensor in (*(t for arrays in self._layers for t in arrays.values()), self._last, self._rstd):
            tensor[NOTHING].zero_()
        self._free, self._size = 1, size
        self._versions = _versions(model)
        self._sides = [_sides(layer) for layer in model.layers]
        layers.keep(self._layers, self._last, self._rstd)
        return True

    def prompt(self, request: Request) -> int:
        """Return the first place of a prompt; samples that are admitted later find it again."""
        if id(request) not in self._prompts:
            # The request is stored, too: as long as it lives, no other object gets its id.
            self._prompts[id(request)] = request, self._take(len(request.prompt_ids))
        return self._prompts[id(request)][1]

    def completion(self, longest: int) -> int:
        """Return the first place of a completion of at most `longest` tokens."""
        return self._take(longest)

    def _take(self, count: int) -> int:
        if self._free + count > self._size:
            return NOWHERE
        self._free += count
        return self._free - count

    def note(self, request: Request, own: int, ids: Sequence[int]) -> None:
        """Record the location of a completed sequence."""
        prompt = self.prompt(request)
        if prompt >= 0 and own >= 0:
            length = len(request.prompt_ids)
            self._found[(*request.prompt_ids, *ids)] = _Found(prompt, own, length)

    def tape(self, model: LanguageModel, micro: MicroBatch) -> cpu.Tape | None:
        """Return the results of a micro-batch's forward pass; None if some are missing.

        Args:
            model: The policy; if its weights have changed since, nothing is valid.
            micro: Packed sequences.
        """
        if not self._found or _versions(model) != self._versions or not torch.is_grad_enabled():
            return None
        # Sequences are found by their tokens. Several samples may be equal; their activations are then equal, too.
        tokens = micro.tokens_N.tolist()
        places = torch.full((len(tokens),), NOTHING)
        shared_prompts = {segment.prefix for segment in micro.segments if segment.shared}
        for segment in micro.segments:
            own = tokens[segment.start : segment.start + segment.length]
            prompt = tokens[segment.prefix : segment.prefix + segment.shared]
            if not segment.shared and segment.start in shared_prompts:
                continue  # a shared prompt: its samples locate it
            found = self._found.get((*prompt, *own))
            if found is None:
                return None
            if segment.shared:
                places[segment.prefix : segment.prefix + segment.shared] = found.places(0, segment.shared)
            # The last token was sampled but never read.
            end = segment.start + segment.length - 1
            places[segment.start : end] = found.places(segment.shared, segment.shared + segment.length - 1)
        return cpu.Tape(self._results(places))

    def _results(self, places_N: torch.Tensor) -> Iterator[tuple[torch.Tensor | None, ...]]:
        def at(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.index_select(0, places_N)

        # The order of the calls in the forward pass of a llama-like layer (`is_known`); `replaying` asserts the count.
        for arrays, sides in zip(self._layers, self._sides, strict=True):
            # Where there is an adapter its product alone comes first, which nothing reads.
            before = {name: [(None,)] * (name in sides) for name in PRODUCTS}
            yield at(arrays["norm1"]), at(arrays["rstd1"])
            yield from before["q"]
            yield (None,)  # queries and keys before rotation: nothing reads them
            yield from before["k"]
            yield (None,)
            yield from before["v"]
            yield (at(arrays["v"]),)
            yield (at(arrays["q"]),)
            yield (at(arrays["k"]),)
            yield at(arrays["attended"]), at(arrays["lse"])
            yield from before["o"]
            yield (at(arrays["o"]),)
            yield at(arrays["norm2"]), at(arrays["rstd2"])
            yield from before["gate"]
            yield (at(arrays["gate"]),)
            yield from before["up"]
            yield (at(arrays["up"]),)
            yield (at(arrays["gated"]),)
            yield from before["down"]
            yield (at(arrays["down"]),)
        yield at(self._last), at(self._rstd)


def bytes_per_token(config: ModelConfig, number_bytes: int) -> int:
    """Return the bytes kept per token.

    Args:
        config: Shape of the model.
        number_bytes: Bytes of a parameter.
    """
    numbers = config.num_layers * sum(_widths(config).values()) + config.hidden_size
    return numbers * number_bytes + 4 * (config.num_layers * (2 + config.num_heads) + 1)


def is_known(config: ModelConfig) -> bool:
    """Say whether the forward pass of models of this shape makes exactly the calls that a tape replays."""
    return config.family != "gpt2" and options(config) <= KNOWN_OPTIONS


def can_keep(model: LanguageModel) -> bool:
    """Say whether the kept results are all that a model's backward pass needs."""
    if not (isinstance(model, LlamaLike) and is_known(model.config)) or model.checkpoint_layers:
        return False
    # Of frozen weights without adapters there is no gradient that the kept results could serve.
    return all(side.is_plain for _, side in sides_of(model)) and not packed_parts(model)


def _sides(layer: nn.Module) -> set[str]:
    """Return which products of a layer have an adapter: q, k, v, o, gate, up, down."""
    linear = [(name, part) for name, part in layer.named_modules() if isinstance(part, Linear)]
    return {name.rpartition(".")[2].removesuffix("_proj") for name, part in linear if part.side is not None}


def _widths(config: ModelConfig) -> Mapping[str, int]:
    """Return the width of each kept array of a layer, by name."""
    width, feed = config.hidden_size, config.intermediate_size
    heads, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found: dict[str, int] = {}
    for size, names in (
        (width, ("norm1", "o", "norm2", "down")),
        (heads, ("q", "attended")),
        (keys, ("k", "v")),
        (feed, ("gate", "up", "gated")),
    ):
        found |= dict.fromkeys(names, size)
    return found


def _versions(model: LanguageModel) -> tuple[int, ...]:
    """Return version counters that show whether weights have changed."""
    return tuple(version for p in model.parameters() for version in (id(p), p._version, p.data_ptr()))
