"""Records of steps: what they hold, when they are made and removed, and that the disk may refuse them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import new_policy, problems

from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.model.attention import Packed
from whet.storage.checkpoint import save_step, step_folder
from whet.storage.commit import DiskFullError, commit_folder
from whet.train import record as recorded
from whet.train.data.pairs import Pair
from whet.train.optim.step import OptimConfig
from whet.train.record import (
    KEPT_FAULTS,
    Recorder,
    as_sequences,
    fit_batch,
    read_record,
    recorded_steps,
    score_tokens,
    weight_sums,
)
from whet.train.sft import demonstration

OPTIM = OptimConfig(token_budget=64)
METRICS = {"sft/loss": 1 / 3, "sft/grad_norm": 0.1}


def describe(policy: Policy, count: int = 3, token_budget: int = 64) -> dict[str, Any]:
    rows = [demonstration(policy, problem) for problem in problems(count)]
    drawn = [(7, problem) for problem in problems(count)]
    return fit_batch(drawn, rows, policy, OPTIM, token_budget=token_budget, attention="fast")


def record(run: Path, step: int, policy: Policy, *, is_skipped: bool = False) -> None:
    recorder = Recorder(run, "sft", policy)
    recorder.begin(lambda: describe(policy))
    recorder.end(step, METRICS, lambda: ({"a": torch.ones(2)}, {"b": 1}), is_skipped=is_skipped)


def save(run: Path, steps: Sequence[int]) -> None:
    for step in steps:
        with commit_folder(step_folder(run, step)) as folder:
            (folder / "x").write_text("x")


def test_what_is_written_is_read_back_exactly(tmp_path: Path) -> None:
    policy = new_policy()
    record(tmp_path, 4, policy)
    found = read_record(tmp_path / "replay" / "step_00000004")
    assert (found.kind, found.step, found.is_fault) == ("sft", 4, False)
    assert found.metrics == METRICS
    assert found.machine["threads"] == 1
    assert found.machine["device"] == "cpu"
    assert found.weights == weight_sums(policy.model)
    (batch,) = found.batches
    assert batch["token_budget"] == 64
    for row, problem, logprobs in zip(batch["rows"], problems(3), batch["logprobs"], strict=True):
        sequence = demonstration(policy, problem)
        assert row["epoch"] == 7
        assert row["problem"]["prompt"] == problem.prompt
        assert tuple(row["trained_on"]["prompt_ids"]) == sequence.prompt_ids
        assert tuple(row["trained_on"]["completion_ids"]) == sequence.completion_ids
        # Full precision: a float32 goes through JSON unchanged.
        assert [score_tokens(policy, [sequence], OPTIM, attention="fast")[0]] == [logprobs]
    assert [path.name for path in (tmp_path / "replay").iterdir()] == ["step_00000004"]


def test_two_records_of_one_step_are_the_same_bytes(tmp_path: Path) -> None:
    policy = new_policy()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        record(tmp_path / name, 1, policy)
    files = [(tmp_path / name / "replay/step_00000001/batch.json").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]


def test_logprobs_are_those_of_the_sequences_in_their_order() -> None:
    policy = new_policy()
    sequences = [demonstration(policy, problem) for problem in problems(6)]
    together = score_tokens(policy, sequences, OPTIM, attention="exact")
    alone = [score_tokens(policy, [sequence], OPTIM, attention="exact")[0] for sequence in sequences]
    assert together == alone
    ids = list(sequences[2].prompt_ids + sequences[2].completion_ids)
    with torch.no_grad():
        hidden = policy.model(
            torch.tensor(ids),
            torch.arange(len(ids)),
            Packed((len(ids),), torch.device("cpu"), "exact"),
        )
        logits = hidden @ policy.model.head_weight.T
        valid = logits[:, : policy.tokenizer.vocab_size].log_softmax(-1)
    first = len(sequences[2].prompt_ids)
    expected = [float(valid[place - 1, ids[place]]) for place in range(first, len(ids))]
    assert together[2] == pytest.approx(expected, abs=1e-5)  # float32, another order of the same sums


def test_a_pair_is_its_chosen_and_its_rejected_completion() -> None:
    pair = Pair(
        uid="a", prompt="", chosen="", rejected="", prompt_ids=(1, 2), chosen_ids=(3,), rejected_ids=(4, 5)
    )
    first, second = as_sequences([pair])
    assert (first.prompt_ids, first.completion_ids) == ((1, 2), (3,))
    assert (second.prompt_ids, second.completion_ids) == ((1, 2), (4, 5))
    batch = fit_batch([(0, pair)], [pair], new_policy(), OPTIM, token_budget=64, attention="fast")
    assert Pair.from_row(json.loads(json.dumps(batch["rows"][0]["trained_on"]))) == pair
    assert [len(row) for row in batch["logprobs"]] == [1, 2]


def test_a_step_is_recorded_only_when_it_is_due(tmp_path: Path) -> None:
    policy, recorder, calls = new_policy(), Recorder(tmp_path, "sft", new_policy()), []

    def describing() -> dict[str, Any]:
        calls.append(1)
        return describe(policy)

    for step in range(1, 6):
        recorder.begin(describing)
        recorder.end(step, METRICS, lambda: ({}, {}), is_skipped=False)
        if step == 3:
            save(tmp_path, [3])
            recorder.is_due = True
    assert list(recorded_steps(tmp_path)) == [1, 4]
    assert len(calls) == 2


def test_records_go_with_their_checkpoints(tmp_path: Path) -> None:
    policy = new_policy()
    record(tmp_path, 1, policy)
    for step in (2, 4, 6):
        save_step(tmp_path, step, write_model=policy.save, tensors={}, state={})
        record(tmp_path, step + 1, policy)
    # Step 1 begins with the starting policy; 3 began with a checkpoint that is gone.
    assert list(recorded_steps(tmp_path)) == [1, 5, 7]


def test_faults_hold_the_weights_and_few_are_kept(tmp_path: Path) -> None:
    policy = new_policy()
    for step in range(2, 2 + KEPT_FAULTS + 2):
        record(tmp_path, step, policy, is_skipped=True)
    steps = recorded_steps(tmp_path)
    assert list(steps) == [4, 5, 6]
    folder = steps[6]
    assert read_record(folder).is_fault
    again = load_policy(PolicyConfig(init=str(folder)), seed=1)
    assert weight_sums(again.model) == weight_sums(policy.model)
    assert json.loads((folder / "training" / "state.json").read_text()) == {"b": 1}


def test_a_fault_is_described_when_it_is_known(tmp_path: Path) -> None:
    recorder, policy, calls = Recorder(tmp_path, "sft", new_policy()), new_policy(), []
    recorder.is_due = False
    recorder.begin(lambda: calls.append(1) or describe(policy))
    assert not calls
    nan = {"sft/loss": math.nan, "sft/grad_norm": math.inf}
    recorder.end(9, nan, lambda: ({"a": torch.ones(1)}, {}), is_skipped=True)
    assert len(calls) == 1
    found = read_record(tmp_path / "faults" / "step_00000009").metrics
    assert math.isnan(found["sft/loss"])
    assert found["sft/grad_norm"] == math.inf


def test_a_full_disk_costs_the_record_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def full(folder: Path) -> Any:
        raise DiskFullError(f"{folder}: could not be written (No space left on device)")
        yield

    monkeypatch.setattr(recorded, "commit_folder", full)
    record(tmp_path, 1, new_policy())
    record(tmp_path, 2, new_policy(), is_skipped=True)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert all(line.endswith("(No space left on device); training continues without it") for line in told)


def test_one_changed_bit_shows_in_the_sums() -> None:
    policy = new_policy()
    before = weight_sums(policy.model)
    weight = dict(policy.model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    weight.detach().view(torch.int32)[0, 0] ^= 1
    after = weight_sums(policy.model)
    assert {name for name in before if before[name] != after[name]} == {"model.layers.0.mlp.up_proj.weight"}
