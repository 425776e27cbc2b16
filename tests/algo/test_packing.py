"""Cutting sequences into micro-batches."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.algo.losses import Aggregation
from whet.algo.packing import TrainingSequence, pack, split_by_budget
from whet.types import Segment

LENGTHS = st.lists(st.integers(1, 40), max_size=30)


@given(LENGTHS, st.integers(1, 100))
@settings(deadline=None, max_examples=100)
def test_bins_respect_the_budget_and_hold_every_index_once(lengths: list[int], budget: int) -> None:
    bins = split_by_budget(lengths, budget)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    for members in bins:
        assert members
        assert len(members) == 1 or sum(lengths[index] for index in members) <= budget
    # Best fit opens a bin only when no other has room, so at most one bin is half empty or less.
    assert sum(2 * sum(lengths[index] for index in members) <= budget for members in bins) <= 1


def test_best_fit_decreasing_by_hand() -> None:
    def lengths_of(lengths: list[int]) -> list[list[int]]:
        return [[lengths[index] for index in members] for members in split_by_budget(lengths, 10)]

    # 7, 6; the 3 fills up the 7; 2 and 2 fill up the 6. The emptiest bin first, or short ones first, would need three.
    assert lengths_of([6, 7, 2, 3, 2]) == [[7, 3], [6, 2, 2]]
    # The 1 goes where 9 are, not to the first bin that has room.
    assert lengths_of([8, 6, 3, 1]) == [[8], [6, 3, 1]]


SEQUENCES = [
    TrainingSequence(
        prompt_ids=(1, 2), completion_ids=(3, 4, 5), advantage=0.5, sampler_logprobs=(-1, -2, -3)
    ),
    TrainingSequence(prompt_ids=(6,), completion_ids=(7,), advantage=-1.5, sampler_logprobs=(-4,)),
    TrainingSequence(
        prompt_ids=(8, 9, 10), completion_ids=(11, 12), advantage=2.0, sampler_logprobs=(-5, -6)
    ),
]


@pytest.mark.parametrize("budget", [1, 5, 7, 100])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_every_token_keeps_its_data_whatever_the_cut(budget: int, aggregation: str) -> None:
    batch = pack(SEQUENCES, token_budget=budget, aggregation=aggregation)  # type: ignore[arg-type]
    assert batch.num_trained_tokens == 6
    assert batch.num_trained_sequences == 3
    seen = []
    for micro in batch.micro_batches:
        assert sum(micro.lengths_B) == len(micro.tokens_N)
        assert micro.tokens_N[micro.source_M + 1].tolist() == micro.targets_M.tolist()
        starts = [sum(micro.lengths_B[:row]) for row in range(len(micro.lengths_B))]
        for row, start in enumerate(starts):
            mine = micro.sequence_M == row
            first = int(micro.source_M[mine][0])
            seen.append(
                (
                    tuple(micro.tokens_N[start : first + 1].tolist()),
                    tuple(micro.targets_M[mine].tolist()),
                    tuple(micro.advantages_M[mine].tolist()),
                    tuple(micro.sampler_logprobs_M[mine].tolist()),
                    tuple(micro.weights_M[mine].tolist()),
                )
            )
    expected = [
        (
            s.prompt_ids,
            s.completion_ids,
            (s.advantage,) * len(s.completion_ids),
            s.sampler_logprobs,
            (float(torch.tensor(1 / len(s.completion_ids))) if aggregation == "sequence_mean" else 1.0,)
            * len(s.completion_ids),
        )
        for s in SEQUENCES
    ]
    assert sorted(seen) == sorted(expected)


def test_no_row_of_a_neighbour_is_a_source() -> None:
    (micro,) = pack(SEQUENCES, token_budget=100).micro_batches
    ends = torch.tensor(micro.lengths_B).cumsum(0)
    # A sequence's last token predicts nothing: its successor in the flat batch belongs to another sequence.
    assert not set(micro.source_M.tolist()) & set((ends - 1).tolist())


def test_supervised_sequences_have_zero_advantage_and_log_probability() -> None:
    (micro,) = pack([TrainingSequence(prompt_ids=(1,), completion_ids=(2, 3))], token_budget=9).micro_batches
    assert micro.advantages_M.tolist() == micro.sampler_logprobs_M.tolist() == [0.0, 0.0]


def test_empty_completions_are_left_out() -> None:
    batch = pack([TrainingSequence(prompt_ids=(1, 2), completion_ids=())], token_budget=9)
    assert batch.micro_batches == ()
    assert batch.num_trained_tokens == batch.num_trained_sequences == 0


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        pack([TrainingSequence(prompt_ids=(), completion_ids=(2,))], token_budget=9)


ZIGZAG = TrainingSequence(
    prompt_ids=(1, 2),
    completion_ids=(3, 4, 5, 6),
    trained=(False, True, True, False),
    advantage=0.5,
    sampler_logprobs=(-1, -2),
    num_group_tokens=5,
)


@pytest.mark.parametrize(
    ("aggregation", "weight"),
    [("token_mean", 1.0), ("sequence_mean", 1 / 2), ("prompt_mean", 1 / 5), ("sequence_sum", 1.0)],
)
def test_a_mask_says_which_tokens_are_trained(aggregation: Aggregation, weight: float) -> None:
    """Two of four tokens count, in targets, weights and denominators; a sequence of none does not count at all."""
    nothing = TrainingSequence(prompt_ids=(7,), completion_ids=(8, 9), trained=(False, False))
    assert (ZIGZAG.num_trained, ZIGZAG.num_tokens, nothing.num_trained) == (2, 6, 0)
    batch = pack([nothing, ZIGZAG], token_budget=99, aggregation=aggregation, dtype=torch.float64)
    assert (batch.num_trained_tokens, batch.num_trained_sequences) == (2, 1)
    (micro,) = batch.micro_batches
    assert micro.tokens_N.tolist() == [1, 2, 3, 4, 5, 6]  # all are read
    assert micro.targets_M.tolist() == [4, 5]
    assert micro.source_M.tolist() == [2, 3]  # the rows before them
    assert micro.sampler_logprobs_M.tolist() == [-1.0, -2.0]
    assert micro.indices_B == (1,)
    assert micro.weights_M.tolist() == [weight, weight]


def test_a_shared_prompt_is_there_once_and_counts_once() -> None:
    """Its sequences attend to it and to themselves; a budget of 3 + 2 + 2 tokens holds both."""
    first = TrainingSequence(prompt_ids=(1, 2, 3), completion_ids=(4, 5))
    second = TrainingSequence(prompt_ids=(1, 2, 3), completion_ids=(6, 7), trained=(False, True))
    (micro,) = pack([first, second], token_budget=7).micro_batches
    assert micro.tokens_N.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert micro.targets_M.tolist() == [4, 5, 7]
    assert micro.source_M.tolist() == [2, 3, 5]
    # (first row, rows, first row of what is seen before, its rows)
    assert micro.segments == (Segment(0, 3, 0, 0), Segment(3, 2, 0, 3), Segment(5, 2, 0, 3))
    apart = pack([first, second], token_budget=6).micro_batches
    assert [len(micro.tokens_N) for micro in apart] == [5, 5]


@pytest.mark.parametrize("budget", [1, 9, 100])
def test_every_column_stays_with_its_sequence(budget: int) -> None:
    names = [field.name for field in fields(TrainingSequence) if field.name.endswith("_T")]
    names.remove("teacher_logprobs_T")  # enters the advantages before anything is packed
    lengths = [2, 4, 1, 3]  # not the order that they are packed in

    def numbers(index: int, place: int) -> torch.Tensor:
        return 100.0 * index + 10.0 * place + torch.arange(lengths[index], dtype=torch.float64)

    sequences = [
        TrainingSequence(
            prompt_ids=(index + 1,),
            completion_ids=tuple(range(length)),
            **{name: numbers(index, place) for place, name in enumerate(names)},  # type: ignore[arg-type]
        )
        for index, length in enumerate(lengths)
    ]
    seen = []
    for micro in pack(sequences, token_budget=budget, dtype=torch.float64).micro_batches:
        for row, index in enumerate(micro.indices_B):
            seen.append(index)
            mine = micro.sequence_M == row
            for place, name in enumerate(names):
                column_M = getattr(micro, name.removesuffix("_T") + "_M")
                assert column_M[mine].tolist() == numbers(index, place).tolist(), name
    assert sorted(seen) == [0, 1, 2, 3]


def test_columns_that_are_absent() -> None:
    (micro,) = pack([SEQUENCES[0]], token_budget=9).micro_batches
    assert micro.policy_weights_M.tolist() == [1.0] * 3
    assert micro.proximal_logprobs_M.tolist() == micro.sampler_logprobs_M.tolist() == [-1.0, -2.0, -3.0]
    assert (
        micro.ref_logprobs_M.tolist()
        == micro.start_values_M.tolist()
        == micro.returns_M.tolist()
        == [0.0] * 3
    )


def test_a_prompt_counts_once_in_each_part_of_its_family() -> None:
    family = [TrainingSequence(prompt_ids=(1, 2, 3, 4), completion_ids=(5, 6, n)) for n in range(5)]
    batch = pack(family, token_budget=10)
    assert sorted(len(micro.tokens_N) for micro in batch.micro_batches) == [7, 10, 10]
    two = [TrainingSequence(prompt_ids=(n,), completion_ids=(5, 6)) for n in (1, 1, 2, 2)]
    (micro,) = pack(two, token_budget=10).micro_batches
    assert len(micro.tokens_N) == 10
