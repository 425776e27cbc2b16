"""Training mixtures of experts: the sampler's experts travel with its samples, and the load is balanced if asked."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from many_rewards import reward_lengths

from whet.algo.config import AlgoConfig, OffPolicyConfig
from whet.algo.packing import TrainingSequence
from whet.generate.engine import Engine, Request
from whet.generate.episode import play
from whet.generate.policy import Policy, PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.inspect.replay.replay import ReplayConfig
from whet.inspect.replay.replay import main as replay
from whet.model.experts import Router
from whet.model.families import from_hf
from whet.model.text.tokenizer import Tokenizer
from whet.model.weights import build_model, save_model
from whet.ranks.collectives import all_reduce_sum
from whet.recipes.rl import ALGORITHMS
from whet.schema import ResponseSchema
from whet.storage.checkpoint import saved_steps
from whet.tasks.base import TaskConfig
from whet.tasks.made.arithmetic import Arithmetic
from whet.train import dpo, rl, sft
from whet.train.objective.objective import Objective
from whet.train.optim import balance
from whet.train.optim.step import OptimConfig
from whet.train.rl_config import RLConfig
from whet.train.rollout.overlap import OverlapConfig
from whet.types import Group, MicroBatch, Problem, Turn, UserError

pytestmark = pytest.mark.usefixtures("few_problems")

KEEP = AlgoConfig(uninformative="keep")
REPLAY = OffPolicyConfig(router_replay=True)
STALE: dict[str, Any] = {"staleness": 2, "proximal": "recomputed", "correction": "token_truncate"}
SETTINGS: dict[str, dict[str, Any]] = {
    "minibatches, kl": {"algo": replace(KEEP, num_minibatches=2, num_epochs=2, kl="k3_loss", kl_coef=0.1)},
    "critic": {"algo": replace(ALGORITHMS["ppo"](), uninformative="keep")},
    "stale": {"off_policy": replace(REPLAY, **STALE)},
    "async": {"overlap": OverlapConfig(mode="async"), "off_policy": replace(REPLAY, staleness=1)},
    "balanced": {
        "optim": OptimConfig(
            lr=1e-3, warmup_steps=0, token_budget=150, router_aux_loss_coef=0.1, checkpoint_layers=True
        )
    },
}
CHOOSE = Router._choose


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> PolicyConfig:
    """A folder of two layers with four experts each, of which a token goes to two."""
    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = Tokenizer.characters(Arithmetic.alphabet + "eor: ", ResponseSchema().tags)
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 96,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    model = build_model(from_hf(config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25, generator=generator)
    save_model(model, folder)
    tokenizer.save(folder)
    return PolicyConfig(init=str(folder), num_threads=1, max_rows=64)


@pytest.fixture
def contrary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler whose arithmetic is another one: its tokens go where the trainer's router would send them last."""

    def choose(self: Router, scores_NE: torch.Tensor) -> torch.Tensor:
        return -CHOOSE(self, scores_NE) if torch.is_inference_mode_enabled() else CHOOSE(self, scores_NE)

    monkeypatch.setattr(Router, "_choose", choose)


def make_config(policy: PolicyConfig, folder: Path, **changes: Any) -> RLConfig:
    return replace(
        RLConfig(
            out=str(folder),
            policy=policy,
            rewards={"format": 1.0, "correct": 1.0},
            sampling=SamplingParams(max_new_tokens=12),
            optim=OptimConfig(lr=3e-4, warmup_steps=0, token_budget=150),
            algo=KEEP,
            off_policy=REPLAY,
            num_steps=3,
            num_prompts=2,
            group_size=3,
            save_every=2,
            preflight="warn",
        ),
        **changes,
    )


