"""Rejection-sampling fine-tuning: what is kept, what is trained, rounds, exact resume; and the chain of programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from whet import __main__
from whet.config import dump_yaml
from whet.eval.evaluate import evaluate, take_problems
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.inspect.doctor.hang import read_ranks
from whet.model.lora.side import LoRAConfig, sides_of
from whet.storage.checkpoint import saved_steps
from whet.tasks.base import load_task
from whet.train import dpo, rft, rl
from whet.train.data.harvest import sample_judged
from whet.train.optim.step import OptimConfig
from whet.train.rft import RFTConfig, greedy_accuracy, main, plan, train
from whet.types import UserError

MACHINE = ("time_s", "_per_second", "_gib", "hardware/utilisation/cpu", "hardware/memory_gib/cpu")
"""Ends of the names of what a machine adds: two equal runs differ in them."""


def make_config(halfway: Any, folder: Path, **changes: Any) -> RFTConfig:
    return replace(
        RFTConfig(
            out=str(folder),
            policy=halfway.policy,
            task=halfway.task,
            sampling=SamplingParams(max_new_tokens=12),
            optim=OptimConfig(lr=2e-3, warmup_steps=2),
            num_samples=4,
            max_per_problem=1,
            rounds=2,
            steps_per_round=4,
            batch_size=8,
            validation_problems=3,
            save_every=3,
        ),
        **changes,
    )


def read(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.endswith(MACHINE)} for row in rows]


def final_weights(folder: Path) -> bytes:
    return (folder / "checkpoints" / "step_00000008" / "model.safetensors").read_bytes()


def test_what_is_kept_is_right_and_new_and_the_very_tokens(halfway: Any, tmp_path: Path) -> None:
    config = make_config(halfway, tmp_path / "run", rounds=1, max_per_problem=2, num_samples=8)
    policy = load_policy(config.policy, seed=0)
    task = load_task(config.task)
    problems = take_problems(task, "train", 0)
    judgements = sample_judged(
        policy,
        task,
        problems,
        num_samples=8,
        sampling=config.sampling,
        seed=sequence_seed("rft", 0, 0),
        title="",
    )
    right = {
        problem.uid: {s.text: s.completion_ids for s, g in row if g.is_correct and g.verdict == "perfect"}
        for problem, row in judgements
    }
    kept, counts = rft.sample_round(config, policy, task, problems, 0)
    by_problem: dict[str, list[str]] = {}
    for row in kept:
        assert row["completion"] in right[row["uid"]]
        assert policy.completion_text(row["prompt_ids"], row["completion_ids"]) == row["completion"]
        by_problem.setdefault(row["uid"], []).append(row["completion"])
    for uid, texts in right.items():
        assert len(set(by_problem.get(uid, []))) == len(by_problem.get(uid, [])) == min(2, len(texts))
    assert counts["rft/sampled"] == 8 * len(problems)
    assert counts["rft/kept"] == len(kept)
    assert counts["rft/covered"] == sum(map(bool, right.values())) / len(problems)
    assert 0 < counts["rft/right"] < 1
    few, _ = rft.sample_round(replace(config, max_per_problem=1), policy, task, problems, 0)
    assert len(few) == len(by_problem) <= len(kept)


def test_the_tokens_that_are_trained(halfway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = rft.train_step

    def record(policy: Any, sequences: Any, config: Any, budget: Any) -> Any:
        seen.extend(sequences)
        return original(policy, sequences, config, budget)

    monkeypatch.setattr(rft, "train_step", record)
    train(make_config(halfway, tmp_path / "run"))
    kept = read(tmp_path / "run" / "kept.jsonl")
    for number in range(2):
        rows = {(tuple(r["prompt_ids"]), tuple(r["completion_ids"])) for r in kept if r["round"] == number}
        trained = {(s.prompt_ids, s.completion_ids) for s in seen[32 * number : 32 * (number + 1)]}
        assert trained == rows  # 32 draws, fewer rows: all of the round's, nothing else
        assert {row["step"] for row in kept if row["round"] == number} == {4 * number}
    first, second = ({r["completion"] + r["uid"] for r in kept if r["round"] == n} for n in range(2))
    assert first != second


@pytest.mark.ci
def test_the_run_folder(halfway: Any, tmp_path: Path) -> None:
    config = make_config(halfway, tmp_path / "run", steps_per_round=25, validation_problems=0)
    main(config)
    run = tmp_path / "run"
    rounds = read(run / "rounds.jsonl")
    assert [row["round"] for row in rounds] == [0, 1]
    assert rounds[1]["rft/right"] > rounds[0]["rft/right"] + 0.1  # it learns from itself
    rows = read(run / "metrics.jsonl")
    accounts = [row for row in rows if "rft/sampled" in row]
    assert [row["step"] for row in accounts] == [0, 25]
    assert [row["step"] for row in rows if "rft/loss" in row] == list(range(1, 51))
    assert saved_steps(run) == [48, 50]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["right"] == rounds[1]["rft/right"]
    assert (run / "report.md").is_file()
    assert (run / "plots" / "rft.png").is_file()
    assert "50" in plan(config).split()


def test_greedy_accuracy_is_that_of_an_evaluation(halfway: Any, tmp_path: Path) -> None:
    config = make_config(halfway, tmp_path / "run")
    policy = load_policy(config.policy, seed=0)
    task = load_task(config.task)
    problems = task.problems("train")
    ours = greedy_accuracy(config, policy, task, problems)
    result = evaluate(policy, task, problems, num_samples=1, sampling=config.sampling, seed=0)
    assert ours == result.metrics["greedy"].mean
    assert 0 < ours < 1


def test_validation_before_and_after_each_round(
    halfway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = iter([0.2, 0.9, 0.5])
    monkeypatch.setattr(rft, "greedy_accuracy", lambda *_: next(accuracies))
    train(make_config(halfway, tmp_path / "run", save_every=4))
    rows = read(tmp_path / "run" / "metrics.jsonl")
    found = [(row["step"], row["eval/greedy"]) for row in rows if "eval/greedy" in row]
    assert found == [(0, 0.2), (4, 0.9), (8, 0.5)]
    checkpoints = tmp_path / "run" / "checkpoints"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best_greedy"] == 0.9
    best = (checkpoints / "best" / "model.safetensors").read_bytes()
    assert best == (checkpoints / "step_00000004" / "model.safetensors").read_bytes()


class CrashError(Exception):
    """Stands for a crash."""


def fail_at(call: int, function: Any) -> Any:
    calls = 0

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise CrashError
        return function(*arguments, **options)

    return wrapped


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "call", "saved", "sampled_again"),
    [
        ("sample_round", 1, [], 2),  # before anything
        ("train_step", 2, [], 1),  # in the first round, before a checkpoint
        ("train_step", 4, [3], 1),  # in the first round, after one
        ("sample_round", 2, [3, 4], 1),  # between the rounds
        ("train_step", 5, [3, 4], 0),  # second round sampled, nothing trained
        ("train_step", 8, [4, 6], 0),  # in the second round
    ],
)
def test_resume_is_exact(
    name: str,
    call: int,
    saved: list[int],
    sampled_again: int,
    halfway: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(halfway, tmp_path / "straight")
    train(config)
    broken = replace(config, out=str(tmp_path / "broken"))
    with monkeypatch.context() as patch:
        patch.setattr(rft, name, fail_at(call, getattr(rft, name)))
        with pytest.raises(CrashError):
            train(broken)
    assert saved_steps(tmp_path / "broken") == saved
    sampled = []
    original = rft.sample_round
    monkeypatch.setattr(rft, "sample_round", lambda *words: sampled.append(words) or original(*words))
    train(broken, resume=True)
    assert len(sampled) == sampled_again
    for file in ("metrics.jsonl", "kept.jsonl", "rounds.jsonl"):
        assert read(tmp_path / "broken" / file) == read(tmp_path / "straight" / file)
    assert final_weights(tmp_path / "broken") == final_weights(tmp_path / "straight")
    counts = [json.loads((tmp_path / run / "summary.json").read_text()) for run in ("broken", "straight")]
    for name in ("sampled", "right", "kept", "covered", "best_greedy"):
        assert counts[0].get(name) == counts[1].get(name), name


@pytest.mark.ci
def test_a_finished_run_goes_on_for_more_rounds(
    halfway: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(halfway, tmp_path / "a", rounds=1, validation_problems=0)
    config = replace(config, optim=replace(config.optim, schedule="constant"))
    main(config)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("more steps: "))
    assert line == f"more steps: whet rft {tmp_path}/a --resume --rounds 2"
    assert __main__.main(line.split()[3:]) == 0
    longer = replace(config, rounds=2)
    assert "whet: 4 steps become 8, as if they had been 8 from the start" in capsys.readouterr().out
    assert "rounds: 2\n" in (tmp_path / "a/config.yaml").read_text()
    train(replace(longer, out=str(tmp_path / "b")))
    assert final_weights(tmp_path / "a") == final_weights(tmp_path / "b")
    with pytest.raises(UserError, match=r"rounds = 1: .* has done 8 steps already"):
        train(config, resume=True)


@pytest.mark.ci
def test_adapters_alone_are_trained_and_resume_exactly(
    halfway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(halfway, tmp_path / "straight", lora=LoRAConfig(rank=4), validation_problems=0)
    policy = train(config)
    base = load_policy(halfway.policy, seed=0).model
    for name, weight in base.named_parameters():
        assert torch.equal(policy.model.get_parameter(name), weight), name
    assert all(bool(side.lora_B.any()) for _, side in sides_of(policy.model))
    broken = replace(config, out=str(tmp_path / "broken"))
    with monkeypatch.context() as patch:
        patch.setattr(rft, "train_step", fail_at(8, rft.train_step))
        with pytest.raises(CrashError):
            train(broken)
    train(broken, resume=True)
    for file in ("metrics.jsonl", "kept.jsonl"):  # the second round is sampled with the first one's adapter
        assert read(tmp_path / "broken" / file) == read(tmp_path / "straight" / file)
    whole, resumed = (
        (tmp_path / name / "checkpoints/step_00000008/adapter_model.safetensors").read_bytes()
        for name in ("straight", "broken")
    )
    assert whole == resumed


@pytest.mark.ci
def test_a_round_that_was_half_written_is_sampled_again(
    halfway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(halfway, tmp_path / "straight")
    train(config)
    broken = replace(config, out=str(tmp_path / "broken"))
    with monkeypatch.context() as patch:
        patch.setattr(
            rft, "write_rows", fail_at(4, rft.write_rows)
        )  # kept.jsonl is there, rounds.jsonl not yet
        with pytest.raises(CrashError):
            train(broken)
    assert {row["round"] for row in read(tmp_path / "broken" / "kept.jsonl")} == {0, 1}
    train(broken, resume=True)
    assert read(tmp_path / "broken" / "kept.jsonl") == read(tmp_path / "straight" / "kept.jsonl")
    assert final_weights(tmp_path / "broken") == final_weights(tmp_path / "straight")


def test_nothing_right(halfway: Any, tmp_path: Path) -> None:
    cut = make_config(
        halfway, tmp_path / "run", sampling=SamplingParams(max_new_tokens=1), validation_problems=0
    )
    with pytest.raises(
        UserError, match=r"round 1: none of \d+ completions is right .*start from a better model"
    ):
        train(cut)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rounds": 0}, "rounds = 0: expected 1 or more"),
        ({"steps_per_round": 0}, "steps_per_round = 0: expected 1 or more"),
        ({"num_problems": -1}, "num_problems = -1.*expected 0 or more"),
        ({"num_samples": 0}, "num_samples = 0: expected 1 or more"),
        ({"sampling": SamplingParams(temperature=0)}, "sampling.temperature = 0"),
    ],
)
def test_wrong_settings(wrong: dict[str, Any], message: str, tiny_policy: PolicyConfig) -> None:
    with pytest.raises(ValueError, match=message):
        RFTConfig(out="x", policy=tiny_policy, **wrong)


@pytest.mark.ci
def test_a_mistake_is_one_line(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = RFTConfig(out=str(tmp_path / "run"), policy=tiny_policy)
    (tmp_path / "c.yaml").write_text(dump_yaml(source))
    for words, message in (
        (["--rounds", "0"], "rounds = 0"),
        (["--sampling.max-new-tokens", "90"], "no prompt fits"),
        (["--sampling.temperature", "0"], "sampling.temperature = 0"),
    ):
        assert __main__.main(["rft", str(tmp_path / "c.yaml"), *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("whet: error: ")
        assert error.count("\n") == 1
        assert message in error
    assert not (tmp_path / "run").exists()


def test_programs_chain_through_their_folders(halfway: Any, tmp_path: Path) -> None:
    """Fine-tuning, then rft, dpo and rl, each from the folder of the one before."""
    short = SamplingParams(max_new_tokens=12)
    train(make_config(halfway, tmp_path / "rft", rounds=1))
    second = dpo.DPOConfig(
        out=str(tmp_path / "dpo"),
        policy=replace(halfway.policy, init=str(tmp_path / "rft")),
        task=halfway.task,
        sampling=short,
        num_steps=2,
    )
    trained = dpo.train(second)
    third = rl.RLConfig(
        out=str(tmp_path / "rl"),
        policy=replace(halfway.policy, init=str(tmp_path / "dpo")),
        task=halfway.task,
        sampling=short,
        num_steps=1,
        num_prompts=4,
        group_size=4,
    )
    start = load_policy(third.policy, seed=0)
    assert start.protocol() == trained.protocol()
    for name, value in start.model.state_dict().items():
        assert value.equal(trained.model.state_dict()[name]), name
    rl.train(third)
    assert saved_steps(tmp_path / "rl") == [1]


def test_a_finished_run_that_is_resumed_is_not_taken_for_dead(halfway: Any, tmp_path: Path) -> None:
    """It was killed after its last step: no session opens again, which was all that told how a run had ended."""
    config = make_config(halfway, tmp_path / "run", rounds=1, validation_problems=0)
    train(config)
    beats = tmp_path / "run" / "heartbeats"
    row = json.loads((beats / "rank_0.json").read_text())
    (beats / "rank_0.json").write_text(json.dumps(row | {"state": "running", "pid": 2**22, "born": 1}))
    (beats / "rank_0.stacks.txt").touch()
    assert [rank.state for rank in read_ranks(tmp_path / "run")] == ["died"]
    train(config, resume=True)
    assert [rank.state for rank in read_ranks(tmp_path / "run")] == ["finished"]
    assert [path.name for path in beats.iterdir()] == ["rank_0.json"]
