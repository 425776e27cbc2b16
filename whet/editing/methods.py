"""From facts to changes of weights: MEMIT, ROME, R-ROME, AlphaEdit, and two that fine-tune on the same facts.

Each changes the model in place and returns what it changed, by the names of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from whet.editing.facts import Fact
from whet.editing.memory import Delta, null_space, project, rank_one, spread
from whet.editing.sites import Contexts, Hook, Memory, Read, Reader, hooked, mark_subject, prompted
from whet.editing.targets import TargetConfig, Targets, find_targets
from whet.model.quant import places as matrices_of
from whet.types import UserError

MethodName = Literal["memit", "rome", "r-rome", "alphaedit", "ft", "lora"]
METHODS: tuple[MethodName, ...] = ("memit", "rome", "r-rome", "alphaedit", "ft", "lora")
LOCATED: tuple[MethodName, ...] = ("memit", "rome", "r-rome", "alphaedit")
"""Methods that write into memories; the others fine-tune."""
ROME_CLAMP = 4.0
"""Longest delta of ROME, in lengths of the memory's own output, as in its published code."""
Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Fine-tuning on the facts: what `ft` and `lora` read."""

    steps: int = 25
    """Steps, each on all facts of the batch."""
    lr: float = 5e-4
    """Learning rate of Adam (FT in the papers: 5e-4)."""
    bound: float = 5e-4
    """ft: no weight may move further than this (FT-L in the papers: 5e-4); 0 for no bound."""
    rank: int = 8
    """lora: rank of the change of each matrix."""
    stop_loss: float = 0.01
    """Training ends below this loss in nats per token."""

    def __post_init__(self) -> None:
        for name in ("steps", "rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"tune.{name} = {getattr(self, name)}: expected 1 or more")
        for name in ("lr", "bound", "stop_loss"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"tune.{name} = {value}: expected 0 or more")


@dataclass(slots=True)
class Change:
    """What an edit did.

    Attributes:
        deltas: By the name of the changed parameter; of FT one factor is the identity.
        keys: The edits' keys by layer, [E, F]: later edits leave them where they are.
        targets: What was searched; None where nothing was.
        norms: For each parameter |change| / |weight|.
    """

    deltas: dict[str, Delta] = field(default_factory=dict)
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    targets: Targets | None = None
    norms: dict[str, float] = field(default_factory=dict)

    def put(self, memory: Memory, delta: Delta) -> None:
        """Add a change to a memory, and note it; rounded as it will be stored."""
        delta = Delta(delta.left_DR.float(), delta.right_RF.float())
        dense = delta.dense()
        self.norms[memory.name] = float(dense.norm() / memory.matrix().norm())
        memory.add(dense)
        if memory.name in self.deltas:
            before = self.deltas[memory.name]
            delta = Delta(
                torch.cat([before.left_DR, delta.left_DR], 1),
                torch.cat([before.right_RF, delta.right_RF], 0),
            )
        self.deltas[memory.name] = delta


def mean_keys(
    reader: Reader, memories: Sequence[Memory], facts: Sequence[Fact], contexts: Contexts
) -> dict[int, torch.Tensor]:
    """Return each fact's key [E, F] by layer: what the memory reads at the subject's last token, mean over contexts."""
    tokenizer = reader.policy.tokenizer
    templates = [template for fact in facts for template in contexts.templates(fact.prompt)]
    subjects = [fact.subject for fact in facts for _ in contexts.texts]
    marked = [mark_subject(tokenizer, *pair) for pair in zip(templates, subjects, strict=True)]
    rows = [found.ids[: found.last + 1] for found in marked]
    reads = {str(memory.layer): Read(memory.module, "in") for memory in memories}
    found = reader.read(rows, [one.last for one in marked], reads)
    count = len(contexts.texts)
    return {int(layer): keys.double().view(len(facts), count, -1).mean(1) for layer, keys in found.items()}


def residual_stream(reader: Reader, layer: int, facts: Sequence[Fact]) -> torch.Tensor:
    """Return the residual stream [E, D] behind a layer at the last token of each fact's subject, float64."""
    marked = [mark_subject(reader.policy.tokenizer, fact.prompt, fact.subject) for fact in facts]
    rows = [found.ids[: found.last + 1] for found in marked]
    read = {"h": Read(reader.model.layers[layer])}
    return reader.read(rows, [found.last for found in marked], read)["h"].double()


def memory_output(reader: Reader, memory: Memory, facts: Sequence[Fact]) -> torch.Tensor:
    """Return what a memory answers [E, D] at the last token of each fact's subject, behind the bare prompt."""
    marked = [mark_subject(reader.policy.tokenizer, fact.prompt, fact.subject) for fact in facts]
    rows = [found.ids[: found.last + 1] for found in marked]
    return reader.read(rows, [found.last for found in marked], {"v": Read(memory.module)})["v"].double()


