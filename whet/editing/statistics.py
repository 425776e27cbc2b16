"""Second moments of a memory's keys over prose: gathered once for a model and a layer, kept, and taken up again."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from whet.config import cache_folder
from whet.editing.facts import PLACE
from whet.editing.sites import Contexts, Hook, Memory, Reader, hooked, start_ids
from whet.generate.engine import Request
from whet.generate.policy import Policy
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.model.config import STORED, ModelConfig
from whet.model.transformer import LanguageModel
from whet.storage.commit import save_tensors
from whet.types import UserError

SAVE_EVERY_S = 20.0
WINDOW = 256
"""Tokens of a window over prose, at most: keys depend little on what is further back."""
OPENINGS = ("The", "Therefore", "Because", "I", "You")
"""First words of what the model writes itself, as in the published code."""

UNREAD = frozenset(
    {
        *(
            "family",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "max_positions",
            "init_std",
        ),
        *("tie_embeddings", "attention_bias", "mlp_bias", "is_reward", "vision", "source"),
    }
)
"""Fields of a model's config that change nothing that is computed, or that its weights show."""


def digests_of(model: LanguageModel) -> tuple[str, str]:
    """Return SHA-256 of what a model computes, and that of its weights alone, which earlier records name.

    The same weights compute something else with another base of the rotary frequencies, say: a record, and statistics
    of keys, belong to both together.
    """
    weights = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        stored = parameter.detach().cpu().contiguous()
        weights.update(f"{name}\x00{stored.dtype}\x00{tuple(stored.shape)}\x00".encode())
        weights.update(stored.view(torch.uint8).numpy().data if stored.numel() else b"")
    alone = weights.hexdigest()
    settings = json.dumps(_forward_settings(model.config), sort_keys=True)
    return hashlib.sha256(f"{alone}\x00{settings}".encode()).hexdigest(), alone


def digest_of(model: LanguageModel) -> str:
    """Return SHA-256 of all weights of a model, by name, and of the settings that it computes with."""
    return digests_of(model)[0]


def _forward_settings(config: ModelConfig) -> Any:
    """Return the fields of a config that decide what is computed and that names and shapes of weights do not show."""
    found = asdict(config)
    for name in UNREAD | ({"rope_theta", "rope_scaling"} if config.family == "gpt2" else set()):
        del found[name]
    found["block"] = {name: value for name, value in found["block"].items() if name not in STORED}
    return _plain(found)


