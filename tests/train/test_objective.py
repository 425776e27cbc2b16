"""The objective's updates: named algorithms, minibatches, critic, reference and coefficients, on hand-made groups."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from gloo import run_ranks
from handmade import WEIGHTS, make_group, new_policy, on_policy, play, problems, random_groups, weights_of

from whet.algo.config import AlgoConfig, OffPolicyConfig, ValueConfig
from whet.algo.packing import TrainingSequence
from whet.generate.policy import Policy
from whet.ranks.collectives import rank, world_size
from whet.recipes.rl import ALGORITHMS
from whet.train.objective.advantage import (
    counted_samples,
    is_informative,
    token_advantages,
    training_sequences,
    with_advantages,
)
from whet.train.objective.objective import Objective, keep_top_entropy
from whet.train.objective.reference import Coefficients, Critic
from whet.train.objective.tally import Tally, critic_metrics, gap_sums, mean_of, sampler_metrics
from whet.train.optim.step import OptimConfig, Optimizer
from whet.types import Group

OPTIM = OptimConfig(lr=1e-2, token_budget=400)
RECOMPUTED = OffPolicyConfig(proximal="recomputed")


def first_gradient(algo: AlgoConfig, policy: Policy, groups: list[Group]) -> tuple[torch.Tensor, float]:
    """Return gradient and loss of the first update, without clipping and without moving the policy."""
    taken: list[torch.Tensor] = []

    class Spy(Optimizer):
        def step(self, lr: float, *, loss: float = 0.0) -> float:
            taken.append(torch.cat([p.grad.flatten().clone() for _, p in self._named if p.grad is not None]))
            for _, parameter in self._named:
                parameter.grad = None
            return 1.0

    objective = Objective(policy, algo, optim=OPTIM, temperature=1.0, max_length=10)
    row = objective.update(with_advantages(groups, algo, WEIGHTS), Spy(policy.model, OPTIM), 0.0)
    return taken[0], row["rl/loss"]


def test_on_policy_the_ratio_algorithms_have_one_gradient() -> None:
    """At ratio 1 every surrogate has the slope of the policy gradient, whatever its clip and level."""
    policy = new_policy()
    groups = on_policy(policy, random_groups(policy))
    expected, _ = first_gradient(ALGORITHMS["grpo"](), policy, groups)
    assert expected.norm() > 0.1
    others = [ALGORITHMS[name]() for name in ("gspo", "sapo", "gmpo")]
    others.append(replace(ALGORITHMS["cispo"](), aggregation="sequence_mean", uninformative="keep"))
    others.append(replace(ALGORITHMS["grpo"](), surrogate="logprob"))
    for algo in others:
        gradient, _ = first_gradient(algo, policy, groups)
        # Float32 sums of a few hundred terms in another order.
        assert torch.allclose(gradient, expected, atol=2e-6), algo.surrogate
    token_mean, _ = first_gradient(replace(ALGORITHMS["grpo"](), aggregation="token_mean"), policy, groups)
    assert not torch.allclose(token_mean, expected, atol=1e-3)


def test_updates_are_made_and_counted() -> None:
    for minibatches, epochs in ((1, 1), (2, 1), (1, 3), (3, 2)):
        algo = AlgoConfig(num_minibatches=minibatches, num_epochs=epochs)
        done = play(algo, off_policy=RECOMPUTED, num_steps=1)
        assert done.rows[0]["rl/updates"] == minibatches * epochs


def test_an_update_without_a_token_that_teaches_is_none() -> None:
    """Groups that are left after dropping may be fewer than minibatches; norms are means over real updates."""
    policy = new_policy()
    one = random_groups(policy, 1)
    whole = play(AlgoConfig(), groups=one, num_steps=1)
    parted = play(AlgoConfig(num_minibatches=3), groups=one, num_steps=1)
    assert parted.rows[0]["rl/updates"] == 1
    assert parted.rows[0]["rl/grad_norm"] == whole.rows[0]["rl/grad_norm"] > 0
    assert parted.rows[0]["rl/ratio_drift"] == whole.rows[0]["rl/ratio_drift"] > 0
    assert torch.equal(parted.weights, whole.weights)
    nothing = play(AlgoConfig(), groups=[], num_steps=1)
    assert nothing.rows[0] | {"rl/loss": 0.0, "rl/grad_norm": 0.0, "rl/updates": 0.0} == nothing.rows[0]
    assert "rl/entropy" not in nothing.rows[0]  # unknown is not 0


def membership(groups: list[Group], *, seed: int = 0, step: int = 0, epoch: int = 0) -> dict[str, int]:
    algo = AlgoConfig(num_minibatches=3)
    policy = new_policy()
    objective = Objective(policy, algo, optim=OPTIM, temperature=1.0, max_length=10, seed=seed)
    sequences = training_sequences(with_advantages(groups, algo, WEIGHTS), algo)
    parts = objective._minibatches(sequences, step, epoch)
    assert sorted(id(s) for part in parts for s in part) == sorted(map(id, sequences))
    places: dict[str, int] = {}
    for number, part in enumerate(parts):
        for sequence in part:
            assert places.setdefault(sequence.group, number) == number  # a group is never cut
    return places


def test_minibatches_are_a_function_of_seed_step_epoch_and_names() -> None:
    groups = random_groups(new_policy())
    places = membership(groups)
    assert sorted(places.values()) == [0, 0, 1, 1, 2, 2]
    assert membership(groups[::-1]) == places
    assert membership([*groups[2:], *groups[:3]]) == places  # one problem drawn twice
    for other in ({"seed": 1}, {"step": 1}, {"epoch": 1}):
        assert any(
            membership(groups, **{name: value + i for name, value in other.items()}) != places
            for i in range(3)
        )


def prompt_only_groups(policy: Policy) -> list[Group]:
    """The return is a function of the prompt alone."""
    return [
        make_group(policy, problem, [{"correct": float(index % 2), "format": 0.0}] * 4)
        for index, problem in enumerate(problems())
    ]


PPO = replace(ALGORITHMS["ppo"](), whiten=False)


def critic_of(objective: Objective) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in objective.tensors().items() if "optimizer" not in name}


@pytest.mark.ci
def test_the_critic_learns_what_the_prompt_decides() -> None:
    groups = prompt_only_groups(new_policy())
    done = play(PPO, value=ValueConfig(lr=2e-2, clip=None), groups=groups, num_steps=30, lr=1e-4)
    explained = [row["rl/value_explained"] for row in done.rows]
    assert explained[0] == pytest.approx(0.0, abs=1e-9)  # its head begins at 0
    assert explained[-1] > 0.9
    assert done.rows[-1]["rl/value_loss"] < 0.2 * done.rows[0]["rl/value_loss"]


def test_the_critics_learning_rate_is_five_times_the_policys_unless_given() -> None:
    policy = new_policy()
    assert Critic(policy, ValueConfig(), OPTIM).lr_ratio == pytest.approx(5.0)
    assert Critic(policy, ValueConfig(lr=3e-2), OPTIM).lr_ratio == pytest.approx(3.0)


def test_warm_up_steps_train_the_critic_alone() -> None:
    policy = new_policy()
    objective = Objective(
        policy, PPO, optim=OPTIM, temperature=1.0, max_length=10, value=ValueConfig(warmup_steps=2, lr=1e-2)
    )
    optimizer = Optimizer(policy.model, OPTIM)
    groups = with_advantages(random_groups(policy), PPO, WEIGHTS)
    start, critics = weights_of(policy), [critic_of(objective)]
    for step in range(3):
        row = objective.update(groups, optimizer, 1e-2, step=step)
        critics.append(critic_of(objective))
        assert not torch.equal(critics[-1]["critic/head"], critics[-2]["critic/head"])
        assert torch.equal(weights_of(policy), start) == (step < 2)
        assert row["rl/updates"] == (0 if step < 2 else 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_critic_goes_on_from_a_checkpoint(dtype: torch.dtype) -> None:
    # bfloat16: its master weights are no tensors of the optimizer, but made of two.
    policy = new_policy()
    policy.model.to(dtype)
    value = ValueConfig(lr=1e-2)
    optim = replace(OPTIM, precision="bfloat16_master" if dtype == torch.bfloat16 else "float32")

    def make() -> Objective:
        return Objective(policy, PPO, optim=optim, temperature=1.0, max_length=10, value=value)

    objective, optimizer = make(), Optimizer(policy.model, optim)
    groups = with_advantages(random_groups(policy), PPO, WEIGHTS)
    for step in range(2):
        objective.update(groups, optimizer, 1e-2, step=step)
    stored = {name: tensor.clone() for name, tensor in objective.tensors().items()}
    again = make()
    again.load(stored, objective.state())
    assert again.tensors().keys() == stored.keys()
    for name, tensor in again.tensors().items():
        assert torch.equal(tensor, stored[name]), name
    assert any(name.endswith("/master") for name in stored) == (dtype == torch.bfloat16)


def reference_of(objective: Objective) -> torch.Tensor:
    assert objective._reference is not None
    return torch.cat([p.flatten().clone() for p in objective._reference.model.parameters()])


@pytest.mark.parametrize("options", [{}, {"ref_refresh_every": 2}, {"ref_ema": 0.75}])
def test_the_reference_follows_as_told(options: dict[str, Any]) -> None:
    policy = new_policy()
    algo = AlgoConfig(kl="k2_loss", kl_coef=0.1, **options)
    objective = Objective(policy, algo, optim=OPTIM, temperature=1.0, max_length=10)
    optimizer = Optimizer(policy.model, OPTIM)
    groups = with_advantages(random_groups(policy), algo, WEIGHTS)
    start = expected = weights_of(policy)
    for step in range(4):
        objective.update(groups, optimizer, 1e-2, step=step)
        now = weights_of(policy)
        assert not torch.equal(now, start)
        if "ref_ema" in options:
            expected = 0.75 * expected + 0.25 * now
        elif options and step % 2 == 1:
            expected = now
        # One float32 rounding of a weight of size 1 per step; exact where it is a copy.
        assert torch.allclose(
            reference_of(objective), expected, rtol=0, atol=5e-7 if "ref_ema" in options else 0
        )


@pytest.mark.parametrize(("kl", "factor"), [(0.31, 1.5), (0.29, 1.0), (0.14, 1.0), (0.13, 0.8)])
def test_the_kl_weight_adapts(kl: float, factor: float) -> None:
    coefficients = Coefficients(AlgoConfig(kl="k2_loss", kl_coef=0.1, kl_target=0.2))
    coefficients.end_step(kl=kl, entropy=0.0)
    assert coefficients.kl == pytest.approx(0.1 * factor)


def test_adapted_weights_stay_within_bounds() -> None:
    high = Coefficients(
        AlgoConfig(kl="k2_loss", kl_coef=9.0, kl_target=0.1, entropy_coef=0.998, entropy_target=2.0)
    )
    low = Coefficients(
        AlgoConfig(kl="k2_loss", kl_coef=1e-5, kl_target=0.1, entropy_coef=0.004, entropy_target=2.0)
    )
    high.end_step(kl=5.0, entropy=1.0)
    low.end_step(kl=0.0, entropy=3.0)
    assert (high.kl, low.kl) == (10.0, 1e-5)
    assert high.state()["entropy"] == 1.0
    assert low.state()["entropy"] == 0.0


def test_the_entropy_weight_adapts_and_rests_above_its_target() -> None:
    coefficients = Coefficients(AlgoConfig(entropy_coef=0.1, entropy_target=0.5))
    seen = []
    for entropy in (0.4, 0.45, 0.6, 0.7, 0.4):
        seen.append(coefficients.entropy)
        coefficients.end_step(kl=0.0, entropy=entropy)
    assert seen == pytest.approx([0.1, 0.105, 0.11, 0.0, 0.0])
    assert coefficients.entropy == pytest.approx(0.105)  # 0.11 less two steps, and one more


def test_the_entropy_weight_follows_its_schedule() -> None:
    done = play(AlgoConfig(entropy_coef=0.1, entropy_coef_final=0.3), num_steps=5)
    assert [row["rl/entropy_coef"] for row in done.rows] == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3])


def test_a_step_that_measures_nothing_adapts_nothing() -> None:
    algo = AlgoConfig(kl="k2_loss", kl_coef=0.1, kl_target=0.2, entropy_coef=0.1, entropy_target=0.5)
    done = play(algo, groups=[], num_steps=2)
    assert [row["rl/kl_coef"] for row in done.rows] == [0.1, 0.1]
    assert [row["rl/entropy_coef"] for row in done.rows] == [0.1, 0.1]


def gdpo_groups(policy: Policy) -> list[Group]:
    table = [[(1, 0), (1, 1), (0, 0), (0, 1)], [(0, 1), (0, 0), (0, 0), (0, 0)], [(1, 1)] * 4]
    return [
        make_group(policy, problem, [{"correct": float(c), "format": float(f)} for c, f in row])
        for problem, row in zip(problems(), table, strict=False)
    ]


def test_gdpo_by_hand() -> None:
    """Each reward is a z-score in its group (sample deviation), then weighted, then whitened over 12 samples."""
    groups = with_advantages(gdpo_groups(new_policy()), ALGORITHMS["gdpo"](), WEIGHTS)
    half = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    rare, others = 0.75 / (0.5 + 1e-4), -0.25 / (0.5 + 1e-4)
    sums = [
        *(half - 0.5 * half, half + 0.5 * half, -half - 0.5 * half, -half + 0.5 * half),
        *(0.5 * rare, 0.5 * others, 0.5 * others, 0.5 * others),
        *(0.0, 0.0, 0.0, 0.0),
    ]
    scale = math.sqrt(sum(value * value for value in sums) / 11) + 1e-4
    advantages = [sample.advantage for group in groups for sample in group.samples]
    assert advantages == pytest.approx([value / scale for value in sums])
    assert advantages[8:] == [0.0] * 4  # exactly: this group does not teach
    bounded = with_advantages(
        gdpo_groups(new_policy()), replace(ALGORITHMS["gdpo"](), advantage_clip=0.5), WEIGHTS
    )
    clipped = [sample.advantage for group in bounded for sample in group.samples]
    assert clipped == pytest.approx([min(max(value / scale, -0.5), 0.5) for value in sums])
    assert (min(sums) / scale < -0.5, max(sums) / scale > 0.5) == (True, True)


def test_whitened_advantages_have_mean_0_and_variance_1_over_tokens() -> None:
    policy = new_policy()
    algo = replace(ALGORITHMS["reinforce_pp"](), kl="none", kl_coef=0.0)
    groups = with_advantages(random_groups(policy), algo, WEIGHTS)
    sequences = token_advantages(training_sequences(groups, algo), algo, ValueConfig(), 0.0)
    tokens = torch.cat([s.advantages_T for s in sequences if s.advantages_T is not None])
    assert len(tokens) == sum(len(s.completion_ids) for s in sequences)
    assert float(tokens.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(tokens.var()) == pytest.approx(1.0, abs=1e-6)  # the 1e-8 in the denominator


def test_whitening_leaves_the_kl_of_equal_outcomes_small() -> None:
    """A solved step: what is left is the KL's part, centred; scaled to variance 1 it would be a hundred times it."""
    policy = new_policy()
    algo = ALGORITHMS["reinforce_pp"]()
    groups = [
        make_group(policy, problem, [{"correct": 1.0, "format": 1.0}] * 2) for problem in problems()[:2]
    ]
    sequences = [
        replace(s, ref_logprobs_T=torch.linspace(-3.0, -1.0, len(s.completion_ids)))
        for s in training_sequences(with_advantages(groups, algo, WEIGHTS), algo)
    ]
    filled = token_advantages(sequences, algo, ValueConfig(), 0.01)
    tokens = torch.cat([s.advantages_T for s in filled if s.advantages_T is not None])
    assert float(tokens.mean()) == pytest.approx(0.0, abs=1e-12)
    to_go = [
        0.01 * (ref - torch.tensor(s.sampler_logprobs, dtype=torch.float64)).flip(0).cumsum(0).flip(0)
        for s in sequences
        if (ref := s.ref_logprobs_T) is not None
    ]
    expected = torch.cat(to_go)
    assert torch.allclose(tokens, expected - expected.mean(), atol=1e-9)
    assert 0 < float(tokens.std()) < 0.2


