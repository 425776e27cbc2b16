"""The whole of MEMIT against another implementation of it in float64: a decoder of its own, autograd, plain inverses.

Nothing of `whet.editing` is called by the oracle; it reads the model's weights by name, and the tokenizer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from patient import SHAPE, WORDS, fresh

from whet.editing.editor import Editor, MethodConfig
from whet.editing.facts import Fact, read_facts
from whet.editing.sites import Contexts, chosen_memories
from whet.editing.targets import TargetConfig, find_targets
from whet.generate.policy import Policy
from whet.model.config import Block

PLAIN = replace(SHAPE, block=Block(), init_std=0.2)
ROWS = [
    {"subject": "Ann Oak", "prompt": "You can visit {} in", "target": "Oslo"},
    {"subject": "Ben Elm", "prompt": "{} eats", "target": "a friend"},  # two tokens
    {"subject": "Cid Yew", "prompt": "The home of {} is in", "target": "Bern"},
]
LATER = [{"subject": "Ann Elm", "prompt": "{} lives in", "target": "Lima"}]
PROSE = " ".join(random.Random(0).choices([word for word in WORDS if word != "."], k=803))
"""More tokens than a key has numbers, so that C can be inverted."""
LAYERS = (0, 1, 2)
WEIGHT = 3.0
SEARCH = TargetConfig(steps=7, lr=0.3, kl=0.2, decay=0.4, clamp=0.6, stop_loss=0.0)
STORED = 3e-6
"""Deltas are stored in float32; each factor is rounded once."""


class Oracle:
    """A Llama in float64, one row at a time, as a function of its weights."""

    def __init__(self, policy: Policy) -> None:
        self.encode = policy.tokenizer.encode
        self.w = {name: value.detach().clone().double() for name, value in policy.model.named_parameters()}

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + PLAIN.norm_eps) * self.w[name]

    def rotate(self, x_THC: torch.Tensor) -> torch.Tensor:
        count, _, width = x_THC.shape
        half = width // 2
        # The tables of angles are float32 in every model (docs/engine.md); all else is float64 here.
        waves = PLAIN.rope_theta ** (torch.arange(0, width, 2).float() / width)
        angle = torch.arange(count).float()[:, None] * (1 / waves)
        cos, sin = angle.cos().double()[:, None], angle.sin().double()[:, None]
        a, b = x_THC[..., :half], x_THC[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def run(
        self, ids: Sequence[int], added: tuple[int, int, torch.Tensor] | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """Return keys and residual stream behind each layer, and log-probabilities; with (layer, place, delta)."""
        keys, streams = [], []
        x = self.w["model.embed_tokens.weight"][list(ids)]
        mask = torch.full((len(ids), len(ids)), -math.inf, dtype=torch.float64).triu(1)
        for n in range(PLAIN.num_layers):
            at = f"model.layers.{n}."
            own = self.norm(x, f"{at}input_layernorm.weight")
            q, k, v = (
                (own @ self.w[f"{at}self_attn.{part}_proj.weight"].t()).view(len(ids), -1, PLAIN.head_dim)
                for part in "qkv"
            )
            times = PLAIN.num_heads // PLAIN.num_kv_heads
            q, k, v = (
                self.rotate(q),
                self.rotate(k).repeat_interleave(times, 1),
                v.repeat_interleave(times, 1),
            )
            scores = torch.einsum("thc,shc->hts", q, k) / math.sqrt(PLAIN.head_dim) + mask
            mixed = torch.einsum("hts,shc->thc", scores.softmax(-1), v).reshape(len(ids), -1)
            x = x + mixed @ self.w[f"{at}self_attn.o_proj.weight"].t()
            own = self.norm(x, f"{at}post_attention_layernorm.weight")
            gate, up = (own @ self.w[f"{at}mlp.{part}_proj.weight"].t() for part in ("gate", "up"))
            keys.append(F.silu(gate) * up)
            x = x + keys[-1] @ self.w[f"{at}mlp.down_proj.weight"].t()
            if added is not None and added[0] == n:
                x = x + F.one_hot(torch.tensor(added[1]), len(ids)).double()[:, None] * added[2]
            streams.append(x)
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return keys, streams, (self.norm(x, "model.norm.weight") @ head.t()).log_softmax(-1)

    def place(self, template: str, subject: str) -> tuple[list[int], int]:
        """Return a prompt's tokens and the place of the subject's last one: every word is a token here."""
        before, _, after = template.partition("{}")
        ids = self.encode(before + subject + after)
        return ids, len(self.encode(before + subject)) - 1

    def target(self, row: dict[str, str], contexts: Sequence[str], layer: int) -> torch.Tensor:
        """Return the residual stream that a subject is to have behind a layer."""
        prompt, subject = row["prompt"], row["subject"]
        bare, last = self.place(prompt, subject)
        stream = self.run(bare)[1][layer][last].detach()
        essence, its = self.place("{} is a", subject)
        before = self.run(essence)[2][-1].detach()
        unit = stream.norm() / math.sqrt(len(stream))
        scaled = torch.zeros_like(stream, requires_grad=True)
        adam = torch.optim.Adam([scaled], lr=SEARCH.lr)
        for _ in range(SEARCH.steps):
            delta = scaled * unit
            loss = torch.zeros((), dtype=torch.float64)
            for context in contexts:
                template = f"{context}. {prompt}" if context else prompt
                ids, place = self.place(template, subject)
                whole = self.encode(template.replace("{}", subject) + " " + row["target"])
                said = self.run(whole, (layer, place, delta))[2][len(ids) - 1 : -1]
                loss = loss - said.gather(1, torch.tensor(whole[len(ids) :])[:, None]).mean() / len(contexts)
            now = self.run(essence, (layer, its, delta))[2][-1]
            loss = loss + SEARCH.kl * (now.exp() * (now - before)).sum()
            loss = loss + SEARCH.decay * delta.square().sum().add(1e-300).sqrt() / stream.square().sum()
            adam.zero_grad()
            loss.backward()
            adam.step()
            with torch.no_grad():
                most = SEARCH.clamp * stream.norm() / (scaled * unit).norm()
                scaled.mul_(most.clamp(max=1.0))
        return stream + scaled.detach() * unit

    def key(self, row: dict[str, str], contexts: Sequence[str], layer: int) -> torch.Tensor:
        found = []
        for context in contexts:
            template = f"{context}. {row['prompt']}" if context else row["prompt"]
            ids, place = self.place(template, row["subject"])
            found.append(self.run(ids)[0][layer][place])
        return torch.stack(found).mean(0)

    def memit(
        self,
        rows: Sequence[dict[str, str]],
        contexts: Sequence[str],
        moments: Sequence[torch.Tensor],
        earlier: dict[int, torch.Tensor],
    ) -> None:
        """Change the weights; `earlier` has the keys of earlier edits by layer, and gets these."""
        wanted = torch.stack([self.target(row, contexts, LAYERS[-1]) for row in rows])
        for turn, layer in enumerate(LAYERS):
            keys = torch.stack([self.key(row, contexts, layer) for row in rows])
            now = []
            for row in rows:
                ids, place = self.place(row["prompt"], row["subject"])
                now.append(self.run(ids)[1][LAYERS[-1]][place])
            missing = (wanted - torch.stack(now)) / (len(LAYERS) - turn)
            system = WEIGHT * moments[layer] + keys.t() @ keys
            if layer in earlier:
                system = system + earlier[layer].t() @ earlier[layer]
            change = missing.t() @ keys @ torch.linalg.inv(system)
            name = f"model.layers.{layer}.mlp.down_proj.weight"
            self.w[name] = self.w[name] + change.detach()
            earlier[layer] = torch.cat([earlier.get(layer, keys[:0]), keys]).detach()


@pytest.mark.ci
def test_the_whole_pipeline_in_float64(tmp_path: Path) -> None:
    policy = fresh(PLAIN)
    policy.model.double()
    oracle = Oracle(policy)
    editor = Editor(policy, "oracle", cache=tmp_path)
    editor.set_prose(PROSE, 10_000)
    method = MethodConfig(layers=LAYERS, num_contexts=2, context_tokens=3, prose_weight=WEIGHT, target=SEARCH)
    contexts = editor._contexts_of(method, 0).texts
    assert len(contexts) == 3
    # The decoders are the same function.
    ids = oracle.encode("You can visit Ann Oak in")
    with torch.no_grad():
        ours = policy.model.logits(torch.tensor([ids]))[0].log_softmax(-1)
    torch.testing.assert_close(
        ours, oracle.run(ids)[2], rtol=1e-6, atol=1e-6
    )  # cos and sin are float32 there
    # Second moments, of all tokens of the windows.
    words = oracle.encode(PROSE)
    width = min(256, PLAIN.max_positions)
    each = [oracle.run(words[start : start + width])[0] for start in range(0, len(words), width)]
    moments = [torch.cat([keys[n] for keys in each]) for n in range(PLAIN.num_layers)]
    moments = [keys.t() @ keys / len(keys) for keys in moments]
    earlier: dict[int, torch.Tensor] = {}
    before = {name: value.clone() for name, value in oracle.w.items()}
    for rows in (ROWS, LATER):  # the second batch keeps the first one's keys where they are
        editor.write(read_facts(rows), method)
        oracle.memit(rows, contexts, moments, earlier)
        for name, expected in oracle.w.items():
            found = policy.model.get_parameter(name).detach()
            change = (expected - before[name]).norm()
            if not change:
                assert torch.equal(found, expected), name
                continue
            assert change > 1e-2 * before[name].norm(), name  # something was written
            error = float((found - expected).norm() / change)
            assert error < STORED, (name, error)


@pytest.mark.some(1)
@pytest.mark.parametrize("last", [0, 1])
def test_facts_searched_together_are_found_as_each_alone(last: int, tmp_path: Path) -> None:
    """What several facts' prompts begin with is read once, and none of them sees another."""
    policy = fresh(PLAIN)
    policy.model.double()
    editor = Editor(policy, "oracle", cache=tmp_path)
    beginning = "The home of Cid Elm is in Bern"
    contexts = Contexts(("", beginning, beginning + ". Ann Oak eats"))
    facts = read_facts([*ROWS, *LATER])
    memory = chosen_memories(policy.model, (last,))[0]

    def search(some: Sequence[Fact]) -> torch.Tensor:
        return find_targets(editor.reader, memory, some, contexts, SEARCH, own_norm=False).delta_ED

    together, alone = search(facts), torch.cat([search([fact]) for fact in facts])
    assert float(alone.norm(dim=1).min()) > 0.01
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.some(1)
@pytest.mark.parametrize("place", ["kl", "decay", "clamp", "lr"])
def test_the_search_reads_every_setting(place: str, tmp_path: Path) -> None:
    """The oracle's agreement means something: each setting that both read changes the result by far more."""
    found = []
    for value in (getattr(SEARCH, place), getattr(SEARCH, place) * 0.5):
        policy = fresh(PLAIN)
        policy.model.double()
        editor = Editor(policy, "oracle", cache=tmp_path)
        editor.set_prose(PROSE, 10_000)
        search = replace(SEARCH, **{place: value})
        editor.write(
            read_facts(ROWS[:1]),
            MethodConfig(layers=(1,), num_contexts=0, prose_weight=WEIGHT, target=search),
        )
        found.append(policy.model.get_parameter("model.layers.1.mlp.down_proj.weight").detach().clone())
    assert float((found[0] - found[1]).norm()) > 100 * STORED
