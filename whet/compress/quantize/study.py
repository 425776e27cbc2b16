"""Measures every way to store every matrix of a model, and tries choices of them on it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from whet.compress.quantize.measure import (
    Divergence,
    Errors,
    Meter,
    Pairs,
    SuperWeight,
    find_super_weights,
    gather_inputs,
    matrix_errors,
    shared_inputs,
)
from whet.compress.quantize.methods import Inputs, Method, gptq, pack, squared_outputs, target
from whet.compress.quantize.select import Choice, Option, knapsack, promoted, shuffled, total
from whet.editing.targets import can_resume
from whet.model.quant import FULL, KINDS, Kind, PackedMatrix, places
from whet.model.transformer import LanguageModel
from whet.types import MicroBatch, UserError

WIDE = "float32 absmax"
STEPS = (0.0, 0.03, 0.1, 0.2, 0.35, 0.6, 1.0)
"""Shares of the way from all NF4 to all 16 bits at which the front is measured."""
FEWER_STEPS = (0.0, 0.06, 0.2, 0.5)
"""Those of a model that is too large to measure all."""
WORK = 1.5e13
"""Multiply-adds that passes may take by default: some ten minutes on two CPU cores; rounding comes on top."""
MATRICES = "matrix by matrix"
"""Phase in which the steps begin that a study tells of."""
TRIED = 3
"""Super weights that are tried, as the time told before has it."""
LEAST_TOKENS = 512
"""Of the text that KLs are measured on, whatever the work."""


class Amount(NamedTuple):
    """How much text there is.

    Attributes:
        tokens: All tokens.
        trained: Those whose predictions are compared.
    """

    tokens: float
    trained: float

    @classmethod
    def of(cls, micros: Sequence[MicroBatch]) -> Amount:
        """Count packed sequences."""
        return cls(sum(len(micro.tokens_N) for micro in micros), sum(len(m.targets_M) for m in micros))

    def cut(self, most: float) -> Amount:
        """Return what is left of it if it has at most so many tokens."""
        share = min(1.0, most / max(1, self.tokens))
        return Amount(self.tokens * share, self.trained * share)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """How much of a model is measured, and on how much text, within some work.

    Attributes:
        is_exhaustive: Whether the KL of every way to store each matrix is measured, on all calibration text. Else that
            of NF4 rounded to the nearest is, and those of the other ways are estimated from it.
        calibration: Tokens, at most, that inputs are gathered and codes found on.
        sample: Tokens of them, at most, that KLs are measured on.
        held_out: Tokens, at most, that choices are compared on.
        steps: Steps of the front.
    """

    is_exhaustive: bool = True
    calibration: float = math.inf
    sample: float = math.inf
    held_out: float = math.inf
    steps: tuple[float, ...] = STEPS

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        calibration: Amount,
        held_out: Amount,
        num_methods: int,
        num_seeds: int,
        work: float,
    ) -> Scope:
        """Return how much of a study fits into some work.

        Args:
            model: The model.
            calibration: Text that there is to measure and choose on.
            held_out: Text that there is to compare choices on.
            num_methods: Ways to find NF4 codes.
            num_seeds: Random choices.
            work: Multiply-adds that passes may take.
        """
        own = places(model)
        weights, head = sum(place.shape.numel() for place in own.values()), model.head_weight.numel()
        heads = [head * text.trained / max(1, text.tokens) for text in (calibration, held_out)]
        compare = [weights + per_token for per_token in heads]
        whole = len(own) * (1 + num_methods) * compare[0] * calibration.tokens
        whole += num_points(STEPS, num_seeds) * compare[1] * held_out.tokens
        if whole <= work:
            return cls()
        # One way of each matrix, from its layer on, which is half of a pass; inputs, and codes found once more, which
        # take about as long as 9 passes.
        tokens = (
            0.25 * work / (9 * weights),
            0.55 * work / (len(own) * (weights / 2 + heads[0])),
            0.2 * work / (num_points(FEWER_STEPS, num_seeds) * compare[1]),
        )
        least = [max(LEAST_TOKENS, count) for count in tokens]
        return cls(
            is_exhaustive=False,
            calibration=least[0],
            sample=least[1],
            held_out=least[2],
            steps=FEWER_STEPS,
        )


def num_points(steps: Sequence[float], num_seeds: int) -> int:
    """Return how many choices are compared on held-out text: those of the table, and those of the front that differ.

    On the front all NF4 is measured already, and in 16 bits all choices are the same.
    """
    return 6 + num_seeds + sum(1 if share in (0.0, 1.0) else 4 for share in steps)


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
        calibration: Packed sequences that inputs are gathered and codes found on.
        held_out: Packed sequences that choices are compared on.
        sample: A part of the calibration text, of a large model: KLs are measured on it, that of NF4 rounded to the
            nearest for each matrix, from which those of other ways are estimated (`Option.is_estimated`). None: on all
            calibration text, for all ways.
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
        sample: Sequence[MicroBatch] | None = None,
        methods: Sequence[Method] = ("rtn", "gptq", "awq"),
        name: str = "",
        advance: Callable[[int], None] = lambda count: None,
        tell: Callable[..., None] = lambda phase, detail=None: None,
    ) -> None:
        self.model, self._places = model, places(model)
        self._advance, self._tell = advance, tell
        self._dense = {n: place.weight for n, place in self._places.items()}
        self.numbers = {n: place.shape.numel() for n, place in self._places.items()}
        self._layer_of = {module: n for n, layer in enumerate(model.layers) for module in layer.modules()}
        self.is_exhaustive, sample = sample is None, sample or calibration
        tell("super weights")
        self.super_weights = find_super_weights(model, sample, name=name)
        self.spots = self._spots(self.super_weights)
        read = 0
        tell("inputs of the matrices", lambda: f"{read} of {len(calibration)} passes")

        def count(more: int) -> None:
            nonlocal read
            read += more

        inputs = gather_inputs(model, calibration, count)
        self.errors: dict[str, dict[str, Errors]] = {}
        for kind in KINDS:
            tell(f"errors of the matrices in {kind}")
            self.errors[kind] = matrix_errors(model, sample, inputs, self.spots, kind)

        self._packs: dict[tuple[str, str, str], list[PackedMatrix]] = {}
        self.options: dict[str, list[Option]] = {}
        self._meter = Meter(model, held_out)
        self._own_meter = Meter(model, sample, resumes=True)
        others: list[tuple[Kind, Method]] = [("nf4", method) for method in methods if method != "rtn"]
        ways: list[tuple[Kind, Method]] = [("nf4", "rtn"), ("int8", "rtn"), *others]
        now = "", "", ""
        tell(MATRICES, lambda: f"{len(self.options)} of {len(self._places)} done; {' '.join(now)}")
        for n in self._places:
            found: dict[tuple[Kind, Method], Option] = {}
            measured: tuple[float, float] | None = None
            for kind, method in ways:
                now = n, kind, method
                packs = self._packs[n, kind, method] = self._rounded(n, kind, method, inputs[n])
                option = Option(kind, method, sum(part.nbytes for part in packs), 0.0)
                error = self._squared_error(n, packs, inputs[n])
                if measured is None or self.is_exhaustive:
                    with self.applied({n: option}):
                        cost = self._own_meter.compare(self._layer_of[self._places[n].owner]).kl
                    measured = measured or (cost, error)
                    found[kind, method] = replace(option, cost=cost)
                else:
                    cost = measured[0] * error / max(measured[1], 1e-30)
                    found[kind, method] = replace(option, cost=cost, is_estimated=True)
                advance(1)
            in_nf4 = [option for way, option in found.items() if way[0] == "nf4"]
            self.options[n] = [Option(FULL, "", 2 * self.numbers[n], 0.0), found["int8", "rtn"], *in_nf4]
        self._calibration, self._refined = calibration, dict[tuple[Option, ...], Choice]()
        self._groups = shared_inputs(model, calibration[0])
        self._measured: dict[tuple[Option, ...], Divergence] = {}

    def _rounded(self, name: str, kind: Kind, method: Method, inputs: Sequence[Inputs]) -> list[PackedMatrix]:
        """Return a matrix, or those of its experts, in few bits."""
        place = self._places[name]
        options = {"spots": self.spots.get(name), "transposed": place.transposed}
        return [
            pack(matrix, kind, method, own, **options)
            for matrix, own in zip(place.matrices(), inputs, strict=True)
        ]

    def _squared_error(self, name: str, packs: Sequence[PackedMatrix], inputs: Sequence[Inputs]) -> float:
        """Return the squared error of a matrix's outputs, summed over tokens."""
        place, total = self._places[name], 0.0
        for matrix, packed, own in zip(place.matrices(), packs, inputs, strict=True):
            delta = packed.dense(torch.float32) - matrix.float()
            total += own.tokens * squared_outputs(delta.t() if place.transposed else delta, own.moments)
        return total

    @property
    def num_compared(self) -> tuple[int, int]:
        """Tokens whose predictions are compared: on calibration text, and on held-out text."""
        return self._own_meter.num_tokens, self._meter.num_tokens

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
        not round. Of a model that is too large to measure all, that is done for one choice; others take its codes.

        Args:
            choice: What each matrix gets.
            number: Of this choice, which its codes are kept by.

        Returns:
            The choice with the new codes, or as it was if they are worse on the calibration text.
        """
        wanted = {
            n
            for n, own in choice.items()
            if own.method == "gptq" and not (self._places[n].is_experts or self._places[n].transposed)
        }
        if number and not self.is_exhaustive:
            method = "gptq, choice 0"
            again = {n: (n, "nf4", method) for n in wanted if (n, "nf4", method) in self._packs}
            found = choice | {n: replace(choice[n], method=method) for n in again}
            self._advance(len(self._groups))
        else:
            found = self._found_again(choice, wanted, f"gptq, choice {number}")
        kls = []
        for own in (choice, found):
            with self.applied(own):
                kls.append(self._own_meter.compare().kl)
        return found if kls[1] < kls[0] else choice

    def _found_again(self, choice: Choice, wanted: set[str], method: str) -> Choice:
        """Return a choice with new codes of some matrices."""
        found = dict(choice)
        before: dict[str, Option] = {}  # in the order in which the model runs through them
        done, pairs = 0, Pairs(self.model, self._calibration)
        self._tell("codes found once more", lambda: f"{done} of {len(self._groups)} groups of matrices")
        for names in self._groups:
            group = [n for n in names if n in wanted]
            if group and before:
                layer = self._layer_of[self._places[group[0]].owner]
                pair = pairs.gather(group, layer, lambda own=dict(before): self.applied(own))
                for n in group:
                    dense, spots = self._dense[n], self.spots.get(n)
                    assert dense is not None
                    aim = target(dense, pair[n].moments, pair[n].cross, spots=spots)
                    packed = gptq(aim, "nf4", pair[n].moments, spots=spots)
                    self._packs[n, "nf4", method] = [packed]
                    found[n] = replace(choice[n], method=method, num_bytes=packed.nbytes)
            before |= {n: found[n] for n in names}
            done += 1
            self._advance(1)
        return found

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
        key = tuple(choice.values())
        if key not in self._measured:
            with self.applied(choice):
                self._measured[key] = self._meter.compare()
            self._advance(1)
        return Point(name=name, num_bytes=total(choice), divergence=self._measured[key])

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

    def front(self, seed: int, steps: Sequence[float] = STEPS) -> list[Point]:
        """Measure the knapsack's choices and the baselines at budgets from all NF4 to all 16 bits.

        Codes are not found once more for each budget: that would take as long as all else.
        """
        found = []
        for share in steps:
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


def count_steps(
    model: LanguageModel, micro: MicroBatch, num_methods: int, scope: Scope, num_seeds: int
) -> int:
    """Return how many steps a study of a model tells of: measurements, roundings, and groups of codes found once more.

    Args:
        model: The model.
        micro: Packed sequences.
        num_methods: Ways to find NF4 codes.
        scope: How much is measured.
        num_seeds: Random choices.
    """
    num_matrices, num_groups = len(places(model)), len(shared_inputs(model, micro))
    own = num_matrices * (1 + num_methods) + 2 * num_groups
    return own + num_points(scope.steps, num_seeds)


@torch.no_grad()
def expected_seconds(
    model: LanguageModel,
    part: Sequence[MicroBatch],
    calibration: Amount,
    held_out: Amount,
    methods: Sequence[Method],
    scope: Scope,
    num_compared: int,
) -> float:
    """Return how long a study, its choice at two budgets, and points on held-out text will take.

    Some text is compared and the matrices of one layer are rounded; the rest is extrapolated.

    Args:
        model: The full model; it is as before in the end.
        part: Packed sequences that are run.
        calibration: Text that everything will be measured and chosen on.
        held_out: Text that choices will be compared on.
        methods: Ways to find NF4 codes.
        scope: How much is measured.
        num_compared: Choices that will be compared on held-out text.
    """
    own, size = places(model), Amount.of(part)
    meter = Meter(model, part)  # the first pass is slower
    began = time.monotonic()
    hidden = meter.hidden()
    run = (time.monotonic() - began) / size.tokens
    began = time.monotonic()
    meter.compare_hidden(hidden)
    head = (time.monotonic() - began) / size.trained
    began = time.monotonic()
    inputs = gather_inputs(model, part)
    gather = (time.monotonic() - began) / size.tokens

    rounding, dequantising = 0.0, 0.0
    numbers = {n: place.shape.numel() for n, place in own.items()}
    inside = set(model.layers[len(model.layers) // 2].modules())
    chosen = [n for n, place in own.items() if place.owner in inside]
    # Codes of GPTQ are found once more for the choice at either budget, of a large model for one of them.
    again = 2 if scope.is_exhaustive else 1
    for n in chosen:
        for method in methods:
            began = time.monotonic()
            for matrix, x in zip(own[n].matrices(), inputs[n], strict=True):
                packed = pack(matrix, "nf4", method, x, transposed=own[n].transposed)
                if method == "rtn":
                    dense = time.monotonic()
                    packed.dense(torch.float32)
                    dequantising += time.monotonic() - dense
            rounding += (time.monotonic() - began) * (1 + again if method == "gptq" else 1)
    parts = sum(numbers.values()) / sum(numbers[n] for n in chosen)
    rounding, dequantising = rounding * parts, dequantising * parts

    text, compared = calibration.cut(scope.calibration), held_out.cut(scope.held_out)
    sample = text.cut(scope.sample)
    num_layers, num_ways, resumes = len(model.layers), 1 + len(methods), can_resume(model)
    own_share = (num_layers + 1) / (2 * num_layers) if resumes else 1.0  # of a pass, from a matrix's layer on
    # Of each matrix the KL; the errors of both kinds, with two more products; super weights, as if a few were tried.
    num_kls = len(own) * (num_ways if scope.is_exhaustive else 1)
    on_sample = num_kls * (own_share * run * sample.tokens + head * sample.trained)
    on_sample += (2 * 3 + 2 + 2 * TRIED) * run * sample.tokens + (1 + TRIED) * head * sample.trained
    # The inputs; and codes found once more: of the four inputs of a layer both models' passes up to them.
    pairs = 4.4 * run + 2 * (gather - run) if resumes else len(shared_inputs(model, part[0])) * run
    on_text = (gather + (again * pairs if "gptq" in methods else 0.0)) * text.tokens
    points = num_compared * (run * compared.tokens + head * compared.trained + dequantising)
    return rounding + on_sample + on_text + points
