"""How many weights of a model differ from those it began from, exactly and as bfloat16 sees them.

Many updates of RL are smaller than half a unit in bfloat16's last place: a model stored in 16 bits then keeps few of
them. Files are read slice by slice, so that no model is in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from whet.model.files import read_json
from whet.model.lora.files import find_model
from whet.model.weights import weight_files

CHANGES = "weights.json"
"""What a run writes at its end: `Changes.facts`, and where it began."""
SLICE = 2**22
"""Most numbers of a tensor that are read at a time, unless a row alone has more."""
LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")


@dataclass(slots=True)
class Count:
    """Weights that were compared.

    Attributes:
        numbers: All of them.
        changed: Those that differ.
        beyond_bfloat16: Those that differ after both sides were rounded to bfloat16.
        square: Sum of the squared differences.
        norm: Sum of the squares before.
    """

    numbers: int = 0
    changed: int = 0
    beyond_bfloat16: int = 0
    square: float = 0.0
    norm: float = 0.0

    def see(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Count a slice of both sides."""
        wide = torch.promote_types(torch.promote_types(before.dtype, after.dtype), torch.float32)
        old, new = before.to(wide), after.to(wide)
        self.numbers += old.numel()
        self.changed += int((old != new).sum())
        self.beyond_bfloat16 += int((old.to(torch.bfloat16) != new.to(torch.bfloat16)).sum())
        self.square += float((new - old).double().square().sum())
        self.norm += float(old.double().square().sum())

    def add(self, other: Count) -> None:
        """Count what another one has counted, too."""
        for name in ("numbers", "changed", "beyond_bfloat16", "square", "norm"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def facts(self) -> dict[str, float]:
        """Return the number of weights, the shares, and the norm of the change over that of the weights before."""
        count = max(1, self.numbers)
        return {
            "numbers": self.numbers,
            "changed": self.changed / count,
            "beyond_bfloat16": self.beyond_bfloat16 / count,
            "relative_change": (self.square / self.norm) ** 0.5 if self.norm else 0.0,
        }


@dataclass(frozen=True)
class Changes:
    """What is different between two models.

    Attributes:
        layers: By layer ('layer 3'), or by tensor outside the layers.
        skipped: Tensors that could not be compared: on one side only, of another shape, or stored in few bits.
    """

    layers: dict[str, Count] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()

    @property
    def total(self) -> Count:
        """All layers together."""
        total = Count()
        for count in self.layers.values():
            total.add(count)
        return total

    def facts(self) -> dict[str, Any]:
        """Return what weights.json has."""
        layers = {name: count.facts() for name, count in self.layers.items()}
        return self.total.facts() | {"layers": layers, "skipped": list(self.skipped)}

    def __str__(self) -> str:
        return describe(self.facts())


def describe(facts: dict[str, Any]) -> str:
    """Say in a line what `Changes.facts` says of the whole model."""
    count, why = len(facts["skipped"]), "in few bits, of another shape, or on one side only"
    left = f"; {count} tensor{'s' * (count != 1)} not compared ({why})" if count else ""
    return (
        f"{facts['changed']:.1%} of {facts['numbers']:,} weights changed, "
        f"{facts['beyond_bfloat16']:.1%} beyond bfloat16's rounding{left}"
    )


class _Stored:
    """A model's tensors in its files, with what an adapter makes of them."""

    def __init__(self, init: str, adapter: str = "") -> None:
        folder, self.adapter = find_model(init, adapter)
        self.is_transposed = read_json(folder / "config.json").get("model_type") == "gpt2"
        self.files: dict[str, Path] = {}
        for path in weight_files(folder):
            with safe_open(path, "pt") as file:
                self.files |= dict.fromkeys(file.keys(), path)
        pairs = {} if self.adapter is None else self.adapter.pairs
        saved = {} if self.adapter is None else self.adapter.saved
        self.saved = {name: tensor for name, tensor in saved.items() if name in self.files}
        named = {(name if name in self.files else f"{name}.weight"): pair for name, pair in pairs.items()}
        self.pairs = {name: pair for name, pair in named.items() if name in self.files}
        self.lost = tuple(sorted((set(named) - set(self.pairs)) | (set(saved) - set(self.saved))))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape; None if it is not of floating point."""
        with safe_open(self.files[name], "pt") as file:
            part = file.get_slice(name)
            return tuple(part.get_shape()) if part.get_dtype() in ("F64", "F32", "F16", "BF16") else None

    def is_changed(self, name: str) -> bool:
        """Whether the adapter says something of a tensor."""
        return name in self.saved or name in self.pairs

    def slices(self, name: str, rows: int) -> Iterator[torch.Tensor]:
        """Yield a tensor, some rows at a time."""
        if self.is_changed(
            name
        ):  # a low-rank change is made of whole rows and columns, DoRA's of their lengths
            yield from self._whole(name).split(rows)
            return
        with safe_open(self.files[name], "pt") as file:
            part = file.get_slice(name)
            if not part.get_shape():
                yield file.get_tensor(name)[None]
                return
            for start in range(0, part.get_shape()[0], rows):
                yield part[start : start + rows]

    def _whole(self, name: str) -> torch.Tensor:
        if name in self.saved:
            return self.saved[name]
        with safe_open(self.files[name], "pt") as file:
            weight = file.get_tensor(name)
        pair, (rows, columns) = self.pairs[name], weight.shape[-2:]
        is_square = rows == columns
        fits = (pair.b_FR.shape[0], pair.a_RD.shape[1]) == (rows, columns)
        return pair.changed(weight, transposed=self.is_transposed if is_square else not fits)


def changed_weights(before: str, after: str, *, adapter: str = "") -> Changes:
    """Count the weights in which two models differ; adapters count as merged, in float32, into their base.

    Args:
        before: Model folder, run folder, adapter or hub name that the other one began from.
        after: The other one.
        adapter: An adapter on `before`.

    Raises:
        UserError: If one of them is not there.
    """
    old, new = _Stored(before, adapter), _Stored(after)
    common = [name for name in old.files if name in new.files]
    skipped = [*old.lost, *new.lost, *sorted(set(old.files) ^ set(new.files))]
    layers: dict[str, Count] = {}
    for name in common:
        shape = old.shape(name)
        if shape is None or shape != new.shape(name):
            skipped.append(name)
            continue
        found = LAYER.search(name)
        count = layers.setdefault(f"layer {found[1]}" if found else name, Count())
        size = 1
        for length in shape[1:]:
            size *= length
        rows = max(1, SLICE // max(1, size))
        for a, b in zip(old.slices(name, rows), new.slices(name, rows), strict=True):
            count.see(a, b)
    return Changes(_in_order(layers), tuple(skipped))


def _in_order(layers: dict[str, Count]) -> dict[str, Count]:
    """Sort the layers by number, and put what is outside of them first."""

    def place(name: str) -> tuple[bool, int, str]:
        is_layer = name.startswith("layer ")
        return is_layer, int(name.removeprefix("layer ")) if is_layer else 0, name

    return {name: layers[name] for name in sorted(layers, key=place)}