def test_whitening_leaves_nothing_of_equal_advantages() -> None:
    """Their mean is often an ulp off, and what is left would count as a signal."""
    algo = replace(ALGORITHMS["reinforce_pp"](), kl="none", kl_coef=0.0)
    traps = 0
    for hundredths in range(1, 100):
        sequences = [
            TrainingSequence(
                prompt_ids=(1,),
                completion_ids=(2,) * n,
                sampler_logprobs=(-1.0,) * n,
                advantage=hundredths / 100,
            )
            for n in (1, 2, 4)
        ]
        traps += sum([hundredths / 100] * 7) / 7 != hundredths / 100
        filled = token_advantages(sequences, algo, ValueConfig(), 0.0)
        tokens = torch.cat([s.advantages_T for s in filled if s.advantages_T is not None])
        assert tokens.tolist() == [0.0] * 7
    assert traps > 10


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_the_top_entropy_share_counts_tokens(share: float) -> None:
    policy = new_policy()
    algo = AlgoConfig(entropy_top_share=share)
    objective = Objective(policy, algo, optim=OPTIM, temperature=1.0, max_length=10)
    groups = random_groups(policy)
    # Different entropies: all are alike in a model that has learned nothing.
    play_on = Optimizer(policy.model, OPTIM)
    plain = Objective(policy, AlgoConfig(), optim=OPTIM, temperature=1.0, max_length=10)
    for _ in range(3):
        plain.update(with_advantages(groups, AlgoConfig(), WEIGHTS), play_on, 3e-2)
    sequences, _ = objective._prepare(training_sequences(with_advantages(groups, algo, WEIGHTS), algo))
    weights = torch.cat([s.policy_weights_T for s in sequences if s.policy_weights_T is not None])
    num_tokens = sum(len(s.completion_ids) for s in sequences)
    assert len(weights) == num_tokens
    assert set(weights.tolist()) == {0.0, 1.0}
    # Ties are kept: first tokens of the 4 samples of a group have one context.
    assert 0 <= int(weights.sum()) - math.ceil(share * num_tokens) < 4
    counts = [
        int(s.policy_weights_T.sum()) / len(s.completion_ids)
        for s in sequences
        if s.policy_weights_T is not None
    ]
    assert max(counts) - min(counts) > 0.2  # the share is of the step's tokens, not of each completion's


