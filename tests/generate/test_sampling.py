"""Noise and draws: statistics against closed forms, kept sets against transformers' own processors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from whet.generate import sampling
from whet.generate.sampling import (
    SamplingParams,
    counter_uniforms,
    draw_tokens,
    filter_logits,
    sample_tokens,
    sequence_seed,
)

CUT = float("-inf")


def chi_square_limit(freedom: int) -> float:
    """Return the 0.9999 quantile (Wilson-Hilferty; 3.719 is the normal one): seeds are fixed, so this never flakes."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.719 * math.sqrt(part)) ** 3


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's statistic over cells that expect at least five draws; the rest are one cell."""
    counts, expected = counts.double(), expected.double()
    large = expected >= 5
    cells = [(counts[large], expected[large]), (counts[~large].sum()[None], expected[~large].sum()[None])]
    return float(sum(((seen - due).square() / due.clamp_min(1e-9)).sum() for seen, due in cells))


def grid(num_seeds: int, num_positions: int) -> torch.Tensor:
    """Uniforms [seeds, positions] of real sequence seeds."""
    seeds = torch.tensor([sequence_seed("test", row) for row in range(num_seeds)])
    index = torch.arange(num_positions)
    flat = counter_uniforms(seeds.repeat_interleave(num_positions), index.repeat(num_seeds))
    return flat.view(num_seeds, num_positions)


# --- noise -------------------------------------------------------------------------------------------------


