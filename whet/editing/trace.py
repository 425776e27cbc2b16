"""Looking inside: causal tracing, the logit lens, direct logit attribution and attention, of one prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from whet.editing.facts import Fact
from whet.editing.sites import (
    Hook,
    Marked,
    Reader,
    find_memories,
    hooked,
    mark_subject,
    prompted,
)
from whet.editing.targets import can_resume, resumed
from whet.model import attention as attention_module
from whet.model.gpt2 import GPT2, GPT2Block
from whet.model.parts import RMSNorm
from whet.model.transformer import DecoderLayer, LanguageModel, LlamaLike
from whet.types import Segment, UserError

Kind = Literal["hidden", "mlp", "attention"]
KINDS: tuple[Kind, ...] = ("hidden", "mlp", "attention")
LOCATING: dict[str, Any] = {"kinds": ("mlp",), "places": (), "num_samples": 6}
"""What is traced to find a layer for facts."""


@dataclass(frozen=True, slots=True)
class Trace:
    """How much of an answer's probability each state brings back.

    Attributes:
        effects: By kind, [layers, tokens]: probability with the state restored, minus that of the corrupted run.
        together: By kind, [layers]: the same with the states of all of the subject's tokens restored at once.
        clean: Probability of the answer in the clean run.
        corrupted: Its mean with the subject's embeddings disturbed.
        tokens: Texts of the prompt's tokens.
        subject: Places of the subject's first and last token.
        answer: The token that is predicted.
        window: Layers around each that are restored together, of mlp and attention.
    """

    effects: dict[Kind, torch.Tensor]
    together: dict[Kind, torch.Tensor]
    clean: float
    corrupted: float
    tokens: tuple[str, ...]
    subject: tuple[int, int]
    answer: str
    window: int


def part_of(layer: nn.Module, kind: Kind) -> nn.Module:
    """Return the module whose output is restored."""
    if kind == "hidden":
        return layer
    if kind == "mlp":
        return layer.get_submodule("mlp")
    if isinstance(layer, GPT2Block):
        return layer.attn
    assert isinstance(layer, DecoderLayer)
    return layer.get_submodule(layer.mixer)


def answer_id(reader: Reader, fact: Fact, marked: Marked) -> int:
    """Return the first token of a fact's true answer; of none given the model's own likeliest one."""
    answer = fact.true or fact.target
    if answer:
        return prompted(reader.policy.tokenizer, fact.text, answer, fact.space).targets[0]
    return int(reader.next_logprobs([marked.ids])[0].argmax())


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of one pass: for each draw the whole disturbed prompt, then one row for each restoration.

    A state that is restored changes nothing before its own place, so its row begins there and shares the tokens before
    it with the disturbed prompt.

    Attributes:
        rows: Token ids.
        segments: What each row shares.
        source: Row in [draws * T] of each token's state, [N].
        at: Flat rows whose states are restored, [M].
        of: Their places in the prompt, [M].
        ends: Flat row of the last token of each restoration, [R].
        draws: Draw of each restoration, [R].
        groups: Which of the restorations it is, [R].
    """

    rows: list[tuple[int, ...]]
    segments: list[Segment]
    source: torch.Tensor
    at: torch.Tensor
    of: torch.Tensor
    ends: torch.Tensor
    draws: torch.Tensor
    groups: torch.Tensor


