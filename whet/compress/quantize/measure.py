"""What quantisation does to a model: errors of each matrix, divergence of what it predicts, and its super weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from whet.compress.quantize.methods import Inputs, activation_error
from whet.editing.sites import hooked
from whet.editing.targets import can_resume, resumed
from whet.generate.scoring import hidden_rows
from whet.model.experts import ExpertWeights
from whet.model.quant import Kind, PackedMatrix, Place, places
from whet.model.transformer import LanguageModel
from whet.types import MicroBatch

CHUNK = 2**24
"""Logits that are compared at once."""
KEPT = 2**26
"""Log-probabilities of the full model that are kept, at most; where there are more, they are computed each time."""

# --- what a model predicts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a model's predictions are from the full model's, on the same tokens.

    Attributes:
        kl: Mean of KL(full || quantised) over tokens, in nats.
        worst_kl: The largest over tokens.
        top1: Share of tokens whose most probable one is the same.
        perplexity: Of the tokens.
    """

    kl: float
    worst_kl: float
    top1: float
    perplexity: float


class _SeenEnoughError(Exception):
    """What was waited for has been seen: the rest of the pass would say nothing more."""

    def __init__(self, input_ND: torch.Tensor) -> None:
        super().__init__()
        self.input_ND = input_ND


class Meter:
    """Compares a model that is changed in place with what it predicted at first.

    Args:
        model: The full model.
        micros: Packed sequences; their trained tokens are compared.
        resumes: Keep what each layer is given, so that a comparison may begin at any.
    """

    def __init__(self, model: LanguageModel, micros: Sequence[MicroBatch], *, resumes: bool = False) -> None:
        self._model, self._micros = model, micros
        self._given: list[list[torch.Tensor]] = []
        resumes = resumes and can_resume(model)
        with given_to_layers(model, self._given) if resumes else nullcontext():
            # The head is never quantised: the hidden states before it are all that has to be kept.
            self._full = self.hidden()
        self._logprobs_before: list[list[torch.Tensor]] = [[] for _ in micros]
        self.full = self.compare_hidden(self._full)

    @property
    def num_tokens(self) -> int:
        """Tokens that are compared."""
        return sum(len(full) for full in self._full)

    @torch.no_grad()
    def hidden(self, layer: int = 0) -> list[torch.Tensor]:
        """Return the hidden states [M, D] of each micro-batch.

        Args:
            layer: The first layer that was changed: passes begin there, where what layers are given was kept.
        """
        found = []
        for place, micro in enumerate(self._micros):
            given = self._given[place][layer] if layer and self._given else None
            with resumed(self._model, layer, given):
                found.append(hidden_rows(self._model, micro))
        return found

    def compare(self, layer: int = 0) -> Divergence:
        """Compare the model as it is now.

        Args:
            layer: The first layer that was changed.
        """
        return self.compare_hidden(self.hidden(layer))

    @torch.no_grad()
    def compare_hidden(self, hidden: Sequence[torch.Tensor]) -> Divergence:
        """Compare what `hidden` returned."""
        kls, same, losses = [], [], []
        vocabulary = self._model.config.vocab_size
        keeps = vocabulary * self.num_tokens <= KEPT
        for place, (micro, full, own) in enumerate(zip(self._micros, self._full, hidden, strict=True)):
            parts = (tensor.split(max(1, CHUNK // vocabulary)) for tensor in (full, own, micro.targets_M))
            for part, (before_MD, after_MD, targets_M) in enumerate(zip(*parts, strict=True)):
                kept = self._logprobs_before[place]
                before_MV = kept[part] if part < len(kept) else self._logprobs(before_MD)
                if keeps and part == len(kept):
                    kept.append(before_MV)
                after_MV = self._logprobs(after_MD)
                # Columns outside of the vocabulary are -inf in both.
                gap_MV = torch.where(before_MV == float("-inf"), 0.0, before_MV - after_MV)
                kls.append((before_MV.exp() * gap_MV).sum(-1))
                same.append(before_MV.argmax(-1) == after_MV.argmax(-1))
                losses.append(-after_MV.gather(1, targets_M[:, None])[:, 0])
        kl, loss = torch.cat(kls).clamp(min=0), torch.cat(losses)
        return Divergence(
            kl=float(kl.mean()),
            worst_kl=float(kl.max()),
            top1=float(torch.cat(same).double().mean()),
            perplexity=math.exp(min(700.0, float(loss.double().mean()))),
        )

    def _logprobs(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        logits_MV = F.linear(hidden_MD.float(), self._model.head_weight.float())
        if cap := self._model.config.block.logit_cap:
            logits_MV = torch.tanh(logits_MV / cap) * cap
        logits_MV[:, self._model.num_valid_tokens :] = float("-inf")
        return logits_MV.log_softmax(-1)


@contextmanager
def given_to_layers(model: LanguageModel, given: list[list[torch.Tensor]]) -> Iterator[None]:
    """Add, for each pass within this context, what every layer is given."""

    def keep(layer: int, x_ND: torch.Tensor) -> None:
        if not layer:
            given.append([])
        given[-1].append(x_ND.detach())

    with hooked([(layer, "in", partial(keep, index)) for index, layer in enumerate(model.layers)]):
        yield


# --- errors of each matrix --------------------------------------------------------------------------------------

See = Callable[[str, int, torch.Tensor], None]
"""Called with a matrix's name, the number of the expert (0 for others), and what it multiplies."""


@contextmanager
def observed(model: nn.Module, see: See) -> Iterator[None]:
    """Show the input of each matrix within this context."""
    handles, experts = [], {}
    for name, place in places(model).items():
        if place.is_experts:
            experts[place.owner] = name.rpartition(".")[0]
        else:
            handles.append(place.owner.register_forward_pre_hook(partial(_before, see, name)))
    for owner, prefix in experts.items():
        _spy(cast(ExpertWeights, owner), prefix, see)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for owner in experts:
            del owner.__dict__["product"]


def _before(see: See, name: str, _: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
    see(name, 0, arguments[0].detach())


def _after(
    note: Callable[[str, torch.Tensor, torch.Tensor], None],
    name: str,
    _: nn.Module,
    arguments: tuple[torch.Tensor, ...],
    out: torch.Tensor,
) -> None:
    note(name, arguments[0], out)


def _spy(owner: ExpertWeights, prefix: str, see: See) -> None:
    real = owner.product

    def product(name: str, expert: int, x_ND: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        see(f"{prefix}.{name}", expert, x_ND.detach())
        return real(name, expert, x_ND, bias)

    owner.product = product  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(slots=True)
class _Seen:
    """Sums over what one matrix multiplies."""

    moments: torch.Tensor
    magnitudes: torch.Tensor
    tokens: int = 0


@torch.no_grad()
def gather_inputs(
    model: LanguageModel, micros: Sequence[MicroBatch], advance: Callable[[int], None] | None = None
) -> dict[str, list[Inputs]]:
    """Run the model over packed sequences and return what each matrix multiplies, for each expert of its own.

    Args:
        model: The full model.
        micros: Packed sequences.
        advance: Called with 1 for each of them.
    """
    seen: dict[str, list[_Seen]] = {}
    for name, place in places(model).items():
        count = place.shape[0] if place.is_experts else 1
        width = place.shape[-2] if place.transposed else place.shape[-1]
        zeros = torch.zeros(width, device=place.matrices()[0].device)
        seen[name] = [_Seen(torch.outer(zeros, zeros), zeros.clone()) for _ in range(count)]

    last: list[
        torch.Tensor
    ] = []  # an input and its moments: matrices that multiply one input follow each other

    def see(name: str, expert: int, x_ND: torch.Tensor) -> None:
        own, x = seen[name][expert], x_ND.float()
        if not last or last[0].data_ptr() != x_ND.data_ptr() or last[0].shape != x_ND.shape:
            last[:] = x_ND, x.t() @ x
        own.moments += last[1]
        own.magnitudes += x.abs().sum(0)
        own.tokens += len(x)

    with observed(model, see):
        for micro in micros:
            hidden_rows(model, micro)
            if advance is not None:
                advance(1)
    return {
        name: [
            Inputs(one.moments / max(1, one.tokens), one.magnitudes / max(1, one.tokens), one.tokens)
            for one in rows
        ]
        for name, rows in seen.items()
    }


def shared_inputs(model: LanguageModel, micro: MicroBatch) -> list[list[str]]:
    """Return the names of the matrices in the order in which a pass runs through them; those that multiply the same
    input are together."""
    found: list[list[str]] = []
    last: torch.Tensor | None = None

    def see(name: str, expert: int, x_ND: torch.Tensor) -> None:
        nonlocal last
        if any(name in names for names in found):
            return  # another expert
        if last is None or x_ND.data_ptr() != last.data_ptr() or x_ND.shape != last.shape:
            found.append([])
        found[-1].append(name)
        last = x_ND  # kept, so that no other tensor gets its place in memory

    with torch.no_grad(), observed(model, see):
        hidden_rows(model, micro)
    return found


@dataclass(slots=True)
class Pair:
    """Sums over tokens of what one matrix multiplies, X in the full model and Y in a changed one.

    Attributes:
        moments: Y^T Y / tokens, float32 [D, D].
        cross: X^T Y / tokens, float32 [D, D].
    """

    moments: torch.Tensor
    cross: torch.Tensor


class Pairs:
    """Runs a model, and the model with matrices changed one after the other, side by side over packed sequences.

    Both passes begin at the layer of the matrices that are asked for, where the model allows it: what its layers are
    given is carried along.

    Args:
        model: The full model.
        micros: Packed sequences.
    """

    def __init__(self, model: LanguageModel, micros: Sequence[MicroBatch]) -> None:
        self._model, self._micros, self._layer = model, micros, 0
        self._can_resume = can_resume(model)
        self._given: list[list[torch.Tensor | None]] = [[None, None] for _ in micros]  # full, changed

    @torch.no_grad()
    def gather(
        self, names: Sequence[str], layer: int, changed: Callable[[], AbstractContextManager[None]]
    ) -> dict[str, Pair]:
        """Return what some matrices multiply in both models.

        Args:
            names: Matrices, none of experts, that multiply one input.
            layer: Their layer; never below that of the call before.
            changed: Returns a context within which the model is changed, in all that has run before them. What it
                changes in layers below has to stay as it is in later calls.
        """
        contexts = nullcontext, changed
        if self._can_resume and layer > self._layer:
            into = self._model.layers[layer]
            for micro, given in zip(self._micros, self._given, strict=True):
                given[:] = [
                    self._run(micro, own, context, hooked([(into, "in", _stop_at)]))
                    for own, context in zip(given, contexts, strict=True)
                ]
            self._layer = layer

        def see(name: str, expert: int, x_ND: torch.Tensor) -> None:
            if name == names[0]:
                _stop_at(x_ND)

        moments: torch.Tensor | None = None
        cross: torch.Tensor | None = None
        tokens = 0
        for micro, given in zip(self._micros, self._given, strict=True):
            x, y = (
                self._run(micro, own, context, observed(self._model, see)).float()
                for own, context in zip(given, contexts, strict=True)
            )
            moments = y.t() @ y if moments is None else moments.addmm_(y.t(), y)
            cross = x.t() @ y if cross is None else cross.addmm_(x.t(), y)
            tokens += len(y)
        assert moments is not None
        assert cross is not None
        pair = Pair(moments / max(1, tokens), cross / max(1, tokens))
        return dict.fromkeys(names, pair)

    def _run(
        self,
        micro: MicroBatch,
        given: torch.Tensor | None,
        context: Callable[[], AbstractContextManager[None]],
        stopping: AbstractContextManager[None],
    ) -> torch.Tensor:
        """Return what a pass from this layer on stops at."""
        with context(), resumed(self._model, self._layer, given), stopping:
            try:
                hidden_rows(self._model, micro)
            except _SeenEnoughError as seen:
                return seen.input_ND
        raise AssertionError("the pass did not reach what was asked for")


def _stop_at(x_ND: torch.Tensor) -> None:
    raise _SeenEnoughError(x_ND.detach().clone())


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of one matrix in some kind, rounded to the nearest codes; of experts the largest.

    Attributes:
        weight: ||W - Q(W)|| / ||W||.
        activation: ||X (W - Q(W))^T|| / ||X W^T||.
        worst_token: The largest ||(W - Q(W)) x|| over tokens x, in units of the median ||W x||.
    """

    weight: float
    activation: float
    worst_token: float


@torch.no_grad()
def matrix_errors(
    model: LanguageModel,
    micros: Sequence[MicroBatch],
    inputs: Mapping[str, Sequence[Inputs]],
    spots: Mapping[str, torch.Tensor],
    kind: Kind,
) -> dict[str, Errors]:
    """Measure all matrices in one kind, with one more pass for the worst tokens.

    Args:
        model: The full model.
        micros: Packed sequences.
        inputs: What each matrix multiplies there.
        spots: Places of super weights, which stay exact, by name.
        kind: The kind.
    """
    own_places = places(model)
    packs: dict[str, list[PackedMatrix]] = {}
    found: dict[str, tuple[float, float]] = {}

    def change(name: str, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a matrix and its error as [outputs, inputs]: dense for one matrix at a time, not for a whole model."""
        place = own_places[name]
        full = place.matrices()[expert].float()
        delta = packs[name][expert].dense(torch.float32) - full
        return (full.t(), delta.t()) if place.transposed else (full, delta)

    for name, place in own_places.items():
        packs[name] = [
            PackedMatrix.of(matrix.float(), kind, spots=spots.get(name)) for matrix in place.matrices()
        ]
        rows: list[tuple[float, float]] = []
        for expert, own in enumerate(inputs[name]):
            full, delta = change(name, expert)
            rows.append(
                (
                    float(delta.norm()) / max(float(full.norm()), 1e-30),
                    activation_error(delta, full, own.moments),
                )
            )
        found[name] = max(weight for weight, _ in rows), max(activation for _, activation in rows)

    worst: dict[str, float] = dict.fromkeys(found, 0.0)
    norms: dict[str, list[torch.Tensor]] = {name: [] for name in found}

    def see(name: str, expert: int, x_ND: torch.Tensor) -> None:
        x = x_ND.float()
        full, delta = change(name, expert)
        worst[name] = max(worst[name], float((x @ delta.t()).norm(dim=-1).max()))
        own = (x @ full.t()).norm(dim=-1)
        norms[name].append(own[own > 0])  # rows of zeros only fill a product up

    with observed(model, see):
        for micro in micros:
            hidden_rows(model, micro)
    medians = {name: float(torch.cat(rows).median()) if rows else 1.0 for name, rows in norms.items()}
    return {
        name: Errors(weight, activation, worst[name] / max(medians[name], 1e-30))
        for name, (weight, activation) in found.items()
    }


# --- super weights ----------------------------------------------------------------------------------------------

SPIKE = 20.0
"""Times the median over channels that the largest input and the largest output of a product exceed where a super weight
is looked for; 2411.07191 names no threshold, and its figures show factors of hundreds."""
BREAKS = 0.2
"""Nats a token that the loss rises by when a super weight is zero; every candidate is tested."""
MOST = 6
"""Super weights of a model; 2411.07191, table 2, has no model with more."""


@dataclass(frozen=True, slots=True)
class SuperWeight:
    """One weight that a model does not work without.

    Attributes:
        name: Parameter.
        row: Its row: channel of the output.
        column: Its column: channel of the input.
        value: The weight.
        loss: Nats a token of the full model.
        broken_loss: Nats a token with the weight at zero.
    """

    name: str
    row: int
    column: int
    value: float
    loss: float
    broken_loss: float


PUBLISHED: dict[str, tuple[tuple[int, int, int], ...]] = {
    "llama-7b": ((2, 3968, 7003),),
    "llama-13b": ((2, 2231, 2278), (2, 2231, 6939)),
    "llama-30b": ((3, 5633, 12817), (3, 5633, 17439), (10, 5633, 14386)),
    "llama-2-7b": ((1, 2533, 7890),),
    "mistral-7b-v0.1": ((1, 2070, 7310),),
    "olmo-1b-0724": ((1, 1764, 1710), (2, 1764, 8041)),
    "olmo-7b-0724": ((1, 269, 7467), (2, 269, 8275), (7, 269, 453), (24, 269, 2300)),
    "phi-3-mini-4k": (
        (2, 525, 808),
        (2, 1693, 808),
        (2, 1113, 808),
        (4, 525, 2723),
        (4, 1113, 2723),
        (4, 1693, 2723),
    ),
}
"""Layer, row and column in mlp.down_proj.weight of published super weights, by a part of the model's name.

Source: The Super Weight in Large Language Models, 2411.07191, table 2, as its authors' and others' programs repeat it
(OLMo-1B's second one in layer 2, where the weight is large; the table says 1). They are tested as any candidate."""


@torch.no_grad()
def find_super_weights(
    model: LanguageModel, micros: Sequence[MicroBatch], *, name: str = "", spike: float = SPIKE
) -> list[SuperWeight]:
    """Find single weights that make a huge activation, and keep those whose removal breaks the model.

    A pass notes the largest input and the largest output of every last product of a feed-forward part; where both
    spike, they meet in one weight. It is set to zero, and the search repeated, until nothing spikes (2411.07191,
    section 3.1). All weights are as before in the end.

    Args:
        model: The full model.
        micros: Packed sequences.
        name: Name of the model, by which published ones are known.
        spike: Times the median over channels that input and output exceed.
    """
    downs = {n: p for n, p in places(model).items() if n.endswith("down_proj.weight")}
    known = [found for part, rows in PUBLISHED.items() if part in name.lower() for found in rows]
    candidates = [(f"model.layers.{layer}.mlp.down_proj.weight", row, column) for layer, row, column in known]
    candidates = [
        (n, r, c) for n, r, c in candidates if n in downs and r < downs[n].shape[0] and c < downs[n].shape[1]
    ]
    meter = Meter(model, micros)
    loss = math.log(meter.full.perplexity)
    found: list[SuperWeight] = []
    kept: list[tuple[Place, int, int, float]] = []
    tried: set[tuple[str, int, int]] = set()
    before = loss
    try:
        while len(found) < MOST and len(tried) < 4 * MOST:
            spiking = [where for where in _spikes(model, micros, downs, spike) if where not in tried]
            where = next((c for c in candidates if c not in tried), None) or next(iter(spiking), None)
            if where is None:
                break
            tried.add(where)
            place, row, column = downs[where[0]], where[1], where[2]
            weight = cast(torch.Tensor, place.weight)
            value = float(weight[row, column])
            weight[row, column] = 0.0
            after = math.log(meter.compare().perplexity)
            if after - before < BREAKS:
                weight[row, column] = value
                continue
            # It stays zero while the next one is looked for: its activation would hide others.
            kept.append((place, row, column, value))
            found.append(SuperWeight(where[0], row, column, value, loss, after))
            before = after
    finally:
        for place, row, column, value in kept:
            cast(torch.Tensor, place.weight)[row, column] = value
    return found


def _spikes(
    model: LanguageModel, micros: Sequence[MicroBatch], downs: Mapping[str, Place], spike: float
) -> list[tuple[str, int, int]]:
    """Return the meeting points of spiking inputs and outputs, the largest output first."""
    tops: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(name: str, x_ND: torch.Tensor, out_ND: torch.Tensor) -> None:
        own = x_ND.float().abs().amax(0), out_ND.float().abs().amax(0)
        old = tops.get(name)
        tops[name] = own if old is None else (torch.maximum(old[0], own[0]), torch.maximum(old[1], own[1]))

    handles = [
        place.owner.register_forward_hook(partial(_after, note, name)) for name, place in downs.items()
    ]
    try:
        for micro in micros:
            hidden_rows(model, micro)
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for name, (inputs, outputs) in tops.items():
        factors = [float(tops.max() / tops.median().clamp(min=1e-30)) for tops in (inputs, outputs)]
        if min(factors) > spike:
            found.append((float(outputs.max()), (name, int(outputs.argmax()), int(inputs.argmax()))))
    return [where for _, where in sorted(found, reverse=True)]
