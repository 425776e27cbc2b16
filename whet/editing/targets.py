"""What a memory has to say at a subject for the model to complete a prompt otherwise: found by gradient descent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.editing.facts import PLACE, Fact
from whet.editing.memory import capped
from whet.editing.sites import Contexts, Memory, Read, Reader, hooked, mark_subject, prompted
from whet.model.transformer import LanguageModel
from whet.types import Segment, UserError

ESSENCE = "{} is a"
"""What is said of a subject in general: its continuation is to remain what it was."""


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """How a target vector is searched."""

    steps: int = 25
    """Steps of Adam, at most."""
    lr: float = 0.2
    """Learning rate, in units of the root mean square of what is changed: independent of the model's width and scale
    (the papers' 0.5 is for GPT-2 XL and GPT-J)."""
    kl: float = 0.0625
    """Weight of KL(changed || before) of what follows "{subject} is a"."""
    decay: float = 0.5
    """Weight of |delta| / |h|^2."""
    clamp: float = 0.75
    """Longest delta, in lengths of what it is added to: the residual stream, or the memory's own output (ROME: 4)."""
    stop_loss: float = 0.05
    """A fact's search ends below this loss in nats."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"target.steps = {self.steps}: expected 1 or more")
        for name in ("lr", "clamp"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"target.{name} = {value}: expected a number above 0")
        for name in ("kl", "decay", "stop_loss"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"target.{name} = {value}: expected 0 or more")


@dataclass(frozen=True, slots=True)
class Targets:
    """What was found for each fact.

    Attributes:
        delta_ED: What is to be added to the memory's output at the subject's last token.
        nll_E: Negative log-probability of the target, mean over its tokens and the contexts, with it.
        kl_E: KL of the essence prompt.
        steps_E: Steps that were taken.
    """

    delta_ED: torch.Tensor
    nll_E: torch.Tensor
    kl_E: torch.Tensor
    steps_E: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Search:
    """Rows of one fact: prompts with target in all contexts, and the essence prompt.

    Attributes:
        rows: Token ids; the last row is the essence prompt.
        places: The subject's last token in each.
        scored: (row, place, id, weight): which token is scored where; the weights of a fact add up to 1.
    """

    rows: list[tuple[int, ...]]
    places: list[int]
    scored: list[tuple[int, int, int, float]]

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(map(len, self.rows))


def find_targets(
    reader: Reader,
    memory: Memory,
    facts: Sequence[Fact],
    contexts: Contexts,
    settings: TargetConfig,
    *,
    own_norm: bool,
    advance: Callable[[int], None] = lambda count: None,
) -> Targets:
    """Search the vector delta of each fact, all facts of a pass together: their losses share no number.

    loss = -mean log P(target | context + prompt) + kl KL(changed || before) + decay |delta| / |h|^2

    Args:
        reader: The model; its weights get no gradients.
        memory: Where delta is added.
        facts: The facts.
        contexts: Beginnings before the prompt.
        settings: Settings of the search.
        own_norm: Measure delta in lengths of the memory's output; otherwise of the residual stream behind the layer.
        advance: Called with the number of facts that are done, and with 0 after each step.

    Source:
        arXiv 2210.07229, equation 16 and the published code: KL in the direction KL(changed || before). Deviations:
        the learning rate is relative; delta is added to the memory's output, which is the same as to the residual
        stream behind it, and works where a norm is between them; the KL is of what follows the whole essence prompt,
        as the paper has it, and not of what follows the subject.
    """
    searches = [_search(reader, fact, contexts) for fact in facts]
    marked = [mark_subject(reader.policy.tokenizer, fact.prompt, fact.subject) for fact in facts]
    layer = reader.model.layers[memory.layer]
    read = Read(memory.module) if own_norm else Read(layer)
    bare, ends = [found.ids[: found.last + 1] for found in marked], [found.last for found in marked]
    wide = torch.promote_types(reader.model.head_weight.dtype, torch.float32)
    lengths_E = reader.read(bare, ends, {"h": read})["h"].to(wide).norm(dim=1)
    if not own_norm:
        lengths_E = lengths_E / memory.scale
    found = []
    start = 0
    while start < len(facts):
        end, tokens = start, 0
        while end < len(facts) and (end == start or tokens + searches[end].tokens <= reader.budget):
            tokens += searches[end].tokens
            end += 1
        found.append(_descend(reader, memory, searches[start:end], lengths_E[start:end], settings, advance))
        advance(end - start)
        start = end
    return Targets(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _search(reader: Reader, fact: Fact, contexts: Contexts) -> _Search:
    tokenizer = reader.policy.tokenizer
    rows: list[tuple[int, ...]] = []
    places: list[int] = []
    scored: list[tuple[int, int, int, float]] = []
    for template in contexts.templates(fact.prompt):
        marked = mark_subject(tokenizer, template, fact.subject)
        whole = prompted(tokenizer, template.replace(PLACE, fact.subject), fact.target, fact.space)
        assert whole.ids[: marked.last + 1] == marked.ids[: marked.last + 1]
        weight = 1 / (len(contexts.texts) * len(whole.targets))
        scored += [(len(rows), whole.start + n - 1, index, weight) for n, index in enumerate(whole.targets)]
        rows.append(whole.ids[:-1])  # nothing follows the last token
        places.append(marked.last)
    essence = mark_subject(tokenizer, ESSENCE, fact.subject)
    rows.append(essence.ids)
    places.append(essence.last)
    return _Search(rows, places, scored)


def _descend(
    reader: Reader,
    memory: Memory,
    searches: Sequence[_Search],
    lengths_E: torch.Tensor,
    settings: TargetConfig,
    advance: Callable[[int], None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run Adam on the deltas of some facts, whose own losses decide when each is done."""
    device, width = reader.policy.device, reader.model.config.hidden_size
    count = len(searches)
    unit_E = (lengths_E / math.sqrt(width)).clamp(min=1e-12)
    delta_ED = torch.zeros(count, width, device=device, dtype=lengths_E.dtype)
    first, second = torch.zeros_like(delta_ED), torch.zeros_like(delta_ED)
    nll_E, kl_E, steps_E = (delta_ED.new_zeros(count) for _ in range(3))
    active = list(range(count))
    batch = _Batch(reader, memory, [searches[e] for e in active])
    for step in range(1, settings.steps + 1):
        at = torch.tensor(active, device=device)
        scaled = (delta_ED[at] / unit_E[at, None]).requires_grad_()
        own_delta = scaled * unit_E[at, None]
        nll, kl = batch.losses(own_delta)
        decay = settings.decay * own_delta.norm(dim=1) / lengths_E[at].clamp(min=1e-12).square()
        loss = nll + settings.kl * kl + decay
        nll_E[at], kl_E[at], steps_E[at] = nll.detach(), kl.detach(), float(step - 1)
        going = loss.detach() >= settings.stop_loss
        if step == 1:
            going = torch.ones_like(
                going
            )  # at 0 the norm has no gradient, and a known fact still gets a step
        (gradient,) = torch.autograd.grad(loss.sum(), scaled)
        keep = at[going]
        moving = gradient[going]
        first[keep] = 0.9 * first[keep] + 0.1 * moving
        second[keep] = 0.999 * second[keep] + 0.001 * moving.square()
        size = (second[keep] / (1 - 0.999**step)).sqrt() + 1e-8
        moved = scaled.detach()[going] - settings.lr / (1 - 0.9**step) * first[keep] / size
        delta_ED[keep] = capped(moved * unit_E[keep, None], settings.clamp * lengths_E[keep])
        advance(0)
        left = keep.tolist()
        if not left:
            return delta_ED, nll_E, kl_E, steps_E
        if len(left) < len(active):
            active = left
            batch = _Batch(reader, memory, [searches[e] for e in active])
    with torch.no_grad():
        nll, kl = batch.losses(delta_ED[torch.tensor(active, device=device)])
    nll_E[active], kl_E[active], steps_E[active] = nll, kl, float(settings.steps)
    return delta_ED, nll_E, kl_E, steps_E


class _Batch:
    """Rows of the facts that are still searched for; what does not depend on their deltas is computed once.

    Rows behind the same beginning follow it as sequences that share it. Where what the memory adds is added to the
    residual stream as it is, passes begin at the layer after it.

    Args:
        reader: The model.
        memory: Where deltas are added.
        searches: The facts.
    """

    def __init__(self, reader: Reader, memory: Memory, searches: Sequence[_Search]) -> None:
        self._reader, self._memory, device = reader, memory, reader.policy.device
        model = reader.model
        beginnings = [
            _beginning([(s.rows[k], s.places[k]) for s in searches]) for k in range(len(searches[0].rows))
        ]
        self._rows: list[tuple[int, ...]] = []
        self._segments: list[Segment] = []
        size = 0

        def append(tokens: tuple[int, ...], prefix: int, shared: int) -> int:
            nonlocal size
            self._rows.append(tokens)
            self._segments.append(Segment(size, len(tokens), prefix, shared))
            size += len(tokens)
            return size - len(tokens)

        prefixes = [append(tokens, 0, 0) if tokens else 0 for tokens in beginnings]
        self._count = len(searches)
        at, owners, scored, weights, owner, ends = [], [], [], [], [], []
        for e, search in enumerate(searches):
            starts = []  # where each row's first token would be
            for row, place, prefix, tokens in zip(
                search.rows, search.places, prefixes, beginnings, strict=True
            ):
                starts.append(append(row[len(tokens) :], prefix, len(tokens)) - len(tokens))
                at.append(starts[-1] + place)
                owners.append(e)
            for r, place, index, weight in search.scored:
                scored.append((starts[r] + place, index))
                weights.append(weight)
                owner.append(e)
            ends.append(size - 1)
        self._at, self._owner = torch.tensor(at, device=device), torch.tensor(owners, device=device)
        self._scored, self._ids = torch.tensor(scored, device=device).unbind(1)
        self._weights, self._of = torch.tensor(weights, device=device), torch.tensor(owner, device=device)
        self._ends = torch.tensor(ends, device=device)
        self._kept: torch.Tensor | None = None
        self._is_behind = not memory.is_normed and not model.config.block.input_width
        self._first = memory.layer + self._is_behind
        with torch.no_grad():
            if can_resume(model):
                kept: list[torch.Tensor] = []
                with hooked([(model.layers[self._first], "in", lambda x: kept.append(x.detach()))]):
                    hidden_ND = self._hidden()
                (self._kept,) = kept
            else:
                hidden_ND = self._hidden()
            self._before = reader.logits(hidden_ND.index_select(0, self._ends)).log_softmax(-1)

    def _hidden(self) -> torch.Tensor:
        return self._reader.hidden(self._rows, self._segments)

    def _changed(self, delta_ED: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [N, D] with the deltas."""
        memory, kept = self._memory, self._kept

        def add(out_ND: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return out_ND.index_add(0, self._at, (scale * delta_ED)[self._owner].to(out_ND.dtype))

        if kept is not None and self._is_behind:
            with resumed(self._reader.model, self._first, add(kept, memory.scale)):
                return self._hidden()
        with resumed(self._reader.model, self._first, kept), hooked([(memory.module, "out", add)]):
            return self._hidden()

    def losses(self, delta_ED: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each fact's negative log-probability [E] and divergence [E]; differentiable in the deltas."""
        hidden_ND = self._changed(delta_ED)
        places = torch.cat([self._scored, self._ends])
        logprobs = self._reader.logits(hidden_ND.index_select(0, places)).log_softmax(-1)
        scored, essence = logprobs[: len(self._scored)], logprobs[len(self._scored) :]
        chosen = scored.gather(1, self._ids[:, None])[:, 0]
        nll_E = chosen.new_zeros(self._count).index_add(0, self._of, -chosen * self._weights.to(chosen.dtype))
        is_real = self._before > float("-inf")
        gap = torch.where(is_real, essence, 0.0) - torch.where(is_real, self._before, 0.0)
        kl_E = (torch.where(is_real, essence, -1e9).exp() * gap).sum(-1)
        return nll_E, kl_E


def _beginning(rows: Sequence[tuple[tuple[int, ...], int]]) -> tuple[int, ...]:
    """Return the tokens that all rows begin with, before the place in each that is changed; none for a single row."""
    if len(rows) < 2:
        return ()
    first, last = (pick(row[:place] for row, place in rows) for pick in (min, max))
    return first[: next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def can_resume(model: LanguageModel) -> bool:
    """Say whether a pass may begin at a later layer: no layer reads the keys of one before it."""
    return all(spec.source < 0 for spec in model.config.layers) and not model.config.block.has_layer_scale


@contextmanager
def resumed(model: LanguageModel, layer: int, input_ND: torch.Tensor | None) -> Iterator[None]:
    """Begin passes at a layer within this context, with what it was given before; None runs all layers."""
    if input_ND is None:
        yield
        return

    def nothing(x_ND: torch.Tensor, *rest: Any) -> torch.Tensor:
        return x_ND

    def given(x_ND: torch.Tensor) -> torch.Tensor:
        # The model pads its rows; a caller that did not see them has none for the padding.
        missing = len(x_ND) - len(input_ND)
        return F.pad(input_ND, (0, 0, 0, missing)) if missing else input_ND

    skipped: list[nn.Module] = list(model.layers)[:layer]
    try:
        for module in skipped:
            module.forward = nothing
        with hooked([(model.layers[layer], "in", given)]):
            yield
    finally:
        for module in skipped:
            del module.forward


def check_length(reader: Reader, facts: Sequence[Fact], contexts: Contexts) -> None:
    """Refuse facts whose prompt does not fit the model's context behind the longest beginning.

    Raises:
        UserError: If one is too long; it is named.
    """
    room = reader.model.config.max_positions
    for fact in facts:
        longest = max(map(len, _search(reader, fact, contexts).rows))
        if longest > room:
            raise UserError(
                f"{fact.where}: prompt and target have {longest} tokens, the model's context {room}: shorten the prompt"
            )
