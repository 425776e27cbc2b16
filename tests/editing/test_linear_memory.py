"""The arithmetic of a linear memory, where the answer is known: float64, against formulas and brute force."""

from __future__ import annotations

import pytest
import torch
from patient import fresh

from whet.editing import methods
from whet.editing.facts import Fact
from whet.editing.memory import Delta, capped, disturbance, null_space, project, rank_one, solve, spread
from whet.editing.methods import loss_of_facts, mean_keys, one_by_one
from whet.editing.sites import Contexts, Reader, chosen_memories
from whet.editing.targets import TargetConfig

D, F = 5, 9
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
"""Solving with condition numbers below 1e4 in float64 loses at most that much."""


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moment_of(prose_NF: torch.Tensor) -> torch.Tensor:
    return prose_NF.t() @ prose_NF / len(prose_NF)


def test_rank_one_stores_exactly_and_is_the_least_change() -> None:
    weight, prose, key = normal(D, F, seed=0), normal(40, F, seed=1), normal(F, seed=2)
    value, moment = normal(D, seed=3), moment_of(normal(40, F, seed=1))
    delta = rank_one(value - weight @ key, key, key, moment)
    torch.testing.assert_close((weight + delta.dense()) @ key, value, **CLOSE)
    # Any other change with the same effect on the key disturbs prose more: add what the key does not see.
    other = normal(D, F, seed=4)
    blind = other - torch.outer(other @ key, key) / (key @ key)
    for step in (0.1, -0.1):
        worse = delta.dense() + step * blind
        torch.testing.assert_close((weight + worse) @ key, value, **CLOSE)
        assert (prose @ worse.t()).square().sum() > (prose @ delta.dense().t()).square().sum()


def test_rank_one_with_another_direction_still_hits_the_key() -> None:
    """ROME's published pair of keys: the bare prompt's gets the value, the mean's direction is turned."""
    key, mean, moment = normal(F, seed=2), normal(F, seed=5), moment_of(normal(40, F, seed=1))
    residual = normal(D, seed=3)
    delta = rank_one(residual, mean, key, moment)
    torch.testing.assert_close(delta.dense() @ key, residual, **CLOSE)
    assert not torch.allclose(delta.dense() @ mean, residual)
    turned = torch.linalg.inv(moment) @ mean
    torch.testing.assert_close(delta.dense(), torch.outer(residual, turned) / (turned @ key), **CLOSE)


def test_spread_is_the_minimum_of_its_objective() -> None:
    prose, keys, residual = normal(60, F, seed=1), normal(4, F, seed=2), normal(4, D, seed=3)
    weight = 3.0
    delta = spread(residual, keys, moment_of(prose), weight).dense()
    # The same as ordinary least squares on prose with targets 0 beside the edits, each with its weight.
    rows = torch.cat([keys, prose * (weight / len(prose)) ** 0.5])
    targets = torch.cat([residual, torch.zeros(len(prose), D, dtype=torch.float64)])
    expected = torch.linalg.lstsq(rows, targets, driver="gelsd").solution.t()
    torch.testing.assert_close(delta, expected, **CLOSE)


def test_spread_without_prose_stores_all_and_with_it_less() -> None:
    keys, residual, moment = normal(4, F, seed=2), normal(4, D, seed=3), moment_of(normal(60, F, seed=1))
    tight = spread(residual, keys, moment, 1e-9)
    torch.testing.assert_close(keys @ tight.dense().t(), residual, rtol=0, atol=1e-6)
    moved = [disturbance(spread(residual, keys, moment, weight), moment) for weight in (1e-9, 1.0, 100.0)]
    assert moved == sorted(moved, reverse=True)
    assert moved[2] < 0.1 * moved[0]


def test_spread_couples_edits() -> None:
    """Two equal keys with opposite residuals cancel; one by one they would not."""
    key, moment = normal(1, F, seed=2), moment_of(normal(60, F, seed=1))
    both = spread(torch.tensor([[1.0] * D, [-1.0] * D]), key.repeat(2, 1), moment, 0.1)
    assert both.dense().abs().max() < 1e-12
    assert spread(torch.ones(1, D), key, moment, 0.1).dense().abs().max() > 0.01


def test_null_space_keeps_prose_where_it_is() -> None:
    """Prose that lives in six of nine directions: edits go into the other three, and move nothing."""
    prose = normal(50, 6, seed=1) @ normal(6, F, seed=6)
    moment, keys, residual = moment_of(prose), normal(2, F, seed=2), normal(2, D, seed=3)
    projection = null_space(moment, 1e-9)
    assert round(float(projection.trace())) == F - 6
    torch.testing.assert_close(projection @ projection, projection, **CLOSE)
    delta = project(residual, keys, projection, weight=1e-9)
    torch.testing.assert_close(keys @ delta.dense().t(), residual, rtol=0, atol=1e-6)
    assert (prose @ delta.dense().t()).abs().max() < 1e-9
    assert disturbance(delta, moment) < 1e-9
    assert (prose @ spread(residual, keys, moment, 1e-9).dense().t()).abs().max() < 1e-3


