"""A model that learns a few facts in seconds, and random ones of every family: what edits are tested on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import torch

from whet.algo.packing import TrainingSequence, pack
from whet.generate.policy import Policy
from whet.generate.scoring import score_micro_batch
from whet.model.config import Block, LayerSpec, ModelConfig
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import init_weights
from whet.model.weights import build_model
from whet.schema import SCHEMAS

PEOPLE = [f"{first} {last}" for first in ("Ann", "Ben", "Cid") for last in ("Oak", "Elm", "Ash", "Yew")]
CITIES = ("Rome", "Oslo", "Lima", "Kyiv", "Bern")
FOODS = ("rice", "figs", "kale", "plum")
HOMES = {person: CITIES[(3 * n + n // 5) % 5] for n, person in enumerate(PEOPLE)}
TASTES = {person: FOODS[(n + n // 4) % 4] for n, person in enumerate(PEOPLE)}
LIVES = ("{} lives in", "The home of {} is in", "You can visit {} in")
EATS = ("{} eats",)
WORDS = sorted(
    {
        word
        for text in (*LIVES, *EATS, *PEOPLE, "Hello there . is a friend")
        for word in text.replace("{}", "").split()
    }
    | {*CITIES, *FOODS, "Hello", "there", ".", "a", "friend"}
)
SHAPE = ModelConfig(
    hidden_size=48,
    intermediate_size=96,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    max_positions=48,
    init_std=0.08,
    # Each token sees the one before it: what is known of a subject has to be at its last token before it goes on, as
    # it is in large models; a small one would otherwise put the two names together where it needs them.
    block=Block(layers=(LayerSpec(window=2),) * 4),
)
LR = 1e-2


def tokenizer() -> Tokenizer:
    return Tokenizer.words([*(f" {word}" for word in WORDS), *WORDS])


def sentences() -> list[str]:
    found = []
    for templates, table in ((LIVES, HOMES), (EATS, TASTES)):
        found += [
            f"{template.replace('{}', person)} {value}"
            for template in templates
            for person, value in table.items()
        ]
    found += [f"{person} is a friend" for person in PEOPLE]
    # Behind another sentence, too: an edit is read in contexts.
    return (
        found + [f"Hello there. {text}" for text in found] + [f"{a} . {b}" for a, b in pairwise(found[::7])]
    )


def fresh(shape: ModelConfig = SHAPE, seed: int = 0) -> Policy:
    words = tokenizer()
    model = build_model(replace(shape, vocab_size=words.vocab_size))
    init_weights(model, seed)
    return Policy(model, words, SCHEMAS["none"])


@cache
def trained(shape: ModelConfig = SHAPE, steps: int = 120) -> dict[str, torch.Tensor]:
    """Return the weights of a model that knows all facts; trained once a process."""
    policy = fresh(shape)
    rows = [policy.tokenizer.encode(text) for text in sentences()]
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=LR, weight_decay=0.01, betas=(0.9, 0.95))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 10, (steps - step) / (0.6 * steps))
        chosen = torch.randperm(len(rows), generator=generator)[:64].tolist()
        sequences = [
            TrainingSequence(prompt_ids=tuple(rows[n][:1]), completion_ids=tuple(rows[n][1:])) for n in chosen
        ]
        (micro,) = pack(sequences, token_budget=2**20, device=policy.device).micro_batches
        logprobs, entropies = score_micro_batch(policy.model, micro)
        # Not too sure of anything: what is known with a probability of 1 - 1e-5 cannot be searched otherwise.
        loss = -logprobs.mean() - 0.1 * entropies.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in policy.model.state_dict().items()}


def patient(shape: ModelConfig = SHAPE) -> Policy:
    """Return a copy of the trained model, frozen."""
    weights = trained(shape)
    policy = fresh(shape)
    policy.model.load_state_dict(weights)
    policy.model.requires_grad_(False)
    return policy


def says(policy: Policy, prompts: Sequence[str]) -> list[str]:
    """Return the likeliest next word of each prompt."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([policy.tokenizer.encode(prompt)])
        with torch.no_grad():
            found.append(policy.tokenizer.token_text(int(policy.model.logits(ids)[0, -1].argmax())).strip())
    return found
