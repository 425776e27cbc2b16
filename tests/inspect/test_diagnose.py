"""`whet diagnose`: sound steps pass, every kind of damage is found where it is, numbers are as published."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from seeing import save_model, uri
from torch.utils.flop_counter import FlopCounterMode

from whet import cli
from whet.algo.advantages import group_advantages
from whet.algo.config import AlgoConfig
from whet.algo.losses import policy_loss
from whet.algo.packing import TrainingSequence
from whet.generate.policy import PolicyConfig, load_policy
from whet.generate.sampling import SamplingParams
from whet.inspect.diagnose import diagnose
from whet.inspect.diagnose import objective as diagnose_objective
from whet.inspect.diagnose import speed as diagnose_speed
from whet.inspect.diagnose import step as diagnose_step
from whet.inspect.diagnose import switches as diagnose_switches
from whet.inspect.diagnose.diagnose import DiagnoseConfig, examine, main
from whet.inspect.diagnose.model import GPT2_PROMPT, forward, parameters, tokenizer
from whet.inspect.diagnose.objective import objective, outside_clip
from whet.inspect.diagnose.speed import count_flops, memory, quick_mfu, speed
from whet.inspect.diagnose.step import Component, Subject, captured, share, show, worst
from whet.inspect.diagnose.switches import toggles
from whet.inspect.diagnose.update import gradients, learning_rate_at, optimizer
from whet.inspect.memory.plan import read_recipe
from whet.kernels import dispatch
from whet.model.config import ModelConfig
from whet.model.lora.side import LoRAConfig
from whet.model.text.tokenizer import Tokenizer
from whet.model.vision.ids import is_image
from whet.model.weights import build_model
from whet.recipes.models import demo_policy
from whet.recipes.rl import ALGORITHMS
from whet.tasks.base import TaskConfig
from whet.tasks.made.arithmetic import Arithmetic
from whet.train.objective import objective as objective_module
from whet.train.optim.step import OptimConfig, Optimizer, learning_rate
from whet.train.rl_config import RLConfig
from whet.train.sft import SFTConfig
from whet.types import UserError

SHAPE = ModelConfig(
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
    init_std=0.2,
)
POLICY = replace(demo_policy(), model=SHAPE, max_rows=64, device="cpu")
OPTIM = OptimConfig(lr=1e-3, weight_decay=0.1)
FEW = Arithmetic().problems("train")[:60]
QUIET = {"environment", "time", "switches"}
"""What depends on the machine: those components may warn."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few problems, and tiny matrix products."""
    monkeypatch.setattr(Arithmetic, "problems", lambda self, split: FEW)
    monkeypatch.setattr(diagnose_speed, "MATMULS", {"cpu": (64,)})


def sft(**options: Any) -> SFTConfig:
    return SFTConfig(**({"out": "unused", "policy": POLICY, "batch_size": 6, "optim": OPTIM} | options))


def rl(algo: str = "grpo", **options: Any) -> RLConfig:
    values = {
        "out": "unused",
        "policy": POLICY,
        "algo": ALGORITHMS[algo](),
        "num_prompts": 4,
        "group_size": 4,
    }
    return RLConfig(**(values | {"sampling": SamplingParams(max_new_tokens=10), "optim": OPTIM} | options))


def shaped(**shape: Any) -> Any:
    return replace(POLICY, model=replace(SHAPE, **shape))


def failed(component: Component) -> set[str]:
    return {check.name for check in component.checks if check.status == "fail"}


def update_of(subject: Subject) -> Any:
    with captured(subject, apply=True) as updates:
        subject.prepare()()
    return updates[0]


RUNS: dict[str, SFTConfig | RLConfig] = {
    "sft": sft(),
    "sft, gpt2, recomputed": sft(
        policy=shaped(family="gpt2", num_kv_heads=4), optim=replace(OPTIM, checkpoint_layers=True)
    ),
    "sft, qwen2, untied": sft(policy=shaped(family="qwen2", tie_embeddings=False)),
    "grpo with KL": rl(algo="grpo", optim=replace(OPTIM, token_budget=40)),
    "ppo, four updates": rl(algo="ppo"),
    "gspo": rl(algo="gspo"),
    "dapo, bfloat16 weights": rl(algo="dapo", optim=replace(OPTIM, precision="bfloat16_master")),
    "rloo, autocast": rl(algo="rloo", optim=replace(OPTIM, precision="bfloat16_autocast")),
}
RUNS["grpo with KL"] = replace(
    RUNS["grpo with KL"], algo=replace(ALGORITHMS["grpo"](), kl="k3_loss", kl_coef=0.02)
)


