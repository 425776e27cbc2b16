"""The engine: what it samples is what the trainer scores, to the last bit, whatever else is in the batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from needs import needs, require

from whet.algo.kept import join_kept, keep_only
from whet.algo.packing import TrainingSequence, pack
from whet.generate import engine as engine_module
from whet.generate.cache import KVCache
from whet.generate.engine import Completion, Engine, Request
from whet.generate.rows import Rows
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.generate.scoring import score_micro_batch
from whet.model.attention import AttentionKind
from whet.model.config import Family, ModelConfig
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model, save_model
from whet.types import UserError

VOCAB = 101  # no multiple of 16: the last columns of a product take other code paths
NUM_VALID = 97
FAMILIES: tuple[Family, ...] = ("llama", "qwen3", "gpt2")


def make_model(family: Family = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> LanguageModel:
    """A model whose logits have a spread of a few units, so that draws and scores are far from uniform."""
    defaults: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4 if family == "gpt2" else 2,
        "head_dim": 32,
        "max_positions": 448,
    }
    model = build_model(ModelConfig(family=family, **(defaults | options)))
    init_weights(model, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.empty(parameter.shape).normal_(0.0, 0.1, generator=generator)
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    model.num_valid_tokens = min(NUM_VALID, model.config.vocab_size)
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def llama() -> LanguageModel:
    return make_model()


def make_requests(lengths: Sequence[int], num_samples: int, num_valid: int = NUM_VALID) -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    requests = []
    for index, length in enumerate(lengths):
        ids = torch.randint(0, num_valid, (length,), generator=generator).tolist()
        seeds = tuple(sequence_seed("engine", index, sample) for sample in range(num_samples))
        requests.append(Request(prompt_ids=tuple(ids), seeds=seeds))
    return requests


def generate(
    model: LanguageModel, requests: Sequence[Request], max_new_tokens: int, **options: Any
) -> list[list[Completion]]:
    temperature = options.pop("temperature", 0.6)
    engine = Engine(model, **({"stop_ids": ()} | options))
    return engine.generate(requests, SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens))


def score(
    model: LanguageModel,
    requests: Sequence[Request],
    completions: Sequence[Sequence[Completion]],
    *,
    temperature: float = 0.6,
    autocast: torch.dtype | None = None,
    attention: AttentionKind = "exact",
    token_budget: int = 400,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the trainer's and the sampler's log-probabilities, in one order."""
    sequences = [
        TrainingSequence(
            prompt_ids=request.prompt_ids,
            completion_ids=done.ids,
            sampler_logprobs=done.logprobs,
            kept=done.kept,
        )
        for request, row in zip(requests, completions, strict=True)
        for done in row
    ]
    batch = pack(sequences, token_budget=token_budget)
    assert len(batch.micro_batches) > 1 or token_budget > 10_000
    with torch.no_grad():
        scored = [
            score_micro_batch(model, micro, temperature=temperature, autocast=autocast, attention=attention)[
                0
            ]
            for micro in batch.micro_batches
        ]
    return torch.cat(scored), torch.cat([micro.sampler_logprobs_M for micro in batch.micro_batches])


def flat(completions: Sequence[Sequence[Completion]]) -> list[Completion]:
    return [done for row in completions for done in row]


# --- the sampler's log-probabilities are the trainer's ---------------------------------------------------------

# Ragged prompts; the last two cross a key block of 128 while decoding. 380 is where a product over all keys at
# once, without blocks, was seen to differ: at 245 keys it did not yet.
RAGGED = (1, 3, 17, 31, 61, 118, 380)


@pytest.mark.some(5)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("either")
def test_sampler_equals_trainer_bitwise(family: Family, precision: str) -> None:
    if precision != "float32":
        require("row-invariant bfloat16")
    model = make_model(family, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    autocast = torch.bfloat16 if precision == "autocast" else None
    requests = make_requests(RAGGED, 3)
    completions = generate(model, requests, 21, max_rows=13, autocast=autocast)
    assert all(len(done.ids) == 21 for done in flat(completions))
    scored, sampled = score(model, requests, completions, autocast=autocast)
    assert scored.dtype == sampled.dtype == torch.float32
    assert sampled.std() > 0.5  # far from uniform
    assert torch.equal(scored, sampled)


FILTERS = {
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 7},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 30, "min_p": 0.01, "top_p": 0.9},
    "wide": {"top_p": 0.98},
}


