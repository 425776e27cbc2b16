"""Several adapters merged into one, by the rules of peft's `add_weighted_adapter`, in float32."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F

from whet.model.lora.adapter import CONFIG, EXPERT_ENDS, WEIGHTS, Adapter, LoRAPair
from whet.model.lora.files import BASE, PREFIX
from whet.model.lora.several import check_same_base
from whet.storage.commit import save_tensors
from whet.types import UserError

Method = Literal["cat", "linear", "ties", "dare_linear", "dare_ties"]
METHODS: tuple[Method, ...] = get_args(Method)
PRUNING: tuple[Method, ...] = ("ties", "dare_linear", "dare_ties")
"""Methods that drop numbers, and read a density."""
PROMPTING = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
PROMPTING += ("protocol.json",)
"""Files by which an adapter is asked."""


def merge_adapters(
    adapters: Sequence[Adapter],
    weights: Sequence[float],
    *,
    method: Method = "cat",
    density: float = 1.0,
    seed: int = 0,
) -> dict[str, LoRAPair]:
    """Merge adapters of one base; a merged pair's scaling is 1.

    Args:
        adapters: The adapters.
        weights: Weight of each; negative ones take an adapter away.
        method: cat: the weighted sum of the changes, exactly, its rank the sum of the ranks. The others combine the As,
            and the Bs, which must have one rank: linear adds them; ties keeps the largest numbers of each, and of these
            the ones with the sign that prevails; dare_linear and dare_ties keep random ones instead, scaled up.
        density: Share of the numbers that are kept, above 0 to 1.
        seed: Seed of what dare keeps.

    Returns:
        The pairs by module.

    Raises:
        UserError: If the bases, or what must have one rank, differ, or an adapter is more than pairs of matrices.

    Source: 'cat' is the sum of the changes. TIES 2306.01708 and DARE 2311.03099, both as peft 0.21 has them for A and
        B: the square root of weight x scaling goes to each, signs are elected before weights are applied, and a number
        is divided by how many adapters have its sign.
    """
    check_same_base(adapters)
    for adapter in adapters:
        if adapter.saved:
            raise UserError(
                f"{adapter.folder}: {sorted(adapter.saved)[0][:80]!r} is a whole tensor, which no weighted sum of "
                "adapters holds: merge it into the base (whet export RUN --to merged --out FOLDER)"
            )
        if experts := next((name for name in adapter.pairs if name.endswith(EXPERT_ENDS)), None):
            raise UserError(
                f"{adapter.folder}: it changes experts ({experts[:80]}), which are not merged with others': "
                "merge it into the base (whet export RUN --to merged --out FOLDER)"
            )
        if dora := next((name for name, pair in adapter.pairs.items() if pair.magnitude_F is not None), None):
            raise UserError(
                f"{adapter.folder}: {dora[:80]!r} is DoRA, whose lengths do not add up: merge it into the base "
                "(whet export RUN --to merged --out FOLDER)"
            )
    generator = torch.Generator().manual_seed(seed)
    merged: dict[str, LoRAPair] = {}
    for name in sorted(set().union(*(adapter.pairs for adapter in adapters))):
        found = [(a.pairs[name], w) for a, w in zip(adapters, weights, strict=True) if name in a.pairs]
        pairs, factors = [pair for pair, _ in found], [w * pair.scaling for pair, w in found]
        if method == "cat":
            a = torch.cat([pair.a_RD * weight * pair.scaling for pair, weight in found])
            b = torch.cat([pair.b_FR for pair in pairs], dim=1)
        else:
            ranks = sorted({pair.a_RD.shape[0] for pair in pairs})
            if len(ranks) > 1:
                raise UserError(
                    f"--method {method}: {name[:80]!r} has ranks {' and '.join(map(str, ranks))}, whose matrices "
                    "cannot be added; use --method cat, which takes any"
                )
            roots = [math.sqrt(abs(factor)) for factor in factors]
            signed = [math.copysign(root, factor) for root, factor in zip(roots, factors, strict=True)]
            rule = RULES[method]
            a = rule([pair.a_RD for pair in pairs], signed, density, generator)
            b = rule([pair.b_FR for pair in pairs], roots, density, generator)
        merged[name] = LoRAPair(a, b, float(a.shape[0]), 1.0)
    return merged


Tensors = Sequence[torch.Tensor]


def linear(
    tensors: Tensors, weights: Sequence[float], density: float, generator: torch.Generator
) -> torch.Tensor:
    """Return the weighted sum; the other arguments are not read."""
    return _weighted(tensors, weights).sum(dim=0)


def ties(
    tensors: Tensors, weights: Sequence[float], density: float, generator: torch.Generator
) -> torch.Tensor:
    """Return the mean of the largest numbers that have the prevailing sign, weighted."""
    return _elected([_largest(tensor, density) for tensor in tensors], weights)


def dare_linear(
    tensors: Tensors, weights: Sequence[float], density: float, generator: torch.Generator
) -> torch.Tensor:
    """Return the weighted sum of random numbers, scaled up by how many were dropped."""
    return _weighted([_random(tensor, density, generator) for tensor in tensors], weights).sum(dim=0)


def dare_ties(
    tensors: Tensors, weights: Sequence[float], density: float, generator: torch.Generator
) -> torch.Tensor:
    """Return the mean of the random numbers that have the prevailing sign, weighted."""
    return _elected([_random(tensor, density, generator) for tensor in tensors], weights)


RULES: dict[Method, Callable[[Tensors, Sequence[float], float, torch.Generator], torch.Tensor]] = {
    "linear": linear,
    "ties": ties,
    "dare_linear": dare_linear,
    "dare_ties": dare_ties,
}


def _weighted(tensors: Tensors, weights: Sequence[float]) -> torch.Tensor:
    stacked = torch.stack(list(tensors))
    return stacked * torch.tensor(weights).view(-1, *[1] * (stacked.dim() - 1))


def _largest(tensor: torch.Tensor, density: float) -> torch.Tensor:
    """Keep the share of the numbers that are largest."""
    if density >= 1:
        return tensor
    mask = torch.zeros(tensor.numel())
    mask[tensor.abs().flatten().topk(int(density * tensor.numel())).indices] = 1
    return tensor * mask.view_as(tensor)


def _random(tensor: torch.Tensor, density: float, generator: torch.Generator) -> torch.Tensor:
    """Keep a random share of the numbers, scaled so that their expected sum stays."""
    if density >= 1:
        return tensor
    return tensor * torch.bernoulli(torch.full_like(tensor, density), generator=generator) / density


def _elected(tensors: Tensors, weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted mean of the numbers with the sign of their sum."""
    stacked = torch.stack(list(tensors))
    prevailing = torch.where(stacked.sum(dim=0) >= 0, 1, -1)
    agrees = stacked.sign() == prevailing
    total = (_weighted(tensors, weights) * agrees).sum(dim=0)
    return total / agrees.sum(dim=0).clamp(min=1.0)


