"""Sets of tokens that filters kept: their encoding, and log-probabilities with gradients over them."""

from __future__ import annotations

from base64 import b64decode
from functools import partial

import pytest
import torch

from whet.algo.kept import encode_kept, join_kept, keep_only
from whet.algo.logprobs import exp_logits, head_logits, token_logprobs
from whet.algo.packing import TrainingSequence, pack

CPU = torch.device("cpu")
CUT = float("-inf")


def random_sets(rows: int, vocab: int, num_valid: int) -> torch.Tensor:
    """Sets of every size from 1 to all, at random places."""
    generator = torch.Generator().manual_seed(vocab)
    kept = torch.zeros(rows, vocab, dtype=torch.bool)
    for row in range(rows):
        size = 1 + (num_valid - 1) * row // max(1, rows - 1)
        kept[row, torch.randperm(num_valid, generator=generator)[:size]] = True
    return kept


@pytest.mark.parametrize("vocab", [16, 32, 48, 1008, 4096])
def test_sets_survive_the_way_to_the_trainer(vocab: int) -> None:
    kept = random_sets(40, vocab, vocab)
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(0))
    rows = encode_kept(kept)
    sets = join_kept(rows, CPU)
    assert torch.equal(keep_only(logits.clone(), sets), logits.masked_fill(~kept, CUT))
    middle = slice(11, 29)  # a chunk of rows
    assert torch.equal(
        keep_only(logits[middle].clone(), sets, 11), logits[middle].masked_fill(~kept[middle], CUT)
    )


def test_a_set_takes_its_ids_or_a_bit_per_token() -> None:
    kept = torch.zeros(4, 4096, dtype=torch.bool)
    kept[0, [7, 4095]] = True
    kept[1, :127] = True
    kept[2, :128] = True
    kept[3] = True
    rows = [b64decode(row) for row in encode_kept(kept)]
    assert [len(row) for row in rows] == [8, 4 * 127, 512, 512]
    assert rows[0] == (7).to_bytes(4, "little") + (4095).to_bytes(4, "little")
    assert rows[2] == b"\xff" * 16 + b"\x00" * 496


def test_an_empty_text_keeps_everything() -> None:
    kept = random_sets(5, 48, 48)
    logits = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    rows = ["" if row in (0, 3) else text for row, text in enumerate(encode_kept(kept))]
    kept[[0, 3]] = True
    assert torch.equal(keep_only(logits.clone(), join_kept(rows, CPU)), logits.masked_fill(~kept, CUT))


def test_nothing_is_kept_back_without_filters() -> None:
    logits = torch.randn(3, 16)
    assert keep_only(logits, None) is logits
    assert encode_kept(torch.zeros(0, 16, dtype=torch.bool)) == []