def _plain(value: Any) -> Any:
    """Return a value with all numbers as floats: a config.json may have 10000 or 10000.0."""
    if isinstance(value, dict):
        return {name: _plain(own) for name, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(own) for own in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def windows_of(policy: Policy, text: str, most: int) -> list[tuple[int, ...]]:
    """Cut prose into windows of tokens, each after BOS where the tokenizer has it.

    Args:
        policy: The model with its tokenizer.
        text: Prose.
        most: Tokens in all, at most.

    Raises:
        UserError: If there are fewer than two tokens.
    """
    ids = policy.tokenizer.encode(text)[:most]
    if len(ids) < 2:
        raise UserError(f"the prose has {len(ids)} tokens: expected at least 2; give a longer text")
    head = start_ids(policy.tokenizer)
    width = min(WINDOW, policy.model.config.max_positions - len(head))
    return [(*head, *ids[start : start + width]) for start in range(0, len(ids), width)]


def own_prose(policy: Policy, tokens: int, seed: int, longest: int = 0) -> list[tuple[int, ...]]:
    """Return windows of text that the model writes itself, where there is no prose at hand.

    Args:
        policy: The model.
        tokens: Tokens in all, about.
        seed: Seed of the samples.
        longest: Tokens that a window is cut to, of as many as there would be; 0 for whole ones.
    """
    width = min(WINDOW, policy.model.config.max_positions) - 8
    count = max(1, round(tokens / width / len(OPENINGS)))
    head = start_ids(policy.tokenizer)
    requests = [
        Request(
            prompt_ids=(*head, *policy.tokenizer.encode(word)),
            seeds=tuple(sequence_seed("prose", seed, word, sample) for sample in range(count)),
        )
        for word in OPENINGS
    ]
    rows = policy.engine(stops=False).generate(
        requests, SamplingParams(max_new_tokens=min(width, longest or width))
    )
    return [
        (*request.prompt_ids, *done.ids) for request, row in zip(requests, rows, strict=True) for done in row
    ]


def own_contexts(policy: Policy, count: int, length: int, seed: int) -> Contexts:
    """Let the model write beginnings of some tokens each, which go before a prompt; the first is none.

    Args:
        policy: The model.
        count: Beginnings besides none.
        length: Tokens of each.
        seed: Seed of the samples.

    Source:
        The published code of MEMIT: five beginnings of ten tokens, after The, Therefore, Because, I, You.
    """
    if not count:
        return Contexts()
    head = start_ids(policy.tokenizer)
    words = [OPENINGS[n % len(OPENINGS)] for n in range(count)]
    requests = [
        Request(
            prompt_ids=(*head, *policy.tokenizer.encode(word)),
            seeds=(sequence_seed("context", seed, word, n),),
        )
        for n, word in enumerate(words)
    ]
    rows = policy.engine().generate(requests, SamplingParams(max_new_tokens=length, top_k=5))
    texts = []
    for word, request, (done,) in zip(words, requests, rows, strict=True):
        said = policy.completion_text(request.prompt_ids, done.ids).replace(PLACE, " ")
        texts.append(" ".join((word + said).split()).rstrip("."))
    return Contexts(("", *dict.fromkeys(texts)))


def gather_moments(
    reader: Reader,
    memories: Sequence[Memory],
    windows: Sequence[tuple[int, ...]],
    *,
    model_digest: str,
    folder: Path | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[int, torch.Tensor]:
    """Return C = E[k k^T] of each memory, float64 [F, F], the mean over all tokens of the windows.

    What is there already is not computed again; a run that was interrupted goes on behind its last saved window.

    Args:
        reader: The model.
        memories: The memories.
        windows: Token ids.
        model_digest: Names the model: its weights, and what it computes with them.
        folder: Where moments are kept; default: the user's cache.
        advance: Called with the number of windows that are done.
    """
    home = (cache_folder() / "moments" if folder is None else folder) / _key(model_digest, windows)
    wanted = {memory.layer: memory for memory in memories}
    found: dict[int, torch.Tensor] = {}
    for layer in list(wanted):
        stored = _load(home / f"layer_{layer}.safetensors")
        if stored is not None and int(stored["windows"]) == len(windows):
            found[layer] = stored["sum"] / float(stored["tokens"])
            del wanted[layer]
    if not wanted:
        advance(len(windows))
        return found
    unfinished = home / f"partial_{'_'.join(map(str, wanted))}.safetensors"
    sums, tokens, done = _begun(unfinished, wanted)
    advance(done)
    saved = time.monotonic()
    rows = windows[done:]
    for chunk in reader.chunks(rows):
        part = [rows[place] for place in chunk]
        count = sum(map(len, part))

        def see(keys_NF: torch.Tensor, layer: int, count: int = count) -> None:
            real = keys_NF[:count].double()  # the model pads the rows of a pass: those are no tokens
            sums[layer] += (real.t() @ real).to(sums[layer].device)

        hooks: list[Hook] = [
            (memory.module, "in", partial(see, layer=layer)) for layer, memory in wanted.items()
        ]
        with torch.no_grad(), hooked(hooks):
            reader.hidden(part)
        tokens += count
        done += len(part)
        advance(len(part))
        if time.monotonic() - saved > SAVE_EVERY_S:
            _save(unfinished, {**{f"sum_{n}": s for n, s in sums.items()}, **_counts(tokens, done)})
            saved = time.monotonic()
    for layer, total in sums.items():
        _save(home / f"layer_{layer}.safetensors", {"sum": total, **_counts(tokens, done)})
        found[layer] = total / tokens
    unfinished.unlink(missing_ok=True)
    return found


def _key(model_digest: str, windows: Sequence[tuple[int, ...]]) -> str:
    text = json.dumps([model_digest, windows], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _counts(tokens: int, windows: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.tensor(tokens), "windows": torch.tensor(windows)}


def _begun(path: Path, wanted: dict[int, Memory]) -> tuple[dict[int, torch.Tensor], int, int]:
    """Return the sums of an interrupted run with its tokens and windows; zeros where there is none."""
    stored = _load(path)
    if stored is not None and all(f"sum_{layer}" in stored for layer in wanted):
        sums = {layer: stored[f"sum_{layer}"] for layer in wanted}
        return sums, int(stored["tokens"]), int(stored["windows"])
    widths = {layer: memory.matrix().shape[1] for layer, memory in wanted.items()}
    return {layer: torch.zeros(w, w, dtype=torch.float64) for layer, w in widths.items()}, 0, 0


def _load(path: Path) -> dict[str, torch.Tensor] | None:
    if not path.is_file():
        return None
    try:
        return load_file(path)
    except (OSError, SafetensorError):
        return None  # torn by an interruption: computed again


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}")
    save_tensors(tensors, part)
    part.replace(path)