def test_gdpo_leaves_groups_that_do_not_teach_at_exactly_0() -> None:
    """The mean of all sums is a rounding error, no advantage: else every group would count as a signal."""
    policy = new_policy()
    for seed in range(8):
        draw = random.Random(seed)
        groups = [
            make_group(
                policy, problem, [{"correct": draw.random(), "format": draw.random()} for _ in range(3)]
            )
            for problem in problems(5)
        ]
        groups.append(make_group(policy, problems(6)[5], [{"correct": 1 / 3, "format": 1 / 7}] * 3))
        *others, dull = with_advantages(groups, ALGORITHMS["gdpo"](), WEIGHTS)
        assert [sample.advantage for sample in dull.samples] == [0.0] * 3
        assert all(sample.advantage for group in others for sample in group.samples)


def test_one_reward_that_differs_is_enough_to_teach() -> None:
    """Normalised by itself, a reward counts that the sum hides: here correct and format cancel in every sum."""
    policy, algo = new_policy(), ALGORITHMS["gdpo"]()
    tables = [
        [{"correct": 1.0, "format": 0.0}, {"correct": 0.0, "format": 0.0}],
        [{"correct": 1.0, "format": 0.0}, {"correct": 0.5, "format": 1.0}],
        [{"correct": 1.0, "format": 0.5}, {"correct": 1.0, "format": 0.5}],
    ]
    groups = [make_group(policy, p, table) for p, table in zip(problems(3), tables, strict=True)]
    assert is_informative(groups, algo, WEIGHTS) == [True, True, False]
    assert is_informative(groups, AlgoConfig(), WEIGHTS) == [True, False, False]