@pytest.mark.some(8)
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.usefixtures("either")
def test_filtered_samples_are_scored_over_what_was_kept_bitwise(
    name: str, temperature: float, llama: LanguageModel
) -> None:
    requests = make_requests(RAGGED, 3)
    params = SamplingParams(temperature=temperature, max_new_tokens=21, **FILTERS[name])
    completions = Engine(llama, stop_ids=(), max_rows=13, trains=True).generate(requests, params)
    assert all(len(done.kept) == len(done.ids) == 21 for done in flat(completions))
    scored, sampled = score(llama, requests, completions, temperature=temperature)
    assert torch.equal(scored, sampled)
    # Control: over everything the same tokens score lower, and never higher but for rounding.
    bare = [[replace(done, kept=()) for done in row] for row in completions]
    whole, _ = score(llama, requests, bare, temperature=temperature)
    assert (sampled - whole).mean() > 0.005
    assert (sampled - whole).min() > -1e-5
    # The same tokens as an engine draws that records nothing.
    plain = Engine(llama, stop_ids=(), max_rows=40).generate(requests, params)
    assert [replace(done, kept=()) for done in flat(completions)] == flat(plain)


def test_a_set_belongs_to_its_token_however_rows_end_and_move(llama: LanguageModel) -> None:
    """Rows end at random and others take their places: the set of each token is that of its own distribution."""
    requests = make_requests((3, 17, 40), 6)
    params = SamplingParams(temperature=1.0, max_new_tokens=30, top_k=5)
    engine = Engine(
        llama, stop_ids=range(0, llama.num_valid_tokens, 24), max_rows=5, trains=True,
        stop_strings=("!",), decode=lambda ids: "".join("!" if token % 14 == 3 else "." for token in ids),
    )  # fmt: skip
    completions = engine.generate(requests, params)
    assert len({len(done.ids) for done in flat(completions)}) > 4
    assert {done.finish_reason for done in flat(completions)} == {"stop", "length"}
    for request, row in zip(requests, completions, strict=True):
        for done in row:
            assert len(done.kept) == len(done.ids)
            ids = torch.tensor([*request.prompt_ids, *done.ids])
            logits = llama.logits(ids[None])[0, len(request.prompt_ids) - 1 : -1, : llama.num_valid_tokens]
            sets = keep_only(
                torch.zeros(len(done.ids), -(-logits.shape[1] // 16) * 16), join_kept(done.kept, ids.device)
            )
            for best, left in zip(logits.topk(5).indices.tolist(), sets, strict=True):
                assert set(best) == set((left == 0).nonzero().flatten().tolist())


def test_nothing_is_recorded_that_nobody_needs(llama: LanguageModel) -> None:
    requests, short = make_requests((3,), 2), SamplingParams(top_k=5, max_new_tokens=3)
    for params, trains in (
        (short, False),
        (SamplingParams(max_new_tokens=3), True),
        (replace(short, temperature=0.0), True),
    ):
        completions = Engine(llama, stop_ids=(), trains=trains).generate(requests, params)
        assert all(done.kept == () for done in flat(completions))


def test_two_threads_are_as_exact_as_one(llama: LanguageModel) -> None:
    requests = make_requests(RAGGED, 2)
    one = generate(llama, requests, 8)
    torch.set_num_threads(2)  # conftest.py sets it back
    two = generate(llama, requests, 8)
    scored, sampled = score(llama, requests, two)
    assert torch.equal(scored, sampled)
    # Another number of threads may cut sums elsewhere: the same distribution up to float32 rounding.
    other = torch.tensor([logprob for done in flat(one) for logprob in done.logprobs])
    if [done.ids for done in flat(one)] == [done.ids for done in flat(two)]:
        again = torch.tensor([logprob for done in flat(two) for logprob in done.logprobs])
        torch.testing.assert_close(again, other, atol=1e-4, rtol=0)


def test_trainer_with_autograd_and_checkpointing_equals_sampler(llama: LanguageModel) -> None:
    requests = make_requests((5, 40), 3)
    completions = generate(llama, requests, 9)
    _, sampled = score(llama, requests, completions, token_budget=20_000)
    sequences = [
        TrainingSequence(
            prompt_ids=request.prompt_ids, completion_ids=done.ids, sampler_logprobs=done.logprobs
        )
        for request, row in zip(requests, completions, strict=True)
        for done in row
    ]
    (micro,) = pack(sequences, token_budget=20_000).micro_batches
    llama.checkpoint_layers = True
    try:
        scored, _ = score_micro_batch(llama, micro, temperature=0.6)
        scored.sum().backward()  # the rotary tables were made in inference mode's sight: they must not stop this
    finally:
        llama.checkpoint_layers = False
    assert torch.equal(scored.detach(), sampled)
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in llama.parameters()
    )
    llama.zero_grad()


@pytest.mark.usefixtures("eager")
def test_the_equality_can_fail(llama: LanguageModel) -> None:
    """Controls: another kernel differs in the last bits, another temperature and a neighbour's token by far more."""
    requests = make_requests(RAGGED, 3)
    completions = generate(llama, requests, 21)
    fast, sampled = score(llama, requests, completions, attention="fast")
    assert not torch.equal(fast, sampled)
    torch.testing.assert_close(fast, sampled, atol=1e-4, rtol=0)  # float32 sums in another order, and no more
    warm, _ = score(llama, requests, completions, temperature=1.0)
    assert (warm - sampled).abs().mean() > 0.1
    full, _ = score_with_all_columns(llama, requests, completions)
    assert (full - sampled).abs().max() > 1e-3


def score_with_all_columns(
    model: LanguageModel, requests: Sequence[Request], completions: Sequence[Sequence[Completion]]
) -> tuple[torch.Tensor, torch.Tensor]:
    model.num_valid_tokens = VOCAB
    try:
        return score(model, requests, completions)
    finally:
        model.num_valid_tokens = NUM_VALID


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_equal_one_forward_of_transformers(family: Family, tmp_path: Path) -> None:
    model = make_model(family)
    model.num_valid_tokens = VOCAB
    save_model(model, tmp_path)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    requests = make_requests((2, 33, 120), 2)
    for request, row in zip(requests, generate(model, requests, 12, temperature=0.7), strict=True):
        for done in row:
            ids = torch.tensor([[*request.prompt_ids, *done.ids]])
            with torch.no_grad():
                logits = reference(ids).logits[0, len(request.prompt_ids) - 1 : -1].double()
            expected = torch.log_softmax(logits / 0.7, -1).gather(1, torch.tensor(done.ids)[:, None])[:, 0]
            # float32 on both sides, logits of size 10 divided by 0.7; a position off by one moves whole units.
            torch.testing.assert_close(torch.tensor(done.logprobs).double(), expected, atol=1e-4, rtol=0)


# --- nothing else in the batch matters -------------------------------------------------------------------------


@pytest.mark.ci
def test_a_sequence_does_not_depend_on_its_batch(llama: LanguageModel) -> None:
    requests = make_requests((4, 30, 1, 125, 66, 9), 5)
    stop_ids = (3, 10, 17, 40)  # uneven ends, so that rows move
    options = {"stop_ids": stop_ids, "temperature": 1.0}
    whole = generate(llama, requests, 18, **options)
    lengths = {len(done.ids) for done in flat(whole)}
    assert len(lengths) > 6
    assert {done.finish_reason for done in flat(whole)} == {"stop", "length"}
    for max_rows in (1, 3, 7):
        assert generate(llama, requests, 18, max_rows=max_rows, **options) == whole
    backwards = generate(llama, requests[::-1], 18, max_rows=5, **options)
    assert backwards[::-1] == whole
    for request, row in zip(requests, whole, strict=True):
        alone = Request(prompt_ids=request.prompt_ids, seeds=request.seeds[2:3])
        assert generate(llama, [alone], 18, **options) == [[row[2]]]
    reordered = [Request(prompt_ids=request.prompt_ids, seeds=request.seeds[::-1]) for request in requests]
    assert [row[::-1] for row in generate(llama, reordered, 18, **options)] == whole


def test_samples_of_one_prompt_differ_and_equal_seeds_agree(llama: LanguageModel) -> None:
    (request,) = make_requests((6,), 4)
    twice = Request(prompt_ids=request.prompt_ids, seeds=request.seeds + request.seeds[:1])
    (row,) = generate(llama, [twice], 12, temperature=1.0)
    assert row[0] == row[4]
    assert len({done.ids for done in row}) == 4


def test_prompts_are_prefilled_once_for_all_their_samples(llama: LanguageModel) -> None:
    requests = make_requests((5, 9, 12), 4)
    engine = Engine(llama, stop_ids=())
    params = SamplingParams(max_new_tokens=7)
    ended: list[int] = []
    engine.generate(requests, params, on_ended=lambda _, row: ended.append(len(row)))
    assert engine.stats.prompt_tokens == 5 + 9 + 12
    assert engine.stats.new_tokens == 12 * 7
    assert engine.stats.decode_steps == 6  # the first token comes from the prefill
    assert ended == [4, 4, 4]
    engine.generate(requests[:1], params)
    assert engine.stats.prompt_tokens == 5 + 9 + 12 + 5


def test_rows_refill_as_soon_as_others_end(llama: LanguageModel) -> None:
    """Twelve samples of at most 16 tokens, four rows: with stops, far fewer steps than three full rounds of 15."""
    requests = make_requests((5,) * 12, 1)
    stop_ids = tuple(range(0, NUM_VALID, 3))
    engine = Engine(llama, stop_ids=stop_ids, max_rows=4)
    completions = engine.generate(requests, SamplingParams(max_new_tokens=16))
    total = sum(len(done.ids) for done in flat(completions))
    assert {done.finish_reason for done in flat(completions)} >= {"stop"}
    assert engine.stats.new_tokens == total
    assert engine.stats.decode_steps < 15 * 3 * 0.7
    assert completions == generate(llama, requests, 16, stop_ids=stop_ids, temperature=1.0)


@pytest.mark.usefixtures("either")
def test_long_admissions_are_cut_into_chunks(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests((7, 11, 3, 25, 2, 8, 6), 3)
    whole = generate(llama, requests, 6)
    chunks: list[list[int]] = []

    def spy(name: str, place: int) -> None:
        original = getattr(engine_module, name)

        def run(*arguments: Any) -> Any:
            chunks.append(list(arguments[place]))
            return original(*arguments)

        monkeypatch.setattr(engine_module, name, run)

    spy("Prefill", 2)  # without kernels, and of long prompts
    spy("prefill", 4)
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 20)
    engine = Engine(llama, stop_ids=())
    assert engine.generate(requests, SamplingParams(temperature=0.6, max_new_tokens=6)) == whole
    assert chunks == [[7, 11], [3], [25], [2, 8, 6]]  # a longer prompt goes alone
    assert engine.stats.prompt_tokens == 62


def test_one_engine_sees_new_weights_and_keeps_no_old_keys() -> None:
    model = make_model()
    requests = make_requests((20, 130), 2)
    engine = Engine(model, stop_ids=())
    params = SamplingParams(max_new_tokens=10)
    before = engine.generate(requests, params)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    after = engine.generate(requests, params)
    assert after != before
    assert after == generate(model, requests, 10, temperature=1.0)
    scored, sampled = score(model, requests, after, temperature=1.0, token_budget=20_000)
    assert torch.equal(scored, sampled)
    engine.release()
    assert engine.generate(requests, params) == after


@pytest.mark.parametrize("value", [math.nan, 1e30, -1e30])
@pytest.mark.usefixtures("either")
def test_logits_that_are_no_numbers_are_refused_before_a_token_is_drawn(value: float) -> None:
    """Finite weights may be too large for their products to be."""
    model = make_model(tie_embeddings=False)
    with torch.no_grad():
        model.head_weight.fill_(value)
        model.get_parameter("model.norm.weight").fill_(1e30)
    engine = Engine(model, stop_ids=())
    with pytest.raises(UserError, match="logits contain NaN or infinity, .* float32"):
        engine.generate(make_requests([3], 1), SamplingParams(max_new_tokens=2))
    assert engine.stats.decode_steps == 0


def test_the_model_keeps_its_mode(llama: LanguageModel) -> None:
    llama.train()
    generate(llama, make_requests((3,), 1), 2)
    assert llama.training
    llama.eval()
    generate(llama, make_requests((3,), 1), 2)
    assert not llama.training


# --- where completions end -------------------------------------------------------------------------------------


def test_stop_ids_stay_in_the_output(llama: LanguageModel) -> None:
    requests = make_requests((4, 12, 7), 6)
    free = generate(llama, requests, 20, temperature=1.0)
    stop_ids = {
        free[0][0].ids[0],
        free[1][2].ids[5],
        free[2][1].ids[-1],
    }  # at the first, a middle, the last token
    stopped = generate(llama, requests, 20, temperature=1.0, stop_ids=tuple(stop_ids))
    for whole, cut in zip(flat(free), flat(stopped), strict=True):
        first = next((n for n, token in enumerate(whole.ids) if token in stop_ids), None)
        length = 20 if first is None else first + 1
        assert cut == Completion(
            ids=whole.ids[:length],
            logprobs=whole.logprobs[:length],
            finish_reason="length" if first is None else "stop",
        )
    assert len(stopped[0][0].ids) == 1
    assert stopped[2][1].finish_reason == "stop"


ALPHABET = "".join(chr(0x4E00 + index) for index in range(VOCAB))


def spell(ids: Sequence[int]) -> str:
    """One character a token, in an alphabet of its own."""
    return "".join(ALPHABET[index] for index in ids)


def spell_in_three(ids: Sequence[int]) -> str:
    """Three letters a token: a stop string may begin and end inside tokens."""
    return "".join(f"{index:03d}" for index in ids)


def expected_cut(
    whole: Completion,
    stops: Sequence[str],
    decode: Callable[[Sequence[int]], str],
    stop_ids: Sequence[int] = (),
) -> Completion:
    """The shortest prefix that ends with a stop id or whose text holds a stop string, by brute force."""
    for length in range(1, len(whole.ids) + 1):
        ids = whole.ids[:length]
        if ids[-1] in stop_ids or any(stop in decode(ids) for stop in stops):
            return Completion(ids=ids, logprobs=whole.logprobs[:length], finish_reason="stop")
    return whole


@pytest.fixture(scope="module")
def unstopped(llama: LanguageModel) -> tuple[list[Request], list[list[Completion]]]:
    requests = make_requests((4, 12, 7, 3), 5)
    return requests, generate(llama, requests, 19, temperature=1.0)


@pytest.mark.parametrize("interval", [1, 4, 7])
@pytest.mark.parametrize("max_rows", [4, 64])
def test_stop_strings_cut_at_the_completing_token(
    llama: LanguageModel,
    unstopped: tuple[list[Request], list[list[Completion]]],
    monkeypatch: pytest.MonkeyPatch,
    interval: int,
    max_rows: int,
) -> None:
    monkeypatch.setattr(engine_module, "CHECK_EVERY_TEXT", interval)
    requests, free = unstopped
    rows = flat(free)
    cases: list[tuple[Callable[[Sequence[int]], str], list[str]]] = [
        # first token; several tokens in the middle; completed by the last allowed token
        (spell, [spell(rows[0].ids[:1]), spell(rows[5].ids[6:9]), spell(rows[8].ids[-3:])]),
        # inside tokens: the last letter of one to the first letter of the next but one
        (spell_in_three, [spell_in_three(rows[n].ids)[3 * n + 8 : 3 * n + 13] for n in (1, 4, 9, 12)]),
    ]
    for decode, stops in cases:
        got = flat(
            generate(
                llama,
                requests,
                19,
                temperature=1.0,
                stop_strings=stops,
                decode=decode,
                max_rows=max_rows,
            )
        )
        assert got == [expected_cut(whole, stops, decode) for whole in rows]
        assert sum(done.finish_reason == "stop" for done in got) >= len(stops)
    first = generate(
        llama, requests, 19, temperature=1.0, stop_strings=[spell(rows[8].ids[-3:])], decode=spell
    )
    assert first[1][3].ids == rows[8].ids
    assert (rows[8].finish_reason, first[1][3].finish_reason) == ("length", "stop")


@pytest.mark.parametrize("interval", [1, 4])
def test_a_stop_string_before_a_stop_id_wins(
    llama: LanguageModel,
    unstopped: tuple[list[Request], list[list[Completion]]],
    monkeypatch: pytest.MonkeyPatch,
    interval: int,
) -> None:
    """'...</answer>' then EOS, as fine-tuned models end: the same cut wherever the text was last looked at."""
    monkeypatch.setattr(engine_module, "CHECK_EVERY_TEXT", interval)
    requests, free = unstopped
    for index, request in enumerate(requests):
        whole = free[index][0]
        for end in range(3, 12):
            stops, stop_ids = [spell(whole.ids[end - 2 : end])], (whole.ids[end],)
            alone = Request(prompt_ids=request.prompt_ids, seeds=request.seeds[:1])
            options = {"stop_strings": stops, "stop_ids": stop_ids, "decode": spell, "temperature": 1.0}
            assert generate(llama, [alone], 19, **options) == [[expected_cut(whole, stops, spell, stop_ids)]]


def test_lengths_end_at_the_limit_and_at_the_context() -> None:
    model = make_model(max_positions=48, hidden_size=32, head_dim=8)
    requests = make_requests((40, 47, 10), 3)
    completions = generate(model, requests, 30, max_rows=4)
    assert [len(done.ids) for done in flat(completions)] == [8] * 3 + [1] * 3 + [30] * 3
    assert {done.finish_reason for done in flat(completions)} == {"length"}
    scored, sampled = score(model, requests, completions, token_budget=60)
    assert torch.equal(scored, sampled)


@needs("kernels")
def test_a_prompt_is_kept_once_for_all_its_samples(llama: LanguageModel) -> None:
    """Prompts with and without part of a tile, more samples than rows: slots are shared, freed and taken again."""
    requests = make_requests((16, 33, 100, 5), 6)
    stop_ids = tuple(range(0, NUM_VALID, 5))
    alone = [
        generate(llama, [replace(request, seeds=(seed,))], 40, stop_ids=stop_ids)[0][0]
        for request in requests
        for seed in request.seeds
    ]
    for rows in (4, 7, 24):
        engine = Engine(llama, stop_ids=stop_ids, max_rows=rows)
        together = engine.generate(requests, SamplingParams(temperature=0.6, max_new_tokens=40))
        assert flat(together) == alone
        cache = engine._cache
        assert cache is not None
        assert len(cache._slots) == min(rows, 4)
        assert not any(slot.num_rows for slot in cache._slots)
        per_position = cache.nbytes / (rows * cache.capacity + len(cache._slots) * 112)
        assert cache.capacity == 64  # 40 tokens and part of a tile, rounded up; not the prompt's 100
        assert per_position == cache.keys[:, 0].nbytes * 2 / cache.capacity


def test_unused_rows_of_the_vocabulary_are_never_sampled() -> None:
    model = make_model(tie_embeddings=False)
    with torch.no_grad():
        model.head_weight[NUM_VALID:] *= 40  # their logits are the largest or the smallest of all
    requests = make_requests((3, 8, 20), 8)
    for temperature in (0.0, 1.0):
        completions = generate(model, requests, 15, temperature=temperature)
        assert max(max(done.ids) for done in flat(completions)) < NUM_VALID
    scored, sampled = score(model, requests, completions, temperature=1.0, token_budget=200)
    assert torch.equal(scored, sampled)
    model.num_valid_tokens = VOCAB  # control: they would be sampled all the time
    completions = generate(model, requests, 15, temperature=1.0)
    share = [token >= NUM_VALID for done in flat(completions) for token in done.ids]
    assert sum(share) > 0.3 * len(share)


def test_greedy_is_the_argmax_of_the_trainer(llama: LanguageModel) -> None:
    requests = make_requests((5, 21), 2)
    completions = generate(llama, requests, 10, temperature=0.0)
    assert completions[0][0] == completions[0][1]
    scored, sampled = score(llama, requests, completions, temperature=1.0, token_budget=20_000)
    assert torch.equal(scored, sampled)  # recorded at temperature 1
    for other in range(0, NUM_VALID, 8):  # no other first token scores higher
        changed = [[replace(row[0], ids=(other, *row[0].ids[1:]))] for row in completions]
        rivals, _ = score(llama, requests, changed, temperature=1.0, token_budget=20_000)
        # `pack` puts the longer sequence first.
        assert rivals[0] <= completions[1][0].logprobs[0]
        assert rivals[10] <= completions[0][0].logprobs[0]


# --- mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "prompt 1 is empty: expected at least one token"),
        ((5,) * 448, "prompt 1 has 448 tokens, the model's context holds 448"),
        ((5, VOCAB), "prompt 1 has token id 101, the model's vocabulary has 101 rows"),
        ((5, -1), "prompt 1 has token id"),
    ],
)
def test_prompts_that_cannot_be_answered(llama: LanguageModel, prompt: tuple[int, ...], message: str) -> None:
    requests = [Request(prompt_ids=(1,), seeds=(0,)), Request(prompt_ids=prompt, seeds=(0,))]
    with pytest.raises(UserError) as caught:
        generate(llama, requests, 4)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_to_do(llama: LanguageModel) -> None:
    assert generate(llama, [], 4) == []
    requests = [Request(prompt_ids=(1,), seeds=()), Request(prompt_ids=(2,), seeds=(7,))]
    empty, one = generate(llama, requests, 4)
    assert empty == []
    assert len(one[0].ids) == 4
    assert generate(llama, requests[:1], 4) == [[]]


