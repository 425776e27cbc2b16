"""Edits of every dense family: what was searched is what the model then computes, and nothing else moves."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "model"))
import family_cases
from family_cases import CASES

from whet.editing.facts import read_facts
from whet.editing.methods import memory_output, residual_stream, spread_over_layers
from whet.editing.sites import Contexts, Reader, chosen_memories, find_memories
from whet.editing.statistics import digests_of
from whet.editing.targets import TargetConfig, find_targets
from whet.editing.trace import KINDS, causal_trace, num_layer_runs, part_of
from whet.generate.policy import Policy
from whet.model.text.tokenizer import Tokenizer
from whet.model.weights import load_model
from whet.schema import SCHEMAS
from whet.types import UserError

DENSE = ("gpt2", "llama", "phi3", "granite", "gemma2", "olmo2", "glm4", "gemma4", "qwen3_5")
FACTS = read_facts(
    [
        {"subject": "ab", "prompt": "{} is in", "target": "q"},
        {"subject": "cde", "prompt": "to {} or", "target": "rst"},
    ]
)


@pytest.fixture(scope="module", params=DENSE)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tmp_path_factory.mktemp(request.param)
    case = CASES[request.param]
    if request.param == "gpt2":
        case = replace(case, config=case.config | {"n_layer": 3})
    family_cases.make(case, folder)
    model, _ = load_model(folder, dtype=torch.float64)
    model.requires_grad_(False)
    return Policy(model, Tokenizer.characters("abcdefghijklmnopqrstuvwxyz ."), SCHEMAS["none"])


def layers_of(policy: Policy) -> list[int]:
    """Return two layers, or the one that a family with norms behind its memories takes."""
    normed = next(iter(find_memories(policy.model).values())).is_normed
    return [1] if normed else [0, 1]


@pytest.mark.some(4)
def test_what_was_searched_is_reached_exactly(policy: Policy) -> None:
    """Without weight on prose the last layer's value at the subject is the target, in the residual stream or before
    a norm; float64 leaves 1e-8 of it (a condition number of about 1e7)."""
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    reader, bare = Reader(policy), Contexts()
    memories = chosen_memories(policy.model, layers_of(policy))
    last = memories[-1]
    settings = TargetConfig(steps=3)
    targets = find_targets(reader, last, FACTS, bare, settings, own_norm=last.is_normed)
    stream = residual_stream(reader, last.layer, FACTS)
    value = memory_output(reader, last, FACTS)
    moments = {m.layer: torch.eye(m.matrix().shape[1], dtype=torch.float64) for m in memories}
    change = spread_over_layers(
        reader, memories, FACTS, bare, moments, targets=settings, weight=1e-9, earlier={}
    )
    assert change.targets is not None
    torch.testing.assert_close(change.targets.delta_ED, targets.delta_ED, rtol=1e-9, atol=1e-12)
    assert targets.delta_ED.norm(dim=1).min() > 1e-3
    close = {
        "rtol": 0,
        "atol": 1e-5 * float(value.abs().max() + stream.abs().max()),
    }  # deltas are stored in float32
    if last.is_normed:
        torch.testing.assert_close(memory_output(reader, last, FACTS), value + targets.delta_ED, **close)
    else:
        wanted = stream + last.scale * targets.delta_ED
        torch.testing.assert_close(residual_stream(reader, last.layer, FACTS), wanted, **close)
    changed = {
        name for name, tensor in policy.model.state_dict().items() if not torch.equal(tensor, before[name])
    }
    assert changed == {memory.name for memory in memories} == set(change.deltas)
    policy.model.load_state_dict(before)


def test_losses_of_the_search_are_those_of_the_whole_model(policy: Policy) -> None:
    """The search begins at the memory's layer; one row, a hook and `model.logits` say the same (float64 rounding)."""
    reader = Reader(policy)
    (memory,) = chosen_memories(policy.model, layers_of(policy)[-1:])
    contexts, settings = Contexts(("", "xyz")), TargetConfig(steps=2)
    found = find_targets(reader, memory, FACTS, contexts, settings, own_norm=True)
    nlls, subject, words = [], "cde", policy.tokenizer
    for text in ("to cde or rst", "xyz. to cde or rst", "cde is a"):
        ids = words.encode(text)
        place = text.index(subject) + len(subject) - 1  # a token is a character

        def add(_: object, __: object, out: torch.Tensor, place: int = place) -> torch.Tensor:
            row = torch.zeros_like(out)
            row[place] = found.delta_ED[1]
            return out + row

        before = policy.model.logits(torch.tensor([ids]))[0, :, : words.vocab_size].log_softmax(-1)
        handle = memory.module.register_forward_hook(add)
        after = policy.model.logits(torch.tensor([ids]))[0, :, : words.vocab_size].log_softmax(-1)
        handle.remove()
        if text.endswith("rst"):
            targets = torch.tensor(ids[-4:])  # with the space before it
            nlls.append(-after[-5:-1].gather(1, targets[:, None]).mean())
        else:
            kl = (after[-1].exp() * (after[-1] - before[-1])).sum()
            assert float(found.kl_E[1]) == pytest.approx(float(kl), rel=1e-9)
    assert float(found.nll_E[1]) == pytest.approx(float(sum(nlls) / 2), rel=1e-9)


