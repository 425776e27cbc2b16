"""Cutting sequences into micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.algo.packing import TrainingSequence, pack, split_by_budget

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