def oracle(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    kept: torch.Tensor,
    temperature: float,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over each row's own tokens alone, picked out one by one; float64."""
    scores, entropies = [], []
    for row, target in enumerate(targets.tolist()):
        ids = kept[row].nonzero().flatten()
        logits = weight[ids] @ hidden[row]
        logits = cap * torch.tanh(logits / cap) if cap else logits
        logprobs = torch.log_softmax(logits / temperature, dim=0)
        scores.append(logprobs[int((ids == target).nonzero())])
        entropies.append(-(logprobs.exp() * logprobs).sum())
    return torch.stack(scores), torch.stack(entropies)


@pytest.mark.parametrize(("temperature", "cap"), [(1.0, 0.0), (0.7, 0.0), (0.7, 3.0)])
@pytest.mark.parametrize(("vocab", "num_valid", "chunk"), [(19, 19, 4), (64, 50, None), (200, 199, 7)])
def test_values_and_gradients_are_those_of_the_kept_set(
    vocab: int, num_valid: int, chunk: int | None, temperature: float, cap: float
) -> None:
    rows, width = 21, 6
    generator = torch.Generator().manual_seed(vocab)
    hidden, weight = (
        torch.randn(size, width, generator=generator, dtype=torch.float64).requires_grad_()
        for size in (rows, vocab)
    )
    kept = random_sets(rows, -(-vocab // 16) * 16, num_valid)
    targets = torch.stack([row.nonzero().flatten()[-1] for row in kept])
    mix = torch.randn(2, rows, generator=generator, dtype=torch.float64)

    def total(results: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (mix[0] * results[0]).sum() + (mix[1] * results[1]).sum()

    sets = join_kept(encode_kept(kept), CPU)
    options = {"temperature": temperature, "cap": cap}
    score = partial(token_logprobs, **options, num_valid=num_valid, kept=sets, chunk=chunk)
    got, expected = score(hidden, weight, targets), oracle(hidden, weight, targets, kept, **options)
    grads = torch.autograd.grad(total(got), (hidden, weight))
    wanted = torch.autograd.grad(total(expected), (hidden, weight))
    assert not got[0][0]  # one token is left: it is certain, and teaches nothing
    # Float64 on both sides: what differs is the order of sums of at most 200 terms of size 1.
    for value, want in zip([*got, *grads], [*expected, *wanted], strict=True):
        torch.testing.assert_close(value, want, rtol=1e-11, atol=1e-12)
    assert torch.autograd.gradcheck(lambda h, w: score(h, w, targets), (hidden, weight), fast_mode=True)


@pytest.mark.usefixtures("either")
def test_float32_is_the_samplers_normaliser_and_close_to_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width, vocab = 33, 32, 1008
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(size, width, generator=generator) for size in (rows, vocab))
    kept = random_sets(rows, vocab, vocab)
    targets = torch.stack([row.nonzero().flatten()[0] for row in kept])
    sets = join_kept(encode_kept(kept), CPU)
    wide = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    expected = oracle(*wide, targets, kept, 0.8)
    wanted = torch.autograd.grad(expected[0].sum() + expected[1].sum(), wide)
    found = []
    for chunk in (None, 5):  # exponentials kept for the backward pass, or logits computed again
        narrow = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        if chunk:
            monkeypatch.setattr("whet.kernels.cpu.head.KEEP_BYTES", 0)
        got = token_logprobs(*narrow, targets, temperature=0.8, kept=sets, chunk=chunk)
        grads = torch.autograd.grad(got[0].sum() + got[1].sum(), narrow)
        for value, want in zip([*got, *grads], [*expected, *wanted], strict=True):
            # Logits of size 20 carry 1e-6 in float32, sums of 33 rows and 1,008 columns a few times that.
            torch.testing.assert_close(value.double(), want, rtol=1e-4, atol=1e-4)
        found.append(got)
    assert torch.equal(found[0][0], found[1][0])


def test_micro_batches_carry_the_sets_of_their_own_tokens() -> None:
    sets = encode_kept(random_sets(9, 32, 32))
    sequences = [
        TrainingSequence(prompt_ids=(1, 2), completion_ids=(3, 4, 5), kept=tuple(sets[:3])),
        TrainingSequence(prompt_ids=(1, 2), completion_ids=(6,), kept=tuple(sets[3:4])),
        TrainingSequence(
            prompt_ids=(7,), completion_ids=(8, 9, 3, 4, 5, 6), trained=(True, False, True, True, True, True),
            kept=tuple(sets[4:9]),
        ),
    ]  # fmt: skip
    of_target = {
        (index, place): row
        for index, sequence in enumerate(sequences)
        for place, row in enumerate(sequence.kept)
    }
    for budget in (100, 7):
        for micro in pack(sequences, token_budget=budget).micro_batches:
            places = [
                (index, place) for index in micro.indices_B for place in range(sequences[index].num_trained)
            ]
            wanted = join_kept([of_target[place] for place in places], CPU)
            assert micro.kept is not None
            assert micro.kept.starts == wanted.starts
            assert torch.equal(micro.kept.words_Z, wanted.words_Z)
    assert all(
        micro.kept is None
        for micro in pack(
            [TrainingSequence(prompt_ids=(1,), completion_ids=(2,))], token_budget=9
        ).micro_batches
    )
    with pytest.raises(AssertionError, match="others without"):
        pack([sequences[0], TrainingSequence(prompt_ids=(1,), completion_ids=(2,))], token_budget=99)


def test_the_set_of_a_head_has_its_padded_width() -> None:
    """A map has a bit per column of the logits, which are padded to 16: sampler and trainer count the same."""
    hidden, weight = torch.randn(2, 8), torch.randn(49, 8)
    logits = head_logits(hidden, weight, temperature=1.0, num_valid=49)
    full = join_kept(encode_kept(logits > CUT), CPU)
    assert full.starts == (0, 2, 4)
    assert torch.equal(exp_logits(keep_only(logits.clone(), full))[2], exp_logits(logits)[2])
