"""The same tokens, log-probabilities and rewards through TRL's own methods and through whet's objective.

TRL computes in float32 with its own model and padding, whet here in float32 with its own and packing; 2e-5 of a
tensor's largest gradient is what two float32 forward passes differ by, and 1e-6 of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from late import Late

from whet.algo.config import AlgoConfig
from whet.generate.policy import Policy
from whet.model.text.tokenizer import Tokenizer
from whet.model.weights import load_model
from whet.schema import ResponseSchema
from whet.train.objective.advantage import with_advantages
from whet.train.objective.objective import Objective
from whet.train.optim.step import OptimConfig, Optimizer
from whet.types import Group, Problem, Sample

peer: Any = Late("trl_peer", reason="TRL is not installed: pip install 'whet-rl[peers]'")
# Importing TRL takes ten seconds of every process.
pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore")]

MAX_LENGTH, GROUP_SIZE = 12, 4
GRPO = AlgoConfig(aggregation="sequence_mean", uninformative="keep")
TOKENS = AlgoConfig(uninformative="keep")


def make_groups(filter_row: int | None = None) -> list[Group]:
    """Three groups of four samples, off-policy by some tenths of a nat from the nudged model."""
    generator = torch.Generator().manual_seed(3)

    def ids(low: int, high: int) -> tuple[int, ...]:
        count = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(0, peer.PAD, (count,), generator=generator).tolist())

    groups = []
    for number in range(3):
        prompt = ids(1, 8)
        samples = [
            Sample(
                uid=str(number),
                index=index,
                prompt_ids=prompt,
                completion_ids=ids(2, MAX_LENGTH),
                sampler_logprobs=(),
                text="",
                finish_reason="length" if number * GROUP_SIZE + index == filter_row else "stop",
                reward=0.0,
                advantage=[1.25, -0.5, 0.5, -1.25][index],
            )
            for index in range(GROUP_SIZE)
        ]
        problem = Problem(uid=str(number), task="arithmetic", prompt="1+1=", answer="2")
        groups.append(Group(problem=problem, samples=tuple(samples)))
    return groups


def flat(groups: Sequence[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def sampled(groups: Sequence[Group], model: torch.nn.Module, noise: float = 0.3) -> list[Group]:
    """Give the samples log-probabilities near those of a model, by transformers' own logits."""
    generator = torch.Generator().manual_seed(4)

    def scored(sample: Sample) -> Sample:
        tokens = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[0, len(sample.prompt_ids) - 1 : -1]
        logps = logits.log_softmax(-1)[range(len(logits)), list(sample.completion_ids)]
        off = logps + noise * torch.randn(logps.shape, generator=generator)
        return replace(sample, sampler_logprobs=tuple(off.tolist()))

    return [replace(group, samples=tuple(map(scored, group.samples))) for group in groups]


class Recorder(Optimizer):
    """Keeps the gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model, OptimConfig())
        self.gradients: dict[str, torch.Tensor] = {}

    def step(self, lr: float, *, loss: float = 0.0) -> float:
        self.gradients = {name: p.grad.clone() for name, p in self._named if p.grad is not None}
        return 0.0


@dataclass(frozen=True)
class Start:
    """One model in both programs, its reference, and the groups."""

    model: Any
    frozen: Any
    folder: Path
    groups: list[Group]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    folder = tmp_path_factory.mktemp("model")
    frozen, model = peer.tiny_model(), peer.tiny_model()
    frozen.save_pretrained(folder)
    peer.nudge(model, 7)
    return Start(model, frozen, folder, sampled(make_groups(), model))


def ours(start: Start, algo: AlgoConfig, groups: Sequence[Group]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of whet's objective, packed into several micro-batches."""
    model, _ = load_model(start.folder)
    policy = Policy(model, Tokenizer.characters("0123456789+=,", ResponseSchema().tags), ResponseSchema())
    optim = OptimConfig(token_budget=40)
    objective = Objective(policy, algo, optim=optim, temperature=1.0, max_length=MAX_LENGTH)
    with torch.no_grad():
        theirs = dict(start.model.named_parameters())
        for name, parameter in model.named_parameters():
            parameter.copy_(theirs[name])
    recorder = Recorder(model)
    metrics = objective.update(groups, recorder, 1e-3)
    return metrics["rl/loss"], recorder.gradients


