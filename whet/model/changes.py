"""How many weights of a model differ from those it began from, exactly and as bfloat16 sees them.

Many updates of RL are smaller than half a unit in bfloat16's last place: a model stored in 16 bits then keeps few of
them. Files are read slice by slice, so that no model is in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors import safe_open

from whet.model.lora.adapter import EXPERT_ENDS, LoRAPair, rows_of
from whet.model.lora.files import find_model
from whet.model.names import stored_places
from whet.model.weights import stored_shape, weight_files

CHANGES = "weights.json"
"""What a run writes at its end: `Changes.facts`, and where it began."""
SLICE = 2**22
"""Most numbers of a tensor that are read at a time, unless a row alone has more."""
LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
WIDEST = 4096
"""Smaller side of a matrix whose directions are computed, at most: their time grows with its cube."""
NUM_OWN = 8
"""The first 1 / NUM_OWN of a matrix's directions are those it mostly acts in."""


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
        self.config = stored_shape(folder)
        self.files: dict[str, Path] = {}
        for path in weight_files(folder):
            with safe_open(path, "pt") as file:
                self.files |= dict.fromkeys(file.keys(), path)
        self.pairs: dict[str, LoRAPair] = {}
        self.saved: dict[str, torch.Tensor] = {}
        self._places = {name: stored_places(name, self.config) for name in self.files}
        own = {parameter for places in self._places.values() for parameter, _ in places}
        if self.adapter is not None:
            self.adapter.rename(self.config)
            pairs = self.adapter.pairs.items()
            self.pairs = {(name if name in own else f"{name}.weight"): pair for name, pair in pairs}
            self.saved = dict(self.adapter.saved)
        self.lost = tuple(sorted((set(self.pairs) | set(self.saved)) - own))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape; None if it is not of floating point."""
        with safe_open(self.files[name], "pt") as file:
            part = file.get_slice(name)
            return tuple(part.get_shape()) if part.get_dtype() in ("F64", "F32", "F16", "BF16") else None

    def is_changed(self, name: str) -> bool:
        """Whether the adapter says something of a tensor."""
        return any(own in self.saved or own in self.pairs for own, _ in self._places[name])

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
        with safe_open(self.files[name], "pt") as file:
            weight = file.get_tensor(name)
        places = self._places[name]
        rows = [len(weight)]
        if len(places) > 1:  # several of whet's matrices, one below the other
            rows = rows_of(self.config, [own.removesuffix(".weight") for own, _ in places])
        parts = zip(places, weight.split(rows), strict=True)
        return torch.cat([self._changed(own, part, rows) for (own, part), rows in parts])

    def _changed(self, own: str, part: tuple[int | slice, ...], weight: torch.Tensor) -> torch.Tensor:
        """Return a parameter, or the part of it that a file's tensor has, with what the adapter makes of it."""
        if own in self.saved:
            return self.saved[own][part] if part else self.saved[own]
        pair = self.pairs.get(own)
        if pair is None:
            return weight
        if part:  # rows of one expert
            number, *rest = part
            count = self.config.block.experts.count if self.config.block.experts is not None else 1
            a, b = pair.a_RD.view(count, -1, pair.a_RD.shape[1]), pair.b_FR.view(len(pair.b_FR), -1, count)
            pair = replace(
                pair, a_RD=a[number], b_FR=b[:, :, number][tuple(rest)] if rest else b[:, :, number]
            )
        rows, columns = weight.shape[-2:]
        is_turned = (pair.b_FR.shape[0], pair.a_RD.shape[1]) != (rows, columns)
        if rows == columns:
            experts = self.config.block.experts
            is_clamped = experts is not None and experts.is_clamped and own.endswith(EXPERT_ENDS)
            is_turned = self.config.family == "gpt2" or is_clamped
        return pair.changed(weight, transposed=is_turned)


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


