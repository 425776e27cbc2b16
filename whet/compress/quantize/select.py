"""Which kind each layer gets under a budget of bytes: a knapsack, and the baselines that it is compared with."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whet.types import UserError

UNITS = 4096
"""Steps that a budget is divided into: rounding bytes up to them loses at most a 4096th for each layer."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store a matrix.

    Attributes:
        kind: nf4, int8 or bf16.
        method: How its codes are found; '' for bf16.
        num_bytes: What it takes.
        cost: What it does to the model: the KL divergence with this matrix alone quantised.
        is_estimated: Whether the cost was not measured, but is that of NF4 rounded to the nearest, times the ratio of
            the squared errors of the matrix's outputs.
    """

    kind: str
    method: str
    num_bytes: int
    cost: float
    is_estimated: bool = False


Options = Mapping[str, Sequence[Option]]
Choice = dict[str, Option]


def parse_budget(text: str, numbers: int, whole: int, fixed: int) -> int:
    """Return the bytes that matrices may take.

    Args:
        text: As in 350MB, 1.2GiB or 350000 (bytes of all weights), 30% (of the model in 16 bits), 4.5bits (a weight).
        numbers: Weights of the matrices that can be quantised.
        whole: Bytes of the model in 16 bits.
        fixed: Bytes of all that is never quantised.

    Raises:
        UserError: If it is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(bits?|%|[KMG]i?B|B)?", text.strip())
    if found is None:
        raise UserError(
            f"budget = {text!r}: expected bytes (350MB, 1.2GiB), a share (30%) or bits a weight (4.5bits)"
        )
    value, unit = float(found[1]), found[2] or "B"
    if unit.startswith("bit"):
        return int(value * numbers / 8)
    if unit == "%":
        return int(value / 100 * whole) - fixed
    factor = {"K": 1, "M": 2, "G": 3}.get(unit[0], 0)
    return int(value * (1024 if "i" in unit else 1000) ** factor) - fixed


def check_floor(budget: int, floor: int) -> None:
    """Refuse a budget below the smallest choice.

    Raises:
        UserError: If it is.
    """
    if floor > budget:
        raise UserError(
            f"budget: the matrices may take {budget:,} bytes, but take {floor:,} even in 4 bits; give a larger budget"
        )


def knapsack(options: Options, budget: int) -> Choice:
    """Return the choice of least added cost within a budget, by dynamic programming over its `UNITS`th parts.

    Raises:
        UserError: If the smallest choice is above the budget.
    """
    least = {name: min(rows, key=lambda row: (row.num_bytes, row.cost)) for name, rows in options.items()}
    floor = sum(row.num_bytes for row in least.values())
    check_floor(budget, floor)
    # Above the floor, so that where nothing is left no rounding stands in the way of the smallest choice.
    unit = max(1.0, (budget - floor) / UNITS)
    most = int((budget - floor) / unit)
    best = np.zeros(most + 1)
    picks: list[np.ndarray] = []
    for name, rows in options.items():
        totals = np.full((len(rows), most + 1), np.inf)
        for index, row in enumerate(rows):
            weight = int(np.ceil((row.num_bytes - least[name].num_bytes) / unit))
            if weight <= most:
                totals[index, weight:] = best[: most + 1 - weight] + row.cost
        picks.append(totals.argmin(0))
        best = totals.min(0)
    found: Choice = {}
    left = most
    for (name, rows), pick in zip(reversed(list(options.items())), reversed(picks), strict=True):
        row = rows[pick[left]]
        found[name] = row
        left -= int(np.ceil((row.num_bytes - least[name].num_bytes) / unit))
    # What rounding bytes up left over, by the largest gain first.
    spare = budget - total(found)
    better = [
        (found[name].cost - row.cost, name, row)
        for name, rows in options.items()
        for row in rows
        if row.cost < found[name].cost
    ]
    for gain, name, row in sorted(better, key=lambda item: -item[0]):
        more = row.num_bytes - found[name].num_bytes
        if more <= spare and row.cost < found[name].cost and gain > 0:
            found[name], spare = row, spare - more
    return {name: found[name] for name in options}


def promoted(options: Options, budget: int, order: Sequence[str]) -> Choice:
    """Return all matrices in rounded NF4, but the first ones of an order that fit the budget in int8 or 16 bits.

    Each is raised to 16 bits if that fits, else to int8.
    """
    plain = {name: _of(rows, "nf4") for name, rows in options.items()}
    spent = sum(row.num_bytes for row in plain.values())
    for name in order:
        for kind in ("bf16", "int8"):
            row = _of(options[name], kind)
            more = row.num_bytes - plain[name].num_bytes
            if spent + more <= budget:
                plain[name], spent = row, spent + more
                break
    return plain


def _of(rows: Sequence[Option], kind: str) -> Option:
    """Return the option of a kind that is rounded to the nearest codes."""
    return next(row for row in rows if row.kind == kind and row.method in ("rtn", ""))


def shuffled(names: Sequence[str], seed: int) -> list[str]:
    """Return names in a random order."""
    found = list(names)
    random.Random(seed).shuffle(found)
    return found


def total(choice: Mapping[str, Option]) -> int:
    """Return the bytes of a choice."""
    return sum(row.num_bytes for row in choice.values())