def rows(folder: Path, stage: str = "rl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if f"{stage}/loss" in row]


@pytest.mark.ci
@pytest.mark.usefixtures("contrary")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.ci] * (name not in ("async", "balanced"))) for name in SETTINGS],
)
def test_runs_take_the_samplers_experts_and_resume_exactly(
    name: str, mixture: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler goes other ways in every layer; two halves with waiting samples between them, or one run."""
    reward_lengths(monkeypatch)
    seen: list[float] = []
    plain = Policy.score

    def score(self: Policy, micro: MicroBatch, **options: Any) -> Any:
        result = plain(self, micro, **options)
        assert micro.experts_NX is not None
        seen.append(float((result[0].detach() - micro.sampler_logprobs_M).abs().max()))
        return result

    monkeypatch.setattr(Policy, "score", score)
    config = make_config(mixture, tmp_path / "straight", **SETTINGS[name])
    whole = rl.train(config)
    gaps = [row["rl/logprob_gap_max"] for row in rows(tmp_path / "straight")]
    if name in ("stale", "async"):
        assert gaps[0] == 0.0
        assert max(gaps) > 0
    else:
        assert set(gaps) == {0.0}
    assert max(seen) < 1.0  # moved weights, not other experts
    if name == "balanced":
        assert all(row["router/balance_loss"] > 1 for row in rows(tmp_path / "straight"))
    halves = replace(config, out=str(tmp_path / "halves"))
    update = Objective.update

    def stop(self: Objective, groups: Sequence[Group], *arguments: Any, step: int, **options: Any) -> Any:
        if step == 2:
            raise RuntimeError("stopped")
        return update(self, groups, *arguments, step=step, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Objective, "update", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            rl.train(halves)
    assert saved_steps(tmp_path / "halves") == [2]
    again = rl.train(halves, resume=True)
    for mine, theirs in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.usefixtures("contrary")
def test_without_replay_the_ratio_is_another(mixture: PolicyConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sampler and trainer differ by"):
        rl.train(make_config(mixture, tmp_path, off_policy=OffPolicyConfig()))
    assert rows(tmp_path)[0]["rl/ratio_drift"] > 0.1


def test_where_sampler_and_trainer_agree_replay_changes_no_bit(mixture: PolicyConfig, tmp_path: Path) -> None:
    runs = [
        rl.train(make_config(mixture, tmp_path / str(n), off_policy=off_policy, num_steps=2))
        for n, off_policy in enumerate((REPLAY, OffPolicyConfig()))
    ]
    for mine, theirs in zip(*(run.model.parameters() for run in runs), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.usefixtures("contrary")
def test_a_recorded_step_is_replayed_with_its_experts(
    mixture: PolicyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optim = OptimConfig(lr=1e-3, warmup_steps=0, token_budget=150, router_aux_loss_coef=0.1)
    rl.train(make_config(mixture, tmp_path, num_steps=2, optim=optim))
    capsys.readouterr()
    replay(ReplayConfig(run=str(tmp_path)))
    said = capsys.readouterr().out
    assert "bitwise" in said or "equal" in said, said
    assert "DIFFERS" not in said


class Echo:
    """Answers twice."""

    def reset(self, problem: Problem) -> Any:
        return [2]

    def step(self, states: Sequence[Any], texts: Sequence[str]) -> list[Turn]:
        turns = []
        for state in states:
            state[0] -= 1
            turns.append(Turn(observation="12" if state[0] >= 0 else None, inline=True))
        return turns


@pytest.mark.usefixtures("contrary")
def test_episodes_record_what_the_policy_and_what_others_wrote(mixture: PolicyConfig) -> None:
    """The record of several turns is that of one pass over all tokens, except for the last one."""
    policy = load_policy(replace(mixture, tools=("calculator",)), seed=0)
    policy.replays_experts = True
    policy.stop_ids = tuple(policy.tokenizer.encode("0123456789+=,"))
    problems = [Problem(uid=str(n), task="t", prompt=f"{n}+1=", answer="1") for n in range(2)]
    params = SamplingParams(max_new_tokens=70)
    drawn = play(policy, policy.engine(trains=True), problems, [range(4)] * 2, params, Echo())
    assert max(len(done.turn_ends) for row in drawn for done in row) == 3
    once = replace(params, max_new_tokens=1)
    for problem, row in zip(problems, drawn, strict=True):
        prompt = policy.prompt_ids(problem)
        for done in row:
            request = Request(prompt_ids=(*prompt, *done.ids[:-1]), seeds=(0,))
            ((reading,),) = policy.engine(trains=True).generate([request], once)
            assert b"".join(map(b64decode, done.experts)) == b64decode(reading.experts[0])


def test_what_cannot_replay_is_refused(
    mixture: PolicyConfig, tiny_policy: PolicyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="off_policy.router_replay: this model has no experts"):
        rl.train(make_config(tiny_policy, tmp_path / "dense"))
    optim = OptimConfig(router_aux_loss_coef=0.1)
    with pytest.raises(UserError, match="optim.router_aux_loss_coef: this model has no experts"):
        sft.train(sft.SFTConfig(out=str(tmp_path / "dense"), policy=tiny_policy, optim=optim))
    with pytest.raises(ValueError, match=r"router_aux_loss_coef = -1: expected 0 .* or more"):
        OptimConfig(router_aux_loss_coef=-1)
    generate = Engine.generate

    def silent(self: Engine, *arguments: Any, **options: Any) -> Any:  # as a server of another make
        found = generate(self, *arguments, **options)
        return [[replace(done, experts=()) for done in row] for row in found]

    monkeypatch.setattr(Engine, "generate", silent)
    with pytest.raises(UserError, match="the sampler does not say which experts its tokens went to"):
        rl.train(make_config(mixture, tmp_path / "silent"))


# The load-balancing loss in the programs.


def skewed(mixture: PolicyConfig, folder: Path) -> PolicyConfig:
    """The same model with a router that sends nearly everything to two experts."""
    policy = load_policy(mixture, seed=0)
    with torch.no_grad():
        for part in policy.model.modules():
            if isinstance(part, Router):
                part.weight.mul_(0.3)
                part.weight[0].copy_(part.weight[1])
    policy.save(folder)
    return replace(mixture, init=str(folder))


@pytest.mark.ci
def test_fine_tuning_balances_the_load(mixture: PolicyConfig, tmp_path: Path) -> None:
    optim = OptimConfig(lr=1e-2, warmup_steps=0, schedule="constant", token_budget=500)
    start = skewed(mixture, tmp_path / "start")
    shared: dict[str, Any] = {"policy": start, "num_steps": 20, "batch_size": 4, "validation_problems": 0}
    task = TaskConfig(name="arithmetic")
    ends = []
    for name, coef in (("off", 1e-9), ("on", 1.0)):
        own = replace(optim, router_aux_loss_coef=coef)
        sft.train(sft.SFTConfig(out=str(tmp_path / name), optim=own, task=task, **shared))
        found = rows(tmp_path / name, "sft")
        assert found[0]["router/load_max"] > 0.7
        assert all(row["router/balance_loss"] >= 1.9 for row in found)
        ends.append(found[-1])
        assert found[-1]["sft/loss"] < found[0]["sft/loss"]
    assert ends[1]["router/balance_loss"] < 2.06 < ends[0]["router/balance_loss"]
    assert ends[1]["router/load_max"] < ends[0]["router/load_max"]


@pytest.mark.ci
def test_preferences_are_trained_with_a_balanced_load(mixture: PolicyConfig, tmp_path: Path) -> None:
    """Pairs and reward models: however they are cut, the same weights to rounding."""
    lines = [
        {"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": "9" * (n % 3 + 1)} for n in range(1, 9)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for loss in ("dpo", "reward"):
        ends = []
        for budget in (1000, 1):
            optim = OptimConfig(
                lr=1e-2, eps=0.1, warmup_steps=0, token_budget=budget, router_aux_loss_coef=5.0
            )
            config = dpo.DPOConfig(
                out=str(tmp_path / f"{loss} {budget}"),
                policy=mixture,
                pairs=str(tmp_path / "pairs.jsonl"),
                loss=loss,
                optim=optim,
                num_steps=2,
                batch_size=8,
                validation_share=0.0,
            )
            ends.append(dpo.train(config))
        (one, _), (many, _) = (rows(tmp_path / f"{loss} {budget}", "dpo") for budget in (1000, 1))
        assert one["router/balance_loss"] == pytest.approx(many["router/balance_loss"], rel=1e-6)
        assert one["dpo/grad_norm"] == pytest.approx(many["dpo/grad_norm"], rel=1e-5)
        for mine, theirs in zip(*(end.model.parameters() for end in ends), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


Step = tuple[float, dict[str, float], dict[str, torch.Tensor]]


def test_two_ranks_balance_all_their_tokens_together(
    mixture: PolicyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's gradient with the sums of both: together that of all sequences on one."""
    sequences = [
        TrainingSequence(prompt_ids=(3, 4, n % 2), completion_ids=tuple(range(2, 5 + 3 * n)))
        for n in range(6)
    ]

    def step(mine: Sequence[TrainingSequence], exchange: Any) -> Step:
        policy = load_policy(mixture, seed=0)
        for module in (sft, balance):
            monkeypatch.setattr(module, "all_reduce_sum", exchange)
        optim = OptimConfig(router_aux_loss_coef=2.0, token_budget=30)
        loss, _, _, metrics = sft.train_step(policy, mine, optim)
        return loss, metrics, {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}

    halves = sequences[::2], sequences[1::2]
    said: list[list[tuple[float, ...]]] = []
    for half in halves:
        said.append([])
        step(half, lambda *values: said[-1].append(values) or list(values))
    found = []
    for half in halves:
        calls = iter(zip(*said, strict=True))
        found.append(step(half, lambda *_: list(map(sum, zip(*next(calls), strict=True)))))  # noqa: B023
    loss, metrics, gradients = step(sequences, all_reduce_sum)
    assert found[0][1] == found[1][1] == pytest.approx(metrics, rel=1e-6)
    for name, gradient in gradients.items():
        both = found[0][2][name] + found[1][2][name]
        torch.testing.assert_close(both, gradient, rtol=1e-4, atol=1e-6)
    assert loss > 0
