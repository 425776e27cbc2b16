"""Preference losses against their closed forms, finite differences, plain-Python oracles and TRL."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from whet.algo.preference import (
    agreement,
    apo_down_loss,
    apo_zero_loss,
    dpo_loss,
    hinge_loss,
    ipo_loss,
    kto_loss,
    log_odds,
    log_ratios,
    mean_nll,
    orpo_loss,
    reward_loss,
    robust_loss,
)

CHOSEN = [-3.0, 0.0, 0.7, 12.0, 1.5]
REJECTED = [1.0, 0.0, 0.2, -30.0, 1.5]
# Float64 sums of a few terms of size 1 to 1000.
EXACT: dict[str, Any] = {"rel": 1e-12, "abs": 1e-12}

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def oracle_dpo(chosen: float, rejected: float, beta: float, smoothing: float) -> float:
    margin = beta * (chosen - rejected)
    return (1 - smoothing) * math.log1p(math.exp(-margin)) + smoothing * math.log1p(math.exp(margin))


def leaves(*rows: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in rows]


@pytest.mark.parametrize("beta", [0.05, 0.1, 1.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo(beta: float, smoothing: float) -> None:
    chosen_B, rejected_B = leaves(CHOSEN, REJECTED)
    loss_B = dpo_loss(chosen_B, rejected_B, beta=beta, label_smoothing=smoothing)
    expected = [oracle_dpo(c, r, beta, smoothing) for c, r in zip(CHOSEN, REJECTED, strict=True)]
    assert loss_B.tolist() == pytest.approx(expected, **EXACT)
    assert float(loss_B[1].detach()) == pytest.approx(math.log(2), **EXACT)  # no preference yet
    loss_B.sum().backward()
    # d/dh -log sigmoid(beta h) = -beta sigmoid(-beta h); of the smoothed part with the sign turned.
    slopes = [
        -beta * ((1 - smoothing) * sigmoid(-beta * (c - r)) - smoothing * sigmoid(beta * (c - r)))
        for c, r in zip(CHOSEN, REJECTED, strict=True)
    ]
    assert chosen_B.grad is not None
    assert rejected_B.grad is not None
    assert chosen_B.grad.tolist() == pytest.approx(slopes, **EXACT)
    assert rejected_B.grad.tolist() == pytest.approx([-slope for slope in slopes], **EXACT)


@pytest.mark.parametrize("beta", [0.05, 0.1, 1.0])
def test_ipo(beta: float) -> None:
    chosen_B, rejected_B = leaves(CHOSEN, REJECTED)
    loss_B = ipo_loss(chosen_B, rejected_B, beta=beta)
    gaps = [c - r - 1 / (2 * beta) for c, r in zip(CHOSEN, REJECTED, strict=True)]
    assert loss_B.tolist() == pytest.approx([gap**2 for gap in gaps], **EXACT)
    assert float(loss_B[1].detach()) == pytest.approx(1 / (4 * beta**2), **EXACT)
    loss_B.sum().backward()
    assert chosen_B.grad is not None
    assert rejected_B.grad is not None
    assert chosen_B.grad.tolist() == pytest.approx([2 * gap for gap in gaps], **EXACT)
    assert rejected_B.grad.tolist() == pytest.approx([-2 * gap for gap in gaps], **EXACT)


PAIRED: dict[str, tuple[Loss, Callable[[float, float], float]]] = {
    "hinge": (lambda c, r: hinge_loss(c, r, beta=0.3), lambda c, r: max(0.0, 1 - 0.3 * (c - r))),
    "robust": (
        lambda c, r: robust_loss(c, r, beta=0.3, label_smoothing=0.1),
        lambda c, r: -(0.9 * math.log(sigmoid(0.3 * (c - r))) - 0.1 * math.log(sigmoid(0.3 * (r - c)))) / 0.8,
    ),
    "apo zero": (
        lambda c, r: apo_zero_loss(c, r, beta=0.3),
        lambda c, r: sigmoid(-0.3 * c) + sigmoid(0.3 * r),
    ),
    "apo down": (
        lambda c, r: apo_down_loss(c, r, beta=0.3),
        lambda c, r: sigmoid(0.3 * c) + sigmoid(0.3 * (r - c)),
    ),
    "kto": (
        lambda c, r: (
            kto_loss(c, torch.ones(5, dtype=torch.bool), 0.4, beta=0.3, desirable_weight=1.5)
            + kto_loss(r, torch.zeros(5, dtype=torch.bool), 0.4, beta=0.3, undesirable_weight=0.7)
        ),
        lambda c, r: 1.5 * sigmoid(-0.3 * (c - 0.4)) + 0.7 * sigmoid(-0.3 * (0.4 - r)),
    ),
    "reward": (
        lambda c, r: reward_loss(c, r, torch.full((5,), 0.2), center_coef=0.01),
        lambda c, r: math.log1p(math.exp(-(c - r - 0.2))) + 0.01 * (c + r) ** 2,
    ),
}


@pytest.mark.parametrize("name", PAIRED)
def test_closed_forms_and_finite_differences(name: str) -> None:
    loss, oracle = PAIRED[name]
    chosen_B, rejected_B = leaves(CHOSEN, REJECTED)
    expected = [oracle(c, r) for c, r in zip(CHOSEN, REJECTED, strict=True)]
    # The margin of 0.2 is float32: its distance from the float64 one is 1e-9.
    rel = 1e-8 if name == "reward" else 1e-12
    assert loss(chosen_B, rejected_B).tolist() == pytest.approx(expected, rel=rel, abs=1e-12)
    assert torch.autograd.gradcheck(loss, leaves(CHOSEN, REJECTED), eps=1e-6, atol=1e-6)


MEANS = [-3.0, -1e-4, -0.7, -20.0, -0.1]


def test_orpo() -> None:
    """The odds ratio with exact fractions of probabilities, and finite differences."""
    worse = [-1.0, -2.0, -0.6, -0.01, -0.1]

    def odds(mean: float) -> float:
        return math.exp(mean) / -math.expm1(mean)

    chosen_B, rejected_B = leaves(MEANS, worse)
    expected = [-c + 0.3 * math.log1p(odds(r) / odds(c)) for c, r in zip(MEANS, worse, strict=True)]
    assert orpo_loss(chosen_B, rejected_B, beta=0.3).tolist() == pytest.approx(expected, rel=1e-9)
    assert torch.autograd.gradcheck(
        lambda c, r: orpo_loss(c, r, beta=0.3), leaves(MEANS, worse), eps=1e-7, atol=1e-5
    )


def test_the_odds_of_certainty_are_finite() -> None:
    (means_B,) = leaves([0.0, -1e3])
    found_B = log_odds(means_B)
    found_B.sum().backward()
    # Clamped to -1e-9: log(1e9) nats; and far below log odds are log p.
    assert found_B.tolist() == pytest.approx([math.log(1e9), -1e3], rel=1e-6)
    assert means_B.grad is not None
    assert means_B.grad.tolist() == pytest.approx([0.0, 1.0])


def test_the_odds_are_precise_near_certainty() -> None:
    (means_B,) = leaves([-1e-8])
    # 1 - exp(log p) would have lost half of its digits.
    assert log_odds(means_B).item() == pytest.approx(-1e-8 - math.log(-math.expm1(-1e-8)), abs=1e-12)


def test_robust_loss_is_unbiased_under_flipped_labels() -> None:
    chosen_B, rejected_B = leaves(CHOSEN, REJECTED)
    right_B = robust_loss(chosen_B, rejected_B, beta=0.3, label_smoothing=0.2)
    wrong_B = robust_loss(rejected_B, chosen_B, beta=0.3, label_smoothing=0.2)
    clean_B = dpo_loss(chosen_B, rejected_B, beta=0.3)
    assert (0.8 * right_B + 0.2 * wrong_B).tolist() == pytest.approx(clean_B.tolist(), **EXACT)


LOSSES: dict[str, Loss] = {
    "dpo": lambda c, r: dpo_loss(c, r, beta=0.3),
    "smoothed": lambda c, r: dpo_loss(c, r, beta=0.3, label_smoothing=0.1),
    "ipo": lambda c, r: ipo_loss(c, r, beta=0.3),
    "rpo": lambda c, r: dpo_loss(c, r, beta=0.3) + 0.5 * mean_nll(c, torch.tensor([3.0, 1.0, 7.0, 2.0, 5.0])),
}


@pytest.mark.parametrize("name", LOSSES)
def test_finite_differences(name: str) -> None:
    assert torch.autograd.gradcheck(LOSSES[name], leaves(CHOSEN, REJECTED), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_dpo_stays_finite_where_exp_does_not(gap: float) -> None:
    (gap_B,) = leaves([gap])
    loss_B = dpo_loss(gap_B, torch.zeros(1), beta=1.0)
    loss_B.sum().backward()
    assert gap_B.grad is not None
    assert loss_B.tolist() == pytest.approx([max(-gap, 0.0)], **EXACT)
    assert gap_B.grad.tolist() == pytest.approx([-1.0 if gap < 0 else 0.0], **EXACT)


def test_log_ratios_train_the_policy_only() -> None:
    policy_B, ref_B = leaves([-4.0, -9.0], [-5.0, -6.0])
    ratios_B = log_ratios(policy_B, ref_B)
    assert ratios_B.tolist() == [1.0, -3.0]
    ratios_B.sum().backward()
    assert policy_B.grad is not None
    assert policy_B.grad.tolist() == [1.0, 1.0]
    assert ref_B.grad is None


def test_mean_nll_is_per_token_of_each_completion() -> None:
    (policy_B,) = leaves([-6.0, -6.0])
    loss_B = mean_nll(policy_B, torch.tensor([2.0, 6.0]))
    assert loss_B.tolist() == [3.0, 1.0]
    loss_B.sum().backward()
    assert policy_B.grad is not None
    assert policy_B.grad.tolist() == pytest.approx([-1 / 2, -1 / 6], **EXACT)


def test_agreement() -> None:
    assert agreement(torch.tensor([1e-9, 0.0, -2.0])).tolist() == [1.0, 0.5, 0.0]


def trl_loss(
    loss_types: list[str], batch: dict[str, torch.Tensor], **options: Any
) -> tuple[torch.Tensor, Any]:
    """Run the loss of TRL's own trainer on given per-token log-probabilities, without a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_class = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    policy = batch["policy"]
    zeros = torch.zeros_like(policy)
    outputs = SimpleNamespace(log_probs=policy, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    trainer = SimpleNamespace(
        model=torch.nn.Identity(),
        accelerator=SimpleNamespace(
            device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
        ),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        loss_types=loss_types,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **options,
    )
    inputs = {name: batch[name] for name in ("completion_mask", "ref_chosen_logps", "ref_rejected_logps")}
    inputs |= {"input_ids": batch["completion_mask"], "attention_mask": batch["completion_mask"]}
    loss = trainer_class._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return loss, trainer._metrics["train"]


TRL_RATIOS: dict[str, Loss] = {
    "sigmoid": lambda c, r: dpo_loss(c, r, beta=0.3),
    "sigmoid_norm": lambda c, r: dpo_loss(c, r, beta=0.3),
    "rpo": lambda c, r: dpo_loss(c, r, beta=0.3),
    "ipo": lambda c, r: ipo_loss(c, r, beta=0.3),
    "hinge": lambda c, r: hinge_loss(c, r, beta=0.3),
    "robust": lambda c, r: robust_loss(c, r, beta=0.3, label_smoothing=0.1),
    "apo_zero": lambda c, r: apo_zero_loss(c, r, beta=0.3),
    "apo_down": lambda c, r: apo_down_loss(c, r, beta=0.3),
}


@pytest.mark.ci  # importing TRL takes ten seconds a process
@pytest.mark.parametrize("name", TRL_RATIOS)
def test_parity_with_trl(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [4, 4, 4, 2, 6, 3]  # three chosen (of one length: TRL's 'sft' is a token mean), three rejected
    mask = torch.zeros(6, 9, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, 2 : 2 + length] = 1
    policy = -3 * torch.rand(6, 8, generator=generator, dtype=torch.float64) * mask[:, 1:]
    policy.requires_grad_()
    ref_B = policy.detach().sum(1) + torch.randn(6, generator=generator, dtype=torch.float64)
    batch = {"policy": policy, "completion_mask": mask}
    batch |= {"ref_chosen_logps": ref_B[:3], "ref_rejected_logps": ref_B[3:]}
    types = ["sigmoid", "sft"] if name == "rpo" else [name]
    smoothing = 0.1 if name == "robust" else 0.0
    options = {"beta": 0.3, "label_smoothing": smoothing, "loss_weights": [1.0, 0.7][: len(types)]}
    theirs, metrics = trl_loss(types, batch, **options)
    theirs.backward()
    assert policy.grad is not None
    gradient, policy.grad = policy.grad.clone(), None

    sums_B, lengths_B = policy.sum(1), torch.tensor(lengths, dtype=torch.float64)
    ratios_B = log_ratios(sums_B, ref_B)
    if name in ("ipo", "sigmoid_norm"):
        ratios_B = ratios_B / lengths_B
    ours = TRL_RATIOS[name](ratios_B[:3], ratios_B[3:]).mean()
    if name == "rpo":
        ours = ours + 0.7 * mean_nll(sums_B[:3], lengths_B[:3]).mean()
    ours.backward()
    assert policy.grad is not None
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-12)
    torch.testing.assert_close(policy.grad * mask[:, 1:], gradient * mask[:, 1:], rtol=1e-12, atol=1e-12)
    rewards_B = 0.3 * log_ratios(sums_B, ref_B).detach()
    assert metrics["rewards/chosen"] == pytest.approx([float(rewards_B[:3].mean())], rel=1e-6)
    assert metrics["rewards/accuracies"] == pytest.approx(
        [float(agreement(rewards_B[:3] - rewards_B[3:]).mean())], rel=1e-6
    )
