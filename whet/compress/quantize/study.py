"""Measures every way to store every matrix of a model, and tries choices of them on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from whet.compress.quantize.measure import (
    Divergence,
    Errors,
    Meter,
    SuperWeight,
    find_super_weights,
    gather_inputs,
    gather_pairs,
    matrix_errors,
    shared_inputs,
)
from whet.compress.quantize.methods import Method, gptq, pack, target
from whet.compress.quantize.select import Choice, Option, knapsack, promoted, shuffled, total
from whet.model.quant import FULL, KINDS, PackedMatrix, places
from whet.model.transformer import LanguageModel
from whet.types import MicroBatch, UserError

WIDE = "float32 absmax"
STEPS = (0.0, 0.03, 0.1, 0.2, 0.35, 0.6, 1.0)
"""Shares of the way from all NF4 to all 16 bits at which the front is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A choice, measured on held-out text.

    Attributes:
        name: How it was chosen.
        num_bytes: What its matrices take.
        divergence: From the full model.
    """

    name: str
    num_bytes: int
    divergence: Divergence


class Study:
    """All measurements of a model on calibration text, and choices tried on held-out text.

    Args:
        model: The full model; as it was, whenever no choice is applied.
        calibration: Packed sequences that everything is measured and chosen on.
        held_out: Packed sequences that choices are compared on.
        methods: Ways to find NF4 codes that are tried; rtn is among them.
        name: Name of the model, by which published super weights are known.
        advance: Called with 1 for each measurement.
        tell: Called with the name of each phase, and with what says how far it is.

    Attributes:
        errors: Errors of each matrix by kind, then by name, rounded to the nearest codes.
        options: Ways to store each matrix.
        super_weights: Weights that stay exact.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: LanguageModel,
        calibration: Sequence[MicroBatch],
        held_out: Sequence[MicroBatch],
        *,
        methods: Sequence[Method] = ("rtn", "gptq", "awq"),
        name: str = "",
        advance: Callable[[int], None] = lambda count: None,
        tell: Callable[[str, Callable[[], str]], None] = lambda phase, detail: None,
    ) -> None:
        self.model, self._places = model, places(model)
        self._advance, self._tell = advance, tell
        self._dense = {n: place.weight for n, place in self._places.items()}
        self.numbers = {n: place.shape.numel() for n, place in self._places.items()}
        self.super_weights = find_super_weights(model, calibration, name=name)
        self.spots = self._spots(self.super_weights)
        inputs = gather_inputs(model, calibration)
        advance(1)
        self.errors: dict[str, dict[str, Errors]] = {}
        for kind in KINDS:
            self.errors[kind] = matrix_errors(model, calibration, inputs, self.spots, kind)
            advance(1)

        self._packs: dict[tuple[str, str, str], list[PackedMatrix]] = {}
        self.options: dict[str, list[Option]] = {}
        meter = Meter(model, calibration)
        for n, place in self._places.items():
            rows = [Option(FULL, "", 2 * self.numbers[n], 0.0)]
            ways = [("int8", "rtn"), *(("nf4", method) for method in methods)]
            for kind, method in ways:
                packs = [
                    pack(
                        matrix,
                        kind,  # pyright: ignore[reportArgumentType]
                        method,  # pyright: ignore[reportArgumentType]
                        own,
                        spots=self.spots.get(n),
                        transposed=place.transposed,
                    )
                    for matrix, own in zip(place.matrices(), inputs[n], strict=True)
                ]
                self._packs[n, kind, method] = packs
                option = Option(kind, method, sum(part.nbytes for part in packs), 0.0)
                with self.applied({n: option}):
                    cost = meter.compare().kl
                rows.append(Option(kind, method, option.num_bytes, cost))
                advance(1)
            self.options[n] = rows
        self._own_meter, self._meter = meter, Meter(model, held_out)
        self._calibration, self._refined = calibration, dict[tuple[Option, ...], Choice]()

    @property
    def floor(self) -> int:
        """Bytes of all matrices in NF4, rounded to the nearest codes."""
        return total(self.all_nf4())

    @property
    def ceiling(self) -> int:
        """Bytes of all matrices in 16 bits."""
        return 2 * sum(self.numbers.values())

    @property
    def full(self) -> Divergence:
        """The full model's own perplexity on the held-out text."""
        return self._meter.full

    def all_nf4(self) -> Choice:
        """Return all matrices in NF4, rounded to the nearest codes."""
        return promoted(self.options, 0, ())

    def selected(self, budget: int) -> Choice:
        """Return the knapsack's choice, its codes found once more in the model that is so quantised.

        Raises:
            UserError: If the budget is below all NF4.
        """
        choice = self._cheapest(budget)
        key = tuple(choice.values())
        if key not in self._refined:
            self._refined[key] = self._refine(choice, len(self._refined))
        return self._refined[key]

    @torch.no_grad()
    def _refine(self, choice: Choice, number: int) -> Choice:
        """Find GPTQ's codes again, in the order of the layers, from the inputs that the layers before them leave.

        Each matrix was rounded as if it were the only one. In the model that is quantised whole its inputs are others,
        and it makes up for a part of that, too (`methods.target`). The matrices of experts are left as they are (other
        tokens may be routed to them, so that inputs have no counterpart), and so are transposed ones, which GPTQ does
        not round.

        Args:
            choice: What each matrix gets.
            number: Of this choice, which its codes are kept by.

        Returns:
            The choice with the new codes, or as it was if they are worse on the calibration text.
        """
        found, method = dict(choice), f"gptq, choice {number}"
        wanted = {
            n
            for n, own in choice.items()
            if own.method == "gptq" and not (self._places[n].is_experts or self._places[n].transposed)
        }
        before: dict[str, Option] = {}  # in the order in which the model runs through them
        groups, done = shared_inputs(self.model, self._calibration[0]), 0
        self._tell("codes found once more", lambda: f"{done} of {len(groups)} groups of matrices")
        for names in groups:
            group = [n for n in names if n in wanted]
            if group and before:
                pairs = gather_pairs(
                    self.model, self._calibration, group, lambda own=dict(before): self.applied(own)
                )
                for n in group:
                    dense, spots = self._dense[n], self.spots.get(n)
                    assert dense is not None
                    aim = target(dense, pairs[n].moments, pairs[n].cross, spots=spots)
                    packed = gptq(aim, "nf4", pairs[n].moments, spots=spots)
                    self._packs[n, "nf4", method] = [packed]
                    found[n] = Option("nf4", method, packed.nbytes, choice[n].cost)
            before |= {n: found[n] for n in names}
            done += 1
        kls = []
        for own in (choice, found):
            with self.applied(own):
                kls.append(self._own_meter.compare().kl)
        return found if kls[1] < kls[0] else choice

    def _cheapest(self, budget: int) -> Choice:
        """Return the knapsack's choice.

        In a mixture of experts all but the experts get 8 bits or more, as far as the budget allows: every token goes
        through them, and experts are most of the bytes (S2-65: experts can be quantised hard).

        Raises:
            UserError: If the budget is below all NF4.
        """
        has_experts = any(place.is_experts for place in self._places.values())
        if has_experts:
            apart = {
                n: [
                    row
                    for row in rows
                    if (row.kind != FULL if self._places[n].is_experts else row.kind != "nf4")
                ]
                for n, rows in self.options.items()
            }
            try:
                return knapsack(apart, budget)
            except UserError:
                pass
        return knapsack(self.options, budget)

    def baselines(self, budget: int, seeds: Sequence[int]) -> dict[str, Choice]:
        """Return choices of the same bytes: raised from NF4 at random, and where an error is largest."""
        names, errors = list(self.options), self.errors["nf4"]
        found = {f"random, seed {seed}": shuffled(names, seed) for seed in seeds}
        found["largest weight error"] = sorted(names, key=lambda n: -errors[n].weight)
        found["largest activation error"] = sorted(names, key=lambda n: -errors[n].activation)
        return {name: promoted(self.options, budget, order) for name, order in found.items()}

    def measure(self, name: str, choice: Choice) -> Point:
        """Try a choice on the held-out text."""
        with self.applied(choice):
            found = Point(name=name, num_bytes=total(choice), divergence=self._meter.compare())
        self._advance(1)
        return found

    @torch.no_grad()
    def wide_nf4(self) -> Choice:
        """Return all matrices in NF4 with a float32 absmax for each block: 4.5 bits, bitsandbytes' default."""
        found: Choice = {}
        for name, place in self._places.items():
            own = {"spots": self.spots.get(name), "transposed": place.transposed}
            packs = [PackedMatrix.of(matrix, "nf4", double=False, **own) for matrix in place.matrices()]
            self._packs[name, "nf4", WIDE] = packs
            found[name] = Option("nf4", WIDE, sum(part.nbytes for part in packs), 0.0)
        return found

    def table(self, budget: int, seeds: Sequence[int]) -> list[Point]:
        """Measure the knapsack's choice at a budget, and at all-NF4's bytes, beside all-NF4 and the baselines."""
        wide = self.wide_nf4()
        rows = [self.measure("all NF4", self.all_nf4()), self.measure("all NF4, float32 absmax", wide)]
        rows.append(self.measure("selected, at all NF4's bytes", self.selected(self.floor)))
        rows.append(self.measure("selected", self.selected(budget)))
        return rows + [self.measure(n, choice) for n, choice in self.baselines(budget, seeds).items()]

    def front(self, seed: int) -> list[Point]:
        """Measure the knapsack's choices and the baselines at budgets from all NF4 to all 16 bits.

        Codes are not found once more for each budget: that would take as long as all else.
        """
        found = []
        for share in STEPS:
            budget = int(self.floor + share * (self.ceiling - self.floor))
            found.append(self.measure("selected", self._cheapest(budget)))
            for name, choice in self.baselines(budget, (seed,)).items():
                found.append(self.measure(name.partition(",")[0], choice))
        return found

    @contextmanager
    def applied(self, choice: Mapping[str, Option]) -> Iterator[None]:
        """Store the model's matrices as chosen within this context."""
        try:
            self.apply(choice)
            yield
        finally:
            for name in choice:
                self._restore(name)

    def apply(self, choice: Mapping[str, Option]) -> None:
        """Store the model's matrices as chosen."""
        for name, option in choice.items():
            place, weight = self._places[name], self._dense[name]
            assert weight is not None
            if option.kind == FULL:
                rounded = weight.detach().to(torch.bfloat16).to(weight.dtype)
                place.set(torch.nn.Parameter(rounded, requires_grad=False))
            else:
                place.pack(self._packs[name, option.kind, option.method])

    def _restore(self, name: str) -> None:
        place = self._places[name]
        place.set(self._dense[name])

    def _spots(self, found: Sequence[SuperWeight]) -> dict[str, torch.Tensor]:
        """Return the places of super weights in their flattened matrices."""
        spots: dict[str, list[int]] = {}
        for one in found:
            spots.setdefault(one.name, []).append(one.row * self._places[one.name].shape[-1] + one.column)
        return {name: torch.tensor(sorted(rows)) for name, rows in spots.items()}