def test_what_enters_the_denominators() -> None:
    """Scored samples with a token to train on; of those that were cut off only where nothing filters them."""
    policy = new_policy()
    scores = [
        {"correct": 1.0, "format": 0.0},
        {"correct": 0.0, "format": 0.0},
        {"correct": None, "format": 0.0},
    ]
    group = make_group(policy, problems(1)[0], scores, lengths=[3, 4, 5])
    first, second, unscored = group.samples
    members = (
        first,
        replace(second, finish_reason="length"),
        unscored,
        replace(first, index=3, trained=(False,) * 3),  # all of it was written by a tool
        replace(first, index=4, trained=(True, False, True)),
    )
    filled = with_advantages([replace(group, samples=members)], AlgoConfig(), WEIGHTS)
    for overlong, expected in (("none", [0, 1, 4]), ("hard", [0, 1, 4]), ("filter", [0, 4])):
        algo = AlgoConfig(overlong=overlong)  # type: ignore[arg-type]
        (counted,) = counted_samples(filled, algo)
        assert [sample.index for sample in counted] == expected
        sequences = training_sequences(filled, algo)
        # 3 and 2 tokens that are trained, and 4 of the sample that was cut off.
        assert {s.num_group_tokens for s in sequences} == {5 if overlong == "filter" else 9}
    masked = sequences[-1]
    assert masked.sampler_logprobs == (first.sampler_logprobs[0], first.sampler_logprobs[2])