OFTEN = ("gspo", "sft", "grpo with KL")


@pytest.mark.some(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.ci] * (n not in OFTEN)) for n in RUNS])
def test_sound_steps_pass(name: str) -> None:
    subject = Subject(RUNS[name])
    found = examine(subject, DiagnoseConfig(recipe="x", repeats=1, rounds=0), lambda text: None)
    names = [
        "environment",
        "tokenizer",
        "parameters",
        "memory",
        "forward",
        "objective",
        "gradients",
        "optimizer",
    ]
    assert list(found) == [*names, "time"]
    assert {key: failed(component) for key, component in found.items() if failed(component)} == {}
    for key in found.keys() - QUIET - {"objective"}:  # random weights earn no reward: that is warned of
        assert found[key].verdict == "pass", [check for check in found[key].checks if check.status != "pass"]
    for stage in ("batch", "forward", "backward", "optimizer"):
        assert found["memory"].facts[f"{stage}, peak bytes"] > 0
        assert found["time"].facts[f"{stage}, s"] > 0
    weights = sum(p.numel() for p in subject.policy.model.parameters())
    assert found["parameters"].facts["parameters"] == weights


def test_reference_numbers_of_source_003() -> None:
    shape = ModelConfig(
        family="gpt2", vocab_size=50_257, hidden_size=768, intermediate_size=3072, num_layers=12, num_heads=12,
        num_kv_heads=12, head_dim=64, max_positions=1024,
    )  # fmt: skip
    with torch.device("meta"):
        model = build_model(shape)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == 124_439_808
    layers = sum(p.numel() for p in model.parameters()) - 50_257 * 768 - 1024 * 768
    flops = count_flops(shape, layers, 2 * 50 * 51 // 2, 100, num_read=100, checkpoint=False)
    textbook = 6 * (count - 1024 * 768) * 100
    assert flops.layers + flops.head == textbook
    assert flops.attention / flops.model < 0.01
    # Its forward pass of 2 x 50 tokens took 20.7 ms, on a GPU of 82.6 TFLOP/s: 2 x parameters x tokens give 1.456 %,
    # ten times what it reports. Ours counts no position embeddings (-0.6 %), but attention (+0.3 %).
    assert flops.model / 3 / 0.0207 / 82.6e12 == pytest.approx(0.01456, rel=0.01)
    assert quick_mfu(count, 20, 0.0207, 1.65e14) == pytest.approx(0.00146, rel=0.01)  # reported: 0.15 %
    assert quick_mfu(count, 100, 0.0207, 82.6e12) == pytest.approx(0.01456, rel=0.001)
    # Rewards .7 and .5, ratios as reported: the loss is negative, and right. Reported is -0.005257, of ratios that were
    # rounded to three places.
    advantages = group_advantages(torch.tensor([[0.7, 0.5]]).double(), scale="none").flatten()
    assert advantages.tolist() == pytest.approx([0.1, -0.1])
    now = torch.tensor([1.167, 1.062], dtype=torch.float64).log()
    loss, _, _ = policy_loss(now, torch.zeros(2, dtype=torch.float64), advantages)
    assert float(loss.mean()) == pytest.approx(-0.005257, abs=0.1 * 0.0005)
    # The reported ratios are not those of the reported log-probabilities; the second would be clipped.
    rows = [[-11.081 + 11.170], [-10.820 + 11.266]]
    assert [math.exp(row[0]) for row in rows] == pytest.approx([1.0931, 1.5621], abs=1e-4)
    assert outside_clip(AlgoConfig(clip_low=0.2, clip_high=0.2), rows) == "50.0 %"


def test_flops_are_those_of_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lengths are multiples of 16, so that no row is padded; PyTorch cannot count inside our own kernels.
    monkeypatch.setattr(dispatch, "runs_cpp", lambda *_, **__: False)
    subject = Subject(sft(batch_size=2))
    ids = tuple(index % 20 for index in range(48))
    subject.sequences = [
        TrainingSequence(prompt_ids=ids[n : n + 16], completion_ids=ids[:16]) for n in (1, 2)
    ]
    work = subject.prepare()
    with FlopCounterMode(display=False) as counter:
        work()
    counted = counter.get_flop_counts()["Global"]
    products = sum(value for key, value in counted.items() if "attention" not in str(key))
    layers = sum(p.numel() for p in subject.policy.model.layers.parameters() if p.dim() == 2)
    config = subject.policy.model.config
    flops = count_flops(config, layers, 2 * 32 * 33 // 2, 32, num_read=64, checkpoint=False)
    # The counter does not know addmm_, by which the head's gradient grows: a third of a training pass.
    assert products + flops.head / 3 == flops.layers + flops.head + flops.again
    tiny = replace(config, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2)
    # Three pairs of two channels: a product for the score and one for the value, 2 operations each, thrice.
    assert count_flops(tiny, 0, 3, 0, num_read=0, checkpoint=False).attention == 3 * 2 * 2 * 2 * 3
    again = count_flops(config, layers, 9, 0, num_read=64, checkpoint=True)
    assert again.again == (again.layers + again.attention) / 3


def test_a_prompt_that_is_shared_counts_once() -> None:
    pair = [TrainingSequence(prompt_ids=(1, 2, 3), completion_ids=(4, n)) for n in (5, 6)]
    own = 3 * 4 // 2 + 2 * (2 * 3 + 2 * 3 // 2)
    assert diagnose_speed._pairs(pair, 100) == own
    assert diagnose_speed._pairs(pair, 1) == 2 * 5 * 6 // 2


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 3, 20])
def test_schedule_twin(schedule: Any, warmup: int) -> None:
    optim = OptimConfig(lr=3e-4, schedule=schedule, warmup_steps=warmup)
    for step in (0, 1, 2, 3, 9, 19):
        assert learning_rate_at(optim, step, 20) == pytest.approx(learning_rate(optim, step, 20), rel=1e-12)


