"""Loss, gradients, weights and metrics do not depend on micro-batches, packing, order and the number of ranks.

Every algorithm and variant of `scene.CASES` starts from rewards and off-policy samples. In float64 (the model's
float32 islands are lifted) 1e-10 separates rounding from mistakes: sums of a few hundred terms of size 1 differ by
1e-14, a lost or doubled token by 1e-3. In float32 rounding is 6e-8 a term, and 1e-5 leaves room for its sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import matrix
import padded
import pytest
import scene
import torch

from whet.algo.config import AlgoConfig, OffPolicyConfig, ValueConfig, check_combination
from whet.algo.packing import TrainingSequence
from whet.model.rotary import rotary_tables
from whet.recipes.rl import ALGORITHMS
from whet.train.optim.step import OptimConfig
from whet.train.sft import train_step

DOUBLE, WIDE = torch.float64, 10**6
RARE = [
    name for name in scene.CASES if name not in matrix.SINGLE and name not in ("reinforce", "2 x 2 updates")
]
"""Variants of which .ci/run has the cells."""
CELLS = [
    *(
        pytest.param(name, DOUBLE, id=f"{name}-float64", marks=[pytest.mark.ci] * (name in RARE))
        for name in scene.CASES
    ),
    *(pytest.param(name, torch.float32, id=f"{name}-float32") for name in matrix.SINGLE),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[matrix.Ranks]:
    """Two processes that start with the first test; whoever asks for their outcomes waits for their end."""
    has_rare = request.config.getoption("--ci") or request.config.getoption("--slow")
    names = [name for name in scene.CASES if has_rare or name not in RARE]
    both = matrix.Ranks(tmp_path_factory.mktemp("ranks"), names, matrix.SINGLE)
    yield both
    both.stop()


@pytest.fixture
def float64_islands() -> Iterator[None]:
    with scene.islands_as(DOUBLE):
        yield


@pytest.mark.some(6)
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(("name", "dtype"), CELLS)
def test_the_step_is_the_definition_however_it_is_cut(name: str, dtype: torch.dtype) -> None:
    for column, (number, where) in matrix.cells(name, dtype).items():
        assert number <= matrix.TOLERANCE[dtype], f"{column}: {where} differs by {number:.1e}"


@pytest.mark.ci
@pytest.mark.parametrize(("name", "dtype"), CELLS)
def test_two_ranks_do_the_step_of_one(name: str, dtype: torch.dtype, ranks: matrix.Ranks) -> None:
    for number, where in matrix.rank_cells(name, dtype, ranks.outcomes(name, dtype)):
        assert number <= matrix.TOLERANCE[dtype], f"{where} differs by {number:.1e}"


def test_the_matrix_has_every_algorithm_and_every_argument() -> None:
    assert ALGORITHMS.keys() <= scene.CASES.keys()
    algos = [case.algo for case in scene.CASES.values()]
    assert {algo.kl for algo in algos} == {"none", "log", "k1_reward", "k2_loss", "k3_loss", "k3_unbiased"}
    assert {algo.scale for algo in algos} == {"group", "batch", "mean", "none"}
    assert {algo.baseline for algo in algos} == {"group_mean", "leave_one_out", "none", "value"}
    assert {algo.surrogate for algo in algos} == {"clip", "geometric", "weight", "sigmoid", "logprob"}
    assert len({algo.aggregation for algo in algos}) == 5
    assert len({case.off_policy.correction for case in scene.CASES.values()}) == 7
    for case in scene.CASES.values():
        value = case.value if case.algo.baseline == "value" else ValueConfig()
        sizes = {"num_prompts": 6, "group_size": 4, "num_steps": 99, "max_new_tokens": 200}
        check_combination(case.algo, case.off_policy, value, weights={"correct": 1.0, "format": 0.1}, **sizes)


def test_the_start_is_not_trivial() -> None:
    """Clips on both sides, an active correction, unscorable and truncated samples, and equal rewards."""
    groups = scene.make_groups()
    for name in ("grpo", "gspo", "gmpo", "dual clip", "everything"):
        metrics = matrix.run(scene.CASES[name], groups, DOUBLE, WIDE).metrics
        assert metrics["rl/clip_high"] > 0
        assert metrics["rl/clip_low"] > 0
        assert 0.2 < metrics["rl/logprob_gap_max"] < 2
        assert metrics["rollout/rl/unscorable"] == 1
        assert metrics["rollout/rl/truncated"] > 0
        assert metrics["rollout/rl/zero_variance_groups"] > 0
    for name, case in scene.CASES.items():
        if case.off_policy.correction != "none":
            active = matrix.run(case, groups, DOUBLE, WIDE).metrics["rl/correction_active"]
            assert 0 < active < 1, name


def test_the_islands_are_lifted(float64_islands: None) -> None:
    assert rotary_tables(scene.make_policy().model.config, torch.device("cpu"))[0].dtype == DOUBLE


def test_the_matrix_sees_a_lost_token() -> None:
    """One token less moves a cell far above its tolerance."""
    groups = list(scene.make_groups())
    case = scene.Case(algo=AlgoConfig(), off_policy=OffPolicyConfig())
    whole = matrix.run(case, groups, DOUBLE, WIDE)
    first = groups[3].samples[0]
    cut = replace(
        first, completion_ids=first.completion_ids[:-1], sampler_logprobs=first.sampler_logprobs[:-1]
    )
    groups[3] = replace(groups[3], samples=(cut, *groups[3].samples[1:]))
    tensors, _ = matrix.difference(matrix.run(case, groups, DOUBLE, WIDE), whole, ["rl/loss"])
    assert tensors[0] > 1e-3


def sft_step(indices: Sequence[int], token_budget: int) -> tuple[float, dict[str, torch.Tensor]]:
    policy = scene.make_policy()
    samples = [s for group in scene.make_groups() for s in group.samples]
    sequences = [
        TrainingSequence(prompt_ids=samples[i].prompt_ids, completion_ids=samples[i].completion_ids)
        for i in indices
    ]
    loss, trained, read, _ = train_step(policy, sequences, OptimConfig(token_budget=token_budget))
    assert trained == sum(len(s.completion_ids) for s in samples)
    assert read == trained + sum(len(s.prompt_ids) for s in samples)
    return loss, {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("token_budget", [1, 23, WIDE])
def test_sft_does_not_depend_on_micro_batches_and_order(token_budget: int, float64_islands: None) -> None:
    model = scene.make_policy().model
    samples = [s for group in scene.make_groups() for s in group.samples]
    weights = dict(model.named_parameters())
    scores, _ = padded.score_rows(model.config, weights, samples, 1.0)
    expected = -torch.cat(scores).mean()
    expected.backward()
    orders = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    for order in (range(len(samples)), orders):
        loss, gradients = sft_step(order, token_budget)
        assert loss == pytest.approx(float(expected.detach()), rel=1e-10)
        assert gradients.keys() == weights.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, weights[name].grad, rtol=1e-10, atol=1e-10)