def test_the_tokens_of_highest_entropy_keep_their_weight() -> None:
    """Half of five tokens, rounded up, is three; a weight that a correction gave stays as it is."""
    sequences = [
        TrainingSequence(prompt_ids=(1,), completion_ids=(2, 3), policy_weights_T=torch.tensor([0.5, 0.5])),
        TrainingSequence(prompt_ids=(1,), completion_ids=(4, 5, 6)),
    ]
    entropies = [torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.0, 2.5])]
    kept = keep_top_entropy(sequences, entropies, 0.5, torch.float32)
    weights = [s.policy_weights_T.tolist() for s in kept if s.policy_weights_T is not None]
    assert weights == [[0.5, 0.0], [1.0, 0.0, 1.0]]


def test_sampler_metrics_by_hand() -> None:
    """rho of 2 and 1/2, then of 3: the largest of both parts counts, and sums are over all tokens."""
    tally = Tally()
    for rhos in ([2.0, 0.5], [3.0]):
        sampler_M = torch.full((len(rhos),), -4.0, dtype=torch.float64)
        tally.add(gap_sums(sampler_M + torch.tensor(rhos).double().log(), sampler_M))
        tally.add({"correction_active": 1.0})
    metrics = sampler_metrics(tally, has_correction=True)
    assert metrics == {
        "rl/logprob_gap_mean": pytest.approx((2 * math.log(2) + math.log(3)) / 3),
        "rl/logprob_gap_max": pytest.approx(math.log(3)),
        "rl/ratio_drift": pytest.approx(2.0),
        # rho - 1 - log rho, added up: 1 - 0.5 + 2, and the logarithms of 2 and 1/2 cancel.
        "rl/mismatch_k3": pytest.approx((2.5 - math.log(3)) / 3),
        "rl/effective_samples": pytest.approx(5.5**2 / (3 * (4 + 0.25 + 9))),
        "rl/correction_active": pytest.approx(2 / 3),
    }