def leak_future(subject: Subject) -> None:
    subject.policy.model.layers[0].register_forward_hook(lambda m, i, out: out + 0.01 * out.roll(-1, 0))


def see_neighbours(subject: Subject) -> None:
    subject.policy.model.layers[0].register_forward_hook(lambda m, i, out: out + 0.1 * out.mean(0))


def count_on_over_neighbours(subject: Subject) -> None:
    def positions(module: Any, inputs: Any) -> Any:
        return (inputs[0], (inputs[1] + torch.arange(len(inputs[1]))) % 64, *inputs[2:])

    subject.policy.model.register_forward_pre_hook(positions)


def forget_the_past(subject: Subject) -> None:
    for layer in subject.policy.model.layers:
        attention: Any = layer.self_attn
        attention.register_forward_hook(lambda m, i, out: out * 0)


def blow_up(subject: Subject) -> None:
    with torch.no_grad():
        subject.policy.model.head_weight[3, 3] = math.inf


@pytest.fixture(scope="module")
def seeing_run(tmp_path_factory: pytest.TempPathFactory) -> SFTConfig:
    """A step of a model that sees, whose prompts begin, end and go on with images."""
    where = tmp_path_factory.mktemp("seeing")
    images = [uri(9), uri(30, 200, size=(16, 24)), uri(1, 9, 70)]
    rows = [
        {"question": f"{'abcdefghij'[n]}=", "solution": str(n), "answer": str(n), "image": images[n % 3]}
        for n in range(8)
    ]
    (where / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sft(
        policy=PolicyConfig(init=str(save_model(where / "model")), max_rows=64, device="cpu"),
        task=TaskConfig(name="jsonl", path=str(where / "rows.jsonl")),
    )


def test_a_sound_step_with_images_passes(seeing_run: SFTConfig) -> None:
    subject = Subject(seeing_run)
    assert any(is_image(token) for s in subject.sequences for token in s.prompt_ids)
    found = [tokenizer(subject), parameters(subject), forward(subject)]
    found.append(gradients(subject, update_of(subject)))
    assert [check for part in found for check in part.checks if check.status == "fail"] == []
    # Where the tower is trained, it is to have gradients, too.
    trained = Subject(replace(seeing_run, policy=replace(seeing_run.policy, train_vision=True)))
    assert failed(gradients(trained, update_of(trained))) == set()


def test_a_damaged_forward_pass_with_images_is_found(seeing_run: SFTConfig) -> None:
    for damage, expected in (
        (leak_future, {"later tokens change nothing (causal)"}),
        (see_neighbours, {"the same packed with others behind", "the same packed with others in front"}),
    ):
        subject = Subject(seeing_run)
        damage(subject)
        assert expected <= failed(forward(subject))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (leak_future, {"later tokens change nothing (causal)"}),
        (see_neighbours, {"the same packed with others behind", "the same packed with others in front"}),
        (count_on_over_neighbours, {"the same packed with others in front"}),
        (blow_up, {"finite"}),
    ],
)
def test_damaged_forward_pass_is_found(damage: Callable[[Subject], None], expected: set[str]) -> None:
    subject = Subject(sft())
    damage(subject)
    assert expected <= failed(forward(subject))