def reference_uniform(seed: int, index: int) -> float:
    """The documented hash in Python integers: MurmurHash3's fmix32 of (seed, counter), 24 bits, half a step up."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    key = mix(mix(seed % 2**32) ^ ((seed >> 32) * 0x9E3779B1 % 2**32))
    return ((mix((key + 0x9E3779B9 * (index + 1)) % 2**32) >> 8) + 0.5) / 2**24


def test_uniforms_are_the_documented_hash() -> None:
    """Pins the noise: a change here silently changes every recorded run."""
    seeds = [0, 1, 2**32 - 1, 2**32, 2**63 - 1, sequence_seed("a"), sequence_seed("b")]
    index = [0, 1, 2, 511, 10**6, 0, 131071]
    got = counter_uniforms(torch.tensor(seeds), torch.tensor(index))
    assert got.dtype == torch.float64
    assert got.tolist() == [reference_uniform(*pair) for pair in zip(seeds, index, strict=True)]


@pytest.mark.parametrize("start", [0, 10_000])
def test_uniforms_are_flat(start: int) -> None:
    u = grid(200, 500)
    assert 0 < u.min() < u.max() < 1
    counts = torch.histc(u.flatten(), 100, 0, 1)
    assert chi_square(counts, torch.full((100,), u.numel() / 100)) < chi_square_limit(99)
    # Consecutive integers are the worst seeds there are: their first and second draws must be flat, too.
    seeds = torch.arange(start, start + 20_000)
    for index in (0, 1):
        first = counter_uniforms(seeds, torch.full_like(seeds, index))
        counts = torch.histc(first, 50, 0, 1)
        assert chi_square(counts, torch.full((50,), 400.0)) < chi_square_limit(49)


def test_uniforms_are_serially_independent() -> None:
    u = grid(200, 500)

    def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
        return float(torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1])

    # Independent pairs have a correlation of standard deviation 1/sqrt(n), here 0.0032: five of them.
    limit = 5 / math.sqrt(u.numel() * 0.99)
    for lag in (1, 2, 3, 7):
        assert abs(correlation(u[:, :-lag], u[:, lag:])) < limit  # positions of one sequence
        assert abs(correlation(u[:-lag], u[lag:])) < limit  # sequences at one position
    pairs = (u[:, :-1] * 16).long() * 16 + (u[:, 1:] * 16).long()
    counts = torch.bincount(pairs.flatten(), minlength=256)
    assert chi_square(counts, torch.full((256,), pairs.numel() / 256)) < chi_square_limit(255)
    assert u.unique().numel() > 0.99 * u.numel()  # 100,000 of 2^24 values: 0.3 % collide


def test_both_halves_of_a_seed_count() -> None:
    base = sequence_seed("run", 1)
    index = torch.zeros(1, dtype=torch.int64)
    first = counter_uniforms(torch.tensor([base]), index)
    for bit in (0, 31, 32, 62):
        assert counter_uniforms(torch.tensor([base ^ (1 << bit)]), index) != first


def test_uniforms_do_not_depend_on_the_batch() -> None:
    seeds = torch.tensor([sequence_seed(row) for row in range(64)])
    index = torch.arange(64) % 5
    whole = counter_uniforms(seeds, index)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(counter_uniforms(seeds[order], index[order]), whole[order])
    assert torch.equal(
        torch.cat([counter_uniforms(seeds[i : i + 1], index[i : i + 1]) for i in range(64)]), whole
    )


def test_sequence_seed_is_sha256_of_the_parts() -> None:
    digest = hashlib.sha256(b"7\x0012\x00ab12\x003").digest()
    assert sequence_seed(7, 12, "ab12", 3) == int.from_bytes(digest[:8], "little") // 2
    # From `printf '0\0000\0000' | sha256sum`, by hand: the same for ever.
    assert sequence_seed(0, 0, 0) == 4_062_113_953_437_894_530
    assert sequence_seed(1, 23) != sequence_seed(12, 3)  # parts are separated
    assert sequence_seed("1") == sequence_seed(1)
    seeds = {sequence_seed("run", step, sample) for step in range(50) for sample in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)


# --- draws -------------------------------------------------------------------------------------------------


def softmax(logits: torch.Tensor) -> torch.Tensor:
    weights = torch.exp(logits.double() - logits.double().max())
    return weights / weights.sum()


def counts_of(logits: torch.Tensor, num: int) -> torch.Tensor:
    """Draw `num` times from one distribution, in batches of 2,000 rows, with sequence noise."""
    seeds = torch.tensor([sequence_seed("draw", row) for row in range(2000)])
    counts = torch.zeros(logits.shape[0])
    for index in range(num // 2000):
        u = counter_uniforms(seeds, torch.full_like(seeds, index))
        counts += torch.bincount(draw_tokens(logits.expand(2000, -1), u), minlength=logits.shape[0])
    return counts


@pytest.mark.parametrize(
    "vocab", [32, 1024, pytest.param(5008, marks=pytest.mark.ci)]
)  # one level, its largest, two levels
def test_frequencies_are_the_softmax(vocab: int) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    logits[torch.randint(0, vocab, (vocab // 4,), generator=torch.Generator().manual_seed(1))] = CUT
    if vocab > sampling.SMALL_VOCABULARY:
        logits[128:512] = CUT  # whole blocks of nothing
    num = 40_000
    counts = counts_of(logits, num)
    assert counts[logits == CUT].sum() == 0
    expected = softmax(logits) * num
    freedom = int((expected >= 5).sum())
    assert freedom > 15
    assert chi_square(counts, expected) < chi_square_limit(freedom)
    # Control: the same draws are no sample of a distribution 5 % colder.
    assert chi_square(counts, softmax(logits * 1.05) * num) > chi_square_limit(freedom)


@pytest.mark.parametrize("vocab", [48, 5008])
def test_draws_are_the_inverse_cdf(vocab: int) -> None:
    logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 5::7] = CUT
    u = grid(64, 1)[:, 0]
    cumulative = torch.stack([softmax(row) for row in logits]).cumsum(-1)
    expected = (cumulative < u[:, None]).sum(-1)
    got = draw_tokens(logits, u)
    # Block sums are float32 (2^-24 a term): where u lies within 1e-6 of a step, the neighbour is as right.
    clear = (cumulative - u[:, None]).abs().amin(-1) > 1e-6
    assert clear.sum() > 55
    assert torch.equal(got[clear], expected[clear])


@pytest.mark.parametrize("vocab", [16, 1024, 1040, 5008, 50272])
@pytest.mark.parametrize("uniform", [2.0**-25, 0.5, 1 - 2.0**-25, 1 - 2.0**-53])
def test_cut_columns_are_never_drawn(vocab: int, uniform: float) -> None:
    """Extremes of the 24-bit uniforms and the last double before 1; support at an end, or in one column."""
    keeps: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda column: column == vocab // 2,
        lambda column: column == 0,
        lambda column: column == vocab - 1,
        lambda column: (column >= vocab // 3) & (column < vocab // 2),
        lambda column: column % 5 == 3,
        lambda column: column < vocab - 7,
    ]
    column = torch.arange(vocab)
    noise = torch.randn(len(keeps), vocab, generator=torch.Generator().manual_seed(0)) * 30
    kept = torch.stack([keep(column) for keep in keeps])
    drawn = draw_tokens(
        noise.masked_fill(~kept, CUT), torch.full((len(keeps),), uniform, dtype=torch.float64)
    )
    assert kept.gather(1, drawn[:, None]).all()


def test_a_share_rounded_up_to_one_stays_inside() -> None:
    """The second level divides a difference by a float32 block sum: its share of the block can round to 1."""
    weights = torch.tensor([[0.5, 0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    for share in (1.0, 1.0 + 1e-7):
        assert sampling._search(weights, torch.full((2,), share, dtype=torch.float64)).tolist() == [2, 4]


def test_draws_do_not_depend_on_the_batch() -> None:
    for vocab in (96, 5008):
        logits = torch.randn(37, vocab, generator=torch.Generator().manual_seed(0))
        u = grid(37, 1)[:, 0]
        whole = draw_tokens(logits, u)
        alone = torch.cat([draw_tokens(logits[row : row + 1], u[row : row + 1]) for row in range(37)])
        assert torch.equal(whole, alone)


# --- filters -----------------------------------------------------------------------------------------------


def theirs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """transformers' chain in our order: temperature, top-k, min-p, top-p."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    return chain(torch.zeros(logits.shape[0], 1, dtype=torch.int64), logits.clone())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("vocab", [48, 3008])  # below and above the nucleus guess
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 10**6},
        {"top_p": 0.02},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 0.02},
        {"min_p": 0.9},
        {"top_k": 20, "top_p": 0.7},
        {"top_k": 30, "min_p": 0.05},
        {"min_p": 0.03, "top_p": 0.8},
        {"top_k": 25, "min_p": 0.01, "top_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_kept_sets_are_those_of_transformers(
    vocab: int, options: dict[str, float], temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, **options)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(vocab)
    # Distinct values in random order, so that there are no ties; flat rows and steep rows.
    steps = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(40)]).float() / vocab
    logits = steps * torch.linspace(0.5, 30, 40)[:, None] / temperature
    kept = filter_logits(logits, params)
    surviving = kept != CUT
    # Theirs in float64: in float32 the two agree only where both happen to sum alike.
    expected = theirs(logits.double(), replace(params, temperature=1.0)) != CUT
    undecided = on_the_edge(logits, params)
    assert undecided.sum() <= 20  # of 40 rows: what is left open proves nothing
    assert torch.equal(surviving | undecided, expected | undecided)
    sizes = surviving.sum(-1)
    assert sizes.min() >= 1
    if options not in ({"top_k": 10**6},):
        assert sizes.min() < vocab
    assert torch.equal(kept[surviving], logits[surviving])