def spread_over_layers(
    reader: Reader,
    memories: Sequence[Memory],
    facts: Sequence[Fact],
    contexts: Contexts,
    moments: Mapping[int, torch.Tensor],
    *,
    targets: TargetConfig,
    weight: float,
    earlier: Mapping[int, torch.Tensor],
    kept: Sequence[Fact] = (),
    null_share: float | None = None,
    advance: Advance = lambda count: None,
) -> Change:
    """Write facts into the memories of several layers, lowest first: MEMIT, or AlphaEdit with a projection.

    Each layer takes an equal share of what is still missing at the last one, as measured after the layers below it
    were changed.

    Args:
        reader: The model, changed in place.
        memories: The memories in ascending order.
        facts: The facts.
        contexts: Beginnings before the prompts.
        moments: C of each layer.
        targets: How target vectors are searched.
        weight: MEMIT: of prose; AlphaEdit: of the change's size, in units of the mean square of the projected keys.
        earlier: Keys of earlier edits by layer, which keep their values.
        kept: Facts whose keys keep their values, too.
        null_share: AlphaEdit's share of the trace (`null_space`); None for MEMIT.
        advance: Called with the number of facts whose target is found.

    Source:
        arXiv 2210.07229, algorithm 1; arXiv 2410.02355.
    """
    last = memories[-1]
    own_norm = last.is_normed
    found = find_targets(reader, last, facts, contexts, targets, own_norm=own_norm, advance=advance)
    delta_ED = found.delta_ED.double()
    wanted_ED = (
        memory_output(reader, last, facts) + delta_ED
        if own_norm
        else residual_stream(reader, last.layer, facts) + last.scale * delta_ED
    )
    change = Change(targets=found)
    for place, memory in enumerate(memories):
        keys_EF = mean_keys(reader, [memory], facts, contexts)[memory.layer]
        if own_norm:
            missing_ED = wanted_ED - memory_output(reader, memory, facts)
        else:
            missing_ED = (wanted_ED - residual_stream(reader, last.layer, facts)) / memory.scale
        missing_ED = missing_ED / (len(memories) - place)
        moment, before = moments[memory.layer].to(keys_EF.device), earlier.get(memory.layer)
        if kept:
            kept_EF = mean_keys(reader, [memory], kept, contexts)[memory.layer]
            before = kept_EF if before is None else torch.cat([before.to(kept_EF), kept_EF])
        if null_share is not None:
            free_FF = null_space(moment, null_share)
            ridge = weight * float((keys_EF @ free_FF).square().sum(1).mean())
            delta = project(missing_ED, keys_EF, free_FF, before, ridge)
        else:
            if before is not None:  # what is to stay counts as much as these
                moment = moment + before.double().t() @ before.double() / weight
            delta = spread(missing_ED, keys_EF, moment, weight)
        change.put(memory, delta)
        change.keys[memory.layer] = keys_EF.float()
    return change


def one_by_one(
    reader: Reader,
    memory: Memory,
    facts: Sequence[Fact],
    contexts: Contexts,
    moment: torch.Tensor,
    *,
    targets: TargetConfig,
    is_refined: bool,
    advance: Advance = lambda count: None,
) -> Change:
    """Write facts into one memory, one after the other, each by a change of rank 1: ROME, or R-ROME.

    Args:
        reader: The model, changed in place.
        memory: The memory.
        facts: The facts.
        contexts: Beginnings before the prompts.
        moment: C.
        targets: How target vectors are searched.
        is_refined: R-ROME: the mean key in both places; otherwise as ROME's published code has it.
        advance: Called with 1 for each fact.

    Source:
        arXiv 2202.05262, section 3.1; arXiv 2403.07175.
    """
    change = Change()
    all_targets: list[Targets] = []
    keys: list[torch.Tensor] = []
    bare = Contexts()
    for fact in facts:
        found = find_targets(
            reader, memory, [fact], contexts, targets, own_norm=True, advance=lambda count: advance(0)
        )
        mean_F = mean_keys(reader, [memory], [fact], contexts)[memory.layer][0]
        own_F = mean_F if is_refined else mean_keys(reader, [memory], [fact], bare)[memory.layer][0]
        value_D = memory_output(reader, memory, [fact])[0] + found.delta_ED[0].double()
        bias = getattr(memory.module, "bias", None)
        present_D = memory.matrix() @ own_F + (0 if bias is None else bias.detach().double())
        change.put(memory, rank_one(value_D - present_D, mean_F, own_F, moment.to(mean_F.device)))
        all_targets.append(found)
        keys.append(own_F.float())
        advance(1)
    change.targets = Targets(*(torch.cat(parts) for parts in zip(*map(_parts, all_targets), strict=True)))
    change.keys[memory.layer] = torch.stack(keys)
    return change


def _parts(targets: Targets) -> tuple[torch.Tensor, ...]:
    return targets.delta_ED, targets.nll_E, targets.kl_E, targets.steps_E


