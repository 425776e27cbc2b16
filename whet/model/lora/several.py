"""Several adapters beside one base: each row of a batch has one of them, or none.

What stands beside a layer holds the adapters by number. The rows of an adapter are gathered, go through the very code
that applies it alone, and are put back; so a row has the bits that it has with its adapter alone, whatever the others
have, and the base's product is computed once for all.

Source: the gathered products of S-LoRA 2311.03285 section 5 and Punica 2310.18547 (SGMV), in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from whet.model.attention import ROW_QUANTUM
from whet.model.lora.adapter import CONFIG, Adapter
from whet.model.lora.side import Layer, Side, Target, make_side, targets_of
from whet.model.transformer import LanguageModel
from whet.types import UserError

NOBODY = -1
"""Number of a row that has no adapter."""


@dataclass(slots=True)
class Choice:
    """Which rows of the next passes have which adapter; all that stand beside layers read the same one.

    Attributes:
        whole: The adapter of all rows, if they have the same.
        parts: Else each adapter with its rows: their places, repeated up to a whole `ROW_QUANTUM` of them (PyTorch's
            products of fewer rows depend on their number), and how many they are.
    """

    whole: int = NOBODY
    parts: list[tuple[int, torch.Tensor, int]] = field(default_factory=list)


class Mixed(nn.Module):
    """What stands beside a layer where rows may have different adapters.

    Args:
        sides: The adapters that change this layer, by number.
        choice: Which rows have which.
    """

    magnitude: None = None
    start: None = None

    def __init__(self, sides: Mapping[int, Side], choice: Choice) -> None:
        super().__init__()
        self.numbered, self._choice = dict(sides), choice  # not modules of it: they are no part of the model

    @property
    def is_plain(self) -> bool:
        """Whether each is one low-rank product, which the compiled decoding step knows."""
        return all(side.is_plain for side in self.numbered.values())

    def forward(self, x_ND: torch.Tensor, layer: Layer) -> torch.Tensor:
        """Return the layer's output, each row with its own adapter."""
        choice = self._choice
        if choice.whole in self.numbered:
            return self.numbered[choice.whole](x_ND, layer)
        y_NF = layer.product(x_ND, layer.bias)
        for number, index_P, count in choice.parts:
            side = self.numbered.get(number)
            if side is None:
                continue
            if side.is_plain:
                own = side.added(x_ND[index_P], y_NF[index_P])
            else:  # DoRA's lengths multiply the base's product before the bias is added
                own = side(x_ND[index_P], layer)
            y_NF = y_NF.index_copy(0, index_P[:count], own[:count])
        return y_NF


