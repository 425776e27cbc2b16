"""Guesses: what is drawn does not depend on them, and right ones save steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from whet.generate import drafts
from whet.generate.engine import Completion, Engine, Request
from whet.generate.lookup import MIN_SHARE, NGRAM, TRIAL, Lookup
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.kernels.build import library, reason
from whet.model.config import Family, ModelConfig
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model

needs_kernels = pytest.mark.skipif(library() is None, reason=reason())
PROMPTS = ((5, 6, 7, 8, 5, 6, 7), (9, 3, 9, 3, 9), (11,))


def make_model(family: Family = "llama", dtype: torch.dtype = torch.float32) -> LanguageModel:
    """A model that repeats itself: drawn at a low temperature it runs into cycles."""
    shape = ModelConfig(
        family=family,
        vocab_size=40,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=256,
    )
    model = build_model(shape)
    init_weights(model, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15, generator=generator)
    model.num_valid_tokens = 37
    return model.to(dtype).eval()


def draw(
    model: LanguageModel,
    num_guesses: int,
    *,
    temperature: float,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    max_new_tokens: int = 100,
    autocast: torch.dtype | None = None,
    stop_ids: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
) -> tuple[list[Completion], int]:
    """Draw a completion of each prompt; return them and the decoding steps."""
    engine = Engine(
        model,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        decode=lambda ids: "".join(chr(48 + token) for token in ids),
        autocast=autocast,
    )
    engine.num_guesses = num_guesses
    requests = [
        Request(prompt_ids=ids, seeds=(sequence_seed("drafts", place),)) for place, ids in enumerate(prompts)
    ]
    rows = engine.generate(requests, SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens))
    return [row[0] for row in rows], engine.stats.decode_steps


@needs_kernels
@pytest.mark.parametrize("temperature", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(
    ("family", "dtype", "autocast"),
    [
        ("llama", torch.float32, None),
        ("qwen3", torch.bfloat16, None),
        ("qwen2", torch.float32, torch.bfloat16),
    ],
)
def test_guesses_change_no_bit(
    family: Family, dtype: torch.dtype, autocast: torch.dtype | None, temperature: float
) -> None:
    model = make_model(family, dtype)
    options = {"temperature": temperature, "autocast": autocast}
    plain, steps = draw(model, 0, **options)
    ahead, fewer = draw(model, 7, **options)
    assert plain == ahead
    assert [len(done.ids) for done in plain] == [100] * 3
    assert steps == 99
    if temperature == 0.0:
        assert fewer < 90, "a greedy cycle is easy to guess"
    assert fewer <= steps


@needs_kernels
def test_rows_end_at_the_same_token_with_guesses() -> None:
    model = make_model()
    whole, _ = draw(model, 0, temperature=0.0)
    cycle = whole[0].ids[-30:]
    seldom = min(set(cycle), key=cycle.count)
    text = "".join(chr(48 + token) for token in whole[1].ids)
    for options in ({"stop_ids": (seldom,)}, {"stop_strings": (text[60:64],)}, {"max_new_tokens": 41}):
        plain, _ = draw(model, 0, temperature=0.0, **options)
        ahead, _ = draw(model, 7, temperature=0.0, **options)
        assert plain == ahead
        assert plain != whole
    assert {len(done.ids) for done in plain} == {41}


@needs_kernels
def test_many_rows_guess_when_few_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    prompts = [(5, 6, 7, 8, 5, 6, 7, number) for number in range(7)]
    live: list[int] = []
    read = drafts.read_ahead

    def spy(state: drafts.Rows, num_guesses: int) -> object:
        found = read(state, num_guesses)
        live.extend([len(state.jobs)] if found is not None else [])
        return found

    monkeypatch.setattr("whet.generate.engine.read_ahead", spy)
    engine = Engine(model, stop_ids=())
    engine.num_guesses = 7
    limits = (10, 20, 90, 30, 90, 40, 50)
    requests = [
        Request(prompt_ids=ids, seeds=(place,), max_new_tokens=limit)
        for place, (ids, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    params = SamplingParams(temperature=0.0, max_new_tokens=90)
    ahead = engine.generate(requests, params)
    assert live
    assert max(live) <= drafts.MAX_ROWS
    engine.num_guesses = 0
    assert engine.generate(requests, params) == ahead


@needs_kernels
def test_filters_and_notes_go_without_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.kernels.cpu_head.draw", None)  # would fail
    engine = Engine(make_model(), stop_ids=())
    engine.num_guesses = 7
    request = Request(prompt_ids=PROMPTS[0], seeds=(1,))
    (row,) = engine.generate([request], SamplingParams(temperature=0.5, top_p=0.9, max_new_tokens=20))
    assert len(row[0].ids) == 20


def test_what_followed_last_time_is_guessed() -> None:
    lookup = Lookup((1, 2, 3, 4, 5, 1, 2, 3))
    assert lookup.guess(2) == [4, 5]
    assert lookup.guess(9) == [4, 5, 1, 2, 3]
    lookup.extend([4, 5, 7])
    assert lookup.guess(3) == []
    lookup.extend([1, 2, 3])
    assert lookup.guess(3) == [4, 5, 7], "the latest place counts"
    assert Lookup(()).guess(3) == []
    assert Lookup((1, 2)[: NGRAM - 1]).guess(3) == []


def test_a_sequence_that_is_guessed_wrong_is_left_alone() -> None:
    lookup, guessed = Lookup((1, 2, 3, 4)), 0
    for other in range(10, 80):
        guessed += len(lookup.guess(1))
        lookup.extend([other])  # what follows 1 2 3 is never what followed last time
        lookup.extend([1, 2, 3])
    guessed += len(lookup.guess(1))
    assert 0 < guessed <= TRIAL + 1
    right = Lookup((1, 2, 3, 4, 1, 2, 3))
    for _ in range(3 * TRIAL):
        found = right.guess(3)
        assert found == [4, 1, 2]
        right.extend([*found, 3])
    assert 0 < MIN_SHARE < 1