@pytest.mark.some(4)
def test_tracing_is_what_whole_passes_with_one_draw_and_one_restoration_give(policy: Policy) -> None:
    """ROME's definition, one row at a time: noise on all subject tokens, then one clean state (or a window of them)
    put back. The tracer shares prefixes and begins at the restored layer; float64 leaves rounding."""
    model, fact = policy.model, read_facts([{"subject": "cde", "prompt": "to {} or", "target": "q"}])[0]
    options: dict[str, Any] = {"num_samples": 2, "window": 2, "seed": 5}
    runs: list[int] = []
    found = causal_trace(Reader(policy, budget=60), fact, advance=runs.append, **options)  # several passes
    assert sum(runs) == num_layer_runs(model, window=2)
    assert found.subject == (3, 5)
    ids, count = policy.tokenizer.encode("to cde or"), len(model.layers)
    wanted = policy.tokenizer.encode(" ")[0]  # a space stands before the answer
    seen: dict[tuple[str, int], torch.Tensor] = {}

    def run(noise_TD: torch.Tensor, put: dict[tuple[str, int], list[int]]) -> float:
        def disturb(_: object, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            first = arguments[0].clone()
            first[: len(ids)] += noise_TD
            return (first, *arguments[1:])

        handles = [model.layers[0].register_forward_pre_hook(disturb)]
        for n, layer in enumerate(model.layers):
            for kind in KINDS:

                def restore(
                    _: object, __: object, out: torch.Tensor, key: tuple[str, int] = (kind, n)
                ) -> torch.Tensor:
                    seen.setdefault(key, out[: len(ids)].clone())  # the first run is the clean one
                    out = out.clone()
                    out[put.get(key, [])] = seen[key][put.get(key, [])]
                    return out

                handles.append(part_of(layer, kind).register_forward_hook(restore))
        logits = model.logits(torch.tensor([ids]))[0, -1]
        for handle in handles:
            handle.remove()
        return float(logits[: policy.tokenizer.vocab_size].softmax(-1)[wanted])

    first: list[torch.Tensor] = []
    handle = model.layers[0].register_forward_pre_hook(
        lambda _, arguments: first.append(arguments[0][: len(ids)])
    )
    clean = run(torch.tensor(0.0), {})
    handle.remove()
    assert found.clean == pytest.approx(clean, rel=1e-6)
    drawn = torch.randn(2, 3, first[0].shape[1], generator=torch.Generator().manual_seed(5))
    noise = torch.zeros(2, len(ids), first[0].shape[1], dtype=torch.float64)
    noise[:, 3:6] = drawn.double() * 3.0 * float(first[0].float().std())
    corrupted = sum(run(noise[n], {}) for n in range(2)) / 2
    assert found.corrupted == pytest.approx(corrupted, rel=1e-6)
    for kind in KINDS:
        for layer in range(count):
            # As in ROME's programs: half of the window before the layer, the rest from it on, cut at both ends.
            low, high = (layer, layer + 1) if kind == "hidden" else (max(0, layer - 1), min(count, layer + 1))
            for places in ([0], [2], [3], [4], [5], [6], [len(ids) - 1], [3, 4, 5]):
                put = {(kind, n): places for n in range(low, high)}
                slow = sum(run(noise[n], put) for n in range(2)) / 2 - corrupted
                fast = (
                    found.together[kind][layer] if len(places) > 1 else found.effects[kind][layer, places[0]]
                )
                assert float(fast) == pytest.approx(slow, rel=1e-4, abs=1e-8), (kind, layer, places)
    assert max(float(table.abs().max()) for table in found.effects.values()) > 1e-5


def test_a_saved_model_is_the_same_one(policy: Policy, tmp_path: Path) -> None:
    """The hash of weights and settings survives a folder: config.json brings back all that is computed with."""
    policy.save(tmp_path / "saved")
    again, _ = load_model(tmp_path / "saved", dtype=torch.float64)
    assert digests_of(again) == digests_of(policy.model)
    again.config = replace(again.config, norm_eps=2 * again.config.norm_eps)
    assert digests_of(again)[0] != digests_of(policy.model)[0]
    assert digests_of(again)[1] == digests_of(policy.model)[1]


def test_refusals(policy: Policy) -> None:
    memories = find_memories(policy.model)
    with pytest.raises(UserError, match="layers 0 to 2, got 7"):
        chosen_memories(policy.model, [7])
    with pytest.raises(UserError, match="layer 2, the last one"):
        chosen_memories(policy.model, [2])
    with pytest.raises(UserError, match="one is given twice"):
        chosen_memories(policy.model, [1, 1])
    if next(iter(memories.values())).is_normed:
        with pytest.raises(
            UserError, match="several layers cannot share a target; give one, as in --layers 1"
        ):
            chosen_memories(policy.model, [0, 1])
    with pytest.raises(UserError, match="does not fit the model's context"):
        Reader(policy).hidden([[1] * (policy.model.config.max_positions + 1)])
    assert (
        cast(torch.nn.Parameter, memories[1].weight).shape[0 if memories[1].is_transposed else 1]
        == memories[1].matrix().shape[1]
    )