def test_engine_options_out_of_range(llama: LanguageModel) -> None:
    with pytest.raises(ValueError, match="max_rows = 0: expected 1 or more"):
        Engine(llama, stop_ids=(), max_rows=0)
    with pytest.raises(ValueError, match="stop_strings need a decode function"):
        Engine(llama, stop_ids=(), stop_strings=("x",))


def test_scores_are_the_trainers_whatever_the_pieces(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tuple(range(3, 14))
    with torch.no_grad():
        logprobs = llama.logits(torch.tensor([ids]))[0, :, :NUM_VALID].log_softmax(-1)
    made = Engine(llama, stop_ids=())
    for length in (1024, 4, 1):
        monkeypatch.setattr(engine_module, "PIECE_TOKENS", length)
        with made.session(made.room(1, 1, 1)):
            found = [token for piece in made.score(ids, 2) for token in piece]
        assert [token.id for token in found] == list(ids)
        assert found[0].logprob is None
        expected = [float(logprobs[place, ids[place + 1]]) for place in range(len(ids) - 1)]
        assert [token.logprob for token in found[1:]] == pytest.approx(expected, abs=1e-4)
        assert [token.top[0][0] for token in found[1:]] == logprobs[:-1].argmax(-1).tolist()


def test_an_engine_follows_its_model_to_another_precision(llama: LanguageModel) -> None:
    model = copy.deepcopy(llama)
    params = SamplingParams(max_new_tokens=6)
    requests = [Request(prompt_ids=(5, 6, 7), seeds=(1, 2))]
    kept = Engine(model, stop_ids=())
    kept.generate(requests, params)
    model.double()
    assert kept.generate(requests, params) == Engine(model, stop_ids=()).generate(requests, params)


def test_a_row_that_ended_is_drawn_for_without_effect() -> None:
    rows = Rows.empty(3, 4, torch.device("cpu"))
    rows.counts.copy_(torch.tensor([0, 2, 2]))
    rows.positions.copy_(torch.tensor([7, 8, 9]))
    rows.limits.copy_(torch.tensor([4, 4, 3]))
    rows.done.copy_(torch.tensor([False, True, False]))
    rows.tokens[1] = torch.tensor([11, 12, 13, 14, 15])
    rows.take(slice(0, 3), torch.tensor([5, 6, 7]), torch.tensor([-0.5, -0.6, -0.7]), torch.tensor([5, 6]))
    assert rows.tokens[:, :-1].tolist() == [[5, 0, 0, 0], [11, 12, 13, 14], [0, 0, 7, 0]]
    assert rows.tokens[1, -1] == 6, "the spare column"
    assert rows.logprobs[2, 2] == pytest.approx(-0.7)
    assert rows.counts.tolist() == [1, 2, 3]
    assert rows.positions.tolist() == [8, 8, 10]
    assert rows.last.tolist() == [5, 6, 7]
    assert rows.done.tolist() == [True, True, True]
    assert rows.stopped.tolist() == [True, False, False], "the second had ended, the third by its length"


def test_what_a_row_remembers_without_keys_moves_with_it() -> None:
    cache = KVCache.__new__(KVCache)
    cache.is_tiled, cache._pairs, cache.keys = False, [], torch.zeros(1)
    cache.inputs, cache.states = {0: torch.arange(6.0).view(3, 2)}, {1: torch.arange(3.0)[:, None]}
    cache._copy([2], [0], 1)
    assert cache.inputs[0].tolist() == [[4.0, 5.0], [2.0, 3.0], [4.0, 5.0]]
    assert cache.states[1].tolist() == [[2.0], [1.0], [2.0]]