def test_model_without_memory_is_warned_of() -> None:
    subject = Subject(sft())
    forget_the_past(subject)
    found = {check.name: check.status for check in forward(subject).checks}
    assert found["earlier tokens change something"] == "warn"
    assert found["later tokens change nothing (causal)"] == "pass"


def test_frozen_and_unreached_tensors_are_found() -> None:
    subject = Subject(sft())
    subject.policy.model.layers[1].mlp.up_proj.weight.requires_grad_(False)  # type: ignore[union-attr]
    subject.reset()
    part = gradients(subject, update_of(subject))
    assert failed(part) == {"every tensor has a gradient"}
    assert part.headline.startswith("19 of 20 tensors")
    subject = Subject(sft())
    subject.policy.model.layers[0].mlp.register_forward_hook(lambda m, i, out: out * 0)  # type: ignore[union-attr]
    part = gradients(subject, update_of(subject))
    assert failed(part) == {"every tensor has a gradient"}
    (check,) = [check for check in part.checks if check.status == "fail"]
    assert "layers.0.mlp" in check.found


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_adapters_beside_a_frozen_base_are_sound(quantize: Any, tmp_path: Path) -> None:
    load_policy(POLICY, seed=0).save(tmp_path / "base")
    start = PolicyConfig(init=str(tmp_path / "base"), device="cpu", quantize=quantize)
    subject = Subject(sft(policy=start, lora=LoRAConfig(rank=4)))
    part = gradients(subject, update_of(subject))
    assert (failed(part), failed(parameters(subject))) == (set(), set())
    assert part.headline.startswith("14 of 28 tensors")
    subject.policy.model.layers[1].mlp.up_proj.side.lora_B.requires_grad_(False)  # type: ignore[union-attr]
    subject.reset()
    part = gradients(subject, update_of(subject))
    assert failed(part) == {"every tensor has a gradient"}


def test_wrong_gradient_is_found_by_finite_differences() -> None:
    subject = Subject(sft())
    for parameter in subject.policy.model.parameters():
        parameter.register_hook(lambda g: 1.1 * g)
    assert failed(objective(subject)) == {"log-prob along the step"}


def test_clip_of_the_gradient_is_told() -> None:
    subject = Subject(sft(optim=replace(OPTIM, max_grad_norm=1e-3)))
    update = update_of(subject)
    part = gradients(subject, update)
    assert part.facts["taken away by the clip"] == share(1 - 1e-3 / update.norm)
    assert {check.name for check in part.checks if check.status == "warn"} == {"clip"}
    # As in the source: 3.163 clipped to 1.
    assert share(1 - 1 / 3.163) == "68.4 %"


