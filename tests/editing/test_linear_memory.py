"""The arithmetic of a linear memory, where the answer is known: float64, against formulas and brute force."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from patient import fresh

from whet.editing import methods, statistics
from whet.editing.edit import write_and_measure
from whet.editing.editor import Editor, Measured, MethodConfig, report_of
from whet.editing.facts import Fact
from whet.editing.memory import Delta, capped, disturbance, null_space, project, rank_one, solve, spread
from whet.editing.methods import TuneConfig, loss_of_facts, mean_keys, memory_output, one_by_one
from whet.editing.metrics import score_facts
from whet.editing.record import Batch, Record
from whet.editing.sites import Contexts, Read, Reader, chosen_memories, hooked, mark_subject
from whet.editing.statistics import digest_of, gather_moments
from whet.editing.targets import ESSENCE, TargetConfig, find_targets
from whet.editing.trace import causal_trace, expected_seconds, locate, num_layer_runs
from whet.types import UserError

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


def test_changes_of_one_matrix_add_up() -> None:
    policy = fresh()
    policy.model.requires_grad_(False)
    (memory,) = chosen_memories(policy.model, (1,))
    before = memory.matrix().clone()
    rows, columns = before.shape
    change = methods.Change()
    parts = [Delta(normal(rows, r, seed=r), normal(r, columns, seed=9 + r)) for r in (1, 3)]
    for n, part in enumerate(parts):
        weight = memory.matrix().norm()
        change.put(memory, part)
        assert change.norms[memory.name] == pytest.approx(float(part.dense().norm() / weight), rel=1e-5)
        assert change.deltas[memory.name].left_DR.shape == (rows, (1, 4)[n])
    total = sum(part.dense() for part in parts)
    close = {"rtol": 1e-5, "atol": 1e-5}  # stored in float32
    torch.testing.assert_close(change.deltas[memory.name].dense().double(), total, **close)
    torch.testing.assert_close(memory.matrix() - before, total, **close)


@pytest.mark.parametrize("clamp", [0.7, 0.02])
def test_targets_are_those_of_adam_on_the_same_loss(clamp: float) -> None:
    """torch's Adam on the loss of the paper, each prompt by itself; delta in units of the memory's output."""
    settings = TargetConfig(steps=4, lr=0.3, kl=0.2, decay=0.4, clamp=clamp, stop_loss=0.0)
    policy = fresh()
    policy.model.requires_grad_(False)
    reader, contexts = Reader(policy), Contexts()
    (memory,) = chosen_memories(policy.model, (1,))
    fact = Fact(subject="Ann Oak", prompt="{} lives in", target="Oslo")
    found = find_targets(reader, memory, [fact], contexts, settings, own_norm=True)

    prompt, essence = (mark_subject(policy.tokenizer, text, fact.subject) for text in (fact.prompt, ESSENCE))
    answer = policy.tokenizer.encode(" Oslo")[-1]
    out = memory_output(reader, memory, [fact])[0].float()
    length = float(out.norm())
    unit = length / len(out) ** 0.5

    def logprobs(ids: tuple[int, ...], place: int, delta: torch.Tensor) -> torch.Tensor:
        def add(x_ND: torch.Tensor) -> torch.Tensor:
            return x_ND.index_add(0, torch.tensor([place]), delta[None])

        with hooked([(memory.module, "out", add)]):
            return reader.logits(reader.hidden([ids])[len(ids) - 1 :][:1]).log_softmax(-1)[0]

    before = logprobs(essence.ids, essence.last, torch.zeros_like(out))
    scaled = torch.zeros_like(out, requires_grad=True)
    adam = torch.optim.Adam([scaled], lr=settings.lr)
    for _ in range(settings.steps):
        delta = scaled * unit
        after = logprobs(essence.ids, essence.last, delta)
        loss = -logprobs(prompt.ids, prompt.last, delta)[answer]
        loss = loss + settings.kl * (after.exp() * (after - before)).sum()
        norm = delta.norm() if bool(delta.detach().norm()) else 0.0
        loss = loss + settings.decay * norm / length**2
        adam.zero_grad()
        loss.backward()
        adam.step()
        with torch.no_grad():
            scaled.copy_(capped(scaled[None] * unit, torch.tensor([settings.clamp * length]))[0] / unit)
    torch.testing.assert_close(found.delta_ED[0], scaled.detach() * unit, rtol=1e-3, atol=1e-4 * unit)
    is_capped = float(found.delta_ED[0].norm()) == pytest.approx(clamp * length, rel=1e-4)
    assert is_capped == (clamp == 0.02)


def test_a_search_ends_where_a_fact_is_sure_enough() -> None:
    policy = fresh()
    policy.model.requires_grad_(False)
    (memory,) = chosen_memories(policy.model, (1,))
    fact = Fact(subject="Ann Oak", prompt="{} lives in", target="Oslo")
    steps = [
        find_targets(
            Reader(policy), memory, [fact], Contexts(), TargetConfig(steps=6, stop_loss=limit), own_norm=True
        ).steps_E.tolist()
        for limit in (0.0, 100.0)
    ]
    assert steps == [[6.0], [1.0]]


def test_statistics_go_on_behind_the_last_saved_window(tmp_path: Path) -> None:
    policy = fresh()
    policy.model.requires_grad_(False)
    (memory,) = chosen_memories(policy.model, (1,))
    windows = [
        tuple(policy.tokenizer.encode(text)) for text in ("Ann Oak lives in Oslo", "Ben Elm eats", "Hello")
    ]
    reader = Reader(policy, budget=1)
    whole = gather_moments(reader, [memory], windows, model_digest="m", folder=tmp_path / "a")[1]
    home = tmp_path / "b" / statistics._key("m", windows)

    def keys_of(ids: tuple[int, ...]) -> torch.Tensor:
        places = range(len(ids))
        read = {"k": Read(memory.module, "in")}
        return reader.read([ids[: n + 1] for n in places], list(places), read)["k"].double()

    keys = keys_of(windows[0])
    begun = {"sum_1": keys.t() @ keys, **statistics._counts(len(windows[0]), 1)}
    statistics._save(home / "partial_1.safetensors", begun)
    done: list[int] = []
    resumed = gather_moments(
        reader, [memory], windows, model_digest="m", folder=tmp_path / "b", advance=done.append
    )[1]
    assert done == [1, 1, 1]
    torch.testing.assert_close(resumed, whole, rtol=1e-5, atol=1e-8)
    rows = torch.cat([keys_of(row) for row in windows])
    torch.testing.assert_close(whole, rows.t() @ rows / len(rows), rtol=1e-4, atol=1e-7)


def a_record() -> tuple[Any, Record]:
    policy = fresh()
    policy.model.requires_grad_(False)
    return policy, Record(model="m", digest=digest_of(policy.model))


def a_batch(policy: Any, record: Record, texts: Sequence[tuple[str, str]], seed: int) -> Batch:
    (memory,) = chosen_memories(policy.model, (1,))
    rows, columns = memory.matrix().shape
    batch = Batch(
        method="memit",
        layers=(1,),
        facts=tuple(Fact(subject=subject, prompt="{} is", target=target) for subject, target in texts),
        deltas={
            memory.name: Delta(normal(rows, 1, seed=seed).float(), normal(1, columns, seed=seed + 1).float())
        },
        keys={1: torch.arange(len(texts) * columns).view(len(texts), columns) + 1000.0 * seed},
    )
    record.keep(policy.model, list(batch.deltas))
    batch.apply(policy.model)
    batch.digest = digest_of(policy.model)
    record.batches.append(batch)
    return batch


def test_originals_are_those_of_before_the_first_batch() -> None:
    policy, record = a_record()
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    for seed in (1, 2):
        a_batch(policy, record, [("Ann", "x")], seed)
    record.restore(policy.model)
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    record.remove(policy.model, ())
    assert record.batches == []


def test_keys_of_earlier_facts_are_those_that_were_written_last() -> None:
    policy, record = a_record()
    first = a_batch(policy, record, [("Ann", "x"), ("Ben", "y")], 1)
    second = a_batch(policy, record, [("Ann", "z"), ("Cid", "x")], 2)
    expected = torch.cat([first.keys[1][1:], second.keys[1]])
    assert torch.equal(record.earlier_keys()[1], expected)
    again = [Fact(subject="Cid", prompt="{} is", target="y")]
    assert torch.equal(record.earlier_keys(again)[1], expected[:2])


def test_a_model_that_is_not_the_records_is_refused() -> None:
    policy, record = a_record()
    record.check(policy.model, "here")
    a_batch(policy, record, [("Ann", "x")], 1)
    record.check(policy.model, "here")
    with torch.no_grad():
        next(policy.model.parameters())[0, 0] += 1
    with pytest.raises(UserError, match="changed since"):
        record.check(policy.model, "here")


def test_tracing_is_the_mean_of_what_restoring_brings_back_over_what_noise_takes() -> None:
    """With what the last layer made of the last token put back the answer is as sure as in the clean run."""
    policy = fresh()
    reader = Reader(policy)
    fact = Fact(subject="Ann", prompt="{} lives in", target="Oslo")
    loud = causal_trace(reader, fact, noise=30.0, num_samples=3, kinds=("hidden",))
    table = loud.effects["hidden"]
    assert float(table[-1, -1]) == pytest.approx(loud.clean - loud.corrupted, abs=1e-5)
    still = causal_trace(reader, fact, noise=1e-6, num_samples=2, kinds=("hidden",))
    assert still.corrupted == pytest.approx(still.clean, abs=1e-5)
    assert abs(loud.corrupted - loud.clean) > 1e-4
    facts = [fact, Fact(subject="Ben", prompt="{} eats", target="figs")]
    _, means = locate(reader, facts, seed=1)
    each = [locate(reader, [one], seed=1)[1] for one in facts]
    assert means == pytest.approx([(a + b) / 2 for a, b in zip(*each, strict=True)], abs=1e-7)


def test_restoring_the_whole_subject_undoes_the_noise_in_the_middle_of_a_prompt() -> None:
    """All subject tokens behind the first layer are clean again: but for what that layer already gave to later ones
    (nothing, as attention there is taken away) the run is the clean one. One of the tokens alone does not do that."""
    policy = fresh()
    with torch.no_grad():
        policy.model.get_parameter("model.layers.0.self_attn.o_proj.weight").zero_()
    fact = Fact(subject="Ann Oak", prompt="The home of {} is in", target="Oslo")
    found = causal_trace(Reader(policy), fact, noise=30.0, num_samples=2, kinds=("hidden",))
    assert found.subject == (3, 4)
    table, lost = found.effects["hidden"], found.clean - found.corrupted
    assert float(found.together["hidden"][0]) == pytest.approx(lost, abs=1e-6)
    assert abs(float(table[0, 4]) - lost) > 1e-4
    assert torch.equal(table[:, :3], torch.zeros(4, 3))  # what stands before the subject was never disturbed


@pytest.mark.parametrize("count", [1, 3])
def test_the_time_told_before_is_that_of_the_trace(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """With a clock that ticks once for each layer that runs, the extrapolation is exact."""
    policy, ticks = fresh(), [0]
    reader, facts = Reader(policy), [Fact(subject="Ann", prompt="{} lives in", target="Oslo")] * count

    def tick(*_: object) -> None:
        ticks[0] += 1

    for layer in policy.model.layers:
        layer.get_submodule("mlp").register_forward_hook(tick)  # a skipped layer does not come to it
    monkeypatch.setattr("whet.editing.trace.time.monotonic", lambda: float(ticks[0]))
    expected = expected_seconds(reader, facts, num_samples=2, window=3)
    ticks[0], runs = 0, []
    for fact in facts:
        causal_trace(reader, fact, num_samples=2, window=3, advance=runs.append)
    assert expected == ticks[0] > count * 8
    assert sum(runs) == count * num_layer_runs(policy.model, window=3)


@pytest.mark.parametrize("method", ["memit", "ft"])
def test_the_time_told_before_is_enough_for_the_edit(
    method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that ticks for each token in a layer, forwards or backwards; and nothing is changed or kept."""
    policy, ticks = fresh(), [0]
    editor, before = Editor(policy, "fresh", cache=tmp_path), digest_of(policy.model)
    facts = [Fact(subject=f"Ann {name}", prompt="{} lives in", target="Oslo") for name in "ABCDEFGHIJKL"]
    editor.set_prose("Ann lives in Oslo. " * 60, 400)

    def tick(_: object, given: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        ticks[0] += len(given[0])
        if out.requires_grad:
            out.register_hook(lambda gradient: ticks.__setitem__(0, ticks[0] + 2 * len(gradient)))

    for layer in policy.model.layers:
        layer.get_submodule("mlp").register_forward_hook(tick)
    monkeypatch.setattr("whet.editing.editor.time.monotonic", lambda: float(ticks[0]))
    own = MethodConfig(
        method=method,
        layers=(1,),
        num_contexts=0,
        target=TargetConfig(steps=12, stop_loss=0.0),
        tune=TuneConfig(steps=12, stop_loss=0.0),
    )
    expected = editor.expected_seconds(facts, own)
    assert digest_of(policy.model) == before
    assert not editor.record.batches
    assert not list(tmp_path.iterdir())
    ticks[0], said, told = 0, list[str](), list[Any]()

    def tell(phase: str, detail: Any = None) -> None:
        told.append(detail)

    def advance(count: int) -> None:
        said.append(told[-1]())

    write_and_measure(editor, facts, own, tell=tell, advance=advance)
    assert 0.95 * ticks[0] <= expected <= 1.5 * ticks[0]
    assert "0 of 12 facts, step 7 of at most 12" in said
    assert said[-1] == "12 of 12 facts, step 0 of at most 12"


def test_drawdown_is_the_relative_rise() -> None:
    policy = fresh()
    facts = [Fact(subject="Ann Oak", prompt="{} lives in", target="Oslo")]
    scores = score_facts(Reader(policy), facts)
    before, after = (Measured(scores=scores, perplexity=value) for value in (10.0, 12.5))
    found = report_of(facts, before, after)["metrics"]["perplexity"]
    assert found == {"before": 10.0, "after": 12.5, "drawdown": 0.25}