def theirs(
    start: Start, groups: Sequence[Group], settings: dict[str, Any], masked: int | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of TRL's `GRPOTrainer._compute_loss` on one micro-batch."""
    beta = settings.pop("beta", 0.0)
    samples = flat(groups)
    trainer = peer.make_trainer(start.model, len(samples), GROUP_SIZE, MAX_LENGTH, **settings)
    # Given to the constructor, beta would load a reference from a name on the hub.
    trainer.beta = beta
    inputs = peer.padded_inputs(samples, [sample.advantage or 0.0 for sample in samples])
    if masked is not None:
        inputs["completion_mask"][masked] = 0
    if beta:
        peer.with_reference(trainer, inputs, start.frozen)
    loss, gradients, _ = peer.loss_and_gradients(trainer, inputs)
    return loss, gradients


def largest_difference(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert got.keys() == expected.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    return max(float((got[name] - expected[name]).abs().max()) for name in got) / scale


PAIRS: dict[str, tuple[dict[str, Any], AlgoConfig]] = {
    "grpo": ({"loss_type": "grpo"}, GRPO),
    "dr_grpo": ({"loss_type": "dr_grpo"}, replace(GRPO, scale="none", aggregation="constant")),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, replace(TOKENS, clip_high=0.28)),
    "bnpo on one micro-batch": ({"loss_type": "bnpo"}, TOKENS),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        replace(TOKENS, surrogate="weight", clip_low=1.0, clip_high=0.2),
    ),
    "sapo": ({"loss_type": "sapo"}, replace(GRPO, surrogate="sigmoid")),
    "gspo": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.03,
            "epsilon_high": 0.04,
        },
        replace(GRPO, ratio="sequence", clip_low=0.03, clip_high=0.04),
    ),
    "luspo": (
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.03,
            "epsilon_high": 0.04,
        },
        replace(GRPO, ratio="sequence", clip_low=0.03, clip_high=0.04, aggregation="sequence_sum"),
    ),
    "two-sided clip": ({"loss_type": "dapo", "delta": 1.3}, replace(TOKENS, dual_clip=1.3)),
    "k3": (
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
        replace(GRPO, kl="k3_loss", kl_coef=0.3),
    ),
    "k3 times the ratio": (
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": True},
        replace(GRPO, kl="k3_unbiased", kl_coef=0.3),
    ),
    "entropy bonus": ({"loss_type": "dapo", "entropy_coef": 0.1}, replace(TOKENS, entropy_coef=0.1)),
    "entropy top 20 %": (
        {"loss_type": "dapo", "top_entropy_quantile": 0.2},
        replace(TOKENS, entropy_top_share=0.2),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_loss_and_gradients_are_trls(name: str, start: Start) -> None:
    settings, algo = PAIRS[name]
    loss, gradients = ours(start, algo, start.groups)
    their_loss, their_gradients = theirs(start, start.groups, dict(settings))
    assert loss == pytest.approx(their_loss, rel=1e-5, abs=1e-6)
    assert largest_difference(gradients, their_gradients) < 1e-5


def test_cispos_bound_is_one_plus_clip_high(start: Start) -> None:
    """TRL clamps at epsilon_high itself, so the same number means another loss."""
    algo = replace(TOKENS, surrogate="weight", clip_low=1.0, clip_high=1.2)
    _, gradients = ours(start, algo, start.groups)
    _, their_gradients = theirs(start, start.groups, {"loss_type": "cispo", "epsilon_high": 1.2})
    assert largest_difference(gradients, their_gradients) > 1e-2


def test_a_filtered_completion_leaves_our_denominator_and_stays_in_trls(start: Start) -> None:
    groups = sampled(make_groups(filter_row=5), start.model)
    loss, gradients = ours(start, replace(GRPO, overlong="filter"), groups)
    their_loss, their_gradients = theirs(start, groups, {"loss_type": "grpo"}, masked=5)
    rows = len(flat(groups))
    assert loss == pytest.approx(their_loss * rows / (rows - 1), rel=1e-5, abs=1e-6)
    scaled = {name: tensor * rows / (rows - 1) for name, tensor in their_gradients.items()}
    assert largest_difference(gradients, scaled) < 1e-5


CORRECT = [1.0, 0.0, None, 1.0, 0.0, 0.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0]
FORMAT = [0.5, 0.25, None, 0.0, 1.0, 0.0, 0.0, 0.25, 1.0, 1.0, 1.0, 1.0]
WEIGHTS = {"correct": 1.0, "format": 0.5}


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"scale_rewards": "group"}, {"scale": "group"}),
        ({"scale_rewards": "batch"}, {"scale": "batch"}),
        ({"scale_rewards": "none"}, {"scale": "none"}),
        ({"multi_objective_aggregation": "normalize_then_sum"}, {"multi_reward": "normalise"}),
    ],
    ids=["group", "batch", "none", "normalise, then sum"],
)
def test_advantages_are_trls(settings: dict[str, Any], arguments: dict[str, Any], start: Start) -> None:
    """Through TRL's own scoring method, whose sampling alone is replaced; one sample is unscorable."""
    samples = flat(start.groups)
    trainer = peer.make_trainer(
        start.model,
        len(samples),
        GROUP_SIZE,
        MAX_LENGTH,
        reward_funcs=[lambda **columns: CORRECT, lambda **columns: FORMAT],
        reward_weights=list(WEIGHTS.values()),
        **settings,
    )
    prompts, completions = [list(s.prompt_ids) for s in samples], [list(s.completion_ids) for s in samples]
    trainer._generate = lambda _: (prompts, completions, None, [""] * len(samples), None, {}, None, None)
    batch = trainer._generate_and_score_completions([{"prompt": "1"} for _ in samples])
    scores = iter(zip(CORRECT, FORMAT, strict=True))

    def scored(sample: Sample) -> Sample:
        correct, form = next(scores)
        if correct is None or form is None:
            return replace(sample, reward=None, advantage=None)
        total = WEIGHTS["correct"] * correct + WEIGHTS["format"] * form
        return replace(sample, rewards={"correct": correct, "format": form}, reward=total)

    groups = [replace(group, samples=tuple(map(scored, group.samples))) for group in start.groups]
    algo = AlgoConfig(uninformative="keep", **arguments)
    advantages = [s.advantage or 0.0 for s in flat(with_advantages(groups, algo, WEIGHTS))]
    # TRL's are float32 numbers of size 1.
    assert advantages == pytest.approx(batch["advantages"].tolist(), rel=1e-6, abs=1e-6)