class Several:
    """Adapters beside one base, by name.

    Args:
        adapters: The adapters, by name; trained on the same base.

    Raises:
        UserError: If their bases differ, or one changes more than the layers' matrices.
    """

    def __init__(self, adapters: Mapping[str, Adapter]) -> None:
        self.adapters = dict(adapters)
        check_same_base(list(adapters.values()))
        self.choice = Choice()
        self._numbers = {name: number for number, name in enumerate(adapters)}
        self._targets: list[Target] = []
        self._told: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in their order; an adapter's place is its number."""
        return tuple(self.adapters)

    def apply(self, model: LanguageModel) -> None:
        """Let the adapters stand beside a model; no row has one yet.

        Args:
            model: Their base. Its matrices are left as they are.

        Raises:
            UserError: If an adapter does not fit the model, or changes more than the layers' matrices.
        """
        places = {target.name: target for target in targets_of(model)}
        for adapter in self.adapters.values():
            adapter.rename(model.config)
            others = sorted(adapter.saved) + sorted(
                name for name in adapter.pairs if name not in places or places[name].is_expert
            )
            if others:
                raise UserError(
                    f"{adapter.folder}: the adapter changes {others[0][:80]!r}; among several only the layers' "
                    "matrices can have adapters, not experts, whole tensors, embeddings or head: load it alone"
                )
            adapter.fit(model)
        for name, target in places.items():
            found = {
                self._numbers[key]: _side(target, adapter, name)
                for key, adapter in self.adapters.items()
                if name in adapter.pairs
            }
            if found:
                setattr(target.module, target.attribute, Mixed(found, self.choice))
                self._targets.append(target)

    def remove(self) -> None:
        """Take them off: the model is bitwise the base."""
        while self._targets:
            self._targets.pop().set(None)

    def numbers(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of adapters; '' is the base's.

        Raises:
            UserError: If there is none of a name.
        """
        unknown = next((name for name in names if name and name not in self._numbers), None)
        if unknown is not None:
            raise UserError(f"no adapter {unknown[:80]!r} here; there are {', '.join(self.names)}")
        return [self._numbers[name] if name else NOBODY for name in names]

    def select(self, names: Sequence[str], device: torch.device) -> torch.Tensor:
        """Say which adapter each row of the next passes has.

        Args:
            names: One for each row, '' for the base alone. Rows after them (padding) have any.
            device: Where the rows are.

        Returns:
            Their numbers, int32 on the CPU.
        """
        numbers = self.numbers(names)
        told = tuple(names)
        if told != self._told:  # a decoding step has the rows of the step before
            self._told = told
            present = sorted(set(numbers))
            self.choice.whole = present[0] if len(present) == 1 else NOBODY
            self.choice.parts = []
            for number in present if len(present) > 1 else ():
                rows = [row for row, own in enumerate(numbers) if own == number]
                padded = rows + rows[:1] * (-len(rows) % ROW_QUANTUM)
                if number != NOBODY:
                    self.choice.parts.append((number, torch.tensor(padded, device=device), len(rows)))
        return torch.tensor(numbers, dtype=torch.int32)

    def clear(self) -> None:
        """Let no row have an adapter."""
        self.choice.whole, self.choice.parts, self._told = NOBODY, [], ()

    @contextmanager
    def all_rows(self, name: str) -> Iterator[None]:
        """Let all rows of what is computed within a `with` block have one adapter ('' for none)."""
        (number,) = self.numbers([name])
        self.clear()
        self.choice.whole = number
        try:
            yield
        finally:
            self.clear()


def _side(target: Target, adapter: Adapter, name: str) -> Side:
    pair, to = adapter.pairs[name], target.kind
    magnitude = None if pair.magnitude_F is None else pair.magnitude_F.to(**to)
    side = make_side(target, pair.a_RD.to(**to), pair.b_FR.to(**to), pair.scaling, magnitude_F=magnitude)
    assert isinstance(side, Side)
    return side.requires_grad_(False)


def check_same_base(adapters: Sequence[Adapter]) -> None:
    """Refuse adapters that were not trained on the same base, as far as their folders say.

    Raises:
        UserError: If hashes, names or rounding of the bases differ, or shapes of what they change.
    """
    first = adapters[0]
    for other in adapters[1:]:
        both = f"{first.folder} and {other.folder} were not trained on the same base"
        hashes = {adapter.base_sha256 for adapter in (first, other)}
        if None not in hashes and len(hashes) > 1:
            raise UserError(f"{both}: the files of {first.base} and {other.base} differ")
        if None in hashes and first.base and other.base and first.base != other.base:
            raise UserError(
                f"{both}: {first.base} and {other.base}; if they are the same model, name it alike in {CONFIG}"
            )
        if first.quantize != other.quantize:
            raise UserError(f"{both}: policy.quantize was {first.quantize} and {other.quantize}")
        for name in first.pairs.keys() & other.pairs.keys():
            shapes = [[a.pairs[name].b_FR.shape[0], a.pairs[name].a_RD.shape[1]] for a in (first, other)]
            if shapes[0] != shapes[1]:
                raise UserError(f"{both}: {name[:80]!r} is {shapes[0]} in one and {shapes[1]} in the other")