def write_merged(folder: Path, pairs: dict[str, LoRAPair], adapters: Sequence[Adapter]) -> int:
    """Write merged pairs in peft's format; base, tokenizer and protocol are those of the first adapter.

    Args:
        folder: Empty folder.
        pairs: From `merge_adapters`.
        adapters: What was merged.

    Returns:
        The rank: the largest of all; smaller ones are filled up with zeros, as by peft.
    """
    first = adapters[0]
    rank = max(pair.a_RD.shape[0] for pair in pairs.values())
    tensors: dict[str, torch.Tensor] = {}
    for name, pair in pairs.items():
        surplus = rank - pair.a_RD.shape[0]
        a, b = F.pad(pair.a_RD, (0, 0, 0, surplus)), F.pad(pair.b_FR, (0, surplus))
        stem = f"{PREFIX}{name}"
        tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = a.contiguous(), b.contiguous()
    save_tensors(tensors, folder / WEIGHTS, {"format": "pt"})
    listed = {name for adapter in adapters for name in adapter.config.get("target_parameters") or ()}
    as_parameters = sorted(f"{name}.weight" for name in pairs if f"{name}.weight" in listed)
    facts: dict[str, Any] = dict(first.config) | {
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "target_modules": sorted(name for name in pairs if f"{name}.weight" not in listed),
        "target_parameters": as_parameters or None,
        "exclude_modules": None,
        "layers_to_transform": None,
        "modules_to_save": None,
        "init_lora_weights": True,
    }
    (folder / CONFIG).write_text(json.dumps(facts, indent=1) + "\n")
    if (first.folder / BASE).is_file():
        noted = json.loads((first.folder / BASE).read_text())
        if isinstance(place := noted.get("relative"), str):
            base = os.path.normpath(first.folder.resolve() / place)
            noted["relative"] = os.path.relpath(base, folder.resolve())
        (folder / BASE).write_text(json.dumps(noted, indent=1) + "\n")
    for name in PROMPTING:
        if (first.folder / name).is_file():
            shutil.copy(first.folder / name, folder / name)
    return rank
