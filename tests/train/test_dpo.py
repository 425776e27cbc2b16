"""The program `whet dpo`: its pairs, its reference, what is held out, exact resume and users' mistakes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from whet import __main__
from whet.config import dump_yaml
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.reward_model import RewardModel
from whet.generate.sampling import SamplingParams, sequence_seed
from whet.model.attention import Packed
from whet.model.lora.side import LoRAConfig, sides_of
from whet.storage.checkpoint import saved_steps
from whet.tasks.base import TaskConfig, load_task
from whet.train import dpo
from whet.train.data import harvest
from whet.train.data.harvest import gather_rows, sample_judged
from whet.train.data.pairs import Pair, is_held_out
from whet.train.dpo import DPOConfig, main, plan, prepare_pairs, train, with_reference
from whet.train.optim.step import OptimConfig
from whet.types import UserError

MACHINE = ("time_s", "_per_second", "_gib", "hardware/utilisation/cpu", "hardware/memory_gib/cpu")
"""Ends of the names of what a machine adds: two equal runs differ in them."""
GOOD = {"prompt": "1+1=", "chosen": "</think><answer>2</answer>", "rejected": "</think><answer>3</answer>"}


def make_config(halfway: Any, folder: Path, **changes: Any) -> DPOConfig:
    return replace(
        DPOConfig(
            out=str(folder),
            policy=halfway.policy,
            task=halfway.task,
            sampling=SamplingParams(max_new_tokens=12),
            optim=OptimConfig(lr=2e-3, warmup_steps=2, token_budget=60),
            sft_coef=0.5,
            num_steps=8,
            batch_size=6,
            validation_share=0.2,
            validate_every=4,
            save_every=4,
        ),
        **changes,
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.endswith(MACHINE)} for row in rows]


def weights(folder: Path, step: int) -> bytes:
    return (folder / "checkpoints" / f"step_{step:08d}" / "model.safetensors").read_bytes()


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def logprob_alone(policy: Policy, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """One sequence by itself, through the whole vocabulary."""
    row = torch.tensor([*prompt, *completion])
    hidden = policy.model(row, torch.arange(len(row)), Packed((len(row),), row.device, "exact"))
    logits = hidden @ policy.model.head_weight.T
    logits = logits[:, : policy.model.num_valid_tokens]
    scores = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return scores[torch.arange(len(completion)), list(completion)].sum()


@pytest.mark.ci
def test_own_rollouts_keep_their_tokens(halfway: Any, tmp_path: Path) -> None:
    config = make_config(halfway, tmp_path)
    policy = load_policy(config.policy, seed=0)
    task = load_task(config.task)
    pairs = prepare_pairs(config, policy, tmp_path)
    judgements = sample_judged(
        policy,
        task,
        task.problems("train"),
        num_samples=8,
        sampling=config.sampling,
        seed=sequence_seed("dpo", 0),
        title="",
    )
    sampled = {
        (problem.uid, sample.completion_ids): graded.is_correct
        for problem, row in judgements
        for sample, graded in row
    }
    assert len(pairs) > 20
    for pair in pairs:
        assert sampled[pair.uid, pair.chosen_ids]
        assert not sampled[pair.uid, pair.rejected_ids]
        with torch.no_grad():
            for ids, stored in (
                (pair.chosen_ids, pair.ref_chosen_logprob),
                (pair.rejected_ids, pair.ref_rejected_logprob),
            ):
                # Float32 log-probabilities of some ten tokens.
                assert stored == pytest.approx(float(logprob_alone(policy, pair.prompt_ids, ids)), abs=1e-4)
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()
    assert [Pair.from_row(json.loads(line)) for line in lines] == pairs
    assert gather_rows([pair.as_row() for pair in pairs]) == [
        json.loads(json.dumps(pair.as_row())) for pair in pairs
    ]


@pytest.mark.parametrize(
    ("right", "message"),
    [
        ([True] * 8, r"all \d+ completions are right; use harder problems"),
        ([False] * 8, r"none of \d+ completions is right; start from a better model"),
        ([True, False], r"\d+ of \d+ completions are right, but no problem has both"),
    ],
)
def test_no_pairs(
    right: list[bool], message: str, halfway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = harvest.collect_groups

    def judge(*arguments: Any, **options: Any) -> Any:
        rollout = original(*arguments, **options)
        grades = [
            [replace(graded, is_correct=right[index % len(right)], verdict="perfect") for graded in row]
            for index, row in enumerate(rollout.grades)
        ]
        return replace(rollout, grades=grades)

    monkeypatch.setattr(harvest, "collect_groups", judge)
    with pytest.raises(UserError, match=message):
        train(make_config(halfway, tmp_path / "run"))


def test_pairs_that_do_not_fit_are_left_out(
    tiny_policy: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {**GOOD, "chosen": "1" * 90}
    path = write(tmp_path / "p.jsonl", GOOD, long, {**GOOD, "rejected": "1" * 90})
    config = DPOConfig(
        out=str(tmp_path / "run"), policy=tiny_policy, pairs=path, num_steps=1, validation_share=0
    )
    train(config)
    assert "2 of 3 pairs do not fit the context" in capsys.readouterr().out
    alone = replace(config, out=str(tmp_path / "other"), pairs=write(tmp_path / "q.jsonl", long))
    with pytest.raises(UserError, match="no pair fits in the context of 64 tokens"):
        train(alone)


def test_training_on_a_file_learns_it(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    rows = [{**GOOD, "prompt": f"{n}+1=", "chosen": str(n), "rejected": str(n + 1)} for n in range(8)]
    path = write(tmp_path / "p.jsonl", *rows)
    config = DPOConfig(
        out=str(tmp_path / "run"),
        policy=tiny_policy,
        pairs=path,
        optim=OptimConfig(lr=1e-2, warmup_steps=1),
        num_steps=30,
        batch_size=8,
        validation_share=0,
    )
    train(config)
    found = metrics(tmp_path / "run")
    assert found[0]["dpo/accuracy"] < 1
    assert found[-1]["dpo/accuracy"] == 1
    assert found[-1]["dpo/margin"] > 0.5
    assert "dpo/validation_loss" not in found[-1]


LABELLED = [
    {"prompt": f"{n}+1=", "completion": str(n + m), "label": m == 1} for n in range(8) for m in (1, 2)
]


@pytest.mark.some(2)
@pytest.mark.parametrize("loss", ["kto", "orpo", "hinge", "apo_zero"])
def test_every_loss_learns_a_file(loss: str, tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    pairs = [{**GOOD, "prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n + 2)} for n in range(8)]
    config = DPOConfig(
        out=str(tmp_path / "run"),
        policy=tiny_policy,
        pairs=write(tmp_path / "p.jsonl", *(LABELLED if loss == "kto" else pairs)),
        loss=loss,  # type: ignore[arg-type]
        beta=0.3,
        optim=OptimConfig(lr=1e-2, warmup_steps=1),
        num_steps=30,
        batch_size=8,
        validation_share=0,
    )
    train(config)
    found = metrics(tmp_path / "run")
    assert found[0]["dpo/accuracy"] < 1
    assert found[-1]["dpo/accuracy"] == 1
    margins = [row["dpo/margin"] for row in found if "dpo/margin" in row]
    assert margins[-1] > margins[0] + 0.3
    assert ("dpo/kl" in found[-1]) == (loss == "kto")
    if loss == "kto":
        assert max(row["dpo/chosen_reward"] for row in found if "dpo/chosen_reward" in row) > 0.2
        assert sum(row["dpo/desirable"] for row in found) / 30 == pytest.approx(1 / 2, abs=0.02)
    stored = [json.loads(line) for line in (tmp_path / "run" / "pairs.jsonl").read_text().splitlines()]
    assert all((row["ref_chosen_logprob"] != 0) == (loss != "orpo") for row in stored if row["chosen_ids"])
    assert all((row["ref_kl_logprob"] != 0) == (loss == "kto") for row in stored)


@pytest.mark.ci
def test_a_reward_model_tells_right_from_wrong(tiny_policy: PolicyConfig, tmp_path: Path) -> None:
    """The better answer ends even; measured on held-out prompts, and through the saved folder."""
    digits = [(a, b) for a in range(10) for b in range(10)]
    rows = [
        {
            "prompt": f"{a}+{b}=",
            "chosen": f"{a}{(3 * a + b) % 5 * 2}",
            "rejected": f"{a}{(a + 2 * b) % 5 * 2 + 1}",
        }
        for a, b in digits
    ]
    out = tmp_path / "run"
    config = DPOConfig(
        out=str(out),
        policy=tiny_policy,
        pairs=write(tmp_path / "p.jsonl", *rows),
        loss="reward",
        optim=OptimConfig(lr=1e-2, warmup_steps=2),
        num_steps=100,
        batch_size=32,
        validation_share=0.3,
    )
    train(config)
    first, *_, last = metrics(out)
    assert first["dpo/loss"] == pytest.approx(math.log(2), abs=1e-6)  # the head begins at 0
    assert last["dpo/accuracy"] > 0.9
    # Chance is 50 %; of some 30 held-out pairs one standard deviation is 9 %.
    assert last["dpo/validation_accuracy"] > 0.8
    assert not (out / "replay").exists()
    scorer = RewardModel(str(out), device=torch.device("cpu"))
    gaps = []
    for row in rows:
        asked = [{"role": "user", "content": row["prompt"]}]
        chosen, rejected = scorer.score([(asked, row["chosen"]), (asked, row["rejected"])])
        gaps.append((chosen or 0.0) - (rejected or 0.0))
    assert sum(gap > 0 for gap in gaps) > 85
    with pytest.raises(UserError, match="a reward model, which scores texts and writes none"):
        load_policy(PolicyConfig(init=str(out)), seed=0)


def test_a_reward_models_own_pairs_are_whole_conversations(halfway: Any, tmp_path: Path) -> None:
    config = make_config(halfway, tmp_path, loss="reward", sft_coef=0.0)
    policy = load_policy(config.policy, seed=0)
    pairs = prepare_pairs(config, policy, tmp_path)
    for pair in pairs[:20]:
        texts = [
            policy.tokenizer.decode((*pair.prompt_ids, *ids)) for ids in (pair.chosen_ids, pair.rejected_ids)
        ]
        assert texts == [pair.prompt + pair.chosen, pair.prompt + pair.rejected]
        assert pair.chosen.startswith("<think>")
        assert pair.chosen_ids[0] != pair.rejected_ids[0] or 1 in (
            len(pair.chosen_ids),
            len(pair.rejected_ids),
        )


def test_the_kl_of_kto_is_the_log_ratio_of_other_prompts_completions(halfway: Any, tmp_path: Path) -> None:
    config = make_config(halfway, tmp_path, loss="kto", sft_coef=0.0)
    policy = load_policy(config.policy, seed=0)
    completions = prepare_pairs(config, policy, tmp_path)
    owners: dict[tuple[int, ...], set[str]] = {}
    for pair in completions:
        owners.setdefault(pair.chosen_ids or pair.rejected_ids, set()).add(pair.uid)
    assert all(bool(pair.chosen_ids) != bool(pair.rejected_ids) for pair in completions)
    assert all(owners[pair.kl_ids] - {pair.uid} for pair in completions)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(0.9)
        logps = [float(logprob_alone(policy, pair.prompt_ids, pair.kl_ids)) for pair in completions[:9]]
    expected = sum(logp - pair.ref_kl_logprob for logp, pair in zip(logps, completions, strict=False)) / 9
    assert expected > 0.1  # below 0 it would count as 0, whatever it is divided by
    found = dpo.train_step(policy, completions[:9], config).metrics["dpo/kl"]
    assert found == pytest.approx(expected, abs=1e-4)  # float32 sums of some ten tokens
    held = dpo.mismatch_kl(policy, completions[:9], 1) / 9
    assert held == pytest.approx(expected, abs=1e-4)


@pytest.mark.ci
def test_the_first_step_stands_at_the_reference(halfway: Any, tmp_path: Path) -> None:
    config = make_config(halfway, tmp_path / "run", num_steps=12, sft_coef=0.0)
    main(config)
    rows = metrics(tmp_path / "run")
    first, last = rows[0], rows[-1]
    # Policy and reference are the same weights; their micro-batches may differ: float32 sums of ten tokens.
    assert first["dpo/margin"] == pytest.approx(0, abs=1e-5)
    assert first["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert max(row["dpo/margin"] for row in rows) > 0.01
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["loss"] == last["dpo/loss"]
    losses = [row["dpo/validation_loss"] for row in rows if "dpo/validation_loss" in row]
    assert len(losses) == 3
    assert summary["best_validation_loss"] == min(losses)
    assert (tmp_path / "run" / "report.md").is_file()
    assert (tmp_path / "run" / "plots" / "dpo.png").is_file()
    assert "72" in plan(config).split()  # pairs in all


def test_held_out_prompts_are_never_trained(
    halfway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[str]] = {"train": set(), "validate": set()}
    original, measure = dpo.train_step, dpo.validate

    def step(policy: Any, pairs: Sequence[Pair], config: Any, budget: Any) -> Any:
        seen["train"] |= {pair.uid for pair in pairs}
        return original(policy, pairs, config, budget)

    def look(policy: Any, pairs: Sequence[Pair], config: Any) -> Any:
        seen["validate"] |= {pair.uid for pair in pairs}
        return measure(policy, pairs, config)

    monkeypatch.setattr(dpo, "train_step", step)
    monkeypatch.setattr(dpo, "validate", look)
    train(make_config(halfway, tmp_path / "run", num_steps=12))
    assert seen["validate"]
    assert seen["train"]
    assert not seen["validate"] & seen["train"]
    assert all(is_held_out(uid, 0, 0.2) for uid in seen["validate"])
    share = sum(is_held_out(str(n), 0, 0.2) for n in range(4000)) / 4000
    assert share == pytest.approx(0.2, abs=0.03)  # one standard deviation is 0.006


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


@pytest.mark.some(1)
@pytest.mark.parametrize(("call", "loss"), [(3, "dpo"), (7, "dpo"), (7, "kto"), (7, "reward")])
def test_resume_is_exact_and_samples_nothing(
    call: int, loss: Any, halfway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(halfway, tmp_path / "straight", loss=loss, sft_coef=0.5 if loss == "dpo" else 0.0)
    train(config)
    broken = replace(config, out=str(tmp_path / "broken"))
    with monkeypatch.context() as patch:
        patch.setattr(dpo, "train_step", fail_at(call, dpo.train_step))
        with pytest.raises(CrashError):
            train(broken)
    assert saved_steps(tmp_path / "broken") == ([4] if call == 7 else [])
    with monkeypatch.context() as patch:
        patch.setattr(dpo, "sample_judged", fail_at(1, dpo.sample_judged))
        patch.setattr(dpo, "with_reference", fail_at(1, with_reference))
        train(broken, resume=True)
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "straight")
    assert weights(tmp_path / "broken", 8) == weights(tmp_path / "straight", 8)


@pytest.mark.ci
def test_adapters_alone_are_trained_from_the_reference_and_resume_exactly(
    halfway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(halfway, tmp_path / "run", lora=LoRAConfig(rank=4), sft_coef=0.0)
    policy = train(config)
    rows = metrics(tmp_path / "run")
    # B is 0 at first: the policy is its reference, the base alone.
    assert rows[0]["dpo/margin"] == pytest.approx(0, abs=1e-5)
    assert rows[0]["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert max(row["dpo/margin"] for row in rows) > 0.01
    base = load_policy(halfway.policy, seed=0).model
    for name, weight in base.named_parameters():
        assert torch.equal(policy.model.get_parameter(name), weight), name
    assert all(bool(side.lora_B.any()) for _, side in sides_of(policy.model))
    broken = replace(config, out=str(tmp_path / "broken"))
    with monkeypatch.context() as patch:
        patch.setattr(dpo, "train_step", fail_at(7, dpo.train_step))
        with pytest.raises(CrashError):
            train(broken)
    train(broken, resume=True)
    assert metrics(tmp_path / "broken") == rows
    whole, resumed = (
        (tmp_path / name / "checkpoints/step_00000008/adapter_model.safetensors").read_bytes()
        for name in ("run", "broken")
    )
    assert whole == resumed


def test_resume_after_a_crash_while_sampling(
    halfway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(halfway, tmp_path / "run", num_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(dpo, "with_reference", fail_at(1, with_reference))
        with pytest.raises(CrashError):
            train(config)
    assert not (tmp_path / "run" / "pairs.jsonl").exists()
    train(config, resume=True)
    assert saved_steps(tmp_path / "run") == [1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"beta": 0.0}, "beta = 0.0: expected above 0"),
        ({"label_smoothing": 0.5}, "label_smoothing = 0.5: expected 0 to below 0.5"),
        ({"label_smoothing": 0.1, "loss": "ipo"}, "label_smoothing is read by loss = dpo, robust only"),
        ({"sft_coef": -1.0}, "sft_coef = -1.0: expected 0 or more"),
        ({"loss": "robust"}, "loss = robust with label_smoothing = 0 is dpo"),
        ({"desirable_weight": 2.0}, "desirable_weight is read by loss = kto only"),
        ({"center_coef": 0.01, "loss": "orpo"}, "center_coef is read by loss = reward only"),
        ({"beta": 0.2, "loss": "reward"}, "beta is read by loss = dpo, ipo, .*, orpo, kto only"),
        ({"per_token": True, "loss": "kto"}, "per_token is read by loss = dpo, ipo, hinge"),
        ({"pairs_split": "train_prefs", "pairs": "p.jsonl"}, "pairs_split is read with a hub data set"),
        ({"validation_share": 1.0}, "validation_share = 1.0: expected 0 to below 1"),
        ({"num_samples": 0}, "num_samples = 0: expected 1 or more"),
        ({"num_samples": 1}, "num_samples = 1: a pair needs a right and a wrong completion"),
        ({"batch_size": 0}, "batch_size = 0: expected 1 or more"),
        ({"sampling": SamplingParams(temperature=0)}, "sampling.temperature = 0"),
        ({"max_bad_rows": 1}, "max_bad_rows is read with a file of pairs only"),
        ({"pairs": "p.jsonl", "num_samples": 4}, "nothing is sampled: restore the defaults --num-samples 8$"),
        (
            {"pairs": "p.jsonl", "task": TaskConfig(name="gsm8k", path="x")},
            "restore the defaults --task.name arithmetic --task.path ",
        ),
    ],
)
def test_wrong_settings(wrong: dict[str, Any], message: str, tiny_policy: PolicyConfig) -> None:
    with pytest.raises(ValueError, match=message):
        DPOConfig(out="x", policy=tiny_policy, **wrong)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--beta", "0"], "beta = 0.0: expected above 0"),
        (["--pairs", "missing.jsonl", "--num-problems", "0"], "missing.jsonl: cannot be read"),
        (["--loss", "cpo"], "expected one of 'dpo', 'ipo'"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], message: str, halfway: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = DPOConfig(out=str(tmp_path / "run"), policy=halfway.policy)
    (tmp_path / "c.yaml").write_text(dump_yaml(source))
    assert __main__.main(["dpo", str(tmp_path / "c.yaml"), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("whet: error: ")
    assert error.count("\n") == 1
    assert message in error
