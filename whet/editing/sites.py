"""Where a decoder keeps facts, and how they are read there: down projections, subject tokens, activations by hooks.

Sequences are packed without padding, so that a place in a row is a place in the flat batch and nothing else: padded
batches with shifted places are the oldest fault of editing code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from whet.editing.facts import PLACE, Fact, is_spaced
from whet.generate.policy import Policy
from whet.model.attention import Packed, positions_of, whole_sequences
from whet.model.gpt2 import GPT2MLP
from whet.model.parts import MLP
from whet.model.quant import packed_parts
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import DecoderLayer, LanguageModel
from whet.types import Segment, UserError

TOKEN_BUDGET = 4096
"""Tokens of a forward pass."""

# --- memories ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Memory:
    """The down projection of a layer's feed-forward part, read as a memory of facts.

    Attributes:
        layer: Its layer.
        name: Of its weight among the model's parameters.
        module: The module.
        is_transposed: Whether the weight is stored [F, D].
        scale: Factor of what it adds to the residual stream.
        is_normed: Whether its output is normalised before it is added: then no change of it adds what one wants.
    """

    layer: int
    name: str
    module: nn.Module
    is_transposed: bool
    scale: float
    is_normed: bool

    @property
    def weight(self) -> nn.Parameter:
        """The stored weight."""
        return cast(nn.Parameter, self.module.weight)

    def matrix(self) -> torch.Tensor:
        """Return W [D, F], float64."""
        stored = self.weight.detach().double()
        return stored.t() if self.is_transposed else stored

    def add(self, change_DF: torch.Tensor) -> None:
        """Add a change [D, F] to the weight in place, rounded once."""
        with torch.no_grad():
            changed = self.matrix() + change_DF.to(self.weight.device)
            self.weight.copy_((changed.t() if self.is_transposed else changed).to(self.weight.dtype))


def memory_of(model: LanguageModel, name: str) -> Memory:
    """Return any matrix of a model by the name of its parameter, as a memory of no layer."""
    module = model.get_submodule(name.rpartition(".")[0])
    return Memory(-1, name, module, bool(module.transposed), 1.0, False)


def find_memories(model: LanguageModel) -> dict[int, Memory]:
    """Return the memories of a model by layer; layers of experts have none.

    Raises:
        UserError: If its matrices are quantised, or no layer has a dense feed-forward part.
    """
    if packed_parts(model):
        raise UserError("the model is quantised: edit the model that it was made of, and quantise that")
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[int, Memory] = {}
    for index, layer in enumerate(model.layers):
        mlp = layer.mlp
        if isinstance(mlp, GPT2MLP):
            module, scale, is_normed = mlp.c_proj, 1.0, False
        elif isinstance(mlp, MLP) and isinstance(layer, DecoderLayer):
            module, scale, is_normed = mlp.down_proj, layer.scale, bool(layer.norms[3])
        else:
            continue
        name = f"{names[id(module)]}.weight"
        found[index] = Memory(index, name, module, bool(module.transposed), scale, is_normed)
    if not found:
        raise UserError(
            "the feed-forward parts of this model are mixtures of experts: no memory that all tokens share; edit a "
            "dense model"
        )
    return found


def chosen_memories(model: LanguageModel, layers: Sequence[int]) -> list[Memory]:
    """Return the memories of some layers, in ascending order.

    Raises:
        UserError: If a layer is not there, is twice there, or has experts.
    """
    found = find_memories(model)
    for layer in layers:
        if layer not in range(len(model.layers)):
            raise UserError(f"layers: the model has layers 0 to {len(model.layers) - 1}, got {layer}")
        if layer not in found:
            raise UserError(
                f"layers: layer {layer} has a mixture of experts; dense are {', '.join(map(str, found))}"
            )
    if len(set(layers)) < len(layers):
        raise UserError(f"layers = {', '.join(map(str, layers))}: one is given twice")
    chosen = [found[layer] for layer in sorted(layers)]
    if chosen[-1].layer == len(model.layers) - 1:
        raise UserError(
            f"layers: what layer {chosen[-1].layer}, the last one, says of a subject is read by no later token; give "
            "earlier ones"
        )
    normed = next((memory for memory in chosen if memory.is_normed), None)
    if normed is not None and len(chosen) > 1:
        raise UserError(
            f"layers: this family normalises what {normed.name} writes before it is added, so that several layers "
            f"cannot share a target; give one, as in --layers {chosen[-1].layer}"
        )
    return chosen


# --- subjects ---------------------------------------------------------------------------------------------------


class Marked(NamedTuple):
    """The tokens of a prompt, with its subject's.

    Attributes:
        ids: All tokens, after BOS if the tokenizer starts texts with it.
        first: Place of the subject's first token.
        last: Place of its last one.
        ends_inside: Whether the last one holds text behind the subject, too.
    """

    ids: tuple[int, ...]
    first: int
    last: int
    ends_inside: bool = False


class Prompted(NamedTuple):
    """A prompt with a target.

    Attributes:
        ids: The tokens of both.
        start: Place of the target's first token.
    """

    ids: tuple[int, ...]
    start: int

    @property
    def targets(self) -> tuple[int, ...]:
        """The target's tokens."""
        return self.ids[self.start :]


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """Return BOS where texts start with it."""
    return [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []


def mark_subject(tokenizer: Tokenizer, template: str, subject: str) -> Marked:
    """Tokenise a template with its subject, and find the subject's tokens.

    Raises:
        UserError: If the subject has no token of its own.
    """
    before = template.partition(PLACE)[0]
    text = template.replace(PLACE, subject).rstrip(" ")
    start, end = len(before), min(len(text), len(before) + len(subject))
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    head = start_ids(tokenizer)
    spans = tokenizer.spans(text)
    own = [place for place, (_, low, high) in enumerate(spans) if low < end and high > start]
    if not own:
        raise UserError(f"subject {subject!r} has no token in {text[:80]!r}: the tokenizer cannot spell it")
    ids = (*head, *(index for index, _, _ in spans))
    first, last = own[0], own[-1]
    return Marked(ids, first + len(head), last + len(head), spans[last][2] > end)


def tokenisation_traps(tokenizer: Tokenizer, fact: Fact) -> list[str]:
    """Name what tokens do to a fact: a subject that ends inside a token, or text that they cannot spell."""
    marked, found = mark_subject(tokenizer, fact.prompt, fact.subject), []
    if marked.ends_inside:
        found.append(
            f"{fact.where}: the subject {fact.subject!r} ends inside the token "
            f"{tokenizer.token_text(marked.ids[marked.last])!r}, which other texts about it do not have"
        )
    unknown = tokenizer.unk_id
    if unknown is not None and unknown in prompted(tokenizer, fact.text, fact.target, fact.space).ids:
        found.append(
            f"{fact.where}: the tokenizer cannot spell all of {fact.text[:60]!r} or {fact.target[:40]!r}"
        )
    return found


def prompted(tokenizer: Tokenizer, prompt: str, target: str, space: bool | None = None) -> Prompted:
    """Tokenise a prompt and what follows it, with a space between them where one is written there.

    A prompt's own space at the end is moved into the target, where tokenizers have it; where the tokens of the whole
    text do not begin with those of the prompt, both are tokenised apart.

    Args:
        tokenizer: The model's.
        prompt: The prompt.
        target: What follows it.
        space: Whether a space stands between them; None: if the prompt ends with one, if the target begins with one, or
            if their scripts and punctuation call for one (`is_spaced`) and the tokenizer can spell it.
    """
    bare = prompt.rstrip(" ")
    if not bare or target[:1].isspace():
        gap = ""
    elif space is None and bare == prompt and target:
        gap = " " if is_spaced(bare, target) and _spells(tokenizer, bare, target) else ""
    else:
        gap = "" if space is False else " "
    head = start_ids(tokenizer)
    asked, whole = tokenizer.encode(bare), tokenizer.encode(bare + gap + target)
    if whole[: len(asked)] != asked or len(whole) == len(asked):
        whole = [*asked, *(tokenizer.encode(gap + target) if gap or not bare else _inside(tokenizer, target))]
    return Prompted((*head, *whole), len(head) + len(asked))


def _spells(tokenizer: Tokenizer, bare: str, target: str) -> bool:
    """Say whether a space may stand there: not if the vocabulary has everything but that space."""
    return tokenizer.keeps(f"{bare} {target}") or not tokenizer.keeps(bare + target)


def _inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenise text as inside a line: some tokenizers put a space before the first word of whatever they are given."""
    before, both = tokenizer.encode("\n"), tokenizer.encode("\n" + text)
    return both[len(before) :] if both[: len(before)] == before else tokenizer.encode(text)


# --- reading ----------------------------------------------------------------------------------------------------

Side = Literal["in", "out"]


class Read(NamedTuple):
    """What is read of a pass: the input or the output of a module."""

    module: nn.Module
    side: Side = "out"


Hook = tuple[nn.Module, Side, Callable[[torch.Tensor], Any]]
"""A module, a side of it, and what is called with the tensor there; what that returns, if anything, takes its place."""


@contextmanager
def hooked(hooks: Sequence[Hook]) -> Iterator[None]:
    """Call functions with the input or output of modules within this context."""
    with ExitStack() as stack:
        for module, side, change in hooks:
            if side == "in":
                handle = module.register_forward_pre_hook(partial(_before, change))
            else:
                handle = module.register_forward_hook(partial(_after, change))
            stack.callback(handle.remove)
        yield


def _before(change: Callable[[torch.Tensor], Any], _: nn.Module, arguments: tuple[Any, ...]) -> Any:
    changed = change(arguments[0])
    return None if changed is None else (changed, *arguments[1:])


def _after(change: Callable[[torch.Tensor], Any], _: nn.Module, arguments: Any, out: torch.Tensor) -> Any:
    return change(out)


class Reader:
    """Runs a model over packed rows and reads activations.

    Args:
        policy: The model with its tokenizer.
        budget: Tokens of a pass.
    """

    def __init__(self, policy: Policy, budget: int = TOKEN_BUDGET) -> None:
        self.policy, self.model, self.budget = policy, policy.model, budget

    def hidden(self, rows: Sequence[Sequence[int]], segments: Sequence[Segment] = ()) -> torch.Tensor:
        """Return the hidden states [N, D] of rows, one below the other, in one pass.

        Args:
            rows: Token ids.
            segments: What each row shares with an earlier one; none: nothing.
        """
        segments = segments or whole_sequences([len(row) for row in rows])
        longest = max(segment.shared + segment.length for segment in segments)
        context = self.model.config.max_positions
        if longest > context:
            raise UserError(f"a prompt of {longest} tokens does not fit the model's context of {context}")
        device = self.policy.device
        tokens_N = torch.tensor([token for row in rows for token in row], device=device)
        positions_N = positions_of(segments, device)
        packed = Packed(segments, device, self.policy.attention)
        return self.model(tokens_N, positions_N, packed)

    def chunks(self, rows: Sequence[Sequence[int]]) -> Iterator[range]:
        """Yield runs of rows that fit one pass."""
        start, tokens = 0, 0
        for place, row in enumerate(rows):
            if place > start and tokens + len(row) > self.budget:
                yield range(start, place)
                start, tokens = place, 0
            tokens += len(row)
        if start < len(rows):
            yield range(start, len(rows))

    @torch.no_grad()
    def read(
        self, rows: Sequence[Sequence[int]], places: Sequence[int], reads: Mapping[str, Read]
    ) -> dict[str, torch.Tensor]:
        """Return what some modules had as input or output at one place of each row, [rows, width] each.

        Args:
            rows: Token ids.
            places: A place in each row.
            reads: What is read, by a name of the caller's.
        """
        found: dict[str, list[torch.Tensor]] = {name: [] for name in reads}
        for chunk in self.chunks(rows):
            part = [rows[place] for place in chunk]
            at = torch.tensor(
                flat_places(part, [places[place] for place in chunk]), device=self.policy.device
            )

            # Not longer than needed: what follows the last place cannot be seen from it.
            def see(x_ND: torch.Tensor, name: str, at: torch.Tensor = at) -> None:
                found[name].append(x_ND.index_select(0, at).detach().clone())

            hooks: list[Hook] = [
                (read.module, read.side, partial(see, name=name)) for name, read in reads.items()
            ]
            with hooked(hooks):
                self.hidden(part)
        return {name: torch.cat(parts) for name, parts in found.items()}

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of hidden states, differentiable; -inf for ids that are never sampled."""
        model = self.model
        logits_NV, cap = F.linear(hidden_ND, model.head_weight), model.config.block.logit_cap
        if cap:
            logits_NV = torch.tanh(logits_NV / cap) * cap
        is_drawn_V = torch.arange(logits_NV.shape[1], device=logits_NV.device) < model.num_valid_tokens
        return torch.where(is_drawn_V, logits_NV, float("-inf"))

    @torch.no_grad()
    def next_logprobs(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the log-probabilities [rows, V] of what follows each row."""
        found = []
        for chunk in self.chunks(rows):
            part = [rows[place] for place in chunk]
            hidden_ND = self.hidden(part)
            at = torch.tensor(flat_places(part, [len(row) - 1 for row in part]), device=hidden_ND.device)
            found.append(self.logits(hidden_ND.index_select(0, at)).log_softmax(-1))
        return torch.cat(found)


def flat_places(rows: Sequence[Sequence[int]], places: Sequence[int]) -> list[int]:
    """Return the places in a flat batch of one place in each row."""
    found, start = [], 0
    for row, place in zip(rows, places, strict=True):
        assert 0 <= place < len(row), (place, len(row))
        found.append(start + place)
        start += len(row)
    return found


@dataclass(slots=True)
class Contexts:
    """Beginnings that a subject is read behind, besides the bare prompt: what they have in common is the subject's.

    Attributes:
        texts: Texts before the prompt, '' for none.
    """

    texts: tuple[str, ...] = field(default=("",))

    def templates(self, prompt: str) -> list[str]:
        """Return a prompt's template behind each of them."""
        return [f"{text}. {prompt}" if text else prompt for text in self.texts]