def count_steps(model: LanguageModel, num_methods: int) -> int:
    """Return how many measurements a study of a model is made of, with so many ways to find NF4 codes."""
    return 1 + len(KINDS) + len(places(model)) * (1 + num_methods)


@torch.no_grad()
def expected_seconds(
    model: LanguageModel,
    calibration: Sequence[MicroBatch],
    held_out: Sequence[MicroBatch],
    methods: Sequence[Method],
    num_points: int,
) -> float:
    """Return how long a study, its choice at two budgets, and points on held-out text will take.

    One micro-batch is compared and the matrices of one layer are rounded; the rest is extrapolated.

    Args:
        model: The full model; it is as before in the end.
        calibration: Packed sequences that everything will be measured and chosen on.
        held_out: Packed sequences that choices will be compared on.
        methods: Ways to find NF4 codes.
        num_points: Choices that will be compared on held-out text.
    """
    part = calibration[:1]
    meter, inputs = Meter(model, part), gather_inputs(model, part)
    began = time.monotonic()
    hidden = meter.hidden()
    run = time.monotonic() - began
    meter.compare(hidden)
    compare = time.monotonic() - began - run
    own_places = places(model)
    names = list(own_places)
    # A layer's matrices follow each other.
    chosen = names[len(names) // 2 : len(names) // 2 + max(1, len(names) // len(model.layers))]
    rounding = 0.0
    for n in chosen:
        for method in methods:
            began = time.monotonic()
            for matrix, own in zip(own_places[n].matrices(), inputs[n], strict=True):
                pack(matrix, "nf4", method, own, transposed=own_places[n].transposed)
            # GPTQ's are found twice more, in the model that is quantised at either budget.
            rounding += (time.monotonic() - began) * (3 if method == "gptq" else 1)
    numbers = {n: place.shape.numel() for n, place in own_places.items()}
    rounding *= sum(numbers.values()) / sum(numbers[n] for n in chosen)
    num_compares = len(names) * (1 + len(methods)) + 4
    # Inputs, errors of both kinds, super weights; and codes found once more: for each group but the first
    # both models, half of each, at both budgets.
    num_groups = len(shared_inputs(model, calibration[0])) - 1
    num_runs = 6 + 2 * num_groups * ("gptq" in methods)
    tokens = len(part[0].tokens_N)
    shares = [sum(len(micro.tokens_N) for micro in micros) / tokens for micros in (calibration, held_out)]
    on_calibration = num_compares * (run + compare) + num_runs * run
    return rounding + shares[0] * on_calibration + shares[1] * (num_points + 1) * (run + compare)