# --- in which directions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Direction:
    """In how many and in which directions one matrix changed.

    Attributes:
        relative: Norm of the change over that of the matrix before.
        stable_rank: Sum of the squared singular values of the change over the largest.
        rank_90: Singular values that have nine tenths of that sum.
        rank_full: min(rows, columns).
        overlap: Share of the change's square within the first eighth of the directions that the matrix had, mean over
            what it reads and what it writes. A change of low rank where the matrix did little before has none.
        chance: The same of a change in random directions.
    """

    relative: float
    stable_rank: float
    rank_90: int
    rank_full: int
    overlap: float
    chance: float


def direction_of(before_AB: torch.Tensor, after_AB: torch.Tensor) -> Direction | None:
    """Measure the change of one matrix; None where nothing changed, or the matrix was 0."""
    old_AB = before_AB.double()
    change_AB = after_AB.double() - old_AB
    size, norm = float(change_AB.square().sum()), float(old_AB.norm())
    if not (size and norm):
        return None
    values = torch.linalg.svdvals(change_AB).square()
    full = min(change_AB.shape)
    own = max(1, full // NUM_OWN)
    left_AR, _, right_RB = torch.linalg.svd(old_AB, full_matrices=False)
    written = float((left_AR[:, :own].t() @ change_AB).square().sum()) / size
    read = float((change_AB @ right_RB[:own].t()).square().sum()) / size
    reached = values.cumsum(0) / values.sum()
    return Direction(
        relative=size**0.5 / norm,
        stable_rank=float(values.sum() / values[0]),
        rank_90=1 + int((reached < 0.9).sum()),
        rank_full=full,
        overlap=(written + read) / 2,
        chance=(own / change_AB.shape[0] + own / change_AB.shape[1]) / 2,
    )


def measurable(before: str, after: str) -> list[str]:
    """Return the names of the matrices that `changed_directions` measures.

    Raises:
        UserError: If a model is not there.
    """
    return list(_measurable(_Stored(before), _Stored(after)))


def changed_directions(
    before: str, after: str, advance: Callable[[int], None] = lambda count: None
) -> dict[str, dict[str, Direction]]:
    """Measure the change of each matrix of the layers of two models; adapters count as merged.

    Args:
        before: Model folder, run folder, adapter or hub name that the other one began from.
        after: The other one.
        advance: Called with 1 after each matrix.

    Returns:
        By layer ('layer 3') and by the matrix's name there ('mlp.down_proj'). What did not change is left out, and what
        is wider than `WIDEST`, of another shape, or no matrix.

    Raises:
        UserError: If one of them is not there.
    """
    old, new = _Stored(before), _Stored(after)
    found: dict[str, dict[str, Direction]] = {}
    for name, rows in _measurable(old, new).items():
        (a,), (b,) = old.slices(name, rows), new.slices(name, rows)
        direction = direction_of(a, b)
        advance(1)
        if direction is not None and (layer := LAYER.search(name)):
            short = name[layer.end() :].removesuffix(".weight")
            found.setdefault(f"layer {layer[1]}", {})[short] = direction
    return {name: found[name] for name in sorted(found, key=lambda name: int(name.split()[1]))}


def _measurable(old: _Stored, new: _Stored) -> dict[str, int]:
    """Return names and numbers of rows."""
    found = {}
    for name in old.files:
        if not (LAYER.search(name) and name.endswith(".weight") and name in new.files):
            continue
        shape = old.shape(name)
        if shape is not None and shape == new.shape(name) and len(shape) == 2 and min(shape) <= WIDEST:
            found[name] = shape[0]
    return found


def summarise_directions(found: Mapping[str, Mapping[str, Direction]]) -> str:
    """Say in half a line what `changed_directions` found; '' where no matrix changed."""
    own = [one for matrices in found.values() for one in matrices.values()]
    if not own:
        return ""
    ranks, full = median(one.rank_90 for one in own), median(one.rank_full for one in own)
    beyond = median(one.overlap / one.chance for one in own)
    return (
        f"; nine tenths of the change in {ranks:g} of {full:g} directions (median of {len(own)} matrices), in the "
        f"matrix's own main ones {beyond:.2g} times as much as a random change"
    )