class Tracer:
    """One prompt, clean and disturbed; restores states of the clean run in the disturbed one.

    A pass begins at the first layer that is restored, with what the disturbed run gave to it.

    Args:
        reader: The model.
        fact: Prompt and subject; the answer is its `true`, else its `target`, else what the model says.
        noise: Standard deviation of the noise, in those of what the first layer reads.
        num_samples: Draws of the noise.
        window: Neighbouring layers restored together, of mlp and attention; 0 for a fifth of the layers.
        kinds: What is restored.
        places: Tokens whose states are restored, one at a time; default: all.
        seed: Seed of the noise.
    """

    @torch.no_grad()
    def __init__(
        self,
        reader: Reader,
        fact: Fact,
        *,
        noise: float = 3.0,
        num_samples: int = 10,
        window: int = 0,
        kinds: Sequence[Kind] = KINDS,
        places: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        model = reader.model
        self._reader, self._model, self.kinds = reader, model, tuple(kinds)
        self.marked = mark_subject(reader.policy.tokenizer, fact.prompt, fact.subject)
        ids, count = self.marked.ids, len(model.layers)
        self.wanted = answer_id(reader, fact, self.marked)
        self.places = list(range(len(ids)) if places is None else places)
        self.window, self._num_samples = window or max(1, round(count / 5)), num_samples
        self._modules: dict[tuple[Kind, int], nn.Module] = {
            (kind, n): part_of(layer, kind) for kind in kinds for n, layer in enumerate(model.layers)
        }
        self._clean: dict[tuple[Kind, int], torch.Tensor] = {}
        first: list[torch.Tensor] = []

        def keep(x_ND: torch.Tensor, key: tuple[Kind, int]) -> None:
            self._clean[key] = x_ND[: len(ids)].detach().clone()

        hooks: list[Hook] = [(module, "out", partial(keep, key=key)) for key, module in self._modules.items()]
        hooks.append((model.layers[0], "in", lambda x: first.append(x[: len(ids)].detach().clone())))
        with hooked(hooks):
            self.clean = float(self._probabilities(reader.hidden([ids]), [len(ids) - 1]))
        spread = noise * float(first[0].float().std())
        own = slice(self.marked.first, self.marked.last + 1)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(num_samples, own.stop - own.start, first[0].shape[1], generator=generator)
        disturbed = first[0].repeat(num_samples, 1, 1)
        disturbed[:, own] += (drawn * spread).to(first[0])
        self._can_resume = can_resume(model)
        self.corrupted = self._disturb(disturbed)
        # The subject's tokens together are the last restoration.
        groups = [range(place, place + 1) for place in self.places]
        self._groups = [*groups, range(own.start, own.stop)]
        self._batches = list(self._lay_out())

    def _disturb(self, disturbed_STD: torch.Tensor) -> float:
        """Run the disturbed prompts, and keep what each layer is given, [draws, T, D]; return the mean probability."""
        ids, model = self.marked.ids, self._model
        kept: list[list[torch.Tensor]] = [[] for _ in model.layers]
        found: list[torch.Tensor] = []
        per_pass = max(1, self._reader.budget // len(ids))
        for part in disturbed_STD.split(per_pass):
            size = len(part) * len(ids)

            def keep(x_ND: torch.Tensor, layer: int, size: int = size) -> None:
                kept[layer].append(x_ND[:size].detach().clone())

            layers = enumerate(model.layers) if self._can_resume else ()
            hooks: list[Hook] = [(layer, "in", partial(keep, layer=n)) for n, layer in layers]
            with resumed(model, 0, part.flatten(0, 1)), hooked(hooks):
                hidden = self._reader.hidden([ids] * len(part))
            found.append(self._probabilities(hidden, [len(ids) * (n + 1) - 1 for n in range(len(part))]))
        flat = disturbed_STD.flatten(0, 1)
        self._given = [torch.cat(parts) for parts in kept] if self._can_resume else [flat]
        return float(torch.cat(found).mean())

    def _probabilities(self, hidden_ND: torch.Tensor, ends: Sequence[int] | torch.Tensor) -> torch.Tensor:
        where = torch.as_tensor(ends, device=hidden_ND.device)
        logits = self._reader.logits(hidden_ND.index_select(0, where))
        return logits.softmax(-1)[:, self.wanted].float().cpu()

    def _lay_out(self) -> Iterator[_Batch]:
        """Divide all draws and restorations into passes of the reader's budget."""
        ids, device = self.marked.ids, self._reader.policy.device
        # A state before the subject is the same in both runs: nothing to restore.
        later = [n for n, group in enumerate(self._groups) if group.start >= self.marked.first]
        todo = [(draw, n) for draw in range(self._num_samples) for n in later]
        while todo:
            rows: list[tuple[int, ...]] = []
            segments: list[Segment] = []
            source: list[int] = []
            at, of, ends, draws, groups = ([] for _ in range(5))
            bases: dict[int, int] = {}
            done = 0
            for draw, n in todo:
                group, size = self._groups[n], len(source)
                more = len(ids) - group.start + (0 if draw in bases else len(ids))
                if done and size + more > self._reader.budget:
                    break
                if draw not in bases:
                    bases[draw] = size
                    rows.append(ids)
                    segments.append(Segment(size, len(ids), 0, 0))
                    source += range(draw * len(ids), (draw + 1) * len(ids))
                    size = len(source)
                prefix = bases[draw] if group.start else 0
                rows.append(ids[group.start :])
                segments.append(Segment(size, len(ids) - group.start, prefix, group.start))
                source += range(draw * len(ids) + group.start, (draw + 1) * len(ids))
                at += range(size, size + len(group))
                of += group
                ends.append(len(source) - 1)
                draws.append(draw)
                groups.append(n)
                done += 1
            todo = todo[done:]
            numbers = (source, at, of, ends)
            source_N, at_M, of_M, ends_R = (torch.tensor(own, device=device) for own in numbers)
            yield _Batch(
                rows, segments, source_N, at_M, of_M, ends_R, torch.tensor(draws), torch.tensor(groups)
            )

    def layers_of(self, kind: Kind, layer: int) -> range:
        """Return the layers whose states are restored together, as ROME's programs choose them."""
        if kind == "hidden":
            return range(layer, layer + 1)
        count, half = len(self._model.layers), self.window // 2
        return range(max(0, layer - half), min(count, layer + self.window - half))

    def num_runs(self, kind: Kind, layer: int) -> int:
        """Return how many layers run to restore one."""
        return len(self._model.layers) - self._start(kind, layer)

    def _start(self, kind: Kind, layer: int) -> int:
        return self.layers_of(kind, layer).start if self._can_resume else 0

    @torch.no_grad()
    def restore(self, kind: Kind, layer: int) -> torch.Tensor:
        """Return the mean effect of each restoration: of the places, and, last, of the subject's tokens together."""
        effects = torch.zeros(self._num_samples, len(self._groups))
        start = self._start(kind, layer)
        for batch in self._batches:

            def put(out_ND: torch.Tensor, states: torch.Tensor, batch: _Batch = batch) -> torch.Tensor:
                return out_ND.index_copy(0, batch.at, states[batch.of].to(out_ND.dtype))

            hooks: list[Hook] = [
                (self._modules[kind, n], "out", partial(put, states=self._clean[kind, n]))
                for n in self.layers_of(kind, layer)
            ]
            with resumed(self._model, start, self._given[start][batch.source]), hooked(hooks):
                hidden = self._reader.hidden(batch.rows, batch.segments)
            found = self._probabilities(hidden, batch.ends)
            effects[batch.draws, batch.groups] = found - self.corrupted
        return effects.mean(0)


def num_layer_runs(model: LanguageModel, kinds: Sequence[Kind] = KINDS, window: int = 0) -> int:
    """Return how often `causal_trace` advances: layers that run, over all kinds and layers."""
    count = len(model.layers)
    half = (window or max(1, round(count / 5))) // 2
    if not can_resume(model):
        return len(kinds) * count * count
    starts = {kind: 0 if kind == "hidden" else half for kind in kinds}
    return sum(count - max(0, layer - shift) for shift in starts.values() for layer in range(count))


def expected_seconds(
    reader: Reader, facts: Sequence[Fact], kinds: Sequence[Kind] = KINDS, **options: Any
) -> float:
    """Return how long traces of some prompts will take: one restoration in that of middle length is timed.

    Args:
        reader: The model.
        facts: The prompts.
        kinds: What will be restored.
        options: As `Tracer` has them.
    """
    fact = sorted(facts, key=lambda one: len(one.text))[len(facts) // 2]
    reader.hidden(
        [mark_subject(reader.policy.tokenizer, fact.prompt, fact.subject).ids]
    )  # compiles and allocates
    began = time.monotonic()
    tracer = Tracer(reader, fact, kinds=kinds, **options)
    ready, kind, middle = time.monotonic(), kinds[0], len(reader.model.layers) // 2
    tracer.restore(kind, middle)
    per_run = (time.monotonic() - ready) / tracer.num_runs(kind, middle)
    return len(facts) * (ready - began + per_run * num_layer_runs(reader.model, kinds, tracer.window))


def causal_trace(
    reader: Reader, fact: Fact, *, advance: Callable[[int], None] = lambda count: None, **options: Any
) -> Trace:
    """Disturb the subject's embeddings, restore one state at a time, and see what brings the answer back.

    Noise is put on all of the subject's tokens. The states of every token are restored one by one, and those of the
    subject's tokens also together: where a name keeps what is known of it, its last token need not be the place.

    Args:
        reader: The model.
        fact: Prompt and subject; the answer is its `true`, else its `target`, else what the model says.
        advance: Called with the layers that ran, for each kind and layer; `num_layer_runs` in all.
        options: As `Tracer` has them.

    Source:
        arXiv 2202.05262, section 2.1: noise of 3 standard deviations, windows of 10 of 48 layers.
    """
    tracer, token_text = Tracer(reader, fact, **options), reader.policy.tokenizer.token_text
    effects: dict[Kind, torch.Tensor] = {}
    together: dict[Kind, torch.Tensor] = {}
    for kind in tracer.kinds:
        found = []
        for layer in range(len(reader.model.layers)):
            found.append(tracer.restore(kind, layer))
            advance(tracer.num_runs(kind, layer))
        table = torch.stack(found)
        effects[kind], together[kind] = table[:, :-1], table[:, -1]
    return Trace(
        effects=effects,
        together=together,
        clean=tracer.clean,
        corrupted=tracer.corrupted,
        tokens=tuple(token_text(tracer.marked.ids[place]) for place in tracer.places),
        subject=(tracer.marked.first, tracer.marked.last),
        answer=token_text(tracer.wanted),
        window=tracer.window,
    )


def locate(
    reader: Reader,
    facts: Sequence[Fact],
    *,
    seed: int = 0,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[int, list[float]]:
    """Return the layer whose feed-forward part brings most of the answers back, at all of the subject's tokens.

    Args:
        reader: The model.
        facts: Facts; those count that the model knows, or at least completes with something.
        seed: Seed of the noise.
        advance: Called with the layers that ran; `num_layer_runs` of mlp for each fact.

    Returns:
        The layer, and the mean effect of each (over layers with a memory, the last one left out).
    """
    total = torch.zeros(len(reader.model.layers))
    for fact in facts:
        asked = fact if fact.true else Fact(subject=fact.subject, prompt=fact.prompt, target="")
        found = causal_trace(reader, asked, advance=advance, seed=seed, **LOCATING)
        total += found.together["mlp"]
    total /= max(1, len(facts))
    allowed = [layer for layer in find_memories(reader.model) if layer < len(reader.model.layers) - 1]
    if not allowed:
        raise UserError("the model has one layer: what it says of a subject is read by no later token")
    best = max(allowed, key=lambda layer: float(total[layer]))
    return best, total.tolist()


# --- the logit lens ---------------------------------------------------------------------------------------------


def final_norm(model: LanguageModel) -> nn.Module:
    """Return the norm before the head."""
    if isinstance(model, GPT2):
        return model.transformer.ln_f
    assert isinstance(model, LlamaLike)
    return model.model.norm


@dataclass(frozen=True, slots=True)
class Lens:
    """What each layer would say, were it the last one.

    Attributes:
        words: [layers][tokens]: the likeliest next token.
        shares: [layers, tokens]: its probability.
        answer: [layers, tokens]: probability of the answer's token.
    """

    words: list[list[str]]
    shares: torch.Tensor
    answer: torch.Tensor


@torch.no_grad()
def logit_lens(reader: Reader, ids: Sequence[int], wanted: int) -> Lens:
    """Read the residual stream behind each layer through the final norm and the head.

    Args:
        reader: The model.
        ids: A prompt.
        wanted: The answer's token.
    """
    model, streams = reader.model, dict[int, torch.Tensor]()

    def keep(x_ND: torch.Tensor, layer: int) -> None:
        streams[layer] = x_ND[: len(ids)].detach().clone()

    with hooked([(layer, "out", partial(keep, layer=n)) for n, layer in enumerate(model.layers)]):
        reader.hidden([ids])
    norm, scale = final_norm(model), model.config.block.logit_scale
    words, shares, answers = [], [], []
    for layer in range(len(model.layers)):
        found = reader.logits(norm(streams[layer]) * scale).softmax(-1).float()
        best, index = found.max(-1)
        words.append([reader.policy.tokenizer.token_text(n) for n in index.tolist()])
        shares.append(best.cpu())
        answers.append(found[:, wanted].cpu())
    return Lens(words, torch.stack(shares), torch.stack(answers))


# --- direct logit attribution -----------------------------------------------------------------------------------


@torch.no_grad()
def attribution(reader: Reader, ids: Sequence[int], wanted: int) -> dict[str, float]:
    """Say how much each part of each layer adds to the answer's logit at the prompt's last token, directly.

    The final norm is linearised: its scale is that of the whole stream, so that the parts add up to the logit, but
    for a bias of the norm ("bias") and what a family does to the stream between layers.

    Args:
        reader: The model.
        ids: A prompt.
        wanted: The answer's token.

    Returns:
        By part: "embedding", "attention 0", "mlp 0", ...; "bias" where the norm has one; "total" is the logit, before
        a soft cap.
    """
    model, last = reader.model, len(ids) - 1
    before: dict[str, torch.Tensor] = {}

    def keep(x_ND: torch.Tensor, name: str) -> None:
        before[name] = x_ND[last].detach().double()

    hooks: list[Hook] = []
    for n, layer in enumerate(model.layers):
        hooks.append((layer, "in", partial(keep, name=f"in {n}")))
        hooks.append((layer, "out", partial(keep, name=f"out {n}")))
        hooks.append((part_of(layer, "mlp"), "out", partial(keep, name=f"mlp {n}")))
    norm = final_norm(model)
    hooks.append((norm, "in", partial(keep, name="stream")))
    with hooked(hooks):
        reader.hidden([ids])
    stream = before["stream"]
    gain = _gain(norm, stream)
    weight = reader.model.head_weight[wanted].double() * model.config.block.logit_scale

    def read(x_D: torch.Tensor) -> float:
        centred = x_D - x_D.mean() if isinstance(norm, nn.LayerNorm) else x_D
        return float(weight @ (centred * gain))

    found = {"embedding": read(before["in 0"])}
    for n, layer in enumerate(model.layers):
        added = before[f"mlp {n}"]
        if isinstance(layer, DecoderLayer):
            after = layer.norms[3]
            normed = (
                getattr(layer, after)(added.to(model.head_weight.dtype)[None])[0].double() if after else added
            )
            added = normed * layer.scale
        found[f"attention {n}"] = read(before[f"out {n}"] - before[f"in {n}"] - added)
        found[f"mlp {n}"] = read(added)
    if isinstance(norm, nn.LayerNorm) and norm.bias is not None:
        found["bias"] = float(weight @ norm.bias.double())
    found["total"] = float(weight @ norm(stream.to(model.head_weight.dtype)[None])[0].double())
    return found


def _gain(norm: nn.Module, stream_D: torch.Tensor) -> torch.Tensor:
    """Return what a norm multiplies each number of a stream with."""
    if isinstance(norm, nn.LayerNorm):
        centred, weight, eps = stream_D - stream_D.mean(), norm.weight.double(), float(norm.eps)
    else:
        assert isinstance(norm, RMSNorm)
        centred, weight, eps = stream_D, norm.weight.double() + norm.offset, norm.eps
    return weight * (centred.square().mean() + eps).rsqrt()


# --- attention --------------------------------------------------------------------------------------------------


@torch.no_grad()
def attention_maps(reader: Reader, ids: Sequence[int]) -> dict[int, torch.Tensor]:
    """Return the attention probabilities [H, T, T] of each layer that attends; recurrent layers have none.

    Args:
        reader: The model.
        ids: A prompt.
    """
    found: dict[int, torch.Tensor] = {}
    with _watched(found):
        reader.hidden([ids])
    return {layer: probs[:, : len(ids), : len(ids)] for layer, probs in found.items()}


@contextmanager
def _watched(found: dict[int, torch.Tensor]) -> Iterator[None]:
    """Compute the probabilities of one packed sequence beside what `Packed.attend` computes."""
    real = attention_module.Packed.attend

    def attend(
        self: Any, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Any = None
    ) -> torch.Tensor:
        rows = self.segments[0].length
        queries, keys = q[:rows].double().transpose(0, 1), k[:rows].double().transpose(0, 1)
        keys = keys.repeat_interleave(len(queries) // len(keys), 0)
        scores = queries @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        if rule is not None and rule.cap:
            scores = torch.tanh(scores / rule.cap) * rule.cap
        place = torch.arange(rows, device=q.device)
        window = 0 if rule is None else rule.window
        hidden = attention_module.outside(place[None, :], place[:, None], window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if rule is not None and rule.sinks_H is not None:
            sinks = rule.sinks_H.double()[:, None, None].expand(-1, rows, 1)
            scores = torch.cat([scores, sinks], -1)
        found[layer] = scores.softmax(-1)[..., :rows].float().cpu()
        return real(self, layer, q, k, v, rule)

    attention_module.Packed.attend = attend  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        attention_module.Packed.attend = real