def test_critic_metrics_by_hand() -> None:
    """Returns 1, 2, 3, 6 (variance 3.5), start errors 1, -1, 0, 2 (variance 1.25), errors 0, 1, 1, 2."""
    tally = Tally()
    tally.add({"value_tokens": 4, "value_square": 6, "value_clipped": 1, "start_error": 2, "start_square": 6})
    tally.add({"return": 12, "return_square": 50, "value_norm": 5, "value_updates": 2})
    assert critic_metrics(tally) == {
        "rl/value_loss": pytest.approx(0.5 * 6 / 4),
        "rl/value_clipped": 0.25,
        "rl/value_grad_norm": 2.5,
        "rl/value_explained": pytest.approx(1 - 1.25 / 3.5),
    }


def test_means_of_metrics_are_over_the_updates_that_have_them() -> None:
    found = mean_of([{"rl/loss": 1.0, "rl/kl": 4.0}, {"rl/loss": 3.0}])
    assert found == {"rl/loss": 2.0, "rl/grad_norm": 0.0, "rl/kl": 4.0}


def spread_over_ranks() -> dict[str, Any]:
    """What depends on all groups of a step, on this rank's share of them."""
    policy = new_policy()
    groups = random_groups(policy)[rank() :: world_size()]

    def advantages(algo: AlgoConfig) -> list[float | None]:
        return [s.advantage for group in with_advantages(groups, algo, WEIGHTS) for s in group.samples]

    whitening = replace(ALGORITHMS["reinforce_pp"](), kl="none", kl_coef=0.0)
    sequences = training_sequences(with_advantages(groups, whitening, WEIGHTS), whitening)
    filled = token_advantages(sequences, whitening, ValueConfig(), 0.0)
    # Entropies that are larger on the second rank: it keeps more than its share.
    entropies = [torch.arange(s.num_trained) + 4.0 * rank() for s in sequences]
    kept = keep_top_entropy(sequences, entropies, 0.25, torch.float32)
    step = play(AlgoConfig(aggregation="sequence_mean"), groups=groups, num_steps=1).rows[0]
    return {
        "rewards": [[s.reward for s in group.samples] for group in groups],
        "batch": advantages(AlgoConfig(scale="batch")),
        "gdpo": advantages(ALGORITHMS["gdpo"]()),
        "tokens": [x for s in filled if s.advantages_T is not None for x in s.advantages_T.tolist()],
        "entropies": [x for entropy_T in entropies for x in entropy_T.tolist()],
        "kept": [x for s in kept if s.policy_weights_T is not None for x in s.policy_weights_T.tolist()],
        "step": step,
    }