@contextmanager
def patched(target: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield


def test_wrong_learning_rate_is_found() -> None:
    with patched(diagnose_step, "learning_rate", lambda optim, step, num_steps: optim.lr):
        subject = Subject(sft())
    found = failed(optimizer(subject, update_of(subject)))
    assert {"lr given against the schedule", "lr measured in the weights"} <= found
    plain = Optimizer.step
    faster = lambda self, lr, loss=0.0: plain(self, 1.1 * lr, loss=loss)  # noqa: E731
    subject = Subject(sft())
    with patched(Optimizer, "step", faster):
        part = optimizer(subject, update_of(subject))
    assert failed(part) == {"lr measured in the weights", "change against AdamW in float64"}
    assert part.facts["lr that the weights moved by"] == pytest.approx(1.1e-4, rel=1e-3)


def test_forgotten_weight_decay_and_missing_warm_up_are_found() -> None:
    subject = Subject(sft(optim=replace(OPTIM, warmup_steps=0)))
    subject.optimizer._config = replace(OPTIM, weight_decay=0.0)
    part = optimizer(subject, update_of(subject))
    assert "change against AdamW in float64" in failed(part)
    assert "warm-up" in {check.name for check in part.checks if check.status == "warn"}
    count = sum(p.numel() for p in subject.policy.model.parameters())
    assert part.facts["change of all weights, L2"] == pytest.approx(1e-3 * math.sqrt(count), rel=0.05)


def test_wrong_mathematics_is_found() -> None:
    plain = diagnose_step.with_advantages

    def steeper(*arguments: Any) -> Any:
        return [
            replace(
                group,
                samples=tuple(replace(s, advantage=2 * (s.advantage or 0) + 0.1) for s in group.samples),
            )
            for group in plain(*arguments)
        ]

    with patched(diagnose_step, "with_advantages", steeper):
        subject = Subject(rl())
    assert {"advantages by their definition", "mean advantage of every group"} <= failed(objective(subject))
    subject = Subject(rl("reinforce"))
    assert failed(objective(subject)) == set()
    worse = lambda *a, **k: (-policy_loss(*a, **k)[0], *policy_loss(*a, **k)[1:])  # noqa: E731
    with patched(objective_module, "policy_loss", worse):
        found = failed(objective(subject))
    assert len([name for name in found if name.startswith("all advantages")]) == 2
    assert "loss recomputed from log-probs" in found
    subject = Subject(rl())
    subject.groups = [
        replace(
            g,
            samples=tuple(
                replace(s, sampler_logprobs=tuple(p - 0.3 for p in s.sampler_logprobs)) for s in g.samples
            ),
        )
        for g in subject.groups
    ]
    subject.sequences = [
        replace(s, sampler_logprobs=tuple(p - 0.3 for p in s.sampler_logprobs)) for s in subject.sequences
    ]
    part = objective(subject)
    assert "ratio before the update" in failed(part)
    assert part.facts["ratio, largest"] == pytest.approx(math.exp(0.3), rel=1e-4)
    assert part.facts["ratios outside the clip"] == "100.0 %"


def test_loss_of_any_sign_is_no_alarm() -> None:
    part = objective(Subject(rl()))
    assert part.facts["loss with all advantages +1"] == pytest.approx(-1)
    assert part.facts["loss with all advantages -1"] == pytest.approx(1)
    assert failed(part) == set()


def test_rewards_without_differences_are_replaced_and_told() -> None:
    subject = Subject(rl(rewards={"correct": 1.0}, group_size=3))
    assert subject.is_substituted
    assert [s.reward for s in subject.groups[0].samples] == [1.0, 0.0, 1.0]
    warned = {check.name for check in objective(subject).checks if check.status == "warn"}
    assert warned == {"groups whose rewards differ", "group size"}


def test_damaged_tokenizer_and_parameters_are_found() -> None:
    subject = Subject(sft())
    with patched(Tokenizer, "decode", lambda self, ids: "x"):
        assert failed(tokenizer(subject)) == {"decode(encode(text)) == text"}
    with torch.no_grad():
        subject.policy.model.head_weight.mul_(1.5)
    assert failed(parameters(subject)) == {"norm by the law of random weights"}
    subject.policy.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    assert "as the shape says" in failed(parameters(subject))


def test_gpt2_is_known_by_its_golden_ids(gpt2_folder: Path) -> None:
    subject = Subject(sft())
    subject.policy.tokenizer = Tokenizer.load(gpt2_folder)
    part = tokenizer(subject)
    assert failed(part) == set()
    assert part.checks[-1].found == "46 ids, 46 as published"
    plain = Tokenizer.encode
    other = lambda self, text: plain(self, text.replace(" ", "  ") if text == GPT2_PROMPT else text)  # noqa: E731
    with patched(Tokenizer, "encode", other):
        assert len(failed(tokenizer(subject))) == 1


@pytest.mark.ci
def test_what_a_step_leaves_behind_is_found() -> None:
    subject, kept = Subject(sft()), []
    assert failed(memory(subject)) == set()
    plain = subject.prepare

    def leaking(*arguments: Any, **options: Any) -> Any:
        work = plain(*arguments, **options)
        return lambda: (kept.append(torch.zeros(100_000)), work())[1]

    with patched(subject, "prepare", leaking):
        part = memory(subject)
    assert failed(part) == {"a step leaves nothing behind"}
    assert part.facts["alive after it, bytes"] - part.facts["alive before the step, bytes"] == 400_000
    weights = sum(p.nbytes for p in subject.policy.model.parameters())
    assert part.facts["optimizer's state, bytes"] == pytest.approx(2 * weights, rel=0.01)
    assert part.facts["backward, peak bytes"] > 3 * weights


def test_mfu_above_1_fails_and_shares_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(sft())
    stages = (*diagnose_step.STAGES, diagnose_step.BETWEEN)
    # The warm-up, then three steps: the medians by stage are 20.7, 33.1 and 33.5 ms, and no step took their sum.
    times = iter([(0, 9, 9, 9, 0), (0, 20.7, 60, 30, 0), (0, 10, 33.1, 33.5, 0), (0, 40, 20, 70, 0)])
    rows = ({stage: n / 1000 for stage, n in zip(stages, row, strict=True)} for row in times)
    plain = diagnose_speed.timed

    def slowly(subject: Subject, work: Any) -> dict[str, float]:
        plain(subject, work)
        row = next(rows)
        return row | {"step": sum(row.values())}

    monkeypatch.setattr(diagnose_speed, "timed", slowly)
    monkeypatch.setattr(diagnose_speed, "matmul_rate", lambda device, dtype: 1.0)
    part = speed(subject, 3, 20)
    assert failed(part) == {"MFU is a share"}
    read = part.facts["tokens read"]
    size = sum(p.numel() for p in subject.policy.model.parameters())
    quick = [value for name, value in part.facts.items() if name.startswith("MFU of forward, 2 per")]
    assert quick == pytest.approx([2 * size * 20 / 0.0207, 2 * size * read / 0.0207])
    (flagged,) = (check for check in part.checks if check.name == "tokens of the FLOPs")
    assert flagged.status == "warn"
    assert flagged.found.startswith(f"20 tokens counted, {read:,} read: ")
    shares = [part.facts[f"{stage}, share of the step"] for stage in stages]
    assert shares == [
        "0.0 %",
        "23.7 %",
        "37.9 %",
        "38.4 %",
        "0.0 %",
    ]  # of source 003, which said 38, 61 and nothing
    assert part.facts["forward, share of forward and backward"] == "38.5 %"
    num_tokens = sum(s.num_tokens for s in subject.sequences)
    assert part.facts["tokens read"] == num_tokens
    weights = sum(p.numel() for p in subject.policy.model.layers.parameters() if p.dim() == 2)
    assert part.facts["FLOPs of layers, 6 per weight and token"] == 6 * weights * num_tokens
    assert part.facts["tokens per second"] == pytest.approx(num_tokens / 0.1107)


def test_switches_are_measured_in_turn_and_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, order = Subject(rl()), []
    ticks = count()

    def slow_base(subject: Subject, work: Any) -> dict[str, float]:
        order.append((subject.policy.attention, subject.policy.model.checkpoint_layers))
        return {"step": 1.0 if next(ticks) % 2 else 2.0}

    plain = diagnose_switches.prepare_model

    def broken(model: Any, optim: OptimConfig) -> None:
        if optim.checkpoint_layers:
            next(ticks)
            raise RuntimeError("no such\nkernel")
        plain(model, optim)

    monkeypatch.setattr(diagnose_switches, "timed", slow_base)
    monkeypatch.setattr(diagnose_switches, "prepare_model", broken)
    monkeypatch.setattr(diagnose_switches, "peaks", lambda subject, prepare: ({"forward": 8}, 0, 0))
    part = toggles(subject, 2, compiles=False)
    rows = {row["switch"]: row for row in next(iter(part.tables.values()))}
    assert rows["checkpointing"]["speed"] == "failed"
    assert rows["checkpointing"]["peak memory"] == "RuntimeError: no such kernel"
    assert rows["fused attention"]["speed"] == "2.00x"
    assert rows["4 times the micro-batch"]["speed"] == "8.00x"
    assert rows["bfloat16 autocast + fused attention + 4 times the micro-batch"]["speed"] == "8.00x"
    assert order[:6] == [("exact", False)] * 6  # bfloat16: three rounds of two
    assert [attention for attention, _ in order[6:12]] == ["exact", "fast"] * 3
    assert part.verdict == "warn"
    assert (subject.policy.attention, subject.policy.model.checkpoint_layers) == ("exact", False)


@pytest.mark.slow
def test_switches_for_real() -> None:
    part = toggles(Subject(sft(batch_size=2)), 1, compiles=False)
    rows = [row["switch"] for row in next(iter(part.tables.values())) if row["speed"] != "failed"]
    assert rows[:3] == ["bfloat16 autocast", "checkpointing", "4 times the micro-batch"]


def test_report_and_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(diagnose, "read_recipe", lambda config: rl())
    out = tmp_path / "out"
    main(DiagnoseConfig(recipe="<b>", out=str(out), repeats=1, rounds=0))
    said = capsys.readouterr().out
    assert "verdict: warn" in said
    assert re.search(
        r"diagnose .*9 components\n.*environment \.\.\.\n(.*\n)*component 9/9", said
    )  # a calm log
    content = json.loads((out / "diagnose.json").read_text())
    assert content["verdict"] == "warn"
    assert content["components"]["gradients"]["verdict"] == "pass"
    assert content["config"]["group_size"] == 4
    page = (out / "diagnose.html").read_text()
    assert page.count('<details class="component">') == len(content["components"]) == 9
    assert "<b>" not in page
    assert "<svg" in page
    log = (out / "diagnose.log").read_text()
    assert all(f"{part['name']}: {part['verdict']}" in log for part in content["components"].values())
    with pytest.raises(UserError, match="already exists"):
        main(DiagnoseConfig(recipe="x", out=str(out), rounds=0))
    worse = lambda subject: 1 / 0  # noqa: E731
    monkeypatch.setattr(diagnose, "objective", worse)
    with pytest.raises(SystemExit) as stop:
        main(DiagnoseConfig(recipe="x", out=str(tmp_path / "again"), repeats=1, rounds=0))
    assert stop.value.code == 1
    assert "ZeroDivisionError" in (tmp_path / "again" / "diagnose.log").read_text()
    assert "could be examined" in capsys.readouterr().out


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, text in (
        ({"repeats": 0}, "repeats = 0"),
        ({"rounds": -1}, "rounds = -1"),
        ({"rounds": 0, "compile": True}, "compile is read with rounds"),
    ):
        with pytest.raises(ValueError, match=text):
            DiagnoseConfig(recipe="x", **options)  # type: ignore[arg-type]
    says = (sys.executable, "-S", "-c", "import sys; sys.exit('whet: error: no recipe ' + sys.argv[2])")
    monkeypatch.setattr(diagnose, "read_recipe", lambda config: read_recipe(config, says))
    words = ["nosuch", "--of", "sft", "--out", str(tmp_path / "out")]
    parsed = cli.parse("whet diagnose", DiagnoseConfig, {}, words, resumable=False, positional="recipe")
    with pytest.raises(UserError, match="whet sft refuses: no recipe nosuch"):
        main(parsed.config)
    assert not (tmp_path / "out").exists()


def test_values_are_written_for_people() -> None:
    written = [show(value) for value in (True, 1234567, 0.123456, [1, 2.5], {"a": 1}, None)]
    assert written == ["yes", "1,234,567", "0.1235", "1, 2.5", "a 1", "none"]
    assert [share(value) for value in (0.0, 0.000123, 0.5, 1.0)] == ["0.0 %", "0.012 %", "50.0 %", "100.0 %"]
    assert worst(["pass", "fail", "warn"]) == "fail"
    assert worst([]) == "pass"
    assert diagnose_objective.SLOPE.keys() == {"float32", "bfloat16_autocast", "float16_autocast"}
