"""The chunked head against a plain float64 log_softmax."""

from __future__ import annotations

import pytest
import torch

from whet.algo import logprobs
from whet.algo.logprobs import token_logprobs
from whet.algo.packing import TrainingSequence, pack

NUM_ROWS, WIDTH = 21, 6


def make_inputs(
    vocab: int, num_valid: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    hidden_MD = torch.randn(NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weight_VD = torch.randn(vocab, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    targets_M = torch.randint(0, num_valid, (NUM_ROWS,), generator=generator)
    return hidden_MD.requires_grad_(), weight_VD.requires_grad_(), targets_M


def oracle(
    hidden_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_M: torch.Tensor,
    temperature: float,
    num_valid: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All logits at once, in float64, from the definition."""
    logits = (hidden_MD.double() @ weight_VD.double().T)[:, :num_valid] / temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    return log_probs[torch.arange(len(targets_M)), targets_M], -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("upstream", ["logprob", "entropy", "both"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("vocab", "num_valid", "chunk"), [(19, 19, 4), (32, 27, 1), (50, 50, 100), (21, 20, 7)]
)
def test_values_and_gradients_match_the_oracle(
    upstream: str, temperature: float, vocab: int, num_valid: int, chunk: int
) -> None:
    hidden_MD, weight_VD, targets_M = make_inputs(vocab, num_valid)
    generator = torch.Generator().manual_seed(1)
    mix_2M = torch.randn(2, NUM_ROWS, generator=generator, dtype=torch.float64)
    mix_2M[0 if upstream == "entropy" else 1] *= upstream == "both"

    def total(results: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return sum((mix * values).sum() for mix, values in zip(mix_2M, results, strict=True))

    expected = oracle(hidden_MD, weight_VD, targets_M, temperature, num_valid)
    expected_grads = torch.autograd.grad(total(expected), (hidden_MD, weight_VD))
    got = token_logprobs(
        hidden_MD, weight_VD, targets_M, temperature=temperature, num_valid=num_valid, chunk=chunk
    )
    grads = torch.autograd.grad(total(got), (hidden_MD, weight_VD))
    # Float64 on both sides: what differs is the order of sums over at most 50 terms of size 1.
    for value, want in zip([*got, *grads], [*expected, *expected_grads], strict=True):
        torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-12)


def test_one_of_two_outputs_may_go_unused() -> None:
    hidden_MD, weight_VD, targets_M = make_inputs(19, 19)
    expected = torch.autograd.grad(oracle(hidden_MD, weight_VD, targets_M, 1.0, 19)[1].sum(), hidden_MD)
    got = torch.autograd.grad(token_logprobs(hidden_MD, weight_VD, targets_M)[1].sum(), hidden_MD)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)  # as above


@pytest.mark.parametrize("num_valid", [7, 5])
def test_gradcheck(num_valid: int) -> None:
    hidden_MD, weight_VD, _ = make_inputs(7, num_valid)
    hidden_MD = hidden_MD[:5].detach().requires_grad_()
    targets_M = torch.tensor([0, 4, 3, 2, 1])

    def score(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(hidden, weight, targets_M, temperature=0.7, num_valid=num_valid, chunk=2)

    assert torch.autograd.gradcheck(score, (hidden_MD, weight_VD))


def test_float32_is_close_and_any_chunk_gives_the_same_bits() -> None:
    hidden_MD, weight_VD, targets_M = make_inputs(50, 45, torch.float32)
    expected = oracle(hidden_MD, weight_VD, targets_M, 0.7, 45)
    whole = token_logprobs(hidden_MD, weight_VD, targets_M, temperature=0.7, num_valid=45)
    for value, want in zip(whole, expected, strict=True):
        assert value.dtype == torch.float32
        # Logits of size 10 have 1e-6 of rounding in float32; a few such errors add up.
        torch.testing.assert_close(value.double(), want, rtol=0, atol=1e-5)
    for chunk in (1, 5, 16):
        parts = token_logprobs(hidden_MD, weight_VD, targets_M, temperature=0.7, num_valid=45, chunk=chunk)
        assert torch.equal(parts[0], whole[0])
        assert torch.equal(parts[1], whole[1])


def test_bfloat16_head_is_scored_in_float32() -> None:
    hidden_MD, weight_VD, targets_M = make_inputs(50, 50, torch.bfloat16)
    got, entropy_M = token_logprobs(hidden_MD, weight_VD, targets_M)
    expected, _ = oracle(hidden_MD, weight_VD, targets_M, 1.0, 50)
    assert got.dtype == entropy_M.dtype == torch.float32
    # The inputs are the same bfloat16 numbers on both sides; products and sums are float32 (see above).
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)
    grad, want = (torch.autograd.grad(x.sum(), weight_VD)[0] for x in (got, expected))
    assert grad.dtype == torch.bfloat16
    # One rounding to bfloat16 (8 bits: 0.4 %) on both sides.
    torch.testing.assert_close(grad.float(), want.float(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("chunk", [1, 4, 21, 1000])
def test_never_more_than_chunk_rows_of_logits(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    original = logprobs.head_logits

    def record(hidden_MD: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        rows.append(hidden_MD.shape[0])
        return original(hidden_MD, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(logprobs, "head_logits", record)
    hidden_MD, weight_VD, targets_M = make_inputs(19, 19)
    score, _ = token_logprobs(hidden_MD, weight_VD, targets_M, chunk=chunk)
    score.sum().backward()
    assert max(rows) == min(chunk, NUM_ROWS)
    assert sum(rows) == 2 * NUM_ROWS


def test_golden_off_by_one() -> None:
    # Of [10, 11, 12, 13] only 12 is trained: its score comes from the row of 11, and no other row has a gradient.
    table_VD = torch.randn(16, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch = pack(
        [TrainingSequence(prompt_ids=(10, 11), completion_ids=(12,))],
        token_budget=100,
    )
    (micro,) = batch.micro_batches
    hidden_ND = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    hidden_ND.requires_grad_()
    got, _ = token_logprobs(hidden_ND.index_select(0, micro.source_M), table_VD, micro.targets_M)
    expected = torch.log_softmax(table_VD @ hidden_ND[1], dim=0)[12]
    assert got.shape == (1,)
    torch.testing.assert_close(got[0], expected, rtol=1e-12, atol=1e-12)  # as above
    got.sum().backward()
    assert hidden_ND.grad is not None
    assert hidden_ND.grad.abs().sum(1).ne(0).tolist() == [False, True, False]


def test_no_targets() -> None:
    hidden_MD, weight_VD, _ = make_inputs(19, 19)
    empty = torch.zeros(0, dtype=torch.int64)
    score_M, entropy_M = token_logprobs(hidden_MD[:0], weight_VD, empty)
    assert score_M.shape == entropy_M.shape == (0,)
    score_M.sum().backward()
    assert hidden_MD.grad is not None
    assert not hidden_MD.grad.any()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature: float) -> None:
    hidden_MD, weight_VD, targets_M = make_inputs(19, 19)
    with pytest.raises(ValueError, match="expected a positive number"):
        token_logprobs(hidden_MD, weight_VD, targets_M, temperature=temperature)


def test_default_chunk_is_bounded() -> None:
    cpu = torch.device("cpu")
    assert logprobs.chunk_rows(50, cpu) == 16384
    assert logprobs.chunk_rows(150_000, cpu) == 1024
    # 64 MiB of float32 logits of 8,000 ids.
    assert logprobs.chunk_rows(8_000, cpu) == 64 * 2**20 // (4 * 8_000)