def loss_of_facts(reader: Reader, facts: Sequence[Fact]) -> Iterator[torch.Tensor]:
    """Yield parts of the facts' loss, mean over facts of the mean over target tokens; differentiable."""
    tokenizer = reader.policy.tokenizer
    asked = [prompted(tokenizer, fact.text, fact.target, fact.space) for fact in facts]
    rows = [one.ids[:-1] for one in asked]
    for chunk in reader.chunks(rows):
        hidden_ND = reader.hidden([rows[place] for place in chunk])
        at, ids, weights, start = [], [], [], 0
        for place in chunk:
            one = asked[place]
            at += [start + one.start + n - 1 for n in range(len(one.targets))]
            ids += one.targets
            weights += [1 / (len(one.targets) * len(facts))] * len(one.targets)
            start += len(rows[place])
        device = hidden_ND.device
        logprobs = reader.logits(hidden_ND.index_select(0, torch.tensor(at, device=device))).log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(ids, device=device)[:, None])[:, 0]
        yield -(chosen * torch.tensor(weights, device=device, dtype=chosen.dtype)).sum()


def fine_tune(
    reader: Reader,
    memory: Memory,
    facts: Sequence[Fact],
    settings: TuneConfig,
    advance: Advance = lambda count: None,
) -> Change:
    """Train one memory on the facts, no weight further than a bound from where it was: FT-L.

    Source:
        arXiv 2012.00363; as the baseline of arXiv 2202.05262, appendix E.
    """
    weight = memory.weight
    before = weight.detach().clone()
    weight.requires_grad_(True)
    optimizer = torch.optim.Adam([weight], lr=settings.lr)
    try:
        _train(reader, facts, optimizer, settings, lambda: _bound(weight, before, settings.bound), advance)
    finally:
        weight.requires_grad_(False)
        weight.grad = None
    moved = (weight.detach() - before).double()
    moved_DF = moved.t() if memory.is_transposed else moved
    change = Change(norms={memory.name: float(moved.norm() / before.double().norm())})
    with torch.no_grad():
        weight.copy_(before)
    small, is_wide = min(moved_DF.shape), moved_DF.shape[0] <= moved_DF.shape[1]
    eye = torch.eye(small, device=moved.device)
    change.put(memory, Delta(eye, moved_DF) if is_wide else Delta(moved_DF, eye))
    return change


def _bound(weight: torch.Tensor, before: torch.Tensor, bound: float) -> None:
    if bound:
        with torch.no_grad():
            weight.copy_(before + (weight - before).clamp(-bound, bound))


def _train(
    reader: Reader,
    facts: Sequence[Fact],
    optimizer: torch.optim.Optimizer,
    settings: TuneConfig,
    after: Callable[[], None],
    advance: Advance,
) -> None:
    for _ in range(settings.steps):
        optimizer.zero_grad()
        total = 0.0
        for part in loss_of_facts(reader, facts):
            part.backward()
            total += float(part.detach())
        if total < settings.stop_loss:
            break
        optimizer.step()
        after()
        advance(0)
    advance(len(facts))


def low_rank(
    reader: Reader,
    facts: Sequence[Fact],
    settings: TuneConfig,
    seed: int,
    advance: Advance = lambda count: None,
) -> Change:
    """Train a change of low rank beside every matrix of the layers on the facts, and add it to the weights: LoRA.

    Source:
        arXiv 2106.09685, with alpha = rank.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    owners = {}
    for name, place in matrices_of(reader.model).items():
        if place.is_experts or place.weight is None:
            continue
        outputs, inputs = reversed(place.shape) if place.transposed else place.shape
        rank = min(settings.rank, outputs, inputs)
        drawn = torch.empty(rank, inputs).normal_(0, 1 / math.sqrt(inputs), generator=generator)
        device = place.weight.device
        pairs[name] = (torch.zeros(outputs, rank, device=device), drawn.to(device))
        owners[name] = place
    leaves = [tensor.requires_grad_() for pair in pairs.values() for tensor in pair]
    optimizer = torch.optim.Adam(leaves, lr=settings.lr)

    @contextmanager
    def beside() -> Iterator[None]:
        inputs: dict[str, torch.Tensor] = {}

        def keep(x: torch.Tensor, name: str) -> None:
            inputs[name] = x

        def add(out: torch.Tensor, name: str) -> torch.Tensor:
            left, right = pairs[name]
            return out + F.linear(F.linear(inputs.pop(name), right.to(out.dtype)), left.to(out.dtype))

        hooks: list[Hook] = []
        for name, place in owners.items():
            hooks += [
                (place.owner, "in", partial(keep, name=name)),
                (place.owner, "out", partial(add, name=name)),
            ]
        with hooked(hooks):
            yield

    with beside():
        _train(reader, facts, optimizer, settings, lambda: None, advance)
    change = Change()
    for name, (left, right) in pairs.items():
        place = owners[name]
        memory = Memory(-1, name, place.owner, place.transposed, 1.0, False)
        change.put(memory, Delta(left.detach(), right.detach()))
    return change


def check_single(method: MethodName, memories: Sequence[Memory]) -> Memory:
    """Return the one memory of a method that writes into one.

    Raises:
        UserError: If several layers were given.
    """
    if len(memories) != 1:
        layers = ", ".join(str(memory.layer) for memory in memories)
        raise UserError(
            f"layers = {layers}: {method} writes into one layer; give one, as in --layers {memories[-1].layer}"
        )
    return memories[0]