def on_the_edge(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Mark the tokens at which a sum of float32 probabilities may fall on either side of top_p.

    A probability has a relative error of about 1e-7 from its `exp`, and all of a row share that of the normaliser: a
    sum of 3,008 terms in 8 to 16 lanes, thus 200 to 400 roundings of 3e-8 that add up like a random walk: 6e-7.
    """
    before_top_p = theirs(logits.double(), replace(params, temperature=1.0, top_p=1.0))
    sorted_probs, order = before_top_p.softmax(-1).sort(descending=True)
    before = sorted_probs.cumsum(-1) - sorted_probs
    is_near = ((before - params.top_p).abs() < 1e-6) & (params.top_p < 1) & (sorted_probs > 0)
    if params.min_p:  # a comparison of logits of size 50, which float32 holds to 4e-6: no token is that near
        distance = logits.double() - logits.double().amax(-1, keepdim=True) - math.log(params.min_p)
        assert distance.abs().min() > 1e-5
    return torch.zeros_like(is_near).scatter(1, order, is_near)


def test_filters_leave_their_argument_alone() -> None:
    logits = torch.randn(3, 32)
    before = logits.clone()
    filter_logits(logits, SamplingParams(top_k=3, top_p=0.5, min_p=0.1))
    assert torch.equal(logits, before)
    assert filter_logits(logits, SamplingParams()) is logits


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}])
def test_logprobs_are_renormalised_over_the_kept_set(options: dict[str, float]) -> None:
    params = SamplingParams(**options)  # pyright: ignore[reportArgumentType]
    rows = 400
    logits = torch.randn(1, 48, generator=torch.Generator().manual_seed(2)).expand(rows, -1)
    seeds = torch.tensor([sequence_seed(row) for row in range(rows)])
    tokens, logprobs = sample_tokens(logits, seeds, torch.zeros(rows, dtype=torch.int64), params)
    expected = softmax(theirs(logits[:1], params)[0]).log()
    assert logprobs.dtype == torch.float32
    # float32: a logit of size 3 and a normaliser of size 5 carry 5e-7 each.
    torch.testing.assert_close(logprobs.double(), expected[tokens], atol=2e-6, rtol=0)
    seen = tokens.unique()
    if options:  # every kept token turns up in 400 draws, and their probabilities sum to one
        total = sum(float(logprobs[tokens == token][0].exp()) for token in seen)
        assert total == pytest.approx(1.0, abs=1e-5)


def test_greedy_takes_the_top_and_scores_it_at_temperature_one() -> None:
    logits = torch.randn(9, 48, generator=torch.Generator().manual_seed(2)) * 4
    nothing = torch.zeros(9, dtype=torch.int64)
    greedy = SamplingParams(temperature=0.0, top_p=0.5, top_k=2)
    tokens, logprobs = sample_tokens(logits, nothing, nothing, greedy)
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    expected = torch.stack([softmax(row).max().log() for row in logits])
    torch.testing.assert_close(logprobs.double(), expected, atol=2e-6, rtol=0)


def test_drawn_tokens_follow_seed_and_index_alone() -> None:
    logits = torch.zeros(6, 48)
    seeds = torch.tensor([1, 1, 2, 2, 1, 1])
    index = torch.tensor([0, 0, 0, 0, 1, 2])
    tokens, _ = sample_tokens(logits, seeds, index, SamplingParams())
    # Uniform over 48: the draw is floor(48 u).
    assert tokens.tolist() == [
        int(48 * reference_uniform(*pair)) for pair in zip(seeds.tolist(), index.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature = -0.1: expected 0"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"temperature": 10.0}, "temperature = 10.0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"top_p": math.nan}, "top_p = nan"),
        ({"min_p": 1.0}, "min_p = 1.0"),
        ({"min_p": -0.5}, "min_p = -0.5"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
    ],
)
def test_params_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)  # pyright: ignore[reportArgumentType]


def test_a_nucleus_ends_where_its_probability_is_reached() -> None:
    """The smallest set with at least top_p: a token before which exactly top_p lies is not in it."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    exact = float(torch.softmax(logits, -1)[0, 0])
    for top_p, count in ((exact, 1), (exact * (1 + 1e-6), 2), (exact * (1 - 1e-6), 1)):
        kept = filter_logits(logits, SamplingParams(top_p=top_p)) > float("-inf")
        assert kept.sum() == count
