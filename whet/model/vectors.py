"""Task vectors: what training added to a model's weights, scaled, added, taken away and merged.

Source: 2212.04089 (task arithmetic), 2306.01708 (TIES), 2311.03099 (DARE).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from whet.model.config import MAX_LAYERS
from whet.model.lora.merge import RULES, Method
from whet.types import UserError

LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_SCALE = re.compile(r"(\d+|outside)(?:-(\d+))?=(-?(?:\d+\.?\d*|\.\d+))")


def combine(
    base: Mapping[str, torch.Tensor],
    tuned: Sequence[Mapping[str, torch.Tensor]],
    weights: Sequence[float],
    *,
    method: Method = "linear",
    density: float = 1.0,
    seed: int = 0,
    scales: Mapping[int | None, float] | None = None,
) -> dict[str, torch.Tensor]:
    """Return base + scale x (the merged differences of tuned models from it).

    Args:
        base: The weights that all were trained from.
        tuned: Their weights after training.
        weights: Weight of each difference; a negative one takes away what that training taught.
        method: linear (or cat): their weighted sum. ties: of the largest numbers of each those with the prevailing
            sign, averaged. dare_linear, dare_ties: random numbers, scaled up.
        density: Share of the numbers of each that are kept.
        seed: Seed of what dare keeps.
        scales: Factor by layer; None for what is outside of the layers; 1 where it is not named.

    Raises:
        UserError: If names or shapes of the weights differ, or a factor is for a layer that is not there.
    """
    layers = {int(found[1]) for name in base if (found := LAYER.search(name))}
    if unknown := sorted(layer for layer in scales or {} if layer is not None and layer not in layers):
        there = f"layers 0 to {max(layers)}" if layers else "no layers"
        raise UserError(f"layer_scales: the model has {there}, got {unknown[0]}")
    for number, weights_of in enumerate(tuned, 1):
        unlike = [n for n, t in base.items() if n not in weights_of or weights_of[n].shape != t.shape]
        if unlike or len(weights_of) != len(base):
            name = (unlike or sorted(set(weights_of) - set(base)))[0]
            raise UserError(f"model {number} differs from the base in {name}: expected models of one shape")
    rule, generator = RULES["linear" if method == "cat" else method], torch.Generator().manual_seed(seed)
    found = {}
    for name, before in base.items():
        if not before.is_floating_point():
            found[name] = before
            continue
        differences = [(own[name] - before).float() for own in tuned]
        merged = rule(differences, list(weights), density, generator)
        layer = LAYER.search(name)
        scale = (scales or {}).get(int(layer[1]) if layer else None, 1.0)
        found[name] = (before.float() + scale * merged).to(before.dtype)
    return found


def parse_scales(texts: Sequence[str]) -> dict[int | None, float]:
    """Read factors by layer, such as 0-5=1 6-11=0.5 outside=0.

    Raises:
        ValueError: If one is malformed.
    """
    found: dict[int | None, float] = {}
    for text in texts:
        match = _SCALE.fullmatch(text)
        if match is None or (match[1] == "outside" and match[2]):
            raise ValueError(f"layer_scales: got {text!r}, expected such as 0-5=0.5, 7=2 or outside=0")
        if match[1] == "outside":
            found[None] = float(match[3])
            continue
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < MAX_LAYERS:
            raise ValueError(f"layer_scales: got {text!r}, expected ascending layers below {MAX_LAYERS:,}")
        found |= dict.fromkeys(range(first, last + 1), float(match[3]))
    return found