def test_project_is_the_published_formula_and_keeps_earlier_edits() -> None:
    prose = normal(50, 4, seed=1) @ normal(4, F, seed=6)
    projection = null_space(moment_of(prose), 1e-9)
    keys, earlier, residual = normal(2, F, seed=2), normal(2, F, seed=7), normal(2, D, seed=3)
    weight = 0.5
    gram = keys.t() @ keys + earlier.t() @ earlier
    published = residual.t() @ keys @ projection
    published = published @ torch.linalg.inv(gram @ projection + weight * torch.eye(F, dtype=torch.float64))
    delta = project(residual, keys, projection, earlier, weight)
    torch.testing.assert_close(delta.dense(), published, **CLOSE)
    kept = project(residual, keys, projection, earlier, 1e-9).dense()
    assert (earlier @ kept.t()).abs().max() < 1e-5
    assert (earlier @ project(residual, keys, projection, None, 1e-9).dense().t()).abs().max() > 0.01


def test_null_space_takes_its_share_of_the_trace() -> None:
    moment = torch.diag(torch.tensor([10.0, 5.0, 0.2, 0.1]))
    assert float(null_space(moment, 0.02).trace()) == pytest.approx(2)  # 0.3 of 15.3
    assert float(null_space(moment, 0.01).trace()) == pytest.approx(1)
    torch.testing.assert_close(
        null_space(moment, 0.02) @ torch.ones(4, dtype=torch.float64),
        moment.new_tensor([0, 0, 1, 1]).double(),
    )


def test_solve_survives_a_singular_moment() -> None:
    half = normal(F, 3, seed=1)
    matrix, right = half @ half.t(), half @ normal(3, 2, seed=2)
    torch.testing.assert_close(matrix @ solve(matrix, right), right, **CLOSE)
    torch.testing.assert_close(solve(matrix, right), torch.linalg.pinv(matrix) @ right, rtol=1e-6, atol=1e-6)
    whole = moment_of(normal(30, F, seed=3))
    torch.testing.assert_close(solve(whole, whole), torch.eye(F, dtype=torch.float64), **CLOSE)


def test_disturbance_is_the_mean_movement_of_prose() -> None:
    prose = normal(30, F, seed=1)
    delta = Delta(normal(D, 2, seed=2), normal(2, F, seed=3))
    moved = (prose @ delta.dense().t()).square().sum(1).mean().sqrt()
    assert disturbance(delta, moment_of(prose)) == pytest.approx(float(moved), rel=1e-12)


def test_capped_shortens_only_what_is_too_long() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    found = capped(vectors, torch.tensor([1.0, 1.0, 1.0]))
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


def test_one_by_one_gives_each_key_the_value_that_was_searched() -> None:
    """ROME gives the bare prompt's key its value by turning the mean key; R-ROME has the mean in both places."""
    contexts = Contexts(("", "Hello there"))
    fact = Fact(subject="Ann Oak", prompt="{} lives in", target="Oslo")
    for is_refined in (False, True):
        policy = fresh()
        policy.model.requires_grad_(False)
        reader = Reader(policy)
        (memory,) = chosen_memories(policy.model, (1,))
        weight = memory.matrix().clone()
        mean = mean_keys(reader, [memory], [fact], contexts)[1][0].double()
        bare = mean_keys(reader, [memory], [fact], Contexts())[1][0].double()
        assert not torch.allclose(mean, bare, rtol=1e-3)
        moment = moment_of(normal(300, len(mean), seed=3))
        change = one_by_one(
            reader,
            memory,
            [fact],
            contexts,
            moment,
            targets=TargetConfig(steps=2),
            is_refined=is_refined,
        )
        assert change.targets is not None
        delta = change.targets.delta_ED[0].double()
        assert delta.norm() > 0
        own = mean if is_refined else bare
        wanted = weight @ bare + delta  # the output at the bare prompt, and what was searched
        moved = memory.matrix() - weight
        close = {"rtol": 1e-4, "atol": 1e-6}  # the weights are float32
        torch.testing.assert_close(moved @ own, wanted - weight @ own, **close)
        turned = torch.linalg.inv(moment) @ mean
        expected = torch.outer(wanted - weight @ own, turned) / (turned @ own)
        torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-6)


def test_the_loss_of_facts_is_the_mean_over_facts_of_the_mean_over_tokens() -> None:
    policy = fresh()
    facts = [
        Fact(subject="Ann Oak", prompt="{} lives in", target="Oslo"),
        Fact(subject="Ben Elm", prompt="{} eats", target="figs there ."),  # three tokens
    ]
    each = []
    for fact in facts:
        prompt, ids = (policy.tokenizer.encode(text) for text in (fact.text, f"{fact.text} {fact.target}"))
        logprobs = policy.model.logits(torch.tensor([ids]))[0].detach().log_softmax(-1)
        targets = range(len(prompt), len(ids))
        each.append(sum(-float(logprobs[place - 1, ids[place]]) for place in targets) / len(targets))
    for budget in (4096, 1):  # in one pass, and in a pass for each
        found = sum(float(part.detach()) for part in loss_of_facts(Reader(policy, budget), facts))
        assert found == pytest.approx(sum(each) / 2, rel=1e-5)


def test_a_bound_holds_on_both_sides() -> None:
    before = normal(3, 4, seed=0)
    moved = before + torch.tensor([-0.5, -0.01, 0.01, 0.5], dtype=torch.float64)
    weight = torch.nn.Parameter(moved.clone())
    methods._bound(weight, before, 0.1)
    expected = torch.tensor([-0.1, -0.01, 0.01, 0.1], dtype=torch.float64).expand(3, 4)
    torch.testing.assert_close(weight.detach() - before, expected, **CLOSE)
    weight = torch.nn.Parameter(moved.clone())
    methods._bound(weight, before, 0.0)  # none
    assert torch.equal(weight.detach(), moved)
