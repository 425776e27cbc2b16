"""Looking inside: causal tracing, the logit lens, direct logit attribution and attention, of one prompt."""

from __future__ import annotations

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
    flat_places,
    hooked,
    mark_subject,
    prompted,
)
from whet.model import attention as attention_module
from whet.model.gpt2 import GPT2, GPT2Block
from whet.model.parts import RMSNorm
from whet.model.transformer import DecoderLayer, LanguageModel, LlamaLike
from whet.types import UserError

Kind = Literal["hidden", "mlp", "attention"]
KINDS: tuple[Kind, ...] = ("hidden", "mlp", "attention")


@dataclass(frozen=True, slots=True)
class Trace:
    """How much of an answer's probability each state brings back.

    Attributes:
        effects: By kind, [layers, tokens]: probability with the state restored, minus that of the corrupted run.
        clean: Probability of the answer in the clean run.
        corrupted: Its mean with the subject's embeddings disturbed.
        tokens: Texts of the prompt's tokens.
        subject: Places of the subject's first and last token.
        answer: The token that is predicted.
        window: Layers around each that are restored together, of mlp and attention.
    """

    effects: dict[Kind, torch.Tensor]
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


def causal_trace(
    reader: Reader,
    fact: Fact,
    *,
    noise: float = 3.0,
    num_samples: int = 10,
    window: int = 0,
    kinds: Sequence[Kind] = KINDS,
    places: Sequence[int] | None = None,
    seed: int = 0,
    advance: Callable[[int], None] = lambda count: None,
) -> Trace:
    """Disturb the subject's embeddings, restore one state at a time, and see what brings the answer back.

    Args:
        reader: The model.
        fact: Prompt and subject; the answer is its `true`, else its `target`, else what the model says.
        noise: Standard deviation of the noise, in those of what the first layer reads.
        num_samples: Draws of the noise.
        window: Neighbouring layers restored together, of mlp and attention; 0 for a fifth of the layers.
        kinds: What is restored.
        places: Tokens whose states are restored; default: all.
        seed: Seed of the noise.
        advance: Called with 1 for each kind and layer.

    Source:
        arXiv 2202.05262, section 2.1: noise of 3 standard deviations, windows of 10 of 48 layers.
    """
    model, tokenizer = reader.model, reader.policy.tokenizer
    marked = mark_subject(tokenizer, fact.prompt, fact.subject)
    ids, count = marked.ids, len(model.layers)
    wanted = answer_id(reader, fact, marked)
    chosen = list(range(len(ids)) if places is None else places)
    window = window or max(1, round(count / 5))
    modules: dict[tuple[Kind, int], nn.Module] = {
        (kind, n): part_of(layer, kind) for kind in kinds for n, layer in enumerate(model.layers)
    }
    clean: dict[tuple[Kind, int], torch.Tensor] = {}
    first: list[torch.Tensor] = []

    def keep(x_ND: torch.Tensor, key: tuple[Kind, int]) -> None:
        clean[key] = x_ND[: len(ids)].detach().clone()

    hooks: list[Hook] = []
    for key, module in modules.items():
        hooks.append((module, "out", partial(keep, key=key)))
    hooks.append((model.layers[0], "in", lambda x: first.append(x[: len(ids)].detach().clone())))
    with torch.no_grad(), hooked(hooks):
        hidden = reader.hidden([ids])
        clean_p = float(reader.logits(hidden[len(ids) - 1 :][:1]).softmax(-1)[0, wanted])
    spread = noise * float(first[0].float().std())
    own = range(marked.first, marked.last + 1)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(num_samples, len(own), first[0].shape[1], generator=generator) * spread
    drawn = drawn.to(first[0])

    def probabilities(
        samples: Sequence[int], restored: Sequence[tuple[nn.Module, torch.Tensor, Sequence[int]]]
    ) -> torch.Tensor:
        """Run disturbed rows, with clean states [T, D] put back at one place of each row (-1: nowhere)."""
        rows = [ids] * len(samples)
        starts = flat_places(rows, [0] * len(rows))

        def disturb(x_ND: torch.Tensor) -> torch.Tensor:
            at = torch.tensor([start + place for start in starts for place in own], device=x_ND.device)
            return x_ND.index_add(0, at, drawn[list(samples)].reshape(-1, x_ND.shape[1]))

        def put(out_ND: torch.Tensor, states: torch.Tensor, at: Sequence[int]) -> torch.Tensor:
            where = torch.tensor([s + p for s, p in zip(starts, at, strict=True)], device=out_ND.device)
            return out_ND.index_copy(0, where, states[list(at)])

        hooks: list[Hook] = [(model.layers[0], "in", disturb)]
        for module, states, at in restored:
            hooks.append((module, "out", partial(put, states=states, at=at)))
        with torch.no_grad(), hooked(hooks):
            hidden = reader.hidden(rows)
            ends = torch.tensor([start + len(ids) - 1 for start in starts], device=hidden.device)
            return reader.logits(hidden.index_select(0, ends)).softmax(-1)[:, wanted].float().cpu()

    per_pass = max(1, reader.budget // len(ids))
    everyone = [(sample, place) for sample in range(num_samples) for place in chosen]
    draws = [range(n, min(n + per_pass, num_samples)) for n in range(0, num_samples, per_pass)]
    corrupted = float(torch.cat([probabilities(part, ()) for part in draws]).mean())
    effects: dict[Kind, torch.Tensor] = {}
    for kind in kinds:
        table = torch.zeros(count, len(chosen))
        half = 0 if kind == "hidden" else window // 2
        for layer in range(count):
            low = max(0, layer - half)
            layers = range(low, layer + 1) if kind == "hidden" else range(low, min(count, low + window))
            found = []
            for start in range(0, len(everyone), per_pass):
                part = everyone[start : start + per_pass]
                at = [place for _, place in part]
                put_back = [(modules[kind, n], clean[kind, n], at) for n in layers]
                found.append(probabilities([sample for sample, _ in part], put_back))
            table[layer] = torch.cat(found).view(num_samples, len(chosen)).mean(0) - corrupted
            advance(1)
        effects[kind] = table
    return Trace(
        effects=effects,
        clean=clean_p,
        corrupted=corrupted,
        tokens=tuple(tokenizer.token_text(ids[place]) for place in chosen),
        subject=(marked.first, marked.last),
        answer=tokenizer.token_text(wanted),
        window=window,
    )


def locate(reader: Reader, facts: Sequence[Fact], *, seed: int = 0) -> tuple[int, list[float]]:
    """Return the layer whose feed-forward part brings most of the answers back at the subject's last token.

    Args:
        reader: The model.
        facts: Facts; those count that the model knows, or at least completes with something.
        seed: Seed of the noise.

    Returns:
        The layer, and the mean effect of each (over layers with a memory, the last one left out).
    """
    total = torch.zeros(len(reader.model.layers))
    for fact in facts:
        asked = fact if fact.true else Fact(subject=fact.subject, prompt=fact.prompt, target="")
        marked = mark_subject(reader.policy.tokenizer, fact.prompt, fact.subject)
        found = causal_trace(reader, asked, kinds=("mlp",), places=[marked.last], num_samples=6, seed=seed)
        total += found.effects["mlp"][:, 0]
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