def test_statistics_are_those_of_all_ranks() -> None:
    """A rank that took its own deviation, mean or quantile would train on other advantages, and say nothing."""
    both, alone = run_ranks(2, spread_over_ranks), spread_over_ranks()
    for own in both:
        deviation = statistics.stdev(r for found in both for group in found["rewards"] for r in group) + 1e-4
        batch = [(r - statistics.fmean(group)) / deviation for group in own["rewards"] for r in group]
        assert own["batch"] == pytest.approx(batch, rel=1e-9, abs=1e-9)
    tokens = [x for found in both for x in found["tokens"]]
    assert statistics.fmean(tokens) == pytest.approx(0.0, abs=1e-12)
    assert statistics.variance(tokens) == pytest.approx(1.0, abs=1e-6)  # the 1e-8 in the denominator
    entropies = [x for found in both for x in found["entropies"]]
    floor = sorted(entropies, reverse=True)[math.ceil(0.25 * len(entropies)) - 1]
    assert [x for found in both for x in found["kept"]] == [float(x >= floor) for x in entropies]
    # GDPO's whitening and the whole step, whose numbers on one rank have tests of their own.
    whole = [alone["gdpo"][start : start + 4] for start in range(0, 24, 4)]
    for place, own in enumerate(both):
        assert own["gdpo"] == pytest.approx([x for group in whole[place::2] for x in group], rel=1e-9)
        # Float32 gradients, added up in another order.
        assert own["step"] == pytest.approx(alone["step"], rel=1e-4, abs=1e-6)


def test_whitening_scales_what_a_critic_makes_of_equal_outcomes() -> None:
    """With a critic the tokens' advantages differ though the outcomes are equal: that is its signal, not noise."""
    sequences = [
        TrainingSequence(
            prompt_ids=(1,),
            completion_ids=(2,) * 3,
            sampler_logprobs=(-1.0,) * 3,
            advantage=0.01,
            start_values_T=torch.tensor([0.0, 0.002, 0.004]) * n,
        )
        for n in (1, 2, 4)
    ]
    algo = replace(PPO, whiten=True)
    filled = token_advantages(sequences, algo, ValueConfig(), 0.0)
    tokens = torch.cat([s.advantages_T for s in filled if s.advantages_T is not None])
    assert float(tokens.mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(tokens.std()) == pytest.approx(1.0, rel=1e-2)
